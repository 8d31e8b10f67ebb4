"""Normalisations by statistics of their input, with the pointwise operations, window and reductions around them.

    norm(x) = (x - center) * scale * weight + bias,     center = mean(x),  scale = 1 / sqrt(var(x) + eps)
    softmax(x) = exp(x - center) * scale,               center = max(x),   scale = 1 / sum(exp(x - center))
    log_softmax(x) = x - center - scale,                center = max(x),   scale = log(sum(exp(x - center)))

Statistics are those of *rows*: what one mean is taken over.  Once they are known, normalising is pointwise, so that
what follows is a stream (`fusewright.schedule.stream`) over x; all of them read entries of tables as streams do.  Where
nothing pools or reduces, a row may be kept while its statistics are found.  Rows of a softmax along another dimension
than the last lie as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise, reshape
from fusewright.ir.node import Node, make, remade, topological
from fusewright.ir.ops import Size
from fusewright.schedule import rearrangement, stream
from fusewright.schedule.beside import Readers
from fusewright.schedule.chain import MEMORY, POINTWISE, Users, pointwise_tree
from fusewright.schedule.rearrangement import Rearrangement, call_length
from fusewright.schedule.stream_record import Stream, Tree, is_entry, read_alone

# Elements of one sample from which on it is more than one block carries out soon.
LARGE = 4096

# Elements of the longest rows for which there are registers whatever they are of.
LONGEST = 16384

# Bytes of the longest rows of which a block turns some in shared memory.
MOST_TURNED = 4096

Kind = Literal["var", "mean", "logsumexp"]

STAGES = (*POINTWISE, ops.Pool, ops.Reduce)
NORMS = (ops.Norm, ops.Softmax)
CENTER, SCALE = "center", "scale"  # what stands for statistics
VARIANCE: Kind = "var"
MEAN: Kind = "mean"
SHARES: Kind = "logsumexp"
HELD = 99  # so many uses make a value one that is in memory


@dataclass(frozen=True)
class Normalization:
    """A norm, or a softmax, with what is around it.

    norm        its node
    behind      the stream that normalises, over stand-ins for the statistics and for weights of other shapes
    x           what is normalised, as rows have it, from what lies in memory
    sums        the stream that reduces each row of x: a variance, for RMS norms a mean of squares, for a softmax what a
                logsumexp carries
    within      where nothing pools or reduces, and rows, or the columns of a softmax, may be kept, `behind` as if it
                reduced each as well
    stands      what tensors of these streams stand for, statistics left out
    statistics  the names of those
    split       channels of a group, where rows have x (N, C, *) as (N, C/split, split, *); else 1
    also        what is normalised, where others read it as well and the kernel writes it: it keeps rows then
    moved       where elements of x, or what goes with them, are read before they are moved, for those tensors of the
                streams that lie elsewhere than row by row: the kernel keeps rows then
    """

    norm: Node
    behind: Stream
    x: Tree
    sums: Stream
    within: Stream | None
    stands: Mapping[Node, Node]
    statistics: Mapping[Node, str]
    split: int
    also: Node | None = None
    moved: Mapping[Node, Rearrangement] = field(default_factory=dict)

    @property
    def op(self) -> ops.Norm | ops.Softmax:
        assert isinstance(self.norm.op, NORMS)
        return self.norm.op

    @property
    def tensors(self) -> tuple[Node, ...]:
        """What is read from memory, what is as large as x first."""
        return tuple(dict.fromkeys(self.stands[t] for t in self.behind.tensors if t in self.stands))

    @property
    def looks_up(self) -> bool:
        """Whether it reads entries of tables."""
        return bool(self.behind.weights)

    @property
    def turn(self) -> Rearrangement | None:
        """What a block turns."""
        return next((m for m in self.moved.values() if m.turn is not None), None)

    @property
    def length(self) -> int | None:
        """Elements of a row, where they are known."""
        reduced = [d for axis in self.sums.axes if axis.role == "first" for d in axis.dims]
        return _product(self.sums.value.shape[d] for d in reduced)


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of the channels of a batch, `sums` reducing them.

    root     their node
    results  those that are read, each as it is read: so many numbers along dimensions of size 1
    rows     which rows of `root` these are
    """

    root: Node
    sums: Stream
    results: tuple[Node, ...]
    rows: tuple[int, ...]


