// fused_linear_add_logsumexp_mul: sample by sample.  Operands: a0 (B, 64, 1, 1), a1 (128, 64), a2 (128), a3 (128, 1, 1).
#include <algorithm>
#include <cmath>
#include <cstring>

namespace fused_linear_add_logsumexp_mul {

using index_t = long long;

// The same bits as another type.
template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }

using std::fabs;

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

// element(0) + ... + element(length - 1), in float64: every 32nd of them, then those sums.
template <typename Element>
inline double sum_of(index_t length, Element element) {
    double few[32] = {}, total = 0;
    index_t r = 0;
    for (; r + 32 <= length; r += 32) {
#pragma omp simd
        for (int e = 0; e < 32; ++e) few[e] += element(r + e);
    }
    for (int e = 0; r + e < length; ++e) few[e] += element(r + e);
    for (int e = 0; e < 32; ++e) total += few[e];
    return total;
}

// The greatest of element(0) ... element(length - 1), NaN where one is: of every 32nd of them, then of those.
template <typename T, typename Element>
inline T greatest_of(index_t length, Element element) {
    const auto better = [](T value, T than) { return value > than || value != value ? value : than; };
    T few[32], most = -T(INFINITY);
    for (int e = 0; e < 32; ++e) few[e] = -T(INFINITY);
    index_t r = 0;
    for (; r + 32 <= length; r += 32) {
#pragma omp simd
        for (int e = 0; e < 32; ++e) few[e] = better(element(r + e), few[e]);
    }
    for (int e = 0; r + e < length; ++e) few[e] = better(element(r + e), few[e]);
    for (int e = 0; e < 32; ++e) most = better(few[e], most);
    return most;
}

extern "C" void fused_linear_add_logsumexp_mul(const double* a0, const double* a1, const double* a2, const float* a3,
    float* out, index_t batch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (index_t sample = 0; sample < batch; ++sample) {
        alignas(64) unsigned char arena[1536];  // values of one sample, dead ones make room
        const double* const a0_row = a0 + sample * 64;
        float* const out_row = out + sample * 1;
        double* const s0 = reinterpret_cast<double*>(arena);
        // reshape: (B, 64, 1, 1) -> (B, 64)
#pragma omp simd
        for (index_t i = 0; i < 64; ++i) {
            s0[i] = widened(a0_row[i]);
        }
        double* const s1 = reinterpret_cast<double*>(arena + 512);
        // matmul: (B, 64) @ (128, 64) -> (B, 128)
        for (index_t row = 0; row < 128; ++row) {
            const double total = sum_of(64, [&](index_t r) { return double(s0[r]) * widened(a1[row * 64 + r]); });
            s1[row] = total + widened(a2[row]);
        }
        float* const s2 = reinterpret_cast<float*>(arena);
        // add: (B, 128, 1, 1) -> (B, 128, 1, 1)
#pragma omp simd
        for (index_t i = 0; i < 128; ++i) {
            const double v0 = s1[i];
            const float v1 = float(v0);
            const float v2 = widened(a3[i]);
            const float v3 = v1 + v2;
            s2[i] = v3;
        }
        float* const s3 = reinterpret_cast<float*>(arena + 512);
        // logsumexp: (B, 128, 1, 1) -> (B, 1, 1, 1)
        {
            constexpr index_t row = 0;
            const auto element = [&](index_t r) { return s2[r]; };
            const float most = greatest_of<float>(128, element);
            const float shift = std::fabs(most) == float(INFINITY) ? float(0) : most;  // nothing to subtract
            const double total = sum_of(128, [&](index_t r) { return exp(element(r) - shift); });
            s3[row] = float(float(log(total)) + shift);
        }
        // mul: (B, 1) -> (B, 1)
#pragma omp simd
        for (index_t i = 0; i < 1; ++i) {
            const float v0 = s3[0];
            const float v1 = v0 * 10.0f;
            out_row[i] = v1;
        }
    }
}

}  // namespace fused_linear_add_logsumexp_mul
