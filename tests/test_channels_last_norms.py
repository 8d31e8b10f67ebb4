"""Models with channels-last images: norms and sums over positions read what lies so, whoever wrote it."""

from __future__ import annotations

import pytest
import torch
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from torch import Tensor, nn

from fusewright.pipeline import Built


class Normed(nn.Module):
    """A convolution, and a norm of its results."""

    def __init__(self, norm: nn.Module, channels: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(channels, 16, 3), norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x)) / 2.0
        return y


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid().var((2, 3))


def image(*shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return drawn.to(memory_format=torch.channels_last)


def layouts(built: Built) -> dict[str, tuple[str, ...]]:
    return {k.name: k.layouts for k in built.program.kernels}


@pytest.mark.parametrize("last", [False, True])
def test_norms_of_convolutions(last: bool) -> None:
    """A kernel's results, or a library's, are not copied."""
    model, x = Normed(nn.InstanceNorm2d(16)).to(memory_format=torch.channels_last).eval(), image(3, 8, 36, 35)
    built = as_on_a_gpu(model, x, last=last)
    norm = next(of for kernel, of in layouts(built).items() if "norm" in kernel)
    assert norm[0] == "channels_last" and set(norm[1:]) <= {"contiguous"}
    forward = built.program.source.partition("def forward")[2]
    assert "contiguous()" not in forward and "fused_rearrange" not in forward
    with torch.no_grad():
        found, want = emulated(built, model, x), model(x)
    torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3, check_stride=True)


@pytest.mark.parametrize("last", [False, True])
def test_norms_of_groups(monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    """A GPU gives them row by row."""
    model = Normed(nn.GroupNorm(4, 16)).to(memory_format=torch.channels_last)
    built = built_for_a_gpu(monkeypatch, model, image(3, 8, 36, 35), last=last)
    norm = next(of for kernel, of in layouts(built).items() if "norm" in kernel)
    assert norm[0] == "channels_last" and set(norm[1:]) == {"contiguous"}


def test_a_library_s_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ATen computes of such images lies as they do."""
    model = Normed(nn.InstanceNorm2d(16), 64).to(memory_format=torch.channels_last)
    built = built_for_a_gpu(monkeypatch, model, image(2, 64, 9, 11), kernels="auto")
    assert "F.conv2d" in built.program.source
    assert layouts(built) == {"fused_instancenorm_div": ("channels_last",)}


def test_a_bias_is_added_in_the_norm_s_kernel() -> None:
    """One pass less behind a library's convolution, which adds none by itself."""
    model, x = Normed(nn.InstanceNorm2d(16)).eval(), image(3, 8, 36, 35)
    built = as_on_a_gpu(model, x, last=True)
    assert list(layouts(built)) == ["fused_add_instancenorm_div"]
    contiguous = as_on_a_gpu(model, x.contiguous(), last=True)
    assert "fused_add_instancenorm_div" in layouts(contiguous)
    for made, given in ((built, x), (contiguous, x.contiguous()), (built, x.contiguous())):
        with torch.no_grad():
            torch.testing.assert_close(emulated(made, model, given), model(given), rtol=2e-4, atol=2e-4)


def test_reductions_over_positions() -> None:
    model, x = Summed(), image(3, 6, 9, 11)
    built = as_on_a_gpu(model, x)
    assert list(layouts(built).values()) == [("channels_last",)]
    for given in (x, x[:1], x.contiguous()):
        found = emulated(built, model, given)
        torch.testing.assert_close(found, model(given), rtol=1e-5, atol=1e-6)


def test_a_copy_of_the_model_s_own_stays_one() -> None:
    """It shares no memory with the input that is turned without one."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.conv(x), torch.permute_copy(x, (0, 2, 3, 1))

    model, x = Turned().eval(), image(2, 8, 5, 4)
    built = as_on_a_gpu(model, x, last=True)
    assert built.turned == 1
    with torch.no_grad():
        found = emulated(built, model, x)
    assert found[1].data_ptr() != x.data_ptr()
    torch.testing.assert_close(found[1], x.permute(0, 2, 3, 1))
