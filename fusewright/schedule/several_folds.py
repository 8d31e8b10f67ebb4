"""The family of several reductions: of values that are computed from the same memory.

    (p * t).sum((1, 2)) / (p.sum((1, 2)) + t.sum((1, 2)))          mean(x, (2, 3)), amax(x, (2, 3))

    before   p, t -> a sum; p -> a sum; t -> a sum, and what is made of them       reads p and t twice
    after    p, t -> what is made of three sums                                    reads them once

All of them reduce values of one shape over the same dimensions.  One number is made of all results, or one of each,
side by side.  Rows that are short are kept (`schedule.kept_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule import stream
from fusewright.schedule.beside import MOST, Elements, Readers, elements, ends_of, gathered
from fusewright.schedule.chain import MEMORY, POINTWISE, Fold, Users, pointwise_tree
from fusewright.schedule.stream import Stage
from fusewright.schedule.stream_record import Stream, Tree, is_index


@dataclass(frozen=True)
class SeveralFolds:
    """A chain of this family.

    folds   the reductions, of what pointwise operations make of the elements that `within` reads
    within  the first of them, and what is made of all, as a stream
    tails   where each has a result of its own, what that is made of, the last one of the graph first
    """

    folds: tuple[Fold, ...]
    within: Stream
    tails: tuple[Tree, ...] = ()

    @property
    def results(self) -> tuple[Node, ...]:
        return tuple(tail.root for tail in self.tails) or (self.within.root,)

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
    if all(f.op.gives_index for f in folds):
        return f"{root!r} has no gradient"
    made = _elements(folds, users)
    if isinstance(made, str):
        return made
    tail = Tree(root, leaves, folds[0].node)
    steps: list[Stage] = [*folds, *(Tree(n, n.inputs, None) for n in made.computed), tail]
    problem = next(filter(None, map(stream.unsupported, steps)), None)
    if problem:
        return problem
    others = {f.node for f in folds[1:]}
    tail = Tree(root, tuple(n for n in leaves if n not in others), folds[0].node)
    found = stream.of_reductions(folds[0], made.leaves, tail, users)
    return found if isinstance(found, str) else SeveralFolds(folds, found)


def parse_beside(root: Node, users: Users, readers: Readers) -> SeveralFolds | str:
    """The reductions that the one which leads to `root` has for company, each with a result of its own."""
    fold = _reduced(root, users)
    if fold is None or _end(fold, users, readers) is not root:
        return f"{root!r} ends no reduction"
    x = fold.arg(0)

    def reductions(results: Sequence[Node]) -> list[Node]:
        return [n for n in (_reduced(result, users) for result in results) if n is not None]

    def of(results: Sequence[Node]) -> Elements:
        return elements(reductions(results), users, x.shape)

    def results_of(node: Node) -> Iterator[Node]:
        """Those that an element, or what reads it, leads to."""
        ends = [node] if isinstance(node.op, ops.Reduce) else ends_of(node, users, readers)
        for reduction in (n for end in ends for n in (end, *readers[end]) if _is_like(n, fold)):
            yield _end(reduction, users, readers)

    results = gathered(root, results_of, of, x.shape, users, readers)
    if len(results) == 1:
        return f"nothing else is reduced of what {root!r} reads"
    return side_by_side(results, reductions(results), users)


def is_beside(root: Node, users: Users, readers: Readers) -> bool:
    """Whether other reductions are found with the one that `root` is made of alone."""
    fold = _reduced(root, users)
    return fold is not None and not isinstance(parse_beside(_end(fold, users, readers), users, readers), str)


def side_by_side(results: Sequence[Node], reductions: Sequence[Node], users: Users) -> SeveralFolds | str:
    """These `results`, each made of one of the reductions, or why no kernel has them all."""
    folds = tuple(map(Fold, reductions))
    made = _elements(folds, users)
    if isinstance(made, str):
        return made
    tails = tuple(_tail(result, fold.node) for result, fold in zip(results, folds, strict=True))
    steps: list[Stage] = [*folds, *(Tree(n, n.inputs, None) for n in made.computed)]
    problem = next(filter(None, map(stream.unsupported, [*steps, *(t for t in tails if t.root is not t.value)])), None)
    if problem or any(result.dtype not in MEMORY and not is_index(result) for result in results):
        return problem or "a result is no floating-point value, and no index"
    read = dict.fromkeys(leaf for tail in tails for leaf in tail.leaves if leaf is not tail.value)
    tail = Tree(results[0], (*read, folds[0].node), folds[0].node)
    found = stream.of_reductions(folds[0], made.leaves, tail, users)
    return found if isinstance(found, str) else SeveralFolds(folds, found, tails)


def _is_like(node: Node, fold: Node) -> bool:
    """Whether it reduces values of that shape over the same dimensions."""
    if not isinstance(node.op, ops.Reduce) or not isinstance(fold.op, ops.Reduce):
        return False
    alike = node.op.dims == fold.op.dims and node.op.keepdim == fold.op.keepdim
    return alike and node.arg(0).shape == fold.arg(0).shape and stream.unsupported(Fold(node)) is None


def _reduced(result: Node, users: Users) -> Node | None:
    """The reduction that a result is made of, by what nobody else reads."""
    node = result
    while isinstance(node.op, POINTWISE):
        before = _before(node)
        if before is None or users[before] != 1:
            return None
        node = before
    return node if isinstance(node.op, ops.Reduce) and stream.unsupported(Fold(node)) is None else None


def _end(fold: Node, users: Users, readers: Readers) -> Node:
    """The last of the operations on what a reduction gives, each of which nobody else reads; an index itself."""
    node = fold
    while not is_index(node) and users[node] == 1 and len(readers[node]) == 1 and _before(readers[node][0]) is node:
        (node,) = readers[node]
    return node


def _before(node: Node) -> Node | None:
    """What a pointwise operation is of, where all else that it reads is fixed."""
    varies = [a for a in node.inputs if not _is_fixed(a)] if isinstance(node.op, POINTWISE) else []
    return varies[0] if len(varies) == 1 and varies[0].shape == node.shape else None


def _is_fixed(node: Node) -> bool:
    return isinstance(node.op, ops.Number | ops.Full | ops.Param | ops.Buffer | ops.Constant)


def _tail(result: Node, fold: Node) -> Tree:
    """What is made of one reduction."""
    read, node = dict[Node, None](), result
    while node is not fold:
        read.update((a, None) for a in node.inputs if _is_fixed(a) and not isinstance(a.op, ops.Number))
        node = next(a for a in node.inputs if not _is_fixed(a))
    return Tree(result, (*read, fold), fold)


def _elements(folds: Sequence[Fold], users: Users) -> Elements | str:
    """What nobody else uses is computed; two of the reductions have something in memory in common."""
    shape = folds[0].node.arg(0).shape
    made = elements((f.node for f in folds), users, shape)
    own = (n for n, uses in made.read.items() if n.shape == shape and uses >= users[n])
    if any(isinstance(n.op, ops.Pool | ops.Reduce | ops.Embedding | ops.Cat) for n in own):
        return "a reduction is of more than pointwise operations"
    known = set(made.computed)
    whole = [{n for n in _below(f.node, known) if n.shape == shape} for f in folds]
    if sum(map(len, whole)) == len(set().union(*whole)):
        return "no two reductions read the same"
    return made


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
