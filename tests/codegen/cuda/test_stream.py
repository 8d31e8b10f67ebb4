"""Streams: the generated CUDA C++ runs on the CPU, and is compared with the same graph in float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulation.emulate import emulate
from torch import Tensor

from fusewright.codegen.aten import lower
from fusewright.codegen.cuda.stream import kernel
from fusewright.codegen.kernel import Kernel
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule.stream import Stream, parse

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


def fold(x: Node, kind: str, *dims: int, keepdim: bool = False) -> Node:
    return make(ops.Reduce(kind, dims, keepdim), x)


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
    wide = [tensors[i].double() for i in graph.inputs]
    forward = lower(graph).functions()[1]
    result: Tensor = forward(None, *wide)[0]
    return result.double()


def random(node: Node, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
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
def test_value(name: str) -> None:
    check(CHAINS[name](), order=("forward", "reverse", "shuffled")[zlib.crc32(name.encode()) % 3])
