"""Kernels of every family built for other processors and by other compilers, run, and compared with float64."""

from __future__ import annotations

import pytest
import standalone
from family_cases import FAMILIES

QUICK = [("contraction", "windows, then all"), ("stream", "div, pool, mean, bias, sum")]
CASES = {
    "contraction": (
        *("plain", "stem", "transposed", "grouped", "overlapping windows", "logsumexp", "box", "float64", "bfloat16"),
        *("float16", "channels last, bfloat16", "windows, then all", "depthwise", "depthwise, channels last"),
    ),
    "range reduction": ("borders", "step 2", "float64 borders", "bf16 borders", "fp16 to fp16", "of exp, ranges"),
    "sample program": ("founding", "head", "softmax", "var", "float64 product", "bf16 head", "fp16 softmax"),
    "stream": ("channel bias", "residual", "div, pool, mean, bias, sum", "logsumexp of channels", "where", "3-d avg"),
}


@pytest.mark.parametrize("machine", standalone.MACHINES)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[] if (family, name) in QUICK else pytest.mark.slow)
        for family, names in CASES.items()
        for name in names
    ],
)
def test_right_on(machine: str, family: str, name: str) -> None:
    standalone.MACHINES[machine].skip_where_missing()
    case = FAMILIES[family](name)
    case.assert_right(standalone.run(case.kernel, *case.tensors, machine=standalone.MACHINES[machine]))
