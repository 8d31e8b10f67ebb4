"""Specs for `fusewright.rules.attention`."""

from __future__ import annotations

from typing import Any

import torch
from harness import B, RuleSpec
from harness import inp as anywhere
from hypothesis import strategies as st
from linear_cases import Draw

from fusewright.ir import ops
from fusewright.ir.build import cast, permute, pointwise, reshape
from fusewright.ir.node import Node, make
from fusewright.rules import attention as rules


def inp(*shape: Any, dtype: torch.dtype = torch.float64) -> Node:
    """An input on a GPU, where the rule holds; what is computed in its tests is computed on a CPU."""
    return anywhere(*shape, dtype=dtype, device="cuda")


def scores(q: Node, k: Node, *, scale: float = 0.5, where: str = "scores", transpose: bool = False) -> Node:
    """q k^T, of which `where` says what is scaled."""

    def scaled(x: Node, name: str) -> Node:
        return pointwise("div", x, 1 / scale) if where == name else x

    q, k = scaled(q, "q"), scaled(k, "k")
    turned = k if transpose else permute(k, (*range(k.ndim - 2), k.ndim - 1, k.ndim - 2))
    product = make(ops.Matmul(transpose), q, turned, None)
    return pointwise("mul", product, scale) if where == "scores" else product


def attention(of: Node | None = None, v: Node | None = None, *, dim: int = 3, log: bool = False) -> Node:
    of = of or scores(inp(B, 2, 3, 8), inp(B, 2, 4, 8))
    v = v or inp(*of.shape[:-2], of.shape[-1], 8)
    return make(ops.Matmul(), make(ops.Softmax(dim if of.ndim == 4 else 2, log), of), v, None)


def hidden(s: Node, shape: tuple[Any, ...], *, last: bool) -> Node:
    """Some scores set to -inf: few, so that no row is hidden as a whole."""
    few = pointwise("gt", inp(*shape), 2.5)
    return pointwise("where", pointwise("logical_not", few), s, NOT) if last else pointwise("where", few, NOT, s)


NOT = float("-inf")


@st.composite
def cases(draw: Draw) -> Node:
    heads = draw(st.sampled_from([(B, 2), (2, B), (B,)]))
    q, k, v = inp(*heads, 3, 8), inp(*heads, 4, 8), inp(*heads, 4, draw(st.sampled_from([8, 16])))
    where = draw(st.sampled_from(["scores", "q", "k", ""]))
    s = scores(q, k, where=where, transpose=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from([torch.float64, torch.float32, torch.bool]))
        mask = inp(*draw(st.sampled_from([(3, 4), (1, 4), (4,), s.shape])), dtype=kind)
        s = pointwise("add", *draw(st.permutations([s, mask])))
    if draw(st.booleans()):
        s = hidden(s, draw(st.sampled_from([(3, 4), (1, 4), s.shape])), last=draw(st.booleans()))
    return attention(s, v)


@st.composite
def windows(draw: Draw) -> Node:
    """Scores of the windows of several images, to which each image's, or each window's, mask is added."""
    split = draw(st.sampled_from([(B, 3), (3, B), (2, 3)]))
    heads = (split[0] * split[1], *draw(st.sampled_from([(), (2,)])))
    q, k, v = (reshape(inp(*split, *heads[1:], n, 8), (*heads, n, 8)) for n in (3, 4, 4))
    s = scores(q, k)
    if draw(st.booleans()):
        s = pointwise("add", s, inp(*draw(st.sampled_from([(1, *s.shape[1:]), (4,)]))))
    for _ in range(draw(st.integers(1, 2))):
        apart = (*split, *s.shape[1:])
        ones = (1,) * (len(heads) - 1)
        shapes = [(1, split[1], *ones, 3, 4), (split[1], *ones, 1, 4), (split[0], 1, *ones, 3, 4), apart, (3, 4)]
        mask = inp(*draw(st.sampled_from(shapes)))
        if draw(st.booleans()):
            s = reshape(pointwise("add", *draw(st.permutations([reshape(s, apart), mask]))), s.shape)
        else:
            s = reshape(hidden(reshape(s, apart), mask.shape, last=draw(st.booleans())), s.shape)
    return attention(s, v)


