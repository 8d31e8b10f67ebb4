"""Warpgroups for which the taps along d or h are channels: a case of `test_warpgroup_kernels` and `_positions`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from contraction_cases import Case, Found, find
from emulation.emulate import ORDERS
from warpgroup_cases import (
    BF16,
    F16,
    assert_not_finite_as_eager,
    assert_orders_agree,
    assert_right,
    assert_several_tiles,
    best,
    drawn,
    kernel,
)

from fusewright.codegen.cuda import contraction_record
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup, warpgroup_positions
from fusewright.schedule.warpgroup import WarpgroupTile
from fusewright.schedule.warpgroup_positions import PositionTile

GOLDEN = Path(__file__).parents[2] / "golden"
Tile = WarpgroupTile | PositionTile
WAYS = {"features": warpgroup, "positions": warpgroup_positions}
ONE = (1, 1, 1)


def tiles(f: Found, ways: tuple[str, ...] = tuple(WAYS)) -> list[Tile]:
    return [t for way in ways for _, t in WAYS[way].candidates(f.group, f.cells, tf32=True)]


def found(case: Case, wanted: dict[str, Any], way: str) -> tuple[Found, Tile]:
    return best(lambda f: tiles(f, (way,)), case, {"unfolded": "d", **wanted})


# Cases with what their tiles are to have, for both ways to multiply.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "planes": (Case((6, 7, 20), 5, 9, (3, 3, 3), ONE, (1, 1, 1), ONE, before=("relu",)), {"chunk": 8}),
    "all channels at once": (Case((6, 7, 20), 5, 9, (3, 2, 2), ONE, (2, 0, 0), ONE), {"chunk": 24}),
    "a vector of two taps' channels": (Case((6, 7, 20), 4, 9, (3, 2, 2), ONE, (0, 0, 0), ONE), {"chunk": 8}),
    "cells along d": (Case((9, 7, 20), 3, 9, (4, 2, 3), ONE, (2, 1, 0), ONE), {"cells_d": 2}),
    "strides": (Case((9, 9, 30), 5, 9, (4, 3, 2), (2, 2, 3), (1, 1, 0), ONE, groups=2), {}),
    "dilation": (Case((12, 9, 30), 6, 9, (3, 3, 2), ONE, (2, 1, 0), (3, 2, 1)), {"cells_d": 2}),
    "strides and dilation": (Case((12, 9, 30), 6, 9, (3, 3, 2), (3, 1, 1), (2, 1, 0), (2, 2, 1)), {"cells_d": 2}),
    "weights stay": (Case((6, 7, 20), 5, 9, (3, 3, 3), ONE, (1, 1, 1), ONE), {"stay": True, "chunk": 8}),
    "rows of taps in parts": (Case((6, 9, 20), 5, 9, (2, 4, 3), ONE, (0, 0, 0), ONE), {"stay": False, "tap_rows": 1}),
    "windows": (
        Case((9, 9, 20), 5, 9, (3, 3, 3), ONE, (1, 1, 1), ONE, pool="max", window=(2, 2, 2), step=(2, 2, 2)),
        {"rows_d": 2},
    ),
    "windows in pieces, over positions": (
        Case(
            (9, 9, 20), 5, 9, (3, 3, 3), ONE, (1, 1, 1), ONE,
            pool="avg", window=(2, 2, 2), step=(2, 2, 2), fold="mean", fold_dims="p",
        ),
        {"rows_d": 1, "rows_h": 1},
    ),
    "transposed": (
        Case((5, 6, 20), 5, 9, (3, 3, 2), ONE, (1, 1, 0), ONE, output_padding=(0, 0, 0), transposed=True),
        {},
    ),
    "transposed, strides along w": (
        Case((5, 6, 20), 5, 9, (3, 3, 3), (1, 1, 2), (1, 1, 1), (2, 1, 1), transposed=True, output_padding=(0, 0, 1)),
        {"joined": 1},
    ),
    "channels last": (Case((5, 6, 20), 8, 9, (3, 3, 2), ONE, (1, 0, 0), ONE, channels_last=True), {}),
    "channels last, no whole vectors": (
        Case((5, 6, 20), 5, 9, (3, 3, 2), ONE, (1, 0, 0), ONE, channels_last=True, before=("gate",)),
        {},
    ),
    "bfloat16": (Case((5, 6, 20), 9, 9, (3, 3, 2), ONE, (1, 0, 0), ONE, dtype=BF16, fold="sum", fold_dims="cp"), {}),
    "float16": (Case((5, 6, 20), 3, 9, (3, 3, 2), ONE, (1, 0, 0), ONE, dtype=F16), {}),
    "rows": (Case((14, 21), 9, 9, (5, 3), padding=(2, 1), before=("relu",)), {"unfolded": "h", "chunk": 8}),
    "rows, strides and dilation": (Case((24, 33), 6, 9, (3, 4), (3, 2), (1, 2), (2, 1)), {"unfolded": "h"}),
    "rows, several of them": (Case((24, 33), 6, 9, (5, 3), (3, 1)), {"unfolded": "h", "groups_h": 2}),
    "rows of windows": (
        Case((24, 33), 6, 9, (5, 3), (3, 1), pool="avg", window=(2, 2), step=(2, 2), after=("tanh",)),
        {"unfolded": "h", "rows_h": 2},
    ),
    "rows of a volume": (
        Case((5, 9, 20), 5, 9, (1, 5, 2), ONE, (0, 1, 0), ONE, fold="max", fold_dims="c"),
        {"unfolded": "h", "cells_d": 2},
    ),
    "dense": (Case((6, 7, 20), 2, 9, (3, 3, 3), ONE, (1, 1, 1), ONE, before=("relu",)), {"unfolded": "D"}),
    "dense, vectors of two taps": (
        Case((9, 7, 20), 5, 9, (4, 2, 2), ONE, (2, 0, 1), ONE),
        {"unfolded": "D", "chunk": 8},
    ),
    "dense, weights in parts": (
        Case((9, 9, 20), 3, 9, (4, 4, 3), (2, 1, 1), (1, 0, 0), ONE),
        {"unfolded": "D", "stay": False},
    ),
    "dense, strides and dilation": (
        Case((24, 33), 6, 9, (3, 4), (3, 2), (1, 2), (2, 1), groups=2),
        {"unfolded": "H", "cells_d": 1},
    ),
    "dense, a channel of each group": (Case((24, 33), 1, 20, (3, 3), padding=(1, 1), groups=4), {"unfolded": "H"}),
    "dense, windows": (
        Case((24, 33), 3, 9, (5, 3), (3, 1), pool="avg", window=(2, 2), step=(2, 2), after=("tanh",)),
        {"unfolded": "H"},
    ),
    "dense, transposed": (
        Case((5, 6, 20), 5, 9, (3, 3, 2), ONE, (1, 1, 0), ONE, output_padding=(0, 0, 0), transposed=True),
        {"unfolded": "D"},
    ),
    "dense, a signal": (Case((150,), 2, 20, (4,), (2,), (1,), (1,), fold="min", fold_dims="p"), {"unfolded": "W"}),
    "dense, a signal's dilated taps": (Case((97,), 1, 9, (7,), (1,), (6,), (2,), before=("tanh",)), {"unfolded": "W"}),
    "dense, taps along the last of two": (Case((9, 40), 3, 9, (1, 5), padding=(0, 2)), {"unfolded": "W"}),
    "dense, over positions": (
        Case((24, 33), 3, 9, (7, 7), (2, 2), (3, 3), fold="max", fold_dims="p", before=("sine",)),
        {"unfolded": "H"},
    ),
}  # fmt: skip
DENSE = ["dense, vectors of two taps", "dense, a channel of each group", "dense, a signal"]
EACH = [pytest.param(*of, way, id=f"{name}, {way}") for name, of in CASES.items() for way in WAYS]


@pytest.mark.parametrize(("case", "wanted", "way"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(case: Case, wanted: dict[str, Any], way: str) -> None:
    """In all orders of threads, with the same bits."""
    f, t = found(case, wanted, way)
    assert "UNFOLDED" in kernel(f, t).source
    assert_right(f, t)
    assert_orders_agree(f, t)


@pytest.mark.parametrize(("case", "wanted", "way"), EACH)
@pytest.mark.sampled
def test_what_is_not_finite(case: Case, wanted: dict[str, Any], way: str) -> None:
    """Channels that fill a vector multiply zeros."""
    assert_not_finite_as_eager(*found(case, wanted, way))


def test_golden() -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES["strides"], "positions")
    assert kernel(f, t).source == (GOLDEN / "contraction_warpgroup_unfolded.cu").read_text()


@pytest.mark.parametrize(
    "name", ["planes", "a vector of two taps' channels", "channels last", "rows of windows", *DENSE]
)
@pytest.mark.parametrize("way", WAYS)
def test_sanitizers_find_nothing(name: str, way: str) -> None:
    assert_right(*found(*CASES[name], way), sanitize=True)


@pytest.mark.parametrize("blocks", [1, 3])
def test_clusters_finish_samples_in_one_launch(blocks: int) -> None:
    case = Case((6, 7, 20), 5, 9, (3, 3, 3), ONE, (1, 1, 1), ONE, fold="logsumexp", fold_dims="cp")
    f, t = found(case, {"groups_w": 1, "groups_h": 1, "stay": True}, "positions")
    assert len(kernel(f, t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(f, t, order, blocks=blocks)


@pytest.mark.parametrize("name", ["rows of taps in parts", "rows", "rows of a volume"])
def test_blocks_with_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with few multiprocessors."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    case, wanted = CASES[name]
    small = {"groups_h": 1, "groups_w": 1, "tiles_h": 1, "tiles_w": 1, "cells_d": 1, "wide": False}
    f, t = found(case, {**wanted, **small}, "positions")
    assert_several_tiles(f, t)
    for order in ORDERS:
        assert_right(f, t, order)


def unfolded(seed: int) -> tuple[Found, Tile]:
    """A random case with taps that are channels."""
    for more in range(1000):
        f, rng, every = drawn(tiles, 200_000 * (seed + 1) + more)
        some = [t for t in every if t.unfolded]
        if some:
            return f, rng.choice(some)
    raise AssertionError("no case has any")


@pytest.mark.parametrize("seed", range(6))
def test_random_cases(seed: int) -> None:
    assert_right(*unfolded(seed), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 86))
def test_more_random_cases(seed: int) -> None:
    assert_right(*unfolded(seed), ORDERS[seed % 3])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((6, 30, 30), 16, 9, (1, 1, 3), ONE, (0, 0, 0), ONE), id="one tap along d and h"),
        pytest.param(
            Case((9, 30), 16, 9, stride=(2, 1), padding=(1, 1), output_padding=(1, 0), transposed=True), id="phases"
        ),
    ],
)
def test_there_is_nothing_to_unfold(case: Case) -> None:
    f = find(case)
    assert isinstance(f, Found)
    every = tiles(f)
    assert every and not any(t.unfolded for t in every)


def test_it_is_the_way_of_large_kernels_in_three_dimensions() -> None:
    """Of which whole windows leave little shared memory for neighbours."""
    f = find(Case((58, 42, 40), 8, 17, (6, 6, 6), (3, 3, 3), (1, 0, 2), ONE))
    assert isinstance(f, Found)
    every = warpgroup_positions.candidates(f.group, f.cells, tf32=True)
    best_estimate, t = every[0]
    assert t.unfolded == "d"
    whole = [score for score, t in every if not t.unfolded]
    assert not whole or best_estimate < whole[0] / 4


# -- what compiles: real sizes, for sm_90a

REAL = {
    "strides": Case((58, 42, 40), 10, 17, (6, 6, 6), (3, 3, 3), (1, 0, 2), ONE, before=("mish",)),
    "dilation": Case((41, 42, 39), 51, 22, (4, 4, 4), ONE, (0, 4, 3), (3, 3, 3), fold="logsumexp", fold_dims="cp"),
    "few features": Case((38, 51, 42), 76, 9, (7, 7, 7), ONE, (0, 1, 2), (2, 1, 1)),
    "many features": Case((16, 28, 28), 64, 100, (3, 3, 3), ONE, (1, 1, 1), ONE, before=("relu",)),
    "rows": Case((224, 224), 3, 40, (7, 7), (2, 2), (3, 3), before=("relu",)),
    "bfloat16": Case((16, 28, 28), 64, 40, (3, 3, 3), ONE, (1, 1, 1), ONE, dtype=BF16, before=("gelu",)),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("way", WAYS)
def test_compiles_without_spills(name: str, way: str) -> None:
    f, t = found(REAL[name], {"unfolded": "h" if name == "rows" else "d"}, way)
    resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, cuda.ARCH))
    assert all(r.stack == 0 for r in resources.values()), (t, resources)
    assert resources["fused_test"].registers * t.threads <= 65536
