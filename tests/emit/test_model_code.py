"""The user's part of a solution file: the text of a problem file, with what its model needs and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from solutions import draft, load, problem, ruff, text_of, write

from fusewright.emit.model_code import ModelCode, escaped, model_code
from fusewright.emit.trying import tried
from fusewright.errors import UnsupportedError

CONV = "self.conv = nn.Conv2d(3, 8, 3)"
HEAD = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3))"
INPUT = "[torch.rand(4, 3, 20, 24)]"
WORD = re.compile(r"\bpass\b", re.IGNORECASE)


def code_of(source: str) -> ModelCode:
    """What is taken of a file's text that also defines ``get_inputs``."""
    ast.parse(source)
    return model_code(Path("problem.py"), f"{source}\n\ndef get_inputs():\n    return []\n")


@pytest.mark.parametrize(
    "literal",
    [
        '"by pass"',
        "'Pass'",
        'r"by\\d pass"',
        "rb'''two\npass'''",
        'b"PASS"',
        '"""pass, pass"""',
        "R'pass'",
        '"\\tpass"',
    ],
)
def test_strings_keep_their_value_without_the_word(literal: str) -> None:
    spelled = escaped(literal)
    assert not WORD.search(spelled)
    assert ast.literal_eval(spelled) == ast.literal_eval(literal)


def test_the_word_goes() -> None:
    found = code_of(
        "# one pass\nclass Empty:\n    '''pass'''\n\n\n"
        "class Model(Empty):\n    '''A pass.'''\n    name = r'a\\pass pass'\n"
        "    def helper(self):\n        pass  # and pass on\n"
    ).body
    assert not WORD.search(found)
    scope: dict[str, Any] = {}
    exec(found, scope)
    assert scope["Model"].name == "a\\pass pass"
    assert scope["Model"]().helper() is None


def test_lines_are_those_of_python() -> None:
    """Characters that other lines end with, statements that share one, decorators and comments above."""
    found = code_of(
        "\x0cUNUSED = 3\n\nNAME = '\u2028\x85'  # kept\nA = 1; B = A\n\n"
        "# said above\n@staticmethod\ndef used():\n    return B, NAME\n"
        "\n\nclass Model:\n    value = used\n"
    ).body
    assert found.split("\n\n\ndef get_inputs")[0] == (
        "NAME = '\u2028\x85'  # kept\nA = 1; B = A\n\n# said above\n@staticmethod\ndef used():\n    return B, NAME\n"
        "\n\nclass Model:\n    value = used"
    )


def test_what_the_model_does_not_need_stays_behind() -> None:
    found = code_of(
        "import os\nimport math\nfrom typing import Any\n\nLIMIT = math.pi\nOTHER = os.name\n\n\n"
        "def main():\n    OTHER\n"
        "\n\nclass Model:\n    limit = LIMIT\n\n\nif __name__ == '__main__':\n    main()\n"
    )
    assert found.imports == ("import math",)
    assert found.names == {"math", "LIMIT", "Model", "get_inputs"}
    assert not re.search("OTHER|main", found.body)


def test_what_other_files_do_not_hold_is_said() -> None:
    remarks = code_of(
        "import numpy as np\n\ntry:\n    SCALE = np.pi\nexcept ValueError:\n    SCALE = 3\n\n\n"
        "class Model:\n    scale = SCALE\n"
    ).remarks
    assert remarks == (
        "Needs numpy beside PyTorch, as the model's own code does.",
        "The model's own code catches exceptions, which checkers of this field refuse.",
    )
    assert not code_of("class Model:\n    scale = 3\n").remarks


