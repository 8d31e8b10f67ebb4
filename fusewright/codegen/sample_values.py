"""C++ that reads values of a sample program: pointwise trees, views and broadcasting, for one element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from fusewright.codegen.cpp import Scalars, compute_type, literal
from fusewright.codegen.text import Lines
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.ops import Size
from fusewright.schedule.sample import SampleProgram


def remap(index: str, sizes: Sequence[int], strides: Sequence[int], offset: int = 0) -> str:
    """Where the element lies whose row-major number under `sizes` is `index`, in an array with these strides."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    terms: list[str] = []
    inner = prod(size for size, _ in merged)
    for i, (size, stride) in enumerate(merged):
        inner //= size
        if stride:
            text = index if inner == 1 else f"{index} / {inner}"
            text = text if i == 0 else f"{text} % {size}"
            terms.append(text if stride == 1 else f"{text} * {stride}")
    if offset:
        terms.append(str(offset))
    return " + ".join(terms) or "0"


def contiguous(sizes: Sequence[int]) -> list[int]:
    """The strides of a dense array."""
    return [prod(sizes[d + 1 :]) for d in range(len(sizes))]


def ints(shape: Sequence[Size]) -> list[int]:
    """Sizes that are known."""
    return [d for d in shape if isinstance(d, int)]


class _Tree(Scalars):
    """One element of a pointwise tree whose leaves may be pointwise nodes themselves."""

    def __init__(self, reader: Reader, root: Node, index: str) -> None:
        super().__init__({}, lambda node: reader.read(node, root, index))
        self.reader, self.root = reader, root

    def value(self, node: Node) -> str:
        tree = isinstance(node.op, ops.Pointwise | ops.Cast | ops.Detach)
        if node in self.names or (tree and node not in self.reader.stops):
            return super().value(node)
        name = self.names[node] = f"v{len(self.names)}"
        self.lines.append(f"const {compute_type(node.dtype)} {name} = {self.operand(node)};")
        return name


@dataclass
class Reader:
    """Texts of elements.

    arrays    shared arrays that hold values of one sample, in their compute types
    operands  pointers to leaves; ``<name>_row`` is where the sample of one that has samples begins
    """

    p: SampleProgram
    arrays: dict[Node, str]
    operands: Mapping[Node, str]
    stops: set[Node] = field(init=False)

    def __post_init__(self) -> None:
        self.stops = {*self.p.leaves, *self.p.constants, *self.arrays}

    def hold(self, node: Node, name: str) -> None:
        """From here on, `node` lies in shared array `name`."""
        self.arrays[node] = name
        self.stops.add(node)

    def read(self, node: Node, root: Node, index: str) -> str:
        """Text of operand `node` of a tree with the shape of `root`, broadcast, at row-major number `index`."""
        sizes = ints(root.shape[1:])
        own = ints(node.shape[1:] if node.ndim == root.ndim else node.shape)
        own = [1] * (len(sizes) - len(own)) + own
        strides = [0 if size == 1 else stride for size, stride in zip(own, contiguous(own), strict=True)]
        return self.at(node, remap(index, sizes, strides), self.p.sampled(node, root.ndim))

    def at(self, node: Node, index: str, sampled: bool = True) -> str:
        """Text of element `index` of a value, seen through views, in its compute type."""
        while node not in self.stops:
            node, index = self._through(node, index)
        if node in self.arrays:
            return f"{self.arrays[node]}[{index}]"
        if isinstance(node.op, ops.Full):
            return literal(node.op.value, compute_type(node.dtype))
        name = self.operands[node]
        return f"widened({name}_row[{index}])" if sampled else f"widened({name}[{index}])"

    def _through(self, node: Node, index: str) -> tuple[Node, str]:
        """What a view looks at, and where."""
        x, op = node.arg(0), node.op
        sizes, own = ints(node.shape[1:]), ints(x.shape[1:])
        strides = contiguous(own)
        if isinstance(op, ops.Reshape):
            return x, index
        index = index if index.isidentifier() else f"({index})"
        if isinstance(op, ops.Permute):
            return x, remap(index, sizes, [strides[d - 1] for d in op.dims[1:]])
        if isinstance(op, ops.Expand):
            return x, remap(index, sizes, [0 if n == 1 else s for n, s in zip(own, strides, strict=True)])
        assert isinstance(op, ops.Slice), node
        offset = op.start * strides[op.dim - 1]
        strides[op.dim - 1] *= op.step
        return x, remap(index, sizes, strides, offset)

    def element(self, node: Node, index: str) -> tuple[Lines, str]:
        """Statements and text of one element of a value that a step reads."""
        tree = _Tree(self, node, index)
        if isinstance(node.op, ops.Pointwise | ops.Cast | ops.Detach) and node not in self.stops:
            return tree.lines, tree.value(node)
        return [], self.at(node, index)
