"""Columns that are reduced in parts, which several threads join: as many as are joined by halves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor

from tests.capture.harness import Fn

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: (x * x).sum(0),
    "logsumexp": lambda x: torch.logsumexp(2 * x, 0),
    "norm": lambda x: (x + 1).norm(dim=0),
}


@pytest.mark.parametrize("columns", [2100, 3000, 4186, 20000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_columns_in_parts(name: str, columns: int) -> None:
    """As many threads as would be best are no power of two."""
    torch.manual_seed(0)
    model, x = Fn(FUNCTIONS[name]), torch.randn(300 if columns < 4000 else 40, columns)
    built = as_on_a_gpu(model, x)
    (kernel,) = built.program.kernels
    assert "constexpr int JOINERS = " in kernel.source, kernel.source
    torch.testing.assert_close(emulated(built, model, x), FUNCTIONS[name](x), rtol=1e-5, atol=1e-5)
