"""What both ways to cut a contraction group for the tensor cores of Hopper share: how operands are staged in shared
memory (`warpgroup_estimate` says what a tile costs).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import Self, TypeVar

import torch

from fusewright.schedule.contraction import Contraction, Unfolded, remembered
from fusewright.schedule.output_rows import Team
from fusewright.schedule.residues import Walks, walks
from fusewright.schedule.tiling import span
from fusewright.schedule.warpgroup_pairs import multiplied_vectors

# Numbers of the accumulators that a thread may hold.
ACCUMULATORS = 160
# Registers that a thread may have.
MOST_REGISTERS = 240
# More of them where operands become halves, for what is watched, and for two numbers at a time.
WATCHING = 4
# Input indices along one dimension of a tile, which are packed into eight bits each, as are its channels.
MOST_INDICES = 256
# Vectors of channels that are staged at a time, where all of them are: as many as indices of eight bits have channels.
MOST_VECTORS = 32
# Warpgroups of a block.
GROUPS = (1, 2, 3, 4)
# Warps that stage together, where others multiply.
TEAM = 4
# Rows wait in registers where an instruction's share of reading them is as small: with larger ones, and waits for rows,
# tiles of benchmarks/results/h200_held_rows.json were as fast as without.
HELD_SHARE = 0.4


@dataclass(frozen=True)
class Products:
    """What a warpgroup multiplies per tap, two vectors of channels and element of a cell along w: so many instructions,
    each of 64 rows and so many columns.  Accumulators are those of a thread, for all elements.

    Where rows wait in registers, an instruction has a share `rows` of what is read for it, and so often, `readings`,
    some are waited for, for all elements.
    """

    instructions: int
    columns: int
    accumulators: int
    rows: float = 1.0
    readings: float = 0.0

    @property
    def cycles(self) -> float:
        """Of the tensor cores, for an instruction: it reads 64 rows of 32 bytes and its columns at 128 bytes per cycle,
        and multiplies two columns."""
        return max(self.columns / 2, 16 * self.rows + self.columns / 4)


@dataclass(frozen=True)
class WarpgroupCut:
    """What every tile says.

    rows_d, rows_h   elements of a cell that are computed at a time along d and h
    chunk     input channels staged at a time
    tap_rows  rows of the kernel whose weights are staged at a time
    stay      whether a block stages all its weights once instead
    joined    dimensions, counted from the last, whose phases are multiplied in one pass over the input
    unfolded  the dimension, d or h, whose taps are channels, if any: few of the rows that they read are staged at once;
              D, H or W where channels of taps lie side by side in vectors
    by_rows   whether rows of the output are written by way of shared memory (`fusewright.schedule.output_rows`)
    producers  warps that only stage, one or two teams of them; without any, those that multiply do
    held      whether the rows that instructions multiply are in registers, read once for several of them
    twice     whether a producer has twice as many elements on their way, where registers are left for them
    halves    whether float32 operands are multiplied as float16, which take half the room and half the time
    """

    rows_d: int
    rows_h: int
    chunk: int
    tap_rows: int
    stay: bool
    joined: int
    unfolded: str = field(default="", kw_only=True)
    by_rows: bool = field(default=False, kw_only=True)
    producers: int = field(default=0, kw_only=True)
    held: bool = field(default=False, kw_only=True)
    twice: bool = field(default=False, kw_only=True)
    halves: bool = field(default=False, kw_only=True)

    @property
    @abstractmethod
    def warps(self) -> int:
        """Of a block, that multiply."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + self.producers)

    @property
    def staging_threads(self) -> int:
        """Those of a block that stage together: producers take turns."""
        return 32 * (TEAM if self.producers else self.warps)

    @property
    @abstractmethod
    def warps_m(self) -> int:
        """Warps with features of their own."""

    @property
    @abstractmethod
    def warps_h(self) -> int:
        """Warps with rows of cells of their own."""

    @property
    @abstractmethod
    def warps_w(self) -> int:
        """Warps with columns of cells of their own."""

    @property
    @abstractmethod
    def block_m(self) -> int:
        """Output channels of a block."""

    @property
    @abstractmethod
    def cells_of_lane(self) -> int:
        """Cells side by side along w that a lane has of an instruction's."""

    @property
    @abstractmethod
    def cells(self) -> tuple[int, int, int]:
        """Cells of a block along d, h, w."""

    @property
    def region(self) -> tuple[int, int, int]:
        """What of the group's axes is computed and staged for: the same, unless cells are windows of those."""
        return self.cells

    def of(self, c: Contraction) -> Contraction:
        """The group as this kind of tile has it."""
        return c

    @property
    @abstractmethod
    def team(self) -> Team:
        """Warps with positions of a row side by side."""

    def by_rows_of_phases(self, c: Contraction) -> Self | None:
        """The tile that writes rows by way of shared memory where phases along w share a pass, if it is faster."""
        return None

    @abstractmethod
    def products(self, c: Contraction) -> Products:
        """What a warpgroup multiplies."""

    def in_turn(self, taps: Taps) -> Taps:
        """Those of a phase that are multiplied one after the other."""
        return taps

    @property
    def slabs(self) -> int:
        """Slabs of a tile's input, one staged after the other, where sums are carried along d."""
        return 1

    @property
    def whole_cells(self) -> bool:
        """Whether the inputs of the last cell of a row are all staged, rather than those that its taps reach."""
        return False

    @property
    def weights_m(self) -> int:
        """Weights of a row of taps and a channel that are multiplied at a time: of one of its taps in turn."""
        return self.block_m

    @property
    def lands(self) -> bool:
        """Whether a step's operands are not there as soon as a block's threads meet."""
        return self.producers > 0 or not self.stay

    @abstractmethod
    def registers(self, c: Contraction) -> int:
        """An estimate of a thread's registers."""

    def fits(self, c: Contraction) -> bool:
        """Whether a thread can have those that it takes, of kinds whose tiles are tried without having been asked."""
        return True

    @abstractmethod
    def own_bytes(self, c: Contraction) -> int:
        """Bytes of shared memory behind what is staged."""

    @property
    @abstractmethod
    def traits(self) -> tuple[object, ...]:
        """In what tiles are alike that are hardly worth measuring both."""


