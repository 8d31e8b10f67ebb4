"""Model of conv_avgpool_sigmoid_sum.py with its forward in one generated CPU kernel.

The algebra was rewritten first, by `avg_pool(conv(x, w)) = conv_strided(box(x), w)`, which leaves 14.5x less
arithmetic. fused_conv_avg_sigmoid_sum computes convolution, average pooling, sigmoid and sum in 2 launches.
These operators had the most to give: what they hand to each other no longer goes through memory, so 604 MB
are moved instead of 11.4 GB.

                          before         after
    arithmetic         173 GFLOP    12.0 GFLOP    14.5x less
    memory traffic       11.4 GB        604 MB    18.8x less
    launches                   4             1    4.00x less

Verified on a CPU, against float64: outputs are off by 1.9e-08 (eager: 5.3e-08) and gradients are off by
    1.6e-05 (eager: 4.9e-04) of their size.
Not measured, as asked; built in 1.0 s.

Serves float32 (2 or more, 8, 384, 384), without gradients also float32 (2 or more, 8, 192 to 768, 192 to
768), in either mode of the model that get_init_inputs() describes. Other constructor arguments and other
calls give the same results by the original forward.
Written by fusewright 0.1.0.
"""

import ctypes
import inspect
from functools import cache, lru_cache
from itertools import chain, islice
from operator import is_
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.cpp_extension import load_inline

# ---- The model as it was ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Pools a convolution's response, squashes it and adds it up."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, pool_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = nn.AvgPool2d(pool_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.conv(x))
        return torch.sigmoid(pooled).sum(dim=(1, 2, 3))


batch_size = 128
in_channels, out_channels = 8, 64
height = width = 384


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs() -> list[int]:
    return [in_channels, out_channels, 3, 4]


# ---- Kernels, in the order in which they run -------------------------------------------------------------------------


