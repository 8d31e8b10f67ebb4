"""Where the elements of views lie: indices as sums of digits of one flat index.

    x (N, 6, 5) seen as (N, 2, 3, 5), turned to (N, 3, 2, 5), seen as (N, 6, 5): element i of that, row by row, is
    element i % 5 + i / 5 % 2 * 15 + i / 10 % 3 * 5 + i / 30 * 30 of x

A *digit* of a number is what is left of it by a division and a remainder, both by constants.  Permutations exchange
digits, reshapes split and join them, expansions leave some out.  Where that is not possible (an index that was rolled,
or cut off, is split), a sum becomes a variable of its own, which has digits again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Literal

import sympy

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.ops import Size

# What becomes of an index below 0 or beyond the end.
Beyond = Literal["", "circular", "reflect", "replicate"]

# Digits that the indices into a value may come to, those of their variables' sums among them: each variable may have
# several digits of the one before it, so that long chains would come to twice as many with every step.
MOST_DIGITS = 64

# What numbers between that of an element and where it lies stay below, as they are 32 bits wide.
REACH = 2**31


@dataclass(frozen=True)
class Variable:
    """A number from 0 on: the flat index, or what the sum `of` is.

    length  what it is less than, where that is known
    beyond  how the sum is brought between these where it is not, as `torch.nn.functional.pad` has it; empty: it is
    """

    length: int | None
    of: Index | None = None
    beyond: Beyond = ""

    @cached_property
    def digits(self) -> int:
        """How many it is computed from, those that these are computed from among them."""
        return 0 if self.of is None else self.of.digits

    def within(self, value: int) -> int:
        """What a value of the sum becomes."""
        if not self.beyond:
            return value
        assert self.length is not None
        match self.beyond:
            case "circular":
                return value % self.length
            case "reflect":
                return self.length - 1 - abs(self.length - 1 - abs(value))
        return min(max(value, 0), self.length - 1)


@dataclass(frozen=True)
class Digit:
    """variable / step % length; without a length, all that the division leaves."""

    variable: Variable
    step: int
    length: int | None


@dataclass(frozen=True)
class Index:
    """constant + the sum of so many times each digit."""

    terms: tuple[tuple[int, Digit], ...] = ()
    constant: int = 0

    def __add__(self, other: Index) -> Index:
        return _sum([*self.terms, *other.terms], self.constant + other.constant)

    def __mul__(self, by: int) -> Index:
        return _sum([(n * by, d) for n, d in self.terms], self.constant * by)

    @property
    def digits(self) -> int:
        """How many it is computed from, those of sums that are variables among them."""
        return sum(1 + d.variable.digits for _, d in self.terms)

    def at(self, known: Mapping[Variable, int]) -> int:
        """Its value, where some variables are known."""
        return self.constant + sum(n * _digit(d, known) for n, d in self.terms)


def _digit(d: Digit, known: Mapping[Variable, int]) -> int:
    found = known.get(d.variable)
    if found is None:
        assert d.variable.of is not None
        found = d.variable.within(d.variable.of.at(known))
    return found // d.step if d.length is None else found // d.step % d.length


def substituted(index: Index, v: Variable, by: Index) -> Index:
    """The same where `by` stands for a variable.

    i / 3 * 4 + i % 3  where  i = 3 r + 2  is  4 r + 2
    """
    found = Index((), index.constant)
    for n, d in index.terms:
        if d.variable == v:
            found += _part_of(by, d.step, d.length) * n
        elif d.variable.of is None:
            found += Index(((n, d),))
        else:
            of = substituted(d.variable.of, v, by)
            found += _part_of(_within(d.variable, of), d.step, d.length) * n
    return found


def _within(v: Variable, of: Index) -> Index:
    """What `v` is of a sum."""
    if not of.terms:
        return Index((), v.within(of.constant))
    return variable(Variable(v.length, of, v.beyond))


def _part_of(index: Index, step: int, length: int | None) -> Index:
    """index / step % length."""
    for by, rest in ((step, 0), (length, 1)):
        if by is not None and (by != 1 or rest):
            divided = _divided(index, by) or _divided(variable(Variable(None, index)), by)
            assert divided is not None
            index = divided[rest]
    return index


def _sum(terms: Iterable[tuple[int, Digit]], constant: int) -> Index:
    """The sum, neighbouring digits of one variable as one where they count alike."""
    kept = [(n, d) for n, d in terms if n and d.length != 1]
    place = {v: k for k, v in enumerate(dict.fromkeys(d.variable for _, d in kept))}
    found: list[tuple[int, Digit]] = []
    for n, d in sorted(kept, key=lambda t: (place[t[1].variable], t[1].step, t[0])):
        if found:
            times, inner = found[-1]
            joined = inner.variable == d.variable and inner.length is not None
            if joined and d.step == inner.step * inner.length and n == times * inner.length:  # type: ignore[operator]
                length = None if d.length is None else inner.length * d.length  # type: ignore[operator]
                found[-1] = (times, _whole(Digit(d.variable, inner.step, length)))
                continue
        found.append((n, _whole(d)))
    return Index(tuple(found), constant)


def _whole(d: Digit) -> Digit:
    """The same without a remainder that changes nothing."""
    known = d.variable.length
    all_of_it = known is not None and d.length is not None and d.step * d.length >= known
    return Digit(d.variable, d.step, None) if all_of_it else d


def _length(d: Digit) -> int | None:
    """What a digit is less than, where that is known."""
    known = d.variable.length
    return d.length if d.length is not None or known is None else -(-known // d.step)


def variable(v: Variable) -> Index:
    """A variable as an index."""
    return Index() if v.length == 1 else Index(((1, Digit(v, 1, None)),))


def flat(shape: Sequence[Size]) -> tuple[Variable, tuple[Index, ...]] | None:
    """The flat index of a value, row by row, and the indices along its dimensions; `None` where another dimension than
    the first one that is longer than 1 has no known length."""
    first = next((d for d, n in enumerate(shape) if n != 1), 0)
    if not all(isinstance(n, int) for n in shape[first + 1 :]):
        return None
    whole = all(isinstance(n, int) for n in shape)
    i = Variable(prod(shape) if whole else None)
    found = _split(variable(i), shape[first:]) if shape else ()
    assert found is not None
    return i, (*[Index()] * first, *found)


def address(indices: Sequence[Index], shape: Sequence[Size]) -> Index | None:
    """Where an element of a tensor lies that is stored row by row; `None` where its strides are not known."""
    found, stride = Index(), 1
    for d in reversed(range(len(shape))):
        length = shape[d]
        if length != 1:
            found += indices[d] * stride
        if isinstance(length, int):
            stride *= length
        elif any(n != 1 for n in shape[:d]):
            return None
    return found


def of_argument(node: Node, indices: Sequence[Index]) -> tuple[Index, ...] | None:
    """The indices into the argument of a view, or of what only moves elements, given those into its result; `None`
    where that cannot be told, or takes too many digits."""
    x = node.arg(0)
    if sum(index.digits for index in indices) > MOST_DIGITS:
        return None
    match node.op:
        case ops.Permute(dims=dims):
            return tuple(indices[dims.index(d)] for d in range(len(dims)))
        case ops.Expand():
            return broadcast(indices, x.shape)
        case ops.Slice(dim=dim, start=start, step=step):
            return _replaced(indices, dim, indices[dim] * step + Index((), start))
        case ops.Windows(dim=dim, step=step):
            return _replaced(indices[:-1], dim, indices[dim] * step + indices[-1])
        case ops.Reshape():
            return _reshaped(indices, node.shape, x.shape)
        case ops.Flip(dims=dims):
            lengths = {d: x.shape[d] for d in dims}
            if not all(isinstance(n, int) for n in lengths.values()):
                return None
            return tuple(
                index * -1 + Index((), lengths[d] - 1) if d in lengths else index for d, index in enumerate(indices)
            )
        case ops.Roll(shifts=shifts):
            found = tuple(indices)
            for d, shift in shifts:
                length = x.shape[d]
                if not isinstance(length, int):
                    return None
                found = _replaced(found, d, _rolled(found[d], -shift % length, length)) if shift % length else found
            return found
        case ops.Pad(pads=pads, mode=mode) if mode != "constant":
            return _brought_inside(indices, x.shape, pads, mode)
        case ops.Upsample():
            return _nearest(indices, node.shape, x.shape)
    return None


def _rolled(index: Index, places: int, length: int) -> Index:
    """So many places further in a circle of this length; what was moved along it before is moved once."""
    if len(index.terms) == 1 and index.constant == 0:
        times, digit = index.terms[0]
        before, whole = digit.variable, times == digit.step == 1 and digit.length is None
        if whole and before.beyond == "circular" and before.length == length and before.of is not None:
            index = before.of
    moved = Index(index.terms, (index.constant + places) % length)
    return moved if is_inside(moved, length) else variable(Variable(length, moved, "circular"))


Places = tuple[tuple[Index, ...], Index, int]


def neighbours(index: Index, length: int, to: int, aligned: bool) -> Places | None:
    """Of an index into `to` elements that are interpolated between `length`: the element ahead of it and the next one,
    and how many parts of the way it is from one to the other, of how many; `None` where that takes too many digits, or
    too large numbers.

    These are max(0, (i + 1/2) length / to - 1/2) of PyTorch's, and i (length - 1) / (to - 1) where corners are aligned,
    in whole numbers.
    """
    times, plus, per = _pace(length, to, aligned)
    if index.digits > MOST_DIGITS or length * per >= REACH:
        return None
    last = times * (to - 1) + plus
    if to > 1 and times % per == 0 and plus >= 0 and last // per + 1 < length:  # as far from one, wherever it lies
        ahead = index * (times // per) + Index((), plus // per)
        return (ahead, ahead + Index((), 1)), Index((), plus % per), per
    place = Variable(length * per, index * (times if to > 1 else 0) + Index((), plus), "replicate")
    split = _split(variable(place), [length, per])
    assert split is not None
    ahead, part = split
    return (ahead, variable(Variable(length, ahead + Index((), 1), "replicate"))), part, per


def _pace(length: int, to: int, aligned: bool) -> tuple[int, int, int]:
    """Where an index into `to` elements lies between `length`: so many times the index, plus so much, per so much."""
    times, plus, per = (length - 1, 0, max(to - 1, 1)) if aligned else (2 * length, length - to, 2 * to)
    common = gcd(times, plus, per)
    return times // common, plus // common, per // common


def around(index: Index, length: int, to: int, aligned: bool) -> Places | None:
    """Likewise the two elements ahead of it and the two behind it, those outside being the first or the last one: a
    cubic is not cut off at 0."""
    times, plus, per = _pace(length, to, aligned)
    times = times if to > 1 else 0
    count = (times * (to - 1) + plus) // per + 2  # from one before the first on, where ahead may be
    if index.digits > MOST_DIGITS or count * per >= REACH:
        return None
    split = _split(variable(Variable(count * per, index * times + Index((), plus + per))), [count, per])
    assert split is not None
    ahead, part = split
    places = (variable(Variable(length, ahead + Index((), k), "replicate")) for k in (-2, -1, 0, 1))
    return tuple(places), part, per


def in_image(op: ops.Unfold, indices: Sequence[Index], shape: Sequence[Size]) -> tuple[Index, ...] | None:
    """The indices into images, those along the last two dimensions perhaps in their padding, given those into their
    windows as columns; `None` where that takes too many digits."""
    sample, row, column = indices
    if sum(index.digits for index in indices) > MOST_DIGITS:
        return None
    grid = op.grid
    rows, columns = _split(row, [shape[1], *grid.kernel]), _split(column, grid.windows(shape[2:]))
    assert rows is not None and columns is not None
    channel, *taps = rows
    each = zip(columns, taps, grid.stride, grid.dilation, grid.padding, strict=True)
    found = (_spelled(at * stride + tap * apart + Index((), -left)) for at, tap, stride, apart, left in each)
    return (sample, channel, *found)


@dataclass(frozen=True)
class Tap:
    """One that may reach an element: `tap` of the window `at`, where each of `inside` is at least 0 and less than its
    length."""

    tap: Index
    at: Index
    inside: tuple[tuple[Index, int], ...]


def taps(grid: ops.Grid, dim: int, index: Index, length: int) -> list[Tap]:
    """The taps that may reach an element at this index along dimension `dim` of images that are so long, those of the
    first windows first.

    Tap u of window o lies at o * stride + u * dilation, so only every stride-th tap reaches the same element.
    """
    kernel, left = grid.kernel[dim], grid.padding[dim]
    common = gcd(grid.stride[dim], grid.dilation[dim])
    stride, apart = grid.stride[dim] // common, grid.dilation[dim] // common
    windows = (length + 2 * left - grid.dilation[dim] * (kernel - 1) - 1) // grid.stride[dim] + 1
    most = -(-(length + left) // common)
    place, off = _parted(index + Index((), left), common, length + left)
    # place = o * stride + u * apart where nothing is off: u is the phase, modulo the stride
    if apart == 1:
        first, phase = _parted(place, stride, most)
    else:
        times = pow(apart, -1, stride)
        _, phase = _parted(place * times, stride, most * times)
        more = -(-(stride - 1) * apart // stride)  # so that no difference is below 0
        first, _ = _parted(place + phase * -apart + Index((), more * stride), stride, most + more * stride)
        first += Index((), -more)
    found = []
    for j in reversed(range(-(-kernel // stride))):
        tap, at = phase + Index((), j * stride), first + Index((), -j * apart)
        inside = ((off, 1), (tap, kernel), (at, windows))
        found.append(Tap(limited(tap, kernel), limited(at, windows), inside))
    return found


def _parted(index: Index, by: int, length: int) -> tuple[Index, Index]:
    """Quotient and remainder of a number below `length`."""
    found = _split(index, [-(-length // by), by])
    assert found is not None
    quotient, rest = found
    return quotient, rest


def limited(index: Index, length: int) -> Index:
    """A number that is known to be in front of `length`, which it may not show."""
    if length == 1 or not index.terms or is_inside(index, length):
        return Index() if length == 1 else index
    return variable(Variable(length, index))


def is_inside(index: Index, length: int) -> bool:
    """Whether it shows that this is at least 0 and less than a length."""
    low = high = index.constant
    for n, d in index.terms:
        count = _length(d)
        if count is None:
            return False
        low, high = low + min(n, 0) * (count - 1), high + max(n, 0) * (count - 1)
    return low >= 0 and high < length


def _spelled(index: Index) -> Index:
    """The same with sums in place of the variables that stand for them."""
    while any(_is_sum(d) for _, d in index.terms):
        found = Index((), index.constant)
        for n, d in index.terms:
            found += d.variable.of * n if _is_sum(d) else Index(((n, d),))  # type: ignore[operator]
        index = found
    return index


def _is_sum(d: Digit) -> bool:
    """Whether this is all of a variable that stands for a sum."""
    return d.step == 1 and d.length is None and d.variable.of is not None and not d.variable.beyond


def broadcast(indices: Sequence[Index], shape: Sequence[Size]) -> tuple[Index, ...]:
    """The indices into an operand of this shape."""
    own = indices[len(indices) - len(shape) :]
    return tuple(Index() if n == 1 else index for index, n in zip(own, shape, strict=True))


def _replaced(indices: Sequence[Index], dim: int, index: Index) -> tuple[Index, ...]:
    return (*indices[:dim], index, *indices[dim + 1 :])


def _brought_inside(
    indices: Sequence[Index], shape: Sequence[Size], pads: Sequence[tuple[int, int, int]], mode: Beyond
) -> tuple[Index, ...] | None:
    found = list(indices)
    for d, left, right in pads:
        length = shape[d]
        if not isinstance(length, int):
            return None
        if left or right:
            found[d] = variable(Variable(length, indices[d] + Index((), -left), mode))
    return tuple(found)


def _nearest(indices: Sequence[Index], shape: Sequence[Size], inner: Sequence[Size]) -> tuple[Index, ...] | None:
    """Those at index * n / length, rounded down, along the dimensions whose length is another."""
    found = list(indices)
    for d, (length, n) in enumerate(zip(shape, inner, strict=True)):
        if length != n:
            assert isinstance(length, int) and isinstance(n, int)
            common = gcd(length, n)
            if length * n // common >= REACH:
                return None
            split = _split(indices[d] * (n // common), [n, length // common])
            assert split is not None
            found[d] = split[0]
    return tuple(found)


def _reshaped(indices: Sequence[Index], shape: Sequence[Size], inner: Sequence[Size]) -> tuple[Index, ...] | None:
    """The indices under another shape, run by run of dimensions that hold the same elements."""
    found = [Index()] * len(inner)
    if 0 in inner:
        return tuple(found)
    outer = [(index, n) for index, n in zip(indices, shape, strict=True) if n != 1]
    wanted = [(d, n) for d, n in enumerate(inner) if n != 1]
    for some, others in _runs([n for _, n in outer], [n for _, n in wanted]):
        if others is None:
            return None
        linear = address([outer[k][0] for k in some], [outer[k][1] for k in some])
        split = None if linear is None else _split(linear, [wanted[k][1] for k in others])
        if split is None:
            return None
        for k, index in zip(others, split, strict=True):
            found[wanted[k][0]] = index
    return tuple(found)


def _runs(a: Sequence[Size], b: Sequence[Size]) -> Iterator[tuple[range, range | None]]:
    """Runs of neighbours of two shapes with as many elements, as short as they may be; `None` where none ends."""
    i = j = 0
    while i < len(a) or j < len(b):
        start, other = i, j
        i, j = i + 1, j + 1
        while i <= len(a) and j <= len(b):
            ratio = sympy.sympify(prod(a[start:i])) / sympy.sympify(prod(b[other:j]))
            if ratio == 1:
                break
            shorter = bool(ratio < 1) if ratio.is_number else isinstance(prod(a[start:i]), int)
            i, j = (i + 1, j) if shorter else (i, j + 1)
        else:
            yield range(0), None
            return
        yield range(start, i), range(other, j)


def _split(index: Index, shape: Sequence[Size]) -> tuple[Index, ...] | None:
    """The indices along dimensions of which `index` is the linear one; the first of them may have any length."""
    found: list[Index] = []
    for length in reversed(shape[1:]):
        if not isinstance(length, int):
            return None
        divided = _divided(index, length)
        if divided is None:
            whole = prod(shape[: len(shape) - len(found)])
            divided = _divided(variable(Variable(whole if isinstance(whole, int) else None, index)), length)
            assert divided is not None
        index, rest = divided
        found.append(rest)
    return (index, *reversed(found))


def _divided(index: Index, by: int) -> tuple[Index, Index] | None:
    """Quotient and remainder, where every digit is part of one of them, or can be parted."""
    above: list[tuple[int, Digit]] = []
    below: list[tuple[int, Digit]] = []
    reach = rest = index.constant % by
    for n, d in index.terms:
        if n % by == 0:
            above.append((n // by, d))
            continue
        if n < 0:
            return None
        length = _length(d)
        if length is not None and n * (length - 1) < by:
            low = length
            below.append((n, d))
        elif by % n == 0 and (d.length is None or d.length % (by // n) == 0):
            low = by // n
            above.append((1, Digit(d.variable, d.step * low, None if d.length is None else d.length // low)))
            below.append((n, Digit(d.variable, d.step, low)))
        else:
            return None
        reach += n * (low - 1)
    return None if reach >= by else (_sum(above, index.constant // by), _sum(below, rest))


def axes(shape: Sequence[Size]) -> tuple[Index, ...]:
    """An index of its own along each dimension."""
    lengths = (n if isinstance(n, int) else None for n in shape)
    return tuple(variable(Variable(n, Index((), d))) for d, n in enumerate(lengths))


def is_strided(indices: Sequence[Index], shape: Sequence[Size]) -> bool:
    """Whether elements at these indices, computed from those `axes`, lie at so many times each of them, as those of a
    view do; also where it cannot be told."""
    found = address(indices, shape)
    return found is None or all(d.step == 1 and d.length is None for _, d in found.terms)


def is_view(x: Sequence[Size], order: Sequence[int], shape: Sequence[Size]) -> bool:
    """Whether a tensor of shape `x` whose dimensions longer than 1 lie in this order, the densest last, can be seen
    under another shape without a copy if it has no gaps; also where it cannot be told."""
    found = _reshaped(axes(shape), shape, x)
    return found is None or is_strided([found[d] for d in order], [x[d] for d in order])


def order_of_parts(x: Sequence[Size], order: Sequence[int], shape: Sequence[Size]) -> tuple[int, ...] | None:
    """In which order the dimensions of `shape` lie if it shows a tensor of shape `x`, whose dimensions longer than 1
    lie in this order, perhaps with gaps; `None` where it does more than to split them."""
    found = _reshaped(axes(shape), shape, x)
    if found is None or not all(is_strided([found[d]], [x[d]]) for d in order):
        return None
    terms = (term for d in order for term in sorted(found[d].terms, key=lambda term: -term[0]))
    dims = [digit.variable.of for _, digit in terms]
    return tuple(dim.constant for dim in dims if dim is not None)
