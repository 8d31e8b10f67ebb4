"""The CUDA text of writing a contraction's values, of the end of its blocks, and of the second kernel."""

from __future__ import annotations

PAIR = """
// Two neighbours in memory, written at once.
struct alignas(2 * sizeof($type)) Pair { $type first, second; };
"""

ENDS = """
// The greatest and the least of some values, at one of which what follows has its maximum: it falls up to a point, and
// rises from there.
struct Ends {
    Compute greatest = -Compute(INFINITY), least = Compute(INFINITY);
    Ends() = default;
    __device__ __forceinline__ Ends(Compute value) : greatest(value), least(value) {}
    __device__ __forceinline__ Ends(Compute greatest, Compute least) : greatest(greatest), least(least) {}
};
__device__ __forceinline__ Ends joined(Ends a, Ends b) {
    return {greater(a.greatest, b.greatest), smaller(a.least, b.least)};
}
"""

# A row's end may lie between two neighbours where its length is odd.
WRITE_PAIR = """
// Write two neighbours of an output row of which `left` elements follow, in one store where rows have an `even` length.
struct alignas(2 * sizeof($type)) Pair { $type first, second; };
__device__ __forceinline__ void write_pair($type* to, $type first, $type second, int left, bool even) {
    if (even && left > 0) *reinterpret_cast<Pair*>(to) = Pair{first, second};
    if (!even && left > 0) to[0] = first;
    if (!even && left > 1) to[1] = second;
}
"""

WRITE_RUN = """
// Write neighbours of an output row, of which `left` elements follow if they are `there`: in one store where every row
// is a number of such runs.
struct alignas($count * sizeof($type)) Run { $type values[$count]; };
__device__ __forceinline__ void write_run($type* to, Compute (&run)[$count], bool there, int left, int row, int lane) {
    if (row % $count == 0) {
        const Run whole = {$narrowed};
        if (there && left > 0) *reinterpret_cast<Run*>(to) = whole;
        return;
    }
    $others
}
"""

EACH = """
#pragma unroll
for (int i = 0; i < $count; ++i)
    if (there && left > i) to[i] = narrow_to<$type>::of(run[i]);
"""

# Lane l has elements 4 * l + i of a row, and then 4 * i + l: a matrix is transposed.
EACH_OF_QUAD = """
// Four lanes, which have neighbouring runs, give each other elements first, to write to one part of memory at a time.
#pragma unroll
for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const Compute got = __shfl_xor_sync(0xffffffffu, lane & bit ? run[i] : run[i | bit], bit);
        if (lane & bit) run[i] = got;
        else run[i | bit] = got;
    }
#pragma unroll
for (int i = 0; i < 4; ++i)
    if (there && left > 4 * i - 3 * lane) to[4 * i - 3 * lane] = narrow_to<$type>::of(run[i]);
"""

PLANE = """
const long long plane = (long long)$p * $q * forgotten($r);    // from feature to feature
"""

OUT_ROW = """
$type* const $name = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature$first) * plane);
"""

ZERO = """
// Numbers are here before any input is on its way: who waits for one of a thread's loads may wait for them all.
const int zero = D >> 31;    // lengths are not negative, which the compiler does not know
"""

PAIRS = """
#pragma unroll
for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
    for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
        for (int j = 0; j < $tiles; ++j) {
            const int p = $p, q = $q;
            const int r = cell_w + 4 * warp_w * OWN_W + 8 * j + 2 * quad;    // of the first of two
            const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q);
            $pointer
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;
                    const $type first = narrow_to<$type>::of($first), second = narrow_to<$type>::of($second);
                    if (inside && feature < O) write_pair(&$stored_at, first, second, R - r, R % 2 == 0);
                }
        }
"""

READ = """
// Memory that is read at once.
template <int BYTES> struct Words { uint4 words; };
template <> struct Words<8> { uint2 words; };
template <> struct Words<4> { unsigned words; };
template <> struct Words<2> { unsigned short words; };

// COUNT neighbours of an operand, which nobody writes to meanwhile; zeros where they are not `there`.
template <int COUNT, class T>
__device__ __forceinline__ void read_neighbours(const T* from, bool there, Compute (&to)[COUNT]) {
    using Together = decltype(Words<COUNT * sizeof(T)>::words);
    union { Together words; T values[COUNT]; } read = {};
    if (there) read.words = __ldg(reinterpret_cast<const Together*>(from));
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = widened(read.values[i]);
}
template <class T>
__device__ __forceinline__ Compute read_element(const T* from, bool there) {
    Compute to[1];
    read_neighbours(from, there, to);
    return to[0];
}
// Neighbours of a row, of which `left` elements follow: at once where every row is a number of such runs.
template <int COUNT, class T>
__device__ __forceinline__ void read_run(const T* from, bool there, int left, int row, Compute (&to)[COUNT]) {
    if (row % COUNT == 0) return read_neighbours(from, there && left > 0, to);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = read_element(from + i, there && left > i);
}
"""

