"""The fixed parts of scans in CUDA C++."""

from __future__ import annotations

from fusewright.ir.ops import ScanKind

# What joins an element `b` to those ahead of it, `a`: NaN once there is one.
JOIN: dict[ScanKind, str] = {
    "sum": "return a + b;",
    "prod": "return a * b;",
    "max": "return greater(a, b);",
    "min": "return smaller(a, b);",
    "logsumexp": """
const bool first = a > b || a != a;
const T most = first ? a : b, least = first ? b : a;
return most == least && fabs(most) == T(INFINITY) ? most : most + log1p(exp(least - most));
""",
}

JOINED = """
template <typename T>
__device__ __forceinline__ T joined(T a, T b) {
    $join
}
"""

ACROSS = """
// Prefixes of one value of each of WIDTH neighbouring threads: `ahead` of this one, and of all of them.
template <int WIDTH, typename T>
__device__ __forceinline__ T across(T value, T& ahead) {
    const int lane = threadIdx.x % WIDTH;
#pragma unroll
    for (int offset = 1; offset < WIDTH; offset *= 2) {
        const T before = __shfl_up_sync(~0u, value, offset, WIDTH);
        if (lane >= offset) value = joined(before, value);
    }
    const T before = __shfl_up_sync(~0u, value, 1, WIDTH);  // nothing is taken away: of infinities it would be NaN
    ahead = lane > 0 ? before : T($neutral);
    return __shfl_sync(~0u, value, WIDTH - 1, WIDTH);
}
"""

TURNED = """
// Neighbours in the opposite order.
template <int COUNT, typename T>
__device__ __forceinline__ void flip(T (&value)[COUNT]) {
#pragma unroll
    for (int e = 0; e < COUNT / 2; ++e) {
        const T other = value[COUNT - 1 - e];
        value[COUNT - 1 - e] = value[e];
        value[e] = other;
    }
}
"""

ROWS = """
// A team of threads per row, which walks along it: read once.  Of every tile a thread has GROUPS items, TEAM apart.
template <bool WIDE>
__device__ __forceinline__ void rows(const Data& d, $out* out) {
    constexpr int V = VALUES<WIDE>, GROUPS = ITEMS<WIDE>, WIDTH = TEAM < 32 ? TEAM : 32;
    const index_t team = index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    const index_t rows = $rows, items = $items;
    const index_t row = min(team, rows - 1);  // every thread takes part in what is joined
    const int lane = threadIdx.x % TEAM;
    $decode_row
    $C carry = $neutral;  // the join of what lies ahead
    $scale
    $declare
    for (index_t tile = 0; tile < items;$step) {
        $T value[GROUPS][V], ahead[GROUPS], whole[GROUPS];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            // Loads need no branch then: what is joined behind the last item reaches none ahead of it.
            const index_t item = $read;
            $decode_item
            entry<WIDE>(d, $coordinates, value[g]);
            $turn_read
            $scaled
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
            for (int e = 1; e < V; ++e) value[g][e] = joined(value[g][e - 1], value[g][e]);
            whole[g] = across<WIDTH>(value[g][V - 1], ahead[g]);
        }
        $join
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            $advance
            $prefixes
            $unscaled
            const index_t item = $written;
            if ($inside && team < rows) {
                $decode_item
                $turn_written
                $R results[V];
                result<WIDE>(d, $coordinates, value[g], results);
                $write
            }
        }
        $turn
        $next
    }
    $finish
}
"""

# Sums in a tile are of stretches, too, which may leave float32's range where no prefix does.
FITS = """
// Whether a sum of a stretch$several within float32's range; a NaN is in none.
__device__ __forceinline__ bool fits(float sum) { return fabs(sum) <= $most; }
"""

SCALE = """
// Where a sum of a stretch overflows, which may be no prefix, a tile is summed anew, and all that follows, each
// element divided by as many as a tile has.
bool scaled = false;
constexpr float ELEMENTS = $elements;
"""

SCALED = """
#pragma unroll
for (int e = 0; e < V; ++e) $value[e] *= scaled ? 1.0f / ELEMENTS : 1.0f;
"""

UNSCALED = """
#pragma unroll
for (int e = 0; e < V; ++e)
    if (scaled) $value[e] *= ELEMENTS;
"""

OVERFLOWS = """
bool overflows = false;
#pragma unroll
for (int g = 0; g < GROUPS; ++g) overflows = overflows || !fits(ahead[g]) || !fits(whole[g]);
"""

OVERFLOWS_OF_COLUMNS = """
bool overflows = false;
#pragma unroll
for (int e = 0; e < V; ++e) overflows = overflows || !fits(value[AT_ONCE - 1][e]);
"""

# Where a thread of those that share a scale has such a sum.
AGAIN = """
if ($some && !scaled) {
    scaled = true;
    carry *= 1.0f / ELEMENTS;
    continue;
}
"""

AGAIN_OF_COLUMNS = """
if ($some && !scaled) {
    scaled = true;
#pragma unroll
    for (int e = 0; e < V; ++e) carry[e] *= 1.0f / ELEMENTS;
    continue;
}
"""

