"""Functions, their compositions and reductions of truths: understood, and eager's values and gradients, also of what is
no ordinary number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.capture import capture
from fusewright.ir.ops import Pointwise
from tests.capture.harness import Fn, check, opaque, program_of
from tests.capture.test_composites import compared, r

VALUES = (nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 0.25, 2.5, -3.5, 7.0, 1e-3, 80.0, -1e5)
ANY = torch.tensor([VALUES, [0.1 * v for v in VALUES], [v + 0.5 for v in VALUES], VALUES[::-1]], dtype=torch.float64)
PAIRS = torch.tensor(list(itertools.product(VALUES, repeat=2)), dtype=torch.float64).reshape(4, -1, 2)
X, Y = PAIRS[..., 0].contiguous(), PAIRS[..., 1].contiguous()
TRIPLES = torch.tensor(list(itertools.product((*VALUES[:8], -3.5), repeat=3)), dtype=torch.float64).reshape(9, -1, 3)
TRIPLE = tuple(TRIPLES[..., i].contiguous() for i in range(3))
SIGNS = torch.where(r(4, 6).detach() > 0, 1.0, -1.0)

# The name in the table, where there is one function for it.
OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("tan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "sinc", "logit")
    },
    "entr": torch.special.entr,
    "round_to": lambda x: x.round(decimals=1),
    "round_to tens": lambda x: x.round(decimals=-1),
    "clamp logit": lambda x: torch.logit(x, 1e-3),
    "clamp logit of the ends": lambda x: torch.logit(x, 0.0),
    "trunc": torch.frac,
    "mul": torch.deg2rad,
    "mul back": torch.rad2deg,
    "exp2": lambda x: 2**x,
    "power": lambda x: 1.7**x,
    "power of zero": lambda x: 0.0**x,
    "leaky_relu": F.rrelu,
    "remainder": lambda x: x % 0.7,
    "remainder of a negative": lambda x: x % -3,
    "fmod": lambda x: torch.fmod(x, 0.7),
    "floor_divide": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "trunc_divide": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "copysign": lambda x: torch.copysign(x, -2.0),
    "where": torch.nan_to_num,
    "where to given ones": lambda x: torch.nan_to_num(x, 1.5, 2.0, -3.0),
    "exp2 special": torch.special.exp2,
    "sigmoid": torch.special.expit,
    "erf": torch.special.erf,
    "log1p": torch.special.log1p,
    "asin also": torch.arcsin,
}
OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("fmax", "fmin", "atan2", "hypot", "copysign", "fmod", "remainder", "logaddexp")
    },
    "trunc_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor_divide": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "power": torch.pow,
    "at_least": lambda x, y: torch.clamp(x, min=y),
    "at_most": lambda x, y: torch.clamp(x, max=y),
    "xlogy": torch.special.xlogy,
    "where": lambda x, y: x.masked_fill(x > y, y[0, 7]),
}
# Those without a gradient, or of truths.
TRUTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "isnan": lambda x, y: x.isnan(),
    "isinf": lambda x, y: x.isinf(),
    "isfinite": lambda x, y: x.isfinite(),
    "isposinf": lambda x, y: torch.isposinf(x) | torch.isneginf(y),
    "and, or": lambda x, y: (x > 0) & (y > 0) | ~(x < y),
    "xor": lambda x, y: (x > 0) ^ (y > 0),
    "functions of bits": lambda x, y: torch.bitwise_and(x > 0, torch.bitwise_or(y > 0, torch.bitwise_not(x < y))),
    "logical_xor": torch.logical_xor,
    "any": lambda x, y: (x > y).any(1),
    "any of numbers": lambda x, y: x.any(1, keepdim=True),
    "any of all": lambda x, y: (x > y).any(),
    "all": lambda x, y: (x > y).all(-1),
    "all of several": lambda x, y: (x > y).all((0, 1)),
    "all of all": lambda x, y: torch.all(x * 0 == 0),
    "count": lambda x, y: torch.count_nonzero(x, 1),
    "count of all": lambda x, y: torch.count_nonzero(x + y),
    "heaviside": torch.heaviside,
    "floor_divide": torch.floor_divide,
    "floor_divide by a number": lambda x, y: x // 0.7,
    "remainder of a number": lambda x, y: torch.remainder(2.5, x),
}
LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "ones": lambda x: x - torch.ones_like(x),
    "full": lambda x: x * torch.full_like(x, 2.5),
    "filled": lambda x: x * torch.empty_like(x).fill_(3.0),
    "made zero": lambda x: torch.maximum(x, (x * 2).zero_()),
}


def understood(fn: Callable[..., Any], args: tuple[Tensor, ...], name: str = "") -> None:
    compared(fn, args, rtol=1e-12, atol=1e-12, equal_nan=True)
    found = {n.op.fn for n in capture(Fn(fn), args).graph.nodes() if isinstance(n.op, Pointwise)}
    assert not name or name.split()[0] in found, found


@pytest.mark.parametrize("name", OF_ONE)
def test_functions_of_one(name: str) -> None:
    understood(OF_ONE[name], (ANY.requires_grad_(),), name)


@pytest.mark.parametrize("name", OF_TWO)
def test_functions_of_two(name: str) -> None:
    understood(OF_TWO[name], (X.requires_grad_(), Y.requires_grad_()), name)


@pytest.mark.parametrize(("name", "fn"), [("between", torch.clamp), ("lerp", torch.lerp)])
def test_functions_of_three(name: str, fn: Callable[..., Tensor]) -> None:
    understood(fn, tuple(t.requires_grad_() for t in TRIPLE), name)


@pytest.mark.parametrize("name", TRUTHS)
def test_truths(name: str) -> None:
    x, y = X.detach(), Y.detach()
    captured = check(Fn(TRUTHS[name]), x, y)
    assert opaque(captured) == []


@pytest.mark.parametrize("name", LIKE)
def test_tensors_of_one_value(name: str) -> None:
    understood(LIKE[name], (ANY.requires_grad_(),))


def test_tensors_of_one_value_lie_as_what_is_beside_them() -> None:
    x = r(2, 3, 4, 5).detach().to(memory_format=torch.channels_last)
    for fn in (lambda x: torch.zeros_like(x) + x, lambda x: torch.where(x > 0, torch.ones_like(x), x)):
        captured = check(Fn(fn), x)
        assert program_of(captured)(Fn(fn), (x,), {}).stride() == fn(x).stride() == x.stride()


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "__and__": lambda i: i & 3,
    "__or__": lambda i: i | i,
    "__xor__": lambda i: i ^ (i > 2),
    "bitwise_not": lambda i: ~i,
    "remainder": lambda i: i % -3,
    "floor_divide": lambda i: i // 2,
    "div": lambda i: torch.div(i, 2, rounding_mode="trunc"),
    "pow": lambda i: 3**i,
    "nan_to_num": lambda i: torch.nan_to_num(i) + 1,
    "clamp": lambda i: torch.clamp(i, i.new_tensor(1), i.new_tensor(2)),
    "isnan": lambda i: torch.isnan(i),
    "fmod": lambda i: torch.fmod(i, 2.5),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_stay_calls(name: str) -> None:
    captured = check(Fn(INTEGERS[name]), torch.arange(24).reshape(4, 6))
    assert any(name in target for target in opaque(captured)), opaque(captured)


def test_a_slope_that_is_drawn_stays_a_call() -> None:
    captured = capture(Fn(lambda x: F.rrelu(x, training=True)), (r(4, 6),))
    assert opaque(captured) != []
