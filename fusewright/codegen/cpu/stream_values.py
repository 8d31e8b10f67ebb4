"""C++ of the values of a stream: pointwise trees and the window, for a run of neighbours along the last axis."""

from __future__ import annotations

from math import prod

import torch

from fusewright.codegen.cpp import ELEMENT, Scalars, compute_type, literal
from fusewright.codegen.cpu.elements import HALVES, read, written
from fusewright.codegen.cpu.loops import LaneScalars, lanes, procedure
from fusewright.codegen.stream_values import StreamValues, constant, ends, unknown
from fusewright.codegen.text import Lines, block
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.stream_record import Place, Read, Stream, Tree

# How a window takes an element in, as compilers make vectors of it; a maximum and a minimum keep a NaN.
TAKE = {
    "max": "pooled[e] = element > pooled[e] || element != element ? element : pooled[e];",
    "min": "pooled[e] = element < pooled[e] || element != element ? element : pooled[e];",
    "avg": "pooled[e] += element;",
}


class Values(StreamValues):
    """Writes `values` and what follows the reductions.

    wanted  dtype of the elements that `values` writes
    """

    inline, std = "inline", "std::"

    def __init__(self, s: Stream, names: dict[Node, str], wanted: torch.dtype) -> None:
        super().__init__(s, names)
        self.wanted = wanted

    def text(self) -> Lines:
        """The function ``values``."""
        element = ELEMENT[self.wanted] if self.wanted in HALVES else compute_type(self.wanted)
        coordinates = [("index_t", f"i{a}") for a in range(len(self.s.axes))]
        parameters = [("const Data&", "d"), *coordinates, ("index_t", "count"), (f"{element}* __restrict__", "value")]
        about = "// `count` neighbours along the last axis, from these coordinates on."
        return procedure(about, "values", parameters, self._pooled() if self.s.window else self._plain())

    def _plain(self) -> Lines:
        before, given = self.loads("before", "e")
        lines, value = tree(self.s.before, self.s.entry, given, LaneScalars)
        return [*before, *self._written(lines, value)]

    def _written(self, lines: Lines, value: str) -> Lines:
        """The loop that writes all neighbours."""
        body = [*lines, f"value[e] = {written(value, self.wanted)};"]
        return lanes("for (index_t e = 0; e < count; ++e)", body)

    # ---- windows

    def _pooled(self) -> Lines:
        pooled, compute = self.window.node, compute_type(self.window.node.dtype)
        behind, given = self.loads("after", "e")
        divided = self.average()
        result = {pooled: "average" if divided else "pooled[e]"}
        lines, value = tree(self.s.after, pooled, given | result, LaneScalars)
        return [
            f"{compute} pooled[BLOCK];",
            f"for (index_t e = 0; e < count; ++e) pooled[e] = {self.neutral()};",
            *self.taps(),
            *behind,
            *self._written([*divided, *lines], value),
        ]

    def average(self) -> Lines:
        """The statement that makes an average of a sum; none for maxima and minima."""
        op, compute, divisor = self.window.op, compute_type(self.window.node.dtype), self.divisor()
        if divisor is None:
            return []
        if self.counts():
            return [f"const {compute} average = pooled[e] / {divisor};"]
        return [f"const {compute} average = pooled[e] * {literal(1 / (op.divisor or prod(op.kernel)), compute)};"]

    def row(self) -> Lines:
        """What the windows read of a row goes through a buffer, tap after tap."""
        a, k = self.last, self.s.axes[self.last].window
        compute = compute_type(self.window.node.dtype)
        loads, given = self.loads("before", "c")
        lines, value = tree(self.s.before, self.s.entry, given, LaneScalars)
        element = f"const {compute} element = row[e * STRIDE[{k}] + u{a} * DILATION[{k}]];"
        taps = lanes("for (index_t e = 0; e < count; ++e)", [element, TAKE[self.window.op.kind]])
        return [
            f"{compute} row[SPAN];  // what these windows reach of a row",
            f"const index_t j{a} = i{a} * STRIDE[{k}] - PADDING[{k}], length = (count - 1) * STRIDE[{k}] + REACH + 1;",
            *self._ends(),
            *loads,
            *lanes("for (index_t c = begin; c < end; ++c)", [*lines, f"row[c] = {value};"]),
            *block(f"for (int u{a} = 0; u{a} < KERNEL[{k}]; ++u{a})", taps),
        ]

    def _ends(self) -> Lines:
        """Which elements of the buffer there are in memory; the others become neutral."""
        if not self.checked():
            return ["const index_t begin = 0, end = length;"]
        a, neutral = self.last, self.neutral()
        return [
            f"const index_t begin = std::min(std::max(-j{a}, index_t(0)), length);",
            f"const index_t end = std::max(std::min(length, d.m{a} - j{a}), begin);",
            f"for (index_t c = 0; c < begin; ++c) row[c] = {neutral};",
            f"for (index_t c = end; c < length; ++c) row[c] = {neutral};",
        ]

    # ---- operands

    def loads(self, place: Place, index: str = "") -> tuple[Lines, dict[Node, str]]:
        """The elements of the tensors read at `place`, at one result; with `index`, those along a run are element
        `index` from a pointer on."""
        lines, given = [], {}
        for r in self.reads(place):
            name, tensor, dtype = self.element(r), self.start(r), r.tensor.dtype
            if index and self.along_last(r):
                more, given[r.value] = self._parts(r, index)
                lines += more
                continue
            lines = [*lines, *self.found(r)]
            if index and self.last_of(place) in r.axes:
                lines.append(f"const {ELEMENT[dtype]}* __restrict__ const {name} = {tensor} + {self.offset(r)};")
                given[r.value] = self.sign(r) + read(f"{name}[{index}{f' * {r.step}' if r.step > 1 else ''}]", dtype)
            else:
                element = self.picked(r, read(f"{tensor}[{self.offset(r)}]", dtype))
                lines.append(f"const {compute_type(dtype)} {name} = {element};")
                given[r.value] = name
        return lines, given

    def _parts(self, r: Read, index: str) -> tuple[Lines, str]:
        """Pointers to all parts of what is concatenated along the last axis, as if each were there from the run's first
        element on, and the text of element `index` of the run."""
        lines, parts = [], self.parts_of(r)
        names = [f"{self.element(r)}_{m}" for m in range(len(parts))]
        for name, each in zip(names, parts, strict=True):
            begin, length = ends(each)
            at = f"{self.pointer(each)} + {self.offset(each, (str(begin), str(length)))}"
            lines.append(f"const {ELEMENT[each.tensor.dtype]}* __restrict__ const {name} = {at};")
        signs = ["-" if each.part is not None and each.part.negated else "" for each in parts]
        texts = [sign + read(f"{name}[{index}]", r.tensor.dtype) for sign, name in zip(signs, names, strict=True)]
        text = texts[-1]
        for here, behind in reversed(list(zip(texts, parts[1:], strict=False))):
            assert behind.part is not None
            text = f"(i{self.last} + {index} < {behind.part.begin} ? {here} : {text})"
        return lines, text


def tree(found: Tree | None, value: Node, given: dict[Node, str], kind: type[Scalars] = Scalars) -> tuple[Lines, str]:
    """The statements of a tree and the name of its root; `value` stands for an absent one."""
    if found is None:
        return [], given[value]
    names, lines = {}, []
    for i, leaf in enumerate(found.leaves):
        text = constant(leaf) if isinstance(leaf.op, ops.Full) else given[leaf]
        if not (text.isidentifier() or isinstance(leaf.op, ops.Full)):
            lines.append(f"const {compute_type(leaf.dtype)} e{i} = {text};")
            text = f"e{i}"
        names[leaf] = text
    scalars = kind(names, unknown)
    root = scalars.value(found.root)
    return [*lines, *scalars.lines], root
