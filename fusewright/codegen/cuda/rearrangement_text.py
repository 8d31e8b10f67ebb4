"""The fixed parts of a rearrangement's CUDA C++."""

from __future__ import annotations

TURNED = """
// A block computes a tile of TILE x TILE elements: neighbours of what is turned are read, neighbours of out written.
extern "C" __global__ void __launch_bounds__(THREADS)
$signature
    await_launches();
    const Data d{$members};
    $tiles
    const count_t block = blockIdx.x;
    const count_t column = block % ACROSS * TILE, row = block / ACROSS % DOWN * TILE;
    const count_t begin = block / (ACROSS * DOWN) * (count_t(STEP) * LENGTH);
    const int lane = threadIdx.x % TILE, first = threadIdx.x / TILE;
#pragma unroll
    for (int k = first; k < TILE; k += THREADS / TILE) {
        if (column + k >= STEP || row + lane >= LENGTH) continue;
        const count_t i = begin + (row + lane) * STEP + (column + k);
        $read
    }
    __syncthreads();
#pragma unroll
    for (int k = first; k < TILE; k += THREADS / TILE) {
        if (column + lane >= STEP || row + k >= LENGTH) continue;
        const count_t i = begin + (row + k) * STEP + (column + lane);
        const $T value[1] = {element(d, i, $turned)};
        store<1>(out + size_t(i), value);
    }
}
"""

KERNEL = """
// A thread computes AT_ONCE groups of VALUES neighbours, a block apart, and then writes them.
extern "C" __global__ void __launch_bounds__(THREADS)
$signature
    await_launches();
    const Data d{$members};
    const count_t first = count_t(blockIdx.x) * (THREADS * AT_ONCE) + threadIdx.x;
    $T value[AT_ONCE][VALUES];
#pragma unroll
    for (int t = 0; t < AT_ONCE; ++t)
        values(d, min(first + t * THREADS, count_t(groups) - 1) * VALUES, value[t]);  // loads need no branch then
#pragma unroll
    for (int t = 0; t < AT_ONCE; ++t)
        if (first + t * THREADS < groups) store<VALUES>(out + size_t(first + t * THREADS) * VALUES, value[t]);
}
"""

ROWS = """
// A thread computes AT_ONCE rows of VALUES elements, a block apart; then the block writes them as they lie.
extern "C" __global__ void __launch_bounds__(THREADS)
$signature
    await_launches();
    const Data d{$members};
    __shared__ $E rows[AT_ONCE][THREADS * VALUES];
    const count_t first = count_t(blockIdx.x) * (THREADS * AT_ONCE);
#pragma unroll
    for (int t = 0; t < AT_ONCE; ++t) {
        $T value[VALUES];
        values(d, min(first + t * THREADS + threadIdx.x, count_t(groups) - 1), value);  // loads need no branch then
#pragma unroll
        for (int e = 0; e < VALUES; ++e) rows[t][threadIdx.x * VALUES + e] = narrow_to<$E>::of(value[e]);
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < AT_ONCE; ++t) {
        const count_t begin = first + t * THREADS;
        const int count = begin < groups ? int(min(count_t(groups) - begin, count_t(THREADS))) * VALUES : 0;
        for (int k = threadIdx.x; k < count; k += THREADS) out[size_t(begin) * VALUES + k] = rows[t][k];
    }
}
"""

CUBIC = """

// What lies `t` of the way from b to c, by the cubic of PyTorch's images, whose slope at either is 3/4 of what it is
// between the two around it.  Weights are products, which lose less than sums do.
template <typename T> __device__ __forceinline__ T cubic(T t, T a, T b, T c, T d) {
    const T A = T(-0.75), u = T(1) - t, outer = A * t * u;
    const auto near = [=](T x) { return T(1) - x * x * ((A + T(3)) - (A + T(2)) * x); };
    return a * (outer * u) + b * near(t) + c * near(u) + d * (outer * t);
}
"""
