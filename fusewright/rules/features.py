"""Sums over what is not a window: output features and channels, positions of a matmul, the batch.

A matmul is a convolution with no spatial dimension, and its weight is as linear as its input:

    sum_o (x @ W^T)[o] = x @ (sum_o W[o])          sum_t (x[t] @ W^T) = (sum_t x[t]) @ W^T
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir.build import cast, pointwise, range_sum, reshape, wide
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Conv, Matmul, Pool, Reduce, Slot
from fusewright.ir.slots import Slots
from fusewright.rules.linear import (
    LINEAR,
    finish,
    is_linear,
    is_uniform,
    reduced_dims,
    refuse_linear,
    slots_along,
    weighted,
)
from fusewright.rules.rule import Match, op, rule, value

_REDUCED_CONV = op("reduction", *LINEAR, of=(op("conv", Conv),), where=is_linear)
_REDUCED_MATMUL = op("reduction", *LINEAR, of=(op("matmul", Matmul),), where=is_linear)
_MEAN_OR_SUM_OF_CONV = op("reduction", Reduce, of=(op("conv", Conv),), where=is_linear)


def _refuse_other_dims(m: Match) -> str | None:
    """Why the reduction is no sum over channels that can be taken apart, or `None`."""
    root = m["reduction"]
    return refuse_linear(root, (1,)) if 1 in reduced_dims(root) else "the channels are not reduced"


def _refuse_channels(m: Match) -> str | None:
    reason = _refuse_other_dims(m)
    if reason is not None:
        return reason
    return None if _regroup(m) is not None else "a slot of channels reaches over groups"


def _regroup(m: Match) -> list[Slots] | None:
    """The slots in each group's own numbering, when each lies in one group and every group has as many."""
    conv, slots = m["conv"], slots_along(m["reduction"], 1)
    groups, out = conv.op.groups, conv.shape[1]  # type: ignore[attr-defined]
    if len(slots) % groups:
        return None
    per, width = len(slots) // groups, out // groups
    local: list[Slots] = []
    for g in range(groups):
        row = [replace(s, start=s.start - g * width, stop=s.stop - g * width) for s in slots[g * per : (g + 1) * per]]
        if any(s.count and not (s.start >= 0 and s.stop <= width) for s in row):
            return None
        local.append(tuple(s if s.count else Slot(0, 0, 1, s.scale) for s in row))
    uniform = all(row == local[0] for row in local)
    return local if uniform or not conv.op.transposed else None  # type: ignore[attr-defined]


@rule(
    "sum_o(conv(x, w)[o]) = conv(x, sum_o(w[o]))",
    pattern=_REDUCED_CONV,
    condition=_refuse_channels,
    exactness="reassociates",
)
def channels_into_conv_weight(m: Match) -> Node:
    """sum, mean or average pooling over output channels of conv(x, w) + b -> conv(x, w') + b', w' and b' reduced.

    w (O, C/g, *K) -> (Q, C/g, *K); transposed w (C, O/g, *K) -> (C, Q/g, *K).  Holds without groups, or when each slot
    of channels lies in one group and every group has as many.  Class reassociates.
    """
    conv, slots = m["conv"], slots_along(m["reduction"], 1)
    assert isinstance(conv.op, Conv)
    x, w, bias = conv.args
    assert w is not None
    if conv.op.transposed:  # (C, O/g, *K): all groups reduce the same slots, in their own numbering
        rows = _regroup(m)
        reduced = _over(w, 1, rows[0] if rows else slots)
    else:
        reduced = _over(w, 0, slots)
    y = make(conv.op, x, reduced, None if bias is None else _over(bias, 0, slots))
    return finish(m["reduction"], y, (1,))


def _refuse_pooled_channels(m: Match) -> str | None:
    reason, pool = _refuse_other_dims(m), m["pool"].op
    assert isinstance(pool, Pool)
    if reason is not None:
        return reason
    if 1 in reduced_dims(m["pool"]):
        return "the channels are pooled"
    return None if isinstance(m["x"].op, Conv) or pool.overlaps else "the windows lie apart"


