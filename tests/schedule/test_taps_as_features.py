"""Convolutions of few features in two steps: the same values, where they lie, and where that pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from graph_passes import Part, begun_inside, given, value
from torch import Tensor, nn

from fusewright import pipeline, tuning
from fusewright.codegen.cuda import seconds_alone
from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.cost import CostModel
from fusewright.schedule.taps_as_features import with_taps_as_features

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {2: nn.ConvTranspose2d}
Then = Callable[[Tensor], Tensor]


def few(conv: Node) -> float:
    """As if the fewest taps were fastest."""
    return float(prod(int(n) for n in conv.arg(1).shape[2:]))


@dataclass(frozen=True)
class Case:
    """x of this shape, a convolution of it, and what follows."""

    shape: tuple[int, ...]
    features: int
    kernel: tuple[int, ...]
    how: dict[str, Any]
    then: Then = lambda y: y

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Model(self)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        kinds: Any = TRANSPOSED if case.how.get("transposed") else CONVOLUTIONS
        how = {name: value for name, value in case.how.items() if name != "transposed"}
        self.conv, self.then = kinds[len(case.kernel)](case.shape[1], case.features, case.kernel, **how), case.then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.conv(x))


CASES = {
    "an image": Case((2, 20, 11, 13), 1, (3, 3), {}),
    "an image, padded": Case((2, 40, 11, 13), 3, (5, 4), {"padding": (2, 1), "bias": False}),
    "an image, dilated and in strides": Case((2, 60, 17, 19), 2, (3, 3), {"dilation": (2, 3), "stride": (3, 2)}),
    "a volume": Case((2, 30, 7, 8, 9), 1, (4, 3, 2), {"padding": (1, 0, 1)}),
    "a volume in strides": Case((2, 60, 9, 8, 9), 2, (5, 2, 3), {"stride": (2, 1, 2), "padding": (2, 1, 0)}),
    "taps along one dimension": Case((2, 30, 5, 8, 9), 4, (1, 3, 1), {"dilation": (1, 2, 1)}),
    "functions": Case((2, 30, 7, 8, 9), 1, (4, 3, 2), {}, lambda y: torch.tanh(y.squeeze(1) + 0.5) * 2),
    "a pool and a mean": Case((2, 30, 9, 10), 2, (3, 3), {}, lambda y: F.max_pool2d(y, 2).relu().mean((2, 3))),
}  # fmt: skip


def run(
    model: nn.Module, x: Tensor, seconds: Callable[[Node], float] = few, **options: Any
) -> tuple[Graph, Graph, int, Tensor]:
    """The graph before and after, how many convolutions changed, and what that gives."""
    captured, hints, orders = given(model, x)
    cost = CostModel(LARGE_GPU, hints, derived_ahead=True)
    found, count = with_taps_as_features(captured.graph, cost, orders, seconds, **options)
    assert bool(count) == (found is not captured.graph)
    return captured.graph, found, count, value(found, captured, model, x)


def test_windows_that_begin_inside() -> None:
    """Of a slice, which is negative padding then."""
    case = Case((2, 60, 20, 19), 2, (3, 3), {"dilation": (2, 3), "stride": (3, 2)})
    model, x = nn.Sequential(Part(), case.model()), torch.randn(case.shape)
    captured, hints, orders = given(model, x)
    graph = begun_inside(captured.graph)
    found, count = with_taps_as_features(graph, CostModel(LARGE_GPU, hints, derived_ahead=True), orders, few)
    assert count == 1
    torch.testing.assert_close(value(found, captured, model, x), model(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small as these are, nothing but launches would count."""
    monkeypatch.setattr("fusewright.schedule.taps_as_features._adding", lambda y, z, cost: 0.0)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    """As the model has it, and as that lies in memory."""
    case = CASES[name]
    model, x = case.model().eval(), torch.randn(case.shape)
    _, found, count, result = run(model, x)
    (conv,) = (n for n in found.nodes() if isinstance(n.op, ops.Conv))
    assert count == 1 and found.symbols
    assert int(conv.shape[1]) > case.features and 1 in conv.arg(1).shape[2:-1]
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), check_stride=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fastest", "kernel"), [(0, (1, 3, 2)), (1, (4, 1, 2))])
def test_the_dimension_by_which_it_takes_least(fastest: int, kernel: tuple[int, ...]) -> None:
    case = CASES["a volume"]

    def seconds(conv: Node) -> float:
        taps = conv.arg(1).shape[2:]
        return 9.0 if 1 not in taps else 1.0 if taps.index(1) == fastest else 2.0

    _, found, _, _ = run(case.model(), torch.randn(case.shape), seconds)
    (conv,) = (n for n in found.nodes() if isinstance(n.op, ops.Conv))
    assert conv.arg(1).shape[2:] == kernel


