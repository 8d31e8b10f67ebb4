"""Specs for `fusewright.rules.pointwise`."""

from __future__ import annotations

import math
from typing import Any

import torch
from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw

from fusewright.ir import ops
from fusewright.ir.build import pointwise as pw
from fusewright.ir.node import Node, make
from fusewright.rules import pointwise as rules

INPUTS = st.sampled_from([(B, 5), (3, 2, 2), (7,)]).map(lambda shape: inp(*shape))
WHOLE = torch.int64


def x(dtype: torch.dtype = torch.float64) -> Node:
    return inp(B, 9, dtype=dtype)


def cast(v: Node, *dtypes: torch.dtype) -> Node:
    for dtype in dtypes:
        v = make(ops.Cast(dtype), v)
    return v


def clip(fn: str, v: Node, *params: Any) -> Node:
    return pw(fn, v, params=params)


def beside(draw: Draw, fns: tuple[str, ...], v: Node, c: float) -> Node:
    fn = draw(st.sampled_from(fns))
    return pw(fn, c, v) if fn in ("mul", "add") and draw(st.booleans()) else pw(fn, v, c)


SQUARES = ("square", "pow", "mul")


def squared(way: str, v: Node) -> Node:
    return pw("pow", v, params=(2,)) if way == "pow" else pw(way, *[v] * (1 + (way == "mul")))


@st.composite
def scales(draw: Draw) -> Node:
    numbers = st.sampled_from([2, 0.5, -3.0, 0.1, 7, 10.0, 1])
    once = beside(draw, ("mul", "div"), draw(INPUTS), draw(numbers))
    return pw(draw(st.sampled_from(["mul", "div"])), once, draw(numbers))


@st.composite
def shifts(draw: Draw) -> Node:
    numbers = st.sampled_from([2, 0.5, -3.0, 0.1, 7, -0.1, 0])
    once = beside(draw, ("add", "sub"), draw(INPUTS), draw(numbers))
    return pw(draw(st.sampled_from(["add", "sub"])), once, draw(numbers))


REPEATED: list[tuple[str, tuple[Any, ...]]] = [
    ("relu", ()), ("abs", ()), ("floor", ()), ("ceil", ()), ("round", ()), ("relu6", ()), ("clamp", (-0.5, 0.25)),
    ("hardshrink", (0.5,)), ("sign", ()), ("threshold", (0.5, 2.0)), ("threshold", (0.5, -2.0)), ("clamp_min", (0.1,)),
]  # fmt: skip


@st.composite
def repeated(draw: Draw) -> Node:
    fn, params = draw(st.sampled_from(REPEATED))
    return pw(fn, pw(fn, draw(INPUTS), params=params), params=params)


PASSING = [
    ("clamp", (-1.0, 1.0)),
    ("clamp", (0.0, 0.5)),
    ("clamp_min", (-0.5,)),
    ("clamp_max", (0.7,)),
    ("clamp_min", (0,)),
]
STOPPING = [("relu", ()), ("relu6", ()), ("hardtanh", (-1.0, 1.0)), ("hardtanh", (0.25, 3.0))]


@st.composite
def clips(draw: Draw) -> Node:
    family = st.sampled_from(draw(st.sampled_from([PASSING, STOPPING])))
    (f, p), (g, q) = draw(family), draw(family)
    assume((f, p) != (g, q))
    return clip(f, clip(g, draw(INPUTS), *q), *p)


EVEN = st.sampled_from([("abs", ()), ("square", ()), ("cos", ()), ("pow", (2,)), ("pow", (4,))])
NEUTRAL = st.sampled_from([("mul", 1), ("mul", 1.0), ("div", 1), ("sub", 0.0), ("sub", 0), ("add", -0.0), ("add", 0.0)])
CASTS = st.sampled_from(
    [
        (torch.float64, torch.float64, torch.float32),
        (torch.float32, torch.float64, torch.float32),
        (torch.float16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float64),
        (torch.int32, torch.float64, torch.float32),
        (torch.int8, torch.int64, torch.int32),
        (torch.uint8, torch.int16, torch.float16),
        (torch.float32, torch.float64, torch.bool),
        (torch.bool, torch.float32, torch.float64),
    ]
)


