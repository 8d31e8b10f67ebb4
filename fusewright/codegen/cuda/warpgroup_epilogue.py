"""Where a thread's values of a warpgroup's product are; what happens to them is said in `contraction_epilogue`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.codegen.cuda import contraction_finish_text as finish
from fusewright.codegen.cuda import kept_channels
from fusewright.codegen.cuda import warpgroup_positions_text as texts
from fusewright.codegen.cuda.contraction_elements import CHANNELS
from fusewright.codegen.cuda.contraction_epilogue import OWN_CELLS, OWN_ROWS, Epilogue
from fusewright.codegen.cuda.contraction_folds import COLUMN, ROW
from fusewright.codegen.cuda.loops import UNROLL, nest
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.axes import Phase
from fusewright.schedule.kept_channels import KeptChannels
from fusewright.schedule.output_rows import holds_halves
from fusewright.schedule.warpgroup import WarpgroupTile
from fusewright.schedule.warpgroup_positions import PositionTile
from fusewright.schedule.warpgroup_staging import couples, phases_side_by_side
from fusewright.schedule.warpgroup_windows import WindowTile


@dataclass(frozen=True)
class Run:
    """What a thread has of a row where phases along w are computed in one pass.

    own_w    text: its cell along w in turn `s`; `taken` of its slots are taken in each
    values   the accumulators, `acc` of the first phase and `beside` of others, as they lie in the output
    others   the text of how they are written where rows are no number of runs
    """

    own_w: str
    taken: int
    values: list[str]
    others: str


def beside(count: int) -> list[str]:
    """What the accumulators of so many phases along w are called."""
    return ["acc", *("beside" if i == 1 else f"beside_{i}" for i in range(1, count))]


@dataclass(frozen=True)
class PhasesEpilogue(Epilogue):
    """Phases may share a pass; where they are neighbours along w and written, that happens at once."""

    t: WarpgroupTile | PositionTile

    def numbers_arrived(self) -> Lines:
        """Wait for the numbers that are in registers, before any input is on its way."""
        lines = [f"{name}_at = arrived({name}_at, zero);" for name in self._ones]
        for name in self.in_registers:
            at = f"{name}_at[i / 2][i % 2]"
            lines += [UNROLL, f"for (int i = 0; i < 2 * M_TILES; ++i) {at} = arrived({at}, zero);"]
        return [*fill(finish.ZERO), *lines] if lines else []

    @property
    def couples(self) -> bool:
        """Whether the phases along w are computed in one pass, and their values written as neighbours."""
        return couples(self.c, self.t)

    @property
    def phases_w(self) -> int:
        """How many."""
        return phases_side_by_side(self.c, self.t)

    @property
    def first_r(self) -> str:
        return f"{self.phases_w} * ({self.first_w})" if self.couples else super().first_r

    def _of_phases(self, value: str) -> list[str]:
        """An accumulator, and those that others have in its place."""
        return [value.replace("acc[", f"{name}[", 1) for name in beside(self.phases_w)]

    @property
    @abstractmethod
    def run(self) -> Run:
        """What a thread has of a row where phases are coupled."""

    def coupled(self, phases: tuple[Phase, Phase, Phase], slots: int) -> Lines:
        """Write what the phases along w come to, of which `phases` has the first: neighbours of an output row."""
        p, q, r = (self.position(i, phases[i]) for i in range(3))
        run = self.run
        changed = self.products_changed(run.values, slots // run.taken, run.own_w)
        if self.t.by_rows:
            return [*changed, *self._row_loops(slots, OWN_ROWS, (p, q), "PQR")]
        values = [self.changed(value, f"[m][half][{i}]") for i, value in enumerate(run.values)]
        written = [
            *([] if self.whole else [self.feature]),
            f"Compute run[{len(values)}] = {{{', '.join(values)}}};",
            f"write_run(&{self.stored_at}, run, {self.there}, R - r, R, quad);",
        ]
        body = [
            f"const int own_w = {run.own_w};    // the cell, whose positions are neighbours",
            f"const int p = {p}, q = {q}, r = {r};",
            "const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q);",
            self.pointer("P", "Q", "R"),
            *self.runs_beside(len(values)),
            *nest(CHANNELS, written),
        ]
        return [
            *changed,
            *self.out_row("P", "Q", "R"),
            *nest([*OWN_ROWS, f"for (int s = 0; s < {slots // run.taken}; ++s)"], body),
        ]

    def _pairs(self) -> list[Lines]:
        return [self._write_run()] if self.couples and not self.t.by_rows else super()._pairs()

    def _write_run(self) -> Lines:
        run, count = self.run, len(self.run.values)
        narrowed = ", ".join(f"narrow_to<{self.result_type}>::of(run[{i}])" for i in range(count))
        others = fill(run.others, type=self.result_type, count=count)
        return fill(finish.WRITE_RUN, type=self.result_type, count=count, narrowed=narrowed, others=others)


@dataclass(frozen=True)
class WarpgroupEpilogue(PhasesEpilogue):
    """Column n of the j-th eight of an instruction is cell 8 * j + n, of one element of the cells along w."""

    t: WarpgroupTile

    @property
    def side_by_side(self) -> bool:
        return True

    @property
    def run(self) -> Run:
        cells = (self.accumulator("s", f"2 * half{more}") for more in ("", " + 1"))
        values = [value for acc in cells for value in self._of_phases(acc)]
        return Run("2 * s", 2, values, finish.EACH_OF_QUAD)

    def held_for_rows(self, slots: int) -> Lines:
        if not self.couples:
            return super().held_for_rows(slots)
        run = self.run
        values, count = [self.held(self.changed(value)) for value in run.values], len(run.values)
        held = [f"const int own_w = {run.own_w};"]
        kind, taken = ("float4", 4) if count % 4 == 0 else ("float2", 2)
        kind, taken = ("Word", 2) if holds_halves(self.c) else (kind, taken)
        for i in range(0, count, taken):
            place = f"row * ROW_PITCH + {4 * count} * s + {count} * quad{f' + {i}' if i else ''}"
            whole = f"{kind}{{{', '.join(values[i : i + taken])}}}"
            held.append(f"*reinterpret_cast<{kind}*>(&team_rows[{place}]) = {whole};")
        return nest([f"for (int s = 0; s < {slots // run.taken}; ++s)"], held)

    def accumulator(self, tile: str, lane: str) -> str:
        return f"acc[rd][{tile} / EIGHTS_W][m][rh][{tile} % EIGHTS_W][{lane}]"

    def own_w(self, per_cell: int) -> str:
        return "s / 2 % EIGHTS_W * 2 + s % 2" if per_cell > 1 else "s"

    def element_w(self, per_cell: int) -> str:
        return "s / 2 / EIGHTS_W"


@dataclass(frozen=True)
class _FeaturesEpilogue(Epilogue):
    """Column n of a product is the block's n-th feature; no two warps share a position."""

    other_channels, other_positions = COLUMN, ROW

    t: PositionTile | WindowTile

    @property
    def pairs(self) -> bool:
        return False

    @property
    def exchanges(self) -> bool:
        return False

    @property
    def own_feature(self) -> str:
        return "8 * m + 2 * quad + half"

    @property
    def first_feature(self) -> tuple[str, str]:
        return "2 * quad", "8 * m + half"

    @property
    def first_of_rows(self) -> tuple[str, Sequence[str]]:
        return "8 * m", CHANNELS[:1]

    @property
    def first_w(self) -> str:
        return "cell_w + 8 * warp_w * TILES_W"

    @property
    def column_of_team(self) -> str:
        """Where in the team's row a thread's cell `own_w` is."""
        return "8 * own_w + row"

    def held_for_rows(self, slots: int) -> Lines:
        if self.c.window is not None:
            held = self._pooled_to(f"(2 * quad + half) * ROW_PITCH + {self.column_of_team}", self.column_of_team)
            return nest(["for (int own_w = 0; own_w < OWN_W; ++own_w)", CHANNELS[1]], held)
        value = self.changed(self.accumulated(1))
        held = nest(CHANNELS[1:], [f"team_rows[(2 * quad + half) * ROW_PITCH + column] = {self.held(value)};"])
        place = ["const int own_w = s;", f"const int column = {self.column_of_team};"]
        return nest([f"for (int s = 0; s < {slots}; ++s)"], [*place, *held])

    def of_channel(self, name: str) -> str:
        if self.late or self.t.keeps_numbers(self.c):
            return super().of_channel(name)
        return f"numbers[{self.of_channels.index(name)}][{self.own_feature}]"

    def numbers(self, names: Sequence[str]) -> Lines:
        if self.t.keeps_numbers(self.c):
            return super().numbers(names)
        loads = [f"numbers[{n}][i] = {self.number(name)};" for n, name in enumerate(names)]
        return fill(texts.NUMBERS, loads=loads)

    @property
    def in_registers(self) -> list[str]:
        return super().in_registers if self.t.keeps_numbers(self.c) else []

    def kept_elements(self) -> int:
        """The numbers per channel that are not in registers."""
        return self.t.own_bytes(self.c) // 4


