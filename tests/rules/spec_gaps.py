"""Specs for `fusewright.rules.gaps`."""

from __future__ import annotations

from typing import Any

from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw, conv, reduce
from spec_pooling import pool

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.rules import gaps as rules


@st.composite
def convs_with_gaps(draw: Draw) -> Node:
    """A transposed convolution of any stride, crop and output padding, with one tap or taps a stride apart."""
    n, g = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2)))
    channels, out = g * draw(st.integers(1, 2)), g * draw(st.integers(1, 2))
    lengths, taps, stride, crop, spread, extra = [], [], [], [], [], []
    for _ in range(n):
        stride.append(draw(st.integers(1, 3)))
        taps.append(draw(st.integers(1, 3)))
        regular = taps[-1] == 1 or draw(st.integers(0, 3))
        spread.append(stride[-1] * draw(st.integers(1, 2)) if regular else draw(st.integers(1, 3)))
        crop.append(draw(st.integers(0, 3)))
        extra.append(draw(st.integers(0, max(stride[-1], spread[-1]) - 1)))
        lengths.append(draw(st.integers(2, 5)))
    bias = inp(out) if draw(st.booleans()) else None
    x, w = inp(draw(st.sampled_from((B, 1, 3))), channels, *lengths), inp(channels, out // g, *taps)
    op = ops.Conv(tuple(stride), tuple((c, c) for c in crop), tuple(spread), g, True, tuple(extra))
    assume(all(length > 0 for length in op.spatial(lengths, taps)))
    return make(op, x, w, bias)


@st.composite
def windows_with_gaps(draw: Draw) -> Node:
    """A max or min over such a convolution, pooled or reduced as a whole."""
    y, kind = draw(convs_with_gaps()), draw(st.sampled_from(("max", "min")))
    spatial = list(range(2, y.ndim))
    if draw(st.booleans()):
        dims = draw(st.sets(st.sampled_from(spatial), min_size=1)) | ({1} if draw(st.booleans()) else set())
        root = reduce(kind, y, *sorted(dims), keepdim=draw(st.booleans()))
    else:
        own = y.op.stride  # type: ignore[attr-defined]
        kernel = tuple(draw(st.integers(1, min(7, length + 2))) for length in y.shape[2:])  # type: ignore[operator]
        stride = tuple(draw(st.integers(1, 2)) * (s if draw(st.integers(0, 3)) else 1) for s in own)
        padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        fits = all(k <= length + p for k, length, p in zip(kernel, y.shape[2:], padding, strict=True))  # type: ignore[operator]
        assume(fits)
        root = pool(y, kind, *kernel, stride=stride, padding=padding, ceil_mode=draw(st.booleans()))
    assume(rules.extreme_beside_gaps.condition({"root": root, "conv": y}) is None)
    return root


def gappy(*, batch: Any = B, length: Any = 5, **options: Any) -> Node:
    """Stride 2 with one tap along the first dimension, and three a stride of 3 apart along the second."""
    x, w = inp(batch, 4, length, 3), inp(4, 3, 1, 3)
    return conv(x, w, inp(6), **{"stride": (2, 3), "dilation": (1, 3), "groups": 2, "transposed": True} | options)


def line(taps: int, stride: int, dilation: int, **options: Any) -> Node:
    return conv(inp(2, 3, 6), inp(3, 2, taps), inp(2), stride=stride, dilation=dilation, transposed=True, **options)


ALIKE = "no reduced dimension has gaps at which its windows are alike"
SPECS = [
    RuleSpec(
        rules.extreme_beside_gaps,
        lambda: pool(gappy(), "max", 5, 7, stride=(4, 3), padding=(1, 2)),
        windows_with_gaps(),
        {
            "the convolution is not transposed": lambda: reduce("max", conv(inp(2, 3, 9), inp(2, 3, 1), stride=2), 2),
            "the windows span channels": lambda: pool(gappy(), "max", 3, 4, 6),
            f"{ALIKE} # only channels": lambda: reduce("max", gappy(), 1),
            f"{ALIKE} # stride 1": lambda: reduce("max", line(3, 1, 2), 2),
            f"{ALIKE} # taps between": lambda: reduce("max", line(2, 2, 3), 2),
            f"{ALIKE} # unknown length": lambda: reduce("max", gappy(length=B, batch=2), 2),
            f"{ALIKE} # windows in other places": lambda: pool(line(2, 2, 2), "max", 5, stride=(3,)),
            f"{ALIKE} # dilated": lambda: pool(line(2, 2, 2), "max", 3, dilation=(2,), stride=(2,)),
            f"{ALIKE} # gaps alone": lambda: pool(line(1, 4, 1, padding=2), "max", 2, stride=(4,)),
            "a window holds no gap": lambda: pool(line(2, 2, 2), "max", 1, stride=(2,)),
            "# another function": lambda: reduce("sum", gappy(), 2, 3),
        },
    ),
]
