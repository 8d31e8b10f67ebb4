"""The fixed parts of kept rows in CUDA C++."""

from __future__ import annotations

JOINS = """
struct Sum {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
// NaN once there is one.
struct Max {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const { return greater(a, b); }
    template <typename T>
    static __device__ __forceinline__ bool keeps(T a, T b) { return b <= a; }
};
struct Min {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const { return smaller(a, b); }
    template <typename T>
    static __device__ __forceinline__ bool keeps(T a, T b) { return b >= a; }
};
"""

# Of equals, and of several NaN, the first is meant, in whatever order they are joined.  Where nothing is better than
# what there is to begin with, all are as it is, and the first of them is at 0.
JOINS_OF_PLACES = """
template <typename T>
struct Place {
    T value;
    int at;
};
// The better of two, or the first.
template <typename Better>
struct First {
    template <typename T>
    __device__ __forceinline__ Place<T> operator()(const Place<T> a, const Place<T> b) const {
        const bool alike = a.value == b.value || (a.value != a.value && b.value != b.value);
        const T better = Better()(a.value, b.value);
        const bool second = alike ? b.at < a.at : b.value != b.value || better == b.value;
        return second ? b : a;
    }
    // The same of a value that lies behind.
    template <typename T>
    __device__ __forceinline__ Place<T> operator()(const Place<T> a, T value, int at) const {
        const bool second = !Better::keeps(a.value, value) && a.value == a.value;
        return {second ? value : a.value, second ? at : a.at};
    }
};
"""

PLACE_OF_LANE = """
template <typename T>
__device__ __forceinline__ Place<T> of_lane(const Place<T> place, int offset) {
    return {__shfl_xor_sync(~0u, place.value, offset), __shfl_xor_sync(~0u, place.at, offset)};
}
"""

JOINED_ROWS = """
template <typename T>
__device__ __forceinline__ T of_lane(T value, int offset) { return __shfl_xor_sync(~0u, value, offset); }
// The values of TEAM neighbouring threads together, in all of them, in the same order wherever that is.
template <int TEAM, typename T, typename Join>
__device__ __forceinline__ T joined(T value, Join join) {
#pragma unroll
    for (int offset = (TEAM < 32 ? TEAM : 32) / 2; offset > 0; offset /= 2)
        value = join(value, of_lane(value, offset));
    if constexpr (TEAM > 32) {
        static_assert(TEAM == THREADS, "a team is part of a warp, or a block");
        __shared__ T warps[THREADS / 32];
        __syncthreads();  // others may still read what was joined before
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
        __syncthreads();
        value = warps[0];
        for (int warp = 1; warp < THREADS / 32; ++warp) value = join(value, warps[warp]);
    }
    return value;
}
"""

JOINED_COLUMNS = """
// The values of the TEAM threads on each other together, in all of them.
template <typename T, int V, typename Join>
__device__ __forceinline__ void join_columns(T (&value)[V], Join join) {
    if constexpr (TEAM == 1) return;
    constexpr int LANES = THREADS / TEAM;
    __shared__ T of[TEAM][LANES * V];
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    __syncthreads();  // others may still read what was joined before
#pragma unroll
    for (int e = 0; e < V; ++e) of[member][lane * V + e] = value[e];
    __syncthreads();
    for (int column = threadIdx.x; column < LANES * V; column += THREADS) {
        T all = of[0][column];
#pragma unroll 8
        for (int m = 1; m < TEAM; ++m) all = join(all, of[m][column]);
        of[0][column] = all;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < V; ++e) value[e] = of[0][lane * V + e];
}
"""

APART = """
// What a thread keeps of a row: so many groups in registers, the others in shared memory.
template <typename T, int V, int HELD>
struct Kept {
    struct alignas(V * sizeof(T)) Few { T of[V]; };
    T own[HELD][V];
    Few* others;
    // Begins to keep groups `at` a place, and where the next one is.
    __device__ __forceinline__ unsigned char* put(unsigned char* at, int groups) {
        others = reinterpret_cast<Few*>(at) + threadIdx.x;
        return at + (groups - HELD) * THREADS * sizeof(Few);
    }
    __device__ __forceinline__ T (&operator[](int g))[V] { return g < HELD ? own[g] : others[(g - HELD) * THREADS].of; }
};
"""

