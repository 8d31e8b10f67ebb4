"""That moving a reduction past a view, which saves nothing itself, lets the rules that do save something fire."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import B, apply, classes, fired, graph_of, inp
from linear_cases import conv, reduce
from spec_views import expanded, permuted, shaped
from spec_views import x as computed
from torch import Tensor, nn

import fusewright.rules
from fusewright import pipeline
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import make
from fusewright.pipeline import build
from fusewright.plan import Work
from fusewright.rules import pooling, views
from fusewright.rules.engine import rewrite

RESHAPE, PERMUTE = views.reduction_of_reshape.name, views.reduction_of_permute.name


class Behind(nn.Module):
    """A layer, and what is behind it."""

    def __init__(self, layer, behind) -> None:
        super().__init__()
        self.layer, self.behind, self.head = layer, behind, nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self, self.layer(x))


def images() -> Tensor:
    return torch.randn(8, 16, 32, 32)


CONV, TRANSPOSED = (nn.Conv2d, (16, 24, 3)), (nn.ConvTranspose2d, (16, 24, 3, 2))
PAYING = {
    "flatten, mean": (CONV, lambda m, y: y.flatten(2).mean(-1), {RESHAPE}),
    "flatten, mean, kept": (CONV, lambda m, y: y.flatten(2).mean(-1, keepdim=True), {RESHAPE}),
    "flatten, pool": (CONV, lambda m, y: F.adaptive_avg_pool1d(y.flatten(2), 1), {RESHAPE}),
    "flatten all, sum": (CONV, lambda m, y: y.flatten(1).sum(1), {RESHAPE}),
    "scaled": (CONV, lambda m, y: (y.flatten(2) * 2 + 1).mean(-1), {RESHAPE}),
    "view, mean, linear": (TRANSPOSED, lambda m, y: m.head(y.view(y.shape[0], 24, -1).mean(-1)), {RESHAPE}),
    "channels last": (CONV, lambda m, y: y.permute(0, 2, 3, 1).mean((1, 2)), {PERMUTE}),
    "channels last, sum of channels": (CONV, lambda m, y: y.permute(0, 3, 2, 1).sum(-1), {PERMUTE}),
    "tokens": (CONV, lambda m, y: y.flatten(2).transpose(1, 2).mean(1), {PERMUTE, RESHAPE}),
    "tokens by reshape": (
        CONV,
        lambda m, y: y.permute(0, 2, 3, 1).reshape(y.shape[0], -1, 24).mean(1),
        {PERMUTE, RESHAPE},
    ),
    "rows of a matmul": ((nn.Linear, (32, 96)), lambda m, y: y.permute(0, 3, 1, 2).mean((2, 3)), {PERMUTE}),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", PAYING)
def test_enables_what_pays(case: str, training: bool) -> None:
    (layer, sizes), behind, moves = PAYING[case]
    model, x = Behind(layer(*sizes), behind).train(training), images()
    built = build(model, (x,), {})
    names = {f.rule for f in built.rewritten.fired}
    assert moves <= names and names - {RESHAPE, PERMUTE}
    assert built.after.flops < 0.2 * built.before.flops and built.after.seconds < 0.6 * built.before.seconds
    derive, forward = built.program.functions()
    assert torch.allclose(forward(model, x, *derive(model)), model(x), rtol=1e-3, atol=1e-4)


def cost(node):
    """Every operation but a view costs the same."""
    return Work(1.0, 1.0, 1.0, 0.0 if isinstance(node.op, ops.Source | ops.Reshape | ops.Permute) else 1.0)


def test_nothing_is_moved_for_nothing() -> None:
    graph = graph_of(reduce("mean", shaped(computed(2, 3, 4), 2, 12), 1))
    assert not rewrite(graph, (views.reduction_of_reshape,), cost).fired
    assert rewrite(graph, (views.reduction_of_reshape,), cost).graph is graph
    assert [f.rule for f in rewrite(graph, (views.reduction_of_reshape,), cost, fusing=True).fired] == [RESHAPE]


def test_kernels_get_the_moves_that_save_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Behind(nn.Conv2d(16, 24, 3), lambda m, y: torch.relu(y).flatten(2).mean(-1))
    assert not build(model, (images(),), {}).rewritten.fired
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setattr(pipeline, "cut", lambda graph, *_, **__: graph)
    assert [f.rule for f in build(model, (images(),), {}, kernels="auto").rewritten.fired] == [RESHAPE]


def test_a_move_that_costs_is_not_made() -> None:
    graph = graph_of(reduce("max", permuted(computed(2, 3, 4), 2, 1, 0), 0))
    copies = lambda n: Work(1.0, 1.0, 1.0, 1.0 + (isinstance(n.op, ops.Permute) and n.op.copy))  # noqa: E731
    assert not rewrite(graph, (views.reduction_of_permute,), copies, fusing=True).fired


def test_a_reduction_meets_a_reduction() -> None:
    inner = reduce("sum", inp(2, 3, 4, 5), 3)
    names = [
        f.rule for f in rewrite(graph_of(reduce("sum", shaped(inner, 2, 12), 1)), fusewright.rules.RULES, cost).fired
    ]
    assert names == [RESHAPE, pooling.reduction_of_reduction.name]


def test_all_rules_reach_an_end_together() -> None:
    y = conv(inp(2, 2, 4, 5), inp(3, 2, 3, 2), inp(3))
    root = reduce("sum", permuted(shaped(permuted(y, 0, 2, 3, 1), 2, 8, 3), 0, 2, 1), 2, keepdim=True)
    names = [f.rule for f in rewrite(graph_of(root), fusewright.rules.RULES, cost, mode="always").fired]
    assert RESHAPE in names and PERMUTE in names


@pytest.mark.parametrize("kind", ["max", "min", "sum", "mean", "prod", "logsumexp"])
def test_class(kind: str) -> None:
    expected = {"exact" if kind in ("max", "min") else "reassociates"}
    merged, turned = shaped(computed(), *computed().shape[:2], 8), permuted(computed(), 0, 3, 1, 2)
    assert classes(fired(views.reduction_of_reshape, graph_of(reduce(kind, merged, 2)))) == expected
    assert classes(fired(views.reduction_of_permute, graph_of(reduce(kind, turned, 2)))) == expected


@pytest.mark.parametrize(
    ("before", "after", "dims", "moved"),
    [
        ((2, 6, 5), (2, 2, 3, 5), (1, 2), (1,)),
        ((2, 6, 5), (2, 2, 1, 3, 5), (1, 3), (1,)),
        ((2, 6, 5), (2, 3, 2, 5), (1, 2, 3), (1, 2)),
        ((2, 3, 1, 4), (2, 12), (1,), (1, 3)),
        ((2, 3, 4), (1, 2, 12), (0, 2), (1, 2)),
        ((4, 3, 2), (12, 2), (0,), (0, 1)),
        ((4, 6), (8, 3), (0, 1), (0, 1)),
        ((B, B + 1, 2), (B**2 + B, 2), (0,), (0, 1)),
        ((4, 6, 5), (8, 3, 5), (0, 1), (0, 1)),
    ],
)
def test_dimensions(before, after, dims, moved) -> None:
    result = apply(views.reduction_of_reshape, graph_of(reduce("sum", shaped(computed(*before), *after), *dims)))
    assert [n.op.dims for n in result.graph.nodes() if isinstance(n.op, ops.Reduce)] == [moved]


RETURNED = {
    "a function": lambda: pointwise("tanh", expanded(inp(3, 1), 3, 4)),
    "a view of it": lambda: shaped(pointwise("tanh", expanded(inp(3, 1), 3, 4)), 12),
    "a reduction": lambda: reduce("max", expanded(inp(3, 4), 2, 3, 4), 2),
    "a softmax": lambda: make(ops.Softmax(2), expanded(inp(3, 4), 2, 3, 4)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_lies_as_it_did(name: str) -> None:
    """An expansion has several elements in one place, and whoever gets it may write to it."""
    root = RETURNED[name]()
    found = rewrite(graph_of(root), fusewright.rules.RULES, cost, mode="always")
    assert not found.fired
    assert rewrite(graph_of(pointwise("neg", root)), fusewright.rules.RULES, cost, mode="always").fired


def test_numbers_known_ahead_are_not_made_large_in_every_call() -> None:
    """What depends on parameters alone is derived before it is expanded along the batch."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Parameter(torch.randn(24))

        def forward(self, x: Tensor) -> Tensor:
            return F.cosine_similarity(x, torch.sigmoid(self.target).expand_as(x))

    model = Loss().eval().requires_grad_(False)
    built = build(model, (torch.randn(4, 24),), {})
    derive, forward = built.program.functions()
    assert "expand" not in built.program.source and [tuple(t.shape) for t in derive(model)] == [(24,)]
    x = torch.randn(4, 24)
    assert torch.allclose(forward(model, x, *derive(model)), model(x), rtol=1e-5, atol=1e-6)
