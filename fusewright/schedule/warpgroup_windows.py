"""How a contraction group of window sums is cut for the tensor cores of Hopper: they take 64 cells from registers.

As in `tiling` by warps, each warp stages the rows below its cells and its lanes form the sums that they multiply, of
four channels at a time.  Sums are the first operand of a warpgroup's product, 16 cells of each warp; the weights, the
second one, are read from shared memory and take no registers: so more warps fit a multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, gcd, prod

from fusewright.schedule.contraction import Contraction
from fusewright.schedule.output_rows import SECTOR, Team, as_written, rows_bytes
from fusewright.schedule.residues import useful, walks
from fusewright.schedule.tiling import ISSUED, MOST_SHARED, MULTIPLIED, bytes_beside, fitting
from fusewright.schedule.warpgroup_choice import few_alike
from fusewright.schedule.warpgroup_positions import FeatureColumns, features_at_once, numbers, running
from fusewright.schedule.warpgroup_staging import ACCUMULATORS, MOST_REGISTERS, multiplies
from fusewright.schedule.window_rows import box_taps, rows_of_warp, window_spans

# Registers of a thread beside those that it multiplies with.
OTHERS = 42
# Bytes of shared memory of a multiprocessor up to which the level-1 cache, which takes the rest, is of use.
BESIDE_CACHE = 144 * 1024
# Places for four channels' rows, and how many tiles are worth a try that differ only in how warps lie.
MOST_BUFFERS, ALIKE = 3, 2


@dataclass(frozen=True)
class WindowTile(FeatureColumns):
    """See the module's text.

    eights_m   times eight features of a block
    warps_h, warps_w   side by side over rows and columns, whole warpgroups
    own_h, own_w   cells of a lane along h and w, eight cells apart along w; an even number
    buffers    of four channels' rows
    near       whether rows pass through the level-1 cache, which has what neighbouring warps share
    by_rows    whether rows of the output are written by way of shared memory (`output_rows`)
    """

    eights_m: int
    warps_h: int
    warps_w: int
    own_h: int
    own_w: int
    buffers: int
    near: bool
    by_rows: bool = False

    rows_d = rows_h = 1
    step_channels = 4

    @property
    def warps(self) -> int:
        return self.warps_h * self.warps_w

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def of_warp(self) -> tuple[int, int]:
        return self.own_h, 8 * self.own_w

    @property
    def cells(self) -> tuple[int, int, int]:
        """Cells of a block along d, h, w."""
        return 1, self.own_h * self.warps_h, 8 * self.own_w * self.warps_w

    @property
    def paired_h(self) -> bool:
        """Whether the two cells of a lane that one instruction takes lie one below the other, else side by side."""
        return self.own_h % 2 == 0

    @property
    def team(self) -> Team:
        """Lanes have every eighth cell, which is a window sum."""
        return Team(8 * self.own_w, 1, 4, pooled=False)

    @property
    def traits(self) -> tuple[int, ...]:
        return self.eights_m, self.own_h, self.own_w, self.buffers, self.near

    def own_bytes(self, c: Contraction) -> int:
        """Numbers per channel, and rows that are written."""
        return self.numbers_bytes(c) + rows_bytes(self)

    def registers(self, c: Contraction) -> int:
        """An estimate of a thread's."""
        return min(255, -(-_registers(c, self) // 8) * 8)


def takes(c: Contraction, *, tf32: bool) -> bool:
    """Whether a group is one of window sums whose operands may be rounded to tf32."""
    return c.box is not None and multiplies(c, tf32=tf32) and not c.channels_last and c.shares is None


def held_taps(c: Contraction) -> int:
    """Taps of a cell's sums in one channel: an instruction takes two at a time."""
    return box_taps(c) + box_taps(c) % 2


def weight_elements(c: Contraction, t: WindowTile) -> int:
    """Of a block's weights in shared memory."""
    return t.block_m * 4 * ceil(c.channels / 4) * held_taps(c)


def staged_bytes(c: Contraction, t: WindowTile) -> int:
    """About how many bytes of shared memory weights and rows take (rows are padded later)."""
    d, h, w = rows_of_warp(c, t)
    rows = t.buffers * t.step_channels * (d * h * (w + 3) + 31) * t.warps
    return 4 * weight_elements(c, t) + rows * c.x.dtype.itemsize


def blocks_per_sm(c: Contraction, t: WindowTile, shared: int) -> int:
    """Blocks that share a multiprocessor, with so many bytes of shared memory each."""
    return fitting(32 * t.warps, shared, t.registers(c))


def _accumulators(t: WindowTile) -> int:
    return 2 * t.eights_m * t.own_h * t.own_w


def _registers(c: Contraction, t: WindowTile) -> int:
    """A thread's, if it could have as many as it likes: accumulators, sums, those of rows, numbers, all else."""
    d, h, _ = window_spans(c)
    count = OTHERS + _accumulators(t) + t.own_h * t.own_w * held_taps(c) + d * h * c.axes[2].taps
    if c.reduced == "positions":
        count += 2 * running(c) * t.eights_m
    if c.reduced == "channels":
        count += 2 * t.eights_m  # the values of a column
    return count + (2 * t.eights_m * numbers(c) if t.keeps_numbers(c) else 0)


def candidates(c: Contraction, lengths: tuple[int, int, int], *, tf32: bool) -> list[tuple[float, WindowTile]]:
    """Tiles that fit with their estimates, best first; `lengths` are the cells of the whole output along d, h, w."""
    if not takes(c, tf32=tf32):
        return []
    tiles = as_written(c, _all(c), lengths[2])
    found = [(score, t) for t in tiles if (score := _score(c, t, lengths)) is not None]
    return sorted(found, key=lambda pair: pair[0])


def shortlist(
    c: Contraction, lengths: tuple[int, int, int], count: int, *, tf32: bool
) -> list[list[tuple[float, WindowTile]]]:
    """The best `count` candidates, few of them alike in what a warp holds."""
    return [few_alike(candidates(c, lengths, tf32=tf32), count, alike=ALIKE)]


def _all(c: Contraction) -> Iterator[WindowTile]:
    """Tiles that may be worth an estimate."""
    warps = [(h, w) for h, w in product((1, 2, 4, 8, 16), repeat=2) if h * w in (4, 8, 16)]
    cells = (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)
    buffers = range(1, min(MOST_BUFFERS, ceil(c.channels / 4)) + 1)
    each = product(features_at_once(c), warps, cells, buffers, (True, False))
    for eights_m, (warps_h, warps_w), (own_h, own_w), places, near in each:
        yield WindowTile(eights_m, warps_h, warps_w, own_h, own_w, places, near)


def _score(c: Contraction, t: WindowTile, lengths: tuple[int, int, int]) -> float | None:
    """Estimated cycles of one multiprocessor per useful cell and output channel, `None` where it does not fit."""
    shared = staged_bytes(c, t) + t.own_bytes(c)
    if _accumulators(t) > ACCUMULATORS or _registers(c, t) > MOST_REGISTERS or shared > MOST_SHARED:
        return None
    per_sm = blocks_per_sm(c, t, shared)
    if per_sm < 1 or (t.near and per_sm * shared > BESIDE_CACHE):
        return None
    share = useful(walks(c, t.cells), lengths, t.cells)
    return _cycles(c, t, per_sm) / (prod(t.cells) * share * c.features / ceil(c.features / t.block_m))


# Fitted to the kernels of benchmarks/results/h200_window_sums_by_warpgroups.json: cycles that a warp takes per
# instruction on its own, and from asking for rows to their use; bytes per cycle that one multiprocessor gets from the
# level-2 cache, and writes; the last one is what h200_stores.json has for rows by way of shared memory.
ALONE, LATENCY, STREAMED, WRITTEN, WRITTEN_IN_ROWS = 1.7, 1200.0, 22.0, 5.5, 15.0


def _cycles(c: Contraction, t: WindowTile, per_sm: int) -> float:
    """Estimated cycles of one multiprocessor per tile of a block: the busiest unit, or waiting where warps are few."""
    size, steps, cells = c.x.dtype.itemsize, ceil(c.channels / t.step_channels), t.own_h * t.own_w
    (d, h, w), span = rows_of_warp(c, t), window_spans(c)
    products, values = steps * held_taps(c) // 2 * cells // 2, 2 * t.eights_m * cells
    # Of one step: rows that a lane sums up, its loads of one, and copies.
    rows = span[0] * (span[1] + (t.own_h - 1) * min(span[1], c.axes[1].advance)) * t.own_w
    loads, copies = ceil(span[2] / (gcd(c.axes[2].advance, 4) if size == 4 else 1)), d * h * ceil(w * size / 128)
    formed = rows * (loads + 3 * c.axes[2].taps) + 4 * cells * box_taps(c)
    instructions = steps * (formed + 3 * copies + 40) + 10.0 * values + 80
    ports = steps * (rows * span[2] + 4 * copies) + products * t.block_m / 16
    block = [(n - 1) * a.advance + r for a, n, r in zip(c.axes, t.cells, span, strict=True)]
    read = _fetched(block, size) / t.warps if t.near else _fetched((d, h, w), size)
    written = WRITTEN_IN_ROWS if t.by_rows else WRITTEN
    streamed = (c.channels * read + bytes_beside(c, t) / t.warps) / STREAMED
    streamed += 32 * values * size / written if c.fold is None else 0
    issued = instructions / 4 / ISSUED
    busiest = t.warps * max(products * t.block_m / 8 / MULTIPLIED, ports, issued, streamed)
    alone = ALONE * instructions + LATENCY * steps / t.buffers
    return max(busiest, alone / per_sm) + 0.5 * issued * t.warps  # not all of it is hidden


def _fetched(lengths: Sequence[int], size: int) -> float:
    """Bytes of so many elements along d, h, w, rows in whole sectors."""
    d, h, w = lengths
    return d * h * ceil(w * size / SECTOR) * SECTOR
