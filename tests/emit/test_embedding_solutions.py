"""Solution files whose kernels look up rows of embeddings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from solutions import agrees_on_a_cpu, cuda_source, load, nvcc, problem, ruff, write

from fusewright.emit.trying import tried

INIT = "self.table = nn.Embedding(90, 24, padding_idx=0)\nself.head = nn.Linear(24, 5)"
FORWARD = "def forward(self, tokens):\n    return self.head(self.table(tokens).relu().mean(1))"
TOKENS = "[torch.randint(1, 90, (4, 60))]"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A problem and its solution for both devices."""
    path = problem(tmp_path_factory.mktemp("embedding"), INIT, FORWARD, TOKENS)
    return path, write(path, targets=("cuda", "cpu"))


def test_text(made: tuple[Path, Path]) -> None:
    text = made[1].read_text()
    for target in ("cuda", "cpu"):
        assert f"def fused_embedding_relu_mean_{target}_launch(" in text
    assert "fused_embedding_relu_mean computes embedding, relu and mean in one launch." in text.replace("\n", " ")
    assert "if (d.outside) __trap();" in text
    assert re.search(r"F\.embedding\(indices1, weight0, padding_idx=0\)", text)
    ruff(made[1])


def test_runs_on_a_cpu(made: tuple[Path, Path]) -> None:
    agrees_on_a_cpu(made, outputs=1e-6, gradients=1e-5)


def test_sparse_gradients_are_compared(tmp_path: Path) -> None:
    path = problem(tmp_path, INIT.replace("padding_idx=0", "sparse=True"), FORWARD, TOKENS)
    facts = tried(path, write(path, targets=("cpu",)), "cpu", target="cpu", timed=False)
    assert not facts["stands in"] and facts["errors"]["gradients"]["new"] < 1e-5


def test_an_index_of_no_row_is_an_index_error(made: tuple[Path, Path]) -> None:
    solution: Any = load(made[1])
    model, (tokens,) = solution.ModelNew(), solution.get_inputs()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), solution.Model.forward(model, tokens))
        tokens[2, 3] = 90
        with pytest.raises(IndexError, match=r"^index out of range in self$"):
            model(tokens)


def test_a_weight_without_rows_is_not_read(made: tuple[Path, Path]) -> None:
    solution: Any = load(made[1])
    with pytest.raises(IndexError, match=r"^fused_embedding_relu_mean looks rows up where there are none$"):
        solution.fused_embedding_relu_mean_cpu_launch(torch.rand(0, 24), torch.zeros(4, 60, dtype=torch.int64))


def test_indices_of_another_kind_are_refused_in_a_sentence(made: tuple[Path, Path]) -> None:
    solution: Any = load(made[1])
    with pytest.raises(ValueError, match=r"^\w+ takes indices1 as torch.int64 on cpu, not as torch.int32 on cpu$"):
        solution.fused_embedding_relu_mean_cpu_launch(torch.rand(90, 24), torch.ones(4, 60, dtype=torch.int32))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_the_cuda_part_compiles(made: tuple[Path, Path], tmp_path: Path) -> None:
    nvcc(*cuda_source(load(made[1])), tmp_path)
