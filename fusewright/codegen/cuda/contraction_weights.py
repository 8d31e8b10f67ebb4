"""The weights of a contraction: where they lie in shared memory, and how they get there.

Where all channels are staged at once, a block copies its weights once, from where they lie in memory.  Where channels
come in chunks, every tile fetches them again: a launch beforehand *packs* them, rounded, padded and in the order in
which they are multiplied, so that a chunk is one run of 16-byte vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, prod

import torch

from fusewright.codegen.cuda import contraction_layout
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Array, Launch
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.tiling import Tiling

Phases = tuple[Phase, Phase, Phase]
PACKING_THREADS = 256
# Weights that a thread packs: what it waits for, it waits for so often.
PACKED_BY_THREAD = 4


@dataclass(frozen=True)
class Packing:
    """The launch beforehand, and what it writes."""

    array: Array
    launch: Launch


def packing(name: str, chunks: int, blocks: int, elements: int, dtype: torch.dtype) -> Packing:
    """That of the kernel called `name`: so many chunks and blocks, and elements in all."""
    pointers = Argument("pointer", "w"), Argument("pointer", "packed")
    parts = ceil(elements / (chunks * blocks * PACKING_THREADS * PACKED_BY_THREAD))
    launch = Launch(f"{name}_pack", pointers, (str(chunks), str(blocks), str(parts)), PACKING_THREADS)
    return Packing(Array("packed", (str(elements),), dtype), launch)


@dataclass(frozen=True)
class Weights:
    """The weights of one group and tiling; `rounds` says whether they have to be rounded to tf32."""

    c: Contraction
    t: Tiling
    rounds: bool

    @cached_property
    def phases(self) -> list[Phases]:
        """A phase per dimension, in the order they are computed."""
        d, h, w = (a.phases for a in self.c.axes)
        return list(product(d, h, w))

    @property
    def rows(self) -> int:
        """Channels of the staged input: a panel of window sums has one per tap."""
        return self.c.channels * prod(a.taps for a in self.c.axes) if self.c.box is not None else self.c.channels

    @property
    def chunk(self) -> int:
        return self.rows if self.c.box is not None else self.t.chunk

    @property
    def chunks(self) -> int:
        return ceil(self.rows / self.chunk)

    @property
    def packed(self) -> bool:
        """Whether a launch beforehand lays them out."""
        return self.chunks > 1

    @property
    def blocks(self) -> int:
        """Blocks with weights of their own."""
        return self.c.op.groups * ceil(self.c.features / self.t.block_m)

    def taps(self, phases: Phases) -> tuple[int, int, int]:
        if self.c.box is not None:
            return 1, 1, 1
        d, h, w = (len(p.taps) for p in phases)
        return d, h, w

    @cached_property
    def channels_inside(self) -> bool:
        """Whether the four k indices of a quad of lanes are channels of one tap: so they spread over the banks, where
        channels lie an odd number of words apart, or side by side."""
        if self.c.channels_last or self.c.box is not None:
            return self.c.channels_last  # window sums have one tap: there is nothing to choose
        odd = all(prod(self.taps(p)) % 2 for p in self.phases)
        return self.chunk % 4 == 0 and (self.packed or odd)

    def elements_of(self, phases: Phases) -> int:
        """Elements that one phase takes in shared memory."""
        run = self.chunk * prod(self.taps(phases))
        return self.t.block_m * contraction_layout.spread(run, 4, self.c.x.dtype.itemsize) if run else 0

    @property
    def elements(self) -> int:
        """In shared memory: all phases side by side where weights stay, else the largest."""
        every = [self.elements_of(p) for p in self.phases]
        return ceil((max(every) if self.packed else sum(every)) / 8) * 8

    def behind(self, index: int) -> int:
        """Elements of the phases before the one at `index`."""
        return sum(map(self.elements_of, self.phases[:index]))

    # -- the record --------------------------------------------------------------------------------------------------

    def packing(self, name: str) -> Packing | None:
        """Of [block][chunk][phase][feature][tap][channel], where weights are packed."""
        elements = self.blocks * self.chunks * self.behind(len(self.phases))
        return packing(name, self.chunks, self.blocks, elements, self.c.x.dtype) if self.packed else None

    # -- the text ----------------------------------------------------------------------------------------------------

    def staging(self) -> list[Lines]:
        """The functions that copy weights to shared memory."""
        if self.packed:
            return [fill(_STAGE_PACKED)]
        rounding = [fill(_ROUND)] if self.rounds else []
        if self.c.op.transposed:
            return [*rounding, tap_steps(self.c), fill(_STAGE_PHASE)]
        vector = 16 // self.c.x.dtype.itemsize
        taps = self.taps(self.phases[0])
        whole = self.rows * prod(taps), self.chunk * prod(taps)
        plain = all(n % vector == 0 for n in whole)
        single, wide = (f"stage_runs<{n}>(w, tile, group, first_feature);" for n in (1, vector))
        aligned = "if (reinterpret_cast<unsigned long long>(w) % 16 == 0)"
        stage = [aligned, f"    {wide}", "else", f"    {single}"] if plain else [single]
        return [*rounding, fill(_STAGE_WEIGHTS, taps=", ".join(map(str, taps)), stage=stage)]

    def stage_all(self) -> list[str]:
        """Statements that start copying the weights of all phases, one behind the other."""
        if not self.c.op.transposed:
            return ["stage_weights(w, w_tile, group, first_feature);"]
        return self._each_phase("stage_phase<{sizes}>(w, {at}, group, first_feature, {first});", "w_tile")

    def _each_phase(self, statement: str, start: str) -> list[str]:
        """A statement for every phase that has taps, at its place behind `start`."""
        lines = []
        for i, phases in enumerate(self.phases):
            taps = self.taps(phases)
            if 0 not in taps:
                sizes, behind = ", ".join(map(str, taps)), self.behind(i)
                at = f"{start} + {behind}" if behind else start
                lines.append(statement.format(sizes=sizes, at=at, first=first_tap(self.c, phases)))
        return lines

    def stage_chunk(self, index: int, chunk: str, tile: str) -> str:
        """The statement that starts copying the weights of one phase and chunk."""
        at, every = self.behind(index), self.behind(len(self.phases))
        steps = ([f"{chunk} * {every}"] if chunk != "0" else []) + ([str(at)] if at else [])
        start = " + ".join(["packed_block", *steps])
        return f"stage_packed<{self.elements_of(self.phases[index])}>({start}, {tile});"

    def packed_block(self) -> str:
        """Where the weights of this block begin."""
        size = self.chunks * self.behind(len(self.phases))
        return f"const Element* const packed_block = packed + (long long)blockIdx.z * {size};"

    def packing_kernel(self, name: str) -> list[Lines]:
        """The kernel that packs, where there is one."""
        if not self.packed:
            return []
        transposed = self.c.op.transposed
        pack = fill(
            _PACK,
            name=f"{name}_pack",
            row="(group * C + channel) * O + feature" if transposed else "(group * O + feature) * C + channel",
            value="__uint_as_float(round_tf32(value))" if self.rounds else "value",
            every=self.behind(len(self.phases)),
            phases=self._each_phase("pack_phase<{sizes}>(w, {at}, group, first_feature, chunk, {first});", "packed"),
            threads=PACKING_THREADS,
        )
        return [tap_steps(self.c), pack]


def tap_steps(c: Contraction) -> Lines:
    """Constants: distances in memory of neighbouring taps of a phase along each dimension."""
    kernel = (c.axes[1].taps * c.axes[2].taps, c.axes[2].taps, 1)
    found: dict[str, object] = {}
    for a, axis, step in zip("dhw", c.axes, kernel, strict=True):
        several = next((p.taps for p in axis.phases if len(p.taps) > 1), None)
        found[f"next_{a}"] = (several[1] - several[0]) * step if several else 0
    return fill(_STEPS, **found)


def first_tap(c: Contraction, phases: Phases) -> int:
    """Where in memory the first tap of a phase lies in a channel's kernel."""
    d, h, w = (p.taps[0] for p in phases)
    return (d * c.axes[1].taps + h) * c.axes[2].taps + w


