"""CUDA C++ of contraction groups for Hopper where 64 positions of a warpgroup meet the features that there are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from fusewright.codegen.cuda import warpgroup_positions_text as texts
from fusewright.codegen.cuda.warpgroup_epilogue import PositionEpilogue
from fusewright.codegen.cuda.warpgroup_writer import Operands, Writer
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.warpgroup_positions import PositionTile


@dataclass(frozen=True)
class PositionWriter(Writer):
    """The input is the first operand, as the same columns of shared memory, the weights are the second."""

    t: PositionTile

    @cached_property
    def epilogue(self) -> PositionEpilogue:
        return PositionEpilogue(self.c, self.t, self.blocks)

    def owned(self) -> Lines:
        c, t = self.c, self.t
        own_d, own_h, own_w = t.own
        high, broad = t.at_once
        return fill(
            texts.OWNED,
            m_tiles=t.eights_m, tiles_h=t.tiles_h, tiles_w=t.tiles_w, high=high, broad=broad, own_d=own_d, own_h=own_h,
            own_w=own_w, rows_d=t.rows_d, rows_h=t.rows_h, per_cell=max(len(p.elements) for p in c.axes[2].phases),
            warps_h=t.warps_h, warps_w=t.warps_w, threads=32 * t.warps, m_blocks=ceil(c.features / t.block_m),
        )  # fmt: skip

    def accumulators(self) -> Lines:
        return fill(texts.ACCUMULATORS)

    def products(self, instruction: str) -> Lines:
        return fill(texts.PRODUCTS, instruction=instruction)

    def ahead(self) -> Lines:
        return fill(texts.AHEAD)

    def place_of_weights(self) -> Lines:
        return fill(texts.PLACE)

    def operands(self) -> Operands:
        if self.t.wide:
            warps = "const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W;"
            return Operands(warps, "128", "warp_h * TILES_H * ADVANCE_H + warp_w / 4 * TILES_W * BROAD", "")
        warps = "const int warp_h = warp % WARPS_H, warp_w = warp / WARPS_H;"
        cells = "warp_h / 4 * TILES_H * HIGH * ADVANCE_H + warp_w * TILES_W * BROAD"
        return Operands(warps, "16 * ADVANCE_H", cells, "")

    def slots(self, per_cell: int) -> int:
        return self.t.own[2] * per_cell
