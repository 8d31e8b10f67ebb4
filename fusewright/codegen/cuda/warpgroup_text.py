"""The CUDA text of contractions that warpgroups multiply: everything that is the same for all groups."""

from __future__ import annotations

CONSTANTS = """
using Element = $element;    // of tensors in memory
using Compute = float;    // of everything else

constexpr int C = $channels, O = $features, GROUPS = $groups;    // channels of a group, in and out
constexpr int TAPS = $taps;    // of one channel's kernel

$owned

// Shared memory holds vectors of 16 bytes: neighbouring channels of one column.  The input is
// [vector][d][h][w % SKIP][w / SKIP], in columns: cells lie side by side.
constexpr int VECTOR = 16 / sizeof(Element), CHUNK = $chunk;    // input channels staged at a time
constexpr int VECTORS = $vectors, PLANE = $plane;    // of a column; columns of a vector, odd for the banks
constexpr int X_D = $x_d, X_H = $x_h, X_W = $x_w, PITCH = $pitch, SKIP = $skip;
// Columns from cell to cell, from position to position and from tap to tap; along w before they are sorted.
constexpr int ADVANCE_D = $advance_d, ADVANCE_H = $advance_h;
constexpr int ELEMENT_D = $element_d, ELEMENT_H = $element_h, ELEMENT_W = $element_w;
constexpr int TAP_D = $tap_d, TAP_H = $tap_h, TAP_W = $tap_w;
constexpr int X_TILE = VECTORS * PLANE * VECTOR;    // elements

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// Where input index w of a row lies.
__device__ __forceinline__ constexpr int column(int w) { return w % SKIP * PITCH + w / SKIP; }
// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }
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
                for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                    for (int e = 0; e < ELEMENTS; ++e)
                        $products
        w += TAPS_W * VECTORS * BLOCK_M;
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
                       w + ((tap * VECTORS + k) * BLOCK_M + 64 * m),
                       x_row + (k * PLANE + row_d(rd) + row_h(rh) +
                                column(FIRST_W + e * ELEMENT_W + tap * TAP_W)));
"""

CHANNELS = """
// A tile, by the tiles before it along each dimension, and its first cell.
struct Tile { int d, h, w; };
struct Cell { int d, h, w; };

// One vector of channels.
union alignas(16) Channels {
    uint4 word;
    Element element[VECTOR];
};
"""

STAGE = """
// The vectors that a thread stages at a time: what has been read, and where in the tile they are, in columns of shared
// memory, packed indices of the input$kept_too.  Of no vector at all the column is negative.
constexpr int COLUMNS = X_D * X_H * X_W, COUNT = VECTORS * COLUMNS, AT_ONCE = $at_once;    // of a thread at a time
struct Fetched { Channels read[AT_ONCE]; };
struct Places {
    int to[AT_ONCE];
    unsigned index[AT_ONCE];
    $kept_member
};

__device__ __forceinline__ Places places_of(int first, int D, int H, int W) {
    Places places;
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const int i = first + n * THREADS, $order;
        const int d = at / (X_H * X_W), h = at / X_W % X_H, w = at % X_W;
        places.to[n] = i < COUNT ? v * PLANE + (d * X_H + h) * (PITCH * SKIP) + column(w) : -1;
        places.index[n] = unsigned(v * VECTOR) << 24 | d$by_d << 16 | h$by_h << 8 | w;
        $kept_at
    }
    return places;
}

// Start reading what a block's cells read, zeros outside.
__device__ __forceinline__ void fetch_input(Fetched& fetched, const Places& places, const Element* x, int chunk,
                                            Cell cell, int D, int H, int W) {
    const int low_d = cell.d * $advance_d + $low_d, low_h = cell.h * $advance_h + $low_h;
    const int low_w = cell.w * $advance_w + $low_w, channels = C - chunk * CHUNK;
    $memory
    $start
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned index = places.index[n];
        const int x_d = low_d + (index >> 16 & 255), x_h = low_h + (index >> 8 & 255), x_w = low_w + (index & 255);
        const bool inside = places.to[n] >= 0 && unsigned(x_d) < unsigned(D) && unsigned(x_h) < unsigned(H) &&
                            unsigned(x_w) < unsigned(W);
        const int channel = index >> 24;
        const Element* const from = own + ($from);
        $read
    }
}

// Write what was read to shared memory$rounding.
__device__ __forceinline__ void put_input(Fetched& fetched, const Places& places, Element* tile) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        $round
        if (places.to[n] >= 0) *reinterpret_cast<uint4*>(tile + places.to[n] * VECTOR) = fetched.read[n].word;
    }
}
"""

