// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
__device__ __forceinline__ void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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

// Matrices in shared memory for the tensor cores of a warpgroup (sm_90a): eight rows of 16 bytes lie one behind the
// other, `along` bytes lead to their next 16 bytes and `down` bytes to the next eight rows.  One more is 16 bytes on.
__device__ __forceinline__ unsigned long long shared_matrix(const void* start, int along, int down) {
    const unsigned long long at = __cvta_generic_to_shared(start);
    return (at & 0x3ffff) >> 4 | (unsigned long long)(along >> 4) << 16 | (unsigned long long)(down >> 4) << 32;
}
// What was written to shared memory is there for the tensor cores, after a barrier.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product, after the last, and until all are done.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Barriers for `threads` of a block's, whole warps: some wait, and some only say that they have come so far.
__device__ __forceinline__ void barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// In shared memory, whether what some threads stage is there (sm_90): the turns 0, 1, 0, ... of a landing end when each
// of them has closed its part, and the bulk copies that they had started there have landed.
__device__ __forceinline__ void landing_open(unsigned long long* landing, int threads) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(landing));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(threads) : "memory");
}
__device__ __forceinline__ void landing_close(unsigned long long* landing) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(landing));
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void landing_wait(unsigned long long* landing, int turn) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(landing));
    int landed;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(landed) : "r"(at), "r"(turn) : "memory");
    } while (!landed);
}

// Start a copy of whole 16 bytes to shared memory, which no thread makes.
__device__ __forceinline__ void copy_bulk(void* to_shared, const void* from_global, int bytes,
                                          unsigned long long* landing) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(landing));
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from_global), "r"(bytes), "r"(at) : "memory");
}

// The warps of a warpgroup have as many registers from here on: what some give, others get (sm_90a).
template <int COUNT>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Whatever the compiler knows of a number or pointer, it is in its register from here on.
__device__ __forceinline__ void at_hand(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void at_hand(unsigned& x) { asm volatile("" : "+r"(x)); }
template <class T> __device__ __forceinline__ void at_hand(const T*& x) { asm volatile("" : "+l"(x)); }

// An element of an operand, which nobody writes to meanwhile: so it may be read or left out without a branch.
__device__ __forceinline__ float read_only(const float* x) { return __ldg(x); }
__device__ __forceinline__ uint4 read_only(const uint4* x) { return __ldg(x); }
__device__ __forceinline__ unsigned read_only(const unsigned* x) { return __ldg(x); }
template <class T> __device__ __forceinline__ T read_only(const T* x) { return {__ldg(&x->bits)}; }

// A number of which the compiler knows nothing, so that what follows from it is not kept in registers between uses.
__device__ __forceinline__ unsigned forgotten(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}
// A pointer to global memory from which others are one instruction away: the compiler would find each of them from the
// kernel's argument.
template <class T> __device__ __forceinline__ T* forgotten(T* x) {
    asm("" : "+l"(x));
    __builtin_assume(__isGlobal(x));
    return x;
}

// Start d += a * b for 64 rows and 16 columns of 8 numbers; of every eight columns a lane has mma.sync's.
__device__ __forceinline__ void wgmma_tf32_16(float (&d)[2][4], unsigned long long a,
                                                   unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, 1, 1, 1;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "l"(a), "l"(b));
}

using Element = float;    // of tensors in memory
using Compute = float;    // of everything else

constexpr int C = 20, O = 9, GROUPS = 1;    // channels of a group, in and out
constexpr int TAPS = 9;    // of one channel's kernel

// A warpgroup owns all 8 * M_TILES channels of OWN_D x TILES_H x TILES_W times the 64 cells that one instruction takes:
// HIGH x BROAD, eight eights along w.  A warp has two of these, a thread a cell of both, ROWS_D x ROWS_H rows of which
// are computed at a time.
constexpr int M_TILES = 2, TILES_H = 1, TILES_W = 4, HIGH = 8, BROAD = 8;
constexpr int OWN_D = 1, OWN_H = 2, OWN_W = 4;    // cells of a thread
constexpr int ROWS_D = 1, ROWS_H = 1, PER_CELL = 1;    // of which along w all PER_CELL
constexpr int WARPS_H = 12, WARPS_W = 1, THREADS = 384;
constexpr int BLOCK_M = 8 * M_TILES, M_BLOCKS = 1;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 8 * OWN_W * WARPS_W;

