"""Warpgroups that multiply window sums in registers by weights in shared memory."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contraction_cases import Case, Found, Model, draw_boxed, find, tolerance
from emulation.build import EmulationError
from emulation.emulate import MOST_SHARED, ORDERS, emulate
from warpgroup_cases import BF16, F16, assert_orders_agree, assert_several_tiles, kernel

from fusewright.codegen.cuda import contraction_record
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup_windows
from fusewright.schedule.warpgroup_positions import numbers
from fusewright.schedule.warpgroup_windows import WindowTile

GOLDEN = Path(__file__).parents[2] / "golden"
POOL = {"pool": "avg", "window": (4, 4), "step": (4, 4)}
PAIRS = {"pool": "avg", "window": (2, 2), "step": (2, 2)}


def tiles(f: Found) -> list[WindowTile]:
    return [t for _, t in warpgroup_windows.candidates(f.group, f.cells, tf32=f.case.tf32)]


def boxed(case: Case) -> Found:
    found = find(case, boxed=True)
    assert isinstance(found, Found) and found.group.box is not None, found
    return found


def assert_right(f: Found, t: WindowTile, order: str = "forward", sanitize: bool = False, **how: Any) -> None:
    """As the model in float64, by these instructions."""
    x = f.case.example(5)
    want, size = f.reference(x)
    record = kernel(f, t, **how)
    assert record.arch == "sm_90a" and f"wgmma_rows_tf32_{t.block_m}(acc[i][j]" in record.source
    got = emulate(record, *f.tensors(x), order=order, sanitize=sanitize)
    assert got.shape == want.shape and got.dtype == f.case.dtype
    error = ((got.double() - want).abs() / size.clamp(min=1e-30)).nan_to_num(float("inf"))
    assert error.max() <= tolerance(f.case, boxed=True), (t, error.max())


# What of a tile a case is to have.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "sum over positions and features": (
        Case((43, 68), 8, 24, **POOL, fold="sum", fold_dims="cp"),
        {"own_h": 2, "own_w": 1, "buffers": 2},
    ),
    "cells side by side": (Case((43, 68), 8, 24, **POOL, fold="mean", fold_dims="p"), {"own_h": 1, "own_w": 2}),
    "four cells, near": (Case((43, 68), 8, 64, **POOL), {"own_h": 4, "near": True}),
    "two by two": (Case((43, 68), 5, 9, **POOL, after=("both",)), {"own_h": 2, "own_w": 2, "near": False}),
    "four side by side": (Case((23, 140), 8, 6, **POOL), {"own_w": 4}),
    "channels beyond a multiple of four, rows unaligned": (Case((43, 67), 9, 8, **POOL), {"buffers": 3}),
    "few channels": (Case((43, 64), 3, 20, **PAIRS, after=("add channel", "relu")), {"buffers": 1}),
    "over channels": (Case((39, 72), 3, 40, **POOL, fold="logsumexp", fold_dims="c"), {}),
    "many features": (Case((30, 44), 5, 141, **PAIRS, after=("both",), fold="max", fold_dims="p"), {}),
    "more than one block may have": (Case((21, 30), 4, 260, (1, 2), **PAIRS), {"eights_m": 17}),
    "groups": (Case((30, 44), 12, 10, (3, 3), groups=2, **PAIRS), {"warps_h": 2, "warps_w": 2}),
    "dilated": (Case((35, 68), 8, 5, (3, 2), dilation=(2, 1), **POOL), {}),
    "rows apart": (Case((34, 70), 8, 5, (1, 3), pool="avg", window=(2, 4), step=(3, 4)), {}),
    "one tap": (Case((34, 70), 8, 5, (1, 1), **PAIRS), {"buffers": 2}),
    "strides": (Case((45, 66), 6, 9, (3, 4), (2, 1), **PAIRS), {}),
    "one dimension, float16": (
        Case((390,), 4, 8, (3,), (1,), (0,), (1,), pool="avg", window=(4,), step=(2,), dtype=F16),
        {"warps_h": 1},
    ),
    "bfloat16": (Case((43, 68), 9, 17, dtype=BF16, **POOL, fold="min", fold_dims="c"), {}),
    "padded": (Case((43, 64), 9, 24, padding=(1, 1), **POOL, fold="sum", fold_dims="cp"), {"buffers": 2}),
    "padded, rows unaligned, near": (
        Case((30, 45), 7, 12, (5, 4), padding=(4, 2), groups=2, **PAIRS, after=("both",)),
        {"near": True},
    ),
    "padded along one dimension, strides, bfloat16": (
        Case((396,), 8, 40, (6,), (2,), (2,), (1,), dtype=BF16, pool="avg", window=(3,), step=(3,)),
        {},
    ),
    "padded planes": (
        Case(
            *((6, 18, 24), 8, 6, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
            **{"pool": "avg", "window": (2, 2, 2), "step": (2, 2, 2)},
        ),
        {},
    ),
    "planes": (
        Case(
            *((6, 22, 35), 8, 6, (2, 3, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
            **{"pool": "avg", "window": (2, 4, 2), "step": (2, 4, 2)},
        ),
        {"own_h": 2},
    ),
}
EACH = [pytest.param(*CASES[name], id=name) for name in CASES]


def found(case: Case, wanted: dict[str, Any]) -> tuple[Found, WindowTile]:
    f = boxed(case)
    return f, next(t for t in tiles(f) if all(getattr(t, key) == value for key, value in wanted.items()))


@pytest.mark.parametrize(("case", "wanted"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(case: Case, wanted: dict[str, Any]) -> None:
    """In all orders of threads, with the same bits."""
    f, t = found(case, wanted)
    assert_right(f, t)
    assert_orders_agree(f, t)


@pytest.mark.parametrize(
    "name",
    [
        "four cells, near",
        "channels beyond a multiple of four, rows unaligned",
        "padded",
        "padded, rows unaligned, near",
    ],
)
def test_sanitizers_find_nothing(name: str) -> None:
    assert_right(*found(*CASES[name]), sanitize=True)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", ["sum over positions and features", "cells side by side"])
def test_clusters_finish_samples_in_one_launch(name: str, blocks: int) -> None:
    f, t = found(*CASES[name])
    assert cuda.blocks_per_sample(f.group, t, 128, f.cells) is not None
    assert len(kernel(f, t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(f, t, order, blocks=blocks)


def drawn(seed: int) -> tuple[Found, random.Random]:
    """The first case drawn from `seed` that PyTorch and the family take."""
    rng = random.Random(seed)
    while True:
        dtype = rng.choice((torch.float32, torch.float32, BF16, F16))
        case = replace(draw_boxed(rng), tf32=True, dtype=dtype)
        try:
            Model(case)(case.example())
        except RuntimeError:  # nothing is left of the image
            continue
        f = find(case, boxed=True)
        if isinstance(f, Found) and f.group.box is not None and tiles(f):
            return f, rng


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed: int) -> None:
    f, rng = drawn(3000 + seed)
    assert_right(f, rng.choice(tiles(f)), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 108))
def test_more_random_cases(seed: int) -> None:
    f, rng = drawn(3000 + seed)
    for t in (tiles(f)[0], rng.choice(tiles(f))):
        assert_right(f, t, ORDERS[seed % 3])


@pytest.mark.parametrize("name", ["sum over positions and features", "over channels", "many features"])
def test_blocks_with_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with few multiprocessors."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    case, _ = CASES[name]
    f = boxed(replace(case, sizes=(83, 132)))
    t = next(t for t in tiles(f) if t.warps == 4 and t.own_h * t.own_w == 2)
    assert_several_tiles(f, t)
    for order in ORDERS:
        assert_right(f, t, order)


@pytest.mark.parametrize(
    ("text", "by", "what"),
    [
        ("    warpgroup_wait();    // the loop", "    // the loop", "products are under way"),
        ("copy_async_wait<BUFFERS - 1>();", "", ""),
    ],
)
def test_what_the_emulator_would_find(text: str, by: str, what: str) -> None:
    """Products that nobody waits for, and rows that have not come."""
    f, t = found(*CASES["sum over positions and features"])
    whole = kernel(f, t)
    broken = replace(whole, source=whole.source.replace(text, by))
    assert broken.source != whole.source
    x = f.case.example(5)
    right = emulate(whole, *f.tensors(x))
    wrong = 0
    for order in ORDERS:
        try:
            wrong += not torch.equal(emulate(broken, *f.tensors(x), order=order), right)
        except EmulationError as error:
            assert what in str(error)
            wrong += 1
    assert wrong


# -- which groups are cut so


@pytest.mark.parametrize(
    "case", [Case((43, 68), 8, 5, **POOL, tf32=False), Case((43, 68), 8, 5, **POOL, dtype=torch.float64)]
)
def test_more_than_tf32_is_not_for_these_tensor_cores(case: Case) -> None:
    assert not tiles(boxed(case))


def test_only_window_sums() -> None:
    f = find(Case((30, 30), 16, 64))
    assert isinstance(f, Found) and not tiles(f)


def test_a_reduction_over_channels_has_all_of_them_in_a_block() -> None:
    """So that no warps need to exchange anything."""
    f = boxed(Case((30, 44), 5, 141, **PAIRS, fold="max", fold_dims="c"))
    assert {t.block_m for t in tiles(f)} == {144}
    assert "exchange" not in kernel(f, tiles(f)[0]).source
    assert not tiles(boxed(Case((30, 44), 5, 260, **PAIRS, fold="max", fold_dims="c")))


# -- what compiles: real sizes, for sm_90a

REAL = {
    "conv_avgpool_sigmoid_sum": Case((384, 384), 8, 64, **POOL, after=("sigmoid",), fold="sum", fold_dims="cp"),
    "mean": Case((256, 256), 16, 64, **PAIRS, after=("relu",), fold="mean", fold_dims="p"),
    "conv3d": Case(
        *((32, 64, 64), 8, 16, (3,) * 3, (1,) * 3, (0,) * 3, (1,) * 3),
        **{
            "pool": "avg",
            "window": (2,) * 3,
            "step": (2,) * 3,
            "after": ("sigmoid",),
            "fold": "mean",
            "fold_dims": "p",
        },
    ),
    "stored": Case((512, 512), 3, 32, (5, 5), **PAIRS, after=("add channel", "relu")),
    "max": Case(
        *((240, 240), 24, 48, (5, 5)),
        **{"pool": "avg", "window": (3, 3), "step": (3, 3), "after": ("tanh",), "fold": "max", "fold_dims": "p"},
    ),
    "padded": Case((224, 224), 64, 128, padding=(1, 1), **PAIRS, after=("relu",)),
    "bfloat16, over channels": Case((240, 240), 24, 48, **PAIRS, fold="logsumexp", fold_dims="c", dtype=BF16),
}


@pytest.mark.parametrize("name", REAL)
def test_compiles_without_spills(name: str) -> None:
    """The best tiles, with no more registers than their blocks may have."""
    f = boxed(REAL[name])
    (shortlist,) = warpgroup_windows.shortlist(f.group, f.cells, 3, tf32=True)
    for _, t in shortlist:
        resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, "sm_90a"))
        assert all(r.stack == 0 for r in resources.values()), (t, resources)
        assert resources["fused_test"].registers * 32 * t.warps <= 65536


@pytest.mark.parametrize("name", REAL)
def test_every_tile_fits(name: str) -> None:
    """A block of sm_90 can ask for 227 KB, and has a number of warpgroups."""
    f = boxed(REAL[name])
    found = tiles(f)
    for t in found[:: max(1, len(found) // 20)]:
        launch = next(n for n in kernel(f, t).launches if n.entry == "fused_test")
        assert launch.shared <= MOST_SHARED, t
        assert t.warps % 4 == 0 and t.own_h * t.own_w % 2 == 0
        assert t.keeps_numbers(f.group) == (2 * t.eights_m * numbers(f.group) <= 24)


def test_golden() -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES["sum over positions and features"])
    assert kernel(f, t).source == (GOLDEN / "contraction_warpgroup_windows.cu").read_text()
