"""The CUDA text of direct contraction kernels: everything that is the same for all groups but for named constants."""

from __future__ import annotations

CONSTANTS = """
using Element = $element;    // of tensors in memory
using Compute = $compute;    // of everything else

constexpr int C = $channels, O = $features, GROUPS = $groups;    // channels of a group, in and out
constexpr int TAPS = $taps;    // of one channel's kernel

// A thread owns FEATURES features at ROWS x RUN positions of every phase; the threads of a team share the features.
constexpr int FEATURES = $own_features, ROWS = $rows, RUN = $run, PHASES = $phases;
constexpr int UNITS_D = $units_d, UNITS_H = $units_h, UNITS_W = $units_w;    // threads side by side
constexpr int TEAM = $team, TEAMS = $teams, THREADS = TEAM * TEAMS;
constexpr int BLOCK_O = FEATURES * TEAMS, O_BLOCKS = $o_blocks;
constexpr int CELLS_D = $cells_d, CELLS_H = $cells_h, CELLS_W = $cells_w;    // of a block
constexpr int CHUNK = $chunk, CHUNKS = $chunks;    // input channels staged at a time
constexpr int ROUNDS = $passes;    // blocks of features that one block goes through

// Shared memory: the input as [channel][d][h][w], twice; weights as [channel][tap][feature].
constexpr int X_D = $x_d, X_H = $x_h, X_W = $x_w, X_CHANNEL = X_D * X_H * X_W, X_TILE = $x_tile;
constexpr int W_TILE = CHUNK * TAPS * BLOCK_O, W_TILES = $w_tiles;
constexpr int LOW_D = $low_d, LOW_H = $low_h, LOW_W = $low_w;    // input index of cell 0 that is staged first
// Steps in the staged input from position to position and from tap to tap, in the weights from tap to tap.
constexpr int ELEMENT_D = $element_d, ELEMENT_H = $element_h, ELEMENT_W = $element_w;
constexpr int TAP_D = $tap_d, TAP_H = $tap_h, TAP_W = $tap_w;
constexpr int NEXT_D = $next_d, NEXT_H = $next_h, NEXT_W = $next_w;
constexpr bool TOGETHER = $together;    // whether the weights of all rows of a plane are at hand at once

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
"""

MULTIPLY = """
// COUNT numbers that are read from shared memory at once.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) Several { T at[COUNT]; };

// Add the products of one staged channel and the taps of one phase; `x` is aligned to $vector elements, and the first
// number that is used lies SHIFT behind it.
template <int TAPS_D, int TAPS_H, int TAPS_W, int SHIFT>
__device__ __forceinline__ void accumulate(Compute (&acc)[FEATURES][ROWS][RUN], const Element* x, const Compute* w) {
    constexpr int VECTOR = $vector, SIDE_BY_SIDE = $side_by_side;
    constexpr int FIRST = SHIFT + (TAP_W < 0 ? (TAPS_W - 1) * -TAP_W : 0);    // of tap 0
    constexpr int REACH = SHIFT + (RUN - 1) * ELEMENT_W + (TAPS_W - 1) * (TAP_W < 0 ? -TAP_W : TAP_W) + 1;
    constexpr int AT_ONCE = TOGETHER ? TAPS_H : 1, STEP = $step_h;
    constexpr int LEAST = TAP_H < 0 ? (AT_ONCE - 1) * TAP_H : 0;
    constexpr int MOST = (ROWS - 1) * ELEMENT_H + (TAP_H < 0 ? 0 : (AT_ONCE - 1) * TAP_H);
#pragma unroll $unroll_d
    for (int td = 0; td < TAPS_D; ++td)
#pragma unroll $unroll_h
        for (int th_0 = 0; th_0 < TAPS_H; th_0 += AT_ONCE) {
            Compute weight[AT_ONCE][TAPS_W][FEATURES];
#pragma unroll
            for (int th = 0; th < AT_ONCE; ++th)
#pragma unroll
                for (int tw = 0; tw < TAPS_W; ++tw)
#pragma unroll
                    for (int o = 0; o < FEATURES; o += SIDE_BY_SIDE) {
                        const int at = (td * NEXT_D + (th_0 + th) * NEXT_H + tw * NEXT_W) * BLOCK_O + o;
                        const auto several = *reinterpret_cast<const Several<Compute, SIDE_BY_SIDE>*>(w + at);
#pragma unroll
                        for (int i = 0; i < SIDE_BY_SIDE; ++i) weight[th][tw][o + i] = several.at[i];
                    }
            // Every input row that is read, in turn, times all taps that lead from it to a row of positions.
#pragma unroll
            for (int row = LEAST; row <= MOST; row += STEP) {
                bool read = false;
#pragma unroll
                for (int i = 0; i < ROWS * AT_ONCE; ++i) read |= i / AT_ONCE * ELEMENT_H + i % AT_ONCE * TAP_H == row;
                if (!read) continue;
                Compute run[ceil_div(REACH, VECTOR) * VECTOR];
#pragma unroll
                for (int i = 0; i < REACH; i += VECTOR) {
                    const Element* const from = x + (td * TAP_D * X_H + row + th_0 * TAP_H) * X_W + i;
                    const auto several = *reinterpret_cast<const Several<Element, VECTOR>*>(from);
#pragma unroll
                    for (int j = 0; j < VECTOR; ++j) run[i + j] = widened(several.at[j]);
                }
#pragma unroll
                for (int rh = 0; rh < ROWS; ++rh)
#pragma unroll
                    for (int th = 0; th < AT_ONCE; ++th) {
                        if (rh * ELEMENT_H + th * TAP_H != row) continue;
#pragma unroll
                        for (int tw = 0; tw < TAPS_W; ++tw)
#pragma unroll
                            for (int o = 0; o < FEATURES; ++o)
#pragma unroll
                                for (int r = 0; r < RUN; ++r)
                                    acc[o][rh][r] += weight[th][tw][o] * run[FIRST + r * ELEMENT_W + tw * TAP_W];
                    }
            }
        }
}
"""

