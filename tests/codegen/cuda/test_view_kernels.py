"""Streams that read views where their tensors lie: the generated CUDA C++ runs on the CPU."""

from __future__ import annotations

import zlib

import pytest
import torch
from codegen.cuda.test_stream_kernels import BF16, F16, F64, check, inp, pointwise, random, stream_of
from codegen.cuda.view_cases import CASES, gated, halves, part
from emulation.emulate import emulate
from runtime.fake_driver import FakeDriver

from fusewright.codegen.cuda.stream import kernel
from fusewright.ir import ops
from fusewright.ir.build import permute, reshape
from fusewright.ir.node import Node
from fusewright.runtime.launch import Launcher
from fusewright.runtime.nvrtc import KernelError


def reads_views(root: Node) -> bool:
    """Whether no view is in memory as a tensor of its own."""
    return not any(isinstance(n.op, ops.Slice | ops.Permute) for n in stream_of(root).tensors)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_value(name: str) -> None:
    assert reads_views(CASES[name]())
    check(CASES[name](), order=("forward", "reverse", "shuffled")[zlib.crc32(name.encode()) % 3])


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
@pytest.mark.parametrize("width", [32, 10])
def test_dtypes(width: int, dtype: torch.dtype) -> None:
    check(gated(inp(0, 3, 2, width, dtype=dtype), 2), order="shuffled")


def test_views_are_read_sixteen_bytes_at_a_time() -> None:
    source = check(CASES["gated"]()).source
    assert "load<VALUES<WIDE>>(d.x + (i0 * 32 + (i1 + 16)))" in source
    assert "n1 % VALUES<true> == 0 && 32 % VALUES<true> == 0 && 16 % VALUES<true> == 0" in source


def test_one_kernel_serves_other_batches() -> None:
    k = kernel(stream_of(CASES["gated channels"]()), "fused_test")
    for shape in ((1, 6, 1, 1), (7, 6, 4, 4), (2, 6, 30, 9)):
        x = torch.randn(shape)
        a, b = x.chunk(2, 1)
        torch.testing.assert_close(emulate(k, x), a * b.sigmoid())


def test_another_length_is_refused() -> None:
    k = kernel(stream_of(CASES["gated"]()), "fused_test")
    with pytest.raises(KernelError, match=r"of shape \(5, 32\)"):
        Launcher(k, FakeDriver())(torch.randn(5, 34))


@pytest.mark.parametrize("name", ["gated, no vector", "padded pool", "columns, the first left out", "long rows"])
def test_nothing_is_read_or_written_outside(name: str) -> None:
    s = stream_of(CASES[name]())
    emulate(kernel(s, "fused_test"), *(random(n, i) for i, n in enumerate(s.tensors)), order="reverse", sanitize=True)


# What is read from memory as it is.


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(part(inp(0, 8, 6), 0, 2, 8), id="rows of their own"),
        pytest.param(part(inp(0, 1, 8, 6), 1, 2, 8), id="rows of the only sample"),
        pytest.param(part(inp(0, 5, 12), 1, 0, 12, 2), id="steps"),
        pytest.param(part(permute(inp(0, 12, 5), (1, 0)), 1, 0, 6), id="of what is turned"),
    ],
)
def test_read_as_they_are(x: Node) -> None:
    assert not reads_views(pointwise("relu", x))


def test_one_index_that_is_broadcast() -> None:
    column, x = part(inp(0, 5, 12), 1, 3, 4), inp(1, 5, 8)
    assert reads_views(pointwise("add", x, column))
    check(pointwise("add", x, column))


@pytest.mark.parametrize("shape", [(5, 16, 4), (4, 1, 5), (5, 6)])
def test_one_index_of_the_last_dimension(shape: tuple[int, ...]) -> None:
    """Its elements are no neighbours, though the value's last dimension is the tensor's last but one."""
    given = inp(0, *shape)
    x, t = reshape(part(given, -1, 3, 4), shape[:-1]), random(given, 0)
    s = stream_of(pointwise("relu", x))
    (operand,) = s.tensors
    value = t[..., 3] if operand is x else t[..., 3:4] if operand is x.arg(0) else t
    torch.testing.assert_close(emulate(kernel(s, "fused_test"), value.contiguous()), t[..., 3].relu(), rtol=0, atol=0)


def test_a_slice_that_others_use_as_well() -> None:
    """A view costs nothing: it may be read in both ways."""
    a, b = halves(inp(0, 5, 16), 1)
    check(pointwise("mul", pointwise("add", a, b), pointwise("tanh", a)))


def test_rows_of_odd_length_that_are_turned() -> None:
    """Vectors of memory would be of other rows than the result's."""
    assert "straddled" not in check(CASES["heads, no vector"]()).source
