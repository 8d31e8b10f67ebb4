"""Kernels that write, beside their last value, what they compute on the way and others read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

from fusewright import pipeline


class Residuals(nn.Module):
    """x + f(norm(x)), as in transformers; what f moves is no part of the kernels around it."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = x + torch.tanh(norm(x).flip(-1).contiguous() * 2).roll(3, 1)
        return x


class Both(nn.Module):
    """A sum and its norm, both returned."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(x) + 1
        return h, self.norm(h)


class Attention(nn.Module):
    """Channels and positions by their mean and their maximum (CBAM)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(channels, 4), nn.ReLU(), nn.Linear(4, channels))
        self.conv = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.sigmoid(self.shared(x.mean((2, 3))) + self.shared(x.amax((2, 3))))[:, :, None, None]
        both = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return x * torch.sigmoid(self.conv(both))


class Cell(nn.Module):
    """Steps of a recurrent cell."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * features, 4 * features)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = c = torch.zeros_like(x[0])
        for step in x:
            i, f, g, o = self.gates(torch.cat([step, h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class Product(nn.Module):
    """Of complex numbers, real and imaginary parts apart."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c, d = x.unbind(0)
        return a * c - b * d, a * d + b * c


def several(built: pipeline.Built) -> list[str]:
    return [kernel.name for kernel in built.program.kernels if kernel.also]


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(64), (3, 40, 64)),
    "rms": (lambda: nn.RMSNorm(36), (3, 40, 36)),
    "group": (lambda: nn.GroupNorm(4, 16), (2, 16, 8, 12)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.sampled
def test_residual_streams(name: str, dtype: torch.dtype) -> None:
    """Every sum but the last is written by the kernel that normalises it."""
    make, shape = NORMS[name]
    model, x = Residuals(make(), make(), make()).to(dtype).eval(), torch.randn(shape).to(dtype)
    built = as_on_a_gpu(model, x)
    assert len(several(built)) == 1 and sum(several(built)[0] in line for line in built.program.source.split("\n")) == 2
    got, eager = emulated(built, model, x), model(x)
    truth = model.double()(x.double())
    assert (got - truth).abs().max() <= 2 * (eager - truth).abs().max()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "attention": (lambda: Attention(24), (2, 24, 40, 44), 2),
    "cell": (lambda: Cell(40), (3, 30, 40), 1),
    "product": (Product, (4, 20, 64), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_side_by_side(name: str, dtype: torch.dtype) -> None:
    make, shape, calls = MODELS[name]
    torch.manual_seed(0)
    model, x = make().to(dtype).eval(), torch.randn(shape).to(dtype)
    built = as_on_a_gpu(model, x)
    text = built.program.source.split("\n")
    assert sum(any(f" {kernel}(" in line for kernel in several(built)) for line in text) == calls
    got, eager = emulated(built, model, x), model(x)
    truth = model.double()(x.double())
    for one, other, wanted in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, eager, truth)), strict=True):
        assert one.stride() == other.stride()
        assert (one - wanted).abs().max() <= 2 * (other - wanted).abs().max() + torch.finfo(dtype).eps


@pytest.mark.parametrize("last", [False, True])
def test_results_that_are_returned(last: bool) -> None:
    """They lie in memory as in eager, or no kernel writes them."""
    model, x = Both(nn.GroupNorm(2, 8)).eval(), torch.randn(2, 8, 6, 10)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    built = as_on_a_gpu(model, x)
    assert len(several(built)) == (not last)
    got, want = emulated(built, model, x), model(x)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    assert not {t.untyped_storage().data_ptr() for t in got[:1]} & {t.untyped_storage().data_ptr() for t in got[1:]}


def test_gradients() -> None:
    """Those of the reference, to whichever result they flow."""
    model, x = Both(nn.LayerNorm(24)), torch.randn(5, 7, 24, requires_grad=True)
    built = as_on_a_gpu(model.eval(), x)
    assert several(built)
    derive, forward = built.program.functions()
    given = (x, *model.parameters())
    for take in (lambda h, y: h.square() + y, lambda h, y: y.sin(), lambda h, y: h):
        ours, theirs = (
            torch.autograd.grad(take(*results).sum(), given, allow_unused=True)
            for results in (forward(model, x, *derive(model)), model(x))
        )
        torch.testing.assert_close(ours, theirs)


def test_a_cpu_has_none() -> None:
    model, x = Both(nn.LayerNorm(24)).eval(), torch.randn(5, 7, 24)
    built = pipeline.build(model, (x,), {}, kernels="always", measure=False)
    assert built.program.kernels and not several(built)
