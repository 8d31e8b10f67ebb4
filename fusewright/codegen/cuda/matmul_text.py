"""The CUDA text of float32 matmuls on the tensor cores of Hopper (`fusewright.schedule.matmul`)."""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.codegen.text import Lines

CONSTANTS = """
// x (rows, K) times w is (rows, O): a block has FEATURES of the features, 64 of each of its warpgroups, which are the
// rows of what they multiply, and COLUMNS rows of x, which are its columns.
constexpr int K = $summed$features;
$samples
constexpr int COLUMNS = $columns, WARPGROUPS = $groups, FEATURES = 64 * WARPGROUPS;
// K is gone through in chunks, [part of a number][vector][row of x][8 halves]; the next ones are on their way.
// Each of PARTS blocks has a part of them.
constexpr int CHUNK = 64, VECTORS = CHUNK / 8, CHUNKS = (K + CHUNK - 1) / CHUNK, STAGES = $stages;
constexpr int PARTS = $parts, CHUNKS_OF_PART = (CHUNKS + PARTS - 1) / PARTS;
constexpr int MATRIX = VECTORS * COLUMNS * 4;    // words
// Halves that a number of x is: the nearest one, or with it what is left.
constexpr int NUMBERS = $numbers, STAGE = NUMBERS * MATRIX;
// What makes up for it that tensor cores truncate a chunk's sum, where there are several.
constexpr float TRUNCATED = K > CHUNK ? 1 + 0x1p-23f : 1;
// Copies of chunks are started so many steps ahead that every warp has read what lay there two steps ago.
constexpr int THREADS = 128 * WARPGROUPS, AHEAD = STAGES - 2;

$split

// Four numbers from the k-th on, zeros beyond the last.
__device__ __forceinline__ float4 four(const float* row, int k) {
    if (K % 4 == 0) return K % CHUNK == 0 || k < K ? __ldg(reinterpret_cast<const float4*>(row + k)) : float4{};
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

# Which row of x a column of blocks is, of all rows and of every sample's; and whether there is one.
PLACE = {
    False: """
const long long row = across * COLUMNS + column;
""",
    True: """
const long long across_all = (rows + COLUMNS - 1) / COLUMNS;
const long long of_sample = across % across_all * COLUMNS + column, row = across / across_all * rows + of_sample;
""",
}
INSIDE = {False: "row < rows", True: "of_sample < rows"}

LAY_OUT = """
// A number of x is two halves once its row is multiplied by a power of two, so that its greatest lies between 2^14 and
// 2^15: then what halves lose is below 2^-40 of that.  A row of which more than one number in FEW is less than about
// 2^-APART of the greatest is taken in two layers, those numbers by themselves as the second one.
constexpr int APART = 17, FEW = 32;
// Weights are multiplied by less, so that the next chunk's are mostly halves by the same power of two.
constexpr int HEADROOM = 1;
// What takes a row's scale back, and that of its second layer: negative where that is not asked for but by weights.
struct alignas(8) Scales { float first, rest; };

// Sixteen numbers of a row.
__device__ __forceinline__ void read_sixteen(const float* x, long long row, int sixteen, float (&numbers)[16]) {
#pragma unroll
    $read
}

