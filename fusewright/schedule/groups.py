"""Graph -> Graph with kernel groups: which subgraphs one generated kernel could compute.

Families are tried in order.  Those with an *anchor* (a convolution, a range sum) start there and take in as much of
what follows as they can; the others start from the last node that wants computing and reach back.  What is no group
stays as it is.  Nothing here knows a target; whether a group becomes a kernel is the caller's decision.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.memory_order import Order, lies_last, output_orders, rows_of
from fusewright.ir.node import Graph, Node, remade, topological
from fusewright.schedule import chain, contraction, matmul, normalization, rearrangement
from fusewright.schedule.again import computed_again
from fusewright.schedule.beside import readers_of
from fusewright.schedule.chain import Users
from fusewright.schedule.families import FAMILIES, NORMALIZATION, STATISTICS, STILL, VALUES, Family
from fusewright.schedule.group import Group
from fusewright.schedule.held import as_held
from fusewright.schedule.kept_rows_record import KeptRows
from fusewright.schedule.turned_parts import in_rows
from fusewright.schedule.written_rows import wants_rows

# A chain longer than this many operations is not searched to its end.
REACH = 32
# As if so many others used a value: no family that asks takes it in.
APART = 1 << 20


Decide = Callable[[Group], Node | None]
# How values lie where kernels run, if results do as in eager.
Lies = Callable[[Graph], Mapping[Node, Order] | None]


def cut(
    graph: Graph,
    decide: Decide,
    alone: Callable[[Node], bool] = lambda _: False,
    orders: Mapping[Node, Order] = MappingProxyType({}),
    *,
    moves: bool = True,
    as_it_lies: Callable[[Node, int], bool] = lambda *_: False,
) -> Graph:
    """`graph` with every group for which `decide` gives a node replaced by that node; rearrangements are among the
    groups where kernels move elements (`moves`).

    Operations for which `alone` holds are in no group; nor is what would make the results lie in memory otherwise,
    where the sources that do not lie row by row have these `orders`.  `decide` may take the shorter group of one it is
    given: the node is then what is left `behind` it, which is searched like the rest.  What a kernel reads `as_it_lies`
    by such a number of an operand is not copied for it.
    """
    eager, known = output_orders(graph, orders, kernels=False), dict[Node, Order]()

    def lies(graph: Graph) -> Mapping[Node, Order] | None:
        return known if output_orders(graph, orders, kernels=True, known=known) == eager else None

    for family in FAMILIES if moves else STILL:
        graph = _dense(graph, as_it_lies) if family is VALUES else graph
        declined: set[Node] = set()
        while (group := _next(graph, family, declined, alone)) is not None:
            found = _lying(group, graph, lies, moves=moves)
            node = None if found is None else decide(found)
            if node is None:
                ends = _ends(group) or _keys(family, group)
                declined.update(ends if ends - declined else _covered(group))  # or it would be found again
                continue
            graph, became = group.placed(graph, node)
            if family.anchor is None:  # from the outputs on: what follows is made anew, but no other group
                declined = {became.get(n, n) for n in declined}
    return graph


def _lying(group: Group, graph: Graph, lies: Lies, *, moves: bool) -> Group | None:
    """`group` with the order that its result may have, and the shorter one with that, if there may be one; `None` where
    none leaves the results of `graph` as they lie in eager."""

    def whole(node: Node) -> Graph:
        return group.placed(graph, node)[0]

    def early(node: Node) -> Graph:
        return group.placed(graph, group.behind(node))[0]

    shorter = None if group.shorter is None else _ordered(group.shorter, early, lies, moves=moves)
    return _ordered(replace(group, shorter=shorter), whole, lies, moves=moves)


def _ordered(group: Group, place: Callable[[Node], Graph], lies: Lies, *, moves: bool) -> Group | None:
    """`group`, which `place` puts into a graph, with the order that its result may have.

    On a GPU, a convolution writes rows of images whose channels lie last where its readers want them (`wants_rows`), or
    where a kernel has nothing else.
    """
    node = group.fused("")
    graph = place(node)
    known = lies(graph)
    as_eager = None if known is None else group
    is_free = moves and isinstance(group.record, contraction.Contraction)
    if not is_free or (known is not None and known[node] == rows_of(node)):
        return as_eager
    in_rows = replace(group, order="rows")
    if lies(place(in_rows.fused(""))) is None:
        return as_eager
    return in_rows if known is None or wants_rows(node, graph, known) else replace(group, order="any")


def _dense(graph: Graph, as_it_lies: Callable[[Node, int], bool]) -> Graph:
    """`graph` with copies of the views that kernels would copy in every call to read them by rows.

    fused_layernorm(permute(x)) -> fused_layernorm(permute_copy(x)), which is a group of its own
    """

    def dense(node: Node, i: int, a: Node) -> Node:
        return a if as_it_lies(node, i) else in_rows(a)

    while True:
        readers = (n for n in graph.nodes() if isinstance(n.op, Fused) and not _convolves(n))
        turned = (n for n in readers if any(a and dense(n, i, a) is not a for i, a in enumerate(n.args)))
        node = next(turned, None)
        if node is None:
            return graph
        args = (None if a is None else dense(node, i, a) for i, a in enumerate(node.args))
        graph = graph.substitute(node, remade(node, args))


def _convolves(node: Node) -> bool:
    """Whether a kernel may read images whose channels lie last as they are."""
    assert isinstance(node.op, Fused)
    return any(isinstance(n.op, ops.Conv) for n in topological(node.op.bodies))


def with_statistics(
    graph: Graph,
    prefer: Callable[[Group], bool],
    alone: Callable[[Node], bool] = lambda _: False,
    orders: Mapping[Node, Order] = MappingProxyType({}),
) -> Graph:
    """`graph` with statistics of batches as values, where norms update running ones by them.

    What uses or updates them is in other groups then.  It is done where `prefer` wants the norm, without the update, in
    one kernel with what is around it: those groups take as long.  Of images whose channels lie last, which such kernels
    would write in rows, it is to want the statistics.  `alone` and `orders` are as in `cut`, for those groups would not
    be kernels otherwise.
    """
    tried: set[int | None] = set()
    while True:
        norms = (n for n in graph.nodes() if isinstance(n.op, ops.Norm) and n.op.serial not in tried and not alone(n))
        found = ((n, pure) for n in norms if (pure := normalization.without_running(n)) is not None)
        norm, pure = next(found, (None, None))
        if norm is None or pure is None:
            return graph
        assert isinstance(norm.op, ops.Norm)
        tried.add(norm.op.serial)
        y, statistics, update = normalization.apart(norm)
        changed = graph.substitute(norm, y)
        changed = replace(changed, effects=tuple(update if e is y else e for e in changed.effects))
        last = lies_last(norm.arg(0), orders, {})
        group = _of_statistics(changed, statistics) if last else _of_norm(graph, norm, pure, orders)
        if group is not None and prefer(group):
            graph = changed


def _of_statistics(graph: Graph, statistics: Node) -> Group | None:
    """The group of these statistics."""
    return _longest(_in(graph, STATISTICS), statistics, graph.nodes(), graph.users(), set())


def _of_norm(graph: Graph, norm: Node, pure: Node, orders: Mapping[Node, Order]) -> Group | None:
    """The group of `norm` without its update; `None` where there is none whose results would lie as eager's."""
    alike = graph.substitute(norm, pure)
    alike = replace(alike, effects=tuple(e for e in alike.effects if e is not pure))
    group = _longest(NORMALIZATION, pure, alike.nodes(), alike.users(), set())
    if group is None:
        return None
    eager, (placed, _) = output_orders(alike, orders, kernels=False), group.placed(alike, group.fused(""))
    return group if output_orders(placed, orders, kernels=True) == eager else None


