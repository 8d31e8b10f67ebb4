"""The fixed parts of a stream's CUDA C++."""

from __future__ import annotations

TOOLS = """
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
"""

ROW_OF = """
// The row that an index means, of so many; where it is none, `d.outside` says so and the first is read.  A trap in this
// place would keep loads of the next rows from being on their way with this one's.
template <typename I>
__device__ __forceinline__ index_t row_of(const Data& d, I index, index_t rows) {
    const bool inside = index >= 0 && index < rows;
    d.outside |= !inside;
    return inside ? index_t(index) : 0;
}
"""

INDEX = """
template <> struct narrow_to<long long> { static __device__ __forceinline__ long long of(long long x) { return x; } };
"""

JOINED = """
// The folds of TEAM neighbouring threads together, in the first of them.
template <int TEAM, typename Fold>
__device__ Fold joined(Fold fold) {
#pragma unroll
    for (int offset = (TEAM < 32 ? TEAM : 32) / 2; offset > 0; offset /= 2) fold.merge(fold.from(offset));
    if constexpr (TEAM > 32) {
        static_assert(TEAM == THREADS, "a team is part of a warp, or a block");
        __shared__ Fold warps[THREADS / 32];
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = fold;
        __syncthreads();
        if (threadIdx.x == 0)
            for (int warp = 1; warp < THREADS / 32; ++warp) fold.merge(warps[warp]);
    }
    return fold;
}
"""

FLAT = """
// Every thread computes AT_ONCE groups of neighbours, a block apart, and then writes them.
template <bool WIDE>
__device__ __forceinline__ void flat(const Data& d, $target) {
    constexpr int V = VALUES<WIDE>, $at_once;
    const index_t items = $items;
    for (index_t first = index_t(blockIdx.x) * (THREADS * AT_ONCE) + threadIdx.x; first < items;
         first += index_t(gridDim.x) * (THREADS * AT_ONCE)) {
        $T value[AT_ONCE][V];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            const index_t item = min(first + t * THREADS, items - 1);  // loads need no branch then
            $decode
            values<WIDE>(d, $coordinates, value[t]);
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t)
            if (first + t * THREADS < items) $store
    }
}
"""

CROSSED = """
// Every thread computes ROWS groups of neighbours on each other, which share what varies along the last axis, and then
// writes them.
template <bool WIDE>
__device__ __forceinline__ void flat(const Data& d, $target) {
    constexpr int V = VALUES<WIDE>, ROWS = $rows;
    const count_t across = d.n$last / V, groups = (d.n$row + ROWS - 1) / ROWS;
    const index_t items = $items, all = index_t(gridDim.x) * THREADS;
    for (index_t item = index_t(blockIdx.x) * THREADS + threadIdx.x; item < items; item += all) {
        const index_t i$last = item % across * V, first = item / across % groups * ROWS;
        const index_t others = item / across / groups;
        $decode
        $T value[ROWS][V];
#pragma unroll
        for (int t = 0; t < ROWS; ++t) {
            const index_t i$row = min(first + t, d.n$row - 1);  // loads need no branch then
            values<WIDE>(d, $coordinates, value[t]);
        }
        const index_t place = (others * d.n$row + first) * d.n$last + i$last;
#pragma unroll
        for (int t = 0; t < ROWS; ++t)
            if (first + t < d.n$row) $store
    }
}
"""

ROWS = """
// A team of threads per part of a row; its threads take neighbouring items.
$head {
    constexpr int V = $values;
    const index_t team = index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    const int lane = threadIdx.x % TEAM;
    const index_t rows = $rows, items = $items;
    $share
    $decode_row
    const auto item_values = [&](index_t item, $T (&value)[V]) {
        $decode_item
        $function(d, $coordinates, value);
    };
    First fold = First::empty();
    index_t item = begin + lane;
    for (; item < end - (AT_ONCE - 1) * TEAM; item += AT_ONCE * TEAM) {
        $T value[AT_ONCE][V];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) item_values(item + t * TEAM, value[t]);
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) fold.take(value[t]$at_each);
    }
    for (; item < end; item += TEAM) {
        $T value[V];
        item_values(item, value);
        fold.take(value$at);
    }
    fold = joined<TEAM>(fold);
    if (lane != 0 || row >= rows) return;
    $write
}
"""

COLUMNS = """
// LANES threads side by side along the last axis, TEAM of them on each other: each of those walks along its share of
// what is reduced.
$head {
    constexpr int V = $values;
    const int lane = threadIdx.x % LANES, member = threadIdx.x / LANES;
    const index_t items = $items, reduced = $reduced;
    const index_t blocks = (items + LANES - 1) / LANES;
    for (index_t job = blockIdx.x; job < blocks$times_parts; job += gridDim.x) {
        const index_t item = job$over_parts * LANES + lane;
        $share
        $decode_item
        const auto reduced_values = [&](index_t r, $T (&value)[V]) {
            $decode_reduced
            $function(d, $coordinates, value);
        };
        First fold[V];
#pragma unroll
        for (int e = 0; e < V; ++e) fold[e] = First::empty();
        index_t r = begin + member;
        for (; r < end - (AT_ONCE - 1) * TEAM; r += AT_ONCE * TEAM) {
            $T value[AT_ONCE][V];
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) reduced_values(r + t * TEAM, value[t]);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                $T taken[AT_ONCE];
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) taken[t] = value[t][e];
                fold[e].take(taken$at_each);
            }
        }
        for (; r < end; r += TEAM) {
            $T value[V];
            reduced_values(r, value);
#pragma unroll
            for (int e = 0; e < V; ++e) {
                const $T taken[1] = {value[e]};
                fold[e].take(taken$at);
            }
        }
        $join
        $write
    }
}
"""

