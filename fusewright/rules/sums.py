"""Scales, constants and 1x1 convolutions past sums, means, average pools and range sums.

Below, sum stands for all of these; x is (N, C, *) or anything, they run over trailing or reduced dimensions.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.build import pointwise, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Conv, Full, Number, Pointwise, Reduce
from fusewright.rules.linear import LINEAR, is_linear, reduced_dims, refuse_linear, slots_along, weighted
from fusewright.rules.operands import FLOATING, beside, floating, function, is_negated, number, spans, usable, varying
from fusewright.rules.rule import Match, Rule, op, rule, value


def _is_product(node: Node) -> bool:
    return function(node) in ("mul", "div")


def _is_sum(node: Node) -> bool:
    return function(node) in ("add", "sub")


def _scale(inner: Node, window: Node) -> int | None:
    """Which operand of a product is uniform over each window while the other spans it."""
    places = (1,) if function(inner) == "div" else (1, 0)
    fits = (i for i in places if not varying(inner.arg(i), window) and spans(inner.arg(1 - i), window))
    return next(fits, None)


def _refuse_scale(m: Match) -> str | None:
    scaled, at = m["scaled"], _scale(m["scaled"], m["sum"])
    if at is None:
        return "the scale varies within a window"
    if not floating(scaled, scaled.arg(1 - at)):
        return FLOATING
    scale = number(scaled.arg(at))
    bad = scale is not None and not usable(scale, scaled.dtype)
    return "the scale is zero, not finite or not normal" if bad else None


@rule(
    "sum(c*x) = c*sum(x)",
    pattern=op("sum", *LINEAR, of=(op("scaled", Pointwise, where=_is_product),), where=is_linear),
    condition=_refuse_scale,
    exactness="reassociates",
)
def sum_of_scale(m: Match) -> Node:
    """sum(c*x) -> c*sum(x), sum(x/c) -> sum(x)/c.

    c is a finite nonzero Python number, or a tensor uniform over each window, as (C, 1, 1) is under spatial windows.
    Class reassociates.
    """
    scaled, window = m["scaled"], m["sum"]
    at = _scale(scaled, window)
    assert at is not None
    moved = make(window.op, scaled.arg(1 - at))
    return make(scaled.op, *(beside(scaled.arg(at), window) if i == at else moved for i in (0, 1)))


def _refuse_negated(m: Match) -> str | None:
    return None if floating(m["negated"], m["x"]) else FLOATING


@rule(
    "sum(-x) = -sum(x)",
    pattern=op("sum", *LINEAR, of=(op("negated", Pointwise, of=(value("x"),), where=is_negated),), where=is_linear),
    condition=_refuse_negated,
    exactness="exact",
)
def sum_of_negated(m: Match) -> Node:
    """sum(-x) -> -sum(x), of any shape.

    Class exact: rounding is the same on both sides of zero.  A sum of zeros may be one of the other sign.
    """
    return make(m["negated"].op, make(m["sum"].op, m["x"]))


def _added(inner: Node, window: Node) -> int | None:
    """Which operand of a sum is broadcast, and varies within a window only where it can be reduced itself."""
    for i in (1, 0):
        b, x = inner.arg(i), inner.arg(1 - i)
        larger = spans(x, window) and b.shape != inner.shape
        if larger and (isinstance(window.op, Reduce) or not varying(b, window)):
            return i
    return None


def _refuse_constant(m: Match) -> str | None:
    inner, window, at = m["inner"], m["sum"], _added(m["inner"], m["sum"])
    if at is None:
        return "neither operand is the smaller and uniform over each window"
    b = inner.arg(at)
    if not floating(inner, inner.arg(1 - at), *([] if isinstance(b.op, Number) else [b])):
        return FLOATING
    if isinstance(b.op, Number) and number(b) is None:
        return "the added number is not known at plan time"
    return refuse_linear(window, reduced_dims(window))


def _summed(b: Node, window: Node) -> Node:
    """The sum of `b` broadcast against the window's operand, shaped to go with the window's result."""
    dims, missing = varying(b, window), window.arg(0).ndim - b.ndim
    tables = {d: slots_along(window, d) for d in reduced_dims(window) if d not in dims}
    if isinstance(b.op, Number):
        one = make(Full((1,) * window.arg(0).ndim, number(b) or 0.0, window.dtype, window.device))
        times = weighted(one, tables)
        return b if times is one else beside(times, window)
    if dims:
        assert isinstance(window.op, Reduce)
        b = make(replace(window.op, dims=tuple(d - missing for d in dims), keepdim=True), b)
    return beside(weighted(reshape(b, (1,) * missing + b.shape), tables), window)


@rule(
    "sum(x + b) = sum(x) + sum(b)",
    pattern=op("sum", *LINEAR, of=(op("inner", Pointwise, where=_is_sum),), where=is_linear),
    condition=_refuse_constant,
    exactness="reassociates",
)
def sum_of_constant(m: Match) -> Node:
    """sum(x + b) -> sum(x) + n*sum(b), n values sharing one of b; mean(x + b) -> mean(x) + mean(b).

    b is a Python number or a tensor that is broadcast against x; under pooling it is uniform over each window, and
    counts as often as the window has values over its divisor.  Class reassociates.
    """
    inner, window = m["inner"], m["sum"]
    at = _added(inner, window)
    assert at is not None
    moved = make(window.op, inner.arg(1 - at))
    constant = _summed(inner.arg(at), window)
    return make(inner.op, *(constant if i == at else moved for i in (0, 1)))


def _refuse_pointwise_conv(m: Match) -> str | None:
    conv, window = m["conv"], m["sum"]
    assert isinstance(conv.op, Conv)
    if any(k != 1 for k in conv.arg(1).shape[2:]):
        return "the kernel is larger than 1"
    if any(s != 1 for s in conv.op.stride) or any(map(any, conv.op.padding)) or any(conv.op.output_padding):
        return "the convolution is strided or padded"
    if any(d < 2 for d in reduced_dims(window)):
        return "not only positions are summed"
    return refuse_linear(window, reduced_dims(window))


@rule(
    "avg_pool(conv_1x1(x)) = conv_1x1(avg_pool(x))",
    pattern=op("sum", *LINEAR, of=(op("conv", Conv),), where=is_linear),
    condition=_refuse_pointwise_conv,
    exactness="reassociates",
)
def sum_of_pointwise_conv(m: Match) -> Node:
    """avg_pool(conv_1x1(x, w) + b) -> conv_1x1(avg_pool(x), w) + b * avg_pool(1), and so for sums over positions.

    x (N, C, *), w (O, C/groups, 1..), also transposed; stride 1, no padding.  Class reassociates.
    """
    conv, window = m["conv"], m["sum"]
    dims = reduced_dims(window)
    whole = replace(window.op, keepdim=True) if isinstance(window.op, Reduce) else window.op
    x, w, b = make(whole, conv.arg(0)), conv.arg(1), conv.args[2]
    y = make(conv.op, x, w, None)
    if b is not None:
        bias = reshape(b, (1, *b.shape, *(1,) * (conv.ndim - 2)))
        y = pointwise("add", y, weighted(bias, {d: slots_along(window, d) for d in dims}))
    return reshape(y, window.shape)


RULES: tuple[Rule, ...] = (sum_of_scale, sum_of_negated, sum_of_constant, sum_of_pointwise_conv)
