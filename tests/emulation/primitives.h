// fusewright/codegen/cuda/primitives.py on a CPU: each where its text was in the kernel (USES_name).
#pragma once

#if defined(USES_elements) || defined(USES_halves) || defined(USES_mma_bf16) || defined(USES_mma_fp16) || defined(USES_warpgroup)
namespace emulation {
namespace {

inline float value_of_fp16(unsigned bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? ldexpf(float(fraction + 1024), exponent - 25)
                                           : ldexpf(float(fraction), -24);
    return bits >> 15 ? -magnitude : magnitude;
}
inline float value_of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }

}  // namespace
}  // namespace emulation
#endif

#if defined(USES_mma_tf32) || defined(USES_mma_f64) || defined(USES_mma_bf16) || defined(USES_mma_fp16) || \
    defined(USES_warpgroup)
namespace emulation {
namespace {

// d += a * b for one 16x8x8 tile.
__attribute__((optimize("O3")))
inline void product(double (&d)[16][8], const double (&a)[16][8], const double (&b)[8][8]) {
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 8; ++k)
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
}

// The same from the registers of a warp: each lane's elements are those of PTX's mma.m16n8k8.
template <typename Element, typename Sum>
inline void completed_mma(Warp& warp, double (*read)(Element), Sum (*round)(double)) {
    double a[16][8], b[8][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto own_a = static_cast<const Element*>(warp.first[lane].operands[1]);
        const auto own_b = static_cast<const Element*>(warp.first[lane].operands[2]);
        const auto own_d = static_cast<const Sum*>(warp.first[lane].operands[0]);
        const int group = lane / 4, member = lane % 4;
        for (int i = 0; i < 4; ++i) a[group + i % 2 * 8][member + i / 2 * 4] = read(own_a[i]);
        for (int i = 0; i < 2; ++i) b[member + i * 4][group] = read(own_b[i]);
        for (int i = 0; i < 4; ++i) d[group + i / 2 * 8][member * 2 + i % 2] = double(own_d[i]);
    }
    product(d, a, b);
    for (int lane = 0; lane < 32; ++lane) {
        const auto own_d = static_cast<Sum*>(warp.first[lane].operands[0]);
        for (int i = 0; i < 4; ++i) own_d[i] = round(d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}

inline void start_mma(Complete complete, const char* where, void* d, const void* a, const void* b, int line) {
    Fiber& self = *current;
    self.operands[0] = d;
    self.operands[1] = const_cast<void*>(a);
    self.operands[2] = const_cast<void*>(b);
    collective(complete, where, WHOLE_WARP, line);
}

// All 32 lanes must come, and to the same instruction.
inline void check_mma(const Warp& warp, unsigned lanes) {
    if (lanes != WHOLE_WARP) fail("mma in a warp of fewer than 32 lanes");
    for (int lane = 1; lane < 32; ++lane)
        if (warp.first[lane].line != warp.first[0].line)
            fail("divergent mma: lines %d and %d", warp.first[0].line, warp.first[lane].line);
}

// Tensor cores keep a few bits more than float32 while they add, then cut the sum off.
inline float cut_off(double sum) {
    const float nearest = float(sum);
    return fabs(double(nearest)) > fabs(sum) && !isinf(nearest) ? nextafterf(nearest, 0.0f) : nearest;
}
inline double read_tf32(unsigned bits) {
    const float x = __uint_as_float(bits);
    if (x == x && bits & 0x1fffu) fail("mma_tf32: operand %a is not rounded to tf32", double(x));
    return x;
}
inline void completed_mma_tf32(Warp& warp, unsigned lanes) {
    check_mma(warp, lanes);
    completed_mma(warp, read_tf32, cut_off);
}

inline double as_it_is(double x) { return x; }
inline void completed_mma_f64(Warp& warp, unsigned lanes) {
    check_mma(warp, lanes);
    completed_mma(warp, as_it_is, as_it_is);
}

#if defined(USES_mma_bf16) || defined(USES_mma_fp16) || defined(USES_warpgroup)
// As above, of mma.m16n8k16: every register holds two neighbouring k.
inline void completed_mma_halves(Warp& warp, float (*value)(unsigned)) {
    double a[2][16][8], b[2][8][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto own_a = static_cast<const unsigned*>(warp.first[lane].operands[1]);
        const auto own_b = static_cast<const unsigned*>(warp.first[lane].operands[2]);
        const auto own_d = static_cast<const float*>(warp.first[lane].operands[0]);
        const int group = lane / 4, member = lane % 4;
        for (int part = 0; part < 2; ++part) {
            const int k = 2 * member + part;
            for (int i = 0; i < 4; ++i) a[i / 2][group + i % 2 * 8][k] = value(own_a[i] >> 16 * part & 0xffffu);
            for (int i = 0; i < 2; ++i) b[i][k][group] = value(own_b[i] >> 16 * part & 0xffffu);
        }
        for (int i = 0; i < 4; ++i) d[group + i / 2 * 8][member * 2 + i % 2] = double(own_d[i]);
    }
    for (int i = 0; i < 2; ++i) product(d, a[i], b[i]);
    for (int lane = 0; lane < 32; ++lane) {
        const auto own_d = static_cast<float*>(warp.first[lane].operands[0]);
        for (int i = 0; i < 4; ++i) own_d[i] = cut_off(d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
}
inline void completed_mma_bf16(Warp& warp, unsigned lanes) {
    check_mma(warp, lanes);
    completed_mma_halves(warp, value_of_bf16);
}
inline void completed_mma_fp16(Warp& warp, unsigned lanes) {
    check_mma(warp, lanes);
    completed_mma_halves(warp, value_of_fp16);
}
#endif

#ifdef USES_warpgroup
struct Of_tf32 {
    using Element = unsigned;
    static double read(Element x) { return read_tf32(x); }
};
struct Of_bf16 {
    using Element = unsigned short;
    static double read(Element x) { return value_of_bf16(x); }
};
struct Of_fp16 {
    using Element = unsigned short;
    static double read(Element x) { return value_of_fp16(x); }
};

// Row `row` of a matrix, its half-th 16 bytes.
inline const unsigned char* row_of(unsigned long long matrix, int row, int half) {
    const auto field = [&](int shift) { return long(matrix >> shift & 0x3fff) * 16; };
    const unsigned char* at = current->block->shared + field(0) + row / 8 * field(32) + row % 8 * 16 + half * field(16);
    if (!in_shared(at, 16)) fail("wgmma: row %d lies outside of shared memory", row);
    return at;
}

// This lane's share of d += a * b; what is read may not change until the wait, and one lane sees to that.
template <typename Of, int TILES>
inline void warpgroup_product(float (&d)[TILES][4], unsigned long long a, unsigned long long b) {
    using Element = typename Of::Element;
    constexpr int HALF = 16 / sizeof(Element);
    add_to(&d[0][0], 4 * TILES);
    const int thread = int(current->thread.x) % 128, first = thread / 32 * 16 + thread % 32 / 4;
    if (thread == 0)
        for (int half = 0; half < 2; ++half) {
            for (int row = 0; row < 64; ++row) hold(row_of(a, row, half), 16);
            for (int row = 0; row < 8 * TILES; ++row) hold(row_of(b, row, half), 16);
        }
    double of_a[2][2 * HALF];
    for (int k = 0; k < 2 * HALF; ++k)
        for (int i = 0; i < 2; ++i)
            of_a[i][k] = Of::read(reinterpret_cast<const Element*>(row_of(a, first + 8 * i, k / HALF))[k % HALF]);
    for (int j = 0; j < TILES; ++j)
        for (int column = 0; column < 2; ++column) {
            double sums[2] = {double(d[j][column]), double(d[j][2 + column])};
            for (int half = 0; half < 2; ++half) {
                const auto of_b = reinterpret_cast<const Element*>(row_of(b, 8 * j + thread % 4 * 2 + column, half));
                for (int k = 0; k < HALF; ++k)
                    for (int i = 0; i < 2; ++i) sums[i] += of_a[i][half * HALF + k] * Of::read(of_b[k]);
            }
            for (int i = 0; i < 2; ++i) d[j][2 * i + column] = cut_off(sums[i]);
        }
}

// The same with `a` in the registers of the lanes, as those of mma.m16n8k8 are; they may not change until the wait.
template <int TILES>
inline void warpgroup_product_of_rows(Complete complete, float (&d)[TILES][4], const unsigned* const (&a)[4],
                                      unsigned long long b, bool any, int line) {
    add_to(&d[0][0], 4 * TILES);
    const int lane = int(current->thread.x) % 32;
    unsigned of_a[4];
    for (int i = 0; i < 4; ++i) {
        hold(a[i], sizeof *a[i]);
        of_a[i] = *a[i];
    }
    for (int j = 0; j < TILES; ++j) {
        for (float& sum : d[j]) sum = any ? sum : 0.0f;
        unsigned of_b[2];
        for (int half = 0; half < 2; ++half) {
            const unsigned char* const row = row_of(b, 8 * j + lane / 4, half);
            hold(row, 16);
            of_b[half] = reinterpret_cast<const unsigned*>(row)[lane % 4];
        }
        start_mma(complete, "wgmma_rows", d[j], of_a, of_b, line);
    }
}
#endif

}  // namespace
}  // namespace emulation
#endif

namespace {

#ifdef USES_await_launches
inline void await_launches() {}
#endif

#ifdef USES_round_tf32
inline unsigned round_tf32(float x) {
    if (x != x) return 0x7fffffffu;
    const unsigned bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}
#endif

#ifdef USES_largest_halves
inline unsigned largest_halves(unsigned sizes, unsigned pair) {
    const unsigned low = pair & 0x7fffu, high = pair & 0x7fff0000u;
    return std::max(sizes & 0xffffu, low) | std::max(sizes & 0xffff0000u, high);
}
#endif

#ifdef USES_extremes
inline float greater(float a, float b) { return a > b || a != a ? a : b; }
inline float smaller(float a, float b) { return a < b || a != a ? a : b; }
inline double greater(double a, double b) { return a > b || a != a ? a : b; }
inline double smaller(double a, double b) { return a < b || a != a ? a : b; }
#endif

#ifdef USES_saturated_product
inline float saturated_product(float a, float b) { return std::fmin(std::fmax(a * b, 0.0f), 1.0f); }
#endif

#ifdef USES_approximations
inline float exp2_approx(float x) { return std::exp2(x) < 1.17549435e-38f ? 0.0f : std::exp2(x); }
// Leans to zero, as a device's may: errors of many add up.
inline float reciprocal_approx(float x) {
    const float y = 1.0f / x;
    if (std::fabs(y) < 1.17549435e-38f) return 0.0f;
    return std::isfinite(y) && (__float_as_uint(x) & 0x7fffffu) ? std::nextafter(y, 0.0f) : y;
}
#endif

#ifdef USES_mma_tf32
inline void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], EMULATED_LINE) {
    emulation::start_mma(emulation::completed_mma_tf32, "mma_tf32", d, a, b, line);
}
#endif

#ifdef USES_mma_bf16
inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], EMULATED_LINE) {
    emulation::start_mma(emulation::completed_mma_bf16, "mma_bf16", d, a, b, line);
}
#endif

