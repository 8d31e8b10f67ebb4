"""How a group that pools is cut where its channels are few, but their taps are enough for tensor cores to multiply.

As in `direct`, a block stages the input of a box of positions, of all channels, and leaves what it computes in shared
memory, from where windows are folded, wherever they begin.  But warps multiply: sixteen units by eight features, in
steps of eight channels and taps.  A unit has the positions that windows have all or none of, which a lane folds as they
come.  Lanes read the input number by number, so that taps may lie anywhere, and keep the weights in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, inf, prod

import torch

from fusewright.schedule import residues
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.direct import Cut, DirectTile, make_box, undivided, weights_of, with_windows
from fusewright.schedule.direct_choice import (
    BARRIER,
    COPIED,
    FETCHED,
    ISSUED,
    LATENCY,
    MOST_SHARED,
    PER_COPY,
    PER_READ,
    UNDERESTIMATED,
    cells_along,
    per_useful,
)
from fusewright.schedule.tiling import MULTIPLIED, MULTIPROCESSORS

# Units of an instruction, features and taps of one; steps whose weights a lane keeps, and numbers of those.
UNITS, EIGHT = 16, 8
STEPS, MOST_WEIGHTS = 8, 64
# Features of a warp in eights, and of a block's teams; warps of a team.
EIGHTS, TEAMS, WARPS = (1, 2, 3, 4, 5), (1, 2, 3, 4), (2, 4, 8)
# So many tiles are worth measuring, so many of the same features and warps.
WORTH_MEASURING, ALIKE = 6, 2

# Instructions: of an operand that a lane reads, of a value behind the products, of one that is left in shared memory,
# of a cell and feature, and ahead of a warp's units.  Turns of shared memory that lanes of an operand's read take.
PER_OPERAND, PER_VALUE, PER_LEFT, PER_CELL, PER_UNITS = 2.5, 3.0, 2.0, 10.0, 40.0
TURNS = 1.5


@dataclass(frozen=True)
class TapTile(DirectTile):
    """See the module's text: a unit has `planes` x `rows` x `run` positions, a warp of a team so many `features`."""

    warps: int


@dataclass(frozen=True)
class TapCut(Cut):
    """A group and how it is cut; a team is its warps, whatever units there are."""

    t: TapTile

    @staticmethod
    def of(c: Contraction, t: DirectTile) -> TapCut:
        assert isinstance(t, TapTile)
        box = replace(make_box(c.axes, t.cells, t.own, c.x.dtype.itemsize), unit_threads=32 * t.warps)
        return TapCut(c, t, box, weights_of(c, t.features, t.teams, t.own, together=False))

    def steps(self, phases: tuple[Phase, ...]) -> int:
        """Of the tensor cores, through all channels and taps of a phase."""
        return ceil(self.c.channels * prod(len(p.taps) for p in phases) / EIGHT)

    @cached_property
    def team_weights(self) -> int:
        """Numbers of all phases' weights in shared memory, as lanes take them."""
        return sum(map(self.steps, self.box.phases)) * EIGHT * self.t.features

    @property
    def _all_weights(self) -> int:
        return self.passes * self.t.teams * self.team_weights

    @cached_property
    def kept_weights(self) -> int:
        """Of a lane in registers, at most."""
        return max(map(self.steps, self.box.phases)) * self.t.features // EIGHT * 2

    @property
    def values(self) -> int:
        """A lane's products, and what they are folded into."""
        return self.t.features

    @cached_property
    def held(self) -> int:
        of_positions = 3 * self.t.features if self.c.over_positions and not self.c.over_channels else 0
        places = 6 * max(map(self.steps, self.box.phases)) + 16  # of what is read, and of units
        return self.kept_weights + places + of_positions


def takes(c: Contraction, *, tf32: bool) -> bool:
    """Whether such tiles may have a group."""
    rounded = c.x.dtype.itemsize == 2 or (c.x.dtype == torch.float32 and tf32)
    plain = c.window is not None and c.box is None and c.shares is None and not c.channels_last
    taps = prod(max(len(p.taps) for p in a.phases) for a in c.axes)
    return plain and rounded and c.channels * taps <= STEPS * EIGHT


