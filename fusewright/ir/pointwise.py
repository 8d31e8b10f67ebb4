# ruff: noqa: D103  (a table entry is described by its name and its traits)
"""The pointwise functions: the only place that knows what `relu` is.

Functions without parameters are entries of `_PLAIN`, families with parameters are functions under `_family`; names and
the order of parameters are ATen's.  Rules and code generators read the `Traits`.  Facts are about the function on the
reals unless they say "float", and claimed only where they hold on every device: `float_monotone` needs an
implementation made of correctly rounded steps, each of them monotone, so no library function (exp, tanh, ...) has it.
`tests/ir/test_pointwise.py` checks every claim numerically.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isnan, nan
from typing import Any, Literal

from fusewright.ir import scalars

Scalar = scalars.Scalar
Interval = tuple[float, float]
REALS: Interval = (-inf, inf)
NON_NEGATIVE: Interval = (0.0, inf)
# Without zero, which has a sign: 1 / -0.0 is -inf.
POSITIVE: Interval = (5e-324, inf)


@dataclass(frozen=True)
class Traits:
    """What is known of one function of one variable (or of several, where only `torch` and `arity` are given).

    torch           the program text, with `{0}`, `{1}` for the operands
    arity           number of tensor operands
    monotone        ``"up"``, ``"down"`` or ``None``, on `domain` (constant stretches allowed)
    domain          the interval on which `monotone` holds and the function is defined
    dips            it falls up to a point and rises from there
    float_monotone  the float implementation keeps the order bit for bit
    nan_to_nan      a NaN operand gives NaN
    limits          the values at -inf and +inf (NaN where undefined or outside `domain`)
    range           an interval that holds every value but NaN
    parity          ``"odd"``, ``"even"`` or ``None``
    idempotent      f(f(x)) == f(x), bit for bit
    at_zero         f(0)
    cpp             C++ text of one element, with `{T}` for the type it is computed in; `None` where there is none
    cuda            another text for float32 in CUDA, where the device has faster instructions within 4 ulp
    cuda_within     intervals, and shorter ones for arguments in them: the first that holds them has it
    cpu             another text for float32 in loops of a CPU, with functions that are there (`codegen/cpu/maths.py`)
    whole           the text for whole numbers, by which they stay such; `None` where there is none
    admits          what operands have to be: eager refuses any other number, NaN among them, with an error on a CPU and
                    the end of the process on a GPU, as kernels do (`codegen.cpp.admitted`)
    """

    torch: str
    arity: int = 1
    monotone: Literal["up", "down"] | None = None
    domain: Interval = REALS
    dips: bool = False
    float_monotone: bool = False
    nan_to_nan: bool = True
    limits: tuple[float, float] | None = None
    range: Interval = REALS
    parity: Literal["odd", "even"] | None = None
    idempotent: bool = False
    at_zero: float | None = None
    cpp: str | None = None
    cuda: str | None = None
    cuda_within: tuple[tuple[Interval, str], ...] = ()
    cpu: str | None = None
    whole: str | None = None
    admits: Interval | None = None


_FAMILIES: dict[str, Callable[..., Traits]] = {}


def traits(fn: str, params: tuple[Scalar | str, ...] = ()) -> Traits:
    """The traits of function `fn` with parameters `params`; `KeyError` for a function the table does not hold."""
    if fn in _PLAIN:
        assert not params, f"{fn} has no parameters"
        return _PLAIN[fn]
    return _FAMILIES[fn](*params)


def functions() -> tuple[str, ...]:
    """The names in the table."""
    return (*_PLAIN, *_FAMILIES)


def text(value: Scalar) -> str:
    """Python text of a number, non-finite ones included."""
    return f'float("{value}")' if isinstance(value, float) and (isnan(value) or abs(value) == inf) else repr(value)


def _family(build: Callable[..., Traits]) -> Callable[..., Traits]:
    _FAMILIES[build.__name__.removesuffix("_")] = build
    return build


@_family
def hardtanh(min_val: Scalar = -1.0, max_val: Scalar = 1.0) -> Traits:
    return _clipping(f"F.hardtanh({{0}}, {text(min_val)}, {text(max_val)})", min_val, max_val)


@_family
def clamp(low: Scalar, high: Scalar) -> Traits:
    return _clipping(f"torch.clamp({{0}}, {text(low)}, {text(high)})", low, high)


@_family
def clamp_min(low: Scalar) -> Traits:
    return _clipping(f"torch.clamp({{0}}, min={text(low)})", low, inf)


@_family
def clamp_max(high: Scalar) -> Traits:
    return _clipping(f"torch.clamp({{0}}, max={text(high)})", -inf, high)


def _clipping(program: str, low: Scalar, high: Scalar) -> Traits:
    """min(max(x, low), high), which is `high` everywhere when low > high."""
    if isnan(low) or isnan(high):
        return Traits(program, cpp=scalars.clipping(low, high))
    low = min(low, high)
    return Traits(
        program,
        monotone="up",
        float_monotone=True,
        limits=(float(low), float(high)),
        range=(float(low), float(high)),
        idempotent=True,
        at_zero=float(min(max(0.0, low), high)),
        cpp=scalars.clipping(low, high),
        cuda=scalars.clipping_in_cuda(low, high) if -inf < low and high < inf else None,
    )


@_family
def leaky_relu(negative_slope: Scalar = 0.01) -> Traits:
    rising = negative_slope >= 0
    return Traits(
        f"F.leaky_relu({{0}}, {text(negative_slope)})",
        monotone="up" if rising else None,
        float_monotone=rising,
        limits=(-inf * negative_slope if negative_slope else nan, inf),
        at_zero=0.0,
        cpp=scalars.leaky(negative_slope),
    )


@_family
def threshold(threshold: Scalar, value: Scalar) -> Traits:
    rising = value <= threshold
    return Traits(
        f"F.threshold({{0}}, {text(threshold)}, {text(value)})",
        monotone="up" if rising else None,
        float_monotone=rising,
        limits=(float(value), inf),
        range=(float(min(value, threshold)), inf),
        idempotent=True,
        at_zero=float(value) if threshold >= 0 else 0.0,
        cpp=scalars.threshold(threshold, value),
    )


@_family
def hardshrink(lambd: Scalar = 0.5) -> Traits:
    return _shrinking("F.hardshrink", lambd, scalars.hardshrink(lambd), idempotent=True)


@_family
def softshrink(lambd: Scalar = 0.5) -> Traits:
    traits = _shrinking("F.softshrink", lambd, scalars.softshrink(lambd))
    return replace(traits, cuda=scalars.softshrink_in_cuda(lambd)) if 0 <= lambd < inf else traits


def _shrinking(function: str, lambd: Scalar, cpp: str, idempotent: bool = False) -> Traits:
    rising = lambd >= 0
    return Traits(
        f"{function}({{0}}, {text(lambd)})",
        monotone="up" if rising else None,
        float_monotone=rising,
        limits=(-inf, inf),
        parity="odd" if rising else None,
        idempotent=idempotent,
        at_zero=0.0 if rising else None,
        cpp=cpp,
    )


def _rounding(program: str, parity: Literal["odd"] | None = None) -> Traits:
    return Traits(
        program,
        monotone="up",
        float_monotone=True,
        limits=(-inf, inf),
        parity=parity,
        idempotent=True,
        at_zero=0.0,
    )


def _dipping(program: str, lowest: float, least: float) -> Traits:
    """x times what rises from 0 to 1: it falls to `least` (rounded down) at `lowest` (rounded up), and rises from there
    on; -inf * 0 at -inf."""
    return Traits(
        program, monotone="up", domain=(lowest, inf), dips=True, limits=(nan, inf), range=(least, inf), at_zero=0.0
    )


def _wave(
    program: str, order: Literal["up", "down"], domain: Interval, parity: Literal["odd", "even"], at_zero: float
) -> Traits:
    """A sine or cosine, which keeps this order on an interval of half a turn."""
    limits = (nan, nan)
    return Traits(program, 1, order, domain, limits=limits, range=(-1.0, 1.0), parity=parity, at_zero=at_zero)


@_family
def softplus(beta: Scalar = 1.0, threshold: Scalar = 20.0) -> Traits:
    # At the threshold the result steps down by log1p(exp(-threshold)) / beta; from 20 on float32 does not see it.
    rising = beta > 0 and threshold >= 20
    return Traits(
        f"F.softplus({{0}}, {text(beta)}, {text(threshold)})",
        monotone="up" if rising else None,
        limits=(0.0, inf) if beta > 0 else None,
        range=NON_NEGATIVE if beta > 0 else REALS,
        cpp=scalars.softplus(beta, threshold),
        cuda=scalars.softplus_in_cuda(beta, threshold) if 0 < beta < inf else None,
    )


@_family
def elu(alpha: Scalar = 1.0, scale: Scalar = 1.0, input_scale: Scalar = 1.0) -> Traits:
    plain = scale == 1 and input_scale == 1
    arguments = ", ".join(text(p) for p in (alpha, scale, input_scale))
    rising = alpha >= 0 and scale >= 0 and input_scale > 0
    return Traits(
        f"F.elu({{0}}, {text(alpha)})" if plain else f"torch.ops.aten.elu({{0}}, {arguments})",
        monotone="up" if rising else None,
        limits=(-float(alpha * scale), inf) if rising and scale > 0 else None,
        range=(-float(alpha * scale), inf) if rising else REALS,
        at_zero=0.0,
        cpp=scalars.elu(alpha, scale, input_scale),
        cuda=scalars.elu_in_cuda(alpha, scale, input_scale) if input_scale > 0 else None,
    )


@_family
def celu(alpha: Scalar = 1.0) -> Traits:
    rising = alpha > 0
    return Traits(
        f"F.celu({{0}}, {text(alpha)})",
        monotone="up" if rising else None,
        limits=(-float(alpha), inf) if rising else None,
        range=(-float(alpha), inf) if rising else REALS,
        at_zero=0.0,
        cpp=scalars.elu(alpha, 1, 1 / alpha),
        cuda=scalars.elu_in_cuda(alpha, 1, 1 / alpha) if alpha > 0 else None,
    )


@_family
def gelu(approximate: str = "none") -> Traits:
    cuda, cpu = (scalars.CUDA["gelu"], scalars.CPU["gelu"]) if approximate == "none" else ("gelu_by_tanh({0})", None)
    traits = _dipping(f'F.gelu({{0}}, approximate="{approximate}")', -0.751, -0.1701)
    # gelu(inf) is NaN in PyTorch's float32 loop on x86
    domain, cpp = (traits.domain[0], 1e30), scalars.gelu(approximate)
    return replace(traits, domain=domain, limits=(nan, nan), cpp=cpp, cuda=cuda, cpu=cpu)


@_family
def pow_(exponent: Scalar) -> Traits:
    program = f"torch.pow({{0}}, {text(exponent)})"
    texts: dict[str, Any] = {"cpp": scalars.power(exponent), "cuda_within": scalars.power_within(exponent)}
    if not exponent > 0 or exponent == inf:  # x ** 0 is 1 even for NaN
        falling = -inf < exponent < 0
        domain = POSITIVE if falling else REALS
        return Traits(program, monotone="down" if falling else None, domain=domain, nan_to_nan=exponent != 0, **texts)
    whole, even = exponent == int(exponent), exponent % 2 == 0
    return Traits(
        program,
        monotone="up",
        domain=REALS if whole and not even else NON_NEGATIVE,
        float_monotone=exponent in (1, 2, 3),  # computed as products; anything else by a library function
        limits=(inf if even else -inf if whole else nan, inf),
        range=REALS if whole and not even else NON_NEGATIVE,
        parity=None if not whole else "even" if even else "odd",
        at_zero=0.0,
        **texts,
    )


@_family
def round_to(decimals: int) -> Traits:
    """`torch.round` to so many decimals, or to multiples of a power of ten."""
    return replace(
        _rounding(f"torch.round({{0}}, decimals={decimals})", "odd"), idempotent=False, cpp=scalars.round_to(decimals)
    )


_SELU = -1.7580993408473766
_QUARTER = 1.5707963267948968  # pi / 2, rounded up
_HALF = 2 * _QUARTER
_TRUTHS = {
    name: Traits(program, arity=2, nan_to_nan=False, range=(0.0, 1.0))
    for name, program in {
        "eq": "{0} == {1}",
        "ne": "{0} != {1}",
        "lt": "{0} < {1}",
        "le": "{0} <= {1}",
        "gt": "{0} > {1}",
        "ge": "{0} >= {1}",
        "logical_and": "torch.logical_and({0}, {1})",
        "logical_or": "torch.logical_or({0}, {1})",
        "logical_xor": "torch.logical_xor({0}, {1})",
    }.items()
}
_PLAIN: dict[str, Traits] = {
    "relu": Traits(
        "torch.relu({0})",
        monotone="up",
        float_monotone=True,
        limits=(0.0, inf),
        range=NON_NEGATIVE,
        idempotent=True,
        at_zero=0.0,
    ),
    "relu6": _clipping("F.relu6({0})", 0.0, 6.0),
    "hardsigmoid": Traits(
        "F.hardsigmoid({0})", monotone="up", float_monotone=True, limits=(0.0, 1.0), range=(0.0, 1.0), at_zero=0.5
    ),
    "abs": Traits(
        "torch.abs({0})",
        monotone="up",
        domain=NON_NEGATIVE,
        dips=True,
        float_monotone=True,
        limits=(inf, inf),
        range=NON_NEGATIVE,
        parity="even",
        idempotent=True,
        at_zero=0.0,
    ),
    "neg": Traits("-{0}", monotone="down", float_monotone=True, limits=(inf, -inf), parity="odd", at_zero=0.0),
    "floor": _rounding("torch.floor({0})"),
    "ceil": _rounding("torch.ceil({0})"),
    "round": _rounding("torch.round({0})", "odd"),
    "trunc": _rounding("torch.trunc({0})", "odd"),
    "sign": Traits(
        "torch.sign({0})",
        monotone="up",
        float_monotone=True,
        nan_to_nan=False,
        limits=(-1.0, 1.0),
        range=(-1.0, 1.0),
        parity="odd",
        idempotent=True,
        at_zero=0.0,
    ),
    "sigmoid": Traits("torch.sigmoid({0})", monotone="up", limits=(0.0, 1.0), range=(0.0, 1.0), at_zero=0.5),
    "log_sigmoid": Traits("F.logsigmoid({0})", monotone="up", limits=(-inf, 0.0), range=(-inf, 0.0)),
    "tanh": Traits("torch.tanh({0})", monotone="up", limits=(-1.0, 1.0), range=(-1.0, 1.0), parity="odd", at_zero=0.0),
    "tanhshrink": Traits("F.tanhshrink({0})", monotone="up", limits=(-inf, inf), parity="odd", at_zero=0.0),
    # x / (1 + |x|) is inf / inf at the infinities
    "softsign": Traits(
        "F.softsign({0})", monotone="up", limits=(nan, nan), range=(-1.0, 1.0), parity="odd", at_zero=0.0
    ),
    "selu": Traits("F.selu({0})", monotone="up", limits=(_SELU, inf), range=(_SELU, inf), at_zero=0.0),
    "silu": _dipping("F.silu({0})", -1.278, -0.2785),
    "mish": _dipping("F.mish({0})", -1.192, -0.3089),
    "hardswish": _dipping("F.hardswish({0})", -1.5, -0.3751),
    "exp": Traits("torch.exp({0})", monotone="up", limits=(0.0, inf), range=NON_NEGATIVE, at_zero=1.0),
    "exp2": Traits("torch.exp2({0})", monotone="up", limits=(0.0, inf), range=NON_NEGATIVE, at_zero=1.0),
    "expm1": Traits("torch.expm1({0})", monotone="up", limits=(-1.0, inf), range=(-1.0, inf), at_zero=0.0),
    "log": Traits("torch.log({0})", monotone="up", domain=NON_NEGATIVE, limits=(nan, inf), at_zero=-inf),
    "log2": Traits("torch.log2({0})", monotone="up", domain=NON_NEGATIVE, limits=(nan, inf), at_zero=-inf),
    "log10": Traits("torch.log10({0})", monotone="up", domain=NON_NEGATIVE, limits=(nan, inf), at_zero=-inf),
    "log1p": Traits("torch.log1p({0})", monotone="up", domain=(-1.0, inf), limits=(nan, inf), at_zero=0.0),
    "sqrt": Traits(
        "torch.sqrt({0})",
        monotone="up",
        domain=NON_NEGATIVE,
        float_monotone=True,
        limits=(nan, inf),
        range=NON_NEGATIVE,
        at_zero=0.0,
    ),
    "rsqrt": Traits("torch.rsqrt({0})", monotone="down", domain=POSITIVE, limits=(nan, 0.0), at_zero=inf),
    "reciprocal": Traits(
        "torch.reciprocal({0})",
        monotone="down",
        domain=POSITIVE,
        float_monotone=True,
        limits=(0.0, 0.0),
        parity="odd",
        at_zero=inf,
    ),
    "square": Traits(
        "torch.square({0})",
        monotone="up",
        domain=NON_NEGATIVE,
        dips=True,
        float_monotone=True,
        limits=(inf, inf),
        range=NON_NEGATIVE,
        parity="even",
        at_zero=0.0,
    ),
    "erf": Traits("torch.erf({0})", monotone="up", limits=(-1.0, 1.0), range=(-1.0, 1.0), parity="odd", at_zero=0.0),
    "atan": Traits(
        "torch.atan({0})",
        monotone="up",
        limits=(-_QUARTER, _QUARTER),
        range=(-_QUARTER, _QUARTER),
        parity="odd",
        at_zero=0.0,
    ),
    "sin": _wave("torch.sin({0})", "up", (-1.57, 1.57), "odd", 0.0),
    "cos": _wave("torch.cos({0})", "down", (0.0, 3.14), "even", 1.0),
    "tan": Traits("torch.tan({0})", monotone="up", domain=(-1.57, 1.57), limits=(nan, nan), parity="odd", at_zero=0.0),
    "asin": Traits(
        "torch.asin({0})",
        monotone="up",
        domain=(-1.0, 1.0),
        limits=(nan, nan),
        range=(-_QUARTER, _QUARTER),
        parity="odd",
        at_zero=0.0,
    ),
    "acos": Traits("torch.acos({0})", monotone="down", domain=(-1.0, 1.0), limits=(nan, nan), range=(0.0, _HALF)),
    "sinh": Traits("torch.sinh({0})", monotone="up", limits=(-inf, inf), parity="odd", at_zero=0.0),
    "cosh": Traits(
        "torch.cosh({0})",
        monotone="up",
        domain=NON_NEGATIVE,
        dips=True,
        limits=(inf, inf),
        range=NON_NEGATIVE,
        parity="even",
        at_zero=1.0,
    ),
    "asinh": Traits("torch.asinh({0})", monotone="up", limits=(-inf, inf), parity="odd", at_zero=0.0),
    "acosh": Traits("torch.acosh({0})", monotone="up", domain=(1.0, inf), limits=(nan, inf), range=NON_NEGATIVE),
    "atanh": Traits(
        "torch.atanh({0})", monotone="up", domain=(-1.0, 1.0), limits=(nan, nan), parity="odd", at_zero=0.0
    ),
    "erfc": Traits("torch.erfc({0})", monotone="down", limits=(2.0, 0.0), range=(0.0, 2.0), at_zero=1.0),
    "sinc": Traits("torch.sinc({0})", limits=(nan, nan), range=(-0.2173, 1.0), parity="even", at_zero=1.0),
    "logit": Traits("torch.logit({0})", monotone="up", domain=(0.0, 1.0), limits=(nan, nan), at_zero=-inf),
    "entr": Traits("torch.special.entr({0})", limits=(-inf, -inf), range=(-inf, 0.3679), at_zero=0.0),
    "logical_not": Traits("torch.logical_not({0})", nan_to_nan=False, range=(0.0, 1.0), at_zero=1.0),
    "add": Traits("{0} + {1}", arity=2),
    "sub": Traits("{0} - {1}", arity=2),
    "mul": Traits("{0} * {1}", arity=2),
    "div": Traits("{0} / {1}", arity=2),
    "maximum": Traits("torch.maximum({0}, {1})", arity=2),
    "minimum": Traits("torch.minimum({0}, {1})", arity=2),
    "fmax": Traits("torch.fmax({0}, {1})", arity=2, nan_to_nan=False),
    "fmin": Traits("torch.fmin({0}, {1})", arity=2, nan_to_nan=False),
    # what lies at a bound has a gradient of its own, whereas `maximum` shares it with the bound
    "at_least": Traits("torch.clamp({0}, min={1})", arity=2),
    "at_most": Traits("torch.clamp({0}, max={1})", arity=2),
    "between": Traits("torch.clamp({0}, {1}, {2})", arity=3),
    "lerp": Traits("torch.lerp({0}, {1}, {2})", arity=3),
    "atan2": Traits("torch.atan2({0}, {1})", arity=2, range=(-_HALF, _HALF)),
    "hypot": Traits("torch.hypot({0}, {1})", arity=2, nan_to_nan=False, range=NON_NEGATIVE),
    "copysign": Traits("torch.copysign({0}, {1})", arity=2, nan_to_nan=False),
    "fmod": Traits("torch.fmod({0}, {1})", arity=2),
    "remainder": Traits("torch.remainder({0}, {1})", arity=2),
    "floor_divide": Traits('torch.div({0}, {1}, rounding_mode="floor")', arity=2),
    "trunc_divide": Traits('torch.div({0}, {1}, rounding_mode="trunc")', arity=2),
    "power": Traits("torch.pow({0}, {1})", arity=2, nan_to_nan=False),
    "logaddexp": Traits("torch.logaddexp({0}, {1})", arity=2),
    "heaviside": Traits("torch.heaviside({0}, {1})", arity=2, nan_to_nan=False),
    "xlogy": Traits("torch.xlogy({0}, {1})", arity=2),
    # of tensors that do not broadcast by themselves, as operands of a function do
    "binary_cross_entropy": Traits(
        'F.binary_cross_entropy(*torch.broadcast_tensors({0}, {1}), reduction="none")', arity=2, admits=(0.0, 1.0)
    ),
    "where": Traits("torch.where({0}, {1}, {2})", arity=3, nan_to_nan=False),
    **_TRUTHS,
}
_PLAIN = {
    name: replace(
        entry,
        cpp=scalars.PLAIN[name],
        cuda=scalars.CUDA.get(name),
        cuda_within=scalars.CUDA_WITHIN.get(name, ()),
        cpu=scalars.CPU.get(name),
        whole=scalars.WHOLE.get(name),
    )
    for name, entry in _PLAIN.items()
}
