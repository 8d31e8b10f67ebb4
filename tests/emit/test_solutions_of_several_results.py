"""Solution files whose kernels have several results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from solutions import agrees_on_a_cpu, cuda_source, load, nvcc, problem, ruff, write

from fusewright.emit.trying import tried

INIT = "self.norm = nn.LayerNorm(96)\nself.head = nn.Linear(96, 96)"
FORWARD = "def forward(self, x, y):\n    h = x + y\n    return h * self.head(self.norm(h)), h"
INPUTS = "[torch.randn(40, 96), torch.randn(40, 96)]"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A problem and its solution for both devices."""
    path = problem(tmp_path_factory.mktemp("several"), INIT, FORWARD, INPUTS)
    return path, write(path, targets=("cuda", "cpu"))


def test_text(made: tuple[Path, Path]) -> None:
    text = made[1].read_text()
    assert "def fused_add_layernorm_cuda_launch(x: torch.Tensor" in text.replace("\n    ", "")
    assert "Launches the kernel and returns out, ahead." in text
    assert "-> tuple[torch.Tensor, ...]:" in text
    ruff(made[1])


def test_runs_on_a_cpu(made: tuple[Path, Path]) -> None:
    agrees_on_a_cpu(made, outputs=1e-5, gradients=1e-4)


def test_gradients(made: tuple[Path, Path]) -> None:
    """Of the function that calls such a kernel, to one result or to both, and once more."""
    solution: Any = load(made[1])
    reference = solution.fused_add_layernorm_cuda_reference

    def call(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = solution.differentiable(reference, reference, *operands)
        return result

    x, y, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 96), (2, 96), (96,), (96,)))
    for take in (call, lambda *given: call(*given)[0], lambda *given: call(*given)[1]):
        assert torch.autograd.gradcheck(take, (x, y, w, b))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_the_cuda_part_compiles(made: tuple[Path, Path], tmp_path: Path) -> None:
    nvcc(*cuda_source(load(made[1])), tmp_path)


def test_batch_norm_in_training(tmp_path: Path) -> None:
    """Statistics are several results, what normalises by them is given parameters as the model holds them, and the
    solution's own C++ compares their shapes."""
    init, forward = "self.norm = nn.BatchNorm2d(8)", "def forward(self, x):\n    return F.celu(self.norm(x) + x) * 0.5"
    path = problem(tmp_path, init, forward, "[torch.randn(4, 8, 6, 7)]")
    made = path, write(path)
    text = made[1].read_text()
    assert "fused_sub_mul_add_celu_mul(x, norm_bias, norm_weight, fused" in text
    assert "fused_statistics" in text and "Launches the kernel and returns out, out1, out2, out3." in text
    facts = tried(*made, "cpu", target="cuda", timed=False)
    assert facts["stands in"] and facts["errors"]["outputs"]["new"] < 1e-5
    assert facts["errors"]["gradients"]["new"] < 1e-4
    if shutil.which("nvcc") is not None:
        nvcc(*cuda_source(load(made[1])), tmp_path)
