"""The C++ text of contraction kernels: everything that is the same for all groups but for named constants."""

from __future__ import annotations

CONSTANTS = """
using Element = $element;    // of the input and the weight in memory
using Compute = $compute;    // of everything else

constexpr int CHANNELS = $channels, FEATURES = $features, GROUPS = $groups;    // $about
constexpr int TAPS_D = $taps_d, TAPS_H = $taps_h, TAPS_W = $taps_w, TAPS = TAPS_D * TAPS_H * TAPS_W;

// Features lie along the lanes of vectors.
#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, REGISTERS = 24;    // of 32: inputs take some, since they are no operands in memory
#else
constexpr int VECTOR_BYTES = 16, REGISTERS = 16;
#endif
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int LANES = smaller(VECTOR_BYTES / sizeof(Compute), $lanes);
using Vector __attribute__((vector_size(LANES * sizeof(Compute)))) = Compute;
inline Vector load(const Compute* at) {
    Vector lanes;
    std::memcpy(&lanes, at, sizeof lanes);
    return lanes;
}
inline void store(Vector lanes, Compute* at) { std::memcpy(at, &lanes, sizeof lanes); }
$turning
constexpr int VECTORS = $vectors, BLOCK = VECTORS * LANES, BLOCKS = ceil_div(FEATURES, BLOCK);

// A phase of a dimension: the output positions `index * STRIDE + phase`.  Its taps read the input at
// `index * ADVANCE + first + tap * STEP`, and are taps `start + tap * BETWEEN` of the weight; `before` counts those of
// earlier phases.
struct Phase { int first, taps, start, before; };
$phases
constexpr int LOWEST_D = $lowest_d, LOWEST_H = $lowest_h, LOWEST_W = $lowest_w;    // of first + tap * STEP
constexpr int REACH_D = $reach_d, REACH_H = $reach_h, REACH_W = $reach_w;    // from there to the highest
$pool
// A strip of results, the positions of the convolution that they need, and the inputs that those read.
constexpr int STRIP_D = $strip_d, STRIP_H = $strip_h, STRIP_W = $strip_w;
constexpr int POSITIONS_D = $positions_d, POSITIONS_H = $positions_h, POSITIONS_W = $positions_w;
constexpr int INPUTS_D = ceil_div(POSITIONS_D - 1, STRIDE_D) * ADVANCE_D + REACH_D;
constexpr int INPUTS_H = ceil_div(POSITIONS_H - 1, STRIDE_H) * ADVANCE_H + REACH_H;
constexpr int INPUTS_W = ceil_div(POSITIONS_W - 1, STRIDE_W) * ADVANCE_W + REACH_W;
$steps

// A tile of sums in registers: TILE positions of one phase and row, a block of features.  The weights of TOGETHER taps
// are at hand, so that an input once read serves all of them.
constexpr int TOGETHER = $together, MOST = larger(1, (REGISTERS - $at_hand - TOGETHER * VECTORS) / VECTORS);
constexpr int IN_ROW = ceil_div(POSITIONS_W - 1, STRIDE_W) + 1;
constexpr int tile_of(int row) {    // little idle in a row's last tile, and few tiles, since each loads the weights
    int best = 1;
    for (int tile = 2; tile <= MOST; ++tile)
        if (ceil_div(row, tile) * (2 * tile + 1) <= ceil_div(row, best) * (2 * best + 1)) best = tile;
    return best;
}
constexpr int TILE = tile_of(IN_ROW), PITCH = ceil_div(IN_ROW, TILE) * TILE * STRIDE_W + STRIDE_W - 1;
// So many channels are added up before their sum joins that of the others: what they need stays in the first cache,
// and long chains of additions would lose digits.
constexpr int CHUNK = $chunk;

constexpr int STAGED = $staged + TILE * ADVANCE_W * COLUMN + LANES;
constexpr int WEIGHTS = CHANNELS * TAPS * BLOCK;    // of a block of features
"""

TURNING = """
// Rows become columns SIDE numbers at a time: where the next ones begin after those at `at`, the last ones ending at
// `end`.
template <int SIDE>
inline int next_square(int at, int end) { return at + SIDE == end ? end : smaller(at + SIDE, end - SIDE); }
"""

PHASES = "constexpr int STRIDE_$A = $stride, ADVANCE_$A = $advance, STEP_$A = $step, BETWEEN_$A = $between;"

