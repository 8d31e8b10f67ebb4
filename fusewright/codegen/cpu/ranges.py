"""C++ of range reductions on a CPU: planes one after another, each element read once.

total   everything of a plane, of any length
line    several ranges of one axis, segment by segment
planes  ranges of two or three axes: sums of columns over one set of rows after another

All sums are in float64, which is as fast as memory.  Where there are too few planes to keep all threads busy, each is
summed in parts, whose number depends on sizes alone, and the parts are added in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from fusewright.codegen.cpp import ELEMENT, Scalars, compute_type
from fusewright.codegen.cpu import ranges_text as texts
from fusewright.codegen.cpu.elements import HALVES, read, written
from fusewright.codegen.cpu.text import function, source
from fusewright.codegen.range_tables import Tables, one_scale
from fusewright.codegen.text import Lines, fill
from fusewright.ir.ops import Size
from fusewright.kernel import Argument, Array, Expression, Kernel, Launch
from fusewright.schedule.range_sums import RangeReduction

WIDTH = 512  # columns that are summed together
# Planes that keep all threads busy, and elements that are worth a part of their own.
ENOUGH = 64
WORTH_A_PART = 16384


def kernel(r: RangeReduction, name: str, reference: str = "") -> Kernel:
    """The kernel of a range reduction; leading sizes, and that of a total, are those of the call."""
    return _Writer(r, name).kernel(reference)


@dataclass(frozen=True)
class _Writer:
    r: RangeReduction
    name: str

    @property
    def tables(self) -> Tables:
        return Tables(self.r)

    @property
    def cells(self) -> int:
        return 1 if self.r.total else self.tables.cells

    @property
    def alone(self) -> bool:
        """Whether a plane has one sum, made of one cell."""
        return self.cells == 1 and self.r.slots == 1

    @property
    def parted(self) -> bool:
        """Whether there are too few planes for each to be one thread's."""
        planes = prod(_hint(d, 8) for d in self.r.x.shape[: self.r.leading])
        elements = prod(_hint(d, 1024) for d in self.r.x.shape[self.r.leading :])
        return planes < ENOUGH // 4 and elements >= 2 * WORTH_A_PART

    # ---- the record

    def kernel(self, reference: str) -> Kernel:
        r = self.r
        sizes = tuple((f"n{d}", 0, d) for d in range(r.x.ndim if r.total else r.leading))
        names = [n for n, _, _ in sizes]
        planes = " * ".join(names[: r.leading]) or "1"
        length = " * ".join(names[r.leading :]) if r.total else str(self.tables.plane)
        shape = (*names, *(str(d) for d in r.x.shape[len(names) :]))
        parts = f"max(1, min(ceil_div({length}, {WORTH_A_PART}), {ENOUGH} // max(1, {planes})))"
        numbers = [planes, *([length] if r.total else []), *([parts] if self.parted else [])]
        arguments = (
            Argument("pointer", "x"),
            *([Argument("pointer", "scratch")] if self.parted else []),
            Argument("pointer", "out"),
            *(Argument("long", n) for n in numbers),
            Argument("threads", f"({planes}) * {length}"),
        )
        return Kernel(
            self.name,
            self.text(),
            ("x",),
            ("contiguous",),
            sizes,
            Array("out", self._shape(names), r.root.dtype),
            (Array("scratch", (planes, parts, str(self.cells)), torch.float64),) if self.parted else (),
            (Launch(self.name, arguments, (planes, "1", "1")),),
            reference,
            notes=("Summed in parts, which are added in their order.",) if self.parted else (),
            dtypes=(r.x.dtype,),
            shapes=(shape,),
            target="cpu",
        )

    def _shape(self, names: list[str]) -> tuple[Expression, ...]:
        kept = self.r.root.shape[self.r.leading :]
        return (*names[: self.r.leading], *(str(d) for d in kept))

    # ---- the text

    def text(self) -> str:
        r = self.r
        lines = [
            f"using Element = {ELEMENT[r.x.dtype]};",
            f"constexpr int CELLS = {self.cells}, SLOTS = {r.slots};  // different sums per plane, and results of them",
            "",
            *self._value(),
            *([] if r.total else self._tables()),
            *self._add(),
            *self._write(),
            *self._entry(),
        ]
        return source(f"{self._about()}, every element read once.", self.name, lines)

    def _about(self) -> str:
        if self.r.total:
            return "sums over planes of any length"
        counts = " x ".join(str(len(a.slots or ())) for a in self.r.axes)
        return f"{counts} sums over index ranges of the last {'axis' if len(self.r.axes) == 1 else 'axes'}"

    def _value(self) -> Lines:
        """The function ``value``: what is summed, from what is read."""
        compute, dtype = compute_type(self.r.value.dtype), self.r.x.dtype
        scalars = Scalars({self.r.x: "x"}, repr)
        result = scalars.value(self.r.value)
        about = "What is summed, of an element." if scalars.lines else "An element, in the type it is added in."
        return [
            f"// {about}",
            f"inline {compute} value(Element element) {{",
            *([f"    const {compute_type(dtype)} x = {read('element', dtype)};"] if scalars.lines else []),
            *(f"    {line}" for line in scalars.lines),
            f"    return {result if scalars.lines else read('element', dtype)};",
            "}",
            "",
        ]

    def _tables(self) -> Lines:
        """Constant tables of segments, rows and the slots their cells belong to."""
        tables, segments = self.tables, self.tables.columns.segments
        lines = [
            f"constexpr index_t {'PLANE' if tables.rows else 'LENGTH'} = {tables.plane};",
            f"constexpr int PERIOD = {tables.columns.period}, SEGMENTS = {len(segments)};",
            "struct Segment { index_t begin, end; };  // in the same slots, up to the residue modulo PERIOD",
            _table("Segment SEGMENT[SEGMENTS]", [f"{{{s.begin}, {s.end}}}" for s in segments]),
        ]
        if tables.rows or tables.columns.period > 1:
            width = WIDTH // tables.columns.period * tables.columns.period
            lines.append(f"constexpr index_t WIDTH = {width};  // columns that are summed together")
        if tables.rows:
            sets, _ = tables.sets
            first, last = segments[0].begin, segments[-1].end
            lines.append(f"constexpr index_t FIRST = {first}, LAST = {last};  // elements of a row that are summed")
            lines += fill(texts.ROWS_2D if len(tables.rows) == 1 else texts.ROWS_3D)
            lines += [f"constexpr int SETS = {len(sets)};", _table("Rows ROWS[SETS]", sets)]
        if not self.alone:
            lines += self._members()
        if one_scale(self.r) is None:
            lines.append(_table("double SCALE[SLOTS]", [repr(s) for s in tables.scales]))
        return [*lines, ""]

    def _members(self) -> Lines:
        """Tables of the slots that cells belong to, a bit each, and the function that looks them up."""
        tables = self.tables
        across = _table("unsigned long long SLOTS_OF[SEGMENTS * PERIOD]", [f"{m:#x}" for m in tables.members])
        if not tables.rows:
            return [across, *fill(texts.BELONGS_LINE)]
        count = f"constexpr int COLUMN_SLOTS = {len(tables.columns.slots or ())};"
        down = _table("unsigned long long ROW_SLOTS_OF[SETS]", [f"{m:#x}" for m in tables.sets[1]])
        return [across, count, down, *fill(texts.BELONGS_PLANES)]

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
        names = {"length": length, "Result": ELEMENT[self.r.root.dtype], "result": self._result()}
        return fill(texts.WRITE_ONE if self.alone else texts.WRITE, **names)

    def _result(self) -> str:
        """The finished sum, from its total in float64."""
        dtype, scale = self.r.root.dtype, one_scale(self.r)
        if self.r.mean:
            text = "total / double(length)"
        elif scale is None:
            text = "total * SCALE[slot]"
        else:
            text = "total" if scale == 1.0 else f"total * {scale!r}"
        if dtype == torch.float64:
            return text
        return written(f"float({text})", dtype) if dtype in HALVES or text != "total" else "float(total)"

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


def _table(declaration: str, entries: list[str]) -> str:
    return f"constexpr {declaration} = {{{', '.join(entries)}}};"


def _hint(size: Size, symbolic: int) -> int:
    """A number for a size the graph may not know."""
    return size if isinstance(size, int) else symbolic
