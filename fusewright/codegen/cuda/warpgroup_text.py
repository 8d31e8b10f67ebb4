"""The CUDA text of contractions that warpgroups multiply: everything that is the same for all groups."""

from __future__ import annotations

from fusewright.schedule.contraction import Contraction


def operand(c: Contraction) -> str:
    """Text: the type of what tensor cores multiply."""
    return "Operand" if c.halves else "Element"


CONSTANTS = """
using Element = $element;    // of tensors in memory
using Compute = float;    // of everything else
$operands

constexpr int C = $channels, O = $features, GROUPS = $groups;    // channels of a group, in and out
constexpr int TAPS = $taps;    // of one channel's kernel
$unfolded

$owned

// Shared memory holds vectors of 16 bytes: neighbouring channels of one column.  The input is
// [vector][d][h][w % SKIP][w / SKIP], in columns: cells lie side by side.
constexpr int VECTOR = 16 / sizeof($operand), CHUNK = $chunk;    // input channels staged at a time
constexpr int VECTORS = $vectors, PLANE = $plane;    // of a column; columns of a vector, odd for the banks
constexpr int X_D = $x_d, X_H = $x_h, X_W = $x_w, SKIP = $skip;
constexpr int PITCH = $pitch, ROW = $row;    // columns from one w % SKIP to the next, and from row to row
// Columns from cell to cell, from position to position and from tap to tap; along w before they are sorted.
constexpr int ADVANCE_D = $advance_d, ADVANCE_H = $advance_h;
constexpr int ELEMENT_D = $element_d, ELEMENT_H = $element_h, ELEMENT_W = $element_w;
constexpr int TAP_D = $tap_d, TAP_H = $tap_h, TAP_W = $tap_w;
constexpr int X_TILE = VECTORS * PLANE * VECTOR;    // elements

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// Where input index w of a row lies.
__device__ __forceinline__ constexpr int column(unsigned w) { return w % SKIP * PITCH + w / SKIP; }
// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }
"""

# Of operands that are multiplied as another type than theirs.
OPERANDS = """
using Operand = $type;    // of what tensor cores multiply
"""

# Of taps along one dimension that are channels.
UNFOLDED = """
// Taps along $dim are channels, too: each of UNFOLDED taps has OF_TAP, $which.  From one tap
// to the next it is APART rows of the input, and NEXT weights.
constexpr int UNFOLDED = $count, OF_TAP = $channels, APART = $apart, NEXT = $between;
"""

# What of a tile a warpgroup and a thread own.
OWNED = """
// A warpgroup owns 64 * M_TILES channels of OWN_D x OWN_H x 4 * OWN_W cells, ROWS_D x ROWS_H rows of a cell at a time.
constexpr int M_TILES = $m_tiles, OWN_D = $own_d, OWN_H = $own_h, EIGHTS_W = $eights_w, OWN_W = 2 * EIGHTS_W;
constexpr int ROWS_D = $rows_d, ROWS_H = $rows_h, PER_CELL = $per_cell;    // of which along w all PER_CELL
constexpr int WARPS_M = $warps_m, WARPS_H = $warps_h, WARPS_W = $warps_w, THREADS = $threads;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = $m_blocks;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;
"""

MULTIPLY = """
$accumulators

// Start adding the products of a staged chunk with `rows` rows of taps from `first` on.  The columns that one tap reads
// lie as one instruction wants them, whichever tap it is: it only starts elsewhere.
template <int TAPS_H, int TAPS_W, int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void multiply(Accumulators& acc, unsigned long long x, unsigned long long w, int first,
                                         int rows) {
    $ahead
    warpgroup_arrive();
#pragma unroll $unroll_rows
    for (int row = first; row < first + rows; ++row) {
        const unsigned long long x_row = x + (row / TAPS_H * TAP_D + row % TAPS_H * TAP_H);
#pragma unroll $unroll
        for (int k = 0; k < VECTORS; k += 2)
#pragma unroll
            for (int tap = 0; tap < TAPS_W; ++tap)
#pragma unroll
                for (int rd = 0; rd < $planes; ++rd)
#pragma unroll
                    for (int e = 0; e < ELEMENTS; ++e)
                        $products
        w += TAPS_W * VECTORS * $weights_m;
    }
    warpgroup_commit();
}
"""

