"""How near a kernel comes to the truth."""

from __future__ import annotations

import torch
from torch import Tensor


def compare(got: Tensor, want: Tensor, dtype: torch.dtype, ulps: float = 8) -> None:
    """In units of the last place of the largest value; what is not finite is the same."""
    assert got.dtype == dtype and got.shape == want.shape
    special = ~want.isfinite()
    torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
    if not special.all():
        scale = want[~special].abs().max().clamp(min=1e-3)
        error = (got.double() - want)[~special].abs().max()
        assert error <= scale * ulps * torch.finfo(dtype).eps, (error / scale / torch.finfo(dtype).eps).item()
