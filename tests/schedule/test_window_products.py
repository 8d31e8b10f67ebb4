"""Convolutions of few windows as products of these by the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from torch import Tensor, nn

from fusewright import pipeline, tuning
from fusewright.capture import capture
from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.memory_order import order_of
from fusewright.ir.node import Graph
from fusewright.reduced import shape
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.cost import CostModel
from fusewright.schedule.window_products import as_products
from fusewright.trial import _is_rewritten
from tests.capture.harness import Fn

Then = Callable[[Tensor, nn.Module], Tensor]
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Model(nn.Module):
    """A convolution, and what follows it: (N, C, *L) to (N, O, *P)."""

    def __init__(self, channels: int, features: int, kernel: tuple[int, ...], then: Then | None = None, **how: Any):
        super().__init__()
        torch.manual_seed(0)
        self.conv = CONVOLUTIONS[len(kernel)](channels, features, kernel, **how)
        self.scale = nn.Parameter(torch.rand(features, *(1,) * len(kernel)) + 0.5)
        self.then = then or (lambda y, m: y)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.conv(x), self)


@dataclass(frozen=True)
class Case:
    """x of this shape, its windows `kernel`, and what else a convolution has."""

    shape: tuple[int, ...]
    features: int
    kernel: tuple[int, ...]
    how: dict[str, Any]
    then: Then | None = None

    def model(self) -> Model:
        return Model(self.shape[1], self.features, self.kernel, self.then, **self.how).eval()


def flattened(y: Tensor, m: nn.Module) -> Tensor:
    return y.flatten(2).transpose(1, 2)


CASES = {
    "patches": Case((2, 3, 16, 24), 20, (8, 8), {"stride": 8}),
    "patches, in rows": Case((2, 3, 16, 24), 20, (8, 8), {"stride": 8}, flattened),
    "patches, channels last": Case(
        (2, 3, 16, 24), 20, (8, 8), {"stride": 8}, lambda y, m: y.permute(0, 2, 3, 1).contiguous() * 2
    ),
    "a signal": Case((3, 5, 41), 12, (7,), {"stride": 6, "bias": False}),
    "a signal, turned": Case((3, 5, 41), 12, (7,), {"stride": 6}, lambda y, m: y.transpose(1, 2).relu()),
    "dilated and padded": Case((2, 4, 19, 17), 6, (3, 4), {"stride": (7, 8), "dilation": (2, 1), "padding": (1, 2)}),
    "few positions of volumes": Case((2, 3, 9, 8, 10), 30, (5, 4, 3), {"stride": (3, 4, 4), "padding": (1, 0, 1)}),
    "a function": Case((2, 3, 16, 16), 20, (8, 8), {"stride": 8}, lambda y, m: F.gelu(y * m.scale)),
    "its mean": Case((2, 3, 16, 16), 20, (8, 8), {"stride": 8}, lambda y, m: torch.tanh(y * m.scale).mean((2, 3))),
    "over channels": Case((2, 3, 16, 16), 20, (8, 8), {"stride": 8}, lambda y, m: torch.logsumexp(y * 2, 1)),
    "over all": Case((2, 3, 16, 16), 20, (8, 8), {"stride": 8}, lambda y, m: torch.logsumexp(y * 2, (1, 2, 3))),
    "pooled": Case((2, 3, 16, 16), 20, (4, 4), {"stride": 4}, lambda y, m: F.max_pool2d(y, 2)),
    "others read it": Case((2, 3, 16, 24), 20, (8, 8), {"stride": 8}, lambda y, m: flattened(y, m).sum(1) + y[..., 0, 0]),
    "of many positions": Case((2, 3, 32, 36), 20, (4, 4), {"stride": 4}, lambda y, m: F.gelu(y * m.scale)),
    "of many positions, turned": Case(
        (2, 3, 32, 36), 20, (4, 4), {"stride": 4}, lambda y, m: flattened(y, m) * 2 + torch.linspace(0, 1, 72)[:, None]
    ),
    "of what is computed": Case((2, 3, 16, 24), 20, (8, 8), {"stride": 8}),
}  # fmt: skip


def run(model: nn.Module, x: Tensor, *, always: bool = True) -> tuple[Graph, Graph, int, Tensor]:
    """The graph before and after, how many products there are, and what that gives."""
    captured = capture(model, (x,), {})
    (given,) = captured.graph.inputs
    hints = {symbol: x.shape[where.dim] for symbol, where in captured.graph.symbols.items()}
    orders = {given: order_of(x, given)}
    cost = CostModel(LARGE_GPU, hints, derived_ahead=True)
    found, products = as_products(captured.graph, cost, orders, always=always)
    assert bool(products) == (found is not captured.graph)
    derive, forward = lower(found, None, captured.constants).functions()
    with torch.no_grad():
        return captured.graph, found, products, forward(model, x, *derive(model))[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products(name: str, dtype: torch.dtype) -> None:
    """As the model has it, and as that lies in memory; of a batch of any size."""
    case = CASES[name]
    model, x = case.model().to(dtype), torch.randn(case.shape, dtype=dtype)
    _, found, products, result = run(model, x)
    assert products == 1 and not any(isinstance(n.op, ops.Conv) for n in found.nodes())
    assert found.symbols
    tolerance: dict[str, float] = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), check_stride=True, **tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels, which are emulated: the windows are written by one, and others do what follows the product."""
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    case = CASES[name]
    model, x = case.model(), torch.randn(case.shape)
    built = as_on_a_gpu(model, x, mode="always")
    assert built.windows == 1 and "conv" not in built.program.source.partition("def forward")[2].replace("self.conv", "")
    families = [c.family for c in built.choices]
    assert "rearrangement" in families and {"matmul", "product"} & {*families}, families
    wide = case.model().double()
    for batch in (x, torch.randn(5, *case.shape[1:])):
        result = emulated(built, model, batch)
        with torch.no_grad():
            torch.testing.assert_close(result.double(), wide(batch.double()), rtol=1e-4, atol=1e-5)
            assert result.stride() == model(batch).stride()