ACCUMULATORS = """
// A thread has two features and two cells of every eight.
using Accumulators = float[OWN_D * ROWS_D][PER_CELL][M_TILES][OWN_H * ROWS_H][EIGHTS_W][4];
constexpr int ROWS_AT_ONCE = $at_once;    // that one instruction takes
"""

# The instructions of one tap, two vectors of channels and element of the cells along d and w.
PRODUCTS = """
#pragma unroll
for (int rh = 0; rh < OWN_H * ROWS_H; rh += ROWS_AT_ONCE)
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        $instruction(reinterpret_cast<float(&)[$tiles][4]>(acc[rd][e][m][rh]),
                       w + (${of_w}64 * m),
                       x_row + (${of_x}row_d(rd) + row_h(rh) +
                                column(FIRST_W + e * ELEMENT_W + tap * TAP_W)));
"""

# With weights in registers, which one instruction after the other takes, of all cells.
MULTIPLY_HELD = """
$accumulators

// Add the products of a staged chunk with `rows` rows of taps from `first` on.  The columns that one tap reads lie as
// one instruction wants them, whichever tap it is: it only starts elsewhere.  Its weights are read once, while the
// tensor cores are busy with those of the tap before.
template <int TAPS_H, int TAPS_W, int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void multiply(Accumulators& acc, unsigned long long x, const uint4* w, int first,
                                         int rows) {
    // Pairs of vectors that are written out one behind the other, products with weights of their own that they come to,
    // and the weights of so many products that a thread has: by turns, and by the same turns every time.
    constexpr int PAIRS = $pairs, COUNT = PAIRS * TAPS_W, HELD = COUNT % 2 && COUNT % 3 == 0 ? 3 : 2;
    uint4 held[HELD][M_TILES];
#pragma unroll $unroll
    for (int row = first; row < first + rows; ++row) {
        const unsigned long long x_row = x + (row / TAPS_H * TAP_D + row % TAPS_H * TAP_H);
#pragma unroll $unroll
        for (int vector = 0; vector < VECTORS; vector += 2 * PAIRS)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int k = vector + 2 * (i / TAPS_W), tap = i % TAPS_W;
                uint4 (&own)[M_TILES] = held[i % HELD];
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) own[m] = w[(tap * VECTORS + k) * BLOCK_M + 128 * m];
                warpgroup_arrive();
#pragma unroll
                for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                    for (int e = 0; e < ELEMENTS; ++e)
#pragma unroll
                        for (int rh = 0; rh < OWN_H * ROWS_H; rh += ROWS_AT_ONCE)
#pragma unroll
                            for (int m = 0; m < M_TILES; ++m)
                                $instruction(reinterpret_cast<float(&)[$tiles][4]>(acc[rd][e][m][rh]),
                                             own[m].x, own[m].y, own[m].z, own[m].w,
                                             x_row + (k * PLANE + row_d(rd) + row_h(rh) +
                                                      column(FIRST_W + e * ELEMENT_W + tap * TAP_W)),
                                             true);
                warpgroup_commit();
                if (i + 1 < COUNT || COUNT % HELD == 0)
                    warpgroup_wait_but<HELD - 1>();
                else
                    warpgroup_wait();    // the next weights come where these are
            }
        w += TAPS_W * VECTORS * BLOCK_M;
    }
    warpgroup_wait();
}
"""

CHANNELS = """
// A tile, by the tiles before it along each dimension, and its first cell.
struct Tile { int d, h, w; };
struct Cell { int d, h, w; };

// One vector of channels.
union alignas(16) Channels {
    uint4 $word;
    Element element[VECTOR];
};
"""

PLACE = """
// Where a weight lies among those of a phase: [row of taps][tap][vector of channels][feature][channel].  The 64 rows of
// an instruction are 16 features of each of four warps.
template <int TAPS_W>
__device__ __forceinline__ constexpr int weight_at(int row, int tap, int channel, int feature) {
    $order
    return (((row * TAPS_W + tap) * VECTORS + channel / VECTOR) * BLOCK_M + at) * VECTOR + channel % VECTOR;
}
"""

