"""Convolutions of few windows as products of these by the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from graph_passes import Part, begun_inside, given, value
from torch import Tensor, nn

from fusewright import pipeline, tuning
from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.node import Graph, Symbol, make
from fusewright.reduced import shape
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.cost import CostModel
from fusewright.schedule.window_products import as_products
from fusewright.trial import _is_rewritten
from tests.capture.harness import Fn

Then = Callable[[Tensor, nn.Module], Tensor]
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Model(nn.Module):
    """A convolution, and what follows it: (N, C, *L) to (N, O, *P)."""

    def __init__(self, channels: int, features: int, kernel: tuple[int, ...], then: Then | None = None, **how: Any):
        super().__init__()
        torch.manual_seed(0)
        self.conv = CONVOLUTIONS[len(kernel)](channels, features, kernel, **how)
        self.scale = nn.Parameter(torch.rand(features, *(1,) * len(kernel)) + 0.5)
        self.e, self.at = nn.Parameter(torch.randn(features)), nn.Parameter(torch.randn(72, features))
        self.then = then or (lambda y, m: y)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.conv(x), self)


@dataclass(frozen=True)
class Case:
    """x of this shape, its windows `kernel`, and what else a convolution has."""

    shape: tuple[int, ...]
    features: int
    kernel: tuple[int, ...]
    how: dict[str, Any]
    then: Then | None = None

    def model(self) -> Model:
        return Model(self.shape[1], self.features, self.kernel, self.then, **self.how).eval()


def flattened(y: Tensor, m: nn.Module) -> Tensor:
    return y.flatten(2).transpose(1, 2)


CASES = {
    "patches": Case((2, 3, 16, 24), 20, (8, 8), {"stride": 8}),
    "patches, in rows": Case((2, 3, 16, 24), 20, (8, 8), {"stride": 8}, flattened),
    "patches, channels last": Case(
        (2, 3, 16, 24), 20, (8, 8), {"stride": 8}, lambda y, m: y.permute(0, 2, 3, 1).contiguous() * 2
    ),
    "a signal": Case((3, 5, 41), 12, (7,), {"stride": 6, "bias": False}),
    "a signal, turned": Case((3, 5, 41), 12, (7,), {"stride": 6}, lambda y, m: y.transpose(1, 2).relu()),
    "dilated and padded": Case((2, 4, 19, 17), 6, (3, 4), {"stride": (7, 8), "dilation": (2, 1), "padding": (1, 2)}),
    "few positions of volumes": Case((2, 3, 9, 8, 10), 30, (5, 4, 3), {"stride": (3, 4, 4), "padding": (1, 0, 1)}),
    "a function": Case((2, 3, 16, 16), 20, (8, 8), {"stride": 8}, lambda y, m: F.gelu(y * m.scale)),
    "its mean": Case((2, 3, 16, 16), 20, (8, 8), {"stride": 8}, lambda y, m: torch.tanh(y * m.scale).mean((2, 3))),
    "over channels": Case((2, 3, 16, 16), 20, (8, 8), {"stride": 8}, lambda y, m: torch.logsumexp(y * 2, 1)),
    "over all": Case((2, 3, 16, 16), 20, (8, 8), {"stride": 8}, lambda y, m: torch.logsumexp(y * 2, (1, 2, 3))),
    "pooled": Case((2, 3, 16, 16), 20, (4, 4), {"stride": 4}, lambda y, m: F.max_pool2d(y, 2)),
    "others read it": Case(
        (2, 3, 16, 24), 20, (8, 8), {"stride": 8}, lambda y, m: flattened(y, m).sum(1) + y[..., 0, 0]
    ),
    "of many positions": Case((2, 3, 32, 36), 20, (4, 4), {"stride": 4}, lambda y, m: F.gelu(y * m.scale)),
    "of many positions, turned": Case(
        (2, 3, 32, 36), 20, (4, 4), {"stride": 4}, lambda y, m: flattened(y, m) * 2 + m.at
    ),
    "large patches": Case((2, 3, 32, 48), 70, (16, 16), {"stride": 16}, lambda y, m: flattened(F.gelu(y), m)),
    "a position's embedding": Case(
        (2, 3, 32, 48), 70, (16, 16), {"stride": 16}, lambda y, m: F.layer_norm(flattened(y, m) + m.e, (70,))
    ),
    "many large patches": Case((2, 2, 128, 144), 48, (16, 16), {"stride": 16}, lambda y, m: flattened(y, m) + m.at),
    "a long sum": Case((2, 11, 16, 16, 16), 12, (9, 7, 7), {"stride": 9, "padding": 1}, lambda y, m: y.relu().sum(1)),
}  # fmt: skip


INSIDE = {
    "patches": Case((2, 3, 21, 24), 20, (8, 8), {"stride": 8}, flattened),
    "a signal": Case((3, 5, 51), 12, (7,), {"stride": 6, "dilation": 2}),
    "padded along another dimension": Case((2, 4, 22, 15), 6, (3, 4), {"stride": (7, 8), "padding": (0, 3)}),
}


@pytest.mark.parametrize("name", INSIDE)
def test_of_windows_that_begin_inside(name: str) -> None:
    """Of a slice, which is negative padding then, and a slice again."""
    case = INSIDE[name]
    model, x = nn.Sequential(Part(), case.model()), torch.randn(case.shape)
    captured, hints, orders = given(model, x)
    graph = begun_inside(captured.graph)
    cost = CostModel(LARGE_GPU, hints, derived_ahead=True)
    found, products = as_products(graph, cost, orders, always=True)
    assert products == 1
    torch.testing.assert_close(value(found, captured, model, x), model(x).detach())


def run(model: nn.Module, x: Tensor, *, always: bool = True) -> tuple[Graph, Graph, int, Tensor]:
    """The graph before and after, how many products there are, and what that gives."""
    captured, hints, orders = given(model, x)
    cost = CostModel(LARGE_GPU, hints, derived_ahead=True)
    found, products = as_products(captured.graph, cost, orders, always=always)
    assert bool(products) == (found is not captured.graph)
    return captured.graph, found, products, value(found, captured, model, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products(name: str, dtype: torch.dtype) -> None:
    """As the model has it, and as that lies in memory; of a batch of any size."""
    case = CASES[name]
    model, x = case.model().to(dtype), torch.randn(case.shape, dtype=dtype)
    _, found, products, result = run(model, x)
    assert products == 1 and not any(isinstance(n.op, ops.Conv) for n in found.nodes())
    assert found.symbols
    tolerance: dict[str, float] = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), check_stride=True, **tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels, which are emulated: the windows are written by one, and others do what follows the product."""
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    case = CASES[name]
    model, x = case.model(), torch.randn(case.shape)
    built = as_on_a_gpu(model, x, mode="always")
    assert built.windows == 1 and "F.conv" not in built.program.source
    families = {c.family for c in built.choices}
    assert families & {"matmul", "product", "sample program"}, families
    wide = case.model().double()
    for batch in (x, torch.randn(5, *case.shape[1:])):
        result = emulated(built, model, batch)
        with torch.no_grad():
            torch.testing.assert_close(result.double(), wide(batch.double()), rtol=1e-4, atol=1e-5)
            assert result.stride() == model(batch).stride()


