"""Warps that only stage what others multiply: cases of both ways of warpgroups, emulated on the CPU."""

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

from fusewright.codegen.cuda import contraction_record
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup, warpgroup_positions
from fusewright.schedule.tiling import REGISTERS
from fusewright.schedule.warpgroup import WarpgroupTile
from fusewright.schedule.warpgroup_estimate import blocks_planned, handed_over, more_on_their_way
from fusewright.schedule.warpgroup_positions import PositionTile
from fusewright.schedule.warpgroup_staging import of_tile, shared_bytes, staged_by_thread, stages_every_step

GOLDEN = Path(__file__).parents[2] / "golden"
Tile = WarpgroupTile | PositionTile
WAYS = {"features": warpgroup, "positions": warpgroup_positions}
ONE = (1, 1, 1)


def tiles(f: Found, ways: tuple[str, ...] = tuple(WAYS)) -> list[Tile]:
    found = [t for way in ways for _, t in WAYS[way].candidates(f.group, f.cells, tf32=True)]
    return [t for t in found if t.producers]


def found(case: Case, wanted: dict[str, Any], way: str) -> tuple[Found, Tile]:
    return best(lambda f: tiles(f, (way,)), case, {"producers": 4, **wanted})


# Cases with what their tiles are to have, for both ways to multiply.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "all channels at once": (Case((20, 20), 5, 9, (3, 3), before=("relu",)), {"chunk": 8, "stay": True}),
    "chunks, weights stay": (Case((20, 20), 20, 9), {"chunk": 8, "stay": True}),
    "chunks and their weights": (Case((20, 20), 20, 9, before=("gelu",)), {"chunk": 8, "stay": False}),
    "rows of taps in parts": (Case((20, 20), 20, 9, (4, 3)), {"chunk": 8, "stay": False, "tap_rows": 1}),
    "rows of taps in uneven parts": (Case((20, 20), 20, 9, (5, 3)), {"chunk": 8, "stay": False, "tap_rows": 2}),
    "weights alone": (Case((20, 20), 5, 9, (4, 3)), {"chunk": 8, "stay": False, "tap_rows": 1}),
    "two teams, tile after tile": (Case((20, 20), 5, 9), {"chunk": 8, "stay": True, "producers": 8}),
    "two teams, chunk after chunk": (Case((20, 20), 20, 9), {"chunk": 8, "stay": False, "producers": 8, "tap_rows": 3}),
    "windows in pieces": (
        Case((25, 25), 5, 9, pool="max", window=(4, 3), step=(4, 3), after=("tanh",)),
        {"chunk": 8, "rows_h": 2, "stay": True},
    ),
    "windows in pieces and chunks": (
        Case((25, 25), 20, 9, pool="avg", window=(4, 3), step=(4, 3), fold="mean", fold_dims="p"),
        {"chunk": 8, "rows_h": 1, "stay": False},
    ),
    "phases": (
        Case((9, 14), 5, 9, (3, 3), (2, 2), (1, 1), transposed=True, output_padding=(1, 1)),
        {"chunk": 8, "joined": 0},
    ),
    "phases joined": (
        Case((9, 14), 20, 9, (3, 3), (2, 2), (1, 1), transposed=True, output_padding=(0, 0)),
        {"chunk": 8, "joined": 2, "stay": False},
    ),
    "phases without taps": (
        Case((9, 14), 20, 9, (1, 1), (2, 2), (0, 0), transposed=True, output_padding=(1, 0)),
        {"chunk": 8},
    ),
    "taps as channels": (Case((6, 7, 20), 5, 9, (3, 3, 3), ONE, ONE, ONE), {"unfolded": "d", "chunk": 8}),
    "taps as channels, two teams": (
        Case((6, 7, 20), 5, 9, (3, 3, 3), ONE, ONE, ONE),
        {"unfolded": "d", "chunk": 8, "producers": 8},
    ),
    "groups, over positions": (Case((20, 20), 8, 18, groups=2, fold="logsumexp", fold_dims="p"), {}),
    "over both": (Case((20, 20), 8, 18, fold="max", fold_dims="cp"), {}),
    "over channels": (Case((20, 20), 8, 70, fold="logsumexp", fold_dims="c"), {}),
    "channels last": (Case((20, 20), 16, 9, channels_last=True, before=("gate",)), {}),
    "bfloat16": (Case((20, 20), 40, 9, dtype=BF16), {"chunk": 16}),
    "float16": (Case((20, 20), 40, 9, dtype=F16, fold="sum", fold_dims="p"), {"chunk": 16, "producers": 8}),
}
EACH = [pytest.param(*of, way, id=f"{name}, {way}") for name, of in CASES.items() for way in WAYS]
# What positions alone have.
POSITIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "softmax": (Case((9, 40), 5, 12, softmax="softmax", after=("scale",)), {}),
    "numbers in shared memory": (Case((9, 40), 5, 100, before=("times channel", "add channel")), {}),
    "taps spread": (Case((9, 75), 8, 3, (3, 7), padding=(1, 3), before=("tanh",)), {"spread": 24}),
    "rows of the output": (Case((9, 71), 5, 12), {"by_rows": True, "wide": True}),
}


