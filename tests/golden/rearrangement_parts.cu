// fused_cat: elements in the order in which they are written.

// NVRTC has no <cmath> to define these.
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
__device__ __forceinline__ void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Elements of tensors in half precisions are bits until they are read: bf16 and fp16 <-> float32.
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ double widened(double x) { return x; }
__device__ __forceinline__ float widened(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float widened(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <typename E> struct narrow_to;
template <> struct narrow_to<float> { static __device__ __forceinline__ float of(float x) { return x; } };
template <> struct narrow_to<double> { static __device__ __forceinline__ double of(double x) { return x; } };
template <> struct narrow_to<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <> struct narrow_to<fp16> {
    static __device__ __forceinline__ fp16 of(float x) {
        fp16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};

// sin x = (-1)^n sin r with x = n pi + r, cos x = -(-1)^n sin r with x = (n + 1/2) pi + r; pi in three parts: n times
// the first two are exact where much of x cancels.  What is farther away than FAR, or no number, is rare: it takes
// CUDA's way, which is long, once for all calls.
constexpr float FAR = 100000;
__device__ __noinline__ float sine_of_far(float x) { return sin(x); }
__device__ __noinline__ float cosine_of_far(float x) { return cos(x); }
// sin r of r up to pi/2.
__device__ __forceinline__ float sine_of_small(float r) {
    const float z = r * r;
    const float p = -0.166666657f + z * (0.0083332425f + z * (-0.000198227324f + z * 2.63473271e-06f));
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

using index_t = int;
using count_t = unsigned int;  // divides faster; differences below 0 are very large
constexpr int THREADS = 256, VALUES = 4, AT_ONCE = 2;

// COUNT neighbours in memory, read or written by as few instructions as their alignment allows.
template <typename E, int COUNT>
struct alignas(sizeof(E) * COUNT < 16 ? sizeof(E) * COUNT : 16) Pack {
    E at[COUNT];
};
template <int COUNT, typename E>
__device__ __forceinline__ Pack<E, COUNT> load(const E* from) {
    return *reinterpret_cast<const Pack<E, COUNT>*>(from);
}
template <int COUNT, typename E, typename T>
__device__ __forceinline__ void store(E* to, const T (&value)[COUNT]) {
    Pack<E, COUNT> pack;
#pragma unroll
    for (int e = 0; e < COUNT; ++e) pack.at[e] = narrow_to<E>::of(value[e]);
    *reinterpret_cast<Pack<E, COUNT>*>(to) = pack;
}
__device__ __forceinline__ bool aligned(const void* p) { return reinterpret_cast<size_t>(p) % 16 == 0; }

// What a call passes.
struct Data {
    const float* x;
};

// Neighbours in the order of memory, from element i on.
__device__ __forceinline__ void values(const Data& d, const count_t i, float (&value)[VALUES]) {
    if (i % 24 < 12) {
        const auto x1 = load<VALUES>(d.x + index_t(i % 24 + i / 24 * 12));
#pragma unroll
        for (int e = 0; e < VALUES; ++e) {
            const float v1 = sine(widened(x1.at[e]));
            value[e] = v1;
        }
    }
    else {
        const count_t k2 = i % 24 + count_t(-12);
        const auto x3 = load<VALUES>(d.x + index_t(k2 + i / 24 * 12));
#pragma unroll
        for (int e = 0; e < VALUES; ++e) {
            const float v1 = cosine(widened(x3.at[e]));
            value[e] = v1;
        }
    }
}

// A thread computes AT_ONCE groups of VALUES neighbours, a block apart, and then writes them.
extern "C" __global__ void __launch_bounds__(THREADS)
fused_cat(const float* __restrict__ x, float* __restrict__ out, int groups) {
    await_launches();
    const Data d{x};
    const count_t first = count_t(blockIdx.x) * (THREADS * AT_ONCE) + threadIdx.x;
    float value[AT_ONCE][VALUES];
#pragma unroll
    for (int t = 0; t < AT_ONCE; ++t)
        values(d, min(first + t * THREADS, count_t(groups) - 1) * VALUES, value[t]);  // loads need no branch then
#pragma unroll
    for (int t = 0; t < AT_ONCE; ++t)
        if (first + t * THREADS < groups) store<VALUES>(out + size_t(first + t * THREADS) * VALUES, value[t]);
}
