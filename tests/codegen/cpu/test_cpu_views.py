"""Streams on a CPU that read views where their tensors lie: compiled, run, and compared with float64."""

from __future__ import annotations

import pytest
import torch
from codegen.cuda.test_stream_kernels import BF16, F16, F64, inp, stream_of
from codegen.cuda.view_cases import CASES, gated
from native_cases import quick, run
from test_cpu_stream import check

from fusewright.codegen.cpu.stream import kernel
from fusewright.ir import ops


@pytest.mark.parametrize(
    "name", quick(CASES, "gated", "gated channels", "turned", "rows and columns", "padded pool", "sum over the slice")
)
def test_value(name: str) -> None:
    assert not any(isinstance(n.op, ops.Slice | ops.Permute) for n in stream_of(CASES[name]()).tensors)
    check(CASES[name]())


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    check(gated(inp(0, 3, 2, 42, dtype=dtype), 2))


def test_one_kernel_serves_other_batches() -> None:
    k = kernel(stream_of(CASES["gated channels"]()), "fused_test")
    for shape in ((1, 6, 1, 1), (70, 6, 4, 4), (2, 6, 30, 900)):
        x = torch.randn(shape)
        a, b = x.chunk(2, 1)
        torch.testing.assert_close(run(k, x), a * b.sigmoid())
