"""Reductions, scans and softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir.build import reshape
from fusewright.ir.intervals import index_count
from fusewright.ir.node import Node, make
from fusewright.ir.ops import (
    NEVER,
    Cast,
    Expand,
    Full,
    Nll,
    Permute,
    Reduce,
    ReduceKind,
    Reshape,
    Scan,
    ScanKind,
    Slice,
    Softmax,
    numel,
)

# What is found where these point to.
_OF: dict[ReduceKind, ReduceKind] = {"argmax": "max", "argmin": "min"}


def _reduce(call: Call, kind: ReduceKind, *, first: bool = False) -> Node | None:
    x = call.node("self")
    if x.ndim == 0:
        return None
    op = Reduce(kind, call.dims("dim", x.ndim), bool(call.get("keepdim", False)), dtype=call.get("dtype"), first=first)
    return call.make(op, x)


def _place(call: Call, kind: ReduceKind) -> Node | None:
    x = call.node("self")
    plain = x.ndim > 0 and x.dtype != torch.bool  # of which ATen finds extremes alone
    return call.make(Reduce(kind, call.dims("dim", x.ndim), bool(call["keepdim"])), x) if plain else None


def _extreme(call: Call, kind: ReduceKind, place: ReduceKind) -> Normal:
    """Values, and their indices, as far as they are used."""
    values = _reduce(call, kind, first=True)
    indices = _place(call, place) if 1 in call.used else None
    return None if values is None or (1 in call.used and indices is None) else (values, indices)


def _gather(call: Call) -> Normal:
    greatest = _greatest(call)
    return _of_classes(call) if greatest is None else greatest


def _greatest(call: Call) -> Node | None:
    """What stands where the greatest stands is the greatest: of the same values, or of a softmax, which keeps order."""
    x, index = call.node("self"), call.node("index")
    found = index.arg(0) if isinstance(index.op, Reshape) else index
    if x.ndim == 0 or not isinstance(found.op, Reduce) or found.op.dims != (call["dim"] % x.ndim,):
        return None
    (dim,), of, kind = found.op.dims, found.arg(0), _OF.get(found.op.kind)
    same = x is of or ((x.op == Softmax(dim) or x.op == Softmax(dim, log=True)) and x.arg(0) is of)
    return call.make(Reduce(kind, (dim,), keepdim=True, first=True), x) if same and kind is not None else None


def _of_classes(call: Call) -> Node | None:
    """One element of each row, as a loss of classes picks it: x (N, C, *) along C, at indices (N, 1, *); or in rows
    (*, C), at indices (*, 1)."""
    x, index = call.node("self"), call.node("index")
    dim = call["dim"] % x.ndim if x.ndim >= 2 else 0
    one_each = dim > 0 and index.shape == (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    if not one_each or not x.dtype.is_floating_point or index.dtype != torch.int64 or call["sparse_grad"]:
        return None
    if dim > 1:
        if dim < x.ndim - 1 or isinstance(x.op, Permute | Expand | Slice):  # it would be copied
            return None
        x = reshape(x, (numel(x.shape[:-1]), x.shape[-1]))
    loss = call.make(Nll(NEVER), x, reshape(index, (x.shape[0], *x.shape[2:])), None)
    return reshape(call.apply("neg", loss), index.shape)


def _one_hot(call: Call) -> Normal:
    """Which class each is of, where that is an index of as many: any other may be none, which is an error."""
    x, classes = call.node("self"), call["num_classes"]
    count = index_count(x)
    if count is None or not 0 < count <= classes < 2**24:  # float32 has all of them
        return None
    ones = make(Full((classes,), 1.0, torch.float32, x.device))
    numbers = call.apply("sub", call.make(Scan("sum", 0), ones), 1)
    is_one = call.apply("eq", reshape(x, (*x.shape, 1)), numbers)
    return call.make(Cast(torch.int64), is_one)


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


def _extremes(call: Call) -> Normal:
    """The least and the greatest, whose gradients are those of `amin` and `amax`."""
    least, greatest = _reduce(call, "min"), _reduce(call, "max")
    return None if least is None or greatest is None else (least, greatest)


def _truths(call: Call, kind: ReduceKind) -> Normal:
    """The greatest or the least of truths."""
    x = call.node("self")
    dims = call.dims("dim", max(x.ndim, 1))
    if x.ndim == 0 or call.result.dtype != torch.bool or any(x.shape[d] == 0 for d in dims):
        return None
    truths = x if x.dtype == torch.bool else call.apply("ne", x, 0)
    return call.make(Reduce(kind, dims, bool(call.get("keepdim", False))), truths)


def _count(call: Call) -> Normal:
    x = call.node("self")
    return None if x.ndim == 0 else call.make(Reduce("sum", call.dims("dim", x.ndim)), call.apply("ne", x, 0))


def _norm(call: Call) -> Normal:
    return _norm_of(call, call.node("self"), call.get("ord", call.get("p")))


def _distance(call: Call) -> Normal:
    return _norm_of(call, call.apply("sub", call.node("self"), call.node("other")), call["p"])


def _norm_of(call: Call, x: Node, exponent: Any) -> Normal:
    """The norm of exponent 2, 1, infinity, or another above 1."""
    dtype = call.get("dtype")
    if x.ndim == 0 or not x.dtype.is_floating_point or dtype not in (None, x.dtype):
        return None
    dims, keepdim = call.dims("dim", x.ndim), bool(call.get("keepdim", False))
    kinds: dict[Any, ReduceKind] = {None: "norm", 2: "norm", 1: "sum", inf: "max", -inf: "min"}
    if exponent in kinds:
        op = Reduce(kinds[exponent], dims, keepdim)
        return call.make(op, x if op.kind == "norm" else call.apply("abs", x))
    if not isinstance(exponent, int | float) or not exponent > 1:  # below 1 gradients of zeros are infinite
        return None
    size = call.apply("abs", x if x.dtype.itemsize > 2 else call.make(Cast(torch.float32), x))
    total = call.make(Reduce("sum", dims, keepdim), call.apply("pow", size, params=(exponent,)))
    nothing = call.apply("eq", total, 0)  # of which the gradient is 0, that of a root NaN
    root = call.apply("pow", call.apply("where", nothing, 1, total), params=(1 / exponent,))
    found = call.apply("where", nothing, total, root)
    return found if found.dtype == x.dtype else call.make(Cast(x.dtype), found)


def _given(call: Call) -> Any:
    return 1 if call["correction"] is None else call["correction"]


def _unbiased(call: Call) -> Any:
    return 1 if call["unbiased"] else 0


def _scan(call: Call, kind: ScanKind) -> Node | None:
    x = call.node("self")
    fine = x.ndim > 0 and (kind != "logsumexp" or x.dtype.is_floating_point)
    return call.make(Scan(kind, call["dim"] % x.ndim, call.get("dtype")), x) if fine else None


def _extreme_scan(call: Call, kind: ScanKind) -> Normal:
    """Values and indices, of which only the former are computed."""
    values = None if 1 in call.used else _scan(call, kind)
    return None if values is None else (values, None)


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
    "aten.max.dim": partial(_extreme, kind="max", place="argmax"),
    "aten.min.dim": partial(_extreme, kind="min", place="argmin"),
    "aten.gather.default": _gather,
    "aten.one_hot.default": _one_hot,
    "aten.argmax.default": partial(_place, kind="argmax"),
    "aten.argmin.default": partial(_place, kind="argmin"),
    "aten.aminmax.default": _extremes,
    **{f"aten.any.{kind}": partial(_truths, kind="max") for kind in ("default", "dim", "dims")},
    **{f"aten.all.{kind}": partial(_truths, kind="min") for kind in ("default", "dim", "dims")},
    "aten.count_nonzero.default": _count,
    "aten.count_nonzero.dim_IntList": _count,
    "aten.dist.default": _distance,
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
    "aten.cumsum.default": partial(_scan, kind="sum"),
    "aten.cumprod.default": partial(_scan, kind="prod"),
    "aten.logcumsumexp.default": partial(_scan, kind="logsumexp"),
    "aten.cummax.default": partial(_extreme_scan, kind="max"),
    "aten.cummin.default": partial(_extreme_scan, kind="min"),
    "aten.softmax.int": partial(_softmax, log=False),
    "aten.log_softmax.int": partial(_softmax, log=True),
    "aten._softmax.default": partial(_softmax, log=False),
    "aten._log_softmax.default": partial(_softmax, log=True),
}
