"""How a contraction group is cut for the tensor cores of Hopper, which multiply what lies in shared memory.

A warpgroup, four warps, multiplies 64 features by up to 256 positions in one instruction and goes on with other work
meanwhile: it stages what is multiplied next.  Cells of a tile lie in eights along w.  The estimate follows the idea of
`tiling`: the busiest unit of a multiprocessor per useful result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, gcd, prod

import torch

from fusewright.schedule.contraction import Contraction, Phase
from fusewright.schedule.residues import Walks, walks
from fusewright.schedule.tiling import MOST_SHARED, span

# Numbers of the accumulators that a thread may hold.
ACCUMULATORS = 160
# Input indices along one dimension of a tile, which are packed into eight bits each, as are its channels.
MOST_INDICES = 256
# Warpgroups of a block.
GROUPS = (1, 2, 3, 4)


@dataclass(frozen=True)
class WarpgroupTile:
    """See the module's text.

    m_tiles   times 64 features that a warpgroup computes
    groups_m, groups_h, groups_w   warpgroups side by side over features, rows and columns
    cells_d, cells_h, eights_w   cells of a warpgroup; `rows` elements of a cell are computed at a time along d and h
    chunk     input channels staged at a time
    tap_rows  rows of the kernel whose weights are staged at a time
    stay      whether a block stages all its weights once instead
    """

    m_tiles: int
    groups_m: int
    groups_h: int
    groups_w: int
    cells_d: int
    cells_h: int
    eights_w: int
    rows_d: int
    rows_h: int
    chunk: int
    tap_rows: int
    stay: bool

    @property
    def warps(self) -> int:
        return 4 * self.groups_m * self.groups_h * self.groups_w

    @property
    def warps_m(self) -> int:
        """Warps with features of their own."""
        return 4 * self.groups_m

    @property
    def warps_h(self) -> int:
        return self.groups_h

    @property
    def warps_w(self) -> int:
        return self.groups_w

    @property
    def block_m(self) -> int:
        """Output channels of a block."""
        return 64 * self.m_tiles * self.groups_m

    @property
    def cells(self) -> tuple[int, int, int]:
        """Cells of a block along d, h, w."""
        return self.cells_d, self.cells_h * self.groups_h, 8 * self.eights_w * self.groups_w


def rows_at_once(c: Contraction, t: WarpgroupTile) -> int:
    """Rows of eight cells that one instruction multiplies, all as far apart; where rows are wider, it takes one."""
    if t.eights_w > 1:
        return 1
    axis = walks(c, t.cells)[1].staged
    even = t.rows_h == 1 or axis.advance == t.rows_h * axis.phases[0].per_element
    return t.rows_h * t.cells_h if even else t.rows_h


def positions(c: Contraction, t: WarpgroupTile) -> int:
    """That one instruction multiplies."""
    return 8 * rows_at_once(c, t) * t.eights_w


def vector(c: Contraction) -> int:
    """Channels that lie side by side: 16 bytes of them."""
    return 16 // c.x.dtype.itemsize


def step(c: Contraction) -> int:
    """Channels that one instruction multiplies."""
    return 2 * vector(c)


def takes(c: Contraction, *, tf32: bool) -> bool:
    """Whether the operands of a group may be what these tensor cores multiply, and lie as this family reads them.

    Window sums take longer to form than to multiply, and `tiling` forms them with more threads.
    """
    rounded = c.x.dtype == torch.float32 and tf32
    if not (rounded or c.x.dtype in (torch.float16, torch.bfloat16)) or c.channels_last or c.box is not None:
        return False
    return any(p.rows * p.per_row for p in taps_of(c))  # a pool may leave only positions that no tap reaches


@dataclass(frozen=True)
class Staged:
    """One chunk of the input in shared memory, as [vector of channels][d][h][w % advance][w / advance][channel].

    lengths   input rows along d, h, and indices along w; `walks` say which rows
    pitch     columns w / advance of one residue; columns are vectors
    plane     columns of a vector of channels: an odd number, so that vectors of one column spread over the banks
    vectors   of channels
    """

    lengths: tuple[int, int, int]
    pitch: int
    advance: int
    plane: int
    vectors: int
    walks: Walks

    @property
    def reach(self) -> int:
        """The most input indices from the first to the last along a dimension."""
        return max((n - 1) * walk.step + 1 for walk, n in zip(self.walks, self.lengths, strict=True))

    @property
    def row(self) -> int:
        return self.pitch * self.advance

    def column(self, w: int) -> int:
        return w % self.advance * self.pitch + w // self.advance


def staged(c: Contraction, t: WarpgroupTile) -> Staged:
    """How the input of a tile is staged."""
    along = walks(c, t.cells)
    d, h, w = (span(walk.staged, n) for walk, n in zip(along, t.cells, strict=True))
    advance = c.axes[2].advance
    plane = d * h * ceil(w / advance) * advance
    return Staged((d, h, w), ceil(w / advance), advance, plane + 1 - plane % 2, t.chunk // vector(c), along)


@dataclass(frozen=True)
class Taps:
    """The taps of one phase: `rows` rows of a kernel, each of `per_row` taps along w."""

    rows: int
    per_row: int


def taps_of(c: Contraction) -> list[Taps]:
    """Per phase, in the order they are computed."""
    phases = product(*(a.phases for a in c.axes))
    return [Taps(len(d.taps) * len(h.taps), len(w.taps)) for d, h, w in phases]


def weight_vectors(c: Contraction, t: WarpgroupTile) -> list[int]:
    """Vectors of weights per phase, of all rows of taps and one chunk."""
    return [p.rows * p.per_row * staged(c, t).vectors * t.block_m for p in taps_of(c)]


def chunks(c: Contraction, t: WarpgroupTile) -> int:
    """Of the input's channels."""
    return ceil(c.channels / t.chunk)


