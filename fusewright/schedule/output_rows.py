"""How rows of the output are written where every position is: by way of shared memory, whole parts of memory at a time.

The tensor cores leave a lane two neighbours of a row, or lanes eight of them, with other features in between.  Written
from there, rows whose length is no number of sectors take several times as long as their bytes: a store of a part of a
sector costs as much as several whole ones (benchmarks/results/h200_stores.json).  So the warps that have a row's
positions, a *team*, leave eight features' rows in shared memory and write them from there, one after the other.  Where
rows are whole sectors, the way through shared memory costs more than it saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from fusewright.schedule.contraction import Contraction

# Features whose rows a team has in shared memory at a time.
FEATURES = 8
# A team's positions of a row, below which whole sectors are too few to gain by it.
SHORTEST = 32
# Banks of shared memory; bytes of a sector of memory.
BANKS, SECTOR = 32, 32
# How much longer rows take whose length is no number of sectors, written as lanes have them.
PARTED = 4.0


@dataclass(frozen=True)
class Team:
    """Warps that have positions of a row of the output side by side.

    positions   of the row that they have
    warps       that they are
    banks       of shared memory from feature to feature, so that lanes of a warp do not meet in one
    """

    positions: int
    warps: int
    banks: int


@dataclass(frozen=True)
class OutputRows:
    """Of one block.

    positions   of an output row that a team has
    pitch       numbers from feature to feature in shared memory
    warps       of a team
    teams       of the block
    """

    positions: int
    pitch: int
    warps: int
    teams: int

    @property
    def elements(self) -> int:
        """Numbers in shared memory."""
        return self.teams * FEATURES * self.pitch

    @property
    def bytes(self) -> int:
        """The same in bytes: they are of the compute type, float."""
        return 4 * self.elements


class Cut(Protocol):
    """What has to be known of a tile.

    by_rows       whether rows are written by way of shared memory
    warps         of a block
    team          those that share a row
    pools_side_by_side   whether lanes have cells that are pooled in the same places as positions
    """

    @property
    def by_rows(self) -> bool: ...
    @property
    def warps(self) -> int: ...
    @property
    def team(self) -> Team: ...
    @property
    def pools_side_by_side(self) -> bool: ...


class _Tile(Cut, Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=_Tile)


def output_rows(t: Cut) -> OutputRows | None:
    """How rows are written, `None` where values go straight to memory, or elsewhere."""
    if not t.by_rows:
        return None
    pitch = t.team.positions + (t.team.banks - t.team.positions) % BANKS
    return OutputRows(t.team.positions, pitch, t.team.warps, t.warps // t.team.warps)


def rows_bytes(t: Cut) -> int:
    """Bytes of shared memory that rows take until they are written."""
    rows = output_rows(t)
    return 0 if rows is None else rows.bytes


def _written(c: Contraction) -> bool:
    """Whether values of all positions or cells are written, a feature's side by side."""
    return c.fold is None and not c.channels_last


def _whole(c: Contraction, row: int) -> bool:
    """Whether rows of so many cells are sectors."""
    positions = row * (c.axes[2].stride if c.window is None else 1)
    return positions * c.root.dtype.itemsize % SECTOR == 0


def as_written(c: Contraction, t: T, row: int) -> T:
    """The tile with the better way to write rows of so many cells."""
    w = c.axes[2]
    plain = w.stride == 1 and w.start == 0 and all(p.elements == (0,) for p in w.phases)
    one_by_one = plain if c.window is None else t.pools_side_by_side
    pays = _written(c) and one_by_one and not _whole(c, row) and c.root.dtype.itemsize <= 4
    return replace(t, by_rows=True) if pays and t.team.positions >= SHORTEST else t


def parted(c: Contraction, t: Cut, row: int) -> float:
    """How many times the time of whole sectors it takes to write rows of so many cells."""
    return PARTED if _written(c) and not _whole(c, row) and not t.by_rows else 1.0
