"""Streams: the generated CUDA C++ runs on the CPU, and is compared with the same graph in float64."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path

import pytest
import sympy
import torch
from emulation.emulate import ORDERS, emulate
from runtime.fake_driver import FakeDriver
from torch import Tensor

from fusewright.codegen.aten import lower
from fusewright.codegen.cuda.stream import kernel
from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise
from fusewright.ir.node import Graph, Node, make
from fusewright.kernel import Kernel, evaluate
from fusewright.runtime.launch import Launcher
from fusewright.runtime.nvrtc import CountError
from fusewright.schedule.stream import parse
from fusewright.schedule.stream_record import Stream

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[2] / "golden"
inf, nan = float("inf"), float("nan")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def inp(index: int, *shape: int, dtype: torch.dtype = F32) -> Node:
    return make(ops.Input(shape, dtype, CPU, f"a{index}", index))


def pool(
    x: Node, kind: str, kernel: tuple[int, ...], stride: int = 0, padding: int = 0, dilation: int = 1, **more
) -> Node:
    n = len(kernel)
    stride_ = (stride,) * n if stride else kernel
    return make(ops.Pool(kind, kernel, stride_, (padding,) * n, (dilation,) * n, **more), x)


def fold(x: Node, kind: str, *dims: int, keepdim: bool = False, correction: float = 1) -> Node:
    return make(ops.Reduce(kind, dims, keepdim, correction), x)


def graph_of(root: Node) -> Graph:
    graph = Graph((), (root,))
    inputs = sorted((n for n in graph.nodes() if isinstance(n.op, ops.Input)), key=lambda n: n.op.index)
    return Graph(tuple(inputs), (root,))


def stream_of(root: Node) -> Stream:
    found = parse(root, graph_of(root).users())
    assert isinstance(found, Stream), found
    return found


def reference(root: Node, tensors: dict[Node, Tensor]) -> Tensor:
    """The graph in float64, on operands that have been rounded to their own dtype."""
    graph = graph_of(root)
    wide = [t.double() if t.is_floating_point() else t for t in map(tensors.__getitem__, graph.inputs)]
    forward = lower(graph).functions()[1]
    result: Tensor = forward(None, *wide)[0]
    return result.double()


def random(node: Node, seed: int) -> Tensor:
    """Any numbers, truth values, or indices of the first rows."""
    generator = torch.Generator().manual_seed(seed)
    if not node.dtype.is_floating_point:
        return torch.randint(2 if node.dtype == torch.bool else 8, node.shape, generator=generator).to(node.dtype)
    return torch.randn(node.shape, generator=generator, dtype=F64).to(node.dtype)


def check(
    root: Node, tensors: dict[Node, Tensor] | None = None, *, order: str = "forward", tolerance: float = 0.0
) -> Kernel:
    s = stream_of(root)
    k = kernel(s, "fused_test")
    given = tensors or {n: random(n, i) for i, n in enumerate(s.tensors)}
    got = emulate(k, *(given[n] for n in s.tensors), order=order)
    want = reference(root, given)
    assert got.dtype == root.dtype and got.shape == want.shape
    eps = torch.finfo(root.dtype).eps
    special = ~want.isfinite()
    torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
    scale = want[~special].abs().max().clamp(min=1e-3) if (~special).any() else torch.tensor(1.0)
    error = (got.double() - want)[~special].abs().max() if (~special).any() else torch.tensor(0.0)
    assert error <= scale * max(tolerance, 8 * eps), (error, scale)
    return k


X = inp(0, 2, 3, 8, 12)
ODD = inp(0, 2, 3, 7, 13)
ROWS = inp(0, 3, 5, 3, 9)
CHAINS: dict[str, Callable[[], Node]] = {
    # flat: pointwise operations, operands broadcast in every way
    "relu": lambda: pointwise("relu", X),
    "odd": lambda: pointwise("tanh", ODD),
    "one": lambda: pointwise("sigmoid", inp(0, 1)),
    "many blocks": lambda: pointwise("mul", inp(0, 3, 1025), 3.0),
    "channel bias": lambda: pointwise("relu", pointwise("add", X, inp(1, 3, 1, 1))),
    "last bias": lambda: pointwise("add", pointwise("mul", X, 0.5), inp(1, 12)),
    "residual": lambda: pointwise("add", pointwise("gelu", X, params=("none",)), inp(1, 2, 3, 8, 12)),
    "row operand": lambda: pointwise("mul", ODD, inp(1, 7, 1)),
    "batch operand": lambda: pointwise("maximum", X, inp(1, 2, 1, 1, 1)),
    "zero-dim operand": lambda: pointwise("sub", X, inp(1)),
    "outer product": lambda: pointwise("mul", inp(0, 6, 1), inp(1, 1, 8)),
    "operands alone": lambda: pointwise("add", pointwise("mul", inp(0, 4, 6, 8), inp(1, 6, 1)), inp(2, 8)),
    "used twice": lambda: pointwise("mul", X, pointwise("sigmoid", X)),
    "where": lambda: pointwise("where", pointwise("gt", X, 0.25), X, inp(1, 3, 1, 1)),
    "full": lambda: pointwise("add", X, make(ops.Full((3, 1, 1), 1.5, F32, CPU))),
    # windows
    "max 2": lambda: pool(X, "max", (2, 2)),
    "max 2 odd": lambda: pool(ODD, "max", (2, 2)),
    "max 3 s2 p1": lambda: pool(X, "max", (3, 3), 2, 1),
    "max 3 s1 p1": lambda: pool(X, "max", (3, 3), 1, 1),
    "max 3 s2": lambda: pool(X, "max", (3, 3), 2),
    "max 3 dilated": lambda: pool(X, "max", (3, 3), 1, 1, 2),
    "max 5 p2 s2 odd": lambda: pool(ODD, "max", (5, 5), 2, 2),
    "min 2": lambda: pool(X, "min", (2, 3), 1, 1),
    "ceil": lambda: pool(ODD, "max", (2, 2), 2, ceil_mode=True),
    "ceil 3 s2 p1": lambda: pool(inp(0, 2, 3, 8, 16), "max", (3, 3), 2, 1, ceil_mode=True),
    "avg 2": lambda: pool(X, "avg", (2, 2)),
    "avg 4": lambda: pool(X, "avg", (4, 4)),
    "avg 3 s2 p1": lambda: pool(X, "avg", (3, 3), 2, 1),
    "avg 3 without padding": lambda: pool(X, "avg", (3, 3), 2, 1, count_include_pad=False),
    "avg ceil": lambda: pool(ODD, "avg", (3, 2), 2, 1, ceil_mode=True),
    "avg ceil without padding": lambda: pool(ODD, "avg", (3, 2), 2, 1, ceil_mode=True, count_include_pad=False),
    "avg divisor": lambda: pool(X, "avg", (2, 2), divisor=7),
    "1-d": lambda: pool(inp(0, 2, 5, 64), "max", (3,), 2, 1),
    "1-d unbatched": lambda: pool(inp(0, 5, 30), "avg", (3,)),
    "3-d": lambda: pool(inp(0, 2, 3, 5, 6, 8), "max", (2, 3, 2), 2, 1),
    "3-d avg": lambda: pool(inp(0, 1, 2, 6, 6, 6), "avg", (3, 3, 3), 2),
    "window of one": lambda: pool(X, "max", (1, 1), 2),
    "wide window": lambda: pool(inp(0, 1, 2, 40, 72), "avg", (40, 71), 1),
    "length one": lambda: pool(inp(0, 2, 3, 9, 1), "max", (3, 1), 1),
    "before and after": lambda: pointwise(
        "add",
        pointwise("mul", pool(pointwise("tanh", pointwise("add", X, inp(1, 3, 1, 1))), "max", (2, 2)), 2.0),
        inp(2, 3, 4, 6),
    ),
    # reductions
    "mean": lambda: fold(ODD, "mean", 2, 3),
    "sum keepdim": lambda: fold(X, "sum", 2, 3, keepdim=True),
    "max of all": lambda: fold(X, "max", 0, 1, 2, 3),
    "sum of channels and positions": lambda: fold(pointwise("sigmoid", X), "sum", 1, 2, 3),
    "sum of channels": lambda: fold(X, "sum", 1),
    "logsumexp of channels": lambda: fold(ODD, "logsumexp", 1, keepdim=True),
    "norm of channels": lambda: fold(ODD, "norm", 1),
    "norm of positions, halved": lambda: pointwise("mul", fold(pointwise("relu", X), "norm", 2, 3), 0.5),
    "norm of long rows": lambda: fold(inp(0, 2, 20_003), "norm", 1),
    "norm in bfloat16": lambda: fold(inp(0, 3, 4, 5, 33, dtype=BF16), "norm", 3),
    "variance of channels": lambda: fold(ODD, "var", 1),
    "deviation of channels, kept": lambda: fold(X, "std", 1, keepdim=True),
    "variance of a batch": lambda: fold(inp(0, 300, 12), "var", 0, correction=0),
    "variance of two in the middle": lambda: fold(pointwise("exp", inp(0, 2, 5, 7, 9)), "var", 1, 2, correction=2),
    "variance of positions": lambda: pointwise("rsqrt", fold(ODD, "var", 2, 3)),
    "deviation of tall columns": lambda: fold(inp(0, 1500, 8), "std", 0),
    "deviation of long rows": lambda: fold(inp(0, 2, 20_003), "std", 1, correction=0.5),
    "deviation in bfloat16": lambda: fold(inp(0, 70, 3, 5, 16, dtype=BF16), "std", 0),
    "deviation of rows in bfloat16": lambda: fold(inp(0, 5, 3, 6, 6, dtype=BF16), "std", 2, 3),
    "variance of many rows in float16": lambda: fold(inp(0, 5000, 12, dtype=F16), "var", 0),
    "rows of eight bytes": lambda: pointwise("add", inp(0, 2, 3, 6, 6, dtype=BF16), inp(1, 3, 1, 1, dtype=BF16)),
    "wide parameters of narrow rows": lambda: pointwise("mul", inp(0, 40, 48, dtype=BF16), inp(1, 48)),
    "odd rows, a number each": lambda: pointwise("mul", ROWS, inp(1, 5, 1, 1)),
    "odd rows, numbers of channels and samples": lambda: pointwise(
        "add", pointwise("mul", pointwise("add", ROWS, pointwise("tanh", ROWS)), inp(1, 5, 1, 1)), inp(2, 3, 1, 1, 1)
    ),
    "odd rows in bfloat16": lambda: pointwise("sub", inp(0, 2, 3, 5, 7, dtype=BF16), inp(1, 3, 1, 1)),
    "odd rows, another of them": lambda: pointwise("mul", pointwise("add", ROWS, inp(2, 3, 5, 3, 9)), inp(1, 5, 1, 1)),
    "rows of few halves": lambda: pointwise("mul", inp(0, 4, 3, 2, 5, dtype=F16), inp(1, 3, 1, 1, dtype=F16)),
    "variance of few": lambda: fold(inp(0, 2, 3, 40), "var", 0, correction=3),
    "deviation, then mean": lambda: fold(fold(inp(0, 4, 6, 40), "std", 0, correction=0), "mean", 1),
    "long rows' mean, then deviation": lambda: fold(fold(inp(0, 2, 30, 900), "mean", 2), "std", 1),
    "min of channels, many": lambda: fold(inp(0, 2, 67, 3, 4), "min", 1),
    "depth only": lambda: fold(inp(0, 2, 3, 5, 4, 4), "mean", 2),
    "last only": lambda: fold(inp(0, 3, 4, 5, 33), "logsumexp", 3),
    "batch": lambda: fold(inp(0, 300, 12), "sum", 0),
    "long rows": lambda: fold(pointwise("square", inp(0, 2, 20_003)), "mean", 1),
    "long aligned rows": lambda: fold(inp(0, 1, 40_000), "logsumexp", 1),
    "middling rows": lambda: fold(inp(0, 300, 260), "sum", 1),
    "tall columns": lambda: fold(inp(0, 1500, 8), "max", 0),
    "pool, sigmoid, sum": lambda: fold(pointwise("sigmoid", pool(X, "avg", (4, 4))), "sum", 1, 2, 3),
    "pool, mean, bias": lambda: pointwise("add", fold(pool(X, "max", (2, 2)), "mean", 2, 3), inp(1, 3)),
    "div, pool, mean, bias, sum": lambda: fold(
        pointwise(
            "add", fold(pool(pointwise("div", X, 2.0), "max", (2, 2)), "mean", 2, 3, keepdim=True), inp(1, 3, 1, 1)
        ),
        "sum",
        1,
    ),
    "mean, bias, logsumexp, times": lambda: pointwise(
        "mul", fold(pointwise("add", fold(ODD, "mean", 2, 3), inp(1, 3)), "logsumexp", 1, keepdim=True), 10.0
    ),
    "channels, then positions": lambda: fold(pointwise("relu", fold(X, "logsumexp", 1)), "max", 1, 2),
    "channels, bias along the last": lambda: pointwise("sub", fold(X, "sum", 1), inp(1, 12)),
    "long rows, then sum": lambda: fold(pointwise("exp", fold(inp(0, 2, 3, 9000), "mean", 2)), "sum", 1),
    "two of many": lambda: fold(fold(inp(0, 2, 300, 5), "max", 2), "sum", 1),
    "pool, channels": lambda: fold(pool(inp(0, 2, 5, 8, 8), "max", (3, 3), 2, 1), "sum", 1),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.sampled
def test_value(name: str) -> None:
    check(CHAINS[name](), order=("forward", "reverse", "shuffled")[zlib.crc32(name.encode()) % 3])


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
@pytest.mark.parametrize("name", ["flat", "pooled", "rows", "columns", "mixed"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    x = inp(0, 2, 6, 8, 16, dtype=dtype)
    bias = inp(1, 6, 1, 1, dtype=dtype)
    roots = {
        "flat": lambda: pointwise("silu", pointwise("add", x, bias)),
        "pooled": lambda: pointwise("mul", pool(pointwise("add", x, bias), "avg", (3, 3), 2, 1), 0.25),
        "rows": lambda: fold(pool(x, "max", (2, 2)), "mean", 2, 3),
        "columns": lambda: fold(pointwise("tanh", x), "logsumexp", 1),
        "mixed": lambda: pointwise("add", cast(x, F32), inp(1, 8, 16, dtype=F32)),
    }
    check(roots[name](), order="shuffled")


# Windows that share rows, over a last axis that 16-byte loads do not fit: values on each other per thread.
Y = inp(0, 2, 3, 17, 13)
TALL: dict[str, Callable[[], Node]] = {
    "max 3 s1": lambda: pool(Y, "max", (3, 3), 1),
    "max 6 s3": lambda: pool(Y, "max", (6, 6), 3),
    "min 3 s2 p1": lambda: pool(Y, "min", (3, 3), 2, 1),
    "max 8x2": lambda: pool(Y, "max", (8, 2), 2),
    "max 5 s2 p2, ceil": lambda: pool(Y, "max", (5, 5), 2, 2, ceil_mode=True),
    "max dilated along the last": lambda: make(ops.Pool("max", (3, 3), (1, 2), (0, 0), (1, 2)), Y),
    "avg 4 s1": lambda: pool(Y, "avg", (4, 4), 1),
    "avg 3 s2 p1": lambda: pool(Y, "avg", (3, 3), 2, 1),
    "avg 3 s2 p1 without padding": lambda: pool(Y, "avg", (3, 3), 2, 1, count_include_pad=False),
    "avg 4 s3 p2, ceil, without padding": lambda: pool(Y, "avg", (4, 4), 3, 2, ceil_mode=True, count_include_pad=False),
    "avg divisor": lambda: pool(Y, "avg", (3, 3), 1, divisor=4),
    "few rows": lambda: pool(inp(0, 2, 3, 6, 13), "max", (4, 3), 1),
    "3-d along d": lambda: make(ops.Pool("avg", (5, 2, 2), (1, 2, 2), (1, 0, 0), (1,) * 3), inp(0, 2, 3, 9, 5, 7)),
    "3-d along h": lambda: make(ops.Pool("max", (2, 5, 2), (2, 1, 2), (0,) * 3, (1,) * 3), inp(0, 1, 2, 4, 9, 7)),
    "trees": lambda: pointwise(
        "mul",
        pointwise(
            "add", pool(pointwise("tanh", pointwise("mul", Y, inp(1, 3, 1, 1))), "max", (3, 3), 1), inp(2, 15, 1)
        ),
        inp(3, 2, 3, 15, 11),
    ),
    "channels": lambda: fold(pool(inp(0, 2, 9, 14, 7), "max", (4, 3), 1), "sum", 1),
    "channels, many": lambda: pointwise(
        "sub", fold(pointwise("tanh", pool(inp(0, 1, 70, 9, 5), "avg", (3, 1), 1)), "logsumexp", 1), inp(1, 7, 5)
    ),
    "sum of rows": lambda: fold(pool(Y, "max", (3, 3), 1), "sum", 2, 3),
    "mean of everything": lambda: fold(pointwise("exp", pool(Y, "avg", (4, 3), 1)), "mean", 1, 2, 3),
    "max of rows": lambda: fold(pool(Y, "min", (3, 3), 2), "max", 2, 3),
    "min of rows": lambda: pointwise("mul", fold(pool(Y, "max", (5, 3), 2, 1), "min", 2, 3), inp(1, 3)),
    "logsumexp of rows, sum": lambda: fold(fold(pool(Y, "max", (4, 4), 1), "logsumexp", 2, 3), "sum", 1),
    "norm of rows": lambda: fold(pool(Y, "avg", (4, 4), 1), "norm", 2, 3),
    "sum in parts": lambda: fold(pool(inp(0, 2, 1, 102, 53), "max", (3, 3), 1), "sum", 1, 2, 3),
    "fp16": lambda: pool(inp(0, 2, 3, 17, 13, dtype=F16), "avg", (4, 4), 1),
    "bf16": lambda: fold(pool(inp(0, 2, 5, 17, 13, dtype=BF16), "max", (4, 4), 1), "mean", 1),
    "float64": lambda: pool(inp(0, 2, 3, 17, 13, dtype=F64), "avg", (3, 3), 1),
}


@pytest.mark.parametrize("name", TALL)
@pytest.mark.sampled
def test_values_on_each_other(name: str) -> None:
    k = check(TALL[name](), order=("forward", "reverse", "shuffled")[zlib.crc32(name.encode()) % 3])
    assert "tall(d, out);" in k.source or "tall(d, scratch, parts);" in k.source


def test_values_on_each_other_of_other_sizes() -> None:
    """Sizes are arguments: also where there are fewer values than a thread has, or 16-byte loads fit after all."""
    k = kernel(stream_of(pool(Y, "max", (3, 3), 1)), "fused_test")
    for shape in ((2, 3, 3, 5), (1, 2, 4, 9), (2, 1, 5, 6), (1, 3, 40, 18), (0, 3, 9, 9)):
        x = torch.randn(shape)
        torch.testing.assert_close(emulate(k, x), torch.nn.functional.max_pool2d(x, 3, 1), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["kept rows", "no overlap", "large", "dilated", "in parts", "variance"])
def test_not_on_each_other(name: str) -> None:
    roots = {
        "kept rows": lambda: fold(pool(Y, "max", (3, 3), 1), "sum", 3),
        "no overlap": lambda: pool(Y, "max", (3, 3), 3),
        "large": lambda: pool(inp(0, 1, 1, 60, 61), "avg", (20, 20), 1),
        "dilated": lambda: pool(Y, "max", (3, 3), 1, dilation=2),
        "in parts": lambda: fold(pool(inp(0, 1, 600, 6, 5), "max", (3, 3), 1), "sum", 1),
        "variance": lambda: fold(pool(Y, "max", (3, 3), 1), "var", 2, 3),  # nobody's value would vary
    }
    assert "tall" not in check(roots[name]()).source


SPECIAL = {
    "tall max pool": lambda: pool(Y, "max", (3, 3), 1),
    "tall avg pool": lambda: pool(Y, "avg", (3, 3), 2, 1),
    "flat": lambda: pointwise("relu", X),
    "clamp": lambda: pointwise("clamp", X, params=(-1.0, 1.0)),
    "max pool": lambda: pool(X, "max", (3, 3), 2, 1),
    "min pool": lambda: pool(X, "min", (2, 2)),
    "avg pool": lambda: pool(X, "avg", (2, 2)),
    "max": lambda: fold(X, "max", 2, 3),
    "min of channels": lambda: fold(X, "min", 1),
    "sum": lambda: fold(X, "sum", 1, 2, 3),
    "mean": lambda: fold(X, "mean", 3),
    "norm": lambda: fold(X, "norm", 2, 3),
    "logsumexp": lambda: fold(X, "logsumexp", 2, 3),
    "logsumexp of channels": lambda: fold(X, "logsumexp", 1),
    "mean, then max": lambda: fold(fold(X, "mean", 2, 3), "max", 1),
    "long": lambda: fold(fold(inp(0, 2, 3, 9000), "logsumexp", 2), "logsumexp", 1),
    "variance of channels": lambda: fold(X, "var", 1),
    "deviation of tall columns": lambda: fold(inp(0, 1500, 8), "std", 0),
}


@pytest.mark.parametrize("value", [nan, inf, -inf, "both", "all -inf"], ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str, value: float | str) -> None:
    root = SPECIAL[name]()
    (x,) = stream_of(root).tensors
    t = random(x, 3)
    flat = t.view(-1)
    if isinstance(value, float):
        flat[5], flat[-40] = value, value
    elif value == "both":
        flat[5], flat[6], flat[-40], flat[-41] = inf, -inf, nan, inf
    else:
        t[0] = -inf
    check(root, {x: t})


def test_a_negative_row_of_infinities_is_minus_infinity() -> None:
    root = fold(inp(0, 2, 64), "logsumexp", 1)
    k = kernel(stream_of(root), "fused_test")
    assert emulate(k, torch.full((2, 64), -inf)).tolist() == [-inf, -inf]


OWN = {
    **dict.fromkeys(("mish", "log_sigmoid", "selu", "atan", "sin", "cos"), ()),
    **{"softplus": (1.0, 20.0), "celu": (0.7,)},
}


@pytest.mark.parametrize("fn", OWN)
def test_functions_of_its_own(fn: str) -> None:
    """Of ordinary numbers, and of such that a sine takes another way to."""
    root, x = pointwise(fn, X, params=OWN[fn]), random(X, 5)
    assert "__device__ __forceinline__ float" in check(root, {X: x * 4}).source.split("// Elements of")[1]
    check(root, {X: x * 1e6})


ODDITIES = (nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 0.5, 0.25, -2.5, 7.0, 1e-3, 20.0)
OF_LIBRARIES = {
    **dict.fromkeys(("tan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "sinc"), 1),
    **dict.fromkeys(("logit", "entr"), 1),
    **dict.fromkeys(("fmax", "fmin", "at_least", "at_most", "atan2", "hypot", "copysign", "fmod", "remainder"), 2),
    **dict.fromkeys(("floor_divide", "trunc_divide", "power", "logaddexp", "heaviside"), 2),
    **dict.fromkeys(("between", "lerp"), 3),
}


def odd_operands(count: int, dtype: torch.dtype) -> dict[Node, Tensor]:
    """All combinations of numbers and of what is none."""
    columns = torch.tensor(list(product(ODDITIES, repeat=count)), dtype=dtype).unbind(1)
    noise = 3 * torch.randn(count, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    values = [torch.cat([c, n]) for c, n in zip(columns, noise, strict=True)]
    return {inp(i, len(v), dtype=dtype): v for i, v in enumerate(values)}


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("fn", OF_LIBRARIES)
@pytest.mark.sampled
def test_functions_of_libraries(fn: str, dtype: torch.dtype) -> None:
    """What each comes to is near what eager has in float64, and NaN or an infinity where that is."""
    given = odd_operands(OF_LIBRARIES[fn], dtype)
    root = pointwise(fn, *given)
    got = emulate(kernel(stream_of(root), "fused_test"), *given.values())
    precision = 16 * torch.finfo(dtype).eps
    want = reference(root, given).to(dtype)
    if fn == "trunc_divide":  # a quotient rounded to a whole number is one
        want = torch.trunc(torch.div(*(v if dtype == F64 else v.float() for v in given.values()))).to(dtype)
    torch.testing.assert_close(got, want, rtol=precision, atol=precision, equal_nan=True)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dims", [(3,), (1,), (1, 2, 3)], ids=str)
def test_truths_of_rows(kind: str, dims: tuple[int, ...]) -> None:
    """Whether any of them, or all, are true, as numbers."""
    limit = 1.5 if kind == "max" else -1.5
    check(cast(fold(pointwise("gt", X, limit), kind, *dims), F32))


@pytest.mark.parametrize("decimals", [2, 0, -1])
def test_rounding_to_decimals(decimals: int) -> None:
    root, x = pointwise("round_to", X, params=(decimals,)), random(X, 6) * 100
    torch.testing.assert_close(emulate(kernel(stream_of(root), "fused_test"), x), torch.round(x, decimals=decimals))


def test_a_known_divisor_is_a_factor() -> None:
    assert " * 0.3333333432674408f;" in check(pointwise("div", X, 3.0)).source


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_quotient_that_is_a_step_is_one(dtype: torch.dtype) -> None:
    """41 * (1 / 41) is less than one in float32, which eager's rounding to the narrower type undoes."""
    x = torch.full((4, 16), 41.0, dtype=dtype)
    quotient = pointwise("div", inp(0, 4, 16, dtype=dtype), 41.0)
    at_least_one = pointwise("where", pointwise("ge", quotient, 1.0), quotient, 0.0)
    for root in (pointwise("floor", quotient), pointwise("add", quotient, pointwise("floor", quotient)), at_least_one):
        got = emulate(kernel(stream_of(root), "fused_test"), x)
        torch.testing.assert_close(got, reference(root, {graph_of(root).inputs[0]: x}).to(dtype), rtol=0, atol=0)


