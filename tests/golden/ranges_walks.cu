// fused_rangesum: 120 x 40 x 35 sums over index ranges of the last axes, the outermost one last.
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
using Sum = float;  // what is kept of an axis

constexpr int THREADS = 480, BLOCKS = 2;  // of a block; per multiprocessor
constexpr int D = 48, H = 33, W = 37;
constexpr int SLICE = H * W, PLANE = D * H * W;  // in memory
constexpr int SLOTS_D = 120, SLOTS_H = 40, SLOTS_W = 35;
constexpr int COLUMNS = SLOTS_H * SLOTS_W, RESULTS = SLOTS_D * COLUMNS;  // of a plane
constexpr int EACH = 3, LOADS = 11;  // columns of a thread, and its elements of a step

// Groups of slots along d: each begins DISTANCE slices behind the last one, and reads READ.
constexpr int GROUPS = 12, GROUP_D = 10;
constexpr int FIRST = -2, DISTANCE = 4, READ = 8;
constexpr int FRESH = 4, BEFORE = 1;  // slices of a step; steps ahead of a result

constexpr int ABOVE = 2, ROWS_H = 36;  // rows of a slice with zeros around
constexpr int GROUPS_W = 3, GROUP_W = 15;  // of a row, and slots of each
constexpr int ROWS = FRESH * H, PITCH = 37, OUT_PITCH = 35;  // of the last axis
constexpr int STEP = FRESH * SLICE, COPIED = ROWS * PITCH, READ_W = W;  // elements of a step

// An element, in the type it is added in.
__device__ __forceinline__ float value(Element element) {
    return widened(element);
}

constexpr int STEP_H = 1;
struct Window { int begin, count; };  // rows of a slot along h, which are STEP_H apart, some of them beyond an end
__device__ const Window WINDOW_H[SLOTS_H] = {
    {-2, 4}, {-1, 4}, {0, 4}, {1, 4}, {2, 4}, {2, 4}, {3, 4}, {4, 4}, {5, 4}, {6, 4}, {6, 4}, {7, 4},
    {8, 4}, {9, 4}, {10, 4}, {10, 4}, {11, 4}, {12, 4}, {13, 4}, {14, 4}, {14, 4}, {15, 4}, {16, 4},
    {17, 4}, {18, 4}, {18, 4}, {19, 4}, {20, 4}, {21, 4}, {22, 4}, {22, 4}, {23, 4}, {24, 4}, {25, 4},
    {26, 4}, {26, 4}, {27, 4}, {28, 4}, {29, 4}, {30, 4}
};

// The sum of at(0), at(1), ..., `count` of them and at most MOST, in their own type: loads first, and no branches.
template <int MOST, typename At>
__device__ __forceinline__ auto few_of(At at, int count) {
    decltype(at(0)) sum = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i < count) sum += at(i);
    return sum;
}

// The slot of a column along the inner axes.
__device__ __forceinline__ int slot_of(int column) {
    return column / 280 * 35 + column / 56 % 5 + column / 7 % 8 * 175 + column % 7 * 5;
}

// Where the results of a column begin.
__device__ __forceinline__ int place_of(int column) {
    return column / 56 * 1344 + column % 56;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_rangesum(const Element* __restrict__ x, float* __restrict__ out, index_t planes) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Sum* const copied = reinterpret_cast<Sum*>(shared_memory);
    Sum* const summed = copied + COPIED;
    const index_t plane = blockIdx.x;
    constexpr int first_group = 0, steps = GROUPS + BEFORE;
    const Element* const from_plane = x + plane * PLANE;
    float* const to_plane = out + plane * RESULTS;

    // Where a thread's columns begin in a slice, where their results go, and what of them it still needs.
    int from[EACH], place[EACH];
    Sum seen[EACH][READ - FRESH];
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
        const int column = min(int(threadIdx.x) + c * THREADS, COLUMNS - 1);
        const int slot = slot_of(column);
        const Window rows = WINDOW_H[slot / SLOTS_W];
        from[c] = (rows.begin + ABOVE) * OUT_PITCH + slot % SLOTS_W;
        place[c] = place_of(column);
    }
#pragma unroll
    for (int c = 0; c < EACH; ++c)
