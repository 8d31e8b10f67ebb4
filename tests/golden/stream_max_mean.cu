// fused_max_mean: axes i0 over dimension 0, i1 over dimension 1, i2 over dimension 2 (pooled), i3 over dimension 3 (pooled).

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

// The greater and the smaller of two values; NaN wins.
__device__ __forceinline__ float greater(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float smaller(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ double greater(double a, double b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ double smaller(double a, double b) { return a < b || a != a ? a : b; }

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
constexpr int TEAM = 8, LANES = THREADS / TEAM;
// Values per thread and elements per load, in the wide variant (16-byte loads) and in the other.
template <bool WIDE>
constexpr int VALUES = WIDE ? 4 : 1;
template <bool WIDE>
constexpr int CHUNK = WIDE ? 4 : 1;
__device__ constexpr int KERNEL[] = {3, 3};
__device__ constexpr int STRIDE[] = {2, 2};
__device__ constexpr int PADDING[] = {0, 0};
__device__ constexpr int DILATION[] = {1, 1};
constexpr int REACH = 2;  // from the first to the last tap of a row
// A row of loads starts SKEW elements to the left of the first slot and takes SPAN of them.
template <bool WIDE>
constexpr int SKEW = 0;
template <bool WIDE>
constexpr int SPAN = WIDE ? 9 : 3;

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
    index_t n0, n1, n2, n3;  // lengths of the axes
    index_t m2, m3;  // those of pooled axes before the window
};

// A running mean: a few values are added in float, the rest in float64.
struct First {
    double total;
    static __device__ First empty() { return {0.0}; }
    template <int COUNT>
    __device__ void take(const float (&value)[COUNT]) {
        float few = value[0];
#pragma unroll
        for (int i = 1; i < COUNT; ++i) few += value[i];
        total += few;
    }
    __device__ void merge(const First& other) { total += other.total; }
    __device__ First from(int offset) const { return {__shfl_down_sync(~0u, total, offset)}; }
    __device__ void save(double* to, index_t) const { *to = total; }
    static __device__ First load(const double* from, index_t) { return {*from}; }
    __device__ float result(double count) const { return float(total / count); }
};

// The folds of TEAM neighbouring threads together, in the first of them.
template <int TEAM, typename Fold>
__device__ Fold joined(Fold fold) {
#pragma unroll
    for (int offset = (TEAM < 32 ? TEAM : 32) / 2; offset > 0; offset /= 2) fold.merge(fold.from(offset));
    if constexpr (TEAM > 32) {
        static_assert(TEAM == THREADS, "a team is part of a warp, or a block");
        __shared__ Fold warps[THREADS / 32];
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = fold;
        __syncthreads();
        if (threadIdx.x == 0)
            for (int warp = 1; warp < THREADS / 32; ++warp) fold.merge(warps[warp]);
    }
    return fold;
}

// Neighbours along the last axis, from these coordinates on.
template <bool WIDE>
__device__ __forceinline__
void values(const Data& d, index_t i0, index_t i1, index_t i2, index_t i3, float (&value)[VALUES<WIDE>]) {
    float pooled[VALUES<WIDE>];
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) pooled[e] = -float(INFINITY);
#pragma unroll
    for (int u2 = 0; u2 < KERNEL[0]; ++u2) {
        const index_t j2 = i2 * STRIDE[0] - PADDING[0] + u2 * DILATION[0];
#pragma unroll
        for (int u = 0; u < SPAN<WIDE>; u += CHUNK<WIDE>) {
            const index_t j3 = i3 * STRIDE[1] - SKEW<WIDE> + u;
            const auto xs = load<CHUNK<WIDE>>(d.x + (((i0 * d.n1 + i1) * d.m2 + j2) * d.m3 + j3));
#pragma unroll
            for (int c = 0; c < CHUNK<WIDE>; ++c) {
                const float x = widened(xs.at[c]);
                const float element = x;
#pragma unroll
                for (int e = 0; e < VALUES<WIDE>; ++e) {
                    const int tap = u + c - (SKEW<WIDE> - PADDING[1]) - e * STRIDE[1];
                    if (tap >= 0 && tap <= REACH) pooled[e] = greater(pooled[e], element);
                }
            }
        }
    }
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        value[e] = pooled[e];
    }
}

