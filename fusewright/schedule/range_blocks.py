"""Range reductions of many slots: one axis after the other, in blocks that keep what is left of an axis at hand.

A block takes a box of slots of one or a few planes.  It sums the outermost axis while it reads, so that only as many
rows as there are slots need a place, and the inner axes in shared memory.  Where a plane is too much for one block, the
slots of an axis are dealt to several *parts*, which read what their slots hold: neighbouring parts may share a border.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil, prod

import torch

from fusewright.ir.ops import Slot
from fusewright.schedule.range_families import Family, few_at_a_time, one_group, repeated
from fusewright.schedule.range_sums import Axis, RangeReduction, known
from fusewright.schedule.tiling import MULTIPROCESSORS

THREADS = 512
ENOUGH_ALIKE = 16  # threads side by side that do the same: what a warp does at once
MOST_SHARED, PER_MULTIPROCESSOR = 162 * 1024, 228 * 1024  # bytes: of a block, where sm_80 has it; and in all


@dataclass(frozen=True)
class Cut:
    """How the slots are dealt to blocks.

    planes   that one block takes: more than one only where it takes all of their slots
    parts    of the slots along every axis, outermost first
    threads  of a block
    """

    planes: int
    parts: tuple[int, ...]
    threads: int = THREADS


@dataclass(frozen=True)
class Part:
    """What blocks do along one axis: `slots` of them each, from the `read` indices behind their entry in `begins`.

    family  of slots, where threads keep the sums that groups of them are made of; else each slot is summed alone
    """

    axis: Axis
    length: int
    slots: int
    read: int
    begins: tuple[int, ...]
    family: Family | None = None

    @property
    def parts(self) -> int:
        return len(self.begins)

    @property
    def all_slots(self) -> tuple[Slot, ...]:
        return self.axis.slots or ()

    @property
    def groups(self) -> int:
        """Of a block."""
        assert self.family is not None
        return self.family.groups if self.parts == 1 else self.slots // self.family.slots

    @property
    def within(self) -> bool:
        """Whether no group of a block, of those that are alike, reaches beyond what the block reads."""
        assert self.family is not None
        alike = [g for g in range(self.groups) if g not in self.family.unlike]
        first = self.family.first - self.begins[0]
        end = first + alike[-1] * self.family.distance + self.family.read
        return self.parts == 1 and first + alike[0] * self.family.distance >= 0 and end <= self.read

    @property
    def even(self) -> bool:
        """Whether all parts have as many slots."""
        return self.parts * self.slots == len(self.all_slots)

    @property
    def one_scale(self) -> float | None:
        """The scale of all slots, where they agree."""
        scales = {s.scale for s in self.all_slots if s.count}
        return scales.pop() if len(scales) == 1 else None

    @property
    def longest(self) -> int:
        """The most elements of a slot."""
        return max(s.count for s in self.all_slots)

    @property
    def added(self) -> int:
        """Elements of all slots."""
        return sum(s.count for s in self.all_slots)


def lengths(r: RangeReduction) -> tuple[int, ...]:
    """Indices along every axis."""
    return tuple(prod(known(r.x.shape[d]) for d in axis.dims) for axis in r.axes)


@lru_cache(maxsize=1024)
def divided(axis: Axis, length: int, parts: int, family: Family | None = None) -> Part:
    """`axis` in so many parts (fewer, where that leaves none without a slot), of whole groups where it has several."""
    slots = axis.slots or ()
    each = ceil(len(slots) / parts)
    if family is not None and parts > 1:
        family = family if family.groups > 1 else None
        each = ceil(family.groups / parts) * family.slots if family is not None else each
    spans = [_span(slots[i : i + each]) for i in range(0, len(slots), each)]
    read = max(end - begin for begin, end in spans)
    return Part(axis, length, each, read, tuple(min(begin, length - read) for begin, _ in spans), family)


def _span(slots: tuple[Slot, ...]) -> tuple[int, int]:
    """The first index of some slots, and the one behind their last."""
    some = [s for s in slots if s.count]
    return min((s.start for s in some), default=0), max((s.end for s in some), default=1)


def parts_of(r: RangeReduction, cut: Cut) -> tuple[Part, ...]:
    """The parts along every axis."""
    found: list[Part] = []
    sizes = lengths(r)
    for i, (axis, parts) in enumerate(zip(r.axes, cut.parts, strict=True)):
        if i == 0 and len(sizes) > 1:
            family = (one_group(axis) if parts == 1 else None) or repeated(axis, sizes[i])
            found.append(divided(axis, sizes[i], parts, family))
            continue
        grouped = divided(axis, sizes[i], parts, few_at_a_time(axis, sizes[i]))
        rows = cut.planes * prod(p.slots for p in found)
        suits = _busy(grouped, rows * prod(sizes[i + 1 :]), cut.threads) and (
            i + 1 < len(sizes) or _apart(grouped, rows)
        )
        found.append(grouped if suits else divided(axis, sizes[i], parts))
    return tuple(found)


def _busy(part: Part, lines: int, threads: int) -> bool:
    """Whether the groups of so many lines keep a block's threads busy."""
    return part.family is not None and part.groups * lines >= threads


