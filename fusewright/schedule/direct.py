"""How a contraction group is cut where there is little to multiply: no tensor cores, values straight from threads.

A block computes the convolution at a box of positions, as many as `cells` cells need along each dimension.  A thread
computes `features` features at `planes` x `rows` x `run` positions side by side; `teams` groups of threads share the
positions and differ in features.  Pooling windows are folded from shared memory, so that they may overlap and be of any
size.

Shared memory delivers a quarter of the numbers that multiplications take.  So what a thread reads has to serve several
of its positions: a row of the input those along w, and with all weights of a few planes or rows at hand also those
along d or h that it leads to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil, gcd, inf, prod

from fusewright.schedule.axes import Axis, Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.residues import Walk, Walks, walk

# Bytes of shared memory up to which all weights of a block stay there.
WEIGHTS_STAY = 48 * 1024
# Windows of more elements are folded one dimension after the other, and a thread folds so many neighbours at once.
AT_ONCE, NEIGHBOURS = 9, 4

# Positions along d, h, w that a thread has side by side.
Own = tuple[int, int, int]


@dataclass(frozen=True)
class DirectTile:
    """See the module's text; `chunk` input channels are staged at a time, into one of so many `buffers`: some of a
    group's, or all those of several groups.

    With `together` the weights of all taps along dimensions of which a thread has several positions are in registers at
    once, so that an input row is read once for all of those.
    """

    features: int
    teams: int
    planes: int
    rows: int
    run: int
    cells_d: int
    cells_h: int
    cells_w: int
    chunk: int
    together: bool
    buffers: int

    @property
    def cells(self) -> tuple[int, int, int]:
        return self.cells_d, self.cells_h, self.cells_w

    @property
    def own(self) -> Own:
        """Positions of a thread along d, h, w."""
        return self.planes, self.rows, self.run


@dataclass(frozen=True)
class Side:
    """One dimension of a block's box, in staged rows; along w those are input indices.

    period     `period_of` the axis; `per_unit` of a phase's positions belong to one thread, side by side
    units      threads along this dimension
    low        first row that is staged for cell 0; `length` rows are
    walk       which cells and input rows they are; `begin` is the input index of row 0
    """

    axis: Axis
    period: int
    per_unit: int
    units: int
    low: int
    length: int
    walk: Walk
    begin: int = 0

    @property
    def first_index(self) -> int:
        """First input index that is staged for cell 0."""
        return self.begin + self.low * self.walk.step

    @property
    def positions(self) -> int:
        """Positions that are computed: what the cells need, rounded up to whole threads."""
        return self.units * self.per_unit * self.period

    @property
    def per_element(self) -> int:
        """Input indices from one of a phase's positions to the next."""
        return self.axis.phases[0].per_element

    def first(self, phase: Phase) -> int:
        """Least staged index that the first position of `phase` reads."""
        return phase.first + min(0, (len(phase.taps) - 1) * phase.per_tap) - self.low

    def reach(self, phase: Phase) -> int:
        """Input indices that one thread's positions read."""
        taps = max(0, len(phase.taps) - 1)
        return (self.per_unit - 1) * self.per_element + taps * abs(phase.per_tap) + 1


def period_of(axis: Axis) -> int:
    """Positions between two that a phase computes."""
    return axis.stride * axis.together * axis.phases[0].per_element // axis.advance


def undivided(axis: Axis) -> int:
    """Positions side by side of which windows have all or none."""
    return gcd(axis.cell, axis.stride) if period_of(axis) == 1 else 1


@lru_cache(maxsize=4096)
def side(axis: Axis, cells: int, per_unit: int, align: int = 1) -> Side:
    """The box along one dimension; reads are of `align` elements, from multiples of that many."""
    period = period_of(axis)
    wanted = (cells - 1) * axis.stride + axis.cell
    units = ceil(ceil(wanted / period) / per_unit)
    found = Side(axis, period, per_unit, units, 0, 0, Walk(1, 1, axis))
    used = [p for p in axis.phases if p.taps] or list(axis.phases)
    low = min(found.first(p) for p in used) // align * align
    found = replace(found, low=low)
    last = (units - 1) * per_unit * found.per_element
    ends = (
        found.first(p) // align * align + ceil((found.first(p) % align + found.reach(p)) / align) * align for p in used
    )
    return replace(found, length=last + max(ends))