def parse_statistics(root: Node, users: Users, readers: Readers) -> ChannelStatistics | str:
    """The statistics of which `root` is the first that is read.  The pointwise operations ahead may have other users,
    who compute them as well."""
    found = _row_of_statistics(root)
    if found is None:
        return f"{root!r} is no row of statistics"
    statistics, _ = found
    results = [shown for row in readers[statistics] for shown in _shown(row, readers)]
    rows = [of[1] for of in map(_row_of_statistics, results) if of is not None]
    if results[0] is not root or len(rows) < len(results):
        return f"{root!r} is not the first of what is read of {statistics!r}"
    x = statistics.arg(0)
    tree = Tree(x, (x,), None)
    if isinstance(x.op, POINTWISE) and not _is_narrowed(x):
        inlined = Tree(x, pointwise_tree(x, users)[0], None)
        large = [n for n in inlined.leaves if n.shape == x.shape and not isinstance(n.op, ops.Full)]
        tree = inlined if len(large) == 1 and stream.unsupported(inlined) is None else tree
    if x.dtype not in MEMORY:
        return f"{x!r} is computed in {x.dtype}"
    sums = stream.of_rows(tree, VARIANCE, (0, *range(2, x.ndim)), users)
    return sums if isinstance(sums, str) else ChannelStatistics(statistics, sums, tuple(results), tuple(rows))


def row_of(statistics: Node, row: int, ndim: int = 1) -> Node:
    """One row of statistics, as numbers along the first of so many dimensions."""
    return reshape(make(ops.Slice(0, row, row + 1, 1), statistics), (statistics.shape[1], *(1,) * (ndim - 1)))


def _row_of_statistics(node: Node) -> tuple[Node, int] | None:
    """The statistics that `node` is a row of, and which one; `None` where it is none."""
    row = node.arg(0) if isinstance(node.op, ops.Reshape) else node
    if not isinstance(row.op, ops.Slice) or row.shape[0] != 1:
        return None
    return (row.arg(0), row.op.start) if isinstance(row.arg(0).op, ops.Statistics) else None


def _shown(row: Node, readers: Readers) -> Iterable[Node]:
    """A row of statistics as it is read: of one channel it may have that shape as it is."""
    found = readers[row]
    return found if all(isinstance(n.op, ops.Reshape) for n in found) else (row,)


def without_running(norm: Node) -> Node | None:
    """The same batch norm by statistics of the batch, where it updates running ones; else `None`."""
    op = norm.op
    if not (isinstance(op, ops.Norm) and op.kind == "batch" and op.effectful):
        return None
    return make(replace(op, serial=None), *norm.args[:3], None, None, where=norm.where)


def apart(norm: Node) -> tuple[Node, Node, Node]:
    """A batch norm that updates running statistics, from those of the batch; these; and the update."""
    op, x = norm.op, norm.arg(0)
    assert isinstance(op, ops.Norm) and op.serial is not None and op.eps is not None
    statistics = make(ops.Statistics(op.eps, op.momentum), x, where=norm.where)
    taken = (row_of(statistics, row) for row in (2, 3))
    update = make(ops.Track(op.momentum, op.serial), *taken, *norm.args[3:], where=norm.where)

    def along(values: Node) -> Node:
        return reshape(values, (*values.shape, *(1,) * (x.ndim - 2)))

    center, scale = (row_of(statistics, row, x.ndim - 1) for row in (0, 1))
    y = pointwise("mul", pointwise("sub", cast(x, statistics.dtype), center), scale)
    weight, bias = (None if a is None else along(a) for a in norm.args[1:3])
    y = y if weight is None else pointwise("mul", y, weight)
    return cast(y if bias is None else pointwise("add", y, bias), norm.dtype), statistics, update


