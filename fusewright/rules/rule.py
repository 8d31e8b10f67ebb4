"""What a rule is: a frozen record of algebra.

    name         the algebra itself, as one reads it: ``mean(conv(x, w)) = matmul(rangesum(x), w)``
    pattern      which nodes it looks at; every inner operation may have no other user (the engine refuses otherwise)
    condition    why it does not hold here, as one short phrase; `None` when it holds
    replacement  the new node, of the very type of the old one
    exactness    ``exact``: the same bits; ``reassociates``: the same real number for finite values, other rounding;
                 ``finite``: drops a dependence, so a NaN may vanish (off unless asked for)
    doc          before -> after, shapes, condition, class
    hides        what it leaves may no longer be what rules look for whose roots come later: a graph that it was
                 applied to is rewritten in the other order, too
    enables      it is taken where it costs nothing, for what it lets others do; it must end by itself, as views do that
                 only ever move outwards
    invests      it is taken where it costs less than the rule that it lets follow saves
    repeats      what it leaves may be a view of less memory, several elements in one place, or no view where there was
                 one: it is not applied to what is returned, or read by an operation that is not understood

A rule is written as its replacement, under the `rule` decorator, which makes it the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fusewright.ir.node import Node
from fusewright.ir.ops import Op

Exactness = Literal["exact", "reassociates", "finite"]
Match = Mapping[str, Node]


@dataclass(frozen=True)
class Pattern:
    """An operation with patterns for its arguments.

    `kinds` empty matches any node (a value the rule only passes on).  Fewer `args` than the node has leaves the rest
    free.  The matched node is bound to `name`.
    """

    name: str
    kinds: tuple[type[Op], ...] = ()
    args: tuple[Pattern, ...] = ()
    where: Callable[[Node], bool] | None = None

    def match(self, node: Node) -> dict[str, Node] | None:
        """The bindings, or `None` where the node is something else."""
        if self.kinds and not isinstance(node.op, self.kinds):
            return None
        if len(self.args) > len(node.args) or (self.where is not None and not self.where(node)):
            return None
        bindings = {self.name: node}
        for pattern, arg in zip(self.args, node.args, strict=False):
            inner = None if arg is None else pattern.match(arg)
            if inner is None:
                return None
            bindings.update(inner)
        return bindings

    def inner(self) -> list[str]:
        """The names of the operations below the root, which must have no other user."""
        return [n for p in self.args for n in ([p.name] if p.kinds else []) + p.inner()]


def op(
    name: str, *kinds: type[Op], of: tuple[Pattern, ...] = (), where: Callable[[Node], bool] | None = None
) -> Pattern:
    """A pattern for an operation of one of `kinds` whose first arguments match `of`."""
    assert kinds, "an operation pattern names its operation; use `value` for anything"
    return Pattern(name, kinds, of, where)


def value(name: str) -> Pattern:
    """A pattern for any value."""
    return Pattern(name)


@dataclass(frozen=True)
class Rule:
    """One piece of algebra; see the module's docstring."""

    name: str
    pattern: Pattern
    condition: Callable[[Match], str | None]
    replacement: Callable[[Match], Node]
    exactness: Exactness | Callable[[Match], Exactness]
    doc: str
    enables: bool = False
    hides: bool = False
    invests: bool = False
    repeats: bool = False

    def classify(self, match: Match) -> Exactness:
        """The exactness class of this instance."""
        return self.exactness(match) if callable(self.exactness) else self.exactness


def rule(
    name: str,
    *,
    pattern: Pattern,
    condition: Callable[[Match], str | None],
    exactness: Exactness | Callable[[Match], Exactness],
    enables: bool = False,
    hides: bool = False,
    invests: bool = False,
    repeats: bool = False,
) -> Callable[[Callable[[Match], Node]], Rule]:
    """Make a replacement function the `Rule` it completes; its docstring says before -> after, shapes, condition."""

    def complete(replacement: Callable[[Match], Node]) -> Rule:
        assert replacement.__doc__, f"{name} has no docstring"
        doc = replacement.__doc__
        return Rule(name, pattern, condition, replacement, exactness, doc, enables, hides, invests, repeats)

    return complete