def _keys(family: Family, group: Group) -> set[Node]:
    """What a group is remembered by: its anchor, all of several reductions of rows, or its results."""
    if family.anchor is None:
        return set(group.results)
    anchors = [n for n in _covered(group) if isinstance(n.op, family.anchor)]
    return set(anchors if isinstance(group.record, KeptRows) else anchors[:1])


def _ends(group: Group) -> set[Node]:
    """Where a group that is no kernel may not end, as it may pay still if it ends earlier: without a tail, with the
    softmax or what follows a reduction left to others, ahead of what reduces a product, or of what reads a tensor as
    large as the convolution's output; empty for others."""
    record = group.record
    if isinstance(record, contraction.Contraction) and record.elements:
        return chain.depends_on(topological([group.root], (*group.operands, record.conv)), record.elements)
    reduces = isinstance(record, matmul.Linear) and record.fold is not None
    shortens = reduces or any(getattr(record, name, None) is not None for name in ("tail", "shares", "last"))
    return {group.root} if shortens else set()


def _covered(group: Group) -> tuple[Node, ...]:
    """The nodes that a group computes, of the first step of one with the whole of it."""
    return group.inner if group.split is None else (group.split.root, *group.inner)


def _next(graph: Graph, family: Family, declined: set[Node], alone: Callable[[Node], bool]) -> Group | None:
    users, nodes = graph.users(), graph.nodes()
    apart = {node for node in nodes if alone(node) or (chain.refuses(node) and not family.traps)}
    users.update((node, users[node] + 2) for node in apart)  # as if others used it: no group takes it in
    if family.again:  # as if no others used it: every group takes it in
        users.update(dict.fromkeys(computed_again(graph, users, apart), 1))
    computed = {node for node in nodes if node.varies} - apart
    family = _in(graph, family)
    if family.anchor is None:
        for root in reversed(nodes):
            if root in computed and root not in declined and _may_end(root):
                group = _matched(family, root, users)
                if group is not None:
                    return group
        return None
    for anchor in nodes:
        if isinstance(anchor.op, family.anchor) and anchor in computed and anchor not in declined:
            group = _longest(family, anchor, nodes, users, apart | declined)
            if group is not None:
                return group
    return None


