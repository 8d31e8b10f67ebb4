// fused_argmin_columns: axes i0 over dimension 0, i1 over dimension 1, i2 over dimension 2.

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
constexpr int TEAM = 8, LANES = THREADS / TEAM;
constexpr int JOINERS = 32;  // threads that join the parts of one result
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
    index_t n0, n1, n2;  // lengths of the axes
};

template <> struct narrow_to<long long> { static __device__ __forceinline__ long long of(long long x) { return x; } };

// A running index of a minimum: of the first NaN, or else of the first that nothing is better than.
// What one thread takes comes in order.
struct First {
    float best;
    index_t place;
    static __device__ First empty() { return {float(INFINITY), 0}; }
    template <int COUNT>
    __device__ void take(const float (&value)[COUNT], index_t first, index_t step = 1) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool better = value[i] < best || (value[i] != value[i] && best == best);
            best = better ? value[i] : best;
            place = better ? first + i * step : place;
        }
    }
    __device__ void merge(const First& other) {
        const bool alike = other.best == best || (other.best != other.best && best != best);
        const bool better = alike ? other.place < place : other.best < best || other.best != other.best;
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
void values(const Data& d, index_t i0, index_t i1, index_t i2, float (&value)[VALUES<WIDE>]) {
    const auto xs = load<VALUES<WIDE>>(d.x + ((i0 * d.n1 + i1) * d.n2 + i2));
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        const float x = widened(xs.at[e]);
        const float v1 = widened(narrow_to<bf16>::of(fabs(x)));
        value[e] = v1;
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

// LANES threads side by side along the last axis, TEAM of them on each other: each of those walks along its share of
// what is reduced.
template <bool WIDE>
__device__ __forceinline__ void columns(const Data& d, double* scratch, int parts) {
    constexpr int V = VALUES<WIDE>, AT_ONCE = WIDE ? 4 : 8;
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    const index_t items = d.n0 * (d.n2 / V), reduced = d.n1;
    const index_t blocks = (items + LANES - 1) / LANES;
    for (index_t job = blockIdx.x; job < blocks * parts; job += gridDim.x) {
        const index_t item = job / parts * LANES + lane;
        const index_t part = job % parts, share = (reduced + parts - 1) / parts;
        const index_t begin = part * share, end = item < items ? min(reduced, begin + share) : 0;
        count_t rest = item;
        const index_t i2 = rest % count_t(d.n2 / V) * V;
        rest /= count_t(d.n2 / V);
        const index_t i0 = rest;
        const auto reduced_values = [&](index_t r, float (&value)[V]) {
            const index_t i1 = r;
            values<WIDE>(d, i0, i1, i2, value);
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
                fold[e].take(taken, r, TEAM);
            }
        }
        for (; r < end; r += TEAM) {
            float value[V];
            reduced_values(r, value);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const float taken[1] = {value[e]};
                fold[e].take(taken, r);
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
#pragma unroll
            for (int e = 0; e < V; ++e)
                fold[e].save(scratch + ((part * items + item) * V + e), parts * items * V);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused_argmin_columns(const bf16* __restrict__ x, int n0, int n1, int n2, double* scratch, int parts) {
    await_launches();
    const Data d{x, n0, n1, n2};
    if (n2 % VALUES<true> == 0 && aligned(x))
        columns<true>(d, scratch, parts);
    else
        columns<false>(d, scratch, parts);
}

// Joins the parts of every result, in their order.
extern "C" __global__ void __launch_bounds__(THREADS)
fused_argmin_columns_finish(const bf16* __restrict__ x, int n0, int n1, int n2, const double* __restrict__ scratch,
    int parts, long long* __restrict__ out) {
    await_launches();
    const Data d{x, n0, n1, n2};
    const index_t results = n0 * n2;
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
    long long value[1];
    finish(d, result, fold, value);
    store<1>(out + result, value);
}
