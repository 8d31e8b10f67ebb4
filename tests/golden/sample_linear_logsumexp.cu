// fused_linear_add_logsumexp_mul: one block per sample.  Operands: a0 (B, 64, 1, 1), a1 (128, 64), a2 (128), a3 (128, 1, 1).
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

// A team of LANES neighbouring threads works on one row; joins are in a fixed order.
namespace rows {
constexpr int THREADS = 512;
struct Add {
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct Times {
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return a * b; }
};
struct Greater {  // NaN once there is one
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return b > a || b != b ? b : a; }
};
struct Less {
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return b < a || b != b ? b : a; }
};
// Every thread of the team gets the join of all their values; every thread of the block takes part.
template <int LANES, typename T, typename Join>
__device__ __forceinline__ T joined(T value, Join join) {
#pragma unroll
    for (int offset = (LANES < 32 ? LANES : 32) / 2; offset > 0; offset /= 2)
        value = join(value, __shfl_xor_sync(~0u, value, offset));
    if constexpr (LANES > 32) {
        static_assert(LANES == THREADS, "a team is part of a warp, or the block");
        __shared__ T warps[LANES / 32];
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
        __syncthreads();
        value = warps[0];
        for (int warp = 1; warp < LANES / 32; ++warp) value = join(value, warps[warp]);
        __syncthreads();
    }
    return value;
}
// The join of element(0) ... element(length - 1).
template <int LANES, typename T, typename Element, typename Join>
__device__ __forceinline__ T over(int length, T start, Element element, Join join) {
#pragma unroll 4
    for (int r = threadIdx.x % LANES; r < length; r += LANES) start = join(start, T(element(r)));
    return joined<LANES>(start, join);
}
// The sum of left(0) * right(0) ... left(LENGTH - 1) * right(LENGTH - 1).  `right` is in memory: a thread has up to 16
// loads of it under way before it uses the first, none of them behind a branch.
template <int LANES, int LENGTH, typename Left, typename Right>
__device__ __forceinline__ double dot(Left left, Right right) {
    constexpr int EACH = (LENGTH + LANES - 1) / LANES, TURNS = (EACH + 15) / 16, LOADS = (EACH + TURNS - 1) / TURNS;
    double total = 0;
    for (int first = threadIdx.x % LANES; first < LENGTH; first += LOADS * LANES) {
        decltype(right(0)) factor[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; ++u) factor[u] = right(min(first + u * LANES, LENGTH - 1));
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const double product = left(min(first + u * LANES, LENGTH - 1)) * factor[u];
            total += first + u * LANES < LENGTH ? product : 0;
        }
    }
    return joined<LANES>(total, Add());
}
}  // namespace rows

extern "C" __global__ void __launch_bounds__(512)
fused_linear_add_logsumexp_mul(const double* __restrict__ a0, const double* __restrict__ a1, const double* __restrict__ a2, const float* __restrict__ a3, float* __restrict__ out) {
    await_launches();
    __shared__ double arena[192];  // values of one sample, dead ones make room
    const long long sample = blockIdx.x;
    const double* const a0_row = a0 + sample * 64;
    float* const out_row = out + sample * 1;
    double* const s0 = reinterpret_cast<double*>(arena);
    // reshape: (B, 64, 1, 1) -> (B, 64)
    for (int i = threadIdx.x; i < 64; i += 512) {
        s0[i] = widened(a0_row[i]);
    }
    __syncthreads();
    double* const s1 = reinterpret_cast<double*>(arena + 64);
    // matmul: (B, 64) @ (128, 64) -> (B, 128)
    for (int first = 0; first < 128; first += 512 / 8) {
        const int row = min(first + int(threadIdx.x) / 8, 127), lane = threadIdx.x % 8;
        const bool own = first + int(threadIdx.x) / 8 < 128;
        const double total = rows::dot<8, 64>([&](int r) { return s0[r]; }, [&](int r) { return widened(a1[row * 64 + r]); });
        if (own && lane == 0) s1[row] = total + widened(a2[row]);
    }
    __syncthreads();
    float* const s2 = reinterpret_cast<float*>(arena);
    // add: (B, 128, 1, 1) -> (B, 128, 1, 1)
    for (int i = threadIdx.x; i < 128; i += 512) {
        const double v0 = s1[i];
        const float v1 = float(v0);
        const float v2 = widened(a3[i]);
        const float v3 = v1 + v2;
        s2[i] = v3;
    }
    __syncthreads();
    float* const s3 = reinterpret_cast<float*>(arena + 64);
    // logsumexp: (B, 128, 1, 1) -> (B, 1, 1, 1)
    {
        constexpr int row = 0;
        const int lane = threadIdx.x % 32;
        const bool own = threadIdx.x < 32;
        const auto element = [&](int r) { return s2[r]; };
        const float most = rows::over<32>(128, -float(INFINITY), element, rows::Greater());
        const float shift = fabs(most) == float(INFINITY) ? float(0) : most;  // nothing to subtract
        const double total = rows::over<32>(128, 0.0, [&](int r) { return exp(element(r) - shift); }, rows::Add());
        if (own && lane == 0) s3[row] = float(float(log(total)) + shift);
    }
    __syncthreads();
    // mul: (B, 1) -> (B, 1)
    for (int i = threadIdx.x; i < 1; i += 512) {
        const float v0 = s3[0];
        const float v1 = v0 * 10.0f;
        out_row[i] = narrow_to<float>::of(v1);
    }
}