@lru_cache(maxsize=4096)
def _walked(axis: Axis, cells: int, per_unit: int) -> Side:
    """The box along d or h, of the cells and rows that a tile has there."""
    way = walk(axis, ceil(cells / per_unit) * per_unit)
    return replace(side(way.staged, cells, per_unit), walk=way, begin=axis.reach()[0])


@dataclass(frozen=True)
class Box:
    """A block's box of positions and the input it stages, rows `pitch` elements apart.

    A thread reads `vector` elements at once, for which a warp takes `turns`; a team has `unit_threads` threads.
    """

    cells: tuple[int, int, int]
    sides: tuple[Side, Side, Side]
    vector: int
    pitch: int
    turns: int
    unit_threads: int

    @property
    def plane(self) -> int:
        """Elements of one staged channel."""
        return self.sides[0].length * self.sides[1].length * self.pitch

    @property
    def positions(self) -> tuple[int, int, int]:
        d, h, w = (s.positions for s in self.sides)
        return d, h, w

    @property
    def walks(self) -> Walks:
        d, h, w = (s.walk for s in self.sides)
        return d, h, w

    @property
    def phases(self) -> list[tuple[Phase, Phase, Phase]]:
        """A phase per dimension, in the order they are computed."""
        d, h, w = (s.axis.phases for s in self.sides)
        return list(product(d, h, w))


def make_box(axes: tuple[Axis, Axis, Axis], cells: tuple[int, int, int], own: Own, size: int) -> Box:
    """The box of so many cells along d, h, w, of whose positions a thread has `own`; elements have `size` bytes."""
    whole = 16 // size
    vector = gcd(own[2] * axes[2].phases[0].per_element, whole)
    d, h = (_walked(axes[i], cells[i], own[i]) for i in (0, 1))
    w = side(axes[2], cells[2], own[2], vector)
    low = w.low // whole * whole
    w = replace(w, low=low, length=w.length + w.low - low)
    turns, pitch = _pitch(h, w, vector, size)
    threads = ceil(d.units * h.units * w.units / 32) * 32
    return Box(cells, (d, h, w), vector, pitch, turns, threads)


