"""Streams on a CPU that read what is concatenated part by part: compiled, run, and compared with float64."""

from __future__ import annotations

import pytest
import torch
from codegen.cuda.concatenation_cases import CASES, channels
from codegen.cuda.test_stream_kernels import BF16, F16, F64, pointwise, stream_of
from native_cases import quick, run
from test_cpu_stream import check

from fusewright.codegen.cpu.stream import kernel
from fusewright.ir import ops


@pytest.mark.parametrize("name", quick(CASES, "many parts", "numbers per channel", "pool", "two of them", "then max"))
def test_value(name: str) -> None:
    assert not any(isinstance(n.op, ops.Cat) for n in stream_of(CASES[name]()).tensors)
    check(CASES[name]())


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    check(pointwise("relu", channels(3, 5, shape=(2, 21), dtype=dtype)))


def test_one_kernel_serves_other_sizes() -> None:
    k = kernel(stream_of(pointwise("relu", channels(3, 5))), "fused_test")
    for samples, *shape in ((1, 1, 1), (70, 4, 4), (2, 30, 900)):
        parts = [torch.randn(samples, n, *shape) for n in (3, 5)]
        torch.testing.assert_close(run(k, *parts), torch.cat(parts, 1).relu(), rtol=0, atol=0)
