"""Which GPUs a file's kernels run on, in its text and for the compiler."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solutions import cuda_source, draft, load, nvcc, problem, text_of, write

from fusewright.codegen import cuda
from fusewright.emit import building, serving
from fusewright.emit.architecture import Architecture, architecture


def kernels(*needs: tuple[int, str]) -> Any:
    return [SimpleNamespace(needs=least, arch=arch) for least, arch in needs]


def test_the_most_that_any_kernel_needs() -> None:
    assert architecture([]) == Architecture(0, "")
    assert architecture(kernels((80, ""), (90, ""))) == Architecture(90, "")
    assert architecture(kernels((80, ""), (90, "sm_90a"))) == Architecture(90, "sm_90a")
    assert Architecture(80).among((80, 90)) == ["sm_80", "sm_90"]
    assert Architecture(90).among((80, 90)) == ["sm_90"]
    assert Architecture(90, "sm_90a").among((80, 90, 100)) == ["sm_90a"]


@pytest.mark.parametrize("found", [Architecture(80), Architecture(90, "sm_90a")])
def test_a_file_is_for_its_kernels_architecture(
    found: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "architecture", lambda _: found)
    monkeypatch.setattr(serving, "architecture", lambda _: found)
    forward = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3))"
    path = problem(tmp_path, "self.conv = nn.Conv2d(3, 8, 3)", forward, "[torch.rand(4, 3, 20, 24)]")
    solution: Any = load(write(path))
    named = bool(found.name)
    for capability, served in (((8, 6), not named), ((9, 0), True), ((10, 0), not named)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_, at=capability: at)
        solution.kernels_for.cache_clear()
        assert solution.kernels_for(torch.device("cuda", 0)) == ("cuda" if served else "")
    _, options = cuda_source(load(Path(solution.__file__)), (9, 0))
    number = "90a" if named else "90"
    assert f"-gencode=arch=compute_{number},code=sm_{number}" in options


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("halves", [False, True])
def test_a_file_with_a_kernel_for_one_architecture_compiles(
    halves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is written on a GPU that has what such a kernel needs."""
    options = cuda.options

    def of_hopper(*arguments: Any, **named: Any) -> list[dict[str, Any]]:
        found = options(*arguments, **{**named, "capability": 90})
        return sorted(found, key=lambda option: ("warpgroup" not in option, ("instead" in option) != halves))

    monkeypatch.setattr(cuda, "options", of_hopper)
    forward = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3))"
    path = problem(tmp_path, "self.conv = nn.Conv2d(64, 128, 3)", forward, "[torch.rand(64, 64, 130, 130)]")
    made = draft(path, kernels="always")
    (kernel,) = made.program.kernels
    assert kernel.arch == "sm_90a" and ("in_tf32" in kernel.source) == halves
    solution = tmp_path / "solution.py"
    solution.write_text(text_of(made))
    nvcc(*cuda_source(load(solution)), tmp_path)
