"""Launches that may begin while the ones before them end: kernels touch no global memory until those are done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = ["contraction_box", "contraction_warpgroup_producers", "direct_depthwise", "ranges_borders", "stream_add_relu"]


def ptx_of(source: str) -> str:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert int(status) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_before(name: str) -> None:
    """Operands are read-only to the compiler, which might read them sooner than it is told to wait."""
    entries = ptx_of((GOLDEN / f"{name}.cu").read_text()).split(".visible .entry")[1:]
    assert entries
    for entry in entries:
        before, wait, after = entry.partition("griddepcontrol.wait")
        assert wait
        of_global = re.compile(r"\b(?:ld|st|red|atom|cp|prefetch)\.(?!param|shared|local)[\w.:]+")
        assert not of_global.findall(before)
        assert of_global.findall(after)
