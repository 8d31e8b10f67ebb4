"""Which of the groups that stay with PyTorch a file, or the sentence in its place, names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_build import built_for_a_gpu
from torch import nn

from fusewright.emit.header import left_to_pytorch

CASES = {
    "parts are not named, but what is left where another part has a kernel": (
        nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Softmax(1)),
        (1024, 512),
        ["fused_linear_gelu_softmax", "fused_softmax"],
    ),
    "another group with the name of a part is": (
        nn.Sequential(nn.Conv2d(256, 256, 1), nn.ReLU(), nn.Conv2d(256, 128, 1)),
        (64, 256, 28, 28),
        ["fused_conv", "fused_conv_relu"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_that_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape, expected = CASES[name]
    built = built_for_a_gpu(monkeypatch, model, torch.empty(shape), "auto")
    plan: Any = SimpleNamespace(kernels=built.choices)
    assert sorted(choice.name for choice in left_to_pytorch(plan)) == expected, built.choices