def test_remarks_and_words_in_the_file(tmp_path: Path) -> None:
    path = problem(tmp_path, f"{CONV}\nself.name = 'the pass'", HEAD, INPUT)
    path = path.rename(tmp_path / "two-pass.py")
    path.write_text(f"import numpy\n\n{path.read_text().replace('(3, 8, 3)', '(3, int(numpy.array(8)), 3)')}")
    solution = write(path, targets=["cpu"], kernels="always")
    text = solution.read_text()
    assert not WORD.search(text)
    ruff(solution)
    assert "Needs numpy beside PyTorch" in " ".join(text.split())
    loaded: Any = load(solution)
    assert loaded.__doc__.startswith("Model of two-pass.py with")
    assert loaded.weights(loaded.ModelNew()) is not None  # which compares the name


@pytest.mark.parametrize(
    ("statement", "name"),
    [("covered = 3", "covered"), ("def zip(*lists):\n    return lists", "zip"), ("tensor_names = 3", "tensor_names")],
)
def test_names_that_the_file_needs_for_itself(tmp_path: Path, statement: str, name: str) -> None:
    path = problem(tmp_path, f"{CONV}\nself.own = 8 if {name} else 9", HEAD, INPUT)
    path.write_text(path.read_text().replace("class Model(", f"{statement}\n\n\nclass Model("))
    with pytest.raises(UnsupportedError, match=f"it defines {name}, which a solution file needs for itself"):
        text_of(draft(path))


def test_a_file_in_another_encoding(tmp_path: Path) -> None:
    path = problem(tmp_path, f"{CONV}\nself.unit = '\u00b5m'", HEAD, INPUT)
    path.write_bytes(f"# coding: latin-1\r\n{path.read_text()}".replace("\n", "\r\n").encode("latin-1"))
    solution = write(path, targets=["cpu"], kernels="always")
    assert b"\r" not in solution.read_bytes()
    assert 'self.unit = "\u00b5m"' in solution.read_text(encoding="utf-8")
    assert tried(path, solution, "cpu", target="cpu", timed=False)["errors"]["outputs"]["new"] < 1e-6


@pytest.mark.parametrize("name", ["own", "model", "weights"])
def test_arguments_that_the_file_needs_for_itself(tmp_path: Path, name: str) -> None:
    path = problem(tmp_path, CONV, HEAD.replace("self, x", f"self, x, {name}=None"), INPUT)
    with pytest.raises(UnsupportedError, match=f"its forward has an argument {name}, a name that a solution"):
        write(path, targets=["cpu"], kernels="always")


NAMES = "self.register_parameter({0!r}, nn.Parameter(torch.randn(64)))\nself.v = nn.Parameter(torch.randn(64))"
PLAIN = "def forward(self, x{default}):\n    return torch.sigmoid(x * getattr(self, {0!r}) + torch.tanh(self.v)).sum(1)"


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("super", ""),
        pytest.param("__debug__", "", marks=pytest.mark.slow),
        ("__w", ""),
        pytest.param("own", "", marks=pytest.mark.slow),
        ("pass", ', mode="by pass"'),
        pytest.param("w", ", dtype=torch.float32", marks=pytest.mark.slow),
        ("w", ', top=float("inf")'),
        pytest.param("w", ', top=float("nan")', marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled
def test_parameters_and_defaults_of_any_name_and_value(tmp_path: Path, name: str, default: str) -> None:
    """Names that a method or a class body takes for something else, and values that Python does not write so."""
    forward = PLAIN.format(name, default=default)
    path = problem(tmp_path, NAMES.format(name), forward, "[torch.rand(16, 64)]")
    solution = write(path, targets=["cpu"])
    assert not WORD.search(solution.read_text())
    assert tried(path, solution, "cpu", target="cpu", timed=False)["errors"]["outputs"]["new"] < 1e-6


def test_a_model_that_calls_itself_otherwise(tmp_path: Path) -> None:
    path = problem(tmp_path, CONV, HEAD.replace("self", "this"), INPUT)
    solution = write(path, targets=["cpu"])
    assert tried(path, solution, "cpu", target="cpu", timed=False)["errors"]["outputs"]["new"] < 1e-6
