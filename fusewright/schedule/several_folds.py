"""The family of several reductions: of values that are computed from the same memory, and numbers made of all results.

    (p * t).sum((1, 2)) / (p.sum((1, 2)) + t.sum((1, 2)))          1 - mean(x * y) / mean(x * x)

    before   p, t -> a sum; p -> a sum; t -> a sum, and what is made of them       reads p and t twice
    after    p, t -> what is made of three sums                                    reads them once

All of them reduce values of one shape over the same dimensions.  Rows that are short are kept (`schedule.kept_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule import stream
from fusewright.schedule.chain import POINTWISE, Fold, Users, pointwise_tree
from fusewright.schedule.stream import Stage, Stream, Tree

# A thread carries so many reductions at most.
MOST = 4


@dataclass(frozen=True)
class SeveralFolds:
    """A chain of this family.

    folds   the reductions, of what pointwise operations make of the elements that `within` reads
    within  the first of them, and what is made of all, as a stream
    """

    folds: tuple[Fold, ...]
    within: Stream

    @property
    def tensors(self) -> tuple[Node, ...]:
        return self.within.tensors


def parse(root: Node, users: Users) -> SeveralFolds | str:
    """The chain of this family that ends in `root`, or why there is none."""
    if not isinstance(root.op, POINTWISE):
        return f"{root!r} is made of no results"
    leaves, own = pointwise_tree(root, users)
    folds = tuple(Fold(n) for n in own if isinstance(n.op, ops.Reduce))
    if not 2 <= len(folds) <= MOST or len({(f.node.arg(0).shape, f.op.dims, f.op.keepdim) for f in folds}) > 1:
        return f"{root!r} is not made of a few reductions of one shape over the same dimensions"
    elements = _elements(folds, users)
    if isinstance(elements, str):
        return elements
    tail = Tree(root, leaves, folds[0].node)
    steps: list[Stage] = [*folds, *(Tree(n, n.inputs, None) for n in elements.computed), tail]
    problem = next(filter(None, map(stream.unsupported, steps)), None)
    if problem:
        return problem
    others = {f.node for f in folds[1:]}
    tail = Tree(root, tuple(n for n in leaves if n not in others), folds[0].node)
    found = stream.of_reductions(folds[0], elements.leaves, tail, users)
    return found if isinstance(found, str) else SeveralFolds(folds, found)


@dataclass(frozen=True)
class _Elements:
    """What the reductions are of: pointwise operations, and what these read."""

    computed: tuple[Node, ...]
    leaves: tuple[Node, ...]


def _elements(folds: Sequence[Fold], users: Users) -> _Elements | str:
    """What nobody else uses is computed; two of the reductions have something in memory in common."""
    shape = folds[0].node.arg(0).shape
    computed: dict[Node, None] = {}
    while True:
        uses: dict[Node, int] = {}
        for reader in (*(f.node for f in folds), *computed):
            for a in reader.inputs:
                uses[a] = uses.get(a, 0) + 1
        read = {n: count for n, count in uses.items() if n not in computed and not isinstance(n.op, ops.Number)}
        own = [n for n, count in read.items() if count >= users[n] and n.shape == shape]
        grown = [n for n in own if isinstance(n.op, POINTWISE)]
        if not grown:
            break
        computed.update(dict.fromkeys(grown))
    if any(isinstance(n.op, ops.Pool | ops.Reduce | ops.Embedding | ops.Cat) for n in own):
        return "a reduction is of more than pointwise operations"
    known = set(computed)
    whole = [{n for n in _below(f.node, known) if n.shape == shape} for f in folds]
    if sum(map(len, whole)) == len(set().union(*whole)):
        return "no two reductions read the same"
    return _Elements(tuple(computed), tuple(read))


def _below(node: Node, computed: set[Node]) -> set[Node]:
    """What is read for `node`."""
    found: set[Node] = set()
    seen: set[Node] = set()
    stack = list(node.inputs)
    while stack:
        a = stack.pop()
        if a in computed and a not in seen:
            seen.add(a)
            stack += a.inputs
        elif a not in computed and not isinstance(a.op, ops.Number):
            found.add(a)
    return found
