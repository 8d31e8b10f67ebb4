"""The fixed parts of a normalisation's CUDA C++."""

from __future__ import annotations

WRITE = """
// What the elements of a row are shifted and scaled by, for each of its channels.
__device__ __forceinline__ void write(const Data& d, index_t row, const First& fold, $outputs) {
    const double count = $count;
    const $S own_scale = 1 / sqrt($S(fold.result(count) + $epsilon));
    $center
    for (index_t channel = row * $channels; channel < (row + 1) * $channels; ++channel) {
        $write_center
        scale[channel] = own_scale;
    }
}
"""

WRITE_ALL = """
// The statistics of a channel.
__device__ __forceinline__ void write(const Data& d, index_t row, const First& fold, $outputs) {
    const double count = $count, mean = fold.mean(), variance = fold.result(count);
    $write
}
"""

# What the exponentials are multiplied by, or what is subtracted.  Where the most is infinite, nothing has a share.
OF_TOTAL = {
    False: """const $S own_scale = most == $S(INFINITY) ? $S(NAN) : $S(1 / total);""",
    True: """const $S own_scale = most == $S(INFINITY) ? $S(NAN) : $S(log(total));""",
}

WRITE_SHARES = """
// What is subtracted from the elements of a row, and what becomes of them then.
__device__ __forceinline__ void write(const Data& d, index_t row, const First& fold, $outputs) {
    const auto most = fold.most;
    const double total = fold.total;
    $shares
    center[row] = most;
    scale[row] = own_scale;
}
"""

SUM = """
// The sum of the values of TEAM neighbouring threads, in all of them, added up in the same order wherever that is.
template <int TEAM>
__device__ __forceinline__ double sum_of(double value) {
#pragma unroll
    for (int offset = (TEAM < 32 ? TEAM : 32) / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(~0u, value, offset);
    if constexpr (TEAM > 32) {
        static_assert(TEAM % THREADS == 0, "a team is part of a warp, a block, or several");
        $warps
        __syncthreads();  // others may still read an earlier sum
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
        __syncthreads();
        value = 0;
        for (int warp = 0; warp < THREADS / 32; ++warp) value += warps[warp];
    }
    $of_blocks
    return value;
}
"""

SHARED_MEMORY = """
// What other blocks of the cluster read lies here.
extern __shared__ __align__(16) unsigned char shared_memory[];
"""

# Behind the sum of a block, or its largest value: that of all blocks of a cluster, in their order.
OF_BLOCKS = """
$own
if (threadIdx.x == 0) *own = value;
cluster_barrier();
value = cluster_load(own, 0);
for (unsigned rank = 1; rank < TEAM / THREADS; ++rank) {
    const $S other = cluster_load(own, rank);
    $join
}
cluster_barrier();  // until the others have read it
"""

TILE = """
// The rows that a block turns, one behind the other.
__device__ __forceinline__ $E* tile() {
    __shared__ __align__(16) $E rows[ROWS * PITCH];
    return rows;
}
"""

STAGED = """
// Rows of a block lie side by side in memory, element by element: neighbouring threads take one element each of them.
{
    $E* const turned = tile();
    constexpr int AT_ONCE = 8;
    for (int first = threadIdx.x; first < ROWS * LENGTH; first += AT_ONCE * THREADS) {
        $E element[AT_ONCE];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            const int k = min(first + t * THREADS, ROWS * LENGTH - 1);
            const index_t own = min(index_t(blockIdx.x) * ROWS + k % ROWS, rows - 1);
            const count_t i = own * LENGTH + k / ROWS;
            $address
            element[t] = $element;
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            const int k = first + t * THREADS;
            if (k < ROWS * LENGTH) turned[k % ROWS * PITCH + k / ROWS] = element[t];
        }
    }
    __syncthreads();
}
"""

ROWS = """
// A team of threads per row, which it keeps: read once, and written once.
template <bool WIDE>
__device__ __forceinline__ void rows(const Data& d, $target) {
    constexpr int V = VALUES<WIDE>, GROUPS = (LENGTH + TEAM * V - 1) / (TEAM * V);
    const index_t team = $team;
    const index_t rows = $rows, items = LENGTH / V;
    const index_t row = min(team, rows - 1);  // every thread takes part in sums
    const int lane = $lane;
    $staged
    $decode_row
    $T kept[GROUPS][V];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const index_t item = min(lane + g * TEAM, items - 1);  // loads need no branch then
        $decode_item
        entry<WIDE>(d, $coordinates, kept[g]);
    }
    $found
    if (team >= rows) return;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const index_t item = lane + g * TEAM;
        if (item < items) {
            $decode_item
            $R value[V];
            normalised<WIDE>(d, $coordinates, kept[g], $statistics, value);
            store<V>(out + row * LENGTH + item * V, value);
            $also
        }
    }
}
"""

MEAN = """
double total = 0;
#pragma unroll
for (int g = 0; g < GROUPS; ++g)
    if (lane + g * TEAM < items)
#pragma unroll
        for (int e = 0; e < V; ++e) total += kept[g][e];
const double mean = sum_of<TEAM>(total) $over;
"""

