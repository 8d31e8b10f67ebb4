"""How the rows of a tile of channel planes get into shared memory: the text, and which threads copy which rows.

A row has a few dozen elements, often at odd addresses, so there are many small copies and nothing but a copy should be
done for each: what belongs to a column is worked out once for all rows, what belongs to a row once for all channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fusewright.codegen.cuda import contraction_walk
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.residues import Walks

# Instructions per row, per channel of it and per copy, roughly as compiled; and what a turn of the level-1 cache costs
# in those: of 1, 2, 4 and 8 the least led to the fastest kernels.
ROW, CHANNEL, COPY, TURN = 20, 3, 2, 1

# Copies that a thread starts without a loop between them.
AT_ONCE = 16


@dataclass(frozen=True)
class Rows:
    """The rows of a tile: so many per channel, channels, bytes of an element, and threads that copy them."""

    count: int
    channels: int
    size: int
    threads: int

    def stage(self, vector: int, needed: int) -> str:
        """The statement that copies rows of so many elements, `vector` of them at a time."""
        columns = ceil(needed / vector) * vector
        lanes, slices = self._shared_out(vector, columns)
        copies = ceil(columns / (vector * lanes))
        unroll = max(1, min(AT_ONCE // copies, ceil(self.channels / slices)))
        sizes = f"{vector}, {columns}, {lanes}, {slices}, {unroll}"
        return f"stage_rows<{sizes}>(from, tile, channels, low_d, low_h, low_w, D, H, W);"

    def _shared_out(self, vector: int, columns: int) -> tuple[int, int]:
        """Threads side by side in a row, and channels of a row under way at a time: all is copied soonest."""
        ways = [
            (lanes, slices)
            for lanes in (32, 16, 8, 4, 64, 128, 256, 512)
            if self.threads % lanes == 0 and (lanes == 32 or columns <= vector * lanes * AT_ONCE)
            for slices in range(1, min(self.channels, self.threads // lanes) + 1)
        ]
        return min(ways, key=lambda way: self._instructions(vector, columns, *way))

    def _instructions(self, vector: int, columns: int, lanes: int, slices: int) -> int:
        """Roughly, of the busiest warp, and as many as the cache lets pass meanwhile: a turn per row and 128 bytes."""
        turns = max(1, 32 // lanes) * ceil(min(lanes, 32) * vector * self.size / 128)
        rows = ceil(self.count / (self.threads // lanes // slices))
        channels, copies = ceil(self.channels / slices), ceil(columns / (vector * lanes))
        return rows * (ROW + channels * (CHANNEL + copies * (COPY + TURN * turns)))


def text(walks: Walks, *, crowded: bool = False) -> Lines:
    """The text of `stage_rows`; in a `crowded` kernel no register holds addresses while it multiplies."""
    thread = "forgotten(threadIdx.x)" if crowded else "threadIdx.x"
    return fill(_STAGE_ROWS, thread=thread, **contraction_walk.names(walks))


_STAGE_ROWS = """
// Start copying rows of COLUMNS elements, VECTOR at a time and zeros outside, LANES threads to a row.  SETS rows are
// under way at a time, in SLICES channels each.  Nothing is read outside, so addresses may run over the ends of x.
template <int VECTOR, int COLUMNS, int LANES, int SLICES, int UNROLL>
__device__ __forceinline__ void stage_rows(const Element* x, Element* tile, int channels, int low_d, int low_h,
                                           int low_w, int D, int H, int W) {
    constexpr int SETS = THREADS / LANES / SLICES, TURNS = ceil_div(CHUNK, SLICES);
    constexpr int STEP = VECTOR * LANES, BYTES = VECTOR * sizeof(Element);
    const int thread = $thread;
    const int group = thread / LANES, set = group % SETS, first = SLICES == 1 ? 0 : group / SETS;
    const int column = thread % LANES * VECTOR, w = low_w + column;
    if (SETS * SLICES * LANES < THREADS && first >= SLICES) return;
    const long long plane = (long long)D * H * W;
    int d = set / X_H, h = set % X_H;
#pragma unroll 1
    for (int row = set; row < X_D * X_H; row += SETS) {
        const int x_d = low_d + d$by_d, x_h = low_h + h$by_h;
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
"""
