// fused_avg_sigmoid_sum: axes i0 over dimension 0, i1 over dimension 1, i2 over dimension 2 (pooled), i3 over dimension 3 (pooled).

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

// 2^x and 1/x to 2 ulp; results below the normal numbers are zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
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

// 1/x of x from 2^-126 on, rounded as a division is: `reciprocal_approx` leans to one side, which a mean of
// 1 - sigmoid(x) would show, and a step of Newton's makes up for that.  0 for what is greater than 2^126.
__device__ __forceinline__ float reciprocal_rounded(float x) {
    const float within = smaller(x, 0x1p127f), y = reciprocal_approx(within);
    return fmaf(y, fmaf(-within, y, 1.0f), y);
}

// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) { return reciprocal_rounded(1 + exp2_approx(-1.44269504f * x)); }

using index_t = int;
using count_t = unsigned int;  // divides faster
constexpr int THREADS = 256;
constexpr int TEAM = 256;  // threads per row
constexpr int JOINERS = 32;  // threads that join the parts of one result
// Values per thread and elements per load, in the wide variant (16-byte loads) and in the other.
template <bool WIDE>
constexpr int VALUES = 1;
template <bool WIDE>
constexpr int CHUNK = WIDE ? 4 : 1;
__device__ constexpr int KERNEL[] = {4, 4};
__device__ constexpr int STRIDE[] = {4, 4};
__device__ constexpr int PADDING[] = {0, 0};
__device__ constexpr int DILATION[] = {1, 1};
constexpr int REACH = 3;  // from the first to the last tap of a row
// A row of loads starts SKEW elements to the left of the first slot and takes SPAN of them.
template <bool WIDE>
constexpr int SKEW = 0;
template <bool WIDE>
constexpr int SPAN = 4;

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

// A running sum: a few values are added in float, the rest in float64.
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
    __device__ float result(double) const { return float(total); }
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
    for (int e = 0; e < VALUES<WIDE>; ++e) pooled[e] = float(0);
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
                    if (tap >= 0 && tap <= REACH) pooled[e] += element;
                }
            }
        }
    }
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        const float average = pooled[e] / 16.0f;
        const float v1 = sigmoid(average);
        value[e] = v1;
    }
}

// The results of the first reduction from `result` on, and what follows it.
template <int V>
__device__ __forceinline__ void finish(const Data& d, index_t result, const First (&fold)[V], float (&value)[V]) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
        const float reduced = fold[e].result(double(d.n1) * d.n2 * d.n3);
        value[e] = reduced;
    }
}

// A team of threads per part of a row; its threads take neighbouring items.
template <bool WIDE>
__device__ __forceinline__ void rows(const Data& d, double* scratch, int parts) {
    constexpr int V = VALUES<WIDE>, AT_ONCE = WIDE ? 2 : 4;
    const index_t team = index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    const int lane = threadIdx.x % TEAM;
    const index_t rows = d.n0, items = d.n1 * d.n2 * (d.n3 / V);
    const index_t row = team / parts, part = team % parts, share = (items + parts - 1) / parts;
    const index_t begin = part * share, end = row < rows ? min(items, begin + share) : 0;
    const index_t i0 = row;
    const auto item_values = [&](index_t item, float (&value)[V]) {
        count_t rest = item;
        const index_t i3 = rest % count_t(d.n3 / V) * V;
        rest /= count_t(d.n3 / V);
        const index_t i2 = rest % count_t(d.n2);
        rest /= count_t(d.n2);
        const index_t i1 = rest;
        values<WIDE>(d, i0, i1, i2, i3, value);
    };
    First fold = First::empty();
    index_t item = begin + lane;
    for (; item < end - (AT_ONCE - 1) * TEAM; item += AT_ONCE * TEAM) {
        float value[AT_ONCE][V];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) item_values(item + t * TEAM, value[t]);
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) fold.take(value[t]);
    }
    for (; item < end; item += TEAM) {
        float value[V];
        item_values(item, value);
        fold.take(value);
    }
    fold = joined<TEAM>(fold);
    if (lane != 0 || row >= rows) return;
    fold.save(scratch + (part * rows + row), parts * rows);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused_avg_sigmoid_sum(const float* __restrict__ x, int n0, int n1, int n2, int n3, int m2, int m3, double* scratch,
    int parts) {
    await_launches();
    const Data d{x, n0, n1, n2, n3, m2, m3};
    if (m3 % CHUNK<true> == 0 && aligned(x))
        rows<true>(d, scratch, parts);
    else
        rows<false>(d, scratch, parts);
}

// Joins the parts of every result, in their order.
extern "C" __global__ void __launch_bounds__(THREADS)
fused_avg_sigmoid_sum_finish(const float* __restrict__ x, int n0, int n1, int n2, int n3, int m2, int m3,
    const double* __restrict__ scratch, int parts, float* __restrict__ out) {
    await_launches();
    const Data d{x, n0, n1, n2, n3, m2, m3};
    const index_t results = n0;
    const int lane = threadIdx.x % JOINERS;
    const auto whole = [&](index_t result) {
        First fold = First::empty();
        for (int begin = lane; begin < parts; begin += 4 * JOINERS) {
            First some[4];    // none waits for what is made of another
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int part = begin + k * JOINERS;
                some[k] = First::empty();
                if (part < parts) some[k] = First::load(scratch + (index_t(part) * results + result), parts * results);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) fold.merge(some[k]);
        }
        return joined<JOINERS>(fold);
    };
    const index_t result = (index_t(blockIdx.x) * THREADS + threadIdx.x) / JOINERS;
    const First fold[1] = {whole(min(result, results - 1))};
    if (lane != 0 || result >= results) return;
    float value[1];
    finish(d, result, fold, value);
    store<1>(out + result, value);
}
