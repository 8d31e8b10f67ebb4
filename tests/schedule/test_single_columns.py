"""Products by one column as sums: the same values, where that saves a pass over their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated
from graph_passes import given, value
from torch import Tensor, nn

from fusewright import pipeline
from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.node import Graph
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.single_columns import as_sums

AT_ONCE = replace(LARGE_GPU, launch=0.0)  # so small as these are, nothing but launches would count


class Model(nn.Module):
    """A function of x and of a linear layer."""

    def __init__(self, then: Callable[[Tensor, nn.Module], Tensor], features: int, out: int = 1, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.then, self.linear = then, nn.Linear(features, out, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x, self.linear)


# More of a sample than one block would keep.
ROWS, TOKENS = (4, 12000), (2, 40, 400)
CASES: dict[str, tuple[Callable[[Tensor, nn.Module], Tensor], tuple[int, ...]]] = {
    "of what is computed": (lambda x, f: f(torch.tanh(x)), ROWS),
    "of tokens": (lambda x, f: f(torch.tanh(x) * 2).squeeze(-1), TOKENS),
    "a gate": (lambda x, f: x * torch.sigmoid(f(x)), TOKENS),
    "pooled by attention": (lambda x, f: (torch.softmax(f(torch.tanh(x)), 1) * x).sum(1), TOKENS),
    "a matrix of one column": (lambda x, f: torch.exp(x) @ f.weight.T, ROWS),
    "a norm ahead": (lambda x, f: f(torch.nn.functional.layer_norm(x, x.shape[-1:]) * x), ROWS),
}


def changed(model: nn.Module, x: Tensor, facts: Any = AT_ONCE) -> tuple[Graph, Tensor]:
    """The graph, and what it gives."""
    captured, hints, orders = given(model, x)
    found = as_sums(captured.graph, facts, hints, orders)
    return found, value(found, captured, model, x)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    then, shape = CASES[name]
    model, x = Model(then, shape[-1]).eval(), torch.randn(shape)
    found, result = changed(model, x)
    kinds = [type(n.op) for n in found.nodes()]
    assert ops.Matmul not in kinds and ops.Reduce in kinds
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), check_stride=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite(name: str, value: float) -> None:
    then, shape = CASES[name]
    model, x = Model(then, shape[-1]).eval(), torch.randn(shape)
    x[(0,) * (len(shape) - 1)][3] = value
    with torch.no_grad():
        torch.testing.assert_close(changed(model, x)[1], model(x), equal_nan=True)


LEFT: dict[str, tuple[nn.Module, Tensor]] = {
    "rows that lie in memory, for this alone": (Model(lambda x, f: f(x), 12000), torch.randn(ROWS)),
    "two columns": (Model(lambda x, f: f(torch.tanh(x)), 12000, out=2), torch.randn(ROWS)),
    "half precision": (Model(lambda x, f: f(torch.tanh(x)), 12000).half(), torch.randn(ROWS).half()),
    "a column for each sample": (Model(lambda x, f: torch.tanh(x) @ x[:, :1].mT, 400), torch.randn(TOKENS)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_they_are(name: str) -> None:
    model, x = LEFT[name]
    captured = capture(model.eval(), (x,), {})
    assert as_sums(captured.graph, AT_ONCE, dict.fromkeys(captured.graph.symbols, 6), {}) is captured.graph


def test_not_for_less_than_a_launch() -> None:
    model, x = Model(CASES["a gate"][0], 400).eval(), torch.randn(TOKENS)
    captured = capture(model, (x,), {})
    assert as_sums(captured.graph, LARGE_GPU, dict.fromkeys(captured.graph.symbols, 3), {}) is captured.graph


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("of what is computed", ["fused_tanh_mul_sum_add"]),
        ("a gate", ["fused_mul_sum_add_sigmoid_mul"]),
        ("pooled by attention", ["fused_tanh_mul_sum_add_softmax_mul_sum"]),
    ],
)
def test_one_kernel_reads_the_rows(name: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated, beside eager."""
    monkeypatch.setattr(pipeline, "as_sums", lambda graph, _, hints, orders: as_sums(graph, AT_ONCE, hints, orders))
    then, shape = CASES[name]
    model, x = Model(then, shape[-1]).eval(), torch.randn(shape)
    built = as_on_a_gpu(model, x)
    assert sorted(choice.name for choice in built.choices) == kernels
    with torch.no_grad():
        torch.testing.assert_close(emulated(built, model, x), model(x))


def test_a_product_in_training() -> None:
    """Its gradients take fewer passes."""
    model, x = Model(CASES["a gate"][0], 1024).train(), torch.empty(512, 64, 1024)
    assert "F.linear" in as_on_a_gpu(model, x).program.source
    assert "F.linear" not in as_on_a_gpu(model.eval(), x).program.source
