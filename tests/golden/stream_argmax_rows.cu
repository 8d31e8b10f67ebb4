// fused_argmax_rows: axes i0 over dimension 0, i1 over dimension 1.

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
constexpr int TEAM = 32;  // threads per row
// Values per thread and elements per load, in the wide variant (16-byte loads) and in the other.
template <bool WIDE>
constexpr int VALUES = WIDE ? 4 : 1;

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
    index_t n0, n1;  // lengths of the axes
};

template <> struct narrow_to<long long> { static __device__ __forceinline__ long long of(long long x) { return x; } };

// A running index of a maximum: of the first NaN, or else of the first that nothing is better than.
// What one thread takes comes in order.
struct First {
    float best;
    index_t place;
    static __device__ First empty() { return {-float(INFINITY), 0}; }
    template <int COUNT>
    __device__ void take(const float (&value)[COUNT], index_t first, index_t step = 1) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool better = value[i] > best || (value[i] != value[i] && best == best);
            best = better ? value[i] : best;
            place = better ? first + i * step : place;
        }
    }
    __device__ void merge(const First& other) {
        const bool alike = other.best == best || (other.best != other.best && best != best);
        const bool better = alike ? other.place < place : other.best > best || other.best != other.best;
        best = better ? other.best : best;
        place = better ? other.place : place;
    }
    __device__ First from(int offset) const {
        return {__shfl_down_sync(~0u, best, offset), __shfl_down_sync(~0u, place, offset)};
    }
    __device__ void save(double* to, index_t stride) const { to[0] = best, to[stride] = double(place); }
    static __device__ First load(const double* from, index_t stride) { return {float(from[0]), index_t(from[stride])}; }
    __device__ long long result(double) const { return place; }
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
void values(const Data& d, index_t i0, index_t i1, float (&value)[VALUES<WIDE>]) {
    const auto xs = load<VALUES<WIDE>>(d.x + (i0 * d.n1 + i1));
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        const float x = widened(xs.at[e]);
        value[e] = x;
    }
}

// The results of the first reduction from `result` on, and what follows it.
template <int V>
__device__ __forceinline__ void finish(const Data& d, index_t result, const First (&fold)[V], long long (&value)[V]) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
        const long long reduced = fold[e].result(double(d.n1));
        value[e] = reduced;
    }
}

// A team of threads per part of a row; its threads take neighbouring items.
template <bool WIDE>
__device__ __forceinline__ void rows(const Data& d, long long* out) {
    constexpr int V = VALUES<WIDE>, AT_ONCE = WIDE ? 4 : 8;
    const index_t team = index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    const int lane = threadIdx.x % TEAM;
    const index_t rows = d.n0, items = (d.n1 / V);
    const index_t row = team, begin = 0, end = row < rows ? items : 0;
    const index_t i0 = row;
    const auto item_values = [&](index_t item, float (&value)[V]) {
        const index_t i1 = item * V;
        values<WIDE>(d, i0, i1, value);
    };
    First fold = First::empty();
    index_t item = begin + lane;
    for (; item < end - (AT_ONCE - 1) * TEAM; item += AT_ONCE * TEAM) {
        float value[AT_ONCE][V];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) item_values(item + t * TEAM, value[t]);
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) fold.take(value[t], (item + t * TEAM) * V);
    }
    for (; item < end; item += TEAM) {
        float value[V];
        item_values(item, value);
        fold.take(value, item * V);
    }
    fold = joined<TEAM>(fold);
    if (lane != 0 || row >= rows) return;
    const First whole[1] = {fold};
    long long value[1];
    finish(d, row, whole, value);
    store<1>(out + row, value);
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused_argmax_rows(const float* __restrict__ x, int n0, int n1, long long* __restrict__ out) {
    await_launches();
    const Data d{x, n0, n1};
    if (n1 % VALUES<true> == 0 && aligned(x))
        rows<true>(d, out);
    else
        rows<false>(d, out);
}
