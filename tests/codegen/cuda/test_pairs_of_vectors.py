"""Chunks with an odd number of vectors of channels: a case of `test_warpgroup_kernels` and `_positions`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contraction_cases import Case, Found, find, tolerance
from emulation.emulate import ORDERS, EmulationError, emulate
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
from fusewright.schedule.warpgroup_choice import chunk_sizes
from fusewright.schedule.warpgroup_pairs import multiplied_vectors
from fusewright.schedule.warpgroup_positions import PositionTile
from fusewright.schedule.warpgroup_staging import Taps, of_tile, run, vector

GOLDEN = Path(__file__).parents[2] / "golden"
Tile = WarpgroupTile | PositionTile
WAYS = {"features": warpgroup, "positions": warpgroup_positions}
ONE = (1, 1, 1)


def tiles(f: Found, ways: tuple[str, ...] = tuple(WAYS)) -> list[Tile]:
    return [t for way in ways for _, t in WAYS[way].candidates(f.group, f.cells, tf32=True)]


def odd_tiles(f: Found, ways: tuple[str, ...] = tuple(WAYS)) -> list[Tile]:
    return odd_of(f, tiles(f, ways))


def odd_of(f: Found, some: Iterable[Tile]) -> list[Tile]:
    return [t for t in some if t.chunk // vector(f.group) % 2]


def found(case: Case, wanted: dict[str, Any], way: str) -> tuple[Found, Tile]:
    """The group of a case, and the best tile with an odd number of vectors that is as wanted."""
    return best(lambda f: odd_tiles(f, (way,)), case, {"spread": 0, **wanted} if way == "positions" else wanted)


def right(f: Found, t: Tile, order: str = "forward", **how: Any) -> None:
    """As the model in float64, and by products of two rows of taps."""
    assert "last_vectors(x" in kernel(f, t).source
    assert_right(f, t, order, **how)


# -- every number of vectors of which one has no other, and of rows of taps of which one has none

CHANNELS = (1, 3, 4, 9, 12, 17, 28)
ROWS = (1, 2, 3, 5, 7)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.sampled
def test_channels_and_rows_of_taps(channels: int, rows: int) -> None:
    at = CHANNELS.index(channels) + 2 * ROWS.index(rows)
    per_row, stride, way = (1, 2, 3, 4)[at % 4], (1, 2)[at % 2], (*WAYS,)[at // 2 % 2]
    case = Case((11, 27), channels, 9, (rows, per_row), (1, stride), (rows // 2, 0))
    whole = -(-channels // 4) * 4
    f, t = found(case, {"chunk": whole}, way)
    assert kernel(f, t).source.count(f"VECTORS = {whole // 4}, ") == 1
    right(f, t, ORDERS[at % 3])


@pytest.mark.parametrize("channels", [5, 7, 8, 16, 32])
def test_an_even_number_of_vectors_is_multiplied_as_it_was(channels: int) -> None:
    f = find(Case((11, 27), channels, 9))
    assert isinstance(f, Found)
    every = tiles(f)
    assert every and not odd_of(f, every)
    assert "last_vectors" not in kernel(f, every[0]).source


# Cases with what their tiles are to have, for both ways to multiply.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "weights do not stay": (Case((11, 21), 9, 9, (4, 3)), {"stay": False, "tap_rows": 2}),
    "uneven parts of rows": (Case((12, 21), 9, 9, (5, 3)), {"stay": False, "tap_rows": 2}),
    "uneven parts of rows, one vector": (Case((14, 21), 3, 9, (7, 2)), {"stay": False, "tap_rows": 4}),
    "parts of channels": (Case((11, 21), 33, 9), {"chunk": 12, "stay": True}),
    "parts of channels and rows": (Case((24, 40), 33, 9, (5, 3)), {"chunk": 12, "stay": False, "tap_rows": 2}),
    "parts of a run and one more": (Case((9, 21), 97, 9, (3, 2)), {"chunk": 20, "stay": False, "tap_rows": 3}),
    "one vector at a time": (Case((11, 21), 17, 9), {"chunk": 4}),
    "strides": (Case((17, 33), 3, 9, (7, 7), (2, 2), (3, 3), groups=2), {}),
    "strides that taps are no multiples of": (Case((9, 60), 9, 9, (3, 7), (1, 3), (1, 2), (1, 2)), {}),
    "dilation": (Case((19, 27), 12, 9, (3, 3), (1, 1), (1, 2), (3, 2)), {}),
    "one dimension": (Case((150,), 4, 9, (7,), (1,), (3,), (1,), before=("relu",)), {}),
    "one dimension, strides": (Case((150,), 12, 9, (5,), (2,), (2,), (1,)), {}),
    "one tap": (Case((9, 21), 3, 9, (1, 1)), {}),
    "three dimensions": (Case((6, 7, 20), 9, 9, (3, 3, 3), ONE, ONE, ONE), {"unfolded": ""}),
    "windows": (Case((14, 21), 3, 9, pool="max", window=(3, 2), step=(3, 2), after=("gate",)), {"rows_h": 3}),
    "windows in pieces": (
        Case((14, 21), 9, 9, pool="avg", window=(4, 2), step=(3, 2), fold="mean", fold_dims="p"),
        {"rows_h": 1},
    ),
    "taps as channels": (Case((6, 9, 20), 4, 9, (3, 3, 3), ONE, ONE, ONE), {"unfolded": "d", "chunk": 12}),
    "taps as channels, one at a time": (
        Case((6, 9, 20), 17, 9, (3, 3, 2), ONE, ONE, ONE),
        {"unfolded": "d", "chunk": 20},
    ),
    "taps as channels, a vector at a time": (
        Case((6, 9, 20), 9, 9, (3, 2, 2), ONE, (0, 0, 0), ONE),
        {"unfolded": "d", "chunk": 4},
    ),
    "transposed": (Case((6, 12), 9, 9, (3, 3), (1, 1), (1, 1), transposed=True), {}),
    "transposed, phases": (
        Case((5, 12), 9, 9, (5, 4), (2, 2), (1, 1), output_padding=(1, 0), transposed=True, before=("relu",)),
        {"joined": 0},
    ),
    "transposed, phases joined": (
        Case((5, 12), 3, 9, (5, 5), (2, 2), (2, 1), output_padding=(1, 1), transposed=True),
        {"joined": 2, "stay": False},
    ),
    "transposed, planes": (
        Case((4, 5, 12), 4, 9, (3, 3, 3), (1, 2, 2), (1, 1, 1), ONE, output_padding=(0, 1, 1), transposed=True),
        {},
    ),
    "producers": (Case((20, 20), 3, 9, (5, 3)), {"producers": 4}),
    "producers, two teams": (Case((20, 20), 9, 9), {"chunk": 12, "producers": 8}),
    "producers, weights too": (Case((20, 20), 33, 9, (5, 3)), {"producers": 4, "stay": False, "chunk": 12}),
    "channels last": (Case((9, 21), 12, 9, padding=(1, 2), channels_last=True), {}),
    "channels last, no whole vectors": (Case((9, 21), 3, 9, (3, 2), channels_last=True), {}),
    "bfloat16": (Case((9, 20), 20, 9, (3, 4), dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"), {}),
    "float16": (Case((9, 20), 3, 9, (3, 3), dtype=F16), {}),
    "float16, parts": (Case((9, 20), 70, 9, (3, 3), dtype=F16), {"chunk": 24}),
    "over both": (Case((9, 21), 9, 9, fold="logsumexp", fold_dims="cp"), {}),
}
EACH = [pytest.param(name, way, id=f"{name}, {way}") for name in CASES for way in WAYS]


@pytest.mark.parametrize(("name", "way"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(name: str, way: str) -> None:
    """In one order of threads each."""
    right(*found(*CASES[name], way), ORDERS[[*CASES].index(name) % 3])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), EACH)
def test_all_orders_agree(name: str, way: str) -> None:
    assert_orders_agree(*found(*CASES[name], way))


@pytest.mark.parametrize("name", ["strides", "one tap", "parts of channels and rows", "producers, two teams"])
@pytest.mark.parametrize("way", WAYS)
def test_orders_agree(name: str, way: str) -> None:
    """All orders of threads give the same bits."""
    assert_orders_agree(*found(*CASES[name], way))


# Rows without another, taps without another, both by strides; channels that fill a vector; parts; phases.
ALONE = (
    "strides",
    "one dimension, strides",
    "one tap",
    "uneven parts of rows, one vector",
    "parts of a run and one more",
)
PHASES = "windows in pieces", "taps as channels", "transposed, phases joined", "producers, two teams", "float16, parts"


@pytest.mark.parametrize("name", [*ALONE, *PHASES])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled
def test_what_is_not_finite(name: str, way: str) -> None:
    """An input meets no zeros that are no weights."""
    assert_not_finite_as_eager(*found(*CASES[name], way))


SPREAD: dict[str, tuple[Case, dict[str, Any]]] = {
    "rows": (Case((9, 40), 9, 3, (4, 5)), {}),
    "an odd number of rows": (Case((12, 40), 3, 3, (5, 3), padding=(2, 1)), {}),
    "one row, parts": (Case((70,), 33, 4, (7,), (1,), (3,), (1,)), {"chunk": 12}),
    "parts of rows": (Case((12, 40), 20, 5, (5, 4)), {"stay": False, "chunk": 20, "tap_rows": 2}),
}


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.sampled
def test_spread_taps(name: str) -> None:
    case, wanted = SPREAD[name]
    f, t = best(lambda f: [t for t in odd_tiles(f, ("positions",)) if getattr(t, "spread", 0)], case, wanted)
    right(f, t)
    assert_orders_agree(f, t)
    assert_not_finite_as_eager(f, t)


@pytest.mark.parametrize(
    "name", ["uneven parts of rows", "parts of a run and one more", "taps as channels", "transposed, phases joined"]
)
@pytest.mark.parametrize("way", WAYS)
def test_sanitizers_find_nothing(name: str, way: str) -> None:
    right(*found(*CASES[name], way), sanitize=True)


@pytest.mark.parametrize("name", ["strides", "parts of channels and rows", "one dimension", "one vector at a time"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", [ORDERS[0], *(pytest.param(order, marks=pytest.mark.slow) for order in ORDERS[1:])])
def test_blocks_with_several_tiles(name: str, way: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with few multiprocessors."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    case, wanted = CASES[name]
    small = {"cells_h": 1, "eights_w": 1} if way == "features" else {"wide": False, "tiles_h": 1, "tiles_w": 1}
    f, t = found(case, {**wanted, "groups_h": 1, "groups_w": 1, **small}, way)
    assert_several_tiles(f, t)
    right(f, t, order)


@pytest.mark.parametrize("blocks", [1, 3])
def test_clusters_finish_samples_in_one_launch(blocks: int) -> None:
    f, t = found(CASES["over both"][0], {"groups_w": 1, "groups_h": 1, "stay": True}, "positions")
    assert len(kernel(f, t, blocks).launches) == 1
    for order in ORDERS:
        right(f, t, order, blocks=blocks)


def odd(seed: int) -> tuple[Found, Tile]:
    """A random case whose channels are an odd number of vectors."""
    for more in range(1000):
        f, rng, every = drawn(tiles, 300_000 * (seed + 1) + more)
        some = odd_of(f, every)
        if some:
            return f, rng.choice(some)
    raise AssertionError("no case has any")


@pytest.mark.parametrize("seed", range(6))
def test_random_cases(seed: int) -> None:
    right(*odd(seed), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 86))
def test_more_random_cases(seed: int) -> None:
    right(*odd(seed), ORDERS[seed % 3])


# -- what is multiplied, and that all of it matters


@pytest.mark.parametrize(
    ("case", "vectors"),
    [
        pytest.param(Case((11, 27), 3, 9, (4, 3)), 12, id="whole pairs"),
        pytest.param(Case((11, 27), 3, 9, (3, 3)), 10, id="one tap twice"),
        pytest.param(Case((11, 27), 3, 9, (3, 4)), 12, id="a row's taps"),
        pytest.param(Case((11, 27), 9, 9, (1, 1)), 4, id="nothing to pair"),
        pytest.param(Case((11, 27), 9, 9, (7, 7), (2, 2)), 98 + 50, id="taps two apart"),
        pytest.param(Case((11, 27), 5, 9, (3, 3)), 18, id="even"),
    ],
)
def test_vectors_that_are_multiplied(case: Case, vectors: int) -> None:
    f = find(case)
    assert isinstance(f, Found)
    t = next(t for t in tiles(f, ("features",)) if t.chunk >= case.channels and not t.unfolded)
    rows, per_row = case.kernel
    assert multiplied_vectors(f.group, t.chunk // vector(f.group), Taps(rows, per_row), rows) == vectors


def test_parts_of_channels() -> None:
    """Those of an odd number of vectors are of equal size."""
    sizes = {
        n: chunk_sizes(f.group) for n in (3, 4, 8, 12, 24, 36, 60) if isinstance(f := find(Case((9, 9), n, 9)), Found)
    }
    assert sizes == {
        3: [4], 4: [4], 8: [8], 12: [8, 4, 12], 24: [8, 16, 24], 36: [8, 16, 32, 4, 12, 36],
        60: [8, 16, 32, 4, 12, 20, 60],
    }  # fmt: skip


@pytest.mark.parametrize(("channels", "vectors"), [(4, 1), (12, 3), (20, 2), (36, 3)])
@pytest.mark.sampled
def test_runs(channels: int, vectors: int) -> None:
    f, t = found(Case((9, 21), channels, 9), {"chunk": channels}, "features")
    assert run(of_tile(f.group, t), t) == vectors


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        pytest.param(r"max\(one, other\) - start\)", "max(one, other) - start + 1)", id="rows further apart"),
        pytest.param(r"max\(one, other\) - start\)", "PLANE)", id="the next plane"),
        pytest.param(r"two \? BESIDE : 0", "0", id="taps that are not beside each other"),
        pytest.param(r"two \? BESIDE : 0", "BESIDE", id="one that has none beside it"),
        pytest.param(r"weight;\n    else", "weight;\n    else if (false)", id="no halves"),
        pytest.param(r"0\.5f \* weight", "weight", id="whole halves"),
        pytest.param(r"first \+ rows; row \+= 2", "first + rows; row += 1", id="rows twice"),
    ],
)
def test_what_the_emulator_would_find(pattern: str, by: str) -> None:
    f, t = found(Case((11, 27), 9, 9, (3, 3)), {"stay": True, "chunk": 12}, "positions")
    record = kernel(f, t)
    source, count = re.subn(pattern, by, record.source)
    assert count == 1
    x = f.case.example()
    want, size = f.reference(x)
    try:
        got = emulate(replace(record, source=source), *f.tensors(x))
    except EmulationError:  # what nobody wrote is multiplied
        return
    assert not ((got.double() - want).abs() / (size + 1e-3)).max() <= 10 * tolerance(f.case)


def test_halves_are_exact() -> None:
    """What one tap multiplies twice has the bits of what is multiplied once."""
    f, t = found(Case((9, 21), 3, 9, (1, 1), bias=False), {}, "positions")
    x, (_, weight, *_) = f.case.example(), f.tensors(f.case.example())
    got = emulate(kernel(f, t), *f.tensors(x))
    want = torch.nn.functional.conv2d(x.double(), f.case.short(weight).double())
    assert (got.double() - want).abs().max() <= 1e-6


def test_golden() -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES["strides"], "features")
    assert kernel(f, t).source == (GOLDEN / "contraction_warpgroup_pairs.cu").read_text()


# -- what compiles for sm_90a: few registers, real sizes


def test_few_registers_compile() -> None:
    """However many blocks there is room for, each thread has the registers that an instruction needs."""
    f, t = found(Case((9, 21), 3, 9, (1, 1), bias=False), {"groups_w": 3, "producers": 0}, "positions")
    assert nvrtc.compile(kernel(f, t).source, cuda.ARCH)


REAL = {
    "colours": (Case((224, 224), 3, 40, (7, 7), (2, 2), (3, 3), before=("relu",)), {"chunk": 4}),
    "many vectors": (Case((96, 96), 51, 40, (3, 3), before=("relu",)), {"chunk": 52}),
    "groups": (
        Case((58, 42, 40), 10, 17, (6, 6, 6), (3, 3, 3), (1, 0, 2), ONE, before=("mish",)),
        {"unfolded": "d", "chunk": 12},
    ),
    "rows of taps in parts": (Case((96, 96), 100, 40, (5, 5), before=("relu",)), {"chunk": 20, "stay": False}),
    "transposed": (Case((64, 64), 9, 40, (4, 4), (2, 2), (1, 1), transposed=True, before=("relu",)), {}),
    "sound": (Case((4096,), 12, 40, (7,), (1,), (3,), (1,), before=("relu",)), {"chunk": 12}),
    "bfloat16": (Case((128, 128), 3, 40, (7, 7), (2, 2), (3, 3), dtype=BF16, before=("relu",)), {}),
}


@pytest.mark.parametrize("producers", [0, 4])
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled
def test_compiles_without_spills(name: str, way: str, producers: int) -> None:
    case, wanted = REAL[name]
    f, t = found(case, {**wanted, "producers": producers}, way)
    resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, cuda.ARCH))
    assert all(r.stack == 0 for r in resources.values()), (t, resources)
    assert resources["fused_test"].registers * t.threads <= 65536
