"""Warpgroups that multiply 64 positions by every tap along w of few features: a case of `test_warpgroup_positions`."""

from __future__ import annotations

from typing import Any

import pytest
from contraction_cases import Case, Found, find
from emulation.emulate import ORDERS
from test_warpgroup_positions import assert_right, tiles
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

from fusewright.codegen.cuda import contraction_record
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup_positions
from fusewright.schedule.warpgroup_positions import PositionTile


def found(case: Case, wanted: dict[str, Any]) -> tuple[Found, PositionTile]:
    """The group of a case, and the best tile whose taps are spread that is as wanted."""
    return best(lambda f: [t for t in tiles(f) if t.spread], case, wanted)


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "neighbours": (Case((9, 90), 9, 3, (3, 5)), {"wide": True}),
    "one below the other": (Case((20, 30), 9, 9, (3, 3), padding=(1, 1), before=("relu",)), {"wide": False}),
    "one feature": (Case((9, 40), 20, 1, (3, 7), padding=(1, 3), after=("tanh",)), {"stay": True, "chunk": 8}),
    "rows of taps in parts": (Case((12, 40), 20, 5, (5, 4)), {"stay": False, "chunk": 8, "tap_rows": 2}),
    "several of everything": (Case((40, 50), 5, 3), {"groups_h": 2, "groups_w": 2, "tiles_h": 3}),
    "several of everything along w": (Case((40, 50), 5, 3), {"groups_h": 2, "groups_w": 2, "tiles_w": 3}),
    "dilation": (Case((13, 90), 9, 9, (3, 4), (1, 1), (1, 3), (2, 2)), {}),
    "stride along h": (Case((13, 40), 9, 9, (3, 4), (2, 1), (1, 3)), {}),
    "numbers in shared memory": (Case((9, 40), 9, 40, before=("both",), after=("times channel",)), {}),
    "windows": (
        Case((14, 40), 9, 5, pool="max", window=(2, 3), step=(2, 3), before=("relu",), after=("gate",)),
        {"rows_h": 2},
    ),
    "windows in pieces, over positions": (
        Case((14, 90), 9, 5, pool="avg", window=(4, 2), step=(4, 2), fold="mean", fold_dims="p"),
        {"rows_h": 1},
    ),
    "windows, dilation": (
        Case((9, 60), 6, 2, (2, 5), (1, 1), (0, 2), (1, 3), pool="max", window=(1, 2), step=(1, 2)),
        {"wide": True},
    ),
    "windows with padding": (
        Case((9, 40), 6, 5, pool="avg", window=(2, 2), step=(2, 2), pool_padding=(1, 1), include_pad=False),
        {},
    ),
    "windows of many positions": (
        Case(
            (5, 200),
            6,
            2,
            (2, 3),
            padding=(0, 1),
            before=("relu",),
            pool="avg",
            window=(1, 9),
            step=(1, 9),
            pool_padding=(0, 4),
            include_pad=False,
        ),
        {},
    ),
    "over channels": (Case((9, 40), 20, 11, fold="logsumexp", fold_dims="c"), {}),
    "over both": (Case((9, 40), 9, 7, (2, 6), before=("add channel",), fold="max", fold_dims="cp"), {}),
    "softmax": (Case((9, 40), 9, 13, softmax="softmax", after=("gate",)), {}),
    "transposed": (Case((5, 40), 9, 3, (3, 5), (1, 1), (1, 2), transposed=True, before=("relu",)), {}),
    "transposed, strides along h": (Case((5, 40), 9, 3, (3, 5), (2, 1), (1, 2), transposed=True), {}),
    "phases along w": (Case((5, 40), 9, 3, (3, 4), (1, 2), (1, 1), transposed=True, before=("relu",)), {}),
    "phases of several lengths": (
        Case((6, 40), 9, 5, (2, 5), (2, 2), (0, 2), transposed=True, fold="logsumexp", fold_dims="c"),
        {},
    ),
    "phases without taps": (
        Case((6, 40), 5, 6, (2, 6), (1, 2), (1, 3), (2, 2), groups=2, transposed=True, before=("add channel",)),
        {},
    ),
    "phases without taps, below windows": (
        Case((6, 40), 9, 3, (3, 3), (1, 2), (0, 1), (1, 2), transposed=True, pool="max", window=(2, 4), step=(2, 4)),
        {},
    ),
    "phases below windows": (
        Case((6, 40), 5, 3, (3, 7), (2, 2), (1, 1), transposed=True, pool="avg", window=(2, 4), step=(2, 4)),
        {},
    ),
    "groups": (Case((7, 60), 5, 6, (3, 4), groups=3, fold="sum", fold_dims="p"), {}),
    "one dimension": (Case((150,), 20, 4, (7,), (1,), (3,), (1,)), {"wide": True}),
    "three dimensions": (Case((5, 6, 30), 3, 9, (3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3), {"cells_d": 2}),
    "channels last": (Case((9, 40), 20, 6, padding=(1, 2), before=("relu",), channels_last=True), {}),
    "bfloat16": (Case((9, 40), 20, 9, dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"), {}),
    "float16": (Case((9, 40), 5, 3, (3, 5), dtype=F16), {}),
}
EACH = [pytest.param(case, wanted, id=name) for name, (case, wanted) in CASES.items()]


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
    """Cells that only help others have values of nowhere."""
    assert_not_finite_as_eager(*found(case, wanted))


@pytest.mark.parametrize("name", ["rows of taps in parts", "windows", "one feature", "windows of many positions"])
def test_sanitizers_find_nothing(name: str) -> None:
    f, t = found(*CASES[name])
    assert_right(f, t, sanitize=True)


@pytest.mark.parametrize("blocks", [1, 3])
def test_clusters_finish_samples_in_one_launch(blocks: int) -> None:
    f, t = found(CASES["over both"][0], {"groups_w": 1, "groups_h": 1, "stay": True})
    assert len(kernel(f, t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(f, t, order, blocks=blocks)


@pytest.mark.parametrize("name", ["rows of taps in parts", "windows in pieces, over positions", "over channels"])
def test_blocks_with_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with few multiprocessors."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    case, wanted = CASES[name]
    f, t = found(case, {**wanted, "wide": False, "groups_h": 1, "groups_w": 1, "tiles_h": 1, "tiles_w": 1})
    assert_several_tiles(f, t)
    for order in ORDERS:
        assert_right(f, t, order)


def spread_of(seed: int) -> tuple[Found, PositionTile]:
    """A random case with spread taps."""
    for more in range(1000):
        f, rng, every = drawn(tiles, 100_000 * (seed + 1) + more)
        spread = [t for t in every if t.spread]
        if spread:
            return f, rng.choice(spread)
    raise AssertionError("no case has any")


@pytest.mark.parametrize("seed", range(6))
def test_random_cases(seed: int) -> None:
    assert_right(*spread_of(seed), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 86))
def test_more_random_cases(seed: int) -> None:
    assert_right(*spread_of(seed), ORDERS[seed % 3])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((30, 30), 16, 9, (3, 1)), id="one tap along w"),
        pytest.param(Case((30, 30), 16, 9, stride=(1, 2)), id="strides along w"),
        pytest.param(Case((30, 30), 16, 9, pool="max", window=(2, 3), step=(2, 2)), id="windows that overlap"),
        pytest.param(Case((30, 30), 16, 9, pool="max", window=(2, 2), step=(2, 3)), id="windows with gaps"),
        pytest.param(Case((30, 30), 16, 56, (3, 5)), id="many features"),
        pytest.param(
            Case(
                (5, 40), 9, 3, (3, 3), (1, 2), (0, 1), (1, 2), transposed=True, pool="max", window=(1, 5), step=(1, 4)
            ),
            id="more elements without taps",
        ),
        pytest.param(
            Case(
                (6, 40), 9, 3, (3, 3), (1, 2), (0, 1), (1, 2), transposed=True, pool="max", window=(1, 3), step=(1, 2)
            ),
            id="phases below windows that overlap",
        ),
    ],
)
def test_where_inputs_would_be_read_in_vain_taps_are_not_spread(case: Case) -> None:
    f = find(case)
    assert isinstance(f, Found)
    found = tiles(f)
    assert found and not any(t.spread for t in found)


