"""Window sums of rows that each warp stages for itself, formed by the lanes that multiply them."""

from __future__ import annotations

import pytest
import torch
from contraction_cases import Case, find, tolerance
from emulation.emulate import emulate

from fusewright.runtime import nvrtc
from fusewright.schedule.tiling import Tiling, fitting

POOL = {"pool": "avg", "window": (4, 4), "step": (4, 4)}
CASES = {
    "sum over positions and features": Case((43, 68), channels=8, features=24, **POOL, fold="sum", fold_dims="cp"),
    "channels beyond an eighth, rows unaligned": Case((43, 67), channels=9, features=8, **POOL),
    "over channels, exchanged by warps": Case((39, 72), 3, 40, **POOL, fold="max", fold_dims="c"),
    "groups": Case((30, 44), 12, 10, (3, 3), groups=2, pool="avg", window=(2, 2), step=(2, 2)),
    "rows dilated, float32": Case((35, 68), 8, 5, (3, 2), dilation=(2, 1), **POOL, tf32=False),
    "rows apart": Case((34, 70), 8, 5, (1, 3), pool="avg", window=(2, 4), step=(3, 4)),
    "one dimension, float16": Case(
        (90,), 4, 8, (3,), (1,), (0,), (1,), pool="avg", window=(4,), step=(2,), dtype=torch.float16
    ),
    "float64": Case((31, 40), 5, 6, **POOL, dtype=torch.float64),
    "padded, whole vectors": Case((43, 64), 9, 8, (3, 3), padding=(1, 1), **POOL, fold="max", fold_dims="p"),
    "padded, rows unaligned": Case((37, 45), 5, 8, (3, 2), padding=(2, 1), dilation=(2, 1), **POOL),
    "padded along one dimension, float16": Case(
        (94,), 4, 19, (7,), (1,), (3,), (2,), pool="avg", window=(4,), step=(4,), dtype=torch.float16
    ),
    "padded, strides": Case(
        (41, 52),
        6,
        10,
        (3, 4),
        (2, 2),
        (2, 3),
        groups=2,
        pool="avg",
        window=(2, 3),
        step=(2, 3),
        fold="sum",
        fold_dims="c",
    ),
    "padded planes": Case(
        *((6, 18, 24), 5, 6, (3, 2, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
        **{"pool": "avg", "window": (2, 2, 2), "step": (2, 2, 2)},
    ),
    "planes": Case(
        *((6, 22, 35), 8, 6, (2, 3, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
        **{"pool": "avg", "window": (2, 4, 2), "step": (2, 4, 2)},
    ),
}


def by_warp(tilings: list[Tiling]) -> list[Tiling]:
    """The best one, and one of other cells along h, or along w."""
    best, *others = (t for t in tilings if t.by_warp)
    return [best, next(t for t in others if (t.cells_h, t.cells_w) != (best.cells_h, best.cells_w))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_as_the_model_in_float64(name: str) -> None:
    found = find(CASES[name], boxed=True)
    assert not isinstance(found, str) and found.group.box is not None
    x = found.case.example(5)
    want, size = found.reference(x)
    for t in by_warp(found.tilings()):
        for order, sanitize in (("forward", True), ("shuffled", False)):
            got = emulate(found.kernel(t), *found.tensors(x), order=order, sanitize=sanitize).double()
            error = ((got - want).abs() / size.clamp(min=1e-30)).max().item()
            assert error <= tolerance(found.case, boxed=True), (t, error)


# Real sizes: rows below a cell in two and three dimensions, with and without padding, and one long one.
REAL = {
    "padded": Case((66, 64), 8, 64, padding=(1, 1), **POOL, after=("sigmoid",)),
    "padded, one dimension": Case(
        *((93496,), 36, 19, (7,), (1,), (3,), (2,)),
        **{"pool": "avg", "window": (4,), "step": (4,), "fold": "min", "fold_dims": "p"},
    ),
    "planes": Case(
        *((32, 64, 64), 8, 16, (3,) * 3, (1,) * 3, (0,) * 3, (1,) * 3),
        **{"pool": "avg", "window": (2,) * 3, "step": (2,) * 3},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", REAL)
def test_compiles_without_spills(name: str, arch: str) -> None:
    """The best three tiles, with no more registers than their blocks may have."""
    found = find(REAL[name], boxed=True)
    assert not isinstance(found, str)
    for t in [t for t in found.tilings() if t.by_warp][:3]:
        taken = nvrtc.resources(nvrtc.compile(found.kernel(t).source, arch))
        assert all(entry.stack == 0 for entry in taken.values()), (t, taken)


@pytest.mark.parametrize(
    ("threads", "registers", "blocks"), [(480, 128, 1), (480, 136, 0), (192, 96, 3), (192, 112, 2)]
)
def test_every_fourth_warp_is_dealt_the_same_quarter_of_the_registers(
    threads: int, registers: int, blocks: int
) -> None:
    assert fitting(threads, 0, registers) == blocks
