"""What whole graphs cost where kernels compute them."""

from __future__ import annotations

import pytest
import torch

from fusewright.ir import ops
from fusewright.ir.build import range_sum
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Slot
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.cost import CostModel
from fusewright.schedule.kernel_cost import by_kernels

COST = CostModel(LARGE_GPU, derived_ahead=True, fusing=True)
WORK = by_kernels(COST)


def tensor(*shape: int) -> Node:
    return make(ops.Input(shape, torch.float32, torch.device("cuda"), "x", 0))


def conv(x: Node, out: int, *taps: int, stride: tuple[int, ...], groups: int = 1) -> Node:
    channels, n = int(x.shape[1]), len(taps)
    w = make(ops.Param((out, channels // groups, *taps), torch.float32, torch.device("cuda"), "w"))
    return make(ops.Conv(stride, ((0, 0),) * n, (1,) * n, groups), x, w, None)


def test_few_windows_keep_few_multiprocessors_busy() -> None:
    """9 tiles of 132; as a product they write all that they read, and multiply at the pace of products."""
    few = conv(tensor(8, 39, 64, 64, 64), 51, 19, 19, 11, stride=(9, 15, 15))
    assert 3 * COST(few).seconds < WORK(few).seconds < 132 / 9 * COST(few).seconds


def test_windows_that_overlap_much_are_no_product() -> None:
    few = conv(tensor(4, 512, 16, 16), 64, 9, 9, stride=(1, 1))
    assert WORK(few).seconds == pytest.approx(132 / 4 * COST(few).flops / LARGE_GPU.conv)


@pytest.mark.parametrize("groups", [1, 8])
def test_many_windows_take_as_long_as_before(groups: int) -> None:
    """As do convolutions of groups, whose tiles nobody counts here."""
    many = conv(tensor(16 if groups == 1 else 1, 64, 58, 58), 64, 3, 3, stride=(1, 1), groups=groups)
    assert WORK(many) == COST(many)


def test_range_sums_are_one_kernel() -> None:
    """Of which ATen launches two for each slot."""
    slots = tuple(Slot(u, 60 + u, 1, 1.0) for u in range(3))
    root = range_sum(tensor(8, 4, 64, 64), {2: slots, 3: slots}, torch.float32)
    spared = (COST(root).launches - 1) * LARGE_GPU.launch
    assert spared > 0 and WORK(root).launches == 1
    assert WORK(root).seconds == pytest.approx(COST(root).seconds - spared)


def test_sums_that_a_convolution_forms_have_no_launch() -> None:
    boxes = range_sum(tensor(8, 4, 64, 64), {3: tuple(Slot(u, u + 3, 1, 1.0) for u in range(62))}, torch.float32)
    assert WORK(boxes).launches == COST(boxes).launches == 0
