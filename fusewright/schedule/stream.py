"""The streaming family: pointwise -> window pool -> pointwise -> one or two reductions, over values in memory.

Every element is read once and nothing but the result is written.  What a kernel needs to know of shapes is which
dimensions are alike: neighbours that are pooled, reduced and broadcast alike merge into one *axis*.  An embedding is
never in memory where the stream alone uses it: rows of its weight are read where they are wanted.  So are the parts of
a concatenation, where it is along an axis of its own, and views, which would have to be copied to lie row by row:
slices, and permutations that leave the last dimension where it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.intervals import index_count
from fusewright.ir.node import Node, make, topological
from fusewright.ir.types import same_numel
from fusewright.schedule import chain
from fusewright.schedule.chain import (
    MEMORY,
    POINTWISE,
    Fold,
    Users,
    Window,
    is_rounded,
    is_sized,
    pointwise_tree,
    taken_in,
)
from fusewright.schedule.look_through import look_through

FOLDS = ("sum", "mean", "max", "min", "logsumexp", "norm", "var", "std", "argmax", "argmin")

# Rows of more results than this are not reduced a second time, each by one block or thread, where they are fewer than
# the multiprocessors of a large device: to write them and to begin anew is sooner done.
MOST_OF_SECOND, FEW_ROWS = 2**15, 132

# Parts of a concatenation, each of which is an operand.
MOST_PARTS = 64

# Operations on a few numbers for each sample that threads repeat.
FEW_OPERATIONS = 8

# Whole numbers lie in memory to be compared with others.
WHOLE = (torch.int64, torch.int32)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

VIEWS = (ops.Slice, ops.Permute, ops.Reshape)

Role = Literal["kept", "first", "second"]
Place = Literal["before", "after", "first", "second"]
BEFORE_FOLDS: tuple[Place, ...] = ("before", "after")


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
    part: Part | None = None
    within: tuple[Within, ...] = ()
    step: int = 1
    computed: bool = False


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


def with_indices(reads: Iterable[Read]) -> tuple[Read, ...]:
    """Every read of a tensor: those of indices in memory follow those of what is read there."""
    return tuple(each for r in reads for each in (r, r.indices) if each is not None and not each.computed)


def is_inside(r: Read) -> bool:
    """Whether what is read at indices is known to be there: computed ones are known, and none is ignored."""
    assert r.indices is not None
    op, rows = r.indices.tensor.op, r.tensor.shape[r.at]
    if not isinstance(op, ops.Positions) or not r.indices.computed or r.ignored is not None:
        return False
    return op.end is not None and isinstance(rows, int) and op.end <= rows


def picks_each(r: Read) -> bool:
    """Whether each of several neighbours is read at an index of its own."""
    return r.indices is not None and bool(r.axes) and r.axes[-1] in r.indices.axes


def parse(root: Node, users: Users, *, parts: bool = True) -> Stream | str:
    """The longest stream that ends in `root`, or why there is none.

    Inner nodes have no user outside of it: what others use is in memory, and a stream may start there.  Without `parts`
    what is concatenated is in memory as well.
    """
    stages = _backwards(root, users)
    problem = f"{root!r} is no stage of a stream"
    for start in range(len(stages)):
        found = _stream(stages[start:], users, parts)
        if isinstance(found, Stream):
            return found
        problem = found
    return problem


Stage = Tree | Window | Fold


def _backwards(root: Node, users: Users) -> list[Stage]:
    """All stages that lead to `root`, the first one first."""
    stages: list[Stage] = []
    node: Node | None = root
    while node is not None:
        if isinstance(node.op, POINTWISE):
            tree = _tree(node, users)
            stages.append(tree)
            node = tree.value
        elif isinstance(node.op, ops.Pool | ops.Reduce):
            stages.append(Window(node) if isinstance(node.op, ops.Pool) else Fold(node))
            node = node.arg(0) if users[node.arg(0)] == 1 else None
        else:
            break
    return stages[::-1]


def _tree(root: Node, users: Users) -> Tree:
    """The largest tree that ends in `root`, and the stage it starts at, if any.

    A few numbers for each sample that are functions of entries of a table are computed where they are read: they would
    be launches of their own.
    """
    read, own = pointwise_tree(root, users)
    value = next((n for n in own if isinstance(n.op, ops.Pool | ops.Reduce)), None)
    of_entries = [n for n in read if n.shape[-1:] == (1,) and n.shape != root.shape and _is_of_entries(n)]
    if not of_entries:
        return Tree(root, read, value)
    inner = set(topological([root], read))

    def fits(node: Node) -> bool:
        return isinstance(node.op, POINTWISE) and (node in inner or _is_of_entries(node))

    return Tree(root, tuple(taken_in([root], users, fits)[1]), value)


def _is_of_entries(node: Node) -> bool:
    """Whether a value is a function, of few operations, of entries of tables and of numbers alone."""
    seen: set[Node] = set()
    stack = [node]
    while stack and len(seen) <= FEW_OPERATIONS:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if isinstance(n.op, POINTWISE):
            stack += [a for a in n.inputs if not isinstance(a.op, ops.Number)]
        elif not isinstance(look_through(n)[0].op, ops.Embedding):
            return False
    return not stack


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


def _stream(stages: list[Stage], users: Users, parts: bool) -> Stream | str:
    """These stages as a stream: T?(WT?)?(FT?)?(FT?)? with T(ree), W(indow), F(old)."""
    letters = "".join(type(stage).__name__[0] for stage in stages)
    matched = re.fullmatch(r"(T?)((?:WT?)?)((?:FT?){0,2})", letters)
    if matched is None:
        return "its stages take more than one pass"
    problem = next(filter(None, map(unsupported, stages)), None)
    if problem:
        return problem
    before, window, after = None, None, None
    folds: list[tuple[Fold, Tree | None]] = []
    for i, stage in enumerate(stages):
        if isinstance(stage, Window):
            window = stage
        elif isinstance(stage, Fold):
            folds.append((stage, None))
        elif i == 0:
            before = Tree(stage.root, stage.leaves, None)
        elif folds:
            folds[-1] = (folds[-1][0], stage)
        else:
            after = stage
    used = [f for i, (f, tail) in enumerate(folds) if f.op.gives_index and (tail is not None or i + 1 < len(folds))]
    if used:  # as a kernel's result it would seem to have one
        return f"what is made of {used[0].node!r} has no gradient"
    first = stages[0]
    entry = first.root if isinstance(first, Tree) else first.node.arg(0)
    value = after.root if after else window.node if window else entry
    last = stages[-1]
    root = last.root if isinstance(last, Tree) else last.node
    return _Axes(entry, value, before, window, after, tuple(folds), users, parts).stream(root)


def is_index(node: Node) -> bool:
    """Whether a value is an index that a reduction gives."""
    return isinstance(node.op, ops.Reduce) and node.op.gives_index


def of_rows(tree: Tree, kind: Literal["var", "mean", "logsumexp"], dims: tuple[int, ...], users: Users) -> Stream | str:
    """The stream that reduces what a tree computes over any dimensions."""
    value = tree.root
    fold = Fold(make(ops.Reduce(kind, dims, True, 0), value))
    before = None if tree.leaves == (value,) else tree
    return _Axes(value, value, before, None, None, ((fold, None),), users).stream(fold.node, in_order=False)


def of_elements(tree: Tree, users: Users) -> Stream | str:
    """The stream of one of several values that are computed from what the tree reads."""
    return _Axes(tree.root, tree.root, tree, None, None, (), users, parts=True).stream(tree.root)


def of_reductions(fold: Fold, read: tuple[Node, ...], tail: Tree, users: Users) -> Stream | str:
    """The stream of one of several reductions of what is computed from what is `read`, with what `tail` makes of all
    (and reads beside them)."""
    value = fold.node.arg(0)
    return _Axes(value, value, Tree(value, read, None), None, None, ((fold, tail),), users, parts=True).stream(
        tail.root
    )


def unsupported(stage: Stage) -> str | None:
    """Why a stage cannot be carried out, whatever its sizes."""
    if isinstance(stage, Fold) and (stage.op.kind not in FOLDS or not stage.op.dims):
        return f"{stage.op.kind} over {stage.op.dims} is no reduction of a stream"
    if isinstance(stage, Tree):
        numbers = (n for n in stage.leaves if n.dtype in WHOLE and not isinstance(n.op, ops.Number))
        counted = next((n for n in numbers if not _is_as_in_float32(n, stage)), None)
        if counted is not None:
            return f"{counted!r} is computed with in {counted.dtype}"
    index = isinstance(stage, Fold) and stage.op.gives_index
    if isinstance(stage, Fold) and index and stage.node.arg(0).dtype in WHOLE:
        return f"{stage.node.arg(0)!r} lies in memory as {stage.node.arg(0).dtype}"
    for node in nodes(stage) if isinstance(stage, Tree) else () if index else (stage.node,):
        if node.dtype not in (*MEMORY, torch.bool):
            return f"{node!r} is computed in {node.dtype}"
        if isinstance(node.op, ops.Pointwise) and node.op.traits.cpp is None:
            return f"{node.op.fn} has no C++ text"
        if is_rounded(node):
            return f"{node!r} is rounded to a narrower type on the way"
        if is_sized(node):
            return f"{node!r} depends on a size"
    return None


def _is_as_in_float32(leaf: Node, tree: Tree) -> bool:
    """Whether all that is done with whole numbers comes to the same when they are rounded to float32 first: they become
    that, as operands of its functions do, or are compared with, or are themselves, numbers so small that float32 has
    all of them."""

    def fits(node: Node) -> bool:
        if node.dtype == torch.float32:
            return True
        compared = isinstance(node.op, ops.Pointwise) and node.op.fn in COMPARISONS
        return compared and any(map(_is_small, node.inputs))

    return all(fits(node) for node in nodes(tree) if leaf in node.inputs)


def _is_small(node: Node) -> bool:
    """Whether whole numbers are among those that float32 has."""
    if isinstance(node.op, ops.Number):
        return isinstance(node.op.value, int) and abs(node.op.value) < 2**24
    if isinstance(node.op, ops.Reshape):
        return _is_small(node.arg(0))
    if isinstance(node.op, Fused):
        return _is_small(node.op.body)
    if isinstance(node.op, ops.Item) and isinstance(fused := node.arg(0).op, Fused):
        return _is_small(fused.bodies[node.op.index])
    count = index_count(node)
    return count is not None and count < 2**24


@dataclass
class _Axes:
    """Finds the axes of a stream whose stages are known."""

    entry: Node
    value: Node
    before: Tree | None
    window: Window | None
    after: Tree | None
    folds: tuple[tuple[Fold, Tree | None], ...]
    users: Users
    parts: bool = False
    positions: bool = True  # whether indices are computed that depend on a position alone

    def stream(self, root: Node, *, in_order: bool = True) -> Stream | str:
        """The stream that ends in `root`; `in_order` asks for reductions over neighbours."""
        if not self.value.shape:
            return f"{root!r} is one number"
        roles, dims = self._roles()
        problem = (_order(roles) or self._much(roles)) if in_order else None
        if problem:
            return problem
        if len(set(roles) - {"kept"}) < len(self.folds):
            return "a reduction over dimensions that one before it took away"
        reads = self._reads(dims)
        if len({(r.tensor, r.at) for r in reads if r.indices}) > len({r.tensor for r in reads if r.indices}):
            return "a tensor is read at indices along two of its dimensions"
        if self.parts and _in_two_ways(reads):
            return replace(self, parts=False).stream(root, in_order=in_order)
        if self.positions and not _has_lengths(reads):
            return replace(self, positions=False).stream(root, in_order=in_order)
        every = dict.fromkeys(r.tensor for r in with_indices(reads))
        parts = {r.tensor for r in reads if r.part is not None}
        tensors = tuple(sorted(every, key=lambda v: v.shape != self.entry.shape and v not in parts))
        wrong = [r.tensor for r in reads if r.tensor.dtype not in (*MEMORY, torch.bool, *WHOLE)]
        wrong += [root] if root.dtype not in MEMORY and not is_index(root) else []
        if wrong or not tensors:
            return f"{wrong[0]!r} lies in memory as {wrong[0].dtype}" if wrong else f"{root!r} reads nothing"
        axes = self._merged(roles, [*with_indices(reads), *(r.indices for r in reads if r.indices is not None)])
        return Stream(
            root=root,
            tensors=tensors,
            entry=self.entry,
            before=self.before,
            window=self.window,
            after=self.after,
            value=self.value,
            folds=self.folds,
            axes=axes,
            reads=tuple(_along(axes, r) for r in reads),
        )

    def _much(self, roles: Sequence[Role]) -> str | None:
        """Why the second reduction is not carried out where the first one is joined, as far as sizes are known."""
        lengths = {
            role: [n for n, r in zip(self.value.shape, roles, strict=True) if r == role] for role in ("kept", "second")
        }
        if not all(isinstance(n, int) for n in (*lengths["kept"], *lengths["second"])):
            return None
        rows, results = (prod(map(int, lengths[role])) for role in ("kept", "second"))
        return f"{results} results are many to reduce again" if results > MOST_OF_SECOND and rows < FEW_ROWS else None

    def _roles(self) -> tuple[list[Role], list[tuple[int | None, ...]]]:
        """The role of each dimension of the value; and per fold, which of them its result's dimensions are."""
        roles: list[Role] = ["kept"] * self.value.ndim
        names: tuple[Role, Role] = ("first", "second")
        dims: tuple[int | None, ...] = tuple(range(self.value.ndim))
        results = []
        for role, (fold, _) in zip(names, self.folds, strict=False):
            away = [(i, d) for i, d in enumerate(dims) if i in fold.op.dims]
            for _, d in away:
                if d is not None:
                    roles[d] = role
            kept = [None if (i, d) in away else d for i, d in enumerate(dims)]
            dims = tuple(d for i, d in enumerate(kept) if fold.op.keepdim or i not in fold.op.dims)
            results.append(dims)
        return roles, results

    def _reads(self, results: list[tuple[int | None, ...]]) -> list[Read]:
        """What the trees read.

        A tensor of the whole shape varies along dimensions of size 1 as well, so that a batch of one may grow; any
        other does not, so that a bias may stay one.
        """
        everything = tuple(range(self.value.ndim))
        trees: list[tuple[Tree | None, Place, tuple[int | None, ...]]] = [
            (self.before or Tree(self.entry, (self.entry,), None), "before", everything),
            (self.after, "after", everything),
        ]
        places: tuple[Place, Place] = ("first", "second")
        trees += [(t, p, dims) for (_, t), p, dims in zip(self.folds, places, results, strict=False)]
        found = []
        for tree, place, dims in trees:
            for leaf in tree.leaves if tree is not None else ():
                assert tree is not None
                if leaf is not tree.value and not isinstance(leaf.op, ops.Full):
                    whole = leaf.shape == tree.root.shape
                    own = zip(dims[len(dims) - leaf.ndim :], leaf.shape, strict=True)
                    found += self._read(leaf, tree, place, tuple(d if whole or n != 1 else None for d, n in own))
        return found

    def _read(self, leaf: Node, tree: Tree, place: Place, dims: tuple[int | None, ...]) -> list[Read]:
        """How a leaf of the tree at `place` is read; an embedding of parameters alone is derived ahead of calls."""
        plain = [Read(leaf, leaf, place, dims)]
        picked = self._picked(leaf, place, dims) or self._entry(leaf, tree, place, dims)
        if picked is not None:
            return [picked]
        if isinstance(leaf.op, VIEWS) and self.parts and place in BEFORE_FOLDS:
            view = self._viewed(leaf, place, dims)
            return plain if view is None else [view]
        if not isinstance(leaf.op, ops.Cat) or place not in BEFORE_FOLDS or not self._alone(leaf, leaf, tree):
            return plain
        return self._parts(leaf, place, dims) if self._is_in_parts(leaf, leaf.op.dim, dims) else plain

    def _picked(self, leaf: Node, place: Place, dims: tuple[int | None, ...]) -> Read | None:
        """How a loss of one class each is read from what its classes have: from their number on, however it is seen."""
        loss, places = look_through(leaf)
        if not isinstance(loss.op, ops.Nll) or loss.op.reduction != "none" or loss.args[2] is not None:
            return None
        own = tuple(None if p.dim is None else dims[p.dim] for p in places)
        x, classes = loss.inputs
        whole = all(p.begin == 0 for p in places) and same_numel(leaf.shape, loss.shape)
        if not whole or place not in BEFORE_FOLDS or (self.value.ndim - 1 in own and not self.folds):
            return None  # neighbours would be read together
        index = self._index(classes, place, own)
        return Read(leaf, x, place, (own[0], None, *own[1:]), indices=index, at=1, ignored=loss.op.ignore)

    def _entry(self, leaf: Node, tree: Tree, place: Place, dims: tuple[int | None, ...]) -> Read | None:
        """How entries of a table are read, however they are seen, where nobody else has them in memory; those of
        parameters alone are derived ahead of calls."""
        entry, places = look_through(leaf)
        if not isinstance(entry.op, ops.Embedding) or place not in BEFORE_FOLDS:
            return None
        own = tuple(None if p.dim is None else dims[p.dim] for p in places)
        weight, indices = entry.inputs
        ahead = not indices.varies and all(isinstance(n, int) for n in indices.shape)
        if ahead or any(p.begin for p in places) or not same_numel(leaf.shape, entry.shape):
            return None
        if any(d is not None and own[-1] is not None and d > own[-1] for d in own[:-1]):
            return None  # neighbours would be of different rows
        index = self._index(indices, place, own[:-1])
        if not index.computed and not self._alone(leaf, entry, tree):
            return None
        return Read(leaf, weight, place, (None, own[-1]), indices=index)

    def _index(self, indices: Node, place: Place, dims: tuple[int | None, ...]) -> Read:
        """How indices are read, or computed where they depend on a position alone."""
        computed = self.positions and isinstance(indices.op, ops.Positions)
        return Read(indices, indices, place, dims, computed=computed)

    def _alone(self, leaf: Node, entry: Node, tree: Tree) -> bool:
        """Whether nobody but a tree reads a leaf of it, which is a view of `entry`."""
        uses = sum(n.inputs.count(leaf) for n in nodes(tree)) if leaf is not tree.root else 1
        below = [n for n in topological([leaf], entry.inputs) if n is not leaf]
        return self.users[leaf] == uses and all(self.users[n] == 1 for n in below)

    def _viewed(self, leaf: Node, place: Place, dims: tuple[int | None, ...]) -> Read | None:
        """How a view is read from its tensor; `None` where it lies row by row itself, or where not even that does."""
        base, places = look_through(leaf)
        own = tuple(None if p.dim is None else dims[p.dim] for p in places)
        shape = [1 if p.dim is None else leaf.shape[p.dim] for p in places]
        cut = [j for j, (a, b) in enumerate(zip(shape, base.shape, strict=True)) if a != b]
        known = all(isinstance(n, int) for j in cut for n in (shape[j], base.shape[j]))
        missing = set(range(leaf.ndim)) - {p.dim for p in places}
        along = [d for d in own if d is not None]
        in_rows = along == sorted(along) and all(n == 1 for j in cut for n in base.shape[:j])
        added = any(dims[d] is not None and (d == 0 or leaf.shape[d] != 1) for d in missing)  # a batch of one may grow
        if in_rows or added or not known or not lies_in_rows(base):
            return None
        last = self.value.ndim - 1  # neighbours along it are read together
        behind = range(own.index(last) + 1 if last in own else len(own), len(own))
        step = prod(n for j in behind if isinstance(n := base.shape[j], int))
        turned = any(own[j] is not None and base.shape[j] != 1 for j in behind)
        if turned or (step > 1 and self.window is not None):
            return None
        within = (Within(j, places[j].begin, shape[j], base.shape[j]) for j in cut)
        return Read(leaf, base, place, own, within=tuple(within), step=step)

    def _is_in_parts(self, leaf: Node, dim: int, dims: tuple[int | None, ...]) -> bool:
        """Whether what is concatenated along `dim` is read part by part: tensors in memory of known lengths, along an
        axis that is not pooled; along the last one, so that neighbours which are read together are in one part."""
        if not self.parts or dims != tuple(range(leaf.ndim)):
            return False
        pooled = self.window is not None and dim >= leaf.ndim - len(self.window.op.kernel)
        whole = 16 // leaf.dtype.itemsize if dim == leaf.ndim - 1 else 1
        lengths = [n.shape[dim] for n in leaf.inputs]
        known = all(isinstance(n, int) and n > 0 and n % whole == 0 for n in lengths)
        in_memory = not any(isinstance(n.op, ops.Full) for n, _ in map(self._sign, leaf.inputs))
        return known and in_memory and not pooled and len(leaf.inputs) <= MOST_PARTS

    def _sign(self, part: Node) -> tuple[Node, bool]:
        """What a part of a concatenation is, or is the negative of."""
        negated = isinstance(part.op, ops.Pointwise) and part.op.fn == "neg" and self.users[part] == 1
        return (part.arg(0), True) if negated else (part, False)

    def _parts(self, leaf: Node, place: Place, dims: tuple[int | None, ...]) -> list[Read]:
        """The parts as they lie in memory, or as views of what does if all lie there alike."""
        assert isinstance(leaf.op, ops.Cat)
        dim = leaf.op.dim
        signed = [self._sign(n) for n in leaf.inputs]
        views = [self._viewed(n, place, dims) if isinstance(n.op, VIEWS) else None for n, _ in signed]
        alike = len({v and v.dims for v in views}) == 1 and all(v is None or v.step == 1 for v in views)
        cuts = {tuple(w for w in v.within if v.dims[w.dim] != dim) for v in views if v is not None}
        found, begin = [], 0
        for (n, negated), view in zip(signed, views, strict=True):
            length = n.shape[dim]
            assert isinstance(length, int)
            plain = Read(leaf, n, place, dims)
            read = replace(view, value=leaf) if view is not None and alike and len(cuts) == 1 else plain
            found.append(replace(read, part=Part(dim, begin, length, negated)))
            begin += length
        return found

    def _merged(self, roles: list[Role], reads: Sequence[Read]) -> tuple[Axis, ...]:
        """Neighbours of one role that no tensor tells apart, none of them pooled, no concatenation along them, and no
        cut along the inner one: what follows a dimension that is cut is cut with it."""
        cut = {r.dims[w.dim] for r in reads for w in r.within}
        apart = {d for r in reads for before, d in pairwise((None, *r.dims)) if d is not None and before != d - 1}
        joined = {r.part.dim for r in reads if r.part is not None}
        pooled = self.value.ndim - len(self.window.op.kernel) if self.window else self.value.ndim
        groups: list[list[int]] = [[0]]
        for d in range(1, self.value.ndim):
            alike = all((d in r.dims) == (d - 1 in r.dims) for r in reads)
            if alike and roles[d] == roles[d - 1] and d < pooled and d not in cut | apart and not joined & {d - 1, d}:
                groups[-1].append(d)
            else:
                groups.append([d])
        return tuple(Axis(tuple(g), g[0] - pooled if g[0] >= pooled else None, roles[g[0]]) for g in groups)


