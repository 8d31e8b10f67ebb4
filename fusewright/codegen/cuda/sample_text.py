"""The texts that `fusewright.codegen.cuda.sample` fills in."""

# `rows` is a namespace of its own, because a program may be the tail of another kernel.
ROWS = """
// A team of LANES neighbouring threads works on one row; joins are in a fixed order.
namespace rows {
constexpr int THREADS = $threads;
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

"""

MAP = """
for (int i = ${begin}threadIdx.x; i < $count; i += $threads) {
    $lines
    $store
}
"""

TEAMS = """
for (int first = $begin; first < $rows; first += $threads / $lanes) {
    const int row = min(first + int(threadIdx.x) / $lanes, $last), lane = threadIdx.x % $lanes;
    const bool own = first + int(threadIdx.x) / $lanes < $rows;
    $element
    $passes
    $store
}
"""

ONE_TEAM = """
{
    $row
    const int lane = threadIdx.x % $lanes;
    const bool own = threadIdx.x < $lanes;
    $element
    $passes
    $store
}
"""

SHARE = """
const int begin = blockIdx.y * $share, end = min(begin + $share, $rows);    // this block's rows of the product
"""

KERNEL = """
extern "C" __global__ void __launch_bounds__($threads)
$name($parameters) {
    await_launches();
    $arena
    const long long sample = blockIdx.x;
    $share
    $body
}
"""
