"""CUDA C++ of contraction groups of window sums for Hopper: 64 cells' sums in registers meet weights in shared memory.

Rows are staged and sums formed as in `contraction_by_warp`; where results lie and what happens to them is as in
`warpgroup_positions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import contraction_by_warp as by_warp
from fusewright.codegen.cuda import contraction_layout, contraction_text, contraction_walk
from fusewright.codegen.cuda.contraction_box import windows
from fusewright.codegen.cuda.contraction_record import cluster_of, joined, parameters, place
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.cuda.warpgroup_epilogue import WindowEpilogue
from fusewright.codegen.text import Lines, fill, indent
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.residues import walks
from fusewright.schedule.warpgroup_windows import WindowTile, blocks_per_sm, held_taps, weight_elements
from fusewright.schedule.window_rows import box_taps


@dataclass(frozen=True)
class _Weights:
    """They stay in shared memory, where a block lays them out."""

    blocks: int

    def packing(self, name: str) -> None:
        """There is none."""


@dataclass(frozen=True)
class WindowWriter:
    """Writes the text of one group and tile."""

    c: Contraction
    t: WindowTile
    name: str
    reference: str
    blocks: int | None

    @cached_property
    def epilogue(self) -> WindowEpilogue:
        return WindowEpilogue(self.c, self.t, self.blocks)

    def blocks_per_sample(self, samples: int, cells: tuple[int, int, int]) -> int | None:
        """How many blocks a cluster should have for `samples` samples, each of so many cells; `None`: none fits."""
        return joined(self, samples, cells)

    @property
    def m_blocks(self) -> int:
        return ceil(self.c.features / self.t.block_m)

    @property
    def weights(self) -> _Weights:
        return _Weights(self.c.op.groups * self.m_blocks)

    @property
    def staged(self) -> int:
        """Bytes of weights and rows."""
        rows = by_warp.row_elements(self.c, self.t) * self.c.x.dtype.itemsize
        return 4 * weight_elements(self.c, self.t) + rows

    @property
    def shared(self) -> int:
        """Bytes: what is staged, and what the warps exchange at the end."""
        return max(self.staged + 4 * self.epilogue.kept_elements(), self.epilogue.closing_bytes())

    @property
    def per_sm(self) -> int:
        """Blocks that share a multiprocessor, which bounds the registers the compiler may use."""
        return max(1, blocks_per_sm(self.c, self.t, self.shared))

    @property
    def start(self) -> int:
        """Tiles that take as long as what a block does ahead of all tiles."""
        return 1

    def source(self) -> str:
        """The text."""
        return with_primitives([
            self._constants(),
            windows(self.c),
            fill(_WEIGHTS),
            fill(contraction_text.COPY, near=", true" if self.t.near else ""),
            by_warp.stage_rows(self.c),
            fill(_OPERANDS),
            by_warp.sums(self.c, self.t, "HELD"),
            self._multiply(),
            *self.epilogue.head(),
            self._kernel_text(),
            self.epilogue.finish(self.name),
        ])  # fmt: skip

    def _constants(self) -> Lines:
        c, t = self.c, self.t
        owned = fill(
            _OWNED, m_tiles=t.eights_m, own_h=t.own_h, own_w=t.own_w, pair_h=2 if t.paired_h else 1,
            warps_h=t.warps_h, warps_w=t.warps_w, threads=32 * t.warps, m_blocks=self.m_blocks,
        )  # fmt: skip
        names = {"channels": c.channels, "features": c.features, "groups": c.op.groups, "taps": box_taps(c)}
        text = fill(contraction_text.CONSTANTS, element=ELEMENT[c.x.dtype], compute="float", owned=owned, **names)
        return [*text, "", *by_warp.constants(c, t), *fill(_STEPS, buffers=t.buffers, held=held_taps(c))]

    def _multiply(self) -> Lines:
        first, second = ("[2 * i][j]", "[2 * i + 1][j]") if self.t.paired_h else ("[i][2 * j]", "[i][2 * j + 1]")
        return fill(_MULTIPLY, columns=self.t.block_m, first=first, second=second)

    def _kernel_text(self) -> Lines:
        epilogue, (d, h, w) = self.epilogue, self.c.axes
        phases = d.phases[0], h.phases[0], w.phases[0]
        values = ["Accumulators acc;", *fill(_PRODUCTS), *epilogue.values(phases, self.t.own_w)]
        stage = by_warp.stage(self.c, "rows + buffer * STEP * CHANNEL", ", int buffer")
        weights = weight_elements(self.c, self.t)
        kept = [f"constexpr int STAGED = {self.staged};    // bytes"] if epilogue.kept_elements() else []
        along, after = walks(self.c, self.t.cells), [*epilogue.after_cell(), "here = ahead;"]
        return fill(
            contraction_text.KERNEL,
            name=self.name,
            cluster=cluster_of(self),
            place=place(self),
            per_sm=self.per_sm,
            parameters=parameters(self),
            of_sample=contraction_layout.sample(self.c),
            **contraction_walk.names(along) | by_warp.HERE,
            tiles=["float* const w_tile = reinterpret_cast<float*>(shared_memory);", *kept],
            x_warp=[],
            prologue=[*epilogue.prologue(), *fill(_FIRST, weights=weights, stage=stage)],
            body=[*epilogue.open_tile(), *fill(by_warp.NEXT), "{", *indent(values), "}", *after],
            close=epilogue.close(),
        )


_OWNED = """
// A warp owns all 8 * M_TILES channels of OWN_H x 8 * OWN_W cells, a lane one of every eight; PAIR_H x PAIR_W of them
// at a time are rows of a warpgroup's product.
constexpr int M_TILES = $m_tiles, OWN_D = 1, OWN_H = $own_h, OWN_W = $own_w, PAIR_H = $pair_h, PAIR_W = 2 / PAIR_H;
constexpr int ROWS_D = 1, ROWS_H = 1, TILES_W = OWN_W;
constexpr int WARPS_H = $warps_h, WARPS_W = $warps_w, THREADS = $threads;
constexpr int BLOCK_M = 8 * M_TILES, M_BLOCKS = $m_blocks;
constexpr int CELLS_D = 1, CELLS_H = OWN_H * WARPS_H, CELLS_W = 8 * OWN_W * WARPS_W;
"""

_STEPS = """
constexpr int BUFFERS = $buffers;    // of rows
constexpr int HELD = $held;    // taps, of which an instruction takes two at a time
"""

_OPERANDS = """
using Operand = unsigned;    // a float32 rounded to tf32
using Accumulators = float[OWN_H / PAIR_H][OWN_W / PAIR_W][M_TILES][4];

