"""The CUDA text of a contraction's products on the tensor cores: operands, where lanes find them, the loops."""

from __future__ import annotations

MULTIPLY = {
    "tf32": """
using Operand = unsigned;    // a float32 rounded to tf32
using Accumulators = float[OWN_D * ROWS_D][OWN_H * ROWS_H][TILES_W][M_TILES][4];

__device__ __forceinline__ Operand input_operand($summed x) { return $x; }
__device__ __forceinline__ Operand weight_operand(Element w) { return $w; }
__device__ __forceinline__ void multiply_add(float (&d)[4], const Operand (&a)[4], const Operand (&b)[2]) {
    mma_tf32(d, a, b);
}
""",
    "halves": """
using Operand = unsigned;    // two neighbouring channels
using Accumulators = float[OWN_D * ROWS_D][OWN_H * ROWS_H][TILES_W][M_TILES][4];

// The element at hand and the one STEP behind it; side by side they are at a multiple of four bytes.
template <int STEP>
__device__ __forceinline__ Operand pair(const Element* at) {
    if constexpr (STEP == 1)
        return *reinterpret_cast<const unsigned*>(at);
    else
        return at[0].bits | unsigned(at[STEP].bits) << 16;
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const Operand (&a)[4], const Operand (&b)[2]) {
    mma_$element(d, a, b);
}
""",
    "tf32x3": """
$split

using Operand = Split;
using Accumulators = float[OWN_D * ROWS_D][OWN_H * ROWS_H][TILES_W][M_TILES][4];

__device__ __forceinline__ Operand input_operand(float x) { return split(x); }
__device__ __forceinline__ Operand weight_operand(float w) { return input_operand(w); }
__device__ __forceinline__ void multiply_add(float (&d)[4], const Operand (&a)[4], const Operand (&b)[2]) {
    const unsigned a_big[4] = {a[0].big, a[1].big, a[2].big, a[3].big}, b_big[2] = {b[0].big, b[1].big};
    const unsigned a_small[4] = {a[0].small, a[1].small, a[2].small, a[3].small}, b_small[2] = {b[0].small, b[1].small};
    float sum[4] = {};    // tensor cores truncate as they accumulate: chains stay short, and are added in float32
    mma_tf32(sum, a_small, b_big);
    mma_tf32(sum, a_big, b_small);
    mma_tf32(sum, a_big, b_big);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
}
""",
    "f64": """
using Operand = double;
using Accumulators = double[OWN_D * ROWS_D][OWN_H * ROWS_H][TILES_W][M_TILES][4];

__device__ __forceinline__ Operand input_operand(double x) { return x; }
__device__ __forceinline__ Operand weight_operand(double w) { return w; }
__device__ __forceinline__ void multiply_add(double (&d)[4], const Operand (&a)[4], const Operand (&b)[2]) {
    mma_f64(d, a, b);
}
""",
}

# Shared by both ways to multiply.
INDEXING = """
// The k indices of $row run over $order; a lane supplies $supply.
template <$sizes>
struct Lane {
    static constexpr int K = CHUNK * $count, STEPS = (K + $past) / $step;
    static __device__ __forceinline__ int k(int step, int half) { return $k; }
    static __device__ __forceinline__ bool inside(int k) { return K % $step == 0 || k < K; }
    $rows
    static __device__ __forceinline__ int x(int k) { return $channel * X_CHANNEL + $x_tap; }
};

// A phase's weights in shared memory: $weights, features spread over the banks.
template <int TAPS_D, int TAPS_H, int TAPS_W>
struct Phase {
    static constexpr int TAPS = TAPS_D * TAPS_H * TAPS_W, RUN = CHUNK * TAPS, BANKS = 128 / sizeof(Element);
    static constexpr int CHANNEL = $of_channel, TAP = $of_tap;    // steps from channel to channel and from tap to tap
    static constexpr int FEATURE = RUN + ((BANKS / 8 - RUN) % BANKS + BANKS) % BANKS;
    static __device__ __forceinline__ int at(int k) { return $channel * CHANNEL + $tap * TAP; }
};

$columns"""

ROWS_OF_TAPS = """
static __device__ __forceinline__ int x_of(int tap) {
    return tap / (TAPS_H * TAPS_W) * TAP_D + tap / TAPS_W % TAPS_H * TAP_H + tap % TAPS_W * TAP_W;
}
"""

