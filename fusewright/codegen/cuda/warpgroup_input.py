"""How the input of a block gets to shared memory, where warpgroups multiply: chunk after chunk, tile after tile.

A thread reads vectors of neighbouring channels, which wait in its registers until the step before they are multiplied
writes them.  Where it has more of them than it reads at a time, the others are read and written in that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusewright.codegen.cuda import contraction_walk
from fusewright.codegen.text import Lines, fill
from fusewright.schedule import warpgroup_staging as staging
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.tiling import REGISTERS
from fusewright.schedule.warpgroup_estimate import keeps_places
from fusewright.schedule.warpgroup_staging import WarpgroupCut


@dataclass(frozen=True)
class Input:
    """Writes the staging of one group and tile.

    passes   how often a tile's chunks are gone through
    per_sm   blocks at a time on a multiprocessor
    """

    c: Contraction
    t: WarpgroupCut
    passes: int
    per_sm: int

    @property
    def chunks(self) -> int:
        """Of a tile's channels."""
        return staging.chunks(self.c, self.t)

    # -- functions: what a thread reads and writes at a time

    def functions(self) -> Lines:
        """How runs of vectors are found, read and written."""
        c, walks = self.c, staging.staged(self.c, self.t).walks
        names: dict[str, object] = {}
        for i, a in enumerate("dhw"):
            low, advance = c.reads(i)
            over = f" / {advance.denominator}" if advance.denominator > 1 else ""
            names |= {f"low_{a}": low, f"advance_{a}": f"{advance.numerator}{over}"}
        names |= contraction_walk.names(walks)
        rounds = c.x.dtype == torch.float32
        return fill(
            _STAGE,
            **names,
            **self._indices(),
            **self._offsets(f"d{names['by_d']}", f"h{names['by_h']}"),
            run=staging.run(c, self.t),
            runs="(VECTORS + 1) / RUN" if self._last_alone else "VECTORS / RUN",
            there="places.to[n] >= 0" + (_ALONE if self._last_alone else ""),
            threads=staging_threads(self.t),
            at_once=staging.staged_by_thread(c, self.t)[1],
            order="v = i % VECTORS, at = i / VECTORS" if c.channels_last else "v = i / COLUMNS * RUN, at = i % COLUMNS",
            plane=[] if c.channels_last else fill(_PLANE),
            start=self._at("first", "low_d", "low_h", "low_w"),
            read=self._read(),
            round=fill(_ROUND) if rounds else [],
            rounding=", rounded to tf32" if rounds else "",
        )

    @property
    def _last_alone(self) -> bool:
        """Whether a column's last run has fewer vectors than the others."""
        return staging.staged(self.c, self.t).vectors % staging.run(self.c, self.t) > 0

    def _indices(self) -> dict[str, object]:
        """Which channels and rows a chunk begins with, and which of the tile's a run has: what is the same for all runs
        is not found out for each."""
        u, lay = self.c.unfolded, staging.staged(self.c, self.t)
        d, h, _ = lay.lengths
        own = "int(index >> 24)" if lay.vectors > staging.run(self.c, self.t) else "0"
        rows = {"d": "int(index >> 16 & 255)" if d > 1 else "0", "h": "int(index >> 8 & 255)" if h > 1 else "0"}
        both = d > 1 and h > 1
        found: dict[str, object] = {"tap": [], "first": "chunk * CHUNK", "some": "", "moved_d": "", "moved_h": ""}
        channel = fill(_CHANNEL, own=own)
        if u is not None:
            dim = "dh"[u.dim]
            if self._of_one_tap:
                found |= {
                    "tap": fill(_TAP),
                    "first": "chunk % (OF_TAP / CHUNK) * CHUNK",
                    f"moved_{dim}": " + tap * APART",
                }
            else:
                rows[dim] += " + tap * APART"
                channel = fill(_CHANNEL_AND_TAP, own=own)
                found |= {"first": "0", "some": " && tap < UNFOLDED"}
        found |= {"row_d": "row / X_H" if both else "0" if d == 1 else "row"}
        found |= {"row_h": "row % X_H" if both else "0" if h == 1 else "row"}
        return {**found, "channel": channel, "own_d": rows["d"], "own_h": rows["h"]}

    @property
    def _of_one_tap(self) -> bool:
        """Whether a chunk has channels of one tap, of taps that are channels."""
        u = self.c.unfolded
        return u is not None and u.channels % self.t.chunk == 0

    def _read(self) -> Lines:
        """Read a run: whole vectors, where they lie so in memory; zeros for channels that there are not."""
        c, n = self.c, staging.vector(self.c)
        ends = c.channels_of_x % (n if c.unfolded is not None and not self._of_one_tap else self.t.chunk)
        some = "inside && channel + k * VECTOR < channels" if ends or self._last_alone else "inside"
        if c.channels_last and c.channels_of_x % n == 0:
            return fill(_READ_VECTOR, some=some)
        step = "1" if c.channels_last else "plane"
        if c.channels_of_x % n == 0:
            return fill(_READ, some=some, all=[], which="some", step=step)
        return fill(_READ, some=some, all=fill(_ALL), which=f"(j < {c.channels_of_x % n} ? some : all)", step=step)

    def _offsets(self, d: str, h: str) -> dict[str, object]:
        """How far behind the first a run is: kept by its thread, or worked out again; `d`, `h` are rows of a tile."""
        if not self._roomy:
            return {"kept_too": "", "kept_member": [], "kept_at": [], "from": self._at("channel", "d", "h", "w")}
        return {
            "kept_too": ", elements of x",
            "kept_member": ["int from[AT_ONCE];"],
            "kept_at": [f"places.from[n] = {self._at('v * VECTOR', d, h, 'w')};"],
            "from": "places.from[n]",
        }

    def _at(self, channel: str, d: str, h: str, w: str) -> str:
        """How far an element is from a sample's first."""
        if self.c.channels_last:
            return f"(({d} * H + {h}) * W + {w}) * (GROUPS * C) + {channel}"
        return f"(({channel} * D + {d}) * H + {h}) * W + {w}"

    @property
    def _roomy(self) -> bool:
        """Whether a thread that stages has registers to spare for what it could work out again."""
        if self.c.unfolded is not None and not self._of_one_tap:  # runs are not as far from each other in every chunk
            return False
        if self.t.producers:
            return True
        most = min(255, REGISTERS // (self.t.threads * self.per_sm))
        return self.t.registers(self.c) + staging.staged_by_thread(self.c, self.t)[1] <= most

    # -- statements of the kernel

    def statements(self) -> Lines:
        """How the kernel reads what is next, and writes it."""
        return [*self.walk(), *self.staging()]

    def walk(self) -> Lines:
        """How the kernel finds the next tile without dividing, where it does."""
        return fill(_WALK) if self.chunks == 1 else []

    def staging(self) -> Lines:
        """The same once it has that."""
        each, at_once = staging.staged_by_thread(self.c, self.t)
        names = self._staged
        others: Lines = []
        if each > at_once:
            kept = not self.t.producers or keeps_places(self.c, self.t, self.per_sm)
            thread = staging_thread(self.t, "threadIdx.x" if kept else "forgotten(threadIdx.x)")
            at = {"chunk": names["chunk"], "cell": names["cell"]}
            others = fill(_OTHERS, **at, thread=thread, threads=staging_threads(self.t))
        about, read = (_WRITE, []) if self.t.producers else (_WRITE_AND_READ, ["read_input();"])
        own = {"thread": staging_thread(self.t), "others": others, "about": fill(about), "read": read}
        return fill(_STAGING, **names, **own)

    @property
    def follow(self) -> Lines:
        """Go on to what is staged next."""
        return self._staged["follow"]  # type: ignore[no-any-return]

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
        return {"loop": loop, "tile": tile, "another": [] if self.t.stay or self.t.producers else follows}


def staging_thread(t: WarpgroupCut, thread: str = "threadIdx.x") -> str:
    """Text: which of the threads that stage a block's `thread` is."""
    return f"({thread} % PRODUCERS)" if t.producers else thread


def staging_threads(t: WarpgroupCut) -> str:
    """Text: how many those are."""
    return "PRODUCERS" if t.producers else "THREADS"


def all_threads(t: WarpgroupCut) -> str:
    """Text: how many threads a block has."""
    return "ALL_THREADS" if t.producers else "THREADS"


_STAGE = """
// What a thread stages at a time: runs of vectors of one column.  What has been read of them, and where in the tile
// they are, in columns of shared memory, packed indices of the input$kept_too.  The column of no run is negative.
constexpr int COLUMNS = X_D * X_H * X_W, RUN = $run, COUNT = $runs * COLUMNS;    // of a vector; of a run; runs
constexpr int AT_ONCE = $at_once;
struct Fetched { Channels read[AT_ONCE][RUN]; };
struct Places {
    int to[AT_ONCE];
    unsigned index[AT_ONCE];
    $kept_member
};

__device__ __forceinline__ Places places_of(int begin, int D, int H, int W) {
    Places places;
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned i = begin + n * $threads, $order;
        const unsigned row = at / X_W, d = $row_d, h = $row_h, w = at % X_W;
        places.to[n] = i < COUNT ? int(v * PLANE + row * ROW + column(w)) : -1;
        places.index[n] = v * VECTOR << 24 | d$by_d << 16 | h$by_h << 8 | w;
        $kept_at
    }
    return places;
}

// Start reading what a block's cells read, zeros outside.
__device__ __forceinline__ void fetch_input(Fetched& fetched, const Places& places, const Element* x, int chunk,
                                            Cell cell, int D, int H, int W) {
    $tap
    const int first = $first, channels = C - first;
    const int low_d = cell.d * $advance_d + $low_d$moved_d, low_h = cell.h * $advance_h + $low_h$moved_h;
    const int low_w = cell.w * $advance_w + $low_w;
    $plane
    const Element* const start = forgotten(x + ($start));
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
        const unsigned index = places.index[n];
        $channel
        const int d = $own_d, h = $own_h, w = index & 255;
        const bool inside = places.to[n] >= 0$some && unsigned(low_d + d) < unsigned(D) &&
                            unsigned(low_h + h) < unsigned(H) && unsigned(low_w + w) < unsigned(W);
        const Element* from = start + ($from);
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            $read
        }
    }
}

// Write what was read to shared memory$rounding.
__device__ __forceinline__ void put_input(Fetched& fetched, const Places& places, Element* tile) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            $round
            Element* const to = tile + (places.to[n] + k * PLANE) * VECTOR;
            if ($there) *reinterpret_cast<uint4*>(to) = fetched.read[n][k].word;
        }
    }
}
"""

# Of a run whose last vector may not be there.
_ALONE = " && (k == 0 || int(places.index[n] >> 24) + k * VECTOR < CHUNK)"

_PLANE = """
const long long plane = D * H * W;
"""
# Which of several taps that are channels a chunk has.
_TAP = """
const int tap = chunk / (OF_TAP / CHUNK);
"""
# A run's first channel, counted from `first` on; where a chunk has channels of several taps, of which one, too.
_CHANNEL = """
const int channel = $own;
"""
_CHANNEL_AND_TAP = """
const int multiplied = chunk * CHUNK + $own, tap = multiplied / OF_TAP, channel = multiplied % OF_TAP;
"""
_READ = """
const bool some = $some;
$all
#pragma unroll
for (int j = 0; j < VECTOR; ++j, from += $step)
    fetched.read[n][k].element[j] = $which ? read_only(from) : Element{};
"""
_ALL = """
const bool all = some && channel + (k + 1) * VECTOR <= channels;
"""
_READ_VECTOR = """
const bool some = $some;
fetched.read[n][k].word = some ? read_only(reinterpret_cast<const uint4*>(from) + k) : uint4{};
"""

_ROUND = """
#pragma unroll
for (int j = 0; j < VECTOR; ++j) {
    Element& value = fetched.read[n][k].element[j];
    value = __uint_as_float(round_tf32(value));
}
"""

# The input, chunk after chunk of a tile and tile after tile: a thread's first vectors are read a step before they are
# written.
_STAGING = """
// What of the input is read next, or on its way.
const Places places = places_of($thread, D, H, W);
Fetched fetched;
$staged
const auto read_input = [&] {
    if ($some) fetch_input(fetched, places, x_sample, $chunk, $cell, D, H, W);
};
$about
const auto write_input = [&](Element* to) {
    if (!($some)) return;
    put_input(fetched, places, to);
    $others
    $follow
    $read
};
"""

_WRITE_AND_READ = """
// Write that to shared memory, and start reading what follows.
"""
_WRITE = """
// Write that to shared memory.
"""

# Of threads that stage more runs than are on their way at a time.
_OTHERS = """
for (int begin = $thread + AT_ONCE * $threads; begin < COUNT; begin += AT_ONCE * $threads) {
    const Places others = places_of(begin, D, H, W);
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
