"""How a contraction group is cut into tiles: what a warp holds in registers, a block in shared memory.

A warp multiplies `m_tiles` 16-channel tiles by 8-position tiles of ``cells_d x cells_h x 4*cells_w`` cells; a block has
``warps_m`` x ``warps_h`` x ``warps_w`` warps, side by side over channels, rows and columns.  The choice minimises an
estimate of the busiest pipe per useful multiplication; nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

from fusewright.schedule.contraction import Axis, Contraction, Phase

# Registers a thread may spend on accumulators and on weights held throughout, and bytes of shared memory per block,
# so that two blocks share a multiprocessor (228 KB of shared memory, 65536 registers).
ACCUMULATORS = 96
HELD_WEIGHTS = 80
SHARED = 110 * 1024
# One block per multiprocessor where two do not fit.
MOST_SHARED = 220 * 1024
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Tiling:
    """See the module's text; `rows` elements of a cell per phase are computed at a time along d and h.

    chunk   input channels staged at a time
    together_d, together_h   all taps along d, h are in registers at once, so that an input row read from shared memory
            once serves every tap that leads from it to a row of the warp
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

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_h * self.warps_w

    @property
    def block_m(self) -> int:
        """Output channels of a block."""
        return 16 * self.m_tiles * self.warps_m

    @property
    def cells(self) -> tuple[int, int, int]:
        """Cells of a block along d, h, w."""
        return self.cells_d, self.cells_h * self.warps_h, 4 * self.cells_w * self.warps_w


def span(axis: Axis, cells: int) -> int:
    """Input indices that `cells` neighbouring cells read along one dimension."""
    low, high = axis.reach()
    return (cells - 1) * axis.advance + high - low + 1


def elements(axis: Axis) -> int:
    """The most positions of one cell that one phase holds."""
    return max(len(p.elements) for p in axis.phases)


def candidates(c: Contraction, lengths: tuple[int, int, int], element_bytes: int) -> list[Tiling]:
    """Tilings that fit, best estimate first; `lengths` are the cells of the whole output along d, h, w."""
    scored = [(score, t) for t in _all(c, lengths) if (score := _score(c, t, lengths, element_bytes)) is not None]
    return [t for _, t in sorted(scored, key=lambda pair: pair[0])]


def shortlist(c: Contraction, lengths: tuple[int, int, int], element_bytes: int, count: int) -> list[Tiling]:
    """The best `count` candidates that differ in more than how warps lie side by side."""
    found: dict[tuple[int, ...], Tiling] = {}
    for t in candidates(c, lengths, element_bytes):
        rows = (t.rows_d * t.cells_d, t.rows_h * t.cells_h, t.cells_w)
        together = (t.together_d, t.together_h)
        found.setdefault((t.m_tiles, t.warps_m, t.warps, t.chunk, *rows, *together), t)
        if len(found) == count:
            break
    return list(found.values())


def _all(c: Contraction, lengths: tuple[int, int, int]) -> Iterator[Tiling]:
    m16 = ceil(c.features / 16)
    d, h, w = (elements(a) for a in c.axes)
    pooled = c.window is not None
    for m_tiles, warps_m in product((1, 2, 3, 4, 5), (1, 2, 4, 5, 8)):
        whole = m_tiles * warps_m >= m16
        if (c.over_channels and not whole) or m_tiles * warps_m > 2 * m16 or (m16 % (m_tiles * warps_m) and not whole):
            continue
        if whole and (m_tiles * warps_m - m16) * 4 > m16:
            continue
        for cells_w, cells_h, cells_d in product((1, 2, 4, 8), (1, 2, 4), (1, 2)):
            if cells_w * w % 2 or (pooled and (cells_d > 1 or cells_h > 2)) or cells_d > lengths[0]:
                continue
            if cells_h > lengths[1] or 4 * cells_w >= 2 * lengths[2] + 7:
                continue
            for rows_d, rows_h in product(_divisors(d), _divisors(h)):
                if not pooled and (rows_d < d or rows_h < h):
                    continue
                if (cells_d > 1 and rows_d < d) or (cells_h > 1 and rows_h < h):
                    continue
                if m_tiles * cells_d * cells_h * rows_d * rows_h * cells_w * w // 2 * 4 > ACCUMULATORS:
                    continue
                several_d, several_h = c.axes[0].taps > 1 and c.box is None, c.axes[1].taps > 1 and c.box is None
                together = [
                    (a, b) for a in {False, several_d} for b in {False, several_h} if b or not a or not several_h
                ]
                for warps_w, warps_h in product((1, 2, 4, 8), (1, 2, 4, 8)):
                    if not 4 <= warps_m * warps_w * warps_h <= 16:
                        continue
                    for chunk, (td, th) in product(_chunks(c.channels), together):
                        yield Tiling(
                            m_tiles, warps_m, warps_h, warps_w, cells_d, cells_h, cells_w, rows_d, rows_h,
                            chunk, td, th,
                        )  # fmt: skip


def _chunks(channels: int) -> list[int]:
    return [k for k in (4, 8, 16, 32, 64) if k < channels] + [channels]


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def shared_elements(c: Contraction, t: Tiling) -> tuple[int, int]:
    """Elements of the input tile and of the weights in shared memory, roughly (rows are padded later)."""
    if c.box is not None:
        k = c.channels * prod(a.taps for a in c.axes)
        return k * (prod(t.cells) + 8), t.block_m * (k + 4)
    d, h, w = (span(a, n) for a, n in zip(c.axes, t.cells, strict=True))
    taps = prod(a.taps for a in c.axes)
    return t.chunk * (d * h * (w + 7) + 16), t.block_m * (t.chunk * taps + 4)


