// fused_add_max: axes i0 over dimension 0, i1 over dimension 1, i2 over dimension 2 (pooled), i3 over dimension 3 (pooled).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace fused_add_max {

using index_t = long long;

constexpr index_t BLOCK = 16;  // planes that are computed together
constexpr index_t KERNEL[] = {3, 3};
constexpr index_t STRIDE[] = {2, 2};
constexpr index_t PADDING[] = {1, 1};
constexpr index_t DILATION[] = {1, 1};

// What a call passes.
struct Data {
    const float* x;
    const float* p1;
    index_t n0, n1, n2, n3;  // lengths of the axes
    index_t m2, m3;  // those of pooled axes before the window
};

// Where the next SIDE elements begin after those at `at`, the last ones ending at `end`.
template <int SIDE>
inline index_t next_side(index_t at, index_t end) { return at + SIDE == end ? end : std::min(at + SIDE, end - SIDE); }

// to[p * BLOCK + lane] = of[lane][p].
template <int SIDE>
inline void turn(const float* const* of, index_t length, float* __restrict__ to) {
    for (index_t p = 0; p < length; p = next_side<SIDE>(p, length))
#pragma omp simd
        for (int n = 0; n < SIDE; ++n)
#pragma GCC unroll 16
            for (int lane = 0; lane < BLOCK; ++lane) to[(p + n) * BLOCK + lane] = of[lane][p + n];
}

// to[lane * length + p] = from[p * BLOCK + lane].
template <int SIDE>
inline void turn_back(const float* __restrict__ from, index_t length, float* __restrict__ to) {
    for (index_t p = 0; p < length; p = next_side<SIDE>(p, length))
#pragma omp simd
        for (int n = 0; n < SIDE; ++n)
#pragma GCC unroll 16
            for (int lane = 0; lane < BLOCK; ++lane) to[lane * length + p + n] = from[(p + n) * BLOCK + lane];
}

// `count` planes from these coordinates on, their results one after another.
inline void planes(const Data& d, index_t i0, index_t i1, index_t count, float* __restrict__ out) {
    const index_t length = d.m2 * d.m3;
    const float* of[BLOCK];  // behind the last plane, that one again
    for (index_t e = 0; e < BLOCK; ++e) of[e] = d.x + ((i0 * d.n1 + i1) + std::min(e, count - 1)) * length;
    std::vector<float> plane(length * BLOCK);
    if (length >= BLOCK) turn<BLOCK>(of, length, plane.data());
    else if (length >= 4) turn<4>(of, length, plane.data());
    else turn<1>(of, length, plane.data());
    float p1[BLOCK];
    for (index_t e = 0; e < BLOCK; ++e) p1[e] = d.p1[i1 + std::min(e, count - 1)];
    for (index_t p = 0; p < length; ++p) {
        float* const at = plane.data() + p * BLOCK;
#pragma omp simd
        for (index_t e = 0; e < BLOCK; ++e) {
            const float e0 = at[e];
            const float e1 = p1[e];
            const float v2 = e0 + e1;
            at[e] = v2;
        }
    }
    const index_t results = d.n2 * d.n3;
    std::vector<float> value(results * BLOCK);
    for (index_t i2 = 0; i2 < d.n2; ++i2) {
        for (index_t i3 = 0; i3 < d.n3; ++i3) {
            float pooled[BLOCK];
            for (index_t e = 0; e < BLOCK; ++e) pooled[e] = -float(INFINITY);
            for (int u2 = 0; u2 < KERNEL[0]; ++u2) {
                const index_t j2 = i2 * STRIDE[0] - PADDING[0] + u2 * DILATION[0];
                if (j2 < 0 || j2 >= d.m2) continue;
                for (int u3 = 0; u3 < KERNEL[1]; ++u3) {
                    const index_t j3 = i3 * STRIDE[1] - PADDING[1] + u3 * DILATION[1];
                    if (j3 < 0 || j3 >= d.m3) continue;
                    const float* const at = plane.data() + (j2 * d.m3 + j3) * BLOCK;
#pragma omp simd
                    for (index_t e = 0; e < BLOCK; ++e) {
                        const float element = at[e];
                        pooled[e] = element > pooled[e] || element != element ? element : pooled[e];
                    }
                }
            }
            float* const to = value.data() + (i2 * d.n3 + i3) * BLOCK;
#pragma omp simd
            for (index_t e = 0; e < BLOCK; ++e) {
                to[e] = pooled[e];
            }
        }
    }
    if (count < BLOCK)
        for (index_t e = 0; e < count; ++e)
            for (index_t p = 0; p < results; ++p) out[e * results + p] = value[p * BLOCK + e];
    else if (results >= BLOCK) turn_back<BLOCK>(value.data(), results, out);
    else if (results >= 4) turn_back<4>(value.data(), results, out);
    else turn_back<1>(value.data(), results, out);
}

extern "C" void fused_add_max(const float* x, const float* p1, float* out, index_t n0, index_t n1, index_t n2,
    index_t n3, index_t m2, index_t m3, int threads) {
    const Data d{x, p1, n0, n1, n2, n3, m2, m3};
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (index_t i0 = 0; i0 < n0; ++i0) {
        for (index_t i1 = 0; i1 < n1; i1 += BLOCK) {
            planes(d, i0, i1, std::min(BLOCK, n1 - i1), out + (i0 * n1 + i1) * n2 * n3);
        }
    }
}

}  // namespace fused_add_max
