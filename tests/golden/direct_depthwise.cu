// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
__device__ __forceinline__ void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Start copying BYTES (4, 8 or 16, all addresses aligned to it) to shared memory, or zeros where not `inside`; nothing
// where not `active`, which a branch would say in more instructions.  NEAR: by way of the level-1 cache, where warps
// find what their neighbours have read, as all copies of fewer than 16 go.
template <int BYTES, bool NEAR = false>
__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global, bool inside, bool active = true) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    const int bytes = inside ? BYTES : 0;
    if constexpr (BYTES == 16 && !NEAR)
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2; }"
            ::"r"(to), "l"(from_global), "r"(bytes), "r"(int(active)));
    else
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], %4, %2; }"
            ::"r"(to), "l"(from_global), "r"(bytes), "r"(int(active)), "n"(BYTES));
}
// Close the group of copies started so far; wait until at most PENDING groups are still under way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }

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

using Element = float;    // of tensors in memory
using Compute = float;    // of everything else

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int C = 1, O = 1, GROUPS = 64;    // channels of a group, in and out
constexpr int TAPS = 49, TAPS_H = 7, TAPS_W = 7;    // of one channel's kernel, its planes and rows

// A thread owns FEATURES features at PLANES x ROWS x RUN positions of every phase; a team's threads share the features.
constexpr int FEATURES = 1, PLANES = 1, ROWS = 4, RUN = 4, PHASES = 1;
constexpr int UNITS_D = 1, UNITS_H = 8, UNITS_W = 16;    // threads side by side
constexpr int TEAM = 128, TEAMS = 1, THREADS = TEAM * TEAMS;
constexpr int BLOCK_O = FEATURES * TEAMS, O_BLOCKS = 1;
constexpr int CELLS_D = 1, CELLS_H = 32, CELLS_W = 64;    // of a block
constexpr int CHUNK = 1, CHUNKS = 1, PART = 1;    // input channels staged at a time, those of a group
constexpr int ROUNDS = 1, AT_ONCE = CHUNK / PART;    // blocks of features that one block goes through; in a step

// Shared memory: the input as [channel][d][h][w], BUFFERS times; weights as [channel][team][residue][turn][at hand].
constexpr int BUFFERS = 2;
constexpr int X_D = 1, X_H = 38, X_W = 72, X_CHANNEL = X_D * X_H * X_W, X_TILE = 2736;
constexpr int LOW_D = 0, LOW_H = -3, LOW_W = -4;    // input index of cell 0 that is staged first
// Steps in the staged input from position to position and from tap to tap.
constexpr int ELEMENT_D = 1, ELEMENT_H = 1, ELEMENT_W = 1;
constexpr int TAP_D = 0, TAP_H = 1, TAP_W = 1;
// Taps of a phase are congruent; of those along d and h either all are at hand at once, or one at a turn.
constexpr int RESIDUES_D = 1, RESIDUES_H = 1, RESIDUES_W = 1;
constexpr int HAND_D = 1, HAND_H = 7, HAND_W = 7, TURNS_D = 1, TURNS_H = 1;
constexpr int W_VECTOR = 4, AT_HAND = ceil_div(HAND_D * HAND_H * HAND_W * FEATURES, W_VECTOR) * W_VECTOR;
constexpr int W_RESIDUE = TURNS_D * TURNS_H * AT_HAND, W_TEAM = RESIDUES_D * RESIDUES_H * RESIDUES_W * W_RESIDUE;
constexpr int W_TILE = PART * TEAMS * W_TEAM;
constexpr int W_TILES = 56;

// COUNT numbers that are read from shared memory at once.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) Several { T at[COUNT]; };

// The tap that leads so many `steps` away where taps are `tap` apart; out of range or not quite where none does.
__device__ __forceinline__ constexpr int tap_of(int steps, int tap) { return tap == 0 ? 0 : steps / tap; }

