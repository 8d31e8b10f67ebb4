"""The kept-rows family: reductions of rows, and what is made of their elements and these, while rows are at hand.

    x / max(norm(x), eps)          (x - mean(x)) / (std(x) + eps)          sum(x / norm(x) * y)
    where(i == argmax(x), 0, x)

A row is what the reductions join: the last dimensions, or a *column* along another one.  Every value is an element of
rows or one number of each.  Pointwise operations are computed again wherever they are asked for, so that nothing is
kept but what is read from memory, entries of tables among it; `passes` over that give one number each, and a last one
the results, elements or numbers: all that is made of the same rows and read by others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node, make, topological
from fusewright.ir.ops import Size
from fusewright.schedule import stream
from fusewright.schedule.beside import MOST, Elements, Readers, gathered
from fusewright.schedule.chain import MEMORY, POINTWISE, Users, depends_on, taken_in
from fusewright.schedule.kept_rows_record import SHARED, KeptRows, Pass, Replaced, Result, is_known, ways_apart
from fusewright.schedule.logarithms import in_passes
from fusewright.schedule.partial import Split
from fusewright.schedule.stream_record import Read, Stream, Tree, is_index, read_alone

KINDS = ("sum", "mean", "max", "min", "norm", "var", "std", "argmax", "argmin", "logsumexp")

# Elements of a row from which on it is kept, of samples that are one row and of others; and of a column, which threads
# read side by side however short it is.
SHORTEST_ALONE, SHORTEST, SHORTEST_COLUMN = 64, 16, 2
# Those up to which there are registers for it; and the same of rows along the last axis, of which a part may lie in
# shared memory.
LONGEST = 32768
LONGEST_IN_ROWS = LONGEST + SHARED // 4
# So many tensors may be kept side by side.
MOST_KEPT = 3


def parse(root: Node, users: Users, readers: Readers = MappingProxyType({})) -> KeptRows | str:
    """The longest chain of this family that ends in `root`, or why there is none; with others that are made of the same
    rows, where `readers` say who reads each value."""
    first = _reduction_before(root)
    if first is None:
        return f"{root!r} follows no reduction"
    assert isinstance(first.op, ops.Reduce)
    rows = _Rows(users, readers, first.arg(0).shape, first.op.dims)
    beside = rows.beside(root) if root in readers else (root,)  # a step of a reduction has no readers yet
    found = rows.found(beside) if len(beside) > 1 else ""
    return rows.found((root,)) if isinstance(found, str) else found


def parse_short(root: Node, users: Users) -> KeptRows | str:
    """The same of samples that are one row, a short one, and of nothing beside it."""
    first = _reduction_before(root)
    if first is None:
        return f"{root!r} follows no reduction"
    assert isinstance(first.op, ops.Reduce)
    return _Rows(users, MappingProxyType({}), first.arg(0).shape, first.op.dims, short=True).found((root,))


def split(root: Node, users: Users) -> Split | None:
    """The two steps of a reduction over rows that are kept and more: of each row, and of what those give.

    mean(x / norm(x, 1), (1, 2))  is  sum(x / norm(x, 1), 1), and what is left of that

    Sums of half precisions stay whole: they would be rounded in between.
    """
    op = root.op
    if not isinstance(op, ops.Reduce) or op.kind not in ("sum", "mean", "max", "min") or op.dtype is not None:
        return None
    x = root.arg(0)
    if op.kind in ("sum", "mean") and x.dtype.itemsize < torch.float32.itemsize:
        return None
    first = _reduction_before(x) if users[x] == 1 and all(isinstance(x.shape[d], int) for d in op.dims) else None
    if first is None or first.arg(0).shape != x.shape:
        return None
    assert isinstance(first.op, ops.Reduce)
    if not set(first.op.dims) < set(op.dims):
        return None
    part = make(ops.Reduce("sum" if op.kind == "mean" else op.kind, first.op.dims, True), x, where=root.where)
    return Split(root, part)


def _reduction_before(root: Node) -> Node | None:
    """A reduction that `root` is, or is computed from by pointwise operations."""
    seen: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node.op, ops.Reduce):
            return node
        if node not in seen and isinstance(node.op, (*POINTWISE, ops.Reshape)):
            seen.add(node)
            stack += node.inputs
    return None


def _is_float(node: Node) -> bool:
    """Whether a value may be a result."""
    return node.dtype in MEMORY


def _replaced(passes: Sequence[Pass], results: Sequence[Result], held: list[Node]) -> Iterator[Replaced]:
    """What may be kept in the place of what was, one pass after the other."""
    for known in range(1, len(passes)):
        numbers = {p.number for p in passes[:known]}
        later = [*(p.tree for p in passes[known:]), *(r.tree for r in results)]
        below = [set(topological([t.root], {*t.leaves, *(p.number for p in passes)})) for t in later]
        for i, value in enumerate(held):
            end = _end_of_line(value, later, below, numbers)
            if end is not value and sum(end in nodes for nodes in below) > 1:
                held[i] = end
                yield Replaced(known, i, Tree(end, (value, *numbers), None))


def _end_of_line(value: Node, later: Sequence[Tree], below: Sequence[set[Node]], numbers: set[Node]) -> Node:
    """The last of the operations on a value and known numbers alone, each of which is all that reads the one before."""
    while True:
        readers = {n for nodes in below for n in nodes if value in n.inputs}
        if len(readers) != 1 or any(tree.root is value for tree in later):
            return value
        (reader,) = readers
        others = [a for a in reader.inputs if a is not value]
        wide = [n.dtype == torch.float64 for n in (reader, value)]
        kept_so = _is_float(reader) and _is_float(value) and wide[0] == wide[1]  # in a register of that type
        if not kept_so or not all(is_known(a, numbers) for a in others):
            return value
        value = reader


def _fits(kept: Sequence[Read], length: int, within: Stream) -> bool:
    """Whether there are registers for rows of that length of so many tensors, or shared memory for what is left."""
    if not kept or len(kept) > MOST_KEPT:
        return False
    return len(kept) * length <= LONGEST or (within.in_rows and bool(ways_apart(kept, length)))


@dataclass
class _Rows:
    """Finds the chains around reductions over `dims` of values of one `shape`; or those of samples that are one `short`
    row."""

    users: Users
    readers: Readers
    shape: tuple[Size, ...]
    dims: tuple[int, ...]
    short: bool = False

    def found(self, roots: tuple[Node, ...]) -> KeptRows | str:
        lengths = [self.shape[d] for d in self.dims]
        if 0 in self.dims or not self.dims or not all(isinstance(n, int) for n in lengths):
            return "the rows are whole batches, or of no known length"
        length = prod(n for n in lengths if isinstance(n, int))
        alone = all(n == 1 for d, n in enumerate(self.shape) if d not in (0, *self.dims))
        trailing = self.dims == tuple(range(len(self.shape) - len(self.dims), len(self.shape)))
        least = SHORTEST_ALONE if alone else SHORTEST if trailing else SHORTEST_COLUMN
        most = LONGEST_IN_ROWS if trailing else LONGEST
        if self.short:
            least, most = SHORTEST, SHORTEST_ALONE - 1 if alone else 0
        if not least <= length <= most:
            return f"rows of {length} elements are not kept"
        if not trailing and len(self.dims) > 1:
            return "the rows are neither the last dimensions nor columns"
        inner = self._inner(roots)
        order = [n for n in topological(roots) if n in inner]
        reductions = [n for n in order if isinstance(n.op, ops.Reduce)]
        elements = any(root.shape == self.shape for root in roots)
        if len(reductions) < (1 if elements else 2):
            return "there is one reduction and nothing of the rows behind it"
        behind = self._is_behind_another(order, reductions)
        lost = roots[0].shape == self._dropped and not isinstance(roots[0].op, ops.Reduce)
        one_pass = len(roots) > 1 or (lost and len(reductions) <= MOST)  # has them, or several that read the same
        if one_pass and not elements and not behind:
            return "all results are reductions of what is read"
        if not behind and self._is_rather_read_again(roots, order):
            return "what is read is read again sooner than what is made of it is written"
        return self._chain(roots, order, reductions, length, late=elements or behind)

    def beside(self, root: Node) -> tuple[Node, ...]:
        """`root`, and other results that are made of the same rows."""

        def of(roots: Sequence[Node]) -> Elements:
            inner, read = taken_in(roots, self.users, lambda n: self._fits(n, roots))
            return Elements(tuple(n for n in inner if n not in roots), read)

        inside = sum(n.inputs.count(root) for n in self.readers[root] if self._fits(n, ()))
        ends = inside < self.users[root]  # or what follows it has all results
        return gathered(root, self._ends, of, self.shape, self.users, self.readers) if ends else (root,)

    def _ends(self, node: Node) -> Iterator[Node]:
        """The values that others read of all that is made of one, and of reductions."""
        stack, made = [node], dict[Node, None]()
        while stack:
            node = stack.pop()
            if node not in made and self._fits(node, (node,)):
                made[node] = None
                stack += self.readers[node]
        for node in made:
            inside = sum(n.inputs.count(node) for n in self.readers[node] if n in made)
            if inside < self.users[node] and (self._is_behind(node) if node.shape == self.shape else _is_float(node)):
                yield node

    def _is_behind(self, node: Node) -> bool:
        """Whether elements are made of a number of their row."""
        stack, seen = [node], set[Node]()
        while stack:
            node = stack.pop()
            if isinstance(node.op, ops.Reduce):
                return True
            if node not in seen:
                seen.add(node)
                stack += [a for a in node.inputs if self._fits(a, ())]
        return False

    def _is_behind_another(self, order: list[Node], reductions: list[Node]) -> bool:
        """Whether elements that are reduced are made of a number of their row."""
        behind = depends_on(order, reductions)
        return any(n.arg(0) in behind for n in reductions)

    def _is_rather_read_again(self, roots: Sequence[Node], order: Sequence[Node]) -> bool:
        """Whether all elements that would be written are made of one tensor for one operation on rows, which is not
        part of this only since there are no registers for what it reads besides: once the numbers are known, it may as
        well make them of that tensor itself."""
        elements = [root for root in roots if root.shape == self.shape]
        inner = set(order)
        if len({a for n in order for a in n.inputs if a not in inner and a.shape == self.shape}) > 1:
            return False
        ends = [self.readers.get(root, ()) for root in elements]
        once = all(self.users[root] == 1 and len(by) == 1 for root, by in zip(elements, ends, strict=True))
        return bool(elements) and once and all(self._fits(n, (n,)) for by in ends for n in by)

    def _inner(self, roots: Sequence[Node]) -> set[Node]:
        """What is computed here: of the shapes of elements and of numbers, and used nowhere else."""
        if not all(self._fits(root, roots) for root in roots):
            return set()
        apart: set[Node] = set()  # numbers of what is in memory: along which dimensions, a read would not tell

        def fits(node: Node) -> bool:
            return node not in apart and self._fits(node, roots)

        while True:
            inner = set(taken_in(roots, self.users, fits)[0])
            torn = {n for n in inner if any(a not in inner for a in self._numbers_read(n))}
            if not torn:
                return inner
            if not torn.isdisjoint(roots):
                return set()
            apart.update(torn)

    def _numbers_read(self, node: Node) -> tuple[Node, ...]:
        """What a number is made of without the dimensions of rows, or before it has them."""
        lost = node.shape == self._dropped and isinstance(node.op, POINTWISE)
        return tuple(a for a in node.inputs if a.ndim) if lost or isinstance(node.op, ops.Reshape) else ()

    def _fits(self, node: Node, roots: Sequence[Node]) -> bool:
        """Whether a value is an element or a number of rows, and no index that others read."""
        if isinstance(node.op, ops.Reduce):
            return self._is_pass(node) and (_is_float(node) or node not in roots)
        if isinstance(node.op, ops.Reshape):
            number = node.shape == self._numbers and self._is_number(node.arg(0))
            return number and (_is_float(node) or node not in roots)
        return isinstance(node.op, POINTWISE) and (node.shape in (self.shape, self._numbers) or self._is_number(node))

    def _is_number(self, node: Node) -> bool:
        """Whether a value is a number of rows, which has their dimensions, as one each, or has lost them.  What has
        lost them is made of such numbers alone."""
        if self._is_pass(node):
            return True
        if isinstance(node.op, POINTWISE) and node.shape == self._numbers:
            return True
        if isinstance(node.op, ops.Reshape):
            return node.shape == self._numbers and self._is_number(node.arg(0))
        if not isinstance(node.op, POINTWISE) or node.shape != self._dropped:
            return False
        return all(not a.ndim or (a.shape == self._dropped and self._is_number(a)) for a in node.inputs)

    def _is_pass(self, node: Node) -> bool:
        """Whether this is one of the reductions of rows."""
        if not isinstance(node.op, ops.Reduce) or node.arg(0).shape != self.shape:
            return False
        op = node.op
        return op.kind in KINDS and op.dims == self.dims and op.dtype in (None, node.arg(0).dtype)

    @property
    def _numbers(self) -> tuple[Size, ...]:
        """The shape of one number per row."""
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.shape))

    @property
    def _dropped(self) -> tuple[Size, ...]:
        """The same where the dimensions of rows are lost."""
        return tuple(n for d, n in enumerate(self.shape) if d not in self.dims)

    def _chain(
        self, roots: tuple[Node, ...], order: list[Node], reductions: list[Node], length: int, *, late: bool
    ) -> KeptRows | str:
        """The chain that all these make, which may read `late` what it has no registers for."""
        inner = set(order)
        leaves = dict.fromkeys(
            a for n in order for a in n.inputs if a not in inner and not isinstance(a.op, ops.Number)
        )
        if any(self._is_read_otherwise(n, order) for n in order):
            return "a number of a row is read along other dimensions"
        picked = {n for n in leaves if sum(m.inputs.count(n) for m in order) == self.users[n]}
        spelled, order = in_passes(order)
        reductions = [n for n in order if isinstance(n.op, ops.Reduce)]
        mapping: dict[Node, Node] = {}
        numbers: dict[Node, Node] = {}
        for node in order:
            args = tuple(None if a is None else mapping.get(a, a) for a in node.args)
            if node in reductions:
                numbers[node] = stand_in = self._number(node, len(numbers))
                narrow = stand_in.dtype != node.dtype
                mapping[node] = make(ops.Cast(node.dtype), stand_in) if narrow else stand_in
            elif isinstance(node.op, ops.Reshape):
                mapping[node] = mapping[node.arg(0)]
            else:
                mapping[node] = make(node.op, *args)
        problem = self._about_indices([spelled.get(r, r) for r in roots], order, reductions, leaves)
        if problem:
            return problem
        passes = tuple(self._pass(n, mapping, leaves, numbers) for n in reductions)
        results = tuple(
            Result(r, self._tree(mapping[spelled.get(r, r)], leaves, numbers), r.shape == self.shape) for r in roots
        )
        trees = [t for t in (*(p.tree for p in passes), *(r.tree for r in results)) if t.leaves != (t.root,)]
        problem = next(filter(None, map(stream.unsupported, trees)), None)
        wrong = next((root for root in roots if root.dtype not in MEMORY), None)
        if problem or wrong is not None:
            return problem or f"{wrong!r} is no floating-point value"
        every = Tree(passes[0].tree.root, tuple(leaves), None)
        users = read_alone(every, picked, self.users)
        within = stream.of_rows(every, "sum", self.dims, users)  # type: ignore[arg-type]
        if isinstance(within, str):
            return within
        everywhere = tuple(range(len(within.axes)))
        kept = tuple(r for r in within.reads if r.along == everywhere)
        if late and not _fits(kept, length, within):  # what one pass or result reads alone, it may read for itself
            trees = [*(p.tree for p in passes), *(r.tree for r in results)]
            kept = tuple(r for r in kept if sum(r.value in t.leaves for t in trees) > 1)
        if not _fits(kept, length, within) or within.axes[0].role == "first":
            return "nothing is kept, or more than there are registers for"
        replaced = tuple(_replaced(passes, results, [r.value for r in kept]))
        return KeptRows(passes, results, within, kept, length, replaced)

    def _number(self, node: Node, i: int) -> Node:
        """What stands for the number that a reduction gives: sums are wide, and an index one of as many."""
        assert isinstance(node.op, ops.Reduce)
        wide = torch.float64 if node.arg(0).dtype == torch.float64 else torch.float32
        if node.op.gives_index:
            return make(ops.Reduce(node.op.kind, self.dims, True), self._stand_in(self.shape, wide, node, i))
        return self._stand_in(self._numbers, wide, node, i)

    @staticmethod
    def _stand_in(shape: tuple[Size, ...], dtype: torch.dtype, node: Node, i: int) -> Node:
        return make(ops.Input(shape, dtype, node.device, f"number{i}", -1))

    def _is_read_otherwise(self, number: Node, order: Sequence[Node]) -> bool:
        """Whether something but numbers reads what has lost the reduced dimensions as it is."""
        if number.shape != self._dropped or not self._is_number(number):
            return False
        readers = (n for n in order if number in n.inputs)
        return any(n.shape != self._dropped and not isinstance(n.op, ops.Reshape) for n in readers)

    def _about_indices(
        self, roots: Sequence[Node], order: Sequence[Node], reductions: Sequence[Node], leaves: Mapping[Node, None]
    ) -> str | None:
        """Why indices of extremes are not found here: what eager compares, it has rounded, and a kernel's result would
        seem to have a gradient."""
        indices = list(filter(is_index, reductions))
        behind = depends_on(order, reductions)
        for x in (n.arg(0) for n in indices):
            if x in behind or (x not in leaves and x.dtype.itemsize < 4):
                return f"{x!r} may be rounded otherwise than what is compared"
        reached = {n for n in leaves if n.dtype.is_floating_point}
        for node in order:
            if node.dtype.is_floating_point and not isinstance(node.op, ops.Detach):
                reached.update([node] if not reached.isdisjoint(node.inputs) else [])
        without = next((root for root in roots if root not in reached), None)
        return f"{without!r} has no gradient" if indices and without is not None else None

    def _pass(
        self, node: Node, mapping: Mapping[Node, Node], leaves: Mapping[Node, None], numbers: Mapping[Node, Node]
    ) -> Pass:
        assert isinstance(node.op, ops.Reduce)
        x = node.arg(0)
        tree = self._tree(mapping.get(x, x), leaves, numbers)
        return Pass(node.op.kind, node.op.correction, tree, numbers[node])

    def _tree(self, root: Node, leaves: Mapping[Node, None], numbers: Mapping[Node, Node]) -> Tree:
        """The pointwise operations that lead to `root` from what is read and from numbers."""
        ends = {*leaves, *numbers.values()}
        below = topological([root], ends)
        read = dict.fromkeys(a for n in below for a in n.inputs if a in ends)
        return Tree(root, tuple(read) if below else (root,), None)
