// fused_rangesum: 3 x 3 sums over index ranges of the last axes, every element read once.
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

constexpr int THREADS = 256, TEAM = 16;  // of a block, and of them per plane
constexpr int BLOCKS = 3, LOADS = 8;  // per multiprocessor at a time; under way per thread
constexpr int LANES = TEAM < 32 ? TEAM : 32, GROUPS = THREADS / LANES;  // threads that shuffles join
constexpr int CELLS = 25, SLOTS = 9;  // different sums per plane, and results made of them

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

constexpr int PLANE = 320;
constexpr int PERIOD = 1, SEGMENTS = 5;
struct Segment { int begin, end; };  // in the same slots, up to the residue modulo PERIOD
__constant__ const Segment SEGMENT[SEGMENTS] = {{0, 1}, {1, 2}, {2, 18}, {18, 19}, {19, 20}};
constexpr int FIRST = 0, LAST = 20;  // elements of a row that are summed
// Rows that belong to the same slots: where row r of them is, in elements.
struct Rows {
    int offset, stride, count;
    __device__ __forceinline__ int at(int r) const { return offset + r * stride; }
};
constexpr int SETS = 5;
__constant__ const Rows ROWS[SETS] = {{0, 20, 1}, {20, 20, 1}, {40, 20, 12}, {280, 20, 1}, {300, 20, 1}};
__constant__ const unsigned long long SLOTS_OF[SEGMENTS * PERIOD] = {0x1, 0x3, 0x7, 0x6, 0x4};
constexpr int COLUMN_SLOTS = 3;
__constant__ const unsigned long long ROW_SLOTS_OF[SETS] = {0x1, 0x3, 0x7, 0x6, 0x4};
__device__ __forceinline__ bool belongs(int cell, int slot) {
    const bool row = ROW_SLOTS_OF[cell / (SEGMENTS * PERIOD)] >> slot / COLUMN_SLOTS & 1;
    return row && (SLOTS_OF[cell % (SEGMENTS * PERIOD)] >> slot % COLUMN_SLOTS & 1);
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

__device__ __forceinline__ int cell_of(int column) {
    for (int k = 0; k < SEGMENTS; ++k)
        if (column >= SEGMENT[k].begin && column < SEGMENT[k].end) return k * PERIOD + column % PERIOD;
    return -1;
}

// Adds this thread's share of a plane to the cells of its group: COUNT neighbouring columns of every DOWN-th row.
template <int COUNT>
__device__ __forceinline__ void sum_plane(const Element* plane, int lane, double* cells) {
    constexpr int BEGIN = FIRST / COUNT * COUNT, PACKS = (LAST - BEGIN + COUNT - 1) / COUNT;
    constexpr int TURNS = (PACKS + TEAM - 1) / TEAM, ACROSS = (PACKS + TURNS - 1) / TURNS, DOWN = TEAM / ACROSS;
    const int across = lane % ACROSS, down = lane / ACROSS;
    for (int turn = 0; turn < TURNS; ++turn) {
        const int first = BEGIN + (turn * ACROSS + across) * COUNT;
        const bool working = down < DOWN && first < LAST;
        const Element* const from = plane + first;
        int cell[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) cell[e] = cell_of(first + e);
        for (int k = 0; k < SETS; ++k) {
            const Rows rows = ROWS[k];
            const int count = working ? rows.count : 0, stride = DOWN;
            double column[COUNT] = {};
            int r = down;
            const auto at = [&](int u) { return from + rows.at(r + u * stride); };
#pragma unroll 1
            for (; r + (LOADS - 1) * stride < count; r += LOADS * stride) add<true>(at, LOADS, column);
            if (r < count) add<false>(at, (count - r + stride - 1) / stride, column);
            for (int c = 0; c < SEGMENTS * PERIOD; ++c) {
                double sum = 0;
#pragma unroll
                for (int e = 0; e < COUNT; ++e)
                    if (cell[e] == c) sum += column[e];
                sum = joined(sum);
                if (threadIdx.x % LANES == 0) cells[k * SEGMENTS * PERIOD + c] += sum;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_rangesum(const Element* __restrict__ x, double* __restrict__ out, index_t planes) {
    await_launches();
    __shared__ double cells[GROUPS][CELLS];
    double* const own = cells[threadIdx.x / LANES];
    if (threadIdx.x % LANES == 0)
        for (int cell = 0; cell < CELLS; ++cell) own[cell] = 0;
    const index_t plane = min(index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM, planes - 1);
    const int lane = threadIdx.x % TEAM;
    sum_plane<4>(x + plane * PLANE, lane, own);
    __syncthreads();
    const index_t first = index_t(blockIdx.x) * (THREADS / TEAM);
    for (int i = threadIdx.x; i < THREADS / TEAM * SLOTS; i += THREADS) {
        const int team = i / SLOTS, slot = i % SLOTS;
        if (first + team >= planes) break;
        double total = 0;
        for (int cell = 0; cell < CELLS; ++cell)
            if (belongs(cell, slot))
                for (int group = 0; group < TEAM / LANES; ++group) total += cells[team * (TEAM / LANES) + group][cell];
        out[(first + team) * SLOTS + slot] = total;
    }
}
