"""Paddings ahead of windows: what a convolution or a pooling reads outside of x need not be written beside it first.

    conv(pad(x), w) = conv_padded(x, w)          avgpool(pad(x)) = avgpool_padded(x)
    maxpool(pad(x, v)) = maxpool_padded(x)       where no value of x is below v

Window p begins at s*p - left either way, so what is asked is that there are as many windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod

from fusewright.ir.intervals import interval
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Conv, Pad, Pool
from fusewright.rules.pooling import is_extreme, padded_away
from fusewright.rules.rule import Match, Rule, op, rule, value

_OUTSIDE = "a dimension is padded that no window runs over"


def _sides(m: Match, first: int) -> list[tuple[int, int]] | None:
    """(left, right) of every dimension from `first` on; `None` where one before them is padded."""
    pad = m["pad"].op
    assert isinstance(pad, Pad)
    padded = {d: (left, right) for d, left, right in pad.pads if left or right}
    outside = any(d < first for d in padded)
    return None if outside else [padded.get(d, (0, 0)) for d in range(first, m["pad"].ndim)]


def _is_zero(pad: Node) -> bool:
    assert isinstance(pad.op, Pad)
    return pad.op.mode == "constant" and pad.op.value == 0


# Convolutions


def _refuse_conv(m: Match) -> str | None:
    conv = m["conv"].op
    assert isinstance(conv, Conv)
    if conv.transposed:
        return "the convolution is transposed"
    if not _is_zero(m["pad"]):
        return "it is not padded with zeros"
    return None if _sides(m, 2) is not None else _OUTSIDE


@rule(
    "conv(pad(x), w) = conv_padded(x, w)",
    pattern=op("conv", Conv, of=(op("pad", Pad, of=(value("x"),)),)),
    condition=_refuse_conv,
    exactness="finite",
)
def padding_of_conv(m: Match) -> Node:
    """conv_q(pad_p(x), w) + b -> conv_{p+q}(x, w) + b; the same on both sides where that makes as many positions.

    x (N, C, *L), zeros beside spatial dimensions.  Class finite: libraries pass over the taps that meet a convolution's
    own padding, so a NaN of w there is not multiplied by zero.
    """
    conv, sides = m["conv"], _sides(m, 2)
    assert isinstance(conv.op, Conv) and sides is not None
    ends = [(a + left, b + right) for (a, b), (left, right) in zip(conv.op.padding, sides, strict=True)]
    # ATen has equal sides alone, and copies where they are not
    padding = (pair if _differs(m, i, pair[0]) else (pair[0], pair[0]) for i, pair in enumerate(ends))
    return make(replace(conv.op, padding=tuple(padding)), m["x"], *conv.args[1:])


def _differs(m: Match, i: int, both: int) -> bool:
    """Whether there are more or fewer positions along spatial dimension `i` if x is padded by `both` on either side."""
    conv, x = m["conv"], m["x"]
    assert isinstance(conv.op, Conv)
    padding = ((both, both),) * len(conv.op.stride)
    return replace(conv.op, padding=padding).spatial(x.shape[2:], conv.arg(1).shape[2:])[i] != conv.shape[2 + i]


# Pools


def _pool(m: Match) -> Pool:
    pool = m["pool"].op
    assert isinstance(pool, Pool)
    return pool


def _padded(m: Match) -> Pool | None:
    """The pooling that pads by itself; `None` where there is none with as many windows."""
    x, pool = m["x"], _pool(m)
    sides = _sides(m, x.ndim - len(pool.kernel))
    assert sides is not None
    padding = tuple(p + left for p, (left, _) in zip(pool.padding, sides, strict=True))
    itself = replace(pool, padding=padding, count_include_pad=True)
    return next((p for p in _readings(itself, x) if make(p, x).shape == m["pool"].shape), None)


def _readings(pool: Pool, x: Node) -> Iterator[Pool]:
    """`pool`, and one whose last windows may reach farther over the end, divided by as much as the others."""
    yield pool
    n, average = len(pool.kernel), pool.kind == "avg"
    divisible = n > 1 or not average  # PyTorch's average over one dimension has no divisor of its own
    if divisible and all(isinstance(length, int) for length in x.shape[-n:]):
        yield replace(pool, ceil_mode=True, divisor=pool.divisor or (prod(pool.kernel) if average else None))


def _refuse_pool(m: Match) -> str | None:
    """Why the pooling cannot pad by itself, whatever it pads with."""
    if _sides(m, m["x"].ndim - len(_pool(m).kernel)) is None:
        return _OUTSIDE
    padded = _padded(m)
    if padded is None:
        return "there would be more windows, or fewer"
    if any(2 * p > k for p, k in zip(padded.padding, padded.kernel, strict=True)):
        return "more than half of a window would be padding"
    return None


def _refuse_average(m: Match) -> str | None:
    pool = _pool(m)
    if not _is_zero(m["pad"]):
        return "it is not padded with zeros"
    if pool.divisor is None and any(pool.padding) and not pool.count_include_pad:
        return "the pooling counts its own padding out"
    return _refuse_pool(m) or _refuse_end(m) or _refuse_small(m) or _refuse_volume(m)


def _refuse_end(m: Match) -> str | None:
    """Where windows are cut off at the end, fewer elements are counted: one end for either."""
    pool = _pool(m)
    sides = _sides(m, m["x"].ndim - len(pool.kernel))
    cut = pool.ceil_mode and pool.divisor is None
    return "windows are cut off elsewhere" if cut and any(left != right for left, right in sides or ()) else None


def _refuse_small(m: Match) -> str | None:
    kernel = _pool(m).kernel
    lengths = m["x"].shape[-len(kernel) :]
    fits = len(kernel) < 3 or all(isinstance(d, int) and d >= k for d, k in zip(lengths, kernel, strict=True))
    return None if fits else "PyTorch averages no volumes that are smaller than a window"


def _refuse_volume(m: Match) -> str | None:
    """The gradient of volumes that are averaged at every place is gathered in order; not where they are padded too."""
    pool = _pool(m)
    ordered = len(pool.kernel) == 3 and set(pool.stride) == {1} and not any(pool.padding)
    image = ordered and (1, 1) in pairwise(pool.kernel)
    return "PyTorch sums gradients of padded volumes in any order" if ordered and not image else None


@rule(
    "avgpool(pad(x)) = avgpool_padded(x)",
    pattern=op("pool", Pool, of=(op("pad", Pad, of=(value("x"),)),), where=lambda node: not is_extreme(node)),
    condition=_refuse_average,
    exactness="reassociates",
)
def padding_of_average(m: Match) -> Node:
    """avgpool_q(pad_p(x)) -> avgpool_{p+q}(x), padding counted; the last windows over the end where p is more there.

    x (.., *L), zeros beside pooled dimensions, at most half of a window in all; the pooling counts padding of its own.
    Class reassociates.
    """
    pool = _padded(m)
    assert pool is not None
    return make(pool, m["x"])


def _refuse_extreme(m: Match) -> str | None:
    pad, (low, high) = m["pad"].op, interval(m["x"])
    assert isinstance(pad, Pad)
    if pad.mode != "constant":
        return "it is not padded with one value"
    if not (pad.value <= low if _pool(m).kind == "max" else pad.value >= high):
        return "the padding may be what is returned"
    return _refuse_pool(m) or _refuse_alone(m)


def _refuse_alone(m: Match) -> str | None:
    padded = _padded(m)
    alone = padded is not None and padded_away(make(padded, m["x"]))
    return "a window lies in the padding alone" if alone else None


@rule(
    "maxpool(pad(x, v)) = maxpool_padded(x)",
    pattern=op("pool", Pool, of=(op("pad", Pad, of=(value("x"),)),), where=is_extreme),
    condition=_refuse_extreme,
    exactness="exact",
)
def padding_of_extreme(m: Match) -> Node:
    """maxpool_q(pad_p(x, v)) -> maxpool_{p+q}(x) where no value of x is below v; minpool where none is above.

    x (.., *L), padded by v beside pooled dimensions, by at most half of a window in all: -inf, or zeros beside what a
    relu leaves.  Every window holds an element of x.  Class exact.
    """
    pool = _padded(m)
    assert pool is not None
    return make(pool, m["x"])


RULES: tuple[Rule, ...] = (padding_of_conv, padding_of_average, padding_of_extreme)
