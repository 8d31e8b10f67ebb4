"""Biases behind the greatest or the least of a convolution's positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graph_passes import given, value
from torch import Tensor, nn

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node
from fusewright.ir.spec import check
from fusewright.schedule.bias_behind import with_bias_behind

Behind = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """A convolution of whole numbers, so that all sums are exact, and what follows it."""

    def __init__(self, behind: Behind, *, bias: bool = True, dims: int = 2, transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
        self.conv = kind(4, 6, 3, groups=2, padding=1, bias=bias)
        for parameter in self.conv.parameters():
            parameter.data = torch.randint(-4, 5, parameter.shape).float()
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.conv(x))


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(5)).float()


def moved(model: nn.Module, x: Tensor, alone: Callable[[Node], bool] = lambda _: False) -> tuple[Graph, Tensor]:
    """The graph after the pass, and what it gives."""
    captured, _, orders = given(model, x)
    graph = check(with_bias_behind(captured.graph, orders, alone=alone))
    return graph, value(graph, captured, model, x)


def bias(graph: Graph) -> Node | None:
    """That of the convolution."""
    (conv,) = (n for n in graph.nodes() if isinstance(n.op, ops.Conv))
    return conv.args[2]


MOVES: dict[str, tuple[Behind, int]] = {
    "windows": (lambda y: F.max_pool2d(y, 2), 2),
    "padded windows that share some, and what follows": (lambda y: F.max_pool2d(y, 3, 2, 1).tanh() + 1, 2),
    "rounded up": (lambda y: F.max_pool1d(y, 4, 3, ceil_mode=True), 1),
    "positions": (lambda y: y.amax((2, 3)), 2),
    "positions that are kept": (lambda y: y.amin((2, 3, 4), keepdim=True), 3),
    "everything of a sample": (lambda y: y.amin((1, 2, 3)), 2),
    "everything, kept": (lambda y: y.amax((1, 2), keepdim=True), 1),
}
STAYS: dict[str, Behind] = {
    "channels": lambda y: y.amax(1),
    "a dimension of two": lambda y: y.amax(2),
    "the batch as well": lambda y: y.amax((0, 2, 3)),
    "a mean": lambda y: y.mean((2, 3)),
    "averages": lambda y: F.avg_pool2d(y, 2),
    "channels and positions in windows": lambda y: F.max_pool3d(y, (2, 2, 2)),
    "a function between": lambda y: y.abs().amax((2, 3)),
    "read twice": lambda y: y.amax((2, 3)) + y[:, :, 0, 0],
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_it_is_added_behind(name: str, transposed: bool) -> None:
    behind, dims = MOVES[name]
    model, x = Model(behind, dims=dims, transposed=transposed).eval(), whole_numbers(2, 4, *(9, 8, 7)[:dims])
    graph, got = moved(model, x)
    assert bias(graph) is None
    torch.testing.assert_close(got, model(x).detach(), rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("name", STAYS)
def test_it_stays(name: str) -> None:
    model, x = Model(STAYS[name]).eval(), whole_numbers(2, 4, 9, 8)
    graph, got = moved(model, x)
    assert bias(graph) is not None
    assert torch.equal(got, model(x))


def test_nothing_is_added_where_there_is_none() -> None:
    model, x = Model(lambda y: y.amax((2, 3)), bias=False).eval(), whole_numbers(2, 4, 9, 8)
    captured, _, orders = given(model, x)
    assert with_bias_behind(captured.graph, orders) is captured.graph


def test_half_precisions_are_rounded_once() -> None:
    model, x = Model(lambda y: y.amax((2, 3))).eval().bfloat16(), whole_numbers(2, 4, 9, 8).bfloat16()
    assert bias(moved(model, x)[0]) is not None


@pytest.mark.parametrize("kind", [ops.Conv, ops.Reduce])
def test_operations_that_are_left_alone(kind: type[ops.Op]) -> None:
    model, x = Model(lambda y: y.amax((2, 3))).eval(), whole_numbers(2, 4, 9, 8)
    assert bias(moved(model, x, alone=lambda node: isinstance(node.op, kind))[0]) is not None


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(special: float) -> None:
    model, x = Model(lambda y: F.max_pool2d(y, 2)).eval(), whole_numbers(2, 4, 9, 8)
    x[0, 1, 4, 4] = special
    _, got = moved(model, x)
    torch.testing.assert_close(got, model(x).detach(), rtol=0, atol=0, equal_nan=True)
