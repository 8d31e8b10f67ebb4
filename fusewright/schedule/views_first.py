"""Functions of what lies in memory that several see under another shape: the view comes first.

    p = reshape(f(x))   ->   p = f(reshape(x))

What several read under a shape of its own begins there: as it is, f(x) is written and read again, while a view of
memory costs nothing and kernels of those who read p compute it on the way (`sigmoid(x).flatten(1)` of a loss by
overlaps, of which there are several sums).

    reshape(log_softmax(x))   ->   log_softmax(reshape(x))

Losses see the classes of (B, S, C) in rows (B * S, C), and are one with a softmax of these.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.ir import ops
from fusewright.ir.build import reshape
from fusewright.ir.memory_order import Order, lie_alike, rows_of
from fusewright.ir.node import Graph, Node, make, remade
from fusewright.schedule.chain import POINTWISE, Users

SOURCES = (ops.Input, ops.Param, ops.Buffer, ops.Constant)


def views_first(graph: Graph, orders: Mapping[Node, Order]) -> Graph:
    """`graph` with such functions behind the views of what they are of, which lies row by row: sources that do not have
    these `orders`."""
    users = graph.users()
    for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        if not isinstance(node.op, ops.Reshape) or users[node] < 2 or isinstance(node.arg(0).op, SOURCES):
            continue
        seen = _seen(node.arg(0), node.shape, users, orders)
        if seen is None:
            continue
        placed = graph.substitute(node, seen)
        if lie_alike(graph, placed, orders):
            graph, users = placed, placed.users()
    return graph


def rows_first(graph: Graph, orders: Mapping[Node, Order]) -> Graph:
    """`graph` with softmaxes of rows that a loss of classes alone sees as a matrix as softmaxes of that matrix."""
    users = graph.users()
    for node in reversed(graph.nodes()):
        rows = node.arg(0) if isinstance(node.op, ops.Nll) else node
        shares = rows.arg(0) if rows is not node and isinstance(rows.op, ops.Reshape) else node
        if not isinstance(shares.op, ops.Softmax) or shares is node or users[shares] > 1:
            continue
        if rows.ndim > 2 or shares.op.dim != shares.ndim - 1 or rows.shape[-1] != shares.shape[-1]:
            continue
        seen = _seen(shares.arg(0), rows.shape, users, orders, (*SOURCES, ops.Matmul))
        if seen is not None:
            placed = graph.substitute(rows, make(ops.Softmax(1, shares.op.log), seen, where=shares.where))
            if lie_alike(graph, placed, orders):
                graph, users = placed, placed.users()
    return graph


def _seen(
    x: Node,
    shape: tuple[ops.Size, ...],
    users: Users,
    orders: Mapping[Node, Order],
    sources: tuple[type[ops.Op], ...] = SOURCES,
) -> Node | None:
    """x under a shape: what it is computed from, `sources`, is seen so; `None` where another reads it, or something of
    another shape is part of it."""
    if isinstance(x.op, sources):
        return reshape(x, shape) if orders.get(x, rows_of(x)) == rows_of(x) else None
    if not isinstance(x.op, POINTWISE) or users[x] > 1:
        return None
    args: list[Node | None] = []
    for a in x.args:
        if a is None or a.ndim == 0:
            args.append(a)
            continue
        seen = _seen(a, shape, users, orders, sources) if a.shape == x.shape else None
        if seen is None:
            return None
        args.append(seen)
    return remade(x, args)
