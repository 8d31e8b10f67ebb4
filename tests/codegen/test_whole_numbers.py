"""Whole numbers that kernels compute: of floating-point numbers, and of others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

import fusewright
from fusewright.runtime import nvrtc

Function = Callable[[nn.Embedding, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.table = function, nn.Embedding(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.table, x)


REALS = 3 * torch.randn(64, 128, generator=torch.manual_seed(3))
WHOLE = torch.randint(-50, 50, (9, 65), generator=torch.manual_seed(4))
# A function, of what, and the names of its kernels.
CASES: dict[str, tuple[Function, Tensor, list[str]]] = {
    "sums and products": (lambda e, i: (i + 1) * 2 - i, WHOLE, ["fused_add_mul_sub"]),
    "beyond float64": (lambda e, i: i * 1234567890123457 + 7, WHOLE, ["fused_mul_add"]),
    "numbers beyond float64": (lambda e, i: i * (2**53 + 1) - 2**62, WHOLE, ["fused_mul_sub"]),
    "rests": (lambda e, i: (i * 3 + 1) % 7, WHOLE, ["fused_mul_add_remainder"]),
    "rests of the greatest": (lambda e, i: (i * 2**57) % (2**63 - 1), WHOLE, ["fused_mul_remainder"]),
    "extremes": (
        lambda e, i: torch.maximum(i, -i) - torch.minimum(i, i * 2).abs(),
        WHOLE,
        ["fused_neg_maximum_mul_minimum_abs_sub"],
    ),
    "choices": (lambda e, i: torch.where(i > 3, i, 0) + 1, WHOLE, ["fused_gt_where_add"]),
    "of numbers": (lambda e, x: (x * 100).long() % 30, REALS, ["fused_mul_remainder"]),
    "of float64": (lambda e, x: (x.double() * 100).long() + 1, REALS, ["fused_mul_add"]),
    "of a quotient": (lambda e, x: (x / 3).long() % 5, REALS, ["fused_div_remainder"]),
    "of truths": (lambda e, x: (x > 0).long() * 5 + 1, REALS, ["fused_gt_mul_add"]),
    "of narrower ones": (lambda e, i: i.long() * 3 + 1, WHOLE.int(), ["fused_mul_add"]),
    "to numbers": (lambda e, x: (x * 3).long().float() * x, REALS, ["fused_mul"]),
    "beside numbers": (lambda e, x: x * (x.abs() * 10).long(), REALS, ["fused_abs_mul"]),
    "compared": (lambda e, i: (i % 4 == 2).float() * 3, WHOLE, ["fused_remainder_eq_mul"]),
    "reduced as numbers": (lambda e, i: (i % 4).float().mean(1), WHOLE, ["fused_remainder_mean"]),
    "indices": (
        lambda e, x: e((x.abs() * 100).long() % 40) * 2,
        REALS[:4],
        ["fused_embedding_mul", "fused_abs_mul_remainder"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    function, x, names = CASES[name]
    model = Model(function).eval()
    built = as_on_a_gpu(model, x)
    assert sorted(k.name for k in built.program.kernels) == sorted(names)
    assert not any(step in built.program.source for step in ("aten.remainder", ".to(torch.int64)"))
    assert torch.equal(emulated(built, model, x), model(x))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["of numbers", "extremes"])
def test_compiles_without_spills(name: str, arch: str) -> None:
    function, x, _ = CASES[name]
    for kernel in as_on_a_gpu(Model(function).eval(), x).program.kernels:
        assert all(r.stack == 0 for r in nvrtc.resources(nvrtc.compile(kernel.source, arch)).values())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_on_a_cpu(name: str) -> None:
    """With all checks, those of numbers that no whole number is near among them."""
    function, x, names = CASES[name]
    model = Model(function).eval()
    fast = fusewright.optimize(model, (x,), rewrite="always", kernels="always")
    plan = fusewright.explain(fast)
    assert plan.status == "rewritten" and set(names) <= {k.name for k in plan.kernels}
    assert torch.equal(fast(x), model(x))


def test_what_no_whole_number_is_near() -> None:
    """A compiler may take it for any; PyTorch has what processors do."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, -(2.0**63), 2.0**63, 2.0**62, -0.9, 1.9]).repeat(7)
    model = Model(lambda e, x: x.abs().long() + (2 * x).long())
    fast = fusewright.optimize(model, (x,), rewrite="always", kernels="always", verify=False)
    assert {k.name for k in fusewright.explain(fast).kernels} == {"fused_abs_mul_add"}
    assert torch.equal(fast(x), model(x))


LEFT: dict[str, tuple[Function, Tensor, str]] = {
    "of half precisions that are rounded": (lambda e, x: (x * 100).long() + 1, REALS.bfloat16(), "fused_mul("),
    "rests of other tensors": (lambda e, i: i % (i * i + 1), WHOLE, "aten.remainder"),
    "rests of negative numbers": (lambda e, i: i % -3, WHOLE, "aten.remainder"),
    "compared in half precision": (lambda e, i: (i * 7 > (i * 7).bfloat16()).float() * 2, WHOLE, " > "),
    "compared beyond float32": (lambda e, i: (i + 1 == i * 2).float() * 2, WHOLE, "=="),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_pytorch(name: str) -> None:
    function, x, step = LEFT[name]
    model = Model(function).eval()
    built = as_on_a_gpu(model, x)
    assert step in built.program.source
    assert torch.equal(emulated(built, model, x), model(x)) or name == "rests of other tensors"


class Buckets(nn.Module):
    """Which bucket a relative position is in: those near by have one each, others share one logarithmically."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        apart = k[:, None, :] - q[:, :, None]
        near = apart.abs()
        far = 8 + (torch.log(near.float() / 8) / math.log(128 / 8) * 8).long()
        far = torch.min(far, torch.full_like(far, 15))
        return (apart > 0).long() * 16 + torch.where(near < 8, near, far)


def test_buckets_of_relative_positions_are_one_kernel() -> None:
    q, k = (torch.randint(0, 200, (2, length), generator=torch.manual_seed(length)) for length in (40, 50))
    model = Buckets()
    built = as_on_a_gpu(model, q, k)
    assert len(built.program.kernels) == 1 and "aten" not in built.program.source
    assert torch.equal(emulated(built, model, q, k), model(q, k))
    fast = fusewright.optimize(model, (q, k), rewrite="always", kernels="always")
    assert len(fusewright.explain(fast).kernels) == 1 and torch.equal(fast(q, k), model(q, k))
