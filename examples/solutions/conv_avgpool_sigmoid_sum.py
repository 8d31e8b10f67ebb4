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
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
"""


FUSED_CONV_AVG_SIGMOID_SUM = r"""// d += a * b for one 16x8x8 tile: a is 16x8 row-major, b is 8x8 column-major, both rounded to tf32, d in float32.
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

// Start copying BYTES (4, 8 or 16, all addresses aligned to it) to shared memory, or zeros where not `inside`.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global, bool inside) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    const int bytes = inside ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from_global), "r"(bytes));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from_global), "r"(bytes),
                     "n"(BYTES));
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

using Element = float;    // of tensors in memory
using Compute = float;    // of everything else

constexpr int C = 72, O = 64, GROUPS = 1;    // channels of a group, in and out
constexpr int TAPS = 1;    // of one channel's kernel

// A warp owns 16 * M_TILES channels of OWN_D x OWN_H x 4 * OWN_W cells, ROWS_D x ROWS_H rows of a cell at a time.
constexpr int M_TILES = 2, OWN_D = 1, OWN_H = 2, OWN_W = 8;
constexpr int ROWS_D = 1, ROWS_H = 1, TILES_W = 4;
constexpr int WARPS_M = 2, WARPS_H = 4, WARPS_W = 1, THREADS = 256;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = 1;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;
constexpr int CHUNK = 72, CHUNKS = 1;    // input channels staged at a time
constexpr bool TOGETHER_D = false, TOGETHER_H = false;    // whether all taps along d, h are at hand at once

// Shared memory: the input as [channel][d][h][w].
constexpr int X_D = 1, X_H = 8, X_W = 32, X_CHANNEL = 264;
// Steps in the staged input from cell to cell, from position to position and from tap to tap.
constexpr int ADVANCE_D = 256, ADVANCE_H = 32, ADVANCE_W = 1;
constexpr int ELEMENT_D = 256, ELEMENT_H = 32, ELEMENT_W = 1;
constexpr int TAP_D = 0, TAP_H = 0, TAP_W = 0;

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
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

// Start copying VECTOR elements, or zeros where they are not `there`.
template <int VECTOR>
__device__ __forceinline__ void copy_vector(Element* to, const Element* from, bool there) {
    if constexpr (VECTOR * sizeof(Element) >= 4)
        copy_async<VECTOR * sizeof(Element)>(to, from, there);
    else
        *to = there ? *from : Element{};    // asynchronous copies are of four bytes or more
}

// Windows of COUNT elements, STEP apart, one per tap; a cell moves them by MOVE.
constexpr int BOX_C = 8;
constexpr int BOX_TAPS_D = 1, BOX_TAPS_H = 3, BOX_TAPS_W = 3;
constexpr int DILATION_D = 1, DILATION_H = 1, DILATION_W = 1;
constexpr int COUNT_D = 1, COUNT_H = 4, COUNT_W = 4;
constexpr int STEP_D = 1, STEP_H = 1, STEP_W = 1;
constexpr int MOVE_D = 1, MOVE_H = 4, MOVE_W = 4;
constexpr int SPAN_D = 1, SPAN_H = 6, SPAN_W = 6;    // elements that the windows of one cell cover
constexpr int STRIP = 8, SHARED = 2;    // cells of a strip along h; rows that two of them share

// Whether offset `at` belongs to the window of a tap.
__device__ __forceinline__ constexpr bool covers(int at, int tap, int dilation, int count, int step) {
    const int from = at - tap * dilation;
    return from >= 0 && from % step == 0 && from / step < count;
}

// Whether offset `at` belongs to the windows of all taps.
template <int TAPS_ALONG>
__device__ __forceinline__ constexpr bool covered(int at, int dilation, int count, int step) {
    for (int tap = 0; tap < TAPS_ALONG; ++tap)
        if (!covers(at, tap, dilation, count, step)) return false;
    return true;
}

