"""CUDA C++ of several reductions in one pass: a stream whose values are several numbers each, and so are its folds."""

from __future__ import annotations

from typing import Any

from fusewright.codegen.cpp import ELEMENT, Scalars, compute_type
from fusewright.codegen.cuda import stream
from fusewright.codegen.cuda.folds import PLANES, fold
from fusewright.codegen.cuda.stream_values import Values, decode, for_each, tree
from fusewright.codegen.stream_values import constant, unknown
from fusewright.codegen.text import Lines, block, indent
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.kernel import Array, Kernel
from fusewright.schedule.several_folds import SeveralFolds


def kernel(s: SeveralFolds, name: str, reference: str = "") -> Kernel:
    """The kernel of several reductions."""
    return (WriterBeside if s.tails else Writer)(s, name).kernel(reference)


class SeveralValues(Values):
    """Writes the values of all reductions at once, and what follows these."""

    def __init__(self, several: SeveralFolds, names: dict[Node, str]) -> None:
        super().__init__(several.within, names)
        self.several = several

    @property
    def compute(self) -> str:
        return "Each"

    def _plain(self) -> Lines:
        loads, given, element = self.loads("before", "VALUES<WIDE>")
        assert self.s.before is not None
        constants = {leaf: constant(leaf) for leaf in self.s.before.leaves if isinstance(leaf.op, ops.Full)}
        scalars = Scalars(given | constants, unknown, cuda=True)
        found = [scalars.value(f.node.arg(0)) for f in self.several.folds]
        return [*loads, *for_each([*element, *scalars.lines, f"value[e] = {{{', '.join(found)}}};"])]

    def reduced(self, fold: int, count: str) -> tuple[Lines, dict[Node, str]]:
        names = {f.node: f"reduced{i}" for i, f in enumerate(self.several.folds)}
        lines = [
            f"const {compute_type(f.node.dtype)} reduced{i} = fold[e].of{i}.result({count});"
            for i, f in enumerate(self.several.folds)
        ]
        return lines, names


class Writer(stream.Writer):
    """Writes the sections: those of the stream, with folds that are made of several."""

    def __init__(self, several: SeveralFolds, name: str) -> None:
        self.several = several
        super().__init__(several.within, name)
        self.values = SeveralValues(several, self.names)

    def at_once(self, most: int) -> int:
        """Fewer values at a time, each of which is several numbers."""
        return max(1, most // 2)

    @property
    def planes(self) -> int:
        return sum(PLANES[f.op.kind] for f in self.several.folds)

    def carried(self) -> Lines:
        lines: Lines = []
        for i, f in enumerate(self.several.folds):
            kinds = compute_type(f.node.arg(0).dtype), compute_type(f.node.dtype)
            lines += [*fold(f.op.kind, f"Fold{i}", *kinds).strip().split("\n"), ""]
        members = [f"{compute_type(f.node.arg(0).dtype)} of{i};" for i, f in enumerate(self.several.folds)]
        lines += ["// What the reductions take of an element.", "struct Each {", *indent(members), "};", ""]
        return [*lines, "// All of them.", "struct First {", *indent(self._together()), "};", ""]

    def _together(self) -> Lines:
        """The members of a fold that is made of several."""
        numbers = range(len(self.several.folds))

        def listed(text: str) -> str:
            return ", ".join(text.format(i=i) for i in numbers)

        def each(text: str) -> Lines:
            return [text.format(i=i, at=at) for i, at in zip(numbers, places, strict=True)]

        places, planes = [], 0
        for f in self.several.folds:
            places.append({0: "", 1: " + stride"}.get(planes, f" + {planes} * stride"))
            planes += PLANES[f.op.kind]
        loaded = ", ".join(each("Fold{i}::load(from{at}, stride)"))
        taken = [f"{compute_type(f.node.arg(0).dtype)} taken{i}[COUNT];" for i, f in enumerate(self.several.folds)]
        taken += for_each(each("taken{i}[e] = value[e].of{i};"), "COUNT")
        return [
            *each("Fold{i} of{i};"),
            f"static __device__ First empty() {{ return {{{listed('Fold{i}::empty()')}}}; }}",
            "template <int COUNT>",
            *block("__device__ void take(const Each (&value)[COUNT])", [*taken, *each("of{i}.take(taken{i});")]),
            *block("__device__ void merge(const First& other)", each("of{i}.merge(other.of{i});")),
            f"__device__ First from(int offset) const {{ return {{{listed('of{i}.from(offset)')}}}; }}",
            *block("__device__ void save(double* to, index_t stride) const", each("of{i}.save(to{at}, stride);")),
            *block("static __device__ First load(const double* from, index_t stride)", [f"return {{{loaded}}};"]),
        ]


class WriterBeside(Writer, stream.WriterOfSeveral):
    """Writes the sections of reductions that have a result each."""

    def outputs(self) -> dict[str, str]:
        return {name: ELEMENT[r.dtype] for name, r in zip(self._names_of_results(), self.several.results, strict=True)}

    def _names_of_results(self) -> list[str]:
        return ["out", *(f"out{i}" for i in range(1, len(self.several.results)))]

    def record(self, **more: Any) -> Kernel:
        shape, named = self.sizes.output(), zip(self._names_of_results(), self.several.results, strict=True)
        _, *also = (Array(name, shape, r.dtype) for name, r in named)
        return super().record(also=tuple(also), **more)

    def tails(self) -> Lines:
        """The function that writes what comes of each reduction."""
        away = [f"d.n{a}" for a in self.axes["first"]]
        kept, count = self.results, " * ".join([f"double({away[0]})", *away[1:]])
        loads, given, element = self.values.loads("first", "1")
        lines = [*(decode("result", kept, "") if any(r.axes for r in self.values.reads("first")) else []), *loads]
        lines += ["constexpr int e = 0;", *element] if element else []
        for i, (tail, name) in enumerate(zip(self.several.tails, self.outputs(), strict=True)):
            reduction = self.several.folds[i].node
            lines += [f"const {compute_type(reduction.dtype)} reduced{i} = fold.of{i}.result({count});"]
            steps, value = tree(tail, reduction, given | {reduction: f"reduced{i}"})
            lines += block("", [*steps, f"{name}[result] = narrow_to<{self.outputs()[name]}>::of({value});"])
        targets = ", ".join(f"{element}* {name}" for name, element in self.outputs().items())
        head = f"__device__ __forceinline__ void write(const Data& d, index_t result, const First& fold, {targets})"
        return ["// The results of all reductions.", *block(head, lines), ""]
