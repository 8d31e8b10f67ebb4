"""Float32 contractions that warpgroups multiply as halves: the generated CUDA C++ runs on the CPU, and is compared with
float64; where halves do not hold the numbers, what multiplies in tf32 has to step in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from contraction_cases import Case, Found, find
from emulation.build import EmulationError
from emulation.emulate import ORDERS, emulate
from warpgroup_cases import assert_kernel_right, drawn, nan, only

from fusewright.codegen.cuda import contraction_record, generate, options
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.emit.kernel_text import parameters_of
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup, warpgroup_pools, warpgroup_positions
from fusewright.schedule.changed import changed
from fusewright.schedule.groups import Group
from fusewright.schedule.warpgroup_estimate import HOPELESS
from fusewright.schedule.warpgroup_staging import in_halves, takes_halves

GOLDEN = Path(__file__).parents[2] / "golden"

WAYS = {"features": warpgroup, "positions": warpgroup_positions, "pools": warpgroup_pools}

# A case, how it is cut, and what of a tile it is to have.
CASES: dict[str, tuple[Case, str, dict[str, Any]]] = {
    "weights stay": (Case((9, 21), 9, 20, before=("relu", "add channel")), "features", {"stay": True, "producers": 0}),
    "packed weights": (Case((9, 21), 40, 70, padding=(1, 2)), "features", {"stay": False, "chunk": 16, "producers": 0}),
    "producers": (Case((9, 21), 20, 70, padding=(1, 2)), "features", {"producers": 4}),
    "two teams": (Case((9, 21), 20, 70, padding=(1, 2), fold="max", fold_dims="c"), "features", {"producers": 8}),
    "producers, packed weights": (Case((9, 21), 40, 70), "features", {"producers": 4, "stay": False, "chunk": 16}),
    "held weights": (Case((12, 41), 16, 64, (3, 3)), "features", {"held": True}),
    "vectors in pairs": (Case((9, 21), 5, 20), "features", {"chunk": 8}),
    "transposed": (Case((5, 12), 9, 24, (3, 3), (2, 2), (1, 1), transposed=True, before=("relu",)), "features", {}),
    "taps as channels": (Case((12, 30), 9, 24, (5, 3)), "features", {"unfolded": "h"}),
    "positions": (Case((9, 21), 12, 16, padding=(1, 2), before=("gate",)), "positions", {"producers": 0}),
    "positions, groups": (Case((11, 33), 6, 9, (3, 4), (2, 3), (1, 2), (1, 2), groups=2), "positions", {}),
    "positions, producers": (Case((9, 21), 24, 16, fold="sum", fold_dims="p"), "positions", {"producers": 4}),
    "held positions": (Case((12, 70), 16, 16), "positions", {"held": True}),
    "spread taps": (Case((12, 40), 16, 2, (3, 5)), "positions", {"spread": 16}),
    "channels last": (Case((9, 21), 24, 70, padding=(1, 2), channels_last=True), "features", {"producers": 0}),
    "channels last, producers": (
        Case((9, 21), 16, 24, groups=2, fold="max", fold_dims="c", channels_last=True),
        "features",
        {"producers": 4},
    ),
    "channels last, odd": (Case((9, 21), 7, 9, stride=(2, 1), channels_last=True), "positions", {}),
    "windows across threads": (
        Case((14, 30), 9, 16, pool="max", window=(3, 3), step=(2, 2), fold="mean", fold_dims="p"),
        "pools",
        {},
    ),
    "three dimensions": (
        Case((5, 6, 19), 10, 16, (3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, fold="logsumexp", fold_dims="cp"),
        "positions",
        {},
    ),
}
EACH = [pytest.param(*each, id=name) for name, each in CASES.items()]


def tiles(f: Found, way: str, hopeless: float = inf) -> list[Any]:
    """Those whose estimates are below so many times the best one."""
    if not takes_halves(f.group, tf32=True):
        return []
    found = WAYS[way].candidates(in_halves(f.group), f.cells, tf32=True, hopeless=hopeless)
    return [changed(t, halves=True) for score, t in found if score < hopeless * found[0][0]]


@cache
def instead(case: Case, t: Any) -> Any:
    """The best tile that multiplies in tf32 and steps in for `t`; those far from the best are only looked at where none
    of the others does."""
    f = find(case)
    assert isinstance(f, Found)
    for module in WAYS.values():
        for hopeless in (HOPELESS, inf):
            found = module.candidates(f.group, f.cells, tf32=True, hopeless=hopeless)
            near = (other for score, other in found if score < hopeless * found[0][0])
            if (other := cuda.instead(f.group, t, near)) is not None:
                return other
    raise AssertionError(t)


def kernel(f: Found, t: Any) -> Kernel:
    """The kernel, whose text has both ways to multiply."""
    other = instead(f.case, t)
    made = cuda.generate(f.group, t, "fused_test", "def reference(*operands): ...", instead=other)
    assert "_fp16_" in made.source and "_tf32_" in made.source
    return made


def halves_alone(k: Kernel) -> Kernel:
    """The kernel without the launches that step in, as it is timed."""
    assert k.brief is not None and "_tf32" not in k.brief.source
    assert [launch for launch in k.launches if "in_tf32" not in launch.entry] == list(k.brief.launches)
    return k.brief


def found(case: Case, way: str, wanted: dict[str, Any]) -> tuple[Found, Any]:
    """The group of a case, and the best tile that is as wanted."""
    f = find(case)
    assert isinstance(f, Found), f
    return f, best(case, way, tuple(wanted.items()))


@cache
def best(case: Case, way: str, wanted: tuple[tuple[str, Any], ...]) -> Any:
    f = find(case)
    assert isinstance(f, Found)
    with only(dict(wanted)):
        near_and_far = (t for hopeless in (HOPELESS, inf) for t in tiles(f, way, hopeless))
        return next(t for t in near_and_far if all(getattr(t, key) == value for key, value in wanted))


@pytest.mark.parametrize(("case", "way", "wanted"), EACH)
@pytest.mark.sampled
def test_halves_do(case: Case, way: str, wanted: dict[str, Any]) -> None:
    """In all orders of threads, with the same bits, and nothing has to step in."""
    f, t = found(case, way, wanted)
    k, x = kernel(f, t), case.example()
    first, *others = (assert_kernel_right(f, k, x, order) for order in ORDERS)
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(first, emulate(halves_alone(k), *f.tensors(x)))


# How many times as large one channel's numbers are, and its weights.
BEYOND: dict[str, tuple[float, float]] = {
    "numbers too large": (1e5, 1e-2),
    "numbers too small": (1e-6, 1e4),
    "weights too large": (1e-2, 1e7),
    "weights too small": (1e3, 1e-5),
}


def some_pairs(names: Sequence[Any], others: Iterable[Any]) -> list[Any]:
    """All pairs of these, of which `make test` has each of the others once, and the names by turns."""
    return [
        pytest.param(name, other, marks=() if i == j % len(names) else pytest.mark.slow)
        for j, other in enumerate(others)
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("name", "beyond"), some_pairs(["weights stay", "producers, packed weights", "positions", "channels last"], BEYOND)
)
def test_tf32_where_halves_do_not(name: str, beyond: str) -> None:
    """In one channel of the input, so that others are as they are."""
    f, t = found(*CASES[name])
    of_x, of_w = BEYOND[beyond]
    x = f.case.example()
    x[:, 0] = f.case.short(x[:, 0] * of_x)
    with torch.no_grad():
        f.model.conv.weight[:, 0] = f.case.short(f.model.conv.weight[:, 0] * of_w)
    k = kernel(f, t)
    assert_kernel_right(f, k, x)
    with pytest.raises(AssertionError, match="beyond"):
        assert_kernel_right(f, halves_alone(k), x)


@pytest.mark.parametrize(
    ("feature", "name"),
    some_pairs(
        [0, -1], ["weights stay", "packed weights", "producers", "transposed", "positions, groups", "spread taps"]
    ),
)
def test_tf32_where_all_weights_of_a_feature_are_small(name: str, feature: int) -> None:
    """What follows may make its values as large as others."""
    case, way, wanted = CASES[name]
    f, t = found(replace(case, before=("times channel",), bias=False, fold="", fold_dims=""), way, wanted)
    rows = f.model.conv.weight.movedim(1, 0) if f.case.transposed else f.model.conv.weight
    with torch.no_grad():
        rows[feature] *= 2.0**-20
        f.model.p[feature] *= 2.0**20
    k, x = kernel(f, t), f.case.example()
    assert_kernel_right(f, k, x)
    with pytest.raises(AssertionError, match="beyond"):
        assert_kernel_right(f, halves_alone(k), x)


@pytest.mark.parametrize(
    ("name", "value"),
    some_pairs(
        ["weights stay", "producers", "positions, producers", "windows across threads"], [inf, -inf, nan, 7e4, -3e38]
    ),
)
def test_one_number_that_is_no_half(name: str, value: float) -> None:
    f, t = found(*CASES[name])
    k, x = kernel(f, t), f.case.example()
    x[tuple(n // 2 for n in x.shape)] = value
    want, _ = f.reference(x)
    got = emulate(k, *f.tensors(x)).double()
    torch.testing.assert_close(got.isnan(), want.isnan())
    torch.testing.assert_close(got[want.isinf()], want[want.isinf()])
    there = want.isfinite()
    assert ((got - want)[there].abs() <= 2e-3 * (1 + want[there].abs())).all()


@pytest.mark.parametrize("name", ["weights stay", "producers", "held weights", "positions, producers"])
def test_weights_that_stay_are_copied(name: str) -> None:
    """A launch lays them out, and a block that does not wait until they are there is found."""
    case, way, wanted = CASES[name]
    f, t = found(case, way, {**wanted, "stay": True})
    k, x = kernel(f, t), f.case.example()
    assert [launch.entry for launch in k.launches[:2]] == ["fused_test_pack", "fused_test"]
    wait = "landing_wait(weights, 0);"
    assert k.source.count(wait) == 1 and k.source.count("copy_bulk(w_tile, packed") == 1
    with pytest.raises(EmulationError):
        emulate(replace(k, source=k.source.replace(wait, "")), *f.tensors(x))


@pytest.mark.parametrize(
    "name",
    [
        *("weights stay", "packed weights", "producers", "producers, packed weights"),
        *("held positions", "channels last"),
    ],
)
def test_sanitizers_find_nothing(name: str) -> None:
    f, t = found(*CASES[name])
    assert_kernel_right(f, kernel(f, t), f.case.example(), sanitize=True)


@pytest.mark.parametrize("name", ["stored", "over channels", "over positions"])
def test_blocks_with_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with few multiprocessors."""
    monkeypatch.setattr(contraction_record, "MULTIPROCESSORS", 1)
    case = {
        "stored": Case((9, 40), 20, 9),
        "over channels": Case((9, 40), 12, 70, fold="logsumexp", fold_dims="c"),
        "over positions": Case((9, 40), 12, 9, fold="sum", fold_dims="p"),
    }[name]
    small = {"groups_h": 1, "groups_w": 1, "cells_h": 1, "eights_w": 1}
    for producers in (0, 4):
        f, t = found(case, "features", {**small, "producers": producers})
        k = kernel(f, t)
        for order in ORDERS:
            assert_kernel_right(f, k, f.case.example(), order)


