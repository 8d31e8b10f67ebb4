"""Specs for `fusewright.rules.sums`."""

from __future__ import annotations

from typing import Any

import torch
from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw, avg_pool, conv, range_sum, reduce, reductions

from fusewright.ir import ops
from fusewright.ir.build import pointwise as pw
from fusewright.ir.node import Node, make
from fusewright.rules import sums as rules
from fusewright.rules.linear import reduced_dims

INPUTS = st.sampled_from([(B, 2, 6, 5), (2, 3, 7, 4), (1, 2, 4, 9), (B, 3, 7)]).map(lambda shape: inp(*shape))


def again(root: Node, x: Node) -> Node:
    """The reduction of `root` over another operand."""
    return make(root.op, x)


def operand(draw: Draw, root: Node, *, varies: bool = False) -> Node:
    """A tensor to go with the operand of `root`, uniform over each window unless it `varies`."""
    x, dims = root.arg(0), reduced_dims(root)
    shape = [1 if (d in dims and not varies) or draw(st.booleans()) else n for d, n in enumerate(x.shape)]
    drop = next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return inp(*shape[draw(st.integers(0, drop)) :])


@st.composite
def scales(draw: Draw) -> Node:
    x = draw(INPUTS)
    root = draw(reductions(x, tuple(range(1 if x.shape[0] == B else 0, x.ndim))))
    c = draw(st.sampled_from([2.0, -0.3, 5])) if draw(st.booleans()) else operand(draw, root)
    how = draw(st.sampled_from(["mul", "swapped", "div"]))
    return again(root, pw("mul", c, x) if how == "swapped" else pw(how, x, c))


@st.composite
def negated(draw: Draw) -> Node:
    x = draw(INPUTS)
    return again(draw(reductions(x, tuple(range(1 if x.shape[0] == B else 0, x.ndim)))), pw("neg", x))


@st.composite
def constants(draw: Draw) -> Node:
    x = draw(INPUTS)
    root = draw(reductions(x, tuple(range(1 if x.shape[0] == B else 0, x.ndim))))
    assume(all(isinstance(x.shape[d], int) for d in reduced_dims(root)))
    varies = isinstance(root.op, ops.Reduce)
    b = draw(st.sampled_from([2.0, -0.3, 5])) if draw(st.booleans()) else operand(draw, root, varies=varies)
    assume(not isinstance(b, Node) or b.shape != x.shape)
    fn = draw(st.sampled_from(["add", "sub"]))
    return again(root, pw(fn, b, x) if draw(st.booleans()) else pw(fn, x, b))


