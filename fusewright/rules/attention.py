"""Attention that is spelled out: products, a softmax and a mask are one operation.

    softmax(q k^T / 8 + mask) v = attention(q, k, v)

Its scores never reach memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch

from fusewright.ir.build import cast, permute, pointwise, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Attention, Cast, Expand, Matmul, Number, Pad, Permute, Reshape, Size, Slice, Softmax, size
from fusewright.rules.operands import function, is_scaled, number, place, unwidened, usable
from fusewright.rules.rule import Match, Rule, op, rule, value
from fusewright.runtime.attention import ALIGNED

# So many masks are looked for: each sum has two ways on.
MASKS = 8


class _Mask(NamedTuple):
    """What is added to scores, or to scores whose first dimension is `split` in two, as windows of an image are."""

    added: Node
    split: tuple[Size, Size] | None


class _Scores(NamedTuple):
    """scale q k^T + mask, where the mask is `None` for one of zeros; k has a row for every column of the scores."""

    q: Node
    k: Node
    mask: Node | None
    scale: float


def _scores(node: Node) -> _Scores | None:
    """What `node` is, if scores of attention."""
    found = _unmasked(unwidened(node))
    if found is None:
        return None
    (node, scale), masks = _unscaled(found[0]), found[1]
    if node.args[2] is not None or node.ndim not in (3, 4):
        return None
    q, w = node.arg(0), node.arg(1)
    (q, of_q), (w, of_w) = _unscaled(q), _unscaled(w)
    assert isinstance(node.op, Matmul)
    k = w if node.op.transpose_w else _with_last_two_swapped(w)
    return _Scores(q, k, _sum(masks, node.shape), scale * of_q * of_w)


def _unmasked(node: Node, masks: int = MASKS) -> tuple[Node, list[_Mask]] | None:
    """The product below scores to which at most `masks` were added, perhaps scaled, and these."""
    if isinstance(_unscaled(node)[0].op, Matmul):
        return node, []
    shape, split = node.shape, None
    if isinstance(node.op, Reshape) and node.arg(0).shape[2:] == shape[1:]:
        node = node.arg(0)
        split = node.shape[0], node.shape[1]
    for x, mask in _added(node) if masks else ():
        if x.shape == node.shape and (found := _unmasked(_as(shape, x), masks - 1)) is not None:
            return found[0], [_Mask(_in_columns(mask), split), *found[1]]
    return None


def _in_columns(mask: Node) -> Node:
    """The mask with dimensions for rows and columns, as kernels want it."""
    return reshape(mask, (*(1,) * (2 - mask.ndim), *mask.shape))


def _as(shape: tuple[Size, ...], x: Node) -> Node:
    """x under a shape that it most often had before."""
    return x.arg(0) if isinstance(x.op, Reshape) and x.arg(0).shape == shape else reshape(x, shape)


def _sum(masks: Sequence[_Mask], shape: tuple[Size, ...]) -> Node | None:
    """One mask for scores of `shape`.

    What is added alike to all of a split dimension is added before the mask grows to the scores' number.
    """
    plain = [m.added for m in masks if m.split is None]
    for split in dict.fromkeys(m.split for m in masks if m.split is not None):
        alike = [m for m in plain if m.ndim < len(shape) or m.shape[0] == 1]
        plain = [m for m in plain if m not in alike]
        whole = _added_up([m.added for m in masks if m.split == split] + [reshape(m, (1, *m.shape)) for m in alike])
        plain.append(_repeated(whole, split, shape))
    return _added_up(plain) if plain else None


def _repeated(mask: Node, split: tuple[Size, Size], shape: tuple[Size, ...]) -> Node:
    """A copy of the mask for all that the first dimension of `shape` is of, in rows as aligned as kernels want them."""
    columns = mask.shape[-1]
    more = -columns % ALIGNED if isinstance(columns, int) and columns > 1 else 0
    if more:
        mask = make(Pad(((mask.ndim - 1, 0, more),)), mask)
    own = ((1,) * len(shape) + mask.shape)[1 - len(shape) :]
    whole = reshape(make(Expand((*split, *own)), mask), (shape[0], *own))
    return make(Slice(whole.ndim - 1, 0, columns), whole) if more else whole


def _added_up(masks: Sequence[Node]) -> Node:
    return reduce(partial(pointwise, "add"), masks)


def _added(node: Node) -> Iterator[tuple[Node, Node]]:
    """Values that something was added to, or of which some were set to -inf, and what that adds to them."""
    if function(node) == "add":
        for x, mask in ((node.arg(0), node.arg(1)), (node.arg(1), node.arg(0))):
            if not isinstance(mask.op, Number) and torch.promote_types(x.dtype, mask.dtype) == x.dtype:
                yield x, _in_reach(cast(mask, x.dtype))
    if function(node) == "where":
        condition, first, second = (node.arg(i) for i in range(3))
        for x, other in ((second, first), (first, second)):
            if number(other) == -math.inf:
                chosen = (-math.inf, 0.0) if x is second else (0.0, -math.inf)
                yield x, cast(pointwise("where", condition, *chosen), node.dtype)


def _in_reach(mask: Node) -> Node:
    """What is added, where the kernels' product of it with log2 e would be -inf no less than half the least number:
    rows that are hidden as a whole by that number have a mean, and those hidden by -inf have none."""
    if mask.dtype not in (torch.float32, torch.bfloat16):
        return mask
    raised = pointwise("clamp_min", mask, params=(torch.finfo(mask.dtype).min / 2,))
    return pointwise("where", pointwise("gt", mask, -math.inf), raised, mask)


def _unscaled(node: Node) -> tuple[Node, float]:
    """A value before it was multiplied by a number, and the number."""
    if is_scaled(node) and function(node) in ("mul", "div"):
        factor = number(node.arg(place(node)))
        x = node.arg(1 - place(node))
        if factor is not None and math.isfinite(factor) and factor > 0.0 and x.dtype == node.dtype:
            return x, factor if function(node) == "mul" else 1.0 / factor
    return node, 1.0


def _with_last_two_swapped(w: Node) -> Node:
    swapped = (*range(w.ndim - 2), w.ndim - 1, w.ndim - 2)
    if isinstance(w.op, Permute):  # most often it comes from there
        return permute(w.arg(0), tuple(w.op.dims[d] for d in swapped))
    return permute(w, swapped)


def _weights(node: Node) -> Node | None:
    """The softmax that `node` is, perhaps rounded to a narrower type."""
    node = node.arg(0) if isinstance(node.op, Cast) and node.dtype.itemsize < node.arg(0).dtype.itemsize else node
    last = isinstance(node.op, Softmax) and not node.op.log and node.op.dim == node.ndim - 1
    return node if last else None


def _found(m: Match) -> _Scores:
    weights = _weights(m["weights"])
    found = None if weights is None else _scores(weights.arg(0))
    assert found is not None  # the pattern asks for it
    return found


def _is_attention(root: Node) -> bool:
    weights = _weights(root.arg(0))
    return weights is not None and _scores(weights.arg(0)) is not None


def _refuse_attention(m: Match) -> str | None:
    root, v = m["root"], m["v"]
    scores = _found(m)
    if root.args[2] is not None or root.op.transpose_w:  # type: ignore[attr-defined]
        return "it is no plain product with the values"
    q, k = scores.q, scores.k
    if not q.ndim == k.ndim == v.ndim or q.shape[:-2] != k.shape[:-2] or k.shape[:-2] != v.shape[:-2]:
        return "queries, keys and values are not as many"
    if not q.dtype == k.dtype == v.dtype == root.dtype or not root.dtype.is_floating_point:
        return "they are of several types"
    if root.device.type == "cpu":
        return "the kernels of a CPU lose NaN"
    if not all(isinstance(n, int) and n > 0 and n % 8 == 0 for n in (q.shape[-1], v.shape[-1])):
        return "the kernels take heads of a number of eights"
    if not usable(scores.scale, root.dtype):
        return "the scale is not normal"
    return None


@rule(
    "softmax(q k^T) v = attention(q, k, v)",
    pattern=op("root", Matmul, of=(value("weights"), value("v")), where=_is_attention),
    condition=_refuse_attention,
    exactness="reassociates",
)
def spelled_out(m: Match) -> Node:
    """softmax(s q k^T + mask) v -> attention(q, k, v), where masks are added, or scores set to -inf; to windows of
    images, whose number is part of the first dimension, each its own.

    q (N, H, L, E), k (N, H, S, E), v (N, H, S, D), or all without H; s > 0 may be anyone's factor.  E and D are
    multiples of 8, and s is normal; masks are of types that q's holds.  Class reassociates.
    """
    root, v = m["root"], m["v"]
    q, k, mask, scale = _found(m)
    if root.ndim == 3:
        q, k, v = (reshape(t, (t.shape[0], 1, *t.shape[1:])) for t in (q, k, v))
        if mask is not None and mask.ndim == 3:
            mask = reshape(mask, (mask.shape[0], 1, *mask.shape[1:]))
    return reshape(make(Attention(scale), q, k, v, mask), root.shape)


def _refuse_positions(m: Match) -> str | None:
    root, turn, attention = m["root"], m["turn"], m["attention"].op
    assert isinstance(turn.op, Permute) and isinstance(attention, Attention)
    if attention.turned or turn.op.dims != (0, 2, 1, 3):
        return "other dimensions are swapped"
    ends = set(accumulate(reversed(root.shape), mul))
    if not turn.op.copy and {turn.shape[3], size(turn.shape[2] * turn.shape[3])} <= ends:
        return "heads stay apart, and what is a view lies as before"
    return None


@rule(
    "permute(attention(q, k, v)) = attention(q, k, v) by positions",
    pattern=op("root", Reshape, of=(op("turn", Permute, of=(op("attention", Attention),)),)),
    condition=_refuse_positions,
    exactness="exact",
    enables=True,
)
def by_positions(m: Match) -> Node:
    """(N, H, L, D) -> (N, L, H, D) -> (N, L, H*D), which is a copy in eager, is how the kernels write.  Class exact."""
    attention = m["attention"]
    assert isinstance(attention.op, Attention)
    return reshape(make(replace(attention.op, turned=True), *attention.args), m["root"].shape)


RULES: tuple[Rule, ...] = (spelled_out, by_positions)
