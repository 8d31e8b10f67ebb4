"""CUDA C++ of contraction groups for Hopper whose windows the threads of a block pool together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

from fusewright.codegen.cuda.contraction_weights import Phases
from fusewright.codegen.cuda.loops import nest
from fusewright.codegen.cuda.warpgroup_epilogue import PositionEpilogue
from fusewright.codegen.cuda.warpgroup_positions import PositionWriter
from fusewright.codegen.text import Lines, block, fill
from fusewright.schedule.axes import Phase
from fusewright.schedule.warpgroup_pools import PoolTile, meeting, shared, shared_numbers

# Values of a window that are on their way to a lane at a time.
AHEAD = 32


@dataclass(frozen=True)
class PoolWriter(PositionWriter):
    """The products are those of positions, whatever window they are in."""

    t: PoolTile

    @cached_property
    def epilogue(self) -> PoolEpilogue:
        return PoolEpilogue(self.c, self.t, self.blocks)

    def cells(self) -> Lines:
        """Constants: the windows of a block, and how their values meet."""
        c, t, meet = self.c, self.t, shared(self.c, self.t)
        names: dict[str, object] = {"turns": t.turns, "windows": prod(t.cells), "numbers": shared_numbers(c, t)}
        names |= {"row": meet.row, "gap": f" + w / {meet.apart}" if meet.apart else ""}
        for i, a in enumerate("dhw"):
            m = meeting(c, t, i)
            names |= {f"cells_{a}": t.cells[i], f"size_{a}": m.size, f"apart_{a}": m.apart}
            names |= {f"folded_{a}": m.folded, f"shared_{a}": m.count}
        return fill(_CELLS, **names)

    def handed_on(self, each: list[tuple[str, Phases]]) -> Lines:
        return self.epilogue.pool(each, self.slots(1))


@dataclass(frozen=True)
class PoolEpilogue(PositionEpilogue):
    """Eight features at a time, the values of all of a block's positions lie in shared memory, while lanes go through
    windows: each through one at a time, of two features, as it has positions of them."""

    pooled_at: ClassVar[str] = "pooled[turn][m][half]"

    t: PoolTile

    def head(self) -> list[Lines]:
        rows = max(1, AHEAD // meeting(self.c, self.t, 2).size)
        joined = self.pooling.join("pair.of[half]", "other.of[half]")
        return [*super().head(), fill(_WINDOW, **self._kinds, rows=rows, joined=joined)]

    @property
    def _kinds(self) -> dict[str, object]:
        """What values of a window become, and that of none."""
        return {"running": self.pooled_type, "empty": self.pooling.empty}

    def prologue(self) -> Lines:
        behind = self.t.numbers_bytes(self.c)
        at = f"shared_memory + STAGED{f' + {behind}' if behind else ''}"
        return [*fill(_PROLOGUE, at=at, running=self.pooled_type), *super().prologue()]

    def open_pool(self) -> Lines:
        return [f"{self.pooled_type} pooled[TURNS][M_TILES][2];"]

    def values(self, phases: Phases, slots: int) -> Lines:
        return self.pool([("acc", phases)], slots)

    def pool(self, each: list[tuple[str, Phases]], slots: int) -> Lines:
        """Pool the accumulators of so many phases, so many of each row along w."""
        products = [self.accumulated(1).replace("acc[", f"{name}[", 1) for name, _ in each]
        apart: dict[tuple[int, ...], list[tuple[str, Phases]]] = {}
        for product, (_, phases) in zip(products, each, strict=True):
            apart.setdefault(self._place(phases), []).append((product, phases))
        held: Lines = []
        for place, some in apart.items():
            lines = self._held(place, some)
            held += block("", lines) if len(apart) > 1 else lines
        meetings = (meeting(self.c, self.t, i) for i in range(3))
        first = [m.lead + m.shift for m in meetings]
        begin = {f"begin_{a}": f"{n} + " if n else "" for a, n in zip("dhw", first, strict=True)}
        pool = fill(_POOL, **self._kinds, slots=slots, held=held, **begin)
        return [*self.products_changed(products, slots, self.own_w(1)), *pool]

    def _place(self, phases: Phases) -> tuple[int, ...]:
        """Which of the positions between two strides that is, along dimensions where those do not meet as one."""
        elements = (p.elements[0] for p in phases)
        return tuple(0 if meeting(self.c, self.t, i).whole else e for i, e in enumerate(elements))

    def _held(self, place: tuple[int, ...], some: list[tuple[str, Phases]]) -> Lines:
        """Join the values that meet at one place, and leave them there."""
        joined: Lines = []
        for product, phases in some:
            lines: Lines = []
            if self.masked:
                p, q, r = (self.position(i, phases[i]) for i in range(3))
                lines = fill(_INSIDE, p=p, q=q, r=r)
            lines.append(f"value = {self.pooling.join('value', self.pooled_value(self.changed(product)))};")
            joined += block("", lines) if len(some) > 1 else lines
        own = ("first_d", self.own_row("first_h"), self.own_column)
        at = [self._at(i, own[i], place[i]) for i in range(3)]
        return fill(_HELD, **self._kinds, d=at[0], h=at[1], w=at[2], each=nest(_FOLDED, joined))

    def _at(self, i: int, own: str, element: int) -> str:
        """Where along axis `i` a thread's cell `own` meets others."""
        m, stride = meeting(self.c, self.t, i), self.c.axes[i].stride
        if m.whole:
            return f"({own}) / {m.folded}" if m.folded > 1 else own
        ahead = m.lead + element
        return f"({own}) * {stride}{f' + {ahead}' if ahead else ''}"

    def position(self, i: int, phase: Phase) -> str:
        (_, apart, padding), stride = self.c.pooling(i), self.c.axes[i].stride
        own = ("rd", self.own_row("rh"), self.own_column)[i]
        first = phase.elements[0] - padding - meeting(self.c, self.t, i).shift
        own = f"({own}) * {stride}" if stride > 1 else own
        return f"cell_{'dhw'[i]} * {apart} + {own}" + (f" + {first}" if first > 0 else f" - {-first}" if first else "")

    def of_cells(self) -> Lines:
        value, loop = self.of_cell(), "for (int turn = 0; turn < TURNS; ++turn)"
        lengths = "cells_d", "cells_h", "cells_w"
        place = [*fill(_PLACE), *self.share("pqr")]
        if self.several:
            return self.joined_at_once([], loop, "TURNS", "turn", place, value)
        return [*self.out_row(*lengths), *nest([loop], [*place, *self.result_of(value, lengths, [])])]


