"""Slices ahead of what computes row by row: what nobody reads is not computed.

    norm(x)[:, 0] = norm(x[:, 0])        (x @ w)[:, -1:] = x[:, -1:] @ w
    attention(q, k, v)[:, :, 0] = attention(q[:, :, 0], k, v)
    conv(x)[..., a:] = conv(x), padded less        conv_transpose(x)[..., a:b] = conv_transpose(x), padded more
    conv(x[..., a:b]) = conv(x), padded by less than nothing

The class token of a vision transformer, the last token of a language model: of the last block, everything is computed
for one token, but for the keys and values that it attends to.  Slices only ever move inwards, and views outwards; they
do where a norm, a softmax, a product or an attention lies below, and into parts whose rows are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusewright.ir.build import permute, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import (
    Attention,
    Cast,
    Cat,
    Conv,
    Matmul,
    Norm,
    Number,
    Permute,
    Pointwise,
    Reshape,
    Slice,
    Softmax,
)
from fusewright.ir.types import same_numel
from fusewright.rules.rule import Match, Rule, op, rule, value

# Operations of a chain that are looked through at most.
REACH = 64


def _slice(m: Match) -> Slice:
    found = m["slice"].op
    assert isinstance(found, Slice)
    return found


def _sliced(x: Node, dim: int, like: Slice) -> Node:
    return make(replace(like, dim=dim), x)


def _operand(x: Node, root: Node, like: Slice) -> Node:
    """An operand that is broadcast to `root`, as it goes with the slice of that."""
    dim = like.dim - root.ndim + x.ndim
    return x if dim < 0 or x.shape[dim] != root.shape[like.dim] else _sliced(x, dim, like)


def _refuse_all(m: Match) -> str | None:
    whole = m["slice"].shape == m["x"].shape or not isinstance(m["x"].shape[_slice(m).dim], int)
    return "nothing is left out, or it is not known how much" if whole else None


def _refuse(m: Match) -> str | None:
    """Why the slice may not move below what others may compute row by row."""
    reason = None if _row_by_row(m["x"], _slice(m).dim) else "nothing that computes row by row lies below"
    return _refuse_all(m) or reason


def _row_by_row(x: Node, dim: int) -> bool:
    """Whether an operation that has rows along `dim` lies below, behind functions of each element and views."""
    stack, seen = [(x, dim)], set[tuple[Node, int]]()
    while stack and len(seen) < REACH:
        node, d = stack.pop()
        if (node, d) in seen:
            continue
        seen.add((node, d))
        if _has_rows(node, d):
            return True
        stack += _below(node, d)
    return False


def _has_rows(node: Node, dim: int) -> bool:
    match node.op:
        case Norm(kind="layer" | "rms", trailing=trailing):
            return dim < node.ndim - trailing
        case Softmax(dim=along):
            return dim != along
        case Matmul():
            return dim < node.ndim - 1
        case Attention(turned=turned):
            return dim == (1 if turned else 2)
    return False


def _below(node: Node, dim: int) -> Iterator[tuple[Node, int]]:
    """What functions of each element, and views, are of, and where `dim` is there."""
    if isinstance(node.op, Pointwise | Cast):
        for x in node.inputs:
            d = dim - node.ndim + x.ndim
            if d >= 0 and x.shape[d] == node.shape[dim]:
                yield x, d
    elif isinstance(node.op, Permute):
        yield node.arg(0), node.op.dims[dim]
    elif isinstance(node.op, Reshape):
        found = _seen_as(node, dim)
        if found is not None:
            yield node.arg(0), found


def _seen_as(view: Node, dim: int) -> int | None:
    """The dimension of a reshape's argument that is `dim` of the result, if one is."""
    shape, (length, before) = view.arg(0).shape, (view.shape[dim], view.shape[:dim])
    return next((d for d, n in enumerate(shape) if n == length and same_numel(shape[:d], before)), None)


@rule(
    "slice(f(x, y)) = f(slice(x), slice(y))",
    pattern=op("slice", Slice, of=(op("x", Pointwise, Cast),)),
    condition=_refuse,
    exactness="exact",
    repeats=True,
)
def slice_of_function(m: Match) -> Node:
    """f(x, y)[a:b] -> f(x[a:b], y[a:b]), of operands that have the dimension; others are broadcast as they were.

    f(x, y) (.., L, ..) of which a part is read, along a dimension of known length.  Class exact.
    """
    f = m["x"]
    args = (a if a is None or isinstance(a.op, Number) else _operand(a, f, _slice(m)) for a in f.args)
    return make(f.op, *args, where=f.where)


def _refuse_norm(m: Match) -> str | None:
    if not _has_rows(m["x"], _slice(m).dim):
        return "it is cut along what a row joins"
    return _refuse_all(m)