def test_sums_are_wide() -> None:
    """A large mean: float32 additions one after another would lose five digits."""
    root = fold(inp(0, 1, 60_000), "sum", 1)
    t = torch.rand(1, 60_000, generator=torch.Generator().manual_seed(1)) + 1000
    got = emulate(kernel(stream_of(root), "fused_test"), t)
    assert abs(got.double() - t.double().sum()) <= t.double().sum() * torch.finfo(F32).eps


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
@pytest.mark.parametrize("dim", [0, 1])
def test_variances_lose_nothing_to_large_means(dim: int, order: str) -> None:
    """Nor to a first value that is far from all others; in any order the same."""
    k = kernel(stream_of(fold(inp(0, 1500, 8) if dim == 0 else inp(0, 2, 9000), "var", dim)), "fused_test")
    assert len(k.launches) == 2
    x = torch.randn(1500 if dim == 0 else 8, 8 if dim == 0 else 1500, generator=torch.Generator().manual_seed(1)) + 1e4
    far = x.clone()
    far.select(dim, 0).fill_(-1e6)
    for t in (x, far):
        got = emulate(k, t, order=order)
        torch.testing.assert_close(got, t.double().var(dim).float(), rtol=2e-7, atol=0)
        torch.testing.assert_close(got, emulate(k, t), rtol=0, atol=0)


