"""Products of what lies in memory as it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from graph_passes import given, value
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright import tuning
from fusewright.capture import capture
from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.node import Graph, Node
from fusewright.reduced import shape
from fusewright.runtime.device import LARGE_GPU, DeviceFacts
from fusewright.schedule import rearrangement, turned_products
from fusewright.schedule.turned_products import as_they_lie
from fusewright.trial import _is_rewritten
from tests.capture.harness import Fn

torch.manual_seed(0)
N, M, C = 96, 200, 160
W, BIAS, BACK, ALONG = torch.randn(M, N) / 10, torch.randn(M), torch.randn(N, M) / 10, torch.randn(C, C) / 10
SCALE = torch.rand(C) + 0.5


def mixed(x: Tensor) -> Tensor:
    """(B, N, C) to (B, C, M)."""
    return F.linear(x.transpose(1, 2), W, BIAS)


def back(x: Tensor) -> Tensor:
    return F.linear(x, BACK)


MET: dict[str, Callable[[Tensor], Tensor]] = {
    "two products": lambda x: x + back(F.gelu(mixed(x))).transpose(1, 2),
    "one": lambda x: x.cumsum(1)[:, :1] * mixed(x).transpose(1, 2).sum(1, keepdim=True),
    "numbers of each place": lambda x: x + back(mixed(x) * SCALE[:, None] + BIAS).transpose(1, 2),
    "of both": lambda x: x + (lambda t: back(F.linear(t, W)) * t)((x * 2).transpose(1, 2)).transpose(1, 2),
    "a copy": lambda x: x + back(F.linear(x.transpose(1, 2).contiguous(), W)).transpose(1, 2),
    "rows": lambda x: x * 2 + F.linear(x.transpose(0, 1), ALONG, SCALE).transpose(0, 1).relu(),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": mixed,
    "turned back, as eager returns it": lambda x: mixed(x).transpose(1, 2),
    "and a function": lambda x: mixed(x).transpose(1, 2) * 2,
    "without a bias": lambda x: F.linear(x.transpose(1, 2), W).relu(),
    "by a weight (K, N)": lambda x: x.transpose(1, 2) @ BACK,
    "others read it": lambda x: (lambda y: y.sum(2, keepdim=True).transpose(1, 2) * y.transpose(1, 2))(mixed(x)),
    "two of one value": lambda x: F.linear(x.transpose(1, 2), W) * mixed(x).relu(),
}
STAYS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]] = {
    "nothing is turned": lambda x: F.linear(x, ALONG, SCALE),
    "two computed values": lambda x: x.transpose(1, 2) @ x,
    "turned, for others as well": lambda x: (lambda t: (F.linear(t, W), t.sum(2)))(x.transpose(1, 2).contiguous()),
    "rows are turned": lambda x: F.linear(x.transpose(0, 1), ALONG),
    "a matrix": lambda x: F.linear(x[0].t(), W, BIAS),
}


def run(f: Callable[[Tensor], Tensor], x: Tensor, facts: DeviceFacts = LARGE_GPU) -> tuple[Graph, Graph, Tensor]:
    """The graph before and after, and what that gives."""
    captured, hints, orders = given(Fn(f), x)
    found, batches = as_they_lie(captured.graph, facts, hints, orders)
    assert bool(batches) == (found is not captured.graph)
    return captured.graph, found, value(found, captured, Fn(f), x)


def turned(graph: Graph) -> list[Node]:
    """What of the values of a call is turned and not read so by a batch of products."""
    batches = {n.arg(0) for n in graph.nodes() if isinstance(n.op, ops.Matmul)}
    return [n for n in graph.nodes() if n.varies and rearrangement.copies(n) and n not in batches]


@pytest.mark.parametrize("name", MET)
def test_turns_meet(name: str) -> None:
    x = torch.randn(2, N, C)
    before, after, result = run(MET[name], x)
    moved = [n for n in after.nodes() if n.varies and isinstance(n.op, ops.Permute)]
    assert any(n.varies and isinstance(n.op, ops.Permute) for n in before.nodes()) and not moved, moved
    torch.testing.assert_close(result, MET[name](x), check_stride=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", APART)
@pytest.mark.sampled
def test_read_as_they_lie(name: str) -> None:
    x = torch.randn(2, N, C)
    before, after, result = run(APART[name], x)
    assert after is not before
    for matmul in (n for n in after.nodes() if isinstance(n.op, ops.Matmul)):
        assert isinstance(matmul.arg(1).op, ops.Expand), matmul
    torch.testing.assert_close(result, APART[name](x), check_stride=True, rtol=1e-4, atol=1e-4)


class Calls(TorchDispatchMode):
    """The names of all that PyTorch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["as it is", "by a weight (K, N)", "two products"])
