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

// The greater and the smaller of two values; NaN wins.
__device__ __forceinline__ float greater(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float smaller(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ double greater(double a, double b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ double smaller(double a, double b) { return a < b || a != a ? a : b; }

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

// Whatever the compiler knows of a number or pointer, it is in its register from here on.
__device__ __forceinline__ void at_hand(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void at_hand(unsigned& x) { asm volatile("" : "+r"(x)); }
template <class T> __device__ __forceinline__ void at_hand(const T*& x) { asm volatile("" : "+l"(x)); }

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

// Start d += a * b for 64 rows and 8 columns of 8 numbers; of every eight columns a lane has mma.sync's.
__device__ __forceinline__ void wgmma_tf32_8(float (&d)[1][4], unsigned long long a,
                                                   unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {"
        "%0, %1, %2, %3"
        "}, %4, %5, 1, 1, 1;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "l"(a), "l"(b));
}

using Element = float;    // of tensors in memory
using Compute = float;    // of everything else

constexpr int C = 9, O = 6, GROUPS = 1;    // channels of a group, in and out
constexpr int TAPS = 9;    // of one channel's kernel

// A warpgroup owns all 8 * M_TILES channels of OWN_D x TILES_H x TILES_W times the 64 cells that one instruction takes:
// HIGH x BROAD, eight eights along w.  A warp has two of these, a thread a cell of both, ROWS_D x ROWS_H rows of which
// are computed at a time.
constexpr int M_TILES = 1, TILES_H = 1, TILES_W = 3, HIGH = 8, BROAD = 8;
constexpr int OWN_D = 1, OWN_H = 2, OWN_W = 3;    // cells of a thread
constexpr int ROWS_D = 1, ROWS_H = 1, PER_CELL = 1;    // of which along w all PER_CELL
constexpr int WARPS_H = 4, WARPS_W = 2, THREADS = 256;
constexpr int BLOCK_M = 8 * M_TILES, M_BLOCKS = 1;
// Cells are windows, and a block has WINDOWS of them, a lane TURNS.  Values of eight features meet in shared memory,
// [d][h][w][feature]; what a thread has of the same windows, FOLDED_D x FOLDED_H rows at least, meets as one.  So a
// window has SIZE of them along each dimension, and begins APART from the one before.
constexpr int CELLS_D = 1, CELLS_H = 3, CELLS_W = 23, WINDOWS = 69, TURNS = 2;
constexpr int FOLDED_D = 1, FOLDED_H = 1;
constexpr int SHARED_H = 8, SHARED_ROW = 568, SHARED_VALUES = 4544;    // rows of a plane; numbers
constexpr int SIZE_D = 1, SIZE_H = 3, SIZE_W = 3;
constexpr int APART_D = 1, APART_H = 2, APART_W = 2;
// Where a row's column is: windows that follow each other begin in other banks.
__device__ __forceinline__ constexpr int shared_column(int w) { return 8 * (w + w / 2); }

// Shared memory holds vectors of 16 bytes: neighbouring channels of one column.  The input is
// [vector][d][h][w % SKIP][w / SKIP], in columns: cells lie side by side.
constexpr int VECTOR = 16 / sizeof(Element), CHUNK = 4;    // input channels staged at a time
constexpr int VECTORS = 1, PLANE = 501;    // of a column; columns of a vector, odd for the banks
constexpr int X_D = 1, X_H = 10, X_W = 50, SKIP = 1;
constexpr int PITCH = 50, ROW = 50;    // columns from one w % SKIP to the next, and from row to row
// Columns from cell to cell, from position to position and from tap to tap; along w before they are sorted.
constexpr int ADVANCE_D = 500, ADVANCE_H = 50;
constexpr int ELEMENT_D = 500, ELEMENT_H = 50, ELEMENT_W = 1;
constexpr int TAP_D = 0, TAP_H = 50, TAP_W = 1;
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
constexpr int LAST = (VECTORS - 1) * PLANE, TAP_ROWS = 3, NEXT_TAP = 1;
constexpr int BESIDE = NEXT_TAP * (TAP_W < 0 ? -TAP_W : TAP_W) / SKIP;
// Columns from the first row of taps to another one.
template <int TAPS_H>
__device__ __forceinline__ constexpr int row_of_taps(int row) { return row / TAPS_H * TAP_D + row % TAPS_H * TAP_H; }
// The last vectors of a matrix that begins so many columns on, as far from the others.
__device__ __forceinline__ constexpr unsigned long long last_vectors(unsigned long long x, int start, int distance) {
    return x + (LAST + start) + ((unsigned long long)(long long)(distance - PLANE) << 16);
}

// A thread has two cells of every 64, and two features of every eight.
using Accumulators = float[OWN_D * ROWS_D][PER_CELL][TILES_H * ROWS_H][TILES_W][M_TILES][4];

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
            for (int rh = 0; rh < TILES_H * ROWS_H; ++rh)
#pragma unroll
                for (int tile = 0; tile < TILES_W; ++tile)
                    wgmma_tf32_8(acc[rd][e][rh][tile],
                                   x_row + (row_d(rd) + rh / ROWS_H * HIGH * ADVANCE_H + rh % ROWS_H * ELEMENT_H +
                                            tile * BROAD + column(FIRST_W + e * ELEMENT_W + tap * TAP_W)),
                                   w);
}

// Start adding the products of a staged chunk with `rows` rows of taps from `first` on.
template <int TAPS_H, int TAPS_W, int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void multiply(Accumulators& acc, unsigned long long x, unsigned long long w, int first,
                                         int rows) {
    float* const each = &acc[0][0][0][0][0][0];
#pragma unroll
    for (int i = 0; i < int(sizeof(Accumulators) / sizeof(float)); ++i) at_hand(each[i]);
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
// they are, in columns of shared memory, packed indices of the input.  The column of no run is negative.
constexpr int COLUMNS = X_D * X_H * X_W;    // of a vector
constexpr int RUN = 1, COUNT = VECTORS / RUN * COLUMNS, AT_ONCE = 2;    // vectors of a run; runs; on their way
struct Fetched { Channels read[AT_ONCE][RUN]; };
struct Places {
    int to[AT_ONCE];
    unsigned index[AT_ONCE];
};

__device__ __forceinline__ Places places_of(int begin, int D, int H, int W) {
    Places places;
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned i = begin + n * THREADS, v = i / COLUMNS * RUN, at = i % COLUMNS;
        const unsigned row = at / X_W, d = 0, h = row, w = at % X_W;
        places.to[n] = i < COUNT ? int(v * PLANE + row * ROW) + column(w) : -1;
        places.index[n] = v * VECTOR << 24 | d << 16 | h << 8 | w;
    }
    return places;
}

// Start reading what a block's cells read, zeros outside.
__device__ __forceinline__ void fetch_input(Fetched& fetched, const Places& places, const Element* x, int chunk,
                                            Cell cell, int D, int H, int W) {
    const int first = chunk * CHUNK, channels = C - first;
    const int low_d = cell.d * 1 + 0, low_h = cell.h * 2 + 0;
    const int low_w = cell.w * 2 + 0;
    const long long plane = D * H * W;
    const Element* const start = forgotten(x + (((first * D + low_d) * H + low_h) * W + low_w));
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned index = places.index[n];
        const int channel = 0;
        const int d = 0, h = int(index >> 8 & 255), w = index & 255;
        const bool inside = places.to[n] > -1 && unsigned(low_d + d) < unsigned(D) &&
                            unsigned(low_h + h) < unsigned(H) && unsigned(low_w + w) < unsigned(W);
        const Element* from = start + (((channel * D + d) * H + h) * W + w);
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const bool some = inside && channel + k * VECTOR < channels;
            const bool all = some && channel + (k + 1) * VECTOR <= channels;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j, from += plane)
                fetched.read[n][k].element[j] = (j < 1 ? some : all) ? read_only(from) : Element{};
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
    const int first = row / TAP_ROWS * TAP_ROWS, rows = min(TAP_ROWS, ROWS - first);
    to += first * TAPS_W * VECTORS * MATRIX + feature * VECTOR + channel % VECTOR;
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
constexpr int NEXT_D = 0, NEXT_H = 3, NEXT_W = 1;

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

struct alignas(2 * sizeof(Compute)) Two { Compute of[2]; };    // of neighbouring features

// What the values of a window come to, of two features, which begin there.
__device__ __forceinline__ Two of_window(const Compute* from) {
    Two pair = {-Compute(INFINITY), -Compute(INFINITY)};
#pragma unroll 10
    for (int row = 0; row < SIZE_D * SIZE_H; ++row)
#pragma unroll
        for (int w = 0; w < SIZE_W; ++w) {
            const int at = (row / SIZE_H * SHARED_H + row % SIZE_H) * SHARED_ROW + shared_column(w);
            const Two other = *reinterpret_cast<const Two*>(from + at);
#pragma unroll
            for (int half = 0; half < 2; ++half) pair.of[half] = greater(pair.of[half], other.of[half]);
        }
    return pair;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
fused_test(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, Element* __restrict__ out,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);    // two of them
    Element* const w_tile = x_tile + 2 * X_TILE;
    constexpr int STAGED = 19872;    // bytes
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_h = warp % WARPS_H, warp_w = warp / WARPS_H;
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * GROUPS + group) * 9 * D * H * W;
    // What this warpgroup multiplies: its cells of the input, and its features.
    const unsigned long long x_matrix =
        shared_matrix(x_tile, 16 * PLANE, 16 * ADVANCE_H) + (warp_h / 4 * TILES_H * HIGH * ADVANCE_H + warp_w * TILES_W * BROAD);
    const unsigned long long w_matrix = shared_matrix(w_tile, 16 * BLOCK_M, 128);
    Compute* const shared_values = reinterpret_cast<Compute*>(shared_memory + STAGED);    // of eight features, twice
    int eights = 0;    // so many were there

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
        const float v1 = shifted < float(0.0) ? float(0.0) : shifted;
        return v1;
    };
    for (int chunk = 0; chunk < ceil_div(C, CHUNK); ++chunk) {
        pack_phase<1, 3, 3>(w, w_tile + chunk * 320, group, first_feature, chunk, 0);
    }
    // Numbers are here before any input is on its way: who waits for one of a thread's loads may wait for them all.
    const int zero = D >> 31;    // lengths are not negative, which the compiler does not know
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) bias_at[i / 2][i % 2] = arrived(bias_at[i / 2][i % 2], zero);

    const int tiles_d = ceil_div(cells_d, CELLS_D), tiles_h = ceil_div(cells_h, CELLS_H), tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = tiles_d * tiles_h * tiles_w;
    const auto tile_at = [&](int i) -> Tile { return {i / (tiles_w * tiles_h), i / tiles_w % tiles_h, i % tiles_w}; };
    const auto cell_of = [&](Tile tile) -> Cell { return {tile.d * CELLS_D, tile.h * CELLS_H, tile.w * CELLS_W}; };
    // What of the input is read next, or on its way.
    const Places places = places_of(threadIdx.x, D, H, W);
    Fetched fetched;
    int staged_tile = part, staged_chunk = 0;
    Cell staged = cell_of(tile_at(part));
    const auto read_input = [&] {
        if (staged_tile < tiles) fetch_input(fetched, places, x_sample, staged_chunk, staged, D, H, W);
    };
    // Write that to shared memory, and start reading what follows.
    const auto write_input = [&](Element* to) {
        if (!(staged_tile < tiles)) return;
        put_input(fetched, places, to);
        if (++staged_chunk == 3) {
            staged_chunk = 0;
            staged_tile += parts;
            staged = cell_of(tile_at(staged_tile));
        }
        read_input();
    };
    int x_now = 0;    // where the input of the step at hand is
    const bool sooner = warp / 4 % 2;    // than it multiplies, this warpgroup stages
    if (part < tiles) {
        read_input();
        write_input(x_tile);
    }
    fence_async();
    for (int tile = part; tile < tiles; tile += parts) {
        const auto [cell_d, cell_h, cell_w] = cell_of(tile_at(tile));
        Compute pooled[TURNS][M_TILES][2];
        {
            Accumulators acc = {};
            for (int step = 0; step < 3; ++step) {
                __syncthreads();    // until this step's operands are there, and the last step's have been read
                if (sooner) write_input(x_tile + (1 - x_now) * X_TILE);
                multiply<3, 3, 1, 0>(acc, x_matrix + x_now * (VECTORS * PLANE), w_matrix + step * 80, 0, 3);
                if (!sooner) write_input(x_tile + (1 - x_now) * X_TILE);
                x_now = 1 - x_now;
                fence_async();
                warpgroup_wait();
            }
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                Compute* const values = shared_values + eights++ % 2 * SHARED_VALUES + 2 * quad;
#pragma unroll
                for (int first_d = 0; first_d < OWN_D; first_d += FOLDED_D)
#pragma unroll
                    for (int first_h = 0; first_h < OWN_H; first_h += FOLDED_H)
#pragma unroll
                        for (int own_w = 0; own_w < 3; ++own_w) {
                            Two pair;
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                Compute value = -Compute(INFINITY);
#pragma unroll
                                for (int rd = first_d; rd < first_d + FOLDED_D; ++rd)
#pragma unroll
                                    for (int rh = first_h; rh < first_h + FOLDED_H; ++rh)
                                        value = greater(value, before(acc[rd][0][rh / ROWS_H / 2 * ROWS_H + rh % ROWS_H][own_w][m][2 * (rh / ROWS_H % 2) + half], m, half));
                                pair.of[half] = value;
                            }
                            const int place = (first_d) * SHARED_H + 8 * (warp_h / 4 * TILES_H + first_h / 2) + 2 * (warp_h % 4) + first_h % 2;
                            *reinterpret_cast<Two*>(values + place * SHARED_ROW + shared_column(8 * (warp_w * TILES_W + own_w) + row)) = pair;
                        }
                __syncthreads();
#pragma unroll
                for (int turn = 0; turn < TURNS; ++turn) {
                    const int window = (turn * (THREADS / 32) + warp) * 8 + row;
                    const int first_d = window / (CELLS_H * CELLS_W) * APART_D;
                    const int first_h = window / CELLS_W % CELLS_H * APART_H;
                    const Compute* const from = values + (first_d * SHARED_H + first_h) * SHARED_ROW +
                                              shared_column(window % CELLS_W * APART_W);
                    const Two pair = window < WINDOWS ? of_window(from) : Two{-Compute(INFINITY), -Compute(INFINITY)};
#pragma unroll
                    for (int half = 0; half < 2; ++half) pooled[turn][m][half] = pair.of[half];
                }
            }
        }
        const long long plane = (long long)cells_d * cells_h * forgotten(cells_w);    // from feature to feature
        Element* const out_row = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature + 2 * quad) * plane);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int window = (turn * (THREADS / 32) + warp) * 8 + row;
            const int p = cell_d + window / (CELLS_H * CELLS_W), q = cell_h + window / CELLS_W % CELLS_H;
            const int r = cell_w + window % CELLS_W;
            const bool inside = window < WINDOWS && p < cells_d && q < cells_h && r < cells_w;
            Element* const to = forgotten(out_row + unsigned((p * cells_h + q) * cells_w + r));
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int feature = first_feature + 8 * m + 2 * quad + half;
                    const Element result = narrow_to<Element>::of(pooled[turn][m][half]);
                    if (inside && feature < O) to[(8 * m + half) * plane] = result;
                }
        }
    }
}
