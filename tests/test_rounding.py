"""Values that a model rounds on purpose are rounded with kernels, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.dropin import fast, kernels_of, program_calls


class Residue(nn.Module):
    """What half precision loses, and a reduction beside it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2 - (x * 2).half().float(), x.sigmoid().sum((1, 2))


def test_a_round_trip_through_a_narrower_type() -> None:
    model, x = Residue(), torch.randn(4, 8, 8)
    f = fast(model, x, kernels="always")
    assert [kernel.name for kernel in kernels_of(f) if "sum" in kernel.name]
    (found, _), (expected, _) = f(x), model(x)
    assert program_calls(f) == 1 and expected.abs().max() > 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.1), (torch.float16, 0.7)])
def test_a_limit_that_a_half_precision_rounds_up(dtype: torch.dtype, limit: float) -> None:
    """A value at the rounded limit is not beyond it."""
    model = nn.Sequential(nn.Hardshrink(limit), nn.ReLU())
    x = torch.tensor([limit, -limit, 1.0, -1.0] * 8, dtype=dtype).view(4, 8)
    assert x[0, 0].item() > limit
    f = fast(model, x, kernels="always")
    assert kernels_of(f)
    assert torch.equal(f(x), model(x)) and program_calls(f) == 1
