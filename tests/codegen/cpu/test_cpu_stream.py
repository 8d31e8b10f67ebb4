"""Streams on a CPU: compiled, run, and compared with the same graph in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from codegen.cuda import test_stream_kernels as cases
from codegen.cuda.test_stream_kernels import fold, inp, pointwise, pool
from native_cases import quick, run
from torch import Tensor

from fusewright.codegen.cpu.stream import ENOUGH, fits, kernel
from fusewright.ir.build import cast
from fusewright.ir.node import Node
from fusewright.kernel import Kernel, evaluate
from fusewright.runtime.launch import sizes_of

GOLDEN = Path(__file__).parents[2] / "golden"
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
inf, nan = float("inf"), float("nan")


def check(root: Node, tensors: dict[Node, Tensor] | None = None) -> Kernel:
    s = cases.stream_of(root)
    k = kernel(s, "fused_test")
    given = tensors or {n: cases.random(n, i) for i, n in enumerate(s.tensors)}
    got, want = run(k, *(given[n] for n in s.tensors)), cases.reference(root, given)
    assert got.dtype == root.dtype and got.shape == want.shape
    special = ~want.isfinite()
    torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
    if not special.all():
        scale = want[~special].abs().max().clamp(min=1e-3)
        assert (got.double() - want)[~special].abs().max() <= scale * 8 * torch.finfo(root.dtype).eps
    return k


@pytest.mark.parametrize("name", quick(cases.CHAINS, "before and after", "channels, then positions", "long rows"))
def test_value(name: str) -> None:
    check(cases.CHAINS[name]())


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
@pytest.mark.parametrize("name", quick(["flat", "pooled", "rows", "columns", "mixed"], "flat", "rows"))
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    x, bias = inp(0, 2, 6, 8, 16, dtype=dtype), inp(1, 6, 1, 1, dtype=dtype)
    roots = {
        "flat": lambda: pointwise("silu", pointwise("add", x, bias)),
        "pooled": lambda: pointwise("mul", pool(pointwise("add", x, bias), "avg", (3, 3), 2, 1), 0.25),
        "rows": lambda: fold(pool(x, "max", (2, 2)), "mean", 2, 3),
        "columns": lambda: fold(pointwise("tanh", x), "logsumexp", 1),
        "mixed": lambda: pointwise("add", cast(x, F32), inp(1, 8, 16, dtype=F32)),
    }
    check(roots[name]())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_half_is_read_and_rounded_as_pytorch_does(dtype: torch.dtype) -> None:
    """All 65536 of them, and what lies between."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    same = kernel(cases.stream_of(pointwise("mul", inp(0, 2**16, dtype=dtype), 1.0)), "fused_same")
    torch.testing.assert_close(run(same, x), x, rtol=0, atol=0, equal_nan=True)
    wide = torch.cat([x.float(), x.float() * (1 + 2**-9), x.float() * (1 + 2**-12), torch.randn(1000) * 1e-6])
    root = cast(pointwise("mul", inp(0, len(wide)), 1.0), dtype)
    torch.testing.assert_close(
        run(kernel(cases.stream_of(root), "fused_cast"), wide), wide.to(dtype), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quotient_that_is_a_step_is_one(dtype: torch.dtype) -> None:
    """41 * (1 / 41) is less than one in float32."""
    x = torch.arange(0, 41 * 6, 41).to(dtype)
    quotient = pointwise("div", inp(0, 6, dtype=dtype), 41.0)
    for root in (pointwise("floor", quotient), pointwise("add", quotient, pointwise("floor", quotient))):
        want = cases.reference(root, {inp(0, 6, dtype=dtype): x}).to(dtype)
        torch.testing.assert_close(run(kernel(cases.stream_of(root), "fused_test"), x), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", quick(cases.SPECIAL, "logsumexp", "max pool", "min of channels"))
def test_special_values(name: str) -> None:
    root = cases.SPECIAL[name]()
    (x,) = cases.stream_of(root).tensors
    for value in (nan, inf, -inf, "both", "all -inf"):
        t = cases.random(x, 3)
        flat = t.view(-1)
        if isinstance(value, float):
            flat[5], flat[-40] = value, value
        elif value == "both":
            flat[5], flat[6], flat[-40], flat[-41] = inf, -inf, nan, inf
        else:
            t[0] = -inf
        check(root, {x: t})


def test_one_kernel_serves_other_sizes() -> None:
    def build(*shape: int) -> Node:
        pooled = pool(pointwise("relu", inp(0, *shape)), "max", (2, 2))
        return pointwise("add", fold(pooled, "mean", 2, 3), inp(1, shape[1]))

    k = kernel(cases.stream_of(build(2, 3, 8, 16)), "fused_test")
    for shape in ((1, 3, 8, 16), (5, 4, 9, 7), (3, 1, 40, 1300), (2, 7, 2, 2)):
        root = build(*shape)
        given = {n: cases.random(n, i) for i, n in enumerate(cases.stream_of(root).tensors)}
        got = run(k, *given.values())
        torch.testing.assert_close(got.double(), cases.reference(root, given), rtol=1e-5, atol=1e-6)


# Windows along short rows, a plane in every lane.
PLANES: dict[str, Callable[[torch.dtype], Node]] = {
    "overlapping": lambda t: pool(pointwise("relu", inp(0, 4, 20, 9, 5, dtype=t)), "max", (3, 3), 2, 1),
    "per channel": lambda t: pointwise(
        "mul",
        pool(pointwise("add", inp(0, 2, 37, 6, 6, dtype=t), inp(1, 37, 1, 1, dtype=t)), "avg", (2, 2)),
        inp(2, 37, 1, 1, dtype=t),
    ),
    "per sample": lambda t: pointwise(
        "add", pool(inp(0, 3, 18, 7, 7, dtype=t), "min", (2, 2)), inp(1, 3, 1, 1, 1, dtype=t)
    ),
    "an operand twice": lambda t: pointwise(
        "mul",
        pool(pointwise("mul", inp(0, 2, 21, 5, 6, dtype=t), inp(1, 21, 1, 1, dtype=t)), "max", (2, 2)),
        inp(1, 21, 1, 1, dtype=t),
    ),
    "one dimension": lambda t: pool(inp(0, 5, 33, 11, dtype=t), "min", (3,), 2),
    "three dimensions": lambda t: pool(inp(0, 2, 17, 4, 5, 6, dtype=t), "max", (2, 3, 2), 1, 1),
    "borders": lambda t: pool(
        inp(0, 2, 19, 7, 8, dtype=t), "avg", (3, 3), 2, 1, count_include_pad=False, ceil_mode=True
    ),
    "dilated": lambda t: pool(inp(0, 1, 50, 9, 9, dtype=t), "max", (2, 2), 1, 0, 3),
    "one place": lambda t: pool(inp(0, 3, 16, 2, 1, dtype=t), "max", (2, 1)),
    "then mean": lambda t: pointwise(
        "mul", fold(pool(inp(0, 3, 23, 9, 8, dtype=t), "max", (2, 2)), "mean", 2, 3), inp(1, 23, dtype=t)
    ),
    "then logsumexp": lambda t: fold(pool(inp(0, 2, 40, 5, 5, dtype=t), "avg", (2, 2), 1), "logsumexp", 2, 3),
    "then max": lambda t: fold(
        pointwise("tanh", pool(inp(0, 2, 33, 6, 6, dtype=t), "avg", (3, 3), 1, 1)), "max", 2, 3, keepdim=True
    ),
}


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("name", quick(PLANES, "overlapping", "per channel", "then mean"))
@pytest.mark.sampled
def test_planes(name: str, dtype: torch.dtype) -> None:
    """A NaN and infinities reach what they reach, too."""
    root = PLANES[name](dtype)
    k = check(root)
    assert "planes(d" in k.source
    given = {n: cases.random(n, i) for i, n in enumerate(cases.stream_of(root).tensors)}
    first = next(iter(given.values())).view(-1)
    first[1], first[-1], first[-2] = nan, inf, -inf
    check(root, given)


def test_planes_of_other_sizes() -> None:
    k = kernel(cases.stream_of(PLANES["overlapping"](F32)), "fused_test")
    for shape in ((1, 1, 1, 1), (3, 5, 2, 9), (1, 16, 40, 3), (0, 4, 3, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(k, x), torch.nn.functional.max_pool2d(x.relu(), 3, 2, 1))


def test_planes_beside_each_other_need_their_operands_so() -> None:
    """What varies within planes behind the window is read along rows."""
    x, y = inp(0, 2, 20, 8, 8), inp(1, 2, 20, 4, 4)
    assert "planes(d" not in check(pointwise("add", pool(x, "max", (2, 2)), y)).source
    assert "planes(d" not in check(pool(pointwise("add", x, inp(1, 8)), "max", (2, 2))).source


def test_empty_outputs() -> None:
    k = kernel(cases.stream_of(pointwise("relu", inp(0, 2, 3, 4))), "fused_test")
    assert run(k, torch.empty(0, 3, 4)).shape == (0, 3, 4)
    k = kernel(cases.stream_of(fold(inp(0, 2, 3, 4), "sum", 2)), "fused_test")
    assert run(k, torch.empty(0, 3, 4)).shape == (0, 3)


def test_few_results_are_reduced_in_parts_by_size_alone() -> None:
    k = kernel(cases.stream_of(fold(inp(0, 2, 300_000), "sum", 1)), "fused_test")
    parts = next(a.text for a in k.launches[0].arguments if a.kind == "long" and "min" in a.text)
    assert 2 <= evaluate(parts, sizes_of(k, [torch.empty(2, 300_000)])) <= ENOUGH
    assert evaluate(parts, sizes_of(k, [torch.empty(2, 3)])) == 1
    assert evaluate(parts, sizes_of(k, [torch.empty(1000, 300_000, device="meta")])) == 1


def test_windows_too_wide_for_the_stack_are_refused() -> None:
    assert fits(cases.stream_of(pool(inp(0, 1, 2, 40_000), "avg", (8000,))))
    assert not fits(cases.stream_of(pool(inp(0, 1, 2, 40_000), "avg", (20_000,))))


@pytest.mark.parametrize("layout", ["channels-last", "expanded", "strided", "unaligned"])
def test_memory_of_operands(layout: str) -> None:
    root = cases.CHAINS["before and after"]()
    given = {n: cases.random(n, i) for i, n in enumerate(cases.stream_of(root).tensors)}
    x, *_ = given
    made = {
        "channels-last": lambda: given[x].contiguous(memory_format=torch.channels_last),
        "expanded": lambda: given[x][:, :, :1].expand(x.shape),
        "strided": lambda: torch.stack([given[x]] * 2, -1)[..., 0],
        "unaligned": lambda: torch.cat([torch.zeros(1), given[x].flatten()])[1:].view(x.shape),
    }[layout]()
    check(root, given | {x: made})


GOLDENS: dict[str, tuple[str, Callable[[], Node]]] = {
    "stream_add_max": (
        "fused_add_max",
        lambda: pool(pointwise("add", inp(0, 32, 256, 8, 8), inp(1, 256, 1, 1)), "max", (3, 3), 2, 1),
    ),
    "stream_avg_sigmoid_sum": ("fused_avg_sigmoid_sum", cases.founding_tail),
    "stream_add_relu": ("fused_add_relu", cases.epilogue),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    kernel_name, root = GOLDENS[name]
    assert kernel(cases.stream_of(root()), kernel_name).source == (GOLDEN / f"cpu_{name}.cpp").read_text()