def parse(root: Node, users: Users) -> Normalization | str:
    """The longest chain through a norm that ends in `root`, or why there is none."""
    norm = _norm_before(root, users)
    if norm is None:
        return f"{root!r} follows no norm"
    problem = _unsupported(norm)
    return problem or _Parser(norm, root, users).found()


def parse_moving(root: Node, users: Users) -> Normalization | str:
    """The same, reading x from before it was moved.

    layernorm(permute(x))      before: x -> permute(x) -> norm      after: x -> norm
    """
    found = parse(root, users)
    return found if isinstance(found, str) else _from_before_moves(found, root, users)


def _from_before_moves(n: Normalization, root: Node, users: Users) -> Normalization:
    """The same that reads what nobody else does from before it was moved, if a team of threads can keep rows that lie
    like that."""
    if not keeps_rows(n) or n.split > 1 or n.behind.before is None:
        return n
    chain = {n.norm, *(m for m in (*_through(root, n.norm), *_through(n.norm.arg(0))) if isinstance(m.op, STAGES))}
    moved: dict[Node, Rearrangement] = {}
    turn: rearrangement.Turn | None = None  # there is memory for one
    for leaf in n.behind.before.leaves:
        alone = n.stands.get(leaf) is leaf and users[leaf] == sum(m.inputs.count(leaf) for m in chain)
        found = rearrangement.moved(leaf, users) if alone and leaf.shape == n.norm.shape else None
        if found is not None and (found.turn is None or (leaf in n.x.leaves and _is_turned(n, found) and turn is None)):
            moved[leaf], turn = found, found.turn or turn
    while True:
        own = {t: m.tensors[0] for t, m in moved.items()}
        found_all = replace(n, stands={**n.stands, **own}, moved=moved)
        operands = set(found_all.tensors)
        seen = next((t for t, x in own.items() if operands & set(topological([t], [x])) - {x}), None)
        if seen is None:
            break
        del moved[seen]  # it is computed from another operand, which stays one
    return n if call_length(n.norm, found_all.tensors) is None else found_all


def _is_turned(n: Normalization, r: Rearrangement) -> bool:
    """Whether a block can turn rows of what lies like that."""
    fits = n.length is not None and n.length * r.root.dtype.itemsize <= MOST_TURNED
    return fits and r.turn is not None and r.turn.step == n.length


def parse_shared(root: Node, users: Users) -> Normalization | str:
    """The longest chain through a norm of what the kernel computes, though others read it as well, and writes.

    h = x + y;  h, layernorm(h)      before: x, y -> h; h -> norm      after: x, y -> h, norm
    """
    norm = _norm_before(root, users)
    x = None if norm is None else norm.arg(0)
    if norm is None or x is None or not isinstance(x.op, POINTWISE) or _is_narrowed(x) or x.dtype not in MEMORY:
        return f"{root!r} follows no norm of a pointwise operation"
    ahead = pointwise_tree(x, users)[0]
    if users[x] == 1 or any(isinstance(t.op, (*NORMS, ops.Pool)) and users[t] == 1 for t in ahead):
        return f"nobody else reads {x!r}, or what is made of a norm, which has it behind itself"
    chain = {norm, *(n for n in _through(root, norm, x) if isinstance(n.op, STAGES))} - {x}
    if users[x] <= sum(n.inputs.count(x) for n in chain):
        return parse(root, users)  # the chain has all who read it, and nothing to write for others
    problem = _unsupported(norm)
    if problem is not None:
        return problem
    found = _Parser(norm, root, {**users, x: 1}).found()
    if isinstance(found, str):
        return found
    if not keeps_rows(found):
        return f"no threads keep the rows of {x!r}"
    if any(x in topological([t]) for t in found.tensors if t not in ahead):
        return f"what {root!r} reads is computed from {x!r}"
    return _from_before_moves(replace(found, also=x), root, users)


