"""Matmuls of float32 by a weight, with pointwise operations behind them, for the tensor cores of Hopper.

    f(x @ w + bias)            x (..., M, K), w (K, N) or (N, K)
    f(x.mT @ w), f(w @ x)      x (..., K, M), w one weight for all samples: x is split as it lies

Where tf32 is not allowed, every number is the sum of two of tf32, and a product is three (3xTF32: Ootomo and Yokota,
"Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", 2022).
Tensor cores truncate as they accumulate, so that sums over a few numbers are added up in float32.

Where the model has a convolution in a matmul's place (`ops.Matmul.convolves`) and those may be rounded to tf32, a
number is one of tf32, and a product is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.types import Size, numel
from fusewright.schedule.chain import Map, Users, Varies, leaves, parse, varies
from fusewright.schedule.stream import Tree, unsupported
from fusewright.schedule.tiling import MULTIPROCESSORS

# Numbers of x and of w that are multiplied between two additions in float32.
CHUNK = 32
# Rows of x of a block, and features of a warpgroup.
COLUMNS, FEATURES = (16, 32, 64, 96, 128), 64
# Warpgroups of a block; of three, threads have registers for fewer columns.
GROUPS, OF_THREE = (1, 2, 3), 64
# Into how many parts what is summed may be cut, of which a further launch adds up the results.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
# Bytes of shared memory for what is on its way, and chunks of it.
STAGED, MOST_STAGES = 196608, 8
# Worth measuring.
TILES = 6
# Bytes that x may take once it is split, twice its own, or rounded: a call allocates them.
MOST_PACKED = 2**30
# Cycles per second; bytes per cycle that a multiprocessor gets from the level-2 cache; cycles that a block takes beside
# its chunks, and a chunk beside its products; bytes per second of memory.
CLOCK, STREAMED, BLOCK, STEP, MEMORY = 1.75e9, 28.0, 6000.0, 100.0, 2.8e12
# Seconds of a launch that follows another.
LAUNCH = 5e-6


@dataclass(frozen=True)
class Linear:
    """A group: matmul -> pointwise.

    x         the other operand, as it lies in memory: (..., K, M) where it is `turned`, else (..., M, K)
    w         the weight, as it lies in memory: (N, K) with `features_first`, else (K, N)
    across    whether the result is (..., N, M), and not (..., M, N)
    after     the pointwise operations, if any
    operands  what these read from memory
    """

    root: Node
    matmul: Node
    x: Node
    turned: bool
    w: Node
    features_first: bool
    across: bool
    after: Tree | None
    operands: tuple[Node, ...]

    @property
    def bias(self) -> Node | None:
        return self.matmul.args[2]

    @property
    def convolves(self) -> bool:
        """Whether it stands for a convolution, and may be rounded as these may."""
        return isinstance(self.matmul.op, ops.Matmul) and self.matmul.op.convolves

    @property
    def tensors(self) -> tuple[Node, ...]:
        """What a call passes."""
        return tuple(dict.fromkeys([self.x, self.w, *([] if self.bias is None else [self.bias]), *self.operands]))

    @property
    def features(self) -> int:
        return int(self.root.shape[-2 if self.across else -1])

    @property
    def summed(self) -> int:
        """Numbers that are multiplied and added for one of the output's."""
        return int(self.x.shape[-2 if self.turned else -1])

    @property
    def rows(self) -> tuple[Size, ...]:
        """The lengths of x but for K: what rows are counted by."""
        return (*self.x.shape[:-2], self.x.shape[-1 if self.turned else -2])

    def varies(self, operand: Node) -> Varies | Literal["row", "repeated"]:
        found = _varies(operand, self.root, self.across)
        assert found is not None
        return found


@dataclass(frozen=True)
class MatmulTile:
    """How a group is cut.

    columns  rows of x of a block
    groups   warpgroups of a block, each with 64 features
    parts    into how many the sums are cut
    rounded  whether numbers are rounded to tf32, and not split into two of these
    """

    columns: int
    groups: int
    parts: int
    rounded: bool = False

    @property
    def features(self) -> int:
        return FEATURES * self.groups

    @property
    def stage_bytes(self) -> int:
        """Of a chunk of x: two numbers of tf32 for each of its own, or one."""
        return 4 * self.numbers * CHUNK * self.columns

    @property
    def numbers(self) -> int:
        """Of tf32, for each of x."""
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
    matmul, stages = chain.source, chain.stages
    x, w, features_first, across = _roles(matmul)
    turned = across
    if _is_turned(x) and x not in chain.operands and isinstance(x.shape[-2], int):  # a view, which need not be a copy
        x, turned = x.arg(0), not turned
    if _is_turned(w) and w not in chain.operands:
        w, features_first = w.arg(0), not features_first
    behind = [stage for stage in stages if isinstance(stage, Map)]
    if len(stages) > 1 or len(behind) < len(stages):
        return f"{root!r} is not pointwise behind a matmul"
    if w is x or w.ndim != 2 or not all(isinstance(d, int) for d in (*w.shape, x.shape[-2 if turned else -1])):
        return f"{matmul!r} multiplies two computed values"
    if (turned or across) and not isinstance(x.shape[-1 if turned else -2], int):
        return f"{matmul!r} has samples of rows of which it is not known how many there are"
    after = Tree(root, leaves(behind[0]), matmul) if behind else None
    problem = None if after is None else unsupported(after)
    if problem is not None:
        return problem
    operands = tuple(n for n in chain.operands if not isinstance(n.op, ops.Full))
    memory = (x, w, *operands, root, *([] if matmul.args[2] is None else [matmul.arg(2)]))
    if any(n.dtype != torch.float32 for n in memory):
        return f"{root!r} is not of float32 alone"
    wrong = [n for n in operands if _varies(n, root, across) is None]
    if wrong:
        return f"operand {wrong[0]!r} is neither a number, nor one per feature or row, nor one per element"
    return Linear(root, matmul, x, turned, w, features_first, across, after, operands)


