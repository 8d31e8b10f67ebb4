"""The C++ text of every pointwise function, compiled by g++ and compared with PyTorch value by value."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_pointwise import PARAMS
from torch import Tensor

from fusewright.codegen.cuda.functions import used_functions
from fusewright.codegen.cuda.primitives import primitives
from fusewright.ir import pointwise

inf, nan = float("inf"), float("nan")
CASES = [(fn, params) for fn in pointwise.functions() for params in PARAMS.get(fn, [()])]
DTYPES = {torch.float32: "float", torch.float64: "double"}

# A difference of two nearly equal numbers is only as good as they are, a product with a denormal one no better than it:
# errors in units in the last place of this.
FLOOR = {"logaddexp": 1.0, "gelu": 1.0, "tanhshrink": 1.0, "elu": 1.0, "celu": 1.0, "selu": 1.0, "mish": 1e-36}
# exp, then a step or two, here and in PyTorch, each with an error of its own.
ULPS = {"sigmoid": 4, "silu": 4, "mish": 4, "erfc": 4}
SPECIAL = [0.0, -0.0, inf, -inf, nan, 1e-45, -1e-45, 1e-40, -1e-40, 3e38, -3e38, 1e-38]


def values(dtype: torch.dtype) -> Tensor:
    """Ordinary numbers, halves and whole ones (ties, thresholds), wide magnitudes, and the special ones."""
    ladder = torch.logspace(-30, 30, 601, dtype=torch.float64)
    ends = torch.tensor([5e-324, 1e-310, 1e300, 1.7e308], dtype=torch.float64)
    parts = [
        torch.linspace(-30, 30, 20_011, dtype=torch.float64),
        torch.arange(-50, 51, dtype=torch.float64) / 2,
        torch.cat([ladder, -ladder, ends, -ends]),
        torch.tensor(SPECIAL, dtype=torch.float64),
    ]
    return torch.cat(parts).to(dtype)


def operands(fn: str, arity: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """As many operands as `fn` takes: all pairs of special values among those of two operands."""
    if arity == 1:
        return (values(dtype),)
    few = [*SPECIAL, 0.5, 1.0, -1.0, 2.0, -2.0, 7.25]
    columns = torch.tensor(list(itertools.product(few, repeat=arity)), dtype=dtype).unbind(1)
    noise = torch.randn(arity, 4000, dtype=dtype, generator=torch.Generator().manual_seed(7)) * 3
    columns = tuple(torch.cat([c, n]) for c, n in zip(columns, noise, strict=True))
    admitted = pointwise.traits(fn).admits if fn not in PARAMS else None
    if admitted is not None:
        return tuple(c.nan_to_num(0.5).clamp(*admitted) for c in columns)
    return (columns[0] > 0, *columns[1:]) if fn == "where" else columns


def expected(traits: pointwise.Traits, args: tuple[Tensor, ...]) -> Tensor:
    # PyTorch's float32 loops on x86 alone give gelu(inf) = NaN, and NaN as what a tiny divisor leaves of a huge number
    if traits.torch.startswith(("F.gelu", "torch.fmod", "torch.remainder")):
        args = tuple(a.double() for a in args)
    names = {f"v{i}": a for i, a in enumerate(args)}
    result: Tensor = eval(traits.torch.format(*names), {"torch": torch, "F": F, **names})
    return result


def program(before: str, qualifiers: str) -> str:
    """One file with a loop per function and compute type."""
    lines = [before]
    for number, (fn, params) in enumerate(CASES):
        traits = pointwise.traits(fn, params)
        assert traits.cpp is not None, f"{fn} has no C++ text"
        for name in DTYPES.values():
            text = traits.cpp.format("a", "b", "c", T=name)
            parameters = f"const {name}* x, const {name}* y, const {name}* z, {name}* r, long n"
            body = f"const {name} a = x[i], b = y[i], c = z[i]; r[i] = {text};"
            lines.append(f'extern "C" {qualifiers} void f{number}_{name}({parameters}) {{')
            lines.append(f"    for (long i = 0; i < n; ++i) {{ {body} }}\n}}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tensor]]:
    """`compiled(case, *operands)`: what the C++ text of a case gives."""
    folder: Path = tmp_path_factory.mktemp("cpp")
    source, library = folder / "functions.cpp", folder / "functions.so"
    source.write_text(program("#include <cmath>\nusing namespace std;", ""))
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wno-unused-variable", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    functions = ctypes.CDLL(str(library))

    def call(case: int, *args: Tensor, dtype: torch.dtype) -> Tensor:
        given = [a.to(dtype).contiguous() for a in args]
        given += [given[0]] * (3 - len(given))
        result = torch.empty_like(given[0])
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*given, result)]
        functions[f"f{case}_{DTYPES[dtype]}"](*pointers, ctypes.c_long(result.numel()))
        return result

    yield call


def ulps(got: Tensor, want: Tensor, floor: float) -> Tensor:
    """|got - want| in units in the last place of `want`, or of `floor` where that is larger."""
    info = torch.finfo(want.dtype)
    scale = want.abs().clamp(min=max(floor, info.tiny))
    unit = torch.exp2(torch.floor(torch.log2(scale.double()))) * info.eps
    return (got.double() - want.double()).abs() / unit


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{fn}{params}" for fn, params in CASES])
def test_cpp_is_what_torch_computes(compiled: Callable[..., Tensor], case: int, dtype: torch.dtype) -> None:
    fn, params = CASES[case]
    traits = pointwise.traits(fn, params)
    args = operands(fn, traits.arity, dtype)
    got = compiled(case, *args, dtype=dtype)
    want = expected(traits, args).to(dtype)

    special = ~(got.isfinite() & want.isfinite())
    wrong = special & ~((got == want) | (got.isnan() & want.isnan()))
    assert not wrong.any(), [(*(a[wrong][:5] for a in args), got[wrong][:5], want[wrong][:5])]
    off = torch.where(special, 0.0, ulps(got, want, FLOOR.get(fn, 0.0)))
    worst = int(off.argmax())
    assert off[worst] <= ULPS.get(fn, 2), [*(a[worst] for a in args), got[worst], want[worst], off[worst]]
    if fn == "softshrink":  # its zeros are 0 * x or 0, depending on where in memory x lies
        return
    signs = (want == 0) & (got == 0) & (got.signbit() != want.signbit())
    assert not signs.any(), [(*(a[signs][:5] for a in args), got[signs][:5], want[signs][:5])]


# What the texts for CUDA call, with its meaning on a CPU.
CUDA_ON_CPU = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __noinline__
using namespace std;
inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline float greater(float a, float b) { return a > b || a != a ? a : b; }
inline float smaller(float a, float b) { return a < b || a != a ? a : b; }
inline float rsqrt(float x) { return 1 / sqrt(x); }
inline float saturated_product(float a, float b) { return fmin(fmax(a * b, 0.0f), 1.0f); }
inline float exp2_approx(float x) { return x < -126 ? 0.0f : exp2(x); }
// Leans to zero, as a device's may.
inline float reciprocal_approx(float x) {
    const float y = 1.0f / x;
    if (fabs(y) < 1.17549435e-38f) return 0.0f;
    return isfinite(y) && (__float_as_uint(x) & 0x7fffffu) ? nextafter(y, 0.0f) : y;
}
"""
# Those that are 2^x of a rounded multiple of x: where that is small they are small as well.
ROUGH = ("sigmoid", "silu")
WITHIN = [(case, *known) for case in CASES for known in pointwise.traits(*case).cuda_within]
OF_CUDA = [case for case in CASES if pointwise.traits(*case).cuda is not None and case[0] not in ROUGH]
OF_ONE = [case for case in OF_CUDA if pointwise.traits(*case).arity == 1]


