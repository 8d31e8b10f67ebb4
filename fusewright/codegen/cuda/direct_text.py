"""The CUDA text of direct contraction kernels: everything that is the same for all groups but for named constants."""

from __future__ import annotations

CONSTANTS = """
using Element = $element;    // of tensors in memory
using Compute = $compute;    // of everything else

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int C = $channels, O = $features, GROUPS = $groups;    // channels of a group, in and out
constexpr int TAPS = $taps, TAPS_H = $taps_h, TAPS_W = $taps_w;    // of one channel's kernel, its planes and rows

// A thread owns FEATURES features at PLANES x ROWS x RUN positions of every phase; a team's threads share the features.
constexpr int FEATURES = $own_features, PLANES = $planes, ROWS = $rows, RUN = $run, PHASES = $phases;
constexpr int UNITS_D = $units_d, UNITS_H = $units_h, UNITS_W = $units_w;    // threads side by side
constexpr int TEAM = $team, TEAMS = $teams, THREADS = TEAM * TEAMS;
constexpr int BLOCK_O = FEATURES * TEAMS, O_BLOCKS = $o_blocks;
constexpr int CELLS_D = $cells_d, CELLS_H = $cells_h, CELLS_W = $cells_w;    // of a block
constexpr int CHUNK = $chunk, CHUNKS = $chunks, PART = $part;    // input channels staged at a time, those of a group
constexpr int ROUNDS = $passes, AT_ONCE = CHUNK / PART;    // blocks of features that one block goes through; in a step

// Shared memory: the input as [channel][d][h][w], BUFFERS times; weights as [channel][team][residue][turn][at hand].
constexpr int BUFFERS = $buffers;
constexpr int X_D = $x_d, X_H = $x_h, X_W = $x_w, X_CHANNEL = X_D * X_H * X_W, X_TILE = $x_tile;
constexpr int LOW_D = $low_d, LOW_H = $low_h, LOW_W = $low_w;    // input index of cell 0 that is staged first
// Steps in the staged input from position to position and from tap to tap.
constexpr int ELEMENT_D = $element_d, ELEMENT_H = $element_h, ELEMENT_W = $element_w;
constexpr int TAP_D = $tap_d, TAP_H = $tap_h, TAP_W = $tap_w;
// Taps of a phase are congruent; of those along d and h either all are at hand at once, or one at a turn.
constexpr int RESIDUES_D = $residues_d, RESIDUES_H = $residues_h, RESIDUES_W = $residues_w;
$weights
constexpr int W_TILES = $w_tiles;
"""

WEIGHTS = """
constexpr int HAND_D = $hand_d, HAND_H = $hand_h, HAND_W = $hand_w, TURNS_D = $turns_d, TURNS_H = $turns_h;
constexpr int W_VECTOR = $w_vector, AT_HAND = ceil_div(HAND_D * HAND_H * HAND_W * FEATURES, W_VECTOR) * W_VECTOR;
constexpr int W_RESIDUE = TURNS_D * TURNS_H * AT_HAND, W_TEAM = RESIDUES_D * RESIDUES_H * RESIDUES_W * W_RESIDUE;
constexpr int W_TILE = PART * TEAMS * W_TEAM;
"""