def _roles(matmul: Node) -> tuple[Node, Node, bool, bool]:
    """x, the weight, whether that is (N, K), and whether it comes first; one weight for all samples is that weight."""
    assert isinstance(matmul.op, ops.Matmul)
    x, w = matmul.arg(0), matmul.arg(1)
    if _is_repeated(x) and not matmul.op.transpose_w and matmul.args[2] is None:
        return w, x.arg(0), True, True
    return x, w.arg(0) if _is_repeated(w) else w, matmul.op.transpose_w, False


def _is_repeated(w: Node) -> bool:
    """Whether this is one matrix for every sample."""
    return isinstance(w.op, ops.Expand) and w.arg(0).ndim == 2 and w.shape[-2:] == w.arg(0).shape


def _is_turned(x: Node) -> bool:
    """Whether this is a view with the last two dimensions swapped."""
    swapped = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return isinstance(x.op, ops.Permute) and not x.op.copy and x.op.dims == swapped


def _varies(operand: Node, root: Node, across: bool) -> Varies | Literal["row", "repeated"] | None:
    """How an operand does over the result, whose features lie along the last dimension, or `across`: one number per
    row as well, and one per element of a sample, the same for each."""
    feature = root.ndim - (2 if across else 1)
    if operand.shape == (*root.shape[:feature], 1, *root.shape[feature + 1 :]) and numel(operand.shape) != 1:
        return "row"
    if _is_repeated_for_samples(operand, root):
        return "repeated"
    if not across or all(d == 1 for d in operand.shape):
        return varies(operand, root)
    if operand.ndim > 1 and operand.shape[-2] == root.shape[-2] and numel(operand.shape) == root.shape[-2]:
        return "feature"
    return "element" if operand.shape == root.shape else None


def _is_repeated_for_samples(operand: Node, root: Node) -> bool:
    """Whether this is as the last dimensions of `root`, two at least: a position's embedding."""
    lengths = [*operand.shape]
    while lengths and lengths[0] == 1:
        del lengths[0]
    of_root = [*root.shape[root.ndim - len(lengths) :]]
    return 1 < len(lengths) < root.ndim and lengths == of_root and all(isinstance(n, int) for n in lengths)


def tiles(group: Linear, rows: int, *, rounded: bool = False) -> list[MatmulTile]:
    """Tiles worth measuring for so many rows of x, best estimate first; `rounded` to tf32 where that is allowed."""
    if (4 if rounded else 8) * rows * group.summed > MOST_PACKED:
        return []
    each = product(COLUMNS, GROUPS, PARTS, (rounded,))
    most = max(1, group.summed // (4 * CHUNK))
    cut = [t for t in (MatmulTile(*one) for one in each) if t.parts <= most]
    found = [t for t in cut if t.groups < 3 or t.columns <= OF_THREE]
    return sorted(found, key=lambda t: seconds(group, t, rows))[:TILES]


def seconds(group: Linear, t: MatmulTile, rows: int) -> float:
    """About how long the kernel takes for so many rows of x."""
    m, n, k = rows, group.features, group.summed
    across = ceil(m / t.columns)
    blocks = across * ceil(n / t.features) * t.parts
    at_once = MULTIPROCESSORS * t.per_sm
    chunks = ceil(k / CHUNK / t.parts)
    multiplied = (4 if t.rounded else 12) * (t.columns / 2) * t.groups + STEP
    streamed = (t.stage_bytes + 4 * CHUNK * t.features) / STREAMED
    cycles = ceil(blocks / at_once) * (chunks * max(multiplied, streamed) * (at_once // MULTIPROCESSORS) + BLOCK)
    packed = 4 * (1 + t.numbers) * across * t.columns * k
    joined = 0 if t.parts == 1 else 4 * (2 * t.parts + 1) * m * n
    passing = (packed + joined) / MEMORY + LAUNCH * (1 + (t.parts > 1))
    return max(cycles / CLOCK, 4 * n * k / MEMORY) + passing
