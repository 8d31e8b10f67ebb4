"""What writers of sample programs say on every target: step after step, what each reads, and the kernel's record."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.sample_values import Reader, contiguous, ints, remap
from fusewright.codegen.text import Lines, indent
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.ops import Size
from fusewright.kernel import Array, Kernel, Launch
from fusewright.schedule.sample import SampleProgram, numel


@dataclass(frozen=True)
class Rows:
    """The rows of a value that a step goes through one by one.

    count    how many there are
    length   elements of each
    index    where element ``r`` of ``row`` lies
    in_line  whether a row's elements lie next to each other
    """

    count: int
    length: int
    index: str
    in_line: bool = True


@dataclass
class Steps(ABC):
    """Writes the statements of a program; a target says how its threads compute a step.

    sample  which sample they compute
    out     the output, of all samples
    """

    index_type: ClassVar[str]  # counts elements of a sample
    after_step: ClassVar[Sequence[str]] = ()  # makes a step's values visible to those that read them

    p: SampleProgram
    reader: Reader
    sample: str
    out: str

    def lines(self) -> Lines:
        """The statements."""
        p = self.p
        places = p.arena[0]
        lines = self._pointers()
        for i, step in enumerate(p.steps):
            if step is p.result:
                return [*lines, f"// {self._about(step)}", *self._step(step, self.result)]
            kind, to = compute_type(step.dtype), f"s{i}"
            lines.append(f"{kind}* const {to} = reinterpret_cast<{kind}*>({self._place(places[step])});")
            lines += [f"// {self._about(step)}", *self._step(step, to), *self.after_step]
            self.reader.hold(step, to)
        raise AssertionError("a program ends with its result")

    @property
    def result(self) -> str:
        """The row of the output that this sample is written to."""
        return f"{self.out}_row"

    @abstractmethod
    def _place(self, units: int) -> str:
        """The address of a kept value, so many doubles into the arena."""

    def _pointers(self) -> Lines:
        """Pointers to this sample in the leaves, and in the output."""
        p = self.p
        lines = []
        for node, name in self.reader.operands.items():
            if node in p.leaves and p.per_sample(node):
                count = numel(node)
                lines.append(f"const {ELEMENT[node.dtype]}* const {name}_row = {name} + {self.sample} * {count};")
        to = f"{self.out} + {self.sample} * {numel(p.root)}"
        return [*lines, f"{ELEMENT[p.root.dtype]}* const {self.result} = {to};"]

    def _about(self, step: Node) -> str:
        op = step.op
        kind = getattr(op, "kind", None) or getattr(op, "fn", None) or type(op).__name__.lower()
        shapes = [shape_text(a.shape) for a in step.inputs[:1] if step in self.p.inner]
        if isinstance(op, ops.Matmul):
            shapes.append(shape_text(step.arg(1).shape))
        return f"{kind}: {' @ '.join(shapes)}{' -> ' if shapes else ''}{shape_text(step.shape)}"

    # ---- steps: the statements that write the elements of `step` to array `to`

    def _step(self, step: Node, to: str) -> Lines:
        if step not in self.p.inner:
            return self._map(step, to, [], self.reader.at(step, "i"))
        match step.op:
            case ops.Matmul() as op:
                return self._matmul(op, step, to)
            case ops.Reduce() as op:
                return self._reduce(op, step, to)
            case ops.Softmax() as op:
                return self._softmax(op, step, to)
            case ops.Norm() as op:
                return self._norm(op, step, to)
        return self._map(step, to, *self.reader.element(step, "i"))

    @abstractmethod
    def _map(self, step: Node, to: str, lines: Lines, text: str) -> Lines:
        """Every element by itself: `text`, which `lines` prepare, is number ``i``."""

    @abstractmethod
    def _matmul(self, op: ops.Matmul, step: Node, to: str) -> Lines: ...

    @abstractmethod
    def _reduce(self, op: ops.Reduce, step: Node, to: str) -> Lines: ...

    @abstractmethod
    def _softmax(self, op: ops.Softmax, step: Node, to: str) -> Lines: ...

    @abstractmethod
    def _norm(self, op: ops.Norm, step: Node, to: str) -> Lines: ...

    # ---- what steps read

    def _rows_along(self, x: Node, dims: Sequence[int]) -> Rows:
        """The rows along some dimensions."""
        sizes = ints(x.shape[1:])
        strides = contiguous(sizes)
        inside = [d - 1 for d in dims]
        kept = [d for d in range(len(sizes)) if d not in inside]
        row = remap("row", [sizes[d] for d in kept], [strides[d] for d in kept])
        along = remap("r", [sizes[d] for d in inside], [strides[d] for d in inside])
        index = " + ".join(t for t in (row, along) if t != "0") or "0"
        in_line = inside[-1] == len(sizes) - 1
        return Rows(prod(sizes[d] for d in kept), prod(sizes[d] for d in inside), index, in_line)

    def _rows_of_norm(self, op: ops.Norm, x: Node) -> Rows:
        """The rows that are normalised."""
        sizes = ints(x.shape[1:])
        if op.kind in ("layer", "rms"):
            length = prod(sizes[len(sizes) - op.trailing :])
        else:
            length = prod(sizes) // (op.groups if op.kind == "group" else sizes[0])
        count = prod(sizes) // length
        return Rows(count, length, "r" if count == 1 else f"row * {length} + r")

    def _scaled_and_shifted(self, step: Node, rows: Rows, text: str) -> str:
        """`text`, element ``r`` of a row of a norm, times the norm's weight and plus its bias."""
        op, spatial = step.op, prod(ints(step.shape[2:]))
        assert isinstance(op, ops.Norm)
        index = f"row * {rows.length} + r"
        if op.kind in ("layer", "rms"):
            index = "r"
        elif spatial > 1:
            index = f"({index}) / {spatial}"
        for operand, sign in zip(step.args[1:3], ("*", "+"), strict=False):
            if operand is not None:
                text = f"{text} {sign} {self.reader.at(operand, index, sampled=False)}"
        return text

    def _element(self, x: Node, index: str) -> Lines:
        """The lambda ``element(r)``: element `index` of `x`."""
        number = self.index_type
        name = index if index.isidentifier() or x in self.reader.stops else "i"
        lines, text = self.reader.element(x, name)
        if not lines:
            text = self.reader.element(x, index)[1]
            return [f"const auto element = [&]({number} r) {{ return {text}; }};"]
        if name != index:
            lines = [f"const {number} i = {index};", *lines]
        return [f"const auto element = [&]({number} r) {{", *indent(lines), f"    return {text};", "};"]

    def _only_row(self, *statements: Lines) -> Lines:
        """The declaration of ``row`` where there is one row and the statements name it."""
        named = any(re.search(r"\brow\b", line) for lines in statements for line in lines)
        return [f"constexpr {self.index_type} row = 0;"] if named else []


