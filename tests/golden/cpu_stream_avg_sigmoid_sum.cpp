// fused_avg_sigmoid_sum: axes i0 over dimension 0, i1 over dimension 1, i2 over dimension 2 (pooled), i3 over dimension 3 (pooled).
#include <algorithm>
#include <cmath>
#include <cstring>

namespace fused_avg_sigmoid_sum {

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

constexpr index_t BLOCK = 512;  // neighbours along the last axis that are computed together
constexpr index_t KERNEL[] = {4, 4};
constexpr index_t STRIDE[] = {4, 4};
constexpr index_t PADDING[] = {0, 0};
constexpr index_t DILATION[] = {1, 1};
constexpr index_t REACH = 3;  // from the first to the last tap of a row
constexpr index_t SPAN = 2048;  // that a block of windows reaches

// What a call passes.
struct Data {
    const float* x;
    index_t n0, n1, n2, n3;  // lengths of the axes
    index_t m2, m3;  // those of pooled axes before the window
};


// A running sum, in float64.
struct First {
    double total = 0;
    void take(const float* value, index_t count) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (index_t e = 0; e < count; ++e) sum += value[e];
        total += sum;
    }
    void merge(const First& other) { total += other.total; }
    void save(double* to, index_t) const { *to = total; }
    static First load(const double* from, index_t) { return {*from}; }
    float result(double) const { return float(total); }
};

// `count` neighbours along the last axis, from these coordinates on; says whether an argument was rare.
template <typename Maths>
inline bool values_with(const Data& d, index_t i0, index_t i1, index_t i2, index_t i3, index_t count,
    float* __restrict__ value) {
    int rare = 0;
    float pooled[BLOCK];
    for (index_t e = 0; e < count; ++e) pooled[e] = float(0);
    for (int u2 = 0; u2 < KERNEL[0]; ++u2) {
        const index_t j2 = i2 * STRIDE[0] - PADDING[0] + u2 * DILATION[0];
        float row[SPAN];  // what these windows reach of a row
        const index_t j3 = i3 * STRIDE[1] - PADDING[1], length = (count - 1) * STRIDE[1] + REACH + 1;
        const index_t begin = 0, end = length;
        const float* __restrict__ const x = d.x + (((i0 * d.n1 + i1) * d.m2 + j2) * d.m3 + j3);
#pragma omp simd
        for (index_t c = begin; c < end; ++c) {
            row[c] = x[c];
        }
        for (int u3 = 0; u3 < KERNEL[1]; ++u3) {
#pragma omp simd
            for (index_t e = 0; e < count; ++e) {
                const float element = row[e * STRIDE[1] + u3 * DILATION[1]];
                pooled[e] += element;
            }
        }
    }
#pragma omp simd reduction(| : rare)
    for (index_t e = 0; e < count; ++e) {
        Maths maths;
        const float average = pooled[e] * 0.0625f;
        const float v1 = 1 / (1 + exp(maths, -average));
        value[e] = v1;
        rare |= maths.rare;
    }
    return rare;
}

// `count` neighbours along the last axis, from these coordinates on.
inline void values(const Data& d, index_t i0, index_t i1, index_t i2, index_t i3, index_t count,
    float* __restrict__ value) {
    if (values_with<Ordinary>(d, i0, i1, i2, i3, count, value))
        values_with<Any>(d, i0, i1, i2, i3, count, value);
}

// What comes of the first reduction.
inline float finish_first(const Data& d, index_t, const First& fold) {
    const float reduced = fold.result(double(d.n1) * d.n2 * d.n3);
    return reduced;
}

// The fold of runs `begin` to `end` of a result.
inline First reduced(const Data& d, index_t i0, index_t begin, index_t end) {
    First fold;
    float value[BLOCK];
    for (index_t run = begin; run < end; ++run) {
        const index_t i3 = run % ((d.n3 + BLOCK - 1) / BLOCK) * BLOCK;
        const index_t i2 = run / ((d.n3 + BLOCK - 1) / BLOCK) % d.n2;
        const index_t i1 = run / ((d.n3 + BLOCK - 1) / BLOCK) / d.n2;
        const index_t count = std::min(BLOCK, d.n3 - i3);
        values(d, i0, i1, i2, i3, count, value);
        fold.take(value, count);
    }
    return fold;
}

extern "C" void fused_avg_sigmoid_sum(const float* x, float* out, index_t n0, index_t n1, index_t n2, index_t n3,
    index_t m2, index_t m3, int threads) {
    const Data d{x, n0, n1, n2, n3, m2, m3};
    const index_t runs = n1 * n2 * ((n3 + BLOCK - 1) / BLOCK);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (index_t i0 = 0; i0 < n0; ++i0) {
        out[i0] = finish_first(d, i0, reduced(d, i0, 0, runs));
    }
}

}  // namespace fused_avg_sigmoid_sum
