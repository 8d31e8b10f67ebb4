"""Weights that a launch beforehand lays out: chunks of channels, of every phase, group and precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from contraction_cases import Case, find, tolerance
from emulation.emulate import emulate

from fusewright.codegen.cuda import contraction_weights

CASES = {
    "plain": Case((7, 13), channels=11, features=20, before=("relu",)),
    "even taps": Case((6, 9), channels=9, features=5, kernel=(2, 4), groups=2, fold="sum", fold_dims="p"),
    "phases": Case((5, 6), 13, 19, (3, 5), (2, 3), (1, 2), transposed=True, groups=2, before=("relu",)),
    "three-fold tf32": Case((6, 10), channels=9, features=17, fold="max", fold_dims="c", tf32=False),
    "float64": Case((5, 7), 6, 7, dtype=torch.float64),
    "pairs": Case((6, 9), 24, 18, dtype=torch.bfloat16, channels_last=True),
    "columns": Case((6, 9), 12, 18, transposed=True, stride=(2, 1), channels_last=True),
}


@pytest.mark.parametrize("name", CASES)
def test_as_the_model_in_float64(name: str) -> None:
    found = find(CASES[name])
    assert not isinstance(found, str), found
    tilings = [t for t in found.tilings() if t.chunk < found.case.channels]
    assert tilings
    x = found.case.example(3)
    want, size = found.reference(x)
    other = replace(tilings[-1], together_h=not tilings[-1].together_h)
    for t in (replace(tilings[0], stages=1), replace(tilings[0], stages=2), replace(other, stages=2)):
        kernel = found.kernel(t)
        assert ("next" in kernel.source) == (t.stages == 2)
        assert kernel.launches[0].entry == "fused_test_pack" and kernel.scratch[0].name == "packed"
        got = emulate(kernel, *found.tensors(x)).double()
        error = ((got - want).abs() / size.clamp(min=1e-30)).max().item()
        assert error <= tolerance(found.case), (t, error)


def test_several_blocks_pack_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contraction_weights, "PACKED_BY_THREAD", 1)
    found = find(CASES["phases"])
    assert not isinstance(found, str), found
    kernel = found.kernel(next(t for t in found.tilings() if t.chunk < found.case.channels))
    assert int(kernel.launches[0].grid[2]) > 1
    x = found.case.example(3)
    want, size = found.reference(x)
    error = ((emulate(kernel, *found.tensors(x)).double() - want).abs() / size.clamp(min=1e-30)).max().item()
    assert error <= tolerance(found.case)


def test_weights_that_stay_are_not_packed() -> None:
    found = find(CASES["plain"])
    assert not isinstance(found, str), found
    whole = next(t for t in found.tilings() if t.chunk == found.case.channels)
    assert [launch.entry for launch in found.kernel(whole).launches] == ["fused_test"]
