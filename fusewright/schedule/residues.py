"""How a tile on a GPU walks along one dimension: which cells it has, and which input rows it stages for them.

Where a cell is one position, those that are congruent modulo ``dilation / gcd(stride, dilation)`` read inputs that are
congruent modulo the dilation, and are among themselves a convolution of dilation 1.  A tile of such cells needs no
halo of a dilated kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from fusewright.schedule.axes import Axis
from fusewright.schedule.contraction import Contraction, remembered


@dataclass(frozen=True)
class Walk:
    """One dimension of a tile.

    between   cells from one of the tile's to the next
    step      input rows from one that is staged to the next; the first is the least that the tile's first cell reads
    staged    the dimension as the tile has it: its cells are neighbours, its rows are those that are staged
    """

    between: int
    step: int
    staged: Axis

    def tiles(self, length: int, cells: int) -> int:
        """Tiles of so many cells along a dimension of `length`; none of a residue that has no cell left."""
        stretch = cells * self.between
        return length // stretch * self.between + min(length % stretch, self.between)


Walks = tuple[Walk, Walk, Walk]


def tiles(walks: Walks, lengths: tuple[int, int, int], cells: tuple[int, int, int]) -> int:
    """Tiles of so many cells that cover `lengths` of them along d, h, w."""
    return prod(walk.tiles(n, k) for walk, n, k in zip(walks, lengths, cells, strict=True))


def useful(walks: Walks, lengths: tuple[int, int, int], cells: tuple[int, int, int]) -> float:
    """The share of those tiles' cells that there are."""
    return prod(n / (walk.tiles(n, k) * k) for walk, n, k in zip(walks, lengths, cells, strict=True))


@remembered
def walks(c: Contraction, cells: tuple[int, int, int]) -> Walks:
    """Of a tile of so many cells along d, h, w.  Along w rows stay whole; window sums are formed of all rows."""
    d, h, w = c.axes
    if c.box is not None:
        return Walk(1, 1, d), Walk(1, 1, h), Walk(1, 1, w)
    if c.carried is not None:
        return _staged(d, c.carried.between, c.carried.step), walk(h, cells[1]), _staged(w, 1, 1)
    if c.across:
        return walk(d, cells[0], neighbours=True), walk(h, cells[1], neighbours=True), _staged(w, 1, 1)
    return walk(d, cells[0]), walk(h, cells[1]), _staged(w, 1, 1)


@lru_cache(maxsize=4096)
def walk(axis: Axis, cells: int, *, neighbours: bool = False) -> Walk:
    """Along d or h, of a tile of so many cells, which are `neighbours` where windows of them are to be whole."""
    low, _ = axis.reach()
    offsets = (p.offset(j, t) - low for p in axis.phases for j in range(len(p.elements)) for t in range(len(p.taps)))
    apart = gcd(*offsets)  # zero where a cell reads one row
    if not _alone(axis):  # positions of a cell are neighbours, and so are cells
        return _staged(axis, 1, gcd(apart, axis.advance, axis.phases[0].per_element))
    if cells == 1 and not neighbours:
        return _staged(axis, 1, apart or 1)
    between = 1 if neighbours else apart // gcd(apart, axis.advance) or 1
    return _staged(axis, between, gcd(apart, axis.advance * between))


def _alone(axis: Axis) -> bool:
    """Whether every position is a cell of its own."""
    return axis.cell == axis.stride == axis.together == 1


@lru_cache(maxsize=4096)
def _staged(axis: Axis, between: int, step: int) -> Walk:
    low, _ = axis.reach()
    advance = max(1, axis.advance * between // step)  # of a single cell it leads nowhere
    phases = (
        replace(
            p,
            first=(p.first - low) // step,
            per_element=advance if _alone(axis) else p.per_element // step,
            per_tap=p.per_tap // step,
        )
        for p in axis.phases
    )
    return Walk(between, step, replace(axis, advance=advance, phases=tuple(phases)))