# Where channels lie in planes, a vector's elements are far apart; where they come last, they are neighbours.
PLANES = """
const int plane = D * H * W;
const Element* const own = x + chunk * CHUNK * plane;
"""
LAST = """
const Element* const own = x + chunk * CHUNK;
"""
READ = """
#pragma unroll
for (int j = 0; j < VECTOR; ++j)
    fetched.read[n].element[j] = inside && (C % CHUNK == 0 || channel + j < channels) ? from[j$step] : Element{};
"""
READ_VECTOR = """
const bool there = inside && (C % CHUNK == 0 || channel < channels);
fetched.read[n].word = there ? *reinterpret_cast<const uint4*>(from) : uint4{};
"""

ROUND = """
#pragma unroll
for (int j = 0; j < VECTOR; ++j) {
    Element& value = fetched.read[n].element[j];
    value = __uint_as_float(round_tf32(value));
}
"""

PLACE = """
// Where a weight lies among those of a phase: [row of taps][tap][vector of channels][feature][channel].  The 64 rows of
// an instruction are 16 features of each of four warps.
template <int TAPS_W>
__device__ __forceinline__ constexpr int weight_at(int row, int tap, int channel, int feature) {
    const int tile = feature / 16 % M_TILES, warp = feature / (16 * M_TILES);
    const int at = ((warp / 4 * M_TILES + tile) * 4 + warp % 4) * 16 + feature % 16;
    return (((row * TAPS_W + tap) * VECTORS + channel / VECTOR) * BLOCK_M + at) * VECTOR + channel % VECTOR;
}
"""

PACK_PHASE = """
// Steps in memory between neighbouring taps of a phase.
constexpr int NEXT_D = $next_d, NEXT_H = $next_h, NEXT_W = $next_w;

// Lay out the weights of one phase, block and chunk for the tensor cores, zeros where there are none.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, Element* to, int group, int first_feature, int chunk,
                                           int first) {
    constexpr int ALL = TAPS_D * TAPS_H * TAPS_W;
    for (int i = threadIdx.x; i < BLOCK_M * CHUNK * ALL; i += $threads) {
        const int tap = i % ALL, own = i / ALL % CHUNK, feature = i / (ALL * CHUNK), channel = chunk * CHUNK + own;
        const int of_w = tap / (TAPS_H * TAPS_W) * NEXT_D + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W;
        const bool there = first_feature + feature < O && channel < C;
        const Element value = there ? w[($row) * TAPS + first + of_w] : Element{};
        to[weight_at<TAPS_W>(tap / TAPS_W, tap % TAPS_W, own, feature)] = $value;
    }
}
"""

PACK = """
extern "C" __global__ void $name(const Element* __restrict__ w, Element* __restrict__ packed) {
    const int chunk = blockIdx.x, group = blockIdx.y / M_BLOCKS, first_feature = blockIdx.y % M_BLOCKS * BLOCK_M;
    packed += (long long)blockIdx.y * $block;
    $phases
}
"""

STAGE_WEIGHTS = """
// Start copying `count` packed weights.
__device__ __forceinline__ void stage_weights(const Element* from, Element* to, int count) {
    for (int i = VECTOR * threadIdx.x; i < count; i += VECTOR * THREADS) copy_async<16>(to + i, from + i, true);
}
"""

