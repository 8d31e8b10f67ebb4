"""What happens to a contraction's accumulators: pointwise trees, window pooling, reduction, writing."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from string import Template

from fusewright.codegen.cuda import contraction_finish_text as texts
from fusewright.codegen.cuda.contraction_box import scaled_early
from fusewright.codegen.cuda.contraction_finish import indented
from fusewright.codegen.cuda.contraction_folds import JOININGS
from fusewright.codegen.cuda.contraction_values import ValueText, is_one
from fusewright.schedule.contraction import Contraction, Phase
from fusewright.schedule.tiling import Tiling, side_by_side


@dataclass(frozen=True)
class Epilogue(ValueText):
    """Writes the text after the multiplication for one group and tiling."""

    place = "int m, int half"

    t: Tiling

    def of_channel(self, name: str) -> str:
        return f"{name}_at[m][half]"

    @property
    def scale(self) -> float | None:
        return None if self.c.box is None or scaled_early(self.c) else self.c.box.scale

    def head(self) -> str:
        """Declarations of what follows the multiplication."""
        return super().head() + (Template(texts.WRITE_PAIR).substitute(type=self.result_type) if self.pairs else "")

    @property
    def at_once(self) -> bool:
        return self.kind == "channels" and self.joining.at_once

    # -- functions and state -----------------------------------------------------------------------------------------

    def prologue(self) -> str:
        """Per-channel numbers in registers, and running totals."""
        channel = [name for node, name in self.read() if not is_one(node)]  # numbers of shape (1, O, 1, ...)
        lines: list[str] = []
        if channel:
            lines += ["", "// Per-channel numbers of this lane's rows."]
            lines += [f"Compute {name}_at[M_TILES][2];" for name in channel]
            lines += ["#pragma unroll", "for (int m = 0; m < M_TILES; ++m)", "#pragma unroll"]
            lines += ["    for (int half = 0; half < 2; ++half) {"]
            lines += ["        const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;"]
            for name in channel:
                read = f"widened({name}[group * O + feature])"
                lines += [f"        {name}_at[m][half] = feature < O ? {read} : Compute(0);"]
            lines += ["    }"]
        lines += [f"const Compute {name}_at = widened({name}[0]);" for node, name in self.read() if is_one(node)]
        lines += self.functions()
        empty = self.joining.empty
        if self.kind == "positions":
            lines += [f"{self.total_type} total[M_TILES][2];"]
            lines += ["#pragma unroll", f"for (int i = 0; i < 2 * M_TILES; ++i) total[i / 2][i % 2] = {empty};"]
        if self.kind == "all":
            lines += [f"{self.total_type} total = {empty};"]
        if self.kind == "channels":
            kind = self.tile_type
            lines += [f"{kind}* const exchange = reinterpret_cast<{kind}*>(x_tile + STAGED);"]
            lines += [f"constexpr int {n} = {self.local(i)};" for i, n in enumerate(("LOCAL_D", "LOCAL_H", "LOCAL_W"))]
        return indented(lines, 1)

    # -- one pass ----------------------------------------------------------------------------------------------------

    def open_tile(self) -> str:
        """State of one tile: pooled values, sums in the compute type."""
        lines: list[str] = []
        if self.c.window is not None:
            start = JOININGS[self.c.window.op.kind].empty
            lines += ["Compute pooled[OWN_D][OWN_H][OWN_W][M_TILES][2];", "#pragma unroll"]
            lines += ["for (int i = 0; i < OWN_D * OWN_H * OWN_W * M_TILES * 2; ++i)"]
            lines += [f"    (&pooled[0][0][0][0][0])[i] = {start};"]
        if self.kind == "positions":
            lines += [f"{self.tile_type} of_tile[M_TILES][2];", "#pragma unroll"]
            lines += [f"for (int i = 0; i < 2 * M_TILES; ++i) of_tile[i / 2][i % 2] = {self.joining.empty};"]
        if self.kind == "all":
            lines += [f"{self.tile_type} of_tile = {self.joining.empty};"]
        return indented(lines, 2)

    def values(self, phases: tuple[Phase, Phase, Phase], tiles: int) -> str:
        """Hand the accumulators of one pass to the pool, or straight on."""
        per_cell = len(phases[2].elements)
        position = [self._position(i, phases[i]) for i in range(3)]
        return self._pair_loops(tiles, position) if self.pairs else self._value_loops(tiles, per_cell, position)

    @property
    def pairs(self) -> bool:
        """Whether two neighbours of an output row, which a thread holds, are written at once."""
        everywhere = self.kind == "store" and self.c.window is None and not self.c.channels_last
        return everywhere and side_by_side(self.c) and self.c.axes[2].stride == 1

    def _pair_loops(self, tiles: int, position: list[str]) -> str:
        p, q, _ = position
        first, second = (f"acc[rd][rh][j][m][2 * half{e}]" for e in ("", " + 1"))
        if self.changes:
            first, second = (f"before({value}, m, half)" for value in (first, second))
        return Template(texts.PAIRS).substitute(
            p=p, q=q, tiles=tiles, first=first, second=second, type=self.result_type
        )

    def _value_loops(self, tiles: int, per_cell: int, position: list[str]) -> str:
        lines = ["#pragma unroll", "for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)", "#pragma unroll"]
        lines += ["    for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)", "#pragma unroll"]
        lines += [f"        for (int s = 0; s < {2 * tiles}; ++s) {{"]
        inner: list[str] = [
            f"const int own_w = {f's / {per_cell}' if per_cell > 1 else 's'};    // the cell, and below its position"
        ]
        if self.masked:
            inner += [f"const int {a} = {text};" for a, text in zip("pqr", position, strict=True)]
            inside = "unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R)"
            inner += [f"const bool inside = {inside};"]
        value = "acc[rd][rh][s / 2][m][2 * half + s % 2]"
        if self.changes:
            value = f"before({value}, m, half)"
        if self.c.window is not None:
            target = "pooled[rd / ROWS_D][rh / ROWS_H][own_w][m][half]"
            guard = "if (inside) " if self.masked else ""
            inner += _over_rows([f"{guard}{target} = {JOININGS[self.c.window.op.kind].join(target, value)};"])
        else:
            inner += self._result(value, "p", "q", "r", "P", "Q", "R", self._local(position))
        lines += ["            " + x if not x.startswith("#") else x for x in inner]
        lines += ["        }"]
        return indented(lines, 3)

    @property
    def masked(self) -> bool:
        """Whether positions of a cell may lie outside the convolution's output."""
        return self.c.window is None or self.overhangs

    def _position(self, i: int, phase: Phase) -> str:
        """The output position along dimension i of what the loops are at."""
        axis = self.c.axes[i]
        between = phase.elements[1] - phase.elements[0] if len(phase.elements) > 1 else 1
        cell = ("cell_d + rd / ROWS_D", "cell_h + warp_h * OWN_H + rh / ROWS_H", _cell_w(self.c))[i]
        element = (self._row(0, phase), self._row(1, phase), f"s % {len(phase.elements)}")[i]
        shift = phase.elements[0] + axis.start
        text = f"({cell}) * {axis.stride}" if axis.stride != 1 else cell
        if len(phase.elements) > 1:
            text += f" + ({element}) * {between}" if between != 1 else f" + {element}"
        return f"{text} + {shift}" if shift > 0 else f"{text} - {-shift}" if shift < 0 else text

    def _row(self, i: int, phase: Phase) -> str:
        """The row of a cell along d or h; `from` counts the rows of earlier passes."""
        row, rows = (("rd % ROWS_D", self.t.rows_d), ("rh % ROWS_H", self.t.rows_h))[i]
        return f"from_{'dh'[i]} + {row}" if len(phase.elements) > rows else row

    def _local(self, position: list[str]) -> tuple[str, str, str]:
        """Position inside the block's tile, for the exchange between warps."""
        starts = ("cell_d", "cell_h", "cell_w")
        local = []
        for i, (name, start) in enumerate(zip("pqr", starts, strict=True)):
            stride = self.c.axes[i].stride
            local.append(f"({name} - {start} * {stride})" if stride != 1 else f"({name} - {start})")
        return local[0], local[1], local[2]

    def after_cell(self) -> str:
        """When all passes over a cell are done: the tree after the pool, and on."""
        lines: list[str] = []
        if self.c.window is not None:
            lines += ["#pragma unroll", "for (int own_d = 0; own_d < OWN_D; ++own_d)", "#pragma unroll"]
            lines += ["    for (int own_h = 0; own_h < OWN_H; ++own_h)", "#pragma unroll"]
            lines += ["        for (int own_w = 0; own_w < OWN_W; ++own_w) {"]
            inner = [
                "const int p = cell_d + own_d, q = cell_h + warp_h * OWN_H + own_h;",
                f"const int r = {_cell_w(self.c)};",
            ]
            inner += ["const bool inside = p < cells_d && q < cells_h && r < cells_w;"]
            inner += self.share("pqr")
            value = "pooled[own_d][own_h][own_w][m][half]"
            if self.c.window.op.kind == "avg":
                value = f"{value} * share"
            if self.c.after is not None:
                value = f"after({value}, m, half)"
            local = ("(p - cell_d)", "(q - cell_h)", "(r - cell_w)")
            inner += self._result(value, "p", "q", "r", "cells_d", "cells_h", "cells_w", local)
            lines += ["            " + x if not x.startswith("#") else x for x in inner] + ["        }"]
        if self.kind == "positions":
            joined = self.joining.join("total[i / 2][i % 2]", "of_tile[i / 2][i % 2]")
            lines += ["#pragma unroll", f"for (int i = 0; i < 2 * M_TILES; ++i) total[i / 2][i % 2] = {joined};"]
        if self.kind == "all":
            lines += [f"total = {self.joining.join('total', 'of_tile')};"]
        if self.kind == "channels":
            lines += self._exchanged()
        return indented(lines, 2)

    def _result(self, value: str, p: str, q: str, r: str, P: str, Q: str, R: str, local: tuple[str, ...]) -> list[str]:
        """What to do with a finished value at position (p, q, r)."""
        join = self.joining.join
        feature = "const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;"
        if self.kind == "positions":
            return _over_rows([f"if (inside) of_tile[m][half] = {join('of_tile[m][half]', value)};"])
        if self.kind == "all":
            return _over_rows([feature, f"if (inside && feature < O) of_tile = {join('of_tile', value)};"])
        if self.kind == "channels":
            if self.at_once:
                lines = ["Compute values[M_TILES][2];"]
                lines += _over_rows([feature, f"values[m][half] = feature < O ? {value} : -Compute(INFINITY);"])
                lines += [f"const {self.tile_type} over = of_column(values);"]
            else:
                lines = [f"{self.tile_type} over = {self.joining.empty};"]
                lines += _over_rows([feature, f"if (feature < O) over = {join('over', value)};"])
                lines += [f"over = {self.joining.join_lane('over', distance)};" for distance in (4, 8, 16)]
            d, h, w = local
            at = f"({d} * LOCAL_H + {h}) * LOCAL_W + {w}"
            return [*lines, f"if (row == 0 && inside) exchange[warp_m * LOCAL_D * LOCAL_H * LOCAL_W + {at}] = over;"]
        if self.c.channels_last:
            at = f"((((long long)sample * {P} + {p}) * {Q} + {q}) * {R} + {r}) * (GROUPS * O) + group * O + feature"
        else:
            at = f"(((long long)sample * GROUPS * O + group * O + feature) * {P} + {p}) * {Q} * {R} + {q} * {R} + {r}"
        return _over_rows(
            [feature, f"if (inside && feature < O) out[{at}] = narrow_to<{self.result_type}>::of({value});"]
        )

    def _exchanged(self) -> list[str]:
        """Fold over the warps that share positions, and write rows as they lie in memory."""
        d, h, w = (self.local(i) for i in range(3))
        p, q, r = (
            f"cell_{a} * {self.c.axes[i].stride if self.c.window is None else 1} + " for i, a in enumerate("dhw")
        )
        big = ("cells_d", "cells_h", "cells_w") if self.c.window is not None else ("P", "Q", "R")
        return [
            "__syncthreads();",
            f"for (int i = threadIdx.x; i < {d * h * w}; i += THREADS) {{",
            f"    const int p = {p}i / {h * w}, q = {q}i / {w} % {h}, r = {r}i % {w};",
            f"    if (p >= {big[0]} || q >= {big[1]} || r >= {big[2]}) continue;",
            f"    {self.tile_type} over = exchange[i];",
            "#pragma unroll",
            f"    for (int m = 1; m < WARPS_M; ++m) over = "
            f"{self.joining.join('over', f'exchange[m * {d * h * w} + i]')};",
            f"    {self._written(big)}",
            "}",
        ]

    def _written(self, lengths: tuple[str, str, str]) -> str:
        """The statement that writes a result over channels: what is left to join with those of other blocks, or all."""
        P, Q, R = lengths
        if self.partial:
            return (
                f"partial[(((long long)sample * gridDim.z + blockIdx.z) * {P} + p) * {Q} * {R} + q * {R} + r] = over;"
            )
        value = self.joining.result.format("over") + (" * Compute(1.0 / O)" if self.fold == "mean" else "")
        return f"out[(((long long)sample * {P} + p) * {Q} + q) * {R} + r] = narrow_to<{self.result_type}>::of({value});"

    def local(self, i: int) -> int:
        """Positions of a block's tile along dimension i."""
        return self.t.cells[i] * (self.c.axes[i].stride if self.c.window is None else 1)

    def exchange_elements(self) -> int:
        """Compute values for the exchange between warps."""
        if self.kind == "channels":
            return self.joining.words * self.t.warps_m * prod(self.local(i) for i in range(3))
        return 0


def _over_rows(lines: list[str]) -> list[str]:
    """Statements for each of a thread's channels."""
    head = ["#pragma unroll", "for (int m = 0; m < M_TILES; ++m)", "#pragma unroll"]
    if len(lines) == 1:
        return [*head, "    for (int half = 0; half < 2; ++half)", f"        {lines[0]}"]
    return [*head, "    for (int half = 0; half < 2; ++half) {", *("        " + x for x in lines), "    }"]


def _cell_w(c: Contraction) -> str:
    """The cell along w that a thread's slot `own_w` holds."""
    if side_by_side(c):
        return "cell_w + 4 * warp_w * OWN_W + own_w / 2 * 8 + 2 * quad + own_w % 2"
    return "cell_w + 4 * (warp_w * OWN_W + own_w) + quad"
