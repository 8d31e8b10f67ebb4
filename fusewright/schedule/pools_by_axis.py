"""Large windows that overlap, one dimension after the other.

    max_pool_{k x l}(x)   ->   max_pool_{k x 1}(max_pool_{1 x l}(x))

A window of 13 x 13 that moves by one reads 169 elements for each result (pyramids of poolings have such), by rows and
then by columns 26.  The dimensions that lie last come first: of several maxima, the gradient goes to the same one then.
Averages are those of averages, for what each counts is a product of lengths, with padding or without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from fusewright.ir import ops
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule.chain import POINTWISE

# So many elements of windows are read in the time of a pass over memory; one way is to take less than such a share of
# the other's estimated time.  Between what a pool of 192 elements on an H200 says (3; row 6 of
# benchmarks/results/h200_random_seed13.json) and what loads from a cache allow (14).
PASS, WORTHWHILE = 8.0, 0.7


def by_axis(graph: Graph, orders: Mapping[Node, Order]) -> Graph:
    """`graph` with such pools taken apart where that is much less to read.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    for node in reversed(graph.nodes()):
        parts = _apart(node)
        placed = graph if parts is None else graph.substitute(node, parts)
        if placed is not graph and lie_alike(graph, placed, orders):
            graph = placed
    return graph


def _apart(node: Node) -> Node | None:
    """The pools along one dimension each that a pool is, if they take much less time."""
    op = node.op
    if not isinstance(op, ops.Pool) or not _comes_apart(op, node) or sum(k > 1 for k in op.kernel) < 2:
        return None
    x, n = node.arg(0), len(op.kernel)
    if not all(isinstance(length, int) for length in x.shape[-n:]):
        return None
    y, apart = x, 0.0
    for i in reversed(range(n)):
        if op.kernel[i] > 1 or op.stride[i] > 1:
            y = make(_along(op, i), y, where=node.where)
            apart += _size(y, n) * (op.kernel[i] + PASS)
    whole = _size(node, n) * (prod(op.kernel) + PASS)
    # What a convolution gives does not reach memory where its windows are found in one kernel.
    apart += PASS * _size(x, n) if _is_of_convolution(x) else 0.0
    return y if apart < WORTHWHILE * whole else None


def _comes_apart(op: ops.Pool, node: Node) -> bool:
    """Whether pools along one dimension each give the same: averages would be rounded on the way, and what they are
    divided by has to be a product of lengths."""
    return op.kind != "avg" or (op.divisor is None and node.dtype.itemsize >= 4)


def _along(op: ops.Pool, i: int) -> ops.Pool:
    """The pool along one of its dimensions."""

    def alone(values: tuple[int, ...], others: int) -> tuple[int, ...]:
        return tuple(v if j == i else others for j, v in enumerate(values))

    kernel, stride, dilation = (alone(values, 1) for values in (op.kernel, op.stride, op.dilation))
    return replace(op, kernel=kernel, stride=stride, padding=alone(op.padding, 0), dilation=dilation)


def _size(x: Node, n: int) -> float:
    """Elements of a sample's channel."""
    return float(prod(x.shape[-n:]))


def _is_of_convolution(x: Node) -> bool:
    """Whether x is made of what a convolution gives, element by element."""
    while isinstance(x.op, POINTWISE):
        larger = [a for a in x.inputs if a.shape == x.shape]
        if len(larger) != 1:
            return False
        (x,) = larger
    return isinstance(x.op, ops.Conv)