// Add the products of one staged channel and the taps of one phase, so many along d, h, w; `x` is aligned to 4
// elements, and the first number that is used lies SHIFT behind it.
template <int D, int H, int W, int SHIFT>
__device__ __forceinline__ void accumulate(Compute (&acc)[FEATURES][PLANES][ROWS][RUN], const Element* x,
                                           const Compute* w) {
    constexpr int VECTOR = 4;
    constexpr int FIRST = SHIFT + (TAP_W < 0 ? (W - 1) * -TAP_W : 0);    // of tap 0
    constexpr int REACH = SHIFT + (RUN - 1) * ELEMENT_W + (W - 1) * (TAP_W < 0 ? -TAP_W : TAP_W) + 1;
    constexpr int AT_ONCE_D = TURNS_D == 1 ? D : 1, AT_ONCE_H = TURNS_H == 1 ? H : 1;
    constexpr int LEAST_D = TAP_D < 0 ? (AT_ONCE_D - 1) * TAP_D : 0, LEAST_H = TAP_H < 0 ? (AT_ONCE_H - 1) * TAP_H : 0;
    constexpr int MOST_D = (PLANES - 1) * ELEMENT_D + (TAP_D < 0 ? 0 : (AT_ONCE_D - 1) * TAP_D);
    constexpr int MOST_H = (ROWS - 1) * ELEMENT_H + (TAP_H < 0 ? 0 : (AT_ONCE_H - 1) * TAP_H);
#pragma unroll 
    for (int td_0 = 0; td_0 < D; td_0 += AT_ONCE_D)
#pragma unroll 
        for (int th_0 = 0; th_0 < H; th_0 += AT_ONCE_H) {
            Compute weight[AT_HAND];
#pragma unroll
            for (int i = 0; i < AT_HAND; i += W_VECTOR) {
                const Compute* const from = w + (td_0 * TURNS_H + th_0) * AT_HAND + i;
                const auto several = *reinterpret_cast<const Several<Compute, W_VECTOR>*>(from);
#pragma unroll
                for (int j = 0; j < W_VECTOR; ++j) weight[i + j] = several.at[j];
            }
            // Every input row, in turn, times all taps that lead from it to a row of positions.  Where none does, the
            // compiler leaves its reads out.
#pragma unroll
            for (int plane = LEAST_D; plane <= MOST_D; ++plane)
#pragma unroll
                for (int row = LEAST_H; row <= MOST_H; ++row) {
                    Compute run[ceil_div(REACH, VECTOR) * VECTOR];
#pragma unroll
                    for (int i = 0; i < REACH; i += VECTOR) {
                        const int h = row + th_0 * TAP_H, d = plane + td_0 * TAP_D;
                        const Element* const from = x + (d * X_H + h) * X_W + i;
                        const auto several = *reinterpret_cast<const Several<Element, VECTOR>*>(from);
#pragma unroll
                        for (int j = 0; j < VECTOR; ++j) run[i + j] = widened(several.at[j]);
                    }
#pragma unroll
                    for (int pd = 0; pd < PLANES; ++pd) {
                        const int td = tap_of(plane - pd * ELEMENT_D, TAP_D);
                        if (td < 0 || td >= AT_ONCE_D || pd * ELEMENT_D + td * TAP_D != plane) continue;
#pragma unroll
                        for (int rh = 0; rh < ROWS; ++rh) {
                            const int th = tap_of(row - rh * ELEMENT_H, TAP_H);
                            if (th < 0 || th >= AT_ONCE_H || rh * ELEMENT_H + th * TAP_H != row) continue;
#pragma unroll
                            for (int tw = 0; tw < W; ++tw)
#pragma unroll
                                for (int o = 0; o < FEATURES; ++o)
#pragma unroll
                                    for (int r = 0; r < RUN; ++r)
                                        acc[o][pd][rh][r] +=
                                            weight[((td * HAND_H + th) * HAND_W + tw) * FEATURES + o] *
                                            run[FIRST + r * ELEMENT_W + tw * TAP_W];
                        }
                    }
                }
        }
}

// Start copying VECTOR elements, or zeros where they are not `there`; nothing where not `active`.
template <int VECTOR>
__device__ __forceinline__ void copy_vector(Element* to, const Element* from, bool there, bool active = true) {
    if constexpr (VECTOR * sizeof(Element) >= 4)
        copy_async<VECTOR * sizeof(Element)>(to, from, there, active);
    else if (active)
        *to = there ? *from : Element{};    // asynchronous copies are of four bytes or more
}

