"""Matmuls of float32, with pointwise operations behind them and a reduction of all there is, for the tensor cores of
Hopper.

    f(x @ w + bias)            x (..., M, K), w (K, N) or (N, K), a weight or computed
    f(x.mT @ w), f(w @ x)      x (..., K, M), w one for all samples: x is split as it lies
    f(x @ w)                   x (..., M, K), w (..., K, N) or (..., N, K): a product of each sample
    mean(f(x @ w))             of any of these

Where tf32 is not allowed, every number is the sum of two halves, and a product is three (Ootomo and Yokota,
"Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022).
Tensor cores truncate as they accumulate, so that sums over a few numbers are added up in float32.  Of short sums, which
the library has nearly exact, all four products are taken, and fewer are accumulated.

Where the model has a convolution in a matmul's place (`ops.Matmul.convolves`) and those may be rounded to tf32, a
number is one half, which has as many digits as one of tf32, and a product is one.

Halves have few exponents: rows of x, and what a chunk has of a feature, are multiplied by powers of two, and where
numbers are too far apart for that, they are taken in two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.types import Size, numel
from fusewright.schedule.chain import Fold, Map, Stage, Users, Varies, leaves_beside, parse, varies
from fusewright.schedule.stream import unsupported
from fusewright.schedule.stream_record import Tree
from fusewright.schedule.tiling import MULTIPROCESSORS

# Numbers of x and of w that are multiplied between two additions in float32.
CHUNK = 64
# Rows of x of a block, and features of a warpgroup.
COLUMNS, FEATURES = (16, 32, 64, 96, 128, 256), 64
# Columns whose products a thread has registers for, beside as many sums.
AT_ONCE = 128
# Warpgroups of a block; of three, threads have registers for fewer columns.
GROUPS, OF_THREE = (1, 2, 3), 32
# Into how many parts what is summed may be cut, of which a further launch adds up the results.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
# Bytes of shared memory for what is on its way, and chunks of it.
STAGED, MOST_STAGES = 196608, 8
# Worth measuring.
TILES = 6
# Bytes that x may take once it is split, twice its own, or rounded: a call allocates them.
MOST_PACKED = 2**30
# Cycles per second; bytes per cycle that a multiprocessor copies, or loads and splits (fitted); cycles that a block
# takes beside its chunks, and a chunk beside its products; bytes per second of memory.
CLOCK, STREAMED, BLOCK, STEP, MEMORY = 1.75e9, 24.0, 6000.0, 100.0, 2.8e12
# Seconds of a launch that follows another.
LAUNCH = 5e-6


# How an operand varies over the result: as over that of a convolution; one number per row, or per feature of a sample;
# or as one sample does, alike for all of them.
Operand = Varies | Literal["row", "feature of sample", "repeated"]


@dataclass(frozen=True)
class Linear:
    """A group: matmul -> pointwise -> reduction.

    x         the other operand, as it lies in memory: (..., K, M) where it is `turned`, else (..., M, K)
    w         the weight, as it lies in memory: (N, K) with `features_first`, else (K, N), of each sample where that has
              one of its own
    across    whether the result is (..., N, M), and not (..., M, N)
    after     the pointwise operations, if any
    fold      the reduction of all of that to one number, if any
    last      pointwise operations on that number, if any
    operands  what the pointwise operations read from memory: ahead of the reduction, and numbers that are read behind
    """

    root: Node
    matmul: Node
    x: Node
    turned: bool
    w: Node
    features_first: bool
    across: bool
    after: Tree | None
    fold: Fold | None
    last: Tree | None
    operands: tuple[Node, ...]
    numbers: tuple[Node, ...]

    @property
    def bias(self) -> Node | None:
        return self.matmul.args[2]

    @property
    def value(self) -> Node:
        """What is reduced, or written."""
        return self.matmul if self.after is None else self.after.root

    @property
    def convolves(self) -> bool:
        """Whether it stands for a convolution, and may be rounded as these may."""
        return isinstance(self.matmul.op, ops.Matmul) and self.matmul.op.convolves

    @property
    def by_sample(self) -> bool:
        """Whether every sample has a weight of its own."""
        return self.w.ndim > 2

    @property
    def tensors(self) -> tuple[Node, ...]:
        """What a call passes."""
        return tuple(
            dict.fromkeys([self.x, self.w, *([] if self.bias is None else [self.bias]), *self.operands, *self.numbers])
        )

    @property
    def features(self) -> Size:
        return self.w.shape[-2 if self.features_first else -1]

    @property
    def summed(self) -> int:
        """Numbers that are multiplied and added for one of the output's."""
        return int(self.x.shape[-2 if self.turned else -1])

    @property
    def is_short(self) -> bool:
        """Whether sums are of a chunk's numbers at most, so that the library rounds them but a few times."""
        return self.summed <= CHUNK

    @property
    def rows(self) -> tuple[Size, ...]:
        """The lengths of x but for K: what rows are counted by."""
        return (*self.x.shape[:-2], self.x.shape[-1 if self.turned else -2])

    def varies(self, operand: Node) -> Operand:
        found = _varies(operand, self.value, self.across)
        assert found is not None
        return found