STAGE = """
// Start copying the input of a box of positions, in vectors as large as its rows and those of x allow.
__device__ __forceinline__ void stage_input(const Element* x, Element* tile, int chunk, int cell_d, int cell_h,
                                            int cell_w, int D, int H, int W) {
    const int low_d = cell_d * $advance_d + LOW_D, low_h = cell_h * $advance_h + LOW_H;
    const int low_w = cell_w * $advance_w + LOW_W, channels = C - chunk * CHUNK;
    const Element* const from = x + (long long)(chunk * CHUNK) * D * H * W;
    $stage
}

// Start copying the weights of a round's features and the channels of a chunk, zeros where there are none.
__device__ __forceinline__ void stage_weights(const Element* w, Compute* tile, int round, int chunk) {
    const int group = round / O_BLOCKS, first_feature = round % O_BLOCKS * BLOCK_O;
    for (int i = threadIdx.x; i < W_TILE; i += THREADS) {
        const int tap = i % TAPS, c = i / TAPS % CHUNK, feature = i / (TAPS * CHUNK);
        const bool there = first_feature + feature < O && (C % CHUNK == 0 || chunk * CHUNK + c < C);
        const int row = $row;
        const Element* const from = w + (there ? row * TAPS + tap : 0);
        Compute* const to = tile + (c * TAPS + tap) * BLOCK_O + feature;
        $copy
    }
}
"""

