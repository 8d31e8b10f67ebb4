"""Graph -> Graph with kernel groups: which subgraphs one generated kernel could compute.

Families are tried in order.  Those with an *anchor* (a convolution, a range sum) start there and take in as much of
what follows as they can; the others start from the last node that wants computing and reach back.  What is no group
stays as it is.  Nothing here knows a target; whether a group becomes a kernel is the caller's decision.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, UnionType
from typing import Any

from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.memory_order import Order, output_orders
from fusewright.ir.node import Graph, Node, Symbol, make, remade, topological
from fusewright.schedule import (
    chain,
    contraction,
    kept_rows,
    matmul,
    normalization,
    partial,
    product,
    range_steps,
    range_sums,
    rearrangement,
    sample,
    scan,
    several_elements,
    several_folds,
    stream,
)
from fusewright.schedule.again import computed_again
from fusewright.schedule.beside import Readers, readers_of
from fusewright.schedule.chain import Fold, Users
from fusewright.schedule.partial import Split

# A chain longer than this many operations is not searched to its end.
REACH = 32
# As if so many others used a value: no family that asks takes it in.
APART = 1 << 20


@dataclass(frozen=True)
class Group:
    """A subgraph that a family covers: from `operands` to `root`; `record` is the family's own description of it.

    also     values on the way that others read as well, which are results beside `root`
    split    where the group is the first step of a reduction, the reduction: `root` is not in the graph then
    shorter  the group from the same anchor that ends in front of a pool, a softmax or a residual, which this one takes
             in, if any
    """

    family: str
    record: Any
    root: Node
    operands: tuple[Node, ...]
    also: tuple[Node, ...] = ()
    split: Split | None = None
    shorter: Group | None = None

    @property
    def results(self) -> tuple[Node, ...]:
        """All values that are there for others, the last node first."""
        return (self.root, *self.also)

    @property
    def inner(self) -> tuple[Node, ...]:
        """The nodes computed inside, operands before users."""
        return tuple(n for n in topological(self.results, self.operands) if not isinstance(n.op, ops.Number))

    @property
    def name(self) -> str:
        """After its chain in short words, as the model had it: a pool that slid before its convolution follows it."""
        words = [(n, w) for n in self.inner if (w := chain.word(n)) is not None]
        if isinstance(self.record, contraction.Contraction) and self.record.box is not None:
            words = [(n, w) for n, w in words if not isinstance(n.op, ops.RangeSum)]
            at = next(i for i, (n, _) in enumerate(words) if n is self.record.conv)
            words.insert(at + 1, (self.record.conv, "avg"))
        if not words and isinstance(self.record, rearrangement.Rearrangement):
            return chain.chain_name(["rearrange"])
        return chain.chain_name([w for _, w in words])

    @property
    def bodies(self) -> tuple[Node, ...]:
        """Its results over placeholders for the operands: the very same of groups that compute the same."""
        return bodies(self.results, self.operands)

    def fused(self, name: str) -> Node:
        """The node that stands for the group."""
        first, *also = self.bodies
        return make(Fused(name, first, tuple(also)), *self.operands, where=self.root.where)

    def placed(self, graph: Graph, node: Node) -> tuple[Graph, dict[Node, Node]]:
        """`graph` with `node` computing what the group does, and what has become of each of its nodes."""
        if self.split is not None:
            return graph.substituted({self.split.root: self.split.whole(node)})
        if not self.also:
            return graph.substituted({self.root: node})
        items = [make(ops.Item(i, n.type), node, where=n.where) for i, n in enumerate(self.results)]
        return graph.substituted(dict(zip(self.results, items, strict=True)))

    def behind(self, node: Node) -> Node:
        """The group's last node, computed from `node` in place of what the shorter one computes."""
        assert self.shorter is not None
        (root,) = Graph((), (self.root,)).substitute(self.shorter.root, node).outputs
        assert isinstance(root, Node)
        return root

    def rest(self) -> Graph:
        """What is left of the group behind the shorter one; what else varies from call to call is an input as well."""
        assert self.shorter is not None
        operands = (self.shorter.root, *(n for n in self.operands if n.varies))
        return as_graph(bodies((self.root,), operands), operands)


@dataclass(frozen=True)
class Family:
    """How to find groups of one kind: `match` takes a last node; `anchor` is the kind of node a group starts at;
    `split` finds the part of a last node that a group may end in; `early` is where it may end sooner; `also` are values
    on the way, or beside it, that its kernels write as well; `beside` says whether `match` looks for such and so wants
    to know who reads each value; `again` whether its groups compute themselves what is cheap, though others read it as
    well (`schedule.again`); `traps` whether a GPU's kernels end as eager does at a number that a function refuses."""

    name: str
    match: Callable[..., Any]
    operands: Callable[[Any], tuple[Node, ...]]
    anchor: type[ops.Op] | UnionType | None = None
    split: Callable[[Node, Users], Split | None] = lambda root, users: None
    early: Callable[[Any], Node | None] = lambda record: None
    also: Callable[[Any], tuple[Node, ...]] = lambda record: ()
    beside: bool = False
    again: bool = False
    traps: bool = False


