"""Specs for `fusewright.rules.features`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from harness import B, RuleSpec, inp, param
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw, adaptive, avg_pool, conv, convs, matmuls, range_sum, reduce, reductions

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.rules import features as rules


def grouped(*, batch: Any = 2, groups: int = 2, out: int = 6, transposed: bool = False, bias: bool = True) -> Node:
    """A convolution of 4 channels in groups."""
    weight = inp(4, out // groups, 2) if transposed else inp(out, 4 // groups, 2)
    return conv(inp(batch, 4, 5), weight, inp(out) if bias else None, groups=groups, transposed=transposed)


def linear(*, rows: Any = 3, out: int = 4, transpose: bool = True, dtype: torch.dtype = torch.float64) -> Node:
    """x (2, rows, 5) with a weight of two dimensions, and a bias."""
    w = inp(out, 5, dtype=dtype) if transpose else inp(5, out, dtype=dtype)
    return make(ops.Matmul(transpose), inp(2, rows, 5, dtype=dtype), w, inp(out, dtype=dtype))


def batched(*, lead: tuple[int, ...] = (2,), weights: tuple[int, ...] = (2,)) -> Node:
    """x (*lead, 3, 5) with a weight that has leading dimensions of its own."""
    return make(ops.Matmul(False), inp(*lead, 3, 5), inp(*weights, 5, 4), None)


def whole_numbers(*dims: int) -> Node:
    return reduce("sum", linear(dtype=torch.int64), *dims)


def slot(*bounds: int, scale: float = 1.0) -> ops.Slot:
    start, stop, step = (*bounds, 1)[:3]
    return ops.Slot(start, stop, step, scale)


def pooled(y: Node, kind: str = "avg") -> Node:
    """Two values each, half of them in the next window, too."""
    return make(ops.Pool(kind, (2,), (1,), (0,), (1,)), y)  # type: ignore[arg-type]


@st.composite
def pooled_channels(draw: Draw) -> Node:
    """A sum or mean over the channels, and perhaps other dimensions, of any convolution's pooled output."""
    return channels_of_pool(draw, draw(convs(draw(st.booleans()))))


@st.composite
def pooled_values(draw: Draw) -> Node:
    """The same of any other values, whose windows share some."""
    n = draw(st.integers(1, 3))
    lengths = st.integers(1, 5)
    root = channels_of_pool(draw, inp(draw(st.sampled_from((B, 2))), *(draw(lengths) for _ in range(n + 1))))
    match = rules.channels_before_pool.pattern.match(root)
    assume(match is not None and rules.channels_before_pool.condition(match) is None)
    return root


