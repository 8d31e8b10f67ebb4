"""Rare arguments of functions, wherever functions are applied: what a quick loop left out is computed again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusewright

inf, nan = float("inf"), float("nan")


class Chain(nn.Module):
    """A layer, or nothing, and functions."""

    def __init__(self, layer: nn.Module, chain: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.chain = layer, chain

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(self.layer(x))


CASES: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "pointwise": (nn.Identity(), lambda x: x.sin() + x.exp(), (3, 2000)),
    "powers": (nn.Identity(), lambda x: (x.abs() ** 1.3).mean(-1), (40, 700)),
    "rows": (nn.Identity(), lambda x: x.cos().mean(-1), (40, 700)),
    "columns": (nn.Identity(), lambda x: x.sin().amax(1), (4, 30, 50)),
    "before a window": (nn.Identity(), lambda x: F.max_pool2d(x.sin(), 3, 2), (2, 3, 9, 300)),
    "after a window": (nn.Identity(), lambda x: F.avg_pool2d(x, 2).abs().log(), (2, 3, 8, 300)),
    "planes": (nn.Identity(), lambda x: F.max_pool2d(x.sin(), 2).exp(), (2, 20, 8, 8)),
    "planes, reduced": (nn.Identity(), lambda x: F.avg_pool2d(x.cos(), 2).sum((2, 3)), (2, 35, 8, 8)),
    "convolution": (nn.Conv2d(3, 21, 3), lambda x: x.sin(), (2, 3, 9, 30)),
    "logarithm of one": (nn.Conv2d(3, 21, 3), lambda x: (x + 0.3).abs().log().mean((2, 3)), (2, 3, 9, 30)),
    "behind its window": (nn.Conv2d(3, 21, 3), lambda x: F.max_pool2d(x, 2).cos().sum(1), (2, 3, 10, 30)),
    "transposed": (nn.ConvTranspose2d(4, 40, 2), lambda x: x.sin().logsumexp(1), (2, 4, 9, 13)),
    "product": (nn.Linear(24, 40), lambda x: F.silu(x).mean(1), (3, 30, 24)),
}  # fmt: skip


@pytest.mark.parametrize("rare", [None, nan, inf, -inf, 7168.0, 1e38, 1e-41])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_rare(name: str, rare: float | None) -> None:
    layer, chain, shape = CASES[name]
    model, x = Chain(layer, chain).requires_grad_(False), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x = x if isinstance(layer, nn.Identity) else eighths(x)
    for parameter in layer.parameters():
        parameter.copy_(eighths(4 * parameter))
    fast = fusewright.optimize(model, x, kernels="always", verify=False, measure=False)
    assert any(c.path == "generated" for c in fusewright.explain(fast).kernels)
    if rare is not None:
        x.view(-1)[x.numel() // 3] = rare
    want = Chain(layer, chain)(x) if name == "pointwise" else wide(layer, chain, x)
    torch.testing.assert_close(fast(x), want, rtol=2e-5, atol=2e-6, equal_nan=True)


def eighths(x: Tensor) -> Tensor:
    """Numbers of which sums of products are exact, for a function of a large number tells any rounding."""
    return (8 * x).round() / 8


def wide(layer: nn.Module, chain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """In float64 behind the layer."""
    return chain(layer(x).double()).float()
