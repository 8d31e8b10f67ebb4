"""Window sums without a barrier: every warp stages the rows that its own cells read, and its lanes form the window sums
that they multiply.

Once a warp has formed its sums, the rows of its next step are on their way while it multiplies and goes on with the
results.  Channels lie so far apart that the lanes of an operand, four channels of eight cells, read at once.  Weights
lie in shared memory as operands, one 16-byte vector per lane.
"""

from __future__ import annotations

from math import ceil

from fusewright.codegen.cuda import contraction_box, contraction_layout, contraction_text
from fusewright.codegen.cuda.contraction_box import scaled_early, shared_rows, windows
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.tiling import Tiling
from fusewright.schedule.window_rows import OfWarps, rows_of_warp


def row_elements(c: Contraction, t: OfWarps) -> int:
    """Elements of the rows that all warps of a block stage."""
    return t.buffers * t.step_channels * _channel(c, t) * t.warps


def constants(c: Contraction, t: OfWarps) -> Lines:
    """Of the rows of a warp in shared memory."""
    names = {"rows_h": rows_of_warp(c, t)[1], "width": _width(c, t), "channel": _channel(c, t)}
    return fill(_CONSTANTS, step=t.step_channels, **names)


def _width(c: Contraction, t: OfWarps) -> int:
    """Elements of a row, in whole 16-byte vectors."""
    vector = 16 // c.x.dtype.itemsize
    return ceil(rows_of_warp(c, t)[2] / vector) * vector


def _channel(c: Contraction, t: OfWarps) -> int:
    """Elements from channel to channel: eight words modulo the banks."""
    d, h, _ = rows_of_warp(c, t)
    return contraction_layout.spread(d * h * _width(c, t), 8, c.x.dtype.itemsize)


def products(c: Contraction, t: Tiling, weight: str) -> list[Lines]:
    """The functions that stage weights and rows, form sums and multiply; `weight` is what becomes of a `value`."""
    stage = fill(_STAGE_WEIGHTS, value=weight)
    return [
        windows(c),
        stage,
        fill(contraction_text.COPY, near=""),
        stage_rows(c),
        sums(c, t),
        fill(_MULTIPLY),
    ]


def stage_rows(c: Contraction) -> Lines:
    """The functions that copy the rows of a step's channels."""
    assert c.box is not None
    ends = (("d", "SPAN_D", "D"), ("h", "ROWS_X", "H"), ("w", "WIDTH", "W"))
    padded = [end for end, *most in zip(ends, c.box.before, c.box.behind, strict=True) if any(most)]
    inside = [f"inside = inside && corner.{at} >= 0 && corner.{at} + {n} <= {end};" for at, n, end in padded]
    return fill(_STAGE_ROWS, inside=inside)


def stage(c: Contraction, rows: str, place: str = "") -> Lines:
    """How the kernel names the staging of a step's rows, at `rows`, which may depend on a `place`."""
    return fill(_STAGE, rows=rows, place=place, **contraction_box.before(c))


def sums(c: Contraction, t: OfWarps, held: str = "BOX_TAPS") -> Lines:
    """The function by which lanes form the window sums of a channel, for so many taps."""
    assert c.box is not None
    value = f"sums[tap] * Compute({c.box.scale!r})" if scaled_early(c) else "sums[tap]"
    return fill(_SUMS, held=held, shared=shared_rows(c, t.of_warp[0]), value=value)


_CONSTANTS = """
// Shared memory: for each warp the rows that its cells read, of STEP channels at a time, as [channel][d][h][w].
constexpr int STEP = $step, STEPS = (C + STEP - 1) / STEP, ROWS_X = $rows_h, WIDTH = $width, CHANNEL = $channel;
"""

# Where the loop over tiles finds the first cell of one.
HERE = {"first_d": "here.d", "first_h": "here.h", "first_w": "here.w"}

_STAGE = """
const auto cell_of = [&](int tile) -> Cell {
    return {tile / (tiles_w * tiles_h) * CELLS_D, tile / tiles_w % tiles_h * CELLS_H, tile % tiles_w * CELLS_W};
};
const auto stage = [&](Cell cell, bool some, int step$place) {
    const int h = cell.h + warp_h * OWN_H, w = cell.w + 8 * warp_w * TILES_W;
    const Corner corner = {STEP * step, cell.d * MOVE_D$before_d, h * MOVE_H$before_h, w * MOVE_W$before_w};
    if (some) stage_rows(x_sample, $rows, corner, D, H, W);
    copy_async_commit();
};
Cell here = cell_of(part);
"""

# What follows a tile.
NEXT = """
const Cell ahead = cell_of(tile + parts);
const bool another = tile + parts < tiles;    // tile follows
"""

