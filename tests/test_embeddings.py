"""Models that look tokens up and reduce them: one pass, eager's values, gradients and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

import fusewright
from fusewright import pipeline
from fusewright.problem import load_problem

PROBLEM = Path(__file__).parents[1] / "benchmarks" / "problems" / "embedding_mean_head.py"
CUDA = torch.device("cuda", 0)


class Model(nn.Module):
    """A function of tokens and of two embeddings of 11 rows."""

    def __init__(self, function: Callable[..., Tensor], width: int = 24, **options: Any) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(11, width, **options), nn.Embedding(11, width)
        self.norm, self.function = nn.LayerNorm(width), function

    def forward(self, tokens: Tensor) -> Tensor:
        return self.function(self, tokens)


def masked_mean(m: Model, t: Tensor) -> Tensor:
    mask = (t != 0).unsqueeze(-1)
    return (m.table(t) * mask).sum(1) / mask.sum(1).clamp(min=1)


FUNCTIONS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "mean": lambda m, t: m.table(t).mean(1),
    "sum of functions": lambda m, t: m.table(t).tanh().sum(1),
    "max": lambda m, t: m.table(t).amax(1),
    "logsumexp": lambda m, t: m.table(t).logsumexp(1),
    "masked mean": masked_mean,
    "masked max": lambda m, t: m.table(t).masked_fill((t == 0).unsqueeze(-1), -torch.inf).amax(1),
    "two": lambda m, t: (m.table(t) + m.other(t)).mean(1),
    "of all": lambda m, t: m.table(t).mean((1, 2)),
    "not reduced": lambda m, t: m.table(t) * 5 + m.other(torch.arange(t.shape[1])),
    "normalized": lambda m, t: m.norm(m.table(t) * 5 + m.other(torch.arange(t.shape[1]))),
    "of unit length": lambda m, t: nn.functional.normalize(m.table(t) * 5 + m.other(torch.arange(t.shape[1])), dim=-1),
    "with positions": lambda m, t: (m.table(t) + m.other(torch.arange(t.shape[1]))).relu().mean(1),
}


def program_of(model: nn.Module, *args: Tensor) -> Callable[..., Tensor]:
    """The program with its kernels, gradients and all: the drop-in module would leave some calls to the original."""
    built = pipeline.build(model, args, {}, mode="always", kernels="always", measure=False)
    derive, forward = built.program.functions()
    assert any(kernel.looks_up for kernel in built.program.kernels)
    return lambda *given: forward(model, *given, *derive(model))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled
def test_values_and_gradients_are_eagers(name: str, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    model, tokens = Model(FUNCTIONS[name], padding_idx=0), torch.randint(11, (5, 9)).to(kind)
    tokens[:, 0] = 1
    results = []
    for call in (model, program_of(model, tokens)):
        value = call(tokens)
        weights = torch.linspace(1, 2, value.numel()).view_as(value)
        results.append((value, *torch.autograd.grad((value * weights).sum(), [*model.parameters()], allow_unused=True)))
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager)
    assert not results[1][1][0].any(), "the padding has no gradient"


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_gradients_as_the_embedding_wants_them(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model, tokens = Model(FUNCTIONS["sum of functions"], **options), torch.randint(3, (5, 9))
    calls = (model, program_of(model, tokens))
    eager, found = (torch.autograd.grad(call(tokens).sum(), model.table.weight)[0] for call in calls)
    assert found.layout is eager.layout
    torch.testing.assert_close(found.to_dense(), eager.to_dense())


def test_sparse_gradients_are_verified() -> None:
    model, tokens = Model(FUNCTIONS["sum of functions"], sparse=True), torch.randint(11, (5, 9))
    better = fusewright.optimize(model, (tokens,), kernels="always", measure=False)
    assert fusewright.explain(better).status != "unchanged"
    better(tokens).sum().backward()
    assert model.table.weight.grad is not None and model.table.weight.grad.layout is torch.sparse_coo


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, tokens = Model(FUNCTIONS["mean"]).to(dtype), torch.randint(11, (5, 9))
    torch.testing.assert_close(program_of(model, tokens)(tokens), model(tokens))


@pytest.mark.parametrize("shape", [(4, 1), (7, 9), (1, 9)])
def test_a_batch_of_another_size(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Model(FUNCTIONS["two"])
    better = fusewright.optimize(model, (torch.randint(11, (5, shape[1])),), kernels="always", measure=False)
    tokens = torch.randint(11, shape)
    with torch.no_grad():
        torch.testing.assert_close(better(tokens), model(tokens))
        torch.testing.assert_close(better(tokens.T.contiguous().T), model(tokens))


@pytest.mark.parametrize("shape", [(0, 9), (4, 0)])
def test_no_tokens(shape: tuple[int, int]) -> None:
    model = Model(FUNCTIONS["mean"])
    better = fusewright.optimize(model, (torch.randint(11, (5, 9)),), kernels="always", measure=False)
    tokens = torch.randint(11, shape)
    with torch.no_grad():
        torch.testing.assert_close(better(tokens), model(tokens), equal_nan=True)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("wrong", [-1, 11])
def test_an_index_of_no_row_is_an_index_error(wrong: int, grad: bool) -> None:
    model, tokens = Model(FUNCTIONS["mean"]), torch.randint(11, (5, 9))
    program = program_of(model, tokens)
    tokens[3, 3] = wrong
    with torch.set_grad_enabled(grad):
        for call in (model, program):
            with pytest.raises(IndexError, match=r"^index out of range in self$"):
                call(tokens)


def test_a_renormalised_embedding_is_left_alone() -> None:
    torch.manual_seed(0)
    model, tokens = Model(FUNCTIONS["mean"], max_norm=0.5), torch.randint(11, (5, 9))
    built = pipeline.build(model, (tokens,), {}, mode="always", kernels="always", measure=False)
    assert not any(kernel.looks_up for kernel in built.program.kernels)
    derive, forward = built.program.functions()
    torch.testing.assert_close(forward(model, tokens, *derive(model)), model(tokens))
    assert model.table.weight[tokens].norm(dim=-1).max() <= 0.5001


def test_the_benchmark_at_a_small_batch() -> None:
    torch.manual_seed(0)
    loaded = load_problem(PROBLEM)
    model, tokens = loaded.build().eval(), torch.randint(32000, (3, 256))
    better = fusewright.optimize(model, (tokens,), kernels="always", measure=False, verify=False)
    generated = [choice.name for choice in fusewright.explain(better).kernels if choice.path == "generated"]
    assert "fused_embedding_mean" in generated
    with torch.no_grad():
        torch.testing.assert_close(better(tokens), model(tokens))


def test_the_benchmark_on_a_large_gpu_by_estimate() -> None:
    """The kernel is chosen where nothing is measured, and a third of the traffic is left."""
    loaded = load_problem(PROBLEM)
    built = pipeline.build(
        loaded.build(), (torch.zeros(256, 256, dtype=torch.int64),), {}, kernels="auto", measure=False, target=CUDA
    )
    (kernel,) = (k for k in built.program.kernels if k.looks_up)
    assert kernel.name == "fused_embedding_mean" and kernel.dtypes == (torch.float32, torch.int64)
    assert built.after.bytes < 0.35 * built.before.bytes


@pytest.mark.parametrize("kernels", ["always", "auto"])
@pytest.mark.parametrize(
    ("name", "rows"), [("normalized", "fused_layernorm"), ("of unit length", "fused_norm_clamp_min_div")]
)
def test_rows_of_embeddings_on_a_cpu(name: str, rows: str, kernels: Literal["always", "auto"]) -> None:
    """A stream writes what the program of each sample reads."""
    torch.manual_seed(0)
    model, tokens = Model(FUNCTIONS[name]), torch.randint(11, (5, 9))
    better = fusewright.optimize(model, (tokens,), kernels=kernels, measure=False)
    generated = {c.name for c in fusewright.explain(better).kernels if c.path == "generated"}
    assert generated == {"fused_embedding_mul_add", rows}
    with torch.no_grad():
        torch.testing.assert_close(better(tokens), model(tokens))


def test_numbers_of_tokens() -> None:
    """Of a table that is one wide, neighbours lie at an index each: CPUs have no kernel for that."""
    torch.manual_seed(0)
    model, tokens = (
        Model(lambda m, t: m.table(t).squeeze(-1) * 2 + torch.arange(64.0), width=1),
        torch.randint(11, (5, 64)),
    )
    better = fusewright.optimize(model, (tokens,), kernels="always", measure=False)
    assert not any(c.path == "generated" for c in fusewright.explain(better).kernels)
    with torch.no_grad():
        torch.testing.assert_close(better(tokens), model(tokens))


class Entries(nn.Module):
    """A function of entries of a table, and of something else."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.table, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.function(self.table[t], x)


ENTRIES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "numbers": (lambda e, x: e * x[:, 0], (9,)),
    "numbers, seen": (lambda e, x: e[:, None] * x, (9,)),
    "rows": (lambda e, x: e * x, (9, 5)),
    "rows, seen": (lambda e, x: e[:, None] * x[:, :, None], (9, 5)),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_negative_indices_count_from_the_end(name: str) -> None:
    """However what they pick is seen."""
    torch.manual_seed(0)
    function, shape = ENTRIES[name]
    model, x, t = Entries(function, *shape).eval(), torch.randn(6, 5), torch.tensor([0, -1, 3, -9, 8, 2])
    with torch.no_grad():
        want = model(x, t)
        torch.testing.assert_close(emulated(as_on_a_gpu(model, x, t), model, x, t), want)
        fast = fusewright.optimize(model, (x, t), kernels="always", rewrite="always", measure=False)
        torch.testing.assert_close(fast(x, t), want)
