"""Range reductions on a CPU: compiled, run, and compared with sums in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
from codegen.cuda import test_range_kernels as cases
from native_cases import quick, run
from torch import Tensor

from fusewright.codegen.cpu.ranges import kernel
from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.kernel import Kernel

GOLDEN = Path(__file__).parents[2] / "golden"
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
inf, nan = float("inf"), float("nan")


def check(root: Node, x: Tensor | None = None) -> Kernel:
    """Sums are in float64: what is left are the roundings of the values before, and of the result."""
    r = cases.parsed(root)
    k = kernel(r, "fused_test")
    x = cases.random(r.x, 1) if x is None else x
    value = cases._value(r.value, r.x, x.double())
    got, want = run(k, x), cases.expected(root.op, value)
    assert got.dtype == root.dtype and got.shape == want.shape
    special = ~want.isfinite()
    torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
    magnitude = cases.expected(root.op, value.abs())
    values = 8 * torch.finfo(F64 if r.value.dtype == F64 else F32).eps if r.value is not r.x else 1e-14
    bound = magnitude * values + want.abs() * torch.finfo(root.dtype).eps / 2 + 1e-300
    assert not ((got.double() - want).abs() > bound)[~special].any()
    return k


@pytest.mark.parametrize("name", quick(cases.CASES, "borders", "7x7", "shared planes", "1-d step 2", "3-d borders"))
def test_value(name: str) -> None:
    check(cases.CASES[name]())


@pytest.mark.parametrize("name", ["7x7", "shared planes", "1-d borders", "borders", "3-d borders"])
@pytest.mark.parametrize("value", [nan, inf])
def test_values_that_are_not_finite_reach_their_slots_alone(name: str, value: float) -> None:
    root = cases.CASES[name]()
    x = cases.random(cases.parsed(root).x, 3)
    x.view(-1)[0] = value
    x.view(-1)[-1] = -value
    check(root, x)


def test_an_offset_costs_no_digits() -> None:
    """A mean of 1000 under sums of both signs: all of it is float64."""
    r = cases.parsed(cases.reduce(cases.inp(2, 300_000), "mean", 1))
    x = cases.random(r.x, 4, offset=1000.0)
    got = run(kernel(r, "fused_test"), x).double()
    assert ((got - x.double().mean(1)).abs() <= 6.2e-5).all()  # one ulp of the result


@pytest.mark.parametrize("shape", [(2, 3, 7, 7), (1, 1, 1, 1), (3, 5, 150, 149), (400, 1, 3, 5), (0, 3, 4, 4)])
def test_sizes_of_totals_are_arguments(shape: tuple[int, ...]) -> None:
    root = cases.reduce(cases.inp(2, 3, 150, 150), "mean", 2, 3, keepdim=True)
    x = torch.randn(shape)
    got = run(kernel(cases.parsed(root), "fused_test"), x)
    torch.testing.assert_close(got, x.double().mean((2, 3), keepdim=True).float(), rtol=3e-7, atol=1e-7)


def test_symbolic_batch() -> None:
    b = sympy.Symbol("B", positive=True, integer=True)
    x = make(ops.Input((b, 3, 20, 24), F32, torch.device("cpu"), "x", 0))
    table = {2: cases.borders(20, 3), 3: cases.borders(24, 3)}
    k = kernel(cases.parsed(cases.sums(x, table)), "fused_test")
    assert k.shapes == (("n0", "n1", "20", "24"),) and k.dtypes == (F32,)
    given = torch.randn(4, 3, 20, 24)
    want = cases.expected(cases.sums(cases.inp(4, 3, 20, 24), table).op, given.double())
    torch.testing.assert_close(run(k, given), want, rtol=1e-12, atol=1e-12)


def test_parts_only_where_planes_are_few() -> None:
    few, many = (kernel(cases.parsed(cases.reduce(cases.inp(n, 256, 256), "sum", 1, 2)), "fused_test") for n in (4, 99))
    assert few.scratch and few.notes and not many.scratch


@pytest.mark.parametrize("layout", ["channels-last", "transposed", "expanded", "sliced", "unaligned"])
def test_memory_of_operands(layout: str) -> None:
    root = cases.CASES["borders"]()
    x = cases.random(cases.parsed(root).x, 5)
    made = {
        "channels-last": lambda: x.contiguous(memory_format=torch.channels_last),
        "transposed": lambda: x.mT.contiguous().mT,
        "expanded": lambda: x[:1].expand(x.shape),
        "sliced": lambda: torch.stack([x, x], -1)[..., 1],
        "unaligned": lambda: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    }[layout]()
    check(root, made)


@pytest.mark.parametrize("name", cases.GOLDENS)
def test_golden(name: str) -> None:
    text = kernel(cases.parsed(cases.GOLDENS[name]()), "fused_rangesum").source
    assert text == (GOLDEN / f"cpu_{name}.cpp").read_text()
