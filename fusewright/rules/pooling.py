"""Functions, scales and constants past max and min, and windows past windows.

A max over values of which several are equal returns one of them by position.  So neither which of two zeros of
different sign it returns nor which of several tied places gets the gradient is a property of the values: ``exact`` here
means the same bits but for the sign of such a zero, and the same gradients but for such ties (rounding makes some).

Below, max stands for max pooling and amax, and for min, too; x is (N, C, *) or anything, windows run over trailing or
reduced dimensions.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, isfinite, isnan, prod
from typing import Literal

from fusewright.ir.build import pointwise, reshape
from fusewright.ir.intervals import interval, within
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Number, Op, Pointwise, Pool, Reduce
from fusewright.rules.linear import refuse_linear
from fusewright.rules.operands import (
    FLOATING,
    beside,
    floating,
    function,
    is_scaled,
    number,
    place,
    spans,
    usable,
    varying,
)
from fusewright.rules.rule import Exactness, Match, Rule, op, rule, value

_OTHER: dict[str, Literal["max", "min"]] = {"max": "min", "min": "max"}


def is_extreme(node: Node) -> bool:
    """Whether `node` is a max or a min, of windows or of whole dimensions."""
    return getattr(node.op, "kind", "") in _OTHER


def _is_unary(node: Node) -> bool:
    return isinstance(node.op, Pointwise) and node.op.traits.arity == 1


def _is_sum(node: Node) -> bool:
    return function(node) in ("add", "sub")


def _extreme(window: Node, x: Node, *, flip: bool) -> Node:
    """The window over x; with `flip`, min in place of max and the reverse."""
    op = window.op
    assert isinstance(op, Pool | Reduce)
    return make(replace(op, kind=_OTHER[op.kind]) if flip else op, x)


def padded_away(window: Node) -> bool:
    """Whether a window may lie in the padding alone, where a max is -inf."""
    op = window.op
    if not isinstance(op, Pool) or not any(op.padding):
        return False
    lengths = window.arg(0).shape[-len(op.kernel) :]
    return any(_misses(op, i, length, window.shape[i - len(op.kernel)]) for i, length in enumerate(lengths))


def _misses(op: Pool, i: int, length: object, slots: object) -> bool:
    if not isinstance(length, int) or not isinstance(slots, int):
        return bool(op.padding[i])
    offsets = [op.dilation[i] * j - op.padding[i] for j in range(op.kernel[i])]
    return any(not any(0 <= op.stride[i] * p + o < length for o in offsets) for p in range(slots))


def _refuse_function(m: Match) -> str | None:
    f, x = m["f"], m["f"].arg(0)
    assert isinstance(f.op, Pointwise)
    traits, bounds = f.op.traits, interval(x)
    if not floating(f, x):
        return FLOATING
    if traits.monotone is None:
        return f"{f.op.fn} is not monotone"
    if not within(bounds, traits.domain):
        return f"{f.op.fn} is not monotone on all values it may get"
    if not traits.nan_to_nan:
        return f"{f.op.fn} of NaN is not NaN"
    if any(not isfinite(b) and isnan(v) for b, v in zip(bounds, traits.limits or (0.0, 0.0), strict=True)):
        return f"{f.op.fn} of an infinity is NaN"
    return "a window lies in the padding alone" if padded_away(m["window"]) else None


def _class_of_function(m: Match) -> Exactness:
    assert isinstance(m["f"].op, Pointwise)
    return "exact" if m["f"].op.traits.float_monotone else "reassociates"


@rule(
    "max(f(x)) = f(max(x))",
    pattern=op("window", Pool, Reduce, of=(op("f", Pointwise, of=(value("x"),), where=_is_unary),), where=is_extreme),
    condition=_refuse_function,
    exactness=_class_of_function,
)
def extreme_of_function(m: Match) -> Node:
    """max(f(x)) -> f(max(x)) for a function that rises, f(min(x)) for one that falls, on the interval of x.

    NaN gives NaN, the infinities x may hold do not, and no window lies in the padding alone.
    Class exact where the float implementation keeps the order bit for bit, else reassociates.
    """
    f = m["f"]
    assert isinstance(f.op, Pointwise)
    return make(f.op, _extreme(m["window"], m["x"], flip=f.op.traits.monotone == "down"))


def _refuse_scale(m: Match) -> str | None:
    scaled = m["scaled"]
    scale = number(scaled.arg(place(scaled)))
    if not floating(scaled, scaled.arg(1 - place(scaled))):
        return FLOATING
    if scale is None:
        return "the scale is not known at plan time"
    return None if usable(scale, scaled.dtype) else "the scale is zero, not finite or not normal"


@rule(
    "max(c*x) = c*max(x)",
    pattern=op("window", Pool, Reduce, of=(op("scaled", Pointwise, where=is_scaled),), where=is_extreme),
    condition=_refuse_scale,
    exactness="exact",
)
def extreme_of_scale(m: Match) -> Node:
    """max(c*x) -> c*max(x), and max(x/c) -> max(x)/c; c*min(x) for a negative c.

    The scale c is a Python number, finite, nonzero and normal.  Class exact: rounding keeps the order.
    """
    scaled = m["scaled"]
    at = place(scaled)
    scale = number(scaled.arg(at))
    assert scale is not None
    moved = _extreme(m["window"], scaled.arg(1 - at), flip=scale < 0)
    return make(scaled.op, *(scaled.arg(at) if i == at else moved for i in (0, 1)))


def _constant(inner: Node, window: Node) -> int | None:
    """Which operand of `inner` is uniform over each window while the other spans it; the second when both do."""
    fits = (i for i in (1, 0) if not varying(inner.arg(i), window) and spans(inner.arg(1 - i), window))
    return next(fits, None)


def _refuse_shift(m: Match) -> str | None:
    shifted, at = m["shifted"], _constant(m["shifted"], m["window"])
    if at is None:
        return "the added value varies within a window"
    constant = shifted.arg(at)
    if not floating(shifted, shifted.arg(1 - at)):
        return FLOATING
    plain = isinstance(constant.op, Number)
    return "the added number is not finite" if plain and not isfinite(number(constant) or 0.0) else None


def _class_of_shift(m: Match) -> Exactness:
    # the values of a tensor are not known: -inf + inf is NaN under the max, and may be gone before it
    at = _constant(m["shifted"], m["window"])
    return "exact" if at is not None and isinstance(m["shifted"].arg(at).op, Number) else "reassociates"


@rule(
    "max(x + b) = max(x) + b",
    pattern=op("window", Pool, Reduce, of=(op("shifted", Pointwise, where=_is_sum),), where=is_extreme),
    condition=_refuse_shift,
    exactness=_class_of_shift,
)
def extreme_of_shift(m: Match) -> Node:
    """max(x + b) -> max(x) + b, max(x - b) -> max(x) - b, max(b - x) -> b - min(x).

    b is a finite Python number or a tensor uniform over each window, as a bias (C, 1, 1) is under spatial windows.
    Class exact for a number; reassociates for a tensor, whose infinities may meet others of x.
    """
    shifted, window = m["shifted"], m["window"]
    at = _constant(shifted, window)
    assert at is not None
    moved = _extreme(window, shifted.arg(1 - at), flip=at == 0 and function(shifted) == "sub")
    constant = beside(shifted.arg(at), window)
    return make(shifted.op, *(constant if i == at else moved for i in (0, 1)))


# Windows of windows


def _same_pools(m: Match, kinds: tuple[str, ...]) -> tuple[Pool, Pool] | None:
    outer, inner = m["outer"].op, m["inner"].op
    assert isinstance(outer, Pool) and isinstance(inner, Pool)
    alike = outer.kind == inner.kind and outer.kind in kinds and len(outer.kernel) == len(inner.kernel)
    return (outer, inner) if alike else None


def _refuse_plain_floor(outer: Pool, inner: Pool) -> str | None:
    if any(outer.padding):
        return "the outer pooling is padded"
    return "a pooling rounds its length up" if outer.ceil_mode or inner.ceil_mode else None


def _refuse_max_of_max(m: Match) -> str | None:
    pools = _same_pools(m, ("max", "min"))
    if pools is None:
        return "the two pool differently"
    outer, inner = pools
    for s, d, e, k in zip(inner.stride, outer.dilation, inner.dilation, inner.kernel, strict=True):
        if (s * d) % e or s * d // e > k:
            return "the inner windows leave gaps"
    return _refuse_plain_floor(outer, inner)


@rule(
    "maxpool(maxpool(x)) = maxpool(x)",
    pattern=op("outer", Pool, of=(op("inner", Pool, of=(value("x"),)),), where=is_extreme),
    condition=_refuse_max_of_max,
    exactness="exact",
)
def max_pool_of_max_pool(m: Match) -> Node:
    """maxpool_{k2,t2,d2}(maxpool_{k1,t1,d1}(x)) -> maxpool_{k,t1*t2,d1}(x), k = k1 + (k2-1)*g where t1*d2 = g*d1.

    x (N, C, *); g a whole number of at most k1, per dimension; the outer pooling unpadded, both of plain length.
    Class exact.
    """
    outer, inner = m["outer"].op, m["inner"].op
    assert isinstance(outer, Pool) and isinstance(inner, Pool)
    step = [t * d // e for t, d, e in zip(inner.stride, outer.dilation, inner.dilation, strict=True)]
    kernel = tuple(k + (j - 1) * g for k, j, g in zip(inner.kernel, outer.kernel, step, strict=True))
    stride = tuple(s * t for s, t in zip(inner.stride, outer.stride, strict=True))
    return make(replace(inner, kernel=kernel, stride=stride), m["x"])


def _refuse_avg_of_avg(m: Match) -> str | None:
    pools = _same_pools(m, ("avg",))
    if pools is None:
        return "the two pool differently"
    outer, inner = pools
    if any(s != k and j != 1 for s, k, j in zip(inner.stride, inner.kernel, outer.kernel, strict=True)):
        return "the inner windows overlap or leave gaps"
    if any(inner.padding) and not inner.count_include_pad and inner.divisor is None:
        return "the inner pooling counts its padding out"
    return _refuse_plain_floor(outer, inner)


@rule(
    "avgpool(avgpool(x)) = avgpool(x)",
    pattern=op("outer", Pool, of=(op("inner", Pool, of=(value("x"),)),), where=lambda node: not is_extreme(node)),
    condition=_refuse_avg_of_avg,
    exactness="reassociates",
)
def avg_pool_of_avg_pool(m: Match) -> Node:
    """avgpool_{k2,t2}(avgpool_{k1,t1}(x)) -> avgpool_{k1*k2,t1*t2}(x); the divisors multiply.

    x (N, C, *); t1 = k1 or k2 = 1, per dimension; the outer pooling unpadded, the inner one unpadded or counting its
    padding, both of plain length.  Class reassociates.
    """
    outer, inner = m["outer"].op, m["inner"].op
    assert isinstance(outer, Pool) and isinstance(inner, Pool)
    kernel = tuple(k * j for k, j in zip(inner.kernel, outer.kernel, strict=True))
    stride = tuple(s * t for s, t in zip(inner.stride, outer.stride, strict=True))
    divisor = (inner.divisor or prod(inner.kernel)) * (outer.divisor or prod(outer.kernel))
    plain = divisor == prod(kernel)
    return make(replace(inner, kernel=kernel, stride=stride, divisor=None if plain else divisor), m["x"])


def _covering(pool: Pool, i: int, length: object, slots: object) -> tuple[int, int, int]:
    """Kernel, stride, padding along dimension `i` of the smallest windows that cover just what those of `pool` do."""
    kernel, stride, padding = same = pool.kernel[i], pool.stride[i], pool.padding[i]
    if stride > kernel or (pool.dilation[i] > 1 and kernel > 1):  # they leave gaps
        return same
    if stride == 1:
        return 1, 1, 0
    if not isinstance(length, int) or not isinstance(slots, int):
        return same
    stop, part = stride * (slots - 1) + kernel - padding, gcd(kernel, stride)
    if stop >= length:
        return 1, 1, 0
    return (part, part, 0) if padding == 0 and not pool.ceil_mode and length - stop < part else same


def _covered(m: Match) -> Pool:
    """The pooling under a reduction whose windows are as small as they may be along the reduced dimensions."""
    (x, pool), outer = (m["x"], m["inner"].op), m["outer"].op
    assert isinstance(pool, Pool) and isinstance(outer, Reduce)
    found = list(zip(pool.kernel, pool.stride, pool.padding, strict=True))
    for i, d in enumerate(range(x.ndim - len(found), x.ndim)):
        if d in outer.dims:
            found[i] = _covering(pool, i, x.shape[d], m["inner"].shape[d])
    kernel, stride, padding = zip(*found, strict=True)
    return replace(pool, kernel=kernel, stride=stride, padding=padding)


def _refuse_cover(m: Match) -> str | None:
    outer, inner = m["outer"].op, m["inner"].op
    if getattr(outer, "kind", "") != getattr(inner, "kind", ""):
        return "the two reduce differently"
    return "no smaller windows cover the same" if _covered(m) == inner else None


@rule(
    "max_P(maxpool(x)) = max_P(x)",
    pattern=op("outer", Reduce, of=(op("inner", Pool, of=(value("x"),)),), where=is_extreme),
    condition=_refuse_cover,
    exactness="exact",
)
def extreme_of_pool(m: Match) -> Node:
    """max_P(maxpool_{k,t}(x)) -> max_P(x) where windows along reduced dimensions overlap or touch and reach x's end.

    Where they stop short of it, max_P(maxpool_g(x)) with g = gcd(k, t), if windows of g stop there, too.

    x (N, C, *), P any dimensions.  Class exact.
    """
    return make(m["outer"].op, make(_covered(m), m["x"]))


def _unpooled(m: Match) -> tuple[int, ...]:
    """The dimensions that the reduction takes and the pooling does not."""
    pool = m["inner"].op
    assert isinstance(pool, Pool)
    return tuple(d for d in m["outer"].op.dims if d < m["inner"].ndim - len(pool.kernel))  # type: ignore[attr-defined]


def _refuse_unpooled(m: Match) -> str | None:
    outer, inner = m["outer"].op, m["inner"].op
    assert isinstance(outer, Reduce) and isinstance(inner, Pool)
    if outer.kind != getattr(inner, "kind", ""):
        return "the two reduce differently"
    if not _unpooled(m):
        return "all reduced dimensions are pooled"
    return None if inner.overlaps else "the windows lie apart"


@rule(
    "max_c(maxpool(x)[c]) = maxpool(max_c(x[c]))",
    pattern=op("outer", Reduce, of=(op("inner", Pool, of=(value("x"),)),), where=is_extreme),
    condition=_refuse_unpooled,
    exactness="exact",
)
def channels_before_extreme(m: Match) -> Node:
    """max over channels, and perhaps more, of a max pooling -> the channels are reduced first.

    x (N, C, *), pooled over trailing dimensions, in one channel in place of C.  Windows that lie apart are pooled where
    x is computed, which leaves less to reduce.  Class exact.
    """
    outer, inner = m["outer"].op, m["inner"].op
    assert isinstance(outer, Reduce)
    taken = _unpooled(m)
    pooled = make(inner, make(replace(outer, dims=taken, keepdim=True), m["x"]))
    rest = tuple(d for d in outer.dims if d not in taken)
    return reshape(make(replace(outer, dims=rest, keepdim=True), pooled) if rest else pooled, m["outer"].shape)


_MERGED = ("sum", "mean", "max", "min", "prod", "logsumexp")


def _refuse_reductions(m: Match) -> str | None:
    outer, inner = m["outer"].op, m["inner"].op
    assert isinstance(outer, Reduce) and isinstance(inner, Reduce)
    if outer.kind != inner.kind or outer.kind not in _MERGED:
        return "the two reduce differently"
    if outer.dtype is not None and outer.dtype != m["inner"].dtype:
        return "the two sum in different dtypes"
    return "the gradient goes to the first of several" if outer.first or inner.first else None


def _class_of_reductions(m: Match) -> Exactness:
    return "exact" if is_extreme(m["outer"]) else "reassociates"


@rule(
    "sum(sum(x)) = sum(x)",
    pattern=op("outer", Reduce, of=(op("inner", Reduce, of=(value("x"),)),)),
    condition=_refuse_reductions,
    exactness=_class_of_reductions,
)
def reduction_of_reduction(m: Match) -> Node:
    """sum_E(sum_D(x)) -> sum over both; likewise mean, max, min, prod and logsumexp.

    x of any shape; the same kind and dtype.  Class exact for max and min, whose ties then share one gradient evenly;
    else reassociates.
    """
    return _of_both(m, m["inner"].op)


def _of_both(m: Match, op: Op) -> Node:
    """`op`, a reduction, over what two of them reduce one after the other."""
    outer, inner, x = m["outer"], m["inner"].op, m["x"]
    assert isinstance(outer.op, Reduce) and isinstance(inner, Reduce) and isinstance(op, Reduce)
    left = [d for d in range(x.ndim) if inner.keepdim or d not in inner.dims]
    dims = tuple(sorted({*inner.dims, *(left[d] for d in outer.op.dims)}))
    return reshape(make(replace(op, dims=dims, keepdim=inner.keepdim), x), outer.shape)


_NARROW = ("torch.float16", "torch.bfloat16")


def _refuse_sum_and_mean(m: Match) -> str | None:
    outer, inner = m["outer"], m["inner"]
    assert isinstance(outer.op, Reduce) and isinstance(inner.op, Reduce)
    if {outer.op.kind, inner.op.kind} != {"sum", "mean"}:
        return "they are no sum and a mean"
    if inner.op.kind == "mean" and str(inner.dtype) in _NARROW:
        return "a sum of everything is rounded to few digits, and may be too large"
    return refuse_linear(inner, inner.op.dims) or (None if outer.dtype == inner.dtype else "they sum in two dtypes")


@rule(
    "mean(sum(x)) = n*mean(x)",
    pattern=op("outer", Reduce, of=(op("inner", Reduce, of=(value("x"),)),)),
    condition=_refuse_sum_and_mean,
    exactness="reassociates",
)
def sum_and_mean(m: Match) -> Node:
    """mean_E(sum_D(x)) -> n*mean(x), sum_E(mean_D(x)) -> sum(x)/n, over all of D and E, D having n elements.

    x of any shape, n known; a mean that is summed has at least 32 bits.  Class reassociates.
    """
    outer, inner = m["outer"].op, m["inner"].op
    assert isinstance(inner, Reduce)
    n = prod(d for i in inner.dims if isinstance(d := m["x"].shape[i], int))
    both = _of_both(m, outer)
    return pointwise("mul" if inner.kind == "sum" else "div", both, n)


RULES: tuple[Rule, ...] = (
    extreme_of_function,
    extreme_of_scale,
    extreme_of_shift,
    max_pool_of_max_pool,
    avg_pool_of_avg_pool,
    extreme_of_pool,
    channels_before_extreme,
    reduction_of_reduction,
    sum_and_mean,
)
