"""Index ranges of linear windows, one dimension at a time: the arithmetic behind the main theorem.

A *slot* is one output of a sum along a dimension: an arithmetic index range and a scale.  Everything linear that slides
along a dimension (a total sum, a mean, average and adaptive pooling) is a tuple of slots, and a convolution maps slots
over its output positions to slots over its input positions, one per tap.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from fusewright.ir.ops import Conv, Pool, Slot

Slots = tuple[Slot, ...]


def make_slot(first: int, step: int, count: int, length: int, scale: float) -> Slot:
    """The indices first, first + step, ... (`count` of them) that lie in [0, length)."""
    low = max(0, -(first // step))
    high = min(count, -((first - length) // step))
    if low >= high:
        return Slot(0, 0, 1, scale)
    return Slot(first + low * step, first + (high - 1) * step + 1, step if high - low > 1 else 1, scale)


def pool_slots(op: Pool, i: int, length: int) -> Slots:
    """Average pooling along its dimension `i` of `length` positions; the divisor factors over dimensions.

    A window reaches from j*stride - padding over `kernel` positions, at most to length + padding; the divisor counts
    those (`count_include_pad`), or only the ones inside, or is the override, which the first dimension carries.
    """
    assert op.kind == "avg"
    result: list[Slot] = []
    slots = op.length(i, length)
    assert isinstance(slots, int)
    for j in range(slots):
        start = j * op.stride[i] - op.padding[i]
        stop = min(start + op.kernel[i], length + op.padding[i])
        inside = min(stop, length) - max(start, 0)
        if op.divisor is not None:
            scale = 1.0 / op.divisor if i == 0 else 1.0
        else:
            scale = 1.0 / (stop - start if op.count_include_pad else max(inside, 1))
        result.append(make_slot(start, 1, stop - start, length, scale))
    return tuple(result)


def tap_slots(conv: Conv, i: int, slots: Slots, taps: int, length: int) -> tuple[Slots, ...]:
    """Per slot over the output positions of `conv` along dimension `i`, the `taps` slots over its input positions.

    `sum_{p in P} y[p] = sum_u w[u] * (sum of x over the range of u)`.
    """
    one = _transposed_tap if conv.transposed else _plain_tap
    return tuple(tuple(one(conv, i, s, u, length) for u in range(taps)) for s in slots)


def _plain_tap(conv: Conv, i: int, s: Slot, u: int, length: int) -> Slot:
    """{stride*p + dilation*u - left : p in s}, clipped to the input."""
    if s.count == 0:
        return Slot(0, 0, 1, s.scale)
    first = conv.stride[i] * s.start + conv.dilation[i] * u - conv.padding[i][0]
    return make_slot(first, conv.stride[i] * s.step, s.count, length, s.scale)


def _transposed_tap(conv: Conv, i: int, s: Slot, u: int, length: int) -> Slot:
    """{p : stride*p + dilation*u - left in s}, clipped to the input."""
    stride, shift = conv.stride[i], conv.dilation[i] * u - conv.padding[i][0]
    return solve(stride, shift, s, length)


def solve(stride: int, shift: int, s: Slot, length: int) -> Slot:
    """{p in [0, length) : stride*p + shift in s}: again an arithmetic range, of step s.step / gcd(stride, s.step)."""
    if s.count == 0:
        return Slot(0, 0, 1, s.scale)
    common = gcd(stride, s.step)
    target = s.start - shift
    if target % common:
        return Slot(0, 0, 1, s.scale)
    step = s.step // common
    residue = target // common * pow(stride // common, -1, step) % step if step > 1 else 0
    last = s.start + (s.count - 1) * s.step - shift
    low = -(-target // stride)
    first = low + (residue - low) % step
    return make_slot(first, step, max(0, (last // stride - first) // step + 1), length, s.scale)


def mass(s: Slot) -> float:
    """What the slot makes of a constant 1."""
    return s.count * s.scale


@lru_cache(maxsize=32)  # long tables are looked at many times
def sliding(slots: Slots) -> tuple[int, int] | None:
    """(window step, distance) when all slots are equal windows at one distance and none is clipped, else `None`."""
    first = slots[0]
    distance = slots[1].start - first.start if len(slots) > 1 else 1
    same = all((s.step, s.count, s.scale) == (first.step, first.count, first.scale) for s in slots)
    regular = all(b.start - a.start == distance for a, b in pairwise(slots))
    return (first.step, distance) if same and regular and first.count > 0 and distance > 0 else None


class Windows(NamedTuple):
    """`size` elements `step` apart, beginning `stride` apart from -`before` on; the last one reaches `behind` more than
    the length."""

    size: int
    step: int
    stride: int
    before: int
    behind: int


@lru_cache(maxsize=32)
def windows(slots: Slots, length: int) -> Windows | None:
    """The windows that all slots are, clipped to [0, length); `None` where they are no windows of one size, or no two
    neighbours are whole."""
    size = max(s.count for s in slots)
    whole = [i for i, s in enumerate(slots) if s.count == size]
    first, step = slots[whole[0]], slots[whole[0]].step
    if len(slots) == 1:
        return Windows(size, step, 1, 0, 0) if size and first.start == 0 else None
    if size == 0 or len(whole) < 2 or whole[1] != whole[0] + 1:
        return None
    stride = slots[whole[1]].start - first.start
    before = whole[0] * stride - first.start
    regular = (make_slot(j * stride - before, step, size, length, first.scale) for j in range(len(slots)))
    if stride < 1 or before < 0 or any(_normal(a) != _normal(b) for a, b in zip(slots, regular, strict=True)):
        return None
    return Windows(size, step, stride, before, (len(slots) - 1) * stride + (size - 1) * step + 1 - length - before)


def _normal(s: Slot) -> Slot:
    """The slot, its step left out where there is one index or none."""
    if s.count > 1:
        return s
    return Slot(s.start, s.start + 1, 1, s.scale) if s.count else Slot(0, 0, 1, s.scale)
