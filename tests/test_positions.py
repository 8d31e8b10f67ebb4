"""Indices that depend on a position alone: kernels compute them, and what they read of tables."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from gpu_build import Function, Weighted, as_on_a_gpu, emulated
from torch import Tensor, nn

import fusewright
from fusewright import pipeline
from fusewright.capture import capture
from fusewright.ir import ops


def places(x: Tensor, *bounds: int, of: int = 0) -> Tensor:
    """As a model writes them: up to the batch, or from and by numbers."""
    n = x.shape[of]
    return torch.arange(n) if not bounds else torch.arange(bounds[0], bounds[0] + bounds[1] * n, bounds[1])


def _noised(x: Tensor, w: Tensor, i: Callable[[Tensor], Tensor]) -> Tensor:
    """A sample and what is added to it, weighed by the level of its time."""
    a = w.abs()[i(x)][:, None, None]
    return torch.sqrt(a) * x + torch.sqrt(1 - a) * x.flip(1)


# What a model computes, its weight's and its input's shape, and its kernel.
MODELS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...], str]] = {
    "levels": (
        lambda x, w: torch.sqrt(a := w.abs()[places(x) % 7][:, None, None]) * x + torch.sqrt(1 - a),
        (7,), (9, 5, 6), "fused_embedding_sqrt_mul_sub_sqrt_add",
    ),
    "levels, 16 bytes": (
        lambda x, w: torch.sqrt(w.abs()[places(x) % 7][:, None, None]) * x,
        (7,), (9, 3, 8), "fused_embedding_sqrt_mul",
    ),
    "from three on, by two": (
        lambda x, w: (w[places(x, 3, 2) % 7][:, None] * x).relu(), (7,), (9, 5), "fused_embedding_mul_relu",
    ),
    "as many as rows": (lambda x, w: (w[places(x)][:, None] * x).relu(), (9,), (9, 5), "fused_embedding_mul_relu"),
    "rows, reduced": (
        lambda x, w: (x - w[places(x) % 5]).square().sum(-1).mean(), (5, 33), (131, 33),
        "fused_embedding_sub_square_mean_mul",
    ),
    "columns, turned": (
        lambda x, w: (x * w[places(x, of=1) % 5].T).tanh(), (5, 12), (12, 9), "fused_mul_tanh",
    ),
    "losses": (
        lambda x, w: nn.functional.nll_loss(x * w, places(x) % 7, reduction="none").exp().mean(), (11,), (33, 11), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kernels(name: str, dtype: torch.dtype) -> None:
    function, weight, shape, kernel = MODELS[name]
    model, x = Weighted(function, *weight).to(dtype).eval(), torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(model.weight.clamp(-1, 1))
    built = as_on_a_gpu(model, x)
    names = [k.name for k in built.program.kernels]
    assert kernel in names if kernel else names
    if name not in ("columns, turned", "losses"):
        assert "arange" not in built.program.source.split("def forward")[1] and len(names) == 1
    found = emulated(built, model, x)
    with torch.no_grad():
        want = model.double()(x.double())
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), want, rtol=close, atol=close)


@pytest.mark.parametrize("length", [1, 6, 15, 16, 40])
def test_another_batch(length: int) -> None:
    """Beyond the table's length, too: what repeats after as many as there are rows is always that of one."""
    function, weight, shape, _ = MODELS["levels"]
    model = Weighted(function, *weight).eval()
    with torch.no_grad():
        model.weight.clamp_(-1, 1)
        built, x = as_on_a_gpu(model, torch.randn(shape)), torch.randn(length, *shape[1:])
        torch.testing.assert_close(emulated(built, model, x), model(x))
    (kernel,) = built.program.kernels
    assert not kernel.looks_up and "row_of" not in kernel.source and not built.program.looks_up


def test_a_number_that_is_none_reaches_what_eager_lets_it() -> None:
    function, weight, shape, _ = MODELS["levels"]
    model, x = Weighted(function, *weight).eval(), torch.randn(shape)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([0.0, torch.nan, 0.5, torch.inf, 1.0, 2.0, 0.25]))
        torch.testing.assert_close(emulated(as_on_a_gpu(model, x), model, x), model(x), equal_nan=True)


