"""Means over part of a dimension lead to what saves work, and are left where nothing does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import B, graph_of
from linear_cases import reduce
from spec_parts import product
from spec_views import shaped
from torch import Tensor, nn

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.pipeline import build
from fusewright.plan import Work
from fusewright.rules import features, parts
from fusewright.rules.engine import rewrite


class Behind(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, layer: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.fn = layer, fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.layer(x))


def conv() -> nn.Module:
    return nn.Conv2d(16, 32, 3, padding=1)


PAYING: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "windows": (conv, lambda y: y.unflatten(3, (8, 4)).unflatten(2, (8, 4)).mean((3, 5)), (8, 16, 32, 32)),
    "a sum": (conv, lambda y: y.unflatten(3, (8, 4)).unflatten(2, (8, 4)).sum((3, 5), True), (8, 16, 32, 32)),
    "channels beside them": (conv, lambda y: nn.functional.pixel_unshuffle(y, 2).mean(1), (8, 16, 32, 32)),
    "half the length": (
        conv,
        lambda y: nn.functional.interpolate(y, scale_factor=0.5, mode="bilinear"),
        (8, 16, 32, 32),
    ),
    "groups of channels": (conv, lambda y: y.unflatten(1, (2, 16)).mean(2), (8, 16, 32, 32)),
    "every other channel": (conv, lambda y: y.unflatten(1, (16, 2)).sum(1), (8, 16, 32, 32)),
    "groups of features": (lambda: nn.Linear(64, 1024), lambda y: y.view(-1, 64, 16).mean(-1), (4096, 64)),
}


@pytest.mark.parametrize("name", PAYING)
def test_leads_to_what_saves(name: str) -> None:
    layer, behind, shape = PAYING[name]
    model, x = Behind(layer(), behind), torch.randn(shape)
    built = build(model, (x,), {})
    names = {f.rule for f in built.rewritten.fired}
    assert names & {rule.name for rule in parts.RULES} and len(names) > 1
    assert built.after.flops < 0.6 * built.before.flops
    derive, forward = built.program.functions()
    torch.testing.assert_close(forward(model, x, *derive(model)), model(x), rtol=1e-3, atol=1e-4)


def cost(per_feature: float) -> Callable[[Node], Work]:
    """Sums of ranges of a product cost more than other sums, and a product so much for each of its features."""

    def of(node: Node) -> Work:
        ranges = isinstance(node.op, ops.RangeSum) and isinstance(node.arg(0).op, ops.Matmul)
        features = int(node.shape[-1]) if isinstance(node.op, ops.Matmul) else 0
        return Work(1.0, 1.0, 1.0, 3.0 * ranges + isinstance(node.op, ops.Reduce) + per_feature * features)

    return of


def test_a_step_is_made_for_the_next_one_alone() -> None:
    graph = graph_of(reduce("mean", shaped(product(12), B, 3, 4, 3), 3))
    both = (parts.mean_of_split, features.features_into_weight)
    assert [f.rule for f in rewrite(graph, both, cost(1.0), fusing=True).fired] == [rule.name for rule in both]
    assert not rewrite(graph, both, cost(-0.2), fusing=True).fired  # as if fewer features took longer
    assert not rewrite(graph, both[:1], cost(1.0), fusing=True).fired
