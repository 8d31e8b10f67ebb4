"""The functions that vector loops use: their errors against float64, over all kinds of arguments."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standalone
import torch
from codegen.cuda.test_stream_kernels import OF_LIBRARIES, inp, odd_operands, reference, stream_of
from native_cases import quick, run
from torch import Tensor, nn

from fusewright.codegen import polynomials
from fusewright.codegen.cpu.ordinary import ORDINARY
from fusewright.codegen.cpu.primitives import PRIMITIVES, used_primitives
from fusewright.codegen.cpu.stream import kernel
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node
from fusewright.ir.pointwise import traits as pointwise_traits
from fusewright.runtime import compiler

F32, F64 = torch.float32, torch.float64
inf, nan = float("inf"), float("nan")
# The greatest error in float32, in units of the last place.
ULPS = {
    **{
        "exp": 1.25,
        "exp2": 1.25,
        "expm1": 2.0,
        "log": 1.0,
        "log2": 1.75,
        "log10": 2.0,
        "log1p": 1.75,
        "tanh": 2.5,
        "erf": 1.25,
    },
    **{"sigmoid": 3.0, "sin": 1.75, "cos": 1.75, "atan": 1.75},
}
SPECIAL = [0.0, -0.0, inf, -inf, nan, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 88.72, 88.73, -87.4, -103.9, -104.1, 1, -1]


def arguments(dtype: torch.dtype) -> Tensor:
    """A spread of all float32 bit patterns, the range that matters densely, and what is special."""
    spread = np.arange(0, 2**32, 4001, dtype=np.uint64).astype(np.uint32).view(np.float32).copy()
    parts = [torch.from_numpy(spread), torch.linspace(-30, 30, 200_003), torch.linspace(-2, 2, 200_003)]
    return torch.cat([*parts, torch.tensor(SPECIAL)]).to(dtype)


def ordinary(fn: str) -> Tensor:
    """Arguments that only the quick form of a loop sees: to its limits, and densely where little is left of them."""
    if fn.startswith("log"):
        bits = np.arange(0x00800000, 0x7F800000, 2003, dtype=np.uint32)
        near_one = np.arange(0x3F000000, 0x40000000, 97, dtype=np.uint32)
        x = torch.from_numpy(np.concatenate([bits, near_one]).view(np.float32).copy())
        return x[x < 1e38] if fn == "log1p" else x
    most = {"sin": 5999.0, "cos": 5999.0, "exp2": 125.9}.get(fn, 86.9)
    tiny = torch.logspace(-44, 0, 50_001, dtype=F64).float()
    quarters = (torch.arange(-3800, 3800) * (np.pi / 2)).float()
    quarters = quarters[quarters.abs() < most]
    around = torch.cat([quarters, torch.nextafter(quarters, quarters + 1), torch.nextafter(quarters, quarters - 1)])
    return torch.cat([torch.linspace(-most, most, 1_000_003), torch.linspace(-2, 2, 200_003), tiny, -tiny, around])


def computed(fn: str, x: Tensor, run: Callable[..., Tensor] = run) -> Tensor:
    return run(kernel(stream_of(pointwise(fn, inp(0, len(x), dtype=x.dtype))), f"fused_{fn}"), x)


def ulps(got: Tensor, want: Tensor) -> Tensor:
    rounded = want.to(got.dtype).abs()
    step = torch.nextafter(rounded, torch.full_like(rounded, inf)).double() - rounded.double()
    return (got.double() - want).abs() / step


@pytest.mark.parametrize("fn", ULPS)
@pytest.mark.sampled
def test_float32(fn: str) -> None:
    assert_float32(fn, run)


@pytest.mark.parametrize("machine", standalone.MACHINES)
@pytest.mark.parametrize("fn", [pytest.param(fn, marks=[] if fn == "tanh" else pytest.mark.slow) for fn in ULPS])
def test_float32_on(machine: str, fn: str) -> None:
    """Other processors and compilers; without instructions that multiply and add at once, too."""
    assert_float32(fn, partial(standalone.run, machine=standalone.MACHINES[machine]))


@pytest.mark.parametrize("fn", sorted(ORDINARY.keys() - {"mish", "pow"}))
def test_ordinary_arguments(fn: str) -> None:
    """The quick form of a loop alone."""
    assert_ordinary(fn, ordinary(fn), run)


@pytest.mark.slow
@pytest.mark.parametrize("machine", standalone.MACHINES)
@pytest.mark.parametrize("fn", ["sin", "cos", "exp", "log10"])
def test_ordinary_arguments_on(machine: str, fn: str) -> None:
    x = ordinary(fn)
    if machine == "x86-64" and fn in ("sin", "cos"):  # without instructions that multiply and add at once
        x = x[x.abs() < 250]
    assert_ordinary(fn, x, partial(standalone.run, machine=standalone.MACHINES[machine]))


def assert_ordinary(fn: str, x: Tensor, run: Callable[..., Tensor]) -> None:
    generated = kernel(stream_of(pointwise(fn, inp(0, len(x)))), f"fused_{fn}")
    assert "values_with<Ordinary>" in generated.source
    quick = replace(generated, source=generated.source.replace("values_with<Any>", "values_with<Ordinary>"))
    assert_float32(fn, lambda _, x: run(quick, x), x)


@pytest.mark.parametrize("length", [1, 15, 17, 511, 512, 1500])
@pytest.mark.parametrize("fn", sorted(ORDINARY.keys() - {"mish", "pow"}))
def test_rare_arguments_anywhere(fn: str, length: int) -> None:
    """One of them among ordinary ones."""
    for rare in (nan, inf, -inf, 3e38, -3e38, 1e-40, 0.0, -1.0, 7000.0, -100.0, 95.0):
        for place in {0, length // 2, length - 1}:
            x = torch.full((length,), 1.5)
            x[place] = rare
            want = getattr(torch, fn)(x.double()).float()
            torch.testing.assert_close(computed(fn, x), want, rtol=1e-6, atol=1e-38, equal_nan=True)


def assert_float32(fn: str, run: Callable[..., Tensor], x: Tensor | None = None) -> None:
    x = arguments(F32) if x is None else x
    got, want = computed(fn, x, run), getattr(torch, fn)(x.double())
    finite = want.float().isfinite()
    if fn == "sigmoid":  # as in eager, 1 + exp(-x) is infinite before the result is zero
        finite &= x > -88
    torch.testing.assert_close(got[~finite], want.float()[~finite], rtol=0, atol=1e-38, equal_nan=True)
    worst = ulps(got, want)[finite].max()
    assert worst <= ULPS[fn], (float(x[finite][ulps(got, want)[finite].argmax()]), float(worst))


WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * torch.special.erfc(x * -(0.5**0.5)) / 2,
    "mish": nn.functional.mish,
    "hardswish": nn.functional.hardswish,
    "hardsigmoid": nn.functional.hardsigmoid,
}


@pytest.mark.parametrize("fn", WHOLE)
def test_functions_with_a_text_of_their_own(fn: str) -> None:
    """Within some ulp of the true value, and nearer to it than eager where that cancels."""
    x = torch.cat([arguments(F32), torch.linspace(-25, 25, 500_001)])
    generated = kernel(stream_of(pointwise(fn, inp(0, len(x)), params=("none",) if fn == "gelu" else ())), "fused_it")
    assert pointwise_traits(fn).cpu is not None
    got, want, eager = run(generated, x), WHOLE[fn](x.double()), getattr(nn.functional, fn)(x)
    exact = getattr(nn.functional, fn)(x.double()).float()  # eager's gelu(inf) is NaN in float32, and on a CPU alone
    finite = exact.isfinite()
    torch.testing.assert_close(got[~finite], exact[~finite], rtol=0, atol=0, equal_nan=True)
    off = (got.double() - want).abs()
    assert (off <= 6 * torch.finfo(F32).eps * want.abs().clamp(min=0.02 if fn == "gelu" else 1e-30))[
        x.abs() < 5e37
    ].all()
    near = x.abs() <= 25
    assert off[near].square().mean() <= 2**2 * (eager.double() - want)[near].square().mean()


@pytest.mark.parametrize("fn", quick(OF_LIBRARIES, "remainder", "lerp", "atan2"))
def test_functions_of_libraries(fn: str) -> None:
    given = odd_operands(OF_LIBRARIES[fn], F32)
    root = pointwise(fn, *given)
    got, want = run(kernel(stream_of(root), "fused_it"), *given.values()), reference(root, given).float()
    if fn == "trunc_divide":  # a quotient rounded to a whole number is one
        want = torch.div(*given.values(), rounding_mode="trunc")
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("exponent", [1.7, -2.3, 4.0, 5, -3.0, 0.25, 30.0, 1e-3, 2e6])
@pytest.mark.parametrize("special", [True, False])
def test_powers(exponent: float, special: bool) -> None:
    """To an ulp, signs included; once with what is rare in every run, and once without."""
    x = torch.cat([torch.logspace(-37, 37, 100_001, dtype=F64).float(), torch.linspace(0.5, 2, 100_001)])
    x = torch.cat([x, torch.linspace(-3, 3, 20_001)])
    if special:
        x = torch.cat([x[:: len(x) // 400], torch.tensor(SPECIAL)])
    got = run(kernel(stream_of(pointwise("pow", inp(0, len(x)), params=(exponent,))), "fused_pow"), x)
    want = torch.pow(x.double(), float(np.float32(exponent)))
    normal = want.float().isfinite() & (want.abs() > 2e-38)
    torch.testing.assert_close(got[~normal], want.float()[~normal], rtol=0, atol=3e-45, equal_nan=True)
    assert ulps(got, want)[normal].max() <= 1


@pytest.mark.parametrize("divisor", [3.0, -0.7, 16, 1e36, 1e-38, inf, 0.0, nan])
def test_known_divisors(divisor: float) -> None:
    x = torch.cat([torch.randn(3000), torch.tensor([inf, -inf, nan, 0.0, -0.0])])
    got = run(kernel(stream_of(pointwise("div", inp(0, len(x)), divisor)), "fused_div"), x)
    unit = 1.5e-45  # in the last place, as 1.2e-7 is, where numbers are subnormal
    torch.testing.assert_close(got, x / divisor, rtol=1.2e-7, atol=unit, equal_nan=True)


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
@pytest.mark.sampled
def test_loops_become_vectors(name: str) -> None:
    """The compiler says so of the loop itself; a call or a branch in one of the functions would keep it from it."""
    found = compiler.compiler()
    if "clang" in found.version:
        pytest.skip("asks g++")
    source = kernel(stream_of(CHAINS[name](inp(0, 100_000))), "fused_chain").source
    loop = 1 + source[: source.index("#pragma omp simd", source.index("// `count` neighbours"))].count("\n")
    forms = 2 if "Maths" in source else 1
    done = compiler.run((*found.command, *found.flags, "-fopt-info-vec", "-xc++", "-", "-S", "-o-"), source)
    vectors = done.stderr.count("loop vectorized using 64 byte") if "avx512f" in found.identity else forms
    assert any(f":{loop + i}:" in done.stderr for i in range(1, 4)) and vectors >= forms, done.stderr


def test_only_what_is_used() -> None:
    assert used_primitives("const float y = 2 * x;") == ""
    text = used_primitives("y = tanh(x);  // not exp2, log or bf16")
    assert all(f"inline float {fn}(" in text for fn in ("tanh", "expm1_normal"))
    assert not any(f" {fn}(" in text for fn in ("exp2", "log", "erf", "widened"))
    assert list(PRIMITIVES).index("expm1_normal") < list(PRIMITIVES).index("tanh")
    text = used_primitives("y = sin(maths, x) + exp(z);")
    assert "inline float sin(Ordinary& maths, float x)" in text and "sine_of_near(" in text
    assert "inline float exp(float x)" in text and "exp(Ordinary& maths" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", polynomials.POLYNOMIALS)
def test_polynomials_are_those_of_the_tool(name: str) -> None:
    found: Any = importlib.util.spec_from_file_location("tool", Path(__file__).parents[3] / "tools" / "polynomials.py")
    tool = importlib.util.module_from_spec(found)
    found.loader.exec_module(tool)
    digits = tool.POLYNOMIALS[name][3]
    values, _ = tool.coefficients(name)
    assert [float(f"{v:.{digits}g}") for v in values] == list(polynomials.POLYNOMIALS[name][1])