@pytest.mark.parametrize("correction", [0, 1, 2, 0.5])
@pytest.mark.parametrize("dim", [0, 1])
def test_variances_of_few(dim: int, correction: float) -> None:
    """Of one and two values, as eager has them; of none no kernel is asked for."""
    k = kernel(stream_of(fold(inp(0, 6, 7), "std", dim, correction=correction)), "fused_test")
    for n in (1, 2, 3):
        x = torch.randn((n, 5) if dim == 0 else (5, n), generator=torch.Generator().manual_seed(n))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # eager's, about degrees of freedom
            want = x.double().std(dim, correction=correction).float()
        torch.testing.assert_close(emulate(k, x), want, equal_nan=True, rtol=2e-7, atol=0)


def test_one_kernel_serves_other_sizes() -> None:
    """Sizes are arguments: aligned or not, more parts or fewer."""

    def build(*shape: int) -> Node:
        pooled = pool(pointwise("relu", inp(0, *shape)), "max", (2, 2))
        return pointwise("add", fold(pooled, "mean", 2, 3), inp(1, shape[1]))

    k = kernel(stream_of(build(2, 3, 8, 16)), "fused_test")
    for shape in ((1, 3, 8, 16), (5, 4, 9, 7), (3, 1, 40, 64), (2, 7, 2, 2)):
        root = build(*shape)
        s = stream_of(root)
        given = {n: random(n, i) for i, n in enumerate(s.tensors)}
        got = emulate(k, *(given[n] for n in s.tensors))
        torch.testing.assert_close(got.double(), reference(root, given), rtol=1e-5, atol=1e-6)


