"""The ways to cut a contraction group that tests ask for by name, and the kernel of a tile of any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contraction_cases import Found

from fusewright.codegen.cuda import contraction, direct, warpgroup
from fusewright.kernel import Kernel
from fusewright.schedule import direct_choice, tiling, warpgroup_positions, warpgroup_windows
from fusewright.schedule import warpgroup as warpgroup_features
from fusewright.schedule.direct import DirectTile
from fusewright.schedule.tiling import Tiling

REFERENCE = "def reference(*operands): ..."


def _by_warpgroups(module: Any) -> Callable[[Found], list[Any]]:
    return lambda f: [t for _, t in module.candidates(f.group, f.cells, tf32=True)]


# How a family cuts a group.
FAMILIES: dict[str, Callable[[Found], list[Any]]] = {
    "warps": lambda f: tiling.candidates(f.group, f.cells, tf32=f.case.tf32),
    "features": _by_warpgroups(warpgroup_features),
    "positions": _by_warpgroups(warpgroup_positions),
    "windows": _by_warpgroups(warpgroup_windows),
    "direct": lambda f: direct_choice.candidates(f.group, f.cells, f.case.batch),
}


def kernel_of(f: Found, t: Any) -> Kernel:
    """The kernel of a group for a tile, whichever family's that is."""
    if isinstance(t, DirectTile):
        return direct.generate(f.group, t, "fused_test", REFERENCE)
    if isinstance(t, Tiling):
        return contraction.generate(f.group, t, "fused_test", REFERENCE, tf32=f.case.tf32)
    return warpgroup.generate(f.group, t, "fused_test", REFERENCE)
