"""The texts that `fusewright.codegen.cuda.ranges_walks` fills in."""

WINDOW = """
struct Window { int begin, count; };  // rows of a slot along h, which are STEP_H apart, some of them beyond an end
"""

WALK = """
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
$name(const Element* __restrict__ x, $Result* __restrict__ out, index_t planes) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Sum* const copied = reinterpret_cast<Sum*>(shared_memory);
    Sum* const summed = copied + COPIED;
    $part
    const Element* const from_plane = x + plane * PLANE;
    $Result* const to_plane = out + plane * RESULTS;

    // Where a thread's columns begin in a slice, where their results go, and what of them it still needs.
    $hold
#pragma unroll
    for (int c = 0; c < EACH; ++c) {
        const int column = min(int(threadIdx.x) + c * THREADS, COLUMNS - 1);
        $column
    }
    $clear

    // A step's elements lie side by side; those of the next step are on their way.
    Element next[LOADS];
    const auto fetch = [&](int begin) {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const int i = threadIdx.x + n * THREADS;
            if ((n + 1) * THREADS <= STEP || i < STEP) next[n] = $next;
        }
    };
    fetch((first_group * DISTANCE + FIRST) * SLICE);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const int begin = ((first_group + step) * DISTANCE + FIRST) * SLICE;
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const int i = threadIdx.x + n * THREADS;
            if ((n + 1) * THREADS <= STEP || i < STEP) copied[$place] = $value;
        }
        __syncthreads();
        if (step + 1 < steps) fetch(begin + DISTANCE * SLICE);

        $rows
        __syncthreads();

        // A thread's columns: sums along $outer of what they have of several slices.
        const int group = first_group + step - BEFORE;
#pragma unroll
        for (int c = 0; c < EACH; ++c) {
            Sum window[READ];
            $take
            $idle
            $results
        }
    }
}
"""

AT_WINDOW = """
const auto at = [&](int index) { return window[index]; };
"""

KEEP = """
#pragma unroll
for (int k = 0; k < READ - FRESH; ++k) window[k] = seen[c][k];
"""

TAKE_ROWS = """
#pragma unroll
for (int f = 0; f < FRESH; ++f)
    window[READ - FRESH + f] = summed[f * OUT_PITCH + from[c]];
"""

TAKE_WINDOWS = """
#pragma unroll
for (int f = 0; f < FRESH; ++f) {
    const Sum* const row = summed + f * (ROWS_H * OUT_PITCH) + from[c];
    window[READ - FRESH + f] = few_of<$most>([&](int j) { return row[j * (STEP_H * OUT_PITCH)]; }, $count);
}
"""

SHARE = """
#pragma unroll
for (int k = 0; k < READ - FRESH; ++k) seen[c][k] = window[k + FRESH];
"""

FORGET = """
#pragma unroll
for (int c = 0; c < EACH; ++c)
#pragma unroll
    for (int k = 0; k < READ - FRESH; ++k) seen[c][k] = 0;
"""

ZEROS = """
// Rows beyond the ends are zeros.
for (int i = threadIdx.x; i < FRESH * ROWS_H * OUT_PITCH; i += THREADS) {
    const int row = i / OUT_PITCH % ROWS_H;
    if (row < ABOVE || row >= ABOVE + H) summed[i] = 0;
}
"""
