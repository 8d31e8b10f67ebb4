"""The steps of a tile that warpgroups multiply: a chunk of channels and some rows of taps each.

While the tensor cores are busy with one step, a block writes the input of the next where they will read it, and starts
reading what comes after that: it is on its way for as long as a whole step, and what follows a tile, take
(`warpgroup_input`).  A warp whose product waits for those of others does nothing else, so every second warpgroup of a
block stages *sooner* than it multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from fusewright.codegen.cuda import warpgroup_producers, warpgroup_text
from fusewright.codegen.cuda.warpgroup_weights import WarpgroupWeights, plus
from fusewright.codegen.text import Lines, block, fill, indent, where
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.warpgroup_staging import TEAM, WarpgroupCut


@dataclass(frozen=True)
class Steps:
    """Writes the steps of one group and tile."""

    c: Contraction
    t: WarpgroupCut

    @cached_property
    def weights(self) -> WarpgroupWeights:
        return WarpgroupWeights(self.c, self.t)

    @property
    def passes(self) -> int:
        """How often a tile's chunks are gone through: once per slab, pass with taps and piece of it."""
        every = (prod(len(p.elements) // n for _, p, n in self.pieces(each[0])) for each in self.weights.passes)
        return self.t.slabs * sum(every)

    def first(self) -> Lines:
        """Stage what the first step of the first tile needs."""
        if self.t.producers:
            return [*self.weights.all_landed(), *warpgroup_producers.first_turn(self.c, self.t)]
        staged = ["read_input();", "write_input(x_tile);"]
        order = [_SOONER] if self._several else []
        if self.t.stay:
            copied = self.weights.all_landed()
            meet = ["__syncthreads();    // until the landing of weights is open"] if copied else []
            return [*order, *block("if (part < tiles)", staged), "fence_async();", *meet, *copied]
        copied = [*self.weights.copy(self.weights.passes[0], "0", "0"), self.weights.copied("0")]
        opened = ["fence_async();", "__syncthreads();    // until landings are open"]
        begun = block("if (part < tiles)", [*copied, *staged, *self.weights.landed()])
        return [*order, *opened, *begun, "fence_async();"]

    def of_pass(self, accumulators: dict[int, str], rows: list[tuple[str, Phase, int]]) -> Lines:
        """All steps of one pass, whose phases have these accumulators; `rows` are the dimensions whose rows are
        computed some at a time (see `pieces`)."""
        w = self.weights
        phases = [i for i in accumulators if i in w.with_taps]
        if not phases:
            return []
        steps = w.chunks * w.slices(phases[0])
        if self.t.producers:
            multiply = [self._multiply(i, accumulators[i], rows) for i in phases]
            return warpgroup_producers.consumed(w, phases, steps, multiply)
        slabs = [f"slab + 1 < {self.t.slabs}"] if self.t.slabs > 1 else []
        more = " || ".join([*slabs, *(f"from_{a} + {n} < {len(p.elements)}" for a, p, n in rows)])
        before, after = (self._next_tile if w.inputs == 1 else self._next_chunk)(phases, more, steps)
        multiply = [self._multiply(i, accumulators[i], rows) for i in phases]
        # Unrolled, the first step would set accumulators between products, for which the assembler makes them wait.
        unrolled = ["#pragma unroll 1"] if len(phases) > 1 and steps > 1 else []
        names = {"steps": steps, "unrolled": unrolled}
        return fill(warpgroup_text.STEPS, **names, multiply=multiply, before=before, after=after)

    def _multiply(self, index: int, accumulators: str, rows: list[tuple[str, Phase, int]]) -> str:
        """The statement that multiplies what is at hand by the taps of one phase."""
        w, phases = self.weights, self.weights.phases[index]
        taps, slices = w.taps[index], w.slices(index)
        each = zip(phases, self.c.axes, w.lay.walks, strict=True)
        d, h, first_w = ((p.first - axis.reach()[0]) // walk.step for p, axis, walk in each)
        x = "x_matrix + x_now * (VECTORS * PLANE)" + plus((d * w.lay.lengths[1] + h) * w.lay.row)
        x += "".join(f" + from_{a} * ELEMENT_{a.upper()}" for a, _, _ in rows)
        at = f"w_matrix + steps % 2 * {w.tile // w.vector}{plus(w.staged_at(index) // w.vector)}"
        if self.t.stay:
            at = f"w_matrix{plus(w.at(index) // w.vector)}"
            at += f" + step * {w.of_chunk(index) // w.vector}" if w.chunks > 1 else ""
        first = "0" if slices == 1 else f"step % {slices} * {self.t.tap_rows}"
        count = str(min(taps.rows, self.t.tap_rows))
        if taps.rows % self.t.tap_rows and slices > 1:
            count = f"{taps.rows} - {first} < {count} ? {taps.rows} - {first} : {count}"
        elements = len(phases[2].elements)
        if self.t.whole_cells:  # taps are spread, from the first input on that a row has
            first_w = 0
        sizes = f"{len(phases[1].taps)}, {taps.per_row}, {elements}, {first_w}"
        return f"multiply<{sizes}>({accumulators}, {x}, {at}, {first}, {count});"

    def pieces(self, index: int) -> list[tuple[str, Phase, int]]:
        """The dimensions whose rows are computed some at a time: name, phase, rows at a time."""
        d, h, _ = self.weights.phases[index]
        return [(a, p, n) for a, p, n in (("d", d, self.t.rows_d), ("h", h, self.t.rows_h)) if len(p.elements) > n]

    def loops(self, index: int) -> Lines:
        """The loops over them."""
        each = self.pieces(index)
        slabs = ["#pragma unroll 1", f"for (int slab = 0; slab < {self.t.slabs}; ++slab)"] if self.t.slabs > 1 else []
        return [*slabs, *(f"for (int from_{a} = 0; from_{a} < {len(p.elements)}; from_{a} += {n})" for a, p, n in each)]

    # -- what comes next: what begins before the tensor cores are busy, and what comes after

    def _next_tile(self, phases: list[int], more: str, steps: int) -> tuple[Lines, Lines]:
        """All channels of the next tile, in the first step of this one; the weights of the next rows of taps."""
        w = self.weights
        weights: Lines = []
        if not self.t.stay:
            over = "next == 0" + (f" && !({more})" if more else "")
            guard = f"if (!({over}) || another) " if phases == w.passes[-1] else ""
            weights = [f"const int next = (step + 1) % {steps};", *self._next_weights(phases, over, guard)]
        landed = [] if self.t.stay else ["++steps;", *w.landed()]
        if phases != w.passes[0]:
            return weights, landed
        when = [*(["step == 0"] if steps > 1 else []), *(f"from_{a} == 0" for a in "dh" if f"from_{a}" in more)]
        sooner, later = self._write_input(when)
        return [*weights, *sooner], [*later, *landed]

    def _next_chunk(self, phases: list[int], more: str, steps: int) -> tuple[Lines, Lines]:
        """The next channels, or rows of taps, of this pass, of the next one over this tile, or of the next tile."""
        slices, last = self.weights.slices(phases[0]), phases == self.weights.passes[-1]
        lines: Lines = []
        if slices > 1 or not self.t.stay:
            lines += [f"const int next = (step + 1) % {steps};"]
        if not self.t.stay:
            over = "next == 0" + (f" && !({more})" if more else "")
            same = f"next > 0 || {more}" if more else "next > 0"
            lines += self._next_weights(phases, over, f"if ({same} || another) " if last else "")
        others = [f"next % {slices} == 0"] if slices > 1 else []
        sooner, later = self._write_input(others)
        after = [*later, f"{where(others)}x_now = 1 - x_now;"]
        return [*lines, *sooner], after if self.t.stay else [*after, "++steps;", *self.weights.landed()]

    def _next_weights(self, phases: list[int], over: str, guard: str) -> Lines:
        """Start copying the weights of the next step: of the next pass where this one is `over`."""
        w = self.weights
        following = w.passes[(w.passes.index(phases) + 1) % len(w.passes)]
        half = "(steps + 1) % 2"
        if following == phases:
            return [*_when(guard, w.copy(phases, "next", half)), w.copied(half)]
        others = _under("else", w.copy(phases, "next", half))
        lines = [*_under(f"if ({over})", w.copy(following, "0", half)), *others]
        return [*_when(guard, lines), w.copied(half)]

    @property
    def _several(self) -> bool:
        """Whether a block has several warpgroups."""
        return self.t.warps > TEAM

    def _write_input(self, when: list[str]) -> tuple[Lines, Lines]:
        """The statements that stage the input of the next chunk or tile in the other buffer: what half of several
        warpgroups do before they multiply, and the others afterwards."""
        statement = "write_input(x_tile + (1 - x_now) * X_TILE);"
        if not self._several:
            return [], [where(when) + statement]
        return [where(["sooner", *when]) + statement], [where(["!sooner", *when]) + statement]


_SOONER = "const bool sooner = warp / 4 % 2;    // than it multiplies, this warpgroup stages"


def _when(guard: str, statements: Lines) -> Lines:
    """The statements behind a guard, if there is one."""
    if len(statements) == 1 or not guard:
        return [guard + statements[0], *statements[1:]]
    return [f"{guard}{{", *indent(statements), "}"]


def _under(head: str, statements: Lines) -> Lines:
    """The statements as a branch."""
    return block(head, statements) if len(statements) > 1 else [head, *indent(statements)]
