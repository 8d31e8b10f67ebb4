"""Reductions over the channels of a position behind a convolution, and what is made of its values and of these.

    y - amax(y, 1)          clamp(y) / norm(clamp(y), 1)          y * mean(hardsigmoid(y), 1)

A softmax over channels is one such, with a stage of its own.  Where a tile has all channels of a position they take no
pass over memory: numbers of the position are found one after the other, and each of its values is made anew of itself
and of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make, remade, topological
from fusewright.schedule import kept_rows
from fusewright.schedule.chain import POINTWISE, Chain, Users, depends_on, parse
from fusewright.schedule.kept_rows import KeptRows, Pass
from fusewright.schedule.stream_record import Tree

# The reductions that take one or two ways over the values of a thread.
KINDS = ("sum", "mean", "max", "min", "norm", "var", "std")
# As if so many others used a value: no chain takes it in.
_APART = 1 << 20


@dataclass(frozen=True)
class KeptChannels:
    """A stage of a chain.

    value    what there is of every channel, pooled or not
    passes   the reductions over channels, those that others need first
    made     what takes the place of `value`, of that and of the reductions' numbers
    node     the same as the graph has it
    """

    value: Node
    passes: tuple[Pass, ...]
    made: Tree
    node: Node


def chain(root: Node, users: Users) -> Chain | None:
    """The chain from a convolution to `root` with such a stage, if there is one.

    What is ahead of it is ahead of all reductions, what is behind it begins where nothing else is read of their values.
    """
    below = topological([root], [n for n in topological([root]) if isinstance(n.op, ops.Conv)])
    convs = dict.fromkeys(a for n in below for a in n.inputs if isinstance(a.op, ops.Conv))
    if len(convs) != 1:
        return None
    (conv,) = convs
    behind = [n for n in below if n in depends_on(below, [conv])]
    value, forked = _forked(conv, behind, users) or (conv, None)
    node = None if forked is None else _joined(forked, behind, users)
    if node is None:
        return None
    ahead, after = parse(value, users, lambda n: n is conv), parse(root, users, lambda n: n is node)
    stage = _stage(value, node)
    if stage is None or isinstance(ahead, str) or isinstance(after, str):
        return None
    operands = tuple(dict.fromkeys((*ahead.operands, *after.operands)))
    return Chain(conv, (*ahead.stages, stage, *after.stages), operands)


def _forked(conv: Node, behind: list[Node], users: Users) -> tuple[Node, Node] | None:
    """The last of the functions of the convolution's output, pooled or not, ahead of everything that several read, if
    several do; and what the stage begins with: the same, or the pool if there is one."""
    value, pooled = conv, None
    while True:
        readers = [n for n in behind if value in n.inputs]
        if sum(n.inputs.count(value) for n in readers) != users[value]:
            return None
        if len(readers) > 1:
            return pooled or value, value
        if not readers or not isinstance(readers[0].op, (*POINTWISE, ops.Pool)) or readers[0].ndim != conv.ndim:
            return None
        (value,) = readers
        pooled = value if isinstance(value.op, ops.Pool) else pooled


def _joined(value: Node, behind: list[Node], users: Users) -> Node | None:
    """The first value of all channels behind `value` that all its readers come to, if there is one."""
    uses: dict[Node, int] = {value: users[value]}  # that are still to come, of what has been passed
    for node in behind[behind.index(value) + 1 :] if value in behind else behind:
        if not any(a in uses for a in node.inputs):
            continue
        for a in node.inputs:
            if a in uses:
                uses[a] -= 1
        if not any(uses.values()):
            return node if node.shape == value.shape and isinstance(node.op, POINTWISE) else None
        uses[node] = users[node]
    return None


def _stage(value: Node, node: Node) -> KeptChannels | None:
    """The stage from the one to the other, where it reads nothing else and reduces channels alone."""
    spelled = _spelled(value, node)
    users = {**Graph((), (spelled,)).users(), value: _APART}
    found = kept_rows.parse(spelled, users)
    if not isinstance(found, KeptRows) or found.within.tensors != (value,) or len(found.results) > 1:
        return None
    between = [n for n in topological([spelled], [value]) if not isinstance(n.op, ops.Number)]
    dims = {n.op.dims for n in between if isinstance(n.op, ops.Reduce)}
    if dims != {(1,)} or any(p.kind not in KINDS for p in found.passes):
        return None
    if any(n.dtype == torch.float64 for n in between):
        return None
    return KeptChannels(value, found.passes, found.results[0].tree, node)


def _spelled(value: Node, node: Node) -> Node:
    """The same with softmaxes over channels as what they are made of: others read what they are of as well."""
    new = {value: value}
    for n in topological([node], [value]):
        args = [None if a is None else new.get(a, a) for a in n.args]
        new[n] = remade(n, args)
        if isinstance(n.op, ops.Softmax) and n.op.dim == 1 and args[0] is not None:
            away = pointwise("sub", args[0], make(ops.Reduce("max", (1,), True), args[0]))
            total = make(ops.Reduce("sum", (1,), True), pointwise("exp", away))
            new[n] = pointwise("sub", away, pointwise("log", total)) if n.op.log else _share(away, total)
    return new[node]


def _share(away: Node, total: Node) -> Node:
    return pointwise("div", pointwise("exp", away), total)
