"""The table of kernel families, in the order in which they are tried, and how each finds a group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any

from fusewright.ir import ops
from fusewright.ir.node import Node, topological
from fusewright.schedule import (
    contraction,
    kept_rows,
    matmul,
    normalization,
    partial,
    product,
    range_steps,
    range_sums,
    rearrangement,
    sample,
    scan,
    several_elements,
    several_folds,
    stream,
)
from fusewright.schedule.beside import Readers
from fusewright.schedule.chain import POINTWISE, Fold, Users
from fusewright.schedule.partial import Split
from fusewright.schedule.stream_record import Stream

# So many operations behind a value are searched, about, for one that a pass ends in.
MOST_BEHIND = 16


@dataclass(frozen=True)
class Family:
    """How to find groups of one kind: `match` takes a last node; `anchor` is the kind of node a group starts at;
    `split` finds the part of a last node that a group may end in; `early` is where it may end sooner; `also` are values
    on the way, or beside it, that its kernels write as well; `beside` says whether `match` looks for such and so wants
    to know who reads each value; `again` whether its groups compute themselves what is cheap, though others read it as
    well (`schedule.again`); `traps` whether a GPU's kernels end as eager does at a number that a function refuses."""

    name: str
    match: Callable[..., Any]
    operands: Callable[[Any], tuple[Node, ...]]
    anchor: type[ops.Op] | UnionType | None = None
    split: Callable[[Node, Users], Split | None] = lambda root, users: None
    early: Callable[[Any], Node | None] = lambda record: None
    also: Callable[[Any], tuple[Node, ...]] = lambda record: ()
    beside: bool = False
    again: bool = False
    traps: bool = False


def _sample(root: Node, users: Users) -> Any:
    def divided(node: Node) -> bool:
        return isinstance(stream.parse(node, users), Stream)

    return sample.parse(root, users, divided=divided)


def _sample_apart(root: Node, users: Users, readers: Readers) -> Any:
    """A sample program, unless all it does are reductions that one pass has, alone or beside more, one that others of
    what it reads are found with, a normalisation of rows that teams of threads keep, or what these do with short ones.
    """
    found = _sample(root, users)
    if isinstance(found, str):
        return found
    joins = {n for n in found.inner if isinstance(n.op, (*sample.ROWS, ops.Matmul))}
    ends = _made_of(root, readers)
    for one_pass in (stream.parse(root, users), *(several_folds.parse(end, users) for end in ends)):
        if not isinstance(one_pass, str) and joins <= {step.node for step in _folds(one_pass)}:
            return f"{root!r} is made of reductions that one pass has"
    if len(joins) == 1 and isinstance(next(iter(joins)).op, normalization.NORMS):
        rows = normalization.parse_moving(root, users)
        if not isinstance(rows, str) and normalization.keeps_rows(rows):
            return f"{root!r} normalises rows"
    if _is_of_short_rows(root, users, found, joins):
        return f"{root!r} is made of short rows"
    beside = len(joins) == 1 and several_folds.is_beside(root, users, readers)
    return f"{root!r} is reduced beside others" if beside else found


def _made_of(root: Node, readers: Readers) -> tuple[Node, ...]:
    """`root`, and what pointwise operations make of it and of others of its shape: a pass may have more than `root` is
    made of, and is asked for its end.

    sum(p) + sum(t)       of       sum(p * t) / (sum(p) + sum(t))
    """
    found = {root: None}
    stack = [root]
    while stack and len(found) <= MOST_BEHIND:
        behind = [n for n in readers[stack.pop()] if isinstance(n.op, POINTWISE) and n.shape == root.shape]
        stack += [n for n in behind if n not in found]
        found.update(dict.fromkeys(behind))
    return tuple(found)


def _is_of_short_rows(root: Node, users: Users, found: sample.SampleProgram, joins: set[Node]) -> bool:
    """Whether all that a sample program `joins` is what teams of threads do with rows that they keep."""
    rows = kept_rows.parse_short(_base(root), users)
    if isinstance(rows, str) or not set(rows.tensors).isdisjoint(found.inner):
        return False
    return joins <= set(topological(rows.roots, rows.tensors))


def _folds(one_pass: Stream | several_folds.SeveralFolds) -> list[Fold]:
    return [fold for fold, _ in one_pass.folds] if isinstance(one_pass, Stream) else list(one_pass.folds)


def _reducing(root: Node, users: Users) -> Any:
    found = stream.parse(root, users)
    flat = isinstance(found, Stream) and not found.folds and found.window is None
    return f"{root!r} reduces nothing" if flat else found


def _pooling(root: Node, users: Users) -> Any:
    """A rearrangement that pools: what its windows have is read for something else as well."""
    pools = rearrangement.pools_on_the_way(root, users)
    return rearrangement.parse(root, users) if pools else f"{root!r} pools nothing that is read beside that"


def _elements(root: Node, users: Users) -> Any:
    """A rearrangement, or a stream that reduces nothing where that reads the same tensors as they lie."""
    found, other = rearrangement.parse(root, users), stream.parse(root, users)
    if isinstance(found, str) or isinstance(other, str):
        return other if isinstance(found, str) else found
    return other if set(map(_base, other.tensors)) == set(found.tensors) else found