def slice_vectors(c: Contraction, t: WarpgroupTile) -> int:
    """Vectors of the weights that are staged at a time."""
    if t.stay:
        return sum(weight_vectors(c, t)) * chunks(c, t)
    return max(min(t.tap_rows, p.rows) * p.per_row for p in taps_of(c)) * staged(c, t).vectors * t.block_m


def staged_bytes(c: Contraction, t: WarpgroupTile) -> int:
    """Bytes of shared memory: two tiles of the input, and weights, twice where they do not stay."""
    x = staged(c, t).vectors * staged(c, t).plane
    return 16 * (2 * x + (1 if t.stay else 2) * slice_vectors(c, t))


def exchanged_bytes(c: Contraction, t: WarpgroupTile) -> int:
    """Bytes behind those: where channels are reduced, what the warps that share a tile's positions come to there."""
    if c.fold is None or c.reduced != "channels":
        return 0
    words = 2 if c.fold.op.kind == "logsumexp" else 1
    local = (n * (a.stride if c.window is None else 1) for a, n in zip(c.axes, t.cells, strict=True))
    return 4 * words * t.warps_m * prod(local)


def shared_bytes(c: Contraction, t: WarpgroupTile) -> int:
    """Bytes of shared memory while a block's tiles are computed."""
    return staged_bytes(c, t) + exchanged_bytes(c, t)


