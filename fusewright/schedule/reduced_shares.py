"""Softmaxes, and their logarithms, that reductions over the same dimension read, for which they need not be written.

    l = log_softmax(x);  mean(l), l[:, 0], sum(p * l), nll(l, t)

    before   x -> l, which is written, and read by each
    after    x -> max(x), log(sum(exp(x - max(x)))), and what is made of these and of the elements of x, row by row

The second is a chain whose rows are kept (`schedule.kept_rows`): logits are read once, however many results there are.
Elements may be among those, beside numbers of the same rows, or made of them.  One number of a row, that of a class or
in one place, is picked from the logits, of which it is the same function as all the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Any

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise, reshape
from fusewright.ir.class_losses import carried, class_weights, counted, reduced
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make, remade, topological
from fusewright.ir.ops import Size
from fusewright.runtime.device import DeviceFacts
from fusewright.schedule import kept_rows
from fusewright.schedule.beside import MOST, readers_of
from fusewright.schedule.chain import MEMORY, Users, is_sized, parse
from fusewright.schedule.group import sizes
from fusewright.schedule.kept_rows_record import KeptRows
from fusewright.schedule.losses import losses_of, picked
from fusewright.schedule.row_views import row_view
from fusewright.schedule.stream import COMPARISONS

# Reductions that a softmax is made of.
OWN = 2


def of_kept_rows(
    graph: Graph,
    facts: DeviceFacts,
    hints: Mapping[Any, int],
    orders: Mapping[Node, Order] = MappingProxyType({}),
) -> Graph:
    """`graph` with such softmaxes as functions of rows, where those are kept and that pays on a device of these
    `facts`, symbolic sizes taken at `hints`.  Losses of longer rows are left to `schedule.losses`, and softmaxes of
    parameters alone are derived ahead of calls.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    waiting: _Placed | None = None
    for shares in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        if not isinstance(shares.op, ops.Softmax) or shares.dtype not in MEMORY or not shares.varies:
            continue
        if _is_left_to_others(shares, graph):
            continue
        befores = (before for before in (waiting, _Placed(graph, graph)) if before is not None)
        tried = [found for before in befores if (found := _placed(before, shares)) is not None]
        pays_so = (t for t in tried if _pays_kept(t, shares, facts, hints) and lie_alike(graph, t.graph, orders))
        best = next(pays_so, None)
        if best is not None:
            graph, waiting = best.graph, None
        elif tried:
            waiting = tried[0]
    return graph


@dataclass(frozen=True)
class _Placed:
    """A graph in which softmaxes are functions of rows, and what it was before.  What reads several of them may be kept
    only when all are: as long as one is read from memory, that is more than there are registers for.

    found   of each of them, the last one first: the ends of its region, and the maximum of its rows
    """

    before: Graph
    graph: Graph
    found: tuple[tuple[dict[Node, tuple[Node, Node]], Node], ...] = ()

    @property
    def rows(self) -> list[Node]:
        """The numbers, or elements, of rows that the ends of the last region are made of."""
        return [row for _, row in self.found[0][0].values()]

    @property
    def maxima(self) -> list[Node]:
        return [most for _, most in self.found]

    def kept(self) -> KeptRows | None:
        """The chain that keeps all these rows, if there is one."""
        kept = kept_rows.parse(self.rows[-1], self.graph.users(), readers_of(self.graph))
        if isinstance(kept, str) and len(self.rows) == 1 and _ends_samples(self.before, *self.found[0][0]):
            kept = kept_rows.parse_short(self.rows[0], self.graph.users())
        if isinstance(kept, str) or not set(self.rows) <= set(kept.roots):
            return None
        if any(isinstance(t.op, ops.Softmax) for t in kept.late):
            return None  # its own kernel would have what reads it late
        inside = set(topological(kept.roots, kept.tensors))
        read = set(topological(kept.tensors))
        return kept if inside.issuperset(self.maxima) and read.isdisjoint(self.maxima) else None


def _placed(before: _Placed, shares: Node) -> _Placed | None:
    """The same with one more softmax as a function of rows."""
    found = _Region(before.graph, shares).found()
    if found is None:
        return None
    placed, _ = before.graph.substituted({end: new for end, (new, _) in found[0].items()})
    return _Placed(before.before, placed, (found, *before.found))


def _pays_kept(placed: _Placed, shares: Node, facts: DeviceFacts, hints: Mapping[Any, int]) -> bool:
    """Whether rows are kept then, and that pays."""
    kept = placed.kept()
    if kept is None or (len(kept.passes) == OWN and any(result.elements for result in kept.results)):
        return False  # a normalisation writes elements as well
    added = _added(placed.before, placed.graph, kept)
    whole = prod(sizes(shares, hints))
    if len(placed.found) > 1 and any(prod(sizes(a, hints)) >= whole for n in added for a in n.inputs):
        return False  # what was made of one of them is outside
    # Samples that are one short row would be a sample program's, a block for each, where a number of each is wanted.
    is_short = prod(sizes(shares, hints)[1:]) == kept.length < kept_rows.SHORTEST_ALONE
    if is_short and all(end.shape[:1] == shares.shape[:1] for end in placed.found[0][0]):
        return True
    return pays(_passes(kept), shares, len(added), facts, hints)


