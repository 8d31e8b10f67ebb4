"""Model of convtranspose_gap_bias_logsumexp.py with its forward in 2 generated CUDA kernels.

The algebra was rewritten first, by `sum_P(conv_transpose(x, w)) = conv_transpose(rangesum_taps(x), taps as
channels of w)`, `sum(c*x) = c*sum(x)`, `conv_transpose_1(x, w) = conv_1(x, w^T)`, `conv(x, w) = matmul(x, w)`
and `sum_1(x) = x`, which leaves 2,298x less arithmetic. fused_rangesum computes sums over positions in one
launch. fused_linear_add_logsumexp_mul computes matrix product, addition, logsumexp and multiplication in one
launch. These operators had the most to give: what they hand to each other no longer goes through memory, so
1.08 GB are moved instead of 5.40 GB.

                          before         after
    arithmetic         619 GFLOP     269 MFLOP    2,298x less
    memory traffic       5.40 GB       1.08 GB    5.02x less
    launches                   8             5    1.60x less

Verified on a CPU, with PyTorch's operations for the kernels, against float64: outputs are off by 4.1e-08
    (eager: 4.1e-08) and gradients are off by 2.3e-07 (eager: 4.5e-03) of their size.
Not measured: there was no GPU; the kernels compile for sm_80 and sm_90.

Serves float32 (2 or more, 64, 512, 512), in either mode of the model that get_init_inputs() describes. Other
constructor arguments and other calls give the same results by the original forward.
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
    """Upsamples, only to average over every position again: the algebra sees that it need not upsample."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, scale: float) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.conv_transpose(x).mean(dim=(2, 3), keepdim=True)
        score = torch.logsumexp(mean + self.bias, dim=1, keepdim=True)
        return score.sum(dim=(2, 3)) * self.scale


batch_size = 16
in_channels, out_channels = 64, 128
height = width = 512


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs() -> list[float]:
    return [in_channels, out_channels, 3, 10.0]


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


FUSED_RANGESUM = r"""// fused_rangesum: sums over planes of any length, every element read once.
// NVRTC has no <cmath> to define these.
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
__device__ __forceinline__ void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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

using index_t = long long;
using Element = float;

constexpr int THREADS = 256, TEAM = 256;  // of a block, and of them per plane
constexpr int BLOCKS = 4, LOADS = 8;  // per multiprocessor at a time; under way per thread
constexpr int LANES = TEAM < 32 ? TEAM : 32, GROUPS = THREADS / LANES;  // threads that shuffles join
constexpr int CELLS = 1, SLOTS = 1;  // different sums per plane, and results made of them

// COUNT neighbours in memory: the word that one load brings, and its elements.
template <int BYTES> struct Bits;
template <> struct Bits<16> { using Type = uint4; };
template <> struct Bits<8> { using Type = uint2; };
template <> struct Bits<4> { using Type = unsigned; };
template <> struct Bits<2> { using Type = unsigned short; };
template <int COUNT>
union Pack {
    using Word = typename Bits<sizeof(Element) * COUNT>::Type;
    Word word;
    Element at[COUNT];
};

// An element, in the type it is added in.
__device__ __forceinline__ float value(Element element) {
    return widened(element);
}

// Adds LOADS packs (or the first `packs` of them, unless ALL) at from(0), from(1), ... to the columns.  All loads are
// under way before the first is used.
template <bool ALL, int COUNT, typename From>
__device__ __forceinline__ void add(From from, int packs, double (&column)[COUNT]) {
    Pack<COUNT> pack[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; ++u)
        if (ALL || u < packs) pack[u].word = __ldg(reinterpret_cast<const typename Pack<COUNT>::Word*>(from(u)));
    float few[COUNT] = {};  // a few additions in the type of the values, all others in float64
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
        if (!ALL && u >= packs) break;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) few[e] += value(pack[u].at[e]);
    }
#pragma unroll
    for (int e = 0; e < COUNT; ++e) column[e] += few[e];
}

// The sum over LANES neighbouring threads, in the first of them.
__device__ __forceinline__ double joined(double sum) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    return sum;
}

// Adds this thread's share of the elements [first, last) of a plane to `sum`.
__device__ __forceinline__ void take(const Element* plane, index_t first, index_t last, int lane, double& sum) {
    constexpr int COUNT = 16 / sizeof(Element);
    // Packs are aligned in memory; the plane begins `skew` elements into one.
    const int skew = reinterpret_cast<size_t>(plane) % 16 / sizeof(Element);
    const index_t begin = (first + skew + COUNT - 1) / COUNT, end = max(begin, (last + skew) / COUNT);
    const index_t from = begin, until = end;
    double column[COUNT] = {};
    index_t p = from + lane;
    const auto at = [&](int u) { return plane - skew + (p + u * TEAM) * COUNT; };
#pragma unroll 1
    for (; p + (LOADS - 1) * TEAM < until; p += LOADS * TEAM) add<true>(at, LOADS, column);
    if (p < until) add<false>(at, int(until - p + TEAM - 1) / TEAM, column);
#pragma unroll
    for (int e = 0; e < COUNT; ++e) sum += column[e];
    const index_t head = min(begin * COUNT - skew, last), tail = end * COUNT - skew;
    for (index_t i = first + lane; i < head; i += TEAM) {
        sum += value(plane[i]);
    }
    for (index_t i = tail + lane; i < last; i += TEAM) {
        sum += value(plane[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_rangesum(const Element* __restrict__ x, double* __restrict__ out, index_t planes, index_t length) {
    await_launches();
    __shared__ double cells[GROUPS][CELLS];
    const index_t plane = min(index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM, planes - 1);
    double sum = 0;
    take(x + plane * length, 0, length, threadIdx.x % TEAM, sum);
    sum = joined(sum);
    if (threadIdx.x % LANES == 0) cells[threadIdx.x / LANES][0] = sum;
    __syncthreads();
    const index_t first = index_t(blockIdx.x) * (THREADS / TEAM);
    for (int team = threadIdx.x; team < THREADS / TEAM && first + team < planes; team += THREADS) {
        constexpr int slot = 0;
        double total = 0;
        for (int group = 0; group < TEAM / LANES; ++group) total += cells[team * (TEAM / LANES) + group][0];
        out[(first + team) * SLOTS + slot] = total;
    }
}
"""