// Start copying rows of COLUMNS elements, VECTOR at a time and zeros outside, LANES threads to a row.  SETS rows are
// under way at a time, in SLICES channels each.  Nothing is read outside, so addresses may run over the ends of x.
template <int VECTOR, int COLUMNS, int LANES, int SLICES, int UNROLL>
__device__ __forceinline__ void stage_rows(const Element* x, Element* tile, int channels, int low_d, int low_h,
                                           int low_w, int D, int H, int W) {
    constexpr int SETS = THREADS / LANES / SLICES, TURNS = ceil_div(CHUNK, SLICES);
    constexpr int STEP = VECTOR * LANES, BYTES = VECTOR * sizeof(Element);
    const int thread = threadIdx.x;
    const int group = thread / LANES, set = group % SETS, first = SLICES == 1 ? 0 : group / SETS;
    const int column = thread % LANES * VECTOR, w = low_w + column;
    if (SETS * SLICES * LANES < THREADS && first >= SLICES) return;
    const long long plane = (long long)D * H * W;
    int d = set / X_H, h = set % X_H;
#pragma unroll 1
    for (int row = set; row < X_D * X_H; row += SETS) {
        const int x_d = low_d + d, x_h = low_h + h;
        const bool inside = unsigned(x_d) < unsigned(D) && unsigned(x_h) < unsigned(H);
        const Element* from = x + first * plane + ((x_d * H + x_h) * W + w);
        Element* to = tile + first * X_CHANNEL + row * X_W + column;
#pragma unroll UNROLL
        for (int i = 0; i < TURNS; ++i, from += SLICES * plane, to += SLICES * X_CHANNEL) {
            const int c = i * SLICES + first;
            const bool own = CHUNK % SLICES == 0 || i + 1 < TURNS || c < CHUNK;
            const bool there = inside && own && (C % CHUNK == 0 || c < channels);
#pragma unroll
            for (int k = 0; k < COLUMNS; k += STEP) {
                const bool active = COLUMNS % STEP == 0 || k + column < COLUMNS;
                if constexpr (BYTES >= 4) {
                    copy_async<BYTES>(to + k, from + k, there && unsigned(w + k) < unsigned(W), active && own);
                } else {    // lanes past the end repeat the last element: without branches, loads wait together
                    const int at = active ? k : COLUMNS - 1 - column;
                    const bool read = there && unsigned(w + at) < unsigned(W);
                    const Element element = *(read ? from + at : x);
                    if (own) to[at] = read ? element : Element{};
                }
            }
        }
        d += SETS / X_H, h += SETS % X_H;    // row / X_H and row % X_H
        if (X_D > 1 && h >= X_H) h -= X_H, ++d;
    }
}

// Start copying so many `channels` of a box of positions, in vectors as large as its rows and those of the input allow;
// zeros where a chunk has more.
__device__ __forceinline__ void stage_input(const Element* from, Element* tile, int channels, int cell_d, int cell_h,
                                            int cell_w, int D, int H, int W) {
    const int low_d = cell_d * 1 + LOW_D, low_h = cell_h * 1 + LOW_H, low_w = cell_w * 1 + LOW_W;
    if (W % 4 == 0 && reinterpret_cast<unsigned long long>(from) % 16 == 0)
        return stage_rows<4, 72, 8, 1, 1>(from, tile, channels, low_d, low_h, low_w, D, H, W);
    if (W % 2 == 0 && reinterpret_cast<unsigned long long>(from) % 8 == 0)
        return stage_rows<2, 72, 8, 1, 1>(from, tile, channels, low_d, low_h, low_w, D, H, W);
    stage_rows<1, 72, 16, 1, 1>(from, tile, channels, low_d, low_h, low_w, D, H, W);
}

