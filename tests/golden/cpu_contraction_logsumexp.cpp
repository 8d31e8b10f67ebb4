// fused_test: a convolution and what follows it, strip by strip.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace fused_test {

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

using std::copysign;

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

// e^x of x <= 0, for sums that reach 1: below 2^-125 it is nothing.  A larger x stays: it is infinite there.
inline float exp_up_to_one(float x) {
    const float y = exp_normal(x);
    return x < -87.0f ? 0.0f : x > 0 ? x : y;
}
inline double exp_up_to_one(double x) { return exp(x); }

// e^x - 1 where e^x is a normal number.
inline float expm1_normal(float x) {
    const float shifted = x * 1.44269504f + (0x1.8p23f + 127), k = shifted - (0x1.8p23f + 127);
    const float r = x - k * 0.693359375f - k * -2.12194440e-4f;
    const float p = 0.5f + r * (0.166665763f + r * (0.0416665561f + r * (0.00836317893f + r * 0.0013926184f)));
    const float scale = bits_as<float>(bits_as<unsigned>(shifted) << 23);
    return (r + r * r * p) * scale + (scale - 1);
}

// ln x = e ln 2 + ln(1 + f) from x = 2^e (1 + f), 1 + f between the roots of 1/2 and 2; of x / 2^less.
inline float log_of_normal(float x, int less) {
    const int b = int(bits_as<unsigned>(x) - 0x3f3504f3u);
    const float f = bits_as<float>((b & 0x007fffff) + 0x3f3504f3) - 1, e = float((b >> 23) - less);
    const float p = 0.333333313f + f * (-0.24999997f + f * (0.200007156f + f * (-0.166678026f + f * (0.142490536f + f *
        (-0.12425676f + f * (0.116854429f + f * (-0.114798367f + f * 0.0697168112f)))))));
    return e * 0.693359375f + (f + (e * -2.12194440e-4f + f * f * (f * p - 0.5f)));
}
inline float log(float x) {
    const bool small = x < 0x1p-126f;
    const float y = log_of_normal(small ? x * 0x1p23f : x, small ? 23 : 0);
    return x > 0 ? (x < INFINITY ? y : x) : x == 0 ? -INFINITY : NAN;
}
inline double log(double x) { return std::log(x); }

inline float tanh(float x) {
    const float size = fabs(x), e = expm1_normal(2 * (size > 10.0f ? 10.0f : size));
    return copysign(e / (e + 2), x);
}
inline double tanh(double x) { return std::tanh(x); }

using Element = float;    // of the input and the weight in memory
using Compute = float;    // of everything else

constexpr int CHANNELS = 3, FEATURES = 40, GROUPS = 1;    // of a group, in and out
constexpr int TAPS_D = 1, TAPS_H = 2, TAPS_W = 6, TAPS = TAPS_D * TAPS_H * TAPS_W;

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
constexpr int VECTORS = 3, BLOCK = VECTORS * LANES, BLOCKS = ceil_div(FEATURES, BLOCK);

// A phase of a dimension: the output positions `index * STRIDE + phase`.  Its taps read the input at
// `index * ADVANCE + first + tap * STEP`, and are taps `start + tap * BETWEEN` of the weight; `before` counts those of
// earlier phases.
struct Phase { int first, taps, start, before; };
constexpr int STRIDE_D = 1, ADVANCE_D = 1, STEP_D = 1, BETWEEN_D = 1;
constexpr Phase PHASES_D[STRIDE_D] = {{0, 1, 0, 0}};
constexpr int STRIDE_H = 1, ADVANCE_H = 1, STEP_H = 1, BETWEEN_H = 1;
constexpr Phase PHASES_H[STRIDE_H] = {{0, 2, 0, 0}};
constexpr int STRIDE_W = 1, ADVANCE_W = 1, STEP_W = 1, BETWEEN_W = 1;
constexpr Phase PHASES_W[STRIDE_W] = {{0, 6, 0, 0}};
constexpr int LOWEST_D = 0, LOWEST_H = 0, LOWEST_W = 0;    // of first + tap * STEP
constexpr int REACH_D = 1, REACH_H = 2, REACH_W = 6;    // from there to the highest
// A strip of results, the positions of the convolution that they need, and the inputs that those read.
constexpr int STRIP_D = 1, STRIP_H = 8, STRIP_W = 20;
constexpr int POSITIONS_D = 1, POSITIONS_H = 8, POSITIONS_W = 20;
constexpr int INPUTS_D = ceil_div(POSITIONS_D - 1, STRIDE_D) * ADVANCE_D + REACH_D;
constexpr int INPUTS_H = ceil_div(POSITIONS_H - 1, STRIDE_H) * ADVANCE_H + REACH_H;
constexpr int INPUTS_W = ceil_div(POSITIONS_W - 1, STRIDE_W) * ADVANCE_W + REACH_W;
// The staged input is [channel][d][h][w].
constexpr int COLUMN = 1, ROW = INPUTS_W, PLANE = INPUTS_H * ROW;
constexpr int CHANNEL = (ceil_div(INPUTS_D * PLANE, 16) | 1) * 16;    // an odd number of cache lines

