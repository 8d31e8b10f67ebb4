"""The semantic operations: each a frozen record of its attributes that can infer its result's type.

ATen's hundreds of spellings normalise into these (`fusewright.capture.normalize`); whatever does not is `Opaque` and
runs as it did.  Shapes below name dimensions as N (batch), C (input channels), O (output channels), * (spatial).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal

import sympy
import torch
import torch.nn.functional as F

from fusewright.ir import pointwise
from fusewright.ir.overloads import allocates, has_statistics
from fusewright.ir.pointwise import Scalar
from fusewright.ir.types import Op, Size, TensorType, Types, broadcast, main_device, numel, require, size
from fusewright.ir.views import (
    Cat,
    Expand,
    Flip,
    Fold,
    Grid,
    Interpolate,
    Pad,
    Permute,
    Reshape,
    Roll,
    Slice,
    Unfold,
    Upsample,
    Windows,
)
from fusewright.tree import tree_flatten

__all__ = [
    "FIXED",
    "NEVER",
    "Arg",
    "Buffer",
    "Cast",
    "Cat",
    "Constant",
    "Conv",
    "Cross",
    "Detach",
    "Dropout",
    "Embedding",
    "Expand",
    "Flip",
    "Fold",
    "Full",
    "Grid",
    "Input",
    "Interpolate",
    "Item",
    "Matmul",
    "Nll",
    "Norm",
    "Number",
    "Op",
    "Opaque",
    "Pad",
    "Param",
    "Permute",
    "Pointwise",
    "Pool",
    "Positions",
    "RangeSum",
    "Reduce",
    "Reshape",
    "Roll",
    "Scan",
    "Size",
    "Slice",
    "Slot",
    "Softmax",
    "Source",
    "Statistics",
    "TensorType",
    "Track",
    "Transfer",
    "Types",
    "Unfold",
    "Upsample",
    "Vector",
    "Windows",
    "broadcast",
    "numel",
    "require",
    "size",
]


@dataclass(frozen=True)
class Source(Op):
    """A value the graph does not compute."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device

    def infer(self, types: Types) -> TensorType:
        return TensorType(self.shape, self.dtype, self.device)


@dataclass(frozen=True)
class Input(Source):
    """A tensor argument of the model; `index` counts the flat tensor inputs."""

    name: str
    index: int


@dataclass(frozen=True)
class Param(Source):
    """A parameter, by its dotted path in the module."""

    path: str


@dataclass(frozen=True)
class Buffer(Source):
    """A buffer, by its dotted path in the module."""

    path: str


@dataclass(frozen=True)
class Constant(Source):
    """A tensor the trace holds (a plain tensor attribute, a literal), by its key in the capture's constants."""

    key: str


@dataclass(frozen=True)
class Number(Op):
    """A Python number; it promotes as Python numbers do.  `value` may be an expression in the batch symbol."""

    value: Scalar | sympy.Expr

    def infer(self, types: Types) -> TensorType:
        if isinstance(self.value, bool):
            return TensorType((), torch.bool, torch.device("cpu"), weak=True)
        whole = isinstance(self.value, int) or (isinstance(self.value, sympy.Expr) and bool(self.value.is_integer))
        return TensorType((), torch.int64 if whole else torch.float64, torch.device("cpu"), weak=True)


@dataclass(frozen=True)
class Full(Op):
    """A tensor of one value."""

    shape: tuple[Size, ...]
    value: Scalar
    dtype: torch.dtype
    device: torch.device

    def infer(self, types: Types) -> TensorType:
        return TensorType(self.shape, self.dtype, self.device)


@dataclass(frozen=True)
class Vector(Op):
    """A small literal tensor of the given values, shape (len(values),); e.g. one divisor per pooling slot."""

    values: tuple[Scalar, ...]
    dtype: torch.dtype
    device: torch.device

    def infer(self, types: Types) -> TensorType:
        return TensorType((len(self.values),), self.dtype, self.device)


