"""Range sums in two steps: the inner dimensions first, where blocks would read each index of the outermost one often.

A few sums over nearly all of each dimension have too many different parts for one pass, and a plane too large for one
block; the blocks that share one would read most of it each.  Summed over the inner dimensions alone it is read once, in
one pass or by blocks that have whole planes of these, and what is left is small.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.schedule.chain import Users
from fusewright.schedule.partial import Split
from fusewright.schedule.range_blocks import MOST_SHARED, Cut, shared_bytes
from fusewright.schedule.range_sums import RangeReduction, in_one_pass, known

# How much smaller the first step's result must be at least, and how often the outermost axis would be read.
SMALLER, OFTEN = 16, 2


class InnerFirst(Split):
    """The range sum `root` in two steps: `part` sums all dimensions but some."""

    def whole(self, part: Node) -> Node:
        op, inner = self.root.op, self.part.op
        assert isinstance(op, ops.RangeSum) and isinstance(inner, ops.RangeSum)
        done = dict(inner.table)
        rest = tuple((dim, slots) for dim, slots in op.table if dim not in done)
        return make(replace(op, table=rest), part, where=self.root.where)

    def users(self, users: Users) -> Users:
        return {**users, self.part: 1}


def in_steps(r: RangeReduction) -> bool:
    """Whether a range reduction is one of two steps; sums of half precisions stay whole, which would be rounded."""
    if r.total or len(r.axes) < 2 or r.root.dtype.itemsize < torch.float32.itemsize or in_one_pass(r) is None:
        return False
    outer, inner = r.axes[0], r.axes[1:]
    length, plane = (prod(known(r.x.shape[d]) for axis in axes for d in axis.dims) for axes in ((outer,), inner))
    left = prod(len(axis.slots or ()) for axis in inner)
    often = sum(s.count for s in outer.slots or ()) >= OFTEN * length
    return often and SMALLER * left <= plane and _reads_once(replace(r, axes=inner), r)


def _reads_once(part: RangeReduction, whole: RangeReduction) -> bool:
    """Whether kernels of `part` read it once: in one pass, or where a block has room for its sums, and not for those of
    the `whole`."""
    return in_one_pass(part) is None or (_in_one_block(part) and not _in_one_block(whole))


def _in_one_block(r: RangeReduction) -> bool:
    """Whether a block has room for what is left of a plane, one axis after the other."""
    return shared_bytes(r, Cut(1, (1,) * len(r.axes))) <= MOST_SHARED


def split(root: Node, r: RangeReduction) -> Split:
    """The two steps of the range sum `root`."""
    op = root.op
    assert isinstance(op, ops.RangeSum)
    inner = tuple((dim, slots) for dim, slots in op.table if dim not in r.axes[0].dims)
    return InnerFirst(root, make(replace(op, table=inner), root.arg(0), where=root.where))
