"""Sample programs on a CPU: compiled, run, and compared with the same graph in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from codegen.cuda import test_sample_kernels as cases
from codegen.cuda.test_sample_kernels import B, fold, inp, softmax
from native_cases import quick, run
from torch import Tensor, nn

import fusewright
from fusewright.codegen.cpu.sample import kernel
from fusewright.ir.node import Node
from fusewright.kernel import Kernel

GOLDEN = Path(__file__).parents[2] / "golden"


def check(root: Node, tensors: dict[Node, Tensor] | None = None) -> Kernel:
    p = cases.program(root)
    k = kernel(p, "fused_test")
    given = tensors or {n: cases.random(n, i) for i, n in enumerate(p.leaves)}
    cases.compare(run(k, *(given[n] for n in p.leaves)), cases.reference(root, given), root.dtype)
    return k


@pytest.mark.parametrize("name", quick(cases.CASES, "founding", "head", "layer norm of two", "permute, then product"))
def test_value(name: str) -> None:
    check(cases.CASES[name]())


@pytest.mark.parametrize("kind", ["max", "min", "logsumexp", "sum", "mean", "softmax", "log_softmax"])
def test_special_values(kind: str) -> None:
    x = inp(0, B, 3)
    root = softmax(x, 1, kind == "log_softmax") if "softmax" in kind else fold(x, kind, 1)
    k = kernel(cases.program(root), "fused_test")
    for values in cases.SPECIAL.values():
        given = torch.tensor([values, [0.5, 1.5, -2.0]])
        torch.testing.assert_close(run(k, given), cases.reference(root, {x: given}).float(), equal_nan=True)


def test_long_sums_are_as_accurate_as_float64() -> None:
    x = 10 + torch.randn(2, 100_000)
    root = fold(inp(0, B, 100_000), "mean", 1)
    assert torch.equal(run(kernel(cases.program(root), "fused_test"), x), x.double().mean(1).float())


@pytest.mark.parametrize("batch", [0, 1, 700])
def test_any_batch(batch: int) -> None:
    root = cases.CASES["head"]()
    p = cases.program(root)
    given = {n: cases.random(n, i) for i, n in enumerate(p.leaves)}
    x = p.leaves[0]
    check(root, given | {x: torch.randn(batch, 12)} if batch else None)
    assert run(kernel(p, "fused_test"), *(given | {x: torch.empty(batch, 12).fill_(0.5)}).values()).shape == (batch, 10)


def test_golden() -> None:
    k = kernel(cases.program(cases.founding()), "fused_linear_add_logsumexp_mul")
    assert k.shapes == (("batch", "64", "1", "1"), ("128", "64"), ("128",), ("128", "1", "1"))
    assert k.source == (GOLDEN / "cpu_sample_linear_logsumexp.cpp").read_text()


@pytest.mark.parametrize("kind", ["amax", "amin"])
@pytest.mark.parametrize("length", [7, 32, 97])
def test_the_extreme_is_found_wherever_it_is(kind: str, length: int) -> None:
    """In whole vectors and in what is left of them, among infinities, and a NaN before all."""

    class Extreme(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = getattr(x, kind)(-1)
            return found

    rows = torch.randn(length, length)
    fast = fusewright.optimize(Extreme(), rows, kernels="always", measure=False)
    assert [choice.path for choice in fusewright.explain(fast).kernels] == ["generated"]
    for value in (math.nan, math.inf, -math.inf, 9.0, -9.0):
        x = rows.clone().fill_diagonal_(value)
        torch.testing.assert_close(fast(x), Extreme()(x), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(fast(x.fill_(value)), Extreme()(x), rtol=0, atol=0, equal_nan=True)
