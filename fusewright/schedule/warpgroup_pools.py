"""How a contraction group that pools is cut for the tensor cores of Hopper where threads pool together.

Where a thread has the whole of its windows (`warpgroup_positions`), an instruction's 64 positions are one element each
of 64 of them: a block's input spans them all, which is much of it, and is read again for one row of elements after the
other.  Here an instruction's positions are neighbours, as if nothing were pooled.  A block computes a region of them in
which some windows lie whole; eight features at a time meet in shared memory, from where threads pool them.  Windows may
overlap: what they share is computed once, but at the ends of a region.  Phases of a transposed convolution are computed
together.  Windows may begin between two of its strides: a tile has so many that the next one's begin as its own do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, gcd, inf, prod

from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.output_rows import BANKS, Team
from fusewright.schedule.warpgroup_choice import chunk_sizes, few_of_each, slices
from fusewright.schedule.warpgroup_estimate import HOPELESS, VALUE, scored
from fusewright.schedule.warpgroup_positions import PositionTile, accumulators, features_at_once
from fusewright.schedule.warpgroup_staging import (
    ACCUMULATORS,
    GROUPS,
    TEAM,
    Products,
    joinable,
    staged,
    takes,
)

# Features that meet in shared memory at a time.
FEATURES = 8
# Instructions of a warpgroup side by side along h, and along w, and planes of them.
ROWS, COLUMNS, PLANES = 8, 4, 8
# The least part of the fullest tile's share of useful positions that another one may have.
FULL = 0.5
# Shapes of as many positions and warpgroups that are worth an estimate, those that compute and stage the least; ways to
# stage one that are worth measuring.
ALIKE = 2
# Registers for where values meet.
PLACES = 12
# Cycles of a multiprocessor that eight features take in which nothing moves: warps wait for each other, and for values.
WAITING = 100.0


@dataclass(frozen=True)
class PoolTile(PositionTile):
    """See the module's text: a tile of positions, of which so many windows along d, h and w lie whole in it."""

    windows_d: int = 1
    windows_h: int = 1
    windows_w: int = 1

    @property
    def cells(self) -> tuple[int, int, int]:
        return self.windows_d, self.windows_h, self.windows_w

    def of(self, c: Contraction) -> Contraction:
        return across(c)

    @property
    def team(self) -> Team:
        return Team(0, 1, 4, pooled=False)

    @property
    def traits(self) -> tuple[object, ...]:
        """Its shape, and how channels come: how they are staged matters less."""
        tiles = self.eights_m, self.wide, self.cells_d, self.tiles_h, self.tiles_w, self.groups_h, self.groups_w
        return *tiles, self.chunk, self.unfolded

    @property
    def turns(self) -> int:
        """Windows of a thread: eight of each warp at a time."""
        return ceil(prod(self.cells) / (8 * self.warps))

    def pooled(self, c: Contraction) -> int:
        return self.turns * 2 * self.eights_m * c.pooled_numbers + PLACES

    def products(self, c: Contraction) -> Products:
        found = super().products(c)
        return changed(found, accumulators=found.accumulators + int(_exchange(c, self) / (VALUE * self.warps)))

    def own_bytes(self, c: Contraction) -> int:
        return self.numbers_bytes(c) + 4 * 2 * c.pooled_numbers * shared_numbers(c, self)


def _exchange(c: Contraction, t: PoolTile) -> float:
    """Cycles of shared memory in which values get there and back, two features of a lane at a time."""
    meetings = [meeting(c, t, i) for i in range(3)]
    stored = 2 * t.warps * prod(t.own) * prod(m.count / n for m, n in zip(meetings, t.region, strict=True))
    read = ceil(prod(t.cells) / 8) * shared(c, t).turns * prod(m.size for m in meetings)
    return t.eights_m * (WAITING + c.pooled_numbers * (stored + read))


def across(c: Contraction) -> Contraction:
    """The group as these tiles have it."""
    return c if c.across else replace(c, axes=c.plain_axes, across=True)


@dataclass(frozen=True)
class Meeting:
    """What of a feature meets in shared memory along one dimension.

    whole   whether windows have all positions between two strides of a transposed convolution, or none of them: a
            thread, which has them all, joins them first
    shift   so many of the region's first positions lie ahead of its first window
    lead    columns that rows of shared memory have ahead of the region's, so that windows begin at multiples
    folded  so many cells of a thread, too, of which windows have all or none
    count   what is left of a region
    size, apart   so much of it a window has, and windows begin so far from each other
    """

    whole: bool
    shift: int
    lead: int
    folded: int
    count: int
    size: int
    apart: int


def _shift(c: Contraction, i: int) -> int:
    """Positions of a region's first cell along axis `i` that lie ahead of its first window."""
    return -c.pooling(i)[2] % c.axes[i].stride


