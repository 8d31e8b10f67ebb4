# ruff: noqa: D103  (a text is described by its name)
"""C++ texts of the pointwise functions, for one element: the column `cpp` of the table in `fusewright.ir.pointwise`.

`{0}`, `{1}`, `{2}` are operands (names or literals, so repeating one is free), `{T}` is the compute type, `float` or
`double`.  Each text means what ATen computes, NaN and infinities included, in CUDA C++ and in C++17 with
``using namespace std``.  Comparisons with NaN are false, so a text's last branch is the one that keeps it.
"""

from __future__ import annotations

from math import inf, isnan

Scalar = bool | int | float

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946
_SQRT_HALF = 0.70710678118654752440
_SQRT_TWO_OVER_PI = 0.79788456080286535588
_PI = 3.14159265358979323846


def number(value: Scalar) -> str:
    """A parameter as text of type `{T}`, non-finite ones included."""
    value = float(value)
    if isnan(value):
        return "{T}(NAN)"
    if abs(value) == inf:
        return "-{T}(INFINITY)" if value < 0 else "{T}(INFINITY)"
    return f"{{T}}({value!r})"


def clipping(low: Scalar, high: Scalar) -> str:
    """min(max(x, low), high), for low <= high."""
    if isnan(low) or isnan(high):
        return number(float("nan"))
    upper = "{0}" if high == inf else f"{{0}} > {number(high)} ? {number(high)} : {{0}}"
    return upper if low == -inf else f"{{0}} < {number(low)} ? {number(low)} : {upper}"


def leaky(slope: Scalar) -> str:
    return f"{{0}} > 0 ? {{0}} : {{0}} * {number(slope)}"


def threshold(limit: Scalar, value: Scalar) -> str:
    return f"{{0}} <= {number(limit)} ? {number(value)} : {{0}}"


def hardshrink(lambd: Scalar) -> str:
    return f"{{0}} >= {number(-lambd)} && {{0}} <= {number(lambd)} ? {{T}}(0) : {{0}}"


def softshrink(lambd: Scalar) -> str:
    up, down = number(lambd), number(-lambd)
    return f"{{0}} > {up} ? {{0}} - {up} : {{0}} < {down} ? {{0}} + {up} : {{0}} == {{0}} ? {{T}}(0) : {{0}}"


def softplus(beta: Scalar, limit: Scalar) -> str:
    scaled = "{0}" if beta == 1 else f"{{0}} * {number(beta)}"
    result = f"log1p(exp({scaled}))"
    return f"{scaled} > {number(limit)} ? {{0}} : {result if beta == 1 else f'{result} / {number(beta)}'}"


def elu(alpha: Scalar, scale: Scalar, input_scale: Scalar) -> str:
    negative, positive = _elu(alpha, scale, input_scale, "expm1")
    return f"{{0}} < 0 ? {negative} : {positive}"


def _elu(alpha: Scalar, scale: Scalar, input_scale: Scalar, function: str) -> tuple[str, str]:
    """Below zero and above; `function` is what e^x - 1 is called."""
    negative = f"{function}({{0}})" if input_scale == 1 else f"{function}({{0}} * {number(input_scale)})"
    factor = alpha * scale
    negative = negative if factor == 1 else f"{negative} * {number(factor)}"
    return negative, "{0}" if scale == 1 else f"{{0}} * {number(scale)}"


def gelu(approximate: str) -> str:
    if approximate == "none":
        return f"{number(0.5)} * {{0}} * (1 + erf({{0}} * {number(_SQRT_HALF)}))"
    inner = f"{number(_SQRT_TWO_OVER_PI)} * ({{0}} + {number(0.044715)} * {{0}} * {{0}} * {{0}})"
    return f"{number(0.5)} * {{0}} * (1 + tanh({inner}))"


_POWERS = {  # ATen computes these without its library function
    0.0: "{T}(1)",
    0.5: "sqrt({0})",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    -0.5: "1 / sqrt({0})",
    -1.0: "1 / {0}",
    -2.0: "1 / ({0} * {0})",
}


def power(exponent: Scalar) -> str:
    return _POWERS.get(float(exponent), f"pow({{0}}, {number(exponent)})")


def round_to(decimals: int) -> str:
    ten_power = number(10.0 ** abs(decimals))
    forth, back = ("/", "*") if decimals < 0 else ("*", "/")
    return f"rint({{0}} {forth} {ten_power}) {back} {ten_power}"


def _of_rest(result: str) -> str:
    """`result`, of a / b and the rest m that C's fmod leaves of it, which has the sign of a."""
    return f"[]({{T}} a, {{T}} b) {{{{ const {{T}} m = fmod(a, b); {result} }}}}({{0}}, {{1}})"


# ATen corrects the sign of the rest, and takes the quotient without it for a whole number but for rounding.
_REMAINDER = _of_rest("return m != 0 && (b < 0) != (m < 0) ? m + b : m;")
_FLOOR_DIVIDE = _of_rest(
    "const {T} q = (a - m) / b - (m != 0 && (b < 0) != (m < 0)), f = floor(q); "
    "return b == 0 ? a / b : q == 0 ? copysign({T}(0), a / b) : q - f > {T}(0.5) ? f + 1 : f;"
)


