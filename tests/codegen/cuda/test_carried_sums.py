"""Warpgroups that go along d, and multiply 64 positions of a plane by all taps along d that read it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contraction_cases import Case, Found, find
from cuda.core import Program, ProgramOptions
from emulation.build import EmulationError
from emulation.emulate import ORDERS
from warpgroup_cases import (
    BF16,
    F16,
    assert_not_finite_as_eager,
    assert_orders_agree,
    best,
    drawn,
    first,
    kernel,
)
from warpgroup_cases import assert_right as assert_as_eager

from fusewright.codegen.cuda import contraction_record
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.codegen.cuda import warpgroup_carried as text
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup_carried
from fusewright.schedule import warpgroup_positions as positions
from fusewright.schedule.warpgroup_carried import CarriedTile, carried, in_parts
from fusewright.schedule.warpgroup_estimate import HOPELESS

GOLDEN = Path(__file__).parents[2] / "golden"


def tiles(f: Found) -> list[CarriedTile]:
    return [t for _, t in warpgroup_carried.candidates(f.group, f.cells, tf32=True)]


def found(case: Case, wanted: dict[str, Any]) -> tuple[Found, CarriedTile]:
    """The group of a case, and the best tile that is as wanted."""
    return best(tiles, case, wanted)


def assert_right(f: Found, t: CarriedTile, order: str = "forward", **how: Any) -> None:
    """As the model in float64, with sums that are carried."""
    source = kernel(f, t).source
    assert "make_room(products[0]);" in source and f"slab < {t.slabs}; ++slab" in source
    assert_as_eager(f, t, order, **how)


ONES, TWOS, THREES = (1, 1, 1), (2, 2, 2), (3, 3, 3)


def volume(*given: Any, **more: Any) -> Case:
    """A case in three dimensions."""
    names = "sizes", "channels", "features", "kernel", "stride", "padding", "dilation"
    how = {"kernel": THREES, "stride": ONES, "padding": (0, 0, 0), "dilation": ONES, "output_padding": (0, 0, 0)}
    return Case(**{**how, **dict(zip(names, given, strict=False)), **more})


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "two dimensions": (Case((14, 70), 9, 3, (3, 5)), {"wide": True, "groups_w": 1}),
    "two dimensions, padding": (Case((14, 30), 16, 9, padding=(1, 1), before=("relu",)), {"wide": True}),
    "three dimensions": (volume((8, 9, 10), 16, 5, THREES, ONES, ONES), {"wide": False}),
    "parts of the way": (volume((30, 9, 10), 8, 5, THREES, ONES, ONES), {}),
    "chunks of channels": (volume((7, 9, 10), 40, 5, THREES, ONES, ONES), {"chunk": 16}),
    "chunks, packed weights": (
        volume((7, 9, 10), 40, 5, THREES, ONES, ONES),
        {"chunk": 16, "stay": False, "tap_rows": 3},
    ),
    "rows of taps in parts": (
        volume((7, 9, 10), 20, 5, (2, 3, 2), ONES, ONES),
        {"chunk": 8, "stay": False, "tap_rows": 1},
    ),
    "producers": (volume((9, 9, 10), 16, 5, THREES, ONES, ONES), {"producers": 4}),
    "producers in turns": (volume((9, 9, 10), 32, 5, THREES, ONES, ONES), {"producers": 8, "chunk": 16}),
    "producers, packed weights": (
        volume((9, 9, 10), 32, 5, THREES, ONES, ONES),
        {"producers": 4, "chunk": 16, "stay": False, "tap_rows": 3},
    ),
    "strides": (volume((13, 9, 10), 16, 5, (4, 3, 3), TWOS, ONES), {}),
    "strides, planes of their own": (volume((13, 9, 10), 16, 5, (5, 3, 2), (2, 1, 1), ONES), {"chunk": 16}),
    "larger strides than taps are left": (volume((13, 9, 10), 16, 5, (4, 2, 2), (3, 1, 1), ONES), {"chunk": 16}),
    "planes of their own, packed": (
        volume((13, 9, 10), 32, 5, (5, 3, 2), (2, 1, 1), ONES),
        {"chunk": 16, "stay": False, "tap_rows": 3},
    ),
    "dilation": (volume((13, 9, 10), 16, 5, THREES, ONES, TWOS, TWOS), {}),
    "dilation and strides": (volume((20, 9, 10), 16, 5, THREES, (2, 1, 1), (2, 1, 1), (3, 1, 1)), {}),
    "dilation and as large strides": (volume((13, 9, 10), 16, 5, THREES, (2, 1, 1), (2, 1, 1), (2, 1, 1)), {}),
    "taps along h as channels": (volume((9, 9, 10), 3, 5, THREES, ONES, ONES), {"unfolded": "h"}),
    "taps along h alone": (Case((9, 20), 3, 5, (3, 1)), {}),
    "taps along h side by side": (volume((9, 9, 10), 5, 5, THREES, ONES, ONES), {"unfolded": "H"}),
    "an odd number of vectors": (volume((9, 9, 10), 12, 5, (3, 3, 2), ONES, ONES), {"chunk": 12}),
    "an odd number of rows and vectors": (volume((9, 9, 10), 12, 5, THREES, ONES, ONES), {"chunk": 12}),
    "several of everything": (
        volume((9, 40, 50), 8, 3, THREES, ONES, ONES),
        {"groups_h": 1, "groups_w": 2, "tiles_h": 3, "tiles_w": 2},
    ),
    "several along w": (volume((9, 20, 70), 8, 3, THREES, ONES, ONES), {"wide": False, "tiles_w": 2, "groups_w": 2}),
    "many features": (volume((9, 9, 10), 16, 40, THREES, ONES, ONES, before=("both",), after=("times channel",)), {}),
    "groups": (volume((9, 9, 10), 5, 6, THREES, ONES, ONES, groups=3, fold="sum", fold_dims="p"), {}),
    "over channels": (volume((9, 9, 10), 16, 11, THREES, ONES, ONES, fold="logsumexp", fold_dims="c"), {}),
    "over both": (volume((9, 9, 10), 8, 7, (2, 3, 3), before=("add channel",), fold="max", fold_dims="cp"), {}),
    "over positions": (volume((9, 9, 10), 8, 7, (2, 3, 3), before=("tanh",), fold="mean", fold_dims="p"), {}),
    "softmax": (volume((9, 9, 10), 8, 13, THREES, softmax="softmax", after=("gate",)), {}),
    "windows": (
        volume((10, 9, 10), 16, 5, THREES, ONES, ONES, pool="max", window=(2, 2, 2), step=TWOS, before=("relu",)),
        {},
    ),
    "windows with gaps, planes of none": (
        volume(
            (18, 9, 10), 16, 5, (2, 3, 3), dilation=(4, 1, 1), pool="max", window=TWOS, step=(5, 2, 2), before=("relu",)
        ),
        {"chunk": 8},
    ),
    "averages at the ends of rows": (
        Case((14, 20), 16, 5, (4, 3), pool="avg", window=(3, 2), step=(2, 2), pool_padding=(1, 0), include_pad=False),
        {"chunk": 16},
    ),
    "windows that overlap": (
        volume((10, 9, 10), 16, 5, THREES, ONES, ONES, pool="avg", window=(3, 2, 2), step=TWOS, pool_padding=(1, 0, 0)),
        {"chunk": 16, "producers": 4},
    ),
    "windows with gaps": (
        volume((14, 9, 10), 16, 5, THREES, ONES, ONES, pool="max", window=(2, 2, 2), step=(3, 2, 2)),
        {"chunk": 16},
    ),
    "windows over channels": (
        Case((14, 30), 16, 5, pool="max", window=(2, 3), step=(2, 3), fold="sum", fold_dims="c", after=("gate",)),
        {},
    ),
    "transposed": (volume((6, 5, 8), 16, 3, THREES, ONES, ONES, transposed=True, before=("relu",)), {}),
    "transposed, phases": (volume((6, 5, 8), 16, 3, (5, 3, 3), TWOS, ONES, transposed=True), {}),
    "transposed, phases along d alone": (volume((6, 5, 8), 16, 3, (6, 3, 3), (3, 1, 1), ONES, transposed=True), {}),
    "transposed, two dimensions": (
        Case((8, 20), 9, 3, (5, 4), (2, 2), (1, 1), transposed=True, fold="logsumexp", fold_dims="c"),
        {},
    ),
    "transposed, phases without taps along w": (
        volume((6, 5, 8), 16, 3, (3, 3, 3), (1, 1, 2), (0, 0, 1), (1, 1, 2), transposed=True, before=("add channel",)),
        {},
    ),
    "transposed, dilation": (volume((7, 5, 8), 16, 3, THREES, ONES, ONES, TWOS, transposed=True), {}),
    "transposed, windows": (
        volume((6, 5, 8), 16, 3, (5, 3, 3), TWOS, ONES, transposed=True, pool="avg", window=TWOS, step=TWOS),
        {},
    ),
    "channels last": (Case((14, 30), 16, 6, padding=(1, 2), before=("relu",), channels_last=True), {}),
    "bfloat16": (volume((9, 9, 10), 16, 9, THREES, ONES, ONES, dtype=BF16, before=("hardswish",)), {}),
    "float16, words": (Case((14, 40), 20, 3, (3, 5), dtype=F16), {}),
    "rows by way of shared memory": (Case((14, 40), 8, 3), {"by_rows": True}),
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
    """No plane meets weights of positions that it does not belong to."""
    assert_not_finite_as_eager(*found(case, wanted))


@pytest.mark.parametrize("name", ["chunks, packed weights", "strides, planes of their own", "producers", "windows"])
def test_sanitizers_find_nothing(name: str) -> None:
    f, t = found(*CASES[name])
    assert_right(f, t, sanitize=True)


def test_what_the_emulator_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of planes that belong to different positions meet in registers: the first have to be waited for."""
    f, t = found(*CASES["strides, planes of their own"])
    monkeypatch.setattr(text, "_APART", text._APART.replace("    warpgroup_wait();\n", ""))
    with pytest.raises(EmulationError, match="before its products have been waited for"):
        assert_right(f, t)


