"""Slots that repeat at a distance, as those of windows and their taps do: what one group of them adds, all others add.

A group's slots are sums of a few *kept* ones, each of the indices that the same of its slots hold.  Windows that an end
of the axis cuts off belong to the family as well: they are whole, and read zeros beyond.  A few groups may have slots
that are cut off otherwise, as the taps of a window over padding are: those have sums of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from fusewright.ir.ops import Slot
from fusewright.schedule.range_sums import MOST_PERIOD, MOST_SLOTS, Axis

# Sums that a thread keeps in registers, additions of them that are written out, and elements under way.
MOST_KEPT = 64
MOST_ADDITIONS = 2048
MOST_READ = 48

# Slots that are worth a thread's work of finding out where they are.
FEW_SLOTS = 3

Slots = tuple[Slot, ...]


@dataclass(frozen=True)
class Family:
    """Groups of slots: those of group g are `group`, moved by g * distance + first.

    groups  of the axis; the last one may have fewer slots; one alone begins at the axis' own begin
    read    indices from the first that a group holds to its last
    inside  whether no group reaches over an end of the axis
    unlike  groups with slots that hold less than the others'
    """

    group: Axis
    distance: int
    first: int
    groups: int
    read: int
    inside: bool
    unlike: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        """Of a group."""
        return len(self.group.slots or ())


def group_of(axis: Axis, family: Family, group: int) -> Axis:
    """The slots of a group as they are, from where it begins."""
    slots = (axis.slots or ())[group * family.slots : (group + 1) * family.slots]
    return Axis(axis.dims, tuple(_moved(s, -group * family.distance - family.first) for s in slots))


@lru_cache(maxsize=256)
def one_group(axis: Axis) -> Family | None:
    """All slots as one group, where a thread can keep their sums."""
    slots = axis.slots or ()
    return Family(axis, 0, 0, 1, _end(slots), True) if _fits(axis, MOST_KEPT) else None


def few_at_a_time(axis: Axis, length: int) -> Family | None:
    """Groups of a few slots, where they repeat, or all in one where they are as few; else `None`."""
    if len(axis.slots or ()) <= 2 * FEW_SLOTS:
        return one_group(axis)
    found = repeated(axis, length, FEW_SLOTS)
    return found if found is not None and found.slots > 1 else None


@lru_cache(maxsize=256)
def repeated(axis: Axis, length: int, enough: int | None = None, unlike: int = 0) -> Family | None:
    """The smallest groups of `enough` slots, else those that read the fewest indices twice; `None` without any.

    So many of them may be `unlike` the others.
    """
    slots = axis.slots or ()
    for period in range(1, min(len(slots) // 2, MOST_SLOTS) + 1):
        distance = _distance(slots, period)
        if distance:
            whole = _whole(slots, period, distance)
            others = _others(slots, whole, distance, length, unlike)
            if others is not None:
                return _joined(axis, whole, distance, length, enough, others)
    return None


def _joined(
    axis: Axis, whole: Slots, distance: int, length: int, enough: int | None, others: Collection[int]
) -> Family | None:
    """Groups of one or several periods: the longer they are, the less is read twice."""
    count, found = len(axis.slots or ()), []
    for periods in range(1, max(1, MOST_SLOTS // len(whole)) + 1):
        moved = [_moved(s, i * distance) for i in range(periods) for s in whole]
        first = min(s.start for s in moved if s.count)
        group = Axis(axis.dims, tuple(_moved(s, -first) for s in moved))
        read, groups = _end(group.slots or ()), ceil(count / len(moved))
        if groups == 1 or not _fits(group, MOST_READ) or (periods > 1 and read > MOST_READ):
            break
        end = first + (groups - 1) * periods * distance + read
        inside = first >= 0 and end <= length
        unlike = tuple(sorted({i // len(moved) for i in others}))
        found.append(Family(group, periods * distance, first, groups, read, inside, unlike))
        if enough is not None and len(moved) >= enough:
            return found[-1]
    return min(found, key=lambda f: (f.groups * f.read, f.read), default=None)


def _fits(axis: Axis, most: int) -> bool:
    """Whether a thread can keep all different sums of an axis."""
    slots = len(axis.slots or ())
    if slots > MOST_SLOTS or axis.period > MOST_PERIOD:
        return False
    kept = sum(mask != 0 for segment in axis.segments for mask in segment.members)
    return kept <= most and kept * slots <= MOST_ADDITIONS


def _distance(slots: Slots, period: int) -> int:
    """How far a slot is from the one a period on, by the first two of which no end cuts off any."""
    for i, (a, b) in enumerate(zip(slots, slots[period:], strict=False)):
        if a.count == b.count == max(s.count for s in slots[i % period :: period]) > 0:
            return b.start - a.start
    return 0


def _whole(slots: Slots, period: int, distance: int) -> Slots:
    """The slots of one period as they are where nothing is cut off, with those of all others where they would be."""
    found = []
    for i in range(period):
        longest = max(range(i, len(slots), period), key=lambda k: slots[k].count)
        found.append(_moved(slots[longest], -(longest // period) * distance))
    return tuple(found)


def _others(slots: Slots, whole: Slots, distance: int, length: int, most: int) -> list[int] | None:
    """The slots that are not one of those of the period, moved, as far as that is inside; `None` where they are of more
    than `most` periods, or hold anything else than a part of that, without steps.
    """
    found: list[int] = []
    for i, s in enumerate(slots):
        moved = _moved(whole[i % len(whole)], i // len(whole) * distance)
        indices, clipped = _indices(s), _clipped(moved, length)
        if indices == clipped:
            continue
        found.append(i)
        part = not s.count or clipped.start <= s.start < s.stop <= clipped.stop
        if not part or moved.step > 1 or len({k // len(whole) for k in found}) > most:
            return None
    return found if distance > 0 else None


def _moved(s: Slot, by: int) -> Slot:
    return Slot(s.start + by, s.stop + by, s.step, s.scale) if s.count else Slot(0, 0, 1, s.scale)


def _indices(s: Slot) -> range:
    return range(s.start, s.stop, s.step)


def _clipped(s: Slot, length: int) -> range:
    """The indices of a slot that lie in [0, length)."""
    indices = _indices(s)
    low = -(min(0, s.start) // s.step)
    high = max(0, ceil((min(s.stop, length) - s.start) / s.step))
    return indices[low:high] if low < high else range(0)


def _end(slots: Slots) -> int:
    """The index behind the last of all slots."""
    return max((s.end for s in slots if s.count), default=1)
