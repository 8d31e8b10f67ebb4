"""Problem files: what loads, what a batch means, and the one sentence for each mistake."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import problem as problem_module
from fusewright.errors import ProblemError
from fusewright.problem import Problem, call, load_candidate, load_problem

GOOD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features, bias=True):
        super().__init__()
        self.linear = nn.Linear(4, features, bias=bias)

    def forward(self, x):
        return self.linear(x)

batch_size = 16

def get_inputs():
    return [torch.rand(batch_size, 4)]

def get_init_inputs():
    return [3]
"""

EXAMPLES = Path(__file__).parent.parent / "examples"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str, name: str = "problem.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return _write


def edited(*pairs: tuple[str, str]) -> str:
    text = GOOD
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def shapes(problem: Problem) -> list[tuple[int, ...]]:
    arguments = problem.inputs()
    values: Any = arguments.values() if isinstance(arguments, dict) else arguments
    return [tuple(x.shape) for x in values]


class TestLoading:
    def test_builds_and_runs(self, write: Write) -> None:
        problem = load_problem(write(GOOD))
        model, inputs = problem.build(), problem.inputs()
        assert problem.try_forward(model, inputs).shape == (16, 3)

    def test_same_seed_same_weights_and_inputs(self, write: Write) -> None:
        problem = load_problem(write(GOOD))
        assert torch.equal(problem.build(1).linear.weight, problem.build(1).linear.weight)
        assert not torch.equal(problem.build(1).linear.weight, problem.build(2).linear.weight)
        assert torch.equal(problem.inputs(1)[0], problem.inputs(1)[0])
        assert not torch.equal(problem.inputs(1)[0], problem.inputs(2)[0])

    def test_callers_random_stream_is_untouched(self, write: Write) -> None:
        problem = load_problem(write(GOOD))
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        problem.try_forward(problem.build(), problem.inputs())
        assert torch.equal(torch.rand(3), expected)

    def test_keyword_arguments(self, write: Write) -> None:
        text = edited(
            ("return [3]", 'return {"features": 5, "bias": False}'),
            ("return [torch.rand(batch_size, 4)]", 'return {"x": torch.rand(batch_size, 4)}'),
        )
        problem = load_problem(write(text))
        model, inputs = problem.build(), problem.inputs()
        assert model.linear.bias is None
        assert problem.try_forward(model, inputs).shape == (16, 5)

    def test_without_get_init_inputs(self, write: Write) -> None:
        text = edited(("features, bias=True", "features=2, bias=True")).partition("def get_init_inputs")[0]
        assert load_problem(write(text)).build().linear.out_features == 2

    def test_imports_its_neighbours(self, write: Write) -> None:
        write("WIDTH = 7\n", "neighbour_of_problem.py")
        problem = load_problem(write("from neighbour_of_problem import WIDTH\n" + edited(("[3]", "[WIDTH]"))))
        assert problem.build().linear.out_features == 7

    def test_models_can_be_pickled(self, write: Write) -> None:
        model = load_problem(write(GOOD)).build()
        assert torch.equal(pickle.loads(pickle.dumps(model)).linear.weight, model.linear.weight)

    def test_candidate_takes_the_references_inputs(self, write: Write) -> None:
        reference = load_problem(write(GOOD))
        candidate = load_candidate(write(edited(("class Model(", "class ModelNew(")), "candidate.py"), reference)
        assert candidate.model_class.__name__ == "ModelNew"
        assert torch.equal(candidate.inputs(3)[0], reference.inputs(3)[0])
        assert torch.equal(candidate.build(3).linear.weight, reference.build(3).linear.weight)

    def test_candidate_prefers_modelnew(self, write: Write) -> None:
        text = GOOD + "\nclass ModelNew(Model):\n    pass\n"
        path = write(text)
        assert load_candidate(path, load_problem(path)).model_class.__name__ == "ModelNew"

    @pytest.mark.parametrize("path", sorted(EXAMPLES.glob("c*.py")), ids=lambda path: path.stem)
    def test_examples(self, path: Path) -> None:
        problem = load_problem(path).with_batch(1)
        assert problem.try_forward(problem.build(), problem.inputs()).shape[0] == 1