def unfoldings(c: Contraction) -> list[tuple[str, Contraction]]:
    """The group as it is, and with the taps of the first dimension that has several as channels, in vectors of their
    own or side by side, which few channels fill: with the name of that, or none.  Those along w are neighbours in
    shared memory as they are, so that only the latter is of use."""
    first = 0 if c.carried is None else 1  # along d there are planes in the place of taps
    dim = next((i for i in range(first, 3) if c.axes[i].taps > 1), first)
    (phase, *others), axes = c.axes[dim].phases, list(c.axes)
    if others or len(phase.taps) < 2:
        return [("", c)]
    one = replace(phase, taps=phase.taps[:1])
    axes[dim] = replace(c.axes[dim], phases=(one,))
    channels = ceil(c.channels / vector(c)) * vector(c)
    own = Unfolded(dim, len(phase.taps), phase.per_tap, phase.taps[1] - phase.taps[0], channels)
    whole = replace(c, axes=(axes[0], axes[1], axes[2]), unfolded=own)
    dense = replace(whole, unfolded=replace(own, channels=c.channels_of_x, dense=True))
    fewer = ceil(dense.channels / vector(c)) < whole.channels // vector(c)
    readable = c.x.dtype.itemsize == 4 and not c.channels_last
    found = [("", c), *([("dh"[dim], whole)] if dim < 2 else [])]
    return [*found, ("DHW"[dim], dense)] if fewer and readable else found


@remembered
def in_halves(c: Contraction) -> Contraction:
    """The float32 group with operands that are multiplied as float16."""
    return replace(c, halves=True)


def of_tile(c: Contraction, t: WarpgroupCut) -> Contraction:
    """The group as a tile has it."""
    if c.unfolded is not None:
        return c
    return dict(unfoldings(t.of(in_halves(c) if t.halves else c)))[t.unfolded]


Tile = TypeVar("Tile", bound=WarpgroupCut)


def vector(c: Contraction) -> int:
    """Channels that lie side by side: 16 bytes of them."""
    return 16 // c.multiplied.itemsize


def vector_bytes(c: Contraction) -> int:
    """Bytes that as many channels are in memory."""
    return vector(c) * c.x.dtype.itemsize