def test_operands_are_described() -> None:
    """What the launcher checks a call against: a bias of size 1 stays one, the rest may be of any size."""
    root = pointwise("mul", pointwise("add", X, inp(1, 3, 1, 1)), inp(2, 2, 3, 8, 12, dtype=BF16))
    k = kernel(stream_of(root), "fused_test")
    whole = ("s0", "s1", "s2", "s3")
    assert sorted(k.shapes) == sorted([whole, ("s1", "1", "1"), whole])
    assert sorted(map(str, k.dtypes)) == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert all(
        f"aligned({name})" in k.source for name, shape in zip(k.operands, k.shapes, strict=True) if shape == whole
    )


@pytest.mark.parametrize(
    ("root", "values"),
    [
        (pointwise("add", inp(0, 2, 3, 6, 6, dtype=BF16), inp(1, 3, 1, 1, dtype=BF16)), 4),
        (pointwise("add", inp(0, 2, 3, 4, 6, dtype=BF16), inp(1, 3, 1, 1, dtype=BF16)), 8),
        (fold(inp(0, 2, 3, 7, 2, dtype=BF16), "var", 2, 3), 2),
        (pointwise("mul", inp(0, 40, 48, dtype=BF16), inp(1, 48)), 8),
        (pointwise("mul", inp(0, 40, 48, dtype=BF16), inp(1, 40, 48)), 4),
        (pointwise("relu", inp(0, 3, 5, 7)), 4),
    ],
)
def test_loads_are_as_wide_as_rows_allow(root: Node, values: int) -> None:
    """Rows of 36 elements of two bytes have no whole number of 16-byte loads; what is read once for all rows counts for
    less than they do."""
    k = kernel(stream_of(root), "fused_test")
    assert f"VALUES = WIDE ? {values} : 1;" in k.source