#pragma unroll
        for (int k = 0; k < READ - FRESH; ++k) seen[c][k] = 0;
    // Rows beyond the ends are zeros.
    for (int i = threadIdx.x; i < FRESH * ROWS_H * OUT_PITCH; i += THREADS) {
        const int row = i / OUT_PITCH % ROWS_H;
        if (row < ABOVE || row >= ABOVE + H) summed[i] = 0;
    }

    // A step's elements lie side by side; those of the next step are on their way.
    Element next[LOADS];
    const auto fetch = [&](int begin) {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const int i = threadIdx.x + n * THREADS;
            if ((n + 1) * THREADS <= STEP || i < STEP) next[n] = unsigned(begin + i) < unsigned(PLANE) ? from_plane[begin + i] : Element();
        }
    };
    fetch((first_group * DISTANCE + FIRST) * SLICE);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int begin = ((first_group + step) * DISTANCE + FIRST) * SLICE;
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const int i = threadIdx.x + n * THREADS;
            if ((n + 1) * THREADS <= STEP || i < STEP) copied[i] = value(next[n]);
        }
        __syncthreads();
        if (step + 1 < steps) fetch(begin + DISTANCE * SLICE);

        // Sums along w, rows side by side.
        {
            constexpr int LANES = 132, SETS = THREADS / LANES;  // threads side by side, and such sets of them
            if (threadIdx.x < SETS * LANES)
#pragma unroll 1
                for (int row = threadIdx.x % LANES; row < ROWS; row += LANES) {
#pragma unroll 1
                    for (int group = threadIdx.x / LANES; group < GROUPS_W; group += SETS) {
                        constexpr int KEPT = 19;
                        constexpr int BEGIN[KEPT] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18};
                        constexpr unsigned long long KEPT_OF[GROUP_W] = {
                            0x1f, 0x3e, 0x7c, 0xf8, 0x1f0, 0x3e0, 0x7c0, 0xf80, 0x1f00, 0x3e00, 0x7c00, 0xf800, 0x1f000,
                            0x3e000, 0x7c000
                        };
                        const int begin = group * 15 - 1;
                        const Sum* const from = copied + row * PITCH;
                        const auto at = [&](int index) { return from[begin + index]; };
                        Sum* const to = summed + (row / H * ROWS_H + row % H + ABOVE) * OUT_PITCH + group * GROUP_W;
                        if (group == 0) {
                            constexpr int KEPT = 18;
                            constexpr int BEGIN[KEPT] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18};
                            constexpr unsigned long long KEPT_OF[15] = {
                                0xf, 0x1e, 0x3c, 0x78, 0xf0, 0x1f0, 0x3e0, 0x7c0, 0xf80, 0x1f00, 0x3e00, 0x7c00, 0xf800, 0x1f000,
                                0x3e000
                            };
                            Sum kept[KEPT];
#pragma unroll
                            for (int k = 0; k < KEPT; ++k)
                                kept[k] = at(BEGIN[k]);
#pragma unroll
                            for (int s = 0; s < 15; ++s) {
                                Sum sum = 0;
#pragma unroll
                                for (int k = 0; k < KEPT; ++k)
                                    if (KEPT_OF[s] >> k & 1) sum += kept[k];
                                to[s] = sum;
                            }
                            continue;
                        }
                        if (group == 2) {
                            constexpr int KEPT = 8;
                            constexpr int BEGIN[KEPT] = {0, 1, 2, 3, 4, 5, 6, 7};
                            constexpr unsigned long long KEPT_OF[5] = {0xf, 0x1e, 0x3c, 0x78, 0xf0};
                            Sum kept[KEPT];
#pragma unroll
                            for (int k = 0; k < KEPT; ++k)
                                kept[k] = at(BEGIN[k]);
#pragma unroll
                            for (int s = 0; s < 5; ++s) {
                                Sum sum = 0;
#pragma unroll
                                for (int k = 0; k < KEPT; ++k)
                                    if (KEPT_OF[s] >> k & 1) sum += kept[k];
                                to[s] = sum;
                            }
                            continue;
                        }
                        Sum kept[KEPT];
#pragma unroll
                        for (int k = 0; k < KEPT; ++k)
                            kept[k] = at(BEGIN[k]);
#pragma unroll
                        for (int s = 0; s < GROUP_W; ++s) {
                            Sum sum = 0;
#pragma unroll
                            for (int k = 0; k < KEPT; ++k)
                                if (KEPT_OF[s] >> k & 1) sum += kept[k];
                            to[s] = sum;
                        }
                    }
                }
        }
        __syncthreads();

        // A thread's columns: sums along d of what they have of several slices.
        const int group = first_group + step - BEFORE;
