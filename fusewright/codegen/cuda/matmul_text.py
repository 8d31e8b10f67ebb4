"""The CUDA text of float32 matmuls on the tensor cores of Hopper (`fusewright.schedule.matmul`)."""

from __future__ import annotations

CONSTANTS = """
// x (rows, K) times w is (rows, O): a block has FEATURES of the features, 64 of each of its warpgroups, which are the
// rows of what they multiply, and COLUMNS rows of x, which are its columns.
constexpr int K = $summed$features;
$samples
constexpr int COLUMNS = $columns, WARPGROUPS = $groups, FEATURES = 64 * WARPGROUPS;
// K is gone through in chunks, [part of a number][vector][row of x][4 numbers]; the next ones are on their way.
// Each of PARTS blocks has a part of them.
constexpr int CHUNK = 32, VECTORS = CHUNK / 4, CHUNKS = (K + CHUNK - 1) / CHUNK, STAGES = $stages;
constexpr int PARTS = $parts, CHUNKS_OF_PART = (CHUNKS + PARTS - 1) / PARTS;
constexpr int MATRIX = VECTORS * COLUMNS * 4;    // numbers
// Those of tf32 that one of x is: the nearest one, or with it what is left.
constexpr int NUMBERS = $numbers, STAGE = NUMBERS * MATRIX;
// What makes up for it that tensor cores truncate a chunk's sum, where that has more than half of its numbers.
constexpr float TRUNCATED = K > CHUNK / 2 ? 1 + 0x1p-23f : 1;
// Copies of chunks are started so many steps ahead that every warp has read what lay there two steps ago.
constexpr int THREADS = 128 * WARPGROUPS, AHEAD = STAGES - 2;

$split

// Four numbers from the k-th on, zeros beyond the last.
__device__ __forceinline__ float4 four(const float* row, int k) {
    if (K % 4 == 0) return k < K ? __ldg(reinterpret_cast<const float4*>(row + k)) : float4{};
    return {k < K ? row[k] : 0, k + 1 < K ? row[k + 1] : 0, k + 2 < K ? row[k + 2] : 0, k + 3 < K ? row[k + 3] : 0};
}
"""

SAMPLES = """
// Rows of a sample: where one is not after the other in memory, a sample is.
constexpr int ROWS = $rows;
"""

# Where a row has a feature, where the results of a row lie side by side, and where those of a feature do; and which
# feature, and which row, is there.
AT = {False: "row * O + feature", True: "(row / ROWS * O + feature) * ROWS + row % ROWS"}
FEATURE = {False: "at % O", True: "at / ROWS % O"}
ROW = {False: "at / O", True: "at / (ROWS * O) * ROWS + at % ROWS"}

# How a thread reads sixteen numbers of a row of x, which lies as (rows, K), and as (K, rows) of every sample.
READ_ROW = {
    False: """
for (int j = 0; j < 4; ++j)
    reinterpret_cast<float4*>(numbers)[j] = four(x + row * K, 16 * sixteen + 4 * j);
""",
    True: """
for (int j = 0; j < 16; ++j) {
    const int k = 16 * sixteen + j;
    numbers[j] = k < K ? __ldg(x + (row / ROWS * K + k) * ROWS + row % ROWS) : 0;
}
""",
}

# Which row of x a thread packs, and whether there is one: of all rows, and of every sample's.
PLACE = {
    False: """
const long long across = i / (COLUMNS * 2 * CHUNKS), row = across * COLUMNS + column;
if (across * COLUMNS >= rows) return;
""",
    True: """
const long long across = i / (COLUMNS * 2 * CHUNKS), across_all = (rows + COLUMNS - 1) / COLUMNS;
if (across >= samples * across_all) return;
const long long of_sample = across % across_all * COLUMNS + column, row = across / across_all * rows + of_sample;
""",
}
INSIDE = {False: "row < rows", True: "of_sample < rows"}