# Far ends, where sines and softplus have arguments of their own.
LAST = torch.tensor([1e-40, 2e37, 8.6e37, 3.4e38])
FAR = (torch.linspace(-2e5, 2e5, 40_007), torch.arange(-999, 1000) * 1.5707963, LAST, -LAST)
# Arguments whose exponential is small, but a normal number.
SMALL = torch.linspace(-88, -5, 100_003)


def of_cuda(text: str, x: Tensor, folder: Path, y: Tensor | None = None) -> Tensor:
    """What a text for CUDA gives, of one or two operands, compiled for a CPU."""
    source, library = folder / "functions.cpp", folder / "functions.so"
    given = "const float a = x[i], b = y[i];"
    loop = f"for (long i = 0; i < n; ++i) {{ {given} r[i] = {text.format('a', 'b', T='float')}; }}"
    head = CUDA_ON_CPU + used_functions(text)
    source.write_text(f'{head}extern "C" void f(const float* x, const float* y, float* r, long n) {{ {loop} }}\n')
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    got = torch.empty_like(x)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, x if y is None else y, got)]
    ctypes.CDLL(str(library)).f(*pointers, ctypes.c_long(x.numel()))
    return got


def check_cuda(case: tuple[str, tuple[pointwise.Scalar | str, ...]], text: str, x: Tensor, folder: Path) -> None:
    """Within 4 ulp of the true value, and right at the ends."""
    fn, params = case
    traits = pointwise.traits(fn, params)
    got = of_cuda(text, x, folder)
    want, exact = expected(traits, (x,)), expected(traits, (x.double(),))
    finite = got.isfinite() & want.isfinite()
    overflows = (fn == "hardswish") & want.isinf() & (got == exact.float())  # eager does, six times too early
    assert ((got == want) | (got.isnan() & want.isnan()) | overflows)[~finite].all()
    if fn == "softplus" and params:  # e to the power of a rounded product, eager's as well
        beta, limit = (torch.tensor(p, dtype=torch.float32) for p in params)
        product = (x * beta).double()
        exact = torch.where(product > limit, x.double(), F.softplus(product, 1.0, float(limit)) / beta)
    off = torch.where(finite, ulps(got, exact.float(), FLOOR.get(fn, 0.0)), 0.0)
    worst = int(off.argmax())
    assert off[worst] <= 4, (x[worst], got[worst], exact[worst], off[worst])