@st.composite
def pointwise_convs(draw: Draw) -> Node:
    x, groups = draw(INPUTS), 1
    c, n = x.shape[1], x.ndim - 2
    assert isinstance(c, int)
    groups, out = draw(st.sampled_from([1, c])), c * draw(st.integers(1, 2))
    transposed = draw(st.booleans())
    ones = (1,) * n
    w = inp(c, out // groups, *ones) if transposed else inp(out, c // groups, *ones)
    bias = inp(out) if draw(st.booleans()) else None
    y = conv(x, w, bias, groups=groups, transposed=transposed, dilation=draw(st.integers(1, 2)))
    root = draw(reductions(y, tuple(range(2, y.ndim))))
    assume(min(reduced_dims(root)) >= 2)
    return root


def image(*shape: Any, dtype: torch.dtype = torch.float64) -> Node:
    return inp(*(shape or (B, 3, 8, 4)), dtype=dtype)


def one(kernel: int = 1, x: Node | None = None, **options: Any) -> Node:
    """A convolution of a 3-channel image."""
    return conv(x if x is not None else image(), inp(5, 3, kernel, kernel), inp(5), **options)


EMPTY = inp(2, 3, 0, 4)
WHOLE = torch.int64

SPECS = [
    RuleSpec(
        rules.sum_of_scale,
        lambda: reduce("mean", pw("mul", image(), inp(3, 1, 1)), 2, 3),
        scales(),
        {
            "the scale varies within a window": lambda: reduce("sum", pw("mul", image(), inp(3, 1, 1)), 1, 2),
            "the scale varies within a window # the value is divided by": lambda: reduce(
                "sum", pw("div", 2.0, image()), 2
            ),
            "the scale varies within a window # both broadcast": lambda: reduce(
                "sum", pw("mul", inp(3, 1), inp(4)), 0, 1
            ),
            "the scale is zero, not finite or not normal # zero": lambda: avg_pool(pw("mul", image(), 0.0), 2, 2),
            "the scale is zero, not finite or not normal # inf": lambda: avg_pool(pw("div", image(), torch.inf), 2, 2),
            "the values are not floating point": lambda: reduce("sum", pw("mul", image(dtype=WHOLE), 2), 2),
            "the values are not floating point # turned into floats": lambda: reduce(
                "sum", pw("div", image(dtype=WHOLE), 2), 2
            ),
            "# a max": lambda: reduce("max", pw("mul", image(), 2.0), 2),
            "# a sum of two": lambda: reduce("sum", pw("add", image(), 2.0), 2),
        },
    ),
    RuleSpec(
        rules.sum_of_negated,
        lambda: reduce("sum", pw("neg", image()), 2, 3),
        negated(),
        {
            "the values are not floating point": lambda: reduce("sum", pw("neg", image(dtype=WHOLE)), 2),
            "# a max": lambda: reduce("max", pw("neg", image()), 2),
            "# another function": lambda: reduce("sum", pw("abs", image()), 2),
        },
        signed_zeros=False,
    ),
    RuleSpec(
        rules.sum_of_constant,
        lambda: reduce("sum", pw("add", image(), inp(3, 1, 1)), 1, 2, 3),
        constants(),
        {
            "neither operand is the smaller": lambda: reduce("mean", pw("add", image(), image()), 2),
            "neither operand is the smaller # both broadcast": lambda: reduce(
                "sum", pw("add", inp(3, 1), inp(4)), 0, 1
            ),
            "neither operand is the smaller # varies under pooling": lambda: avg_pool(
                pw("add", image(), inp(3, 1, 4)), 2, 2
            ),
            "the added number is not known at plan time": lambda: reduce("mean", pw("add", image(), B), 2),
            "the values are not floating point": lambda: reduce("sum", pw("add", image(dtype=WHOLE), 1), 2),
            "the values are not floating point # another dtype beside": lambda: reduce(
                "sum", pw("add", image(), inp(3, 1, 1, dtype=torch.float32)), 2
            ),
            "sums in another dtype": lambda: reduce(
                "sum", pw("add", image(dtype=torch.float32), 1.0), 2, dtype=torch.float64
            ),
            "the length of a reduced dimension is not known": lambda: reduce("sum", pw("add", image(), 1.0), 0, 2),
            "a reduced dimension is empty": lambda: reduce("sum", pw("add", EMPTY, 1.0), 2),
            "# a max": lambda: reduce("max", pw("add", image(), 2.0), 2),
            "# a product": lambda: reduce("sum", pw("mul", image(), 2.0), 2),
        },
        exact_example=lambda: reduce("sum", pw("sub", inp(B, 3, 1, 1), image()), 1, 2, 3),
    ),
    RuleSpec(
        rules.sum_of_pointwise_conv,
        lambda: avg_pool(one(), 2, 2, padding=(1, 0)),
        pointwise_convs(),
        {
            "the kernel is larger than 1": lambda: avg_pool(one(2), 2, 2),
            "the convolution is strided or padded # stride": lambda: avg_pool(one(stride=2), 2, 2),
            "the convolution is strided or padded # one stride": lambda: avg_pool(one(stride=(1, 2)), 2, 2),
            "the convolution is strided or padded # padding": lambda: avg_pool(one(padding=1), 2, 2),
            "the convolution is strided or padded # output padding": lambda: avg_pool(
                conv(image(), inp(3, 5, 1, 1), transposed=True, dilation=2, extra=1), 2, 2
            ),
            "not only positions are summed": lambda: reduce("mean", one(), 1, 2),
            "not only positions are summed # batch": lambda: reduce("mean", one(), 0),
            "sums in another dtype": lambda: range_sum(
                conv(image(dtype=torch.float32), inp(5, 3, 1, 1, dtype=torch.float32)), d2=(ops.Slot(0, 4, 1, 0.5),)
            ),
            "the length of a reduced dimension is not known": lambda: reduce("mean", one(x=image(2, 3, B, 4)), 2),
            "a reduced dimension is empty": lambda: reduce("sum", one(x=EMPTY), 2),
            "# a max": lambda: reduce("max", one(), 2),
        },
    ),
]