@pytest.mark.parametrize("name", [n for n in CHAINS if n.startswith(("odd rows", "rows of few halves"))])
def test_vectors_of_two_rows(name: str) -> None:
    """Rows of no whole number of vectors: of two, or of so few that each is one's."""
    root = CHAINS[name]()
    s = stream_of(root)
    k = kernel(s, "fused_test")
    assert "straddled(d, out);" in k.source
    given = {n: random(n, i) for i, n in enumerate(s.tensors)}
    got = emulate(k, *(given[n] for n in s.tensors), sanitize=True)
    rtol = {BF16: 8e-3, F16: 1e-3}.get(root.dtype, 1e-5)
    torch.testing.assert_close(got.double(), reference(root, given), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
    "root",
    [
        pointwise("mul", inp(0, 2, 3, 6, 6), inp(1, 3, 1, 1)),
        pointwise("mul", inp(0, 2, 3, 5, 7), inp(1, 7)),
        pointwise("mul", inp(0, 2, 30, 3), inp(1, 30, 1)),
        pointwise("relu", inp(0, 3, 5, 7)),
        fold(inp(0, 2, 3, 5, 7), "sum", 3),
    ],
)
def test_other_rows_are_of_whole_vectors_or_of_none(root: Node) -> None:
    assert "straddled" not in kernel(stream_of(root), "fused_test").source


