"""Sums and means of all that average pools give: where windows lie side by side, of what these hold.

Below, x is (N, C, *), P all pooled dimensions and any others.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isclose, prod

from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Conv, Pool, RangeSum, Reduce, Slot
from fusewright.ir.slots import Slots
from fusewright.rules.linear import finish, is_linear, reduced_dims, refuse_linear, slots_along
from fusewright.rules.rule import Match, Rule, op, rule, value
from fusewright.rules.windows import sum_through_conv, sum_through_conv_transpose


def _joined(windows: Slots) -> Slot | None:
    """What windows of one scale that lie side by side hold; `None` where they overlap or leave gaps."""
    some = [s for s in windows if s.count]
    touching = all(a.end == b.start for a, b in pairwise(some))
    if not some or not touching or len({s.scale for s in windows}) > 1:
        return None
    return Slot(some[0].start, some[-1].end, 1, windows[0].scale)


def _ranges(m: Match) -> dict[int, Slot]:
    """What the sum adds up of x along pooled dimensions, where that is one range, and what it makes of that."""
    found = {}
    for d in reduced_dims(m["pool"]):
        held = _joined(slots_along(m["pool"], d))
        if held is not None:
            found[d] = replace(held, scale=held.scale * slots_along(m["sum"], d)[0].scale)
    return found


def _refuse_windows(m: Match) -> str | None:
    outer, dims = m["sum"], reduced_dims(m["pool"])
    if not set(dims) <= set(reduced_dims(outer)):
        return "not all pooled dimensions are summed"
    reason = refuse_linear(m["pool"], dims) or refuse_linear(outer, dims)
    if reason is None and len(_ranges(m)) < len(dims):
        return "the windows overlap, leave gaps or are of several scales"
    return reason


def _refuse_whole(m: Match) -> str | None:
    reason = _refuse_windows(m)
    if reason is None and any(s.count != m["x"].shape[d] for d, s in _ranges(m).items()):
        return "the windows stop short of the end"
    return reason


@rule(
    "sum_P(avg_pool(x)) = sum_P(x)/k",
    pattern=op("sum", Reduce, of=(op("pool", Pool, of=(value("x"),), where=is_linear),), where=is_linear),
    condition=_refuse_whole,
    exactness="reassociates",
)
def sum_of_pool(m: Match) -> Node:
    """sum_P(avg_pool_{k,k}(x)) -> sum_P(x) / k, mean_P(avg_pool_{k,k}(x)) -> mean_P(x).

    Windows touch, have one divisor, and hold all of x.  Class reassociates.
    """
    whole = make(m["sum"].op, m["x"])
    factor = prod(s.scale / slots_along(whole, d)[0].scale for d, s in _ranges(m).items())
    return whole if isclose(factor, 1.0) else pointwise("mul", whole, factor)


def _of_conv(m: Match) -> tuple[Rule, Match]:
    """The rule that moves the sum of what the windows hold through their convolution, and what it is applied to."""
    conv = m["conv"]
    table: dict[int, Slots] = {d: (s,) for d, s in _ranges(m).items()}
    through = sum_through_conv_transpose if conv.op.transposed else sum_through_conv  # type: ignore[attr-defined]
    return through, {"reduction": make(RangeSum(tuple(sorted(table.items())), conv.dtype), conv), "conv": conv}


def _refuse_through(m: Match) -> str | None:
    reason = _refuse_windows(m)
    if reason is not None:
        return reason
    through, match = _of_conv(m)
    return through.condition(match)


@rule(
    "sum_P(avg_pool(conv(x, w))) = conv(rangesum_taps(x), w)",
    pattern=op("sum", Reduce, of=(op("pool", Pool, of=(op("conv", Conv),), where=is_linear),), where=is_linear),
    condition=_refuse_through,
    exactness="reassociates",
    hides=True,
)
def sum_of_pooled_conv(m: Match) -> Node:
    """sum_P(avg_pool_{k,k}(conv(x, w) + b)) -> conv'(R, w) + |P|*b, with R[c, u] one range sum of x per tap u.

    Windows touch and have one divisor; they may stop short of the end.  Holds for convolutions as the rules for plain
    sums do, transposed ones included.  By itself, a sum of what the windows hold would only keep the pool out of the
    convolution's kernel.  Class reassociates.
    """
    through, match = _of_conv(m)
    return finish(m["sum"], through.replacement(match), tuple(_ranges(m)))


RULES: tuple[Rule, ...] = (sum_of_pool, sum_of_pooled_conv)