@dataclass(frozen=True)
class Positions(Op):
    """(start + step i) % modulo at i, of whole numbers from 0 on, as ``torch.arange`` and a remainder give: (length,).

    start >= 0, step > 0 and modulo > 0, or none.
    """

    length: Size
    start: int
    step: int
    modulo: int | None
    dtype: torch.dtype
    device: torch.device

    def infer(self, types: Types) -> TensorType:
        require(self.start >= 0 and self.step > 0 and (self.modulo is None or self.modulo > 0), f"no {self}")
        return TensorType((self.length,), self.dtype, self.device)

    @property
    def end(self) -> int | None:
        """What all of them are less than, where that is known."""
        last = self.start + self.step * (self.length - 1) + 1 if isinstance(self.length, int) else None
        return min((n for n in (last, self.modulo) if n is not None), default=None)


# What a model has, or is made of nothing: of a known size, the same in every call.
FIXED = (Param, Buffer, Constant, Number, Full, Vector, Positions)


@dataclass(frozen=True)
class Conv(Op):
    """n-d convolution of x (N, C, *) with w (O, C/groups, *k), transposed (C, O/groups, *k); bias (O,) or None.

    `padding` is (left, right) zeros per dimension; where negative, so many elements are left out.  Transposed:
    `y[o, s*p + d*u - left] += x[c, p] * w[c, o, u]`, of length (in-1)*s - left - right + d*(k-1) + output_padding + 1.
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def infer(self, types: Types) -> TensorType:
        x, w = types[0], types[1]
        assert x is not None and w is not None
        n = len(self.stride)
        require(len(x.shape) == n + 2 and len(w.shape) == n + 2, f"conv{n}d of {x.shape} with weight {w.shape}")
        require(x.dtype == w.dtype, f"conv{n}d of {x.dtype} with weight {w.dtype}")
        channels = w.shape[0] if self.transposed else w.shape[1] * self.groups
        require(x.shape[1] == channels, f"conv{n}d of {x.shape} with weight {w.shape} and {self.groups} groups")
        out = w.shape[1] * self.groups if self.transposed else w.shape[0]
        return TensorType((x.shape[0], out, *self.spatial(x.shape[2:], w.shape[2:])), x.dtype, x.device)

    def spatial(self, lengths: Sequence[Size], kernel: Sequence[Size]) -> tuple[Size, ...]:
        """Output length per spatial dimension."""
        result: list[Size] = []
        for i, (length, k) in enumerate(zip(lengths, kernel, strict=True)):
            reach = self.dilation[i] * (k - 1)
            if self.transposed:
                extra = self.output_padding[i] + 1 - sum(self.padding[i])
                result.append(size((length - 1) * self.stride[i] + reach + extra))
            else:
                result.append(size((length + sum(self.padding[i]) - reach - 1) // self.stride[i] + 1))
        return tuple(result)


@dataclass(frozen=True)
class ConvLast(Op):
    """Convolution of images whose channels lie last, x (N, *, C), with w (O, *k, C/groups), plus bias (O,) and residual
    (N, *, O) where they are not None, and `relu` of that: what a library computes in one call on a GPU."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    relu: bool = False

    def infer(self, types: Types) -> TensorType:
        x, w, bias, residual = types
        assert x is not None and w is not None
        conv = Conv(self.stride, tuple((p, p) for p in self.padding), self.dilation, self.groups)
        first = x._replace(shape=(x.shape[0], x.shape[-1], *x.shape[1:-1]))
        found = conv.infer((first, w._replace(shape=(w.shape[0], w.shape[-1], *w.shape[1:-1]))))
        found = found._replace(shape=(found.shape[0], *found.shape[2:], found.shape[1]))
        require(bias is None or bias.shape == found.shape[-1:], f"bias {bias and bias.shape} of {found.shape}")
        require(residual in (None, found), f"{residual} added to {found}")
        return found


