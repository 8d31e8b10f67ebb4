"""CUDA C++ of several reductions in one pass: a stream whose values are several numbers each, and so are its folds."""

from __future__ import annotations

from fusewright.codegen.cpp import compute_type
from fusewright.codegen.cuda.folds import PLANES, fold
from fusewright.codegen.cuda.several_values import SeveralValues, WriterOfResults, WriterOfValues
from fusewright.codegen.cuda.stream import WriterOfSeveral
from fusewright.codegen.cuda.stream_values import Values, decode, for_each, tree
from fusewright.codegen.text import Lines, block, indent
from fusewright.ir.node import Node
from fusewright.kernel import Kernel
from fusewright.schedule.several_folds import SeveralFolds
from fusewright.schedule.stream_record import refuses


def kernel(s: SeveralFolds, name: str, reference: str = "") -> Kernel:
    """The kernel of several reductions."""
    return (WriterBeside if s.tails else Writer)(s, name).kernel(reference)


class FoldedValues(SeveralValues):
    """Writes the values of all reductions at once, and what follows these."""

    def __init__(self, several: SeveralFolds, names: dict[Node, str]) -> None:
        super().__init__(several.within, names, [f.node.arg(0) for f in several.folds])
        self.several = several

    @property
    def rounds(self) -> bool:
        return any(f.op.gives_index for f in self.several.folds)

    def reduced(self, fold: int, count: str) -> tuple[Lines, dict[Node, str]]:
        names = {f.node: f"reduced{i}" for i, f in enumerate(self.several.folds)}
        lines = [
            f"const {compute_type(f.node.dtype)} reduced{i} = fold[e].of{i}.result({count});"
            for i, f in enumerate(self.several.folds)
        ]
        return lines, names


class Writer(WriterOfValues):
    """Writes the sections: those of the stream, with folds that are made of several."""

    def __init__(self, several: SeveralFolds, name: str) -> None:
        self.several = several
        super().__init__(several.within, name)
        self.values: FoldedValues = FoldedValues(several, self.names)

    @property
    def refuses(self) -> bool:
        tree = self.several.within.before
        return tree is not None and refuses([f.node.arg(0) for f in self.several.folds], tree.leaves)

    @property
    def planes(self) -> int:
        return sum(PLANES[f.op.kind] for f in self.several.folds)

    def at(self, first: str, *step: str, fold: int = 0) -> str:
        return "".join(f", {n}" for n in (first, *step)) if self.values.rounds else ""

    def carried(self) -> Lines:
        lines: Lines = []
        for i, f in enumerate(self.several.folds):
            kinds = compute_type(f.node.arg(0).dtype), compute_type(f.node.dtype)
            lines += [*fold(f.op, f"Fold{i}", *kinds).strip().split("\n"), ""]
        lines += self.values.struct("What the reductions take of an element.")
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
        at = [", first, step" if f.op.gives_index else "" for f in self.several.folds]
        taken += [f"of{i}.take(taken{i}{told});" for i, told in enumerate(at)]
        where = ", index_t first, index_t step = 1" if any(at) else ""
        return [
            *each("Fold{i} of{i};"),
            f"static __device__ First empty() {{ return {{{listed('Fold{i}::empty()')}}}; }}",
            "template <int COUNT>",
            *block(f"__device__ void take(const Each (&value)[COUNT]{where})", taken),
            *block("__device__ void merge(const First& other)", each("of{i}.merge(other.of{i});")),
            f"__device__ First from(int offset) const {{ return {{{listed('of{i}.from(offset)')}}}; }}",
            *block("__device__ void save(double* to, index_t stride) const", each("of{i}.save(to{at}, stride);")),
            *block("static __device__ First load(const double* from, index_t stride)", [f"return {{{loaded}}};"]),
        ]


class WriterBeside(WriterOfResults, Writer, WriterOfSeveral):
    """Writes the sections of reductions that have a result each."""

    def __init__(self, several: SeveralFolds, name: str) -> None:
        self.results_of_group = several.results
        super().__init__(several, name)

    def tails(self) -> Lines:
        """The function that writes what comes of each reduction."""
        loads, given, element = self.values.loads("first", "1")
        lines = [
            *(decode("result", self.results, "") if any(r.axes for r in self.values.reads("first")) else []),
            *loads,
        ]
        lines += ["constexpr int e = 0;", *element] if element else []
        for i, (tail, (name, element_type)) in enumerate(zip(self.several.tails, self.outputs().items(), strict=True)):
            reduction = self.several.folds[i].node
            lines += [f"const {compute_type(reduction.dtype)} reduced{i} = fold.of{i}.result({self.count()});"]
            steps, value = tree(tail, reduction, given | {reduction: f"reduced{i}"})
            lines += block("", [*steps, f"{name}[result] = narrow_to<{element_type}>::of({value});"])
        head = f"{Values.inline} void write(const Data& d, index_t result, const First& fold, {self.targets()})"
        return ["// The results of all reductions.", *block(head, lines), ""]