@dataclass(frozen=True)
class PositionEpilogue(PhasesEpilogue, _FeaturesEpilogue):
    """Row n of the j-th eight of an instruction is cell n of its j-th eight of cells."""

    t: PositionTile

    @property
    def run(self) -> Run:
        return Run(self.own_w(1), 1, self._of_phases(self.accumulated(1)), finish.EACH)

    def held_for_rows(self, slots: int) -> Lines:
        if not self.couples:
            return super().held_for_rows(slots)
        place = "team_rows[(2 * quad + half) * ROW_PITCH + column + {}] = {};"
        values = [self.held(self.changed(value)) for value in self.run.values]
        held = nest(CHANNELS[1:], [place.format(i, value) for i, value in enumerate(values)])
        at = ["const int own_w = s;", f"const int column = {len(values)} * ({self.column_of_team});"]
        return nest([f"for (int s = 0; s < {slots}; ++s)"], [*at, *held])

    def head(self) -> list[Lines]:
        if isinstance(self.c.shares, KeptChannels):
            return [*super().head(), kept_channels.function(self.c.shares, self.c.features, whole=self.whole)]
        if self.c.shares is None:
            return super().head()
        names = {"exponential": "total += value = exponential", "share": "1 / total", "joined": "*"}
        if self.c.shares.op.log:
            names = {"exponential": "value -= largest, total += exponential", "share": "log(total)", "joined": "-"}
        return [*super().head(), fill(texts.SOFTMAX, **names)]

    def changed(self, value: str, at: str = "[m][half]") -> str:
        if self.c.shares is None or self.c.shares_of_pooled:
            return super().changed(value, at)
        there = self.c.after is not None and self.c.window is None
        return f"after({value}, m, half)" if there else value

    def prologue(self) -> Lines:
        if not self.t.spread:
            return super().prologue()
        numbers = self.t.numbers_bytes(self.c)
        at = f"shared_memory + STAGED{f' + {numbers}' if numbers else ''}"
        return [f"float* const products_of_rows = reinterpret_cast<float*>({at});", *super().prologue()]

    def values(self, phases: tuple[Phase, Phase, Phase], slots: int) -> Lines:
        return [*self._shares("acc", slots, len(phases[2].elements)), *super().values(phases, slots)]

    def coupled(self, phases: tuple[Phase, Phase, Phase], slots: int) -> Lines:
        shares = [line for acc in beside(self.phases_w) for line in self._shares(acc, slots, 1)]
        return [*shares, *super().coupled(phases, slots)]

    def _shares(self, name: str, slots: int, per_cell: int) -> Lines:
        """The softmax over the channels of every position, or what else is made of them, in place of the products."""
        if self.c.shares is None or self.c.shares_of_pooled:
            return []
        at = self.accumulated(per_cell).replace("acc[", f"{name}[", 1)
        lines = [f"const int own_w = {self.own_w(per_cell)};", *self._made_anew(at, super().changed(at))]
        return nest([*OWN_ROWS, f"for (int s = 0; s < {slots}; ++s)"], lines)

    def _made_anew(self, at: str, value: str) -> Lines:
        """Statements that put what is made of a position's channels, each a `value`, where they are kept."""
        channels = [self.feature, f"values[m][half] = chosen(feature < O, {value}, -Compute(INFINITY));"]
        channels = [f"values[m][half] = {value};"] if self.whole else channels
        return [
            "Compute values[M_TILES][2];",
            *nest(CHANNELS, channels),
            "among_channels(values, quad);" if isinstance(self.c.shares, KeptChannels) else "softmax(values);",
            *nest(CHANNELS, [f"{at} = values[m][half];"]),
        ]

    def of_cells(self) -> Lines:
        if not self.c.shares_of_pooled:
            return super().of_cells()
        place = self.place_of_cell()
        made = self._made_anew(self.pooled_at, self.of_window(self.pooled_at))
        return [*nest(OWN_CELLS, [*place, *made]), *super().of_cells()]

    def of_cell(self) -> str:
        if not self.c.shares_of_pooled:
            return super().of_cell()
        return f"after({self.pooled_at}, m, half)" if self.c.after is not None else self.pooled_at

    def accumulated(self, per_cell: int) -> str:
        element = self.element_w(per_cell) if per_cell > 1 else "0"
        if self.t.wide:
            return f"acc[rd][{element}][rh][own_w / 2][m][2 * (own_w % 2) + half]"
        return f"acc[rd][{element}][rh / ROWS_H / 2 * ROWS_H + rh % ROWS_H][own_w][m][2 * (rh / ROWS_H % 2) + half]"

    def own_row(self, own: str) -> str:
        if self.t.wide:
            return super().own_row(own)
        return f"8 * (warp_h / 4 * TILES_H + {own} / 2) + 2 * (warp_h % 4) + {own} % 2"

    @property
    def first_w(self) -> str:
        return "cell_w + 64 * (warp_w / 4 * TILES_W)" if self.t.wide else super().first_w

    @property
    def column_of_team(self) -> str:
        return "64 * (own_w / 2) + 16 * (warp_w % 4) + 8 * (own_w % 2) + row" if self.t.wide else super().column_of_team

    @property
    def own_column(self) -> str:
        """Which of the columns that a block computes the thread has as its `own_w`-th."""
        if self.t.wide:
            return "64 * (warp_w / 4 * TILES_W + own_w / 2) + 16 * (warp_w % 4) + 8 * (own_w % 2) + row"
        return "8 * (warp_w * TILES_W + own_w) + row"

    @property
    def cell_w(self) -> str:
        own = self.own_column
        # What only helps others is the cell behind the last one.
        return f"({own} < CELLS_W ? cell_w + {own} : cells_w)" if self.t.spread else f"cell_w + {own}"


@dataclass(frozen=True)
class WindowEpilogue(_FeaturesEpilogue):
    """A warp has two eights of an instruction's rows: row n of one is its n-th cell along w."""

    rows_in_turn = 4
    t: WindowTile

    def accumulated(self, per_cell: int) -> str:
        if self.t.paired_h:
            return "acc[rh / 2][own_w][m][2 * (rh % 2) + half]"
        return "acc[rh][own_w / 2][m][2 * (own_w % 2) + half]"

    @property
    def cell_w(self) -> str:
        return "cell_w + 8 * (warp_w * OWN_W + own_w) + row"
