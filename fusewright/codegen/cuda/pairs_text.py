"""The fixed parts of the CUDA C++ of streams over pairs."""

from __future__ import annotations

# The reduction of a thread's pairs, of rows from first$a and first$b on.
REDUCE = """
$own
First fold[EACH][EACH];
#pragma unroll
for (int m = 0; m < EACH; ++m)
#pragma unroll
    for (int n = 0; n < EACH; ++n) fold[m][n] = First::empty();
for (index_t first$k = 0; first$k < d.n$k; first$k += STEP) {
    __syncthreads();  // all threads are done with the elements before
    stage(d, $coordinates, staged);
    __syncthreads();
    const int count = min(index_t(STEP), d.n$k - first$k);
    $first
    int k = 0;
    for (; k + $together <= count; k += $together) take<$together>(staged, k, row, column, $arguments);
    for (; k < count; ++k) take<1>(staged, k, row, column, $arguments);
    $last
}
"""

# What was added of one step's elements.
ADD = """
#pragma unroll
for (int m = 0; m < EACH; ++m)
#pragma unroll
    for (int n = 0; n < EACH; ++n) fold[m][n].total += few[m][n];
"""

PAIRS = """
// The pairs of SIDE rows with SIDE others: a thread has EACH of either.
__device__ __forceinline__ void pairs(const Data& d, $out* out) {
    __shared__ Staged staged;
    const int row = threadIdx.x / ACROSS * EACH, column = threadIdx.x % ACROSS * EACH;
    const count_t across = (d.n$b + SIDE - 1) / SIDE, down = (d.n$a + SIDE - 1) / SIDE;
    count_t rest = blockIdx.x;
    const index_t first$b = rest % across * SIDE;
    rest /= across;
    const index_t first$a = rest % down * SIDE;
    rest /= down;
    $batch
    $reduce
    const bool wide = $wide;
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
        const index_t i$a = first$a + row + m;
        if (i$a >= d.n$a) break;
        if (wide) {
            const index_t i$b = first$b + column;
            if (i$b >= d.n$b) break;
            $R value[EACH];
            finish(d, $place, fold[m], value);
            store<EACH>(out + ($place), value);
            continue;
        }
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const index_t i$b = first$b + column + n;
            if (i$b >= d.n$b) break;
            const First one[1] = {fold[m][n]};
            $R value[1];
            finish(d, $place, one, value);
            store<1>(out + ($place), value);
        }
    }
}
"""

PAIRS_OF_ROWS = """
// The pairs of SIDE rows with all others, SIDE after SIDE; what they come to is reduced row by row.
__device__ __forceinline__ void pairs(const Data& d, $out* out) {
    __shared__ Staged staged;
    const int row = threadIdx.x / ACROSS * EACH, column = threadIdx.x % ACROSS * EACH;
    const count_t down = (d.n$a + SIDE - 1) / SIDE;
    count_t rest = blockIdx.x;
    const index_t first$a = rest % down * SIDE;
    rest /= down;
    $batch
    const bool wide = $wide;
    Second second[EACH];
#pragma unroll
    for (int m = 0; m < EACH; ++m) second[m] = Second::empty();
    for (index_t first$b = 0; first$b < d.n$b; first$b += SIDE) {
        $reduce
#pragma unroll
        for (int m = 0; m < EACH; ++m) {
            const index_t i$a = min(first$a + row + m, d.n$a - 1);
            if (wide) {
                const index_t i$b = first$b + column;
                if (i$b >= d.n$b) break;
                $T value[EACH];
                finish(d, $place, fold[m], value);
                second[m].take(value$told);
                continue;
            }
#pragma unroll
            for (int n = 0; n < EACH; ++n) {
                const index_t i$b = first$b + column + n;
                if (i$b >= d.n$b) break;
                const First one[1] = {fold[m][n]};
                $T value[1];
                finish(d, $place, one, value);
                second[m].take(value$told);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < EACH; ++m) {
        const Second whole[1] = {joined<ACROSS>(second[m])};
        const index_t i$a = first$a + row + m;
        if (column != 0 || i$a >= d.n$a) continue;
        $R value[1];
        finish(d, $behind, whole, value);
        store<1>(out + ($behind), value);
    }
}
"""
