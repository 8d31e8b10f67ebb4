"""Whether the order in which a graph's results lie in memory follows that of its inputs, in eager PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node


class Follows(IntEnum):
    """What a value's order in memory depends on: nothing, whether its operand is channels-last, any order of it."""

    NOTHING = 0
    CHANNELS = 1
    ANYTHING = 2


def follows_inputs(graph: Graph) -> bool:
    """Whether the same call with inputs in another memory format could give results in another one."""
    found: dict[Node, Follows] = {}
    for node in graph.nodes():
        found[node] = _follows(node, found)
    return any(isinstance(o, Node) and found[o] != Follows.NOTHING for o in graph.outputs)


def _follows(node: Node, known: Mapping[Node, Follows]) -> Follows:
    if sum(length != 1 for length in node.shape) < 2:
        return Follows.NOTHING
    if isinstance(node.op, ops.Input):
        return Follows.ANYTHING
    operands = max((known[a] for a in node.inputs), default=Follows.NOTHING)
    match node.op:
        case ops.Matmul() | ops.Permute(copy=True):
            return Follows.NOTHING
        case ops.Conv():  # in the format of its input or its weight
            return Follows.CHANNELS
        case ops.Reduce(dims=dims) if operands == Follows.CHANNELS:
            positions = range(2, node.arg(0).ndim)
            return Follows.NOTHING if set(positions) <= set(dims) else operands
        case ops.RangeSum(table=table) if operands == Follows.CHANNELS:
            alone = all(length == 1 for length in node.shape[2:])
            return Follows.NOTHING if alone and table else operands
    return operands
