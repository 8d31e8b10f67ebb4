"""Solutions for the tests: problems as text, written by the passes for a CUDA device that is not there."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from fusewright.dispatch import Options
from fusewright.emit.draft import Draft
from fusewright.emit.header import Checked
from fusewright.emit.trying import tried
from fusewright.emit.writing import content_of, drafted
from fusewright.problem import load_problem

ROOT = Path(__file__).parents[2]
FOUNDING = ("conv_avgpool_sigmoid_sum", "conv3d_div_maxpool_gap_bias_sum", "convtranspose_gap_bias_logsumexp")
CUDA = torch.device("cuda", 0)
_count = itertools.count()


def problem(tmp_path: Path, init: str, forward: str, inputs: str, *, arguments: str = "", given: str = "") -> Path:
    """A problem file of these lines."""
    path = tmp_path / f"problem_{next(_count)}.py"
    takes = f", {arguments}" if arguments else ""
    lines = [
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        "",
        "",
        "class Model(nn.Module):",
        f"    def __init__(self{takes}):",
        "        super().__init__()",
        *(f"        {line}" for line in init.splitlines()),
        "",
        *(f"    {line}" for line in forward.splitlines()),
        "",
        "",
        "def get_inputs():",
        f"    return {inputs}",
        "",
        "",
        "def get_init_inputs():",
        f"    return [{given}]",
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def agrees_on_a_cpu(made: tuple[Path, Path], *, outputs: float, gradients: float) -> None:
    """A problem's solution for both devices, on a CPU, where the kernels of a GPU stand in as their references."""
    for target, stands_in in (("cpu", False), ("cuda", True)):
        facts = tried(*made, "cpu", target=target, timed=False)
        assert facts["stands in"] == stands_in
        assert facts["errors"]["outputs"]["new"] < outputs
        assert facts["errors"]["gradients"]["new"] < gradients


def draft(path: Path, *, training: bool = True, target: str = "cuda", **options: Any) -> Draft:
    """What becomes of a problem, by estimate."""
    loaded = load_problem(path)
    model = loaded.build().train(training)
    asked = Options(verify=False, measure=False, target=CUDA if target == "cuda" else None, **options)
    return drafted(loaded, model, loaded.placeholders(), asked)


def drafts(path: Path, targets: Sequence[str], **options: Any) -> list[Draft]:
    """What becomes of a problem for several devices."""
    return [replace(draft(path, target=target, **options), suffix=f"_{target}") for target in targets]


def text_of(*drafts: Draft) -> str:
    """The whole text of a solution that has not been tried."""
    return content_of(drafts, [Checked()] * len(drafts))


@functools.cache
def founding(name: str) -> Draft:
    """What becomes of a founding model; made once for all tests of a process."""
    return draft(ROOT / "examples" / f"{name}.py")


def write(path: Path, *, targets: Sequence[str] = ("cuda",), **options: Any) -> Path:
    """The solution file of a problem, beside it; it serves calls with gradients whether or not that pays."""
    solution = path.with_name(f"{path.stem}_solution.py")
    options = {"kernels": "always", **options}
    several = len(targets) > 1
    made = drafts(path, targets, **options) if several else [draft(path, target=targets[0], **options)]
    solution.write_text(text_of(*made))
    return solution


def load(path: Path) -> ModuleType:
    """A Python file as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"solution_{next(_count)}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuda_source(solution: Any, capability: tuple[int, int] = (9, 0)) -> tuple[str, list[str]]:
    """What a solution would have built on a GPU: the whole CUDA text and the compiler's options."""

    class Asked(Exception):
        pass

    asked: dict[str, Any] = {}

    def take(**given: Any) -> None:
        asked.update(given)
        raise Asked

    with (
        patch.object(solution, "load_inline", take),
        patch("torch.cuda.get_device_capability", lambda *_: capability),
    ):
        try:
            (solution.cuda_library if hasattr(solution, "cuda_library") else solution.library)(0)
        except Asked:
            assert asked["no_implicit_headers"]
    return "\n".join(asked["cuda_sources"]), asked["extra_cuda_cflags"]


def nvcc(source: str, options: list[str], tmp_path: Path) -> None:
    """Compiles CUDA text; an error fails the test."""
    (tmp_path / "all.cu").write_text(source)
    command = ["nvcc", "-c", *options, "-o", str(tmp_path / "all.o"), str(tmp_path / "all.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def ruff(path: Path) -> None:
    """The file passes ruff's checks and is formatted, both by its defaults but for the width."""
    for command in (["check", "--select", "E4,E7,E9,F"], ["format", "--check"]):
        whole = [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "120", str(path)]
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