@rule(
    "slice(norm(x)) = norm(slice(x))",
    pattern=op("slice", Slice, of=(op("x", Norm, Softmax),)),
    condition=_refuse_norm,
    exactness="reassociates",
    repeats=True,
)
def slice_of_norm(m: Match) -> Node:
    """norm(x)[:, a:b] -> norm(x[:, a:b]) for layer and RMS norms, and softmaxes, cut along another dimension.

    x (N, L, C), normalised over C.  Class reassociates.
    """
    norm = m["x"]
    return make(norm.op, _sliced(norm.arg(0), _slice(m).dim, _slice(m)), *norm.args[1:], where=norm.where)


def _refuse_matmul(m: Match) -> str | None:
    return _refuse_all(m) if _slice(m).dim < m["x"].ndim - 1 else "columns are left out"


@rule(
    "slice(matmul(x, w)) = matmul(slice(x), slice(w))",
    pattern=op("slice", Slice, of=(op("x", Matmul),)),
    condition=_refuse_matmul,
    exactness="reassociates",
    repeats=True,
)
def slice_of_matmul(m: Match) -> Node:
    """(x @ w + b)[a:b] -> x[a:b] @ w + b for rows of x; along a batch dimension, of both.

    x (.., M, K), w (.., K, N).  Class reassociates.
    """
    y, like = m["x"], _slice(m)
    x, w = y.arg(0), y.arg(1)
    rows = like.dim == y.ndim - 2
    x = _sliced(x, x.ndim - 2, like) if rows else _operand(x, y, like)
    return make(y.op, x, w if rows else _operand(w, y, like), *y.args[2:], where=y.where)


def _cut(m: Match) -> Conv | None:
    """The convolution of the same input whose output is the slice; `None` where the input would have to be cut."""
    conv, like = m["x"], _slice(m)
    op, d = conv.op, like.dim - 2
    assert isinstance(op, Conv)
    length, count, kernel = (n.shape[like.dim] for n in (conv.arg(0), m["slice"], conv.arg(1)))
    if not (isinstance(length, int) and isinstance(count, int) and isinstance(kernel, int)):
        return None
    if op.transposed:
        return _cropped(op, d, like, conv.shape[like.dim], op.dilation[d] * (kernel - 1))
    left = op.padding[d][0] - like.start * op.stride[d]
    stride = op.stride[d] * like.step
    reach = (count - 1) * stride + op.dilation[d] * (kernel - 1) + 1
    padding, strides = list(op.padding), list(op.stride)
    padding[d], strides[d] = (left, max(reach - left - length, 0)), stride
    cut = replace(op, padding=tuple(padding), stride=tuple(strides))
    return cut if left >= 0 and cut.spatial((length,) * len(strides), (kernel,) * len(strides))[d] == count else None


def _cropped(op: Conv, d: int, like: Slice, length: int, reach: int) -> Conv | None:
    """A transposed convolution of `length` positions along its dimension `d`, without those that the slice leaves out;
    `None` where these are every other one, or more than the taps reach beyond the input."""
    left, right = op.padding[d][0] + like.start, op.padding[d][1] + length - like.stop
    padding = (*op.padding[:d], (left, right), *op.padding[d + 1 :])
    return replace(op, padding=padding) if like.step == 1 and max(left, right) <= reach else None


def _refuse_conv(m: Match) -> str | None:
    if _slice(m).dim < 2:
        return "it is cut along no dimension of windows"
    if reason := _refuse_all(m):
        return reason
    if _cut(m) is not None:
        return None
    return "the input would have to be cut"


@rule(
    "slice(conv(x, w)) = conv_padded_otherwise(x, w)",
    pattern=op("slice", Slice, of=(op("x", Conv),)),
    condition=_refuse_conv,
    exactness="reassociates",
    enables=True,  # a kernel has the functions behind
    repeats=True,
)
def slice_of_conv(m: Match) -> Node:
    """conv(x, w)[..., a:b:t] -> conv(x, w) of t times the stride, whose windows begin a later and end with b.

    x (N, C, *), w (O, C/groups, *k).  A causal convolution is padded on both sides and cut behind; what is cut off are
    the windows that reach into the padding.  Of a transposed one, t = 1, what is cut off is padding that it was not
    given.  Class reassociates.
    """
    conv, op = m["x"], _cut(m)
    assert op is not None
    return make(op, *conv.args, where=conv.where)


def _refuse_cut_input(m: Match) -> str | None:
    conv, like, length = m["conv"].op, _slice(m), m["x"].shape[_slice(m).dim]
    assert isinstance(conv, Conv)
    if conv.transposed:
        return "the convolution is transposed"
    if like.dim < 2 or like.step > 1:
        return "channels or samples are left out, or every other position"
    if not isinstance(length, int):
        return "it is not known how much is left out"
    left, right = conv.padding[like.dim - 2]
    padded = (like.start > 0 and left > 0) or (like.stop < length and right > 0)
    return "what is left out is padded" if padded else None


