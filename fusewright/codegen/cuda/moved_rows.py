"""Where CUDA C++ of rows that are kept finds what eager moves first: by the flat index of an element, or in a tile of
shared memory in which a block turns rows that lie side by side."""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.codegen.cuda.rearrangement import address_of
from fusewright.codegen.cuda.stream import THREADS
from fusewright.codegen.cuda.stream_values import Values
from fusewright.codegen.text import Lines, block
from fusewright.ir.node import Node
from fusewright.kernel import ceil_div
from fusewright.schedule.rearrangement import Rearrangement
from fusewright.schedule.stream_record import Read, Stream

# Values of what is turned that one thread keeps at most, rows that a block turns at least, bytes of shared memory that
# it has for them, and those that memory hands out together.
KEPT_OF_TURNED, LEAST_TURNED = 64, 8
SHARED_MEMORY, LINE = 48 << 10, 128


def rows_to_turn(length: int, itemsize: int) -> list[int]:
    """How many rows a block may turn, best estimate first: as many as fill sectors of memory, and fit."""
    most = max(KEPT_OF_TURNED // max(1, itemsize // 4), ceil_div(length * LEAST_TURNED, THREADS))
    fit = [
        rows
        for rows in (32, 16, LEAST_TURNED)
        if length * rows <= most * THREADS and rows * pitch_of(length, itemsize) * itemsize <= SHARED_MEMORY
    ]
    return sorted(fit, key=lambda rows: rows * itemsize < LINE)


def pitch_of(length: int, itemsize: int) -> int:
    """Elements from one row to the next in shared memory: a few more than lines, for other banks."""
    return ceil_div(length * itemsize, LINE) * LINE // itemsize + 16 // itemsize


class MovedValues(Values):
    """Values that read tensors from before they were moved, or from where a block has turned them.

    place    C++ of the flat index of an element of what is `moved`
    in_tile  that of where it lies in what the block turned
    """

    def __init__(
        self, s: Stream, names: dict[Node, str], moved: Mapping[Node, Rearrangement], place: str, in_tile: str
    ) -> None:
        super().__init__(s, names)
        self.moved, self.place, self.in_tile = moved, place, in_tile

    def element(self, r: Read) -> str:
        return f"entry{self.s.reads.index(r)}" if r.value in self.moved else super().element(r)

    def start(self, r: Read) -> str:
        return "tile()" if self._is_turned(r) else super().start(r)

    def found(self, r: Read, element: str = "") -> Lines:
        if r.value not in self.moved or self._is_turned(r):
            return super().found(r, element)
        lines, at = address_of(self.moved[r.value])
        return [
            f"index_t {self._at(r)};",
            *block("", [f"const count_t i = {self.place};", *lines, f"{self._at(r)} = {at};"]),
        ]

    def offset(self, r: Read, part: tuple[str, str] | None = None) -> str:
        if r.value not in self.moved:
            return super().offset(r, part)
        return self.in_tile if self._is_turned(r) else self._at(r)

    def _at(self, r: Read) -> str:
        return f"at{self.s.reads.index(r)}"

    def _is_turned(self, r: Read) -> bool:
        return r.value in self.moved and self.moved[r.value].turn is not None