# Of what is not negative, -0 being 0, by roots alone, which take fewer instructions.
_SIZE = "fabs({0})"
_ROOT = f"sqrt({_SIZE})"
_BY_ROOTS = {
    0.25: f"sqrt({_ROOT})",
    0.75: f"{_ROOT} * sqrt({_ROOT})",
    1.25: f"{_SIZE} * sqrt({_ROOT})",
    1.5: f"{_SIZE} * {_ROOT}",
    1.75: f"{_SIZE} * ({_ROOT} * sqrt({_ROOT}))",
    -0.25: f"1 / sqrt({_ROOT})",
    -0.75: f"1 / ({_ROOT} * sqrt({_ROOT}))",
}


def power_within(exponent: Scalar) -> tuple[tuple[tuple[float, float], str], ...]:
    """As `CUDA_WITHIN` has it."""
    text = _BY_ROOTS.get(float(exponent))
    return () if text is None else (((0.0, inf), text),)


_GREATER, _LESS = (f"{{0}} {than} {{1}} || {{0}} != {{0}} ? {{0}} : {{1}}" for than in "><")
PLAIN: dict[str, str] = {
    "relu": clipping(0, inf),
    "relu6": clipping(0, 6),
    "hardsigmoid": "{0} < -3 ? {T}(0) : {0} > 3 ? {T}(1) : ({0} + 3) / 6",
    "abs": "fabs({0})",
    "neg": "-{0}",
    "floor": "floor({0})",
    "ceil": "ceil({0})",
    "round": "rint({0})",  # half to even
    "trunc": "trunc({0})",
    "sign": "{T}(({0} > 0) - ({0} < 0))",
    "sigmoid": "1 / (1 + exp(-{0}))",
    "log_sigmoid": "({0} < 0 ? {0} : {T}(0)) - log1p(exp(-fabs({0})))",
    "tanh": "tanh({0})",
    "tanhshrink": "{0} - tanh({0})",
    "softsign": "{0} / (1 + fabs({0}))",
    "selu": elu(_SELU_ALPHA, _SELU_SCALE, 1),
    "silu": "{0} / (1 + exp(-{0}))",
    "mish": "{0} * tanh(log1p(exp({0})))",
    "hardswish": "{0} * ({0} < -3 ? {T}(0) : {0} > 3 ? {T}(6) : {0} + 3) / 6",
    "exp": "exp({0})",
    "exp2": "exp2({0})",
    "expm1": "expm1({0})",
    "log": "log({0})",
    "log2": "log2({0})",
    "log10": "log10({0})",
    "log1p": "log1p({0})",
    "sqrt": "sqrt({0})",
    "rsqrt": "1 / sqrt({0})",
    "reciprocal": "1 / {0}",
    "square": "{0} * {0}",
    "erf": "erf({0})",
    "atan": "atan({0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    **{name: f"{name}({{0}})" for name in ("tan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc")},
    "sinc": f"{{0}} == 0 ? {{T}}(1) : sin({number(_PI)} * {{0}}) / ({number(_PI)} * {{0}})",
    "logit": "log({0} / (1 - {0}))",
    "entr": "{0} > 0 ? -{0} * log({0}) : {0} == 0 ? {T}(0) : {0} < 0 ? -{T}(INFINITY) : {0}",
    "logical_not": "{T}({0} == 0)",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": _GREATER,
    "minimum": _LESS,
    "fmax": "{0} >= {1} || {1} != {1} ? {0} : {1}",
    "fmin": "{0} <= {1} || {1} != {1} ? {0} : {1}",
    "at_least": _GREATER,
    "at_most": _LESS,
    "between": "{0} != {0} ? {0} : {1} != {1} ? {1} : {0} > {1} ? ({0} < {2} ? {0} : {2}) : {1} < {2} ? {1} : {2}",
    "lerp": "fabs({2}) < {T}(0.5) ? fma({2}, {1} - {0}, {0}) : fma({2} - 1, {1} - {0}, {1})",
    **{name: f"{name}({{0}}, {{1}})" for name in ("atan2", "hypot", "copysign", "fmod")},
    "remainder": _REMAINDER,
    "floor_divide": _FLOOR_DIVIDE,
    "trunc_divide": "trunc({0} / {1})",
    "power": "pow({0}, {1})",
    "logaddexp": "{0} == {1} && fabs({0}) == {T}(INFINITY) ? {0} : "
    "({0} > {1} ? {0} : {1}) + log1p(exp(-fabs({0} - {1})))",
    "heaviside": "{0} == 0 ? {1} : {T}({0} > 0)",
    "xlogy": "{1} != {1} ? {1} : {0} == {T}(0) ? {T}(0) : {0} * log({1})",
    # logarithms of what rounding took past 0 or 1 are those of 0
    "binary_cross_entropy": "({1} - 1) * fmax(log1p(-fmin({0}, {T}(1))), {T}(-100)) "
    "- {1} * fmax(log(fmax({0}, {T}(0))), {T}(-100))",
    "where": "{0} != 0 ? {1} : {2}",
    "eq": "{T}({0} == {1})",
    "ne": "{T}({0} != {1})",
    "lt": "{T}({0} < {1})",
    "le": "{T}({0} <= {1})",
    "gt": "{T}({0} > {1})",
    "ge": "{T}({0} >= {1})",
    "logical_and": "{T}({0} != 0 && {1} != 0)",
    "logical_or": "{T}({0} != 0 || {1} != 0)",
    "logical_xor": "{T}(({0} != 0) != ({1} != 0))",
}