def meeting(c: Contraction, t: PoolTile, i: int) -> Meeting:
    """That along axis `i`."""
    (size, apart, _), phases, shift = c.pooling(i), c.axes[i].stride, _shift(c, i)
    if size % phases or apart % phases or shift:
        lead = -shift % apart if i == 2 else 0
        return Meeting(False, shift, lead, 1, t.region[i] * phases, size, apart)
    size, apart = size // phases, apart // phases
    folded = gcd((t.cells_d, t.tiles_h if t.wide else 2, 1)[i], size, apart)
    return Meeting(True, 0, 0, folded, t.region[i] // folded, size // folded, apart // folded)


@dataclass(frozen=True)
class Shared:
    """How eight features' values meet in shared memory: [d][h][w][feature], eight numbers more behind every `apart`
    columns (zero: nowhere), `row` numbers from row to row, and how often it is read for one value of all windows of a
    warp."""

    apart: int
    row: int
    turns: int

    def column(self, w: int) -> int:
        return FEATURES * (w + (w // self.apart if self.apart else 0))


def shared(c: Contraction, t: PoolTile) -> Shared:
    """Such that lanes of a warp, which have the same elements of eight windows, hardly meet in a bank."""
    h, w = meeting(c, t, 1), meeting(c, t, 2)
    return _shared(w.lead + w.count, w.apart, h.apart, t.windows_w)


@lru_cache(maxsize=4096)
def _shared(columns: int, apart_w: int, apart_h: int, windows_w: int) -> Shared:
    plain = Shared(0 if apart_w % 2 else apart_w, 0, 0)
    least = plain.column(columns - 1) + FEATURES

    def turns(row: int) -> int:
        at = [i // windows_w * apart_h * row + plain.column(i % windows_w * apart_w) for i in range(8)]
        halves = ({(first + n) for first in at[half : half + 4] for n in range(FEATURES)} for half in (0, 4))
        return sum(max(Counter(n % BANKS for n in half).values()) for half in halves)

    row = min(range(least, least + BANKS, FEATURES), key=lambda n: (turns(n), n))
    return changed(plain, row=row, turns=turns(row))


def shared_numbers(c: Contraction, t: PoolTile) -> int:
    """Values of eight features, in shared memory."""
    return meeting(c, t, 0).count * meeting(c, t, 1).count * shared(c, t).row


def candidates(
    c: Contraction, lengths: tuple[int, int, int], *, tf32: bool, hopeless: float = inf
) -> list[tuple[float, PoolTile]]:
    """Tiles that fit with their estimates, best first; `lengths` are the cells of the whole output along d, h, w."""
    if c.window is None or c.shares is not None or not takes(c, tf32=tf32):
        return []
    return scored(across(c), _all, lengths, hopeless)


def shortlist(
    c: Contraction, lengths: tuple[int, int, int], count: int, *, tf32: bool
) -> list[list[tuple[float, PoolTile]]]:
    """The best `count` candidates whose warps stage what they multiply, those with producers, and those that take
    turns."""
    return few_of_each(across(c), candidates(c, lengths, tf32=tf32, hopeless=HOPELESS), count, alike=ALIKE)


def _all(c: Contraction, lengths: tuple[int, int, int]) -> Iterator[PoolTile]:
    """Tiles that may be worth an estimate."""
    for eights_m in features_at_once(c):
        plain = PoolTile(1, 1, c.channels, 1, True, joinable(c, (1, 1))[-1], eights_m, 1, 1, False, 1, 1, 1)
        whole = [t for shape in _shapes(c, plain) if (t := _windows(c, shape, lengths)) is not None]
        met: Counter[tuple[object, ...]] = Counter()
        fullest = 0.0
        for shape in sorted(whole, key=lambda t: (prod(t.region) + prod(staged(c, t).lengths)) / prod(t.cells)):
            kind = shape.wide, shape.groups_h * shape.groups_w, accumulators(c, shape)
            if _share(c, shape) < FULL * fullest or met[kind] == ALIKE:
                continue
            if not changed(shape, producers=TEAM).fits(c):  # it would not without producers either
                continue
            cuts = [cut for chunk in chunk_sizes(c) for cut in slices(c, changed(shape, chunk=chunk))]
            if cuts:
                met[kind] += 1
                fullest = max(fullest, _share(c, shape))
            yield from cuts


def _shapes(c: Contraction, t: PoolTile) -> Iterator[PoolTile]:
    """Tiles whose accumulators a thread can hold."""
    planes = range(1, 1 + (PLANES if c.dims[0] else 1))
    rows = range(1, 1 + (ROWS if c.dims[1] else 1))
    for groups_h, groups_w, wide in product(GROUPS, GROUPS, (False, True)):
        if groups_h * groups_w in GROUPS:
            for cells_d, tiles_h, tiles_w in product(planes, rows, range(1, 1 + COLUMNS)):
                own = changed(t, groups_h=groups_h, groups_w=groups_w, wide=wide)
                own = changed(own, cells_d=cells_d, tiles_h=tiles_h, tiles_w=tiles_w)
                if accumulators(c, own) <= ACCUMULATORS:
                    yield own


def _windows(c: Contraction, t: PoolTile, lengths: tuple[int, int, int]) -> PoolTile | None:
    """The tile with as many windows as lie whole in it, and as there are of them; `None` where none does."""
    d, h, w = (_windows_along(c, t, i, lengths[i]) for i in range(3))
    return changed(t, windows_d=d, windows_h=h, windows_w=w) if min(d, h, w) > 0 else None


def _windows_along(c: Contraction, t: PoolTile, i: int, length: int) -> int:
    """Windows of a tile along axis `i`, along which there are `length`: so many that together they advance by whole
    strides, and the next tile begins with a cell, too."""
    (size, apart, _), stride = c.pooling(i), c.axes[i].stride
    fit = (t.region[i] * stride - _shift(c, i) - size) // apart + 1
    together = stride // gcd(stride, apart)
    return min(fit // together, ceil(length / together)) * together


def _share(c: Contraction, t: PoolTile) -> float:
    """Of a tile's positions, those that its windows alone have."""
    return prod(n * c.pooling(i)[1] / (t.region[i] * c.axes[i].stride) for i, n in enumerate(t.cells))
