"""Blocks of output channels of which the last one is not full."""

from __future__ import annotations

import pytest
from contraction_cases import Case, find, tolerance
from emulation.emulate import emulate

CASES = {
    "written": Case((3, 9), channels=5, features=300, kernel=(1, 1), before=("relu",)),
    "over channels": Case((3, 9), channels=4, features=700, kernel=(1, 1), fold="logsumexp", fold_dims="c"),
}


@pytest.mark.parametrize("name", CASES)
def test_as_the_model_in_float64(name: str) -> None:
    found = find(CASES[name])
    assert not isinstance(found, str), found
    features = found.case.features
    uneven = [t for t in found.tilings() if features > t.block_m and -features % t.block_m >= 16]
    t = min(uneven, key=lambda t: (t.warps, t.m_tiles))
    x = found.case.example(7)
    want, size = found.reference(x)
    got = emulate(found.kernel(t), *found.tensors(x)).double()
    error = ((got - want).abs() / size.clamp(min=1e-30)).max().item()
    assert error <= tolerance(found.case), (t, error)
