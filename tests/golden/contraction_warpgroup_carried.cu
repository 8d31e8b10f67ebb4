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

// Whatever the compiler knows of a number or pointer, it is in its register from here on.
__device__ __forceinline__ void at_hand(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void at_hand(unsigned& x) { asm volatile("" : "+r"(x)); }
template <class T> __device__ __forceinline__ void at_hand(const T*& x) { asm volatile("" : "+l"(x)); }

// to = from, one after the other: of registers side by side, moved at once, there would be a copy of each.
__device__ __forceinline__ void take_over(float& to, float from) {
    asm volatile("mov.f32 %0, %1;" : "=f"(to) : "f"(from));
}

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

constexpr int C = 16, O = 5, GROUPS = 1;    // channels of a group, in and out
constexpr int TAPS = 30;    // of one channel's kernel

// A warpgroup owns all 8 * M_TILES channels of OWN_D x TILES_H x TILES_W times the 64 cells that one instruction takes:
// HIGH x BROAD, eight eights along w.  A warp has two of these, a thread a cell of both, ROWS_D x ROWS_H rows of which
// are computed at a time.
constexpr int M_TILES = 1, TILES_H = 1, TILES_W = 1, HIGH = 8, BROAD = 8;
constexpr int OWN_D = 1, OWN_H = 2, OWN_W = 1;    // cells of a thread
constexpr int ROWS_D = 1, ROWS_H = 1, PER_CELL = 1;    // of which along w all PER_CELL
constexpr int WARPS_H = 8, WARPS_W = 2, THREADS = 512;
constexpr int BLOCK_M = 8 * M_TILES, M_BLOCKS = 1;
constexpr int CELLS_D = 6, CELLS_H = OWN_H * WARPS_H, CELLS_W = 8 * OWN_W * WARPS_W;
// A block goes along d.  DEPTH cells are under way at a time, SLOTS positions, the oldest cell's first.  A plane of
// the input is multiplied by the taps of the positions that it belongs to: columns are [position][feature].
constexpr int DEPTH = 3, SLOTS = 3, BELONGS = 3, CARRIED = BELONGS * BLOCK_M;
constexpr int TAPS_OF_PLANE = 6;    // of a channel's kernel
__device__ constexpr int TAP_OF[2][BELONGS] = {{4, 2, 0}, {3, 1, -1}};

// Shared memory holds vectors of 16 bytes: neighbouring channels of one column.  The input is
// [vector][d][h][w % SKIP][w / SKIP], in columns: cells lie side by side.
constexpr int VECTOR = 16 / sizeof(Element), CHUNK = 16;    // input channels staged at a time
constexpr int VECTORS = 4, PLANE = 613;    // of a column; columns of a vector, odd for the banks
constexpr int X_D = 2, X_H = 18, X_W = 17, SKIP = 1;
constexpr int PITCH = 17, ROW = 17;    // columns from one w % SKIP to the next, and from row to row
// Columns from cell to cell, from position to position and from tap to tap; along w before they are sorted.
constexpr int ADVANCE_D = 612, ADVANCE_H = 17;
constexpr int ELEMENT_D = 612, ELEMENT_H = 17, ELEMENT_W = 1;
constexpr int TAP_D = 306, TAP_H = 17, TAP_W = 1;
constexpr int X_TILE = VECTORS * PLANE * VECTOR;    // elements

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// Where input index w of a row lies.
__device__ __forceinline__ constexpr int column(unsigned w) { return w % SKIP * PITCH + w / SKIP; }
// The staged input's offset of row r along d or h: rows of one cell first.
__device__ __forceinline__ constexpr int row_d(int r) { return r / ROWS_D * ADVANCE_D + r % ROWS_D * ELEMENT_D; }
__device__ __forceinline__ constexpr int row_h(int r) { return r / ROWS_H * ADVANCE_H + r % ROWS_H * ELEMENT_H; }

// A thread has two cells of every 64, and two features of every eight, of all positions under way.
using Accumulators = float[1][PER_CELL][TILES_H * ROWS_H][TILES_W][SLOTS * M_TILES][4];
// The same of one cell along d.
using Sums = float[ROWS_D][PER_CELL][TILES_H * ROWS_H][TILES_W][M_TILES][4];

// The sums of `COUNT` positions from the first on.
template <int FIRST, int COUNT>
__device__ __forceinline__ auto slots(float (&sums)[SLOTS * M_TILES][4]) -> float (&)[COUNT * M_TILES][4] {
    return reinterpret_cast<float (&)[COUNT * M_TILES][4]>(sums[FIRST * M_TILES]);
}

// Instructions of a thread, for each of which it has sums: of an element of its cells along w, a row and 64 positions.
constexpr int PRODUCTS = PER_CELL * TILES_H * ROWS_H * TILES_W;
struct Product { int e, rh, tile; };
__device__ __forceinline__ constexpr Product product_of(int i) {
    return {i / (TILES_H * ROWS_H * TILES_W), i / TILES_W % (TILES_H * ROWS_H), i % TILES_W};
}

// The sums of the oldest cell.
__device__ __forceinline__ void complete(const Accumulators& products, Sums& sums) {
#pragma unroll
    for (int rd = 0; rd < ROWS_D; ++rd)
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
            const Product at = product_of(i);
#pragma unroll
            for (int m = 0; m < 4 * M_TILES; ++m) {
                const float sum = products[0][at.e][at.rh][at.tile][rd * M_TILES + m / 4][m % 4];
                sums[rd][at.e][at.rh][at.tile][m / 4][m % 4] = sum;
            }
        }
}