// Shared memory holds vectors of 16 bytes: neighbouring channels of one column.  The input is
// [vector][d][h][w % SKIP][w / SKIP], in columns: cells lie side by side.
constexpr int VECTOR = 16 / sizeof(Element), CHUNK = 8;    // input channels staged at a time
constexpr int VECTORS = 2, PLANE = 885;    // of a column; columns of a vector, odd for the banks
constexpr int X_D = 1, X_H = 26, X_W = 34, SKIP = 1;
constexpr int PITCH = 34, ROW = 34;    // columns from one w % SKIP to the next, and from row to row
// Columns from cell to cell, from position to position and from tap to tap; along w before they are sorted.
constexpr int ADVANCE_D = 884, ADVANCE_H = 34;
constexpr int ELEMENT_D = 884, ELEMENT_H = 34, ELEMENT_W = 1;
constexpr int TAP_D = 0, TAP_H = 34, TAP_W = 1;
constexpr int X_TILE = VECTORS * PLANE * VECTOR;    // elements

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// Where input index w of a row lies.
__device__ __forceinline__ constexpr int column(unsigned w) { return w % SKIP * PITCH + w / SKIP; }
// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }
// Teams of further warps stage, step after step in turns.  Barriers: where those meet who multiply; where operands have
// been read, of both halves of shared memory.
constexpr int PRODUCERS = 128, TEAMS = 2, ALL_THREADS = THREADS + TEAMS * PRODUCERS;
constexpr int MULTIPLYING = 1, READ = 2, MEETING = THREADS + PRODUCERS;

// A thread has two cells of every 64, and two features of every eight.
using Accumulators = float[OWN_D * ROWS_D][PER_CELL][TILES_H * ROWS_H][TILES_W][M_TILES][4];

// Start adding the products of a staged chunk with `rows` rows of taps from `first` on.  The columns that one tap reads
// lie as one instruction wants them, whichever tap it is: it only starts elsewhere.
template <int TAPS_H, int TAPS_W, int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void multiply(Accumulators& acc, unsigned long long x, unsigned long long w, int first,
                                         int rows) {
    float* const each = &acc[0][0][0][0][0][0];
#pragma unroll
    for (int i = 0; i < int(sizeof(Accumulators) / sizeof(float)); ++i) at_hand(each[i]);
    warpgroup_arrive();
#pragma unroll 
    for (int row = first; row < first + rows; ++row) {
        const unsigned long long x_row = x + (row / TAPS_H * TAP_D + row % TAPS_H * TAP_H);
#pragma unroll 1
        for (int k = 0; k < VECTORS; k += 2)
#pragma unroll
            for (int tap = 0; tap < TAPS_W; ++tap)
#pragma unroll
                for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                    for (int e = 0; e < ELEMENTS; ++e)
#pragma unroll
                        for (int rh = 0; rh < TILES_H * ROWS_H; ++rh)
#pragma unroll
                            for (int tile = 0; tile < TILES_W; ++tile)
                                wgmma_tf32_16(acc[rd][e][rh][tile],
                                               x_row + (k * PLANE + row_d(rd) + rh / ROWS_H * HIGH * ADVANCE_H + rh % ROWS_H * ELEMENT_H +
                                                        tile * BROAD + column(FIRST_W + e * ELEMENT_W + tap * TAP_W)),
                                               w + (tap * VECTORS + k) * BLOCK_M);
        w += TAPS_W * VECTORS * BLOCK_M;
    }
    warpgroup_commit();
}

// A tile, by the tiles before it along each dimension, and its first cell.
struct Tile { int d, h, w; };
struct Cell { int d, h, w; };

// One vector of channels.
union alignas(16) Channels {
    uint4 word;
    Element element[VECTOR];
};

// What a thread stages at a time: runs of vectors of one column.  What has been read of them, and where in the tile
// they are, in columns of shared memory, packed indices of the input, elements of x.  The column of no run is negative.
constexpr int COLUMNS = X_D * X_H * X_W;    // of a vector
constexpr int RUN = 2, COUNT = VECTORS / RUN * COLUMNS, AT_ONCE = 4;    // vectors of a run; runs; on their way
struct Fetched { Channels read[AT_ONCE][RUN]; };
struct Places {
    int to[AT_ONCE];
    unsigned index[AT_ONCE];
    int from[AT_ONCE];
};

__device__ __forceinline__ Places places_of(int begin, int D, int H, int W) {
    Places places;
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned i = begin + n * PRODUCERS, v = i / COLUMNS * RUN, at = i % COLUMNS;
        const unsigned row = at / X_W, d = 0, h = row, w = at % X_W;
        places.to[n] = i < COUNT ? int(v * PLANE + row * ROW) + column(w) : -1;
        places.index[n] = v * VECTOR << 24 | d << 16 | h << 8 | w;
        places.from[n] = ((v * VECTOR * D + d) * H + h) * W + w;
    }
    return places;
}