PACK = """
// The weight in the order of use: packed[group][block][phase][chunk][d][h][channel][w][feature of the block].
void pack(const Element* __restrict w, Compute* __restrict packed, int group, int block) {
    const int first_feature = block * BLOCK, features = smaller(BLOCK, FEATURES - first_feature);
    Compute* of_chunk = packed + (group * BLOCKS + block) * (long long)WEIGHTS;
    for (const Phase& d : PHASES_D)
        for (const Phase& h : PHASES_H)
            for (const Phase& v : PHASES_W)
                for (int chunk = 0; chunk < CHANNELS; chunk += CHUNK) {
                    const int channels = smaller(CHUNK, CHANNELS - chunk), rows = d.taps * h.taps;
                    for (int c = chunk; c < chunk + channels; ++c)
                        for (int i = 0; i < rows * v.taps; ++i) {
                            const int row = i / v.taps, tap = i % v.taps;
                            const int tap_d = d.start + row / h.taps * BETWEEN_D;
                            const int tap_h = h.start + row % h.taps * BETWEEN_H, tap_w = v.start + tap * BETWEEN_W;
                            const int offset = (tap_d * TAPS_H + tap_h) * TAPS_W + tap_w;
                            const int at = ($first) * TAPS + offset;
                            Compute* to = of_chunk + ((row * channels + c - chunk) * v.taps + tap) * BLOCK;
                            for (int f = 0; f < BLOCK; ++f)
                                to[f] = f < features ? $weight : Compute(0);
                        }
                    of_chunk += channels * rows * v.taps * BLOCK;
                }
}
"""

# Features are rows of a matrix then, which are turned as in `contraction_stage`.
PACK_ROWS = """
// The weight in the order of use: packed[group][block][channel][feature of the block].
void pack(const Element* __restrict w, Compute* __restrict packed, int group, int block) {
    constexpr int SIDE = CHANNELS < LANES ? 1 : LANES;
    const int features = smaller(BLOCK, FEATURES - block * BLOCK);
    const Element* of_block = w + (group * FEATURES + block * BLOCK) * (long long)CHANNELS;
    Compute* to = packed + (group * BLOCKS + block) * (long long)WEIGHTS;
    for (int f = 0; f < BLOCK; f += LANES) {
        const Element* row[LANES];    // behind the last feature, that one again
        for (int lane = 0; lane < LANES; ++lane) row[lane] = of_block + smaller(f + lane, features - 1) * CHANNELS;
        for (int c = 0; c < CHANNELS; c = next_square<SIDE>(c, CHANNELS))
#pragma omp simd
            for (int n = 0; n < SIDE; ++n)
#pragma GCC unroll 16
                for (int lane = 0; lane < LANES; ++lane) to[(c + n) * BLOCK + f + lane] = $weight;
    }
}
"""

MULTIPLY = """
// The taps of a phase that read inside of the image: the first one reads it at `at`, the others in steps.
struct Inside {
    int first = 0, last;
    Inside(int taps, int at, int step, int length) : last(taps) {
        while (first < last && unsigned(at + first * step) >= unsigned(length)) ++first;
        while (first < last && unsigned(at + (last - 1) * step) >= unsigned(length)) --last;
    }
};

// The products of one tile, for `channels` channels: y[TILE * STRIDE_W][BLOCK] = or, with `more`, +=.  x is the staged
// input of the tile's first position and first taps, weights those of the phases' first taps, `rows` for each along d.
template <int TAPS_OF_ROW>
void multiply(const Compute* __restrict x, const Inside& along_d, const Inside& along_h, int rows, int channels,
    const Compute* __restrict weights, Compute* __restrict y, bool more) {
    constexpr int HELD = TAPS_OF_ROW % TOGETHER ? 1 : TOGETHER;
    constexpr int LEFT = STEP_W < 0 ? (HELD - 1) * STEP_W : 0, RIGHT = STEP_W > 0 ? (HELD - 1) * STEP_W : 0;
    Vector sum[TILE][VECTORS] = {};
    for (int d = along_d.first; d < along_d.last; ++d)
        for (int h = along_h.first; h < along_h.last; ++h) {
            const Compute* row = x + d * STEP_D * PLANE + h * STEP_H * ROW;
            const Compute* w = weights + (d * rows + h) * channels * TAPS_OF_ROW * BLOCK;
            for (int c = 0; c < channels; ++c, row += CHANNEL)
#pragma GCC unroll 1
                for (int tap = 0; tap < TAPS_OF_ROW; tap += HELD, w += HELD * BLOCK) {
                    Vector weight[HELD][VECTORS];
#pragma GCC unroll 64
                    for (int i = 0; i < HELD * VECTORS; ++i)
                        weight[i / VECTORS][i % VECTORS] = load(w + i * LANES);
#pragma GCC unroll 512
                    for (int column = LEFT; column <= (TILE - 1) * ADVANCE_W + RIGHT; ++column) {
                        $value
#pragma GCC unroll 16
                        for (int held = 0; held < HELD; ++held) {
                            const int from = column - held * STEP_W, position = from / ADVANCE_W;
                            if (from >= 0 && from % ADVANCE_W == 0 && position < TILE)
#pragma GCC unroll 16
                                for (int v = 0; v < VECTORS; ++v) sum[position][v] += $factor * weight[held][v];
                        }
                    }
                }
        }
#pragma GCC unroll 512
    for (int i = 0; i < TILE * VECTORS; ++i) {
        Compute* to = y + i / VECTORS * STRIDE_W * BLOCK + i % VECTORS * LANES;
        const Vector part = sum[i / VECTORS][i % VECTORS];
        store(more ? load(to) + part : part, to);
    }
}
"""