def _in(graph: Graph, family: Family) -> Family:
    """`family` with what it wants to know of a graph."""
    if not family.beside:
        return family
    return replace(family, match=functools.partial(family.match, readers=readers_of(graph)))


_ENDS = (
    *(ops.Pointwise, ops.Cast, ops.Pool, ops.Reduce, ops.Softmax, ops.Norm, ops.Matmul, ops.Reshape),
    *(ops.Permute, *rearrangement.MOVES),
)


def _may_end(node: Node) -> bool:
    return isinstance(node.op, _ENDS) and not (isinstance(node.op, ops.Norm) and node.op.effectful)


def _matched(family: Family, root: Node, users: Users) -> Group | None:
    record = family.match(root, users)
    if isinstance(record, str):
        return None
    seen = family.operands(record)
    name = "rearrangement" if isinstance(record, rearrangement.Rearrangement) else family.name
    group = Group(name, record, root, as_held(seen, record), family.also(record), seen=seen)
    if outside := _severed(group) or _late(group):
        told = any(users[n] >= APART for n in outside)  # this family takes in what others use as well
        apart = Counter(users) + Counter(dict.fromkeys(outside, APART))
        return None if told or root in outside else _matched(family, root, apart)
    return group if group.inner and _worth(group) else None


def _severed(group: Group) -> list[Node]:
    """The detached values on the way to a result that no gradient comes back from, where a kernel's would have one;
    empty where there is none such."""
    detached = [n for n in group.inner if isinstance(n.op, ops.Detach)]
    if not detached:
        return []
    reached = {n for n in group.operands if n.dtype.is_floating_point}
    for node in topological(group.results, group.operands):
        if not isinstance(node.op, ops.Detach) and any(a in reached for a in node.inputs):
            reached.add(node)
    return detached if any(r.dtype.is_floating_point and r not in reached for r in group.results) else []


def _late(group: Group) -> list[Node]:
    """The functions that refuse numbers elsewhere than ahead of reductions: only there do kernels remember."""
    refusing = [n for n in group.inner if chain.refuses(n)]
    if not refusing or isinstance(group.record, rearrangement.Rearrangement):
        return refusing
    joins = [n for n in group.inner if isinstance(n.op, ops.Reduce | ops.Pool)]
    if any(isinstance(n.op, ops.Pool) for n in joins):
        return refusing
    behind = chain.depends_on(group.inner, joins)
    return [n for n in refusing if n in behind]


def _worth(group: Group) -> bool:
    """Whether a group does anything but look at memory in another way, or brings elements into another order."""
    views = ops.Reshape | ops.Permute | ops.Expand | ops.Slice | ops.Windows
    moves = isinstance(group.record, rearrangement.Rearrangement)
    return moves or any(not isinstance(n.op, views) for n in group.inner)


def _longest(family: Family, anchor: Node, nodes: list[Node], users: Users, apart: set[Node]) -> Group | None:
    """The group from `anchor` to the furthest node behind it that the family reaches."""
    found: Group | None = None
    for root in (n for n in _downstream(anchor, nodes) if n not in apart):
        group = _matched(family, root, users) or _split(family, root, users)
        if group is not None and anchor in _covered(group):
            found = group
    return found if found is None else replace(found, shorter=_shorter(family, found, users))


def _shorter(family: Family, group: Group, users: Users) -> Group | None:
    """The group from the same anchor that ends where the family's may end early."""
    end = None if group.split is not None else family.early(group.record)
    return None if end is None else _matched(family, end, users)


def _split(family: Family, root: Node, users: Users) -> Group | None:
    """The group of the first step towards `root`."""
    split = family.split(root, users)
    group = None if split is None else _matched(family, split.part, split.users(users))
    return None if group is None else replace(group, split=split)


_FOLLOWS = (
    *(ops.Pointwise, ops.Cast, ops.Detach, ops.Pool, ops.Reduce),
    *(ops.Reshape, ops.Permute, ops.Expand, ops.Slice, ops.Matmul, ops.Softmax, ops.Norm),
    *(ops.Cat, ops.Flip, ops.Pad),
)


def _downstream(anchor: Node, nodes: list[Node]) -> Iterator[Node]:
    """`anchor` and what is computed from it, in order, as far as a chain may reach."""
    behind = {anchor}
    yield anchor
    for node in nodes:
        if node in behind or not any(a in behind for a in node.inputs):
            continue
        if isinstance(node.op, _FOLLOWS):
            behind.add(node)
            yield node
        if len(behind) > REACH:
            return
