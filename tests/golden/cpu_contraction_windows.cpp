// fused_test: a convolution and what follows it, strip by strip.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace fused_test {

using index_t = long long;

using Element = float;    // of the input and the weight in memory
using Compute = float;    // of everything else

constexpr int CHANNELS = 8, FEATURES = 16, GROUPS = 1;    // of a group, in and out
constexpr int TAPS_D = 3, TAPS_H = 3, TAPS_W = 3, TAPS = TAPS_D * TAPS_H * TAPS_W;

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
constexpr int LANES = smaller(VECTOR_BYTES / sizeof(Compute), 16);
using Vector __attribute__((vector_size(LANES * sizeof(Compute)))) = Compute;
inline Vector load(const Compute* at) {
    Vector lanes;
    std::memcpy(&lanes, at, sizeof lanes);
    return lanes;
}
inline void store(Vector lanes, Compute* at) { std::memcpy(at, &lanes, sizeof lanes); }
constexpr int VECTORS = 1, BLOCK = VECTORS * LANES, BLOCKS = ceil_div(FEATURES, BLOCK);

// A phase of a dimension: the output positions `index * STRIDE + phase`.  Its taps read the input at
// `index * ADVANCE + first + tap * STEP`, and are taps `start + tap * BETWEEN` of the weight; `before` counts those of
// earlier phases.
struct Phase { int first, taps, start, before; };
constexpr int STRIDE_D = 1, ADVANCE_D = 1, STEP_D = 1, BETWEEN_D = 1;
constexpr Phase PHASES_D[STRIDE_D] = {{0, 3, 0, 0}};
constexpr int STRIDE_H = 1, ADVANCE_H = 1, STEP_H = 1, BETWEEN_H = 1;
constexpr Phase PHASES_H[STRIDE_H] = {{0, 3, 0, 0}};
constexpr int STRIDE_W = 1, ADVANCE_W = 1, STEP_W = 1, BETWEEN_W = 1;
constexpr Phase PHASES_W[STRIDE_W] = {{0, 3, 0, 0}};
constexpr int LOWEST_D = 0, LOWEST_H = 0, LOWEST_W = 0;    // of first + tap * STEP
constexpr int REACH_D = 3, REACH_H = 3, REACH_W = 3;    // from there to the highest
constexpr int POOL_D = 2, POOL_H = 2, POOL_W = 2;
constexpr int POOL_STRIDE_D = 2, POOL_STRIDE_H = 2, POOL_STRIDE_W = 2;
// A strip of results, the positions of the convolution that they need, and the inputs that those read.
constexpr int STRIP_D = 1, STRIP_H = 8, STRIP_W = 31;
constexpr int POSITIONS_D = 2, POSITIONS_H = 16, POSITIONS_W = 62;
constexpr int INPUTS_D = ceil_div(POSITIONS_D - 1, STRIDE_D) * ADVANCE_D + REACH_D;
constexpr int INPUTS_H = ceil_div(POSITIONS_H - 1, STRIDE_H) * ADVANCE_H + REACH_H;
constexpr int INPUTS_W = ceil_div(POSITIONS_W - 1, STRIDE_W) * ADVANCE_W + REACH_W;
// The staged input is [channel][d][h][w].
constexpr int COLUMN = 1, ROW = INPUTS_W, PLANE = INPUTS_H * ROW;
constexpr int CHANNEL = (ceil_div(INPUTS_D * PLANE, 16) | 1) * 16;    // an odd number of cache lines

// A tile of sums in registers: TILE positions of one phase and row, a block of features.  The weights of TOGETHER taps
// are at hand, so that an input once read serves all of them.
constexpr int TOGETHER = 3, MOST = larger(1, (REGISTERS - 2 - TOGETHER * VECTORS) / VECTORS);
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
constexpr int CHUNK = 8;

constexpr int STAGED = CHANNELS * CHANNEL + TILE * ADVANCE_W * COLUMN + LANES;
constexpr int WEIGHTS = CHANNELS * TAPS * BLOCK;    // of a block of features

