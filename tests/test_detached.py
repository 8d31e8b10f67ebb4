"""Values without a gradient on the way to others: kernels compute them in place, and differentiate around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusewright import pipeline, tuning
from fusewright.pipeline import Built

CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "straight through": (lambda x, t: x + (t - x).detach(), "sub_add"),
    "rounded": (lambda x, t: ((x * t).round() - x * t).detach() + x * t, "mul_round_sub_add"),
    "a target": (lambda x, t: (x * 2 - (x * t).tanh().detach()).square().mean(), "mul_tanh_sub_square_mean"),
    "a target of weights": (lambda x, t: (x * 2 - t.tanh().detach()).square().mean(), "mul_sub_square_mean"),
    "beside itself": (lambda x, t: x.exp().detach() * x.exp() + t, "exp_mul_add"),
}


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.randn(6, 40))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.t)


def built(model: nn.Module, x: Tensor) -> tuple[Built, Callable[[Tensor], Tensor]]:
    found = pipeline.build(model, (x,), {}, kernels="always", measure=False)
    derive, forward = found.program.functions()
    return found, lambda given: forward(model, given, *derive(model))


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_with_the_gradients_of_eager(name: str) -> None:
    torch.manual_seed(0)
    function, chain = CASES[name]
    model, x = Model(function), torch.randn(6, 40)
    found, ours = built(model, x)
    names = [choice.name for choice in found.choices if choice.path == "generated"]
    assert any(chain in n for n in names), names
    results = []
    for call in (model, ours):
        given = x.clone().requires_grad_()
        value = call(given)
        weights = torch.linspace(1, 2, value.numel()).view_as(value)
        grads = torch.autograd.grad((value * weights).sum(), (given, model.t), allow_unused=True)
        results.append((value.detach(), *grads))
    for eager, tried in zip(*results, strict=True):
        assert (eager is None) == (tried is None)
        if eager is not None:
            torch.testing.assert_close(tried, eager)


def test_a_result_without_gradient_stays_one() -> None:
    """A kernel's result would seem to have one: what is detached is outside then, and what follows is a kernel."""
    model, x = Model(lambda x, t: (t - x).detach().exp() * 2 + 1), torch.randn(6, 40)
    found, ours = built(model, x)
    assert any("exp_mul_add" in choice.name and choice.path == "generated" for choice in found.choices)
    result = ours(x.requires_grad_())
    torch.testing.assert_close(result, model(x))
    assert not result.requires_grad and not model(x).requires_grad


def test_what_is_computed_again_is_detached_once() -> None:
    """Several results whose reductions compute what they read themselves, some without a gradient."""
    model = Model(lambda x, t: ((x - x).detach() + x).mul((t - x).detach() + x).sum(1) - t.mean(1))
    x = torch.randn(6, 40)
    torch.testing.assert_close(built(model, x)[1](x), model(x))


def test_detached_reductions_on_a_gpu_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families that take in what others use as well cannot leave a detached value outside."""

    def function(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        one, other = (x - x).detach() + x, (t - x).detach() + x
        return (other * t).sum(1) - one.mean(1), (one * one).sum(1).mean()

    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    for detached in (function, lambda x, t: tuple(y.detach() * 2 for y in function(x.detach(), t.detach()))):
        found = pipeline.build(
            Model(detached), (torch.randn(6, 40),), {}, kernels="always", measure=False, target=torch.device("cuda")
        )
        assert any(choice.path == "generated" for choice in found.choices)
