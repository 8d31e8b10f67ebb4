"""How a contraction group is cut for the tensor cores of Hopper, which multiply what lies in shared memory.

A warpgroup, four warps, multiplies 64 features by up to 256 positions in one instruction and goes on with other work
meanwhile: it stages what is multiplied next (`warpgroup_staging`).  Cells of a tile lie in eights along w.  The other
way, positions by features, is `warpgroup_positions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, inf, prod

from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.output_rows import Team, banks_of_runs, holds_halves, rows_bytes
from fusewright.schedule.residues import walks
from fusewright.schedule.warpgroup_choice import chunk_sizes, few_of_each, leanest, rows_at_a_time, slices
from fusewright.schedule.warpgroup_estimate import HOPELESS, scored
from fusewright.schedule.warpgroup_staging import (
    ACCUMULATORS,
    GROUPS,
    HELD_SHARE,
    MOST_REGISTERS,
    WATCHING,
    Products,
    WarpgroupCut,
    joinable,
    passes,
    phases_side_by_side,
    takes,
    two_by_two,
    vectors_by_thread,
)

# Read off what compiles without a spill: registers of a thread beside its accumulators, and more for each vector
# that is on its way; where taps are channels, and where such vectors have eight elements.
OTHERS, ON_ITS_WAY = 44, 6
UNFOLDED, UNFOLDED_HALVES = 24, 64
# Where others stage, for what follows the products: where they do not, it has those of vectors on their way.
FOLLOWING = 16
# Where phases share a pass and the last vectors of two rows of taps go together.
PAIRED = 8
# Where rows of two-byte elements are written by vectors.
OF_VECTORS = 8
# Of weights that wait in registers, for every 64 features: those at hand, and those that come next.
HELD = 8


@dataclass(frozen=True)
class WarpgroupTile(WarpgroupCut):
    """See the module's text.

    m_tiles   times 64 features that a warpgroup computes
    groups_m, groups_h, groups_w   warpgroups side by side over features, rows and columns
    cells_d, cells_h, eights_w   cells of a warpgroup

    coupled   phases whose positions are neighbours of rows that are written by way of shared memory, if there are any

    The rows that wait in registers are the weights of one tap, for all positions.
    """

    m_tiles: int
    groups_m: int
    groups_h: int
    groups_w: int
    cells_d: int
    cells_h: int
    eights_w: int
    coupled: int = 0

    @property
    def warps(self) -> int:
        return 4 * self.groups_m * self.groups_h * self.groups_w

    @property
    def warps_m(self) -> int:
        return 4 * self.groups_m

    @property
    def warps_h(self) -> int:
        return self.groups_h

    @property
    def warps_w(self) -> int:
        return self.groups_w

    @property
    def block_m(self) -> int:
        return 64 * self.m_tiles * self.groups_m

    @property
    def cells_of_lane(self) -> int:
        return 2

    @property
    def cells(self) -> tuple[int, int, int]:
        return self.cells_d, self.cells_h * self.groups_h, 8 * self.eights_w * self.groups_w

    @property
    def team(self) -> Team:
        """A warp has 16 features of all of a warpgroup's columns."""
        phases = self.coupled or 1
        return Team(8 * phases * self.eights_w, 1, banks_of_runs(2 * phases))

    def by_rows_of_phases(self, c: Contraction) -> WarpgroupTile | None:
        phases = phases_side_by_side(c, self)
        return changed(self, by_rows=True, coupled=phases) if phases else None

    @property
    def traits(self) -> tuple[object, ...]:
        tiles = self.m_tiles, self.rows_d * self.cells_d, self.rows_h * self.cells_h, self.eights_w
        staging = self.stay, self.joined, self.unfolded, self.producers, self.held, self.twice
        return *tiles, *staging

    def products(self, c: Contraction) -> Products:
        rows = self.cells_d * self.rows_d * (self.rows_h * self.cells_h // rows_at_once(c, self))
        found = Products(rows * self.m_tiles, positions(c, self), _accumulators(c, self))
        return changed(found, rows=1 / _sharing(c, self, rows), readings=1.0) if self.held else found

    def registers(self, c: Contraction) -> int:
        return min(255, -(-_registers(c, self) // 8) * 8)

    def own_bytes(self, c: Contraction) -> int:
        """What the warps that share a tile's positions come to there, where channels are reduced; or rows that are
        written."""
        if c.fold is None or c.reduced != "channels":
            return rows_bytes(self)
        words = 2 if c.fold.op.kind == "logsumexp" else 1
        local = (n * (a.stride if c.window is None else 1) for a, n in zip(c.axes, self.cells, strict=True))
        return 4 * words * self.warps_m * prod(local)


def rows_at_once(c: Contraction, t: WarpgroupTile) -> int:
    """Rows of eight cells that one instruction multiplies, all as far apart; where rows are wider, it takes one."""
    if t.eights_w > 1:
        return 1
    axis = walks(c, t.cells)[1].staged
    even = t.rows_h == 1 or axis.advance == t.rows_h * axis.phases[0].per_element
    return t.rows_h * t.cells_h if even else t.rows_h


def _sharing(c: Contraction, t: WarpgroupTile, rows: int) -> int:
    """Instructions that multiply the same weights, where there are so many for an element of a cell along w."""
    return rows * min(len(p.elements) for p in c.axes[2].phases)


def positions(c: Contraction, t: WarpgroupTile) -> int:
    """That one instruction multiplies."""
    return 8 * rows_at_once(c, t) * t.eights_w


def _accumulators(c: Contraction, t: WarpgroupTile) -> int:
    """Of a thread."""
    along_w = max(len(p.elements) for p in c.axes[2].phases) * len(passes(c, t.joined)[0])
    return t.m_tiles * t.cells_d * t.rows_d * t.cells_h * t.rows_h * t.eights_w * along_w * 4


def _registers(c: Contraction, t: WarpgroupTile) -> int:
    """A thread's, if it could have as many as it likes."""
    count = _accumulators(c, t) + OTHERS + ON_ITS_WAY * vectors_by_thread(c, t)[1]
    if c.window is not None:
        count += t.cells_d * t.cells_h * t.eights_w * 2 * t.m_tiles * 2 * c.pooled_numbers
    if c.over_positions and not c.over_channels:
        count += (8 if c.folds_ends else 6) * t.m_tiles
    if t.held:
        count += HELD * t.m_tiles
    if c.halves:
        count += WATCHING
    if t.joined and not two_by_two(c, t):
        count += PAIRED
    if t.by_rows and holds_halves(c):
        count += OF_VECTORS
    if t.producers:
        count += FOLLOWING
    elif c.unfolded is not None:
        count += UNFOLDED if c.multiplied.itemsize == 4 else UNFOLDED_HALVES
    return count


def candidates(
    c: Contraction, lengths: tuple[int, int, int], *, tf32: bool, hopeless: float = inf
) -> list[tuple[float, WarpgroupTile]]:
    """Tiles that fit with their estimates, best first; `lengths` are the cells of the whole output along d, h, w."""
    return scored(c, _all, lengths, hopeless) if takes(c, tf32=tf32) and c.shares is None else []


# Cells of a warpgroup along d, h and, in eights, w.
PLANES, ROWS, EIGHTS = (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)

# So many tiles with the same accumulators are worth a try.
ALIKE = 2


def shortlist(
    c: Contraction, lengths: tuple[int, int, int], count: int, *, tf32: bool
) -> list[list[tuple[float, WarpgroupTile]]]:
    """The best `count` candidates whose warps stage what they multiply, those with producers, and those that take
    turns, few of them alike in what a warpgroup holds."""
    return few_of_each(c, candidates(c, lengths, tf32=tf32, hopeless=HOPELESS), count, alike=ALIKE)


def _all(c: Contraction, lengths: tuple[int, int, int]) -> Iterator[WarpgroupTile]:
    """Tiles that may be worth an estimate."""
    for plain in leanest(c, _shapes(c, lengths), lengths, partial(_alike, c)):
        for chunk, joined in product(chunk_sizes(c), joinable(c, (plain.rows_d, plain.rows_h))):
            t = changed(plain, chunk=chunk, joined=joined)
            fits = c.unfolded is None or _registers(c, t) <= MOST_REGISTERS
            if fits and _accumulators(c, t) <= ACCUMULATORS:
                yield from _ways_to_read(c, slices(c, t))


def _shapes(c: Contraction, lengths: tuple[int, int, int]) -> Iterator[WarpgroupTile]:
    """Tiles whose accumulators a thread can hold."""
    for m_tiles, groups_m in _features(c):
        for cells, rows in _cells_of_warpgroup(c, lengths, m_tiles):
            for groups_h, groups_w in product(GROUPS, GROUPS):
                if groups_m * groups_h * groups_w in GROUPS:
                    sizes = m_tiles, groups_m, groups_h, groups_w, *cells
                    yield WarpgroupTile(*rows, c.channels, 1, True, 0, *sizes)


def _alike(c: Contraction, t: WarpgroupTile) -> object:
    """What a thread and an instruction have."""
    cells = t.cells_d * t.cells_h * t.eights_w
    return t.m_tiles, t.groups_m, t.groups_h * t.groups_w, t.rows_d, t.rows_h, cells, positions(c, t)


def _ways_to_read(c: Contraction, tiles: Iterator[WarpgroupTile]) -> Iterator[WarpgroupTile]:
    """The tiles, and with weights in registers those of which several instructions multiply the same."""
    for t in tiles:
        yield t
        held = changed(t, held=True)
        if two_by_two(c, t) and held.products(c).rows <= HELD_SHARE and _registers(c, held) <= MOST_REGISTERS:
            yield held


def _features(c: Contraction) -> Iterator[tuple[int, int]]:
    """Times 64 output channels of a warpgroup, and warpgroups side by side over channels."""
    needed = ceil(c.features / 64)
    for m_tiles, groups_m in product((1, 2), (1, 2, 3, 4)):
        at_once = m_tiles * groups_m
        if at_once <= needed and -needed % at_once * 4 <= needed and (at_once == needed or not c.over_channels):
            yield m_tiles, groups_m


def _cells_of_warpgroup(
    c: Contraction, lengths: tuple[int, int, int], m_tiles: int
) -> Iterator[tuple[tuple[int, int, int], tuple[int, int]]]:
    """Cells of a warpgroup along d, h and, in eights, w; rows of a cell that are computed at a time along d, h."""
    along_w = max(len(p.elements) for p in c.axes[2].phases)
    for d, h, w in product(PLANES, ROWS, EIGHTS):
        if d > lengths[0] or h >= 2 * lengths[1] or 8 * w >= 2 * lengths[2] + 8:
            continue
        for rows_d, rows_h in rows_at_a_time(c):
            if m_tiles * d * h * w * rows_d * rows_h * along_w * 4 <= ACCUMULATORS:
                yield (d, h, w), (rows_d, rows_h)
