"""Pointwise functions: ATen's overloads and the table's parameters, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from math import inf, pi
from typing import Any

import sympy
import torch

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir import pointwise
from fusewright.ir.node import Node
from fusewright.ir.ops import Number, Pointwise, Positions


def _apply(call: Call, fn: str, *operands: Any, params: tuple[Any, ...] = ()) -> Normal:
    """`fn` of tensors and Python numbers; `None` when the table does not hold it or an operand is neither."""
    numbers = (bool, int, float, sympy.Expr)
    if fn not in pointwise.functions() or not all(isinstance(o, (Node, *numbers)) for o in operands):
        return None
    if not all(isinstance(p, bool | int | float | str) for p in params):
        return None
    nodes = [o if isinstance(o, Node) else call.make(Number(o)) for o in operands]
    return call.make(Pointwise(fn, params), *nodes)


def _unary(call: Call, fn: str, params: tuple[str, ...] = ()) -> Normal:
    return _apply(call, fn, call["self"], params=tuple(call[p] for p in params))


def _binary(call: Call, fn: str) -> Normal:
    plain = call.get("alpha", 1) == 1 and call.get("rounding_mode") is None
    return _apply(call, fn, call["self"], call["other"]) if plain else None


def _of_floats(call: Call, fn: str, *names: str) -> Normal:
    """`fn` of the arguments `names`, whose tensors are all of floats: integers have semantics of their own."""
    operands = [call[name] for name in names]
    floats = all(o.dtype.is_floating_point for o in operands if isinstance(o, Node))
    return _apply(call, fn, *operands) if floats else None


def _of_two(call: Call, fn: str) -> Normal:
    return _of_floats(call, fn, "self", "other" if fn != "heaviside" else "values")


def _of_float(handler: Callable[..., Normal]) -> Callable[..., Normal]:
    """Likewise of what handles a call of one tensor."""

    @wraps(handler)
    def handled(call: Call, **how: Any) -> Normal:
        return handler(call, **how) if call.node("self").dtype.is_floating_point else None

    return handled


def _remainder(call: Call) -> Normal:
    """Of positions, too, what repeats after so many; and of other whole numbers, by a positive one."""
    x, other = call["self"], call["other"]
    if isinstance(x, Node) and x.dtype == torch.int64 and type(other) is int and other > 0:
        if isinstance(x.op, Positions) and x.op.modulo is None:
            return call.make(replace(x.op, modulo=other))
        return call.apply("remainder", x, other)
    return _of_two(call, "remainder")


def _divided(call: Call) -> Normal:
    """A quotient that is rounded as the call says, or not at all."""
    fn = {None: "div", "floor": "floor_divide", "trunc": "trunc_divide"}[call["rounding_mode"]]
    return _binary(call, fn) if fn == "div" else _of_two(call, fn)


def _power_of_number(call: Call) -> Normal:
    """2 ** x is what `exp2` is."""
    exponent = call.node("exponent")
    if call["self"] == 2 and exponent.dtype.is_floating_point:
        return call.apply("exp2", exponent)
    return _of_floats(call, "power", "self", "exponent")


@_of_float
def _rounded(call: Call) -> Normal:
    return _unary(call, "round_to", ("decimals",))


def _bounded(call: Call) -> Normal:
    """By tensors, of which one may be missing."""
    names = [name for name in ("min", "max") if call[name] is not None]
    fn = "between" if len(names) == 2 else "at_least" if names == ["min"] else "at_most"
    return _of_floats(call, fn, "self", *names)


@_of_float
def _logit(call: Call) -> Normal:
    """Of what is clamped first, where it says so: 1 - eps is rounded to the type."""
    x, eps = call.node("self"), call["eps"]
    if eps is not None and eps >= 0:
        low = torch.tensor(eps, dtype=x.dtype)
        x = call.apply("clamp", x, params=(low.item(), (1 - low).item()))
    return call.apply("logit", x)


@_of_float
def _is(call: Call, fn: str, value: float | None = None, magnitude: bool = False) -> Normal:
    """Whether a number, or its magnitude, compares so with `value`, or with itself."""
    x = call.node("self")
    return call.apply(fn, call.apply("abs", x) if magnitude else x, x if value is None else value)


@_of_float
def _numbers_only(call: Call) -> Normal:
    """NaN and the infinities as other numbers: zero and the largest, unless the call says which."""
    x = call.node("self")
    info = torch.finfo(x.dtype)
    low, high, other = (
        default if call[name] is None else call[name]
        for name, default in (("neginf", info.min), ("posinf", info.max), ("nan", 0.0))
    )
    bounded = call.apply("where", call.apply("eq", x, -inf), low, x)
    bounded = call.apply("where", call.apply("eq", x, inf), high, bounded)
    return call.apply("where", call.apply("ne", x, x), other, bounded)


@_of_float
def _fraction(call: Call) -> Normal:
    x = call.node("self")
    return call.apply("sub", x, call.apply("trunc", x))


@_of_float
def _times(call: Call, factor: float) -> Normal:
    return call.apply("mul", call.node("self"), factor)


def _interpolated(call: Call) -> Normal:
    return _of_floats(call, "lerp", "self", "end", "weight")


def _mean_slope(call: Call) -> Normal:
    """A leaky slope that is drawn in training only."""
    slope = (call["lower"] + call["upper"]) / 2
    return None if call["training"] else _apply(call, "leaky_relu", call["self"], params=(slope,))


def _reversed_sub(call: Call) -> Normal:
    return _apply(call, "sub", call["other"], call["self"]) if call["alpha"] == 1 else None


def _clamp(call: Call) -> Normal:
    low, high = call["min"], call["max"]
    if low is not None and high is not None:
        return _apply(call, "clamp", call["self"], params=(low, high))
    return _apply(
        call, "clamp_max" if low is None else "clamp_min", call["self"], params=(high if low is None else low,)
    )


def _where(call: Call) -> Normal:
    return _apply(call, "where", call["condition"], call["self"], call["other"])


def _masked_fill(call: Call) -> Normal:
    return _apply(call, "where", call["mask"], call["value"], call["self"])


_UNARY = (
    *("relu", "relu6", "sigmoid", "hardsigmoid", "log_sigmoid", "tanh", "selu", "silu", "mish", "hardswish"),
    *("abs", "neg", "floor", "ceil", "round", "trunc", "sign", "logical_not"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "square"),
    *("erf", "atan", "sin", "cos"),
    *("tan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "sinc"),
)
_SYNONYMS = {"absolute": "abs", "negative": "neg", "arctan": "atan"} | {
    "special_entr": "entr",
    "bitwise_not": "logical_not",  # of truths, as `_OF_BITS`
}
_WITH_PARAMETERS: dict[str, tuple[str, ...]] = {
    "hardtanh": ("min_val", "max_val"),
    "clamp_min": ("min",),
    "clamp_max": ("max",),
    "leaky_relu": ("negative_slope",),
    "threshold": ("threshold", "value"),
    "hardshrink": ("lambd",),
    "softshrink": ("lambd",),
    "softplus": ("beta", "threshold"),
    "elu": ("alpha", "scale", "input_scale"),
    "celu": ("alpha",),
    "gelu": ("approximate",),
}
_ARITHMETIC = {"add": "add", "sub": "sub", "mul": "mul", "div": "div"} | {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
}
_COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
_PAIRS = {n: n for n in ["maximum", "minimum", "logical_and", "logical_or", "logical_xor"]}
# Of truths; whatever else has bits has another type than what these give.
_OF_BITS = {f"bitwise_{n}": f"logical_{n}" for n in ("and", "or", "xor")} | {
    f"__{n}__": f"logical_{n}" for n in ("and", "or", "xor")
}
# name -> overloads of two tensors, or a tensor and a number, of floats.
_OF_TWO = {
    **dict.fromkeys(("fmax", "fmin", "atan2", "hypot", "logaddexp", "heaviside"), ("default",)),
    **dict.fromkeys(("copysign", "fmod"), ("Tensor", "Scalar")),
    "remainder": ("Tensor", "Scalar", "Scalar_Tensor"),
    "floor_divide": ("default", "Scalar"),
}


def _table() -> dict[str, Handler]:
    unary: Callable[..., Handler] = partial
    table: dict[str, Handler] = {f"aten.{fn}.default": unary(_unary, fn=fn) for fn in _UNARY}
    table |= {f"aten.{name}.default": partial(_unary, fn=fn) for name, fn in _SYNONYMS.items()}
    table |= {f"aten.{fn}.default": partial(_unary, fn=fn, params=ps) for fn, ps in _WITH_PARAMETERS.items()}
    for name, fn in (_ARITHMETIC | {n: n for n in _COMPARISONS}).items():
        table |= {f"aten.{name}.{kind}": partial(_binary, fn=fn) for kind in ("Tensor", "Scalar")}
    table |= {f"aten.{name}.default": partial(_binary, fn=fn) for name, fn in _PAIRS.items()}
    table |= {f"aten.{name}.Tensor": partial(_binary, fn=fn) for name, fn in _OF_BITS.items()}
    for name, overloads in _OF_TWO.items():
        table |= {f"aten.{name}.{kind}": partial(_of_two, fn=name) for kind in overloads}
    table |= {f"aten.where.{kind}": _where for kind in ("self", "ScalarSelf", "ScalarOther", "Scalar")}
    return table | {
        "aten.hardshrink.default": partial(_unary, fn="hardshrink", params=("lambd",)),
        "aten.max.other": partial(_binary, fn="maximum"),
        "aten.min.other": partial(_binary, fn="minimum"),
        "aten.remainder.Scalar": _remainder,
        "aten.xlogy.Tensor": partial(_binary, fn="xlogy"),
        "aten.rsub.Scalar": _reversed_sub,
        "aten.rsub.Tensor": _reversed_sub,
        "aten.clamp.default": _clamp,
        "aten.clip.default": _clamp,
        "aten.clamp.Tensor": _bounded,
        "aten.clip.Tensor": _bounded,
        "aten.div.Tensor_mode": _divided,
        "aten.div.Scalar_mode": _divided,
        "aten.isnan.default": partial(_is, fn="ne"),
        "aten.isinf.default": partial(_is, fn="eq", value=inf, magnitude=True),
        "aten.isfinite.default": partial(_is, fn="lt", value=inf, magnitude=True),
        "aten.isposinf.default": partial(_is, fn="eq", value=inf),
        "aten.isneginf.default": partial(_is, fn="eq", value=-inf),
        "aten.nan_to_num.default": _numbers_only,
        "aten.logit.default": _logit,
        "aten.frac.default": _fraction,
        "aten.round.decimals": _rounded,
        "aten.rad2deg.default": partial(_times, factor=180 / pi),
        "aten.deg2rad.default": partial(_times, factor=pi / 180),
        "aten.rrelu.default": _mean_slope,
        "aten.lerp.Scalar": _interpolated,
        "aten.lerp.Tensor": _interpolated,
        "aten.masked_fill.Scalar": _masked_fill,
        "aten.masked_fill.Tensor": _masked_fill,
        "aten.pow.Tensor_Tensor": lambda call: _of_floats(call, "power", "self", "exponent"),
        "aten.pow.Scalar": _power_of_number,
        "aten.pow.Tensor_Scalar": partial(_unary, fn="pow", params=("exponent",)),
    }


TABLE: dict[str, Handler] = _table()