def _apart(part: Part, rows: int) -> bool:
    """Whether threads side by side want different banks: those of many rows do, those of groups at an odd distance."""
    return part.family is not None and (rows >= ENOUGH_ALIKE or part.family.distance % 2 == 1)


def sum_type(r: RangeReduction) -> torch.dtype:
    """What is kept of a summed axis: as wide as the result, where that is wider than float32."""
    return torch.float64 if torch.float64 in (r.root.dtype, r.value.dtype) else torch.float32


def buffers(r: RangeReduction, cut: Cut) -> tuple[int, int]:
    """Sums in the two halves of shared memory, which hold what is left of the axes by turns."""
    halves, parts = [0, 0], parts_of(r, cut)
    for i, shape in enumerate(kept_shapes(parts)):
        halves[i % 2] = max(halves[i % 2], cut.planes * prod(shape))
    return halves[0], halves[1]


def kept_shapes(parts: tuple[Part, ...]) -> list[tuple[int, ...]]:
    """Per plane, what is in shared memory after each axis; rows that threads read side by side have an odd pitch.

    A line is copied first, so it has one shape more.
    """
    if len(parts) == 1:
        return [(parts[0].read | 1,), (parts[0].slots | 1,)]
    last, shapes = len(parts) - 1, []
    for done in range(1, len(parts) + 1):
        shape = [p.slots if i < done else p.read for i, p in enumerate(parts)]
        if done >= last:
            shape[-1] |= 1
        shapes.append(tuple(shape))
    return shapes


def shared_bytes(r: RangeReduction, cut: Cut) -> int:
    """Bytes of shared memory."""
    return sum(buffers(r, cut)) * sum_type(r).itemsize


def cuts(r: RangeReduction, some_planes: int, most: int) -> list[Cut]:
    """The `most` promising cuts for about so many planes, the best first; none where a block cannot hold a slot."""
    different = {(cut.planes, *(p.slots for p in parts_of(r, cut))): cut for cut in _candidates(r)}
    scored = [(score, cut) for cut in different.values() if (score := _score(r, cut, some_planes)) is not None]
    return [cut for _, cut in sorted(scored, key=lambda pair: (pair[0], pair[1].planes, pair[1].parts))[:most]]


def _candidates(r: RangeReduction) -> Iterator[Cut]:
    whole = (1,) * len(r.axes)
    yield from (Cut(planes, whole) for planes in (2, 4, 8, 16, 32, 64))
    for parts in product(*(_counts(len(a.slots or ())) for a in r.axes)):
        yield Cut(1, parts)


def _counts(slots: int) -> list[int]:
    """Numbers of parts, each with another number of slots."""
    found, n = [], 1
    while n < slots:
        found.append(ceil(slots / ceil(slots / n)))
        n += max(1, n // 2)
    return list(dict.fromkeys([*found, slots]))


def _score(r: RangeReduction, cut: Cut, some_planes: int) -> float | None:
    """About how long a cut takes, in times of reading all planes once; `None` where it does not fit."""
    size, parts = shared_bytes(r, cut), parts_of(r, cut)
    if size > MOST_SHARED:
        return None
    blocks = ceil(max(1, some_planes) / cut.planes) * prod(p.parts for p in parts)
    resident = min(8, PER_MULTIPROCESSOR // (size + 1024))
    reread = prod(p.parts * p.read / p.length for p in parts)
    outer = parts[0]
    if len(parts) > 1:  # what groups, or slots, share comes from the first cache again
        family = outer.family
        again = outer.added if family is None else max(0, family.groups - 1) * family.read
        reread *= 1 + 0.1 * again / (outer.parts * outer.read)
    items = cut.planes * (parts[0].read if len(parts) == 1 else prod(p.read for p in parts[1:]))
    idle = ceil(items / cut.threads) * cut.threads / items
    if r.stored is not None and prod(p.parts for p in parts) > 1:
        reread *= 1.15  # results are written here and there
    waves = blocks / (resident * MULTIPROCESSORS)
    return reread * (1 + 0.6 / resident**2) * (0.7 + 0.3 * idle) * ceil(waves) / waves * (1 + 64 / (items + 512))