def test_positions_that_may_be_no_rows_are_looked_up() -> None:
    """Of a batch that is longer than the table: an index error in eager, and on a CPU."""
    function, weight, shape, _ = MODELS["as many as rows"]
    model, x = Weighted(function, *weight).eval(), torch.randn(shape)
    (kernel,) = as_on_a_gpu(model, x).program.kernels
    assert kernel.looks_up and "row_of(d, i0, d.v1)" in kernel.source
    built = pipeline.build(model, (x,), {}, mode="always", kernels="always", measure=False)
    derive, forward = built.program.functions()
    with torch.no_grad():
        torch.testing.assert_close(forward(model, x, *derive(model)), model(x))
        with pytest.raises(IndexError):
            forward(model, torch.randn(10, 5), *derive(model))


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_on_a_cpu_are_eagers(name: str) -> None:
    function, weight, shape, _ = MODELS[name]
    model, x = Weighted(function, *weight).eval(), torch.randn(shape, requires_grad=True)
    with torch.no_grad():
        model.weight.clamp_(-0.9, 0.9)
    built = pipeline.build(model, (x.detach(),), {}, mode="always", kernels="always", measure=False)
    derive, forward = built.program.functions()
    found = [y for call in (model, lambda x: forward(model, x, *derive(model))) for y in [call(x)]]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), (x, model.weight)) for y in found))


# What a model calls, and what its positions are.
CALLS: dict[str, tuple[Callable[[int], Tensor], tuple[int, int, int | None] | None]] = {
    "up to a size": (lambda n: torch.arange(n), (0, 1, None)),
    "from a number on": (lambda n: torch.arange(2, n + 2), (2, 1, None)),
    "in steps": (lambda n: torch.arange(1, 3 * n, 3), (1, 3, None)),
    "that repeat": (lambda n: torch.arange(n) % 3, (0, 1, 3)),
    "of 32 bits": (lambda n: torch.arange(n, dtype=torch.int32), (0, 1, None)),
    "downwards": (lambda n: torch.arange(n, 0, -1), None),
    "negative": (lambda n: torch.arange(-1, n), None),
    "of a negative divisor": (lambda n: torch.arange(n) % -3, None),
    "fractions": (lambda n: torch.arange(n, dtype=torch.float32), None),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_understood(name: str) -> None:
    call, wanted = CALLS[name]
    x = torch.randn(5, 3)
    model = Weighted(lambda x, w: x + w + call(x.shape[0])[: x.shape[0], None], 3).eval()
    graph = capture(model, (x,)).graph
    found = [n.op for n in graph.nodes() if isinstance(n.op, ops.Positions)]
    if wanted is None:
        assert not any(op.modulo for op in found) and (found == [] or name == "of a negative divisor")
    else:
        assert [(op.start, op.step, op.modulo) for op in found] == [wanted]
    built = pipeline.build(model, (x,), {}, measure=False)
    derive, forward = built.program.functions()
    torch.testing.assert_close(forward(model, x, *derive(model)), model(x))


def test_what_is_returned_is_a_tensor_of_its_own() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, torch.arange(x.shape[0])

    graph = capture(Model(), (torch.randn(4, 2),)).graph
    assert not any(isinstance(n.op, ops.Positions) for n in graph.nodes())


def test_rows_that_are_turned_are_not_read_by_columns() -> None:
    """Neighbours would be of different rows: what is looked up is written first, and read then."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 24)

        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return self.table(t).transpose(1, 2) * x

    model, given = Model().eval(), (torch.randint(11, (5, 9)), torch.randn(5, 24, 9))
    built = as_on_a_gpu(model, *given)
    assert not any(k.looks_up for k in built.program.kernels)
    torch.testing.assert_close(emulated(built, model, *given), model(*given))


def test_entries_at_indices_in_memory_are_read_where_they_lie() -> None:
    """A level for each sample, whose time is an input: its roots are computed where they are read."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.Buffer(torch.rand(11))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            a = self.levels[t].view(-1, 1, 1)
            return a.sqrt() * x + (1 - a).sqrt()

    model, given = Model().eval(), (torch.randn(5, 6, 9), torch.randint(11, (5,)))
    built = as_on_a_gpu(model, *given)
    assert [k.name for k in built.program.kernels] == ["fused_embedding_sqrt_mul_sub_sqrt_add"]
    torch.testing.assert_close(emulated(built, model, *given), model(*given))
    shared = torch.randint(11, (1,)).expand(5)
    torch.testing.assert_close(emulated(built, model, given[0], shared), model(given[0], shared))


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_made_of_a_known_number_of_positions_is_made_once(grad: bool) -> None:
    model = Weighted(lambda x, w: torch.where(torch.arange(6) <= torch.arange(6)[:, None], x * w, -1.0), 6, 1)
    found = fusewright.optimize(model.eval(), (torch.randn(4, 6, 6),), rewrite="always", measure=False)
    plan = fusewright.explain(found)
    assert plan.status == "rewritten" and "arange" not in plan.program.split("def forward")[1]
    with torch.set_grad_enabled(grad):
        for n in (4, 2, 5):
            x = torch.randn(n, 6, 6)
            torch.testing.assert_close(found(x), model(x))
            torch.testing.assert_close(copy.deepcopy(found)(x), model(x))
