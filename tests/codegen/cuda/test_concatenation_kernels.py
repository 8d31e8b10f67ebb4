"""Streams that read what is concatenated part by part: the generated CUDA C++ runs on the CPU."""

from __future__ import annotations

import zlib

import pytest
import torch
from codegen.cuda.concatenation_cases import CASES, cat, channels
from codegen.cuda.test_stream_kernels import BF16, F16, F64, check, fold, inp, pointwise, pool, random, stream_of
from emulation.emulate import emulate
from runtime.fake_driver import FakeDriver

from fusewright.codegen.cuda.stream import kernel
from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make
from fusewright.runtime.launch import Launcher
from fusewright.runtime.nvrtc import KernelError
from fusewright.schedule.stream import parse
from fusewright.schedule.stream_axes import MOST_PARTS
from fusewright.schedule.stream_record import Stream


@pytest.mark.parametrize("name", CASES)
def test_value(name: str) -> None:
    s = stream_of(CASES[name]())
    assert not any(isinstance(n.op, ops.Cat) for n in s.tensors)
    check(CASES[name](), order=("forward", "reverse", "shuffled")[zlib.crc32(name.encode()) % 3])


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
@pytest.mark.parametrize("width", [16, 5])
def test_dtypes(width: int, dtype: torch.dtype) -> None:
    check(pointwise("relu", channels(3, 5, shape=(2, width), dtype=dtype)), order="shuffled")


def test_parts_are_read_sixteen_bytes_at_a_time() -> None:
    source = check(pointwise("relu", channels(3, 5, 8))).source
    assert "load<VALUES<WIDE>>(part0 + ((i0 * length0 + (i1 - begin0)) * d.n2 + i2))" in source
    assert "n2 % VALUES<true> == 0 && aligned(x) && aligned(p1) && aligned(p2) && aligned(out)" in source


def test_one_kernel_serves_other_sizes() -> None:
    """Of batches and images, aligned or not."""
    k = kernel(stream_of(pointwise("relu", channels(3, 5))), "fused_test")
    for samples, *shape in ((1, 1, 1), (7, 4, 4), (2, 30, 9)):
        parts = [torch.randn(samples, n, *shape) for n in (3, 5)]
        torch.testing.assert_close(emulate(k, *parts), torch.cat(parts, 1).relu(), rtol=0, atol=0)


def test_other_numbers_of_channels_are_refused() -> None:
    k = kernel(stream_of(pointwise("relu", channels(3, 5))), "fused_test")
    launch = Launcher(k, FakeDriver())
    with pytest.raises(KernelError, match=r"of shape \(2, 5, 4, 4\)"):
        launch(torch.randn(2, 3, 4, 4), torch.randn(2, 6, 4, 4))


@pytest.mark.parametrize("order", [1, -1])
def test_a_tensor_longer_than_the_parts_is_refused(order: int) -> None:
    operands = [channels(3, 5), inp(2, 3, 8, 4, 8)][::order]
    s = stream_of(pointwise("add", *operands))
    shapes = {3: (2, 3, 4, 4), 5: (2, 5, 4, 4), 8: (2, 9, 4, 4)}
    with pytest.raises(KernelError, match=r"of shape \(2, 8, 4, 4\)"):
        Launcher(kernel(s, "fused_test"), FakeDriver())(*(torch.randn(shapes[n.shape[1]]) for n in s.tensors))


@pytest.mark.parametrize("name", ["no vector", "padded pool", "many parts", "samples"])
@pytest.mark.sampled
def test_nothing_is_read_or_written_outside(name: str) -> None:
    s = stream_of(CASES[name]())
    emulate(kernel(s, "fused_test"), *(random(n, i) for i, n in enumerate(s.tensors)), order="reverse", sanitize=True)


# What is read from memory instead.


def in_memory(root: Node, *also: Node) -> None:
    found = parse(root, Graph((), (root, *also)).users())
    assert isinstance(found, Stream) and any(isinstance(n.op, ops.Cat) for n in found.tensors)


def test_what_others_use() -> None:
    x = channels(3, 5)
    in_memory(pointwise("relu", x), x)


def test_neighbours_of_different_parts() -> None:
    in_memory(pointwise("relu", cat(3, inp(0, 2, 3, 4, 6), inp(1, 2, 3, 4, 8))))


def test_windows_over_different_parts() -> None:
    in_memory(pool(cat(2, inp(0, 2, 3, 4, 8), inp(1, 2, 3, 4, 8)), "max", (2, 2)))


def test_what_is_small_beside_the_value() -> None:
    in_memory(pointwise("add", inp(0, 2, 3, 5, 8), cat(0, inp(1, 2, 1, 1), inp(2, 1, 1, 1))))


def test_values_of_one_number() -> None:
    ones = make(ops.Full((3, 2, 4, 8), 1.0, torch.float32, torch.device("cpu")))
    in_memory(pointwise("relu", cat(1, inp(0, 3, 3, 4, 8), ones)))


def test_windows_beside_different_parts() -> None:
    """Behind a pool along the same dimension, whose length no part says."""
    x = cat(2, inp(1, 2, 3, 1, 8), inp(2, 2, 3, 3, 8))
    in_memory(pointwise("add", pool(inp(0, 2, 3, 8, 8), "max", (2, 1)), x))


def test_a_part_that_is_broadcast_as_well() -> None:
    """A batch of one that grows would be read in two ways."""
    x, y = inp(0, 1, 1, 4, 8), inp(1, 1, 4, 4, 8)
    for root in (pointwise("mul", cat(1, x, y), x), pointwise("mul", x, cat(1, x, y))):
        in_memory(root)


def test_very_many_parts() -> None:
    in_memory(fold(channels(*(1,) * (MOST_PARTS + 1)), "sum", 2))