STAYS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "windows that overlap much": (lambda x: F.conv2d(x, torch.ones(64, 3, 3, 3), padding=1), (2, 3, 16, 16)),
    "that overlap, of more positions than features": (
        lambda x: F.conv2d(x, torch.ones(8, 3, 3, 3), stride=2),
        (2, 3, 16, 16),
    ),
    "one tap": (lambda x: F.conv2d(x, torch.ones(8, 3, 1, 1), stride=2), (2, 3, 16, 16)),
    "groups": (lambda x: F.conv2d(x, torch.ones(8, 2, 8, 8), stride=8, groups=2), (2, 4, 16, 16)),
    "transposed": (lambda x: F.conv_transpose2d(x, torch.ones(4, 8, 2, 2), stride=2), (2, 4, 16, 16)),
    "a computed weight": (
        lambda x: F.conv2d(x, x.mean((0, 2, 3))[:, None, None].expand(8, 4, 8, 8), stride=8),
        (2, 4, 16, 16),
    ),
    "no window": (lambda x: F.conv2d(x[:0], torch.ones(8, 4, 8, 8), stride=8), (2, 4, 16, 16)),
}


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    f, lengths = STAYS[name]
    before, after, products, _ = run(Fn(f), torch.randn(lengths))
    assert after is before and products == 0


