"""Norms of short rows that a reduction over more than a row reads: rows are kept for what they are made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, emulated
from graph_passes import given, value
from torch import Tensor, nn

from fusewright.ir import ops
from fusewright.ir.node import Graph
from fusewright.schedule.reduced_norms import of_norms

Function = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, norm: nn.Module, then: Function) -> None:
        super().__init__()
        self.norm, self.then = norm, then
        for i, parameter in enumerate(self.norm.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.norm(x))


# A norm, what follows it, and the shape of x.
CASES: dict[str, tuple[nn.Module, Function, tuple[int, ...]]] = {
    "groups": (nn.GroupNorm(4, 64), lambda y: y.amin(1, keepdim=True), (5, 64)),
    "groups and a function": (nn.GroupNorm(2, 48, eps=1e-3), lambda y: torch.tanh(y * 2 - 1).mean(1), (7, 48)),
    "groups of sequences": (nn.GroupNorm(3, 12), lambda y: F.relu(y).sum((1, 2)), (4, 12, 10)),
    "groups of no weights": (nn.GroupNorm(4, 64, affine=False), lambda y: y.abs().amax(1), (5, 64)),
    "layers": (nn.LayerNorm(32), lambda y: y.amax((1, 2)), (6, 5, 32)),
    "root mean squares": (nn.RMSNorm(64), lambda y: (y + 1).square().mean((1, 2)), (3, 5, 64)),
    "instances": (nn.InstanceNorm1d(6, affine=True), lambda y: torch.exp(y).sum((1, 2)), (5, 6, 40)),
}


def changed(model: nn.Module, x: Tensor) -> tuple[Graph, Graph, Tensor]:
    captured, _, orders = given(model, x)
    found = of_norms(captured.graph, orders)
    return captured.graph, found, value(found, captured, model, x)


def is_normalised(graph: Graph) -> bool:
    return any(isinstance(n.op, ops.Norm) for n in graph.nodes())


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    norm, then, shape = CASES[name]
    model, x = Model(norm, then).eval(), torch.randn(shape) * 3 + 1
    before, after, result = changed(model, x)
    assert is_normalised(before) and not is_normalised(after)
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_kept(name: str) -> None:
    """Emulated, beside float64."""
    norm, then, shape = CASES[name]
    model, x = Model(norm, then).eval(), torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3 + 1
    built = as_on_a_gpu(model, x)
    assert "kept rows" in [c.family for c in built.choices]
    with torch.no_grad():
        want = Model(norm, then).eval().double()(x.double())
    torch.testing.assert_close(emulated(built, model.float(), x).double(), want, rtol=2e-5, atol=2e-5)


LEFT: dict[str, tuple[nn.Module, Function, tuple[int, ...]]] = {
    "a row alone": (nn.LayerNorm(32), lambda y: y.amax(2), (6, 5, 32)),
    "other rows": (nn.LayerNorm(32), lambda y: y.amax(1), (6, 5, 32)),
    "long rows": (nn.GroupNorm(2, 1024), lambda y: y.amin(1), (5, 1024)),
    "read otherwise, too": (nn.GroupNorm(4, 64), lambda y: y * y.amin(1, keepdim=True), (5, 64)),
    "read twice": (nn.GroupNorm(4, 64), lambda y: (y * torch.sigmoid(y)).amin(1), (5, 64)),
    "images": (nn.GroupNorm(4, 8), lambda y: y.sum((1, 2, 3)), (3, 8, 4, 4)),
    "statistics of the batch": (nn.BatchNorm1d(64), lambda y: y.amin(1), (5, 64)),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_they_are(name: str) -> None:
    norm, then, shape = LEFT[name]
    before, after, _ = changed(Model(norm, then).eval(), torch.randn(shape))
    assert before is after


def test_half_precisions_are_left() -> None:
    before, after, _ = changed(
        Model(nn.GroupNorm(4, 64), lambda y: y.amin(1)).eval().bfloat16(), torch.randn(5, 64).bfloat16()
    )
    assert before is after
