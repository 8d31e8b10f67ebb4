"""Images with channels last: the model's values, in memory as the model's, and what convolutions take with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from fusewright.pipeline import Built, build


class Function(nn.Module):
    """`f` of a few convolutions and an image."""

    def __init__(self, f: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.f = f
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.wide = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.deep = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.norm, self.layer = nn.BatchNorm2d(8), nn.LayerNorm(8)
        self.scale, self.fc = nn.Parameter(torch.randn(8, 1, 1)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.f(self, x)


def model(f: Callable[[Any, Tensor], Any]) -> Function:
    torch.manual_seed(0)
    made = Function(f).eval()
    with torch.no_grad():
        made.norm.running_mean.normal_()
        made.norm.running_var.uniform_(0.5, 1.5)
    return made


def turned(made: nn.Module, x: Tensor) -> Built:
    return build(made, (x,), {}, kernels="never", measure=False, last=True)


def image(batch: int = 2) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 8, 6, 7)


# What it is, how many convolutions are turned, and how many copies into another order the text has at most.
CASES: dict[str, tuple[Callable[[Any, Tensor], Any], int, int]] = {
    "one": (lambda m, x: m.a(x), 1, 2),
    "relu": (lambda m, x: torch.relu(m.a(x)).mean((2, 3)), 1, 1),
    "residual": (lambda m, x: F.relu(m.b(F.relu(m.a(x))) + x).mean((2, 3)), 2, 1),
    "residual in front": (lambda m, x: F.relu(x + m.a(x)).mean((2, 3)), 1, 1),
    "both": (lambda m, x: F.relu(m.a(x) + m.b(x)).mean((2, 3)), 2, 1),
    "used twice": (lambda m, x: (F.relu(y := m.a(x)) * y).mean((2, 3)), 1, 1),
    "itself": (lambda m, x: F.relu((y := m.a(x)) + y).mean((2, 3)), 1, 1),
    "strided": (lambda m, x: F.silu(m.wide(m.deep(x))).mean((2, 3)), 2, 1),
    "pools": (lambda m, x: F.avg_pool2d(F.max_pool2d(m.a(x), 3, 2, 1, ceil_mode=True), 2).mean((2, 3)), 1, 1),
    "normed": (lambda m, x: F.relu(m.norm(F.relu(m.a(x)))).mean((2, 3)), 1, 1),
    "gate": (lambda m, x: m.a((y := m.b(x)) * y.mean((2, 3), keepdim=True).sigmoid()).mean((2, 3)), 2, 1),
    "per channel": (lambda m, x: (m.a(x) * m.scale + m.scale[None] - 2.0).amax((2, 3)), 1, 1),
    "model's own turn": (lambda m, x: m.layer(m.a(x).permute(0, 2, 3, 1)).mean((1, 2)), 1, 1),
    "and back": (
        lambda m, x: m.a(m.fc.weight.sum() * m.layer(m.a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).amax((2, 3)),
        2,
        1,
    ),
    "concatenated": (lambda m, x: F.relu(m.wide(torch.cat([m.a(x)[:, :4], m.b(x)[:, 4:]], 1))).mean((2, 3)), 3, 3),
    "joined": (lambda m, x: torch.cat([m.a(x), m.b(x), x], 1).mean((2, 3)), 2, 1),
    "pooled and flat": (lambda m, x: m.fc(F.adaptive_avg_pool2d(m.a(x), 1).flatten(1)), 1, 1),
    "features": (lambda m, x: (m.a(x), F.relu(m.wide(x)), m.b(x).sum(1)), 3, 3),
    "kept dimension": (lambda m, x: m.a(x).mean(1, keepdim=True) + m.b(x).amax(2, keepdim=True), 2, 2),
    "which channel": (lambda m, x: ((y := F.relu(m.a(x))).argmax(1), y.mean((2, 3))), 1, 1),
    "which position": (lambda m, x: (torch.argmax((y := m.b(m.a(x))).flatten(2), -1), y.mean((2, 3))), 2, 1),
    "which of all": (lambda m, x: (torch.argmin(y := m.b(m.a(x))), y.mean((2, 3))), 2, 2),
    "upsampled": (lambda m, x: F.interpolate(m.a(x), scale_factor=2.0).mean((2, 3)), 1, 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_values_and_memory(name: str) -> None:
    f, convolutions, copies = CASES[name]
    made, x = model(f), image()
    built = turned(made, x)
    assert built.turned == convolutions
    source = built.program.source.partition("def forward")[2]
    assert len(re.findall(r"\.contiguous\(\)", source)) <= copies, source
    derive, forward = built.program.functions()
    for batch in (2, 3):
        for given in (image(batch), image(batch).contiguous(memory_format=torch.channels_last)):
            found, want = forward(made, given, *derive(made)), made(given)
            # what eager does with an image in the other order is another program's affair
            assert_close(found, want, rtol=1e-4, atol=1e-5, check_stride=given.is_contiguous())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_gradients(name: str) -> None:
    made, x = model(CASES[name][0]), image().requires_grad_()
    derive, forward = turned(made, x.detach()).program.functions()

    def gradients(y: Any) -> Any:
        parts = y if isinstance(y, tuple) else (y,)
        total = sum((p * torch.linspace(-1, 1, p.numel()).view(p.shape)).sum() for p in parts)
        return torch.autograd.grad(total, [x, *made.parameters()], allow_unused=True)

    assert_close(gradients(forward(made, x, *derive(made))), gradients(made(x)), rtol=1e-4, atol=1e-5)


def calls(f: Callable[[Any, Tensor], Any]) -> list[str]:
    source = turned(model(f), image()).program.source
    return [line.partition("  #")[0].partition("= ")[2] for line in source.splitlines() if "conv_last(" in line]


def test_bias_residual_and_relu_go_with_the_convolution() -> None:
    first, second = calls(CASES["residual"][0])
    assert first == "conv_last(x, a_weight, bias=self.a.bias, padding=1, relu=True)"
    assert second == "conv_last(conv, shaped, bias=self.b.bias, residual=x, relu=True)"


def test_two_biases_are_one() -> None:
    first, second = sorted(calls(CASES["both"][0]), key=len)
    assert "bias" not in first and "bias=a_bias" in second and "residual=" in second


def test_a_bias_without_relu_is_left_to_what_follows() -> None:
    (call,) = calls(CASES["one"][0])
    assert "bias" not in call


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x: F.conv_transpose2d(x, m.a.weight).mean((2, 3)),
        lambda m, x: F.conv2d(x[:, :3], m.a.weight[:, :3]).mean((2, 3)),  # a picture's colors
        lambda m, x: F.conv2d(x.double(), m.a.weight.double()).mean((2, 3)),
        lambda m, x: m.a(x).transpose(1, 3),  # would lie otherwise
    ],
)
def test_what_stays_as_it_is(f: Callable[[Any, Tensor], Any]) -> None:
    made, x = model(f), image()
    built = turned(made, x)
    derive, forward = built.program.functions()
    assert_close(forward(made, x, *derive(made)), made(x), rtol=1e-4, atol=1e-5, check_stride=True)


def test_pictures_stay_as_they_are() -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.relu(self.stem(x))).mean((2, 3))

    built = turned(Stem().eval(), torch.randn(2, 3, 9, 9))
    assert built.turned == 1 and "F.conv2d(x, self.stem.weight" in built.program.source


def test_volumes() -> None:
    made = nn.Sequential(nn.Conv3d(4, 8, 3), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 4, 1)).eval()
    x = torch.randn(2, 4, 8, 7, 6)
    built = turned(made, x)
    derive, forward = built.program.functions()
    assert built.turned == 2
    assert_close(forward(made, x, *derive(made)), made(x), rtol=1e-4, atol=1e-5, check_stride=True)


def narrowed(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """One channel, which lies row by row either way, and what is convolved from it."""
    y = F.conv2d(x, m.b.weight[:1])
    return y, F.conv2d(y, m.a.weight[:, :1])


def copied(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A channel of its own memory, of others that lie last."""
    one = x.permute(0, 2, 3, 1)[..., :1].permute(0, 3, 1, 2).contiguous()
    return m.a(x), one[:, :, 1:]


