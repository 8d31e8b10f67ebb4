"""Results in another order than that of their slots: where taps become channels, what follows a range sum moves them.

An order is written in *digits*: pairs (size, stride), the last one fastest.  Counting through them gives, for every
place in memory, the slot whose result lies there; the digits of the reverse give the place of every slot.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from fusewright.ir import ops
from fusewright.ir.node import Node

Digits = tuple[tuple[int, int], ...]

# A chain of views is followed on indices, of up to so many results.
MOST_RESULTS = 2**24


def moved_from(root: Node, single: Callable[[Node], bool]) -> Node:
    """The value whose elements `root` holds in another order, behind reshapes and permutations; `root` if none."""
    stored = isinstance(root.op, ops.Reshape) or (isinstance(root.op, ops.Permute) and root.op.copy)
    node = root
    while stored and isinstance(node.op, ops.Reshape | ops.Permute) and single(node.arg(0)):
        node = node.arg(0)
    return node


def order_behind(root: Node, summed: Node, leading: int) -> tuple[Digits, Digits] | str:
    """The order in which `root` holds the results of each plane of `summed`, and its reverse; or why there is none.

    Planes are the elements of the first `leading` dimensions, of which only the first may be symbolic.
    """
    why = f"{root!r} mixes the planes of {summed!r}"
    if not leading or any(not isinstance(d, int) for d in (*summed.shape[1:], *root.shape[1:])):
        return why
    if root.shape[:1] != summed.shape[:1]:
        return why
    shape = (2, *(d for d in summed.shape[1:] if isinstance(d, int)))
    if prod(shape) > MOST_RESULTS or prod(shape) == 0:
        return f"{root!r} has too many results"
    index = _followed(root, summed, torch.arange(prod(shape)).reshape(shape)).reshape(-1, prod(shape[leading:]))
    order = index[0].clone()
    if not torch.equal(index, order + torch.arange(len(index))[:, None] * len(order)):
        return why
    reverse = torch.empty_like(order)
    reverse[order] = torch.arange(len(order))
    if torch.equal(order, reverse.sort().values):
        return f"{root!r} is in the order of its slots"
    return digits(order), digits(reverse)


def _followed(root: Node, summed: Node, index: Tensor) -> Tensor:
    """What the views between `summed` and `root` make of a tensor."""
    steps = []
    node = root
    while node is not summed:
        steps.append(node.op)
        node = node.arg(0)
    for op in reversed(steps):
        if isinstance(op, ops.Permute):
            index = index.permute(op.dims)
        else:
            assert isinstance(op, ops.Reshape)
            index = index.reshape(2, *(d for d in op.shape[1:] if isinstance(d, int)))
    return index


def digits(order: Tensor) -> Digits:
    """The fewest digits that count through a permutation made of views."""
    found = []
    while len(order) > 1:
        size = next(n for n in _divisors(len(order)) if _runs_through(order, n))
        found.append((size, int(order[1] - order[0])))
        order = order[::size]
    return tuple(reversed(found))


def places(digits: Digits) -> Tensor:
    """What counting through digits gives, one after the other."""
    found = torch.zeros(1, dtype=torch.int64)
    for size, stride in digits:
        found = (found[:, None] + stride * torch.arange(size)).reshape(-1)
    return found


def _divisors(n: int) -> list[int]:
    """Those of `n` from 2 on, the greatest first."""
    return [d for d in range(n, 1, -1) if n % d == 0]


def _runs_through(order: Tensor, size: int) -> bool:
    """Whether a last digit of this size fits everywhere."""
    rows, step = order.reshape(-1, size), order[1] - order[0]
    return torch.equal(rows, rows[:, :1] + step * torch.arange(size))


def terms(digits: Digits, index: str) -> list[str]:
    """C++ text of the terms whose sum the digits give for `index`, a name."""
    found, behind = [], 1
    for i, (size, stride) in enumerate(reversed(digits)):
        text = index if behind == 1 else f"{index} / {behind}"
        text = text if i == len(digits) - 1 else f"{text} % {size}"
        found.append(text if stride == 1 else f"{text} * {stride}")
        behind *= size
    return found[::-1]
