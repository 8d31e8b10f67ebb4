"""Convolutions of few features whose taps along an outer dimension are features.

    conv(x, w)[o, p]  =  sum_u z[o, u, s*p + e*u],   z = conv'(x, w')    z (N, O*K, L', *), w' (O*K, C, 1, *)

A tensor core takes as long for one feature as for many, since it reads as many positions for them.  And a tile that has
taps along a dimension reads more rows of x than it has cells, where a tile of z reads as many.  What is left is to add
up K values for each of the results, which a stream does; z is smaller than x where features are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from math import prod

import torch

from fusewright.ir import ops
from fusewright.ir.build import permute, pointwise, reshape
from fusewright.ir.memory_order import Order, output_orders, rows_of
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule.cost import CostModel
from fusewright.schedule.group import sizes

# Features of a convolution that tensor cores are nearly idle for, and what z may have of x's elements.
FEW, SMALLER = 4, 0.5
# The share of a convolution's estimated time that the two steps may take: estimates are rough.
CLEARLY = 0.6


def with_taps_as_features(
    graph: Graph,
    cost: CostModel,
    orders: Mapping[Node, Order],
    seconds: Callable[[Node], float],
    *,
    alone: Callable[[Node], bool] = lambda _: False,
) -> tuple[Graph, int]:
    """`graph` with convolutions of few features in two steps, and how many: where these clearly take less by `seconds`,
    what the best kernel of a convolution takes.

    Operations for which `alone` holds stay.  Results lie in memory as they did, where the sources that do not lie row
    by row have these `orders`.
    """
    eager, known, found = output_orders(graph, orders, kernels=False), dict[Node, Order](), 0
    for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        best = None if alone(node) else _best(node, cost, seconds)
        if best is None:
            continue
        sources = replace(graph, outputs=tuple(node.inputs[:2]), effects=())
        if output_orders(sources, orders, kernels=False, known=known) != list(map(rows_of, node.inputs[:2])):
            continue
        placed = graph.substitute(node, best)
        if output_orders(placed, orders, kernels=False) == eager:
            graph, found = placed, found + 1
    return graph, found


def _best(y: Node, cost: CostModel, seconds: Callable[[Node], float]) -> Node | None:
    """The same in two steps, where that clearly takes less."""
    ways = [(z, dim) for z, dim in _steps(y) if _is_smaller(z, y.arg(0), cost)]
    if not ways:
        return None
    times = [seconds(z) + _adding(y, z, cost) for z, _ in ways]
    least = min(range(len(ways)), key=times.__getitem__)
    return _added(y, *ways[least]) if times[least] < CLEARLY * seconds(y) else None


def _is_smaller(z: Node, x: Node, cost: CostModel) -> bool:
    return prod(sizes(z, cost.hints)) <= SMALLER * prod(sizes(x, cost.hints))


def _adding(y: Node, z: Node, cost: CostModel) -> float:
    """Seconds that it takes to write z, and to add up what it has of each result."""
    moved = 2 * prod(sizes(z, cost.hints)) + prod(sizes(y, cost.hints))
    return 2 * cost.facts.launch + moved * y.dtype.itemsize / cost.facts.memory


def _steps(y: Node) -> Iterator[tuple[Node, int]]:
    """The first step along every dimension that has taps, but for the last one, along which tiles spread their own."""
    op = y.op
    if not isinstance(op, ops.Conv) or op.transposed or op.groups != 1 or not y.varies or y.dtype != torch.float32:
        return
    x, w = y.inputs[:2]
    lengths = (*x.shape[1:], *w.shape, *y.shape[1:])
    if not all(isinstance(n, int) and n > 0 for n in lengths) or int(w.shape[0]) > FEW or w.varies:
        return
    for dim in range(2, y.ndim - 1):
        if int(w.shape[dim]) > 1:
            yield _first(y, dim), dim


def _first(y: Node, dim: int) -> Node:
    """z: the convolution without taps, and without strides, along `dim`."""
    op, (x, w) = y.op, y.inputs[:2]
    assert isinstance(op, ops.Conv)
    features = int(w.shape[0]) * int(w.shape[dim])
    turned = permute(w, (0, dim, *(d for d in range(1, w.ndim) if d != dim)), copy=True)
    weight = reshape(turned, (features, *(1 if d == dim else w.shape[d] for d in range(1, w.ndim))))
    stride, dilation = (tuple(1 if d == dim else n for d, n in enumerate(by, 2)) for by in (op.stride, op.dilation))
    return make(ops.Conv(stride, op.padding, dilation, 1), x, weight, None, where=y.where)


def _added(y: Node, z: Node, dim: int) -> Node:
    """y from z."""
    op, (features, taps) = y.op, (int(y.arg(1).shape[d]) for d in (0, dim))
    assert isinstance(op, ops.Conv)
    stride, dilation, length = op.stride[dim - 2], op.dilation[dim - 2], int(y.shape[dim])
    split = reshape(z, (z.shape[0], features, taps, *z.shape[2:]))
    parts = []
    for u in range(taps):
        own = reshape(make(ops.Slice(2, u, u + 1), split), (z.shape[0], features, *z.shape[2:]))
        begin = u * dilation
        parts.append(make(ops.Slice(dim, begin, begin + (length - 1) * stride + 1, stride), own))
    total = reduce(lambda a, b: pointwise("add", a, b), parts)
    bias = y.args[2]
    return total if bias is None else pointwise("add", total, reshape(bias, (features, *(1,) * (y.ndim - 2))))
