"""Contractions that warpgroups multiply: the generated CUDA C++ runs on the CPU, and is compared with float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contraction_cases import Case, Found, find
from emulation.emulate import MOST_SHARED, ORDERS
from warpgroup_cases import (
    BF16,
    F16,
    assert_not_finite_as_eager,
    assert_orders_agree,
    assert_right,
    assert_several_tiles,
    best,
    drawn,
    first,
    kernel,
)

from fusewright.codegen.cuda import contraction_record
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup, warpgroup_positions
from fusewright.schedule.residues import useful, walks
from fusewright.schedule.warpgroup import WarpgroupTile
from fusewright.schedule.warpgroup_choice import leanest
from fusewright.schedule.warpgroup_staging import of_tile, shared_bytes

GOLDEN = Path(__file__).parents[2] / "golden"

# What of a tile a case is to have: weights that stay or not, taps staged in parts, several chunks, rows in pieces.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "weights stay": (Case((9, 21), 5, 20, before=("relu", "add channel")), {"stay": True, "chunk": 8}),
    "chunks, weights stay": (Case((9, 21), 20, 20, before=("relu",)), {"stay": True, "chunk": 8}),
    "chunks": (Case((9, 21), 20, 70, padding=(1, 2)), {"stay": False, "chunk": 8, "tap_rows": 3}),
    "rows of taps": (Case((12, 21), 20, 70, (5, 3)), {"stay": False, "chunk": 8, "tap_rows": 1}),
    "rows of taps, one chunk": (Case((12, 21), 8, 70, (5, 3)), {"stay": False, "chunk": 8, "tap_rows": 1}),
    "more than 64 features each": (Case((7, 30), 9, 128, fold="max", fold_dims="c"), {"m_tiles": 2}),
    "warpgroups of features": (Case((7, 30), 9, 130, fold="logsumexp", fold_dims="c"), {"m_tiles": 1, "groups_m": 3}),
    "strides": (Case((11, 33), 6, 9, (3, 4), (2, 3), (1, 2), (1, 2), groups=2), {"cells_h": 4}),
    "no powers of two": (Case((20, 45), 9, 20, before=("relu",)), {"cells_h": 7, "eights_w": 3}),
    "seven rows in one instruction": (Case((33, 21), 9, 20, (3, 3), (2, 1)), {"cells_h": 14, "eights_w": 1}),
    "windows": (
        Case((14, 21), 6, 16, pool="max", window=(3, 2), step=(3, 2), after=("gate",), fold="mean", fold_dims="p"),
        {"rows_h": 3},
    ),
    "windows in pieces": (Case((14, 21), 18, 16, pool="avg", window=(4, 2), step=(3, 2)), {"rows_h": 1, "chunk": 8}),
    "overlapping windows": (
        Case((12, 20), 4, 9, pool="avg", window=(3, 2), step=(2, 1), pool_padding=(1, 1), include_pad=False),
        {"rows_h": 3, "cells_h": 2},
    ),
    "three dimensions": (
        Case((5, 6, 19), 3, 16, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), fold="sum", fold_dims="cp"),
        {"cells_d": 2},
    ),
    "transposed": (Case((5, 12), 9, 24, (3, 3), (2, 2), (1, 1), transposed=True, before=("relu",)), {"chunk": 8}),
    "transposed, pool": (
        Case((6, 14), 10, 18, (5, 4), (2, 1), (2, 1), transposed=True, pool="max", window=(4, 2), step=(4, 2)),
        {"rows_h": 2, "stay": False, "tap_rows": 1, "joined": 0, "chunk": 8},
    ),
    "transposed, both phases of a row": (
        Case((5, 12), 9, 24, (3, 3), (2, 2), (1, 1), output_padding=(1, 1), transposed=True, before=("relu",)),
        {"chunk": 8, "joined": 1, "stay": False, "tap_rows": 1},
    ),
    "transposed, rows of odd length": (
        Case((5, 12), 9, 24, (3, 3), (2, 2), (1, 1), transposed=True),
        {"chunk": 8, "joined": 1},
    ),
    "transposed, rows of half as many runs": (
        Case((5, 12), 9, 24, (3, 4), (2, 2), (1, 0), transposed=True, before=("add channel",), dtype=F16),
        {"chunk": 16, "joined": 1},
    ),
    "transposed, three phases of a row": (
        Case((5, 12), 9, 24, (2, 2), (1, 3), (0, 0), (2, 2), transposed=True, fold="logsumexp", fold_dims="p"),
        {"chunk": 8, "joined": 1},
    ),
    "transposed, all phases": (
        Case((3, 5, 12), 9, 24, (3, 3, 3), (2,) * 3, (1,) * 3, (1,) * 3, output_padding=(1,) * 3, transposed=True),
        {"chunk": 8, "joined": 3, "stay": False},
    ),
    "transposed, phases of planes, half precision": (
        Case(
            (3, 5, 12),
            20,
            24,
            (3, 3, 3),
            (2,) * 3,
            (1,) * 3,
            (1,) * 3,
            output_padding=(0,) * 3,
            transposed=True,
            dtype=F16,
        ),
        {"chunk": 16, "joined": 2},
    ),
    "transposed, all phases, pool": (
        Case((6, 14), 10, 18, (5, 4), (2, 2), (2, 1), transposed=True, pool="max", window=(2, 2), step=(2, 2)),
        {"joined": 2, "chunk": 8},
    ),
    "transposed, phases without taps": (
        Case((4, 9), 9, 5, (1, 2), (3, 2), (0, 0), (1, 1), 2, True, (2, 1), fold="sum", fold_dims="p"),
        {},
    ),
    "one dimension": (Case((70,), 5, 40, (5,), (2,), (2,), (1,), pool="max", window=(3,), step=(2,)), {"eights_w": 2}),
    "channels last": (Case((9, 21), 20, 70, padding=(1, 2), before=("relu",), channels_last=True), {"chunk": 8}),
    "channels last, odd": (Case((9, 21), 7, 9, groups=2, stride=(2, 1), channels_last=True), {}),
    "channels last, pool": (
        Case((14, 21), 8, 16, pool="max", window=(3, 2), step=(3, 2), after=("gate",), channels_last=True),
        {"rows_h": 3},
    ),
    "channels last, transposed": (
        Case((5, 12), 12, 24, (3, 3), (2, 2), (1, 1), transposed=True, fold="sum", fold_dims="c", channels_last=True),
        {},
    ),
    "channels last, three dimensions": (
        Case((5, 6, 19), 4, 16, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), channels_last=True, dtype=F16),
        {"cells_d": 2},
    ),
    "channels last, bfloat16": (
        Case(
            (9, 20), 40, 72, (1, 1), dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p", channels_last=True
        ),
        {"chunk": 16},
    ),
    "bfloat16": (Case((9, 20), 20, 24, dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"), {"chunk": 16}),
    "float16": (Case((9, 20), 5, 9, dtype=F16, transposed=True, stride=(2, 2)), {}),
}
EACH = [pytest.param(case, wanted, id=name) for name, (case, wanted) in CASES.items()]


def tiles(f: Found) -> list[WarpgroupTile]:
    return [t for _, t in warpgroup.candidates(f.group, f.cells, tf32=True)]


def found(case: Case, wanted: dict[str, Any]) -> tuple[Found, WarpgroupTile]:
    return best(tiles, case, wanted)


@pytest.mark.parametrize(("case", "wanted"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(case: Case, wanted: dict[str, Any]) -> None:
    """In all orders of threads, with the same bits."""
    f, t = found(case, wanted)
    assert_right(f, t)
    assert_orders_agree(f, t)


@pytest.mark.parametrize(("case", "wanted"), EACH)
@pytest.mark.sampled
def test_what_is_not_finite(case: Case, wanted: dict[str, Any]) -> None:
    assert_not_finite_as_eager(*found(case, wanted))


@pytest.mark.parametrize(("name", "whole"), [("channels last", True), ("channels last, odd", False), ("chunks", False)])
def test_vectors_are_read_whole_where_memory_has_them_so(name: str, whole: bool) -> None:
    """20 channels of float32 are five vectors, 7 of a group are none."""
    assert ("reinterpret_cast<const uint4*>(from)" in kernel(*found(*CASES[name])).source) == whole


@pytest.mark.parametrize(
    "name", ["chunks", "rows of taps", "windows in pieces", "transposed, pool", "channels last", "channels last, odd"]
)
def test_sanitizers_find_nothing(name: str) -> None:
    f, t = found(*CASES[name])
    assert_right(f, t, sanitize=True)


@pytest.mark.parametrize("blocks", [1, 3])
def test_clusters_finish_samples_in_one_launch(blocks: int) -> None:
    case, _ = CASES["three dimensions"]
    f, t = found(case, {"groups_w": 1, "groups_h": 1})
    assert cuda.blocks_per_sample(f.group, t, 128, f.cells) is not None
    assert len(kernel(f, t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(f, t, order, blocks=blocks)


@pytest.mark.parametrize("seed", range(6))
def test_random_cases(seed: int) -> None:
    f, rng, some = drawn(tiles, seed)
    assert_right(f, rng.choice(some), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 106))
def test_more_random_cases(seed: int) -> None:
    f, rng, some = drawn(tiles, seed)
    for t in (some[0], rng.choice(some)):
        assert_right(f, t, ORDERS[seed % 3])


@pytest.mark.parametrize("change", [{"tf32": False}, {"dtype": torch.float64}])
def test_what_the_family_does_not_take(change: dict[str, Any]) -> None:
    case = replace(CASES["chunks"][0], **change)
    f = find(case)
    assert isinstance(f, Found)
    assert not warpgroup.candidates(f.group, f.cells, tf32=case.tf32)


def test_a_pool_that_leaves_only_positions_without_taps_has_no_tile() -> None:
    """There is nothing to multiply."""
    f = find(Case((9, 9), 5, 9, (1, 1), (3, 3), (1, 1), transposed=True, pool="max", window=(2, 2), step=(3, 3)))
    assert isinstance(f, Found)
    assert not tiles(f)


LARGE = {
    "over channels": Case((60, 60), 64, 256, fold="max", fold_dims="c"),
    "logsumexp over channels": Case((60, 60), 64, 64, (3, 3), (2, 2), transposed=True, fold="logsumexp", fold_dims="c"),
    "over positions": Case((60, 60), 64, 256, fold="logsumexp", fold_dims="p"),
    "pool, over channels": Case((60, 60), 64, 96, pool="max", window=(2, 2), step=(2, 2), fold="sum", fold_dims="c"),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.sampled
def test_every_tile_has_place_for_what_its_warps_exchange(name: str) -> None:
    """A block of sm_90 can ask for 227 KB."""
    f = find(LARGE[name])
    assert isinstance(f, Found)
    found = tiles(f)
    for t in found[:: len(found) // 20]:
        launch = next(n for n in kernel(f, t).launches if n.entry == "fused_test")
        assert shared_bytes(of_tile(f.group, t), t) <= launch.shared <= MOST_SHARED, t


# What several tiles of a block share: buffers by turns, and what is on its way to the next tile.
SEVERAL_TILES: dict[str, tuple[Case, dict[str, Any]]] = {
    "stored": (Case((9, 40), 20, 9), {"stay": False, "chunk": 8, "tap_rows": 2}),
    "one chunk, rows of taps": (Case((9, 40), 8, 9, (5, 3)), {"stay": False, "chunk": 8, "tap_rows": 2}),
    "over channels": (Case((9, 40), 12, 70, fold="logsumexp", fold_dims="c"), {"stay": True}),
    "over positions": (Case((9, 40), 12, 9, fold="sum", fold_dims="p"), {"stay": True, "chunk": 8}),
    "transposed": (
        Case((5, 40), 9, 5, (3, 3), (2, 2), (1, 1), (2, 1), transposed=True, fold="max", fold_dims="c"),
        {"stay": False, "chunk": 8, "tap_rows": 1, "joined": 0},
    ),
    "several phases": (
        Case((5, 40), 9, 5, (3, 3), (2, 2), (1, 1), transposed=True, output_padding=(1, 1)),
        {"stay": False, "chunk": 8, "tap_rows": 1, "joined": 1},
    ),
    "windows in pieces": (
        Case((14, 60), 18, 16, pool="avg", window=(4, 2), step=(3, 2)),
        {"rows_h": 1, "stay": False, "chunk": 8, "tap_rows": 3},
    ),
}


@pytest.mark.parametrize("name", SEVERAL_TILES)
def test_blocks_with_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with few multiprocessors."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    case, wanted = SEVERAL_TILES[name]
    f, t = found(case, {"groups_h": 1, "groups_w": 1, "cells_h": 1, "eights_w": 1, **wanted})
    assert_several_tiles(f, t)
    for order in ORDERS:
        assert_right(f, t, order)


# -- what compiles: real sizes, for sm_90a


REAL = {
    "conv2d, relu": Case((126, 126), 64, 128, before=("relu", "add channel")),
    "conv2d, tanh, pool": Case((128, 128), 8, 64, before=("tanh",), pool="max", window=(4, 4), step=(4, 4)),
    "transposed, max": Case((120, 120), 79, 83, (2, 2), dilation=(2, 2), transposed=True, fold="max", fold_dims="cp"),
}


@pytest.mark.parametrize("name", REAL)
def test_compiles_without_spills(name: str) -> None:
    """The best tile for 64 samples, with no more registers than its blocks may have."""
    f = find(REAL[name])
    assert isinstance(f, Found)
    (t,) = first(warpgroup, f)
    resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, "sm_90a"))
    assert all(r.stack == 0 for r in resources.values()), (t, resources)
    assert resources["fused_test"].registers * t.threads <= 65536


def test_the_estimate_knows_no_model_and_prefers_overlap() -> None:
    """Whatever is chosen fits, and of tiles alike but for idle features the fuller one costs less."""
    f = find(REAL["conv2d, relu"])
    assert isinstance(f, Found)
    scored = warpgroup.candidates(f.group, f.cells, tf32=True)
    assert [s for s, _ in scored] == sorted(s for s, _ in scored)
    assert all(shared_bytes(of_tile(f.group, t), t) <= 220 * 1024 for _, t in scored)
    assert [len(way) for way in warpgroup.shortlist(f.group, f.cells, 10, tf32=True)] == [10, 10, 10]


@pytest.mark.parametrize("way", [warpgroup, warpgroup_positions])
def test_tiles_fit_images_that_are_no_power_of_two(way: Any) -> None:
    """The best one computes hardly more positions than there are; of 8 x 64 cells, a third would be in vain."""
    f = find(Case((46, 46), 64, 40, padding=(1, 1)))
    assert isinstance(f, Found)
    (t,) = first(way, f)
    assert useful(walks(f.group, t.cells), f.cells, t.cells) > 0.85, t


def test_of_tiles_that_are_alike_the_leanest_are_estimated() -> None:
    f = find(Case((30, 30), 64, 64, padding=(1, 1)))
    assert isinstance(f, Found)
    plain = replace(warpgroup.candidates(f.group, f.cells, tf32=True)[0][1], groups_m=1, groups_h=1, groups_w=1)
    shapes = [replace(plain, cells_d=1, cells_h=h, eights_w=w) for h, w in ((16, 1), (8, 2), (4, 4), (2, 8), (1, 16))]
    found = leanest(f.group, shapes, f.cells, lambda t: t.cells_h * t.eights_w)
    assert {t.cells[1:] for t in found} == {(8, 16), (16, 8)}


GOLDENS = {"chunks": "contraction_warpgroup", "transposed, both phases of a row": "contraction_warpgroup_phases"}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES[name])
    assert kernel(f, t).source == (GOLDEN / f"{GOLDENS[name]}.cu").read_text()