# Of whole numbers: a rest has the sign of the divisor, which is positive.
WHOLE: dict[str, str] = {
    **{name: PLAIN[name] for name in ("neg", "add", "sub", "mul", "where")},
    "abs": "({0} < 0 ? -{0} : {0})",
    "maximum": "({0} > {1} ? {0} : {1})",
    "minimum": "({0} < {1} ? {0} : {1})",
    "remainder": "({0} % {1} < 0 ? {0} % {1} + {1} : {0} % {1})",
}

# In CUDA, float32 only: the device's own exponential and reciprocal (`exp2_approx`, `reciprocal_approx`), no division,
# and the functions of `codegen.cuda.functions`; within 4 ulp of the result and right at the ends.  What may be near 1
# is rounded as a division is (`reciprocal_rounded`): errors to one side add up where 1 is taken from it.
_SIXTH = "0.16666667f"


def elu_in_cuda(alpha: Scalar, scale: Scalar, input_scale: Scalar) -> str:
    negative, positive = _elu(alpha, scale, input_scale, "expm1_falling")
    return f"chosen({{0}} < 0, {negative}, {positive})"


def softplus_in_cuda(beta: Scalar, limit: Scalar) -> str:
    if beta == 1:  # from 18 on ln(1 + e^x) is x, rounded
        return "softplus({0})" if limit >= 18 else f"chosen({{0}} > {number(limit)}, {{0}}, softplus({{0}}))"
    scaled = f"{{0}} * {number(beta)}"
    return f"chosen({scaled} > {number(limit)}, {{0}}, softplus({scaled}) * {number(1 / beta)})"


def clipping_in_cuda(low: Scalar, high: Scalar) -> str:
    """Without the branches that comparisons become; max(-0, 0) would be 0."""
    above = f"{{0}} < {number(low)} ? {number(low)} : {{0}}" if low == 0 else f"greater({{0}}, {number(low)})"
    return f"smaller({above}, {number(high)})"


def softshrink_in_cuda(lambd: Scalar) -> str:
    return f"{{0}} - {clipping_in_cuda(-lambd, lambd)}"


_RAMP = "smaller(greater({0} + 3, 0.0f), 6.0f)"
CUDA: dict[str, str] = {
    "relu6": clipping_in_cuda(0, 6),
    "hardsigmoid": f"{_RAMP} * {_SIXTH}",
    "hardswish": f"{{0}} * saturated_product({{0}} + 3, {_SIXTH})",  # whatever that is of NaN
    # of a fourth of both sides: the reciprocal of the largest number is a normal number then, and no zero
    "softsign": "0.25f * {0} * reciprocal_rounded(0.25f * fabs({0}) + 0.25f)",
    "sigmoid": "sigmoid({0})",
    "silu": "{0} * sigmoid({0})",
    "log_sigmoid": "0.0f - softplus(-{0})",
    "selu": elu_in_cuda(_SELU_ALPHA, _SELU_SCALE, 1),
    "erf": "error_function({0})",
    "gelu": "gelu({0})",
    "mish": "mish({0})",
    "rsqrt": "rsqrt({0})",  # as ATen has it on a GPU
    "atan": "arc_tangent({0})",
    "sin": "sine({0})",
    "cos": "cosine({0})",
    "binary_cross_entropy": "cross_entropy({0}, {1})",
}

# Shorter ones of arguments in an interval, the first of which is taken that holds them.
CUDA_WITHIN: dict[str, tuple[tuple[tuple[float, float], str], ...]] = {
    "softsign": (((-1e37, 1e37), "{0} * reciprocal_rounded(fabs({0}) + 1.0f)"),),
    "exp": (((-2.0, 2.0), "exp2_approx(1.44269504f * {0})"),),
    "mish": (((-1.0, inf), "mish_above({0})"),),
    "sin": (((-1.5708, 1.5708), "sine_of_small({0})"), ((-1e5, 1e5), "sine_of_near({0})")),
    "cos": (((-1e5, 1e5), "cosine_of_near({0})"),),
}

# In the loops of a CPU, float32 only: no division by what is known, and one exponential for all of a function.
CPU: dict[str, str] = {
    "hardsigmoid": f"({{0}} < -3 ? 0.0f : {{0}} > 3 ? 6.0f : {{0}} + 3) * {_SIXTH}",
    "hardswish": f"{{0}} * ({{0}} < -3 ? 0.0f : {{0}} > 3 ? 6.0f : {{0}} + 3) * {_SIXTH}",
    "mish": "mish({0})",
    "gelu": "gelu({0})",
}
