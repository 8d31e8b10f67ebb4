"""The texts that `fusewright.codegen.cuda.ranges` fills in."""

HEAD = """
using index_t = long long;
using Element = $Element;

constexpr int THREADS = $threads, TEAM = $team;  // of a block, and of them per plane
constexpr int BLOCKS = $blocks, LOADS = $loads;  // per multiprocessor at a time; under way per thread
constexpr int LANES = TEAM < 32 ? TEAM : 32, GROUPS = THREADS / LANES;  // threads that shuffles join
constexpr int CELLS = $cells, SLOTS = $slots;  // different sums per plane, and results made of them

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

"""

ADD = """
// Adds LOADS packs (or the first `packs` of them, unless ALL) at from(0), from(1), ... to the columns.  All loads are
// under way before the first is used.
template <bool ALL, int COUNT, typename From>
__device__ __forceinline__ void add(From from, int packs, double (&column)[COUNT]) {
    Pack<COUNT> pack[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; ++u)
        if (ALL || u < packs) pack[u].word = __ldg(reinterpret_cast<const typename Pack<COUNT>::Word*>(from(u)));
    $T few[COUNT] = {};  // a few additions in the type of the values, all others in float64
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
        if (!ALL && u >= packs) break;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) few[e] += value(pack[u].at[e]);
    }
#pragma unroll
    for (int e = 0; e < COUNT; ++e) column[e] += few[e];
}

"""

JOINED = """
// The sum over LANES neighbouring threads, in the first of them.
__device__ __forceinline__ double joined(double sum) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    return sum;
}

"""

ABOUT_ONE = """
// Adds this thread's share of the elements [first, last) of a plane to `sum`.
"""
ABOUT_PERIODIC = """
// Adds this thread's share of the elements [first, last) of a plane to sums[index % PERIOD].
"""
GATHER_ONE = """
for (int e = 0; e < COUNT; ++e) sum += column[e];
"""
GATHER_PERIODIC = """
for (int e = 0; e < COUNT; ++e)
#pragma unroll
    for (int q = 0; q < PERIOD; ++q)
        if ((e + COUNT - skew) % PERIOD == q) sums[q] += column[e];
"""
SINGLE_ONE = """
sum += value(plane[i]);
"""
SINGLE_PERIODIC = """
#pragma unroll
for (int q = 0; q < PERIOD; ++q)
    if (i % PERIOD == q) sums[q] += value(plane[i]);
"""
OWN = """
const index_t from = begin, until = end;
"""
SHARE = """
// The blocks along y share the packs of a plane; the first one takes the ends as well.
const index_t share = (end - begin + gridDim.y - 1) / gridDim.y;
const index_t from = begin + share * blockIdx.y, until = min(end, from + share);
"""

TAKE = """
$about
__device__ __forceinline__ void take(const Element* plane, index_t first, index_t last, int lane, $sums) {
    constexpr int COUNT = 16 / sizeof(Element);
    // Packs are aligned in memory; the plane begins `skew` elements into one.
    const int skew = reinterpret_cast<size_t>(plane) % 16 / sizeof(Element);
    const index_t begin = (first + skew + COUNT - 1) / COUNT, end = max(begin, (last + skew) / COUNT);
    $share
    double column[COUNT] = {};
    index_t p = from + lane;
    const auto at = [&](int u) { return plane - skew + (p + u * TEAM) * COUNT; };
#pragma unroll 1
    for (; p + (LOADS - 1) * TEAM < until; p += LOADS * TEAM) add<true>(at, LOADS, column);
    if (p < until) add<false>(at, int(until - p + TEAM - 1) / TEAM, column);
#pragma unroll
    $gather
    $ends
    const index_t head = min(begin * COUNT - skew, last), tail = end * COUNT - skew;
    for (index_t i = first + lane; i < head; i += TEAM) {
        $single
    }
    for (index_t i = tail + lane; i < last; i += TEAM) {
        $single
    }
}

"""

ROWS_2D = """
// Rows that belong to the same slots: where row r of them is, in elements.
struct Rows {
    int offset, stride, count;
    __device__ __forceinline__ int at(int r) const { return offset + r * stride; }
};
"""

ROWS_3D = """
// Rows that belong to the same slots, `inside` of them per plane of rows: where row r is, in elements.
struct Rows {
    int offset, outer, inner, inside, count;
    __device__ __forceinline__ int at(int r) const { return offset + r / inside * outer + r % inside * inner; }
};
"""

