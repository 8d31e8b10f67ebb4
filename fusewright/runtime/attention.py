"""Attention as PyTorch's own kernels compute it, or as the model spells it out where those cannot follow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.runtime.observers import observed


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
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return (y.transpose(1, 2) if turned else y).contiguous()