#ifdef USES_mma_fp16
inline void mma_fp16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], EMULATED_LINE) {
    emulation::start_mma(emulation::completed_mma_fp16, "mma_fp16", d, a, b, line);
}
#endif

#ifdef USES_mma_f64
inline void mma_f64(double (&d)[4], const double (&a)[4], const double (&b)[2], EMULATED_LINE) {
    emulation::start_mma(emulation::completed_mma_f64, "mma_f64", d, a, b, line);
}
#endif


#ifdef USES_warpgroup
// Descriptors as the hardware has them: 14 bits each of start, and of bytes along and down, in units of 16.
inline unsigned long long shared_matrix(const void* start, int along, int down) {
    const auto at = static_cast<const unsigned char*>(start) - emulation::current->block->shared;
    if (at % 16 || along % 16 || down % 16) emulation::fail("shared_matrix: not a multiple of 16 bytes");
    if (at < 0 || (at | along | down) >> 18) emulation::fail("shared_matrix: more than 18 bits");
    return at >> 4 | (unsigned long long)(along >> 4) << 16 | (unsigned long long)(down >> 4) << 32;
}
inline void fence_async() {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit() { emulation::products_commit(); }
inline void warpgroup_wait() { emulation::products_wait(0); }
#endif
#ifdef USES_warpgroup_wait_but
template <int PENDING> inline void warpgroup_wait_but() { emulation::products_wait(PENDING); }
#endif

#ifdef USES_barriers
inline void barrier_wait(int id, int threads, EMULATED_LINE) {
    emulation::named_barrier("barrier_wait", id, threads, true, line);
}
inline void barrier_arrive(int id, int threads, EMULATED_LINE) {
    emulation::named_barrier("barrier_arrive", id, threads, false, line);
}
#endif

#ifdef USES_landing
inline void landing_open(unsigned long long* landing, int threads) { emulation::landing_open(landing, threads); }
inline void landing_close(unsigned long long* landing) { emulation::landing_close(landing); }
inline void landing_wait(unsigned long long* landing, int turn, EMULATED_LINE) {
    emulation::landing_wait(landing, turn, line);
}
#endif

#ifdef USES_copy_bulk
inline void copy_bulk(void* to_shared, const void* from_global, int bytes, unsigned long long* landing) {
    emulation::copy_bulk(to_shared, from_global, bytes, landing);
}
#endif

#ifdef USES_registers
template <int COUNT> inline void fewer_registers() { static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0, ""); }
template <int COUNT> inline void more_registers() { static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0, ""); }
#endif

