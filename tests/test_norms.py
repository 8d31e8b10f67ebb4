"""Norms of large samples on a GPU: models whose kernels are emulated, and gradients through their references."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

import fusewright
from fusewright import pipeline


class Residual(nn.Module):
    """x (N, C, H, W) with its norm, and a logsumexp over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(x + nn.functional.hardswish(torch.tanh(self.norm(x))), 1, keepdim=True)


class SpelledOut(nn.Module):
    """The RMS norm of language models, which compute it in float32 whatever they are of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Scores(nn.Module):
    """Of windows, to which one mask is added."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.randn(40, 24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * 0.25 + self.mask, -1) * 2.0


class OfPositions(nn.Module):
    """Shares of all positions of an image, which a number per channel multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x.flatten(2), 2).view_as(x) * self.scale


class OfChannels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.log_softmax(x, 1) + 2.0)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "layer": (lambda: nn.Sequential(nn.LayerNorm(64), nn.GELU()), (3, 80, 64), "fused_layernorm_gelu"),
    "rms, spelled out": (SpelledOut, (3, 50, 96), "fused_rmsnorm_mul"),
    "rms": (lambda: nn.Sequential(nn.RMSNorm(96), nn.SiLU()), (3, 50, 96), "fused_rmsnorm_silu"),
    "group, residual": (Residual, (3, 16, 18, 20), "fused_groupnorm_tanh_hardswish_add_logsumexp"),
    "group, pooled": (
        lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.MaxPool2d(4), nn.Hardtanh(0.0, 1.0)),
        (3, 8, 24, 25),
        "fused_groupnorm_max_hardtanh",
    ),
    "softmax of rows": (Scores, (3, 5, 40, 24), "fused_mul_add_softmax_mul"),
    "softmax of positions": (OfPositions, (3, 6, 40, 25), "fused_softmax_mul"),
    "softmax of channels": (OfChannels, (3, 18, 20, 21), "fused_logsoftmax_add_sigmoid"),
    "instance": (
        lambda: nn.Sequential(nn.Sigmoid(), nn.InstanceNorm2d(4, affine=True), nn.ReLU()),
        (3, 4, 33, 35),
        "fused_sigmoid_instancenorm_relu",
    ),
}


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_forward(name: str, mean: float) -> None:
    make, shape, kernel = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape) + mean
    built = as_on_a_gpu(model, x)
    assert [(c.name, c.family) for c in built.choices] == [(kernel, "normalization")]
    got, want = emulated(built, model, x).double(), copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 + 1e-7 * mean)
    more = torch.cat([x, x - mean])  # another batch
    torch.testing.assert_close(emulated(built, model, more)[: len(x)].double(), got, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_backward(name: str) -> None:
    make, shape, _ = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randn(shape, requires_grad=True)
    derive, forward = as_on_a_gpu(model, x.detach()).program.functions()
    weight = torch.randn_like(model(x))
    wanted = torch.autograd.grad((model(x) * weight).sum(), [x, *model.parameters()])
    found = torch.autograd.grad((forward(model, x, *derive(model)) * weight).sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, wanted)


def test_channels_last_input() -> None:
    """Read as it is seen, row by row; eager's reductions write so as well."""
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(3, 16, 18, 20).to(memory_format=torch.channels_last)
    built = as_on_a_gpu(model, x)
    assert [c.family for c in built.choices] == ["normalization"]
    torch.testing.assert_close(emulated(built, model, x), model(x))


def test_small_samples_are_rows_where_nothing_else_is_done() -> None:
    x = torch.randn(3, 20, 64)
    built = as_on_a_gpu(nn.Sequential(nn.LayerNorm(64), nn.GELU()), x)
    assert [c.family for c in built.choices] == ["normalization"]
    built = as_on_a_gpu(nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.LayerNorm(64)), x)
    assert [c.family for c in built.choices] == ["sample program"]


def test_a_cpu_keeps_its_own() -> None:
    built = pipeline.build(Residual(), (torch.randn(3, 16, 18, 20),), {}, kernels="always", measure=False)
    assert "normalization" not in {c.family for c in built.choices}


class ChannelsLast(nn.Module):
    """A norm over channels that are last for its sake alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(torch.relu(self.conv(x))).permute(0, 2, 3, 1)
        mean = y.mean(-1, keepdim=True)
        return ((y - mean) / torch.sqrt((y - mean).pow(2).mean(-1, keepdim=True) + 1e-6)).permute(0, 3, 1, 2)


def test_a_norm_that_would_lie_otherwise_is_left_spelled_out() -> None:
    model, x = ChannelsLast(), torch.randn(2, 3, 9, 9)
    f = fusewright.optimize(model, (x,), rewrite="always", kernels="never", measure=False)
    plan = fusewright.explain(f)
    assert plan.status == "rewritten" and plan.verdict is not None and plan.verdict.ok, plan.reason
    assert f(x).stride() == model(x).stride()


def test_inputs_in_another_order_have_results_in_it() -> None:
    model, x = SpelledOut(), torch.randn(50, 3, 96)
    f = fusewright.optimize(model, (x,), rewrite="always", kernels="never", measure=False)
    assert fusewright.explain(f).rules and fusewright.explain(f).status == "rewritten", fusewright.explain(f).reason
    turned = torch.randn(3, 50, 96).transpose(0, 1)
    assert f(turned).stride() == model(turned).stride()
