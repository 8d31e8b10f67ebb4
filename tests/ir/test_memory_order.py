"""Which models' results lie in memory as their inputs do: what is claimed not to follow does not, in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.ir.memory_order import follows_inputs, is_known, order_of, output_orders
from fusewright.ir.placement import placed


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.linear, self.function = nn.Conv2d(3, 4, 3), nn.Linear(6, 5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


CASES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "conv": (lambda m, x: m.conv(x), True),
    "conv, pool": (lambda m, x: F.max_pool2d(m.conv(x).relu(), 2), True),
    "mean over positions": (lambda m, x: m.conv(x).relu().mean((2, 3)), False),
    "pooled to one": (lambda m, x: F.adaptive_avg_pool2d(m.conv(x), 1), False),
    "mean over rows": (lambda m, x: m.conv(x).mean(2), False),
    "sum over channels": (lambda m, x: m.conv(x).sum(1), False),
    "one number a sample": (lambda m, x: m.conv(x).sum((1, 2, 3)), False),
    "all": (lambda m, x: x.sum(), False),
    "linear": (lambda m, x: m.linear(x), False),
    "function": (lambda m, x: torch.relu(x), True),
    "sum": (lambda m, x: x.sum(2), False),
    "softmax": (lambda m, x: m.conv(x).softmax(1), False),
    "layer norm": (lambda m, x: F.layer_norm(x, (6,)), False),
    "instance norm": (lambda m, x: F.instance_norm(x).relu(), False),
    "group norm": (lambda m, x: F.group_norm(x, 3), True),
    "padded": (lambda m, x: m.conv(F.pad(x, (1, 1))).relu(), True),
    "moved": (lambda m, x: x.permute(0, 2, 3, 1) * 2, True),
    "copied": (lambda m, x: torch.relu(x).permute(0, 2, 3, 1).contiguous() * 2, False),
}


@pytest.mark.parametrize(
    ("affine", "device", "rows"), [(True, "cuda", True), (False, "cuda", False), (False, "cpu", True)]
)
def test_norms_of_turned_values_on_gpus(affine: bool, device: str, rows: bool) -> None:
    """In rows where that is sure."""
    model, x = nn.BatchNorm1d(5, affine=affine).eval(), torch.randn(2, 7, 5).transpose(1, 2)
    graph = placed(capture(model, (x,), {}).graph, torch.device(device))
    (order,) = output_orders(graph, {graph.inputs[0]: order_of(x, graph.inputs[0])}, kernels=False)
    assert (order == (0, 1, 2)) == rows


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_follow_does_not(name: str) -> None:
    function, follows = CASES[name]
    model, x = Model(function).eval(), torch.randn(2, 3, 7, 6)
    assert follows_inputs(capture(model, (x,), {}).graph) == follows
    if follows:
        return
    expected = steps(model(x))
    for dims in permutations(range(4)):
        back = [dims.index(d) for d in range(4)]
        assert steps(model(x.permute(dims).contiguous().permute(back))) == expected, dims


def steps(x: Tensor) -> list[int]:
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


def test_orders_of_tensors() -> None:
    """Gaps do not matter, nor do dimensions of length 1, nor repetitions that keep rows in their order."""
    x = torch.randn(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    assert order_of(x) == order_of(x[:, :, 1:3, ::2]) == (0, 1, 2, 3)
    assert order_of(last) == order_of(last[:, :2]) == (0, 2, 3, 1)
    assert order_of(last[:1]) == (2, 3, 1)
    assert order_of(x[:1].expand(2, 3, 4, 5)) == (0, 1, 2, 3)
    assert order_of(last[:1].expand(2, 3, 4, 5)) not in ((0, 1, 2, 3), (0, 2, 3, 1))


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 2, 1), (1, 0, 3, 2)])
@pytest.mark.parametrize("dim", range(1, 4))
@pytest.mark.parametrize("size, step", [(2, 1), (5, 1), (4, 1), (3, 2), (2, 3), (6, 1)])
def test_windows_lie_as_in_eager(dims: tuple[int, ...], dim: int, size: int, step: int) -> None:
    x = torch.randn(2, 7, 8, 9)
    x = x.permute(dims).contiguous().permute([dims.index(d) for d in range(4)])
    graph = capture(Model(lambda m, x: x.unfold(dim, size, step) * 2).eval(), (x,), {}).graph
    (order,) = output_orders(graph, {graph.inputs[0]: order_of(x)}, kernels=False)
    assert order == order_of(x.unfold(dim, size, step) * 2)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dims", [(0, 2, 3, 1), (0, 3, 2, 1), (1, 0, 3, 2)])
@pytest.mark.parametrize("shape", [(2, 3, 2, 8, 9), (2, 6, 8, 3, 3), (2, 2, 3, 4, 2, 9), (2, 6, 1, 8, 9), (2, 48, 9)])
def test_views_that_split_dimensions(shape: tuple[int, ...], dims: tuple[int, ...], gaps: bool) -> None:
    """They lie as what they show does, with gaps or without; what joins dimensions may be a copy."""
    x = torch.randn(2, 6, 8, 18 if gaps else 9)
    x = x.permute(dims).contiguous().permute([dims.index(d) for d in range(4)])
    x = x[..., ::2] if gaps else x
    graph = capture(Model(lambda m, x: x.reshape(shape) * 2).eval(), (x,), {}).graph
    (order,) = output_orders(graph, {graph.inputs[0]: order_of(x)}, kernels=False)
    assert order is not None and (is_known(order) or len(shape) == 3)
    assert not is_known(order) or order == order_of(x.reshape(shape) * 2)


@pytest.mark.parametrize("pool", [F.avg_pool3d, F.max_pool3d])
def test_pools_of_volumes(pool: Callable[..., Tensor]) -> None:
    """Averages are in rows, maxima follow what they are of."""
    x = torch.randn(2, 3, 4, 6, 8).to(memory_format=torch.channels_last_3d)
    graph = capture(Model(lambda m, x: pool(x, 3, 2)).eval(), (x,), {}).graph
    (order,) = output_orders(graph, {graph.inputs[0]: order_of(x)}, kernels=False)
    assert order == order_of(pool(x, 3, 2))


def test_columns_lie_row_by_row() -> None:
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    graph = capture(Model(lambda m, x: F.unfold(x, 3) + 1).eval(), (x,), {}).graph
    (order,) = output_orders(graph, {graph.inputs[0]: order_of(x)}, kernels=False)
    assert order == order_of(F.unfold(x, 3) + 1) == (0, 1, 2)
