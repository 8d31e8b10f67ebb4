"""Losses of classes t (N, *), 0 where t is ignored: their sum, or their mean by the weights of classes."""

from __future__ import annotations

from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise, reshape, total
from fusewright.ir.node import Node, make

Reduction = Literal["none", "mean", "sum"]


def carried(dtype: torch.dtype) -> torch.dtype:
    """In what losses of logits of `dtype` are added up."""
    return dtype if dtype.itemsize > 2 else torch.float32


def class_weights(weight: Node | None, target: Node, ignore: int, dtype: torch.dtype) -> Node:
    """The weight of each class in `target`; 0 of those that are ignored, which need not be classes: (N, *)."""
    is_counted = pointwise("ne", target, ignore)
    if weight is None:
        return cast(is_counted, dtype)
    classes = pointwise("where", is_counted, target, 0)
    picked = make(ops.Embedding(), reshape(weight, (*weight.shape, 1)), classes)
    return pointwise("where", is_counted, reshape(picked, target.shape), 0.0)


def reduced(each: Node, weights: Node, reduction: Reduction) -> Node:
    """Losses of classes of such `weights`, as `reduction` says; a sum has the type that it is carried in."""
    if reduction == "none":
        return each
    loss, of_weights = (total(cast(x, carried(each.dtype)), range(x.ndim)) for x in (each, weights))
    return loss if reduction == "sum" else pointwise("div", loss, of_weights)
