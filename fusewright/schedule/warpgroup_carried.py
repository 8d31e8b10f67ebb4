"""How a contraction group of few features is cut for the tensor cores of Hopper where sums are carried along d.

An instruction reads 64 positions from shared memory in the time in which it multiplies them by 64 features.  Of fewer
features (`warpgroup_positions`) it does little else than read, and each plane of the input is staged once for every tap
along d, and read by the instructions of each.  Here a block goes along d, one *slab* of the input after the other: a
slab has the planes between one cell and the next.  A plane is multiplied by the taps along d of all positions that it
belongs to, so that the columns of an instruction are [position][feature]; their sums stay in registers until the last
plane of a position has come, and what follows the products is computed of the cell that is complete then.

With ``DEPTH`` cells under way at a time, positions in the order of the output,

    plane of the input     0  1  2  3  4  5
    position 0             a  b  c               three taps a, b, c: planes 2 to 4 are multiplied
    position 1                a  b  c            by all of them at once, into three sums
    position 2                   a  b  c

Where the convolution has no d, h is it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf

from fusewright.schedule.axes import Axis, Phase
from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import Carried, Contraction, remembered
from fusewright.schedule.residues import walk
from fusewright.schedule.tiling import MULTIPROCESSORS
from fusewright.schedule.warpgroup_choice import chunk_sizes, few_of_each, leanest, slices
from fusewright.schedule.warpgroup_estimate import HOPELESS, Lengths, scored
from fusewright.schedule.warpgroup_positions import (
    COLUMNS,
    MOST_FEATURES,
    ROWS,
    PositionTile,
    accumulators,
    features_at_once,
)
from fusewright.schedule.warpgroup_staging import (
    ACCUMULATORS,
    GROUPS,
    Products,
    joinable,
    passes,
    takes,
    two_by_two,
    vector,
)

# Features in eights from which on an instruction multiplies them for as long as it reads positions.
ENOUGH = 8
# Into so many parts a block's way along d may be cut, each of which begins anew.
PARTS = 8


@dataclass(frozen=True)
class CarriedTile(PositionTile):
    """See the module's text: the tile of one cell along d, which goes along `run` of them.

    depth     cells under way at a time
    columns   of an instruction, of the plane that belongs to the most positions
    """

    run: int = 1
    depth: int = 1
    columns: int = 0

    @property
    def cells(self) -> Lengths:
        return self.run, *self.region[1:]

    @property
    def slabs(self) -> int:
        return self.run + self.depth - 1

    def of(self, c: Contraction) -> Contraction:
        found = carried(c)
        assert found is not None, self
        return found

    @property
    def weights_m(self) -> int:
        return self.columns

    @property
    def traits(self) -> tuple[object, ...]:
        return *super().traits, self.run

    def products(self, c: Contraction) -> Products:
        tiles = self.tiles_h * self.rows_h * self.tiles_w
        return Products(tiles, self.columns, accumulators(c, self))

    def moved(self, c: Contraction) -> int:
        """Those of all cells under way but the complete one, which is among its values; where planes belong to
        different positions, their sums are moved for each, too."""
        assert c.carried is not None
        own = accumulators(c, self)
        return under_way(c, self) - own + (0 if c.carried.alike else own)


def under_way(c: Contraction, t: CarriedTile) -> int:
    """Accumulators of a thread, of all cells under way."""
    return accumulators(c, t) * t.depth


@remembered
def carried(c: Contraction) -> Contraction | None:
    """The group with its sums carried along d; `None` where a plane of the input belongs to one position alone, or to
    positions that are no neighbours."""
    if c.carried is not None:
        return c
    if c.across or c.box is not None:
        return None
    d, h, w = c.axes
    if not c.dims[0] and len(c.dims[1]) == 1:
        (d, h), c = (h, d), replace(c, axes=(h, d, w), dims=(c.dims[1], (), c.dims[2]))
    along, low = walk(d, cells=2), d.reach()[0]  # of several cells, as far apart as any
    rows = d.advance * along.between // along.step
    if d.together > 1 or not all(p.taps for p in d.phases) or d.advance * along.between % along.step:
        return None
    own = Carried(along.between, along.step, *_taps(along.staged, rows))
    belongs = zip(own.taps, own.first, own.count, strict=True)
    neighbours = all(-1 not in row[first : first + count] for row, first, count in belongs)
    if own.depth == 1 or not neighbours:
        return None
    phase = Phase(tuple(range(d.cell)), tuple(range(rows)), low, 0, along.step)
    return replace(c, axes=(replace(d, phases=(phase,)), h, w), carried=own)


def _taps(axis: Axis, rows: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """How many cells a slab of so many planes, `rows`, belongs to, and of each plane the taps of all their positions
    (`Carried.taps`)."""
    found = {}
    for p in axis.phases:
        for j, tap in product(range(len(p.elements)), range(len(p.taps))):
            behind, row = divmod(p.offset(j, tap), rows)
            found[row, behind, p.elements[j]] = p.taps[tap]
    depth = 1 + max(behind for _, behind, _ in found)
    slots = [(depth - 1 - i // axis.cell, i % axis.cell) for i in range(depth * axis.cell)]  # the oldest cell first
    return depth, tuple(tuple(found.get((row, *slot), -1) for slot in slots) for row in range(rows))


def candidates(
    c: Contraction, lengths: Lengths, *, tf32: bool, hopeless: float = inf
) -> list[tuple[float, CarriedTile]]:
    """Tiles that fit with their estimates, best first; `lengths` are the cells of the whole output along d, h, w."""
    if not takes(c, tf32=tf32) or (found := carried(c)) is None:
        return []
    return scored(found, _all, _along(c, lengths), hopeless)


def shortlist(c: Contraction, lengths: Lengths, count: int, *, tf32: bool) -> list[list[tuple[float, CarriedTile]]]:
    """The best `count` candidates whose warps stage what they multiply, and those with producers."""
    found = candidates(c, lengths, tf32=tf32, hopeless=HOPELESS)
    return few_of_each(carried(c) or c, found, count, alike=1)


def _along(c: Contraction, lengths: Lengths) -> Lengths:
    """The cells along the axes that the group then has."""
    d, h, w = lengths
    return lengths if c.dims[0] else (h, d, w)


def _all(c: Contraction, lengths: Lengths) -> Iterator[CarriedTile]:
    """Tiles that may be worth an estimate."""
    assert c.carried is not None
    for plain in leanest(c, _shapes(c, lengths), lengths, _alike):
        for chunk in chunk_sizes(c):
            t = changed(plain, chunk=chunk)
            if two_by_two(c, t) or c.carried.alike:  # else rows of taps of two planes would be multiplied together
                yield from slices(c, t)


def in_parts(c: Contraction, t: CarriedTile, lengths: Lengths, samples: int) -> CarriedTile:
    """The tile that goes along as many cells as leave the busiest multiprocessor the fewest slabs, of so many samples:
    all there are, or equal parts of them."""
    found = t.of(c)
    assert found.carried is not None
    d, h, w = _along(c, lengths)
    every, (_, own_h, own_w) = ceil(d / found.carried.between), t.region
    blocks = samples * c.op.groups * found.carried.between * ceil(h / own_h) * ceil(w / own_w)
    blocks *= ceil(c.features / t.block_m)

    def slabs(run: int) -> int:
        return ceil(blocks * ceil(every / run) / MULTIPROCESSORS) * (run + t.depth - 1)

    return changed(t, run=min((ceil(every / n) for n in range(1, 1 + min(PARTS, every))), key=slabs))


def _shapes(c: Contraction, lengths: Lengths) -> Iterator[CarriedTile]:
    """Tiles whose accumulators a thread can hold, of all phases and positions of a cell at once."""
    assert c.carried is not None
    rows_d, rows_h = (max(len(p.elements) for p in a.phases) for a in c.axes[:2])
    joined = next((n for n in joinable(c, (rows_d, rows_h)) if len(passes(c, n)) == 1), None)
    if joined is None:
        return
    for eights_m, wide, tiles_h, tiles_w in product(features_at_once(c), (False, True), ROWS, COLUMNS):
        columns = 8 * eights_m * max(c.carried.count)
        high, broad = (1, 64) if wide else (8, 8)
        if (
            eights_m >= ENOUGH
            or columns > MOST_FEATURES
            or tiles_h * high >= 2 * lengths[1] + high
            or tiles_w * broad >= 2 * lengths[2] + broad
        ):
            continue
        for groups_h, groups_w in product(GROUPS, GROUPS):
            t = CarriedTile(
                rows_d, rows_h, vector(c), 1, True, joined, eights_m, groups_h, groups_w, wide, 1, tiles_h, tiles_w,
                run=ceil(lengths[0] / c.carried.between), depth=c.carried.depth, columns=columns,
            )  # fmt: skip
            if groups_h * groups_w in GROUPS and under_way(c, t) <= ACCUMULATORS:
                yield t


def _alike(t: CarriedTile) -> object:
    """What a thread has."""
    return t.eights_m, t.wide, t.groups_h * t.groups_w, t.tiles_h * t.tiles_w
