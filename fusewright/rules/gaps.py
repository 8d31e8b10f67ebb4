"""Transposed convolutions that leave gaps: positions that no tap writes to, which hold the bias alone.

Position o of y[o] = b + sum_{c,u} x[c,p] * w[c,u] with o = s*p + d*u - left is a gap where no p and u lead to it.
Where there is one tap, or d is a multiple of s, every tap leads to the same positions modulo s: s - 1 of s are gaps,
and the others are those of the convolution of stride 1 and dilation d/s, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusewright.ir.build import pointwise, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Conv, Pool, Reduce
from fusewright.rules.linear import reduced_dims
from fusewright.rules.rule import Match, Rule, op, rule

_CHOICE = {"max": "maximum", "min": "minimum"}


@dataclass(frozen=True)
class _Dense:
    """One dimension without its gaps: what position i of it was is position first + i * stride.

    padding, dilation, output_padding   of the convolution of stride 1 that computes `length` positions; where the last
                                        is negative, it is cropped behind by so many more
    kernel, step, before                the window, its stride and its padding, in such positions
    kept                                positions that some window reads are the first so many
    covered                             whether every window has a gap besides
    """

    first: int
    stride: int
    length: int
    padding: int
    dilation: int
    output_padding: int
    kernel: int = 0
    step: int = 1
    before: int = 0
    kept: int = 0
    covered: bool = False


def _without_gaps(conv: Node, d: int) -> _Dense | None:
    """Dimension `d` of a transposed convolution without its gaps; `None` where they are none, or irregular."""
    op, i, taps, length = conv.op, d - 2, conv.arg(1).shape[d], conv.arg(0).shape[d]
    assert isinstance(op, Conv) and isinstance(taps, int)
    stride, dilation, left = op.stride[i], op.dilation[i], op.padding[i][0]
    if stride == 1 or (taps > 1 and dilation % stride) or not isinstance(length, int):
        return None
    out = conv.shape[d]
    assert isinstance(out, int)
    apart = dilation // stride if taps > 1 else 1
    low, high = -(-left // stride), (out - 1 + left) // stride
    extra = high - low + 1 - (length + apart * (taps - 1) - 2 * low)
    if out < 1 or high < low or extra >= apart:
        return None
    return _Dense(stride * low - left, stride, high - low + 1, low, apart, extra)


def _windowed(root: Node, d: int, dense: _Dense) -> _Dense | None:
    """`dense` with the windows of `root` along it; `None` where those are not alike without the gaps."""
    op, length = root.op, root.arg(0).shape[d]
    if isinstance(op, Reduce):
        return replace(dense, kept=dense.length, covered=dense.length < length)
    assert isinstance(op, Pool) and isinstance(length, int)
    i = d - (root.ndim - len(op.kernel))
    if op.stride[i] % dense.stride or op.dilation[i] != 1:
        return None
    before = (op.padding[i] + dense.first) // dense.stride
    kernel = (op.kernel[i] - 1 - op.padding[i] - dense.first) // dense.stride + before + 1
    step = op.stride[i] // dense.stride
    if kernel < 1 or before < 0 or 2 * before > kernel:
        return None
    slots = root.shape[d]
    assert isinstance(slots, int)
    pool = Pool(op.kind, (kernel,), (step,), (before,), (1,), op.ceil_mode)
    # where the last gaps are too few for one more window, what is left of them may have one
    enough = (dense.length, (slots - 1) * step - before + kernel)
    kept = next((n for n in enough if n <= dense.length and pool.length(0, n) == slots), None)
    if kept is None:
        return None
    counts = [_inside(j * step - before, kernel, kept) for j in range(slots)]
    all_counts = [_inside(j * op.stride[i] - op.padding[i], op.kernel[i], length) for j in range(slots)]
    if min(counts) < 1:
        return None
    covered = all(some < many for some, many in zip(counts, all_counts, strict=True))
    return replace(dense, kernel=kernel, step=step, before=before, kept=kept, covered=covered)


def _inside(start: int, count: int, length: int) -> int:
    """How many of `count` positions from `start` on are those of `length`."""
    return min(start + count, length) - max(start, 0)


def _dense_dims(m: Match) -> dict[int, _Dense]:
    """The reduced dimensions along which gaps can be left out."""
    root, conv = m["root"], m["conv"]
    found = {d: _without_gaps(conv, d) for d in reduced_dims(root) if d >= 2}
    fitting = {d: _windowed(root, d, dense) for d, dense in found.items() if dense is not None}
    return {d: dense for d, dense in fitting.items() if dense is not None}


def _refuse_gaps(m: Match) -> str | None:
    root, conv = m["root"], m["conv"]
    if not conv.op.transposed:  # type: ignore[attr-defined]
        return "the convolution is not transposed"
    if isinstance(root.op, Pool) and reduced_dims(root)[0] < 2:
        return "the windows span channels"
    dense = _dense_dims(m)
    if not dense:
        return "no reduced dimension has gaps at which its windows are alike"
    return None if any(d.covered for d in dense.values()) else "a window holds no gap"


def _is_extreme(node: Node) -> bool:
    return getattr(node.op, "kind", "") in _CHOICE


@rule(
    "max(conv_transpose_s(x, w) + b) = max(b, max'(conv_transpose_1(x, w) + b))",
    pattern=op("root", Pool, Reduce, of=(op("conv", Conv),), where=_is_extreme),
    condition=_refuse_gaps,
    exactness="reassociates",
)
def extreme_beside_gaps(m: Match) -> Node:
    """max over windows of a transposed convolution with gaps -> max(b, max over its other positions); likewise min.

    x (N, C, *L), w (C, O/g, *K), stride s and dilation d: along dimensions with one tap, or where s divides d, the
    positions between are left out; windows that advance by a multiple of s hold the same share of them, and each holds
    a gap.  Class reassociates: another kernel's order.
    """
    dense = _dense_dims(m)
    return _beside_gaps(m["root"], make(_over_others(m["root"], dense), _others(m["conv"], dense)), m["conv"])


def _others(conv: Node, dense: dict[int, _Dense]) -> Node:
    """The convolution without its gaps along the dimensions of `dense`, and of what is left what windows read."""
    x, w, bias = conv.args
    assert isinstance(conv.op, Conv) and x is not None and w is not None
    stride, padding = list(conv.op.stride), list(conv.op.padding)
    dilation, extra = list(conv.op.dilation), list(conv.op.output_padding)
    for d, along in dense.items():
        less = along.length - along.kept - along.output_padding  # than what it has, of which windows read the first
        stride[d - 2], padding[d - 2] = 1, (along.padding, along.padding + max(0, less))
        dilation[d - 2], extra[d - 2] = along.dilation, max(0, -less)
    op = Conv(tuple(stride), tuple(padding), tuple(dilation), conv.op.groups, True, tuple(extra))
    return make(op, x, w, bias)


def _over_others(root: Node, dense: dict[int, _Dense]) -> Pool | Reduce:
    """The reduction of `root` over the positions that are left."""
    op = root.op
    if isinstance(op, Reduce):
        return op
    assert isinstance(op, Pool)
    kernel, stride, padding = list(op.kernel), list(op.stride), list(op.padding)
    for d, along in dense.items():
        i = d - (root.ndim - len(op.kernel))
        kernel[i], stride[i], padding[i] = along.kernel, along.step, along.before
    return replace(op, kernel=tuple(kernel), stride=tuple(stride), padding=tuple(padding))


def _beside_gaps(root: Node, others: Node, conv: Node) -> Node:
    """The max or min of `others` and of the gaps: of the bias, or of zero."""
    op, bias = root.op, conv.args[2]
    assert isinstance(op, Pool | Reduce)
    if bias is None:
        return pointwise("clamp_min" if op.kind == "max" else "clamp_max", others, params=(0.0,))
    gaps = reshape(bias, (1, bias.shape[0], *(1,) * (conv.ndim - 2)))
    return pointwise(_CHOICE[op.kind], others, gaps if isinstance(op, Pool) else make(op, gaps))


RULES: tuple[Rule, ...] = (extreme_beside_gaps,)
