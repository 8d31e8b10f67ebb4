"""Residual additions and scales per sample in kernels of convolutions, emulated on the CPU, against float64."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from contraction_cases import Case
from element_cases import Found, assert_finite_as_eager, assert_right, find
from emulation.emulate import ORDERS, emulate
from tile_families import FAMILIES, kernel_of
from warpgroup_cases import BF16, F16

from fusewright.codegen.cuda import options
from fusewright.ir import ops
from fusewright.kernel import Kernel
from fusewright.schedule import tiling
from fusewright.schedule.group import Group
from fusewright.schedule.tiling import bytes_beside

F32, F64 = torch.float32, torch.float64
POOL = {"pool": "avg", "window": (4, 4), "step": (4, 4)}


# The family, a case, what is read, of which type beside the case's, and what the tile is to have.
Row = tuple[str, Case, str, torch.dtype | None, dict[str, Any]]
CASES: dict[str, Row] = {
    "warps, pairs at a row's end": ("warps", Case((7, 13), 5, 20), "residual", None, {"by_rows": False}),
    "warps, rows": ("warps", Case((6, 45), 4, 21), "behind a channel", None, {"by_rows": True}),
    "features, channels last": (
        "features",
        Case((8, 16), 32, 64, dtype=BF16, channels_last=True, padding=(1, 1)),
        "scale and residual",
        None,
        {},
    ),
    "positions, rows": ("positions", Case((5, 71), 5, 12), "behind a channel", None, {"by_rows": True}),
    "direct, depthwise": (
        "direct",
        Case((7, 13), 1, 1, padding=(1, 1), groups=6, tf32=False),
        "scale and residual",
        None,
        {},
    ),
}
SLOW: dict[str, Row] = {
    "warps, channels last": (
        "warps",
        Case((9, 15), 8, 24, dtype=BF16, channels_last=True, padding=(1, 1)),
        "scale and residual",
        None,
        {},
    ),
    "warps, float64": ("warps", Case((8, 12), 8, 24, dtype=F64, tf32=False, padding=(1, 1)), "twice", None, {}),
    "warps, transposed": (
        "warps",
        Case((5, 9), 6, 24, (3, 3), (2, 2), (1, 1), transposed=True, tf32=False),
        "ahead of a channel",
        None,
        {},
    ),
    "warps, one dimension": ("warps", Case((37,), 5, 20, (5,), (2,), (2,), (1,)), "gate", None, {}),
    "warps, groups": ("warps", Case((9, 11), 2, 5, groups=3, dtype=F16), "residual", F32, {}),
    "warps, window sums": ("warps", Case((22, 150), 8, 16, **POOL), "behind a channel", None, {"by_warp": True}),
    "warps, the input": ("warps", Case((6, 13), 20, 20, padding=(1, 1)), "the input", None, {}),
    "warps, mean": ("warps", Case((9, 11), 3, 17, fold="mean", fold_dims="p"), "residual", None, {}),
    "warps, sum of all": ("warps", Case((9, 11), 3, 17, fold="sum", fold_dims="cp"), "scale and residual", None, {}),
    "warps, logsumexp": ("warps", Case((9, 11), 3, 17, fold="logsumexp", fold_dims="p"), "residual", None, {}),
    "warps, over channels": ("warps", Case((9, 11), 3, 17, fold="max", fold_dims="c"), "residual", None, {}),
    "features, rows": ("features", Case((5, 47), 5, 70), "behind a channel", None, {"by_rows": True}),
    "features, pairs": ("features", Case((6, 16), 20, 64, padding=(1, 1)), "ahead of a channel", None, {}),
    "features, producers": ("features", Case((9, 33), 16, 64, padding=(1, 1)), "residual", None, {"producers": 4}),
    "features, rows of two phases": (
        "features",
        Case((5, 20), 5, 70, stride=(2, 2), transposed=True),
        "ahead of a channel",
        None,
        {"coupled": 2},
    ),
    "features, runs of two phases": (
        "features",
        Case((5, 16), 5, 70, (4, 4), (2, 2), (1, 1), transposed=True),
        "residual",
        None,
        {"by_rows": False},
    ),
    "features, a run's end": (
        "features",
        Case((5, 17), 5, 70, (4, 3), (2, 2), (1, 1), transposed=True),
        "residual",
        None,
        {"by_rows": False},
    ),
    "features, mean": ("features", Case((9, 11), 8, 64, fold="mean", fold_dims="p"), "residual", None, {}),
    "positions, one by one": (
        "positions",
        Case((5, 64), 5, 12, padding=(1, 1), dtype=F16),
        "scale and residual",
        F32,
        {"by_rows": False},
    ),
    "positions, numbers in shared memory": ("positions", Case((5, 71), 5, 100), "behind a channel", None, {}),
    "positions, channels last": (
        "positions",
        Case((8, 16), 32, 40, dtype=F16, channels_last=True, padding=(1, 1)),
        "sine",
        None,
        {},
    ),
    "positions, phases": (
        "positions",
        Case((5, 16), 5, 12, (4, 4), (2, 2), (1, 1), transposed=True),
        "residual",
        None,
        {},
    ),
    "positions, three dimensions": (
        "positions",
        Case((3, 4, 33), 5, 12, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        "residual",
        None,
        {},
    ),
    "direct": ("direct", Case((9, 33), 3, 20, stride=(2, 2), tf32=False), "ahead of a channel", None, {"features": 4}),
    "direct, one by one": ("direct", Case((9, 20), 3, 5, groups=2, tf32=False), "behind a channel", None, {"run": 1}),
    "direct, half precision": ("direct", Case((37,), 2, 3, (5,), (1,), (0,), (2,), dtype=F16), "residual", F32, {}),
    "direct, float64": ("direct", Case((6, 9), 1, 2, groups=3, dtype=F64), "twice", None, {}),
    "direct, transposed": (
        "direct",
        Case((5, 9), 1, 1, (4, 4), (2, 2), (1, 1), groups=4, transposed=True, tf32=False),
        "residual",
        None,
        {},
    ),
    "direct, three dimensions": (
        "direct",
        Case((4, 5, 9), 1, 2, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), groups=3, tf32=False),
        "gate",
        None,
        {},
    ),
    "warps, a function": ("warps", Case((7, 13), 5, 20), "a function", None, {}),
    "features, a function": ("features", Case((6, 16), 20, 64, padding=(1, 1)), "a function of all", None, {}),
    "positions, a comparison": ("positions", Case((5, 71), 5, 12), "a comparison", None, {"by_rows": True}),
    "direct, a function": ("direct", Case((7, 13), 1, 1, groups=6, tf32=False), "a function of all", None, {}),
    "half precision, a function": ("positions", Case((5, 64), 5, 12, dtype=F16), "a function", None, {}),
    "windows": ("windows", Case((22, 150), 8, 16, **POOL), "behind a channel", None, {}),
}
EVERY = CASES | SLOW
NAMES = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def found(name: str) -> tuple[Found, Kernel]:
    family, case, read, like, wanted = EVERY[name]
    f = find(case, read, like)
    t = next(t for t in FAMILIES[family](f) if all(getattr(t, key) == value for key, value in wanted.items()))
    return f, kernel_of(f, t)


@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name: str) -> None:
    f, kernel = found(name)
    assert f.group.elements or f.group.of_samples
    assert_right(f, kernel)


@pytest.mark.parametrize("read", ["twice", "a function", "a function of all", "a comparison"])
def test_functions_of_what_is_read_are_computed_in_the_kernel(read: str) -> None:
    """So that nobody writes them for it."""
    elements = find(Case((7, 13), 5, 20), read).group.elements
    assert [type(n.op) for n in elements] == [ops.Input]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled
def test_not_finite_as_eager(name: str) -> None:
    f, kernel = found(name)
    if f.case.fold or f.model.read in ("sine", "twice", "gate", "the input", "a function", "a comparison"):
        pytest.skip("what is not finite does not stay at its place")
    assert_finite_as_eager(f, lambda *tensors: emulate(kernel, *tensors))


@pytest.mark.parametrize("name", ["warps, rows", "positions, rows"])
def test_numbers_of_no_feature_are_not_read(name: str) -> None:
    """Rows are written eight features at a time, of which there may be fewer."""
    assert_right(*found(name), sanitize=True)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("name", ["warps, rows", "features, rows", "positions, rows"])
@pytest.mark.sampled
def test_neighbours_are_read_and_written_together_where_all_begin_at_pairs(name: str, dtype: torch.dtype) -> None:
    """Rows of even length, of which an operand may begin between pairs all the same."""
    family, case, read, like, _ = EVERY[name]
    f = find(replace(case, sizes=(case.sizes[0], case.sizes[1] + 1), dtype=dtype), read, like)
    k = kernel_of(f, next(t for t in FAMILIES[family](f) if t.by_rows))
    assert_right(f, k, sanitize=True)
    operands = f.tensors(f.example())
    (place,) = re.findall(r"reinterpret_cast<unsigned long long>\(\w+\) / sizeof\(\*(?!to\b)\w+\)", k.source)
    between = replace(k, source=k.source.replace(place, "1"))
    for one, taken, other in ((k, "2", "1"), (between, "1", "2")):
        plain = emulate(one, *operands)
        only, none = (
            replace(one, source=re.sub(rf" write_runs<{run}>\(rows, to.*;", ";", one.source)) for run in (other, taken)
        )
        assert only.source != one.source != none.source
        assert torch.equal(plain, emulate(only, *operands)) and not torch.equal(plain, emulate(none, *operands))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_all_orders_of_threads_agree_and_nothing_else_is_read(name: str) -> None:
    f, kernel = found(name)
    operands = f.tensors(f.example())
    first, *others = (emulate(kernel, *operands, order=order, seed=3) for order in ORDERS)
    assert all(torch.equal(first, other) for other in others)
    assert_right(f, kernel, sanitize=True)


def test_operands_of_a_call() -> None:
    """What has as many elements as the output lies as it does, and has its shape at every size of the input."""
    _, kernel = found("features, channels last")
    operands = dict(zip(kernel.operands, zip(kernel.layouts, kernel.shapes, strict=True), strict=True))
    assert kernel.output.layout == operands["x"][0] == "channels_last"
    assert [operand for operand in operands.values() if operand[1][0] == "N"][1:] == [
        ("channels_last", kernel.output.shape),
        ("contiguous", ("N", "64", "1", "1")),
    ]


def test_bytes_are_estimated() -> None:
    """Of two tiles, and of layouts, with twice as many for numbers of twice the size."""
    one, other = (find(Case((16, 16), 8, 32, dtype=F16), "residual", like) for like in (F16, F32))
    t = tiling.candidates(one.group, one.cells, tf32=True)[0]
    assert 0 < bytes_beside(one.group, t) < bytes_beside(other.group, t) <= 2 * bytes_beside(one.group, t)
    none = replace(one.group, operands=())
    assert bytes_beside(none, t) == 0.0
    assert tiling.estimate(none, t, one.cells, tf32=True) <= tiling.estimate(one.group, t, one.cells, tf32=True)


def test_no_option_where_an_operand_lies_otherwise() -> None:
    f = find(Case((16, 16), 8, 32), "residual")
    group = Group("contraction", f.group, f.group.root, f.group.tensors)
    (x, r), hints = (f.group.x, *f.group.elements), {f.group.x.shape[0]: 2}
    for last, fits in (((), True), ((x, r), True), ((x,), False), ((r,), False)):
        found = options(group, hints, dict.fromkeys(last, "channels_last"), tf32=True, capability=90)
        assert bool(found) == fits
        assert all(option["channels_last"] == bool(last) for option in found if "direct" not in option)
