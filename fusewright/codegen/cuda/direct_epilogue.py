"""What happens to the values of a direct contraction kernel: pointwise trees, windows, reduction, writing.

Where a window or an exchange of threads follows, a block leaves its values in shared memory, [feature][d][h][w], and
every cell is folded from there; else they go into running results in registers.  Of a fold over channels alone, those
of the teams are left there once all features of a tile are in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda.contraction_values import ValueText, is_one
from fusewright.codegen.cuda.contraction_walk import moved
from fusewright.codegen.cuda.direct_text import CLOSE_ALL, CLOSE_POSITIONS, FOLD_WINDOWS, FOLDED_ALONG
from fusewright.codegen.cuda.loops import UNROLL, Dealt, dealt, nest
from fusewright.codegen.text import Lines, block, fill, indent
from fusewright.schedule.direct import Box, Cut, folded_early, loops_over_groups

# Values of cells that a thread works on side by side.
CELLS_AT_ONCE = 4

_ROWS = ["for (int pd = 0; pd < PLANES; ++pd)", "for (int rh = 0; rh < ROWS; ++rh)"]
_ALONG = "for (int r = 0; r < RUN; ++r)"
_PHASE = "int phase_d, int phase_h, int phase_w"
_OWN = ("unit_d * PLANES + pd", "unit_h * ROWS + rh", "unit_w * RUN + r")
# The running result of a cell waits for the next round's features.
_CARRY = """
if (round < ROUNDS - 1) {
    running[cell] = over;
    continue;
}
"""
_FEATURES = "for (int o = 0; o < FEATURES; ++o)"
# Which feature is at hand, and where what it has of its own is.
_FEATURE = [
    "const int feature = first_feature + team * FEATURES + o;",
    "const int at = group * O + min(feature, O - 1);",
]
_LEAVE = """
if (active)
#pragma unroll
    for (int i = 0; i < $count; i += $vector) {
        Several<Compute, $vector> several;
#pragma unroll
        for (int j = 0; j < $vector; ++j) several.at[j] = run[i + j];
        *reinterpret_cast<Several<Compute, $vector>*>(to + i) = several;
    }