// A sum that starts with its first term instead of zero; `any` is known when the loops around are unrolled.
struct Sum {
    Compute value = 0;
    bool any = false;
    __device__ __forceinline__ void add(Compute term) { value = any ? value + term : term, any = true; }
};

// One row of x under a cell, in the widest loads that its alignment allows.
template <bool ALIGNED>
__device__ __forceinline__ void load_row(Compute (&v)[SPAN_W], const Element* from) {
    int i = 0;
    if constexpr (ALIGNED && sizeof(Element) == 4) {
#pragma unroll
        for (; i + 4 <= SPAN_W; i += 4) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
        if (i + 2 <= SPAN_W) {
            const float2 two = __ldg(reinterpret_cast<const float2*>(from + i));
            v[i] = two.x, v[i + 1] = two.y, i += 2;
        }
    }
#pragma unroll
    for (; i < SPAN_W; ++i) v[i] = widened(from[i]);
}

// The window sums of one row of x along w, one per tap.
template <bool ALIGNED>
__device__ __forceinline__ void sum_row(Compute (&sums)[BOX_TAPS_W], const Element* from) {
    Compute v[SPAN_W];
    load_row<ALIGNED>(v, from);
    Sum middle;    // of what belongs to all windows
#pragma unroll
    for (int at = 0; at < SPAN_W; ++at)
        if (covered<BOX_TAPS_W>(at, DILATION_W, COUNT_W, STEP_W)) middle.add(v[at]);
#pragma unroll
    for (int tap = 0; tap < BOX_TAPS_W; ++tap) {
        Sum sum = middle;
#pragma unroll
        for (int at = 0; at < SPAN_W; ++at)
            if (!covered<BOX_TAPS_W>(at, DILATION_W, COUNT_W, STEP_W) && covers(at, tap, DILATION_W, COUNT_W, STEP_W))
                sum.add(v[at]);
        sums[tap] = sum.value;
    }
}

// A thread goes down a strip of cells and keeps the sums of rows that the next cell reads as well.
template <bool ALIGNED>
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
            // Rows that belong to the windows of all taps are added once, and to every window at the end.
            Sum box[BOX_TAPS_D][BOX_TAPS_H][BOX_TAPS_W], common[BOX_TAPS_W];
            if (x_d + SPAN_D <= D && x_h + SPAN_H <= H && x_w + SPAN_W <= W) {
                const Element* const from = x + ((c * D + x_d) * H + x_h) * W + x_w;
#pragma unroll
                for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
                    for (int rh = 0; rh < SPAN_H; ++rh)
                        if (rh >= SHARED || h == first) sum_row<ALIGNED>(rows[rd][rh], from + (rd * H + rh) * W);
#pragma unroll
                for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
                    for (int rh = 0; rh < SPAN_H; ++rh) {
                        const bool all = covered<BOX_TAPS_D>(rd, DILATION_D, COUNT_D, STEP_D) &&
                                         covered<BOX_TAPS_H>(rh, DILATION_H, COUNT_H, STEP_H);
#pragma unroll
                        for (int tw = 0; tw < BOX_TAPS_W; ++tw) {
                            if (all) common[tw].add(rows[rd][rh][tw]);
#pragma unroll
                            for (int td = 0; td < BOX_TAPS_D; ++td)
#pragma unroll
                                for (int th = 0; th < BOX_TAPS_H; ++th)
                                    if (!all && covers(rd, td, DILATION_D, COUNT_D, STEP_D) &&
                                        covers(rh, th, DILATION_H, COUNT_H, STEP_H))
                                        box[td][th][tw].add(rows[rd][rh][tw]);
                        }
                    }
#pragma unroll
                for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
                    for (int rh = 0; rh < SHARED; ++rh)
#pragma unroll
                        for (int tw = 0; tw < BOX_TAPS_W; ++tw) rows[rd][rh][tw] = rows[rd][rh + MOVE_H][tw];
            }
            Element* to = tile + c * BOX_TAPS_D * BOX_TAPS_H * BOX_TAPS_W * X_CHANNEL + (d * CELLS_H + h) * CELLS_W + w;
