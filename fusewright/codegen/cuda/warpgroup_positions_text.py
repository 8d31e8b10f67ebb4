"""The CUDA text of contractions whose positions are the rows of what warpgroups multiply, where it differs."""

from __future__ import annotations

OWNED = """
// A warpgroup owns all 8 * M_TILES channels of OWN_D x TILES_H x TILES_W times the 64 cells that one instruction takes:
// HIGH x BROAD, eight eights along w.  A warp has two of these, a thread a cell of both, ROWS_D x ROWS_H rows of which
// are computed at a time.
constexpr int M_TILES = $m_tiles, TILES_H = $tiles_h, TILES_W = $tiles_w, HIGH = $high, BROAD = $broad;
constexpr int OWN_D = $own_d, OWN_H = $own_h, OWN_W = $own_w;    // cells of a thread
constexpr int ROWS_D = $rows_d, ROWS_H = $rows_h, PER_CELL = $per_cell;    // of which along w all PER_CELL
constexpr int WARPS_H = $warps_h, WARPS_W = $warps_w, THREADS = $threads;
constexpr int BLOCK_M = 8 * M_TILES, M_BLOCKS = $m_blocks;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 8 * OWN_W * WARPS_W;
"""

ACCUMULATORS = """
// A thread has two cells of every 64, and two features of every eight.
using Accumulators = float[OWN_D * ROWS_D][PER_CELL][TILES_H * ROWS_H][TILES_W][M_TILES][4];
"""

# Else zeros may be written when the first instruction is under way, which has to end before.
AHEAD = """
float* const each = &acc[0][0][0][0][0][0];
#pragma unroll
for (int i = 0; i < int(sizeof(Accumulators) / sizeof(float)); ++i) at_hand(each[i]);
"""

# The instructions of one tap, two vectors of channels and element of the cells along d and w.
PRODUCTS = """
#pragma unroll
for (int rh = 0; rh < TILES_H * ROWS_H; ++rh)
#pragma unroll
    for (int tile = 0; tile < TILES_W; ++tile)
        $instruction(acc[rd][e][rh][tile],
                       x_row + (k * PLANE + row_d(rd) + rh / ROWS_H * HIGH * ADVANCE_H + rh % ROWS_H * ELEMENT_H +
                                tile * BROAD + column(FIRST_W + e * ELEMENT_W + tap * TAP_W)),
                       w + (tap * VECTORS + k) * BLOCK_M);
"""

PLACE = """
// Where a weight lies among those of a phase: [row of taps][tap][vector of channels][feature][channel].
template <int TAPS_W>
__device__ __forceinline__ constexpr int weight_at(int row, int tap, int channel, int feature) {
    return (((row * TAPS_W + tap) * VECTORS + channel / VECTOR) * BLOCK_M + feature) * VECTOR + channel % VECTOR;
}
"""

# Where there are more numbers per channel than a thread keeps in registers.
NUMBERS = """

// Per-channel numbers, for all threads.
Compute(*const numbers)[BLOCK_M] = reinterpret_cast<Compute(*)[BLOCK_M]>(shared_memory + STAGED);
for (int i = threadIdx.x; i < BLOCK_M; i += THREADS) {
    const int feature = first_feature + i;
    $loads
}
__syncthreads();
"""

# Values of channels that are not there are -inf.
SOFTMAX = """
// Turn values into their softmax over a position's channels, which four lanes have.
__device__ __forceinline__ void softmax(Compute (&values)[M_TILES][2]) {
    Compute largest = -Compute(INFINITY), total = 0;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) largest = fmax(largest, values[i / 2][i % 2]);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
        largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        Compute& value = values[i / 2][i % 2];
        const Compute exponential = exp2_approx(1.44269504f * (value - largest));
        $exponential;
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
    const Compute share = $share;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) values[i / 2][i % 2] $joined= share;
}
"""
