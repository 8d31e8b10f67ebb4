"""Functions of the pointwise table for loops that become vector instructions: no branches, no calls.

Every function has a float and a double form.  Polynomials are those of `codegen.polynomials`; the other constants are
ln 2 in two parts, the first short enough for its multiples to be exact, the bits of 1.5 * 2^23 and 1.5 * 2^52, adding
which rounds to an integer, pi/2, and 2/pi in 224 bits, as many as the largest float needs (Payne and Hanek, 1983).  In
float they are within 2.5 ulp of the true value, NaN, infinities and results below the normal numbers included; those
that end in ``_normal`` leave such arguments to `ordinary`.  What is rare or slow in double is the C++ library's.
"""

from __future__ import annotations

from fusewright.codegen.polynomials import with_polynomials

# Those of the C++ library that compilers know as instructions, and those that are rare.
LIBRARY = (
    *("fabs", "copysign", "sqrt", "floor", "ceil", "rint", "trunc", "pow", "fma", "fmod", "hypot", "atan2"),
    *("tan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc"),
)

_TEXTS: dict[str, str] = {
    "exp_normal": """
// e^x from x = n ln 2 + r where it is a normal number: adding 1.5 * 2^23 + 127 leaves the exponent of 2^n at the end.
inline float exp_normal(float x) {
    const float shifted = x * 1.44269504f + (0x1.8p23f + 127), k = shifted - (0x1.8p23f + 127);
    const float r = x - k * 0.693359375f - k * -2.12194440e-4f;
    const float p = $exp32;
    const float scale = bits_as<float>(bits_as<unsigned>(shifted) << 23);
    return (r + r * r * p) * scale + scale;
}
""",
    "exp": """
// e^x from x = n ln 2 + r.  2^n is multiplied in two steps, so that results below the normal numbers are right.
inline float exp(float x) {
    const float within = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
    const float shifted = within * 1.44269504f + 0x1.8p23f, k = shifted - 0x1.8p23f;
    const float r = within - k * 0.693359375f - k * -2.12194440e-4f;
    const float p = $exp32;
    const int n = bits_as<int>(shifted) - bits_as<int>(0x1.8p23f), half = n >> 1;
    return (1 + (r + r * r * p)) * bits_as<float>(unsigned(half + 127) << 23) *
           bits_as<float>(unsigned(n - half + 127) << 23);
}
inline double exp(double x) {
    const double within = x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x;
    const double shifted = within * 1.4426950408889634 + 0x1.8p52, k = shifted - 0x1.8p52;
    const double r = within - k * 0x1.62e42feep-1 - k * 0x1.a39ef35793c76p-33;
    const double p = $exp64;
    const long long n = bits_as<long long>(shifted) - bits_as<long long>(0x1.8p52), half = n >> 1;
    return (1 + (r + r * r * p)) * bits_as<double>(static_cast<unsigned long long>(half + 1023) << 52) *
           bits_as<double>(static_cast<unsigned long long>(n - half + 1023) << 52);
}
""",
    "exp_up_to_one": """
// e^x of x <= 0, for sums that reach 1: below 2^-125 it is nothing.  A larger x stays: it is infinite there.
inline float exp_up_to_one(float x) {
    const float y = exp_normal(x);
    return x < -87.0f ? 0.0f : x > 0 ? x : y;
}
inline double exp_up_to_one(double x) { return exp(x); }
""",
    "expm1_normal": """
// e^x - 1 where e^x is a normal number.
inline float expm1_normal(float x) {
    const float shifted = x * 1.44269504f + (0x1.8p23f + 127), k = shifted - (0x1.8p23f + 127);
    const float r = x - k * 0.693359375f - k * -2.12194440e-4f;
    const float p = $exp32;
    const float scale = bits_as<float>(bits_as<unsigned>(shifted) << 23);
    return (r + r * r * p) * scale + (scale - 1);
}
""",
    "expm1": """
// e^x - 1, from x = n ln 2 + r as well.
inline float expm1(float x) {
    const float within = x < -18.0f ? -18.0f : x > 89.0f ? 89.0f : x;
    const float shifted = within * 1.44269504f + 0x1.8p23f, k = shifted - 0x1.8p23f;
    const float r = within - k * 0.693359375f - k * -2.12194440e-4f;
    const float p = $exp32;
    const int n = bits_as<int>(shifted) - bits_as<int>(0x1.8p23f);
    const float scale = bits_as<float>(unsigned(n + 126) << 23);  // 2^(n - 1)
    return 2 * ((r + r * r * p) * scale + (scale - 0.5f));
}
inline double expm1(double x) { return std::expm1(x); }
""",
    "exp2_normal": """
// 2^x from x = n + r where it is a normal number.
inline float exp2_normal(float x) {
    const float shifted = x + (0x1.8p23f + 127), r = (x - (shifted - (0x1.8p23f + 127))) * 0.693147181f;
    const float p = $exp32;
    const float scale = bits_as<float>(bits_as<unsigned>(shifted) << 23);
    return (r + r * r * p) * scale + scale;
}
""",
    "exp2": """
// 2^x from x = n + r.
inline float exp2(float x) {
    const float within = x < -151.0f ? -151.0f : x > 129.0f ? 129.0f : x;
    const float shifted = within + 0x1.8p23f, r = (within - (shifted - 0x1.8p23f)) * 0.693147181f;
    const float p = $exp32;
    const int n = bits_as<int>(shifted) - bits_as<int>(0x1.8p23f), half = n >> 1;
    return (1 + (r + r * r * p)) * bits_as<float>(unsigned(half + 127) << 23) *
           bits_as<float>(unsigned(n - half + 127) << 23);
}
inline double exp2(double x) { return std::exp2(x); }
""",
    "is_normal": """
// Whether x is positive and neither below the normal numbers nor infinite.
inline bool is_normal(float x) { return bits_as<unsigned>(x) - 0x00800000u < 0x7f000000u; }
""",
    "log": """
// ln x = e ln 2 + ln(1 + f) from x = 2^e (1 + f), 1 + f between the roots of 1/2 and 2; of x / 2^less.
inline float log_of_normal(float x, int less) {
    const int b = int(bits_as<unsigned>(x) - 0x3f3504f3u);
    const float f = bits_as<float>((b & 0x007fffff) + 0x3f3504f3) - 1, e = float((b >> 23) - less);
    const float p = $log32;
    return e * 0.693359375f + (f + (e * -2.12194440e-4f + f * f * (f * p - 0.5f)));
}
inline float log(float x) {
    const bool small = x < 0x1p-126f;
    const float y = log_of_normal(small ? x * 0x1p23f : x, small ? 23 : 0);
    return x > 0 ? (x < INFINITY ? y : x) : x == 0 ? -INFINITY : NAN;
}
inline double log(double x) { return std::log(x); }
""",
    "log2": """
// From x = 2^e (1 + f) as well, so that powers of two are exact.
inline float log2_of_normal(float x, int less) {
    const int b = int(bits_as<unsigned>(x) - 0x3f3504f3u);
    const float f = bits_as<float>((b & 0x007fffff) + 0x3f3504f3) - 1, e = float((b >> 23) - less);
    const float p = $log32;
    return e + (f + f * f * (f * p - 0.5f)) * 1.44269504f;
}
inline float log2(float x) {
    const bool small = x < 0x1p-126f;
    const float y = log2_of_normal(small ? x * 0x1p23f : x, small ? 23 : 0);
    return x > 0 ? (x < INFINITY ? y : x) : x == 0 ? -INFINITY : NAN;
}
inline double log2(double x) { return std::log2(x); }
""",
    "log10": """
// lg x = e lg 2 + lg(1 + f), lg 2 in two parts as well.
inline float log10_of_normal(float x, int less) {
    const int b = int(bits_as<unsigned>(x) - 0x3f3504f3u);
    const float f = bits_as<float>((b & 0x007fffff) + 0x3f3504f3) - 1, e = float((b >> 23) - less);
    const float p = $log32;
    return e * 0x1.344p-2f + ((f + f * f * (f * p - 0.5f)) * 0.434294482f + e * 4.60503898e-6f);
}
inline float log10(float x) {
    const bool small = x < 0x1p-126f;
    const float y = log10_of_normal(small ? x * 0x1p23f : x, small ? 23 : 0);
    return x > 0 ? (x < INFINITY ? y : x) : x == 0 ? -INFINITY : NAN;
}
inline double log10(double x) { return std::log10(x); }
""",
    "log1p": """
// ln(1 + x), with what adding 1 lost.
inline float log1p(float x) {
    const float u = 1 + x, lost = (x - (u - 1)) / u, y = log_of_normal(u, 0) + lost;
    return u > 0 ? (u < INFINITY ? y : u) : u == 0 ? -INFINITY : NAN;
}
inline double log1p(double x) { return std::log1p(x); }
""",
    "pow_normal": """
// For powers, in double, since the error of an exponent is the power's; of normal numbers.
inline double log2_in_double(float x) {
    const int b = int(bits_as<unsigned>(x) - 0x3f3504f3u);
    const double f = bits_as<float>((b & 0x007fffff) + 0x3f3504f3) - 1.0;
    const double p = $log2_64;
    return (b >> 23) + f * p;
}
inline float exp2_of_double(double t) {
    const double shifted = t + 0x1.8p52, r = t - (shifted - 0x1.8p52);
    const double p = $exp2_64;
    const unsigned n = unsigned(bits_as<unsigned long long>(shifted));
    return float(1 + r * p) * bits_as<float>((n + 127) << 23);
}
""",
    "tanh": """
inline float tanh(float x) {
    const float size = fabs(x), e = expm1_normal(2 * (size > 10.0f ? 10.0f : size));
    return copysign(e / (e + 2), x);
}
inline double tanh(double x) { return std::tanh(x); }
""",
    "erf": """
// erf x = x + x p(x^2) where |x| is small, else 1 - e^q(|x|).
inline float erf(float x) {
    const float size = fabs(x), t = size > 3.95f ? 3.95f : size, z = x * x;
    const float p = $erf32;
    const float q = $erfc32;
    return size < 0.92f ? x + x * p : copysign(1 - exp_normal(q), x);
}
inline double erf(double x) { return std::erf(x); }
""",
    "gelu": """
// x times the share of the normal distribution that lies below x, which is an exponential where x is negative.
inline float gelu(float x) {
    const float size = fabs(x), t = size > 6.0f ? 6.0f : size;
    const float p = $gelu32;
    const float tail = size > 6.0f ? 0.0f : exp_normal(p);
    return x * (x < 0 ? tail : 1 - tail);
}
""",
    "mish": """
// x tanh(ln(1 + e^x)) = x n / (n + 2) with n = e^x (e^x + 2).
inline float mish(float x) {
    const float e = exp(x > 20.0f ? 20.0f : x), n = e * (e + 2);
    return x * (n / (n + 2));
}
""",
    "atan": """
// atan x = pi/2 - atan 1/x.
inline float atan(float x) {
    const float size = fabs(x), t = size > 1 ? 1 / size : size, z = t * t;
    const float p = $atan32;
    const float y = t + t * (z * p);
    return copysign(size > 1 ? 1.57079637f - (y + 4.37113883e-8f) : y, x);
}
inline double atan(double x) { return std::atan(x); }
""",
    "sine": """
// Of what is left of a number without its nearest multiple of pi/2.
inline float sine(float r) {
    const float z = r * r, p = $sin32;
    return r + r * (z * p);
}
inline float cosine(float r) {
    const float z = r * r, p = $cos32;
    return 1 + z * (z * p - 0.5f);
}
""",
    "near": """
// The same of numbers up to NEAR, a multiple of pi/2 taken away in parts: exact where a multiplication adds at
// once, or short enough for that.
#if defined(__FMA__) || defined(__aarch64__)
constexpr float NEAR = 6000;
inline float rest_of(float x, float n) { return x - n * 0x1.921fb4p0f - n * 0x1.4442dp-24f - n * 0x1.846988p-48f; }
#else
constexpr float NEAR = 250;
inline float rest_of(float x, float n) {
    return x - n * 0x1.92p0f - n * 0x1.fb4p-12f - n * 0x1.444p-24f - n * 0x1.68c234p-39f;
}
#endif
inline float sine_of_near(float x, unsigned more) {
    const float shifted = x * 0.636619772f + 0x1.8p23f, r = rest_of(x, shifted - 0x1.8p23f);
    const unsigned count = bits_as<unsigned>(shifted) + more;
    return bits_as<float>(bits_as<unsigned>(count & 1 ? cosine(r) : sine(r)) ^ (count & 2) << 30);
}
""",
    "quarters": """
// A number as the nearest multiple of pi/2, of which the last bits count, and the rest.  Of 2/pi, the 96 bits matter
// that are worth 2 and less when they are multiplied by 2^e: the number is an integer below 2^24 times that.
constexpr unsigned TWO_OVER_PI[] = {
    0u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};
struct Quarters { int count; float rest; };
inline Quarters quarters(float size) {
    const unsigned b = bits_as<unsigned>(size < 0.785f ? 0.785f : size < INFINITY ? size : 1.0f);
    const int first = int(b >> 23) - 120, word = first >> 5, shift = first & 31;
    const unsigned long long integer = (b & 0x007fffffu) | 0x00800000u;
    const unsigned long long w0 = TWO_OVER_PI[word], w1 = TWO_OVER_PI[word + 1], w2 = TWO_OVER_PI[word + 2],
        w3 = TWO_OVER_PI[word + 3];
    const unsigned long long high = ((w0 << 32 | w1) << shift) >> 32, middle = ((w1 << 32 | w2) << shift) >> 32,
        low = ((w2 << 32 | w3) << shift) >> 32;
    const unsigned long long carried = integer * middle + (integer * low >> 32);
    const unsigned long long turns = (integer * high << 32) + carried;  // in quarters, times 2^62
    const int count = int(turns >> 62) + int(turns >> 61 & 1);
    const int above = int(turns >> 30), below = int((turns << 2 & 0xffffffffu) >> 1);
    const double rest = above * (1.5707963267948966 * 0x1p-32) + below * (1.5707963267948966 * 0x1p-63);
    return {size < 0.785f ? 0 : count, size < 0.785f ? size : float(rest)};
}
""",
    "sin": """
inline float sin(float x) {
    const Quarters of = quarters(fabs(x));
    const unsigned sign = unsigned(of.count & 2) << 30 ^ (bits_as<unsigned>(x) & 0x80000000u);
    const float y = of.count & 1 ? cosine(of.rest) : sine(of.rest);
    return fabs(x) < INFINITY ? bits_as<float>(bits_as<unsigned>(y) ^ sign) : NAN;
}
inline double sin(double x) { return std::sin(x); }
""",
    "cos": """
inline float cos(float x) {
    const Quarters of = quarters(fabs(x));
    const unsigned sign = unsigned((of.count + 1) & 2) << 30;
    const float y = of.count & 1 ? sine(of.rest) : cosine(of.rest);
    return fabs(x) < INFINITY ? bits_as<float>(bits_as<unsigned>(y) ^ sign) : NAN;
}
inline double cos(double x) { return std::cos(x); }
""",
}


# name -> C++ text, in an order in which each uses only what stands before it.
MATHS = {
    **{name: f"\nusing std::{name};\n" for name in LIBRARY},
    **{name: with_polynomials(text) for name, text in _TEXTS.items()},
}
