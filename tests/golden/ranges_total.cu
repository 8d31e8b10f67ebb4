// fused_rangesum: sums over planes of any length, every element read once.
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

using index_t = long long;
using Element = float;

constexpr int THREADS = 256, TEAM = 256;  // of a block, and of them per plane
constexpr int BLOCKS = 4, LOADS = 8;  // per multiprocessor at a time; under way per thread
constexpr int LANES = TEAM < 32 ? TEAM : 32, GROUPS = THREADS / LANES;  // threads that shuffles join
constexpr int CELLS = 1, SLOTS = 1;  // different sums per plane, and results made of them

// COUNT neighbours in memory: the word that one load brings, and its elements.
template <int BYTES> struct Bits;
template <> struct Bits<16> { using Type = uint4; };
template <> struct Bits<8> { using Type = uint2; };
template <> struct Bits<4> { using Type = unsigned; };
template <> struct Bits<2> { using Type = unsigned short; };
template <int COUNT>
union Pack {
    using Word = typename Bits<sizeof(Element) * COUNT>::Type;
    Word word;
    Element at[COUNT];
};

// An element, in the type it is added in.
__device__ __forceinline__ float value(Element element) {
    return widened(element);
}

// Adds LOADS packs (or the first `packs` of them, unless ALL) at from(0), from(1), ... to the columns.  All loads are
// under way before the first is used.
template <bool ALL, int COUNT, typename From>
__device__ __forceinline__ void add(From from, int packs, double (&column)[COUNT]) {
    Pack<COUNT> pack[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; ++u)
        if (ALL || u < packs) pack[u].word = __ldg(reinterpret_cast<const typename Pack<COUNT>::Word*>(from(u)));
    float few[COUNT] = {};  // a few additions in the type of the values, all others in float64
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
        if (!ALL && u >= packs) break;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) few[e] += value(pack[u].at[e]);
    }
#pragma unroll
    for (int e = 0; e < COUNT; ++e) column[e] += few[e];
}

// The sum over LANES neighbouring threads, in the first of them.
__device__ __forceinline__ double joined(double sum) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    return sum;
}

// Adds this thread's share of the elements [first, last) of a plane to `sum`.
__device__ __forceinline__ void take(const Element* plane, index_t first, index_t last, int lane, double& sum) {
    constexpr int COUNT = 16 / sizeof(Element);
    // Packs are aligned in memory; the plane begins `skew` elements into one.
    const int skew = reinterpret_cast<size_t>(plane) % 16 / sizeof(Element);
    const index_t begin = (first + skew + COUNT - 1) / COUNT, end = max(begin, (last + skew) / COUNT);
    const index_t from = begin, until = end;
    double column[COUNT] = {};
    index_t p = from + lane;
    const auto at = [&](int u) { return plane - skew + (p + u * TEAM) * COUNT; };
#pragma unroll 1
    for (; p + (LOADS - 1) * TEAM < until; p += LOADS * TEAM) add<true>(at, LOADS, column);
    if (p < until) add<false>(at, int(until - p + TEAM - 1) / TEAM, column);
#pragma unroll
    for (int e = 0; e < COUNT; ++e) sum += column[e];
    const index_t head = min(begin * COUNT - skew, last), tail = end * COUNT - skew;
    for (index_t i = first + lane; i < head; i += TEAM) {
        sum += value(plane[i]);
    }
    for (index_t i = tail + lane; i < last; i += TEAM) {
        sum += value(plane[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_rangesum(const Element* __restrict__ x, double* __restrict__ out, index_t planes, index_t length) {
    await_launches();
    __shared__ double cells[GROUPS][CELLS];
    const index_t plane = min(index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM, planes - 1);
    double sum = 0;
    take(x + plane * length, 0, length, threadIdx.x % TEAM, sum);
    sum = joined(sum);
    if (threadIdx.x % LANES == 0) cells[threadIdx.x / LANES][0] = sum;
    __syncthreads();
    const index_t first = index_t(blockIdx.x) * (THREADS / TEAM);
    for (int team = threadIdx.x; team < THREADS / TEAM && first + team < planes; team += THREADS) {
        constexpr int slot = 0;
        double total = 0;
        for (int group = 0; group < TEAM / LANES; ++group) total += cells[team * (TEAM / LANES) + group][0];
        out[(first + team) * SLOTS + slot] = total;
    }
}