def _pitch(h: Side, w: Side, vector: int, size: int) -> tuple[int, int]:
    """Turns that a warp's read takes, and elements from row to row: whole 16-byte vectors, and such that lanes of two
    rows differ in their banks."""
    whole = 16 // size
    least = ceil(w.length / whole) * whole
    step, down = w.per_unit * w.per_element, h.per_unit * h.per_element
    if w.units >= 32:
        return _turns(32, 1, step, 0, vector, size), least
    rows = min(h.units, ceil(32 / w.units))
    pitches = range(least, least + 128 // size, whole)
    return min((_turns(w.units, rows, step, down * pitch % (128 // size), vector, size), pitch) for pitch in pitches)


@lru_cache(maxsize=65536)
def _turns(columns: int, rows: int, step: int, down: int, vector: int, size: int) -> int:
    """Turns that a warp's read of `vector` elements per lane takes: the most words that lanes want of one bank.  Lanes
    are `step` elements apart along a row of so many columns, rows `down` modulo the banks."""
    words: dict[int, set[int]] = {}
    for lane in range(32):
        row = lane // columns % rows
        start = (lane % columns * step + row * down) * size
        for byte in range(start, start + vector * size, 4):
            words.setdefault(byte // 4 % 32, set()).add(row << 20 | byte // 4)
    return max(map(len, words.values()))


@dataclass(frozen=True)
class Weights:
    """How the weights of one channel lie in shared memory: those that a thread has at hand at once side by side, as
    [team][residue][turn][d][h][w][feature], where d and h are of one extent or turns go through them.

    residues   taps along d, h, w from one to the next of a phase: those between belong to other phases
    taps       of a phase along d, h, w, at most
    together   along which of d, h, w all of them are at hand
    at_hand    weights that are; they are read `vector` at a time
    """

    teams: int
    residues: tuple[int, int, int]
    taps: tuple[int, int, int]
    together: tuple[bool, bool, bool]
    at_hand: int
    vector: int

    @cached_property
    def reads(self) -> int:
        """Vectors that a thread reads for a phase."""
        turns = prod(n for n, together in zip(self.taps, self.together, strict=True) if not together)
        return turns * ceil(self.at_hand / self.vector)

    @cached_property
    def count(self) -> int:
        """Weights with the gaps behind them."""
        return self.teams * prod(self.residues) * self.reads * self.vector


def weights_of(c: Contraction, features: int, teams: int, own: Own, *, together: bool) -> Weights:
    """The weights of so many features where a thread has `own` positions."""
    d, h, w = (_residues(a) for a in c.axes)
    taps = (ceil(c.axes[0].taps / d), ceil(c.axes[1].taps / h), ceil(c.axes[2].taps / w))
    flags = (together and own[0] > 1, together and own[1] > 1, True)
    at_hand = features * prod(n for n, flag in zip(taps, flags, strict=True) if flag)
    vector = min(16 // compute_bytes(c), 1 << (at_hand - 1).bit_length())
    return Weights(teams, (d, h, w), taps, flags, at_hand, vector)


def _residues(axis: Axis) -> int:
    steps = [p.taps[1] - p.taps[0] for p in axis.phases if len(p.taps) > 1]
    return steps[0] if steps else max(1, axis.taps)


@dataclass(frozen=True)
class Cut:
    """A group and how it is cut."""

    c: Contraction
    t: DirectTile
    box: Box
    weights: Weights

    @staticmethod
    def of(c: Contraction, t: DirectTile) -> Cut:
        box = make_box(c.axes, t.cells, t.own, c.x.dtype.itemsize)
        return Cut(c, t, box, weights_of(c, t.features, t.teams, t.own, together=t.together))

    @cached_property
    def taps(self) -> int:
        """Of one channel's kernel."""
        return prod(a.taps for a in self.c.axes)

    @property
    def block_m(self) -> int:
        """Features of a block."""
        return self.t.features * self.t.teams

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def warps_h(self) -> int:
        """Warps that share features and differ in positions."""
        return self.box.unit_threads // 32

    @property
    def warps_w(self) -> int:
        return 1

    @property
    def threads(self) -> int:
        return self.box.unit_threads * self.t.teams

    @property
    def o_blocks(self) -> int:
        """Blocks of features in a group."""
        return ceil(self.c.features / self.block_m)

    @property
    def chunks(self) -> int:
        return ceil(self.c.channels / self.t.chunk)

    @property
    def part(self) -> int:
        """Channels of a group that are staged at a time."""
        return min(self.t.chunk, self.c.channels)

    @property
    def at_once(self) -> int:
        """Groups whose channels are staged at a time."""
        return self.t.chunk // self.part

    @property
    def passes(self) -> int:
        """Blocks of features that one block goes through."""
        return self.c.op.groups * self.o_blocks if loops_over_groups(self.c) else 1

    @cached_property
    def values(self) -> int:
        """Values that a thread accumulates."""
        return self.t.features * prod(self.t.own) * prod(len(a.phases) for a in self.c.axes)

    @property
    def running_values(self) -> int:
        """Numbers of the running results that a thread has: of each of its positions, where it folds features."""
        return self.values // self.t.features * running_numbers(self.c) if folded_early(self.c) else 0

    @property
    def compute_bytes(self) -> int:
        return compute_bytes(self.c)

    @cached_property
    def weights_stay(self) -> bool:
        """Whether all weights that a block needs are in shared memory at once."""
        return self._all_weights * self.compute_bytes <= WEIGHTS_STAY

    @property
    def _all_weights(self) -> int:
        return self.passes * self.chunks * self.part * self.weights.count

    @cached_property
    def x_elements(self) -> int:
        """Of one staged chunk of channels."""
        return ceil(self.t.chunk * self.box.plane / 8) * 8

    @cached_property
    def w_elements(self) -> int:
        """Of all staged weights: a chunk per buffer where they do not stay."""
        count = self._all_weights if self.weights_stay else self.t.buffers * self.t.chunk * self.weights.count
        return ceil(count / 8) * 8

    @cached_property
    def owned(self) -> tuple[int, int, int]:
        """Positions along d, h, w that a thread folds itself: of which windows have all or none."""
        if self.c.window is None:
            return 1, 1, 1
        d, h, w = (gcd(s.per_unit, undivided(s.axis)) for s in self.box.sides)
        return d, h, w

    @cached_property
    def extents(self) -> tuple[int, int, int]:
        """Of what threads leave to others, along d, h, w."""
        d, h, w = (n // own for n, own in zip(self.box.positions, self.owned, strict=True))
        return d, h, w

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Of what threads leave to others, the size of windows along d, h, w, and how far they are apart."""
        return tuple((a.cell // own, a.stride // own) for a, own in zip(self.c.axes, self.owned, strict=True))

    @cached_property
    def window_passes(self) -> tuple[int, ...]:
        """Dimensions along which windows are folded beforehand, one after the other; the rest is folded at once.

        First those that leave the least to the others, for what they read.
        """
        if self.c.window is None or prod(size for size, _ in self.windows) <= AT_ONCE:
            return ()
        wide = [i for i, (size, _) in enumerate(self.windows) if size > 1]
        return tuple(sorted(wide, key=self._read_for)[:-1])

    def _read_for(self, i: int) -> float:
        """What windows along dimension `i` read for what they leave less to the others."""
        size, apart = self.windows[i]
        return size / (apart - 1) if apart > 1 else inf

    def neighbours(self, i: int) -> int:
        """Windows that a thread folds at once along dimension `i`, where they overlap: what all of them have is joined
        once.  Along w lanes read an odd number of windows apart, for the banks' sake."""
        size, apart = self.windows[i]
        several = min(NEIGHBOURS, ceil(size / apart), self.box.cells[i])
        return several - (1 - several % 2 if i == 2 else 0)

    @cached_property
    def read_again(self) -> int:
        """Numbers that a block reads of what threads leave to others."""
        if self.c.window is None:
            return 0
        extents, read = list(self.extents), 0
        for i in self.window_passes:
            size, apart = self.windows[i]
            extents[i] = ceil(self.box.cells[i] / self.neighbours(i))
            read += prod(extents) * ((self.neighbours(i) - 1) * apart + size)
            extents[i] = self.box.cells[i]
        rest = prod(size for i, (size, _) in enumerate(self.windows) if i not in self.window_passes)
        return self.block_m * (read + prod(self.box.cells) * rest)

    @cached_property
    def strips(self) -> tuple[int, int, int]:
        """Compute values of the strip that threads leave their values in, of the strip that windows are folded into by
        turns, and of running results per cell."""
        c, t = self.c, self.t
        if c.window is None and c.over_positions:
            return 0, 0, 0
        d, h, w = self.extents
        if folded_early(c):
            return running_numbers(c) * _eights(t.teams * d * h * w), 0, 0
        rows = self.block_m
        folded = 0
        for i in self.window_passes[:1]:
            folded = rows * d * h * w // self.extents[i] * self.box.cells[i]
        numbers = c.pooled_numbers
        running = prod(t.cells) * running_numbers(c) if self.passes > 1 else 0
        return numbers * _eights(rows * d * h * w), numbers * _eights(folded), _eights(running)

    @cached_property
    def shared(self) -> int:
        """Bytes of shared memory."""
        staged = self.t.buffers * self.x_elements * self.c.x.dtype.itemsize
        return staged + (self.w_elements + sum(self.strips)) * self.compute_bytes

    @cached_property
    def held(self) -> int:
        """Numbers in a thread's registers beside its values: weights at hand, a run of the input, running results."""
        w = self.box.sides[2]
        run = max(w.reach(p) for p in w.axis.phases) + self.box.vector
        return self.weights.at_hand + run + self.running_values

    @cached_property
    def per_sm(self) -> int:
        """Blocks that share a multiprocessor: by shared memory, threads and registers."""
        wide = self.compute_bytes // 4
        registers = min(255, ceil((56 + (self.values + self.held) * wide) / 8) * 8)
        warps = 65536 // (32 * registers) // 4 * 4  # as many in each quarter of a multiprocessor
        return min(32, 227 * 1024 // (self.shared + 1024), 2048 // self.threads, warps // self.warps)


def _eights(n: int) -> int:
    return ceil(n / 8) * 8


def with_windows(c: Contraction) -> Contraction:
    """The group as these tiles have it: cells are windows, wherever those begin."""
    return c if c.cells_are_windows else replace(c, axes=c.window_axes)


def compute_bytes(c: Contraction) -> int:
    """Of a weight, a sum of products, and what becomes of it."""
    return 8 if c.x.dtype.itemsize == 8 else 4


def loops_over_groups(c: Contraction) -> bool:
    """Whether a block goes through all features: where it folds over them and not over positions."""
    return c.over_channels and not c.over_positions


def folded_early(c: Contraction) -> bool:
    """Whether a thread folds its own features, of all rounds, before it leaves them to others: its positions are the
    same in each."""
    return c.window is None and loops_over_groups(c)


def running_numbers(c: Contraction) -> int:
    """Of the running result of a fold over channels: a logsumexp has a shift beside its sum."""
    return 2 if c.fold is not None and c.fold.op.kind == "logsumexp" else 1
