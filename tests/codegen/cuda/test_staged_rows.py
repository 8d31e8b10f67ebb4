"""Rows of channel planes arrive in shared memory whoever copies them: the generated CUDA C++ runs on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contraction_cases import Case, Found, find, tolerance
from emulation.emulate import emulate

from fusewright.codegen.cuda.staged_rows import Rows
from fusewright.schedule.tiling import Tiling

# 11 channels, 4 of them at a time, in tiles of 4 x 6 rows of 18 elements: beyond the ends of x on all sides.
VOLUME = Case((5, 6, 21), 11, 5, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), before=("relu",))
TILE = Tiling(1, 1, 2, 2, 2, 2, 2, 1, 1, 4, False, True, 1)

F32 = torch.float32

# Threads to a row, channels of a row under way: all of them, not all, rows in several turns, rows of several warps.
WAYS = [(4, 1), (4, 3), (8, 3), (16, 1), (16, 4), (32, 1), (32, 3), (64, 2), (128, 1)]


def found(case: Case) -> Found:
    result = find(case)
    assert isinstance(result, Found), result
    return result


@pytest.mark.parametrize(("width", "dtype"), [(21, F32), (22, F32), (24, F32), (21, torch.bfloat16)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled
def test_all_ways_of_sharing_rows_out(
    way: tuple[int, int], width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By single elements, pairs and whole vectors; elements of two bytes do not come asynchronously."""
    monkeypatch.setattr(Rows, "_shared_out", lambda *_: way)
    f = found(replace(VOLUME, sizes=(5, 6, width), dtype=dtype))
    kernel, x = f.kernel(TILE), f.case.example()
    assert f"{way[0]}, {way[1]}, " in kernel.source
    want, size = f.reference(x)
    error = (emulate(kernel, *f.tensors(x)).double() - want).abs() / (size + 1e-3)
    assert error.nan_to_num(float("inf")).max() <= tolerance(f.case)


@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize("columns", [10, 33, 66, 260])
@pytest.mark.parametrize(("count", "channels"), [(1, 64), (25, 3), (275, 4), (18, 1)])
def test_no_thread_copies_much_more_than_others(vector: int, columns: int, count: int, channels: int) -> None:
    rows = Rows(count, channels, 4, 256)
    lanes, slices = rows._shared_out(vector, columns)
    assert 1 <= slices <= channels and lanes * slices <= rows.threads
    copies = -(-count // (rows.threads // lanes // slices)) * -(-channels // slices) * -(-columns // (vector * lanes))
    assert copies <= 4 * max(1, count * channels * columns / (vector * rows.threads)) + 2