# Rows go to memory from shared memory (`fusewright.schedule.output_rows`).
WRITE_ROWS = """
// Rows of eight features wait in shared memory, of the POSITIONS that a team of warps has side by side.
constexpr int POSITIONS = $positions, ROW_PITCH = $pitch, TEAM = $warps;    // a team's warps
struct alignas(8) Neighbours { float first, second; };

// Write them, each warp of the team some, whole parts of memory at a time, of which a lane has RUN neighbours: the
// first one begins at `to`; there are so many `features`, and `left` elements of their rows.  What several rows have is
// read before any of it is written.
template <int RUN$class>
__device__ __forceinline__ void write_runs(const float* rows, $type* to, long long plane, int features, int left,
                                           int member, int lane$more) {
    struct alignas($together * sizeof(float)) Held { float element[RUN]; };
    struct alignas(RUN * sizeof($type)) Run { $type element[RUN]; };
    constexpr int PART = 32 * RUN, PARTS = (POSITIONS + 2 * PART - RUN - 1) / PART, AT_ONCE = $at_once;
#pragma unroll 1
    for (int first = member; first < 8; first += AT_ONCE * TEAM) {
        Held values[AT_ONCE][PARTS];
        int at[AT_ONCE];    // a lane's first column, before the row in parts that it has the end of
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int feature = first + i * TEAM;
            at[i] = RUN * lane - int(reinterpret_cast<unsigned long long>(to + feature * plane) / sizeof($type) % PART);
#pragma unroll
            for (int k = 0; k < PARTS; ++k) {
                int column = at[i] + PART * k;
                if (k == 0) column = max(column, 0);
                if (PART * (k + 1) > POSITIONS) column = min(column, POSITIONS - RUN);
                values[i][k] = *reinterpret_cast<const Held*>(rows + feature * ROW_PITCH + column);
            }
        }
        $reads
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int feature = first + i * TEAM, count = feature < features ? left : 0;
            $type* const row = to + feature * plane + at[i];
#pragma unroll
            for (int k = 0; k < PARTS; ++k) {
                if (at[i] >= count - PART * k || (k == 0 && at[i] < 0)) continue;
                Run run;
#pragma unroll
                for (int j = 0; j < RUN; ++j) run.element[j] = narrow_to<$type>::of($change);
                *reinterpret_cast<Run*>(row + PART * k) = run;
            }
        }
    }
}
$template
__device__ __forceinline__ void write_rows(const float* rows, $type* to, long long plane, int features, int left,
                                           int member, int lane$more) {
    $write
}
"""

WRITE_RUNS = """
const bool even = (reinterpret_cast<unsigned long long>(to) / sizeof(*to) | plane | left$places) % 2 == 0;
if (even)    // rows begin and end with whole pairs
    write_runs<2>(rows, to, plane, features, left, member, lane$given);
else
    write_runs<1>(rows, to, plane, features, left, member, lane$given);
"""

# Elements of two bytes are held as they are written.
WRITE_ROWS_OF_HALF = """
// Rows of eight features wait in shared memory, of the POSITIONS that a team of warps has side by side.
constexpr int POSITIONS = $positions, ROW_PITCH = $pitch, TEAM = $warps;    // a team's warps
struct alignas(4) Word { $type first, second; };

// Write them, each warp of the team some, LANES of it one: the first row begins at `to`; there are so many `features`,
// and `left` elements of their rows.  Of whole sectors a lane has a half, of those that a row has a part of a word.
__device__ __forceinline__ void write_rows(const $type* rows, $type* to, long long plane, int features, int left,
                                           int member, int lane) {
    constexpr int LANES = 8 > 4 * TEAM ? 8 : 4 * TEAM, AT_ONCE = 32 / LANES, SECTOR = 16, VECTOR = 8;
    constexpr int VECTORS = (POSITIONS + 2 * SECTOR - 2) / SECTOR * 2;    // of a row that begins within a sector
#pragma unroll 1
    for (int first = AT_ONCE * member; first < 8; first += AT_ONCE * TEAM) {
        const int feature = first + lane / LANES, of_row = lane % LANES;
        const $type* const held = rows + feature * ROW_PITCH;
        $type* const row = to + feature * plane;
        const int ahead = int(reinterpret_cast<unsigned long long>(row) / sizeof($type) % SECTOR);    // of the row
        const int count = feature < features ? left : 0;
        // Vectors that begin between words of shared memory are made of those of five.
        const int column = VECTOR * of_row - ahead, sector = column - of_row % 2 * VECTOR;
        const unsigned by = column % 2 * 16;
#pragma unroll
        for (int k = 0; k < VECTORS; k += LANES) {
            if ((k == 0 && sector < 0) || sector + VECTOR * k + SECTOR > count) continue;
            const unsigned* const from = reinterpret_cast<const unsigned*>(held + (column & ~1) + VECTOR * k);
            unsigned words[5];
#pragma unroll
            for (int j = 0; j < 5; ++j) words[j] = from[j];
            *reinterpret_cast<uint4*>(row + column + VECTOR * k) = uint4{
                __funnelshift_r(words[0], words[1], by), __funnelshift_r(words[1], words[2], by),
                __funnelshift_r(words[2], words[3], by), __funnelshift_r(words[3], words[4], by)};
        }
#pragma unroll
        for (int end = 0; end < 2; ++end) {
            const int begin = end ? (ahead + count) / SECTOR * SECTOR - ahead : -ahead, at = begin + 2 * of_row;
            if (of_row >= SECTOR / 2 || (end ? begin < 0 : ahead == 0)) continue;
            const bool has_first = unsigned(at) < unsigned(count), has_second = unsigned(at + 1) < unsigned(count);
            if (has_first && has_second) *reinterpret_cast<Word*>(row + at) = Word{held[at], held[at + 1]};
            else if (has_first) row[at] = held[at];
            else if (has_second) row[at + 1] = held[at + 1];
        }
    }
}
"""

