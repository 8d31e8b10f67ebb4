"""Which direct tiles are worth measuring, by an estimate of the busiest unit per value; nothing here knows a model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil, gcd, inf, prod

from fusewright.schedule import residues
from fusewright.schedule.axes import Axis
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.direct import Cut, DirectTile, make_box, side
from fusewright.schedule.tiling import MULTIPROCESSORS

# Values that a thread accumulates at most, and numbers it holds beside them: weights and a run of the input.
MOST_VALUES, MOST_HELD = 64, 112
# Bytes of shared memory that a block may take, and its threads.
MOST_SHARED, FEWEST_THREADS, MOST_THREADS = 110 * 1024, 32, 512
# Teams of a block, and how many numbers of them are tried per number of features.
MOST_TEAMS, TEAMS = 10, 3

# A dimension is shared out evenly among so many blocks, too, if each then has no more than so many threads along it.
PARTS, LONGEST = (1, 2, 3, 4), 128

# So many tiles are worth measuring, and so many of the same values per thread.
WORTH_MEASURING, ALIKE = 8, 3

# Estimates for an H200: cycles from a copy to its use, at a barrier, per instruction of a warp on its own; the share of
# the issue slots that kernels reach; bytes per cycle of one multiprocessor from the level-2 cache.
LATENCY, BARRIER, ALONE, ISSUED, FETCHED = 1000.0, 100.0, 5.0, 0.7, 30.0
# Instructions per value behind the products, fewer where a thread folds windows itself, and per copy to shared memory.
PER_VALUE, PER_OWNED, PER_COPY = 14.0, 10.0, 4.0
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
    theirs = inf if rival is None else UNDERESTIMATED * rival
    most = SLOWER * theirs
    scored = _scored(c, lengths, samples, most) if _multiplying(c) <= most else []
    found: list[DirectTile] = []
    alike: dict[tuple[int, ...], int] = {}
    for _, t in scored:
        key = (t.features, t.rows, t.run)
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
        of_cell = sum(len(p.elements) * len(p.taps) for p in a.phases)
        products *= of_cell * min(a.cell, a.stride) / a.cell  # where windows overlap, positions are computed once
    return products / 128 / ISSUED


def candidates(c: Contraction, lengths: tuple[int, int, int], samples: int) -> list[DirectTile]:
    """Tiles that fit, best estimate first; `lengths` are the cells of the whole output along d, h, w."""
    return [t for _, t in _scored(c, lengths, samples)]


def _scored(
    c: Contraction, lengths: tuple[int, int, int], samples: int, most: float = inf
) -> list[tuple[float, DirectTile]]:
    """The same with their estimates, of those that take no more than `most` cycles per useful value."""
    if c.box is not None or c.shares is not None:
        return []
    found = []
    for rows, run in product(_rows(c, lengths[1]), _runs(c)):
        cells = [_cells(a, n, k) for a, n, k in zip(c.axes, lengths, (1, rows, run), strict=True)]
        boxes = [make_box(c.axes, (d, h, w), rows, run, c.x.dtype.itemsize) for d, h, w in product(*cells)]
        tiles = [
            (b, residues.tiles(b.walks, lengths, b.cells))
            for b in boxes
            if b.unit_threads <= MOST_THREADS and b.plane * c.x.dtype.itemsize <= MOST_SHARED // 2
        ]
        for features, teams, together in _shapes(c, rows, run):
            work = None
            for b, of_sample in tiles:
                if not FEWEST_THREADS <= b.unit_threads * teams <= MOST_THREADS:
                    continue
                for chunk in _chunks(c):
                    t = DirectTile(features, teams, rows, run, *b.cells, chunk, together)
                    cut = Cut(c, t, b)
                    work = work or _work(cut)
                    products = work[0] * c.channels * cut.threads / 128 / ISSUED
                    if of_sample * cut.o_blocks * products > most * prod(lengths) * c.features:
                        break  # its products alone take longer, whatever the chunk
                    if cut.held > MOST_HELD or cut.shared > MOST_SHARED:
                        break  # nor does a larger chunk fit
                    if cut.per_sm >= 1 and (score := _score(cut, work, lengths, samples, of_sample)) <= most:
                        found.append((score, t))
    return sorted(found, key=lambda pair: pair[0])


def _rows(c: Contraction, length: int) -> list[int]:
    """Rows of a thread: a few, or those of a window."""
    window = c.axes[1].cell if c.window is not None and c.axes[1].cell <= 4 else 1
    return [1] if length * c.axes[1].cell == 1 else sorted({1, 2, 4, window})


def _runs(c: Contraction) -> list[int]:
    """Runs whose reads by neighbouring lanes spread over the banks."""
    step = c.axes[2].phases[0].per_element * c.x.dtype.itemsize
    return [n for n in (1, 2, 3, 4, 6, 8, 12) if n * step % 32 == 16 or n * step % 16] or [1]


def _shapes(c: Contraction, rows: int, run: int) -> list[tuple[int, int, bool]]:
    """Features of a thread, teams, and whether a plane's weights are at hand together."""
    most = MOST_VALUES // (rows * run * prod(len(a.phases) for a in c.axes))
    both = (False, True) if rows > 1 and c.axes[1].taps > 1 else (False,)

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


