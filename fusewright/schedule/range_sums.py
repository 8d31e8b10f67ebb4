"""Range reductions: sums over index ranges of the last dimensions of one tensor, each element read once.

The dimensions before the summed ones count *planes*.  Along each summed axis, indices that belong to the same slots
form *segments*; what a kernel adds up is one *cell* per segment and residue, and a slot is the sum of its cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import lcm, prod

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.ops import Size, Slot
from fusewright.schedule.chain import MEMORY
from fusewright.schedule.range_order import Digits, moved_from, order_behind

# Bounds on what a block keeps and on the length of the tables in a kernel's text.
MOST_CELLS = 256
MOST_SLOTS = 64  # along one axis: a bit mask
MOST_PERIOD = 16
MOST_KEPT = 4096


@dataclass(frozen=True)
class Segment:
    """Indices from `begin` up to `end`; those of residue q modulo len(members) are in the slots of mask members[q]."""

    begin: int
    end: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """Neighbouring dimensions that one index runs over; `slots` is `None` where all of it is one sum."""

    dims: tuple[int, ...]
    slots: tuple[Slot, ...] | None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Once for all slots: what is found out about an axis is kept and looked up often."""
        return hash((self.dims, self.slots))

    @cached_property
    def period(self) -> int:
        """Membership inside a segment depends on the index modulo this."""
        return lcm(*(s.step for s in self.slots or () if s.count > 1))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The indices of all slots in the fewest segments; what is in no slot is in no segment."""
        slots = self.slots or ()
        ends = {s: (s.start, s.end) for s in slots if s.count}
        borders = sorted({end for pair in ends.values() for end in pair})
        found: list[Segment] = []
        for begin, end in pairwise(borders):
            members = tuple(self._mask(q, begin, end) for q in range(self.period))
            if found and found[-1].end == begin and _agree(found[-1], members, begin, end):
                last = found.pop()
                members = tuple(a | b for a, b in zip(last.members, members, strict=True))
                begin = last.begin
            if any(members):
                found.append(Segment(begin, end, members))
        return tuple(found)

    def _mask(self, residue: int, begin: int, end: int) -> int:
        """The slots that hold the indices in [begin, end) of this residue; none where there is no such index."""
        first = begin + (residue - begin) % self.period
        if first >= end:
            return 0
        holds = (s.count and s.start <= first < s.stop and (first - s.start) % s.step == 0 for s in self.slots or ())
        return sum(1 << i for i, held in enumerate(holds) if held)


def _agree(last: Segment, members: tuple[int, ...], begin: int, end: int) -> bool:
    """Whether a segment and the indices behind it, as far as they have the same residues, are in the same slots."""
    period = len(members)
    for q in range(period):
        present = begin + (q - begin) % period < end
        before = last.begin + (q - last.begin) % period < last.end
        if present and before and last.members[q] != members[q]:
            return False
    return True


@dataclass(frozen=True)
class RangeReduction:
    """Sums of `value` over slots of the axes, outermost first; `value` is a tree of pointwise operations on `x`.

    leading  dimensions before the summed ones
    mean     whether a total is divided by the number of elements
    scale    what a total is multiplied by; slots have scales of their own
    stored   the value whose elements are results in another order, which its kernel writes, and that order with its
             reverse (see `fusewright.schedule.range_order`)
    """

    root: Node
    x: Node
    value: Node
    leading: int
    axes: tuple[Axis, ...]
    mean: bool = False
    scale: float = 1.0
    stored: Node | None = None
    order: tuple[Digits, Digits] = ((), ())

    @property
    def tail(self) -> Node | None:
        """What a group without it may still do."""
        return self.stored

    @property
    def total(self) -> bool:
        """Whether there is one sum over everything, of any length."""
        return len(self.axes) == 1 and self.axes[0].slots is None

    @property
    def slots(self) -> int:
        """Sums per plane."""
        return prod(len(a.slots) for a in self.axes if a.slots is not None)

    @property
    def sums(self) -> int:
        """Different sums per plane that slots are made of, where none is to be read twice."""
        return prod(len(a.segments) * a.period for a in self.axes)


def parse(root: Node, single: Callable[[Node], bool]) -> RangeReduction | str:
    """The range reduction that ends in `root`, or why there is none; `single` says that a value has one user."""
    stored, root = root, moved_from(root, single)
    summed = _summed(root)
    if isinstance(summed, str):
        return summed
    leading, axes, mean, scale = summed
    value = root.arg(0)
    x = _source(value, single)
    if isinstance(x, str):
        return x
    wrong = [n for n in (root, x, value) if n.dtype not in MEMORY]
    if wrong:
        return f"{wrong[0]!r} is summed in {wrong[0].dtype}"
    found = RangeReduction(root, x, value, leading, axes, mean, scale)
    problem = _problem(found)
    if problem is not None or stored is root:
        return problem or found
    order = order_behind(stored, root, leading)
    return order if isinstance(order, str) else replace(found, stored=stored, order=order)


Summed = tuple[int, tuple[Axis, ...], bool, float]


def _summed(root: Node) -> Summed | str:
    """The number of leading dimensions, the axes, whether the sum is a mean, and the scale of a total."""
    if isinstance(root.op, ops.RangeSum):
        return _ranges(root)
    if not isinstance(root.op, ops.Reduce) or root.op.kind not in ("sum", "mean") or not root.op.dims:
        return f"{root!r} is no sum"
    first, rank = root.op.dims[0], root.arg(0).ndim
    if root.op.dims != tuple(range(first, rank)):
        return f"{root!r} is over {root.op.dims}, not over the last dimensions"
    return first, (Axis(root.op.dims, None),), root.op.kind == "mean", 1.0


def _ranges(root: Node) -> Summed | str:
    """The axes of a range sum; a dimension of which all or a range is summed is merged with those inside it.

    A dimension that is kept between summed ones, or behind them, has a slot per index.
    """
    assert isinstance(root.op, ops.RangeSum)
    table, x = dict(root.op.table), root.arg(0)
    first = min(table)
    axes: list[Axis] = []
    inside = 1  # elements of the last axis found so far, while it is all of them
    for dim in reversed(range(first, x.ndim)):
        length = x.shape[dim]
        if not isinstance(length, int) or (dim not in table and length > MOST_KEPT):
            return f"{root!r} keeps {length} indices of dimension {dim}"
        slots = table.get(dim) or tuple(Slot(i, i + 1, 1, 1.0) for i in range(length))
        merged = axes and inside and all(s.count <= 1 or s.step == 1 for s in slots)
        if merged:
            inner = axes.pop()
            factor = inner.slots[0].scale if inner.slots else 1.0
            slots = tuple(
                Slot(s.start * inside, s.start * inside + s.count * inside, 1, s.scale * factor) for s in slots
            )
            length, dims = length * inside, (dim, *inner.dims)
        else:
            dims = (dim,)
        axes.append(Axis(dims, slots))
        inside = length if len(slots) == 1 and (slots[0].start, slots[0].count, slots[0].step) == (0, length, 1) else 0
    slots = axes[0].slots or ()
    if len(axes) == 1 and inside:
        return first, (Axis(axes[0].dims, None),), False, slots[0].scale
    return first, tuple(reversed(axes)), False, 1.0


def _source(value: Node, single: Callable[[Node], bool]) -> Node | str:
    """The one tensor in memory that a tree of pointwise operations reads; a value with another user is in memory."""
    leaves: dict[Node, None] = {}
    stack, seen = [value], {value}
    while stack:
        node = stack.pop()
        inner = isinstance(node.op, ops.Pointwise | ops.Cast) and single(node) and node.shape == value.shape
        if not inner or not _computable(node):
            leaves[node] = None
            continue
        fresh = [a for a in node.inputs if a not in seen and not _plain_number(a)]
        seen.update(fresh)
        stack += fresh
    if len(leaves) != 1:
        return f"{value!r} reads {len(leaves)} tensors"
    source = next(iter(leaves))
    return source if source.shape == value.shape else f"{source!r} is broadcast before it is summed"


def _computable(node: Node) -> bool:
    return isinstance(node.op, ops.Cast) or (isinstance(node.op, ops.Pointwise) and node.op.traits.cpp is not None)


def _plain_number(node: Node) -> bool:
    return isinstance(node.op, ops.Number) and isinstance(node.op.value, bool | int | float)


def _problem(r: RangeReduction) -> str | None:
    """Why no kernel of this family computes a range reduction."""
    if r.total:
        return None
    if len(r.axes) > 3:
        return f"{r.root!r} is over {len(r.axes)} axes"
    if not all(any(s.count for s in a.slots or ()) for a in r.axes):
        return f"{r.root!r} sums nothing"
    sizes = [d for d in r.x.shape[r.leading :] if isinstance(d, int)]
    return f"{r.root!r} sums planes of 2^31 elements" if prod(sizes) >= 2**31 else None


def in_one_pass(r: RangeReduction) -> str | None:
    """Why a range reduction has too many different sums for threads that keep them all; `None` where it has not."""
    if r.total:
        return None
    if any(len(a.slots or ()) > MOST_SLOTS or a.period > MOST_PERIOD for a in r.axes):
        return f"{r.root!r} has too many slots"
    if r.sums > MOST_CELLS or prod(len(a.slots or ()) for a in r.axes[:-1]) > MOST_SLOTS:
        return f"{r.root!r} has slots with too many borders"
    pack = 16 // r.x.dtype.itemsize
    if len(r.axes) == 1 and pack % r.axes[0].period:
        return f"{r.root!r} takes one element in {r.axes[0].period}, and loads bring {pack}"
    return None


def known(size: Size) -> int:
    """A size that the graph knows, as those of planes are."""
    assert isinstance(size, int), size
    return size