def test_parts_of_columns_are_fewer_bytes_than_what_is_read() -> None:
    """A variance takes four numbers of eight bytes for each part of a column, here of 8192 elements of two bytes."""
    k = kernel(stream_of(fold(inp(0, 8192, 4096, dtype=BF16), "var", 0)), "fused_test")
    (scratch,) = k.scratch
    saved = prod(evaluate(n, {"s0": 8192, "s1": 4096}) for n in scratch.shape) * scratch.dtype.itemsize
    assert 0 < saved <= 8192 * 4096 * 2 // 8


@pytest.mark.parametrize(
    "name", ["max 3 s2 p1", "avg ceil without padding", "residual", "long rows, then sum", "batch"]
)
def test_nothing_is_read_or_written_outside(name: str) -> None:
    s = stream_of(CHAINS[name]())
    emulate(kernel(s, "fused_test"), *(random(n, i) for i, n in enumerate(s.tensors)), order="reverse", sanitize=True)


REFUSED: dict[str, Callable[[], Node]] = {
    "no stage": lambda: make(ops.Reshape((6, 96)), X),
    "no reduction": lambda: fold(X, "prod", 1),
    "not neighbours": lambda: fold(X, "sum", 0, 2),
    "computed with in": lambda: pointwise("floor", inp(0, 4, dtype=torch.int64)),
    "one number": lambda: pointwise("relu", inp(0)),
    "last dimensions": lambda: fold(fold(X, "sum", 3), "max", 0),
    "took away": lambda: fold(fold(X, "sum", 2, 3, keepdim=True), "max", 2, 3, keepdim=True),
    "many to reduce again": lambda: fold(fold(inp(0, 4, 131, 2**15 + 1), "std", 0), "mean", 1),
}