def shortlist(
    c: Contraction, lengths: tuple[int, int, int], samples: int, rival: float, *, tf32: bool
) -> tuple[float, list[TapTile]]:
    """The best estimate and the best tiles, few of them alike; none that takes much longer than `rival`, in the unit of
    `direct_choice`'s estimates."""
    found: list[TapTile] = []
    alike: dict[tuple[int, ...], int] = {}
    scored = _scored(with_windows(c), lengths, samples, tf32)
    for score, t in scored:
        key = t.features, t.teams, t.warps
        alike[key] = alike.get(key, 0) + 1
        if alike[key] <= ALIKE and score <= UNDERESTIMATED * rival and len(found) < WORTH_MEASURING:
            found.append(t)
    return (scored[0][0] if found else inf), found


def candidates(c: Contraction, lengths: tuple[int, int, int], samples: int, *, tf32: bool) -> list[TapTile]:
    """Tiles that fit, best estimate first."""
    return [t for _, t in _scored(with_windows(c), lengths, samples, tf32)]


def _scored(c: Contraction, lengths: tuple[int, int, int], samples: int, tf32: bool) -> list[tuple[float, TapTile]]:
    if not takes(c, tf32=tf32):
        return []
    d, h, w = map(undivided, c.axes)
    own, found = (d, h, w), []
    along = [cells_along(a, n, k) for a, n, k in zip(c.axes, lengths, own, strict=True)]
    for cells in product(*along):
        box = make_box(c.axes, (cells[0], cells[1], cells[2]), own, c.x.dtype.itemsize)
        units = prod(s.units for s in box.sides)
        if units < UNITS or c.channels * box.plane * c.x.dtype.itemsize > MOST_SHARED:
            continue
        for (features, teams), warps, buffers in product(_features(c), WARPS, (1, 2)):
            if (warps - 1) * UNITS >= units or warps * teams > 16:
                continue
            t = TapTile(features, teams, *own, *box.cells, c.channels, False, buffers, warps)
            cut = TapCut.of(c, t)
            fits = cut.shared <= MOST_SHARED and cut.weights_stay and cut.per_sm >= 1
            if fits and cut.kept_weights <= MOST_WEIGHTS:
                found.append((_score(cut, lengths, samples), t))
    return sorted(found, key=lambda pair: pair[0])


def _features(c: Contraction) -> list[tuple[int, int]]:
    """Features of a warp and teams of a block: few in vain, and no fewer of a warp than there are."""

    def computed(eights: int, teams: int) -> int:
        return ceil(c.features / (EIGHT * eights * teams)) * EIGHT * eights * teams

    least = min(computed(eights, teams) for eights, teams in product(EIGHTS, TEAMS))
    return [(EIGHT * n, k) for n, k in product(EIGHTS, TEAMS) if computed(n, k) <= 1.2 * least]


def _score(cut: TapCut, lengths: tuple[int, int, int], samples: int) -> float:
    """Estimated cycles of one multiprocessor per useful value."""
    c, t, b = cut.c, cut.t, cut.box
    eights, elements = t.features // EIGHT, prod(t.own)
    sixteens = ceil(prod(s.units for s in b.sides) / UNITS)
    operands = products = issued = 0.0
    for phases in b.phases:
        steps = cut.steps(phases)
        operands += sixteens * elements * steps * 4
        products += sixteens * elements * steps * eights
        issued += (
            sixteens * (PER_UNITS + 4 * eights * (elements * PER_VALUE + PER_LEFT)) + 2 * cut.kept_weights * t.warps
        )
    issued = t.teams * (issued + PER_OPERAND * operands + products)
    left = t.teams * sixteens * 4 * eights * len(b.phases)
    staged = c.channels * b.plane
    read, cells = cut.read_again / 32, prod(t.cells) * cut.block_m / 32
    issued += PER_READ * read + PER_CELL * cells + PER_COPY * staged / 32
    shared = t.teams * operands * TURNS + 2 * left + read + COPIED * staged / 32
    fetched = staged * c.x.dtype.itemsize / FETCHED
    issue = issued / 4 / ISSUED
    busiest = max(issue, shared, t.teams * products / MULTIPLIED, fetched)
    alone = 2.5 * issued / (t.warps * t.teams)
    alone = (max(LATENCY, alone) if t.buffers == 2 else LATENCY + alone) + BARRIER * (2 + len(cut.window_passes))
    tiles = samples * residues.tiles(b.walks, lengths, b.cells) * c.op.groups * cut.o_blocks
    rounds = ceil(tiles / (MULTIPROCESSORS * cut.per_sm)) * alone
    cycles = max(ceil(tiles / MULTIPROCESSORS) * busiest, rounds) + 0.1 * tiles / MULTIPROCESSORS * issue
    return per_useful(cycles, c, lengths, samples)
