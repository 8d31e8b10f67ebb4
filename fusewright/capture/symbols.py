"""Symbolic sizes: the trace's own symbols become `B`, `B2`, ... with the range they were proved for.

The trace guards against sizes its path does not hold for, but nobody checks those guards later.  So every guard must
follow from the range that the graph records, and each size must be a polynomial in the symbols; otherwise the model is
captured for the one batch size it was shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from fusewright.ir.node import Symbol
from fusewright.ir.ops import Size


class NotSymbolicError(Exception):
    """The batch cannot stay symbolic; the message says why."""


class Symbols:
    """Translates the sizes of one trace."""

    def __init__(self, names: Mapping[sympy.Symbol, sympy.Symbol], places: Mapping[sympy.Symbol, Symbol]) -> None:
        self.names = names
        self.places = places

    def size(self, value: Any) -> Size:
        """An int or symbolic int of the trace as an int or a polynomial in the batch symbols."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if not isinstance(value, torch.SymInt):
            raise NotSymbolicError(f"the value {value} is computed from the batch size by more than integer arithmetic")
        return self.translate(expression(value))

    def translate(self, found: sympy.Expr) -> Size:
        """`found` in our own symbols; raises `NotSymbolicError` unless it is a polynomial with integer coefficients."""
        ours = found.xreplace(dict(self.names))
        if ours.is_Integer:
            return int(ours)
        known = set(self.names.values())
        if not ours.free_symbols <= known:
            raise NotSymbolicError("a size depends on the values of tensors")
        if not ours.is_polynomial(*known):
            raise NotSymbolicError(f"the size {ours} is not a polynomial in the batch size")
        if not all(c.is_Integer for c in sympy.Poly(ours, *known).coeffs()):
            raise NotSymbolicError(f"the size {ours} is not an integer polynomial in the batch size")
        return sympy.expand(ours)

    def shape(self, values: Iterable[Any]) -> tuple[Size, ...]:
        """A shape of the trace."""
        return tuple(self.size(v) for v in values)


STATIC = Symbols({}, {})


def expression(value: torch.SymInt) -> sympy.Expr:
    """The expression behind a symbolic int; raises `NotSymbolicError` should PyTorch ever stop showing it."""
    found = getattr(getattr(value, "node", None), "expr", None)
    if not isinstance(found, sympy.Expr):
        raise NotSymbolicError("this PyTorch does not show the expression of a size")
    return found


def read_symbols(
    program: ExportedProgram, inputs: Sequence[torch.Tensor], shown: Sequence[torch.Tensor], taken: Collection[str]
) -> Symbols:
    """The batch symbols of a trace with tensor inputs `inputs` (`shown` are the examples), named apart from `taken`.

    Raises `NotSymbolicError` when a guard of the trace does not follow from the symbols' ranges.
    """
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    places: dict[sympy.Symbol, Symbol] = {}
    for index, tensor in enumerate(inputs):
        for dim, length in enumerate(tensor.shape):
            if not isinstance(length, torch.SymInt):
                continue
            found = expression(length)
            if found.is_Symbol and found not in names:
                names[found] = sympy.Symbol(_fresh(taken, names.values()), integer=True, positive=True)
                places[names[found]] = Symbol(index, dim, *_range(program, found))
    claims = _claims(inputs, names) if names else []
    same = _same(claims, places, shown)
    for claim in claims:
        _apply(claim.xreplace(same) if same else claim, places, shown)
    return Symbols({theirs: same.get(ours, ours) for theirs, ours in names.items()}, places)


def _fresh(taken: Collection[str], used: Iterable[sympy.Symbol]) -> str:
    held = {*taken, *map(str, used)}
    count = 1
    while (name := "B" if count == 1 else f"B{count}") in held:
        count += 1
    return name


def _range(program: ExportedProgram, symbol: sympy.Symbol) -> tuple[int, int | None]:
    limits = program.range_constraints.get(symbol)
    if limits is None:
        raise NotSymbolicError(f"no range is known for {symbol}")
    low, high = limits.lower, limits.upper
    # Both infinities of the trace are no sympy integers.
    return int(low) if _finite(low) else 2, int(high) if _finite(high) else None