@pytest.mark.parametrize("phrase", REFUSED)
def test_refusals(phrase: str) -> None:
    root = REFUSED[phrase]()
    inner = parse(root, graph_of(root).users())
    if isinstance(inner, Stream):  # a shorter stream: what is refused is read from memory
        assert phrase in ("last dimensions", "took away", "many to reduce again") and len(inner.folds) == 1
    else:
        assert phrase in inner


def test_what_a_block_reduces_again() -> None:
    """Rows that are short, or as many as keep a device busy, or that nobody knows the number of."""
    some, batch = 2**15, sympy.Symbol("B", integer=True, positive=True)
    for rows, results in ((1, some), (132, some + 1), (batch, some + 1)):
        x = make(ops.Input((4, rows, results), F32, CPU, "x", 0))
        assert len(stream_of(fold(fold(x, "std", 0), "mean", 1)).folds) == 2


def test_what_others_use_is_read_from_memory() -> None:
    pooled = pool(pointwise("tanh", X), "max", (2, 2))
    root = pointwise("relu", fold(pooled, "sum", 2, 3))
    users = Graph((X,), (root, pooled)).users()
    found = parse(root, users)
    assert isinstance(found, Stream) and found.tensors == (pooled,) and found.window is None
    alone = parse(root, graph_of(root).users())
    assert isinstance(alone, Stream) and alone.tensors == (X,) and alone.window is not None


