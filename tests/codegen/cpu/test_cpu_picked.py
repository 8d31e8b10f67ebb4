"""Streams on a CPU that read what a class has at its number, and compare whole numbers."""

from __future__ import annotations

import pytest
import torch
from codegen.cuda import test_stream_kernels as cases
from codegen.cuda.picked_cases import COMPARED, PICKED, given_as
from native_cases import quick
from test_cpu_stream import check

from fusewright.codegen.cpu.stream import kernel
from fusewright.runtime.native import launcher


@pytest.mark.parametrize("name", quick(PICKED, "loss", "some ignored"))
def test_picked(name: str) -> None:
    k = check(PICKED[name]())
    assert k.looks_up and f"row_of(d, {given_as(name)}" in k.source


@pytest.mark.parametrize("name", quick(COMPARED, "chosen"))
def test_compared(name: str) -> None:
    check(COMPARED[name]())


@pytest.mark.parametrize("wrong", [-1, 20, 2**31])
def test_what_is_no_class_is_an_index_error(wrong: int) -> None:
    call = launcher(kernel(cases.stream_of(PICKED["loss"]()), "fused_test"))
    x, classes = torch.randn(6, 20), torch.arange(6)
    classes[4] = wrong
    with pytest.raises(IndexError, match=r"^Target is out of bounds\.$"):
        call(x, classes)