def test_nothing_is_copied(name: str) -> None:
    """Not of parameters either, for whose gradients `torch.matmul` and `F.linear` would."""
    x, f = torch.randn(2, N, C), (APART | MET)[name]
    captured = capture(Fn(f), (x,))
    found, _ = as_they_lie(captured.graph, LARGE_GPU, dict.fromkeys(captured.graph.symbols, 2), {})
    constants = {key: nn.Parameter(value) for key, value in captured.constants.items()}
    derive, forward = lower(found, None, constants).functions()
    with torch.no_grad(), Calls() as calls:
        forward(None, x, *derive(None))
    assert "bmm" in calls.names and {"clone", "copy_", "mm"}.isdisjoint(calls.names), calls.names


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    x = torch.randn(2, N, C)
    before, after, _ = run(STAYS[name], x)
    assert after is before


def test_along_the_first_dimension() -> None:
    """One product, turned or not: it is a matrix's."""
    w, x = torch.randn(150, 128) / 10, torch.randn(128, 30, 40)

    def model(x: Tensor) -> Tensor:
        return F.linear(x.permute(1, 2, 0), w, w[:, 0])

    _, after, result = run(model, x)
    assert [n.shape for n in after.nodes() if isinstance(n.op, ops.Matmul)] == [(1200, 150)]
    torch.testing.assert_close(result, model(x), check_stride=True, rtol=1e-4, atol=1e-4)
    _, after, result = run(lambda x: model(x).permute(2, 0, 1) + w[:, :1, None], x)
    assert [n.shape for n in after.nodes() if isinstance(n.op, ops.Matmul)] == [(1200, 150)]
    _, after, result = run(lambda x: model(x).permute(2, 0, 1).sum(0), x)
    assert [n.shape for n in after.nodes() if isinstance(n.op, ops.Matmul)] == [(150, 1200)]
    torch.testing.assert_close(result, model(x).sum(2), check_stride=True, rtol=1e-4, atol=1e-4)


