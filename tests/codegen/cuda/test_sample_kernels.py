"""Sample programs: the generated CUDA C++ runs on the CPU, and is compared with the same graph in float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import sympy
import torch
from codegen.cuda.closeness import compare
from emulation.emulate import ORDERS, emulate
from torch import Tensor

from fusewright.codegen.aten import lower
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.cuda.sample import PRIMITIVES, block_program, kernel
from fusewright.codegen.sample_values import remap
from fusewright.ir import ops
from fusewright.ir.build import cast, permute, pointwise, reshape
from fusewright.ir.node import Graph, Node, Symbol, make
from fusewright.ir.ops import Size
from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.schedule.sample import SampleProgram, parse

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[2] / "golden"
inf, nan = float("inf"), float("nan")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
B = sympy.Symbol("B", positive=True, integer=True)
BATCH = 5


def inp(index: int, *shape: Size, dtype: torch.dtype = F32) -> Node:
    return make(ops.Input(shape, dtype, CPU, f"x{index}", index))


def full(shape: tuple[Size, ...], value: float, dtype: torch.dtype = F32) -> Node:
    return make(ops.Full(shape, value, dtype, CPU))


def fold(x: Node, kind: str, *dims: int, keepdim: bool = False, correction: float = 1) -> Node:
    return make(ops.Reduce(kind, dims, keepdim, correction), x)  # type: ignore[arg-type]


def softmax(x: Node, dim: int, log: bool = False) -> Node:
    return make(ops.Softmax(dim, log), x)


def linear(x: Node, w: Node, b: Node | None = None) -> Node:
    return make(ops.Matmul(True), x, w, b)


def matmul(x: Node, w: Node, b: Node | None = None) -> Node:
    return make(ops.Matmul(), x, w, b)


def norm(
    x: Node, kind: str, w: Node | None = None, b: Node | None = None, eps: float | None = 1e-5, **more: int
) -> Node:
    return make(ops.Norm(kind, eps, **more), x, w, b, None, None)  # type: ignore[arg-type]


def program(root: Node) -> SampleProgram:
    found = parse(root, Graph((), (root,)).users())
    assert isinstance(found, SampleProgram), found
    return found


def reference(root: Node, tensors: dict[Node, Tensor]) -> Tensor:
    """The graph in float64, on operands that have been rounded to their own dtype."""
    graph = Graph((), (root,))
    inputs = sorted((n for n in graph.nodes() if isinstance(n.op, ops.Input)), key=lambda n: n.op.index)
    batch = next(i for i, n in enumerate(inputs) if n.ndim and n.shape[0] == root.shape[0])
    symbols = {B: Symbol(batch, 0, 1, None)} if root.shape[0] == B else {}
    forward = lower(Graph(tuple(inputs), (root,), symbols=symbols)).functions()[1]
    result: Tensor = forward(None, *(tensors[i].double() for i in inputs))[0]
    return result.double()


def random(node: Node, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = [d if isinstance(d, int) else BATCH for d in node.shape]
    return torch.randn(shape, generator=generator, dtype=F64).to(node.dtype)


def check(root: Node, tensors: dict[Node, Tensor] | None = None, order: str = "forward", ulps: float = 8) -> Kernel:
    p = program(root)
    k = kernel(p, "fused_test")
    given = tensors or {n: random(n, i) for i, n in enumerate(p.leaves)}
    got, want = emulate(k, *(given[n] for n in p.leaves), order=order), reference(root, given)
    compare(got, want, root.dtype, ulps)
    return k


def founding() -> Node:
    sums, w, b = inp(0, B, 64, 1, 1, dtype=F64), inp(1, 128, 64, dtype=F64), inp(2, 128, dtype=F64)
    y = reshape(linear(reshape(sums, (B, 64)), w, b), (B, 128, 1, 1))
    y = fold(pointwise("add", cast(y, F32), inp(3, 128, 1, 1)), "logsumexp", 1, keepdim=True)
    return pointwise("mul", reshape(y, (B, 1)), 10.0)


def top(x: Node) -> Node:
    """Something that is more than pointwise, and shows every element of short rows."""
    return softmax(x, x.ndim - 1)


X = inp(0, B, 12)
IMAGE = inp(0, B, 6, 4, 5)
CASES: dict[str, Callable[[], Node]] = {
    "founding": founding,
    # pointwise
    "tanh": lambda: top(pointwise("tanh", X)),
    "int batch": lambda: top(pointwise("sigmoid", inp(0, 3, 7))),
    "batch of one": lambda: top(pointwise("add", inp(0, 1, 7), inp(1, 7))),
    "bias": lambda: top(pointwise("add", pointwise("mul", X, 0.5), inp(1, 12))),
    "channel bias": lambda: top(pointwise("sub", IMAGE, inp(1, 6, 1, 1))),
    "row bias": lambda: top(pointwise("maximum", IMAGE, inp(1, 1, 1, 4, 1))),
    "two samples' values": lambda: top(pointwise("mul", IMAGE, inp(1, B, 6, 1, 1))),
    "broadcast sample": lambda: top(pointwise("add", inp(0, B, 6, 1), inp(1, B, 1, 8))),
    "full": lambda: top(pointwise("add", X, full((12,), 1.5))),
    "as many samples as features": lambda: top(pointwise("add", inp(0, 4, 4), inp(1, 4))),
    "square weight": lambda: pointwise("mul", linear(inp(0, 4, 4), inp(1, 4, 4), inp(2, 4)), inp(3, 4)),
    # reductions
    "sum": lambda: fold(X, "sum", 1),
    "mean of the middle": lambda: fold(IMAGE, "mean", 2, keepdim=True),
    "max of channels": lambda: fold(IMAGE, "max", 1),
    "min of two": lambda: fold(IMAGE, "min", 1, 3),
    "logsumexp": lambda: fold(IMAGE, "logsumexp", 1),
    "prod": lambda: fold(X, "prod", 1),
    "var": lambda: fold(IMAGE, "var", 2, 3),
    "norm": lambda: fold(IMAGE, "norm", 2, 3),
    "deviation": lambda: fold(IMAGE, "std", 2, 3),
    "population deviation": lambda: fold(IMAGE, "std", 1, correction=0),
    "population variance": lambda: fold(IMAGE, "var", 1, correction=0),
    "variance of one": lambda: fold(inp(0, B, 3, 1), "var", 2),
    "long rows": lambda: fold(inp(0, B, 2, 3001), "logsumexp", 2),
    "long mean": lambda: fold(pointwise("square", inp(0, B, 5000)), "mean", 1),
    "many rows": lambda: fold(inp(0, B, 700, 3), "sum", 2),
    "then tail": lambda: pointwise("add", fold(pointwise("relu", IMAGE), "sum", 2, 3), inp(1, 6)),
    "double reduction": lambda: fold(pointwise("add", fold(IMAGE, "mean", 2, 3), inp(1, 6)), "max", 1, keepdim=True),
    "float64 sums": lambda: fold(cast(IMAGE, F64), "sum", 1, 2, 3),
    # softmax
    "softmax": lambda: softmax(X, 1),
    "log softmax of channels": lambda: softmax(pointwise("mul", IMAGE, 3.0), 1, log=True),
    "softmax, long": lambda: softmax(inp(0, B, 4097), 1),
    "softmax of too much to keep": lambda: softmax(pointwise("add", inp(0, 2, 9000), inp(1, 9000)), 1),
    "softmax, weighted": lambda: fold(pointwise("mul", softmax(IMAGE, 3), inp(1, 5)), "sum", 3),
    # norms
    "layer norm": lambda: norm(X, "layer", inp(1, 12), inp(2, 12)),
    "layer norm of two": lambda: norm(IMAGE, "layer", inp(1, 4, 5), inp(2, 4, 5), trailing=2),
    "layer norm, long": lambda: norm(inp(0, B, 3000), "layer", inp(1, 3000), inp(2, 3000)),
    "layer norm, plain": lambda: norm(pointwise("exp", IMAGE), "layer", trailing=3),
    "rms norm": lambda: norm(IMAGE, "rms", inp(1, 5), eps=1e-6),
    "group norm": lambda: norm(IMAGE, "group", inp(1, 6), inp(2, 6), groups=3),
    "group norm of one": lambda: norm(X, "group", inp(1, 12), inp(2, 12), groups=1),
    "instance norm": lambda: norm(IMAGE, "instance", inp(1, 6), inp(2, 6), training=True),
    # products
    "linear": lambda: linear(X, inp(1, 7, 12), inp(2, 7)),
    "linear, wide": lambda: linear(inp(0, B, 3), inp(1, 300, 3)),
    "linear, grouped": lambda: make(ops.Matmul(True), inp(0, B, 3, 1, 12), inp(1, 3, 7, 12), None),
    "linear, grouped and long": lambda: reshape(
        make(ops.Matmul(True), reshape(inp(0, B, 1400), (B, 2, 1, 700)), inp(1, 2, 30, 700), None), (B, 60)
    ),
    "linear, shared out": lambda: pointwise(
        "mul", cast(linear(inp(0, B, 900, dtype=F64), inp(1, 77, 900, dtype=F64), inp(2, 77, dtype=F64)), F32), 0.5
    ),
    "linear, grouped and shared out": lambda: reshape(
        make(ops.Matmul(True), reshape(inp(0, B, 1400), (B, 2, 1, 700)), inp(1, 2, 41, 700), None), (B, 82, 1, 1)
    ),
    "linear, shared out without long rows": lambda: linear(inp(0, B, 130), inp(1, 300, 130)),
    "linear, long": lambda: linear(inp(0, B, 700), inp(1, 3, 700), inp(2, 3)),
    "matmul": lambda: matmul(X, inp(1, 12, 40)),
    "matmul, narrow": lambda: matmul(inp(0, B, 33), inp(1, 33, 2), inp(2, 2)),
    "tokens": lambda: linear(inp(0, B, 4, 12), inp(1, 9, 12), inp(2, 9)),
    "tokens, other layout": lambda: matmul(pointwise("relu", inp(0, B, 4, 12)), inp(1, 12, 33), inp(2, 33)),
    "two layers": lambda: linear(pointwise("relu", linear(X, inp(1, 20, 12), inp(2, 20))), inp(3, 4, 20), inp(4, 4)),
    "float64 product": lambda: linear(cast(X, F64), inp(1, 7, 12, dtype=F64)),
    "head": lambda: softmax(linear(norm(X, "layer", inp(1, 12), inp(2, 12)), inp(3, 10, 12), inp(4, 10)), 1),
    # views
    "reshape": lambda: top(reshape(pointwise("relu", IMAGE), (B, 24, 5))),
    "reshape alone at the end": lambda: reshape(fold(IMAGE, "sum", 3, keepdim=True), (B, 24)),
    "permute": lambda: top(pointwise("relu", permute(IMAGE, (0, 3, 1, 2)))),
    "permute of a tree": lambda: top(pointwise("add", permute(pointwise("exp", IMAGE), (0, 2, 3, 1)), inp(1, 6))),
    "permute at the end": lambda: permute(softmax(IMAGE, 1), (0, 2, 1, 3)),
    "permute, then product": lambda: linear(reshape(permute(IMAGE, (0, 2, 3, 1)), (B, 20, 6)), inp(1, 3, 6)),
    "expand": lambda: top(pointwise("mul", make(ops.Expand((B, 6, 8)), inp(0, B, 6, 1)), inp(1, 8))),
    "slice": lambda: fold(make(ops.Slice(2, 1, 4, 2), IMAGE), "sum", 2),
    "slice of a permutation": lambda: top(make(ops.Slice(1, 1, 5, 3), permute(IMAGE, (0, 3, 1, 2)))),
    # half precisions
    "bf16 head": lambda: linear(
        pointwise("gelu", inp(0, B, 12, dtype=BF16), params=("none",)), inp(1, 6, 12, dtype=BF16), inp(2, 6, dtype=BF16)
    ),
    "fp16 softmax": lambda: softmax(inp(0, B, 50, dtype=F16), 1),
    "bf16 layer norm": lambda: norm(inp(0, B, 50, dtype=BF16), "layer", inp(1, 50, dtype=BF16), inp(2, 50, dtype=BF16)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_value(name: str) -> None:
    check(CASES[name](), order=ORDERS[zlib.crc32(name.encode()) % 3])


def test_default_eps_is_that_of_the_input() -> None:
    x = 1e-4 * torch.randn(3, 12)
    k = kernel(program(norm(X, "rms", eps=None)), "fused_test")
    torch.testing.assert_close(emulate(k, x), torch.nn.functional.rms_norm(x, (12,)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["founding", "softmax, long", "layer norm of two", "double reduction", "head"])
def test_every_order_gives_the_same_bits(name: str, order: str) -> None:
    p = program(CASES[name]())
    k = kernel(p, "fused_test")
    tensors = [random(n, i) for i, n in enumerate(p.leaves)]
    assert torch.equal(emulate(k, *tensors), emulate(k, *tensors, order=order, seed=3))


SPECIAL = {
    "a NaN": [nan, 1.0, inf],
    "infinities": [inf, -inf, 2.0],
    "minus infinity alone": [-inf] * 3,
    "minus infinities": [-inf, 1.0, -inf],
    "zeros": [-0.0, 0.0, -0.0],
    "large": [3e38, 3e38, -3e38],
}


@pytest.mark.parametrize("kind", ["max", "min", "logsumexp", "sum", "mean", "softmax", "log_softmax"])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(kind: str, name: str) -> None:
    """As eager does: extremes keep a NaN, and a logsumexp of nothing but -inf is -inf."""
    x = inp(0, B, 3)
    root = softmax(x, 1, kind == "log_softmax") if "softmax" in kind else fold(x, kind, 1)
    given = torch.tensor([SPECIAL[name], [0.5, 1.5, -2.0]])
    got, want = emulate(kernel(program(root), "fused_test"), given), reference(root, {x: given}).float()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_long_sums_are_as_accurate_as_float64() -> None:
    x = 10 + torch.randn(2, 100_000)
    root = fold(inp(0, B, 100_000), "mean", 1)
    got = emulate(kernel(program(root), "fused_test"), x)
    assert torch.equal(got, x.double().mean(1).float())


def tail(root: Node, sums: Node, leaves: dict[Node, str], threads: int = 64) -> Kernel:
    """A hand-written kernel that sums rows, with a block program behind it."""
    p = parse(root, Graph((), (root,)).users(), given=(sums,))
    assert isinstance(p, SampleProgram), p
    block = block_program(p, {sums: "sums"}, leaves, "blockIdx.x", threads, out="result", arena="kept")
    rows, length = sums.shape[1], sums.arg(0).shape[2]
    text = [
        primitives(*PRIMITIVES),
        *block.head,
        f"""
