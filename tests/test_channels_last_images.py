"""Models with channels-last images: kernels read what lies so, whoever wrote it, and what is to lie so they write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulation.emulate import emulate
from gpu_build import Weighted, as_on_a_gpu, built_for_a_gpu, emulated
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
    """A kernel's results, or a library's, are not copied: a kernel writes them in rows."""
    model, x = Normed(nn.InstanceNorm2d(16)).to(memory_format=torch.channels_last).eval(), image(3, 8, 36, 35)
    built = as_on_a_gpu(model, x, last=last)
    norm = next(of for kernel, of in layouts(built).items() if "norm" in kernel)
    assert norm[0] == ("channels_last" if last else "contiguous") and set(norm[1:]) <= {"contiguous"}
    assert last or {k.output.layout for k in built.program.kernels} == {"contiguous"}
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
    assert norm[0] == ("channels_last" if last else "contiguous") and set(norm[1:]) == {"contiguous"}


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


LAST = torch.channels_last
TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(memory_format=LAST),
    "clone": lambda x: x.clone(memory_format=LAST),
    "to": lambda x: x.to(memory_format=LAST),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("shape", [(2, 8, 9, 11), (2, 1, 9, 11), (2, 8, 1, 1)], ids=str)
def test_what_a_model_turns(name: str, shape: tuple[int, ...]) -> None:
    """It has its channels last, whatever comes, and so does what is computed of it."""
    model = Weighted(lambda x, w: nn.functional.conv2d(TURNS[name](x.tanh() * 2), w).relu(), 4, shape[1], 1, 1)
    x = torch.randn(shape, generator=torch.manual_seed(1))
    built = as_on_a_gpu(model, x)
    found, want = emulated(built, model, x), model(x).detach()
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5, check_stride=True)
    if shape[1] > 1 and shape[2] > 1:
        assert layouts(built)["fused_conv_relu"][0] == "channels_last"


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of one": lambda x, w: (x * 2.0).relu() + 1.0,
    "per channel": lambda x, w: x.sigmoid() * w[:, None, None] + w[None, :, None, None],
    "of two": lambda x, w: torch.where(x > 0, x * x.cos(), -x) - w.sum(),
    "by statistics": lambda x, w: (x - x.mean((2, 3), keepdim=True)) * w[:, None, None] + 0.5,
    "by pixels": lambda x, w: (x - x.amax(1, keepdim=True)).exp() * 3.0,
    "by one": lambda x, w: x * w[0] + w[1].exp(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """They are written as eager writes them, in one kernel."""
    for shape in ((3, 12, 5, 4), (2, 7, 3, 5), (2, 8, 3, 2, 3)):
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        x = drawn.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)])
        if len(shape) == 5 and name in ("per channel", "by statistics"):
            continue
        model = Weighted(FUNCTIONS[name], shape[1]).to(dtype)
        built = built_for_a_gpu(monkeypatch, model, x)
        last = built.program.kernels[-1]
        assert last.layouts[0] == last.output.layout == "channels_last"
        for given in (x, x[:1]):
            found, want = emulated(built, model, given), model(given).detach()
            limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(found, want, rtol=limit, atol=limit)
            assert found.stride() == want.stride() or given is not x


def test_functions_of_images_that_lie_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one says how the result lies: no kernel reads the other across its rows."""

    def both(x: Tensor, w: Tensor) -> Tensor:
        return (x + w).relu() * w

    model, x = Weighted(both, 2, 8, 5, 4), image(2, 8, 5, 4)
    assert not layouts(built_for_a_gpu(monkeypatch, model, x))
    rows = built_for_a_gpu(monkeypatch, model, x.contiguous())
    assert [k.output.layout for k in rows.program.kernels] == ["contiguous"]


def test_a_view_of_rows_is_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed row by row, and is seen with its channels first, is not copied to be added."""

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.softmax(x.permute(0, 2, 3, 1), -1)
            return torch.relu(x - rows.permute(0, 3, 1, 2))

    x = image(2, 40, 9, 11)
    built = built_for_a_gpu(monkeypatch, Block(), x)
    softmax, difference = built.program.kernels
    assert softmax.layouts == ("channels_last",)
    assert difference.layouts == ("channels_last",) * 2 and difference.output.layout == "channels_last"
    torch.testing.assert_close(emulated(built, Block(), x), Block()(x), check_stride=True)


def test_a_norm_of_rows_that_a_library_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in networks whose norms are over channels: nothing is turned, for it lies so."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depth, self.norm = nn.Conv2d(96, 96, 3, padding=1, groups=96), nn.LayerNorm(96)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.depth(x).permute(0, 2, 3, 1))
            return y

    model, x = Block().to(memory_format=torch.channels_last), image(2, 96, 7, 5)
    built = built_for_a_gpu(monkeypatch, model, x, kernels="auto")
    assert layouts(built)["fused_layernorm"] == ("channels_last", "contiguous", "contiguous")
    (kernel,) = built.program.kernels
    operands = (model.depth(x), model.norm.bias, model.norm.weight)
    found = emulate(kernel, *(t.detach() for t in operands))
    torch.testing.assert_close(found, model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keepdim", [False, True])
def test_several_results(monkeypatch: pytest.MonkeyPatch, keepdim: bool) -> None:
    """Reductions of the same images are one pass over them as they lie."""

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.mean((2, 3), keepdim) * 2.0, x.relu().amax((2, 3), keepdim)

    x = image(2, 12, 130, 131)
    (kernel,) = built_for_a_gpu(monkeypatch, Both(), x).program.kernels
    assert kernel.layouts == ("channels_last",) and len(kernel.results) == 2
    for found in emulate(kernel, x):
        assert any(torch.allclose(found, want, rtol=1e-5, atol=1e-6) for want in Both()(x))


CHANNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a norm": lambda x, w: (
        (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, unbiased=False, keepdim=True) + 1e-6) * w[0, :, None, None]
        + w[1, :, None, None]
    ),
    "normalized": lambda x, w: nn.functional.normalize(x.relu(), dim=1) * w[0, :, None, None],
    "shares": lambda x, w: x / (x.abs().sum(1, keepdim=True) + 1) - x.mean(1, keepdim=True),
}


@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.parametrize("shape", [(3, 24, 5, 4), (2, 33, 3, 5)], ids=str)
def test_channels_are_kept_as_they_lie(monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...]) -> None:
    """One kernel has the numbers of each position and what is made of these, and nothing is copied."""

    def both(x: Tensor, w: Tensor) -> Tensor:
        return CHANNELS[name](x, w.view(2, -1))

    model, x = Weighted(both, 2 * shape[1]), image(*shape)
    built = built_for_a_gpu(monkeypatch, model, x)
    (kernel,) = built.program.kernels
    assert kernel.output.layout == kernel.layouts[0] == "channels_last" and "rows that are kept" in kernel.source
    for given in (x, x[:1]):
        found, want = emulated(built, model, given), model(given).detach()
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        assert found.stride() == want.stride() or given is not x
