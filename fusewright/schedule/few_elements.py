"""Reductions of a few neighbours in memory, as functions of them.

    (x - y).square().sum(-1)    of x (N, 1, 3), y (M, 3) is    (x_0 - y_0)^2 + (x_1 - y_1)^2 + (x_2 - y_2)^2
    norm(x, dim=-1)             of x (N, 2) is                 sqrt(x_0^2 + x_1^2)

Threads that reduce rows have little to do for one of two to four elements; a function is part of what is around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from fusewright.ir import ops
from fusewright.ir.build import pointwise, reshape
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make, remade, topological
from fusewright.schedule.chain import POINTWISE, Users, taken_in
from fusewright.schedule.look_through import look_through

FEWEST, MOST = 2, 4
# Operations that are written out once for each element, at most.
LONGEST = 16
# What makes one of two elements.
OF_TWO = {"sum": "add", "mean": "add", "norm": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def of_few(graph: Graph, orders: Mapping[Node, Order] = MappingProxyType({})) -> Graph:
    """`graph` with reductions of a few neighbours as functions of them, where what they are computed of is in memory.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    users = graph.users()
    found = {node: _written_out(node, users) for node in graph.nodes() if _is_of_few(node)}
    news = {node: new for node, new in found.items() if new is not None}
    if not news:
        return graph
    placed, _ = graph.substituted(news)
    return placed if lie_alike(graph, placed, orders) else graph


def _is_of_few(node: Node) -> bool:
    if not isinstance(node.op, ops.Reduce) or node.op.kind not in OF_TWO or node.op.first:
        return False  # a function of several has no first one
    x = node.arg(0)
    few = node.op.dims == (x.ndim - 1,) and x.ndim > 1 and x.shape[-1] in range(FEWEST, MOST + 1)
    return few and node.dtype == x.dtype and x.dtype in (torch.float32, torch.float64)  # others are rounded every time


def _written_out(node: Node, users: Users) -> Node | None:
    """The function of the elements; `None` where what they are computed of is not in memory, or takes too many."""
    x = node.arg(0)
    inner: dict[Node, None] = {}
    leaves = {x: 1}
    if isinstance(x.op, POINTWISE) and users[x] == 1:
        inner, leaves = taken_in([x], users, lambda n: isinstance(n.op, POINTWISE) and n.ndim == x.ndim, LONGEST)
    if len(inner) > LONGEST or not all(isinstance(look_through(leaf)[0].op, ops.Source) for leaf in leaves):
        return None
    count = x.shape[-1]
    assert isinstance(node.op, ops.Reduce) and isinstance(count, int)
    elements = [_element(x, inner, k) for k in range(count)]
    if node.op.kind == "norm":
        elements = [pointwise("square", element) for element in elements]
    value = elements[0]
    for element in elements[1:]:
        value = pointwise(OF_TWO[node.op.kind], value, element)
    if node.op.kind == "mean":
        value = pointwise("div", value, count)
    return reshape(_root(value) if node.op.kind == "norm" else value, node.shape)


def _root(total: Node) -> Node:
    """The square root, whose gradient at zero is that of a norm, zero, and not infinite."""
    some = pointwise("gt", total, 0)
    return pointwise("where", some, pointwise("sqrt", pointwise("where", some, total, 1)), total)


def _element(x: Node, inner: Mapping[Node, object], k: int) -> Node:
    """x[..., k], computed of such elements of what the `inner` operations read."""
    new: dict[Node, Node] = {}

    def at(n: Node) -> Node:
        if n in new or isinstance(n.op, ops.Number) or not n.shape:
            return new.get(n, n)
        here = make(ops.Slice(n.ndim - 1, k, k + 1), n) if n.shape[-1] != 1 else n
        return reshape(here, n.shape[:-1])

    for node in topological([x]):
        if node in inner:
            new[node] = remade(node, [None if a is None else at(a) for a in node.args])
    return at(x)
