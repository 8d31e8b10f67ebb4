"""`fusewright.capture.masks`: masks that only a trace has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusewright
from fusewright import pipeline


class Attention(nn.Module):
    """Attention with the mask that `masks` makes of the number of positions, or asks for `causal` attention.

    `seen` stands for what a library knows of a call, and not of a trace.
    """

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor | None] | None, *, causal: bool = False, **options: Any):
        super().__init__()
        self.mask, self.causal, self.options = mask, causal, options

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[2], device=x.device)
        tracing = torch.compiler.is_compiling()
        if self.causal and not tracing:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True, **self.options)
        mask = None if self.mask is None else self.mask(places[:, None], places[None])
        return F.scaled_dot_product_attention(x, x, x, mask, **self.options)


def everything(rows: Tensor, columns: Tensor) -> Tensor:
    return (columns >= 0) & (rows >= 0)


def before(rows: Tensor, columns: Tensor) -> Tensor:
    return columns <= rows


def near(rows: Tensor, columns: Tensor) -> Tensor:
    return (columns <= rows) & (columns > rows - 3)


def of_batch(rows: Tensor, columns: Tensor) -> Tensor:
    return everything(rows, columns).expand(2, 3, 6, 6)


def source(model: nn.Module, *shape: int) -> str:
    x = torch.randn(*(shape or (2, 3, 6, 4)))
    found = pipeline.build(model.eval(), (x,), {}).program
    with torch.no_grad():
        (want,) = (model(x),)
        derive, forward = found.functions()  # a mask of positions of a known number is derived ahead
        torch.testing.assert_close(forward(model, x, *derive(model)), want)
    return next(line for line in found.source.splitlines() if "scaled_dot_product" in line)


@pytest.mark.parametrize("mask", [everything, of_batch])
def test_a_mask_that_hides_nothing_goes(mask: Callable[..., Tensor]) -> None:
    assert "(x, x, x)" in source(Attention(mask))


def test_what_else_attention_is_given_stays() -> None:
    assert "scale=0.25" in source(Attention(everything, scale=0.25))


def test_nothing_is_left_of_the_mask() -> None:
    program = pipeline.build(Attention(everything), (torch.randn(2, 3, 6, 4),), {}).program
    assert "arange" not in program.source


@pytest.mark.parametrize("mask", [before, near])
def test_a_mask_that_the_model_has_stays(mask: Callable[..., Tensor]) -> None:
    assert "is_causal" not in source(Attention(mask))


def test_a_model_that_asks_for_causal_attention_gets_it() -> None:
    assert "is_causal=True" in source(Attention(before, causal=True))


def test_another_mask_is_not_causal_attention() -> None:
    """The trace is what is planned, and verification finds that the model does something else."""
    model, x = Attention(near, causal=True).eval(), torch.randn(2, 3, 6, 4)
    program = pipeline.build(model, (x,), {}).program
    assert "is_causal" not in program.source


class Two(nn.Module):
    """Attentions that differ; the second one is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(before, causal=True), Attention(before)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_each_attention_is_asked_about() -> None:
    program = pipeline.build(Two().eval(), (torch.randn(2, 3, 6, 4),), {}).program
    first, second = (line for line in program.source.splitlines() if "scaled_dot_product" in line)
    assert "is_causal=True" in first and "is_causal" not in second


class Once(nn.Module):
    """Attends once where the trace does twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(before, causal=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.inner(y) if torch.compiler.is_compiling() else y


def test_calls_that_cannot_be_told_apart_keep_their_masks() -> None:
    program = pipeline.build(Once().eval(), (torch.randn(2, 3, 6, 4),), {}).program
    assert "is_causal" not in program.source


def test_an_attention_that_draws_keeps_its_mask() -> None:
    program = pipeline.build(Attention(everything, dropout_p=0.5), (torch.randn(2, 3, 6, 4),), {}).program
    assert "arange" in program.source


class Listing(Attention):
    """Adds to a list that it is given."""

    def __init__(self) -> None:
        super().__init__(before, causal=True)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        if not torch.compiler.is_compiling():
            seen.append(y)
        return y


def test_containers_of_a_call_are_its_own() -> None:
    seen = [torch.zeros(1)]
    pipeline.build(Listing().eval(), (torch.randn(2, 3, 6, 4), seen), {})
    assert len(seen) == 1


def computed(rows: Tensor, columns: Tensor) -> Tensor:
    return (torch.ones(6, 6) * 2 - 1) == 1


def test_a_mask_that_is_computed() -> None:
    assert "(x, x, x)" in source(Attention(computed))


def test_equal_models_at_once() -> None:
    """Nodes are shared by all graphs that have them."""
    x = torch.randn(2, 3, 6, 4)
    held = [pipeline.build(Two().eval(), (x,), {}) for _ in range(2)]
    assert all(built.masks == 1 for built in held)


def test_the_plan_tells_of_masks() -> None:
    model = nn.Sequential(Attention(everything), nn.Softsign(), nn.Softsign())
    f = fusewright.optimize(model, (torch.randn(2, 3, 6, 4),), kernels="always", measure=False)
    plan = fusewright.explain(f)
    assert any("without a mask" in note and "once" in note for note in plan.precision)
    assert not any("arange" in reason for reason in plan.opaque)


class Written(nn.Module):
    """A mask that is written to between two uses."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool)
        y = F.scaled_dot_product_attention(x, x, x, mask)
        mask[:, 3:] = False
        return F.scaled_dot_product_attention(y, y, y, mask)


def test_a_mask_that_is_written_to() -> None:
    model, x = Written().eval(), torch.randn(2, 3, 6, 4)
    f = fusewright.optimize(model, (x,), rewrite="always", measure=False)
    torch.testing.assert_close(f(x), model(x))


def test_the_model_is_as_it_was() -> None:
    class Counting(Attention):
        def __init__(self) -> None:
            super().__init__(before, causal=True)
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    model = Counting().train()
    state, drawn = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    pipeline.build(model, (torch.randn(2, 3, 6, 4, generator=torch.Generator()),), {})
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)