extern "C" __global__ void tail(const float* x, const float* bias, float* result) {{
    __shared__ float sums[{rows}];
    __shared__ double kept[{block.units + 1}];
    for (int row = threadIdx.x; row < {rows}; row += {threads}) {{
        float sum = 0;
        for (int i = 0; i < {length}; ++i) sum += x[(blockIdx.x * {rows} + row) * {length} + i];
        sums[row] = sum;
    }}
    __syncthreads();
""",
        *block.body,
        "}",
    ]
    return Kernel(
        "tail", "\n".join(text), ("x", "bias"), ("contiguous",) * 2, (("n", 0, 0),),
        Array("result", ("n", *map(str, root.shape[1:])), F32), (),
        (Launch("tail", tuple(Argument("pointer", n) for n in ("x", "bias", "result")), ("n", "1", "1"), threads),), "",
    )  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_tail_of_another_kernel(order: str) -> None:
    x, bias = inp(0, B, 6, 10), inp(1, 6)
    sums = fold(x, "sum", 2)
    root = softmax(pointwise("add", sums, bias), 1)
    given = {x: torch.randn(3, 6, 10), bias: torch.randn(6)}
    compare(emulate(tail(root, sums, {bias: "bias"}), *given.values(), order=order), reference(root, given), F32)


def test_tail_that_only_scales() -> None:
    x, bias = inp(0, B, 6, 10), inp(1, 6)
    sums = fold(x, "sum", 2)
    root = pointwise("mul", sums, bias)
    given = {x: torch.randn(3, 6, 10), bias: torch.randn(6)}
    k = tail(root, sums, {bias: "bias"})
    assert "kept[1]" in k.source  # nothing is kept
    compare(emulate(k, *given.values()), reference(root, given), F32)


def test_dead_values_make_room() -> None:
    x = inp(0, B, 1000)
    root = x
    for i in range(8):
        root = softmax(pointwise("mul", root, float(i + 1)), 1)
    assert program(root).arena[1] * 8 == 2 * 4000
    check(root)


NO: dict[str, tuple[Callable[[], Node], str]] = {
    "over the batch": (lambda: fold(X, "sum", 0), "sample"),
    "permuted batch": (lambda: permute(inp(0, 4, 4), (1, 0)), "does not go sample by sample"),
    "sum to nothing": (lambda: fold(X, "sum", 0, 1), "has no samples"),
    "integers": (lambda: pointwise("add", inp(0, B, 3, dtype=torch.int64), 1), "no samples of floating-point"),
    "symbolic length": (lambda: pointwise("relu", inp(0, B, B + 1)), "no samples"),
    "weight per sample": (lambda: make(ops.Matmul(), inp(0, B, 3, 4), inp(1, B, 4, 5)), "does not go"),
    "batch norm": (lambda: norm(IMAGE, "batch"), "does not go"),
    "a convolution": (
        lambda: make(ops.Conv((1,), ((0, 0),), (1,)), inp(0, B, 2, 9), inp(1, 3, 2, 3), None),
        "does not go",
    ),
    "parameters alone": (lambda: top(pointwise("add", full((B, 3), 1.0), inp(1, 3))), "depends on no sample"),
    "number of samples": (lambda: pointwise("mul", X, B), "does not go"),
    "pointwise alone": (lambda: pointwise("relu", inp(0, B)), "takes every element by itself"),
    "many rows": (lambda: softmax(inp(0, B, 64, 512), 2), "has samples of 32768 elements"),
    "a wide product": (lambda: linear(inp(0, B, 512, 64), inp(1, 3, 64)), "has samples of 32768 elements"),
    "too much to keep": (lambda: fold(softmax(pointwise("exp", inp(0, B, 20_000)), 1), "max", 1), "keeps 80000 bytes"),
    "bool result": (lambda: pointwise("gt", top(X), 0.0), "lies in memory as torch.bool"),
}


@pytest.mark.parametrize("name", NO)
def test_refuses(name: str) -> None:
    root, why = NO[name]
    last = root()
    found = parse(last, Graph((), (last,)).users())
    assert isinstance(found, str) and why in found, found


def test_values_with_other_users_are_operands() -> None:
    y = pointwise("relu", X)
    z = fold(pointwise("exp", y), "sum", 1)
    found = parse(z, Graph((), (z, y)).users())
    assert isinstance(found, SampleProgram) and found.leaves == (y,)


def test_values_that_are_used_inside_several_times_are_computed_inside() -> None:
    y = pointwise("relu", X)
    twice = pointwise("div", y, pointwise("add", y, 1.0))
    assert program(softmax(twice, 1)).leaves == (X,)
    check(softmax(twice, 1))


def test_values_that_several_steps_read_are_kept() -> None:
    y = pointwise("exp", X)
    root = pointwise("div", y, fold(pointwise("sub", y, fold(y, "mean", 1, keepdim=True)), "max", 1, keepdim=True))
    p = program(root)
    assert p.leaves == (X,) and p.steps[0] is y and sum(n.op == y.op for n in p.steps) == 1
    check(root)


def test_what_there_is_no_room_for_is_an_operand() -> None:
    """Where all that is used inside alone is too much to keep, less of it may not be."""
    x = inp(0, B, 64, 96)
    y = softmax(x, 2)
    root = pointwise("add", pointwise("mul", y, 2.0), softmax(y, 2))
    assert program(root).leaves in ((y,), (x,))


def test_weights_computed_ahead_are_operands() -> None:
    """Also where a batch happens to be as large as they are."""
    w, b = pointwise("mul", inp(1, 4, 4), 2.0), pointwise("exp", inp(2, 4))
    found = program(pointwise("add", linear(inp(0, 4, 4), w), b))
    assert found.leaves == (inp(0, 4, 4), w, b)


@pytest.mark.parametrize(
    ("sizes", "strides", "text"),
    [
        ([4, 5], [5, 1], "i"),
        ([4, 5], [0, 1], "i % 5"),
        ([4, 5], [1, 0], "i / 5"),
        ([4, 5, 6], [0, 1, 0], "i / 6 % 5"),
        ([4, 5], [1, 4], "i / 5 + i % 5 * 4"),
        ([4, 1, 5], [5, 7, 1], "i"),
        ([1, 1], [3, 2], "0"),
        ([2, 3, 4], [12, 4, 1], "i"),
    ],
)
def test_remap(sizes: list[int], strides: list[int], text: str) -> None:
    assert remap("i", sizes, strides) == text


@pytest.mark.parametrize("name", [n for n in CASES if "shared out" in n])
def test_products_are_shared_out(name: str) -> None:
    """Several blocks compute a sample's rows, each its own."""
    k = kernel(program(CASES[name]()), "fused_test")
    (launch,) = k.launches
    assert int(launch.grid[1]) > 1 and "begin = blockIdx.y" in k.source


@pytest.mark.parametrize(
    "name", ["founding", "two layers", "head", "linear", "norm behind a product", "permuted behind a product"]
)
def test_products_that_are_not_shared_out(name: str) -> None:
    """Small ones, and those whose rows something else waits for, or reads in another order."""
    large = linear(inp(0, B, 900), inp(1, 78, 900))
    roots = {
        "norm behind a product": lambda: softmax(large, 1),
        "permuted behind a product": lambda: pointwise("relu", permute(reshape(large, (B, 6, 13)), (0, 2, 1))),
    }
    k = kernel(program((CASES | roots)[name]()), "fused_test")
    assert k.launches[0].grid[1] == "1"


def test_golden() -> None:
    k = kernel(program(founding()), "fused_linear_add_logsumexp_mul")
    assert k.shapes == (("batch", "64", "1", "1"), ("128", "64"), ("128",), ("128", "1", "1"))
    assert k.source == (GOLDEN / "sample_linear_logsumexp.cu").read_text()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["founding", "head", "layer norm, long", "bf16 head", "permute, then product"])
def test_compiles(name: str, arch: str) -> None:
    core = pytest.importorskip("cuda.core")
    source = kernel(program(CASES[name]()), "fused_test").source
    core.Program(source, "c++", core.ProgramOptions(arch=arch, std="c++17")).compile("cubin")
