"""Logarithms of sums of exponentials as what reductions of one pass give.

logsumexp(x)    is    m + log(sum(exp(x - m))),    m = max(x), or 0 where that is infinite
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise, reshape
from fusewright.ir.node import Node, make, remade, topological


def in_passes(order: Sequence[Node]) -> tuple[dict[Node, Node], list[Node]]:
    """Nodes where every reduction is of one pass, in order; and what stands for which of those given, if any does."""
    new: dict[Node, Node] = {}
    if not any(map(_is_logarithm, order)):
        return new, list(order)
    for node in order:
        args = [None if a is None else new.get(a, a) for a in node.args]
        new[node] = _spelled(node, new.get(node.arg(0), node.arg(0))) if _is_logarithm(node) else remade(node, args)
    read = {a for n in order for a in n.inputs if a not in new}
    return new, topological(list(new.values()), read)


def _is_logarithm(node: Node) -> bool:
    return isinstance(node.op, ops.Reduce) and node.op.kind == "logsumexp"


def _spelled(node: Node, x: Node) -> Node:
    """A logsumexp of x, in the type that sums have until it is rounded."""
    assert isinstance(node.op, ops.Reduce)
    dims, wide = node.op.dims, cast(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    greatest = make(ops.Reduce("max", dims, True), wide, where=node.where)
    shift = pointwise("where", pointwise("eq", pointwise("abs", greatest), inf), 0.0, greatest)
    total = make(ops.Reduce("sum", dims, True), pointwise("exp", pointwise("sub", wide, shift)), where=node.where)
    return reshape(cast(pointwise("add", pointwise("log", total), shift), node.dtype), node.shape)
