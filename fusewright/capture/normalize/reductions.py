"""Reductions, prefix sums and softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir.node import Node
from fusewright.ir.ops import Cast, Cumsum, Reduce, ReduceKind, Softmax


def _reduce(call: Call, kind: ReduceKind, *, first: bool = False) -> Node | None:
    x = call.node("self")
    if x.ndim == 0:
        return None
    op = Reduce(kind, call.dims("dim", x.ndim), bool(call.get("keepdim", False)), dtype=call.get("dtype"), first=first)
    return call.make(op, x)


def _extreme(call: Call, kind: ReduceKind) -> Normal:
    """Values and indices, of which only the former are computed."""
    values = None if 1 in call.used else _reduce(call, kind, first=True)
    return None if values is None else (values, None)


def _prod(call: Call) -> Normal:
    """A product over one dimension; the product over several at once rounds in another order."""
    return _reduce(call, "prod") if call.get("dim") is not None or call.node("self").ndim == 1 else None


def _var(call: Call, correction: Callable[[Call], Any], kind: ReduceKind = "var") -> Node | None:
    x, amount = call.node("self"), correction(call)
    if x.ndim == 0 or not x.dtype.is_floating_point or float(f"{amount:g}") != amount:
        return None
    op = Reduce(kind, call.dims("dim", x.ndim), bool(call.get("keepdim", False)), correction=amount)
    return call.make(op, x)


def _with_mean(call: Call, correction: Callable[[Call], Any], kind: ReduceKind) -> Normal:
    """The variance or deviation, and the mean."""
    spread = _var(call, correction, kind)
    return None if spread is None else (spread, _reduce(call, "mean"))


def _norm(call: Call) -> Normal:
    """The norm of exponent 2, 1 or infinity."""
    x, exponent = call.node("self"), call.get("ord", call.get("p"))
    dtype = call.get("dtype")
    if x.ndim == 0 or not x.dtype.is_floating_point or dtype not in (None, x.dtype):
        return None
    kinds: dict[Any, ReduceKind] = {None: "norm", 2: "norm", 1: "sum", inf: "max", -inf: "min"}
    if exponent not in kinds:
        return None
    op = Reduce(kinds[exponent], call.dims("dim", x.ndim), bool(call.get("keepdim", False)))
    return call.make(op, x if op.kind == "norm" else call.apply("abs", x))


def _given(call: Call) -> Any:
    return 1 if call["correction"] is None else call["correction"]


def _unbiased(call: Call) -> Any:
    return 1 if call["unbiased"] else 0


def _cumsum(call: Call) -> Normal:
    x = call.node("self")
    return call.make(Cumsum(call["dim"] % x.ndim, call["dtype"]), x) if x.ndim else None


def _softmax(call: Call, log: bool) -> Normal:
    x, dtype = call.node("self"), call.result.dtype
    plain = x.ndim > 0 and x.dtype.is_floating_point and call.get("dtype") in (None, dtype)
    if not plain or not dtype.is_floating_point:
        return None
    return call.make(Softmax(call["dim"] % x.ndim, log), x if x.dtype == dtype else call.make(Cast(dtype), x))


TABLE: dict[str, Handler] = {
    "aten.sum.default": partial(_reduce, kind="sum"),
    "aten.sum.dim_IntList": partial(_reduce, kind="sum"),
    "aten.mean.default": partial(_reduce, kind="mean"),
    "aten.mean.dim": partial(_reduce, kind="mean"),
    "aten.amax.default": partial(_reduce, kind="max"),
    "aten.amin.default": partial(_reduce, kind="min"),
    "aten.max.default": partial(_reduce, kind="max"),  # of all elements; gradients are shared, as amax's are
    "aten.min.default": partial(_reduce, kind="min"),
    "aten.max.dim": partial(_extreme, kind="max"),
    "aten.min.dim": partial(_extreme, kind="min"),
    "aten.logsumexp.default": partial(_reduce, kind="logsumexp"),
    "aten.prod.default": _prod,
    "aten.prod.dim_int": _prod,
    "aten.var.correction": partial(_var, correction=_given),
    "aten.var.dim": partial(_var, correction=_unbiased),
    "aten.var.default": partial(_var, correction=_unbiased),
    "aten.std.correction": partial(_var, correction=_given, kind="std"),
    "aten.std.dim": partial(_var, correction=_unbiased, kind="std"),
    "aten.std.default": partial(_var, correction=_unbiased, kind="std"),
    "aten.var_mean.correction": partial(_with_mean, correction=_given, kind="var"),
    "aten.var_mean.dim": partial(_with_mean, correction=_unbiased, kind="var"),
    "aten.std_mean.correction": partial(_with_mean, correction=_given, kind="std"),
    "aten.std_mean.dim": partial(_with_mean, correction=_unbiased, kind="std"),
    "aten.linalg_vector_norm.default": _norm,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.norm.Scalar": _norm,
    "aten.cumsum.default": _cumsum,
    "aten.softmax.int": partial(_softmax, log=False),
    "aten.log_softmax.int": partial(_softmax, log=True),
    "aten._softmax.default": partial(_softmax, log=False),
    "aten._log_softmax.default": partial(_softmax, log=True),
}
