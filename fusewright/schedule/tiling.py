"""How a contraction group is cut into tiles: what a warp holds in registers, a block in shared memory.

A warp multiplies `m_tiles` 16-channel tiles by 8-position tiles of ``cells_d x cells_h x 4*cells_w`` cells; a block has
``warps_m`` x ``warps_h`` x ``warps_w`` warps, side by side over channels, rows and columns.  The choice minimises an
estimate of the busiest pipe per useful multiplication; nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil, gcd, prod
from typing import Protocol

import torch

from fusewright.schedule.axes import Axis, Phase
from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import MOST_HELD, Contraction
from fusewright.schedule.output_rows import SECTOR, Team, as_written, rows_bytes
from fusewright.schedule.residues import useful, walks
from fusewright.schedule.window_rows import box_taps, rows_of_warp, window_spans

# Registers a thread may spend on accumulators, and on weights at hand at a time.
ACCUMULATORS = 96
HELD_WEIGHTS = 80
# Bytes of shared memory that a block may take.
MOST_SHARED = 220 * 1024
MULTIPROCESSORS = 132
# Registers of one, a quarter of them for every fourth warp; the most of a thread.
REGISTERS, QUARTERS, MOST_OF_THREAD = 65536, 4, 255
# Registers of a thread beside those that it multiplies with, and where its warp stages rows.
OTHERS, OTHERS_BY_WARP = 44, 43
# Registers that multiplying pairs of tf32 numbers takes beside them.
SPLITTING = 32


@dataclass(frozen=True)
class Tiling:
    """See the module's text; `rows` elements of a cell per phase are computed at a time along d and h.

    chunk   input channels staged at a time
    together_d, together_h   all taps along d, h are in registers at once, so that an input row read from shared memory
            once serves every tap that leads from it to a row of the warp
    stages   of shared memory: with two, the next chunk is copied while this one is multiplied
    by_warp   each warp stages the rows below its cells, and window sums stay in the lanes that multiply them
    by_rows   rows of the output are written by way of shared memory (`fusewright.schedule.output_rows`)
    all_taps  a step of the tensor cores, of eight channels and taps, goes on from one row of taps to the next: where
            channels are few, a row's last step would be mostly idle
    """

    m_tiles: int
    warps_m: int
    warps_h: int
    warps_w: int
    cells_d: int
    cells_h: int
    cells_w: int
    rows_d: int
    rows_h: int
    chunk: int
    together_d: bool
    together_h: bool
    stages: int = 1
    by_warp: bool = False
    by_rows: bool = False
    all_taps: bool = False

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_h * self.warps_w

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def block_m(self) -> int:
        """Output channels of a block."""
        return 16 * self.m_tiles * self.warps_m

    @property
    def cells(self) -> tuple[int, int, int]:
        """Cells of a block along d, h, w."""
        return self.cells_d, self.cells_h * self.warps_h, 4 * self.cells_w * self.warps_w

    @property
    def team(self) -> Team:
        """A warp's eights along w, of which lanes have two neighbours each; cells that are pooled are four apart."""
        return Team(4 * self.cells_w, 1, 8, pooled=False)

    # -- where warps stage rows

    @property
    def of_warp(self) -> tuple[int, int]:
        """Cells of a warp along h, w."""
        return self.cells_h, 4 * self.cells_w

    @property
    def step_channels(self) -> int:
        return 8

    @property
    def buffers(self) -> int:
        return 1


class Cut(Protocol):
    """Any tile."""

    @property
    def block_m(self) -> int: ...
    @property
    def cells(self) -> tuple[int, int, int]: ...


@lru_cache(maxsize=4096)
def span(axis: Axis, cells: int) -> int:
    """Input indices that `cells` neighbouring cells read along one dimension, or rows that a tile of them stages."""
    low, high = axis.reach()
    return (cells - 1) * axis.advance + high - low + 1