# One pass over the chunks of a tile.  What the next step needs is staged while the tensor cores work on this one.
STEPS = """
for (int step = 0; step < $steps; ++step) {
    __syncthreads();    // until this step's operands are there, and the last step's have been read
    $before
    $multiply
    $after
    fence_async();
    warpgroup_wait();
}
"""

# The input, chunk after chunk of a tile and tile after tile: read a step before it is written.
STAGING = """
// What of the input is read next, or on its way.
const Places places = places_of(threadIdx.x, D, H, W);
Fetched fetched;
$staged
const auto read_input = [&] {
    if ($some) fetch_input(fetched, places, x_sample, $chunk, $cell, D, H, W);
};
// Write that to shared memory, and start reading what follows.
const auto write_input = [&](Element* to) {
    if (!($some)) return;
    put_input(fetched, places, to);
    $others
    $follow
    read_input();
};
"""

# Of threads that stage more vectors than are on their way at a time.
OTHERS = """
for (int first = threadIdx.x + AT_ONCE * THREADS; first < COUNT; first += AT_ONCE * THREADS) {
    const Places others = places_of(first, D, H, W);
    fetch_input(fetched, others, x_sample, $chunk, $cell, D, H, W);
    put_input(fetched, others, to);
}
"""

# Tiles follow each other quickly where all channels are staged at once: their places are carried on.
WALK = """
const Tile apart = tile_at(parts);
const auto following = [&](Tile tile) -> Tile {
    tile = {tile.d + apart.d, tile.h + apart.h, tile.w + apart.w};
    if (tile.w >= tiles_w) tile.w -= tiles_w, ++tile.h;
    if (tile.h >= tiles_h) tile.h -= tiles_h, ++tile.d;
    return tile;
};
"""
WALKED = {
    "staged": ["Tile staged = tile_at(part);"],
    "some": "staged.d < tiles_d",
    "cell": "cell_of(staged)",
    "follow": ["staged = following(staged);"],
}
EACH_TILE = {
    "loop": "for (Tile tile = tile_at(part); tile.d < tiles_d; tile = following(tile))",
    "tile": "tile",
    "another": "following(tile).d < tiles_d",
}
# Else they are found by division, which takes fewer registers.
DIVIDED = {
    "staged": ["int staged_tile = part, staged_chunk = 0;", "Cell staged = cell_of(tile_at(part));"],
    "some": "staged_tile < tiles",
    "cell": "staged",
}
EACH_COUNT = {
    "loop": "for (int tile = part; tile < tiles; tile += parts)",
    "tile": "tile_at(tile)",
    "another": "tile + parts < tiles",
}
NEXT_CHUNK = """
if (++staged_chunk == $per_tile) {
    staged_chunk = 0;
    staged_tile += parts;
    staged = cell_of(tile_at(staged_tile));
}
"""

KERNEL = """
extern "C" __global__ void ${cluster}__launch_bounds__(THREADS, $per_sm)
$name($parameters,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);    // two of them
    Element* const w_tile = x_tile + 2 * X_TILE;
    $staged
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    $warps
    const int $place;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + $of_sample;
    // What this warpgroup multiplies: its cells of the input, and its features.
    const unsigned long long x_matrix =
        shared_matrix(x_tile, 16 * PLANE, $between) + ($own_cells);
    const unsigned long long w_matrix = shared_matrix(w_tile, 16 * BLOCK_M, 128)$own_features;
    $prologue

    const int tiles_d = $tiles_d, tiles_h = $tiles_h, tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = tiles_d * tiles_h * tiles_w;
    const auto tile_at = [&](int i) -> Tile { return {i / (tiles_w * tiles_h), i / tiles_w % tiles_h, i % tiles_w}; };
    const auto cell_of = [&](Tile tile) -> Cell { return {$first_d, $first_h, $first_w}; };
    $stage
    int x_now = 0$w_now;    // where the operands of the step at hand are
    if (part < tiles) {
        $first
    }
    fence_async();
    $loop {
        const auto [cell_d, cell_h, cell_w] = cell_of($tile);
        $another
        $body
    }
    $close
}
"""
