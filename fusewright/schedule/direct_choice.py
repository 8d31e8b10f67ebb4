"""Which direct tiles are worth measuring, by an estimate of the busiest unit per value; nothing here knows a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, prod

from fusewright.schedule import residues
from fusewright.schedule.axes import Axis
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.direct import (
    Box,
    Cut,
    DirectTile,
    Own,
    Weights,
    folded_early,
    make_box,
    period_of,
    side,
    undivided,
    weights_of,
    with_windows,
)
from fusewright.schedule.tiling import MULTIPROCESSORS

# Values that a thread accumulates at most, and numbers it holds beside them: weights and a run of the input.
MOST_VALUES, MOST_HELD = 64, 112
# Bytes of shared memory that a block may take, and its threads.
MOST_SHARED, FEWEST_THREADS, MOST_THREADS = 110 * 1024, 32, 512
# Teams of a block, and how many numbers of them are tried per number of features.
MOST_TEAMS, TEAMS = 10, 3

# Groups that are staged at a time, where it is more than one.
AT_ONCE = (2, 4, 8)

# A dimension is shared out evenly among so many blocks, too, if each then has no more than so many threads along it.
PARTS, LONGEST = (1, 2, 3, 4), 128

# Positions of a thread along d or h that are many; a multiprocessor's blocks that are few.
MANY, FEW_BLOCKS = range(6, 14), 4
# Positions of a window that a thread folds itself.
MOST_TOGETHER = 6

# So many tiles are worth measuring, so many of the same values per thread, and none that takes so many times the best.
WORTH_MEASURING, ALIKE, BEHIND = 8, 3, 1.5

# Estimates for an H200: cycles from a copy to its use, at a barrier, that a warp's copy takes in shared memory; the
# share of the issue slots that kernels reach; bytes per cycle of one multiprocessor from the level-2 cache.
LATENCY, BARRIER, COPIED, ISSUED, FETCHED = 1000.0, 100.0, 2.0, 0.7, 30.0
# Instructions per value behind the products, fewer where a thread folds some of them itself, per copy to shared memory,
# and per number that is read again for a window, but for the first one of each value; per value that a running result
# in registers takes in, of which PER_VALUE are left to others once per tile.
PER_VALUE, PER_OWNED, PER_COPY, PER_READ, PER_FOLDED = 14.0, 10.0, 4.0, 2.0, 5.0
# Tensor cores take about as many times what `tiling.estimate` says; how much slower than they an estimate may be here.
UNDERESTIMATED, SLOWER = 2.0, 2.0


@dataclass(frozen=True)
class Shortlist:
    """Tiles worth measuring, best estimate first, and whether that (`best`) is ahead of what tensor cores can do."""

    tiles: tuple[DirectTile, ...]
    ahead: bool
    best: float


def shortlist(c: Contraction, lengths: tuple[int, int, int], samples: int, rival: float | None) -> Shortlist:
    """The tiles that may be as fast as tensor cores, few of them alike in what a thread holds; `lengths` are the cells
    of the whole output along d, h, w, `rival` is the best estimate of a tiling, in the same unit."""
    c = with_windows(c)
    theirs = inf if rival is None else UNDERESTIMATED * rival
    most = SLOWER * theirs
    scored = _scored(c, lengths, samples, most, BEHIND) if _multiplying(c) <= most else []
    found: list[DirectTile] = []
    alike: dict[tuple[int, ...], int] = {}
    for _, t in scored:
        key = (t.features, *t.own)
        alike[key] = alike.get(key, 0) + 1
        if alike[key] <= ALIKE:
            found.append(t)
        if len(found) == WORTH_MEASURING:
            break
    best = scored[0][0] if found else inf
    return Shortlist(tuple(found), bool(found) and best <= theirs, best)


def _multiplying(c: Contraction) -> float:
    """Cycles of one multiprocessor per cell and feature in which nothing but the products is issued: no tile takes
    fewer."""
    products = float(c.channels)
    for a in c.axes:
        of_cell = sum(len(p.elements) * len(p.taps) for p in a.phases) / sum(len(p.elements) for p in a.phases)
        products *= of_cell * min(a.cell, a.stride)  # where windows overlap, positions are computed once
    return products / 128 / ISSUED


def candidates(c: Contraction, lengths: tuple[int, int, int], samples: int) -> list[DirectTile]:
    """Tiles that fit, best estimate first; `lengths` are the cells of the whole output along d, h, w."""
    return [t for _, t in _scored(with_windows(c), lengths, samples)]


def _scored(
    c: Contraction, lengths: tuple[int, int, int], samples: int, most: float = inf, behind: float = inf
) -> list[tuple[float, DirectTile]]:
    """The same with their estimates, of those that take no more than `most` cycles per useful value, nor `behind` times
    what one before them does."""
    if c.box is not None or c.shares is not None or (c.elements and c.fold is not None):
        return []
    found = []
    for own in _owns(c, lengths):
        cells = [cells_along(a, n, k) for a, n, k in zip(c.axes, lengths, own, strict=True)]
        boxes = [make_box(c.axes, (d, h, w), own, c.x.dtype.itemsize) for d, h, w in product(*cells)]
        tiles = [
            (b, residues.tiles(b.walks, lengths, b.cells))
            for b in boxes
            if b.unit_threads <= MOST_THREADS and b.plane * c.x.dtype.itemsize <= MOST_SHARED
        ]
        for features, teams, together in _shapes(c, own):
            weights, work = weights_of(c, features, teams, own, together=together), None
            for b, of_sample in tiles:
                if not FEWEST_THREADS <= b.unit_threads * teams <= MOST_THREADS:
                    continue
                blocks = of_sample * ceil(c.features / (features * teams))
                if work and _least(c, b, weights, features * prod(own), work, lengths, samples, blocks) > most:
                    continue
                for chunk in _chunks(c, whole=features * teams >= c.features):
                    cut = Cut(c, DirectTile(features, teams, *own, *b.cells, chunk, together, 2), b, weights)
                    work = work or _work(cut)
                    fit = [each for each in _buffered(cut) if each.shared <= MOST_SHARED and each.per_sm >= 1]
                    if cut.at_once > 1 and not cut.weights_stay:
                        break
                    if cut.held > MOST_HELD or not fit:
                        break  # nor does a larger chunk fit
                    for each in fit:
                        if (score := _score(each, work, lengths, samples, of_sample)) <= most:
                            found.append((score, each.t))
                            most = min(most, behind * score)
    return sorted(found, key=lambda pair: pair[0])


def _owns(c: Contraction, lengths: tuple[int, int, int]) -> list[Own]:
    """What a thread has along d, h, w: rows along d or h, or those of a window; many rows are short."""
    window = tuple(a.cell for a in c.axes[:2])
    counts = [_counts(c, i, lengths[i]) for i in (0, 1)]
    return [
        (planes, rows, run)
        for planes, rows, run in product(*counts, _runs(c))
        if (1 in (planes, rows) or (planes, rows) == window) and (max(planes, rows) <= 4 or run <= 2)
    ]


def _counts(c: Contraction, i: int, length: int) -> list[int]:
    """Positions of a thread along d or h: a few, those of a window, or many that are of use to each other's input."""
    axis = c.axes[i]
    if length * axis.cell == 1 or (i == 0 and axis.taps == 1 and c.window is None):
        return [1]
    found = {1, 2, 4, axis.cell if c.window is not None and axis.cell <= 4 else 1, *_whole(axis)}
    if axis.taps > 4 and (positions := side(axis, length, 1).units) >= MANY[0]:
        found.add(min(MANY, key=lambda n: (ceil(positions / n) * n, -n)))
    return sorted(found)


