"""The fixed parts of the CUDA C++ of norms of images whose channels lie last."""

from __future__ import annotations

# Channels of a group lie side by side.
FINISH_GROUPS = """
constexpr int MERGED = $merged;  // channels of a group
const index_t results = $results, groups = results / MERGED;
const int lane = threadIdx.x % JOINERS;
const index_t group = (index_t(blockIdx.x) * THREADS + threadIdx.x) / JOINERS;
First fold = First::empty();
for (int k = lane; k < parts * MERGED && group < groups; k += JOINERS) {
    const index_t channel = group * MERGED + k % MERGED;
    fold.merge(First::load(scratch + (index_t(k / MERGED) * results + channel), parts * results));
}
fold = joined<JOINERS>(fold);
if (lane == 0 && group < groups) write(d, group, fold, $names);
"""

TURNED = """
// A block has a tile of CHANNELS x POSITIONS of one sample: it reads neighbouring channels of x, and writes
// neighbouring positions of what becomes of them.
template <bool WIDE>
__device__ __forceinline__ void turned(const Data& d, $target) {
    constexpr int V = VALUES<WIDE>, ITEMS = CHANNELS / READ * POSITIONS, RUNS = (ITEMS + THREADS - 1) / THREADS;
    __shared__ $T tile[CHANNELS][POSITIONS + 1];  // neither side meets in a bank
    const statistics::Data from{$operands};
    const index_t positions = $positions, across = (positions + POSITIONS - 1) / POSITIONS;
    const count_t number = blockIdx.x;
    const index_t sample = number / count_t(DOWN * across);
    const index_t first = number / DOWN % count_t(across) * POSITIONS, begin = number % DOWN * CHANNELS;
    $T kept[RUNS][READ];
#pragma unroll
    for (int t = 0; t < RUNS; ++t) {
        const int k = t * THREADS + threadIdx.x;
        const index_t position = min(first + k / (CHANNELS / READ), positions - 1);  // loads need no branch then
        const index_t channel = min(begin + k % (CHANNELS / READ) * READ, index_t(ALL - READ));
        statistics::taken<$wide>(from, sample, position, channel, kept[t]);
    }
#pragma unroll
    for (int t = 0; t < RUNS; ++t) {
        const int k = t * THREADS + threadIdx.x;
#pragma unroll
        for (int e = 0; e < READ; ++e)
            if (k < ITEMS) tile[k % (CHANNELS / READ) * READ + e][k / (CHANNELS / READ)] = kept[t][e];
    }
    __syncthreads();
    constexpr int LANES = POSITIONS / V < 32 ? POSITIONS / V : 32;  // of a channel, whose numbers they keep
    for (int c = threadIdx.x / LANES; c < CHANNELS; c += THREADS / LANES) {
        const index_t channel = begin + c;
#pragma unroll
        for (int p = threadIdx.x % LANES * V; p < POSITIONS; p += LANES * V) {
            const index_t position = first + p;
            if (position >= positions || channel >= ALL) continue;
            const index_t place = (sample * ALL + channel) * positions + position;
            $decode
            $T x[V];
#pragma unroll
            for (int e = 0; e < V; ++e) x[e] = tile[c][p + e];
            $R value[V];
            normalised<WIDE>(d, $coordinates, x, value);
            store<V>(out + place, value);
        }
    }
}
"""