#pragma unroll
            for (int tap = 0; tap < BOX_TAPS_D * BOX_TAPS_H * BOX_TAPS_W; ++tap) {
                Sum sum = box[tap / (BOX_TAPS_W * BOX_TAPS_H)][tap / BOX_TAPS_W % BOX_TAPS_H][tap % BOX_TAPS_W];
                if (common[tap % BOX_TAPS_W].any) sum.add(common[tap % BOX_TAPS_W].value);
                to[tap * X_CHANNEL] = __uint_as_float(round_tf32(sum.value));
            }
        }
    }
}

// Write the window sums that the cells of a block read, zeros for cells beyond the last.
__device__ __forceinline__ int stage_input(const Element* x, Element* tile, int, int cell_d, int cell_h,
                                           int cell_w, int D, int H, int W) {
    const bool aligned = MOVE_W % 4 == 0 && W % 4 == 0 && reinterpret_cast<unsigned long long>(x) % 16 == 0;
    if (aligned)
        sum_windows<true>(x, tile, cell_d, cell_h, cell_w, D, H, W);
    else
        sum_windows<false>(x, tile, cell_d, cell_h, cell_w, D, H, W);
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

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 2)
fused_conv_avg_sigmoid_sum(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, Element* __restrict__ out,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);
    Element* const w_tile = x_tile + 19008;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_w = warp % WARPS_W, warp_h = warp / WARPS_W % WARPS_H, warp_m = warp / (WARPS_W * WARPS_H);
    const int parts = 2, sample = blockIdx.x / parts, part = blockIdx.x % parts;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * GROUPS + group) * 8 * D * H * W;
    const Element* const x_warp = x_tile + warp_h * OWN_H * ADVANCE_H + 4 * warp_w * OWN_W * ADVANCE_W;
    const int feature_row = 16 * warp_m * M_TILES + row;    // the first of this lane's features

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
        const Compute shifted = value * Compute(0.0625) + bias_at[m][half];
        const float v1 = reciprocal_approx(1.0f + exp2_approx(-1.44269504f * shifted));
        return v1;
    };
    double total = Compute(0);
    stage_weights(w, w_tile, group, first_feature);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    round_staged(w_tile, 6400);

    const int tiles_h = ceil_div(cells_h, CELLS_H), tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = ceil_div(cells_d, CELLS_D) * tiles_h * tiles_w;
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
            accumulate<4, 1, 1, 1, 1>(acc, x_warp + shift, w_tile, feature_row);
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                    for (int s = 0; s < 8; ++s) {
                        const int own_w = s;    // the cell, and below its position
                        const int p = cell_d + rd / ROWS_D;
                        const int q = cell_h + warp_h * OWN_H + rh / ROWS_H;
                        const int r = cell_w + 4 * warp_w * OWN_W + own_w / 2 * 8 + 2 * quad + own_w % 2;
                        const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R);
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;
                                if (inside && feature < O) of_tile = of_tile + before(acc[rd][rh][s / 2][m][2 * half + s % 2], m, half);
                            }
                    }
        }
        total = total + of_tile;
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
        101632));
}

