"""Large windows that overlap are pooled one dimension after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.node import Graph
from fusewright.ir.spec import check
from fusewright.pipeline import build
from fusewright.schedule.pools_by_axis import by_axis


class Fn(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.conv = nn.Conv3d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x) if x.ndim == 5 else x)


def graph_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Graph:
    return capture(Fn(function).eval(), (x,), {}).graph


def kernels_of(graph: Graph) -> list[tuple[int, ...]]:
    return [n.op.kernel for n in graph.nodes() if isinstance(n.op, ops.Pool)]


IMAGE, VOLUME = (2, 3, 17, 19), (1, 3, 60, 34, 40)
TAKEN = {
    "a pyramid's": (IMAGE, lambda x: F.max_pool2d(x, 13, 1, 6), [(1, 13), (13, 1)]),
    "of seven": (IMAGE, lambda x: F.max_pool2d(x, 7, 1), [(1, 7), (7, 1)]),
    "dilated": (IMAGE, lambda x: F.max_pool2d(x, 7, 1, 3, 2), [(1, 7), (7, 1)]),
    "to the last window": (IMAGE, lambda x: F.max_pool2d(x, 9, 2, 4, ceil_mode=True), [(1, 9), (9, 1)]),
    "of a convolution": (
        VOLUME,
        lambda x: F.max_pool3d(x.atan(), (8, 8, 3), (1, 4, 1)),
        [(1, 1, 3), (1, 8, 1), (8, 1, 1)],
    ),
    "a mean": (IMAGE, lambda x: F.avg_pool2d(x, 13, 1), [(1, 13), (13, 1)]),
    "a mean of what there is": (
        IMAGE,
        lambda x: F.avg_pool2d(x, 9, 2, 4, ceil_mode=True, count_include_pad=False),
        [(1, 9), (9, 1)],
    ),
    "a mean of padding as well": (
        VOLUME,
        lambda x: F.avg_pool3d(x.atan(), 8, (2, 1, 7), (2, 3, 1), ceil_mode=True),
        [(1, 1, 8), (1, 8, 1), (8, 1, 1)],
    ),
    "of least values": (IMAGE, lambda x: -F.max_pool2d(-x, 9, 1), [(1, 9), (9, 1)]),
}
LEFT = {
    "small": (IMAGE, lambda x: F.max_pool2d(x, 3, 1, 1)),
    "of five": (IMAGE, lambda x: F.max_pool2d(x, 5, 1, 2)),
    "apart": (IMAGE, lambda x: F.max_pool2d(x, 8, 8)),
    "a mean with another divisor": (IMAGE, lambda x: F.avg_pool2d(x, 13, 1, divisor_override=7)),
    "a rounded mean": (IMAGE, lambda x: F.avg_pool2d(x.bfloat16(), 13, 1)),
    "of one dimension": (IMAGE, lambda x: F.max_pool2d(x, (13, 1), 1)),
    "of a convolution, that move far": (VOLUME, lambda x: F.max_pool3d(x, 4, 3)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_one_dimension_after_the_other(name: str) -> None:
    shape, function, kernels = TAKEN[name]
    graph = by_axis(graph_of(function, torch.randn(shape)), {})
    check(graph)
    assert kernels_of(graph) == kernels


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name: str) -> None:
    shape, function = LEFT[name]
    graph = graph_of(function, torch.randn(shape))
    assert by_axis(graph, {}) is graph


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.sampled
def test_kernels_and_gradients(name: str) -> None:
    """Of several maxima the gradient goes to the same one."""
    shape, function, kernels = TAKEN[name]
    torch.manual_seed(0)
    model = Fn(function).eval()
    x = torch.relu(torch.randn(shape)).round().requires_grad_(True)
    built = build(model, (x,), {}, kernels="always", measure=False)
    assert len(built.program.kernels) >= len(kernels) - 1, built.program.source
    fast = fusewright.optimize(model, (x,), kernels="always", measure=False)
    assert not fusewright.explain(fast).refused
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    got, want = (torch.autograd.grad(m(x).cos().sum(), x)[0] for m in (fast, model))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
