"""Warpgroups that multiply 64 positions by few features: as `test_warpgroup_kernels`, whose tiles have 64 features."""

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
    assert_several_tiles,
    best,
    drawn,
    first,
    kernel,
)
from warpgroup_cases import assert_right as assert_as_eager

from fusewright.codegen.cuda import contraction_record
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup_positions
from fusewright.schedule.warpgroup_positions import PositionTile, numbers
from fusewright.schedule.warpgroup_staging import of_tile, shared_bytes, staged

GOLDEN = Path(__file__).parents[2] / "golden"


def tiles(f: Found) -> list[PositionTile]:
    return [t for _, t in warpgroup_positions.candidates(f.group, f.cells, tf32=True)]


def found(case: Case, wanted: dict[str, Any]) -> tuple[Found, PositionTile]:
    return best(tiles, case, {"spread": 0, **wanted})


def assert_right(f: Found, t: PositionTile, order: str = "forward", **how: Any) -> None:
    """As the model in float64, by these instructions: the input is their first operand."""
    columns = f"wgmma_{ {torch.float32: 'tf32', BF16: 'bf16', F16: 'fp16'}[f.case.dtype] }_{t.weights_m}("
    assert columns + "acc[rd][e][rh][tile]" in kernel(f, t).source
    assert ("add_taps<" in kernel(f, t).source) == (t.spread > 0)
    assert_as_eager(f, t, order, **how)


# -- every reduction of few and of odd numbers of features, in both ways that eights of cells may lie

FOLDS = [("", ""), *((kind, dims) for kind in ("sum", "mean", "max", "min", "logsumexp") for dims in ("c", "p", "cp"))]
FEATURES = (1, 2, 3, 5, 7, 8, 9, 11, 13, 16, 17, 19, 22, 24, 40, 141)


@pytest.mark.parametrize("wide", [False, True], ids=["high", "wide"])
@pytest.mark.parametrize(("kind", "dims"), FOLDS)
@pytest.mark.sampled
def test_reductions(kind: str, dims: str, wide: bool) -> None:
    at = 2 * FOLDS.index((kind, dims)) + wide
    case = Case((13, 37), 5, FEATURES[at % len(FEATURES)], before=("relu", "add channel"), fold=kind, fold_dims=dims)
    f, t = found(case, {"wide": wide})
    for order in ORDERS:
        assert_right(f, t, order)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.sampled
def test_features(features: int) -> None:
    """Many of them have their numbers in shared memory."""
    case = Case(
        (9, 21), 9, features, before=("both",), after=("times channel",), pool="max", window=(2, 2), step=(2, 2)
    )
    f, t = found(case, {})
    assert t.keeps_numbers(f.group) == (2 * t.eights_m * numbers(f.group) <= 24)
    assert ("numbers[" in kernel(f, t).source) != t.keeps_numbers(f.group)
    assert_right(f, t)


