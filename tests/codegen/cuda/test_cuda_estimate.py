"""Where nothing is timed: which groups stay with PyTorch's libraries on a GPU, and which become kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_build import built_for_a_gpu
from torch import Tensor, nn


class Linear(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, inputs: int, features: int, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, features)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


def head(features: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(320, 1280, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, features)
    )


def logsumexp_of_relu(y: Tensor) -> Tensor:
    return torch.logsumexp(torch.relu(y), -1)


def softmax_of_gelu(y: Tensor) -> Tensor:
    return F.softmax(F.gelu(y), -1)


# Models and their inputs' shapes.
MATMUL = {
    "a tail with large weights": (head(1000), (128, 320, 7, 7)),
    "weights read again for each sample": (
        Linear(512, 1024, softmax_of_gelu),
        (1024, 512),
    ),
    "few tiles": (Linear(2048, 4096, lambda y: y.sigmoid().sum(-1)), (128, 2048)),
}
LIBRARY = {
    "half precision": (Linear(512, 1024, logsumexp_of_relu).half(), (65536, 512)),
    "a convolution alone": (nn.Conv2d(256, 128, 1), (64, 256, 28, 28)),
}
KERNEL = {
    "a mean of everything": (
        nn.Sequential(nn.Conv2d(8, 64, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1)),
        (64, 8, 128, 128),
    ),
    "windows that share much": (
        nn.Sequential(nn.Conv2d(8, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        (128, 8, 224, 224),
    ),
    "windows apart": (nn.Sequential(nn.Conv3d(8, 16, 3), nn.MaxPool3d(2), nn.ReLU()), (64, 8, 16, 64, 64)),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(16, 32, 4, 2, 1), nn.MaxPool2d(2)), (64, 16, 64, 64)),
    "a small product": (Linear(64, 32, logsumexp_of_relu), (256, 64)),
    "no product": (nn.Sequential(nn.Tanh(), nn.Hardswish()), (1024, 1024)),
}


def paths(monkeypatch: pytest.MonkeyPatch, model: nn.Module, shape: tuple[int, ...], kernels: Any) -> dict[str, str]:
    """The names of groups, and who runs them on Hopper."""
    x = torch.empty(shape, dtype=next((p.dtype for p in model.parameters()), torch.float32))
    built = built_for_a_gpu(monkeypatch, model, x, kernels)
    return {choice.name: choice.path for choice in built.choices}


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_multiplies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = (paths(monkeypatch, *LIBRARY[name], kernels) for kernels in ("auto", "always"))
    assert {path for group, path in found.items() if "linear" in group or "conv" in group} == {"ATen"}, found
    assert set(wanted.values()) == {"generated"}, wanted


@pytest.mark.parametrize("name", MATMUL)
def test_a_matmul_of_float32_is_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its own, for no group that takes in more of the model is faster than the library; where tf32 is allowed,
    the library has the matmul."""
    model, shape = MATMUL[name]
    x = torch.empty(shape)
    found = built_for_a_gpu(monkeypatch, model, x, "auto").choices
    assert [c.family for c in found if "linear" in c.name and c.path == "generated"] == ["matmul"], found
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        found = built_for_a_gpu(monkeypatch, model, x, "auto").choices
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert {c.path for c in found if "linear" in c.name} == {"ATen"}, found


@pytest.mark.parametrize("name", KERNEL)
@pytest.mark.sampled
def test_a_kernel_multiplies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = paths(monkeypatch, *KERNEL[name], "auto")
    assert found and set(found.values()) == {"generated"}, found


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(8, 16, 3), nn.Sequential(nn.Flatten(), nn.Linear(8 * 12 * 12, 64))], ids=["conv", "linear"]
)
def test_a_size_of_the_batch_behind_a_layer(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ahead of it still has a kernel."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.layer(x)) / x.shape[0]

    built = built_for_a_gpu(monkeypatch, Scaled(), torch.empty(256, 8, 12, 12), "always")
    assert any("relu" in choice.name and choice.path == "generated" for choice in built.choices)


def test_one_plain_operation_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(paths(monkeypatch, nn.Tanh(), (1024, 1024), "auto").values()) == {"ATen"}


@pytest.mark.parametrize(("dim", "path"), [(1, "generated"), (2, "ATen")])
def test_a_softmax_over_channels_is_a_kernel(monkeypatch: pytest.MonkeyPatch, dim: int, path: str) -> None:
    assert set(paths(monkeypatch, nn.Softmax(dim), (64, 96, 1024), "auto").values()) == {path}


@pytest.mark.parametrize(("shape", "path"), [((512, 8192), "generated"), ((8, 400_000), "ATen")])
def test_prefix_sums_of_many_rows_are_a_kernel(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], path: str
) -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(x, 1)

    assert set(paths(monkeypatch, Sums(), shape, "auto").values()) == {path}