TALL_FLAT = """
// Every thread computes TALL values on each other, and writes them.
__device__ __forceinline__ void tall(const Data& d, $out* out) {
    const index_t items = $items;
    const index_t all = index_t(gridDim.x) * THREADS;
    for (index_t item = index_t(blockIdx.x) * THREADS + threadIdx.x; item < items; item += all) {
        $decode
        $T value[TALL];
        tall_values(d, $coordinates, value);
        const index_t place = $place;
#pragma unroll
        for (int e = 0; e < TALL; ++e) {
            const $T one[1] = {value[e]};
            if (i$a + e < d.n$a) store<1>(out + place + e$step, one);
        }
    }
}
"""

TALL_WRITE = """
const index_t place = $place;
#pragma unroll
for (int e = 0; e < V; ++e) {
    const First one[1] = {fold[e]};
    const index_t result = place + e$step;
    if (i$a + e >= d.n$a) break;
    $R value[1];
    finish(d, result, one, value);
    store<1>(out + result, value);
}
"""

COLUMNS_JOIN = """
// Those of one column join: first in a warp, then what is apart.
constexpr int APART = LANES < 32 ? THREADS / 32 : TEAM;
#pragma unroll 1
for (int offset = 16; offset >= LANES; offset /= 2)
#pragma unroll
    for (int e = 0; e < V; ++e) fold[e].merge(fold[e].from(offset));
__shared__ First others[APART - 1][LANES][V];
const int place = member * APART / TEAM;
if (place > 0 && member % (TEAM / APART) == 0)
#pragma unroll
    for (int e = 0; e < V; ++e) others[place - 1][lane][e] = fold[e];
__syncthreads();
if (member == 0)
    for (int m = 0; m < APART - 1; ++m)
#pragma unroll
        for (int e = 0; e < V; ++e) fold[e].merge(others[m][lane][e]);
__syncthreads();
"""

LATER = """
// $about
extern "C" __global__ void __launch_bounds__(THREADS)
$signature
    await_launches();
    const Data d{$data};
    $body
}
"""

OF_PARTS = """
const index_t results = $results;
const int lane = threadIdx.x % JOINERS;
const auto whole = [&](index_t result) {
    First fold = First::empty();
    for (int begin = lane; begin < parts; begin += 4 * JOINERS) {
        First some[4];    // none waits for what is made of another
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int part = begin + k * JOINERS;
            some[k] = First::empty();
            if (part < parts) some[k] = First::load(scratch + (index_t(part) * results + result), parts * results);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) fold.merge(some[k]);
    }
    return joined<JOINERS>(fold);
};
$body
"""

JOIN = """
const index_t result = (index_t(blockIdx.x) * THREADS + threadIdx.x) / JOINERS;
if (result >= results) return;
const First fold[1] = {whole(result)};
if (lane != 0) return;
$T value[1];
finish(d, result, fold, value);
scratch[result] = value[0];
"""

FINISH_ONE = """
const index_t result = (index_t(blockIdx.x) * THREADS + threadIdx.x) / JOINERS;
const First fold[1] = {whole(min(result, results - 1))};
if (lane != 0 || result >= results) return;
$T value[1];
finish(d, result, fold, value);
store<1>(out + result, value);
"""

FINISH_TWO = """
const index_t row = blockIdx.x, columns = $columns;
Second second = Second::empty();
$take
const Second fold[1] = {joined<THREADS>(second)};
if (threadIdx.x != 0) return;
$R value[1];
finish(d, row, fold, value);
store<1>(out + row, value);
"""

TAKE_WHOLES = """
#pragma unroll 8
for (index_t column = threadIdx.x; column < columns; column += THREADS) {
    const $T value[1] = {$T(scratch[row * columns + column])};
    second.take(value$at);
}
"""

TAKE_PARTS = """
const auto take = [&](index_t column, const First& first) {
    const First fold[1] = {first};
    $T value[1];
    finish(d, row * columns + column, fold, value);
    second.take(value$at);
};
if (parts == 1) {  // they are there
    $wholes
} else if (JOINERS == 1 || 2 * columns >= parts) {  // many results of few parts: a thread for each is done sooner
    for (index_t column = threadIdx.x; column < columns; column += THREADS) {
        First fold = First::empty();
        for (int part = 0; part < parts; ++part)
            fold.merge(First::load(scratch + (index_t(part) * results + row * columns + column), parts * results));
        take(column, fold);
    }
} else {
    for (index_t column = threadIdx.x / JOINERS; column < columns; column += THREADS / JOINERS) {
        const First fold = whole(row * columns + column);
        if (lane == 0) take(column, fold);
    }
}
"""

WRITE_COLUMNS = """
#pragma unroll
for (int e = 0; e < V; ++e) write(d, item * V + e, fold[e], $names);
"""

FINISH_SEVERAL = """
const index_t result = (index_t(blockIdx.x) * THREADS + threadIdx.x) / JOINERS;
const First fold = whole(min(result, results - 1));
if (lane == 0 && result < results) write(d, result, fold, $names);
"""