@dataclass(frozen=True)
class Matmul(Op):
    """x (..., M, K) @ w (..., K, N) [(..., N, K) when `transpose_w`] + bias (N,) or None; batches broadcast.

    Where it `convolves`, the model has a convolution in its place: a kernel may round as convolutions are allowed to.
    """

    transpose_w: bool = False
    convolves: bool = False

    def infer(self, types: Types) -> TensorType:
        x, w = types[0], types[1]
        assert x is not None and w is not None
        require(len(x.shape) >= 2 and len(w.shape) >= 2, f"matmul of {x.shape} with {w.shape}")
        k, n = (w.shape[-1], w.shape[-2]) if self.transpose_w else (w.shape[-2], w.shape[-1])
        require(x.shape[-1] == k and x.dtype == w.dtype, f"matmul of {x.shape} {x.dtype} with {w.shape} {w.dtype}")
        return TensorType((*broadcast(x.shape[:-2], w.shape[:-2]), x.shape[-2], n), x.dtype, x.device)

    def is_grouped(self, x: tuple[Size, ...], w: tuple[Size, ...]) -> bool:
        """Whether x (N, g, 1, K) meets w (g, O, K): one vector per sample and group, one weight per group."""
        return self.transpose_w and len(x) == 4 and len(w) == 3 and x[2] == 1 and x[1] == w[0]


