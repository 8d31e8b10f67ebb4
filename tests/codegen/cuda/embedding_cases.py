"""Streams that look up rows of embeddings, for the kernels of both targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from codegen.cuda.test_stream_kernels import fold, inp, pool

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make

I32, I64 = torch.int32, torch.int64
inf = float("inf")


def embedding(
    first: int, width: int, *shape: int, rows: int = 11, dtype: torch.dtype = torch.float32, kind: torch.dtype = I64
) -> Node:
    """Rows of input `first` at the indices that the next input holds."""
    return make(ops.Embedding(), inp(first, rows, width, dtype=dtype), inp(first + 1, *shape, dtype=kind))


def same_weight_twice() -> Node:
    weight = inp(0, 11, 12)
    rows = [make(ops.Embedding(), weight, inp(i, 3, 9, dtype=I64)) for i in (1, 2)]
    return fold(pointwise("mul", *rows), "sum", 1)


def used_twice() -> Node:
    x = embedding(0, 12, 3, 9)
    return fold(pointwise("mul", x, pointwise("sigmoid", x)), "sum", 1)


CASES: dict[str, Callable[[], Node]] = {
    "mean": lambda: fold(embedding(0, 32, 3, 9), "mean", 1),
    "indices of 32 bits": lambda: fold(embedding(0, 32, 3, 9, kind=I32), "sum", 1, keepdim=True),
    "one token": lambda: fold(embedding(0, 16, 3, 1), "mean", 1),
    "no vector": lambda: fold(embedding(0, 13, 3, 9), "max", 1),
    "min": lambda: fold(embedding(0, 8, 2, 5, kind=I32), "min", 1),
    "logsumexp": lambda: fold(embedding(0, 24, 2, 21), "logsumexp", 1),
    "tokens and width": lambda: fold(embedding(0, 20, 3, 9), "sum", 1, 2),
    "width": lambda: fold(embedding(0, 20, 3, 9), "mean", 2),
    "one sample": lambda: fold(embedding(0, 20, 9), "sum", 0),
    "one index": lambda: pointwise("tanh", embedding(0, 20)),
    "several dimensions of tokens": lambda: fold(embedding(0, 12, 2, 3, 4), "mean", 1, 2),
    "inner dimension of tokens": lambda: fold(embedding(0, 12, 2, 3, 4), "mean", 1),
    "relu": lambda: fold(pointwise("relu", embedding(0, 32, 3, 9)), "sum", 1),
    "mask of floats": lambda: fold(pointwise("mul", embedding(0, 12, 3, 9), inp(2, 3, 9, 1)), "sum", 1),
    "mask": lambda: fold(pointwise("where", inp(2, 3, 9, 1, dtype=torch.bool), embedding(0, 12, 3, 9), -inf), "max", 1),
    "mask of entries": lambda: pointwise("mul", embedding(0, 16, 3, 9), inp(2, 3, 9, 16, dtype=torch.bool)),
    "two weights": lambda: fold(pointwise("add", embedding(0, 12, 3, 9), embedding(2, 12, 3, 9, rows=8)), "mean", 1),
    "two weights of other tokens": lambda: fold(
        pointwise("add", embedding(0, 12, 3, 9), embedding(2, 12, 9, kind=I32)), "mean", 1
    ),
    "same weight twice": same_weight_twice,
    "used twice": used_twice,
    "scaled, with positions": lambda: pointwise("add", pointwise("mul", embedding(0, 16, 3, 9), 4.0), inp(2, 9, 16)),
    "under a value": lambda: fold(pointwise("mul", inp(2, 3, 9, 5), embedding(0, 1, 9)), "sum", 1),
    "pool along the width": lambda: fold(pool(embedding(0, 16, 3, 9), "max", (3,), 2, 1), "sum", 1),
    "after a pool": lambda: fold(pointwise("add", pool(inp(2, 3, 9, 16), "avg", (2,)), embedding(0, 8, 9)), "sum", 1),
    "then max": lambda: fold(fold(embedding(0, 12, 3, 9), "mean", 1), "max", 1),
    "then bias": lambda: pointwise("add", fold(embedding(0, 12, 3, 9), "mean", 1), inp(2, 12)),
    "many tokens": lambda: fold(embedding(0, 8, 2, 3000), "mean", 1),
    "many samples": lambda: fold(embedding(0, 12, 300, 5), "mean", 1),
}
