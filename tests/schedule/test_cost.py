"""Counts of FLOPs, bytes and launches, and the times they come to."""

from __future__ import annotations

import pytest
import sympy
import torch

from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Slot
from fusewright.plan import Work
from fusewright.runtime.device import DeviceFacts
from fusewright.schedule.cost import NOTHING, CostModel

CPU = torch.device("cpu")
FACTS = DeviceFacts("test", conv=1e9, matmul=2e9, wide=1e8, memory=1e9, reduce=5e8, window=1e8, launch=1e-6)
B = sympy.Symbol("B", integer=True, positive=True)


def value(*shape: ops.Size, dtype: torch.dtype = torch.float32, name: str = "x") -> Node:
    return make(ops.Input(shape, dtype, CPU, name=name, index=0))


def cost(op: ops.Op, *args: Node | None, **hints: int) -> Work:
    return CostModel(FACTS, {B: 4, **{sympy.Symbol(k): v for k, v in hints.items()}})(make(op, *args))


def conv(**options: object) -> ops.Conv:
    return ops.Conv(**{"stride": (1, 1), "padding": ((0, 0),) * 2, "dilation": (1, 1), **options})  # type: ignore[arg-type]


class TestFlops:
    def test_conv(self) -> None:
        work = cost(conv(), value(2, 3, 8, 8), value(5, 3, 3, 3, name="w"), None)
        assert work.flops == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)
        assert work.bytes == 4 * (2 * 3 * 64 + 5 * 27 + 2 * 5 * 36)

    def test_grouped_conv(self) -> None:
        work = cost(conv(groups=3), value(2, 3, 8, 8), value(6, 1, 3, 3, name="w"), None)
        assert work.flops == 2 * (2 * 6 * 36) * 9

    def test_transposed_conv_counts_from_its_input(self) -> None:
        op = conv(transposed=True, stride=(2, 2), output_padding=(0, 0))
        work = cost(op, value(2, 3, 8, 8), value(3, 5, 3, 3, name="w"), None)
        assert work.flops == 2 * (2 * 3 * 64) * (5 * 9)

    def test_matmul(self) -> None:
        assert cost(ops.Matmul(), value(B, 7), value(7, 5, name="w"), None).flops == 2 * 4 * 5 * 7

    def test_batch_comes_from_the_hints(self) -> None:
        x, w = value(B, 7), value(7, 5, name="w")
        small, large = (CostModel(FACTS, {B: b})(make(ops.Matmul(), x, w, None)) for b in (1, 10))
        assert large.flops == 10 * small.flops


def test_rows_that_are_moved_are_copied() -> None:
    """For a product by one matrix, and not for a batch of products."""
    x, w = value(3, 7, 6), value(7, 5, name="w")
    turned = make(ops.Permute((0, 2, 1)), x)
    lies, copied = cost(ops.Matmul(), value(3, 6, 7), w, None), cost(ops.Matmul(), turned, w, None)
    assert (copied.launches, copied.bytes) == (lies.launches + 1, lies.bytes + 2 * 4 * 3 * 7 * 6)
    assert cost(ops.Matmul(), turned, make(ops.Expand((3, 7, 5)), w), None).launches == lies.launches
    matrix = make(ops.Permute((1, 0)), value(7, 6))
    assert cost(ops.Matmul(), matrix, w, None).launches == lies.launches


