"""A model built by all passes as for a GPU, by estimate: nothing runs, or kernels are emulated on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulation.emulate import emulate
from torch import Tensor, nn

from fusewright import pipeline, tuning
from fusewright.codegen import cuda
from fusewright.kernel import Kernel
from fusewright.runtime.device import LARGE_GPU
from fusewright.runtime.launch import FORMATS
from fusewright.schedule import contraction

Function = Callable[[Tensor, Tensor], Tensor]


class Weighted(nn.Module):
    """A function of the input and of one parameter of that shape."""

    def __init__(self, function: Function, *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape, generator=torch.manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


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


def plan_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, for tensors of a CPU as well, where convolutions may be rounded to tf32."""
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setattr(pipeline, "device_facts", lambda device: LARGE_GPU)
    monkeypatch.setattr(pipeline, "tf32_allowed", lambda precision: (True, False))
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)


def as_on_a_gpu(
    model: nn.Module, *args: Tensor, tf32: tuple[bool, bool] = (False, False), **options: Any
) -> pipeline.Built:
    """With CUDA kernels for tensors of a CPU, whose operators run their references there; `tf32` says whether
    convolutions, and matmuls, may be rounded."""
    with (
        patch.dict(tuning.TARGETS, cpu=cuda),
        patch.object(contraction, "has_strips", lambda device: False),
        patch.object(pipeline, "kernel_target", lambda device: None),
        patch.object(pipeline, "tf32_allowed", lambda precision: tf32),
    ):
        return pipeline.build(model, args, {}, kernels="always", measure=False, **options)


def launched(kernel: Kernel, *tensors: Tensor) -> Tensor:
    """As launchers do, with operands made dense."""
    layouts = zip(kernel.layouts, tensors, strict=True)
    return emulate(kernel, *(t.contiguous(memory_format=FORMATS[layout][t.ndim]) for layout, t in layouts))


def emulated(built: pipeline.Built, model: nn.Module, *args: Tensor) -> Tensor:
    """What a program gives whose kernels are emulated."""
    derive, forward = built.program.functions()
    for kernel in built.program.kernels:
        forward.__globals__[kernel.name] = partial(launched, kernel)
    with torch.no_grad():
        result: Tensor = forward(model, *args, *derive(model))
    return result