ROWS_THERE = """
$held* const team_rows = reinterpret_cast<$held*>(shared_memory + STAGED$behind) + $team * 8 * ROW_PITCH;
"""

# Of a thread's rows along d and h, in two loops.
ROWS = """
const int p = $p, q = $q, first_r = $first;    // of the team's first position
const bool inside = unsigned(p) < unsigned($P) && unsigned(q) < unsigned($Q);
const int left = inside ? max(0, min($R - first_r, POSITIONS)) : 0;
$type* const to = forgotten(out_features + unsigned((p * $Q + q) * $R + first_r));
$beside
$eights
"""

# The features of eight rows, from so many on: of a thread's tiles of features, and halves of those.
EIGHT_ROWS = """
$sync;    // until the rows before have been read
$held
$sync;
write_rows(team_rows, to + ($first) * plane, plane, O - first_feature - ($first), left, $member, lane$given);
"""

CLOSE_POSITIONS = """
// Over the $count lanes that share channels, then over the warps that do, in a fixed order.
__syncthreads();
$total(*const across)[BLOCK_M] = reinterpret_cast<$total(*)[BLOCK_M]>(shared_memory);
#pragma unroll
for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        $total value = $own;
#pragma unroll
        for (int distance = $nearest; distance <= $farthest; distance *= 2) value = $shuffled;
        if ($first) across[warp_h * WARPS_W + warp_w][$feature] = value;
    }
__syncthreads();
for (int i = threadIdx.x; i < BLOCK_M && first_feature + i < O; i += THREADS) {
    $total value = across[0][i];
    for (int other = 1; other < WARPS_H * WARPS_W; ++other) value = $warps;
    $target = value;
}
"""

CLOSE_ALL = """
// Over the lanes, then over the warps, in a fixed order.
__syncthreads();
$total* const across = reinterpret_cast<$total*>(shared_memory);
$total value = $own;
#pragma unroll
for (int distance = 1; distance < 32; distance *= 2) value = $shuffled;
if (lane == 0) across[warp] = value;
__syncthreads();
if (threadIdx.x == 0) {
    for (int other = 1; other < THREADS / 32; ++other) value = $warps;
    $target = value;
}
"""

FINISH = """
// Fold the partial results of the blocks, in their order: out[i] over partial[i / rows][split][i % rows].
extern "C" __global__ void __launch_bounds__($threads) ${name}_finish(const $partial* __restrict__ partial,
    $parameters$element* __restrict__ out, long long results, int splits, int rows, long long count) {
    await_launches();
    const long long i = (long long)blockIdx.x * $threads + threadIdx.x;
    if (i >= results) return;
    $behind
    const $partial* from = partial + i / rows * splits * rows + i % rows;
    $total value = from[0];
    for (int split = 1; split < splits; ++split) value = $join;
    out[i] = narrow_to<$element>::of($result);
}
"""

FINISH_SAMPLE = """
// One block per sample: fold the partial results of its blocks, in their order, and carry on from there.
extern "C" __global__ void __launch_bounds__($threads) ${name}_finish(const $total* __restrict__ partial,
    $parameters$element* __restrict__ out, int splits, int rows, long long count) {
    await_launches();
    __shared__ $compute folded[$rows];
    const int sample = blockIdx.x;
    for (int i = threadIdx.x; i < $rows; i += $threads) {
        const $total* from = partial + (long long)sample * splits * rows + i;
        $total value = from[0];
        for (int split = 1; split < splits; ++split) value = $join;
        folded[i] = $result;
    }
    __syncthreads();
    $body
}
"""
