"""Maxima over positions of functions that dip, which threads find from the greatest and the least of their values: in
every way to cut a group they run on the CPU, and are compared with the model in float64."""

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
from product_cases import Case as OfMatmul
from product_cases import found as product
from warpgroup_cases import assert_kernel_not_finite_as_eager, first

from fusewright.codegen.cuda import direct, generate, options
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.ir import ops
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule import direct_choice, warpgroup, warpgroup_positions, warpgroup_windows
from fusewright.schedule.group import Group
from fusewright.schedule.window_ends import at_ends

BF16, F16 = torch.bfloat16, torch.float16

# The ways to cut a group, each with its best kernel.
Way = Callable[[Found], Kernel]


def _features(f: Found) -> Kernel:
    (t,) = first(warpgroup, f)
    return cuda.generate(f.group, t, "fused_test", "")


def _positions(f: Found) -> Kernel:
    (t,) = first(warpgroup_positions, f)
    return cuda.generate(f.group, t, "fused_test", "")


def _direct(f: Found) -> Kernel:
    t = direct_choice.candidates(f.group, f.cells, f.case.batch)[0]
    return direct.generate(f.group, t, "fused_test", "")


WAYS: dict[str, Way] = {
    "warps": lambda f: f.kernel(f.tilings()[0]),
    "clusters": lambda f: f.kernel(f.tilings()[0], blocks=2),
    "features": _features,
    "positions": _positions,
    "direct": _direct,
}

PLAIN = Case((20, 27), 2, 11, (3, 3), padding=(1, 1), before=("gelu",), fold="max", fold_dims="p")
CASES: dict[str, Case] = {
    "gelu": PLAIN,
    "over all": replace(PLAIN, before=("hardswish",), fold_dims="cp", keepdim=True),
    "rising and falling before": replace(PLAIN, before=("tanh", "minus one", "divide", "reverse", "mish")),
    "a channel's numbers before": replace(PLAIN, before=("add channel", "mish"), bias=False, fold_dims="cp"),
    "what does neither before": replace(PLAIN, before=("gate", "sine", "scale", "mish"), fold_dims="cp"),
    "whole blocks": replace(PLAIN, features=32, before=("mish",)),
    "one dimension": Case((200,), 3, 9, (5,), (1,), (2,), (1,), before=("mish",), fold="max", fold_dims="cp"),
    "bfloat16": replace(PLAIN, dtype=BF16, fold_dims="cp"),
}
MORE: dict[str, tuple[Case, tuple[str, ...]]] = {
    "groups": (  # one block has the features of one
        replace(PLAIN, channels=1, groups=3, features=5, before=("tanh", "square")),
        ("warps", "features", "positions", "direct"),
    ),
    "more whole blocks": (replace(PLAIN, features=64, fold_dims="cp"), ("features",)),
    "phases": (replace(PLAIN, sizes=(9, 14), stride=(2, 2), transposed=True), tuple(WAYS)),
    "float16": (replace(PLAIN, dtype=F16), ("warps", "features")),
    "float64": (replace(PLAIN, dtype=torch.float64, fold_dims="cp"), ("warps", "direct")),
    "channels last": (replace(PLAIN, channels=8, channels_last=True), ("warps", "features", "positions")),
}
EACH = [pytest.param(case, way, id=f"{name}, {way}") for name, case in CASES.items() for way in WAYS] + [
    pytest.param(case, way, id=f"{name}, {way}") for name, (case, ways) in MORE.items() for way in ways
]


def found(case: Case, boxed: bool = False) -> Found:
    f = find(case, boxed)
    assert isinstance(f, Found), f
    ends = at_ends(f.group)
    assert ends.folds_ends
    return replace(f, group=ends)


def kernel(f: Found, way: str) -> Kernel:
    """A function of the ends that a thread has seen, once all of its values are among them."""
    return _kernel(f.case, way)


@cache  # the best tile takes long to find, and no number has a part in it
def _kernel(case: Case, way: str) -> Kernel:
    made = WAYS[way](found(case))
    assert_of_ends(made)
    return made


def assert_of_ends(made: Kernel) -> None:
    assert "Ends total" in made.source and "at_end(total" in made.source


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


def test_of_window_sums() -> None:
    """Which warps have each its own of."""
    case = replace(PLAIN, padding=(0, 0), before=(), pool="avg", window=(2, 2), step=(2, 2), pool_padding=(0, 0))
    f = found(replace(case, after=("gelu",), channels=4), boxed=True)
    _, t = warpgroup_windows.candidates(f.group, f.cells, tf32=True)[0]
    made, x = cuda.generate(f.group, t, "fused_test", ""), f.case.example()
    assert_of_ends(made)
    want, size = f.reference(x)
    assert error_of(emulate(made, *f.tensors(x)), want, size) <= tolerance(f.case, boxed=True)