KERNEL = """
// Where a block is: it goes through chunks of channels, within rounds, within tiles.
struct Step { int tile, round, chunk, cell_d, cell_h, cell_w; };

extern "C" __global__ void __launch_bounds__(THREADS, $per_sm)
$name($parameters,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Element* const x_tiles = reinterpret_cast<Element*>(shared_memory);    // one is read while the other is written
    Compute* const w_tiles = reinterpret_cast<Compute*>(x_tiles + 2 * X_TILE);
    $exchange
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int team = threadIdx.x / TEAM, unit = threadIdx.x % TEAM;
    const bool active = unit < UNITS_D * UNITS_H * UNITS_W;
    const int own = active ? unit : 0;
    const int unit_d = own / (UNITS_W * UNITS_H), unit_h = own / UNITS_W % UNITS_H, unit_w = own % UNITS_W;
    const Element* const x_sample = x + (long long)sample * (GROUPS * C) * D * H * W;
    const int x_unit = (unit_d * ELEMENT_D * X_H + unit_h * ROWS * ELEMENT_H) * X_W + unit_w * RUN * ELEMENT_W;
    const int first_round = blockIdx.z;    // a block of features of a group
    $prologue

    const int tiles_h = $tiles_h, tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = $tiles_d * tiles_h * tiles_w;
    const auto place = [&](Step& at) {
        at.cell_d = $first_d;
        at.cell_h = $first_h;
        at.cell_w = at.tile % tiles_w * CELLS_W;
    };
    const auto advance = [&](Step& at) {
        if (++at.chunk < CHUNKS) return;
        at.chunk = 0;
        if (++at.round < first_round + ROUNDS) return;
        at.round = first_round;
        at.tile += parts;
        place(at);
    };
    const auto stage = [&](const Step& at, int buffer) {
        const Element* const x_group = x_sample + at.round / O_BLOCKS * C * (D * H * W);
        stage_input(x_group, x_tiles + buffer * X_TILE, at.chunk, at.cell_d, at.cell_h, at.cell_w, D, H, W);
        $stage_weights
        copy_async_commit();
    };
    Step next = {part, first_round, 0, 0, 0, 0};
    place(next);
    if (part < tiles) stage(next, 0);
    Compute acc[PHASES][FEATURES][ROWS][RUN];
    for (int buffer = 0; next.tile < tiles; buffer ^= 1) {
        const Step now = next;
        advance(next);
        copy_async_wait<0>();
        __syncthreads();    // what this step reads is there, what the last one read is free
        if (next.tile < tiles) stage(next, buffer ^ 1);
        if (now.chunk == 0)
#pragma unroll
            for (int i = 0; i < PHASES * FEATURES * ROWS * RUN; ++i) (&acc[0][0][0][0])[i] = Compute(0);
        const Element* const x_tile = x_tiles + buffer * X_TILE + x_unit;
        const Compute* const w_tile = w_tiles + $w_tile * W_TILE + team * FEATURES;
#pragma unroll $unroll
        for (int c = 0; c < CHUNK; ++c) {
            const Element* const x_c = x_tile + c * (X_D * X_H * X_W);
            const Compute* const w_c = w_tile + c * (TAPS * BLOCK_O);
            $accumulate
        }
        if (now.chunk < CHUNKS - 1) continue;

        const int cell_d = now.cell_d, cell_h = now.cell_h, cell_w = now.cell_w, round = now.round;
        const int group = round / O_BLOCKS, first_feature = round % O_BLOCKS * BLOCK_O;
        $finished
    }
    $close
}
"""

CLOSE_POSITIONS = """
// Over the lanes of a warp, then over a team's warps, in a fixed order.
__syncthreads();
$total(*const across)[BLOCK_O] = reinterpret_cast<$total(*)[BLOCK_O]>(shared_memory);
#pragma unroll
for (int o = 0; o < FEATURES; ++o) {
    $total value = total[o];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) value = $lanes;
    if (threadIdx.x % 32 == 0) across[unit / 32][team * FEATURES + o] = value;
}
__syncthreads();
const int group = first_round / O_BLOCKS, first_feature = first_round % O_BLOCKS * BLOCK_O;
for (int i = threadIdx.x; i < BLOCK_O && first_feature + i < O; i += THREADS) {
    $total value = across[0][i];
    for (int warp = 1; warp < TEAM / 32; ++warp) value = $warps;
    partial[((long long)sample * parts + part) * (GROUPS * O) + group * O + first_feature + i] = value;
}
"""

CLOSE_ALL = """
// Over the lanes of a warp, then over the warps, in a fixed order.
__syncthreads();
$total* const across = reinterpret_cast<$total*>(shared_memory);
#pragma unroll
for (int distance = 1; distance < 32; distance *= 2) total = $lanes;
if (threadIdx.x % 32 == 0) across[threadIdx.x / 32] = total;
__syncthreads();
if (threadIdx.x == 0) {
    for (int warp = 1; warp < THREADS / 32; ++warp) total = $warps;
    partial[((long long)sample * parts + part) * gridDim.z + blockIdx.z] = total;
}
"""
