"""Rows that wait in registers for several products, of both ways of warpgroups: emulated on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contraction_cases import Case, Found, find
from emulation.build import EmulationError
from emulation.emulate import ORDERS, emulate
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

from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup, warpgroup_positions
from fusewright.schedule.warpgroup import WarpgroupTile
from fusewright.schedule.warpgroup_positions import PositionTile
from fusewright.schedule.warpgroup_staging import HELD_SHARE, of_tile

GOLDEN = Path(__file__).parents[2] / "golden"
Tile = WarpgroupTile | PositionTile
WAYS = {"features": warpgroup, "positions": warpgroup_positions}
ONE = (1, 1, 1)


def tiles(f: Found, ways: tuple[str, ...] = tuple(WAYS)) -> list[Tile]:
    found = [t for way in ways for _, t in WAYS[way].candidates(f.group, f.cells, tf32=True)]
    return [t for t in found if t.held]


def found(case: Case, wanted: dict[str, Any], way: str) -> tuple[Found, Tile]:
    f, t = best(lambda f: tiles(f, (way,)), case, {"held": True, **wanted})
    assert "wgmma_rows_" in kernel(f, t).source
    return f, t


# Cases with what their tiles are to have: of features by positions, whose weights wait.
FEATURES: dict[str, tuple[Case, dict[str, Any]]] = {
    "weights stay": (Case((9, 40), 5, 20, before=("relu", "add channel")), {"stay": True, "chunk": 8}),
    "all vectors of a chunk": (Case((9, 40), 32, 20, (1, 3), padding=(0, 1)), {"stay": True, "chunk": 32}),
    "a tap of two vectors alone": (Case((9, 40), 5, 20, (3, 1), padding=(1, 0)), {"chunk": 8}),
    "chunks": (Case((9, 40), 20, 70, padding=(1, 2)), {"stay": False, "chunk": 8, "tap_rows": 3}),
    "rows of taps": (Case((12, 40), 20, 70, (5, 2)), {"stay": False, "chunk": 8, "tap_rows": 1}),
    "more than 64 features each": (Case((7, 40), 9, 128, fold="max", fold_dims="c"), {"m_tiles": 2}),
    "warpgroups of features": (Case((7, 40), 9, 130, fold="logsumexp", fold_dims="c"), {"groups_m": 3}),
    "groups": (Case((20, 40), 12, 18, (3, 4), (2, 3), (1, 2), (1, 2), groups=2), {}),
    "windows": (
        Case((26, 40), 6, 16, pool="max", window=(3, 2), step=(3, 2), after=("gate",), fold="mean", fold_dims="p"),
        {"rows_h": 3},
    ),
    "windows in pieces": (Case((26, 40), 18, 16, pool="avg", window=(4, 2), step=(4, 2)), {"rows_h": 1, "chunk": 8}),
    "three dimensions": (
        Case((5, 6, 40), 8, 16, (3, 3, 3), ONE, ONE, ONE, fold="sum", fold_dims="cp"),
        {"cells_d": 2},
    ),
    "phases": (Case((9, 40), 9, 24, (3, 3), (2, 2), (1, 1), transposed=True, before=("relu",)), {"joined": 0}),
    "phases joined": (Case((9, 40), 9, 24, (4, 4), (2, 2), (1, 1), transposed=True), {"joined": 2}),
    "producers": (Case((20, 40), 20, 9, (4, 3)), {"stay": False, "chunk": 8, "producers": 4, "tap_rows": 1}),
    "two teams": (Case((20, 40), 5, 9), {"stay": True, "chunk": 8, "producers": 8}),
    "taps as channels": (Case((6, 7, 40), 5, 9, (3, 3, 3), ONE, ONE, ONE), {"unfolded": "d"}),
    "channels last": (Case((9, 40), 20, 70, before=("relu",), channels_last=True), {"chunk": 8}),
    "bfloat16": (Case((9, 40), 40, 70, dtype=BF16, before=("gelu",)), {"chunk": 16}),
    "float16": (Case((9, 40), 20, 20, dtype=F16, fold="sum", fold_dims="p"), {}),
}
# Of positions by features, which wait.
POSITIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "weights stay": (Case((20, 70), 5, 9, (5, 3), padding=(2, 1), before=("relu", "add channel")), {"chunk": 8}),
    "chunks": (Case((20, 70), 20, 9, (5, 3), padding=(2, 1)), {"chunk": 8}),
    "a tap of two vectors alone": (Case((20, 70), 5, 9, (7, 1), padding=(3, 0)), {"chunk": 8}),
    "several rows and columns": (Case((40, 140), 5, 5, (7, 3), padding=(3, 1)), {"tiles_w": 2}),
    "strides": (Case((41, 150), 6, 8, (7, 3), (1, 2), (3, 1), groups=2), {}),
    "dilation": (Case((30, 70), 6, 9, (5, 3), (1, 1), (4, 2), (2, 2)), {}),
    "transposed, taps the other way": (Case((20, 70), 5, 9, (5, 3), (1, 1), (2, 1), transposed=True), {}),
    "phases": (Case((20, 70), 5, 9, (10, 2), (2, 2), (4, 0), transposed=True), {}),
    "windows": (
        Case((26, 140), 6, 16, (5, 3), pool="max", window=(3, 2), step=(3, 2), fold="mean", fold_dims="p"),
        {"rows_h": 3},
    ),
    "three dimensions": (Case((5, 20, 70), 8, 8, (2, 5, 3), ONE, ONE, ONE, fold="sum", fold_dims="cp"), {}),
    "over channels": (Case((20, 70), 8, 24, (5, 3), fold="logsumexp", fold_dims="c"), {}),
    "softmax": (Case((20, 70), 5, 12, (5, 3), softmax="softmax", after=("scale",)), {}),
    "producers": (Case((20, 70), 20, 9, (5, 3)), {"chunk": 8, "producers": 4}),
    "two teams": (Case((20, 70), 5, 9, (5, 3)), {"producers": 8}),
    "channels last": (Case((20, 70), 16, 9, (5, 3), channels_last=True, before=("gate",)), {}),
    "bfloat16": (Case((20, 70), 40, 9, (5, 3), dtype=BF16), {"chunk": 16}),
    "float16": (Case((20, 70), 20, 9, (5, 3), dtype=F16, fold="sum", fold_dims="p"), {}),
}
CASES = {"features": FEATURES, "positions": POSITIONS}
EACH = [pytest.param(name, way, id=f"{name}, {way}") for way, of in CASES.items() for name in of]


@pytest.mark.parametrize(("name", "way"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(name: str, way: str) -> None:
    """In one order of threads each."""
    assert_right(*found(*CASES[way][name], way), ORDERS[[*CASES[way]].index(name) % 3])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), EACH)
def test_all_orders_agree(name: str, way: str) -> None:
    assert_orders_agree(*found(*CASES[way][name], way))


@pytest.mark.parametrize("name", ["chunks", "windows", "producers"])
@pytest.mark.parametrize("way", WAYS)
def test_orders_agree(name: str, way: str) -> None:
    """All orders of threads give the same bits."""
    assert_orders_agree(*found(*CASES[way][name], way))


@pytest.mark.parametrize("way", WAYS)
def test_blocks_with_several_tiles(way: str) -> None:
    f, t = found(Case((30, 70), 12, 9, (5, 3), batch=40), {}, way)
    assert_several_tiles(f, t)
    assert_right(f, t)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["chunks", "producers", "windows"])
def test_what_is_not_finite(name: str, way: str) -> None:
    assert_not_finite_as_eager(*found(*CASES[way][name], way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["chunks", "producers"])
def test_sanitizers_find_nothing(name: str, way: str) -> None:
    assert_right(*found(*CASES[way][name], way), sanitize=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"warpgroup_wait_but<([^>]+)>", r"warpgroup_wait_but<\1 + 1>"),  # rows come where others are multiplied
        (r"held\[i % \w+\]", "held[0]"),
    ],
)
def test_what_the_emulator_would_find(pattern: str, by: str, way: str) -> None:
    f, t = found(*CASES[way]["chunks"], way)
    record = kernel(f, t)
    planted, count = re.subn(pattern, by, record.source)
    assert count == 1
    with pytest.raises(EmulationError, match="written to while it was multiplied"):
        emulate(replace(record, source=planted), *f.tensors(f.case.example()))


def test_who_has_rows_in_registers() -> None:
    """Those whose instructions take the same rows often enough: several of every tap, or of every row of taps."""
    f = find(Case((64, 256), 16, 24, (3, 3)))
    assert isinstance(f, Found)
    every = [t for way in WAYS.values() for _, t in way.candidates(f.group, f.cells, tf32=True)]
    assert all(t.products(of_tile(f.group, t)).rows <= HELD_SHARE for t in every if t.held)
    assert any(type(t) is WarpgroupTile for t in every if t.held)
    large = find(Case((64, 256), 16, 24, (7, 3)))
    assert isinstance(large, Found)
    some = tiles(large, ("positions",))
    assert some and all(t.wide and t.tap_rows % 7 == 0 and not t.spread for t in some if isinstance(t, PositionTile))
    one_row = find(Case((4096,), 16, 24, (7,), (1,), (0,), (1,)))
    assert isinstance(one_row, Found) and not tiles(one_row, ("positions",))


@pytest.mark.parametrize("way", WAYS)
def test_golden(way: str) -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES[way]["chunks"], way)
    assert kernel(f, t).source == (GOLDEN / f"contraction_held_{way}.cu").read_text()


def random_case(seed: int) -> tuple[Found, Tile]:
    f, rng, some = drawn(tiles, 500_000 * (seed + 1))
    return f, rng.choice(some)


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed: int) -> None:
    assert_right(*random_case(seed), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 132))
def test_more_random_cases(seed: int) -> None:
    assert_right(*random_case(seed), ORDERS[seed % 3])


# -- what compiles: real sizes, for sm_90a

REAL = {
    "a few features, large kernel": (Case((192, 192), 24, 24, (7, 7), before=("sigmoid",)), "positions"),
    "windows": (Case((502, 506), 36, 34, (4, 4), (2, 1), pool="max", window=(6, 6), step=(6, 6)), "features"),
    "written": (Case((128, 128), 64, 48, before=("relu",)), "features"),
}


@pytest.mark.parametrize("producers", [0, 4])
@pytest.mark.parametrize("name", REAL)
def test_compiles_without_spills(name: str, producers: int) -> None:
    case, way = REAL[name]
    f = find(case)
    assert isinstance(f, Found)
    chosen = [t for t in tiles(f, (way,)) if t.producers == producers][:2]
    assert chosen
    for t in chosen:
        resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, cuda.ARCH))
        assert all(r.stack == 0 for r in resources.values()), (t, resources)
