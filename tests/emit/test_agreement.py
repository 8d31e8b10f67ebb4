"""What becomes of a file that is not what eager computes to the tolerance of the field's harness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from solutions import problem, write

from fusewright.dispatch import Options
from fusewright.emit import writing
from fusewright.emit.writing import Differs, Written, tried, write_solution
from fusewright.errors import FusewrightError
from fusewright.problem import load_problem

CONV = "self.conv = nn.Conv2d(3, 8, 3)"
HEAD = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3))"
INPUT = "[torch.rand(4, 3, 20, 24)]"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions that a file was written with; one with tf32 differs from eager."""
    precisions: list[str] = []

    def written(made_of: Any, path: Path, options: Options, *_: Any) -> Written:
        precisions.append(options.precision)
        if options.precision != "fp32":
            raise Differs("output 0 differs from eager's")
        return Written(path, (), ())

    monkeypatch.setattr(writing, "_written", written)
    return precisions


def test_a_file_that_differs_is_made_again_without_tf32(tmp_path: Path, asked: list[str]) -> None:
    path = problem(tmp_path, CONV, HEAD, INPUT)
    write_solution(load_problem(path), tmp_path / "solution.py", Options(), targets=["cuda"])
    assert asked == ["eager", "fp32"]


@pytest.mark.parametrize(("precision", "target"), [("tf32", "cuda"), ("eager", "cpu")])
def test_it_is_refused_where_tf32_was_asked_for_or_has_no_part(
    tmp_path: Path, asked: list[str], precision: Any, target: str
) -> None:
    path = problem(tmp_path, CONV, HEAD, INPUT)
    with pytest.raises(Differs):
        write_solution(load_problem(path), tmp_path / "out.py", Options(precision=precision), targets=[target])
    assert asked == [precision]


def test_it_is_refused_where_the_flags_forbid_tf32_anyway(tmp_path: Path, asked: list[str]) -> None:
    path = problem(tmp_path, CONV, HEAD, INPUT)
    convolutions, matmuls = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = convolutions.fp32_precision, matmuls.fp32_precision
    convolutions.fp32_precision = matmuls.fp32_precision = "ieee"
    try:
        with pytest.raises(Differs):
            write_solution(load_problem(path), tmp_path / "out.py", Options(), targets=["cuda"])
    finally:
        convolutions.fp32_precision, matmuls.fp32_precision = before
    assert asked == ["eager"]


def test_what_differs_is_told_from_what_is_wrong(tmp_path: Path) -> None:
    """A file that is right but for some digits, and one that has other parameters."""
    path = problem(tmp_path, CONV, HEAD, INPUT)
    right = write(path, targets=["cpu"]).read_text()
    for end, differs in ((DIGITS, True), (SEEDS, False)):
        solution = tmp_path / "ended.py"
        solution.write_text(right + end)
        with pytest.raises(FusewrightError) as caught:
            tried(path, solution, "cpu", target="cpu", timed=False)
        assert isinstance(caught.value, Differs) == differs, caught.value


DIGITS = """

_right = ModelNew.forward
ModelNew.forward = lambda self, *inputs: _right(self, *inputs) * 1.001
"""
SEEDS = """

_built = ModelNew.__init__
ModelNew.__init__ = lambda self: (torch.rand(1), _built(self))[1]
"""