@pytest.mark.parametrize("over", ["t", "ft"])
def test_of_matmuls(over: str) -> None:
    f = product(OfMatmul((3, 150, 131), 129, ("mish",), "max", over))
    group = Group("product", f.group, f.group.root, f.group.tensors)
    (option, *_) = options(group, {f.group.x.shape[0]: 3}, {}, tf32=False, capability=80)
    made = generate(group, "fused_test", option, tf32=False)
    assert_of_ends(made)
    f.assert_right(lambda *operands: emulate(made, *operands))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gelu", "over all", "a channel's numbers before"])
@pytest.mark.sampled
def test_what_is_not_finite(name: str, way: str) -> None:
    """NaN and infinities surface where eager has them: mish of -inf is NaN, whatever else there is."""
    f = found(CASES[name])
    assert assert_kernel_not_finite_as_eager(f, kernel(f, way)).isnan().any()


@pytest.mark.parametrize("way", WAYS)
def test_threads_without_values(way: str) -> None:
    """They leave nothing: of what is negative everywhere, no function of theirs is the maximum."""
    f = found(replace(PLAIN, sizes=(3, 33), kernel=(1, 1), padding=(0, 0), features=3, before=("minus one", "gelu")))
    f.model.conv.weight.data.zero_()
    f.model.conv.bias.data.fill_(-0.5)
    got = emulate(kernel(f, way), *f.tensors(x := f.case.example()))
    assert (got < -0.1).all()
    torch.testing.assert_close(got.double(), f.reference(x)[0])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"fold": "min"}, id="a minimum"),
        pytest.param({"fold": "sum"}, id="a sum"),
        pytest.param({"fold_dims": "c"}, id="over channels alone"),
        pytest.param({"before": ("sine",)}, id="neither rises nor dips"),
        pytest.param({"before": ("square",)}, id="costs what a comparison does"),
        pytest.param({"before": ()}, id="nothing is computed"),
        pytest.param({"softmax": "softmax"}, id="a softmax lies between"),
        pytest.param({"sizes": (8, 8)}, id="few values for each thread"),
    ],
)
def test_what_has_no_ends(changes: dict[str, Any]) -> None:
    f = find(replace(PLAIN, **changes))
    assert isinstance(f, Found) and at_ends(f.group) is f.group


def test_what_stays_ahead() -> None:
    """As far back as values are ordered, and what is read is a single number."""
    assert found(CASES["rising and falling before"]).group.before is None
    neither = found(CASES["what does neither before"]).group
    assert neither.before is not None and neither.before.root.op == ops.Pointwise("sin")
    of_channels = found(CASES["a channel's numbers before"]).group
    assert of_channels.before is not None and of_channels.before.root.op == ops.Pointwise("add")


def test_they_are_what_is_measured() -> None:
    """Every option of a group, as the tuner has them."""
    f = find(replace(PLAIN, sizes=(300, 402), features=46))
    assert isinstance(f, Found)
    group = Group("contraction", f.group, f.group.root, f.group.tensors)
    ways = options(group, {f.group.x.shape[0]: 2}, {}, tf32=True, capability=90)
    first = {next(iter(option)): option for option in reversed(ways)}
    assert {"tiling", "warpgroup", "positions"} <= first.keys()
    for option in first.values():
        assert_of_ends(generate(group, "fused_test", option, tf32=True))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("way", ["warps", "clusters", "direct"])
def test_kernels_compile_without_spills(way: str, arch: str) -> None:
    if way == "clusters" and arch == "sm_80":
        pytest.skip("there are none")
    k = kernel(found(replace(PLAIN, sizes=(120, 131), features=46, before=("mish",))), way)
    assert all(r.stack == 0 for r in nvrtc.resources(nvrtc.compile(k.source, arch)).values())


@pytest.mark.parametrize("way", ["features", "positions"])
@pytest.mark.parametrize("dims", ["p", "cp"])
def test_kernels_of_warpgroups_compile_without_spills(way: str, dims: str) -> None:
    k = kernel(found(replace(PLAIN, sizes=(120, 131), features=46, before=("mish",), fold_dims=dims)), way)
    assert all(r.stack == 0 for r in nvrtc.resources(nvrtc.compile(k.source, "sm_90a")).values())