_FOLDED = (
    "for (int rd = first_d; rd < first_d + FOLDED_D; ++rd)",
    "for (int rh = first_h; rh < first_h + FOLDED_H; ++rh)",
)

_CELLS = """
// Cells are windows, and a block has WINDOWS of them, a lane TURNS.  Values of eight features meet in shared memory,
// [d][h][w][feature]; what a thread has of the same windows, FOLDED_D x FOLDED_H rows at least, meets as one.  So a
// window has SIZE of them along each dimension, and begins APART from the one before.
constexpr int CELLS_D = $cells_d, CELLS_H = $cells_h, CELLS_W = $cells_w, WINDOWS = $windows, TURNS = $turns;
constexpr int FOLDED_D = $folded_d, FOLDED_H = $folded_h;
constexpr int SHARED_H = $shared_h, SHARED_ROW = $row, SHARED_VALUES = $numbers;    // rows of a plane; numbers
constexpr int SIZE_D = $size_d, SIZE_H = $size_h, SIZE_W = $size_w;
constexpr int APART_D = $apart_d, APART_H = $apart_h, APART_W = $apart_w;
// Where a row's column is: windows that follow each other begin in other banks.
__device__ __forceinline__ constexpr int shared_column(int w) { return 8 * (w$gap); }
"""

_PROLOGUE = """
$running* const shared_values = reinterpret_cast<$running*>($at);    // of eight features, twice
int eights = 0;    // so many were there
"""

_INSIDE = """
const int p = $p, q = $q, r = $r;
const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R);
"""

# While some lanes go through windows of eight features, others put down the next eight.
_POOL = """
#pragma unroll
for (int m = 0; m < M_TILES; ++m) {
    $running* const values = shared_values + eights++ % 2 * SHARED_VALUES + 2 * quad;
#pragma unroll
    for (int first_d = 0; first_d < OWN_D; first_d += FOLDED_D)
#pragma unroll
        for (int first_h = 0; first_h < OWN_H; first_h += FOLDED_H)
#pragma unroll
            for (int own_w = 0; own_w < $slots; ++own_w) {
                $held
            }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int window = (turn * (THREADS / 32) + warp) * 8 + row;
        const int first_d = ${begin_d}window / (CELLS_H * CELLS_W) * APART_D;
        const int first_h = ${begin_h}window / CELLS_W % CELLS_H * APART_H;
        const $running* const from = values + (first_d * SHARED_H + first_h) * SHARED_ROW +
                                  shared_column(${begin_w}window % CELLS_W * APART_W);
        const Two pair = window < WINDOWS ? of_window(from) : Two{$empty, $empty};
#pragma unroll
        for (int half = 0; half < 2; ++half) pooled[turn][m][half] = pair.of[half];
    }
}
"""

_WINDOW = """
struct alignas(2 * sizeof($running)) Two { $running of[2]; };    // of neighbouring features

// What the values of a window come to, of two features, which begin there.
__device__ __forceinline__ Two of_window(const $running* from) {
    Two pair = {$empty, $empty};
#pragma unroll $rows
    for (int row = 0; row < SIZE_D * SIZE_H; ++row)
#pragma unroll
        for (int w = 0; w < SIZE_W; ++w) {
            const int at = (row / SIZE_H * SHARED_H + row % SIZE_H) * SHARED_ROW + shared_column(w);
            const Two other = *reinterpret_cast<const Two*>(from + at);
#pragma unroll
            for (int half = 0; half < 2; ++half) pair.of[half] = $joined;
        }
    return pair;
}
"""

_HELD = """
Two pair;
#pragma unroll
for (int half = 0; half < 2; ++half) {
    $running value = $empty;
    $each
    pair.of[half] = value;
}
const int place = ($d) * SHARED_H + $h;
*reinterpret_cast<Two*>(values + place * SHARED_ROW + shared_column($w)) = pair;
"""

_PLACE = """
const int window = (turn * (THREADS / 32) + warp) * 8 + row;
const int p = cell_d + window / (CELLS_H * CELLS_W), q = cell_h + window / CELLS_W % CELLS_H;
const int r = cell_w + window % CELLS_W;
const bool inside = window < WINDOWS && p < cells_d && q < cells_h && r < cells_w;
"""
