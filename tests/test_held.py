"""Parameters that are seen in another shape: kernels read them as the model holds them, and nothing looks at them."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from torch import Tensor, nn

from fusewright import pipeline
from fusewright.codegen.held import of_held
from fusewright.ir import ops
from fusewright.ir.node import make
from fusewright.kernel import Array, Kernel
from fusewright.runtime.operators import operator
from tests.dropin import fast, program_calls, same

CHANNELS = 8


class Shifted(nn.Module):
    """Two parameters per channel, and a buffer, which are held in these shapes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight, bias, offset = (torch.randn(shape, generator=generator) for shape in shapes)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.register_buffer("offset", offset)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, offset = (p.reshape(-1, 1, 1) for p in (self.weight, self.bias, self.offset))
        return torch.relu(x * weight + bias) - torch.tanh(x + offset)


def shifted() -> Shifted:
    return Shifted((CHANNELS,), (1, CHANNELS), (CHANNELS, 1))


class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return torch.tanh(x * w.reshape(-1, 1, 1) + w.reshape(-1, 1))


class Folded(nn.Module):
    """Rows of a matrix become channels: no dimension of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, CHANNELS // 2, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight.reshape(-1, 1, 1)) + x


def planned(model: nn.Module, x: Tensor) -> pipeline.Built:
    given: dict[str, Any] = {"kernels": "always", "measure": False, "target": torch.device("cuda")}
    return pipeline.build(model, (x,), {}, **given)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_nothing_is_reshaped(memory_format: torch.memory_format) -> None:
    x = torch.randn(3, CHANNELS, 5, 6).to(memory_format=memory_format)
    model = shifted()
    built = planned(model, x)
    (kernel,) = built.program.kernels
    assert "reshape" not in built.program.source
    assert set(kernel.shapes[1:]) == {("8",), ("1", "8"), ("8", "1")}
    assert kernel.layouts[0] == ("contiguous" if memory_format is torch.contiguous_format else "channels_last")
    for batch in (3, 1):
        y = torch.randn(batch, CHANNELS, 5, 6).to(memory_format=memory_format)
        torch.testing.assert_close(emulated(built, model, y), model(y).detach(), rtol=1e-5, atol=1e-6)


def test_gradients() -> None:
    """Those of parameters come through the views, in the shapes in which they are held; some lie with gaps."""
    model, x = shifted(), torch.randn(3, CHANNELS, 5, 6, requires_grad=True)
    model.weight = nn.Parameter(torch.randn(2 * CHANNELS)[::2])
    eager, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    derive, forward = as_on_a_gpu(model, x).program.functions()
    got, want = forward(model, x, *derive(model)), eager(y)
    torch.testing.assert_close(got, want)
    got.sin().sum().backward()
    want.sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_operators_hold() -> None:
    model, x = shifted(), torch.randn(3, CHANNELS, 5, 6)
    (kernel,) = as_on_a_gpu(model, x).program.kernels
    held = {(CHANNELS,): model.weight, (1, CHANNELS): model.bias, (CHANNELS, 1): model.offset}
    operands = [held[tuple(map(int, shape))].detach().requires_grad_() for shape in kernel.shapes[1:]]
    torch.library.opcheck(operator(kernel).overload, (x, *operands))


@pytest.mark.parametrize("model", [TwoViews(), Folded()], ids=lambda model: type(model).__name__)
def test_left_alone(model: nn.Module) -> None:
    """A parameter that is read in two ways, and one whose rows are joined."""
    x = torch.randn(3, CHANNELS, CHANNELS, 6)
    built = as_on_a_gpu(model, x)
    assert "reshape" in built.program.source and built.program.kernels
    torch.testing.assert_close(emulated(built, model, x), model(x).detach(), rtol=1e-5, atol=1e-6)


def test_on_a_cpu() -> None:
    model, x = shifted(), torch.randn(3, CHANNELS, 5, 6)
    f = fast(model, x, kernels="always", verify=True)
    assert all("reshape" not in e.runner.program.source for e in f._fusewright.entries.values() if e.runner)
    with torch.no_grad():
        same(f, model, x, program=True)
    assert program_calls(f) > 0


def test_the_bias_behind_a_maximum_is_read_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a convolution's kernel: to it both are the same numbers, one after the other."""
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.MaxPool2d(2)).eval().requires_grad_(False)
    built = built_for_a_gpu(monkeypatch, model, torch.empty(256, 16, 130, 130), kernels="always")
    (kernel,) = built.program.kernels
    assert "reshape" not in built.program.source.partition("def forward")[2]
    assert kernel.name == "fused_conv_max_add" and kernel.shapes[2] == ("64",)


def test_a_brief_kernel_is_given_the_same() -> None:
    """While tiles are timed it stands for the kernel."""
    seen, held = (make(ops.Input(shape, torch.float32, torch.device("cpu"), "b", 0)) for shape in ((1, 4, 1), (4,)))
    sizes, out = (("n", 0, 1),), Array("out", (), torch.float32)
    whole = Kernel("k", "", ("b",), ("contiguous",), sizes, out, (), (), "", shapes=(("1", "4", "1"),))
    group: Any = SimpleNamespace(seen=(seen,), operands=(held,))
    found = of_held(replace(whole, brief=whole), group)
    assert found.brief is not None
    assert found.shapes == found.brief.shapes == (("4",),)
    assert found.sizes == found.brief.sizes == (("n", 0, 0),)