def step(c: Contraction) -> int:
    """Channels that one instruction multiplies."""
    return 2 * vector(c)


def multiplies(c: Contraction, *, tf32: bool) -> bool:
    """Whether these tensor cores multiply elements of the input's type: half precisions, float32 that may be tf32."""
    return c.x.dtype in (torch.float16, torch.bfloat16) or (c.x.dtype == torch.float32 and tf32)


def takes(c: Contraction, *, tf32: bool) -> bool:
    """Whether the operands of a group may be what these tensor cores multiply, and lie as this family reads them.

    Window sums are multiplied from registers (`warpgroup_windows`).
    """
    if not multiplies(c, tf32=tf32) or c.box is not None:
        return False
    return any(p.rows * p.per_row for p in taps_of(c))  # a pool may leave only positions that no tap reaches


def takes_halves(c: Contraction, *, tf32: bool) -> bool:
    """Whether operands of a group that may be rounded to tf32 may be halves as well."""
    return takes(c, tf32=tf32) and c.x.dtype == torch.float32


@dataclass(frozen=True)
class Words:
    """Rows of elements of two bytes, read as words of four: a thread has two neighbours of each channel.

    before   elements of the first word that are before the tile's row: words begin at even elements
    count    words of a row
    """

    before: int
    count: int


@dataclass(frozen=True)
class Staged:
    """One chunk of the input in shared memory, as [vector of channels][d][h][w % advance][w / advance][channel].

    lengths   input rows along d, h, and indices along w; `walks` say which rows
    pitch     columns, which are vectors, from one residue w % advance to the next: neighbours spread over the banks
    row       columns of a row
    plane     columns of a vector of channels: an odd number, so that vectors of one column spread over the banks
    vectors   of channels
    words     that rows are read as, where all rows of the input are of whole ones and neighbours stay neighbours
    """

    lengths: tuple[int, int, int]
    pitch: int
    row: int
    advance: int
    plane: int
    vectors: int
    walks: Walks
    words: Words | None

    @property
    def reach(self) -> int:
        """The most input indices from the first to the last along a dimension."""
        return max((n - 1) * walk.step + 1 for walk, n in zip(self.walks, self.lengths, strict=True))

    @property
    def columns(self) -> int:
        """How often a thread finds a column of a vector, or two that are one word."""
        d, h, w = self.lengths
        return d * h * (self.words.count if self.words else w)

    def column(self, w: int) -> int:
        return w % self.advance * self.pitch + w // self.advance


def staged(c: Contraction, t: WarpgroupCut) -> Staged:
    """How the input of a tile is staged."""
    return _staged(c, t.region, chunk_vectors(c, t), t.whole_cells, t.cells[2])


def chunk_vectors(c: Contraction, t: WarpgroupCut) -> int:
    """Vectors of channels that are staged at a time."""
    return t.chunk // vector(c)


@remembered
def _staged(c: Contraction, cells: tuple[int, int, int], vectors: int, whole_cells: bool, apart: int) -> Staged:
    along = walks(c, cells)
    d, h, w = (span(walk.staged, n) for walk, n in zip(along, cells, strict=True))
    advance = c.axes[2].advance
    w = ceil(w / advance) * advance if whole_cells else w
    pitch = _pitch(w, advance)
    row = (advance - 1) * pitch + ceil(w / advance)
    plane = d * h * row
    words = _words(c, w, apart) if advance == 1 else None
    return Staged((d, h, w), pitch, row, advance, plane + 1 - plane % 2, vectors, along, words)


def _words(c: Contraction, columns: int, apart: int) -> Words | None:
    """The words of so many columns, of tiles that begin so many cells apart."""
    length = c.x.shape[-1]
    if c.x.dtype.itemsize != 2 or c.channels_last or not isinstance(length, int) or length % 2:
        return None
    low, advance = c.reads(2)
    whole = advance * apart % 2 == 0 and columns + low % 2 <= MOST_INDICES
    return Words(low % 2, ceil((columns + low % 2) / 2)) if whole else None


# Vectors of 16 bytes in all banks, which as many lanes write at once.
BANKS = 8
# What a row twice as long costs, in turns that a store takes.
LONGER = 2.0


