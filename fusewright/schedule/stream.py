"""The streaming family: pointwise -> window pool -> pointwise -> one or two reductions, over values in memory.

Every element is read once and nothing but the result is written.  What a kernel needs to know of shapes is which
dimensions are alike: neighbours that are pooled, reduced and broadcast alike merge into one *axis*.  An embedding is
never in memory where the stream alone uses it: rows of its weight are read where they are wanted.  So are the parts of
a concatenation, where it is along an axis of its own, and views, which would have to be copied to lie row by row:
slices, and permutations that leave the last dimension where it is.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Literal

import torch

from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.intervals import index_count, interval
from fusewright.ir.node import Node, make, topological
from fusewright.schedule.chain import (
    MEMORY,
    POINTWISE,
    Fold,
    Users,
    Window,
    is_rounded,
    is_sized,
    pointwise_tree,
    taken_in,
)
from fusewright.schedule.stream_axes import Axes
from fusewright.schedule.stream_record import (
    WHOLE,
    Stream,
    Tree,
    is_entry,
    nodes,
)

FOLDS = ("sum", "mean", "max", "min", "logsumexp", "norm", "var", "std", "argmax", "argmin")

# Operations on a few numbers for each sample that threads repeat.
FEW_OPERATIONS = 8

NARROW = (torch.bfloat16, torch.float16)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

Stage = Tree | Window | Fold


def parse(root: Node, users: Users, *, parts: bool = True) -> Stream | str:
    """The longest stream that ends in `root`, or why there is none.

    Inner nodes have no user outside of it: what others use is in memory, and a stream may start there.  Without `parts`
    what is concatenated is in memory as well.
    """
    stages = _backwards(root, users)
    problem = f"{root!r} is no stage of a stream"
    for start in range(len(stages)):
        found = _stream(stages[start:], users, parts)
        if isinstance(found, Stream):
            return found
        problem = found
    return problem


def _backwards(root: Node, users: Users) -> list[Stage]:
    """All stages that lead to `root`, the first one first."""
    stages: list[Stage] = []
    node: Node | None = root
    while node is not None:
        if isinstance(node.op, POINTWISE):
            tree = _tree(node, users)
            stages.append(tree)
            node = tree.value
        elif isinstance(node.op, ops.Pool | ops.Reduce):
            stages.append(Window(node) if isinstance(node.op, ops.Pool) else Fold(node))
            node = node.arg(0) if users[node.arg(0)] == 1 else None
        else:
            break
    return stages[::-1]


def _tree(root: Node, users: Users) -> Tree:
    """The largest tree that ends in `root`, and the stage it starts at, if any.

    A few numbers for each sample that are functions of entries of a table are computed where they are read: they would
    be launches of their own.
    """
    read, own = pointwise_tree(root, users)
    value = next((n for n in own if isinstance(n.op, ops.Pool | ops.Reduce)), None)
    of_entries = [n for n in read if n.shape[-1:] == (1,) and n.shape != root.shape and _is_of_entries(n)]
    if not of_entries:
        return Tree(root, read, value)
    inner = set(topological([root], read))

    def fits(node: Node) -> bool:
        return isinstance(node.op, POINTWISE) and (node in inner or _is_of_entries(node))

    return Tree(root, tuple(taken_in([root], users, fits)[1]), value)


def _is_of_entries(node: Node) -> bool:
    """Whether a value is a function, of few operations, of entries of tables and of numbers alone."""
    seen: set[Node] = set()
    stack = [node]
    while stack and len(seen) <= FEW_OPERATIONS:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if isinstance(n.op, POINTWISE):
            stack += [a for a in n.inputs if not isinstance(a.op, ops.Number)]
        elif not is_entry(n):
            return False
    return not stack


def _stream(stages: list[Stage], users: Users, parts: bool) -> Stream | str:
    """These stages as a stream: T?(WT?)?(FT?)?(FT?)? with T(ree), W(indow), F(old)."""
    letters = "".join(type(stage).__name__[0] for stage in stages)
    matched = re.fullmatch(r"(T?)((?:WT?)?)((?:FT?){0,2})", letters)
    if matched is None:
        return "its stages take more than one pass"
    problem = next(filter(None, map(partial(unsupported, whole=True), stages)), None)
    if problem:
        return problem
    before, window, after = None, None, None
    folds: list[tuple[Fold, Tree | None]] = []
    for i, stage in enumerate(stages):
        if isinstance(stage, Window):
            window = stage
        elif isinstance(stage, Fold):
            folds.append((stage, None))
        elif i == 0:
            before = Tree(stage.root, stage.leaves, None)
        elif folds:
            folds[-1] = (folds[-1][0], stage)
        else:
            after = stage
    used = [f for i, (f, tail) in enumerate(folds) if f.op.gives_index and (tail is not None or i + 1 < len(folds))]
    if used:  # as a kernel's result it would seem to have one
        return f"what is made of {used[0].node!r} has no gradient"
    first = stages[0]
    entry = first.root if isinstance(first, Tree) else first.node.arg(0)
    value = after.root if after else window.node if window else entry
    last = stages[-1]
    root = last.root if isinstance(last, Tree) else last.node
    return Axes(entry, value, before, window, after, tuple(folds), users, parts).stream(root)


def of_rows(tree: Tree, kind: Literal["var", "mean", "logsumexp"], dims: tuple[int, ...], users: Users) -> Stream | str:
    """The stream that reduces what a tree computes over any dimensions."""
    value = tree.root
    fold = Fold(make(ops.Reduce(kind, dims, True, 0), value))
    before = None if tree.leaves == (value,) else tree
    return Axes(value, value, before, None, None, ((fold, None),), users).stream(fold.node, in_order=False)


def of_elements(tree: Tree, users: Users) -> Stream | str:
    """The stream of one of several values that are computed from what the tree reads."""
    return Axes(tree.root, tree.root, tree, None, None, (), users, parts=True).stream(tree.root)


def of_reductions(fold: Fold, read: tuple[Node, ...], tail: Tree, users: Users) -> Stream | str:
    """The stream of one of several reductions of what is computed from what is `read`, with what `tail` makes of all
    (and reads beside them)."""
    value = fold.node.arg(0)
    return Axes(value, value, Tree(value, read, None), None, None, ((fold, tail),), users, parts=True).stream(tail.root)


def unsupported(stage: Stage, *, whole: bool = False) -> str | None:
    """Why a stage cannot be carried out, whatever its sizes; `whole` says that whole numbers may be computed."""
    if isinstance(stage, Fold) and (stage.op.kind not in FOLDS or not stage.op.dims):
        return f"{stage.op.kind} over {stage.op.dims} is no reduction of a stream"
    leaves = stage.leaves if isinstance(stage, Tree) else ()
    if isinstance(stage, Tree):
        numbers = (n for n in leaves if n.dtype in WHOLE and not isinstance(n.op, ops.Number))
        counted = next((n for n in numbers if not _is_read_as_it_is(n, stage, whole)), None)
        if counted is not None:
            return f"{counted!r} is computed with in {counted.dtype}"
    index = isinstance(stage, Fold) and stage.op.gives_index
    if isinstance(stage, Fold) and index and stage.node.arg(0).dtype in WHOLE:
        return f"{stage.node.arg(0)!r} lies in memory as {stage.node.arg(0).dtype}"
    for node in nodes(stage) if isinstance(stage, Tree) else () if index else (stage.node,):
        if node.dtype not in (*MEMORY, torch.bool) and not (whole and is_whole(node)):
            return f"{node!r} is computed in {node.dtype}"
        if is_whole(node) and node.arg(0).dtype in NARROW and node.arg(0) not in leaves:
            return f"{node.arg(0)!r} is rounded ahead of a step"
        if isinstance(node.op, ops.Pointwise) and node.op.fn in COMPARISONS and not _is_as_in_float32(node):
            return f"{node!r} compares whole numbers that float32 has not"
        if isinstance(node.op, ops.Pointwise) and node.op.traits.cpp is None:
            return f"{node.op.fn} has no C++ text"
        if is_rounded(node):
            return f"{node!r} is rounded to a narrower type on the way"
        if is_sized(node):
            return f"{node!r} depends on a size"
    return None


def _is_read_as_it_is(leaf: Node, tree: Tree, whole: bool) -> bool:
    """Whether all that is done with whole numbers comes to the same in kernels: they become float32, as operands of its
    functions do, other whole numbers are made of them, or they are compared as float32 could."""

    def fits(node: Node) -> bool:
        compared = isinstance(node.op, ops.Pointwise) and node.op.fn in COMPARISONS
        return node.dtype == torch.float32 or (whole and is_whole(node)) or (compared and _is_as_in_float32(node))

    return all(fits(node) for node in nodes(tree) if leaf in node.inputs)


def _is_as_in_float32(comparison: Node) -> bool:
    """Whether it comes to the same when whole numbers are rounded to float32 first: some are so small that it has all
    of those, or the others are in no narrower type, to which all are promoted."""
    whole = [a.dtype in WHOLE for a in comparison.inputs]
    if not any(whole) or any(map(_is_small, comparison.inputs)):
        return True
    return not all(whole) and not any(a.dtype in NARROW for a in comparison.inputs)


def is_whole(node: Node) -> bool:
    """Whether a whole number is made of floating-point numbers or of others like it."""
    if node.dtype != torch.int64:
        return False
    if isinstance(node.op, ops.Cast):
        return True
    if not isinstance(node.op, ops.Pointwise) or node.op.traits.whole is None:
        return False
    others = all(a.dtype in (torch.int64, torch.bool) for a in node.inputs)
    return others and (node.op.fn != "remainder" or interval(node.arg(1))[0] > 0)


def _is_small(node: Node) -> bool:
    """Whether whole numbers are among those that float32 has."""
    if isinstance(node.op, ops.Number):
        return isinstance(node.op.value, int) and abs(node.op.value) < 2**24
    if isinstance(node.op, ops.Reshape):
        return _is_small(node.arg(0))
    if isinstance(node.op, Fused):
        return _is_small(node.op.body)
    if isinstance(node.op, ops.Item) and isinstance(fused := node.arg(0).op, Fused):
        return _is_small(fused.bodies[node.op.index])
    count = index_count(node)
    return count is not None and count < 2**24