def _ends_samples(graph: Graph, end: Node) -> bool:
    """Whether nothing of the same samples is made of it, which one block's program could go on with."""
    return not end.ndim or all(n.shape[:1] != end.shape[:1] for n in graph.nodes() if end in n.inputs)


def pays(passes: int, shares: Node, added: int, facts: DeviceFacts, hints: Mapping[Any, int]) -> bool:
    """Whether so many passes over softmaxes take longer than to begin so many more operations, and than what the time
    of one is known to."""
    moved = passes * prod(sizes(shares, hints)) * shares.dtype.itemsize
    return moved / facts.memory > max(added, 1) * facts.launch


def _passes(kept: KeptRows) -> int:
    """How often softmaxes would be written, or read, else: once each, but where elements are written still."""
    return 1 if any(result.elements for result in kept.results) else 2


def _added(graph: Graph, placed: Graph, kept: KeptRows) -> list[Node]:
    """The operations beside the chain that were none before."""
    known = {*graph.nodes(), *topological(kept.roots, kept.tensors)}
    return [n for n in placed.nodes() if n not in known and n.varies and not isinstance(n.op, ops.Reshape | ops.Full)]


def _is_left_to_others(shares: Node, graph: Graph) -> bool:
    """Whether a convolution's kernel may have them, and what reads them; or a stream has losses of rows that there are
    no registers for as it reads them."""
    assert isinstance(shares.op, ops.Softmax)
    users, length = graph.users(), shares.shape[shares.op.dim]
    if isinstance(length, int) and length > kept_rows.LONGEST and losses_of(shares, users, readers_of(graph)):
        return True
    return users[shares] == 1 and not isinstance(parse(shares, users, lambda n: isinstance(n.op, ops.Conv)), str)


def _is_slice(node: Node) -> bool:
    while isinstance(node.op, ops.Reshape):
        node = node.arg(0)
    return isinstance(node.op, ops.Slice)