"""
_CHANNEL = "const int at = group * O + first_feature + o;"

_OVER_CHANNELS = """
for (int begin = threadIdx.x; begin < $cells; begin += $at_once * THREADS) {
    $kind overs[$at_once];
#pragma unroll
    for (int k = 0; k < $at_once; ++k) {
        const int cell = min(begin + k * THREADS, $cells - 1);
        $fold
        overs[k] = over;
    }
#pragma unroll
    for (int k = 0; k < $at_once; ++k) {
        const int cell = begin + k * THREADS;
        if (cell >= $cells) break;
        const $kind over = overs[k];
        $carry
        $place
        if ($inside)
            $write
    }
}
"""


@dataclass(frozen=True)
class DirectEpilogue(ValueText):
    """Writes the text behind the products for one group and tile."""

    place = "int at"

    t: Cut

    def of_channel(self, name: str) -> str:
        return f"widened({name}[{self.of_sample(name)}at])"

    @property
    def late(self) -> bool:
        return bool(self.c.elements)

    @property
    def box(self) -> Box:
        return self.t.box

    @property
    def slices(self) -> int:
        """Blocks that share positions, each with features of its own; one where a block goes through all of them."""
        return 1 if loops_over_groups(self.c) else super().slices

    @property
    def stays(self) -> bool:
        """Whether values go into running results where they are computed."""
        return self.c.window is None and self.closes

    @property
    def singly(self) -> bool:
        """Whether every value is folded from a window first."""
        return self.joining.at_once and self.c.window is not None

    @property
    def counts(self) -> tuple[int, int, int]:
        """Results of a block along d, h, w: cells, or positions where there is no window."""
        return self.box.cells if self.c.window is not None else self.box.positions

    def head(self) -> list[Lines]:
        """Declarations of what follows the multiplication."""
        if not self.t.window_passes:
            return super().head()
        joining = self.pooling
        ahead, behind = joining.join("value", "from[k * STEP]"), joining.join("several[ended]", "value")
        names = {"ahead": ahead, "behind": behind, "empty": joining.empty, "running": self.kept_type}
        return [*super().head(), fill(FOLD_WINDOWS, **names)]

    @property
    def kept_type(self) -> str:
        """Of what threads leave to others."""
        if folded_early(self.c):
            return self.joining.running[0]
        return self.pooled_type if self.c.window is not None else "Compute"

    # -- before the first tile ---------------------------------------------------------------------------------------

    def exchange(self) -> Lines:
        """Where values are exchanged in shared memory."""
        first, second, running = self.t.strips
        lines, kept = [], self.kept_type
        if first:
            at = "w_tiles + W_TILES" if kept == "Compute" else f"reinterpret_cast<{kept}*>(w_tiles + W_TILES)"
            rows = "running results: [team]" if folded_early(self.c) else "values: [feature]"
            lines += [f"{kept}* const strip = {at};    // {rows}[d][h][w]"]
        first, second = (n // self.c.pooled_numbers for n in (first, second))
        if second:
            lines += [f"{kept}* const folded = strip + {first};    // the same, windows folded along some dimensions"]
        if running:
            kind = self.joining.running[0]
            place = f"strip + {first + second}" if first + second else "strip"
            at = place if kind == kept else f"reinterpret_cast<{kind}*>({place})"
            lines += [f"{kind}* const running = {at};    // of each cell"]
        return lines

    def prologue(self) -> Lines:
        """Numbers that all values share, the pointwise trees, and running results."""
        lines = [f"const Compute {name}_at = widened({name}[0]);" for node, name in self.read() if is_one(node)]
        lines += self.functions()
        (_, total), empty = self.own_joining.running, self.own_joining.empty
        if self.kind == "positions":
            lines += [f"{total} total[FEATURES];", UNROLL, f"for (int o = 0; o < FEATURES; ++o) total[o] = {empty};"]
        if self.kind == "all":
            lines += [f"{total} total = {empty};"]
        if folded_early(self.c):
            lines += [
                f"{self.kept_type} over[PHASES][PLANES][ROWS][RUN];    // of a tile's features, round after round"
            ]
        return lines

    # -- the values of a tile ----------------------------------------------------------------------------------------

    def finished(self, phases: list[tuple[int, int, int]]) -> Lines:
        """What to do with the values of a tile; `phases` are the first positions of the phases, in order."""
        lines = self.kept(phases)
        if self.stays:
            return [*self._of_tile(), *lines, *self._into_total()]
        lines.append("__syncthreads();")
        extents, source = list(self.t.extents), "strip"
        for axis in self.t.window_passes:
            target = "folded" if source == "strip" else "strip"
            lines += self._folded_along(axis, extents, source, target)
            extents[axis], source = self.box.cells[axis], target
        return [*lines, *self._cells(extents, source)]

    def kept(self, phases: list[tuple[int, int, int]]) -> Lines:
        """Take on the values that threads have."""
        if self.vector > 1:
            beside = self.box.sides[2].period
            calls = []
            for i, (d, h, _) in list(enumerate(phases))[::beside]:
                assert phases[i : i + beside] == [(d, h, w) for w in range(beside)], phases
                calls.append(f"keep({', '.join(f'acc[{i + n}]' for n in range(beside))}, {d}, {h});")
            return [*self._keep_runs(), *calls]
        if not folded_early(self.c):
            return [*self._keep(), *(f"keep(acc[{i}], {d}, {h}, {w});" for i, (d, h, w) in enumerate(phases))]
        if self.t.at_once > 1:
            return self._left(phases)  # the step has a loop of its own, in which values are taken on
        wait = ["if (round < ROUNDS - 1) continue;"] if self.t.passes > 1 else []
        return [*self.begun(), *self.taken(len(phases)), *wait, *self._left(phases)]

    def begun(self) -> Lines:
        """A thread's running results begin in a tile's first round."""
        begin = [UNROLL, "for (int i = 0; i < PHASES * PLANES * ROWS * RUN; ++i)"]
        begin += [f"    (&over[0][0][0][0])[i] = {self.joining.empty};"]
        return ["if (now.round == 0)", *indent(begin)] if self.t.passes > 1 else begin

    def taken(self, phases: int) -> Lines:
        """They take in its features of a round, of so many phases."""
        return [*self._keep(), *(f"keep(acc[{i}], over[{i}]);" for i in range(phases))]

    def _left(self, phases: list[tuple[int, int, int]]) -> Lines:
        """They are left to others behind a tile's last round."""
        left = [*self._place(), f"if (active) strip[{self.at('team', self.t.extents)}] = over[pd][rh][r];"]
        head = f"const auto leave = [&](const {self.kept_type} (&over)[PLANES][ROWS][RUN], {_PHASE})"
        leave = [*block(head, nest([*_ROWS, _ALONG], left))[:-1], "};"]
        return [*leave, *(f"leave(over[{i}], {d}, {h}, {w});" for i, (d, h, w) in enumerate(phases))]

    def _of_tile(self) -> Lines:
        """Running results of one tile, in the compute type."""
        kind, empty = self.tile_type, self.own_joining.empty
        if self.kind == "all":
            return [f"{kind} of_tile = {empty};"]
        return [f"{kind} of_tile[FEATURES];", UNROLL, f"for (int o = 0; o < FEATURES; ++o) of_tile[o] = {empty};"]

    def _into_total(self) -> Lines:
        if self.kind == "all":
            return [f"total = {self.own_joining.join('total', 'of_tile')};"]
        joined = self.own_joining.join("total[o]", "of_tile[o]")
        return [UNROLL, f"for (int o = 0; o < FEATURES; ++o) total[o] = {joined};"]

    def _keep(self) -> Lines:
        """A lambda that takes the values of one phase on."""
        product = "acc[o][pd][rh][r]"
        value, changed = self.changed(product), self._all_changed([product])
        feature = _FEATURE if self.one_by_one else _FEATURE[:1]
        if folded_early(self.c):
            loops, lines = self._over_features(value, feature)
        elif self.t.owned != (1, 1, 1):
            loops, lines = self._windows(value, feature)
        else:
            loops, lines = self._one_by_one(value, feature)
        kind = "Compute" if changed else "const Compute"
        to = f"{self.kept_type} (&over)[PLANES][ROWS][RUN]" if folded_early(self.c) else _PHASE
        head = f"const auto keep = [&]({kind} (&acc)[FEATURES][PLANES][ROWS][RUN], {to})"
        return [*block(head, [*changed, *nest(loops, lines)])[:-1], "};"]

    def _all_changed(self, products: Sequence[str]) -> Lines:
        """Statements that change a thread's products in place, where that is to be."""
        return self.all_changed(products, [_FEATURES], _FEATURE, [*_ROWS, _ALONG])

    @property
    def vector(self) -> int:
        """Values along w that a thread leaves in the strip at once: those of a run, of all phases, are neighbours, and
        threads that leave one at a time, as far apart, would meet in a bank."""
        if self.stays or folded_early(self.c) or self.t.owned != (1, 1, 1) or self.kept_type != "Compute":
            return 1
        assert self.t.x_elements % 8 == self.t.w_elements % 8 == 0, "strips begin at vectors"
        return gcd(self.t.t.run * self.box.sides[2].period, self.t.extents[2], 16 // self.t.compute_bytes)

    def _keep_runs(self) -> Lines:
        """A lambda that leaves the runs of all phases along w in the strip."""
        beside = self.box.sides[2].period
        names = [f"acc_{n}" for n in range(beside)] if beside > 1 else ["acc"]
        products = [f"{name}[o][pd][rh][r]" for name in names]
        changed = self._all_changed(products)
        of_rows, of_w = self._place()
        each: Lines = []
        for n, product in enumerate(products):
            exists, value = self._there(self.changed(product))
            put = [*exists, f"run[{times('r', beside)}{f' + {n}' if n else ''}] = {value};"]
            put = [of_w.replace("phase_w", str(n)), *put] if exists else put
            each += block("", put) if exists and beside > 1 else put
        lines = [
            *(_FEATURE if self.one_by_one else []),
            of_rows,
            f"Compute run[{times('RUN', beside)}];",
            *nest([_ALONG], each),
            f"const int w = {times('unit_w * RUN', beside)};",
            f"Compute* const to = &strip[{self.at('(team * FEATURES + o)', self.t.extents)}];",
            *fill(_LEAVE, count=times("RUN", beside), vector=self.vector),
        ]
        kind = "Compute" if changed else "const Compute"
        own = ", ".join(f"{kind} (&{name})[FEATURES][PLANES][ROWS][RUN]" for name in names)
        head = f"const auto keep = [&]({own}, int phase_d, int phase_h)"
        return [*block(head, [*changed, *nest([_FEATURES, *_ROWS], lines)])[:-1], "};"]

    def _place(self) -> Lines:
        """Where the value at hand lies inside the tile."""
        d, h, w = (times(text, side.period) for text, side in zip(_OWN, self.box.sides, strict=True))
        return [f"const int d = {d} + phase_d, h = {h} + phase_h;", f"const int w = {w} + phase_w;"]

    def _over_features(self, value: str, feature: Lines) -> tuple[Lines, Lines]:
        """Loops over a thread's positions, and statements that join its features at one to the running result there."""
        over, features, at_once = "over[pd][rh][r]", [_FEATURES], self.joining.at_once
        if self.c.features % self.t.block_m:
            value = f"chosen(feature < O, {value}, {'-Compute(INFINITY)' if at_once else self.joining.empty})"
        elif not self.changes:
            feature = []
        if not at_once:
            return [*_ROWS, _ALONG], nest(features, [*feature, f"{over} = {self.joining.join(over, value)};"])
        lines = ["Compute values[FEATURES];", *nest(features, [*feature, f"values[o] = {value};"])]
        return [*_ROWS, _ALONG], [*lines, f"{over} = {self.joining.join(over, 'values')};"]

    def _windows(self, value: str, feature: Lines) -> tuple[Lines, Lines]:
        """Loops over a thread's own windows, and statements that fold one and leave it in the strip."""
        assert self.c.window is not None
        joining, own, sides = self.pooling, self.t.owned, self.box.sides
        counts = [f"{n} / {k}" for n, k in zip(("PLANES", "ROWS", "RUN"), own, strict=True)]
        loops = [_FEATURES]
        loops += [f"for (int own_{a} = 0; own_{a} < {n}; ++own_{a})" for a, n in zip("dhw", counts, strict=True)]
        place = [
            f"({times(f'({text})', side.period)} + phase_{a})" if side.period > 1 else f"({text})"
            for text, side, a in zip(_OWN, sides, "dhw", strict=True)
        ]
        there = self.there_or_empty(self.exists(place), value) if self.overhangs else value
        pd, rh, r = (f"{times(f'own_{a}', k)} + k{a}" for a, k in zip("dhw", own, strict=True))
        taps = [f"const int pd = {pd}, rh = {rh}, r = {r};", f"pooled = {joining.join('pooled', there)};"]
        lines = [*(feature if self.changes else []), f"{self.kept_type} pooled = {joining.empty};"]
        lines += nest([f"for (int k{a} = 0; k{a} < {k}; ++k{a})" for a, k in zip("dhw", own, strict=True)], taps)
        d, h, w = (
            f"{a} = (unit_{a} * ({n}) + own_{a}) * {side.period} + phase_{a}"
            if side.period > 1
            else f"{a} = unit_{a} * ({n}) + own_{a}"
            for a, n, side in zip("dhw", counts, sides, strict=True)
        )
        lines += [f"const int {d}, {h}, {w};"]
        return loops, [*lines, f"if (active) strip[{self.at('(team * FEATURES + o)', self.t.extents)}] = pooled;"]

    def _one_by_one(self, value: str, feature: Lines) -> tuple[Lines, Lines]:
        """Loops over a thread's values, and statements that take one on."""
        loops = [_FEATURES, *_ROWS]
        needed = (self.changes and not self.late) or self.kind == "all"
        lines = [*(feature if needed else []), *self._place()]
        if not self.stays:
            return [*loops, _ALONG], [*lines, *self._to_strip(value)]
        target, inside = self._running
        if not self.joining.at_once:
            return [*loops, _ALONG], [*lines, self.taken_in(target, value, inside)]
        each = nest([_ALONG], [*lines, f"values[r] = chosen({inside}, {value}, -Compute(INFINITY));"])
        return loops, ["Compute values[RUN];", *each, f"{target} = {self.joining.join(target, 'values')};"]

    @property
    def _running(self) -> tuple[str, str]:
        """The running result that the value at hand goes into, and whether it does."""
        inside = ["active", *(f"{n} < {length}" for n, length in zip(self._positions_of("dhw"), "PQR", strict=True))]
        if self.kind == "all":
            return "of_tile", " && ".join([*inside, "feature < O"])
        return "of_tile[o]", " && ".join(inside)

    def _to_strip(self, value: str) -> Lines:
        exists, there = self._there(value)
        return [*exists, f"if (active) strip[{self.at('(team * FEATURES + o)', self.t.extents)}] = {there};"]

    def _there(self, value: str) -> tuple[Lines, str]:
        """The value at a place of the tile as a window takes it in, and statements ahead of it."""
        if not self.overhangs:
            return [], value
        return [f"const bool inside = {self.exists('dhw')};"], self.there_or_empty("inside", value)

    def exists(self, place: Sequence[str]) -> str:
        """Whether a place of the tile, which may lie before the output too, is a position of it."""
        return " && ".join(
            f"unsigned({p}) < unsigned({n})" for p, n in zip(self._positions_of(place), "PQR", strict=True)
        )

    def _positions_of(self, names: Sequence[str]) -> list[str]:
        """Positions of the output, from those inside a tile."""
        found = []
        for i, (name, axis) in enumerate(zip(names, self.c.axes, strict=True)):
            start = f" + {axis.start}" if axis.start > 0 else f" - {-axis.start}" if axis.start else ""
            found.append(f"{self._behind(i, name, axis.stride)}{start}")
        return found

    def _behind(self, i: int, name: str, stride: int = 1) -> str:
        """A position or cell along dimension i, so many of the tile behind its first, `stride` times a cell."""
        a = "dhw"[i]
        return moved(times(f"cell_{a}", stride), name, self.box.walks[i], a)

    def at(self, row: str, extents: Sequence[int], place: Sequence[str] = "dhw") -> str:
        """Place d, h, w of a row of the strip; dimensions of extent 1 are left out."""
        text = row
        for name, extent in zip(place, extents, strict=True):
            if extent > 1:
                text = f"({text} * {extent} + {name})"
        return text.removeprefix("(").removesuffix(")") if text != row else row

    # -- windows and cells -------------------------------------------------------------------------------------------

    def _folded_along(self, axis: int, extents: list[int], source: str, target: str) -> Lines:
        """Fold the windows along one dimension."""
        (size, apart), several = self.t.windows[axis], self.t.neighbours(axis)
        inner, cells = prod(extents[axis + 1 :]), self.box.cells[axis]
        outer, turns = self.t.block_m * prod(extents[:axis]), ceil(cells / several)
        names = {"count": outer * turns * inner, "inner": inner, "turns": turns, "several": several, "size": size}
        names |= {"apart": apart, "cells": cells, "extent": extents[axis]}
        return fill(FOLDED_ALONG, **names, running=self.kept_type, source=source, target=target)

    def _cells(self, extents: list[int], source: str) -> Lines:
        """Fold what is left of each cell's window, and take it on."""
        _, h, w = self.counts
        place = [f"const int d = cell / {h * w}, h = cell / {w} % {h}, w = cell % {w};    // inside the tile"]
        if self.kind == "channels":
            return self._over_channels(place, self._value(extents, source, "o"))
        if self.kind == "positions":
            value = self._value(extents, source, "(team * FEATURES + o)")
            return [*self._of_tile(), *self._over_positions(place, value), *self._into_total()]
        cells, value = prod(self.counts), self._value(extents, source, "o")
        once = [*place, f"if (!({self._inside()})) continue;", *(self._to() if self.kind == "store" else [])]
        body = [*([_CHANNEL] if self.has_later or self.late else []), *value[:-1]]
        if self.kind == "store":
            body += [f"const Compute {name}_here = read_element({name}_from + o * size, true);" for name in self.beside]
            result = ", ".join([value[-1], "at", *(f"{name}_here" for name in self.beside)])
            result = f"before({result})" if self.late else value[-1]
            body.append(f"to[o * size] = narrow_to<{self.result_type}>::of({result});")
        else:
            body.append(f"of_tile = {self.joining.join('of_tile', value[-1])};")
        features = Dealt("o", self._own_features, self.t.block_m)
        lines = dealt(self.t.threads, Dealt("cell", str(cells), cells), features, body, once=once)
        return lines if self.kind == "store" else [*self._of_tile(), *lines, *self._into_total()]

    @property
    def _own_features(self) -> str:
        """How many features a block has: the last block may have fewer."""
        return "BLOCK_O" if self.c.features % self.t.block_m == 0 else "min(BLOCK_O, O - first_feature)"

    def _over_channels(self, place: Lines, value: Lines) -> Lines:
        """Every cell's running result takes in the features at hand, or the teams' results of all, and is
        written behind the last ones."""
        count = "TEAMS" if folded_early(self.c) else self._own_features
        kind, empty = self.joining.running[0], self.joining.empty
        carried = self.t.strips[2] > 0
        fold = [*place, f"{kind} over = {f'round == 0 ? {empty} : running[cell]' if carried else empty};"]
        each = [*([_CHANNEL] if self.has_later else []), *value[:-1]]
        each += [f"over = {self.joining.join('over', value[-1])};"]
        fold += block(f"for (int o = 0; o < {count}; ++o)", each)
        cells, features = prod(self.counts), self.t.t.teams if folded_early(self.c) else self.t.block_m
        return fill(
            _OVER_CHANNELS,
            # What one cell waits for, others do meanwhile; stores between would keep their reads from coming first.
            at_once=min(ceil(cells / self.t.threads), max(1, CELLS_AT_ONCE // features)),
            cells=cells,
            kind=kind,
            fold=fold,
            carry=fill(_CARRY) if carried else [],
            place=place,
            inside=self._inside(),
            write=self._write_over(),
        )

    def _over_positions(self, place: Lines, value: Lines) -> Lines:
        """Every thread folds cells of its team's features."""
        at = ["const int at = group * O + min(first_feature + team * FEATURES + o, O - 1);"]
        fold = [*(at if self.has_later else []), *value[:-1]]
        fold += [f"of_tile[o] = {self.joining.join('of_tile[o]', value[-1])};"]
        body = [*place, f"if (!({self._inside()})) continue;", UNROLL]
        body += block("for (int o = 0; o < FEATURES; ++o)", fold)
        return block(f"for (int cell = unit; cell < {prod(self.counts)}; cell += TEAM)", body)

    def _inside(self) -> str:
        """Whether place d, h, w of the tile is one of the output."""
        return " && ".join(f"{p} < {n}" for p, n in zip(self._places_of_cell(), self._lengths(), strict=True))

    def _places_of_cell(self) -> list[str]:
        if self.c.window is None:
            return self._positions_of("dhw")
        return [self._behind(i, a) for i, a in enumerate("dhw")]

    def _lengths(self) -> tuple[str, str, str]:
        return ("cells_d", "cells_h", "cells_w") if self.c.window is not None else ("P", "Q", "R")

    def _value(self, extents: list[int], source: str, row: str) -> Lines:
        """Statements that fold the window of one cell and feature, and the text of what it comes to."""
        if self.c.window is None:
            return [f"{source}[{self.at(row, extents)}]"]
        done = self.t.window_passes
        joining = self.pooling
        size, step = zip(*((1, 1) if i in done else window for i, window in enumerate(self.t.windows)), strict=True)
        d, h, w = (times(n, s) for n, s in zip("dhw", step, strict=True))
        lines = [f"const {self.kept_type}* const from = {source} + {self.at(row, extents, (d, h, w))};"]
        strides = (extents[1] * extents[2], extents[2], 1)
        looped = [(f"k{a}", n, s) for a, n, s in zip("dhw", size, strides, strict=True) if n > 1]
        at = " + ".join(times(k, s) for k, _, s in looped) or "0"
        lines += [f"{self.kept_type} pooled = {joining.empty};"]
        heads = [f"for (int {k} = 0; {k} < {n}; ++{k})" for k, n, _ in looped]
        lines += nest(heads, [f"pooled = {joining.join('pooled', f'from[{at}]')};"])
        lines += self.share([f"({self._behind(i, a)})" for i, a in enumerate("dhw")])
        value = self.of_window("pooled")
        return [*lines, f"after({value}, at)" if self.c.after is not None else value]

    def _to(self) -> Lines:
        """Where the values of a cell go, and where what lies beside them is: those of a feature `size` behind those of
        the one before it."""
        p, q, r = self._places_of_cell()
        P, Q, R = self._lengths()
        first = "(long long)sample * (GROUPS * O) + group * O + first_feature"
        at = f"({first}) * size + ((long long)({p}) * {Q} + {q}) * {R} + {r}"
        types = {name: ELEMENT[node.dtype] for node, name in self.read()}
        return [
            f"const long long size = (long long){P} * {Q} * {R};",
            f"{self.result_type}* const to = out + {at};",
            *(f"const {types[name]}* const {name}_from = {name} + {at};" for name in self.beside),
        ]

    def _write_over(self) -> Lines:
        """A result over channels."""
        assert self.c.fold is not None
        p, q, r = self._places_of_cell()
        big = self._lengths()
        at = f"(((long long)sample * {big[0]} + {p}) * {big[1]} + {q}) * {big[2]} + {r}"
        value = self.result_over_channels("(GROUPS * O)")
        return [f"out[{at}] = narrow_to<{self.result_type}>::of({value});"]

    # -- the end of a block ------------------------------------------------------------------------------------------

    def close(self) -> Lines:
        """Leave the block's results to the second kernel."""
        if not self.closes:
            return []
        names = {"total": self.total_type, "lanes": self.joining.join_lane("value", "distance")}
        if self.kind == "positions":
            warps = self.joining.join("value", "across[warp][i]")
            return fill(CLOSE_POSITIONS, **names, own=self.come_to("total[o]"), warps=warps)
        warps = self.joining.join("value", "across[warp]")
        return fill(CLOSE_ALL, **names, own=self.come_to("total"), warps=warps)


def times(text: str, factor: int) -> str:
    """So many times what a text says."""
    if factor == 1:
        return f"({text})" if " " in text and not text.startswith("(") else text
    return f"({text}) * {factor}" if " " in text and not text.startswith("(") else f"{text} * {factor}"
