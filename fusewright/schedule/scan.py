"""The scan family: pointwise -> prefixes along one dimension -> pointwise, over values in memory.

    relu(cumsum(x * scale, 1) + y)        a * cumprod(cat((ones, 1 - a), 1), 1)[:, :-1]
    (cumsum(x, 1)[..., None] * colours).sum(1)

A *row* is what one scan runs along: the last dimension, or a *column* along another one.  However long it is, it is
read once and written once: what lies ahead of a stretch of it is one number, which is carried along.  From which end,
and which of the prefixes are asked for, are no copies (`schedule.scan_moves`).  What comes of a row's prefixes may be
summed over it, alone or times a few features that lie behind every element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from fusewright.ir import ops
from fusewright.ir.build import cast
from fusewright.ir.node import Node, make, remade, topological
from fusewright.schedule import scan_moves, stream
from fusewright.schedule.chain import MEMORY, POINTWISE, Users, used_inside
from fusewright.schedule.scan_moves import MOVES, NEUTRAL, Place, below, is_along
from fusewright.schedule.stream_record import Read, Stream, Tree

# Elements that a row has at least.
SHORTEST = 4
# Operations that one group may have.
MOST_NODES = 256
# Features behind an element that are summed.
MOST_FEATURES = 8


@dataclass(frozen=True)
class Folded:
    """What is summed over rows: so many `features` for each element, by `tree` from what lies in memory and, its
    `value`, what comes of prefixes; `None` where that is summed itself.  A `mean` is divided by a row's length."""

    tree: Tree | None
    features: int
    mean: bool


@dataclass(frozen=True)
class Scan:
    """A chain of this family.

    value      what comes of prefixes, for each of them: the root, unless that is summed
    node       the prefixes, as the model has them
    before     what is joined, from what lies in memory
    after      what comes of the prefixes and of what lies in memory, `None` where they are the result
    from_end   whether rows are read from their end on, and `to_end` whether results are written so
    to_end
    exclusive  whether a prefix ends ahead of its own element
    spare      how many elements fewer than results a row has: the last one would be part of no prefix
    is_apart   whether neighbours along the last axis are none in some tensor
    within     what is read, and along which axes, as a stream that reduces rows
    folded     what is summed, if anything is
    """

    root: Node
    value: Node
    node: Node
    before: Tree
    after: Tree | None
    from_end: bool
    to_end: bool
    exclusive: bool
    spare: int
    is_apart: bool
    within: Stream
    folded: Folded | None = None

    @property
    def tensors(self) -> tuple[Node, ...]:
        return self.within.tensors

    @property
    def kind(self) -> ops.ScanKind:
        return _op(self.node).kind

    @property
    def length(self) -> int:
        """Results of a row."""
        length = self.value.shape[_op(self.node).dim]
        assert isinstance(length, int)
        return length

    @property
    def in_rows(self) -> bool:
        """Whether rows lie along the last axis."""
        return _op(self.node).dim == self.node.ndim - 1


@dataclass(frozen=True)
class _Way:
    """How `root` comes of prefixes: by `inside` moves `seen` is computed from them, by functions `top`, and by
    `outside` moves `root`; moves in the order in which they are carried out."""

    node: Node
    inside: tuple[Node, ...]
    seen: Node
    top: Node
    outside: tuple[Node, ...]


def parse(root: Node, users: Users) -> Scan | str:
    """The longest chain of this family that ends in `root`, or why there is none.

    Inner nodes have no user outside of it; what is read both for prefixes and beside them is computed for either.
    """
    if isinstance(root.op, ops.Reduce):
        return _sum_of(root, users)
    return _prefixes(root, _inner(root, users), users)


def _inner(root: Node, users: Users, also: tuple[type[ops.Op], ...] = ()) -> set[Node]:
    """What a group that ends in `root` may compute."""
    kinds = (*POINTWISE, ops.Scan, *MOVES, *also)
    return used_inside(root, users, lambda n: isinstance(n.op, kinds), MOST_NODES)