def seen(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A channel with gaps, that the model itself turns."""
    return m.a(x), x.sigmoid().permute(0, 2, 3, 1).contiguous()[..., :1].permute(0, 3, 1, 2)


@pytest.mark.parametrize("f", [narrowed, copied, seen])
@pytest.mark.parametrize("last", [False, True])
def test_one_channel(f: Callable[[Any, Tensor], Any], last: bool) -> None:
    made, x = model(f), image()
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    derive, forward = turned(made, x).program.functions()
    found, want = forward(made, x, *derive(made)), made(x)
    for y, eager in zip(found, want, strict=True):
        assert_close(y, eager, rtol=1e-4, atol=1e-5)
        longer = [d for d, length in enumerate(y.shape) if length != 1]
        assert [y.stride(d) for d in longer] == [eager.stride(d) for d in longer]
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_images_of_two_ranks() -> None:
    """Their channels are not the same dimension."""
    made = model(lambda m, x: F.relu(F.conv3d(x, m.b.weight[..., None]) + m.b(x[0])).amax((2, 3, 4)))
    x = torch.randn(2, 8, 8, 8, 8)
    built = turned(made, x)
    derive, forward = built.program.functions()
    assert built.turned == 2
    assert_close(forward(made, x, *derive(made)), made(x), rtol=1e-4, atol=1e-5)
