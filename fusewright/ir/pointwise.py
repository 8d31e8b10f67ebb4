"""The pointwise functions: the only place that knows what `relu` is.

Each entry maps a function and its parameters to `Traits`, which rules and code generators read.  Facts are about the
function on the reals unless they say "float"; `tests/ir/test_pointwise.py` checks every claim numerically.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

Scalar = bool | int | float
Interval = tuple[float, float]
REALS: Interval = (-inf, inf)


@dataclass(frozen=True)
class Traits:
    """What is known of one function of one variable (or of several, where only `torch` and `arity` are given).

    torch           the program text, with `{0}`, `{1}` for the operands
    arity           number of tensor operands
    monotone        ``"up"``, ``"down"`` or ``None``, on `domain`
    domain          the interval on which `monotone` holds and the function is defined
    float_monotone  the float implementation keeps the order bit for bit
    nan_to_nan      a NaN operand gives NaN
    limits          the values at -inf and +inf (NaN where undefined)
    range           an interval that holds every value
    parity          ``"odd"``, ``"even"`` or ``None``
    idempotent      f(f(x)) == f(x), bit for bit
    at_zero         f(0)
    """

    torch: str
    arity: int = 1
    monotone: Literal["up", "down"] | None = None
    domain: Interval = REALS
    float_monotone: bool = False
    nan_to_nan: bool = True
    limits: tuple[float, float] | None = None
    range: Interval = REALS
    parity: Literal["odd", "even"] | None = None
    idempotent: bool = False
    at_zero: float | None = None


_FUNCTIONS: dict[str, Callable[..., Traits]] = {}


def traits(fn: str, params: tuple[Scalar, ...] = ()) -> Traits:
    """The traits of function `fn` with parameters `params`; `KeyError` for a function the table does not hold."""
    return _FUNCTIONS[fn](*params)


def functions() -> tuple[str, ...]:
    """The names in the table."""
    return tuple(_FUNCTIONS)


def _entry(build: Callable[..., Traits]) -> Callable[..., Traits]:
    _FUNCTIONS[build.__name__.removesuffix("_")] = build
    return build


@_entry
def relu() -> Traits:
    return Traits(
        "torch.relu({0})",
        monotone="up",
        float_monotone=True,
        limits=(0.0, inf),
        range=(0.0, inf),
        idempotent=True,
        at_zero=0.0,
    )


@_entry
def sigmoid() -> Traits:
    return Traits("torch.sigmoid({0})", monotone="up", limits=(0.0, 1.0), range=(0.0, 1.0), at_zero=0.5)


@_entry
def add() -> Traits:
    return Traits("{0} + {1}", arity=2)


@_entry
def sub() -> Traits:
    return Traits("{0} - {1}", arity=2)


@_entry
def mul() -> Traits:
    return Traits("{0} * {1}", arity=2)


@_entry
def div() -> Traits:
    return Traits("{0} / {1}", arity=2)


@_entry
def neg() -> Traits:
    return Traits("-{0}", monotone="down", float_monotone=True, limits=(inf, -inf), parity="odd", at_zero=0.0)
