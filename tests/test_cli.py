"""The command line: options reach the API, results reach the reader, every mistake is one sentence and an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_problem import GOOD
from torch import nn
from typer.testing import CliRunner, Result

import fusewright
from fusewright.cli import app
from fusewright.errors import UnsupportedError
from fusewright.plan import Kept, Plan, Work
from fusewright.runtime import cache
from fusewright.verification.verdict import Check, Verdict

GOOD_VERDICT = Verdict((Check("outputs", True, "16 rows"),), checked="batch 16 of 16 against float64", seconds=0.5)
BAD_VERDICT = Verdict((Check("outputs", False, "row 3 differs"),), checked="batch 16 of 16", seconds=0.5)
PLAN = Plan(
    model="Model",
    status="rewritten",
    reason="",
    device="cpu",
    signature="float32[16, 4]",
    before=Work(2e9, 2e6, 3, 0.01),
    after=Work(1e9, 1e6, 2, 0.005),
    kept=(Kept("forward", "rewritten", "twice as fast"),),
    verdict=GOOD_VERDICT,
)

Run = Callable[..., Result]


class Api:
    """Stands in for the library: records what it was asked, answers what the test wants."""

    def __init__(self) -> None:
        self.plan, self.verdict = PLAN, GOOD_VERDICT
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.error: BaseException | None = None

    def optimize(self, *args: Any, **kwargs: Any) -> nn.Module:
        self._record("optimize", args, kwargs)
        return nn.Identity()

    def explain(self, *args: Any, **kwargs: Any) -> Plan:
        self._record("explain", args, kwargs)
        return self.plan

    def verify(self, *args: Any, **kwargs: Any) -> Verdict:
        self._record("verify", args, kwargs)
        return self.verdict

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((name, args, kwargs))
        if self.error is not None:
            raise self.error


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    fake = Api()
    for name in ("optimize", "explain", "verify"):
        monkeypatch.setattr(fusewright, name, getattr(fake, name), raising=False)
    return fake


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    yield lambda *args: CliRunner().invoke(app, [str(arg) for arg in args], prog_name="fusewright")


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.py"
    path.write_text(GOOD)
    return path


@pytest.fixture
def candidate(tmp_path: Path) -> Path:
    path = tmp_path / "candidate.py"
    path.write_text(GOOD.replace("class Model(", "class ModelNew("))
    return path


class TestOptimize:
    def test_defaults(self, run: Run, api: Api, problem: Path) -> None:
        result = run("optimize", problem)
        assert result.exit_code == 0, result.output
        (name, (model, inputs), options), (explained, _, _) = api.calls
        assert (name, explained) == ("optimize", "explain")
        assert model.training
        assert inputs[0].shape == (16, 4)
        assert options == {
            "training": None,
            "precision": "eager",
            "rewrite": "cost",
            "kernels": "auto",
            "graphs": "auto",
            "finite": False,
            "verify": True,
            "measure": True,
        }
        assert all(type(value) in (str, bool, type(None)) for value in options.values())
        for words in ("Model: rewritten", "2.00x less", "batch 16 of 16 against float64"):
            assert words in result.stdout

    def test_every_option(self, run: Run, api: Api, problem: Path, tmp_path: Path) -> None:
        target = tmp_path / "plan.json"
        choices = "--precision fp32 --rewrite always --kernels never --graphs never --finite --batch 3 --no-measure"
        result = run("optimize", problem, *choices.split(), "--device", "cpu", "--inference", "--json", target)
        assert result.exit_code == 0, result.output
        _, (model, inputs), options = api.calls[0]
        assert not model.training
        assert inputs[0].shape == (3, 4)
        assert options["training"] is False
        assert (options["precision"], options["rewrite"], options["kernels"]) == ("fp32", "always", "never")
        assert (options["graphs"], options["finite"], options["measure"]) == ("never", True, False)
        assert json.loads(target.read_text())["model"] == "Model"

    def test_failed_verification(self, run: Run, api: Api, problem: Path) -> None:
        api.plan = Plan("Model", "unchanged", "", "cpu", "float32[16, 4]", verdict=BAD_VERDICT)
        result = run("optimize", problem)
        assert result.exit_code == 1
        assert "row 3 differs" in result.stdout

    def test_nothing_gained_is_success(self, run: Run, api: Api, problem: Path) -> None:
        api.plan = Plan("Model", "unchanged", "no rule applies", "cpu", "float32[16, 4]", verdict=GOOD_VERDICT)
        result = run("optimize", problem)
        assert result.exit_code == 0
        assert "nothing to gain" in result.stdout
        api.plan = Plan("Model", "untouched", "it cannot be captured", "cpu", "float32[16, 4]")
        assert run("optimize", problem).exit_code == 0

    def test_solution_files_are_for_devices_that_have_kernels(
        self, run: Run, api: Api, problem: Path, tmp_path: Path
    ) -> None:
        result = run("optimize", problem, "-o", tmp_path / "solution.py", "--target", "cuda,tpu")
        assert_mistake(result, "a solution file is for cuda or cpu, or for both: cuda,cpu")
        assert not (tmp_path / "solution.py").exists()

    def test_a_forward_that_updates_buffers_is_tried_on_a_twin(self, run: Run, api: Api, tmp_path: Path) -> None:
        path = tmp_path / "norm.py"
        path.write_text(
            GOOD.replace("self.linear(x)", "self.norm(self.linear(x))").replace(
                "        self.linear =", "        self.norm = nn.BatchNorm1d(features)\n        self.linear ="
            )
        )
        assert run("optimize", path).exit_code == 0
        assert api.calls[0][1][0].norm.num_batches_tracked == 0


class TestExplain:
    def test_explains_the_model(self, run: Run, api: Api, problem: Path, tmp_path: Path) -> None:
        target = tmp_path / "plan.json"
        result = run("explain", problem, "--batch", 2, "--json", target)
        assert result.exit_code == 0, result.output
        (name, (model, inputs), _) = api.calls[0]
        assert name == "explain" and isinstance(model, nn.Module) and inputs[0].shape == (2, 4)
        assert json.loads(target.read_text())["status"] == "rewritten"
        assert "Model: rewritten" in result.stdout


class TestVerify:
    def test_verified(self, run: Run, api: Api, problem: Path, candidate: Path, tmp_path: Path) -> None:
        target = tmp_path / "verdict.json"
        result = run("verify", problem, candidate, "--json", target)
        assert result.exit_code == 0, result.output
        _, (reference, other, inputs), _ = api.calls[0]
        assert type(other).__name__ == "ModelNew"
        assert torch.equal(reference.linear.weight, other.linear.weight)
        assert inputs[0].shape == (16, 4)
        assert json.loads(target.read_text())["ok"] is True
        assert "verified: 1 passed" in result.stdout

    def test_weights_are_shared_even_if_drawn_in_another_order(
        self, run: Run, api: Api, problem: Path, tmp_path: Path
    ) -> None:
        text = GOOD.replace("class Model(", "class ModelNew(").replace(
            "        self.linear =", "        torch.rand(3)\n        self.linear ="
        )
        path = tmp_path / "candidate.py"
        path.write_text(text)
        assert run("verify", problem, path).exit_code == 0
        _, (reference, other, _), _ = api.calls[0]
        assert torch.equal(reference.linear.weight, other.linear.weight)

    def test_refused(self, run: Run, api: Api, problem: Path, candidate: Path) -> None:
        api.verdict = BAD_VERDICT
        result = run("verify", problem, candidate)
        assert result.exit_code == 1
        assert "FAILED" in result.stdout and "row 3 differs" in result.stdout

    def test_candidate_without_a_model(self, run: Run, api: Api, problem: Path, tmp_path: Path) -> None:
        path = tmp_path / "empty.py"
        path.write_text("")
        assert_mistake(run("verify", problem, path), "defines no class ModelNew or Model")


class TestBench:
    def test_beside_eager(self, run: Run, api: Api, problem: Path, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(fusewright, "optimize", lambda model, inputs: model)
        target = tmp_path / "bench.json"
        result = run("bench", problem, problem, "--peers", "eager", "--batch", 2, "--json", target)
        assert result.exit_code == 0, result.output
        assert "with backward" in result.stdout
        first, second = json.loads(target.read_text())
        assert [row["name"] for row in first["rows"]] == ["eager", "fusewright"]
        assert second["environment"]["torch"] == torch.__version__

    def test_inference(self, run: Run, api: Api, problem: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(fusewright, "optimize", lambda model, inputs: model)
        result = run("bench", problem, "--peers", "eager", "--inference")
        assert result.exit_code == 0, result.output
        assert "with backward" not in result.stdout

    def test_a_wrong_answer_is_a_failure(self, run: Run, api: Api, problem: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(fusewright, "optimize", lambda model, inputs: nn.Sequential(model, nn.Tanh()))
        result = run("bench", problem, "--peers", "eager")
        assert result.exit_code == 1
        assert "differs from eager's" in " ".join(result.stdout.split())

    def test_unknown_peer(self, run: Run, api: Api, problem: Path) -> None:
        assert_mistake(run("bench", problem, "--peers", "eager,tvm"), "no peer is called tvm")


def assert_mistake(result: Result, words: str) -> None:
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.startswith("fusewright: error: ")
    assert result.stderr.strip().count("\n") == 0
    assert "Traceback" not in result.output


class TestMistakes:
    @pytest.mark.parametrize("command", ["optimize", "explain"])
    def test_in_the_problem_file(self, run: Run, api: Api, tmp_path: Path, command: str) -> None:
        assert_mistake(run(command, tmp_path / "missing.py"), "no such file")
        path = tmp_path / "broken.py"
        path.write_text("import torch\nimport no_such_package\n")
        assert_mistake(run(command, path), "broken.py:2: import failed: No module named 'no_such_package'")
        path.write_text(GOOD.replace("rand(batch_size, 4)", "rand(batch_size, 5)"))
        assert_mistake(run(command, path), "broken.py:11: Model.forward() raised RuntimeError: ")
        path.write_text(GOOD.replace("rand(batch_size, 4)", "rand(10**12, 4)"))
        assert_mistake(run(command, path), "choose a smaller batch with --batch N")

    def test_out_of_memory_while_optimizing(self, run: Run, api: Api, problem: Path) -> None:
        api.error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
        assert_mistake(run("optimize", problem), "memory ran out; choose a smaller batch")

    def test_what_the_library_refuses(self, run: Run, api: Api, problem: Path) -> None:
        api.error = UnsupportedError("kernels='always': no kernel family exists yet")
        assert_mistake(run("optimize", problem, "--kernels", "always"), "no kernel family exists yet")

    def test_our_own_bugs_keep_their_traceback(self, run: Run, api: Api, problem: Path) -> None:
        api.error = RuntimeError("a bug")
        result = run("optimize", problem)
        assert isinstance(result.exception, RuntimeError) and result.exit_code == 1

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self, run: Run, api: Api, problem: Path) -> None:
        assert_mistake(run("optimize", problem, "--device", "cuda"), "PyTorch finds no GPU")

    @pytest.mark.parametrize("where", ["nowhere/plan.json", "."])
    def test_json_that_cannot_be_written_is_noticed_first(
        self, run: Run, api: Api, problem: Path, tmp_path: Path, where: str
    ) -> None:
        assert_mistake(run("optimize", problem, "--json", tmp_path / where), "--json")
        assert api.calls == []

    @pytest.mark.parametrize(
        "arguments",
        [
            ["optimize", "x.py", "--fast"],
            ["optimize"],
            ["optimize", "x.py", "--precision", "fp8"],
            ["optimize", "x.py", "--batch", "0"],
            ["optimize", "x.py", "--batch", "many"],
            ["verify", "x.py"],
            ["bench"],
            ["cache", "drop"],
            ["improve", "x.py"],
        ],
    )
    def test_bad_usage(self, run: Run, arguments: list[str]) -> None:
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


class TestSmallCommands:
    def test_version(self, run: Run) -> None:
        result = run("--version")
        assert result.exit_code == 0
        assert result.stdout.strip() == "fusewright 0.1.0"

    def test_doctor(self, run: Run) -> None:
        result = run("doctor")
        assert result.exit_code == 0, result.output
        parts = ("C++ compiler", "CUDA compiler", "threads", "has backend=", "cache", "onnxruntime")
        for words in (torch.__version__, *parts):
            assert words in result.stdout

    def test_doctor_reports_an_unsafe_cache(self, run: Run) -> None:
        cache.cache_directory().chmod(0o777)
        result = run("doctor")
        assert result.exit_code == 0
        assert "can be written by other users" in " ".join(result.stdout.split())

    def test_cache(self, run: Run) -> None:
        assert "0 files" in run("cache", "ls").stdout
        cache.write_atomic(cache.cache_directory() / "device.json", b"{}")
        listed = run("cache", "ls").stdout
        assert "device.json" in listed and "1 file," in listed
        assert "1 file deleted" in run("cache", "clear").stdout
        assert cache.entries() == ()

    @pytest.mark.parametrize("command", [[], ["optimize"], ["explain"], ["verify"], ["bench"]])
    def test_help_has_examples(self, run: Run, command: list[str]) -> None:
        result = run(*command, "--help")
        assert result.exit_code == 0
        assert "Examples:" in result.stdout
        assert "fusewright " in result.stdout.partition("Examples:")[2]


def test_interrupt_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    # a shell that runs the tests in the background has them ignore the signal, and their children with them
    restore = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{restore}; from fusewright.cli import main; main()"
    command = [sys.executable, "-c", code, "explain", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().strip() == "ready"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read().strip() == "fusewright: interrupted"


def test_reader_that_goes_away(tmp_path: Path) -> None:
    """`fusewright doctor | head -0`: no traceback when nobody reads."""
    code = "from fusewright.cli import main; main()"
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", code, "doctor"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(write_end)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


TERMINAL = """
import pty, sys
sys.exit(pty.spawn(sys.argv[1:]) >> 8)
"""


def test_results_go_to_the_file_and_progress_to_the_terminal(problem: Path, tmp_path: Path) -> None:
    """With stderr a terminal and stdout a file, as in `fusewright bench x.py > out.txt`."""
    code = (
        "import fusewright; fusewright.optimize = lambda model, inputs: model\nfrom fusewright.cli import main; main()"
    )
    script, target = tmp_path / "main.py", tmp_path / "out.txt"
    script.write_text(code)
    shell = f"{sys.executable} {script} bench {problem} --peers eager > {target}"
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL, "sh", "-c", shell],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
        check=False,
    )
    text = target.read_text()
    assert done.returncode == 0, done.stdout
    assert "eager" in text and "\x1b" not in text
    assert b"\x1b" in done.stdout and b"1.00x" not in done.stdout
