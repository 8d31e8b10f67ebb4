"""Specs for `fusewright.rules.windows`."""

from __future__ import annotations

from typing import Any

import torch
from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw, adaptive, avg_pool, conv, convs, range_sum, reduce, reductions, windows

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.rules import windows as rules

# The plain and the transposed convolution that the refusals are about


def plain(*, batch: Any = 2, length: Any = 9, **options: Any) -> Node:
    return conv(inp(batch, 2, length, 6), inp(3, 2, 3, 2), inp(3), **options)


def turned(*, batch: Any = 2, length: Any = 5, **options: Any) -> Node:
    return conv(inp(batch, 2, length, 4), inp(2, 3, 3, 2), inp(3), transposed=True, **options)


def whole_numbers(y: Node) -> Node:
    """The sum of y in whole numbers, as if convolutions had them."""
    x, w = (inp(*a.shape, dtype=torch.int64) for a in y.inputs[:2])
    return reduce("sum", make(y.op, x, w, None), 2)


def crowded(root: Node) -> bool:
    """Whether there are too many slots and taps for the range sums to pay."""
    y, op = root.arg(0), root.op
    lengths = y.arg(0).shape
    if isinstance(op, ops.Reduce):
        return False
    return any(root.shape[d] * y.arg(1).shape[d] > 4 * max(lengths[d], 4) for d in range(2, y.ndim))  # type: ignore[operator, type-var]


@st.composite
def window_sums(draw: Draw, transposed: bool) -> Node:
    """Any linear reduction over spatial dimensions of any convolution."""
    y = draw(convs(transposed))
    root = draw(reductions(y, tuple(range(2, y.ndim))))
    assume(not crowded(root))
    return root


@st.composite
def sliding_sums(draw: Draw) -> Node:
    """Several equal windows that slide over the output of any convolution."""
    y = draw(convs())
    chosen = {draw(st.sampled_from(range(2, y.ndim)))} | {d for d in range(2, y.ndim) if draw(st.booleans())}
    if draw(st.booleans()):
        lengths = y.shape[2:]
        kernel = tuple(draw(st.integers(1, min(3, n))) for n in lengths)  # type: ignore[type-var]
        stride = tuple(draw(st.integers(1, 4)) for _ in lengths)
        root = avg_pool(y, *kernel, stride=stride)
    else:
        root = range_sum(y, **{f"d{d}": draw(windows(y.shape[d])) for d in sorted(chosen)})
    assume(any(root.shape[d] > 1 for d in range(2, y.ndim) if d in chosen or isinstance(root.op, ops.Pool)))  # type: ignore[operator]
    return root


@st.composite
def sliding_beside_others(draw: Draw) -> Node:
    """Average pooling whose windows are whole along some dimensions, and reach over the ends of one."""
    y = draw(convs())
    assume(y.ndim > 3)
    lengths = y.shape[2:]
    other = draw(st.integers(0, len(lengths) - 1))
    assume(all(isinstance(n, int) and n >= 2 for n in lengths))
    kernel = tuple(
        draw(st.integers(2, 3)) if i == other else draw(st.integers(1, min(3, n))) for i, n in enumerate(lengths)
    )  # type: ignore[type-var]
    stride = tuple(draw(st.integers(1, 3)) for _ in lengths)
    padding = tuple(int(i == other) for i in range(len(lengths)))
    root = avg_pool(y, *kernel, stride=stride, padding=padding, count_include_pad=draw(st.booleans()))
    whole = [i for i in range(len(lengths)) if i != other and (kernel[i] > 1 or root.shape[i + 2] != lengths[i])]
    assume(any(root.shape[i + 2] > 1 for i in whole))  # type: ignore[operator]
    return root


