"""The options of solution files, through the command line: what they refuse, and what they make of the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from solutions import load, problem
from typer.testing import CliRunner, Result

from fusewright.cli import app
from fusewright.emit import writing
from fusewright.errors import FusewrightError

CONV = "self.conv = nn.Conv2d(3, 8, 3)"
HEAD = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3))"
FACTS = {"errors": {"outputs": {"new": 1e-8, "eager": 1e-8}}, "torch": "2", "stands in": True, "first call": 1.0}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A problem; files are not tried in a fresh process, which other tests do."""
    monkeypatch.setattr(writing, "tried", lambda *_, **__: dict(FACTS))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return problem(tmp_path, CONV, HEAD, "[torch.rand(4, 3, 20, 24)]")


def written(path: Path, *options: str) -> tuple[Result, Path]:
    """What ``optimize -o`` says and the file that it writes."""
    solution = path.with_name("solution.py")
    arguments = ["optimize", str(path), "-o", str(solution), "--target", "cuda", "--kernels", "always", *options]
    return CliRunner().invoke(app, arguments), solution


def kernels_in(solution: Path) -> list[str]:
    """The names of the kernels in a solution."""
    return re.findall(r"^def (\w+)_launch\(", solution.read_text(), re.MULTILINE)


def refused(result: Result, sentence: str) -> None:
    """The command ended with a user's mistake and one sentence."""
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())


def test_kernel_name(small: Path) -> None:
    result, solution = written(small, "--kernel-name", "my_head")
    assert result.exit_code == 0, result.output
    assert kernels_in(solution) == ["my_head"]
    assert "my_head" in load(solution).MY_HEAD


def test_keep_leaves_an_operator_alone(small: Path) -> None:
    result, solution = written(small, "--keep", "conv")
    assert result.exit_code == 0, result.output
    assert kernels_in(solution)
    assert not any("conv" in name for name in kernels_in(solution))
    assert "Left to PyTorch as asked: conv." in " ".join(solution.read_text().split())


def test_only_replaces_an_operator(small: Path) -> None:
    result, solution = written(small, "--only", "relu,mean")
    assert result.exit_code == 0, result.output
    assert kernels_in(solution) == ["fused_relu_mean"]


@pytest.mark.parametrize("option", ["--keep", "--only"])
def test_operators_that_are_not_there(small: Path, option: str) -> None:
    result, solution = written(small, option, "softmax")
    refused(result, f"{option} softmax: the model has no such operator; it has")
    assert not solution.exists()


def test_a_file_that_exists_needs_force(small: Path) -> None:
    small.with_name("solution.py").write_text("mine")
    result, solution = written(small)
    refused(result, "this file exists; --force replaces it")
    assert solution.read_text() == "mine"
    result, _ = written(small, "--force")
    assert result.exit_code == 0, result.output
    assert "class ModelNew" in solution.read_text()
    assert not list(solution.parent.glob(".solution-*"))


