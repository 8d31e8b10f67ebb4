"""Functions of the pointwise table for which CUDA's own take many instructions, branches or much code: in float32,
within 4 ulp of the result (gelu: of 1; below the normal numbers: of the smallest of those), NaN and infinities as
PyTorch has them.

The texts are CUDA C++ that a C++ compiler takes as well; the constants are those of `codegen.cpu.maths`.
"""

from __future__ import annotations

import re
from functools import cache

from fusewright.codegen.polynomials import with_polynomials

# name -> text, in an order in which each calls only what stands before it.
_TEXTS: dict[str, str] = {
    "chosen": """
// One of two values, both computed: a branch for each of many values takes longer.
template <typename T>
__device__ __forceinline__ T chosen(bool first, T one, T other) { return first ? one : other; }
""",
    "reciprocal_rounded": """
// 1/x of x from 2^-126 on, rounded as a division is: `reciprocal_approx` leans to one side, which a mean of
// 1 - sigmoid(x) would show, and a step of Newton's makes up for that.  0 for what is greater than 2^126.
__device__ __forceinline__ float reciprocal_rounded(float x) {
    const float within = smaller(x, 0x1p127f), y = reciprocal_approx(within);
    return fmaf(y, fmaf(-within, y, 1.0f), y);
}
""",
    "quotient": """
// a / b where many are divided by b: by its reciprocal, which is found once, and what that leaves (P. Markstein, 1990).
// A division has a slow path for an `a` near 0, as shares of a softmax are.  Below 2^-100 a last bit may differ.
__device__ __forceinline__ float quotient(float a, float b) {
    const float size = fabs(b), unit = size < 0x1p-64f ? 0x1p64f : size > 0x1p64f ? 0x1p-64f : 1.0f;
    const float scaled = b * unit, once = 1 / scaled, part = size < INFINITY ? scaled : 0.0f;
    const float rough = a * once;
    const bool whole = !(fabs(rough) < INFINITY) || rough == 0;  // nothing is left, and zeros have their sign
    return (whole ? rough : fmaf(fmaf(-rough, part, a), once, rough)) * unit;
}
""",
    "sigmoid": """
// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) { return reciprocal_rounded(1 + exp2_approx(-1.44269504f * x)); }
""",
    "expm1_falling": """
// e^x - 1 of x <= 0 from x = n ln 2 + r: adding 1.5 * 2^23 + 127 leaves the exponent of 2^n at the end.
__device__ __forceinline__ float expm1_falling(float x) {
    const float within = fmax(x, -18.0f), shifted = fmaf(within, 1.44269504f, 0x1.8p23f + 127);
    const float k = shifted - (0x1.8p23f + 127), r = fmaf(k, 2.12194440e-4f, fmaf(k, -0.693359375f, within));
    const float p = $exp32;
    const float scale = __uint_as_float(__float_as_uint(shifted) << 23);
    return fmaf(fmaf(r * r, p, r), scale, scale - 1);
}
""",
    "softplus": """
// ln(1 + e^x) without a sum that overflows: the greater of x and 0, and ln(1 + u) = u p(u) of u = e^-|x|.
__device__ __forceinline__ float softplus(float x) {
    const float u = exp(-fabs(x));
    const float p = $log1p32;
    return fmaf(u, p, fmax(x, 0.0f));
}
""",
    "erf": """
// erf x = x + x p(x^2) where |x| is small, else 1 - 2^q(|x|).
__device__ __forceinline__ float error_function(float x) {
    const float size = fabs(x), t = fmin(size, 3.95f), z = x * x;
    const float p = $erf32;
    const float q = $erfc_bits32;
    return chosen(size >= 0.92f, copysign(1 - exp2_approx(q), x), x + x * p);
}
""",
    "gelu": """
// x times the share of the normal distribution that lies below x, which is an exponential where x is negative.
__device__ __forceinline__ float gelu(float x) {
    const float size = fabs(x), t = fmin(size, 6.0f);
    const float p = $gelu32;
    const float tail = size > 6.0f ? 0.0f : exp2_approx(1.44269504f * p);
    return x * (x < 0 ? tail : 1 - tail);
}
""",
    "gelu_by_tanh": """
// x (1 + tanh u) / 2 = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_by_tanh(float x) {
    return x * reciprocal_rounded(1 + exp2_approx(x * fmaf(x * x, -0.10294324f, -2.30220819f)));
}
""",
    "mish": """
// x tanh(ln(1 + e^x)) = x n / (n + 2) with n = e^x (e^x + 2).
__device__ __forceinline__ float mish_by(float exponential, float x) {
    const float n = exponential * (exponential + 2), y = reciprocal_approx(n + 2);  // of what is finite
    return x * (n * fmaf(y, fmaf(-(n + 2), y, 1.0f), y));
}
__device__ __forceinline__ float mish(float x) { return mish_by(exp(fmin(x, 20.0f)), x); }
// Of x from -1 on: the greater x is, the less is it what e^x is.
__device__ __forceinline__ float mish_above(float x) { return mish_by(exp2_approx(1.44269504f * fmin(x, 20.0f)), x); }
""",
    "arc_tangent": """
// atan x = pi/2 - atan 1/x.
__device__ __forceinline__ float arc_tangent(float x) {
    const float size = fabs(x), inverse = reciprocal_approx(size), t = size > 1 ? inverse : size, z = t * t;
    const float p = $atan32;
    const float y = t + t * (z * p);
    return copysign(size > 1 ? 1.57079637f - (y + 4.37113883e-8f) : y, x);
}
""",
    "sine": """
// sin x = (-1)^n sin r with x = n pi + r, cos x = -(-1)^n sin r with x = (n + 1/2) pi + r; pi in three parts: n times
// the first two are exact where much of x cancels.  What is farther away than FAR, or no number, is rare: it takes
// CUDA's way, which is long, once for all calls.
constexpr float FAR = 100000;
__device__ __noinline__ float sine_of_far(float x) { return sin(x); }
__device__ __noinline__ float cosine_of_far(float x) { return cos(x); }
// sin r of r up to pi/2.
__device__ __forceinline__ float sine_of_small(float r) {
    const float z = r * r;
    const float p = $half_turn32;
    return r + r * (z * p);
}
// sin (x - turns pi), negated where bit 0 of `odd` is set: a carry out of bit 31 is lost.
__device__ __forceinline__ float sine_of_rest(float x, float turns, unsigned odd) {
    const float less = fmaf(turns, -0x1.4442dp-23f, fmaf(turns, -0x1.921fb4p1f, x));
    return __uint_as_float(__float_as_uint(sine_of_small(fmaf(turns, -0x1.846988p-47f, less))) + (odd << 31));
}
__device__ __forceinline__ float sine_of_near(float x) {
    const float shifted = fmaf(x, 0.318309886f, 0x1.8p23f);
    return sine_of_rest(x, shifted - 0x1.8p23f, __float_as_uint(shifted));
}
__device__ __forceinline__ float cosine_of_near(float x) {
    const float shifted = fmaf(x, 0.318309886f, -0.5f) + 0x1.8p23f;
    return sine_of_rest(x, shifted - 0x1.8p23f + 0.5f, __float_as_uint(shifted) + 1);
}
__device__ __forceinline__ float sine(float x) {
    float y = sine_of_near(x);
    if (!(fabs(x) <= FAR)) y = sine_of_far(x);
    return y;
}
__device__ __forceinline__ float cosine(float x) {
    float y = cosine_of_near(x);
    if (!(fabs(x) <= FAR)) y = cosine_of_far(x);
    return y;
}
""",
    "cross_entropy": """
// -t ln x - (1 - t) ln(1 - x), where no logarithm is less than -100: those of d, which is how far x is from the nearer
// of 0 and 1, and of 1 - d.
__device__ __forceinline__ float cross_entropy(float x, float t) {
    const float within = fmin(fmax(x, 0.0f), 1.0f), d = fmin(within, 1 - within);
    const float p = $rest32;
    const float rest = fmaf(d * d, p, d), far = fmin(-log(d), 100.0f);
    const bool likely = within > 0.5f;
    return t * chosen(likely, rest, far) + (1 - t) * chosen(likely, far, rest);
}
""",
    "maths": """
// The same for many values, of which a branch each would let only one be under way: as if all were near, unless `any`
// may be far.
__device__ __noinline__ float sine_of_any(float x) { return sine(x); }
__device__ __noinline__ float cosine_of_any(float x) { return cosine(x); }
struct Maths {
    const bool any;
    bool far = false;    // whether one was
    __device__ __forceinline__ float sine(float x) {
        if (any) return sine_of_any(x);
        far |= !(fabs(x) <= FAR);
        return sine_of_near(x);
    }
    __device__ __forceinline__ float cosine(float x) {
        if (any) return cosine_of_any(x);
        far |= !(fabs(x) <= FAR);
        return cosine_of_near(x);
    }
};
""",
}

FUNCTIONS = {name: with_polynomials(text) for name, text in _TEXTS.items()}


def used_functions(text: str) -> str:
    """The functions that a kernel's text calls, and those that they call."""
    found: list[str] = []
    calls = set(re.findall(r"\w+", text))
    for own in reversed(FUNCTIONS.values()):
        defined, called = _words(own)
        if calls & defined:
            found.insert(0, own)
            calls |= called
    return "".join(found).lstrip("\n")


@cache
def _words(own: str) -> tuple[frozenset[str], frozenset[str]]:
    """The functions that a text of the table defines, and all words in it."""
    head = r"^(?:__device__ __(?:forceinline|noinline)__ (?:float|T)|struct) (\w+)"
    return frozenset(re.findall(head, own, re.M)), frozenset(re.findall(r"\w+", own))
