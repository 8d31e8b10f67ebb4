"""Short constructors, so that a rule's replacement reads like the algebra it states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy
import torch

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Size
from fusewright.ir.pointwise import Scalar


def pointwise(fn: str, *args: Node | Scalar | sympy.Expr, params: tuple[Scalar | str, ...] = ()) -> Node:
    """A pointwise function; Python numbers may stand for operands."""
    nodes = [a if isinstance(a, Node) else make(ops.Number(a)) for a in args]
    return make(ops.Pointwise(fn, params), *nodes)


def reshape(x: Node, shape: Sequence[Size]) -> Node:
    """x under another shape; x itself when it has it already."""
    x = squeezed(x, shape)
    return x if tuple(shape) == x.shape else make(ops.Reshape(tuple(shape)), x)


def squeezed(x: Node, shape: Sequence[Size]) -> Node:
    """What has this shape and became x by dimensions of length 1 that came or went, which is always a view; else x."""
    if not isinstance(x.op, ops.Reshape) or x.arg(0).shape != tuple(shape):
        return x
    before, after = ([n for n in s if n != 1] for s in (shape, x.shape))
    return x.arg(0) if before == after else x


def permute(x: Node, dims: Sequence[int], *, copy: bool = False) -> Node:
    """x with its dimensions in another order, as a view unless `copy`; x itself for the identity."""
    return x if tuple(dims) == tuple(range(x.ndim)) else make(ops.Permute(tuple(dims), copy), x)


def before_permute(x: Node, dims: Sequence[int]) -> Node:
    """x, which is broadcast to permute(y, dims), as it is to y."""
    if x.ndim == 0 or isinstance(x.op, ops.Number):
        return x
    places = [dims.index(d) for d in range(len(dims))]
    shape = (1,) * (len(dims) - x.ndim) + x.shape
    longer = [i for i in places if shape[i] != 1]
    if longer == sorted(longer):  # only dimensions of one element move
        return reshape(x, [shape[i] for i in places])
    return permute(reshape(x, shape), places)


def of_part_read(conv: Node) -> Node:
    """The same convolution of the part of x that negative padding leaves; `conv` where there is none."""
    op, x = conv.op, conv.arg(0)
    assert isinstance(op, ops.Conv)
    if all(min(sides) >= 0 for sides in op.padding):
        return conv
    for d, (left, right) in enumerate(op.padding, start=2):
        length = x.shape[d]
        if left < 0 or right < 0:
            assert isinstance(length, int)
            x = make(ops.Slice(d, max(-left, 0), length - max(-right, 0)), x)
    padding = tuple((max(left, 0), max(right, 0)) for left, right in op.padding)
    return make(replace(op, padding=padding), x, *conv.args[1:], where=conv.where)


def cast(x: Node, dtype: torch.dtype) -> Node:
    """x in another dtype; x itself when it has it already."""
    return x if x.dtype == dtype else make(ops.Cast(dtype), x)


def total(x: Node, dims: Sequence[int], *, keepdim: bool = False) -> Node:
    """The sum over `dims`; x itself when there are none."""
    return x if not dims else make(ops.Reduce("sum", tuple(sorted(dims)), keepdim), x)


def range_sum(x: Node, table: dict[int, tuple[ops.Slot, ...]], dtype: torch.dtype) -> Node:
    """The range sum of x, dropping dimensions along which it would do nothing."""
    kept = {d: slots for d, slots in table.items() if slots != identity_slots(x.shape[d])}
    if not kept:
        return cast(x, dtype)
    return make(ops.RangeSum(tuple(sorted(kept.items())), dtype), x)


def identity_slots(length: Size) -> tuple[ops.Slot, ...]:
    """One slot per index: the range sum that changes nothing."""
    return tuple(ops.Slot(i, i + 1, 1, 1.0) for i in range(length)) if isinstance(length, int) else ()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` are carried in: float64 for float32 and float64, float32 for half precisions."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64