def test_a_wrong_file_is_not_kept(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> None:
        raise FusewrightError("the solution file is wrong and was not kept: output 0 is off")

    monkeypatch.setattr(writing, "tried", wrong)
    result, _ = written(small)
    assert result.exit_code != 0
    assert "was not kept" in " ".join(result.output.split())
    assert [path.name for path in small.parent.iterdir()] == [small.name]


def test_a_run_that_is_killed_leaves_nothing_beside_the_problem(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_at(*_: Any, **__: Any) -> Any:
        assert [path.name for path in small.parent.iterdir()] == [small.name]
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "tried", looked_at)
    result, solution = written(small)
    assert result.exit_code == 130, result.output
    assert not solution.exists()


@pytest.mark.parametrize(
    ("target", "sentence"), [("tpu", "--target tpu: a solution file is for cuda or cpu, or for both: cuda,cpu")]
)
def test_devices(small: Path, target: str, sentence: str) -> None:
    refused(written(small, "--target", target)[0], sentence)


def test_a_file_for_both_devices(small: Path) -> None:
    plans = small.with_name("plans.json")
    result, solution = written(small, "--target", "cpu,cuda", "--json", str(plans))
    assert result.exit_code == 0, result.output
    names = kernels_in(solution)
    assert [name.rpartition("_")[2] for name in names] == ["cuda"] * (len(names) - 1) + ["cpu"]
    header = solution.read_text().partition("import ctypes")[0]
    assert header.index("On a GPU.") < header.index("On a CPU.") < header.index("Serves ")
    assert [plan["device"] for plan in json.loads(plans.read_text())] == ["cpu", "cpu"]


def test_a_device_for_which_nothing_is_gained(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = writing.drafted

    def none_on_a_cpu(*arguments: Any, **options: Any) -> Any:
        if arguments[3].target is None:
            raise writing.NothingGained("no solution file was written: it was not faster")
        return drafted(*arguments, **options)

    monkeypatch.setattr(writing, "drafted", none_on_a_cpu)
    result, solution = written(small, "--target", "cuda,cpu")
    refused(result, "for cpu, no solution file was written: it was not faster; --target cuda writes one without it")
    assert not solution.exists()


def test_a_model_that_nothing_is_gained_for(small: Path, tmp_path: Path) -> None:
    forward = "def forward(self, x):\n    return x.sum((2, 3))"
    whole = problem(tmp_path, "self.scale = 2", forward, "[torch.randint(0, 9, (4, 3, 9, 9))]")
    result, solution = written(whole)
    refused(result, "no solution file was written: no rule applies, and no part of the model has a kernel")
    assert not solution.exists()


def test_a_forward_that_fails_is_found_in_the_problem(small: Path, tmp_path: Path) -> None:
    for forward, sentence in (
        ("raise ValueError('not ready')", "Model.forward() raised ValueError: not ready"),
        ("return self.conv(x[:, :2])", "Model.forward() raised RuntimeError: Given groups=1, weight of size"),
        ("raise SystemExit('not me')", "Model.forward() raised SystemExit: not me"),
    ):
        path = problem(tmp_path, CONV, f"def forward(self, x):\n    {forward}", "[torch.rand(4, 3, 9, 9)]")
        result, solution = written(path)
        refused(result, f"{path.name}:12: {sentence}")
        assert not solution.exists()


def test_inputs_that_the_forward_does_not_take(small: Path, tmp_path: Path) -> None:
    for inputs, sentence in (
        ("[]", "Model.forward() takes (x) and get_inputs() gives 0 arguments: missing a required argument: 'x'"),
        ("{'y': 1}", "Model.forward() takes (x) and get_inputs() gives 1 argument: missing a required argument: 'x'"),
        ("torch.rand(3)", "get_inputs() returned a Tensor; return a list of positional arguments or a dict"),
    ):
        path = problem(tmp_path, CONV, HEAD, inputs)
        result, solution = written(path)
        refused(result, f"{path.name}: {sentence}")
        assert not solution.exists()


def test_places_that_cannot_be_written(small: Path) -> None:
    for place, sentence in (
        (small, "this is the problem file itself"),
        (small.parent, "this is a directory"),
        (small.parent / "absent" / "s.py", "is no directory; make it first"),
        (Path("/proc") / "s.py", "nothing can be written to /proc: "),
    ):
        refused(CliRunner().invoke(app, ["optimize", str(small), "-o", str(place)]), sentence)


def test_single_kernel(small: Path) -> None:
    result, solution = written(small, "--single-kernel")
    assert result.exit_code == 0, result.output
    (name,) = kernels_in(solution)
    assert solution.read_text().count("failure(launch(") == 1
    assert solution.read_text().count("torch.empty(") == 1
    assert "conv" in name


def test_what_cannot_be_a_single_kernel(small: Path, tmp_path: Path) -> None:
    two = problem(
        tmp_path,
        CONV,
        "def forward(self, x):\n    return self.conv(x).relu().renorm(2, 0, 1e9)",
        "[torch.rand(4, 3, 9, 9)]",
    )
    result, solution = written(two, "--single-kernel")
    refused(result, "no generated kernel does it all in one launch; there would be fused_conv_relu and renorm")
    assert not solution.exists()


def test_weights_derived_beforehand_are_more_than_one_launch(small: Path, tmp_path: Path) -> None:
    derives = problem(
        tmp_path, CONV, "def forward(self, x):\n    return self.conv(x).mean((2, 3))", "[torch.rand(4, 3, 9, 9)]"
    )
    result, _ = written(derives, "--single-kernel", "--rewrite", "always")
    refused(result, "derive what the kernel reads from conv.")