def test_images_whose_channels_lie_last_stay() -> None:
    """What a window holds would have to be brought into the weight's order; a library has kernels for such images."""
    model, x = CASES["patches"].model(), torch.randn(CASES["patches"].shape)
    assert run(model, x)[2] == 1
    assert run(model, x.contiguous(memory_format=torch.channels_last))[2] == 0


def test_left_alone() -> None:
    model, x = CASES["patches"].model(), torch.randn(CASES["patches"].shape)
    graph = capture(model, (x,), {}).graph
    cost = CostModel(LARGE_GPU, dict.fromkeys(graph.symbols, 2))
    assert as_products(graph, cost, alone=lambda n: isinstance(n.op, ops.Conv), always=True) == (graph, 0)


# x, the weight, stride and padding, and whether a product is clearly less work for a large GPU.
PAYS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, bool]] = {
    "a long sum at few positions": ((32, 79, 27, 25, 21), (91, 79, 9, 13, 13), 9, True),
    "a picture's patches": ((64, 3, 224, 224), (768, 3, 16, 16), 16, True),
    "the last layer of a few images": ((8, 512, 8, 8), (512, 512, 4, 4), 4, True),
    "many positions": ((64, 64, 112, 112), (128, 64, 2, 2), 2, False),
    "a picture's small patches": ((64, 3, 224, 224), (96, 3, 4, 4), 4, False),
    "few taps": ((2, 8, 4, 4), (8, 8, 2, 2), 2, False),
}


@pytest.mark.parametrize("name", PAYS)
def test_where_it_pays(name: str) -> None:
    lengths, weight, stride, pays = PAYS[name]
    device, batch = torch.device("cuda"), sympy.Symbol("B", integer=True, positive=True)
    x = make(ops.Input((batch, *lengths[1:]), torch.float32, device, "x", 0))
    w, n = make(ops.Param(weight, torch.float32, device, "w")), len(weight) - 2
    y = make(ops.Conv((stride,) * n, ((0, 0),) * n, (1,) * n), x, w, None)
    graph = Graph((x,), (y,), symbols={batch: Symbol(0, 0, 0, None)})
    cost = CostModel(LARGE_GPU, {batch: lengths[0]}, derived_ahead=True)
    found, products = as_products(graph, cost, measured=True)
    assert bool(products) == pays and (found is not graph) == pays
    pictures = lengths[1] < 4  # a kernel of ours may be as fast
    assert bool(as_products(graph, cost)[1]) == (pays and not pictures)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["dilated and padded", "of many positions"])
def test_what_is_not_finite(name: str, value: float) -> None:
    """It is in the windows that have it, and nowhere else."""
    case = CASES[name]
    model, x = case.model().double(), torch.randn(case.shape, dtype=torch.float64)
    x[1, 2, 3, 7] = value
    with torch.no_grad():
        want = model(x)
    assert torch.equal(run(model, x)[3].isfinite(), want.isfinite()) and not want.isfinite().all()