__device__ __forceinline__ Operand input_operand(Compute x) { return round_tf32(x); }
"""

_WEIGHTS = """
// Write a block's weights as matrices: [four channels][tap][feature][channel], zeros where there are none.
__device__ __forceinline__ void stage_weights(const Element* w, float* tile, int group, int first_feature) {
#pragma unroll 4
    for (int i = threadIdx.x; i < STEPS * HELD * BLOCK_M * STEP; i += THREADS) {
        const int own = i % STEP, feature = i / STEP % BLOCK_M, tap = i / (STEP * BLOCK_M) % HELD;
        const int channel = i / (STEP * BLOCK_M * HELD) * STEP + own;
        const bool there = first_feature + feature < O && channel < C && tap < BOX_TAPS;
        const Element* const from = w + ((group * O + first_feature + feature) * C + channel) * BOX_TAPS + tap;
        tile[i] = there ? __uint_as_float(round_tf32(widened(*from))) : 0.0f;
    }
}
"""

_MULTIPLY = """
// Start adding the products of window sums in four channels with the weights of all features to what there is, if any.
__device__ __forceinline__ void multiply(Accumulators& acc, Sums& operands, unsigned long long w, bool any) {
    Operand* const sums = &operands[0][0][0];
#pragma unroll
    for (int i = 0; i < int(sizeof(Sums) / sizeof(Operand)); ++i) at_hand(sums[i]);    // ahead of all products
    warpgroup_arrive();
#pragma unroll
    for (int tap = 0; tap < HELD; tap += 2)
#pragma unroll
        for (int i = 0; i < OWN_H / PAIR_H; ++i)
#pragma unroll
            for (int j = 0; j < OWN_W / PAIR_W; ++j)
                wgmma_rows_tf32_$columns(acc[i][j],
                                         operands$first[tap], operands$second[tap],
                                         operands$first[tap + 1], operands$second[tap + 1],
                                         w + tap * BLOCK_M, any || tap > 0);
    warpgroup_commit();
}
"""

_FIRST = """
const unsigned long long w_matrix = shared_matrix(w_tile, 16 * BLOCK_M, 128);
Element* const rows = reinterpret_cast<Element*>(w_tile + $weights) + warp * BUFFERS * STEP * CHANNEL;
$stage
#pragma unroll
for (int i = 0; i < BUFFERS; ++i) stage(here, part < tiles, i, i);
stage_weights(w, w_tile, group, first_feature);
fence_async();
__syncthreads();    // until the weights are there
int now = 0;    // where the rows of the step at hand are
Sums operands = {};
"""

# The products of a tile; rows are asked for once those that were in their place have been read.
_PRODUCTS = """
#pragma unroll 1
for (int step = 0; step < STEPS; ++step) {
    const bool same = step + BUFFERS < STEPS;    // tile whose rows are asked for
    copy_async_wait<BUFFERS - 1>();
    __syncwarp();
    sum_windows(operands, rows + now * STEP * CHANNEL);
    __syncwarp();    // until all lanes have read
    stage(same ? here : ahead, same || another, (step + BUFFERS) % STEPS, now);
    now = (now + 1) % BUFFERS;
    multiply(acc, operands, w_matrix + step * HELD * BLOCK_M, step > 0);
    warpgroup_wait();    // the loop carries their registers on, which nobody may touch before
}
"""