// Lay sixteen numbers of a row out as blocks copy them, scaled.  Which of a chunk's numbers an instruction multiplies
// together does not matter: the first vector of every sixteen has numbers 0, 1, 4, 5, 8 and so on, so that a thread of
// the kernel reads four neighbours of a weight, of either vector two.
__device__ __forceinline__ void lay_out(const float (&numbers)[16], float unit, int sixteen, int column, float* to) {
    to += (long long)(sixteen / 4) * STAGE + (sixteen % 4 * 2 * COLUMNS + column) * 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint4 big, small;
        unsigned *const bigs = &big.x, *const smalls = &small.x;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const Split each = split(numbers[4 * p + 2 * j] * unit, numbers[4 * p + 2 * j + 1] * unit);
            bigs[p] = each.big, smalls[p] = each.small;
        }
        *reinterpret_cast<uint4*>(to + j * 4 * COLUMNS) = big;
        if (NUMBERS == 2) *reinterpret_cast<uint4*>(to + MATRIX + j * 4 * COLUMNS) = small;
    }
}
"""

PACK = """
// Lay x out, zeros behind its last row.
extern "C" __global__ void __launch_bounds__(256)
${name}_pack(const float* __restrict__ x, float* __restrict__ packed, Scales* __restrict__ scales, $counts) {
    await_launches();
    constexpr int OWN = $own, MEMBERS = 256 / OWN;    // rows of a block, and threads of each
    const int member = threadIdx.x / OWN, own = threadIdx.x % OWN;
    const int column = blockIdx.x % (COLUMNS / OWN) * OWN + own;
    const long long across = blockIdx.x / (COLUMNS / OWN);
    $place
    __shared__ float parts[8][OWN];
    // The greatest, or the sum, of what all threads of a row have.
    const auto joined = [&](float value, bool added) {
        const auto join = [&](float a, float b) { return added ? a + b : fmaxf(a, b); };
#pragma unroll
        for (int distance = OWN; distance < 32; distance *= 2)
            value = join(value, __shfl_xor_sync(0xffffffffu, value, distance));
        __syncthreads();
        if (threadIdx.x % 32 < OWN) parts[threadIdx.x / 32][own] = value;
        __syncthreads();
        value = parts[0][own];
        for (int warp = 1; warp < 8; ++warp) value = join(value, parts[warp][own]);
        return value;
    };
    const bool inside = $inside;
    float most = 0;
#pragma unroll 2
    for (int sixteen = member; sixteen < 4 * CHUNKS; sixteen += MEMBERS) {
        float numbers[16] = {};
        if (inside) read_sixteen(x, row, sixteen, numbers);
#pragma unroll
        for (int j = 0; j < 16; ++j) most = fmaxf(most, finite_size(numbers[j]));
    }
    most = joined(most, false);
    const int exponent = unit_exponent(most);
    const float unit = power_of_two(exponent), less = power_of_two(14 - exponent - APART);
    float* const chunks = packed + across * CHUNKS * STAGE;
    float few = 0, most_of_rest = 0;    // numbers of the second layer
#pragma unroll 2
    for (int sixteen = member; sixteen < 4 * CHUNKS; sixteen += MEMBERS) {
        float numbers[16] = {};
        if (inside) read_sixteen(x, row, sixteen, numbers);
        lay_out(numbers, unit, sixteen, column, chunks);
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float rest = fabsf(numbers[j]) < less ? fabsf(numbers[j]) : 0;
            few += rest > 0, most_of_rest = fmaxf(most_of_rest, rest);
        }
    }
    const bool wide = FEW * joined(few, true) > K;
    const float rest = power_of_two(14 - unit_exponent(joined(most_of_rest, false)));
    if (member == 0) scales[across * COLUMNS + column] = {power_of_two(14 - exponent), wide ? rest : -rest};
    if (!wide) return;
    for (int sixteen = member; sixteen < 4 * CHUNKS; sixteen += MEMBERS) {
        float numbers[16];
        read_sixteen(x, row, sixteen, numbers);
#pragma unroll
        for (int j = 0; j < 16; ++j) numbers[j] = fabsf(numbers[j]) < less ? 0 : numbers[j];
        lay_out(numbers, unit, sixteen, column, chunks);
    }
}
"""

# How a block lays out the second layer of its rows: others may do so meanwhile, and write the same.
LAY_OUT_REST = """
for (int i = threadIdx.x; i < 4 * steps * COLUMNS; i += THREADS) {
    const int column = i % COLUMNS, sixteen = 4 * first_chunk + i / COLUMNS;
    const long long row = $first + (long long)across * COLUMNS + column, last = $first + rows;
    const Scales scale = scales[(long long)across * COLUMNS + column];
    const float unit = power_of_two(14) / scale.first, less = scale.first * power_of_two(-APART);
    float numbers[16] = {};
    if (row < last) read_sixteen(source, row, sixteen, numbers);
    // Where the first layer has them as well, this one has what that loses.
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float lost = scale.rest > 0 ? numbers[j] : left(numbers[j] * unit) / unit;
        numbers[j] = fabsf(numbers[j]) < less ? lost : 0;
    }
    const float own = power_of_two(14) / fabsf(scale.rest);
    lay_out(numbers, own, sixteen, column, rest + (long long)across * CHUNKS * STAGE);
}
fence_async_global();
__syncthreads();
"""

# How a thread reads its numbers of a weight that lies as (N, K), and as (K, N).
READ = {
    True: """
