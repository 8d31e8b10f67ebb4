"""Attention as PyTorch's own kernels compute it, or as the model spells it out where those cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention

from fusewright.runtime.observers import observed

# Keys up to which the memory-efficient kernel is the fastest: tiles of the others, and the scores of windows, are
# mostly empty.
SHORT = 64
# Numbers that rows of its masks begin at multiples of.
ALIGNED = 8
_KERNEL: Callable[..., Any] | None = getattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", None)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, scale: float, turned: bool = False
) -> Tensor:
    """softmax(scale q k^T + mask) v of q (N, H, L, E), k (N, H, S, E) and v (N, H, S, D), with a mask that is added:
    (N, H, L, D), or (N, L, H, D) where it is `turned`; dense.

    The kernels have no second derivative, and so gradients are those of what they stand for; a CPU's lose NaN.
    """
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, mask) if t is not None)
    if differentiated or observed() or not q.is_cuda:
        scores = scale * q @ k.mT
        y = torch.softmax(scores if mask is None else scores + mask, -1) @ v
    elif k.shape[2] <= SHORT and (memory_efficient := _memory_efficient(q, k, v, mask)) is not None:
        y = memory_efficient(q, k, v, in_rows(mask, (*q.shape[:3], k.shape[2])), False, scale=scale)[0]
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return (y.transpose(1, 2) if turned else y).contiguous()


def _memory_efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Callable[..., Any] | None:
    """The kernel for short rows, which PyTorch may be asked about and has no public name; or None."""
    try:
        fits = can_use_efficient_attention(SDPAParams(q, k, v, mask, 0.0, False, False))
    except TypeError:  # other parameters
        return None
    return _KERNEL if fits else None


def in_rows(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The mask for all of `shape`, its rows as aligned as the kernel wants them."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    apart = any(n % ALIGNED for n in mask.stride()[:-1]) or mask.data_ptr() % (ALIGNED * mask.element_size())
    if columns == 1 or apart or mask.stride(-1) != 1:
        columns = shape[-1]
        mask = F.pad(mask.expand(*mask.shape[:-1], columns), (0, -columns % ALIGNED)).contiguous()[..., :columns]
    return mask.expand(shape)