@pytest.mark.parametrize(("share", "count"), [(0.5, 1), (0.7, 0)])
def test_it_has_to_be_clearly_faster(share: float, count: int) -> None:
    case = CASES["an image"]
    assert run(case.model(), torch.randn(case.shape), lambda c: share if 1 in c.arg(1).shape[2:] else 1.0)[2] == count


STAYS = {
    "many features": Case((2, 90, 11, 13), 5, (3, 3), {}),
    "more than half of the input": Case((2, 5, 11, 13), 1, (3, 3), {}),
    "a signal": Case((2, 30, 40), 1, (3,), {}),
    "taps along the last dimension alone": Case((2, 30, 11, 13), 1, (1, 3), {}),
    "groups": Case((2, 90, 11, 13), 3, (3, 3), {"groups": 3}),
    "transposed": Case((2, 30, 11, 13), 1, (3, 3), {"transposed": True}),
}


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    case = STAYS[name]
    before, after, count, _ = run(case.model(), torch.randn(case.shape))
    assert after is before and count == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_stay(dtype: torch.dtype) -> None:
    """Half precisions would be rounded in between; float64 is not multiplied by tensor cores of numbers so short."""
    case = CASES["an image"]
    assert run(case.model().to(dtype), torch.randn(case.shape, dtype=dtype))[2] == 0


def test_images_whose_channels_lie_last_stay() -> None:
    case = CASES["an image, padded"]
    assert run(case.model(), torch.randn(case.shape).contiguous(memory_format=torch.channels_last))[2] == 0


def test_left_alone() -> None:
    case = CASES["an image"]
    assert run(case.model(), torch.randn(case.shape), alone=lambda n: isinstance(n.op, ops.Conv))[2] == 0


# x, the weight, stride, and whether two steps are clearly faster by estimate on Hopper.
PAYS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, bool]] = {
    "one feature of a volume": ((32, 77, 33, 36, 32), (1, 77, 6, 6, 6), 1, True),
    "two of another": ((16, 64, 32, 64, 64), (2, 64, 5, 5, 5), 1, True),
    "in strides, of whose first step half is for nothing": ((16, 64, 32, 64, 64), (4, 64, 5, 5, 5), 2, False),
    "few taps": ((64, 64, 128, 128), (1, 64, 3, 3), 1, False),
}


# The pipeline asks the same of the first, in `test_where_products_may_be_rounded`, and gets the answer of both.
ASKED = ("one feature of a volume", "two of another")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in ASKED else ()) for name in PAYS])
def test_where_it_pays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    lengths, weight, stride, pays = PAYS[name]
    device, n = torch.device("cuda"), len(weight) - 2
    x = make(ops.Input(lengths, torch.float32, device, "x", 0))
    w = make(ops.Param(weight, torch.float32, device, "w"))
    y = make(ops.Conv((stride,) * n, ((0, 0),) * n, (1,) * n), x, w, None)
    cost = CostModel(LARGE_GPU, {}, derived_ahead=True, fusing=True)
    _, count = with_taps_as_features(
        Graph((x,), (y,)), cost, {}, lambda conv: seconds_alone(conv, {}, tf32=True, capability=90)
    )
    assert bool(count) == pays


@pytest.mark.parametrize("name", ["an image, padded", "a volume", "functions", "a pool and a mean"])
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels, which are emulated: rounded to tf32 as those of the convolution may be."""
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setattr(tuning.Tuner, "seconds", lambda self, conv: few(conv))
    case = CASES[name]
    model, x = case.model().eval(), torch.randn(case.shape)
    built = as_on_a_gpu(model, x, tf32=(True, False))
    assert built.features == 1 and [c.path for c in built.choices] == ["generated"] * len(built.choices)
    result = emulated(built, model, x)
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), rtol=2e-2, atol=2e-3)
        assert result.stride() == model(x).stride()


def test_where_products_may_be_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 on ordinary cores takes as long for each feature; in training, gradients would be added up by parts."""
    model = nn.Sequential(nn.Conv3d(77, 1, 6), nn.Tanh()).requires_grad_(False)
    x = torch.empty(32, 77, 33, 36, 32)
    for tf32 in (True, False):
        monkeypatch.setattr(pipeline, "tf32_allowed", lambda precision, tf32=tf32: (tf32, False))
        assert built_for_a_gpu(monkeypatch, model, x).features == tf32
    monkeypatch.setattr(pipeline, "tf32_allowed", lambda precision: (True, False))
    assert not built_for_a_gpu(monkeypatch, model, x, windows="never").features
    how: Any = {"kernels": "always", "measure": False, "target": torch.device("cuda")}
    assert not pipeline.build(model.train(), (x,), {}, **how).features
