"""Specs for `fusewright.rules.sizes`."""

from __future__ import annotations

import torch
from harness import B, RuleSpec, inp
from hypothesis import strategies as st
from linear_cases import Draw, reduce
from spec_pooling import pool

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.rules import sizes as rules

SINGLE = st.sampled_from([(B, 1, 4, 1), (2, 1, 1, 1), (3, 1, 5, 1)]).map(lambda shape: inp(*shape))
DIMS = st.sampled_from([(1,), (3,), (1, 3)])


def x(*shape: int, dtype: torch.dtype = torch.float64) -> Node:
    return inp(*(shape or (B, 4, 1)), dtype=dtype)


def var(v: Node, *dims: int, correction: float = 0, keepdim: bool = False) -> Node:
    return make(ops.Reduce("var", dims, keepdim, correction), v)


def softmax(v: Node, dim: int, log: bool = False) -> Node:
    return make(ops.Softmax(dim, log), v)


def view(op: ops.Op, v: Node) -> Node:
    return make(op, v)


@st.composite
def reductions(draw: Draw) -> Node:
    kind = draw(st.sampled_from(["sum", "mean", "prod", "max", "min", "logsumexp"]))
    return reduce(kind, draw(SINGLE), *draw(DIMS), keepdim=draw(st.booleans()))


@st.composite
def pools(draw: Draw) -> Node:
    kind = draw(st.sampled_from(["max", "min", "avg"]))
    if kind == "avg" or draw(st.booleans()):
        lengths = draw(st.sampled_from([(5, 1), (1, 1), (4, 6)]))
        stride = tuple(draw(st.integers(1, 3)) if n == 1 else 1 for n in lengths)
        return pool(inp(B, 2, *lengths), kind, 1, 1, stride=stride, ceil_mode=draw(st.booleans()))
    kernel, padding, dilation, stride = draw(st.sampled_from([(2, 1, 1, 2), (3, 1, 1, 1), (3, 1, 1, 3)]))
    return pool(inp(2, 3, 1), kind, kernel, padding=(padding,), dilation=(dilation,), stride=(stride,))


@st.composite
def identities(draw: Draw) -> Node:
    v = draw(SINGLE)
    op = draw(st.sampled_from([ops.Reshape(v.shape), ops.Permute((0, 1, 2, 3)), ops.Expand(v.shape),
                               ops.Cast(v.dtype), ops.Slice(2, 0, v.shape[2]), ops.Slice(1, 0, 1, 2)]))  # fmt: skip
    return make(op, v)


@st.composite
def views(draw: Draw) -> Node:
    v = draw(SINGLE)
    kind = draw(st.sampled_from(["reshape", "permute", "expand"]))
    if kind == "permute":
        first, second = draw(st.permutations(range(4))), draw(st.permutations(range(4)))
        copied = draw(st.booleans())
        inner = make(ops.Permute(tuple(first), copied and draw(st.booleans())), v)
        return make(ops.Permute(tuple(second), copied), inner)
    if kind == "reshape":
        back = v.shape if draw(st.booleans()) else (*v.shape[2:], 1, *v.shape[:2])
        return make(ops.Reshape(back), make(ops.Reshape((v.shape[2], v.shape[0])), v))
    wide = (v.shape[0], 3, *v.shape[2:])
    return make(ops.Expand((2, *wide[:3], 5)), make(ops.Expand(wide), v))


SPECS = [
    RuleSpec(
        rules.single_value,
        lambda: reduce("mean", x(), 2),
        reductions(),
        {
            "a reduced dimension is not of length 1": lambda: reduce("sum", x(), 1, 2),
            "a reduced dimension is not of length 1 # symbolic": lambda: reduce("sum", x(), 0),
            "a reduced dimension is not of length 1 # none is": lambda: make(ops.Reduce("sum", ()), x()),
            "# a variance": lambda: var(x(), 2),
        },
        exact_example=lambda: reduce("max", x(), 2),
    ),
    RuleSpec(
        rules.single_variance,
        lambda: var(x(), 2),
        st.tuples(SINGLE, DIMS, st.booleans()).map(lambda t: var(t[0], *t[1], keepdim=t[2])),
        {
            "a reduced dimension is not of length 1": lambda: var(x(), 1, 2),
            "an unbiased variance of one value is NaN": lambda: var(x(), 2, correction=1),
            "# a mean": lambda: reduce("mean", x(), 2),
        },
    ),
    RuleSpec(
        rules.single_softmax,
        lambda: softmax(x(), 2),
        st.tuples(SINGLE, st.sampled_from([1, 3]), st.booleans()).map(lambda t: softmax(*t)),
        {"the dimension is longer than 1": lambda: softmax(x(), 1), "# a mean": lambda: reduce("mean", x(), 2)},
    ),
    RuleSpec(
        rules.single_pool,
        lambda: pool(x(2, 3, 4, 5), "max", 1, 1),
        pools(),
        {
            "the length changes": lambda: pool(x(2, 3, 4, 5), "max", 1, 1, stride=(2, 1)),
            "the length changes # padding": lambda: pool(x(2, 3, 1), "max", 2, padding=(1,), stride=(1,)),
            "a window holds more than its own value": lambda: pool(x(2, 3, 5), "max", 3, padding=(1,), stride=(1,)),
            "a window holds more than its own value # along one dimension": lambda: pool(
                x(2, 3, 4, 5), "max", 1, 3, padding=(0, 1), stride=(1, 1)
            ),
            "a window holds more than its own value # misses it": lambda: pool(
                x(2, 3, 1), "max", 2, padding=(1,), stride=(2,), dilation=(2,)
            ),
            "a window holds more than its own value # averages padding": lambda: pool(
                x(2, 3, 1), "avg", 2, padding=(1,), stride=(2,)
            ),
            "the average is weighted": lambda: pool(x(2, 3, 4, 5), "avg", 1, 1, divisor=2),
            "# a reduction": lambda: reduce("max", x(), 2),
        },
    ),
    RuleSpec(
        rules.nothing,
        lambda: view(ops.Expand((B, 4, 1)), x()),
        identities(),
        {
            "the shape or dtype changes": lambda: view(ops.Expand((B, 4, 2)), x()),
            "the shape or dtype changes # a cast": lambda: view(ops.Cast(torch.float32), x()),
            "the shape or dtype changes # a slice": lambda: view(ops.Slice(1, 1, 4), x()),
            "the order of dimensions changes": lambda: view(ops.Permute((1, 0, 2)), x(3, 3, 2)),
            "the order in memory may change": lambda: view(ops.Permute((0, 1, 2), copy=True), x()),
            "# a reduction": lambda: reduce("max", x(), 2, keepdim=True),
        },
    ),
    RuleSpec(
        rules.view_of_view,
        lambda: view(ops.Permute((2, 0, 1)), view(ops.Permute((0, 2, 1)), x())),
        views(),
        {
            "the two differ": lambda: view(ops.Permute((1, 0)), view(ops.Reshape((B, 4)), x())),
            "the order in memory would change": lambda: view(
                ops.Permute((2, 0, 1)), view(ops.Permute((0, 2, 1), copy=True), x())
            ),
            "# a single one": lambda: view(ops.Reshape((4, B)), x()),
        },
    ),
]
