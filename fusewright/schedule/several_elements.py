"""The family of several elements: pointwise values of one shape, computed of the same memory and written side by side.

before   f, c, i, g -> c2;  o, c2 -> o * tanh(c2)         reads c2, or what it is made of, once more
after    f, c, i, g, o -> c2, o * tanh(c2)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusewright.ir.node import Node
from fusewright.schedule import stream
from fusewright.schedule.beside import Elements, Readers, elements, ends_of, gathered, is_absorbed
from fusewright.schedule.chain import MEMORY, POINTWISE, Users
from fusewright.schedule.stream_record import Stream, Tree


@dataclass(frozen=True)
class SeveralElements:
    """A group of this family.

    results  what is written, the last one of the graph first
    within   the first of them, of all that is read, as a stream
    """

    results: tuple[Node, ...]
    within: Stream

    @property
    def tensors(self) -> tuple[Node, ...]:
        return self.within.tensors


def parse(root: Node, users: Users, readers: Readers) -> SeveralElements | str:
    """The results of this family that `root` is one of, or why there are no others."""

    def of(results: Sequence[Node]) -> Elements:
        return elements(results, users, root.shape)

    def is_result(node: Node) -> bool:
        """Whether a stream computes it and all that nobody else uses, and memory holds such; what a rearrangement takes
        in is left to that."""
        fits = isinstance(node.op, POINTWISE) and node.dtype in MEMORY and node.shape == root.shape
        fits = fits and not is_absorbed(node, users, readers)
        return fits and not any(stream.unsupported(Tree(n, n.inputs, None)) for n in (node, *of([node]).computed))

    def results_of(node: Node) -> Iterator[Node]:
        return filter(is_result, ends_of(node, users, readers))

    if root not in results_of(root):
        return f"{root!r} is no pointwise value that is written"
    results = gathered(root, results_of, of, root.shape, users, readers)
    uses = Counter(a for node in (*results, *of(results).computed) for a in node.inputs)
    results = tuple(r for r in results if users[r] > uses[r])  # others are computed on the way
    if len(results) == 1 or root not in results:
        return f"nothing else is computed of what {root!r} reads"
    made = of(results)
    found = stream.of_elements(Tree(root, made.leaves, None), users)
    return found if isinstance(found, str) else SeveralElements(results, found)
