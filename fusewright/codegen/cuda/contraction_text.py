"""The CUDA text of contraction kernels: everything that is the same for all groups but for named constants."""

from __future__ import annotations

CONSTANTS = """
using Element = $element;    // of tensors in memory
using Compute = $compute;    // of everything else

constexpr int C = $channels, O = $features, GROUPS = $groups;    // channels of a group, in and out
constexpr int TAPS = $taps;    // of one channel's kernel

$owned

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
"""

# What of a tile a warp owns.
OWNED = """
// A warp owns 16 * M_TILES channels of OWN_D x OWN_H x 4 * OWN_W cells, ROWS_D x ROWS_H rows of a cell at a time.
constexpr int M_TILES = $m_tiles, OWN_D = $own_d, OWN_H = $own_h, OWN_W = $own_w;
constexpr int ROWS_D = $rows_d, ROWS_H = $rows_h, TILES_W = $tiles_w;
constexpr int WARPS_M = $warps_m, WARPS_H = $warps_h, WARPS_W = $warps_w, THREADS = $threads;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = $m_blocks;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;
"""

STAGED_CONSTANTS = """
constexpr int CHUNK = $chunk, CHUNKS = $chunks;    // input channels staged at a time
constexpr bool TOGETHER_D = $together_d, TOGETHER_H = $together_h;    // whether all taps along d, h are at hand at once

// Shared memory: the input as $order.
constexpr int X_D = $x_d, X_H = $x_h, X_W = $x_w, $step;
// Steps in the staged input from cell to cell, from position to position and from tap to tap.
constexpr int ADVANCE_D = $advance_d, ADVANCE_H = $advance_h, ADVANCE_W = $advance_w;
constexpr int ELEMENT_D = $element_d, ELEMENT_H = $element_h, ELEMENT_W = $element_w;
constexpr int TAP_D = $tap_d, TAP_H = $tap_h, TAP_W = $tap_w;

// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }
"""

STAGE_TILE = """
// Start copying the input that a block's cells read, in vectors as large as the rows of x allow.  Returns how far the
// tile is shifted: its rows start at the boundary of such a vector.
__device__ __forceinline__ int stage_input(const Element* x, Element* tile, int chunk, int cell_d, int cell_h,
                                           int cell_w, int D, int H, int W) {
    constexpr int VECTOR = 16 / sizeof(Element);
    const int low_d = cell_d * $advance_d + $low_d, low_h = cell_h * $advance_h + $low_h;
    const int needed = cell_w * $advance_w + $low_w, misaligned = reinterpret_cast<unsigned long long>(x) % 16;
    const bool whole = W % VECTOR == 0 && misaligned == 0;
    const bool pairs = W % 2 == 0 && misaligned % (2 * sizeof(Element)) == 0;
    const int low_w = needed & -(whole ? VECTOR : pairs ? 2 : 1), channels = C - chunk * CHUNK;
    const Element* const from = x + (long long)(chunk * CHUNK) * (D * H * W);
    if (whole)
        $whole
    else if (pairs)
        $pairs
    else
        $singles
    return needed - low_w;
}
"""

STAGE_COLUMNS = """
// Start copying the input that a block's cells read, zeros outside.  A thread keeps its channels, as many as an aligned
// copy takes, and goes through the positions.
__device__ __forceinline__ void stage_input(const Element* x, Element* tile, int chunk, int cell_d, int cell_h,
                                            int cell_w, int D, int H, int W) {
    constexpr int VECTOR = $vector, ROW = CHUNK / VECTOR, SIDE_BY_SIDE = ROW < THREADS ? THREADS / ROW : 1;
    const int low_d = cell_d * $advance_d + $low_d, low_h = cell_h * $advance_h + $low_h;
    const int low_w = cell_w * $advance_w + $low_w;
    for (int i = threadIdx.x; i < ROW * SIDE_BY_SIDE; i += THREADS) {
        const int c = i % ROW * VECTOR;
        const bool channel = C % CHUNK == 0 || chunk * CHUNK + c < C;
#pragma unroll 4
        for (int at = i / ROW; at < X_D * X_H * X_W; at += SIDE_BY_SIDE) {
            const int x_d = low_d + at / (X_H * X_W)$by_d, x_h = low_h + at / X_W % X_H$by_h, x_w = low_w + at % X_W;
            const bool row = unsigned(x_d) < unsigned(D) && unsigned(x_h) < unsigned(H);
            const bool there = channel && row && unsigned(x_w) < unsigned(W);
            const int from = ((x_d * H + x_h) * W + x_w) * (GROUPS * C) + chunk * CHUNK + c;
            copy_vector<VECTOR>(tile + at * X_COLUMN + c, x + (there ? from : 0), there);
        }
    }
}
"""

COPY = """
// Start copying VECTOR elements, or zeros where they are not `there`; nothing where not `active`.
template <int VECTOR>
__device__ __forceinline__ void copy_vector(Element* to, const Element* from, bool there, bool active = true) {
    if constexpr (VECTOR * sizeof(Element) >= 4)
        copy_async<VECTOR * sizeof(Element)$near>(to, from, there, active);
    else if (active)
        *to = there ? *from : Element{};    // asynchronous copies are of four bytes or more
}
"""

# How the input, and weights that do not stay, get into shared memory: all at once, in chunks, a chunk ahead.
STAGE_ONCE = """
__syncthreads();    // until the last tile has been read
${shift}stage_input(x_sample, x_tile, 0, cell_d, cell_h, cell_w, D, H, W);
copy_async_commit();
copy_async_wait<0>();
__syncthreads();
"""

# A block without tiles has not waited for its weights, and goes on to use their place.
LANDED = """
copy_async_commit();
copy_async_wait<0>();    // weights that no tile waited for
"""

ROUND_WEIGHTS = """
copy_async_commit();
copy_async_wait<0>();
__syncthreads();
round_staged(w_tile, $w);
"""

CHUNKED = """
for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    __syncthreads();    // until the last chunk has been read
    ${shift}stage_input(x_sample, x_tile, chunk, cell_d, cell_h, cell_w, D, H, W);
    $stage
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    $multiply
}
"""

AHEAD = """
constexpr int STAGE = $size;
${shift}stage_input(x_sample, x_tile, 0, cell_d, cell_h, cell_w, D, H, W);
$first
copy_async_commit();
for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    const int now = chunk % 2 * STAGE, next = STAGE - now;    // where this chunk is, and the next one goes
    if (chunk + 1 < CHUNKS) {
        stage_input(x_sample, x_tile + next, chunk + 1, cell_d, cell_h, cell_w, D, H, W);
        $ahead
    }
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    $multiply
    __syncthreads();    // until this chunk has been read
}
"""

X_WARP = """
const Element* const x_warp = x_tile + warp_h * OWN_H * ADVANCE_H + 4 * warp_w * OWN_W * ADVANCE_W;
const int feature_row = 16 * warp_m * M_TILES + row;    // the first of this lane's features
"""

KERNEL = """
extern "C" __global__ void ${cluster}__launch_bounds__(THREADS, $per_sm)
$name($parameters,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    $tiles
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H, warp_m = warp / (WARPS_W * WARPS_H);
    const int $place;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + $of_sample;
    $x_warp
    const int tiles_h = $tiles_h, tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = $tiles_d * tiles_h * tiles_w;
    $prologue

    for (int tile = part; tile < tiles; tile += parts) {
        const int cell_d = $first_d, cell_h = $first_h;
        const int cell_w = $first_w;
        $body
    }
    $close
}
"""
