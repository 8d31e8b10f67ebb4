"""Streams on a CPU that look up rows of embeddings: compiled, run, and compared with the same graph in float64."""

from __future__ import annotations

import pytest
import torch
from codegen.cuda import test_stream_kernels as cases
from codegen.cuda.embedding_cases import CASES, I32, I64, embedding
from codegen.cuda.test_stream_kernels import BF16, F16, F64, fold, pointwise
from native_cases import quick, run
from test_cpu_stream import check

from fusewright.codegen.cpu.stream import fits, kernel
from fusewright.ir import ops
from fusewright.ir.build import reshape
from fusewright.ir.node import make
from fusewright.runtime.native import launcher


@pytest.mark.parametrize("name", quick(CASES, "mean", "mask", "two weights", "tokens and width", "many tokens"))
def test_value(name: str) -> None:
    k = check(CASES[name]())
    assert k.looks_up and "row_of(d, d.indices" in k.source


@pytest.mark.parametrize(("dtype", "kind"), [(BF16, I64), (F16, I32), (F64, I64)], ids=str)
def test_dtypes(dtype: torch.dtype, kind: torch.dtype) -> None:
    check(fold(pointwise("relu", embedding(0, 21, 3, 9, dtype=dtype, kind=kind)), "mean", 1))


def test_neighbours_of_one_number_each_are_left_to_others() -> None:
    """Each would be read at an index of its own."""
    rows = embedding(0, 1, 3, 9)
    assert fits(cases.stream_of(pointwise("exp", rows)))
    assert not fits(cases.stream_of(pointwise("exp", reshape(rows, (3, 9)))))


def test_one_kernel_serves_other_sizes() -> None:
    k = kernel(cases.stream_of(fold(embedding(0, 32, 3, 9), "mean", 1)), "fused_test")
    for rows, width, *tokens in ((11, 32, 1, 1), (9, 7, 5, 30), (300, 1500, 2, 70)):
        weight, indices = torch.randn(rows, width), torch.randint(rows, tokens)
        torch.testing.assert_close(run(k, weight, indices), weight[indices].mean(1))


def test_indices_count_from_the_end() -> None:
    rows = make(ops.Embedding(wraps=True), cases.inp(0, 11, 12), cases.inp(1, 3, 9, dtype=I64))
    k = kernel(cases.stream_of(fold(rows, "mean", 1)), "fused_test")
    weight, indices = torch.randn(11, 12), torch.randint(-11, 11, (3, 9))
    indices.view(-1)[:2] = torch.tensor([-11, 10])
    torch.testing.assert_close(run(k, weight, indices), weight[indices].mean(1))
    for wrong in (-12, 11):
        indices[1, 4] = wrong
        with pytest.raises(IndexError):
            run(k, weight, indices)


def test_strided_operands() -> None:
    """They are copied, as those of every kernel."""
    k = kernel(cases.stream_of(fold(embedding(0, 32, 3, 9), "mean", 1)), "fused_test")
    weight, indices = torch.randn(32, 11).T, torch.randint(11, (9, 3, 2))[..., 1].T
    assert not weight.is_contiguous() and not indices.is_contiguous()
    torch.testing.assert_close(run(k, weight, indices), weight[indices].mean(1))


@pytest.mark.parametrize("wrong", [-1, 11, 2**31, -(2**63)])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_index_of_no_row_is_an_index_error(wrong: int, threads: int) -> None:
    """In eager's words; the next call is as good as new."""
    call = launcher(kernel(cases.stream_of(fold(embedding(0, 32, 3, 9), "mean", 1)), "fused_test"))
    weight, indices = torch.randn(11, 32), torch.randint(11, (300, 9))
    broken = indices.clone()
    broken[150, 4] = wrong
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for _ in range(2):
            with pytest.raises(IndexError, match=r"^index out of range in self$"):
                call(weight, broken)
            torch.testing.assert_close(call(weight, indices), weight[indices].mean(1))
    finally:
        torch.set_num_threads(before)
    with pytest.raises(IndexError, match=r"^index out of range in self$"):
        torch.nn.functional.embedding(broken, weight)