def _saves_a_copy(n: Normalization) -> bool:
    """Whether what it reads from before it was moved would be copied else."""
    moves = (node for m in n.moved.values() for node in topological([m.root], m.tensors))
    return any(map(rearrangement.copies, moves))


def keeps_rows(n: Normalization) -> bool:
    """Whether teams of threads may keep rows."""
    in_rows = n.within is not None and n.within.in_rows
    return in_rows and n.length is not None and n.length <= LONGEST


def parse_large(
    root: Node, users: Users, parse: Callable[[Node, Users], Normalization | str] = parse
) -> Normalization | str:
    """The same where a sample is much for one block, as far as is known, or would be copied, or looked up, for it."""
    found = parse(root, users)
    if isinstance(found, str) or (_product(found.norm.shape[1:]) or LARGE) >= LARGE:
        return found
    if _saves_a_copy(found) or found.looks_up:
        return found
    return f"a block may carry out {root!r}"


def _product(lengths: Iterable[Size]) -> int | None:
    """How many elements there are, where that is known."""
    known = list(lengths)
    return prod(int(d) for d in known) if all(isinstance(d, int) for d in known) else None


def _norm_before(root: Node, users: Users) -> Node | None:
    """The last norm that `root` is computed from by stages of a stream."""
    node: Node | None = root
    while node is not None and not isinstance(node.op, NORMS):
        if isinstance(node.op, POINTWISE):
            _, own = pointwise_tree(node, users)
            norms = [n for n in own if isinstance(n.op, NORMS)]
            node = next(iter(norms), next((n for n in own if isinstance(n.op, ops.Pool | ops.Reduce)), None))
        elif isinstance(node.op, ops.Pool | ops.Reduce):
            node = node.arg(0) if users[node.arg(0)] == 1 else None
        else:
            return None
    return node


def _through(root: Node, *ends: Node) -> list[Node]:
    """What `root` is computed from by stages of a stream, and where these begin, operands before users."""
    found: dict[Node, None] = {}
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            found[node] = None
        elif node not in found:
            stack.append((node, True))
            if isinstance(node.op, STAGES) and node not in ends:
                stack += [(a, False) for a in node.inputs]
    return list(found)


def _is_narrowed(node: Node) -> bool:
    """Whether a value is cast to a narrower type, which must lose its last digits on the way."""
    return isinstance(node.op, ops.Cast) and node.dtype.itemsize < node.arg(0).dtype.itemsize


def _unsupported(norm: Node) -> str | None:
    """Why a norm is not computed here, whatever surrounds it."""
    op, x = norm.op, norm.arg(0)
    if isinstance(op, ops.Softmax):
        if norm.dtype not in MEMORY:
            return f"{norm!r} is computed in {norm.dtype}"
        return f"{norm!r} has one row" if norm.ndim < 2 else None
    assert isinstance(op, ops.Norm)
    if op.effectful or op.running or norm.args[3] is not None:
        return f"{norm!r} uses or updates running statistics"
    if norm.dtype not in MEMORY:
        return f"{norm!r} is computed in {norm.dtype}"
    if op.kind in ("layer", "rms"):
        return None if op.trailing < norm.ndim else f"{norm!r} has one row"
    if norm.ndim < 2 or not isinstance(x.shape[1], int):
        return f"{norm!r} has no known number of channels"
    return None


