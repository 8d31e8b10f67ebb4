"""Products of what lies in memory as it is, in place of products of what is turned for them.

    linear(x.mT)         =  x.mT @ expand(w)      a product for every sample, which reads x as it lies
    f(linear(x.mT)).mT   =  f(expand(w) @ x)      nothing is turned any more; f computes each element by itself

A product by one weight is one for all rows, which have to lie one behind the other: what is turned is copied first.  A
library reads the operands of a batch of products turned or not, and one weight for all of them; kernels of ours read
them so, too (`schedule.matmul`).

With v = permute(x, p), whose last dimension is dimension p[-1] of x, linear(v) is permute(y, p) for the product y of x
along that.  So permutations move towards whoever reads the result, and where they come to nothing, they are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

from fusewright.ir import ops
from fusewright.ir.build import before_permute, permute, pointwise, reshape
from fusewright.ir.memory_order import Order, lie_alike, output_orders, rows_of
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.ops import numel
from fusewright.runtime.device import DeviceFacts
from fusewright.schedule import rearrangement, sample
from fusewright.schedule.chain import POINTWISE, Users
from fusewright.schedule.group import sizes
from fusewright.schedule.product import SMALL

# Rows that a library multiplies at a time: fewer of a sample take as long.
ROWS = 64
# Operations that permutations are followed through.
REACH = 32


def as_they_lie(
    graph: Graph,
    facts: DeviceFacts,
    hints: Mapping[Any, int],
    orders: Mapping[Node, Order] = MappingProxyType({}),
) -> tuple[Graph, int]:
    """`graph` with products of what is turned as products of what lies in rows, and how many these are, where a device
    of these `facts` takes longer to turn it than what a batch of products leaves idle, symbolic sizes taken at `hints`.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    known: dict[Node, Order] = {}
    users, products = graph.users(), 0
    for find in (_met, _apart):
        for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
            found = find(node, users) if node in users else None
            if found is None or not found.pays(facts, hints):
                continue
            sources = replace(graph, outputs=found.sources, effects=())
            if output_orders(sources, orders, kernels=False, known=known) != list(map(rows_of, found.sources)):
                continue
            placed = graph.substitute(node, found.value)
            if lie_alike(graph, placed, orders):
                graph, users, products = placed, placed.users(), products + len(found.products)
    return graph, products


@dataclass(frozen=True)
class _Product:
    """The product of x along `dim` by the weight of `matmul`, whose rows are turned."""

    matmul: Node
    x: Node
    dim: int

    def weight(self, *, features_first: bool) -> Node:
        """(N, K) or (K, N)."""
        w = self.matmul.arg(1)
        assert isinstance(self.matmul.op, ops.Matmul)
        return w if self.matmul.op.transpose_w == features_first else permute(w, (1, 0))

    @property
    def samples(self) -> ops.Size:
        return numel(self.x.shape[: self.dim])

    @property
    def rows(self) -> ops.Size:
        """Of one sample."""
        return numel(self.x.shape[self.dim + 1 :])

    def value(self) -> Node:
        """x (.., K, ..) gives (.., N, ..)."""
        matmul, x, bias = self.matmul, self.x, self.matmul.args[2]
        if self.dim == x.ndim - 1:
            return make(matmul.op, x, *matmul.args[1:], where=matmul.where)
        w = self.weight(features_first=True)
        n, k = w.shape
        if self.samples == 1:
            y = make(ops.Matmul(), w, reshape(x, (k, self.rows)), None, where=matmul.where)
        else:
            each = make(ops.Expand((self.samples, n, k)), w)
            y = make(ops.Matmul(), each, reshape(x, (self.samples, k, self.rows)), None, where=matmul.where)
        y = y if bias is None else pointwise("add", y, reshape(bias, (n, 1)))
        return reshape(y, (*x.shape[: self.dim], n, *x.shape[self.dim + 1 :]))

    def turned(self) -> Node:
        """The same in the order of the matmul: x (.., K, ..) gives (.., .., N)."""
        matmul, x, bias = self.matmul, self.x, self.matmul.args[2]
        w = self.weight(features_first=False)
        k, n = w.shape
        if self.samples == 1:
            y = make(matmul.op, permute(reshape(x, (k, self.rows)), (1, 0)), *matmul.args[1:], where=matmul.where)
        else:
            each = permute(reshape(x, (self.samples, k, self.rows)), (0, 2, 1))
            y = make(ops.Matmul(), each, make(ops.Expand((self.samples, k, n)), w), None, where=matmul.where)
            y = y if bias is None else pointwise("add", y, bias)
        return reshape(y, matmul.shape)

    def idle(self, hints: Mapping[Any, int]) -> float:
        """FLOPs that could have been done meanwhile, were the rows of all samples one behind the other."""
        lengths, weight = sizes(self.x, hints), sizes(self.matmul.arg(1), hints)
        samples, rows = prod(lengths[: self.dim]), prod(lengths[self.dim + 1 :])
        return 2.0 * samples * prod(weight) * (-rows % ROWS) if self.dim < self.x.ndim - 1 and samples > 1 else 0.0