_STEPS = """
// Steps in memory between neighbouring taps of a phase.
constexpr int NEXT_D = $next_d, NEXT_H = $next_h, NEXT_W = $next_w;
"""

_PACK = """
// The weights of one phase, block and chunk as they are to lie in shared memory, zeros where there are none.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, Element* packed, int group, int first_feature, int chunk,
                                           int first) {
    using P = Phase<TAPS_D, TAPS_H, TAPS_W>;
    for (int i = blockIdx.z * $threads + threadIdx.x; i < BLOCK_M * P::FEATURE; i += gridDim.z * $threads) {
        const int feature = first_feature + i / P::FEATURE, k = i % P::FEATURE;
        const int channel = chunk * CHUNK + k % CHUNK, tap = k / CHUNK;
        const int of_w = tap / (TAPS_H * TAPS_W) * NEXT_D + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W;
        const bool there = k < P::RUN && feature < O && channel < C;
        const Element value = there ? w[($row) * TAPS + first + of_w] : Element{};
        packed[i] = $value;
    }
}
extern "C" __global__ void $name(const Element* __restrict__ w, Element* __restrict__ packed) {
    await_launches();
    const int chunk = blockIdx.x, group = blockIdx.y / M_BLOCKS, first_feature = blockIdx.y % M_BLOCKS * BLOCK_M;
    packed += (long long)(blockIdx.y * CHUNKS + chunk) * $every;
    $phases
}
"""

