"""How the input of a block gets to shared memory, where warpgroups multiply: chunk after chunk, tile after tile.

A thread reads vectors of neighbouring channels, which wait in its registers until the step before they are multiplied
writes them.  Where it has more vectors than it reads at a time, the others are read and written in that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusewright.codegen.cuda import contraction_walk
from fusewright.codegen.text import Lines, fill
from fusewright.schedule import warpgroup_staging as staging
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.warpgroup_staging import WarpgroupCut


@dataclass(frozen=True)
class Input:
    """Writes the staging of one group and tile.

    passes   how often a tile's chunks are gone through
    most     registers that a thread may have
    """

    c: Contraction
    t: WarpgroupCut
    passes: int
    most: int

    @property
    def chunks(self) -> int:
        """Of a tile's channels."""
        return staging.chunks(self.c, self.t)

    # -- functions: what a thread reads and writes at a time

    def functions(self) -> Lines:
        """How vectors are found, read and written."""
        c, walks = self.c, staging.staged(self.c, self.t).walks
        names: dict[str, object] = {f"advance_{a}": axis.advance for a, axis in zip("dhw", c.axes, strict=True)}
        names |= {f"low_{a}": axis.reach()[0] for a, axis in zip("dhw", c.axes, strict=True)}
        names |= contraction_walk.names(walks)
        names |= self._channel()
        rounds = c.x.dtype == torch.float32
        return fill(
            _STAGE,
            **names,
            **self._offsets(f"d{names['by_d']}", f"h{names['by_h']}"),
            at_once=staging.staged_by_thread(c, self.t)[1],
            order="v = i % VECTORS, at = i / VECTORS" if c.channels_last else "v = i / COLUMNS, at = i % COLUMNS",
            memory=self._memory(),
            read=self._read(),
            round=fill(_ROUND) if rounds else [],
            rounding=", rounded to tf32" if rounds else "",
        )

    def _channel(self) -> dict[str, object]:
        """What of x a vector's channels are: counted from the chunk's first, or x's and a tap."""
        u = self.c.unfolded
        if u is None:
            return {
                "channels": "C - chunk * CHUNK",
                "channel": fill(_CHANNEL),
                "some": "",
                "moved_d": "",
                "moved_h": "",
            }
        moved = {f"moved_{a}": " + tap * APART" if a == "dh"[u.dim] else "" for a in "dh"}
        return {"channels": "C", "channel": fill(_CHANNEL_AND_TAP), "some": " && tap < UNFOLDED", **moved}

    def _memory(self) -> Lines:
        """Where the channels of a chunk begin, and how many of them there are."""
        first = "" if self.c.unfolded is not None else " + chunk * CHUNK"
        if self.c.channels_last:
            return fill(_LAST, first=first)
        return fill(_PLANES, first=f"{first} * plane" if first else "")

    def _read(self) -> Lines:
        """Read a vector: whole, where it lies so in memory."""
        whole = "C % CHUNK" if self.c.unfolded is None else "C % VECTOR"
        if not self.c.channels_last:
            return fill(_READ, step=" * plane", whole=whole)
        if self.c.channels_of_x % staging.vector(self.c):
            return fill(_READ, step="", whole=whole)
        return fill(_READ_VECTOR, whole=whole)

    def _offsets(self, d: str, h: str) -> dict[str, object]:
        """How far into x a vector is: kept by its thread, or worked out again; `d`, `h` are rows of a tile."""
        if not self._roomy:
            again = self._at("channel", "x_d", "x_h", "x_w")
            return {"kept_too": "", "kept_member": [], "kept_at": [], "start": [], "from": again}
        return {
            "kept_too": ", elements of x",
            "kept_member": ["int from[AT_ONCE];"],
            "kept_at": [f"places.from[n] = {self._at('v * VECTOR', d, h, 'w')};"],
            "start": [f"const int start = {self._at('', 'low_d', 'low_h', 'low_w')};"],
            "from": "start + places.from[n]",
        }

    def _at(self, channel: str, d: str, h: str, w: str) -> str:
        """Where an element of a sample's first chunk is; none given is the first channel."""
        if self.c.channels_last:
            return f"(({d} * H + {h}) * W + {w}) * (GROUPS * C)" + (f" + {channel}" if channel else "")
        row = f"({channel} * D + {d})" if channel else d
        return f"({row} * H + {h}) * W + {w}"

    @property
    def _roomy(self) -> bool:
        """Whether a thread has registers to spare for what it could work out again."""
        if self.c.unfolded is not None:  # a chunk's vectors are not as far from each other as those of the first
            return False
        return self.t.registers(self.c) + staging.staged_by_thread(self.c, self.t)[1] <= self.most

    # -- statements of the kernel

    def statements(self) -> Lines:
        """How the kernel reads what is next, and writes it."""
        each, at_once = staging.staged_by_thread(self.c, self.t)
        names = self._staged
        others = fill(_OTHERS, chunk=names["chunk"], cell=names["cell"]) if each > at_once else []
        walk = fill(_WALK) if self.chunks == 1 else []
        return [*walk, *fill(_STAGING, **names, others=others)]

    @property
    def _staged(self) -> dict[str, Any]:
        """What is staged next."""
        if self.chunks == 1:
            return _WALKED
        chunk = "staged_chunk" if self.passes == 1 else f"staged_chunk % {self.chunks}"
        return {**_DIVIDED, "chunk": chunk, "follow": fill(_NEXT_CHUNK, per_tile=self.chunks * self.passes)}

    def each_tile(self) -> dict[str, object]:
        """How the kernel goes through the tiles of a block."""
        loop, tile, another = _TILES_WALKED if self.chunks == 1 else _TILES_DIVIDED
        follows = [f"const bool another = {another};    // tile follows"]
        return {"loop": loop, "tile": tile, "another": [] if self.t.stay else follows}


