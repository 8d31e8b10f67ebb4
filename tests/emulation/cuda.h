// CUDA's names with a meaning on a CPU.  The primitives that a generated kernel uses (primitives.h) and its own text
// follow, in an unnamed namespace (so that shared variables of function templates lie in .bss like all others).
#pragma once
#include <math.h>

#include "collectives.h"
#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// They end up in .bss, alone; "used" keeps the compiler from drawing conclusions from who writes them here.
#define __shared__ static __attribute__((used))
#define shared_memory (::emulation::current->block->shared)
#define threadIdx (::emulation::current->thread)
#define blockIdx (::emulation::current->block->index)
#define blockDim (::emulation::threads)
#define gridDim (::emulation::grid)

namespace {

constexpr int warpSize = 32;

// ---- vectors -------------------------------------------------------------------------------------------------------
#define EMULATED_VECTORS(T, name)                                                                       \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                  \
    struct name##3 { T x, y, z; };                                                                      \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };                  \
    [[maybe_unused]] inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
    [[maybe_unused]] inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                 \
    [[maybe_unused]] inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(double, double)
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(unsigned, uint)
EMULATED_VECTORS(short, short)
EMULATED_VECTORS(unsigned short, ushort)
EMULATED_VECTORS(signed char, char)
EMULATED_VECTORS(unsigned char, uchar)
EMULATED_VECTORS(long long, longlong)
EMULATED_VECTORS(unsigned long long, ulonglong)
#undef EMULATED_VECTORS

// ---- barriers and fences -------------------------------------------------------------------------------------------
#define EMULATED_LINE int line = __builtin_LINE()
inline void __syncthreads(EMULATED_LINE) { emulation::block_barrier("__syncthreads", line, 0); }
inline int __syncthreads_count(int vote, EMULATED_LINE) {
    return int(emulation::block_barrier("__syncthreads_count", line, vote != 0));
}
inline int __syncthreads_or(int vote, EMULATED_LINE) {
    return emulation::block_barrier("__syncthreads_or", line, vote != 0) > 0;
}
inline int __syncthreads_and(int vote, EMULATED_LINE) {
    return emulation::block_barrier("__syncthreads_and", line, vote == 0) == 0;
}
inline void __trap(EMULATED_LINE) { emulation::fail("__trap in line %d", line); }
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- collectives of a warp -----------------------------------------------------------------------------------------
inline void __syncwarp(unsigned mask = emulation::WHOLE_WARP, EMULATED_LINE) {
    emulation::collective(emulation::completed_nothing, "__syncwarp", mask, line);
}

inline unsigned __ballot_sync(unsigned mask, int vote, EMULATED_LINE) {
    emulation::current->value = vote != 0;
    emulation::collective(emulation::completed_ballot, "__ballot_sync", mask, line);
    return unsigned(emulation::current->result);
}
inline int __any_sync(unsigned mask, int vote, EMULATED_LINE) { return __ballot_sync(mask, vote, line) != 0; }
inline int __all_sync(unsigned mask, int vote, EMULATED_LINE) { return __ballot_sync(mask, !vote, line) == 0; }

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMULATED_LINE) {
    return emulation::shuffle<emulation::Indexed>("__shfl_sync", mask, value, unsigned(lane), width, line);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATED_LINE) {
    return emulation::shuffle<emulation::Up>("__shfl_up_sync", mask, value, by, width, line);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATED_LINE) {
    return emulation::shuffle<emulation::Down>("__shfl_down_sync", mask, value, by, width, line);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32, EMULATED_LINE) {
    return emulation::shuffle<emulation::Xor>("__shfl_xor_sync", mask, value, unsigned(by), width, line);
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned(((unsigned long long)high << 32 | low) >> (by & 31));
}

// ---- memory --------------------------------------------------------------------------------------------------------
template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcg(const T* p) { return *p; }
template <typename T> inline T __ldca(const T* p) { return *p; }
template <typename T> inline T __ldlu(const T* p) { return *p; }
template <typename T> inline T __ldcv(const T* p) { return *p; }
template <typename T> inline void __stcs(T* p, T value) { *p = value; }
template <typename T> inline void __stcg(T* p, T value) { *p = value; }
template <typename T> inline void __stwb(T* p, T value) { *p = value; }
template <typename T> inline void __stwt(T* p, T value) { *p = value; }

#define EMULATED_ATOMIC(name, next)                                       \
    template <typename T>                                                 \
    inline T name(T* p, typename emulation::Same<T>::type value) {        \
        const T old = *p;                                                 \
        *p = T(next);                                                     \
        return old;                                                       \
    }
EMULATED_ATOMIC(atomicExch, value)
EMULATED_ATOMIC(atomicAdd, old + value)
EMULATED_ATOMIC(atomicSub, old - value)
EMULATED_ATOMIC(atomicMin, value < old ? value : old)
EMULATED_ATOMIC(atomicMax, old < value ? value : old)
EMULATED_ATOMIC(atomicAnd, old & value)
EMULATED_ATOMIC(atomicOr, old | value)
EMULATED_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMULATED_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef EMULATED_ATOMIC
template <typename T>
inline T atomicCAS(T* p, typename emulation::Same<T>::type expected, typename emulation::Same<T>::type value) {
    return *p == expected ? atomicExch(p, value) : *p;
}

// ---- bits ----------------------------------------------------------------------------------------------------------
inline unsigned __float_as_uint(float x) { return emulation::bits<unsigned>(x); }
inline int __float_as_int(float x) { return emulation::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bits<float>(x); }
inline float __int_as_float(int x) { return emulation::bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulation::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulation::bits<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

// ---- arithmetic ----------------------------------------------------------------------------------------------------
inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float __double2float_rn(double x) { return float(x); }
inline float __int2float_rn(int x) { return float(x); }
inline int __umulhi(unsigned x, unsigned y) { return int(uint64_t(x) * y >> 32); }

// Of floating types they are fmin and fmax: a NaN gives way to a number.
template <typename A, typename B>
inline emulation::Common<A, B> min(A a, B b) {
    using C = emulation::Common<A, B>;
    if constexpr (C(0.5) != C(0)) return C(fmin(C(a), C(b)));
    else return C(b) < C(a) ? C(b) : C(a);
}
template <typename A, typename B>
inline emulation::Common<A, B> max(A a, B b) {
    using C = emulation::Common<A, B>;
    if constexpr (C(0.5) != C(0)) return C(fmax(C(a), C(b)));
    else return C(a) < C(b) ? C(b) : C(a);
}

}  // namespace
