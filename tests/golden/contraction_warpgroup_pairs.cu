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

// A number that was read, when it has arrived: an operation that the assembler does not see through waits for it.
__device__ __forceinline__ float arrived(float x, int zero) { return __int_as_float(__float_as_int(x) | zero); }

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

// Start d += a * b for 64 rows and 24 columns of 8 numbers; of every eight columns a lane has mma.sync's.
__device__ __forceinline__ void wgmma_tf32_24(float (&d)[3][4], unsigned long long a,
                                                   unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n24k8.f32.tf32.tf32 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
        "}, %12, %13, 1, 1, 1;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
        : "l"(a), "l"(b));
}

using Element = float;    // of tensors in memory
using Compute = float;    // of everything else

constexpr int C = 3, O = 9, GROUPS = 2;    // channels of a group, in and out
constexpr int TAPS = 49;    // of one channel's kernel

// A warpgroup owns 64 * M_TILES channels of OWN_D x OWN_H x 4 * OWN_W cells, ROWS_D x ROWS_H rows of a cell at a time.
constexpr int M_TILES = 1, OWN_D = 1, OWN_H = 1, EIGHTS_W = 3, OWN_W = 2 * EIGHTS_W;
constexpr int ROWS_D = 1, ROWS_H = 1, PER_CELL = 1;    // of which along w all PER_CELL
constexpr int WARPS_M = 4, WARPS_H = 3, WARPS_W = 1, THREADS = 384;
constexpr int BLOCK_M = 16 * M_TILES * WARPS_M, M_BLOCKS = 1;
constexpr int CELLS_D = OWN_D, CELLS_H = OWN_H * WARPS_H, CELLS_W = 4 * OWN_W * WARPS_W;

// Shared memory holds vectors of 16 bytes: neighbouring channels of one column.  The input is
// [vector][d][h][w % SKIP][w / SKIP], in columns: cells lie side by side.
constexpr int VECTOR = 16 / sizeof(Element), CHUNK = 4;    // input channels staged at a time
constexpr int VECTORS = 1, PLANE = 605;    // of a column; columns of a vector, odd for the banks
constexpr int X_D = 1, X_H = 11, X_W = 53, SKIP = 2;
constexpr int PITCH = 28, ROW = 55;    // columns from one w % SKIP to the next, and from row to row
// Columns from cell to cell, from position to position and from tap to tap; along w before they are sorted.
constexpr int ADVANCE_D = 605, ADVANCE_H = 110;
constexpr int ELEMENT_D = 605, ELEMENT_H = 110, ELEMENT_W = 2;
constexpr int TAP_D = 0, TAP_H = 55, TAP_W = 1;
constexpr int X_TILE = VECTORS * PLANE * VECTOR;    // elements

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// Where input index w of a row lies.
__device__ __forceinline__ constexpr int column(unsigned w) { return w % SKIP * PITCH + w / SKIP; }
// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }
// The last vectors of two rows of taps are multiplied together: the nearer columns first.  Of a row that has no other,
// those of taps NEXT_TAP apart are, whose columns are BESIDE apart for every position; what is left meets half its
// weights, twice.
constexpr int LAST = (VECTORS - 1) * PLANE, TAP_ROWS = 7, NEXT_TAP = 2;
constexpr int BESIDE = NEXT_TAP * (TAP_W < 0 ? -TAP_W : TAP_W) / SKIP;
// Columns from the first row of taps to another one.
template <int TAPS_H>
__device__ __forceinline__ constexpr int row_of_taps(int row) { return row / TAPS_H * TAP_D + row % TAPS_H * TAP_H; }
// The last vectors of a matrix that begins so many columns on, as far from the others.
__device__ __forceinline__ constexpr unsigned long long last_vectors(unsigned long long x, int start, int distance) {
    return x + (LAST + start) + ((unsigned long long)(long long)(distance - PLANE) << 16);
}

// A thread has two features and two cells of every eight.
using Accumulators = float[OWN_D * ROWS_D][PER_CELL][M_TILES][OWN_H * ROWS_H][EIGHTS_W][4];
constexpr int ROWS_AT_ONCE = 1;    // that one instruction takes

// Start adding the products of one tap and two vectors of channels, whose columns lie as one instruction wants them,
// whichever tap it is: it only starts elsewhere.
template <int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void add_products(Accumulators& acc, unsigned long long x_row, unsigned long long w,
                                             int tap) {
#pragma unroll
    for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e)
#pragma unroll
            for (int rh = 0; rh < OWN_H * ROWS_H; rh += ROWS_AT_ONCE)
#pragma unroll
                for (int m = 0; m < M_TILES; ++m)
                    wgmma_tf32_24(reinterpret_cast<float(&)[3][4]>(acc[rd][e][m][rh]),
                                   w + (64 * m),
                                   x_row + (row_d(rd) + row_h(rh) +
                                            column(FIRST_W + e * ELEMENT_W + tap * TAP_W)));
}

