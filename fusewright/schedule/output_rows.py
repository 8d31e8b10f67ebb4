"""How rows of the output are written where every position is: by way of shared memory, whole parts of memory at a time.

The tensor cores leave a lane two neighbours of a row, or lanes eight of them, with other features in between.  Written
from there, rows whose length is no number of sectors take several times as long as their bytes: a store of a part of a
sector costs as much as several whole ones (benchmarks/results/h200_stores.json).  So the warps that have a row's
positions, a *team*, leave eight features' rows in shared memory and write them from there, one after the other.  Where
rows are whole sectors, the way through shared memory costs more than it saves, unless the neighbours of four lanes are
but half of one: elements of two bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import Contraction

# Features whose rows a team has in shared memory at a time.
FEATURES = 8
# A team's positions of a row, below which whole sectors are too few to gain by it.
SHORTEST = 32
# Banks of shared memory; bytes that memory moves at a time.
BANKS, SECTOR = 32, 32
# How much longer rows take whose length is no number of sectors, written as lanes have them; and others, of which those
# have half a sector.
PARTED, HALVED = 4.0, 2.0
# Sectors that take as long as a part of one, of which a team's row has one at either end: 20 to 60 ps on the whole of
# an H200 (benchmarks/results/h200_ends_of_rows.json).
SECTORS_OF_PART = 4
# Elements of two bytes that are read behind a row: five words for every four that are written.
OF_FIVE_WORDS = 2


@dataclass(frozen=True)
class Team:
    """Warps that have positions of a row of the output side by side.

    positions   of the row that they have
    warps       that they are
    banks       of shared memory from feature to feature, so that lanes of a warp do not meet in one
    pooled      whether lanes have cells that are pooled in the same places as positions
    """

    positions: int
    warps: int
    banks: int
    pooled: bool = True

    @property
    def pitch(self) -> int:
        """Numbers from feature to feature in shared memory."""
        return self.positions + (self.banks - self.positions) % BANKS

    @property
    def pitch_of_halves(self) -> int:
        """The same of elements of two bytes, half as many words: whose lanes meet as little, if as much memory has
        room for that."""
        words = (self.positions + OF_FIVE_WORDS) // 2
        apart = words + (self.banks // 2 - words) % BANKS
        return 2 * (apart if apart <= self.pitch else words)


class Cut(Protocol):
    """What has to be known of a tile: whether it writes rows by way of shared memory, a block's warps, and those that
    share a row."""

    @property
    def by_rows(self) -> bool: ...
    @property
    def warps(self) -> int: ...
    @property
    def team(self) -> Team: ...


class _Tile(Cut, Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=_Tile)


@cache
def banks_of_runs(count: int) -> int:
    """Banks from feature to feature where four lanes have a feature's runs of `count` numbers side by side, and store
    as large a part of them at a time as vectors have: where lanes that are served together meet least."""
    part = next(n for n in (4, 2, 1) if count % n == 0)

    def meeting(banks: int) -> int:
        first = (banks * feature + count * quad for feature in range(8 // part) for quad in range(4))
        return _most_in_a_bank(one + i for one in first for i in range(part))

    found: int = min((count * 4 % BANKS, *range(0, BANKS, part)), key=meeting)
    return found


@cache
def banks_of_columns(count: int) -> int:
    """The same where lanes have numbers of every other feature, of eight cells that are `count` numbers apart."""

    def meeting(banks: int) -> int:
        return _most_in_a_bank(2 * banks * quad + count * cell for quad in range(4) for cell in range(8))

    found: int = min((4, *range(BANKS)), key=meeting)
    return found


def _most_in_a_bank(places: Iterable[int]) -> int:
    """How many of some numbers are in the bank that has most of them."""
    return max(Counter(place % BANKS for place in places).values())


def rows_bytes(t: Cut) -> int:
    """Bytes of a block's shared memory that rows take until they are written, as floats."""
    teams = t.warps // t.team.warps
    return 4 * teams * FEATURES * t.team.pitch if t.by_rows else 0


def _written(c: Contraction) -> bool:
    """Whether values of all positions or cells are written, a feature's side by side."""
    return c.fold is None and not c.writes_last


def _whole(c: Contraction, row: int) -> bool:
    """Whether rows are sectors; where their length varies, it is that of so many cells."""
    length = c.root.shape[-1]
    positions = length if isinstance(length, int) else row * (c.axes[2].stride if c.window is None else 1)
    return positions * c.root.dtype.itemsize % SECTOR == 0


def holds_halves(c: Contraction) -> bool:
    """Whether rows are held as elements of two bytes: nothing more is computed of them on the way out."""
    return c.root.dtype.itemsize == 2 and not c.elements


def _halved(c: Contraction) -> bool:
    """Whether what four lanes have side by side is half a sector: two phases along w, written together, are a whole."""
    return holds_halves(c) and len(c.axes[2].phases) == 1 and c.window is None


def as_written(
    c: Contraction, tiles: Iterable[T], row: int, of_phases: Callable[[T], T | None] = lambda t: None
) -> Iterator[T]:
    """The tiles, each with the better way to write rows of so many cells; `of_phases` gives a tile that writes those of
    several phases so, of more than two of which lanes have no whole parts of memory."""
    w = c.axes[2]
    plain = w.stride == 1 and w.start == 0 and all(p.elements == (0,) for p in w.phases)
    parts = not _whole(c, row) or _halved(c) or len(w.phases) > 2
    pays = _written(c) and parts and c.root.dtype.itemsize <= 4
    for t in tiles:
        one_by_one = plain if c.window is None else t.team.pooled
        rows = (changed(t, by_rows=True) if one_by_one else of_phases(t)) if pays else None
        yield t if rows is None or rows.team.positions < SHORTEST else rows


def ends_of_rows(c: Contraction, t: Cut, row: int) -> bool:
    """Whether rows of so many cells, written by way of shared memory, begin and end within sectors: those of two-byte
    elements, for what written bytes cost was fitted to rows of float32, ends and all."""
    halves = c.root.dtype.itemsize == 2 and c.window is None
    return t.by_rows and halves and _written(c) and not _whole(c, row)


def parted(c: Contraction, t: Cut, row: int) -> float:
    """How many times the time of whole sectors it takes to write rows of so many cells."""
    if t.by_rows or not _written(c):
        return 1.0
    return PARTED if not _whole(c, row) else HALVED if _halved(c) else 1.0
