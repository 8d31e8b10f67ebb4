"""Transposed convolutions that leave gaps: positions that no tap writes to, which hold the bias alone.

    max(f(conv_transpose_s(x, w) + b)) = max(f(b), max'(f(conv_transpose_1(x, w) + b)))

What is made of each position's channels alone is the same at all gaps, and is computed once (`gap_positions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import log, prod

import torch

from fusewright.ir.build import pointwise, range_sum, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Cat, Expand, Pool, RangeSum, Reduce, Slice, Slot
from fusewright.ir.slots import solve
from fusewright.ir.types import Size
from fusewright.rules.gap_positions import Dense, Dims, Made, made_of, without_gaps
from fusewright.rules.linear import reduced_dims, slots_along
from fusewright.rules.pooling import padded_away
from fusewright.rules.rule import Match, Rule, op, rule

_CHOICE = {"max": "maximum", "min": "minimum"}


# -- the greatest and the least


def _windowed(root: Node, d: int, dense: Dense) -> Dense | None:
    """`dense` with the windows of `root` along it; `None` where those are not alike without the gaps."""
    op, length = root.op, root.arg(0).shape[d]
    if isinstance(op, Reduce):
        return dense
    assert isinstance(op, Pool) and isinstance(length, int)
    i = d - (root.ndim - len(op.kernel))
    if op.stride[i] % dense.stride or op.dilation[i] != 1 or dense.run > 1:
        return None
    before = (op.padding[i] + dense.first) // dense.stride
    kernel = (op.kernel[i] - 1 - op.padding[i] - dense.first) // dense.stride + before + 1
    step = op.stride[i] // dense.stride
    if kernel < 1 or before < 0 or 2 * before > kernel:
        return None
    slots = root.shape[d]
    assert isinstance(slots, int)
    pool = Pool(op.kind, (kernel,), (step,), (before,), (1,), op.ceil_mode)
    # where the last gaps are too few for one more window, what is left of them may have one
    enough = (dense.length, (slots - 1) * step - before + kernel)
    kept = next((n for n in enough if n <= dense.length and pool.length(0, n) == slots), None)
    if kept is None:
        return None
    counts = [_inside(j * step - before, kernel, kept) for j in range(slots)]
    all_counts = [_inside(j * op.stride[i] - op.padding[i], op.kernel[i], length) for j in range(slots)]
    if min(counts) < 1:
        return None
    covered = all(some < many for some, many in zip(counts, all_counts, strict=True))
    return replace(dense, kernel=kernel, step=step, before=before, kept=kept, covered=covered)


def _inside(start: int, count: int, length: int) -> int:
    """How many of `count` positions from `start` on are those of `length`."""
    return min(start + count, length) - max(start, 0)


def _dense_dims(root: Node, made: Made) -> Dims:
    """The reduced dimensions along which gaps can be left out."""
    fitting = {d: _windowed(root, d, dense) for d, dense in made.dense(reduced_dims(root)).items()}
    return {d: dense for d, dense in fitting.items() if dense is not None}


def _refuse_extreme(m: Match) -> str | None:
    root, made = m["root"], made_of(m["root"].arg(0))
    if made is None:
        return "what is reduced is not made of a transposed convolution, position by position"
    if isinstance(root.op, Pool) and reduced_dims(root)[0] < 2:
        return "the windows span channels"
    if isinstance(root.op, Pool) and not made.free.issuperset(reduced_dims(root)):
        return "what is pooled has another operand of each position"
    if padded_away(root):
        return "a window lies in the padding alone"
    dense = _dense_dims(root, made)
    if not dense:
        return "no reduced dimension has gaps at which its windows are alike"
    return None if any(d.covered for d in dense.values()) else "a window holds no gap"


def _is_extreme(node: Node) -> bool:
    return getattr(node.op, "kind", "") in _CHOICE


@rule(
    "max(f(conv_transpose_s(x, w) + b)) = max(f(b), max'(f(conv_transpose_1(x, w) + b)))",
    pattern=op("root", Pool, Reduce, where=_is_extreme),
    condition=_refuse_extreme,
    exactness="reassociates",
)
def extreme_beside_gaps(m: Match) -> Node:
    """max over windows of a transposed convolution with gaps -> max(b, max over its other positions); likewise min, and
    of what is made of its positions one by one.

    x (N, C, *L), w (C, O/g, *K), stride s and dilation d: along dimensions with one tap, or where s divides d, the
    positions between are left out; windows that advance by a multiple of s hold the same share of them, and each holds
    a gap.  Class reassociates: another kernel's order.
    """
    root = m["root"]
    made = made_of(root.arg(0))
    assert made is not None
    dense = _dense_dims(root, made)
    op = root.op
    assert isinstance(op, Pool | Reduce)
    others = make(_over_others(root, dense), made.of(without_gaps(made.conv, dense)))
    if not made.nodes and made.conv.args[2] is None:
        return pointwise("clamp_min" if op.kind == "max" else "clamp_max", others, params=(0.0,))
    gaps = made.of_gaps()
    return pointwise(_CHOICE[op.kind], others, gaps if isinstance(op, Pool) else make(op, gaps))


def _over_others(root: Node, dense: Dims) -> Pool | Reduce:
    """The reduction of `root` over the positions that are left."""
    op = root.op
    if isinstance(op, Reduce):
        return op
    assert isinstance(op, Pool)
    kernel, stride, padding = list(op.kernel), list(op.stride), list(op.padding)
    for d, along in dense.items():
        i = d - (root.ndim - len(op.kernel))
        kernel[i], stride[i], padding[i] = along.kernel, along.step, along.before
    return replace(op, kernel=tuple(kernel), stride=tuple(stride), padding=tuple(padding))


def _dense_under_windows(outer: Node, pool: Node, made: Made) -> Dims:
    """The dimensions that `outer` reduces, and that have gaps, with as many positions as windows of `pool` reach; those
    windows overlap or touch, and some of the gaps lie in them."""
    op = pool.op
    assert isinstance(op, Pool)
    found, spatial = {}, pool.ndim - len(op.kernel)
    for d, along in made.dense(reduced_dims(outer)).items():
        i, slots, length = d - spatial, pool.shape[d], made.conv.shape[d]
        if i < 0 or op.dilation[i] > 1 or op.stride[i] > op.kernel[i] or along.run > 1:
            continue
        assert isinstance(slots, int) and isinstance(length, int)
        stop = min(length, (slots - 1) * op.stride[i] + op.kernel[i] - op.padding[i])
        kept = min(along.length, -((along.first - stop) // along.stride))
        if 0 < kept < stop:
            found[d] = replace(along, kept=kept, covered=True)
    return found


def _refuse_windows(m: Match) -> str | None:
    outer, pool = m["outer"], m["pool"]
    if getattr(outer.op, "kind", "") != getattr(pool.op, "kind", ""):
        return "the two reduce differently"
    made = made_of(pool.arg(0))
    if made is None:
        return "what is pooled is not made of a transposed convolution, position by position"
    if reduced_dims(pool)[0] < 2:
        return "the windows span channels"
    if not made.free.issuperset(reduced_dims(pool)):
        return "what is pooled has another operand of each position"
    if padded_away(pool):
        return "a window lies in the padding alone"
    return None if _dense_under_windows(outer, pool, made) else "no reduced dimension has gaps under joined windows"


@rule(
    "max_P(maxpool(f(conv_transpose_s(x, w) + b))) = max(f(b), max_P(f(conv_transpose_1(x, w) + b)))",
    pattern=op("outer", Reduce, of=(op("pool", Pool),), where=_is_extreme),
    condition=_refuse_windows,
    exactness="reassociates",
)
def extreme_of_windows_beside_gaps(m: Match) -> Node:
    """max over positions of max pools of a transposed convolution with gaps -> max(b, max over its other positions
    that some window has); likewise min, and of what is made of its positions one by one.

    x (N, C, *L), w (C, O/g, *K), one tap or taps a stride apart; windows that overlap or touch, and may stop short of
    the end, where plain maxima of all positions would not do.  Class reassociates: another kernel's order.
    """
    outer, pool = m["outer"], m["pool"]
    made = made_of(pool.arg(0))
    assert made is not None
    dense = _dense_under_windows(outer, pool, made)
    gaps = make(outer.op, made.of_gaps())
    others = make(outer.op, _pooled_elsewhere(pool, made.of(without_gaps(made.conv, dense)), dense))
    return pointwise(_CHOICE[outer.op.kind], others, gaps)  # type: ignore[attr-defined]


def _pooled_elsewhere(pool: Node, x: Node, dims: Iterable[int]) -> Node:
    """The windows of `pool` over x, along other dimensions than these."""
    op, done = pool.op, {d - x.ndim for d in dims}
    assert isinstance(op, Pool)

    def elsewhere(values: tuple[int, ...], otherwise: int) -> tuple[int, ...]:
        return tuple(otherwise if d in done else values[d] for d in range(-len(values), 0))

    kernel, stride = elsewhere(op.kernel, 1), elsewhere(op.stride, 1)
    if set(kernel) == set(stride) == {1}:
        return x
    padding, dilation = elsewhere(op.padding, 0), elsewhere(op.dilation, 1)
    return make(replace(op, kernel=kernel, stride=stride, padding=padding, dilation=dilation), x)


# -- sums


_Table = dict[int, tuple[Slot, ...]]


def _slots(root: Node) -> _Table:
    """The slots of window sums or averages."""
    return {d: slots_along(root, d) for d in reduced_dims(root)}


def _slots_left(table: _Table, dense: Dims) -> _Table:
    """The same over the positions that are left."""
    solved = {
        d: tuple(solve(along.stride, along.first, s, along.length) for s in table[d]) for d, along in dense.items()
    }
    return {**table, **solved}


def _alike(slots: tuple[Slot, ...]) -> float | None:
    """What a constant is multiplied by in each slot, if that is the same in all."""
    found = {s.count * s.scale for s in slots}
    return found.pop() if len(found) == 1 else None


def _refuse_sum(m: Match) -> str | None:
    root, made = m["root"], made_of(m["root"].arg(0))
    if made is None or not made.nodes:
        return "what is summed is no function of a transposed convolution, position by position"
    if root.dtype not in (torch.float32, torch.float64):
        return "parts of the sum would be rounded"
    if 0 in reduced_dims(root) or not all(isinstance(made.root.shape[d], int) for d in reduced_dims(root)):
        return "it is not known how much is summed"
    dense = _dense_of_sum(root, made)
    if not dense:
        return "no reduced dimension has gaps of which its windows hold alike shares"
    if isinstance(root.op, Reduce):
        return None
    table = _slots(root)
    if not made.free.issuperset(table):
        return "what is summed has another operand of each position"
    padded = isinstance(root.op, Pool) and (any(root.op.padding) or root.op.divisor is not None)
    return None if all(_alike(slots) for slots in table.values()) and not padded else "windows are not alike"


def _dense_of_sum(root: Node, made: Made) -> Dims:
    """The reduced dimensions that have gaps, with as many positions as some window reads."""
    dense = {d: along for d, along in made.dense(reduced_dims(root)).items() if along.covered}
    if isinstance(root.op, Reduce):
        return dense
    if isinstance(root.op, Pool):
        windowed = {d: _windowed(root, d, along) for d, along in dense.items()}
        dense = {d: along for d, along in windowed.items() if along is not None and not along.before}
        left = _slots_left(_slots(root), dense)
        return {d: along for d, along in dense.items() if _alike(left[d])}
    dense = {d: along for d, along in dense.items() if along.run == 1}
    left = _slots_left(_slots(root), dense)
    return {d: replace(along, kept=max(s.end for s in left[d])) for d, along in dense.items() if _alike(left[d])}


def _is_sum(node: Node) -> bool:
    return isinstance(node.op, RangeSum) or getattr(node.op, "kind", "") in ("sum", "mean", "logsumexp", "avg")


@rule(
    "sum(f(conv_transpose_s(x, w) + b)) = sum'(f(conv_transpose_1(x, w) + b)) + n f(b)",
    pattern=op("root", Pool, RangeSum, Reduce, where=_is_sum),
    condition=_refuse_sum,
    exactness="reassociates",
)
def sum_beside_gaps(m: Match) -> Node:
    """A sum over positions of a function of a transposed convolution with gaps -> that over its other positions, and
    the function of the bias as often as there are gaps; likewise means, logsumexp, and window sums.

    x (N, C, *L), w (C, O/g, *K); windows that hold alike shares of the gaps.  Class reassociates.
    """
    root, made = m["root"], made_of(m["root"].arg(0))
    assert made is not None
    dense = _dense_of_sum(root, made)
    others, gaps = made.of(without_gaps(made.conv, dense)), made.of_gaps()
    if not isinstance(root.op, Reduce):
        return _windows(root, others, gaps, dense)
    count, few = (prod(n.shape[d] for d in root.op.dims) for n in (made.root, others))
    return _total(root.op, others, gaps, count, few)


def _windows(root: Node, others: Node, gaps: Node, dense: Dims) -> Node:
    """The windows of `root`, over `others` along the dimensions of `dense`, where all else is what is at `gaps`."""
    table = _slots(root)
    left = _slots_left(table, dense)
    whole, share = (prod(_alike(slots) or 0.0 for slots in t.values()) for t in (table, left))
    if isinstance(root.op, Pool):
        summed = pointwise("mul", make(_over_others(root, dense), others), share)
    else:
        summed = range_sum(others, left, root.dtype)
    return pointwise("add", summed, pointwise("mul", gaps, whole - share))


def _total(op: Reduce, others: Node, gaps: Node, count: int, few: int) -> Node:
    """The reduction of `count` positions, of which `few` are `others`, all else what is at `gaps`."""
    if op.kind == "logsumexp":
        own = prod(gaps.shape[d] for d in op.dims)
        return pointwise("logaddexp", make(op, others), pointwise("add", make(op, gaps), log((count - few) / own)))
    mean = make(replace(op, kind="mean"), gaps)
    if op.kind == "sum":
        return pointwise("add", make(op, others), pointwise("mul", mean, float(count - few)))
    shares = (make(op, others), few / count), (mean, (count - few) / count)
    return pointwise("add", *(pointwise("mul", part, share) for part, share in shares))


# -- positions that stay


def _refuse_between(m: Match) -> str | None:
    made = _made_by_channels(m["root"])
    if made is None:
        return "what is reduced is no function of a transposed convolution, position by position"
    return None if _gaps_of(made) else "no dimension has gaps"


def _made_by_channels(root: Node) -> Made | None:
    """How a reduction over channels is made, its dimension kept."""
    assert isinstance(root.op, Reduce)
    return made_of(make(replace(root.op, keepdim=True), *root.args))


def _gaps_of(made: Made) -> Dims:
    """The dimensions that have gaps at which all is the same."""
    return {d: dense for d, dense in made.dense(made.free).items() if dense.covered}


@rule(
    "max_c(f(conv_transpose_s(x, w) + b)) = interleave(max_c(f(conv_transpose_1(x, w) + b)), max_c(f(b)))",
    pattern=op("root", Reduce, where=lambda node: getattr(node.op, "dims", ()) == (1,)),
    condition=_refuse_between,
    exactness="reassociates",
)
def channels_between_gaps(m: Match) -> Node:
    """A reduction over channels of a function of a transposed convolution with gaps -> that of its other positions,
    with that of the bias between.

    x (N, C, *L), w (C, O/g, *K) -> (N, 1, *M) or (N, *M).  Class reassociates: another kernel's order.
    """
    made = _made_by_channels(m["root"])
    assert made is not None
    dense = _gaps_of(made)
    y, gaps = made.of(without_gaps(made.conv, dense)), made.of_gaps()
    for d, along in sorted(dense.items()):
        y = _interleaved(y, gaps, d, along, made.root.shape[d])
    # What is returned lies row by row, where only a part of the last block does.
    y = make(Cat(1), y) if isinstance(y.op, Slice) else y
    return reshape(y, m["root"].shape)


def _interleaved(y: Node, gaps: Node, d: int, along: Dense, length: int) -> Node:
    """y (.., n, ..) along `d` as (.., length, ..), with `gaps` between its runs, ahead of them and behind."""
    run, ahead, between = along.run, along.first, along.stride - along.run - along.first
    lead, blocks, others = y.shape[:d], y.shape[d] // run, y.shape[d + 1 :]

    def filled(*shape: Size) -> list[Node]:
        one = reshape(gaps, (*gaps.shape[: d + 1], *(1,) * (len(shape) - gaps.ndim), *gaps.shape[d + 1 :]))
        return [make(Expand(shape), one)] if 0 not in shape else []

    own = reshape(y, (*lead, blocks, run, *others))
    parts = [*filled(*lead, blocks, ahead, *others), own, *filled(*lead, blocks, between, *others)]
    row, more = reshape(_joined(parts, d + 1), (*lead, blocks * along.stride, *others)), length - blocks * along.stride
    if more < 0:
        return make(Slice(d, 0, length), row)
    return _joined([row, *filled(*lead, more, *others)], d)


def _joined(parts: list[Node], d: int) -> Node:
    return make(Cat(d), *parts) if len(parts) > 1 else parts[0]


RULES: tuple[Rule, ...] = (extreme_beside_gaps, extreme_of_windows_beside_gaps, sum_beside_gaps, channels_between_gaps)