@lru_cache(maxsize=4096)
def _pitch(w: int, advance: int) -> int:
    """Columns from one residue to the next in rows of `w` indices: such that threads that write neighbours along w
    hardly meet in a bank, and rows are hardly longer."""
    least = ceil(w / advance)
    cost = {
        pitch: _turns(w, advance, pitch) + LONGER * (advance - 1) * (pitch - least) / (advance * least)
        for pitch in range(least, least + BANKS)
    }
    return min(cost, key=cost.__getitem__)


def _turns(w: int, advance: int, pitch: int) -> float:
    """How often shared memory is written to, on average, for one store of eight neighbours in rows of `w` indices."""
    row = (advance - 1) * pitch + ceil(w / advance)
    banks = [(y * row + x % advance * pitch + x // advance) % BANKS for y in range(BANKS) for x in range(w)]
    stores = [banks[i : i + BANKS] for i in range(0, len(banks), BANKS)]
    return sum(max(map(store.count, store)) for store in stores) / len(stores)


def run(c: Contraction, t: WarpgroupCut) -> int:
    """Vectors of a column that a thread reads one after the other, having found the first: those that an instruction
    multiplies, where channels lie in planes (where they come last, they are other threads').  Of an odd number of them
    three, or two, and the last one alone."""
    if c.channels_last:
        return 1
    if c.unfolded is not None and c.unfolded.channels % t.chunk:  # of several taps, which lie elsewhere each
        return 2 if c.unfolded.channels % step(c) == 0 else 1
    vectors = t.chunk // vector(c)
    return 3 if vectors % 6 == 3 else min(2, vectors)


# What a thread reads before it writes it to shared memory, each in a register: vectors that lie in memory as they are,
# or elements.
AHEAD, AHEAD_ELEMENTS = 6, 24
# The same of threads that do nothing else.
PRODUCED, PRODUCED_ELEMENTS = 12, 48


def vectors_by_thread(c: Contraction, t: WarpgroupCut) -> tuple[int, int]:
    """Vectors of a tile that a thread would stage, were they no runs, and how many of them would be on their way at a
    time: what the estimates of registers were fitted to."""
    return (0, 0) if t.producers else _dealt(c, t, 1, AHEAD)


def staged_by_thread(c: Contraction, t: WarpgroupCut) -> tuple[int, int]:
    """Runs of a tile that a thread stages, and how many of them are on their way at a time."""
    whole, elements = (PRODUCED, PRODUCED_ELEMENTS) if t.producers else (AHEAD, AHEAD_ELEMENTS)
    times = 2 if t.twice else 1
    most = (
        max(1, times * whole * 16 // vector_bytes(c))
        if c.channels_last
        else max(1, times * elements // (run(c, t) * vector(c)))
    )
    return _dealt(c, t, run(c, t), most)


def _dealt(c: Contraction, t: WarpgroupCut, vectors: int, most: int) -> tuple[int, int]:
    """A tile's columns, so many vectors of each at a time: what a thread gets of them, and in one of its rounds, which
    have `most` at most."""
    lay = staged(c, t)
    each = ceil(ceil(lay.vectors / vectors) * lay.columns / t.staging_threads)
    return each, ceil(each / ceil(each / most))


@dataclass(frozen=True)
class Taps:
    """The taps of one phase: `rows` rows of a kernel, each of `per_row` taps along w."""

    rows: int
    per_row: int


@remembered
def taps_of(c: Contraction) -> list[Taps]:
    """Per phase, in the order they are computed."""
    phases = product(*(a.phases for a in c.axes))
    return [Taps(len(d.taps) * len(h.taps), len(w.taps)) for d, h, w in phases]


@remembered
def passes(c: Contraction, joined: int) -> list[range]:
    """The phases of each pass over the input, in the order they are computed."""
    counts = [len(a.phases) for a in c.axes]
    size = prod(counts[3 - joined :])
    return [range(i, i + size) for i in range(0, prod(counts), size)]


def joinable(c: Contraction, rows: tuple[int, int]) -> list[int]:
    """Over how many dimensions phases may be joined where so many rows of a cell are computed at a time along d, h."""
    whole = [all(len(p.elements) == n for p in a.phases) for a, n in zip(c.axes[:2], rows, strict=True)]
    different = {prod(len(a.phases) for a in c.axes[3 - n :]): n for n in (3, 2, 1, 0)}
    return sorted(n for n in different.values() if all(whole[3 - n :]))


def weight_vectors(c: Contraction, t: WarpgroupCut) -> list[int]:
    """Vectors of weights per phase, of all rows of taps and one chunk."""
    vectors = chunk_vectors(c, t)
    return [multiplied_vectors(c, vectors, taps, taps.rows) * t.weights_m for taps in map(t.in_turn, taps_of(c))]


def stages_every_step(c: Contraction, t: WarpgroupCut) -> bool:
    """Whether every step of a tile has an input of its own, so that two teams of producers may take turns."""
    steps = [max(ceil(taps_of(c)[i].rows / t.tap_rows) for i in each) for each in passes(c, t.joined)]
    if inputs(c, t) > 1:
        return max(steps) == 1
    rows = zip(c.axes[:2], (t.rows_d, t.rows_h), strict=True)
    return sum(steps) == 1 and all(len(p.elements) == n for a, n in rows for p in a.phases)


def takes_turns(c: Contraction, t: WarpgroupCut) -> bool:
    """Whether warpgroups multiply one after the other, each while others are at what follows: a tile is one step."""
    return t.producers > 0 and t.warps > TEAM and inputs(c, t) == 1 and stages_every_step(c, t)


def chunks(c: Contraction, t: WarpgroupCut) -> int:
    """Of the input's channels."""
    return ceil(c.channels / t.chunk)


def inputs(c: Contraction, t: WarpgroupCut) -> int:
    """What a pass over a tile stages of the input one after the other: chunks of channels, of every slab."""
    return chunks(c, t) * t.slabs


def slice_vectors(c: Contraction, t: WarpgroupCut) -> int:
    """Vectors of the weights that are staged at a time."""
    if t.stay:
        return sum(weight_vectors(c, t)) * chunks(c, t)
    vectors, taps = chunk_vectors(c, t), [t.in_turn(each) for each in taps_of(c)]
    each_phase = [multiplied_vectors(c, vectors, own, min(t.tap_rows, own.rows)) for own in taps]
    return max(sum(each_phase[i] for i in each) for each in passes(c, t.joined)) * t.weights_m


def staged_bytes(c: Contraction, t: WarpgroupCut) -> int:
    """Bytes of shared memory: two tiles of the input, weights, twice where they do not stay, landings of both halves,
    and of weights that are copied."""
    x, weights = chunk_vectors(c, t) * staged(c, t).plane, slice_vectors(c, t)
    return 16 * (2 * x + (weights if t.stay else 2 * weights) + t.lands + copies_weights(c, t))


def copies_weights(c: Contraction, t: WarpgroupCut) -> bool:
    """Whether weights that stay are laid out by a launch beforehand, and copied, as those that do not stay are: where
    a kernel is several launches anyway."""
    return t.stay and c.halves


def shared_bytes(c: Contraction, t: WarpgroupCut) -> int:
    """Bytes of shared memory while a block's tiles are computed."""
    return staged_bytes(c, t) + t.own_bytes(c)


def two_by_two(c: Contraction, t: WarpgroupCut) -> bool:
    """Whether all vectors of a chunk go two by two into instructions, tap by tap."""
    return t.chunk // vector(c) % 2 == 0


def phases_side_by_side(c: Contraction, t: WarpgroupCut) -> int:
    """How many phases there are along w where each has one position of a cell, neighbours in the output, all of which
    one pass computes and writes; 0 where none are so."""
    w, count = c.axes[2], len(c.axes[2].phases)
    each = [p.elements for p in w.phases] == [(i,) for i in range(count)] and (w.stride, w.start) == (count, 0)
    written = c.fold is None and c.window is None and not c.writes_last
    return count if count > 1 and each and written and t.joined else 0


def couples(c: Contraction, t: WarpgroupCut) -> bool:
    """Whether positions of phases are written as neighbours: of two from registers, of more from shared memory."""
    return phases_side_by_side(c, t) == 2 or (phases_side_by_side(c, t) > 2 and t.by_rows)
