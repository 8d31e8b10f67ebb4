"""Norms, softmaxes and kept rows of embeddings: one kernel reads rows where they lie in tables, and runs on the CPU."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from codegen.cuda.closeness import compare
from codegen.cuda.embedding_cases import I32, I64, embedding
from codegen.cuda.kept_rows_cases import normalized, similar, standardized
from codegen.cuda.test_kept_rows import check as check_kept_rows
from codegen.cuda.test_normalization_kernels import found, layer, norm, softmax
from codegen.cuda.test_stream_kernels import BF16, F16, F64, fold, inp, pointwise, random, reference
from emulation.emulate import ORDERS, EmulationError, emulate
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

from fusewright.codegen.cuda.normalization import kernel, options
from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.runtime import nvrtc

F32 = torch.float32


def added(*rows: Node) -> Node:
    first, *others = rows
    for other in others:
        first = pointwise("add", first, other)
    return first


def positioned(width: int, dtype: torch.dtype = F32, kind: torch.dtype = I64) -> Node:
    """Tokens, scaled, and their positions: these are one sample's."""
    x = pointwise("mul", embedding(0, width, 3, 9, dtype=dtype, kind=kind), 8.0)
    return pointwise("add", x, inp(2, 9, width, dtype=dtype))


def same_table() -> Node:
    weight = inp(0, 11, 12)
    return added(*(make(ops.Embedding(), weight, inp(i, 3, 9, dtype=I64)) for i in (1, 2)))


def other_users() -> Node:
    x = embedding(0, 12, 3, 9)
    return pointwise("add", layer(x), x)


def of_entries(x: Node) -> Node:
    """Scaled and shifted by what the tokens of another input say."""
    y = pointwise("mul", layer(x), embedding(4, 12, 3, 9, rows=9))
    return pointwise("add", y, embedding(6, 12, 9, rows=8, kind=I32))


CASES: dict[str, Callable[[], Node]] = {
    "layer": lambda: layer(embedding(0, 64, 3, 9)),
    "layer, no vector": lambda: layer(embedding(0, 37, 3, 9)),
    "layer, pairs": lambda: layer(embedding(0, 30, 3, 9)),
    "layer, long": lambda: layer(embedding(0, 4500, 2, 3)),
    "layer, plain": lambda: norm(embedding(0, 12, 3, 9), "layer", trailing=1),
    "layer of two": lambda: layer(positioned(12), 2),
    "layer of one index each": lambda: layer(embedding(0, 48, 7)),
    "rms": lambda: layer(embedding(0, 48, 3, 9), kind="rms"),
    "rms, no vector": lambda: layer(positioned(29), kind="rms"),
    "softmax": lambda: softmax(embedding(0, 64, 3, 9)),
    "softmax, no vector": lambda: softmax(embedding(0, 37, 3, 9)),
    "softmax of tokens": lambda: softmax(embedding(0, 16, 3, 9), 1),
    "log softmax": lambda: softmax(positioned(30), log=True),
    "positions": lambda: layer(positioned(32)),
    "two tables": lambda: layer(added(positioned(24), embedding(3, 24, 3, 9, rows=8, kind=I32))),
    "tables of all and of one sample": lambda: layer(added(embedding(0, 24, 3, 9), embedding(2, 24, 9, rows=8))),
    "same table twice": lambda: layer(same_table()),
    "and a tensor": lambda: layer(added(inp(2, 3, 9, 16), embedding(0, 16, 3, 9))),
    "again behind it": other_users,
    "entries behind it": lambda: of_entries(inp(0, 3, 9, 12)),
    "entries on both sides": lambda: of_entries(embedding(0, 12, 3, 9)),
    "a mean behind it": lambda: fold(layer(positioned(24)), "mean", 1),
    "samples": lambda: norm(embedding(0, 12, 40), "batch", training=True),
    "indices from the end": lambda: layer(make(ops.Embedding(wraps=True), inp(0, 11, 32), inp(1, 3, 9, dtype=I64))),
}


def check(root: Node, order: str = "forward", ulps: float = 8, *, sanitize: bool = False) -> None:
    """Every way to compute it reads tables, and nothing has the embedding's shape but the result."""
    n = found(root)
    assert n.looks_up
    given = {t: random(t, i) for i, t in enumerate(n.tensors)}
    want = reference(root, given)
    for option in options(n):
        k = kernel(n, "fused_test", **option)
        assert k.looks_up and " = row_of(d, " in k.source
        assert all(array.shape != k.output.shape for array in k.scratch)
        compare(emulate(k, *(given[t] for t in n.tensors), order=order, sanitize=sanitize), want, root.dtype, ulps)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_value(name: str) -> None:
    check(CASES[name](), ORDERS[zlib.crc32(name.encode()) % len(ORDERS)])