SUM_PLANE = """
__device__ __forceinline__ int cell_of(int column) {
    for (int k = 0; k < SEGMENTS; ++k)
        if (column >= SEGMENT[k].begin && column < SEGMENT[k].end) return k * PERIOD + column % PERIOD;
    return -1;
}

// Adds this thread's share of a plane to the cells of its group: COUNT neighbouring columns of every DOWN-th row.
template <int COUNT>
__device__ __forceinline__ void sum_plane(const Element* plane, int lane, double* cells) {
    constexpr int BEGIN = FIRST / COUNT * COUNT, PACKS = (LAST - BEGIN + COUNT - 1) / COUNT;
    constexpr int TURNS = (PACKS + TEAM - 1) / TEAM, ACROSS = (PACKS + TURNS - 1) / TURNS, DOWN = TEAM / ACROSS;
    const int across = lane % ACROSS, down = lane / ACROSS;
    for (int turn = 0; turn < TURNS; ++turn) {
        const int first = BEGIN + (turn * ACROSS + across) * COUNT;
        const bool working = down < DOWN && first < LAST;
        const Element* const from = plane + first;
        int cell[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) cell[e] = cell_of(first + e);
        for (int k = 0; k < SETS; ++k) {
            const Rows rows = ROWS[k];
            const int count = working ? rows.count : 0, stride = DOWN$part;
            double column[COUNT] = {};
            int r = $start;
            const auto at = [&](int u) { return from + rows.at(r + u * stride); };
#pragma unroll 1
            for (; r + (LOADS - 1) * stride < count; r += LOADS * stride) add<true>(at, LOADS, column);
            if (r < count) add<false>(at, (count - r + stride - 1) / stride, column);
            for (int c = 0; c < SEGMENTS * PERIOD; ++c) {
                double sum = 0;
#pragma unroll
                for (int e = 0; e < COUNT; ++e)
                    if (cell[e] == c) sum += column[e];
                sum = joined(sum);
                if (threadIdx.x % LANES == 0) cells[k * SEGMENTS * PERIOD + c] += sum;
            }
        }
    }
}

"""

