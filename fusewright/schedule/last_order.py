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
from fusewright.schedule import kept_rows, several_folds, stream
from fusewright.schedule.chain import POINTWISE, Users
from fusewright.schedule.kept_rows_record import KeptRows
from fusewright.schedule.normalization import HELD, VARIANCE, ChannelStatistics, Normalization
from fusewright.schedule.range_sums import RangeReduction
from fusewright.schedule.several_folds import SeveralFolds
from fusewright.schedule.stream_record import Stream, Tree


@dataclass(frozen=True)
class Turned:
    """Values in the other order.

    of      what has become of each
    roots   the results
    stands  what its operands stand for
    images  those of these that lie otherwise than row by row
    users   of all its nodes
    """

    of: Mapping[Node, Node]
    roots: tuple[Node, ...]
    stands: Mapping[Node, Node]
    images: tuple[Node, ...]
    users: Users

    @property
    def root(self) -> Node:
        """The only result, or the first one."""
        return self.roots[0]


@dataclass(frozen=True)
class TurnedStream:
    """A stream, or a range reduction to one sum per plane, of such images: `s` is one over what stands for them."""

    turned: Turned
    s: Stream


@dataclass(frozen=True)
class TurnedFolds:
    """Several reductions of such images."""

    turned: Turned
    several: SeveralFolds

    @property
    def s(self) -> Stream:
        """The stream of all of them."""
        return self.several.within


@dataclass(frozen=True)
class TurnedRows:
    """Rows of such images that are kept: the channels of a position."""

    turned: Turned
    k: KeptRows

    @property
    def s(self) -> Stream:
        """The stream that reads them."""
        return self.k.within


@dataclass(frozen=True)
class TurnedStatistics:
    """Statistics of the channels of a batch of such images."""

    turned: Turned
    c: ChannelStatistics

    @property
    def s(self) -> Stream:
        """The stream that reduces each channel."""
        return self.c.sums


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
    return _stream(s.root, s.tensors) if _is_plain(s) else None


def _is_plain(s: Stream) -> bool:
    """Whether all tensors are read as they are, element by element."""
    return s.window is None and not s.weights and all(r.value is r.tensor for r in s.reads)


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
    found = _turned([root], tensors)
    s = "" if found is None else stream.parse(found.root, found.users, parts=False)
    if found is None or not isinstance(s, Stream) or s.window is not None or not _reads_all(s, found):
        return None
    return None if s.folds and _is_image(root) else TurnedStream(found, s)


def of_folds(s: SeveralFolds) -> TurnedFolds | None:
    """The same of several reductions."""
    found = _turned(s.results, s.tensors) if _is_plain(s.within) else None
    if found is None or any(map(_is_image, s.results)):
        return None
    if s.tails:
        results, reductions = [found.of[r] for r in s.results], [found.of[f.node] for f in s.folds]
        several = several_folds.side_by_side(results, reductions, found.users)
    else:
        several = several_folds.parse(found.root, found.users)
    whole = isinstance(several, SeveralFolds) and _reads_all(several.within, found)
    return TurnedFolds(found, several) if whole and isinstance(several, SeveralFolds) else None


def of_statistics(c: ChannelStatistics) -> TurnedStatistics | None:
    """The same of statistics of channels: those of columns, a channel each."""
    found = _turned([c.sums.value], c.sums.tensors) if _is_plain(c.sums) else None
    if found is None:
        return None
    sums = _of_channels(found, range(found.root.ndim - 1))
    if isinstance(sums, str) or not _reads_all(sums, found):
        return None
    return TurnedStatistics(found, replace(c, sums=sums))


def _of_channels(found: Turned, dims: Sequence[int]) -> Stream | str:
    """The stream that reduces what is in the other order over these dimensions."""
    numbers = (node for node in topological([found.root]) if isinstance(node.op, ops.Full))
    return stream.of_rows(Tree(found.root, (*found.stands, *numbers), None), VARIANCE, tuple(dims), found.users)


def of_rows(k: KeptRows) -> TurnedRows | None:
    """The same of channels that are kept: rows, where they were columns."""
    found = _turned(k.roots, k.tensors) if _is_plain(k.within) and len(k.roots) == 1 else None
    rows = "" if found is None else kept_rows.parse(found.root, found.users)
    if found is None or not isinstance(rows, KeptRows) or not _reads_all(rows.within, found):
        return None
    return TurnedRows(found, rows) if rows.in_rows else None


def _turned(roots: Sequence[Node], tensors: Sequence[Node]) -> Turned | None:
    """`turned`, by the first image."""
    images = [t for t in tensors if t.ndim in (4, 5)]
    return turned(roots, tensors, images[0].shape) if images else None


def _reads_all(s: Stream, found: Turned) -> bool:
    """Whether a stream reads each operand once."""
    return set(s.tensors) == found.stands.keys() and len({*found.stands.values()}) == len(found.stands)


def of_norm(n: Normalization) -> TurnedNorm | None:
    """A norm and what is around it, where nothing pools or reduces; x is read by nothing but the norm's operand."""
    op, before = n.op, n.behind.before
    if not (isinstance(op, ops.Norm) and op.kind in ("group", "instance")) or before is None or n.also is not None:
        return None
    if n.behind.window is not None or n.behind.folds or n.moved or n.looks_up or n.norm.ndim not in (4, 5):
        return None
    x = next((t for t in before.leaves if n.stands.get(t) is n.norm.arg(0)), n.norm.arg(0))
    below = {leaf for leaf in before.leaves if leaf in topological([x])}
    found = turned([x], tuple(below), n.norm.shape)
    if found is None:
        return None
    above = {a for node in topological([before.root], {x, *before.leaves}) for a in node.inputs}
    if any(leaf in above - {x} and n.stands.get(leaf, leaf) in found.images for leaf in below):
        return None
    stands = {t: n.stands.get(real, real) for t, real in found.stands.items()}
    found = replace(found, stands=stands, images=tuple(n.stands.get(i, i) for i in found.images))
    sums = _of_channels(found, range(1, x.ndim - 1))
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


def turned(roots: Sequence[Node], leaves: Collection[Node], shape: Sequence[Size]) -> Turned | None:
    """`roots`, computed from `leaves` of which images have this shape; `None` where there are no such, or where others
    would have to be copied."""
    turning = _Turning(tuple(shape), frozenset(leaves))
    for node in topological(roots, leaves):
        found = node if isinstance(node.op, ops.Number) else turning.computed(node)
        if found is None:
            return None
        turning.of[node] = found
    last = [turning.of[root] if root not in leaves else turning.operand(root, root.ndim) for root in roots]
    whole = [root for root in last if root is not None]
    if len(whole) < len(last) or not turning.images:
        return None
    users = Counter([*whole, *(a for node in topological(whole) for a in node.inputs)])
    users |= Counter(dict.fromkeys(turning.stands, HELD))
    return Turned(turning.of, tuple(whole), turning.stands, tuple(turning.images), users)


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


def _is_image(node: Node) -> bool:
    """Whether channels and positions are several, and elements change places."""
    return node.ndim in (4, 5) and node.shape[1] != 1 and any(n != 1 for n in node.shape[2:])
