"""What becomes of paddings ahead of windows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import B, check_near, fired, graph_of, inp
from linear_cases import conv
from spec_padding import average, image, padded
from torch import nn

from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.node import Graph
from fusewright.ir.placement import placed
from fusewright.rules import RULES, padding
from fusewright.rules.engine import rewrite
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.cost import CostModel


class Of(nn.Module):
    """A function as a module, beside a convolution."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(self, x)
        return result


def rewritten(function, *shape: int, **options) -> Graph:
    """The graph of a function on a large GPU, rewritten where that pays."""
    model = Of(function).eval().requires_grad_(False)
    graph = placed(capture(model, (torch.empty(shape),), {}).graph, torch.device("cuda"))
    cost = CostModel(LARGE_GPU, dict.fromkeys(graph.symbols, shape[0]), derived_ahead=True, fusing=True)
    return rewrite(graph, RULES, cost, fusing=True, **options).graph


def computed(graph: Graph) -> list[str]:
    return [type(n.op).__name__ for n in graph.nodes() if n.inputs]


@pytest.mark.parametrize("shape", [(64, 96, 56, 56), (64, 96, 56)], ids=str)
def test_a_local_response_norm_neither_pads_nor_is_seen_otherwise(shape: tuple[int, ...]) -> None:
    found = rewritten(lambda model, x: F.local_response_norm(x, 5), *shape)
    assert computed(found) == ["Pointwise", "Pool", *["Pointwise"] * 4]
    (pool,) = (n.op for n in found.nodes() if isinstance(n.op, ops.Pool))
    assert pool.padding[0] == 2 and pool.divisor is None and not pool.ceil_mode


def test_a_norm_over_more_channels_than_there_are_stays() -> None:
    """PyTorch averages no volumes that are smaller than a window."""
    assert "Pad" in computed(rewritten(lambda model, x: F.local_response_norm(x, 5), 64, 3, 56, 56))


@pytest.mark.parametrize("relu", [False, True])
def test_windows_reach_over_the_end_where_it_is_padded_alone(relu: bool) -> None:
    """As pools are padded in models that came from TensorFlow; a relu ahead moves behind."""

    def pooled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x, least = (torch.relu(x), 0.0) if relu else (x, float("-inf"))
        return F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=least), 3, 2)

    found = rewritten(pooled, 64, 8, 112, 112)
    assert computed(found) == ["Pool", *["Pointwise"] * relu]
    (pool,) = (n.op for n in found.nodes() if isinstance(n.op, ops.Pool))
    assert pool.ceil_mode and not any(pool.padding)


def test_convolutions_take_padding_where_values_are_finite() -> None:
    def convolved(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model.conv(F.pad(F.pad(x, (1, 1, 2, 2)), (0, 0, 1, 1)))
        return y

    assert computed(rewritten(convolved, 64, 8, 56, 56)) == ["Pad", "Pad", "Conv"]
    found = rewritten(convolved, 64, 8, 56, 56, finite=True)
    assert computed(found) == ["Conv"]
    (op,) = (n.op for n in found.nodes() if isinstance(n.op, ops.Conv))
    assert op.padding == ((4, 4), (2, 2))


@pytest.mark.parametrize(
    ("length", "sides", "stride", "expected"),
    [
        (8, (1, 1), 1, (1, 1)),
        (8, (1, 2), 1, (1, 2)),
        (8, (1, 0), 2, (1, 1)),  # as many positions, so equal sides
        (8, (0, 1), 2, (0, 1)),
        (9, (2, 1), 2, (2, 1)),
        (9, (2, 3), 3, (2, 2)),
        (B, (1, 1), 2, (1, 1)),
        (B, (1, 2), 2, (1, 2)),  # nobody knows
    ],
)
def test_sides_are_equal_where_they_may_be(length, sides, stride: int, expected: tuple[int, int]) -> None:
    root = conv(padded(inp(2, 2, length), d2=sides), inp(3, 2, 3), stride=stride)
    found = fired(padding.padding_of_conv, graph_of(root)).graph.outputs[0]
    assert isinstance(found.op, ops.Conv) and found.op.padding == (expected,)
    if length != B:
        check_near(padding.padding_of_conv, root)


TAKEN = {
    "what is not padded is not counted out": lambda: average(
        padded(image(), d2=(1, 1)), 2, 2, stride=(1, 1), count_include_pad=False
    ),
    "nothing is counted": lambda: average(
        padded(image(), d3=(1, 1)), 2, 4, stride=(1, 1), padding=(1, 1), count_include_pad=False, divisor=3
    ),
    "windows that are cut off are divided alike": lambda: average(
        padded(image(2, 3, 2, 5), d2=(0, 1)), 3, 2, stride=(2, 2), ceil_mode=True, divisor=3
    ),
    "a volume as small as a window": lambda: average(
        padded(image(2, 5, 3, 3), d1=(2, 2)), 5, 1, 1, stride=(1, 1, 1)
    ),
    "an image that is smaller than a window": lambda: average(
        padded(image(2, 5, 2, 3), d2=(1, 1)), 4, 1, stride=(1, 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_averages_that_pad_by_themselves(case) -> None:
    check_near(padding.padding_of_average, case())
