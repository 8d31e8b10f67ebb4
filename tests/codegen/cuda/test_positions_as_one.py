"""Dimensions of positions that are counted as one: every way to cut a contraction, emulated, against float64.

A kernel is made for one image and called with it and with another, whose rows are of another length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, prod
from typing import Any

import pytest
import torch
from contraction_cases import Case, Found, find, tolerance
from direct_cases import kernel as direct_kernel
from direct_cases import precision
from direct_cases import tiles as direct_tiles
from emulation.emulate import emulate
from torch import Tensor, nn
from warpgroup_cases import BF16, F16
from warpgroup_cases import kernel as warpgroup_kernel

from fusewright.capture import capture
from fusewright.kernel import Kernel, evaluate
from fusewright.runtime.launch import sizes_of
from fusewright.schedule import contraction, warpgroup, warpgroup_positions
from fusewright.schedule.axes import Dims

AREA: dict[str, Any] = {"kernel": (1, 1)}
VOLUME: dict[str, Any] = {
    "kernel": (1, 1, 1), "stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1), "output_padding": (0, 0, 0),
}  # fmt: skip
PLANE, ALL = ((), (), (0, 1)), ((), (), (0, 1, 2))
POSITIONS = {"fold_dims": "p"}

CASES: dict[str, tuple[Case, Dims]] = {
    "stored": (Case((7, 5), 12, 20, before=("relu", "add channel"), **AREA), PLANE),
    "stored, three dimensions": (Case((3, 5, 7), 9, 17, before=("hardswish",), **VOLUME), ALL),
    "over positions": (Case((9, 7), 8, 24, before=("hardswish",), fold="mean", **POSITIONS, **AREA), PLANE),
    "over positions, kept": (
        Case((3, 5, 7), 8, 24, before=("times channel",), fold="max", keepdim=True, **POSITIONS, **VOLUME),
        ALL,
    ),
    "over channels": (Case((6, 11), 8, 24, before=("minus one",), fold="logsumexp", fold_dims="c", **AREA), PLANE),
    "over both": (Case((2, 5, 9), 8, 24, before=("tanh",), fold="sum", fold_dims="cp", **VOLUME), ALL),
    "bfloat16": (Case((7, 7), 16, 40, before=("hardswish",), dtype=BF16, **AREA), PLANE),
    "float16, over positions": (Case((7, 7), 16, 40, dtype=F16, fold="sum", **POSITIONS, **AREA), PLANE),
    "channels last": (Case((7, 5), 16, 20, before=("add channel",), channels_last=True, **AREA), PLANE),
    "channels last, three dimensions, bfloat16": (
        Case((3, 5, 7), 16, 20, dtype=BF16, channels_last=True, fold="mean", fold_dims="c", **VOLUME),
        ALL,
    ),
    "groups": (Case((7, 5), 8, 12, groups=3, before=("both",), **AREA), PLANE),
    "transposed": (Case((7, 5), 8, 12, transposed=True, before=("relu",), **AREA), PLANE),
    "transposed, dilated, groups": (
        Case((3, 5, 7), 8, 12, transposed=True, groups=2, **{**VOLUME, "dilation": (2, 3, 2)}),
        ALL,
    ),
    "dilated": (Case((7, 5), 8, 12, dilation=(3, 2), **AREA), PLANE),
    "taps along the first": (
        Case((6, 5, 7), 8, 20, before=("gelu",), **{**VOLUME, "kernel": (3, 1, 1), "padding": (1, 0, 0)}),
        ((), (0,), (1, 2)),
    ),
    "taps along the first, channels last, over positions": (
        Case((6, 5, 7), 8, 20, channels_last=True, fold="mean", **POSITIONS, **{**VOLUME, "kernel": (2, 1, 1)}),
        ((), (0,), (1, 2)),
    ),
    "taps along the last": (
        Case((3, 5, 9), 8, 20, before=("relu",), **{**VOLUME, "kernel": (1, 1, 3), "padding": (0, 0, 1)}),
        ((), (0, 1), (2,)),
    ),
    "a stride along the first": (Case((7, 5, 6), 8, 20, **{**VOLUME, "stride": (2, 1, 1)}), ((), (0,), (1, 2))),
    "a transposed stride along the last": (
        Case((3, 5, 6), 8, 20, transposed=True, **{**VOLUME, "kernel": (1, 1, 2), "stride": (1, 1, 2)}),
        ((), (0, 1), (2,)),
    ),
}  # fmt: skip

FAMILIES: dict[str, tuple[Callable[[Found], list[Any]], Callable[[Found, Any], Kernel]]] = {
    "warps": (Found.tilings, Found.kernel),
    "direct": (direct_tiles, direct_kernel),
    "features": (lambda f: _tiles(warpgroup, f), warpgroup_kernel),
    "positions": (lambda f: _tiles(warpgroup_positions, f), warpgroup_kernel),
}


def _tiles(module: Any, f: Found) -> list[Any]:
    return [t for _, t in module.candidates(f.group, f.cells, tf32=True)]


def error_of(f: Found, kernel: Kernel, case: Case) -> float:
    """That of a call with the input of `case`, over the size of what is added up."""
    other = replace(f, case=case)
    x = case.example()
    want, size = other.reference(x)
    got = emulate(kernel, *other.tensors(x))
    assert got.shape == want.shape and got.dtype == case.dtype
    if case.channels_last and not case.fold:
        assert got.is_contiguous(memory_format=case.last)
    return float(((got.double() - want).abs() / (size + 1e-3)).nan_to_num(inf).max())


# Direct kernels read planes.
PAIRS = [
    (family, name)
    for family in FAMILIES
    for name, (case, _) in CASES.items()
    if family != "direct" or not case.channels_last
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
@pytest.mark.sampled
def test_every_family(family: str, name: str) -> None:
    case, dims = CASES[name]
    f = find(case)
    assert isinstance(f, Found), f
    assert f.group.dims == dims
    tiles, kernel_of = FAMILIES[family]
    kernel = kernel_of(f, tiles(f)[0])
    most = precision(case) if family == "direct" else tolerance(case)
    longer = replace(case, sizes=tuple(n + i for i, n in enumerate(case.sizes, 1)))
    assert error_of(f, kernel, case) <= most and error_of(f, kernel, longer) <= most
    launch = next(n for n in kernel.launches if n.entry == "fused_test")
    numbers = [a.text for a in launch.arguments if a.kind == "int"][:3]
    lengths = sizes_of(kernel, [case.example()])
    assert [evaluate(n, lengths) for n in numbers] == [prod(case.sizes[i] for i in along) for along in dims]


@pytest.mark.parametrize(
    "case",
    [
        Case((9, 19), 12, 20, before=("relu", "add channel"), **AREA),
        Case((9, 19), 12, 20, before=("gelu",), tf32=False, fold="mean", **POSITIONS, **AREA),
        Case((9, 19), 16, 20, dtype=BF16, channels_last=True, **AREA),
    ],
    ids=["stored", "over positions", "channels last"],
)
def test_warps_have_long_rows(case: Case) -> None:
    """As many positions as in several rows elsewhere; where there are several, warps have no more than before."""
    f = find(case)
    assert isinstance(f, Found), f
    t = next(t for t in f.tilings() if t.cells_w == 16)
    assert t.by_rows == (case.fold == "" and not case.channels_last)
    assert error_of(f, f.kernel(t), case) <= tolerance(case)
    apart = find(replace(case, kernel=(2, 1), channels_last=False))
    assert isinstance(apart, Found) and max(t.cells_w for t in apart.tilings()) == 8


TOLD_APART: dict[str, Case] = {
    "taps": Case((7, 5), 4, 8, (3, 1)),
    "a stride": Case((7, 5), 4, 8, (1, 1), stride=(1, 2)),
    "padding": Case((7, 5), 4, 8, (1, 1), padding=(0, 1)),
    "a transposed stride": Case((7, 5), 4, 8, (1, 1), stride=(2, 1), transposed=True),
    "longer by output padding": Case(
        (7, 5), 4, 8, (1, 1), dilation=(2, 2), output_padding=(1, 1), transposed=True
    ),
    "a pool": Case((8, 6), 4, 8, (1, 1), pool="max", window=(2, 2), step=(2, 2)),
    "a plain dimension between others": Case(
        (5, 4, 6), 4, 8, (3, 1, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD_APART)
def test_told_apart(name: str) -> None:
    case = TOLD_APART[name]
    f = find(case)
    assert isinstance(f, Found), f
    assert f.group.dims == (((), (0,), (1,)) if case.n == 2 else ((0,), (1,), (2,)))


def test_window_sums_are_told_apart() -> None:
    f = find(Case((8, 6), 4, 8, (1, 1), pool="avg", window=(2, 2), step=(2, 2)), boxed=True)
    assert isinstance(f, Found) and f.group.box is not None
    assert f.group.dims == ((), (0,), (1,))


class HighestOfRows(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).amax(3)


def test_a_reduction_over_some_of_the_positions_is_refused() -> None:
    """So none can tell apart dimensions that are counted as one."""
    graph = capture(HighestOfRows(4, 8, 1).eval(), (torch.randn(2, 4, 7, 5),), {}).graph
    found = contraction.match(graph.outputs[0], graph.users())
    assert isinstance(found, str) and "some of the positions" in found


def test_more_positions_than_are_counted_are_refused() -> None:
    """Their number is an argument of 32 bits, though each dimension's would be one."""
    f = find(CASES["stored"][0])
    assert isinstance(f, Found)
    kernel = f.kernel(f.tilings()[0])
    sizes = {"N": 1, "in_h": 2**16, "in_w": 2**15}
    assert any(evaluate(n, sizes) >= 2**31 for n in kernel.counts)
