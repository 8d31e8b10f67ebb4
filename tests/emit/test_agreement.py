"""What becomes of a file that is not what eager computes to the tolerance of the field's harness."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from solutions import draft, problem, text_of, write

from fusewright.dispatch import Options
from fusewright.emit import fresh, serving, writing
from fusewright.emit.header import of_eager_rounding
from fusewright.emit.trying import Differs, tried
from fusewright.emit.writing import DiffersByTf32, Written, write_solution
from fusewright.errors import FusewrightError
from fusewright.problem import load_problem
from fusewright.verification.compare import Rules, Sample, compare

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
            raise DiffersByTf32("output 0 differs from eager's")
        return Written(path, (), ())

    monkeypatch.setattr(writing, "_written", written)
    return precisions


def test_a_file_that_differs_by_tf32_is_made_again_without(tmp_path: Path, asked: list[str]) -> None:
    path = problem(tmp_path, CONV, HEAD, INPUT)
    write_solution(load_problem(path), tmp_path / "solution.py", Options(), targets=["cuda"])
    assert asked == ["eager", "fp32"]


# What is asked for, and where: on a GPU that is here, on one that is not, with flags that forbid tf32.
WHERE: dict[str, tuple[dict[str, Any], bool, bool, bool]] = {
    "by the flags, on a GPU": ({}, True, True, True),
    "for a GPU that is not here": ({}, False, True, False),
    "on a CPU": ({"target": "cpu"}, True, True, False),
    "as asked": ({"precision": "tf32"}, True, True, False),
    "never": ({"precision": "fp32"}, True, True, False),
    "flags that forbid it": ({}, True, False, False),
}


@pytest.mark.parametrize("case", WHERE)
@pytest.mark.sampled
def test_tf32_has_a_part_where_kernels_ran_with_it(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then would a file without it be another one."""
    options, here, allowed, expected = WHERE[case]
    made = replace(
        draft(problem(tmp_path, CONV, HEAD, INPUT), kernels="always", **options),
        precision=options.get("precision", "eager"),
    )
    assert [kernel.target for kernel in made.program.kernels] == [made.target]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    monkeypatch.setattr(serving, "tf32_allowed", lambda _: (allowed, False))

    def differs(*_: Any, **__: Any) -> None:
        raise Differs("output 0 differs from eager's")

    monkeypatch.setattr(writing, "tried", differs)
    with pytest.raises(Differs) as caught:
        writing._facts(made, tmp_path / "solution.py", False)
    assert isinstance(caught.value, DiffersByTf32) == expected


def test_a_file_without_tf32_asks_for_no_setting(tmp_path: Path) -> None:
    path = problem(tmp_path, CONV, HEAD, INPUT)
    made = draft(path, kernels="always", precision="fp32")
    assert "def tf32_allowed(" in text_of(draft(path, kernels="always"))
    assert "tf32_allowed" not in text_of(replace(made, precision="fp32"))


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


@pytest.mark.parametrize("exact", [True, False])
def test_eager_s_own_rounding_is_told_from_a_difference(exact: bool, tmp_path: Path) -> None:
    """A model that is as eager under tf32: other digits where that is allowed."""
    path = problem(tmp_path, CONV, HEAD, INPUT)
    solution = write(path, targets=["cpu"])
    rounding = tmp_path / "rounding.py"
    rounding.write_text(path.read_text().replace("mean((2, 3))", f"mean((2, 3)) * {ROUNDED}"))
    asked = {"problem": str(rounding), "solution": str(solution), "device": "cpu", "target": "cpu", "exact": exact}
    asked |= {"rows": [], "few": 2, "time": False, "training": True, "keeps nan": True, "sides": []}
    check = fresh.Check(asked)
    models = check.built(check.problem, "Model"), check.built(check.solution, "ModelNew")
    if exact:
        check.harness(*models, check.inputs())
        assert 1e-4 < check.facts["eager rounds"] < 1e-1
        assert "this file's kernels do not" in of_eager_rounding(check.facts["eager rounds"])
    else:
        with pytest.raises(fresh.Differs):
            check.harness(*models, check.inputs())
    assert torch.backends.cudnn.allow_tf32


ROUNDED = "(1.001 if torch.backends.cudnn.allow_tf32 else 1.0)"
DIGITS = """

_right = ModelNew.forward
ModelNew.forward = lambda self, *inputs: _right(self, *inputs) * 1.001
"""
SEEDS = """

_built = ModelNew.__init__
ModelNew.__init__ = lambda self: (torch.rand(1), _built(self))[1]
"""


def test_what_is_in_doubt_asks_for_samples_nearby() -> None:
    """Once; what few elements that are still wrong would ask for is left out."""
    eager = torch.ones(300)
    candidate = eager.clone()
    candidate[3] = 1.5
    first, asked = Sample(candidate, (eager,), eager.double()), []

    def further() -> list[dict[str, list[Any]]]:
        asked.append("samples")
        return [{"outputs": [Sample(eager, (eager,), eager.double())]}]

    assert not compare(first, partial(fresh.of, further, "outputs", 0), Rules()).ok and asked == ["samples"]
