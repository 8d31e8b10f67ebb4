"""Intervals hold every value PyTorch computes, and are narrow where rules need them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.intervals import interval, outward, within
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.pointwise import NON_NEGATIVE, REALS

inf = math.inf


def source(dtype: torch.dtype = torch.float32) -> Node:
    return make(ops.Input((1, 2, 64), dtype, torch.device("cpu"), "x", 0))


def values(root: Node, dtype: torch.dtype) -> torch.Tensor:
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1.0, -1.0, 3e38, -3e38, inf, -inf, 6.0, -0.5]
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(115, generator=generator) * 10 ** torch.linspace(-6, 6, 115)
    x = torch.cat([torch.tensor(special), spread]).view(1, 2, 64).to(dtype)
    derive, forward = lower(Graph((source(dtype),), (root,))).functions()
    return forward(None, x, *derive(None))[0].double()


UNARY = [
    "relu",
    "relu6",
    "abs",
    "neg",
    "square",
    "sigmoid",
    "tanh",
    "exp",
    "sqrt",
    "log",
    "reciprocal",
    "rsqrt",
    "floor",
    "selu",
    "gelu",
    "silu",
    "hardsigmoid",
    "log_sigmoid",
    "softsign",
    "sign",
    "log1p",
    "sin",
    "mish",
    "hardswish",
]
NUMBERS = st.sampled_from([0.0, 1.0, -2.0, 0.1, 1e30, -1e-30, 1e-45, 3])


def grow(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    pools = [ops.Pool(kind, (2,), (1,), (0,), (1,)) for kind in ("max", "avg")]
    return st.one_of(
        st.builds(pointwise, st.sampled_from(UNARY), children),
        st.builds(pointwise, st.sampled_from(["add", "sub", "mul", "div"]), children, NUMBERS),
        st.builds(
            lambda c, fn, x: pointwise(fn, c, x), NUMBERS, st.sampled_from(["add", "sub", "mul", "div"]), children
        ),
        st.builds(
            lambda fn, xy: pointwise(fn, *xy),
            st.sampled_from(["add", "sub", "mul", "maximum", "minimum"]),
            children.map(lambda x: (x, x))
            | children.map(lambda x: (x, make(ops.Reduce("max", (1, 2), keepdim=True), source(x.dtype)))),
        ),
        st.builds(
            lambda x, low: pointwise("clamp", x, params=(low, low + 2)), children, st.sampled_from([-1.0, 0.0, 0.1])
        ),
        st.builds(
            lambda x, kind: make(ops.Reduce(kind, (2,), keepdim=True), x),
            children,
            st.sampled_from(["sum", "mean", "max", "min", "prod", "var", "logsumexp"]),
        ),
        st.builds(lambda x, log: make(ops.Softmax(1, log), x), children, st.booleans()),
        st.builds(lambda x: make(ops.Pad(((1, 1, 0),), "constant", -2.0), x) if x.shape[1] == 2 else x, children),
        st.builds(lambda x, pool: make(pool, x) if x.shape[-1] == 64 else x, children, st.sampled_from(pools)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.sampled
def test_intervals_hold_every_value(dtype):
    @settings(max_examples=300, derandomize=True, deadline=None, database=None)
    @given(st.recursive(st.just(source(dtype)), grow, max_leaves=4))
    def check(root):
        result = values(root, dtype)
        low, high = interval(root)
        result = result[~torch.isnan(result)]
        assert not len(result) or (low <= float(result.min()) and float(result.max()) <= high)

    check()


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda x: x, REALS),
        (lambda x: pointwise("relu", x), NON_NEGATIVE),
        (lambda x: pointwise("mul", x, x), NON_NEGATIVE),
        (lambda x: pointwise("neg", pointwise("abs", x)), (-inf, 0.0)),
        (lambda x: pointwise("mul", pointwise("square", x), 3), NON_NEGATIVE),
        (lambda x: pointwise("div", pointwise("exp", x), -2.0), (-inf, 0.0)),
        (lambda x: pointwise("div", 2.0, x), REALS),
        (lambda x: make(ops.Reduce("mean", (2,)), pointwise("relu", x)), NON_NEGATIVE),
        (lambda x: make(ops.Reduce("sum", (2,)), pointwise("log_sigmoid", x)), (-inf, 0.0)),
        (lambda x: make(ops.Reduce("var", (2,)), x), NON_NEGATIVE),
        (lambda x: make(ops.Softmax(1), x), (0.0, 1.0)),
        (lambda x: make(ops.Pool("avg", (2,), (2,), (1,), (1,)), pointwise("relu", x)), NON_NEGATIVE),
        (lambda x: make(ops.Pool("avg", (2,), (2,), (0,), (1,), divisor=-2), pointwise("relu", x)), REALS),
        (lambda x: make(ops.Pool("avg", (2,), (2,), (1,), (1,)), pointwise("sigmoid", x)), (0.0, 1.00003)),
        (lambda x: make(ops.Pool("avg", (2,), (2,), (0,), (1,)), pointwise("clamp", x, params=(2, 4))), (0.0, 4.0)),
        (lambda x: make(ops.Pool("avg", (300,), (2,), (150,), (1,)), pointwise("tanh", x)), REALS),
        (lambda x: make(ops.Pool("max", (2,), (2,), (1,), (1,)), pointwise("relu", x)), REALS),
        (lambda x: make(ops.Pool("max", (3,), (2,), (0,), (1,), True), pointwise("relu", x)), REALS),
        (lambda x: make(ops.Pool("max", (2,), (2,), (0,), (1,)), pointwise("relu", x)), NON_NEGATIVE),
        (lambda x: make(ops.Cast(torch.int32), pointwise("relu", x)), REALS),
        (lambda x: make(ops.Cast(torch.float32), make(ops.Cast(torch.int32), pointwise("relu", x))), REALS),
        (lambda x: make(ops.Full((2,), 0.0, torch.float32, torch.device("cpu"))), (0.0, 0.0)),
        (lambda x: make(ops.RangeSum(((2, (ops.Slot(0, 4, 1, -1.0),)),), torch.float64), pointwise("relu", x)), REALS),
        (
            lambda x: make(ops.RangeSum(((2, (ops.Slot(0, 4, 1, 0.5),)),), torch.float64), pointwise("exp", x)),
            NON_NEGATIVE,
        ),
    ],
)
def test_known_intervals(build, expected):
    assert interval(build(source())) == pytest.approx(expected, rel=1e-4)


def test_a_positive_constant_keeps_values_off_zero():
    low, _ = interval(pointwise("add", pointwise("square", source()), 1e-5))
    assert 0.9e-5 < low < 1e-5


def test_outward_is_wider_unless_zero_or_infinite():
    low, high = outward((-1.0, 1.0), torch.float32)
    assert -1.00001 < low < -1 and 1 < high < 1.00001
    assert outward((0.0, inf), torch.float32) == (0.0, inf)
    assert outward((1e39, 1e39), torch.float32)[1] == inf and outward((1e39, 1e39), torch.float32)[0] < 3.5e38
    assert outward((-1e39, 1.0), torch.float32)[0] == -inf


@pytest.mark.parametrize(
    ("fn", "ends", "expected"),
    [
        ("erf", (-1.0, 1.0), (-0.84270, 0.84270)),
        ("sigmoid", (-inf, 2.0), (0.0, 0.88080)),
        ("silu", (-1.0, 3.0), (-0.26894, 2.85772)),
        ("silu", (-2.0, 3.0), (-0.2785, inf)),
        ("hardswish", (-1.0, 1.0), (-0.33333, 0.66667)),
        ("sin", (-1.0, 0.5), (-0.84147, 0.47943)),
        ("cos", (0.0, 1.0), (0.54030, 1.0)),
    ],
)
def test_the_image_where_a_function_keeps_the_order(fn, ends, expected):
    found = interval(pointwise(fn, pointwise("clamp", source(torch.float64), params=ends)))
    assert found == pytest.approx(expected, abs=1e-5)
    low, high = interval(pointwise(fn, pointwise("clamp", source(torch.float16), params=ends)))
    assert low <= found[0] and found[1] <= high


def test_a_deep_chain_gives_up():
    x = pointwise("relu", source())
    for _ in range(40):
        x = make(ops.Permute((0, 2, 1)), x)
    assert interval(x) == REALS


def test_within():
    assert within((0, 1), (0, 1)) and not within((-1, 1), (0, 1)) and not within((0, 2), (0, 1))


def test_windows_of_images_hold_what_is_in_them() -> None:
    x = pointwise(
        "add", pointwise("sigmoid", make(ops.Input((2, 3, 8, 8), torch.float32, torch.device("cpu"), "x", 0))), 1.0
    )
    assert interval(make(ops.Windows(3, 3, 2), x))[0] > 0.9
    bare, padded = (ops.Grid((3, 3), (1, 1), (p, p), (1, 1)) for p in (0, 1))
    assert interval(make(ops.Unfold(bare), x))[0] > 0.9
    assert interval(columns := make(ops.Unfold(padded), x))[0] == 0.0
    assert interval(make(ops.Fold((8, 8), padded), columns)) == NON_NEGATIVE