using Result = float;

// What a call works on: tensors, and lengths of the input, the convolution's output and the result.
struct Call {
    const float* x;
    const float* bias;
    const Compute* packed;
    double* partial;
    int in_d, in_h, in_w, conv_d, conv_h, conv_w, out_d, out_h, out_w;
};

constexpr int PARTS = 1, PART = ceil_div(BLOCKS, PARTS);    // of the features' blocks
// A band of results, and the rows of positions that it needs.
constexpr int BAND_D = 1, BAND_H = 1;
constexpr int ROWS_D = (BAND_D - 1) * POOL_STRIDE_D + POOL_D;
constexpr int ROWS_H = (BAND_H - 1) * POOL_STRIDE_H + POOL_H;

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
                            const int at = ((group * FEATURES + first_feature) * CHANNELS + c) * TAPS + offset;
                            Compute* to = of_chunk + ((row * channels + c - chunk) * v.taps + tap) * BLOCK;
                            for (int f = 0; f < BLOCK; ++f)
                                to[f] = f < features ? w[at + f * (CHANNELS * TAPS)] : Compute(0);
                        }
                    of_chunk += channels * rows * v.taps * BLOCK;
                }
}

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
                        const Compute value = row[(tap * STEP_W + column) * COLUMN];
#pragma GCC unroll 16
                        for (int held = 0; held < HELD; ++held) {
                            const int from = column - held * STEP_W, position = from / ADVANCE_W;
                            if (from >= 0 && from % ADVANCE_W == 0 && position < TILE)
#pragma GCC unroll 16
                                for (int v = 0; v < VECTORS; ++v) sum[position][v] += value * weight[held][v];
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

// Zeros, whole vectors of them: what lies behind the row is written next, or never read.
inline void zero(Compute* to, int count) {
    for (int k = 0; k < count; k += LANES) store(Vector{}, to + k);
}

template <int COUNT>
inline void copy_some(const Compute*& from, Compute*& to) {
    std::memcpy(to, from, COUNT * sizeof(Compute));
    from += COUNT, to += COUNT;
}

// Whole lines, and halves of what remains.
inline void copy(const Compute* from, int count, Compute* to) {
    for (; count >= 16; count -= 16) copy_some<16>(from, to);
    if (count & 8) copy_some<8>(from, to);
    if (count & 4) copy_some<4>(from, to);
    if (count & 2) copy_some<2>(from, to);
    if (count & 1) copy_some<1>(from, to);
}

// The input that a strip reads, in the compute type, zeros around the image.  x is a sample's group; (d, h, w) is the
// input at the strip's corner, (rows_d, rows_h, columns) what of it is read.
void stage(const Call& call, const Element* __restrict x,
    int d, int h, int w, int rows_d, int rows_h, int columns, Compute* __restrict staged) {
    const int begin = larger(0, smaller(-w, columns)), end = larger(begin, smaller(call.in_w - w, columns));
    const bool whole = columns == ROW && call.in_w == ROW && w == 0;    // rows lie here as they do in memory
    const long long image = (long long)call.in_d * call.in_h * call.in_w;
    for (int c = 0; c < CHANNELS; ++c)
        for (int i = 0; i < rows_d; ++i)
            for (int j = 0, rows; j < rows_h; j += rows) {
                rows = 1;
                Compute* to = staged + c * CHANNEL + i * PLANE + j * ROW;
                const bool inside = unsigned(d + i) < unsigned(call.in_d) && unsigned(h + j) < unsigned(call.in_h);
                if (!inside) {
                    zero(to, columns);
                    continue;
                }
                if (whole) rows = smaller(rows_h - j, call.in_h - h - j);
                const Element* from = x + (((long long)c * call.in_d + d + i) * call.in_h + h + j) * call.in_w + w;
                __builtin_prefetch(from + 2 * image);    // of the channel after the next one: rows are short
                zero(to, begin);
                copy(from + begin, end - begin + (rows - 1) * ROW, to + begin);
                zero(to + end, columns - end);
            }
}

// The products of `CHUNK` channels from `chunk` on at `count` positions of one row from position w on, and of those
// before: row[position][BLOCK].  staged is the input at rows (d, h) of their phases' first taps, the strip's input
// beginning at column left.
void convolve(const Compute* __restrict staged, const Phase& d, const Phase& h, const Inside& along_d,
    const Inside& along_h, int w, int count, int left, int chunk, const Compute* __restrict weights,
    Compute* __restrict row) {
    const int before = (d.before * TAPS_H + d.taps * h.before) * TAPS_W;
    const int channels = smaller(CHUNK, CHANNELS - chunk);
    const Compute* x = staged + chunk * CHANNEL;
    constexpr const Phase& v = PHASES_W[0];
    const Compute* of_chunk = weights + (before * CHANNELS + chunk * d.taps * h.taps * TAPS_W) * BLOCK;
    for (int index = w; index < w + count; index += TILE)
        multiply<v.taps>(x + (index * ADVANCE_W + v.first - left) * COLUMN, along_d, along_h, h.taps, channels,
            of_chunk, row + (index - w) * BLOCK, chunk > 0);
}

// What is given per channel, for a block of features.
struct Channels {
    Compute bias_at[BLOCK];
    Channels(const Call& call, int first_feature, int features) {
        for (int f = 0; f < BLOCK; ++f) {
            const bool inside = f < features;
            const int feature = first_feature + f;
            bias_at[f] = inside ? call.bias[feature] : 0;
        }
    }
};

// What follows the convolution, on `count` positions.
inline void before(const Call& call, const Channels& of, Compute* __restrict row, int count) {
    for (int n = 0; n < count; ++n, row += BLOCK) {
#pragma omp simd
        for (int f = 0; f < BLOCK; ++f) {
            const Compute value = row[f];
            const Compute shifted = value + of.bias_at[f];
            row[f] = shifted;
        }
    }
}

// What follows the pooling, on `count` positions.
inline void after(const Call& call, const Channels& of, Compute* __restrict row, int count) {
    for (int n = 0; n < count; ++n, row += BLOCK) {
#pragma omp simd
        for (int f = 0; f < BLOCK; ++f) {
            const Compute value = row[f];
            const float v1 = value * 0.3333333432674408f;
            row[f] = v1;
        }
    }
}

// The maximum of each window: results[count][BLOCK] at (d, h, w...), from the positions of a band, which begins
// at (from_d, from_h, from_w).
void pool(const Call& call, const Compute* __restrict band, int from_d, int from_h, int from_w, int d, int h, int w,
    int count, Compute* __restrict results) {
    for (int n = 0; n < count; ++n, results += BLOCK) {
        const int begin_d = d * POOL_STRIDE_D - from_d, end_d = begin_d + POOL_D;
        const int begin_h = h * POOL_STRIDE_H - from_h, end_h = begin_h + POOL_H;
        const int begin_w = (w + n) * POOL_STRIDE_W - from_w, end_w = begin_w + POOL_W;
        Compute best[BLOCK];
        for (int f = 0; f < BLOCK; ++f) best[f] = -Compute(INFINITY);
        for (int i = begin_d; i < end_d; ++i)
            for (int j = begin_h; j < end_h; ++j)
                for (int k = begin_w; k < end_w; ++k) {
                    const Compute* at = band + ((i * ROWS_H + j) * PITCH + k) * BLOCK;
#pragma omp simd
                    for (int f = 0; f < BLOCK; ++f) {
                        const Compute value = at[f];
                        best[f] = value > best[f] || value != value ? value : best[f];
                    }
                }
#pragma omp simd
        for (int f = 0; f < BLOCK; ++f) results[f] = best[f];
    }
}

// A running mean, in float64.
struct Fold {
    double total = 0;
    void take(const Compute* value, index_t count) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (index_t e = 0; e < count; ++e) sum += value[e];
        total += sum;
    }
    void merge(const Fold& other) { total += other.total; }
    void save(double* to, index_t) const { *to = total; }
    static Fold load(const double* from, index_t) { return {*from}; }
    float result(double count) const { return float(total / count); }
};

