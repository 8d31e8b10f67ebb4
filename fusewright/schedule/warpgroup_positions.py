"""How a contraction group of few features is cut for the tensor cores of Hopper: they take 64 of its positions.

Of 64 features at a time (`warpgroup`) a group may lack many.  Here a warpgroup multiplies 64 positions by up to 256
features, as many eights as there are.  The positions are one element each of eight eights of cells along w, neighbours
or one below the other; elements of a cell are further instructions, so that a thread owns whole cells.

Where features are so few that an instruction takes longer to read its positions than to multiply them, taps along w may
be *spread*: the columns are every feature's weights of every tap of a row, a position is read once for all of them, and
what a column gives is a part of as many outputs as there are taps, which lie in shared memory until they are added up.
Phases of a transposed convolution have taps of their own, which are spread one phase after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, inf

from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import Contraction, remembered
from fusewright.schedule.kept_channels import KeptChannels
from fusewright.schedule.output_rows import Team, banks_of_columns, rows_bytes
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
    Taps,
    WarpgroupCut,
    joinable,
    passes,
    phases_side_by_side,
    takes,
    two_by_two,
    vectors_by_thread,
)

# How often a warpgroup has an instruction's positions along d, h and w.
PLANES, ROWS, COLUMNS = (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16), (1, 2, 3, 4, 5, 6, 8)
# Features that one instruction multiplies at most.
MOST_FEATURES = 256
# Computed features per useful one, with 64 at a time and with eight, whose ratio makes this worth a try.
FEWER = 1.12
# Numbers per channel that a thread keeps in registers at most; more of them lie in shared memory.
KEPT_NUMBERS = 24
# Read off what compiles with hardly a spill: those that a thread takes beside accumulators, numbers and results; and
# more of them for each vector on its way, where there are more vectors than those, in half precision, and in float32
# where taps are channels.
OTHERS, ON_ITS_WAY, IN_ROUNDS, IN_HALVES, UNFOLDED = 12, 10, 12, 20, 16
# Where others stage, of what follows the products: where they do not, it has those of vectors on their way.
FOLLOWING = 28
# Where rows are written by way of shared memory from more accumulators than those.
WRITTEN, MANY = 32, 128
# Of a feature's running results over positions, in a tile and over many.
RUNNING = {"sum": 3, "mean": 3, "max": 2, "min": 2, "logsumexp": 4}
# What a number's way to shared memory or back takes, where an accumulator's way through what follows takes one: it
# hardly shows in benchmarks/results/h200_spread_taps.json.
EXCHANGED = 0.1


class FeatureColumns:
    """Tiles whose columns are features, `eights_m` times eight of a block; all warps share them."""

    eights_m: int

    @property
    def warps_m(self) -> int:
        return 1

    @property
    def block_m(self) -> int:
        return 8 * self.eights_m

    def numbers_bytes(self, c: Contraction) -> int:
        """Numbers per channel."""
        return 0 if self.keeps_numbers(c) else 4 * self.block_m * numbers(c)

    def keeps_numbers(self, c: Contraction) -> bool:
        """Whether a thread has the numbers of its channels in registers."""
        return 2 * self.eights_m * numbers(c) <= KEPT_NUMBERS


@dataclass(frozen=True)
class PositionTile(FeatureColumns, WarpgroupCut):
    """See the module's text.

    eights_m   times eight features of a block
    groups_h, groups_w   warpgroups side by side over rows and columns
    wide       whether the eights of cells that one instruction takes are neighbours along w; else they lie along h
    cells_d, tiles_h, tiles_w   so many times those cells that a warpgroup has along d, h, w
    spread    zero, or the columns of a product whose taps along w are spread: those of all features, in eights
    lost      cells at the end of a block's row that only help others: their own taps go beyond it
    coupled   phases whose positions are neighbours of rows that are written by way of shared memory, if there are any

    The rows that wait in registers are positions of one row of the input, for all rows of taps that cells read it with.
    """

    eights_m: int
    groups_h: int
    groups_w: int
    wide: bool
    cells_d: int
    tiles_h: int
    tiles_w: int
    spread: int = 0
    lost: int = 0
    coupled: int = 0

    @property
    def warps(self) -> int:
        return 4 * self.groups_h * self.groups_w

    @property
    def warps_h(self) -> int:
        return self.groups_h if self.wide else 4 * self.groups_h

    @property
    def warps_w(self) -> int:
        return 4 * self.groups_w if self.wide else self.groups_w

    @property
    def cells_of_lane(self) -> int:
        return 1

    @property
    def at_once(self) -> tuple[int, int]:
        """Cells along h and w that one instruction takes."""
        return (1, 64) if self.wide else (8, 8)

    @property
    def own(self) -> tuple[int, int, int]:
        """Cells of a thread along d, h, w: two of each instruction's."""
        return self.cells_d, self.tiles_h * (1 if self.wide else 2), self.tiles_w * (2 if self.wide else 1)

    @property
    def region(self) -> tuple[int, int, int]:
        d, h, w = self.own
        return d, h * self.warps_h, 8 * w * self.warps_w - self.lost

    @property
    def cells(self) -> tuple[int, int, int]:
        return self.region

    @property
    def team(self) -> Team:
        """Lanes have every eighth position; those of taps that are spread lie elsewhere."""
        if self.spread:
            return Team(0, 1, 4)
        phases, warps = self.coupled or 1, 4 if self.wide else 1
        return Team(8 * self.own[2] * phases * warps, warps, banks_of_columns(phases))

    def by_rows_of_phases(self, c: Contraction) -> PositionTile | None:
        """Of two phases lanes write the neighbours that they have, which takes no longer."""
        phases = 0 if self.spread else phases_side_by_side(c, self)
        return changed(self, by_rows=True, coupled=phases) if phases > 2 else None

    @property
    def traits(self) -> tuple[object, ...]:
        tiles = self.rows_d * self.cells_d, self.rows_h, self.tiles_h * self.tiles_w, self.groups_h * self.groups_w
        staging = self.chunk, self.stay, self.joined, self.spread, self.unfolded, self.producers, self.held, self.twice
        return self.eights_m, *tiles, self.wide, *staging

    def products(self, c: Contraction) -> Products:
        tiles = self.cells_d * self.rows_d * self.tiles_h * self.rows_h * self.tiles_w
        values = accumulators(c, self)
        exchanged = summands(c, self) + values * _taps_of_row(c) if self.spread else 0
        found = Products(tiles, self.weights_m, values + int(EXCHANGED * exchanged))
        if not self.held:
            return found
        rows, taps = self.tiles_h * self.rows_h, _rows_of_taps(c)
        elements = max(len(p.elements) for p in c.axes[2].phases)
        readings = tiles / rows * elements / taps
        return changed(found, rows=rows_held(c, self) / (rows * taps), readings=readings)

    def in_turn(self, taps: Taps) -> Taps:
        return changed(taps, per_row=min(1, taps.per_row)) if self.spread else taps

    @property
    def whole_cells(self) -> bool:
        return self.spread > 0

    @property
    def weights_m(self) -> int:
        return self.spread or self.block_m

    def pooled(self, c: Contraction) -> int:
        """Registers of a thread's values that come from a pool."""
        values = 0 if c.window is None else self.cells_d * self.tiles_h * self.tiles_w * self.block_m // 2
        return c.pooled_numbers * values

    def moved(self, c: Contraction) -> int:
        """Registers of a thread's accumulators beyond those of one tile of cells."""
        return 0

    def summand_pitch(self, c: Contraction) -> int:
        """Numbers of a spread column in shared memory, of one row of every warp.  The next begins four banks on: lanes
        of a quad have every second one, and do not meet."""
        return 64 * self.tiles_w * self.groups_h * self.groups_w * c.axes[2].advance + 4

    def own_bytes(self, c: Contraction) -> int:
        return self.numbers_bytes(c) + rows_bytes(self) + 4 * (self.spread * self.summand_pitch(c) + self.lost)

    def fits(self, c: Contraction) -> bool:
        return registers_of(c, self) <= MOST_REGISTERS

    def registers(self, c: Contraction) -> int:
        return min(255, -(-registers_of(c, self) // 8) * 8)


@remembered
def numbers(c: Contraction) -> int:
    """Operands that have a number per channel."""
    bias = c.conv.args[2]
    read = dict.fromkeys([*([] if bias is None else [bias]), *c.operands])
    return sum(any(d != 1 for d in n.shape) for n in read if n not in c.elements)


def running(c: Contraction) -> int:
    """Numbers of a feature's running results over positions."""
    assert c.fold is not None
    return RUNNING[c.fold.op.kind] * (2 if c.folds_ends else 1)


def accumulators(c: Contraction, t: PositionTile) -> int:
    """Of a thread."""
    along_w = max(len(p.elements) for p in c.axes[2].phases) * len(passes(c, t.joined)[0])
    return t.cells_d * t.rows_d * t.tiles_h * t.rows_h * t.tiles_w * along_w * t.block_m // 2


@remembered
def _rows_of_taps(c: Contraction) -> int:
    """The fewest taps along h of a phase that has some."""
    return min(len(p.taps) for p in c.axes[1].phases if p.taps)


@remembered
def _taps_of_row(c: Contraction) -> int:
    """The most taps along w of a phase."""
    return max(len(p.taps) for p in c.axes[2].phases)


def rows_held(c: Contraction, t: PositionTile) -> int:
    """Rows of the input that wait in registers together: those that the cells of a warpgroup read, side by side."""
    axis, taps = walks(c, t.region)[1].staged, max(len(p.taps) for p in c.axes[1].phases)
    per_element, per_tap = axis.phases[0].per_element, max(p.per_tap for p in axis.phases if p.taps)
    cells = range(t.tiles_h), range(t.rows_h), range(taps)
    return len({i * axis.advance + e * per_element + tap * per_tap for i, e, tap in product(*cells)})


def summands(c: Contraction, t: PositionTile) -> int:
    """Of a thread, where taps are spread: what the tensor cores add up."""
    return accumulators(c, t) * t.spread // t.block_m


def registers_of(c: Contraction, t: PositionTile) -> int:
    """A thread's, if it could have as many as it likes."""
    each, at_once = vectors_by_thread(c, t)
    count = accumulators(c, t) + summands(c, t) + OTHERS + ON_ITS_WAY * at_once + (IN_ROUNDS if each > at_once else 0)
    count += t.pooled(c) + t.moved(c)
    if c.reduced == "positions":
        count += 2 * running(c) * t.eights_m
    if c.shares is not None:
        count += 2 * t.eights_m  # its values, beside what they were made of
    if isinstance(c.shares, KeptChannels) and any(len(p.tree.leaves) > 1 for p in c.shares.passes):
        count += 2 * t.eights_m  # what is made of values and of another reduction
    if c.reduced == "channels" or c.shares is not None:
        count += 2 * t.eights_m  # the values of a column
    if t.held:
        count += 8 * rows_held(c, t)  # those at hand, and those that come next
    if t.by_rows and accumulators(c, t) > MANY:
        count += WRITTEN
    if c.halves:
        count += WATCHING
    if t.producers:
        count += FOLLOWING
    elif c.multiplied.itemsize == 2:
        count += IN_HALVES
    elif c.unfolded is not None:
        count += UNFOLDED
    return count + (2 * t.eights_m * numbers(c) if t.keeps_numbers(c) else 0)


def candidates(
    c: Contraction, lengths: tuple[int, int, int], *, tf32: bool, hopeless: float = inf
) -> list[tuple[float, PositionTile]]:
    """Tiles that fit with their estimates, best first; `lengths` are the cells of the whole output along d, h, w."""
    worth = c.shares is not None or _saves(c)
    return scored(c, _all, lengths, hopeless) if takes(c, tf32=tf32) and worth else []


def shortlist(
    c: Contraction, lengths: tuple[int, int, int], count: int, *, tf32: bool
) -> list[list[tuple[float, PositionTile]]]:
    """The best `count` candidates whose warps stage what they multiply, those with producers, and those that take
    turns, none but for the shape of as many cells."""
    return few_of_each(c, candidates(c, lengths, tf32=tf32, hopeless=HOPELESS), count, alike=1)


def _saves(c: Contraction) -> bool:
    """Whether 64 features at a time are so many more than eight."""
    return 8 * ceil(c.features / 8) * FEWER <= 64 * ceil(c.features / 64)


def _all(c: Contraction, lengths: tuple[int, int, int]) -> Iterator[PositionTile]:
    """Tiles that may be worth an estimate."""
    for plain in leanest(c, _shapes(c, lengths), lengths, _alike):
        ways = [plain, *spread(c, plain)]
        for way, chunk, joined in product(ways, chunk_sizes(c), joinable(c, (plain.rows_d, plain.rows_h))):
            t = changed(way, chunk=chunk, joined=joined)
            most = max(accumulators(c, t), summands(c, t))
            if most <= ACCUMULATORS and not (t.spread and joined):
                for cut in slices(c, t):
                    yield from (cut, *held(c, cut))


def _shapes(c: Contraction, lengths: tuple[int, int, int]) -> Iterator[PositionTile]:
    """Tiles whose accumulators a thread can hold."""
    for eights_m in features_at_once(c):
        for wide, cells, rows in _cells_of_warpgroup(c, lengths, eights_m):
            for groups_h, groups_w in product(GROUPS, GROUPS):
                if groups_h * groups_w in GROUPS:
                    yield PositionTile(*rows, c.channels, 1, True, 0, eights_m, groups_h, groups_w, wide, *cells)


def _alike(t: PositionTile) -> object:
    """What a thread has."""
    cells = t.cells_d * t.tiles_h * t.tiles_w
    return t.eights_m, t.wide, t.groups_h * t.groups_w, t.rows_d, t.rows_h, cells


def held(c: Contraction, t: PositionTile) -> list[PositionTile]:
    """The tile with positions in registers, where its instructions take neighbours along w and many rows of taps read
    them, all of them staged together."""
    whole = all(t.tap_rows % len(p.taps) == 0 for p in c.axes[1].phases if p.taps)
    if not (t.wide and whole and two_by_two(c, t)) or t.spread:
        return []
    held = changed(t, held=True)
    return [held] if held.products(c).rows <= HELD_SHARE else []


def spread(c: Contraction, t: PositionTile) -> list[PositionTile]:
    """The tile with its taps along w spread, where all features are in a block, and the inputs that its cells' first
    taps read are neighbours, each read once."""
    axis = walks(c, t.cells)[2].staged
    phases = axis.phases  # those without taps, too, have a place in shared memory for every element
    neighbours = all(len(p.elements) == axis.advance == axis.advance * p.per_element for p in phases)
    columns = 8 * ceil(c.features * _taps_of_row(c) / 8)
    if not neighbours or _taps_of_row(c) < 2 or t.block_m < c.features or columns > MOST_FEATURES:
        return []
    last = max(p.offset(e, tap) for p in phases for e in range(len(p.elements)) for tap in range(len(p.taps)))
    lost = last // axis.advance
    return [changed(t, spread=columns, lost=lost)] if lost < t.cells[2] else []


def features_at_once(c: Contraction) -> list[int]:
    """Eights of features of a block: of as few blocks as there may be, or of more where nothing joins them."""
    fewest = ceil(c.features / MOST_FEATURES)
    if c.over_channels or c.shares is not None:
        return [ceil(c.features / 8)] if fewest == 1 else []
    return list(dict.fromkeys(ceil(c.features / (8 * n)) for n in range(fewest, fewest + 3)))


def _cells_of_warpgroup(
    c: Contraction, lengths: tuple[int, int, int], eights_m: int
) -> Iterator[tuple[bool, tuple[int, int, int], tuple[int, int]]]:
    """How the eights of an instruction lie, how often a warpgroup has them along d, h, w, and rows of a cell that are
    computed at a time along d, h."""
    along_w = max(len(p.elements) for p in c.axes[2].phases)
    for wide, d, h, w in product((False, True), PLANES, ROWS, COLUMNS):
        high, broad = (1, 64) if wide else (8, 8)
        if d > lengths[0] or h * high >= 2 * lengths[1] + high or w * broad >= 2 * lengths[2] + broad:
            continue
        for rows_d, rows_h in rows_at_a_time(c):
            if 4 * eights_m * d * h * w * rows_d * rows_h * along_w <= ACCUMULATORS:
                yield wide, (d, h, w), (rows_d, rows_h)