class TestBatch:
    def check(self, problem: Problem, size: int, expected: list[tuple[int, ...]], asked_file: bool) -> Problem:
        smaller = problem.with_batch(size)
        assert shapes(smaller) == expected
        assert (smaller.cut is None) == asked_file
        return smaller

    def test_global_named_batch(self, write: Write) -> None:
        self.check(load_problem(write(GOOD)), 2, [(2, 4)], asked_file=True)

    def test_value_derived_from_the_batch_follows(self, write: Write) -> None:
        text = edited(
            ("batch_size = 16", "batch_size: int = 16\nshape = (batch_size, 4)"),
            ("rand(batch_size, 4)", "rand(*shape)"),
        )
        self.check(load_problem(write(text)), 3, [(3, 4)], asked_file=True)

    def test_same_number_elsewhere_is_left_alone(self, write: Write) -> None:
        text = edited(("batch_size = 16", "width = 4\nrows = 4"), ("rand(batch_size, 4)", "rand(rows, width)"))
        self.check(load_problem(write(text)), 2, [(2, 4)], asked_file=True)

    def test_literal_in_get_inputs(self, write: Write) -> None:
        self.check(load_problem(write(edited(("rand(batch_size, 4)", "rand(16, 4)")))), 2, [(2, 4)], asked_file=True)

    def test_ambiguous_literal_falls_back_to_rows(self, write: Write) -> None:
        problem = load_problem(write(edited(("rand(batch_size, 4)", "rand(4, 4)"))))
        smaller = self.check(problem, 2, [(2, 4)], asked_file=False)
        assert torch.equal(smaller.inputs()[0], problem.inputs()[0][:2])

    def test_rows_repeat_when_there_are_too_few(self, write: Write) -> None:
        problem = load_problem(write(edited(("rand(batch_size, 4)", "rand(4, 4)"))))
        larger = self.check(problem, 6, [(6, 4)], asked_file=False)
        assert torch.equal(larger.inputs()[0][4:], problem.inputs()[0][:2])

    def test_batch_in_second_place_too(self, write: Write) -> None:
        inputs = "[torch.rand(batch_size, 4), torch.rand(2, batch_size, 4)]"
        problem = load_problem(write(edited(("[torch.rand(batch_size, 4)]", inputs))))
        self.check(problem, 5, [(5, 4), (2, 5, 4)], asked_file=True)

    def test_keyword_and_scalar_inputs(self, write: Write) -> None:
        inputs = '{"x": torch.rand(batch_size, 4), "scale": torch.tensor(2.0)}'
        problem = load_problem(write(edited(("[torch.rand(batch_size, 4)]", inputs))))
        self.check(problem, 5, [(5, 4), ()], asked_file=True)

    def test_generation_that_fails_on_the_meta_device(self, write: Write) -> None:
        text = edited(("return [torch.rand(batch_size, 4)]", "x = torch.rand(16, 4)\n    return [x / x.max().item()]"))
        self.check(load_problem(write(text)), 2, [(2, 4)], asked_file=True)

    def test_twice(self, write: Write) -> None:
        problem = load_problem(write(GOOD)).with_batch(2).with_batch(5)
        assert shapes(problem) == [(5, 4)]

    def test_gradient_flag_survives(self, write: Write) -> None:
        problem = load_problem(write(edited(("rand(batch_size, 4)", "rand(4, 4, requires_grad=True)"))))
        inputs = problem.with_batch(2).inputs()
        assert inputs[0].is_leaf and inputs[0].requires_grad

    def test_huge_inputs_are_never_generated(self, write: Write) -> None:
        problem = load_problem(write(edited(("rand(batch_size, 4)", "rand(batch_size, 4 + 10**12)[:, :4]"))))
        with pytest.raises(ProblemError):
            problem.inputs()
        text = edited(("batch_size = 16", "batch_size = 10**12"))
        self.check(load_problem(write(text)), 2, [(2, 4)], asked_file=True)

    @pytest.mark.parametrize(
        ("inputs", "size", "message"),
        [
            ("[torch.rand(batch_size, 4)]", 0, "a batch of 0 is too small"),
            ("[torch.tensor(1.0), 3]", 2, "needs a tensor input with at least one dimension"),
            ("[torch.rand(4, 5), torch.rand(5, 6)]", 2, r"different leading sizes \(4, 5\)"),
        ],
    )
    def test_mistakes(self, write: Write, inputs: str, size: int, message: str) -> None:
        problem = load_problem(write(edited(("[torch.rand(batch_size, 4)]", inputs))))
        with pytest.raises(ProblemError, match=message):
            problem.with_batch(size)