@rule(
    "conv(slice(x), w) = conv_cropped(x, w)",
    pattern=op("conv", Conv, of=(op("slice", Slice, of=(value("x"),)),)),
    condition=_refuse_cut_input,
    exactness="reassociates",
    enables=True,  # a kernel reads what lies in rows, and would be given a copy
)
def conv_of_slice(m: Match) -> Node:
    """conv(x[..., a:b], w) -> conv(x, w), padded by -a and b - L: windows that begin and end inside.

    x (N, C, *), cut along dimensions of L positions where nothing is added to what is cut off.  Class reassociates:
    another kernel's order.
    """
    conv, like, length = m["conv"], _slice(m), m["x"].shape[_slice(m).dim]
    assert isinstance(conv.op, Conv) and isinstance(length, int)
    d, padding = like.dim - 2, list(conv.op.padding)
    padding[d] = padding[d][0] - like.start, padding[d][1] + like.stop - length
    return make(replace(conv.op, padding=tuple(padding)), m["x"], *conv.args[1:], where=conv.where)


def _refuse_attention(m: Match) -> str | None:
    return _refuse_all(m) if _has_rows(m["x"], _slice(m).dim) else "it is not queries that are left out"


@rule(
    "slice(attention(q, k, v)) = attention(slice(q), k, v)",
    pattern=op("slice", Slice, of=(op("x", Attention),)),
    condition=_refuse_attention,
    exactness="reassociates",
    repeats=True,
)
def slice_of_attention(m: Match) -> Node:
    """softmax(q k^T + mask) v [:, :, a:b] -> softmax(q[:, :, a:b] k^T + mask[:, :, a:b]) v.

    q (N, H, L, E), the mask broadcast to (N, H, L, S) or left out.  Class reassociates.
    """
    attention, like = m["x"], _slice(m)
    q, k, v, mask = attention.args
    assert q is not None
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        mask = _sliced(mask, mask.ndim - 2, like)
    return make(attention.op, _sliced(q, 2, like), k, v, mask, where=attention.where)


def _refuse_view(m: Match) -> str | None:
    if isinstance(m["x"].op, Reshape) and _seen_as(m["x"], _slice(m).dim) is None:
        return "what is left out is part of a dimension, or of several"
    return _refuse(m)


@rule(
    "slice(view(x)) = view(slice(x))",
    pattern=op("slice", Slice, of=(op("x", Reshape, Permute),)),
    condition=_refuse_view,
    exactness="exact",
    enables=True,
    repeats=True,
)
def slice_of_view(m: Match) -> Node:
    """reshape(x)[:, a:b] -> reshape(x[:, a:b]), permute(x)[:, a:b] -> permute(x[.., a:b]).

    x (N, L, H, D) seen as (N, L, HD): the dimension that is cut is one of x.  Class exact.
    """
    view, like = m["x"], _slice(m)
    x = view.arg(0)
    if isinstance(view.op, Permute):
        return permute(_sliced(x, view.op.dims[like.dim], like), view.op.dims, copy=view.op.copy)
    dim = _seen_as(view, like.dim)
    assert dim is not None
    return reshape(_sliced(x, dim, like), m["slice"].shape)


def _refuse_cat(m: Match) -> str | None:
    dim, cat = _slice(m).dim, m["x"].op
    assert isinstance(cat, Cat)
    if dim == cat.dim:
        return "it is cut along the dimension of the parts"
    if m["slice"].shape == m["x"].shape:
        return "nothing is left out"
    rows = all(n == 1 for n in m["x"].shape[:dim])
    return None if rows else "what is left of a part would not lie side by side"


@rule(
    "slice(cat(x, y)) = cat(slice(x), slice(y))",
    pattern=op("slice", Slice, of=(op("x", Cat),)),
    condition=_refuse_cat,
    exactness="exact",
    enables=True,
    repeats=True,
)
def slice_of_cat(m: Match) -> Node:
    """cat(x, y)[a:b] -> cat(x[a:b], y[a:b]), where parts are beside each other along another dimension.

    x (N, K), y (N, L), of which rows are read.  A scan of what is concatenated has no use for the copy.  Class exact.
    """
    cat, like = m["x"], _slice(m)
    return make(cat.op, *(_sliced(part, like.dim, like) for part in cat.inputs), where=cat.where)


RULES: tuple[Rule, ...] = (
    slice_of_function,
    slice_of_norm,
    slice_of_matmul,
    slice_of_conv,
    conv_of_slice,
    slice_of_attention,
    slice_of_view,
    slice_of_cat,
)