VALUE = "const Compute value = row[(tap * STEP_W + column) * COLUMN];"
VALUES = """
Vector value[VECTORS];
#pragma GCC unroll 16
for (int v = 0; v < VECTORS; ++v) value[v] = load(row + (tap * STEP_W + column) * COLUMN + v * LANES);
"""

ROWS = """
// The products of `CHUNK` channels from `chunk` on at `count` positions of one row from position w on, and of those
// before: row[position][BLOCK].  staged is the input at rows (d, h) of their phases' first taps, the strip's input
// beginning at column left.
void convolve(const Compute* __restrict staged, const Phase& d, const Phase& h, const Inside& along_d,
    const Inside& along_h, int w, int count, int left, int chunk, const Compute* __restrict weights,
    Compute* __restrict row) {
    const int before = (d.before * TAPS_H + d.taps * h.before) * TAPS_W;
    const int channels = smaller(CHUNK, CHANNELS - chunk);
    const Compute* x = staged + chunk * CHANNEL;
    $phases
}
"""

# Along w: all positions are of one phase, or the phases take turns.
ROW = """
constexpr const Phase& v = PHASES_W[0];
const Compute* of_chunk = weights + (before * CHANNELS + chunk * d.taps * h.taps * TAPS_W) * BLOCK;
for (int index = w; index < w + count; index += TILE)
    multiply<v.taps>(x + (index * ADVANCE_W + v.first - left) * COLUMN, along_d, along_h, h.taps, channels,
        of_chunk, row + (index - w) * BLOCK, chunk > 0);
"""
ROW_PHASE = """
{
    constexpr const Phase& v = PHASES_W[$phase];
    const int taps = d.taps * h.taps, begin = (w - $phase + STRIDE_W - 1) / STRIDE_W;
    const Compute* of_chunk = weights + ((before + taps * v.before) * CHANNELS + chunk * taps * v.taps) * BLOCK;
    for (int index = begin; index * STRIDE_W + $phase < w + count; index += TILE)
        multiply<v.taps>(x + (index * ADVANCE_W + v.first - left) * COLUMN, along_d, along_h, h.taps, channels,
            of_chunk, row + (index * STRIDE_W + $phase - w) * BLOCK, chunk > 0);
}
"""

