"""The largest and the smallest along a dimension, whose gradient goes to the first of several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright import pipeline
from fusewright.ir import ops

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "max over channels": lambda y: torch.max(y, dim=1, keepdim=True)[0],
    "min over channels, a function behind": lambda y: torch.tanh(torch.min(y, 1)[0]),
    "max over rows": lambda y: y.relu().max(dim=2).values,
    "min over columns of a permuted image": lambda y: y.permute(0, 2, 3, 1).min(-2).values,
    "max over what a pool leaves": lambda y: nn.functional.max_pool2d(y, 2).max(1).values,
    "of a scaled image": lambda y: torch.max(-2 * y, 3)[0],
}


class Model(nn.Module):
    """Every feature is there twice, every column as well, so that there always are several."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 1)
        self.reduce = reduce
        with torch.no_grad():
            self.conv.weight[3:] = self.conv.weight[:3]
            self.conv.bias[3:] = self.conv.bias[:3]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.conv(x))


def assert_as_eager(model: nn.Module, ours: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Values and all gradients, of results that are weighed one otherwise than the next."""
    results = []
    for call in (model, ours):
        given = x.clone().requires_grad_()
        value = call(given)
        weights = torch.linspace(1, 2, value.numel()).view_as(value)
        results.append((value.detach(), *torch.autograd.grad((value * weights).sum(), (given, *model.parameters()))))
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_values_and_gradients_are_eagers(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(CASES[name]), torch.randn(3, 4, 8, 4).repeat(1, 1, 1, 2)
    built = pipeline.build(model, (x,), {}, mode="always", kernels="always", measure=False)
    derive, forward = built.program.functions()

    def ours(given: Tensor) -> Tensor:  # the drop-in module would leave calls with gradients to the original
        found: Tensor = forward(model, given, *derive(model))
        return found

    assert_as_eager(model, ours, x)
    assert any(choice.path == "generated" and choice.family == "contraction" for choice in built.choices)
    assert not any(isinstance(n.op, ops.Opaque) for n in built.captured.graph.nodes())


@pytest.mark.parametrize("reduce", [torch.max, torch.min])
def test_of_all_elements_gradients_are_shared(reduce: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Model(lambda y: reduce(y.tanh())), torch.randn(3, 4, 8, 4).repeat(1, 1, 1, 2)
    built = pipeline.build(model, (x,), {}, mode="always", kernels="always", measure=False)
    assert not any(isinstance(n.op, ops.Opaque) for n in built.captured.graph.nodes())
    assert any(choice.path == "generated" for choice in built.choices)
    derive, forward = built.program.functions()
    results = []
    for call in (model, lambda given: forward(model, given, *derive(model))):
        given = x.clone().requires_grad_()
        value = call(given)
        results.append((value.detach(), *torch.autograd.grad(value, (given, *model.parameters()))))
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager)


def test_products_reduce_so_too() -> None:
    """A linear layer and the largest of its features, as heads have it."""
    torch.manual_seed(0)
    x = torch.randn(64, 160)
    model = nn.Sequential(nn.Linear(160, 192), nn.GELU(), Largest())
    fused = fusewright.optimize(model, (x,), rewrite="always", kernels="always", measure=False)
    families = [choice.family for choice in fusewright.explain(fused).kernels if choice.path == "generated"]
    assert "product" in families
    torch.testing.assert_close(fused(x), model(x))


class Largest(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return y.max(dim=1, keepdim=True).values


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "a max pool of all": lambda y: nn.functional.max_pool2d(y, y.shape[2:]),
    "an adaptive one": lambda y: nn.functional.adaptive_max_pool2d(y.relu(), 1).flatten(1),
    "along rows": lambda y: nn.functional.max_pool1d(y.flatten(2), 64).squeeze(2),
    "an average pool of all": lambda y: nn.functional.avg_pool2d(y.relu(), (8, 8)),
}


@pytest.mark.parametrize("name", POOLS)
def test_one_window_of_all_is_a_reduction(name: str) -> None:
    """Behind a convolution in one kernel, with the gradient of the pool: to the first of several."""
    torch.manual_seed(0)
    model, x = Model(POOLS[name]), torch.randn(3, 4, 8, 4).repeat(1, 1, 1, 2)
    built = pipeline.build(model, (x,), {}, mode="always", kernels="always", measure=False)
    assert not any(isinstance(n.op, ops.Pool | ops.Opaque) for n in built.captured.graph.nodes())
    assert [choice.family for choice in built.choices if choice.path == "generated"] == ["contraction"]
    derive, forward = built.program.functions()
    assert_as_eager(model, lambda given: forward(model, given, *derive(model)), x)


@pytest.mark.parametrize("more", [{"padding": 1}, {"dilation": 2}, {"stride": 1, "kernel": 7}], ids=str)
def test_other_windows_are_pools(more: dict[str, int]) -> None:
    kernel = more.get("kernel", 4 if "dilation" in more else 8)
    pool = nn.MaxPool2d(kernel, more.get("stride", 8), more.get("padding", 0), more.get("dilation", 1))
    built = pipeline.build(Model(pool), (torch.randn(3, 4, 8, 8),), {}, measure=False)
    assert any(isinstance(n.op, ops.Pool) for n in built.captured.graph.nodes())


def test_averages_of_integers_stay_a_pool() -> None:
    """A mean has none, and eager's pool on a CPU does."""

    class Pooled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.avg_pool2d(x, 4)

    model, x = Pooled(), torch.arange(32).view(1, 2, 4, 4)
    derive, forward = pipeline.build(model, (x,), {}, measure=False).program.functions()
    assert torch.equal(forward(model, x, *derive(model)), model(x))