// Put every cell in the place of the one before, and nothing in that of the last.
__device__ __forceinline__ void make_room(Accumulators& products) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        const Product at = product_of(i);
#pragma unroll
        for (int m = 0; m < 4 * M_TILES * SLOTS; ++m) {
            float(&own)[SLOTS * M_TILES][4] = products[0][at.e][at.rh][at.tile];
            const int next = m / 4 + ROWS_D * M_TILES;
            take_over(own[m / 4][m % 4], next < M_TILES * SLOTS ? own[next % (M_TILES * SLOTS)][m % 4] : 0.0f);
        }
    }
}

// Those of a cell that `COUNT` positions have.
template <int COUNT> using Part = float[PER_CELL][TILES_H * ROWS_H][TILES_W][COUNT * M_TILES][4];

// The sums of `COUNT` positions from the first on, in registers of their own, and back to where they were.
template <int FIRST, int COUNT>
__device__ __forceinline__ void take_part(Accumulators& sums, Part<COUNT>& part, bool back) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
        const Product at = product_of(i);
#pragma unroll
        for (int m = 0; m < 4 * M_TILES * COUNT; ++m) {
            float& own = part[at.e][at.rh][at.tile][m / 4][m % 4];
            float& sum = sums[0][at.e][at.rh][at.tile][FIRST * M_TILES + m / 4][m % 4];
            if (back) take_over(sum, own); else take_over(own, sum);
        }
    }
}