# The weights, and the first step's rows on their way.
FIRST = """
const Four* const w_warp = reinterpret_cast<const Four*>(w_tile) + 32 * warp_m * M_TILES;
Element* const rows = w_tile + $weights + warp * STEP * CHANNEL;
$stage
stage(here, part < tiles, 0);
stage_weights(w, w_tile, group, first_feature);
__syncthreads();    // until the weights are there
"""

# The products of a tile; the next step's rows are asked for once this one's have been read.
PRODUCTS = """
#pragma unroll 1
for (int step = 0; step < STEPS; ++step) {
    const bool same = step + 1 < STEPS;    // tile that follows
    Sums operands[2];
    copy_async_wait<0>();
    __syncwarp();
    sum_windows(operands[0], rows);
    sum_windows(operands[1], rows + 4 * CHANNEL);
    __syncwarp();    // until all lanes have read
    stage(same ? here : ahead, same || another, same ? step + 1 : 0);
    multiply(acc, operands, w_warp + step * BOX_TAPS * 2 * BLOCK_M);
}
"""

_STAGE_WEIGHTS = """
struct alignas(sizeof(Element) == 2 ? 8 : 16) Four { Element at[4]; };    // a lane's part of 16 features and 8 channels

// Write a block's weights as operands: [eight channels][tap][16 features][lane], zeros where there are none.
__device__ __forceinline__ void stage_weights(const Element* w, Element* tile, int group, int first_feature) {
    for (int i = threadIdx.x; i < STEPS * BOX_TAPS * BLOCK_M * 8; i += THREADS) {
        const int part = i % 4, lane = i / 4 % 32, m = i / 128 % (BLOCK_M / 16), at = i / (8 * BLOCK_M);
        const int feature = first_feature + 16 * m + 8 * (part % 2) + lane / 4;
        const int channel = at / BOX_TAPS * 8 + 4 * (part / 2) + lane % 4, tap = at % BOX_TAPS;
        const bool there = feature < O && channel < C;
        const Element value = there ? w[((group * O + feature) * C + channel) * BOX_TAPS + tap] : Element{};
        tile[i] = $value;
    }
}
"""

_STAGE_ROWS = """
// The first cell of a tile.
struct Cell { int d, h, w; };

// Where a warp's rows begin: channel, and position in x.
struct Corner { int channel, d, h, w; };

// Lanes side by side that copy a row of so many vectors: a line of 128 bytes at most.
__device__ __forceinline__ constexpr int lanes_of_row(int columns, int bytes) {
    int lanes = 1;
    while (lanes < columns && lanes < 32 && lanes * bytes < 128) lanes *= 2;
    return lanes;
}

// Start copying some vectors of the rows of a step's channels, zeros outside, where nothing is read: so addresses may
// run over the ends of x.  INSIDE checks nothing.  A lane has every LANES-th of a row, and goes on from row to row.
template <int VECTOR, bool INSIDE, int BEGIN, int COLUMNS>
__device__ __forceinline__ void copy_columns(const Element* from, Element* to, Corner corner, int D, int H, int W) {
    constexpr int LANES = lanes_of_row(COLUMNS, VECTOR * sizeof(Element));
    constexpr int CHANNELS = LANES * STEP < 32 ? STEP : 32 / LANES, AT_ONCE = 32 / (LANES * CHANNELS);
    constexpr int TURNS = ceil_div(ROWS_X, AT_ONCE), PARTS = INSIDE ? 1 : ceil_div(TURNS, 8);
    const int lane = threadIdx.x % 32, first = BEGIN + lane % LANES, own = lane / LANES % CHANNELS;
    const int row = lane / (LANES * CHANNELS);
    from += (own * D * H + row) * W + first * VECTOR;
    to += own * CHANNEL + row * WIDTH + first * VECTOR;
#pragma unroll 1
    for (int c = 0; c < STEP; c += CHANNELS, from += CHANNELS * D * H * W) {
        at_hand(from);    // or the compiler keeps addresses of all channels
        const bool channel = C % STEP == 0 || corner.channel + own + c < C;
#pragma unroll 1
        for (int d = 0; d < SPAN_D; ++d) {
            const bool plane = channel && unsigned(corner.d + d) < unsigned(D);
            Element* const place = to + c * CHANNEL + d * ROWS_X * WIDTH;
#pragma unroll(ceil_div(TURNS, PARTS))
            for (int h = 0; h < ROWS_X; h += AT_ONCE) {
                const Element* of_row = from + (d * H + h) * W;
                if constexpr (COLUMNS > LANES) at_hand(of_row);    // so that its columns are offsets of it
                const bool some = ROWS_X % AT_ONCE == 0 || row + h < ROWS_X;
                const bool there = plane && unsigned(corner.h + row + h) < unsigned(H);
#pragma unroll
                for (int at = 0; at < COLUMNS; at += LANES) {
                    const bool whole = INSIDE || (there && unsigned(corner.w + (at + first) * VECTOR) < unsigned(W));
                    const bool active = some && (at + LANES <= COLUMNS || at + first < BEGIN + COLUMNS);
                    copy_vector<VECTOR>(place + h * WIDTH + at * VECTOR, of_row + at * VECTOR, whole, active);
                }
            }
        }
    }
}

// A few vectors behind a row's last line, which would leave most lanes without one, are copied of many rows at a time.
template <int VECTOR, bool INSIDE>
__device__ __forceinline__ void copy_rows(const Element* from, Element* to, Corner corner, int D, int H, int W) {
    constexpr int COLUMNS = WIDTH / VECTOR, LANES = lanes_of_row(COLUMNS, VECTOR * sizeof(Element));
    constexpr int REST = ROWS_X > 1 && COLUMNS > LANES && COLUMNS % LANES * 2 <= LANES ? COLUMNS % LANES : 0;
    copy_columns<VECTOR, INSIDE, 0, COLUMNS - REST>(from, to, corner, D, H, W);
    if constexpr (REST > 0) copy_columns<VECTOR, INSIDE, COLUMNS - REST, REST>(from, to, corner, D, H, W);
}

template <int VECTOR>
__device__ __forceinline__ void copy_rows(const Element* from, Element* to, Corner corner, bool inside,
                                          int D, int H, int W) {
    if (inside)
        copy_rows<VECTOR, true>(from, to, corner, D, H, W);
    else
        copy_rows<VECTOR, false>(from, to, corner, D, H, W);
}

// Start copying the rows of a step's channels that a warp's cells read, in vectors as large as the rows of x allow.
__device__ __forceinline__ void stage_rows(const Element* x, Element* rows, Corner corner, int D, int H, int W) {
    constexpr int VECTOR = 16 / sizeof(Element);
    const int misaligned = reinterpret_cast<unsigned long long>(x) % 16;
    const int first = ((corner.channel * D + corner.d) * H + corner.h) * W + corner.w;
    // Without padding, what lies beyond an end is the next row or plane, read for cells whose results go nowhere.
    const unsigned reach = (((STEP - 1u) * D + SPAN_D - 1) * H + ROWS_X - 1) * W + WIDTH;
    bool inside = corner.channel + STEP <= C && first <= int(unsigned(C * D * H * W) - reach);
    $inside
    if (W % VECTOR == 0 && misaligned == 0)
        copy_rows<VECTOR>(x + first, rows, corner, inside, D, H, W);
    else if (W % 2 == 0 && misaligned % (2 * sizeof(Element)) == 0)
        copy_rows<2>(x + first, rows, corner, inside, D, H, W);
    else
        copy_rows<1>(x + first, rows, corner, inside, D, H, W);
}
"""

