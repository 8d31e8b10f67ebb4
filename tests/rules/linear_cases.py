"""Random convolutions and matmuls, and linear reductions of them, for the specs of the rules about both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import B, inp
from hypothesis import assume
from hypothesis import strategies as st

from fusewright.codegen.ranges import adaptive_slots
from fusewright.ir import ops
from fusewright.ir.node import Node, make

Draw = Callable[[st.SearchStrategy[Any]], Any]
BATCH = st.sampled_from((B, 1, 3))


def conv(
    x: Node,
    w: Node,
    bias: Node | None = None,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[tuple[int, int], ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    transposed: bool = False,
    extra: int = 0,
) -> Node:
    """A convolution; a number stands for all dimensions, `extra` is the output padding."""
    n = x.ndim - 2
    pads = ((padding, padding),) * n if isinstance(padding, int) else padding
    strides = (stride,) * n if isinstance(stride, int) else stride
    spread = (dilation,) * n if isinstance(dilation, int) else dilation
    output_padding = (extra,) * n if transposed else ()
    return make(ops.Conv(strides, pads, spread, groups, transposed, output_padding), x, w, bias)


def reduce(kind: str, x: Node, *dims: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> Node:
    return make(ops.Reduce(kind, dims, keepdim, dtype=dtype), x)  # type: ignore[arg-type]


def avg_pool(
    x: Node, *kernel: int, stride: tuple[int, ...] = (), padding: tuple[int, ...] = (), **options: Any
) -> Node:
    ones = (1,) * len(kernel)
    return make(ops.Pool("avg", kernel, stride or kernel, padding or (0,) * len(kernel), ones, **options), x)


def range_sum(x: Node, dtype: torch.dtype = torch.float64, **slots: tuple[ops.Slot, ...]) -> Node:
    """A range sum; ``d2=slots`` names dimension 2."""
    return make(ops.RangeSum(tuple((int(name[1:]), s) for name, s in slots.items()), dtype), x)


def adaptive(x: Node, **outs: int) -> Node:
    """Adaptive average pooling; ``d2=5`` gives 5 slots along dimension 2."""
    return range_sum(x, **{d: adaptive_slots(x.shape[int(d[1:])], out) for d, out in outs.items()})  # type: ignore[arg-type]


@st.composite
def convs(draw: Draw, transposed: bool = False, groups: tuple[int, ...] = (1, 1, 2, 3), batch: Any = BATCH) -> Node:
    """Any convolution in one to three dimensions whose output is not empty."""
    n = draw(st.integers(1, 3))
    g = draw(st.sampled_from(groups))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    channels, out = g * draw(st.integers(1, 2)), g * draw(st.integers(1, 3))
    kernel, stride, dilation, room = each(1, 3), each(1, 3), each(1, 2), each(0, (9, 5, 3)[n - 1])
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    left, right = each(0, 2), each(0, 2)
    extra: tuple[int, ...] = ()
    if transposed:
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        lengths = [1 + r // 2 for r in room]
        weight = inp(channels, out // g, *kernel)
    else:
        lengths = [max(1, r + 1 + more - a - b) for r, more, a, b in zip(reach, room, left, right, strict=True)]
        weight = inp(out, channels // g, *kernel)
    op = ops.Conv(stride, tuple(zip(left, right, strict=True)), dilation, g, transposed, extra)
    assume(all(d >= 1 for d in op.spatial(lengths, kernel)))  # type: ignore[operator]
    bias = inp(out) if draw(st.booleans()) else None
    return make(op, inp(draw(batch), channels, *lengths), weight, bias)


@st.composite
def matmuls(draw: Draw, batched: bool = True) -> Node:
    """x (.., M, K) with W (K, O) or (O, K), or with one that has leading dimensions, too."""
    lead = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 2)))]
    rows, k, out = (draw(st.integers(1, 4)) for _ in range(3))
    mirrored = draw(st.booleans())
    own = [draw(st.sampled_from((1, n))) for n in lead[draw(st.integers(0, len(lead))) :]] if batched else []
    weight = inp(*own, *((out, k) if mirrored else (k, out)))
    bias = inp(out) if draw(st.booleans()) else None
    return make(ops.Matmul(mirrored), inp(*lead, rows, k), weight, bias)


@st.composite
def reductions(
    draw: Draw, y: Node, dims: tuple[int, ...], *, kinds: tuple[str, ...] = ("sum", "pool", "range")
) -> Node:
    """A linear reduction of y over at least one of `dims`, and perhaps others."""
    kind = draw(st.sampled_from(kinds))
    if kind == "pool":
        return draw(pools(y, dims))
    chosen = {draw(st.sampled_from(dims))}
    known = [d for d in range(y.ndim) if kind == "sum" or isinstance(y.shape[d], int)]
    chosen |= {d for d in known if draw(st.booleans())}
    if kind == "sum":
        mean = draw(st.sampled_from(("sum", "mean")))
        return make(ops.Reduce(mean, tuple(sorted(chosen)), draw(st.booleans())), y)
    return make(ops.RangeSum(tuple((d, draw(slots(y.shape[d]))) for d in sorted(chosen)), torch.float64), y)


@st.composite
def pools(draw: Draw, y: Node, dims: tuple[int, ...]) -> Node:
    """Average pooling with every option, over the last dimensions, at least one of `dims` among them."""
    sizes = [n for n in (y.ndim - 2, y.ndim - 1) if 1 <= n <= 3 and y.ndim - n <= max(dims)]
    n = draw(st.sampled_from(sizes or [0]))
    assume(n > 0)
    lengths = y.shape[-n:]
    least = 2 if n == 3 else 1  # avg_pool3d wants the kernel to fit in the input without its padding
    padding = tuple(draw(st.integers(0, int(length >= least))) for length in lengths)
    widest = [min(4, length + (2 * p if n < 3 else 0)) for length, p in zip(lengths, padding, strict=True)]
    kernel = tuple(draw(st.integers(2 * p or 1, most)) for most, p in zip(widest, padding, strict=True))
    stride = tuple(draw(st.integers(1, 4)) for _ in lengths)
    divisor = draw(st.sampled_from((None, None, 3))) if n > 1 else None
    flags = draw(st.booleans()), draw(st.booleans())
    return make(ops.Pool("avg", kernel, stride, padding, (1,) * n, *flags, divisor), y)


@st.composite
def slots(draw: Draw, length: Any) -> tuple[ops.Slot, ...]:
    """Adaptive pooling's slots, or any ranges with any scales."""
    if draw(st.booleans()):
        return adaptive_slots(length, draw(st.integers(1, 4)))
    return tuple(draw(ranges(length)) for _ in range(draw(st.integers(1, 4))))


@st.composite
def ranges(draw: Draw, length: int) -> ops.Slot:
    """One range that is not empty."""
    start = draw(st.integers(0, length - 1))
    step = draw(st.integers(1, 3))
    stop = start + 1 + step * draw(st.integers(0, (length - 1 - start) // step))
    return ops.Slot(start, stop, step, draw(st.sampled_from((1.0, 0.5, -3.0))))


@st.composite
def windows(draw: Draw, length: int) -> tuple[ops.Slot, ...]:
    """Equal windows at one distance, none of them clipped; a single one, too."""
    step = draw(st.integers(1, 2))
    count = draw(st.integers(1, min(4, (length - 1) // step + 1)))
    span = step * (count - 1) + 1
    start, distance = draw(st.integers(0, min(2, length - span))), draw(st.integers(1, 4))
    many = draw(st.integers(1, 1 + (length - start - span) // distance))
    scale = draw(st.sampled_from((1.0, 1.0 / count)))
    return tuple(ops.Slot(start + j * distance, start + j * distance + span, step, scale) for j in range(many))
