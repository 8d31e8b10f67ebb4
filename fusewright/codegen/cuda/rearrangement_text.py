"""The fixed parts of a rearrangement's CUDA C++."""

from __future__ import annotations

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
