"""Values that cost less to compute again, in every kernel that reads them, than to write and read.

p = sigmoid(x); (p * t).sum(), p.sum()

    before   x -> p by one operation; p, t -> a sum; p -> a sum        reads x, writes p, reads it twice
    after    x, t -> a sum; x -> a sum                                 reads x twice

Streams take in what nobody else uses; these values they take in whoever uses them.  They are pointwise, of a few
operations on what is in memory anyhow: neither convolutions, products and reductions nor random numbers are computed
twice.  Where all who read one take it in, nothing writes it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node
from fusewright.schedule.beside import readers_of
from fusewright.schedule.chain import POINTWISE, Fold, Users, Window, pointwise_tree
from fusewright.schedule.stream import Stage, unsupported
from fusewright.schedule.stream_record import Tree, nodes

# So many operations take no longer than two passes over memory, whatever their functions are.
MOST = 4


def computed_again(graph: Graph, users: Users, apart: Container[Node]) -> set[Node]:
    """The values of `graph` that streams should compute wherever they read them; those `apart` are in no stream."""
    readers = readers_of(graph)
    roots = set(graph.roots())
    found: set[Node] = set()
    shared = dict(users)
    for node, by in readers.items():  # those that others are computed from come first
        if not isinstance(node.op, POINTWISE) or len(by) < 2 or node in roots or node in apart:
            continue
        if any(r in apart or not _takes_in(r, node) for r in by):
            continue  # it is in memory for that one
        leaves, own = pointwise_tree(node, shared)
        inner = nodes(Tree(node, leaves, None))
        reduced = any(isinstance(n.op, ops.Pool | ops.Reduce) for n in own)
        if not reduced and len(inner) <= MOST and all(map(_is_stage, inner)) and _saves(node, leaves, by):
            found.add(node)
            shared[node] = 1  # as if nobody else used it
    return found


def _takes_in(reader: Node, node: Node) -> bool:
    """Whether a stream that computes `reader` may compute `node` as well: trees are of one shape, and windows that
    overlap would have it computed for each of them."""
    match reader.op:
        case ops.Pool(kernel=kernel, stride=stride):
            alike = all(k <= s for k, s in zip(kernel, stride, strict=True))
        case ops.Reduce():
            alike = True
        case _:
            alike = reader.shape == node.shape
    return alike and _is_stage(reader)


def _is_stage(node: Node) -> bool:
    """Whether a stream may take this in."""
    stage: Stage
    match node.op:
        case ops.Pool():
            stage = Window(node)
        case ops.Reduce():
            stage = Fold(node)
        case ops.Pointwise() | ops.Cast():
            stage = Tree(node, node.inputs, None)
        case _:
            return False
    return unsupported(stage) is None


def _saves(node: Node, leaves: Iterable[Node], by: Sequence[Node]) -> bool:
    """Whether fewer bytes are moved per element: with it in memory, what it is computed from is read once, and it is
    written, and read by each; else each reads what it is computed from."""
    whole = [n for n in leaves if n.shape == node.shape and not isinstance(n.op, ops.Full)]
    once = sum(n.dtype.itemsize for n in whole)
    again = sum(n.dtype.itemsize for reader in by for n in whole if n not in reader.inputs)
    return again < once + (1 + len(by)) * node.dtype.itemsize