@rule(
    "sum_c(avg_pool(x)[c]) = avg_pool(sum_c(x[c]))",
    pattern=op("reduction", Reduce, of=(op("pool", Pool, of=(value("x"),), where=is_linear),), where=is_linear),
    condition=_refuse_pooled_channels,
    exactness="reassociates",
)
def channels_before_pool(m: Match) -> Node:
    """sum or mean over channels, and perhaps more, of an average pooling -> the channels are reduced first.

    x (N, C, *), pooled over trailing dimensions, in one channel in place of C.  The weight of a convolution takes the
    sum in; anything else has its channels reduced where it is computed, unless windows lie apart: those are pooled
    there, too, which leaves less to reduce.  Class reassociates.
    """
    reduction = m["reduction"].op
    assert isinstance(reduction, Reduce)
    channel = make(replace(reduction, dims=(1,), keepdim=True), m["x"])
    return finish(m["reduction"], make(m["pool"].op, channel), (1,))


def _over(w: Node, dim: int, slots: Slots) -> Node:
    """w with `dim` reduced to `slots`, summed wide."""
    dtype = wide(w.dtype)
    return cast(range_sum(cast(w, dtype), {dim: slots}, dtype), w.dtype)


def _refuse_ungroup(m: Match) -> str | None:
    reason, conv = _refuse_other_dims(m), m["conv"]
    if reason is not None:
        return reason
    return "the convolution has no groups" if conv.op.groups == 1 else None  # type: ignore[attr-defined]


@rule(
    "sum_o(grouped_conv(x, w)[o]) = conv(x, cat_g(sum_o(w[g, o])))",
    pattern=_MEAN_OR_SUM_OF_CONV,
    condition=_refuse_ungroup,
    exactness="reassociates",
)
def channels_over_groups(m: Match) -> Node:
    """sum or mean over all output channels of a grouped convolution -> one ungrouped convolution to a single channel.

    w (O, C/g, *K) -> (1, C, *K); transposed w (C, O/g, *K) -> (C, 1, *K).  Class reassociates.
    """
    conv, (slot,) = m["conv"], slots_along(m["reduction"], 1)
    assert isinstance(conv.op, Conv)
    x, w, bias = conv.args
    assert w is not None and isinstance(w.shape[0], int) and isinstance(w.shape[1], int)
    op_, groups = conv.op, conv.op.groups
    if op_.transposed:
        weight = _over(w, 1, (Slot(0, w.shape[1], 1, slot.scale),))
    else:
        rows = w.shape[0] // groups
        grouped = _over(reshape(w, (groups, rows, *w.shape[1:])), 1, (Slot(0, rows, 1, slot.scale),))
        weight = reshape(grouped, (1, groups * w.shape[1], *w.shape[2:]))
    inner = Conv(op_.stride, op_.padding, op_.dilation, 1, op_.transposed, op_.output_padding)
    y = make(inner, x, weight, None if bias is None else _over(bias, 0, (slot,)))
    return finish(m["reduction"], y, (1,))


def _refuse_features(m: Match) -> str | None:
    root, matmul = m["reduction"], m["matmul"]
    if matmul.ndim - 1 not in reduced_dims(root):
        return "the features are not reduced"
    return refuse_linear(root, (matmul.ndim - 1,))


@rule(
    "sum_o(matmul(x, W)[o]) = matmul(x, sum_o(W[o]))",
    pattern=_REDUCED_MATMUL,
    condition=_refuse_features,
    exactness="reassociates",
)
def features_into_weight(m: Match) -> Node:
    """sum, mean or average pooling over output features of x @ W + b -> x @ W' + b', W' and b' reduced over features.

    x (.., M, K), W (.., K, O) or (.., O, K) -> (.., M, Q).  Class reassociates.
    """
    matmul, (x, w, bias) = m["matmul"], m["matmul"].args
    assert isinstance(matmul.op, Matmul) and w is not None
    last = matmul.ndim - 1
    slots = slots_along(m["reduction"], last)
    weight = _over(w, w.ndim - (2 if matmul.op.transpose_w else 1), slots)
    y = make(matmul.op, x, weight, None if bias is None else _over(bias, 0, slots))
    return finish(m["reduction"], y, (last,))