ROWS = """
// A team of threads per row, which it keeps: read once.
template <bool WIDE>
__device__ __forceinline__ void rows(const Data& d, $target) {
    constexpr int V = VALUES<WIDE>, GROUPS = (LENGTH + TEAM * V - 1) / (TEAM * V);
    constexpr int FEW = 4;  // elements that are added up in their own precision, at least
    const index_t team = index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    const index_t rows = $rows, items = LENGTH / V;
    const index_t row = min(team, rows - 1);  // every thread takes part in what is joined
    const int lane = threadIdx.x % TEAM;
    $decode_row
    $kept
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const index_t item = min(lane + g * TEAM, items - 1);  // loads need no branch then
        $decode_item
        entry<WIDE>(d, $coordinates, $entry);
    }
    $passes
    if (team >= rows) return;
    $write
}
"""

SUM = """
double total$i = 0;
$T few$i = 0;  // of them: conversions take longer than to add
#pragma unroll
for (int g = 0; g < GROUPS; ++g) {
    const index_t item = lane + g * TEAM;
    if (item < items) {
        $decode_item
        $T value[V];
        pass$of<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
        for (int e = 0; e < V; ++e) $take
    }
    if ((g + 1) * V % FEW == 0 || g + 1 == GROUPS) total$i += few$i, few$i = 0;
}
total$i = joined<TEAM>(total$i, Sum());
"""

NUMBER = """
const $S number$i = $S($whole);
"""

AT_PLACE = """
const $S number$i = $S(place$of.value);
"""

SPREAD = """
double total$i = 0;
#pragma unroll
for (int g = 0; g < GROUPS; ++g) {
    const index_t item = lane + g * TEAM;
    if (item < items) {
        $decode_item
        $T value[V];
        pass$i<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
        for (int e = 0; e < V; ++e) {
            const double distance = value[e] - total${i}_mean / LENGTH;
            total$i += distance * distance;
        }
    }
}
const $S number$i = $S($root(joined<TEAM>(total$i, Sum()) / $over));
"""

EXTREME = """
$S number$i = $S($start);
#pragma unroll
for (int g = 0; g < GROUPS; ++g) {
    const index_t item = min(lane + g * TEAM, items - 1);  // beyond the last one it is taken once more
    $decode_item
    $T value[V];
    pass$i<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
    for (int e = 0; e < V; ++e) number$i = $Join()(number$i, $S(value[e]));
}
number$i = joined<TEAM>(number$i, $Join());
"""

PLACE = """
Place<$T> place$i = {$T($start), 0};
#pragma unroll
for (int g = 0; g < GROUPS; ++g) {
    const index_t item = min(lane + g * TEAM, items - 1);  // beyond the last one it is taken once more
    $decode_item
    $T value[V];
    pass$i<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
    for (int e = 0; e < V; ++e) place$i = $Join()(place$i, value[e], int(item * V + e));
}
place$i = joined<TEAM>(place$i, $Join());
const $S number$i = $S(place$i.at);
"""

WRITE_ELEMENTS = """
#pragma unroll
for (int g = 0; g < GROUPS; ++g) {
    const index_t item = lane + g * TEAM;
    if (item < items) {
        $decode_item
        $R value[V];
        $result<WIDE>(d, $coordinates, $arguments, value);
        store<V>($out + row * LENGTH + item * V, value);
    }
}
"""

WRITE_NUMBER = """
if (lane == 0) {
    const index_t item = 0;
    $decode_item
    $R value[V];
    $result<WIDE>(d, $coordinates, $first, value);
    const $R one[1] = {value[0]};
    store<1>($out + row, one);
}
"""