#ifdef USES_arrived
inline float arrived(float x, int zero) {
    if (zero) emulation::fail("arrived: not zero");
    return x;
}
#endif
#ifdef USES_read_only
template <class T> inline T read_only(const T* x) { return *x; }
#endif
#ifdef USES_forgotten
inline unsigned forgotten(unsigned x) { return x; }
template <class T> inline T* forgotten(T* x) { return x; }
#endif
#ifdef USES_take_over
inline void take_over(float& to, const float& from) {
    emulation::settled(&to);
    emulation::settled(&from);
    to = from;
}
#endif
#ifdef USES_at_hand
inline void at_hand(float&) {}
inline void at_hand(unsigned&) {}
template <class T> inline void at_hand(const T*&) {}
#endif

#ifdef USES_warpgroup
#define EMULATED_WGMMA(flavour, columns)                                                                      \
    inline void wgmma_##flavour##_##columns(float (&d)[columns / 8][4], unsigned long long a, unsigned long long b) { \
        emulation::warpgroup_product<emulation::Of_##flavour>(d, a, b);                                       \
    }
#define EMULATED_WGMMA_OF_ROWS(flavour, columns)                                                               \
    inline void wgmma_rows_##flavour##_##columns(float (&d)[columns / 8][4], const unsigned& a0,                \
                                                 const unsigned& a1, const unsigned& a2, const unsigned& a3,    \
                                                 unsigned long long b, bool any, EMULATED_LINE) {               \
        const auto complete = emulation::completed_mma_##flavour;                                             \
        emulation::warpgroup_product_of_rows(complete, d, {&a0, &a1, &a2, &a3}, b, any, line);                \
    }