FUSED_RANGESUM_LAUNCHER = r"""
extern "C" const char* launch_fused_rangesum(const Element* x, double* out, long long planes, long long length,
    cudaStream_t stream) {
    return failure(launch(fused_rangesum, planes, 256, 0, stream, x, out, planes, length));
}
"""


FUSED_LINEAR_ADD_LOGSUMEXP_MUL = r"""// fused_linear_add_logsumexp_mul: one block per sample.  Operands: a0 (B, 64, 1, 1), a1 (128, 64), a2 (128), a3 (128, 1, 1).
// NVRTC has no <cmath> to define these.
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
__device__ __forceinline__ void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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

// A team of LANES neighbouring threads works on one row; joins are in a fixed order.
namespace rows {
constexpr int THREADS = 512;
struct Add {
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct Times {
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return a * b; }
};
struct Greater {  // NaN once there is one
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return b > a || b != b ? b : a; }
};
struct Less {
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return b < a || b != b ? b : a; }
};
// Every thread of the team gets the join of all their values; every thread of the block takes part.
template <int LANES, typename T, typename Join>
__device__ __forceinline__ T joined(T value, Join join) {
#pragma unroll
    for (int offset = (LANES < 32 ? LANES : 32) / 2; offset > 0; offset /= 2)
        value = join(value, __shfl_xor_sync(~0u, value, offset));
    if constexpr (LANES > 32) {
        static_assert(LANES == THREADS, "a team is part of a warp, or the block");
        __shared__ T warps[LANES / 32];
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
        __syncthreads();
        value = warps[0];
        for (int warp = 1; warp < LANES / 32; ++warp) value = join(value, warps[warp]);
        __syncthreads();
    }
    return value;
}
// The join of element(0) ... element(length - 1).
template <int LANES, typename T, typename Element, typename Join>
__device__ __forceinline__ T over(int length, T start, Element element, Join join) {
#pragma unroll 4
    for (int r = threadIdx.x % LANES; r < length; r += LANES) start = join(start, T(element(r)));
    return joined<LANES>(start, join);
}
// The sum of left(0) * right(0) ... left(LENGTH - 1) * right(LENGTH - 1).  `right` is in memory: a thread has up to 16
// loads of it under way before it uses the first, none of them behind a branch.
template <int LANES, int LENGTH, typename Left, typename Right>
__device__ __forceinline__ double dot(Left left, Right right) {
    constexpr int EACH = (LENGTH + LANES - 1) / LANES, TURNS = (EACH + 15) / 16, LOADS = (EACH + TURNS - 1) / TURNS;
    double total = 0;
    for (int first = threadIdx.x % LANES; first < LENGTH; first += LOADS * LANES) {
        decltype(right(0)) factor[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; ++u) factor[u] = right(min(first + u * LANES, LENGTH - 1));
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const double product = left(min(first + u * LANES, LENGTH - 1)) * factor[u];
            total += first + u * LANES < LENGTH ? product : 0;
        }
    }
    return joined<LANES>(total, Add());
}
}  // namespace rows

extern "C" __global__ void __launch_bounds__(512)
fused_linear_add_logsumexp_mul(const double* __restrict__ a0, const double* __restrict__ a1, const double* __restrict__ a2, const float* __restrict__ a3, float* __restrict__ out) {
    await_launches();
    __shared__ double arena[192];  // values of one sample, dead ones make room
    const long long sample = blockIdx.x;
    const double* const a0_row = a0 + sample * 64;
    float* const out_row = out + sample * 1;
    double* const s0 = reinterpret_cast<double*>(arena);
    // reshape: (B, 64, 1, 1) -> (B, 64)
    for (int i = threadIdx.x; i < 64; i += 512) {
        s0[i] = widened(a0_row[i]);
    }
    __syncthreads();
    double* const s1 = reinterpret_cast<double*>(arena + 64);
    // matmul: (B, 64) @ (128, 64) -> (B, 128)
    for (int first = 0; first < 128; first += 512 / 8) {
        const int row = min(first + int(threadIdx.x) / 8, 127), lane = threadIdx.x % 8;
        const bool own = first + int(threadIdx.x) / 8 < 128;
        const double total = rows::dot<8, 64>([&](int r) { return s0[r]; }, [&](int r) { return widened(a1[row * 64 + r]); });
        if (own && lane == 0) s1[row] = total + widened(a2[row]);
    }
    __syncthreads();
    float* const s2 = reinterpret_cast<float*>(arena);
    // add: (B, 128, 1, 1) -> (B, 128, 1, 1)
    for (int i = threadIdx.x; i < 128; i += 512) {
        const double v0 = s1[i];
        const float v1 = float(v0);
        const float v2 = widened(a3[i]);
        const float v3 = v1 + v2;
        s2[i] = v3;
    }
    __syncthreads();
    float* const s3 = reinterpret_cast<float*>(arena + 64);
    // logsumexp: (B, 128, 1, 1) -> (B, 1, 1, 1)
    {
        constexpr int row = 0;
        const int lane = threadIdx.x % 32;
        const bool own = threadIdx.x < 32;
        const auto element = [&](int r) { return s2[r]; };
        const float most = rows::over<32>(128, -float(INFINITY), element, rows::Greater());
        const float shift = fabs(most) == float(INFINITY) ? float(0) : most;  // nothing to subtract
        const double total = rows::over<32>(128, 0.0, [&](int r) { return exp(element(r) - shift); }, rows::Add());
        if (own && lane == 0) s3[row] = float(float(log(total)) + shift);
    }
    __syncthreads();
    // mul: (B, 1) -> (B, 1)
    for (int i = threadIdx.x; i < 1; i += 512) {
        const float v0 = s3[0];
        const float v1 = v0 * 10.0f;
        out_row[i] = narrow_to<float>::of(v1);
    }
}
"""