@pytest.fixture
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every block has several tiles."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize(("case", "wanted", "way"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(case: Case, wanted: dict[str, Any], way: str) -> None:
    """In all orders of threads, with the same bits."""
    f, t = found(case, wanted, way)
    source = kernel(f, t).source
    arrivals = source.count(ARRIVED)
    assert arrivals and len(re.findall(rf"fence_async\(\);\s+{re.escape(ARRIVED)}", source)) == arrivals
    assert_right(f, t)
    assert_orders_agree(f, t)


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.sampled
def test_of_positions(name: str) -> None:
    f, t = found(*POSITIONS[name], "positions")
    for order in ORDERS:
        assert_right(f, t, order)


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("producers", [4, 8])
@pytest.mark.parametrize("way", WAYS)
def test_twice_as_many_elements_on_their_way(way: str, producers: int) -> None:
    """Where a step has more than a producer reads at a time, both ways are worth measuring."""
    f = find(Case((36, 36), 20, 9))
    assert isinstance(f, Found)
    every = [t for t in tiles(f, (way,)) if t.producers == producers and not t.unfolded]
    t = next(t for t in every if t.twice)
    once = replace(t, twice=False)
    assert once in every and more_on_their_way(of_tile(f.group, t), once)
    at_once = [staged_by_thread(of_tile(f.group, each), each)[1] for each in (once, t)]
    assert at_once[0] < at_once[1] <= 2 * at_once[0]
    assert f"AT_ONCE = {at_once[1]};" in kernel(f, t).source
    assert_right(f, t)
    assert_orders_agree(f, t)