def _cells(axis: Axis, length: int, per_unit: int) -> list[int]:
    """Cells along one dimension that are worth a try: those that whole threads compute, and a few windows."""
    period = axis.stride * axis.phases[0].per_element // axis.advance
    found = {1, 2, 3, 4, 6} if axis.cell != period else set()
    even = {side(axis, ceil(length / parts), per_unit).units for parts in PARTS}
    several = (1, 2, 4, 8, 16, 32, 64, 128) if axis.cell == period else (8, 16, 28, 32, 64)
    for units in {*several, *(n for n in even if n <= LONGEST)}:
        positions = units * per_unit * period
        if positions >= axis.cell:
            found.add((positions - axis.cell) // axis.stride + 1)
    return [n for n in sorted(found) if n == min(found) or n <= 1.25 * length]


def _chunks(c: Contraction) -> list[int]:
    return [n for n in (1, 2, 4, 8) if n < c.channels] + ([c.channels] if c.channels <= 24 else [])


Work = tuple[float, float, float]


def _work(cut: Cut) -> Work:
    """Per thread and channel: multiplications, weights that are read, and reads of the input."""
    t, b = cut.t, cut.box
    h, w = b.sides[1:]
    weights = t.features * cut.taps
    runs = 0.0
    for phases in b.phases:
        of_d, of_h, of_w = (len(p.taps) for p in phases)
        if of_d * of_h * of_w == 0:
            continue
        rows = t.rows * of_h
        if t.together:
            rows = len({r * h.per_element + u * phases[1].per_tap for r in range(t.rows) for u in range(of_h)})
        runs += of_d * rows * ceil((w.first(phases[2]) % b.vector + w.reach(phases[2])) / b.vector)
    return t.features * t.rows * t.run * cut.taps, weights, runs


def _score(cut: Cut, work: Work, lengths: tuple[int, int, int], samples: int, of_sample: int) -> float:
    """Estimated cycles of one multiprocessor per useful value; a sample has so many tiles per block of features."""
    c, t, b = cut.c, cut.t, cut.box
    multiplications, weights, runs = work
    warps, channels = cut.threads / 32, cut.chunks * t.chunk
    staged = channels * b.plane
    reads = weights / gcd(t.features, 16 // cut.compute_bytes) + runs
    behind = (PER_VALUE if cut.owned == (1, 1, 1) else PER_OWNED) * cut.values
    instructions = (multiplications + reads) * channels + behind + PER_COPY * staged / (32 * warps)
    issue = instructions * warps / 4 / ISSUED
    shared = (weights / 2 + runs * b.turns) * channels * warps
    busiest = max(issue, shared, staged * c.x.dtype.itemsize / FETCHED)
    alone = max(LATENCY * cut.chunks, ALONE * instructions) + BARRIER * cut.chunks
    # Of all tiles, the fullest multiprocessor's; and rounds in which all that fit run side by side.
    tiles = samples * of_sample * c.op.groups * cut.o_blocks
    cycles = max(ceil(tiles / MULTIPROCESSORS) * busiest, ceil(tiles / (MULTIPROCESSORS * cut.per_sm)) * alone)
    useful = samples * prod(lengths) * c.features * c.op.groups
    return (cycles + 0.1 * tiles / MULTIPROCESSORS * issue) * MULTIPROCESSORS / useful