# What of a tile a case is to have: weights that stay or not, taps staged in parts, several chunks, rows in pieces.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "weights stay": (Case((9, 21), 5, 20, before=("relu", "add channel")), {"stay": True, "chunk": 8}),
    "chunks, weights stay": (Case((9, 21), 20, 20, before=("relu",)), {"stay": True, "chunk": 8}),
    "chunks": (Case((9, 21), 20, 70, padding=(1, 2)), {"stay": False, "chunk": 8, "tap_rows": 3}),
    "rows of taps": (Case((12, 21), 20, 22, (5, 3)), {"stay": False, "chunk": 8, "tap_rows": 1}),
    "rows of taps, one chunk": (Case((12, 21), 8, 22, (5, 3)), {"stay": False, "chunk": 8, "tap_rows": 1}),
    "several blocks of features": (Case((7, 30), 9, 141, fold="max", fold_dims="p"), {"eights_m": 9}),
    "more than one block may have": (Case((7, 30), 9, 260), {"eights_m": 17}),
    "parts of channels": (Case((7, 30), 5, 6, groups=3, fold="logsumexp", fold_dims="c"), {}),
    "several of everything": (Case((40, 40), 5, 5), {"tiles_h": 2, "tiles_w": 3, "groups_h": 2, "groups_w": 2}),
    "rows and columns": (Case((9, 300), 5, 5), {"wide": True, "tiles_h": 2, "tiles_w": 2, "groups_h": 2}),
    "strides": (Case((11, 33), 6, 9, (3, 4), (2, 3), (1, 2), (1, 2), groups=2), {"wide": False}),
    "strides, wide": (Case((11, 33), 6, 9, (3, 4), (2, 3), (1, 2), (1, 2), groups=2), {"wide": True}),
    "windows": (
        Case((14, 21), 6, 16, pool="max", window=(3, 2), step=(3, 2), after=("gate",), fold="mean", fold_dims="p"),
        {"rows_h": 3},
    ),
    "windows, wide": (Case((14, 41), 6, 9, pool="max", window=(3, 2), step=(3, 2)), {"rows_h": 3, "wide": True}),
    "windows in pieces": (Case((14, 21), 18, 16, pool="avg", window=(4, 2), step=(3, 2)), {"rows_h": 1, "chunk": 16}),
    "overlapping windows": (
        Case((12, 20), 4, 9, pool="avg", window=(3, 2), step=(2, 1), pool_padding=(1, 1), include_pad=False),
        {"rows_h": 3, "tiles_h": 1},
    ),
    "windows, over channels": (
        Case((14, 21), 6, 11, pool="avg", window=(2, 2), step=(2, 2), fold="logsumexp", fold_dims="c"),
        {"rows_h": 2},
    ),
    "three dimensions": (
        Case((5, 6, 19), 3, 16, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), fold="sum", fold_dims="cp"),
        {"cells_d": 2},
    ),
    "transposed": (Case((5, 12), 9, 24, (3, 3), (2, 2), (1, 1), transposed=True, before=("relu",)), {"chunk": 12}),
    "transposed, over channels": (
        Case((5, 12), 9, 24, (3, 3), (2, 2), (1, 1), transposed=True, fold="max", fold_dims="c"),
        {"wide": True},
    ),
    "transposed, pool": (
        Case((6, 14), 10, 18, (5, 4), (2, 1), (2, 1), transposed=True, pool="max", window=(4, 2), step=(4, 2)),
        {"rows_h": 2, "stay": False, "tap_rows": 1, "joined": 0, "chunk": 8},
    ),
    "transposed, both phases of a row": (
        Case((5, 12), 9, 24, (3, 3), (2, 2), (1, 1), output_padding=(1, 1), transposed=True, before=("relu",)),
        {"chunk": 8, "joined": 1, "stay": False, "tap_rows": 1},
    ),
    "transposed, rows of odd length": (
        Case((5, 12), 9, 12, (3, 3), (2, 2), (1, 1), transposed=True),
        {"chunk": 8, "joined": 1, "wide": True},
    ),
    "transposed, two dimensions, three phases of a row": (
        Case((5, 12), 9, 12, (2, 2), (2, 3), (0, 0), (1, 2), transposed=True, fold="logsumexp", fold_dims="cp"),
        {"chunk": 8, "joined": 2},
    ),
    "transposed, all phases": (
        Case((3, 5, 12), 9, 12, (3, 3, 3), (2,) * 3, (1,) * 3, (1,) * 3, output_padding=(1,) * 3, transposed=True),
        {"chunk": 8, "joined": 3, "stay": False},
    ),
    "transposed, phases of planes, reduced": (
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
            fold="sum",
            fold_dims="p",
        ),
        {"chunk": 8, "joined": 2},
    ),
    "softmax": (Case((9, 21), 5, 20, before=("relu", "add channel"), softmax="softmax"), {"stay": True}),
    "softmax, a function": (Case((9, 21), 20, 22, softmax="softmax", after=("gate", "tanh")), {"wide": True}),
    "log softmax, half precision": (Case((9, 21), 20, 17, softmax="log_softmax", dtype=F16), {"chunk": 16}),
    "softmax, channels last": (
        Case((4, 9, 11), 8, 64, (3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3, softmax="softmax", channels_last=True),
        {},
    ),
    "softmax, both phases of a row": (
        Case((5, 12), 9, 30, (3, 3), (2, 2), (1, 1), output_padding=(1, 1), transposed=True, softmax="softmax"),
        {"chunk": 8, "joined": 1},
    ),
    "softmax, pool": (
        Case((9, 21), 9, 21, softmax="softmax", pool="max", window=(3, 2), step=(3, 2), after=("gate",)),
        {"rows_h": 3},
    ),
    "softmax, over positions": (
        Case((9, 21), 9, 21, softmax="softmax", after=("tanh",), fold="max", fold_dims="p"),
        {},
    ),
    "softmax, over channels": (Case((9, 21), 9, 21, softmax="log_softmax", fold="sum", fold_dims="c"), {}),
    "softmax, phases apart": (
        Case((5, 12), 9, 30, (3, 3), (2, 2), (1, 1), transposed=True, before=("tanh",), softmax="softmax"),
        {"chunk": 8, "joined": 0},
    ),
    "transposed, phases without taps": (
        Case((4, 9), 9, 5, (1, 2), (3, 2), (0, 0), (1, 1), 2, True, (2, 1), fold="sum", fold_dims="p"),
        {},
    ),
    "no taps in the first phase": (
        Case(
            (9, 9), 9, 141, (2, 2), (3, 3), (2, 2), transposed=True, before=("add channel",), fold="sum", fold_dims="c"
        ),
        {},
    ),
    "one dimension": (Case((150,), 5, 40, (5,), (1,), (2,), (1,), pool="max", window=(3,), step=(2,)), {"wide": True}),
    "channels last": (Case((9, 21), 20, 22, padding=(1, 2), before=("relu",), channels_last=True), {"chunk": 8}),
    "channels last, odd": (Case((9, 21), 7, 9, groups=2, stride=(2, 1), channels_last=True), {}),
    "channels last, wide": (
        Case((7, 141), 8, 11, pool="avg", window=(2, 2), step=(2, 2), after=("gate",), channels_last=True),
        {"wide": True},
    ),
    "channels last, bfloat16": (
        Case(
            (9, 20), 40, 24, (1, 1), dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p", channels_last=True
        ),
        {"chunk": 16},
    ),
    "bfloat16": (Case((9, 20), 20, 24, dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"), {"chunk": 16}),
    "float16": (Case((9, 20), 5, 9, dtype=F16, transposed=True, stride=(2, 2)), {}),
}
EACH = [pytest.param(case, wanted, id=name) for name, (case, wanted) in CASES.items()]


@pytest.mark.parametrize(("case", "wanted"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(case: Case, wanted: dict[str, Any]) -> None:
    """In all orders of threads, with the same bits."""
    f, t = found(case, wanted)
    assert_right(f, t)
    assert_orders_agree(f, t)


@pytest.mark.parametrize(("features", "pairs"), [(22, True), (21, False)])
def test_neighbouring_features_are_written_at_once(features: int, pairs: bool) -> None:
    """Where channels come last and pairs of them are aligned."""
    case, wanted = CASES["channels last"]
    f, t = found(replace(case, features=features), wanted)
    assert ("reinterpret_cast<Pair*>" in kernel(f, t).source) == pairs
    assert_right(f, t)


@pytest.mark.parametrize(("case", "wanted"), EACH)
@pytest.mark.sampled
def test_what_is_not_finite(case: Case, wanted: dict[str, Any]) -> None:
    assert_not_finite_as_eager(*found(case, wanted))


@pytest.mark.parametrize("name", ["chunks", "windows in pieces", "transposed, over channels"])
def test_sanitizers_find_nothing(name: str) -> None:
    f, t = found(*CASES[name])
    assert_right(f, t, sanitize=True)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", ["three dimensions", "bfloat16"])
def test_clusters_finish_samples_in_one_launch(name: str, blocks: int) -> None:
    case, _ = CASES[name]
    f, t = found(case, {"groups_w": 1, "groups_h": 1})
    assert cuda.blocks_per_sample(f.group, t, 128, f.cells) is not None
    assert len(kernel(f, t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(f, t, order, blocks=blocks)


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed: int) -> None:
    f, rng, some = drawn(tiles, 1000 + seed)
    assert_right(f, rng.choice(some), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 108))
def test_more_random_cases(seed: int) -> None:
    f, rng, some = drawn(tiles, 1000 + seed)
    for t in (some[0], rng.choice(some)):
        assert_right(f, t, ORDERS[seed % 3])


# What several tiles of a block share: buffers by turns, and what is on its way to the next tile.
SEVERAL_TILES: dict[str, tuple[Case, dict[str, Any]]] = {
    "stored": (Case((9, 70), 20, 9), {"stay": False, "chunk": 8, "tap_rows": 2}),
    "over channels": (Case((9, 70), 12, 11, fold="logsumexp", fold_dims="c"), {"stay": True}),
    "over positions": (Case((9, 70), 12, 9, fold="sum", fold_dims="p"), {"stay": True, "chunk": 8}),
    "numbers in shared memory": (
        Case((9, 70), 12, 141, before=("both",), fold="max", fold_dims="cp"),
        {"stay": False, "chunk": 8, "tap_rows": 1},
    ),
}


@pytest.mark.parametrize("name", SEVERAL_TILES)
def test_blocks_with_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with few multiprocessors."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    case, wanted = SEVERAL_TILES[name]
    smallest = {"wide": False, "groups_h": 1, "groups_w": 1, "tiles_h": 1, "tiles_w": 1}
    f, t = found(case, {**smallest, **wanted})
    assert_several_tiles(f, t)
    for order in ORDERS:
        assert_right(f, t, order)


# -- which groups are cut so


@pytest.mark.parametrize(
    ("features", "worth"), [(22, True), (56, True), (58, False), (64, False), (141, True), (192, False)]
)
@pytest.mark.sampled
def test_where_64_features_at_a_time_waste_little_they_are_the_only_way(features: int, worth: bool) -> None:
    f = find(Case((30, 30), 16, features))
    assert isinstance(f, Found)
    found = tiles(f)
    assert bool(found) == worth
    assert all(f.group.features <= t.block_m * 3 and t.block_m % 8 == 0 for t in found)


def test_a_reduction_over_channels_has_all_of_them_in_a_block() -> None:
    """So that no warps need to exchange anything."""
    f = find(Case((30, 30), 16, 141, fold="max", fold_dims="c"))
    assert isinstance(f, Found)
    found = tiles(f)
    assert {t.block_m for t in found} == {144}
    assert "exchange" not in kernel(f, found[0]).source


LARGE = {
    "stored": Case((60, 60), 64, 22, before=("both",)),
    "over positions": Case((60, 60), 64, 141, before=("both",), fold="logsumexp", fold_dims="p"),
    "pool, over channels": Case((60, 60), 64, 40, pool="max", window=(2, 2), step=(2, 2), fold="sum", fold_dims="c"),
}


@pytest.mark.parametrize("name", LARGE)
def test_every_tile_has_place_for_its_numbers(name: str) -> None:
    """A block of sm_90 can ask for 227 KB."""
    f = find(LARGE[name])
    assert isinstance(f, Found)
    found = tiles(f)
    for t in found[:: max(1, len(found) // 20)]:
        launch = next(n for n in kernel(f, t).launches if n.entry == "fused_test")
        assert shared_bytes(of_tile(f.group, t), t) <= launch.shared <= MOST_SHARED, t


# -- what compiles: real sizes, for sm_90a

REAL = {
    "conv2d, tanh, max pool": Case((128, 128), 8, 22, before=("tanh",), pool="max", window=(4, 4), step=(4, 4)),
    "groups, mean": Case((96, 96), 13, 46, (4, 4), groups=3, before=("clamp", "gate"), fold="mean", fold_dims="cp"),
    "logsumexp over channels": Case((96, 96), 24, 141, before=("gate",), fold="logsumexp", fold_dims="c"),
    "conv3d, stored": Case((16, 48, 48), 6, 9, (3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3, before=("relu", "add channel")),
    "softmax": Case((96, 96), 24, 64, softmax="softmax", after=("gate",)),
    "transposed, softmax": Case((64, 64), 32, 64, (4, 4), (2, 2), transposed=True, softmax="softmax"),
    "transposed, sums": Case((64, 64), 24, 40, (4, 4), (2, 2), transposed=True, fold="sum", fold_dims="p"),
    "bfloat16": Case((96, 96), 24, 20, dtype=BF16, before=("gelu",)),
    "many columns": Case((200_000,), 3, 111, (2,), (1,), (0,), (3,), before=("hardswish",), fold="max", fold_dims="cp"),
}


@pytest.mark.parametrize("name", REAL)
def test_compiles_without_spills(name: str) -> None:
    """The best tile, with no more registers than its blocks may have."""
    f = find(REAL[name])
    assert isinstance(f, Found)
    (t,) = first(warpgroup_positions, f)
    resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, "sm_90a"))
    assert all(r.stack == 0 for r in resources.values()), (t, resources)
    assert resources["fused_test"].registers * t.threads <= 65536


def test_golden() -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES["chunks"])
    assert kernel(f, t).source == (GOLDEN / "contraction_warpgroup_positions.cu").read_text()


@pytest.mark.parametrize(("stride", "most"), [(1, 1.0), (2, 1.6), (3, 1.1), (4, 1.8), (5, 1.1), (7, 1.1)])
def test_neighbours_hardly_meet_in_a_bank(stride: int, most: float) -> None:
    """Eight threads that write neighbours along w, 16 bytes each, are served together where all their banks differ."""
    f = find(Case((1, 20 * stride), 8, 24, (1, 3), (1, stride), (0, 0)))
    assert isinstance(f, Found)
    for _, t in warpgroup_positions.candidates(f.group, f.cells, tf32=True)[:40]:
        lay = staged(f.group, t)
        rows, w = lay.lengths[1], lay.lengths[2]
        banks = [(row * lay.row + lay.column(at)) % 8 for row in range(rows) for at in range(w)]
        stores = [banks[i : i + 8] for i in range(0, len(banks), 8)]
        assert sum(max(map(store.count, store)) for store in stores) / len(stores) <= most, (t, lay)
        places = {row * lay.row + lay.column(at) for row in range(rows) for at in range(w)}
        assert len(places) == rows * w and max(places) < lay.plane
