"""Norms of what is moved, in place of moves of what is normalised.

    windows(roll(layernorm(x))) = layernorm(windows(roll(x)))

Where rows stay whole, what a norm gives of each is the same.  A kernel of the norm reads rows from before they are
moved (`schedule.normalization`), so that nothing is copied for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType

from fusewright.ir import indices, ops
from fusewright.ir.indices import Digit, Index, Variable
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make, remade
from fusewright.schedule import rearrangement
from fusewright.schedule.beside import Readers, readers_of
from fusewright.schedule.chain import Users

# Not a slice: it is a view of more, which is seen where it is returned (`rules.slices` has the others ahead).
MOVES = (ops.Reshape, ops.Permute, ops.Roll, ops.Flip)


def moves_first(graph: Graph, orders: Mapping[Node, Order] = MappingProxyType({})) -> Graph:
    """`graph` with layer and RMS norms behind the moves that eager copies what they give for.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    users, readers = graph.users(), readers_of(graph)
    for norm in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        if not isinstance(norm.op, ops.Norm) or norm.op.kind not in ("layer", "rms"):
            continue
        moves = list(_moves(norm, users, readers))
        while moves and not _keep_rows(moves, norm):
            moves.pop()
        if not any(map(rearrangement.copies, moves)):
            continue
        x = norm.arg(0)
        for move in moves:
            x = remade(move, [x])
        last = moves[-1]
        placed = graph.substitute(last, make(norm.op, x, *norm.args[1:], where=norm.where))
        if lie_alike(graph, placed, orders):
            graph = placed
            users, readers = graph.users(), readers_of(graph)
    return graph


def _moves(norm: Node, users: Users, readers: Readers) -> Iterator[Node]:
    """The moves of all that a norm gives, which nobody else reads."""
    node = norm
    while users[node] == 1 and len(readers[node]) == 1 and isinstance(readers[node][0].op, MOVES):
        (node,) = readers[node]
        yield node


def _keep_rows(moves: list[Node], norm: Node) -> bool:
    """Whether rows are moved whole."""
    assert isinstance(norm.op, ops.Norm)
    row, last = norm.shape[-norm.op.trailing :], moves[-1]
    lengths = [n for n in row if isinstance(n, int)]
    start = indices.flat(last.shape)
    if last.shape[-len(row) :] != row or len(lengths) < len(row) or start is None or 0 in last.shape:
        return False
    at: tuple[Index, ...] | None = start[1]
    for move in reversed(moves):
        at = None if at is None else indices.of_argument(move, at)
    address = None if at is None else indices.address(at, norm.shape)
    return address is not None and _is_of_whole_rows(address, start[0], prod(lengths))


def _is_of_whole_rows(index: Index, at: Variable, length: int) -> bool:
    """Whether this is f(at / length) * length + at % length."""
    units = [(n, d) for n, d in index.terms if d.variable == at and d.step == 1]
    others = [(n, d) for n, d in index.terms if (n, d) not in units]
    one = len(units) == 1 and units[0][0] == 1 and (units[0][1].length or length) % length == 0
    rows = all(n % length == 0 and _is_of_rows(d, length) for n, d in others)
    return one and rows and index.constant % length == 0


def _is_of_rows(d: Digit, length: int) -> bool:
    """Whether a digit depends on which row an element is in, alone."""
    of = d.variable.of
    return d.step % length == 0 if of is None else all(_is_of_rows(each, length) for _, each in of.terms)
