"""Windows folded into the weight: one convolution of fewer positions and more taps, and nothing between the two.

    avg_pool_t(conv_s(x, w))[q]             sum_i x[s*t*q + i] * w'[i]
    avg_pool_t(conv_transpose_s(x, w))[q]   sum_l x[l] * w'[s*l - t*q],   w' = box * w

The second one has s/gcd(s, t) kinds of position, by q: each is a plain convolution that strides by t/gcd(s, t).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, prod

from fusewright.ir.build import cast, range_sum, reshape, wide
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Cat, Conv, Slice, Slot
from fusewright.ir.slots import Slots, sliding, solve
from fusewright.ir.types import Size
from fusewright.rules.linear import finish
from fusewright.rules.rule import Match, rule
from fusewright.rules.windows import (
    REDUCED_CONV,
    as_plain,
    biased,
    pooled_on,
    pooled_stride,
    refuse_shapes,
    refuse_sliding,
    replaced,
    sliding_windows,
    tables_of,
    taps_of,
    with_features_first,
)

Tables = dict[int, Slots]

HOLE = "a tap of the folded kernel would sum nothing, and hand a NaN to windows that do not read it"
APART = "the taps of a window lie apart, or it has none"
PADDING = "the windows read nothing but padding"

# Convolutions that the positions of one transposed one may become: each is compiled, tuned and launched by itself.
MOST_KINDS = 9


# -- behind a plain convolution


def _refuse_folding(m: Match) -> str | None:
    reason = refuse_sliding(m)
    if reason is not None:
        return reason
    m, tables = as_plain(m), sliding_windows(m)
    if any(slot.count == 0 for slots in _taps(m, tables).values() for slot in slots):
        return HOLE
    return PADDING if _reads_nothing(m["conv"], _paddings(m, tables)) else None


@rule(
    "avg_pool(conv(x, w)) = conv_strided(x, box * w)",
    pattern=REDUCED_CONV,
    condition=_refuse_folding,
    exactness="reassociates",
    hides=True,
)
def box_into_weight(m: Match) -> Node:
    """avg_pool_t(conv_s(x, w) + b) -> conv_{s*t}(x, w') + b: the window is folded into one larger kernel.

    w' (O, C/g, *V), w'[v] = scale * sum of w[u] over the u with d*u + s*i = v for an i of the window;
    V = s*(k-1) + d*(K-1) + 1.  Holds as `box_before_conv` does, where every tap sums something, and
    reads something of x; costs more arithmetic and no intermediate.  Class reassociates.
    """
    m, tables = as_plain(m), sliding_windows(m)
    conv = m["conv"]
    assert isinstance(conv.op, Conv)
    dims, op = tuple(tables), conv.op
    weight = _summed(conv, _taps(m, tables))
    units = {d: _unit(op, d, slots[0]) for d, slots in tables.items()}
    stride = replaced(op.stride, dims, pooled_stride(op, tables))
    inner = Conv(stride, _paddings(m, tables), replaced(op.dilation, dims, units), op.groups)
    return pooled_on(m["reduction"], biased(m, inner, conv.arg(0), weight, tables), dims)


def _taps(m: Match, tables: Tables) -> Tables:
    """The taps of w that each tap of the folded kernel sums."""
    conv = m["conv"]
    assert isinstance(conv.op, Conv)
    return {d: _folded(conv.op, d, slots[0], taps_of(m, d)) for d, slots in tables.items()}


def _summed(conv: Node, taps: Tables) -> Node:
    """The weight of `conv` with its taps summed so, in a wide dtype, and rounded once."""
    return cast(range_sum(cast(conv.arg(1), wide(conv.dtype)), taps, wide(conv.dtype)), conv.dtype)


def _reads_nothing(conv: Node, padding: tuple[tuple[int, int], ...]) -> bool:
    """Whether nothing is left of x along some dimension when it is cut by negative padding."""
    return any(map(_is_lost, padding, conv.arg(0).shape[2:]))


def _is_lost(padding: tuple[int, int], length: Size) -> bool:
    """The same of one dimension, of an unknown length where nothing is cut."""
    return min(padding) < 0 and bool(min(padding) <= -length)


def _unit(op: Conv, d: int, window: Slot) -> int:
    """The distance between the taps of the folded kernel."""
    return gcd(op.stride[d - 2] * window.step, op.dilation[d - 2]) if window.count > 1 else op.dilation[d - 2]


def _folded(op: Conv, d: int, window: Slot, taps: int) -> Slots:
    """The taps of w that each tap of the folded kernel sums, along one dimension."""
    step, spread = op.stride[d - 2] * window.step, op.dilation[d - 2]
    pooled = Slot(0, step * (window.count - 1) + 1, step, window.scale)
    reach = _reach(op, d, window, taps)
    return tuple(_weight_slot(pooled, v, spread, taps) for v in range(0, reach + 1, _unit(op, d, window)))


def _reach(op: Conv, d: int, window: Slot, taps: int) -> int:
    """How far the last position that one pooled output reads lies from the first."""
    return op.stride[d - 2] * window.step * (window.count - 1) + op.dilation[d - 2] * (taps - 1)


def _paddings(m: Match, tables: Tables) -> tuple[tuple[int, int], ...]:
    """How x is padded, or cut where negative, to what the windows read."""
    conv = m["conv"]
    assert isinstance(conv.op, Conv)
    padding, stride = list(conv.op.padding), pooled_stride(conv.op, tables)
    for d, slots in tables.items():
        left = padding[d - 2][0] - conv.op.stride[d - 2] * slots[0].start
        last = stride[d] * (len(slots) - 1) + _reach(conv.op, d, slots[0], taps_of(m, d))
        right = last + 1 - left - conv.arg(0).shape[d]
        # a tail too short for another window is left where it is
        padding[d - 2] = (left, 0 if -stride[d] < right < 0 else right)
    return tuple(padding)


def _weight_slot(window: Slot, v: int, dilation: int, taps: int) -> Slot:
    """{u : v - dilation*u in window}, as an ascending range: u and v - dilation*u run against each other."""
    mirrored = Slot(v - window.stop + 1, v - window.start + 1, window.step, window.scale)
    return solve(dilation, 0, mirrored, taps)


# -- behind a transposed one that strides


@dataclass(frozen=True)
class _Kind:
    """Every n-th window along a dimension, as a plain convolution: tap v of its kernel sums the taps `taps[v]` of w."""

    taps: Slots
    stride: int
    padding: tuple[int, int]
    dilation: int


_Kinds = dict[int, tuple[_Kind | None, ...]]


def _all_slots(m: Match) -> Tables:
    """The windows along every spatial dimension; where nothing is reduced, one for each position."""
    conv, tables = m["conv"], tables_of(m)
    lengths = {d: conv.shape[d] for d in range(2, conv.ndim)}
    assert all(isinstance(length, int) for length in lengths.values())
    return {d: tables.get(d) or tuple(Slot(i, i + 1, 1, 1.0) for i in range(lengths[d])) for d in lengths}


def _kinds(m: Match, tables: Tables) -> _Kinds:
    """The kinds of position along each dimension, in order; `None` for one that no plain convolution computes."""
    return {d: _kinds_along(m, d, slots) for d, slots in tables.items()}


def _kinds_along(m: Match, d: int, slots: Slots) -> tuple[_Kind | None, ...]:
    conv = m["conv"]
    assert isinstance(conv.op, Conv)
    stride, window = conv.op.stride[d - 2], slots[0]
    distance = slots[1].start - window.start if len(slots) > 1 else stride
    count = min(stride // gcd(stride, distance), len(slots))
    each = -(-len(slots) // count)
    step = distance * count // stride if each > 1 else 1
    shifts = (i * distance for i in range(count))
    windows = (replace(window, start=window.start + by, stop=window.stop + by) for by in shifts)
    return tuple(_kind(m, d, window, step, each) for window in windows)


def _kind(m: Match, d: int, window: Slot, step: int, positions: int) -> _Kind | None:
    """`positions` windows from `window` on, which move by `step` elements of x."""
    conv, length, taps = m["conv"], m["conv"].arg(0).shape[d], taps_of(m, d)
    assert isinstance(conv.op, Conv) and isinstance(length, int)
    own, spread, left = conv.op.stride[d - 2], conv.op.dilation[d - 2], conv.op.padding[d - 2][0]
    # element l of x reaches the window by tap u where own*l + spread*u - left lies in it
    low, high = -((spread * (taps - 1) - window.start - left) // own), (window.stop - 1 + left) // own
    reached = {at: solve(spread, own * at - left, window, taps) for at in range(low, high + 1)}
    read = [at for at, slot in reached.items() if slot.count]
    if not read:
        return None
    unit = gcd(*(b - a for a, b in pairwise(read))) or 1
    if len(read) != (read[-1] - read[0]) // unit + 1:
        return None
    behind = step * (positions - 1) + read[-1] + 1 - length
    # a tail too short for another window is left where it is
    return _Kind(tuple(reached[at] for at in read), step, (-read[0], 0 if -step < behind < 0 else behind), unit)


def _refuse_kinds(m: Match) -> str | None:
    conv = m["conv"]
    assert isinstance(conv.op, Conv)
    if not conv.op.transposed or all(s == 1 for s in conv.op.stride):
        return "the convolution is plain, or transposed with a stride of 1"
    reason = refuse_shapes(m)
    if reason is not None:
        return reason
    if any(not isinstance(length, int) for length in conv.arg(0).shape[2:]):
        return "a dimension of the input has an unknown length"
    if any(sliding(slots) is None for slots in tables_of(m).values()):
        return "the windows are not all equal and whole"
    if all(len(slots) == 1 for slots in tables_of(m).values()):
        return "one window only: it is a total sum"
    kinds = _kinds(m, _all_slots(m))
    count = prod(map(len, kinds.values()))
    if count > MOST_KINDS:
        return f"it would become {count} convolutions"
    if any(kind is None for along in kinds.values() for kind in along):
        return APART
    lost = (_is_lost(kind.padding, conv.arg(0).shape[d]) for d, along in kinds.items() for kind in along if kind)
    return PADDING if any(lost) else None


@rule(
    "avg_pool(conv_transpose_s(x, w)) = interleave(conv_strided(x, box * w))",
    pattern=REDUCED_CONV,
    condition=_refuse_kinds,
    exactness="reassociates",
    hides=True,
)
def box_into_transposed_weight(m: Match) -> Node:
    """avg_pool_t(conv_transpose_s(x, w) + b) -> conv_t/g(x, w'_i) + b for the windows i, i + s/g, .., g = gcd(s, t).

    x (N, C, *L), w (C, O/g, *K), w'_i (O, C/g, *V) with about (k-1 + d*(K-1)) / s + 1 taps.  Where s divides t, that is
    one convolution.  Holds for equal, whole windows, any cropping, dilation and group count; along dimensions that are
    not pooled, each position is a window.  Class reassociates.
    """
    tables = _all_slots(m)
    y = _interleaved(m, tables, _kinds(m, tables), {})
    y = make(Cat(1), y) if isinstance(y.op, Slice) else y  # row by row, where it may be what is returned
    return finish(m["reduction"], y, tuple(tables))


def _interleaved(m: Match, tables: Tables, kinds: _Kinds, chosen: dict[int, _Kind]) -> Node:
    """The positions of all kinds along the dimensions that have no chosen one, in order."""
    d = next((d for d in tables if d not in chosen), None)
    if d is None:
        return _of_kind(m, tables, chosen)
    parts = [_interleaved(m, tables, kinds, {**chosen, d: kind}) for kind in kinds[d] if kind is not None]
    if len(parts) == 1:
        return parts[0]
    shape = parts[0].shape
    joined = make(Cat(d + 1), *(reshape(y, (*shape[: d + 1], 1, *shape[d + 1 :])) for y in parts))
    y, length = reshape(joined, (*shape[:d], shape[d] * len(parts), *shape[d + 1 :])), len(tables[d])
    return y if y.shape[d] == length else make(Slice(d, 0, length), y)


def _of_kind(m: Match, tables: Tables, chosen: dict[int, _Kind]) -> Node:
    """The convolution that computes the windows of one kind along each dimension."""
    conv, kinds = m["conv"], chosen.values()
    assert isinstance(conv.op, Conv)
    stride, dilation = (tuple(getattr(kind, name) for kind in kinds) for name in ("stride", "dilation"))
    weight = with_features_first(_summed(conv, {d: kind.taps for d, kind in chosen.items()}), conv.op.groups)
    inner = Conv(stride, tuple(kind.padding for kind in kinds), dilation, conv.op.groups)
    return biased(m, inner, conv.arg(0), weight, tables)


RULES = (box_into_weight, box_into_transposed_weight)
