"""Graph -> Graph: rules to a fixpoint, each application judged by the cost model.

Every root where rules match is offered all of them; the one that leaves the least work is taken.  ``cost`` takes it
when it saves time (one that enables others, when it costs none), ``always`` whenever it is valid (so that a test on a
small shape cannot pass by doing nothing).

Which roots come first matters: a pool that slides in front of a convolution of many features is in the way of a sum
over them, which leaves one.  ``cost`` goes from the inputs on, and where such rules were applied (`Rule.hides`) once
more from the outputs on, which is kept if it takes much less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fusewright.ir.node import Graph, Node, topological
from fusewright.ir.ops import Cast, Detach, Expand, Opaque, Permute, Reshape, Slice, Windows
from fusewright.plan import Declined, Fired, Work
from fusewright.rules.rule import Exactness, Match, Rule

Mode = Literal["cost", "always", "never"]
NodeCost = Callable[[Node], Work]

# A rewrite must save this share of what it replaces, so that rounding in the cost model decides nothing.
WORTHWHILE = 1e-3

# The share of a graph's time that another one may take that is kept in its place.  The cost model may be wrong by as
# much: it does not see that few large windows keep no device busy.
MUCH_LESS = 0.5

# What may show the memory of its argument.
VIEWS = (Cast, Detach, Expand, Permute, Reshape, Slice, Windows)

FINITE_ONLY = "holds for finite values only; allow it with finite=True"


@dataclass(frozen=True)
class Rewritten:
    """A rewritten graph with the story of how it came about."""

    graph: Graph
    fired: tuple[Fired, ...]
    declined: tuple[Declined, ...]


@dataclass(frozen=True)
class _Offer:
    """One valid application: what it would replace, and the seconds it would save."""

    rule: Rule
    root: Node
    new: Node
    exactness: Exactness
    saves: float
    of: float

    @property
    def pays(self) -> bool:
        """Whether it saves time, or costs none and enables others that may."""
        return self.saves > (-WORTHWHILE if self.rule.enables else WORTHWHILE) * self.of


def rewrite(
    graph: Graph,
    rules: Sequence[Rule],
    cost: NodeCost,
    *,
    mode: Mode = "cost",
    finite: bool = False,
    fusing: bool = False,
    alone: Callable[[Node], bool] = lambda _: False,
    whole: NodeCost | None = None,
) -> Rewritten:
    """Apply `rules` to `graph` until none is left that is valid (and, under ``cost``, pays).

    `cost` gives the work of one node.  ``finite`` rules are only taken when `finite` is set.  Valid in, valid out.
    Where no application saved anything under ``cost``, those that only enable are taken back, unless kernels that may
    use them follow (`fusing`).  Operations for which `alone` holds stay as they are.  The two orders are compared by
    `whole`, the work of a node that knows more of the target than single steps are judged by; by `cost` without it.
    """
    if mode == "never":
        return Rewritten(graph, (), ())
    search = _Search(rules, cost, mode, finite, fusing, alone)
    found = search.fixpoint(graph, backwards=False)
    hiding = {rule.name for rule in rules if rule.hides}
    if mode == "always" or hiding.isdisjoint(f.rule for f in found.fired):
        return found
    other = search.fixpoint(graph, backwards=True)
    whole = whole or cost
    much_less = total(other.graph, whole).seconds < MUCH_LESS * total(found.graph, whole).seconds
    return other if much_less else found


def total(graph: Graph, cost: NodeCost) -> Work:
    """The work of all live nodes."""
    works = [cost(n) for n in graph.nodes()]
    return Work(
        flops=sum(w.flops for w in works),
        bytes=sum(w.bytes for w in works),
        launches=sum(w.launches for w in works),
        seconds=sum(w.seconds for w in works),
    )


@dataclass(frozen=True)
class _Search:
    """What `rewrite` was asked for."""

    rules: Sequence[Rule]
    cost: NodeCost
    mode: Mode
    finite: bool
    fusing: bool
    alone: Callable[[Node], bool]
    known: dict[Node, tuple[tuple[Rule, Match, str | None], ...]] = field(default_factory=dict)

    def _matches(self, root: Node) -> tuple[tuple[Rule, Match, str | None], ...]:
        """The rules whose patterns match at a node, and why one does not hold there: what it says of itself, whatever
        the graph, is asked for once."""
        found = self.known.get(root)
        if found is None:
            matches = ((rule, rule.pattern.match(root)) for rule in self.rules)
            found = tuple((rule, match, _unmet(rule, match)) for rule, match in matches if match is not None)
            self.known[root] = found
        return found

    def fixpoint(self, graph: Graph, *, backwards: bool) -> Rewritten:
        """The graph when no rule is left to apply, from the inputs on, or `backwards` from the outputs on."""
        original, saved = graph, self.mode == "always" or self.fusing
        fired: list[Fired] = []
        declined: dict[tuple[str, Node], Declined] = {}
        work = total(graph, self.cost)
        limit = 20 * len(graph.nodes()) + 100
        for _ in range(limit):
            offer, rivals = self._next(graph, backwards, declined)
            if offer is None:
                kept = set(graph.nodes())
                left = tuple(d for (_, n), d in declined.items() if n in kept)
                return Rewritten(graph, tuple(fired), left) if saved else Rewritten(original, (), left)
            saved = saved or offer.saves > WORTHWHILE * offer.of
            graph = graph.substitute(offer.root, offer.new)
            before, work = work, total(graph, self.cost)
            fired.append(Fired(offer.rule.name, _place(offer.root), offer.exactness, before, work, rivals))
        raise AssertionError(f"rules did not reach a fixpoint in {limit} steps: {[f.rule for f in fired[-6:]]}")

    def _next(
        self, graph: Graph, backwards: bool, declined: dict[tuple[str, Node], Declined]
    ) -> tuple[_Offer | None, tuple[str, ...]]:
        """The first application to take, and the other rules that could be applied there."""
        users, nodes, seen = graph.users(), graph.nodes(), _seen(graph)
        for root in reversed(nodes) if backwards else nodes:
            offers = self._offers(root, users, seen, declined)
            worth = (o for o in offers if self.mode == "always" or o.pays or self._leads(graph, o))
            best = max(worth, key=lambda o: o.saves, default=None)
            if best is not None:
                return best, tuple(o.rule.name for o in offers if o is not best)
            for offer in (o for o in offers if self.cost(root).seconds > 0):
                reason = f"would not pay: {-offer.saves * 1e6:+.1f} us by the cost model"
                declined[offer.rule.name, root] = Declined(offer.rule.name, _place(root), reason)
        return None, ()

    def _offers(
        self,
        root: Node,
        users: dict[Node, int],
        seen: Collection[Node],
        declined: dict[tuple[str, Node], Declined],
    ) -> list[_Offer]:
        """The valid applications at a node; why others are not is told in `declined`."""
        offers: list[_Offer] = []
        for rule, match, unmet in self._matches(root):
            if any(self.alone(node) for node in _operations(rule, match)):
                continue
            reason = _refused(rule, match, users, self.finite) if unmet is None else unmet
            if reason is None and rule.repeats and root in seen:
                reason = "its memory is seen from outside"
            if reason is None:
                offers.append(_offer(rule, match, root, users, self.cost))
            elif reason == FINITE_ONLY or (rule.pattern.inner() and self.cost(root).seconds > 0):
                # any other reason of a rule about one operation, or about views, mostly says: not its case
                declined[rule.name, root] = Declined(rule.name, _place(root), reason)
        return offers

    def _leads(self, graph: Graph, offer: _Offer) -> bool:
        """Whether an application that is made for the next one costs less than that saves."""
        if not offer.rule.invests:
            return False
        before, after = set(graph.nodes()), graph.substitute(offer.root, offer.new)
        users, seen = after.users(), _seen(after)
        born = [node for node in after.nodes() if node not in before]
        saved = (o.saves for node in born for o in self._offers(node, users, seen, {}) if o.pays)
        return offer.saves + max(saved, default=0.0) > WORTHWHILE * offer.of


def _seen(graph: Graph) -> set[Node]:
    """The values whose memory the caller may see, or an operation that is not understood, as it is or by a view."""
    seen = {o for o in graph.outputs if isinstance(o, Node)}
    for node in reversed(graph.nodes()):
        if isinstance(node.op, Opaque) or node.op.effectful or (node in seen and isinstance(node.op, VIEWS)):
            seen.update(node.inputs)
    return seen


def refusal(rule: Rule, match: Match, users: dict[Node, int], finite: bool) -> str | None:
    """Why `rule` may not be applied at this match; `None` when it may."""
    # The condition first: "has another user" is told as the one thing in the way.
    unmet = _unmet(rule, match)
    return _refused(rule, match, users, finite) if unmet is None else unmet


def _unmet(rule: Rule, match: Match) -> str | None:
    """Why it may not be at what it matches."""
    if any(n.op.effectful for n in match.values() if n in _operations(rule, match)):
        return "an operation with effects stays where it is"
    return rule.condition(match)


def _refused(rule: Rule, match: Match, users: dict[Node, int], finite: bool) -> str | None:
    """Why it may not be in this graph."""
    shared = [name for name in rule.pattern.inner() if users.get(match[name], 0) > 1]
    if shared:
        return f"the {shared[0]} has another user"
    if rule.classify(match) == "finite" and not finite:
        return FINITE_ONLY
    return None


def _operations(rule: Rule, match: Match) -> list[Node]:
    return [match[name] for name in (rule.pattern.name, *rule.pattern.inner())]


def _offer(rule: Rule, match: Match, root: Node, users: dict[Node, int], cost: NodeCost) -> _Offer:
    new = rule.replacement(match)
    same = (new.shape, new.dtype, new.device) == (root.shape, root.dtype, root.device)
    assert same, f"{rule.name} turned {root!r} into {new!r}"
    assert new is not root, f"{rule.name} left {root!r} as it was"
    born = topological([new], users)
    dying = sum(cost(n).seconds for n in _dying(root, new, born, users))
    return _Offer(rule, root, new, rule.classify(match), dying - sum(cost(n).seconds for n in born), dying)


def _dying(root: Node, new: Node, born: Sequence[Node], users: Mapping[Node, int]) -> list[Node]:
    """The nodes that nothing uses any more once `new` stands for `root`."""
    left = Counter({new: 1})  # uses, of what is asked for
    left.update(arg for node in born for arg in node.inputs)
    dead: list[Node] = []
    stack = [root] if root not in left else []
    counted: set[Node] = set()
    while stack:
        node = stack.pop()
        dead.append(node)
        for arg in node.inputs:
            if arg not in counted:
                counted.add(arg)
                left[arg] += users[arg]
            left[arg] -= 1
            if left[arg] == 0 and not arg.op.effectful:
                stack.append(arg)
    return dead


def _place(node: Node) -> str:
    """Where a node came from, for messages."""
    return node.where or f"{type(node.op).__name__} ({', '.join(map(str, node.shape))})"