PACK = """
// Split x and lay it out as a block copies it, zeros behind its last row.  Which of a chunk's numbers an instruction
// multiplies together does not matter: vector j of every sixteen has numbers j, j + 4, j + 8 and j + 12, so that a
// thread of the kernel reads four neighbours of a weight, of each vector one.
extern "C" __global__ void __launch_bounds__(256)
${name}_pack(const float* __restrict__ x, float* __restrict__ packed, $counts) {
    await_launches();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    const int column = i % COLUMNS, sixteen = i / COLUMNS % (2 * CHUNKS);
    $place
    float numbers[16] = {};
    if ($inside)
#pragma unroll
        $read
    float* const to = packed + (across * CHUNKS + sixteen / 2) * STAGE + (sixteen % 2 * 4 * COLUMNS + column) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint4 big, small;
        unsigned *const bigs = &big.x, *const smalls = &small.x;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const Split each = split(numbers[4 * p + j]);
            bigs[p] = each.big, smalls[p] = each.small;
        }
        *reinterpret_cast<uint4*>(to + j * 4 * COLUMNS) = big;
        if (NUMBERS == 2) *reinterpret_cast<uint4*>(to + MATRIX + j * 4 * COLUMNS) = small;
    }
}
"""

# How a thread reads its numbers of a weight that lies as (N, K), and as (K, N).
READ = {
    True: """
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const int k = chunk * CHUNK + 16 * (i / 2) + 4 * quad;
    fetched[i] = four(w + (long long)min(first_feature + 8 * (i % 2), O - 1) * K, k);
}
""",
    False: """
#pragma unroll
for (int i = 0; i < 16; ++i) {
    const int k = chunk * CHUNK + 16 * (i / 8) + 4 * quad + i % 4;
    const int feature = min(first_feature + 8 * (i / 4 % 2), O - 1);
    (&fetched[i / 4].x)[i % 4] = k < K ? __ldg(w + (long long)k * O + feature) : 0;
}
""",
}

KERNEL = """
extern "C" __global__ void __launch_bounds__(THREADS, $per_sm)
$name($parameters) {
    await_launches();
    extern __shared__ __align__(128) unsigned char shared_memory[];
    float* const staged = reinterpret_cast<float*>(shared_memory);
    // Whether a stage has landed, and whether it has been read.
    unsigned long long* const landed = reinterpret_cast<unsigned long long*>(staged + STAGES * STAGE);
    unsigned long long* const read = landed + STAGES;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, quad = lane % 4;
    // Blocks that run together have few different rows of x and features: eight times as many as there are rows.
    const int blocks_o = (O + FEATURES - 1) / FEATURES, across_all = int((rows + COLUMNS - 1) / COLUMNS);
    $sample
    const int eights = $block / (8 * blocks_o), of_eight = min(8, across_all - 8 * eights);
    const int at = $block - 8 * eights * blocks_o, across = 8 * eights + at % of_eight;
    const int block_o = at / of_eight, part = blockIdx.y;
    const int first_chunk = part * CHUNKS_OF_PART, steps = min(CHUNKS - first_chunk, CHUNKS_OF_PART);
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; ++i) landing_open(landed + i, 1), landing_open(read + i, THREADS / 32);
    fence_async();
    __syncthreads();
    const auto start_copy = [&](int step) {
        const int stage = step % STAGES, turn = step / STAGES;
        if (step >= steps) return;
        if (turn > 0) landing_wait(read + stage, (turn - 1) % 2);
        const float* const from = packed + ((long long)across * CHUNKS + first_chunk + step) * STAGE;
        copy_bulk(staged + stage * STAGE, from, STAGE * int(sizeof(float)), landed + stage);
        landing_close(landed + stage);
    };
    if (threadIdx.x == 0)
        for (int step = 0; step < AHEAD; ++step) start_copy(step);

    const int first_feature = block_o * FEATURES + 16 * warp + lane / 4;    // and the eighth behind
    float4 fetched[4];    // sixteen numbers of one feature and of the other, and of those behind
    const auto fetch = [&](int chunk) {
        $read
    };
    const auto split_fetched = [&](Split(&to)[4][4]) {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            to[i / 8 * 2 + i % 4 / 2][i / 4 % 2 + i % 2 * 2] = split((&fetched[i / 4].x)[i % 4]);
    };
    float sums[COLUMNS / 8][4] = {};
    // Multiply a chunk by what has been split of the weight, by instruction: of a feature and the eighth behind, first
    // and second numbers.  Meanwhile the next ones are split.
    const auto multiply = [&](int step, const Split(&own)[4][4], Split(&next)[4][4]) {
        const int stage = step % STAGES;
        if (threadIdx.x == 0) start_copy(step + AHEAD);
        landing_wait(landed + stage, step / STAGES % 2);
        const unsigned long long x = shared_matrix(staged + stage * STAGE, 16 * COLUMNS, 128);
        float products[COLUMNS / 8][4];
        warpgroup_arrive();
        $products
        warpgroup_commit();
        if (step + 1 < steps) split_fetched(next);
        if (step + 2 < steps) fetch(first_chunk + step + 2);
        warpgroup_wait();
        if (lane == 0) landing_close(read + stage);
        // Tensor cores truncate as they accumulate: chains stay short, and are added in float32.  Of a chain whose
        // numbers are alike, that takes 0.9 units in the last place on average.
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i)
            sums[i / 4][i % 4] = fmaf(products[i / 4][i % 4], TRUNCATED, sums[i / 4][i % 4]);
    };
    Split even[4][4], odd[4][4];
    if (steps > 0) fetch(first_chunk), split_fetched(even);
    if (steps > 1) fetch(first_chunk + 1);
#pragma unroll 1
    for (int step = 0; step < steps; step += 2) {
        multiply(step, even, odd);
        if (step + 1 < steps) multiply(step + 1, odd, even);
    }

#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) {
        const int feature = first_feature + i / 2 % 2 * 8;
        const long long row = (long long)across * COLUMNS + i / 4 * 8 + 2 * quad + i % 2;
        if (row < rows && feature < O) {
            $write
        }
    }
    $reduce
}
"""

