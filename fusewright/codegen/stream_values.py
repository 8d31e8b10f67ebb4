"""What the C++ of a stream's values says on every target: where elements lie, and what a window does with them.

Axis a is run over by coordinate ``i<a>`` of length ``n<a>``; where a window runs along it, ``j<a>`` and ``m<a>`` are
those of the value the window reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

from fusewright.codegen.cpp import ELEMENT, compute_type, literal
from fusewright.codegen.text import Lines, block
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.chain import Window
from fusewright.schedule.stream_record import Part, Place, Read, Stream, Within, is_inside


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
        """The name of an element: its tensor's, or that of an entry of an embedding, a concatenation or a view."""
        plain = r.indices is None and r.part is None and r.value is r.tensor
        return self.names[r.tensor] if plain else f"entry{self.s.reads.index(r)}"

    def start(self, r: Read) -> str:
        """Text of the pointer from which offsets count."""
        return self.pointer(r) if r.part is None else f"part{self.s.reads.index(r)}"

    def row_of(self, r: Read) -> str:
        """The name of the row of a weight that is read."""
        return f"row{self.s.reads.index(r)}"

    def found(self, r: Read, element: str = "") -> Lines:
        """The statements that find this row, or the part that is read; none for any other tensor.  Where each of
        several neighbours is read at its own index, of an `element` (`` + e``)."""
        if r.part is not None:
            return self._found_part(r)
        if r.indices is None:
            return []
        index, rows = self._found_index(r.indices, element), self._rows(r)
        if is_inside(r):
            return [f"const index_t {self.row_of(r)} = {index};"]
        if r.ignored in (None, ops.NEVER) and not r.wraps:
            return [f"const index_t {self.row_of(r)} = row_of(d, {index}, {rows});"]
        given = self._index(r)
        row = f"{given} < 0 ? {given} + {rows} : {given}" if r.wraps else f"{given} == {r.ignored} ? 0 : {given}"
        return [f"const long long {given} = {index};", f"const index_t {self.row_of(r)} = row_of(d, {row}, {rows});"]

    def _found_index(self, indices: Read, element: str) -> str:
        """Text of an index, which is in memory or computed."""
        offset = f"{self.offset(indices)}{element}"
        op = indices.tensor.op
        if indices.computed and isinstance(op, ops.Positions):
            return position(op, offset)
        return f"d.{self.names[indices.tensor]}[{offset}]"

    def _rows(self, r: Read) -> str:
        """Text of how many indices there may be."""
        return f"d.v{self.s.tensors.index(r.tensor)}"

    def _index(self, r: Read) -> str:
        """The name of an index as it was given: some are ignored, or count from the end."""
        return f"index{self.s.reads.index(r)}"

    def picked(self, r: Read, element: str) -> str:
        """Text of the value of an element that `found` has found."""
        if r.ignored is None:
            return self.sign(r) + element
        sign = "" if r.negated else "-"
        if r.ignored == ops.NEVER:
            return sign + element
        return f"{self._index(r)} == {r.ignored} ? {compute_type(r.tensor.dtype)}(0) : {sign}{element}"

    def _found_part(self, r: Read) -> Lines:
        """Where the part begins in memory and along its axis, and how long it is there."""
        assert r.part is not None
        k, axis = self.s.reads.index(r), self._axis_of(r.part)

        def chosen(parts: Sequence[Read]) -> Lines:
            if len(parts) == 1:
                (begin, length), (one,) = ends(parts[0]), parts
                sign = f", sign{k} = {-1 if one.part and one.part.negated else 1}" if signed else ""
                return [f"part{k} = {self.pointer(one)}, begin{k} = {begin}, length{k} = {length}{sign};"]
            low, high = parts[: len(parts) // 2], parts[len(parts) // 2 :]
            first = high[0].part
            assert first is not None
            return [*block(f"if (i{axis} < {first.begin})", chosen(low)), *block("else", chosen(high))]

        signed = self.is_signed(r)
        declared = [f"const {ELEMENT[r.tensor.dtype]}* part{k};", f"index_t begin{k}, length{k};"]
        declared += [f"{compute_type(r.tensor.dtype)} sign{k};"] if signed else []
        return [*declared, *chosen(self.parts_of(r))]

    def is_signed(self, r: Read) -> bool:
        """Whether `r` is a part of what has negated parts."""
        return r.part is not None and any(each.part is not None and each.part.negated for each in self.parts_of(r))

    def sign(self, r: Read) -> str:
        """Text ahead of an element that `found` may have found to be of a negated part."""
        return f"sign{self.s.reads.index(r)} * " if self.is_signed(r) else ""

    def parts_of(self, r: Read) -> list[Read]:
        """Those of the concatenation that `r` is a part of."""
        return [read for read in self.s.reads if read.value is r.value and read.place == r.place]

    def _axis_of(self, part: Part) -> int:
        return next(a for a, axis in enumerate(self.s.axes) if axis.dims == (part.dim,))

    def along_last(self, r: Read) -> bool:
        """Whether `r` is a part of what is concatenated along the last axis."""
        return r.part is not None and self._axis_of(r.part) == self.last

    def pointer(self, r: Read) -> str:
        """Text of the pointer to a tensor."""
        return f"d.{self.names[r.tensor]}"

    def offset(self, r: Read, part: tuple[str, str] | None = None) -> str:
        """Where an element of a tensor lies: Horner's scheme over what runs along its dimensions.

        Of a part, where it begins along its axis and how long its tensor is there are numbers that `found` has found,
        or those of `part`.
        """
        text = ""
        for i, n in self._digits(r, part):
            text = f"({text}) * {n} + {i}" if " " in text else f"{text} * {n} + {i}" if text else i if i != "0" else ""
        return f"({text})" if " " in text else text or "0"

    def place_in_record(self, r: Read) -> tuple[int, str]:
        """Which element of what lies between neighbours a tensor is read at, and text of where the first one lies."""
        last = r.dims.index(self.s.value.ndim - 1)
        place = 0
        for w in sorted(r.within, key=lambda w: w.dim):
            place = place * w.length + w.begin if w.dim > last else place
        return place, self.offset(
            replace(r, within=tuple(replace(w, begin=0) if w.dim > last else w for w in r.within))
        )

    def _digits(self, r: Read, part: tuple[str, str] | None) -> Iterator[tuple[str, str]]:
        """Index and length, in elements of the inner ones, of every axis along which a tensor varies, and of every
        dimension of which one index is read; outermost first."""
        within = {w.dim: w for w in r.within}
        for j, d in enumerate(r.dims):
            if r.indices is not None and j == r.at:
                yield self.row_of(r), self._rows(r)
            w = within.get(j)
            if d is None and w is not None:
                yield str(w.begin), str(w.length)
            if d is None:
                continue
            a = next(a for a, axis in enumerate(self.s.axes) if d in axis.dims)
            if d != self.s.axes[a].dims[0] or a not in r.axes:
                continue
            moved = r.place == "before" and self.s.axes[a].window is not None
            i, n = (f"j{a}", f"d.m{a}") if moved else (f"i{a}", f"d.n{a}")
            if r.part is not None and a == self._axis_of(r.part):
                k = self.s.reads.index(r)
                begin, n = part or (f"begin{k}", f"length{k}")
                i = f"(i{a} - {begin})"
            elif w is not None:
                begin, n = shifted(w, n, len(self.s.axes[a].dims) == 1)
                i = f"({i} + {begin})" if w.begin else i
            yield i, n


def ends(r: Read) -> tuple[int, int]:
    """Where the tensor of a part would begin along its axis, and how long it is there."""
    assert r.part is not None
    w = next((w for w in r.within if r.dims[w.dim] == r.part.dim), None)
    return (r.part.begin, r.part.length) if w is None else (r.part.begin - w.begin, w.length)


def joints(r: Read) -> tuple[int, ...]:
    """Where a part meets others and what is beside it in its tensor: neighbours are read together between these."""
    assert r.part is not None
    return (r.part.begin, *ends(r))


def position(op: ops.Positions, at: str) -> str:
    """Text of what is at `at`; as wide as the results where that may be more than an index of an element."""
    plain = (op.start, op.step) == (0, 1)
    found = at if plain else f"{op.start} + (long long){op.step} * ({at})"
    return found if op.modulo is None else f"({found}) % {op.modulo}"


def shifted(w: Within, n: str, alone: bool) -> tuple[str, str]:
    """Text of where a view begins along an axis of `n` indices, whose outermost dimension it cuts, or whose only one
    (`alone`); and of how many there are in all."""
    return (str(w.begin), str(w.length)) if alone else (f"{n} / {w.size} * {w.begin}", f"({n} / {w.size} * {w.length})")


def constant(leaf: Node) -> str:
    """Text of a tensor of one value."""
    assert isinstance(leaf.op, ops.Full)
    return literal(leaf.op.value, compute_type(leaf.dtype))


def unknown(leaf: Node) -> str:
    """For leaves of a tree, all of which have names."""
    raise AssertionError(f"{leaf!r} is no leaf of the tree")
