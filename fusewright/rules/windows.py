"""The main theorem: linear reductions move through linear windows, one dimension at a time.

For y[o,p] = b[o] + sum_{c,u} w[o,c,u] * xpad[c, s*p + d*u] and any set P of positions along one spatial dimension,

    sum_{p in P} y[o,p] = |P|*b[o] + sum_{c,u} w[o,c,u] * R[c,u],     R[c,u] = sum_{p in P} xpad[c, s*p + d*u]

so each tap needs one range sum of x, and the convolution runs once per slot instead of once per position.  Sums that
end in a single slot are carried in float64 through the small contraction that follows (float32 for half precisions).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from fusewright.ir.build import cast, of_part_read, permute, pointwise, range_sum, reshape, total, wide
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Conv, Matmul, Pool, Slot, numel
from fusewright.ir.slots import Slots, make_slot, sliding, tap_slots
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
from fusewright.rules.rule import Match, op, rule

# A table larger than this many times the input would read more than the convolution it replaces.
CROWDED = 4

REDUCED_CONV = op("reduction", *LINEAR, of=(op("conv", Conv),), where=is_linear)


def _spatial(m: Match) -> tuple[int, ...]:
    return tuple(d for d in reduced_dims(m["reduction"]) if d >= 2)


def tables_of(m: Match) -> dict[int, Slots]:
    """Slots over the convolution's output positions, per reduced spatial dimension."""
    return {d: slots_along(m["reduction"], d) for d in _spatial(m)}


def taps_of(m: Match, d: int) -> int:
    """The taps of the convolution along dimension `d`."""
    taps = m["conv"].arg(1).shape[d]
    assert isinstance(taps, int)
    return taps


def refuse_shapes(m: Match) -> str | None:
    """Why no spatial dimension of a convolution is reduced in a way that can be taken apart, or `None`."""
    dims = _spatial(m)
    return refuse_linear(m["reduction"], dims) if dims else "no spatial dimension is reduced"


def _refuse_collapse(m: Match) -> str | None:
    reason = refuse_shapes(m)
    if reason is not None:
        return reason
    for d, slots in tables_of(m).items():
        length = m["conv"].arg(0).shape[d]
        if len(slots) * taps_of(m, d) > CROWDED * max(length, 4):
            return "one range sum per slot and tap would be more than there is to sum"
    return None


def _refuse_transposed(m: Match) -> str | None:
    return _refuse_collapse(m) if m["conv"].op.transposed else "the convolution is not transposed"  # type: ignore[attr-defined]


def _refuse_plain(m: Match) -> str | None:
    return "the convolution is transposed" if m["conv"].op.transposed else _refuse_collapse(m)  # type: ignore[attr-defined]


def _carried(m: Match, tables: dict[int, Slots]) -> torch.dtype:
    """The dtype to sum in: wide where only one position is left, so that the contraction after it is small."""
    conv = m["conv"]
    single = all(len(tables[d]) == 1 if d in tables else conv.shape[d] == 1 for d in range(2, conv.ndim))
    return wide(conv.dtype) if single else conv.dtype


def _tap_table(m: Match, tables: dict[int, Slots]) -> dict[int, tuple[Slots, ...]]:
    conv, x = m["conv"], m["conv"].arg(0)
    assert isinstance(conv.op, Conv)
    return {d: tap_slots(conv.op, d - 2, s, taps_of(m, d), x.shape[d]) for d, s in tables.items()}


def biased(m: Match, inner: Conv, x: Node, w: Node, tables: dict[int, Slots]) -> Node:
    """inner(x, w) plus the bias times |P|: inside the convolution where |P| is the same for all slots."""
    bias = m["conv"].args[2]
    if bias is None:
        return make(inner, x, w, None)
    if is_uniform(tables):
        return make(inner, x, w, weighted(cast(bias, x.dtype), tables))
    y = make(inner, x, w, None)
    shaped = reshape(cast(bias, y.dtype), (1, bias.shape[0], *(1,) * (y.ndim - 2)))
    return pointwise("add", y, weighted(shaped, tables))


