"""Range sums that are average pools, where nothing but a stream computes what they sum on the way.

avg(conv(relu(x * scale + shift)))        as the model has it
conv(range_sum(relu(x * scale + shift)))  the sum has moved, and is a pass of its own over what relu gave
conv(avg(relu(x * scale + shift)))        one stream
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose, prod
from types import MappingProxyType

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.slots import windows
from fusewright.schedule.range_sums import parse

# Windows of more elements are not a stream's, whose threads have a window each.
MOST_ELEMENTS = 64


def as_pools(graph: Graph, orders: Mapping[Node, Order] = MappingProxyType({})) -> Graph:
    """`graph` with pools in place of range sums that are such, of values that no range reduction computes.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    users = graph.users()
    sums = [n for n in graph.nodes() if isinstance(n.op, ops.RangeSum) and _is_streamed(n.arg(0), users[n.arg(0)])]
    for node in reversed(sums):  # what comes before a replaced one stays as it is
        pooled = pool(node) if isinstance(parse(node, lambda n: users[n] == 1), str) else None
        placed = graph if pooled is None else graph.substitute(node, pooled)
        if placed is not graph and lie_alike(graph, placed, orders):
            graph = placed
    return graph


def _is_streamed(value: Node, users: int) -> bool:
    return isinstance(value.op, ops.Pointwise | ops.Cast) and users == 1


def pool(node: Node) -> Node | None:
    """The average pool, perhaps times a number, that a range sum is; `None` where it is none."""
    op, x = node.op, node.arg(0)
    assert isinstance(op, ops.RangeSum)
    table, first = dict(op.table), 2
    if x.ndim not in (3, 4, 5) or min(table) < first or op.dtype != x.dtype:
        return None
    kernel, stride, scale = [1] * (x.ndim - first), [1] * (x.ndim - first), 1.0
    for dim, slots in table.items():
        length = x.shape[dim]
        found = windows(slots, length) if isinstance(length, int) else None
        if found is None or found.step != 1 or found.before or found.behind > 0:
            return None
        kernel[dim - first] = found.size
        stride[dim - first] = found.stride if len(slots) > 1 else length
        scale *= slots[0].scale * found.size
    whole = isclose(scale, 1.0, rel_tol=1e-12)
    if prod(kernel) > MOST_ELEMENTS or (x.dtype.itemsize < 4 and not (whole and x.device.type == "cuda")):
        return None  # ATen has no such pools of volumes in half precision on a CPU, and a product would round again
    zeros, ones = (0,) * len(kernel), (1,) * len(kernel)
    pooled = make(ops.Pool("avg", tuple(kernel), tuple(stride), zeros, ones), x, where=node.where)
    if pooled.shape != node.shape:
        return None
    return pooled if whole else pointwise("mul", pooled, scale)
