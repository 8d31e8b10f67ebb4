"""Files for a GPU and a CPU: each device's kernels in their place, the CPU's run here, the GPU's compiled."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from solutions import cuda_source, load, nvcc, problem, ruff, write

from fusewright.emit.trying import tried

FOUNDING = """
self.conv = nn.Conv2d(8, 16, 3)
self.pool = nn.AvgPool2d(4)
"""
TWO = """
self.conv = nn.ConvTranspose2d(8, 16, 3)
self.bias = nn.Parameter(torch.randn(16, 1, 1))
"""
FORWARDS = {
    "founding": (FOUNDING, "return torch.sigmoid(self.pool(self.conv(x))).sum(dim=(1, 2, 3))", "4, 8, 30, 34"),
    "two kernels": (
        TWO,
        "x = self.conv(x).mean((2, 3), keepdim=True) + self.bias\n"
        "    return torch.logsumexp(x, 1, keepdim=True).sum((2, 3)) * 10.0",
        "4, 8, 40, 48",
    ),
}


@pytest.fixture(scope="module", params=FORWARDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """A model's name, its problem and its solution for both devices."""
    init, forward, shape = FORWARDS[request.param]
    folder = tmp_path_factory.mktemp("both")
    path = problem(folder, init.strip(), f"def forward(self, x):\n    {forward}", f"[torch.rand({shape})]")
    solution = write(path, targets=("cuda", "cpu"), kernels="always", rewrite="always")
    yield request.param, path, solution


def kernels_for(solution: Path, target: str) -> list[str]:
    """The names of the kernels for a device."""
    return re.findall(rf"^def (\w+_{target})_launch\(", solution.read_text(), re.MULTILINE)


def test_text(made: tuple[str, Path, Path]) -> None:
    name, _, solution = made
    text = solution.read_text()
    assert len(kernels_for(solution, "cpu")) == (2 if name == "two kernels" else 1)
    assert kernels_for(solution, "cuda")
    assert not re.search(r"\bpass\b|\btry\b|\bexcept\b|threading|\bfusewright\.", text)
    assert text.count("class Model(") == text.count("class ModelNew(") == text.count("def covered(") == 1
    functions = re.findall(r"^def (\w+)\(|^    def (\w+)\(self", text, re.MULTILINE)
    assert all(len(re.findall(rf"\b{a or b}\b", text)) > 1 for a, b in functions if (a or b) not in ENTRIES)
    ruff(solution)


ENTRIES = {"forward", "get_inputs", "get_init_inputs"}


def test_runs_on_a_cpu(made: tuple[str, Path, Path]) -> None:
    """Outputs and gradients against float64 in a clean process, with the CPU's kernels, then with the GPU's program."""
    _, path, solution = made
    for target, stands_in in (("cpu", False), ("cuda", True)):
        facts = tried(path, solution, "cpu", target=target, timed=False)
        assert facts["stands in"] == stands_in
        assert facts["errors"]["outputs"]["new"] < 1e-6
        assert facts["errors"]["gradients"]["new"] < 1e-5


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_the_cuda_part_compiles(made: tuple[str, Path, Path], tmp_path: Path) -> None:
    nvcc(*cuda_source(load(made[2])), tmp_path)


def test_only_what_is_used_is_built(made: tuple[str, Path, Path]) -> None:
    solution: Any = load(made[2])
    asked: list[dict[str, Any]] = []
    build = solution.load_inline

    def record(**given: Any) -> Any:
        asked.append(given)
        return build(**given)

    solution.load_inline = record
    model = solution.ModelNew(*solution.get_init_inputs())
    assert not asked
    with torch.no_grad():
        (x,) = solution.get_inputs()
        torch.testing.assert_close(model(x), solution.Model.forward(model, x), rtol=1e-4, atol=1e-5)
    (once,) = asked
    assert once["cpp_sources"]
    assert "cuda_sources" not in once
