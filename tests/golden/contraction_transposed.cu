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

// A number of which the compiler knows nothing, so that what follows from it is not kept in registers between uses.
__device__ __forceinline__ unsigned forgotten(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}
// A pointer to global memory from which others are one instruction away: the compiler would find each of them from the
// kernel's argument.
template <class T> __device__ __forceinline__ T* forgotten(T* x) {
    asm("" : "+l"(x));
    __builtin_assume(__isGlobal(x));
    return x;
}

using Element = float;    // of tensors in memory
using Compute = float;    // of everything else

constexpr int C = 16, O = 24, GROUPS = 1;    // channels of a group, in and out
constexpr int TAPS = 9;    // of one channel's kernel

// A warp owns 16 * M_TILES channels of OWN_D x OWN_H x 4 * OWN_W cells, ROWS_D x ROWS_H rows of a cell at a time.
constexpr int M_TILES = 2, OWN_D = 1, OWN_H = 4, OWN_W = 4;
constexpr int ROWS_D = 1, ROWS_H = 1, TILES_W = 2;
constexpr int WARPS_M = 1, WARPS_H = 2, WARPS_W = 2, THREADS = 128;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = 1;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int CHUNK = 16, CHUNKS = 1;    // input channels staged at a time
constexpr bool TOGETHER_D = false, TOGETHER_H = true;    // whether all taps along d, h are at hand at once

// Shared memory: the input as [channel][d][h][w].
constexpr int X_D = 1, X_H = 9, X_W = 36, X_CHANNEL = 328;
// Steps in the staged input from cell to cell, from position to position and from tap to tap.
constexpr int ADVANCE_D = 324, ADVANCE_H = 36, ADVANCE_W = 1;
constexpr int ELEMENT_D = 324, ELEMENT_H = 36, ELEMENT_W = 1;
constexpr int TAP_D = 0, TAP_H = -36, TAP_W = -1;

// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }

using Operand = unsigned;    // a float32 rounded to tf32
using Accumulators = float[OWN_D * ROWS_D][OWN_H * ROWS_H][TILES_W][M_TILES][4];

__device__ __forceinline__ Operand input_operand(Element x) { return round_tf32(x); }
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

// Start copying rows of COLUMNS elements, VECTOR at a time and zeros outside, LANES threads to a row.  SETS rows are
// under way at a time, in SLICES channels each.  Nothing is read outside, so addresses may run over the ends of x.
template <int VECTOR, int COLUMNS, int LANES, int SLICES, int UNROLL>
__device__ __forceinline__ void stage_rows(const Element* x, Element* tile, int channels, int low_d, int low_h,
                                           int low_w, int D, int H, int W) {
    constexpr int SETS = THREADS / LANES / SLICES, TURNS = ceil_div(CHUNK, SLICES);
    constexpr int STEP = VECTOR * LANES, BYTES = VECTOR * sizeof(Element);
    const int thread = threadIdx.x;
    const int group = thread / LANES, set = group % SETS, first = SLICES == 1 ? 0 : group / SETS;
    const int column = thread % LANES * VECTOR, w = low_w + column;
    if (SETS * SLICES * LANES < THREADS && first >= SLICES) return;
    const long long plane = (long long)D * H * W;
    int d = set / X_H, h = set % X_H;
#pragma unroll 1
    for (int row = set; row < X_D * X_H; row += SETS) {
        const int x_d = low_d + d, x_h = low_h + h;
        const bool inside = unsigned(x_d) < unsigned(D) && unsigned(x_h) < unsigned(H);
        const Element* from = x + first * plane + ((x_d * H + x_h) * W + w);
        Element* to = tile + first * X_CHANNEL + row * X_W + column;
#pragma unroll UNROLL
        for (int i = 0; i < TURNS; ++i, from += SLICES * plane, to += SLICES * X_CHANNEL) {
            const int c = i * SLICES + first;
            const bool own = CHUNK % SLICES == 0 || i + 1 < TURNS || c < CHUNK;
            const bool there = inside && own && (C % CHUNK == 0 || c < channels);
#pragma unroll
            for (int k = 0; k < COLUMNS; k += STEP) {
                const bool active = COLUMNS % STEP == 0 || k + column < COLUMNS;
                if constexpr (BYTES >= 4) {
                    copy_async<BYTES>(to + k, from + k, there && unsigned(w + k) < unsigned(W), active && own);
                } else {    // lanes past the end repeat the last element: without branches, loads wait together
                    const int at = active ? k : COLUMNS - 1 - column;
                    const bool read = there && unsigned(w + at) < unsigned(W);
                    const Element element = *(read ? from + at : x);
                    if (own) to[at] = read ? element : Element{};
                }
            }
        }
        d += SETS / X_H, h += SETS % X_H;    // row / X_H and row % X_H
        if (X_D > 1 && h >= X_H) h -= X_H, ++d;
    }
}

