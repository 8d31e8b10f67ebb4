// fused_cumsum: prefixes (sum), axes i0 over dimension 0, i1 over dimension 1, i2 over dimension 2.

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
constexpr int THREADS = 256, TEAM = 8;  // of a block, and per row
// Values that a thread takes together, in the wide variant (16-byte loads) and in the other.
template <bool WIDE>
constexpr int VALUES = WIDE ? 4 : 1;
// And how often in a tile.
template <bool WIDE>
constexpr int ITEMS = WIDE ? 4 : 8;

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
    const float* p1;
    index_t n0, n1, n2;  // lengths of the axes
};

template <typename T>
__device__ __forceinline__ T joined(T a, T b) {
    return a + b;
}

// Whether a sum of a stretch, or of 8 together, is within float32's range; a NaN is in none.
__device__ __forceinline__ bool fits(float sum) { return fabs(sum) <= 3.4028234663852886e+38f / 8; }

// Neighbours along the last axis, from these coordinates on.
template <bool WIDE>
__device__ __forceinline__
void entry(const Data& d, index_t i0, index_t i1, index_t i2, float (&value)[VALUES<WIDE>]) {
    const auto xs = load<VALUES<WIDE>>(d.x + ((i0 * d.n1 + i1) * d.n2 + i2));
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        const float x = widened(xs.at[e]);
        value[e] = x;
    }
}

// What comes of prefixes.
template <bool WIDE>
__device__ __forceinline__
void result(const Data& d, index_t i0, index_t i1, index_t i2, const float (&prefix)[VALUES<WIDE>], float (&value)[VALUES<WIDE>]) {
    const auto p1s = load<VALUES<WIDE>>(d.p1 + i2);
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        const float p1 = widened(p1s.at[e]);
        const float v2 = prefix[e] * p1;
        value[e] = v2;
    }
}

// LANES threads side by side along the last axis, TEAM of them on each other, which walk down columns: read once.  Of
// every tile a thread has AT_ONCE items on each other.
template <bool WIDE>
__device__ __forceinline__ void columns(const Data& d, float* out) {
    constexpr int V = VALUES<WIDE>, AT_ONCE = ITEMS<WIDE>, LANES = THREADS / TEAM;
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    const index_t columns = d.n0 * (d.n2 / V), blocks = (columns + LANES - 1) / LANES, items = d.n1;
    __shared__ float wholes[2][TEAM][V][LANES];  // by turns: the next tile need not wait for those that still read
    int turn = 0;
    for (index_t job = blockIdx.x; job < blocks; job += gridDim.x) {
        const bool own = job * LANES + lane < columns;
        const index_t column = min(job * LANES + lane, columns - 1);  // every thread takes part in what is joined
        count_t rest = column;
        const index_t i2 = rest % count_t(d.n2 / V) * V;
        rest /= count_t(d.n2 / V);
        const index_t i0 = rest;
        double carry[V];  // the joins of what lies ahead
#pragma unroll
        for (int e = 0; e < V; ++e) carry[e] = 0.0f;
        // Where a sum of a stretch overflows, which may be no prefix, a tile is summed anew, and all that follows, each
        // element divided by as many as a tile has.
        bool scaled = false;
        constexpr float ELEMENTS = 64.0f;
        for (index_t tile = 0; tile < items;) {
            const index_t begin = tile + member * AT_ONCE;
            float value[AT_ONCE][V], ahead[V];
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                // Loads need no branch then: what is joined behind the last item reaches none ahead of it.
                const index_t item = min(begin + t, items - 1);
                const index_t i1 = item;
                entry<WIDE>(d, i0, i1, i2, value[t]);
#pragma unroll
                for (int e = 0; e < V; ++e) value[t][e] *= scaled ? 1.0f / ELEMENTS : 1.0f;
            }
#pragma unroll
            for (int t = 1; t < AT_ONCE; ++t)
#pragma unroll
                for (int e = 0; e < V; ++e) value[t][e] = joined(value[t - 1][e], value[t][e]);
#pragma unroll
            for (int e = 0; e < V; ++e) wholes[turn][member][e][lane] = value[AT_ONCE - 1][e];
            bool overflows = false;
#pragma unroll
            for (int e = 0; e < V; ++e) overflows = overflows || !fits(value[AT_ONCE - 1][e]);
            if (__syncthreads_or(overflows) && !scaled) {
                scaled = true;
#pragma unroll
                for (int e = 0; e < V; ++e) carry[e] *= 1.0f / ELEMENTS;
                continue;
            }
#pragma unroll
            for (int e = 0; e < V; ++e) {
                float all = 0.0f, before = all;
#pragma unroll 8
                for (int m = 0; m < TEAM; ++m) {
                    if (m == member) before = all;
                    all = joined(all, wholes[turn][m][e][lane]);
                }
                ahead[e] = float(joined(carry[e], double(before)));
                carry[e] = joined(carry[e], double(all));
            }
            turn ^= 1;
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                float prefix[V];
#pragma unroll
                for (int e = 0; e < V; ++e) prefix[e] = joined(ahead[e], value[t][e]);
#pragma unroll
                for (int e = 0; e < V; ++e)
                    if (scaled) prefix[e] *= ELEMENTS;
                const index_t item = begin + t;
                if (!(item < items) || !own) continue;
                const index_t i1 = item;
                float results[V];
                result<WIDE>(d, i0, i1, i2, prefix, results);
                store<V>(out + (((i0) * d.n1 + i1) * d.n2 + i2), results);
            }
            tile += TEAM * AT_ONCE;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused_cumsum(const float* __restrict__ x, const float* __restrict__ p1, int n0, int n1, int n2,
    float* __restrict__ out) {
    await_launches();
    const Data d{x, p1, n0, n1, n2};
    if (n2 % VALUES<true> == 0 && aligned(x) && aligned(p1) && aligned(out))
        columns<true>(d, out);
    else
        columns<false>(d, out);
}