@pytest.mark.parametrize("kind", [I64, I32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("width", [32, 30, 7])
@pytest.mark.sampled
def test_dtypes(width: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    for root in (layer(positioned(width, dtype, kind)), softmax(embedding(0, width, 3, 9, dtype=dtype, kind=kind))):
        check(root, "shuffled", 16 if dtype == F64 else 4)


@pytest.mark.parametrize("name", ["layer, no vector", "two tables", "softmax of tokens"])
def test_nothing_is_read_outside(name: str) -> None:
    check(CASES[name](), sanitize=True)


def test_rows_are_read_sixteen_bytes_at_a_time() -> None:
    n = found(CASES["layer"]())
    source = kernel(n, "fused_test", **options(n)[0]).source
    assert "load<VALUES<WIDE>>(d.weight" in source and source.count(" = row_of(") == 1
    assert source.count("[i0]") == 1, "an index is read for a row, not for its elements"


def test_one_kernel_serves_other_sizes() -> None:
    """Of tokens, samples and tables."""
    n = found(norm(embedding(0, 32, 3, 9), "layer", trailing=1))
    assert [t.dtype for t in n.tensors] in ([F32, I64], [I64, F32])
    for option in options(n):
        k = kernel(n, "fused_test", **option)
        for rows, *tokens in ((11, 1, 1), (9, 5, 30), (300, 2, 70)):
            weight, indices = torch.randn(rows, 32), torch.randint(rows, tokens)
            given = [weight if t.dtype == F32 else indices for t in n.tensors]
            torch.testing.assert_close(emulate(k, *given), F.layer_norm(weight[indices], (32,)))


@pytest.mark.parametrize("wrong", [-1, 11, 2**31, -(2**63)])
@pytest.mark.parametrize("name", ["layer", "softmax of tokens", "positions"])
def test_an_index_of_no_row_is_a_trap(name: str, wrong: int) -> None:
    """Whatever is computed, nothing is read outside of the table."""
    n = found(CASES[name]())
    given = {t: random(t, i) for i, t in enumerate(n.tensors)}
    (indices,) = (t for t in given.values() if t.dtype == I64)
    indices.view(-1)[4] = wrong
    for option in options(n):
        with pytest.raises(EmulationError, match="__trap") as error:
            emulate(kernel(n, "fused_test", **option), *given.values(), sanitize=True)
        assert "AddressSanitizer" not in str(error.value)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["positions", "two tables", "softmax of tokens"])
def test_kept_rows_compile_without_spills(name: str, arch: str) -> None:
    n = found(CASES[name]())
    for option in filter(None, options(n)):
        taken = nvrtc.resources(nvrtc.compile(kernel(n, "fused_test", **option).source, arch)).values()
        assert all(r.stack == 0 for r in taken), option


KEPT: dict[str, Callable[[], Node]] = {
    "normalized": lambda: normalized(embedding(0, 64, 3, 9), -1),
    "normalized, no vector": lambda: normalized(positioned(37), -1),
    "normalized along tokens": lambda: normalized(embedding(0, 12, 3, 24), 1),
    "standardized": lambda: standardized(positioned(64, kind=I32), -1),
    "standardized, of half precision": lambda: standardized(positioned(64, BF16), -1),
    "two tables": lambda: standardized(added(embedding(0, 40, 3, 9), embedding(2, 40, 9, rows=8)), -1),
    "two sides": lambda: similar(embedding(0, 40, 3, 9), embedding(2, 40, 3, 9, rows=8)),
    "an entry of each row": lambda: pointwise("mul", normalized(inp(2, 3, 9, 40), -1), embedding(0, 40, 3, 9)),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_rows(name: str) -> None:
    for k in check_kept_rows(KEPT[name](), order="shuffled"):
        assert k.looks_up and " = row_of(d, " in k.source


# ---- models


class Model(nn.Module):
    """A function of tokens and of three tables, two of which have 11 rows."""

    def __init__(self, function: Callable[..., object], width: int, **options: torch.dtype) -> None:
        super().__init__()
        self.table, self.kinds = nn.Embedding(11, width, padding_idx=0, **options), nn.Embedding(2, width, **options)
        self.places, self.norm = nn.Embedding(11, width, **options), nn.LayerNorm(width, **options)
        self.function = function

    def forward(self, tokens: Tensor) -> object:
        return self.function(self, tokens)


def embedded(m: Model, t: Tensor) -> Tensor:
    return m.table(t) * 8 + m.places(torch.arange(t.shape[1])) + m.kinds(t % 2)


ONE: dict[str, tuple[Callable[..., object], str]] = {
    "layer norm": (lambda m, t: m.norm(embedded(m, t)), "normalization"),
    "rms norm of entries": (lambda m, t: F.rms_norm(m.table(t), (m.table.embedding_dim,)), "normalization"),
    "softmax of entries": (lambda m, t: m.table(t).softmax(-1), "normalization"),
    "of tokens first": (lambda m, t: m.norm(m.table(t.T) + m.kinds(t.T % 2)), "normalization"),
    "read again by a residual": (lambda m, t: (x := embedded(m, t)) + m.norm(x), "normalization"),
    "written beside it": (lambda m, t: ((x := embedded(m, t)), m.norm(x)), "normalization"),
    "indexed": (lambda m, t: m.norm(m.table.weight[t]), "normalization"),
    "unit vectors": (lambda m, t: F.normalize(m.table(t), dim=-1), "kept rows"),
    "standardized": (
        lambda m, t: ((x := embedded(m, t)) - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1),
        "kept rows",
    ),
}


@pytest.mark.parametrize("width", [48, 33])
@pytest.mark.parametrize("name", ONE)
@pytest.mark.sampled
def test_one_kernel(name: str, width: int) -> None:
    torch.manual_seed(0)
    function, family = ONE[name]
    model, tokens = Model(function, width).eval(), torch.randint(11, (5, 9))
    built = as_on_a_gpu(model, tokens)
    generated = [c.family for c in built.choices if c.path == "generated" and c.name != "fused_remainder"]
    assert generated == [family], built.choices
    for given in (tokens, tokens[:2], torch.randint(11, (1, 9))):
        torch.testing.assert_close(emulated(built, model, given), model(given))


@pytest.mark.parametrize("name", ["layer norm", "written beside it", "standardized"])
def test_gradients(name: str) -> None:
    """A kernel's backward pass is that of the operations it is made of."""
    torch.manual_seed(0)
    model, tokens = Model(ONE[name][0], 16).eval(), torch.randint(11, (5, 9))
    built = as_on_a_gpu(model, tokens)
    derive, forward = built.program.functions()

    def gradients(results: object) -> list[Tensor]:
        several = results if isinstance(results, tuple) else (results,)
        total = sum((r * torch.linspace(1, 2, r.numel()).view_as(r)).sum() for r in several)
        return [g for g in torch.autograd.grad(total, [*model.parameters()], allow_unused=True) if g is not None]

    for got, want in zip(gradients(forward(model, tokens, *derive(model))), gradients(model(tokens)), strict=True):
        torch.testing.assert_close(got, want)


def test_embeddings_that_others_read_are_written_once() -> None:
    model, tokens = Model(lambda m, t: ((x := m.table(t)), m.norm(x)), 32).eval(), torch.randint(11, (5, 9))
    (k,) = as_on_a_gpu(model, tokens).program.kernels
    assert not k.looks_up and k.name == "fused_layernorm"


class Beside(nn.Module):
    """A function of tokens and of images, whose channels are as many as a table is wide."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table, self.norm, self.function = nn.Embedding(11, 32), nn.LayerNorm(32), function

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        return self.function(self, tokens, x)


MOVED: dict[str, Callable[..., Tensor]] = {
    "ahead": lambda m, t, x: m.norm(x.permute(0, 2, 1) + m.table(t)),
    "behind": lambda m, t, x: m.norm(x.permute(0, 2, 1)) * m.table(t),
    "of samples": lambda m, t, x: m.norm(x.permute(0, 2, 1)) * m.table(t[:, 0]).unsqueeze(1),
    "rolled": lambda m, t, x: m.norm(x.transpose(1, 2).contiguous().roll(1, 1) + m.table(t)),
}


@pytest.mark.parametrize("name", MOVED)
def test_entries_beside_what_is_moved(name: str) -> None:
    torch.manual_seed(0)
    model, tokens, x = Beside(MOVED[name]).eval(), torch.randint(11, (5, 9)), torch.randn(5, 32, 9)
    built = as_on_a_gpu(model, tokens, x)
    (k,) = (k for k in built.program.kernels if "layernorm" in k.name)
    assert k.looks_up
    for size in (5, 2):
        given = tokens[:size], x[:size]
        torch.testing.assert_close(emulated(built, model, *given), model(*given))


def test_statistics_of_a_batch() -> None:
    """Both kernels, of statistics and of what they normalise, read the table."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(32)
    model, tokens = Model(lambda m, t: norm(m.table(t) * 2), 32), torch.randint(11, (300,))
    want = model(tokens)
    built = as_on_a_gpu(model, tokens)
    assert [k.looks_up for k in built.program.kernels] == [True, True]
    torch.testing.assert_close(emulated(built, model, tokens), want)