_STAGE_PACKED = """
// Start copying COUNT packed weights.
template <int COUNT>
__device__ __forceinline__ void stage_packed(const Element* from, Element* to) {
    constexpr int VECTOR = 16 / sizeof(Element), STEP = VECTOR * THREADS;
    const int own = VECTOR * threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < COUNT; i += STEP)
        copy_async<16>(to + own + i, from + own + i, true, COUNT % STEP == 0 || i + own < COUNT);
}
"""

_ROUND = """
// Round weights that stay to tf32, once for all their uses.
__device__ __forceinline__ void round_staged(Element* tile, int count) {
    for (int i = 4 * threadIdx.x; i < count; i += 4 * THREADS) {
        float4 four = *reinterpret_cast<float4*>(tile + i);
        four.x = __uint_as_float(round_tf32(four.x)), four.y = __uint_as_float(round_tf32(four.y));
        four.z = __uint_as_float(round_tf32(four.z)), four.w = __uint_as_float(round_tf32(four.w));
        *reinterpret_cast<float4*>(tile + i) = four;
    }
}
"""

_STAGE_WEIGHTS = """
// Start copying the weights of a block's features, zeros where there are none.  A thread keeps its place in a feature's
// run of channels and taps, which is one in memory too, and goes through the features.
template <int VECTOR>
__device__ __forceinline__ void stage_runs(const Element* w, Element* tile, int group, int first_feature) {
    using P = Phase<$taps>;
    constexpr int RUN = P::RUN / VECTOR, SIDE_BY_SIDE = RUN < THREADS ? THREADS / RUN : 1;
    for (int i = threadIdx.x; i < RUN * SIDE_BY_SIDE; i += THREADS) {
        const int at = i % RUN * VECTOR;
#pragma unroll 4
        for (int feature = i / RUN; feature < BLOCK_M; feature += SIDE_BY_SIDE) {
            const bool there = first_feature + feature < O;
            const Element* from = w + (group * O + first_feature + feature) * C * P::TAPS + at;
            copy_vector<VECTOR>(tile + feature * P::FEATURE + at, there ? from : w, there);
        }
    }
}
__device__ __forceinline__ void stage_weights(const Element* w, Element* tile, int group, int first_feature) {
    $stage
}
"""

_STAGE_PHASE = """
// Start copying the weights of one phase: every NEXT-th tap from `first` on.  A thread keeps its feature and tap and
// goes through the channels.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void stage_phase(const Element* w, Element* tile, int group, int first_feature, int first) {
    using P = Phase<TAPS_D, TAPS_H, TAPS_W>;
    for (int i = threadIdx.x; i < BLOCK_M * P::TAPS; i += THREADS) {
        const int tap = i % P::TAPS, feature = i / P::TAPS;
        const int of_w = tap / (TAPS_H * TAPS_W) * NEXT_D + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W;
#pragma unroll 4
        for (int c = 0; c < C; ++c) {
            const bool there = first_feature + feature < O;
            const int row = (group * C + c) * O + first_feature + feature;
            const Element* from = there ? w + row * TAPS + first + of_w : w;
            copy_vector<1>(tile + feature * P::FEATURE + c * P::TAPS + tap, from, there);
        }
    }
}
"""