@dataclass(frozen=True)
class Pool(Op):
    """Pooling over the last len(kernel) dimensions, as PyTorch's `max_pool`/`avg_pool` define it (symmetric padding).

    ``min`` is -max_pool(-x): its padding is +inf.  Average pooling has dilation 1; `divisor` overrides the window size.
    """

    kind: Literal["max", "min", "avg"]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor: int | None = None

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        n = len(self.kernel)
        require(len(x.shape) > n, f"{self.kind} pooling over {n} dimensions of {x.shape}")
        pooled = tuple(self.length(i, length) for i, length in enumerate(x.shape[-n:]))
        return TensorType((*x.shape[:-n], *pooled), x.dtype, x.device)

    def length(self, i: int, length: Size) -> Size:
        """Output length along dimension `i`; with ceil_mode a window starts inside the input or its left padding."""
        free = length + 2 * self.padding[i] - self.dilation[i] * (self.kernel[i] - 1) - 1
        if not self.ceil_mode:
            return size(free // self.stride[i] + 1)
        slots = -(-free // self.stride[i]) + 1
        require(isinstance(slots, int) and isinstance(length, int), "ceil_mode pooling over a symbolic dimension")
        return slots - 1 if (slots - 1) * self.stride[i] >= length + self.padding[i] else slots

    @property
    def overlaps(self) -> bool:
        """Whether windows share elements, so that there may be more to pool than there are elements."""
        windows = zip(self.kernel, self.stride, self.dilation, strict=True)
        return any(dilation * i % stride == 0 for kernel, stride, dilation in windows for i in range(1, kernel))


@dataclass(frozen=True)
class Slot:
    """One output slot of a range sum: `scale * sum(x[start:stop:step])`; empty when start >= stop."""

    start: int
    stop: int
    step: int
    scale: float

    @property
    def count(self) -> int:
        return max(0, -(-(self.stop - self.start) // self.step))

    @property
    def end(self) -> int:
        """The index behind the last one of a slot that is not empty; `stop` may lie farther."""
        return self.start + (self.count - 1) * self.step + 1


@dataclass(frozen=True)
class RangeSum(Op):
    """Along each listed dimension, one scaled sum over an arithmetic index range per output slot; dimensions are kept.

    `table` holds (dimension, slots), dimensions ascending.  Ranges are added directly, never as differences, so a
    non-finite value reaches exactly the slots whose range holds it.  `dtype` is the type of the result, and sums are
    carried in it (see `fusewright.codegen.ranges` for how far).  Those that are to be `written` no kernel forms on its
    way to something else.
    """

    table: tuple[tuple[int, tuple[Slot, ...]], ...]
    dtype: torch.dtype
    written: bool = False

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        shape = list(x.shape)
        for dim, slots in self.table:
            length = shape[dim]
            require(isinstance(length, int), f"range sum along symbolic dimension {dim} of {x.shape}")
            inside = all(s.start >= s.stop or (s.start >= 0 and s.stop <= length and s.step >= 1) for s in slots)
            require(inside, f"range sum along dimension {dim} of {x.shape} reaches outside")
            shape[dim] = len(slots)
        return TensorType(tuple(shape), self.dtype, x.device)


@dataclass(frozen=True)
class Pointwise(Op):
    """One function from the table in `fusewright.ir.pointwise`, operands broadcast, with Python-number promotion."""

    fn: str
    params: tuple[Scalar | str, ...] = ()

    def infer(self, types: Types) -> TensorType:
        operands = [t for t in types if t is not None]
        shape: tuple[Size, ...] = ()
        for operand in operands:
            shape = broadcast(shape, operand.shape)
        tensors = [t for t in operands if not t.weak] or operands
        device = main_device(t.device for t in tensors)
        kinds = tuple((t.weak, len(t.shape) > 0, t.dtype) for t in operands)
        return TensorType(shape, _pointwise_dtype(self.traits.torch, kinds), device)

    @property
    def traits(self) -> pointwise.Traits:
        return pointwise.traits(self.fn, self.params)

    @property
    def refuses(self) -> bool:
        """Whether there are numbers that eager does not answer."""
        return self.traits.admits is not None


@dataclass(frozen=True)
class Cross(Op):
    """Cross products of the vectors of three numbers along `dim`; operands, which are of one dtype, broadcast."""

    dim: int

    def infer(self, types: Types) -> TensorType:
        a, b = types
        assert a is not None and b is not None
        fits = len(a.shape) == len(b.shape) and a.shape[self.dim] == b.shape[self.dim] == 3 and a.dtype == b.dtype
        require(fits, f"cross products along {self.dim} of {a.shape} and {b.shape}")
        return TensorType(broadcast(a.shape, b.shape), a.dtype, a.device)


@dataclass(frozen=True)
class Cast(Op):
    """The same values in another dtype."""

    dtype: torch.dtype

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        return TensorType(x.shape, self.dtype, x.device)


@dataclass(frozen=True)
class Detach(Op):
    """The same tensor, but no gradient comes back through it."""

    def infer(self, types: Types) -> TensorType:
        assert types[0] is not None
        return types[0]


@dataclass(frozen=True)
class Transfer(Op):
    """A tensor without dimensions on another device than the one that it comes from."""

    device: torch.device

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        require(not x.shape, f"transfer of a tensor of shape {x.shape}")
        return TensorType((), x.dtype, self.device)


ReduceKind = Literal["sum", "mean", "max", "min", "logsumexp", "var", "std", "norm", "prod", "argmax", "argmin"]


@dataclass(frozen=True)
class Reduce(Op):
    """A reduction over `dims` (ascending); `correction` belongs to ``var`` and ``std``, `dtype` to sum, mean, prod.

    A ``norm`` is the root of a sum of squares.  Where it is 0, so is its gradient, and that of ``std`` likewise: the
    gradient of a root would be NaN there.

    An ``argmax`` or ``argmin`` is an index of int64 without a gradient, counted row by row through `dims`, which are
    neighbours: that of the first NaN, or else of the first of the greatest or least.

    first   the gradient of a max or min over neighbouring dimensions goes to the first of several, counted likewise
            (``torch.max(x, dim)``, a max pool), else they share it evenly (``torch.amax``)
    """

    kind: ReduceKind
    dims: tuple[int, ...]
    keepdim: bool = False
    correction: float = 1
    dtype: torch.dtype | None = None
    first: bool = False

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        require(not self.first or self.kind in ("max", "min"), f"the first of {self.kind}")
        require(all(0 <= d < len(x.shape) for d in self.dims), f"{self.kind} over {self.dims} of {x.shape}")
        counted = bool(self.dims) and self.dims == tuple(range(self.dims[0], self.dims[-1] + 1))
        require(counted or not (self.gives_index or self.first), f"{self.kind} through {self.dims}")
        kept = [1 if i in self.dims else d for i, d in enumerate(x.shape)]
        shape = kept if self.keepdim else [d for i, d in enumerate(x.shape) if i not in self.dims]
        promoted = self.kind in ("sum", "prod") and not (x.dtype.is_floating_point or x.dtype.is_complex)
        whole = promoted or self.gives_index
        return TensorType(tuple(shape), self.dtype or (torch.int64 if whole else x.dtype), x.device)

    @property
    def gives_index(self) -> bool:
        """Whether it tells where an element is, not what it is."""
        return self.kind in ("argmax", "argmin")


@dataclass(frozen=True)
class Extreme(Op):
    """The greatest or the least along `dim`, and where the first of them is: two results, as programs call for both."""

    kind: Literal["max", "min"]
    dim: int
    keepdim: bool

    def infer(self, types: Types) -> TensorType:
        return Reduce(self.kind, (self.dim,), self.keepdim, first=True).infer(types)


ScanKind = Literal["sum", "prod", "max", "min", "logsumexp"]


@dataclass(frozen=True)
class Scan(Op):
    """Prefix sums along `dim`, y[i] = x[0] + ... + x[i], or what else joins elements.

    `dtype` belongs to sum and prod and is that of the result, to which x is converted first; without it, integers are
    joined in int64.
    """

    kind: ScanKind
    dim: int
    dtype: torch.dtype | None = None

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        require(0 <= self.dim < len(x.shape), f"prefixes along dimension {self.dim} of {x.shape}")
        promoted = self.kind in ("sum", "prod") and not (x.dtype.is_floating_point or x.dtype.is_complex)
        return TensorType(x.shape, self.dtype or (torch.int64 if promoted else x.dtype), x.device)


@dataclass(frozen=True)
class Softmax(Op):
    """Softmax, or its logarithm, along `dim`."""

    dim: int
    log: bool = False

    def infer(self, types: Types) -> TensorType:
        assert types[0] is not None
        return types[0]


@dataclass(frozen=True)
class Attention(Op):
    """softmax(scale q k^T + mask) v of q (N, H, L, E), k (N, H, S, E), v (N, H, S, D), and a mask that is added and
    broadcast to (N, H, L, S), or None; row by row, `turned` as (N, L, H, D)."""

    scale: float
    turned: bool = False

    def infer(self, types: Types) -> TensorType:
        q, k, v, mask = types
        assert q is not None and k is not None and v is not None
        require(len(q.shape) == len(k.shape) == len(v.shape) == 4, f"attention of {q.shape}, {k.shape}, {v.shape}")
        require(q.shape[:2] == k.shape[:2] == v.shape[:2], f"attention of {q.shape} to {k.shape} and {v.shape}")
        require(
            q.shape[3] == k.shape[3] and k.shape[2] == v.shape[2], f"attention of {q.shape} to {k.shape}, {v.shape}"
        )
        require(q.dtype == k.dtype == v.dtype, f"attention of {q.dtype} to {k.dtype} and {v.dtype}")
        n, h, length, _ = q.shape
        scores = (n, h, length, k.shape[2])
        added = mask is None or (mask.dtype == q.dtype and broadcast(mask.shape, scores) == scores)
        require(added, f"mask {mask} of scores {scores}")
        shape = (n, length, h, v.shape[3]) if self.turned else (n, h, length, v.shape[3])
        return TensorType(shape, q.dtype, q.device)


@dataclass(frozen=True)
class Norm(Op):
    """A normalisation of x; arguments (x, weight, bias, running_mean, running_var), each but x may be None.

    batch      over all but dimension 1; `training` uses and updates statistics (then `serial` makes it unique)
    instance   per sample and channel, over the spatial dimensions
    group      per sample and group of C/groups channels
    layer, rms over the last `trailing` dimensions
    """

    kind: Literal["batch", "instance", "group", "layer", "rms"]
    eps: float | None
    training: bool = False
    momentum: float = 0.1
    groups: int = 1
    trailing: int = 1
    serial: int | None = None

    @property
    def effectful(self) -> bool:
        return self.serial is not None

    @property
    def running(self) -> bool:
        """Whether it uses running statistics, and none of x."""
        return self.kind in ("batch", "instance") and not self.training

    def infer(self, types: Types) -> TensorType:
        assert types[0] is not None
        return types[0]


@dataclass(frozen=True)
class Statistics(Op):
    """Of each channel of x (N, C, *), over everything else, (4, C): mean, 1 / sqrt(variance + eps), and what running
    statistics take in of the mean and of the unbiased variance: `momentum` times these.

    They are of float32, or of float64 where x is.
    """

    eps: float
    momentum: float = 0.1

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        require(len(x.shape) > 1, f"channels of {x.shape}")
        return TensorType((4, x.shape[1]), torch.promote_types(x.dtype, torch.float32), x.device)


@dataclass(frozen=True)
class Track(Op):
    """Running statistics take in those of a batch, in place; arguments (C,): what they take in of the mean and of the
    variance, which `momentum` has been multiplied into, and the running mean and variance.

    It is ordered and unique by `serial`.
    """

    momentum: float
    serial: int

    @property
    def effectful(self) -> bool:
        return True

    def infer(self, types: Types) -> TensorType:
        assert types[2] is not None
        return types[2]


@dataclass(frozen=True)
class Dropout(Op):
    """Dropout in training mode: draws from the random stream, so it is ordered and unique by `serial`."""

    p: float
    serial: int

    @property
    def effectful(self) -> bool:
        return True

    def infer(self, types: Types) -> TensorType:
        assert types[0] is not None
        return types[0]


@dataclass(frozen=True)
class Embedding(Op):
    """Rows of a weight (V, D) at indices (*) of int64 or int32: (*, D).

    The first attributes are those of ``F.embedding`` and matter to the weight's gradient alone; `padding_idx` -1 is
    none.  Where it `wraps`, negative indices count from the end, as those of ``weight[indices]`` do.
    """

    padding_idx: int = -1
    scale_grad_by_freq: bool = False
    sparse: bool = False
    wraps: bool = False

    def infer(self, types: Types) -> TensorType:
        weight, indices = types
        assert weight is not None and indices is not None
        require(len(weight.shape) == 2, f"embedding in a weight of {weight.shape}")
        require(indices.dtype in (torch.int64, torch.int32), f"embedding of indices of {indices.dtype}")
        return TensorType((*indices.shape, weight.shape[1]), weight.dtype, weight.device)


# What is ignored by a loss of classes that ignores none.
NEVER = -(2**63)


@dataclass(frozen=True)
class Nll(Op):
    """-weight[t] x[n, t] of x (N, C, *), classes t (N, *) of int64 and a weight (C,), or None: (N, *), or one number.

    Where t is `ignore` it is 0; any other t that is no class is an error, as in ``F.nll_loss``.  A mean is the sum over
    that of the weights.
    """

    ignore: int = -100
    reduction: Literal["none", "mean", "sum"] = "none"

    def infer(self, types: Types) -> TensorType:
        x, target, weight = types
        assert x is not None and target is not None
        require(len(x.shape) >= 2 and x.dtype.is_floating_point, f"classes of {x.shape} {x.dtype}")
        shape = (x.shape[0], *x.shape[2:])
        require(target.shape == shape and target.dtype == torch.int64, f"classes {target} of {x.shape}")
        require(weight is None or (weight.shape, weight.dtype) == ((x.shape[1],), x.dtype), f"{weight} of {x.shape}")
        return TensorType(shape if self.reduction == "none" else (), x.dtype, x.device)


# Of what operations leave out.
_DROPOUT = ("dropout_p", "dropout")
# Opaque operations that launch the same in every call, of whatever values.
_REPEATABLE = frozenset(
    """
    scaled_dot_product_attention arange full zeros ones eye zeros_like ones_like full_like new_zeros new_ones
    new_full gather index_select take_along_dim roll flip tril triu cumsum cumprod argmax argmin remainder
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d grid_sampler grid_sampler_2d grid_sampler_3d pixel_shuffle pixel_unshuffle channel_shuffle
    im2col col2im einsum bmm baddbmm diagonal diag_embed unfold stack meshgrid masked_fill
    bitwise_and bitwise_or bitwise_not __and__ __or__ __xor__ all any norm linalg_vector_norm glu pad constant_pad_nd
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Arg:
    """The place of tensor argument `index` in an opaque call."""

    index: int


@dataclass(frozen=True)
class Opaque(Op):
    """An ATen call that is not understood: it runs as it did, in its order.

    `target` is the overload's name (``aten.lstm.input``); `arguments` and `keywords` are its literal arguments, `Arg`
    in place of tensors and sympy expressions in place of symbolic sizes; `results` the types of its results, and
    `several` whether it returns a tuple.
    """

    target: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[TensorType | None, ...]
    several: bool
    serial: int

    @property
    def effectful(self) -> bool:
        return True

    @property
    def given(self) -> dict[str, Any]:
        """The literal arguments by the names of its parameters."""
        names = (p.name for p in self._overload._schema.arguments)
        return dict(zip(names, self.arguments, strict=False)) | dict(self.keywords)

    @property
    def is_pure(self) -> bool:
        """Whether it is one of ATen's that writes to nothing and draws no random numbers, by its schema."""
        if not self.target.startswith("aten."):
            return False
        overload, given = self._overload, self.given
        left_out = [given.get(p.name, p.default_value) for p in overload._schema.arguments if p.name in _DROPOUT]
        draws = torch.Tag.nondeterministic_seeded in overload.tags and not (left_out and all(p == 0 for p in left_out))
        return not overload._schema.is_mutable and not draws

    @property
    def is_update(self) -> bool:
        """Whether it is one of ATen's that writes to its first operand, and gives that."""
        name = self.target.split(".")[1]
        return self.target.startswith("aten.") and name.endswith("_") and not name.endswith("__")

    @property
    def may_write(self) -> bool:
        """Whether it may write to an operand: by its schema, to running statistics, or as a stranger's may."""
        known = self.target.startswith("aten.")
        return not known or self._overload._schema.is_mutable or has_statistics(self._overload)

    @property
    def only_computes(self) -> bool:
        """Whether it may be called at another time, on the same operands: it is pure, its results have memory of their
        own, and no size is known to a call alone."""
        if not self.is_pure or any(isinstance(v, sympy.Expr) for v in tree_flatten(self.given)[0]):
            return False
        return self.allocates and not has_statistics(self._overload)

    @property
    def allocates(self) -> bool:
        """Whether its results are known to have memory of their own."""
        return allocates(self._overload)

    @property
    def is_repeatable(self) -> bool:
        """Whether it is known to launch the same whatever its operands' values are, and to wait for nothing.

        No schema tells that, nor always the truth about running statistics.
        """
        return self.is_pure and self.target.split(".")[1] in _REPEATABLE

    @property
    def looks_up(self) -> bool:
        """Whether one of the repeatable ones reads at indices."""
        return self.target.split(".")[1] in ("gather", "index_select", "take_along_dim")

    @property
    def _overload(self) -> Any:
        return attrgetter(self.target)(torch.ops)

    def infer(self, types: Types) -> TensorType:
        known = next((r for r in self.results if r is not None), None)
        return known or TensorType((), torch.float32, torch.device("cpu"))


@dataclass(frozen=True)
class Item(Op):
    """Result `index` of an operation with several."""

    index: int
    result: TensorType

    def infer(self, types: Types) -> TensorType:
        return self.result


@lru_cache(maxsize=4096)
def _pointwise_dtype(template: str, kinds: tuple[tuple[bool, bool, torch.dtype], ...]) -> torch.dtype:
    """The dtype PyTorch gives, found by applying the function to ones of the operands' kinds."""
    ones = [torch.ones((1,) if dims else (), dtype=dtype) for _, dims, dtype in kinds]
    values = {
        f"v{i}": one.item() if weak else one for i, (one, (weak, _, _)) in enumerate(zip(ones, kinds, strict=True))
    }
    result = eval(template.format(*values), {"torch": torch, "F": F, **values})  # the table's own text, never a user's
    assert isinstance(result, torch.Tensor), f"{template} of Python numbers only"
    return result.dtype