#pragma unroll
        for (int c = 0; c < EACH; ++c) {
            Sum window[READ];
#pragma unroll
            for (int k = 0; k < READ - FRESH; ++k) window[k] = seen[c][k];
#pragma unroll
            for (int f = 0; f < FRESH; ++f) {
                const Sum* const row = summed + f * (ROWS_H * OUT_PITCH) + from[c];
                window[READ - FRESH + f] = few_of<4>([&](int j) { return row[j * (STEP_H * OUT_PITCH)]; }, 4);
            }
#pragma unroll
            for (int k = 0; k < READ - FRESH; ++k) seen[c][k] = window[k + FRESH];
            if (step < BEFORE || (c == EACH - 1 && threadIdx.x + c * THREADS >= COLUMNS)) continue;
            constexpr int KEPT = 8;
            constexpr int BEGIN[KEPT] = {0, 1, 2, 3, 4, 5, 6, 7};
            constexpr unsigned long long KEPT_OF[GROUP_D] = {0x3, 0x6, 0xc, 0x18, 0x30, 0xc, 0x18, 0x30, 0x60, 0xc0};
            constexpr int PLACE[GROUP_D] = {0, 33600, 67200, 100800, 134400, 56, 33656, 67256, 100856, 134456};
            const auto at = [&](int index) { return window[index]; };
            float* const to = to_plane + group * 112 + place[c];
            if (group == 0) {
                constexpr int KEPT = 6;
                constexpr int BEGIN[KEPT] = {2, 3, 4, 5, 6, 7};
                constexpr unsigned long long KEPT_OF[10] = {0x0, 0x1, 0x2, 0x4, 0x8, 0x3, 0x6, 0xc, 0x18, 0x30};
                Sum kept[KEPT];
#pragma unroll
                for (int k = 0; k < KEPT; ++k)
                    kept[k] = at(BEGIN[k]);
#pragma unroll
                for (int s = 0; s < 10; ++s) {
                    Sum sum = 0;
#pragma unroll
                    for (int k = 0; k < KEPT; ++k)
                        if (KEPT_OF[s] >> k & 1) sum += kept[k];
                    const Sum total = sum;
                    to[PLACE[s]] = total * Sum(0.025);
                }
                continue;
            }
            if (group == 11) {
                constexpr int KEPT = 6;
                constexpr int BEGIN[KEPT] = {0, 1, 2, 3, 4, 5};
                constexpr unsigned long long KEPT_OF[10] = {0x3, 0x6, 0xc, 0x18, 0x30, 0x4, 0x8, 0x10, 0x20, 0x0};
                Sum kept[KEPT];
#pragma unroll
                for (int k = 0; k < KEPT; ++k)
                    kept[k] = at(BEGIN[k]);
#pragma unroll
                for (int s = 0; s < 10; ++s) {
                    Sum sum = 0;
#pragma unroll
                    for (int k = 0; k < KEPT; ++k)
                        if (KEPT_OF[s] >> k & 1) sum += kept[k];
                    const Sum total = sum;
                    to[PLACE[s]] = total * Sum(0.025);
                }
                continue;
            }
            Sum kept[KEPT];
#pragma unroll
            for (int k = 0; k < KEPT; ++k)
                kept[k] = at(BEGIN[k]);
#pragma unroll
            for (int s = 0; s < GROUP_D; ++s) {
                Sum sum = 0;
#pragma unroll
                for (int k = 0; k < KEPT; ++k)
                    if (KEPT_OF[s] >> k & 1) sum += kept[k];
                const Sum total = sum;
                to[PLACE[s]] = total * Sum(0.025);
            }
        }
    }
}