# Where the columns of 8-column tiles are, of cells with several positions and with one.
COLUMNS = """\
// Column n of 8-column tile j is position s % PER_CELL of cell 4 * (s / PER_CELL) + n / 2, where s = 2 * j + n % 2:
// so the accumulators of a thread, columns 2 * quad and 2 * quad + 1, cover whole cells.
template <int PER_CELL>
__device__ __forceinline__ constexpr int slot_at(int s) {
    return 4 * (s / PER_CELL) * ADVANCE_W + s % PER_CELL * ELEMENT_W;
}
// The part of a column's offset that depends on the lane, and the part that depends on the tile: where cells have one
// position or an even number of them, the latter is a constant of the instruction that reads it.
template <int PER_CELL>
__device__ __forceinline__ int lane_column() {
    const int n = threadIdx.x % 32 / 4;
    return n / 2 * ADVANCE_W + (PER_CELL == 1 || PER_CELL % 2 == 0 ? n % 2 * slot_at<PER_CELL>(1) : 0);
}
template <int PER_CELL>
__device__ __forceinline__ int tile_column(int j) {
    if (PER_CELL == 1 || PER_CELL % 2 == 0) return slot_at<PER_CELL>(2 * j);
    return threadIdx.x % 8 < 4 ? slot_at<PER_CELL>(2 * j) : slot_at<PER_CELL>(2 * j + 1);
}
"""
COLUMNS_SIDE_BY_SIDE = """\
// Column n of 8-column tile j is cell 8 * j + n: the part that depends on the lane, and that which depends on the tile.
template <int PER_CELL>
__device__ __forceinline__ int lane_column() { return threadIdx.x % 32 / 4 * ADVANCE_W; }
template <int PER_CELL>
__device__ __forceinline__ constexpr int tile_column(int j) { return 8 * j * ADVANCE_W; }
"""

ACCUMULATE = """
// Add the products of all staged channels and the given taps.  An input row is read from shared memory once and is
// multiplied by all of the TOGETHER_D x TOGETHER_H taps at hand that lead from it to a row of this warp.
template <int TILES, int TAPS_D, int TAPS_H, int TAPS_W, int PER_CELL>
__device__ __forceinline__ void accumulate(Accumulators& acc, const Element* x, const Element* w, int feature) {
    using L = Lane<$sizes>;
    using P = Phase<TAPS_D, TAPS_H, TAPS_W>;
    constexpr int D = OWN_D * ROWS_D, H = OWN_H * ROWS_H;
    constexpr int AT_ONCE_D = TOGETHER_D ? TAPS_D : 1, AT_ONCE_H = TOGETHER_H ? TAPS_H : 1;
#pragma unroll 1
    for (int step = 0; step < L::STEPS; ++step) {
        const int k[2] = {L::k(step, 0), L::k(step, 1)};
        const Element* const x_lane = x + lane_column<PER_CELL>();
        const Element* const w_lane = w + feature * P::FEATURE;
        const Element* const x_k[2] = {x_lane + L::x(k[0]), x_lane + L::x(k[1])};
        const Element* const w_k[2] = {w_lane + P::at(k[0]), w_lane + P::at(k[1])};
#pragma unroll 1
        for (int td_0 = 0; td_0 < $turns_d; td_0 += AT_ONCE_D)
#pragma unroll 1
            for (int th_0 = 0; th_0 < $turns_h; th_0 += AT_ONCE_H) {
                Operand a[AT_ONCE_D][AT_ONCE_H][M_TILES][4];
#pragma unroll
                for (int td = 0; td < AT_ONCE_D; ++td)
#pragma unroll
                    for (int th = 0; th < AT_ONCE_H; ++th)
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const int tap = ((td_0 + td) * TAPS_H + th_0 + th) * TAPS_W * P::TAP;
                                const int at = (16 * m + 8 * (i % 2)) * P::FEATURE + tap;
                                a[td][th][m][i] = $weight;
                            }
                // Every row that is read, in turn: those that an earlier row and tap read too are passed over.
#pragma unroll
                for (int first_d = 0; first_d < D * AT_ONCE_D; ++first_d)
#pragma unroll
                    for (int first_h = 0; first_h < H * AT_ONCE_H; ++first_h) {
                        const int at_d = row_d(first_d / AT_ONCE_D) + first_d % AT_ONCE_D * TAP_D;
                        const int at_h = row_h(first_h / AT_ONCE_H) + first_h % AT_ONCE_H * TAP_H;
                        bool read = false;
#pragma unroll
                        for (int r = 0; r < first_d; ++r) read |= row_d(r / AT_ONCE_D) + r % AT_ONCE_D * TAP_D == at_d;
#pragma unroll
                        for (int r = 0; r < first_h; ++r) read |= row_h(r / AT_ONCE_H) + r % AT_ONCE_H * TAP_H == at_h;
                        if (read) continue;
#pragma unroll
                        for (int j = 0; j < TILES; ++j) {
                            const int at = at_d + td_0 * TAP_D + at_h + th_0 * TAP_H + tile_column<PER_CELL>(j);
                            Operand b[2];
#pragma unroll
                            for (int i = 0; i < 2; ++i) b[i] = $input;
#pragma unroll
                            for (int rd = 0; rd < D; ++rd)
#pragma unroll
                                for (int td = 0; td < AT_ONCE_D; ++td) {
                                    if (row_d(rd) + td * TAP_D != at_d) continue;
#pragma unroll
                                    for (int rh = 0; rh < H; ++rh)
#pragma unroll
                                        for (int th = 0; th < AT_ONCE_H; ++th) {
                                            if (row_h(rh) + th * TAP_H != at_h) continue;
#pragma unroll
                                            for (int m = 0; m < M_TILES; ++m)
                                                multiply_add(acc[rd][rh][j][m], a[td][th][m], b);
                                        }
                                }
                        }
                    }
            }
    }
}
"""
