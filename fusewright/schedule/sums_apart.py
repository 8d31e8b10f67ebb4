"""Window sums of which a convolution reads only some, or that take its kernel long to form, by a kernel of their own.

    conv_{s,d}(box(x), w)  =  conv_{s/g,d/g}(box(x)[::g], w)        g = gcd(s, d), per dimension

A kernel that forms them on its way has one at every element, and few ways to multiply: weights that do not fit into
shared memory are for several blocks, each of which forms all sums again.  Strides and dilations that have a divisor in
common pass over most sums.  Those that are read take a g-th of the room along each dimension, and what reads them is a
convolution like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd, prod

from fusewright.ir import ops
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule.contraction import window_sums
from fusewright.schedule.cost import CostModel
from fusewright.schedule.group import sizes

# The share of the time of one kernel that the two may take, and of a memory's pace that sums of windows have: of 168 MB
# in 0.108 ms on an H200 (row 20 of benchmarks/results/h200_random_seed13.json).
CLEARLY, PACE = 0.8, 0.75


def with_sums_apart(
    graph: Graph,
    cost: CostModel,
    orders: Mapping[Node, Order],
    seconds: Callable[[Node], float],
    *,
    alone: Callable[[Node], bool] = lambda _: False,
    always: bool = False,
) -> tuple[Graph, int]:
    """`graph` with such sums as their convolutions read them, where no kernel would form them on its way, or where that
    clearly takes longer by `seconds`, what the best kernel of a convolution takes; or `always`.  How many convolutions
    still have kernels that form theirs.

    Operations for which `alone` holds stay.  Results lie in memory as they did, where the sources that do not lie row
    by row have these `orders`.
    """
    users, formed = graph.users(), 0
    for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        found = None if alone(node) else _of_those_read(node)
        if found is None or users[node.arg(0)] > 1:
            continue
        forms = window_sums(node) is not None
        pays = always or not forms or _is_faster(node, found, cost, seconds)
        placed = graph.substitute(node, found) if pays else graph
        if placed is not graph and lie_alike(graph, placed, orders):
            graph = placed
        else:
            formed += forms
    return graph, formed


def _of_those_read(conv: Node) -> Node | None:
    """The same convolution of the sums that it reads; `None` where it reads all, which reach memory as they are."""
    op = conv.op
    if not isinstance(op, ops.Conv) or op.transposed or not isinstance(conv.arg(0).op, ops.RangeSum):
        return None
    sums, w = conv.arg(0), conv.arg(1)
    assert isinstance(sums.op, ops.RangeSum)
    table, stride, dilation = dict(sums.op.table), list(op.stride), list(op.dilation)
    for dim, slots in sums.op.table:
        if dim < 2 or any(op.padding[dim - 2]) or not isinstance(w.shape[dim], int):
            continue
        several = w.shape[dim] > 1
        apart = gcd(stride[dim - 2], dilation[dim - 2]) if several else stride[dim - 2]
        table[dim] = slots[::apart]
        stride[dim - 2] //= apart
        dilation[dim - 2] = dilation[dim - 2] // apart if several else 1
    if table == dict(sums.op.table) and window_sums(conv) is None:
        return None
    read = make(ops.RangeSum(tuple(table.items()), sums.op.dtype, written=True), sums.arg(0), where=sums.where)
    return make(ops.Conv(tuple(stride), op.padding, tuple(dilation), op.groups), read, *conv.args[1:], where=conv.where)


def _is_faster(conv: Node, found: Node, cost: CostModel, seconds: Callable[[Node], float]) -> bool:
    """Whether the two kernels of what was `found` clearly take less."""
    return seconds(found) + _passing(found.arg(0), cost) < CLEARLY * seconds(conv)


def _passing(sums: Node, cost: CostModel) -> float:
    """Seconds that it takes to form window sums that are written."""
    moved = sum(prod(sizes(n, cost.hints)) * n.dtype.itemsize for n in (sums, sums.arg(0)))
    return cost.facts.launch + moved / (PACE * cost.facts.memory)
