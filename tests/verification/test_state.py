"""What a run may change about a module is put back."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import fusewright
from fusewright.verification.state import preserved


class Cached(nn.Module):
    """Writes what has a gradient to a buffer, as caches of keys do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[:1] = self.layer(x).relu().mean(0)
        return self.seen * 2


def test_a_buffer_that_was_given_a_gradient() -> None:
    model = Cached()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with preserved(model):
                assert model(torch.ones(3, 4)).requires_grad and not model.seen.is_leaf
            assert model.seen.is_leaf and not model.seen.requires_grad and not model.seen.any()


def test_a_buffer_that_had_one_keeps_it() -> None:
    model = Cached()
    model(torch.ones(3, 4))
    before, version = model.seen.clone(), model.seen.grad_fn
    with preserved(model):
        pass
    assert model.seen.requires_grad and model.seen.grad_fn is version and torch.equal(model.seen, before)


def test_a_model_that_caches_is_as_it_was() -> None:
    model, x = Cached().eval(), torch.randn(3, 4)
    fast = fusewright.optimize(model, (x,), kernels="always")  # whatever was measured
    plan = fusewright.explain(fast)
    assert "failed on it" not in plan.reason and plan.verdict is not None and plan.verdict.ok
    assert {kept.path for kept in plan.kept if kept.mode != "forward"} == {"original"}
    assert model.seen.is_leaf and not model.seen.requires_grad and not model.seen.any()
