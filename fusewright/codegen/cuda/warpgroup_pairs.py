"""The CUDA text of contractions that warpgroups multiply where a chunk has an odd number of vectors (sm_90a).

An instruction multiplies two vectors, and a matrix says how many columns the second one is behind the first.  So the
last vectors of two rows of taps are multiplied together, and nothing is staged or multiplied in vain.
"""

from __future__ import annotations

CONSTANTS = """
// The last vectors of two rows of taps are multiplied together: the nearer columns first.  Of a row that has no other,
// those of taps NEXT_TAP apart are, whose columns are BESIDE apart for every position; what is left meets half its
// weights, twice.
constexpr int LAST = (VECTORS - 1) * PLANE, TAP_ROWS = $tap_rows, NEXT_TAP = $next_tap;
constexpr int BESIDE = NEXT_TAP * (TAP_W < 0 ? -TAP_W : TAP_W) / SKIP;
// Columns from the first row of taps to another one.
template <int TAPS_H>
__device__ __forceinline__ constexpr int row_of_taps(int row) { return row / TAPS_H * TAP_D + row % TAPS_H * TAP_H; }
// The last vectors of a matrix that begins so many columns on, as far from the others.
__device__ __forceinline__ constexpr unsigned long long last_vectors(unsigned long long x, int start, int distance) {
    return x + (LAST + start) + ((unsigned long long)(long long)(distance - PLANE) << 16);
}
"""

MULTIPLY = """
$accumulators

// Start adding the products of one tap and two vectors of channels, whose columns lie as one instruction wants them,
// whichever tap it is: it only starts elsewhere.
template <int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void add_products(Accumulators& acc, unsigned long long x_row, unsigned long long w,
                                             int tap) {
#pragma unroll
    for (int rd = 0; rd < $planes; ++rd)
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e)
            $products
}

// Start adding the products of a staged chunk with `rows` rows of taps from `first` on.
template <int TAPS_H, int TAPS_W, int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void multiply(Accumulators& acc, unsigned long long x, unsigned long long w, int first,
                                         int rows) {
    $ahead
    warpgroup_arrive();
    $others
#pragma unroll $unroll_rows
    for (int row = first; row + 1 < first + rows; row += 2) {
        const int one = row_of_taps<TAPS_H>(row), other = row_of_taps<TAPS_H>(row + 1), start = min(one, other);
        const unsigned long long x_rows = last_vectors(x, start, max(one, other) - start);
#pragma unroll
        for (int tap = 0; tap < TAPS_W; ++tap)
            add_products<ELEMENTS, FIRST_W>(acc, x_rows, w + 2 * tap * $weights_m, tap);
        w += 2 * TAPS_W * $weights_m;
    }
    if (rows % 2) {
        const int start = row_of_taps<TAPS_H>(first + rows - 1);
#pragma unroll
        for (int tap = 0; tap < TAPS_W; ++tap)
            if (tap / NEXT_TAP % 2 == 0) {
                const bool two = tap + NEXT_TAP < TAPS_W;
                add_products<ELEMENTS, FIRST_W>(acc, last_vectors(x, start, two ? BESIDE : 0), w,
                                                two && TAP_W < 0 ? tap + NEXT_TAP : tap);
                w += 2 * $weights_m;
            }
    }
    warpgroup_commit();
}
"""

# The products of all vectors but the last of each tap.
OTHERS = """
#pragma unroll $unroll_rows
for (int row = first; row < first + rows; ++row) {
#pragma unroll $unroll
    for (int k = 0; k < VECTORS - 1; k += 2)
#pragma unroll
        for (int tap = 0; tap < TAPS_W; ++tap)
            add_products<ELEMENTS, FIRST_W>(acc, x + (row_of_taps<TAPS_H>(row) + k * PLANE),
                                            w + (tap * (VECTORS - 1) + k) * $weights_m, tap);
    w += TAPS_W * (VECTORS - 1) * $weights_m;
}
"""

PLACE = """
// Lay a weight where its products read it.  Of rows of taps that are staged at a time: all vectors but the last,
// [row of taps][tap][vector][$column][channel]; the last of two rows, [two rows][tap][row][$column][channel]; those of
// taps of a row that has no other, [two taps][tap][$column][channel].
template <int ROWS, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void put_weight($operand* to, int row, int tap, int channel, int $column, $operand weight) {
    constexpr int MATRIX = $weights_m * VECTOR;    // elements
    $order
    const int first = row / TAP_ROWS * TAP_ROWS, rows = min(TAP_ROWS, ROWS - first);
    to += first * TAPS_W * VECTORS * MATRIX + $place * VECTOR + channel % VECTOR;
    if (channel / VECTOR < VECTORS - 1) {
        to[(((row - first) * TAPS_W + tap) * (VECTORS - 1) + channel / VECTOR) * MATRIX] = weight;
        return;
    }
    to += rows * TAPS_W * (VECTORS - 1) * MATRIX;
    const int other = row % 2 ? row - 1 : row + 1, beside = tap / NEXT_TAP % 2 ? tap - NEXT_TAP : tap + NEXT_TAP;
    if (other < ROWS) {
        const bool second = row_of_taps<TAPS_H>(other) < row_of_taps<TAPS_H>(row);
        to[(2 * ((row - first) / 2 * TAPS_W + tap) + second) * MATRIX] = weight;
        return;
    }
    to += 2 * (rows / 2 * TAPS_W + tap / (2 * NEXT_TAP) * NEXT_TAP + tap % NEXT_TAP) * MATRIX;
    if (beside < TAPS_W)
        to[TAP_W * beside < TAP_W * tap ? MATRIX : 0] = weight;
    else
        to[0] = to[MATRIX] = $half;
}
"""

PUT = "put_weight<TAPS_D * TAPS_H, TAPS_H, TAPS_W>(to, tap / TAPS_W, tap % TAPS_W, own, feature, {value});"
PUT_SPREAD = "put_weight<ROWS, TAPS_H, 1>(to, row, 0, own, column, {value});"

# Of float32, and of half precisions: exact, but for the smallest numbers there are.
HALF, HALF_OF_BITS = "0.5f * weight", "narrow_to<{operand}>::of(0.5f * widened(weight))"
