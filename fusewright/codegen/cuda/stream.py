"""CUDA C++ of streams: one pass over values in memory, 16 bytes at a time where the last axis allows it.

flat     no reduction: a thread writes a few neighbours; where no operand has both of the last axes, of several rows
rows     the last axes are reduced: a team of threads per row, or per part of one
columns  axes before the last are reduced: a thread keeps a few neighbours of the last axis and walks along the others

Where there are too few rows or columns to fill a device, each is reduced in parts, and a second launch joins the parts
in a fixed order.  A second reduction belongs to that launch as well, unless its blocks would join for long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import stream_text as text
from fusewright.codegen.cuda.folds import PLANES, fold
from fusewright.codegen.cuda.primitives import preamble
from fusewright.codegen.cuda.stream_straddled import StraddledValues, straddled
from fusewright.codegen.cuda.stream_tall import TallValues, tall
from fusewright.codegen.cuda.stream_values import Values, Widths, decode, is_of_records, widths
from fusewright.codegen.stream_sections import StreamSections
from fusewright.codegen.stream_sizes import hint
from fusewright.codegen.stream_values import joints as joints_of
from fusewright.codegen.stream_values import shifted
from fusewright.codegen.text import Lines, block, fill, indent, opened
from fusewright.ir.node import Node
from fusewright.kernel import Argument, Expression, Kernel, Launch
from fusewright.schedule.stream_record import Stream, picks_each

THREADS = 256
WARPS = THREADS // 32
FULL = 1056  # blocks that keep a large device busy: eight on each of 132 multiprocessors
# Parts of rows, all together: half as many, twice and four times as many took up to 1.08, 1.05 and 1.12 times as long.
PARTS = 2 * FULL
# Parts of columns, of all together: blocks that they are at most, times the elements that a thread has of each row.
COLUMNS = 2 * FULL
# Rows of which four such parts are worth a second launch.
LONG = 128
# Threads side by side along the last axis, at least.
LEAST_LANES = 4
# Rows that a thread computes together, by its neighbours in each, where so many warps are left.
CROSSED, WARPS_OF_CROSSED = {1: 8, 2: 8, 4: 4, 8: 2}, 4 * FULL
# Parts of columns that a thread of the second launch joins at most where it has fewer blocks than so many; others are
# joined in a launch of their own: by one block, 32 parts of 1024 columns each took 60 us behind 8 us of reading.
JOINED, FEW_BLOCKS = 16, 64
# A part of a column is read in so many times as many bytes as it is saved in, at least.
SAVED = 8
# Bytes of shared memory that threads of one column may take to join what they found.
MOST_SHARED = 48 * 1024


def kernel(s: Stream, name: str, reference: str = "") -> Kernel:
    """The kernel of a stream; sizes that the graph knows only choose between its forms."""
    return Writer(s, name).kernel(reference)


@dataclass(frozen=True)
class Shape:
    """How the work is cut, chosen from the sizes the graph knows.

    team     threads per row (rows), or rows of threads per block (columns)
    parts    how many parts a row or column is cut into; `None` for one launch
    joiners  threads that join the parts of one result
    apart    whether parts are joined in a launch between the one that finds them and the one that reduces the results
    crossed  rows that a thread computes neighbours of (flat); 0 where they share nothing
    """

    form: str
    team: int = 1
    parts: Expression | None = None
    joiners: int = 1
    apart: bool = False
    crossed: int = 0


class Writer(StreamSections):
    """Writes the sections of one stream.

    straddles  whether threads may take vectors of memory that are of two rows: what a value gives is one element
    """

    straddles: ClassVar[bool] = True

    def __init__(
        self, s: Stream, name: str, names: dict[Node, str] | None = None, lengths: list[Expression] | None = None
    ) -> None:
        super().__init__(s, name, names, lengths)
        self.values = Values(s, self.names)
        self.wide = widths(s)
        self.shape = self._shape()
        # A step behind the last element, an index may be so many times as large.
        self.beyond = 3 if self.shape.form == "flat" else 2
        most = max(prod(map(hint, t.shape)) for t in (*s.tensors, s.entry, s.value))
        self.index = "int" if self.beyond * most < 2**31 else "long long"

    def _shape(self) -> Shape:
        """The form, and how it is cut: enough threads for a large device, and long enough runs for each."""
        if not self.s.folds:
            return Shape("flat", crossed=self._crossed())
        return self._shape_of_rows() if self.last in self.axes["first"] else self._shape_of_columns()

    def _shape_of_rows(self) -> Shape:
        first, results = self.axes["first"], self.results
        reduced, kept = self.sizes.reduced(first), self.sizes.count(results)
        items = THREADS * max(1, 8 // self._window)  # of a part, at least
        split = kept < FULL // 4 and reduced >= 2 * items
        few = split or (reduced >= 16 * THREADS and kept < 8 * FULL)  # rows: fewer than warps, nearly
        team = THREADS if few else 32 if reduced >= 128 else 8
        most = f"ceil_div({self.sizes.product(first)}, {items})"
        cut = f"max(1, min({most}, ceil_div({PARTS}, max(1, {self.sizes.product(results)}))))"
        parts = cut if split or len(self.s.folds) == 2 else None
        return Shape("rows", team, parts, 32 if split and kept * 32 <= 2**16 else 1)

    def _shape_of_columns(self) -> Shape:
        first, results = self.axes["first"], self.results
        reduced, kept, two = self.sizes.reduced(first), self.sizes.count(results), len(self.s.folds) == 2
        wide = self.wide.values if self.wide else 1
        values = 1 if self.sizes.count([self.last]) % wide else wide  # of a thread, in the variant that will run
        threads = kept // values
        team = self._team_of_columns(threads, reduced)
        lanes, joined = THREADS // team, 4 * self.planes * team  # rows that take as long as to join what they come to
        least = max(joined, SAVED * 8 * self.planes // self.itemsize)  # rows of a part
        split = threads * team < 2**16 and reduced >= 4 * min(least, LONG)
        blocks = f"ceil_div(ceil_div({self.sizes.product(results)}, {values}), {lanes})"
        most = COLUMNS // values
        cut = f"max(1, min(ceil_div({self.sizes.product(first)}, {least}), {most} // max(1, {blocks})))"
        count = min(-(-reduced // least), most // max(1, -(-threads // lanes)))
        rows = self.sizes.count(self.axes["kept"])
        apart = two and split and rows < FEW_BLOCKS and kept * count > JOINED * THREADS * rows
        # A power of two, since they are joined by halves.
        joiners = 1 << min(32, max(1, 2**16 // kept)).bit_length() - 1 if split else 1
        return Shape("columns", team, cut if split else "1" if two else None, joiners, apart)

    def _team_of_columns(self, threads: int, reduced: int) -> int:
        """Threads on each other, where so many side by side have a column: more of them where a block would have
        threads without a column, and no more than there is shared memory for."""
        team = next((t for t in (1, 2, 4, 8) if threads * t >= 2**18 or reduced < 8 * t), 8)
        lanes = max(LEAST_LANES, 1 << (threads - 1).bit_length())
        if team > 1 and lanes < 32:
            team = THREADS // lanes
        # Bytes that a thread hands to another, of another warp, in the wide variant and in the other.
        on_each_other = tall(self.s, "kept")
        other = 1 if on_each_other is None else on_each_other.values
        column = 8 * self.planes * (other + (self.wide.values if self.wide else 0))
        while team > 1 and (min(team, WARPS) - 1) * THREADS // team * column > MOST_SHARED:
            team = team // 2 if team <= WARPS else 2 * team  # of more threads, those of a warp hand nothing over
        return team

    @property
    def _window(self) -> int:
        """Elements that are read for each of those that are reduced."""
        return 1 if self.s.window is None else prod(self.s.window.op.kernel)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of the widest element that is read ahead of the reductions."""
        return max((r.tensor.dtype.itemsize for r in self.s.reads if r.place == "before"), default=4)

    @property
    def _flat_groups(self) -> int:
        """Groups of values that a thread loads before it writes them, in the wide variant: more where they are less
        than 16 bytes."""
        return 4 if self.wide and self.wide.values * self.itemsize <= 8 else 2

    def _crossed(self) -> int:
        """Rows whose neighbours a thread computes: operands vary along them or along the last axis, none along both."""
        row, last = len(self.s.axes) - 2, self.last
        plain = all(r.indices is None and r.part is None for r in self.s.reads)
        shared = any(last in r.axes for r in self.s.reads) and not any({row, last} <= {*r.axes} for r in self.s.reads)
        if row < 0 or self.s.window is not None or not plain or not shared:
            return 0
        values = self.wide.values if self.wide else 1
        threads = self.sizes.reduced(self.all) // (values * WARPS_OF_CROSSED * 32)
        most = min(self.sizes.reduced([row]), threads, CROSSED[values])
        return next((n for n in (8, 4, 2) if n <= most), 0)

    # Text.

    def kernel(self, reference: str) -> Kernel:
        parts = self.shape.parts
        return self.record(
            source=self.source(),
            scratch=self.scratch(self.planes, parts) if parts else (),
            launches=self._launches(),
            reference=reference,
            notes=self._notes(),
            counts=self._counts() if self.index == "int" else (),
        )

    def _counts(self) -> tuple[Expression, ...]:
        """The greatest indices."""
        weights = (" * ".join(self.sizes.operand(self.s.tensors[i])) for i in self.s.weights)
        wholes = (" * ".join(self.sizes.operand(r.tensor)) for r in self.s.reads if r.within)
        elements = dict.fromkeys((self.sizes.product(self.all), " * ".join(self.sizes.lengths), *weights, *wholes))
        return tuple(f"{self.beyond} * {n}" for n in elements)

    def _notes(self) -> tuple[str, ...]:
        limit = () if self.index != "int" else (f"32-bit indices: fewer than 2**31 / {self.beyond} elements.",)
        parts = () if self.shape.parts is None else ("Reduced in parts, which a second launch joins.",)
        return (*parts, *limit)

    def _arguments(self, *more: Argument) -> tuple[Argument, ...]:
        number = "int" if self.index == "int" else "long"
        pointers = (Argument("pointer", name) for name in dict.fromkeys(self.names.values()))
        return (*pointers, *(Argument(number, n) for n in self.lengths()), *more)

    def _launches(self) -> tuple[Launch, ...]:
        shape, results = self.shape, self.sizes.product(self.results)
        outputs = tuple(Argument("pointer", name) for name in self.outputs())
        partial = (Argument("pointer", "scratch"), Argument("int", shape.parts or "1"))
        arguments = self._arguments(*(outputs if shape.parts is None else partial))
        parts = f"({shape.parts or 1})"
        values = self.wide.values if self.wide else 1
        blocks = {
            "flat": f"ceil_div({results}, {THREADS * values * (shape.crossed or self.at_once(self._flat_groups))})",
            "rows": f"ceil_div({results} * {parts}, {THREADS // shape.team})",
            "columns": f"ceil_div(ceil_div({results}, {values}), {THREADS // shape.team}) * {parts}",
        }[shape.form]
        main = Launch(self.name, arguments, (blocks, "1", "1"), THREADS)
        if shape.parts is None:
            return (main,)
        joined = f"ceil_div({results}, {THREADS // shape.joiners})"
        grid = self.sizes.product(self.axes["kept"]) if len(self.s.folds) == 2 else joined
        if not shape.apart:
            last = Launch(f"{self.name}_finish", self._arguments(*partial, *outputs), (grid, "1", "1"), THREADS)
            return (main, last)
        several = (f"{joined} * min(1, {shape.parts} - 1)", "1", "1")  # a single part is all of a result
        join = Launch(f"{self.name}_join", self._arguments(*partial), several, THREADS)
        arguments = self._arguments(partial[0], *outputs)
        return main, join, Launch(f"{self.name}_finish", arguments, (grid, "1", "1"), THREADS)

    def at_once(self, most: int) -> int:
        """How many groups of values a thread loads together: fewer where a window makes many loads anyway."""
        return max(1, most // 2) if self.s.window else most

    def outputs(self) -> dict[str, str]:
        """What is written, with the types of its elements."""
        return {"out": ELEMENT[self.s.root.dtype]}

    def source(self) -> str:
        body = self.body()
        return f"// {self.name}: {self.about()}\n\n{preamble(body, 'nonfinite', 'elements')}\n{body}"

    def body(self, *, tools: bool = True) -> str:
        """The text behind the primitives, without the `tools` of all streams where there are others."""
        lines = [*self._constants(), *([*fill(text.TOOLS), ""] if tools else []), *self.data(), ""]
        lines += [*fill(text.ROW_OF), ""] if self.s.looks_up else []
        lines += [*fill(text.INDEX), ""] if "long long" in self.outputs().values() else []
        lines += self.carried()
        lines += [*fill(text.JOINED), ""] if self._joins() else []
        lines += [*self._computed(), *self.tails()]
        lines += [*self._body(), "", *self._entry()]
        if self.shape.apart:
            lines += ["", *self._join()]
        if self.shape.parts is not None:
            lines += ["", *self._finish()]
        return "\n".join(lines) + "\n"

    def _joins(self) -> bool:
        """Whether threads join what they found."""
        return self.shape.team > 1 or self.shape.parts is not None

    def _computed(self) -> Lines:
        """The functions that compute values."""
        others = (other for other in (self.tall, self.straddled) if other is not None)
        return [*self.values.counted(), *self.values.text(), "", *(line for o in others for line in (*o.text(), ""))]

    def carried(self) -> Lines:
        """What carries the reductions."""
        lines, compute = [], compute_type(self.s.value.dtype)
        for i, (reduction, tail) in enumerate(self.s.folds):
            result = compute_type(reduction.node.dtype)
            half = i == 0 and self.itemsize == 2
            lines += [*fold(reduction.op, ("First", "Second")[i], compute, result, half=half).strip().split("\n"), ""]
            compute = compute_type((tail.root if tail else reduction.node).dtype)
        return lines

    @property
    def planes(self) -> int:
        """How many numbers a part of a result takes."""
        return PLANES[self.s.folds[0][0].op.kind]

    def at(self, first: str, *step: str, fold: int = 0) -> str:
        """What a fold is told beside values: where they are along what is reduced, if it gives an index."""
        return "".join(f", {n}" for n in (first, *step)) if self.s.folds[fold][0].op.gives_index else ""

    def tails(self) -> Lines:
        """What finishes the reductions."""
        return [line for i in range(len(self.s.folds)) for line in (*self.values.tail(i), "")]

    def _constants(self) -> Lines:
        shape, wide = self.shape, self.wide or Widths(1, 1)
        lines = [f"using index_t = {self.index};", f"using count_t = unsigned {self.index};  // divides faster"]
        lines += [f"constexpr int THREADS = {THREADS};"]
        if shape.form == "rows":
            lines.append(f"constexpr int TEAM = {shape.team};  // threads per row")
        if shape.form == "columns":
            lines.append(f"constexpr int TEAM = {shape.team}, LANES = THREADS / TEAM;")
        if shape.parts is not None:
            lines.append(f"constexpr int JOINERS = {shape.joiners};  // threads that join the parts of one result")
        lines += ["// Values per thread and elements per load, in the wide variant (16-byte loads) and in the other."]
        lines += self._widths("VALUES", wide.values, 1)
        if self.s.window is None:
            return [*lines, ""]
        op = self.s.window.op
        lines += self._widths("CHUNK", wide.chunk, 1)
        lines += self.window_constants("__device__ constexpr int", "constexpr int")
        stride, padding, reach = op.stride[-1], op.padding[-1], op.dilation[-1] * (op.kernel[-1] - 1)
        skew = -(-padding // wide.chunk) * wide.chunk
        lines.append("// A row of loads starts SKEW elements to the left of the first slot and takes SPAN of them.")
        lines += self._widths("SKEW", skew, padding)
        lines += self._widths("SPAN", skew - padding + (wide.values - 1) * stride + reach + 1, reach + 1)
        return [*lines, ""]

    def _widths(self, name: str, wide: int, narrow: int) -> Lines:
        value = f"WIDE ? {wide} : {narrow}" if self.wide and wide != narrow else str(narrow)
        return ["template <bool WIDE>", f"constexpr int {name} = {value};"]

    def _body(self) -> Lines:
        return {"flat": self._flat, "rows": self._rows, "columns": self._columns}[self.shape.form]()

    @cached_property
    def tall(self) -> TallValues | None:
        """Values on each other in place of single ones, where windows share what they read."""
        if self.shape.form == "columns" and self.shape.parts is not None:
            return None
        found = tall(self.s, "first" if self.shape.form == "rows" else "kept")
        return None if found is None else TallValues(self.s, self.names, found)

    @cached_property
    def straddled(self) -> StraddledValues | None:
        """Vectors of memory in place of single values, where rows have no whole number of those."""
        flat = self.straddles and self.shape.form == "flat" and not self.shape.crossed and self.wide is not None
        length = straddled(self.s) if flat else None
        return None if length is None else StraddledValues(self.s, self.names, length)

    def _common(self) -> dict[str, object]:
        return {"T": self.values.compute, "coordinates": self._coordinates}

    def _at_once(self, wide: int, narrow: int) -> str:
        return f"AT_ONCE = WIDE ? {self.at_once(wide)} : {self.at_once(narrow)}"

    def _items(self, axes: list[int]) -> str:
        """C++ for the number of groups of values of these axes."""
        return " * ".join(f"(d.n{a} / V)" if a == self.last else f"d.n{a}" for a in axes) or "1"

    def _decode(self, index: str, axes: list[int]) -> Lines:
        return decode(index, axes, " * V" if axes[-1:] == [self.last] else "")

    def _flat(self) -> Lines:
        if self.shape.crossed:
            row, outer = self.last - 1, self.all[:-2]
            return fill(
                text.CROSSED,
                target=self._target(),
                store=self.store(f"place + t * d.n{self.last}", "value[t]"),
                rows=self.shape.crossed,
                row=row,
                last=self.last,
                items=" * ".join([*(f"d.n{a}" for a in outer), "index_t(groups * across)"]),
                decode=decode("others", outer, ""),
                **self._common(),
            )
        lines = fill(
            text.FLAT,
            target=self._target(),
            store=self.store("(first + t * THREADS) * V", "value[t]"),
            items=self._items(self.all),
            decode=self._decode("item", self.all),
            at_once=self._at_once(self._flat_groups, 4),
            **self._common(),
        )
        if self.straddled is not None:
            store, one = self.store("(first + t * THREADS) * V", "value[t]"), "store<1>(out + at, value);"
            lines += ["", *self.straddled.flat(self._target(), store, one, self._coordinates)]
        return lines if self.tall is None else [*lines, "", *self.tall.flat()]

    def store(self, place: str, value: str) -> str:
        """The statement that writes neighbours."""
        return f"store<V>(out + {place}, {value});"

    def _target(self) -> str:
        outputs = ", ".join(f"{element}* {name}" for name, element in self.outputs().items())
        return "double* scratch, int parts" if self.shape.parts is not None else outputs

    def _rows(self) -> Lines:
        first = self.axes["first"]
        lines = self._rows_of(
            head=["template <bool WIDE>", f"__device__ __forceinline__ void rows(const Data& d, {self._target()})"],
            values=f"VALUES<WIDE>, {self._at_once(self._fitting(4, wide=True), self._fitting(8, wide=False))}",
            function="values<WIDE>",
            items=self._items(first),
            decode_item=self._decode("item", first),
        )
        if self.tall is None:
            return lines
        tall = self._rows_of(
            head=[f"__device__ __forceinline__ void tall(const Data& d, {self._target()})"],
            values="TALL, AT_ONCE = 1",
            function="tall_values",
            items=self.tall.items(first),
            decode_item=self.tall.decode("item", first),
        )
        return [*lines, "", *tall]

    def _rows_of(self, *, head: Lines, **names: object) -> Lines:
        """The function that folds the items of a row."""
        share = ["const index_t row = team, begin = 0, end = row < rows ? items : 0;"]
        write = self.write_row()
        if self.shape.parts is not None:
            share = ["const index_t row = team / parts, part = team % parts, share = (items + parts - 1) / parts;"]
            share += ["const index_t begin = part * share, end = row < rows ? min(items, begin + share) : 0;"]
            save = ["fold.save(scratch + (part * rows + row), parts * rows);"]
            write = self._saved(save, "row", "1", ["const First whole[1] = {fold};"], "whole")
        return fill(
            text.ROWS,
            head="\n".join(head),
            rows=self._items(self.results),
            share=share,
            decode_row=decode("row", self.results, ""),
            write=write,
            at_each=self.at("(item + t * TEAM) * V"),
            at=self.at("item * V"),
            **self._common(),
            **names,
        )

    def _saved(self, parts: Lines, first: str, count: str, head: Lines, folds: str) -> Lines:
        """`parts` of results, saved; where one part is all of a result that is reduced again, that result."""
        if len(self.s.folds) < 2:
            return parts
        whole = [*head, f"{self._between} value[{count}];", f"finish(d, {first}, {folds}, value);", "#pragma unroll"]
        whole += [f"for (int e = 0; e < {count}; ++e) scratch[{first} + e] = value[e];"]
        return ["if (parts == 1) {", *indent(whole), "} else {", *indent(parts), "}"]

    @property
    def _between(self) -> str:
        """The type of what is computed of the first reduction."""
        reduction, tail = self.s.folds[0]
        return compute_type((tail.root if tail else reduction.node).dtype)

    def write_row(self) -> Lines:
        """What a thread does with the whole of a row, `fold`."""
        write = ["const First whole[1] = {fold};", f"{compute_type(self.s.root.dtype)} value[1];"]
        return [*write, "finish(d, row, whole, value);", "store<1>(out + row, value);"]

    def _fitting(self, most: int, *, wide: bool) -> int:
        """How many groups of values a thread of a team takes together: no more than a row has for it."""
        values = self.wide.values if self.wide and wide else 1
        share = self.sizes.reduced(self.axes["first"]) // (self.shape.team * values)
        return next((n for n in (8, 4, 2) if n <= min(most, share)), 1)

    def _columns(self) -> Lines:
        result = compute_type(self.s.root.dtype)
        lines = self._columns_of(
            self.write_columns(),
            head=["template <bool WIDE>", f"__device__ __forceinline__ void columns(const Data& d, {self._target()})"],
            values=f"VALUES<WIDE>, {self._at_once(4, 8)}",
            function="values<WIDE>",
            items=self._items(self.results),
            decode_item=self._decode("item", self.results),
        )
        if self.tall is None:
            return lines
        tall = self._columns_of(
            self.tall.write(self.results, result),
            head=[f"__device__ __forceinline__ void tall(const Data& d, {self._target()})"],
            values="TALL, AT_ONCE = 1",
            function="tall_values",
            items=self.tall.items(self.results),
            decode_item=self.tall.decode("item", self.results),
        )
        return [*lines, "", *tall]

    def write_columns(self) -> Lines:
        """What a thread does with the whole of its columns, the array `fold`."""
        value = f"{compute_type(self.s.root.dtype)} value[V];"
        return [value, "finish(d, item * V, fold, value);", "store<V>(out + item * V, value);"]

    def _columns_of(self, write: Lines, *, head: Lines, **names: object) -> Lines:
        """The function that folds a thread's values, and writes the results by `write`."""
        parts, team = self.shape.parts is not None, self.shape.team
        share = ["const index_t begin = 0, end = item < items ? reduced : 0;"]
        if parts:
            share = ["const index_t part = job % parts, share = (reduced + parts - 1) / parts;"]
            share += ["const index_t begin = part * share, end = item < items ? min(reduced, begin + share) : 0;"]
            save = "fold[e].save(scratch + ((part * items + item) * V + e), parts * items * V);"
            write = ["#pragma unroll", "for (int e = 0; e < V; ++e)", f"    {save}"]
            write = self._saved(write, "item * V", "V", [], "fold")
        return fill(
            text.COLUMNS,
            head="\n".join(head),
            reduced=" * ".join(f"d.n{a}" for a in self.axes["first"]),
            times_parts=" * parts" if parts else "",
            over_parts=" / parts" if parts else "",
            share=share,
            decode_reduced=decode("r", self.axes["first"], ""),
            join=fill(text.COLUMNS_JOIN) if team > 1 else [],
            at_each=self.at("r", "TEAM"),
            at=self.at("r"),
            write=[f"if ({'member == 0 && ' if team > 1 else ''}item < items) {{", *indent(write), "}"],
            **self._common(),
            **names,
        )

    @property
    def _coordinates(self) -> str:
        return ", ".join(f"i{a}" for a in self.all)

    @staticmethod
    def _place(axes: Sequence[int]) -> str:
        """C++ for the linear index of coordinates of these axes."""
        place = ""
        for a in axes:
            place = f"({place}) * d.n{a} + i{a}" if place else f"i{a}"
        return place

    def _function(self, about: str, name: str, parameters: Iterable[str], body: Lines) -> Lines:
        """A function of coordinates and of more."""
        coordinates = (f"index_t i{a}" for a in self.all)
        head = f"void {name}({', '.join(['const Data& d', *coordinates, *parameters])})"
        return [f"// {about}", "template <bool WIDE>", Values.inline, *block(head, body)]

    def _signature(self, entry: str, *more: str) -> Lines:
        """``entry(parameters) {``."""
        number = "int" if self.index == "int" else "long long"
        found = (f"const {ELEMENT[t.dtype]}* __restrict__ {name}" for t, name in self.names.items())
        pointers = dict.fromkeys(found)  # two views may be of one tensor
        return opened(entry, [*pointers, *(f"{number} {n}" for n in self.numbers()), *more])

    def _members(self) -> str:
        return ", ".join([*dict.fromkeys(self.names.values()), *self.numbers()])

    def _entry(self) -> Lines:
        target = ["scratch", "parts"] if self.shape.parts is not None else [*self.outputs()]
        call = f"{self.shape.form}<%s>(d, {', '.join(target)});"
        parts = self.shape.parts is not None
        more = ("double* scratch", "int parts") if parts else self._written()
        body = ["await_launches();", f"const Data d{{{self._members()}}};"]
        other = call % "false" if self.tall is None else f"tall(d, {', '.join(target)});"
        if self.wide:
            body += [f"if ({' && '.join(self._conditions())})", f"    {call % 'true'}"]
            if self.straddled is not None:
                conditions = " && ".join(self.straddled.conditions())
                body += [f"else if ({conditions})", f"    straddled(d, {', '.join(target)});"]
            body += ["else", f"    {other}"]
        else:
            body += [other]
        if self.s.looks_up:
            body.append("if (d.outside) __trap();  // an index was that of no row: eager's own kernel fails as well")
        if self.refuses:
            body.append("if (d.refused) __trap();  // a number was none that there may be: so does eager's own kernel")
        head = f'extern "C" __global__ void {self.attributes()}'
        return [head, *self._signature(self.name, *more), *indent(body), "}"]

    def attributes(self) -> str:
        """Those of the entry."""
        return "__launch_bounds__(THREADS)"

    def _written(self) -> tuple[str, ...]:
        return tuple(f"{element}* __restrict__ {name}" for name, element in self.outputs().items())

    def _conditions(self) -> Lines:
        """When the wide variant may run: whole groups in every row, and rows that start where 16 bytes do."""
        assert self.wide is not None
        last = self.last
        tests = [f"n{last} % VALUES<true> == 0"] if self.wide.values > 1 else []
        tests += [f"m{last} % CHUNK<true> == 0"] if self.s.axes[last].window is not None else []
        together = [r for r in self.s.reads if last in r.axes and r.step == 1 and not picks_each(r)]
        records = (r for r in self.s.reads if last in r.axes and is_of_records(r))
        loaded = dict.fromkeys(self.names[r.tensor] for r in (*together, *records) if r.tensor in self.names)
        written = [*self.outputs()] if self.shape.form != "rows" and self.shape.parts is None else []
        cuts = [(r, w) for r in together for w in r.within if r.dims[w.dim] in self.s.axes[last].dims]
        width = "CHUNK" if self.s.axes[last].window is not None else "VALUES"
        for r, w in cuts:
            n = f"m{last}" if r.place == "before" and self.s.axes[last].window is not None else f"n{last}"
            ends = shifted(w, n, len(self.s.axes[last].dims) == 1)
            tests += [f"{end} % {width}<true> == 0" for end in ends if end != "0"]
        joints = [n for r in self.s.reads if self.values.along_last(r) for n in joints_of(r)]
        tests += [f"{n} % VALUES<true> == 0" for n in joints if n]
        return [*dict.fromkeys(tests), *(f"aligned({name})" for name in (*loaded, *written))]

    def _join(self) -> Lines:
        """The launch that leaves each result where its first part was."""
        signature = self._signature(f"{self.name}_join", "double* scratch", "int parts")
        return self._later(
            "Joins the parts of every result, in their order", signature, fill(text.JOIN, T=self._between)
        )

    def _finish(self) -> Lines:
        """The launch that writes results."""
        apart, also = self.shape.apart, ", and reduces the results" if len(self.s.folds) == 2 else ""
        about = "Reduces the results" if apart else f"Joins the parts of every result, in their order{also}"
        given = ["const double* __restrict__ scratch", *([] if apart else ["int parts"]), *self._written()]
        return self._later(about, self._signature(f"{self.name}_finish", *given), self.finish_body(), parts=not apart)

    def _later(self, about: str, signature: Lines, body: Lines, *, parts: bool = True) -> Lines:
        """A later launch, which may make wholes of parts."""
        results = " * ".join(f"n{a}" for a in self.results) or "1"
        body = fill(text.OF_PARTS, results=results, body=body) if parts else body
        return fill(text.LATER, about=f"{about}.", signature=signature, data=self._members(), body=body)

    def finish_body(self) -> Lines:
        """What threads do with the wholes of results."""
        result = compute_type(self.s.root.dtype)
        if len(self.s.folds) == 1:
            return fill(text.FINISH_ONE, T=self._between, R=result)
        names = {"T": self._between, "at": self.at("column", fold=1)}
        wholes = fill(text.TAKE_WHOLES, **names)
        take = wholes if self.shape.apart else fill(text.TAKE_PARTS, wholes=wholes, **names)
        return fill(text.FINISH_TWO, R=result, take=take, columns=" * ".join(f"n{a}" for a in self.axes["second"]))


class WriterOfSeveral(Writer):
    """Writes streams of whose reductions several numbers are made: a function `write` does so, which is among the
    `tails`."""

    def write_row(self) -> Lines:
        return [f"write(d, row, fold, {', '.join(self.outputs())});"]

    def write_columns(self) -> Lines:
        return fill(text.WRITE_COLUMNS, names=", ".join(self.outputs()))

    def finish_body(self) -> Lines:
        return fill(text.FINISH_SEVERAL, names=", ".join(self.outputs()))

    def count(self) -> str:
        """The number of elements of a row."""
        first, *others = (f"d.n{a}" for a in self.axes["first"])
        return " * ".join([f"double({first})", *others])
