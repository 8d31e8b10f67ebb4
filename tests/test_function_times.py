"""The benchmark of single functions measures generated kernels against the operations that they stand for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import function_times


@pytest.mark.parametrize("name", ["sin", "pow", "gelu_tanh", "hardswish"])
def test_both_sides_compute_the_function(name: str) -> None:
    """It compares their results itself, and both have times."""
    function, *parameters = function_times.functions()[name]
    times = function_times.measured(function, tuple(parameters), torch.rand(3000) + 0.1)
    assert times["ours"].median > 0 and times["aten"].median > 0


def test_every_function_of_one_variable_is_there() -> None:
    found = function_times.functions()
    assert {"relu", "exp", "log10", "softplus", "clamp", "gelu"} <= found.keys()
    assert not {"add", "where", "logical_not"} & found.keys()