constexpr int TALL = 4;  // values of a thread along axis 2

// Values on each other, from these coordinates on: a row that their windows share is taken once for all.
__device__ __forceinline__ void tall_values(const Data& d, index_t i0, index_t i1, index_t first2, index_t i3, float (&value)[TALL]) {
    float pooled[TALL];
#pragma unroll
    for (int e = 0; e < TALL; ++e) pooled[e] = -float(INFINITY);
#pragma unroll
    for (int u2 = 0; u2 < 9; ++u2) {
        const index_t j2 = min(first2 * STRIDE[0] + u2, d.m2 - 1);  // a last window may be nobody's
        float row = -float(INFINITY);
#pragma unroll
        for (int u3 = 0; u3 < KERNEL[1]; ++u3) {
            const index_t j3 = i3 * STRIDE[1] - PADDING[1] + u3 * DILATION[1];
            const auto xs = load<1>(d.x + (((i0 * d.n1 + i1) * d.m2 + j2) * d.m3 + j3));
            const float x = widened(xs.at[0]);
            row = greater(row, x);
        }
#pragma unroll
        for (int e = 0; e < TALL; ++e) {
            const int tap = u2 - e * STRIDE[0];
            if (tap >= 0 && tap < KERNEL[0]) pooled[e] = greater(pooled[e], row);
        }
    }
#pragma unroll
    for (int e = 0; e < TALL; ++e) {
        const index_t i2 = min(first2 + e, d.n2 - 1);
        const float of_e = pooled[e];
        value[e] = of_e;
    }
}

// The results of the first reduction from `result` on, and what follows it.
template <int V>
__device__ __forceinline__ void finish(const Data& d, index_t result, const First (&fold)[V], float (&value)[V]) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
        const float reduced = fold[e].result(double(d.n1));
        value[e] = reduced;
    }
}

// LANES threads side by side along the last axis, TEAM of them on each other: each of those walks along its share of
// what is reduced.
template <bool WIDE>
__device__ __forceinline__ void columns(const Data& d, float* out) {
    constexpr int V = VALUES<WIDE>, AT_ONCE = WIDE ? 2 : 4;
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    const index_t items = d.n0 * d.n2 * (d.n3 / V), reduced = d.n1;
    const index_t blocks = (items + LANES - 1) / LANES;
    for (index_t job = blockIdx.x; job < blocks; job += gridDim.x) {
        const index_t item = job * LANES + lane;
        const index_t begin = 0, end = item < items ? reduced : 0;
        count_t rest = item;
        const index_t i3 = rest % count_t(d.n3 / V) * V;
        rest /= count_t(d.n3 / V);
        const index_t i2 = rest % count_t(d.n2);
        rest /= count_t(d.n2);
        const index_t i0 = rest;
        const auto reduced_values = [&](index_t r, float (&value)[V]) {
            const index_t i1 = r;
            values<WIDE>(d, i0, i1, i2, i3, value);
        };
        First fold[V];
#pragma unroll
        for (int e = 0; e < V; ++e) fold[e] = First::empty();
        index_t r = begin + member;
        for (; r < end - (AT_ONCE - 1) * TEAM; r += AT_ONCE * TEAM) {
            float value[AT_ONCE][V];
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) reduced_values(r + t * TEAM, value[t]);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                float taken[AT_ONCE];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) taken[t] = value[t][e];
                fold[e].take(taken);
            }
        }
        for (; r < end; r += TEAM) {
            float value[V];
            reduced_values(r, value);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const float taken[1] = {value[e]};
                fold[e].take(taken);
            }
        }
        // Those of one column join: first in a warp, then what is apart.
        constexpr int APART = LANES < 32 ? THREADS / 32 : TEAM;
#pragma unroll 1
        for (int offset = 16; offset >= LANES; offset /= 2)