@pytest.mark.parametrize("name", ["dilation", "over both", "producers in turns", "windows that overlap"])
def test_parts_of_the_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block has several of them, as on a device with few multiprocessors."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    f, t = found(*CASES[name])
    for run in range(1, t.run):
        assert_right(f, replace(t, run=run), ORDERS[run % 3])


def test_a_way_is_cut_where_multiprocessors_would_have_nothing_to_do() -> None:
    """Of twenty planes of one tile, for one sample eight parts, for many none."""
    f, t = found(volume((20, 9, 10), 16, 5, THREES, ONES, ONES), {"groups_h": 2, "groups_w": 2, "wide": False})
    assert [in_parts(f.group, t, f.cells, n).run for n in (1, 66, 132)] == [3, 10, 20]


def carried_of(seed: int) -> tuple[Found, CarriedTile]:
    """A random case with sums that are carried."""
    f, rng, every = drawn(tiles, 300_000 * (seed + 1))
    t = rng.choice(every)
    return f, replace(t, run=rng.randint(1, t.run))


@pytest.mark.parametrize("seed", range(6))
def test_random_cases(seed: int) -> None:
    assert_right(*carried_of(seed), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 86))
def test_more_random_cases(seed: int) -> None:
    assert_right(*carried_of(seed), ORDERS[seed % 3])


