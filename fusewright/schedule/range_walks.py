"""Range reductions of planes and volumes whose outermost axis is summed last, by blocks that walk along it.

A step brings a few indices of the outermost axis: their elements lie side by side in memory, so each is read once.  The
inner axes of these *slices* are summed in shared memory, and every thread keeps, for the columns that are its own, what
the next steps still need.  Where an axis has more slots than indices, as windows with many taps have, that comes last,
and results go from registers to where they lie: columns are taken in the order of their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod

import torch
from torch import Tensor

from fusewright.schedule.range_blocks import (
    MOST_SHARED,
    PER_MULTIPROCESSOR,
    Cut,
    Part,
    divided,
    kept_shapes,
    lengths,
    parts_of,
    sum_type,
)
from fusewright.schedule.range_families import Family, group_of, repeated
from fusewright.schedule.range_order import Digits, digits, places
from fusewright.schedule.range_sums import MOST_SLOTS, Axis, RangeReduction
from fusewright.schedule.tiling import MULTIPROCESSORS, REGISTERS

MOST_PLACES = 2**30
MOST_THREADS, FEWEST_THREADS = 512, 128
MOST_LONG = 8  # elements of a sum that is written out
MOST_TOGETHER = 16  # slots of the last axis that a thread sums at once, where that has many
MOST_UNLIKE = 2  # groups that are summed slot by slot, at the ends of an axis
MOST_LIVE, OTHER_REGISTERS = 96, 14  # registers of a thread for what it keeps, and for all else
THREADS_RESIDENT = 2048  # of a multiprocessor

# Instructions of a thread for an element that it copies, for a turn of sums along the last axis, and for a column;
# cycles that a step takes of itself, by its barriers and by latencies; and instructions for a sum where one axis comes
# after the other.
COPIED, TURN, COLUMN = 9, 12, 3
STEP = 800
AXIS_AFTER_AXIS = 16


@dataclass(frozen=True)
class Walk:
    """How blocks walk.

    parts    of the outermost axis
    slots    of a group along it, at least
    threads  of a block
    """

    parts: int
    slots: int
    threads: int


@dataclass(frozen=True)
class Window:
    """What a slot of the middle axis sums: `count` indices that are `step` apart; where an end cuts it off, zeros."""

    begin: int
    count: int
    step: int


@dataclass(frozen=True)
class Places:
    """Where results lie in their plane.

    slots   digits that count through the slots of the inner axes, in the order of their places, and
    places  those places
    group   how far a group's results lie from those of the one before it
    within  where the results of a group's slots lie, from its first
    """

    slots: Digits
    places: Digits
    group: int
    within: tuple[int, ...]


@dataclass(frozen=True)
class Walked:
    """A reduction as blocks walk along it."""

    r: RangeReduction
    walk: Walk
    outer: Part
    family: Family
    windows: tuple[Window, ...]  # of the middle axis of three
    last: Part
    places: Places

    @property
    def fresh(self) -> int:
        """Slices that a step brings."""
        return min(self.family.distance, self.family.read)

    @property
    def before(self) -> int:
        """Steps before the first one that has results."""
        return ceil(self.family.read / self.fresh) - 1

    @property
    def shared(self) -> int:
        """Slices of earlier steps that one still needs."""
        return self.before * self.fresh

    @property
    def groups(self) -> int:
        """Of a block."""
        return ceil(self.family.groups / self.walk.parts)

    @property
    def parts(self) -> int:
        """Blocks of a plane."""
        return ceil(self.family.groups / self.groups)

    @property
    def steps(self) -> int:
        """Of a block."""
        return self.groups + self.before

    @property
    def inside(self) -> bool:
        """Whether all slices of all steps lie inside the plane."""
        f = self.family
        return f.first >= 0 and f.first + (f.groups + self.before - 1) * f.distance + self.fresh <= self.outer.length

    @property
    def height(self) -> int:
        """Indices of the middle axis."""
        return lengths(self.r)[1] if len(self.r.axes) == 3 else 1

    @property
    def slice(self) -> int:
        """Elements of one index of the outermost axis."""
        return self.height * self.last.length

    @cached_property
    def above(self) -> int:
        """Rows of zeros ahead of a slice's own."""
        return max(0, -min((w.begin for w in self.windows), default=0))

    @cached_property
    def padded(self) -> int:
        """Rows of a slice with those of zeros around them."""
        end = max((w.begin + (w.count - 1) * w.step + 1 for w in self.windows), default=0)
        return self.above + max(self.height, end)

    @property
    def columns(self) -> int:
        """Slots of the inner axes."""
        return max(1, len(self.windows)) * self.last.slots

    @property
    def each(self) -> int:
        """Columns of a thread."""
        return ceil(self.columns / self.walk.threads)

    @property
    def loads(self) -> int:
        """Elements of a thread and step."""
        return ceil(self.fresh * self.slice / self.walk.threads)

    @property
    def pitches(self) -> tuple[int, int]:
        """From row to row, as they are copied and summed: odd, since threads have rows side by side."""
        return self.last.length | 1, self.last.slots | 1

    @property
    def buffers(self) -> tuple[int, int]:
        """Elements of both kinds of rows."""
        return self.fresh * self.height * self.pitches[0], self.fresh * self.padded * self.pitches[1]

    @property
    def shared_bytes(self) -> int:
        return sum(self.buffers) * sum_type(self.r).itemsize

    @property
    def live(self) -> int:
        """Registers for what a thread keeps, has under way and sums."""
        words = sum_type(self.r).itemsize // 4
        return self.each * (self.shared * words + 2) + self.loads + 2 * (self.shared + self.fresh) * words

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        by_registers = REGISTERS // (self.walk.threads * (OTHER_REGISTERS + self.live))
        by_memory = PER_MULTIPROCESSOR // (self.shared_bytes + 1024)
        return min(8, THREADS_RESIDENT // self.walk.threads, by_registers, by_memory)

    def cycles(self, planes: int) -> float:
        """About how long it takes."""
        slots = self.family.slots
        taps = max((w.count for w in self.windows), default=1)
        added = sum(s.count for s in self.family.group.slots or ())
        column = 2 * self.fresh * taps + self.shared + added + 2 * slots + COLUMN
        turns = _turns(self.last, self.fresh * self.height, self.walk.threads)
        work = (COPIED * self.loads + turns + self.each * column) * self.walk.threads / 128
        waves = ceil(max(1, planes) * self.parts / (MULTIPROCESSORS * self.resident))
        return waves * self.steps * max(self.resident * work, work + STEP)


@lru_cache(maxsize=256)
def walked(r: RangeReduction, walk: Walk) -> Walked | str:
    """What blocks do that walk like this, or why none can."""
    sizes = lengths(r)
    if len(sizes) not in (2, 3):
        return f"{r.root!r} has no outermost axis of two or three"
    if max(prod(sizes), r.slots) > MOST_PLACES:
        return f"{r.root!r} has planes whose elements are too many for an int and what lies beyond their ends"
    if any(len({s.scale for s in axis.slots or ()}) > 1 for axis in r.axes):
        return f"{r.root!r} has slots of several scales"
    grouped = _grouped(r, sizes[0], walk.slots)
    if grouped is None or not all(_written_out(group) for group in _groups(r.axes[0], grouped[0])):
        return f"{r.root!r} has no groups of short sums that repeat along its outermost axis, and so do their places"
    family, where = grouped
    windows = _windows(r.axes[1], sizes[1]) if len(sizes) == 3 else ()
    if windows is None:
        return f"{r.root!r} has long sums along its middle axis"
    outer = divided(r.axes[0], sizes[0], 1, family)
    rows = min(family.distance, family.read) * prod(sizes[1:-1])
    found = Walked(r, walk, outer, family, windows, _last(r.axes[-1], sizes[-1], rows, walk.threads), where)
    if found.shared_bytes > MOST_SHARED or found.live > MOST_LIVE or not found.resident:
        return f"{r.root!r} has slices that are too much for a block"
    return found


@lru_cache(maxsize=64)
def _grouped(r: RangeReduction, length: int, enough: int) -> tuple[Family, Places] | None:
    """The smallest groups of `enough` slots along the outermost axis whose results lie alike."""
    tried = set()
    for slots in range(enough, MOST_SLOTS):
        family = repeated(r.axes[0], length, slots, MOST_UNLIKE)
        if family is None or family in tried:
            continue
        tried.add(family)
        found = _places(r, family)
        if found is not None:
            return family, found
    return None


def _groups(axis: Axis, family: Family) -> list[Axis]:
    """The different groups of a family."""
    return [family.group, *(group_of(axis, family, g) for g in family.unlike)]


def _written_out(axis: Axis) -> bool:
    """Whether what the slots of a group are sums of has a few elements each."""
    return all(ceil((s.end - s.begin) / axis.period) <= MOST_LONG for s in axis.segments)


@lru_cache(maxsize=64)
def _windows(axis: Axis, length: int) -> tuple[Window, ...] | None:
    """What every slot sums, whole where they repeat; `None` where that is long, or steps differ."""
    slots, family = axis.slots or (), repeated(axis, length)
    if family is not None:
        group = family.group.slots or ()
        starts = [family.first + i // len(group) * family.distance for i in range(len(slots))]
        whole = [group[i % len(group)] for i in range(len(slots))]
        found = [Window(start + s.start, s.count, s.step) for start, s in zip(starts, whole, strict=True)]
    else:
        found = [Window(s.start if s.count else 0, s.count, s.step) for s in slots]
    steps = {w.step for w in found if w.count > 1}
    if max(w.count for w in found) > MOST_LONG or len(steps) > 1:
        return None
    step = steps.pop() if steps else 1
    return tuple(replace(w, step=step) for w in found)


@lru_cache(maxsize=64)
def _last(axis: Axis, length: int, rows: int, threads: int) -> Part:
    """The last axis, every index of it read, in groups that leave threads the least work, or slot by slot."""
    best = replace(divided(axis, length, 1), read=length, begins=(0,))
    slots = len(axis.slots or ())
    for enough in range(2, min(slots, MOST_TOGETHER) + 1):
        family = repeated(axis, length, enough, MOST_UNLIKE)
        if family is None:
            continue
        family = replace(family, unlike=_unlike(family, length, slots))
        if len(family.unlike) > MOST_UNLIKE or len(family.unlike) == family.groups:
            continue
        part = replace(best, family=family)
        best = min((best, part), key=lambda p: _turns(p, rows, threads))
    return best


def _turns(last: Part, rows: int, threads: int) -> int:
    """Instructions of a thread for sums along the last axis."""
    f, rounds = last.family, ceil(rows / threads)
    sets = threads // ceil(rows / rounds)  # of threads that have rows side by side
    if f is None:
        return rounds * ceil(last.slots / sets) * (2 * last.longest + TURN)
    added = min(last.longest, sum(mask != 0 for s in f.group.segments for mask in s.members))
    return rounds * ceil(f.groups / sets) * (f.read + f.slots * (added + 1) + TURN)


def _unlike(family: Family, length: int, slots: int) -> tuple[int, ...]:
    """The groups that need sums of their own where nothing is read beyond an end: also those with fewer slots."""
    beyond = [g for g in range(family.groups) if not _inside(family, g, length)]
    fewer = [family.groups - 1] if slots % family.slots else []
    return tuple(sorted({*family.unlike, *beyond, *fewer}))


def _inside(family: Family, group: int, length: int) -> bool:
    """Whether a group lies inside its axis."""
    begin = family.first + group * family.distance
    return begin >= 0 and begin + family.read <= length


def _places(r: RangeReduction, family: Family) -> Places | None:
    """Where results lie, if the places along the outermost axis and those of columns add up."""
    separate = _separate(r)
    if separate is None:
        return None
    down, across = separate
    within = down[: family.slots] - down[0]
    group = int(down[family.slots] - down[0])
    if not torch.equal(down, _repeated(within, group, len(down))):
        return None
    order = across.argsort()
    return Places(digits(order), digits(across[order]), group, tuple(within.tolist()))


@lru_cache(maxsize=16)
def _separate(r: RangeReduction) -> tuple[Tensor, Tensor] | None:
    """The places of slots along the outermost axis, and how far those of columns lie from them."""
    slots = [len(axis.slots or ()) for axis in r.axes]
    columns = prod(slots[1:])
    if r.stored is None:
        return torch.arange(slots[0]) * columns, torch.arange(columns)
    table = places(r.order[1]).reshape(slots[0], columns)
    down, across = table[:, 0].clone(), table[0] - table[0, 0]
    return (down, across) if torch.equal(table, down[:, None] + across) else None


def _repeated(within: Tensor, distance: int, count: int) -> Tensor:
    """The places of `count` slots, if those of every group lie alike."""
    groups = torch.arange(ceil(count / len(within)))
    return (groups[:, None] * distance + within).reshape(-1)[:count]


def walks(r: RangeReduction, some_planes: int, most: int) -> list[Walk]:
    """The `most` promising ways to walk over about so many planes, the best first."""
    ways = [w for w in (walked(r, walk) for walk in _candidates(r)) if isinstance(w, Walked)]
    ways.sort(key=lambda w: (w.cycles(some_planes), w.walk.parts, w.walk.slots, w.walk.threads))
    different: dict[tuple[int, int], Walk] = {}  # in how many parts, only the best
    for w in ways:
        different.setdefault((w.family.slots, w.walk.threads), w.walk)
    return list(different.values())[:most]


def _candidates(r: RangeReduction) -> Iterator[Walk]:
    columns = prod(len(axis.slots or ()) for axis in r.axes[1:])
    if columns < FEWEST_THREADS:
        return
    fewest = ceil(columns / MOST_THREADS)
    for each in sorted({ceil(fewest / 2), fewest, 2 * fewest}):
        threads = max(FEWEST_THREADS, 32 * ceil(columns / each / 32))
        yield from (Walk(parts, slots, threads) for parts in (1, 2, 3, 4, 6, 8) for slots in (1, 3, 8))


def ahead(r: RangeReduction, walk: Walk, cut: Cut, some_planes: int) -> float:
    """About how long a walk takes, in times of a cut that sums one axis after the other."""
    parts = parts_of(r, cut)
    blocks = prod(p.parts for p in parts)
    sums = blocks * (sum(prod(shape) for shape in kept_shapes(parts)) + prod(p.slots for p in parts))
    found = walked(r, walk)
    assert isinstance(found, Walked), found
    return found.cycles(some_planes) * MULTIPROCESSORS * 128 / (AXIS_AFTER_AXIS * sums * max(1, some_planes))
