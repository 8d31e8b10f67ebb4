"""Losses of classes t (N, *), 0 where t is ignored: their sum, or their mean by the weights of classes."""

from __future__ import annotations

from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise, reshape, total
from fusewright.ir.intervals import interval
from fusewright.ir.node import Node, make

Reduction = Literal["none", "mean", "sum"]


def carried(dtype: torch.dtype) -> torch.dtype:
    """In what losses of logits of `dtype` are added up."""
    return dtype if dtype.itemsize > 2 else torch.float32


def class_weights(weight: Node | None, target: Node, ignore: int, dtype: torch.dtype) -> Node | None:
    """The weight of each class in `target`; 0 of those that are ignored, which need not be classes: (N, *).  `None`
    where all of them are 1."""
    classes = (
        target if is_of_classes(target, ignore) else pointwise("where", pointwise("ne", target, ignore), target, 0)
    )
    if weight is None:
        return None if classes is target else cast(pointwise("ne", target, ignore), dtype)
    picked = make(ops.Embedding(), reshape(weight, (*weight.shape, 1)), classes)
    return counted(reshape(picked, target.shape), target, ignore)


def counted(each: Node, target: Node, ignore: int) -> Node:
    """Losses of classes, 0 of those that are ignored."""
    return each if is_of_classes(target, ignore) else pointwise("where", pointwise("ne", target, ignore), each, 0.0)


def is_of_classes(target: Node, ignore: int) -> bool:
    """Whether what is ignored is known to be none of `target`: that is negative, and these are not."""
    return ignore == ops.NEVER or (ignore < 0 and _is_natural(target))


def _is_natural(node: Node) -> bool:
    """Whether whole numbers are positive or 0: positions, as a contrastive loss has them, and indices of extremes."""
    match node.op:
        case ops.Reshape() | ops.Expand():
            return _is_natural(node.arg(0))
        case ops.Reduce() as reduce:
            return reduce.gives_index
        case ops.Positions():
            return True
        case ops.Pointwise("remainder"):
            return interval(node.arg(1))[0] > 0  # of its sign
    return False


def reduced(each: Node, weights: Node | None, reduction: Reduction) -> Node:
    """Losses of classes of such `weights`, as `reduction` says; a sum has the type that it is carried in."""
    if reduction == "none":
        return each
    each = cast(each, carried(each.dtype))
    if weights is None and reduction == "mean":
        return make(ops.Reduce("mean", tuple(range(each.ndim))), each)
    loss = total(each, range(each.ndim))
    if weights is None or reduction == "sum":
        return loss
    return pointwise("div", loss, total(cast(weights, each.dtype), range(weights.ndim)))
