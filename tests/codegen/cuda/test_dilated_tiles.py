"""Tiles of dilated convolutions on a GPU: their cells lie apart, their staged rows have no gaps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TypeVar

import pytest
import torch
from contraction_cases import Case, Found, find, some, tolerance
from emulation.emulate import ORDERS, emulate

from fusewright.codegen.cuda import direct as cuda_direct
from fusewright.codegen.cuda import warpgroup as cuda_warpgroup
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule import direct_choice, warpgroup
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.direct import Cut
from fusewright.schedule.residues import walks
from fusewright.schedule.tiling import Tiling
from fusewright.schedule.warpgroup import WarpgroupTile
from fusewright.schedule.warpgroup_staging import of_tile

BF16 = torch.bfloat16
T = TypeVar("T", Tiling, WarpgroupTile)

CASES = {
    "rows": Case((17, 15), 5, 20, dilation=(3, 1), padding=(2, 0), before=("relu", "add channel")),
    "a step of two": Case((31, 9), 4, 17, (3, 3), (2, 1), (3, 1), (4, 2), before=("relu",), tf32=False),
    "steps and residues": Case((41, 9), 3, 9, (3, 2), (4, 3), (5, 1), (6, 1), fold="max", fold_dims="c"),
    "chunks of channels": Case((13, 12), 20, 17, dilation=(3, 1), before=("relu",), fold="sum", fold_dims="p"),
    "groups": Case((14, 12), 2, 5, dilation=(2, 2), groups=3, fold="mean", fold_dims="c", tf32=False),
    "over positions": Case((19, 13), 3, 24, dilation=(3, 3), padding="same", fold="mean", fold_dims="p"),
    "logsumexp": Case((13, 11), 3, 24, dilation=(2, 1), padding=(2, 2), fold="logsumexp", fold_dims="cp"),
    "fewer rows than residues": Case((10, 12), 3, 8, (3, 3), (1, 1), (0, 0), (4, 1), fold="sum", fold_dims="p"),
    "two rows": Case((2, 12), 3, 8, (3, 3), (1, 1), (3, 0), (3, 1), fold="max", fold_dims="p"),
    "deep": Case((9, 8, 10), 3, 20, (2, 3, 2), (1, 1, 1), (1, 2, 1), (3, 2, 2), fold="min", fold_dims="c"),
    "deep, all": Case((11, 9, 9), 2, 9, (2, 2, 3), (2, 1, 1), (2, 0, 0), (4, 3, 1), fold="sum", fold_dims="cp"),
    "deep, written": Case((8, 9, 11), 2, 24, (3, 2, 2), (1, 1, 1), (2, 1, 0), (2, 3, 1), bias=False),
    "windows along rows": Case((12, 14), 3, 8, dilation=(2, 1), pool="max", window=(1, 2), step=(1, 2)),
    "windows, channels": Case(
        (12, 14), 3, 8, dilation=(3, 1), pool="avg", window=(1, 2), step=(1, 2), fold="sum", fold_dims="c"
    ),
    "transposed": Case((9, 8), 3, 8, dilation=(3, 1), transposed=True, output_padding=(0, 0), before=("relu",)),
    "columns": Case((15, 9), 12, 24, dilation=(3, 2), padding=(1, 1), channels_last=True),
    "columns in bfloat16": Case(
        (8, 9, 6), 16, 24, (2, 2, 2), (1, 1, 1), (1, 1, 1), (2, 3, 1), dtype=BF16, channels_last=True
    ),
}
EACH = [pytest.param(case, id=name) for name, case in CASES.items()]
CONTIGUOUS = [pytest.param(case, id=name) for name, case in CASES.items() if not case.channels_last]
REFERENCE = "def reference(*operands): ..."


def found(case: Case) -> Found:
    result = find(case)
    assert isinstance(result, Found), result
    return result


def apart(f: Found, tiles: Sequence[T]) -> list[T]:
    """Tiles whose cells lie apart, best estimate first; where taps are channels, those of that dimension need not."""

    def group(t: T) -> Contraction:
        return of_tile(f.group, t) if isinstance(t, WarpgroupTile) else f.group

    return [t for t in tiles if any(walk.between > 1 for walk in walks(group(t), t.cells))]


def assert_right(f: Found, kernel: Kernel, order: str = "forward") -> None:
    x = f.case.example()
    want, size = f.reference(x)
    got = emulate(kernel, *f.tensors(x), order=order)
    assert got.shape == want.shape and got.dtype == f.case.dtype
    assert ((got.double() - want).abs() / (size + 1e-3)).nan_to_num(inf).max() <= tolerance(f.case)


# Cells are neighbours, and every other row or fewer is read.
STEPS = {
    "even rows": Case((40, 9), 3, 8, (3, 3), (6, 1), (1, 0), (2, 1), fold="max", fold_dims="c"),
    "one tap": Case((13, 12), 5, 20, (1, 1), (2, 2), (1, 0), before=("relu",)),
    "windows": Case((25, 10), 3, 8, (3, 3), (2, 1), (2, 1), (4, 1), pool="max", window=(2, 2), step=(2, 2)),
    "deep": Case((9, 12, 9), 2, 5, (2, 3, 2), (2, 4, 1), (0, 1, 0), (2, 2, 1), fold="mean", fold_dims="p"),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in STEPS.items()])
@pytest.mark.sampled
def test_rows_that_no_tap_reads_are_not_staged(case: Case) -> None:
    f = found(case)
    tile = next(t for _, t in warpgroup.candidates(f.group, f.cells, tf32=True) if t.cells_h > 1)
    box = next(t for t in direct_choice.candidates(f.group, f.cells, case.batch) if t.cells_h > 1)
    for kernel in (
        f.kernel(next(t for t in f.tilings() if t.cells[1] > 1)),
        cuda_warpgroup.generate(f.group, tile, "fused_test", REFERENCE),
        cuda_direct.generate(f.group, box, "fused_test", REFERENCE),
    ):
        assert "BETWEEN_" not in kernel.source and " * STEP_H" in kernel.source
        assert_right(f, kernel)


@pytest.mark.parametrize("sizes", [(7, 9), (8, 30), (23, 11)])
def test_another_image(sizes: tuple[int, int]) -> None:
    """Sizes are arguments: also of images with fewer rows than residues."""
    case = Case((17, 15), 5, 20, dilation=(3, 2), before=("relu",), fold="mean", fold_dims="p")
    made, other = found(case), found(replace(case, sizes=sizes))
    for t in some(apart(made, made.tilings()), 2, random.Random(7)):
        assert_right(other, made.kernel(t))


@pytest.mark.parametrize("case", EACH)
@pytest.mark.sampled
def test_tensor_cores(case: Case) -> None:
    f = found(case)
    for order, t in zip(ORDERS, some(apart(f, f.tilings()), 3, random.Random(4)), strict=False):
        kernel = f.kernel(t)
        assert "BETWEEN_" in kernel.source
        assert_right(f, kernel, order)


@pytest.mark.parametrize("case", CONTIGUOUS)
@pytest.mark.sampled
def test_warpgroups(case: Case) -> None:
    f = found(replace(case, tf32=True))
    tiles = apart(f, [t for _, t in warpgroup.candidates(f.group, f.cells, tf32=True)])
    rng = random.Random(5)
    for order, t in zip(ORDERS, [tiles[0], *rng.sample(tiles, 2)], strict=True):
        kernel = cuda_warpgroup.generate(f.group, t, "fused_test", REFERENCE)
        assert "BETWEEN_" in kernel.source
        assert_right(f, kernel, order)


@pytest.mark.parametrize("case", CONTIGUOUS)
@pytest.mark.sampled
def test_direct(case: Case) -> None:
    f = found(replace(case, tf32=False))
    every = direct_choice.candidates(f.group, f.cells, case.batch)
    tiles = [t for t in every if any(walk.between > 1 for walk in Cut.of(f.group, t).box.walks)]
    rng = random.Random(6)
    for order, t in zip(ORDERS, [tiles[0], *rng.sample(tiles, 2)], strict=True):
        kernel = cuda_direct.generate(f.group, t, "fused_test", REFERENCE)
        assert "BETWEEN_" in kernel.source
        assert_right(f, kernel, order)


LARGE = {
    "plane": Case((62, 62), 64, 64, dilation=(2, 2), padding="same", before=("relu",)),
    "deep": Case(
        (41, 50, 45),
        51,
        22,
        (4, 4, 4),
        (1, 1, 1),
        (0, 4, 3),
        (3, 3, 3),
        before=("relu",),
        fold="logsumexp",
        fold_dims="cp",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_compiles_without_spills(name: str) -> None:
    f = found(LARGE[name])
    tile = apart(f, [t for _, t in warpgroup.candidates(f.group, f.cells, tf32=True)])[0]
    wgmma = cuda_warpgroup.generate(f.group, tile, "fused_test", REFERENCE)
    for kernel, arch in ((f.kernel(apart(f, f.tilings())[0]), "sm_80"), (wgmma, "sm_90a")):
        taken = nvrtc.resources(nvrtc.compile(kernel.source, arch))
        assert all(entry.stack == 0 for entry in taken.values()), taken
