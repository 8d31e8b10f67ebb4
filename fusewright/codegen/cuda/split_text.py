"""The CUDA text by which a product of float32 is three of tf32 (3xTF32), whoever multiplies."""

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

ROUND = """
// A float32 as the nearest tf32 number; nothing is made of what is left.
struct Split { unsigned big, small; };

__device__ __forceinline__ Split split(float x) { return {round_tf32(x), 0}; }
"""