def _finite(bound: Any) -> bool:
    return bool(getattr(bound, "is_Integer", isinstance(bound, int)))


def _claims(inputs: Sequence[torch.Tensor], names: Mapping[sympy.Symbol, sympy.Symbol]) -> list[Any]:
    """What the trace assumed of the sizes, in our symbols."""
    symbolic = next(n for t in inputs for n in t.shape if isinstance(n, torch.SymInt))
    environment = getattr(getattr(symbolic, "node", None), "shape_env", None)
    guards = getattr(environment, "guards", None)
    if environment is None or guards is None or not hasattr(environment, "replace"):
        raise NotSymbolicError("this PyTorch does not say what the trace assumed of the batch size")
    return [environment.replace(guard.expr).xreplace(dict(names)) for guard in guards]


def _same(
    claims: Iterable[Any], places: dict[sympy.Symbol, Symbol], shown: Sequence[torch.Tensor]
) -> dict[sympy.Symbol, sympy.Symbol]:
    """What stands for symbols of which one may be no greater than another, as a `gather` claims, and was as great:
    they are the same batch, and lose their places."""
    same: dict[sympy.Symbol, sympy.Symbol] = {}
    for claim in claims:
        if not isinstance(claim, sympy.Le | sympy.Ge):
            continue
        sides = [same.get(side, side) for side in claim.args]
        if sides[0] == sides[1] or not all(side in places for side in sides):
            continue
        kept, lost = sorted(sides, key=list(places).index)
        one, other = places[kept], places[lost]
        if shown[one.input].shape[one.dim] == shown[other.input].shape[other.dim]:
            highs = [p.high for p in (one, other) if p.high is not None]
            places[kept] = replace(one, low=max(one.low, other.low), high=min(highs, default=None))
            del places[lost]
            same = {symbol: kept if stands is lost else stands for symbol, stands in same.items()} | {lost: kept}
    return same


def _apply(claim: Any, places: dict[sympy.Symbol, Symbol], shown: Sequence[torch.Tensor]) -> None:
    """Check that `claim` holds throughout the ranges; one value that it excludes becomes the end of a range.

    Only claims that are linear in one symbol are understood; raises `NotSymbolicError` for others.
    """
    if claim in (sympy.true, True):
        return
    symbols = list(getattr(claim, "free_symbols", ()))
    relation = isinstance(claim, sympy.core.relational.Relational)
    if relation and len(symbols) == 1 and symbols[0] in places:
        place = places[symbols[0]]
        difference = sympy.expand(claim.lhs - claim.rhs)
        if difference.is_polynomial(symbols[0]) and sympy.degree(difference, symbols[0]) == 1:
            if isinstance(claim, sympy.Ne):
                example = shown[place.input].shape[place.dim]
                slope, offset = sympy.Poly(difference, symbols[0]).all_coeffs()
                places[symbols[0]] = _without(place, -offset / slope, example)
                return
            if not isinstance(claim, sympy.Eq) and _holds(claim, difference, symbols[0], place):
                return
    raise NotSymbolicError(f"the model's path depends on the batch size ({claim})")


def _holds(claim: Any, difference: sympy.Expr, symbol: sympy.Symbol, place: Symbol) -> bool:
    """Whether an inequality that is linear in `symbol` holds at both ends of its range, and so between them."""
    last = sympy.limit(difference, symbol, sympy.oo) if place.high is None else difference.subs(symbol, place.high)
    return all(claim.func(end, 0) == sympy.true for end in (difference.subs(symbol, place.low), last))


def _without(place: Symbol, value: sympy.Expr, example: int) -> Symbol:
    """The part of a range on the example's side of `value`."""
    if not value.is_Integer or value < place.low or (place.high is not None and value > place.high):
        return place
    if value < example:
        return replace(place, low=int(value) + 1)
    return replace(place, high=int(value) - 1)