_STAGE = """
// The vectors that a thread stages at a time: what has been read, and where in the tile they are, in columns of shared
// memory, packed indices of the input$kept_too.  Of no vector at all the column is negative.
constexpr int COLUMNS = X_D * X_H * X_W, COUNT = VECTORS * COLUMNS;    // of a vector; vectors of a tile
constexpr int AT_ONCE = $at_once;
struct Fetched { Channels read[AT_ONCE]; };
struct Places {
    int to[AT_ONCE];
    unsigned index[AT_ONCE];
    $kept_member
};

__device__ __forceinline__ Places places_of(int first, int D, int H, int W) {
    Places places;
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const int i = first + n * THREADS, $order;
        const int d = at / (X_H * X_W), h = at / X_W % X_H, w = at % X_W;
        places.to[n] = i < COUNT ? v * PLANE + (d * X_H + h) * (PITCH * SKIP) + column(w) : -1;
        places.index[n] = unsigned(v * VECTOR) << 24 | d$by_d << 16 | h$by_h << 8 | w;
        $kept_at
    }
    return places;
}

// Start reading what a block's cells read, zeros outside.
__device__ __forceinline__ void fetch_input(Fetched& fetched, const Places& places, const Element* x, int chunk,
                                            Cell cell, int D, int H, int W) {
    const int low_d = cell.d * $advance_d + $low_d, low_h = cell.h * $advance_h + $low_h;
    const int low_w = cell.w * $advance_w + $low_w, channels = $channels;
    $memory
    $start
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned index = places.index[n];
        $channel
        const int x_d = low_d + (index >> 16 & 255)$moved_d, x_h = low_h + (index >> 8 & 255)$moved_h;
        const int x_w = low_w + (index & 255);
        const bool inside = places.to[n] >= 0$some && unsigned(x_d) < unsigned(D) && unsigned(x_h) < unsigned(H) &&
                            unsigned(x_w) < unsigned(W);
        const Element* const from = own + ($from);
        $read
    }
}

// Write what was read to shared memory$rounding.
__device__ __forceinline__ void put_input(Fetched& fetched, const Places& places, Element* tile) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        $round
        if (places.to[n] >= 0) *reinterpret_cast<uint4*>(tile + places.to[n] * VECTOR) = fetched.read[n].word;
    }
}
"""

