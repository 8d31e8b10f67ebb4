"""Variances and deviations over dimensions that are not the last ones, as models have them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from dropin import fast, kernels_of
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

from fusewright import pipeline


class Instance(nn.Module):
    """Series are normalised, mapped by a layer, and taken back (RevIN)."""

    def __init__(self, length: int, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(features) + 0.5), nn.Parameter(torch.randn(features))
        self.layer = nn.Linear(length, 24)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        deviation = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        y = (x - mean) / deviation * self.weight + self.bias
        return self.layer(y.transpose(1, 2)).transpose(1, 2) * deviation + mean


class Standardised(nn.Module):
    """By the statistics of a batch, which are returned as well (Barlow twins, VICReg)."""

    def __init__(self, correction: float = 1) -> None:
        super().__init__()
        self.correction = correction

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        deviation = torch.std(x, 0, correction=self.correction)
        return (x - x.mean(0)) / (deviation + 1e-4), deviation


class Minibatch(nn.Module):
    """How far samples of groups are from each other (a discriminator's layer)."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.view(4, -1, *x.shape[1:])
        return groups.std(0, unbiased=False).mean((1, 2, 3))


class Both(nn.Module):
    """Of several dimensions in the middle."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.var(x, (1, 2), correction=2), x.mean((1, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "instance": (lambda: Instance(70, 8), (3, 70, 8)),
    "standardised": (Standardised, (90, 24)),
    "standardised, in parts": (lambda: Standardised(0), (700, 10)),
    "minibatch": (Minibatch, (8, 20, 30, 32)),
    "middle": (Both, (3, 20, 7, 12)),
}


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, pipeline.Built]:
    """A model, an input and its program, in which one kernel finds the statistics and reads once for them."""
    torch.manual_seed(1)
    make, shape = MODELS[name]
    model, x = make().to(dtype).eval(), torch.randn(shape).to(dtype)
    built = as_on_a_gpu(model, x)
    text = built.program.source
    assert not any(call in text for call in ("torch.std(", "torch.var(", ".mean("))
    statistics = [k for k in built.program.kernels if any(word in k.name for word in ("std", "var", "mean"))]
    assert len(statistics) == 1 and statistics[0].source.count("load<VALUES<WIDE>>(d.x") == 1
    return model, x, built


def results(y: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_one_kernel_reads_once(name: str, dtype: torch.dtype) -> None:
    model, x, built = made(name, dtype)
    got, eager = results(emulated(built, model, x)), results(model(x))
    truth = results(model.double()(x.double()))
    for one, other, wanted in zip(got, eager, truth, strict=True):
        assert one.dtype == dtype and one.stride() == other.stride()
        error, allowed = ((y - wanted).abs().max() for y in (one, other))
        assert error <= 2 * allowed + 8 * torch.finfo(dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_a_large_mean(name: str) -> None:
    model, x, built = made(name, torch.float32)
    x = x + 1e4
    got, eager = results(emulated(built, model, x)), results(model(x))
    truth = results(model.double()(x.double()))
    for one, other, wanted in zip(got, eager, truth, strict=True):
        assert (one - wanted).abs().max() <= 1.5 * (other - wanted).abs().max() + 1e-6


@pytest.mark.parametrize("value", [nan, inf, -inf], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_what_is_not_finite(name: str, value: float) -> None:
    model, x, built = made(name, torch.float32)
    x.view(-1)[7] = value
    for one, other in zip(results(emulated(built, model, x)), results(model(x)), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-5, atol=1e-5)
        assert one.isfinite().any() and not one.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_gradients_are_eagers(name: str) -> None:
    """Where none is asked for, a CPU's kernels compute the same."""
    torch.manual_seed(2)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    ours = fast(model, x, rewrite="cost", kernels="always")
    assert any("std" in k.name or "var" in k.name for k in kernels_of(ours))
    with torch.no_grad():
        for one, other in zip(results(ours(x)), results(model(x)), strict=True):
            torch.testing.assert_close(one, other)
    grads = []
    for m in (ours, model):
        z = x.clone().requires_grad_()
        torch.cat([y.square().flatten() for y in results(m(z))]).sum().backward()
        grads.append(z.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