#define EMULATED_WGMMA_OF(flavour, columns) EMULATED_WGMMA(flavour, columns) EMULATED_WGMMA_OF_ROWS(flavour, columns)
#define EMULATED_WGMMAS(columns)                                                                              \
    EMULATED_WGMMA_OF(tf32, columns) EMULATED_WGMMA_OF(bf16, columns) EMULATED_WGMMA_OF(fp16, columns)
EMULATED_WGMMAS(8) EMULATED_WGMMAS(16) EMULATED_WGMMAS(24) EMULATED_WGMMAS(32)
EMULATED_WGMMAS(40) EMULATED_WGMMAS(48) EMULATED_WGMMAS(56) EMULATED_WGMMAS(64)
EMULATED_WGMMAS(72) EMULATED_WGMMAS(80) EMULATED_WGMMAS(88) EMULATED_WGMMAS(96)
EMULATED_WGMMAS(104) EMULATED_WGMMAS(112) EMULATED_WGMMAS(120) EMULATED_WGMMAS(128)
EMULATED_WGMMAS(136) EMULATED_WGMMAS(144) EMULATED_WGMMAS(152) EMULATED_WGMMAS(160)
EMULATED_WGMMAS(168) EMULATED_WGMMAS(176) EMULATED_WGMMAS(184) EMULATED_WGMMAS(192)
EMULATED_WGMMAS(200) EMULATED_WGMMAS(208) EMULATED_WGMMAS(216) EMULATED_WGMMAS(224)
EMULATED_WGMMAS(232) EMULATED_WGMMAS(240) EMULATED_WGMMAS(248) EMULATED_WGMMAS(256)
#endif