extern "C" const char* launch_fused_conv_avg_sigmoid_sum(const float* x, const float* w, const float* bias,
    Element* out, int in_h, int in_w, int Q, int R, int blocks, cudaStream_t stream) {
    fused_conv_avg_sigmoid_sum<<<blocks, 256, 101632, stream>>>(x, w, bias, out, 1, in_h, in_w, 1, Q, R, 1, Q, R);
    return failure(cudaGetLastError());
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
        name=f"fused_conv_avg_sigmoid_sum_ca3cf74e_sm_{arch}",
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


def expect(kernel: str, name: str, shape: torch.Size, wanted: tuple[int | None, ...]) -> None:
    """Raises `ValueError` for an operand of a shape that the kernel was not made for; `None` stands for any length."""
    if len(shape) != len(wanted) or any(n not in (None, m) for m, n in zip(shape, wanted, strict=True)):
        lengths = ", ".join("any" if n is None else str(n) for n in wanted)
        raise ValueError(f"{kernel} takes {name} of shape ({lengths}), not {tuple(shape)}")


def dense(
    kernel: str,
    name: str,
    tensor: torch.Tensor,
    device: str,
    dtype: torch.dtype,
    layout: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """An operand as kernels read it: without gaps, beginning at a multiple of 16 bytes.

    Raises `ValueError` for one of another device or dtype than the kernel was made for.
    """
    if tensor.device.type != device or tensor.dtype is not dtype:
        raise ValueError(f"{kernel} takes {name} as {dtype} on {device}, not as {tensor.dtype} on {tensor.device}")
    tensor = tensor.resolve_neg()
    alignment = 16
    if tensor.is_contiguous(memory_format=layout) and tensor.data_ptr() % alignment == 0:
        return tensor
    return tensor.clone(memory_format=layout)


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
            # Views, so that no gradient flows from one operand to another that it was computed from.
            operands = [operand.view_as(operand) for operand in ctx.saved_tensors]
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
    if max(in_h, in_w, Q, R, blocks) >= 2**31:
        raise ValueError(f"fused_conv_avg_sigmoid_sum counts in 32 bits, too few for N={N}, in_h={in_h}, in_w={in_w}")
    return (N,), (in_h, in_w, Q, R, blocks)


def fused_conv_avg_sigmoid_sum_launch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Launches the kernel and returns out."""
    out_shape, numbers = fused_conv_avg_sigmoid_sum_sizes(x.shape, w.shape, bias.shape)
    x = dense("fused_conv_avg_sigmoid_sum", "x", x, "cuda", torch.float32)
    w = dense("fused_conv_avg_sigmoid_sum", "w", w, "cuda", torch.float32)
    bias = dense("fused_conv_avg_sigmoid_sum", "bias", bias, "cuda", torch.float32)
    out = torch.empty(out_shape, dtype=torch.float32, device=x.device)
    check(
        "fused_conv_avg_sigmoid_sum",
        library(x.device.index).launch_fused_conv_avg_sigmoid_sum(
            x.data_ptr(),
            w.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            *numbers,
            torch.cuda.current_stream().cuda_stream,
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


def fused_conv_avg_sigmoid_sum(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """conv, avg, sigmoid, sum in one launch."""
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
        live, lengths, objects, found = seen
        if [*map(len, live)] == lengths and all(map(is_, chain.from_iterable(live), objects)):
            return found
    live = views(model)
    hooked = any(vars(module)[name] for module in islice(model.modules(), 1, None) for name in HOOKS)
    fits = not hooked and repr(configuration(model)) == repr(MADE_FOR)
    found = (model.conv.weight, model.conv.bias) if fits else None
    SEEN[model] = live, [*map(len, live)], [*chain.from_iterable(live)], found
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


def covers(model: Model, x: torch.Tensor) -> bool:
    """Whether the kernels were made for a call; the original forward serves all others."""
    own = weights(model) if called_plainly() else None
    return bool(
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


class ModelNew(Model):
    """`Model` with its forward computed by the kernels, where they were made for the call."""

    def forward(self, x: torch.Tensor):
        """As the original."""
        if not covers(self, x):
            return super().forward(x)
        with torch.cuda.device(x.device):
            return self.fused(x)

    def fused(self, x):
        """The rewritten forward."""
        x = fused_conv_avg_sigmoid_sum(x, self.conv.weight, self.conv.bias)  # (B)
        return x
