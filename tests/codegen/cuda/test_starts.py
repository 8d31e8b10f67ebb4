"""Blocks to a sample, where what a block does ahead of all tiles takes as long as several of them."""

from __future__ import annotations

import pytest
from contraction_cases import Case
from test_warpgroup_positions import found
from warpgroup_cases import kernel

from fusewright.kernel import spread


@pytest.mark.parametrize(("start", "blocks"), [(1, 33), (10, 4)])
def test_blocks_that_start_slowly_come_in_one_round(start: int, blocks: int) -> None:
    """Of 32 samples with 713 tiles, on 132 multiprocessors: eight rounds of 22 tiles, or one of 179."""
    assert spread(32, 713, 132, 132, start) == blocks


@pytest.mark.parametrize(("stay", "takes"), [(True, True), (False, False)])
def test_weights_that_stay_take_time(stay: bool, takes: bool) -> None:
    """Blocks lay them out before they do anything else; others come step after step."""
    record = kernel(*found(Case((64, 64), 56, 40, (3, 3)), {"stay": stay}))
    (launch,) = (n for n in record.launches if n.entry == "fused_test")
    start = int(launch.grid[1].removesuffix(")").rpartition(", ")[2])
    assert (start > 1) == takes
