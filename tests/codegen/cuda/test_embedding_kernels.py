"""Streams that look up rows of embeddings: the generated CUDA C++ runs on the CPU."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
from codegen.cuda.embedding_cases import CASES, I32, I64, embedding
from codegen.cuda.test_stream_kernels import (
    BF16,
    F16,
    F64,
    check,
    fold,
    graph_of,
    inp,
    pointwise,
    pool,
    random,
    stream_of,
)
from emulation.emulate import EmulationError, emulate
from runtime.fake_driver import FakeDriver

from fusewright.codegen.cuda.stream import kernel
from fusewright.ir import ops
from fusewright.ir.build import reshape
from fusewright.ir.node import Graph, Node, make
from fusewright.runtime.launch import Launcher
from fusewright.runtime.nvrtc import CountError
from fusewright.schedule.stream import parse
from fusewright.schedule.stream_record import Stream


@pytest.mark.parametrize("name", CASES)
def test_value(name: str) -> None:
    k = check(CASES[name](), order=("forward", "reverse", "shuffled")[zlib.crc32(name.encode()) % 3])
    assert k.looks_up and "row_of(d, d.indices" in k.source


@pytest.mark.parametrize("kind", [I64, I32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
@pytest.mark.parametrize("width", [16, 6])
def test_dtypes(width: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    rows = embedding(0, width, 3, 9, dtype=dtype, kind=kind)
    check(fold(pointwise("relu", rows), "mean", 1), order="shuffled")


def test_rows_are_read_sixteen_bytes_at_a_time() -> None:
    source = check(fold(embedding(0, 32, 3, 9), "mean", 1)).source
    assert "load<VALUES<WIDE>>(d.weight0 + (row0 * d.n2 + i2))" in source
    assert "n2 % VALUES<true> == 0 && aligned(weight0) && aligned(out)" in source


def test_one_kernel_serves_other_sizes() -> None:
    """Of tokens, samples and weights; aligned or not."""
    k = kernel(stream_of(fold(embedding(0, 32, 3, 9), "mean", 1)), "fused_test")
    for rows, width, *tokens in ((11, 32, 1, 1), (9, 7, 5, 30), (300, 12, 2, 700)):
        weight, indices = torch.randn(rows, width), torch.randint(rows, tokens)
        torch.testing.assert_close(emulate(k, weight, indices), weight[indices].mean(1))


def number(*shape: int) -> Node:
    """Of each token one, from a table that is that wide."""
    return reshape(embedding(0, 1, *shape), shape)


NUMBERS: dict[str, Callable[[], Node]] = {
    "alone": lambda: pointwise("exp", number(3, 16)),
    "beside elements": lambda: pointwise("mul", number(3, 16), inp(2, 3, 16)),
    "beside positions": lambda: pointwise("add", number(3, 13), inp(2, 13)),
    "of rows": lambda: fold(pointwise("mul", number(3, 64), inp(2, 3, 64)), "sum", 1),
    "of columns": lambda: fold(pointwise("add", number(9, 16), inp(2, 16)), "max", 0),
    "in a window": lambda: fold(pool(pointwise("mul", number(3, 4, 16), inp(2, 16)), "max", (3,), 2, 1), "sum", 1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_neighbours_of_one_number_each(name: str) -> None:
    """Every one is read at an index of its own, though all lie in one column."""
    check(NUMBERS[name](), order="shuffled")


@pytest.mark.parametrize("wrong", [-1, 11, 2**31, -(2**63)])
@pytest.mark.parametrize("name", ["mean", "width", "scaled, with positions", "many tokens"])
def test_an_index_of_no_row_is_a_trap(name: str, wrong: int) -> None:
    s = stream_of(CASES[name]())
    given = {n: random(n, i) for i, n in enumerate(s.tensors)}
    (indices,) = (t for t in given.values() if t.dtype == I64)
    indices.view(-1)[4] = wrong
    with pytest.raises(EmulationError, match="__trap"):
        emulate(kernel(s, "fused_test"), *given.values())


@pytest.mark.parametrize("kind", [I64, I32], ids=str)
@pytest.mark.parametrize("name", ["mean", "width", "one element", "several"])
def test_indices_count_from_the_end(name: str, kind: torch.dtype) -> None:
    rows = make(ops.Embedding(wraps=True), inp(0, 11, 1 if name == "one element" else 12), inp(1, 3, 9, dtype=kind))
    root = (
        pointwise("exp", rows) if name in ("one element", "several") else fold(rows, "mean", 1 if name == "mean" else 2)
    )
    k = kernel(stream_of(root), "fused_test")
    weight, indices = torch.randn(*rows.arg(0).shape), torch.randint(-11, 11, (3, 9)).to(kind)  # type: ignore[arg-type]
    indices.view(-1)[:2] = torch.tensor([-11, 10])
    want = {"mean": lambda x: x.mean(1), "width": lambda x: x.mean(2)}.get(name, torch.exp)(weight[indices])
    torch.testing.assert_close(emulate(k, weight, indices, sanitize=name == "mean"), want)
    for wrong in (-12, 11):
        indices[1, 4] = wrong
        with pytest.raises(EmulationError, match="__trap"):
            emulate(k, weight, indices)


def test_an_index_of_no_row_reads_nothing_outside() -> None:
    """The sanitizer has nothing to say before the trap."""
    k = kernel(stream_of(fold(embedding(0, 12, 3, 9), "mean", 1)), "fused_test")
    weight, indices = torch.randn(11, 12), torch.randint(11, (3, 9))
    indices[1, 4] = 11
    with pytest.raises(EmulationError, match="__trap") as error:
        emulate(k, weight, indices, sanitize=True)
    assert "AddressSanitizer" not in str(error.value)


@pytest.mark.parametrize("name", ["two weights", "no vector", "pool along the width"])
def test_nothing_is_read_or_written_outside(name: str) -> None:
    s = stream_of(CASES[name]())
    emulate(kernel(s, "fused_test"), *(random(n, i) for i, n in enumerate(s.tensors)), order="reverse", sanitize=True)


def test_an_embedding_that_others_use_is_read_from_memory() -> None:
    rows = embedding(0, 12, 3, 9)
    root = fold(pointwise("relu", rows), "sum", 1)
    found = parse(root, Graph((), (root, rows)).users())
    assert isinstance(found, Stream) and found.tensors == (rows,)
    alone = parse(root, graph_of(root).users())
    assert isinstance(alone, Stream) and alone.tensors == rows.inputs


def test_an_embedding_of_constants_is_derived_ahead() -> None:
    weight = inp(0, 20, 12)
    place = make(ops.Embedding(), weight, make(ops.Buffer((9,), I64, weight.device, "positions")))
    root = fold(pointwise("add", embedding(1, 12, 3, 9), place), "mean", 1)
    assert place in stream_of(root).tensors


def test_an_embedding_behind_a_reduction_is_read_from_memory() -> None:
    label = embedding(2, 12, 3)
    s = stream_of(pointwise("add", fold(embedding(0, 12, 3, 9), "mean", 1), label))
    assert label in s.tensors and len(s.weights) == 1


def test_large_weights_count_in_64_bits() -> None:
    few, many = (kernel(stream_of(fold(embedding(0, 512, 3, 9, rows=n), "mean", 1)), "fused_test") for n in (11, 2**22))
    assert "using index_t = int;" in few.source and "using index_t = long long;" in many.source
    weight = torch.zeros(()).expand(2**22, 512)
    with pytest.raises(CountError, match=r"counts 2 \* v0 \* s2 in 32 bits"):
        Launcher(few, FakeDriver())(weight, torch.zeros(3, 9, dtype=I64))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles(arch: str) -> None:
    core = pytest.importorskip("cuda.core", reason="no NVRTC")
    for name in ("mean", "mask", "two weights of other tokens", "scaled, with positions", "many tokens"):
        k = kernel(stream_of(CASES[name]()), "fused_test")
        core.Program(k.source, "c++", core.ProgramOptions(arch=arch, std="c++17")).compile("cubin")