#pragma unroll
for (int i = 0; i < 8; ++i) {
    const int k = chunk * CHUNK + 16 * (i / 2) + 4 * quad;
    fetched[i] = four(w + (long long)min(first_feature + 8 * (i % 2), O - 1) * K, k);
}
""",
    False: """
#pragma unroll
for (int i = 0; i < 32; ++i) {
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
    // Whether numbers are too far apart: of rows, or of a chunk of weights, which shows as they are split.
    bool far = false;
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) far |= scales[(long long)across * COLUMNS + i].rest > 0;
    far = __syncthreads_or(far);
    // Then all is done in layers, second ones of x first, behind the `done` steps of those that found out.
    int done = 0, all = steps;
    const auto start_copy = [&](int step) {
        const int stage = step % STAGES, turn = step / STAGES, own = step - done;
        if (own >= all) return;
        if (turn > 0) landing_wait(read + stage, (turn - 1) % 2);
        const float* const layer = all > steps && own < 2 * steps ? rest : packed;
        const float* const from = layer + ((long long)across * CHUNKS + first_chunk + own % steps) * STAGE;
        copy_bulk(staged + stage * STAGE, from, STAGE * int(sizeof(float)), landed + stage);
        landing_close(landed + stage);
    };
    const auto start_copies = [&] {
        if (threadIdx.x == 0)
            for (int step = 0; step < AHEAD; ++step) start_copy(done + step);
    };

    const int first_feature = block_o * FEATURES + 16 * warp + lane / 4;    // and the eighth behind
    float4 fetched[8];    // four numbers of one feature and of the other, and of those sixteen behind, and so on
    const auto fetch = [&](int chunk) {
        $read
    };
    // The greatest of a feature, of a lane's own and of four lanes'.
    const auto own_most = [&](int half) {
        float most = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) most = fmaxf(most, finite_size((&fetched[i / 4 * 2 + half].x)[i % 4]));
        return most;
    };
    const auto most_fetched = [&](int half) {
        float most = own_most(half);
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
        return most;
    };
    // How many of a feature's numbers are less than that, but not 0.
    const auto less_than = [&](int half, float most) {
        int few = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float number = (&fetched[i / 4 * 2 + half].x)[i % 4];
            few += fabsf(number) < most && number != 0;
        }
        return few;
    };
    // What the numbers of each feature are multiplied by.
    int exponents[2];
    // Find that out, and split what was fetched.
    const auto split_anew = [&](Own& own, bool watched) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int exponent = exponents[half] = min(unit_exponent(most_fetched(half)), 112) - HEADROOM;
            const float unit = power_of_two(exponent);
            if (watched) far |= less_than(half, power_of_two(14 - HEADROOM - APART - exponent)) > 2;
            own.scale[half] = power_of_two(-14 - exponent) * TRUNCATED;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 four = fetched[2 * i + half];
                own.of[i][half] = split(four.x * unit, four.y * unit);
                own.of[i][half + 2] = split(four.z * unit, four.w * unit);
            }
        }
    };
    // Multiply by the same as the last chunk's numbers, and find out only where that does not do: splitting takes about
    // as long as multiplying, so little is asked of each number.
    const auto split_fetched = [&](Own& own) {
        unsigned least = 0x7c007c00, most = 0;    // infinities
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float unit = power_of_two(exponents[half]);
            own.scale[half] = power_of_two(-14 - exponents[half]) * TRUNCATED;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 four = fetched[2 * i + half];
                own.of[i][half] = split_finite(four.x * unit, four.y * unit);
                own.of[i][half + 2] = split_finite(four.z * unit, four.w * unit);
                least = smallest_halves(smallest_halves(least, own.of[i][half].big), own.of[i][half + 2].big);
                most = largest_halves(largest_halves(most, own.of[i][half].big), own.of[i][half + 2].big);
            }
        }
        // Halves lose up to 2^-25: of few numbers that is too much only where none of the others is LARGE, as where all
        // have become smaller, and most are 0.
        constexpr float LESS = 1.0f / (1 << (HEADROOM + APART - 14)), LARGE = 1 << 10;
        bool wrong = !(first_half(most) < INFINITY && second_half(most) < INFINITY);
        if (fminf(first_half(least), second_half(least)) <= LESS)    // which is seldom, unless there are zeros
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float unit = power_of_two(exponents[half]);
                const int few = less_than(half, LESS * power_of_two(-exponents[half]));
                wrong |= few > 2 || (few > 0 && own_most(half) * unit < LARGE);
            }
        if (__any_sync(0xffffffffu, wrong)) split_anew(own, true);
    };
    float sums[COLUMNS / 8][4] = {};
    // Of what was fetched of each feature, one layer alone.
    const auto keep_layer = [&](bool second) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float less = power_of_two(14 - APART - unit_exponent(most_fetched(half)));
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float& number = (&fetched[i / 4 * 2 + half].x)[i % 4];
                number = (fabsf(number) < less) == second ? number : 0;
            }
        }
    };
    $multiply
    Own $own;
    if (!far) {
        $steps
        far = __syncthreads_or(far);
        done = steps;
    }
    if (far) {
        $lay_out_rest
        all = 4 * steps;
        start_copies();
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i / 4][i % 4] = 0;
#pragma unroll 1
        for (int step = 0; step < all; ++step) {
            fetch(first_chunk + step % steps);
            keep_layer(step / steps % 2 > 0);
            split_anew(even, false);
            multiply(done + step, even$alone);
            if (step + 1 == 2 * steps)    // second layers of x are scaled by more
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i) {
                    const Scales scale = scales[(long long)across * COLUMNS + i / 4 * 8 + 2 * quad + i % 2];
                    sums[i / 4][i % 4] *= fabsf(scale.rest) / scale.first;
                }
        }
    }

    $behind
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i)
        sums[i / 4][i % 4] *= scales[(long long)across * COLUMNS + i / 4 * 8 + 2 * quad + i % 2].first;
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
packed += sample * across_all * CHUNKS * STAGE, rest += sample * across_all * CHUNKS * STAGE;
scales += sample * across_all * COLUMNS;
w += sample * O * K;
"""


@dataclass(frozen=True)
class Way:
    """How a block goes through the chunks: `own`, what a thread splits weights to; `alone`, what is said of a chunk
    that none is split behind; `multiply` one chunk, and the `steps` through all; what comes `behind` them."""

    own: str
    alone: str
    multiply: str
    steps: str
    behind: Lines


# Where a thread has registers for what it split of two chunks, it splits the next weights while products are under
# way.
AHEAD = Way(
    own="even, odd",
    alone=", nullptr",
    multiply="""
