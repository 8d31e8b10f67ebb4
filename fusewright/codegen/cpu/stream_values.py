"""C++ of the values of a stream: pointwise trees and the window, for a run of neighbours along the last axis.

Axis a is run over by coordinate ``i<a>`` of length ``n<a>``; where a window runs along it, ``j<a>`` and ``m<a>`` are
those of the value the window reads.
"""

from __future__ import annotations

from math import prod

import torch

from fusewright.codegen.cpp import ELEMENT, Scalars, compute_type, literal
from fusewright.codegen.cpu.elements import HALVES, read, written
from fusewright.codegen.text import Lines, block
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.stream import Place, Read, Stream, Tree

SIMD = "#pragma omp simd"


class Values:
    """Writes `values` and what follows the reductions; `names` are the tensors' names in `Data`.

    wanted  dtype of the elements that `values` writes
    """

    def __init__(self, s: Stream, names: dict[Node, str], wanted: torch.dtype) -> None:
        self.s, self.names, self.wanted = s, names, wanted
        self.last = len(s.axes) - 1

    def text(self) -> Lines:
        """The function ``values``."""
        s = self.s
        element = ELEMENT[self.wanted] if self.wanted in HALVES else compute_type(self.wanted)
        coordinates = ", ".join(f"index_t i{a}" for a in range(len(s.axes)))
        head = f"inline void values(const Data& d, {coordinates}, index_t count, {element}* __restrict__ value)"
        about = "// `count` neighbours along the last axis, from these coordinates on."
        return [about, *block(head, self._pooled() if s.window else self._plain())]

    def _plain(self) -> Lines:
        before, given = self.loads("before", "e")
        lines, value = tree(self.s.before, self.s.entry, given)
        body = [*lines, f"value[e] = {written(value, self.wanted)};"]
        return [*before, SIMD, *block("for (index_t e = 0; e < count; ++e)", body)]

    # ---- windows

    def _pooled(self) -> Lines:
        s = self.s
        assert s.window is not None
        op, compute = s.window.op, compute_type(s.window.node.dtype)
        behind, given = self.loads("after", "e")
        divided, average = self._average(op, compute)
        lines, value = tree(s.after, s.window.node, given | {s.window.node: average})
        body = [*divided, *lines, f"value[e] = {written(value, self.wanted)};"]
        return [
            f"{compute} pooled[BLOCK];",
            f"for (index_t e = 0; e < count; ++e) pooled[e] = {self._neutral(op, compute)};",
            *self._window(),
            *behind,
            SIMD,
            *block("for (index_t e = 0; e < count; ++e)", body),
        ]

    @staticmethod
    def _neutral(op: ops.Pool, compute: str) -> str:
        """What changes no result of the window."""
        return {"max": f"-{compute}(INFINITY)", "min": f"{compute}(INFINITY)", "avg": f"{compute}(0)"}[op.kind]

    def _checked(self) -> bool:
        """Whether a window may reach over an end of the value it reads."""
        assert self.s.window is not None
        return self.s.window.op.ceil_mode or any(self.s.window.op.padding)

    def _window(self) -> Lines:
        """The loops over the taps of the other dimensions, around a row of the last one."""
        s, last = self.s, self.last
        assert s.window is not None
        lines = self._row()
        others = [(a, axis.window) for a, axis in enumerate(s.axes) if axis.window is not None and a != last]
        for a, k in reversed(others):
            body = [f"const index_t j{a} = i{a} * STRIDE[{k}] - PADDING[{k}] + u{a} * DILATION[{k}];"]
            body += [f"if (j{a} < 0 || j{a} >= d.m{a}) continue;"] if self._checked() else []
            lines = block(f"for (int u{a} = 0; u{a} < KERNEL[{k}]; ++u{a})", [*body, *lines])
        return lines

    def _row(self) -> Lines:
        """One row of what the windows read, and its taps."""
        s, a = self.s, self.last
        assert s.window is not None
        op, k = s.window.op, s.axes[a].window
        loads, given = self.loads("before", "c")
        lines, value = tree(s.before, s.entry, given)
        compute = compute_type(s.window.node.dtype)
        ends = ["const index_t begin = 0, end = length;"]
        outside = []
        if self._checked():
            ends = [f"const index_t begin = std::min(std::max(-j{a}, index_t(0)), length);"]
            ends += [f"const index_t end = std::max(std::min(length, d.m{a} - j{a}), begin);"]
            neutral = self._neutral(op, compute)
            outside = [f"for (index_t c = 0; c < begin; ++c) row[c] = {neutral};"]
            outside += [f"for (index_t c = end; c < length; ++c) row[c] = {neutral};"]
        take = {
            "max": "pooled[e] = element > pooled[e] || element != element ? element : pooled[e];",
            "min": "pooled[e] = element < pooled[e] || element != element ? element : pooled[e];",
            "avg": "pooled[e] += element;",
        }[op.kind]
        taps = [
            SIMD,
            *block(
                "for (index_t e = 0; e < count; ++e)",
                [f"const {compute} element = row[e * STRIDE[{k}] + u{a} * DILATION[{k}]];", take],
            ),
        ]
        return [
            f"{compute} row[SPAN];  // what these windows reach of a row",
            f"const index_t j{a} = i{a} * STRIDE[{k}] - PADDING[{k}], length = (count - 1) * STRIDE[{k}] + REACH + 1;",
            *ends,
            *outside,
            *loads,
            SIMD,
            *block("for (index_t c = begin; c < end; ++c)", [*lines, f"row[c] = {value};"]),
            *block(f"for (int u{a} = 0; u{a} < KERNEL[{k}]; ++u{a})", taps),
        ]

    def _average(self, op: ops.Pool, compute: str) -> tuple[Lines, str]:
        """Statements and the text of the result of a window."""
        if op.kind != "avg":
            return [], "pooled[e]"
        if op.divisor is not None:
            return [f"const {compute} average = pooled[e] / {literal(op.divisor, compute)};"], "average"
        if not self._checked() or (op.count_include_pad and not op.ceil_mode):
            return [f"const {compute} average = pooled[e] / {literal(prod(op.kernel), compute)};"], "average"
        counts = []
        for a, axis in enumerate(self.s.axes):
            if axis.window is not None:
                i = f"i{a} + e" if a == self.last else f"i{a}"
                counts.append(f"counted<{axis.window}>({i}, d.m{a})")
        return [f"const {compute} average = pooled[e] / {compute}({' * '.join(counts)});"], "average"

    def counted(self) -> Lines:
        """The function that counts what an average is over, along one dimension of the window; often not needed."""
        s = self.s
        if s.window is None or not any("counted<" in line for line in self._average(s.window.op, "float")[0]):
            return []
        end = "length + PADDING[K]" if s.window.op.count_include_pad else "length"
        begin = "begin" if s.window.op.count_include_pad else "std::max(begin, index_t(0))"
        return [
            "// How many elements the window at slot `i` averages along its dimension K.",
            "template <int K>",
            *block(
                "inline index_t counted(index_t i, index_t length)",
                [
                    "const index_t begin = i * STRIDE[K] - PADDING[K];",
                    f"return std::min(begin + KERNEL[K], index_t({end})) - {begin};",
                ],
            ),
            "",
        ]

    # ---- operands

    def loads(self, place: Place, index: str) -> tuple[Lines, dict[Node, str]]:
        """Pointers to rows of the tensors read at `place`, or their one value, and the text of their elements."""
        lines, given = [], {}
        last = max((a for a, axis in enumerate(self.s.axes) if self._seen(axis.role, place)), default=-1)
        for r in self.s.reads:
            if r.place != place:
                continue
            name, dtype = self.names[r.tensor], r.tensor.dtype
            if last in r.axes:
                element = ELEMENT[dtype]
                lines.append(f"const {element}* __restrict__ const {name} = d.{name} + {self._offset(r)};")
                given[r.tensor] = read(f"{name}[{index}]", dtype)
            else:
                one = read(f"d.{name}[{self._offset(r)}]", dtype)
                lines.append(f"const {compute_type(dtype)} {name} = {one};")
                given[r.tensor] = name
        return lines, given

    def scalars(self, place: Place) -> tuple[Lines, dict[Node, str]]:
        """The elements of the tensors read at `place`, at one result."""
        lines, given = [], {}
        for r in self.s.reads:
            if r.place == place:
                name, dtype = self.names[r.tensor], r.tensor.dtype
                given[r.tensor] = name
                lines.append(f"const {compute_type(dtype)} {name} = {read(f'd.{name}[{self._offset(r)}]', dtype)};")
        return lines, given

    @staticmethod
    def _seen(role: str, place: Place) -> bool:
        hidden = {"before": (), "after": (), "first": ("first",), "second": ("first", "second")}[place]
        return role not in hidden

    def _offset(self, r: Read) -> str:
        """Horner's scheme over the axes along which a tensor varies."""
        text = ""
        for a in r.axes:
            moved = r.place == "before" and self.s.axes[a].window is not None
            i, n = (f"j{a}", f"d.m{a}") if moved else (f"i{a}", f"d.n{a}")
            text = f"({text}) * {n} + {i}" if " " in text else f"{text} * {n} + {i}" if text else i
        return f"({text})" if " " in text else text or "0"


def tree(found: Tree | None, value: Node, given: dict[Node, str]) -> tuple[Lines, str]:
    """The statements of a tree and the name of its root; `value` stands for an absent one."""
    if found is None:
        return [], given[value]
    names, lines = {}, []
    for i, leaf in enumerate(found.leaves):
        text = _constant(leaf) if isinstance(leaf.op, ops.Full) else given[leaf]
        if not (text.isidentifier() or isinstance(leaf.op, ops.Full)):
            lines.append(f"const {compute_type(leaf.dtype)} e{i} = {text};")
            text = f"e{i}"
        names[leaf] = text
    scalars = Scalars(names, _unknown)
    root = scalars.value(found.root)
    return [*lines, *scalars.lines], root


def _unknown(leaf: Node) -> str:
    raise AssertionError(f"{leaf!r} is no leaf of the tree")


def _constant(leaf: Node) -> str:
    assert isinstance(leaf.op, ops.Full)
    return literal(leaf.op.value, compute_type(leaf.dtype))