def _buffered(cut: Cut) -> list[Cut]:
    """The same with a buffer less, too, where that lets more blocks share a multiprocessor: they stage by turns."""
    if cut.per_sm >= FEW_BLOCKS:
        return [cut]
    single = replace(cut, t=replace(cut.t, buffers=1))
    return [cut, single] if max(1, cut.per_sm) < single.per_sm else [cut]


def _runs(c: Contraction) -> list[int]:
    """Runs whose reads by neighbouring lanes spread over the banks."""
    step = c.axes[2].phases[0].per_element * c.x.dtype.itemsize
    counts = sorted({1, 2, 3, 4, 6, 8, 12, *_whole(c.axes[2])})
    return [n for n in counts if n * step % 32 == 16 or n * step % 16] or [1]


def _whole(axis: Axis) -> list[int]:
    """Positions of which windows have all or none, so that a thread folds them itself."""
    together = undivided(axis)
    return [together] if together <= MOST_TOGETHER else []


def _shapes(c: Contraction, own: Own) -> list[tuple[int, int, bool]]:
    """Features of a thread, teams, and whether a plane's weights are at hand together."""
    most = MOST_VALUES // (prod(own) * prod(len(a.phases) for a in c.axes))
    both = (False, True) if own[1] > 1 and c.axes[1].taps > 1 else (own[0] > 1 and c.axes[0].taps > 1,)

    def computed(features: int, teams: int) -> int:
        return ceil(c.features / (features * teams)) * features * teams

    found = []
    for features in (1, 2, 3, 4, 5, 6, 8, 16):
        teams = [n for n in range(1, MOST_TEAMS + 1) if computed(features, n) * 4 <= 5 * c.features + 3]
        if features <= most:
            # The fewest features in vain, and of those the largest blocks.
            teams.sort(key=lambda n: (computed(features, n), -n))
            found += [(features, n, together) for n in teams[:TEAMS] for together in both]
    return found