def _prefixes(root: Node, inner: Collection[Node], users: Users, folded: Folded | None = None) -> Scan | str:
    """What comes of prefixes, for each of them; it is the `value` of what is `folded`, if that is given."""
    way = _way(root, inner)
    if way is None:
        return f"{root!r} follows no prefixes"
    dim = _op(way.node).dim
    length = root.shape[dim]
    if not isinstance(length, int) or length < SHORTEST:
        return f"rows of {length} elements are not scanned"
    if all(n == 1 for d, n in enumerate(root.shape) if d != dim):
        return f"{way.node!r} has one row"
    return _Finder(root, way, dim, length, inner, users, folded).scan()


def _sum_of(root: Node, users: Users) -> Scan | str:
    """A sum over rows of what comes of prefixes."""
    assert isinstance(root.op, ops.Reduce)
    op, x = root.op, root.arg(0)
    if op.kind not in ("sum", "mean") or len(op.dims) != 1 or users[x] != 1 or root.dtype != x.dtype:
        return f"{root!r} is no sum over rows"
    inner = _inner(x, users, (ops.Reshape,))
    leaves = _tree(x, inner).leaves if isinstance(x.op, POINTWISE) and x in inner else ()
    spread = next((z for z in leaves if z in inner and _is_spread(z, x)), None)
    value, features = (x, 1) if spread is None else (spread.arg(0), x.shape[-1])
    if not isinstance(features, int) or features > MOST_FEATURES:
        return f"{root!r} has {features} features for each element"
    folded = Folded(None if spread is None else Tree(x, leaves, spread), features, op.kind == "mean")
    found = _prefixes(value, inner, users, folded)
    if isinstance(found, Scan) and not (found.in_rows and op.dims == (_op(found.node).dim,)):
        return f"{root!r} is no sum over rows"
    return replace(found, root=root) if isinstance(found, Scan) else found


def _is_spread(z: Node, x: Node) -> bool:
    """Whether one number for each element stands beside features."""
    return isinstance(z.op, ops.Reshape) and z.shape == (*z.arg(0).shape, 1) == (*x.shape[:-1], 1)


def _op(node: Node) -> ops.Scan:
    assert isinstance(node.op, ops.Scan)
    return node.op


def _way(root: Node, inner: Collection[Node]) -> _Way | None:
    top, outside = _moved_from(root, inner)
    if top not in inner:
        return None
    if isinstance(top.op, ops.Scan):
        return _Way(top, outside, root, root, ())
    for seen in _tree(top, inner).leaves:
        node, inside = _moved_from(seen, inner)
        if isinstance(node.op, ops.Scan) and node in inner:
            return _Way(node, inside, seen, top, outside)
    return None


def _moved_from(node: Node, inner: Collection[Node]) -> tuple[Node, tuple[Node, ...]]:
    """What a value is moved from, and by what, in order."""
    moves: list[Node] = []
    while node in inner and isinstance(node.op, MOVES):
        moves.append(node)
        node = below(node)
    return node, tuple(reversed(moves))


def _tree(root: Node, inner: Collection[Node]) -> Tree:
    """The pointwise operations that end in `root`, of its shape, as far as they are `inner`."""
    found, leaves, stack = {root}, dict[Node, None](), [root]
    while stack:
        for a in stack.pop().inputs:
            if isinstance(a.op, ops.Number) or a in found:
                continue
            if isinstance(a.op, POINTWISE) and a in inner and a.shape == root.shape:
                found.add(a)
                stack.append(a)
            else:
                leaves[a] = None
    return Tree(root, tuple(leaves), None)


def _on(tree: Tree, new: Mapping[Node, Node]) -> Tree:
    """The same tree on other leaves."""
    made = {leaf: new.get(leaf, leaf) for leaf in tree.leaves}
    leaves = tuple(made.values())
    for n in topological([tree.root], tree.leaves):
        made[n] = remade(n, [None if a is None else made.get(a, a) for a in n.args])
    return Tree(made[tree.root], leaves, None if tree.value is None else made[tree.value])


