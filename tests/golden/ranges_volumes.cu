// fused_rangesum: 12 x 21 x 3 sums over index ranges of the last axes, one axis after the other.
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

constexpr int THREADS = 512, BLOCKS = 2;  // of a block; per multiprocessor
constexpr int PLANES = 2;  // of a block
constexpr int D = 31, H = 30, W = 23, PLANE = D * H * W;  // in memory
constexpr int SLOTS_D = 12, SLOTS_H = 21, SLOTS_W = 3;
constexpr int RESULTS = SLOTS_D * SLOTS_H * SLOTS_W;  // of a plane
constexpr int READ_H = 30, READ_W = 21;  // indices of a block
constexpr int COLUMNS = READ_H * READ_W;  // of the outermost axis
constexpr int GROUPS_H = 7, GROUP_H = 3;  // of a block's slots, and slots of each
constexpr int ROWS = PLANES * SLOTS_D * SLOTS_H, PITCH = 21, OUT_PITCH = 3;  // of the last axis
constexpr int EVEN = 15120;  // sums in the first half of shared memory

// An element, in the type it is added in.
__device__ __forceinline__ float value(Element element) {
    return widened(element);
}

struct Slot { int begin, count; };  // neighbouring indices
__constant__ const Slot SLOT_W[SLOTS_W] = {{0, 7}, {7, 7}, {14, 7}};

// The sum of at(0), at(1), ..., `count` of them and at most MOST, in their own type: loads first, and no branches.
template <int MOST, typename At>
__device__ __forceinline__ auto few_of(At at, int count) {
    decltype(at(0)) sum = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i < count) sum += at(i);
    return sum;
}

// The slot whose result lies at a place among those of its plane.
__device__ __forceinline__ int slot_at(int place) {
    return place / 252 * 63 + place / 63 % 4 * 189 + place % 63;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_rangesum(const Element* __restrict__ x, float* __restrict__ out, index_t planes) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Sum* const even = reinterpret_cast<Sum*>(shared_memory);
    Sum* const odd = even + EVEN;
    const index_t first = index_t(blockIdx.x) * PLANES;

    // Sums along d: what slots share is read and added once.
    {
        constexpr int LANES = 315, SETS = THREADS / LANES;  // threads side by side, and such sets of them
        if (threadIdx.x < SETS * LANES)
#pragma unroll 1
            for (int column = threadIdx.x % LANES; column < COLUMNS; column += LANES) {
#pragma unroll 1
                for (int one = threadIdx.x / LANES; one < PLANES; one += SETS) {
                    constexpr int KEPT = 14;
                    constexpr int BEGIN[KEPT] = {0, 1, 2, 7, 8, 9, 14, 15, 16, 21, 22, 23, 28, 29};
                    constexpr int COUNT[KEPT] = {1, 1, 5, 1, 1, 5, 1, 1, 5, 1, 1, 5, 1, 1};
                    constexpr unsigned long long KEPT_OF[SLOTS_D] = {
                        0x7, 0xe, 0x1c, 0x38, 0x70, 0xe0, 0x1c0, 0x380, 0x700, 0xe00, 0x1c00, 0x3800
                    };
                    const Element* const from = x + min(first + one, planes - 1) * PLANE + column / READ_W * W + column % READ_W;
                    const auto at = [&](int index) { return value(from[index * (H * W)]); };
                    Sum* const to = even + one * SLOTS_D * COLUMNS + column;
                    Sum kept[KEPT];
#pragma unroll
                    for (int k = 0; k < KEPT; ++k)
                        kept[k] = few_of<5>([&](int j) { return at(BEGIN[k] + j); }, COUNT[k]);
#pragma unroll
                    for (int s = 0; s < SLOTS_D; ++s) {
                        Sum sum = 0;
#pragma unroll
                        for (int k = 0; k < KEPT; ++k)
                            if (KEPT_OF[s] >> k & 1) sum += kept[k];
                        to[s * COLUMNS] = sum;
                    }
                }
            }
    }
    __syncthreads();

    // Sums along h, columns side by side.
    {
        constexpr int LANES = 147, SETS = THREADS / LANES;  // threads side by side, and such sets of them
        if (threadIdx.x < SETS * LANES)
#pragma unroll 1
            for (int i = threadIdx.x % LANES; i < GROUPS_H * READ_W; i += LANES) {
#pragma unroll 1
                for (int before = threadIdx.x / LANES; before < PLANES * SLOTS_D; before += SETS) {
                    constexpr int KEPT = 5;
                    constexpr int BEGIN[KEPT] = {0, 1, 2, 4, 5};
                    constexpr int COUNT[KEPT] = {1, 1, 2, 1, 1};
                    constexpr unsigned long long KEPT_OF[GROUP_H] = {0x7, 0xe, 0x1c};
                    const int w = i % READ_W, group = i / READ_W;
                    const int begin = group * 4;
                    const Sum* const from = even + before * COLUMNS + w;
                    const auto at = [&](int index) { return from[(begin + index) * READ_W]; };
                    Sum* const to = odd + (before * SLOTS_H + group * GROUP_H) * PITCH + w;
                    Sum kept[KEPT];
#pragma unroll
                    for (int k = 0; k < KEPT; ++k)
                        kept[k] = few_of<2>([&](int j) { return at(BEGIN[k] + j); }, COUNT[k]);
#pragma unroll
                    for (int s = 0; s < GROUP_H; ++s) {
                        Sum sum = 0;
#pragma unroll
                        for (int k = 0; k < KEPT; ++k)
                            if (KEPT_OF[s] >> k & 1) sum += kept[k];
                        to[s * PITCH] = sum;
                    }
                }
            }
    }
    __syncthreads();

    // Sums along w, rows side by side.
    {
        constexpr int LANES = 504, SETS = THREADS / LANES;  // threads side by side, and such sets of them
        if (threadIdx.x < SETS * LANES)
#pragma unroll 1
            for (int row = threadIdx.x % LANES; row < ROWS; row += LANES) {
#pragma unroll 3
                for (int s = threadIdx.x / LANES; s < SLOTS_W; s += SETS) {
                    const Slot slot = SLOT_W[s];
                    const Sum* const from = odd + row * PITCH + slot.begin;
                    even[row * OUT_PITCH + s] = few_of<7>([&](int j) { return from[j]; }, slot.count);
                }
            }
    }
    __syncthreads();

    // Results lie side by side, in another order than their slots.
    const int count = int(min(index_t(PLANES), planes - first)) * RESULTS;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int place = i % RESULTS, slot = i - place + slot_at(place);
        const Sum total = even[slot / SLOTS_W * OUT_PITCH + slot % SLOTS_W];
        out[first * RESULTS + i] = total * Sum(0.00510204081632653);
    }
}