// Running means of neighbouring results, in float64.
struct Folds {
    double total[BLOCK];
    explicit Folds(index_t count) { std::fill(total, total + count, 0.0); }
    void take(const Compute* __restrict__ value, index_t count, index_t rows = 1, index_t pitch = 0) {
        for (index_t r = 0; r < rows; ++r)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) total[e] += value[r * pitch + e];
    }
    Fold of(index_t e) const { return {total[e]}; }
};

constexpr int PLANES = 1;    // float64 numbers of a saved fold

// What a thread works on, in whole cache lines.
struct alignas(64) Line { Compute at[64 / sizeof(Compute)]; };
constexpr long long lines(long long numbers) { return (numbers * sizeof(Compute) + 63) / 64; }
constexpr long long BAND = (long long)ROWS_D * ROWS_H * PITCH * BLOCK;
struct Scratch {
    std::vector<Line> staged, band, results;
    Scratch() : staged(lines(STAGED)), band(lines(BAND)), results(lines(STRIP_W * BLOCK)) {}
};

// One strip of results of one sample, for one part of the blocks of features.
void strip(const Call& call, long long task, Scratch& own) {
    const int strips_h = ceil_div(call.out_h, STRIP_H), strips_w = ceil_div(call.out_w, STRIP_W);
    long long rest = task;
    const int part = rest % PARTS;
    rest /= PARTS;
    const int group = rest % GROUPS;
    rest /= GROUPS;
    const int first_w = rest % strips_w * STRIP_W, last_w = smaller(first_w + STRIP_W, call.out_w);
    rest /= strips_w;
    const int first_h = rest % strips_h * STRIP_H, last_h = smaller(first_h + STRIP_H, call.out_h);
    rest /= strips_h;
    const int strips_d = ceil_div(call.out_d, STRIP_D);
    const int first_d = rest % strips_d * STRIP_D, last_d = smaller(first_d + STRIP_D, call.out_d);
    const long long sample = rest / strips_d;

    // Positions of the convolution that the strip needs, and the input at the first of their taps.
    const int from_d = first_d * POOL_STRIDE_D, to_d = (last_d - 1) * POOL_STRIDE_D + POOL_D;
    const int from_h = first_h * POOL_STRIDE_H, to_h = (last_h - 1) * POOL_STRIDE_H + POOL_H;
    const int from_w = first_w * POOL_STRIDE_W, to_w = (last_w - 1) * POOL_STRIDE_W + POOL_W;
    const int left_d = from_d / STRIDE_D * ADVANCE_D + LOWEST_D;
    const int rows_d = ((to_d - 1) / STRIDE_D - from_d / STRIDE_D) * ADVANCE_D + REACH_D;
    const int left_h = from_h / STRIDE_H * ADVANCE_H + LOWEST_H;
    const int rows_h = ((to_h - 1) / STRIDE_H - from_h / STRIDE_H) * ADVANCE_H + REACH_H;
    const int left_w = from_w / STRIDE_W * ADVANCE_W + LOWEST_W;
    const int columns = ((to_w - 1) / STRIDE_W - from_w / STRIDE_W) * ADVANCE_W + REACH_W;
    Compute *staged = own.staged.data()->at, *band = own.band.data()->at;
    const long long image = (long long)call.in_d * call.in_h * call.in_w;
    const Element* x = call.x + (sample * GROUPS + group) * CHANNELS * image;
    stage(call, x, left_d, left_h, left_w, rows_d, rows_h, columns, staged);
    for (int block = part * PART; block < smaller(part * PART + PART, BLOCKS); ++block) {
        const int features = smaller(BLOCK, FEATURES - block * BLOCK), first_feature = group * FEATURES + block * BLOCK;
        const Compute* weights = call.packed + (group * BLOCKS + block) * (long long)WEIGHTS;
        const Channels of(call, first_feature, features);
        Folds total(BLOCK);
        const int count = last_w - first_w;
        for (int band_d = first_d; band_d < last_d; band_d += BAND_D)
            for (int band_h = first_h; band_h < last_h; band_h += BAND_H) {
                const int last_band_d = smaller(band_d + BAND_D, last_d);
                const int last_band_h = smaller(band_h + BAND_H, last_h);
                const int begin_d = band_d * POOL_STRIDE_D, end_d = (last_band_d - 1) * POOL_STRIDE_D + POOL_D;
                const int begin_h = band_h * POOL_STRIDE_H, end_h = (last_band_h - 1) * POOL_STRIDE_H + POOL_H;
                for (int chunk = 0; chunk < CHANNELS; chunk += CHUNK)    // its weights are at hand for all rows
                    for (int i = begin_d; i < end_d; ++i)
                        for (int j = begin_h; j < end_h; ++j) {
                            const Phase &of_d = PHASES_D[i % STRIDE_D], &of_h = PHASES_H[j % STRIDE_H];
                            const int row_d = i / STRIDE_D * ADVANCE_D + of_d.first - left_d;
                            const int row_h = j / STRIDE_H * ADVANCE_H + of_h.first - left_h;
                            Compute* row = band + ((i - begin_d) * ROWS_H + j - begin_h) * PITCH * BLOCK;
                            const Compute* first = staged + row_d * PLANE + row_h * ROW;
                            const Inside along_d(of_d.taps, left_d + row_d, STEP_D, call.in_d);
                            const Inside along_h(of_h.taps, left_h + row_h, STEP_H, call.in_h);
                            convolve(first, of_d, of_h, along_d, along_h, from_w, to_w - from_w, left_w, chunk, weights,
                                row);
                            before(call, of, row, to_w - from_w);
                        }
                for (int d = band_d; d < last_band_d; ++d)
                    for (int h = band_h; h < last_band_h; ++h) {
                        Compute* results = own.results.data()->at;
                        pool(call, band, begin_d, begin_h, from_w, d, h, first_w, count, results);
                        after(call, of, results, count);
                        total.take(results, BLOCK, count, BLOCK);
                    }
            }
        const long long rows = GROUPS * FEATURES, strip = task / (GROUPS * PARTS);
        for (int f = 0; f < features; ++f)
            total.of(f).save(call.partial + PLANES * (strip * rows + first_feature + f), 1);
    }
}

