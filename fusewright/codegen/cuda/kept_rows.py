"""CUDA C++ of rows that are kept: a team of threads reads a row, or some columns side by side, into registers; what of
a long row there are none for lies in shared memory.

Pass after pass over these gives a number per row, which all threads of the team have; the last one writes the results.
What is made of elements and numbers, and several passes want, takes the place of the elements.
What varies otherwise than from element to element of every row is read wherever it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import kept_rows_text as text
from fusewright.codegen.cuda import stream_text
from fusewright.codegen.cuda.stream_values import decode, for_each, tree
from fusewright.codegen.cuda.teams import TeamWriter
from fusewright.codegen.text import Lines, block, fill
from fusewright.ir.node import Node
from fusewright.kernel import Array, Kernel
from fusewright.schedule.kept_rows import LONGEST
from fusewright.schedule.kept_rows_record import KeptRows, Pass, Result, bytes_apart, is_known, ways_apart
from fusewright.schedule.stream_record import Tree

# Values that one thread keeps, as there is a choice (half as many of float64), and threads that share a row.
KEPT = (8, 16, 32, 64)
LEAST_TEAM, MOST_TEAM = 4, 1024
# The same of columns side by side.
KEPT_OF_COLUMNS = (16, 32)
MOST_SHARING = 64
# Numbers of rows from which on a part of them may as well lie in shared memory: there are more blocks then.
MANY = 16384

# What joins extremes, and their places; and which of these such an extreme is at.
JOINS = {"max": "Max", "min": "Min", "argmax": "First<Max>", "argmin": "First<Min>"}
PLACES = {"max": "argmax", "min": "argmin"}

Option = dict[str, Any]


def options(k: KeptRows) -> list[Option]:
    """Ways to compute a chain, best estimate first: by teams of so many threads."""
    numbers = k.length * len(k.kept) * k.words
    if not k.in_rows:
        numbers *= 16 // max(r.tensor.dtype.itemsize for r in k.kept)
        sharing = dict.fromkeys(1 << (-(-numbers // most) - 1).bit_length() for most in KEPT_OF_COLUMNS)
        alone_first = sorted(sharing, key=lambda team: team > 1)  # one thread has nothing to join
        return [{"team": team} for team in alone_first if team <= min(MOST_SHARING, k.length)]
    teams = (_team(numbers, most) for most in KEPT)
    whole = [{"team": team} for team in dict.fromkeys(teams) if team <= MOST_TEAM]
    apart = [{"team": team, "registers": held} for team, held in ways_apart(k.kept, k.length)] if numbers > MANY else []
    return [*(whole if k.length * len(k.kept) <= LONGEST else []), *apart]


def _team(numbers: int, most: int) -> int:
    """How many threads keep so many numbers: part of a warp, or a block of several."""
    team = LEAST_TEAM
    while team * most < numbers:
        team *= 4 if team == 32 else 2
    return team


def kernel(k: KeptRows, name: str, reference: str = "", *, team: int, registers: int = 0) -> Kernel:
    """The kernel of a chain whose rows teams of so many threads keep, all in registers or a part in so many of each
    thread."""
    return (_Rows if k.in_rows else _Columns)(k, name, team, registers).kernel(reference)


class _Rows(TeamWriter):
    """Writes the launch in which teams keep rows."""

    def __init__(self, k: KeptRows, name: str, team: int, registers: int) -> None:
        super().__init__(k.within, name, team)
        self.k, self.length, self.registers = k, k.length, registers
        if registers:
            widths = (1, self.wide.values if self.wide else 1)
            self.shared = max(bytes_apart(k.kept, k.length, team, values, registers) for values in widths)

    def record(self, **more: Any) -> Kernel:
        """The kernel, whose results have an element for each of x or a number for each row."""
        output, *also = map(self._array, self.outputs(), self.k.results)
        return replace(super().record(**more), output=output, also=tuple(also))

    def _array(self, name: str, result: Result) -> Array:
        lengths = [self.sizes.length(d) for d in range(self.s.value.ndim)]
        if not result.elements:
            away = {d for axis in self.s.axes if axis.role == "first" for d in axis.dims}
            kept = result.root.ndim == self.s.value.ndim
            lengths = ["1" if d in away else n for d, n in enumerate(lengths) if kept or d not in away]
        return Array(name, tuple(lengths), result.root.dtype)

    def outputs(self) -> dict[str, str]:
        return {f"out{i or ''}": ELEMENT[r.root.dtype] for i, r in enumerate(self.k.results)}

    def about(self) -> str:
        return f"rows that are kept, {super().about()}"

    def _functions(self) -> Iterator[Lines]:
        yield fill(stream_text.ROW_OF) if self.s.looks_up else []
        yield self._joining()
        yield fill(text.APART) if self.registers else []
        yield self._entry_values()
        for i, p in enumerate(self.k.passes):
            yield self._values(f"pass{i}", p.tree, i)
        for i, r in enumerate(self.k.results):
            yield self._values(f"result{i or ''}", r.tree, len(self.k.passes))

    def _joining(self) -> Lines:
        exchanged = fill(text.PLACE_OF_LANE) if self._places() else []
        return [*fill(text.JOINS), "", *self._places(), *exchanged, *fill(text.JOINED_ROWS)]

    def _places(self) -> Lines:
        """How places of extremes are joined, if any are looked for."""
        return [*fill(text.JOINS_OF_PLACES), ""] if any(p.kind in ("argmax", "argmin") for p in self.k.passes) else []

    def _kept(self) -> list[tuple[str, str]]:
        """Types and names of what is kept."""
        return [(compute_type(r.tensor.dtype), f"kept{i}") for i, r in enumerate(self.k.kept)]

    def _places_of_kept(self) -> Lines:
        """The declarations of what is kept."""
        if not self.registers:
            return [f"{t} {name}[GROUPS][V];" for t, name in self._kept()]
        each = self.registers // (len(self.k.kept) * self.k.words)
        lines = [
            "extern __shared__ __align__(128) unsigned char shared_memory[];",
            "unsigned char* end = shared_memory;",
        ]
        lines += [f"constexpr int HELD = {each} / V < GROUPS ? {each} / V : GROUPS;"]
        for t, name in self._kept():
            lines += [f"Kept<{t}, V, HELD> {name};", f"end = {name}.put(end, GROUPS);"]
        return lines

    def _entry_values(self) -> Lines:
        """The function that reads neighbours in a row."""
        own = [r.value for r in self.k.kept]
        loads, given, element = self.values.loads("before", "VALUES<WIDE>", among=own)
        written = [f"kept{i}[e] = {given[value]};" for i, value in enumerate(own)]
        parameters = [f"{kind} (&{name})[VALUES<WIDE>]" for kind, name in self._kept()]
        return self._function("Neighbours in a row.", "entry", parameters, [*loads, *for_each([*element, *written])])

    def _values(self, name: str, found: Tree, known: int) -> Lines:
        """The function that computes a tree from what is kept and so many known numbers."""
        own = {self.k.held(i, known): f"kept{i}[e]" for i in range(len(self.k.kept))}
        others = set(found.leaves) - {r.value for r in self.k.kept}
        loads, given, element = self.values.loads("before", "VALUES<WIDE>", among=others)
        lines, value = tree(found, found.root, given | own | self._numbers(known), steady=self._is_steady(known))
        parameters = [f"const {kind} (&{kept})[VALUES<WIDE>]" for kind, kept in self._kept()]
        parameters += [self._passed(i) for i in range(known)]
        parameters += [f"{compute_type(found.root.dtype)} (&value)[VALUES<WIDE>]"]
        about = "What comes of them." if name.startswith("result") else f"What gives number {known}."
        body = [*loads, *for_each([*element, *lines, f"value[e] = {value};"])]
        return self._function(about, name, parameters, body)

    def _numbers(self, known: int) -> dict[Node, str]:
        """The names of so many numbers."""
        return {p.number: f"number{i}{self.each}" for i, p in enumerate(self.k.passes[:known])}

    def _is_steady(self, known: int) -> Callable[[Node], bool]:
        """Whether a value is the same for all elements of a row, made of so many numbers."""
        numbers = {p.number for p in self.k.passes[:known]}
        return lambda node: is_known(node, numbers)

    def _replaced(self, known: int) -> Lines:
        """The statements that replace what is kept when so many numbers are known."""
        found: Lines = []
        for r in (r for r in self.k.replaced if r.known == known):
            name, before = f"kept{r.kept}[g][e]", self.k.held(r.kept, known - 1)
            given = {before: name} | self._numbers(known)
            lines, value = tree(r.tree, r.tree.root, given, steady=self._is_steady(known))
            each = for_each([*lines, f"{name} = {value};"], "V")
            found += ["#pragma unroll", *block("for (int g = 0; g < GROUPS; ++g)", each)]
        return found

    def _passed(self, i: int) -> str:
        return f"{self._number(self.k.passes[i])} number{i}"

    @staticmethod
    def _number(p: Pass) -> str:
        """The type of a number; rows have few enough elements for any index of one."""
        return compute_type(p.number.dtype) if p.number.dtype.is_floating_point else "float"

    def _arguments_of(self, known: int, group: str = "[g]") -> str:
        kept = [f"{name}{group}" for _, name in self._kept()]
        return ", ".join([*kept, *(f"number{i}" for i in range(known))])

    def _passes(self) -> Lines:
        """The statements that find all numbers, one after the other."""
        lines: Lines = []
        for i, p in enumerate(self.k.passes):
            names: dict[str, object] = {
                "S": self._number(p),
                "T": compute_type(p.tree.root.dtype),
                "coordinates": self._coordinates,
                "arguments": self._arguments_of(i),
                "decode_item": self._decode_element(),
                "over": repr(float(max(self.k.length - p.correction, 0))),
                "root": "sqrt" if p.kind == "std" else "",
                "start": "INFINITY" if p.kind in ("min", "argmin") else "-INFINITY",
                "Join": JOINS.get(p.kind, ""),
            }
            lines += [*self._pass(i, p, names), *self._replaced(i + 1)]
        return lines

    def _pass(self, i: int, p: Pass, names: dict[str, object]) -> Lines:
        """The statements that find number `i`."""
        if (place := self._place_of(i)) is not None:
            return fill(text.AT_PLACE, i=i, of=place, **names)
        if p.kind in ("max", "min"):
            return fill(text.EXTREME, i=i, **names)
        if p.kind in ("argmax", "argmin"):
            return fill(text.PLACE, i=i, **names)
        if p.kind in ("var", "std"):
            mean = fill(text.SUM, take=f"few{i}_mean += value[e];", i=f"{i}_mean", of=i, **names)
            return [*mean, *fill(text.SPREAD, i=i, **names)]
        take = f"few{i} += value[e] * value[e];" if p.kind == "norm" else f"few{i} += value[e];"
        whole = {"sum": f"total{i}", "mean": f"total{i} / LENGTH", "norm": f"sqrt(total{i})"}[p.kind]
        return [*fill(text.SUM, take=take, i=i, of=i, **names), *fill(text.NUMBER, whole=whole, i=i, **names)]

    def _place_of(self, i: int) -> int | None:
        """The pass before that found the place of the extreme which pass `i` is to find."""
        p = self.k.passes[i]
        found = (
            j for j, q in enumerate(self.k.passes[:i]) if q.kind == PLACES.get(p.kind) and q.tree.root is p.tree.root
        )
        return next(found, None)

    def _decode_element(self) -> Lines:
        return self._decode("item", self.axes["first"])

    def _body(self) -> Lines:
        return fill(
            text.ROWS,
            target=self._target(),
            rows=self._items(self.results),
            decode_row=decode("row", self.results, ""),
            kept=self._places_of_kept(),
            entry=", ".join(f"{name}[g]" for _, name in self._kept()),
            passes=self._passes(),
            write=self._written_results(text.WRITE_ELEMENTS, text.WRITE_NUMBER),
            coordinates=self._coordinates,
            decode_item=self._decode_element(),
        )

    def _written_results(self, elements: str, number: str) -> Lines:
        """The statements that write all results."""
        lines: Lines = []
        for i, (r, out) in enumerate(zip(self.k.results, self.outputs(), strict=True)):
            known = len(self.k.passes)
            lines += fill(
                elements if r.elements else number,
                result=f"result{i or ''}",
                out=out,
                R=compute_type(r.tree.root.dtype),
                coordinates=self._coordinates,
                decode_item=self._decode_element(),
                arguments=self._arguments_of(known),
                first=self._arguments_of(known, "[0]"),
                place=self._place(self.all if r.elements else self.results),
            )
        return lines


class _Columns(_Rows):
    """Writes the launch in which teams keep columns."""

    form = "columns"
    each = "[e]"

    def _joining(self) -> Lines:
        return [*fill(text.JOINS), "", *self._places(), *fill(text.JOINED_COLUMNS)]

    def _is_steady(self, known: int) -> Callable[[Node], bool]:
        """A thread has several columns, and no registers for what their reciprocals leave: 0.093 ms in place of 0.071
        for `x / norm(x, 1)` beside another of 16 x 256 x 64 x 64."""
        return lambda node: False

    def _passed(self, i: int) -> str:
        return f"const {self._number(self.k.passes[i])} (&number{i})[VALUES<WIDE>]"

    def _decode_element(self) -> Lines:
        return decode("item", self.axes["first"], "")

    def _pass(self, i: int, p: Pass, names: dict[str, object]) -> Lines:
        if (place := self._place_of(i)) is not None:
            return fill(text.AT_PLACE_OF_COLUMNS, i=i, of=place, **names)
        if p.kind in ("max", "min"):
            return fill(text.EXTREME_OF_COLUMNS, i=i, **names)
        if p.kind in ("argmax", "argmin"):
            return fill(text.PLACE_OF_COLUMNS, i=i, **names)
        if p.kind in ("var", "std"):
            return fill(text.SPREAD_OF_COLUMNS, i=i, **names)
        take = "value[e] * value[e]" if p.kind == "norm" else "value[e]"
        whole = {"sum": "total[e]", "mean": "total[e] / LENGTH", "norm": "sqrt(total[e])"}[p.kind]
        return fill(text.SUM_OF_COLUMNS, take=take, whole=whole, i=i, **names)

    def _body(self) -> Lines:
        return fill(
            text.COLUMNS,
            target=self._target(),
            items=self._items(self.results),
            decode_column=self._decode("column", self.results),
            kept=self._places_of_kept(),
            entry=", ".join(f"{name}[g]" for _, name in self._kept()),
            passes=self._passes(),
            write=self._written_results(text.WRITE_COLUMNS, text.WRITE_NUMBERS),
            coordinates=self._coordinates,
            decode_item=self._decode_element(),
        )