STRIP = """

// What a thread works on, in whole cache lines.
struct alignas(64) Line { Compute at[64 / sizeof(Compute)]; };
constexpr long long lines(long long numbers) { return (numbers * sizeof(Compute) + 63) / 64; }
constexpr long long BAND = (long long)ROWS_D * ROWS_H * PITCH * BLOCK;
struct Scratch {
    std::vector<Line> staged, band, results;
    $over
    Scratch() : staged(lines(STAGED)), band(lines(BAND)), results(lines(STRIP_W * BLOCK)) {}
};

// One strip of results of one sample, for one part of the blocks of features.
void strip(const Call& call, long long task, Scratch& own) {
    const int strips_h = ceil_div(call.out_h, STRIP_H), strips_w = ceil_div(call.out_w, STRIP_W);
    long long rest = task;
    const int part = rest % PARTS;
    rest /= PARTS;
    $one_group
    const int first_w = rest % strips_w * STRIP_W, last_w = smaller(first_w + STRIP_W, call.out_w);
    rest /= strips_w;
    const int first_h = rest % strips_h * STRIP_H, last_h = smaller(first_h + STRIP_H, call.out_h);
    rest /= strips_h;
    const int strips_d = ceil_div(call.out_d, STRIP_D);
    const int first_d = rest % strips_d * STRIP_D, last_d = smaller(first_d + STRIP_D, call.out_d);
    const long long sample = rest / strips_d;

    // Positions of the convolution that the strip needs, and the input at the first of their taps.
    $positions
    const int left_d = from_d / STRIDE_D * ADVANCE_D + LOWEST_D;
    const int rows_d = ((to_d - 1) / STRIDE_D - from_d / STRIDE_D) * ADVANCE_D + REACH_D;
    const int left_h = from_h / STRIDE_H * ADVANCE_H + LOWEST_H;
    const int rows_h = ((to_h - 1) / STRIDE_H - from_h / STRIDE_H) * ADVANCE_H + REACH_H;
    const int left_w = from_w / STRIDE_W * ADVANCE_W + LOWEST_W;
    const int columns = ((to_w - 1) / STRIDE_W - from_w / STRIDE_W) * ADVANCE_W + REACH_W;
    Compute *staged = own.staged.data()->at, *band = own.band.data()->at;
    $open_strip
    $groups
    $close_strip
}
"""

GROUP = """
const long long image = (long long)call.in_d * call.in_h * call.in_w;
const Element* x = call.x + $group_of_x;
$stage_group
for (int block = part * PART; block < smaller(part * PART + PART, BLOCKS); ++block) {
    const int features = smaller(BLOCK, FEATURES - block * BLOCK), first_feature = group * FEATURES + block * BLOCK;
    const Compute* weights = call.packed + (group * BLOCKS + block) * (long long)WEIGHTS;
    $stage_block
    $open_block
    $bands
    $close_block
}
"""

BANDS = """
const int count = last_w - first_w;
for (int band_d = first_d; band_d < last_d; band_d += BAND_D)
    for (int band_h = first_h; band_h < last_h; band_h += BAND_H) {
        const int last_band_d = smaller(band_d + BAND_D, last_d);
        const int last_band_h = smaller(band_h + BAND_H, last_h);
        $rows
        for (int chunk = 0; chunk < CHANNELS; chunk += CHUNK)    // its weights are at hand for all rows
            for (int i = begin_d; i < end_d; ++i)
                for (int j = begin_h; j < end_h; ++j) {
                    const Phase &of_d = PHASES_D[i % STRIDE_D], &of_h = PHASES_H[j % STRIDE_H];
                    const int row_d = i / STRIDE_D * ADVANCE_D + of_d.first - left_d;
                    const int row_h = j / STRIDE_H * ADVANCE_H + of_h.first - left_h;
                    Compute* row = band + ((i - begin_d) * ROWS_H + j - begin_h) * PITCH * BLOCK;
                    const Compute* first = staged + row_d * PLANE + row_h * ROW;
                    const Inside along_d(of_d.taps, $along_d);
                    const Inside along_h(of_h.taps, $along_h);
                    convolve(first, of_d, of_h, along_d, along_h, from_w, to_w - from_w, left_w, chunk, weights,
                        row);
                    $before
                }
        for (int d = band_d; d < last_band_d; ++d)
            for (int h = band_h; h < last_band_h; ++h) {
                $results
                $after
                $take
            }
    }
"""

# Without a pooling, positions are the results.
POSITIONS = "const Compute* results = band + ((d - begin_d) * ROWS_H + h - begin_h) * PITCH * BLOCK;"

ENTRY = """
const Call call = {$fields};
const long long strips = (long long)ceil_div(out_d, STRIP_D) * ceil_div(out_h, STRIP_H) * ceil_div(out_w, STRIP_W);
const long long tasks = N * strips * $tasks;
#pragma omp parallel num_threads(threads)
{
#pragma omp for schedule(static)
    for (int i = 0; i < GROUPS * BLOCKS; ++i) pack(w, packed, i / BLOCKS, i % BLOCKS);
    Scratch own;
#pragma omp for schedule(dynamic)
    for (long long task = 0; task < tasks; ++task) strip(call, task, own);
}
"""

ONE_GROUP = """
const int group = rest % GROUPS;
rest /= GROUPS;
"""
ALL_GROUPS = "for (int group = 0; group < GROUPS; ++group)"