MULTIPLY = """
// COUNT numbers that are read from shared memory at once.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) Several { T at[COUNT]; };

// The tap that leads so many `steps` away where taps are `tap` apart; out of range or not quite where none does.
__device__ __forceinline__ constexpr int tap_of(int steps, int tap) { return tap == 0 ? 0 : steps / tap; }

// Add the products of one staged channel and the taps of one phase, so many along d, h, w; `x` is aligned to $vector
// elements, and the first number that is used lies SHIFT behind it.
template <int D, int H, int W, int SHIFT>
__device__ __forceinline__ void accumulate(Compute (&acc)[FEATURES][PLANES][ROWS][RUN], const Element* x,
                                           const Compute* w) {
    constexpr int VECTOR = $vector;
    constexpr int FIRST = SHIFT + (TAP_W < 0 ? (W - 1) * -TAP_W : 0);    // of tap 0
    constexpr int REACH = SHIFT + (RUN - 1) * ELEMENT_W + (W - 1) * (TAP_W < 0 ? -TAP_W : TAP_W) + 1;
    constexpr int AT_ONCE_D = TURNS_D == 1 ? D : 1, AT_ONCE_H = TURNS_H == 1 ? H : 1;
    constexpr int LEAST_D = TAP_D < 0 ? (AT_ONCE_D - 1) * TAP_D : 0, LEAST_H = TAP_H < 0 ? (AT_ONCE_H - 1) * TAP_H : 0;
    constexpr int MOST_D = (PLANES - 1) * ELEMENT_D + (TAP_D < 0 ? 0 : (AT_ONCE_D - 1) * TAP_D);
    constexpr int MOST_H = (ROWS - 1) * ELEMENT_H + (TAP_H < 0 ? 0 : (AT_ONCE_H - 1) * TAP_H);
#pragma unroll $unroll_d
    for (int td_0 = 0; td_0 < D; td_0 += AT_ONCE_D)
#pragma unroll $unroll_h
        for (int th_0 = 0; th_0 < H; th_0 += AT_ONCE_H) {
            Compute weight[AT_HAND];
#pragma unroll
            for (int i = 0; i < AT_HAND; i += W_VECTOR) {
                const Compute* const from = w + (td_0 * TURNS_H + th_0) * AT_HAND + i;
                const auto several = *reinterpret_cast<const Several<Compute, W_VECTOR>*>(from);
#pragma unroll
                for (int j = 0; j < W_VECTOR; ++j) weight[i + j] = several.at[j];
            }
            // Every input row, in turn, times all taps that lead from it to a row of positions.  Where none does, the
            // compiler leaves its reads out.
#pragma unroll
            for (int plane = LEAST_D; plane <= MOST_D; ++plane)
#pragma unroll
                for (int row = LEAST_H; row <= MOST_H; ++row) {
                    Compute run[ceil_div(REACH, VECTOR) * VECTOR];
#pragma unroll
                    for (int i = 0; i < REACH; i += VECTOR) {
                        const int h = row + th_0 * TAP_H, d = plane + td_0 * TAP_D;
                        const Element* const from = x + (d * X_H + h) * X_W + i;
                        const auto several = *reinterpret_cast<const Several<Element, VECTOR>*>(from);
#pragma unroll
                        for (int j = 0; j < VECTOR; ++j) run[i + j] = widened(several.at[j]);
                    }
#pragma unroll
                    for (int pd = 0; pd < PLANES; ++pd) {
                        const int td = tap_of(plane - pd * ELEMENT_D, TAP_D);
                        if (td < 0 || td >= AT_ONCE_D || pd * ELEMENT_D + td * TAP_D != plane) continue;
#pragma unroll
                        for (int rh = 0; rh < ROWS; ++rh) {
                            const int th = tap_of(row - rh * ELEMENT_H, TAP_H);
                            if (th < 0 || th >= AT_ONCE_H || rh * ELEMENT_H + th * TAP_H != row) continue;
#pragma unroll
                            for (int tw = 0; tw < W; ++tw)
#pragma unroll
                                for (int o = 0; o < FEATURES; ++o)
#pragma unroll
                                    for (int r = 0; r < RUN; ++r)
                                        acc[o][pd][rh][r] +=
                                            weight[((td * HAND_H + th) * HAND_W + tw) * FEATURES + o] *
                                            run[FIRST + r * ELEMENT_W + tw * TAP_W];
                        }
                    }
                }
        }
}
"""

STAGE = """
// Start copying so many `channels` of a box of positions, in vectors as large as its rows and those of the input allow;
// zeros where a chunk has more.
__device__ __forceinline__ void stage_input(const Element* from, Element* tile, int channels, int cell_d, int cell_h,
                                            int cell_w, int D, int H, int W) {
    const int low_d = $begin_d + LOW_D, low_h = $begin_h + LOW_H, low_w = $begin_w + LOW_W;
    $stage
}

$stage_weights
"""

