"""Maxima of windows of functions that dip, which kernels find from the greatest and the least value of each: they run
on the CPU in every way to cut a group, and are compared with the model in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from contraction_cases import Case, Found, find, tolerance
from direct_cases import error_of, precision
from emulation.emulate import ORDERS, emulate
from warpgroup_cases import assert_kernel_not_finite_as_eager, first

from fusewright.codegen.cuda import direct, direct_taps, generate, options, warpgroup
from fusewright.ir import ops
from fusewright.ir.pointwise import traits
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule import direct_choice, warpgroup_pools, warpgroup_positions
from fusewright.schedule import direct_taps as taps
from fusewright.schedule.group import Group
from fusewright.schedule.window_ends import at_ends

BF16, F16 = torch.bfloat16, torch.float16

# The ways to cut a group, each with its best kernel.
Way = Callable[[Found], Kernel]


def _positions(f: Found) -> Kernel:
    (t,) = first(warpgroup_positions, f)
    return warpgroup.generate(f.group, t, "fused_test", "")


def _pools(f: Found) -> Kernel:
    (t,) = first(warpgroup_pools, f)
    return warpgroup.generate(f.group, t, "fused_test", "")


def _direct(f: Found) -> Kernel:
    t = direct_choice.candidates(f.group, f.cells, f.case.batch)[0]
    return direct.generate(f.group, t, "fused_test", "")


def _taps(f: Found) -> Kernel:
    t = taps.candidates(f.group, f.cells, f.case.batch, tf32=f.case.tf32)[0]
    return direct_taps.generate(f.group, t, "fused_test", "")


WAYS: dict[str, Way] = {
    "warps": lambda f: f.kernel(f.tilings()[0]),
    "positions": _positions,
    "pools": _pools,
    "direct": _direct,
    "taps": _taps,
}

PLAIN = Case((20, 27), 2, 11, (3, 3), padding=(1, 1), pool="max", window=(2, 3), step=(2, 3), before=("gelu",))
CASES: dict[str, Case] = {
    "gelu": PLAIN,
    "rising and falling before": replace(PLAIN, before=("tanh", "add channel", "divide", "reverse", "mish")),
    "what does neither before": replace(PLAIN, before=("gate", "sine", "scale", "mish"), after=("add channel",)),
    "padding": replace(PLAIN, before=("hardswish",), window=(3, 3), step=(2, 2), pool_padding=(1, 1), ceil_mode=True),
    "no bias": replace(PLAIN, bias=False, before=("add channel", "gelu"), after=("tanh", "times channel")),
    "over channels": replace(PLAIN, fold="logsumexp", fold_dims="c", after=("times channel",)),
    "over positions": replace(PLAIN, fold="mean", fold_dims="p", before=("mish",)),
    "over all": replace(PLAIN, fold="sum", fold_dims="cp", before=("mish",)),
    "groups": replace(PLAIN, channels=1, groups=3, features=5, before=("tanh", "square")),
    "bfloat16": replace(PLAIN, dtype=BF16),
    "one dimension": Case((200,), 3, 9, (5,), (1,), (2,), (1,), pool="max", window=(4,), step=(4,), before=("mish",)),
}
MORE: dict[str, tuple[Case, tuple[str, ...]]] = {
    "overlap": (replace(PLAIN, window=(5, 5), step=(2, 2)), ("pools", "direct", "taps")),
    "phases": (replace(PLAIN, sizes=(9, 14), stride=(2, 2), transposed=True, window=(4, 2), step=(4, 2)), tuple(WAYS)),
    "large windows": (replace(PLAIN, sizes=(33, 40), window=(8, 9), step=(3, 4)), ("direct", "taps")),
    "float16": (replace(PLAIN, dtype=F16), ("warps", "pools")),
    "float64": (replace(PLAIN, dtype=torch.float64), ("warps", "direct")),
    "channels last": (replace(PLAIN, channels=8, channels_last=True), ("warps", "positions", "pools")),
    "three dimensions": (
        Case(
            *((6, 9, 12), 2, 5, (3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3),
            **{"pool": "max", "window": (2, 3, 2), "step": (2, 3, 2), "before": ("mish",)},
        ),
        tuple(WAYS),
    ),
}
EACH = [pytest.param(case, way, id=f"{name}, {way}") for name, case in CASES.items() for way in WAYS] + [
    pytest.param(case, way, id=f"{name}, {way}") for name, (case, ways) in MORE.items() for way in ways
]


def found(case: Case) -> Found:
    f = find(case)
    assert isinstance(f, Found), f
    ends = at_ends(f.group)
    assert ends.ends is not None
    return replace(f, group=ends)


def kernel(f: Found, way: str) -> Kernel:
    """Every value of a window goes into its ends, of which the function is computed."""
    return _kernel(f.case, way)


@cache  # the best tile takes long to find, and no number has a part in it
def _kernel(case: Case, way: str) -> Kernel:
    made = WAYS[way](found(case))
    assert "at_end(" in made.source and "Ends pooled" in made.source
    return made


@pytest.mark.parametrize(("case", "way"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(case: Case, way: str) -> None:
    f = found(case)
    x = case.example()
    want, size = f.reference(x)
    most = precision(case) if way == "direct" else tolerance(case)
    for order in ORDERS:
        got = emulate(kernel(f, way), *f.tensors(x), order=order)
        assert got.shape == want.shape and got.dtype == case.dtype
        assert error_of(got, want, size) <= most


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gelu", "no bias", "padding"])
@pytest.mark.sampled
def test_what_is_not_finite(name: str, way: str) -> None:
    """NaN and infinities surface where eager has them: mish of -inf is NaN, whatever else a window has."""
    f = found(CASES[name])
    assert assert_kernel_not_finite_as_eager(f, kernel(f, way)).isnan().any()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pool": "avg"}, id="an average"),
        pytest.param({"before": ("sine",)}, id="neither rises nor dips"),
        pytest.param({"before": ("gelu", "sine")}, id="a wave of what dips"),
        pytest.param({"before": ("square",)}, id="costs what a comparison does"),
        pytest.param({"before": ()}, id="nothing is computed"),
        pytest.param({"softmax": "softmax"}, id="a softmax lies between"),
        pytest.param({"window": (1, 2), "step": (1, 2)}, id="a window that is its ends"),
        pytest.param({"before": ("gelu", "tanh")}, id="the rules move what rises behind the pool"),
    ],
)
def test_what_has_no_ends(changes: dict[str, Any]) -> None:
    f = find(replace(PLAIN, **changes))
    assert isinstance(f, Found) and at_ends(f.group) is f.group


def test_what_stays_ahead() -> None:
    """As far back as values are ordered: a sigmoid gate is not, what follows it is."""
    group = found(CASES["what does neither before"]).group
    assert group.before is not None and group.ends is not None
    assert group.ends.value is group.before.root and group.before.root.op == ops.Pointwise("sin")
    assert found(CASES["rising and falling before"]).group.before is None
    scaled = found(replace(PLAIN, before=("tanh", "times channel", "mish"))).group  # which may be inf, and tanh(0) is 0
    assert scaled.before is not None and scaled.before.root.op == ops.Pointwise("mul")


@pytest.mark.parametrize("fn", ["abs", "square", "cosh", "gelu", "silu", "mish", "hardswish"])
def test_functions_that_dip(fn: str) -> None:
    """They fall up to where they are least, and rise from there."""
    assert traits(fn).dips
    x = torch.linspace(-30, 30, 60001, dtype=torch.float64)
    y = eval(traits(fn).torch.format("x"), {"torch": torch, "F": torch.nn.functional, "x": x})
    least = int(y.argmin())
    steps, slack = torch.diff(y), 1e-12
    assert bool((steps[:least] <= slack).all()) and bool((steps[least:] >= -slack).all())


def test_they_are_what_is_measured() -> None:
    """Every option of a group, as the tuner has them."""
    f = find(replace(PLAIN, sizes=(300, 402), features=46, kernel=(1, 1), padding=(0, 0)))
    assert isinstance(f, Found)
    group = Group("contraction", f.group, f.group.root, f.group.tensors)
    ways = options(group, {f.group.x.shape[0]: 2}, {}, tf32=True, capability=90)
    first = {next(iter(option)): option for option in reversed(ways)}
    assert {"tiling", "pools", "taps"} <= first.keys()
    assert all("at_end(" in generate(group, "fused_test", option, tf32=True).source for option in first.values())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("way", ["warps", "direct", "taps"])
def test_kernels_compile_without_spills(way: str, arch: str) -> None:
    k = kernel(found(replace(PLAIN, sizes=(120, 131), features=46, before=("mish",))), way)
    assert all(r.stack == 0 for r in nvrtc.resources(nvrtc.compile(k.source, arch)).values())


@pytest.mark.parametrize("way", ["positions", "pools"])
def test_kernels_of_warpgroups_compile_without_spills(way: str) -> None:
    k = kernel(found(replace(PLAIN, sizes=(120, 131), features=46, before=("mish",))), way)
    assert all(r.stack == 0 for r in nvrtc.resources(nvrtc.compile(k.source, "sm_90a")).values())
