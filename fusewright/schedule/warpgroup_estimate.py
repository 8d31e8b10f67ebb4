"""What a tile of the tensor cores of Hopper costs: blocks that share a multiprocessor, their registers, their cycles.

The estimate follows the idea of `tiling`: the busiest unit of a multiprocessor per useful result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, inf, prod

from fusewright.schedule.axes import Phase
from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.output_rows import SECTOR, SECTORS_OF_PART, as_written, ends_of_rows, parted
from fusewright.schedule.residues import useful
from fusewright.schedule.tiling import MOST_SHARED, REGISTERS, WRITTEN, bytes_beside, fitting, written_bytes
from fusewright.schedule.warpgroup_pairs import multiplied_vectors
from fusewright.schedule.warpgroup_staging import (
    MOST_INDICES,
    TEAM,
    WATCHING,
    Staged,
    Tile,
    WarpgroupCut,
    couples,
    inputs,
    passes,
    run,
    shared_bytes,
    slice_vectors,
    staged,
    staged_by_thread,
    stages_every_step,
    takes_turns,
    taps_of,
    unfoldings,
    vector,
    vector_bytes,
    vectors_by_thread,
    weight_vectors,
)

# Blocks that share a multiprocessor, and that the estimate knows of.
MOST_BLOCKS, FITTED_BLOCKS = 8, 4
# Registers of a thread that the compiler finds where that makes room for a second block.
FOUND = 8
# The fewest registers that instructions of a warpgroup compile with: some do not with 32, of 112 columns not with 80;
# so many beside one for every two columns.
FEWEST, BESIDE_COLUMNS = 40, 26
# Registers of a producer beside the elements on their way, and more of them where its rows lie along two dimensions; of
# those who leave some to producers, beside their estimate; the most of any thread.
PRODUCER, DEEP, KEPT, MOST_OF_THREAD = 72, 32, 16, 240
# Of words of two columns, of which a row may begin with the second.
BETWEEN_WORDS = 8
# Of a run's place.
PLACE = 3
# What those whose rows wait in registers take beyond their estimate, where producers have it to leave.
HELD_BEYOND = 28
# What the compiler finds beyond the registers of a producer, or needs of those that all are compiled for.
BEYOND_GIVEN, BEYOND_COMPILED = 10, -6

Lengths = tuple[int, int, int]


# -- blocks and their registers


def blocks_per_sm(c: Contraction, t: WarpgroupCut, shared: int) -> int:
    """Blocks that share a multiprocessor, with so many bytes of shared memory each, as far as the estimate knows."""
    return min(FITTED_BLOCKS, _fitting(c, t, shared, t.registers(c)))


def blocks_planned(c: Contraction, t: WarpgroupCut, shared: int) -> int:
    """Blocks that share one as kernels are compiled: with registers for vectors that make runs whole, and none alone
    for the sake of a few."""
    each = 8 if staged(c, t).words else 4  # registers of a vector, or of words of as many channels
    more = 0 if t.producers else each * run(c, t) * staged_by_thread(c, t)[1] - 4 * vectors_by_thread(c, t)[1]
    registers = t.registers(c) + max(0, more)
    blocks = min(MOST_BLOCKS, _fitting(c, t, shared, registers))
    return max(1, blocks, min(2, _fitting(c, t, shared, registers - FOUND)))


def _fitting(c: Contraction, t: WarpgroupCut, shared: int, registers: int) -> int:
    """Blocks that fit, whose threads that multiply have so many registers, or as many as they compile with."""
    registers = max(FEWEST, ceil((t.products(c).columns // 2 + BESIDE_COLUMNS) / 8) * 8, registers)
    if not t.producers:
        return fitting(t.threads, shared, registers)
    wanted = t.warps * registers + t.producers * producer_registers(c, t)
    blocks = fitting(t.threads, shared, 8)
    return next((n for n in range(blocks, 0, -1) if wanted <= _compiled(t, n) * (t.warps + t.producers)), 0)


def _compiled(t: WarpgroupCut, blocks: int) -> int:
    """Registers of every thread that so many blocks leave room for, as hardware deals them out."""
    return REGISTERS // (t.threads * blocks) // 8 * 8


def producer_registers(c: Contraction, t: WarpgroupCut) -> int:
    """Of a producer."""
    (d, h, _), at_once = staged(c, t).lengths, staged_by_thread(c, t)[1]
    whole = c.channels_last and c.channels_of_x % vector(c) == 0  # else every element has its own, until they are one
    on_their_way = (vector_bytes(c) // 4 if whole else vector(c)) * run(c, t) * at_once
    if c.halves:
        on_their_way += WATCHING
    if staged(c, t).words is not None:
        on_their_way += BETWEEN_WORDS
    if t.chunk == vector(c):  # twice as many runs as of two vectors, of which each lies elsewhere
        on_their_way += PLACE * at_once // 2
    return ceil((PRODUCER + (DEEP if d > 1 and h > 1 else 0) + on_their_way) / 8) * 8


def keeps_places(c: Contraction, t: WarpgroupCut, per_sm: int) -> bool:
    """Whether a producer has registers for where all of its runs lie, from step to step, or finds out again where those
    are that it has no elements of on their way.

    Fitted to what spills.
    """
    each, at_once = staged_by_thread(c, t)
    given = handed_over(c, t, per_sm)
    room = _compiled(t, per_sm) + BEYOND_COMPILED if given is None else given[0] + BEYOND_GIVEN
    return producer_registers(c, t) + PLACE * (each - at_once) <= room


def handed_over(c: Contraction, t: WarpgroupCut, per_sm: int) -> tuple[int, int] | None:
    """Registers of producers and of those that multiply, where some leave theirs to the others; `None` where all have
    as many as they are compiled for."""
    each, staging, multiplying = _compiled(t, per_sm), producer_registers(c, t), t.registers(c)
    multiplying += HELD_BEYOND if t.held else 0
    if not t.producers or max(staging, multiplying) <= each:
        return None
    pool = each * (t.warps + t.producers)
    if multiplying > each:
        staging = min(staging, each)
    else:
        spare = pool - t.producers * staging - t.warps * multiplying
        multiplying = min(each, multiplying + max(0, min(KEPT, spare // t.warps // 8 * 8)))
        staging = min(MOST_OF_THREAD, (pool - t.warps * multiplying) // t.producers // 8 * 8)
    multiplying = min(MOST_OF_THREAD, (pool - t.producers * staging) // t.warps // 8 * 8)
    return (staging, multiplying) if max(staging, multiplying) > each else None


# -- the estimate


# How many times the estimate of the best a tile may have at least, to be on a shortlist.
HOPELESS = 2.0


def scored(
    c: Contraction, tiles: Callable[[Contraction, Lengths], Iterable[Tile]], lengths: Lengths, hopeless: float = inf
) -> list[tuple[float, Tile]]:
    """Tiles that fit with their estimates, best first, each with and without warps that stage for the others; `lengths`
    are the cells of the whole output along d, h, w.

    Those of which products or memory alone take `hopeless` times the time of one before are left out.
    """
    found: list[tuple[float, Tile]] = []
    least = inf
    for name, group in unfoldings(c):
        for plain in as_written(c, tiles(group, lengths), lengths[2], lambda t: t.by_rows_of_phases(c)):
            for score, t in _scored(group, plain, lengths, hopeless * least):
                found.append((score, changed(t, unfolded=name) if name else t))
                least = min(least, score)
    return sorted(found, key=lambda pair: pair[0])


# Fitted to the kernels of benchmarks/results/h200_warpgroups.json and h200_warpgroups_ahead.json: cycles of a step, of
# a round of its staging and of a warp's part in that; of one accumulator's way through what follows; bytes per cycle
# that threads of one multiprocessor get from the level-2 cache.
STEP, ROUND, STAGED_BY_WARP, VALUE, STREAMED = 1200.0, 400.0, 12.4, 5.6, 14.0
# Of inputs that become halves, and of results, threads get more, and there an instruction takes some cycles beside its
# own, both fitted to benchmarks/results/h200_halves_of_tf32.json.  The same cycles would fit others better as well, but
# what these are compared with was fitted without.
STREAMED_HALVES, BESIDE_ITS_OWN = 22.0, 24.0
# A warpgroup alone on its multiprocessor waits, and nobody works meanwhile: h200_solutions.json has a tile of which the
# rest of the estimate promises the time of the best (5.3 ms, 2.5).
ALONE = 1.4
# Where others stage, fitted to the kernels of benchmarks/results/h200_producers.json: cycles of a step of those that
# multiply, of a team's, and of a vector of one of its threads; one warpgroup that multiplies on a multiprocessor takes
# twice as long for what follows, two take half as long again.
FILLED, FILLING, PRODUCED = 700.0, 2000.0, 90.0
# Bytes per cycle that bulk copies of weights get there: a tile of benchmarks/results/h200_turns.json got 37.
COPIED = 40.0
# Cycles in which a warpgroup that multiplies rows from registers waits for the next ones
# (benchmarks/results/h200_held_rows.json).
READING = 90.0


def _scored(c: Contraction, plain: Tile, lengths: Lengths, most: float) -> Iterator[tuple[float, Tile]]:
    """Estimated cycles of one multiprocessor per useful cell and output channel, by every way to stage that fits; of a
    tile that cannot have less than `most`, none."""
    rows = zip(c.axes[:2], (plain.rows_d, plain.rows_h), strict=True)
    if any(len(p.elements) % n for a, n in rows for p in a.phases):
        return
    shared, lay = shared_bytes(c, plain), staged(c, plain)
    if shared > MOST_SHARED or lay.reach > MOST_INDICES or plain.products(c).columns > 256:
        return
    results = (
        prod(plain.cells) * useful(lay.walks, lengths, plain.cells) * c.features / ceil(c.features / plain.block_m)
    )
    work = _work(c, plain, lay, lengths[2])
    if work.least > most * results:
        return
    for t in _with_producers(c, plain):
        if t.fits(c) and (per_sm := blocks_per_sm(c, t, shared)):
            score = work.cycles(t, per_sm, takes_turns(c, t)) / results
            yield score, t
            if more_on_their_way(c, t):
                twice = changed(t, twice=True)
                if blocks_per_sm(c, twice, shared) == per_sm:
                    yield score, twice


# Cycles in which a block lays out one of its weights, fitted to benchmarks/results/h100_starts.json: their places take
# a division or two, and taps of one channel meet in a bank.
LAID_OUT = 1.5
# Cells of a row as long as rows may be.
LONG = 2**20


def tiles_of_start(c: Contraction, t: WarpgroupCut, per_sm: int) -> int:
    """Tiles that take as long as what a block does ahead of all: it lays out weights that stay, and fills memory.

    Blocks that copy theirs have done so much sooner, but more rounds of them took 1.14 times as long all the same (36
    tiles of benchmarks/results/h200_twins.json, beside h200_halves_of_tf32.json).
    """
    if not t.stay:
        return 1
    weights = slice_vectors(c, t) * vector(c)
    return 1 + round(LAID_OUT * weights / _work(c, t, staged(c, t), LONG).cycles(t, per_sm, takes_turns(c, t)))


def _with_producers(c: Contraction, t: Tile) -> Iterator[Tile]:
    """The tile whose warps stage what they multiply, and with one or two teams that do so for them."""
    yield t
    for teams in (1, 2) if stages_every_step(c, t) else (1,):
        yield changed(t, producers=TEAM * teams)


def more_on_their_way(c: Contraction, t: WarpgroupCut) -> bool:
    """Whether producers have more elements of a step than on their way at a time: each round waits for memory.

    Twice as many at a time took 0.86 to 1.17 times as long (benchmarks/results/h200_staging.json): measuring picks.
    """
    if not t.producers:
        return False
    each, at_once = staged_by_thread(c, t)
    return each > at_once


@dataclass(frozen=True)
class _Work:
    """What there is to do for a tile, in cycles of a multiprocessor: products, input on its way to it and results on
    theirs back, what follows the products.  Further, bytes of weights that do not stay, how often rows are waited
    for, its steps, and vectors of the input that are staged, and how often."""

    multiplied: float
    streamed: float
    weights: int
    readings: float
    values: float
    steps: int
    vectors: int
    refills: int

    @property
    def least(self) -> float:
        """Cycles that it takes however it is staged."""
        return max(self.multiplied, self.streamed + self.weights / COPIED)

    def cycles(self, t: WarpgroupCut, per_sm: int, turns: bool) -> float:
        """Estimated cycles of one multiprocessor: one thing after the other, as far as other blocks, or other warps of
        the block, do not fill the gaps."""
        rounds = ceil(self.vectors / t.staging_threads) * self.refills
        multiplied = self.multiplied
        if self.readings:
            multiplied = max(multiplied, (multiplied + READING * self.readings) / (per_sm * t.warps / TEAM))
        if t.producers:
            filling = (FILLING * self.steps + PRODUCED * rounds) * TEAM / t.producers
            following = self.values * (1 + 4 / (per_sm * t.warps))
            apart = multiplied / (2 if turns else 1) + following
            busy = max(filling, FILLED * self.steps + max(multiplied, apart))
        else:
            busy = multiplied + STEP * self.steps + (ROUND + STAGED_BY_WARP * t.warps) * rounds + self.values
            busy *= ALONE if per_sm * t.warps == 4 else 1
        streamed = self.streamed + self.weights / (COPIED if t.producers else STREAMED)
        return max(multiplied, streamed, busy / per_sm)


def _work(c: Contraction, t: WarpgroupCut, lay: Staged, row: int) -> _Work:
    """That of a tile; of the output's rows there are `row` cells."""
    each_pass, products = inputs(c, t), t.products(c)
    every = list(product(*(a.phases for a in c.axes)))
    pieces = [_pieces(phases, t) for phases in every]
    multiplied = readings = 0.0
    weights = 0
    for times, taps, phases, vectors in zip(pieces, taps_of(c), every, weight_vectors(c, t), strict=True):
        each = multiplied_vectors(c, lay.vectors, t.in_turn(taps), taps.rows) // 2
        every_group = times * each * each_pass * (t.warps / TEAM)
        cycles = products.cycles + (BESIDE_ITS_OWN if c.halves else 0.0)
        multiplied += every_group * products.instructions * len(phases[2].elements) * cycles
        readings += every_group * products.readings
        weights += 0 if t.stay else times * vectors
    ways = [(pieces[each[0]], max(taps_of(c)[i].rows for i in each)) for each in passes(c, t.joined)]
    refills = each_pass * sum(times for times, rows in ways if rows) if each_pass > 1 else 1
    read = _read_bytes(c, lay) * refills + bytes_beside(c, t)
    written = written_bytes(c, t, _repeated(c, t)) * parted(c, t, row)
    ends = _bytes_of_ends(c, t) if ends_of_rows(c, t, row) else 0.0
    return _Work(
        multiplied,
        streamed=(read + WRITTEN * written + ends) / (STREAMED_HALVES if c.halves else STREAMED),
        weights=16 * weights * each_pass,
        readings=readings,
        values=VALUE * products.accumulators * sum(times for times, _ in ways) * t.warps * t.slabs,
        steps=each_pass * sum(times * ceil(rows / t.tap_rows) for times, rows in ways),
        vectors=lay.vectors * lay.columns,
        refills=refills,
    )


