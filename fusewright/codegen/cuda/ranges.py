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
class _Writer(CudaRangeSections):
    tuning: Tuning

    # ---- how the work is cut

    @property
    def form(self) -> str:
        return "total" if self.r.total else "line" if len(self.r.axes) == 1 else "planes"

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
        return Launch(self.name, (*pointers, *(Argument("long", n) for n in numbers)), grid, self.tuning.threads)

    # ---- the text

    def text(self) -> str:
        r = self.r
        head, body = {"total": self._total, "line": self._line, "planes": self._planes}[self.form]()
        lines = [
            f"// {self.name}: {self.about()}.",
            primitives("nonfinite", "await_launches", "elements"),
            *fill(texts.HEAD, **self._constants()),
            *self.value(),
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
            "loads": t.loads,
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
            lines += [*self.members(), *fill(texts.BELONGS_PLANES if rows else texts.BELONGS_LINE)]
        return [*lines, *self.scales(), ""]

    def _stored(self, shared: bool) -> str:
        """The statement that writes a slot; parts of planes are written as they are."""
        if shared:
            return "scratch[(blockIdx.y * planes + first + team) * SLOTS + slot] = total;"
        return f"out[(first + team) * SLOTS + {self.place()}] = {self.result()};"

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
        shared = self.shared_planes
        head = fill(
            texts.SUM_PLANE,
            T=compute_type(self.r.value.dtype),
            part=" * gridDim.y" if shared else "",
            start="blockIdx.y * DOWN + down" if shared else "down",
        )
        count = 16 // self.r.x.dtype.itemsize
        while self.tables.width % count:
            count //= 2
        return head, self._entry(texts.PLANES, count=count)
