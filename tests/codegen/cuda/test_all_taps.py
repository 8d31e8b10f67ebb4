"""Tilings whose steps go on from one row of taps to the next: a case of `test_contraction_kernels`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from contraction_cases import Case, Found, find, some, tolerance
from direct_cases import error_of, random_found
from emulation.emulate import ORDERS, emulate

from fusewright.codegen.cuda import contraction as cuda
from fusewright.runtime import nvrtc
from fusewright.schedule.tiling import Tiling

ONE = (1, 1, 1)
CASES = {
    "one channel": Case((13, 22), 1, 21, (3, 5), padding=(1, 2), groups=3, before=("relu",)),
    "strides and dilation": Case((21, 26), 2, 18, (5, 6), (3, 2), (3, 1), (2, 1), 2, before=("tanh",)),
    "three channels": Case((17, 23), 3, 16, (7, 7), (2, 2), (3, 3), before=("relu",), fold="mean", fold_dims="p"),
    "volumes, windows": Case(
        (9, 8, 13), 1, 21, (3, 3, 3), ONE, (0, 1, 0), ONE, 2, pool="max", window=(3, 2, 4), step=(3, 2, 4)
    ),
    "transposed": Case((6, 9), 1, 12, (5, 5), (2, 2), (1, 0), groups=3, transposed=True, fold="max", fold_dims="c"),
    "many channels": Case((9, 12), 20, 24, (3, 3), padding=(1, 1), before=("gelu",)),
    "channels last": Case((9, 12), 3, 24, (3, 3), padding=(1, 1), channels_last=True),
    "float64": Case((9, 12), 3, 10, (3, 3), dtype=torch.float64, fold="sum", fold_dims="p"),
    "no rounding": Case((9, 12), 1, 10, (3, 3), groups=4, tf32=False),
    "bfloat16": Case((9, 12), 1, 17, (3, 4), groups=4, dtype=torch.bfloat16, before=("hardswish",)),
    "halves, channels last": Case((9, 12), 6, 17, (3, 3), dtype=torch.float16, channels_last=True),
}


def tilings(f: Found) -> list[Tiling]:
    return [t for t in f.tilings() if t.all_taps]


def assert_right(f: Found, t: Tiling, order: str) -> None:
    x = f.case.example()
    want, size = f.reference(x)
    got = emulate(f.kernel(t), *f.tensors(x), order=order)
    assert error_of(got, want, size) <= tolerance(f.case), t


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_as_the_model_in_float64(name: str) -> None:
    f = find(CASES[name])
    assert isinstance(f, Found), f
    rng = random.Random(1)
    for t in some(tilings(f), 3, rng):
        assert_right(f, t, rng.choice(ORDERS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_cases(seed: int) -> None:
    f, rng = random_found(seed, tilings, few_channels=True)
    assert_right(f, some(tilings(f), 2, rng)[-1], ORDERS[seed % 3])


def test_where_no_step_is_idle_there_are_none() -> None:
    f = find(Case((9, 12), 16, 24, (3, 3)))
    assert isinstance(f, Found) and f.tilings() and not tilings(f)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_without_spills(arch: str) -> None:
    f = find(replace(CASES["volumes, windows"], sizes=(57, 56, 54), window=(5, 5, 5), step=(5, 5, 5), batch=128))
    assert isinstance(f, Found)
    for t in tilings(f)[:2]:
        taken = nvrtc.resources(nvrtc.compile(cuda.generate(f.group, t, "fused_test", "", tf32=True).source, arch))
        assert all(entry.stack == 0 for entry in taken.values()), (taken, t)
