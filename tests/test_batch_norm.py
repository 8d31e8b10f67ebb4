"""Batch norm outside of training: it vanishes into what comes before it, or into the kernels around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from emulation.emulate import emulate
from torch import Tensor, nn

from fusewright import pipeline, tuning
from fusewright.codegen import cuda
from tests.dropin import fast, kernels_of, program_calls, same


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


BLOCKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], tuple[str, ...]]] = {
    "max pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 3, 12, 12),
        ("fused_conv_max_relu",),
    ),
    "mean": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Hardswish(), Mean()),
        (2, 3, 10, 10),
        ("fused_conv_hardswish_mean",),
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU6()),
        (2, 8, 9, 9),
        ("fused_conv_hardtanh",),
    ),
    "alone": (lambda: nn.Sequential(nn.BatchNorm2d(8)), (2, 8, 9, 9), ("fused_mul_add",)),
    "transition": (
        lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False), nn.AvgPool2d(2)),
        (2, 8, 12, 12),
        ("fused_conv", "fused_mul_add_relu"),
    ),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8, momentum=None), nn.ReLU()),
        (2, 4, 20),
        ("fused_conv_relu",),
    ),
    "three dimensions, transposed, not affine": (
        lambda: nn.Sequential(
            nn.ConvTranspose3d(4, 8, 3, stride=2, groups=2), nn.BatchNorm3d(8, affine=False), nn.ReLU()
        ),
        (2, 4, 4, 4, 4),
        ("fused_convtranspose_relu",),
    ),
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()), (5, 8), ("fused_linear_relu",)),
}


def settled(model: nn.Module) -> nn.Module:
    """`model` in evaluation mode, its norms with weights and statistics as after some training."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


def planned(model: nn.Module, x: Tensor) -> nn.Module:
    return fast(model, x, rewrite="cost", kernels="always", verify=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str) -> None:
    make, shape, kernels = BLOCKS[name]
    model, x = settled(make()), torch.randn(shape)
    f = planned(model, x)
    assert tuple(kernel.name for kernel in kernels_of(f)) == kernels
    assert all("batch_norm" not in e.runner.program.source for e in f._fusewright.entries.values() if e.runner)
    with torch.no_grad():
        same(f, model, x, program=True)


def test_statistics_that_change_are_seen() -> None:
    make, shape, _ = BLOCKS["mean"]
    model, x = settled(make()), torch.randn(shape)
    f = planned(model, x)
    with torch.no_grad():
        same(f, model, x, program=True)
        model[1].running_var.mul_(4.0)
        same(f, model, x, program=True)
        f.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        same(f, model, x, program=True)
        model[1].running_mean = torch.ones(16)
        same(f, model, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_fold_in_float32(dtype: torch.dtype) -> None:
    make, shape, kernels = BLOCKS["mean"]
    model, x = settled(make()).to(dtype), torch.randn(shape, dtype=dtype)
    f = planned(model, x)
    assert tuple(kernel.name for kernel in kernels_of(f)) == kernels
    truth = copy.deepcopy(model).double()(x.double())
    with torch.no_grad():
        got, eager = f(x), model(x)
    assert program_calls(f) > 0
    assert (got - truth).abs().max() <= 2 * (eager - truth).abs().max()


class TestLeftAlone:
    @pytest.mark.parametrize("training", [True, False])
    def test_statistics_of_the_input(self, training: bool) -> None:
        """In training, and where none are kept."""
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, track_running_stats=training), nn.ReLU())
        model.train(training)
        x = torch.randn(2, 4, 8, 8)
        f = planned(copy.deepcopy(model), x)
        (program,) = {e.runner.program.source for e in f._fusewright.entries.values() if e.runner}
        assert "batch_norm" in program
        for _ in range(2):
            torch.testing.assert_close(f(x), model(x))
        torch.testing.assert_close(f.state_dict(), model.state_dict())

    def test_without_kernels_a_norm_alone_stays(self) -> None:
        model = settled(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
        built = pipeline.build(model, (torch.randn(2, 8, 9, 9),), {})
        assert "batch_norm" in built.program.source


@pytest.mark.parametrize("name", ["mean", "alone"])
def test_on_a_gpu(name: str) -> None:
    """The kernels of a CUDA build, emulated."""
    make, shape, kernels = BLOCKS[name]
    model, x = settled(make()), torch.randn(shape)
    with (
        patch.dict(tuning.TARGETS, cpu=cuda),
        patch.object(pipeline, "kernel_target", lambda device: None),
        patch.object(pipeline, "tf32_allowed", lambda precision: (False, False)),
    ):
        built = pipeline.build(model, (x,), {}, kernels="always", measure=False)
    (kernel,) = built.program.kernels
    assert (kernel.name,) == kernels and kernel.target == "cuda"
    derive, forward = built.program.functions()
    forward.__globals__[kernel.name] = lambda *tensors: emulate(kernel, *tensors)
    with torch.no_grad():
        torch.testing.assert_close(forward(model, x, *derive(model)), model(x))