def epsilon(op: ops.Norm, x: Node) -> float:
    """What a norm adds to a variance: by default the epsilon of what PyTorch computes it in."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if op.eps is None else op.eps


def as_type(compute: str, text: str) -> str:
    """A float64 expression in a compute type."""
    return text if compute == "double" else f"{compute}({text})"


def work(step: Node) -> int:
    """Elements that a step reads, or pairs that it multiplies, eight of which count as one."""
    if isinstance(step.op, ops.Matmul):
        k = step.arg(0).shape[-1]
        assert isinstance(k, int)
        return numel(step) * max(1, k // 8)
    return max(numel(step), *(numel(a) for a in step.inputs[:1])) if step.inputs else numel(step)


def shape_text(shape: Sequence[Size]) -> str:
    """A shape in a comment."""
    return f"({', '.join(map(str, shape))})"


# The kernel that computes nothing but a program.


def names(p: SampleProgram) -> dict[Node, str]:
    """What the kernel calls its operands."""
    return {n: f"a{i}" for i, n in enumerate(p.leaves)}


def operands_text(operands: Mapping[Node, str]) -> str:
    """The operands in a comment, with their shapes."""
    return ", ".join(f"{name} {shape_text(n.shape)}" for n, name in operands.items())


def record(p: SampleProgram, source: str, launch: Launch, **more: Any) -> Kernel:
    """The kernel of this text; `more` are fields of `Kernel`."""
    first = next(i for i, n in enumerate(p.leaves) if p.per_sample(n))
    return Kernel(
        name=launch.entry,
        source=source,
        operands=tuple(names(p).values()),
        layouts=("contiguous",) * len(p.leaves),
        sizes=(("batch", first, 0),),
        output=Array("out", ("batch", *(str(d) for d in p.root.shape[1:])), p.root.dtype),
        scratch=(),
        launches=(launch,),
        dtypes=tuple(n.dtype for n in p.leaves),
        shapes=tuple(tuple(str(d) if isinstance(d, int) else "batch" for d in n.shape) for n in p.leaves),
        **more,
    )
