"""Operations that move elements and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from fusewright.ir.types import Op, Size, TensorType, Types, broadcast, require, same_numel, size


@dataclass(frozen=True)
class Reshape(Op):
    """The same elements in row-major order under another shape (a view where PyTorch can give one)."""

    shape: tuple[Size, ...]

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        require(same_numel(x.shape, self.shape), f"reshape of {x.shape} to {self.shape}")
        return TensorType(self.shape, x.dtype, x.device)


@dataclass(frozen=True)
class Permute(Op):
    """Dimensions in the order `dims`: a view, or with `copy` a value in row-major memory.

    Strides matter beyond speed: convolutions answer in the memory format they are given, dropout draws along memory.
    """

    dims: tuple[int, ...]
    copy: bool = False

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        require(sorted(self.dims) == list(range(len(x.shape))), f"permute {self.dims} of {x.shape}")
        return TensorType(tuple(x.shape[d] for d in self.dims), x.dtype, x.device)


@dataclass(frozen=True)
class Expand(Op):
    """Broadcast to `shape` without a copy."""

    shape: tuple[Size, ...]

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        require(broadcast(x.shape, self.shape) == self.shape, f"expand of {x.shape} to {self.shape}")
        return TensorType(self.shape, x.dtype, x.device)


@dataclass(frozen=True)
class Slice(Op):
    """x[start:stop:step] along `dim`, with 0 <= start <= stop."""

    dim: int
    start: int
    stop: Size
    step: int = 1

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        length = size(-(-(self.stop - self.start) // self.step))
        return TensorType((*x.shape[: self.dim], length, *x.shape[self.dim + 1 :]), x.dtype, x.device)


@dataclass(frozen=True)
class Windows(Op):
    """Windows of `size` elements along `dim`, `step` apart, which become the last dimension: x[..., o * step + u, ...]
    is element [..., o, ..., u], as `Tensor.unfold` sees it without a copy."""

    dim: int
    size: int
    step: int

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        length = x.shape[self.dim]
        fits = isinstance(length, int) and 0 < self.size <= length and self.step > 0
        require(fits, f"windows of {self.size} along {self.dim} of {x.shape}")
        count = size((length - self.size) // self.step + 1)
        return TensorType((*x.shape[: self.dim], count, *x.shape[self.dim + 1 :], self.size), x.dtype, x.device)


@dataclass(frozen=True)
class Grid:
    """How windows lie over the last two dimensions of images, as `F.unfold` has it: taps `dilation` apart, windows
    `stride` apart, and `padding` zeros on both sides."""

    kernel: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int]
    stride: tuple[int, int]

    def windows(self, lengths: Sequence[Size]) -> tuple[int, ...]:
        """How many there are along each dimension of images that are so long."""
        found = []
        for n, k, d, p, s in zip(lengths, self.kernel, self.dilation, self.padding, self.stride, strict=True):
            require(isinstance(n, int) and n > 0 and min(k, d, s) > 0 and p >= 0, f"{self} over {lengths}")
            found.append((int(n) + 2 * p - d * (k - 1) - 1) // s + 1)
        require(min(found) > 0, f"{self} over {lengths}")
        return tuple(found)


@dataclass(frozen=True)
class Unfold(Op):
    """The windows of images (N, C, H, W) as columns, (N, C * taps, windows): `F.unfold`."""

    grid: Grid

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        require(len(x.shape) == 4, f"windows of {x.shape}")
        columns, windows = prod(self.grid.kernel), prod(self.grid.windows(x.shape[2:]))
        return TensorType((x.shape[0], size(x.shape[1] * columns), windows), x.dtype, x.device)


@dataclass(frozen=True)
class Fold(Op):
    """Columns (N, C * taps, windows) added up where they lie in images (N, C, *lengths): `F.fold`."""

    lengths: tuple[int, int]
    grid: Grid

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        taps = prod(self.grid.kernel)
        fits = len(x.shape) == 3 and isinstance(x.shape[1], int) and x.shape[1] % taps == 0
        require(fits and x.shape[2] == prod(self.grid.windows(self.lengths)), f"{self} of {x.shape}")
        return TensorType((x.shape[0], int(x.shape[1]) // taps, *self.lengths), x.dtype, x.device)


@dataclass(frozen=True)
class Cat(Op):
    """Concatenation of two or more tensors of one dtype along `dim`."""

    dim: int

    def infer(self, types: Types) -> TensorType:
        parts = [t for t in types if t is not None]
        total = size(sum((t.shape[self.dim] for t in parts), start=0))
        first = parts[0]
        rest = [(*t.shape[: self.dim], *t.shape[self.dim + 1 :]) for t in parts]
        require(all(r == rest[0] for r in rest), f"cat along {self.dim} of {[t.shape for t in parts]}")
        return TensorType((*first.shape[: self.dim], total, *first.shape[self.dim + 1 :]), first.dtype, first.device)


@dataclass(frozen=True)
class Roll(Op):
    """Elements moved by so many places along dimensions, those beyond the end to the beginning; `shifts` are pairs of
    a dimension and its number of places."""

    shifts: tuple[tuple[int, int], ...]

    def infer(self, types: Types) -> TensorType:
        return _same(types)


@dataclass(frozen=True)
class Flip(Op):
    """Elements in the opposite order along each of `dims`."""

    dims: tuple[int, ...]

    def infer(self, types: Types) -> TensorType:
        return _same(types)


@dataclass(frozen=True)
class Upsample(Op):
    """Nearest neighbours along the last dimensions, (N, C, *) to (N, C, *lengths): element i is that at i * n / length,
    rounded down."""

    lengths: tuple[int, ...]

    def infer(self, types: Types) -> TensorType:
        return _resized(types, self.lengths)


@dataclass(frozen=True)
class Interpolate(Op):
    """Interpolation along the last dimensions, (N, C, *) to (N, C, *lengths), as `F.interpolate` has it.

    aligned  whether the centers of elements at corners lie at the same place; otherwise the corners themselves do
    kind     between two neighbours along each, or by a cubic, of images, between four
    """

    lengths: tuple[int, ...]
    aligned: bool = False
    kind: Literal["linear", "cubic"] = "linear"

    def infer(self, types: Types) -> TensorType:
        require(self.kind == "linear" or len(self.lengths) == 2, f"a cubic to {self.lengths}")
        return _resized(types, self.lengths)


def _resized(types: Types, lengths: tuple[int, ...]) -> TensorType:
    x = types[0]
    assert x is not None
    inner = x.shape[2:]
    fits = len(inner) == len(lengths) in (1, 2, 3) and all(isinstance(n, int) and n for n in inner)
    require(fits and all(lengths), f"{x.shape} resized to {lengths}")
    return TensorType((*x.shape[:2], *lengths), x.dtype, x.device)


def _same(types: Types) -> TensorType:
    x = types[0]
    assert x is not None
    return x


@dataclass(frozen=True)
class Pad(Op):
    """Padding: `pads` is (dimension, left, right), all >= 0; `value` belongs to ``constant``."""

    pads: tuple[tuple[int, int, int], ...]
    mode: Literal["constant", "reflect", "replicate", "circular"] = "constant"
    value: float = 0.0

    def infer(self, types: Types) -> TensorType:
        x = types[0]
        assert x is not None
        shape = list(x.shape)
        for dim, left, right in self.pads:
            shape[dim] = size(shape[dim] + left + right)
        return TensorType(tuple(shape), x.dtype, x.device)
