"""Specs for `fusewright.rules.views`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from harness import B, RuleSpec, inp
from hypothesis import strategies as st
from linear_cases import Draw, conv, reduce
from spec_pooling import image, pool

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.rules import views as rules

KINDS = st.sampled_from(["sum", "mean", "max", "min", "logsumexp", "prod"])


def x(*shape: object) -> Node:
    """A computed value."""
    return pointwise("neg", inp(*(shape or (B, 3, 2, 4))))


def shaped(v: Node, *shape: object) -> Node:
    return make(ops.Reshape(tuple(map(ops.size, shape))), v)


def permuted(v: Node, *dims: int, copy: bool = False) -> Node:
    return make(ops.Permute(dims, copy), v)


def convolved() -> Node:
    return conv(inp(B, 2, 4, 5), inp(3, 2, 3, 2), inp(3))


@st.composite
def regrouped(draw: Draw) -> Node:
    """A reduction whose elements are whole dimensions on both sides, each side cut and padded with ones in its way."""
    before: list[object] = []
    after: list[object] = []
    dims: list[int] = []
    blocks = draw(st.lists(st.sampled_from([(B,), (2, 3), (6,), (3, 2), (4,), (2, 2), (1, 4), (5,), (1,)]),
                           min_size=2, max_size=4, unique=True))  # fmt: skip
    reduced = draw(st.integers(0, len(blocks) - 1).filter(lambda i: blocks[i] != (1,)))
    for i, block in enumerate(blocks):
        before += [*block, *draw(st.sampled_from([(), (), (1,)]))]
        merged = [B] if B in block else [_product(block)]
        cut = [merged, merged, list(block), list(reversed(block)), [1, *merged], [*merged, 1]]
        chosen = draw(st.sampled_from(cut))
        if i == reduced or (B not in block and draw(st.integers(0, 2)) == 0):
            dims += range(len(after), len(after) + len(chosen))
        after += chosen
    value = pointwise("neg", inp(*before))
    return reduce(draw(KINDS), shaped(value, *after), *dims, keepdim=draw(st.booleans()))


def _product(block: tuple[int, ...]) -> int:
    total = 1
    for length in block:
        total *= length
    return total


@st.composite
def turned(draw: Draw) -> Node:
    v = draw(st.sampled_from([(B, 3, 2, 4), (2, 1, 3), (3, 4), (1, 2, 1, 3, 2), (5,)]).map(lambda shape: x(*shape)))
    order = draw(st.permutations(range(v.ndim)))
    dims = sorted(draw(st.sets(st.sampled_from(range(v.ndim)), min_size=1)))
    view = permuted(v, *order, copy=draw(st.booleans()))
    return reduce(draw(KINDS), view, *dims, keepdim=draw(st.booleans()))


def shares(*shape: object) -> Node:
    return make(ops.Softmax(len(shape) - 1), inp(*shape))


@st.composite
def seen_otherwise(draw: Draw) -> Node:
    """Functions of shares under another shape, and of what goes with that."""
    inner, outer = draw(st.sampled_from([
        ((B, 3, 8), (B, 3, 2, 4)), ((B, 6, 4), (B, 2, 3, 4)), ((B, 3, 2, 4), (B, 3, 8)), ((B, 12), (B, 1, 3, 4)),
        ((B, 6, 5), (B, 2, 3, 5)), ((B, 2, 3, 4), (B, 6, 4, 1)),
    ]))  # fmt: skip
    y = shares(*inner)
    if draw(st.booleans()):
        y = pointwise("mul", y, inp(*inner[-1:]))
    view = shaped(y, *outer)
    alone = {0} | {i for i, n in enumerate(outer) if n in inner}  # the others vary together, or not at all
    together = draw(st.booleans())
    varies = [draw(st.booleans()) if i in alone else together for i in range(len(outer))]
    beside = inp(*(n if v else 1 for n, v in zip(outer, varies, strict=True)))
    beside = draw(st.sampled_from([beside, beside, inp(dtype=torch.float32)]))
    other = draw(st.sampled_from([beside, beside, 2.5]))
    root = pointwise(draw(st.sampled_from(["mul", "add"])), *draw(st.permutations([view, other])))
    return pointwise("tanh", root) if draw(st.booleans()) else root


@st.composite
def pooled_between(draw: Draw) -> Node:
    """A pooling of trailing dimensions, the others seen otherwise meanwhile."""
    n = draw(st.integers(1, 3))
    lead, meanwhile = draw(
        st.sampled_from([((B,), (B, 1)), ((2,), (1, 2)), ((B, 1), (B,)), ((2, 3), (6,)), ((6, 1), (2, 3))])
    )
    lengths = [draw(st.integers(4, 6)) for _ in range(n)]
    kind, kernel = draw(st.sampled_from(["avg", "max", "min"])), [draw(st.integers(1, 4)) for _ in range(n)]
    padding, stride = (
        tuple(draw(st.integers(0, k // 2)) for k in kernel),
        tuple(draw(st.integers(1, 3)) for _ in range(n)),
    )
    view = shaped(inp(*lead, *lengths), *meanwhile, *lengths)
    y = pool(view, kind, *kernel, stride=stride, padding=padding, ceil_mode=draw(st.booleans()))
    return shaped(y, *lead, *y.shape[-n:])


def normed(*meanwhile: object, kind: str = "avg") -> Node:
    """The windows over channels of a local response norm, which are those of an image of another shape."""
    y = pool(shaped(image(B, 4, 3, 5), *meanwhile), kind, 3, 1, 1, stride=(1, 1, 1), padding=(1, 0, 0))
    return shaped(y, B, 4, 3, 5)


def product(*shape: object, features: int = 5) -> Node:
    """Rows of this shape by a weight."""
    return make(ops.Matmul(), inp(*shape), inp(shape[-1], features), None)


@st.composite
def turned_products(draw: Draw) -> Node:
    """Functions of products that are turned, of what is turned alike and of what is smaller."""
    y = product(*draw(st.sampled_from([(B, 3, 2), (4, 2), (B, 2, 1, 3), (2, B, 2, 3)])))
    y = draw(st.sampled_from([y, y, pointwise("tanh", y)]))
    order = draw(st.permutations(range(y.ndim)).filter(lambda dims: _moves_last(y, dims)))
    view = permuted(y, *order)
    same = permuted(inp(*y.shape), *order)
    smaller = inp(*[n if draw(st.booleans()) else 1 for n in view.shape][draw(st.integers(0, y.ndim)) :])
    smaller = inp(1) if smaller.shape == view.shape else smaller
    other = draw(st.sampled_from([same, smaller, smaller, inp(dtype=torch.float32), 2.5]))
    root = pointwise(draw(st.sampled_from(["mul", "sub"])), *draw(st.permutations([view, other])))
    return pointwise("tanh", root) if draw(st.booleans()) else root


def _moves_last(y: Node, dims: Sequence[int]) -> bool:
    longer = [d for d in dims if y.shape[d] != 1]
    return longer[-1] != max(longer)


def expanded(v: Node, *shape: object) -> Node:
    return make(ops.Expand(tuple(map(ops.size, shape))), v)


@st.composite
def beside_others(draw: Draw) -> Node:
    """Functions of what is expanded and of what has that shape."""
    shape = draw(st.sampled_from([(B, 3, 4), (2, 5), (4,), (1, 3)]))
    own = [n if draw(st.booleans()) else 1 for n in shape][draw(st.integers(0, len(shape) - 1)) :]
    operands = [expanded(inp(*own), *shape), x(*shape)]
    return pointwise(draw(st.sampled_from(["add", "mul", "maximum"])), *draw(st.permutations(operands)))


@st.composite
def alone(draw: Draw) -> Node:
    """Functions of what is expanded, alone or beside what is smaller or expanded itself."""
    shape = draw(st.sampled_from([(2, 3, 4), (2, 5)]))
    smaller = [(1, *shape[1:]), (*shape[:-1], 1), shape[1:], shape[-1:]]
    view = expanded(inp(*draw(st.sampled_from(smaller))), *shape)
    if draw(st.booleans()):
        return pointwise("tanh", view)
    other = inp(*draw(st.sampled_from([(1,), (1,) * len(shape)])))
    return pointwise("add", *draw(st.permutations([view, draw(st.sampled_from([other, 2.5]))])))


@st.composite
def joined(draw: Draw) -> Node:
    """Reductions and softmaxes over dimensions that are not expanded."""
    shape = draw(st.sampled_from([(2, 3, 4), (2, 5, 3), (4, 3)]))
    own = [n if i == len(shape) - 1 or draw(st.booleans()) else 1 for i, n in enumerate(shape)]
    own = own[draw(st.integers(0, len(shape) - 1)) :]
    kept = [d for d in range(len(shape)) if d >= len(shape) - len(own) and own[d - len(shape)] == shape[d]]
    dims = sorted(draw(st.sets(st.sampled_from(kept), min_size=1)))
    view = expanded(inp(*own), *shape)
    if draw(st.booleans()):
        return make(ops.Softmax(dims[0]), view)
    return reduce(draw(KINDS), view, *dims, keepdim=draw(st.booleans()))


JOINED = "elements are joined that the expansion repeats"
PART = "a reduced dimension holds part of one that is kept"
VARIES = "another operand varies along part of a dimension"
NONE = "no dimension longer than 1 is reduced"
BARE = "no operation that goes with a reduction lies below"

SPECS = [
    RuleSpec(
        rules.reduction_of_reshape,
        lambda: reduce("mean", shaped(convolved(), B, 3, 8), 2),
        regrouped(),
        {
            "a dimension is empty": lambda: reduce("sum", shaped(x(2, 0, 3), 2, 3, 0), 1),
            PART: lambda: reduce("sum", shaped(x(B, 6), B, 2, 3), 2),
            f"{PART} # the first half": lambda: reduce("sum", shaped(x(B, 6), B, 2, 3), 1),
            f"{PART} # the batch, too": lambda: reduce("sum", shaped(x(B, 6), 2, 3 * B), 1),
            f"{PART} # across": lambda: reduce("max", shaped(x(B, 4, 6), B, 6, 4), 2),
            f"{PART} # one of two": lambda: reduce("max", shaped(x(2, 3, 4), 2, 2, 6), 0, 2),
            "the first is counted through neighbours # its gradient": lambda: make(
                ops.Reduce("max", (1,), first=True), shaped(x(B, 3, 1, 4), B, 12)
            ),
            "the first is counted through neighbours": lambda: reduce("argmax", shaped(x(B, 3, 1, 4), B, 12), 1),
            NONE: lambda: reduce("mean", shaped(x(B, 6), B, 1, 6), 1, keepdim=True),
            BARE: lambda: reduce("mean", shaped(inp(B, 3, 2, 4), B, 3, 8), 2),
            f"{BARE} # a view of an input": lambda: reduce("mean", shaped(permuted(inp(B, 3, 4), 0, 2, 1), B, 12), 1),
            f"{BARE} # a softmax": lambda: reduce("max", shaped(make(ops.Softmax(1), inp(B, 3, 4)), B, 12), 1),
            "# a variance": lambda: make(ops.Reduce("var", (2,)), shaped(x(), B, 3, 8)),
            "# a permute": lambda: reduce("max", permuted(x(), 0, 2, 3, 1), 1, 2),
        },
        exact_example=lambda: reduce("max", shaped(x(), B, 3, 8), 2),
        signed_zeros=False,
    ),
    RuleSpec(
        rules.reduction_of_permute,
        lambda: reduce("mean", permuted(convolved(), 0, 2, 3, 1), 1, 2),
        turned(),
        {
            "the first is counted through neighbours": lambda: reduce("argmin", permuted(x(), 0, 2, 3, 1), 1, 2, 3),
            BARE: lambda: reduce("mean", permuted(inp(B, 3, 4), 0, 2, 1), 1),
            f"{BARE} # a view of an input": lambda: reduce("mean", permuted(shaped(inp(B, 12), B, 3, 4), 0, 2, 1), 1),
            "# a variance": lambda: make(ops.Reduce("var", (2,)), permuted(x(), 0, 2, 3, 1)),
            "# a reshape": lambda: reduce("max", shaped(x(), B, 3, 8), 2),
        },
        exact_example=lambda: reduce("min", permuted(x(), 3, 1, 0, 2, copy=True), 2),
        signed_zeros=False,
    ),
    RuleSpec(
        rules.pool_between_reshapes,
        lambda: normed(B, 1, 4, 3, 5),
        pooled_between(),
        {
            "windows run over dimensions that are seen otherwise": lambda: normed(B, 4, 15, 1),
            "PyTorch pools below one or two dimensions # none": lambda: shaped(
                pool(shaped(image(4, 3, 5), 1, 4, 3, 5), "max", 2, 1, 1), 2, 3, 5
            ),
            "PyTorch pools below one or two dimensions # three": lambda: shaped(
                pool(shaped(image(2, 3, 4, 6), 6, 4, 6), "max", 2), 2, 3, 4, 3
            ),
            "the result is seen otherwise": lambda: shaped(
                pool(shaped(image(2, 3, 4, 6), 6, 4, 6), "max", 2, 2), 2, 3, 6
            ),
            "# it is not seen otherwise before": lambda: shaped(pool(image(), "max", 2, 2), B, 3, 6),
            "# nor after": lambda: pool(shaped(image(2, 3, 4, 6), 6, 4, 6), "max", 2, 2),
        },
        signed_zeros=False,
    ),
    RuleSpec(
        rules.function_of_reshape,
        lambda: pointwise("mul", shaped(shares(B, 3, 8), B, 3, 2, 4), inp(3, 1, 1)),
        seen_otherwise(),
        {
            "a dimension is empty": lambda: pointwise("tanh", shaped(shares(B, 0, 8), B, 0, 2, 4)),
            VARIES: lambda: pointwise("mul", shaped(shares(B, 3, 8), B, 3, 2, 4), inp(2, 1)),
            f"{VARIES} # of which another has a part": lambda: pointwise("mul", shaped(shares(6, 4), 4, 6), inp(4, 1)),
            "another operand would be a view then": lambda: pointwise(
                "add", shaped(shares(B, 3, 8), B, 3, 2, 4), shares(B, 3, 2, 4)
            ),
            "another operand would be a view then # and is one": lambda: pointwise(
                "add", shaped(shares(B, 3, 8), B, 3, 2, 4), shaped(shares(B, 6, 4), B, 3, 2, 4)
            ),
            "none has dimensions there, and types count otherwise": lambda: pointwise(
                "mul", shaped(make(ops.Softmax(0), inp(dtype=torch.float32)), 1), inp()
            ),
            "# of a value that no norm gives": lambda: pointwise("tanh", shaped(x(B, 3, 8), B, 3, 2, 4)),
            "# broadcast": lambda: pointwise("mul", shaped(shares(3, 8), 3, 2, 4), inp(B, 3, 2, 4)),
        },
    ),
    RuleSpec(
        rules.function_of_permute,
        lambda: pointwise("mul", permuted(product(B, 3, 2), 0, 2, 1), inp(B, 1, 3)),
        turned_products(),
        {
            "rows stay whole, or are copied": lambda: pointwise("tanh", permuted(product(B, 4, 3, 2), 0, 2, 1, 3)),
            "rows stay whole, or are copied # of one element": lambda: pointwise(
                "tanh", permuted(product(B, 3, 2, features=1), 0, 2, 1)
            ),
            "rows stay whole, or are copied # a copy": lambda: pointwise(
                "tanh", permuted(product(B, 3, 2), 0, 2, 1, copy=True)
            ),
            "another operand is not turned so": lambda: pointwise(
                "add", permuted(product(B, 3, 2), 0, 2, 1), inp(B, 5, 3)
            ),
            "another operand is not turned so # but otherwise": lambda: pointwise(
                "add", permuted(product(2, 5, 2), 0, 2, 1), permuted(inp(5, 2, 5), 1, 0, 2)
            ),
            "# of what is no product": lambda: pointwise("tanh", permuted(x(B, 3, 4), 0, 2, 1)),
            "# broadcast": lambda: pointwise("add", permuted(product(3, 2), 1, 0), inp(B, 5, 3)),
        },
    ),
    RuleSpec(
        rules.function_of_expanded,
        lambda: pointwise("div", inp(B, 3, 4), expanded(inp(B, 1, 4), B, 3, 4)),
        beside_others(),
        {
            "no other operand has the shape and type": lambda: pointwise("tanh", expanded(inp(3), 2, 3)),
            "no other operand has the shape and type # of two": lambda: pointwise(
                "mul", expanded(inp(3), 2, 3), inp(1)
            ),
            "no other operand has the shape and type # no dimensions": lambda: pointwise(
                "mul", inp(B, dtype=torch.float32), expanded(inp(), B)
            ),
            "# of a reduction": lambda: reduce("sum", expanded(inp(3), B, 3), 1),
        },
    ),
    RuleSpec(
        rules.function_of_expansion,
        lambda: pointwise("neg", pointwise("tanh", expanded(inp(3, 1), 3, 4))),
        alone().map(lambda root: pointwise("neg", root)),
        {
            "another operand has the shape": lambda: pointwise("mul", inp(3, 4), expanded(inp(3, 1), 3, 4)),
            "an operand has no dimensions, and its type counts less then": lambda: pointwise(
                "mul", inp(1, dtype=torch.float32), expanded(inp(), 2)
            ),
        },
    ),
    RuleSpec(
        rules.reduction_of_expansion,
        lambda: pointwise("neg", reduce("max", expanded(inp(3, 4), 2, 3, 4), 2)),
        joined().map(lambda root: pointwise("neg", root)),
        {
            JOINED: lambda: reduce("sum", expanded(inp(3), 2, 3), 0),
            f"{JOINED} # of length 1": lambda: reduce("sum", expanded(inp(3, 1), 3, 4), 1),
            f"{JOINED} # a softmax": lambda: make(ops.Softmax(1), expanded(inp(3, 1), 3, 4)),
            "# a function": lambda: pointwise("tanh", expanded(inp(3), 2, 3)),
        },
    ),
]