COLUMNS = """
// LANES threads side by side along the last axis, TEAM of them on each other, which keep columns: read once.
template <bool WIDE>
__device__ __forceinline__ void columns(const Data& d, $target) {
    constexpr int V = VALUES<WIDE>, GROUPS = (LENGTH + TEAM - 1) / TEAM, LANES = THREADS / TEAM;
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    const index_t items = $items, blocks = (items + LANES - 1) / LANES;
    for (index_t job = blockIdx.x; job < blocks; job += gridDim.x) {
        const bool inside = job * LANES + lane < items;
        const index_t column = min(job * LANES + lane, items - 1);  // every thread takes part in what is joined
        $decode_column
        $kept
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const index_t item = min(member + g * TEAM, LENGTH - 1);
            $decode_item
            entry<WIDE>(d, $coordinates, $entry);
        }
        $passes
        if (!inside) continue;
        $write
    }
}
"""

SUM_OF_COLUMNS = """
$S number$i[V];
{
    double total[V] = {};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const index_t item = member + g * TEAM;
        if (item < LENGTH) {
            $decode_item
            $T value[V];
            pass$i<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
            for (int e = 0; e < V; ++e) total[e] += $take;
        }
    }
    join_columns(total, Sum());
#pragma unroll
    for (int e = 0; e < V; ++e) number$i[e] = $S($whole);
}
"""

SPREAD_OF_COLUMNS = """
$S number$i[V];
{
    double mean[V] = {}, total[V] = {};
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const index_t item = member + g * TEAM;
        if (item < LENGTH) {
            $decode_item
            $T value[V];
            pass$i<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
            for (int e = 0; e < V; ++e) mean[e] += value[e];
        }
    }
    join_columns(mean, Sum());
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const index_t item = member + g * TEAM;
        if (item < LENGTH) {
            $decode_item
            $T value[V];
            pass$i<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const double distance = value[e] - mean[e] / LENGTH;
                total[e] += distance * distance;
            }
        }
    }
    join_columns(total, Sum());
#pragma unroll
    for (int e = 0; e < V; ++e) number$i[e] = $S($root(total[e] / $over));
}
"""

EXTREME_OF_COLUMNS = """
$S number$i[V];
#pragma unroll
for (int e = 0; e < V; ++e) number$i[e] = $S($start);
#pragma unroll
for (int g = 0; g < GROUPS; ++g) {
    const index_t item = min(member + g * TEAM, LENGTH - 1);
    $decode_item
    $T value[V];
    pass$i<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
    for (int e = 0; e < V; ++e) number$i[e] = $Join()(number$i[e], $S(value[e]));
}
join_columns(number$i, $Join());
"""

PLACE_OF_COLUMNS = """
Place<$T> place$i[V];
#pragma unroll
for (int e = 0; e < V; ++e) place$i[e] = {$T($start), 0};
#pragma unroll
for (int g = 0; g < GROUPS; ++g) {
    const index_t item = min(member + g * TEAM, LENGTH - 1);
    $decode_item
    $T value[V];
    pass$i<WIDE>(d, $coordinates, $arguments, value);
#pragma unroll
    for (int e = 0; e < V; ++e) place$i[e] = $Join()(place$i[e], value[e], int(item));
}
join_columns(place$i, $Join());
$S number$i[V];
#pragma unroll
for (int e = 0; e < V; ++e) number$i[e] = $S(place$i[e].at);
"""

AT_PLACE_OF_COLUMNS = """
$S number$i[V];
#pragma unroll
for (int e = 0; e < V; ++e) number$i[e] = $S(place$of[e].value);
"""

WRITE_COLUMNS = """
#pragma unroll
for (int g = 0; g < GROUPS; ++g) {
    const index_t item = member + g * TEAM;
    if (item < LENGTH) {
        $decode_item
        $R value[V];
        $result<WIDE>(d, $coordinates, $arguments, value);
        store<V>($out + ($place), value);
    }
}
"""

WRITE_NUMBERS = """
if (member == 0) {
    const index_t item = 0;
    $decode_item
    $R value[V];
    $result<WIDE>(d, $coordinates, $first, value);
    store<V>($out + ($place), value);
}
"""