// A tile of sums in registers: TILE positions of one phase and row, a block of features.  The weights of TOGETHER taps
// are at hand, so that an input once read serves all of them.
constexpr int TOGETHER = 2, MOST = larger(1, (REGISTERS - 2 - TOGETHER * VECTORS) / VECTORS);
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
constexpr int CHUNK = 3;

constexpr int STAGED = CHANNELS * CHANNEL + TILE * ADVANCE_W * COLUMN + LANES;
constexpr int WEIGHTS = CHANNELS * TAPS * BLOCK;    // of a block of features

using Result = float;

// What a call works on: tensors, and lengths of the input, the convolution's output and the result.
struct Call {
    const float* x;
    const float* bias;
    const Compute* packed;
    Result* out;
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
            const float v1 = tanh(shifted);
            row[f] = v1;
        }
    }
}

// A running logsumexp: the largest value, and the sum of exp(value - largest).  Where the largest is infinite there is
// nothing to subtract.
struct Fold {
    Compute most = -Compute(INFINITY);
    double total = 0;
    static Compute shift(Compute most) { return fabs(most) == Compute(INFINITY) ? Compute(0) : most; }
    void raise(Compute value) {
        if (!(value > most)) return;
        if (total != 0) total *= exp(double(shift(most)) - value);
        most = value;
    }
    void take(const Compute* value, index_t count) {
        Compute found = -Compute(INFINITY);
#pragma omp simd reduction(max : found)
        for (index_t e = 0; e < count; ++e) found = value[e] > found ? value[e] : found;
        raise(found);
        const Compute by = shift(most);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (index_t e = 0; e < count; ++e) sum += exp_up_to_one(value[e] - by);
        total += sum;
    }
    void merge(const Fold& other) {
        raise(other.most);
        if (other.total != 0) total += other.total * exp(double(shift(other.most)) - shift(most));
    }
    void save(double* to, index_t stride) const { to[0] = most, to[stride] = total; }
    static Fold load(const double* from, index_t stride) { return {Compute(from[0]), from[stride]}; }
    float result(double) const { return float(Compute(log(total)) + shift(most)); }
};

// Running logsumexps of neighbouring results: the largest values of all rows come first.
struct Folds {
    Compute most[LANES];
    double total[LANES];
    explicit Folds(index_t count) {
        std::fill(most, most + count, -Compute(INFINITY));
        std::fill(total, total + count, 0.0);
    }
    void take(const Compute* __restrict__ value, index_t count, index_t rows = 1, index_t pitch = 0) {
        const index_t fours = rows / 4 * 4;  // rows by four, or each would wait for what the last one left in memory
        Compute by[LANES], sum[LANES] = {};
        std::copy(most, most + count, by);
        for (index_t r = 0; r < fours; r += 4)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) {
                const Compute* at = value + r * pitch + e;
                by[e] = std::max(by[e], std::max(std::max(at[0], at[pitch]), std::max(at[2 * pitch], at[3 * pitch])));
            }
        for (index_t r = fours; r < rows; ++r)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) by[e] = std::max(by[e], value[r * pitch + e]);
#pragma omp simd
        for (index_t e = 0; e < count; ++e) {
            const Compute least = most[e], now = by[e];
            by[e] = fabs(now) == Compute(INFINITY) ? Compute(0) : now;
            total[e] *= least == now ? Compute(1) : exp_up_to_one(least - by[e]);
            most[e] = now;
        }
        for (index_t r = 0; r < fours; r += 4)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) {
                const Compute* at = value + r * pitch + e;
                sum[e] += (exp_up_to_one(at[0] - by[e]) + exp_up_to_one(at[pitch] - by[e])) +
                    (exp_up_to_one(at[2 * pitch] - by[e]) + exp_up_to_one(at[3 * pitch] - by[e]));
            }
        for (index_t r = fours; r < rows; ++r)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) sum[e] += exp_up_to_one(value[r * pitch + e] - by[e]);
#pragma omp simd
        for (index_t e = 0; e < count; ++e) total[e] += sum[e];
    }
    Fold of(index_t e) const { return {most[e], total[e]}; }
};

constexpr int OVER = ceil_div(STRIP_W, LANES);    // folds of a row of results

