// fused_sub_mul_sum_mul_exp: axes i0 over dimension 0, i1 over dimension 1, i2 over dimension 2.

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
using count_t = unsigned int;  // divides faster
constexpr int THREADS = 256, ACROSS = 16;  // of a block, and of these along either axis
constexpr int EACH = 4, SIDE = EACH * ACROSS;  // rows of a thread, and of a block
constexpr int STEP = 16;  // elements of a row that are staged together

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
    const float* p1;
    index_t n0, n1, n2;  // lengths of the axes
};

// A running sum: a few values are added in float, the rest in float64.
struct First {
    double total;
    static __device__ First empty() { return {0.0}; }
    template <int COUNT>
    __device__ void take(const float (&value)[COUNT]) {
        float few = value[0];
#pragma unroll
        for (int i = 1; i < COUNT; ++i) few += value[i];
        total += few;
    }
    __device__ void merge(const First& other) { total += other.total; }
    __device__ First from(int offset) const { return {__shfl_down_sync(~0u, total, offset)}; }
    __device__ void save(double* to, index_t) const { *to = total; }
    static __device__ First load(const double* from, index_t) { return {*from}; }
    __device__ float result(double) const { return float(total); }
};

// A few elements of the rows of a block.
struct Staged {
    float x[STEP][SIDE + 4];  // rows along axis 0
    float p1[STEP][SIDE + 4];  // rows along axis 1
};

// Read them, from these coordinates on, and beyond an end the last ones again.
__device__ __forceinline__ void stage(const Data& d, index_t first0, index_t first1, index_t first2, Staged& staged) {
#pragma unroll
    for (int t = threadIdx.x; t < STEP * SIDE; t += THREADS) {
        const int k = t % STEP, row = t / STEP;
        const index_t i2 = min(first2 + k, d.n2 - 1);
        const index_t i0 = min(first0 + row, d.n0 - 1);
        staged.x[k][row] = widened(d.x[(i0 * d.n2 + i2)]);
    }
#pragma unroll
    for (int t = threadIdx.x; t < STEP * SIDE; t += THREADS) {
        const int k = t % STEP, row = t / STEP;
        const index_t i2 = min(first2 + k, d.n2 - 1);
        const index_t i1 = min(first1 + row, d.n1 - 1);
        staged.p1[k][row] = widened(d.p1[(i1 * d.n2 + i2)]);
    }
}

// Take COUNT elements of all pairs of a thread, from element k on.
template <int COUNT>
__device__ __forceinline__ void take(const Staged& staged, int k, int row, int column, float (&few)[EACH][EACH]) {
    Pack<float, EACH> xs[COUNT];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) xs[c] = load<EACH>(&staged.x[k + c][row]);
    Pack<float, EACH> p1s[COUNT];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) p1s[c] = load<EACH>(&staged.p1[k + c][column]);
#pragma unroll
    for (int m = 0; m < EACH; ++m)
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
#pragma unroll
            for (int c = 0; c < COUNT; ++c) {
                const float x = xs[c].at[m];
                const float p1 = p1s[c].at[n];
                const float v2 = x - p1;
                const float v3 = v2 * v2;
                few[m][n] += v3;
            }
        }
}

// The results of the first reduction from `result` on, and what follows it.
template <int V>
__device__ __forceinline__ void finish(const Data& d, index_t result, const First (&fold)[V], float (&value)[V]) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
        const float reduced = fold[e].result(double(d.n2));
        const float v1 = reduced * -0.5f;
        const float v2 = exp(v1);
        value[e] = v2;
    }
}

// The pairs of SIDE rows with SIDE others: a thread has EACH of either.
__device__ __forceinline__ void pairs(const Data& d, float* out) {
    __shared__ Staged staged;
    const int row = threadIdx.x / ACROSS * EACH, column = threadIdx.x % ACROSS * EACH;
    const count_t across = (d.n1 + SIDE - 1) / SIDE, down = (d.n0 + SIDE - 1) / SIDE;
    count_t rest = blockIdx.x;
    const index_t first1 = rest % across * SIDE;
    rest /= across;
    const index_t first0 = rest % down * SIDE;
    rest /= down;
    First fold[EACH][EACH];
#pragma unroll
    for (int m = 0; m < EACH; ++m)
#pragma unroll
        for (int n = 0; n < EACH; ++n) fold[m][n] = First::empty();
    for (index_t first2 = 0; first2 < d.n2; first2 += STEP) {
        __syncthreads();  // all threads are done with the elements before
        stage(d, first0, first1, first2, staged);
        __syncthreads();
        const int count = min(index_t(STEP), d.n2 - first2);
        float few[EACH][EACH] = {};
        int k = 0;
        for (; k + 4 <= count; k += 4) take<4>(staged, k, row, column, few);
        for (; k < count; ++k) take<1>(staged, k, row, column, few);
#pragma unroll
        for (int m = 0; m < EACH; ++m)
#pragma unroll
            for (int n = 0; n < EACH; ++n) fold[m][n].total += few[m][n];
    }
    const bool wide = d.n1 % EACH == 0 && aligned(out);
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
        const index_t i0 = first0 + row + m;
        if (i0 >= d.n0) break;
        if (wide) {
            const index_t i1 = first1 + column;
            if (i1 >= d.n1) break;
            float value[EACH];
            finish(d, (i0) * d.n1 + i1, fold[m], value);
            store<EACH>(out + ((i0) * d.n1 + i1), value);
            continue;
        }
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const index_t i1 = first1 + column + n;
            if (i1 >= d.n1) break;
            const First one[1] = {fold[m][n]};
            float value[1];
            finish(d, (i0) * d.n1 + i1, one, value);
            store<1>(out + ((i0) * d.n1 + i1), value);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
fused_sub_mul_sum_mul_exp(const float* __restrict__ x, const float* __restrict__ p1, int n0, int n1, int n2,
    float* __restrict__ out) {
    await_launches();
    const Data d{x, p1, n0, n1, n2};
    pairs(d, out);
}