// Start adding the products of a staged chunk with `rows` rows of taps from `first` on.
template <int TAPS_H, int TAPS_W, int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void multiply(Accumulators& acc, unsigned long long x, unsigned long long w, int first,
                                         int rows) {
    warpgroup_arrive();
#pragma unroll 
    for (int row = first; row + 1 < first + rows; row += 2) {
        const int one = row_of_taps<TAPS_H>(row), other = row_of_taps<TAPS_H>(row + 1), start = min(one, other);
        const unsigned long long x_rows = last_vectors(x, start, max(one, other) - start);
#pragma unroll
        for (int tap = 0; tap < TAPS_W; ++tap)
            add_products<ELEMENTS, FIRST_W>(acc, x_rows, w + 2 * tap * BLOCK_M, tap);
        w += 2 * TAPS_W * BLOCK_M;
    }
    if (rows % 2) {
        const int start = row_of_taps<TAPS_H>(first + rows - 1);
#pragma unroll
        for (int tap = 0; tap < TAPS_W; ++tap)
            if (tap / NEXT_TAP % 2 == 0) {
                const bool two = tap + NEXT_TAP < TAPS_W;
                add_products<ELEMENTS, FIRST_W>(acc, last_vectors(x, start, two ? BESIDE : 0), w,
                                                two && TAP_W < 0 ? tap + NEXT_TAP : tap);
                w += 2 * BLOCK_M;
            }
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
constexpr int RUN = 1, COUNT = VECTORS / RUN * COLUMNS, AT_ONCE = 2;    // vectors of a run; runs; on their way
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
        const unsigned i = begin + n * THREADS, v = i / COLUMNS * RUN, at = i % COLUMNS;
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
    const int low_d = cell.d * 1 + 0, low_h = cell.h * 2 + -3;
    const int low_w = cell.w * 2 + -3;
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
            const bool all = some && channel + (k + 1) * VECTOR <= channels;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j, from += plane)
                fetched.read[n][k].element[j] = (j < 3 ? some : all) ? read_only(from) : Element{};
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

// Lay a weight where its products read it.  Of rows of taps that are staged at a time: all vectors but the last,
// [row of taps][tap][vector][feature][channel]; the last of two rows, [two rows][tap][row][feature][channel]; those of
// taps of a row that has no other, [two taps][tap][feature][channel].
template <int ROWS, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void put_weight(Element* to, int row, int tap, int channel, int feature, Element weight) {
    constexpr int MATRIX = BLOCK_M * VECTOR;    // elements
    const int tile = feature / 16 % M_TILES, warp = feature / (16 * M_TILES);
    const int at = ((warp / 4 * M_TILES + tile) * 4 + warp % 4) * 16 + feature % 16;
    const int first = row / TAP_ROWS * TAP_ROWS, rows = min(TAP_ROWS, ROWS - first);
    to += first * TAPS_W * VECTORS * MATRIX + at * VECTOR + channel % VECTOR;
    if (channel / VECTOR < VECTORS - 1) {
        to[(((row - first) * TAPS_W + tap) * (VECTORS - 1) + channel / VECTOR) * MATRIX] = weight;
        return;
    }
    to += rows * TAPS_W * (VECTORS - 1) * MATRIX;
    const int other = row % 2 ? row - 1 : row + 1, beside = tap / NEXT_TAP % 2 ? tap - NEXT_TAP : tap + NEXT_TAP;
    if (other < ROWS) {
        const bool second = row_of_taps<TAPS_H>(other) < row_of_taps<TAPS_H>(row);
        to[(2 * ((row - first) / 2 * TAPS_W + tap) + second) * MATRIX] = weight;
        return;
    }
    to += 2 * (rows / 2 * TAPS_W + tap / (2 * NEXT_TAP) * NEXT_TAP + tap % NEXT_TAP) * MATRIX;
    if (beside < TAPS_W)
        to[TAP_W * beside < TAP_W * tap ? MATRIX : 0] = weight;
    else
        to[0] = to[MATRIX] = 0.5f * weight;
}

// Steps in memory between neighbouring taps of a phase.
constexpr int NEXT_D = 0, NEXT_H = 7, NEXT_W = 1;

// Lay out the weights of one phase, block and chunk for the tensor cores, zeros where there are none.
template <int TAPS_D, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, Element* to, int group, int first_feature, int chunk,
                                           int first) {
    constexpr int ALL = TAPS_D * TAPS_H * TAPS_W;
    for (int i = threadIdx.x; i < BLOCK_M * CHUNK * ALL; i += THREADS) {
        const int tap = i % ALL, own = i / ALL % CHUNK, feature = i / (ALL * CHUNK), channel = chunk * CHUNK + own;
        const int of_w = tap / (TAPS_H * TAPS_W) * NEXT_D + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W;
        const bool there = first_feature + feature < O && channel < C;
        const Element value = there ? w[((group * O + first_feature + feature) * C + channel) * TAPS + first + of_w] : Element{};
        put_weight<TAPS_D * TAPS_H, TAPS_H, TAPS_W>(to, tap / TAPS_W, tap % TAPS_W, own, feature, __uint_as_float(round_tf32(value)));
    }
}

