"""Range sums in ATen against plain loops, branch by branch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fusewright.codegen.aten import lower
from fusewright.codegen.ranges import FEW, adaptive_slots
from fusewright.ir import ops
from fusewright.ir.node import Graph, make
from fusewright.ir.ops import Slot
from fusewright.ir.slots import make_slot

CPU = torch.device("cpu")
Table = tuple[tuple[int, tuple[Slot, ...]], ...]


def sliding(count: int, width: int, distance: int, first: int = 0, scale: float = 1.0) -> tuple[Slot, ...]:
    return tuple(Slot(first + i * distance, first + i * distance + width, 1, scale) for i in range(count))


def interleaved(*families: tuple[Slot, ...]) -> tuple[Slot, ...]:
    return tuple(itertools.chain.from_iterable(zip(*families, strict=True)))


# name: (shape, table, what the text must hold)
CASES: dict[str, tuple[tuple[int, ...], Table, str]] = {
    "total of one dimension": ((2, 3, 9), ((2, (Slot(0, 9, 1, 1.0),)),), "x.sum(2, keepdim=True)"),
    "total with a step": ((2, 3, 9), ((2, (Slot(1, 8, 3, 0.5),)),), "1:8:3"),
    "total of three dimensions": (
        (2, 3, 5, 6),
        ((1, (Slot(0, 3, 1, 0.5),)), (2, (Slot(1, 4, 1, 1.0),)), (3, (Slot(0, 6, 2, 0.25),))),
        ".sum((1, 2, 3)",
    ),
    "windows": ((2, 3, 12), ((2, sliding(5, 3, 2, 1, 0.5)),), ".unfold(2, 3, 2)"),
    "many that are all empty": ((2, 3, 12), ((2, (Slot(0, 0, 1, 1.0),) * (FEW + 1)),), "index_select"),
    "reversed": ((2, 3, 5), ((2, sliding(5, 1, 1)[::-1]),), "x.flip(2)"),
    "windows of one": ((2, 3, 12), ((2, sliding(5, 1, 2)),), "x[:, :, 0:9:2]"),
    "windows over two dimensions": (
        (2, 3, 8, 9),
        ((2, sliding(3, 2, 3)), (3, sliding(4, 3, 2, scale=1 / 3))),
        ".unfold(2, 2, 3)",
    ),
    "families": (
        (2, 12, 3),
        ((1, interleaved(sliding(3, 4, 4), sliding(3, 2, 4, 2), sliding(3, 1, 3))),),
        "torch.stack",
    ),
    "windows over both ends": (
        (2, 3, 40),
        ((2, tuple(make_slot(2 * i - 5, 1, 4, 40, 0.25) for i in range(24))),),
        "x_padded = F.pad(x, (5, 5))",
    ),
    "windows beyond an end": (
        (2, 40, 3),
        ((1, tuple(make_slot(i + 25, 1, 3, 40, 1 / (1 + i)) for i in range(FEW + 2))),),
        "F.pad(x, (0, 0, 0, 5))",
    ),
    "families over the ends": (
        (2, 31),
        ((1, interleaved(*(tuple(make_slot(3 * i + u - 2, 1, 4, 31, 0.5) for i in range(11)) for u in (0, 2)))),),
        "torch.stack",
    ),
    "windows of every third element": (
        (2, 3, 60),
        ((2, tuple(make_slot(2 * i, 3, 5, 60, 0.2) for i in range(FEW + 2))),),
        ".unfold(2, 13, 2)[..., ::3].sum(-1)",
    ),
    "windows of every second element, over both ends": (
        (40, 3),
        ((0, tuple(make_slot(i - 5, 2, 4, 40, 0.25) for i in range(45))),),
        "x_padded = F.pad(x, (0, 0, 5, 6))",
    ),
    "few windows of every second element": (
        (2, 23),
        ((1, tuple(make_slot(i, 2, 9, 23, 1.0) for i in range(5))),),
        "_core_1",
    ),
    "few with a shared core": (
        (2, 3, 9),
        ((2, (Slot(0, 8, 1, 1.0), Slot(1, 9, 1, 1.0), Slot(0, 9, 1, 1.0))),),
        "_core",
    ),
    "few with cores on two residues": (
        (2, 9, 3),
        ((1, (Slot(0, 8, 2, 1.0), Slot(2, 9, 2, 1.0), Slot(1, 9, 2, 1.0), Slot(3, 9, 2, 1.0), Slot(0, 2, 1, 1.0))),),
        "_core_1",
    ),
    "few without a core": ((9, 2), ((0, (Slot(0, 2, 1, 1.0), Slot(5, 9, 1, 1.0), Slot(1, 7, 3, 1.0))),), "torch.cat"),
    "empty slots": ((2, 5, 2), ((1, (Slot(0, 0, 1, 1.0), Slot(2, 5, 1, 0.5), Slot(4, 3, 1, 1.0))),), "zeros_like"),
    "nothing but empty slots": ((2, 5), ((1, (Slot(0, 0, 1, 1.0), Slot(3, 3, 1, 1.0))),), "zeros_like"),
    "one empty slot": ((2, 5), ((1, (Slot(0, 0, 1, 1.0),)),), "zeros_like"),
    "scales": ((2, 9, 2), ((1, (Slot(0, 2, 1, 0.5), Slot(2, 9, 1, 0.25), Slot(0, 0, 1, 7.0))),), "torch.tensor([0.5"),
    "gathered": (
        (2, 40, 2),
        ((1, tuple(Slot(i, min(40, i + 1 + i * i % 7), 1, 1.0) for i in range(FEW + 4))),),
        "index_select",
    ),
    "gathered with empty slots": (
        (40, 2),
        ((0, tuple(Slot(i, i + i % 4, 1 + i % 2, 0.5 + i) for i in range(FEW + 1))),),
        "index_select",
    ),
    "adaptive": (
        (2, 3, 10, 7),
        ((2, adaptive_slots(10, 4)), (3, adaptive_slots(7, 3))),
        "F.adaptive_avg_pool2d(x, (4, 3))",
    ),
    "adaptive in one dimension of two": ((2, 3, 10, 7), ((3, adaptive_slots(7, 3)),), ".unfold(3, 3, 2)"),
    "single and several": ((2, 6, 8), ((1, (Slot(0, 6, 1, 1.0),)), (2, sliding(3, 2, 2))), ".sum(1, keepdim=True)"),
}


def run(shape: tuple[int, ...], table: Table, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, str]:
    node = make(ops.Input(shape, x.dtype, CPU, name="x", index=0))
    graph = Graph((node,), (make(ops.RangeSum(table, dtype), node),))
    program = lower(graph)
    (result,) = program.functions()[1](None, x)
    return result, program.source


def expected(table: Table, x: Tensor) -> Tensor:
    for dim, slots in table:
        columns = [x.movedim(dim, 0)[list(range(s.start, s.stop, s.step))].sum(0) * s.scale for s in slots]
        x = torch.stack(columns).movedim(0, dim)
    return x


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "dtypes", [(torch.float64, torch.float64), (torch.float32, torch.float64)], ids=["same", "wide"]
)
def test_equals_plain_loops(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    shape, table, text = CASES[name]
    x = torch.randint(-8, 9, shape).to(dtypes[0])
    result, source = run(shape, table, x, dtypes[1])
    assert result.dtype == dtypes[1] and result.shape == expected(table, x).shape
    torch.testing.assert_close(result, expected(table, x.double()), rtol=1e-6, atol=1e-6)
    if dtypes[0] == dtypes[1]:
        assert text in source


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_slots(name: str, value: float) -> None:
    shape, table, _ = CASES[name]
    for position in range(0, torch.Size(shape).numel(), 7):
        x = torch.ones(shape, dtype=torch.float64)
        x.view(-1)[position] = value
        result, _ = run(shape, table, x, torch.float64)
        reached = expected(table, (~x.isfinite()).double()) != 0
        assert torch.equal(~result.isfinite(), reached)


@pytest.mark.parametrize("name", CASES)
def test_gradient(name: str) -> None:
    shape, table, _ = CASES[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    result, _ = run(shape, table, x, torch.float64)
    weight = torch.randn_like(result)
    found = torch.autograd.grad(result, x, weight, allow_unused=True)[0] if result.requires_grad else None
    (truth,) = torch.autograd.grad(expected(table, x), x, weight)
    torch.testing.assert_close(torch.zeros_like(x) if found is None else found, truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_accumulate_in_the_result(dtype: torch.dtype) -> None:
    x = torch.ones(2, 5000, dtype=dtype)
    for table in (((1, (Slot(0, 5000, 1, 1.0),)),), ((1, (Slot(0, 4999, 1, 1.0), Slot(1, 5000, 1, 1.0))),)):
        result, _ = run((2, 5000), table, x, torch.float32)
        assert torch.equal(result, expected(table, x.float()))


def test_wide_sums_carry_float64_after_the_first_dimension() -> None:
    x = 1000 + torch.randn(1, 4, 64, 64)
    table = ((2, (Slot(0, 64, 1, 1.0),)), (3, (Slot(0, 64, 1, 1.0),)))
    result, _ = run((1, 4, 64, 64), table, x, torch.float64)
    wide = (result - x.double().sum((2, 3), keepdim=True)).abs().max()
    narrow = (x.sum((2, 3), keepdim=True).double() - x.double().sum((2, 3), keepdim=True)).abs().max()
    assert result.dtype == torch.float64 and 0 < wide < narrow


def test_cores_are_given_up() -> None:
    shape, table, _ = CASES["few with cores on two residues"]
    _, source = run(shape, table, torch.ones(shape, dtype=torch.float64), torch.float64)
    cores = [line.split()[0] for line in source.splitlines() if "_core" in line.partition("=")[0] and "del" not in line]
    assert len(cores) == 2 and f"del {', '.join(cores)}" in source