STAGE_WEIGHTS = """
// Start copying the weights of a round's features and the channels of a chunk, zeros where there are none; and of the
// next ones, SEVERAL in all.
template <int SEVERAL>
__device__ __forceinline__ void stage_weights(const Element* w, Compute* tiles, int first_round, int first_chunk) {
    constexpr int COUNT = PART * TAPS * BLOCK_O;
    for (int k = threadIdx.x; k < SEVERAL * COUNT; k += THREADS) {
        const int which = SEVERAL == 1 ? 0 : k / COUNT, i = SEVERAL == 1 ? k : k % COUNT;
        const int round = first_round + which / CHUNKS, chunk = first_chunk + which % CHUNKS;
        const int group = round / O_BLOCKS, first_feature = round % O_BLOCKS * BLOCK_O;
        const int tap = i % TAPS, c = i / TAPS % PART, feature = i / (TAPS * PART);
        const bool there = first_feature + feature < O && (C % PART == 0 || chunk * PART + c < C);
        const int row = $row;
        const Element* const from = w + (there ? row * TAPS + tap : 0);
        const int tap_d = tap / (TAPS_H * TAPS_W), tap_h = tap / TAPS_W % TAPS_H, tap_w = tap % TAPS_W;
        const int residue = (tap_d % RESIDUES_D * RESIDUES_H + tap_h % RESIDUES_H) * RESIDUES_W + tap_w % RESIDUES_W;
        const int td = tap_d / RESIDUES_D, th = tap_h / RESIDUES_H, tw = tap_w / RESIDUES_W;
        const int turn = td % TURNS_D * TURNS_H + th % TURNS_H;
        const int at = ((td % HAND_D * HAND_H + th % HAND_H) * HAND_W + tw) * FEATURES + feature % FEATURES;
        Compute* const of_team = tiles + which * W_TILE + (c * TEAMS + feature / FEATURES) * W_TEAM;
        Compute* const to = of_team + residue * W_RESIDUE + turn * AT_HAND + at;
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
    Element* const x_tiles = reinterpret_cast<Element*>(shared_memory);    // while one is read, another is written
    Compute* const w_tiles = reinterpret_cast<Compute*>(x_tiles + BUFFERS * X_TILE);
    $exchange
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int team = threadIdx.x / TEAM, unit = threadIdx.x % TEAM;
    $own
    const Element* const x_sample = x + (long long)sample * (GROUPS * C) * D * H * W;
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
        if ((at.round += AT_ONCE) < first_round + ROUNDS) return;
        at.round = first_round;
        at.tile += parts;
        place(at);
    };
    const auto stage = [&](const Step& at, int buffer) {
        const int group = at.round / O_BLOCKS, first = group * C + at.chunk * CHUNK;    // of the channels
        const int channels = min(group + AT_ONCE, GROUPS) * C - first;
        const Element* const from = x_sample + (long long)first * D * H * W;
        stage_input(from, x_tiles + buffer * X_TILE, channels, at.cell_d, at.cell_h, at.cell_w, D, H, W);
        $stage_weights
        copy_async_commit();
    };
    Step next = {part, first_round, 0, 0, 0, 0};
    place(next);
    if (BUFFERS == 2 && part < tiles) stage(next, 0);
    $values
    for (int buffer = 0; next.tile < tiles; buffer ^= BUFFERS - 1) {
        const Step now = next;
        advance(next);
        if (BUFFERS == 1) {    // other blocks multiply meanwhile
            __syncthreads();
            stage(now, 0);
        }
        copy_async_wait<0>();
        __syncthreads();    // what this step reads is there, what the last one read is free
        if (BUFFERS == 2 && next.tile < tiles) stage(next, buffer ^ 1);
        $step
    }
    $close
}
"""

# What a block does with what is staged: of one round,
STEP = """
const Element* const x_tile = x_tiles + buffer * X_TILE;
const Compute* const w_tile = w_tiles + $w_tile * W_TILE + team * W_TEAM;
$products
const int cell_d = now.cell_d, cell_h = now.cell_h, cell_w = now.cell_w, round = now.round;
const int group = round / O_BLOCKS, first_feature = round % O_BLOCKS * BLOCK_O;
$finished
"""

