"""Warpgroups whose threads pool together what 64 positions by few features give: as `test_warpgroup_positions`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contraction_cases import Case, Found, find
from emulation.emulate import ORDERS
from test_warpgroup_positions import tiles as by_positions
from warpgroup_cases import (
    BF16,
    F16,
    assert_not_finite_as_eager,
    assert_orders_agree,
    assert_several_tiles,
    best,
    drawn,
    kernel,
)
from warpgroup_cases import assert_right as assert_as_eager

from fusewright.codegen.cuda import contraction_record
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup_pools
from fusewright.schedule.warpgroup_pools import PoolTile, meeting
from fusewright.schedule.warpgroup_staging import of_tile

GOLDEN = Path(__file__).parents[2] / "golden"


def tiles(f: Found) -> list[PoolTile]:
    return [t for _, t in warpgroup_pools.candidates(f.group, f.cells, tf32=True)]


def found(case: Case, wanted: dict[str, Any]) -> tuple[Found, PoolTile]:
    return best(tiles, case, wanted)


def assert_right(f: Found, t: PoolTile, order: str = "forward", **how: Any) -> None:
    """As the model in float64, by way of shared memory."""
    assert "shared_values" in kernel(f, t).source
    assert_as_eager(f, t, order, **how)


def pooled(
    sizes: tuple[int, ...], channels: int, features: int, pool: str, window: tuple[int, ...], *conv: Any, **more: Any
) -> Case:
    """A case whose windows are neighbours, where nothing else is said."""
    return replace(Case(sizes, channels, features, *conv), **{"pool": pool, "window": window, "step": window, **more})


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "neighbours": (pooled((14, 150), 9, 5, "max", (3, 6), before=("relu",), after=("gate",)), {"wide": True}),
    "one below the other": (pooled((40, 50), 9, 13, "max", (4, 5), before=("square",)), {"wide": False}),
    "average": (pooled((20, 70), 20, 17, "avg", (3, 3), padding=(1, 1), before=("tanh", "add channel")), {}),
    "one feature": (pooled((20, 90), 5, 1, "max", (2, 7), after=("times channel",)), {}),
    "many features": (pooled((12, 70), 9, 60, "max", (2, 2), before=("both",), after=("times channel",)), {}),
    "features in parts": (pooled((12, 70), 9, 70, "max", (2, 2)), {"eights_m": 5}),
    "overlap": (Case((21, 90), 9, 6, pool="max", window=(3, 3), step=(2, 2), before=("relu",)), {}),
    "much overlap": (Case((15, 60), 9, 6, pool="avg", window=(4, 5), step=(1, 2), before=("gelu",)), {}),
    "gaps": (Case((21, 90), 9, 6, pool="max", window=(2, 2), step=(3, 4)), {}),
    "padding": (
        Case((20, 70), 9, 6, pool="max", window=(3, 3), step=(2, 2), pool_padding=(1, 1), before=("relu",)),
        {},
    ),
    "padding that counts": (
        Case((20, 70), 9, 6, pool="avg", window=(3, 4), step=(3, 2), pool_padding=(1, 2), before=("sigmoid",)),
        {},
    ),
    "padding that does not count": (
        Case((20, 70), 9, 6, pool="avg", window=(3, 4), step=(3, 4), pool_padding=(1, 2), include_pad=False),
        {},
    ),
    "windows over the end": (
        Case((20, 70), 9, 6, pool="max", window=(3, 4), step=(3, 4), ceil_mode=True, before=("relu",)),
        {},
    ),
    "a divisor": (pooled((20, 70), 9, 6, "avg", (3, 4), divisor=5, before=("relu",)), {}),
    "strides": (pooled((30, 150), 9, 6, "max", (3, 4), (3, 4), (2, 2), (1, 1)), {}),
    "dilation": (pooled((30, 80), 9, 6, "max", (3, 4), (3, 3), (1, 1), (1, 2), (2, 3)), {}),
    "transposed": (pooled((12, 70), 9, 6, "max", (3, 4), (3, 5), (1, 1), (1, 2), transposed=True), {}),
    "phases": (pooled((9, 40), 9, 6, "max", (4, 4), (3, 5), (2, 2), (1, 2), transposed=True, before=("relu",)), {}),
    "phases in part": (pooled((9, 40), 9, 4, "max", (3, 5), (3, 5), (2, 2), (1, 2), transposed=True, step=(4, 2)), {}),
    "phases without taps": (pooled((9, 40), 9, 6, "avg", (2, 6), (1, 3), (2, 3), transposed=True), {}),
    "phases, padding": (
        pooled((9, 40), 9, 5, "avg", (6, 4), (3, 4), (2, 2), (1, 1), transposed=True, pool_padding=(2, 2)),
        {},
    ),
    "windows that begin between strides": (
        pooled((9, 40), 9, 6, "max", (3, 5), (3, 5), (2, 2), (1, 2), transposed=True, before=("relu",)),
        {"wide": True},
    ),
    "windows that begin between three strides, one below the other": (
        pooled((14, 20), 9, 5, "avg", (2, 4), (3, 4), (3, 3), transposed=True, before=("tanh",)),
        {"wide": False},
    ),
    "windows that begin between strides, padding": (
        Case(
            *((9, 40), 9, 5, (3, 4), (2, 3), (1, 1)),
            **{"transposed": True, "pool": "avg", "window": (3, 5), "step": (2, 3), "pool_padding": (1, 2)},
            **{"include_pad": False, "fold": "mean", "fold_dims": "p"},
        ),
        {},
    ),
    "windows that begin between strides, overlap, over the end": (
        Case(
            *((9, 41), 9, 5, (3, 4), (2, 2), (1, 1)),
            **{"transposed": True, "pool": "max", "window": (4, 4), "step": (3, 1), "ceil_mode": True},
        ),
        {"producers": 4},
    ),
    "windows that begin between strides of planes": (
        Case(
            *((4, 7, 20), 5, 3, (3, 3, 3), (2, 1, 2), (1,) * 3, (1,) * 3),
            **{"transposed": True, "output_padding": (0,) * 3, "pool": "max", "window": (3, 3, 2), "step": (3, 3, 2)},
            **{"pool_padding": (1, 0, 1), "fold": "logsumexp", "fold_dims": "c"},
        ),
        {},
    ),
    "phases of planes": (
        pooled(
            (4, 5, 20),
            5,
            3,
            "max",
            (2, 4, 2),
            (3, 3, 3),
            (2, 2, 2),
            (1,) * 3,
            (1,) * 3,
            transposed=True,
            output_padding=(0,) * 3,
        ),
        {},
    ),
    "groups": (pooled((12, 70), 5, 6, "max", (3, 4), groups=3, before=("relu",)), {}),
    "one dimension": (pooled((900,), 20, 12, "max", (5,), (7,), (3,), (3,), (1,)), {"wide": True}),
    "three dimensions": (
        pooled((9, 12, 40), 5, 4, "max", (2, 3, 4), (3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3),
        {"cells_d": 4},
    ),
    "three dimensions that overlap": (
        pooled((9, 12, 40), 5, 4, "avg", (3, 2, 3), (2, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3, step=(2, 1, 2)),
        {},
    ),
    "weights in parts": (pooled((14, 70), 20, 24, "max", (2, 3), (4, 3)), {"stay": False, "chunk": 8, "tap_rows": 2}),
    "three vectors": (pooled((14, 70), 12, 9, "max", (2, 3)), {"chunk": 12}),
    "taps as channels": (pooled((14, 70), 3, 9, "max", (2, 3), (5, 3)), {"unfolded": "h"}),
    "several warpgroups": (pooled((40, 200), 9, 9, "max", (4, 5)), {"groups_h": 2, "groups_w": 2}),
    "producers": (pooled((40, 200), 9, 9, "max", (4, 5), before=("relu",)), {"producers": 4}),
    "two teams of producers": (pooled((40, 200), 9, 9, "max", (4, 5)), {"producers": 8, "groups_w": 2}),
    "over channels": (pooled((20, 70), 9, 11, "max", (3, 3), fold="logsumexp", fold_dims="c"), {}),
    "over channels, with groups": (pooled((20, 70), 9, 5, "avg", (3, 3), groups=2, fold="max", fold_dims="c"), {}),
    "over positions": (pooled((20, 70), 9, 11, "max", (3, 3), fold="mean", fold_dims="p", after=("tanh",)), {}),
    "over positions, logsumexp": (pooled((20, 70), 9, 11, "max", (3, 3), fold="logsumexp", fold_dims="p"), {}),
    "over both": (pooled((20, 70), 9, 7, "avg", (3, 3), before=("relu",), fold="sum", fold_dims="cp"), {}),
    "over both, logsumexp": (pooled((20, 70), 9, 8, "max", (3, 3), fold="logsumexp", fold_dims="cp"), {}),
    "channels last": (pooled((20, 70), 20, 6, "max", (3, 3), padding=(1, 2), channels_last=True), {}),
    "sines": (pooled((20, 70), 9, 6, "max", (3, 3), before=("sine",)), {}),
    "bfloat16": (pooled((20, 70), 20, 9, "avg", (3, 3), dtype=BF16, before=("hardswish",)), {}),
    "float16": (pooled((20, 70), 5, 3, "max", (3, 5), dtype=F16), {}),
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
    """Positions that are in no window have values of nowhere."""
    assert_not_finite_as_eager(*found(case, wanted))


@pytest.mark.parametrize("name", ["padding", "three dimensions", "weights in parts", "over positions", "producers"])
def test_sanitizers_find_nothing(name: str) -> None:
    f, t = found(*CASES[name])
    assert_right(f, t, sanitize=True)


@pytest.mark.parametrize("blocks", [1, 3])
def test_clusters_finish_samples_in_one_launch(blocks: int) -> None:
    f, t = found(CASES["over both"][0], {"groups_w": 1, "groups_h": 1, "stay": True})
    assert len(kernel(f, t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(f, t, order, blocks=blocks)


@pytest.mark.parametrize("name", ["neighbours", "overlap", "weights in parts", "producers", "over channels"])
def test_blocks_with_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with few multiprocessors; eight features at a time are an odd number of times at hand."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    case, wanted = CASES[name]
    f, t = found(case, {**wanted, "groups_h": 1, "groups_w": 1})
    assert_several_tiles(f, t)
    for order in ORDERS:
        assert_right(f, t, order)


def folded(f: Found, t: PoolTile) -> int:
    return meeting(of_tile(f.group, t), t, 1).folded


def test_rows_of_a_window_that_a_thread_has_meet_as_one() -> None:
    """As long as no window begins, or ends, in their midst."""
    f, t = found(pooled((40, 70), 9, 5, "max", (4, 5)), {"wide": True, "tiles_h": 4})
    assert folded(f, t) == 4
    f, t = found(Case((40, 70), 9, 5, pool="max", window=(4, 5), step=(2, 5)), {"wide": True, "tiles_h": 4})
    assert folded(f, t) == 2
    f, t = found(Case((40, 70), 9, 5, pool="max", window=(3, 3), step=(3, 3)), {"wide": False})
    assert folded(f, t) == 1


def pool_of(seed: int) -> tuple[Found, PoolTile]:
    """A random case with such tiles."""
    for more in range(1000):
        f, rng, _ = drawn(by_positions, 100_000 * (seed + 1) + more)
        if each := tiles(f):
            return f, rng.choice(each)
    raise AssertionError("no case has any")


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed: int) -> None:
    assert_right(*pool_of(seed), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 88))
def test_more_random_cases(seed: int) -> None:
    assert_right(*pool_of(seed), ORDERS[seed % 3])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((30, 30), 16, 9), id="no windows"),
        pytest.param(pooled((30, 30), 16, 9, "max", (2, 3), softmax="softmax"), id="softmax"),
        pytest.param(pooled((90, 90), 16, 30, "max", (70, 70)), id="windows larger than tiles"),
    ],
)
def test_what_threads_do_not_pool_together(case: Case) -> None:
    f = find(case)
    assert isinstance(f, Found) and not tiles(f)


def test_golden() -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES["overlap"])
    assert kernel(f, t).source == (GOLDEN / "contraction_pools.cu").read_text()


# -- what compiles: real sizes, for sm_90a

REAL = {
    "conv2d": pooled((502, 506), 36, 34, "max", (6, 6), (4, 4), (2, 1), (1, 1)),
    "many features": pooled((128, 170), 64, 103, "max", (4, 4), before=("gelu",)),
    "conv1d": pooled((75182,), 20, 45, "max", (6,), (6,), (3,), (0,), (1,), groups=3),
    "conv3d": pooled((26, 27, 25), 53, 111, "max", (3, 3, 3), (2, 2, 2), (2, 1, 2), (1, 0, 0), (3, 1, 1)),
    "bfloat16": pooled((96, 96), 24, 40, "avg", (4, 4), dtype=BF16, before=("gelu",)),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("producers", [0, 4])
def test_compiles_without_spills(name: str, producers: int) -> None:
    f, t = found(REAL[name], {"producers": producers})
    resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, cuda.ARCH))
    assert all(r.stack == 0 for r in resources.values()), (t, resources)
    assert resources["fused_test"].registers * t.threads <= 65536
