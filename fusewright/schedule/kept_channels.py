"""Reductions over the channels of a position behind a convolution, and what is made of its values and of these.

    y - amax(y, 1)          clamp(y) / norm(clamp(y), 1)          y * mean(hardsigmoid(y), 1)

A softmax over channels is one such, with a stage of its own.  Where a tile has all channels of a position they take no
pass over memory: numbers of the position are found one after the other, and each of its values is made anew of itself
and of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import is_

import torch

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make, remade, topological
from fusewright.schedule import kept_rows
from fusewright.schedule.chain import POINTWISE, Chain, Users, depends_on, parse
from fusewright.schedule.kept_rows_record import KeptRows, Pass
from fusewright.schedule.stream_record import Tree

# The reductions that take one or two ways over the values of a thread.
KINDS = ("sum", "mean", "max", "min", "norm", "var", "std")
# What lies between a convolution and the end of a chain with such a stage.
_CHAINED = (*POINTWISE, ops.Reduce, ops.Reshape, ops.Softmax, ops.Pool)
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
    ends = _ends(root)
    convs = [n for n in ends if isinstance(n.op, ops.Conv)]
    if len(convs) != 1:
        return None
    (conv,) = convs
    below = topological([root], ends)
    of_conv = depends_on(below, [conv])
    behind = [n for n in below if n in of_conv]
    value, forked = _forked(conv, behind, users) or (conv, None)
    ahead = parse(value, users, partial(is_, conv))
    if forked is None or isinstance(ahead, str):
        return None
    for node in _joined(forked, behind, users):
        after = parse(root, users, partial(is_, node))
        stage = None if isinstance(after, str) else _stage(value, node)
        if stage is not None and not isinstance(after, str):
            operands = tuple(dict.fromkeys((*ahead.operands, *after.operands)))
            return Chain(conv, (*ahead.stages, stage, *after.stages), operands)
    return None


def _ends(root: Node) -> list[Node]:
    """What `root` is computed from by the operations of a chain."""
    found, stack = {root: None}, [root]
    while stack:
        node = stack.pop()
        if isinstance(node.op, _CHAINED):
            new = [a for a in node.inputs if a not in found]
            found.update(dict.fromkeys(new))
            stack += new
    return [n for n in found if not isinstance(n.op, _CHAINED)]


def _forked(conv: Node, behind: list[Node], users: Users) -> tuple[Node, Node] | None:
    """What the stage begins with, and the last of the functions of the convolution's output ahead of everything that
    several read, if several do: the same, unless there is a pool, with which the stage begins."""
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


def _joined(value: Node, behind: list[Node], users: Users) -> Iterator[Node]:
    """The values of all channels behind `value` that all its readers come to, the first one first."""
    uses: dict[Node, int] = {value: users[value]}  # that are still to come, of what has been passed
    for node in behind[behind.index(value) + 1 :] if value in behind else behind:
        if not any(a in uses for a in node.inputs):
            continue
        for a in node.inputs:
            if a in uses:
                uses[a] -= 1
        if not any(uses.values()) and node.shape == value.shape and isinstance(node.op, POINTWISE):
            yield node
        uses[node] = users[node]


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
