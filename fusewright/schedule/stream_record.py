"""What a stream is: a chain of stages over values in memory, and how what it reads lies along its axes.

`fusewright.schedule.stream` finds streams, and `stream_axes` their axes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule import chain
from fusewright.schedule.chain import (
    Fold,
    Users,
    Window,
)
from fusewright.schedule.look_through import look_through

Role = Literal["kept", "first", "second"]
Place = Literal["before", "after", "first", "second"]
BEFORE_FOLDS: tuple[Place, ...] = ("before", "after")

# Whole numbers lie in memory to be compared with others.
WHOLE = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Tree:
    """Pointwise operations: `root` from `leaves`, one of which, `value`, an earlier stage may compute."""

    root: Node
    leaves: tuple[Node, ...]
    value: Node | None


@dataclass(frozen=True)
class Axis:
    """Neighbouring dimensions that one index runs over.

    dims    dimensions of the value before the reductions
    window  which dimension of the window runs along it, if any (then `dims` is one)
    role    ``"kept"``, or which reduction takes it away
    """

    dims: tuple[int, ...]
    window: int | None
    role: Role


@dataclass(frozen=True)
class Part:
    """What a tensor is of a concatenation along dimension `dim`: so many indices, from `begin` on, perhaps negated."""

    dim: int
    begin: int
    length: int
    negated: bool = False


@dataclass(frozen=True)
class Within:
    """What a view has of dimension `dim` of its tensor: `size` indices, from `begin` on, of `length`."""

    dim: int
    begin: int
    size: int
    length: int


@dataclass(frozen=True)
class Read:
    """A tensor in memory that the pointwise tree at `place` reads.

    value    what the tree knows it as: the tensor itself, the embedding whose weight it is, the concatenation that has
             it as a part, or a view of it
    dims     per dimension of the tensor, which dimension of the value it lies along; `None` where it is of size 1, and
             where indices say what is read
    axes     along which it varies
    indices  of a weight, which row is read; of classes, which one is
    at       along which dimension of the tensor these indices are
    ignored  of a loss of classes, an index at which it is 0; at all others it is the negative of an element
    wraps    of a weight, whether negative indices count from the end
    negated  of a loss of classes, whether the negative of it is wanted: the element itself
    part     of a concatenation, which one it is
    within   of a view, where it lies along the dimensions that it does not have all of
    step     of a view, how far neighbours along the last dimension of the value are from each other
    computed of indices, whether they are positions, which are computed and not in memory
    """

    value: Node
    tensor: Node
    place: Place
    dims: tuple[int | None, ...]
    axes: tuple[int, ...] = ()
    indices: Read | None = None
    at: int = 0
    ignored: int | None = None
    wraps: bool = False
    negated: bool = False
    part: Part | None = None
    within: tuple[Within, ...] = ()
    step: int = 1
    computed: bool = False

    @property
    def along(self) -> tuple[int, ...]:
        """The axes along which what is read differs: of a weight, those of its indices as well."""
        return self.axes if self.indices is None else tuple(sorted({*self.axes, *self.indices.axes}))


@dataclass(frozen=True)
class Stream:
    """A chain of this family; absent stages are `None`.

    tensors  what it reads from memory, those of the shape of `entry`, or parts of it, first, no tensors of one value
             (`Full`)
    entry    the value that the window reads: the root of `before`, or a tensor in memory
    value    the value that the reductions read, or that is written
    folds    up to two reductions, each with the pointwise operations on its result
    axes     of `value`, outermost first
    """

    root: Node
    tensors: tuple[Node, ...]
    entry: Node
    before: Tree | None
    window: Window | None
    after: Tree | None
    value: Node
    folds: tuple[tuple[Fold, Tree | None], ...]
    axes: tuple[Axis, ...]
    reads: tuple[Read, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """Which of `tensors` are read at indices."""
        return tuple(sorted({self.tensors.index(r.tensor) for r in self.reads if r.indices}))

    @property
    def in_rows(self) -> bool:
        """Whether what is reduced lies along the last axis."""
        return self.axes[-1].role == "first"

    @property
    def looks_up(self) -> bool:
        """Whether one of these indices may be that of no row."""
        return any(r.indices is not None and not is_inside(r) for r in self.reads)

    @property
    def refuses(self) -> bool:
        """Whether a function ahead of the reductions refuses numbers."""
        return self.before is not None and refuses([self.before.root], self.before.leaves)

    def at(self, weight: int) -> int:
        """Along which dimension these indices are."""
        return next(r.at for r in self.reads if r.indices and r.tensor is self.tensors[weight])


def refuses(values: Iterable[Node], leaves: tuple[Node, ...]) -> bool:
    """Whether a function on the way from `leaves` to `values` refuses numbers."""
    return any(chain.refuses(n) for value in values for n in nodes(Tree(value, leaves, None)))


def nodes(tree: Tree) -> tuple[Node, ...]:
    """The nodes that a tree computes, `root` first."""
    found: dict[Node, None] = {}
    stack = [tree.root]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found[node] = None
        stack += [a for a in node.inputs if a not in tree.leaves and not isinstance(a.op, ops.Number)]
    return tuple(found)


def with_indices(reads: Iterable[Read]) -> tuple[Read, ...]:
    """Every read of a tensor: those of indices in memory follow those of what is read there."""
    return tuple(each for r in reads for each in (r, r.indices) if each is not None and not each.computed)


def is_entry(node: Node) -> bool:
    """Whether a value is an embedding, or a view of one, which may be read where it lies in the table."""
    return isinstance(look_through(node)[0].op, ops.Embedding)


def read_alone(tree: Tree, picked: Container[Node], users: Users) -> Users:
    """`users` as if a tree alone read what of its leaves is `picked` from tables, and others read the rest as well."""
    entries = filter(is_entry, tree.leaves)
    return {**users, **{n: uses(tree, n) + (n not in picked) for n in entries}}


def uses(tree: Tree, leaf: Node) -> int:
    """How often a tree reads a leaf."""
    return 1 if leaf is tree.root else sum(n.inputs.count(leaf) for n in nodes(tree))


def is_inside(r: Read) -> bool:
    """Whether what is read at indices is known to be there: computed ones are known, and none is ignored."""
    assert r.indices is not None
    op, rows = r.indices.tensor.op, r.tensor.shape[r.at]
    if not isinstance(op, ops.Positions) or not r.indices.computed or r.ignored is not None:
        return False
    return op.end is not None and isinstance(rows, int) and op.end <= rows


def is_index(node: Node) -> bool:
    """Whether a value is an index that a reduction gives."""
    return isinstance(node.op, ops.Reduce) and node.op.gives_index


def picks_each(r: Read) -> bool:
    """Whether each of several neighbours is read at an index of its own."""
    return r.indices is not None and bool(r.along) and r.along[-1] in r.indices.axes
