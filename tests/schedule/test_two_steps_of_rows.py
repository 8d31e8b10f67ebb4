"""Reductions over rows that are kept and more, in two steps: the first is part of the kernel that keeps the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_build import Function, Weighted, as_on_a_gpu, emulated

from fusewright.ir import ops
from fusewright.schedule.kept_rows import split

SHAPE = (3, 40, 6, 10)

# What a model computes, and its kernels.
MODELS: dict[str, tuple[Function, list[str]]] = {
    "mean of columns": (
        lambda x, w: (F.normalize(x) - w).square().sum(1).mean((1, 2)),
        ["fused_norm_clamp_min_div_sub_square_sum", "fused_sum_mul"],
    ),
    "mean of columns of images": (
        lambda x, w: (F.normalize(x) * w).mean((1, 2)),
        ["fused_norm_clamp_min_div_mul_sum", "fused_sum_mul"],
    ),
    "greatest": (
        lambda x, w: (F.normalize(x) * w).amax((1, 2, 3)),
        ["fused_norm_clamp_min_div_mul_max", "fused_max"],
    ),
    "kept dimensions": (
        lambda x, w: (x / x.norm(dim=1, keepdim=True) * w).sum((1, 3), keepdim=True).exp(),
        ["fused_norm_div_mul_sum", "fused_sum_exp"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_as_the_model(name: str) -> None:
    function, kernels = MODELS[name]
    model, x = Weighted(function, *SHAPE).eval(), torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    built = as_on_a_gpu(model, x)
    assert [k.name for k in built.program.kernels] == kernels
    with torch.no_grad():
        torch.testing.assert_close(emulated(built, model, x), model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (F.normalize(x) * w).sum((2, 3)),  # over other dimensions than the rows
        lambda x, w: (F.normalize(x) * w).sum(1),  # over those alone
        lambda x, w: (F.normalize(x.half()) * w.half()).sum((1, 2)),  # which would be rounded in between
        lambda x, w: (x * w).sum((1, 2)),  # of no rows
        lambda x, w: (F.normalize(x) * w).prod(3).prod(2),
    ],
)
def test_whole(function: Function) -> None:
    graph = as_on_a_gpu(Weighted(function, *SHAPE).eval(), torch.randn(SHAPE)).rewritten.graph
    reductions = [n for n in graph.nodes() if isinstance(n.op, ops.Reduce)]
    assert all(split(n, graph.users()) is None for n in reductions)
