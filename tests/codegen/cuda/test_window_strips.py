"""Window sums of which a thread forms several one below the other, keeping the rows that they share."""

from __future__ import annotations

import pytest
from contraction_cases import Case, find, tolerance
from emulation.emulate import emulate

from fusewright.codegen.cuda.contraction_box import strip

POOL = {"pool": "avg", "window": (4, 4), "step": (4, 4)}
CASES = {
    "rows shared": Case((43, 67), channels=9, features=8, **POOL, fold="sum", fold_dims="p"),
    "rows dilated": Case((35, 68), 8, 5, (3, 2), dilation=(2, 1), pool="avg", window=(4, 4), step=(2, 4), tf32=False),
    "rows apart": Case((34, 70), 8, 5, (1, 3), pool="avg", window=(2, 4), step=(3, 4)),
    "padded": Case((38, 44), 9, 8, (3, 3), padding=(1, 1), **POOL, fold="sum", fold_dims="p"),
    "padded, rows dilated": Case((35, 67), 8, 5, (3, 2), padding=(2, 1), dilation=(2, 1), **POOL),
    "planes": Case(
        *((6, 22, 35), 8, 6, (2, 3, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
        **{"pool": "avg", "window": (2, 4, 2), "step": (2, 4, 2)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_the_model_in_float64(name: str) -> None:
    found = find(CASES[name], boxed=True)
    assert not isinstance(found, str) and found.group.box is not None
    several = [t for t in found.tilings() if strip(found.group, t) > 1]
    assert several
    x = found.case.example(5)
    want, size = found.reference(x)
    for t in (several[0], several[-1]):
        got = emulate(found.kernel(t), *found.tensors(x)).double()
        error = ((got - want).abs() / size.clamp(min=1e-30)).max().item()
        assert error <= tolerance(found.case, boxed=True), (t, error)