def test_more_elements_than_32_bits_count() -> None:
    """Sizes are those of the call; a thread's index goes some way beyond the last element."""
    x, bias = torch.zeros(()).expand(3000, 3, 512, 512), torch.zeros(3, 1, 1)
    for root in (pointwise("add", inp(0, 8, 3, 512, 512), inp(1, 3, 1, 1)), fold(inp(0, 8, 3, 512, 512), "sum", 1)):
        k = kernel(stream_of(root), "fused_test")
        with pytest.raises(CountError, match=r"counts . \* s0 .* in 32 bits"):
            Launcher(k, FakeDriver())(*(x, bias)[: len(k.operands)])


COMPILED = [
    "before and after",
    "avg ceil without padding",
    "div, pool, mean, bias, sum",
    "channels, then positions",
    "3-d",
    "avg 4 s3 p2, ceil, without padding",
    "channels, many",
    "deviation of tall columns",
    "deviation in bfloat16",
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles(arch: str) -> None:
    core = pytest.importorskip("cuda.core", reason="no NVRTC")
    for name in COMPILED:
        k = kernel(stream_of((CHAINS | TALL)[name]()), "fused_test")
        core.Program(k.source, "c++", core.ProgramOptions(arch=arch, std="c++17")).compile("cubin")


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_shared_memory_of_windows_on_each_other(dtype: torch.dtype) -> None:
    """What threads of one column join fits beside the same of the wide variant."""
    core = pytest.importorskip("cuda.core", reason="no NVRTC")
    k = kernel(stream_of(fold(pool(inp(0, 2, 128, 32, 32, dtype=dtype), "max", (3, 3), 1, 1), "var", 1)), "fused_test")
    assert "tall(d, " in k.source and "others[" in k.source
    core.Program(k.source, "c++", core.ProgramOptions(arch="sm_90", std="c++17")).compile("cubin")


def founding_tail() -> Node:
    """What follows a library convolution: average pool, sigmoid, sum."""
    return fold(pointwise("sigmoid", pool(inp(0, 128, 64, 124, 124), "avg", (4, 4))), "sum", 1, 2, 3)


def epilogue() -> Node:
    x, bias, rest = inp(0, 16, 64, 56, 56, dtype=BF16), inp(1, 64, 1, 1, dtype=BF16), inp(2, 16, 64, 56, 56, dtype=BF16)
    return pointwise("relu", pointwise("add", pointwise("add", x, bias), rest))


def overlapping() -> Node:
    """A stem's pool, over rows that no 16-byte load begins with, and channels behind it."""
    return fold(pool(inp(0, 32, 64, 113, 113), "max", (3, 3), 2), "mean", 1)


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("stream_avg_sigmoid_sum", founding_tail),
        ("stream_add_relu", epilogue),
        ("stream_max_mean", overlapping),
    ],
)
def test_golden(name: str, root: Callable[[], Node]) -> None:
    text = kernel(stream_of(root()), f"fused_{name.removeprefix('stream_')}").source
    assert text == (GOLDEN / f"{name}.cu").read_text()


@pytest.mark.parametrize("rows, length", [(40, 4096), (2, 32768)], ids=["a thread each", "a warp each"])
def test_results_of_a_batch_are_joined_and_reduced(rows: int, length: int) -> None:
    """Of as many as a call has: the text is for eight, whose parts warps would join."""
    batch = sympy.Symbol("B", integer=True, positive=True)
    x = make(ops.Input((batch, length), F32, CPU, "x", 0))
    made = kernel(stream_of(fold(fold(x, "logsumexp", 1), "sum", 0)), "fused_test")
    assert "JOINERS = 32" in made.source and "2 * columns >= parts" in made.source
    given = torch.randn(rows, length, generator=torch.Generator().manual_seed(rows))
    want = given.double().logsumexp(1).sum()
    torch.testing.assert_close(emulate(made, given).double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [4096, 700, 20, 1])
@pytest.mark.parametrize("kind", ["mean", "max", "argmax"])
def test_many_parts_of_columns_are_joined_by_many_blocks(rows: int, kind: str) -> None:
    """In a launch between the two others, for which nothing is left where there is one part."""
    batch = sympy.Symbol("B", integer=True, positive=True)
    x = make(ops.Input((batch, 1024), F32, CPU, "x", 0))
    made = kernel(stream_of(fold(fold(x, "var", 0, correction=0), kind, 0)), "fused_test")
    assert [launch.entry for launch in made.launches] == ["fused_test", "fused_test_join", "fused_test_finish"]
    given = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(rows))
    var = given.double().var(0, correction=0)
    for order in ORDERS:
        got = emulate(made, given, order=order)
        want = getattr(var, {"max": "amax"}.get(kind, kind))(0)
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=1e-12)