@pytest.mark.parametrize("name", ["all channels at once", "two teams, chunk after chunk", "phases joined"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite(name: str, way: str) -> None:
    assert_not_finite_as_eager(*found(*CASES[name], way))


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("name", ["rows of taps in uneven parts", "two teams, tile after tile", "taps as channels"])
@pytest.mark.parametrize("way", WAYS)
def test_sanitizers_find_nothing(name: str, way: str) -> None:
    assert_right(*found(*CASES[name], way), sanitize=True)


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("producers", [4, 8])
def test_blocks_with_several_tiles(producers: int) -> None:
    small = {"groups_h": 1, "groups_w": 1, "tiles_h": 1, "tiles_w": 1, "wide": False}
    f, t = found(Case((40, 40), 20, 9), {"chunk": 8, "producers": producers, **small}, "positions")
    assert_several_tiles(f, t)
    for order in ORDERS:
        assert_right(f, t, order)


def test_a_block_without_a_tile() -> None:
    """Of a sample smaller than the grid: its producers have nothing to stage, and nobody waits for them."""
    case = Case((9, 9), 5, 9, batch=1, fold="sum", fold_dims="p")
    for producers in (4, 8):
        assert_right(*found(case, {"stay": True, "chunk": 8, "producers": producers}, "positions"))


ARRIVED = "landing_close(landings + steps % 2);"
WAS_READ = "barrier_arrive(READ + steps % 2, MEETING);"


def _left_out(statement: str, by: str = "") -> tuple[str, str]:
    """A statement as a pattern, and what stands there instead."""
    return re.escape(statement), by


def _moved(statement: str, ahead_of: str) -> tuple[str, str]:
    """Text that stands between `ahead_of` and a statement, as a pattern, and with the statement first."""
    return rf"({re.escape(ahead_of)}(?:(?!{re.escape(ahead_of)}).)*?){re.escape(statement)}", rf"{statement} \1"


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        pytest.param(*_left_out("landing_wait(landings + steps % 2, steps / 2 % 2);"), id="nobody waits for operands"),
        pytest.param(
            *_left_out("if (steps > 1) barrier_wait(READ + steps % 2, MEETING);"), id="nor until they have been read"
        ),
        pytest.param(*_left_out("if (team == 1) skip();"), id="both teams stage the same"),
        pytest.param(*_left_out(WAS_READ), id="nobody says what has been read"),
        pytest.param(*_left_out("barrier_wait(READ + step % 2, MEETING);", ";"), id="nobody hears of the last steps"),
        pytest.param(*_moved(WAS_READ, "multiply<"), id="read before it is multiplied"),
        pytest.param(*_moved(WAS_READ, "warpgroup_wait();"), id="read while it is"),
        pytest.param(*_moved(ARRIVED, "stage_weights("), id="there before it is staged"),
        pytest.param(*_left_out("steps / 2 % 2", "0"), id="or for those of another turn"),
        pytest.param(*_left_out(ARRIVED), id="nobody says that they are there"),
    ],
)
def test_what_the_emulator_would_find(pattern: str, by: str) -> None:
    f, t = found(*CASES["two teams, chunk after chunk"], "positions")
    record = kernel(f, t)
    functions, bounds, text = record.source.partition("__launch_bounds__(ALL_THREADS")
    planted, count = re.subn(pattern, by, text, flags=re.DOTALL)
    assert count == 1
    x = f.case.example()
    want, size = f.reference(x)
    wrong = 0
    for order in ORDERS:
        try:
            got = emulate(replace(record, source=functions + bounds + planted), *f.tensors(x), order=order)
        except EmulationError:
            wrong += 1
        else:
            wrong += not ((got.double() - want).abs() / (size + 1e-3)).max() < 0.01
    assert wrong


@pytest.mark.usefixtures("few_multiprocessors")
def test_what_warps_exchange() -> None:
    """One warpgroup may be at the next tile while another still reads: the emulator's threads take turns too evenly to
    show what comes of that."""
    f, t = found(CASES["over channels"][0], {"chunk": 8, "groups_m": 2}, "features")
    source = kernel(f, t).source
    read = source.index("over = exchange[i]")
    assert source.index("barrier_wait(MULTIPLYING, THREADS);    // until what warps exchanged has been read") > read
    assert_right(f, t)
    assert_orders_agree(f, t)


def test_golden() -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES["two teams, chunk after chunk"], "positions")
    assert kernel(f, t).source == (GOLDEN / "contraction_warpgroup_producers.cu").read_text()


