"""Norms of short rows that only a reduction over more than a row reads, as what they are made of.

    max(group_norm(x), 1)  ->  max((x - mean(x, 2)) * rsqrt(var(x, 2) + eps) * w + b, (1, 2))     x (B, groups, each)

A normalisation finds statistics of its rows in a pass of its own, by teams of threads, which are many where rows are
short, and reads everything once more.  Rows that are kept (`schedule.kept_rows`) are read once, and give the first step
of the reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from fusewright.ir import ops
from fusewright.ir.build import pointwise, reshape
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make, remade
from fusewright.schedule import kept_rows
from fusewright.schedule.chain import POINTWISE, Map, Users, parse, region
from fusewright.schedule.kept_rows_record import KeptRows

# Elements of a row up to which it is short: a normalisation's teams are as fast with others.
SHORT = 256


def of_norms(graph: Graph, orders: Mapping[Node, Order]) -> Graph:
    """`graph` with such norms of float32 as reductions and functions, where rows are kept for these.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    users = graph.users()
    for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        spelled = _spelled(node, users) if isinstance(node.op, ops.Reduce) and node.varies else None
        if spelled is None:
            continue
        placed = graph.substitute(node, spelled)
        if _is_kept(spelled, placed.users()) and lie_alike(graph, placed, orders):
            graph, users = placed, placed.users()
    return graph


def _is_kept(spelled: Node, users: Users) -> bool:
    """Whether rows are kept for the first step of the reduction."""
    reduction = spelled.arg(0) if isinstance(spelled.op, ops.Reshape) else spelled
    split = kept_rows.split(reduction, users)
    return split is not None and isinstance(kept_rows.parse(split.part, split.users(users)), KeptRows)


def _spelled(reduction: Node, users: Users) -> Node | None:
    """The same without the norm, if it is one of such rows."""
    op, x = reduction.op, reduction.arg(0)
    assert isinstance(op, ops.Reduce)
    if op.kind not in ("sum", "mean", "max", "min") or op.dtype is not None or users[x] != 1:
        return None
    chain = parse(x, users, _is_norm)
    if isinstance(chain, str) or users[chain.source] != 1 or not all(isinstance(s, Map) for s in chain.stages):
        return None
    if any(isinstance(a.op, POINTWISE) and a.shape == x.shape for a in chain.operands):
        return None  # it would be written under its own shape, to be read under another
    apart = _Apart.of(chain.source, frozenset(n for s in chain.stages if isinstance(s, Map) for n in region(s)))
    dims = apart.dims(op.dims)
    lengths = [apart.shape[d] for d in apart.rows]
    if not set(apart.rows) < set(dims) or not all(isinstance(n, int) for n in lengths):
        return None
    if prod(int(n) for n in lengths) > SHORT:
        return None
    kept = make(ops.Reduce(op.kind, dims, first=op.first), apart.value(x), where=reduction.where)
    return reshape(kept, reduction.shape)


def _is_norm(node: Node) -> bool:
    """Whether this is a norm of rows by their own statistics, of what lies row by row."""
    op = node.op
    if not isinstance(op, ops.Norm) or op.kind == "batch" or op.running or node.dtype != torch.float32:
        return False
    return not op.effectful and node.ndim <= 3  # images may have their channels last


@dataclass(frozen=True)
class _Apart:
    """How values are seen where the channels of groups have dimensions of their own.

    behind  the pointwise operations on the norm
    groups  of channels, if any
    rows    the dimensions of a row
    shape   that of the norm
    """

    norm: Node
    behind: frozenset[Node]
    groups: int | None
    rows: tuple[int, ...]
    shape: tuple[ops.Size, ...]

    @classmethod
    def of(cls, norm: Node, behind: frozenset[Node]) -> _Apart:
        op, ndim = norm.op, norm.ndim
        assert isinstance(op, ops.Norm)
        if op.kind == "group":
            batch, channels, *lengths = norm.shape
            shape = (batch, op.groups, channels // op.groups, *lengths)
            return cls(norm, behind, op.groups, tuple(range(2, ndim + 1)), shape)
        first = 2 if op.kind == "instance" else ndim - op.trailing
        return cls(norm, behind, None, tuple(range(first, ndim)), norm.shape)

    def dims(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Those of what is seen so."""
        if self.groups is None:
            return dims
        behind = [d + 1 for d in dims if d > 0]  # the second one of a channel's among them
        return (*(d for d in dims if d < 2), *behind)

    def seen(self, x: Node) -> Node:
        """What broadcasts over the norm."""
        if self.groups is None or all(n == 1 for n in x.shape):
            return x
        shape: list[ops.Size] = [*(1,) * (self.norm.ndim - x.ndim), *x.shape]
        two = (1, 1) if shape[1] == 1 else self.shape[1:3]
        return reshape(x, (shape[0], *two, *shape[2:]))

    def value(self, x: Node) -> Node:
        """The norm, what is computed from it, or what is read for that."""
        if x is self.norm:
            return self._made()
        if x not in self.behind:
            return self.seen(x)
        return remade(x, [None if a is None else self.value(a) for a in x.args])

    def _made(self) -> Node:
        """What the norm is made of."""
        op, x, (weight, bias) = self.norm.op, self.norm.arg(0), self.norm.args[1:3]
        assert isinstance(op, ops.Norm)
        value, eps = self.seen(x), torch.finfo(torch.float32).eps if op.eps is None else op.eps
        if op.kind != "rms":
            value = pointwise("sub", value, self._mean(value))
        scale = pointwise("rsqrt", pointwise("add", self._mean(pointwise("mul", value, value)), eps))
        value = pointwise("mul", value, scale)
        for fn, number in (("mul", weight), ("add", bias)):
            value = value if number is None else pointwise(fn, value, self._beside(number))
        return value

    def _mean(self, x: Node) -> Node:
        return make(ops.Reduce("mean", self.rows, keepdim=True), x, where=self.norm.where)

    def _beside(self, number: Node) -> Node:
        """A weight or bias: of channels, or of the elements of a row."""
        op = self.norm.op
        assert isinstance(op, ops.Norm)
        if op.kind not in ("group", "instance"):
            return number
        return self.seen(reshape(number, (*number.shape, *(1,) * (self.norm.ndim - 2))))
