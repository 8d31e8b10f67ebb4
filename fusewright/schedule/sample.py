"""Sample programs: small operations on one sample of a batch after another, which one block carries out.

Every inner value has the batch as its leading dimension, and no operation mixes samples.  Values that others read more
than once, or in another order, are *kept* (in shared memory); pointwise trees and views are read through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.ops import Size
from fusewright.schedule.chain import MEMORY, POINTWISE, TWO_PASSES, Users, is_ahead, is_rounded

MOST_BYTES = 40 * 1024  # kept by a block at one time
# Elements of one sample of a value: of any one, and of what consists of a few long rows.  One block has to do it all.
MOST_ELEMENTS = 16384
MOST_IN_ROWS = 2**20
LONG_ROW = 4096

VIEWS = (ops.Reshape, ops.Permute, ops.Expand, ops.Slice)
ROWS = (ops.Reduce, ops.Softmax, ops.Norm)


@dataclass(frozen=True)
class SampleProgram:
    """The operations from `leaves` (in memory) and `given` (in shared memory already) to `root`.

    inner  what is computed, operands before users
    """

    root: Node
    leaves: tuple[Node, ...]
    inner: tuple[Node, ...]
    given: frozenset[Node] = field(default=frozenset())

    @property
    def batch(self) -> Size:
        return self.root.shape[0]

    def sampled(self, node: Node, ndim: int) -> bool:
        """Whether `node`, broadcast to a value of `ndim` dimensions, is another one for every sample."""
        return node.ndim == ndim and node.shape[0] == self.batch

    def uses(self, leaf: Node) -> set[bool]:
        """Whether a leaf is read by sample, of each of its uses: weights may be as many as samples."""
        return {
            self.sampled(leaf, n.ndim) if isinstance(n.op, ops.Pointwise) else i == 0
            for n in self.inner
            for i, a in enumerate(n.args)
            if a is leaf
        }

    def per_sample(self, leaf: Node) -> bool:
        """Whether a leaf has a part for each sample."""
        return True in self.uses(leaf)

    @cached_property
    def constants(self) -> frozenset[Node]:
        """Tensors of one value, which nobody needs to read."""
        return frozenset(a for n in self.inner for a in n.inputs if isinstance(a.op, ops.Full))

    @cached_property
    def result(self) -> Node:
        """What is written: the root, seen through reshapes."""
        node = self.root
        while isinstance(node.op, ops.Reshape) and node in self.inner:
            node = node.arg(0)
        return node

    @cached_property
    def steps(self) -> tuple[Node, ...]:
        """The values computed one after another, the result last; all but the result are kept."""
        kept = {n for n in self.inner if isinstance(n.op, (*ROWS, ops.Matmul))}
        for node in self.inner:
            if isinstance(node.op, VIEWS) and isinstance(node.arg(0).op, ops.Pointwise | ops.Cast):
                kept.add(node.arg(0))
            if isinstance(node.op, ops.Matmul) and not self._held(node.arg(0), kept):
                kept.add(node.arg(0))
            if _passes(node) > 1 and isinstance(node.arg(0).op, ops.Pointwise | ops.Cast) and _fits(node.arg(0)):
                kept.add(node.arg(0))
        kept |= self._shared(kept)
        order = [n for n in dict.fromkeys((*self.leaves, *self.inner)) if n in kept and n is not self.result]
        return (*(n for n in order if n in self.inner or n in kept), self.result)

    def _shared(self, kept: Collection[Node]) -> set[Node]:
        """The pointwise values that several steps would compute, each for itself, as far as there is room for them."""
        found: set[Node] = set()
        readers: dict[Node, set[Node]] = {n: set() for n in self.inner}
        for node in reversed(self.inner):  # users before operands
            several = len(readers[node]) > 1 and isinstance(node.op, POINTWISE) and node is not self.result
            if several and node not in kept and _fits(node):
                found.add(node)
            own = node in kept or node in found or node is self.root
            for a in node.inputs:
                if a in readers:
                    readers[a] |= {node} if own else readers[node]
        return found

    def _held(self, node: Node, kept: Collection[Node]) -> bool:
        """Whether a value can be read from shared memory as it is."""
        while isinstance(node.op, ops.Reshape) and node in self.inner and node not in kept:
            node = node.arg(0)
        return node in kept or node in self.given

    def reads(self, step: Node) -> tuple[Node, ...]:
        """The kept, given and leaf values that computing `step` reads."""
        stops = {*self.steps, *self.given, *self.leaves, *self.constants}
        found: dict[Node, None] = {}
        stack = list(step.inputs) if step in self.inner else [step]
        while stack:
            node = stack.pop()
            if node in stops:
                found[node] = None
            else:
                stack += node.inputs
        return tuple(found)

    @cached_property
    def arena(self) -> tuple[dict[Node, int], int]:
        """Where each kept value lies, in units of 8 bytes, and how many there are: dead values make room."""
        steps = self.steps[:-1]
        last = {n: i for i, step in enumerate(self.steps) for n in (*self.reads(step), step)}
        places: dict[Node, int] = {}
        for i, node in enumerate(steps):
            living = [(places[n], places[n] + units(n)) for n in steps[:i] if last[n] >= i]
            place = 0
            for begin, end in sorted(living):
                if begin - place >= units(node):
                    break
                place = max(place, end)
            places[node] = place
        return places, max((places[n] + units(n) for n in steps), default=0)


def parse(
    root: Node,
    users: Users,
    given: Collection[Node] = (),
    most: int = MOST_BYTES,
    divided: Callable[[Node], bool] = lambda _: False,
) -> SampleProgram | str:
    """The sample program that ends in `root`, or why there is none.

    `given` are values that lie in shared memory, `most` the bytes of it that others may take; `divided` says that
    another family divides a reduction among many blocks, which is left to it where a sample is much for one, or would
    be read twice.
    """
    if root in given or not _sample(root, root):
        return f"{root!r} has no samples"

    def is_left(node: Node) -> bool:
        if not isinstance(node.op, ops.Reduce):
            return False
        much = numel(node.arg(0)) > MOST_ELEMENTS or (_passes(node) > 1 and not _fits(node.arg(0)))
        return much and divided(node)

    def fits(node: Node) -> bool:
        known = node not in given and not isinstance(node.op, ops.Number | ops.Full)
        return known and _unsupported(node, root) is None and not is_ahead(node) and not is_left(node)

    problem = f"{root!r} is much for one block" if is_left(root) else _unsupported(root, root)
    if problem:
        return problem
    found = _program(root, _inside(root, users, fits), given)
    if _problem(found, most) is None:
        return found
    less = _program(root, _inside(root, users, lambda node: users[node] == 1 and fits(node)), given)
    return _problem(less, most) or less  # for which there may be room


def _program(root: Node, inside: Collection[Node], given: Collection[Node]) -> SampleProgram:
    inner: dict[Node, None] = {}
    leaves: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in inside and node not in inner:
            for arg in node.inputs:
                visit(arg)
            inner[node] = None
        elif node not in inside and node not in given and not isinstance(node.op, ops.Number | ops.Full):
            leaves[node] = None

    visit(root)
    return SampleProgram(root, tuple(leaves), tuple(inner), frozenset(given))


def _inside(root: Node, users: Users, fits: Callable[[Node], bool]) -> set[Node]:
    """`root`, and what it is computed from as far as `fits` holds and all who read it are inside, sample by sample."""
    inside = {root}
    while True:
        uses: dict[Node, list[bool]] = {}
        for node in inside:
            for i, a in enumerate(node.inputs):
                by_sample = a.ndim == node.ndim if isinstance(node.op, ops.Pointwise) else i == 0
                uses.setdefault(a, []).append(by_sample)
        more = {a for a, by in uses.items() if a not in inside and len(by) >= users[a] and all(by) and fits(a)}
        if not more:
            return inside
        inside |= more


def _problem(p: SampleProgram, most: int) -> str | None:
    wrong = [n for n in (p.root, *p.leaves) if n.dtype not in MEMORY]
    if wrong:
        return f"{wrong[0]!r} lies in memory as {wrong[0].dtype}"
    torn = [n for n in p.leaves if len(p.uses(n)) > 1]
    if torn:
        return f"{torn[0]!r} is read by sample and as a whole"
    if not p.given and not any(map(p.per_sample, p.leaves)):
        return f"{p.root!r} depends on no sample"
    if not p.given and not any(isinstance(n.op, (*ROWS, ops.Matmul)) for n in p.inner):
        return f"{p.root!r} takes every element by itself"
    sizes = {numel(n) for n in p.inner} | {numel(a) for n in p.inner for a in n.inputs if _sample(a, p.root)}
    in_rows = {numel(n.arg(0)) for n in p.inner if isinstance(n.op, ROWS) and _row_length(n) >= LONG_ROW}
    if not all(0 < n <= (MOST_IN_ROWS if n in in_rows else MOST_ELEMENTS) for n in sizes):
        return f"{p.root!r} has samples of {max(sizes)} elements"
    if p.arena[1] * 8 > most:
        return f"{p.root!r} keeps {p.arena[1] * 8} bytes per sample"
    return None


def _sample(node: Node, root: Node) -> bool:
    """Whether the leading dimension is the batch, and no other one is symbolic."""
    return bool(node.ndim and node.shape[0] == root.shape[0] and all(isinstance(d, int) for d in node.shape[1:]))


def numel(node: Node) -> int:
    """Elements of one sample."""
    return prod(d for d in node.shape[1:] if isinstance(d, int))


def units(node: Node) -> int:
    """Units of 8 bytes that a sample takes in the compute type, rounded up to 16 bytes."""
    return -(-numel(node) * (8 if node.dtype == torch.float64 else 4) // 16) * 2


def _passes(node: Node) -> int:
    """How often a row operation reads its input."""
    if isinstance(node.op, ops.Reduce):
        return 2 if node.op.kind in TWO_PASSES else 1
    return 3 if isinstance(node.op, ops.Softmax | ops.Norm) else 0


def _row_length(node: Node) -> int:
    """Elements that a row operation joins."""
    x, op = node.arg(0), node.op
    match op:
        case ops.Reduce(dims=dims):
            return prod(d for d in (x.shape[i] for i in dims) if isinstance(d, int))
        case ops.Softmax(dim=dim):
            return int(x.shape[dim])
        case ops.Norm(kind="layer" | "rms", trailing=trailing):
            return prod(d for d in x.shape[-trailing:] if isinstance(d, int))
        case ops.Norm(kind="group", groups=groups):
            return numel(x) // groups
    return prod(d for d in x.shape[2:] if isinstance(d, int))


def _fits(node: Node) -> bool:
    return units(node) * 8 <= MOST_BYTES // 2


def _unsupported(node: Node, root: Node) -> str | None:
    """Why a node cannot be computed sample by sample."""
    op, data = node.op, [a for a in node.inputs if not isinstance(a.op, ops.Number)]
    if not _sample(node, root) or (node.dtype not in MEMORY and node.dtype != torch.bool):
        return f"{node!r} has no samples of floating-point numbers"
    x = data[0] if data else node
    own = bool(data) and _sample(x, root)
    match op:
        case ops.Pointwise():
            numbers = [a.op.value for a in node.inputs if isinstance(a.op, ops.Number)]
            fine = op.traits.cpp is not None and all(isinstance(v, bool | int | float) for v in numbers)
        case ops.Cast():
            fine = not is_rounded(node)
        case ops.Reshape():
            fine = own
        case ops.Permute(dims=dims):
            fine = own and dims[0] == 0
        case ops.Expand():
            fine = own and x.ndim == node.ndim
        case ops.Slice(dim=dim):
            fine = own and dim > 0
        case ops.Reduce(dims=dims):
            fine = own and bool(dims) and 0 not in dims and x.dtype in MEMORY
        case ops.Softmax(dim=dim):
            fine = own and dim > 0
        case ops.Norm():
            fine = own and _norm_fits(op, node)
        case ops.Matmul() as product:
            w = node.arg(1)
            grouped = len(node.inputs) == 2 and product.is_grouped(x.shape, w.shape)
            fine = own and (grouped or (x.ndim <= 3 and w.ndim == 2)) and all(isinstance(d, int) for d in w.shape)
        case _:
            fine = False
    return None if fine else f"{node!r} does not go sample by sample"


def _norm_fits(op: ops.Norm, node: Node) -> bool:
    """Whether a normalisation looks at one sample alone."""
    if op.effectful or any(a is not None for a in node.args[3:]):
        return False
    inside = node.ndim - 1
    return (op.kind in ("layer", "rms") and op.trailing <= inside) or (op.kind in ("group", "instance") and inside >= 1)
