"""What happens to a contraction's accumulators: pointwise trees, window pooling, reduction, writing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, Protocol

from fusewright.codegen.cuda import contraction_finish_text as texts
from fusewright.codegen.cuda.contraction_box import scaled_early
from fusewright.codegen.cuda.contraction_elements import CHANNELS, ElementText
from fusewright.codegen.cuda.contraction_finish import Block
from fusewright.codegen.cuda.contraction_folds import COLUMN
from fusewright.codegen.cuda.contraction_values import is_one
from fusewright.codegen.cuda.contraction_walk import moved
from fusewright.codegen.cuda.loops import UNROLL, nest
from fusewright.codegen.text import Lines, block, fill
from fusewright.schedule.axes import Phase
from fusewright.schedule.output_rows import FEATURES, holds_halves, rows_bytes
from fusewright.schedule.output_rows import Cut as WritesRows
from fusewright.schedule.residues import Walks, walks
from fusewright.schedule.tiling import side_by_side


class Cut(Block, WritesRows, Protocol):
    """What has to be known of how a block's cells are cut: those it has, and the rows of one computed at a time."""

    @property
    def threads(self) -> int: ...
    @property
    def warps_m(self) -> int: ...
    @property
    def cells(self) -> tuple[int, int, int]: ...
    @property
    def rows_d(self) -> int: ...
    @property
    def rows_h(self) -> int: ...


