"""Random problems: solutions are clean text, compile, refuse other shapes and compute what the model computes."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from solutions import ROOT, cuda_source, load, nvcc, ruff, write

from fusewright.emit.trying import tried

sys.path.insert(0, str(ROOT / "benchmarks"))
from configurations import draw


@pytest.mark.parametrize("index", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 16))])
def test_solution(index: int, tmp_path: Path) -> None:
    configuration = draw(7, index, 2e5, 2e6)
    path = tmp_path / "problem.py"
    path.write_text(configuration.source())
    solution = write(path, kernels="always")
    text = solution.read_text()
    ast.parse(text)
    ruff(solution)
    assert not re.search(r"\bpass\b|\btry\b|\bexcept\b", text)
    facts = tried(path, solution, "cpu", target="cuda", timed=False)
    assert facts["errors"]["outputs"]["new"] < max(1e-4, 4 * facts["errors"]["outputs"]["eager"])
    loaded: Any = load(solution)
    _refuses(loaded, configuration.shape)
    if shutil.which("nvcc"):
        nvcc(*cuda_source(loaded), tmp_path)


def _refuses(solution: Any, shape: tuple[int, ...]) -> None:
    """Sizes beyond what it says, and CPU tensors, are the original's; the batch may be another."""
    model = solution.ModelNew(*solution.get_init_inputs())
    assert solution.weights(model) is not None
    assert not solution.covered(model, torch.rand(shape))
    solution.kernels_for = lambda _: "cuda"
    assert solution.covered(model, torch.rand(shape))
    assert not solution.covered(model, torch.rand(*shape[:-1], 2 * shape[-1] + 1))
    assert not solution.covered(model, torch.rand(shape[0], shape[1] + 1, *shape[2:]))
    assert not solution.covered(model, torch.rand(shape).double())
