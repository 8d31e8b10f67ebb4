"""Views: which elements of a tensor in memory a slice, a permutation, or a reshape of these looks at.

x (2, 9, 48) in memory, x[:, 1:, 16:32].permute(0, 2, 1) -> dimensions 0, 2, 1 of the view, from 0, 1 and 16 on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusewright.ir import ops
from fusewright.ir.node import Node


@dataclass(frozen=True)
class Along:
    """What runs along a dimension of a tensor: dimension `dim` of the view, or none where it has one index of it; from
    index `begin` on."""

    dim: int | None
    begin: int = 0


def look_through(view: Node) -> tuple[Node, tuple[Along, ...]]:
    """The tensor that a view is of, itself where it is none, and what runs along each of its dimensions.

    Dimensions of length 1 that the view has added run along none.
    """
    base, places = view, tuple(map(Along, range(view.ndim)))
    while (inner := _of_argument(base, places)) is not None:
        base, places = base.arg(0), inner
    return base, places


def _of_argument(node: Node, places: Sequence[Along]) -> tuple[Along, ...] | None:
    """What runs along the dimensions of a view's argument, given that of its own; `None` where it is no such view."""
    match node.op:
        case ops.Slice(dim=dim, start=start, step=1):
            moved = Along(places[dim].dim, places[dim].begin + start)
            return (*places[:dim], moved, *places[dim + 1 :])
        case ops.Permute(dims=dims, copy=False):
            return tuple(places[dims.index(d)] for d in range(len(dims)))
        case ops.Reshape():
            return _without_ones(node, places)
    return None


def _without_ones(node: Node, places: Sequence[Along]) -> tuple[Along, ...] | None:
    """The same of a reshape that adds or drops dimensions of length 1 alone."""
    given = list(zip(node.shape, places, strict=True))
    found = []
    for length in node.arg(0).shape:
        while given and given[0][0] != length and _is_idle(*given[0]):
            given.pop(0)
        if given and given[0][0] == length:
            found.append(given.pop(0)[1])
        elif length == 1:
            found.append(Along(None))
        else:
            return None
    return tuple(found) if all(_is_idle(*rest) for rest in given) else None


def _is_idle(length: object, place: Along) -> bool:
    return length == 1 and place.begin == 0
