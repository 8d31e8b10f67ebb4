"""Streams that read views as they lie in the tensors that they are of, for the kernels of both targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from codegen.cuda.test_stream_kernels import fold, inp, pool

from fusewright.ir import ops
from fusewright.ir.build import permute, pointwise, reshape
from fusewright.ir.node import Node, make


def part(x: Node, dim: int, begin: int, end: int, step: int = 1) -> Node:
    return make(ops.Slice(dim % x.ndim, begin, end, step), x)


def halves(x: Node, dim: int) -> tuple[Node, Node]:
    length = x.shape[dim]
    return part(x, dim, 0, length // 2), part(x, dim, length // 2, length)


def gated(x: Node, dim: int) -> Node:
    """A gated linear unit."""
    a, b = halves(x, dim)
    return pointwise("mul", a, pointwise("sigmoid", b))


def column(x: Node, which: int) -> Node:
    """One index of the last dimension: neighbours lie apart."""
    return reshape(part(x, -1, which, which + 1), x.shape[:-1])


def turned(x: Node, cos: Node, sin: Node) -> Node:
    """One half of a rotary embedding."""
    a, b = halves(x, x.ndim - 1)
    return pointwise("sub", pointwise("mul", a, cos), pointwise("mul", b, sin))


IMAGE = (2, 6, 8, 12)

CASES: dict[str, Callable[[], Node]] = {
    "gated": lambda: gated(inp(0, 5, 32), 1),
    "gated, no vector": lambda: gated(inp(0, 5, 22), 1),
    "gated tokens": lambda: gated(inp(0, 2, 7, 48), 2),
    "gated channels": lambda: gated(inp(0, *IMAGE), 1),
    "turned": lambda: turned(inp(0, 2, 3, 5, 16), inp(1, 5, 8), inp(2, 5, 8)),
    "channels": lambda: pointwise("relu", part(inp(0, *IMAGE), 1, 2, 5)),
    "channels, no vector": lambda: pointwise("relu", part(inp(0, 3, 6, 5, 3), 1, 1, 6)),
    "numbers per channel": lambda: pointwise("mul", part(inp(0, *IMAGE), 1, 0, 3), inp(1, 3, 1, 1)),
    "rows and columns": lambda: pointwise("tanh", part(part(inp(0, *IMAGE), 2, 1, 7), 3, 4, 12)),
    "rows within channels": lambda: pointwise("tanh", part(part(inp(0, *IMAGE), 1, 1, 4), 2, 1, 7)),
    "a slice of a slice": lambda: pointwise("tanh", part(part(inp(0, 5, 40), 1, 4, 36), 1, 8, 24)),
    "inner dimensions together": lambda: pointwise("exp", part(inp(0, 3, 4, 10, 4), 2, 2, 6)),
    "inner dimensions, no vector": lambda: pointwise("exp", part(inp(0, 3, 4, 10, 3), 2, 3, 6)),
    "columns, the first left out": lambda: pointwise("exp", part(inp(0, 7, 33), 1, 1, 33)),
    "differences": lambda: pointwise("sub", part(inp(0, 4, 9, 8), 1, 1, 9), part(inp(0, 4, 9, 8), 1, 0, 8)),
    "beside a tensor": lambda: pointwise("add", inp(0, 5, 16), part(inp(1, 5, 20), 1, 4, 20)),
    "a mask": lambda: pointwise("where", part(inp(0, 5, 20, dtype=torch.bool), 1, 4, 20), inp(1, 5, 16), 0.0),
    "broadcast": lambda: pointwise("mul", inp(0, 3, 5, 8), part(inp(1, 5, 12), 1, 2, 10)),
    "pool": lambda: pool(part(inp(0, *IMAGE), 1, 2, 5), "avg", (2, 2)),
    "pool over the slice": lambda: pool(part(part(inp(0, *IMAGE), 2, 1, 7), 3, 4, 12), "max", (2, 2)),
    "pool over an odd slice": lambda: pool(part(inp(0, 2, 3, 9, 11), 3, 3, 10), "max", (2, 2)),
    "padded pool": lambda: pool(part(part(inp(0, 2, 3, 9, 11), 2, 2, 9), 3, 1, 9), "max", (3, 3), 2, 1),
    "after a pool": lambda: pointwise("add", pool(inp(0, *IMAGE), "max", (2, 2)), part(inp(1, 2, 8, 4, 6), 1, 1, 7)),
    "sum over positions": lambda: fold(part(inp(0, *IMAGE), 1, 2, 5), "sum", 2, 3),
    "sum over the slice": lambda: fold(gated(inp(0, 5, 64), 1), "sum", 1),
    "mean over channels": lambda: fold(pointwise("exp", part(inp(0, *IMAGE), 1, 1, 4)), "mean", 1),
    "then max": lambda: fold(fold(part(inp(0, *IMAGE), 1, 2, 5), "logsumexp", 1), "max", 1, 2),
    "columns": lambda: pointwise("mul", column(inp(0, 6, 33, 4), 3), pointwise("exp", column(inp(1, 6, 33, 3), 0))),
    "columns of one": lambda: pointwise("sub", column(xyz := inp(0, 37, 3), 2), column(xyz, 1)),
    "a column beside a tensor": lambda: pointwise("mul", inp(0, 6, 32), column(inp(1, 6, 32, 4), 1)),
    "a column of truth values": lambda: pointwise(
        "where", column(inp(0, 6, 32, 4, dtype=torch.bool), 1), inp(1, 6, 32), 0.0
    ),
    "a column of a slice": lambda: pointwise("exp", column(part(inp(0, 6, 40, 4), 1, 3, 36), 2)),
    "a column broadcast": lambda: pointwise("mul", inp(0, 6, 5, 32), column(inp(1, 32, 4), 1)),
    "sum over columns": lambda: fold(pointwise("mul", column(inp(0, 6, 40, 4), 1), inp(1, 6, 40)), "sum", 1),
    "sums of a column": lambda: fold(pointwise("mul", column(inp(0, 40, 6, 4), 1), inp(1, 40, 6)), "max", 0),
    "long rows": lambda: fold(part(inp(0, 2, 20_000), 1, 4, 16_000), "sum", 1),
}


def heads(x: Node) -> Node:
    """(batch, tokens, heads, features) as (batch, heads, tokens, features)."""
    return permute(x, (0, 2, 1, 3))


def picked(x: Node, which: int) -> Node:
    """The heads of one of several projections (batch, tokens, projections, heads, features)."""
    one = part(permute(x, (2, 0, 3, 1, 4)), 0, which, which + 1)
    return reshape(one, one.shape[1:])


def rotated(x: Node) -> Node:
    """Its halves exchanged."""
    a, b = halves(x, x.ndim - 1)
    return make(ops.Cat(x.ndim - 1), b, a)


def negated(x: Node) -> Node:
    """Its halves exchanged, the first one negative."""
    a, b = halves(x, x.ndim - 1)
    return make(ops.Cat(x.ndim - 1), pointwise("neg", b), a)


def rotary(x: Node, cos: Node, sin: Node) -> Node:
    return pointwise("add", pointwise("mul", x, cos), pointwise("mul", negated(x), sin))


CASES |= {
    "heads": lambda: pointwise("tanh", heads(inp(0, 2, 5, 3, 8))),
    "heads, no vector": lambda: pointwise("tanh", heads(inp(0, 2, 5, 3, 5))),
    "heads beside heads": lambda: pointwise("mul", heads(inp(0, 2, 5, 3, 8)), inp(1, 2, 3, 5, 8)),
    "some heads": lambda: pointwise("exp", part(heads(inp(0, 2, 5, 4, 8)), 1, 1, 3)),
    "heads, some features": lambda: pointwise("exp", part(heads(inp(0, 2, 5, 3, 32)), 3, 8, 24)),
    "one projection": lambda: pointwise("exp", picked(inp(0, 2, 5, 3, 2, 8), 1)),
    "the first projection": lambda: pointwise("exp", picked(inp(0, 2, 5, 3, 2, 8), 0)),
    "several projections": lambda: pointwise(
        "mul", picked(inp(0, 2, 5, 3, 2, 8), 1), pointwise("tanh", picked(inp(0, 2, 5, 3, 2, 8), 2))
    ),
    "planes exchanged": lambda: pointwise("tanh", permute(inp(0, 3, 4, 5, 2), (1, 0, 2, 3))),
    "sum over heads": lambda: fold(heads(inp(0, 2, 5, 3, 8)), "sum", 1),
    "pooled heads": lambda: pool(heads(inp(0, 2, 6, 3, 8)), "max", (2, 2)),
    "one index of heads": lambda: pointwise("tanh", picked(inp(0, 2, 5, 3, 4, 8), 2)),
    "halves exchanged": lambda: pointwise("tanh", rotated(inp(0, 5, 16))),
    "halves in bfloat16": lambda: pointwise("tanh", rotated(inp(0, 5, 32, dtype=torch.bfloat16))),
    "halves exchanged, one negated": lambda: pointwise("tanh", negated(inp(0, 5, 16))),
    "negated channels": lambda: pointwise(
        "tanh", make(ops.Cat(1), pointwise("neg", inp(0, 3, 2, 4)), inp(1, 3, 3, 4), pointwise("neg", inp(2, 3, 1, 4)))
    ),
    "parts side by side": lambda: pointwise("tanh", make(ops.Cat(1), inp(0, 5, 8), inp(1, 5, 4), inp(2, 5, 12))),
    "parts of other tensors": lambda: pointwise(
        "tanh", make(ops.Cat(1), part(inp(0, 5, 20), 1, 4, 12), part(inp(1, 5, 12), 1, 0, 4))
    ),
    "rotary": lambda: rotary(inp(0, 2, 3, 5, 16), inp(1, 5, 16), inp(2, 5, 16)),
    "rotary of heads": lambda: rotary(heads(inp(0, 2, 5, 3, 16)), inp(1, 2, 1, 5, 16), inp(2, 2, 1, 5, 16)),
    "rotary of some heads": lambda: rotary(part(heads(inp(0, 2, 5, 4, 16)), 1, 1, 4), inp(1, 5, 16), inp(2, 5, 16)),
}