# Where a block has a plane to itself, and the sums of its rows fit shared memory.
PARKED = """
constexpr int WIDTH = $width, HEIGHT = PLANE / WIDTH;  // elements of a row, and rows
constexpr int COUNT = $count;  // neighbouring columns of a thread
constexpr int BEGIN = FIRST / COUNT * COUNT, PACKS = (LAST - BEGIN + COUNT - 1) / COUNT;
constexpr int TURNS = (PACKS + THREADS - 1) / THREADS, ACROSS = (PACKS + TURNS - 1) / TURNS, DOWN = THREADS / ACROSS;
constexpr int PITCH = ACROSS * COUNT;  // columns of a turn
constexpr int COLUMN_CELLS = SEGMENTS * PERIOD, ROW_SLOTS = SLOTS / COLUMN_SLOTS;
constexpr int NONE = 255;  // the set of rows that are in no slot

// Adds this thread's rows of a plane to parked[set][down], COUNT columns of each: rows come as they lie in memory, so
// that as many loads are under way wherever sets begin and end.
__device__ __forceinline__ void park(const Element* plane, int turn, const unsigned char* set_of, double* parked) {
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const int first = BEGIN + (turn * ACROSS + across) * COUNT, stride = DOWN$part;
    if (down >= DOWN || first >= LAST) return;
    double* const own = parked + down * PITCH + across * COUNT;
#pragma unroll 1
    for (int r = $start; r < HEIGHT; r += LOADS * stride) {
        Pack<COUNT> pack[LOADS];
        int set[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            const int row = r + u * stride;
            set[u] = row < HEIGHT ? set_of[row] : NONE;
            const Element* const from = plane + row * WIDTH + first;
            if (set[u] != NONE) pack[u].word = __ldg(reinterpret_cast<const typename Pack<COUNT>::Word*>(from));
        }
        $T few[COUNT] = {};  // a few additions in the type of the values, all others in float64
#pragma unroll
        for (int u = 0; u < LOADS; ++u) {
            if (set[u] == NONE) continue;
            const bool more = u > 0 && set[u > 0 ? u - 1 : 0] == set[u];
#pragma unroll
            for (int e = 0; e < COUNT; ++e) few[e] = more ? few[e] + value(pack[u].at[e]) : value(pack[u].at[e]);
            if (u + 1 < LOADS && set[u + 1 < LOADS ? u + 1 : u] == set[u]) continue;
#pragma unroll
            for (int e = 0; e < COUNT; ++e) own[set[u] * (DOWN * PITCH) + e] += few[e];
        }
    }
}

// Adds up what is parked of one turn: first what the threads of a column have, then the columns of every cell.
__device__ __forceinline__ void collect(int turn, double* parked, double* cells) {
    for (int i = threadIdx.x; DOWN > 1 && i < SETS * PITCH; i += THREADS) {
        double* const own = parked + i / PITCH * (DOWN * PITCH) + i % PITCH;
        double sum = 0;
#pragma unroll
        for (int down = 0; down < DOWN; ++down) sum += own[down * PITCH];
        own[0] = sum;
    }
    __syncthreads();
    const int from = BEGIN + turn * PITCH, until = from + PITCH;
    const auto sum_of = [&](int cell, int lane, int lanes) {
        const Segment segment = SEGMENT[cell / PERIOD % SEGMENTS];
        const int begin = max(segment.begin, from), end = min(segment.end, until);
        const int first = begin + (cell % PERIOD + PERIOD - begin % PERIOD) % PERIOD;
        const double* const own = parked + cell / COLUMN_CELLS * (DOWN * PITCH) - from;
        double sum = 0;
#pragma unroll 4
        for (int column = first + lane * PERIOD; column < end; column += lanes * PERIOD) sum += own[column];
        return sum;
    };
    const auto is_wide = [&](int cell) {
        const Segment segment = SEGMENT[cell / PERIOD % SEGMENTS];
        return segment.end - segment.begin > 16 * PERIOD;
    };
    for (int cell = threadIdx.x; cell < CELLS; cell += THREADS)
        if (!is_wide(cell)) cells[cell] += sum_of(cell, 0, 1);
    for (int cell = threadIdx.x / 32; cell < CELLS; cell += THREADS / 32) {
        if (!is_wide(cell)) continue;
        const double sum = joined(sum_of(cell, threadIdx.x % 32, 32));
        if (threadIdx.x % 32 == 0) cells[cell] += sum;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
$name(const Element* __restrict__ x, $Result* __restrict__ $to, index_t planes) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    double* const parked = reinterpret_cast<double*>(shared_memory);
    __shared__ double cells[CELLS], of_rows[ROW_SLOTS * COLUMN_CELLS];
    __shared__ unsigned char set_of[HEIGHT];
    for (int row = threadIdx.x; row < HEIGHT; row += THREADS) set_of[row] = NONE;
    for (int cell = threadIdx.x; cell < CELLS; cell += THREADS) cells[cell] = 0;
    __syncthreads();
    for (int k = 0; k < SETS; ++k)
        for (int r = threadIdx.x; r < ROWS[k].count; r += THREADS) set_of[ROWS[k].at(r) / WIDTH] = k;
    const index_t plane = blockIdx.x;
    for (int turn = 0; turn < TURNS; ++turn) {
        for (int i = threadIdx.x; i < SETS * DOWN * PITCH; i += THREADS) parked[i] = 0;
        __syncthreads();
        park(x + plane * PLANE, turn, set_of, parked);
        __syncthreads();
        collect(turn, parked, cells);
    }
    for (int i = threadIdx.x; i < ROW_SLOTS * COLUMN_CELLS; i += THREADS) {
        const int slot = i / COLUMN_CELLS, c = i % COLUMN_CELLS;
        double sum = 0;
#pragma unroll 4
        for (int k = 0; k < SETS; ++k) sum += ROW_SLOTS_OF[k] >> slot & 1 ? cells[k * COLUMN_CELLS + c] : 0.0;
        of_rows[i] = sum;
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < SLOTS; slot += THREADS) {
        double total = 0;
#pragma unroll 4
        for (int c = 0; c < COLUMN_CELLS; ++c)
            total += SLOTS_OF[c] >> slot % COLUMN_SLOTS & 1 ? of_rows[slot / COLUMN_SLOTS * COLUMN_CELLS + c] : 0.0;
        $store
    }
}
"""

