"""The rearrangement family: elements that lie elsewhere than they did, and functions of them.

    relu(channel_shuffle(x))      upsample(x) + skip      cat(sin(x), cos(x))      x * c + cat(-x2, x1) * s

What eager copies, a concatenation, a padding, a permutation in memory, is a matter of where a result's elements are
read.  One pass computes them in the order in which they are written: from the flat index of an element follows, by
constants, where in memory its operands lie (`indices`), and of which part of a concatenation it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from weakref import WeakKeyDictionary

import sympy
import torch

from fusewright.ir import indices, ops
from fusewright.ir.build import pointwise
from fusewright.ir.indices import Index, Variable
from fusewright.ir.node import Node, make
from fusewright.schedule.chain import MEMORY, POINTWISE, Users, is_rounded, is_sized, used_inside
from fusewright.schedule.separate_windows import beside_others, is_separate, written_out

VIEWS = (ops.Reshape, ops.Permute, ops.Expand, ops.Slice, ops.Windows)
# What eager copies for, or computes of elements that lie elsewhere.
MOVES = (ops.Cat, ops.Pad, ops.Roll, ops.Flip, ops.Upsample, ops.Interpolate, ops.Unfold, ops.Fold, ops.Cross)

# Places from which elements are read, in all branches; reads, each as often as it is used; and operations of a kernel.
MOST_PLACES, MOST_LOADS, MOST_NODES = 64, 256, 256
# A warp may reach for so many times as many bytes as it uses, in all that it reads; from so many on they are turned.
WASTE, WORTH_TURNING = 3.0, 1.5
WARP, SECTOR = 32, 32
# What is turned has so many elements side by side, on both sides; so many loads are turned together.
LEAST_TURNED, MOST_TURNED = 8, 4


@dataclass(frozen=True)
class Load:
    """An element of a tensor in memory."""

    tensor: Node
    address: Index


@dataclass(frozen=True)
class Computed:
    """`root`, by pointwise operations, from the values that stand for `leaves`."""

    root: Node
    leaves: tuple[tuple[Node, Value], ...]


@dataclass(frozen=True)
class Selected:
    """Of the parts of a concatenation the one whose end `index` has not reached."""

    node: Node
    index: Index
    ends: tuple[int, ...]
    parts: tuple[Value, ...]


@dataclass(frozen=True)
class Padded:
    """`value` where every index is less than its length, and `outside` elsewhere: below 0 it is as if very large."""

    node: Node
    inside: tuple[tuple[Index, int], ...]
    value: Value
    outside: float


@dataclass(frozen=True)
class Between:
    """`part / per` of the way from one value to the next; of four, by a cubic between the middle ones."""

    node: Node
    part: Index
    per: int
    taps: tuple[Value, ...]


@dataclass(frozen=True)
class Summed:
    """The sum of values, in this order from 0 on."""

    node: Node
    parts: tuple[Value, ...]


Value = Load | Computed | Selected | Padded | Between | Summed


@dataclass(frozen=True)
class Turn:
    """What is side by side in memory along the digit `at / step % length`, and not as it is written."""

    step: int
    length: int
    loads: tuple[Load, ...]


@dataclass(frozen=True)
class Rearrangement:
    """A group of this family: `value` is the element of `root` at the flat index `at`.

    turn  what is read in another order than it is used, through shared memory
    """

    root: Node
    tensors: tuple[Node, ...]
    at: Variable
    value: Value
    turn: Turn | None = None


def parse(root: Node, users: Users) -> Rearrangement | str:
    """The largest group of this family that ends in `root`, or why there is none."""
    if root.dtype not in MEMORY:
        return f"{root!r} lies in memory as {root.dtype}"
    inner = _inner(root, users)
    if not any(copies(n) or _joins(n, inner) or is_pool(n) for n in inner if n is not root or not turns(n)):
        return f"nothing is copied on the way to {root!r}"
    seen, of = _seen(root, inner)
    if of not in inner or any(isinstance(n.op, ops.Windows) for n in seen):
        return f"{root!r} is a view, perhaps of windows that share elements"
    start = indices.flat(root.shape)
    if start is None or 0 in root.shape:
        return f"{root!r} is empty, or of no known strides"
    finder = _Finder(inner)
    value = finder.value(root, start[1])
    if isinstance(value, str):
        return value
    tensors = tuple(dict.fromkeys(load.tensor for load in loads(value)))
    wrong = next((t for t in tensors if t.dtype not in (*MEMORY, torch.bool)), None)
    if wrong is not None or not tensors:
        return f"{wrong!r} lies in memory as {wrong.dtype}" if wrong is not None else f"{root!r} reads nothing"
    found = Rearrangement(root, tensors, start[0], value)
    if _measured(found, inner) > WORTH_TURNING:
        found = replace(found, turn=_turn(found))
    return found if _measured(found, inner) <= WASTE else "elements that are read together lie too far apart"


def moved(root: Node, users: Users) -> Rearrangement | None:
    """Where the elements of `root` lie in the one tensor that it consists of, if that is elsewhere than row by row;
    what lies along another dimension than in `root` is turned, and there is a `turn`."""
    start = indices.flat(root.shape)
    if start is None or 0 in root.shape or root.dtype not in MEMORY:
        return None
    fits = (*VIEWS, *MOVES)
    inner = {n for n in used_inside(root, users, lambda n: isinstance(n.op, fits), MOST_NODES) if n.varies}
    value = _Finder(inner).value(root, start[1])
    if not isinstance(value, Load) or not value.tensor.varies or value.address == indices.variable(start[0]):
        return None
    found = Rearrangement(root, (value.tensor,), start[0], value)
    found = replace(found, turn=_turn(found)) if _measured(found, inner) > WORTH_TURNING else found
    return found if _measured(found, inner) <= WORTH_TURNING else None


def call_length(root: Node, tensors: Sequence[Node]) -> tuple[sympy.Symbol | None, tuple[str, int, int] | None] | None:
    """The one length that only a call knows, if any, and where a call shows it; `None` where no operand does."""
    sizes = [n for t in (root, *tensors) for n in t.shape if not isinstance(n, int)]
    symbols = {s for n in sizes for s in n.free_symbols}
    if not symbols:
        return None, None
    shown = ((i, d, n) for i, t in enumerate(tensors) for d, n in enumerate(t.shape))
    for i, d, n in shown:
        if symbols == {n} and all(each.is_polynomial(n) for each in sizes):
            return n, ("s0", i, d)
    return None


def is_whole(root: Node, values: int) -> bool:
    """Whether the elements are a whole number of groups of so many, whatever the first length."""
    return prod(n for n in root.shape if isinstance(n, int)) % values == 0


_WASTE: WeakKeyDictionary[Node, dict[tuple[frozenset[int], bool], float]] = WeakKeyDictionary()


def _measured(r: Rearrangement, inner: set[Node]) -> float:
    """The `waste` of what computes these nodes, which live as long as its root; every group that is looked for asks."""
    known, key = _WASTE.setdefault(r.root, {}), (frozenset(map(id, inner)), r.turn is not None)
    if key not in known:
        known[key] = waste(r)
    return known[key]


def loads(value: Value) -> Iterator[Load]:
    """All that is read, in every branch."""
    return (found for found in below(value) if isinstance(found, Load))


def below(value: Value) -> Iterator[Value]:
    """A value, and what it is made of, in every branch."""
    yield value
    match value:
        case Computed():
            for _, leaf in value.leaves:
                yield from below(leaf)
        case Selected() | Summed():
            for part in value.parts:
                yield from below(part)
        case Padded():
            yield from below(value.value)
        case Between():
            for tap in value.taps:
                yield from below(tap)


def _turn(r: Rearrangement) -> Turn | None:
    """The digit along which loads lie that lie along another than the innermost, if it is one, and all are always
    asked for."""
    turned: dict[tuple[int, int], list[Load]] = {}
    for load in dict.fromkeys(loads(r.value)):
        digits = [d for n, d in load.address.terms if n == 1]
        if len(digits) != 1 or digits[0].variable != r.at or digits[0].step < LEAST_TURNED:
            continue
        length = digits[0].length or (r.at.length or 0) // digits[0].step  # 0 where nobody knows
        if waste(replace(r, value=load)) > WORTH_TURNING:
            turned.setdefault((digits[0].step, length), []).append(load)
    always_read = set(always(r.value))
    if len(turned) != 1:
        return None
    (((step, length), some),) = turned.items()
    fit = length >= LEAST_TURNED and len(some) <= MOST_TURNED and always_read.issuperset(some)
    return Turn(step, length, tuple(some)) if fit else None


def always(value: Value) -> Iterator[Load]:
    """What is read whichever branches are taken."""
    match value:
        case Load():
            yield value
        case Computed():
            for _, leaf in value.leaves:
                yield from always(leaf)
        case Summed():
            for part in value.parts:
                yield from always(part)
        case Between():
            for tap in value.taps:
                yield from always(tap)


def _elements(root: Node) -> int:
    """The number of elements, where it is known, of a batch of eight elsewhere."""
    return prod(n if isinstance(n, int) else 8 for n in root.shape)


def _seen(root: Node, inner: set[Node]) -> tuple[list[Node], Node]:
    """The views that a group ends in, and of what."""
    views = []
    while root in inner and shows(root):
        views.append(root)
        root = root.arg(0)
    return views, root


def _inner(root: Node, users: Users) -> set[Node]:
    """What is computed here: used nowhere else, and not derived ahead of calls; of pools, those beside what else reads
    their elements."""
    inner = used_inside(root, users, _fits, MOST_NODES)
    if any(map(is_pool, inner)):
        kept = beside_others(inner, MOVES)
        inner = used_inside(root, users, lambda n: _fits(n) and (n in kept or not is_pool(n)), MOST_NODES)
    return {node for node in inner if node.varies}


def pools_on_the_way(root: Node, users: Users) -> bool:
    """Whether a group that ends in `root` would pool."""
    return any(map(is_pool, _inner(root, users)))


def is_pool(node: Node) -> bool:
    """Whether `node` pools windows."""
    return isinstance(node.op, ops.Pool)


def _joins(node: Node, inner: set[Node]) -> bool:
    """Whether this is a function of what another function gives in another shape: no stream has both."""
    ahead = [a.arg(0) for a in node.inputs if isinstance(a.op, ops.Reshape) and a in inner]
    return isinstance(node.op, POINTWISE) and any(a in inner and isinstance(a.op, POINTWISE) for a in ahead)


def _fits(node: Node) -> bool:
    if node.dtype not in (*MEMORY, torch.bool):
        return False
    if isinstance(node.op, ops.Cast):
        return not _is_rounded(node)
    if isinstance(node.op, ops.Pointwise):
        return node.op.traits.cpp is not None and not is_sized(node)
    return isinstance(node.op, (*VIEWS, *MOVES)) or is_separate(node)


def _is_rounded(node: Node) -> bool:
    """Whether what a cast widens was narrowed, perhaps before it was moved, and must lose its last digits."""
    stack = [node.arg(0)]
    while stack:
        x = stack.pop()
        if isinstance(x.op, ops.Cast) and is_rounded(make(node.op, x)):
            return True
        stack += x.inputs if isinstance(x.op, (*VIEWS, *MOVES)) else ()
    return False


def copies(node: Node) -> bool:
    """Whether eager copies for this: no view of an operand that lies row by row would do, or none that a kernel may
    read."""
    if isinstance(node.op, ops.Slice):
        return node.op.step != 1
    if isinstance(node.op, ops.Windows):
        return True
    if isinstance(node.op, ops.Permute):
        return node.op.dims != tuple(range(node.ndim)) if node.op.copy else turns(node)
    return isinstance(node.op, MOVES) or (isinstance(node.op, ops.Reshape) and not _is_view(node))


def turns(node: Node) -> bool:
    """Whether this is a view whose neighbours in a row are none in memory, so that a kernel wants a copy of it."""
    if not isinstance(node.op, ops.Permute) or node.op.copy:
        return False
    longer = [d for d in node.op.dims if node.arg(0).shape[d] != 1]
    return bool(longer) and longer[-1] != max(longer)


def shows(node: Node) -> bool:
    """Whether this is a view of memory that lies row by row."""
    if isinstance(node.op, ops.Permute):
        return not node.op.copy
    return isinstance(node.op, ops.Expand | ops.Slice | ops.Windows) or (
        isinstance(node.op, ops.Reshape) and _is_view(node)
    )


_VIEWS: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()


def _is_view(node: Node) -> bool:
    """Whether a reshape, perhaps of other views, needs no copy."""
    if node not in _VIEWS:  # every group that is looked for asks
        _VIEWS[node] = _finds_view(node)
    return _VIEWS[node]


def _finds_view(node: Node) -> bool:
    at, node = indices.of_argument(node, indices.axes(node.shape)), node.arg(0)
    while at is not None and shows(node):
        at, node = indices.of_argument(node, at), node.arg(0)
    return at is None or indices.is_strided(at, node.shape)


@dataclass
class _Finder:
    """Follows indices from a result to what it is computed of."""

    inner: set[Node]
    loads: int = 0  # each as often as it is used, and so more than are made of them
    places: int = 0
    known: dict[tuple[Node, tuple[Index, ...]], tuple[Value, int]] = field(default_factory=dict)

    def value(self, node: Node, at: tuple[Index, ...]) -> Value | str:
        """The element of `node` at these indices."""
        known, before = self.known.get((node, at)), self.loads
        found = self._found(node, at) if known is None else known[0]
        self.loads += 0 if known is None else known[1]
        if isinstance(found, str) or self.loads > MOST_LOADS or self.places > MOST_PLACES:
            return found if isinstance(found, str) else "an element is read from too many places"
        self.known[node, at] = found, self.loads - before
        return found

    def _found(self, node: Node, at: tuple[Index, ...]) -> Value | str:
        if node not in self.inner and not self._is_looked_through(node):
            address = indices.address(at, node.shape)
            self.loads += 1
            self.places += 1
            return f"{node!r} has no known strides" if address is None else Load(node, address)
        match node.op:
            case ops.Cat(dim=dim):
                return self._selected(node, at, dim)
            case ops.Pad(mode="constant"):
                return self._padded(node, at)
            case ops.Unfold():
                return self._unfolded(node, at)
            case ops.Fold():
                return self._folded(node, at)
            case ops.Pointwise() | ops.Cast():
                return self._computed(node, at)
            case ops.Pool():
                return self._pooled(node, at)
            case ops.Cross(dim=dim):
                return self._crossed(node, at, dim)
            case ops.Interpolate(lengths=lengths):
                return self._between(node, at, node.ndim - len(lengths))
        found = indices.of_argument(node, at)
        return f"{node!r} moves elements by no constants" if found is None else self.value(node.arg(0), found)

    def _is_looked_through(self, node: Node) -> bool:
        """Whether a view that others use as well is read from what it shows: one of what is derived of parameters is
        derived as well, unless it repeats that, but one of a parameter would be copied in every call."""
        base, turned, repeats = node, False, False
        while shows(base):
            repeats = repeats or (isinstance(base.op, ops.Expand) and base.shape != base.arg(0).shape)
            base, turned = base.arg(0), turned or turns(base)
        return shows(node) and (node.varies or repeats or not (base.inputs or turned))

    def _selected(self, node: Node, at: tuple[Index, ...], dim: int) -> Value | str:
        if len(node.inputs) == 1:  # a copy
            return self.value(node.arg(0), at)
        parts: list[Value] = []
        ends: list[int] = []
        begin = 0
        for part in node.inputs:
            length = part.shape[dim]
            if not isinstance(length, int) or length == 0:
                return f"a part of {node!r} is of no known length"
            own = indices.variable(Variable(length, at[dim] + Index((), -begin)))
            own = at[dim] if begin == 0 else own
            found = self.value(part, (*at[:dim], Index() if length == 1 else own, *at[dim + 1 :]))
            if isinstance(found, str):
                return found
            parts.append(found)
            begin += length
            ends.append(begin)
        return Selected(node, at[dim], tuple(ends), tuple(parts))

    def _padded(self, node: Node, at: tuple[Index, ...]) -> Value | str:
        assert isinstance(node.op, ops.Pad)
        x, found, tests = node.arg(0), list(at), []
        for dim, left, right in node.op.pads:
            length = x.shape[dim]
            if not isinstance(length, int):
                return f"{node!r} is padded along a dimension of no known length"
            if left or right:
                moved = at[dim] + Index((), -left)
                tests.append((moved, length))
                found[dim] = Index() if length == 1 else indices.variable(Variable(length, moved)) if left else at[dim]
        return self._inside(node, found, tests, node.op.value)

    def _inside(
        self, node: Node, at: Iterable[Index], tests: Iterable[tuple[Index, int]], outside: float = 0.0
    ) -> Value | str:
        """The element of the argument of `node` where what is tested is less than its length, or a constant."""
        value = self.value(node.arg(0), tuple(at))
        open_ = tuple((index, length) for index, length in tests if not indices.is_inside(index, length))
        return value if isinstance(value, str) or not open_ else Padded(node, open_, value, outside)

    def _unfolded(self, node: Node, at: tuple[Index, ...]) -> Value | str:
        assert isinstance(node.op, ops.Unfold)
        shape = node.arg(0).shape
        found = indices.in_image(node.op, at, shape)
        if found is None:
            return f"{node!r} takes too many digits"
        tests = [(index, int(n)) for index, n in zip(found[2:], shape[2:], strict=True)]
        return self._inside(node, (*found[:2], *(indices.limited(*test) for test in tests)), tests)

    def _folded(self, node: Node, at: tuple[Index, ...]) -> Value | str:
        """The sum over what reaches an element, in the order in which a GPU adds it up in eager."""
        assert isinstance(node.op, ops.Fold)
        sample, channel, *places = at
        grid, lengths = node.op.grid, node.op.lengths
        if sum(index.digits for index in at) > indices.MOST_DIGITS:
            return f"{node!r} takes too many digits"
        along = (indices.taps(grid, d, index, n) for d, (index, n) in enumerate(zip(places, lengths, strict=True)))
        parts: list[Value] = []
        for both in product(*along):
            row = indices.address((channel, *(t.tap for t in both)), (node.shape[1], *grid.kernel))
            column = indices.address([t.at for t in both], grid.windows(lengths))
            assert row is not None and column is not None
            part = self._inside(node, (sample, row, column), [test for t in both for test in t.inside])
            if isinstance(part, str):
                return part
            parts.append(part)
        return Summed(node, tuple(parts))

    def _between(self, node: Node, at: tuple[Index, ...], dim: int) -> Value | str:
        """Along `dim` and the dimensions behind it, of places that are known along the others."""
        x = node.arg(0)
        if dim == node.ndim:
            return self.value(x, at)
        length, to = x.shape[dim], node.shape[dim]
        assert isinstance(node.op, ops.Interpolate) and isinstance(length, int) and isinstance(to, int)
        cubic, aligned = node.op.kind == "cubic", node.op.aligned
        # a GPU copies where all lengths are the same, and weighs a neighbour with 0, which may be NaN, elsewhere
        if x.shape == node.shape if cubic or node.device.type == "cuda" else length == to:
            return self._between(node, at, dim + 1)
        found = (indices.around if cubic else indices.neighbours)(at[dim], length, to, aligned)
        if found is None:
            return f"{node!r} takes too many digits, or too large numbers"
        places, part, per = found
        taps = [self._between(node, (*at[:dim], i, *at[dim + 1 :]), dim + 1) for i in places]
        wrong = next((tap for tap in taps if isinstance(tap, str)), None)
        return wrong or Between(node, part, per, tuple(tap for tap in taps if not isinstance(tap, str)))

    def _pooled(self, node: Node, at: tuple[Index, ...]) -> Value | str:
        """A function of the elements of a window."""
        assert isinstance(node.op, ops.Pool)
        root, taps = written_out(node)
        first, leaves = node.ndim - len(node.op.kernel), list[tuple[Node, Value]]()
        for leaf, place in taps:
            inside = zip(at[first:], node.op.stride, place, strict=True)
            found = self.value(node.arg(0), (*at[:first], *(i * step + Index((), k) for i, step, k in inside)))
            if isinstance(found, str):
                return found
            leaves.append((leaf, found))
        return Computed(root, tuple(leaves))

    def _crossed(self, node: Node, at: tuple[Index, ...], dim: int) -> Value | str:
        """a' b'' - a'' b' of the next elements along `dim`, in a circle, and those behind them."""
        leaves: list[tuple[Node, Value]] = []
        for x in node.inputs:
            for places in (-1, -2):
                moved = make(ops.Roll(((dim, places),)), x)
                at_x = indices.of_argument(moved, indices.broadcast(at, x.shape))
                found = f"{node!r} takes too many digits" if at_x is None else self.value(x, at_x)
                if isinstance(found, str):
                    return found
                leaves.append((moved, found))
        (a1, a2), (b1, b2) = ([moved for moved, _ in leaves[i : i + 2]] for i in (0, 2))
        ahead, behind = pointwise("mul", a1, b2), pointwise("mul", a2, b1)
        return Computed(pointwise("sub", ahead, behind), tuple(leaves))

    def _computed(self, node: Node, at: tuple[Index, ...]) -> Value | str:
        """Of all pointwise operations at one place; what is broadcast, or moved, is another value."""
        leaves: dict[Node, Value] = {}
        seen, stack = {node}, [node]
        while stack:
            for a in stack.pop().inputs:
                if isinstance(a.op, ops.Number | ops.Full) or a in seen:
                    continue
                seen.add(a)
                if a in self.inner and isinstance(a.op, POINTWISE) and a.shape == node.shape:
                    stack.append(a)
                    continue
                found = self.value(a, indices.broadcast(at, a.shape))
                if isinstance(found, str):
                    return found
                leaves[a] = found
        return Computed(node, tuple(leaves.items()))


def waste(r: Rearrangement) -> float:
    """How many times as many bytes warps reach for as they use, on average over all that is read as it is used:
    neighbours that lie apart take a sector of memory each."""
    total = _elements(r.root)
    taken = needed = 0.0
    for first in {k * (total // 5) // WARP * WARP for k in range(5)}:
        elements = range(first, min(first + 4 * WARP, total))
        for tensor, addresses in _touched(r, elements).items():
            size = tensor.dtype.itemsize
            taken += SECTOR * len({a * size // SECTOR for a in addresses})
            needed += max(size * len(addresses), SECTOR)
    return taken / needed if needed else 1.0


def _touched(r: Rearrangement, elements: range) -> dict[Node, set[int]]:
    found: dict[Node, set[int]] = {}

    def visit(value: Value, i: int) -> None:
        match value:
            case Load():
                if r.turn is None or value not in r.turn.loads:
                    found.setdefault(value.tensor, set()).add(value.address.at({r.at: i}))
            case Computed():
                for _, leaf in value.leaves:
                    visit(leaf, i)
            case Selected():
                at = value.index.at({r.at: i})
                visit(next(p for p, end in zip(value.parts, value.ends, strict=True) if at < end), i)
            case Padded():
                if all(0 <= index.at({r.at: i}) < length for index, length in value.inside):
                    visit(value.value, i)
            case Between():
                for tap in value.taps:
                    visit(tap, i)
            case Summed():
                for part in value.parts:
                    visit(part, i)

    for i in elements:
        visit(r.value, i)
    return found