def split(first: Any) -> Node:
    """A mask for each of 3 windows, where scores of `first` are those of images, or of other things."""
    s = scores(inp(*first, 2, 3, 8), inp(*first, 2, 4, 8))
    added = pointwise("add", reshape(s, (B, 3, 2, 3, 4)), inp(3, 1, 3, 4))
    return attention(reshape(added, (3 * B, 2, 3, 4)))


def half() -> Node:
    return scores(inp(B, 2, 3, 8, dtype=torch.float16), inp(B, 2, 4, 8, dtype=torch.float16))


def masked(times: int) -> Node:
    s = scores(inp(B, 2, 3, 8), inp(B, 2, 4, 8))
    for _ in range(times):
        s = pointwise("add", s, inp(3, 4))
    return s


def turned(dims: tuple[int, ...] = (0, 2, 1, 3), *, copy: bool = False, flat: bool = True) -> Node:
    q, k, v = inp(B, 2, 3, 8), inp(B, 2, 4, 8), inp(B, 2, 4, 8)
    y = make(ops.Permute(dims, copy), make(ops.Attention(0.5), q, k, v, None))
    last = (y.shape[2] * y.shape[3],) if flat else (y.shape[2], 2, y.shape[3] // 2)
    return reshape(y, (*y.shape[:2], *last))


SPECS = [
    RuleSpec(
        rules.spelled_out,
        example=attention,
        cases=st.one_of(cases(), windows()),
        exact_example=lambda: attention(scores(inp(B, 2, 3, 8), inp(B, 2, 1, 8))),
        refusals={
            "the kernels of a CPU lose NaN": lambda: attention(
                scores(anywhere(B, 2, 3, 8), anywhere(B, 2, 4, 8)), anywhere(B, 2, 4, 8)
            ),
            "# over another dimension": lambda: attention(dim=2),
            "# a logarithm": lambda: attention(log=True),
            "# of no product": lambda: attention(inp(B, 2, 3, 4)),
            "# with a bias": lambda: attention(
                make(ops.Matmul(True), inp(B, 2, 3, 8), inp(4, 8), inp(4)), inp(B, 2, 4, 8)
            ),
            "# times what is no number": lambda: attention(
                pointwise("mul", scores(inp(B, 2, 3, 8), inp(B, 2, 4, 8)), inp(1))
            ),
            "# plus a number": lambda: attention(pointwise("add", scores(inp(B, 2, 3, 8), inp(B, 2, 4, 8)), 1)),
            "# plus a mask of a type that theirs does not hold": lambda: attention(
                pointwise("add", half(), inp(3, 4, dtype=torch.float32)), inp(B, 2, 4, 8, dtype=torch.float32)
            ),
            "# below more masks than anyone has": lambda: attention(masked(rules.MASKS + 1)),
            "# of three dimensions, the first of which is split for a mask": lambda: split((B, 3)),
            "the scale is not normal": lambda: attention(scores(inp(B, 2, 3, 8), inp(B, 2, 4, 8), scale=1e-310)),
            "# turned around": lambda: attention(scores(inp(B, 2, 3, 8), inp(B, 2, 4, 8), scale=-1.0)),
            "# twice as many": lambda: attention(
                pointwise("add", scores(inp(1, 2, 3, 8), inp(1, 2, 4, 8)), inp(B, 2, 3, 4))
            ),
            "queries, keys and values are not as many": lambda: attention(scores(inp(B, 2, 3, 8), inp(2, 4, 8))),
            "they are of several types": lambda: attention(
                cast(scores(*(inp(B, 2, n, 8, dtype=torch.float32) for n in (3, 4))), torch.float64)
            ),
            "the kernels take heads of a number of eights": lambda: attention(
                scores(inp(B, 2, 3, 6), inp(B, 2, 4, 6)), inp(B, 2, 4, 8)
            ),
            "it is no plain product with the values": lambda: make(
                ops.Matmul(True), attention().arg(0), inp(B, 2, 5, 4), None
            ),
        },
    ),
    RuleSpec(
        rules.by_positions,
        example=turned,
        cases=st.sampled_from([turned(), turned(copy=True), turned(copy=True, flat=False)]),
        refusals={
            "other dimensions are swapped": lambda: turned((0, 1, 3, 2)),
            "heads stay apart, and what is a view lies as before": lambda: turned(flat=False),
        },
    ),
]
