"""What the writers of range reductions say on every target: the function of an element, constant tables, the record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from fusewright.codegen.cpp import Scalars, compute_type
from fusewright.codegen.range_tables import Tables, one_scale
from fusewright.codegen.text import Lines, block
from fusewright.ir.ops import Size
from fusewright.kernel import Array, Expression, Kernel
from fusewright.schedule.range_sums import RangeReduction


@dataclass(frozen=True)
class RangeSections(ABC):
    """Writes what does not depend on the target."""

    r: RangeReduction
    name: str

    inline: ClassVar[str]  # what stands before the result of a small function
    constant: ClassVar[str]  # and before a table
    index: ClassVar[str]  # counts elements of a plane

    @cached_property
    def tables(self) -> Tables:
        """Of a reduction that is no total."""
        return Tables(self.r)

    @property
    def cells(self) -> int:
        """Different sums per plane."""
        return 1 if self.r.total else self.tables.cells

    @property
    def alone(self) -> bool:
        """Whether a plane has one sum, made of one cell."""
        return self.cells == 1 and self.r.slots == 1

    # ---- the record

    @property
    def sizes(self) -> tuple[tuple[str, int, int], ...]:
        """The numbers of a call: leading sizes, and those of a total."""
        return tuple((f"n{d}", 0, d) for d in range(self.r.x.ndim if self.r.total else self.r.leading))

    @property
    def planes(self) -> Expression:
        """How many planes there are."""
        return " * ".join(name for name, _, d in self.sizes if d < self.r.leading) or "1"

    @property
    def length(self) -> Expression:
        """Elements of a plane."""
        free = " * ".join(name for name, _, d in self.sizes if d >= self.r.leading)
        return free if self.r.total else str(self.tables.plane)

    def record(self, **more: Any) -> Kernel:
        """The kernel; `more` are fields of `Kernel`."""
        r, names = self.r, [name for name, _, _ in self.sizes]
        kept = tuple(str(d) for d in r.root.shape[r.leading :])
        result, shape = (*names[: r.leading], *kept), (*names, *(str(d) for d in r.x.shape[len(names) :]))
        if r.stored is not None:  # in whose shape the sizes of planes are numbers
            result, shape = (("n0", *(str(d) for d in node.shape[1:])) for node in (r.stored, r.x))
        return Kernel(
            name=self.name,
            operands=("x",),
            layouts=("contiguous",),
            sizes=self.sizes,
            output=Array("out", result, r.root.dtype),
            dtypes=(r.x.dtype,),
            shapes=(shape,),
            **more,
        )

    # ---- the text

    def about(self) -> str:
        """What is summed, in words."""
        if self.r.total:
            return "sums over planes of any length, every element read once"
        counts = " x ".join(str(len(a.slots or ())) for a in self.r.axes)
        axes = "axis" if len(self.r.axes) == 1 else "axes"
        return f"{counts} sums over index ranges of the last {axes}, every element read once"

    @abstractmethod
    def read(self, element: str) -> str:
        """An element of the operand in its compute type."""

    @abstractmethod
    def written(self, value: str) -> str:
        """A value of the result's compute type as an element of it."""

    def value(self) -> Lines:
        """The function ``value``: what is summed, from what is read."""
        compute, given = compute_type(self.r.value.dtype), compute_type(self.r.x.dtype)
        scalars = Scalars({self.r.x: "x"}, repr)
        result = scalars.value(self.r.value)
        head, read = f"{self.inline} {compute} value(Element element)", self.read("element")
        if not scalars.lines:
            return ["// An element, in the type it is added in.", *block(head, [f"return {read};"]), ""]
        body = [f"const {given} x = {read};", *scalars.lines, f"return {result};"]
        return ["// What is summed, of an element.", *block(head, body), ""]

    def result(self) -> str:
        """The finished sum as an element of the result, from its total in float64."""
        scale = one_scale(self.r)
        if self.r.mean:
            text = "total / double(length)"
        elif scale is None:
            text = "total * SCALE[slot]"
        else:
            text = "total" if scale == 1.0 else f"total * {scale!r}"
        return text if self.r.root.dtype == torch.float64 else self.written(f"float({text})")

    def table(self, declaration: str, entries: Sequence[str]) -> str:
        """A constant array."""
        return f"{self.constant} {declaration} = {{{', '.join(entries)}}};"

    def segments(self) -> Lines:
        """Tables of the segments of the columns."""
        tables, columns = self.tables, self.tables.columns
        entries = [f"{{{s.begin}, {s.end}}}" for s in columns.segments]
        return [
            f"constexpr {self.index} {'PLANE' if tables.rows else 'LENGTH'} = {tables.plane};",
            f"constexpr int PERIOD = {columns.period}, SEGMENTS = {len(columns.segments)};",
            f"struct Segment {{ {self.index} begin, end; }};  // in the same slots, up to the residue modulo PERIOD",
            self.table("Segment SEGMENT[SEGMENTS]", entries),
        ]

    def rows(self, struct: Sequence[str]) -> Lines:
        """The table of the sets of rows, entries of `struct`."""
        segments, (sets, _) = self.tables.columns.segments, self.tables.sets
        return [
            f"constexpr {self.index} FIRST = {segments[0].begin}, LAST = {segments[-1].end};"
            "  // elements of a row that are summed",
            *struct,
            f"constexpr int SETS = {len(sets)};",
            self.table("Rows ROWS[SETS]", sets),
        ]

    def members(self) -> Lines:
        """Tables of the slots that cells belong to, a bit each."""
        tables = self.tables
        across = [f"{m:#x}" for m in tables.members]
        lines = [self.table("unsigned long long SLOTS_OF[SEGMENTS * PERIOD]", across)]
        if tables.rows:
            down = [f"{m:#x}" for m in tables.sets[1]]
            lines.append(f"constexpr int COLUMN_SLOTS = {len(tables.columns.slots or ())};")
            lines.append(self.table("unsigned long long ROW_SLOTS_OF[SETS]", down))
        return lines

    def scales(self) -> Lines:
        """The table of what slots are multiplied by, where that differs."""
        differ = one_scale(self.r) is None
        return [self.table("double SCALE[SLOTS]", list(map(repr, self.tables.scales)))] if differ else []


def guess(size: Size, symbolic: int) -> int:
    """A number for a size the graph may not know."""
    return size if isinstance(size, int) else symbolic