// Start copying the input that a block's cells read, in vectors as large as the rows of x allow.  Returns how far the
// tile is shifted: its rows start at the boundary of such a vector.
__device__ __forceinline__ int stage_input(const Element* x, Element* tile, int chunk, int cell_d, int cell_h,
                                           int cell_w, int D, int H, int W) {
    constexpr int VECTOR = 16 / sizeof(Element);
    const int low_d = cell_d * 1 + 0, low_h = cell_h * 1 + 0;
    const int needed = cell_w * 1 + 0, misaligned = reinterpret_cast<unsigned long long>(x) % 16;
    const bool whole = W % VECTOR == 0 && misaligned == 0;
    const bool pairs = W % 2 == 0 && misaligned % (2 * sizeof(Element)) == 0;
    const int low_w = needed & -(whole ? VECTOR : pairs ? 2 : 1), channels = C - chunk * CHUNK;
    const Element* const from = x + (long long)(chunk * CHUNK) * (D * H * W);
    if (whole)
        stage_rows<4, 36, 4, 3, 5>(from, tile, channels, low_d, low_h, low_w, D, H, W);
    else if (pairs)
        stage_rows<2, 34, 8, 3, 5>(from, tile, channels, low_d, low_h, low_w, D, H, W);
    else
        stage_rows<1, 33, 16, 4, 4>(from, tile, channels, low_d, low_h, low_w, D, H, W);
    return needed - low_w;
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

// Steps in memory between neighbouring taps of a phase.
constexpr int NEXT_D = 0, NEXT_H = 6, NEXT_W = 2;

// Start copying the weights of one phase: every NEXT-th tap from `first` on.  A thread keeps its feature and tap and
// goes through the channels.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void stage_phase(const Element* w, Element* tile, int group, int first_feature, int first) {
    using P = Phase<TAPS_D, TAPS_H, TAPS_W>;
    for (int i = threadIdx.x; i < BLOCK_M * P::TAPS; i += THREADS) {
        const int tap = i % P::TAPS, feature = i / P::TAPS;
        const int of_w = tap / (TAPS_H * TAPS_W) * NEXT_D + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W;
#pragma unroll 4
        for (int c = 0; c < C; ++c) {
            const bool there = first_feature + feature < O;
            const int row = (group * C + c) * O + first_feature + feature;
            const Element* from = there ? w + row * TAPS + first + of_w : w;
            copy_vector<1>(tile + feature * P::FEATURE + c * P::TAPS + tap, from, there);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
fused_test(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, Element* __restrict__ out,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);
    Element* const w_tile = x_tile + 5248;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H, warp_m = warp / (WARPS_W * WARPS_H);
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * GROUPS + group) * 16 * D * H * W;
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
            bias_at[m][half] = feature < O ? widened(bias[group * O + feature]) : Compute(0);
        }
    const auto before = [&](Compute value, int m, int half) {
        const Compute shifted = value + bias_at[m][half];
        const float v1 = shifted < float(0.0) ? float(0.0) : shifted;
        return v1;
    };
    stage_phase<1, 1, 1>(w, w_tile, group, first_feature, 4);
    stage_phase<1, 1, 2>(w, w_tile + 1152, group, first_feature, 3);
    stage_phase<1, 2, 1>(w, w_tile + 2304, group, first_feature, 1);
    stage_phase<1, 2, 2>(w, w_tile + 3456, group, first_feature, 0);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    round_staged(w_tile, 5632);

    for (int tile = part; tile < tiles; tile += parts) {
        const int cell_d = tile / (tiles_w * tiles_h) * CELLS_D, cell_h = tile / tiles_w % tiles_h * CELLS_H;
        const int cell_w = tile % tiles_w * CELLS_W;
        __syncthreads();    // until the last tile has been read
        const int shift = stage_input(x_sample, x_tile, 0, cell_d, cell_h, cell_w, D, H, W);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        {
            Accumulators acc = {};
            accumulate<2, 1, 1, 1, 1>(acc, x_warp + shift, w_tile, feature_row);
            const long long plane = (long long)P * Q * forgotten(R);    // from feature to feature
            Element* const out_row = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature + 16 * warp_m * M_TILES + row) * plane);
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const int own_w = s;    // the cell, and below its position
                        const int p = cell_d + rd / ROWS_D;
                        const int q = (cell_h + warp_h * OWN_H + rh / ROWS_H) * 2;
                        const int r = (cell_w + 4 * warp_w * OWN_W + own_w / 2 * 8 + 2 * quad + own_w % 2) * 2;
                        const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R);
                        Element* const to = forgotten(out_row + unsigned((p * Q + q) * R + r));
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;
                                const Element result = narrow_to<Element>::of(before(acc[rd][rh][s / 2][m][2 * half + s % 2], m, half));
                                if (inside && feature < O) to[(16 * m + 8 * half) * plane] = result;
                            }
                    }
        }
        {
            Accumulators acc = {};
            accumulate<2, 1, 1, 2, 1>(acc, x_warp + shift + 1, w_tile + 1152, feature_row);
            const long long plane = (long long)P * Q * forgotten(R);    // from feature to feature
            Element* const out_row = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature + 16 * warp_m * M_TILES + row) * plane);
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const int own_w = s;    // the cell, and below its position
                        const int p = cell_d + rd / ROWS_D;
                        const int q = (cell_h + warp_h * OWN_H + rh / ROWS_H) * 2;
                        const int r = (cell_w + 4 * warp_w * OWN_W + own_w / 2 * 8 + 2 * quad + own_w % 2) * 2 + 1;
                        const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R);
                        Element* const to = forgotten(out_row + unsigned((p * Q + q) * R + r));
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;
                                const Element result = narrow_to<Element>::of(before(acc[rd][rh][s / 2][m][2 * half + s % 2], m, half));
                                if (inside && feature < O) to[(16 * m + 8 * half) * plane] = result;
                            }
                    }
        }
        {
            Accumulators acc = {};
            accumulate<2, 1, 2, 1, 1>(acc, x_warp + shift + 36, w_tile + 2304, feature_row);
            const long long plane = (long long)P * Q * forgotten(R);    // from feature to feature
            Element* const out_row = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature + 16 * warp_m * M_TILES + row) * plane);
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const int own_w = s;    // the cell, and below its position
                        const int p = cell_d + rd / ROWS_D;
                        const int q = (cell_h + warp_h * OWN_H + rh / ROWS_H) * 2 + 1;
                        const int r = (cell_w + 4 * warp_w * OWN_W + own_w / 2 * 8 + 2 * quad + own_w % 2) * 2;
                        const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R);
                        Element* const to = forgotten(out_row + unsigned((p * Q + q) * R + r));
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;
                                const Element result = narrow_to<Element>::of(before(acc[rd][rh][s / 2][m][2 * half + s % 2], m, half));
                                if (inside && feature < O) to[(16 * m + 8 * half) * plane] = result;
                            }
                    }
        }
        {
            Accumulators acc = {};
            accumulate<2, 1, 2, 2, 1>(acc, x_warp + shift + 37, w_tile + 3456, feature_row);
            const long long plane = (long long)P * Q * forgotten(R);    // from feature to feature
            Element* const out_row = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature + 16 * warp_m * M_TILES + row) * plane);
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
                        const int own_w = s;    // the cell, and below its position
                        const int p = cell_d + rd / ROWS_D;
                        const int q = (cell_h + warp_h * OWN_H + rh / ROWS_H) * 2 + 1;
                        const int r = (cell_w + 4 * warp_w * OWN_W + own_w / 2 * 8 + 2 * quad + own_w % 2) * 2 + 1;
                        const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R);
                        Element* const to = forgotten(out_row + unsigned((p * Q + q) * R + r));
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;
                                const Element result = narrow_to<Element>::of(before(acc[rd][rh][s / 2][m][2 * half + s % 2], m, half));
                                if (inside && feature < O) to[(16 * m + 8 * half) * plane] = result;
                            }
                    }
        }
    }
}
