"""FLOPs, bytes, launches -> roofline time: what a node costs on a device.

Counts are of the ATen program: every node is one launch that reads its operands and writes its result once; views are
free. An absolute time here is an estimate; it is the comparison before and after a rewrite that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from math import prod
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import sympy
import torch

from fusewright.ir import ops
from fusewright.ir.build import of_part_read
from fusewright.ir.fused import Fused
from fusewright.ir.node import Node, topological
from fusewright.ir.ops import Size
from fusewright.ir.slots import sliding, windows
from fusewright.plan import Work
from fusewright.runtime.device import DeviceFacts
from fusewright.schedule.chain import TWO_PASSES
from fusewright.schedule.contraction import window_sums

FREE = (
    ops.Source,
    ops.Number,
    ops.Reshape,
    ops.Permute,
    ops.Expand,
    ops.Slice,
    ops.Windows,
    ops.Item,
    ops.Detach,
    ops.Transfer,
)
# Ranges shorter than this are summed at the pace of pooling.
SHORT = 32

# Features of a convolution that keep a GPU's kernel busy, and as how many any fewer count.
WIDE, LEAST = 32, 4

Answer = TypeVar("Answer")

NOTHING = Work(0.0, 0.0, 0.0, 0.0)

# FLOPs per element of an operation that is not a contraction; only its order matters.
_PER_ELEMENT = {ops.Pointwise: 1, ops.Softmax: 5, ops.Norm: 6, ops.Dropout: 2, ops.Cast: 1, ops.Embedding: 0}


def is_one_pass(node: Node) -> bool:
    """Whether ATen computes this in one pass at the pace of memory; of an index it compares one value at a time."""
    if isinstance(node.op, ops.Reduce):
        return node.op.kind not in TWO_PASSES and not node.op.gives_index
    return isinstance(node.op, ops.Softmax | ops.Pointwise | ops.Cast)


def _is_of_moved_rows(node: Node) -> bool:
    """Whether this is a product of rows that are moved, for which they are copied one behind the other."""
    if not isinstance(node.op, ops.Matmul) or node.arg(1).ndim != 2:
        return False
    view = node.arg(0)
    turned = isinstance(view.op, ops.Permute) and not view.op.copy and view.op.dims != tuple(range(view.ndim))
    return turned and view.ndim > 2


def _once(method: Callable[[CostModel, Node], Answer]) -> Callable[[CostModel, Node], Answer]:
    """The method, asked once per node: tables of slots take long to look through."""
    name = method.__name__

    @wraps(method)
    def remembered(self: CostModel, node: Node) -> Answer:
        answers = self.known.setdefault(node, {})
        if name not in answers:
            answers[name] = method(self, node)
        return cast(Answer, answers[name])

    return remembered


def _used(conv: Node) -> float:
    """The share of its pace at which a GPU's kernels compute a convolution: few features leave part of each instruction
    idle (`benchmarks/results/h200_random*.json`)."""
    op, features = conv.op, conv.shape[1]
    assert isinstance(op, ops.Conv)
    return min(1.0, max(features / op.groups, LEAST) / WIDE) if isinstance(features, int) else 1.0


class CostModel:
    """`cost(node)` gives the work of a node on one device, with symbolic sizes taken at `hints`.

    With `derived_ahead`, what depends on parameters alone costs nothing: it is kept between calls outside training.
    With `fusing`, window sums are added up at the pace of memory, by the kernel that reads them or for it.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        hints: Mapping[sympy.Symbol, int] | None = None,
        *,
        derived_ahead: bool = False,
        fusing: bool = False,
    ) -> None:
        self.facts = facts
        self.fusing = fusing
        self.derived_ahead = derived_ahead
        self.hints = dict(hints or {})
        self.known: WeakKeyDictionary[Node, dict[str, Any]] = WeakKeyDictionary()
        self.lengths: dict[Size, int] = {}

    @_once
    def __call__(self, node: Node) -> Work:
        """The work of `node` alone."""
        return NOTHING if self._is_free(node) else self._work(node)

    def _is_free(self, node: Node) -> bool:
        return isinstance(node.op, FREE) or (self.derived_ahead and self._is_derived(node))

    def _is_derived(self, node: Node) -> bool:
        """Whether the node depends on parameters and constants alone, and not on the batch size."""
        answers = self.known.setdefault(node, {})
        if "derived" not in answers:  # not `_once`: chains are as deep as models
            fixed = isinstance(node.op, ops.FIXED)
            movable = not node.op.effectful or (isinstance(node.op, ops.Opaque) and node.op.only_computes)
            computed = bool(node.inputs) and movable and all(map(self._is_derived, node.inputs))
            answers["derived"] = (fixed or computed) and all(isinstance(d, int) for d in node.shape)
        return bool(answers["derived"])

    def _work(self, node: Node) -> Work:
        flops, moved = self._flops(node), self._bytes(node)
        if self._on_the_way(node):
            return Work(flops, moved, 0.0, moved / self._bandwidth(node))
        launches = self._launches(node)
        computing = flops / self._rate(node)
        if self._forms(node):
            computing -= self(node.arg(0)).seconds  # its kernel multiplies while it reads
        seconds = launches * self.facts.launch + max(computing, moved / self._bandwidth(node))
        if isinstance(node.op, ops.RangeSum) and not self.fusing:
            seconds += self._windowed(node.op, node.arg(0)) / self.facts.window
        if self.fusing and isinstance(node.op, ops.Norm) and node.op.running:
            seconds *= 2  # as long as the two pointwise operations that kernels take in
        return Work(flops, moved, launches, seconds)

    def _size(self, value: Size) -> int:
        if isinstance(value, int):
            return value
        if value not in self.lengths:  # a network asks for the same few at every node
            self.lengths[value] = int(value.subs(self.hints))
        return self.lengths[value]

    def _numel(self, node: Node) -> int:
        return prod(map(self._size, node.shape))

    def _flops(self, node: Node) -> float:
        x = node.inputs[0] if node.inputs else node
        match node.op:
            case Fused(bodies=results):
                return sum(self._flops(n) for n in topological(results) if n.inputs and not isinstance(n.op, FREE))
            case ops.Conv(transposed=transposed):
                w = node.arg(1)
                positions = self._numel(x if transposed else node)
                return 2.0 * positions * prod(map(self._size, w.shape[1:]))
            case ops.Attention():
                return 2.0 * self._numel(x) * self._size(node.arg(1).shape[2]) * (1 + node.shape[3] / x.shape[3])
            case ops.ConvLast():
                return 2.0 * self._numel(node) * prod(map(self._size, node.arg(1).shape[1:]))
            case ops.Matmul():
                return 2.0 * self._numel(node) * self._size(x.shape[-1])
            case ops.Pool(kernel=kernel):
                return float(self._numel(node) * prod(kernel))
            case ops.RangeSum() as op:
                return float(self._read(op, x))
            case ops.Reduce():
                return float(self._numel(x))
        return float(_PER_ELEMENT.get(type(node.op), 1) * self._numel(node))

    def _stages(self, op: ops.RangeSum, x: Node) -> Iterator[tuple[tuple[ops.Slot, ...], int]]:
        """Per dimension in the order they are summed, its slots and the number of elements added up for them."""
        shape = [self._size(d) for d in x.shape]
        for dim, slots in reversed(op.table):
            yield slots, prod(shape[:dim] + shape[dim + 1 :]) * max(1, self._touched(slots))
            shape[dim] = len(slots)

    def _read(self, op: ops.RangeSum, x: Node) -> int:
        """Elements that a range sum adds up, the first dimension it takes shrinking what the next one reads."""
        return sum(elements for _, elements in self._stages(op, x))

    def _windowed(self, op: ops.RangeSum, x: Node) -> int:
        """Those of them that are added in many short ranges, at the pace of pooling rather than of memory."""
        return sum(
            elements
            for slots, elements in self._stages(op, x)
            if len(slots) > 1 and sum(s.count for s in slots) < SHORT * len(slots)
        )

    @staticmethod
    def _touched(slots: tuple[ops.Slot, ...]) -> int:
        """Indices added along one dimension; slots on one residue that mostly overlap are added once and shared."""
        groups: dict[tuple[int, int], list[ops.Slot]] = {}
        for s in slots:
            if s.count:
                groups.setdefault((s.step, s.start % s.step), []).append(s)
        total = 0
        for members in groups.values():
            core = min(s.stop for s in members) - max(s.start for s in members)
            shared = max(0, core) // members[0].step if len(members) <= 16 else 0
            total += sum(s.count for s in members) - shared * (len(members) - 1)
        return total

    def _bytes(self, node: Node) -> float:
        results = node.op.bodies if isinstance(node.op, Fused) else (node,)
        written = sum(self._numel(result) * result.dtype.itemsize for result in results)
        if self._on_the_way(node):
            return float(self._numel(node.arg(0)) * node.arg(0).dtype.itemsize)
        if isinstance(node.op, ops.RangeSum):
            return self._read(node.op, node.arg(0)) * node.arg(0).dtype.itemsize + written
        read = [a for a in node.inputs if not (self._forms(node) and a is node.arg(0))]
        if _is_of_moved_rows(node):
            written += 2 * self._numel(x := node.arg(0)) * x.dtype.itemsize
        if self._awaits(node):
            written += self._numel(x := node.arg(0)) * x.dtype.itemsize
        return float(written + sum(self._elements(node, a) * a.dtype.itemsize for a in read))

    def _elements(self, node: Node, operand: Node) -> int:
        """How much of an operand is read: of an embedding's weight the rows that are looked up, of classes one each, of
        images what no negative padding leaves out."""
        if isinstance(node.op, ops.Nll) and operand is node.arg(0):
            return self._numel(node.arg(1))
        if isinstance(node.op, ops.Conv) and operand is node.arg(0):
            return self._numel(of_part_read(node).arg(0))
        inside, computed = operand, [node]
        if isinstance(node.op, Fused):
            computed, index = topological(node.op.bodies), node.args.index(operand)
            inside = next(n for n in computed if isinstance(n.op, ops.Input) and n.op.index == index)
        lookups = [n for n in computed if isinstance(n.op, ops.Embedding) and n.arg(0) is inside]
        return sum(map(self._numel, lookups)) if lookups else self._numel(operand)

    def _forms(self, node: Node) -> bool:
        """Whether this is a convolution whose own kernel forms the window sums that it runs on."""
        return isinstance(node.op, ops.Conv) and self._on_the_way(node.arg(0)) and not self._awaits(node)

    @_once
    def _awaits(self, node: Node) -> bool:
        """Whether this is a convolution of sums around every element of x that another kernel has to write for it."""
        if not (isinstance(node.op, ops.Conv) and self._on_the_way(node.arg(0))):
            return False
        sums = node.arg(0).op
        assert isinstance(sums, ops.RangeSum)
        return not all(sliding(slots) for _, slots in sums.table) and window_sums(node) is None

    @_once
    def _on_the_way(self, node: Node) -> bool:
        """Whether these are window sums that the convolution's own kernel forms, and that never reach memory.

        Windows that reach outside of x have to be around every element.
        """
        if not (self.fusing and isinstance(node.op, ops.RangeSum)) or node.op.written:
            return False
        if all(sliding(slots) for _, slots in node.op.table):
            return all(slots[0].count < SHORT for _, slots in node.op.table)
        found = [windows(slots, self._size(node.arg(0).shape[dim])) for dim, slots in node.op.table]
        return all(w is not None and w.stride == 1 and w.size < SHORT for w in found)

    def _launches(self, node: Node) -> float:
        if isinstance(node.op, ops.RangeSum):
            return float(sum(1 + 2 * min(len(slots), 16) * (len(slots) > 1) for _, slots in node.op.table))
        if isinstance(node.op, ops.Pool) and node.op.kind == "min":
            return 3.0  # two negations around a max pooling
        two = isinstance(node.op, ops.Reduce) and node.op.kind in TWO_PASSES
        if isinstance(node.op, ops.Conv):  # float64 and transposed ones are not what libraries are tuned for
            return 1.0 + node.op.transposed + (node.dtype == torch.float64) + self._awaits(node)
        if _is_of_moved_rows(node):
            return 2.0
        return 2.0 if two else 1.0

    def _rate(self, node: Node) -> float:
        match node.op:
            case Fused():
                return self.facts.conv
            case ops.Conv() if node.dtype == torch.float64:
                return self.facts.wide / 4
            case ops.Conv() if self.fusing and node.device.type == "cuda":
                return self.facts.conv * _used(node)
            case ops.Conv(transposed=transposed):
                return self.facts.conv / 2 if transposed else self.facts.conv
            case ops.ConvLast():
                return self.facts.conv
            case ops.Attention() | ops.Matmul():
                return self.facts.wide if node.dtype == torch.float64 else self.facts.matmul
            case ops.Pool():
                return self.facts.window
        return self.facts.memory

    def _bandwidth(self, node: Node) -> float:
        if isinstance(node.op, ops.Scan):  # one after the other: a GPU reaches half the pace at most
            return self.facts.memory / 2
        return self.facts.reduce if isinstance(node.op, ops.Reduce | ops.RangeSum) else self.facts.memory
