// fused_rangesum: 93 x 93 sums over index ranges of the last axes, one axis after the other.
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
constexpr int PLANES = 1;  // of a block
constexpr int H = 512, W = 512, PLANE = H * W;  // in memory
constexpr int SLOTS_H = 93, SLOTS_W = 93;
constexpr int RESULTS = SLOTS_H * SLOTS_W;  // of a plane
constexpr int PARTS_H = 16, PART_H = 6;  // slots of a block
constexpr int READ_W = 498;  // indices of a block
constexpr int COLUMNS = READ_W;  // of the outermost axis
constexpr int GROUPS_H = 1, GROUP_H = 6;  // of a block's slots, and slots of each
constexpr int ROWS = PLANES * PART_H, PITCH = 499, OUT_PITCH = 93;  // of the last axis
constexpr int EVEN = 2994;  // sums in the first half of shared memory

// An element, in the type it is added in.
__device__ __forceinline__ float value(Element element) {
    return widened(element);
}

struct Slot { int begin, count; };  // neighbouring indices
__device__ const Slot SLOT_W[SLOTS_W] = {
    {0, 16}, {1, 16}, {2, 16}, {16, 16}, {17, 16}, {18, 16}, {32, 16}, {33, 16}, {34, 16}, {48, 16},
    {49, 16}, {50, 16}, {64, 16}, {65, 16}, {66, 16}, {80, 16}, {81, 16}, {82, 16}, {96, 16}, {97, 16},
    {98, 16}, {112, 16}, {113, 16}, {114, 16}, {128, 16}, {129, 16}, {130, 16}, {144, 16}, {145, 16},
    {146, 16}, {160, 16}, {161, 16}, {162, 16}, {176, 16}, {177, 16}, {178, 16}, {192, 16}, {193, 16},
    {194, 16}, {208, 16}, {209, 16}, {210, 16}, {224, 16}, {225, 16}, {226, 16}, {240, 16}, {241, 16},
    {242, 16}, {256, 16}, {257, 16}, {258, 16}, {272, 16}, {273, 16}, {274, 16}, {288, 16}, {289, 16},
    {290, 16}, {304, 16}, {305, 16}, {306, 16}, {320, 16}, {321, 16}, {322, 16}, {336, 16}, {337, 16},
    {338, 16}, {352, 16}, {353, 16}, {354, 16}, {368, 16}, {369, 16}, {370, 16}, {384, 16}, {385, 16},
    {386, 16}, {400, 16}, {401, 16}, {402, 16}, {416, 16}, {417, 16}, {418, 16}, {432, 16}, {433, 16},
    {434, 16}, {448, 16}, {449, 16}, {450, 16}, {464, 16}, {465, 16}, {466, 16}, {480, 16}, {481, 16},
    {482, 16}
};

constexpr int FEW = 8;  // additions in a row in the type of the values

// The sum of at(0), at(1), ..., `count` of them and at most MOST, in their own type: loads first, and no branches.
template <int MOST, typename At>
__device__ __forceinline__ auto few_of(At at, int count) {
    decltype(at(0)) sum = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i < count) sum += at(i);
    return sum;
}

// The same for any number: a few additions in their own type, all others in float64.
template <typename At>
__device__ __forceinline__ double sum_of(At at, int count) {
    double sum = 0;
    for (int i = 0; i < count; i += FEW)
        sum += few_of<FEW>([&](int j) { return at(i + j); }, min(FEW, count - i));
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_rangesum(const Element* __restrict__ x, float* __restrict__ out, index_t planes) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Sum* const even = reinterpret_cast<Sum*>(shared_memory);
    Sum* const odd = even + EVEN;
    const index_t first = index_t(blockIdx.x / PARTS_H) * PLANES;
    const int part_h = blockIdx.x % PARTS_H;
    const int first_h = part_h * PART_H;

    // Sums along h: what slots share is read and added once.
    {
        constexpr int LANES = 498, SETS = THREADS / LANES;  // threads side by side, and such sets of them
        if (threadIdx.x < SETS * LANES)
#pragma unroll 1
            for (int column = threadIdx.x % LANES; column < COLUMNS; column += LANES) {
#pragma unroll 1
                for (int group = threadIdx.x / LANES; group < GROUPS_H; group += SETS) {
                    constexpr int KEPT = 8;
                    constexpr int BEGIN[KEPT] = {0, 1, 2, 16, 17, 18, 32, 33};
                    constexpr int COUNT[KEPT] = {1, 1, 14, 1, 1, 14, 1, 1};
                    constexpr unsigned long long KEPT_OF[GROUP_H] = {0x7, 0xe, 0x1c, 0x38, 0x70, 0xe0};
                    const int begin = (part_h * GROUPS_H + group) * 32;
                    const Element* const from = x + first * PLANE + column;
                    const auto at = [&](int index) {
                        const bool within = begin + index >= 0 && begin + index < H;
                        return within ? value(from[(begin + index) * W]) : float(0);
                    };
                    Sum* const to = even + group * GROUP_H * PITCH + column;
                    Sum kept[KEPT];
#pragma unroll
                    for (int k = 0; k < KEPT; ++k)
                        kept[k] = Sum(sum_of([&](int j) { return at(BEGIN[k] + j); }, COUNT[k]));
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
        constexpr int LANES = 6, SETS = THREADS / LANES;  // threads side by side, and such sets of them
        if (threadIdx.x < SETS * LANES)
#pragma unroll 2
            for (int row = threadIdx.x % LANES; row < ROWS; row += LANES) {
#pragma unroll 2
                for (int s = threadIdx.x / LANES; s < SLOTS_W; s += SETS) {
                    const Slot slot = SLOT_W[s];
                    const Sum* const from = even + row * PITCH + slot.begin;
                    odd[row * OUT_PITCH + s] = Sum(sum_of([&](int j) { return from[j]; }, slot.count));
                }
            }
    }
    __syncthreads();

    // The results of the block's slots, side by side; the last part of an axis has fewer slots.
    {
        constexpr int LANES = 93, SETS = THREADS / LANES;  // threads side by side, and such sets of them
        if (threadIdx.x < SETS * LANES)
#pragma unroll 2
            for (int w = threadIdx.x % LANES; w < SLOTS_W; w += LANES) {
#pragma unroll 2
                for (int row = threadIdx.x / LANES; row < ROWS; row += SETS) {
                    const int h = first_h + row;
                    if (h >= SLOTS_H) continue;
                    const Sum total = odd[row * OUT_PITCH + w];
                    out[first * RESULTS + (first_h + row) * SLOTS_W + w] = total * Sum(0.00390625);
                }
            }
    }
}
