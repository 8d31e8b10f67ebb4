"""Where the greatest and the least are, by streams on a CPU: compiled, run, and compared with what eager finds."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pytest
import torch
from codegen.cuda import test_index_kernels as cases
from codegen.cuda.test_stream_kernels import fold, inp, pointwise, pool, stream_of
from native_cases import quick, run
from torch import Tensor

from fusewright.codegen.cpu import options
from fusewright.codegen.cpu.stream import kernel
from fusewright.ir.node import Node
from fusewright.schedule.group import Group

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = [name for name in cases.CASES if not name.startswith(("bfloat16", "float16"))]


def check(root: Node, given: dict[Node, Tensor]) -> None:
    s = stream_of(root)
    assert options(Group("stream", s, s.root, s.tensors), {}, {}) == [{}]
    got, want = run(kernel(s, "fused_test"), *(given[n] for n in s.tensors)), cases.eager(root, given)
    assert got.dtype == root.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", quick(CASES, "odd rows", "odd columns", "of sums", "tall columns, in parts"))
def test_value(name: str) -> None:
    root = cases.CASES[name]()
    for values in (cases.random, cases.few):
        check(root, {n: values(n, i) for i, n in enumerate(stream_of(root).tensors)})


@pytest.mark.parametrize("name", quick([n for n in cases.SPECIAL if n in CASES], "rows", "odd columns"))
def test_special_values(name: str) -> None:
    root = cases.CASES[name]()
    (x,) = stream_of(root).tensors
    for value in (nan, inf, -inf, 2.0):
        t = cases.random(x, 3)
        flat = t.view(-1)
        flat[5], flat[8], flat[-40], flat[-38] = (value,) * 4
        check(root, {x: t})
        check(root, {x: torch.full_like(t, value)})
    t.view(-1)[6], t.view(-1)[9] = nan, inf
    check(root, {x: t})


def test_what_is_left_to_aten() -> None:
    """Halves, which eager rounds on the way, and planes side by side."""
    half = pointwise("abs", inp(0, 4, 300, dtype=torch.bfloat16))
    for root in (fold(half, "argmax", 1), fold(pool(inp(0, 4, 16, 14, 14), "max", (2, 2)), "argmin", 2, 3)):
        s = stream_of(root)
        assert options(Group("stream", s, s.root, s.tensors), {}, {}) == []


def test_golden() -> None:
    text = kernel(stream_of(fold(pointwise("abs", inp(0, 64, 100, 300)), "argmax", 1)), "fused_abs_argmax").source
    assert text == (GOLDEN / "cpu_stream_abs_argmax.cpp").read_text()
