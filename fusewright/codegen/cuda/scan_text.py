"""The fixed parts of scans in CUDA C++."""

from __future__ import annotations

ACROSS = """
// Prefix sums of one value of each of WIDTH neighbouring threads: `ahead` of this one, and of all of them.
template <int WIDTH, typename T>
__device__ __forceinline__ T across(T value, T& ahead) {
    const int lane = threadIdx.x % WIDTH;
#pragma unroll
    for (int offset = 1; offset < WIDTH; offset *= 2) {
        const T before = __shfl_up_sync(~0u, value, offset, WIDTH);
        if (lane >= offset) value += before;
    }
    const T before = __shfl_up_sync(~0u, value, 1, WIDTH);  // no difference: of infinities it would be NaN
    ahead = lane > 0 ? before : T(0);
    return __shfl_sync(~0u, value, WIDTH - 1, WIDTH);
}
"""

ROWS = """
// A team of threads per row, which walks along it: read once.  Of every tile a thread has GROUPS items, TEAM apart.
template <bool WIDE>
__device__ __forceinline__ void rows(const Data& d, $out* out) {
    constexpr int V = VALUES<WIDE>, GROUPS = ITEMS<WIDE>, WIDTH = TEAM < 32 ? TEAM : 32;
    const index_t team = index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    const index_t rows = $rows, items = $items;
    const index_t row = min(team, rows - 1);  // every thread takes part in what is summed
    const int lane = threadIdx.x % TEAM;
    $decode_row
    double carry = 0;  // the sum of what lies ahead
    $declare
    for (index_t tile = 0; tile < items; tile += TEAM * GROUPS) {
        $T value[GROUPS][V], ahead[GROUPS], whole[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            // Loads need no branch then: what is summed behind the last item reaches none ahead of it.
            const index_t item = min(tile + lane + g * TEAM, items - 1);
            $decode_item
            entry<WIDE>(d, $coordinates, value[g]);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
            for (int e = 1; e < V; ++e) value[g][e] += value[g][e - 1];
            whole[g] = across<WIDTH>(value[g][V - 1], ahead[g]);
        }
        $join
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            $advance
#pragma unroll
            for (int e = 0; e < V; ++e) value[g][e] += ahead[g];
            const index_t item = tile + lane + g * TEAM;
            if (item < items && team < rows) {
                $decode_item
                $R results[V];
                result<WIDE>(d, $coordinates, value[g], results);
                store<V>(out + row * $length + item * V, results);
            }
        }
        $turn
    }
}
"""

# Where a warp has a row, or several of them.
ADVANCE_WARP = """
ahead[g] = $T(carry + ahead[g]);
carry += whole[g];
"""

# Where a block has a row: its warps tell each other their sums, in one of two places by turns, so that the next tile
# need not wait for those that still read.
DECLARE_BLOCK = """
__shared__ double sums[2][GROUPS][TEAM / 32];
int turn = 0;
"""

JOIN_BLOCK = """
#pragma unroll
for (int g = 0; g < GROUPS; ++g)
    if (lane % 32 == 0) sums[turn][g][lane / 32] = whole[g];
__syncthreads();
"""

ADVANCE_BLOCK = """
double start = 0;
#pragma unroll
for (int warp = 0; warp < TEAM / 32; ++warp) {
    if (warp == lane / 32) start = carry;
    carry += sums[turn][g][warp];
}
ahead[g] = $T(start + ahead[g]);
"""

NEXT_TURN = """
turn ^= 1;
"""

COLUMNS = """
// LANES threads side by side along the last axis, TEAM of them on each other, which walk down columns: read once.  Of
// every tile a thread has AT_ONCE items on each other.
template <bool WIDE>
__device__ __forceinline__ void columns(const Data& d, $out* out) {
    constexpr int V = VALUES<WIDE>, AT_ONCE = ITEMS<WIDE>, LANES = THREADS / TEAM;
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    const index_t columns = $columns, blocks = (columns + LANES - 1) / LANES, items = $length;
    $declare
    for (index_t job = blockIdx.x; job < blocks; job += gridDim.x) {
        const bool inside = job * LANES + lane < columns;
        const index_t column = min(job * LANES + lane, columns - 1);  // every thread takes part in what is summed
        $decode_column
        double carry[V] = {};  // the sums of what lies ahead
        for (index_t tile = 0; tile < items; tile += TEAM * AT_ONCE) {
            const index_t begin = tile + member * AT_ONCE;
            $T value[AT_ONCE][V], ahead[V];
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                // Loads need no branch then: what is summed behind the last item reaches none ahead of it.
                const index_t item = min(begin + t, items - 1);
                $decode_item
                entry<WIDE>(d, $coordinates, value[t]);
            }
#pragma unroll
            for (int t = 1; t < AT_ONCE; ++t)
#pragma unroll
                for (int e = 0; e < V; ++e) value[t][e] += value[t - 1][e];
            $join
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                const index_t item = begin + t;
                if (item >= items || !inside) continue;
#pragma unroll
                for (int e = 0; e < V; ++e) value[t][e] += ahead[e];
                $decode_item
                $R results[V];
                result<WIDE>(d, $coordinates, value[t], results);
                store<V>(out + ($place), results);
            }
        }
    }
}
"""

ALONE = """
#pragma unroll
for (int e = 0; e < V; ++e) {
    ahead[e] = $T(carry[e]);
    carry[e] += value[AT_ONCE - 1][e];
}
"""

DECLARE_MEMBERS = """
__shared__ $T sums[2][TEAM][V][LANES];  // by turns: the next tile need not wait for those that still read
int turn = 0;
"""

MEMBERS = """
#pragma unroll
for (int e = 0; e < V; ++e) sums[turn][member][e][lane] = value[AT_ONCE - 1][e];
__syncthreads();
#pragma unroll
for (int e = 0; e < V; ++e) {
    $T all = 0, before = 0;
#pragma unroll 8
    for (int m = 0; m < TEAM; ++m) {
        if (m == member) before = all;
        all += sums[turn][m][e][lane];
    }
    ahead[e] = $T(carry[e] + before);
    carry[e] += all;
}
turn ^= 1;
"""