FUSED_LINEAR_ADD_LOGSUMEXP_MUL_LAUNCHER = r"""
extern "C" const char* launch_fused_linear_add_logsumexp_mul(const double* a0, const double* a1, const double* a2,
    const float* a3, float* out, int batch, cudaStream_t stream) {
    return failure(launch(fused_linear_add_logsumexp_mul, batch, 512, 0, stream, a0, a1, a2, a3, out));
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
        name=f"fused_rangesum_48940bb0_sm_{arch}",
        cpp_sources="",
        cuda_sources=[
            FAILURE,
            "namespace of_fused_rangesum {",
            FUSED_RANGESUM,
            FUSED_RANGESUM_LAUNCHER,
            "}",
            "namespace of_fused_linear_add_logsumexp_mul {",
            FUSED_LINEAR_ADD_LOGSUMEXP_MUL,
            FUSED_LINEAR_ADD_LOGSUMEXP_MUL_LAUNCHER,
            "}",
        ],
        extra_cuda_cflags=[f"-gencode=arch=compute_{arch},code=sm_{arch}", "-std=c++17"],
        no_implicit_headers=True,
        is_python_module=False,
    )
    kernels = ctypes.CDLL(path)
    kernels.launch_fused_rangesum.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_longlong] * 2 + [ctypes.c_void_p]
    kernels.launch_fused_rangesum.restype = ctypes.c_char_p
    kernels.launch_fused_linear_add_logsumexp_mul.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] + [ctypes.c_void_p]
    kernels.launch_fused_linear_add_logsumexp_mul.restype = ctypes.c_char_p
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
def fused_rangesum_sizes(x_shape: torch.Size) -> tuple[tuple[int, ...], ...]:
    """Gives the output's shape, and the numbers that the launcher takes."""
    expect("fused_rangesum", "x", x_shape, (None, None, None, None))
    n0, n1, n2, n3 = x_shape[0], x_shape[1], x_shape[2], x_shape[3]
    planes = n0 * n1
    length = n2 * n3
    return (n0, n1, 1, 1), (planes, length)