def channels_of_pool(draw: Draw, y: Node) -> Node:
    """A sum or mean over the channels, and perhaps other dimensions, of an average pooling of y."""
    kernel = [draw(st.integers(1, min(3, int(length)))) for length in y.shape[2:]]
    stride, padding = (tuple(draw(st.integers(low, max(low, k // 2))) for k in kernel) for low in (1, 0))
    pool = avg_pool(y, *kernel, stride=stride, padding=padding)
    more = [d for d in range(2, pool.ndim) if draw(st.booleans())]
    return reduce(draw(st.sampled_from(["sum", "mean"])), pool, 1, *more, keepdim=draw(st.booleans()))


@st.composite
def channel_sums(draw: Draw) -> Node:
    """A linear reduction over the channels of any convolution; each slot in its group."""
    y = draw(convs(draw(st.booleans())))
    groups = y.op.groups  # type: ignore[attr-defined]
    if groups == 1:
        return draw(reductions(y, (1,)))
    width = y.shape[1] // groups
    own = [draw(group_slots(width)) for _ in range(groups)]
    if y.op.transposed or draw(st.booleans()):  # type: ignore[attr-defined]
        own = [own[0]] * groups
    per = min(map(len, own))
    local = [
        replace(s, start=s.start + g * width, stop=s.stop + g * width) for g in range(groups) for s in own[g][:per]
    ]
    return range_sum(y, d1=tuple(local))


@st.composite
def group_slots(draw: Draw, width: int) -> tuple[ops.Slot, ...]:
    """Ranges of channels within one group."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, width - 1))
        found.append(slot(start, draw(st.integers(start + 1, width)), scale=draw(st.sampled_from((1.0, 0.5)))))
    return tuple(found)


@st.composite
def group_sums(draw: Draw) -> Node:
    """The sum or mean over all channels of a grouped convolution, and perhaps over more."""
    y = draw(convs(draw(st.booleans()), groups=(2, 3)))
    dims = [1, *(d for d in (0, *range(2, y.ndim)) if draw(st.booleans()))]
    return reduce(draw(st.sampled_from(("sum", "mean"))), y, *sorted(dims), keepdim=draw(st.booleans()))


@st.composite
def feature_sums(draw: Draw) -> Node:
    """A linear reduction over the output features of any matmul."""
    y = draw(matmuls())
    return draw(reductions(y, (y.ndim - 1,)))


@st.composite
def row_sums(draw: Draw) -> Node:
    """A linear reduction over rows of any matmul."""
    y = draw(matmuls())
    x, w = y.arg(0), y.arg(1)
    assume(x.ndim == y.ndim)
    free = [d for d in range(y.ndim - 1) if d == y.ndim - 2 or w.ndim < y.ndim - d or w.shape[d - y.ndim] == 1]
    return draw(reductions(y, tuple(free)))


@st.composite
def batch_sums(draw: Draw) -> Node:
    """The sum or mean over the batch of any convolution, and perhaps over more."""
    y = draw(convs(draw(st.booleans()), batch=st.sampled_from((B, 2, 3))))
    dims = [0, *(d for d in range(1, y.ndim) if draw(st.booleans()))]
    return reduce(draw(st.sampled_from(("sum", "mean"))), y, *dims, keepdim=draw(st.booleans()))


ANOTHER = "sums in another dtype than its operand's"
UNKNOWN, EMPTY = "the length of a reduced dimension is not known", "a reduced dimension is empty"
GROUPS = "a slot of channels reaches over groups"
CHANNELS = {
    "the channels are not reduced": lambda: reduce("sum", grouped(), 0, 2),
    ANOTHER: lambda: reduce("sum", grouped(), 1, dtype=torch.float32),
    EMPTY: lambda: reduce("sum", conv(inp(2, 4, 5), inp(0, 4, 2)), 1),
    UNKNOWN: lambda: reduce("sum", conv(inp(2, 4, 5), inp(B, 4, 2)), 1),
    "# max": lambda: reduce("max", grouped(), 1),
    "# not a convolution": lambda: reduce("sum", inp(2, 3, 4), 1),
}

SPECS = [
    RuleSpec(
        rules.channels_into_conv_weight,
        lambda: avg_pool(grouped(batch=B), 3, 1),
        channel_sums(),
        {
            **CHANNELS,
            GROUPS: lambda: reduce("mean", grouped(), 1),
            f"{GROUPS} # three slots, two groups": lambda: adaptive(grouped(), d1=3),
            f"{GROUPS} # starts before": lambda: range_sum(grouped(), d1=(slot(0, 3), slot(2, 4))),
            f"{GROUPS} # stops behind": lambda: range_sum(grouped(), d1=(slot(0, 4), slot(3, 6))),
            f"{GROUPS} # one slot more": lambda: range_sum(grouped(), d1=(slot(0, 2), slot(1, 3), slot(3, 6))),
            f"{GROUPS} # not alike, transposed": lambda: range_sum(
                grouped(transposed=True), d1=(slot(0, 3), slot(3, 5))
            ),
        },
        lambda: range_sum(grouped(batch=B), d1=(slot(1, 3, scale=0.5), slot(0, 0), slot(3, 6), slot(0, 0))),
    ),
    RuleSpec(
        rules.channels_before_pool,
        lambda: reduce("mean", pooled(grouped(batch=B)), 1),
        st.one_of(pooled_channels(), pooled_values()),
        {
            "the channels are not reduced": lambda: reduce("sum", pooled(grouped()), 0, 2),
            "the channels are pooled": lambda: reduce("sum", avg_pool(grouped(), 2, 2), 1),
            ANOTHER: lambda: reduce("sum", pooled(grouped()), 1, dtype=torch.float32),
            EMPTY: lambda: reduce("sum", pooled(conv(inp(2, 4, 5), inp(0, 4, 2))), 1),
            UNKNOWN: lambda: reduce("sum", pooled(conv(inp(2, 4, 5), inp(B, 4, 2))), 1),
            "# a max over channels": lambda: reduce("max", pooled(grouped()), 1),
            "# a max pooling": lambda: reduce("sum", pooled(grouped(), "max"), 1),
            "the windows lie apart": lambda: reduce("sum", avg_pool(inp(2, 4, 6), 2), 1),
            "the windows lie apart # and leave gaps": lambda: reduce("sum", avg_pool(inp(2, 4, 6), 2, stride=(3,)), 1),
        },
        lambda: reduce("sum", pooled(grouped(batch=B, transposed=True)), 1, 2, keepdim=True),
    ),
    RuleSpec(
        rules.channels_over_groups,
        lambda: reduce("mean", grouped(batch=B), 1, 2),
        group_sums(),
        {
            **CHANNELS,
            "the convolution has no groups": lambda: reduce("sum", grouped(groups=1), 1),
            "# pool": lambda: avg_pool(grouped(), 6, 2),
            "# range sum": lambda: adaptive(grouped(), d1=1),
        },
        lambda: reduce("mean", grouped(batch=B, out=4, transposed=True), 1),
    ),
    RuleSpec(
        rules.features_into_weight,
        lambda: reduce("mean", linear(), 1, 2),
        feature_sums(),
        {
            "the features are not reduced": lambda: reduce("sum", linear(), 0, 1),
            "the features are not reduced # pool of rows": lambda: adaptive(linear(), d1=2),
            ANOTHER: lambda: reduce("mean", linear(), 2, dtype=torch.float32),
            f"{ANOTHER} # whole numbers": lambda: whole_numbers(2),
            EMPTY: lambda: reduce("sum", linear(out=0), 2),
            UNKNOWN: lambda: reduce("sum", make(ops.Matmul(), inp(2, 3), inp(3, B), None), 1),
            "# max": lambda: reduce("max", linear(), 2),
            "# not a matmul": lambda: reduce("sum", inp(2, 3, 4), 2),
        },
        lambda: avg_pool(linear(transpose=False), 2, 2, stride=(1, 2)),
    ),
    RuleSpec(
        rules.rows_before_matmul,
        lambda: reduce("mean", linear(), 1),
        row_sums(),
        {
            "no rows are reduced, or the weight has them too": lambda: reduce("sum", linear(), 2),
            "no rows are reduced, or the weight has them too # the weight": lambda: reduce("sum", batched(), 0, 2),
            "no rows are reduced, or the weight has them too # further out": lambda: reduce(
                "sum", batched(lead=(3, 2), weights=(3, 1)), 0
            ),
            "the weight has more dimensions than the input": lambda: reduce("sum", batched(lead=()), 1),
            ANOTHER: lambda: reduce("sum", linear(), 1, dtype=torch.float32),
            f"{ANOTHER} # whole numbers": lambda: whole_numbers(1),
            EMPTY: lambda: reduce("sum", linear(rows=0), 1),
            UNKNOWN: lambda: reduce("sum", linear(rows=B), 1),
            "# max": lambda: reduce("max", linear(), 1),
            "# not a matmul": lambda: reduce("sum", inp(2, 3, 4), 1),
        },
        lambda: avg_pool(make(ops.Matmul(), inp(2, 4, 3), inp(3, 5), inp(5)), 2, 1, padding=(1, 0)),
    ),
    RuleSpec(
        rules.batch_before_conv,
        lambda: reduce("sum", grouped(batch=B), 0),
        batch_sums(),
        {
            "the batch is not reduced": lambda: reduce("sum", grouped(batch=B), 1, 2),
            "the batch has one entry": lambda: reduce("sum", grouped(batch=1), 0),
            ANOTHER: lambda: reduce("mean", grouped(), 0, dtype=torch.float32),
            "# max": lambda: reduce("max", grouped(), 0),
            "# pool": lambda: avg_pool(grouped(), 1, 2),
            "# not a convolution": lambda: reduce("sum", inp(2, 3, 4), 0),
        },
        lambda: reduce("sum", conv(inp(B, 2, 5), param(3, 2, 2), param(3)), 0, 1),  # N*b is not derived ahead
    ),
]
