"""Losses of classes: log-softmaxes of which one element of each row is picked, and no other is written.

    nll(log_softmax(x), t) = logsumexp(x - x_t)

x_t is picked ahead, from memory, of which it may be a function; what is left is a stream that reads that once.  Shifted
by x_t the logarithm is the loss itself: no digit is lost to how large x is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, nan, prod
from types import MappingProxyType
from typing import Any

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise, reshape
from fusewright.ir.class_losses import carried, class_weights, counted, reduced
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make, remade
from fusewright.runtime.device import DeviceFacts
from fusewright.schedule.beside import Readers, readers_of
from fusewright.schedule.chain import MEMORY, POINTWISE, Users, is_sized
from fusewright.schedule.group import sizes

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
    for shares in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        users, readers = graph.users(), readers_of(graph)
        losses = losses_of(shares, users, readers)
        if losses and is_much(shares, facts, hints):
            placed, _ = graph.substituted(_streamed(losses, users))
            graph = placed if lie_alike(graph, placed, orders) else graph
    return graph


def losses_of(shares: Node, users: Users, readers: Readers) -> tuple[Node, ...]:
    """What a log-softmax over classes is read by, if that is a loss of one class of each row, and means or sums of all
    classes, weighted or not."""
    logs = isinstance(shares.op, ops.Softmax) and shares.op.log and shares.op.dim == 1
    if not logs or shares.dtype not in MEMORY or users[shares] != len(readers[shares]):
        return ()
    found = [_reduced(node, shares, users, readers) for node in readers[shares]]
    losses = tuple(n for n in found if n is not None)
    picked = [n for n in losses if isinstance(n.op, ops.Nll)]
    return (*picked, *(n for n in losses if n not in picked)) if len(picked) == 1 and None not in found else ()


def _reduced(node: Node, shares: Node, users: Users, readers: Readers) -> Node | None:
    """The loss, or the sum or mean over classes, that a reader of log-softmaxes is or is weighted for."""
    if isinstance(node.op, ops.Nll):
        return node if node.arg(0) is shares else None
    if _weight(node, shares) is not None and users[node] == 1 and len(readers[node]) == 1:
        (node,) = readers[node]
    dense = isinstance(node.op, ops.Reduce) and node.op.kind in ("sum", "mean") and node.op.dims == (1,)
    return node if dense and not node.op.keepdim and node.dtype == shares.dtype else None  # type: ignore[attr-defined]


def _weight(node: Node, shares: Node) -> Node | None:
    """The number for each class by which log-softmaxes are multiplied, if this is that."""
    if not isinstance(node.op, ops.Pointwise) or node.op.fn != "mul" or node.shape != shares.shape:
        return None
    others = [a for a in node.inputs if a is not shares]
    per_class = (shares.shape[1], *(1,) * (shares.ndim - 2))
    is_weight = len(others) == 1 and others[0].shape in (per_class, (1, *per_class)) and others[0].dtype == node.dtype
    return others[0] if is_weight else None


def is_much(shares: Node, facts: DeviceFacts, hints: Mapping[Any, int]) -> bool:
    """Whether writing them takes longer than to begin more operations."""
    return prod(sizes(shares, hints)) * shares.dtype.itemsize / facts.memory > MORE * facts.launch


def _streamed(losses: tuple[Node, ...], users: Users) -> dict[Node, Node]:
    """The loss of one class of each row, and those of all classes, from logits."""
    nll, *others = losses
    op, (shares, target, weight) = nll.op, nll.args
    assert isinstance(op, ops.Nll) and shares is not None and target is not None
    x = shares.arg(0)
    own = negative(picked(x, users, lambda x: negative(make(ops.Nll(op.ignore), x, target, None))))
    # -x_t, and any number of what is ignored
    shift = pointwise("where", pointwise("lt", pointwise("abs", own), inf), own, 0.0)
    shifted = pointwise("add", cast(x, carried(x.dtype)), reshape(shift, (x.shape[0], 1, *x.shape[2:])))
    whole = make(ops.Reduce("logsumexp", (1,)), shifted, where=nll.where)
    whole = pointwise("where", pointwise("eq", whole, inf), nan, whole)  # as a softmax has it
    each = pointwise("add", whole, pointwise("sub", own, shift))
    weights = class_weights(weight, target, op.ignore, x.dtype)
    each = each if weight is None or weights is None else pointwise("mul", each, weights)
    each = counted(each, target, op.ignore)
    news = {nll: cast(reduced(each, weights, op.reduction), nll.dtype)}
    return news | {node: cast(_of_all(node, shares, shifted, whole), node.dtype) for node in others}


def negative(x: Node) -> Node:
    """-x; what x is the negative of, if it is one."""
    return x.arg(0) if isinstance(x.op, ops.Pointwise) and x.op.fn == "neg" else pointwise("neg", x)


def _of_all(node: Node, shares: Node, shifted: Node, whole: Node) -> Node:
    """What log-softmaxes come to over classes: sum(w (y - log(sum(exp(y))))) of shifted logits y, by what both sums
    come to."""
    assert isinstance(node.op, ops.Reduce)
    weight = _weight(node.arg(0), shares)
    weighted = shifted if weight is None else pointwise("mul", shifted, cast(weight, shifted.dtype))
    if weight is not None:
        alone = reshape(cast(weight, shifted.dtype), (1, *weight.shape) if weight.ndim < shares.ndim else weight.shape)
        whole = pointwise("mul", whole, make(node.op, alone))
    elif node.op.kind == "sum":
        whole = pointwise("mul", whole, shares.shape[1])
    return pointwise("sub", make(node.op, weighted, where=node.where), whole)


def picked(x: Node, users: Users, pick: Callable[[Node], Node]) -> Node:
    """What `pick` takes from x, taken from what x is computed of by itself, element by element: x need not be in memory
    then."""
    read, steps = x, list[Node]()
    while users[read] == 1 and (ahead := _of_elements_of(read)) is not None:
        steps.append(read)
        read = ahead
    value = pick(read)
    for step in reversed(steps):
        value = remade(step, [value if a is not None and not isinstance(a.op, ops.Number) else a for a in step.args])
    return value


def _of_elements_of(x: Node) -> Node | None:
    """The one tensor that each element of x is computed of, from the element in its place."""
    tensors = [a for a in x.inputs if not isinstance(a.op, ops.Number)]
    alone = isinstance(x.op, POINTWISE) and len(tensors) == 1 and tensors[0].shape == x.shape
    return tensors[0] if alone and tensors[0].dtype.is_floating_point and not is_sized(x) else None
