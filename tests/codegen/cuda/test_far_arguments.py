"""Sines of products that are far away: a thread changes all of its products as if they were near, and once more where
one was not.  Numbers are small integers times a power of two, so that arguments have no error."""

from __future__ import annotations

from collections.abc import Callable

import direct_cases
import pytest
import torch
import warpgroup_cases
from contraction_cases import Case, Found, find
from emulation.emulate import emulate

from fusewright.kernel import Kernel
from fusewright.schedule import warpgroup, warpgroup_positions

FAR, nan = 1e5, float("nan")
STEPS = ("times channel", "sine")

CASES = {
    "written": Case((9, 21), 5, 20, before=STEPS),
    "written in runs": Case((40,), 8, 12, (3,), (3,), (0,), (1,), transposed=True, output_padding=(0,), before=STEPS),
    "over positions": Case((9, 21), 5, 20, before=STEPS, fold="sum", fold_dims="p"),
    "over channels": Case((9, 21), 5, 20, before=STEPS, fold="max", fold_dims="c"),
    "over both": Case((9, 21), 5, 20, before=("times channel", "cosine"), fold="sum", fold_dims="cp"),
    "pooled": Case((9, 21), 5, 20, before=STEPS, pool="max", window=(2, 2), step=(2, 2)),
    "pooled over others": Case((9, 21), 5, 20, before=STEPS, pool="avg", window=(3, 2), step=(1, 2)),
    "gate": Case((9, 21), 5, 20, before=("times channel", "minus one", "cosine", "gate")),
}


def of_tilings(f: Found) -> Kernel:
    return f.kernel(f.tilings()[0])


def direct(f: Found) -> Kernel:
    return direct_cases.kernel(f, direct_cases.tiles(f)[0])


def of_warpgroups(f: Found) -> Kernel:
    return warpgroup_cases.kernel(f, *warpgroup_cases.first(warpgroup, f))


def of_positions(f: Found) -> Kernel:
    return warpgroup_cases.kernel(f, *warpgroup_cases.first(warpgroup_positions, f))


FAMILIES = (of_tilings, direct, of_warpgroups, of_positions)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled
def test_near_and_far(family: Callable[[Found], Kernel], name: str) -> None:
    f = find(CASES[name])
    assert isinstance(f, Found), f
    draw = torch.Generator().manual_seed(0)
    for parameter, most in ((f.model.conv.weight, 2), (f.model.conv.bias, 9)):
        parameter.data = torch.randint(-most, most + 1, parameter.shape, generator=draw).float()
    f.model.p.data.fill_(4096)
    x = torch.randint(-4, 5, f.case.example().shape, generator=draw).float()
    x[0, 0].view(-1)[0] = nan
    arguments = f.model.conv(x).detach().abs() * 4096
    assert (arguments > FAR).any() and (arguments < FAR).any() and arguments.nan_to_num().max() < 2**22
    k = family(f)
    assert "maths.sine(" in k.source or "maths.cosine(" in k.source
    want, _ = f.reference(x)
    got = emulate(k, *f.tensors(x)).double()
    scale = (arguments.numel() / want.numel()) ** 0.5 if f.case.fold == "sum" else 1.0
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * scale, equal_nan=True)