def fused_rangesum_launch(x: torch.Tensor) -> torch.Tensor:
    """Launches the kernel and returns out."""
    out_shape, numbers = fused_rangesum_sizes(x.shape)
    x = dense("fused_rangesum", "x", x, torch.float32)
    out = torch.empty(out_shape, dtype=torch.float64, device=x.device)
    device = x.get_device()
    check(
        "fused_rangesum",
        library(device).launch_fused_rangesum(x.data_ptr(), out.data_ptr(), *numbers, raw_stream(device)),
    )
    return out


def fused_rangesum_reference(x):
    """The same in PyTorch's own operations, which gradients go through."""
    x = x.sum(3, keepdim=True)
    x = x.sum(2, keepdim=True, dtype=torch.float64)  # (B, 64, 1, 1)
    return x


def fused_rangesum(x: torch.Tensor) -> torch.Tensor:
    """rangesum in one launch."""
    return differentiable(fused_rangesum_launch, fused_rangesum_reference, x)


@lru_cache(maxsize=256)
def fused_linear_add_logsumexp_mul_sizes(
    a0_shape: torch.Size, a1_shape: torch.Size, a2_shape: torch.Size, a3_shape: torch.Size
) -> tuple[tuple[int, ...], ...]:
    """Gives the output's shape, and the numbers that the launcher takes."""
    expect("fused_linear_add_logsumexp_mul", "a0", a0_shape, (None, 64, 1, 1))
    batch = a0_shape[0]
    expect("fused_linear_add_logsumexp_mul", "a1", a1_shape, (128, 64))
    expect("fused_linear_add_logsumexp_mul", "a2", a2_shape, (128,))
    expect("fused_linear_add_logsumexp_mul", "a3", a3_shape, (128, 1, 1))
    if batch >= 2**31:
        raise ValueError(f"fused_linear_add_logsumexp_mul counts in 32 bits, too few for batch={batch}")
    return (batch, 1), (batch,)


def fused_linear_add_logsumexp_mul_launch(
    a0: torch.Tensor, a1: torch.Tensor, a2: torch.Tensor, a3: torch.Tensor
) -> torch.Tensor:
    """Launches the kernel and returns out."""
    out_shape, numbers = fused_linear_add_logsumexp_mul_sizes(a0.shape, a1.shape, a2.shape, a3.shape)
    a0 = dense("fused_linear_add_logsumexp_mul", "a0", a0, torch.float64)
    a1 = dense("fused_linear_add_logsumexp_mul", "a1", a1, torch.float64)
    a2 = dense("fused_linear_add_logsumexp_mul", "a2", a2, torch.float64)
    a3 = dense("fused_linear_add_logsumexp_mul", "a3", a3, torch.float32)
    out = torch.empty(out_shape, dtype=torch.float32, device=a0.device)
    device = a0.get_device()
    check(
        "fused_linear_add_logsumexp_mul",
        library(device).launch_fused_linear_add_logsumexp_mul(
            a0.data_ptr(), a1.data_ptr(), a2.data_ptr(), a3.data_ptr(), out.data_ptr(), *numbers, raw_stream(device)
        ),
    )
    return out


def fused_linear_add_logsumexp_mul_reference(a0, a1, a2, a3):
    """The same in PyTorch's own operations, which gradients go through."""
    B = a0.shape[0]
    a0 = a0.reshape((B, 64))  # (B, 64)
    a0 = F.linear(a0, a1, a2)  # (B, 128)
    del a1, a2
    a0 = a0.reshape((B, 128, 1, 1))  # (B, 128, 1, 1)
    a0 = a0.to(torch.float32)  # (B, 128, 1, 1)
    a0 = a0 + a3  # (B, 128, 1, 1)
    del a3
    a0 = torch.logsumexp(a0, 1, keepdim=True)  # (B, 1, 1, 1)
    a0 = a0.reshape((B, 1))  # (B, 1)
    a0 = a0 * 10.0  # (B, 1)
    return a0