def run_everything(path: Path) -> None:
    problem = load_problem(path)
    model, inputs = problem.build(), problem.inputs()
    problem.try_forward(model, inputs)
    call(model, inputs)


MISTAKES = {
    "syntax": ("def broken(:\n", r"problem\.py:1: syntax error: "),
    "null byte": ("x = 1\0\n", r"problem\.py.*: .*null byte"),
    "import": (
        "import torch\nimport no_such_package\n",
        r"problem\.py:2: import failed: No module named 'no_such_package'",
    ),
    "raises": (
        "import torch\n\nx = 1 / 0\n",
        r"problem\.py:3: loading the file raised ZeroDivisionError: division by zero",
    ),
    "exits": ("raise SystemExit(3)\n", r"problem\.py:1: loading the file raised SystemExit: 3"),
    "empty": ("", r"problem\.py defines no class Model$"),
    "other class": (GOOD.replace("class Model(", "class Net("), r"defines no class Model; it defines Net"),
    "no module": ("class Model:\n    pass\n", r"Model is no subclass of torch\.nn\.Module"),
    "no inputs": (GOOD.replace("def get_inputs", "def inputs"), r"defines no function get_inputs\(\)"),
    "init inputs no function": (GOOD + "get_init_inputs = 3\n", r"defines no function get_init_inputs\(\)"),
    "inputs raise": (edited(("return [torch", "return [torhc")), r"problem\.py:16: get_inputs\(\) raised NameError: "),
    "inputs no list": (edited(("[torch.rand(batch_size, 4)]", "torch.rand(2)")), r"get_inputs\(\) returned a Tensor; "),
    "inputs odd keys": (edited(("[torch.rand(batch_size, 4)]", "{1: 2}")), r"get_inputs\(\) returned a dict; "),
    "init raises": (edited(("[3]", "[1 // 0]")), r"problem\.py:19: get_init_inputs\(\) raised ZeroDivisionError"),
    "init arity": (
        edited(("[3]", "[3, True, 5]")),
        r"Model\(\) takes \(features, bias\) and get_init_inputs\(\) gives 3 arguments: too many positional arguments",
    ),
    "init keyword": (edited(("[3]", '{"wide": 3}')), r"get_init_inputs\(\) gives 1 argument: "),
    "constructor": (edited(("[3]", "[-3]")), r"problem\.py:8: Model\(\) raised RuntimeError: "),
    "forward arity": (
        edited(("[torch.rand(batch_size, 4)]", "[]")),
        r"Model\.forward\(\) takes \(x\) and get_inputs\(\) gives 0 arguments: missing a required argument: 'x'",
    ),
    "forward": (
        edited(("rand(batch_size, 4)", "rand(16, 5)")),
        r"problem\.py:11: Model\.forward\(\) raised RuntimeError: ",
    ),
    "too large": (edited(("rand(batch_size, 4)", "rand(10**12, 4)")), r"would need 16000\.0 GB .* --batch N"),
    "out of memory": (
        edited(("return self.linear(x)", "return torch.empty(10**14)")),
        r"problem\.py:11: Model\.forward\(\) ran out of memory; choose a smaller batch with --batch N",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_one_sentence(write: Write, name: str) -> None:
    text, message = MISTAKES[name]
    with pytest.raises(ProblemError, match=message) as caught:
        run_everything(write(text))
    assert "\n" not in str(caught.value)


def test_syntax_error_in_a_neighbour(write: Write) -> None:
    write("def broken(:\n", "broken_neighbour.py")
    with pytest.raises(ProblemError, match=r"broken_neighbour\.py:1: syntax error"):
        load_problem(write("import broken_neighbour\n"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"missing\.py: no such file"):
        load_problem(tmp_path / "missing.py")
    with pytest.raises(ProblemError, match="cannot be read: Is a directory"):
        load_problem(tmp_path)
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemError, match=re.escape("binary.py")):
        load_problem(tmp_path / "binary.py")


def test_memory_is_checked_before_generating(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "available_bytes", lambda: 100)
    with pytest.raises(ProblemError, match=r"would need 0\.0 GB and 0\.0 GB are free"):
        load_problem(write(GOOD)).inputs()
    monkeypatch.setattr(problem_module, "available_bytes", lambda: None)
    assert load_problem(write(GOOD)).inputs()[0].shape == (16, 4)


def test_interrupt_passes_through(write: Write) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_problem(write("raise KeyboardInterrupt\n"))