@dataclass(frozen=True)
class MatmulTile:
    """How a group is cut.

    columns  rows of x of a block
    groups   warpgroups of a block, each with 64 features
    parts    into how many the sums are cut
    rounded  whether numbers are rounded to halves, and not split into two of these
    """

    columns: int
    groups: int
    parts: int
    rounded: bool = False

    @property
    def features(self) -> int:
        return FEATURES * self.groups

    @property
    def in_turns(self) -> bool:
        """Whether two warpgroups take turns, one multiplying while the other one splits: else threads have no registers
        for the sums."""
        return self.columns > AT_ONCE

    @property
    def at_once(self) -> int:
        """Columns that an instruction multiplies."""
        return min(self.columns, AT_ONCE)

    @property
    def stage_bytes(self) -> int:
        """Of a chunk of x: two halves for each number, or one."""
        return 2 * self.numbers * CHUNK * self.columns

    @property
    def numbers(self) -> int:
        """Halves for each number of x."""
        return 1 if self.rounded else 2

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, STAGED // self.stage_bytes)

    @property
    def per_sm(self) -> int:
        """Blocks that share a multiprocessor."""
        return 2 if self.stages * self.stage_bytes <= STAGED // 2 else 1


def match(root: Node, users: Users) -> Linear | str:
    """The group that ends in `root`, or why there is none."""
    chain = parse(root, users, lambda n: isinstance(n.op, ops.Matmul))
    if isinstance(chain, str):
        return chain
    matmul = chain.source
    x, w, turned, features_first, across = _roles(matmul)
    if _is_turned(x) and x not in chain.operands and isinstance(x.shape[-2], int):  # a view, which need not be a copy
        x, turned = x.arg(0), not turned
    if _is_turned(w) and w not in chain.operands:
        w, features_first = w.arg(0), not features_first
    before, fold, behind = _stages(chain.stages)
    if [stage for stage in (before, fold, behind) if stage is not None] != list(chain.stages):
        return f"{root!r} is not pointwise behind a matmul, and then reduced"
    if not isinstance(x.shape[-2 if turned else -1], int) or (w.ndim > 2 and w.shape[:-2] != x.shape[:-2]):
        return f"{matmul!r} multiplies computed values of unlike samples, or sums nobody knows how many products"
    if (turned or across) and not isinstance(x.shape[-1 if turned else -2], int):
        return f"{matmul!r} has samples of rows of which it is not known how many there are"
    value = matmul if before is None else before.root

    def fits(node: Node) -> bool:
        return node.dtype in (torch.float32, torch.bool) and _varies(node, value, across) is not None

    after, last = _tree(before, users, fits), _tree(behind, users, lambda node: False)
    trees = (None if tree is None else unsupported(tree) for tree in (after, last))
    problem = next((p for p in (_refused(fold, value.ndim), *trees) if p is not None), None)
    if problem is not None:
        return problem
    operands, numbers = _operands(after), _operands(last)
    memory = (x, w, root, *(n for n in (*operands, *numbers, *matmul.inputs[2:]) if n.dtype != torch.bool))
    if any(n.dtype != torch.float32 for n in memory):
        return f"{root!r} is not of float32 alone"
    wrong = [n for n in operands if _varies(n, value, across) is None or (w.ndim > 2 and n is w)]
    wrong += [n for n in numbers if any(d != 1 for d in n.shape)]
    if wrong:
        return f"operand {wrong[0]!r} is neither a number, nor one per feature or row, nor one per element"
    return Linear(root, matmul, x, turned, w, features_first, across, after, fold, last, operands, numbers)


def _stages(stages: tuple[Stage, ...]) -> tuple[Map | None, Fold | None, Map | None]:
    """The pointwise operations, the reduction and what follows it, as far as there are such."""
    folds = [stage for stage in stages if isinstance(stage, Fold)]
    maps = [stage for stage in stages if isinstance(stage, Map)]
    fold = folds[0] if folds else None
    before = maps[0] if maps and stages[0] is maps[0] else None
    return before, fold, maps[-1] if fold is not None and maps and stages[-1] is maps[-1] else None


def _tree(stage: Map | None, users: Users, fits: Callable[[Node], bool]) -> Tree | None:
    """A stage, with functions of operands that may be computed in it."""
    return None if stage is None else Tree(stage.root, leaves_beside(stage, users, fits), stage.value)


def _operands(tree: Tree | None) -> tuple[Node, ...]:
    """What a tree reads from memory."""
    found = () if tree is None else tree.leaves
    return tuple(n for n in found if tree is not None and n is not tree.value and not isinstance(n.op, ops.Full))