def fused_linear_add_logsumexp_mul(
    a0: torch.Tensor, a1: torch.Tensor, a2: torch.Tensor, a3: torch.Tensor
) -> torch.Tensor:
    """linear, add, logsumexp, mul in one launch."""
    return differentiable(
        fused_linear_add_logsumexp_mul_launch, fused_linear_add_logsumexp_mul_reference, a0, a1, a2, a3
    )


# ---- The model that does less ----------------------------------------------------------------------------------------


# What the kernels were made for; a model that is configured otherwise runs its original forward.
MADE_FOR = {
    "parameters and buffers": ("bias",),
    "scale": 10.0,
    "conv_transpose": (
        "torch.ConvTranspose2d",
        {
            "parameters and buffers": ("weight", "bias"),
            "in_channels": 64,
            "out_channels": 128,
            "kernel_size": (3, 3),
            "stride": (1, 1),
            "padding": (0, 0),
            "dilation": (1, 1),
            "transposed": True,
            "output_padding": (0, 0),
            "groups": 1,
            "padding_mode": "zeros",
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
    found = (model.bias, model.conv_transpose.weight, model.conv_transpose.bias) if fits else None
    SEEN[model] = live, [*map(len, live)], filled, [*chain.from_iterable(filled)], found
    return found


# Shapes and dtypes of these tensors.
KINDS = [((128, 1, 1), torch.float32), ((64, 128, 3, 3), torch.float32), ((128,), torch.float32)]


@cache
def kernels_for(device: torch.device) -> str:
    """The kind of kernels that run on a device, if any of these do."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
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


def covered(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The model's `weights` where the kernels were made for a call; `None` where the original runs."""
    own = weights(model) if called_plainly() else None
    fits = (
        own is not None
        and kernels_for(x.device)
        and ordinary(x.device, x, *own)
        and x.dtype is torch.float32
        and x.shape[1:] == (64, 512, 512)
        and x.shape[0] >= 2
        and [(w.shape, w.dtype) for w in own] == KINDS
    )
    return own if fits else None


KEPT = WeakKeyDictionary()  # for each model: its weights when something was last derived from them, and what


def derived(derive, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`derive()`, a method that reads these weights alone: kept while none changes and no gradient flows through."""
    model, now, trains = derive.__self__, [], torch.is_grad_enabled()
    for source in sources:
        if source.is_inference() or (trains and source.requires_grad):
            return derive()
        now.append((id(source), source._version, source.data_ptr()))
    kept = KEPT.get(model)
    if kept is None or kept[0] != now:
        with torch.inference_mode(False), torch.no_grad():
            kept = KEPT[model] = now, derive(), sources  # the weights too, so that nothing else gets their ids
    return kept[1]


class ModelNew(Model):
    """`Model` with its forward computed by the kernels, where they were made for the call."""

    def forward(self, x: torch.Tensor):
        """As the original."""
        own = covered(self, x)
        if own is None:
            return super().forward(x)
        bias, conv_transpose_weight, conv_transpose_bias = own
        with torch.cuda.device(x.get_device()):
            return self.fused(x, *derived(self.derive, conv_transpose_bias, conv_transpose_weight), bias)

    def fused(self, x, conv_transpose_weight, conv_transpose_bias, bias):
        """The rewritten forward."""
        x = fused_rangesum(x)  # (B, 64, 1, 1)
        x = fused_linear_add_logsumexp_mul(x, conv_transpose_weight, conv_transpose_bias, bias)  # (B, 1)
        return x

    def derive(self):
        """What the forward needs of weights alone."""
        conv_transpose_weight = self.conv_transpose.weight.to(torch.float64)  # (64, 128, 3, 3)
        conv_transpose_weight = conv_transpose_weight.sum((2, 3), keepdim=True)  # (64, 128, 1, 1)
        conv_transpose_weight = conv_transpose_weight * 3.785068661145513e-06  # (64, 128, 1, 1)
        conv_transpose_weight = conv_transpose_weight.reshape((1, 64, 128))  # (1, 64, 128)
        conv_transpose_weight = conv_transpose_weight.permute(0, 2, 1)  # (1, 128, 64)
        conv_transpose_weight = conv_transpose_weight.reshape((128, 64, 1, 1))  # (128, 64, 1, 1)
        conv_transpose_weight = conv_transpose_weight.reshape((128, 64))  # (128, 64)
        conv_transpose_bias = self.conv_transpose.bias.to(torch.float64)  # (128)
        conv_transpose_weight = conv_transpose_weight.contiguous()
        return conv_transpose_weight, conv_transpose_bias