// Start adding the products of a staged chunk with `rows` rows of taps from `first` on, plane by plane.  The columns
// that one tap reads lie as one instruction wants them, whichever tap it is: it only starts elsewhere.
template <int TAPS_H, int TAPS_W, int ELEMENTS, int FIRST_W>
__device__ __forceinline__ void multiply(Accumulators& acc, unsigned long long x, unsigned long long w, int first,
                                         int rows) {
    constexpr int rd = 0;
    float* const each = &acc[0][0][0][0][0][0];
#pragma unroll
    for (int i = 0; i < int(sizeof(Accumulators) / sizeof(float)); ++i) at_hand(each[i]);
    if (first < 1 * TAPS_H && first + rows > 0 * TAPS_H) {
        warpgroup_arrive();
#pragma unroll 1
        for (int row = max(first, 0 * TAPS_H); row < min(first + rows, (0 + 1) * TAPS_H); ++row) {
            const unsigned long long x_row = x + (0 * TAP_D + row % TAPS_H * TAP_H);
#pragma unroll 2
            for (int k = 0; k < VECTORS; k += 2)
#pragma unroll
                for (int tap = 0; tap < TAPS_W; ++tap)
#pragma unroll
                    for (int e = 0; e < ELEMENTS; ++e)
#pragma unroll
                        for (int rh = 0; rh < TILES_H * ROWS_H; ++rh)
#pragma unroll
                            for (int tile = 0; tile < TILES_W; ++tile)
                                wgmma_tf32_24(acc[rd][e][rh][tile],
                                               x_row + (k * PLANE + row_d(rd) + rh / ROWS_H * HIGH * ADVANCE_H + rh % ROWS_H * ELEMENT_H +
                                                        tile * BROAD + column(FIRST_W + e * ELEMENT_W + tap * TAP_W)),
                                               w + (tap * VECTORS + k) * CARRIED);
            w += TAPS_W * VECTORS * CARRIED;
        }
        warpgroup_commit();
        warpgroup_wait();
    }
    if (first < 2 * TAPS_H && first + rows > 1 * TAPS_H) {
        Part<2> part;
        take_part<1, 2>(acc, part, false);
        warpgroup_arrive();
#pragma unroll 1
        for (int row = max(first, 1 * TAPS_H); row < min(first + rows, (1 + 1) * TAPS_H); ++row) {
            const unsigned long long x_row = x + (1 * TAP_D + row % TAPS_H * TAP_H);
#pragma unroll 2
            for (int k = 0; k < VECTORS; k += 2)
#pragma unroll
                for (int tap = 0; tap < TAPS_W; ++tap)
#pragma unroll
                    for (int e = 0; e < ELEMENTS; ++e)
#pragma unroll
                        for (int rh = 0; rh < TILES_H * ROWS_H; ++rh)
#pragma unroll
                            for (int tile = 0; tile < TILES_W; ++tile)
                                wgmma_tf32_16(part[e][rh][tile],
                                               x_row + (k * PLANE + row_d(rd) + rh / ROWS_H * HIGH * ADVANCE_H + rh % ROWS_H * ELEMENT_H +
                                                        tile * BROAD + column(FIRST_W + e * ELEMENT_W + tap * TAP_W)),
                                               w + (tap * VECTORS + k) * CARRIED);
            w += TAPS_W * VECTORS * CARRIED;
        }
        warpgroup_commit();
        warpgroup_wait();
        take_part<1, 2>(acc, part, true);
    }
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
constexpr int RUN = 2, COUNT = VECTORS / RUN * COLUMNS, AT_ONCE = 3;    // vectors of a run; runs; on their way
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
        const unsigned row = at / X_W, d = row / X_H, h = row % X_H, w = at % X_W;
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
    const int low_d = cell.d * 2 + -1, low_h = cell.h * 1 + -1;
    const int low_w = cell.w * 1 + -1;
    const long long plane = D * H * W;
    const Element* const start = forgotten(x + (((first * D + low_d) * H + low_h) * W + low_w));
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned index = places.index[n];
        const int channel = int(index >> 24);
        const int d = int(index >> 16 & 255), h = int(index >> 8 & 255), w = index & 255;
        const bool inside = places.to[n] > -1 && unsigned(low_d + d) < unsigned(D) &&
                            unsigned(low_h + h) < unsigned(H) && unsigned(low_w + w) < unsigned(W);
        const Element* from = start + (places.from[n]);
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const bool some = inside;
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
    return (((row * TAPS_W + tap) * VECTORS + channel / VECTOR) * CARRIED + feature) * VECTOR + channel % VECTOR;
}

// Steps in memory between neighbouring taps of a phase.
constexpr int NEXT_D = 6, NEXT_H = 2, NEXT_W = 1;