# -- what compiles: real sizes, for sm_90a


REAL = {
    "relu": Case((126, 126), 64, 128, before=("relu", "add channel")),
    "over channels": Case((126, 126), 64, 128, before=("scale",), fold="max", fold_dims="c"),
    "pool": Case((126, 126), 64, 128, before=("hardswish",), pool="max", window=(2, 2), step=(2, 2)),
    "channels last": Case((126, 126), 64, 128, before=("relu",), channels_last=True),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("producers", [0, 4])
def test_compiles_without_spills(name: str, producers: int) -> None:
    """Both kernels in one text."""
    f, t = found(REAL[name], "features", {"producers": producers})
    resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, "sm_90a"))
    assert {"fused_test", "fused_test_in_tf32"} <= resources.keys()
    assert all(r.stack == 0 for r in resources.values()), (t, resources)


@pytest.mark.parametrize("name", ["weights stay", "packed weights"])
def test_names_of_types_are_known_behind_it(name: str) -> None:
    """The C++ that launches, in a solution, is written with them."""
    k = kernel(*found(*CASES[name]))
    types = [p.type for launch in k.launches for p in parameters_of(k.source, launch.entry)]
    nvrtc.compile(f"{k.source}\n__device__ void launch({', '.join(types)});\n", "sm_90a")