def _score(c: Contraction, t: Tiling, lengths: tuple[int, int, int], element_bytes: int) -> float | None:
    """Estimated cycles per useful cell of one multiprocessor, `None` where it does not fit."""
    tile, weights = shared_elements(c, t)
    shared = (tile + weights) * element_bytes
    if shared > MOST_SHARED:
        return None
    rows = zip(c.axes[:2], (t.rows_d, t.rows_h), strict=True)
    if any(len(p.elements) % r for a, r in rows for p in a.phases):
        return None
    if any(t.cells_w * len(p.elements) % 2 for p in c.axes[2].phases):
        return None
    steps, loads, held = _work(c, t)
    if held > HELD_WEIGHTS:
        return None
    chunks = ceil(c.channels / t.chunk) if c.box is None else 1
    pieces = prod(elements(a) // r for a, r in zip(c.axes[:2], (t.rows_d, t.rows_h), strict=True))
    refills = chunks * pieces if chunks > 1 else 1
    # Per block tile: tensor cores at 60% of one tile a cycle, shared memory at 32 words a cycle, and filling.
    mma = steps * chunks * t.warps / 0.6
    wide = element_bytes / 4
    reads = loads * chunks * t.warps * wide
    fill = (tile * refills + (weights * refills if chunks > 1 else 0)) * wide / 32 * 4
    per_sm = blocks_per_sm(c, t, shared)
    if per_sm < 1:
        return None
    overlap = 0.0 if per_sm >= 3 else 0.35 if per_sm == 2 else 1.0
    longest, total = max(mma, reads, fill), mma + reads + fill
    useful = prod(n / (ceil(n / k) * k) for n, k in zip(lengths, t.cells, strict=True))
    useful *= c.features / (ceil(c.features / t.block_m) * t.block_m)
    few_warps = max(1.0, 8 / (per_sm * t.warps))
    return (longest + overlap * (total - longest)) * few_warps / (prod(t.cells) * t.block_m * useful)


def blocks_per_sm(c: Contraction, t: Tiling, shared: int) -> int:
    """Blocks that share a multiprocessor: by shared memory (in bytes per block), threads and registers."""
    threads = 32 * t.warps
    return min(4, (MOST_SHARED + 7168) // (shared + 1024), 2048 // threads, 65536 // (threads * registers(c, t)))


def registers(c: Contraction, t: Tiling) -> int:
    """An estimate of a thread's registers, rounded up to what hardware hands out."""
    own = t.cells_d * t.cells_h * t.cells_w
    count = 44 + own * t.rows_d * t.rows_h * elements(c.axes[2]) * t.m_tiles * 2
    count += _work(c, t)[2] + 4
    count += 2 * t.m_tiles * (1 + len(c.operands))
    if c.window is not None:
        count += own * t.m_tiles * 2
    if c.over_positions and not c.over_channels:
        count += 6 * t.m_tiles
    wide = 2 if c.x.dtype.itemsize == 8 else 1
    return min(255, -(-count * wide // 8) * 8)


def _work(c: Contraction, t: Tiling) -> tuple[int, float, int]:
    """Per warp and chunk: tile multiplications, words a lane reads from shared memory; and weights held at a time."""
    if c.box is not None:
        steps = ceil(c.channels * prod(a.taps for a in c.axes) / 8)
        tiles = t.cells_d * t.cells_h * t.cells_w // 2
        return steps * t.m_tiles * tiles, steps * (2.0 * tiles + 4.0 * t.m_tiles), 4 * t.m_tiles
    count, loads, held = 0, 0.0, 0
    for phases in product(*(a.phases for a in c.axes)):
        td, th, tw = (len(p.taps) for p in phases)
        steps = ceil(t.chunk * tw / 8)
        tiles = max(1, t.cells_w * len(phases[2].elements) // 2)
        pieces = prod(ceil(len(p.elements) / r) for p, r in zip(phases[:2], (t.rows_d, t.rows_h), strict=True))
        patch = t.cells_d * t.cells_h * t.rows_d * t.rows_h
        count += pieces * td * th * steps * patch * tiles * t.m_tiles
        read_d = _distinct(c.axes[0], phases[0], t.cells_d, t.rows_d) if t.together_d else td * t.cells_d * t.rows_d
        read_h = _distinct(c.axes[1], phases[1], t.cells_h, t.rows_h) if t.together_h else th * t.cells_h * t.rows_h
        loads += pieces * steps * (2.0 * tiles * read_d * read_h + 4.0 * t.m_tiles * td * th)
        held = max(held, (td if t.together_d else 1) * (th if t.together_h else 1) * t.m_tiles * 4)
    return count, loads, held


def _distinct(axis: Axis, phase: Phase, cells: int, rows: int) -> int:
    """Input rows along one dimension that `rows` rows of `cells` cells read."""
    return len({
        i * axis.advance + j * phase.per_element + u * phase.per_tap
        for i in range(cells) for j in range(rows) for u in range(len(phase.taps))
    })  # fmt: skip
