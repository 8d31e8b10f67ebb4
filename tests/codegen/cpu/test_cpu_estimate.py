"""Where nothing is timed: which groups stay with PyTorch's library on a CPU, and which become kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.runtime import cache

Function = Callable[[Tensor], Tensor]


class Linear(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, inputs: int, features: int, then: Function) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, features)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


class Alone(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def logsumexp_of_relu(y: Tensor) -> Tensor:
    return torch.logsumexp(torch.relu(y), -1)


def sum_of_sigmoid(y: Tensor) -> Tensor:
    return torch.sigmoid(y).sum(-1)


def softmax_of_gelu(y: Tensor) -> Tensor:
    return F.softmax(F.gelu(y), -1)


def pooled(y: Tensor) -> Tensor:
    return F.max_pool1d(y.unsqueeze(1), 2).squeeze(1).sum(-1)


LIBRARY = {
    "few rows, large weights": (Linear(2048, 4096, sum_of_sigmoid), (8, 2048)),
    "one row": (Linear(512, 1024, logsumexp_of_relu), (1, 512)),
    "few rows": (Linear(512, 1024, logsumexp_of_relu), (16, 512)),
    "softmax keeps every feature": (Linear(512, 1024, softmax_of_gelu), (64, 512)),
    "softmax of many rows": (Linear(256, 256, softmax_of_gelu), (1024, 256)),
    "windows of features": (Linear(1024, 1024, pooled), (8, 1024)),
    "a norm of features": (Linear(128, 128, lambda y: F.layer_norm(y, (128,))), (1024, 128)),
    "a flat convolution of few positions": (
        nn.Sequential(nn.Conv2d(320, 1280, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1)), (4, 320, 7, 7)
    ),
}  # fmt: skip
KERNEL = {
    "many rows": (Linear(512, 1024, logsumexp_of_relu), (4096, 512)),
    "few inputs": (Linear(64, 256, lambda y: y.amax(-1)), (1024, 64)),
    "many tokens": (Linear(384, 1536, lambda y: F.gelu(y).mean(1)), (16, 196, 384)),
    "a sum collapses the product": (Linear(4096, 1024, lambda y: y.sum(-1, keepdim=True)), (64, 4096)),
    "a small head": (Linear(64, 10, lambda y: F.log_softmax(torch.tanh(y) * 2 + 1, -1).mean(-1)), (2, 64)),
    "a convolution": (nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU()), (2, 8, 16, 16)),
    "half precision": (Linear(512, 1024, logsumexp_of_relu).bfloat16(), (16, 512)),
}  # fmt: skip
PLAIN = {
    "relu": torch.relu,
    "sum": lambda x: x.sum(1),
    "maximum": lambda x: x.amax(-1),
    "softmax": lambda x: x.softmax(1),
}
NOT_PLAIN = {
    "variance": lambda x: x.var(-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "norm": lambda x: F.layer_norm(x, (64,)),
    "two": lambda x: torch.relu(x).sum(1),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))


def paths(
    model: nn.Module, shape: tuple[int, ...], kernels: Literal["auto", "always"] = "auto"
) -> list[tuple[str, str]]:
    """The names of groups, and who runs them."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    fast = fusewright.optimize(
        model.eval(), torch.rand(shape, dtype=dtype), kernels=kernels, verify=False, measure=False
    )
    return [(choice.name, choice.path) for choice in fusewright.explain(fast).kernels]


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_multiplies(name: str) -> None:
    found = paths(*LIBRARY[name])
    products = {path for group, path in found if "linear" in group or "conv" in group}
    assert products == {"ATen"}, found


@pytest.mark.parametrize("name", LIBRARY)
def test_a_kernel_is_for_those_who_insist(name: str) -> None:
    assert {path for _, path in paths(*LIBRARY[name], "always")} == {"generated"}


@pytest.mark.parametrize("name", KERNEL)
def test_a_kernel_multiplies(name: str) -> None:
    found = paths(*KERNEL[name])
    assert found and {path for _, path in found} == {"generated"}, found


@pytest.mark.parametrize("name", [*PLAIN, *NOT_PLAIN])
def test_one_plain_operation_saves_nothing(name: str) -> None:
    found = paths(Alone((PLAIN | NOT_PLAIN)[name]), (32, 64, 64))
    assert {path for _, path in found} == {"ATen" if name in PLAIN else "generated"}, found


def test_what_follows_the_library_is_a_group_of_its_own() -> None:
    found = dict(paths(*LIBRARY["few rows, large weights"]))
    assert found["fused_linear_sigmoid_sum"] == "ATen" and found["fused_sigmoid_sum"] == "generated"
