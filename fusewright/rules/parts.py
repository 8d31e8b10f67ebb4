"""Average poolings that are written in another way.

    mean_{3,5}(reshape(x)) = avg_pool(x)      of x (N, C, H, W) seen as (N, C, H/2, 2, W/2, 2)
    interpolate(x) = avg_pool(x)              to half the length

A pooling is a mean over part of a split dimension where shapes are written (`einops.reduce`, `pixel_unshuffle(x)
.mean(1)`, groups of features).  As range sums and pools they slide in front of a convolution, or move into the weight.
"""

from __future__ import annotations

from itertools import groupby
from math import prod

from fusewright.ir.build import range_sum, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Conv, Interpolate, Matmul, Pool, Reduce, Reshape, Slot
from fusewright.ir.slots import Slots
from fusewright.ir.types import same_numel
from fusewright.rules.linear import FLOATS, is_linear
from fusewright.rules.rule import Match, Rule, op, rule, value


def _base(m: Match) -> Node:
    """What is seen, perhaps through several views."""
    x = m["x"]
    while isinstance(x.op, Reshape):
        x = x.arg(0)
    return x


def _split(m: Match) -> list[list[int]] | None:
    """Which dimensions longer than 1 of the view each one of x is split into; `None` where one has parts of several."""
    x, shape = _base(m).shape, m["view"].shape
    found: list[list[int]] = []
    at = 0
    for d in range(len(x)):
        start = at
        while at < len(shape) and not same_numel(shape[:at], x[: d + 1]):
            at += 1
        if not same_numel(shape[:at], x[: d + 1]):
            return None
        found.append([i for i in range(start, at) if shape[i] != 1])
    return found


def _tables(m: Match) -> dict[int, Slots] | None:
    """The slots along each dimension of x of which elements are joined; `None` where they are no ranges."""
    root, length = m["reduction"].op, _base(m).shape
    assert isinstance(root, Reduce)
    tables: dict[int, Slots] = {}
    for d, dims in enumerate(_split(m) or ()):
        runs = [(joined, list(run)) for joined, run in groupby(dims, lambda i: i in root.dims)]
        if not any(joined for joined, _ in runs):
            continue
        n, inner = length[d], prod(m["view"].shape[i] for i in runs[-1][1])
        if len(runs) > 2 or not isinstance(n, int) or not isinstance(inner, int):
            return None
        size = inner if runs[-1][0] else n // inner
        scale = 1.0 if root.kind == "sum" else 1.0 / size
        if runs[-1][0]:  # neighbours, or all of them
            tables[d] = tuple(Slot(start, start + size, 1, scale) for start in range(0, n, size))
        else:
            tables[d] = tuple(Slot(start, n - inner + start + 1, inner, scale) for start in range(inner))
    return tables


def _refuse(m: Match) -> str | None:
    root, x = m["reduction"], _base(m)
    if str(x.dtype) not in FLOATS or root.dtype != x.dtype:
        return "sums in another dtype than its operand's"
    if 0 in x.shape:
        return "a dimension is empty"
    tables = _tables(m)
    if not tables or all(len(slots) == 1 for slots in tables.values()):
        return "no part of a dimension is joined, or no range"
    features = x.ndim - 1 if isinstance(x.op, Matmul) else 1
    goes = isinstance(x.op, Conv | Matmul) and any(len(tables[d]) > 1 for d in tables if d >= min(features, 2))
    return None if goes else "no convolution or product that goes with it lies below"


@rule(
    "mean(split(x)) = range_sum(x)",
    pattern=op("reduction", Reduce, of=(op("view", Reshape, of=(value("x"),)),), where=is_linear),
    condition=_refuse,
    exactness="reassociates",
    invests=True,
)
def mean_of_split(m: Match) -> Node:
    """sum or mean over parts of split dimensions, and perhaps over others -> a range sum along each.

    x (N, C, H, W) seen as (N, C, H/k, k, W/l, l) over (3, 5): windows (k, l); seen as (N, g, C/g, H, W) over 1: every
    C/g-th channel.  Of a convolution or a product.  Class reassociates.
    """
    root, tables = m["reduction"], _tables(m)
    assert tables
    return reshape(range_sum(_base(m), tables, root.dtype), root.shape)


def _halves(m: Match) -> tuple[int, ...]:
    """How many neighbours each element of the result is the mean of, along each of the last dimensions."""
    return tuple(2 if n != to else 1 for n, to in zip(m["conv"].shape[2:], m["root"].shape[2:], strict=True))


def _refuse_interpolation(m: Match) -> str | None:
    lengths = zip(m["conv"].shape[2:], _halves(m), m["root"].shape[2:], strict=True)
    if m["root"].op.kind != "linear":  # type: ignore[attr-defined]
        return "more than two neighbours weigh"
    if m["root"].op.aligned or any(n != k * to for n, k, to in lengths):  # type: ignore[attr-defined]
        return "an element lies elsewhere than halfway between two"
    return None


@rule(
    "interpolate_half(conv(x)) = avg_pool(conv(x))",
    pattern=op("root", Interpolate, of=(op("conv", Conv),)),
    condition=_refuse_interpolation,
    exactness="reassociates",
    invests=True,
)
def interpolation_to_half(m: Match) -> Node:
    """conv(x) (N, C, *L) interpolated linearly to L/2, corners apart -> avg_pool_2(conv(x)); L may stay along some.

    Element i lies at 2i + 1/2, halfway between two, which weigh 1/2 each.  Class reassociates.
    """
    kernel = _halves(m)
    zeros, ones = (0,) * len(kernel), (1,) * len(kernel)
    return make(Pool("avg", kernel, kernel, zeros, ones), m["conv"], where=m["root"].where)


RULES: tuple[Rule, ...] = (mean_of_split, interpolation_to_half)
