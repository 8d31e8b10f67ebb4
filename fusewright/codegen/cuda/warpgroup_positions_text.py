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
$spread
$cells
"""

CELLS = """
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 8 * OWN_W * WARPS_W$lost;
"""

# Of taps that are spread.
SPREAD = """
// Columns are products of one position with every tap along w of every feature, [tap][feature], which are added up in
// shared memory; of the last cells of a row some are elsewhere, so that these only help others.
constexpr int SPREAD = $spread, LOST = $lost;
"""

ACCUMULATORS = """
// A thread has two cells of every 64, and two features of every eight.
using Accumulators = float[OWN_D * ROWS_D][PER_CELL][TILES_H * ROWS_H][TILES_W][M_TILES][4];
"""

SPREAD_ACCUMULATORS = """
// A thread has two cells of every 64, and two columns of every eight.
using Accumulators = float[OWN_D * ROWS_D][PER_CELL][TILES_H * ROWS_H][TILES_W][SPREAD / 8][4];
// The same of features, once their taps are added up.
using Sums = float[OWN_D * ROWS_D][PER_CELL][TILES_H * ROWS_H][TILES_W][M_TILES][4];

// Add up what the taps of a row of each feature give: `tap` reads the input TAP_W columns on, which another thread may
// have multiplied.  One row of cells of every warp at a time goes through shared memory: [column][element][row][cell].
// This thread's first cell is there at `place`, its second one AGAIN behind.
template <int TAPS_W, int FIRST_W>
__device__ __forceinline__ void add_taps(const Accumulators& products, Sums& sums, float* shared, int place, int quad) {
    constexpr int CELLS = $cells, AGAIN = $again, COLUMN = PER_CELL * CELLS + 4;    // for the banks
#pragma unroll
    for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
        for (int rh = 0; rh < TILES_H * ROWS_H; ++rh) {
            __syncthreads();    // until others have read what they put there
#pragma unroll
            for (int i = 0; i < PER_CELL * TILES_W * SPREAD / 2; ++i) {
                const int e = i / (TILES_W * SPREAD / 2), tile = i / (SPREAD / 2) % TILES_W, j = i / 4 % (SPREAD / 8);
                shared[(8 * j + 2 * quad + i % 2) * COLUMN + e * CELLS + place + tile * BROAD + i / 2 % 2 * AGAIN] =
                    products[rd][e][rh][tile][j][i % 4];
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < PER_CELL * TILES_W * M_TILES * 4; ++i) {
                const int e = i / (TILES_W * M_TILES * 4), tile = i / (M_TILES * 4) % TILES_W, m = i / 4 % M_TILES;
                const int feature = 8 * m + 2 * quad + i % 2;
                float sum = 0;
                if (feature < O)
#pragma unroll
                    for (int tap = 0; tap < TAPS_W; ++tap) {
                        const int w = FIRST_W + e * ELEMENT_W + tap * TAP_W;
                        sum += shared[(tap * O + feature) * COLUMN + w % SKIP * CELLS + w / SKIP + place +
                                      tile * BROAD + i / 2 % 2 * AGAIN];
                    }
                sums[rd][e][rh][tile][m][i % 4] = sum;
            }
        }
}
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
        $instruction($sums,
                       x_row + (${of_x}row_d(rd) + rh / ROWS_H * HIGH * ADVANCE_H + rh % ROWS_H * ELEMENT_H +
                                tile * BROAD + column(FIRST_W + e * ELEMENT_W + tap * TAP_W)),
                       w$of_w);
"""

# With positions in registers, which are multiplied by every row of taps that reads them.
MULTIPLY_HELD = """
$accumulators

// Vectors of one column after the other, of each the part that a lane multiplies.
struct Column { unsigned words[4]; };

// A warpgroup's rows of the input, from the first that a cell reads to the last, and whether a row of taps reads one.
template <int TAPS_H>
struct Rows {
    static constexpr int APART = ROW, TAPS = (TAPS_H - 1) * TAP_H, FIRST = TAPS < 0 ? TAPS : 0;
    static constexpr int COUNT = (row_h(TILES_H * ROWS_H - 1) + (TAPS < 0 ? -TAPS : TAPS)) / APART + 1;
    static __device__ __forceinline__ constexpr bool read(int row, int rh, int tap) {
        return row_h(rh) + tap * TAP_H == FIRST + row * APART;
    }
    static __device__ __forceinline__ constexpr bool read(int row) {
        for (int i = 0; i < TILES_H * ROWS_H * TAPS_H; ++i)
            if (read(row, i / TAPS_H, i % TAPS_H)) return true;
        return false;
    }
};

