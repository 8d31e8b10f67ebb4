"""CUDA C++ of range reductions: a team of threads per plane (or per part of one), each element read once.

total   everything of a plane, of any length: one line of memory
line    several ranges of one axis: a line, segment by segment
planes  ranges of two or three axes: threads keep their columns and walk along the rows, one set of rows after another
parked  the same where a block has a plane to itself and sums of all sets fit shared memory: rows come as they lie in
        memory, and are added to the sums of their set there

A reduction of this kind is bound by memory.  About 40 KB must be under way per multiprocessor to hide its latency: a
thread has six or eight loads of 16 bytes in flight, and registers are bounded so that three or four blocks of 256
threads fit, which makes 72 to 128 KB.  Where there are fewer planes than keep a device busy, blocks share planes, and a
second launch adds their parts in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2, prod
from typing import Any

import torch

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import ranges_text as texts
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.cuda.ranges_common import CudaRangeSections
from fusewright.codegen.range_sections import guess
from fusewright.codegen.range_tables import one_scale
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Array, Expression, Kernel, Launch
from fusewright.schedule.range_sums import RangeReduction

MULTIPROCESSORS = 132
FULL = 8 * MULTIPROCESSORS  # blocks that keep a large device busy
ENOUGH = 3 * MULTIPROCESSORS  # planes that do so without being shared
THREADS = 256  # of a block, where planes are large
FEW_CELLS = 9  # different sums of a plane that threads join without shared memory
LONG = 8  # loads of a thread that are worth what a block does before and after
MOST_PARKED = 72 * 1024 // THREADS  # bytes of shared memory for sums, per thread: a multiprocessor has 768 times that
MOST_SETS, MOST_ROWS = 254, 8192  # of rows whose sums are parked: a byte for each says of which set it is


@dataclass(frozen=True)
class Tuning:
    """Threads of a block, blocks that fit a multiprocessor, loads in flight per thread; whether sums may be parked."""

    threads: int
    blocks: int
    loads: int
    parks: bool

    @classmethod
    def of(cls, r: RangeReduction, threads: int, *, parks: bool) -> Tuning:
        """Lines of float32 need 64 registers; what keeps more sums at once, or converts, needs some more."""
        plain = r.x.dtype == torch.float32 and len(r.axes) == 1
        blocks = (4 if plain else 3) * THREADS // threads
        return cls(threads, blocks, 6 if r.x.dtype.itemsize == 2 else 8, parks)


def kernel(r: RangeReduction, name: str, reference: str = "", *, threads: int = THREADS, parks: bool = True) -> Kernel:
    """The kernel of a range reduction; leading sizes, and that of a total, are those of the call."""
    return _Writer(r, name, Tuning.of(r, threads, parks=parks)).kernel(reference)


def worth_measuring(r: RangeReduction) -> list[dict[str, Any]]:
    """Ways to call `kernel`, the most promising first: small planes do not keep many threads busy for long, and few
    sums of large ones may as well be joined set by set."""
    writers = [_Writer(r, "", Tuning.of(r, THREADS // n, parks=True)) for n in (1, 2, 4)]
    whole = {"threads": THREADS, "parks": False}
    if all(w.form != "parked" for w in writers):
        return [whole]
    if writers[0].shared_planes:
        return [{"threads": THREADS, "parks": True}]
    threads = [w.tuning.threads for w in writers if w.form == "parked"]
    threads.sort(key=lambda n: abs(log2(writers[0].packs / (LONG * n))))
    parked = [{"threads": n, "parks": True} for n in threads]
    return [whole, *parked] if writers[0].cells <= FEW_CELLS and threads[0] == THREADS else parked


@dataclass(frozen=True)
class _Writer(CudaRangeSections):
    tuning: Tuning

    # ---- how the work is cut

    @property
    def form(self) -> str:
        if self.r.total or len(self.r.axes) == 1:
            return "total" if self.r.total else "line"
        return "planes" if self.parked is None else "parked"

    @property
    def columns(self) -> int:
        """Neighbouring columns of a thread, which one load brings: a power of two of which all rows are multiples."""
        return self._most_columns if self.parked is None else self.parked[0]

    @property
    def _most_columns(self) -> int:
        count = 16 // self.r.x.dtype.itemsize
        while self.tables.width % count:
            count //= 2
        return count

    @cached_property
    def parked(self) -> tuple[int, int] | None:
        """Columns of a thread, and bytes of shared memory for sums of all sets of rows, where there is room."""
        if not self.tuning.parks or self.r.total or len(self.r.axes) == 1:
            return None
        tables, t = self.tables, self.tuning
        sets = len(tables.sets[0])
        if self.packs < 2 * t.threads or self.alone or sets > MOST_SETS or tables.plane > MOST_ROWS * tables.width:
            return None
        segments, count = tables.columns.segments, self._most_columns
        while count:
            packs = ceil((segments[-1].end - segments[0].begin // count * count) / count)
            across = ceil(packs / ceil(packs / t.threads))
            size = sets * (t.threads // across) * across * count * 8
            if size <= MOST_PARKED * t.threads:
                return count, size
            count //= 2
        return None

    @property
    def loads(self) -> int:
        """Loads under way per thread: more where they are small."""
        small = self.parked is not None and self.columns * self.r.x.dtype.itemsize < 16
        return (2 if small else 1) * self.tuning.loads

    @property
    def packs(self) -> int:
        """Loads of 16 bytes per plane, where its size is known."""
        sizes = (guess(d, 1024) for d in self.r.x.shape[self.r.leading :])
        return ceil(prod(sizes) * self.r.x.dtype.itemsize / 16)

    @property
    def some_planes(self) -> int:
        """A number of planes, for choosing between forms."""
        return prod(guess(d, 8) for d in self.r.x.shape[: self.r.leading])

    @property
    def team(self) -> int:
        """Threads per plane: a block where that gives each a few loads, else the part of a warp that does."""
        t = self.tuning
        if self.parked is not None:
            return t.threads
        crowded = self.some_planes >= FULL * t.threads // 32
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
        return self.some_planes < ENOUGH and several and self.team == self.tuning.threads

    # ---- the record

    def kernel(self, reference: str) -> Kernel:
        planes, teams = self.planes, self.tuning.threads // self.team
        blocks = f"ceil_div({planes}, {teams})" if teams > 1 else planes
        if self.shared_planes:
            return self._in_parts(blocks, reference)
        launches = (self._sums("out", (blocks, "1", "1")),)
        return self.record(source=self.text(), scratch=(), launches=launches, reference=reference)

    def _in_parts(self, blocks: Expression, reference: str) -> Kernel:
        """Blocks along y leave a part of every sum each, and a second launch adds those."""
        t, slots = self.tuning, self.r.slots
        most = max(1, self.packs // (t.threads * t.loads))
        parts = f"max(1, min({most}, {FULL} // max(1, {self.planes})))"
        results = f"({self.planes}) * {slots}" if slots > 1 else self.planes
        finish = Launch(
            f"{self.name}_finish",
            (
                Argument("pointer", "scratch"),
                Argument("pointer", "out"),
                Argument("long", results),
                Argument("int", parts),
                *([Argument("long", self.length)] if self.r.mean else []),
            ),
            (f"ceil_div({results}, {t.threads // 32})", "1", "1"),
            t.threads,
        )
        return self.record(
            source=self.text(),
            scratch=(Array("scratch", (parts, results), torch.float64),),
            launches=(self._sums("scratch", (blocks, parts, "1")), finish),
            reference=reference,
        )

    def _sums(self, to: str, grid: tuple[Expression, Expression, Expression]) -> Launch:
        """The launch of the main kernel."""
        pointers = (Argument("pointer", "x"), Argument("pointer", to))
        numbers = (self.planes, *([self.length] if self.r.total else []))
        arguments = (*pointers, *(Argument("long", n) for n in numbers))
        shared = 0 if self.parked is None else self.parked[1]
        return Launch(self.name, arguments, grid, self.tuning.threads, shared)

    # ---- the text

    def text(self) -> str:
        r = self.r
        forms = {"total": self._total, "line": self._line, "planes": self._planes, "parked": self._parked}
        head, body = forms[self.form]()
        lines = [
            f"// {self.name}: {self.about()}.",
            primitives("nonfinite", "await_launches", "elements"),
            *fill(texts.HEAD, **self._constants()),
            *self.value(),
            *self._tables(),
            *([] if self.form == "parked" else fill(texts.ADD, T=compute_type(r.value.dtype))),
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
                slot=["const int slot = result % SLOTS;"] if one_scale(self.r) is None or self.r.stored else [],
                place="result" if self.r.stored is None else f"result - slot + {self.place()}",
                result=self.result(),
            )
        return "\n".join(lines) + "\n"

    def _entry(self, template: str, **names: object) -> Lines:
        """The main kernel."""
        shared = self.shared_planes
        write = fill(texts.WRITE_ONE if self.alone else texts.WRITE, store=self._stored(shared))
        result = "double" if shared else ELEMENT[self.r.root.dtype]
        to = "scratch" if shared else "out"
        return fill(template, name=self.name, Result=result, to=to, write=write, **names)

    def _constants(self) -> dict[str, object]:
        t = self.tuning
        return {
            "Element": ELEMENT[self.r.x.dtype],
            "T": compute_type(self.r.value.dtype),
            "threads": t.threads,
            "team": self.team,
            "blocks": t.blocks,
            "loads": self.loads,
            "cells": self.cells,
            "slots": self.r.slots,
        }

    def _tables(self) -> Lines:
        """Constant tables of segments, rows and the slots their cells belong to."""
        if self.r.total:
            return []
        lines, rows = self.segments(), self.tables.rows
        if rows:
            lines += self.rows(fill(texts.ROWS_2D if len(rows) == 1 else texts.ROWS_3D))
        if not self.alone:
            lines += self.members()
            if self.form != "parked":
                lines += fill(texts.BELONGS_PLANES if rows else texts.BELONGS_LINE)
        return [*lines, *self.scales(), ""]

    def _stored(self, shared: bool, plane: str = "first + team") -> str:
        """The statement that writes a slot of `plane`; parts of planes are written as they are."""
        if shared:
            return f"scratch[(blockIdx.y * planes + {plane}) * SLOTS + slot] = total;"
        return f"out[({plane}) * SLOTS + {self.place()}] = {self.result()};"

    def _total(self) -> tuple[Lines, Lines]:
        return self._take(1), self._entry(texts.TOTAL)

    def _line(self) -> tuple[Lines, Lines]:
        period = self.r.axes[0].period
        segment = fill(texts.LINE_ONE if period == 1 else texts.LINE_PERIODIC)
        return self._take(period), self._entry(texts.LINE, segment=segment)

    def _take(self, period: int) -> Lines:
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

    def _planes(self) -> tuple[Lines, Lines]:
        head = fill(texts.SUM_PLANE, T=compute_type(self.r.value.dtype), **self._dealt())
        return head, self._entry(texts.PLANES, count=self.columns)

    def _parked(self) -> tuple[Lines, Lines]:
        shared = self.shared_planes
        return [], fill(
            texts.PARKED,
            name=self.name,
            Result="double" if shared else ELEMENT[self.r.root.dtype],
            to="scratch" if shared else "out",
            T=compute_type(self.r.value.dtype),
            width=self.tables.width,
            count=self.columns,
            store=self._stored(shared, "plane"),
            **self._dealt(),
        )

    def _dealt(self) -> dict[str, str]:
        """How rows are dealt to the blocks of a plane."""
        shared = self.shared_planes
        return {"part": " * gridDim.y" if shared else "", "start": "blockIdx.y * DOWN + down" if shared else "down"}