@dataclass(frozen=True)
class _Found:
    """A value that is permute(`value`, `dims`).

    sources   what is read as it lies, and has to lie in rows
    copied    what was turned for it
    products  among it
    """

    value: Node
    dims: tuple[int, ...]
    sources: tuple[Node, ...]
    copied: tuple[Node, ...] = ()
    products: tuple[_Product, ...] = ()

    @property
    def is_turned(self) -> bool:
        return self.dims != tuple(range(len(self.dims)))

    def pays(self, facts: DeviceFacts, hints: Mapping[Any, int]) -> bool:
        moved = sum(2 * prod(sizes(n, hints)) * n.dtype.itemsize for n in self.copied)
        saved = len(self.copied) * facts.launch + moved / facts.memory
        return saved > sum(p.idle(hints) for p in self.products) / facts.matmul


def _met(root: Node, users: Users) -> _Found | None:
    """A permutation of products of what is turned that turns it back."""
    if not isinstance(root.op, ops.Permute):
        return None
    found = _turned(root.arg(0), users, REACH)
    dims = tuple(found.dims[d] for d in root.op.dims)
    copied = (*found.copied, *([root] if rearrangement.copies(root) else []))
    found = replace(found, dims=dims, copied=copied)
    return found if found.products and not found.is_turned else None


def _apart(matmul: Node, users: Users) -> _Found | None:
    """A product of what was turned so that one dimension comes last, and no other moves."""
    if not _is_by_weight(matmul, users) or matmul.ndim < 3 or not _is_view(matmul.arg(0), users):
        return None
    turned = matmul.arg(0)
    assert isinstance(turned.op, ops.Permute)
    product = _Product(matmul, turned.arg(0), turned.op.dims[-1])
    others = tuple(d for d in range(turned.ndim) if d != product.dim)
    if product.dim == turned.ndim - 1 or turned.op.dims != (*others, product.dim):
        return None
    return _Found(product.turned(), tuple(range(matmul.ndim)), (product.x,), (turned,), (product,))


def _turned(node: Node, users: Users, reach: int) -> _Found:
    """`node` as a permutation of what nothing is turned for, as far as nobody else reads what is on the way."""
    bare = _Found(node, tuple(range(node.ndim)), (node,))
    if reach == 0 or node.op.effectful:
        return bare
    if _is_view(node, users):
        assert isinstance(node.op, ops.Permute)
        below = _turned(node.arg(0), users, reach - 1)
        return replace(below, dims=tuple(below.dims[d] for d in node.op.dims))
    if users[node] > 1:
        return bare
    if _is_by_weight(node, users):
        return _product(node, _turned(node.arg(0), users, reach - 1)) or bare
    return _function(node, users, reach) or bare if isinstance(node.op, POINTWISE) else bare


def _is_view(node: Node, users: Users) -> bool:
    """Whether this is a permutation that is not copied for others as well."""
    return isinstance(node.op, ops.Permute) and not (node.op.copy and users[node] > 1)


def _is_by_weight(node: Node, users: Users) -> bool:
    """Whether this is a product of rows by one matrix, that is not one block's for a sample."""
    if not isinstance(node.op, ops.Matmul) or node.arg(1).ndim != 2:
        return False
    lengths = node.arg(1).shape
    if not all(isinstance(n, int) for n in lengths):
        return False
    small = prod(int(n) for n in lengths) < SMALL
    return not (small and isinstance(sample.parse(node, users), sample.SampleProgram))


def _product(matmul: Node, x: _Found) -> _Found | None:
    """A product of what is turned, as a permutation of one of what is not."""
    if not x.is_turned:
        return None
    product, copied = _Product(matmul, x.value, x.dims[-1]), [matmul.arg(0)] if _is_copied(matmul) else []
    return replace(x, value=product.value(), copied=(*x.copied, *copied), products=(*x.products, product))


def _is_copied(matmul: Node) -> bool:
    """Whether the rows are moved for the product."""
    return isinstance(matmul.arg(0).op, ops.Permute) and matmul.ndim > 2


def _function(node: Node, users: Users, reach: int) -> _Found | None:
    """A function of products that are all turned alike, and of smaller operands."""
    found = {a: _turned(a, users, reach - 1) for a in node.inputs if a.shape == node.shape}
    first = next((f for f in found.values() if f.products), None)
    if first is None or any(f.dims != first.dims for f in found.values()):
        return None
    args = (a if a is None else found[a].value if a in found else before_permute(a, first.dims) for a in node.args)
    each = list(found.values())
    return _Found(
        make(node.op, *args, where=node.where),
        first.dims,
        tuple(dict.fromkeys(s for f in each for s in f.sources)),
        tuple(dict.fromkeys(c for f in each for c in f.copied)),
        tuple(dict.fromkeys(p for f in each for p in f.products)),
    )