def registers(c: Contraction, t: WarpgroupTile) -> int:
    """An estimate of a thread's registers."""
    count = accumulators(c, t) + 64
    if c.window is not None:
        count += t.cells_d * t.cells_h * t.eights_w * 2 * t.m_tiles * 2
    if c.over_positions and not c.over_channels:
        count += 6 * t.m_tiles
    return min(255, -(-count // 8) * 8)


def blocks_per_sm(c: Contraction, t: WarpgroupTile, shared: int) -> int:
    """Blocks that share a multiprocessor: by shared memory (in bytes per block), threads and registers."""
    threads = 32 * t.warps
    return min(4, (MOST_SHARED + 7168) // (shared + 1024), 2048 // threads, 65536 // (threads * registers(c, t)))


def accumulators(c: Contraction, t: WarpgroupTile) -> int:
    """Of a thread."""
    along_w = max(len(p.elements) for p in c.axes[2].phases)
    return t.m_tiles * t.cells_d * t.rows_d * t.cells_h * t.rows_h * t.eights_w * along_w * 4


def candidates(c: Contraction, lengths: tuple[int, int, int], *, tf32: bool) -> list[tuple[float, WarpgroupTile]]:
    """Tiles that fit with their estimates, best first; `lengths` are the cells of the whole output along d, h, w."""
    if not takes(c, tf32=tf32):
        return []
    found = [(score, t) for t in _all(c, lengths) if (score := _score(c, t, lengths)) is not None]
    return sorted(found, key=lambda pair: pair[0])


# So many tiles with the same accumulators are worth a try.
ALIKE = 2


def shortlist(
    c: Contraction, lengths: tuple[int, int, int], count: int, *, tf32: bool
) -> list[tuple[float, WarpgroupTile]]:
    """The best `count` candidates, few of them alike in what a warpgroup holds."""
    found: list[tuple[float, WarpgroupTile]] = []
    alike: dict[tuple[int, ...], int] = {}
    for score, t in candidates(c, lengths, tf32=tf32):
        key = (t.m_tiles, t.rows_d * t.cells_d, t.rows_h * t.cells_h, t.eights_w, t.stay)
        alike[key] = alike.get(key, 0) + 1
        if alike[key] <= ALIKE:
            found.append((score, t))
        if len(found) == count:
            break
    return found


def _all(c: Contraction, lengths: tuple[int, int, int]) -> Iterator[WarpgroupTile]:
    """Tiles that may be worth an estimate."""
    for m_tiles, groups_m in _features(c):
        for cells, rows in _cells_of_warpgroup(c, lengths, m_tiles):
            for groups_h, groups_w in product((1, 2, 4), (1, 2, 3, 4)):
                if groups_m * groups_h * groups_w not in GROUPS:
                    continue
                plain = WarpgroupTile(m_tiles, groups_m, groups_h, groups_w, *cells, *rows, c.channels, 1, True)
                for chunk in _chunks(c):
                    yield from _slices(c, replace(plain, chunk=chunk))


def _features(c: Contraction) -> Iterator[tuple[int, int]]:
    """Times 64 output channels of a warpgroup, and warpgroups side by side over channels."""
    needed = ceil(c.features / 64)
    for m_tiles, groups_m in product((1, 2), (1, 2, 3, 4)):
        at_once = m_tiles * groups_m
        if at_once <= needed and -needed % at_once * 4 <= needed and (at_once == needed or not c.over_channels):
            yield m_tiles, groups_m


def _cells_of_warpgroup(
    c: Contraction, lengths: tuple[int, int, int], m_tiles: int
) -> Iterator[tuple[tuple[int, int, int], tuple[int, int]]]:
    """Cells of a warpgroup along d, h and, in eights, w; rows of a cell that are computed at a time along d, h."""
    most = [max(len(p.elements) for p in a.phases) for a in c.axes]
    for d, h, w in product((1, 2), (1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if d > lengths[0] or h >= 2 * lengths[1] or 8 * w >= 2 * lengths[2] + 8:
            continue
        for rows_d, rows_h in product(_divisors(most[0]), _divisors(most[1])):
            pieces = rows_d < most[0] or rows_h < most[1]
            if pieces and c.window is None:
                continue
            if m_tiles * d * h * w * rows_d * rows_h * most[2] * 4 <= ACCUMULATORS:
                yield (d, h, w), (rows_d, rows_h)


def _chunks(c: Contraction) -> list[int]:
    """Input channels staged at a time, in whole instructions."""
    whole = ceil(c.channels / step(c)) * step(c)
    return [k for k in (8, 16, 32, 64) if k % step(c) == 0 and k < whole] + ([whole] if whole <= 128 else [])


def _slices(c: Contraction, t: WarpgroupTile) -> Iterator[WarpgroupTile]:
    """The tile with weights that stay, and with those of all rows of taps at a time, or of as many as fit."""
    rows = max(p.rows for p in taps_of(c))
    stay = replace(t, tap_rows=rows, stay=True)
    if shared_bytes(c, stay) <= MOST_SHARED:
        yield stay
    if chunks(c, t) == 1 and shared_bytes(c, stay) <= MOST_SHARED // 2:
        return
    for tap_rows in dict.fromkeys((rows, gcd(rows, max(len(p.taps) for p in c.axes[1].phases)), 1)):
        cut = replace(t, tap_rows=tap_rows, stay=False)
        if shared_bytes(c, cut) <= MOST_SHARED:
            yield cut
            return


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


# Fitted to the kernels of benchmarks/results/h200_warpgroups.json: cycles of a step, of a round of its staging and
# of a warp's part in that; of one accumulator's way through what follows; bytes per cycle that one multiprocessor gets
# from the level-2 cache.
STEP, ROUND, STAGED_BY_WARP, VALUE, STREAMED = 900.0, 400.0, 12.4, 5.6, 14.0


def _score(c: Contraction, t: WarpgroupTile, lengths: tuple[int, int, int]) -> float | None:
    """Estimated cycles of one multiprocessor per useful cell and output channel, `None` where it does not fit."""
    if any(len(p.elements) % r for a, r in zip(c.axes[:2], (t.rows_d, t.rows_h), strict=True) for p in a.phases):
        return None
    per_sm = blocks_per_sm(c, t, shared_bytes(c, t))
    lay = staged(c, t)
    if lay.reach > MOST_INDICES or per_sm < 1 or positions(c, t) > 256:
        return None
    share = prod(n / (walk.tiles(n, k) * k) for walk, n, k in zip(lay.walks, lengths, t.cells, strict=True))
    useful = prod(t.cells) * share * c.features / ceil(c.features / t.block_m)
    return _cycles(c, t, per_sm) / useful


def _cycles(c: Contraction, t: WarpgroupTile, per_sm: int) -> float:
    """Estimated cycles of one multiprocessor per tile of a block: one after the other, as far as other blocks do not
    fill the gaps."""
    lay, count, n = staged(c, t), chunks(c, t), positions(c, t)
    every = list(product(*(a.phases for a in c.axes)))
    pieces = [_pieces(phases, t) for phases in every]
    instructions = steps = weights = 0
    for times, taps, phases, vectors in zip(pieces, taps_of(c), every, weight_vectors(c, t), strict=True):
        rows = t.cells_d * t.rows_d * (t.rows_h * t.cells_h // rows_at_once(c, t)) * len(phases[2].elements)
        instructions += times * taps.rows * taps.per_row * (lay.vectors // 2) * rows * t.m_tiles
        steps += times * ceil(taps.rows / t.tap_rows)
        weights += 0 if t.stay else times * vectors
    # An instruction reads 64 rows of 8 weights and its positions at 128 bytes per cycle, and multiplies 2 a cycle.
    multiplied = instructions * count * (t.warps / 4) * max(n / 2, 16 + n / 4)
    refills = count * sum(pieces) if count > 1 else 1
    x = lay.vectors * prod(lay.lengths)
    rounds = ceil(x / (32 * t.warps)) * refills
    streamed = 16 * (x * refills + weights * count) / STREAMED
    values = VALUE * accumulators(c, t) * sum(pieces) * t.warps
    serial = multiplied + STEP * steps * count + (ROUND + STAGED_BY_WARP * t.warps) * rounds + values
    return max(multiplied, streamed, serial / per_sm)


def _pieces(phases: tuple[Phase, ...], t: WarpgroupTile) -> int:
    """How often a phase of a tile is gone through."""
    d, h = (len(p.elements) // r for p, r in zip(phases[:2], (t.rows_d, t.rows_h), strict=True))
    return d * h
