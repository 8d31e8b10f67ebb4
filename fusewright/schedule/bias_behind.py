"""A convolution's bias behind the greatest or the least of its positions: added once, not to every value.

    max_P(conv(x, w) + b)  =  max_P(conv(x, w)) + b        windows of positions, or all of them

Adding rounds upwards and downwards alike, and keeps the order: it is the same number.  Where features are reduced as
well, positions are first.  Of a kernel that compares more values than it multiplies, that is a third of what it does
with each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fusewright.ir import ops
from fusewright.ir.build import pointwise, reshape
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make

# Half precisions would be rounded once more where no kernel has both.
DTYPES = (torch.float32, torch.float64)


def with_bias_behind(
    graph: Graph, orders: Mapping[Node, Order], *, alone: Callable[[Node], bool] = lambda _: False
) -> Graph:
    """`graph` with biases behind such poolings and reductions.

    Operations for which `alone` holds stay.  Results lie in memory as they did, where the sources that do not lie row
    by row have these `orders`.
    """
    users = graph.users()
    for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        found = None if alone(node) else _behind(node)
        if found is None or users[node.arg(0)] > 1 or alone(node.arg(0)):
            continue
        placed = graph.substitute(node, found)
        if lie_alike(graph, placed, orders):
            graph = placed
    return graph


def _behind(node: Node) -> Node | None:
    """The same number with the bias behind it; `None` where it is no such one."""
    op = node.op
    if not isinstance(op, ops.Pool | ops.Reduce) or op.kind not in ("max", "min") or node.dtype not in DTYPES:
        return None
    conv = node.arg(0)
    bias = conv.args[2] if isinstance(conv.op, ops.Conv) else None
    if bias is None or not node.varies:
        return None
    plain = make(conv.op, *conv.inputs[:2], None, where=conv.where)
    per_channel = reshape(bias, (1, conv.shape[1], *(1,) * (conv.ndim - 2)))
    if isinstance(op, ops.Pool):
        over_positions = len(op.kernel) == conv.ndim - 2
        return pointwise("add", make(op, plain, where=node.where), per_channel) if over_positions else None
    positions = tuple(range(2, conv.ndim))
    if op.dims not in (positions, (1, *positions)):
        return None
    whole = replace(op, dims=positions, keepdim=True)
    found = pointwise("add", make(whole, plain, where=node.where), per_channel)
    if 1 in op.dims:
        found = make(replace(op, dims=(1,), keepdim=True), found, where=node.where)
    return reshape(found, node.shape)
