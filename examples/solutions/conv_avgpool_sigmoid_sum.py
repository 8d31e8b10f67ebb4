"""Model of conv_avgpool_sigmoid_sum.py with its forward in one generated CUDA kernel.

The algebra was rewritten first, by `avg_pool(conv(x, w)) = conv_strided(box(x), w)`, which leaves 14.5x less
arithmetic. fused_conv_avg_sigmoid_sum computes convolution, average pooling, sigmoid and sum in one launch.
These operators had the most to give: what they hand to each other no longer goes through memory, so 604 MB
are moved instead of 11.4 GB. Where the settings allow tf32, generated kernels round the float32 operands of
their products to it.

                          before         after
    arithmetic         173 GFLOP    12.0 GFLOP    14.5x less
    memory traffic       11.4 GB        604 MB    18.8x less
    launches                   4             1    4.00x less

Verified on a CPU, with PyTorch's operations for the kernels, against float64: outputs are off by 5.3e-08
    (eager: 5.3e-08) and gradients are off by 1.6e-05 (eager: 4.9e-04) of their size.
Not measured: there was no GPU; the kernels compile for sm_90.

Serves float32 (2 or more, 8, 384, 384), without gradients also float32 (2 or more, 8, 192 to 768, 192 to
768), in either mode of the model that get_init_inputs() describes. Other constructor arguments and other
calls give the same results by the original forward.
Written by fusewright 0.1.0.
"""

import ctypes
import inspect
from functools import cache, lru_cache
from itertools import chain, islice
from operator import is_
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.cpp_extension import load_inline

# ---- The model as it was ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Pools a convolution's response, squashes it and adds it up."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, pool_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = nn.AvgPool2d(pool_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.conv(x))
        return torch.sigmoid(pooled).sum(dim=(1, 2, 3))


batch_size = 128
in_channels, out_channels = 8, 64
height = width = 384


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs() -> list[int]:
    return [in_channels, out_channels, 3, 4]


# ---- Kernels, in the order in which they run -------------------------------------------------------------------------


FAILURE = r"""
// What CUDA says about an error, nothing where there is none.
static const char* failure(cudaError_t error) {
    if (error == cudaSuccess) return nullptr;
    cudaGetLastError();  // or somebody's next launch would be blamed for it
    return cudaGetErrorString(error);
}

// Whether launches of the current device may begin while the ones before them end; kernels wait for what they read.
static bool overlaps() {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9;  // where it was tried
}

template <class... Parameters, class... Arguments>
static cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, cudaStream_t stream,
                          Arguments... arguments) {
    static const bool early = overlaps();
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t configuration = {};
    configuration.gridDim = grid;
    configuration.blockDim = dim3(threads);
    configuration.dynamicSmemBytes = shared;
    configuration.stream = stream;
    configuration.attrs = &attribute;
    configuration.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&configuration, kernel, Parameters(arguments)...);
}
"""


