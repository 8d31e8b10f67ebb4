"""The tables of a range reduction, whatever the target: its rows in sets, the slots of its cells, and the scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from fusewright.schedule.range_sums import Axis, RangeReduction, known


@dataclass(frozen=True)
class Tables:
    """What is constant in the text of one reduction that is no total."""

    r: RangeReduction

    @property
    def rows(self) -> tuple[Axis, ...]:
        """The axes before the last: none where it is a line."""
        return self.r.axes[:-1]

    @property
    def columns(self) -> Axis:
        return self.r.axes[-1]

    @property
    def plane(self) -> int:
        """Elements of a plane."""
        return prod(known(d) for d in self.r.x.shape[self.r.leading :])

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(known(self.r.x.shape[d]) for d in self.columns.dims)

    @property
    def cells(self) -> int:
        """Different sums per plane: one per set of rows, segment of the columns and residue."""
        return (len(self.sets[0]) if self.rows else 1) * len(self.members)

    @cached_property
    def sets(self) -> tuple[list[str], list[int]]:
        """The initialisers of all sets of rows, and the slots of each as a mask.

        They are (offset, stride, count) under one axis of rows, (offset, outer stride, inner stride, rows per inner
        plane, count) under two.
        """
        width, inner = self.width, self.rows[-1]
        found = [runs(axis) for axis in self.rows]
        if len(found) == 1:
            return (
                [f"{{{run.first * width}, {run.step * width}, {run.count}}}" for run in found[0]],
                [run.slots for run in found[0]],
            )
        plane = width * prod(known(self.r.x.shape[d]) for d in inner.dims)
        sets, masks = [], []
        for a in found[0]:
            for b in found[1]:
                offset, count = a.first * plane + b.first * width, a.count * b.count
                sets.append(f"{{{offset}, {a.step * plane}, {b.step * width}, {b.count}, {count}}}")
                masks.append(_outer(a.slots, b.slots, len(inner.slots or ())))
        return sets, masks

    @property
    def members(self) -> list[int]:
        """The slots of every segment and residue of the columns, as masks."""
        return [mask for segment in self.columns.segments for mask in segment.members]

    @property
    def scales(self) -> list[float]:
        """What each slot is multiplied by."""
        scales = [1.0]
        for axis in self.r.axes:
            scales = [s * slot.scale for s in scales for slot in axis.slots or ()]
        return scales


def one_scale(r: RangeReduction) -> float | None:
    """The scale of all slots, where they agree."""
    if r.total:
        return r.scale
    scales = set(Tables(r).scales)
    return scales.pop() if len(scales) == 1 else None


@dataclass(frozen=True)
class Run:
    """Indices of an axis that are in the same `slots` (a mask): `count` of them from `first` on, `step` apart."""

    first: int
    step: int
    count: int
    slots: int


def runs(axis: Axis) -> list[Run]:
    """The indices of all slots of an axis, in the fewest runs."""
    found = []
    for s in axis.segments:
        for q, mask in enumerate(s.members):
            first = s.begin + (q - s.begin) % axis.period
            if mask and first < s.end:
                found.append(Run(first, axis.period, ceil((s.end - first) / axis.period), mask))
    return found


def _outer(a: int, b: int, width: int) -> int:
    """The slots of a pair, row-major, from those of each."""
    return sum(b << (i * width) for i in range(a.bit_length()) if a >> i & 1)
