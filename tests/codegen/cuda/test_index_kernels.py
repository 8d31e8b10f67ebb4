"""Where the greatest and the least are, by streams: the CUDA C++ runs on the CPU, and finds what eager finds."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import inf, nan

import pytest
import sympy
import torch
from codegen.cuda.test_stream_kernels import (
    BF16,
    CPU,
    F16,
    F32,
    F64,
    GOLDEN,
    cast,
    fold,
    graph_of,
    inp,
    pointwise,
    pool,
    random,
    stream_of,
)
from emulation.emulate import ORDERS, emulate
from torch import Tensor

from fusewright.codegen.aten import lower
from fusewright.codegen.cuda.stream import kernel
from fusewright.errors import GraphError
from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.stream import parse

X, ODD = inp(0, 2, 3, 8, 12), inp(0, 2, 3, 7, 13)
HALF = {"bfloat16": BF16, "float16": F16}


def chain(x: Node) -> Node:
    """What eager rounds several times on the way: many values are alike then, though not in float32."""
    return pointwise("sub", pointwise("mul", pointwise("add", x, 100.0), 0.7), 1.125)


def distances(points: Node, codes: Node) -> Node:
    """Of each point to each code."""
    return fold(pointwise("square", pointwise("sub", points, codes)), "sum", 2)


CASES: dict[str, Callable[[], Node]] = {
    "rows": lambda: fold(inp(0, 5, 300), "argmax", 1),
    "odd rows": lambda: fold(inp(0, 9, 131), "argmin", 1),
    "short rows": lambda: fold(inp(0, 40, 12), "argmax", 1, keepdim=True),
    "a row of one": lambda: fold(inp(0, 40, 1), "argmax", 1),
    "rows of a warp": lambda: fold(inp(0, 300, 260), "argmin", 1),
    "rows of a block": lambda: fold(inp(0, 300, 5000), "argmin", 1),
    "long rows, in parts": lambda: fold(inp(0, 2, 20_003), "argmax", 1),
    "long aligned rows, in parts": lambda: fold(inp(0, 1, 40_000), "argmin", 1),
    "columns": lambda: fold(inp(0, 9, 64), "argmax", 0),
    "odd columns": lambda: fold(inp(0, 4, 33, 10), "argmin", 1, keepdim=True),
    "many columns": lambda: fold(inp(0, 3, 20, 70, 64), "argmax", 1),
    "tall columns, in parts": lambda: fold(inp(0, 1500, 8), "argmax", 0),
    "tall odd columns, in parts": lambda: fold(inp(0, 2, 1500, 7), "argmin", 1),
    "channels and positions": lambda: fold(ODD, "argmax", 1, 2, 3),
    "batch and channels": lambda: fold(X, "argmin", 0, 1),
    "all": lambda: fold(X, "argmax", 0, 1, 2, 3),
    "all, in parts": lambda: fold(inp(0, 3, 5000), "argmin", 0, 1, keepdim=True),
    "functions ahead": lambda: fold(pointwise("mul", pointwise("relu", inp(0, 6, 70, 20)), 2.0), "argmax", 1),
    "operands": lambda: fold(pointwise("maximum", X, inp(1, 3, 1, 1)), "argmin", 3),
    "two operands, broadcast": lambda: fold(pointwise("sub", inp(0, 5, 1, 12), inp(1, 7, 12)), "argmax", 1),
    "of a pool": lambda: fold(pool(X, "max", (2, 2)), "argmax", 1),
    "of a pool's rows": lambda: fold(pool(ODD, "max", (3, 3), 1), "argmin", 2, 3),
    "of an overlapping pool's columns": lambda: fold(pool(inp(0, 2, 9, 14, 7), "max", (4, 3), 1), "argmax", 1),
    "of sums": lambda: fold(distances(inp(0, 9, 1, 12), inp(1, 7, 12)), "argmin", 1),
    "of long rows' maxima": lambda: fold(fold(inp(0, 2, 30, 900), "max", 2), "argmin", 1),
    "of all columns' minima": lambda: fold(fold(inp(0, 1500, 8), "min", 0), "argmax", 0),
    "of two of many": lambda: fold(fold(inp(0, 2, 300, 5), "max", 2), "argmax", 1),
    "bfloat16": lambda: fold(inp(0, 6, 320, dtype=BF16), "argmax", 1),
    "bfloat16 columns": lambda: fold(pointwise("abs", inp(0, 320, 24, dtype=BF16)), "argmin", 0),
    "float16": lambda: fold(inp(0, 2, 20_000, dtype=F16), "argmin", 1),
    "float64": lambda: fold(inp(0, 6, 320, dtype=F64), "argmax", 1),
    "float64 columns, in parts": lambda: fold(pointwise("neg", inp(0, 1500, 8, dtype=F64)), "argmax", 0),
}


TWICE = ("of sums", "of long rows' maxima", "of all columns' minima", "of two of many")


def eager(root: Node, given: dict[Node, Tensor]) -> Tensor:
    """What ATen's operations give, in the types that these have."""
    graph = graph_of(root)
    result: Tensor = lower(graph).functions()[1](None, *map(given.__getitem__, graph.inputs))[0]
    return result


def check(root: Node, given: dict[Node, Tensor], *orders: str) -> Kernel:
    s = stream_of(root)
    made, want = kernel(s, "fused_test"), eager(root, given)
    for order in orders or ORDERS:
        got = emulate(made, *(given[n] for n in s.tensors), order=order)
        assert got.dtype == root.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    return made