#ifdef USES_copy_async
template <int BYTES, bool NEAR = false>
inline void copy_async(void* to_shared, const void* from_global, bool inside, bool active = true) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "no such copy");
    if (active) emulation::copy_begin(to_shared, from_global, BYTES, inside);
}
inline void copy_async_commit() { emulation::copy_commit(); }
template <int PENDING>
inline void copy_async_wait() { emulation::copy_wait(PENDING); }
#endif

#ifdef USES_cluster
inline unsigned cluster_rank() { return emulation::current->block->rank; }
inline void cluster_barrier(EMULATED_LINE) { emulation::cluster_barrier(line); }
inline float cluster_load(const float* shared, unsigned rank) {
    return *static_cast<const float*>(emulation::remote(shared, sizeof(float), rank));
}
inline double cluster_load(const double* shared, unsigned rank) {
    return *static_cast<const double*>(emulation::remote(shared, sizeof(double), rank));
}
#endif

#if defined(USES_elements) || defined(USES_halves)
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(bf16 x) { return emulation::value_of_bf16(x.bits); }
inline float widened(fp16 x) { return emulation::value_of_fp16(x.bits); }
template <typename E> struct narrow_to;
template <> struct narrow_to<float> { static float of(float x) { return x; } };
template <> struct narrow_to<double> { static double of(double x) { return x; } };
template <> struct narrow_to<bf16> {
    static bf16 of(float x) {
        if (x != x) return {0x7fff};
        const unsigned bits = __float_as_uint(x);
        return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
    }
};
template <> struct narrow_to<fp16> {
    static fp16 of(float x) {
        if (x != x) return {0x7fff};
        const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
        const float magnitude = fabsf(x);
        if (magnitude >= 65520.0f) return {static_cast<unsigned short>(sign | 0x7c00u)};
        // The unit of its last place, then how many of them: 2^10 of them carry into the exponent.
        const int unit = (magnitude < 0x1p-14f ? -14 : ilogbf(magnitude)) - 10;
        const unsigned count = unsigned(nearbyintf(ldexpf(magnitude, -unit)));
        return {static_cast<unsigned short>(sign | ((unsigned(unit + 24) << 10) + count))};
    }
};
#endif

#ifdef USES_fence_async_global
inline void fence_async_global() {}
#endif

#ifdef USES_halves
inline unsigned pair_of_halves(float x, float y) {
    return narrow_to<fp16>::of(x).bits | unsigned(narrow_to<fp16>::of(y).bits) << 16;
}
inline float first_half(unsigned pair) { return emulation::value_of_fp16(pair & 0xffff); }
inline float second_half(unsigned pair) { return emulation::value_of_fp16(pair >> 16); }
#endif

#ifdef USES_smallest_halves
inline unsigned smallest_halves(unsigned sizes, unsigned pair) {
    const auto smaller = [](unsigned a, unsigned b) {
        const unsigned size = b & 0x7fff;  // halves are in the order of their bits, NaN last
        return a < size ? a : size;
    };
    return smaller(sizes & 0xffff, pair & 0xffff) | smaller(sizes >> 16, pair >> 16) << 16;
}
#endif

}  // namespace
