"""Functions of what channels are reduced to, in the kernel of the convolution that reduces them."""

from __future__ import annotations

from typing import Any

import pytest
from contraction_cases import Case, Found, find, tolerance
from emulation.emulate import ORDERS, emulate
from tile_families import FAMILIES, kernel_of
from warpgroup_cases import BF16

from fusewright.kernel import Kernel

OVER = {"fold": "min", "fold_dims": "c", "keepdim": True, "behind": ("tanh", "tanh")}
LOG = {"fold": "logsumexp", "fold_dims": "c", "behind": ("gate", "minus one", "clamp")}
POOLED = {"pool": "max", "window": (2, 2), "step": (2, 2)}
BOXED = {"pool": "avg", "window": (4, 4), "step": (4, 4)}


CASES: dict[str, tuple[str, Case]] = {
    "warps": ("warps", Case((7, 13), 5, 20, **OVER)),
    "warps, groups": ("warps", Case((6, 9), 4, 9, groups=3, **LOG)),
    "warps, pooled": ("warps", Case((8, 12), 5, 20, **POOLED, **LOG)),
    "features": ("features", Case((6, 16), 20, 64, padding=(1, 1), **OVER)),
    "features, groups": ("features", Case((6, 16), 20, 64, groups=2, **LOG)),
    "positions": ("positions", Case((5, 71), 5, 12, **LOG)),
    "positions, bfloat16": ("positions", Case((5, 64), 16, 12, dtype=BF16, **OVER)),
    "positions, softmax": ("positions", Case((9, 21), 9, 21, softmax="softmax", **OVER)),
    "windows": ("windows", Case((22, 150), 8, 16, **BOXED, **OVER)),
    "direct": ("direct", Case((9, 33), 3, 8, tf32=False, **LOG)),
    "direct, mean": (
        "direct",
        Case((9, 20), 3, 5, groups=2, tf32=False, fold="mean", fold_dims="c", behind=("minus one", "mish")),
    ),
}


def found(name: str) -> tuple[Found, list[Any]]:
    family, case = CASES[name]
    f = find(case, boxed=case.pool == "avg")
    assert isinstance(f, Found) and f.group.last is not None and f.group.last.root is f.group.root
    return f, FAMILIES[family](f)


def assert_right(f: Found, k: Kernel, **how: Any) -> None:
    x = f.case.example()
    got = emulate(k, *f.tensors(x), **how).double()
    want, size = f.reference(x)
    assert got.shape == want.shape
    assert ((got - want).abs() <= tolerance(f.case, f.group.box is not None) * (1 + size)).all(), (
        (got - want).abs().max()
    )


@pytest.mark.parametrize("name", CASES)
def test_as_the_model_in_float64(name: str) -> None:
    f, tiles = found(name)
    k = kernel_of(f, tiles[0])
    assert "last(" in k.source and ("last = [" in k.source)
    assert_right(f, k)


@pytest.mark.parametrize("name", ["warps, groups", "features, groups"])
def test_blocks_with_some_of_the_channels_leave_them_to_the_second_kernel(name: str) -> None:
    f, tiles = found(name)
    k = kernel_of(f, tiles[0])
    assert len(k.launches) > 1 and k.source.index("last = [") > k.source.index("_finish(")
    for order in ORDERS:
        assert_right(f, k, order=order)
    assert_right(f, k, sanitize=True)


def test_what_has_a_number_per_channel_is_left() -> None:
    assert isinstance(find(Case((7, 13), 5, 20, **{**OVER, "behind": ("tanh", "add channel")})), str)