PLACE_HELD = """
// Where a weight lies among those of a phase: [row of taps][tap][pair of vectors][16 features][lane][16 bytes], as
// lanes have the rows of an instruction in registers: 16 features of each of four warps.
template <int TAPS_W>
__device__ __forceinline__ constexpr int weight_at(int row, int tap, int channel, int feature) {
    constexpr int OF_REGISTER = VECTOR / 4;    // neighbouring channels
    $order
    const int lane = feature % 8 * 4 + channel % VECTOR / OF_REGISTER;
    const int reg = channel / VECTOR % 2 * 2 + feature / 8 % 2;
    const int pair = (row * TAPS_W + tap) * (VECTORS / 2) + channel / (2 * VECTOR);
    return ((pair * (BLOCK_M / 16) + at / 16) * 32 + lane) * VECTOR + reg * OF_REGISTER + channel % OF_REGISTER;
}
"""

# The place of a feature.
ORDER = """
const int tile = feature / 16 % M_TILES, warp = feature / (16 * M_TILES);
const int at = ((warp / 4 * M_TILES + tile) * 4 + warp % 4) * 16 + feature % 16;
"""

PUT = "to[weight_at<TAPS_W>(tap / TAPS_W, tap % TAPS_W, own, feature)] = {value};"

PACK_PHASE = """
// Lay out the weights of one phase, block and chunk for the tensor cores, zeros where there are none.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, $operand* to, int group, int first_feature, int chunk,
                                           int first$most) {
    constexpr int ALL = TAPS_D * TAPS_H * TAPS_W;
    for (int i = $start; i < BLOCK_M * CHUNK * ALL; i += $step) {
        const int tap = i % ALL, own = i / ALL % CHUNK, feature = i / (ALL * CHUNK)$channel;
        const int of_w = tap / (TAPS_H * TAPS_W) * NEXT_D + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W$at;
        const bool there = first_feature + feature < O && $some;
        const Element value = there ? w[($row) * TAPS + first + of_w] : Element{};
        $halved
        $put
    }
}
"""

PACK = """
extern "C" __global__ void $name(const Element* __restrict__ w, $operand* __restrict__ packed$parameter) {
    await_launches();
    $begin
    const int chunk = blockIdx.x, group = blockIdx.y / M_BLOCKS, first_feature = blockIdx.y % M_BLOCKS * BLOCK_M;
    packed += (long long)blockIdx.y * $block;
    $phases
    $end
}
"""

STAGE_WEIGHTS = """
// Start copying `count` of the block's packed weights, from the `first` on: one thread does, and finds them anew.
__device__ __forceinline__ void stage_weights(const $operand* packed, int first, $operand* to, int count,
                                              unsigned long long* landing) {
    if ($thread != 0) return;
    const $operand* const from = packed + (long long)forgotten(blockIdx.z) * $of_block + first;
    copy_bulk(to, from, count * int(sizeof($operand)), landing);
}
"""

# One pass over the chunks of a tile.  What the next step needs is staged while the tensor cores work on this one.
STEPS = """
$unrolled
for (int step = 0; step < $steps; ++step) {
    __syncthreads();    // until this step's operands are there, and the last step's have been read
    $before
    $multiply
    $after
    fence_async();
    warpgroup_wait();
}
"""

KERNEL = """
extern "C" __global__ void ${cluster}__launch_bounds__($threads, $per_sm)
$name($parameters,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    $begin
    extern __shared__ __align__(128) unsigned char shared_memory[];
    $operand* const x_tile = reinterpret_cast<$operand*>(shared_memory);    // two of them
    $operand* const w_tile = x_tile + 2 * X_TILE;
    $staged
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    $warps
    const int $place;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + $of_sample;
    // What this warpgroup multiplies: its cells of the input, and its features.
    $x_matrix
    $w_matrix
    $prologue

    const int tiles_d = $tiles_d, tiles_h = $tiles_h, tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = tiles_d * tiles_h * tiles_w;
    const auto tile_at = [&](int i) -> Tile { return {i / (tiles_w * tiles_h), i / tiles_w % tiles_h, i % tiles_w}; };
    const auto cell_of = [&](Tile tile) -> Cell { return {$first_d, $first_h, $first_w}; };
    $stage
    int x_now = 0$steps;    // where the input of the step at hand is$and_before
    $first
    $loop {
        const auto [cell_d, cell_h, cell_w] = cell_of($tile);
        $another
        $body
    }
    $close
}
"""