def _scaled(w: Node, tables: dict[int, Slots]) -> tuple[Node, dict[int, Slots]]:
    """Where one slot is left per dimension its scale goes into the weight, which is known ahead of the call."""
    if any(len(slots) > 1 for slots in tables.values()):
        return w, tables
    scale = prod(slots[0].scale for slots in tables.values())
    plain: dict[int, Slots] = {d: (replace(slots[0], scale=1.0),) for d, slots in tables.items()}
    return (w if scale == 1.0 else pointwise("mul", w, scale)), plain


def replaced(values: tuple[int, ...], dims: tuple[int, ...], new: dict[int, int] | int) -> tuple[int, ...]:
    """Per-dimension attribute `values` of a convolution with those of spatial `dims` replaced."""
    chosen = dict.fromkeys(dims, new) if isinstance(new, int) else new
    return tuple(chosen.get(i + 2, v) for i, v in enumerate(values))


def _summed_per_tap(m: Match, tables: dict[int, Slots], dtype: torch.dtype) -> tuple[Node, Node, set[int]]:
    """The input summed per slot and tap, the weight, and the dimensions along which every tap sums the same.

    Along those the input is summed once per slot, and the weight over its taps.
    """
    x, (w, tables) = m["conv"].arg(0), _scaled(cast(m["conv"].arg(1), dtype), tables)
    rows = _tap_table(m, tables)
    uniform = {d for d in tables if all(len(set(taps)) == 1 for taps in rows[d])}
    flat = {d: tuple(s for taps in rows[d] for s in (taps[:1] if d in uniform else taps)) for d in tables}
    weight = range_sum(w, {d: (Slot(0, taps_of(m, d), 1, 1.0),) for d in uniform}, dtype)
    return range_sum(x, flat, dtype), weight, uniform


@rule(
    "sum_P(conv(x, w)) = conv(rangesum_taps(x), w)",
    pattern=REDUCED_CONV,
    condition=_refuse_plain,
    exactness="reassociates",
    hides=True,
)
def sum_through_conv(m: Match) -> Node:
    """sum_P(conv(x, w) + b) -> conv'(R, w) + |P|*b, with R[c, (q, u)] one range sum of x per slot q and tap u.

    x (N, C, *L), w (O, C/g, *K), reduction to *Q slots: R (N, C, *(Q*K)); conv' has stride K, dilation 1, no padding.
    Of several slots, taps become channels: R (N, C*K, *Q).  Where every tap sums the same range (fully padded, stride
    1), w is summed over its taps.  Holds for every stride, padding, dilation, group count, clipped window and divisor,
    along any spatial dimensions of known length.  Class reassociates: an Inf summed with its opposite gives NaN.
    """
    conv, tables = m["conv"], tables_of(m)
    assert isinstance(conv.op, Conv)
    dims, dtype = tuple(tables), _carried(m, tables)
    summed, weight = _summed_per_slot(m, tables, dtype)
    padding = tuple((0, 0) if i + 2 in dims else p for i, p in enumerate(conv.op.padding))
    stride = replaced(conv.op.stride, dims, {d: weight.shape[d] for d in dims})
    inner = Conv(stride, padding, replaced(conv.op.dilation, dims, 1), conv.op.groups)
    y = biased(m, inner, summed, weight, tables)
    return finish(m["reduction"], cast(y, conv.dtype), dims)


@rule(
    "sum_P(conv_transpose(x, w)) = conv_transpose(rangesum_taps(x), taps as channels of w)",
    pattern=REDUCED_CONV,
    condition=_refuse_transposed,
    exactness="reassociates",
    hides=True,
)
def sum_through_conv_transpose(m: Match) -> Node:
    """sum_P(conv_transpose(x, w) + b) -> conv_transpose'(R, w') + |P|*b; the taps of summed dimensions become channels.

    x (N, C, *L), w (C, O/g, *K): R (N, C*K, *Q) and w' (C*K, O/g, *1), where R[(c, u), q] sums the x[c, p] whose
    target s*p + d*u - pad lies in slot q.  Where every tap sums the same range (nothing is cropped), w is summed over
    its taps.  Holds for every stride, padding, output_padding, dilation and group count.  Class reassociates.
    """
    conv, tables = m["conv"], tables_of(m)
    assert isinstance(conv.op, Conv)
    dims, dtype = tuple(tables), _carried(m, tables)
    summed, weight = _taps_as_channels(m, tables, dtype)
    padding = tuple((0, 0) if i + 2 in dims else p for i, p in enumerate(conv.op.padding))
    stride, dilation = replaced(conv.op.stride, dims, 1), replaced(conv.op.dilation, dims, 1)
    extra = replaced(conv.op.output_padding, dims, 0)
    inner = Conv(stride, padding, dilation, conv.op.groups, True, extra)
    y = biased(m, inner, summed, weight, tables)
    return finish(m["reduction"], cast(y, conv.dtype), dims)