// Multiply the copied chunk of a step by what has been split of the weight, by instruction: of a feature and the
// eighth behind, first and second numbers.  Meanwhile the `next` ones are split, if any.
const auto multiply = [&](int step, const Own& own, Own* next) {
    const int stage = step % STAGES;
    if (threadIdx.x == 0) start_copy(step + AHEAD);
    landing_wait(landed + stage, step / STAGES % 2);
    const unsigned long long x = shared_matrix(staged + stage * STAGE, 16 * COLUMNS, 128);
    float products[COLUMNS / 8][4];
    // Tensor cores truncate as they accumulate: chains stay short, and are added in float32.  Of a chain whose
    // numbers are alike, that takes 0.9 units in the last place on average.
    const auto add_products = [&] {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i)
            sums[i / 4][i % 4] = fmaf(products[i / 4][i % 4], own.scale[i / 2 % 2], sums[i / 4][i % 4]);
    };
    warpgroup_arrive();
    $products
    warpgroup_commit();
    if (next != nullptr && step + 1 < steps) split_fetched(*next);
    if (next != nullptr && step + 2 < steps) fetch(first_chunk + step + 2);
    warpgroup_wait();
    if (lane == 0) landing_close(read + stage);
    add_products();
};
""",
    steps="""
start_copies();
if (steps > 0) fetch(first_chunk), split_anew(even, true);
if (steps > 1) fetch(first_chunk + 1);
#pragma unroll 1
for (int step = 0; step < steps; step += 2) {
    multiply(step, even, &odd);
    if (step + 1 < steps) multiply(step + 1, odd, &even);
}
""",
    behind=[],
)

# Where sums take these registers, of twice as many columns, two warpgroups take turns: one multiplies, some columns
# after the others, while the other one reads and splits its next weights.
IN_TURNS = Way(
    own="even",
    alone="",
    multiply="""