# and of several, whose values go into running results in registers.
STEP_OF_ROUNDS = """
$begun
#pragma unroll $unroll
for (int i = 0; i < AT_ONCE; ++i) {
    const int round = now.round + i;
    if (ROUNDS % AT_ONCE > 0 && round >= ROUNDS) break;
    const Element* const x_tile = x_tiles + buffer * X_TILE + i * PART * X_CHANNEL;
    const Compute* const w_tile = w_tiles + round * W_TILE + team * W_TEAM;
    $products
    const int group = round / O_BLOCKS, first_feature = round % O_BLOCKS * BLOCK_O;
    $taken
}
if (now.round + AT_ONCE < ROUNDS) continue;
const int cell_d = now.cell_d, cell_h = now.cell_h, cell_w = now.cell_w;
$finished
"""

# The last windows of a row may be folded twice, so that all threads fold as many.
FOLDED_ALONG = """
for (int i = threadIdx.x; i < $count; i += THREADS) {
    const int first = min(i / $inner % $turns * $several, $cells - $several), outer = i / ($inner * $turns);
    $running several[$several];
    fold_windows<$size, $apart, $inner>($source + (outer * $extent + first * $apart) * $inner + i % $inner, several);
#pragma unroll
    for (int k = 0; k < $several; ++k)
        $target[(outer * $cells + first + k) * $inner + i % $inner] = several[k];
}
__syncthreads();
"""

FOLD_WINDOWS = """
// What SEVERAL windows come to: of SIZE numbers STEP apart, each APART numbers behind the one before.  What all of them
// have is joined first, then what lies ahead of it, from which more and more windows begin, and behind it.
template <int SIZE, int APART, int STEP, int SEVERAL>
__device__ __forceinline__ void fold_windows(const $running* from, $running (&several)[SEVERAL]) {
    constexpr int LAST = (SEVERAL - 1) * APART;    // where the last one begins
    $running value = from[LAST * STEP];
#pragma unroll
    for (int k = LAST + 1; k < SIZE; ++k) value = $ahead;
    several[SEVERAL - 1] = value;
#pragma unroll
    for (int k = LAST - 1; k >= 0; --k) {
        value = $ahead;
        if (k % APART == 0) several[k / APART] = value;
    }
    value = $empty;
#pragma unroll
    for (int k = SIZE; k < SIZE + LAST; ++k) {
        value = $ahead;
        const int ended = (k - SIZE) / APART + 1;
        if ((k - SIZE) % APART == APART - 1) several[ended] = $behind;
    }
}
"""

# What a thread computes, of which it has the values of several chunks in registers.
OWN = """
const bool active = unit < UNITS_D * UNITS_H * UNITS_W;
const int own = active ? unit : 0;
const int unit_d = own / (UNITS_W * UNITS_H), unit_h = own / UNITS_W % UNITS_H, unit_w = own % UNITS_W;
const int x_row = unit_d * PLANES * ELEMENT_D * X_H + unit_h * ROWS * ELEMENT_H;
const int x_unit = x_row * X_W + unit_w * RUN * ELEMENT_W;
"""

PRODUCTS = """
if (now.chunk == 0)
#pragma unroll
    for (int i = 0; i < PHASES * FEATURES * PLANES * ROWS * RUN; ++i) (&acc[0][0][0][0][0])[i] = Compute(0);
#pragma unroll $unroll
for (int c = 0; c < PART; ++c) {
    const Element* const x_c = x_tile + x_unit + c * (X_D * X_H * X_W);
    const Compute* const w_c = w_tile + c * (TEAMS * W_TEAM);
    $accumulate
}
$wait
"""

CLOSE_POSITIONS = """
// Over the lanes of a warp, then over a team's warps, in a fixed order.
__syncthreads();
$total(*const across)[BLOCK_O] = reinterpret_cast<$total(*)[BLOCK_O]>(shared_memory);
#pragma unroll
for (int o = 0; o < FEATURES; ++o) {
    $total value = $own;
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
$total value = $own;
#pragma unroll
for (int distance = 1; distance < 32; distance *= 2) value = $lanes;
if (threadIdx.x % 32 == 0) across[threadIdx.x / 32] = value;
__syncthreads();
if (threadIdx.x == 0) {
    for (int warp = 1; warp < THREADS / 32; ++warp) value = $warps;
    partial[((long long)sample * parts + part) * gridDim.z + blockIdx.z] = value;
}
"""