_SUMS = """
constexpr int SHARED = $shared;    // rows that two neighbouring cells of a lane share
using Sums = Operand[OWN_H][TILES_W][$held];    // of a lane's cells in one channel

// The window sums of a lane's cells in the channel of its quad, from the first one's rows on.
__device__ __forceinline__ void sum_windows(Sums& operands, const Element* rows) {
    constexpr int VECTOR = MOVE_W % 4 == 0 ? 4 : MOVE_W % 2 == 0 ? 2 : 1;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < TILES_W; ++j) {
        const Element* const from = rows + lane % 4 * CHANNEL + (8 * j + lane / 4) * MOVE_W;
        Compute along_w[SPAN_D][SPAN_H][BOX_TAPS_W];
#pragma unroll
        for (int h = 0; h < OWN_H; ++h) {
#pragma unroll
            for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < SPAN_H; ++rh)
                    if (rh >= SHARED || h == 0)
                        sum_row<VECTOR>(along_w[rd][rh], from + (rd * ROWS_X + h * MOVE_H + rh) * WIDTH);
            Compute sums[BOX_TAPS];
            sum_cell(sums, along_w);
            keep_rows<SHARED>(along_w);
#pragma unroll
            for (int tap = 0; tap < BOX_TAPS; ++tap) operands[h][j][tap] = input_operand($value);
        }
    }
}
"""

_MULTIPLY = """
// Add the products of window sums in twice four channels with the weights of a warp's features.
__device__ __forceinline__ void multiply(Accumulators& acc, const Sums (&operands)[2], const Four* w) {
#pragma unroll
    for (int tap = 0; tap < BOX_TAPS; ++tap)
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            const Four four = w[(tap * (BLOCK_M / 16) + m) * 32 + threadIdx.x % 32];
            Operand weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[i] = weight_operand(four.at[i]);
#pragma unroll
            for (int h = 0; h < OWN_H; ++h)
#pragma unroll
                for (int j = 0; j < TILES_W; ++j) {
                    const Operand of_cells[2] = {operands[0][h][j][tap], operands[1][h][j][tap]};
                    multiply_add(acc[0][h][j][m], weights, of_cells);
                }
        }
}
"""
