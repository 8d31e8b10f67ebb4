"""Chains: source -> pointwise -> softmax or window pool -> pointwise -> reduction, read backwards from the last node.

A chain is what one kernel can carry out on a tile of its source while the tile is at hand.  The stages are
target-independent; a family says which sources and which stages it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias
from weakref import WeakKeyDictionary

import sympy
import torch

from fusewright.ir import ops
from fusewright.ir.node import Node, topological

if TYPE_CHECKING:
    from fusewright.schedule.kept_channels import KeptChannels

Users = Mapping[Node, int]

# What tensors that kernels read and write consist of.
MEMORY = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# What computes each element by itself.
POINTWISE = (ops.Pointwise, ops.Cast, ops.Detach)

# What computes nothing, though an operation of others may copy it.
VIEWS = (ops.Reshape, ops.Permute, ops.Expand, ops.Slice, ops.Windows, ops.Detach)

# Reductions that read twice.
TWO_PASSES = ("logsumexp", "var", "std")


@dataclass(frozen=True)
class Map:
    """A tree of pointwise operations from `value` to `root`, of one shape; every other leaf is an operand."""

    value: Node
    root: Node


@dataclass(frozen=True)
class Window:
    """A window pooling."""

    node: Node

    @property
    def op(self) -> ops.Pool:
        assert isinstance(self.node.op, ops.Pool)
        return self.node.op


@dataclass(frozen=True)
class Fold:
    """A reduction."""

    node: Node

    @property
    def op(self) -> ops.Reduce:
        assert isinstance(self.node.op, ops.Reduce)
        return self.node.op


@dataclass(frozen=True)
class Shares:
    """A softmax, or its logarithm."""

    node: Node

    @property
    def op(self) -> ops.Softmax:
        assert isinstance(self.node.op, ops.Softmax)
        return self.node.op

    @property
    def value(self) -> Node:
        return self.node.arg(0)


Stage: TypeAlias = "Map | Window | Shares | KeptChannels | Fold"
STAGES: dict[type[ops.Op], type[Window] | type[Shares] | type[Fold]] = {
    ops.Pool: Window, ops.Softmax: Shares, ops.Reduce: Fold,
}  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """`stages` in the order they run on `source`; `operands` are the other values they read, in order of first use."""

    source: Node
    stages: tuple[Stage, ...]
    operands: tuple[Node, ...]


def parse(root: Node, users: Users, is_source: Callable[[Node], bool]) -> Chain | str:
    """The chain that ends in `root` and starts at the first node for which `is_source` holds, or why there is none.

    Inner nodes have no user outside the chain.
    """
    stages: list[Stage] = []
    operands: dict[Node, None] = {}
    node = root
    while not is_source(node):
        if node is not root and not isinstance(stages[-1], Map) and users[node] != 1:
            return f"{node!r} has another user"
        if isinstance(node.op, POINTWISE):
            stage = _map(node, users, is_source)
            if isinstance(stage, str):
                return stage
            operands.update((leaf, None) for leaf in leaves(stage) if leaf is not stage.value)
            stages.append(stage)
            node = stage.value
        elif type(node.op) in STAGES:
            stages.append(STAGES[type(node.op)](node))
            node = node.arg(0)
        else:
            return f"{node!r} is no stage of a chain"
    if node is not root and not isinstance(stages[-1], Map) and users[node] != 1:
        return f"{node!r} has another user"
    return Chain(node, tuple(reversed(stages)), tuple(operands))


def leaves(stage: Map) -> tuple[Node, ...]:
    """Everything that a tree of pointwise operations reads, Python numbers left out."""
    found: dict[Node, None] = {}
    inner = region(stage)
    for node in inner:
        found.update((a, None) for a in node.inputs if a not in inner and not isinstance(a.op, ops.Number))
    return tuple(found)


def leaves_beside(stage: Map, users: Users, fits: Callable[[Node], bool]) -> tuple[Node, ...]:
    """The same where functions of operands are computed beside the tree: of such a leaf what it reads, if all of that
    `fits`.

    conv(x) * sigmoid(t)       reads t, and no sigmoid(t), which would be written for it
    conv(x) * sigmoid(conv(t)) reads sigmoid(conv(t)), for the kernel that gives conv(t) may as well give that
    """
    uses = Counter(a for n in region(stage) for a in n.inputs)
    found: dict[Node, None] = {}
    for leaf in leaves(stage):
        apart = leaf is stage.value or uses[leaf] < users[leaf] or leaf.shape != stage.root.shape
        read = (leaf,) if apart else _read_for(leaf, users, fits)
        found.update(dict.fromkeys(read))
    return tuple(found)


def _read_for(leaf: Node, users: Users, fits: Callable[[Node], bool]) -> tuple[Node, ...]:
    """What is read to compute an operand, itself where it is no function of one tensor that is in memory anyway."""
    if not isinstance(leaf.op, POINTWISE) or is_ahead(leaf):
        return (leaf,)
    inner, read = taken_in([leaf], users, lambda n: isinstance(n.op, POINTWISE) and n.shape == leaf.shape)
    large = [n for n in read if n.shape == leaf.shape]
    refused = any(refuses(n) or is_sized(n) or is_rounded(n) for n in inner)
    refused = refused or any(isinstance(n.op, ops.Full) or not fits(n) for n in read)
    if refused or len(large) != 1 or not _is_at_hand(large[0], read, users):
        return (leaf,)
    return tuple(read)


def _is_at_hand(node: Node, read: Mapping[Node, int], users: Users) -> bool:
    """Whether a value lies in memory, row by row, even if nobody reads it here: others do, or a call passes it."""
    base = node
    while isinstance(base.op, ops.Reshape | ops.Detach):
        base = base.arg(0)
    given = isinstance(base.op, ops.Input | ops.Param | ops.Buffer)
    return not isinstance(base.op, VIEWS) and (given or users[node] > read[node])


def region(stage: Map) -> dict[Node, None]:
    """The pointwise nodes between `value` and `root` that lie on a way from the one to the other, root first."""
    carries: dict[Node, bool] = {stage.value: True}

    def carry(node: Node) -> bool:
        if node not in carries:
            carried = [carry(a) for a in node.inputs] if isinstance(node.op, POINTWISE) else []
            carries[node] = any(carried)
        return carries[node]

    carry(stage.root)
    found: dict[Node, None] = {stage.root: None}
    stack = [stage.root]
    while stack:
        for a in stack.pop().inputs:
            if a is not stage.value and carries.get(a) and a not in found:
                found[a] = None
                stack.append(a)
    return found


def pointwise_tree(
    root: Node, users: Users, ends: Callable[[Node], bool] = lambda _: False
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """What the largest pointwise tree that ends in `root` reads, Python numbers left out; and of that, what has the
    tree's shape and no user outside of it.

    Inner nodes have the shape of `root` and are used inside the tree alone; those for which `ends` holds stay outside.
    """

    def fits(node: Node) -> bool:
        return isinstance(node.op, POINTWISE) and node.shape == root.shape and not ends(node)

    _, read = taken_in([root], users, fits)
    return tuple(read), tuple(n for n, uses in read.items() if uses >= users[n] and n.shape == root.shape)


def used_inside(root: Node, users: Users, fits: Callable[[Node], bool], most: int = 1 << 30) -> set[Node]:
    """The nodes that `fits` holds for, from `root` on as far as nobody else uses them; about so many at `most`."""
    return set(taken_in([root], users, fits, most)[0]) if fits(root) else set()


def taken_in(
    roots: Iterable[Node], users: Users, fits: Callable[[Node], bool], most: int = 1 << 30
) -> tuple[dict[Node, None], dict[Node, int]]:
    """`roots`, and the nodes that `fits` holds for, from them on as far as nobody else uses them, about so many at
    `most`; and how often these use each of what they read, Python numbers left out.  What is computed ahead of calls is
    read."""
    inner = dict.fromkeys(roots)
    while True:
        read: dict[Node, int] = {}
        for node in inner:
            for a in node.inputs:
                if a not in inner and not isinstance(a.op, ops.Number):
                    read[a] = read.get(a, 0) + 1
        more = [n for n, uses in read.items() if uses >= users[n] and fits(n) and not is_ahead(n)]
        if not more or len(inner) > most:
            return inner, read
        inner.update(dict.fromkeys(more))


_AHEAD: WeakKeyDictionary[Node, bool] = WeakKeyDictionary()


def is_ahead(node: Node) -> bool:
    """Whether a value is computed ahead of calls, and is to be: of weights alone, and no larger than what is read of
    all of those.

    t / norm(t)  is;  a (N, 1) + b (M)  is not: a kernel reads less of both than of their sum
    """
    if node.varies or not node.inputs or isinstance(node.op, VIEWS):
        return False
    if node not in _AHEAD:
        below = topological([node])
        known = not any(isinstance(d, sympy.Expr) for n in below for d in n.shape)
        settled = known and not any(n.op.effectful for n in below)
        _AHEAD[node] = settled and _bytes(node) <= sum(_weights_read(below).values())
    return _AHEAD[node]


def _weights_read(nodes: Iterable[Node]) -> dict[Node, int]:
    """Bytes of the weights that some of these nodes compute on, or of what these see of them."""
    found: dict[Node, int] = {}
    for view in {a for n in nodes if not isinstance(n.op, VIEWS) for a in n.inputs}:
        least, weight = _bytes(view), view
        while isinstance(weight.op, VIEWS):
            weight = weight.arg(0)
            least = min(least, _bytes(weight))
        if isinstance(weight.op, ops.Param | ops.Buffer | ops.Constant):
            found[view] = least
    return found


def _bytes(node: Node) -> int:
    return prod(map(int, node.shape)) * node.dtype.itemsize


def _map(root: Node, users: Users, is_source: Callable[[Node], bool]) -> Map | str:
    """The largest pointwise tree that ends in `root` and starts at a source or at another stage."""
    _, own = pointwise_tree(root, users, is_source)
    sources = [n for n in own if is_source(n)]
    # Of several, that which multiplies most: what the others give is read meanwhile.
    values = [max(sources, key=_weights)] if sources else [n for n in own if type(n.op) in STAGES]
    if not values:
        return f"{root!r} combines values that no chain leads to"
    found = Map(values[0], root)
    sized = next(filter(is_sized, region(found)), None)
    return found if sized is None else f"{sized!r} depends on a size"


def _weights(source: Node) -> int:
    """Elements of what a convolution or a matmul multiplies its input by, as far as they are known."""
    return prod(d for n in source.inputs[1:2] for d in n.shape if isinstance(d, int))


def depends_on(nodes: Iterable[Node], given: Iterable[Node]) -> set[Node]:
    """Those of `nodes`, which come after what they read, that are computed from some that are `given`."""
    given = set(given)
    found: set[Node] = set()
    for node in nodes:
        if any(a in found or a in given for a in node.inputs):
            found.add(node)
    return found


def refuses(node: Node) -> bool:
    """Whether `node` is a function that eager does not answer for every number."""
    return isinstance(node.op, ops.Pointwise) and node.op.refuses


def is_sized(node: Node) -> bool:
    """Whether `node` reads a number that depends on the batch: no text of ours has those."""
    return any(isinstance(a.op, ops.Number) and isinstance(a.op.value, sympy.Expr) for a in node.inputs)


# How an operand varies over a value whose last dimension is its features: not at all, by feature, or by element.
Varies = Literal["", "feature", "element"]


def varies(operand: Node, value: Node) -> Varies | None:
    """How `operand` does over `value`; `None` where it is in another way."""
    if all(d == 1 for d in operand.shape):
        return ""
    if operand.shape[-1] == value.shape[-1] and all(d == 1 for d in operand.shape[:-1]):
        return "feature"
    return "element" if operand.shape == value.shape else None


WORDS = {"layer": "layernorm", "rms": "rmsnorm", "group": "groupnorm", "instance": "instancenorm"}


def is_rounded(node: Node) -> bool:
    """Whether `node` is a value cast to a narrower type and back, which must lose its last digits on the way."""
    if not isinstance(node.op, ops.Cast) or not isinstance(node.arg(0).op, ops.Cast):
        return False
    narrow = node.arg(0)
    floats = narrow.dtype.is_floating_point and narrow.arg(0).dtype.is_floating_point
    return floats and narrow.dtype.itemsize < min(node.dtype.itemsize, narrow.arg(0).dtype.itemsize)


def word(node: Node) -> str | None:
    """The short word for an operation in a kernel's name, `None` for what only reshapes or converts."""
    match node.op:
        case ops.Conv(transposed=transposed):
            return "convtranspose" if transposed else "conv"
        case ops.Matmul():
            return "linear"
        case ops.Pool(kind=kind) | ops.Reduce(kind=kind):
            return kind
        case ops.Norm(kind=kind):
            return WORDS.get(kind, f"{kind}norm")
        case ops.Pointwise(fn=fn):
            return fn
        case ops.Softmax(log=log):
            return "logsoftmax" if log else "softmax"
        case ops.Scan(kind=kind):
            return "logcumsumexp" if kind == "logsumexp" else f"cum{kind}"
        case ops.RangeSum():
            return "rangesum"
        case ops.Statistics():
            return "statistics"
        case (
            ops.Cross() | ops.Embedding() | ops.Cat() | ops.Pad() | ops.Roll() | ops.Flip() | ops.Unfold() | ops.Fold()
        ):
            return type(node.op).__name__.lower()
        case ops.Upsample() | ops.Interpolate():
            return type(node.op).__name__.lower()
    return None


def chain_name(words: list[str]) -> str:
    """A kernel's name from its words, repeated ones once, at most 60 characters; without words it but converts."""
    short: list[str] = []
    for w in words:
        if not short or short[-1] != w:
            short.append(w)
    return "_".join(["fused", *(short or ["cast"])])[:60].rstrip("_")
