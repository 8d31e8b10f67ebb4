"""Functions of transposed convolutions with gaps, as whole programs: the gaps are computed once, by kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright


class Behind(nn.Module):
    def __init__(self, taps: tuple[int, int], stride: tuple[int, int], f: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.f = nn.ConvTranspose2d(8, 24, taps, stride), f
        self.b = nn.Parameter(torch.randn(24, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.conv(x), self.b)


CASES = {
    "channels": ((1, 1), (3, 2), lambda y, b: (F.gelu(y) + b).amin(1), "max_c("),
    "channels, runs": ((2, 1), (3, 2), lambda y, b: (F.gelu(y) + b).logsumexp(1, True) * 2, "max_c("),
    "mean": ((2, 1), (3, 2), lambda y, b: F.gelu(y).mean((2, 3)), "sum("),
    "all": ((2, 3), (3, 4), lambda y, b: (torch.sin(y) * b).logsumexp((1, 2, 3)), "sum("),
    "average pool": ((1, 1), (3, 3), lambda y, b: F.avg_pool2d(F.gelu(y) * b, 6), "sum("),
    "max pool": ((1, 1), (3, 3), lambda y, b: F.max_pool2d(torch.sin(y) * b, 6), "max("),
    "joined windows": ((1, 1), (2, 2), lambda y, b: F.max_pool2d(y * b, (3, 7)).amax((1, 2, 3)), "max_P(maxpool("),
}


@pytest.mark.parametrize("name", CASES)
def test_gaps_are_computed_once(name: str) -> None:
    taps, stride, f, rule = CASES[name]
    torch.manual_seed(0)
    model, x = Behind(taps, stride, f).eval(), torch.randn(2, 8, 13, 17)
    fast = fusewright.optimize(model, (x,), rewrite="always", kernels="always", measure=False)
    plan = fusewright.explain(fast)
    assert any(fired.rule.startswith(f"{rule}f(conv_transpose_s(x, w) + b)") for fired in plan.rules), plan
    assert plan.kernels and all(k.path == "generated" for k in plan.kernels), plan
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