def lies_in_rows(base: Node) -> bool:
    """Whether a value probably lies row by row: views of others often do not."""
    while isinstance(base.op, ops.Reshape | ops.Detach):
        base = base.arg(0)
    return not isinstance(base.op, ops.Permute | ops.Expand | ops.Slice | ops.Windows) or (
        isinstance(base.op, ops.Permute) and base.op.copy
    )


def _has_lengths(reads: Sequence[Read]) -> bool:
    """Whether a tensor in memory tells how long each dimension is that indices are computed along."""
    told = {(r.place in BEFORE_FOLDS, d) for r in with_indices(reads) for d in r.dims}
    computed = [r.indices for r in reads if r.indices is not None and r.indices.computed]
    return all((True, d) in told for r in computed for d in r.dims if d is not None)


def _in_two_ways(reads: Sequence[Read]) -> bool:
    """Whether a part of a concatenation lies along other dimensions where it is read beside that."""
    parts = {(r.tensor, r.dims) for r in reads if r.part is not None}
    tensors = {tensor for tensor, _ in parts}
    return any((r.tensor, r.dims) not in parts for r in with_indices(reads) if r.tensor in tensors)


def _along(axes: tuple[Axis, ...], r: Read) -> Read:
    """The same with the axes along which it varies."""
    own = tuple(i for i, axis in enumerate(axes) if set(axis.dims) & set(r.dims))
    return replace(r, axes=own, indices=None if r.indices is None else _along(axes, r.indices))


def _order(roles: list[Role]) -> str | None:
    """Why reductions in these places are none of this family's."""
    first = [i for i, role in enumerate(roles) if role == "first"]
    if any(j != i + 1 for i, j in pairwise(first)):
        return f"the reduced dimensions {first} are not neighbours"
    rest = [role for role in roles if role != "first"]
    if any(a == "second" and b == "kept" for a, b in pairwise(rest)):
        return "the second reduction is not over the last dimensions"
    return None
