// fused_rangesum: 435 sums over index ranges of the last axis, from shared memory.
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
constexpr int W = 1023, PLANE = W;  // in memory
constexpr int SLOTS_W = 435;
constexpr int RESULTS = SLOTS_W;  // of a plane
constexpr int PARTS_W = 2, PART_W = 218;  // slots of a block
__constant__ const int BEGIN_W[PARTS_W] = {0, 506};
constexpr int READ_W = 512;  // indices of a block
constexpr int ROWS = PLANES, PITCH = 513, OUT_PITCH = 219;  // of the last axis
constexpr int EVEN = 513;  // sums in the first half of shared memory

// An element, in the type it is added in.
__device__ __forceinline__ float value(Element element) {
    return widened(element);
}

struct Slot { int begin, count; };  // neighbouring indices
__device__ const Slot SLOT_W[SLOTS_W] = {
    {0, 7}, {1, 7}, {2, 7}, {7, 7}, {8, 7}, {9, 7}, {14, 7}, {15, 7}, {16, 7}, {21, 7}, {22, 7},
    {23, 7}, {28, 7}, {29, 7}, {30, 7}, {35, 7}, {36, 7}, {37, 7}, {42, 7}, {43, 7}, {44, 7}, {49, 7},
    {50, 7}, {51, 7}, {56, 7}, {57, 7}, {58, 7}, {63, 7}, {64, 7}, {65, 7}, {70, 7}, {71, 7}, {72, 7},
    {77, 7}, {78, 7}, {79, 7}, {84, 7}, {85, 7}, {86, 7}, {91, 7}, {92, 7}, {93, 7}, {98, 7}, {99, 7},
    {100, 7}, {105, 7}, {106, 7}, {107, 7}, {112, 7}, {113, 7}, {114, 7}, {119, 7}, {120, 7}, {121, 7},
    {126, 7}, {127, 7}, {128, 7}, {133, 7}, {134, 7}, {135, 7}, {140, 7}, {141, 7}, {142, 7}, {147, 7},
    {148, 7}, {149, 7}, {154, 7}, {155, 7}, {156, 7}, {161, 7}, {162, 7}, {163, 7}, {168, 7}, {169, 7},
    {170, 7}, {175, 7}, {176, 7}, {177, 7}, {182, 7}, {183, 7}, {184, 7}, {189, 7}, {190, 7}, {191, 7},
    {196, 7}, {197, 7}, {198, 7}, {203, 7}, {204, 7}, {205, 7}, {210, 7}, {211, 7}, {212, 7}, {217, 7},
    {218, 7}, {219, 7}, {224, 7}, {225, 7}, {226, 7}, {231, 7}, {232, 7}, {233, 7}, {238, 7}, {239, 7},
    {240, 7}, {245, 7}, {246, 7}, {247, 7}, {252, 7}, {253, 7}, {254, 7}, {259, 7}, {260, 7}, {261, 7},
    {266, 7}, {267, 7}, {268, 7}, {273, 7}, {274, 7}, {275, 7}, {280, 7}, {281, 7}, {282, 7}, {287, 7},
    {288, 7}, {289, 7}, {294, 7}, {295, 7}, {296, 7}, {301, 7}, {302, 7}, {303, 7}, {308, 7}, {309, 7},
    {310, 7}, {315, 7}, {316, 7}, {317, 7}, {322, 7}, {323, 7}, {324, 7}, {329, 7}, {330, 7}, {331, 7},
    {336, 7}, {337, 7}, {338, 7}, {343, 7}, {344, 7}, {345, 7}, {350, 7}, {351, 7}, {352, 7}, {357, 7},
    {358, 7}, {359, 7}, {364, 7}, {365, 7}, {366, 7}, {371, 7}, {372, 7}, {373, 7}, {378, 7}, {379, 7},
    {380, 7}, {385, 7}, {386, 7}, {387, 7}, {392, 7}, {393, 7}, {394, 7}, {399, 7}, {400, 7}, {401, 7},
    {406, 7}, {407, 7}, {408, 7}, {413, 7}, {414, 7}, {415, 7}, {420, 7}, {421, 7}, {422, 7}, {427, 7},
    {428, 7}, {429, 7}, {434, 7}, {435, 7}, {436, 7}, {441, 7}, {442, 7}, {443, 7}, {448, 7}, {449, 7},
    {450, 7}, {455, 7}, {456, 7}, {457, 7}, {462, 7}, {463, 7}, {464, 7}, {469, 7}, {470, 7}, {471, 7},
    {476, 7}, {477, 7}, {478, 7}, {483, 7}, {484, 7}, {485, 7}, {490, 7}, {491, 7}, {492, 7}, {497, 7},
    {498, 7}, {499, 7}, {504, 7}, {505, 7}, {506, 7}, {511, 7}, {512, 7}, {513, 7}, {518, 7}, {519, 7},
    {520, 7}, {525, 7}, {526, 7}, {527, 7}, {532, 7}, {533, 7}, {534, 7}, {539, 7}, {540, 7}, {541, 7},
    {546, 7}, {547, 7}, {548, 7}, {553, 7}, {554, 7}, {555, 7}, {560, 7}, {561, 7}, {562, 7}, {567, 7},
    {568, 7}, {569, 7}, {574, 7}, {575, 7}, {576, 7}, {581, 7}, {582, 7}, {583, 7}, {588, 7}, {589, 7},
    {590, 7}, {595, 7}, {596, 7}, {597, 7}, {602, 7}, {603, 7}, {604, 7}, {609, 7}, {610, 7}, {611, 7},
    {616, 7}, {617, 7}, {618, 7}, {623, 7}, {624, 7}, {625, 7}, {630, 7}, {631, 7}, {632, 7}, {637, 7},
    {638, 7}, {639, 7}, {644, 7}, {645, 7}, {646, 7}, {651, 7}, {652, 7}, {653, 7}, {658, 7}, {659, 7},
    {660, 7}, {665, 7}, {666, 7}, {667, 7}, {672, 7}, {673, 7}, {674, 7}, {679, 7}, {680, 7}, {681, 7},
    {686, 7}, {687, 7}, {688, 7}, {693, 7}, {694, 7}, {695, 7}, {700, 7}, {701, 7}, {702, 7}, {707, 7},
    {708, 7}, {709, 7}, {714, 7}, {715, 7}, {716, 7}, {721, 7}, {722, 7}, {723, 7}, {728, 7}, {729, 7},
    {730, 7}, {735, 7}, {736, 7}, {737, 7}, {742, 7}, {743, 7}, {744, 7}, {749, 7}, {750, 7}, {751, 7},
    {756, 7}, {757, 7}, {758, 7}, {763, 7}, {764, 7}, {765, 7}, {770, 7}, {771, 7}, {772, 7}, {777, 7},
    {778, 7}, {779, 7}, {784, 7}, {785, 7}, {786, 7}, {791, 7}, {792, 7}, {793, 7}, {798, 7}, {799, 7},
    {800, 7}, {805, 7}, {806, 7}, {807, 7}, {812, 7}, {813, 7}, {814, 7}, {819, 7}, {820, 7}, {821, 7},
    {826, 7}, {827, 7}, {828, 7}, {833, 7}, {834, 7}, {835, 7}, {840, 7}, {841, 7}, {842, 7}, {847, 7},
    {848, 7}, {849, 7}, {854, 7}, {855, 7}, {856, 7}, {861, 7}, {862, 7}, {863, 7}, {868, 7}, {869, 7},
    {870, 7}, {875, 7}, {876, 7}, {877, 7}, {882, 7}, {883, 7}, {884, 7}, {889, 7}, {890, 7}, {891, 7},
    {896, 7}, {897, 7}, {898, 7}, {903, 7}, {904, 7}, {905, 7}, {910, 7}, {911, 7}, {912, 7}, {917, 7},
    {918, 7}, {919, 7}, {924, 7}, {925, 7}, {926, 7}, {931, 7}, {932, 7}, {933, 7}, {938, 7}, {939, 7},
    {940, 7}, {945, 7}, {946, 7}, {947, 7}, {952, 7}, {953, 7}, {954, 7}, {959, 7}, {960, 7}, {961, 7},
    {966, 7}, {967, 7}, {968, 7}, {973, 7}, {974, 7}, {975, 7}, {980, 7}, {981, 7}, {982, 7}, {987, 7},
    {988, 7}, {989, 7}, {994, 7}, {995, 7}, {996, 7}, {1001, 7}, {1002, 7}, {1003, 7}, {1008, 7},
    {1009, 7}, {1010, 7}
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_rangesum(const Element* __restrict__ x, float* __restrict__ out, index_t planes) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Sum* const even = reinterpret_cast<Sum*>(shared_memory);
    Sum* const odd = even + EVEN;
    const index_t first = index_t(blockIdx.x / PARTS_W) * PLANES;
    const int part_w = blockIdx.x % PARTS_W;
    const int from_w = BEGIN_W[part_w], first_w = part_w * PART_W;

    // The rows as they are, several loads at once.
#pragma unroll 8
    for (int i = threadIdx.x; i < PLANES * READ_W; i += THREADS)
        even[i / READ_W * PITCH + i % READ_W] = value(x[first * PLANE + from_w + i % READ_W]);
    __syncthreads();

    // Sums along w, rows side by side.
    {
        constexpr int LANES = 1, SETS = THREADS / LANES;  // threads side by side, and such sets of them
#pragma unroll 4
        for (int row = threadIdx.x % LANES; row < ROWS; row += LANES) {
#pragma unroll 1
            for (int s = threadIdx.x / LANES; s < PART_W; s += SETS) {
                const Slot slot = SLOT_W[min(first_w + s, SLOTS_W - 1)];
                const Sum* const from = even + row * PITCH + slot.begin - from_w;
                odd[row * OUT_PITCH + s] = few_of<7>([&](int j) { return from[j]; }, slot.count);
            }
        }
    }
    __syncthreads();

    // The results of the block's slots, side by side; the last part of an axis has fewer slots.
    {
        constexpr int LANES = 218, SETS = THREADS / LANES;  // threads side by side, and such sets of them
        if (threadIdx.x < SETS * LANES)
#pragma unroll 4
            for (int s = threadIdx.x % LANES; s < PART_W; s += LANES) {
#pragma unroll 1
                for (int row = threadIdx.x / LANES; row < ROWS; row += SETS) {
                    const int w = first_w + s;
                    if (w >= SLOTS_W) continue;
                    const Sum total = odd[row * OUT_PITCH + s];
                    out[first * RESULTS + row * SLOTS_W + w] = total * Sum(0.14285714285714285);
                }
            }
    }
}
