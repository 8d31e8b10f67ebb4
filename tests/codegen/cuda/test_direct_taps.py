"""Direct kernels that multiply by channels and taps on tensor cores: the generated CUDA C++ runs on the CPU, and is
compared with the model in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from contraction_cases import Case, Found, find, tolerance
from direct_cases import error_of, random_found
from emulation.emulate import ORDERS, emulate

from fusewright.codegen.cuda import direct_taps as cuda
from fusewright.codegen.cuda import generate, options
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule import direct_taps
from fusewright.schedule.direct import with_windows
from fusewright.schedule.direct_taps import TapCut, TapTile
from fusewright.schedule.group import Group

ONE = (1, 1, 1)
PLAIN = Case((20, 26), 1, 21, (3, 3), padding=(1, 1), groups=2, pool="max", window=(2, 3), step=(2, 3))
CASES = {
    "windows that units have": PLAIN,
    "windows that overlap": replace(PLAIN, window=(6, 6), step=(2, 2), pool="avg", before=("tanh",), after=("both",)),
    "padding": replace(PLAIN, pool_padding=(1, 1), ceil_mode=True, before=("add channel",)),
    "padding that does not count": replace(PLAIN, pool="avg", pool_padding=(1, 1), include_pad=False),
    "strides, dilation, gaps": Case(
        (29, 33), 2, 11, (5, 3), (3, 2), (3, 1), (2, 1), pool="max", window=(3, 2), step=(4, 3), before=("relu",)
    ),
    "volumes": Case(
        (9, 11, 14), 1, 21, (3, 3, 3), ONE, (0, 1, 0), ONE, 2, pool="max", window=(3, 3, 4), step=(3, 3, 4)
    ),
    "one dimension": Case((150,), 3, 40, (9,), (2,), (4,), (1,), pool="avg", window=(5,), step=(2,)),
    "transposed": Case(
        (9, 11), 1, 5, (5, 5), (2, 2), (1, 0), groups=3, transposed=True, pool="max", window=(4, 3), step=(4, 2)
    ),
    "between strides": Case(
        (9, 11), 2, 9, (5, 5), (2, 3), (1, 0), groups=3, transposed=True, pool="max", window=(7, 7), step=(7, 1)
    ),
    "phases without taps": Case(
        (9, 11), 1, 9, (1, 2), (3, 2), transposed=True, output_padding=(2, 1), pool="avg", window=(5, 2), step=(4, 1)
    ),
    "over channels": replace(PLAIN, pool="avg", fold="logsumexp", fold_dims="c", after=("tanh",)),
    "over positions": replace(PLAIN, fold="min", fold_dims="p", features=11, after=("times channel",)),
    "over all": replace(PLAIN, fold="mean", fold_dims="cp", before=("gate",)),
    "sine": replace(PLAIN, before=("sine", "leaky", "shift")),
    "bfloat16": replace(PLAIN, dtype=torch.bfloat16, before=("hardswish",)),
    "float16": replace(PLAIN, dtype=torch.float16, window=(3, 3), step=(1, 2)),
}


def tiles(f: Found) -> list[TapTile]:
    return direct_taps.candidates(f.group, f.cells, f.case.batch, tf32=f.case.tf32)


def kernel(f: Found, t: TapTile) -> Kernel:
    return cuda.generate(f.group, t, "fused_test", "")


def assert_right(f: Found, t: TapTile, order: str = "forward", sanitize: bool = False) -> None:
    x = f.case.example()
    want, size = f.reference(x)
    got = emulate(kernel(f, t), *f.tensors(x), order=order, sanitize=sanitize)
    assert got.shape == want.shape and got.dtype == f.case.dtype
    assert error_of(got, want, size) <= tolerance(f.case), t


def found(case: Case) -> Found:
    f = find(case)
    assert isinstance(f, Found), f
    return f


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_as_the_model_in_float64(name: str) -> None:
    f, rng = found(CASES[name]), random.Random(1)
    fit = tiles(f)
    for t in (fit[0], rng.choice(fit)):
        assert_right(f, t, rng.choice(ORDERS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_cases(seed: int) -> None:
    f, rng = random_found(seed, tiles, few_channels=True)
    assert_right(f, rng.choice(tiles(f)), ORDERS[seed % 3])


@pytest.mark.parametrize("name", ["padding", "over channels", "between strides"])
def test_sanitizers_find_nothing(name: str) -> None:
    f = found(CASES[name])
    assert_right(f, tiles(f)[0], sanitize=True)


@pytest.mark.parametrize("name", ["windows that units have", "over channels", "between strides"])
@pytest.mark.sampled
def test_what_is_not_finite(name: str) -> None:
    """NaN and infinities surface where eager has them: also through steps whose last taps there are not."""
    f = found(replace(CASES[name], batch=4))
    x = f.case.example()
    for sample, value in zip(x, (float("nan"), float("inf"), -float("inf")), strict=False):
        sample[tuple(n // 2 for n in sample.shape)] = value
    want, _ = f.reference(x)
    got = emulate(kernel(f, tiles(f)[0]), *f.tensors(x)).double()
    torch.testing.assert_close(got.isnan(), want.isnan())
    torch.testing.assert_close(got[want.isinf()], want[want.isinf()])
    assert got[3:].isfinite().all()


def test_several_tiles_of_a_block() -> None:
    """What is folded in shared memory has been read before the next tile's values get there."""
    f = found(CASES["windows that overlap"])
    t = next(t for t in tiles(f) if t.cells_h < 4 and t.cells_w < 5 and t.buffers == 2)
    with patch("fusewright.codegen.cuda.direct.MULTIPROCESSORS", 1), patch.object(TapCut, "per_sm", 1):
        for order in ORDERS:
            assert_right(f, t, order)


