"""Kernels under AddressSanitizer and UBSan: their text with a main function, on arrays of their very size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import standalone
from family_cases import FAMILIES

CONTRACTIONS = (
    *("transposed, holes", "flat", "stem", "transposed, pooled", "overlapping windows", "channels last, bfloat16"),
    *("over channels of groups", "padded", "one row between", "box of strides", "one dimension", "float64"),
    *("depthwise", "depthwise, three each", "depthwise, channels last", "depthwise, transposed", "box, depthwise"),
)
CASES = [
    *(("contraction", name) for name in CONTRACTIONS),
    *(("range reduction", n) for n in ("borders, odd", "shared planes", "1-d step 4", "3-d step 2", "windows of both")),
    *(("stream", name) for name in ("max 3 s2 p1", "avg ceil without padding", "residual", "long rows, then sum")),
    *(("stream", name) for name in ("tall columns", "logsumexp of channels", "before and after", "two of many")),
    *(("sample program", name) for name in ("founding", "head", "bf16 layer norm", "slice of a permutation", "matmul")),
]
QUICK = ("flat", "borders, odd", "residual", "head")


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*c, marks=[] if c[1] in QUICK else pytest.mark.slow) for c in CASES]
)
def test_nothing_is_read_or_written_outside(family: str, name: str) -> None:
    case = FAMILIES[family](name)
    case.assert_right(standalone.run(case.kernel, *case.tensors, threads=3))


@pytest.mark.slow
def test_a_write_outside_is_found() -> None:
    case = FAMILIES["stream"]("residual")
    source = case.kernel.source
    assert "value[e] =" in source
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        standalone.run(replace(case.kernel, source=source.replace("value[e] =", "value[e + 1] =")), *case.tensors)


@pytest.mark.slow
def test_undefined_behaviour_is_found() -> None:
    case = FAMILIES["stream"]("residual")
    head, body, rest = case.kernel.source.partition("value[e] =")
    text = f"{head}{{ volatile int most = 0x7fffffff; most = most + 1; }}\n{body}{rest}"
    with pytest.raises(AssertionError, match="signed integer overflow"):
        standalone.run(replace(case.kernel, source=text), *case.tensors)
