"""CUDA C++ of rearrangements that end in rows of a few elements, each computed in a way of its own.

A thread computes all elements of a row, and what they have in common once; they go through shared memory, so that
neighbouring threads write neighbours.
"""

from __future__ import annotations

from typing import Any

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import rearrangement_text as text
from fusewright.codegen.cuda.rearrangement import Values, Writer
from fusewright.codegen.text import Lines, block, fill
from fusewright.kernel import Kernel
from fusewright.schedule.rearrangement import Rearrangement, call_length
from fusewright.schedule.stacked import row, row_length

# About so many elements a thread computes.
ELEMENTS = 8


def options(r: Rearrangement) -> list[dict[str, Any]]:
    """Rows of so many elements, where the last dimension is a concatenation of a few."""
    length = row_length(r) if call_length(r.root, r.tensors) is not None else None
    return [] if length is None else [{"row": length}]


def kernel(r: Rearrangement, name: str, reference: str = "", *, row: int) -> Kernel:
    """The kernel of a rearrangement whose threads have rows of so many elements."""
    return _RowWriter(r, name, row).kernel(reference)


class _RowWriter(Writer):
    """Writes the kernel of a rearrangement of which a thread has whole rows."""

    @property
    def at_once(self) -> int:
        return max(1, ELEMENTS // self.values)

    def functions(self) -> Lines:
        return ["// Row i.", *block(self.head, _RowValues(self.r, self.names, 1).row("value", self.values))]

    def entry(self) -> Lines:
        element = ELEMENT[self.r.root.dtype]
        members = ", ".join(self.names.values())
        return fill(
            text.ROWS, signature=self.signature(f"{self.index} groups"), T=self.compute, E=element, members=members
        )


class _RowValues(Values):
    """Writes the statements that compute all elements of a row."""

    def row(self, to: str, length: int) -> Lines:
        """The statements that write the elements to an array; what has a name is known to all that follow."""
        _, elements = row(self.r, length)
        lines: Lines = []
        known: dict[Any, str] = {}
        for k, value in enumerate(elements):
            lines += self._written(f"{to}[{k}]", value, known)
        return lines
