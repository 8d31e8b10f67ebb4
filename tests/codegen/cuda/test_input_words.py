"""Warpgroups that read elements of two bytes as words of two neighbours (`warpgroup_staging.Words`), emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from contraction_cases import Case, Found, find
from emulation.emulate import emulate
from warpgroup_cases import (
    BF16,
    F16,
    assert_not_finite_as_eager,
    assert_orders_agree,
    assert_right,
    best,
    first,
    kernel,
    tolerance,
)

from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule import warpgroup, warpgroup_pools, warpgroup_positions
from fusewright.schedule.warpgroup_staging import Tile, of_tile, staged

FAMILIES = {"features": warpgroup, "positions": warpgroup_positions, "pools": warpgroup_pools}
CASES: dict[str, tuple[str, Case, dict[str, Any], int]] = {
    "padding": ("features", Case((9, 20), 20, 24, padding=(1, 1), dtype=BF16), {"chunk": 16}, 1),
    "no padding": ("features", Case((9, 20), 20, 24, dtype=F16), {"chunk": 16}, 0),
    "few channels": ("features", Case((9, 44), 3, 24, padding=(2, 2), dtype=F16), {}, 0),
    "dilation": ("features", Case((9, 44), 16, 9, dilation=(1, 3), padding=(0, 3), dtype=BF16), {}, 1),
    "phases": (
        "features",
        Case((9, 20), 20, 9, stride=(2, 2), transposed=True, output_padding=(1, 1), dtype=BF16),
        {},
        1,
    ),
    "producers": ("features", Case((20, 20), 40, 9, padding=(1, 1), dtype=BF16), {"chunk": 16, "producers": 8}, 1),
    "three vectors": ("features", Case((9, 20), 24, 9, padding=(1, 1), dtype=BF16), {"chunk": 24}, 1),
    "over positions": (
        "positions",
        Case((9, 20), 20, 24, padding=(1, 1), dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"),
        {"chunk": 16},
        1,
    ),
    "positions, producers": (
        "positions",
        Case((20, 20), 40, 9, dtype=F16, fold="sum", fold_dims="p"),
        {"producers": 4},
        0,
    ),
    "taps as channels": (
        "features",
        Case((5, 6, 20), 9, 9, (3, 3, 2), (1, 1, 1), (1, 0, 0), (1, 1, 1), dtype=BF16),
        {"unfolded": "d"},
        0,
    ),
    "pools": (
        "pools",
        Case((20, 70), 20, 9, padding=(1, 1), pool="max", window=(3, 3), step=(2, 2), dtype=BF16),
        {},
        1,
    ),
}
EACH = [pytest.param(*of, id=name) for name, of in CASES.items()]


def found(family: str, case: Case, wanted: dict[str, Any]) -> tuple[Found, Tile]:
    way = FAMILIES[family]
    return best(lambda f: [t for _, t in way.candidates(f.group, f.cells, tf32=True)], case, wanted)


@pytest.mark.parametrize(("family", "case", "wanted", "before"), EACH)
def test_as_the_model_in_float64(family: str, case: Case, wanted: dict[str, Any], before: int) -> None:
    """Of a row that begins at an odd place, the first word has an element from before it."""
    f, t = found(family, case, wanted)
    read = staged(of_tile(f.group, t), t).words
    assert read is not None and read.before == before
    assert "constexpr int BEFORE" in kernel(f, t).source
    assert_right(f, t, sanitize=True)
    assert_orders_agree(f, t)
    assert_not_finite_as_eager(f, t)


@pytest.mark.parametrize("name", ["padding", "no padding", "producers", "pools"])
def test_rows_of_no_whole_words(name: str) -> None:
    """A kernel for rows of whole words serves other sizes, whose rows are such, and no others."""
    family, case, wanted, _ = CASES[name]
    f, t = found(family, case, wanted)
    k = kernel(f, t)
    assert_other_size(k, replace(case, sizes=(case.sizes[0] + 1, case.sizes[1] + 2)))
    with pytest.raises(AssertionError, match="was promised"):
        assert_other_size(k, replace(case, sizes=(case.sizes[0], case.sizes[1] - 1)))


def assert_other_size(k: Kernel, case: Case) -> None:
    other = find(case)
    assert isinstance(other, Found)
    x = case.example()
    want, size = other.reference(x)
    got = emulate(k, *other.tensors(x))
    assert ((got.double() - want).abs() / (size + 1e-3)).max() <= tolerance(case)


@pytest.mark.parametrize(
    "case",
    [
        Case((9, 21), 20, 24, dtype=BF16),
        Case((9, 20), 20, 24, stride=(1, 2), dtype=BF16),
        Case((9, 20), 16, 24, channels_last=True, dtype=BF16),
        Case((9, 20), 20, 24),
    ],
    ids=["odd rows", "strides", "channels last", "float32"],
)
def test_other_rows_are_read_element_by_element(case: Case) -> None:
    f, t = found("features", case, {})
    assert staged(f.group, t).words is None and "constexpr int BEFORE" not in kernel(f, t).source


@pytest.mark.parametrize("name", ["bfloat16", "float16", "padded twice"])
def test_compiles(name: str) -> None:
    """Real sizes, for sm_90a, without spills."""
    case = {
        "bfloat16": Case((128, 128), 64, 128, padding=(0, 0), dtype=BF16, before=("relu", "add channel")),
        "float16": Case((96, 96), 24, 40, dtype=F16, before=("gelu",)),
        "padded twice": Case((64, 64), 40, 80, (5, 5), padding=(2, 2), dtype=BF16),
    }[name]
    f = find(case)
    assert isinstance(f, Found)
    for t in first(warpgroup, f, 2):
        assert staged(f.group, t).words is not None
        resources = nvrtc.resources(nvrtc.compile(kernel(f, t).source, cuda.ARCH))
        assert all(r.stack == 0 for r in resources.values()), (t, resources)
