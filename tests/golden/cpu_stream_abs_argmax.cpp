// fused_abs_argmax: axes i0 over dimension 0, i1 over dimension 1, i2 over dimension 2.
#include <algorithm>
#include <cmath>
#include <cstring>

namespace fused_abs_argmax {

using index_t = long long;

using std::fabs;

constexpr index_t BLOCK = 1024;  // neighbours along the last axis that are computed together

// What a call passes.
struct Data {
    const float* x;
    index_t n0, n1, n2;  // lengths of the axes
};


// A running index of a maximum: of the first NaN, or else of the first that nothing is better than.
struct First {
    float best = -float(INFINITY);
    index_t place = 0;
    void take(const float* value, index_t count, index_t first) {  // which is found once it is known that there is one
        float found = -float(INFINITY);
        int unordered = 0, better = 0;
#pragma omp simd reduction(max : found) reduction(| : unordered, better)
        for (index_t e = 0; e < count; ++e) {
            found = value[e] > found ? value[e] : found;
            unordered |= value[e] != value[e];
            better |= value[e] > best;
        }
        if (best != best || !(unordered || better)) return;
        index_t e = 0;
        while (unordered ? value[e] == value[e] : value[e] != found) ++e;
        best = value[e], place = first + e;
    }
    void merge(const First& other) {
        const bool alike = other.best == best || (other.best != other.best && best != best);
        if (alike ? other.place < place : other.best > best || other.best != other.best) *this = other;
    }
    void save(double* to, index_t stride) const { to[0] = best, to[stride] = double(place); }
    static First load(const double* from, index_t stride) { return {float(from[0]), index_t(from[stride])}; }
    long long result(double) const { return place; }
};

// Running index of a maximums of neighbouring results.
struct Firsts {
    float best[BLOCK];
    index_t place[BLOCK];
    explicit Firsts(index_t count) {
        std::fill(best, best + count, -float(INFINITY));
        std::fill(place, place + count, index_t(0));
    }
    void take(const float* __restrict__ value, index_t count, index_t row) {
#pragma omp simd
        for (index_t e = 0; e < count; ++e) {
            const bool better = value[e] > best[e] || (value[e] != value[e] && best[e] == best[e]);
            best[e] = better ? value[e] : best[e];
            place[e] = better ? row : place[e];
        }
    }
    First of(index_t e) const { return {best[e], place[e]}; }
};

// `count` neighbours along the last axis, from these coordinates on.
inline void values(const Data& d, index_t i0, index_t i1, index_t i2, index_t count, float* __restrict__ value) {
    const float* __restrict__ const x = d.x + ((i0 * d.n1 + i1) * d.n2 + i2);
#pragma omp simd
    for (index_t e = 0; e < count; ++e) {
        const float e0 = x[e];
        const float v1 = fabs(e0);
        value[e] = v1;
    }
}

// What comes of the first reduction.
inline long long finish_first(const Data& d, index_t, index_t, const First& fold) {
    const long long reduced = fold.result(double(d.n1));
    return reduced;
}

// Takes runs `begin` to `end` of a block of neighbouring results.
inline void reduce(const Data& d, index_t i0, index_t i2, index_t count, index_t begin, index_t end, Firsts& folds) {
    float value[BLOCK];
    for (index_t run = begin; run < end; ++run) {
        const index_t i1 = run;
        values(d, i0, i1, i2, count, value);
        folds.take(value, count, i1);
    }
}

extern "C" void fused_abs_argmax(const float* x, long long* out, index_t n0, index_t n1, index_t n2, int threads) {
    const Data d{x, n0, n1, n2};
    const index_t runs = n1;
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (index_t i0 = 0; i0 < n0; ++i0) {
        for (index_t i2 = 0; i2 < n2; i2 += BLOCK) {
            const index_t count = std::min(BLOCK, n2 - i2);
            Firsts folds(count);
            reduce(d, i0, i2, count, 0, runs, folds);
            long long* const to = out + (i0 * n2 + i2);
            for (index_t e = 0; e < count; ++e) to[e] = finish_first(d, i0, i2 + e, folds.of(e));
        }
    }
}

}  // namespace fused_abs_argmax
