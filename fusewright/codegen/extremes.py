"""Extremes along a dimension and their indices are one call of ATen's, which reads once, where both are wanted.

x.max(1)   ->   max(x, 1), argmax(x, 1): operations of their own, for rules and kernels   ->   torch.max(x, 1)
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make


def with_indices(graph: Graph) -> Graph:
    """`graph` with one operation in place of every two that find an extreme and its index."""
    while (pair := _pair(graph)) is not None:
        values, indices = pair
        assert isinstance(indices.op, ops.Reduce)
        op = ops.Extreme("max" if indices.op.kind == "argmax" else "min", indices.op.dims[0], indices.op.keepdim)
        both = make(op, indices.arg(0), where=values.where)
        items = {node: make(ops.Item(i, node.type), both, where=node.where) for i, node in enumerate(pair)}
        graph, _ = graph.substituted(items)
    return graph


def _pair(graph: Graph) -> tuple[Node, Node] | None:
    """The values and the indices, of which the former have a gradient that goes to the first of several."""
    nodes = graph.nodes()
    known = set(nodes)
    for node in nodes:
        if isinstance(node.op, ops.Reduce) and node.op.gives_index and len(node.op.dims) == 1:
            kind: ops.ReduceKind = "max" if node.op.kind == "argmax" else "min"
            values = make(replace(node.op, kind=kind, first=True), node.arg(0))
            if values in known:
                return values, node
    return None
