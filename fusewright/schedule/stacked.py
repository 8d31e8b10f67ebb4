"""Rows of a few elements, each computed in a way of its own, of which a thread has all.

    torch.stack((a * b, b * c, a * c), -1)    before: element i is a * b, b * c or a * c, by i % 3
                                              after:  row r is a * b, b * c and a * c

Neighbours that are of different parts of a concatenation go different ways, one after another; and what they have in
common, each computes anew.  A thread that has a whole row knows the part of each element, and what they have in common
is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusewright.ir import indices
from fusewright.ir.indices import Index, Variable
from fusewright.schedule.rearrangement import (
    Between,
    Computed,
    Load,
    Padded,
    Rearrangement,
    Selected,
    Summed,
    Value,
    below,
    is_whole,
)

# Elements of the longest rows.
MOST = 16


def row_length(r: Rearrangement) -> int | None:
    """How many elements a row has, where the last dimension is a concatenation of a few, and perhaps those before it;
    else `None`."""
    selected = (value for value in below(r.value) if isinstance(value, Selected))
    found = {digit for value in selected for digit in _stacked(value, r.at)}
    lengths = [step * length for step, length in found if step * length <= MOST and is_whole(r.root, step * length)]
    return max(lengths, default=None) if r.turn is None and any(step == 1 for step, _ in found) else None


def _stacked(value: Selected, at: Variable) -> Iterator[tuple[int, int]]:
    """Steps and lengths of the digits of `at` by which a concatenation is parted."""
    for n, d in value.index.terms:
        if n == 1 and d.variable == at and d.length == value.ends[-1]:
            yield d.step, d.length


def row(r: Rearrangement, length: int) -> tuple[Variable, tuple[Value, ...]]:
    """The number of a row, and its elements."""
    number = Variable(None if r.at.length is None else r.at.length // length)
    first = indices.variable(number) * length
    return number, tuple(_at(r.value, r.at, first + Index((), k)) for k in range(length))


def _at(value: Value, v: Variable, by: Index) -> Value:
    """The value where `by` stands for a variable: of concatenations, the part that it is of."""

    def index(i: Index) -> Index:
        return indices.substituted(i, v, by)

    match value:
        case Load():
            return replace(value, address=index(value.address))
        case Computed():
            return replace(value, leaves=tuple((n, _at(leaf, v, by)) for n, leaf in value.leaves))
        case Selected():
            place = index(value.index)
            if not place.terms:
                chosen = next(p for p, end in zip(value.parts, value.ends, strict=True) if place.constant < end)
                return _at(chosen, v, by)
            return replace(value, index=place, parts=tuple(_at(p, v, by) for p in value.parts))
        case Padded():
            inside = tuple((index(i), length) for i, length in value.inside)
            return replace(value, inside=inside, value=_at(value.value, v, by))
        case Between():
            return replace(value, part=index(value.part), taps=tuple(_at(tap, v, by) for tap in value.taps))
        case Summed():
            return replace(value, parts=tuple(_at(p, v, by) for p in value.parts))