def _refused(fold: Fold | None, ndim: int) -> str | None:
    """Why a reduction is none of a block's elements alone."""
    if fold is None:
        return None
    whole = fold.op.dims == tuple(range(ndim)) and not fold.op.gives_index
    return unsupported(fold) if whole else f"{fold.node!r} leaves more than one number"


def _roles(matmul: Node) -> tuple[Node, Node, bool, bool, bool]:
    """x and whether it is turned, the weight, whether that is (N, K), and whether it comes first; one matrix for all
    samples is the weight."""
    assert isinstance(matmul.op, ops.Matmul)
    x, w, transposed = matmul.arg(0), matmul.arg(1), matmul.op.transpose_w
    if _is_repeated(x) and w.ndim > 2 and matmul.args[2] is None:
        return w, _once(x), not transposed, True, True
    return x, _once(w), False, transposed, False


def _is_repeated(w: Node) -> bool:
    """Whether this is one matrix for every sample."""
    return w.ndim == 2 or (isinstance(w.op, ops.Expand) and w.arg(0).ndim == 2 and w.shape[-2:] == w.arg(0).shape)


def _once(w: Node) -> Node:
    """The matrix that is repeated, if this is one."""
    return w.arg(0) if w.ndim > 2 and _is_repeated(w) else w


def _is_turned(x: Node) -> bool:
    """Whether this is a view with the last two dimensions swapped."""
    swapped = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return isinstance(x.op, ops.Permute) and not x.op.copy and x.op.dims == swapped


def _varies(operand: Node, value: Node, across: bool) -> Operand | None:
    """How an operand does over the result, whose features lie along the last dimension, or `across`."""
    feature = value.ndim - (2 if across else 1)
    if operand.shape == (*value.shape[:feature], 1, *value.shape[feature + 1 :]) and numel(operand.shape) != 1:
        return "row"
    if not across and value.ndim > 2 and operand.shape == (*value.shape[:-2], 1, value.shape[-1]):
        return "feature" if numel(operand.shape) == value.shape[-1] else "feature of sample"
    if _is_repeated_for_samples(operand, value):
        return "repeated"
    if not across or all(d == 1 for d in operand.shape):
        return varies(operand, value)
    if operand.ndim > 1 and operand.shape[-2] == value.shape[-2] and numel(operand.shape) == value.shape[-2]:
        return "feature"
    return "element" if operand.shape == value.shape else None


def _is_repeated_for_samples(operand: Node, value: Node) -> bool:
    """Whether this is as the last dimensions of `value`, two at least: a position's embedding."""
    lengths = [*operand.shape]
    while lengths and lengths[0] == 1:
        del lengths[0]
    of_value = [*value.shape[value.ndim - len(lengths) :]]
    return 1 < len(lengths) < value.ndim and lengths == of_value and all(isinstance(n, int) for n in lengths)


@dataclass(frozen=True)
class Extent:
    """How much there is of a group in one call: rows of x and features of each of so many samples."""

    rows: int
    features: int
    samples: int = 1


def tiles(group: Linear, of: Extent, *, rounded: bool = False) -> list[MatmulTile]:
    """Tiles worth measuring, best estimate first; `rounded` where that is allowed."""
    if (4 if rounded else 8) * of.samples * of.rows * group.summed > MOST_PACKED:
        return []
    each = product(COLUMNS, GROUPS, PARTS, (rounded,))
    most = 1 if group.by_sample or group.fold is not None else max(1, group.summed // (4 * CHUNK))
    cut = [t for t in (MatmulTile(*one) for one in each) if t.parts <= most]
    found = [t for t in cut if t.groups < 3 or t.columns <= OF_THREE]
    found = [t for t in found if not t.in_turns or (t.groups == 2 and not group.is_short)]
    return sorted(found, key=lambda t: seconds(group, t, of))[:TILES]


def seconds(group: Linear, t: MatmulTile, of: Extent) -> float:
    """About how long the kernel takes."""
    m, n, k = of.samples * of.rows, of.features, group.summed
    across = of.samples * ceil(of.rows / t.columns)
    blocks = across * ceil(n / t.features) * t.parts
    at_once = MULTIPROCESSORS * t.per_sm
    chunks = ceil(k / CHUNK / t.parts)
    products = 1 if t.rounded else 4 if group.is_short else 3
    multiplied = 4 * products * (t.columns / 2) * t.groups + STEP * (products if group.is_short else 1)
    streamed = (t.stage_bytes + 4 * CHUNK * t.features) / STREAMED
    cycles = ceil(blocks / at_once) * (chunks * max(multiplied, streamed) * (at_once // MULTIPROCESSORS) + BLOCK)
    packed = (4 + 2 * t.numbers) * across * t.columns * k
    joined = 0 if t.parts == 1 else 4 * (2 * t.parts + 1) * m * n
    passing = (packed + joined) / MEMORY + LAUNCH * (1 + (t.parts > 1))
    return max(cycles / CLOCK, 4 * n * k / MEMORY) + passing