// Takes in `features` of `count` positions, which come to lie along the lanes, those of a vector in a fold.
void take_features(const Compute* __restrict results, int count, int features, Folds* over) {
    for (int first = 0; first < count; first += LANES, ++over) {
        Compute turned[BLOCK][LANES];
        for (int f = 0; f < features; f += LANES) {
            Compute square[LANES][LANES];    // behind the last position, that one again
            for (int i = 0; i < LANES; ++i)
                store(load(results + smaller(first + i, count - 1) * BLOCK + f), square[i]);
#pragma omp simd
            for (int i = 0; i < LANES; ++i)
#pragma GCC unroll 16
                for (int lane = 0; lane < LANES; ++lane) turned[f + lane][i] = square[i][lane];
        }
        over->take(turned[0], LANES, features, LANES);
    }
}

// What a thread works on, in whole cache lines.
struct alignas(64) Line { Compute at[64 / sizeof(Compute)]; };
constexpr long long lines(long long numbers) { return (numbers * sizeof(Compute) + 63) / 64; }
constexpr long long BAND = (long long)ROWS_D * ROWS_H * PITCH * BLOCK;
struct Scratch {
    std::vector<Line> staged, band, results;
    std::vector<Folds> over;
    Scratch() : staged(lines(STAGED)), band(lines(BAND)), results(lines(STRIP_W * BLOCK)) {}
};

// One strip of results of one sample, for one part of the blocks of features.
void strip(const Call& call, long long task, Scratch& own) {
    const int strips_h = ceil_div(call.out_h, STRIP_H), strips_w = ceil_div(call.out_w, STRIP_W);
    long long rest = task;
    const int part = rest % PARTS;
    rest /= PARTS;
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
    own.over.assign(STRIP_D * STRIP_H * OVER, Folds(LANES));
    for (int group = 0; group < GROUPS; ++group) {
        const long long image = (long long)call.in_d * call.in_h * call.in_w;
        const Element* x = call.x + (sample * GROUPS + group) * CHANNELS * image;
        stage(call, x, left_d, left_h, left_w, rows_d, rows_h, columns, staged);
        for (int block = part * PART; block < smaller(part * PART + PART, BLOCKS); ++block) {
            const int features = smaller(BLOCK, FEATURES - block * BLOCK), first_feature = group * FEATURES + block * BLOCK;
            const Compute* weights = call.packed + (group * BLOCKS + block) * (long long)WEIGHTS;
            const Channels of(call, first_feature, features);
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
                                const Inside along_d(of_d.taps, left_d + row_d, STEP_D, call.in_d);
                                const Inside along_h(of_h.taps, left_h + row_h, STEP_H, call.in_h);
                                convolve(first, of_d, of_h, along_d, along_h, from_w, to_w - from_w, left_w, chunk, weights,
                                    row);
                                before(call, of, row, to_w - from_w);
                            }
                    for (int d = band_d; d < last_band_d; ++d)
                        for (int h = band_h; h < last_band_h; ++h) {
                            const Compute* results = band + ((d - begin_d) * ROWS_H + h - begin_h) * PITCH * BLOCK;
                            Folds* over = own.over.data() + ((d - first_d) * STRIP_H + h - first_h) * OVER;
                            take_features(results, count, features, over);
                        }
                }
        }
    }
    for (int d = first_d; d < last_d; ++d)
        for (int h = first_h; h < last_h; ++h) {
            const Folds* over = own.over.data() + ((d - first_d) * STRIP_H + h - first_h) * OVER;
            Result* to = call.out + (((long long)sample * call.out_d + d) * call.out_h + h) * call.out_w + first_w;
            for (int n = 0; n < last_w - first_w; ++n) {
                const Fold fold = over[n / LANES].of(n % LANES);
                to[n] = fold.result(double(GROUPS * FEATURES));
            }
        }
}

extern "C" void fused_test(const float* x, const float* w, const float* bias, Compute* packed, Result* out, int N,
    int in_d, int in_h, int in_w, int conv_d, int conv_h, int conv_w, int out_d, int out_h, int out_w, int threads) {
    const Call call = {x, bias, packed, out, in_d, in_h, in_w, conv_d, conv_h, conv_w, out_d, out_h, out_w};
    const long long strips = (long long)ceil_div(out_d, STRIP_D) * ceil_div(out_h, STRIP_H) * ceil_div(out_w, STRIP_W);
    const long long tasks = N * strips * 1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int i = 0; i < GROUPS * BLOCKS; ++i) pack(w, packed, i / BLOCKS, i % BLOCKS);
        Scratch own;
#pragma omp for schedule(dynamic)
        for (long long task = 0; task < tasks; ++task) strip(call, task, own);
    }
}

}  // namespace fused_test