@st.composite
def sliding_turned(draw: Draw) -> Node:
    """Several equal windows that slide over the output of a transposed convolution of stride 1, cropped or padded."""
    n, g = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3)))
    channels, out = g * draw(st.integers(1, 2)), g * draw(st.integers(1, 3))
    lengths, taps, crops, spread, extra = [], [], [], [], []
    for _ in range(n):
        spread.append(draw(st.integers(1, 3)))
        taps.append(draw(st.integers(1, 3)))
        crops.append(draw(st.integers(0, 3)))
        extra.append(draw(st.integers(0, spread[-1] - 1)))
        reach = spread[-1] * (taps[-1] - 1)
        lengths.append(draw(st.integers(2, 5)) + max(0, crops[-1] - reach, 2 * crops[-1] - reach - extra[-1]))
    bias = inp(out) if draw(st.booleans()) else None
    x, w = inp(draw(st.sampled_from((B, 1, 3))), channels, *lengths), inp(channels, out // g, *taps)
    op = ops.Conv((1,) * n, tuple((c, c) for c in crops), tuple(spread), g, True, tuple(extra))
    y = make(op, x, w, bias)
    kernel = tuple(draw(st.integers(1, min(3, length))) for length in y.shape[2:])  # type: ignore[type-var]
    root = avg_pool(y, *kernel, stride=tuple(draw(st.integers(1, 3)) for _ in lengths))
    assume(any(root.shape[d] > 1 for d in range(2, y.ndim)))  # type: ignore[operator]
    return root


@st.composite
def full_convs(draw: Draw) -> Node:
    """A convolution whose kernel covers its whole input."""
    n, g = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3)))
    lengths = [draw(st.integers(1, 4)) for _ in range(n)]
    per, out = draw(st.integers(1, 2)), g * draw(st.integers(1, 3))
    bias = inp(out) if draw(st.booleans()) else None
    x, w = inp(draw(st.sampled_from((B, 1, 3))), g * per, *lengths), inp(out, per, *lengths)
    dilation = tuple(1 if k > 1 else draw(st.integers(1, 2)) for k in lengths)
    return conv(x, w, bias, groups=g, stride=draw(st.integers(1, 3)), dilation=dilation)


