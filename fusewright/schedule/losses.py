"""Losses of classes: log-softmaxes of which one element of each row is picked, and no other is written.

    nll(log_softmax(x), t) = logsumexp(x - x_t)

x_t is picked ahead, from memory, of which it may be a function; what is left is a stream that reads that once.  Shifted
by x_t the logarithm is the loss itself: no digit is lost to how large x is.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, nan, prod
from types import MappingProxyType
from typing import Any

import torch

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise, reshape, total
from fusewright.ir.memory_order import Order, output_orders
from fusewright.ir.node import Graph, Node, make, remade
from fusewright.runtime.device import DeviceFacts
from fusewright.schedule.chain import MEMORY, POINTWISE, Users, is_sized
from fusewright.schedule.groups import sizes

# So many more operations there are then, of one number for each row.
MORE = 5


def of_logits(
    graph: Graph,
    facts: DeviceFacts,
    hints: Mapping[Any, int],
    orders: Mapping[Node, Order] = MappingProxyType({}),
) -> Graph:
    """`graph` with such losses as streams over what the softmaxes are of, where that is much for a device of these
    `facts`, symbolic sizes taken at `hints`.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        users = graph.users()
        if isinstance(node.op, ops.Nll) and _is_of_shares(node, users) and _is_much(node.arg(0), facts, hints):
            placed = graph.substitute(node, _streamed(node, users))
            alike = output_orders(graph, orders, kernels=False) == output_orders(placed, orders, kernels=False)
            graph = placed if alike else graph
    return graph


def _is_of_shares(node: Node, users: Users) -> bool:
    """Whether this is of a log-softmax over classes that nobody else uses."""
    shares = node.arg(0)
    alone = isinstance(shares.op, ops.Softmax) and shares.op.log and shares.op.dim == 1 and users[shares] == 1
    return alone and shares.dtype in MEMORY


def _is_much(shares: Node, facts: DeviceFacts, hints: Mapping[Any, int]) -> bool:
    """Whether writing them takes longer than to begin more operations."""
    return prod(sizes(shares, hints)) * shares.dtype.itemsize / facts.memory > MORE * facts.launch


def _streamed(node: Node, users: Users) -> Node:
    """The loss of logits."""
    op, (shares, target, weight) = node.op, node.args
    assert isinstance(op, ops.Nll) and shares is not None and target is not None
    x = shares.arg(0)
    wide = x.dtype if x.dtype.itemsize > 2 else torch.float32
    own = _picked(x, target, op.ignore, users)  # -x_t, and any number of what is ignored
    shift = pointwise("where", pointwise("lt", pointwise("abs", own), inf), own, 0.0)
    shifted = pointwise("add", cast(x, wide), reshape(shift, (x.shape[0], 1, *x.shape[2:])))
    whole = make(ops.Reduce("logsumexp", (1,)), shifted, where=node.where)
    whole = pointwise("where", pointwise("eq", whole, inf), nan, whole)  # as a softmax has it
    each = pointwise("add", whole, pointwise("sub", own, shift))
    is_counted = pointwise("ne", target, op.ignore)
    weights = cast(is_counted, x.dtype) if weight is None else _weights(weight, target, is_counted)
    each = each if weight is None else pointwise("mul", each, weights)
    loss = pointwise("where", is_counted, each, 0.0)
    dims = tuple(range(loss.ndim))
    if op.reduction != "none":
        loss = total(loss, dims)
    if op.reduction == "mean":
        loss = pointwise("div", loss, total(cast(weights, wide), dims))
    return cast(loss, node.dtype)


def _picked(x: Node, target: Node, ignore: int, users: Users) -> Node:
    """-x_t, picked from what x is computed of by itself, element by element: x need not be in memory then."""
    read, steps = x, list[Node]()
    while users[read] == 1 and (ahead := _of_elements_of(read)) is not None:
        steps.append(read)
        read = ahead
    own = make(ops.Nll(ignore), read, target, None)
    if not steps:
        return own
    value = pointwise("neg", own)
    for step in reversed(steps):
        value = remade(step, [value if a is not None and not isinstance(a.op, ops.Number) else a for a in step.args])
    return pointwise("neg", value)


def _of_elements_of(x: Node) -> Node | None:
    """The one tensor that each element of x is computed of, from the element in its place."""
    tensors = [a for a in x.inputs if not isinstance(a.op, ops.Number)]
    alone = isinstance(x.op, POINTWISE) and len(tensors) == 1 and tensors[0].shape == x.shape
    return tensors[0] if alone and tensors[0].dtype.is_floating_point and not is_sized(x) else None


def _weights(weight: Node, target: Node, is_counted: Node) -> Node:
    """The weight of each class in `target`; 0 of those that are ignored, which need not be classes."""
    classes = pointwise("where", is_counted, target, 0)
    picked = make(ops.Embedding(), reshape(weight, (*weight.shape, 1)), classes)
    return pointwise("where", is_counted, reshape(picked, target.shape), 0.0)
