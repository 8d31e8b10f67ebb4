"""Solution files: what they hold, that they compile, and that they compute what the model computes, on a CPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from solutions import FOUNDING, cuda_source, draft, founding, load, nvcc, problem, ruff, text_of, write

from fusewright.dispatch import Options
from fusewright.emit.trying import tried
from fusewright.emit.writing import write_solution
from fusewright.problem import load_problem

CONV = "self.conv = nn.Conv2d(3, 8, 3)"
HEAD = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3))"
SUM = "def forward(self, x):\n    return self.linear(x).sum(1)"
INPUT = "[torch.rand(4, 3, 20, 24)]"


def solution_of(name: str, tmp_path: Path) -> Path:
    """The solution file of a founding model."""
    path = tmp_path / f"{name}.py"
    path.write_text(text_of(founding(name)))
    return path


class TestText:
    @pytest.mark.parametrize("name", FOUNDING)
    def test_meets_the_rules_of_the_field(self, tmp_path: Path, name: str) -> None:
        path = solution_of(name, tmp_path)
        text = path.read_text()
        assert not re.search(r"\bpass\b|\btry\b|\bexcept\b|threading|\bfusewright\.", text)
        assert "load_inline(" in text
        assert "__global__" in text
        assert "class ModelNew(Model):" in text
        ruff(path)

    @pytest.mark.parametrize("name", FOUNDING)
    def test_holds_the_kernels_as_they_ran(self, tmp_path: Path, name: str) -> None:
        made = founding(name)
        solution = load(solution_of(name, tmp_path))
        assert made.program.kernels
        for kernel in made.program.kernels:
            assert getattr(solution, kernel.name.upper()) == kernel.source

    def test_is_the_same_every_time(self, tmp_path: Path) -> None:
        path = problem(tmp_path, CONV, HEAD, INPUT)
        assert text_of(draft(path)) == text_of(draft(path))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("name", FOUNDING)
def test_launchers_compile_with_their_kernels(name: str, tmp_path: Path) -> None:
    nvcc(*cuda_source(load(solution_of(name, tmp_path))), tmp_path)


def test_runs_without_fusewright(tmp_path: Path) -> None:
    path = problem(tmp_path, CONV, HEAD, INPUT)
    facts = tried(path, write(path), "cpu", target="cuda", timed=False)
    assert facts["errors"]["outputs"]["new"] < 1e-6
    assert facts["errors"]["gradients"]["new"] < 1e-5


@pytest.mark.parametrize(
    ("what", "target"),
    [
        ("made for one batch", "cpu"),
        ("writes to its input", "cuda"),
        pytest.param("made for one batch", "cuda", marks=pytest.mark.slow),
        pytest.param("writes to its input", "cpu", marks=pytest.mark.slow),
    ],
)
def test_a_model_made_for_one_batch_and_one_that_writes_to_its_input(what: str, target: str, tmp_path: Path) -> None:
    """A file is tried on few rows, unless it serves no other batch; what Model does to its input is right."""
    named = "def forward(self, *args, **named):\n    return self.conv(named['x']).relu().mean((2, 3))"
    given = "{'x': torch.rand(4, 3, 20, 24)}"
    writes = "def forward(self, x):\n    x.mul_(2)\n    return self.conv(x).relu().mean((2, 3))"
    forward, inputs = {"made for one batch": (named, given), "writes to its input": (writes, INPUT)}[what]
    path = problem(tmp_path, CONV, forward, inputs)
    solution = path.with_name(f"{path.stem}_{target}.py")
    options = Options(verify=False, measure=False, kernels="always")
    written = write_solution(load_problem(path), solution, options, targets=[target], timed=False)
    assert written.plans[0].kernels[0].path == "generated"
    assert written.checked[0].facts["errors"]["outputs"]["new"] < 1e-6


def test_inputs_of_which_some_have_no_rows_of_a_batch(tmp_path: Path) -> None:
    forward = (
        "def forward(self, pair, named):\n    return self.conv(pair[0] + pair[1]).relu().mean((2, 3)) * named['s']"
    )
    inputs = "[[torch.rand(5, 3, 20, 24), torch.rand(5, 3, 20, 24)], {'s': torch.rand(8)}]"
    path = problem(tmp_path, CONV, forward, inputs)
    options = Options(verify=False, measure=False, kernels="always")
    written = write_solution(load_problem(path), tmp_path / "solution.py", options, targets=["cpu"], timed=False)
    assert {choice.path for choice in written.plans[0].kernels} == {"generated"}
    assert written.checked[0].facts["errors"]["outputs"]["new"] < 1e-6


def test_inputs_of_other_sizes_keep_their_order_in_memory(tmp_path: Path) -> None:
    """An answer that lies as its input does is the kernels' for that order alone."""
    forward = "def forward(self, x):\n    return F.avg_pool2d(self.conv(x).tanh(), 2)"
    inputs = "[torch.rand(4, 3, 20, 24).to(memory_format=torch.channels_last)]"
    path = problem(tmp_path, CONV, forward, inputs)
    solution = tmp_path / "solution.py"
    options = Options(verify=False, measure=False, kernels="always")
    written = write_solution(load_problem(path), solution, options, targets=["cpu"], timed=False)
    assert [choice.path for choice in written.plans[0].kernels] == ["generated"]
    assert "<= x.shape[2] <=" in solution.read_text()
    assert ".is_contiguous()" in solution.read_text()


def test_a_forward_that_makes_tensors_makes_them_on_the_device_of_its_input(tmp_path: Path) -> None:
    forward = (
        "def forward(self, x):\n    start = torch.zeros(1, 8, device=x.device) + torch.arange(8, device=x.device)\n"
        "    return (self.conv(x).relu().mean((2, 3)) * torch.full((1, 8), 2.0, device=x.device)) + start"
    )
    path = problem(tmp_path, CONV, forward, INPUT)
    solution = write(path, kernels="always")
    assert 'device="cuda")' in solution.read_text()
    assert "cuda:" not in solution.read_text()
    facts = tried(path, solution, "cpu", target="cuda", timed=False)
    assert facts["errors"]["outputs"]["new"] < 1e-6


def test_a_rewrite_without_kernels_is_a_solution_too(tmp_path: Path) -> None:
    path = problem(tmp_path, "self.linear = nn.Linear(64, 96)", SUM, "[torch.rand(8, 64)]")
    solution = write(path, kernels="never", rewrite="always")
    assert "load_inline" not in solution.read_text()
    ruff(solution)
    facts = tried(path, solution, "cpu", target="cuda", timed=False)
    assert facts["errors"]["outputs"]["new"] < 1e-5


def test_imports_of_its_own_that_the_file_needs_too(tmp_path: Path) -> None:
    init = f"{CONV}\nself.act = partial(F.leaky_relu, negative_slope=0.2)"
    path = problem(tmp_path, init, "def forward(self, x):\n    return self.act(self.conv(x)).mean((2, 3))", INPUT)
    path.write_text("from functools import partial\n" + path.read_text())
    solution = write(path)
    assert len(re.findall(r"^from functools import .*\bpartial\b", solution.read_text(), re.MULTILINE)) == 1
    ruff(solution)
