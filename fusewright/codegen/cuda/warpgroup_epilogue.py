"""Where a thread's values of a warpgroup's product are; what happens to them is said in `contraction_epilogue`."""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.codegen.cuda.contraction_epilogue import Epilogue


@dataclass(frozen=True)
class WarpgroupEpilogue(Epilogue):
    """Column n of the j-th eight of an instruction is cell 8 * j + n, of one element of the cells along w."""

    @property
    def side_by_side(self) -> bool:
        return True

    def accumulator(self, tile: str, lane: str) -> str:
        return f"acc[rd][{tile} / EIGHTS_W][m][rh][{tile} % EIGHTS_W][{lane}]"

    def own_w(self, per_cell: int) -> str:
        return "s / 2 % EIGHTS_W * 2 + s % 2" if per_cell > 1 else "s"

    def element_w(self, per_cell: int) -> str:
        return "s / 2 / EIGHTS_W"
