// fused_add_relu: axes i0 over dimension 0, i1 over dimension 1, i2 over dimensions 2-3.

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

using index_t = int;
using count_t = unsigned int;  // divides faster
constexpr int THREADS = 256;
// Values per thread and elements per load, in the wide variant (16-byte loads) and in the other.
template <bool WIDE>
constexpr int VALUES = WIDE ? 8 : 1;

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
    const bf16* x;
    const bf16* p1;
    const bf16* p2;
    index_t n0, n1, n2;  // lengths of the axes
};

// Neighbours along the last axis, from these coordinates on.
template <bool WIDE>
__device__ __forceinline__
void values(const Data& d, index_t i0, index_t i1, index_t i2, float (&value)[VALUES<WIDE>]) {
    const auto xs = load<VALUES<WIDE>>(d.x + ((i0 * d.n1 + i1) * d.n2 + i2));
    const auto p1s = load<VALUES<WIDE>>(d.p1 + ((i0 * d.n1 + i1) * d.n2 + i2));
    const float p2 = widened(d.p2[i1]);
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        const float x = widened(xs.at[e]);
        const float p1 = widened(p1s.at[e]);
        const float v3 = p1 + p2;
        const float v4 = v3 + x;
        const float v5 = v4 < float(0.0) ? float(0.0) : v4;
        value[e] = v5;
    }
}

// Every thread computes AT_ONCE groups of neighbours, a block apart, and then writes them.
template <bool WIDE>
__device__ __forceinline__ void flat(const Data& d, bf16* out) {
    constexpr int V = VALUES<WIDE>, AT_ONCE = WIDE ? 2 : 4;
    const index_t items = d.n0 * d.n1 * (d.n2 / V);
    for (index_t first = index_t(blockIdx.x) * (THREADS * AT_ONCE) + threadIdx.x; first < items;
         first += index_t(gridDim.x) * (THREADS * AT_ONCE)) {
        float value[AT_ONCE][V];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            const index_t item = min(first + t * THREADS, items - 1);  // loads need no branch then
            count_t rest = item;
            const index_t i2 = rest % count_t(d.n2 / V) * V;
            rest /= count_t(d.n2 / V);
            const index_t i1 = rest % count_t(d.n1);
            rest /= count_t(d.n1);
            const index_t i0 = rest;
            values<WIDE>(d, i0, i1, i2, value[t]);
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t)
            if (first + t * THREADS < items) store<V>(out + (first + t * THREADS) * V, value[t]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused_add_relu(const bf16* __restrict__ x, const bf16* __restrict__ p1, const bf16* __restrict__ p2, int n0, int n1,
    int n2, bf16* __restrict__ out) {
    await_launches();
    const Data d{x, p1, p2, n0, n1, n2};
    if (n2 % VALUES<true> == 0 && aligned(x) && aligned(p1) && aligned(out))
        flat<true>(d, out);
    else
        flat<false>(d, out);
}