def _bytes_of_ends(c: Contraction, t: WarpgroupCut) -> float:
    """Of a tile's rows that begin and end within sectors: bytes that take as long as those."""
    d, h, w = (n * a.stride for n, a in zip(t.cells, c.axes, strict=True))
    rows = c.features / ceil(c.features / t.block_m) * d * h * w / t.team.positions
    return 2 * rows * SECTORS_OF_PART * SECTOR


def _read_bytes(c: Contraction, lay: Staged) -> float:
    """Of a chunk, with as many more as sectors at the ends of rows have on average."""
    d, h, w = lay.lengths
    if c.channels_last:
        return vector_bytes(c) * lay.vectors * d * h * w
    return lay.vectors * d * h * (w * vector_bytes(c) + vector(c) * SECTOR)


def _repeated(c: Contraction, t: WarpgroupCut) -> int:
    """How often a sector of the output is written to: of strided phases every store has a part of it, unless the phases
    are written together."""
    phases = len(c.axes[2].phases)
    return 1 if phases == 1 or couples(c, t) else phases * t.cells_of_lane


def _pieces(phases: tuple[Phase, ...], t: WarpgroupCut) -> int:
    """How often a phase of a tile is gone through."""
    d, h = (len(p.elements) // r for p, r in zip(phases[:2], (t.rows_d, t.rows_h), strict=True))
    return d * h
