"""Rows of the output by way of shared memory: every way to cut a contraction, emulated on the CPU, against float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from contraction_cases import Case, Found, find, tolerance
from emulation.emulate import ORDERS, emulate
from warpgroup_cases import BF16, F16

from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.kernel import Kernel
from fusewright.schedule import warpgroup, warpgroup_positions, warpgroup_windows
from fusewright.schedule.output_rows import BANKS, FEATURES, SHORTEST, as_written, parted, rows_bytes
from fusewright.schedule.warpgroup_positions import PositionTile
from fusewright.schedule.warpgroup_windows import WindowTile

POOL = {"pool": "avg", "window": (4, 4), "step": (4, 4)}
REFERENCE = "def reference(*operands): ..."


def _by_warpgroups(module: Any) -> Callable[[Found], list[Any]]:
    return lambda f: [t for _, t in module.candidates(f.group, f.cells, tf32=True)]


# How a family cuts a group, and the kernel of a tile.
FAMILIES: dict[str, Callable[[Found], list[Any]]] = {
    "warps": Found.tilings,
    "features": _by_warpgroups(warpgroup),
    "positions": _by_warpgroups(warpgroup_positions),
    "windows": _by_warpgroups(warpgroup_windows),
}

# The family, a case, and what the tile is to have.
CASES: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "warps": ("warps", Case((6, 45), 4, 21, before=("relu", "add channel")), {"cells_w": 8}),
    "warps, groups and half precision": ("warps", Case((4, 71), 4, 12, groups=2, dtype=F16), {"cells_w": 8}),
    "warps, float32 in pairs": ("warps", Case((4, 41), 4, 16, tf32=False), {"cells_w": 8}),
    "warps, windows of sums": ("warps", Case((22, 150), 8, 16, **POOL), {"by_warp": True, "cells_w": 8}),
    "features": ("features", Case((5, 47), 5, 70, before=("gelu",)), {"eights_w": 4}),
    "features, a row's end": ("features", Case((5, 71), 20, 64, padding=(1, 1)), {"eights_w": 8, "cells_h": 2}),
    "features, side by side": ("features", Case((4, 91), 9, 40, bias=False), {"eights_w": 4, "groups_w": 2}),
    "features, two tiles": ("features", Case((4, 51), 9, 128), {"m_tiles": 2}),
    "features, three dimensions": (
        "features",
        Case((4, 5, 39), 3, 16, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        {"cells_d": 2, "eights_w": 4},
    ),
    "features, dilated": ("features", Case((9, 45), 5, 70, dilation=(2, 2)), {"eights_w": 4}),
    "features, bfloat16": ("features", Case((5, 47), 20, 70, dtype=BF16, before=("hardswish",)), {"eights_w": 4}),
    "features, pool": (
        "features",
        Case((9, 79), 5, 70, before=("times channel",), pool="max", window=(2, 2), step=(2, 2), after=("gelu",)),
        {"eights_w": 4},
    ),
    "features, overlapping windows that lie out of bounds": (
        "features",
        Case((6, 42), 5, 20, pool="avg", window=(3, 2), step=(2, 1), pool_padding=(1, 1), include_pad=False),
        {"eights_w": 4},
    ),
    "features, transposed, pool": (
        "features",
        Case((4, 44), 5, 20, (3, 4), (2, 2), (1, 0), transposed=True, pool="max", window=(2, 2), step=(2, 2)),
        {"eights_w": 4},
    ),
    "positions, pool": (
        "positions",
        Case((9, 152), 5, 12, pool="avg", window=(2, 2), step=(2, 2), after=("tanh",)),
        {"wide": True},
    ),
    "positions, pool below each other": (
        "positions",
        Case((19, 75), 5, 9, pool="max", window=(2, 2), step=(2, 2), ceil_mode=True),
        {"wide": False, "tiles_w": 4},
    ),
    "positions": ("positions", Case((5, 71), 5, 12, before=("relu", "add channel")), {"wide": True, "tiles_w": 1}),
    "positions, two of an instruction's": ("positions", Case((4, 150), 5, 9), {"wide": True, "tiles_w": 2}),
    "positions, side by side": ("positions", Case((6, 150), 5, 9, groups=2), {"wide": True, "groups_w": 2}),
    "positions, below each other": ("positions", Case((20, 45), 5, 12), {"wide": False, "tiles_w": 4}),
    "positions, taps as channels": ("positions", Case((9, 71), 5, 12), {"wide": True, "unfolded": "h"}),
    "positions, softmax": ("positions", Case((5, 71), 5, 12, softmax="softmax", after=("scale",)), {"wide": True}),
    "positions, numbers in shared memory": (
        "positions",
        Case((5, 71), 5, 100, before=("times channel", "add channel")),
        {"wide": True},
    ),
    "positions, float16": ("positions", Case((5, 71), 20, 12, dtype=F16), {"wide": True}),
    "features, two phases": (
        "features",
        Case((5, 20), 5, 70, stride=(2, 2), transposed=True, before=("gelu", "add channel")),
        {"coupled": 2, "cells_h": 2},
    ),
    "features, two phases, a row's end": (
        "features",
        Case((6, 40), 9, 64, (4, 4), (2, 2), (1, 0), transposed=True, bias=False),
        {"coupled": 2, "eights_w": 4},
    ),
    "features, two phases along all dimensions": (
        "features",
        Case((2, 3, 18), 3, 16, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), transposed=True, output_padding=(0, 0, 0)),
        {"coupled": 2},
    ),
    "features, two phases, bfloat16": (
        "features",
        Case((5, 21), 20, 70, stride=(2, 2), transposed=True, dtype=BF16),
        {"coupled": 2},
    ),
    "features, three phases": (
        "features",
        Case((5, 20), 5, 70, (3, 5), stride=(2, 3), transposed=True, before=("gelu", "add channel")),
        {"coupled": 3, "cells_h": 2},
    ),
    "features, three phases, a row's end": (
        "features",
        Case((6, 40), 9, 64, (4, 4), (1, 3), (1, 0), transposed=True, bias=False),
        {"coupled": 3, "eights_w": 4},
    ),
    "features, four phases, taps of two": (
        "features",
        Case((45,), 5, 40, (2,), (4,), (0,), (1,), transposed=True, output_padding=(2,)),
        {"coupled": 4},
    ),
    "features, five phases, bfloat16": (
        "features",
        Case((37,), 20, 70, (7,), (5,), (0,), (1,), transposed=True, output_padding=(3,), dtype=BF16),
        {"coupled": 5},
    ),
    "features, three phases, float16": (
        "features",
        Case((5, 21), 20, 70, stride=(2, 3), transposed=True, dtype=F16),
        {"coupled": 3},
    ),
    "positions, three phases": (
        "positions",
        Case((5, 71), 5, 12, (3, 4), stride=(2, 3), transposed=True, before=("relu", "add channel")),
        {"coupled": 3, "wide": True},
    ),
    "positions, three phases below each other": (
        "positions",
        Case((20, 45), 5, 12, stride=(1, 3), transposed=True),
        {"coupled": 3, "wide": False},
    ),
    "positions, four phases, softmax": (
        "positions",
        Case((5, 35), 5, 12, stride=(1, 4), transposed=True, softmax="softmax", after=("scale",)),
        {"coupled": 4},
    ),
    "positions, three phases, float16": (
        "positions",
        Case((5, 71), 20, 12, (3, 3), stride=(1, 3), transposed=True, dtype=F16),
        {"coupled": 3},
    ),
    "windows": ("windows", Case((23, 143), 8, 9, **POOL, after=("sigmoid",)), {"own_w": 4}),
}


def found(name: str, cases: dict[str, tuple[str, Case, dict[str, Any]]] = CASES) -> tuple[Found, Any]:
    """The group of a case, and the best tile that is as wanted and writes rows."""
    family, case, wanted = cases[name]
    f = find(case, boxed=family == "windows" or "by_warp" in wanted)
    assert isinstance(f, Found), f
    wanted = {
        "by_rows": True,
        **({"unfolded": "", "producers": 0, **wanted} if family in ("features", "positions") else wanted),
    }
    tiles = FAMILIES[family](f)
    return f, next(t for t in tiles if all(getattr(t, key) == value for key, value in wanted.items()))


def kernel(f: Found, t: Any) -> Kernel:
    made = f.kernel(t) if hasattr(t, "stages") else cuda.generate(f.group, t, "fused_test", REFERENCE)
    assert made.source.count("write_rows(team_rows") > 0
    return made


def assert_near(f: Found, got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> None:
    """As near as products are."""
    error = ((got.double() - want).abs() / (size + 1e-3)).nan_to_num(inf)
    assert error.max() <= tolerance(f.case, boxed=f.group.box is not None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_right(name: str) -> None:
    """In every order of threads the same bits, and as near as products are; what rows do not reach stays as it was."""
    f, t = found(name)
    x = f.case.example()
    want, size = f.reference(x)
    got, *others = (emulate(kernel(f, t), *f.tensors(x), order=order, seed=3) for order in ORDERS)
    assert_near(f, got, want, size)
    assert all(torch.equal(got, other) for other in others)


@pytest.mark.parametrize(
    "name", ["warps", "features, a row's end", "positions", "windows", "features, bfloat16", "positions, float16"]
)
@pytest.mark.sampled
def test_stays_inside(name: str) -> None:
    """Nothing is read or written out of bounds, in memory or in shared memory."""
    f, t = found(name)
    x = f.case.example()
    want, size = f.reference(x)
    got = emulate(kernel(f, t), *f.tensors(x), sanitize=True)
    assert_near(f, got, want, size)


@pytest.mark.parametrize(("name", "more"), [("positions, three phases", 0), ("positions, four phases, softmax", 1)])
def test_pairs_begin_where_memory_has_them(name: str, more: int) -> None:
    """Rows of pairs are read from shared memory by pairs, unless features are an odd number of elements apart."""
    family, case, wanted = CASES[name]
    case = replace(case, sizes=(3, case.sizes[1]), output_padding=(0, more), before=(), softmax="", after=())
    f, t = found(name, {name: (family, case, wanted)})
    x = f.case.example()
    want, size = f.reference(x)
    assert want.shape[-1] % 2 == 0 and t.team.pitch % 2 == more
    got = emulate(kernel(f, t), *f.tensors(x), sanitize=True)
    assert_near(f, got, want, size)


@pytest.mark.parametrize("width", [48, 47])
@pytest.mark.parametrize("name", ["warps", "features", "positions", "windows"])
@pytest.mark.sampled
def test_neighbours_are_written_together_where_rows_have_pairs(name: str, width: int) -> None:
    """The way for other rows is not taken, and is for these: features of an odd number of elements."""
    family, case, wanted = CASES[name]
    last = 4 * width - 1 if family == "windows" else width + 24 if family == "positions" else width
    f, t = found(name, {name: (family, replace(case, sizes=(case.sizes[0] | 1, last)), wanted)})
    even = f.reference(x := f.case.example())[0].shape[-1] % 2 == 0
    taken, other = ("2", "1") if even else ("1", "2")
    k = kernel(f, t)
    calls = {run: f"write_runs<{run}>(rows, to, plane, features, left, member, lane);" for run in "12"}
    assert all(k.source.count(call) == 1 for call in calls.values())
    plain = emulate(k, *f.tensors(x))
    assert torch.equal(plain, emulate(replace(k, source=k.source.replace(calls[other], ";")), *f.tensors(x)))
    missing = emulate(replace(k, source=k.source.replace(calls[taken], ";")), *f.tensors(x))
    assert not torch.equal(plain, missing)


@pytest.mark.parametrize("width", [36, 35, 42, 43, 46, 52, 65])
@pytest.mark.parametrize("name", ["features, bfloat16", "positions, float16"])
@pytest.mark.sampled
def test_halves_are_written_by_sectors(name: str, width: int) -> None:
    """Of rows of two-byte elements, whole sectors by vectors, and what is left at both ends; features of odd numbers of
    elements, so that rows begin anywhere in a sector."""
    family, case, wanted = CASES[name]
    f, t = found(name, {name: (family, replace(case, sizes=(case.sizes[0] | 1, width)), wanted)})
    k, x = kernel(f, t), f.case.example()
    want, size = f.reference(x)
    plain = emulate(k, *f.tensors(x))
    assert_near(f, plain, want, size)
    for part, none in ((" k < VECTORS;", " k < 0;"), ("end < 2;", "end < 1;"), ("int end = 0;", "int end = 1;")):
        assert k.source.count(part) == 1
        less = replace(k, source=k.source.replace(part, none))
        assert not torch.equal(plain, emulate(less, *f.tensors(x)))


@pytest.mark.parametrize(
    ("case", "by_rows"),
    [
        pytest.param(Case((9, 41), 5, 20), True, id="rows of 39"),
        pytest.param(Case((9, 42), 5, 20), False, id="rows of 40: five sectors"),
        pytest.param(Case((9, 42), 20, 20, dtype=F16), True, id="rows of 40 halves"),
        pytest.param(Case((9, 50), 20, 20, dtype=F16), True, id="rows of 48 halves: three sectors"),
        pytest.param(
            Case((9, 16), 20, 20, (4, 4), stride=(2, 2), padding=(1, 1), transposed=True, dtype=F16),
            False,
            id="rows of 32 halves, two phases",
        ),
        pytest.param(Case((9, 41), 5, 20, fold="sum", fold_dims="p"), False, id="nothing is written"),
        pytest.param(Case((9, 82), 5, 20, pool="max", window=(2, 2), step=(2, 2)), False, id="cells in rows of 40"),
        pytest.param(Case((9, 84), 5, 20, pool="max", window=(2, 2), step=(2, 2)), True, id="cells in rows of 41"),
        pytest.param(Case((9, 41), 5, 20, channels_last=True), False, id="channels last"),
        pytest.param(Case((9, 20), 5, 20, stride=(2, 2), transposed=True), True, id="two phases: rows of 41"),
        pytest.param(
            Case((9, 20), 5, 20, (4, 4), stride=(2, 2), padding=(1, 1), transposed=True), False, id="rows of 40"
        ),
        pytest.param(Case((9, 14), 5, 20, stride=(3, 3), transposed=True), True, id="three phases: rows of 42"),
        pytest.param(
            Case((9, 16), 5, 20, stride=(3, 3), transposed=True), True, id="three phases, though rows are sectors"
        ),
    ],
)
@pytest.mark.sampled
def test_where_rows_pay(case: Case, by_rows: bool) -> None:
    """Rows that are whole sectors are written as lanes have them."""
    f = find(case)
    assert isinstance(f, Found)
    t = next(t for _, t in warpgroup.candidates(f.group, f.cells, tf32=True) if t.eights_w == 4)
    plain = replace(t, by_rows=False, coupled=0)
    short = replace(plain, eights_w=(SHORTEST - 1) // (8 * (t.coupled or 1)))
    written, shorter = as_written(f.group, [plain, short], f.cells[2], lambda t: t.by_rows_of_phases(f.group))
    assert t == written and t.by_rows is by_rows
    phases = len(f.group.axes[2].phases)
    part = f.group.root.shape[-1] * case.dtype.itemsize % 32 > 0 or (case.dtype.itemsize == 2 and phases == 1)
    assert (parted(f.group, plain, f.cells[2]) > 1) is (by_rows and part)
    assert parted(f.group, t, f.cells[2]) == 1
    assert not shorter.by_rows and rows_bytes(shorter) == 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_lanes_do_not_meet(name: str) -> None:
    """Lanes that put eight features into shared memory at once have a bank each."""
    _, t = found(name)
    team = t.team
    assert rows_bytes(t) == 4 * (t.warps // team.warps) * FEATURES * team.pitch and team.pitch >= team.positions
    lanes, phases = [divmod(lane, 4) for lane in range(32)], getattr(t, "coupled", 0) or 1
    if isinstance(t, PositionTile | WindowTile):
        banks = [(2 * quad * team.pitch + phases * row) % BANKS for row, quad in lanes]
    else:  # neighbours of a row, as many as vectors have, and so many lanes at a time
        count, part = 2 * phases, 4 if phases % 2 == 0 else 2
        some = lanes[: 32 // part]
        banks = [(row * team.pitch + count * quad + i) % BANKS for row, quad in some for i in range(part)]
    # rows of four phases lie so that cells take turns with each other, whatever is between features
    assert max(Counter(banks).values()) == (2 if isinstance(t, PositionTile) and phases == 4 else 1)