// Write two neighbours of an output row of which `left` elements follow, in one store where rows have an `even` length.
struct alignas(2 * sizeof(Element)) Pair { Element first, second; };
__device__ __forceinline__ void write_pair(Element* to, Element first, Element second, int left, bool even) {
    if (even && left > 0) *reinterpret_cast<Pair*>(to) = Pair{first, second};
    if (!even && left > 0) to[0] = first;
    if (!even && left > 1) to[1] = second;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
fused_test(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, Element* __restrict__ out,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);    // two of them
    Element* const w_tile = x_tile + 2 * X_TILE;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_m = warp % WARPS_M, warp_w = warp / WARPS_M % WARPS_W, warp_h = warp / (WARPS_M * WARPS_W);
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * GROUPS + group) * 3 * D * H * W;
    // What this warpgroup multiplies: its cells of the input, and its features.
    const unsigned long long x_matrix =
        shared_matrix(x_tile, 16 * PLANE, 128) + (warp_h * OWN_H * ADVANCE_H + 4 * OWN_W * warp_w);
    const unsigned long long w_matrix = shared_matrix(w_tile, 16 * BLOCK_M, 128) + warp_m / 4 * 64 * M_TILES;

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
        const Compute shifted = value + bias_at[m][half];
        return shifted;
    };
    pack_phase<1, 7, 7>(w, w_tile, group, first_feature, 0, 0);
    // Numbers are here before any input is on its way: who waits for one of a thread's loads may wait for them all.
    const int zero = D >> 31;    // lengths are not negative, which the compiler does not know
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) bias_at[i / 2][i % 2] = arrived(bias_at[i / 2][i % 2], zero);

    const int tiles_d = ceil_div(cells_d, CELLS_D), tiles_h = ceil_div(cells_h, CELLS_H), tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = tiles_d * tiles_h * tiles_w;
    const auto tile_at = [&](int i) -> Tile { return {i / (tiles_w * tiles_h), i / tiles_w % tiles_h, i % tiles_w}; };
    const auto cell_of = [&](Tile tile) -> Cell { return {tile.d * CELLS_D, tile.h * CELLS_H, tile.w * CELLS_W}; };
    const Tile apart = tile_at(parts);
    const auto following = [&](Tile tile) -> Tile {
        tile = {tile.d + apart.d, tile.h + apart.h, tile.w + apart.w};
        if (tile.w >= tiles_w) tile.w -= tiles_w, ++tile.h;
        if (tile.h >= tiles_h) tile.h -= tiles_h, ++tile.d;
        return tile;
    };
    // What of the input is read next, or on its way.
    const Places places = places_of(threadIdx.x, D, H, W);
    Fetched fetched;
    Tile staged = tile_at(part);
    const auto read_input = [&] {
        if (staged.d < tiles_d) fetch_input(fetched, places, x_sample, 0, cell_of(staged), D, H, W);
    };
    // Write that to shared memory, and start reading what follows.
    const auto write_input = [&](Element* to) {
        if (!(staged.d < tiles_d)) return;
        put_input(fetched, places, to);
        staged = following(staged);
        read_input();
    };
    int x_now = 0;    // where the input of the step at hand is
    const bool sooner = warp / 4 % 2;    // than it multiplies, this warpgroup stages
    if (part < tiles) {
        read_input();
        write_input(x_tile);
    }
    fence_async();
    for (Tile tile = tile_at(part); tile.d < tiles_d; tile = following(tile)) {
        const auto [cell_d, cell_h, cell_w] = cell_of(tile);
        {
            Accumulators acc = {};
            for (int step = 0; step < 1; ++step) {
                __syncthreads();    // until this step's operands are there, and the last step's have been read
                if (sooner) write_input(x_tile + (1 - x_now) * X_TILE);
                multiply<7, 7, 1, 0>(acc, x_matrix + x_now * (VECTORS * PLANE), w_matrix, 0, 7);
                if (!sooner) write_input(x_tile + (1 - x_now) * X_TILE);
                fence_async();
                warpgroup_wait();
            }
            const long long plane = (long long)P * Q * forgotten(R);    // from feature to feature
            Element* const out_row = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature + 16 * warp_m * M_TILES + row) * plane);
#pragma unroll
            for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                    for (int j = 0; j < 3; ++j) {
                        const int p = cell_d + rd / ROWS_D, q = cell_h + warp_h * OWN_H + rh / ROWS_H;
                        const int r = cell_w + 4 * warp_w * OWN_W + 8 * j + 2 * quad;    // of the first of two
                        const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q);
                        Element* const to = forgotten(out_row + unsigned((p * Q + q) * R + r));
#pragma unroll
                        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int feature = first_feature + 16 * (warp_m * M_TILES + m) + 8 * half + row;
                                const Element first = narrow_to<Element>::of(before(acc[rd][j / EIGHTS_W][m][rh][j % EIGHTS_W][2 * half], m, half)), second = narrow_to<Element>::of(before(acc[rd][j / EIGHTS_W][m][rh][j % EIGHTS_W][2 * half + 1], m, half));
                                if (inside && feature < O) write_pair(&to[(16 * m + 8 * half) * plane], first, second, R - r, R % 2 == 0);
                            }
                    }
        }
        x_now = 1 - x_now;
    }
}
