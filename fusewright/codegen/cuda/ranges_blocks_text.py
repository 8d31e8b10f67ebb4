"""The texts that `fusewright.codegen.cuda.ranges_blocks` fills in."""

FEW_OF = """
// The sum of at(0), at(1), ..., `count` of them and at most MOST, in their own type: loads first, and no branches.
template <int MOST, typename At>
__device__ __forceinline__ auto few_of(At at, int count) {
    decltype(at(0)) sum = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i < count) sum += at(i);
    return sum;
}

"""

SUM_OF = """
// The same for any number: a few additions in their own type, all others in float64.
template <typename At>
__device__ __forceinline__ double sum_of(At at, int count) {
    double sum = 0;
    for (int i = 0; i < count; i += FEW)
        sum += few_of<FEW>([&](int j) { return at(i + j); }, min(FEW, count - i));
    return sum;
}

"""

SLOT = """
struct Slot { int begin, count; };  // neighbouring indices
"""
SLOT_STEP = """
struct Slot { int begin, count, step; };  // indices that are `step` apart
"""

ENTRY = """
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
$name(const Element* __restrict__ x, $Result* __restrict__ out, index_t planes) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Sum* const even = reinterpret_cast<Sum*>(shared_memory);
    Sum* const odd = even + EVEN;
    $parts

    $stages
    $write
}
"""

# The outermost axis, whose rows lie in memory.

COPY = """
// The rows as they are, several loads at once.
#pragma unroll 8
for (int i = threadIdx.x; i < PLANES * READ_W; i += THREADS)
    even[i / READ_W * PITCH + i % READ_W] = value(x[$plane * PLANE + $at]);
"""

KEPT = """
$tables
$place
$at
$to
$unlike
$sums
"""

UNLIKE = """
if (group == $group) {
    $tables
    $sums
    continue;
}
"""

NOTHING = """
#pragma unroll
for (int s = 0; s < $slots; ++s) {
    const Sum sum = 0;
    $store
}
"""

SUMS = """
Sum kept[KEPT];
#pragma unroll
for (int k = 0; k < KEPT; ++k)
    $read
#pragma unroll
for (int s = 0; s < $slots; ++s) {
    $some
    $add
    $store
}
"""

AT = """
const auto at = [&](int index) { return $element; };
"""
AT_WITHIN = """
const auto at = [&](int index) {
    const bool within = $index >= 0 && $index < $most;
    return within ? $element : $T(0);
};
"""

ADD_FEW = """
Sum sum = 0;
#pragma unroll
for (int k = 0; k < KEPT; ++k)
    if (KEPT_OF[s] >> k & 1) sum += kept[k];
"""

ADD_MANY = """
double sum = 0;
#pragma unroll
for (int begin = 0; begin < KEPT; begin += FEW) {
    if ((KEPT_OF[s] >> begin & (1 << FEW) - 1) == 0) continue;
    Sum few = 0;
#pragma unroll
    for (int k = begin; k < begin + FEW && k < KEPT; ++k)
        if (KEPT_OF[s] >> k & 1) few += kept[k];
    sum += few;
}
"""

OUTER = """
$s
const Slot slot = SLOT_$A[$slot];
const Element* const from = x + $plane * PLANE + $column;
even[row * $pitch + column] =
    $sum;
"""

# Inner axes, in shared memory.

MIDDLE = """
const int w = i % READ_W, s = i / READ_W;
const Slot slot = SLOT_H[$slot];
const Sum* const from = even + (before * READ_H + $begin) * READ_W + w;
odd[(before * $part + s) * PITCH + w] = $sum;
"""

LAST = """
const Slot slot = SLOT_W[$slot];
const Sum* const from = $source + row * PITCH + $begin;
$target[$row * OUT_PITCH + s] = $sum;
"""

WRITE = """
// Results lie side by side, in another order than their slots.
const int count = $count;
for (int i = threadIdx.x; i < count; i += THREADS) {
    $decode
    const Sum total = $total;
    out[first * RESULTS + i] = $result;
}
"""

WRITE_ROWS = """
$decode
$beyond
$scales
const Sum total = $target[row * OUT_PITCH + $s];
out[first * RESULTS + $place] = $result;
"""