def few(node: Node, seed: int) -> Tensor:
    """Whole numbers, of which most are there several times."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, node.shape, generator=generator).to(node.dtype)


@pytest.mark.parametrize("values", [random, few])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_value(name: str, values: Callable[[Node, int], Tensor]) -> None:
    root = CASES[name]()
    given = {n: values(n, i) for i, n in enumerate(stream_of(root).tensors)}
    made = check(root, given, ORDERS[zlib.crc32(f"{name} {values}".encode()) % 3])
    assert len(stream_of(root).folds) == (2 if name in TWICE else 1)
    assert len(made.launches) == (2 if name in TWICE or "in parts" in name or name == "float16" else 1)


SPECIAL = (
    "rows",
    "long rows, in parts",
    "odd columns",
    "tall columns, in parts",
    "all",
    "of long rows' maxima",
    "float16",
)


@pytest.mark.parametrize("value", [nan, inf, -inf, "both", "none", "alike", "zeros"], ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str, value: float | str) -> None:
    """A NaN is the extreme, the first of several; where all are the infinity that a fold begins with, the first is."""
    root = CASES[name]()
    (x,) = stream_of(root).tensors
    t = random(x, 3)
    flat = t.view(-1)
    if isinstance(value, float):
        flat[5], flat[8], flat[-40], flat[-38] = (value,) * 4
    elif value == "both":
        flat[5], flat[6], flat[-40], flat[-41] = inf, -inf, nan, inf
    elif value == "zeros":
        flat.zero_()
        flat[1::2] = -0.0
    else:
        flat.fill_({"none": (-inf, inf)[root.op.kind == "argmin"], "alike": 2.0}[value])  # type: ignore[attr-defined]
    check(root, {x: t})


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", [0, 1])
def test_halves_are_compared_as_eager_has_them(dim: int, dtype: str) -> None:
    """What is rounded on the way may be alike; in float32 another would be the greatest."""
    x = inp(0, 600, 40, dtype=HALF[dtype])
    root = fold(chain(x), "argmax", dim)
    given = {x: random(x, 1)}
    wide = eager(fold(chain(cast(x, F32)), "argmax", dim), given)
    assert bool((wide != eager(root, given)).any())
    assert "widened(narrow_to<" in check(root, given).source


@pytest.mark.parametrize("kind", ["avg", "sum"])
def test_so_are_averages_and_sums_of_halves(kind: str) -> None:
    """They lie in memory, rounded, where eager compares them."""
    x = inp(0, 30, 64, 8, dtype=BF16)
    first = pool(x, "avg", (2,)) if kind == "avg" else fold(x, "sum", 2)
    root = fold(first, "argmax", 1)
    check(root, {x: (4 * random(x, 2)).round()})


def test_one_kernel_serves_other_sizes() -> None:
    k = kernel(stream_of(fold(pointwise("abs", inp(0, 2, 9000)), "argmax", 1)), "fused_test")
    assert len(k.launches) == 2
    for shape in ((1, 4), (3, 1), (5, 77), (1, 60_000), (70, 2048), (0, 9)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))
        assert torch.equal(emulate(k, x), x.abs().argmax(1))


def test_a_batch_that_is_reduced() -> None:
    batch = sympy.Symbol("B", integer=True, positive=True)
    k = kernel(stream_of(fold(make(ops.Input((batch, 12), F32, CPU, "x", 0)), "argmin", 0)), "fused_test")
    for rows in (1, 5, 700):
        x = torch.randn(rows, 12, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(emulate(k, x), x.argmin(0))


@pytest.mark.parametrize("name", ["long rows, in parts", "tall odd columns, in parts", "of sums", "bfloat16 columns"])
def test_sanitizers_find_nothing(name: str) -> None:
    s = stream_of(CASES[name]())
    emulate(kernel(s, "fused_test"), *(random(n, i) for i, n in enumerate(s.tensors)), order="reverse", sanitize=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_without_spills(arch: str) -> None:
    for name in (
        "long rows, in parts",
        "tall columns, in parts",
        "of sums",
        "bfloat16 columns",
        "float64",
    ):
        taken = nvrtc.resources(nvrtc.compile(kernel(stream_of(CASES[name]()), "fused_test").source, arch)).values()
        assert all(r.stack == 0 for r in taken), (name, taken)


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("stream_argmax_rows", lambda: fold(inp(0, 8192, 1024), "argmax", 1)),
        ("stream_argmin_columns", lambda: fold(pointwise("abs", inp(0, 4, 4096, 512, dtype=BF16)), "argmin", 1)),
    ],
)
def test_golden(name: str, root: Callable[[], Node]) -> None:
    text = kernel(stream_of(root()), f"fused_{name.removeprefix('stream_')}").source
    assert text == (GOLDEN / f"{name}.cu").read_text()


def test_refusals() -> None:
    with pytest.raises(GraphError, match="argmax through"):
        fold(X, "argmax", 0, 2)
    index = fold(X, "argmax", 3)
    more = pointwise("add", index, 1)
    assert stream_of(more).tensors == (index,)
    number = cast(index, F32)  # of what has no gradient: a kernel that finds the index is another
    assert stream_of(number).tensors == stream_of(fold(number, "sum", 2)).tensors == (index,)
    for dtype in (torch.int64, torch.int32):  # of which a fold would round what it compares
        numbers = fold(inp(0, 4, 6, dtype=dtype), "argmax", 1)
        assert f"lies in memory as {dtype}" in parse(numbers, graph_of(numbers).users())  # type: ignore[operator]