def _rows(m: Match) -> tuple[int, ...]:
    """The reduced dimensions of the matmul's result that its weight does not have."""
    matmul, w = m["matmul"], m["matmul"].arg(1)
    free = [d for d in reduced_dims(m["reduction"]) if d < matmul.ndim - 1]
    batched = [d for d in free if d < matmul.ndim - 2 and not _absent(w, matmul.ndim - d)]
    return tuple(d for d in free if d not in batched)


def _absent(w: Node, from_end: int) -> bool:
    return w.ndim < from_end or w.shape[-from_end] == 1


def _refuse_rows(m: Match) -> str | None:
    dims, x = _rows(m), m["matmul"].arg(0)
    if not dims:
        return "no rows are reduced, or the weight has them too"
    if x.ndim != m["matmul"].ndim:
        return "the weight has more dimensions than the input"
    return refuse_linear(m["reduction"], dims)


@rule(
    "sum_t(matmul(x[t], W)) = matmul(sum_t(x[t]), W)",
    pattern=_REDUCED_MATMUL,
    condition=_refuse_rows,
    exactness="reassociates",
)
def rows_before_matmul(m: Match) -> Node:
    """sum, mean or average pooling over rows (tokens, positions) of x @ W + b -> (reduced x) @ W + |P|*b.

    x (.., T, K) -> (.., Q, K), for every dimension of x that W does not have.  Class reassociates.
    """
    matmul, (x, w, bias), dims = m["matmul"], m["matmul"].args, _rows(m)
    assert isinstance(matmul.op, Matmul) and x is not None and w is not None
    tables = {d: slots_along(m["reduction"], d) for d in dims}
    dtype = wide(x.dtype) if all(len(s) == 1 for s in tables.values()) and len(dims) == matmul.ndim - 1 else x.dtype
    summed = cast(range_sum(x, tables, wide(x.dtype)), dtype)
    inside = None if bias is None or not is_uniform(tables) else weighted(cast(bias, dtype), tables)
    y = make(matmul.op, summed, cast(w, dtype), inside)
    if bias is not None and inside is None:
        shaped = reshape(cast(bias, dtype), (*(1,) * (y.ndim - 1), bias.shape[0]))
        y = pointwise("add", y, weighted(shaped, tables))
    return finish(m["reduction"], cast(y, x.dtype), dims)


def _refuse_batch(m: Match) -> str | None:
    root, conv = m["reduction"], m["conv"]
    if 0 not in reduced_dims(root):
        return "the batch is not reduced"
    if conv.arg(0).shape[0] == 1:
        return "the batch has one entry"
    if str(root.dtype) != str(conv.dtype):
        return "sums in another dtype than its operand's"
    return None


@rule(
    "sum_n(conv(x[n], w)) = conv(sum_n(x[n]), w)",
    pattern=_MEAN_OR_SUM_OF_CONV,
    condition=_refuse_batch,
    exactness="reassociates",
)
def batch_before_conv(m: Match) -> Node:
    """sum or mean over the batch of conv(x, w) + b -> conv(sum or mean of x, w) + N*b or + b.

    x (N, C, *L) -> (1, C, *L); N may be symbolic.  Class reassociates.
    """
    conv, (x, w, bias), root = m["conv"], m["conv"].args, m["reduction"]
    assert isinstance(conv.op, Conv) and isinstance(root.op, Reduce) and x is not None
    reduced = make(Reduce(root.op.kind, (0,), keepdim=True), x)
    y = make(conv.op, reduced, w, None)
    if bias is not None:
        scaled = pointwise("mul", bias, x.shape[0]) if root.op.kind == "sum" else bias
        y = pointwise("add", y, reshape(scaled, (1, bias.shape[0], *(1,) * (conv.ndim - 2))))
    return finish(root, y, (0,))


RULES = (
    channels_into_conv_weight,
    channels_before_pool,
    channels_over_groups,
    features_into_weight,
    rows_before_matmul,
    batch_before_conv,
)
