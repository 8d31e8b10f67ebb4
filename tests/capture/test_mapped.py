"""`torch.vmap` in a forward: captured as the operations that its batching rules make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from fusewright import pipeline
from fusewright.capture import capture
from fusewright.errors import CaptureError
from fusewright.ir import ops


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def causal(_: nn.Module, x: Tensor) -> Tensor:
    """As `transformers` makes masks: a function of two places, for all pairs of them."""
    rows, columns = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    seen = torch.vmap(torch.vmap(lambda i, j: j <= i, (None, 0)), (0, None))(rows, columns)
    return x.masked_fill(~seen, 0.0).softmax(-1)


CASES: dict[str, Callable[..., Tensor]] = {
    "pairs": causal,
    "rows": lambda m, x: torch.vmap(lambda row: F.softmax(row, 0) - row.mean())(x),
    "weights": lambda m, x: torch.vmap(lambda row: F.linear(row, m.weight).sigmoid())(x),
    "two": lambda m, x: torch.vmap(torch.exp)(x) + torch.vmap(torch.dot)(x, x * 2)[:, None],
    "outer": lambda m, x: torch.vmap(torch.vmap(torch.dot, (None, 0)), (0, None))(x, m.weight),
}


@pytest.mark.parametrize("batch", [1, 3], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_what_batching_rules_make(name: str, batch: int) -> None:
    model, x = Model(CASES[name]), torch.randn(batch, 6, requires_grad=True)
    built = pipeline.build(model, (x,), {})
    assert len(built.captured.graph.symbols) == (batch > 1)
    _, forward = built.program.functions()
    for rows in {batch, 5} if batch > 1 else {batch}:
        x = torch.randn(rows, 6, requires_grad=True)
        found, want = forward(model, x, *built.program.functions()[0](model)), model(x)
        assert_close(found, want)
        if want.requires_grad:
            given = torch.randn_like(want)
            assert_close(torch.autograd.grad(found, x, given), torch.autograd.grad(want, x, given))


def test_masks_are_operations_as_others() -> None:
    graph = capture(Model(causal), (torch.randn(3, 6),), {}).graph
    assert any(isinstance(node.op, ops.Pointwise) and node.op.fn == "le" for node in graph.nodes())


def test_indexing_by_places() -> None:
    """As `transformers` looks up which tokens are padding: `TransformGetItemToIndex` makes a function of it."""
    module = pytest.importorskip("torch._dynamo._trace_wrapped_higher_order_op")

    def padded(_: nn.Module, x: Tensor) -> Tensor:
        seen, rows, columns = x > 0, torch.arange(x.shape[0]), torch.arange(x.shape[1])
        with module.TransformGetItemToIndex():
            kept = torch.vmap(torch.vmap(lambda i, j: seen[i, j] & (j <= i), (None, 0)), (0, None))(rows, columns)
        return torch.where(kept, x, 0.0) * 2

    for batch in (1, 3):
        x = torch.randn(batch, 6)
        built = pipeline.build(model := Model(padded), (x,), {})
        derive, forward = built.program.functions()
        assert_close(forward(model, x, *derive(model)), model(x))


def test_derivatives_within_are_refused_and_leave_nothing_behind() -> None:
    model = Model(lambda m, x: torch.vmap(torch.func.grad(lambda row: row.square().sum()))(x))
    with pytest.raises(CaptureError, match="cannot be captured"):
        capture(model, (torch.randn(3, 6),), {})
    assert torch._C._functorch.maybe_current_level() is None
    assert_close(model(torch.ones(2, 6)), torch.full((2, 6), 2.0))


def test_a_region_that_cannot_be_traced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(run: Callable[..., Any]) -> Any:
        def traced(*given: Any) -> Any:
            run(*given)
            raise RuntimeError("no")

        return traced

    monkeypatch.setattr("fusewright.capture.mapped.make_fx", failing)
    with pytest.raises(CaptureError, match="no plain operation"):
        capture(Model(causal), (torch.randn(3, 6),), {})
    assert torch._C._functorch.maybe_current_level() is None