# Values of half precision have few digits, and conversions to float64 take longer than reading them.
MEAN_OF_HALF = """
double total = 0;
#pragma unroll
for (int g = 0; g < GROUPS; ++g)
    if (lane + g * TEAM < items) {
        $S few = 0;
#pragma unroll
        for (int e = 0; e < V; ++e) few += kept[g][e];
        total += few;
    }
const $S center = sum_of<TEAM>(total) $over;
"""

MOMENTS_OF_HALF = """
$mean
double squares = 0;
#pragma unroll
for (int g = 0; g < GROUPS; ++g)
    if (lane + g * TEAM < items) {
        $S few = 0;
#pragma unroll
        for (int e = 0; e < V; ++e) {
            const $S distance = $distance;
            few += distance * distance;
        }
        squares += few;
    }
const $S scale = 1 / sqrt($S(sum_of<TEAM>(squares) $over + $epsilon));
"""

MOMENTS = """
$mean
double squares = 0;
#pragma unroll
for (int g = 0; g < GROUPS; ++g)
    if (lane + g * TEAM < items)
#pragma unroll
        for (int e = 0; e < V; ++e) {
            const double distance = $distance;
            squares += distance * distance;
        }
$center
const $S scale = 1 / sqrt($S(sum_of<TEAM>(squares) $over + $epsilon));
"""

MOST = """
// The largest of the values of TEAM neighbouring threads, in all of them.
template <int TEAM>
__device__ __forceinline__ $S most_of($S value) {
#pragma unroll
    for (int offset = (TEAM < 32 ? TEAM : 32) / 2; offset > 0; offset /= 2)
        value = greater(value, __shfl_xor_sync(~0u, value, offset));
    if constexpr (TEAM > 32) {
        $warps
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
        __syncthreads();
        for (int warp = 0; warp < THREADS / 32; ++warp) value = greater(value, warps[warp]);
    }
    $of_blocks
    return value;
}
"""

SHARES = """
$S most = -$S(INFINITY);
#pragma unroll
for (int g = 0; g < GROUPS; ++g)  // beyond the last item there is the last one once more
#pragma unroll
    for (int e = 0; e < V; ++e) most = greater(most, kept[g][e]);
most = most_of<TEAM>(most);
double sum = 0;
#pragma unroll
for (int g = 0; g < GROUPS; ++g)
    if (lane + g * TEAM < items) {
        $S few = 0;
#pragma unroll
        for (int e = 0; e < V; ++e) few += exp(kept[g][e] - most);
        sum += few;
    }
const double total = sum_of<TEAM>(sum);
const $S center = most;
$of_total
const $S scale = own_scale;
"""

COLUMNS = """
// LANES threads side by side along the last axis, TEAM of them on each other, which keep columns: read once, and
// written once.
template <bool WIDE>
__device__ __forceinline__ void columns(const Data& d, $target) {
    constexpr int V = VALUES<WIDE>, GROUPS = (LENGTH + TEAM - 1) / TEAM, LANES = THREADS / TEAM;
    __shared__ $S most_of[TEAM][LANES * V];
    __shared__ double total_of[TEAM][LANES * V];
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    const index_t items = $items, blocks = (items + LANES - 1) / LANES;
    for (index_t job = blockIdx.x; job < blocks; job += gridDim.x) {
        const bool inside = job * LANES + lane < items;
        const index_t item = min(job * LANES + lane, items - 1);  // every thread takes part in sums
        $decode_item
        $T kept[GROUPS][V];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const index_t r = min(member + g * TEAM, LENGTH - 1);
            $decode_reduced
            entry<WIDE>(d, $coordinates, kept[g]);
        }
        $S center[V], scale[V];
#pragma unroll
        for (int e = 0; e < V; ++e) {
            $S most = kept[0][e];
#pragma unroll
            for (int g = 1; g < GROUPS; ++g) most = greater(most, kept[g][e]);
            most_of[member][lane * V + e] = most;
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < V; ++e) {
            $S most = most_of[0][lane * V + e];
            for (int m = 1; m < TEAM; ++m) {
                const $S next = most_of[m][lane * V + e];
                most = next > most || next != next ? next : most;  // by `greater`, sm_90 would have too few registers
            }
            $S few = 0;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                if (member + g * TEAM < LENGTH) few += exp(kept[g][e] - most);
            center[e] = most;
            total_of[member][lane * V + e] = few;
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < V; ++e) {
            const $S most = center[e];
            double total = 0;
            for (int m = 0; m < TEAM; ++m) total += total_of[m][lane * V + e];
            $of_total
            scale[e] = own_scale;
        }
        if (inside)
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const index_t r = member + g * TEAM;
                if (r < LENGTH) {
                    $decode_reduced
                    $R value[V];
                    normalised<WIDE>(d, $coordinates, kept[g], center, scale, value);
                    store<V>(out + ($place), value);
                    $also
                }
            }
    }
}
"""
