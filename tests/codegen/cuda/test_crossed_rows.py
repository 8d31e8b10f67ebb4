"""Streams none of whose operands have both of the last axes: a thread computes neighbours of several rows.

Kernels are written for large sizes, and run at small ones.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from codegen.cuda.test_stream_kernels import BF16, F32, F64, inp, random, reference, stream_of
from emulation.emulate import emulate

from fusewright.codegen.cuda.stream import kernel
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make

SIZES = [(2, 4), (3, 8), (8, 5), (9, 16), (17, 12), (0, 4), (21, 7)]


def outer(rows: int, columns: int, dtype: torch.dtype = F32) -> Node:
    return pointwise("maximum", inp(0, rows, 1, dtype=dtype), inp(1, columns, dtype=dtype))


def batched(rows: int, columns: int) -> Node:
    pairs = pointwise("sub", inp(0, 2, rows, 1), inp(1, 2, 1, columns))
    return pointwise("mul", pairs, inp(2, 2, 1, 1))


def features(rows: int, columns: int) -> Node:
    """Overlaps along one side: a record of four has what is read of a column."""
    a, b = inp(0, rows, 1, 4), inp(1, 1, columns, 4)
    low, high = ([make(ops.Reshape(n.shape[:-1]), make(ops.Slice(2, k, k + 1), n)) for k in (0, 2)] for n in (a, b))
    return pointwise("sub", pointwise("minimum", low[1], high[1]), pointwise("maximum", low[0], high[0]))


@pytest.mark.parametrize("build, rows", [(outer, 4), (batched, 4), (features, 8)])
def test_rows_share_columns(build: Callable[[int, int], Node], rows: int) -> None:
    k = kernel(stream_of(build(4096, 8192)), "fused_test")
    assert f"ROWS = {rows};" in k.source
    for size in SIZES:
        root = build(*size)
        s = stream_of(root)
        given = {n: random(n, i) for i, n in enumerate(s.tensors)}
        got = emulate(k, *(given[n] for n in s.tensors), order="shuffled")
        torch.testing.assert_close(got.double(), reference(root, given), rtol=1e-6, atol=1e-6)
        for n in given:  # and at addresses that 16 bytes do not fit
            given[n] = torch.cat([given[n].flatten()[:1], given[n].flatten()])[1:].view(n.shape)
        got = emulate(k, *(given[n] for n in s.tensors), order="reverse")
        torch.testing.assert_close(got.double(), reference(root, given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    k = kernel(stream_of(outer(4096, 8192, dtype)), "fused_test")
    assert "ROWS = " in k.source
    root = outer(11, 16, dtype)
    s = stream_of(root)
    given = {n: random(n, i) for i, n in enumerate(s.tensors)}
    tolerance = 1e-2 if dtype == BF16 else 1e-12
    got = emulate(k, *(given[n] for n in s.tensors))
    torch.testing.assert_close(got.double(), reference(root, given), rtol=tolerance, atol=tolerance)


def test_what_is_read_once_is_not_crossed() -> None:
    whole = pointwise("add", inp(0, 4096, 8192), inp(1, 8192))
    few = outer(3, 64)
    for root in (whole, few):
        assert "ROWS" not in kernel(stream_of(root), "fused_test").source


def test_nothing_is_read_or_written_outside() -> None:
    k = kernel(stream_of(batched(4096, 8192)), "fused_test")
    s = stream_of(batched(9, 12))
    emulate(k, *(random(n, i) for i, n in enumerate(s.tensors)), order="reverse", sanitize=True)