@pytest.mark.parametrize(
    ("case", "planes"),
    [
        pytest.param(volume((9, 9, 9), 8, 3), 1, id="every plane"),
        pytest.param(volume((9, 9, 9), 8, 3, stride=(2, 1, 1)), 2, id="two planes at a time"),
        pytest.param(volume((9, 9, 9), 8, 3, stride=(2, 1, 1), dilation=(2, 1, 1)), 1, id="every second plane"),
        pytest.param(Case((9, 9), 8, 3), 1, id="rows"),
    ],
)
def test_planes_of_a_slab(case: Case, planes: int) -> None:
    f = find(case)
    assert isinstance(f, Found)
    group = carried(f.group)
    assert group is not None and group.carried is not None
    assert len(group.carried.taps) == planes
    assert sorted(tap for row in group.carried.taps for tap in row if tap >= 0) == [0, 1, 2]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((30,), 16, 9, (3,), (1,), (0,), (1,)), id="one dimension"),
        pytest.param(volume((9, 9, 9), 16, 9, (1, 3, 3)), id="one tap along d"),
        pytest.param(Case((9, 9), 3, 9, (1, 3)), id="one tap along h"),
        pytest.param(volume((9, 9, 9), 16, 9, (2, 3, 3), (2, 1, 1)), id="planes of one position each"),
        pytest.param(volume((19, 9, 9), 8, 3, stride=(3, 1, 1), dilation=(2, 1, 1)), id="residues of one plane each"),
        pytest.param(volume((9, 9, 9), 16, 9, stride=(4, 1, 1), transposed=True), id="planes of no position"),
    ],
)
def test_where_there_is_nothing_to_carry(case: Case) -> None:
    f = find(case)
    assert isinstance(f, Found)
    assert carried(f.group) is None and not tiles(f)


