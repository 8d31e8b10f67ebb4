"""Kernels of every family built for other processors and by other compilers, run, and compared with float64."""

from __future__ import annotations

import pytest
import standalone
import torch
from codegen.cuda import test_sample_kernels as sample_cases
from codegen.cuda import test_stream_kernels as stream_cases
from family_cases import FAMILIES

from fusewright.codegen.cpu import sample, stream

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
@pytest.mark.sampled
def test_right_on(machine: str, family: str, name: str) -> None:
    standalone.MACHINES[machine].skip_where_missing()
    case = FAMILIES[family](name)
    case.assert_right(standalone.run(case.kernel, *case.tensors, machine=standalone.MACHINES[machine]))


@pytest.mark.parametrize("machine", standalone.MACHINES)
@pytest.mark.parametrize("kind", ["max", pytest.param("min", marks=pytest.mark.slow)])
def test_infinities_alone(machine: str, kind: str) -> None:
    """Where a compiler's own reductions start from the largest finite number, the infinity is lost."""
    standalone.MACHINES[machine].skip_where_missing()
    x = torch.full((3, 70), -float("inf") if kind == "max" else float("inf"))
    x[1, 5], x[2, 69] = 1.5, -float("inf")
    want = getattr(x, f"a{kind}")(1)
    of_rows = stream.kernel(
        stream_cases.stream_of(stream_cases.fold(stream_cases.inp(0, 3, 70), kind, 1)), "fused_test"
    )
    of_samples = sample.kernel(
        sample_cases.program(sample_cases.fold(sample_cases.inp(0, 3, 70), kind, 1)), "fused_test"
    )
    for kernel in (of_rows, of_samples):
        assert torch.equal(standalone.run(kernel, x, machine=standalone.MACHINES[machine]), want)
