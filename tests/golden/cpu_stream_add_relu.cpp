// fused_add_relu: axes i0 over dimension 0, i1 over dimension 1, i2 over dimensions 2-3.
#include <algorithm>
#include <cmath>
#include <cstring>

namespace fused_add_relu {

using index_t = long long;

// The same bits as another type.
template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Elements of tensors in half precisions are bits until they are read: bf16 and fp16 <-> float32.
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }

inline float widened(bf16 x) { return bits_as<float>(unsigned(x.bits) << 16); }

// To nearest, half to even.
inline bf16 to_bf16(float x) {
    const unsigned b = bits_as<unsigned>(x), rounded = (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
    return {static_cast<unsigned short>(x != x ? 0x7fc0u : rounded)};
}

constexpr index_t BLOCK = 512;  // neighbours along the last axis that are computed together

// What a call passes.
struct Data {
    const bf16* x;
    const bf16* p1;
    const bf16* p2;
    index_t n0, n1, n2;  // lengths of the axes
};

// `count` neighbours along the last axis, from these coordinates on.
inline void values(const Data& d, index_t i0, index_t i1, index_t i2, index_t count, bf16* __restrict__ value) {
    const bf16* __restrict__ const x = d.x + ((i0 * d.n1 + i1) * d.n2 + i2);
    const bf16* __restrict__ const p1 = d.p1 + ((i0 * d.n1 + i1) * d.n2 + i2);
    const float p2 = widened(d.p2[i1]);
#pragma omp simd
    for (index_t e = 0; e < count; ++e) {
        const float e0 = widened(x[e]);
        const float e1 = widened(p1[e]);
        const float v3 = e1 + p2;
        const float v4 = v3 + e0;
        const float v5 = v4 < float(0.0) ? float(0.0) : v4;
        value[e] = to_bf16(v5);
    }
}

extern "C" void fused_add_relu(const bf16* x, const bf16* p1, const bf16* p2, bf16* out, index_t n0, index_t n1,
    index_t n2, int threads) {
    const Data d{x, p1, p2, n0, n1, n2};
#pragma omp parallel for num_threads(threads) schedule(static) collapse(3)
    for (index_t i0 = 0; i0 < n0; ++i0) {
        for (index_t i1 = 0; i1 < n1; ++i1) {
            for (index_t i2 = 0; i2 < n2; i2 += BLOCK) {
                const index_t count = std::min(BLOCK, n2 - i2);
                values(d, i0, i1, i2, count, out + ((i0 * n1 + i1) * n2 + i2));
            }
        }
    }
}

}  // namespace fused_add_relu
