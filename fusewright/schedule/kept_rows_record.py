"""What is known of rows that are kept: passes over them, what is written, and what is read (`schedule.kept_rows`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.ops import ReduceKind
from fusewright.schedule.chain import POINTWISE
from fusewright.schedule.stream_record import Read, Stream, Tree

# Bytes of shared memory for what of a row there are no registers for, as every GPU from sm_80 on has them; teams that
# share such rows, and registers of each thread for these.
SHARED, SHARING, HELD = 96 * 1024, (512, 1024), (24, 28, 32)


@dataclass(frozen=True)
class Pass:
    """One reduction: of what `tree` computes, to what `number` stands for."""

    kind: ReduceKind
    correction: float
    tree: Tree
    number: Node


@dataclass(frozen=True)
class Result:
    """What is made of elements, an element each, or of the numbers of a row, one for each row.

    root      as the graph has it
    tree      from what is read and from numbers
    elements  whether there is one per element
    """

    root: Node
    tree: Tree
    elements: bool


@dataclass(frozen=True)
class Replaced:
    """What is kept in the place of something from a number of passes on: `tree` makes it of that and of their numbers.

    exp(x - max(x)), of which a sum and shares are made        kept in the place of x, once the maximum is known
    """

    known: int
    kept: int
    tree: Tree


@dataclass(frozen=True)
class KeptRows:
    """A chain of this family.

    passes   the reductions, those that others need first
    results  what is written
    within   what is read, and along which axes, as a stream that reduces rows
    kept     of what is read, that which varies from element to element of every row; where there are no registers for
             all of it, that of it which more than one pass, or result, reads
    length   elements of a row
    replaced what several of the passes and results that follow read it as, and nothing else
    """

    passes: tuple[Pass, ...]
    results: tuple[Result, ...]
    within: Stream
    kept: tuple[Read, ...]
    length: int
    replaced: tuple[Replaced, ...]

    def held(self, kept: int, known: int) -> Node:
        """What is kept there when so many numbers are known."""
        made = (r.tree.root for r in reversed(self.replaced) if r.kept == kept and r.known <= known)
        return next(made, self.kept[kept].value)

    @property
    def in_rows(self) -> bool:
        """Whether rows lie along the last axis."""
        return self.within.in_rows

    @property
    def words(self) -> int:
        """Registers of a number that is kept."""
        return words_of(self.kept)

    @property
    def late(self) -> tuple[Node, ...]:
        """What is read as what is kept might be, an element for each of every row, but not kept."""
        everywhere, held = tuple(range(len(self.within.axes))), {r.tensor for r in self.kept}
        return tuple(r.tensor for r in self.within.reads if r.along == everywhere and r.tensor not in held)

    @property
    def roots(self) -> tuple[Node, ...]:
        """The results as the graph has them."""
        return tuple(result.root for result in self.results)

    @property
    def tensors(self) -> tuple[Node, ...]:
        return self.within.tensors


def words_of(kept: Collection[Read]) -> int:
    """Registers of a number that is kept: all have those of the widest."""
    return 2 if any(r.tensor.dtype.itemsize == 8 for r in kept) else 1


def bytes_apart(kept: Collection[Read], length: int, team: int, values: int, registers: int) -> int:
    """Bytes of rows that long which lie in shared memory where a `team` of threads takes so many neighbouring `values`
    of each at a time, and each thread has so many `registers` for them."""
    size = len(kept) * words_of(kept)
    groups = ceil(length / (team * values)) - registers // (size * values)
    return 4 * size * max(0, groups) * team * values


def ways_apart(kept: Collection[Read], length: int) -> list[tuple[int, int]]:
    """Teams and registers of a thread, as few as may be, by which a part of each row lies in shared memory."""
    found = []
    most = 16 // min(r.tensor.dtype.itemsize for r in kept)  # of a thread at a time
    for team in SHARING:
        taken = {held: max(bytes_apart(kept, length, team, values, held) for values in (1, most)) for held in HELD}
        found += [(team, held) for held, apart in taken.items() if 0 < apart <= SHARED][:1]
    return found


def is_known(node: Node, numbers: set[Node]) -> bool:
    """Whether a value is made of numbers alone."""
    if node in numbers or isinstance(node.op, ops.Number):
        return True
    return isinstance(node.op, POINTWISE) and all(is_known(a, numbers) for a in node.inputs)
