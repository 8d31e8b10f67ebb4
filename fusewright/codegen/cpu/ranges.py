"""C++ of range reductions on a CPU: planes one after another, each element read once.

total   everything of a plane, of any length
line    several ranges of one axis, segment by segment
planes  ranges of two or three axes: sums of columns over one set of rows after another

All sums are in float64, which is as fast as memory.  Where there are too few planes to keep all threads busy, each is
summed in parts, whose number depends on sizes alone, and the parts are added in their order.
"""

from __future__ import annotations

from math import prod

import torch

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cpu import ranges_text as texts
from fusewright.codegen.cpu.elements import read, written
from fusewright.codegen.cpu.text import function, source
from fusewright.codegen.range_sections import RangeSections, guess
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.schedule.range_sums import RangeReduction

WIDTH = 512  # columns that are summed together
# Planes that keep all threads busy, and elements that are worth a part of their own.
ENOUGH = 64
WORTH_A_PART = 16384


def kernel(r: RangeReduction, name: str, reference: str = "") -> Kernel:
    """The kernel of a range reduction; leading sizes, and that of a total, are those of the call."""
    return _Writer(r, name).kernel(reference)


class _Writer(RangeSections):
    inline, constant, index = "inline", "constexpr", "index_t"

    @property
    def parted(self) -> bool:
        """Whether there are too few planes for each to be one thread's."""
        planes = prod(guess(d, 8) for d in self.r.x.shape[: self.r.leading])
        elements = prod(guess(d, 1024) for d in self.r.x.shape[self.r.leading :])
        return planes < ENOUGH // 4 and elements >= 2 * WORTH_A_PART

    # ---- the record

    def kernel(self, reference: str) -> Kernel:
        planes, length = self.planes, self.length
        parts = f"max(1, min(ceil_div({length}, {WORTH_A_PART}), {ENOUGH} // max(1, {planes})))"
        numbers = [planes, *([length] if self.r.total else []), *([parts] if self.parted else [])]
        arguments = (
            *(Argument("pointer", name) for name in ("x", *(["scratch"] if self.parted else []), "out")),
            *(Argument("long", n) for n in numbers),
            Argument("threads", f"({planes}) * {length}"),
        )
        return self.record(
            source=self.text(),
            scratch=(Array("scratch", (planes, parts, str(self.cells)), torch.float64),) if self.parted else (),
            launches=(Launch(self.name, arguments, (planes, "1", "1")),),
            reference=reference,
            notes=("Summed in parts, which are added in their order.",) if self.parted else (),
            target="cpu",
        )

    # ---- the text

    def text(self) -> str:
        r = self.r
        lines = [
            f"using Element = {ELEMENT[r.x.dtype]};",
            f"constexpr int CELLS = {self.cells}, SLOTS = {r.slots};  // different sums per plane, and results of them",
            "",
            *self.value(),
            *([] if r.total else self._tables()),
            *self._add(),
            *self._write(),
            *self._entry(),
        ]
        return source(f"{self.about()}.", self.name, lines)

    def read(self, element: str) -> str:
        return read(element, self.r.x.dtype)

    def written(self, value: str) -> str:
        return written(value, self.r.root.dtype)

    def _tables(self) -> Lines:
        """Constant tables of segments, rows and the slots their cells belong to."""
        tables, period = self.tables, self.tables.columns.period
        lines = self.segments()
        if tables.rows or period > 1:
            segments = tables.columns.segments
            needed = -(-(segments[-1].end - segments[0].begin) // period)
            width = min(WIDTH // period, needed) * period
            lines.append(f"constexpr index_t WIDTH = {width};  // columns that are summed together")
        if tables.rows:
            lines += self.rows(fill(texts.ROWS_2D if len(tables.rows) == 1 else texts.ROWS_3D))
        if not self.alone:
            lines += self.members()
        return [*lines, *self.scales(), ""]

    def _add(self) -> Lines:
        """The function that adds up a part of a plane."""
        if self.r.total:
            return [*fill(texts.SUM), *fill(texts.TOTAL)]
        if self.tables.rows:
            return fill(texts.PLANES)
        return fill(texts.PERIODIC_LINE) if self.tables.columns.period > 1 else [*fill(texts.SUM), *fill(texts.LINE)]

    def _write(self) -> Lines:
        """The function that turns cells into results."""
        length = "index_t length, " if self.r.mean else ""
        names = {"length": length, "Result": ELEMENT[self.r.root.dtype], "result": self.result()}
        if self.alone:
            return fill(texts.WRITE_ONE, **names)
        return fill(texts.WRITE_PLANE if self.tables.rows else texts.WRITE_LINE, **names)

    def _entry(self) -> Lines:
        total = self.r.total
        body = fill(
            texts.PARTED if self.parted else texts.DIRECT,
            plane="length" if total else "PLANE" if self.tables.rows else "LENGTH",
            length="length, " if total else "",
            count="length, " if self.r.mean else "",
        )
        scratch, length = ["double* scratch"] if self.parted else [], ["index_t length"] if total else []
        parts = ["index_t parts"] if self.parted else []
        pointers = ["const Element* x", *scratch, f"{ELEMENT[self.r.root.dtype]}* out"]
        parameters = [*pointers, "index_t planes", *length, *parts, "int threads"]
        return function((f'extern "C" void {self.name}', parameters), body)