@pytest.mark.parametrize("case", OF_ONE, ids=[f"{fn}{params}" for fn, params in OF_ONE])
@pytest.mark.sampled
def test_cuda_is_what_torch_computes(case: tuple[str, tuple[pointwise.Scalar | str, ...]], tmp_path: Path) -> None:
    """Texts of CUDA's own, also far away."""
    traits = pointwise.traits(*case)
    assert traits.cuda is not None and traits.cuda != traits.cpp
    check_cuda(case, traits.cuda, torch.cat([values(torch.float32), SMALL, *FAR]), tmp_path)


def test_likelihoods_in_cuda(tmp_path: Path) -> None:
    """Near both ends, where one of two logarithms is next to nothing, as good as in between; and past them."""
    near = torch.cat([torch.logspace(-40, -1, 4001), 10 ** torch.linspace(-7, -0.3, 20_011)])
    x = torch.cat([near, 1 - near, torch.linspace(0, 1, 100_003), torch.tensor([0.0, 1.0, 0.5, 1e-45])])
    text = pointwise.traits("binary_cross_entropy").cuda
    assert text is not None
    for t in (0.0, 1.0, 0.5, 0.001):
        wanted = torch.full_like(x, t)
        exact = F.binary_cross_entropy(x.double(), wanted.double(), reduction="none").float()
        assert ulps(of_cuda(text, x, tmp_path, wanted), exact, 0.0).max() <= 4
    past = torch.tensor([-1e-6, 1 + 1e-6])
    assert of_cuda(text, past, tmp_path, torch.tensor([1.0, 0.0])).tolist() == [100.0, 100.0]


@pytest.mark.parametrize("fn", ["sigmoid", "silu", "mish", "tanh"])
def test_errors_near_the_limit_are_not_all_to_one_side(fn: str, tmp_path: Path) -> None:
    """The mean of what is missing to 1, or to x, is as good as with PyTorch's own function."""
    x, traits = torch.linspace(5, 12, 300_007), pointwise.traits(fn)
    got = of_cuda(traits.cuda or traits.cpp or "", x, tmp_path)
    limit = 1.0 if traits.range[1] == 1 else x.double()
    values = expected(traits, (x.double(),)), got.double(), expected(traits, (x,)).double()
    truth, ours, eagers = (float((limit - y).square().mean()) for y in values)
    assert abs(ours / truth - 1) <= 1e-6 + 4 * abs(eagers / truth - 1)


@pytest.mark.parametrize(
    ("case", "known", "text"), WITHIN, ids=[f"{fn}{params or ''} in {known}" for (fn, params), known, _ in WITHIN]
)
@pytest.mark.sampled
def test_shorter_texts_are_as_good_where_they_hold(
    case: tuple[str, tuple[pointwise.Scalar | str, ...]], known: pointwise.Interval, text: str, tmp_path: Path
) -> None:
    traits, (low, high) = pointwise.traits(*case), known
    assert text not in (traits.cuda, traits.cpp)
    inside = torch.linspace(max(low, -2.0), min(high, 2.0), 100_003)
    x = torch.cat([values(torch.float32), SMALL, *FAR, inside])
    check_cuda(case, text, x[x.isnan() | ((x >= low) & (x <= high))], tmp_path)


def test_cpp_is_cuda() -> None:
    core = pytest.importorskip("cuda.core", reason="no NVRTC")
    text = program(primitives("nonfinite"), "__device__")
    calls = [pointwise.traits(*case).cuda.format("x[i]", "r[i]", T="float") for case in OF_CUDA]  # type: ignore[union-attr]
    calls += [text.format("x[i]", T="float") for *_, text in WITHIN]
    functions = used_functions("\n".join(calls))
    body = "".join(f"    r[{n} * 32 + i] = {call};\n" for n, call in enumerate(calls))
    text += f"{primitives('extremes', 'saturated_product', 'approximations')}\n{functions}\n"
    text += 'extern "C" __global__ void own(const float* x, float* r) {\n'
    text += f"    const int i = threadIdx.x;\n{body}}}\n"
    core.Program(text, "c++", core.ProgramOptions(arch="sm_80", std="c++17")).compile("cubin")