FUSED_CONV_AVG_SIGMOID_SUM = r"""// fused_conv_avg_sigmoid_sum: a convolution and what follows it, strip by strip.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace fused_conv_avg_sigmoid_sum {

using index_t = long long;

// The same bits as another type.
template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

using std::fabs;

// e^x from x = n ln 2 + r where it is a normal number: adding 1.5 * 2^23 + 127 leaves the exponent of 2^n at the end.
inline float exp_normal(float x) {
    const float shifted = x * 1.44269504f + (0x1.8p23f + 127), k = shifted - (0x1.8p23f + 127);
    const float r = x - k * 0.693359375f - k * -2.12194440e-4f;
    const float p = 0.5f + r * (0.166665763f + r * (0.0416665561f + r * (0.00836317893f + r * 0.0013926184f)));
    const float scale = bits_as<float>(bits_as<unsigned>(shifted) << 23);
    return (r + r * r * p) * scale + scale;
}

// e^x from x = n ln 2 + r.  2^n is multiplied in two steps, so that results below the normal numbers are right.
inline float exp(float x) {
    const float within = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
    const float shifted = within * 1.44269504f + 0x1.8p23f, k = shifted - 0x1.8p23f;
    const float r = within - k * 0.693359375f - k * -2.12194440e-4f;
    const float p = 0.5f + r * (0.166665763f + r * (0.0416665561f + r * (0.00836317893f + r * 0.0013926184f)));
    const int n = bits_as<int>(shifted) - bits_as<int>(0x1.8p23f), half = n >> 1;
    return (1 + (r + r * r * p)) * bits_as<float>(unsigned(half + 127) << 23) *
           bits_as<float>(unsigned(n - half + 127) << 23);
}
inline double exp(double x) {
    const double within = x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x;
    const double shifted = within * 1.4426950408889634 + 0x1.8p52, k = shifted - 0x1.8p52;
    const double r = within - k * 0x1.62e42feep-1 - k * 0x1.a39ef35793c76p-33;
    const double p = 0.5 + r * (0.16666666666666671 + r * (0.041666666666666671 + r * (0.0083333333333261358 + r *
        (0.0013888888888883748 + r * (0.00019841269874820627 + r * (2.4801587325547743e-05 + r *
        (2.7557255400206422e-06 + r * (2.7557273643110297e-07 + r * (2.5105217004720745e-08 + r *
        2.0914686968086876e-09)))))))));
    const long long n = bits_as<long long>(shifted) - bits_as<long long>(0x1.8p52), half = n >> 1;
    return (1 + (r + r * r * p)) * bits_as<double>(static_cast<unsigned long long>(half + 1023) << 52) *
           bits_as<double>(static_cast<unsigned long long>(n - half + 1023) << 52);
}

// How functions are computed: for ordinary arguments, noticing those that are not, or for any.
struct Ordinary { int rare = 0; };
struct Any { static constexpr int rare = 0; };

inline float exp(Any, float x) { return exp(x); }
inline float exp(Ordinary& maths, float x) {
    maths.rare |= !(fabs(x) < 87.0f);
    return exp_normal(x);
}

using Element = float;    // of the input and the weight in memory
using Compute = float;    // of everything else

constexpr int CHANNELS = 8, FEATURES = 64, GROUPS = 1;    // of a group, in and out
constexpr int TAPS_D = 1, TAPS_H = 3, TAPS_W = 3, TAPS = TAPS_D * TAPS_H * TAPS_W;

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
constexpr int LANES = smaller(VECTOR_BYTES / sizeof(Compute), 64);
using Vector __attribute__((vector_size(LANES * sizeof(Compute)))) = Compute;
inline Vector load(const Compute* at) {
    Vector lanes;
    std::memcpy(&lanes, at, sizeof lanes);
    return lanes;
}
inline void store(Vector lanes, Compute* at) { std::memcpy(at, &lanes, sizeof lanes); }
constexpr int VECTORS = 4, BLOCK = VECTORS * LANES, BLOCKS = ceil_div(FEATURES, BLOCK);

// A phase of a dimension: the output positions `index * STRIDE + phase`.  Its taps read the input at
// `index * ADVANCE + first + tap * STEP`, and are taps `start + tap * BETWEEN` of the weight; `before` counts those of
// earlier phases.
struct Phase { int first, taps, start, before; };
constexpr int STRIDE_D = 1, ADVANCE_D = 1, STEP_D = 1, BETWEEN_D = 1;
constexpr Phase PHASES_D[STRIDE_D] = {{0, 1, 0, 0}};
constexpr int STRIDE_H = 1, ADVANCE_H = 4, STEP_H = 1, BETWEEN_H = 1;
constexpr Phase PHASES_H[STRIDE_H] = {{0, 3, 0, 0}};
constexpr int STRIDE_W = 1, ADVANCE_W = 4, STEP_W = 1, BETWEEN_W = 1;
constexpr Phase PHASES_W[STRIDE_W] = {{0, 3, 0, 0}};
constexpr int LOWEST_D = 0, LOWEST_H = 0, LOWEST_W = 0;    // of first + tap * STEP
constexpr int REACH_D = 1, REACH_H = 3, REACH_W = 3;    // from there to the highest
// A strip of results, the positions of the convolution that they need, and the inputs that those read.
constexpr int STRIP_D = 1, STRIP_H = 11, STRIP_W = 95;
constexpr int POSITIONS_D = 1, POSITIONS_H = 11, POSITIONS_W = 95;
constexpr int INPUTS_D = ceil_div(POSITIONS_D - 1, STRIDE_D) * ADVANCE_D + REACH_D;
constexpr int INPUTS_H = ceil_div(POSITIONS_H - 1, STRIDE_H) * ADVANCE_H + REACH_H;
constexpr int INPUTS_W = ceil_div(POSITIONS_W - 1, STRIDE_W) * ADVANCE_W + REACH_W;
// The staged input is [channel][d][h][w].
constexpr int COLUMN = 1, ROW = INPUTS_W, PLANE = INPUTS_H * ROW;
constexpr int CHANNEL = (ceil_div(INPUTS_D * PLANE, 16) | 1) * 16;    // an odd number of cache lines

// A tile of sums in registers: TILE positions of one phase and row, a block of features.  The weights of TOGETHER taps
// are at hand, so that an input once read serves all of them.
constexpr int TOGETHER = 1, MOST = larger(1, (REGISTERS - 2 - TOGETHER * VECTORS) / VECTORS);
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
constexpr int ROWS_D = BAND_D, ROWS_H = BAND_H;

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

constexpr int BOX_D = 1, BOX_H = 4, BOX_W = 4;    // a window of x,
constexpr int BOX_STEP_D = 1, BOX_STEP_H = 1, BOX_STEP_W = 1;    // whose elements lie so far apart
constexpr int BOX_REACH = (BOX_W - 1) * BOX_STEP_W;

// The window sums that a strip reads: over the rows of a window first, then along them.
void stage(const Call& call, const Element* __restrict x,
    int d, int h, int w, int rows_d, int rows_h, int columns, Compute* __restrict staged) {
    Compute sums[INPUTS_W + BOX_REACH];
    const int wide = smaller(columns + BOX_REACH, call.in_w - w);
    for (int c = 0; c < CHANNELS; ++c)
        for (int i = 0; i < rows_d; ++i)
            for (int j = 0; j < rows_h; ++j) {
                if (j % ADVANCE_H >= REACH_H) continue;    // no tap reads this row
                const long long channel = c;
                const Element* from = x + ((channel * call.in_d + d + i) * call.in_h + h + j) * call.in_w + w;
                const long long next_d = (long long)BOX_STEP_D * call.in_h * call.in_w;
                const long long next_h = (long long)BOX_STEP_H * call.in_w;
#pragma omp simd
                for (int k = 0; k < wide; ++k) {
                    Compute sum = 0;
#pragma GCC unroll 8
                    for (int row = 0; row < BOX_D * BOX_H; ++row)
                        sum += from[row / BOX_H * next_d + row % BOX_H * next_h + k];
                    sums[k] = sum;
                }
                Compute* to = staged + c * CHANNEL + i * PLANE + j * ROW;
#pragma omp simd
                for (int k = 0; k < wide - BOX_REACH; ++k) {
                    Compute sum = 0;
#pragma GCC unroll 8
                    for (int n = 0; n < BOX_W; ++n) sum += sums[k + n * BOX_STEP_W];
                    to[k] = sum;
                }
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

// What follows the convolution, on `count` positions; says whether an argument was rare.
template <typename Maths>
inline bool before_with(const Call& call, const Channels& of, const Compute* __restrict given,
    Compute* __restrict row, int count, int features) {
    int rare[BLOCK] = {}, found = 0;
    for (int n = 0; n < count; ++n, given += BLOCK, row += BLOCK) {
#pragma omp simd
        for (int f = 0; f < BLOCK; ++f) {
            Maths maths;
            const Compute value = given[f];
            const Compute shifted = value * Compute(0.0625) + of.bias_at[f];
            const float v1 = 1 / (1 + exp(maths, -shifted));
            row[f] = v1;
            rare[f] |= maths.rare;
        }
    }
    for (int e = 0; e < features; ++e) found |= rare[e];
    return found;
}

// What follows the convolution, on `count` positions.
inline void before(const Call& call, const Channels& of, Compute* __restrict row, int count, int features) {
    constexpr int RUN = larger(1, 512 / BLOCK);    // positions whose values are kept, should they be wanted again
    Compute given[RUN * BLOCK];
    for (int n = 0; n < count; n += RUN, row += RUN * BLOCK) {
        const int some = smaller(RUN, count - n);
        std::copy(row, row + some * BLOCK, given);
        if (before_with<Ordinary>(call, of, given, row, some, features))
            before_with<Any>(call, of, given, row, some, features);
    }
}

// A running sum, in float64.
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
    float result(double) const { return float(total); }
};

// Running sums of neighbouring results, in float64.
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
    const int from_d = first_d, to_d = last_d;
    const int from_h = first_h, to_h = last_h;
    const int from_w = first_w, to_w = last_w;
    const int left_d = from_d / STRIDE_D * ADVANCE_D + LOWEST_D;
    const int rows_d = ((to_d - 1) / STRIDE_D - from_d / STRIDE_D) * ADVANCE_D + REACH_D;
    const int left_h = from_h / STRIDE_H * ADVANCE_H + LOWEST_H;
    const int rows_h = ((to_h - 1) / STRIDE_H - from_h / STRIDE_H) * ADVANCE_H + REACH_H;
    const int left_w = from_w / STRIDE_W * ADVANCE_W + LOWEST_W;
    const int columns = ((to_w - 1) / STRIDE_W - from_w / STRIDE_W) * ADVANCE_W + REACH_W;
    Compute *staged = own.staged.data()->at, *band = own.band.data()->at;
    Fold all;
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
                const int begin_d = band_d, end_d = last_band_d;
                const int begin_h = band_h, end_h = last_band_h;
                for (int chunk = 0; chunk < CHANNELS; chunk += CHUNK)    // its weights are at hand for all rows
                    for (int i = begin_d; i < end_d; ++i)
                        for (int j = begin_h; j < end_h; ++j) {
                            const Phase &of_d = PHASES_D[i % STRIDE_D], &of_h = PHASES_H[j % STRIDE_H];
                            const int row_d = i / STRIDE_D * ADVANCE_D + of_d.first - left_d;
                            const int row_h = j / STRIDE_H * ADVANCE_H + of_h.first - left_h;
                            Compute* row = band + ((i - begin_d) * ROWS_H + j - begin_h) * PITCH * BLOCK;
                            const Compute* first = staged + row_d * PLANE + row_h * ROW;
                            const Inside along_d(of_d.taps, 0, 0, 1);
                            const Inside along_h(of_h.taps, 0, 0, 1);
                            convolve(first, of_d, of_h, along_d, along_h, from_w, to_w - from_w, left_w, chunk, weights,
                                row);
                            before(call, of, row, to_w - from_w, features);
                        }
                for (int d = band_d; d < last_band_d; ++d)
                    for (int h = band_h; h < last_band_h; ++h) {
                        const Compute* results = band + ((d - begin_d) * ROWS_H + h - begin_h) * PITCH * BLOCK;
                        total.take(results, BLOCK, count, BLOCK);
                    }
            }
        for (int f = 0; f < features; ++f) all.merge(total.of(f));
    }
    all.save(call.partial + PLANES * task, 1);
}

extern "C" void fused_conv_avg_sigmoid_sum(const float* x, const float* w, const float* bias, Compute* packed,
    double* partial, int N, int in_d, int in_h, int in_w, int conv_d, int conv_h, int conv_w, int out_d, int out_h,
    int out_w, int threads) {
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
extern "C" void fused_conv_avg_sigmoid_sum_finish(const double* partial, Result* out, int splits, int rows, long long results,
    long long count) {
    for (long long i = 0; i < results; ++i) {
        const double* from = partial + PLANES * (i / rows * splits * rows + i % rows);
        Fold value = Fold::load(from, 1);
        for (int split = 1; split < splits; ++split)
            value.merge(Fold::load(from + PLANES * ((long long)split * rows), 1));
        out[i] = value.result(count);
    }
}

}  // namespace fused_conv_avg_sigmoid_sum
"""


