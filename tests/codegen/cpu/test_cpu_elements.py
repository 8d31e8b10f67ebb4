"""Residual additions and scales per sample in kernels of convolutions for CPUs, against float64; whole models too."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from codegen.cuda.contraction_cases import Case
from codegen.cuda.element_cases import Found, assert_close, assert_finite_as_eager, find
from native_cases import quick, run
from torch import Tensor, nn

import fusewright
from fusewright.codegen.cpu import contraction as cpu
from fusewright.kernel import Kernel
from fusewright.schedule.strips import candidates

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
POOL = {"pool": "avg", "window": (4, 4), "step": (4, 4)}

# A case, what is read, and of which type beside the case's.
CASES: dict[str, tuple[Case, str, torch.dtype | None]] = {
    "plain": (Case((9, 37), 5, 37), "behind a channel", None),
    "channels last": (Case((9, 11), 5, 20, channels_last=True), "scale and residual", None),
    "channels last, bfloat16": (Case((6, 9), 16, 37, dtype=BF16, channels_last=True), "ahead of a channel", None),
    "many channels": (Case((5, 6), 300, 33, padding=(1, 1)), "residual", None),
    "functions with rare arguments": (Case((5, 70), 4, 20), "sine", None),
    "float16 and float32": (Case((37,), 5, 20, (5,), (2,), (2,), (1,), dtype=F16), "twice", F32),
    "float64": (Case((6, 9), 5, 12, dtype=F64), "gate", None),
    "groups": (Case((6, 9), 9, 20, groups=2), "scale and residual", None),
    "depthwise": (Case((9, 13), 1, 1, (5, 3), padding=(2, 1), groups=37), "scale and residual", None),
    "depthwise, channels last": (
        Case((9, 8), 1, 1, stride=(2, 2), padding=(1, 1), groups=70, channels_last=True),
        "residual",
        None,
    ),
    "transposed": (Case((5, 7), 6, 20, (3, 4), (2, 3), (1, 0), transposed=True), "ahead of a channel", None),
    "three dimensions": (Case((3, 4, 9), 3, 16, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)), "residual", None),
    "of one tap": (Case((6, 9), 9, 20, (1, 1)), "residual", None),
    "the input": (Case((6, 9), 20, 20, padding=(1, 1)), "the input", None),
    "a function": (Case((6, 9), 9, 20), "a function of all", None),
    "a comparison": (Case((6, 9), 9, 20), "a comparison", None),
    "window sums": (Case((22, 26), 4, 20, **POOL), "behind a channel", None),
    "mean": (Case((6, 19), 5, 20, fold="mean", fold_dims="p"), "residual", None),
    "maximum of all": (Case((6, 19), 5, 20, fold="max", fold_dims="cp"), "scale and residual", None),
    "logsumexp over channels": (Case((6, 19), 5, 37, fold="logsumexp", fold_dims="c"), "residual", None),
}


def found(name: str) -> tuple[Found, Kernel]:
    """With several rows of a strip, whose number those of the output are no multiple of."""
    f = find(*CASES[name])
    d, h, w = f.group.along_axes([int(n) for n in f.group.conv.shape[2:]])
    strips = candidates(f.group, (d, h, w), 2)[-1]
    strips = replace(strips, strip=(min(d, 2), min(h, 4), strips.strip[2]))
    return f, cpu.kernel(f.group, strips, "fused_test", "def reference(*operands): ...")


@pytest.mark.parametrize("name", quick(CASES, "plain", "channels last"))
def test_against_float64(name: str) -> None:
    f, kernel = found(name)
    example = f.example()
    assert_close(f, run(kernel, *f.tensors(example)), example)


@pytest.mark.parametrize("name", ["plain", "channels last"])
def test_not_finite_as_eager(name: str) -> None:
    f, kernel = found(name)
    assert_finite_as_eager(f, lambda *tensors: run(kernel, *tensors))


class Block(nn.Module):
    """Of a residual network that halves the image, with a scale of every sample's channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(8, 24, 3, 2, 1, bias=False), nn.Conv2d(24, 24, 3, 1, 1, bias=False)
        self.beside, self.head = nn.Conv2d(8, 24, 1, 2, bias=False), nn.Linear(8, 24)
        self.norms = nn.ModuleList(nn.BatchNorm2d(24) for _ in range(3))
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        scale = self.head(x.mean((2, 3))).sigmoid()
        return F.relu(y * scale[:, :, None, None] + self.norms[2](self.beside(x)))


def test_residual_blocks() -> None:
    """Three kernels of convolutions: that which multiplies most adds what another gives."""
    model, x = Block().eval(), torch.randn(3, 8, 13, 18)
    fast = fusewright.optimize(model, (x,), kernels="always", measure=False)
    names = [k.name for k in fusewright.explain(fast).kernels if k.family == "contraction"]
    assert sorted(names) == ["fused_conv", "fused_conv_mul_add_relu", "fused_conv_relu"]
    with torch.no_grad():
        for batch in (3, 5):
            inputs = torch.randn(batch, 8, 13, 18)
            torch.testing.assert_close(fast(inputs), model(inputs), rtol=1e-4, atol=1e-5)


def test_gradients_of_what_is_added() -> None:
    model, x = Block().eval(), torch.randn(3, 8, 13, 18)
    other = deepcopy(model)
    fast = fusewright.optimize(model, (x,), kernels="always", measure=False)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for run_model, given in zip((fast, other), inputs, strict=True):
        run_model(given).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    for got, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-3)
