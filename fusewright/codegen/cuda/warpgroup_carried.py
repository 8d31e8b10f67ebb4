"""CUDA C++ of contraction groups for Hopper whose sums are carried along d (`schedule.warpgroup_carried`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby
from math import prod
from typing import ClassVar

from fusewright.codegen.cuda import warpgroup_pairs
from fusewright.codegen.cuda import warpgroup_positions_text as positions
from fusewright.codegen.cuda.contraction_walk import moved
from fusewright.codegen.cuda.warpgroup_positions import PositionWriter
from fusewright.codegen.cuda.warpgroup_weights import Place
from fusewright.codegen.cuda.warpgroup_writer import FLAVOURS, UNROLLED
from fusewright.codegen.text import Lines, block, fill
from fusewright.schedule.contraction import Carried
from fusewright.schedule.warpgroup_carried import CarriedTile
from fusewright.schedule.warpgroup_staging import passes


@dataclass(frozen=True)
class CarriedWriter(PositionWriter):
    """The products of a tile are those of one slab of its input after the other."""

    values: ClassVar[str] = "Sums"

    t: CarriedTile

    def blocks_per_sample(self, samples: int, cells: tuple[int, int, int]) -> int | None:
        return None

    @property
    def carried(self) -> Carried:
        assert self.c.carried is not None, self.c
        return self.c.carried

    @property
    def weights_m(self) -> str:
        return "CARRIED"

    @property
    def planes(self) -> str:
        return "1"

    def cells(self) -> Lines:
        """Constants: the cells of a block, and what is under way."""
        own, most = self.carried, max(self.carried.count)
        taps = [
            [row[first + i] if i < count else -1 for i in range(most)]
            for row, first, count in zip(own.taps, own.first, own.count, strict=True)
        ]
        return fill(
            _CELLS,
            run=self.t.run,
            depth=own.depth,
            slots=len(own.taps[0]),
            most=most,
            planes=len(own.taps),
            of_plane=prod(a.taps for a in self.c.axes[1:]),
            taps=", ".join(f"{{{', '.join(map(str, row))}}}" for row in taps),
        )

    def accumulators(self) -> Lines:
        return fill(_ACCUMULATORS)

    def multiply(self) -> Lines:
        """Where planes belong to different positions, each has instructions of its own."""
        own, vectors = self.carried, self.lay.vectors
        if own.alike:
            return super().multiply()
        assert not self.paired, self.t
        each = self.t.products(self.c).instructions * max(len(p[2].elements) for p in self.weights.phases)
        per_row = max(p.per_row for p in self.weights.taps)
        unroll = max(1, min(vectors // 2, UNROLLED // (each * per_row)))
        planes: Lines = []
        for (first, count), run in groupby(enumerate(zip(own.first, own.count, strict=True)), lambda each: each[1]):
            alike = [plane for plane, _ in run]
            if count == 0:
                planes += [line for plane in alike for line in fill(_NO_PLANE, plane=plane)]
                continue
            whole = count == len(own.taps[0])
            sums = "acc[rd][e][rh][tile]" if whole else "part[e][rh][tile]"
            products = self.products(f"wgmma_{FLAVOURS[self.c.multiplied]}_{self.t.block_m * count}", sums)
            each_plane = (fill(_PLANE, plane=plane, unroll=unroll, products=products) for plane in alike)
            places = {"begin": alike[0], "end": alike[-1] + 1, "first": first, "count": count}
            planes += fill(_IN_PLACE if whole else _APART, planes=list(chain(*each_plane)), **places)
        return fill(_MULTIPLY, accumulators=self.accumulators(), ahead=self.ahead(), planes=planes)

    def products(self, instruction: str, sums: str = "") -> Lines:
        """Those of a plane, in the `sums` that it has of its own, or in place."""
        own, of_plane = self.carried, "acc[rd][e][rh][tile]"
        if not sums and own.count[0] < len(own.taps[0]):
            of_plane = f"slots<{own.first[0]}, {own.count[0]}>({of_plane})"
        return super().products(instruction, sums or of_plane)

    def place_of_weights(self) -> Place:
        if self.paired:
            return Place(self.pairs([], "column"), _PACK, warpgroup_pairs.PUT.replace("feature", "column"))
        put = "to[weight_at<TAPS_W>(tap / TAPS_W, tap % TAPS_W, own, column)] = {value};"
        return Place(fill(positions.PLACE, weights_m=self.weights_m), _PACK, put)

    def body(self) -> Lines:
        (indices,) = passes(self.c, self.t.joined)
        phases = [self.weights.phases[i] for i in indices]
        names = {index: f"products[{i}]" for i, index in enumerate(indices)}
        complete = [f"complete({name}, of_phase[{i}]);" for i, name in enumerate(names.values())]
        each = [(f"of_phase[{i}]", phase) for i, phase in enumerate(phases)]
        follows = [
            f"const int complete_d = {moved('cell_d', '(slab - (DEPTH - 1))', self.lay.walks[0], 'd')};",
            *block("", [
                "const int cell_d = complete_d;",
                *self.epilogue.open_tile(),
                f"Sums of_phase[{len(phases)}];",
                *complete,
                *self.handed_on(each),
                *self.epilogue.after_cell(),
            ]),
        ]  # fmt: skip
        slab = [
            *self.steps.of_pass(names, []),
            *block("if (slab >= DEPTH - 1)", follows),
            *(f"make_room({name});" for name in names.values()),
        ]
        *unrolled, loop = self.steps.loops(indices[0])
        return [f"Accumulators products[{len(names)}] = {{}};", *unrolled, *block(loop, slab)]


_CELLS = """
constexpr int CELLS_D = $run, CELLS_H = OWN_H * WARPS_H, CELLS_W = 8 * OWN_W * WARPS_W;
// A block goes along d.  DEPTH cells are under way at a time, SLOTS positions, the oldest cell's first.  A plane of
// the input is multiplied by the taps of the positions that it belongs to: columns are [position][feature].
constexpr int DEPTH = $depth, SLOTS = $slots, BELONGS = $most, CARRIED = BELONGS * BLOCK_M;
constexpr int TAPS_OF_PLANE = $of_plane;    // of a channel's kernel
__device__ constexpr int TAP_OF[$planes][BELONGS] = {$taps};
"""

_ACCUMULATORS = """
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
"""

_MULTIPLY = """
$accumulators

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
    $ahead
    $planes
}
"""

# Planes that belong to all positions under way, and such as belong to some of them.  Only products of one shape are
# added up in order: others that meet in a register have to be waited for.  Where they meet as parts of one array, the
# assembler waits for each product on its own; so some have registers of their own in the meantime.
_IN_PLACE = """
if (first < $end * TAPS_H && first + rows > $begin * TAPS_H) {
    warpgroup_arrive();
    $planes
    warpgroup_commit();
    warpgroup_wait();
}
"""

_APART = """
if (first < $end * TAPS_H && first + rows > $begin * TAPS_H) {
    Part<$count> part;
    take_part<$first, $count>(acc, part, false);
    warpgroup_arrive();
    $planes
    warpgroup_commit();
    warpgroup_wait();
    take_part<$first, $count>(acc, part, true);
}
"""

_PLANE = """
#pragma unroll 1
for (int row = max(first, $plane * TAPS_H); row < min(first + rows, ($plane + 1) * TAPS_H); ++row) {
    const unsigned long long x_row = x + ($plane * TAP_D + row % TAPS_H * TAP_H);
#pragma unroll $unroll
    for (int k = 0; k < VECTORS; k += 2)
#pragma unroll
        for (int tap = 0; tap < TAPS_W; ++tap)
#pragma unroll
            for (int e = 0; e < ELEMENTS; ++e)
                $products
    w += TAPS_W * VECTORS * CARRIED;
}
"""

# Of a plane that belongs to no position.
_NO_PLANE = """
w += max(0, min(first + rows, ($plane + 1) * TAPS_H) - max(first, $plane * TAPS_H)) * TAPS_W * VECTORS * CARRIED;
"""

_PACK = """
// Lay out the weights of one phase, block and chunk for the tensor cores, of every plane of the input those of the
// positions that it belongs to; zeros where there are none.
template <int PLANES, int TAPS_H, int TAPS_W>
__device__ __forceinline__ void pack_phase(const Element* w, $operand* to, int group, int first_feature, int chunk,
                                           int first$most) {
    constexpr int TAPS_D = PLANES, ALL = PLANES * TAPS_H * TAPS_W;
    for (int i = $start; i < CARRIED * CHUNK * ALL; i += $step) {
        const int tap = i % ALL, own = i / ALL % CHUNK, column = i / (ALL * CHUNK)$channel;
        const int feature = column % BLOCK_M, of_d = TAP_OF[tap / (TAPS_H * TAPS_W)][column / BLOCK_M];
        const int of_w = of_d * TAPS_OF_PLANE + tap / TAPS_W % TAPS_H * NEXT_H + tap % TAPS_W * NEXT_W$at;
        const bool there = of_d >= 0 && first_feature + feature < O && $some;
        const Element value = there ? w[($row) * TAPS + first + of_w] : Element{};
        $halved
        $put
    }
}
"""
