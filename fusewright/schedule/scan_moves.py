"""What scans need no copies for: from which end a row is joined, and which of its prefixes are asked for.

    cumsum(x.flip(1), 1).flip(1)              joined from the end on
    cumsum(cat((zeros, x), 1), 1)[:, :-1]     every prefix ends ahead of its own element: it is *exclusive*

The *way* of a row is the order in which it is joined.  Along it, result q joins all elements up to q - `ahead`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.schedule.look_through import Along, look_through
from fusewright.schedule.stream_axes import lies_in_rows
from fusewright.schedule.stream_record import Within

MOVES = (ops.Flip, ops.Slice, ops.Cat, ops.Pad)

# What joins with anything to that.
NEUTRAL: dict[ops.ScanKind, float] = {"sum": 0.0, "prod": 1.0, "max": -inf, "min": inf, "logsumexp": -inf}


@dataclass(frozen=True)
class Moved:
    """What an operation does to rows: whether it turns them, and how many neutral elements it puts ahead of them along
    the way; negative where it leaves out as many."""

    turned: bool = False
    ahead: int = 0

    def then(self, other: Moved) -> Moved | None:
        """Both; `None` where elements that are left out would be neutral afterwards."""
        cut = self.ahead < 0 < other.ahead
        return None if cut else Moved(self.turned != other.turned, self.ahead + other.ahead)


@dataclass(frozen=True)
class Place:
    """Where the elements of a leaf lie: in `tensor`, whose dimensions are `dims` of the leaf, `within` those it has
    others of as well.  What `stands` for them is as long as results are."""

    stands: Node
    tensor: Node
    dims: tuple[int | None, ...]
    within: tuple[Within, ...]

    @property
    def is_apart(self) -> bool:
        """Whether neighbours along the last dimension are none in memory."""
        behind = max(j for j, d in enumerate(self.dims) if d is not None) + 1
        return any(w.dim >= behind for w in self.within)


def below(node: Node) -> Node:
    """What an operation moves: of a concatenation, the part that is not of one value."""
    return next((a for a in node.inputs if _filled_with(a) is None), node.arg(0))


def _filled_with(x: Node) -> float | None:
    """The one value that a tensor consists of, if it is known."""
    while isinstance(x.op, ops.Expand | ops.Reshape | ops.Slice | ops.Cast | ops.Detach):
        x = x.arg(0)
    return float(x.op.value) if isinstance(x.op, ops.Full) else None


def moved(node: Node, dim: int, neutral: float, *, turned: bool) -> Moved | None:
    """What a node does to rows along `dim`, whose way is that of the dimension, or from its end on (`turned`); `None`
    where that is anything else."""
    x = below(node)
    lengths = node.shape[dim], x.shape[dim]
    if not all(isinstance(n, int) for n in lengths):
        return None
    more = int(lengths[0]) - int(lengths[1])
    match node.op:
        case ops.Flip(dims=dims):
            return Moved(turned=True) if dims == (dim,) else None
        case ops.Slice(dim=along, start=start, step=1):
            return Moved(ahead=more + start if turned else -start) if along == dim else None
        case ops.Pad(mode="constant", value=value) as op:
            sides = {d: (left, right) for d, left, right in op.pads if left or right}
            only = value == neutral and sides.get(dim) == ((0, more) if turned else (more, 0))
            return Moved(ahead=more) if only and len(sides) == 1 else None
        case ops.Cat(dim=along):
            other = node.inputs[-1 if turned else 0]
            beside = along == dim and len(node.inputs) == 2 and x is not other
            return Moved(ahead=more) if beside and _filled_with(other) == neutral else None
    return None


def behind(moves: Iterable[Node], dim: int, neutral: float) -> Moved | None:
    """What follows a scan, in order."""
    found = Moved()
    for node in moves:
        each = moved(node, dim, neutral, turned=found.turned)
        both = None if each is None else found.then(each)
        if both is None:
            return None
        found = both
    return found


def ahead_of(x: Node, dim: int, neutral: float, inner: Collection[Node]) -> tuple[Node, Moved]:
    """What `x`, which is joined, is moved from as far as nothing is left out ahead, and how."""
    found = Moved()
    while x in inner and isinstance(x.op, MOVES):
        each = moved(x, dim, neutral, turned=found.turned)
        if each is None or each.ahead < 0:
            break
        found = Moved(found.turned != each.turned, found.ahead + each.ahead)
        x = below(x)
    return x, found


def is_along(leaf: Node, root: Node, dim: int) -> bool:
    """Whether a leaf of a tree varies along dimension `dim` of its root."""
    own = dim - root.ndim + leaf.ndim
    return own >= 0 and leaf.shape[own] != 1


def place(leaf: Node, dim: int, begin: int, length: int, spare: int, *, features: bool = False) -> Place | None:
    """Where `length` elements of a leaf are, or `spare` fewer, from `begin` on along its `dim`: in the tensor that it
    is a view of, which may have those beside it; `None` where there are no such.  Of `features`, which lie along the
    last dimension, it may have others as well."""
    free = (dim, leaf.ndim - 1) if features else (dim,)
    tensor, places = _in_memory(leaf, dim, free)
    along = next(j for j, p in enumerate(places) if p.dim == dim)
    first, whole = places[along].begin + begin, tensor.shape[along]
    if not isinstance(whole, int) or first < 0 or first + length - spare > whole:
        return None
    cuts = []
    for j, p in enumerate(places):
        if p.dim in (None, *free):
            size = 1 if p.dim is None else leaf.shape[p.dim]
            cuts.append(Within(j, *((first, length) if j == along else (p.begin, int(size))), int(tensor.shape[j])))
    cuts = [w for w in cuts if (w.begin, w.size) != (0, w.length)]
    stands = make(ops.Roll(((dim, -begin),)), leaf) if begin else leaf
    return Place(resized(stands, dim, length), tensor, tuple(p.dim for p in places), tuple(cuts))


def _in_memory(leaf: Node, dim: int, free: tuple[int, ...]) -> tuple[Node, tuple[Along, ...]]:
    """The tensor that a leaf is read from, and what runs along its dimensions.

    Those are the leaf's, of which all that are not `free` are whole, and others, of which one index is read; none of
    these is between two that may be run along together.  Any other view is in memory itself.
    """
    base, places = look_through(leaf)
    own = [p.dim for p in places if p.dim is not None]
    single = [j for j, p in enumerate(places) if p.dim is None]
    parted = any(dim not in (places[j - 1].dim, places[j + 1].dim) for j in single if 0 < j < len(places) - 1)
    runs = [(j, p.dim) for j, p in enumerate(places) if p.dim is not None and p.dim not in free]
    whole = all(base.shape[j] == leaf.shape[d] for j, d in runs)
    known = all(isinstance(base.shape[j], int) for j, p in enumerate(places) if p.dim in (*free, None))
    fine = own == [*range(leaf.ndim)] and whole and known and not parted and base.varies and lies_in_rows(base)
    return (base, places) if fine else (leaf, tuple(map(Along, range(leaf.ndim))))


def resized(x: Node, dim: int, length: int) -> Node:
    """What stands for elements of `x` where there are so many along `dim`."""
    have = x.shape[dim]
    assert isinstance(have, int)
    if have < length:
        return make(ops.Pad(((dim, 0, length - have),)), x)
    return x if have == length else make(ops.Slice(dim, 0, length), x)
