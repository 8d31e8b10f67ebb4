"""The axes of a stream: neighbouring dimensions that are pooled, reduced and broadcast alike; and what is read along
them.

An embedding, the parts of a concatenation, and views that the stream alone uses are read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node, topological
from fusewright.ir.types import same_numel
from fusewright.schedule.chain import (
    MEMORY,
    Fold,
    Users,
    Window,
)
from fusewright.schedule.look_through import look_through
from fusewright.schedule.stream_record import (
    BEFORE_FOLDS,
    WHOLE,
    Axis,
    Part,
    Place,
    Read,
    Role,
    Stream,
    Tree,
    Within,
    is_index,
    uses,
    with_indices,
)

# Rows of more results than this are not reduced a second time, each by one block or thread, where they are fewer than
# the multiprocessors of a large device: to write them and to begin anew is sooner done.
MOST_OF_SECOND, FEW_ROWS = 2**15, 132

# Parts of a concatenation, each of which is an operand.
MOST_PARTS = 64

VIEWS = (ops.Slice, ops.Permute, ops.Reshape)


@dataclass
class Axes:
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
        whole = root.dtype == torch.int64 and not self.folds and self.window is None
        wrong += [root] if root.dtype not in MEMORY and not is_index(root) and not whole else []
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
        """How a loss of one class each, or its negative, is read from what its classes have: from their number on,
        however it is seen."""
        loss, places = look_through(leaf)
        negated = isinstance(loss.op, ops.Pointwise) and loss.op.fn == "neg"
        loss = loss.arg(0) if negated else loss
        if not isinstance(loss.op, ops.Nll) or loss.op.reduction != "none" or loss.args[2] is not None:
            return None
        own = tuple(None if p.dim is None else dims[p.dim] for p in places)
        x, classes = loss.inputs
        whole = all(p.begin == 0 for p in places) and same_numel(leaf.shape, loss.shape)
        if not whole or place not in BEFORE_FOLDS or (self.value.ndim - 1 in own and not self.folds):
            return None  # neighbours would be read together
        index = self._index(classes, place, own)
        dims = (own[0], None, *own[1:])
        return Read(leaf, x, place, dims, indices=index, at=1, ignored=loss.op.ignore, negated=negated)

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
        wraps = entry.op.wraps and not index.computed  # from 0 on
        return Read(leaf, weight, place, (None, own[-1]), indices=index, wraps=wraps)

    def _index(self, indices: Node, place: Place, dims: tuple[int | None, ...]) -> Read:
        """How indices are read, or computed where they depend on a position alone."""
        computed = self.positions and isinstance(indices.op, ops.Positions)
        return Read(indices, indices, place, dims, computed=computed)

    def _alone(self, leaf: Node, entry: Node, tree: Tree) -> bool:
        """Whether nobody but a tree reads a leaf of it, which is a view of `entry`."""
        below = [n for n in topological([leaf], entry.inputs) if n is not leaf]
        return self.users[leaf] == uses(tree, leaf) and all(self.users[n] == 1 for n in below)

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
