"""Pooling, adaptive pooling included."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.codegen.ranges import adaptive_slots
from fusewright.ir.node import Node
from fusewright.ir.ops import Pool, RangeSum, Reduce, Reshape


def _max_pool(call: Call, n: int) -> Normal:
    kernel, dilation = call.ints("kernel_size", n), call.ints("dilation", n)
    stride, padding = call.ints("stride", n, kernel), call.ints("padding", n)
    if _is_whole(call, kernel, padding) and set(dilation) == {1}:
        return _of_all(call, "max", n)
    return call.make(Pool("max", kernel, stride, padding, dilation, call["ceil_mode"]), call.node("self"))


def _is_whole(call: Call, kernel: tuple[int, ...], padding: tuple[int, ...]) -> bool:
    """Whether there is one window, of all there is."""
    whole = call.node("self").shape[-len(kernel) :] == kernel and not any(padding)
    return whole and set(call.shape[-len(kernel) :]) == {1}


def _of_all(call: Call, kind: Literal["max", "mean"], n: int) -> Node:
    """What all positions come to; of several that are the greatest the first has the gradient."""
    x = call.node("self")
    return call.make(Reduce(kind, tuple(range(x.ndim - n, x.ndim)), keepdim=True, first=kind == "max"), x)


def _max_pool_with_indices(call: Call, n: int) -> Normal:
    pooled = None if 1 in call.used else _max_pool(call, n)
    return (pooled, None) if isinstance(pooled, Node) else None


def _avg_pool(call: Call, n: int) -> Normal:
    kernel = call.ints("kernel_size", n)
    stride, padding = call.ints("stride", n, kernel), call.ints("padding", n)
    included, divisor = bool(call["count_include_pad"]), call.get("divisor_override")
    if divisor is None and _is_whole(call, kernel, padding) and call.node("self").dtype.is_floating_point:
        return _of_all(call, "mean", n)
    op = Pool("avg", kernel, stride, padding, (1,) * n, call["ceil_mode"], included, divisor)
    return call.make(op, call.node("self"))


def _windows(call: Call, n: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Input and output lengths of an adaptive pooling, where they are known and positive."""
    lengths, out = call.node("self").shape[-n:], call.shape[-n:]
    known = all(isinstance(v, int) and v > 0 for v in (*lengths, *out))
    return (tuple(map(int, lengths)), tuple(map(int, out))) if known else None


def _adaptive_avg_pool(call: Call, n: int) -> Normal:
    x, sizes = call.node("self"), _windows(call, n)
    if sizes is None or not x.dtype.is_floating_point:
        return None
    lengths, out = sizes
    if set(out) == {1}:
        return _of_all(call, "mean", n)
    kernel = tuple(a // b for a, b in zip(lengths, out, strict=True))
    # PyTorch divides by one window length after the other; that rounds as one division does if all but one are exact.
    inexact = sum(k & (k - 1) != 0 for k in kernel)
    if all(a % b == 0 for a, b in zip(lengths, out, strict=True)) and inexact <= 1:
        return call.make(Pool("avg", kernel, kernel, (0,) * n, (1,) * n), x)
    batched = x if x.ndim == n + 2 else call.make(Reshape((1, *x.shape)), x)
    table = tuple((i + 2, adaptive_slots(a, b)) for i, (a, b) in enumerate(zip(lengths, out, strict=True)))
    pooled = call.make(RangeSum(table, x.dtype), batched)
    return pooled if x.ndim == n + 2 else call.make(Reshape(pooled.shape[1:]), pooled)


def _adaptive_max_pool(call: Call, n: int) -> Normal:
    sizes = _windows(call, n)
    if sizes is None or 1 in call.used or any(a % b for a, b in zip(*sizes, strict=True)):
        return None
    if set(sizes[1]) == {1}:
        return (_of_all(call, "max", n), None)
    kernel = tuple(a // b for a, b in zip(*sizes, strict=True))
    return (call.make(Pool("max", kernel, kernel, (0,) * n, (1,) * n), call.node("self")), None)


TABLE: dict[str, Handler] = {}
for _n in (1, 2, 3):
    TABLE[f"aten.max_pool{_n}d.default"] = partial(_max_pool, n=_n)
    TABLE[f"aten.max_pool{_n}d_with_indices.default"] = partial(_max_pool_with_indices, n=_n)
    TABLE[f"aten.avg_pool{_n}d.default"] = partial(_avg_pool, n=_n)
    TABLE[f"aten.adaptive_avg_pool{_n}d.default"] = partial(_adaptive_avg_pool, n=_n)
    TABLE[f"aten.adaptive_max_pool{_n}d.default"] = partial(_adaptive_max_pool, n=_n)