def test_it_is_the_way_of_large_kernels_with_few_features() -> None:
    """Three colours of an image, of which each position would be read 49 times."""
    f = find(Case((256, 256), 64, 3, (7, 7), padding=(3, 3)))
    assert isinstance(f, Found)
    assert first(warpgroup_positions, f)[0].spread == 24


# -- what compiles: real sizes, for sm_90a

REAL = {
    "colours of an image": Case((256, 256), 64, 3, (7, 7), padding=(3, 3), after=("tanh",)),
    "sound": Case((4096,), 32, 1, (7,), (1,), (3,), (1,), after=("tanh",)),
    "conv3d": Case((38, 51, 42), 76, 9, (7, 7, 7), (1,) * 3, (0, 1, 2), (2, 1, 1)),
    "windows": Case((128, 128), 32, 5, (5, 5), pool="max", window=(2, 2), step=(2, 2), before=("gelu",)),
    "bfloat16": Case((96, 96), 24, 9, (3, 7), dtype=BF16, before=("gelu",)),
}


@pytest.mark.parametrize("name", REAL)
def test_compiles_without_spills(name: str) -> None:
    f, t = found(REAL[name], {})
    resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, cuda.ARCH))
    assert all(r.stack == 0 for r in resources.values()), (t, resources)
    assert resources["fused_test"].registers * 32 * t.warps <= 65536
