// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
__device__ __forceinline__ void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// d += a * b for one 16x8x8 tile: a is 16x8 row-major, b is 8x8 column-major, both rounded to tf32, d in float32.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The tf32 value nearest to x, in the bits of a float32: one instruction from sm_90 on.
__device__ __forceinline__ unsigned round_tf32(float x) {
    unsigned bits;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
    return bits;
}

// The greater and the smaller of two values; NaN wins.
__device__ __forceinline__ float greater(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float smaller(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ double greater(double a, double b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ double smaller(double a, double b) { return a < b || a != a ? a : b; }

// 2^x and 1/x to 2 ulp; results below the normal numbers are zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Start copying BYTES (4, 8 or 16, all addresses aligned to it) to shared memory, or zeros where not `inside`; nothing
// where not `active`, which a branch would say in more instructions.  NEAR: by way of the level-1 cache, where warps
// find what their neighbours have read, as all copies of fewer than 16 go.
template <int BYTES, bool NEAR = false>
__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global, bool inside, bool active = true) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    const int bytes = inside ? BYTES : 0;
    if constexpr (BYTES == 16 && !NEAR)
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2; }"
            ::"r"(to), "l"(from_global), "r"(bytes), "r"(int(active)));
    else
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], %4, %2; }"
            ::"r"(to), "l"(from_global), "r"(bytes), "r"(int(active)), "n"(BYTES));
}
// Close the group of copies started so far; wait until at most PENDING groups are still under way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }

// Elements of tensors in half precisions are bits until they are read: bf16 and fp16 <-> float32.
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ double widened(double x) { return x; }
__device__ __forceinline__ float widened(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float widened(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <typename E> struct narrow_to;
template <> struct narrow_to<float> { static __device__ __forceinline__ float of(float x) { return x; } };
template <> struct narrow_to<double> { static __device__ __forceinline__ double of(double x) { return x; } };
template <> struct narrow_to<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <> struct narrow_to<fp16> {
    static __device__ __forceinline__ fp16 of(float x) {
        fp16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};

// One of two values, both computed: a branch for each of many values takes longer.
template <typename T>
__device__ __forceinline__ T chosen(bool first, T one, T other) { return first ? one : other; }

// 1/x of x from 2^-126 on, rounded as a division is: `reciprocal_approx` leans to one side, which a mean of
// 1 - sigmoid(x) would show, and a step of Newton's makes up for that.  0 for what is greater than 2^126.
__device__ __forceinline__ float reciprocal_rounded(float x) {
    const float within = smaller(x, 0x1p127f), y = reciprocal_approx(within);
    return fmaf(y, fmaf(-within, y, 1.0f), y);
}

// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) { return reciprocal_rounded(1 + exp2_approx(-1.44269504f * x)); }

using Element = float;    // of tensors in memory
using Compute = float;    // of everything else

constexpr int C = 72, O = 64, GROUPS = 1;    // channels of a group, in and out
constexpr int TAPS = 1;    // of one channel's kernel

// A warp owns 16 * M_TILES channels of OWN_D x OWN_H x 4 * OWN_W cells, ROWS_D x ROWS_H rows of a cell at a time.
constexpr int M_TILES = 1, OWN_D = 1, OWN_H = 2, OWN_W = 2;
constexpr int ROWS_D = 1, ROWS_H = 1, TILES_W = 1;
constexpr int WARPS_M = 4, WARPS_H = 1, WARPS_W = 1, THREADS = 128;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = 1;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int CHUNK = 72, CHUNKS = 1;    // input channels staged at a time
constexpr bool TOGETHER_D = false, TOGETHER_H = false;    // whether all taps along d, h are at hand at once

// Shared memory: the input as [channel][d][h][w].
constexpr int X_D = 1, X_H = 2, X_W = 8, X_CHANNEL = 40;
// Steps in the staged input from cell to cell, from position to position and from tap to tap.
constexpr int ADVANCE_D = 16, ADVANCE_H = 8, ADVANCE_W = 1;
constexpr int ELEMENT_D = 16, ELEMENT_H = 8, ELEMENT_W = 1;
constexpr int TAP_D = 0, TAP_H = 0, TAP_W = 0;

// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }

using Operand = unsigned;    // a float32 rounded to tf32
using Accumulators = float[OWN_D * ROWS_D][OWN_H * ROWS_H][TILES_W][M_TILES][4];

__device__ __forceinline__ Operand input_operand(Element x) { return __float_as_uint(x); }
__device__ __forceinline__ Operand weight_operand(Element w) { return __float_as_uint(w); }
__device__ __forceinline__ void multiply_add(float (&d)[4], const Operand (&a)[4], const Operand (&b)[2]) {
    mma_tf32(d, a, b);
}

// The k indices of one row of taps run over channels, then taps along w; a lane supplies two of every eight.
template <int TAPS_W>
struct Lane {
    static constexpr int K = CHUNK * TAPS_W, STEPS = (K + 7) / 8;
    static __device__ __forceinline__ int k(int step, int half) { return 8 * step + 4 * half + threadIdx.x % 4; }
    static __device__ __forceinline__ bool inside(int k) { return K % 8 == 0 || k < K; }
    static __device__ __forceinline__ int x(int k) { return k / TAPS_W * X_CHANNEL + k % TAPS_W * TAP_W; }
};

// A phase's weights in shared memory: [feature][channel][d][h][w], features spread over the banks.
template <int TAPS_D, int TAPS_H, int TAPS_W>
struct Phase {
    static constexpr int TAPS = TAPS_D * TAPS_H * TAPS_W, RUN = CHUNK * TAPS, BANKS = 128 / sizeof(Element);
    static constexpr int CHANNEL = TAPS, TAP = 1;    // steps from channel to channel and from tap to tap
    static constexpr int FEATURE = RUN + ((BANKS / 8 - RUN) % BANKS + BANKS) % BANKS;
    static __device__ __forceinline__ int at(int k) { return k / TAPS_W * CHANNEL + k % TAPS_W * TAP; }
};

// Column n of 8-column tile j is cell 8 * j + n: the part that depends on the lane, and that which depends on the tile.
template <int PER_CELL>
__device__ __forceinline__ int lane_column() { return threadIdx.x % 32 / 4 * ADVANCE_W; }
template <int PER_CELL>
__device__ __forceinline__ constexpr int tile_column(int j) { return 8 * j * ADVANCE_W; }

// Add the products of all staged channels and the given taps.  An input row is read from shared memory once and is
// multiplied by all of the TOGETHER_D x TOGETHER_H taps at hand that lead from it to a row of this warp.
template <int TILES, int TAPS_D, int TAPS_H, int TAPS_W, int PER_CELL>
__device__ __forceinline__ void accumulate(Accumulators& acc, const Element* x, const Element* w, int feature) {
    using L = Lane<TAPS_W>;
    using P = Phase<TAPS_D, TAPS_H, TAPS_W>;
    constexpr int D = OWN_D * ROWS_D, H = OWN_H * ROWS_H;
    constexpr int AT_ONCE_D = TOGETHER_D ? TAPS_D : 1, AT_ONCE_H = TOGETHER_H ? TAPS_H : 1;
#pragma unroll 1
    for (int step = 0; step < L::STEPS; ++step) {
        const int k[2] = {L::k(step, 0), L::k(step, 1)};
        const Element* const x_lane = x + lane_column<PER_CELL>();
        const Element* const w_lane = w + feature * P::FEATURE;
        const Element* const x_k[2] = {x_lane + L::x(k[0]), x_lane + L::x(k[1])};
        const Element* const w_k[2] = {w_lane + P::at(k[0]), w_lane + P::at(k[1])};
#pragma unroll 1
        for (int td_0 = 0; td_0 < TAPS_D; td_0 += AT_ONCE_D)
#pragma unroll 1
            for (int th_0 = 0; th_0 < TAPS_H; th_0 += AT_ONCE_H) {
                Operand a[AT_ONCE_D][AT_ONCE_H][M_TILES][4];
#pragma unroll
                for (int td = 0; td < AT_ONCE_D; ++td)
#pragma unroll
                    for (int th = 0; th < AT_ONCE_H; ++th)
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const int tap = ((td_0 + td) * TAPS_H + th_0 + th) * TAPS_W * P::TAP;
                                const int at = (16 * m + 8 * (i % 2)) * P::FEATURE + tap;
                                a[td][th][m][i] = weight_operand(L::inside(k[i / 2]) ? w_k[i / 2][at] : Element{});
                            }
                // Every row that is read, in turn: those that an earlier row and tap read too are passed over.
#pragma unroll
                for (int first_d = 0; first_d < D * AT_ONCE_D; ++first_d)
#pragma unroll
                    for (int first_h = 0; first_h < H * AT_ONCE_H; ++first_h) {
                        const int at_d = row_d(first_d / AT_ONCE_D) + first_d % AT_ONCE_D * TAP_D;
                        const int at_h = row_h(first_h / AT_ONCE_H) + first_h % AT_ONCE_H * TAP_H;
                        bool read = false;
#pragma unroll
                        for (int r = 0; r < first_d; ++r) read |= row_d(r / AT_ONCE_D) + r % AT_ONCE_D * TAP_D == at_d;
#pragma unroll
                        for (int r = 0; r < first_h; ++r) read |= row_h(r / AT_ONCE_H) + r % AT_ONCE_H * TAP_H == at_h;
                        if (read) continue;
#pragma unroll
                        for (int j = 0; j < TILES; ++j) {
                            const int at = at_d + td_0 * TAP_D + at_h + th_0 * TAP_H + tile_column<PER_CELL>(j);
                            Operand b[2];
#pragma unroll
                            for (int i = 0; i < 2; ++i) b[i] = input_operand(L::inside(k[i]) ? x_k[i][at] : Element{});
#pragma unroll
                            for (int rd = 0; rd < D; ++rd)
#pragma unroll
                                for (int td = 0; td < AT_ONCE_D; ++td) {
                                    if (row_d(rd) + td * TAP_D != at_d) continue;
#pragma unroll
                                    for (int rh = 0; rh < H; ++rh)
#pragma unroll
                                        for (int th = 0; th < AT_ONCE_H; ++th) {
                                            if (row_h(rh) + th * TAP_H != at_h) continue;
#pragma unroll
                                            for (int m = 0; m < M_TILES; ++m)
                                                multiply_add(acc[rd][rh][j][m], a[td][th][m], b);
                                        }
                                }
                        }
                    }
            }
    }
}

// Start copying VECTOR elements, or zeros where they are not `there`; nothing where not `active`.
template <int VECTOR>
__device__ __forceinline__ void copy_vector(Element* to, const Element* from, bool there, bool active = true) {
    if constexpr (VECTOR * sizeof(Element) >= 4)
        copy_async<VECTOR * sizeof(Element)>(to, from, there, active);
    else if (active)
        *to = there ? *from : Element{};    // asynchronous copies are of four bytes or more
}

// Windows of 1 x 4 x 4 elements, 1 x 1 x 1 apart, one per tap; a cell moves them by MOVE.
constexpr int BOX_C = 8;
constexpr int BOX_TAPS_D = 1, BOX_TAPS_H = 3, BOX_TAPS_W = 3;
constexpr int BOX_TAPS = BOX_TAPS_D * BOX_TAPS_H * BOX_TAPS_W;
constexpr int MOVE_D = 1, MOVE_H = 4, MOVE_W = 4;
constexpr int SPAN_D = 1, SPAN_H = 6, SPAN_W = 6;    // elements that the windows of one cell cover

// One row of x under a cell, in vectors of up to VECTOR elements.
template <int VECTOR>
__device__ __forceinline__ void load_row(Compute (&v)[SPAN_W], const Element* from) {
    int i = 0;
    if constexpr (VECTOR % 4 == 0 && sizeof(Element) == 4) {
#pragma unroll
        for (; i + 4 <= SPAN_W; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
    }
    if constexpr (VECTOR % 2 == 0 && sizeof(Element) == 4) {
#pragma unroll
        for (; i + 2 <= SPAN_W; i += 2) {
            const float2 two = *reinterpret_cast<const float2*>(from + i);
            v[i] = two.x, v[i + 1] = two.y;
        }
    }
#pragma unroll
    for (; i < SPAN_W; ++i) v[i] = widened(from[i]);
}

// The window sums of one row of x along w, one per tap.
__device__ __forceinline__ void sum_loaded(Compute (&sums)[BOX_TAPS_W], const Compute (&v)[SPAN_W]) {
    const Compute s0 = v[2] + v[3];
    const Compute s1 = v[1] + s0;
    sums[0] = v[0] + s1;
    sums[1] = s1 + v[4];
    sums[2] = s0 + v[4] + v[5];
}

template <int VECTOR>
__device__ __forceinline__ void sum_row(Compute (&sums)[BOX_TAPS_W], const Element* from) {
    Compute v[SPAN_W];
    load_row<VECTOR>(v, from);
    sum_loaded(sums, v);
}

// The sums of all windows of one cell, from those of its rows.
__device__ __forceinline__ void sum_cell(Compute (&sums)[BOX_TAPS], const Compute (&rows)[SPAN_D][SPAN_H][BOX_TAPS_W]) {
#pragma unroll
    for (int tw = 0; tw < BOX_TAPS_W; ++tw) {
        const Compute s0 = rows[0][2][tw] + rows[0][3][tw];
        const Compute s1 = rows[0][1][tw] + s0;
        sums[0 * BOX_TAPS_W + tw] = rows[0][0][tw] + s1;
        sums[1 * BOX_TAPS_W + tw] = s1 + rows[0][4][tw];
        sums[2 * BOX_TAPS_W + tw] = s0 + rows[0][4][tw] + rows[0][5][tw];
    }
}

// Of the rows under a cell, keep those that the next cell along h reads as well.
template <int SHARED>
__device__ __forceinline__ void keep_rows(Compute (&rows)[SPAN_D][SPAN_H][BOX_TAPS_W]) {
#pragma unroll
    for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
        for (int rh = 0; rh < SHARED; ++rh)
#pragma unroll
            for (int tw = 0; tw < BOX_TAPS_W; ++tw) rows[rd][rh][tw] = rows[rd][rh + MOVE_H][tw];
}
constexpr int STRIP = 1, SHARED = 0;    // cells of a strip along h; rows that two of them share

// A thread goes down a strip of cells and keeps the sums of rows that the next cell reads as well.
template <int VECTOR>
__device__ __forceinline__ void sum_windows(const Element* x, Element* tile, int cell_d, int cell_h, int cell_w,
                                            int D, int H, int W) {
    constexpr int STRIPS = CELLS_H / STRIP;
    for (int i = threadIdx.x; i < BOX_C * CELLS_D * STRIPS * CELLS_W; i += THREADS) {
        const int w = i % CELLS_W, first = i / CELLS_W % STRIPS * STRIP, d = i / (CELLS_W * STRIPS) % CELLS_D;
        const int c = i / (CELLS_W * STRIPS * CELLS_D);
        const int x_d = (cell_d + d) * MOVE_D, x_w = (cell_w + w) * MOVE_W;
        Compute rows[SPAN_D][SPAN_H][BOX_TAPS_W];
#pragma unroll 1
        for (int h = first; h < first + STRIP; ++h) {
            const int x_h = (cell_h + h) * MOVE_H;
            Compute sums[BOX_TAPS] = {};
            if (x_d + SPAN_D <= D && x_h + SPAN_H <= H && x_w + SPAN_W <= W) {
                const Element* const from = x + ((c * D + x_d) * H + x_h) * W + x_w;
#pragma unroll
                for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
                    for (int rh = 0; rh < SPAN_H; ++rh)
                        if (rh >= SHARED || h == first) sum_row<VECTOR>(rows[rd][rh], from + (rd * H + rh) * W);
                sum_cell(sums, rows);
                keep_rows<SHARED>(rows);
            }
            Element* to = tile + c * BOX_TAPS * X_CHANNEL + (d * CELLS_H + h) * CELLS_W + w;
#pragma unroll
            for (int tap = 0; tap < BOX_TAPS; ++tap) to[tap * X_CHANNEL] = __uint_as_float(round_tf32(sums[tap]));
        }
    }
}

// Write the window sums that the cells of a block read, zeros for cells beyond the last.
__device__ __forceinline__ int stage_input(const Element* x, Element* tile, int, int cell_d, int cell_h,
                                           int cell_w, int D, int H, int W) {
    const int misaligned = reinterpret_cast<unsigned long long>(x) % 16;
    if (MOVE_W % 4 == 0 && W % 4 == 0 && misaligned == 0)
        sum_windows<4>(x, tile, cell_d, cell_h, cell_w, D, H, W);
    else if (MOVE_W % 2 == 0 && W % 2 == 0 && misaligned % 8 == 0)
        sum_windows<2>(x, tile, cell_d, cell_h, cell_w, D, H, W);
    else
        sum_windows<1>(x, tile, cell_d, cell_h, cell_w, D, H, W);
    return 0;
}

// Round weights that stay to tf32, once for all their uses.
__device__ __forceinline__ void round_staged(Element* tile, int count) {
    for (int i = 4 * threadIdx.x; i < count; i += 4 * THREADS) {
        float4 four = *reinterpret_cast<float4*>(tile + i);
        four.x = __uint_as_float(round_tf32(four.x)), four.y = __uint_as_float(round_tf32(four.y));
        four.z = __uint_as_float(round_tf32(four.z)), four.w = __uint_as_float(round_tf32(four.w));
        *reinterpret_cast<float4*>(tile + i) = four;
    }
}

// Start copying the weights of a block's features, zeros where there are none.  A thread keeps its place in a feature's
// run of channels and taps, which is one in memory too, and goes through the features.
template <int VECTOR>
__device__ __forceinline__ void stage_runs(const Element* w, Element* tile, int group, int first_feature) {
    using P = Phase<1, 1, 1>;
    constexpr int RUN = P::RUN / VECTOR, SIDE_BY_SIDE = RUN < THREADS ? THREADS / RUN : 1;
    for (int i = threadIdx.x; i < RUN * SIDE_BY_SIDE; i += THREADS) {
        const int at = i % RUN * VECTOR;
#pragma unroll 4
        for (int feature = i / RUN; feature < BLOCK_M; feature += SIDE_BY_SIDE) {
            const bool there = first_feature + feature < O;
            const Element* from = w + (group * O + first_feature + feature) * C * P::TAPS + at;
            copy_vector<VECTOR>(tile + feature * P::FEATURE + at, there ? from : w, there);
        }
    }
}
__device__ __forceinline__ void stage_weights(const Element* w, Element* tile, int group, int first_feature) {
    if (reinterpret_cast<unsigned long long>(w) % 16 == 0)
        stage_runs<4>(w, tile, group, first_feature);
    else
        stage_runs<1>(w, tile, group, first_feature);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
fused_test(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, double* __restrict__ partial,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);
    Element* const w_tile = x_tile + 2880;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H, warp_m = warp / (WARPS_W * WARPS_H);
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * GROUPS + group) * 8 * D * H * W;
    const Element* const x_warp = x_tile + warp_h * OWN_H * ADVANCE_H + 4 * warp_w * OWN_W * ADVANCE_W;
    const int feature_row = 16 * warp_m * M_TILES + row;    // the first of this lane's features
    const int tiles_h = ceil_div(cells_h, CELLS_H), tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = ceil_div(cells_d, CELLS_D) * tiles_h * tiles_w;

    // Per-channel numbers of this lane's rows.
    Compute bias_at[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;
            bias_at[m][half] = widened(bias[group * O + feature]);
        }
    const auto before = [&](Compute value, int m, int half) {
        const Compute shifted = value * Compute(0.0625) + bias_at[m][half];
        const float v1 = sigmoid(shifted);
        return v1;
    };
    double total = Compute(0);
    stage_weights(w, w_tile, group, first_feature);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    round_staged(w_tile, 6400);

    for (int tile = part; tile < tiles; tile += parts) {
        const int cell_d = tile / (tiles_w * tiles_h) * CELLS_D, cell_h = tile / tiles_w % tiles_h * CELLS_H;
        const int cell_w = tile % tiles_w * CELLS_W;
        Compute of_tile = Compute(0);
        __syncthreads();    // until the last tile has been read
        const int shift = stage_input(x_sample, x_tile, 0, cell_d, cell_h, cell_w, D, H, W);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        {
            Accumulators acc = {};
            accumulate<1, 1, 1, 1, 1>(acc, x_warp + shift, w_tile, feature_row);
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        const int own_w = s;    // the cell, and below its position
                        const int p = cell_d + rd / ROWS_D;
                        const int q = cell_h + warp_h * OWN_H + rh / ROWS_H;
                        const int r = cell_w + 4 * warp_w * OWN_W + own_w / 2 * 8 + 2 * quad + own_w % 2;
                        const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R);
                        Compute over = Compute(0);
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                over = over + before(acc[rd][rh][s / 2][m][2 * half + s % 2], m, half);
                        of_tile = of_tile + chosen(inside, over, Compute(0));
                    }
        }
        total = total + of_tile;
    }

    // Over the lanes, then over the warps, in a fixed order.
    __syncthreads();
    double* const across = reinterpret_cast<double*>(shared_memory);
    double value = total;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) value = value + __shfl_xor_sync(0xffffffffu, value, distance);
    if (lane == 0) across[warp] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int other = 1; other < THREADS / 32; ++other) value = value + across[other];
        partial[((long long)sample * parts + part) * gridDim.z + blockIdx.z] = value;
    }
}

// Fold the partial results of the blocks, in their order: out[i] over partial[i / rows][split][i % rows].
extern "C" __global__ void __launch_bounds__(128) fused_test_finish(const double* __restrict__ partial,
    float* __restrict__ out, long long results, int splits, int rows, long long count) {
    await_launches();
    const long long i = (long long)blockIdx.x * 128 + threadIdx.x;
    if (i >= results) return;
    const double* from = partial + i / rows * splits * rows + i % rows;
    double value = from[0];
    for (int split = 1; split < splits; ++split) value = value + from[(long long)split * rows];
    out[i] = narrow_to<float>::of(float(value));
}
