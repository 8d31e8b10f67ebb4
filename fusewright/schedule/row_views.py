"""Rows that others see with more dimensions: a softmax over all positions of an image, whose shares are weighed there.

    softmax(x.flatten(2), -1).view(x.shape)          flat (B, C, H * W), seen as (B, C, H, W), rows over (2, 3)

Everything that is known of the flat elements is said of the view, so that one kernel has both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fusewright.ir import ops
from fusewright.ir.build import reshape
from fusewright.ir.node import Graph, Node, remade
from fusewright.ir.ops import Size
from fusewright.schedule.chain import POINTWISE, Users


@dataclass(frozen=True)
class RowView:
    """Elements of shape `flat` with rows along `dim`, as a value of `shape` has them, in rows over `dims`."""

    flat: tuple[Size, ...]
    dim: int
    shape: tuple[Size, ...]
    dims: tuple[int, ...]

    @property
    def number(self) -> tuple[Size, ...]:
        """The shape of one number per row."""
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.shape))

    @property
    def numbers(self) -> tuple[tuple[Size, ...], ...]:
        """All shapes in which one number per row is found, with the dimensions of a row as one each, or without."""
        flat = tuple(1 if d == self.dim else n for d, n in enumerate(self.flat))
        dropped = tuple(n for d, n in enumerate(self.flat) if d != self.dim)
        return (flat, dropped, self.number, tuple(n for d, n in enumerate(self.shape) if d not in self.dims))

    def number_of(self, elements: Node) -> tuple[Size, ...]:
        """The shape of one number per row of such elements, which are flat or not."""
        return self.numbers[0] if elements.shape == self.flat else self.number

    def rows_of(self, elements: Node) -> tuple[int, ...]:
        """The dimensions of such elements that are those of rows."""
        return (self.dim,) if elements.shape == self.flat else self.dims

    def seen(self, x: Node, users: Users) -> Node | None:
        """What is broadcast to flat elements, broadcast to the view; `None` where that is no view of it.  Functions
        that nobody else reads are computed there."""
        if self.shape == self.flat or x.ndim == 0 or isinstance(x.op, ops.Number):
            return x
        if isinstance(x.op, ops.Reshape) and x.shape == self.flat and x.arg(0).shape == self.shape:
            return x.arg(0)
        if isinstance(x.op, POINTWISE) and x.shape == self.flat and users[x] == 1:
            args = [None if a is None else self.seen(a, users) for a in x.args]
            if all(a is None or b is not None for a, b in zip(x.args, args, strict=True)):
                return remade(x, args)
        if x.shape == self.flat:
            return reshape(x, self.shape)
        *lead, last = x.shape
        row = self.shape[self.dims[0] :] if last == self.flat[-1] else (1,) * len(self.dims)
        if all(n == 1 for n in lead):
            return reshape(x, row)
        outer = self.shape[: self.dims[0]]
        if tuple(lead) == self.flat[:-1]:
            return reshape(x, (*outer, *row))
        return reshape(x, (*lead, *row)) if outer == self.flat[:-1] else None


def row_view(shares: Node, graph: Graph) -> RowView:
    """How what is computed of softmaxes, element by element, is seen first by who wants it otherwise; as it is where
    nobody does, or where rows are not the last dimensions of that."""
    assert isinstance(shares.op, ops.Softmax)
    flat, dim = shares.shape, shares.op.dim
    plain = RowView(flat, dim, flat, (dim,))
    if dim != shares.ndim - 1 or not isinstance(flat[dim], int):
        return plain
    elements = {shares}
    for node in graph.nodes():
        if elements.isdisjoint(node.inputs):
            continue
        if isinstance(node.op, POINTWISE) and node.shape == flat:
            elements.add(node)
        elif isinstance(node.op, ops.Reshape) and node.arg(0) in elements:
            dims = _splits(node.shape, flat[dim])
            if dims is not None:
                return RowView(flat, dim, node.shape, dims)
    return plain


def _splits(shape: tuple[Size, ...], length: Size) -> tuple[int, ...] | None:
    """The last dimensions that have so many elements together."""
    for first in range(len(shape) - 2, 0, -1):
        last = shape[first:]
        if not all(isinstance(n, int) for n in last):
            return None
        if prod(n for n in last if isinstance(n, int)) == length:
            return tuple(range(first, len(shape)))
    return None