def _summed_per_slot(m: Match, tables: dict[int, Slots], dtype: torch.dtype) -> tuple[Node, Node]:
    """The input summed per slot and tap, and its weight: taps as channels in both where there are several slots."""
    if all(len(slots) == 1 for slots in tables.values()):
        return _summed_per_tap(m, tables, dtype)[:2]
    return _taps_as_channels(m, tables, dtype)


def _taps_as_channels(m: Match, tables: dict[int, Slots], dtype: torch.dtype) -> tuple[Node, Node]:
    """The input summed per slot and tap, and its weight, taps as channels in both."""
    summed, weight, uniform = _summed_per_tap(m, tables, dtype)
    conv = m["conv"].op
    assert isinstance(conv, Conv)
    channel = 0 if conv.transposed else 1  # of the weight
    for d in tables:
        if d not in uniform:
            summed = _taps_to_channels(summed, d, taps_of(m, d), channel=1)
            weight = _taps_to_channels(weight, d, taps_of(m, d), channel=channel)
    return summed, weight


def _taps_to_channels(x: Node, d: int, taps: int, channel: int) -> Node:
    """(.., C at `channel`, .., Q*K at d, ..) -> (.., C*K, .., Q, ..)."""
    length = x.shape[d]
    assert isinstance(length, int)
    split = reshape(x, (*x.shape[:d], length // taps, taps, *x.shape[d + 1 :]))
    order = [i for i in range(split.ndim) if i != d + 1]
    order.insert(channel + 1, d + 1)
    moved = permute(split, order, copy=True)
    return reshape(moved, (*moved.shape[:channel], x.shape[channel] * taps, *moved.shape[channel + 2 :]))


def refuse_turning(conv: Node) -> str | None:
    """Why a transposed convolution is no plain one, or `None`."""
    assert isinstance(conv.op, Conv)
    if any(s != 1 for s in conv.op.stride):
        return "the transposed convolution strides"
    for (left, right), length in zip(_turned_padding(conv), conv.arg(0).shape[2:], strict=True):
        if min(left, right) < 0 and not isinstance(length, int):
            return "the transposed convolution crops a dimension of unknown length"
        if isinstance(length, int) and min(left, right) <= -length:
            return "the transposed convolution crops its whole input"
    return None


def _turned_padding(conv: Node) -> tuple[tuple[int, int], ...]:
    """The padding, or cropping where negative, of the plain convolution that a transposed one of stride 1 is."""
    op, taps = conv.op, conv.arg(1).shape[2:]
    assert isinstance(op, Conv)
    reach = tuple(d * (k - 1) for d, k in zip(op.dilation, taps, strict=True))
    sides = zip(reach, op.padding, op.output_padding, strict=True)
    return tuple((r - left, r - right + extra) for r, (left, right), extra in sides)


def turned(conv: Node) -> Node:
    """conv_transpose_1(x, w) as conv_1(x, w'), w' (O, C/g, *K) from w (C, O/g, *K) with its taps reversed.

    x is padded by d*(K-1) - padding, on the right by output_padding more, which crops it where that is negative.
    """
    x, w, bias = conv.args
    assert isinstance(conv.op, Conv) and x is not None and w is not None
    groups, taps = conv.op.groups, w.shape[2:]
    reversal = {d: tuple(Slot(u, u + 1, 1, 1.0) for u in reversed(range(k))) for d, k in enumerate(taps, start=2)}
    # Row by row: from weights that lie otherwise, convolutions of several positions may answer in another format.
    several_positions = any(length != 1 for length in conv.shape[2:])
    weight = with_features_first(range_sum(w, reversal, w.dtype), groups, copy=several_positions)
    return make(Conv(conv.op.stride, _turned_padding(conv), conv.op.dilation, groups), x, weight, bias)


def with_features_first(w: Node, groups: int, *, copy: bool = True) -> Node:
    """The weight (C, O/g, *K) of a transposed convolution as a plain one's, (O, C/g, *K); row by row with `copy`."""
    channels, out, taps = w.shape[0], w.shape[1], w.shape[2:]
    grouped = reshape(w, (groups, channels // groups, out, *(k for k in taps if k != 1)))
    swapped = permute(grouped, (0, 2, 1, *range(3, grouped.ndim)), copy=copy)
    return reshape(swapped, (out * groups, channels // groups, *taps))


def as_plain(m: Match) -> Match:
    """The same match with a plain convolution for a transposed one of stride 1."""
    conv = m["conv"]
    return {**m, "conv": turned(conv)} if conv.op.transposed else m  # type: ignore[attr-defined]


def refuse_sliding(m: Match) -> str | None:
    """Why no windows slide over the positions of a convolution that is plain or can be, or `None`."""
    reason = refuse_shapes(m)
    if reason is not None:
        return reason
    if m["conv"].op.transposed and (reason := refuse_turning(m["conv"])):  # type: ignore[attr-defined]
        return reason
    if not sliding_windows(m):
        return "the windows are not all equal and whole"
    if all(len(slots) == 1 for slots in sliding_windows(m).values()):
        return "one window only: it is a total sum"
    return None


def sliding_windows(m: Match) -> dict[int, Slots]:
    """Slots along the reduced dimensions on which equal, whole windows slide; where there are others, which are left to
    what follows, without those on which nothing is summed or passed over."""
    tables = tables_of(m)
    whole = {d: slots for d, slots in tables.items() if sliding(slots) is not None}
    if len(whole) == len(tables):
        return tables
    return {d: s for d, s in whole.items() if s[0].count > 1 or len(s) != m["conv"].shape[d]}


def pooled_stride(conv: Conv, tables: dict[int, Slots]) -> dict[int, int]:
    """The stride of a convolution that yields one output per slot."""
    return {d: conv.stride[d - 2] * (s[1].start - s[0].start if len(s) > 1 else 1) for d, s in tables.items()}


@rule(
    "avg_pool(conv(x, w)) = conv_strided(box(x), w)",
    pattern=REDUCED_CONV,
    condition=refuse_sliding,
    exactness="reassociates",
    hides=True,
)
def box_before_conv(m: Match) -> Node:
    """avg_pool_t(conv_s(x, w) + b) -> conv_{s*t}(box(x), w) + b: the window slides over x first.

    x (N, C, *L); box[c, j] = scale * sum_i xpad[c, j + s*i] at the positions that the taps of the pooled outputs read.
    Holds along dimensions with equal, whole windows (no padding or partial window in the pooling; the convolution's own
    padding is free); along others the pooling follows.  A transposed convolution of stride 1 is a plain one here.
    Class reassociates.
    """
    conv = of_part_read(as_plain(m)["conv"])  # a kernel forms window sums from the first element on
    m, tables = {**m, "conv": conv}, sliding_windows(m)
    assert isinstance(conv.op, Conv)
    dims, op = tuple(tables), conv.op
    stride = pooled_stride(op, tables)
    boxes = {d: _boxes(m, d, slots, stride[d]) for d, slots in tables.items()}
    padding = tuple((0, 0) if i + 2 in dims else p for i, p in enumerate(op.padding))
    inner = Conv(replaced(op.stride, dims, stride), padding, op.dilation, op.groups)
    y = biased(m, inner, range_sum(conv.arg(0), boxes, conv.dtype), conv.arg(1), tables)
    return pooled_on(m["reduction"], y, dims)


def pooled_on(root: Node, inner: Node, done: tuple[int, ...]) -> Node:
    """The rest of `root` on `inner`, a pooling where that is one along other spatial dimensions."""
    op, dims = root.op, reduced_dims(root)
    if not isinstance(op, Pool) or op.divisor is not None or dims[0] < 2 or set(dims) == set(done):
        return finish(root, inner, done)
    kernel = tuple(1 if d in done else k for d, k in zip(dims, op.kernel, strict=True))
    stride = tuple(1 if d in done else s for d, s in zip(dims, op.stride, strict=True))
    padding = tuple(0 if d in done else p for d, p in zip(dims, op.padding, strict=True))
    return make(replace(op, kernel=kernel, stride=stride, padding=padding), inner)


def _boxes(m: Match, d: int, slots: Slots, stride: int) -> Slots:
    """One box per position of x along `d` that the convolution of pooled stride reads."""
    op, length, window = m["conv"].op, m["conv"].arg(0).shape[d], slots[0]
    assert isinstance(op, Conv) and isinstance(length, int)
    own, left = op.stride[d - 2], op.padding[d - 2][0]
    reach = stride * (len(slots) - 1) + op.dilation[d - 2] * (taps_of(m, d) - 1) + 1
    first = own * window.start - left
    return tuple(make_slot(first + j, own * window.step, window.count, length, window.scale) for j in range(reach))


def _refuse_full(m: Match) -> str | None:
    conv = m["conv"]
    if conv.op.transposed:  # type: ignore[attr-defined]
        return "the convolution is transposed"
    if any(p != (0, 0) for p in conv.op.padding):  # type: ignore[attr-defined]
        return "the convolution is padded"
    covered = conv.arg(0).shape[2:] == conv.arg(1).shape[2:]
    return None if covered else "the kernel does not cover the input"


@rule("conv(x, w) = matmul(x, w)", pattern=op("conv", Conv), condition=_refuse_full, exactness="reassociates")
def full_conv_is_matmul(m: Match) -> Node:
    """conv(x, w) + b -> x (N, g, C/g*K) @ w (g, O/g, C/g*K)^T + b when the kernel covers the whole unpadded input.

    x (N, C, *K), w (O, C/g, *K) -> (N, O, 1, ..).  Class reassociates: another order of summation.
    """
    conv, (x, w, bias) = m["conv"], m["conv"].args
    assert isinstance(conv.op, Conv) and x is not None and w is not None
    groups, n, depth = conv.op.groups, x.shape[0], numel(w.shape[1:])
    if groups == 1:
        flat = make(Matmul(transpose_w=True), reshape(x, (n, depth)), reshape(w, (w.shape[0], depth)), bias)
        return reshape(flat, conv.shape)
    split, weight = reshape(x, (n, groups, depth)), reshape(w, (groups, w.shape[0] // groups, depth))
    y = reshape(_by_group(split, weight), conv.shape)
    return y if bias is None else pointwise("add", y, reshape(bias, (1, *bias.shape, *(1,) * (conv.ndim - 2))))


def _by_group(x: Node, w: Node) -> Node:
    """x (N, g, D) with w (g, O/g, D) -> (N, g, O/g), in row-major memory."""
    if w.shape[1] > 1:
        rows = reshape(x, (*x.shape[:2], 1, x.shape[2]))
        return reshape(make(Matmul(transpose_w=True), rows, w, None), (*x.shape[:2], w.shape[1]))
    dtype = torch.promote_types(x.dtype, torch.float32)
    products = pointwise("mul", cast(x, dtype), cast(reshape(w, (1, *x.shape[1:])), dtype))
    return cast(total(products, (2,), keepdim=True), x.dtype)


def _refuse_single_tap(m: Match) -> str | None:
    conv = m["conv"].op
    assert isinstance(conv, Conv)
    if not conv.transposed:
        return "the convolution is not transposed"
    if any(k != 1 for k in m["conv"].arg(1).shape[2:]):
        return "the kernel has more than one tap"
    moved = any(s != 1 for s in conv.stride) or any(p != (0, 0) for p in conv.padding) or any(conv.output_padding)
    return "it strides, crops or pads" if moved else None


@rule(
    "conv_transpose_1(x, w) = conv_1(x, w^T)",
    pattern=op("conv", Conv),
    condition=_refuse_single_tap,
    exactness="reassociates",
)
def single_tap_transpose(m: Match) -> Node:
    """conv_transpose(x, w) -> conv(x, w') for one tap and stride 1, with w' (O, C/g, 1..) from w (C, O/g, 1..).

    x (N, C, *L) -> (N, O, *L).  Holds without cropping or output padding.  Class reassociates: another kernel's order.
    """
    return turned(m["conv"])


RULES = (
    sum_through_conv,
    sum_through_conv_transpose,
    box_before_conv,
    full_conv_is_matmul,
    single_tap_transpose,
)