BELONGS_LINE = """
__device__ __forceinline__ bool belongs(int cell, int slot) { return SLOTS_OF[cell] >> slot & 1; }
"""
BELONGS_PLANES = """
__device__ __forceinline__ bool belongs(int cell, int slot) {
    const bool row = ROW_SLOTS_OF[cell / (SEGMENTS * PERIOD)] >> slot / COLUMN_SLOTS & 1;
    return row && (SLOTS_OF[cell % (SEGMENTS * PERIOD)] >> slot % COLUMN_SLOTS & 1);
}
"""

WRITE_ONE = """
__syncthreads();
const index_t first = index_t(blockIdx.x) * (THREADS / TEAM);
for (int team = threadIdx.x; team < THREADS / TEAM && first + team < planes; team += THREADS) {
    constexpr int slot = 0;
    double total = 0;
    for (int group = 0; group < TEAM / LANES; ++group) total += cells[team * (TEAM / LANES) + group][0];
    $store
}
"""

WRITE = """
__syncthreads();
const index_t first = index_t(blockIdx.x) * (THREADS / TEAM);
for (int i = threadIdx.x; i < THREADS / TEAM * SLOTS; i += THREADS) {
    const int team = i / SLOTS, slot = i % SLOTS;
    if (first + team >= planes) break;
    double total = 0;
    for (int cell = 0; cell < CELLS; ++cell)
        if (belongs(cell, slot))
            for (int group = 0; group < TEAM / LANES; ++group) total += cells[team * (TEAM / LANES) + group][cell];
    $store
}
"""

TOTAL = """
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
$name(const Element* __restrict__ x, $Result* __restrict__ $to, index_t planes, index_t length) {
    await_launches();
    __shared__ double cells[GROUPS][CELLS];
    const index_t plane = min(index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM, planes - 1);
    double sum = 0;
    take(x + plane * length, 0, length, threadIdx.x % TEAM, sum);
    sum = joined(sum);
    if (threadIdx.x % LANES == 0) cells[threadIdx.x / LANES][0] = sum;
    $write
}
"""

LINE_ONE = """
double sum = 0;
take(plane, SEGMENT[k].begin, SEGMENT[k].end, lane, sum);
sum = joined(sum);
if (threadIdx.x % LANES == 0) cells[threadIdx.x / LANES][k] = sum;
"""

LINE_PERIODIC = """
double sums[PERIOD] = {};
take(plane, SEGMENT[k].begin, SEGMENT[k].end, lane, sums);
#pragma unroll
for (int q = 0; q < PERIOD; ++q) {
    const double sum = joined(sums[q]);
    if (threadIdx.x % LANES == 0) cells[threadIdx.x / LANES][k * PERIOD + q] = sum;
}
"""

LINE = """
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
$name(const Element* __restrict__ x, $Result* __restrict__ $to, index_t planes) {
    await_launches();
    __shared__ double cells[GROUPS][CELLS];
    const index_t job = min(index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM, planes - 1);
    const Element* const plane = x + job * LENGTH;
    const int lane = threadIdx.x % TEAM;
#pragma unroll 1
    for (int k = 0; k < SEGMENTS; ++k) {
        $segment
    }
    $write
}
"""

PLANES = """
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
$name(const Element* __restrict__ x, $Result* __restrict__ $to, index_t planes) {
    await_launches();
    __shared__ double cells[GROUPS][CELLS];
    double* const own = cells[threadIdx.x / LANES];
    if (threadIdx.x % LANES == 0)
        for (int cell = 0; cell < CELLS; ++cell) own[cell] = 0;
    const index_t plane = min(index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM, planes - 1);
    const int lane = threadIdx.x % TEAM;
    sum_plane<$count>(x + plane * PLANE, lane, own);
    $write
}
"""

FINISH = """

// Adds up the parts of every sum, in their order: a warp per sum.
extern "C" __global__ void __launch_bounds__(THREADS)
${name}_finish(const double* __restrict__ scratch, $Result* __restrict__ out, index_t results, int parts$length) {
    await_launches();
    const index_t result = index_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    double total = 0;
    for (int part = threadIdx.x % 32; part < parts && result < results; part += 32)
        total += scratch[part * results + result];
    total = joined(total);
    if (threadIdx.x % 32 != 0 || result >= results) return;
    $slot
    out[$place] = $result;
}
"""