// Lay out the weights of one phase, block and chunk for the tensor cores, of every plane of the input those of the
// positions that it belongs to; zeros where there are none.
template <int PLANES, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, Element* to, int group, int first_feature, int chunk,
                                           int first) {
    constexpr int TAPS_D = PLANES, ALL = PLANES * TAPS_H * TAPS_W;
    for (int i = threadIdx.x; i < CARRIED * CHUNK * ALL; i += THREADS) {
        const int tap = i % ALL, own = i / ALL % CHUNK, column = i / (ALL * CHUNK), channel = chunk * CHUNK + own;
        const int feature = column % BLOCK_M, of_d = TAP_OF[tap / (TAPS_H * TAPS_W)][column / BLOCK_M];
        const int of_w = of_d * TAPS_OF_PLANE + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W;
        const bool there = of_d >= 0 && first_feature + feature < O && channel < C;
        const Element value = there ? w[((group * O + first_feature + feature) * C + channel) * TAPS + first + of_w] : Element{};
        to[weight_at<TAPS_W>(tap / TAPS_W, tap % TAPS_W, own, column)] = __uint_as_float(round_tf32(value));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fused_test(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, Element* __restrict__ out,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Element* const x_tile = reinterpret_cast<Element*>(shared_memory);    // two of them
    Element* const w_tile = x_tile + 2 * X_TILE;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int row = lane / 4, quad = lane % 4;    // of this lane's accumulators
    const int warp_h = warp % WARPS_H, warp_w = warp / WARPS_H;
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int group = blockIdx.z / M_BLOCKS, first_feature = blockIdx.z % M_BLOCKS * BLOCK_M;
    const Element* const x_sample = x + ((long long)sample * GROUPS + group) * 16 * D * H * W;
    // What this warpgroup multiplies: its cells of the input, and its features.
    const unsigned long long x_matrix =
        shared_matrix(x_tile, 16 * PLANE, 16 * ADVANCE_H) + (warp_h / 4 * TILES_H * HIGH * ADVANCE_H + warp_w * TILES_W * BROAD);
    const unsigned long long w_matrix = shared_matrix(w_tile, 16 * CARRIED, 128);

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
    pack_phase<2, 3, 2>(w, w_tile, group, first_feature, 0, 0);
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
        if (staged_tile < tiles) fetch_input(fetched, places, x_sample, 0, Cell{staged.d + staged_chunk, staged.h, staged.w}, D, H, W);
    };
    // Write that to shared memory, and start reading what follows.
    const auto write_input = [&](Element* to) {
        if (!(staged_tile < tiles)) return;
        put_input(fetched, places, to);
        if (++staged_chunk == 8) {
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
        Accumulators products[1] = {};
#pragma unroll 1
        for (int slab = 0; slab < 8; ++slab) {
            for (int step = 0; step < 1; ++step) {
                __syncthreads();    // until this step's operands are there, and the last step's have been read
                if (sooner) write_input(x_tile + (1 - x_now) * X_TILE);
                multiply<3, 2, 1, 0>(products[0], x_matrix + x_now * (VECTORS * PLANE), w_matrix, 0, 6);
                if (!sooner) write_input(x_tile + (1 - x_now) * X_TILE);
                x_now = 1 - x_now;
                fence_async();
                warpgroup_wait();
            }
            if (slab >= DEPTH - 1) {
                const int complete_d = cell_d + (slab - (DEPTH - 1));
                {
                    const int cell_d = complete_d;
                    Sums of_phase[1];
                    complete(products[0], of_phase[0]);
                    {
                        Sums& acc = of_phase[0];
                        const long long plane = (long long)P * Q * forgotten(R);    // from feature to feature
                        Element* const out_row = forgotten(out + (((long long)sample * GROUPS + group) * O + first_feature + 2 * quad) * plane);
#pragma unroll
                        for (int rd = 0; rd < OWN_D * ROWS_D; ++rd)
#pragma unroll
                            for (int rh = 0; rh < OWN_H * ROWS_H; ++rh)
#pragma unroll
                                for (int s = 0; s < 1; ++s) {
                                    const int own_w = s;    // the cell, and below its position
                                    const int p = cell_d + rd / ROWS_D;
                                    const int q = cell_h + 8 * (warp_h / 4 * TILES_H + rh / ROWS_H / 2) + 2 * (warp_h % 4) + rh / ROWS_H % 2;
                                    const int r = cell_w + 8 * (warp_w * TILES_W + own_w) + row;
                                    const bool inside = unsigned(p) < unsigned(P) && unsigned(q) < unsigned(Q) && unsigned(r) < unsigned(R);
                                    Element* const to = forgotten(out_row + unsigned((p * Q + q) * R + r));
#pragma unroll
                                    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                                        for (int half = 0; half < 2; ++half) {
                                            const int feature = first_feature + 8 * m + 2 * quad + half;
                                            const Element result = narrow_to<Element>::of(before(acc[rd][0][rh / ROWS_H / 2 * ROWS_H + rh % ROWS_H][own_w][m][2 * (rh / ROWS_H % 2) + half], m, half));
                                            if (inside && feature < O) to[(8 * m + half) * plane] = result;
                                        }
                                }
                    }
                }
            }
            make_room(products[0]);
        }
    }
}