// Start copying the weights of a round's features and the channels of a chunk, zeros where there are none; and of the
// next ones, SEVERAL in all.
template <int SEVERAL>
__device__ __forceinline__ void stage_weights(const Element* w, Compute* tiles, int first_round, int first_chunk) {
    constexpr int COUNT = PART * TAPS * BLOCK_O;
    for (int k = threadIdx.x; k < SEVERAL * COUNT; k += THREADS) {
        const int which = SEVERAL == 1 ? 0 : k / COUNT, i = SEVERAL == 1 ? k : k % COUNT;
        const int round = first_round + which / CHUNKS, chunk = first_chunk + which % CHUNKS;
        const int group = round / O_BLOCKS, first_feature = round % O_BLOCKS * BLOCK_O;
        const int tap = i % TAPS, c = i / TAPS % PART, feature = i / (TAPS * PART);
        const bool there = first_feature + feature < O && (C % PART == 0 || chunk * PART + c < C);
        const int row = ((group * O + first_feature + feature) * C + chunk * PART + c);
        const Element* const from = w + (there ? row * TAPS + tap : 0);
        const int tap_d = tap / (TAPS_H * TAPS_W), tap_h = tap / TAPS_W % TAPS_H, tap_w = tap % TAPS_W;
        const int residue = (tap_d % RESIDUES_D * RESIDUES_H + tap_h % RESIDUES_H) * RESIDUES_W + tap_w % RESIDUES_W;
        const int td = tap_d / RESIDUES_D, th = tap_h / RESIDUES_H, tw = tap_w / RESIDUES_W;
        const int turn = td % TURNS_D * TURNS_H + th % TURNS_H;
        const int at = ((td % HAND_D * HAND_H + th % HAND_H) * HAND_W + tw) * FEATURES + feature % FEATURES;
        Compute* const of_team = tiles + which * W_TILE + (c * TEAMS + feature / FEATURES) * W_TEAM;
        Compute* const to = of_team + residue * W_RESIDUE + turn * AT_HAND + at;
        copy_async<sizeof(Compute)>(to, from, there);
    }
}

// Where a block is: it goes through chunks of channels, within rounds, within tiles.
struct Step { int tile, round, chunk, cell_d, cell_h, cell_w; };

