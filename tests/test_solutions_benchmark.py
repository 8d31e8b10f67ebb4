"""The script that tries solution files: its rows for a model that works, and for one that nothing can be written of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # a minute of compilers
ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "solutions.py"

POOLED = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3)

    def forward(self, x):
        return torch.sigmoid(nn.functional.avg_pool2d(self.conv(x), 4)).sum((1, 2, 3))


def get_inputs():
    return [torch.rand(64, 4, 64, 64)]


def get_init_inputs():
    return [4]
"""

WORSE = POOLED.replace("class Model(nn.Module)", "class Model(nn.Linear)")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run over two small problems saves."""
    folder = tmp_path_factory.mktemp("benchmark")
    for name, text in {"pooled": POOLED, "worse": WORSE}.items():
        (folder / f"{name}.py").write_text(text)
    problems = [str(folder / f"{name}.py") for name in ("pooled", "worse")]
    options = [
        "--device",
        "cpu",
        "--divide",
        "32",
        "--solutions",
        str(folder / "files"),
        "--out",
        str(folder / "r.json"),
    ]
    done = subprocess.run([sys.executable, SCRIPT, *problems, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return found


def test_a_file_that_was_tried(record: dict[str, Any]) -> None:
    row = record["solutions"][0]
    assert row["problem"] == "pooled"
    assert row["kernels"] == ["fused_conv_avg_sigmoid_sum"]
    assert row["errors"]["outputs"]["new"] < 1e-6
    assert row["errors"]["gradients"]["new"] < 1e-5
    assert 0 < row["seconds of first call"]["warm"] < row["seconds of first call"]["cold"]  # the compiler takes longer
    for kind in ("forward", "forward and backward"):
        times = row[kind]["milliseconds"]
        assert set(times) == {"eager", "in process", "file"}
        assert row[kind]["file / in process"] == pytest.approx(times["file"] / times["in process"])


def test_a_problem_that_fails_is_a_row_with_a_sentence(record: dict[str, Any]) -> None:
    row = record["solutions"][1]
    assert row["problem"] == "worse"
    assert "Model()" in row["failure"]
    assert "forward" not in row


def test_the_record_says_where_and_how(record: dict[str, Any]) -> None:
    assert record["batches divided by"] == 32
    assert record["environment"]["torch"]