def _sample(root: Node, users: Users) -> Any:
    def divided(node: Node) -> bool:
        return isinstance(stream.parse(node, users), stream.Stream)

    return sample.parse(root, lambda node: users[node] == 1, divided=divided)


def _sample_apart(root: Node, users: Users, readers: Readers) -> Any:
    """A sample program, unless all it does are reductions that one pass has, or one that others of what it reads are
    found with."""
    found = _sample(root, users)
    if isinstance(found, str):
        return found
    joins = {n for n in found.inner if isinstance(n.op, (*sample.ROWS, ops.Matmul))}
    for one_pass in (stream.parse(root, users), several_folds.parse(root, users)):
        if not isinstance(one_pass, str) and joins == {step.node for step in _folds(one_pass)}:
            return f"{root!r} is made of reductions that one pass has"
    beside = len(joins) == 1 and several_folds.is_beside(root, users, readers)
    return f"{root!r} is reduced beside others" if beside else found


def _folds(one_pass: stream.Stream | several_folds.SeveralFolds) -> list[Fold]:
    return [fold for fold, _ in one_pass.folds] if isinstance(one_pass, stream.Stream) else list(one_pass.folds)


def _reducing(root: Node, users: Users) -> Any:
    found = stream.parse(root, users)
    flat = isinstance(found, stream.Stream) and not found.folds and found.window is None
    return f"{root!r} reduces nothing" if flat else found


def _elements(root: Node, users: Users) -> Any:
    """A rearrangement, or a stream that reduces nothing where that reads the same tensors as they lie."""
    found, other = rearrangement.parse(root, users), stream.parse(root, users)
    if isinstance(found, str) or isinstance(other, str):
        return other if isinstance(found, str) else found
    return other if set(map(_base, other.tensors)) == set(found.tensors) else found


def _functions(root: Node, users: Users) -> Any:
    """A stream of what was no kernel as a rearrangement: it reads copies."""
    found = _elements(root, users)
    return stream.parse(root, users) if isinstance(found, rearrangement.Rearrangement) else f"{root!r} moves nothing"


def _others(record: Any) -> tuple[Node, ...]:
    """The results of a group but for its last node."""
    others: tuple[Node, ...] = record.results[1:]
    return others


def _base(x: Node) -> Node:
    """The tensor whose memory a reshape shows."""
    while isinstance(x.op, ops.Reshape) and rearrangement.shows(x):
        x = x.arg(0)
    return x


def _range(root: Node, users: Users) -> Any:
    found = range_sums.parse(root, lambda node: users[node] == 1)
    in_steps = not isinstance(found, str) and range_steps.in_steps(found)
    return f"{root!r} is summed over its inner dimensions first" if in_steps else found


def _range_split(root: Node, users: Users) -> Split | None:
    """The two steps of a range sum; what moves its results follows the second."""
    found = range_sums.parse(root, lambda node: users[node] == 1) if isinstance(root.op, ops.RangeSum) else ""
    return None if isinstance(found, str) or not range_steps.in_steps(found) else range_steps.split(root, found)


SAMPLES = Family("sample program", _sample, lambda s: tuple(n for n in s.leaves if not isinstance(n.op, ops.Full)))
SAMPLES_APART = replace(SAMPLES, match=_sample_apart, beside=True)
ELEMENTS = Family("stream", _elements, lambda s: s.tensors, again=True, traps=True)
NORMALIZATION = Family("normalization", normalization.parse, lambda n: n.tensors, ops.Norm | ops.Softmax)
LARGE = replace(NORMALIZATION, match=normalization.parse_large)
MOVING = replace(NORMALIZATION, match=normalization.parse_moving)
LARGE_MOVING = replace(LARGE, match=functools.partial(normalization.parse_large, parse=normalization.parse_moving))
SHARED = Family(
    "normalization",
    normalization.parse_shared,
    lambda n: n.tensors,
    ops.Norm | ops.Softmax,
    also=lambda n: () if n.also is None else (n.also,),
)

_SEVERAL: dict[str, Any] = {"operands": lambda s: s.tensors, "also": _others, "beside": True, "again": True}
REDUCTIONS = Family("several reductions", several_folds.parse_beside, **_SEVERAL, traps=True)
VALUES = Family("several elements", several_elements.parse, **_SEVERAL)
REDUCING = Family("stream", _reducing, lambda s: s.tensors, again=True, traps=True)
FUNCTIONS = Family("stream", _functions, lambda s: s.tensors, again=True, traps=True)