def cells_along(axis: Axis, length: int, per_unit: int) -> list[int]:
    """Cells along one dimension that are worth a try: those that whole threads compute, and a few windows."""
    period, together = period_of(axis), axis.together
    found = {1, 2, 3, 4, 6} if axis.cell != period else set()
    even = {side(axis, ceil(length / parts), per_unit).units for parts in PARTS}
    several = (1, 2, 4, 8, 16, 32, 64, 128) if axis.cell == period else (8, 16, 28, 32, 64)
    for units in {*several, *(n for n in even if n <= LONGEST)}:
        positions = units * per_unit * period
        if positions >= axis.cell:
            found.add((positions - axis.cell) // axis.stride + 1)
    found = {max(1, n // together) * together for n in found}
    return [n for n in sorted(found) if n == min(found) or n <= 1.25 * length]


def _chunks(c: Contraction, *, whole: bool) -> list[int]:
    """Channels that are staged at a time: of several groups where a block goes through these, has `whole` ones at once,
    and nothing but registers takes their values on."""
    found = [n for n in (1, 2, 4, 8) if n < c.channels] + ([c.channels] if c.channels <= 24 else [])
    several = whole and folded_early(c) and c.channels in found
    return found + [n * c.channels for n in AT_ONCE if several and n <= c.op.groups]


def _alone(values: int) -> float:
    """Cycles per instruction of a warp on its own: products of several values wait for each other least."""
    return 2 + 3 * min(1, 4 / values)


Work = tuple[int, int, int]


def _work(cut: Cut) -> Work:
    """Per thread and channel: multiplications, reads of weights, and reads of the input."""
    b, weights, runs = cut.box, 0, 0
    w = b.sides[2]
    for phases in b.phases:
        if not all(p.taps for p in phases):
            continue
        rows = 1
        for i in (0, 1):
            own, taps, element = cut.t.own[i], len(phases[i].taps), b.sides[i].per_element
            leads = {n * element + u * phases[i].per_tap for n in range(own) for u in range(taps)}
            rows *= len(leads) if cut.weights.together[i] else own * taps
        runs += rows * ceil((w.first(phases[2]) % b.vector + w.reach(phases[2])) / b.vector)
        weights += cut.weights.reads
    return cut.t.features * prod(cut.t.own) * cut.taps, weights, runs


@dataclass(frozen=True)
class _Load:
    """What a block asks of its multiprocessor: instructions of a thread, and cycles of the issue slots and of the
    busiest of its units."""

    instructions: float
    issue: float
    busiest: float

    @staticmethod
    def of(b: Box, weights: Weights, work: Work, channels: int, behind: float, bytes_each: int, beside: float) -> _Load:
        """Of so many channels, instructions of a thread `behind` its products, and bytes read `beside` the input."""
        multiplications, reads, runs = work
        warps, staged = b.unit_threads * weights.teams / 32, channels * b.plane
        instructions = (multiplications + reads + runs) * channels + behind + PER_COPY * staged / (32 * warps)
        shared = (reads * ceil(weights.vector / 2) + runs * b.turns) * channels * warps + COPIED * staged / 32
        issue = instructions * warps / 4 / ISSUED
        return _Load(instructions, issue, max(issue, shared, (staged * bytes_each + beside) / FETCHED))

    def cycles(self, tiles: int, alone: float = 0.0) -> float:
        """Of the fullest multiprocessor, where so many tiles are shared out; of rounds that take `alone`."""
        return max(ceil(tiles / MULTIPROCESSORS) * self.busiest, alone) + 0.1 * tiles / MULTIPROCESSORS * self.issue


def per_useful(cycles: float, c: Contraction, lengths: tuple[int, int, int], samples: int) -> float:
    """Cycles of one multiprocessor per cell and feature, of cycles that all of them take."""
    return cycles * MULTIPROCESSORS / (samples * prod(lengths) * c.features * c.op.groups)


def _least(
    c: Contraction,
    b: Box,
    weights: Weights,
    positions: int,
    work: Work,
    lengths: tuple[int, int, int],
    samples: int,
    blocks: int,
) -> float:
    """What no tile of this box and these weights takes less than, whatever its chunk: the busiest unit's cycles, where
    a sample has so many blocks, whose threads have so many `positions` of their features."""
    values = positions * prod(len(a.phases) for a in c.axes)
    behind = (PER_FOLDED if folded_early(c) else min(PER_VALUE, PER_OWNED)) * values
    load = _Load.of(b, weights, work, c.channels, behind, c.x.dtype.itemsize, 0)
    return per_useful(load.cycles(samples * blocks * c.op.groups), c, lengths, samples)


def _behind(cut: Cut) -> float:
    """Instructions of a thread behind the products of a round."""
    if folded_early(cut.c):
        return (PER_FOLDED + PER_VALUE / (cut.t.features * cut.passes)) * cut.values
    windows = PER_READ * max(0, cut.read_again / cut.threads - cut.values)
    return (PER_VALUE if cut.owned == (1, 1, 1) else PER_OWNED) * cut.values + windows


def _score(cut: Cut, work: Work, lengths: tuple[int, int, int], samples: int, of_sample: int) -> float:
    """Estimated cycles of one multiprocessor per useful value; a sample has so many tiles per block of features."""
    c, t, b = cut.c, cut.t, cut.box
    channels = cut.chunks * cut.part
    beside = sum(n.dtype.itemsize for n in c.elements) * cut.block_m * prod(b.positions)
    load = _Load.of(b, cut.weights, work, channels, _behind(cut), c.x.dtype.itemsize, beside)
    stages, works = LATENCY * cut.chunks, _alone(cut.values) * load.instructions * cut.at_once
    alone = (max(stages, works) if t.buffers == 2 else stages + works) + BARRIER * cut.chunks
    # Of all tiles, the fullest multiprocessor's; and rounds in which all that fit run side by side, where a block goes
    # through the features of a tile in turn.
    tiles = samples * of_sample * c.op.groups * cut.o_blocks
    in_turn = ceil(tiles / cut.passes / (MULTIPROCESSORS * cut.per_sm)) * ceil(cut.passes / cut.at_once)
    cycles = load.cycles(tiles, in_turn * alone)
    return per_useful(cycles, c, lengths, samples)
