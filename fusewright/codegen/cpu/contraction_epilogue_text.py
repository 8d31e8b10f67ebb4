"""The C++ text of what follows the multiplication: pooling, writing, joining the parts of reductions."""

from __future__ import annotations

POOL_PADDING = "constexpr int POOL_PAD_D = $pad_d, POOL_PAD_H = $pad_h, POOL_PAD_W = $pad_w;"

POOL_CONSTANTS = """
constexpr int POOL_D = $d, POOL_H = $h, POOL_W = $w;
constexpr int POOL_STRIDE_D = $stride_d, POOL_STRIDE_H = $stride_h, POOL_STRIDE_W = $stride_w;
"""

CHANNEL_NUMBERS = """

// What is given per channel, for a block of features.
struct Channels {
    Compute $fields;
    Channels(const Call& call, ${sample}int first_feature, int features) {
        for (int f = 0; f < BLOCK; ++f) {
            const bool inside = f < features;
            const int feature = first_feature + f;
            $loads
        }
    }
};
"""

READ_BESIDE = """

// What $name has at a row of results: to[n * BLOCK + f] = from[f * plane + n], for `count` positions n of `features`;
// zeros of features that are not there.
template <int SIDE>
inline void turn_$name(const $type* from, int count, long long plane, Compute* to) {
    for (int n = 0; n < count; n = next_square<SIDE>(n, count)) {
        Compute turned[SIDE][LANES];
#pragma omp simd
        for (int i = 0; i < SIDE; ++i)
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; ++lane) turned[i][lane] = $turned;
        for (int i = 0; i < SIDE; ++i) store(load(turned[i]), to + (n + i) * BLOCK);
    }
}
inline void read_$name(const $type* from, int features, int count, long long plane, Compute* __restrict to) {
    if (features < BLOCK) std::fill(to, to + count * BLOCK, Compute(0));
    int f = 0;
    for (; f + LANES <= features; f += LANES)
        if (count >= LANES) turn_$name<LANES>(from + f * plane, count, plane, to + f);
        else if (count >= 4) turn_$name<4>(from + f * plane, count, plane, to + f);
        else turn_$name<1>(from + f * plane, count, plane, to + f);
    for (; f < features; ++f)
        for (int n = 0; n < count; ++n) to[n * BLOCK + f] = $value;
}
"""

READ_BESIDE_CHANNELS_LAST = """

// What $name has at a row of results: to[n * BLOCK + f] = from[n * plane + f], for `count` positions n of `features`;
// zeros of features that are not there.
inline void read_$name(const $type* from, int features, int count, long long plane, Compute* __restrict to) {
    for (int n = 0; n < count; ++n, from += plane, to += BLOCK) {
        for (int f = 0; f < features; ++f) to[f] = $value;
        for (int f = features; f < BLOCK; ++f) to[f] = 0;
    }
}
"""

# Of what has a number for every element: where that of the first feature and position is, and how far on the next is.
AT = """
const long long plane = (long long)call.conv_d * call.conv_h * call.conv_w;
const long long at = ((long long)sample * (GROUPS * FEATURES) + first_feature) * plane + $at;
"""
AT_CHANNELS_LAST = """
constexpr long long plane = GROUPS * FEATURES;
const long long at = ((long long)sample * call.conv_d * call.conv_h * call.conv_w + $at) * plane + first_feature;
"""

KEPT = """
constexpr int RUN = larger(1, 512 / BLOCK);    // positions whose values are kept, should they be wanted again
Compute given[RUN * BLOCK];
for (int n = 0; n < count; n += RUN, row += RUN * BLOCK) {
    const int some = smaller(RUN, count - n);
    std::copy(row, row + some * BLOCK, given);
    $again
}
"""

POOL = """

// The $kind of each window: $results at (d, h, w...), from the positions of a band, which begins
// at (from_d, from_h, from_w).
void pool(const Call& call, const Compute* __restrict band, int from_d, int from_h, int from_w, int d, int h, int w,
    int count, $pointers) {
    for (int n = 0; n < count; ++n, $next) {
        $bounds
        Compute $running;
        for (int f = 0; f < BLOCK; ++f) $start;
        for (int i = begin_d; i < end_d; ++i)
            for (int j = begin_h; j < end_h; ++j)
                for (int k = begin_w; k < end_w; ++k) {
                    const Compute* at = band + ((i * ROWS_H + j) * PITCH + k) * BLOCK;
#pragma omp simd
                    for (int f = 0; f < BLOCK; ++f) {
                        const Compute value = at[f];
                        $join
                    }
                }
        $share
#pragma omp simd
        for (int f = 0; f < BLOCK; ++f) $result;
    }
}
"""

