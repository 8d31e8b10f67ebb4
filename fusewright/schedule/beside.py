"""What is computed of the same memory as a value: candidates for one kernel that has several results.

    mean(x), max(x)          a * c - b * d, a * d + b * c          c2 = f * c + i * g, o * tanh(c2)

Reading x once is what there is to gain.  No operand of the kernel may wait for one of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, topological
from fusewright.schedule.chain import POINTWISE, Users, taken_in
from fusewright.schedule.rearrangement import MOVES

# So many results, or reductions, one thread has at most.
MOST = 4

Readers = Mapping[Node, Sequence[Node]]


def readers_of(graph: Graph) -> Readers:
    """Who reads each value, operands before what is computed from them."""
    found: dict[Node, list[Node]] = {node: [] for node in graph.nodes()}
    for node in found:
        for a in dict.fromkeys(node.inputs):
            found[a].append(node)
    return found


@dataclass(frozen=True)
class Elements:
    """What values are made of: the pointwise operations that nobody else uses, and what all of them read, how often."""

    computed: tuple[Node, ...]
    read: Mapping[Node, int]

    @property
    def leaves(self) -> tuple[Node, ...]:
        return tuple(self.read)


def elements(ends: Iterable[Node], users: Users, shape: Sequence[object]) -> Elements:
    """Those of what `ends`, which are computed themselves, read; inner values have this shape.  What is made of all
    elements, as a reduction is, is read from memory where it is read beside them."""
    roots = tuple(ends)
    inner, read = taken_in(roots, users, lambda n: isinstance(n.op, POINTWISE) and n.shape == shape)
    whole = [r for r in roots if not isinstance(r.op, POINTWISE)]
    read |= {r: uses for r in whole if (uses := sum(n.inputs.count(r) for n in inner))}
    return Elements(tuple(n for n in inner if n not in roots), read)


def gathered(
    root: Node,
    results: Callable[[Node], Iterator[Node]],
    of: Callable[[Sequence[Node]], Elements],
    shape: Sequence[object],
    users: Users,
    readers: Readers,
) -> tuple[Node, ...]:
    """`root`, and other results that are computed of elements of this shape that it reads.

    results  those that a reader of such an element leads to, or the element itself
    of       what results are made of
    """
    found = [root]
    grown = True
    while grown and len(found) < MOST:
        grown = False
        made = of(found)
        shared = [n for n in (*made.leaves, *found) if n.shape == shape and users[n] > 1]
        shared += [n for n in made.computed if len(readers[n]) > 1]  # and computed again by each of them
        own = {*found, *made.computed}  # what others read as well, they compute again
        for candidate in dict.fromkeys(r for leaf in shared for n in (leaf, *readers[leaf]) for r in results(n)):
            if candidate not in own and not _waits(of([*found, candidate]).leaves, [*found, candidate]):
                found.append(candidate)
                grown = True
                break
    return tuple(found)


def _waits(leaves: Iterable[Node], results: Sequence[Node]) -> bool:
    """Whether something that is read is computed from a result."""
    return not set(results).isdisjoint(topological(list(leaves)))


def is_absorbed(node: Node, users: Users, readers: Readers) -> bool:
    """Whether the only reader of a pointwise value is a rearrangement, which computes functions ahead of it itself."""
    return users[node] == 1 and any(_absorbs(n, users, readers) for n in readers[node])


def _absorbs(reader: Node, users: Users, readers: Readers) -> bool:
    if isinstance(reader.op, ops.Reshape | ops.Slice | ops.Expand):
        return is_absorbed(reader, users, readers)
    return isinstance(reader.op, (ops.Permute, ops.Windows, *MOVES))


def ends_of(node: Node, users: Users, readers: Readers) -> Iterator[Node]:
    """The last pointwise operations of one shape from `node` on, all that they read between being computed for them."""
    stack, seen = [node], set[Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        behind = [n for n in readers[node] if isinstance(n.op, POINTWISE) and n.shape == node.shape]
        if users[node] == 1 and behind:
            stack += behind
        else:
            yield node
