"""Attention that is spelled out: products, a softmax and a mask are one operation, whose scores never reach memory.

softmax(q k^T / 8 + mask) v = attention(q, k, v)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from fusewright.ir.build import cast, permute, pointwise, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Attention, Cast, Matmul, Permute, Reshape, Softmax
from fusewright.rules.operands import function, is_scaled, number, place
from fusewright.rules.rule import Match, Rule, op, rule, value


class _Scores(NamedTuple):
    """scale q k^T + mask, where the mask is `None` for one of zeros; k has a row for every column of the scores."""

    q: Node
    k: Node
    mask: Node | None
    scale: float


def _scores(node: Node) -> _Scores | None:
    """What `node` is, if scores of attention."""
    mask: Node | None = None
    node = _unwidened(node)
    while (peeled := _unmasked(node)) is not None:
        node, added = peeled
        mask = added if mask is None else pointwise("add", mask, added)
    node, scale = _unscaled(node)
    if not isinstance(node.op, Matmul) or node.args[2] is not None or node.ndim not in (3, 4):
        return None
    q, w = node.arg(0), node.arg(1)
    (q, of_q), (w, of_w) = _unscaled(q), _unscaled(w)
    k = w if node.op.transpose_w else _with_last_two_swapped(w)
    return _Scores(q, k, mask, scale * of_q * of_w)


def _unmasked(node: Node) -> tuple[Node, Node] | None:
    """Scores before something was added to them, or some were set to -inf, and what that adds to them."""
    if function(node) == "add":
        for x, mask in (node.args, node.args[::-1]):
            if x is not None and mask is not None and x.shape == node.shape and _is_product(x):
                return x, mask
    if function(node) == "where":
        condition, first, second = (node.arg(i) for i in range(3))
        for x, other in ((second, first), (first, second)):
            if number(other) == -math.inf and x.shape == node.shape and _is_product(x):
                chosen = (-math.inf, 0.0) if x is second else (0.0, -math.inf)
                return x, cast(pointwise("where", condition, *chosen), node.dtype)
    return None


def _is_product(node: Node) -> bool:
    """Whether scores of attention are below, not one of the masks."""
    node = _unwidened(node)
    while (peeled := _unmasked(node)) is not None:
        node = peeled[0]
    return isinstance(_unscaled(node)[0].op, Matmul)


def _unscaled(node: Node) -> tuple[Node, float]:
    """A value before it was multiplied by a number, and the number."""
    if is_scaled(node) and function(node) in ("mul", "div"):
        factor = number(node.arg(place(node)))
        x = node.arg(1 - place(node))
        if factor is not None and math.isfinite(factor) and factor > 0.0 and x.dtype == node.dtype:
            return x, factor if function(node) == "mul" else 1.0 / factor
    return node, 1.0


def _unwidened(node: Node) -> Node:
    """A value before it was cast to a type that holds it."""
    wider = isinstance(node.op, Cast) and node.dtype.itemsize > node.arg(0).dtype.itemsize
    return node.arg(0) if wider and node.arg(0).dtype.is_floating_point else node


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
    if not isinstance(q.shape[-1], int) or q.shape[-1] % 8 or v.shape[-1] % 8:
        return "the kernels take heads of a number of eights"
    return None


@rule(
    "softmax(q k^T) v = attention(q, k, v)",
    pattern=op("root", Matmul, of=(value("weights"), value("v")), where=_is_attention),
    condition=_refuse_attention,
    exactness="reassociates",
)
def spelled_out(m: Match) -> Node:
    """softmax(s q k^T + mask) v -> attention(q, k, v), where masks are added, or scores set to -inf.

    q (N, H, L, E), k (N, H, S, E), v (N, H, S, D), or all without H; s > 0 may be anyone's factor.  E and D are
    multiples of 8.  Class reassociates.
    """
    root, v = m["root"], m["v"]
    q, k, mask, scale = _found(m)
    if root.ndim == 3:
        q, k, v = (reshape(t, (t.shape[0], 1, *t.shape[1:])) for t in (q, k, v))
        if mask is not None and mask.ndim == 3:
            mask = reshape(mask, (mask.shape[0], 1, *mask.shape[1:]))
    mask = None if mask is None else cast(mask, q.dtype)
    return reshape(make(Attention(scale), q, k, v, mask), root.shape)


@rule(
    "permute(attention(q, k, v)) = attention(q, k, v) by positions",
    pattern=op("root", Reshape, of=(op("turn", Permute, of=(op("attention", Attention),)),)),
    condition=lambda m: None if m["turn"].op.dims == (0, 2, 1, 3) else "other dimensions are swapped",  # type: ignore[attr-defined]
    exactness="exact",
    enables=True,
)
def by_positions(m: Match) -> Node:
    """(N, H, L, D) -> (N, L, H, D) -> (N, L, H*D) is how the kernels write.  Class exact."""
    attention = m["attention"]
    assert isinstance(attention.op, Attention)
    return reshape(make(replace(attention.op, turned=True), *attention.args), m["root"].shape)


RULES: tuple[Rule, ...] = (spelled_out, by_positions)
