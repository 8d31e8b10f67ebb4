"""What is made of a position's channels and of reductions over these, in the tile of a convolution that has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from contraction_cases import AMONG, Case, Found, find
from emulation.emulate import emulate
from warpgroup_cases import F16, assert_not_finite_as_eager, assert_orders_agree, best, kernel
from warpgroup_cases import assert_right as assert_as_eager

from fusewright.capture import capture
from fusewright.runtime import nvrtc
from fusewright.schedule import contraction, warpgroup_positions
from fusewright.schedule.chain import Shares
from fusewright.schedule.kept_channels import KeptChannels
from fusewright.schedule.warpgroup_positions import PositionTile

WINDOWS: dict[str, Any] = {"window": (2, 2), "step": (2, 2), "pool_first": True}
UPWARDS: dict[str, Any] = {"stride": (2, 2), "padding": (1, 1), "transposed": True}


def tiles(f: Found) -> list[PositionTile]:
    return [t for _, t in warpgroup_positions.candidates(f.group, f.cells, tf32=True)]


def found(case: Case, wanted: dict[str, Any]) -> tuple[Found, PositionTile]:
    f, t = best(tiles, case, {"spread": 0, **wanted})
    kept = case.softmax in AMONG
    assert isinstance(f.group.shares, KeptChannels if kept else Shares) and f.group.shares_of_pooled == case.pool_first
    assert ("among_channels(values, quad);" if kept else "softmax(values);") in kernel(f, t).source
    return f, t


FINITE = [name for name in AMONG if name != "without freedom"]
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    **{f"{name}, whole": (Case((9, 21), 5, 16, softmax=name), {}) for name in FINITE},
    **{f"{name}, padded": (Case((9, 21), 5, 21, softmax=name), {"wide": True}) for name in FINITE},
    "function ahead": (Case((9, 21), 5, 20, before=("add channel", "selu"), softmax="less the greatest"), {}),
    "functions behind": (Case((9, 21), 5, 22, softmax="of length one", after=("add channel", "tanh")), {}),
    "no bias": (Case((9, 21), 5, 19, bias=False, softmax="gated by a mean"), {"wide": False}),
    "phases": (Case((5, 12), 9, 30, output_padding=(1, 1), softmax="of length one", **UPWARDS), {"joined": 1}),
    "phases apart": (Case((5, 12), 9, 30, before=("tanh",), softmax="standardised", **UPWARDS), {"joined": 0}),
    "pooled": (
        Case((9, 21), 9, 21, softmax="standardised", pool="max", window=(3, 2), step=(3, 2), after=("gate",)),
        {"rows_h": 3},
    ),
    "of a pool": (Case((9, 22), 5, 21, before=("relu",), softmax="less the greatest", pool="max", **WINDOWS), {}),
    "of averages": (Case((9, 22), 5, 16, softmax="standardised", pool="avg", after=("tanh",), **WINDOWS), {}),
    "shares of a pool": (Case((9, 22), 9, 21, softmax="softmax", pool="max", **WINDOWS), {}),
    "shares of a pool, windows that overlap": (
        Case(
            (9, 22),
            9,
            20,
            padding=(1, 1),
            softmax="softmax",
            pool="max",
            window=(3, 3),
            step=(2, 2),
            pool_padding=(1, 1),
            pool_first=True,
        ),
        {},
    ),
    "of averages, windows that overlap": (
        Case(
            (9, 22),
            9,
            20,
            softmax="of length one",
            pool="avg",
            window=(3, 2),
            step=(2, 1),
            pool_padding=(1, 1),
            include_pad=False,
            ceil_mode=True,
            pool_first=True,
        ),
        {},
    ),
    "shares of averages, over channels": (
        Case(
            (9, 22),
            9,
            20,
            softmax="softmax",
            pool="avg",
            after=("add channel", "gate"),
            fold="max",
            fold_dims="c",
            **WINDOWS,
        ),
        {},
    ),
    "shares of a pool, phases": (
        Case((5, 12), 9, 30, output_padding=(1, 1), softmax="log_softmax", pool="max", **WINDOWS, **UPWARDS),
        {},
    ),
    "over channels": (Case((9, 21), 9, 21, softmax="weighed by its shares", fold="sum", fold_dims="c"), {}),
    "over positions": (Case((9, 21), 9, 21, softmax="between its ends", fold="mean", fold_dims="p"), {}),
    "half precision": (Case((9, 21), 20, 17, softmax="gated by a mean", dtype=F16), {"chunk": 16}),
    "one dimension": (Case((150,), 5, 40, (5,), (1,), (2,), (1,), softmax="by its variance"), {"wide": True}),
}
EACH = [pytest.param(case, wanted, id=name) for name, (case, wanted) in CASES.items()]


@pytest.mark.parametrize(("case", "wanted"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(case: Case, wanted: dict[str, Any]) -> None:
    f, t = found(case, wanted)
    assert_as_eager(f, t)
    assert_orders_agree(f, t)


@pytest.mark.parametrize(("case", "wanted"), EACH)
@pytest.mark.sampled
def test_what_is_not_finite(case: Case, wanted: dict[str, Any]) -> None:
    assert_not_finite_as_eager(*found(case, wanted))


def test_a_correction_of_more_than_there_are() -> None:
    """Eager divides by 0 then."""
    f, t = found(Case((9, 21), 5, 21, softmax="without freedom"), {})
    got = emulate(kernel(f, t), *f.tensors(f.case.example()))
    assert torch.equal(got, torch.full_like(got, -float("inf")))


def test_taps_that_are_spread() -> None:
    case, _ = CASES["of length one, padded"]
    f, _ = best(tiles, replace(case, features=16), {})
    spread = next(t for t in tiles(f) if t.spread)
    assert "add_taps<" in kernel(f, spread).source
    assert_as_eager(f, spread)


def test_sanitizers_find_nothing() -> None:
    assert_as_eager(*found(*CASES["standardised, padded"]), sanitize=True)


@pytest.mark.parametrize("name", ["standardised", "weighed by its shares", "of length one"])
def test_compiles_without_spills(name: str) -> None:
    upwards = Case((64, 64), 32, 64, (4, 4), (2, 2), transposed=True, softmax=name)
    for case in (Case((96, 96), 24, 64, softmax=name), upwards):
        f = find(case)
        assert isinstance(f, Found)
        t = tiles(f)[0]
        resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, "sm_90a"))
        assert all(r.stack == 0 for r in resources.values()), (t, resources)


REFUSED = {
    "another operand": lambda y, p: (y + p) * y.mean(1, keepdim=True),
    "other dimensions": lambda y, p: y - y.amax((2, 3), keepdim=True),
    "an index": lambda y, p: y * (y.argmax(1, keepdim=True) > 3),
    "a second result of all channels": lambda y, p: (y - y.amax(1, keepdim=True)).flip(1) + y,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_position_has_is_left(name: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(5, 16, 3)
            self.p = torch.nn.Parameter(torch.ones(16, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return REFUSED[name](self.conv(x), self.p)  # type: ignore[no-any-return]

    graph = capture(Model(), (torch.randn(2, 5, 9, 9),), {}).graph
    assert isinstance(contraction.match(graph.outputs[0], graph.users()), str)


def test_groups_have_channels_of_their_own() -> None:
    assert "no groups" in str(find(Case((9, 21), 5, 16, groups=2, softmax="standardised")))


def test_the_group_may_end_ahead_of_it() -> None:
    f, _ = found(*CASES["function ahead"])
    assert isinstance(f.group.shares, KeptChannels)
    assert contraction.may_end(f.group) is f.group.shares.value