POOLED = """
Compute* results = own.results.data()->at;
pool(call, band, begin_d, begin_h, from_w, d, h, first_w, count, $ends);
"""

# What follows falls up to a point and rises from there, and has been computed of both ends of each window.
OF_ENDS = """
for (int i = 0; i < count * BLOCK; ++i)
    results[i] = least[i] > results[i] || least[i] != least[i] ? least[i] : results[i];
"""

# GCC makes vectors of the last two loops since the second one is unrolled and the first one has no remainder.
TURN_BACK = """

// to[lane * plane + n] = results[n * BLOCK + lane], for `count` positions n.
template <int SIDE>
inline void turn_back(const Compute* results, int count, Result* to, long long plane) {
    for (int n = 0; n < count; n = next_square<SIDE>(n, count)) {
        Compute turned[SIDE][LANES];
        for (int i = 0; i < SIDE; ++i) store(load(results + (n + i) * BLOCK), turned[i]);
#pragma omp simd
        for (int i = 0; i < SIDE; ++i)
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; ++lane) to[lane * plane + n + i] = $value;
    }
}
"""

STORE = """
const long long plane = (long long)call.out_d * call.out_h * call.out_w;
const long long at = ((long long)sample * (GROUPS * FEATURES) + first_feature) * plane
    + ((long long)d * call.out_h + h) * call.out_w + first_w;
int f = 0;
for (; f + LANES <= features; f += LANES)
    if (count >= LANES) turn_back<LANES>(results + f, count, call.out + at + f * plane, plane);
    else if (count >= 4) turn_back<4>(results + f, count, call.out + at + f * plane, plane);
    else turn_back<1>(results + f, count, call.out + at + f * plane, plane);
for (; f < features; ++f)
    for (int n = 0; n < count; ++n) call.out[at + f * plane + n] = $value;
"""

STORE_CHANNELS_LAST = """
const long long row = (((long long)sample * call.out_d + d) * call.out_h + h) * call.out_w + first_w;
for (int n = 0; n < count; ++n)
    for (int f = 0; f < features; ++f)
        call.out[(row + n) * (GROUPS * FEATURES) + first_feature + f] = $value;
"""

TAKE_FEATURES = """

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
"""

LEAVE_POSITIONS = """
const long long rows = GROUPS * FEATURES, strip = task / (GROUPS * PARTS);
for (int f = 0; f < features; ++f)
    total.of(f).save(call.partial + PLANES * (strip * rows + first_feature + f), 1);
"""

LEAVE_CHANNELS = """
for (int d = first_d; d < last_d; ++d)
    for (int h = first_h; h < last_h; ++h) {
        const Folds* over = own.over.data() + ((d - first_d) * STRIP_H + h - first_h) * OVER;
        Result* to = call.out + (((long long)sample * call.out_d + d) * call.out_h + h) * call.out_w + first_w;
        for (int n = 0; n < last_w - first_w; ++n) {
            const Fold fold = over[n / LANES].of(n % LANES);
            to[n] = $value;
        }
    }
"""

FINISH = """

// Join the parts of reductions, in their order: out[i] over partial[i / rows][split][i % rows].
extern "C" void ${name}_finish(const double* partial, Result* out, int splits, int rows, long long results,
    long long count) {
    for (long long i = 0; i < results; ++i) {
        const double* from = partial + PLANES * (i / rows * splits * rows + i % rows);
        Fold value = Fold::load(from, 1);
        for (int split = 1; split < splits; ++split)
            value.merge(Fold::load(from + PLANES * ((long long)split * rows), 1));
        out[i] = $value;
    }
}
"""

FINISH_SAMPLE = """
#pragma omp parallel for num_threads(threads) schedule(static)
for (long long sample = 0; sample < N; ++sample) {
    $compute folded[$rows];
    for (int i = 0; i < $rows; ++i) {
        const double* from = partial + PLANES * (sample * splits * $rows + i);
        Fold value = Fold::load(from, 1);
        for (int split = 1; split < splits; ++split)
            value.merge(Fold::load(from + PLANES * ((long long)split * $rows), 1));
        folded[i] = value.result(count);
    }
    $body
}
"""