// Start reading what a block's cells read, zeros outside.
__device__ __forceinline__ void fetch_input(Fetched& fetched, const Places& places, const Element* x, int chunk,
                                            Cell cell, int D, int H, int W) {
    const int first = chunk * CHUNK, channels = C - first;
    const int low_d = cell.d * 1 + 0, low_h = cell.h * 1 + 0;
    const int low_w = cell.w * 1 + 0;
    const long long plane = D * H * W;
    const Element* const start = forgotten(x + (((first * D + low_d) * H + low_h) * W + low_w));
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned index = places.index[n];
        const int channel = 0;
        const int d = 0, h = int(index >> 8 & 255), w = index & 255;
        const bool inside = places.to[n] > -1 && unsigned(low_d + d) < unsigned(D) &&
                            unsigned(low_h + h) < unsigned(H) && unsigned(low_w + w) < unsigned(W);
        const Element* from = start + (places.from[n]);
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const bool some = inside && channel + k * VECTOR < channels;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j, from += plane)
                fetched.read[n][k].element[j] = some ? read_only(from) : Element{};
        }
    }
}

// Write what was read to shared memory, rounded to tf32.
__device__ __forceinline__ void put_input(Fetched& fetched, const Places& places, Element* tile) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                Element& value = fetched.read[n][k].element[j];
                value = __uint_as_float(round_tf32(value));
            }
            Element* const to = tile + (places.to[n] + k * PLANE) * VECTOR;
            if (places.to[n] > -1) *reinterpret_cast<uint4*>(to) = fetched.read[n][k].word;
        }
    }
}

// Where a weight lies among those of a phase: [row of taps][tap][vector of channels][feature][channel].
template <int TAPS_W>
__device__ __forceinline__ constexpr int weight_at(int row, int tap, int channel, int feature) {
    return (((row * TAPS_W + tap) * VECTORS + channel / VECTOR) * BLOCK_M + feature) * VECTOR + channel % VECTOR;
}

// Steps in memory between neighbouring taps of a phase.
constexpr int NEXT_D = 0, NEXT_H = 3, NEXT_W = 1;

// Lay out the weights of one phase, block and chunk for the tensor cores, zeros where there are none.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, Element* to, int group, int first_feature, int chunk,
                                           int first) {
    constexpr int ALL = TAPS_D * TAPS_H * TAPS_W;
    for (int i = blockIdx.z * 256 + threadIdx.x; i < BLOCK_M * CHUNK * ALL; i += gridDim.z * 256) {
        const int tap = i % ALL, own = i / ALL % CHUNK, feature = i / (ALL * CHUNK), channel = chunk * CHUNK + own;
        const int of_w = tap / (TAPS_H * TAPS_W) * NEXT_D + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W;
        const bool there = first_feature + feature < O && channel < C;
        const Element value = there ? w[((group * O + first_feature + feature) * C + channel) * TAPS + first + of_w] : Element{};
        to[weight_at<TAPS_W>(tap / TAPS_W, tap % TAPS_W, own, feature)] = __uint_as_float(round_tf32(value));
    }
}

extern "C" __global__ void fused_test_pack(const Element* __restrict__ w, Element* __restrict__ packed) {
    await_launches();
    const int chunk = blockIdx.x, group = blockIdx.y / M_BLOCKS, first_feature = blockIdx.y % M_BLOCKS * BLOCK_M;
    packed += (long long)blockIdx.y * 3456;
    pack_phase<1, 3, 3>(w, packed + chunk * 1152, group, first_feature, chunk, 0);
}

// Start copying `count` of the block's packed weights, from the `first` on: one thread does, and finds them anew.
__device__ __forceinline__ void stage_weights(const Element* packed, int first, Element* to, int count,
                                              unsigned long long* landing) {
    if ((threadIdx.x % PRODUCERS) != 0) return;
    const Element* const from = packed + (long long)forgotten(blockIdx.z) * 3456 + first;
    copy_bulk(to, from, count * int(sizeof(Element)), landing);
}

// Rows of eight features wait in shared memory, of the POSITIONS that a team of warps has side by side.
constexpr int POSITIONS = 32, ROW_PITCH = 36, TEAM = 1;    // a team's warps
struct alignas(8) Neighbours { float first, second; };

