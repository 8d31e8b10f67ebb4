"""Kernels write row by row: a group whose result must lie otherwise stays as it is, and the others get theirs."""

from __future__ import annotations

import pytest
import torch
from gpu_build import built_for_a_gpu
from torch import Tensor, nn

import fusewright
from tests.dropin import fast, kernels_of, program_calls


class Heads(nn.Module):
    """Two results, of which a product's lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.conv = nn.Conv1d(4, 3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).transpose(1, 2).relu(), self.conv(x).relu()


class Normed(nn.Module):
    """Turned products behind a norm, whose results lie row by row in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).relu()


class Pooled(nn.Module):
    """Turned products behind a pool of signals, which has the order of its operand."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.linear, self.pool = nn.Linear(6, 8), pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.linear(x).transpose(1, 2)).clamp_min(-0.2)


class Shares(nn.Module):
    """A result that lies transposed, and is no product's."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(2).transpose(1, 2).relu()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 2).relu() + 1
        return y, x.sigmoid().sum((2, 3))


class Moved(nn.Module):
    """Transposed there and back."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.transpose(1, 2) * 2).relu().transpose(1, 2).tanh().sum(2)


def check(model: nn.Module, x: Tensor, *kernels: str) -> None:
    f = fast(model, x, kernels="always", verify=True)
    assert sorted(kernel.name for kernel in kernels_of(f)) == sorted(kernels)
    found, expected = f(x), model(x)
    assert program_calls(f) == 1
    for a, b in zip(*((v,) if isinstance(v, Tensor) else v for v in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, check_stride=True)


def test_a_result_that_lies_transposed() -> None:
    check(Shares(), torch.randn(2, 4, 6), "fused_softmax")


def test_a_product_that_is_transposed() -> None:
    """What follows is computed first, and then seen transposed."""
    check(Heads(), torch.randn(2, 4, 6), "fused_conv_relu", "fused_linear_relu")


def test_a_norm_of_what_is_turned() -> None:
    check(Normed().eval(), torch.randn(2, 4, 6), "fused_linear_mul_add_relu")


@pytest.mark.parametrize("pool", [nn.AvgPool1d(2), nn.AvgPool1d(1), nn.AdaptiveAvgPool1d(4), nn.MaxPool1d(2)], ids=str)
def test_a_pool_of_what_is_turned(pool: nn.Module) -> None:
    model, x = Pooled(pool), torch.randn(2, 4, 6)
    f = fast(model, x, kernels="always", verify=True)
    assert kernels_of(f)
    torch.testing.assert_close(f(x), model(x), check_stride=True)
    with torch.no_grad():
        torch.testing.assert_close(f(x), model(x), check_stride=True)


@pytest.mark.parametrize("last", [False, True])
def test_a_norm_follows_the_format_of_each_call(last: bool) -> None:
    """What is planned for an image that lies otherwise is not what one in a format gets."""
    model, x = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).eval(), torch.randn(2, 3, 4, 5)
    turned, last_image = x.transpose(2, 3).contiguous().transpose(2, 3), x.to(memory_format=torch.channels_last)
    f = fast(model, last_image if last else turned, kernels="always", verify=True)
    for each in (x, turned, last_image):
        torch.testing.assert_close(f(each), model(each), check_stride=True)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_result_in_the_format_of_the_input(last: bool, batch: int) -> None:
    x = torch.randn(batch, 3, 4, 5)
    both = ("fused_mul_relu_add", "fused_sigmoid_sum")
    check(Doubled(), x.to(memory_format=torch.channels_last) if last else x, *both[last:])


def test_what_a_reduction_hides() -> None:
    f = fast(Moved(), torch.randn(2, 4, 6), kernels="always", verify=True)
    assert kernels_of(f)


def test_a_convolution_in_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    check(model, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), "fused_conv_relu")


@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.sampled
def test_a_slice_of_channels(given: int, batch: int) -> None:
    """Some channels of more, with gaps between them, or one of its own: what is convolved has their format."""
    x = torch.randn(batch, 4, 8, 8).to(memory_format=torch.channels_last)
    x = x[:, :3] if given == 3 else x[:, :1].contiguous(memory_format=torch.channels_last)
    last = x if given == 3 else torch.empty_strided(x.shape, (64, 1, 8, 1)).copy_(x)
    check(nn.Sequential(nn.Conv2d(given, 8, 3), nn.ReLU()), last, "fused_conv_relu")
    check(nn.Sequential(nn.Conv2d(given, 8, 3), nn.ReLU()), torch.randn(batch, given, 8, 8), "fused_conv_relu")


class OneChannel(nn.Module):
    """Functions may or may not keep the format of one channel: nobody sees it until it is convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).relu() + 1, self.conv(x * 3).relu()


def test_functions_of_one_channel() -> None:
    x = torch.empty_strided((2, 1, 8, 8), (64, 1, 8, 1)).normal_()
    check(OneChannel(), x, "fused_mul_relu_add")


def test_a_weight_in_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(1))
    f = fast(model.to(memory_format=torch.channels_last), torch.randn(2, 3, 8, 8), kernels="always", verify=True)
    assert kernels_of(f)


@pytest.mark.parametrize("last", [False, True])
def test_a_weight_of_one_tap_in_channels_last(last: bool) -> None:
    """It lies row by row as well, but eager goes by its strides."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 7)
    x = x.to(memory_format=torch.channels_last) if last else x
    f = fusewright.optimize(model, (x,), kernels="always", verify=False, measure=False)
    torch.testing.assert_close(f(x), model(x), check_stride=True)
    assert not model(x).is_contiguous() and (not last or kernels_of(f))


class Joined(nn.Module):
    """What has the format of its operands, though nothing here knows that."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, x * 2], 1).relu() + 3, (x * 2).sum((2, 3))


def test_what_follows_an_operation_that_nothing_is_known_of() -> None:
    check(Joined(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "fused_sum")


class Normalised(nn.Module):
    """A norm that answers in the format it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x).relu(), x.sigmoid().sum((2, 3))


def test_a_group_norm_in_channels_last() -> None:
    check(Normalised(), torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last), "fused_sigmoid_sum")


def test_an_input_that_is_expanded() -> None:
    check(Doubled(), torch.randn(1, 3, 4, 5).expand(2, 3, 4, 5), "fused_mul_relu_add", "fused_sigmoid_sum")


@pytest.mark.parametrize("conv", [nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_a_turned_weight_is_no_reason_to_leave_a_convolution_to_others(
    monkeypatch: pytest.MonkeyPatch, conv: type[nn.Module]
) -> None:
    """As a view it would lie in an order of its own, and what eager answers would not be known."""
    model = nn.Sequential(conv(44, 75, 1), nn.ReLU())
    shape = (8, 44, 349, 439) if conv is nn.ConvTranspose2d else (8, 44, 20, 34, 43)
    built = built_for_a_gpu(monkeypatch, model, torch.empty(shape))
    assert [(choice.name, choice.path) for choice in built.choices] == [("fused_conv_relu", "generated")]
