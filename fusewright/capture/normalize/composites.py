"""Calls that stand for several operations, as PyTorch's documentation spells them: gated units, losses, shuffles.

Of what PyTorch itself composes of other calls (`F.cosine_similarity`, ...) nothing is said here: those are written out
as it does (`fusewright.capture.spelled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir.build import cast, permute, reshape
from fusewright.ir.class_losses import Reduction, class_weights, counted, reduced
from fusewright.ir.node import Node, make
from fusewright.ir.ops import (
    Cross,
    Expand,
    Full,
    Matmul,
    Nll,
    Permute,
    Positions,
    Reduce,
    Size,
    Slice,
    Softmax,
    broadcast,
)

# What the number stands for that says how a loss is reduced; 0 leaves it as it is.
_REDUCTIONS = {1: "mean", 2: "sum"}


def _glu(call: Call) -> Normal:
    """glu(x) = a * sigmoid(b), a and b being the halves of x along a dimension."""
    x = call.node("self")
    dim = call["dim"] % max(x.ndim, 1)
    length = x.shape[dim]
    if not isinstance(length, int):
        return None
    a, b = (call.make(Slice(dim, i * length // 2, (i + 1) * length // 2), x) for i in range(2))
    return call.apply("mul", a, call.apply("sigmoid", b))


def _shuffled(call: Call) -> Normal:
    """(*, C r r, H, W) -> (*, C, H r, W r)."""
    x, r = call.node("self"), call["upscale_factor"]
    *batch, channels, h, w = x.shape
    if r < 2 or not isinstance(channels, int):
        return None
    n = len(batch)
    apart = reshape(x, (*batch, channels // r**2, r, r, h, w))
    return reshape(permute(apart, (*range(n), n, n + 3, n + 1, n + 4, n + 2)), call.shape)


def _unshuffled(call: Call) -> Normal:
    """(*, C, H r, W r) -> (*, C r r, H, W)."""
    x, r = call.node("self"), call["downscale_factor"]
    *batch, channels, h, w = x.shape
    if r < 2 or not isinstance(h, int) or not isinstance(w, int):
        return None
    n = len(batch)
    apart = reshape(x, (*batch, channels, h // r, r, w // r, r))
    return reshape(permute(apart, (*range(n), n, n + 2, n + 4, n + 1, n + 3)), call.shape)


def _exchanged(call: Call) -> Normal:
    """(N, g C, *) -> (N, C g, *): channel c of group k becomes channel k of group c."""
    x, g = call.node("self"), call["groups"]
    channels = x.shape[1]
    if g < 2 or not isinstance(channels, int) or channels == g or x.device.type == "cpu":
        return None  # what would be a view; a CPU's own keeps channels last
    apart = reshape(x, (x.shape[0], g, channels // g, *x.shape[2:]))
    return reshape(permute(apart, (0, 2, 1, *range(3, apart.ndim))), call.shape)


def _crossed(call: Call) -> Normal:
    """Along the first dimension of three elements, where none is said."""
    a, b, dim = call.node("self"), call.node("other"), call["dim"]
    if a.ndim != b.ndim or a.dtype != b.dtype or not a.dtype.is_floating_point:
        return None
    if dim is None:
        known = [d for d, n in enumerate(a.shape) if n == 3]
        if not known or any(not isinstance(n, int) for n in a.shape[: known[0]]):
            return None
        dim = known[0]
    return call.make(Cross(dim % a.ndim), a, b)


def _loss(call: Call, each: Node) -> Normal:
    """A loss of every element, reduced as the call says."""
    kind = _REDUCTIONS.get(call["reduction"])
    if kind is None or each.ndim == 0:
        return each if kind is None else None
    return call.make(Reduce(kind, tuple(range(each.ndim))), each)  # type: ignore[arg-type]


def _alike(call: Call) -> tuple[Node, Node] | None:
    """The two tensors of a loss, where they are of one shape and type."""
    x, target = call.node("self"), call.node("target")
    return (x, target) if (x.shape, x.dtype) == (target.shape, target.dtype) and x.dtype.is_floating_point else None


def _squared_error(call: Call) -> Normal:
    pair = _alike(call)
    return None if pair is None else _loss(call, call.apply("square", call.apply("sub", *pair)))


def _bent(call: Call, width: Any, scale: float) -> Normal:
    """d^2 / 2, and width (d - width / 2) from `width` on, of distances d; `scale` times that."""
    pair = _alike(call)
    if pair is None or not width > 0:
        return None
    d = call.apply("abs", call.apply("sub", *pair))
    near = call.apply("mul", call.apply("mul", d, 0.5 * scale), d)
    far = call.apply("mul", call.apply("sub", d, 0.5 * width), width * scale)
    return _loss(call, call.apply("where", call.apply("lt", d, width), near, far))


def _smooth_l1(call: Call) -> Normal:
    return _bent(call, call["beta"], 1 / call["beta"]) if call["beta"] > 0 else None


def _huber(call: Call) -> Normal:
    return _bent(call, call["delta"], 1.0)


def _cross_entropy_of_logits(call: Call) -> Normal:
    """(1 - t) x - (1 + (p - 1) t) log_sigmoid(x), p being the weight of what is true."""
    pair = _alike(call)
    if pair is None:
        return None
    (x, t), p = pair, call.optional("pos_weight")
    likely = call.apply("log_sigmoid", x)
    if p is not None:
        likely = call.apply("mul", call.apply("add", call.apply("mul", call.apply("sub", p, 1), t), 1), likely)
    return _weighed(call, call.apply("sub", call.apply("mul", call.apply("sub", 1, t), x), likely))


def _cross_entropy(call: Call) -> Normal:
    """A function that eager refuses numbers of: what it rounds to 1 in half precision is more than that elsewhere."""
    pair = _alike(call)
    if pair is None or pair[0].dtype not in (torch.float32, torch.float64):
        return None
    return _weighed(call, call.apply("binary_cross_entropy", *pair))


def _weighed(call: Call, each: Node) -> Normal:
    """A loss of every element, weighed and reduced."""
    weight = call.optional("weight")
    each = each if weight is None else call.apply("mul", each, weight)
    return _loss(call, each) if each.shape == call.node("self").shape else None


def _soft_margin(call: Call) -> Normal:
    """ln(1 + e^-xt)."""
    pair = _alike(call)
    if pair is None:
        return None
    x, t = pair
    return _loss(call, call.apply("log1p", call.apply("exp", call.apply("mul", call.apply("neg", x), t))))


def _of_classes(call: Call) -> Normal:
    """-weight[t] log_p[t], reduced; a mean is over the weights of what is not ignored."""
    return _picked(call, call.node("self"))


def _cross_entropy_of_classes(call: Call) -> Normal:
    """Of classes; likelihoods of all classes are written out as PyTorch does."""
    x = call.node("self")
    if call.node("target").dtype != torch.int64 or x.ndim < 2:
        return None
    shares = call.make(Softmax(1, log=True), x)
    return _picked(call, shares) if call["label_smoothing"] == 0 else _smoothed(call, shares)


def _smoothed(call: Call, shares: Node) -> Normal:
    """(1 - s) -weight[t] log_p[t] - s mean(weight log_p), 0 where t is ignored, reduced: smoothing s of the labels.

    PyTorch reduces both terms by themselves, and divides both means by the same.
    """
    s, ignore, n = call["label_smoothing"], call["ignore_index"], shares.shape[1]
    target, weight = call.node("target"), call.optional("weight")
    if not isinstance(ignore, int) or not isinstance(s, float) or not isinstance(n, int):
        return None
    weighted = shares
    if weight is not None:
        weighted = call.apply("mul", shares, reshape(weight, (n, *(1,) * (shares.ndim - 2))))
    own, others = call.make(Nll(ignore), shares, target, weight), call.make(Reduce("mean", (1,)), weighted)
    each = call.apply("sub", call.apply("mul", own, 1 - s), call.apply("mul", others, s))
    each = counted(each, target, ignore)
    reduction: Reduction = _REDUCTIONS.get(call["reduction"], "none")  # type: ignore[assignment]
    return cast(reduced(each, class_weights(weight, target, ignore, shares.dtype), reduction), shares.dtype)


def _picked(call: Call, x: Node) -> Normal:
    ignore, reduction = call["ignore_index"], _REDUCTIONS.get(call["reduction"], "none")
    if not isinstance(ignore, int):
        return None
    return call.make(Nll(ignore, reduction), x, call.node("target"), call.optional("weight"))  # type: ignore[arg-type]


def _euclidean(call: Call) -> Normal:
    """sqrt(relu(|y|^2 - 2 x y^T + |x|^2)) of x (*, P, K) and y (*, R, K): distances (*, P, R).

    PyTorch has `torch.cdist` so where it does not subtract every pair, and appends both norms to what it multiplies.
    Where a distance is 0, so is its gradient: what would come back from the root is infinite, and `relu` stops it.
    Half precision stays a call, since it would round the product ahead of the sum.
    """
    x, y = (_unrepeated(call.node(name)) for name in ("x1", "x2"))
    if x.dtype not in (torch.float32, torch.float64) or broadcast(x.shape[:-2], y.shape[:-2]) != call.shape[:-2]:
        return None
    rows, columns = (call.make(Reduce("sum", (n.ndim - 1,), keepdim=True), call.apply("square", n)) for n in (x, y))
    columns = reshape(columns, (*columns.shape[:-2], 1, columns.shape[-2]))
    product = call.make(Matmul(transpose_w=True), x, y, None)
    squared = call.apply("add", call.apply("sub", columns, call.apply("mul", product, 2)), rows)
    return call.apply("sqrt", call.apply("relu", squared))


def _unrepeated(x: Node) -> Node:
    """The matrix that a batch of the same one has, in a copy or not."""
    while isinstance(x.op, Expand) or (isinstance(x.op, Permute) and x.op.copy and x.op.dims == tuple(range(x.ndim))):
        if x.arg(0).shape[-2:] != x.shape[-2:]:
            break
        x = x.arg(0)
    return x


def _scaled(call: Call, fn: str) -> Normal:
    """self + value * (tensor1 `fn` tensor2)."""
    x, a, b, value = call.node("self"), call.node("tensor1"), call.node("tensor2"), call["value"]
    a = a if value == 1 else call.apply("mul", a, value)
    return call.apply("add", x, call.apply(fn, a, b))


def _product_added(call: Call) -> Normal:
    return _scaled(call, "mul")


def _quotient_added(call: Call) -> Normal:
    return _scaled(call, "div")


def _clamped(call: Call, name: str) -> Normal:
    """By a tensor of one value: by that."""
    bound = call.node(name)
    if not isinstance(bound.op, Full) or bound.ndim or bound.dtype != call.node("self").dtype:
        return None
    return call.apply(f"clamp_{name}", call.node("self"), params=(bound.op.value,))


def _leaky(call: Call) -> Normal:
    """x, and weight * x where it is not positive."""
    x = call.node("self")
    return call.apply("where", call.apply("gt", x, 0), x, call.apply("mul", call.node("weight"), x))


def _triangle(call: Call, fn: str) -> Normal:
    """Zeros but where column - row is `fn` the diagonal, of rows and columns that are as many in every call."""
    x, diagonal = call.node("self"), call["diagonal"]
    known = x.ndim >= 2 and all(isinstance(n, int) for n in (*x.shape[-2:], diagonal))
    if not known or not x.dtype.is_floating_point:
        return None
    return call.apply("where", _compared(call, x.shape[-2:], x.device, fn, diagonal), x, 0)


def _compared(call: Call, shape: Sequence[Size], device: torch.device, fn: str, diagonal: int) -> Node:
    """Of a matrix of this shape, whether column - row is `fn` (a comparison) the diagonal."""
    rows, columns = (call.make(Positions(n, 0, 1, None, torch.int64, device)) for n in shape)
    return call.apply(fn, call.apply("sub", columns, reshape(rows, (shape[0], 1))), diagonal)


def _diagonal(call: Call) -> Normal:
    """The matrix that has x on its diagonal, and zeros."""
    x = call.node("self")
    if x.ndim != 1 or not isinstance(x.shape[0], int) or call["diagonal"] != 0 or not x.dtype.is_floating_point:
        return None
    return call.apply("where", _compared(call, call.shape, x.device, "eq", 0), x, 0)


def _blocks(call: Call) -> Normal:
    """(a, b), (c, d) -> (a c, b d): every element of the first times all of the second."""
    x, y = call.node("self"), call.node("other")
    if x.ndim != y.ndim or x.ndim == 0 or x.dtype != y.dtype:
        return None
    outer = reshape(x, [n for length in x.shape for n in (length, 1)])
    inner = reshape(y, [n for length in y.shape for n in (1, length)])
    return reshape(call.apply("mul", outer, inner), call.shape)


def _repeated(call: Call, name: str = "repeats") -> Normal:
    """(a, b) -> (n a, m b), all of x n times along the first dimension, m times along the second."""
    x, times = call.node("self"), call[name]
    times = (*(1,) * (x.ndim - len(times)), *times)
    if not all(isinstance(n, int) and n > 0 for n in times) or all(n == 1 for n in times) or call.escapes:
        return None  # of what has one index it would be a view
    shape = (*(1,) * (len(times) - x.ndim), *x.shape)
    apart = reshape(x, [length for n in shape for length in (1, n)])
    wide = make(Expand(tuple(length for pair in zip(times, shape, strict=True) for length in pair)), apart)
    return reshape(wide, call.shape)


def _each_repeated(call: Call) -> Normal:
    """Every index along a dimension so many times."""
    x, times, dim = call.node("self"), call["repeats"], call["dim"]
    if dim is None or not isinstance(times, int) or times < 2 or x.ndim == 0 or call.escapes:
        return None
    behind = dim % x.ndim + 1
    apart = reshape(x, (*x.shape[:behind], 1, *x.shape[behind:]))
    return reshape(make(Expand((*x.shape[:behind], times, *x.shape[behind:])), apart), call.shape)


TABLE: dict[str, Handler] = {
    "aten._prelu_kernel.default": _leaky,
    "aten.triu.default": partial(_triangle, fn="ge"),
    "aten.tril.default": partial(_triangle, fn="le"),
    "aten.diag.default": _diagonal,
    "aten.kron.default": _blocks,
    "aten.repeat.default": _repeated,
    "aten.tile.default": partial(_repeated, name="dims"),
    "aten.repeat_interleave.self_int": _each_repeated,
    "aten.cross.default": _crossed,
    "aten.linalg_cross.default": _crossed,
    "aten.glu.default": _glu,
    "aten.pixel_shuffle.default": _shuffled,
    "aten.pixel_unshuffle.default": _unshuffled,
    "aten.channel_shuffle.default": _exchanged,
    "aten.mse_loss.default": _squared_error,
    "aten.smooth_l1_loss.default": _smooth_l1,
    "aten.huber_loss.default": _huber,
    "aten.binary_cross_entropy.default": _cross_entropy,
    "aten.binary_cross_entropy_with_logits.default": _cross_entropy_of_logits,
    "aten.soft_margin_loss.default": _soft_margin,
    "aten.cross_entropy_loss.default": _cross_entropy_of_classes,
    "aten.nll_loss_nd.default": _of_classes,
    "aten.nll_loss.default": _of_classes,
    "aten.nll_loss2d.default": _of_classes,
    "aten._euclidean_dist.default": _euclidean,
    "aten.addcmul.default": _product_added,
    "aten.addcdiv.default": _quotient_added,
    "aten.clamp_min.Tensor": lambda call: _clamped(call, "min"),
    "aten.clamp_max.Tensor": lambda call: _clamped(call, "max"),
}