extern "C" void fused_test(const float* x, const float* w, const float* bias, Compute* packed, double* partial,
    int N, int in_d, int in_h, int in_w, int conv_d, int conv_h, int conv_w, int out_d, int out_h, int out_w,
    int threads) {
    const Call call = {x, bias, packed, partial, in_d, in_h, in_w, conv_d, conv_h, conv_w, out_d, out_h, out_w};
    const long long strips = (long long)ceil_div(out_d, STRIP_D) * ceil_div(out_h, STRIP_H) * ceil_div(out_w, STRIP_W);
    const long long tasks = N * strips * GROUPS * PARTS;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int i = 0; i < GROUPS * BLOCKS; ++i) pack(w, packed, i / BLOCKS, i % BLOCKS);
        Scratch own;
#pragma omp for schedule(dynamic)
        for (long long task = 0; task < tasks; ++task) strip(call, task, own);
    }
}

// Join the parts of reductions, in their order: out[i] over partial[i / rows][split][i % rows].
extern "C" void fused_test_finish(const double* partial, Result* out, int splits, int rows, long long results,
    long long count) {
    for (long long i = 0; i < results; ++i) {
        const double* from = partial + PLANES * (i / rows * splits * rows + i % rows);
        Fold value = Fold::load(from, 1);
        for (int split = 1; split < splits; ++split)
            value.merge(Fold::load(from + PLANES * ((long long)split * rows), 1));
        out[i] = value.result(count);
    }
}

}  // namespace fused_test
