"""CUDA C++ of contraction groups for Hopper where 64 positions of a warpgroup meet the features that there are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from fusewright.codegen.cuda import warpgroup_pairs, warpgroup_text
from fusewright.codegen.cuda import warpgroup_positions_text as texts
from fusewright.codegen.cuda.warpgroup_epilogue import PositionEpilogue
from fusewright.codegen.cuda.warpgroup_weights import Place
from fusewright.codegen.cuda.warpgroup_writer import Operands, Writer
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.axes import Phase
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
            spread=self._of_spread(texts.SPREAD), cells=self.cells(),
        )  # fmt: skip

    def cells(self) -> Lines:
        """Constants: the cells of a block."""
        return fill(texts.CELLS, lost=" - LOST" if self.t.spread else "")

    def accumulators(self) -> Lines:
        row = "8 * OWN_W * WARPS_W"
        cells, again = (f"{row} * WARPS_H", "8") if self.t.wide else (f"2 * {row} * WARPS_H", row)
        return self._of_spread(texts.SPREAD_ACCUMULATORS, cells=cells, again=again) or fill(texts.ACCUMULATORS)

    def _of_spread(self, text: str, **names: object) -> Lines:
        """A text about taps that are spread."""
        return fill(text, spread=self.t.spread, lost=self.t.lost, **names) if self.t.spread else []

    @property
    def weights_m(self) -> str:
        return "SPREAD" if self.t.spread else super().weights_m

    def products(self, instruction: str, sums: str = "acc[rd][e][rh][tile]") -> Lines:
        of_w, of_x = ("", "") if self.paired else (f" + (tap * VECTORS + k) * {self.weights_m}", "k * PLANE + ")
        return fill(texts.PRODUCTS, instruction=instruction, of_w=of_w, of_x=of_x, sums=sums)

    def accumulated(self, index: int, rows: list[tuple[str, Phase, int]]) -> Lines:
        if not self.t.spread:
            return super().accumulated(index, rows)
        if index not in self.weights.with_taps:
            return ["Sums acc = {};"]
        row, axis = "8 * OWN_W * WARPS_W", self.lay.walks[2].staged
        phase = axis.phases[index % len(axis.phases)]
        if self.t.wide:
            place = f"warp_h * ({row}) + warp_w / 4 * TILES_W * 64 + warp_w % 4 * 16 + row"
        else:
            place = f"2 * warp_h * ({row}) + warp_w * TILES_W * 8 + row"
        return [
            "Accumulators products = {};",
            *self.steps.of_pass({index: "products"}, rows),
            "Sums acc;",
            f"add_taps<{len(phase.taps)}, {phase.first}>(products, acc, products_of_rows, {place}, quad);",
        ]

    def ahead(self) -> Lines:
        return fill(texts.AHEAD)

    def place_of_weights(self) -> Place:
        if self.paired and self.t.spread:
            return Place(self.pairs([], "column"), texts.PACK_SPREAD, warpgroup_pairs.PUT_SPREAD)
        if self.paired:
            return Place(self.pairs([], "feature"), warpgroup_text.PACK_PHASE, warpgroup_pairs.PUT)
        if self.t.spread:
            return Place(fill(texts.SPREAD_PLACE), texts.PACK_SPREAD, texts.PUT_SPREAD)
        return Place(fill(texts.PLACE, weights_m=self.weights_m), warpgroup_text.PACK_PHASE, warpgroup_text.PUT)

    def held(self, **names: object) -> Lines:
        return fill(texts.MULTIPLY_HELD, ahead=self.ahead(), **names)

    @property
    def rows_together(self) -> int:
        return max(len(p[1].taps) for p in self.weights.phases)

    def operands(self) -> Operands:
        if self.t.wide:
            warps = "const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W;"
            cells, between = "warp_h * TILES_H * ADVANCE_H + warp_w / 4 * TILES_W * BROAD", "128"
        else:
            warps = "const int warp_h = warp % WARPS_H, warp_w = warp / WARPS_H;"
            cells, between = "warp_h / 4 * TILES_H * HIGH * ADVANCE_H + warp_w * TILES_W * BROAD", "16 * ADVANCE_H"
        if not self.t.held:
            return Operands(warps, self.matrix_of_cells(cells, between), self.matrix_of_weights())
        columns = [
            "const Column* const x_matrix = reinterpret_cast<const Column*>(x_tile) +",
            f"    ({cells} + warp_w % 4 * 16 + row);",
        ]
        return Operands(warps, columns, self.matrix_of_weights())

    def slots(self, per_cell: int) -> int:
        return self.t.own[2] * per_cell