// Add the products of a staged chunk with `rows` rows of taps from `first` on: all of some planes of the kernel.  Rows
// of the input are read to registers once, while the tensor cores are busy with others, and multiplied by all rows of
// taps that cells read them with.
template <int TAPS_H, int TAPS_W, int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void multiply(Accumulators& acc, const Column* x, unsigned long long w, int first,
                                         int rows) {
    using R = Rows<TAPS_H>;
    // Pairs of vectors that are written out one behind the other, and sets of rows that they come to: a thread has two.
    constexpr int OF_TAP = OWN_D * ROWS_D * ELEMENTS * TILES_W, OF_PAIR = TAPS_W * OF_TAP;
    constexpr int PAIRS = $pairs, COUNT = PAIRS * OF_PAIR;
    const int quad = threadIdx.x % 4;
    unsigned held[2][R::COUNT][4];
    $ahead
#pragma unroll 1
    for (int d = first / TAPS_H; d < (first + rows) / TAPS_H; ++d) {
#pragma unroll $unroll
        for (int vector = 0; vector < VECTORS; vector += 2 * PAIRS)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int k = vector + 2 * (i / OF_PAIR), tap = i / OF_TAP % TAPS_W, tile = i % TILES_W;
                const int rd = i / (ELEMENTS * TILES_W) % (OWN_D * ROWS_D), e = i / TILES_W % ELEMENTS;
                const Column* const from = x + (d * TAP_D + k * PLANE + row_d(rd) + R::FIRST + tile * BROAD +
                                                column(FIRST_W + e * ELEMENT_W + tap * TAP_W));
                unsigned (&own)[R::COUNT][4] = held[i % 2];
#pragma unroll
                for (int row = 0; row < R::COUNT; ++row)
#pragma unroll
                    for (int j = 0; j < 4; ++j)    // this cell and the one eight on, the first vector and the second
                        if (R::read(row)) own[row][j] = from[row * R::APART + j % 2 * 8 + j / 2 * PLANE].words[quad];
                warpgroup_arrive();
#pragma unroll
                for (int row = 0; row < R::COUNT; ++row)
#pragma unroll
                    for (int rh = 0; rh < TILES_H * ROWS_H; ++rh)
#pragma unroll
                        for (int of_h = 0; of_h < TAPS_H; ++of_h)
                            if (R::read(row, rh, of_h))
                                $instruction(acc[rd][e][rh][tile], own[row][0], own[row][1], own[row][2], own[row][3],
                                             w + ((of_h * TAPS_W + tap) * VECTORS + k) * BLOCK_M, true);
                warpgroup_commit();
                if (i + 1 < COUNT || COUNT % 2 == 0)
                    warpgroup_wait_but<1>();
                else
                    warpgroup_wait();    // the next rows come where these are
            }
        w += TAPS_H * TAPS_W * VECTORS * BLOCK_M;
    }
    warpgroup_wait();
}
"""

PLACE = """
// Where a weight lies among those of a phase: [row of taps][tap][vector of channels][feature][channel].
template <int TAPS_W>
__device__ __forceinline__ constexpr int weight_at(int row, int tap, int channel, int feature) {
    return (((row * TAPS_W + tap) * VECTORS + channel / VECTOR) * $weights_m + feature) * VECTOR + channel % VECTOR;
}
"""

SPREAD_PLACE = """
// Where a weight lies among those of a phase: [row of taps][vector of channels][column][channel].
__device__ __forceinline__ constexpr int weight_at(int row, int channel, int column) {
    return ((row * VECTORS + channel / VECTOR) * SPREAD + column) * VECTOR + channel % VECTOR;
}
"""

PUT_SPREAD = "to[weight_at(row, own, column)] = {value};"

PACK_SPREAD = """
// Lay out the weights of one phase and chunk for the tensor cores, zeros where there are none.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, $operand* to, int group, int first_feature, int chunk,
                                           int first$most) {
    constexpr int ROWS = TAPS_D * TAPS_H;
    for (int i = $start; i < SPREAD * CHUNK * ROWS; i += $step) {
        const int row = i % ROWS, own = i / ROWS % CHUNK, column = i / (ROWS * CHUNK)$channel;
        const int feature = column % O;
        const int of_w = row / TAPS_H * NEXT_D + row % TAPS_H * NEXT_H + column / O * NEXT_W$at;
        const bool there = column < O * TAPS_W && $some;
        const Element value = there ? w[($row) * TAPS + first + of_w] : Element{};
        $halved
        $put
    }
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