@dataclass(frozen=True)
class _Finder:
    """Finds what a chain reads."""

    root: Node
    way: _Way
    dim: int
    length: int
    inner: Collection[Node]
    users: Users
    folded: Folded | None

    def scan(self) -> Scan | str:
        node, neutral = self.way.node, NEUTRAL[_op(self.way.node).kind]
        asked = scan_moves.behind((*self.way.inside, *self.way.outside), self.dim, neutral)
        value, given = scan_moves.ahead_of(node.arg(0), self.dim, neutral, self.inner)
        before, after = self._joined(value), self._after()
        before, turned = self._unturned(before)
        problem = self._problem(before, after)
        if problem:
            return problem
        ahead = None if asked is None else asked.ahead + given.ahead
        if asked is None or ahead not in (0, 1):
            return f"{self.root!r} asks for other prefixes than those from an end on"
        from_end = given.turned != turned
        found = self._places(before, from_end, ahead)
        behind = {} if after is None else self._behind(after)
        if found is None or behind is None:
            return f"{self.root!r} asks for elements that are not in memory"
        spare, places = found
        before = _on(before, {leaf: p.stands for leaf, p in places.items()})
        if after is not None and after.value is not None:
            asked_for = scan_moves.resized(after.value, self.dim, self.length)
            after = _on(after, {after.value: asked_for, **{leaf: p.stands for leaf, p in behind.items()}})
        read = {p.stands: p for p in (*places.values(), *behind.values())}
        apart = any(p.is_apart for p in read.values())
        folded = self.folded
        if folded is not None and folded.tree is not None:
            spread = self._spread(before, after, read)
            if spread is None:
                return f"features of {folded.tree.root!r} are not read as they lie"
            before, after, read = spread
            apart = True  # features are taken one by one
        within = self._within(before, after, read)
        if isinstance(within, str):
            return within
        return Scan(
            root=self.root,
            value=self.root,
            node=node,
            before=before,
            after=after,
            from_end=from_end,
            to_end=asked.turned,
            exclusive=ahead == 1,
            spare=spare,
            is_apart=apart,
            within=within,
            folded=folded,
        )

    def _spread(
        self, before: Tree, after: Tree | None, read: Mapping[Node, Place]
    ) -> tuple[Tree, Tree | None, dict[Node, Place]] | None:
        """What is read for prefixes and beside them, with a dimension of length 1 behind all others, as it stands
        beside features; and where these lie as well."""
        assert self.folded is not None and self.folded.tree is not None
        seen = None if after is None else after.value
        leaves = dict.fromkeys((*before.leaves, *(() if after is None else after.leaves)))
        if any(isinstance(z.op, ops.Full) and z.ndim for z in leaves):
            return None
        new = {z: make(ops.Reshape((*z.shape, 1)), z) for z in leaves if z.ndim}
        places = {}
        for z, up in new.items():
            if z is not seen:
                whole = Place(z, z, tuple(range(z.ndim)), ())
                places[up] = replace(read.get(z, whole), stands=up)
        tree = self.folded.tree
        for z in tree.leaves:
            if z is not tree.value and is_along(z, tree.root, self.dim):
                own = self.dim - tree.root.ndim + z.ndim
                place = scan_moves.place(z, own, 0, self.length, 0, features=True)
                if place is None or place.stands is not z:
                    return None
                places[z] = place
        return _on(before, new), after and _on(after, new), places

    def _joined(self, x: Node) -> Tree:
        """What is joined, in the type of the prefixes; what must lose digits lies in memory."""
        inlined = isinstance(x.op, POINTWISE) and x in self.inner and not _is_narrowed(x)
        return Tree(cast(x, self.way.node.dtype), _tree(x, self.inner).leaves if inlined else (x,), None)

    def _after(self) -> Tree | None:
        way = self.way
        return None if way.top is way.seen else Tree(way.top, _tree(way.top, self.inner).leaves, way.seen)

    def _unturned(self, before: Tree) -> tuple[Tree, bool]:
        """What is joined without flips, where all that varies along a row is flipped, and whether it is."""
        along = [leaf for leaf in before.leaves if is_along(leaf, before.root, self.dim)]
        turned = all(leaf in self.inner and leaf.op == ops.Flip((self._own(leaf),)) for leaf in along)
        return (_on(before, {leaf: leaf.arg(0) for leaf in along}), True) if along and turned else (before, False)

    def _own(self, leaf: Node) -> int:
        """The dimension of a leaf that rows run along."""
        return self.dim - self.root.ndim + leaf.ndim

    def _problem(self, before: Tree, after: Tree | None) -> str | None:
        node = self.way.node
        over = None if self.folded is None else self.folded.tree
        trees = [t for t in (before, after, over) if t is not None and t.leaves != (t.root,)]
        problem = next(filter(None, map(stream.unsupported, trees)), None)
        if problem or self.root.dtype not in MEMORY or node.dtype not in MEMORY:
            return problem or f"{self.root!r} is no floating-point value"
        if _is_narrowed(before.root) and before.leaves != (before.root,):
            return f"{before.root!r} is rounded to a narrower type on the way"
        others = {z for t in (after, over) if t is not None for z in t.leaves if z is not t.value}
        reach = [leaf for leaf in others if leaf in self.inner]
        return f"{node!r} is read in two ways" if node in topological(reach, [node.arg(0)]) else None

    def _places(self, before: Tree, from_end: bool, ahead: int) -> tuple[int, dict[Node, Place]] | None:
        """Where what is joined lies in memory, and how many elements are missing there."""
        have = before.root.shape[self.dim]
        along = [leaf for leaf in before.leaves if is_along(leaf, before.root, self.dim)]
        if not isinstance(have, int):
            return None
        for spare in range(ahead + 1):
            begin = have - (self.length - spare) if from_end else 0
            found = [scan_moves.place(z, self._own(z), begin, self.length, spare) for z in along]
            places = {z: p for z, p in zip(along, found, strict=True) if p is not None}
            if len(places) == len(along):
                return spare, places
        return None

    def _behind(self, after: Tree) -> dict[Node, Place] | None:
        """Where what is read beside prefixes lies in memory."""
        assert after.value is not None
        along = [z for z in after.leaves if z is not after.value and is_along(z, after.root, self.dim)]
        cuts = [n.op for n in self.way.outside]
        if any(isinstance(op, ops.Cat | ops.Pad) or (along and isinstance(op, ops.Flip)) for op in cuts):
            return None
        begin = sum(op.start for op in cuts if isinstance(op, ops.Slice))
        found = [scan_moves.place(z, self._own(z), begin, self.length, 0) for z in along]
        places = {z: p for z, p in zip(along, found, strict=True) if p is not None}
        return places if len(places) == len(along) else None

    def _within(self, before: Tree, after: Tree | None, places: Mapping[Node, Place]) -> Stream | str:
        """What is read, as a stream."""
        over = None if self.folded is None else self.folded.tree
        trees = [t for t in (before, after, over) if t is not None]
        read = dict.fromkeys(z for t in trees for z in t.leaves if z is not t.value)
        root = before.root if over is None else over.root
        within = stream.of_rows(Tree(root, tuple(read), None), "mean", (self.dim,), self.users)
        if isinstance(within, str):
            return within
        if self.root.shape != before.root.shape[: self.root.ndim]:
            return f"{self.way.node!r} has rows that are repeated"
        if within.weights:
            return f"{self.way.node!r} looks rows up"
        return _in_tensors(within, places)


def _in_tensors(s: Stream, places: Mapping[Node, Place]) -> Stream:
    """The same stream, which reads tensors in place of what stands for their elements."""

    def read(r: Read) -> Read:
        p = places.get(r.value)
        if p is None:
            return r
        return replace(
            r, tensor=p.tensor, dims=tuple(None if d is None else r.dims[d] for d in p.dims), within=p.within
        )

    tensors = dict.fromkeys(places[t].tensor if t in places else t for t in s.tensors)
    return replace(s, tensors=tuple(tensors), reads=tuple(map(read, s.reads)))


def _is_narrowed(node: Node) -> bool:
    """Whether a value is cast to a narrower type, and must lose its last digits on the way."""
    return isinstance(node.op, ops.Cast) and node.dtype.itemsize < node.arg(0).dtype.itemsize
