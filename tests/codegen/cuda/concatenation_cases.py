"""Streams that read what is concatenated part by part, for the kernels of both targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from codegen.cuda.test_stream_kernels import fold, inp, pool

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make


def cat(dim: int, *parts: Node) -> Node:
    return make(ops.Cat(dim), *parts)


def channels(*counts: int, first: int = 0, shape: tuple[int, ...] = (4, 8), dtype: torch.dtype = torch.float32) -> Node:
    """Three samples of so many channels each, one input after the other."""
    return cat(1, *(inp(first + i, 3, n, *shape, dtype=dtype) for i, n in enumerate(counts)))


def used_twice() -> Node:
    x = channels(3, 5)
    return pointwise("mul", x, pointwise("sigmoid", x))


def same_part_twice() -> Node:
    x = inp(0, 3, 4, 5, 7)
    return pointwise("relu", cat(1, x, inp(1, 3, 2, 5, 7), x))


def scaled(x: Node, first: int) -> Node:
    """By numbers per channel, as a batch norm does."""
    weights = (inp(first + i, x.shape[1], 1, 1) for i in range(2))
    return pointwise("relu", pointwise("add", pointwise("mul", x, next(weights)), next(weights)))


CASES: dict[str, Callable[[], Node]] = {
    "relu": lambda: pointwise("relu", channels(3, 5)),
    "one channel each": lambda: pointwise("tanh", channels(1, 1, 1)),
    "many parts": lambda: pointwise("relu", channels(6, *(3,) * 24, shape=(2, 6))),
    "numbers per channel": lambda: scaled(channels(3, 5, 8), 3),
    "no vector": lambda: scaled(channels(2, 3, shape=(3, 5)), 2),
    "samples": lambda: pointwise("relu", cat(0, inp(0, 2, 3, 8), inp(1, 4, 3, 8))),
    "rows": lambda: pointwise("relu", cat(2, inp(0, 2, 3, 4, 8), inp(1, 2, 3, 1, 8))),
    "used twice": used_twice,
    "same part twice": same_part_twice,
    "two of them": lambda: pointwise("mul", channels(3, 5), channels(4, 2, 2, first=2)),
    "two along other dimensions": lambda: pointwise(
        "mul", channels(3, 5), cat(2, inp(2, 3, 8, 1, 8), inp(3, 3, 8, 3, 8))
    ),
    "beside a tensor": lambda: pointwise("add", channels(3, 5), inp(2, 3, 8, 4, 8)),
    "mask": lambda: pointwise(
        "where", cat(1, inp(0, 3, 2, 9, dtype=torch.bool), inp(1, 3, 3, 9, dtype=torch.bool)), inp(2, 3, 5, 9), 0.0
    ),
    "pool": lambda: pool(scaled(channels(3, 5), 2), "avg", (2, 2)),
    "padded pool": lambda: pool(channels(2, 5, shape=(5, 7)), "max", (3, 3), 2, 1),
    "after a pool": lambda: pointwise("add", pool(inp(2, 3, 8, 8, 8), "max", (2, 2)), channels(3, 5, shape=(4, 4))),
    "sum over positions": lambda: fold(channels(3, 5), "sum", 2, 3),
    "mean over channels": lambda: fold(pointwise("exp", channels(3, 5)), "mean", 1),
    "max over all": lambda: fold(channels(3, 5), "max", 1, 2, 3),
    "then max": lambda: fold(fold(channels(3, 5), "logsumexp", 1), "max", 1, 2),
    "many positions": lambda: fold(channels(3, 5, shape=(50, 64)), "sum", 1, 2, 3),
}
