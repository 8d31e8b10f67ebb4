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

// Whatever the compiler knows of a number or pointer, it is in its register from here on.
__device__ __forceinline__ void at_hand(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void at_hand(unsigned& x) { asm volatile("" : "+r"(x)); }
template <class T> __device__ __forceinline__ void at_hand(const T*& x) { asm volatile("" : "+l"(x)); }

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

constexpr int C = 8, O = 64, GROUPS = 1;    // channels of a group, in and out
constexpr int TAPS = 9;    // of one channel's kernel

// A warp owns 16 * M_TILES channels of OWN_D x OWN_H x 4 * OWN_W cells, ROWS_D x ROWS_H rows of a cell at a time.
constexpr int M_TILES = 4, OWN_D = 1, OWN_H = 2, OWN_W = 4;
constexpr int ROWS_D = 1, ROWS_H = 1, TILES_W = 2;
constexpr int WARPS_M = 1, WARPS_H = 4, WARPS_W = 1, THREADS = 128;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = 1;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Shared memory: for each warp the rows that its cells read, of STEP channels at a time, as [channel][d][h][w].
constexpr int STEP = 8, STEPS = (C + STEP - 1) / STEP, ROWS_X = 10, WIDTH = 68, CHANNEL = 680;

using Operand = unsigned;    // a float32 rounded to tf32
using Accumulators = float[OWN_D * ROWS_D][OWN_H * ROWS_H][TILES_W][M_TILES][4];

__device__ __forceinline__ Operand input_operand(Compute x) { return round_tf32(x); }
__device__ __forceinline__ Operand weight_operand(Element w) { return __float_as_uint(w); }
__device__ __forceinline__ void multiply_add(float (&d)[4], const Operand (&a)[4], const Operand (&b)[2]) {
    mma_tf32(d, a, b);
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

struct alignas(sizeof(Element) == 2 ? 8 : 16) Four { Element at[4]; };    // a lane's part of 16 features and 8 channels

// Write a block's weights as operands: [eight channels][tap][16 features][lane], zeros where there are none.
__device__ __forceinline__ void stage_weights(const Element* w, Element* tile, int group, int first_feature) {
    for (int i = threadIdx.x; i < STEPS * BOX_TAPS * BLOCK_M * 8; i += THREADS) {
        const int part = i % 4, lane = i / 4 % 32, m = i / 128 % (BLOCK_M / 16), at = i / (8 * BLOCK_M);
        const int feature = first_feature + 16 * m + 8 * (part % 2) + lane / 4;
        const int channel = at / BOX_TAPS * 8 + 4 * (part / 2) + lane % 4, tap = at % BOX_TAPS;
        const bool there = feature < O && channel < C;
        const Element value = there ? w[((group * O + feature) * C + channel) * BOX_TAPS + tap] : Element{};
        tile[i] = __uint_as_float(round_tf32(value));
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

// The first cell of a tile.
struct Cell { int d, h, w; };

// Where a warp's rows begin: channel, and position in x.
struct Corner { int channel, d, h, w; };

// Lanes side by side that copy a row of so many vectors: a line of 128 bytes at most.
__device__ __forceinline__ constexpr int lanes_of_row(int columns, int bytes) {
    int lanes = 1;
    while (lanes < columns && lanes < 32 && lanes * bytes < 128) lanes *= 2;
    return lanes;
}

// Start copying some vectors of the rows of a step's channels, zeros outside, where nothing is read: so addresses may
// run over the ends of x.  INSIDE checks nothing.  A lane has every LANES-th of a row, and goes on from row to row.
template <int VECTOR, bool INSIDE, int BEGIN, int COLUMNS>
__device__ __forceinline__ void copy_columns(const Element* from, Element* to, Corner corner, int D, int H, int W) {
    constexpr int LANES = lanes_of_row(COLUMNS, VECTOR * sizeof(Element));
    constexpr int CHANNELS = LANES * STEP < 32 ? STEP : 32 / LANES, AT_ONCE = 32 / (LANES * CHANNELS);
    constexpr int TURNS = ceil_div(ROWS_X, AT_ONCE), PARTS = INSIDE ? 1 : ceil_div(TURNS, 8);
    const int lane = threadIdx.x % 32, first = BEGIN + lane % LANES, own = lane / LANES % CHANNELS;
    const int row = lane / (LANES * CHANNELS);
    from += (own * D * H + row) * W + first * VECTOR;
    to += own * CHANNEL + row * WIDTH + first * VECTOR;
#pragma unroll 1
    for (int c = 0; c < STEP; c += CHANNELS, from += CHANNELS * D * H * W) {
        at_hand(from);    // or the compiler keeps addresses of all channels
        const bool channel = C % STEP == 0 || corner.channel + own + c < C;
#pragma unroll 1
        for (int d = 0; d < SPAN_D; ++d) {
            const bool plane = channel && unsigned(corner.d + d) < unsigned(D);
            Element* const place = to + c * CHANNEL + d * ROWS_X * WIDTH;
#pragma unroll(ceil_div(TURNS, PARTS))
            for (int h = 0; h < ROWS_X; h += AT_ONCE) {
                const Element* of_row = from + (d * H + h) * W;
                if constexpr (COLUMNS > LANES) at_hand(of_row);    // so that its columns are offsets of it
                const bool some = ROWS_X % AT_ONCE == 0 || row + h < ROWS_X;
                const bool there = plane && unsigned(corner.h + row + h) < unsigned(H);
#pragma unroll
                for (int at = 0; at < COLUMNS; at += LANES) {
                    const bool whole = INSIDE || (there && unsigned(corner.w + (at + first) * VECTOR) < unsigned(W));
                    const bool active = some && (at + LANES <= COLUMNS || at + first < BEGIN + COLUMNS);
                    copy_vector<VECTOR>(place + h * WIDTH + at * VECTOR, of_row + at * VECTOR, whole, active);
                }
            }
        }
    }
}

// A few vectors behind a row's last line, which would leave most lanes without one, are copied of many rows at a time.
template <int VECTOR, bool INSIDE>
__device__ __forceinline__ void copy_rows(const Element* from, Element* to, Corner corner, int D, int H, int W) {
    constexpr int COLUMNS = WIDTH / VECTOR, LANES = lanes_of_row(COLUMNS, VECTOR * sizeof(Element));
    constexpr int REST = ROWS_X > 1 && COLUMNS > LANES && COLUMNS % LANES * 2 <= LANES ? COLUMNS % LANES : 0;
    copy_columns<VECTOR, INSIDE, 0, COLUMNS - REST>(from, to, corner, D, H, W);
    if constexpr (REST > 0) copy_columns<VECTOR, INSIDE, COLUMNS - REST, REST>(from, to, corner, D, H, W);
}

template <int VECTOR>
__device__ __forceinline__ void copy_rows(const Element* from, Element* to, Corner corner, bool inside,
                                          int D, int H, int W) {
    if (inside)
        copy_rows<VECTOR, true>(from, to, corner, D, H, W);
    else
        copy_rows<VECTOR, false>(from, to, corner, D, H, W);
}

// Start copying the rows of a step's channels that a warp's cells read, in vectors as large as the rows of x allow.
__device__ __forceinline__ void stage_rows(const Element* x, Element* rows, Corner corner, int D, int H, int W) {
    constexpr int VECTOR = 16 / sizeof(Element);
    const int misaligned = reinterpret_cast<unsigned long long>(x) % 16;
    const int first = ((corner.channel * D + corner.d) * H + corner.h) * W + corner.w;
    // Without padding, what lies beyond an end is the next row or plane, read for cells whose results go nowhere.
    const unsigned reach = (((STEP - 1u) * D + SPAN_D - 1) * H + ROWS_X - 1) * W + WIDTH;
    bool inside = corner.channel + STEP <= C && first <= int(unsigned(C * D * H * W) - reach);
    if (W % VECTOR == 0 && misaligned == 0)
        copy_rows<VECTOR>(x + first, rows, corner, inside, D, H, W);
    else if (W % 2 == 0 && misaligned % (2 * sizeof(Element)) == 0)
        copy_rows<2>(x + first, rows, corner, inside, D, H, W);
    else
        copy_rows<1>(x + first, rows, corner, inside, D, H, W);
}

constexpr int SHARED = 2;    // rows that two neighbouring cells of a lane share
using Sums = Operand[OWN_H][TILES_W][BOX_TAPS];    // of a lane's cells in one channel

// The window sums of a lane's cells in the channel of its quad, from the first one's rows on.
__device__ __forceinline__ void sum_windows(Sums& operands, const Element* rows) {
    constexpr int VECTOR = MOVE_W % 4 == 0 ? 4 : MOVE_W % 2 == 0 ? 2 : 1;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < TILES_W; ++j) {
        const Element* const from = rows + lane % 4 * CHANNEL + (8 * j + lane / 4) * MOVE_W;
        Compute along_w[SPAN_D][SPAN_H][BOX_TAPS_W];
#pragma unroll
        for (int h = 0; h < OWN_H; ++h) {
#pragma unroll
            for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < SPAN_H; ++rh)
                    if (rh >= SHARED || h == 0)
                        sum_row<VECTOR>(along_w[rd][rh], from + (rd * ROWS_X + h * MOVE_H + rh) * WIDTH);
            Compute sums[BOX_TAPS];
            sum_cell(sums, along_w);
            keep_rows<SHARED>(along_w);
#pragma unroll
            for (int tap = 0; tap < BOX_TAPS; ++tap) operands[h][j][tap] = input_operand(sums[tap]);
        }
    }
}

// Add the products of window sums in twice four channels with the weights of a warp's features.
__device__ __forceinline__ void multiply(Accumulators& acc, const Sums (&operands)[2], const Four* w) {
#pragma unroll
    for (int tap = 0; tap < BOX_TAPS; ++tap)
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            const Four four = w[(tap * (BLOCK_M / 16) + m) * 32 + threadIdx.x % 32];
            Operand weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[i] = weight_operand(four.at[i]);
#pragma unroll
            for (int h = 0; h < OWN_H; ++h)
#pragma unroll
                for (int j = 0; j < TILES_W; ++j) {
                    const Operand of_cells[2] = {operands[0][h][j][tap], operands[1][h][j][tap]};
                    multiply_add(acc[0][h][j][m], weights, of_cells);
                }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
fused_test(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, double* __restrict__ partial,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Element* const w_tile = reinterpret_cast<Element*>(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H, warp_m = warp / (WARPS_W * WARPS_H);
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * GROUPS + group) * 8 * D * H * W;
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
    const Four* const w_warp = reinterpret_cast<const Four*>(w_tile) + 32 * warp_m * M_TILES;
    Element* const rows = w_tile + 4608 + warp * STEP * CHANNEL;
    const auto cell_of = [&](int tile) -> Cell {
        return {tile / (tiles_w * tiles_h) * CELLS_D, tile / tiles_w % tiles_h * CELLS_H, tile % tiles_w * CELLS_W};
    };
    const auto stage = [&](Cell cell, bool some, int step) {
        const int h = cell.h + warp_h * OWN_H, w = cell.w + 8 * warp_w * TILES_W;
        const Corner corner = {STEP * step, cell.d * MOVE_D, h * MOVE_H, w * MOVE_W};
        if (some) stage_rows(x_sample, rows, corner, D, H, W);
        copy_async_commit();
    };
    Cell here = cell_of(part);
    stage(here, part < tiles, 0);
    stage_weights(w, w_tile, group, first_feature);
    __syncthreads();    // until the weights are there

    for (int tile = part; tile < tiles; tile += parts) {
        const int cell_d = here.d, cell_h = here.h;
        const int cell_w = here.w;
        Compute of_tile = Compute(0);
        const Cell ahead = cell_of(tile + parts);
        const bool another = tile + parts < tiles;    // tile follows
        {
            Accumulators acc = {};
#pragma unroll 1
            for (int step = 0; step < STEPS; ++step) {
                const bool same = step + 1 < STEPS;    // tile that follows
                Sums operands[2];
                copy_async_wait<0>();
                __syncwarp();
                sum_windows(operands[0], rows);
                sum_windows(operands[1], rows + 4 * CHANNEL);
                __syncwarp();    // until all lanes have read
                stage(same ? here : ahead, same || another, same ? step + 1 : 0);
                multiply(acc, operands, w_warp + step * BOX_TAPS * 2 * BLOCK_M);
            }
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                    for (int s = 0; s < 4; ++s) {
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
        here = ahead;
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
