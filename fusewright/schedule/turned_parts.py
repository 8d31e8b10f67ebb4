"""Parts of what is turned, copied into rows.

    k = x.view(N, L, 3, H, D).permute(2, 0, 3, 4, 1)[1]  is  permute_copy(x.view(N, L, 3, H, D)[:, :, 1], ...)

A kernel that reads by rows what does not lie so is given a copy by the launcher, in every call, and a library's copy of
what is turned reaches for a sector of memory for every number of it.
"""

from __future__ import annotations

from dataclasses import replace

from fusewright.ir import ops
from fusewright.ir.node import Node, make, remade
from fusewright.schedule import rearrangement


def in_rows(x: Node) -> Node:
    """A copy in rows of what is turned, or of a part of that, perhaps under another shape; all else as it is.  Parts of
    what is derived ahead of calls are made to lie so there."""
    shapes, node = list[Node](), x
    while isinstance(node.op, ops.Reshape) and rearrangement.shows(node):
        shapes.append(node)
        node = node.arg(0)
    cuts = list[ops.Slice]()
    while isinstance(node.op, ops.Slice) and node.op.step == 1:
        cuts.append(node.op)
        node = node.arg(0)
    if not rearrangement.turns(node) or (node is not x and not x.varies):
        return x
    turn = node.op
    assert isinstance(turn, ops.Permute)
    base = node.arg(0)
    for cut in reversed(cuts):
        base = make(replace(cut, dim=turn.dims[cut.dim]), base)
    found = make(replace(turn, copy=True), base, where=node.where)
    for shape in reversed(shapes):
        found = remade(shape, [found])
    return found