@dataclass
class _Parser:
    """Finds the streams around one norm."""

    norm: Node
    root: Node
    users: Users

    def __post_init__(self) -> None:
        assert isinstance(self.norm.op, NORMS)
        self.op: ops.Norm | ops.Softmax = self.norm.op
        self.x = self.norm.arg(0)
        self.stands: dict[Node, Node] = {}
        if _is_narrowed(self.x):  # in memory, it has lost the digits that it is to lose
            stand_in = make(ops.Input(self.x.shape, self.x.dtype, self.x.device, "narrowed", -1))
            self.x, self.stands = stand_in, {stand_in: self.x}
        self.wide = torch.float64 if self.norm.dtype == torch.float64 else torch.float32
        names = (SCALE,) if self._kind == "rms" else (CENTER, SCALE)
        self.statistics = {name: self._statistic(name) for name in names}
        self.count = 0

    def found(self) -> Normalization | str:
        root, users = self._expanded()
        behind = stream.parse(root, users, parts=False)
        if isinstance(behind, str):
            return behind
        own = set(self.statistics.values())
        if behind.before is None or not own <= set(behind.before.leaves):
            return f"{self.norm!r} is not what a stream begins with"
        # Sizes of a call are read off operands, so statistics come last.
        behind = replace(behind, reads=tuple(sorted(behind.reads, key=lambda r: r.tensor in own)))
        self.stands = {t: self.stands.get(t, t) for t in behind.tensors if t not in own}
        if len(set(self.stands.values())) < len(self.stands):
            return f"{self.root!r} reads a tensor in two ways"
        picked = {r.value for r in behind.reads if r.indices is not None}
        if picked and (self._split() > 1 or not all(map(is_entry, picked))):
            return f"{self.root!r} reads at indices what is no entry of rows"
        return self._with_rows(behind, picked, users)

    @property
    def _kind(self) -> str:
        return "softmax" if isinstance(self.op, ops.Softmax) else self.op.kind

    # ---- the norm as pointwise operations

    def _expanded(self) -> tuple[Node, Users]:
        """The last node with the norm as pointwise operations, and the users there."""
        y = cast(self._normalised(cast(self.x, self.wide)), self.norm.dtype)
        stand_ins = (*self.statistics.values(), *self.stands)
        users = dict(self.users) | dict.fromkeys(topological([y], (*self.norm.inputs, *stand_ins)), 1)
        users |= dict.fromkeys(stand_ins, HELD)
        mapping = {self.norm: y}
        for node in _through(self.root, self.norm):
            if node is not self.norm:
                mapping[node] = remade(node, [None if a is None else mapping.get(a, a) for a in node.args])
        users |= {new: self.users[old] for old, new in mapping.items() if old in self.users}
        for node in _through(self.x):  # what the norm reads is in memory, but for pointwise operations and entries
            if not isinstance(node.op, POINTWISE) and (self._split() > 1 or not is_entry(node)):
                users[node] = HELD
        return mapping[self.root], users

    def _normalised(self, y: Node) -> Node:
        """The norm of y, whose statistics are known."""
        y = pointwise("sub", y, self.statistics[CENTER]) if CENTER in self.statistics else y
        if isinstance(self.op, ops.Softmax):
            y = y if self.op.log else pointwise("exp", y)
            return pointwise("sub" if self.op.log else "mul", y, self.statistics[SCALE])
        y = pointwise("mul", y, self.statistics[SCALE])
        weight, bias = (None if a is None else self._stand_in(a) for a in self.norm.args[1:3])
        y = y if weight is None else pointwise("mul", y, weight)
        return y if bias is None else pointwise("add", y, bias)

    def _statistic(self, name: str) -> Node:
        x = self.x.shape
        match self.op:
            case ops.Softmax(dim=dim):
                shape: tuple[Size, ...] = (*x[:dim], 1, *x[dim + 1 :])
            case ops.Norm(kind="batch"):
                shape = (x[1], *(1,) * (len(x) - 2))
            case ops.Norm(kind="layer" | "rms", trailing=trailing):
                shape = (*x[: len(x) - trailing], *(1,) * trailing)
            case ops.Norm(kind=kind, groups=groups):
                channels = 1 if kind == "group" and groups == 1 else x[1]
                shape = (x[0], channels, *(1,) * (len(x) - 2))
        return make(ops.Input(shape, self.wide, self.x.device, name, -1))

    def _stand_in(self, operand: Node) -> Node:
        """A norm's weight or bias, broadcast against x."""
        if self._kind in ("layer", "rms") or self.x.ndim == 2 or isinstance(operand.op, ops.Full):
            return operand
        shape = (*operand.shape, *(1,) * (self.x.ndim - 2))
        found = next((s for s, real in self.stands.items() if real is operand), None)
        node = found or make(ops.Input(shape, operand.dtype, operand.device, "channels", len(self.stands)))
        self.stands[node] = operand
        return node

    # ---- rows

    def _with_rows(self, behind: Stream, picked: set[Node], users: Users) -> Normalization | str:
        assert behind.before is not None
        split, leaves = self._split(), behind.before.leaves
        seen = {leaf: self._seen(leaf, split) for leaf in leaves}
        if split > 1:
            for node in topological([behind.before.root], leaves):
                args = tuple(None if a is None else seen.get(a, a) for a in node.args)
                seen[node] = make(node.op, *args) if not isinstance(node.op, ops.Number) else node
        x, value = (seen.get(n, n) for n in (self.x, behind.before.root))
        below = set(_through(self.x)) if self.x not in leaves else {self.x}
        own = tuple(seen[n] for n in leaves if n in below)
        tree, dims = Tree(x, own, None), self._dims(split)
        reduced, kind = tree, VARIANCE
        if self._kind == "rms":
            reduced, kind = Tree(pointwise("square", cast(x, self.wide)), own, None), MEAN
        elif self._kind == "softmax":
            reduced, kind = Tree(cast(x, self.wide), own, None), SHARES
        sums = stream.of_rows(reduced, kind, dims, read_alone(reduced, picked, users))
        if isinstance(sums, str):
            return sums
        if not {seen.get(t, t) for t in behind.tensors}.issuperset(sums.tensors):
            return f"{self.norm!r} has no lengths of its own"
        if _product(x.shape[d] for d in dims) == 1 or not dims:
            return f"{self.norm!r} has rows of one element"
        within: Stream | str | None = None
        apart = dims[0] == 0 or (dims[-1] != x.ndim - 1 and self._kind != "softmax")
        if behind.window is None and not behind.folds and not apart:
            every = Tree(value, tuple(seen[n] for n in leaves), None)
            within = stream.of_rows(every, kind, dims, read_alone(every, picked, users))
        within = None if isinstance(within, str) else within
        stands = self.stands | {seen[t]: real for t, real in self.stands.items() if t in seen}
        names = {each: name for name, s in self.statistics.items() for each in (s, seen[s])}
        return Normalization(self.norm, behind, tree, sums, within, stands, names, split)

    def _seen(self, leaf: Node, split: int) -> Node:
        """A leaf as rows have it: its channels in groups."""
        at = leaf.ndim - self.x.ndim + 1
        if split == 1 or at < 0:
            return leaf
        channels = leaf.shape[at]
        assert isinstance(channels, int)
        parts = (1, 1) if channels == 1 else (channels // split, 1 if leaf in self.statistics.values() else split)
        shape = (*leaf.shape[:at], *parts, *leaf.shape[at + 1 :])
        if isinstance(leaf.op, ops.Full):
            return make(replace(leaf.op, shape=shape))
        self.count += 1
        return make(ops.Input(shape, leaf.dtype, leaf.device, "split", self.count))

    def _split(self) -> int:
        if not isinstance(self.op, ops.Norm) or self.op.kind != "group":
            return 1
        channels = self.x.shape[1]
        if self.op.groups in (1, channels):
            return 1
        assert isinstance(channels, int)
        return channels // self.op.groups

    def _dims(self, split: int) -> tuple[int, ...]:
        """The dimensions of a row, where channels of groups have one of their own."""
        ndim = self.x.ndim
        match self.op:
            case ops.Softmax(dim=dim):
                return (dim,)
            case ops.Norm(kind="layer" | "rms", trailing=trailing):
                return tuple(range(ndim - trailing, ndim))
            case ops.Norm(kind="batch"):
                return (0, *range(2, ndim))
            case ops.Norm(kind="group") if split > 1:
                return tuple(range(2, ndim + 1))
            case ops.Norm(kind="group", groups=1):
                return tuple(range(1, ndim))
        return tuple(range(2, ndim))
