"""Convolutions and matrix products.

Half precisions stay calls where a product would be rounded ahead of a sum that eager adds it to.
"""

from __future__ import annotations

from functools import partial

import torch

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir.node import Node
from fusewright.ir.ops import Conv, Matmul, Reduce, Reshape

Pairs = tuple[tuple[int, int], ...]

_WHOLE = (torch.float32, torch.float64)


def _apply(call: Call, op: Conv, x: Node) -> Normal:
    """The convolution; one without a batch dimension runs as a batch of one, as it does in PyTorch."""
    weight, bias = call.node("weight"), call.optional("bias")
    if not x.dtype.is_floating_point:
        return None
    if x.ndim == len(op.stride) + 2:
        return call.make(op, x, weight, bias)
    batched = call.make(op, call.make(Reshape((1, *x.shape)), x), weight, bias)
    return call.make(Reshape(batched.shape[1:]), batched)


def _conv(call: Call, n: int) -> Normal:
    padding = tuple((p, p) for p in call.ints("padding", n))
    op = Conv(call.ints("stride", n), padding, call.ints("dilation", n), call["groups"])
    return _apply(call, op, call.node("input"))


def _conv_named_padding(call: Call, n: int) -> Normal:
    dilation, kernel = call.ints("dilation", n), call.node("weight").shape[2:]
    padding: Pairs = ((0, 0),) * n
    if call["padding"] == "same":
        total = [d * (int(k) - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((t // 2, t - t // 2) for t in total)
    return _apply(call, Conv(call.ints("stride", n), padding, dilation, call["groups"]), call.node("input"))


def _conv_transposed(call: Call, n: int) -> Normal:
    padding = tuple((p, p) for p in call.ints("padding", n))
    extra = call.ints("output_padding", n)
    op = Conv(call.ints("stride", n), padding, call.ints("dilation", n), call["groups"], True, extra)
    return _apply(call, op, call.node("input"))


def _convolution(call: Call) -> Normal:
    x = call.node("input")
    n = call.node("weight").ndim - 2
    if x.ndim != n + 2:
        return None
    return _conv_transposed(call, n) if call["transposed"] else _conv(call, n)


def _fits(bias: Node | None, features: object) -> bool:
    return bias is None or bias.shape == (features,)


def _linear(call: Call) -> Normal:
    x, weight, bias = call.node("input"), call.node("weight"), call.optional("bias")
    if x.ndim < 2 or weight.ndim != 2 or not _fits(bias, weight.shape[0]):
        return None
    return call.make(Matmul(transpose_w=True), x, weight, bias)


def _matmul(call: Call, other: str) -> Normal:
    x, w = call.node("self"), call.node(other)
    return call.make(Matmul(), x, w, None) if x.ndim >= 2 and w.ndim >= 2 else None


def _addmm(call: Call) -> Normal:
    bias, x, w = call.node("self"), call.node("mat1"), call.node("mat2")
    plain = call["alpha"] == 1 and call["beta"] == 1
    return call.make(Matmul(), x, w, bias) if plain and _fits(bias, w.shape[1]) else _added(call, "mat1", "mat2")


def _added(call: Call, first: str, second: str) -> Normal:
    """beta self + alpha (first @ second); a call where beta is 0, so that self counts for nothing, whatever it is."""
    x, y, alpha, beta = call.node("self"), call.node(first), call["alpha"], call["beta"]
    if call.result.dtype not in _WHOLE or beta == 0 or not all(isinstance(n, int | float) for n in (alpha, beta)):
        return None
    product = call.make(Matmul(), y, call.node(second), None)
    product = product if alpha == 1 else call.apply("mul", product, alpha)
    x = x if beta == 1 else call.apply("mul", x, beta)
    return call.apply("add", x, product)


def _of_vector(call: Call) -> Normal:
    """(n, k) @ (k) as (n, k) @ (k, 1)."""
    x, w = call.node("self"), call.node("vec")
    if not x.dtype.is_floating_point:
        return None
    column = call.make(Matmul(), x, call.make(Reshape((*w.shape, 1)), w), None)
    return call.make(Reshape(x.shape[:1]), column)


def _of_vectors(call: Call) -> Normal:
    """The sum of x y."""
    if call.result.dtype not in _WHOLE:
        return None
    return call.make(Reduce("sum", (0,)), call.apply("mul", call.node("self"), call.node("tensor")))


TABLE: dict[str, Handler] = {
    "aten.convolution.default": _convolution,
    "aten.linear.default": _linear,
    "aten.matmul.default": partial(_matmul, other="other"),
    "aten.mm.default": partial(_matmul, other="mat2"),
    "aten.bmm.default": partial(_matmul, other="mat2"),
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": partial(_added, first="batch1", second="batch2"),
    "aten.mv.default": _of_vector,
    "aten.dot.default": _of_vectors,
}
for _n, _transposed in ((1, "default"), (2, "input"), (3, "input")):
    TABLE[f"aten.conv{_n}d.default"] = partial(_conv, n=_n)
    TABLE[f"aten.conv{_n}d.padding"] = partial(_conv_named_padding, n=_n)
    TABLE[f"aten.conv_transpose{_n}d.{_transposed}"] = partial(_conv_transposed, n=_n)
