"""Convolutions of images whose channels lie last, with what a library computes along with them.

cuDNN adds a bias and a residual and takes the relu while results are in registers; where its kernel for that does not
pass NaN on, which depends on the sizes, cuBLAS may have one that does, for it is a product if the kernel has one tap.
Either is asked once for every kind of call, and PyTorch's own functions are for everything else: gradients, tensors
that are not plain ones, other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.runtime.observers import observed
from fusewright.runtime.operators import is_ordinary

_torch: Any = torch  # some of what follows has no types
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_HALVES = (torch.float16, torch.bfloat16)
# So many channels are multiplied without tf32 while memory is read and written twice.
FEW = 128
Number = int | tuple[int, ...]


class Call(NamedTuple):
    """Operands as PyTorch has them, channels first, in memory that has them last; and how to convolve them."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    residual: Tensor | None
    stride: Number
    padding: Number
    dilation: Number
    groups: int

    @property
    def kind(self) -> Hashable:
        """What a library chooses its kernel by."""
        x, w = self.x, self.w
        settings = (*_tf32(), _torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
        asked = self.bias is None or self.bias.dtype, self.residual is None or self.residual.stride(), *self[4:]
        return x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, *asked, *settings


def conv_last(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    stride: Number = 1,
    padding: Number = 0,
    dilation: Number = 1,
    groups: int = 1,
    relu: bool = False,
) -> Tensor:
    """Convolution of x (N, *, C) with w (O, *k, C/groups) -> (N, *, O), plus bias (O,) and residual (N, *, O), and relu
    of that; dense, whatever its operands are."""
    first = None if residual is None else residual.movedim(-1, 1)
    call = Call(x.movedim(-1, 1), w.movedim(-1, 1), bias, first, stride, padding, dilation, groups)
    y = _way(call)(call) if relu and _may_be_one(x, w, bias, residual) else _plain(call, relu)
    return y.movedim(1, -1).contiguous()


def _may_be_one(*tensors: Tensor | None) -> bool:
    """Whether a library may be called for these: it knows no gradients, and nothing of what may watch."""
    plain = all(t is None or (is_ordinary(t) and t.is_cuda) for t in tensors)
    if not plain or observed() or not torch.backends.cudnn.enabled:
        return False
    x = tensors[0]
    assert x is not None
    known = x.ndim == 4 and x.numel() > 0 and x.dtype in (torch.float32, *_HALVES)
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return known and not gradients


def _plain(call: Call, relu: bool = True) -> Tensor:
    y = _CONV[call.x.ndim - 2](call.x, call.w, call.bias, *call[4:])
    y = y if call.residual is None else y + call.residual
    return torch.relu(y) if relu else y


def _by_cudnn(call: Call) -> Tensor:
    pairs = ([n, n] if isinstance(n, int) else list(n) for n in (call.stride, call.padding, call.dilation))
    y: Tensor
    if call.residual is None:
        y = _torch.cudnn_convolution_relu(call.x, call.w, call.bias, *pairs, call.groups)
    else:
        y = _torch.cudnn_convolution_add_relu(call.x, call.w, call.residual, 1.0, call.bias, *pairs, call.groups)
    return y


def _by_cublas(call: Call) -> Tensor:
    (n, channels, h, w), features = call.x.shape, call.w.shape[0]
    rows = call.x.permute(0, 2, 3, 1).view(n * h * w, channels)
    found: Tensor = _torch._addmm_activation(call.bias, rows, call.w.view(features, channels).t())
    return found.view(n, h, w, features).permute(0, 3, 1, 2)


def _is_product(call: Call) -> bool:
    """Whether cuBLAS may compute it, no less exactly than a convolution, and in less time than more passes take."""
    one_tap = call.w.shape[2:].numel() == 1 and call.stride in (1, (1, 1)) and call.padding in (0, (0, 0))
    if not one_tap or call.groups != 1 or call.residual is not None or call.bias is None:
        return False
    convolutions, products = _tf32()
    if call.x.dtype != torch.float32 or convolutions == products:
        return True
    return convolutions and call.x.shape[1] <= FEW


def _tf32() -> tuple[bool, bool]:
    """Whether convolutions and products may use tf32."""
    backends = _torch.backends
    own = backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision
    convolutions, products = ((backends.fp32_precision if value == "none" else value) == "tf32" for value in own)
    return convolutions, products


Way = Callable[[Call], Tensor]
_known: dict[Hashable, Way] = {}
# Kinds of calls that are remembered: those of a few networks at a few sizes.
_MOST = 4096


def _way(call: Call) -> Way:
    """Who computes this kind of call."""
    kind = call.kind
    if kind in _known:
        return _known[kind]
    if torch.cuda.is_current_stream_capturing():
        return _plain  # nobody can be asked
    if len(_known) >= _MOST:
        _known.clear()
    ways: list[Way] = [_by_cudnn]
    if _is_product(call):
        ways.append(_by_cublas)
    _known[kind] = next((way for way in ways if _passes_nan_on(way, call)), _plain)
    return _known[kind]


def _passes_nan_on(way: Way, call: Call) -> bool:
    """Whether NaN in an operand are NaN in the result, as where PyTorch's own functions compute it."""
    try:
        x, residual = torch.zeros_like(call.x), None
        x[0, 0, x.shape[2] // 2, x.shape[3] // 2] = float("nan")
        if call.residual is not None:
            residual = torch.zeros_like(call.residual)
            residual[-1, -1, -1, -1] = float("nan")
        asked = call._replace(x=x, residual=residual)
        return torch.equal(way(asked).isnan(), _plain(asked).isnan())
    except (RuntimeError, AttributeError):  # it is not there, not for these sizes, or there is no memory to ask
        return False