class TestRangeSums:
    def test_a_total_reads_all_once(self) -> None:
        x = value(2, 3, 100)
        work = cost(ops.RangeSum(((2, (Slot(0, 100, 1, 1.0),)),), torch.float32), x)
        assert work.flops == 600 and work.bytes == 4 * (600 + 6) and work.launches == 1

    def test_the_next_dimension_reads_what_is_left(self) -> None:
        whole = (Slot(0, 10, 1, 1.0),)
        work = cost(ops.RangeSum(((1, whole), (2, whole)), torch.float32), value(2, 10, 10))
        assert work.flops == 2 * 10 * 10 + 2 * 10

    def test_a_shared_core_is_read_once(self) -> None:
        taps = tuple(Slot(u, 98 + u, 1, 1.0) for u in range(3))
        work = cost(ops.RangeSum(((1, taps),), torch.float32), value(1, 100))
        assert work.flops == 98 * 3 - 2 * 96

    def test_short_windows_go_at_the_pace_of_pooling(self) -> None:
        windows = tuple(Slot(4 * i, 4 * i + 4, 1, 1.0) for i in range(25))
        long = tuple(Slot(50 * i, 50 * i + 50, 1, 1.0) for i in range(2))
        short_time, long_time = (
            cost(ops.RangeSum(((1, s),), torch.float32), value(10_000, 100)).seconds for s in (windows, long)
        )
        assert short_time > 1e6 / FACTS.window > long_time

    def test_window_sums_that_a_kernel_forms_on_its_way_never_reach_memory(self) -> None:
        x, w = value(2, 3, 100), value(5, 3, 1, name="w")
        windows = tuple(Slot(i, i + 4, 1, 1.0) for i in range(97))
        sums = make(ops.RangeSum(((2, windows),), torch.float32), x)
        read = make(ops.Conv((1,), ((0, 0),), (1,)), sums, w, None)
        fused, apart = CostModel(FACTS, fusing=True), CostModel(FACTS)
        assert fused(sums).bytes == 4 * 2 * 3 * 100 and fused(sums).launches == 0
        assert fused(read).bytes == 4 * (5 * 3 + 2 * 5 * 97)
        assert apart(sums).bytes > fused(sums).bytes and apart(read).bytes == fused(read).bytes + 4 * 2 * 3 * 97

    def test_window_sums_of_a_padded_input_are_written_only_where_no_kernel_forms_them(self) -> None:
        x, w = value(2, 3, 100, 100), value(5, 3, 1, 1, name="w")
        few, many = (
            tuple(Slot(max(i - p, 0), min(i + p, 100), 1, 1.0) for i in range(101)) for p in (2, 5)
        )  # windows of 4 and of 10
        for slots, formed in ((few, True), (many, False)):
            sums = make(ops.RangeSum(((2, slots), (3, few)), torch.float32), x)
            read = make(ops.Conv((1, 1), ((0, 0), (0, 0)), (1, 1)), sums, w, None)
            fused, written = CostModel(FACTS, fusing=True), 4 * 2 * 3 * 101 * 101
            assert fused(sums).bytes == 4 * 2 * 3 * 100 * 100 and fused(sums).launches == 0
            assert fused(read).bytes == 4 * (5 * 3 + 2 * 5 * 101 * 101) + (0 if formed else 2 * written)
            assert fused(read).launches == (1 if formed else 2)

    def test_products_hide_behind_the_reading_of_sums(self) -> None:
        x, w = value(2, 64, 1000), value(512, 64, 1, name="w")
        sums = make(ops.RangeSum(((2, tuple(Slot(i, i + 4, 1, 1.0) for i in range(997))),), torch.float32), x)
        read = make(ops.Conv((1,), ((0, 0),), (1,)), sums, w, None)
        cost = CostModel(FACTS, fusing=True)
        computing = cost(read).flops / FACTS.conv
        assert computing > cost(sums).seconds + cost(read).bytes / FACTS.memory
        assert cost(read).seconds + cost(sums).seconds == pytest.approx(FACTS.launch + computing)

    def test_long_sums_are_written_also_where_kernels_fuse(self) -> None:
        whole = make(ops.RangeSum(((2, (Slot(0, 100, 1, 1.0),)),), torch.float32), value(2, 3, 100))
        assert CostModel(FACTS, fusing=True)(whole) == CostModel(FACTS)(whole)


class TestTimes:
    def test_views_and_sources_are_free(self) -> None:
        x = value(2, 6)
        assert CostModel(FACTS)(x) == NOTHING
        assert cost(ops.Reshape((3, 4)), x) == cost(ops.Permute((1, 0)), x) == NOTHING

    def test_the_slower_of_arithmetic_and_traffic_counts(self) -> None:
        pointwise = cost(ops.Pointwise("relu"), value(1000, 1000))
        assert pointwise.seconds == pytest.approx(1e-6 + 8e6 / FACTS.memory)
        product = cost(ops.Matmul(), value(1000, 1000), value(1000, 1000, name="w"), None)
        assert product.seconds == pytest.approx(1e-6 + 2e9 / FACTS.matmul)

    def test_wide_arithmetic_is_slower(self) -> None:
        narrow, wide = (
            cost(ops.Matmul(), value(64, 64, dtype=d), value(64, 64, dtype=d, name="w"), None).seconds
            for d in (torch.float32, torch.float64)
        )
        assert wide > 5 * narrow

    def test_small_operations_cost_a_launch(self) -> None:
        work = cost(ops.Pointwise("relu"), value(2))
        assert work.launches == 1 and work.seconds == pytest.approx(FACTS.launch, rel=0.1)

    def test_an_embedding_reads_the_rows_that_it_looks_up(self) -> None:
        weight, indices = value(1000, 16, name="w"), value(B, 6, dtype=torch.int64)
        work = cost(ops.Embedding(), weight, indices)
        assert work.flops == 0 and work.launches == 1
        assert work.bytes == 2 * (4 * 6 * 16) * 4 + 4 * 6 * 8

    def test_a_kernel_that_looks_rows_up_never_writes_them(self) -> None:
        weight, indices = (
            make(ops.Input(shape, dtype, CPU, f"operand_{i}", i))
            for i, (shape, dtype) in enumerate((((1000, 16), torch.float32), ((B, 6), torch.int64)))
        )
        body = make(ops.Reduce("mean", (1,)), make(ops.Embedding(), weight, indices))
        work = cost(Fused("fused_embedding_mean", body), weight, indices)
        assert work.bytes == (4 * 6 * 16) * 4 + 4 * 6 * 8 + 4 * 16 * 4

    def test_min_pooling_takes_three(self) -> None:
        pool = {"kernel": (2,), "stride": (2,), "padding": (0,), "dilation": (1,)}
        launches = [cost(ops.Pool(kind, **pool), value(2, 3, 8)).launches for kind in ("min", "max", "avg")]  # type: ignore[arg-type]
        assert launches == [3, 1, 1]