TOGETHER = Family("several reductions", several_folds.parse, lambda s: s.tensors, again=True, traps=True)

FAMILIES = (
    Family("contraction", contraction.match, lambda c: c.tensors, ops.Conv, partial.split, contraction.may_end),
    Family("product", product.match, lambda p: p.tensors, ops.Matmul),
    Family("range reduction", _range, lambda r: (r.x,), ops.RangeSum, _range_split),
    Family("stream", stream.parse, lambda s: s.tensors, ops.Embedding),
    Family("statistics", normalization.parse_statistics, lambda c: c.sums.tensors, ops.Statistics),
    SHARED,
    LARGE_MOVING,
    Family("kept rows", kept_rows.parse, lambda k: k.tensors, ops.Reduce, also=lambda k: k.roots[1:], beside=True),
    Family("scan", scan.parse, lambda s: s.tensors, ops.Scan),
    SAMPLES_APART,
    Family("matmul", matmul.match, lambda m: m.tensors, ops.Matmul),
    MOVING,
    # The last ones: whatever no group has computed by now is in memory.
    TOGETHER,
    REDUCTIONS,
    REDUCING,
    VALUES,
    ELEMENTS,
    FUNCTIONS,
)

# Where nobody moves elements in a kernel, looking for such groups would be in vain; nor has a kernel several results.
_STILL = {
    **{LARGE_MOVING: LARGE, MOVING: NORMALIZATION, SAMPLES_APART: SAMPLES},
    TOGETHER: replace(TOGETHER, traps=False),  # loops of a CPU remember nothing to raise
}
STILL = (
    *(_STILL.get(f, f) for f in FAMILIES if f not in (SHARED, REDUCTIONS, REDUCING, VALUES, ELEMENTS, FUNCTIONS)),
    Family("stream", stream.parse, lambda s: s.tensors, again=True),
)

Decide = Callable[[Group], Node | None]


def cut(
    graph: Graph,
    decide: Decide,
    alone: Callable[[Node], bool] = lambda _: False,
    orders: Mapping[Node, Order] = MappingProxyType({}),
    *,
    moves: bool = True,
) -> Graph:
    """`graph` with every group for which `decide` gives a node replaced by that node; rearrangements are among the
    groups where kernels move elements (`moves`).

    Operations for which `alone` holds are in no group; nor is what would make the results lie in memory otherwise,
    where the sources that do not lie row by row have these `orders`.  `decide` may take the shorter group of one it is
    given: the node is then what is left `behind` it, which is searched like the rest.
    """
    eager, known = output_orders(graph, orders, kernels=False), dict[Node, Order]()
    for family in FAMILIES if moves else STILL:
        graph = _dense(graph) if family is VALUES else graph
        declined: set[Node] = set()
        while (group := _next(graph, family, declined, alone)) is not None:
            if group.shorter is not None:
                behind, _ = group.placed(graph, group.behind(group.shorter.fused("")))
                alike = output_orders(behind, orders, kernels=True, known=known) == eager
                group = group if alike else replace(group, shorter=None)
            placed, _ = group.placed(graph, group.fused(""))
            alike = output_orders(placed, orders, kernels=True, known=known) == eager
            node = decide(group) if alike else None
            if node is None:
                ends = _ends(group) or _keys(family, group)
                declined.update(ends if ends - declined else _covered(group))  # or it would be found again
                continue
            graph, became = group.placed(graph, node)
            if family.anchor is None:  # from the outputs on: what follows is made anew, but no other group
                declined = {became.get(n, n) for n in declined}
    return graph


def _dense(graph: Graph) -> Graph:
    """`graph` with copies of the views that kernels would copy in every call to read them by rows.

    fused_layernorm(permute(x)) -> fused_layernorm(permute_copy(x)), which is a group of its own
    """
    while True:
        readers = (n for n in graph.nodes() if isinstance(n.op, Fused) and not _convolves(n))
        node = next((n for n in readers if any(map(rearrangement.turns, n.inputs))), None)
        if node is None:
            return graph
        args = (a if a is None or not rearrangement.turns(a) else _copied(a) for a in node.args)
        graph = graph.substitute(node, remade(node, args))


def _convolves(node: Node) -> bool:
    """Whether a kernel may read images whose channels lie last as they are."""
    assert isinstance(node.op, Fused)
    return any(isinstance(n.op, ops.Conv) for n in topological(node.op.bodies))


def _copied(view: Node) -> Node:
    assert isinstance(view.op, ops.Permute)
    return make(replace(view.op, copy=True), view.arg(0), where=view.where)


