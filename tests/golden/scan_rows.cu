// fused_cumsum: prefixes (sum), axes i0 over dimension 0, i1 over dimension 1.

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
constexpr int THREADS = 512, TEAM = 512;  // of a block, and per row
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
    index_t n0, n1;  // lengths of the axes
};

template <typename T>
__device__ __forceinline__ T joined(T a, T b) {
    return a + b;
}

// Whether a sum of a stretch is within float32's range; a NaN is in none.
__device__ __forceinline__ bool fits(float sum) { return fabs(sum) <= 3.4028234663852886e+38f; }

// Prefixes of one value of each of WIDTH neighbouring threads: `ahead` of this one, and of all of them.
template <int WIDTH, typename T>
__device__ __forceinline__ T across(T value, T& ahead) {
    const int lane = threadIdx.x % WIDTH;
#pragma unroll
    for (int offset = 1; offset < WIDTH; offset *= 2) {
        const T before = __shfl_up_sync(~0u, value, offset, WIDTH);
        if (lane >= offset) value = joined(before, value);
    }
    const T before = __shfl_up_sync(~0u, value, 1, WIDTH);  // nothing is taken away: of infinities it would be NaN
    ahead = lane > 0 ? before : T(0.0f);
    return __shfl_sync(~0u, value, WIDTH - 1, WIDTH);
}

// Neighbours along the last axis, from these coordinates on.
template <bool WIDE>
__device__ __forceinline__
void entry(const Data& d, index_t i0, index_t i1, float (&value)[VALUES<WIDE>]) {
    const auto xs = load<VALUES<WIDE>>(d.x + (i0 * d.n1 + i1));
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        const float x = widened(xs.at[e]);
        value[e] = x;
    }
}

// What comes of prefixes.
template <bool WIDE>
__device__ __forceinline__
void result(const Data& d, index_t i0, index_t i1, const float (&prefix)[VALUES<WIDE>], float (&value)[VALUES<WIDE>]) {
#pragma unroll
    for (int e = 0; e < VALUES<WIDE>; ++e) {
        const float v1 = prefix[e] < float(0.0) ? float(0.0) : prefix[e];
        value[e] = v1;
    }
}

// A team of threads per row, which walks along it: read once.  Of every tile a thread has GROUPS items, TEAM apart.
template <bool WIDE>
__device__ __forceinline__ void rows(const Data& d, float* out) {
    constexpr int V = VALUES<WIDE>, GROUPS = ITEMS<WIDE>, WIDTH = TEAM < 32 ? TEAM : 32;
    const index_t team = index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    const index_t rows = d.n0, items = (d.n1 / V);
    const index_t row = min(team, rows - 1);  // every thread takes part in what is joined
    const int lane = threadIdx.x % TEAM;
    const index_t i0 = row;
    double carry = 0.0f;  // the join of what lies ahead
    // Where a sum of a stretch overflows, which may be no prefix, a tile is summed anew, and all that follows, each
    // element divided by as many as a tile has.
    bool scaled = false;
    constexpr float ELEMENTS = 8192.0f;
    __shared__ double wholes[2][GROUPS][TEAM / 32];
    int turn = 0;
    for (index_t tile = 0; tile < items;) {
        float value[GROUPS][V], ahead[GROUPS], whole[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            // Loads need no branch then: what is joined behind the last item reaches none ahead of it.
            const index_t item = min(tile + lane + g * TEAM, items - 1);
            const index_t i1 = item * V;
            entry<WIDE>(d, i0, i1, value[g]);
#pragma unroll
            for (int e = 0; e < V; ++e) value[g][e] *= scaled ? 1.0f / ELEMENTS : 1.0f;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
            for (int e = 1; e < V; ++e) value[g][e] = joined(value[g][e - 1], value[g][e]);
            whole[g] = across<WIDTH>(value[g][V - 1], ahead[g]);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            if (lane % 32 == 0) wholes[turn][g][lane / 32] = whole[g];
        bool overflows = false;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) overflows = overflows || !fits(ahead[g]) || !fits(whole[g]);
        if (__syncthreads_or(overflows) && !scaled) {
            scaled = true;
            carry *= 1.0f / ELEMENTS;
            continue;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            double start = 0.0f;
#pragma unroll
            for (int warp = 0; warp < TEAM / 32; ++warp) {
                if (warp == lane / 32) start = carry;
                carry = joined(carry, wholes[turn][g][warp]);
            }
            ahead[g] = float(joined(start, double(ahead[g])));
#pragma unroll
            for (int e = 0; e < V; ++e) value[g][e] = joined(ahead[g], value[g][e]);
#pragma unroll
            for (int e = 0; e < V; ++e)
                if (scaled) value[g][e] *= ELEMENTS;
            const index_t item = tile + lane + g * TEAM;
            if (item < items && team < rows) {
                const index_t i1 = item * V;
                float results[V];
                result<WIDE>(d, i0, i1, value[g], results);
                store<V>(out + row * d.n1 + item * V, results);
            }
        }
        turn ^= 1;
        tile += TEAM * GROUPS;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
fused_cumsum(const float* __restrict__ x, int n0, int n1, float* __restrict__ out) {
    await_launches();
    const Data d{x, n0, n1};
    if (n1 % VALUES<true> == 0 && aligned(x))
        rows<true>(d, out);
    else
        rows<false>(d, out);
}
