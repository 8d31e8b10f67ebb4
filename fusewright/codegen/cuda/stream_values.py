"""CUDA C++ of the values of a stream: loads, pointwise trees and the window, for a few neighbours along the last axis.

Axis a is run over by coordinate ``i<a>`` of length ``n<a>``; where a window runs along it, ``j<a>`` and ``m<a>`` are
those of the value the window reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from fusewright.codegen.cpp import Scalars, compute_type, literal
from fusewright.codegen.text import Lines, block, indent
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.stream import Place, Read, Stream, Tree

UNROLLED_TAPS = 64


@dataclass(frozen=True)
class Widths:
    """Of the wide variant: values per thread, and elements of the last axis per load."""

    values: int
    chunk: int


def widths(s: Stream) -> Widths | None:
    """16-byte loads; `None` where the last axis gives nothing to load together."""
    last = len(s.axes) - 1
    loaded = [r.tensor.dtype.itemsize for r in s.reads if r.place == "before" and last in r.axes]
    if not loaded:
        return None
    chunk = 16 // max(loaded)
    along = s.axes[last].window
    if along is None or s.window is None:
        return Widths(chunk, chunk)
    op = s.window.op
    stride, reach = op.stride[along], op.dilation[along] * (op.kernel[along] - 1)
    values = next(v for v in (1, 2, 4, 8) if v * stride % chunk == 0)
    if reach + 1 > stride:  # neighbours share elements: more of them share more
        values = chunk
    return Widths(values, chunk) if (values - 1) * stride + reach + 1 <= UNROLLED_TAPS else None


class Values:
    """Writes `values` and the trees behind the reductions; `names` are the tensors' names in `Data`."""

    def __init__(self, s: Stream, names: dict[Node, str]) -> None:
        self.s, self.names = s, names
        self.last = len(s.axes) - 1

    def text(self) -> Lines:
        """The function ``values``."""
        s = self.s
        compute = compute_type(s.value.dtype)
        coordinates = ", ".join(f"index_t i{a}" for a in range(len(s.axes)))
        head = [
            "// Neighbours along the last axis, from these coordinates on.",
            "template <bool WIDE>",
            "__device__ __forceinline__",
            f"void values(const Data& d, {coordinates}, {compute} (&value)[VALUES<WIDE>]) {{",
        ]
        return [*head, *indent(self._pooled() if s.window else self._plain()), "}"]

    def _plain(self) -> Lines:
        loads, given, element = self.loads("before", "VALUES<WIDE>")
        lines, value = self.tree(self.s.before, "before", self.s.entry, given)
        body = [*element, *lines, f"value[e] = {value};"]
        return [*loads, "#pragma unroll", *block("for (int e = 0; e < VALUES<WIDE>; ++e)", body)]

    def _pooled(self) -> Lines:
        s = self.s
        assert s.window is not None
        op, compute = s.window.op, compute_type(s.window.node.dtype)
        start = {"max": f"-{compute}(INFINITY)", "min": f"{compute}(INFINITY)", "avg": f"{compute}(0)"}[op.kind]
        lines = [f"{compute} pooled[VALUES<WIDE>];", "#pragma unroll"]
        lines += ["for (int e = 0; e < VALUES<WIDE>; ++e) pooled[e] = " + start + ";"]
        lines += self._window()
        behind, given, element = self.loads("after", "VALUES<WIDE>")
        divisor = self._divisor()
        name = "pooled[e]"
        if divisor:
            element = [*element, f"const {compute} average = pooled[e] / {divisor[1]};"]
            name = "average"
        tree, value = self.tree(s.after, "after", s.window.node, given | {s.window.node: name})
        body = [*(divisor[0] if divisor else []), *element, *tree, f"value[e] = {value};"]
        return [*lines, *behind, "#pragma unroll", *block("for (int e = 0; e < VALUES<WIDE>; ++e)", body)]

    def _checked(self) -> bool:
        """Whether a window may reach over an end of the value it reads."""
        assert self.s.window is not None
        return self.s.window.op.ceil_mode or any(self.s.window.op.padding)

    def _window(self) -> Lines:
        """The loops over the taps."""
        s, last = self.s, self.last
        assert s.window is not None
        taps = prod(s.window.op.kernel)
        unroll = "#pragma unroll" if taps <= UNROLLED_TAPS else "#pragma unroll 1"
        rows = [(a, axis.window) for a, axis in enumerate(s.axes) if axis.window is not None and a != last]
        lines = self._row()
        for a, k in reversed(rows):
            body = [f"const index_t j{a} = i{a} * STRIDE[{k}] - PADDING[{k}] + u{a} * DILATION[{k}];"]
            body += [f"if (j{a} < 0 || j{a} >= d.m{a}) continue;"] if self._checked() else []
            lines = [unroll, *block(f"for (int u{a} = 0; u{a} < KERNEL[{k}]; ++u{a})", [*body, *lines])]
        return lines

    def _row(self) -> Lines:
        """The taps along the last axis, a chunk of neighbouring elements at a time."""
        s, a = self.s, self.last
        assert s.window is not None
        k = s.axes[a].window
        loads, given, element = self.loads("before", "CHUNK<WIDE>", "c")
        tree, value = self.tree(s.before, "before", s.entry, given)
        compute = compute_type(s.window.node.dtype)
        take = {
            "max": "pooled[e] = element > pooled[e] || element != element ? element : pooled[e];",
            "min": "pooled[e] = element < pooled[e] || element != element ? element : pooled[e];",
            "avg": "pooled[e] += element;",
        }[s.window.op.kind]
        dilated = s.window.op.dilation[-1] > 1
        inside = f"tap >= 0 && tap <= REACH{' && tap % DILATION[' + str(k) + '] == 0' if dilated else ''}"
        taps = [f"const int tap = u + c - (SKEW<WIDE> - PADDING[{k}]) - e * STRIDE[{k}];", f"if ({inside}) {take}"]
        each = [
            *element,
            *tree,
            f"const {compute} element = {value};",
            "#pragma unroll",
            *block("for (int e = 0; e < VALUES<WIDE>; ++e)", taps),
        ]
        body = [f"const index_t j{a} = i{a} * STRIDE[{k}] - SKEW<WIDE> + u;"]
        body += (
            [f"if (j{a} < 0 || j{a} >= d.m{a}) continue;  // a chunk is inside or outside"] if self._checked() else []
        )
        body += [*loads, "#pragma unroll", *block("for (int c = 0; c < CHUNK<WIDE>; ++c)", each)]
        unroll = "#pragma unroll" if s.window.op.kernel[-1] <= UNROLLED_TAPS // 2 else "#pragma unroll 1"
        return [unroll, *block("for (int u = 0; u < SPAN<WIDE>; u += CHUNK<WIDE>)", body)]

    def _divisor(self) -> tuple[Lines, str] | None:
        """Statements and the text of what an average is divided by; `None` for maxima."""
        s = self.s
        assert s.window is not None
        op = s.window.op
        if op.kind != "avg":
            return None
        compute = compute_type(s.window.node.dtype)
        if op.divisor is not None:
            return [], literal(op.divisor, compute)
        if not self._checked() or (op.count_include_pad and not op.ceil_mode):
            return [], literal(prod(op.kernel), compute)
        counts = []
        for a, axis in enumerate(s.axes):
            if axis.window is not None:
                i = f"i{a} + e" if a == self.last else f"i{a}"
                counts.append(f"counted<{axis.window}>({i}, d.m{a})")
        return [f"const {compute} count = {compute}({' * '.join(counts)});"], "count"

    def counted(self) -> Lines:
        """The function that counts what an average is over, along one dimension of the window; often not needed."""
        s = self.s
        if s.window is None or (self._divisor() or ([], ""))[1] != "count":
            return []
        end = "length + PADDING[K]" if s.window.op.count_include_pad else "length"
        begin = "begin" if s.window.op.count_include_pad else "max(begin, index_t(0))"
        return [
            "// How many elements the window at slot `i` averages along its dimension K.",
            "template <int K>",
            *block(
                "__device__ __forceinline__ index_t counted(index_t i, index_t length)",
                [
                    "const index_t begin = i * STRIDE[K] - PADDING[K];",
                    f"return min(begin + KERNEL[K], index_t({end})) - {begin};",
                ],
            ),
            "",
        ]

    def tail(self, fold: int) -> Lines:
        """The function that finishes reduction `fold`: its results from linear index `result` on, and what follows."""
        s = self.s
        reduction, tree = s.folds[fold]
        struct, place = (("First", "first"), ("Second", "second"))[fold]
        kept = [a for a, axis in enumerate(s.axes) if axis.role == "kept" or (fold == 0 and axis.role == "second")]
        away = [f"d.n{a}" for a, axis in enumerate(s.axes) if axis.role == place]
        loads, given, element = self.loads(place, "V")  # type: ignore[arg-type]
        compute = compute_type(reduction.node.dtype)
        lines, value = self.tree(tree, place, reduction.node, given | {reduction.node: "reduced"})  # type: ignore[arg-type]
        out = compute_type((tree.root if tree else reduction.node).dtype)
        needed = any(r.place == place and r.axes for r in s.reads)
        count = " * ".join(["double(" + away[0] + ")", *away[1:]])
        body = [
            *(decode("result", kept, "") if needed else []),
            *loads,
            "#pragma unroll",
            *block(
                "for (int e = 0; e < V; ++e)",
                [f"const {compute} reduced = fold[e].result({count});", *element, *lines, f"value[e] = {value};"],
            ),
        ]
        return [
            f"// The results of the {place} reduction from `result` on, and what follows it.",
            "template <int V>",
            *block(
                f"__device__ __forceinline__ void finish(const Data& d, index_t result, const {struct} (&fold)[V], "
                f"{out} (&value)[V])",
                body,
            ),
        ]

    def loads(self, place: Place, width: str, each: str = "e") -> tuple[Lines, dict[Node, str], Lines]:
        """Loads of the tensors read at `place`, the names of their elements, and the statements that make those."""
        before, given, element = [], {}, []
        last = max((a for a, axis in enumerate(self.s.axes) if self._seen(axis.role, place)), default=-1)
        for read in self.s.reads:
            if read.place != place:
                continue
            name, compute = self.names[read.tensor], compute_type(read.tensor.dtype)
            given[read.tensor] = name
            if last in read.axes:
                before.append(f"const auto {name}s = load<{width}>(d.{name} + {self._offset(read)});")
                element.append(f"const {compute} {name} = widened({name}s.at[{each}]);")
            else:
                before.append(f"const {compute} {name} = widened(d.{name}[{self._offset(read)}]);")
        return before, given, element

    @staticmethod
    def _seen(role: str, place: Place) -> bool:
        hidden = {"before": (), "after": (), "first": ("first",), "second": ("first", "second")}[place]
        return role not in hidden

    def _offset(self, read: Read) -> str:
        """Horner's scheme over the axes along which a tensor varies."""
        text = ""
        for a in read.axes:
            moved = read.place == "before" and self.s.axes[a].window is not None
            i, n = (f"j{a}", f"d.m{a}") if moved else (f"i{a}", f"d.n{a}")
            text = f"({text}) * {n} + {i}" if " " in text else f"{text} * {n} + {i}" if text else i
        return f"({text})" if " " in text else text or "0"

    def tree(self, tree: Tree | None, place: Place, value: Node, given: dict[Node, str]) -> tuple[Lines, str]:
        """The statements of a tree and the name of its root; `value` stands for an absent one."""
        if tree is None:
            return [], given[value]
        constants = {leaf: _constant(leaf) for leaf in tree.leaves if isinstance(leaf.op, ops.Full)}
        scalars = Scalars(given | constants, _unknown)
        root = scalars.value(tree.root)
        return scalars.lines, root


def _constant(leaf: Node) -> str:
    assert isinstance(leaf.op, ops.Full)
    return literal(leaf.op.value, compute_type(leaf.dtype))


def _unknown(leaf: Node) -> str:
    raise AssertionError(f"{leaf!r} is no leaf of the tree")


def decode(index: str, axes: Sequence[int], scale: str) -> Lines:
    """Coordinates of `axes` from a linear index; with `scale`, the last axis counts in steps of that many."""
    if not axes:
        return []
    if len(axes) == 1:
        return [f"const index_t i{axes[0]} = {index}{scale};"]
    lines = [f"count_t rest = {index};"]
    for a in reversed(axes[1:]):
        length = f"count_t(d.n{a} / {scale.removeprefix(' * ')})" if scale and a == axes[-1] else f"count_t(d.n{a})"
        lines.append(f"const index_t i{a} = rest % {length}{scale if a == axes[-1] else ''};")
        lines.append(f"rest /= {length};")
    return [*lines, f"const index_t i{axes[0]} = rest;"]