def column(channels: int, size: int) -> int:
    """Elements of `size` bytes from column to column of a channels-last tile: 4 words modulo 8, so that what a warp
    reads at once, 4 channels of 8 columns, spreads over the banks."""
    return channels + (16 // size - channels) % (32 // size)


def copied_at_once(c: Contraction, chunk: int) -> int:
    """Channels of a channels-last input that one copy takes, aligned in both memories."""
    return gcd(c.channels, chunk, 16 // c.x.dtype.itemsize)


def paired(c: Contraction, chunk: int) -> bool:
    """Whether an operand of the tensor cores is two channels in half precision, which lie side by side."""
    return c.channels_last and c.x.dtype.itemsize == 2 and chunk % 2 == 0


def side_by_side(c: Contraction) -> bool:
    """Whether the cells of a thread are neighbours along w: of cells of one position, whole ones need no care."""
    return all(len(p.elements) == 1 for p in c.axes[2].phases)


def _most(axis: Axis) -> int:
    """The most positions of one cell that one phase holds."""
    return max(len(p.elements) for p in axis.phases)


def splits(c: Contraction, tf32: bool) -> bool:
    """Whether operands are pairs of tf32 numbers: float32 that may not be rounded to one, as `tf32` says."""
    return c.x.dtype == torch.float32 and not tf32


def candidates(c: Contraction, lengths: tuple[int, int, int], *, tf32: bool) -> list[Tiling]:
    """Tilings that fit, best estimate first; `lengths` are the cells of the whole output along d, h, w."""
    if c.shares is not None:  # a lane has some of a position's channels only
        return []
    split = splits(c, tf32)
    tiles = as_written(c, _all(c, lengths), lengths[2])
    scored = [(score, t) for t in tiles if (score := _score(c, t, lengths, split)) is not None]
    return [t for _, t in sorted(scored, key=lambda pair: pair[0])]


def estimate(c: Contraction, t: Tiling, lengths: tuple[int, int, int], *, tf32: bool) -> float:
    """Cycles of one multiprocessor per cell and output channel, of a tiling that fits."""
    score = _score(c, t, lengths, splits(c, tf32))
    assert score is not None
    return score


def shortlist(c: Contraction, lengths: tuple[int, int, int], count: int, *, tf32: bool) -> list[Tiling]:
    """The best `count` candidates, few of them alike in what a warp holds."""
    found: list[Tiling] = []
    alike: dict[tuple[int, ...], int] = {}
    for t in candidates(c, lengths, tf32=tf32):
        key = (t.m_tiles, t.rows_d * t.cells_d, t.rows_h * t.cells_h, t.cells_w, t.stages, t.by_warp, t.all_taps)
        alike[key] = alike.get(key, 0) + 1
        if alike[key] <= ALIKE:
            found.append(t)
        if len(found) == count:
            break
    return found


# Tiles of 16 features up to which one block has all of those that a reduction joins.
WHOLE = 40

# So many tilings with the same accumulators are worth a try: other warps side by side, another chunk.
ALIKE = 3


def _all(c: Contraction, lengths: tuple[int, int, int]) -> Iterator[Tiling]:
    """Tilings that may be worth an estimate: few idle channels, and sums that fit the registers."""
    for m_tiles, warps_m in _features(c):
        for (cells_w, cells_h, cells_d), (rows_d, rows_h) in _cells_of_warp(c, lengths, m_tiles):
            shared = product(_warps(warps_m, lengths[1]), _chunks(c), _together(c), (1, 2))
            for (warps_w, warps_h), chunk, (together_d, together_h), stages in shared:
                if stages > 1 and chunk == c.channels:
                    continue
                t = Tiling(
                    m_tiles, warps_m, warps_h, warps_w, cells_d, cells_h, cells_w, rows_d, rows_h,
                    chunk, together_d, together_h, stages,
                )  # fmt: skip
                yield t
                if c.box is not None and cells_w > 1 and cells_d == 1:
                    yield changed(t, by_warp=True)
                if not (together_d or together_h) and _has_idle_steps(c, t):
                    yield changed(t, all_taps=True)


def _has_idle_steps(c: Contraction, t: Tiling) -> bool:
    """Whether steps are fewer where they go on from one row of taps to the next."""
    return c.box is None and t.chunk == c.channels and _work(c, changed(t, all_taps=True))[0] < _work(c, t)[0]


def _features(c: Contraction) -> Iterator[tuple[int, int]]:
    """Tiles of 16 output channels of a warp, and warps side by side over channels."""
    tiles = ceil(c.features / 16)
    for m_tiles, warps_m in product((1, 2, 3, 4, 5), (1, 2, 4, 5, 8)):
        whole = m_tiles * warps_m >= tiles
        idle = -tiles % (m_tiles * warps_m)  # of the last block, beyond the last feature
        joined = whole or not c.over_channels or tiles > WHOLE
        if joined and idle * (4 if whole else 16) <= tiles:
            yield m_tiles, warps_m


def _cells_of_warp(
    c: Contraction, lengths: tuple[int, int, int], m_tiles: int
) -> Iterator[tuple[tuple[int, int, int], tuple[int, int]]]:
    """Cells of a warp along w (in fours), h, d, and rows of a cell that are computed at a time along d, h."""
    d, h, w = (_most(a) for a in c.axes)
    for cells in product(_fours(c), (1, 2, 4), (1, 2)):
        cells_w, cells_h, cells_d = cells
        in_pairs = cells_w * w % 2 == 0
        needed = cells_d <= lengths[0] and cells_h <= lengths[1] and 4 * cells_w < 2 * lengths[2] + 7
        if not in_pairs or not needed or (c.window is not None and cells_d * cells_h > 4):
            continue
        for rows_d, rows_h in product(_divisors(d), _divisors(h)):
            # Where cells are pooled and there is one of them, its rows may be computed in pieces.
            all_d = rows_d == d or (c.window is not None and cells_d == 1)
            all_h = rows_h == h or (c.window is not None and cells_h == 1)
            sums = m_tiles * cells_d * cells_h * rows_d * rows_h * cells_w * w // 2 * 4
            if all_d and all_h and sums <= ACCUMULATORS:
                yield cells, (rows_d, rows_h)


def _fours(c: Contraction) -> tuple[int, ...]:
    """Cells of a warp along w, in fours: where all positions are one row, as many as elsewhere in several."""
    one_row = c.box is None and not any(c.dims[:2])
    return (1, 2, 4, 8, 16) if one_row else (1, 2, 4, 8)


def _warps(warps_m: int, rows: int) -> list[tuple[int, int]]:
    """Warps of a block side by side along w and h, of which no half has no row."""
    found = product((1, 2, 3, 4, 8), (n for n in (1, 2, 4, 8) if n < 2 * rows))
    return [(w, h) for w, h in found if 4 <= warps_m * w * h <= 16]


def _together(c: Contraction) -> list[tuple[bool, bool]]:
    """Whether all taps along d and h are at hand at once: where there are several, those along h first."""
    several_d, several_h = (c.box is None and axis.taps > 1 for axis in c.axes[:2])
    along_d, along_h = ([False, True] if several else [False] for several in (several_d, several_h))
    return [(d, h) for d, h in product(along_d, along_h) if h or not d or not several_h]


def _chunks(c: Contraction) -> list[int]:
    """Input channels staged at a time."""
    channels = c.channels
    return [channels] if c.box is not None else [k for k in (4, 8, 16, 32, 64) if k < channels] + [channels]


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def weights_as_operands(c: Contraction, t: Tiling) -> int:
    """Elements of a block's weights laid out as operands, channels in whole eights."""
    return t.block_m * 8 * ceil(c.channels / 8) * box_taps(c)


def shared_elements(c: Contraction, t: Tiling) -> tuple[int, int]:
    """Elements of the input tile and of the weights in shared memory, roughly (rows are padded later)."""
    if t.by_warp:
        d, h, w = rows_of_warp(c, t)
        return 8 * t.warps * (d * h * (w + 3) + 31), weights_as_operands(c, t)
    if c.box is not None:
        k = c.channels * box_taps(c)
        return k * (prod(t.cells) + 8), t.block_m * (k + 4)
    d, h, w = (span(w.staged, n) for w, n in zip(walks(c, t.cells), t.cells, strict=True))
    taps = prod((sum if t.chunk == c.channels else max)(len(p.taps) for p in a.phases) for a in c.axes)
    tile = d * h * w * column(t.chunk, c.x.dtype.itemsize) if c.channels_last else t.chunk * (d * h * (w + 7) + 16)
    return tile, t.block_m * (t.chunk * taps + 4)


def _score(c: Contraction, t: Tiling, lengths: tuple[int, int, int], split: bool) -> float | None:
    """Estimated cycles per useful cell of one multiprocessor, `None` where it does not fit."""
    element_bytes = c.x.dtype.itemsize
    tile, weights = shared_elements(c, t)
    shared = t.stages * (tile + weights) * element_bytes + rows_bytes(t)
    if shared > MOST_SHARED:
        return None
    cut = zip(c.axes[:2], (t.rows_d, t.rows_h), strict=True)
    if any(len(p.elements) % r for a, r in cut for p in a.phases):
        return None
    if any(t.cells_w * len(p.elements) % 2 for p in c.axes[2].phases):
        return None
    steps, loads, held = _work(c, t)
    if held > HELD_WEIGHTS:
        return None
    per_sm = blocks_per_sm(c, t, shared, split=split)
    # The second halves of split sums can be found again, so that they crowd nobody out.
    crowded = t.by_warp and (sum(_summed(c, t)) > MOST_HELD or _registers(c, t, split=False) > MOST_OF_THREAD)
    if per_sm < 1 or crowded:
        return None
    return _cycles(c, t, steps, loads, (tile, weights), element_bytes, per_sm) / _useful(c, t, lengths)


# Fitted roughly to the 140 kernels of benchmarks/results/h200_tilings.json: cycles from a copy to its use, and at a
# barrier; cycles that one warp takes per instruction on its own; the share of the issue slots and of the tensor cores
# that kernels reach.
LATENCY, BARRIER, ALONE, ISSUED, MULTIPLIED = 1400.0, 100.0, 2.5, 0.7, 0.6
# Bytes per cycle that one multiprocessor gets from the level-2 cache: of window sums' rows, as far as nothing else
# hides them, and of tiles that all multiprocessors stage at once.
FETCHED, STREAMED = 120.0, 24.0
# How many read bytes a written one is worth.
WRITTEN = 2.0


def _cycles(
    c: Contraction, t: Tiling, steps: int, loads: float, elements: tuple[int, int], element_bytes: int, per_sm: int
) -> float:
    """Estimated cycles of one multiprocessor per tile of a block: the busiest unit, or waiting where warps are few."""
    if t.by_warp:
        return _cycles_by_warp(c, t, steps, loads, element_bytes, per_sm)
    tile, weights = elements
    chunks = ceil(c.channels / t.chunk) if c.box is None else 1
    pieces = prod(_most(a) // r for a, r in zip(c.axes[:2], (t.rows_d, t.rows_h), strict=True))
    pieces *= prod(len(a.phases) for a in c.axes)
    refills = chunks * pieces if chunks > 1 else 1
    wide = element_bytes / 4
    mma, reads = float(steps * chunks), loads * chunks * (1 if paired(c, t.chunk) else wide)
    values = t.m_tiles * prod((t.cells_d, t.cells_h, t.cells_w)) * prod(_most(a) for a in c.axes) * 2
    instructions = mma + 1.8 * reads + 10.0 * values
    waits = LATENCY * (refills if t.stages == 1 else pieces) + BARRIER * refills
    fetched = streamed = 0.0
    if c.box is None:
        alone = 16 // element_bytes // copied_at_once(c, t.chunk) if c.channels_last else 1
        staged = weights * refills if chunks > 1 else 0
        filling = 6.0 * (tile * alone * refills + staged) * wide / 4 / (32 * t.warps)
        streamed = (tile * refills + staged) * element_bytes / STREAMED
        phases = len(c.axes[2].phases)
        if phases > 1:  # each of which writes parts of sectors, of two cells of a lane; whole ones are in the fit
            streamed += WRITTEN * written_bytes(c, t, 2 * phases) / STREAMED
        streamed += bytes_beside(c, t) / STREAMED
    else:
        tasks = c.channels * prod(t.cells) / (32 * t.warps)
        rows = prod(window_spans(c)[:2])
        filling = tasks * (rows * (4 + 3 * c.axes[2].taps) + 5 * prod(a.taps for a in c.axes) + 40)
        waits = LATENCY * (1 + 0.4 * ceil(tasks)) * (2 if t.cells[2] < 32 else 1)
        sides = ((n - 1) * a.advance + r for a, n, r in zip(c.axes, t.cells, window_spans(c), strict=True))
        fetched = float(c.channels * prod(sides) * element_bytes)  # rows that cells share come from level 1
    instructions += filling
    busiest = max(mma * t.warps / MULTIPLIED, reads * t.warps, instructions * t.warps / 4 / ISSUED, streamed)
    return max(busiest, (waits + ALONE * instructions) / per_sm) + 0.1 * busiest + fetched / FETCHED


def written_bytes(c: Contraction, t: Cut, repeated: int) -> float:
    """Of a tile where all positions are written: whole sectors, each of them so many times."""
    if c.fold is not None or c.window is not None:
        return 0.0
    once = _output_bytes(c, t, c.x.dtype.itemsize)
    return once if c.writes_last else once * repeated


def bytes_beside(c: Contraction, t: Cut) -> float:
    """Of operands that have a number for every element, as a tile reads them."""
    return sum(_output_bytes(c, t, n.dtype.itemsize) for n in c.elements)


def _output_bytes(c: Contraction, t: Cut, size: int) -> float:
    """Of as many elements as a tile has results, each of so many bytes: whole sectors."""
    positions = prod(n * a.stride for n, a in zip(t.cells, c.axes, strict=True))
    row = t.block_m if c.writes_last else t.cells[2] * c.axes[2].stride
    return c.features / ceil(c.features / t.block_m) * positions * (size + SECTOR / row)


def _cycles_by_warp(c: Contraction, t: Tiling, mma: int, reads: float, element_bytes: int, per_sm: int) -> float:
    """The same where warps stage rows: nothing waits for a barrier, copies are hidden behind products."""
    (d, h, w), span_w = rows_of_warp(c, t), window_spans(c)[2]
    rows, eights, tiles_w = d * h, ceil(c.channels / 8), t.cells_w // 2
    vector = gcd(c.axes[2].advance, 4) if element_bytes == 4 else 1
    loads, sums = ceil(span_w / vector), t.cells_h * tiles_w * box_taps(c)
    copies = 2 * rows * ceil(w * element_bytes / 128)
    values = t.m_tiles * prod((t.cells_d, t.cells_h, t.cells_w)) * 2
    formed = 2 * (tiles_w * rows * (loads + 3 * c.axes[2].taps) + 4 * sums)
    instructions = mma + reads / 4 + eights * (formed + 3 * copies) + 10.0 * values + 60
    ports = reads + eights * (4 * copies + 2 * tiles_w * rows * (span_w + loads))  # cycles of shared memory
    sides = ((n - 1) * a.advance + r for a, n, r in zip(c.axes, t.cells, window_spans(c), strict=True))
    streamed = c.channels * prod(sides) * element_bytes / STREAMED
    issued = instructions * t.warps / 4 / ISSUED
    busiest = max(mma * t.warps / MULTIPLIED, ports * t.warps, issued, streamed)
    return max(busiest, ALONE * instructions / per_sm) + 0.3 * issued  # few warps: not all of it is hidden


def _useful(c: Contraction, t: Tiling, lengths: tuple[int, int, int]) -> float:
    """Outputs of a tile, less what of them lies beyond the ends."""
    share = useful(walks(c, t.cells), lengths, t.cells)
    share *= c.features / (ceil(c.features / t.block_m) * t.block_m)
    return prod(t.cells) * t.block_m * share


def blocks_per_sm(c: Contraction, t: Tiling, shared: int, *, split: bool = False) -> int:
    """Blocks that share a multiprocessor, with so many bytes of shared memory each."""
    return min(4, fitting(32 * t.warps, shared, registers(c, t, split=split)))


def fitting(threads: int, shared: int, registers: int) -> int:
    """Blocks of so many threads that fit a multiprocessor: by shared bytes of each, threads, and registers of those,
    of which every fourth warp is dealt the same quarter."""
    warps = QUARTERS * (REGISTERS // QUARTERS // (32 * registers))
    return min((MOST_SHARED + 7168) // (shared + 1024), 2048 // threads, 32 * warps // threads)


def registers(c: Contraction, t: Tiling, *, split: bool = False) -> int:
    """An estimate of a thread's registers, rounded up to what hardware hands out; `split` operands are pairs."""
    return min(MOST_OF_THREAD, -(-_registers(c, t, split) // 8) * 8)


def _registers(c: Contraction, t: Tiling, split: bool) -> int:
    """A thread's, if it could have as many as it likes."""
    own = t.cells_d * t.cells_h * t.cells_w
    wide = 2 if c.x.dtype.itemsize == 8 else 1
    if t.by_warp:
        summed, rows = _summed(c, t)
        count = own * t.m_tiles * 2 + summed * (2 if split else 1) + rows // 2 + window_spans(c)[2]
        return OTHERS_BY_WARP + wide * count + (SPLITTING if split else 0)
    count = OTHERS + own * t.rows_d * t.rows_h * _most(c.axes[2]) * t.m_tiles * 2
    count += 2 * (_work(c, t)[2] + 4) + SPLITTING if split else _work(c, t)[2] + 4
    count += 2 * t.m_tiles * (1 + len(c.operands))  # numbers per channel, or those of a position's elements
    if c.window is not None:
        count += own * t.m_tiles * 2 * c.pooled_numbers
    if c.over_positions and not c.over_channels:
        count += (8 if c.folds_ends else 6) * t.m_tiles
    return wide * count


def _summed(c: Contraction, t: Tiling) -> tuple[int, int]:
    """Window sums of a lane: of its cells in two channels, and of the rows below one cell."""
    d, h, _ = window_spans(c)
    return t.cells_h * (t.cells_w // 2) * box_taps(c) * 2, d * h * c.axes[2].taps


def _work(c: Contraction, t: Tiling) -> tuple[int, float, int]:
    """Per warp and chunk: tile multiplications, words a lane reads from shared memory; and weights held at a time."""
    if t.by_warp:
        steps = ceil(c.channels / 8) * box_taps(c)
        return steps * t.m_tiles * t.cells_h * t.cells_w // 2, steps * 4.0 * t.m_tiles, 4 * t.m_tiles
    if c.box is not None:
        steps = ceil(c.channels * box_taps(c) / 8)
        tiles = t.cells_d * t.cells_h * t.cells_w // 2
        return steps * t.m_tiles * tiles, steps * (2.0 * tiles + 4.0 * t.m_tiles), 4 * t.m_tiles
    cells, rows = (t.cells_d, t.cells_h, t.cells_w), (t.rows_d, t.rows_h)
    together = t.together_d, t.together_h
    d, h, w = (walk.staged for walk in walks(c, t.cells))
    return _work_of_warp(
        (d, h, w), t.m_tiles, cells, rows, t.chunk, together, 16 if paired(c, t.chunk) else 8, t.all_taps
    )


@lru_cache(maxsize=1 << 15)  # many tilings differ only in how warps lie side by side
def _work_of_warp(
    axes: tuple[Axis, Axis, Axis],
    m_tiles: int,
    cells: tuple[int, int, int],
    rows: tuple[int, int],
    chunk: int,
    together: tuple[bool, bool],
    step: int,
    all_taps: bool,
) -> tuple[int, float, int]:
    """`_work` of a convolution of x itself, `step` channels and taps at a time."""
    count, loads, held = 0, 0.0, 0
    for phases in product(*(a.phases for a in axes)):
        td, th, tw = (len(p.taps) for p in phases)
        if all_taps:
            td, th, tw = (1, 1, td * th * tw)
        steps = ceil(chunk * tw / step)
        tiles = max(1, cells[2] * len(phases[2].elements) // 2)
        pieces = prod(ceil(len(p.elements) / r) for p, r in zip(phases[:2], rows, strict=True))
        count += pieces * td * th * steps * cells[0] * cells[1] * rows[0] * rows[1] * tiles * m_tiles
        read_d = _distinct(axes[0], phases[0], cells[0], rows[0]) if together[0] else td * cells[0] * rows[0]
        read_h = _distinct(axes[1], phases[1], cells[1], rows[1]) if together[1] else th * cells[1] * rows[1]
        loads += pieces * steps * (2.0 * tiles * read_d * read_h + 4.0 * m_tiles * td * th)
        held = max(held, (td if together[0] else 1) * (th if together[1] else 1) * m_tiles * 4)
    return count, loads, held


def _distinct(axis: Axis, phase: Phase, cells: int, rows: int) -> int:
    """Input rows along one dimension that `rows` rows of `cells` cells read."""
    return len({
        i * axis.advance + j * phase.per_element + u * phase.per_tap
        for i in range(cells) for j in range(rows) for u in range(len(phase.taps))
    })  # fmt: skip
