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

constexpr int THREADS = 256, TEAM = 256;  // of a block, and of them per plane
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

constexpr int PLANE = 65536;
constexpr int PERIOD = 1, SEGMENTS = 5;
struct Segment { int begin, end; };  // in the same slots, up to the residue modulo PERIOD
__constant__ const Segment SEGMENT[SEGMENTS] = {{0, 1}, {1, 2}, {2, 254}, {254, 255}, {255, 256}};
constexpr int FIRST = 0, LAST = 256;  // elements of a row that are summed
// Rows that belong to the same slots: where row r of them is, in elements.
struct Rows {
    int offset, stride, count;
    __device__ __forceinline__ int at(int r) const { return offset + r * stride; }
};
constexpr int SETS = 5;
__constant__ const Rows ROWS[SETS] = {{0, 256, 1}, {256, 256, 1}, {512, 256, 252}, {65024, 256, 1}, {65280, 256, 1}};
__constant__ const unsigned long long SLOTS_OF[SEGMENTS * PERIOD] = {0x1, 0x3, 0x7, 0x6, 0x4};
constexpr int COLUMN_SLOTS = 3;
__constant__ const unsigned long long ROW_SLOTS_OF[SETS] = {0x1, 0x3, 0x7, 0x6, 0x4};

// The sum over LANES neighbouring threads, in the first of them.
__device__ __forceinline__ double joined(double sum) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    return sum;
}

constexpr int WIDTH = 256, HEIGHT = PLANE / WIDTH;  // elements of a row, and rows
constexpr int COUNT = 4;  // neighbouring columns of a thread
constexpr int BEGIN = FIRST / COUNT * COUNT, PACKS = (LAST - BEGIN + COUNT - 1) / COUNT;
constexpr int TURNS = (PACKS + THREADS - 1) / THREADS, ACROSS = (PACKS + TURNS - 1) / TURNS, DOWN = THREADS / ACROSS;
constexpr int PITCH = ACROSS * COUNT;  // columns of a turn
constexpr int COLUMN_CELLS = SEGMENTS * PERIOD, ROW_SLOTS = SLOTS / COLUMN_SLOTS;
constexpr int NONE = 255;  // the set of rows that are in no slot

// Adds this thread's rows of a plane to parked[set][down], COUNT columns of each: rows come as they lie in memory, so
// that as many loads are under way wherever sets begin and end.
__device__ __forceinline__ void park(const Element* plane, int turn, const unsigned char* set_of, double* parked) {
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const int first = BEGIN + (turn * ACROSS + across) * COUNT, stride = DOWN;
    if (down >= DOWN || first >= LAST) return;
    double* const own = parked + down * PITCH + across * COUNT;
#pragma unroll 1
    for (int r = down; r < HEIGHT; r += LOADS * stride) {
        Pack<COUNT> pack[LOADS];
        int set[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const int row = r + u * stride;
            set[u] = row < HEIGHT ? set_of[row] : NONE;
            const Element* const from = plane + row * WIDTH + first;
            if (set[u] != NONE) pack[u].word = __ldg(reinterpret_cast<const typename Pack<COUNT>::Word*>(from));
        }
        float few[COUNT] = {};  // a few additions in the type of the values, all others in float64
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            if (set[u] == NONE) continue;
            const bool more = u > 0 && set[u > 0 ? u - 1 : 0] == set[u];
#pragma unroll
            for (int e = 0; e < COUNT; ++e) few[e] = more ? few[e] + value(pack[u].at[e]) : value(pack[u].at[e]);
            if (u + 1 < LOADS && set[u + 1 < LOADS ? u + 1 : u] == set[u]) continue;
#pragma unroll
            for (int e = 0; e < COUNT; ++e) own[set[u] * (DOWN * PITCH) + e] += few[e];
        }
    }
}

// Adds up what is parked of one turn: first what the threads of a column have, then the columns of every cell.
__device__ __forceinline__ void collect(int turn, double* parked, double* cells) {
    for (int i = threadIdx.x; DOWN > 1 && i < SETS * PITCH; i += THREADS) {
        double* const own = parked + i / PITCH * (DOWN * PITCH) + i % PITCH;
        double sum = 0;
#pragma unroll
        for (int down = 0; down < DOWN; ++down) sum += own[down * PITCH];
        own[0] = sum;
    }
    __syncthreads();
    const int from = BEGIN + turn * PITCH, until = from + PITCH;
    const auto sum_of = [&](int cell, int lane, int lanes) {
        const Segment segment = SEGMENT[cell / PERIOD % SEGMENTS];
        const int begin = max(segment.begin, from), end = min(segment.end, until);
        const int first = begin + (cell % PERIOD + PERIOD - begin % PERIOD) % PERIOD;
        const double* const own = parked + cell / COLUMN_CELLS * (DOWN * PITCH) - from;
        double sum = 0;
#pragma unroll 4
        for (int column = first + lane * PERIOD; column < end; column += lanes * PERIOD) sum += own[column];
        return sum;
    };
    const auto is_wide = [&](int cell) {
        const Segment segment = SEGMENT[cell / PERIOD % SEGMENTS];
        return segment.end - segment.begin > 16 * PERIOD;
    };
    for (int cell = threadIdx.x; cell < CELLS; cell += THREADS)
        if (!is_wide(cell)) cells[cell] += sum_of(cell, 0, 1);
    for (int cell = threadIdx.x / 32; cell < CELLS; cell += THREADS / 32) {
        if (!is_wide(cell)) continue;
        const double sum = joined(sum_of(cell, threadIdx.x % 32, 32));
        if (threadIdx.x % 32 == 0) cells[cell] += sum;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_rangesum(const Element* __restrict__ x, double* __restrict__ out, index_t planes) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    double* const parked = reinterpret_cast<double*>(shared_memory);
    __shared__ double cells[CELLS], of_rows[ROW_SLOTS * COLUMN_CELLS];
    __shared__ unsigned char set_of[HEIGHT];
    for (int row = threadIdx.x; row < HEIGHT; row += THREADS) set_of[row] = NONE;
    for (int cell = threadIdx.x; cell < CELLS; cell += THREADS) cells[cell] = 0;
    __syncthreads();
    for (int k = 0; k < SETS; ++k)
        for (int r = threadIdx.x; r < ROWS[k].count; r += THREADS) set_of[ROWS[k].at(r) / WIDTH] = k;
    const index_t plane = blockIdx.x;
    for (int turn = 0; turn < TURNS; ++turn) {
        for (int i = threadIdx.x; i < SETS * DOWN * PITCH; i += THREADS) parked[i] = 0;
        __syncthreads();
        park(x + plane * PLANE, turn, set_of, parked);
        __syncthreads();
        collect(turn, parked, cells);
    }
    for (int i = threadIdx.x; i < ROW_SLOTS * COLUMN_CELLS; i += THREADS) {
        const int slot = i / COLUMN_CELLS, c = i % COLUMN_CELLS;
        double sum = 0;
#pragma unroll 4
        for (int k = 0; k < SETS; ++k) sum += ROW_SLOTS_OF[k] >> slot & 1 ? cells[k * COLUMN_CELLS + c] : 0.0;
        of_rows[i] = sum;
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < SLOTS; slot += THREADS) {
        double total = 0;
#pragma unroll 4
        for (int c = 0; c < COLUMN_CELLS; ++c)
            total += SLOTS_OF[c] >> slot % COLUMN_SLOTS & 1 ? of_rows[slot / COLUMN_SLOTS * COLUMN_CELLS + c] : 0.0;
        out[(plane) * SLOTS + slot] = total;
    }
}
