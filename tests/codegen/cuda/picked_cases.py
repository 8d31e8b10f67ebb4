"""Streams that read what a class has at its number, and compare whole numbers, for the kernels of both targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from codegen.cuda.test_stream_kernels import BF16, F32, F64, fold, inp

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise, reshape
from fusewright.ir.node import Node, make

I32, I64 = torch.int32, torch.int64


def loss(x: Node, classes: Node, ignore: int = -100) -> Node:
    """-x[n, t] of each row, with the dimension of the classes."""
    found = make(ops.Nll(ignore), x, classes, None)
    return reshape(found, (x.shape[0], 1, *x.shape[2:]))


def shifted(*shape: int, ignore: int = -100, dtype: torch.dtype = F32) -> Node:
    """The loss of softmaxes."""
    x = inp(0, *shape, dtype=dtype)
    return fold(pointwise("add", x, loss(x, inp(1, shape[0], *shape[2:], dtype=I64), ignore)), "logsumexp", 1)


def elements(*shape: int, ignore: int = ops.NEVER, dtype: torch.dtype = F32) -> Node:
    """How far elements are above the one of their class."""
    x = inp(0, *shape, dtype=dtype)
    own = pointwise("neg", make(ops.Nll(ignore), x, inp(1, shape[0], *shape[2:], dtype=I64), None))
    above = pointwise("sub", x, reshape(own, (shape[0], 1, *shape[2:])))
    return fold(pointwise("clamp_min", pointwise("add", above, 1), params=(0,)), "sum", 1)


def counted(fn: str, number: int, kind: torch.dtype = I64) -> Node:
    return cast(pointwise(fn, inp(0, 40, 3, dtype=kind), number), F32)


PICKED: dict[str, Callable[[], Node]] = {
    "loss": lambda: shifted(6, 20),
    "no vector": lambda: shifted(5, 13),
    "some ignored": lambda: shifted(16, 12, ignore=2),
    "of halves": lambda: shifted(6, 24, dtype=BF16),
    "of float64": lambda: shifted(6, 20, ignore=1, dtype=F64),
    "elements": lambda: elements(6, 20),
    "elements, no vector": lambda: elements(5, 13, dtype=BF16),
    "elements, some ignored": lambda: elements(16, 12, ignore=2, dtype=F64),
    "alone": lambda: pointwise("mul", loss(inp(0, 6, 20), inp(1, 6, dtype=I64)), inp(2, 6, 8)),
}
COMPARED: dict[str, Callable[[], Node]] = {
    "not ignored": lambda: fold(counted("ne", 3), "sum", 0, 1),
    "of 32 bits": lambda: fold(counted("ge", 3, I32), "mean", 1),
    "as they are": lambda: pointwise("mul", cast(inp(0, 40, 3, dtype=I64), F32), inp(1, 40, 3)),
    "chosen": lambda: pointwise("where", pointwise("lt", inp(0, 40, 3, dtype=I64), 4), inp(1, 40, 3), 0.5),
}


def given_as(name: str) -> str:
    """How text calls the index of a case: as it is in memory, where none is ignored, else as it was given."""
    return "d.indices1[" if name in ("elements", "elements, no vector") else "index"
