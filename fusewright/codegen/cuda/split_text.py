"""The CUDA text by which a product of float32 is three of tf32 (3xTF32), or of halves, on tensor cores."""

from __future__ import annotations

SPLIT = """
// A float32 as the sum of two tf32 numbers; the product of the small parts is below float32's rounding.
struct Split { unsigned big, small; };

// What is not finite is all in the small part: beside it in the big one, it would meet the other's small part,
// and an infinity times that may be another infinity, or NaN.  The largest numbers are cut off, for no tf32 is nearest.
__device__ __forceinline__ Split split(float x) {
    const unsigned nearest = round_tf32(x);
    const bool finite = fabsf(x) < INFINITY, beyond = !(fabsf(__uint_as_float(nearest)) < INFINITY);
    const unsigned big = beyond ? __float_as_uint(x) & 0xffffe000u : nearest;
    return {finite ? big : 0, finite ? round_tf32(x - __uint_as_float(big)) : nearest};
}
"""

HALVES = """
// Two numbers below 2^15 as pairs of halves: the nearest ones, and what is left.
struct Split { unsigned big, small; };
// Those of a weight that a thread has of a chunk, and what takes their scales back.
struct Own { Split of[4][4]; float scale[2]; };

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(unsigned(exponent + 127) << 23); }
// How large a number is, if it is one.
__device__ __forceinline__ float finite_size(float x) { return fabsf(x) < INFINITY ? fabsf(x) : 0.0f; }
// The exponent of what `most` is multiplied by, to lie between 2^14 and 2^15, if it is above 2^-106.
__device__ __forceinline__ int unit_exponent(float most) {
    return min(14 + 127 - int(__float_as_uint(most) >> 23), 120);
}
"""

LEFT = """
// What no half is left for.
__device__ __forceinline__ float left(float x) {
    const Split each = split(x, 0);
    return fabsf(x) < INFINITY ? x - first_half(each.big) - first_half(each.small) : 0.0f;
}
"""

SPLIT_HALVES = """
// Halves, and those of what they leave of two numbers.
__device__ __forceinline__ Split with_rest(unsigned big, float x, float y) {
    return {big, pair_of_halves(x - first_half(big), y - second_half(big))};
}
// What is not finite is all in the small part, so that it meets no small part of the other, but numbers.
__device__ __forceinline__ Split split(float x, float y) {
    const float a = fabsf(x) < INFINITY ? x : 0.0f, b = fabsf(y) < INFINITY ? y : 0.0f;
    return with_rest(pair_of_halves(a, b), x, y);
}
// Numbers that are finite, or NaN.
__device__ __forceinline__ Split split_finite(float x, float y) { return with_rest(pair_of_halves(x, y), x, y); }
"""

ROUND_HALVES = """
// Nothing is made of what is left.
__device__ __forceinline__ Split split(float x, float y) { return {pair_of_halves(x, y), 0}; }
__device__ __forceinline__ Split split_finite(float x, float y) { return split(x, y); }
"""