FUSED_CONV_AVG_SIGMOID_SUM_LAUNCHER = r"""
namespace fused_conv_avg_sigmoid_sum {

// Less than 65536 operations are done in one thread.
extern "C" void launch_fused_conv_avg_sigmoid_sum(const float* x, const float* w, const float* bias, Result* out,
    Compute* packed, double* partial, long long N, int in_h, int in_w, int conv_h, int conv_w, long long work,
    int splits, long long count, int threads) {
    fused_conv_avg_sigmoid_sum(x, w, bias, packed, partial, N, 1, in_h, in_w, 1, conv_h, conv_w, 1, conv_h, conv_w,
        work < 65536 ? 1 : threads);
    fused_conv_avg_sigmoid_sum_finish(partial, out, splits, 1, N, count);
}

}  // namespace fused_conv_avg_sigmoid_sum
"""


# ---- Building and calling them ---------------------------------------------------------------------------------------


def ceil_div(a: int, b: int) -> int:
    """The least integer that is no less than a / b."""
    return -(-a // b)


@cache
def library() -> ctypes.CDLL:
    """The kernels, built for this machine's processor when first used.

    Plain C functions, called through ctypes.  Compiled with OpenMP and linked without, so that PyTorch's threads serve.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    wide = ["-mprefer-vector-width=512"] if capability == "AVX512" else []
    path = load_inline(
        name=f"fused_conv_avg_sigmoid_sum_aa80c1e6_{capability}",
        cpp_sources=[FUSED_CONV_AVG_SIGMOID_SUM, FUSED_CONV_AVG_SIGMOID_SUM_LAUNCHER],
        extra_cflags=[
            "-std=c++17",
            "-O3",
            "-fno-fast-math",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-ffp-contract=fast",
            "-fopenmp",
            "-march=native",
            *wide,
        ],
        no_implicit_headers=True,
        is_python_module=False,
    )
    kernels = ctypes.CDLL(path)
    kernels.launch_fused_conv_avg_sigmoid_sum.argtypes = (
        [ctypes.c_void_p] * 6
        + [ctypes.c_longlong]
        + [ctypes.c_int] * 4
        + [ctypes.c_longlong]
        + [ctypes.c_int]
        + [ctypes.c_longlong]
        + [ctypes.c_int]
    )
    kernels.launch_fused_conv_avg_sigmoid_sum.restype = None
    return kernels


def expect(kernel: str, name: str, shape: torch.Size, wanted: tuple[int | None, ...]) -> None:
    """Raises `ValueError` for an operand of a shape that the kernel was not made for; `None` stands for any length."""
    if len(shape) != len(wanted) or any(n not in (None, m) for m, n in zip(shape, wanted, strict=True)):
        lengths = ", ".join("any" if n is None else str(n) for n in wanted)
        raise ValueError(f"{kernel} takes {name} of shape ({lengths}), not {tuple(shape)}")


def dense(
    kernel: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """An operand as kernels read it: without gaps, beginning at a multiple of its element.

    Raises `ValueError` for one of another device or dtype than the kernel was made for.
    """
    if not tensor.is_cpu or tensor.dtype is not dtype:
        raise ValueError(f"{kernel} takes {name} as {dtype} on cpu, not as {tensor.dtype} on {tensor.device}")
    alignment = tensor.itemsize
    if tensor.is_contiguous(memory_format=layout) and tensor.data_ptr() % alignment == 0 and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().clone(memory_format=layout)


def expect_arguments(function, given: tuple, wanted: tuple) -> None:
    """Raises `ValueError` where a kernel's function has other last arguments than its kernel was made for."""
    if given != wanted:
        names = [*inspect.signature(function).parameters][-len(wanted) :]
        name, one, other = next(each for each in zip(names, wanted, given, strict=True) if each[1] != each[2])
        remedy = "`fusewright optimize` writes a file for another model"
        raise ValueError(f"{function.__name__} was made for {name}={one}, not {other}; {remedy}")


class Recomputed(torch.autograd.Function):
    """A kernel whose backward computes its reference again and differentiates that, so that nothing is kept."""

    @staticmethod
    def forward(launch, reference, *operands):
        """Runs the kernel."""
        return launch(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keeps the operands, and nothing that was computed from them."""
        _, ctx.reference, *operands = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx, grad):
        """The gradients of the operands that need one."""
        again = torch.is_grad_enabled()
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            # Views, so that no gradient flows from one operand to another that it was computed from; with all their
            # strides: ATen's gradient of a batch norm is wrong on a CPU where those of a size of 1 are others.
            operands = [torch.ops.aten.alias(operand) for operand in ctx.saved_tensors]
            value = ctx.reference(*operands)
        if not value.requires_grad:  # a step function, say
            return (None,) * (2 + len(operands))
        wanted = [operand for operand, need in zip(operands, needed, strict=True) if need]
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=again, allow_unused=True))
        return None, None, *(next(found) if need else None for need in needed)


def differentiable(launch, reference, *operands: torch.Tensor) -> torch.Tensor:
    """`launch(*operands)`, through which gradients flow as through `reference(*operands)`."""
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return Recomputed.apply(launch, reference, *operands)
    return launch(*operands)


@lru_cache(maxsize=256)
def fused_conv_avg_sigmoid_sum_sizes(
    x_shape: torch.Size, w_shape: torch.Size, bias_shape: torch.Size
) -> tuple[tuple[int, ...], ...]:
    """Gives the output's shape, that of packed, that of partial, and the numbers that the launcher takes."""
    expect("fused_conv_avg_sigmoid_sum", "x", x_shape, (None, 8, None, None))
    N, in_h, in_w = x_shape[0], x_shape[2], x_shape[3]
    expect("fused_conv_avg_sigmoid_sum", "w", w_shape, (64, 8, 3, 3))
    expect("fused_conv_avg_sigmoid_sum", "bias", bias_shape, (64,))
    conv_h = (in_h - 6) // 4 + 1
    conv_w = (in_w - 6) // 4 + 1
    work = N * conv_h * conv_w * 4608
    splits = ceil_div(conv_h, 11) * ceil_div(conv_w, 95)
    count = conv_h * conv_w * 64
    if max(in_h, in_w, conv_h, conv_w, splits) >= 2**31:
        raise ValueError(f"fused_conv_avg_sigmoid_sum counts in 32 bits, too few for N={N}, in_h={in_h}, in_w={in_w}")
    return (N,), (4608,), (N, splits, 1), (N, in_h, in_w, conv_h, conv_w, work, splits, count)


def fused_conv_avg_sigmoid_sum_launch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Launches the kernel and returns out."""
    out_shape, packed_shape, partial_shape, numbers = fused_conv_avg_sigmoid_sum_sizes(x.shape, w.shape, bias.shape)
    x = dense("fused_conv_avg_sigmoid_sum", "x", x, torch.float32)
    w = dense("fused_conv_avg_sigmoid_sum", "w", w, torch.float32)
    bias = dense("fused_conv_avg_sigmoid_sum", "bias", bias, torch.float32)
    out = torch.empty(out_shape, dtype=torch.float32, device=x.device)
    packed = torch.empty(packed_shape, dtype=torch.float32, device=x.device)
    partial = torch.empty(partial_shape, dtype=torch.float64, device=x.device)
    library().launch_fused_conv_avg_sigmoid_sum(
        x.data_ptr(),
        w.data_ptr(),
        bias.data_ptr(),
        out.data_ptr(),
        packed.data_ptr(),
        partial.data_ptr(),
        *numbers,
        torch.get_num_threads(),
    )
    return out


def fused_conv_avg_sigmoid_sum_reference(x, w, bias):
    """The same in PyTorch's own operations, which gradients go through."""
    x = x[:, :, :, 0:382].unfold(3, 4, 1).sum(-1)
    x = x[:, :, 0:382].unfold(2, 4, 1).sum(-1)
    x = x * 0.0625  # (B, 8, 379, 379)
    x = F.conv2d(x, w, bias, stride=4)  # (B, 64, 95, 95)
    del w, bias
    x = torch.sigmoid(x)  # (B, 64, 95, 95)
    x = x.sum((1, 2, 3))  # (B)
    return x


def fused_conv_avg_sigmoid_sum(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
    pool: tuple[int, ...],
    pool_stride: tuple[int, ...] = (4, 4),
    pool_padding: tuple[int, ...] = (0, 0),
) -> torch.Tensor:
    """conv, avg, sigmoid, sum in 2 launches.

    Keywords name the kernel's constants, as the rewritten program has them; others raise `ValueError`.
    """
    expect_arguments(
        fused_conv_avg_sigmoid_sum,
        (kernel_size, stride, padding, dilation, groups, pool, pool_stride, pool_padding),
        ((3, 3), (4, 4), (0, 0), (1, 1), 1, (4, 4), (1, 1), (0, 0)),
    )
    return differentiable(fused_conv_avg_sigmoid_sum_launch, fused_conv_avg_sigmoid_sum_reference, x, w, bias)


# ---- The model that does less ----------------------------------------------------------------------------------------


# What the kernels were made for; a model that is configured otherwise runs its original forward.
MADE_FOR = {
    "parameters and buffers": (),
    "conv": (
        "torch.Conv2d",
        {
            "parameters and buffers": ("weight", "bias"),
            "in_channels": 8,
            "out_channels": 64,
            "kernel_size": (3, 3),
            "stride": (1, 1),
            "padding": (0, 0),
            "dilation": (1, 1),
            "transposed": False,
            "output_padding": (0, 0),
            "groups": 1,
            "padding_mode": "zeros",
        },
    ),
    "pool": (
        "torch.AvgPool2d",
        {
            "parameters and buffers": (),
            "kernel_size": 4,
            "stride": 4,
            "padding": 0,
            "ceil_mode": False,
            "count_include_pad": True,
            "divisor_override": None,
        },
    ),
}


# Parameters, submodules, hooks and mode, and what torch.compile leaves with a module that it is given.
OF_ALL_MODULES = frozenset(vars(torch.nn.Module())) | {"_is_torch_compile"}
CONTAINERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def tensor_names(module: torch.nn.Module) -> tuple[str, ...]:
    """The parameters and buffers that a module has."""
    return tuple(n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None)


def configuration(module: torch.nn.Module) -> dict:
    """What a forward may depend on besides tensors: what somebody gave a module, and the like of its submodules."""
    hides = type(module).__module__.startswith("torch.")  # what its private attributes hold follows from the others
    own = {n: value for n, value in vars(module).items() if n not in OF_ALL_MODULES and not (hides and n[0] == "_")}
    parts = {n: part if part is None else (named(part), configuration(part)) for n, part in module._modules.items()}
    return {"parameters and buffers": tensor_names(module), **own, **parts}


def named(module: torch.nn.Module) -> str:
    """A module's class by its name and package; those of this file have none."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if kind.__module__ == Model.__module__ else f"{package}.{kind.__qualname__}"


def views(model: Model) -> list:
    """Live views of all that a model consists of: where that changes, another object appears in one of them."""
    return [
        held.values()
        for own in map(vars, model.modules())
        for held in (own, *(own[name] for name in (*CONTAINERS, *HOOKS)))
    ]


SEEN = WeakKeyDictionary()  # for each model: what it held when it was last examined, and what came of that


def weights(model: Model) -> tuple[torch.Tensor, ...] | None:
    """The tensors of the model that the forward reads; `None` where the kernels were not made for it as it is.

    It is examined again once an attribute, a tensor, a submodule or a hook is not the very object that it was.
    """
    seen = SEEN.get(model)
    if seen is not None:
        live, lengths, filled, objects, found = seen
        if [*map(len, live)] == lengths and all(map(is_, chain.from_iterable(filled), objects)):
            return found
    live = views(model)
    filled = [view for view in live if view]  # most are empty, and their lengths tell when they no longer are
    hooked = any(vars(module)[name] for module in islice(model.modules(), 1, None) for name in HOOKS)
    fits = not hooked and repr(configuration(model)) == repr(MADE_FOR)
    found = (model.conv.weight, model.conv.bias) if fits else None
    SEEN[model] = live, [*map(len, live)], filled, [*chain.from_iterable(filled)], found
    return found


# Shapes and dtypes of these tensors.
KINDS = [((64, 8, 3, 3), torch.float32), ((64,), torch.float32)]


@cache
def kernels_for(device: torch.device) -> str:
    """The kind of kernels that run on a device, if any of these do."""
    if device.type == "cpu":
        return "cpu"
    return ""


def ordinary(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Whether these are plain, dense tensors on a device."""
    for t in tensors:
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.device != device or t.layout is not torch.strided:
            return False
    return True


def called_plainly() -> bool:
    """Whether nobody looks on: neither a tracer, autocast, a transform, nor a hook of all modules."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    looked_at = torch._C._functorch.peek_interpreter_stack() is not None
    return not (looked_at or torch.nn.modules.module._has_any_global_hook())


def covered(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The model's `weights` where the kernels were made for a call; `None` where the original runs."""
    own = weights(model) if called_plainly() else None
    fits = (
        own is not None
        and kernels_for(x.device)
        and ordinary(x.device, x, *own)
        and x.dtype is torch.float32
        and x.dim() == 4
        and x.shape[1] == 8
        and 192 <= x.shape[2] <= 768
        and 192 <= x.shape[3] <= 768
        and (x.shape[2:] == (384, 384) or not torch.is_grad_enabled())
        and x.shape[0] >= 2
        and [(w.shape, w.dtype) for w in own] == KINDS
    )
    return own if fits else None


class ModelNew(Model):
    """`Model` with its forward computed by the kernels, where they were made for the call."""

    def forward(self, x: torch.Tensor):
        """As the original."""
        own = covered(self, x)
        if own is None:
            return super().forward(x)
        return self.fused(x, *own)

    def fused(self, x, conv_weight, conv_bias):
        """The rewritten forward."""
        x = fused_conv_avg_sigmoid_sum(
            x, conv_weight, conv_bias, kernel_size=(3, 3), stride=(4, 4), pool=(4, 4), pool_stride=(1, 1)
        )  # (B)
        return x