def test_units_are_what_windows_have_all_or_none_of() -> None:
    for name, own in (("windows that units have", (1, 2, 3)), ("windows that overlap", (1, 2, 2)), ("transposed", ONE)):
        f = found(CASES[name])
        assert {TapCut.of(with_windows(f.group), t).owned for t in tiles(f)[:5]} == {own}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(PLAIN, pool=""), id="no windows"),
        pytest.param(replace(PLAIN, tf32=False), id="no rounding"),
        pytest.param(replace(PLAIN, channels=9, groups=1), id="many channels"),
    ],
)
def test_what_they_do_not_take(case: Case) -> None:
    assert not tiles(found(case))


@pytest.mark.parametrize(
    ("name", "capability", "first"),
    [
        ("volumes", 90, "taps"),
        ("volumes", 80, "taps"),
        ("overlap", 90, "taps"),
        ("between strides", 90, "direct"),
        ("between strides", 80, "direct"),
    ],
)
def test_which_way_is_expected_to_be_best(name: str, capability: int, first: str) -> None:
    """Windows that begin between strides have ways without warpgroups, too."""
    f = found(LARGE[name])
    group = Group("contraction", f.group, f.group.root, f.group.tensors)
    listed = options(group, {f.group.x.shape[0]: f.case.batch}, {}, tf32=True, capability=capability)
    assert next(iter(listed[0])) == first
    assert any("direct" in option for option in listed) and any("taps" in option for option in listed)
    assert any("pools" in option for option in listed) == (capability == 90)
    text = generate(group, "fused_test", listed[0], tf32=True).source
    assert ("mma_tf32(acc" in text) == (first == "taps")


LARGE = {
    "volumes": replace(
        CASES["volumes"], sizes=(57, 56, 54), window=(5, 5, 5), step=(5, 5, 5), groups=4, batch=128
    ),
    "overlap": replace(
        CASES["windows that overlap"], sizes=(469, 462), features=79, kernel=(5, 6), stride=(3, 2), padding=(3, 1),
        dilation=(2, 2), before=("tanh", "leaky"), batch=128,
    ),
    "between strides": Case(
        (128, 113), 1, 5, (5, 5), (2, 2), (1, 0), groups=30, transposed=True, pool="max", window=(7, 7), step=(7, 1),
        fold="min", fold_dims="p", batch=128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", LARGE)
def test_compiles_without_spills(name: str, arch: str) -> None:
    f = found(LARGE[name])
    for t in direct_taps.shortlist(f.group, f.cells, f.case.batch, float("inf"), tf32=True)[1][:2]:
        taken = nvrtc.resources(nvrtc.compile(kernel(f, t).source, arch))
        assert all(entry.stack == 0 for entry in taken.values()), (taken, t)
