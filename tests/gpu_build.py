"""A model built by all passes as for a GPU, by estimate: nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewright import pipeline, tuning


def built_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    x: Tensor,
    kernels: Any = "always",
    capability: int = 90,
    **options: Any,
) -> pipeline.Built:
    """For Hopper, or another compute capability (times ten)."""
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setattr(tuning, "capability_of", lambda device: capability)
    target = torch.device("cuda")
    return pipeline.build(model.eval(), (x,), {}, kernels=kernels, measure=False, target=target, **options)
