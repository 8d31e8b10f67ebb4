// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
__device__ __forceinline__ void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// d += a * b for one 16x8x16 tile: a is 16x16 row-major, b is 16x8 column-major, two neighbouring k to a register, the
// lower k in its low half; d in float32.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A product between 0 and 1; 0 where it is NaN.
__device__ __forceinline__ float saturated_product(float a, float b) {
    float c;
    asm("mul.sat.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
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

using Element = bf16;    // of tensors in memory
using Compute = float;    // of everything else

constexpr int C = 320, O = 1280, GROUPS = 1;    // channels of a group, in and out
constexpr int TAPS = 1;    // of one channel's kernel

// A warp owns 16 * M_TILES channels of OWN_D x OWN_H x 4 * OWN_W cells, ROWS_D x ROWS_H rows of a cell at a time.
constexpr int M_TILES = 2, OWN_D = 1, OWN_H = 2, OWN_W = 2;
constexpr int ROWS_D = 1, ROWS_H = 1, TILES_W = 1;
constexpr int WARPS_M = 2, WARPS_H = 1, WARPS_W = 4, THREADS = 256;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = 20;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int CHUNK = 64, CHUNKS = 5;    // input channels staged at a time
constexpr bool TOGETHER_D = false, TOGETHER_H = false;    // whether all taps along d, h are at hand at once

// Shared memory: the input as [d][h][w][channel], columns padded over the banks.
constexpr int X_D = 1, X_H = 2, X_W = 32, X_COLUMN = 72, X_CHANNEL = 1;
// Steps in the staged input from cell to cell, from position to position and from tap to tap.
constexpr int ADVANCE_D = 4608, ADVANCE_H = 2304, ADVANCE_W = 72;
constexpr int ELEMENT_D = 4608, ELEMENT_H = 2304, ELEMENT_W = 72;
constexpr int TAP_D = 0, TAP_H = 0, TAP_W = 0;

// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }

using Operand = unsigned;    // two neighbouring channels
using Accumulators = float[OWN_D * ROWS_D][OWN_H * ROWS_H][TILES_W][M_TILES][4];

// The element at hand and the one STEP behind it; side by side they are at a multiple of four bytes.
template <int STEP>
__device__ __forceinline__ Operand pair(const Element* at) {
    if constexpr (STEP == 1)
        return *reinterpret_cast<const unsigned*>(at);
    else
        return at[0].bits | unsigned(at[STEP].bits) << 16;
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const Operand (&a)[4], const Operand (&b)[2]) {
    mma_bf16(d, a, b);
}

// The k indices of one row of taps run over taps along w, then channels; a lane supplies two pairs of every sixteen.
template <int TAPS_W>
struct Lane {
    static constexpr int K = CHUNK * TAPS_W, STEPS = (K + 15) / 16;
    static __device__ __forceinline__ int k(int step, int half) { return 16 * step + 8 * half + threadIdx.x % 4 * 2; }
    static __device__ __forceinline__ bool inside(int k) { return K % 16 == 0 || k < K; }
    static __device__ __forceinline__ int x(int k) { return k % CHUNK * X_CHANNEL + k / CHUNK * TAP_W; }
};

// A phase's weights in shared memory: [feature][d][h][w][channel], features spread over the banks.
template <int TAPS_D, int TAPS_H, int TAPS_W>
struct Phase {
    static constexpr int TAPS = TAPS_D * TAPS_H * TAPS_W, RUN = CHUNK * TAPS, BANKS = 128 / sizeof(Element);
    static constexpr int CHANNEL = 1, TAP = CHUNK;    // steps from channel to channel and from tap to tap
    static constexpr int FEATURE = RUN + ((BANKS / 8 - RUN) % BANKS + BANKS) % BANKS;
    static __device__ __forceinline__ int at(int k) { return k % CHUNK * CHANNEL + k / CHUNK * TAP; }
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
                                a[td][th][m][i] = L::inside(k[i / 2]) ? pair<P::CHANNEL>(w_k[i / 2] + at) : 0;
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
                            for (int i = 0; i < 2; ++i) b[i] = L::inside(k[i]) ? pair<1>(x_k[i] + at) : 0;
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

// Start copying the input that a block's cells read, zeros outside.  A thread keeps its channels, as many as an aligned
// copy takes, and goes through the positions.
__device__ __forceinline__ void stage_input(const Element* x, Element* tile, int chunk, int cell_d, int cell_h,
                                            int cell_w, int D, int H, int W) {
    constexpr int VECTOR = 8, ROW = CHUNK / VECTOR, SIDE_BY_SIDE = ROW < THREADS ? THREADS / ROW : 1;
    const int low_d = cell_d * 1 + 0, low_h = cell_h * 1 + 0;
    const int low_w = cell_w * 1 + 0;
    for (int i = threadIdx.x; i < ROW * SIDE_BY_SIDE; i += THREADS) {
        const int c = i % ROW * VECTOR;
        const bool channel = C % CHUNK == 0 || chunk * CHUNK + c < C;
#pragma unroll 4
        for (int at = i / ROW; at < X_D * X_H * X_W; at += SIDE_BY_SIDE) {
            const int x_d = low_d + at / (X_H * X_W), x_h = low_h + at / X_W % X_H, x_w = low_w + at % X_W;
            const bool row = unsigned(x_d) < unsigned(D) && unsigned(x_h) < unsigned(H);
            const bool there = channel && row && unsigned(x_w) < unsigned(W);
            const int from = ((x_d * H + x_h) * W + x_w) * (GROUPS * C) + chunk * CHUNK + c;
            copy_vector<VECTOR>(tile + at * X_COLUMN + c, x + (there ? from : 0), there);
        }
    }
}

// Steps in memory between neighbouring taps of a phase.
constexpr int NEXT_D = 0, NEXT_H = 0, NEXT_W = 0;

// The weights of one phase, block and chunk as they are to lie in shared memory, zeros where there are none.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, Element* packed, int group, int first_feature, int chunk,
                                           int first) {
    using P = Phase<TAPS_D, TAPS_H, TAPS_W>;
    for (int i = blockIdx.z * 256 + threadIdx.x; i < BLOCK_M * P::FEATURE; i += gridDim.z * 256) {
        const int feature = first_feature + i / P::FEATURE, k = i % P::FEATURE;
        const int channel = chunk * CHUNK + k % CHUNK, tap = k / CHUNK;
        const int of_w = tap / (TAPS_H * TAPS_W) * NEXT_D + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W;
        const bool there = k < P::RUN && feature < O && channel < C;
        const Element value = there ? w[((group * O + feature) * C + channel) * TAPS + first + of_w] : Element{};
        packed[i] = value;
    }
}
extern "C" __global__ void fused_test_pack(const Element* __restrict__ w, Element* __restrict__ packed) {
    await_launches();
    const int chunk = blockIdx.x, group = blockIdx.y / M_BLOCKS, first_feature = blockIdx.y % M_BLOCKS * BLOCK_M;
    packed += (long long)(blockIdx.y * CHUNKS + chunk) * 4608;
    pack_phase<1, 1, 1>(w, packed, group, first_feature, chunk, 0);
}

// Start copying COUNT packed weights.
template <int COUNT>
__device__ __forceinline__ void stage_packed(const Element* from, Element* to) {
    constexpr int VECTOR = 16 / sizeof(Element), STEP = VECTOR * THREADS;
    const int own = VECTOR * threadIdx.x;
#pragma unroll 4
    for (int i = 0; i < COUNT; i += STEP)
        copy_async<16>(to + own + i, from + own + i, true, COUNT % STEP == 0 || i + own < COUNT);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
fused_test(const bf16* __restrict__ x, const bf16* __restrict__ packed, const bf16* __restrict__ bias, double* __restrict__ partial,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);
    Element* const w_tile = x_tile + 4608;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H, warp_m = warp / (WARPS_W * WARPS_H);
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * D * H * W * GROUPS + group) * C;
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
        const Compute shifted = value + bias_at[m][half];
        const float v1 = shifted * saturated_product(shifted + 3, 0.16666667f);
        return v1;
    };
    double total[M_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) total[i / 2][i % 2] = Compute(0);
    const Element* const packed_block = packed + (long long)blockIdx.z * 23040;

    for (int tile = part; tile < tiles; tile += parts) {
        const int cell_d = tile / (tiles_w * tiles_h) * CELLS_D, cell_h = tile / tiles_w % tiles_h * CELLS_H;
        const int cell_w = tile % tiles_w * CELLS_W;
        Compute of_tile[M_TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; ++i) of_tile[i / 2][i % 2] = Compute(0);
        {
            Accumulators acc = {};
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                __syncthreads();    // until the last chunk has been read
                stage_input(x_sample, x_tile, chunk, cell_d, cell_h, cell_w, D, H, W);
                stage_packed<4608>(packed_block + chunk * 4608, w_tile);
                copy_async_commit();
                copy_async_wait<0>();
                __syncthreads();
                accumulate<1, 1, 1, 1, 1>(acc, x_warp, w_tile, feature_row);
            }
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
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                of_tile[m][half] = of_tile[m][half] + chosen(inside, before(acc[rd][rh][s / 2][m][2 * half + s % 2], m, half), Compute(0));
                    }
        }
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; ++i) total[i / 2][i % 2] = total[i / 2][i % 2] + of_tile[i / 2][i % 2];
    }

    // Over the four lanes that share channels, then over the warps that do, in a fixed order.
    __syncthreads();
    double(*const across)[BLOCK_M] = reinterpret_cast<double(*)[BLOCK_M]>(shared_memory);
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            double value = total[m][half];
#pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2) value = value + __shfl_xor_sync(0xffffffffu, value, distance);
            if (quad == 0) across[warp_h * WARPS_W + warp_w][16 * (warp_m * M_TILES + m) + 8 * half + row] = value;
        }
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK_M && first_feature + i < O; i += THREADS) {
        double value = across[0][i];
        for (int other = 1; other < WARPS_H * WARPS_W; ++other) value = value + across[other][i];
        partial[((long long)sample * parts + part) * (GROUPS * O) + group * O + first_feature + i] = value;
    }
}

// Fold the partial results of the blocks, in their order: out[i] over partial[i / rows][split][i % rows].
extern "C" __global__ void __launch_bounds__(128) fused_test_finish(const double* __restrict__ partial,
    bf16* __restrict__ out, long long results, int splits, int rows, long long count) {
    await_launches();
    const long long i = (long long)blockIdx.x * 128 + threadIdx.x;
    if (i >= results) return;
    const double* from = partial + i / rows * splits * rows + i % rows;
    double value = from[0];
    for (int split = 1; split < splits; ++split) value = value + from[(long long)split * rows];
    out[i] = narrow_to<bf16>::of(float(value / count));
}
