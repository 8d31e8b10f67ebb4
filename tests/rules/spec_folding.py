"""Specs for `fusewright.rules.folding`."""

from __future__ import annotations

from itertools import pairwise
from math import gcd, prod

from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import BATCH, Draw, adaptive, avg_pool, conv, range_sum, reduce
from spec_windows import (
    SLIDING,
    empty_turned,
    plain,
    pooled,
    refused,
    sliding_beside_others,
    sliding_sums,
    sliding_turned,
    turned,
)

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.rules import folding as rules

HOLE = "a tap of the folded kernel would sum nothing"
PADDING = "the windows read nothing but padding"
ONE = "the convolution is plain, or transposed with a stride of 1"
APART = "the taps of a window lie apart, or it has none"


def in_padding(first: int) -> Node:
    """Two windows that read positions `first` - 2 and the next of an input of length 2."""
    y = conv(inp(2, 1, 2), inp(1, 1, 1), padding=((3, 3),))
    return range_sum(y, d2=tuple(ops.Slot(i, i + 1, 1, 1.0) for i in (first - 1, first)))


def reads_something(root: Node) -> bool:
    """Whether the windows read some of the input along each dimension, not only its padding."""
    y = root.arg(0)
    read = [positions(root, d) for d in range(2, y.ndim)]
    return all(any(0 <= i < length for i in at) for at, length in zip(read, y.arg(0).shape[2:], strict=True))


def positions(root: Node, d: int) -> range:
    """Everything between the first and the last position of the input that is read along `d`."""
    y = root.arg(0)
    op, pool = y.op, root.op
    if isinstance(pool, ops.Pool):
        first, last = 0, (root.shape[d] - 1) * pool.stride[d - 2] + pool.kernel[d - 2] - 1
    else:
        window = dict(pool.table).get(d)  # type: ignore[attr-defined]
        first, last = (window[0].start, window[-1].stop - 1) if window else (0, y.shape[d] - 1)
    reach = op.dilation[d - 2] * (y.arg(1).shape[d] - 1)  # type: ignore[attr-defined]
    shift = op.padding[d - 2][0]  # type: ignore[attr-defined]
    shift = reach - shift if op.transposed else shift  # type: ignore[attr-defined]
    return range(op.stride[d - 2] * first - shift, op.stride[d - 2] * last + reach - shift + 1)  # type: ignore[attr-defined]


def whole_taps(root: Node) -> bool:
    """Whether what a window reads lies at equal distances along each dimension."""
    y = root.arg(0)
    return all(evenly(taps_read(root, d)) for d in range(2, y.ndim))


def taps_read(root: Node, d: int) -> set[int]:
    """What the first window of a plain convolution reads along `d`, from its first position on."""
    y, pool = root.arg(0), root.op
    window = range(1)
    if isinstance(pool, ops.Pool):
        window = range(pool.kernel[d - 2])
    elif d in dict(pool.table):  # type: ignore[attr-defined]
        slot = dict(pool.table)[d][0]  # type: ignore[attr-defined]
        window = range(0, slot.stop - slot.start, slot.step)
    step, spread = y.op.stride[d - 2], y.op.dilation[d - 2]  # type: ignore[attr-defined]
    return {step * i + spread * u for i in window for u in range(y.arg(1).shape[d])}  # type: ignore[arg-type]


def evenly(places: set[int]) -> bool:
    """Whether there are any, at one distance."""
    return bool(places) and len({b - a for a, b in pairwise(sorted(places))}) <= 1


def late() -> Node:
    """Windows with gaps that start and end inside, over a convolution of which every attribute matters."""
    y = conv(inp(B, 2, 18), inp(4, 1, 2), inp(4), stride=2, padding=((1, 2),), dilation=2, groups=2)
    return range_sum(y, d2=tuple(ops.Slot(start, start + 3, 2, 0.5) for start in (1, 4)))


# -- behind a transposed convolution that strides


