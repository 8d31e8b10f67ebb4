"""Operands that kernels are timed on: drawn at random, of a group's sizes, as they lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.runtime.launch import FORMATS
from fusewright.schedule.group import Group, sizes


def rows_of_indices(group: Group, hints: Mapping[Any, int]) -> dict[Node, int]:
    """Of the operands that embeddings take as indices, how many rows there are for them."""
    found: dict[Node, int] = {}
    for node in group.inner:
        if isinstance(node.op, ops.Embedding):
            weight, indices = node.inputs
            found[indices] = min(sizes(weight, hints)[0], found.get(indices, 2**31))
    return found


def random_operand(
    node: Node,
    hints: Mapping[Any, int],
    device: torch.device,
    rows: Mapping[Node, int] = MappingProxyType({}),
    *,
    alike: bool = False,
) -> Tensor:
    """An operand of this size; drawn from a generator of its own, for the program's own stream stays where it is.

    Numbers lie between 0 and 1.  Weights are as layers begin with, unless all are to be `alike`: functions of large
    sums would take another way than a model's do.  Indices are those of any of so many `rows`.
    """
    shape, generator = sizes(node, hints), torch.Generator(device).manual_seed(0)
    if node in rows:
        return torch.randint(rows[node], shape, generator=generator, dtype=node.dtype, device=device)
    if not node.dtype.is_floating_point:
        return torch.ones(shape, dtype=node.dtype, device=device)
    dtype = node.dtype if node.dtype.itemsize >= 4 else torch.float32
    drawn = torch.rand(shape, generator=generator, dtype=dtype, device=device)
    if node.ndim >= 2 and not node.varies and not alike:
        drawn = (2 * drawn - 1) / max(1, prod(shape[1:])) ** 0.5
    return drawn.to(node.dtype)


def dense(tensor: Tensor, layout: str | None) -> Tensor:
    """`tensor` in a kernel's layout."""
    return tensor.contiguous(memory_format=FORMATS[layout or "contiguous"][tensor.ndim])
