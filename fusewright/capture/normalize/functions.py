"""Pointwise functions: ATen's overloads and the table's parameters, side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import sympy

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir import pointwise
from fusewright.ir.node import Node
from fusewright.ir.ops import Number, Pointwise


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
)
_SYNONYMS = {"absolute": "abs", "negative": "neg", "arctan": "atan"}
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
_PAIRS = {n: n for n in ["maximum", "minimum", "logical_and", "logical_or"]}


def _table() -> dict[str, Handler]:
    unary: Callable[..., Handler] = partial
    table: dict[str, Handler] = {f"aten.{fn}.default": unary(_unary, fn=fn) for fn in _UNARY}
    table |= {f"aten.{name}.default": partial(_unary, fn=fn) for name, fn in _SYNONYMS.items()}
    table |= {f"aten.{fn}.default": partial(_unary, fn=fn, params=ps) for fn, ps in _WITH_PARAMETERS.items()}
    for name, fn in (_ARITHMETIC | {n: n for n in _COMPARISONS}).items():
        table |= {f"aten.{name}.{kind}": partial(_binary, fn=fn) for kind in ("Tensor", "Scalar")}
    table |= {f"aten.{name}.default": partial(_binary, fn=fn) for name, fn in _PAIRS.items()}
    table |= {f"aten.where.{kind}": _where for kind in ("self", "ScalarSelf", "ScalarOther", "Scalar")}
    return table | {
        "aten.hardshrink.default": partial(_unary, fn="hardshrink", params=("lambd",)),
        "aten.max.other": partial(_binary, fn="maximum"),
        "aten.min.other": partial(_binary, fn="minimum"),
        "aten.xlogy.Tensor": partial(_binary, fn="xlogy"),
        "aten.rsub.Scalar": _reversed_sub,
        "aten.rsub.Tensor": _reversed_sub,
        "aten.clamp.default": _clamp,
        "aten.clip.default": _clamp,
        "aten.masked_fill.Scalar": _masked_fill,
        "aten.pow.Tensor_Scalar": partial(_unary, fn="pow", params=("exponent",)),
    }


TABLE: dict[str, Handler] = _table()