def _functions(root: Node, users: Users) -> Any:
    """A stream of what was no kernel as a rearrangement: it reads copies."""
    found = _elements(root, users)
    return stream.parse(root, users) if isinstance(found, rearrangement.Rearrangement) else f"{root!r} moves nothing"


def _others(record: Any) -> tuple[Node, ...]:
    """The results of a group but for its last node."""
    others: tuple[Node, ...] = record.results[1:]
    return others


def _base(x: Node) -> Node:
    """The tensor whose memory a reshape shows."""
    while isinstance(x.op, ops.Reshape) and rearrangement.shows(x):
        x = x.arg(0)
    return x


def _range(root: Node, users: Users) -> Any:
    found = range_sums.parse(root, lambda node: users[node] == 1)
    in_steps = not isinstance(found, str) and range_steps.in_steps(found)
    return f"{root!r} is summed over its inner dimensions first" if in_steps else found


def _range_split(root: Node, users: Users) -> Split | None:
    """The two steps of a range sum; what moves its results follows the second."""
    found = range_sums.parse(root, lambda node: users[node] == 1) if isinstance(root.op, ops.RangeSum) else ""
    return None if isinstance(found, str) or not range_steps.in_steps(found) else range_steps.split(root, found)


SAMPLES = Family("sample program", _sample, lambda s: tuple(n for n in s.leaves if not isinstance(n.op, ops.Full)))
SAMPLES_APART = replace(SAMPLES, match=_sample_apart, beside=True)
ELEMENTS = Family("stream", _elements, lambda s: s.tensors, again=True, traps=True)
STATISTICS = Family(
    "statistics",
    normalization.parse_statistics,
    lambda c: c.sums.tensors,
    ops.Statistics,
    also=lambda c: c.results[1:],
    beside=True,
)
NORMALIZATION = Family("normalization", normalization.parse, lambda n: n.tensors, ops.Norm | ops.Softmax)
LARGE = replace(NORMALIZATION, match=normalization.parse_large)
MOVING = replace(NORMALIZATION, match=normalization.parse_moving)
LARGE_MOVING = replace(LARGE, match=functools.partial(normalization.parse_large, parse=normalization.parse_moving))
KEPT_ROWS = Family(
    "kept rows",
    kept_rows.parse,
    lambda k: k.tensors,
    ops.Reduce,
    kept_rows.split,
    also=lambda k: k.roots[1:],
    beside=True,
)
SHORT_ROWS = Family("kept rows", kept_rows.parse_short, lambda k: k.tensors, ops.Reduce)
SHARED = Family(
    "normalization",
    normalization.parse_shared,
    lambda n: n.tensors,
    ops.Norm | ops.Softmax,
    also=lambda n: () if n.also is None else (n.also,),
)

_SEVERAL: dict[str, Any] = {"operands": lambda s: s.tensors, "also": _others, "beside": True, "again": True}
REDUCTIONS = Family("several reductions", several_folds.parse_beside, **_SEVERAL, traps=True)
VALUES = Family("several elements", several_elements.parse, **_SEVERAL)
POOLING = Family("stream", _pooling, lambda s: s.tensors, traps=True)
REDUCING = Family("stream", _reducing, lambda s: s.tensors, again=True, traps=True)
FUNCTIONS = Family("stream", _functions, lambda s: s.tensors, again=True, traps=True)
TOGETHER = Family("several reductions", several_folds.parse, lambda s: s.tensors, again=True, traps=True)

FAMILIES = (
    Family("contraction", contraction.match, lambda c: c.tensors, ops.Conv, partial.split, contraction.may_end),
    Family("product", product.match, lambda p: p.tensors, ops.Matmul),
    Family("range reduction", _range, lambda r: (r.x,), ops.RangeSum, _range_split),
    STATISTICS,
    SHARED,
    LARGE_MOVING,
    KEPT_ROWS,
    Family("stream", stream.parse, lambda s: s.tensors, ops.Embedding),  # those that no rows are made of
    Family("scan", scan.parse, lambda s: s.tensors, ops.Scan),
    SAMPLES_APART,
    SHORT_ROWS,
    Family("matmul", matmul.match, lambda m: m.tensors, ops.Matmul),
    MOVING,
    # The last ones: whatever no group has computed by now is in memory.
    POOLING,
    TOGETHER,
    REDUCTIONS,
    REDUCING,
    VALUES,
    ELEMENTS,
    FUNCTIONS,
)

# Where nobody moves elements in a kernel, looking for such groups would be in vain; nor has a kernel several results.
_STILL = {
    **{LARGE_MOVING: LARGE, MOVING: NORMALIZATION, SAMPLES_APART: SAMPLES},
    TOGETHER: replace(TOGETHER, traps=False),  # loops of a CPU remember nothing to raise
}
STILL = (
    *(
        _STILL.get(f, f)
        for f in FAMILIES
        if f not in (SHARED, SHORT_ROWS, POOLING, REDUCTIONS, REDUCING, VALUES, ELEMENTS, FUNCTIONS)
    ),
    Family("stream", stream.parse, lambda s: s.tensors, again=True),
)