#pragma unroll
            for (int e = 0; e < V; ++e) fold[e].merge(fold[e].from(offset));
        __shared__ First others[APART - 1][LANES][V];
        const int place = member * APART / TEAM;
        if (place > 0 && member % (TEAM / APART) == 0)
#pragma unroll
            for (int e = 0; e < V; ++e) others[place - 1][lane][e] = fold[e];
        __syncthreads();
        if (member == 0)
            for (int m = 0; m < APART - 1; ++m)
#pragma unroll
                for (int e = 0; e < V; ++e) fold[e].merge(others[m][lane][e]);
        __syncthreads();
        if (member == 0 && item < items) {
            float value[V];
            finish(d, item * V, fold, value);
            store<V>(out + item * V, value);
        }
    }
}

// LANES threads side by side along the last axis, TEAM of them on each other: each of those walks along its share of
// what is reduced.
__device__ __forceinline__ void tall(const Data& d, float* out) {
    constexpr int V = TALL, AT_ONCE = 1;
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    const index_t items = d.n0 * ((d.n2 + TALL - 1) / TALL) * d.n3, reduced = d.n1;
    const index_t blocks = (items + LANES - 1) / LANES;
    for (index_t job = blockIdx.x; job < blocks; job += gridDim.x) {
        const index_t item = job * LANES + lane;
        const index_t begin = 0, end = item < items ? reduced : 0;
        count_t rest = item;
        const index_t i3 = rest % count_t(d.n3);
        rest /= count_t(d.n3);
        const index_t i2 = rest % count_t((d.n2 + TALL - 1) / TALL) * TALL;
        rest /= count_t((d.n2 + TALL - 1) / TALL);
        const index_t i0 = index_t(rest);
        const auto reduced_values = [&](index_t r, float (&value)[V]) {
            const index_t i1 = r;
            tall_values(d, i0, i1, i2, i3, value);
        };
        First fold[V];
#pragma unroll
        for (int e = 0; e < V; ++e) fold[e] = First::empty();
        index_t r = begin + member;
        for (; r < end - (AT_ONCE - 1) * TEAM; r += AT_ONCE * TEAM) {
            float value[AT_ONCE][V];
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) reduced_values(r + t * TEAM, value[t]);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                float taken[AT_ONCE];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) taken[t] = value[t][e];
                fold[e].take(taken);
            }
        }
        for (; r < end; r += TEAM) {
            float value[V];
            reduced_values(r, value);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const float taken[1] = {value[e]};
                fold[e].take(taken);
            }
        }
        // Those of one column join: first in a warp, then what is apart.
        constexpr int APART = LANES < 32 ? THREADS / 32 : TEAM;
#pragma unroll 1
        for (int offset = 16; offset >= LANES; offset /= 2)
#pragma unroll
            for (int e = 0; e < V; ++e) fold[e].merge(fold[e].from(offset));
        __shared__ First others[APART - 1][LANES][V];
        const int place = member * APART / TEAM;
        if (place > 0 && member % (TEAM / APART) == 0)
#pragma unroll
            for (int e = 0; e < V; ++e) others[place - 1][lane][e] = fold[e];
        __syncthreads();
        if (member == 0)
            for (int m = 0; m < APART - 1; ++m)
#pragma unroll
                for (int e = 0; e < V; ++e) fold[e].merge(others[m][lane][e]);
        __syncthreads();
        if (member == 0 && item < items) {
            const index_t place = ((i0) * d.n2 + i2) * d.n3 + i3;
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const First one[1] = {fold[e]};
                const index_t result = place + e * (d.n3);
                if (i2 + e >= d.n2) break;
                float value[1];
                finish(d, result, one, value);
                store<1>(out + result, value);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused_max_mean(const float* __restrict__ x, int n0, int n1, int n2, int n3, int m2, int m3,
    float* __restrict__ out) {
    await_launches();
    const Data d{x, n0, n1, n2, n3, m2, m3};
    if (n3 % VALUES<true> == 0 && m3 % CHUNK<true> == 0 && aligned(x) && aligned(out))
        columns<true>(d, out);
    else
        tall(d, out);
}
