"""C++ of streams on a CPU: one pass over values in memory, a run of neighbours along the last axis at a time.

flat     no reduction: runs are written as they are computed
planes   windows along short rows: many planes at a time (`stream_planes`)
rows     the last axes are reduced: a fold takes run after run
columns  axes before the last are reduced: folds of neighbours take an element of every run each

Where there are too few results to keep all threads busy, and under a second reduction, results are reduced in parts,
whose number depends on sizes alone, and a second loop joins the parts in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cpu.elements import HALVES, written
from fusewright.codegen.cpu.folds import PLANES, fold
from fusewright.codegen.cpu.stream_planes import BLOCK, Planes, lane_axis
from fusewright.codegen.cpu.stream_values import Values, tree
from fusewright.codegen.cpu.text import function, parallel, source
from fusewright.codegen.stream_sections import StreamSections
from fusewright.codegen.text import Lines, block, fill
from fusewright.kernel import Argument, Expression, Kernel, Launch
from fusewright.schedule.stream_record import Place, Role, Stream, picks_each

# Neighbours that are computed together: their buffers stay in the first cache.
RUN = 512
RUN_OF_FOLDS = 1024
MOST_SPAN = 16384  # elements of a row that the windows of one run may reach
# Items that keep all threads busy, and elements that are worth a part of their own.
ENOUGH = 64
WORTH_A_PART = 16384

ROW_OF = """
// The row that an index means, of so many; where it is none, `d.outside` says so and the first is read.
inline index_t row_of(const Data& d, index_t index, index_t rows) {
    if (index >= 0 && index < rows) return index;
#pragma omp atomic write
    d.outside = 1;
    return 0;
}
"""


def kernel(s: Stream, name: str, reference: str = "") -> Kernel:
    """The kernel of a stream; sizes that the graph knows only choose between its forms."""
    return _Writer(s, name).kernel(reference)


def fits(s: Stream) -> bool:
    """Whether there is a kernel, the buffers of which fit a thread's stack.

    An index is not found where planes lie side by side, nor of halves, which eager rounds, and numbers beside them.
    Neighbours are not read at an index each.
    """
    if any(picks_each(r) and len(s.axes) - 1 in r.along for r in s.reads):
        return False
    if any(fold.op.gives_index for fold, _ in s.folds) and (lane_axis(s) is not None or s.value.dtype in HALVES):
        return False
    return lane_axis(s) is not None or span(s, run(s)) <= MOST_SPAN


def run(s: Stream) -> int:
    """Neighbours along the last axis that are computed together: fewer where their windows lie far apart."""
    last = s.axes[-1]
    if s.window is not None and last.window is not None:
        return max(1, min(RUN, MOST_SPAN // 2 // s.window.op.stride[-1]))
    return RUN_OF_FOLDS if s.folds and last.role != "first" else RUN


def span(s: Stream, run: int) -> int:
    """Elements of a row that a run reads."""
    if s.window is None:
        return run
    op = s.window.op
    return (run - 1) * op.stride[-1] + op.dilation[-1] * (op.kernel[-1] - 1) + 1


class _Writer(StreamSections):
    """Writes the sections of one stream."""

    def __init__(self, s: Stream, name: str) -> None:
        super().__init__(s, name)
        wide = torch.float64 if s.value.dtype == torch.float64 else torch.float32
        wanted, lane = wide if s.folds else s.root.dtype, lane_axis(s)
        self.planes = None if lane is None else Planes(s, self.names, wanted, lane)
        self.values = self.planes or Values(s, self.names, wanted)
        self.run = BLOCK if self.planes else run(s)
        self.by_columns = bool(s.folds) and self.last not in self.axes["first"]
        self.parted = bool(s.folds) and self.planes is None and (len(s.folds) == 2 or self._few())

    def _few(self) -> bool:
        """Whether there are too few results for each to be one thread's."""
        items = self.sizes.count(self.results) // (self.run if self.by_columns else 1)
        return items < ENOUGH // 4 and self.sizes.reduced(self.axes["first"]) >= 2 * WORTH_A_PART // self._neighbours()

    def _neighbours(self) -> int:
        """Results that are reduced together."""
        return min(self.run, self.sizes.count([self.last])) if self.by_columns else 1

    def _parts(self) -> Expression:
        """The number of parts of every result."""
        results, reduced = self.sizes.product(self.results), self.sizes.product(self.axes["first"])
        items = f"ceil_div({results}, {self.run})" if self.by_columns else results
        most = f"ceil_div({reduced}, {max(1, WORTH_A_PART // self._neighbours())})"
        return f"max(1, min({most}, {ENOUGH} // max(1, {items})))"

    # ---- the record

    def kernel(self, reference: str) -> Kernel:
        s, parts = self.s, self._parts() if self.parted else None
        taps = prod(s.window.op.kernel) if s.window else 1
        work = Argument("threads", f"{self.sizes.product(self.all)} * {taps}")
        pointers = [Argument("pointer", p) for p in (*self.names.values(), *self._scratch_names(), "out")]
        numbers = [Argument("long", n) for n in (*self.lengths(), *([parts] if parts else []))]
        return self.record(
            source=self.source(),
            scratch=self.scratch(PLANES[s.folds[0][0].op.kind], parts) if parts else (),
            launches=(Launch(self.name, (*pointers, *numbers, work)),),
            reference=reference,
            notes=("Reduced in parts, which are joined in their order.",) if parts else (),
            target="cpu",
        )

    def _scratch_names(self) -> list[str]:
        return ["scratch"] if self.parted else []

    # ---- the text

    def source(self) -> str:
        s = self.s
        lines = [*self._constants(), *self.data(), ""]
        compute = compute_type(s.value.dtype)
        for i, (reduction, tail) in enumerate(s.folds):
            result = compute_type(reduction.node.dtype)
            blocks = (self.by_columns or self.planes is not None) and i == 0
            lines += fold(reduction.op, ("First", "Second")[i], compute, result, blocks=blocks).split("\n")
            compute = compute_type((tail.root if tail else reduction.node).dtype)
        row_of = [*fill(ROW_OF), ""] if s.looks_up else []
        values = [*row_of, *self.values.counted(), *self.values.text(), ""]
        finish = [line for i in range(len(s.folds)) for line in [*self._finish(i), ""]]
        lines += [*finish, *values] if self.planes else [*values, *finish]
        if s.folds and self.planes is None:
            lines += [*self._reduced(), ""]
        if self.planes is not None:
            body = self.planes.loops()
        else:
            body = self._flat() if not s.folds else self._parted() if self.parted else self._direct()
        names = ", ".join([*self.names.values(), *self.numbers()])
        status = ["return d.outside;"] if s.looks_up else []
        lines += function(self._head(), [f"const Data d{{{names}}};", *body, *status])
        return source(self.about(), self.name, lines)

    def _constants(self) -> Lines:
        what = "neighbours along the last axis" if self.planes is None else "planes"
        lines = [f"constexpr index_t BLOCK = {self.run};  // {what} that are computed together"]
        window = self.window_constants("constexpr index_t", "constexpr index_t")
        if self.planes is not None:
            return [*lines, *window[:-1], ""]
        if self.s.window is None:
            return [*lines, ""]
        reach = f"constexpr index_t SPAN = {span(self.s, self.run)};  // that a block of windows reaches"
        return [*lines, *window, reach, ""]

    def _head(self) -> tuple[str, list[str]]:
        """The entry point's name and parameters."""
        pointers = [f"const {ELEMENT[t.dtype]}* {name}" for t, name in self.names.items()]
        pointers += [f"double* {n}" for n in self._scratch_names()] + [f"{ELEMENT[self.s.root.dtype]}* out"]
        numbers = [f"index_t {n}" for n in (*self.numbers(), *(["parts"] if self.parted else []))]
        return f'extern "C" {"int" if self.s.looks_up else "void"} {self.name}', [*pointers, *numbers, "int threads"]

    def _finish(self, i: int) -> Lines:
        """The function that finishes a reduction: its result, and what follows it."""
        s = self.s
        reduction, after = s.folds[i]
        place: Place = "second" if i else "first"
        axes = self.results if i == 0 else self.axes["kept"]
        result = (after.root if after else reduction.node).dtype
        last = i == len(s.folds) - 1
        loads, given = self.values.loads(place)
        lines, value = tree(after, reduction.node, given | {reduction.node: "reduced"})
        away = [f"d.n{a}" for a, axis in enumerate(s.axes) if axis.role == place]
        count = " * ".join([f"double({away[0]})", *away[1:]])
        compute = compute_type(reduction.node.dtype)
        body = [*loads, f"const {compute} reduced = fold.result({count});", *lines]
        body.append(f"return {written(value, result) if last else value};")
        coordinates = "".join(f", index_t i{a}" for a in axes) if loads else "".join(", index_t" for a in axes)
        element = ELEMENT[result] if last else compute_type(result)
        head = f"inline {element} finish_{place}(const Data& d{coordinates}, const {place.title()}& fold)"
        return [f"// What comes of the {place} reduction.", *block(head, body)]

    # ---- loops

    def _coordinates(self, axes: Sequence[int], last: str = "") -> str:
        """Arguments ``i<a>``, the last axis with something added."""
        return "".join(f", i{a}{last if a == self.last else ''}" for a in axes)

    def _place(self, axes: Sequence[int]) -> str:
        """The linear index of coordinates of these axes."""
        text = ""
        for a in axes:
            text = f"({text}) * n{a} + i{a}" if " " in text else f"{text} * n{a} + i{a}" if text else f"i{a}"
        return text or "0"

    def _loops(self, axes: Sequence[int], body: Lines, more: str = "") -> Lines:
        """Parallel loops over `axes`, the last of which goes in blocks, and then `more`."""
        heads = [self._loop(a, blocks=a == self.last) for a in axes] + ([more] if more else [])
        if not heads:
            return block("", body)
        for head in reversed(heads):
            body = block(head, body)
        return [*parallel(len(heads)), *body]

    @staticmethod
    def _loop(a: int, blocks: bool = False) -> str:
        return f"for (index_t i{a} = 0; i{a} < n{a}; {f'i{a} += BLOCK' if blocks else f'++i{a}'})"

    def _count(self) -> str:
        return f"const index_t count = std::min(BLOCK, n{self.last} - i{self.last});"

    def _flat(self) -> Lines:
        call = f"values(d{self._coordinates(self.all)}, count, out + {_bracketed(self._place(self.all))});"
        return self._loops(self.all, [self._count(), call])

    def _reduced(self) -> Lines:
        """The function that reduces runs number `begin` to `end` of a result, or of a block of results."""
        first, s = self.axes["first"], self.s
        compute = compute_type(s.value.dtype)
        coordinates = "".join(f", index_t i{a}" for a in self.results)
        decode, rest = [], "run"
        for a in reversed(first):
            blocks = a == self.last
            length = f"((d.n{a} + BLOCK - 1) / BLOCK)" if blocks else f"d.n{a}"
            index = rest if a == first[0] else f"{rest} % {length}"
            decode.append(f"const index_t i{a} = {index}{' * BLOCK' if blocks else ''};")
            rest = f"{rest} / {length}"
        if self.by_columns:
            numbers = "index_t count, index_t begin, index_t end"
            head = f"inline void reduce(const Data& d{coordinates}, {numbers}, Firsts& folds)"
            about = "// Takes runs `begin` to `end` of a block of neighbouring results."
            if s.folds[0][0].op.kind == "logsumexp":
                return [about, *block(head, self._several_runs(decode, compute))]
            take = f"folds.take(value, count{self._at('first')});"
            body = [*decode, f"values(d{self._coordinates(self.all)}, count, value);", take]
            return [about, *block(head, [f"{compute} value[BLOCK];", *self._runs(body)])]
        body = [*decode, f"const index_t count = std::min(BLOCK, d.n{self.last} - i{self.last});"]
        take = f"fold.take(value, count{self._at('first')});"
        body += [f"values(d{self._coordinates(self.all)}, count, value);", take]
        head = f"inline First reduced(const Data& d{coordinates}, index_t begin, index_t end)"
        lines = ["First fold;", f"{compute} value[BLOCK];", *self._runs(body), "return fold;"]
        return ["// The fold of runs `begin` to `end` of a result.", *block(head, lines)]

    def _several_runs(self, decode: Lines, compute: str) -> Lines:
        """The loop over runs which are folded several at a time, so that a new maximum costs them one exponential."""
        runs = [*decode, f"values(d{self._coordinates(self.all)}, count, value + (run - first) * BLOCK);"]
        body = [
            "const index_t last = std::min(first + TOGETHER, end);",
            *block("for (index_t run = first; run < last; ++run)", runs),
            "folds.take(value, count, last - first, BLOCK);",
        ]
        return [
            "constexpr index_t TOGETHER = 4;  // runs",
            f"{compute} value[TOGETHER * BLOCK];",
            *block("for (index_t first = begin; first < end; first += TOGETHER)", body),
        ]

    def _at(self, role: Role, **called: str) -> str:
        """What a fold is told beside a run: where it begins along what is reduced, if it gives an index."""
        reduction, _ = self.s.folds[role == "second"]
        if not reduction.op.gives_index:
            return ""
        place, length = "", "d.n" if role == "first" else "n"
        for a in self.axes[role]:
            index = called.get(f"i{a}", f"i{a}")
            place = f"({place}) * {length}{a} + {index}" if place else index
        return f", {place}"

    @staticmethod
    def _runs(body: Lines) -> Lines:
        return block("for (index_t run = begin; run < end; ++run)", body)

    def _number_of_runs(self) -> str:
        first = self.axes["first"]
        lengths = [f"((n{a} + BLOCK - 1) / BLOCK)" if a == self.last else f"n{a}" for a in first]
        return f"const index_t runs = {' * '.join(lengths)};"

    def _direct(self) -> Lines:
        """Every result by itself, or every block of neighbours."""
        axes, place = self.results, self._place(self.results)
        if not self.by_columns:
            finish = f"finish_first(d{self._coordinates(axes)}, reduced(d{self._coordinates(axes)}, 0, runs))"
            return [self._number_of_runs(), *self._loops(axes, [f"out[{place}] = {finish};"])]
        body = [self._count(), "Firsts folds(count);"]
        body += [f"reduce(d{self._coordinates(axes)}, count, 0, runs, folds);"]
        body += [f"{ELEMENT[self.s.root.dtype]}* const to = out + {_bracketed(place)};"]
        finish = f"finish_first(d{self._coordinates(axes, ' + e')}, folds.of(e))"
        body += [f"for (index_t e = 0; e < count; ++e) to[e] = {finish};"]
        return [self._number_of_runs(), *self._loops(axes, body)]

    def _parted(self) -> Lines:
        """Parts of every result, then their joins."""
        axes, place = self.results, self._place(self.results)
        results = " * ".join(f"n{a}" for a in axes) or "1"
        share = "const index_t begin = std::min(part * share, runs), end = std::min(begin + share, runs);"
        part = "for (index_t part = 0; part < parts; ++part)"
        if self.by_columns:
            body = [share, self._count(), "Firsts folds(count);"]
            body += [f"reduce(d{self._coordinates(axes)}, count, begin, end, folds);"]
            body += [f"double* const to = scratch + part * results + {_bracketed(place)};"]
            body += ["for (index_t e = 0; e < count; ++e) folds.of(e).save(to + e, parts * results);"]
        else:
            call = f"reduced(d{self._coordinates(axes)}, begin, end)"
            body = [share, f"{call}.save(scratch + part * results + {_bracketed(place)}, parts * results);"]
        joined = [
            "// The parts of a result, in their order.",
            "const auto joined = [=](index_t result) {",
            "    First fold;",
            f"    {part}",
            "        fold.merge(First::load(scratch + part * results + result, parts * results));",
            "    return fold;",
            "};",
        ]
        lines = [self._number_of_runs(), f"const index_t results = {results}, share = (runs + parts - 1) / parts;"]
        lines += self._loops(axes, body, part)
        return [*lines, *joined, *self._joins()]

    def _joins(self) -> Lines:
        """The loop that joins parts, and carries out a second reduction."""
        kept, second, s = self.axes["kept"], self.axes["second"], self.s
        first = f"finish_first(d{self._coordinates(self.results)}, joined({self._place(self.results)}))"
        if not second:
            return self._each(kept, [f"out[{self._place(kept)}] = {first};"])
        after = s.folds[0][1]
        compute = compute_type((after.root if after else s.folds[0][0].node).dtype)
        a = second[-1]
        inner = [
            f"const index_t count = std::min(BLOCK, n{a} - start);",
            *block("for (index_t e = 0; e < count; ++e)", [f"const index_t i{a} = start + e;", f"value[e] = {first};"]),
            f"fold.take(value, count{self._at('second', **{f'i{a}': 'start'})});",
        ]
        lines = block(f"for (index_t start = 0; start < n{a}; start += BLOCK)", inner)
        for b in reversed(second[:-1]):
            lines = block(self._loop(b), lines)
        finish = f"finish_second(d{self._coordinates(kept)}, fold)"
        body = ["Second fold;", f"{compute} value[BLOCK];", *lines, f"out[{self._place(kept)}] = {finish};"]
        return self._each(kept, body)

    def _each(self, axes: Sequence[int], body: Lines) -> Lines:
        """Parallel loops over every element of these axes."""
        if not axes:
            return block("", body)
        for a in reversed(axes):
            body = block(self._loop(a), body)
        return [*parallel(len(axes)), *body]


def _bracketed(text: str) -> str:
    return f"({text})" if " " in text else text