WRITE = """
store<V>(out + row * $length + item * V, results);
"""

# Where what comes of prefixes is summed over rows.
FOLD = """
#pragma unroll
for (int e = 0; e < V; ++e) sums[0] += results[e];
"""

FOLD_FEATURES = """
#pragma unroll
for (int c = 0; c < FEATURES; ++c) {
    $F feature[1];
    features<WIDE>(d, $before, c, results, feature);
    sums[c] += feature[0];
}
"""

FINISH_FOLD = """
#pragma unroll
for (int c = 0; c < FEATURES; ++c)
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) sums[c] += __shfl_xor_sync(~0u, sums[c], offset);
$across
if (lane == 0 && team < rows) {
#pragma unroll
    for (int c = 0; c < FEATURES; ++c) {
        const $S result[1] = {$S(sums[c]$divided)};
        store<1>(out + row * FEATURES + c, result);
    }
}
"""

FOLD_ACROSS = """
__shared__ double of_warps[FEATURES][TEAM / 32];
#pragma unroll
for (int c = 0; c < FEATURES; ++c)
    if (lane % 32 == 0) of_warps[c][lane / 32] = sums[c];
__syncthreads();
#pragma unroll
for (int c = 0; c < FEATURES; ++c) {
    sums[c] = 0;
    for (int warp = 0; warp < TEAM / 32; ++warp) sums[c] += of_warps[c][warp];
}
"""

OF_ROWS = """
#pragma unroll
for (int e = 0; e < V; ++e) value[g][e] = joined(ahead[g], value[g][e]);
"""

# A prefix that ends ahead of its own element is the one of the element before.
OF_ROWS_AHEAD = """
#pragma unroll
for (int e = V - 1; e > 0; --e) value[g][e] = joined(ahead[g], value[g][e - 1]);
value[g][0] = ahead[g];
"""

# Where a warp has a row, or several of them.
ADVANCE_WARP = """
ahead[g] = $T(joined(carry, $C(ahead[g])));
carry = joined(carry, $C(whole[g]));
"""

# Where a block has a row: its warps tell each other what they joined, in one of two places by turns, so that the next
# tile need not wait for those that still read.
DECLARE_BLOCK = """
__shared__ $C wholes[2][GROUPS][TEAM / 32];
int turn = 0;
"""

JOIN_BLOCK = """
#pragma unroll
for (int g = 0; g < GROUPS; ++g)
    if (lane % 32 == 0) wholes[turn][g][lane / 32] = whole[g];
$shared
"""

ADVANCE_BLOCK = """
$C start = $neutral;
#pragma unroll
for (int warp = 0; warp < TEAM / 32; ++warp) {
    if (warp == lane / 32) start = carry;
    carry = joined(carry, wholes[turn][g][warp]);
}
ahead[g] = $T(joined(start, $C(ahead[g])));
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
        const bool own = job * LANES + lane < columns;
        const index_t column = min(job * LANES + lane, columns - 1);  // every thread takes part in what is joined
        $decode_column
        $C carry[V];  // the joins of what lies ahead
#pragma unroll
        for (int e = 0; e < V; ++e) carry[e] = $neutral;
        $scale
        for (index_t tile = 0; tile < items;$step) {
            const index_t begin = tile + member * AT_ONCE;
            $T value[AT_ONCE][V], ahead[V];
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                // Loads need no branch then: what is joined behind the last item reaches none ahead of it.
                const index_t item = $read;
                $decode_item
                entry<WIDE>(d, $coordinates, value[t]);
                $scaled
            }
#pragma unroll
            for (int t = 1; t < AT_ONCE; ++t)
#pragma unroll
                for (int e = 0; e < V; ++e) value[t][e] = joined(value[t - 1][e], value[t][e]);
            $join
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                $T prefix[V];
#pragma unroll
                for (int e = 0; e < V; ++e) prefix[e] = $prefix;
                $unscaled
                const index_t item = $written;
                if (!($inside) || !own) continue;
                $decode_item
                $R results[V];
                result<WIDE>(d, $coordinates, prefix, results);
                store<V>(out + ($place), results);
            }
            $next
        }
    }
}
"""

ALONE = """
$shared
#pragma unroll
for (int e = 0; e < V; ++e) {
    ahead[e] = $T(carry[e]);
    carry[e] = joined(carry[e], $C(value[AT_ONCE - 1][e]));
}
"""

DECLARE_MEMBERS = """
__shared__ $T wholes[2][TEAM][V][LANES];  // by turns: the next tile need not wait for those that still read
int turn = 0;
"""

MEMBERS = """
#pragma unroll
for (int e = 0; e < V; ++e) wholes[turn][member][e][lane] = value[AT_ONCE - 1][e];
$shared
#pragma unroll
for (int e = 0; e < V; ++e) {
    $T all = $neutral, before = all;
#pragma unroll 8
    for (int m = 0; m < TEAM; ++m) {
        if (m == member) before = all;
        all = joined(all, wholes[turn][m][e][lane]);
    }
    ahead[e] = $T(joined(carry[e], $C(before)));
    carry[e] = joined(carry[e], $C(all));
}
turn ^= 1;
"""
