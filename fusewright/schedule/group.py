"""A kernel group: a subgraph that one generated kernel computes, and what it computes as a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph, Node, Symbol, make, remade, topological
from fusewright.schedule import chain, contraction, rearrangement
from fusewright.schedule.partial import Split

Written = Literal["eager", "rows", "any"]


@dataclass(frozen=True)
class Group:
    """A subgraph that a family covers: from `operands` to `root`; `record` is the family's own description of it.

    seen     the operands as `record` has them: parameters may be seen with other dimensions of size 1
    also     values on the way that others read as well, which are results beside `root`
    split    where the group is the first step of a reduction, the reduction: `root` is not in the graph then
    shorter  the group from the same anchor that ends in front of a pool, a softmax or a residual, which this one takes
             in, if any
    order    how the result of a convolution has to lie: as eager's, in rows, or in either
    """

    family: str
    record: Any
    root: Node
    operands: tuple[Node, ...]
    also: tuple[Node, ...] = ()
    split: Split | None = None
    shorter: Group | None = None
    order: Written = "eager"
    seen: tuple[Node, ...] = ()

    @property
    def results(self) -> tuple[Node, ...]:
        """All values that are there for others, the last node first."""
        return (self.root, *self.also)

    @property
    def inner(self) -> tuple[Node, ...]:
        """The nodes computed inside, operands before users."""
        return tuple(n for n in topological(self.results, self.operands) if not isinstance(n.op, ops.Number))

    @property
    def name(self) -> str:
        """After its chain in short words, as the model had it: a pool that slid before its convolution follows it."""
        words = [(n, w) for n in self.inner if (w := chain.word(n)) is not None]
        if isinstance(self.record, contraction.Contraction) and self.record.box is not None:
            words = [(n, w) for n, w in words if not isinstance(n.op, ops.RangeSum)]
            at = next(i for i, (n, _) in enumerate(words) if n is self.record.conv)
            words.insert(at + 1, (self.record.conv, "avg"))
        if not words and isinstance(self.record, rearrangement.Rearrangement):
            return chain.chain_name(["rearrange"])
        return chain.chain_name([w for _, w in words])

    @property
    def bodies(self) -> tuple[Node, ...]:
        """Its results over placeholders for the operands: the very same of groups that compute the same."""
        return bodies(self.results, self.operands)

    def fused(self, name: str, *, rows: bool = False) -> Node:
        """The node that stands for the group, where what lies as eager's may be written in `rows`, too."""
        first, *also = self.bodies
        rows = rows or self.order == "rows"
        return make(Fused(name, first, tuple(also), rows), *self.operands, where=self.root.where)

    def placed(self, graph: Graph, node: Node) -> tuple[Graph, dict[Node, Node]]:
        """`graph` with `node` computing what the group does, and what has become of each of its nodes."""
        if self.split is not None:
            return graph.substituted({self.split.root: self.split.whole(node)})
        if not self.also:
            return graph.substituted({self.root: node})
        items = [make(ops.Item(i, n.type), node, where=n.where) for i, n in enumerate(self.results)]
        return graph.substituted(dict(zip(self.results, items, strict=True)))

    def behind(self, node: Node) -> Node:
        """The group's last node, computed from `node` in place of what the shorter one computes."""
        assert self.shorter is not None
        (root,) = Graph((), (self.root,)).substitute(self.shorter.root, node).outputs
        assert isinstance(root, Node)
        return root

    def rest(self) -> Graph:
        """What is left of the group behind the shorter one; what else varies from call to call is an input as well."""
        assert self.shorter is not None
        operands = (self.shorter.root, *(n for n in self.operands if n.varies))
        return as_graph(bodies((self.root,), operands), operands)


def _placeholder(i: int, node: Node) -> Node:
    """What stands for operand `i` in a body."""
    return make(ops.Input(node.shape, node.dtype, node.device, f"operand_{i}", i))


def bodies(results: tuple[Node, ...], operands: tuple[Node, ...]) -> tuple[Node, ...]:
    """A group's results over placeholders instead of its operands."""
    mapping = {node: _placeholder(i, node) for i, node in enumerate(operands)}
    for node in topological(results, operands):
        mapping[node] = remade(node, [None if a is None else mapping[a] for a in node.args])
    return tuple(mapping[result] for result in results)


def as_graph(results: tuple[Node, ...], operands: tuple[Node, ...]) -> Graph:
    """Bodies as a graph of their own; sizes that are symbols are read from the first operand that has them, or whole
    multiples of them, or so many more or fewer."""
    inputs = tuple(_placeholder(i, node) for i, node in enumerate(operands))
    symbols: dict[Any, Symbol] = {}
    for i, node in enumerate(inputs):
        for dim, length in enumerate(node.shape):
            if isinstance(length, int):
                continue
            more, multiple = length.as_coeff_Add()
            times, symbol = multiple.as_coeff_Mul()
            if not (symbol.is_Symbol and times.is_Integer and times > 0 and more.is_Integer):
                continue
            found, known = Symbol(i, dim, 0, None, int(times), int(more)), symbols.get(symbol)
            if known is None or (known.times, known.more != 0) > (found.times, found.more != 0):
                symbols[symbol] = found
    return Graph(inputs, results, symbols=symbols)


def sizes(node: Node, hints: Mapping[Any, int]) -> tuple[int, ...]:
    """A shape with symbols at their hints."""
    return tuple(d if isinstance(d, int) else int(d.subs(hints)) for d in node.shape)


def signature(group: Group) -> str:
    """What a group computes: the same for another batch or image of the same model, whose sizes are left out."""
    kinds = [f"{type(n.op).__name__} {_attributes(n)}" for n in group.inner]
    operands = [f"{n.ndim if n.varies else n.shape} {n.dtype}" for n in group.operands]
    results = f", {len(group.also)} more" if group.also else ""
    return f"{group.family}: {'; '.join(kinds)} of {', '.join(operands)}{results}"


def _attributes(node: Node) -> str:
    if isinstance(node.op, ops.RangeSum):  # its table lists positions
        return ", ".join(f"{dim}: {len(slots)}" for dim, slots in node.op.table if len(slots) <= 16)
    if isinstance(node.op, ops.Reshape | ops.Expand | ops.Slice | ops.Input):
        return ""
    if isinstance(node.op, ops.Full):
        return str(node.dtype)
    if isinstance(node.op, ops.Positions):
        return f"{node.op.start}, {node.op.step}, {node.op.modulo} {node.dtype}"
    return repr(node.op)
