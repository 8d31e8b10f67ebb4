"""What a group computes of images whose channels lie last in memory, over values in the order in which those lie.

    mean(relu(x (N, C, H, W)), (2, 3))   ->   mean(relu(x (N, H, W, C)), (1, 2))

Reductions and norms over positions read such images as columns then, neighbouring channels at a time: as rows, they
would be copied first.  Operands of which no two elements change places, a number per channel, are what they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make, remade, topological
from fusewright.ir.ops import Size
from fusewright.schedule import stream
from fusewright.schedule.chain import POINTWISE, Users
from fusewright.schedule.normalization import HELD, VARIANCE, Normalization
from fusewright.schedule.range_sums import RangeReduction
from fusewright.schedule.stream import Stream, Tree


@dataclass(frozen=True)
class Turned:
    """Values in the other order.

    root    the last one
    stands  what its operands stand for
    images  those of these that lie otherwise than row by row
    users   of all its nodes
    """

    root: Node
    stands: Mapping[Node, Node]
    images: tuple[Node, ...]
    users: Users


@dataclass(frozen=True)
class TurnedStream:
    """A stream, or a range reduction to one sum per plane, of such images: `s` is one over what stands for them."""

    turned: Turned
    s: Stream


@dataclass(frozen=True)
class TurnedNorm:
    """A norm of such images over their positions, or over those of a group of channels.

    x       what is normalised, as the norm has it; `turned` is the same in the other order
    sums    the stream that reduces each channel of it
    merged  channels whose statistics are one
    """

    n: Normalization
    x: Node
    turned: Turned
    sums: Stream
    merged: int


def of_stream(s: Stream) -> TurnedStream | None:
    """A stream with its operands in the other order; `None` where that is no stream, or nothing.  What it gives has its
    channels last as well where nothing is reduced."""
    if s.window is not None or s.weights or any(r.value is not r.tensor for r in s.reads):
        return None
    return _stream(s.root, s.tensors)


def of_range(r: RangeReduction) -> TurnedStream | None:
    """The same of range sums that are one sum of everything."""
    if not r.total or r.stored is not None:
        return None
    root = r.root
    if isinstance(root.op, ops.RangeSum):
        root = make(ops.Reduce("sum", r.axes[0].dims, True, dtype=root.dtype), r.value)
        root = root if r.scale == 1.0 else pointwise("mul", root, r.scale)
    return _stream(root, (r.x,)) if root.type == r.root.type else None


def _stream(root: Node, tensors: Sequence[Node]) -> TurnedStream | None:
    images = [t for t in tensors if t.ndim in (4, 5)]
    found = turned(root, tensors, images[0].shape) if images else None
    if found is None:
        return None
    s = stream.parse(found.root, found.users, parts=False)
    whole = isinstance(s, Stream) and s.window is None and set(s.tensors) <= found.stands.keys()
    if not whole or not isinstance(s, Stream):
        return None
    moves = s.folds and root.ndim == len(images[0].shape) and _is_image(root.shape)
    return None if moves else TurnedStream(found, s)


def of_norm(n: Normalization) -> TurnedNorm | None:
    """A norm and what is around it, where nothing pools or reduces; x is read by nothing but the norm's operand."""
    op, before = n.op, n.behind.before
    if not (isinstance(op, ops.Norm) and op.kind in ("group", "instance")) or before is None or n.also is not None:
        return None
    if n.behind.window is not None or n.behind.folds or n.moved or n.norm.ndim not in (4, 5):
        return None
    x = next((t for t in before.leaves if n.stands.get(t) is n.norm.arg(0)), n.norm.arg(0))
    below = {leaf for leaf in before.leaves if leaf in topological([x])}
    found = turned(x, tuple(below), n.norm.shape)
    if found is None:
        return None
    above = {a for node in topological([before.root], {x, *before.leaves}) for a in node.inputs}
    if any(leaf in above - {x} and n.stands.get(leaf, leaf) in found.images for leaf in below):
        return None
    stands = {t: n.stands.get(real, real) for t, real in found.stands.items()}
    found = replace(found, stands=stands, images=tuple(n.stands.get(i, i) for i in found.images))
    numbers = (node for node in topological([found.root]) if isinstance(node.op, ops.Full))
    tree = Tree(found.root, (*stands, *numbers), None)
    sums = stream.of_rows(tree, VARIANCE, tuple(range(1, x.ndim - 1)), found.users)
    channels = x.shape[1]
    if isinstance(sums, str) or not isinstance(channels, int):
        return None
    groups = op.groups if op.kind == "group" else channels
    return TurnedNorm(n, x, found, sums, channels // groups)


def as_seen(n: Normalization, last: Collection[Node]) -> Normalization | None:
    """A norm of what is moved as it sees that, where all of it is images whose channels lie last, seen row by row."""
    views = {t: n.stands[t] for t in n.moved}
    rows = all(_shows_rows(t) and t.arg(0) is x and x in last for t, x in views.items())
    return replace(n, stands={**n.stands, **{t: t for t in views}}, moved={}) if views and rows else None


def _shows_rows(node: Node) -> bool:
    """Whether this is an image whose channels have become the last dimension."""
    return isinstance(node.op, ops.Permute) and node.ndim in (4, 5) and node.op.dims == (0, *range(2, node.ndim), 1)


def turned(root: Node, leaves: Collection[Node], shape: Sequence[Size]) -> Turned | None:
    """`root`, computed from `leaves` of which images have this shape; `None` where there are no such, or where others
    would have to be copied."""
    turning = _Turning(tuple(shape), frozenset(leaves))
    for node in topological([root], leaves):
        found = node if isinstance(node.op, ops.Number) else turning.computed(node)
        if found is None:
            return None
        turning.of[node] = found
    last = turning.of[root] if root not in leaves else turning.operand(root, root.ndim)
    if last is None or not turning.images:
        return None
    users = Counter(a for node in topological([last]) for a in node.inputs)
    return Turned(last, turning.stands, tuple(turning.images), users | Counter(dict.fromkeys(turning.stands, HELD)))


@dataclass
class _Turning:
    """What nodes are in the other order."""

    shape: tuple[Size, ...]
    leaves: Collection[Node]
    of: dict[Node, Node] = field(default_factory=dict)
    stands: dict[Node, Node] = field(default_factory=dict)
    images: dict[Node, None] = field(default_factory=dict)

    def operand(self, leaf: Node, ndim: int) -> Node | None:
        """What stands for an operand of what has so many dimensions: an image, or what lies the same in both orders."""
        shape = leaf.shape
        if ndim == len(self.shape) and shape:
            padded: list[Size] = [*(1,) * (ndim - leaf.ndim), *shape]
            first, channels, rest = padded[0], padded[1], padded[2:]
            if channels != 1 and any(n != 1 for n in rest) and not isinstance(leaf.op, ops.Full):
                if shape != self.shape:
                    return None
                self.images[leaf] = None
            shape = (first, *rest, channels)
        if isinstance(leaf.op, ops.Full):
            return make(replace(leaf.op, shape=shape))
        same = (s for s, real in self.stands.items() if real is leaf and s.shape == shape)
        stand_in = next(same, None) or make(ops.Input(shape, leaf.dtype, leaf.device, "turned", len(self.stands)))
        self.stands[stand_in] = leaf
        return stand_in

    def computed(self, node: Node) -> Node | None:
        """A function, or a reduction, of what is in the other order."""
        if isinstance(node.op, ops.Full):
            return self.operand(node, node.ndim)
        outside = [a in self.leaves or isinstance(a.op, ops.Full) for a in node.inputs]
        ndim = node.ndim if isinstance(node.op, POINTWISE) else node.arg(0).ndim
        args = [self.operand(a, ndim) if o else self.of[a] for a, o in zip(node.inputs, outside, strict=True)]
        whole = [a for a in args if a is not None]
        if len(whole) < len(args) or len(args) < len(node.args):
            return None
        if isinstance(node.op, POINTWISE):
            return remade(node, whole)
        return self._reduced(node, node.op, whole) if isinstance(node.op, ops.Reduce) else None

    def _reduced(self, node: Node, op: ops.Reduce, args: list[Node]) -> Node | None:
        """A reduction that leaves dimensions in the same order, or keeps them all."""
        x = node.arg(0)
        if op.gives_index or op.first or x.ndim != len(self.shape):
            return None if op.gives_index or op.first else remade(node, args)
        place = (0, x.ndim - 1, *range(1, x.ndim - 1))
        left = [place[d] for d in range(x.ndim) if d not in op.dims]
        if not op.keepdim and left != sorted(left):
            return None
        return make(replace(op, dims=tuple(sorted(place[d] for d in op.dims))), *args, where=node.where)


def _is_image(shape: Sequence[Size]) -> bool:
    """Whether channels and positions are several, and elements change places."""
    return shape[1] != 1 and any(n != 1 for n in shape[2:])