def test_golden() -> None:
    """The text of one kernel, to be read."""
    f, t = found(*CASES["producers, packed weights"])
    assert kernel(f, t).source == (GOLDEN / "contraction_warpgroup_halves.cu").read_text()


# -- where they are an option


@pytest.mark.parametrize(
    ("samples", "tf32", "capability", "wanted"),
    [(64, True, 90, True), (64, False, 90, False), (64, True, 80, False), (64, True, 100, False), (2, True, 90, False)],
)
def test_an_option_where_it_takes_long(samples: int, tf32: bool, capability: int, wanted: bool) -> None:
    """A second launch, which only looks, is not worth it where everything is done in no time."""
    f = find(REAL["relu"])
    assert isinstance(f, Found)
    group = Group("contraction", f.group, f.group.root, f.group.tensors)
    found = options(group, {f.group.x.shape[0]: samples}, {}, tf32=tf32, capability=capability)
    watched = [option for option in found if "instead" in option]
    assert bool(watched) == wanted
    for option in watched[::8]:
        k = generate(group, "fused_test", option, tf32=True)
        assert [note for note in k.notes if "float16" in note] and k.runs_on(90) and not k.runs_on(100)
        assert [launch.entry for launch in k.launches if "pack" not in launch.entry] == [
            "fused_test",
            "fused_test_in_tf32",
        ]


@pytest.mark.parametrize("seed", range(4))
def test_random_cases(seed: int) -> None:
    _random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 104))
def test_more_random_cases(seed: int) -> None:
    _random(seed)


def _random(seed: int) -> None:
    def any_tiles(f: Found) -> list[Any]:
        return [t for way in WAYS for t in tiles(f, way)]

    f, rng, some = drawn(any_tiles, seed)
    k = kernel(f, rng.choice(some))
    x = f.case.example()
    got = assert_kernel_right(f, k, x, ORDERS[seed % 3])
    assert torch.equal(got, emulate(halves_alone(k), *f.tensors(x)))