# Where every sample has a weight of its own: which sample a block is of, and where what there is of it begins.
SAMPLE = """
const int of_sample = blocks_o * across_all, block = blockIdx.x % of_sample;
const long long sample = blockIdx.x / of_sample;
packed += sample * across_all * CHUNKS * STAGE;
w += sample * O * K;
"""

# The products of a chunk's numbers: of those that are split, all but that of what is left of both.  The small ones come
# first, since what is truncated is a part of all that has been added up.
PRODUCTS = {
    False: """
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const unsigned long long big = x + 2 * i * COLUMNS, small = big + MATRIX / 4;
    const Split(&a)[4] = own[i];
    wgmma_rows_tf32_$columns(products, a[0].small, a[1].small, a[2].small, a[3].small, big, i > 0);
    wgmma_rows_tf32_$columns(products, a[0].big, a[1].big, a[2].big, a[3].big, small, true);
}
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const Split(&a)[4] = own[i];
    wgmma_rows_tf32_$columns(products, a[0].big, a[1].big, a[2].big, a[3].big, x + 2 * i * COLUMNS, true);
}
""",
    True: """
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const Split(&a)[4] = own[i];
    wgmma_rows_tf32_$columns(products, a[0].big, a[1].big, a[2].big, a[3].big, x + 2 * i * COLUMNS, i > 0);
}
""",
}

PARTIAL = """
partial[part * rows * O + $at] = sums[i / 4][i % 4];
"""

WRITE = """
const long long at = $at;
const float sum = $sum;
$lines
out[at] = $value;
"""

VALUE = """
const float sum = $sum;
$lines
sums[i / 4][i % 4] = $value;
"""

# What a block has of a reduction.
REDUCE = """
const bool whole = (across + 1ll) * COLUMNS <= rows && (block_o + 1) * FEATURES <= O;
Whole fold = Whole::empty();
#pragma unroll
for (int i = 0; i < COLUMNS / 8; ++i) {
    if (whole) {
        fold.take(sums[i]);
        continue;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float one[1] = {sums[i][j]};
        if (across * COLUMNS + 8 * i + 2 * quad + j % 2 < rows && first_feature + j / 2 * 8 < O) fold.take(one);
    }
}
fold = joined<THREADS>(fold);
if (threadIdx.x == 0) fold.save(reduced + blockIdx.x, gridDim.x);
"""

JOIN = """
// Join what the blocks have.
extern "C" __global__ void __launch_bounds__(THREADS)
${name}_finish($parameters) {
    await_launches();
    Whole fold = Whole::empty();
    for (index_t i = threadIdx.x; i < blocks; i += THREADS) fold.merge(Whole::load(reduced + i, blocks));
    fold = joined<THREADS>(fold);
    if (threadIdx.x > 0) return;
    const float sum = fold.result(double(count));
    $lines
    *out = $value;
}
"""

FINISH = """
// Add up the parts of every element of the output, and do what follows.
extern "C" __global__ void __launch_bounds__(256)
${name}_finish($parameters) {
    await_launches();
    const long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    if (at >= rows * O) return;
    const int feature = $feature;
    float total = 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) total += partial[part * rows * O + at];
    const float sum = $sum;
    $lines
    out[at] = $value;
}
"""