FUSED_CONV_AVG_SIGMOID_SUM = r"""// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
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

// Thread block clusters (sm_90): rank in the cluster, a barrier over it, and reading another block's shared memory.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ float cluster_load(const float* shared, unsigned rank) {
    const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    unsigned remote;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
    return value;
}
__device__ __forceinline__ double cluster_load(const double* shared, unsigned rank) {
    const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    unsigned remote;
    double value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(remote) : "memory");
    return value;
}

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
constexpr int M_TILES = 4, OWN_D = 1, OWN_H = 4, OWN_W = 2;
constexpr int ROWS_D = 1, ROWS_H = 1, TILES_W = 1;
constexpr int WARPS_M = 1, WARPS_H = 4, WARPS_W = 2, THREADS = 256;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = 1;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Shared memory: for each warp the rows that its cells read, of STEP channels at a time, as [channel][d][h][w].
constexpr int STEP = 8, STEPS = (C + STEP - 1) / STEP, ROWS_X = 18, WIDTH = 36, CHANNEL = 648;

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

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
fused_conv_avg_sigmoid_sum(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, Element* __restrict__ out,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Element* const w_tile = reinterpret_cast<Element*>(shared_memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H, warp_m = warp / (WARPS_W * WARPS_H);
    const int parts = 2, sample = blockIdx.x / parts, part = blockIdx.x % parts;    // of the sample's blocks
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
        here = ahead;
    }

    // What this block's warps come to, for the others to read.
    double* const own = reinterpret_cast<double*>(shared_memory) + 8;
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
        own[0] = value;
    }
    float* const folded = reinterpret_cast<float*>(reinterpret_cast<double*>(shared_memory) + 10);
    cluster_barrier();
    if (cluster_rank() == 0)
        for (int i = threadIdx.x; i < 1; i += THREADS) {
            double value = own[i];
            for (unsigned rank = 1; rank < 2; ++rank) value = value + cluster_load(own + i, rank);
            folded[i] = float(value);
        }
    cluster_barrier();    // until the others' shared memory has been read
    if (cluster_rank() != 0) return;
    for (int i = threadIdx.x; i < 1; i += THREADS)
        out[(long long)sample * 1 + i] = narrow_to<Element>::of(folded[i]);
}
"""


FUSED_CONV_AVG_SIGMOID_SUM_LAUNCHER = r"""
extern "C" const char* prepare_fused_conv_avg_sigmoid_sum() {
    return failure(cudaFuncSetAttribute(fused_conv_avg_sigmoid_sum, cudaFuncAttributeMaxDynamicSharedMemorySize,
        184320));
}

extern "C" const char* launch_fused_conv_avg_sigmoid_sum(const float* x, const float* w, const float* bias,
    Element* out, int in_h, int in_w, int Q, int R, int blocks, cudaStream_t stream) {
    return failure(launch(fused_conv_avg_sigmoid_sum, blocks, 256, 184320, stream, x, w, bias, out, 1, in_h, in_w,
        1, Q, R, 1, Q, R));
}
"""


# ---- Building and calling them ---------------------------------------------------------------------------------------