# Where channels lie in planes, a vector's elements are far apart; where they come last, they are neighbours.
_PLANES = """
const int plane = D * H * W;
const Element* const own = x$first;
"""
_LAST = """
const Element* const own = x$first;
"""
# A vector's first channel, counted from `own` on; where taps are channels, too, which one.
_CHANNEL = """
const int channel = index >> 24;
"""
_CHANNEL_AND_TAP = """
const int multiplied = chunk * CHUNK + (index >> 24), tap = multiplied / OF_TAP, channel = multiplied % OF_TAP;
"""
_READ = """
#pragma unroll
for (int j = 0; j < VECTOR; ++j)
    fetched.read[n].element[j] = inside && ($whole == 0 || channel + j < channels) ? from[j$step] : Element{};
"""
_READ_VECTOR = """
const bool there = inside && ($whole == 0 || channel < channels);
fetched.read[n].word = there ? *reinterpret_cast<const uint4*>(from) : uint4{};
"""

_ROUND = """
#pragma unroll
for (int j = 0; j < VECTOR; ++j) {
    Element& value = fetched.read[n].element[j];
    value = __uint_as_float(round_tf32(value));
}
"""

# The input, chunk after chunk of a tile and tile after tile: a thread's first vectors are read a step before they are
# written.
_STAGING = """
// What of the input is read next, or on its way.
const Places places = places_of(threadIdx.x, D, H, W);
Fetched fetched;
$staged
const auto read_input = [&] {
    if ($some) fetch_input(fetched, places, x_sample, $chunk, $cell, D, H, W);
};
// Write that to shared memory, and start reading what follows.
const auto write_input = [&](Element* to) {
    if (!($some)) return;
    put_input(fetched, places, to);
    $others
    $follow
    read_input();
};
"""

# Of threads that stage more vectors than are on their way at a time.
_OTHERS = """
for (int first = threadIdx.x + AT_ONCE * THREADS; first < COUNT; first += AT_ONCE * THREADS) {
    const Places others = places_of(first, D, H, W);
    fetch_input(fetched, others, x_sample, $chunk, $cell, D, H, W);
    put_input(fetched, others, to);
}
"""

# Tiles follow each other quickly where all channels are staged at once: their places are carried on.
_WALK = """
const Tile apart = tile_at(parts);
const auto following = [&](Tile tile) -> Tile {
    tile = {tile.d + apart.d, tile.h + apart.h, tile.w + apart.w};
    if (tile.w >= tiles_w) tile.w -= tiles_w, ++tile.h;
    if (tile.h >= tiles_h) tile.h -= tiles_h, ++tile.d;
    return tile;
};
"""
_WALKED = {
    "staged": ["Tile staged = tile_at(part);"],
    "chunk": "0",
    "some": "staged.d < tiles_d",
    "cell": "cell_of(staged)",
    "follow": ["staged = following(staged);"],
}
_TILES_WALKED = (
    "for (Tile tile = tile_at(part); tile.d < tiles_d; tile = following(tile))",
    "tile",
    "following(tile).d < tiles_d",
)
# Else they are found by division, which takes fewer registers.  A tile's chunks are counted over all passes.
_DIVIDED = {
    "staged": ["int staged_tile = part, staged_chunk = 0;", "Cell staged = cell_of(tile_at(part));"],
    "some": "staged_tile < tiles",
    "cell": "staged",
}
_TILES_DIVIDED = "for (int tile = part; tile < tiles; tile += parts)", "tile_at(tile)", "tile + parts < tiles"
_NEXT_CHUNK = """
if (++staged_chunk == $per_tile) {
    staged_chunk = 0;
    staged_tile += parts;
    staged = cell_of(tile_at(staged_tile));
}
"""