// Write them, each warp of the team some, whole parts of memory at a time, of which a lane has RUN neighbours: the
// first one begins at `to`; there are so many `features`, and `left` elements of their rows.  What several rows have is
// read before any of it is written.
template <int RUN>
__device__ __forceinline__ void write_runs(const float* rows, Element* to, long long plane, int features, int left,
                                           int member, int lane) {
    struct alignas(RUN * sizeof(float)) Held { float element[RUN]; };
    struct alignas(RUN * sizeof(Element)) Run { Element element[RUN]; };
    constexpr int PART = 32 * RUN, PARTS = (POSITIONS + 2 * PART - RUN - 1) / PART, AT_ONCE = 2;
#pragma unroll 1
    for (int first = member; first < 8; first += AT_ONCE * TEAM) {
        Held values[AT_ONCE][PARTS];
        int at[AT_ONCE];    // a lane's first column, before the row in parts that it has the end of
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int feature = first + i * TEAM;
            at[i] = RUN * lane - int(reinterpret_cast<unsigned long long>(to + feature * plane) / sizeof(Element) % PART);
#pragma unroll
            for (int k = 0; k < PARTS; ++k) {
                int column = at[i] + PART * k;
                if (k == 0) column = max(column, 0);
                if (PART * (k + 1) > POSITIONS) column = min(column, POSITIONS - RUN);
                values[i][k] = *reinterpret_cast<const Held*>(rows + feature * ROW_PITCH + column);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int feature = first + i * TEAM, count = feature < features ? left : 0;
            Element* const row = to + feature * plane + at[i];
#pragma unroll
            for (int k = 0; k < PARTS; ++k) {
                if (at[i] >= count - PART * k || (k == 0 && at[i] < 0)) continue;
                Run run;
#pragma unroll
                for (int j = 0; j < RUN; ++j) run.element[j] = narrow_to<Element>::of(values[i][k].element[j]);
                *reinterpret_cast<Run*>(row + PART * k) = run;
            }
        }
    }
}
__device__ __forceinline__ void write_rows(const float* rows, Element* to, long long plane, int features, int left,
                                           int member, int lane) {
    const bool even = (reinterpret_cast<unsigned long long>(to) / sizeof(*to) | plane | left) % 2 == 0;
    if (even)    // rows begin and end with whole pairs
        write_runs<2>(rows, to, plane, features, left, member, lane);
    else
        write_runs<1>(rows, to, plane, features, left, member, lane);
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
fused_test(const float* __restrict__ x, const float* __restrict__ packed, const float* __restrict__ bias, Element* __restrict__ out,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);    // two of them
    Element* const w_tile = x_tile + 2 * X_TILE;
    constexpr int STAGED = 65872;    // bytes
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_h = warp % WARPS_H, warp_w = warp / WARPS_H;
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * GROUPS + group) * 20 * D * H * W;
    // What this warpgroup multiplies: its cells of the input, and its features.
    const unsigned long long x_matrix =
        shared_matrix(x_tile, 16 * PLANE, 16 * ADVANCE_H) + (warp_h / 4 * TILES_H * HIGH * ADVANCE_H + warp_w * TILES_W * BROAD);
    const unsigned long long w_matrix = shared_matrix(w_tile, 16 * BLOCK_M, 128);

    // Per-channel numbers of this lane's columns.
    Compute bias_at[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int feature = first_feature + 8 * m + 2 * quad + half;
            bias_at[m][half] = feature < O ? widened(bias[group * O + feature]) : Compute(0);
        }
    const auto before = [&](Compute value, int m, int half) {
        const Compute shifted = value + bias_at[m][half];
        return shifted;
    };
    float* const team_rows = reinterpret_cast<float*>(shared_memory + STAGED) + warp * 8 * ROW_PITCH;
    unsigned long long* const landings = reinterpret_cast<unsigned long long*>(w_tile + 2304);    // one for each half
    if (threadIdx.x == 0) landing_open(landings, PRODUCERS), landing_open(landings + 1, PRODUCERS);

    const int tiles_d = ceil_div(cells_d, CELLS_D), tiles_h = ceil_div(cells_h, CELLS_H), tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = tiles_d * tiles_h * tiles_w;
    const auto tile_at = [&](int i) -> Tile { return {i / (tiles_w * tiles_h), i / tiles_w % tiles_h, i % tiles_w}; };
    const auto cell_of = [&](Tile tile) -> Cell { return {tile.d * CELLS_D, tile.h * CELLS_H, tile.w * CELLS_W}; };
    fence_async();
    __syncthreads();    // until what stays is there
    if (warp >= THREADS / 32) {    // a producer
        more_registers<104>();
        const int team = warp / (PRODUCERS / 32) - THREADS / PRODUCERS;
        const Element* const x_sample = forgotten(x + ((long long)sample * GROUPS + group) * 20 * D * H * W);
        // What of the input is read next, or on its way.
        const Places places = places_of((threadIdx.x % PRODUCERS), D, H, W);
        Fetched fetched;
        int staged_tile = part, staged_chunk = 0;
        Cell staged = cell_of(tile_at(part));
        const auto read_input = [&] {
            if (staged_tile < tiles) fetch_input(fetched, places, x_sample, staged_chunk, staged, D, H, W);
        };
        // Write that to shared memory.
        const auto write_input = [&](Element* to) {
            if (!(staged_tile < tiles)) return;
            put_input(fetched, places, to);
            for (int begin = (threadIdx.x % PRODUCERS) + AT_ONCE * PRODUCERS; begin < COUNT; begin += AT_ONCE * PRODUCERS) {
                const Places others = places_of(begin, D, H, W);
                fetch_input(fetched, others, x_sample, staged_chunk, staged, D, H, W);
                put_input(fetched, others, to);
            }
            if (++staged_chunk == 3) {
                staged_chunk = 0;
                staged_tile += parts;
                staged = cell_of(tile_at(staged_tile));
            }
        };
        int steps = 0;    // so many are staged
        const auto skip = [&] {    // what the other team stages
            if (++staged_chunk == 3) {
                staged_chunk = 0;
                staged_tile += parts;
                staged = cell_of(tile_at(staged_tile));
            }
        };
        if (team == 1) skip();
        read_input();
        for (int tile = part; tile < tiles; tile += parts) {
            for (int step = 0; step < 3; ++step) {
                if (steps % TEAMS == team) {
                    if (steps > 1) barrier_wait(READ + steps % 2, MEETING);    // until the last step's but one have been
                    stage_weights(packed, step * 1152, w_tile + steps % 2 * 1152, 1152, landings + steps % 2);
                    write_input(x_tile + steps % 2 * X_TILE);
                    fence_async();
                    landing_close(landings + steps % 2);
                    skip();
                    read_input();
                }
                ++steps;
            }
        }
        // Those who multiply say of every step that it has been read.
        for (int step = max(steps - 2, 0); step < steps; ++step)
            if (step % TEAMS == team) barrier_wait(READ + step % 2, MEETING);
        return;
    }
    fewer_registers<88>();
    int x_now = 0, steps = 0;    // where the input of the step at hand is; steps before it
    for (int tile = part; tile < tiles; tile += parts) {
        const auto [cell_d, cell_h, cell_w] = cell_of(tile_at(tile));
        {
            Accumulators acc = {};
#pragma unroll 1
            for (int step = 0; step < 3; ++step) {
                landing_wait(landings + steps % 2, steps / 2 % 2);
                multiply<3, 3, 1, 0>(acc, x_matrix + x_now * (VECTORS * PLANE), w_matrix + steps % 2 * 288, 0, 3);
                warpgroup_wait();
                barrier_arrive(READ + steps % 2, MEETING);
                ++steps;
                x_now = 1 - x_now;
            }
            const long long plane = (long long)P * Q * forgotten(R);    // from feature to feature
            Element* const out_features = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature) * plane);
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh) {
                    const int p = cell_d + rd / ROWS_D, q = cell_h + 8 * (warp_h / 4 * TILES_H + rh / ROWS_H / 2) + 2 * (warp_h % 4) + rh / ROWS_H % 2, first_r = cell_w + 8 * warp_w * TILES_W;    // of the team's first position
                    const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q);
                    const int left = inside ? max(0, min(R - first_r, POSITIONS)) : 0;
                    Element* const to = forgotten(out_features + unsigned((p * Q + q) * R + first_r));
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m) {
                        __syncwarp();    // until the rows before have been read
#pragma unroll
                        for (int s = 0; s < 4; ++s) {
                            const int own_w = s;
                            const int column = 8 * own_w + row;
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                team_rows[(2 * quad + half) * ROW_PITCH + column] = before(acc[rd][0][rh / ROWS_H / 2 * ROWS_H + rh % ROWS_H][own_w][m][2 * (rh / ROWS_H % 2) + half], m, half);
                        }
                        __syncwarp();
                        write_rows(team_rows, to + (8 * m) * plane, plane, O - first_feature - (8 * m), left, 0, lane);
                    }
                }
        }
    }
}
