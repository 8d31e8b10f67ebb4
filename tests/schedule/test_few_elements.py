"""Reductions of a few neighbours become functions of them, and parts of the kernels around."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_build import built_for_a_gpu, emulated
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.node import Graph
from fusewright.schedule.few_elements import of_few


class Fn(nn.Module):
    """A function of one input and of the boxes (7, 4) it has."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn = fn
        self.t = nn.Parameter(torch.rand(7, 4, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, self.t)


def overlaps(x: Tensor, t: Tensor) -> Tensor:
    """Of boxes with boxes: intersections over unions."""
    a, b = x[:, None], t[None]
    inner = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    return inner / ((a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inner)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "overlaps": (overlaps, (9, 4)),
    "sum": (lambda x, t: x.exp().sum(-1) * 2, (9, 4)),
    "of what is given": (lambda x, t: x.sum(-1).relu(), (9, 4)),
    "mean, kept": (lambda x, t: x - (x * x).mean(-1, keepdim=True), (5, 6, 3)),
    "maximum": (lambda x, t: (x * t[0, :2]).amax(-1) + 1, (9, 2)),
    "minimum": (lambda x, t: (x - t[0, 0]).amin(-1) + 1, (9, 3)),
    "a column broadcast": (lambda x, t: (x * x[:, :1]).sum(-1) + 1, (9, 3)),
    "lengths, of nothing too": (lambda x, t: torch.relu(x - 0.9).norm(dim=-1) * 2, (9, 4)),
    "directions": (lambda x, t: nn.functional.normalize(x, dim=-1), (9, 3)),
    "nearest": (lambda x, t: (x[:, None] - t[None, :, :3]).square().sum(-1).amin(-1), (9, 3)),
}


def of_few_elements(graph: Graph) -> list[ops.Reduce]:
    return [n.op for n in graph.nodes() if isinstance(n.op, ops.Reduce) and n.arg(0).shape[-1] in (2, 3, 4)]


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name: str) -> None:
    """The graph by ATen's operations, and gradients."""
    fn, shape = CASES[name]
    model, x = Fn(fn).double(), torch.rand(shape, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    captured = capture(model, (x,))
    assert of_few_elements(captured.graph)
    graph = of_few(captured.graph)
    assert not of_few_elements(graph)
    derive, forward = lower(graph, None, captured.constants).functions()
    (found,), want = forward(model, x, *derive(model)), model(x)
    torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)
    seed = torch.linspace(0.5, 1.5, want.numel()).double().reshape(want.shape)
    gradients = (torch.autograd.grad(y, x, seed)[0] for y in (found, want))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fn, shape = CASES[name]
    model, x = Fn(fn), torch.rand(shape, generator=torch.Generator().manual_seed(0))
    built = built_for_a_gpu(monkeypatch, model, x)
    torch.testing.assert_close(emulated(built, model, x), model(x))
    assert len(built.program.kernels) == (2 if name == "overlaps" else 1)  # areas of boxes by themselves
    assert all(c.path == "generated" for c in built.choices)


@pytest.mark.parametrize(
    "fn, shape, dtype",
    [
        (lambda x, t: x.sum(-1), (9, 5), torch.float32),
        (lambda x, t: x.sum(0), (4, 9), torch.float32),
        (lambda x, t: x.sum((0, 1)), (9, 4), torch.float32),
        (lambda x, t: x.max(-1)[0], (9, 4), torch.float32),
        (lambda x, t: x.sum(-1), (9, 4), torch.bfloat16),
        (lambda x, t: (x @ x.T[:, :3]).sum(-1), (9, 9), torch.float32),
    ],
    ids=["many", "no neighbours", "more", "the first of several", "rounded every time", "of a product"],
)
def test_what_stays(fn: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    graph = capture(Fn(fn).to(dtype), (torch.rand(shape, dtype=dtype),)).graph
    assert of_few(graph) is graph