// Multiply the copied chunk of a step by what has been split of the weight, when it is this warpgroup's turn.
constexpr int AT_ONCE = $columns, TURN = 1;
const auto multiply = [&](int step, const Own& own) {
    const int stage = step % STAGES;
    if (threadIdx.x == 0) start_copy(step + AHEAD);
    landing_wait(landed + stage, step / STAGES % 2);
    const unsigned long long all_x = shared_matrix(staged + stage * STAGE, 16 * COLUMNS, 128);
    barrier_wait(TURN + warp / 4, THREADS);
#pragma unroll
    for (int first = 0; first < COLUMNS; first += AT_ONCE) {
        const unsigned long long x = all_x + first;    // rows of 16 bytes
        float products[AT_ONCE / 8][4];
        warpgroup_arrive();
        $products
        warpgroup_commit();
        if (first + AT_ONCE == COLUMNS) barrier_arrive(TURN + 1 - warp / 4, THREADS);
        warpgroup_wait();
        if (first + AT_ONCE == COLUMNS && lane == 0) landing_close(read + stage);
        // Tensor cores truncate as they accumulate: chains stay short, and are added in float32.
#pragma unroll
        for (int i = 0; i < AT_ONCE / 2; ++i) {
            float& sum = sums[first / 8 + i / 4][i % 4];
            sum = fmaf(products[i / 4][i % 4], own.scale[i / 2 % 2], sum);
        }
    }
};
if (warp / 4 == 1) barrier_arrive(TURN, THREADS);    // the first one begins
""",
    steps="""
start_copies();
if (steps > 0) fetch(first_chunk), split_anew(even, true);
#pragma unroll 1
for (int step = 0; step < steps; ++step) {
    multiply(step, even);
    if (step + 1 < steps) fetch(first_chunk + step + 1), split_fetched(even);
}
""",
    behind=["if (warp / 4 == 0) barrier_wait(TURN, THREADS);    // what the other one said last"],
)

# The products of a chunk's numbers where these are rounded.
PRODUCT = """
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const Split(&a)[4] = own.of[i];
    wgmma_rows_fp16_$columns(products, a[0].big, a[1].big, a[2].big, a[3].big, x + 2 * i * COLUMNS, i > 0);
}
"""

# Where they are split: all but that of what is left of both.  The small ones come first, since what is truncated is a
# part of all that has been added up.
PRODUCTS = """
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const unsigned long long big = x + 2 * i * COLUMNS, small = big + MATRIX / 4;
    const Split(&a)[4] = own.of[i];
    wgmma_rows_fp16_$columns(products, a[0].small, a[1].small, a[2].small, a[3].small, big, i > 0);
    wgmma_rows_fp16_$columns(products, a[0].big, a[1].big, a[2].big, a[3].big, small, true);
}
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const Split(&a)[4] = own.of[i];
    wgmma_rows_fp16_$columns(products, a[0].big, a[1].big, a[2].big, a[3].big, x + 2 * i * COLUMNS, true);
}
"""

# Of a sum that is no longer than a chunk.
ALL_PRODUCTS = """
// A short sum loses more by the product of what is left of both, and by what is truncated, than by all roundings of
// float32.  So that product is taken as well, but for what is not finite, of which all is in the part that is left; and
// of the large ones, every sixteen are added by themselves.
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const Split(&a)[4] = own.of[i];
    const unsigned long long small = x + 2 * i * COLUMNS + MATRIX / 4;
    wgmma_rows_fp16_$columns(products, a[0].small, a[1].small, a[2].small, a[3].small, small, i > 0);
}
warpgroup_commit(), warpgroup_wait();
#pragma unroll
for (int i = 0; i < COLUMNS / 2; ++i) {
    float& product = products[i / 4][i % 4];
    product = fabsf(product) < INFINITY ? product : 0;
}
warpgroup_arrive();
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const unsigned long long big = x + 2 * i * COLUMNS, small = big + MATRIX / 4;
    const Split(&a)[4] = own.of[i];
    wgmma_rows_fp16_$columns(products, a[0].small, a[1].small, a[2].small, a[3].small, big, true);
    wgmma_rows_fp16_$columns(products, a[0].big, a[1].big, a[2].big, a[3].big, small, true);
}
#pragma unroll
for (int i = 0; i < 4; ++i) {
    const Split(&a)[4] = own.of[i];
    wgmma_rows_fp16_$columns(products, a[0].big, a[1].big, a[2].big, a[3].big, x + 2 * i * COLUMNS, i == 0);
    if (i < 3) warpgroup_commit(), warpgroup_wait(), add_products(), warpgroup_arrive();
}
"""

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
