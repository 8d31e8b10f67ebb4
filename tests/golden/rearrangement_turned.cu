// fused_cat: elements in the order in which they are written.

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
using count_t = unsigned int;  // divides faster; differences below 0 are very large
constexpr int THREADS = 256, TILE = 32;
constexpr int STEP = 40, LENGTH = 70, ACROSS = 2, DOWN = 3;

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
};

// Element i.
__device__ __forceinline__ float element(const Data& d, const count_t i, const float turned0) {
    const float v1 = tanh(turned0);
    return v1;
}

// A block computes a tile of TILE x TILE elements: neighbours of what is turned are read, neighbours of out written.
extern "C" __global__ void __launch_bounds__(THREADS)
fused_cat(const float* __restrict__ x, float* __restrict__ out) {
    await_launches();
    const Data d{x};
    __shared__ float tile0[TILE][TILE + 1];
    const count_t block = blockIdx.x;
    const count_t column = block % ACROSS * TILE, row = block / ACROSS % DOWN * TILE;
    const count_t begin = block / (ACROSS * DOWN) * (count_t(STEP) * LENGTH);
    const int lane = threadIdx.x % TILE, first = threadIdx.x / TILE;
#pragma unroll
    for (int k = first; k < TILE; k += THREADS / TILE) {
        if (column + k >= STEP || row + lane >= LENGTH) continue;
        const count_t i = begin + (row + lane) * STEP + (column + k);
        tile0[k][lane] = d.x[index_t(i % 40 * 70 + i / 40 % 70 + i / 2800 * 2800)];
    }
    __syncthreads();
#pragma unroll
    for (int k = first; k < TILE; k += THREADS / TILE) {
        if (column + lane >= STEP || row + k >= LENGTH) continue;
        const count_t i = begin + (row + k) * STEP + (column + lane);
        const float value[1] = {element(d, i, widened(tile0[lane][k]))};
        store<1>(out + size_t(i), value);
    }
}
