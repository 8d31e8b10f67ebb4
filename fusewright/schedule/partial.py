"""Reductions over some of a convolution's positions, in two steps: of windows inside a tile, then of what those give.

    reduce(y, some of the positions) = reduce(pool(y), the same)

A tile has not all values that one result needs, but whole windows of them: a fraction of y reaches memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.schedule.chain import Users, parse

# Positions of a window, about: one thread goes through them.
WINDOW = 8

_POOLED: dict[str, Literal["avg", "max", "min"]] = {"sum": "avg", "mean": "avg", "max": "max", "min": "min"}


@dataclass(frozen=True)
class Split:
    """The reduction `root` in two steps: `part` is the last node of the first."""

    root: Node
    part: Node

    def whole(self, part: Node) -> Node:
        """The reduction, from what stands for `part`."""
        op, x = self.root.op, self.root.arg(0)
        assert isinstance(op, ops.Reduce)
        if op.kind != "mean":
            return make(op, part, where=self.root.where)
        total = make(ops.Reduce("sum", op.dims, op.keepdim), part, where=self.root.where)
        return pointwise("mul", total, 1 / prod(d for d in (x.shape[i] for i in op.dims) if isinstance(d, int)))

    def users(self, users: Users) -> Users:
        """Those of the graph's nodes and of the first step's: each of the latter has one."""
        own = (self.part, self.part.arg(0)) if isinstance(self.part.op, ops.Reduce) else (self.part,)
        return {**users, **dict.fromkeys(own, 1)}


def split(root: Node, users: Users) -> Split | None:
    """The two steps of a reduction over some of the positions, and perhaps the channels, of a chain from a convolution.

    Sums of half precisions stay whole: they would be rounded in between.  So does what follows window sums, which a
    tile forms only where it has no windows of its own.
    """
    op = root.op
    if not isinstance(op, ops.Reduce) or op.kind not in _POOLED or op.dtype is not None:
        return None
    x = root.arg(0)
    positions = [d for d in op.dims if d > 1]
    lengths = [x.shape[d] for d in range(2, x.ndim)]
    if 0 in op.dims or not 0 < len(positions) < len(lengths) or not all(isinstance(n, int) for n in lengths):
        return None
    chain = parse(x, users, lambda n: isinstance(n.op, ops.Conv))
    if isinstance(chain, str) or (op.kind in ("sum", "mean") and x.dtype.itemsize < torch.float32.itemsize):
        return None
    if isinstance(chain.source.arg(0).op, ops.RangeSum):
        return None
    assert isinstance(chain.source.op, ops.Conv)
    strides = chain.source.op.stride if chain.source.op.transposed else (1,) * len(lengths)
    window = [1] * len(lengths)
    for d in positions:
        window[d - 2] = _window(int(lengths[d - 2]), strides[d - 2], len(positions))
    if x.device.type != "cpu" and any(k % s for k, s in zip(window, strides, strict=True)):
        return None  # not every GPU pools windows that begin between strides, and a first step has nothing shorter
    ragged = any(int(n) % k for n, k in zip(lengths, window, strict=True))
    none, kernel = (0,) * len(window), tuple(window)
    divisor = 1 if _POOLED[op.kind] == "avg" else None
    pool = ops.Pool(_POOLED[op.kind], kernel, kernel, none, (1,) * len(window), ragged, divisor=divisor)
    part = make(pool, x, where=root.where)
    if 1 in op.dims:
        part = make(ops.Reduce("sum" if op.kind == "mean" else op.kind, (1,), True), part, where=root.where)
    return Split(root, part)


def _window(length: int, stride: int, dimensions: int) -> int:
    """Positions of a window along one of `dimensions` dimensions: a multiple of a transposed convolution's stride."""
    wanted = min(length, WINDOW if dimensions == 1 else WINDOW // 2)
    return ceil(wanted / stride) * stride
