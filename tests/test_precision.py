"""The precision contract: a rewritten float32 program is as accurate as eager, on inputs of mean 0, 1 and 10.

Against float64, root mean square error at most max(2x eager's, 1e-6 of the output's), worst element at most max(4x
eager's worst, a few eps of the sum of |w||x|).
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fusewright.pipeline import build

EPS = torch.finfo(torch.float32).eps


class Mean(nn.Module):
    """A layer and a mean over the given dimensions of its output."""

    def __init__(self, layer: nn.Module, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.dims = layer, dims

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(self.dims)


CASES = {
    "convtranspose mean": (lambda: Mean(nn.ConvTranspose2d(8, 16, 3), (2, 3)), (4, 8, 96, 96)),
    "convtranspose cropped mean": (lambda: Mean(nn.ConvTranspose2d(8, 16, 4, 2, 1), (2, 3)), (4, 8, 64, 64)),
    "conv strided dilated mean": (lambda: Mean(nn.Conv2d(8, 16, 3, 2, 1, 2), (2, 3)), (4, 8, 96, 96)),
    "conv3d mean over depth": (lambda: Mean(nn.Conv3d(4, 8, 3), (2,)), (2, 4, 24, 16, 16)),
    "conv avg pool": (lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.AvgPool2d(4)), (4, 8, 64, 64)),
    "conv1d adaptive pool": (lambda: nn.Sequential(nn.Conv1d(8, 16, 7), nn.AdaptiveAvgPool1d(5)), (4, 8, 2048)),
    "grouped conv mean": (lambda: Mean(nn.Conv2d(8, 16, 5, groups=4, padding=2), (1, 2, 3)), (4, 8, 64, 64)),
    "linear mean over tokens": (lambda: Mean(nn.Linear(64, 128), (1,)), (4, 256, 64)),
    "linear mean over features": (lambda: Mean(nn.Linear(256, 512), (1,)), (64, 256)),
}


@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("name", CASES)
def test_as_accurate_as_eager(name: str, mean: float) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randn(shape) + mean
    built = build(model, (x,), {}, mode="always")
    assert any(fired.exactness == "reassociates" for fired in built.rewritten.fired)
    derive, forward = built.program.functions()
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
        ours, eager = (y.double() - truth for y in (forward(model, x, *derive(model)), model(x)))
    scale = float(truth.square().mean().sqrt())
    rms, rms_eager = (float(e.square().mean().sqrt()) for e in (ours, eager))
    assert rms <= max(2 * rms_eager, 1e-6 * scale)
    magnitude = float(_sum_of_magnitudes(model, x).max())
    assert float(ours.abs().max()) <= max(4 * float(eager.abs().max()), 8 * EPS * magnitude)


def _sum_of_magnitudes(model: nn.Module, x: Tensor) -> Tensor:
    """The sum of |w||x| (and |b|) that each output adds up."""
    absolute = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in absolute.parameters():
            parameter.abs_()
        return absolute(x.double().abs())