def with_statistics(
    graph: Graph,
    prefer: Callable[[Group], bool],
    alone: Callable[[Node], bool] = lambda _: False,
    orders: Mapping[Node, Order] = MappingProxyType({}),
) -> Graph:
    """`graph` with statistics of batches as values, where norms update running ones by them.

    What uses or updates them is in other groups then.  It is done where `prefer` wants the norm, without the update, in
    one kernel with what is around it: those groups take as long.  `alone` and `orders` are as in `cut`, for those
    groups would not be kernels otherwise.
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
        alike = graph.substitute(norm, pure)
        alike = replace(alike, effects=tuple(e for e in alike.effects if e is not pure))
        group = _longest(NORMALIZATION, pure, alike.nodes(), alike.users(), set())
        if group is None:
            continue
        eager, (placed, _) = output_orders(alike, orders, kernels=False), group.placed(alike, group.fused(""))
        if output_orders(placed, orders, kernels=True) == eager and prefer(group):
            y, update = normalization.apart(norm)
            graph = graph.substitute(norm, y)
            graph = replace(graph, effects=tuple(update if e is y else e for e in graph.effects))


def _keys(family: Family, group: Group) -> set[Node]:
    """What a group is remembered by: its anchor, all of several reductions of rows, or its results."""
    if family.anchor is None:
        return set(group.results)
    anchors = [n for n in _covered(group) if isinstance(n.op, family.anchor)]
    return set(anchors if isinstance(group.record, kept_rows.KeptRows) else anchors[:1])


def _ends(group: Group) -> set[Node]:
    """Where a group that is no kernel may not end, as it may pay still if it ends earlier: without a tail, with the
    softmax left to others, or ahead of what reads a tensor as large as the convolution's output; empty for others."""
    record = group.record
    if isinstance(record, contraction.Contraction) and record.elements:
        return chain.depends_on(topological([group.root], (*group.operands, record.conv)), record.elements)
    return {group.root} if any(getattr(record, name, None) is not None for name in ("tail", "shares")) else set()


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
    if family.beside:
        family = replace(family, match=functools.partial(family.match, readers=readers_of(graph)))
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
    operands = family.operands(record)
    name = "rearrangement" if isinstance(record, rearrangement.Rearrangement) else family.name
    group = Group(name, record, root, operands, family.also(record))
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


def _placeholder(i: int, node: Node) -> Node:
    """What stands for operand `i` in a body."""
    return make(ops.Input(node.shape, node.dtype, node.device, f"operand_{i}", i))


def bodies(results: tuple[Node, ...], operands: tuple[Node, ...]) -> tuple[Node, ...]:
    """A group's results over placeholders instead of its operands."""
    mapping = {node: _placeholder(i, node) for i, node in enumerate(operands)}
    for node in topological(results, operands):
        mapping[node] = remade(node, [None if a is None else mapping[a] for a in node.args])
    return tuple(mapping[result] for result in results)


def as_graph(results: tuple[Node, ...], operands: tuple[Node, ...]) -> Graph:
    """Bodies as a graph of their own; sizes that are symbols are read from the first operand that has them, or whole
    multiples of them, or so many more or fewer."""
    inputs = tuple(_placeholder(i, node) for i, node in enumerate(operands))
    symbols: dict[Any, Symbol] = {}
    for i, node in enumerate(inputs):
        for dim, length in enumerate(node.shape):
            if isinstance(length, int):
                continue
            more, multiple = length.as_coeff_Add()
            times, symbol = multiple.as_coeff_Mul()
            if not (symbol.is_Symbol and times.is_Integer and times > 0 and more.is_Integer):
                continue
            found, known = Symbol(i, dim, 0, None, int(times), int(more)), symbols.get(symbol)
            if known is None or (known.times, known.more != 0) > (found.times, found.more != 0):
                symbols[symbol] = found
    return Graph(inputs, results, symbols=symbols)


def sizes(node: Node, hints: Mapping[Any, int]) -> tuple[int, ...]:
    """A shape with symbols at their hints."""
    return tuple(d if isinstance(d, int) else int(d.subs(hints)) for d in node.shape)


def signature(group: Group) -> str:
    """What a group computes: the same for another batch or image of the same model, whose sizes are left out."""
    kinds = [f"{type(n.op).__name__} {_attributes(n)}" for n in group.inner]
    operands = [f"{n.ndim if n.varies else n.shape} {n.dtype}" for n in group.operands]
    results = f", {len(group.also)} more" if group.also else ""
    return f"{group.family}: {'; '.join(kinds)} of {', '.join(operands)}{results}"


def _attributes(node: Node) -> str:
    if isinstance(node.op, ops.RangeSum):  # its table lists positions
        return ", ".join(f"{dim}: {len(slots)}" for dim, slots in node.op.table if len(slots) <= 16)
    if isinstance(node.op, ops.Reshape | ops.Expand | ops.Slice | ops.Input):
        return ""
    if isinstance(node.op, ops.Full):
        return str(node.dtype)
    return repr(node.op)
