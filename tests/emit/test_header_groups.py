"""Which of the groups that stay with PyTorch a file, or the sentence in its place, names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fusewright.emit.header import left_to_pytorch
from fusewright.plan import KernelChoice


def test_parts_of_a_group_that_was_left_are_not_named() -> None:
    tried = {
        "fused_linear_gelu_softmax": "ATen",
        "fused_linear_gelu": "ATen",
        "fused_linear": "ATen",
        "fused_gelu": "generated",
        "fused_conv": "ATen",
        "fused_gelu_softmax_2": "ATen",
        "fused_softmax": "ATen",
    }
    paths: Any = tried.items()
    plan: Any = SimpleNamespace(kernels=tuple(KernelChoice(name, "stream", "", path) for name, path in paths))
    names = [choice.name for choice in left_to_pytorch(plan)]
    assert names == ["fused_linear_gelu_softmax", "fused_conv", "fused_gelu_softmax_2"]