@dataclass
class _Region:
    """What is computed from a softmax, up to numbers that others read.

    rows      each of these values as rows have it: elements as they were, numbers with the reduced dimension as one
    elements  those that have an element for each of the softmax
    ends      those that others read, and what they are read as; and of which number, or element, that is made
    view      the shape in which rows have elements, which some may be split into
    """

    graph: Graph
    shares: Node
    rows: dict[Node, Node] = field(default_factory=dict)
    elements: set[Node] = field(default_factory=set)
    ends: dict[Node, tuple[Node, Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert isinstance(self.shares.op, ops.Softmax)
        self.op: ops.Softmax = self.shares.op
        x, self.dim = self.shares.arg(0), self.op.dim
        self.users: Users = self.graph.users()
        self.view = row_view(self.shares, self.graph)
        seen = self.view.seen(x, self.users)
        assert seen is not None
        logits = cast(seen, carried(x.dtype))
        self.greatest = make(ops.Reduce("max", self.view.dims, True), logits, where=self.shares.where)
        self.most = make(ops.Detach(), self.greatest)  # any shift would do: what comes back through it is rounding
        away = pointwise("exp", pointwise("sub", logits, self.most))
        self.total = make(ops.Reduce("sum", self.view.dims, True), away, where=self.shares.where)
        self.rows[self.shares] = self._share(seen)
        self.elements.add(self.shares)

    @property
    def _kept(self) -> tuple[Size, ...]:
        """The shape of a number per row, as rows have it."""
        return self.view.number

    def found(self) -> tuple[dict[Node, tuple[Node, Node]], Node] | None:
        """The values that others read, what they are then, and the numbers or elements of rows that these are made of;
        and the maximum of rows.  `None` where there are too many."""
        read_by_others: dict[Node, None] = {}
        for node in self.graph.nodes():
            read = [a for a in node.inputs if a in self.rows]
            if not read or node in self.rows:
                continue
            row = self._row(node)
            found = self._end(node) if row is None else None
            if row is not None:
                self.rows[node] = row
            elif found is not None:
                self.ends[node] = found
            else:
                read_by_others.update(dict.fromkeys(read))
        read_by_others.update(dict.fromkeys(n for n in self.graph.roots() if n in self.rows))
        self.ends |= {n: (reshape(self.rows[n], n.shape), self.rows[n]) for n in read_by_others}
        if not 1 <= len(self.ends) <= MOST:
            return None
        if any(_is_slice(end) and end in self.graph.roots() for end in self.ends):
            return None  # it stays the view of more that it is
        below = topological([new for new, _ in self.ends.values()])
        return None if {*self.ends, self.shares}.intersection(below) else (self.ends, self.greatest)

    def _share(self, x: Node) -> Node:
        """The softmax of some logits of rows whose maximum and sum are known."""
        away = pointwise("sub", cast(x, self.most.dtype), self.most)
        log = self.op.log
        share = pointwise("sub", away, self._log) if log else pointwise("div", pointwise("exp", away), self.total)
        return cast(share, self.shares.dtype)

    @property
    def _log(self) -> Node:
        return pointwise("log", self.total)

    def _row(self, node: Node) -> Node | None:
        """A value as rows have it; `None` where it is none of these."""
        x, whole = node.arg(0), self.view.shape == self.shares.shape
        match node.op:
            case ops.Pointwise() | ops.Cast() | ops.Detach():
                return None if is_sized(node) else self._function(node)
            case ops.Reduce(dims=dims) if x in self.elements and dims == self.view.rows_of(x):
                return self._reduced(node)
            case ops.Reshape() if self._is_number(x) and node.shape in self.view.numbers:
                return self.rows[x]
            case ops.Reshape() if x in self.elements and node.shape in (self.view.flat, self.view.shape):
                self.elements.add(node)
                return self.rows[x]
            case ops.Slice(dim=self.dim) if x is self.shares and node.shape == self._kept and whole:
                return self._share(picked(self.shares.arg(0), self.users, lambda x: remade(node, [x])))
            case ops.Nll(reduction="none") if self._is_of_class(node):
                return self._loss(node)
        return None

    def _is_number(self, node: Node) -> bool:
        return node in self.rows and node not in self.elements

    def _function(self, node: Node) -> Node | None:
        """Elements of elements and numbers, or a number of numbers."""
        read = [a for a in node.inputs if a in self.rows]
        alike = (node.shape, self.view.number_of(node))
        if node.shape in (self.view.flat, self.view.shape) and all(a.shape in alike for a in read):
            args = [None if a is None else self.rows.get(a) or self._seen(a, node) for a in node.args]
            if any(b is None for a, b in zip(node.args, args, strict=True) if a is not None):
                return None
            self.elements.add(node)
            return remade(node, args)
        if node.shape not in self.view.numbers or any(not self._is_number(a) for a in read):
            return None
        if any(a.ndim and a.shape != node.shape for a in node.inputs):
            return None
        return remade(node, (a if a is None or not a.ndim else self.rows.get(a) or self._number(a) for a in node.args))

    def _seen(self, a: Node, node: Node) -> Node | None:
        """What is no part of this, as what is made of elements reads it."""
        return a if node.shape == self.view.shape else self.view.seen(a, self.users)

    def _number(self, a: Node) -> Node:
        """What is no part of this, as a number per row; a comparison is made once more, sooner than it is read."""
        if isinstance(a.op, ops.Pointwise) and a.op.fn in COMPARISONS and a not in self.rows:
            return remade(a, [n if n is None or not n.ndim else self._number(n) for n in a.args])
        return reshape(a, self._kept)

    def _reduced(self, node: Node) -> Node | None:
        """A number per row, of elements."""
        op = node.op
        assert isinstance(op, ops.Reduce)
        if op.kind not in kept_rows.KINDS or op.dtype not in (None, node.arg(0).dtype):
            return None
        return make(replace(op, dims=self.view.dims, keepdim=True), self.rows[node.arg(0)], where=node.where)

    def _loss(self, node: Node) -> Node:
        """What the class of each row costs: -share(x_t), weighted; x_t is any number where classes are ignored."""
        op, (_, target, weight) = node.op, node.args
        assert isinstance(op, ops.Nll) and target is not None

        def pick(x: Node) -> Node:
            return pointwise("neg", reshape(make(ops.Nll(op.ignore), x, target, None), self._kept))

        each = pointwise("neg", self._share(picked(self.shares.arg(0), self.users, pick)))
        weights = self._weights(node)
        if weight is not None and weights is not None:
            each = pointwise("mul", each, reshape(weights, self._kept))
        return counted(each, reshape(target, self._kept), op.ignore)

    def _weights(self, node: Node) -> Node | None:
        """The weights of classes, if there are any but 1."""
        _, target, weight = node.args
        assert isinstance(node.op, ops.Nll) and target is not None
        return class_weights(weight, target, node.op.ignore, node.dtype)

    def _end(self, node: Node) -> tuple[Node, Node] | None:
        """A reduction of more than rows, of elements or of the losses of classes; and of which numbers of rows."""
        match node.op:
            case ops.Reduce(kind="sum" | "mean" | "max" | "min", dims=dims):
                x = node.arg(0)
                within = x in self.elements and set(self.view.rows_of(x)) < set(dims)
                row = self._reduced(node) if within else None
                return None if row is None else (remade(node, [reshape(row, self.view.number_of(x))]), row)
            case ops.Nll(reduction=reduction) if self._is_of_class(node):
                row = self._loss(node)
                return cast(reduced(row, self._weights(node), reduction), node.dtype), row
        return None

    def _is_of_class(self, node: Node) -> bool:
        whole = self.view.shape == self.shares.shape
        return node.arg(0) is self.shares and self.op.log and self.dim == 1 and whole
