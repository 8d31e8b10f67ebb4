"""CUDA C++ of range reductions: a team of threads per plane (or per part of one), each element read once.

total   everything of a plane, of any length: one line of memory
line    several ranges of one axis: a line, segment by segment
planes  ranges of two or three axes: threads keep their columns and walk along the rows, one set of rows after another

A reduction of this kind is bound by memory.  About 40 KB must be under way per multiprocessor to hide its latency: a
thread has six or eight loads of 16 bytes in flight, and registers are bounded so that three or four blocks of 256
threads fit, which makes 72 to 128 KB.  Where there are fewer planes than keep a device busy, blocks share planes, and a
second launch adds their parts in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

import torch

from fusewright.codegen.cpp import ELEMENT, Scalars, compute_type
from fusewright.codegen.cuda import ranges_text as texts
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.range_tables import Tables, one_scale
from fusewright.codegen.text import fill
from fusewright.ir.ops import Size
from fusewright.kernel import Argument, Array, Expression, Kernel, Launch
from fusewright.schedule.range_sums import Axis, RangeReduction

MULTIPROCESSORS = 132
FULL = 8 * MULTIPROCESSORS  # blocks that keep a large device busy
ENOUGH = 3 * MULTIPROCESSORS  # planes that do so without being shared


@dataclass(frozen=True)
class Tuning:
    """What may be tried: threads of a block, blocks that fit a multiprocessor, loads in flight per thread."""

    threads: int = 256
    blocks: int = 4
    loads: int = 8

    @classmethod
    def default(cls, r: RangeReduction) -> Tuning:
        """Lines of float32 need 64 registers; what keeps more sums at once, or converts, needs some more."""
        plain = r.x.dtype == torch.float32 and len(r.axes) == 1
        return cls(blocks=4 if plain else 3, loads=6 if r.x.dtype.itemsize == 2 else 8)


def kernel(r: RangeReduction, name: str, reference: str = "", tuning: Tuning | None = None) -> Kernel:
    """The kernel of a range reduction; leading sizes, and that of a total, are those of the call."""
    return _Writer(r, name, tuning or Tuning.default(r)).kernel(reference)


@dataclass(frozen=True)
class _Writer:
    r: RangeReduction
    name: str
    tuning: Tuning

    # ---- how the work is cut

    @property
    def tables(self) -> Tables:
        return Tables(self.r)

    @property
    def form(self) -> str:
        return "total" if self.r.total else "line" if len(self.r.axes) == 1 else "planes"

    @property
    def packs(self) -> int:
        """Loads of 16 bytes per plane, where its size is known."""
        sizes = [_hint(d, 1024) for d in self.r.x.shape[self.r.leading :]]
        return ceil(prod(sizes) * self.r.x.dtype.itemsize / 16)

    @property
    def planes(self) -> int:
        return prod(_hint(d, 8) for d in self.r.x.shape[: self.r.leading])

    @property
    def team(self) -> int:
        """Threads per plane: a block where that gives each a few loads, else the part of a warp that does."""
        t = self.tuning
        crowded = self.planes >= FULL * t.threads // 32
        if self.packs >= t.threads * (t.loads if crowded else 2):
            return t.threads
        team = 32
        while team > 1 and self.packs < 4 * team:
            team //= 2
        while team < 32 and self.cells * (t.threads // team) > 4096:  # 32 KB of shared memory
            team *= 2
        return team

    @property
    def shared_planes(self) -> bool:
        """Whether several blocks work on a plane."""
        several = self.packs >= 2 * self.tuning.threads * self.tuning.loads
        return self.planes < ENOUGH and several and self.team == self.tuning.threads

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.tables.width

    @property
    def cells(self) -> int:
        return 1 if self.r.total else self.tables.cells

    @property
    def alone(self) -> bool:
        """Whether a plane has one sum, made of one cell."""
        return self.cells == 1 and self.r.slots == 1

    # ---- the record

    def kernel(self, reference: str) -> Kernel:
        r, t = self.r, self.tuning
        sizes = tuple((f"n{d}", 0, d) for d in range(r.x.ndim if r.total else r.leading))
        names = [n for n, _, _ in sizes]
        planes = " * ".join(names[: r.leading]) or "1"
        length = [Argument("long", " * ".join(names[r.leading :]))] if r.total else []
        output = Array("out", self._shape(names), r.root.dtype)
        teams = t.threads // self.team
        blocks = f"ceil_div({planes}, {teams})" if teams > 1 else planes
        if not self.shared_planes:
            arguments = (_pointer("x"), _pointer("out"), Argument("long", planes), *length)
            return self._record(
                sizes, output, (), (Launch(self.name, arguments, (blocks, "1", "1"), t.threads),), reference
            )
        most = max(1, self.packs // (t.threads * t.loads))
        parts = f"max(1, min({most}, {FULL} // max(1, {planes})))"
        results = f"({planes}) * {r.slots}" if r.slots > 1 else planes
        scratch = Array("scratch", (parts, results), torch.float64)
        sums = (_pointer("x"), _pointer("scratch"), Argument("long", planes), *length)
        finish = (_pointer("scratch"), _pointer("out"), Argument("long", results), Argument("int", parts))
        launches = (
            Launch(self.name, sums, (blocks, parts, "1"), t.threads),
            Launch(
                f"{self.name}_finish",
                (*finish, *(length if r.mean else [])),
                (f"ceil_div({results}, {t.threads // 32})", "1", "1"),
                t.threads,
            ),
        )
        return self._record(sizes, output, (scratch,), launches, reference)

    def _record(
        self,
        sizes: tuple[tuple[str, int, int], ...],
        output: Array,
        scratch: tuple[Array, ...],
        launches: tuple[Launch, ...],
        reference: str,
    ) -> Kernel:
        names = [n for n, _, _ in sizes]
        shape = (*names, *(str(d) for d in self.r.x.shape[len(names) :]))
        return Kernel(
            self.name,
            self.text(),
            ("x",),
            ("contiguous",),
            sizes,
            output,
            scratch,
            launches,
            reference,
            dtypes=(self.r.x.dtype,),
            shapes=(shape,),
        )

    def _shape(self, names: list[str]) -> tuple[Expression, ...]:
        kept = self.r.root.shape[self.r.leading :]
        return (*names[: self.r.leading], *(str(d) for d in kept))

    # ---- the text

    def text(self) -> str:
        r = self.r
        head, body = {"total": self._total, "line": self._line, "planes": self._planes}[self.form]()
        lines = [
            f"// {self.name}: {self._about()}, every element read once.",
            primitives("nonfinite", "elements"),
            *fill(texts.HEAD, **self._constants()),
            *self._value(),
            *self._tables(),
            *fill(texts.ADD, T=compute_type(r.value.dtype)),
            *fill(texts.JOINED),
            *head,
            *body,
        ]
        if self.shared_planes:
            lines += fill(
                texts.FINISH,
                name=self.name,
                Result=ELEMENT[r.root.dtype],
                length=", index_t length" if r.mean else "",
                slot=["const int slot = result % SLOTS;"] if one_scale(self.r) is None else [],
                result=self._result("total"),
            )
        return "\n".join(lines) + "\n"

    def _entry(self, template: str, **names: object) -> list[str]:
        """The main kernel."""
        shared = self.shared_planes
        write = fill(texts.WRITE_ONE if self.alone else texts.WRITE, store=self._stored(shared))
        result = "double" if shared else ELEMENT[self.r.root.dtype]
        to = "scratch" if shared else "out"
        return fill(template, name=self.name, Result=result, to=to, write=write, **names)

    def _about(self) -> str:
        if self.r.total:
            return "sums over planes of any length"
        counts = " x ".join(str(len(a.slots or ())) for a in self.r.axes)
        return f"{counts} sums over index ranges of the last {'axis' if len(self.r.axes) == 1 else 'axes'}"

    def _constants(self) -> dict[str, object]:
        t = self.tuning
        return {
            "Element": ELEMENT[self.r.x.dtype],
            "T": compute_type(self.r.value.dtype),
            "threads": t.threads,
            "team": self.team,
            "blocks": t.blocks,
            "loads": t.loads,
            "cells": self.cells,
            "slots": self.r.slots,
        }

    def _value(self) -> list[str]:
        """The function ``value``: what is summed, from what is read."""
        compute, read = compute_type(self.r.value.dtype), compute_type(self.r.x.dtype)
        scalars = Scalars({self.r.x: "x"}, lambda node: f"{node!r}")
        result = scalars.value(self.r.value)
        about = "What is summed, of an element." if scalars.lines else "An element, in the type it is added in."
        return [
            f"// {about}",
            f"__device__ __forceinline__ {compute} value(Element element) {{",
            *([f"    const {read} x = widened(element);"] if scalars.lines else []),
            *(f"    {line}" for line in scalars.lines),
            f"    return {result if scalars.lines else 'widened(element)'};",
            "}",
            "",
        ]

    def _tables(self) -> list[str]:
        """Constant tables of segments, rows and the slots their cells belong to."""
        if self.r.total:
            return []
        *rows, columns = self.r.axes
        plane = prod(_hint(d, 0) for d in self.r.x.shape[self.r.leading :])
        lines = [
            f"constexpr int {'PLANE' if rows else 'LENGTH'} = {plane};",
            f"constexpr int PERIOD = {columns.period}, SEGMENTS = {len(columns.segments)};",
            "struct Segment { int begin, end; };  // in the same slots, up to the residue modulo PERIOD",
            _table("Segment SEGMENT[SEGMENTS]", [f"{{{s.begin}, {s.end}}}" for s in columns.segments]),
        ]
        if rows:
            lines += self._rows(rows, columns)
        if not self.alone:
            lines += self._members(rows, columns)
        if one_scale(self.r) is None:
            lines.append(_table("double SCALE[SLOTS]", [repr(s) for s in self.tables.scales]))
        return [*lines, ""]

    def _rows(self, rows: list[Axis], columns: Axis) -> list[str]:
        sets, _ = self.tables.sets
        first, last = columns.segments[0].begin, columns.segments[-1].end
        lines = [f"constexpr int FIRST = {first}, LAST = {last};  // elements of a row that are summed"]
        lines += fill(texts.ROWS_2D if len(rows) == 1 else texts.ROWS_3D)
        return [*lines, f"constexpr int SETS = {len(sets)};", _table("Rows ROWS[SETS]", sets)]

    def _members(self, rows: list[Axis], columns: Axis) -> list[str]:
        """Tables of the slots that cells belong to, a bit each, and the function that looks them up."""
        across = _table(
            "unsigned long long SLOTS_OF[SEGMENTS * PERIOD]", [f"{m:#x}" for s in columns.segments for m in s.members]
        )
        if not rows:
            return [across, *fill(texts.BELONGS_LINE)]
        down = _table("unsigned long long ROW_SLOTS_OF[SETS]", [f"{m:#x}" for m in self.tables.sets[1]])
        count = f"constexpr int COLUMN_SLOTS = {len(columns.slots or ())};"
        return [across, count, down, *fill(texts.BELONGS_PLANES)]

    def _result(self, total: str) -> str:
        """The finished sum, from its total in float64."""
        scale = one_scale(self.r)
        if self.r.mean:
            text = f"{total} / double(length)"
        elif scale is None:
            text = f"{total} * SCALE[slot]"
        else:
            text = total if scale == 1.0 else f"{total} * {scale!r}"
        element = ELEMENT[self.r.root.dtype]
        if element == "double":
            return text
        text = f"float({text})"
        return text if element == "float" else f"narrow_to<{element}>::of({text})"

    def _stored(self, shared: bool) -> str:
        """The statement that writes a slot; parts of planes are written as they are."""
        if shared:
            return "scratch[(blockIdx.y * planes + first + team) * SLOTS + slot] = total;"
        return f"out[(first + team) * SLOTS + slot] = {self._result('total')};"

    def _total(self) -> tuple[list[str], list[str]]:
        return self._take(1), self._entry(texts.TOTAL)

    def _line(self) -> tuple[list[str], list[str]]:
        period = self.r.axes[0].period
        segment = fill(texts.LINE_ONE if period == 1 else texts.LINE_PERIODIC)
        return self._take(period), self._entry(texts.LINE, segment=segment)

    def _take(self, period: int) -> list[str]:
        """The function that adds up part of a line."""
        one = period == 1
        return fill(
            texts.TAKE,
            about=fill(texts.ABOUT_ONE if one else texts.ABOUT_PERIODIC),
            sums="double& sum" if one else "double (&sums)[PERIOD]",
            gather=fill(texts.GATHER_ONE if one else texts.GATHER_PERIODIC),
            single=fill(texts.SINGLE_ONE if one else texts.SINGLE_PERIODIC),
            share=fill(texts.SHARE if self.shared_planes else texts.OWN),
            ends=["if (blockIdx.y > 0) return;"] if self.shared_planes else [],
        )

    def _planes(self) -> tuple[list[str], list[str]]:
        shared = self.shared_planes
        head = fill(
            texts.SUM_PLANE,
            T=compute_type(self.r.value.dtype),
            part=" * gridDim.y" if shared else "",
            start="blockIdx.y * DOWN + down" if shared else "down",
        )
        count = 16 // self.r.x.dtype.itemsize
        while self.width % count:
            count //= 2
        return head, self._entry(texts.PLANES, count=count)


def _table(declaration: str, entries: list[str]) -> str:
    return f"__constant__ const {declaration} = {{{', '.join(entries)}}};"


def _pointer(name: str) -> Argument:
    return Argument("pointer", name)


def _hint(size: Size, symbolic: int) -> int:
    """A number for a size the graph may not know."""
    return size if isinstance(size, int) else symbolic