def elements(root: Node, d: int) -> list[set[int]]:
    """The elements of x, and of what would lie beside it, that each window reads along `d`."""
    y, pool = root.arg(0), root.op
    op, length = y.op, y.shape[d]
    own, spread, left = op.stride[d - 2], op.dilation[d - 2], op.padding[d - 2][0]  # type: ignore[attr-defined]
    windows = [range(i, i + 1) for i in range(length)]  # type: ignore[arg-type]
    if isinstance(pool, ops.Pool):
        starts = (j * pool.stride[d - 2] for j in range(root.shape[d]))  # type: ignore[arg-type]
        windows = [range(at, at + pool.kernel[d - 2]) for at in starts]
    elif isinstance(pool, ops.RangeSum) and d in dict(pool.table):
        windows = [range(s.start, s.stop, s.step) for s in dict(pool.table)[d]]
    taps = range(y.arg(1).shape[d])  # type: ignore[arg-type]
    targets = [{p + left - spread * u for p in window for u in taps} for window in windows]
    return [{at // own for at in places if at % own == 0} for places in targets]


def kinds(root: Node, d: int) -> int:
    """After how many windows the next one reads as the first, some elements further on."""
    own = root.arg(0).op.stride[d - 2]  # type: ignore[attr-defined]
    pool, count, distance = root.op, root.shape[d], 1
    if isinstance(pool, ops.Pool):
        distance = pool.stride[d - 2]
    elif d in dict(pool.table) and count > 1:  # type: ignore[attr-defined, operator]
        first, second = dict(pool.table)[d][:2]  # type: ignore[attr-defined]
        distance = second.start - first.start
    return min(own // gcd(own, distance), count) if count > 1 else 1  # type: ignore[operator, type-var]


def is_convolutions(root: Node) -> bool:
    """Whether up to nine plain convolutions, each of which reads some of x, compute the windows."""
    y = root.arg(0)
    for d in range(2, y.ndim):
        read, count, length = elements(root, d), kinds(root, d), y.arg(0).shape[d]
        if not all(map(evenly, read)):
            return False
        for i in range(count):
            each, step = -(-len(read) // count), 0
            if i + count < len(read):
                step = min(read[i + count]) - min(read[i])
            elif each > 1:
                step = min(read[count]) - min(read[0])
            if min(read[i]) >= length or max(read[i]) + step * (each - 1) < 0:  # type: ignore[operator]
                return False
    return prod(kinds(root, d) for d in range(2, y.ndim)) <= rules.MOST_KINDS


@st.composite
def windows_of_strides(draw: Draw) -> Node:
    """Several equal windows that slide over the output of a transposed convolution that strides."""
    n, g = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3)))
    channels, out = g * draw(st.integers(1, 2)), g * draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(n))

    stride, dilation, taps = each(1, 3), each(1, 2), each(1, 3)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    assume(max(stride) > 1)
    op = ops.Conv(stride, tuple(zip(each(0, 2), each(0, 2), strict=True)), dilation, g, True, extra)
    lengths = each(1, (6, 4, 3)[n - 1])
    assume(all(length >= 1 for length in op.spatial(lengths, taps)))  # type: ignore[operator]
    bias = inp(out) if draw(st.booleans()) else None
    y = make(op, inp(draw(BATCH), channels, *lengths), inp(channels, out // g, *taps), bias)
    kernel = tuple(draw(st.integers(1, min(4, int(length)))) for length in y.shape[2:])
    if draw(st.booleans()):
        root = avg_pool(y, *kernel, stride=each(1, 4))
    else:
        d = draw(st.integers(2, y.ndim - 1))
        size, distance = kernel[d - 2], draw(st.integers(1, 3))
        starts = range(draw(st.integers(0, 1)), int(y.shape[d]) - size + 1, distance)
        assume(len(starts) > 1)
        root = range_sum(y, **{f"d{d}": tuple(ops.Slot(i, i + size, 1, 0.5) for i in starts)})
    assume(
        any(root.shape[d] > 1 for d in range(2, y.ndim) if isinstance(root.op, ops.Pool) or d in dict(root.op.table))
    )  # type: ignore[attr-defined, operator]
    assume(is_convolutions(root))
    return root


def pooled_upsampling() -> Node:
    """Two kinds of position along one dimension, one along the other; every attribute of the convolution matters."""
    x, w = inp(B, 4, 5, 4), inp(4, 3, 3, 2)
    y = conv(x, w, inp(6), stride=(2, 2), padding=((1, 0), (0, 1)), dilation=(1, 2), groups=2, transposed=True, extra=1)
    return avg_pool(y, 2, 2, stride=(3, 2))


def singly(y: Node, *positions: int) -> Node:
    """These positions alone."""
    return range_sum(y, d2=tuple(ops.Slot(i, i + 1, 1, 1.0) for i in positions))


SPECS = [
    RuleSpec(
        rules.box_into_weight,
        pooled,
        st.one_of(sliding_sums(), sliding_beside_others(), sliding_turned()).filter(reads_something).filter(whole_taps),
        {
            **SLIDING,
            PADDING: lambda: in_padding(1),
            f"{PADDING} # right": lambda: in_padding(6),
            HOLE: lambda: avg_pool(plain(length=12, dilation=3), 2, 1),
        },
        late,
    ),
    RuleSpec(
        rules.box_into_transposed_weight,
        pooled_upsampling,
        windows_of_strides(),
        {
            **refused(lambda **options: turned(stride=(2, 1), **options)),
            "a reduced dimension is empty": lambda: reduce("sum", empty_turned(stride=2), 2),
            ONE: lambda: avg_pool(turned(), 2, 2),
            f"{ONE} # plain": lambda: avg_pool(plain(stride=2), 2, 2),
            "a dimension of the input has an unknown length": lambda: reduce(
                "sum", conv(inp(2, 2, B, 4), inp(2, 3, 2, 2), stride=2, transposed=True), 3
            ),
            "the windows are not all equal and whole": lambda: avg_pool(turned(stride=2), 2, 2, padding=(1, 1)),
            "the windows are not all equal and whole # adaptive": lambda: adaptive(turned(stride=2), d2=4),
            "one window only: it is a total sum": lambda: reduce("mean", turned(stride=2), 2, 3),
            "it would become 27 convolutions": lambda: avg_pool(
                conv(inp(2, 1, 4, 4, 4), inp(1, 1, 3, 3, 3), stride=3, transposed=True), 4, 4, 4, stride=(1, 1, 1)
            ),
            APART: lambda: avg_pool(conv(inp(2, 1, 5), inp(1, 1, 3), stride=2, dilation=5, transposed=True), 2),
            f"{APART} # a gap": lambda: avg_pool(conv(inp(2, 1, 5), inp(1, 1, 1), stride=2, transposed=True), 1),
            PADDING: lambda: singly(conv(inp(2, 1, 3), inp(1, 1, 2), stride=2, dilation=3, transposed=True), 0, 1),
            f"{PADDING} # right": lambda: singly(
                conv(inp(2, 1, 1), inp(1, 1, 2), stride=2, extra=1, transposed=True), 1, 2
            ),
        },
    ),
]
