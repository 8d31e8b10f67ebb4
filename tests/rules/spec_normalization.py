"""Specs for `fusewright.rules.normalization`."""

from __future__ import annotations

from typing import Any

import torch
from harness import B, RuleSpec, inp
from hypothesis import strategies as st
from linear_cases import Draw, convs

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.rules import normalization as rules


def norm(
    x: Node,
    *,
    kind: Any = "batch",
    weight: bool = True,
    bias: bool = True,
    mean: Node | None = None,
    whole: bool = False,
) -> Node:
    """Batch norm of x with running statistics; `whole`: it subtracts 2 and divides by 2."""
    channels = x.shape[1]
    given = (inp(channels) if w else None for w in (weight, bias))
    var = vector([1.0] * channels if whole else [0.5 + i for i in range(channels)])
    mean = mean or vector([2.0 if whole else 0.3 * i - 1 for i in range(channels)])
    return make(ops.Norm(kind, 3.0 if whole else 0.1), x, *given, mean, var)


def vector(values: list[float]) -> Node:
    return make(ops.Vector(tuple(values), torch.float64, torch.device("cpu")))


def of_input_statistics(x: Node, kind: Any = "batch") -> Node:
    return make(ops.Norm(kind, 0.1, training=True), x, inp(x.shape[1]), inp(x.shape[1]), None, None)


def conv(*, transposed: bool = False, groups: int = 2) -> Node:
    weight = inp(4, 3, 2) if transposed else inp(6, 2, 2)
    return make(ops.Conv((1,), ((0, 0),), (1,), groups, transposed, (0,)), inp(B, 4, 5), weight, inp(3 * groups))


def linear(*rows: Any) -> Node:
    return make(ops.Matmul(True), inp(*(rows or (B,)), 5), inp(4, 5), inp(4))


@st.composite
def norms(draw: Draw, of: st.SearchStrategy[Node]) -> Node:
    kind = draw(st.sampled_from(["batch", "instance"])) if (x := draw(of)).ndim > 2 else "batch"
    return norm(x, kind=kind, weight=draw(st.booleans()), bias=draw(st.booleans()))


@st.composite
def flat_matmuls(draw: Draw) -> Node:
    transpose, bias = draw(st.booleans()), draw(st.booleans())
    w = inp(4, 5) if transpose else inp(5, 4)
    return make(ops.Matmul(transpose), inp(draw(st.sampled_from([B, 3])), 5), w, inp(4) if bias else None)


def rms(x: Node, eps: float = 0.1, *, by: str = "rsqrt", of: Node | None = None, dims: tuple[int, ...] = (-1,)) -> Node:
    """x by the root of its mean square, or of that of another value."""
    mean = reduced("mean", pointwise("square", x if of is None else of), dims)
    root = pointwise(by, pointwise("add", mean, eps))
    return pointwise("mul", root, x) if by == "rsqrt" else pointwise("div", x, root)


def layer(
    x: Node, *, kind: Any = "var", correction: float = 0, dims: tuple[int, ...] = (-1,), mean: Any = None
) -> Node:
    """x without its mean, by its deviation."""
    y = pointwise("sub", x, reduced("mean", x, dims if mean is None else mean))
    variance = reduced("mean", pointwise("mul", y, y), dims) if kind == "mean" else reduced(kind, x, dims, correction)
    return pointwise("div", y, pointwise("sqrt", pointwise("add", variance, 0.1)))


def reduced(kind: Any, x: Node, dims: tuple[int, ...], correction: float = 1, keepdim: bool = True) -> Node:
    over = tuple(sorted(d % x.ndim for d in dims))
    return make(ops.Reduce(kind, over, keepdim, correction), x)


@st.composite
def spelled(draw: Draw) -> Node:
    x = draw(VALUES)
    dims = tuple(range(-draw(st.integers(1, x.ndim - 1)), 0))
    if draw(st.booleans()):
        return rms(x, draw(st.sampled_from([0.1, 1.0])), by=draw(st.sampled_from(["rsqrt", "sqrt"])), dims=dims)
    return layer(x, kind=draw(st.sampled_from(["mean", "var"])), dims=dims)


VALUES = st.sampled_from([(B, 3), (B, 3, 4), (2, 1, 3, 4), (B, 2, 3, 2, 2)]).map(lambda shape: inp(*shape))

SPECS = [
    RuleSpec(
        rules.norm_into_conv,
        example=lambda: norm(conv()),
        cases=norms(st.booleans().flatmap(convs)),
        refusals={
            "# of its own statistics": lambda: of_input_statistics(conv()),
            "# another norm": lambda: make(ops.Norm("group", 0.1, groups=3), conv(), None, None, None, None),
            "the statistics are computed": lambda: norm(conv(), mean=inp(6)),
            "# no convolution": lambda: norm(inp(B, 3, 4)),
        },
        exact_example=lambda: norm(conv(transposed=True), whole=True),
    ),
    RuleSpec(
        rules.norm_into_matmul,
        example=lambda: norm(linear()),
        cases=norms(flat_matmuls()),
        refusals={
            "the features are not the channels": lambda: norm(linear(B, 3)),
            "# of its own statistics": lambda: of_input_statistics(linear()),
            "the statistics are computed": lambda: norm(linear(), mean=inp(4)),
            "# no matmul": lambda: norm(inp(B, 3)),
        },
        exact_example=lambda: norm(linear(), whole=True),
    ),
    RuleSpec(
        rules.norm_as_scale_and_shift,
        example=lambda: norm(inp(B, 3, 4)),
        cases=norms(VALUES),
        refusals={
            "# of its own statistics": lambda: of_input_statistics(inp(B, 3, 4)),
            "# of its own statistics, per sample": lambda: of_input_statistics(inp(B, 3, 4), "instance"),
            "the statistics are computed": lambda: norm(inp(B, 3, 4), mean=inp(3)),
            "# another norm": lambda: make(ops.Norm("layer", 0.1), inp(B, 3, 4), None, None, None, None),
        },
        exact_example=lambda: norm(inp(B, 3, 4), whole=True),
    ),
    RuleSpec(
        rules.spelled_out,
        example=lambda: rms(inp(B, 3, 4)),
        cases=spelled(),
        refusals={
            "# of another value": lambda: rms(inp(B, 3, 4), of=inp(B, 3, 4)),
            "# not over the last dimensions": lambda: rms(inp(B, 3, 4), dims=(1,)),
            "# a sample deviation": lambda: layer(inp(B, 3, 4), correction=1),
            "# another mean": lambda: layer(inp(B, 4, 4), mean=(1,)),
            "# a maximum": lambda: layer(inp(B, 3, 4), kind="max"),
            "the length of a row depends on the batch": lambda: rms(inp(3, B)),
            "it may not lie row by row": lambda: rms(make(ops.Permute((0, 2, 1)), inp(B, 3, 4))),
            "it may not lie row by row# behind a convolution": lambda: layer(pointwise("relu", conv())),
            "# of whole numbers": lambda: rms(inp(B, 3, 4), of=inp(B, 3, 4, dtype=torch.int64)),
            "# without bounds": lambda: rms(inp(B, 3, 4), float("inf")),
            "# the square itself": lambda: pointwise("sqrt", pointwise("add", inp(B, 3), 0.1)),
        },
    ),
]