@cache
def library(device: int) -> ctypes.CDLL:
    """The kernels for a device, built when first used.

    Plain C functions, called through ctypes: compiling PyTorch's C++ headers would take most of a minute.
    """
    arch = "{}{}".format(*torch.cuda.get_device_capability(device))
    path = load_inline(
        name=f"fused_conv_avg_sigmoid_sum_fa81e898_sm_{arch}",
        cpp_sources="",
        cuda_sources=[FAILURE, FUSED_CONV_AVG_SIGMOID_SUM, FUSED_CONV_AVG_SIGMOID_SUM_LAUNCHER],
        extra_cuda_cflags=[f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++17"],
        no_implicit_headers=True,
        is_python_module=False,
    )
    kernels = ctypes.CDLL(path)
    kernels.launch_fused_conv_avg_sigmoid_sum.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 5 + [ctypes.c_void_p]
    kernels.launch_fused_conv_avg_sigmoid_sum.restype = ctypes.c_char_p
    kernels.prepare_fused_conv_avg_sigmoid_sum.restype = ctypes.c_char_p
    with torch.cuda.device(device):
        check("fused_conv_avg_sigmoid_sum", kernels.prepare_fused_conv_avg_sigmoid_sum())
    return kernels


def check(kernel: str, error: bytes | None) -> None:
    """Raises `RuntimeError` where CUDA refused to launch a kernel."""
    if error is not None:
        raise RuntimeError(f"{kernel} could not be launched: {error.decode()}")


def public_stream(device: int) -> int:
    """The current stream of a device."""
    return torch.cuda.current_stream(device).cuda_stream


# The same without an object for it, as what PyTorch generates itself asks.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", public_stream)


def expect(kernel: str, name: str, shape: torch.Size, wanted: tuple[int | None, ...]) -> None:
    """Raises `ValueError` for an operand of a shape that the kernel was not made for; `None` stands for any length."""
    if len(shape) != len(wanted) or any(n not in (None, m) for m, n in zip(shape, wanted, strict=True)):
        lengths = ", ".join("any" if n is None else str(n) for n in wanted)
        raise ValueError(f"{kernel} takes {name} of shape ({lengths}), not {tuple(shape)}")


def dense(
    kernel: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """An operand as kernels read it: without gaps, beginning at a multiple of 16 bytes.

    Raises `ValueError` for one of another device or dtype than the kernel was made for.
    """
    if not tensor.is_cuda or tensor.dtype is not dtype:
        raise ValueError(f"{kernel} takes {name} as {dtype} on cuda, not as {tensor.dtype} on {tensor.device}")
    alignment = 16
    if tensor.is_contiguous(memory_format=layout) and tensor.data_ptr() % alignment == 0 and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().clone(memory_format=layout)


def expect_arguments(function, given: tuple, wanted: tuple) -> None:
    """Raises `ValueError` where a kernel's function has other last arguments than its kernel was made for."""
    if given != wanted:
        names = [*inspect.signature(function).parameters][-len(wanted) :]
        name, one, other = next(each for each in zip(names, wanted, given, strict=True) if each[1] != each[2])
        remedy = "`fusewright optimize` writes a file for another model"
        raise ValueError(f"{function.__name__} was made for {name}={one}, not {other}; {remedy}")


class Recomputed(torch.autograd.Function):
    """A kernel whose backward computes its reference again and differentiates that, so that nothing is kept."""

    @staticmethod
    def forward(launch, reference, *operands):
        """Runs the kernel."""
        return launch(*operands)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keeps the operands, and nothing that was computed from them."""
        _, ctx.reference, *operands = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx, grad):
        """The gradients of the operands that need one."""
        again = torch.is_grad_enabled()
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            # Views, so that no gradient flows from one operand to another that it was computed from; with all their
            # strides: ATen's gradient of a batch norm is wrong on a CPU where those of a size of 1 are others.
            operands = [torch.ops.aten.alias(operand) for operand in ctx.saved_tensors]
            value = ctx.reference(*operands)
        if not value.requires_grad:  # a step function, say
            return (None,) * (2 + len(operands))
        wanted = [operand for operand, need in zip(operands, needed, strict=True) if need]
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=again, allow_unused=True))
        return None, None, *(next(found) if need else None for need in needed)


def differentiable(launch, reference, *operands: torch.Tensor) -> torch.Tensor:
    """`launch(*operands)`, through which gradients flow as through `reference(*operands)`."""
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        return Recomputed.apply(launch, reference, *operands)
    return launch(*operands)


@lru_cache(maxsize=256)
def fused_conv_avg_sigmoid_sum_sizes(
    x_shape: torch.Size, w_shape: torch.Size, bias_shape: torch.Size
) -> tuple[tuple[int, ...], ...]:
    """Gives the output's shape, and the numbers that the launcher takes."""
    expect("fused_conv_avg_sigmoid_sum", "x", x_shape, (None, 8, None, None))
    N, in_h, in_w = x_shape[0], x_shape[2], x_shape[3]
    expect("fused_conv_avg_sigmoid_sum", "w", w_shape, (64, 8, 3, 3))
    expect("fused_conv_avg_sigmoid_sum", "bias", bias_shape, (64,))
    Q = (in_h - 6) // 4 + 1
    R = (in_w - 6) // 4 + 1
    blocks = N * 2
    if max(in_h, in_w, Q, R, blocks, 8 * in_h * in_w, Q * R) >= 2**31:
        raise ValueError(f"fused_conv_avg_sigmoid_sum counts in 32 bits, too few for N={N}, in_h={in_h}, in_w={in_w}")
    return (N,), (in_h, in_w, Q, R, blocks)


def fused_conv_avg_sigmoid_sum_launch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Launches the kernel and returns out."""
    out_shape, numbers = fused_conv_avg_sigmoid_sum_sizes(x.shape, w.shape, bias.shape)
    x = dense("fused_conv_avg_sigmoid_sum", "x", x, torch.float32)
    w = dense("fused_conv_avg_sigmoid_sum", "w", w, torch.float32)
    bias = dense("fused_conv_avg_sigmoid_sum", "bias", bias, torch.float32)
    out = torch.empty(out_shape, dtype=torch.float32, device=x.device)
    device = x.get_device()
    check(
        "fused_conv_avg_sigmoid_sum",
        library(device).launch_fused_conv_avg_sigmoid_sum(
            x.data_ptr(), w.data_ptr(), bias.data_ptr(), out.data_ptr(), *numbers, raw_stream(device)
        ),
    )
    return out


def fused_conv_avg_sigmoid_sum_reference(x, w, bias):
    """The same in PyTorch's own operations, which gradients go through."""
    x = F.avg_pool2d(x[:, :, 0:382, 0:382], (4, 4), (1, 1))  # (B, 8, 379, 379)
    x = F.conv2d(x, w, bias, stride=4)  # (B, 64, 95, 95)
    del w, bias
    x = torch.sigmoid(x)  # (B, 64, 95, 95)
    x = x.sum((1, 2, 3))  # (B)
    return x


def fused_conv_avg_sigmoid_sum(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    *,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
    pool: tuple[int, ...],
    pool_stride: tuple[int, ...] = (4, 4),
    pool_padding: tuple[int, ...] = (0, 0),
) -> torch.Tensor:
    """conv, avg, sigmoid, sum in one launch.

    Keywords name the kernel's constants, as the rewritten program has them; others raise `ValueError`.
    """
    expect_arguments(
        fused_conv_avg_sigmoid_sum,
        (kernel_size, stride, padding, dilation, groups, pool, pool_stride, pool_padding),
        ((3, 3), (4, 4), (0, 0), (1, 1), 1, (4, 4), (1, 1), (0, 0)),
    )
    return differentiable(fused_conv_avg_sigmoid_sum_launch, fused_conv_avg_sigmoid_sum_reference, x, w, bias)


# ---- The model that does less ----------------------------------------------------------------------------------------


# What the kernels were made for; a model that is configured otherwise runs its original forward.
MADE_FOR = {
    "parameters and buffers": (),
    "conv": (
        "torch.Conv2d",
        {
            "parameters and buffers": ("weight", "bias"),
            "in_channels": 8,
            "out_channels": 64,
            "kernel_size": (3, 3),
            "stride": (1, 1),
            "padding": (0, 0),
            "dilation": (1, 1),
            "transposed": False,
            "output_padding": (0, 0),
            "groups": 1,
            "padding_mode": "zeros",
        },
    ),
    "pool": (
        "torch.AvgPool2d",
        {
            "parameters and buffers": (),
            "kernel_size": 4,
            "stride": 4,
            "padding": 0,
            "ceil_mode": False,
            "count_include_pad": True,
            "divisor_override": None,
        },
    ),
}


# Parameters, submodules, hooks and mode, and what torch.compile leaves with a module that it is given.
OF_ALL_MODULES = frozenset(vars(torch.nn.Module())) | {"_is_torch_compile"}
CONTAINERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def tensor_names(module: torch.nn.Module) -> tuple[str, ...]:
    """The parameters and buffers that a module has."""
    return tuple(n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None)


def configuration(module: torch.nn.Module) -> dict:
    """What a forward may depend on besides tensors: what somebody gave a module, and the like of its submodules."""
    hides = type(module).__module__.startswith("torch.")  # what its private attributes hold follows from the others
    own = {n: value for n, value in vars(module).items() if n not in OF_ALL_MODULES and not (hides and n[0] == "_")}
    parts = {n: part if part is None else (named(part), configuration(part)) for n, part in module._modules.items()}
    return {"parameters and buffers": tensor_names(module), **own, **parts}


def named(module: torch.nn.Module) -> str:
    """A module's class by its name and package; those of this file have none."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if kind.__module__ == Model.__module__ else f"{package}.{kind.__qualname__}"


def views(model: Model) -> list:
    """Live views of all that a model consists of: where that changes, another object appears in one of them."""
    return [
        held.values()
        for own in map(vars, model.modules())
        for held in (own, *(own[name] for name in (*CONTAINERS, *HOOKS)))
    ]


SEEN = WeakKeyDictionary()  # for each model: what it held when it was last examined, and what came of that


def weights(model: Model) -> tuple[torch.Tensor, ...] | None:
    """The tensors of the model that the forward reads; `None` where the kernels were not made for it as it is.

    It is examined again once an attribute, a tensor, a submodule or a hook is not the very object that it was.
    """
    seen = SEEN.get(model)
    if seen is not None:
        live, lengths, filled, objects, found = seen
        if [*map(len, live)] == lengths and all(map(is_, chain.from_iterable(filled), objects)):
            return found
    live = views(model)
    filled = [view for view in live if view]  # most are empty, and their lengths tell when they no longer are
    hooked = any(vars(module)[name] for module in islice(model.modules(), 1, None) for name in HOOKS)
    fits = not hooked and repr(configuration(model)) == repr(MADE_FOR)
    found = (model.conv.weight, model.conv.bias) if fits else None
    SEEN[model] = live, [*map(len, live)], filled, [*chain.from_iterable(filled)], found
    return found


# Shapes and dtypes of these tensors.
KINDS = [((64, 8, 3, 3), torch.float32), ((64,), torch.float32)]


@cache
def kernels_for(device: torch.device) -> str:
    """The kind of kernels that run on a device, if any of these do."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return "cuda"
    return ""


def ordinary(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Whether these are plain, dense tensors on a device."""
    for t in tensors:
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.device != device or t.layout is not torch.strided:
            return False
    return True


def called_plainly() -> bool:
    """Whether nobody looks on: neither a tracer, autocast, a transform, nor a hook of all modules."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cuda"):
        return False
    looked_at = torch._C._functorch.peek_interpreter_stack() is not None
    return not (looked_at or torch.nn.modules.module._has_any_global_hook())


def tf32_allowed() -> bool:
    """Whether PyTorch's settings let float32 convolutions round their operands to tf32, as the kernels do."""
    own = torch.backends.cudnn.conv.fp32_precision
    return (torch.backends.fp32_precision if own == "none" else own) == "tf32"


def covered(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The model's `weights` where the kernels were made for a call; `None` where the original runs."""
    own = weights(model) if called_plainly() else None
    fits = (
        own is not None
        and kernels_for(x.device)
        and ordinary(x.device, x, *own)
        and x.dtype is torch.float32
        and x.dim() == 4
        and x.shape[1] == 8
        and 192 <= x.shape[2] <= 768
        and 192 <= x.shape[3] <= 768
        and (x.shape[2:] == (384, 384) or not torch.is_grad_enabled())
        and x.shape[0] >= 2
        and [(w.shape, w.dtype) for w in own] == KINDS
        and tf32_allowed()
    )
    return own if fits else None


class ModelNew(Model):
    """`Model` with its forward computed by the kernels, where they were made for the call."""

    def forward(self, x: torch.Tensor):
        """As the original."""
        own = covered(self, x)
        if own is None:
            return super().forward(x)
        with torch.cuda.device(x.get_device()):
            return self.fused(x, *own)

    def fused(self, x, conv_weight, conv_bias):
        """The rewritten forward."""
        x = fused_conv_avg_sigmoid_sum(
            x, conv_weight, conv_bias, kernel_size=(3, 3), stride=(4, 4), pool=(4, 4), pool_stride=(1, 1)
        )  # (B)
        return x
