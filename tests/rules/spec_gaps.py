"""Specs for `fusewright.rules.gaps`."""

from __future__ import annotations

from typing import Any

import torch
from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw, conv, reduce
from spec_pooling import pool

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.rules import gaps as rules


@st.composite
def convs_with_gaps(draw: Draw) -> Node:
    """A transposed convolution of any stride, crop and output padding, with one tap, taps a stride apart, or few."""
    n, g = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2)))
    channels, out = g * draw(st.integers(1, 2)), g * draw(st.integers(1, 2))
    lengths, taps, stride, crop, spread, extra = [], [], [], [], [], []
    for _ in range(n):
        stride.append(draw(st.integers(1, 3)))
        taps.append(draw(st.integers(1, 3)))
        regular = taps[-1] == 1 or draw(st.integers(0, 3))
        spread.append(stride[-1] * draw(st.integers(1, 2)) if regular else draw(st.sampled_from((1, 1, 2, 3))))
        crop.append(draw(st.integers(0, 3)))
        extra.append(draw(st.integers(0, max(stride[-1], spread[-1]) - 1)))
        lengths.append(draw(st.integers(2, 5)))
    bias = inp(out) if draw(st.booleans()) else None
    x, w = inp(draw(st.sampled_from((B, 1, 3))), channels, *lengths), inp(channels, out // g, *taps)
    op = ops.Conv(tuple(stride), tuple((c, c) for c in crop), tuple(spread), g, True, tuple(extra))
    assume(all(length > 0 for length in op.spatial(lengths, taps)))
    return make(op, x, w, bias)


@st.composite
def functions(draw: Draw, y: Node, *, least: int = 0) -> Node:
    """What is made of each position of y, with numbers for each channel, each sample or each row beside it."""
    ones = (1,) * (y.ndim - 2)
    channels = y.shape[1]
    for _ in range(draw(st.integers(least, 2))):
        kind = draw(st.sampled_from(("sine", "add", "mul", "softmax", "twice", "row", "max")))
        match kind:
            case "sine":
                y = pointwise("sin", y)
            case "add" | "mul":
                y = pointwise(kind, y, inp(y.shape[0] if kind == "mul" else 1, channels, *ones))
            case "softmax":
                y = make(ops.Softmax(1), y)
            case "twice":
                y = pointwise("mul", y, pointwise("sigmoid", y))
            case "row":
                y = pointwise("add", inp(y.shape[2], *ones[1:]), y)
            case "max":
                y, channels = reduce("max", y, 1, keepdim=True), 1
    return y


def _windows(draw: Draw, y: Node, own: tuple[int, ...], kind: str) -> Node:
    kernel = tuple(draw(st.integers(1, min(7, length + 2))) for length in y.shape[2:])  # type: ignore[operator]
    stride = tuple(draw(st.integers(1, 2)) * (s if draw(st.integers(0, 3)) else 1) for s in own)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    fits = all(k <= length + p for k, length, p in zip(kernel, y.shape[2:], padding, strict=True))  # type: ignore[operator]
    assume(fits)
    return pool(y, kind, *kernel, stride=stride, padding=padding, ceil_mode=draw(st.booleans()))


@st.composite
def windows_with_gaps(draw: Draw) -> Node:
    """A max or min over such a convolution, pooled or reduced as a whole, or over functions of it."""
    conv, kind = draw(convs_with_gaps()), draw(st.sampled_from(("max", "min")))
    y, spatial = draw(functions(conv)), list(range(2, conv.ndim))
    if draw(st.booleans()):
        dims = draw(st.sets(st.sampled_from(spatial), min_size=1)) | ({1} if draw(st.booleans()) else set())
        root = reduce(kind, y, *sorted(dims), keepdim=draw(st.booleans()))
    else:
        root = _windows(draw, y, conv.op.stride, kind)  # type: ignore[attr-defined]
    assume(rules.extreme_beside_gaps.condition({"root": root}) is None)
    return root


@st.composite
def pools_with_gaps(draw: Draw) -> Node:
    """A max or min over positions of pools of functions of such a convolution."""
    conv, kind = draw(convs_with_gaps()), draw(st.sampled_from(("max", "min")))
    inner = _windows(draw, draw(functions(conv)), conv.op.stride, kind)  # type: ignore[attr-defined]
    dims = draw(st.sets(st.sampled_from(range(2, conv.ndim)), min_size=1)) | ({1} if draw(st.booleans()) else set())
    root = reduce(kind, inner, *sorted(dims), keepdim=draw(st.booleans()))
    assume(rules.extreme_of_windows_beside_gaps.condition({"outer": root, "pool": inner}) is None)
    return root


@st.composite
def sums_with_gaps(draw: Draw) -> Node:
    """A sum, a mean or a logsumexp over positions of functions of such a convolution, or averages of windows."""
    conv = draw(convs_with_gaps())
    y, kind = draw(functions(conv, least=1)), draw(st.sampled_from(("sum", "mean", "logsumexp", "avg")))
    if kind == "avg":
        root = _windows(draw, y, conv.op.stride, kind)  # type: ignore[attr-defined]
    else:
        dims = draw(st.sets(st.sampled_from(range(2, y.ndim)), min_size=1)) | ({1} if draw(st.booleans()) else set())
        root = reduce(kind, y, *sorted(dims), keepdim=draw(st.booleans()))
    assume(rules.sum_beside_gaps.condition({"root": root}) is None)
    return root


@st.composite
def channels_with_gaps(draw: Draw) -> Node:
    """Channels of functions of such a convolution, reduced."""
    y = draw(functions(draw(convs_with_gaps())))
    kind = draw(st.sampled_from(("sum", "mean", "max", "logsumexp", "norm", "argmax")))
    root = reduce(kind, y, 1, keepdim=draw(st.booleans()))
    assume(rules.channels_between_gaps.condition({"root": root}) is None)
    return root


def gappy(*, batch: Any = B, length: Any = 5, **options: Any) -> Node:
    """Stride 2 with one tap along the first dimension, and three a stride of 3 apart along the second."""
    x, w = inp(batch, 4, length, 3), inp(4, 3, 1, 3)
    return conv(x, w, inp(6), **{"stride": (2, 3), "dilation": (1, 3), "groups": 2, "transposed": True} | options)


def line(taps: int, stride: int, dilation: int, *, length: Any = 6, **options: Any) -> Node:
    return conv(
        inp(2, 3, length), inp(3, 2, taps), inp(2), stride=stride, dilation=dilation, transposed=True, **options
    )


def sine(y: Node) -> Node:
    return pointwise("sin", y)


def square(y: Node) -> Node:
    return pointwise("mul", y, y)


ALIKE = "no reduced dimension has gaps at which its windows are alike"
NONE = "no reduced dimension has gaps of which its windows hold alike shares"
EXTREME = "what is reduced is not made of a transposed convolution, position by position"
POOLED = "what is pooled is not made of a transposed convolution, position by position"
UNDER = "no reduced dimension has gaps under joined windows"
SUM = "what is summed is no function of a transposed convolution, position by position"
CHANNELS = "what is reduced is no function of a transposed convolution, position by position"
SPECS = [
    RuleSpec(
        rules.extreme_beside_gaps,
        lambda: pool(gappy(), "max", 5, 7, stride=(4, 3), padding=(1, 2)),
        windows_with_gaps(),
        {
            EXTREME: lambda: reduce("max", conv(inp(2, 3, 9), inp(2, 3, 1), stride=2), 2),
            f"{EXTREME} # two of them": lambda: reduce("max", pointwise("add", line(1, 2, 1), line(1, 2, 1)), 2),
            f"{EXTREME} # beside another": lambda: reduce("max", pointwise("add", line(1, 2, 1), inp(2, 1, 11)), 2),
            f"{EXTREME} # another function": lambda: reduce("max", reduce("sum", gappy(), 2, keepdim=True), 3),
            "the windows span channels": lambda: pool(gappy(), "max", 3, 4, 6),
            "what is pooled has another operand of each position": lambda: pool(
                pointwise("mul", gappy(), inp(9, 1)), "max", 1, 7, stride=(1, 3), padding=(0, 2)
            ),
            f"{ALIKE} # only channels": lambda: reduce("max", gappy(), 1),
            f"{ALIKE} # stride 1": lambda: reduce("max", line(3, 1, 2), 2),
            f"{ALIKE} # taps between": lambda: reduce("max", line(2, 2, 3), 2),
            f"{ALIKE} # few neighbours, in windows": lambda: pool(line(2, 3, 1), "max", 3),
            f"{ALIKE} # a number for each position": lambda: reduce("max", pointwise("add", line(1, 2, 1), inp(11)), 2),
            f"{ALIKE} # unknown length": lambda: reduce("max", gappy(length=B, batch=2), 2),
            f"{ALIKE} # windows in other places": lambda: pool(line(2, 2, 2), "max", 5, stride=(3,)),
            f"{ALIKE} # dilated": lambda: pool(line(2, 2, 2), "max", 3, dilation=(2,), stride=(2,)),
            f"{ALIKE} # gaps alone": lambda: pool(line(1, 4, 1, padding=2), "max", 2, stride=(4,)),
            "a window holds no gap": lambda: pool(line(2, 2, 2), "max", 1, stride=(2,)),
            "a window lies in the padding alone": lambda: pool(
                conv(inp(2, 3, 4, 1), inp(3, 2, 1, 1), stride=(2, 1), transposed=True),
                *("max", 2, 2),
                stride=(2, 1),
                padding=(0, 1),
                dilation=(1, 2),
            ),
            "# a sum": lambda: reduce("sum", gappy(), 2, 3),
        },
    ),
    RuleSpec(
        rules.extreme_of_windows_beside_gaps,
        lambda: reduce("max", pool(pointwise("mul", gappy(), inp(6, 1, 1)), "max", 2, 7, stride=(2, 5)), 1, 2, 3),
        pools_with_gaps(),
        {
            "the two reduce differently": lambda: reduce("min", pool(gappy(), "max", 2, 7), 2, 3),
            POOLED: lambda: reduce("max", pool(conv(inp(2, 3, 9), inp(2, 3, 1), stride=2), "max", 2), 2),
            "the windows span channels": lambda: reduce("max", pool(gappy(), "max", 3, 4, 6), 2, 3),
            "what is pooled has another operand of each position": lambda: reduce(
                "max", pool(pointwise("mul", gappy(), inp(9, 1)), "max", 2, 7), 2, 3
            ),
            "a window lies in the padding alone": lambda: reduce(
                "max",
                pool(
                    conv(inp(2, 3, 4, 1), inp(3, 2, 1, 1), stride=(2, 1), transposed=True),
                    *("max", 2, 2),
                    stride=(2, 1),
                    padding=(0, 1),
                    dilation=(1, 2),
                ),
                2,
            ),
            f"{UNDER} # only channels": lambda: reduce("max", pool(gappy(), "max", 2, 7), 1),
            f"{UNDER} # between windows": lambda: reduce("max", pool(line(1, 2, 1), "max", 2, stride=(3,)), 2),
            f"{UNDER} # few neighbours": lambda: reduce("max", pool(line(2, 3, 1), "max", 2), 2),
            f"{UNDER} # taps between": lambda: reduce("max", pool(line(2, 2, 3), "max", 2), 2),
            f"{UNDER} # not in a window": lambda: reduce(
                "max", pool(line(1, 8, 1, length=2), "max", 1, stride=(9,)), 2
            ),
        },
    ),
    RuleSpec(
        rules.sum_beside_gaps,
        lambda: reduce("sum", square(line(2, 3, 1)), 2),
        sums_with_gaps(),
        {
            SUM: lambda: reduce("sum", sine(conv(inp(2, 3, 9), inp(2, 3, 1), stride=2)), 2),
            f"{SUM} # itself": lambda: reduce("sum", gappy(), 2, 3),
            "parts of the sum would be rounded": lambda: reduce("sum", make(ops.Cast(torch.float16), line(1, 2, 1)), 2),
            "it is not known how much is summed": lambda: reduce("sum", sine(gappy()), 0, 2),
            f"{NONE} # only channels": lambda: reduce("mean", sine(gappy()), 1),
            f"{NONE} # a run is cut": lambda: reduce("sum", sine(line(2, 3, 1, padding=1)), 2),
            f"{NONE} # taps between": lambda: reduce("logsumexp", sine(line(2, 2, 3)), 2),
            f"{NONE} # few neighbours, in windows": lambda: pool(sine(line(2, 3, 1)), "avg", 3),
            "what is summed has another operand of each position": lambda: pool(
                pointwise("mul", gappy(), inp(13)), "avg", 2, 3
            ),
            f"{NONE} # in different shares": lambda: pool(sine(line(1, 2, 1)), "avg", 3, stride=(1,)),
            f"{NONE} # no other positions": lambda: pool(sine(line(1, 4, 1, padding=2)), "avg", 2, stride=(4,)),
            "windows are not alike": lambda: pool(sine(gappy()), "avg", 2, 3, padding=(1, 0)),
            "# a product": lambda: reduce("prod", sine(gappy()), 2, 3),
        },
    ),
    RuleSpec(
        rules.channels_between_gaps,
        lambda: reduce("max", pointwise("mul", gappy(padding=((1, 1), (0, 0))), inp(6, 1, 1)), 1),
        channels_with_gaps(),
        {
            CHANNELS: lambda: reduce("max", conv(inp(2, 3, 9), inp(2, 3, 1), stride=2), 1),
            f"{CHANNELS} # a residual": lambda: reduce("max", pointwise("add", line(1, 2, 1), inp(2, 2, 11)), 1),
            "no dimension has gaps": lambda: reduce("max", line(3, 2, 1), 1),
            "no dimension has gaps # unknown length": lambda: reduce("max", line(1, 2, 1, length=B), 1),
            "# positions as well": lambda: reduce("max", gappy(), 1, 2),
        },
    ),
]