def permuted_product(dims: list[int], w: Tensor, bias: Tensor | None, beside: Tensor | None, x: Tensor) -> Tensor:
    y = F.linear(x.permute(dims), w, bias)
    return y if beside is None else (y * beside).tanh()


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(i, marks=pytest.mark.slow) for i in range(12, 200))])
@pytest.mark.sampled
def test_any_permutations(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two to five dimensions, with products and functions between them, by a device that is always in favour."""
    monkeypatch.setattr(turned_products, "SMALL", 0)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [rng.choice([1, 2, 3, 5, 12]) for _ in range(rng.randint(2, 5))]
    x, steps = torch.randn(lengths), list[Callable[[Tensor], Tensor]]()
    y = x
    for _ in range(rng.randint(2, 4)):
        dims = rng.choice([rng.sample(range(x.ndim), x.ndim), [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2]])
        y = y.permute(dims)
        w, b = torch.randn(rng.choice([2, 7]), y.shape[-1]), rng.random() < 0.5
        bias = torch.randn(len(w)) if b else None
        shape = [n if rng.random() < 0.5 else 1 for n in (*y.shape[:-1], len(w))][rng.randint(0, x.ndim) :]
        beside, with_function = torch.rand(shape), rng.random() < 0.6

        steps.append(partial(permuted_product, dims, w, bias, beside if with_function else None))
        y = F.linear(y, w)
    last = rng.sample(range(x.ndim), x.ndim)

    def model(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x.permute(last) + 1 if seed % 2 else (x.permute(last) * 2).sum(0)

    _, _, result = run(model, x, replace(LARGE_GPU, matmul=1e30))
    torch.testing.assert_close(result, model(x), check_stride=True, rtol=1e-3, atol=1e-3)


def test_images() -> None:
    """Channels of an image are mixed as they lie, and not where that lies otherwise."""
    w, x = torch.randn(48, 64) / 8, torch.randn(2, 64, 20, 20)

    def model(x: Tensor) -> Tensor:
        return F.linear(x.permute(0, 2, 3, 1), w).relu()

    _, after, result = run(model, x)
    assert any(n.shape[1:] == (400, 48) for n in after.nodes() if isinstance(n.op, ops.Matmul))
    torch.testing.assert_close(result, model(x), check_stride=True)
    before, after, _ = run(model, x.to(memory_format=torch.channels_last))
    assert after is before


def test_few_rows_of_a_sample_are_turned() -> None:
    """A batch would leave most of a block idle; a copy is sooner made, but for a device that multiplies at once."""
    x = torch.randn(300, N, 3)
    before, after, _ = run(mixed, x)
    assert after is before
    before, after, _ = run(mixed, x, replace(LARGE_GPU, matmul=1e18))
    assert after is not before


def test_samples_of_one_block_are_left_to_it() -> None:
    w = torch.randn(32, 32)
    before, after, _ = run(lambda x: F.linear(x.transpose(1, 2), w).transpose(1, 2) + x, torch.randn(4, 32, 64))
    assert after is before


class Mixer(nn.Module):
    """Tokens are mixed, as an MLP-Mixer does it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(C), nn.Linear(N, M), nn.Linear(M, N)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x).transpose(1, 2)))).transpose(1, 2)


class Forecast(nn.Module):
    """A series is standardised, continued, and has its mean and scale back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, M)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        scale = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        return self.linear(((x - mean) / scale).transpose(1, 2)).transpose(1, 2) * scale + mean


@pytest.mark.parametrize("kind", [Mixer, Forecast])
def test_programs(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    model, x = kind().eval(), torch.randn(3, N, C)
    built = as_on_a_gpu(model, x)
    assert "matmul" in {c.family for c in built.choices}
    assert "rearrangement" not in {c.family for c in built.choices}
    with torch.no_grad():
        for batch in (x, torch.randn(5, N, C)):
            want = model(batch)
            result = emulated(built, model, batch)
            torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-5, check_stride=True)


@pytest.mark.parametrize("kind", [Mixer, Forecast])
def test_gradients(kind: type[nn.Module]) -> None:
    """Programs are differentiable, to what is repeated for every sample as well."""
    model, x = kind().eval().double(), torch.randn(3, N, C, dtype=torch.float64)
    derive, forward = as_on_a_gpu(model, x).program.functions()

    def gradients(y: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        given = x.clone().requires_grad_()
        return torch.autograd.grad(y(given).square().sum(), (given, *model.parameters()))

    for got, want in zip(gradients(lambda x: forward(model, x, *derive(model))), gradients(model), strict=True):
        torch.testing.assert_close(got, want)


def test_as_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copies, of any batch size."""
    model, x = Mixer(), torch.randn(64, N, C)
    built = built_for_a_gpu(monkeypatch, model, x, kernels="never")
    assert "expand" not in built.program.source
    built = built_for_a_gpu(monkeypatch, model, x)
    assert "permute" not in built.program.source and "rearrange" not in built.program.source
    assert any(isinstance(d, sympy.Expr) for n in built.rewritten.graph.inputs for d in n.shape)
    assert built.batches == 2


def test_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mixer, "eval", nn.Module.train)
    built = built_for_a_gpu(monkeypatch, Mixer(), torch.randn(64, N, C))
    assert built.batches == 0 and "expand" not in built.program.source


def test_a_product_alone_is_a_program_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but how a library is called differs from the model, and the result as sums in another order do."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(N, M, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.transpose(1, 2))

    built = built_for_a_gpu(monkeypatch, Alone(), torch.randn(64, N, C), kernels="auto", capability=80)
    assert not built.program.kernels and not built.rewritten.fired and built.batches == 1
    assert _is_rewritten(built) and shape(built) != shape(replace(built, batches=0))