def written_out(fn: str, v: Node, swapped: bool = False) -> Node:
    """A function of `v` by its parts; with `swapped`, the operands of its product or sum the other way round."""
    order = (lambda a, b: (b, a)) if swapped else (lambda a, b: (a, b))
    match fn:
        case "tanhshrink":
            return pw("sub", v, pw("tanh", v))
        case "softsign":
            return pw("div", v, pw("add", *order(pw("abs", v), 1)))
    return pw("mul", *order(v, pw("sigmoid", v)))


NAMED = st.sampled_from(["tanhshrink", "softsign", "silu"])


SPECS = [
    RuleSpec(
        rules.neutral,
        lambda: pw("mul", x(), 1.0),
        st.tuples(INPUTS, NEUTRAL).map(lambda t: pw(t[1][0], t[0], t[1][1])),
        {
            "the number changes the value": lambda: pw("mul", x(), 2.0),
            "the number changes the value # x*0": lambda: pw("mul", x(), 0),
            "the number changes the value # x + 1": lambda: pw("add", x(), 1.0),
            "the number changes the value # x - 1": lambda: pw("sub", x(), 1),
            "the number changes the value # not known": lambda: pw("mul", x(), B),
            "the number changes the value # not known either": lambda: pw("add", x(), B),
            "the result has another dtype": lambda: pw("mul", x(WHOLE), 1.0),
            "the result has another dtype # x/1": lambda: pw("div", x(WHOLE), 1),
            "# 1/x": lambda: pw("div", 1.0, x()),
            "# 0 - x": lambda: pw("sub", 0.0, x()),
            "# a tensor": lambda: pw("mul", x(), inp()),
        },
        exact_example=lambda: pw("add", x(), 0.0),
    ),
    RuleSpec(
        rules.named,
        lambda: written_out("silu", x()),
        st.tuples(NAMED, INPUTS, st.booleans()).map(lambda t: written_out(*t)),
        {
            "# tanh(x) - x": lambda: pw("sub", pw("tanh", v := x()), v),
            "# of another": lambda: pw("sub", x(), pw("tanh", x())),
            "# x / (2 + |x|)": lambda: pw("div", v := x(), pw("add", pw("abs", v), 2)),
            "# x / (1 + x)": lambda: pw("div", v := x(), pw("add", v, 1)),
            "# mish": lambda: pw("mul", v := x(), pw("tanh", pw("softplus", v))),
            "# x / (|x| - 1)": lambda: pw("div", v := x(), pw("sub", pw("abs", v), 1)),
            "the values are not floating point": lambda: pw("sub", v := x(WHOLE), pw("tanh", v)),
        },
        exact_example=lambda: written_out("softsign", x()),
    ),
    RuleSpec(
        rules.complement,
        lambda: pw("sub", 1, pw("sigmoid", x())),
        INPUTS.map(lambda v: pw("sub", 1.0, pw("sigmoid", v))),
        {
            "the number is not 1": lambda: pw("sub", 2, pw("sigmoid", x())),
            "the number is not 1 # not known": lambda: pw("sub", B, pw("sigmoid", x())),
            "the number is not 1 # a tensor": lambda: pw("sub", inp(), pw("sigmoid", x())),
            "the values are not floating point": lambda: pw("sub", 1, pw("sigmoid", x(WHOLE))),
            "# sigmoid(x) - 1": lambda: pw("sub", pw("sigmoid", x()), 1),
            "# 1 + sigmoid(x)": lambda: pw("add", 1, pw("sigmoid", x())),
            "# another function": lambda: pw("sub", 1, pw("tanh", x())),
        },
        exact_example=lambda: pw("sub", 1, pw("sigmoid", pw("mul", x(), 1000.0))),
    ),
    RuleSpec(
        rules.negated_twice,
        lambda: pw("neg", pw("neg", x())),
        INPUTS.map(lambda v: pw("neg", pw("neg", v))),
        {"# once": lambda: pw("neg", x()), "# after another": lambda: pw("neg", pw("abs", x()))},
    ),
    RuleSpec(
        rules.even_of_negated,
        lambda: pw("abs", pw("neg", x())),
        st.tuples(EVEN, INPUTS).map(lambda t: pw(t[0][0], pw("neg", t[1]), params=t[0][1])),
        {
            "sin is not even": lambda: pw("sin", pw("neg", x())),
            "relu is not even": lambda: pw("relu", pw("neg", x())),
            "the values are not floating point": lambda: pw("abs", pw("neg", x(WHOLE))),
            "# of another": lambda: pw("abs", pw("relu", x())),
            "# two operands": lambda: pw("maximum", pw("neg", x()), x()),
        },
        exact_example=lambda: pw("square", pw("neg", x())),
    ),
    RuleSpec(
        rules.repeated,
        lambda: pw("relu", pw("relu", x())),
        repeated(),
        {
            "the two functions differ": lambda: pw("relu", pw("abs", x())),
            "the two functions differ # parameters": lambda: clip("clamp_min", clip("clamp_min", x(), 1.0), 2.0),
            "sigmoid is not idempotent": lambda: pw("sigmoid", pw("sigmoid", x())),
            "the values are not floating point": lambda: pw("relu", pw("relu", x(WHOLE))),
            "# once": lambda: pw("relu", x()),
            "# two operands": lambda: pw("maximum", pw("maximum", x(), x()), x()),
        },
    ),
    RuleSpec(
        rules.clip_of_clip,
        lambda: clip("clamp", clip("clamp", x(), -1.0, 2.0), 0.0, 3.0),
        clips(),
        {
            "the two are the same": lambda: pw("relu6", pw("relu6", x())),
            "their gradients differ at a bound": lambda: clip("clamp_max", pw("relu", x()), 2.0),
            "their gradients differ at a bound # inner": lambda: pw("relu", clip("clamp_max", x(), 2.0)),
            "a bound is NaN": lambda: clip("clamp_max", clip("clamp_min", x(), math.nan), 2.0),
            "a bound is NaN # outer": lambda: clip("clamp_min", clip("clamp_max", x(), 1.0), math.nan),
            "the two ranges do not overlap": lambda: clip("clamp", clip("clamp", x(), 0.0, 1.0), 2.0, 3.0),
            "the two ranges do not overlap # they touch": lambda: clip("clamp_max", clip("clamp_min", x(), 1.0), 1.0),
            "the two ranges do not overlap # crossed bounds": lambda: clip(
                "clamp", clip("clamp_min", x(), 0.0), 2.0, 1.0
            ),
            "the values are not floating point": lambda: clip("clamp_max", clip("clamp_min", x(WHOLE), 1), 2),
            "# another function": lambda: pw("relu", pw("abs", x())),
        },
        exact_example=lambda: pw("relu6", pw("relu", x())),
    ),
    RuleSpec(
        rules.square_of_root,
        lambda: pw("square", pw("sqrt", pw("relu", x()))),
        INPUTS.flatmap(lambda v: st.sampled_from([squared(way, pw("sqrt", pw("abs", v))) for way in SQUARES])),
        {
            "the root may be of negative numbers": lambda: pw("square", pw("sqrt", x())),
            "the values are not floating point": lambda: pw("square", pw("sqrt", x(WHOLE))),
            "# another power": lambda: pw("pow", pw("sqrt", pw("relu", x())), params=(3,)),
            "# another root": lambda: pw("mul", pw("sqrt", pw("relu", x())), pw("sqrt", pw("abs", x()))),
            "# a reciprocal": lambda: pw("square", pw("rsqrt", pw("relu", x()))),
        },
        exact_example=lambda: pw("square", pw("sqrt", pw("square", x()))),
    ),
    RuleSpec(
        rules.doubled,
        lambda: (lambda v: pw("add", v, v))(pw("relu", x())),
        INPUTS.map(lambda v: pw("add", v, v)),
        {
            "the values are not floating point": lambda: (lambda v: pw("add", v, v))(x(WHOLE)),
            "# two values": lambda: pw("add", x(), x()),
            "# a square": lambda: (lambda v: pw("mul", v, v))(x()),
        },
    ),
    RuleSpec(
        rules.scale_of_scale,
        lambda: pw("mul", pw("div", x(), 2.0), 8.0),
        scales(),
        {
            "a scale is zero, not finite or not normal # outer": lambda: pw("mul", pw("mul", x(), 2.0), 0.0),
            "a scale is zero, not finite or not normal # inner": lambda: pw("div", pw("mul", x(), 0.0), 2.0),
            "a scale is zero, not finite or not normal # divisors": lambda: pw("div", pw("mul", x(), 2.0), 0.0),
            "a scale is zero, not finite or not normal # inner divisor": lambda: pw("mul", pw("div", x(), 0.0), 2.0),
            "a scale is zero, not finite or not normal # inf": lambda: pw("mul", pw("mul", x(), math.inf), 2.0),
            "a scale is zero, not finite or not normal # merged": lambda: pw("mul", pw("mul", x(), 1e200), 1e200),
            "a scale is zero, not finite or not normal # merged, small": lambda: pw(
                "div", pw("div", x(), 1e200), 1e200
            ),
            "a number is not known at plan time": lambda: pw("mul", pw("mul", x(), 2.0), B),
            "a number is not known at plan time # inner": lambda: pw("mul", pw("mul", x(), B), 2.0),
            "the values are not floating point": lambda: pw("mul", pw("mul", x(WHOLE), 2), 3),
            "the values are not floating point # turned into floats": lambda: pw("mul", pw("div", x(WHOLE), 2), 3),
            "# a number divided": lambda: pw("div", 2.0, pw("mul", x(), 3.0)),
            "# of a quotient": lambda: pw("mul", pw("div", 2.0, x()), 3.0),
            "# a tensor": lambda: pw("mul", pw("mul", x(), inp()), 3.0),
        },
    ),
    RuleSpec(
        rules.shift_of_shift,
        lambda: pw("sub", pw("add", x(), 3), 5.0),
        shifts(),
        {
            "a constant is not finite": lambda: pw("add", pw("add", x(), math.inf), 1.0),
            "a constant is not finite # for the dtype": lambda: pw("add", pw("add", x(torch.float32), 1e39), 1.0),
            "the constants may be there to round": lambda: pw(
                "sub", pw("add", x(torch.float32), 1.5 * 2**23), 1.5 * 2**23
            ),
            "a number is not known at plan time": lambda: pw("add", pw("add", x(), 1.0), B),
            "a number is not known at plan time # inner": lambda: pw("add", pw("add", x(), B), 1.0),
            "the values are not floating point": lambda: pw("add", pw("add", x(WHOLE), 1), 2),
            "# from a number": lambda: pw("sub", 1.0, pw("add", x(), 1.0)),
            "# of a scale": lambda: pw("add", pw("mul", x(), 2.0), 1.0),
        },
    ),
    RuleSpec(
        rules.cast_of_cast,
        lambda: cast(x(torch.float32), torch.float64, torch.float32),
        st.tuples(st.sampled_from([(B, 5), (7,)]), CASTS).map(lambda t: cast(inp(*t[0], dtype=t[1][0]), *t[1][1:])),
        {
            "the inner cast may change values # rounds": lambda: cast(x(), torch.float32, torch.float64),
            "the inner cast may change values # range": lambda: cast(x(torch.float16), torch.bfloat16, torch.float32),
            "the inner cast may change values # overflow": lambda: cast(
                x(torch.bfloat16), torch.float16, torch.float32
            ),
            "the inner cast may change values # whole": lambda: cast(x(), WHOLE, torch.float64),
            "the inner cast may change values # large": lambda: cast(x(WHOLE), torch.float64, WHOLE),
            "the inner cast may change values # sign": lambda: cast(x(torch.int8), torch.uint8, WHOLE),
            "the inner cast may change values # bool": lambda: cast(x(WHOLE), torch.bool, WHOLE),
            "the inner cast may change values # complex": lambda: cast(x(), torch.complex128, torch.complex64),
            "a float too large for whole numbers may differ": lambda: cast(
                x(torch.float32), torch.float64, torch.int32
            ),
            "# once": lambda: cast(x(), torch.float32),
        },
    ),
    RuleSpec(
        rules.zero,
        lambda: pw("mul", x(), 0.0),
        st.one_of(INPUTS.map(lambda v: pw("mul", 0, v)), INPUTS.map(lambda v: pw("sub", v, v))),
        {
            "the number is not zero": lambda: pw("mul", x(), 1e-300),
            "the number is not zero # not known": lambda: pw("mul", x(), B),
            "the values are not floating point": lambda: pw("mul", x(WHOLE), 0),
            "# two values": lambda: pw("sub", x(), x()),
            "# 0/x": lambda: pw("div", 0.0, x()),
            "# x/0": lambda: pw("div", x(), 0.0),
        },
    ),
]
