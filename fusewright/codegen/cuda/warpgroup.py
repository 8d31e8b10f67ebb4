"""CUDA C++ of contraction groups for Hopper, whose tensor cores read both operands from shared memory (sm_90a).

`warpgroup_writer` has what is the same whichever way features and positions meet; here 64 features meet many positions,
in `warpgroup_positions` 64 positions meet the features that there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from fusewright.codegen.cuda import warpgroup_halves, warpgroup_pairs, warpgroup_text
from fusewright.codegen.cuda.contraction_record import record
from fusewright.codegen.cuda.warpgroup_carried import CarriedWriter
from fusewright.codegen.cuda.warpgroup_epilogue import WarpgroupEpilogue
from fusewright.codegen.cuda.warpgroup_pools import PoolWriter
from fusewright.codegen.cuda.warpgroup_positions import PositionWriter
from fusewright.codegen.cuda.warpgroup_weights import Place
from fusewright.codegen.cuda.warpgroup_windows import WindowWriter
from fusewright.codegen.cuda.warpgroup_writer import Operands, Writer
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Kernel
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.warpgroup import WarpgroupTile, positions, rows_at_once
from fusewright.schedule.warpgroup_carried import CarriedTile
from fusewright.schedule.warpgroup_pools import PoolTile
from fusewright.schedule.warpgroup_positions import PositionTile
from fusewright.schedule.warpgroup_staging import of_tile, staged
from fusewright.schedule.warpgroup_windows import WindowTile

ARCH, CAPABILITY = "sm_90a", 90

Tile = WarpgroupTile | PositionTile | WindowTile


def generate(
    c: Contraction, t: Tile, name: str, reference: str, *, blocks: int | None = None, instead: Tile | None = None
) -> Kernel:
    """The kernel of a group for one tile; with `blocks`, the blocks of a sample form a cluster and finish it in one
    launch; `instead` is how a group that is multiplied as halves is cut where these do not do."""
    writer = _writer(c, t, name, reference, blocks)
    if isinstance(writer, Writer) and writer.c.halves:
        assert instead is not None and blocks is None, t
        other = _writer(c, instead, f"{name}_in_tf32", reference, None)
        assert isinstance(other, Writer), instead
        again = replace(other, instead_of=warpgroup_halves.words(writer))
        return warpgroup_halves.kernel(writer, again, needs=CAPABILITY, arch=ARCH)
    made = record(writer, needs=CAPABILITY, arch=ARCH)
    if isinstance(t, WindowTile) or staged(writer.c, t).words is None:
        return made
    (*first, width), *others = made.shapes
    return replace(made, shapes=((*first, f"{width} // 2 * 2"), *others))  # rows of whole words alone


def blocks_per_sample(c: Contraction, t: Tile, samples: int, cells: tuple[int, int, int]) -> int | None:
    """How many blocks a cluster should have for `samples` samples, each of so many cells; `None`: no cluster fits."""
    return _writer(c, t, "", "", None).blocks_per_sample(samples, cells)


def instead(c: Contraction, t: Tile, others: Iterable[Tile]) -> Tile | None:
    """Of other tiles the first one whose results are joined as those of `t` are."""
    mine = _results(_writer(c, t, "", "", None))
    return next((other for other in others if _results(_writer(c, other, "", "", None)) == mine), None)


def _results(writer: Writer | WindowWriter) -> object:
    return writer.weights.blocks, writer.epilogue.results("", "1")


def _writer(c: Contraction, t: Tile, name: str, reference: str, blocks: int | None) -> Writer | WindowWriter:
    if isinstance(t, WindowTile):
        return WindowWriter(c, t, name, reference, blocks)
    c = of_tile(c, t)
    if isinstance(t, PoolTile):
        return PoolWriter(c, t, name, reference, blocks)
    if isinstance(t, CarriedTile):
        return CarriedWriter(c, t, name, reference, blocks)
    if isinstance(t, PositionTile):
        return PositionWriter(c, t, name, reference, blocks)
    return _FeatureWriter(c, t, name, reference, blocks)


# Where a lane's part of a warpgroup's weights begins.
_HELD_WEIGHTS = (
    "const uint4* const w_matrix = "
    "reinterpret_cast<const uint4*>(w_tile) + (warp_m / 4 * 128 * M_TILES + threadIdx.x % 128);"
)


@dataclass(frozen=True)
class _FeatureWriter(Writer):
    """64 features of a warpgroup meet many positions."""

    t: WarpgroupTile

    @cached_property
    def epilogue(self) -> WarpgroupEpilogue:
        return WarpgroupEpilogue(self.c, self.t, self.blocks)

    def owned(self) -> Lines:
        c, t = self.c, self.t
        return fill(
            warpgroup_text.OWNED,
            m_tiles=t.m_tiles, own_d=t.cells_d, own_h=t.cells_h, eights_w=t.eights_w, rows_d=t.rows_d, rows_h=t.rows_h,
            per_cell=max(len(p.elements) for p in c.axes[2].phases), warps_m=t.warps_m, warps_h=t.warps_h,
            warps_w=t.warps_w, threads=32 * t.warps, m_blocks=ceil(c.features / t.block_m),
        )  # fmt: skip

    def accumulators(self) -> Lines:
        return fill(warpgroup_text.ACCUMULATORS, at_once=rows_at_once(self.c, self.t))

    def products(self, instruction: str) -> Lines:
        tiles = positions(self.c, self.t) // 8
        of_w, of_x = ("", "") if self.paired else ("(tap * VECTORS + k) * BLOCK_M + ", "k * PLANE + ")
        return fill(warpgroup_text.PRODUCTS, instruction=instruction, tiles=tiles, of_w=of_w, of_x=of_x)

    def held(self, **names: object) -> Lines:
        return fill(warpgroup_text.MULTIPLY_HELD, tiles=positions(self.c, self.t) // 8, **names)

    def place_of_weights(self) -> Place:
        order = fill(warpgroup_text.ORDER)
        if self.paired:
            return Place(self.pairs(order, "at"), warpgroup_text.PACK_PHASE, warpgroup_pairs.PUT)
        place = warpgroup_text.PLACE_HELD if self.t.held else warpgroup_text.PLACE
        return Place(fill(place, order=order), warpgroup_text.PACK_PHASE, warpgroup_text.PUT)

    def operands(self) -> Operands:
        return Operands(
            "const int warp_m = warp % WARPS_M, warp_w = warp / WARPS_M % WARPS_W, "
            "warp_h = warp / (WARPS_M * WARPS_W);",
            self.matrix_of_cells(
                "warp_h * OWN_H * ADVANCE_H + 4 * OWN_W * warp_w",
                "128" if rows_at_once(self.c, self.t) == 1 else "16 * row_h(1)",
            ),
            _HELD_WEIGHTS if self.t.held else self.matrix_of_weights(" + warp_m / 4 * 64 * M_TILES"),
        )

    def slots(self, per_cell: int) -> int:
        return 2 * self.t.eights_w * per_cell