@st.composite
def single_taps(draw: Draw) -> Node:
    """A transposed convolution with one tap."""
    n, g = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3)))
    channels, out = g * draw(st.integers(1, 2)), g * draw(st.integers(1, 3))
    lengths = [draw(st.integers(1, 4)) for _ in range(n)]
    bias = inp(out) if draw(st.booleans()) else None
    x, w = inp(draw(st.sampled_from((B, 1, 3))), channels, *lengths), inp(channels, out // g, *(1,) * n)
    return conv(x, w, bias, groups=g, transposed=True, dilation=draw(st.integers(1, 2)))


SHAPES = {
    "no spatial dimension is reduced": lambda y: reduce("sum", y(), 0, 1),
    "no spatial dimension is reduced # range sum of channels": lambda y: adaptive(y(), d1=2),
    "sums in another dtype than its operand's": lambda y: reduce("sum", y(), 2, dtype=torch.float32),
    "sums in another dtype than its operand's # mean": lambda y: reduce("mean", y(), 2, 3, dtype=torch.float32),
    "sums in another dtype than its operand's # whole numbers": lambda y: whole_numbers(y()),
    "the length of a reduced dimension is not known": lambda y: reduce("sum", y(length=B, batch=2), 2),
    "the length of a reduced dimension is not known # one of two": lambda y: reduce("mean", y(length=B, batch=2), 2, 3),
    "# max": lambda y: reduce("max", y(), 2),
    "# not a convolution": lambda y: reduce("sum", inp(2, 3, 4), 2),
}


def refused(y: Any) -> dict[str, Any]:
    """The refusals about shapes, for reductions of convolution `y`."""
    return {key: (lambda build=build: build(y)) for key, build in SHAPES.items()}


def empty() -> Node:
    """A convolution with no output position."""
    return conv(inp(2, 2, 2, 5), inp(3, 2, 3, 2))


def empty_turned(stride: int = 1) -> Node:
    return conv(inp(2, 2, 1, 5), inp(2, 3, 2, 2), transposed=True, padding=((1, 1), (0, 0)), stride=stride)


def crowd(slots: int) -> Node:
    """`slots` windows of the output of a convolution with 2 taps over a length of 10: 20 are as many as may be."""
    y = conv(inp(2, 2, 10), inp(3, 2, 2))
    return adaptive(y, d2=slots)


def short_crowd(slots: int, transposed: bool = False) -> Node:
    """The same over a length of 3, which counts as 4, with 4 taps: 4 windows are as many as may be."""
    if transposed:
        return adaptive(conv(inp(2, 2, 3), inp(2, 3, 4), transposed=True), d2=slots)
    return adaptive(conv(inp(2, 2, 3), inp(3, 2, 4), padding=1), d2=slots)


CROWD = "one range sum per slot and tap would be more than there is to sum"
TRANSPOSED, PLAIN = "the convolution is transposed", "the convolution is not transposed"
SLIDING = {
    **refused(plain),
    "a reduced dimension is empty": lambda: reduce("sum", empty(), 2),
    "the transposed convolution strides": lambda: avg_pool(turned(stride=(1, 2)), 2, 2),
    "the transposed convolution crops a dimension of unknown length": lambda: reduce(
        "sum", conv(inp(2, 2, B, 4), inp(2, 3, 1, 2), padding=((1, 1), (0, 0)), transposed=True), 3
    ),
    "the transposed convolution crops its whole input": lambda: avg_pool(
        conv(inp(2, 3, 1), inp(3, 2, 1), padding=1, dilation=5, extra=4, transposed=True), 2
    ),
    "the windows are not all equal and whole": lambda: avg_pool(plain(), 2, 2, padding=(1, 1)),
    "the windows are not all equal and whole # last cut": lambda: avg_pool(plain(length=8), 4, 2, ceil_mode=True),
    "the windows are not all equal and whole # adaptive": lambda: adaptive(plain(), d2=5),
    "the windows are not all equal and whole # scales": lambda: avg_pool(
        plain(), 3, 1, padding=(1, 0), stride=(1, 1), count_include_pad=False
    ),
    "the windows are not all equal and whole # distances": lambda: range_sum(
        plain(), d2=tuple(ops.Slot(i, i + 1, 1, 1.0) for i in (0, 1, 3))
    ),
    "the windows are not all equal and whole # one twice": lambda: range_sum(plain(), d2=(ops.Slot(1, 3, 1, 1.0),) * 2),
    "the windows are not all equal and whole # backwards": lambda: range_sum(
        plain(), d2=tuple(ops.Slot(i, i + 1, 1, 1.0) for i in (2, 1))
    ),
    "the windows are not all equal and whole # steps": lambda: range_sum(
        plain(), d2=(ops.Slot(0, 3, 2, 1.0), ops.Slot(1, 3, 1, 1.0))
    ),
    "the windows are not all equal and whole # empty": lambda: range_sum(plain(), d2=(ops.Slot(0, 0, 1, 1.0),) * 2),
    "one window only: it is a total sum": lambda: reduce("mean", plain(), 2, 3),
    "one window only: it is a total sum # pool": lambda: avg_pool(plain(), 7, 5),
}


def pooled(padding: int = 1) -> Node:
    """The founding chain's shape: a strided, padded convolution, pooled."""
    y = conv(inp(B, 3, 9, 10), inp(4, 3, 3, 2), inp(4), stride=(1, 2), padding=((padding, 0), (0, 1)))
    return avg_pool(y, 2, 2)


def mean_of_strided() -> Node:
    return reduce("mean", conv(inp(B, 4, 8, 7), inp(6, 2, 3, 2), inp(6), stride=(1, 2), padding=1, groups=2), 2, 3)


def padded_pool_of_dilated() -> Node:
    y = conv(inp(B, 2, 8, 6), inp(3, 2, 2, 3), inp(3), dilation=(3, 1), padding=1)
    return avg_pool(y, 2, 4, padding=(1, 2))


def mean_of_turned() -> Node:
    y = conv(inp(B, 4, 5, 4), inp(4, 3, 4, 3), inp(6), stride=2, padding=1, groups=2, transposed=True)
    return reduce("mean", y, 2, 3)


def pool_of_turned() -> Node:
    x, w = inp(B, 2, 4, 3), inp(2, 3, 2, 3)
    return avg_pool(conv(x, w, inp(3), stride=(2, 1), padding=1, dilation=(3, 1), transposed=True), 2, 2)


def late_windows() -> Node:
    """Windows with gaps that start and end inside, over a convolution of which every attribute matters."""
    y = conv(inp(B, 2, 18), inp(4, 1, 2), inp(4), stride=2, padding=((1, 2),), dilation=3, groups=2)
    return range_sum(y, d2=tuple(ops.Slot(start, start + 3, 2, 0.5) for start in (1, 4)))


SPECS = [
    RuleSpec(
        rules.sum_through_conv,
        lambda: reduce(
            "mean", conv(inp(B, 4, 8, 7), inp(6, 2, 3, 2), inp(6), stride=(1, 2), padding=1, groups=2), 2, 3
        ),
        window_sums(transposed=False),
        {
            **refused(plain),
            "a reduced dimension is empty": lambda: reduce("sum", empty(), 2),
            TRANSPOSED: lambda: reduce("sum", turned(), 2, 3),
            CROWD: lambda: crowd(21),
            f"{CROWD} # short": lambda: short_crowd(5),
        },
        lambda: avg_pool(
            conv(inp(B, 2, 8, 6), inp(3, 2, 2, 3), inp(3), dilation=(3, 1), padding=1), 2, 4, padding=(1, 2)
        ),
    ),
    RuleSpec(
        rules.sum_through_conv_transpose,
        lambda: reduce(
            "mean", conv(inp(B, 4, 5, 4), inp(4, 3, 4, 3), inp(6), stride=2, padding=1, groups=2, transposed=True), 2, 3
        ),
        window_sums(transposed=True),
        {
            **refused(turned),
            "a reduced dimension is empty": lambda: reduce("sum", empty_turned(), 2),
            PLAIN: lambda: reduce("sum", plain(), 2, 3),
            CROWD: lambda: short_crowd(5, transposed=True),
        },
        pool_of_turned,
    ),
    RuleSpec(
        rules.box_before_conv,
        pooled,
        st.one_of(sliding_sums(), sliding_beside_others(), sliding_turned()),
        SLIDING,
        late_windows,
    ),
    RuleSpec(
        rules.full_conv_is_matmul,
        lambda: conv(inp(B, 4, 3, 2), inp(6, 2, 3, 2), inp(6), groups=2),
        full_convs(),
        {
            TRANSPOSED: lambda: conv(inp(2, 3, 1), inp(3, 2, 1), transposed=True),
            "the convolution is padded": lambda: conv(inp(2, 3, 4), inp(2, 3, 4), padding=1),
            "the convolution is padded # right": lambda: conv(
                inp(2, 3, 4, 2), inp(2, 3, 4, 2), padding=((0, 0), (0, 1))
            ),
            "the kernel does not cover the input": lambda: conv(inp(2, 3, 4), inp(2, 3, 3)),
            "# not a convolution": lambda: reduce("sum", inp(2, 3, 4), 2),
        },
        lambda: conv(inp(B, 3, 2), inp(3, 1, 2), inp(3), groups=3),
    ),
    RuleSpec(
        rules.single_tap_transpose,
        lambda: conv(inp(B, 4, 3, 2), inp(4, 3, 1, 1), inp(6), groups=2, transposed=True),
        single_taps(),
        {
            PLAIN: lambda: conv(inp(2, 3, 4), inp(2, 3, 1)),
            "the kernel has more than one tap": lambda: conv(inp(2, 3, 4), inp(3, 2, 2), transposed=True),
            "it strides, crops or pads # stride": lambda: conv(inp(2, 3, 4), inp(3, 2, 1), stride=2, transposed=True),
            "it strides, crops or pads # crop": lambda: conv(inp(2, 3, 4), inp(3, 2, 1), padding=1, transposed=True),
            "it strides, crops or pads # pad": lambda: conv(
                inp(2, 3, 4), inp(3, 2, 1), dilation=2, extra=1, transposed=True
            ),
            "# not a convolution": lambda: reduce("sum", inp(2, 3, 4), 2),
        },
    ),
]
