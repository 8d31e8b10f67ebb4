"""A logsumexp of values that a function keeps small is the logarithm of a sum: nothing is subtracted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from contraction_cases import Case, Found, find
from emulation.emulate import ORDERS, emulate
from test_far_arguments import FAMILIES

from fusewright.kernel import Kernel

F64, BF16 = torch.float64, torch.bfloat16
inf, nan = float("inf"), float("nan")

LOGSUMEXP = Case((9, 21), 5, 20, before=("tanh",), fold="logsumexp", fold_dims="c")
SINE = replace(LOGSUMEXP, before=("sine",))
POOLED = replace(LOGSUMEXP, pool="max", window=(2, 2), step=(2, 2), before=(), after=("add channel", "sigmoid"))
CASES = {
    "over channels": LOGSUMEXP,
    "over channels of a sine": SINE,
    "over groups": replace(LOGSUMEXP, groups=2, features=11),
    "over positions": replace(LOGSUMEXP, fold_dims="p"),
    "over both": replace(LOGSUMEXP, fold_dims="cp", before=("arc tangent",)),
    "over both of a sine": replace(SINE, fold_dims="cp"),
    "pooled": POOLED,
    "pooled, over positions": replace(POOLED, fold_dims="p", before=("sine",)),
    "clamped": replace(LOGSUMEXP, before=("clamp",), bias=False),
    "bfloat16": replace(LOGSUMEXP, dtype=BF16, channels=8),
}


def found(case: Case) -> Found:
    result = find(case)
    assert isinstance(result, Found), result
    return result


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled
def test_against_float64(family: Callable[[Found], Kernel], name: str) -> None:
    f = found(CASES[name])
    k = family(f)
    assert "LogSum" not in k.source and "exp2_approx(1.44269504f * " in k.source
    x = f.case.example()
    want, _ = f.reference(x)
    got = emulate(k, *f.tensors(x), order=ORDERS[len(name) % 3]).double()
    rtol = 1e-5 if f.case.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_in_float64(family: Callable[[Found], Kernel]) -> None:
    f = found(replace(LOGSUMEXP, dtype=F64, tf32=False))
    k = family(f)
    assert "LogSum" not in k.source
    x = f.case.example()
    torch.testing.assert_close(emulate(k, *f.tensors(x)), f.reference(x)[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled
def test_no_number_is_kept(family: Callable[[Found], Kernel]) -> None:
    f = found(replace(SINE, batch=3))
    x = f.case.example()
    x[0, 0, 3, 4], x[1, 2, 5, 6] = nan, inf
    want, _ = f.reference(x)
    got = emulate(family(f), *f.tensors(x)).double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert want[:2].isnan().any() and want[2].isfinite().all()


@pytest.mark.parametrize(
    "case",
    [
        replace(LOGSUMEXP, before=("relu",)),
        replace(LOGSUMEXP, before=("tanh", "large")),
        replace(LOGSUMEXP, before=()),
        replace(LOGSUMEXP, pool="max", window=(2, 2), step=(2, 2)),  # no function behind the pool
    ],
    ids=["not bounded", "too large", "of products", "behind a pool"],
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled
def test_other_values_keep_a_shift(family: Callable[[Found], Kernel], case: Case) -> None:
    assert "LogSum" in family(found(case)).source
