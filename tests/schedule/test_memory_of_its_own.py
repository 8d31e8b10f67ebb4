"""Outputs that the model computes and rules make views of what is passed: they stay apart from that in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusewright


class Model(nn.Module):
    def __init__(self, computed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.computed = computed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.computed(x), torch.relu(torch.relu(x))


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a maximum of one": lambda x: x[:, :1].amax(1),
    "a mean of one, of all features": lambda x: x[:, 2:3].mean(1, keepdim=True),
    "a sum of one, turned": lambda x: x.transpose(1, 2)[:, :, :1].sum(2),
    "all of it": lambda x: x.unsqueeze(1).sum(1),
}


@pytest.mark.parametrize("kernels", ["never", "always"])
@pytest.mark.parametrize("name", COMPUTED)
def test_they_are_computed(name: str, kernels: str) -> None:
    """Beside an output that is rewritten; nothing is refused."""
    x = torch.randn(4, 6, 16)
    model = Model(COMPUTED[name])
    fast = fusewright.optimize(model, (x,), rewrite="always", kernels=kernels)
    plan = fusewright.explain(fast)
    assert plan.status == "rewritten" and not plan.reason
    assert {"sum_1(x) = x", "f(f(x)) = f(x)"} <= {fired.rule for fired in plan.rules}
    for found, wanted in zip(fast(x), model(x), strict=True):
        assert torch.equal(found, wanted) and found.stride() == wanted.stride()
        assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_a_view_stays_one() -> None:
    """Where the model returns one, of an input or a parameter."""
    x = torch.randn(4, 6, 16)
    model = Model(lambda x: x[:, :1].unsqueeze(2).squeeze(2)[:, 0])
    fast = fusewright.optimize(model, (x,), rewrite="always")
    assert fusewright.explain(fast).status == "rewritten"
    assert fast(x)[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
