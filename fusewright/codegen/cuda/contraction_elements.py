"""Operands that have a number for every element of a contraction's output, as the other branch of a residual block.

They lie in memory as the output does.  So a thread reads each where it writes the result that is computed from it, as
many neighbours at once; of rows that are written from shared memory (`output_rows`), whose values are all of one
feature by then, the pointwise tree is evaluated on the way out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import contraction_finish_text as finish
from fusewright.codegen.cuda.contraction_values import ValueText
from fusewright.codegen.cuda.loops import nest
from fusewright.codegen.text import Lines, fill

# What the template that writes rows says where nothing is read on the way.
PLAIN_ROWS: dict[str, object] = {"template": [], "class": "", "more": "", "reads": []}
PLAIN_ROWS |= {"change": "values[i][k].element[j]", "write": fill(finish.WRITE_RUNS, places="", given="")}

# Loops over the channels of a thread, and which one they are at.
CHANNELS = ("for (int m = 0; m < M_TILES; ++m)", "for (int half = 0; half < 2; ++half)")


@dataclass(frozen=True)
class ElementText(ValueText):
    """Writes how they are read, for values that a thread has of channels (m, half)."""

    @property
    def place(self) -> str:
        return "int at" if self.late else "int m, int half"

    def of_channel(self, name: str) -> str:
        return f"widened({name}[{self.of_sample(name)}at])" if self.late else f"{name}_at[m][half]"

    @property
    def _there(self) -> str:
        """Whether the block has the feature at hand, at a position that is `inside`."""
        first, behind = self.first_feature
        return "inside" if self.whole else f"inside && first_feature + {first} + {behind} < O"

    @property
    @abstractmethod
    def whole(self) -> bool:
        """Whether every block has all of its features."""

    def changed(self, value: str, at: str = "[m][half]") -> str:
        return super().changed(value, at)

    # -- where a thread has values of all of its channels

    def rows_beside(self, suffix: str, first: str) -> Lines:
        """Pointers to the numbers of a block's features from the `first` on, which are `plane` apart."""
        at = f"(((long long)sample * GROUPS + group) * O + first_feature{first}) * plane"
        return [self._pointer(name, suffix, f"{name} + {at}") for name in self.beside]

    def features_beside(self, lengths: Sequence[str]) -> Lines:
        """Pointers to the numbers of position (p, q, first_r), of the block's first feature."""
        _, Q, R = lengths
        at = f"{{0}}_features + unsigned((p * {Q} + q) * {R} + first_r)"
        return [self._pointer(name, "from", at.format(name)) for name in self.beside]

    def positions_beside(self, lengths: Sequence[str]) -> Lines:
        """Pointers to the numbers of position (p, q, r), of a thread's first feature."""
        P, Q, R = lengths
        at = f"{{0}}_row + unsigned((p * {Q} + q) * {R} + r)"
        if self.c.channels_last:
            at = f"{{0}} + ((((long long)sample * {P} + p) * {Q} + q) * {R} + r) * (GROUPS * O)"
            at += f" + group * O + first_feature + {self.first_feature[0]}"
        return [self._pointer(name, "from", at.format(name)) for name in self.beside]

    def _pointer(self, name: str, suffix: str, at: str) -> str:
        return f"const {self._types[name]}* const {name}_{suffix} = forgotten({at});"

    @property
    def _types(self) -> dict[str, str]:
        return {name: ELEMENT[node.dtype] for node, name in self.read() if name in self.beside}

    @property
    def _offset(self) -> str:
        """How far behind those of a thread's first feature the numbers of the one at hand are."""
        behind = self.first_feature[1]
        return behind if self.c.channels_last else f"({behind}) * plane"

    def read_beside(self, lengths: Sequence[str], *, paired: bool) -> Lines:
        """Read what all channels of a thread have at position (p, q, r), with channels `paired` as neighbours: before
        any result is written, behind which no reading would begin."""
        if not self.beside:
            return []
        lines = self.positions_beside(lengths)
        for name in self.beside:
            lines.append(f"Compute {name}_here[M_TILES][2];")
            if paired:
                read = f"read_neighbours({name}_from + {self._offset}, {self._there}, {name}_here[m]);"
                lines += nest(CHANNELS[:1], ["constexpr int half = 0;", read])
            else:
                read = f"{name}_here[m][half] = read_element({name}_from + {self._offset}, {self._there});"
                lines += nest(CHANNELS, [read])
        return lines

    def runs_beside(self, count: int) -> Lines:
        """The same of `count` neighbours of a row, from position (p, q, r) on."""
        lines = self.positions_beside("PQR") if self.beside else []
        for name in self.beside:
            read = f"read_run({name}_from + {self._offset}, {self._there}, R - r, R, {name}_here[m][half]);"
            lines += [f"Compute {name}_here[M_TILES][2][{count}];", *nest(CHANNELS, [read])]
        return lines

    # -- where rows of one feature leave shared memory

    def late_names(self, first: str) -> dict[str, object]:
        """What the templates that write rows say of it; the first row is that of the block's feature `first`."""
        if not self.late:
            return {**PLAIN_ROWS, "given": ""}
        names, types = self.beside, self._types
        reads: Lines = []
        for name in names:
            reads += fill(_READ_ROWS, name=name)
        here = ", ".join(["values[i][k].element[j]", "channel + feature", *(f"{name}_here[i][k][j]" for name in names)])
        pointers = "".join(f", const {types[name]}* {name}" for name in names)
        given = "".join(f", {name}_from + ({first}) * plane" for name in names)
        passed = "".join(f", {name}" for name in ("before", "channel", *names))
        places = "".join(f" | reinterpret_cast<unsigned long long>({name}) / sizeof(*{name})" for name in names)
        return {
            "template": ["template <class Change>"],
            "class": ", class Change",
            "write": fill(finish.WRITE_RUNS, places=places, given=passed),
            "more": f", const Change& before, int channel{pointers}",
            "reads": reads,
            "change": f"before({here})",
            "given": f", before, group * O + first_feature + ({first}){given}",
        }


_READ_ROWS = """
Compute ${name}_here[AT_ONCE][PARTS][RUN];
#pragma unroll
for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
    for (int k = 0; k < PARTS; ++k) {
        const int feature = first + i * TEAM, column = at[i] + PART * k;
        const bool there = feature < features && unsigned(column) < unsigned(left);
        read_neighbours($name + feature * plane + column, there, ${name}_here[i][k]);
    }
"""
