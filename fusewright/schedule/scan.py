"""The scan family: pointwise -> prefix sums along one dimension -> pointwise, over values in memory.

    relu(cumsum(x * scale, 1) + y)

A *row* is what one scan runs along: the last dimension, or a *column* along another one.  However long it is, it is
read once and written once: what lies ahead of a stretch of it is one number, which is carried along.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.ir import ops
from fusewright.ir.build import cast
from fusewright.ir.node import Node
from fusewright.schedule import stream
from fusewright.schedule.chain import MEMORY, POINTWISE, Users, pointwise_tree
from fusewright.schedule.stream import Stream, Tree

# Elements of a row from which on several threads have something to do.
SHORTEST = 16


@dataclass(frozen=True)
class Scan:
    """A chain of this family.

    node    the prefix sums
    before  what is summed, from what lies in memory
    after   what comes of the sums and of what lies in memory, `None` where they are the result
    within  what is read, and along which axes, as a stream that reduces rows
    """

    root: Node
    node: Node
    before: Tree
    after: Tree | None
    within: Stream

    @property
    def tensors(self) -> tuple[Node, ...]:
        return self.within.tensors

    @property
    def length(self) -> int:
        """Elements of a row."""
        assert isinstance(self.node.op, ops.Cumsum)
        length = self.node.shape[self.node.op.dim]
        assert isinstance(length, int)
        return length

    @property
    def in_rows(self) -> bool:
        """Whether rows lie along the last axis."""
        return self.within.axes[-1].role == "first"


def parse(root: Node, users: Users) -> Scan | str:
    """The longest chain of this family that ends in `root`, or why there is none.

    Inner nodes have no user outside of it.
    """
    node, after = _sums_before(root, users)
    if node is None:
        return f"{root!r} follows no prefix sums"
    assert isinstance(node.op, ops.Cumsum)
    dim, shape = node.op.dim, node.shape
    if not isinstance(shape[dim], int) or shape[dim] < SHORTEST:
        return f"rows of {shape[dim]} elements are not scanned"
    if all(n == 1 for d, n in enumerate(shape) if d != dim):
        return f"{node!r} has one row"
    before = _summed(node, users)
    trees = [t for t in (before, after) if t is not None and t.leaves != (t.root,)]
    problem = next(filter(None, map(stream.unsupported, trees)), None)
    if problem or root.dtype not in MEMORY or node.dtype not in MEMORY:
        return problem or f"{root!r} is no floating-point value"
    if _is_narrowed(before.root) and before.leaves != (before.root,):
        return f"{before.root!r} is rounded to a narrower type on the way"
    behind = () if after is None else (leaf for leaf in after.leaves if leaf is not node)
    read = Tree(before.root, tuple(dict.fromkeys((*before.leaves, *behind))), None)
    within = stream.of_rows(read, "mean", (dim,), users)
    if isinstance(within, str):
        return within
    if within.weights or all(len(r.axes) < len(within.axes) for r in within.reads):
        return f"{node!r} reads nothing as large as it, or looks rows up"
    return Scan(root, node, before, after, within)


def _sums_before(root: Node, users: Users) -> tuple[Node | None, Tree | None]:
    """Prefix sums that `root` is, or is computed from by pointwise operations, and these."""
    if isinstance(root.op, ops.Cumsum):
        return root, None
    if not isinstance(root.op, POINTWISE):
        return None, None
    read, own = pointwise_tree(root, users)
    node = next((n for n in own if isinstance(n.op, ops.Cumsum)), None)
    return node, Tree(root, read, node)


def _summed(node: Node, users: Users) -> Tree:
    """What is summed, in the type of the sums; what others use, or must lose digits, lies in memory."""
    x = node.arg(0)
    inlined = isinstance(x.op, POINTWISE) and users[x] == 1 and not _is_narrowed(x)
    value = cast(x, node.dtype)
    if inlined:
        return Tree(value, pointwise_tree(value, users)[0], None)
    return Tree(value, (x,), None)


def _is_narrowed(node: Node) -> bool:
    """Whether a value is cast to a narrower type, and must lose its last digits on the way."""
    return isinstance(node.op, ops.Cast) and node.dtype.itemsize < node.arg(0).dtype.itemsize