extern "C" __global__ void __launch_bounds__(THREADS, 3)
fused_test(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ bias, const float* __restrict__ parameter_1, Element* __restrict__ out,
    int D, int H, int W, int P, int Q, int R, int cells_d, int cells_h, int cells_w) {
    await_launches();
    extern __shared__ __align__(16) unsigned char shared_memory[];
    Element* const x_tiles = reinterpret_cast<Element*>(shared_memory);    // while one is read, another is written
    Compute* const w_tiles = reinterpret_cast<Compute*>(x_tiles + BUFFERS * X_TILE);
    Compute* const strip = w_tiles + W_TILES;    // values: [feature][d][h][w]
    const int sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y;    // of the sample's blocks
    const int team = threadIdx.x / TEAM, unit = threadIdx.x % TEAM;
    const bool active = unit < UNITS_D * UNITS_H * UNITS_W;
    const int own = active ? unit : 0;
    const int unit_d = own / (UNITS_W * UNITS_H), unit_h = own / UNITS_W % UNITS_H, unit_w = own % UNITS_W;
    const int x_row = unit_d * PLANES * ELEMENT_D * X_H + unit_h * ROWS * ELEMENT_H;
    const int x_unit = x_row * X_W + unit_w * RUN * ELEMENT_W;
    const Element* const x_sample = x + (long long)sample * (GROUPS * C) * D * H * W;
    const int first_round = blockIdx.z;    // a block of features of a group
    const auto before = [&](Compute value, int at) {
        const Compute shifted = value + widened(bias[at]);
        const float v2 = shifted < float(0.0) ? float(0.0) : shifted;
        const float v3 = v2 * widened(parameter_1[at]);
        return v3;
    };
    stage_weights<ROUNDS * CHUNKS>(w, w_tiles, first_round, 0);

    const int tiles_h = ceil_div(cells_h, CELLS_H), tiles_w = ceil_div(cells_w, CELLS_W);
    const int tiles = ceil_div(cells_d, CELLS_D) * tiles_h * tiles_w;
    const auto place = [&](Step& at) {
        at.cell_d = at.tile / (tiles_w * tiles_h) * CELLS_D;
        at.cell_h = at.tile / tiles_w % tiles_h * CELLS_H;
        at.cell_w = at.tile % tiles_w * CELLS_W;
    };
    const auto advance = [&](Step& at) {
        if (++at.chunk < CHUNKS) return;
        at.chunk = 0;
        if ((at.round += AT_ONCE) < first_round + ROUNDS) return;
        at.round = first_round;
        at.tile += parts;
        place(at);
    };
    const auto stage = [&](const Step& at, int buffer) {
        const int group = at.round / O_BLOCKS, first = group * C + at.chunk * CHUNK;    // of the channels
        const int channels = min(group + AT_ONCE, GROUPS) * C - first;
        const Element* const from = x_sample + (long long)first * D * H * W;
        stage_input(from, x_tiles + buffer * X_TILE, channels, at.cell_d, at.cell_h, at.cell_w, D, H, W);
        copy_async_commit();
    };
    Step next = {part, first_round, 0, 0, 0, 0};
    place(next);
    if (BUFFERS == 2 && part < tiles) stage(next, 0);
    Compute acc[PHASES][FEATURES][PLANES][ROWS][RUN];
    for (int buffer = 0; next.tile < tiles; buffer ^= BUFFERS - 1) {
        const Step now = next;
        advance(next);
        if (BUFFERS == 1) {    // other blocks multiply meanwhile
            __syncthreads();
            stage(now, 0);
        }
        copy_async_wait<0>();
        __syncthreads();    // what this step reads is there, what the last one read is free
        if (BUFFERS == 2 && next.tile < tiles) stage(next, buffer ^ 1);
        const Element* const x_tile = x_tiles + buffer * X_TILE;
        const Compute* const w_tile = w_tiles + 0 * W_TILE + team * W_TEAM;
        if (now.chunk == 0)
#pragma unroll
            for (int i = 0; i < PHASES * FEATURES * PLANES * ROWS * RUN; ++i) (&acc[0][0][0][0][0])[i] = Compute(0);
#pragma unroll 1
        for (int c = 0; c < PART; ++c) {
            const Element* const x_c = x_tile + x_unit + c * (X_D * X_H * X_W);
            const Compute* const w_c = w_tile + c * (TEAMS * W_TEAM);
            accumulate<1, 7, 7, 1>(acc[0], x_c, w_c);
        }
        if (now.chunk < CHUNKS - 1) continue;

        const int cell_d = now.cell_d, cell_h = now.cell_h, cell_w = now.cell_w, round = now.round;
        const int group = round / O_BLOCKS, first_feature = round % O_BLOCKS * BLOCK_O;
        const auto keep = [&](const Compute (&acc)[FEATURES][PLANES][ROWS][RUN], int phase_d, int phase_h) {
#pragma unroll
            for (int o = 0; o < FEATURES; ++o)
#pragma unroll
                for (int pd = 0; pd < PLANES; ++pd)
#pragma unroll
                    for (int rh = 0; rh < ROWS; ++rh) {
                        const int feature = first_feature + team * FEATURES + o;
                        const int at = group * O + min(feature, O - 1);
                        const int d = (unit_d * PLANES + pd) + phase_d, h = (unit_h * ROWS + rh) + phase_h;
                        Compute run[RUN];
#pragma unroll
                        for (int r = 0; r < RUN; ++r)
                            run[r] = before(acc[o][pd][rh][r], at);
                        const int w = (unit_w * RUN);
                        Compute* const to = &strip[((team * FEATURES + o) * 32 + h) * 64 + w];
                        if (active)
#pragma unroll
                            for (int i = 0; i < RUN; i += 4) {
                                Several<Compute, 4> several;
#pragma unroll
                                for (int j = 0; j < 4; ++j) several.at[j] = run[i + j];
                                *reinterpret_cast<Several<Compute, 4>*>(to + i) = several;
                            }
                    }
        };
        keep(acc[0], 0, 0);
        __syncthreads();
        {
            constexpr int LANES = 128, SETS = THREADS / LANES;  // threads side by side, and such sets of them
#pragma unroll 4
            for (int cell = threadIdx.x % LANES; cell < 2048; cell += LANES) {
                const int d = cell / 2048, h = cell / 64 % 32, w = cell % 64;    // inside the tile
                if (!(cell_d + d < P && cell_h + h < Q && cell_w + w < R)) continue;
                const long long size = (long long)P * Q * R;
                Element* const to = out + ((long long)sample * (GROUPS * O) + group * O + first_feature) * size + ((long long)(cell_d + d) * Q + cell_h + h) * R + cell_w + w;
#pragma unroll 1
                for (int o = threadIdx.x / LANES; o < BLOCK_O; o += SETS) {
                    to[o * size] = narrow_to<Element>::of(strip[(o * 32 + h) * 64 + w]);
                }
            }
        }
    }
    copy_async_commit();
    copy_async_wait<0>();    // weights that no tile waited for
}
