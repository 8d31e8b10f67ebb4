"""The functions that vector loops use: their errors against float64, over all kinds of arguments."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standalone
import torch
from codegen.cuda.test_stream_kernels import inp, stream_of
from native_cases import run
from torch import Tensor

from fusewright.codegen.cpu import maths
from fusewright.codegen.cpu.primitives import PRIMITIVES, used_primitives
from fusewright.codegen.cpu.stream import kernel
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node
from fusewright.runtime import compiler

F32, F64 = torch.float32, torch.float64
inf, nan = float("inf"), float("nan")
# The greatest error in float32, in units of the last place.
ULPS = {
    **{"exp": 1.25, "exp2": 1.25, "expm1": 2.0, "log": 1.0, "log2": 1.75, "log1p": 1.75, "tanh": 2.5, "erf": 1.25},
    **{"sigmoid": 3.0, "sin": 1.75, "cos": 1.75, "atan": 1.75},
}
SPECIAL = [0.0, -0.0, inf, -inf, nan, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 88.72, 88.73, -87.4, -103.9, -104.1, 1, -1]


def arguments(dtype: torch.dtype) -> Tensor:
    """A spread of all float32 bit patterns, the range that matters densely, and what is special."""
    spread = np.arange(0, 2**32, 4001, dtype=np.uint64).astype(np.uint32).view(np.float32).copy()
    parts = [torch.from_numpy(spread), torch.linspace(-30, 30, 200_003), torch.linspace(-2, 2, 200_003)]
    return torch.cat([*parts, torch.tensor(SPECIAL)]).to(dtype)


def computed(fn: str, x: Tensor, run: Callable[..., Tensor] = run) -> Tensor:
    return run(kernel(stream_of(pointwise(fn, inp(0, len(x), dtype=x.dtype))), f"fused_{fn}"), x)


def ulps(got: Tensor, want: Tensor) -> Tensor:
    rounded = want.to(got.dtype).abs()
    step = torch.nextafter(rounded, torch.full_like(rounded, inf)).double() - rounded.double()
    return (got.double() - want).abs() / step


@pytest.mark.parametrize("fn", ULPS)
def test_float32(fn: str) -> None:
    assert_float32(fn, run)


@pytest.mark.parametrize("machine", standalone.MACHINES)
@pytest.mark.parametrize("fn", [pytest.param(fn, marks=[] if fn == "tanh" else pytest.mark.slow) for fn in ULPS])
def test_float32_on(machine: str, fn: str) -> None:
    """Other processors and compilers; without instructions that multiply and add at once, too."""
    assert_float32(fn, partial(standalone.run, machine=standalone.MACHINES[machine]))


def assert_float32(fn: str, run: Callable[..., Tensor]) -> None:
    x = arguments(F32)
    got, want = computed(fn, x, run), getattr(torch, fn)(x.double())
    finite = want.float().isfinite()
    if fn == "sigmoid":  # as in eager, 1 + exp(-x) is infinite before the result is zero
        finite &= x > -88
    torch.testing.assert_close(got[~finite], want.float()[~finite], rtol=0, atol=1e-38, equal_nan=True)
    worst = ulps(got, want)[finite].max()
    assert worst <= ULPS[fn], (float(x[finite][ulps(got, want)[finite].argmax()]), float(worst))


@pytest.mark.parametrize("fn", ["exp", "log", "tanh", "erf", "sigmoid"])
def test_float64(fn: str) -> None:
    """Within a few ulp of PyTorch's."""
    x = arguments(F64)
    got, want = computed(fn, x), getattr(torch, fn)(x)
    torch.testing.assert_close(got, want, rtol=8e-16, atol=5e-324, equal_nan=True)


CHAINS: dict[str, Callable[[Node], Node]] = {
    **{fn: partial(pointwise, fn) for fn in (*ULPS, "mish", "softplus", "gelu", "silu")},
    "softplus of a cosine": lambda x: pointwise("log1p", pointwise("exp", pointwise("cos", x))),
    "tanh of a logarithm": lambda x: pointwise("tanh", pointwise("log", pointwise("atan", x))),
}


@pytest.mark.parametrize("name", CHAINS)
def test_loops_become_vectors(name: str) -> None:
    """The compiler says so of the loop itself; a call or a branch in one of the functions would keep it from it."""
    found = compiler.compiler()
    if "clang" in found.version:
        pytest.skip("asks g++")
    source = kernel(stream_of(CHAINS[name](inp(0, 100_000))), "fused_chain").source
    loop = 1 + source[: source.index("#pragma omp simd", source.index("inline void values("))].count("\n")
    done = compiler.run((*found.command, *found.flags, "-fopt-info-vec", "-xc++", "-", "-S", "-o-"), source)
    assert any(f":{loop + i}:" in done.stderr for i in range(1, 4)), done.stderr


def test_only_what_is_used() -> None:
    assert used_primitives("const float y = 2 * x;") == ""
    text = used_primitives("y = tanh(x);  // not exp2, log or bf16")
    assert all(f"inline float {fn}(" in text for fn in ("tanh", "expm1"))
    assert not any(f" {fn}(" in text for fn in ("exp2", "log", "erf", "widened"))
    assert list(PRIMITIVES).index("expm1") < list(PRIMITIVES).index("tanh")


@pytest.mark.slow
@pytest.mark.parametrize("name", maths.POLYNOMIALS)
def test_polynomials_are_those_of_the_tool(name: str) -> None:
    found: Any = importlib.util.spec_from_file_location(
        "polynomials", Path(__file__).parents[3] / "tools" / "polynomials.py"
    )
    tool = importlib.util.module_from_spec(found)
    found.loader.exec_module(tool)
    digits = tool.POLYNOMIALS[name][3]
    values, _ = tool.coefficients(name)
    assert [float(f"{v:.{digits}g}") for v in values] == list(maths.POLYNOMIALS[name][1])