@dataclass(frozen=True)
class Epilogue(ElementText):
    """Writes the text after the multiplication for one group and tiling."""

    # Features of which a warp writes a row in one turn of a loop: more of them take registers that others need.
    rows_in_turn: ClassVar[int] = 2
    # The value of the window that loops over a thread's are at, of channel (m, half).
    pooled_at: ClassVar[str] = "pooled[own_d][own_h][own_w][m][half]"

    t: Cut

    @property
    def late(self) -> bool:
        return self.t.by_rows and bool(self.c.elements)

    # -- where a thread's values are

    @cached_property
    def walks(self) -> Walks:
        """Which cells a tile has."""
        return walks(self.c, self.t.cells)

    def cell(self, i: int, own: str) -> str:
        """The cell along d or h that the thread has as its `own`-th."""
        own = self.own_row(own) if i == 1 else own
        return moved(f"cell_{'dh'[i]}", own, self.walks[i], "dh"[i])

    @property
    def side_by_side(self) -> bool:
        """Whether the cells of a thread are neighbours along w (`tiling.side_by_side`)."""
        return side_by_side(self.c)

    def accumulated(self, per_cell: int) -> str:
        """The value of slot s of this thread along w, and of its channel (m, half)."""
        return self.accumulator("s / 2", "2 * half + s % 2")

    def accumulator(self, tile: str, lane: str) -> str:
        """A value of this thread, of 8-position tile `tile` along w and of a pair of lanes' columns."""
        return f"acc[rd][rh][{tile}][m][{lane}]"

    def own_w(self, per_cell: int) -> str:
        """Which of the thread's cells along w slot s is in, and below the position in it."""
        return f"s / {per_cell}" if per_cell > 1 else "s"

    def element_w(self, per_cell: int) -> str:
        return f"s % {per_cell}"

    @property
    def cell_w(self) -> str:
        """The cell along w that a thread's slot `own_w` holds."""
        if self.side_by_side:
            return "cell_w + 4 * warp_w * OWN_W + own_w / 2 * 8 + 2 * quad + own_w % 2"
        return "cell_w + 4 * (warp_w * OWN_W + own_w) + quad"

    def own_row(self, own: str) -> str:
        """Which of the tile's rows of cells the thread has as its `own`-th."""
        return f"warp_h * OWN_H + {own}"

    @property
    def feature(self) -> str:
        """The statement that says which feature the channel at hand is."""
        return f"const int feature = first_feature + {self.own_feature};"

    @property
    def scale(self) -> float | None:
        return None if self.c.box is None or scaled_early(self.c) else self.c.box.scale

    def head(self) -> list[Lines]:
        """Declarations of what follows the multiplication."""
        return [*super().head(), *self._pairs()]

    def _pairs(self) -> list[Lines]:
        """How two neighbours in memory are written at once, or whole rows."""
        if self.t.by_rows:
            team = self.t.team
            names = {"positions": team.positions, "warps": team.warps, "type": self.result_type}
            if holds_halves(self.c):
                return [fill(texts.WRITE_ROWS_OF_HALF, pitch=team.pitch_of_halves, **names)]
            # What is read on the way out is on its way for longer.
            at_once = min(FEATURES // team.warps, 2 * self.rows_in_turn if self.late else self.rows_in_turn)
            assert FEATURES % (at_once * team.warps) == 0, "every warp of a team has as many rows"
            # Features may be an odd number of elements apart, for lanes to meet less: no pairs begin where those do.
            together = "RUN" if team.pitch % 2 == 0 else "1"
            names |= {"pitch": team.pitch, "at_once": at_once, "together": together}
            return [fill(texts.WRITE_ROWS, **names, **self.late_names(""))]
        if self.neighbours:
            return [fill(texts.PAIR, type=self.result_type)]
        return [fill(texts.WRITE_PAIR, type=self.result_type)] if self.pairs else []

    @property
    def at_once(self) -> bool:
        return self.kind == "channels" and self.joining.at_once

    @property
    def several(self) -> bool:
        """Whether running results take in several values of a thread at once, as `Joining.at_once` has it."""
        return self.closes and self.joining.at_once

    @property
    def whole(self) -> bool:
        """Whether every block has all of its features."""
        return self.c.features % self.t.block_m == 0

    # -- functions and state -----------------------------------------------------------------------------------------

    def prologue(self) -> Lines:
        """Per-channel numbers in registers, and running totals."""
        lines = self.numbers(self.of_channels) if self.of_channels and not self.late else []
        lines += [f"Compute {name}_at = widened({name}[0]);" for name in self._ones]
        lines += self.functions()
        if self.t.by_rows:
            behind, warps = 4 * self.kept_elements() - rows_bytes(self.t), self.t.team.warps
            team = "warp" if warps == 1 else f"warp / {warps}"
            held = self.result_type if holds_halves(self.c) else "float"
            lines += fill(texts.ROWS_THERE, behind=f" + {behind}" if behind else "", team=team, held=held)
        (_, kind), empty = self.own_joining.running, self.own_joining.empty
        if self.kind == "positions":
            lines += [f"{kind} total[M_TILES][2];", UNROLL]
            lines += [f"for (int i = 0; i < 2 * M_TILES; ++i) total[i / 2][i % 2] = {empty};"]
        if self.kind == "all":
            lines += [f"{kind} total = {empty};"]
        if self.exchanges:
            kind = self.tile_type
            lines += [f"{kind}* const exchange = reinterpret_cast<{kind}*>(shared_memory + STAGED);"]
            lines += [f"constexpr int {n} = {self.local(i)};" for i, n in enumerate(("LOCAL_D", "LOCAL_H", "LOCAL_W"))]
        return lines

    @property
    def _ones(self) -> list[str]:
        """The operands that have one number."""
        return [name for node, name in self.read() if is_one(node)]

    @property
    def in_registers(self) -> list[str]:
        """The operands of whose numbers per channel a thread keeps its own."""
        return [] if self.late else self.of_channels

    def numbers(self, names: Sequence[str]) -> Lines:
        """The numbers per channel of these operands, where `of_channel` finds them."""
        loads = [f"{name}_at[m][half] = {self.number(name)};" for name in names]
        lines = ["", f"// Per-channel numbers of this lane's {'columns' if self.other_channels == COLUMN else 'rows'}."]
        return [*lines, *(f"Compute {n}_at[M_TILES][2];" for n in names), *nest(CHANNELS, [self.feature, *loads])]

    def number(self, name: str) -> str:
        """The number of the feature at hand in an operand that has one per channel."""
        read = f"widened({name}[{self.of_sample(name)}group * O + feature])"
        return read if self.whole else f"feature < O ? {read} : Compute(0)"

    @property
    def there(self) -> str:
        """Whether there is a result at the position and of the feature at hand."""
        return "inside" if self.whole else "inside && feature < O"

    # -- one pass ----------------------------------------------------------------------------------------------------

    def open_tile(self) -> Lines:
        """State of one tile: pooled values, sums in the compute type."""
        lines = self.open_pool() if self.c.window is not None else []
        if self.kind == "positions":
            lines += [f"{self.tile_type} of_tile[M_TILES][2];", UNROLL]
            lines += [f"for (int i = 0; i < 2 * M_TILES; ++i) of_tile[i / 2][i % 2] = {self.own_joining.empty};"]
        if self.kind == "all":
            lines += [f"{self.tile_type} of_tile = {self.own_joining.empty};"]
        return lines

    def open_pool(self) -> Lines:
        """The values of a thread's windows, of which there is nothing yet."""
        each = "for (int i = 0; i < OWN_D * OWN_H * OWN_W * M_TILES * 2; ++i)"
        empty = nest([each], [f"(&pooled[0][0][0][0][0])[i] = {self.pooling.empty};"])
        return [f"{self.pooled_type} pooled[OWN_D][OWN_H][OWN_W][M_TILES][2];", *empty]

    def values(self, phases: tuple[Phase, Phase, Phase], slots: int) -> Lines:
        """Hand the accumulators of one pass, so many of each row along w, to the pool, or straight on."""
        per_cell = len(phases[2].elements)
        position = [self.position(i, phases[i]) for i in range(3)]
        lines = self.products_changed([self.accumulated(per_cell)], slots, self.own_w(per_cell))
        if self.t.by_rows and self.c.window is None:
            return [*lines, *self._row_loops(slots, OWN_ROWS, position[:2], "PQR")]
        if self.pairs:
            return [*lines, *self._pair_loops(slots // 2, position)]
        return [*lines, *self._value_loops(slots, per_cell, position)]

    def products_changed(self, products: Sequence[str], slots: int, own_w: str) -> Lines:
        """Statements that change so many accumulators of each row along w in place, where that is to be."""
        loops = [*OWN_ROWS, f"for (int s = 0; s < {slots}; ++s)"]
        return self.all_changed(products, loops, [f"const int own_w = {own_w};"], CHANNELS)

    @property
    def pairs(self) -> bool:
        """Whether two neighbours of an output row, which a thread holds, are written at once."""
        everywhere = self.kind == "store" and self.c.window is None and not self.c.writes_last
        return everywhere and side_by_side(self.c) and self.c.axes[2].stride == 1

    # -- rows that are written from shared memory

    @property
    def first_w(self) -> str:
        """The first cell along w that a thread's team has."""
        return "cell_w + 4 * warp_w * OWN_W"

    @property
    def first_r(self) -> str:
        """The first position along w that it has."""
        return self.first_w

    @property
    def first_of_rows(self) -> tuple[str, Sequence[str]]:
        """Of the block's features the first of eight that a team writes, in these loops."""
        return "16 * (warp_m * M_TILES + m) + 8 * half", CHANNELS

    def held(self, value: str) -> str:
        """A value as it is held."""
        return f"narrow_to<{self.result_type}>::of({value})" if holds_halves(self.c) else value

    def held_for_rows(self, slots: int) -> Lines:
        """A thread's values of eight features, to where they are written from."""
        if self.c.window is not None:
            loops, column = ["for (int own_w = 0; own_w < OWN_W; ++own_w)"], "own_w / 2 * 8 + 2 * quad + own_w % 2"
            return nest(loops, self._pooled_to(f"row * ROW_PITCH + {column}", column))
        first, second = (self.held(self.changed(self.accumulator("j", f"2 * half{e}"))) for e in ("", " + 1"))
        kind = "Word" if holds_halves(self.c) else "Neighbours"
        at = f"reinterpret_cast<{kind}*>(&team_rows[row * ROW_PITCH + 8 * j + 2 * quad])"
        return nest([f"for (int j = 0; j < {slots // 2}; ++j)"], [f"*{at} = {kind}{{{first}, {second}}};"])

    def _pooled_to(self, at: str, column: str) -> Lines:
        """Leave the pooled value of cell `own_w`, which is `column` of the team's row, in shared memory."""
        place = f"const int r = first_r + {column};"
        share = self.share("pqr")
        return [*([place] if share else []), *share, f"team_rows[{at}] = {self.held(self.of_cell())};"]

    def _row_loops(self, slots: int, rows: Sequence[str], position: Sequence[str], lengths: Sequence[str]) -> Lines:
        """Write every position of a thread's rows, some features' at a time."""
        first, loops = self.first_of_rows
        team = self.t.team.warps
        sync, member = ("__syncwarp()", "0") if team == 1 else ("__syncthreads()", f"warp % {team}")
        held, given = self.held_for_rows(slots), self.late_names(first)["given"]
        eight = fill(texts.EIGHT_ROWS, sync=sync, held=held, first=first, member=member, given=given)
        P, Q, R = lengths
        place: dict[str, object] = {"p": position[0], "q": position[1], "first": self.first_r, "P": P, "Q": Q, "R": R}
        place["beside"] = self.features_beside(lengths)
        each = fill(texts.ROWS, **place, type=self.result_type, eights=nest(loops, eight))
        return [*self._out_at("out_features", "", lengths), *nest(rows, each)]

    def _pair_loops(self, tiles: int, position: list[str]) -> Lines:
        p, q, _ = position
        first, second = (
            self.changed(self.accumulator("j", f"2 * half{e}"), f"[m][half][{i}]") for i, e in enumerate(("", " + 1"))
        )
        at = {"pointer": [self.pointer("P", "Q", "R"), *self.runs_beside(2)], "stored_at": self.stored_at}
        pairs = fill(texts.PAIRS, p=p, q=q, tiles=tiles, first=first, second=second, type=self.result_type, **at)
        return [*self.out_row("P", "Q", "R"), *pairs]

    def _value_loops(self, slots: int, per_cell: int, position: list[str]) -> Lines:
        loops = [*OWN_ROWS, f"for (int s = 0; s < {slots}; ++s)"]
        lines = [f"const int own_w = {self.own_w(per_cell)};    // the cell, and below its position"]
        if self.masked:
            lines += [f"const int {a} = {text};" for a, text in zip("pqr", position, strict=True)]
            inside = "unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R)"
            lines += [f"const bool inside = {inside};"]
        lines += self.read_beside("PQR", paired=self.neighbours)
        value = self.accumulated(per_cell)
        value = self.changed(value)
        if self.c.window is None and self.several:
            joined = self.joined_at_once(loops[:2], loops[2], str(slots), "s", lines, value)
            return [*self.out_row("P", "Q", "R"), *joined]
        if self.c.window is None:
            finished = nest(loops, [*lines, *self.result_of(value, ("P", "Q", "R"), self._local())])
            return [*self.out_row("P", "Q", "R"), *finished]
        target = "pooled[rd / ROWS_D][rh / ROWS_H][own_w][m][half]"
        pooled = [f"{target} = {self.pooling.join(target, self.pooled_value(value))};"]
        return nest(loops, [*lines, *nest(CHANNELS, pooled)])

    def pooled_value(self, value: str) -> str:
        """A value on its way to a window, which is none outside the convolution's output."""
        return self.there_or_empty("inside", value) if self.masked else value

    @property
    def masked(self) -> bool:
        """Whether positions of a cell may lie outside the convolution's output."""
        return self.c.window is None or self.overhangs

    def position(self, i: int, phase: Phase) -> str:
        """The output position along dimension i of what the loops are at."""
        axis = self.c.axes[i]
        between = phase.elements[1] - phase.elements[0] if len(phase.elements) > 1 else 1
        cell = (self.cell(0, "rd / ROWS_D"), self.cell(1, "rh / ROWS_H"), self.cell_w)[i]
        element = (self._row(0, phase), self._row(1, phase), self.element_w(len(phase.elements)))[i]
        shift = phase.elements[0] + axis.start
        text = f"({cell}) * {axis.stride}" if axis.stride != 1 else cell
        if len(phase.elements) > 1:
            text += f" + ({element}) * {between}" if between != 1 else f" + {element}"
        return f"{text} + {shift}" if shift > 0 else f"{text} - {-shift}" if shift < 0 else text

    def _row(self, i: int, phase: Phase) -> str:
        """The row of a cell along d or h; `from` counts the rows of earlier passes."""
        row, rows = (("rd % ROWS_D", self.t.rows_d), ("rh % ROWS_H", self.t.rows_h))[i]
        return f"from_{'dh'[i]} + {row}" if len(phase.elements) > rows else row

    def _local(self) -> list[str]:
        """Position (p, q, r) inside the block's tile, for the exchange between warps."""
        starts = (
            f"cell_{a}" if axis.stride == 1 else f"cell_{a} * {axis.stride}"
            for a, axis in zip("dhw", self.c.axes, strict=True)
        )
        return self._within("pqr", starts)

    def _within(self, places: Iterable[str], starts: Iterable[str]) -> list[str]:
        """Places inside the block's tile, which starts there."""
        found = zip(places, starts, self.walks, strict=True)
        return [f"({p} - {s})" + (f" / {walk.between}" if walk.between > 1 else "") for p, s, walk in found]

    def after_cell(self) -> Lines:
        """When all passes over a cell are done: the tree after the pool, and on."""
        lines = self.of_cells() if self.c.window is not None else []
        if self.kind == "positions":
            joined = self.own_joining.join("total[i / 2][i % 2]", "of_tile[i / 2][i % 2]")
            lines += [UNROLL, f"for (int i = 0; i < 2 * M_TILES; ++i) total[i / 2][i % 2] = {joined};"]
        if self.kind == "all":
            lines += [f"total = {self.own_joining.join('total', 'of_tile')};"]
        if self.exchanges:
            lines += self._exchanged()
        return lines

    def of_cells(self) -> Lines:
        """What to do with the pooled values of a thread's cells."""
        value = self.of_cell()
        loops, lines = OWN_CELLS, self.place_of_cell()
        if self.t.by_rows:
            own = self.cell(0, "own_d"), self.cell(1, "own_h")
            return self._row_loops(0, loops[:2], own, ("cells_d", "cells_h", "cells_w"))
        if self.several:
            return self.joined_at_once(loops[:2], loops[2], "OWN_W", "own_w", lines, value)
        local = self._within("pqr", ("cell_d", "cell_h", "cell_w"))
        results = nest(loops, [*lines, *self.result_of(value, ("cells_d", "cells_h", "cells_w"), local)])
        return [*self.out_row("cells_d", "cells_h", "cells_w"), *results]

    def place_of_cell(self) -> Lines:
        """Statements that say where a thread's cell is, and what its elements count in an average."""
        return [
            f"const int p = {self.cell(0, 'own_d')}, q = {self.cell(1, 'own_h')};",
            f"const int r = {self.cell_w};",
            "const bool inside = p < cells_d && q < cells_h && r < cells_w;",
            *self.share("pqr"),
        ]

    def of_cell(self) -> str:
        """What the pooled values of a thread's cell come to."""
        value = self.of_window(self.pooled_at)
        return f"after({value}, m, half)" if self.c.after is not None else value

    def joined_at_once(self, rows: Lines, along: str, count: str, index: str, place: Lines, value: str) -> Lines:
        """Into the running results, `count` values of a row at a time: those of the loop `along`, whose statements
        `place` say where the value is."""
        target = "of_tile[m][half]" if self.kind == "positions" else "of_tile"
        there = self.there if self.kind == "all" else "inside"
        feature = [self.feature] if self.kind == "all" and not self.whole else []
        each = nest([along], [*place, f"values[{index}] = chosen({there}, {value}, -Compute(INFINITY));"])
        lines = [*feature, f"Compute values[{count}];", *each, f"{target} = {self.joining.join(target, 'values')};"]
        return nest([*rows, *CHANNELS], lines)

    def result_of(self, value: str, lengths: tuple[str, str, str], local: Sequence[str]) -> Lines:
        """What to do with a finished value at position (p, q, r), which is `local` in the block's tile."""
        if self.kind == "positions":
            return nest(CHANNELS, [self.taken_in("of_tile[m][half]", value, "inside")])
        if self.kind == "all":
            joining, own = self.own_joining, self._over_own_channels(value)
            return [*own, f"of_tile = {joining.join('of_tile', f'chosen(inside, over, {joining.empty})')};"]
        if self.kind == "channels":
            return [*self._over_channels(value), *self._kept(lengths, local)]
        return self.stored(value, lengths)

    def stored(self, value: str, lengths: tuple[str, str, str]) -> Lines:
        """Write a value of every channel at position (p, q, r)."""
        feature = [] if self.whole else [self.feature]
        value = f"narrow_to<{self.result_type}>::of({value})"
        if not self.neighbours:
            result = f"const {self.result_type} result = {value};"
            written = nest(CHANNELS, [*feature, result, f"if ({self.there}) {self.stored_at} = result;"])
            return [self.pointer(*lengths), *written]
        m, half = CHANNELS
        both = [f"{self.result_type} both[2];", *nest([half], [f"both[half] = {value};"]), "constexpr int half = 0;"]
        stored = f"*reinterpret_cast<Pair*>(&{self.stored_at}) = Pair{{both[0], both[1]}};"
        return [self.pointer(*lengths), *nest([m], [*both, *feature, f"if ({self.there}) {stored}"])]

    def pointer(self, P: str, Q: str, R: str) -> str:
        """The statement that says where the output at position (p, q, r) of a thread's first feature is."""
        if self.c.writes_last:
            at = f"((((long long)sample * {P} + p) * {Q} + q) * {R} + r) * (GROUPS * O)"
            at = f"out + {at} + group * O + first_feature + {self.first_feature[0]}"
        else:
            at = f"out_row + unsigned((p * {Q} + q) * {R} + r)"
        return f"{self.result_type}* const to = forgotten({at});"

    @property
    def stored_at(self) -> str:
        """The element of the output there, of the feature at hand."""
        feature = self.first_feature[1]
        return f"to[{feature}]" if self.c.writes_last else f"to[({feature}) * plane]"

    @property
    def neighbours(self) -> bool:
        """Whether a thread's two channels are neighbours in memory, and written at once."""
        last = self.kind == "store" and self.c.writes_last
        return last and self.other_channels == COLUMN and self.c.features % 2 == 0

    def out_row(self, P: str, Q: str, R: str) -> Lines:
        """Where results of a thread's first feature go, and how far behind them those of the next one do; where what
        lies beside them is."""
        if self.c.writes_last or (self.kind != "store" and not self.beside):
            return []
        return self._out_at("out_row", f" + {self.first_feature[0]}", (P, Q, R))

    def _out_at(self, name: str, first: str, lengths: Sequence[str]) -> Lines:
        """A pointer to the results of the block's features from the `first` on, and how far they are apart."""
        P, Q, R = lengths
        lines = fill(texts.PLANE, p=P, q=Q, r=R)
        if self.kind == "store":
            lines += fill(texts.OUT_ROW, name=name, first=first, type=self.result_type)
        return [*lines, *self.rows_beside(name.removeprefix("out_"), first)]

    def _over_channels(self, value: str) -> Lines:
        """Join the channels of the lanes that share a position."""
        if self.at_once:
            channels = [self.feature, f"values[m][half] = chosen(feature < O, {value}, -Compute(INFINITY));"]
            channels = [f"values[m][half] = {value};"] if self.whole else channels
            lines = ["Compute values[M_TILES][2];", *nest(CHANNELS, channels)]
            return [*lines, f"const {self.tile_type} over = of_column(values);"]
        lanes = (f"over = {self.joining.join_lane('over', n)};" for n in self.other_channels.distances)
        return [*self._over_own_channels(value), *lanes]

    def _over_own_channels(self, value: str) -> Lines:
        """Join the channels that a thread has of a position."""
        joining = self.own_joining
        there = value if self.whole else joining.there_or_empty("feature < O", value)
        channels = [*([] if self.whole else [self.feature]), f"over = {joining.join('over', there)};"]
        return [f"{self.tile_type} over = {joining.empty};", *nest(CHANNELS, channels)]

    @property
    def exchanges(self) -> bool:
        """Whether warps have parts of a position's result, which they exchange."""
        return self.kind == "channels"

    def _kept(self, lengths: tuple[str, str, str], local: Sequence[str]) -> Lines:
        """Leave what a lane's channels come to to the warps that share the position; write it where there are none."""
        guard = f"if ({self.other_channels.first} && inside)"
        if not self.exchanges:
            return [f"{guard} {self._written(lengths)}"]
        d, h, w = local
        at = f"({d} * LOCAL_H + {h}) * LOCAL_W + {w}"
        return [f"{guard} exchange[warp_m * LOCAL_D * LOCAL_H * LOCAL_W + {at}] = over;"]

    def _exchanged(self) -> Lines:
        """Fold over the warps that share positions, and write rows as they lie in memory."""
        d, h, w = (self.local(i) for i in range(3))
        p, q, r = (
            f"cell_{a} * {axis.stride if self.c.window is None else 1}"
            for a, axis in zip("dhw", self.c.axes, strict=True)
        )
        P, Q, R = ("cells_d", "cells_h", "cells_w") if self.c.window is not None else ("P", "Q", "R")
        joined = self.joining.join("over", f"exchange[m * {d * h * w} + i]")
        p, q = moved(p, f"i / {h * w}", self.walks[0], "d"), moved(q, f"i / {w} % {h}", self.walks[1], "h")
        body = [
            f"const int p = {p}, q = {q}, r = {r} + i % {w};",
            f"if (p >= {P} || q >= {Q} || r >= {R}) continue;",
            f"{self.tile_type} over = exchange[i];",
            UNROLL,
            f"for (int m = 1; m < WARPS_M; ++m) over = {joined};",
            self._written((P, Q, R)),
        ]
        return ["__syncthreads();", *block(f"for (int i = threadIdx.x; i < {d * h * w}; i += THREADS)", body)]

    def _written(self, lengths: tuple[str, str, str]) -> str:
        """The statement that writes a result over channels: what is left to join with those of other blocks, or all."""
        P, Q, R = lengths
        if self.partial:
            return (
                f"partial[(((long long)sample * gridDim.z + blockIdx.z) * {P} + p) * {Q} * {R} + q * {R} + r] = over;"
            )
        value = self.result_over_channels("O")
        return f"out[(((long long)sample * {P} + p) * {Q} + q) * {R} + r] = narrow_to<{self.result_type}>::of({value});"

    def local(self, i: int) -> int:
        """Positions of a block's tile along dimension i."""
        return self.t.cells[i] * (self.c.axes[i].stride if self.c.window is None else 1)

    def kept_elements(self) -> int:
        """Compute values in shared memory behind what is staged: for the exchange between warps, or rows to write."""
        if self.exchanges:
            return self.joining.words * self.t.warps_m * prod(self.local(i) for i in range(3))
        return rows_bytes(self.t) // 4


# Loops over the cells of a thread.
OWN_CELLS = [f"for (int own_{a} = 0; own_{a} < OWN_{a.upper()}; ++own_{a})" for a in "dhw"]
# Loops over the rows of a thread, and which one they are at.
OWN_ROWS = ("for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)", "for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)")