@pytest.mark.parametrize("name", ["patches, in rows", "dilated and padded", "of many positions, turned", "a signal"])
def test_gradients(name: str) -> None:
    case = CASES[name]
    model, x = case.model().double(), torch.randn(case.shape, dtype=torch.float64)
    built = as_on_a_gpu(model, x, mode="always")
    assert built.windows == 1
    derive, forward = built.program.functions()

    def gradients(y: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        given = x.clone().requires_grad_()
        return torch.autograd.grad(y(given).square().sum(), (given, *model.conv.parameters()))

    for got, want in zip(gradients(lambda x: forward(model, x, *derive(model))), gradients(model), strict=True):
        torch.testing.assert_close(got, want)


def test_as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel writes patches, and one multiplies them, rounded as convolutions may be, and adds what a position has;
    nothing else is left."""
    case = Case((64, 3, 224, 224), 768, (16, 16), {"stride": 16}, lambda y, m: flattened(y, m) + m.table)
    model, x = case.model(), torch.empty(case.shape)
    model.table = nn.Parameter(torch.randn(196, 768))
    monkeypatch.setattr(pipeline, "tf32_allowed", lambda precision: (True, False))
    built = built_for_a_gpu(monkeypatch, model, x, kernels="auto", mode="always")
    assert built.windows == 1 and not built.rewritten.fired
    assert [c.family for c in built.choices if c.path == "generated"] == ["matmul", "rearrangement"]
    product = next(k for k in built.program.kernels if "linear" in k.name)
    assert "NUMBERS = 1" in product.source and "196" in product.source
    monkeypatch.setattr(pipeline, "tf32_allowed", lambda precision: (False, False))
    built = built_for_a_gpu(monkeypatch, model, x, mode="always")
    assert any("NUMBERS = 2" in k.source for k in built.program.kernels)
    convolved = built_for_a_gpu(monkeypatch, model, x, windows="never")
    assert convolved.windows == 0 and shape(convolved) != shape(built)
    assert _is_rewritten(replace(built, program=replace(built.program, kernels=(), derived=())))


# What follows a convolution of large patches, its kernels, and whether the result is seen as it lies.
BEHIND: dict[str, tuple[Then, list[str]]] = {
    "nothing": (lambda y, m: y, ["fused_rearrange", "fused_linear_add"]),
    "a function": (lambda y, m: F.gelu(y * m.scale), ["fused_rearrange", "fused_linear_add_mul_gelu"]),
    "a mean": (lambda y, m: torch.tanh(y).mean((2, 3)), ["fused_rearrange", "fused_linear_tanh_mean"]),
    "over channels": (lambda y, m: torch.logsumexp(y * 2, 1), ["fused_rearrange", "fused_linear_mul_logsumexp"]),
    "a norm of rows": (
        lambda y, m: F.layer_norm(flattened(y, m), y.shape[1:2]),
        ["fused_rearrange", "fused_linear", "fused_layernorm"],
    ),
    "of a function ahead": (lambda y, m: flattened(y, m) + 1, ["fused_rearrange", "fused_linear_add"]),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_follows_is_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the convolution's size is read and written again."""
    then, kernels = BEHIND[name]
    built = built_for_a_gpu(
        monkeypatch, Model(3, 256, (16, 16), then, stride=16), torch.empty(8, 3, 224, 224), mode="always"
    )
    assert built.windows == 1
    assert sorted(k.name for k in built.program.kernels) == sorted(kernels)


def test_where_it_may_be() -> None:
    """On GPUs, in training as well: which program serves calls with gradients is measured."""
    case = CASES["large patches"]
    model, x = case.model(), torch.randn(case.shape)
    assert as_on_a_gpu(model, x, mode="always").windows == 1
    assert as_on_a_gpu(model, x, mode="never").windows == 0
    assert as_on_a_gpu(model.train(), x, mode="always").windows == 1
    assert pipeline.build(model.eval(), (x,), {}, mode="always", kernels="always", measure=False).windows == 0


def test_a_picture_where_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of ours reads it as fast as it reads other images."""
    model, x = Model(3, 768, (16, 16), stride=16).eval(), torch.empty(64, 3, 224, 224)
    assert built_for_a_gpu(monkeypatch, model, x, kernels="auto").windows == 0
    assert built_for_a_gpu(monkeypatch, model, x, kernels="auto", windows="measured").windows == 1


def test_of_a_pool_that_moved_into_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four positions a sample, and sums of 120159 products: all that is left of the weight is derived ahead."""
    how: dict[str, Any] = {"stride": 3, "padding": (1, 2, 2), "dilation": (3, 1, 1)}
    model = Model(79, 91, (7, 7, 7), lambda y, m: torch.logsumexp(F.avg_pool3d(y * 2, 3), (1, 2, 3, 4)), **how)
    built = built_for_a_gpu(monkeypatch, model, torch.empty(32, 79, 27, 25, 21), kernels="auto")
    assert built.windows == 1 and len(built.program.derived) == 1
    assert built.program.source.partition("def forward")[2].count("\n    x = ") == 3  # windows, product, the rest
