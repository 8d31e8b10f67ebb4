"""Norms: what they are where their statistics are known, and what is one by another name.

Batch norm with running statistics is a scale and a shift per channel, which what comes before it may take in.

    batchnorm(x) = x * s + t,    s = weight / sqrt(var + eps),    t = bias - mean * s

s and t depend on parameters and buffers alone, and are carried in float32 at least, as in eager.  Instance norm with
running statistics is the same.  Statistics of the input are left alone: they are different ones in every call.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from fusewright.ir.build import cast, pointwise, reshape
from fusewright.ir.node import Node, make, topological
from fusewright.ir.ops import (
    Buffer,
    Cast,
    Constant,
    Conv,
    Embedding,
    Expand,
    Full,
    Matmul,
    Norm,
    Number,
    Pointwise,
    Reduce,
    Reshape,
    Slice,
    Source,
    Vector,
)
from fusewright.rules.operands import function, is_shifted, number, place, unwidened
from fusewright.rules.rule import Match, Rule, op, rule, value


def _has_running_statistics(node: Node) -> bool:
    return isinstance(node.op, Norm) and node.op.running


def scale_and_shift(norm: Node) -> tuple[Node, Node]:
    """s and t, (C,) each, in float32 or float64."""
    assert isinstance(norm.op, Norm) and norm.op.eps is not None
    dtype = norm.dtype if norm.dtype == torch.float64 else torch.float32
    weight, bias, mean, var = (None if a is None else cast(a, dtype) for a in norm.args[1:5])
    assert mean is not None and var is not None
    deviation = pointwise("sqrt", pointwise("add", var, norm.op.eps))
    scale = pointwise("div", 1.0 if weight is None else weight, deviation)
    product = pointwise("mul", mean, scale)
    return scale, pointwise("neg", product) if bias is None else pointwise("sub", bias, product)


def _along_channels(v: Node, x: Node) -> Node:
    """v (C,) shaped to be broadcast against x (N, C, *)."""
    return reshape(v, (*v.shape, *(1,) * (x.ndim - 2)))


def _refuse_computed(m: Match) -> str | None:
    statistics = m["norm"].args[3:5]
    held = all(a is not None and isinstance(a.op, Buffer | Constant | Full | Vector) for a in statistics)
    return None if held else "the statistics are computed"  # eager has no gradient for them


def _folded(bias: Node | None, scale: Node, shift: Node, dtype: torch.dtype) -> Node:
    """What a bias (O,) becomes under the norm."""
    return cast(
        shift if bias is None else pointwise("add", pointwise("mul", cast(bias, scale.dtype), scale), shift), dtype
    )


@rule(
    "batchnorm(conv(x, w)) = conv(x, w*s) + t",
    pattern=op("norm", Norm, of=(op("conv", Conv, of=(value("x"), value("w"))),), where=_has_running_statistics),
    condition=_refuse_computed,
    exactness="reassociates",
)
def norm_into_conv(m: Match) -> Node:
    """batchnorm(conv(x, w) + b) -> conv(x, w*s) + (b*s + t), s and t per output channel.

    x (N, C, *), w (O, C/g, *K), transposed w (C, O/g, *K); any convolution.  Class reassociates.
    """
    conv, w = m["conv"], m["w"]
    assert isinstance(conv.op, Conv)
    scale, shift = scale_and_shift(m["norm"])
    if conv.op.transposed:  # the output channels of a group come behind its input channels
        groups, kernel = conv.op.groups, w.shape[2:]
        parts = reshape(cast(w, scale.dtype), (groups, w.shape[0] // groups, *w.shape[1:]))
        rows = reshape(scale, (groups, 1, w.shape[1], *(1,) * len(kernel)))
        scaled = reshape(pointwise("mul", parts, rows), w.shape)
    else:
        scaled = pointwise("mul", cast(w, scale.dtype), reshape(scale, (*scale.shape, *(1,) * (w.ndim - 1))))
    return make(conv.op, m["x"], cast(scaled, w.dtype), _folded(conv.args[2], scale, shift, w.dtype))


def _refuse_rows(m: Match) -> str | None:
    if m["norm"].ndim != 2:
        return "the features are not the channels"
    return _refuse_computed(m)


@rule(
    "batchnorm(x @ w) = x @ (w*s) + t",
    pattern=op("norm", Norm, of=(op("matmul", Matmul, of=(value("x"), value("w"))),), where=_has_running_statistics),
    condition=_refuse_rows,
    exactness="reassociates",
)
def norm_into_matmul(m: Match) -> Node:
    """batchnorm(x @ w + b) -> x @ (w*s) + (b*s + t), s and t per feature.

    x (N, K), w (K, O), or (O, K) where it is transposed.  Class reassociates.
    """
    matmul, w = m["matmul"], m["w"]
    assert isinstance(matmul.op, Matmul)
    scale, shift = scale_and_shift(m["norm"])
    rows = reshape(scale, (*scale.shape, 1)) if matmul.op.transpose_w else scale
    scaled = pointwise("mul", cast(w, scale.dtype), rows)
    return make(matmul.op, m["x"], cast(scaled, w.dtype), _folded(matmul.args[2], scale, shift, w.dtype))


@rule(
    "batchnorm(x) = x*s + t",
    pattern=op("norm", Norm, of=(value("x"),), where=_has_running_statistics),
    condition=_refuse_computed,
    exactness="reassociates",
    enables=True,
)
def norm_as_scale_and_shift(m: Match) -> Node:
    """batchnorm(x) -> x*s + t, so that kernels take it in; rounded once, as the norm is.

    x (N, C, *).  Class reassociates.
    """
    norm, x = m["norm"], m["x"]
    scale, shift = scale_and_shift(norm)
    scaled = pointwise("mul", cast(x, scale.dtype), _along_channels(scale, x))
    return cast(pointwise("add", scaled, _along_channels(shift, x)), norm.dtype)


def _spelled_out(root: Node) -> tuple[Norm, Node] | None:
    """The norm over trailing dimensions that `root` is, and its input."""
    if function(root) not in ("mul", "div") or not root.dtype.is_floating_point:
        return None
    for y, divisor in (root.args, root.args[::-1]) if function(root) == "mul" else (root.args,):
        assert y is not None and divisor is not None
        if (function(root), function(divisor)) not in (("mul", "rsqrt"), ("div", "sqrt")):
            continue
        shifted = divisor.arg(0)
        eps = number(shifted.arg(place(shifted))) if function(shifted) == "add" and is_shifted(shifted) else None
        if eps is None or not math.isfinite(eps):
            continue
        spread = shifted.arg(1 - place(shifted))
        found = _normalised(y, spread)
        dims = _reduced(spread, "mean", "var")
        if found is not None and dims == tuple(range(root.ndim - len(dims), root.ndim)):
            kind, x = found
            return Norm(kind, eps, trailing=len(dims)), cast(x, root.dtype)
    return None


def _normalised(y: Node, spread: Node) -> tuple[Literal["rms", "layer"], Node] | None:
    """What y is divided by the root of `spread` for: a mean of squares, or a variance; and of which value."""
    x, center = (y.arg(0), y.arg(1)) if function(y) == "sub" else (y, y)
    centered = _reduced(center, "mean") == _reduced(spread, "mean", "var") != () and center.arg(0) is x
    if _reduced(spread, "var"):
        assert isinstance(spread.op, Reduce)
        return ("layer", x) if centered and spread.arg(0) is x and spread.op.correction == 0 else None
    squared = _square_root(spread.arg(0)) if _reduced(spread, "mean") else None
    if squared is None or not squared.dtype.is_floating_point or unwidened(squared) is not unwidened(y):
        return None
    return ("layer", x) if centered else ("rms", squared)


def _reduced(node: Node, *kinds: str) -> tuple[int, ...]:
    """The dimensions that `node` reduces and keeps, in one of these ways."""
    op = node.op
    return op.dims if isinstance(op, Reduce) and op.kind in kinds and op.keepdim else ()


def _square_root(node: Node) -> Node | None:
    """What `node` is the square of."""
    match function(node):
        case "square":
            return node.arg(0)
        case "pow" if isinstance(node.op, Pointwise) and node.op.params == (2,):
            return node.arg(0)
        case "mul" if node.arg(0) is node.arg(1):
            return node.arg(0)
    return None


def _norm_of(m: Match) -> tuple[Norm, Node]:
    found = _spelled_out(m["root"])
    assert found is not None  # the pattern asks for it
    return found


def _refuse_type(m: Match) -> str | None:
    norm, x = _norm_of(m)
    if not _lies_in_rows(x):
        return "it may not lie row by row"  # as a norm does, and what spells one out need not
    fixed = all(isinstance(n, int) for n in x.shape[x.ndim - norm.trailing :])
    return None if fixed else "the length of a row depends on the batch"


def _lies_in_rows(x: Node) -> bool:
    """Whether what is computed from inputs in rows lies so as well."""
    found = topological([x])
    through = {x}
    for node in reversed(found):
        if node not in through:
            continue
        if isinstance(node.op, Pointwise | Cast | Reshape | Slice | Expand):
            through.update(node.inputs)
        elif not isinstance(node.op, Source | Full | Number | Vector | Matmul | Embedding | Reduce | Norm):
            return False
    return True


@rule(
    "x / sqrt(mean(x^2) + eps) = rmsnorm(x)",
    pattern=op("root", Pointwise, where=lambda node: _spelled_out(node) is not None),
    condition=_refuse_type,
    exactness="reassociates",
)
def spelled_out(m: Match) -> Node:
    """x * rsqrt(mean(x^2) + eps) -> rmsnorm(x), (x - mean(x)) / sqrt(var(x) + eps) -> layernorm(x).

    x (*, D...) in rows, statistics over the trailing dimensions, kept.  x may be of a narrower type than its squares
    are, as in the norms of language models; the variance may be a mean of squares.  Class reassociates.
    """
    norm, x = _norm_of(m)
    return make(norm, x, None, None, None, None)


RULES: tuple[Rule, ...] = (norm_into_conv, norm_into_matmul, norm_as_scale_and_shift, spelled_out)