# -- what compiles: real sizes, for sm_90a

REAL = {
    "few features of many channels": volume((28, 28, 27), 71, 9, (6, 6, 6), TWOS, (1, 0, 1)),
    "groups": volume((57, 45, 43), 5, 6, (6, 6, 6), (1, 1, 2), (0, 5, 1), TWOS, groups=8, transposed=True),
    "rows": Case(
        (79, 65), 15, 8, (6, 6), (1, 1), (0, 0), (1, 3), groups=4, transposed=True, fold="max", fold_dims="cp"
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_compiles_without_spills(name: str) -> None:
    f = find(REAL[name])
    assert isinstance(f, Found)
    for t in first(warpgroup_carried, f, 2):
        found = nvrtc.resources(nvrtc.compile(kernel(f, t).source, cuda.ARCH))["fused_test"]
        assert found.stack == 0, t


def what_nvrtc_says(source: str) -> str:
    """Of a kernel that compiles, the assembler's remarks among it."""
    log = io.StringIO()
    options = ProgramOptions(arch=cuda.ARCH, **nvrtc.OPTIONS)
    Program(source, "c++", options).compile("cubin", logs=log)
    return log.getvalue()


UNLIKE = {
    "strides": volume((40, 45, 43), 16, 6, THREES, (2, 1, 1), ONES),
    "windows": Case((158, 210), 16, 3, (3, 4), padding=(2, 1), pool="avg", window=(3, 2), step=(3, 3), after=("mish",)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_products_of_planes_of_their_own_are_not_waited_for_one_by_one(name: str) -> None:
    """Where instructions of different shapes share registers the assembler has each of a kernel's wait: C7511."""
    f = find(UNLIKE[name])
    assert isinstance(f, Found)
    group = carried(f.group)
    assert group is not None and group.carried is not None and not group.carried.alike
    for t in first(warpgroup_carried, f, 2):
        assert "serialized" not in what_nvrtc_says(kernel(f, t).source), t


def test_it_is_the_way_of_large_kernels_with_few_features() -> None:
    """Products of 64 positions by nine features would read each plane six times: the estimate knows."""
    f = find(REAL["groups"])
    assert isinstance(f, Found)
    of = [
        way.candidates(f.group, f.cells, tf32=True, hopeless=HOPELESS)[0][0] for way in (warpgroup_carried, positions)
    ]
    assert of[0] < of[1]


def test_golden() -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES["strides, planes of their own"])
    assert kernel(f, t).source == (GOLDEN / "contraction_warpgroup_carried.cu").read_text()
