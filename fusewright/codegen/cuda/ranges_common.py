"""What both forms of range reductions say in CUDA C++."""

from __future__ import annotations

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.range_sections import RangeSections
from fusewright.schedule.range_order import terms


class CudaRangeSections(RangeSections):
    """Elements and functions as a GPU has them."""

    inline, constant, index = "__device__ __forceinline__", "__constant__ const", "int"

    def place(self) -> str:
        """Where the result of `slot` lies among those of its plane."""
        return "slot" if self.r.stored is None else " + ".join(terms(self.r.order[1], "slot"))

    def read(self, element: str) -> str:
        return f"widened({element})"

    def written(self, value: str) -> str:
        element = ELEMENT[self.r.root.dtype]
        return value if element == "float" else f"narrow_to<{element}>::of({value})"