def random_case(seed: int) -> tuple[Found, Tile]:
    f, rng, some = drawn(tiles, 300_000 * (seed + 1))
    return f, rng.choice(some)


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed: int) -> None:
    assert_right(*random_case(seed), ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("seed", range(12, 132))
def test_more_random_cases(seed: int) -> None:
    assert_right(*random_case(seed), ORDERS[seed % 3])


@pytest.mark.parametrize(
    ("case", "wanted", "turns"),
    [
        (Case((20, 20), 20, 9), {"chunk": 8, "stay": True}, True),
        (Case((20, 20), 20, 9), {"chunk": 8, "stay": False, "tap_rows": 3}, True),
        (Case((20, 20), 20, 9), {"chunk": 8, "stay": False, "tap_rows": 1}, False),
        (Case((20, 20), 5, 9), {"chunk": 8, "stay": True}, True),
        (Case((20, 20), 5, 9, pool="max", window=(4, 4), step=(4, 4)), {"rows_h": 2, "stay": True}, False),
        (Case((9, 14), 5, 9, (3, 3), (2, 2), transposed=True, output_padding=(0, 0)), {"joined": 0}, False),
        (
            Case((9, 14), 5, 9, (3, 3), (2, 2), transposed=True, output_padding=(0, 0)),
            {"joined": 2, "stay": True},
            True,
        ),
    ],
)
@pytest.mark.sampled
def test_teams_take_turns_where_every_step_has_an_input(case: Case, wanted: dict[str, Any], turns: bool) -> None:
    f, t = found(case, wanted, "positions")
    assert stages_every_step(of_tile(f.group, t), t) == turns


# -- what compiles: real sizes, for sm_90a

REAL = {
    "chunks": (Case((250, 243), 79, 83, (2, 2), dilation=(2, 2), fold="max", fold_dims="cp"), {"stay": False}),
    "few features": (Case((263, 335), 53, 41, before=("gelu",), fold="sum", fold_dims="cp"), {}),
    "stored": (Case((128, 128), 64, 128, before=("relu",)), {}),
    "taps as channels": (Case((21, 19, 27), 29, 21, (3, 3, 3), (2, 2, 2), (0, 0, 1), ONE), {"unfolded": "d"}),
    "bfloat16": (Case((56, 56), 160, 200, (1, 1), padding=(0, 0), dtype=BF16, channels_last=True), {}),
}


@pytest.mark.parametrize("producers", [4, 8])
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in REAL for way in WAYS if (name, way) != ("stored", "positions")],  # features fill 64
)
@pytest.mark.sampled
def test_compiles_without_spills(name: str, way: str, producers: int) -> None:
    """Those that multiply may have more registers than the kernel is compiled for, by what the others leave them."""
    case, wanted = REAL[name]
    f = find(case)
    assert isinstance(f, Found)
    wanted = {"unfolded": "", "producers": producers, **wanted}
    fitting = [t for t in tiles(f, (way,)) if all(getattr(t, key) == value for key, value in wanted.items())]
    t = fitting[0]
    resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, cuda.ARCH))
    assert all(r.stack == 0 for r in resources.values()), (t, resources)
    c = of_tile(f.group, t)
    per_sm = blocks_planned(c, t, shared_bytes(c, t))
    each = REGISTERS // (t.threads * per_sm) // 8 * 8
    assert resources["fused_test"].registers <= each
    if handed_over(c, t, per_sm) is not None:  # who asks for more than a block was compiled for would wait for ever
        assert resources["fused_test"].registers == each


@pytest.mark.parametrize("first", range(6))
@pytest.mark.sampled
def test_registers_are_handed_over(first: int) -> None:
    """Within what a multiprocessor has, in the eights that hardware deals out; each looks at every sixth tile."""
    f = find(REAL["chunks"][0])
    assert isinstance(f, Found)
    handed = 0
    for t in tiles(f)[first::6]:
        c = of_tile(f.group, t)
        per_sm = blocks_planned(c, t, shared_bytes(c, t))
        if (each := handed_over(c, t, per_sm)) is not None:
            handed += 1
            staging, multiplying = each
            assert staging % 8 == multiplying % 8 == 0 and staging >= 24 and multiplying <= 240
            assert 32 * per_sm * (t.producers * staging + t.warps * multiplying) <= REGISTERS
            assert f"registers<{multiplying}>();" in kernel(f, t).source
            assert max(staging, multiplying) > REGISTERS // (t.threads * per_sm) // 8 * 8 > min(staging, multiplying)
    assert handed
