"""Functions that several see under another shape: the view comes first, and they are computed by who reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated
from graph_passes import given, value
from torch import Tensor, nn

from fusewright.ir import ops
from fusewright.ir.node import Graph
from fusewright.schedule.views_first import views_first

Function = Callable[..., Tensor]
IMAGES = (3, 2, 5, 8)


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.randn(2, 1, 1, generator=torch.manual_seed(0)))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.function(self, x, t)


def overlap(p: Tensor, t: Tensor) -> Tensor:
    return (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)


CASES: dict[str, Function] = {
    "one function": lambda m, x, t: overlap(torch.sigmoid(x).flatten(1), t.flatten(1)),
    "a chain": lambda m, x, t: overlap((torch.tanh(x) * 0.5 + 1).flatten(1), t.flatten(1)),
    "of two": lambda m, x, t: overlap(torch.sigmoid(x - t).view(x.shape[0], -1), t.flatten(1)),
    "rows of pictures": lambda m, x, t: (lambda p: p * p.sum(-1, keepdim=True))(torch.exp(x).flatten(0, 2)),
}


def changed(model: nn.Module, x: Tensor, t: Tensor) -> tuple[Graph, Graph, Tensor]:
    captured, _, orders = given(model, x, t)
    found = views_first(captured.graph, orders)
    return captured.graph, found, value(found, captured, model, x, t)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    model, x, t = Model(CASES[name]).eval(), torch.randn(IMAGES), torch.rand(IMAGES)
    _, found, result = changed(model, x, t)
    views = [n for n in found.nodes() if isinstance(n.op, ops.Reshape)]
    assert views and all(isinstance(n.arg(0).op, ops.Input) for n in views if n.ndim == 2)
    with torch.no_grad():
        torch.testing.assert_close(result, model(x, t), check_stride=True)


LEFT: dict[str, Function] = {
    "for one alone": lambda m, x, t: torch.sigmoid(x).flatten(1).sum(1),
    "read as it is, too": lambda m, x, t: overlap((p := torch.sigmoid(x)).flatten(1), t.flatten(1)) + p.sum((1, 2, 3)),
    "numbers per channel": lambda m, x, t: overlap((x * m.scale).flatten(1), t.flatten(1)),
    "a norm": lambda m, x, t: overlap(torch.softmax(x, 1).flatten(1), t.flatten(1)),
    "a view of what lies in memory": lambda m, x, t: overlap(x.flatten(1), t.flatten(1)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_they_are(name: str) -> None:
    before, after, _ = changed(Model(LEFT[name]).eval(), torch.randn(IMAGES), torch.rand(IMAGES))
    assert before is after


def test_what_lies_otherwise_is_copied_where_it_was() -> None:
    x = torch.randn(IMAGES).to(memory_format=torch.channels_last)
    before, after, _ = changed(Model(CASES["one function"]).eval(), x, torch.rand(IMAGES))
    assert before is after


def test_one_kernel() -> None:
    """Emulated, beside eager."""
    model, x, t = Model(CASES["one function"]).eval(), torch.randn(4, 2, 40, 300), torch.rand(4, 2, 40, 300)
    built = as_on_a_gpu(model, x, t)
    assert [choice.name for choice in built.choices] == ["fused_sigmoid_mul_sum_mul_add_sum_add_div"]
    with torch.no_grad():
        torch.testing.assert_close(emulated(built, model, x, t), model(x, t))
