"""What the C++ of a stream's values says on every target: where elements lie, and what a window does with them.

Axis a is run over by coordinate ``i<a>`` of length ``n<a>``; where a window runs along it, ``j<a>`` and ``m<a>`` are
those of the value the window reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import ClassVar

from fusewright.codegen.cpp import ELEMENT, compute_type, literal
from fusewright.codegen.text import Lines, block
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.chain import Window
from fusewright.schedule.stream import Part, Place, Read, Stream

# How a window takes an element in; a maximum and a minimum keep a NaN.
TAKE = {
    "max": "pooled[e] = element > pooled[e] || element != element ? element : pooled[e];",
    "min": "pooled[e] = element < pooled[e] || element != element ? element : pooled[e];",
    "avg": "pooled[e] += element;",
}


class StreamValues(ABC):
    """Writes the function ``values``; `names` are the tensors' names in `Data`."""

    inline: ClassVar[str]  # what stands before the result of a small function
    std: ClassVar[str]  # and before ``min`` and ``max``

    def __init__(self, s: Stream, names: dict[Node, str]) -> None:
        self.s, self.names = s, names
        self.last = len(s.axes) - 1

    # ---- windows

    @property
    def window(self) -> Window:
        """The window, of a stream that has one."""
        assert self.s.window is not None
        return self.s.window

    def neutral(self) -> str:
        """What changes no result of the window."""
        compute = compute_type(self.window.node.dtype)
        values = {"max": f"-{compute}(INFINITY)", "min": f"{compute}(INFINITY)", "avg": f"{compute}(0)"}
        return values[self.window.op.kind]

    def checked(self) -> bool:
        """Whether a window may reach over an end of the value it reads."""
        return self.window.op.ceil_mode or any(self.window.op.padding)

    @abstractmethod
    def row(self) -> Lines:
        """The taps of the window along the last axis."""

    def taps(self, unroll: Sequence[str] = ()) -> Lines:
        """The loops over the taps of the other axes, each under `unroll`, around the row of the last one."""
        lines = self.row()
        others = [(a, axis.window) for a, axis in enumerate(self.s.axes) if axis.window is not None and a != self.last]
        for a, k in reversed(others):
            body = [f"const index_t j{a} = i{a} * STRIDE[{k}] - PADDING[{k}] + u{a} * DILATION[{k}];"]
            body += [f"if (j{a} < 0 || j{a} >= d.m{a}) continue;"] if self.checked() else []
            lines = [*unroll, *block(f"for (int u{a} = 0; u{a} < KERNEL[{k}]; ++u{a})", [*body, *lines])]
        return lines

    def divisor(self, tall: int | None = None) -> str | None:
        """Text of what an average of element ``e`` is divided by; `None` for maxima and minima.  Elements lie along the
        last axis, or along another, `tall`, which has a coordinate for each."""
        op, compute = self.window.op, compute_type(self.window.node.dtype)
        if op.kind != "avg":
            return None
        if not self.counts():
            return literal(prod(op.kernel) if op.divisor is None else op.divisor, compute)
        counts = []
        for a, axis in enumerate(self.s.axes):
            if axis.window is not None:
                i = f"i{a} + e" if a == self.last and tall is None else f"i{a}"
                counts.append(f"counted<{axis.window}>({i}, d.m{a})")
        return f"{compute}({' * '.join(counts)})"

    def counts(self) -> bool:
        """Whether an average is over another number of elements at a border."""
        op = self.window.op
        whole = not self.checked() or (op.count_include_pad and not op.ceil_mode)
        return op.kind == "avg" and op.divisor is None and not whole

    def counted(self) -> Lines:
        """The function that counts what an average is over, along one dimension of the window; often not needed."""
        if self.s.window is None or not self.counts():
            return []
        padded = self.window.op.count_include_pad
        end = "length + PADDING[K]" if padded else "length"
        begin = "begin" if padded else f"{self.std}max(begin, index_t(0))"
        return [
            "// How many elements the window at slot `i` averages along its dimension K.",
            "template <int K>",
            *block(
                f"{self.inline} index_t counted(index_t i, index_t length)",
                [
                    "const index_t begin = i * STRIDE[K] - PADDING[K];",
                    f"return {self.std}min(begin + KERNEL[K], index_t({end})) - {begin};",
                ],
            ),
            "",
        ]

    # ---- operands

    def reads(self, place: Place) -> list[Read]:
        """What is read at `place`: of a concatenation, the first part."""
        return [r for r in self.s.reads if r.place == place and (r.part is None or r.part.begin == 0)]

    def last_of(self, place: Place) -> int:
        """The last axis of the values at `place`, -1 where none is left."""
        hidden = {"before": (), "after": (), "first": ("first",), "second": ("first", "second")}[place]
        return max((a for a, axis in enumerate(self.s.axes) if axis.role not in hidden), default=-1)

    def element(self, r: Read) -> str:
        """The name of an element: its tensor's, or that of an entry of an embedding or of a concatenation."""
        return self.names[r.tensor] if r.indices is None and r.part is None else f"entry{self.s.reads.index(r)}"

    def start(self, r: Read) -> str:
        """Text of the pointer from which offsets count."""
        return f"d.{self.names[r.tensor]}" if r.part is None else f"part{self.s.reads.index(r)}"

    def row_of(self, r: Read) -> str:
        """The name of the row of a weight that is read."""
        return f"row{self.s.reads.index(r)}"

    def found(self, r: Read) -> Lines:
        """The statements that find this row, or the part that is read; none for any other tensor."""
        if r.part is not None:
            return self._found_part(r)
        if r.indices is None:
            return []
        index = f"d.{self.names[r.indices.tensor]}[{self.offset(r.indices)}]"
        return [f"const index_t {self.row_of(r)} = row_of(d, {index}, d.v{self.s.tensors.index(r.tensor)});"]

    def _found_part(self, r: Read) -> Lines:
        """Where the part begins in memory and along its axis, and how long it is there."""
        assert r.part is not None
        k, axis = self.s.reads.index(r), self._axis_of(r.part)

        def chosen(parts: Sequence[tuple[Part, str]]) -> Lines:
            if len(parts) == 1:
                ((part, name),) = parts
                return [f"part{k} = d.{name}, begin{k} = {part.begin}, length{k} = {part.length};"]
            low, high = parts[: len(parts) // 2], parts[len(parts) // 2 :]
            return [*block(f"if (i{axis} < {high[0][0].begin})", chosen(low)), *block("else", chosen(high))]

        reads = (read for read in self.s.reads if read.value is r.value and read.place == r.place)
        parts = [(read.part, self.names[read.tensor]) for read in reads if read.part is not None]
        return [f"const {ELEMENT[r.tensor.dtype]}* part{k};", f"index_t begin{k}, length{k};", *chosen(parts)]

    def _axis_of(self, part: Part) -> int:
        return next(a for a, axis in enumerate(self.s.axes) if axis.dims == (part.dim,))

    def offset(self, r: Read) -> str:
        """Where an element of a tensor lies: Horner's scheme over the axes along which it varies."""
        text = "" if r.indices is None else self.row_of(r)
        for a in r.axes:
            moved = r.place == "before" and self.s.axes[a].window is not None
            i, n = (f"j{a}", f"d.m{a}") if moved else (f"i{a}", f"d.n{a}")
            if r.part is not None and a == self._axis_of(r.part):
                k = self.s.reads.index(r)
                i, n = f"(i{a} - begin{k})", f"length{k}"
            text = f"({text}) * {n} + {i}" if " " in text else f"{text} * {n} + {i}" if text else i
        return f"({text})" if " " in text else text or "0"


def constant(leaf: Node) -> str:
    """Text of a tensor of one value."""
    assert isinstance(leaf.op, ops.Full)
    return literal(leaf.op.value, compute_type(leaf.dtype))


def unknown(leaf: Node) -> str:
    """For leaves of a tree, all of which have names."""
    raise AssertionError(f"{leaf!r} is no leaf of the tree")
