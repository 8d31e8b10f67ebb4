"""Which values streams compute again where they read them, and which stay in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusewright import pipeline
from fusewright.capture import capture
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph, Node, topological
from fusewright.schedule.again import computed_again
from fusewright.schedule.chain import word
from fusewright.schedule.families import FAMILIES
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut

LARGE = (2, 8, 300, 300)


class Function(nn.Module):
    """A function of a tensor and of the module, which has a convolution."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


def graph_of(function: Callable[..., object], dtype: torch.dtype = torch.float32) -> Graph:
    return capture(Function(function).eval(), (torch.empty(LARGE, dtype=dtype),), {}).graph


def sums(p: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Of p, of p and others beside it, and of its square."""
    return p.sum((2, 3)), (p * (1 + sum(others))).sum((2, 3)), (p * p).amax((2, 3))


AGAIN: dict[str, tuple[Callable[..., object], list[str]]] = {
    "a function": (lambda m, x: sums(x.sigmoid()), ["sigmoid"]),
    "of a function that others read": (lambda m, x: sums((a := x.exp()).tanh(), a), ["exp", "tanh"]),
    "read by elements and by sums": (lambda m, x: (a := x.tanh(), a)[1] - a.mean((2, 3), keepdim=True), ["tanh"]),
    "of what a convolution gives": (lambda m, x: sums(torch.relu(m.conv(x)).sigmoid()), ["sigmoid"]),
    "of less memory": (lambda m, x: sums(x.float()), ["cast"]),
    "of two, read by two": (lambda m, x: sums(x + x.flip(3))[:2], ["add"]),
    "of three more": (lambda m, x: sums(torch.where(x.flip(3) > 0, x.flip(2), x.roll(1, 2)) * x.flip(1)), []),
    "of more memory": (lambda m, x: ((x > 0).sum((2, 3)), torch.where(x > 0, 0.5, 2.0).sum((2, 3))), []),
    "many operations": (lambda m, x: sums(((x * 2).exp() + 1).log().tanh()), []),
    "read as it is": (lambda m, x: (*sums(x.sigmoid()), torch.cumsum(x.sigmoid(), 1)), []),
    "returned": (lambda m, x: (*sums(a := x.sigmoid()), a), []),
    "for windows": (lambda m, x: (torch.max_pool2d(a := x.sigmoid(), 2), a.sum((2, 3))), ["sigmoid"]),
    "for windows that overlap": (lambda m, x: (torch.max_pool2d(a := x.sigmoid(), 3, 2), a.sum((2, 3))), []),
    "of a sum": (lambda m, x: sums(x.unflatten(1, (2, 4)).sum(2).sigmoid()), []),
    "of a pool": (lambda m, x: sums(torch.max_pool2d(x, 2).sigmoid()), []),
    "random numbers": (lambda m, x: sums(torch.rand_like(x)), []),
    "for a larger shape": (lambda m, x: (a := x[:, :1].exp(), x * a, a.sum((2, 3)))[1:], []),
    "for what no stream is": (lambda m, x: (a := x.exp()).prod(3) + a.sum(3), []),
}


@pytest.mark.parametrize("name", AGAIN)
def test_found(name: str) -> None:
    function, expected = AGAIN[name]
    graph = graph_of(function, torch.bfloat16 if "less" in name else torch.float32)
    assert sorted(word(n) or "cast" for n in computed_again(graph, graph.users(), set())) == expected


def test_what_is_left_alone_is_in_memory() -> None:
    graph = graph_of(lambda m, x: sums(x.sigmoid())[:2])
    (found,) = computed_again(graph, graph.users(), set())
    readers = [n for n in graph.nodes() if found in n.inputs]
    assert not computed_again(graph, graph.users(), {found}) and not computed_again(graph, graph.users(), {readers[0]})


@pytest.mark.parametrize("ours", [True, False])
def test_every_group_has_it_and_nothing_writes_it(ours: bool) -> None:
    """Unless the kernel of the convolution before does, if that is `ours`: nothing it gives is computed twice."""
    graph = graph_of(lambda m, x: sums(torch.relu(m.conv(x)).sigmoid()))

    def decide(group: Group) -> Node | None:
        return group.fused(group.name) if ours or group.family != "contraction" else None

    after = cut(graph, decide, moves=False)  # with a kernel for each of them
    bodies = [topological([n.op.body]) for n in after.nodes() if isinstance(n.op, Fused)]
    counted = [[sum(word(n) == name for n in body) for body in bodies] for name in ("conv", "sigmoid")]
    assert counted == ([[1, 0, 0, 0], [1, 0, 0, 0]] if ours else [[0, 0, 0], [1, 1, 1]])
    assert ours or not any(word(n) == "sigmoid" for n in after.nodes())


def test_only_the_last_families_compute_again() -> None:
    """What others would have computed is in memory by then."""
    assert [family.name for family in FAMILIES if family.again] == [
        *("several reductions", "several reductions", "stream", "several elements", "stream", "stream"),
    ]
    assert all(family.again for family in FAMILIES[-6:])


def test_the_program_is_right() -> None:
    """Its kernels, of a CPU, and its gradients."""
    model = Function(lambda m, x: 1 - (p := x.sigmoid() * 2).mean((1, 2, 3)) / ((p * x).sum((1, 2, 3)) + 3))
    x = torch.randn(LARGE, dtype=torch.float64, requires_grad=True)
    built = pipeline.build(model, (x,), {}, kernels="always", measure=False)
    if not built.program.kernels:
        pytest.skip("no compiler")
    assert all("sigmoid" in kernel.name for kernel in built.program.kernels) and len(built.program.kernels) == 2
    derive, forward = built.program.functions()
    got, want = forward(model, x, *derive(model)), model(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)))
