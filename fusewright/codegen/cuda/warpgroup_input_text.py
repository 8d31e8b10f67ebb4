"""CUDA C++ of how the input of a block gets to shared memory, where warpgroups multiply."""

from __future__ import annotations

STAGE = """
// What a thread stages at a time: runs of vectors of one column.  What has been read of them, and where in the tile
// they are, in columns of shared memory, packed indices of the input$kept_too.  The column of no run is negative.
$constants
constexpr int RUN = $run, COUNT = $runs * COLUMNS, AT_ONCE = $at_once;    // vectors of a run; runs; on their way
struct Fetched { $read_of_vector; };
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
        const unsigned row = at / $in_row, d = $row_d, h = $row_h, w = $own_w;
        places.to[n] = i < COUNT ? int(v * PLANE + row * ROW) + $column : $no_run;
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
        const int d = $own_d, h = $own_h, w = $w_at;
        const bool inside = places.to[n] > $no_run$some && $inside &&
                            $inside_too;
        const Element* from = start + ($from);
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            $read
        }
    }
}

// Write what was read to shared memory$rounding.
__device__ __forceinline__ void put_input(Fetched& fetched, const Places& places, $operand* tile$most) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            $changed
            $operand* const to = tile + (places.to[n] + k * PLANE) * VECTOR;
            $write
        }
    }
}
"""

# A thread finds every column,
COLUMNS = {
    "constants": ["constexpr int COLUMNS = X_D * X_H * X_W;    // of a vector"],
    "read_of_vector": "Channels read[AT_ONCE][RUN]",
    **{"in_row": "X_W", "own_w": "at % X_W", "column": "column(w)", "no_run": "-1"},
    "w_at": "index & 255",
}
WRITE_VECTOR = """
if ($there) *reinterpret_cast<uint4*>(to) = fetched.read[n][k].word;
"""

# or every word of two neighbours, which are columns of their own in shared memory.
WORDS = {
    "read_of_vector": "unsigned read[AT_ONCE][RUN][VECTOR]",
    **{"in_row": "WORDS", "own_w": "2 * (at % WORDS)", "column": "int(w) - BEFORE", "no_run": "-2"},
    "w_at": "int(index & 255) - BEFORE",
}
CONSTANTS_OF_WORDS = """
// Rows are read as words of two elements, of which BEFORE of the first one are before the tile's row.  Those of the
// input are of whole words, so that either both are inside or none.
constexpr int BEFORE = $before, WORDS = $words, COLUMNS = X_D * X_H * WORDS;    // of a row; of a vector, in words
"""
READ_WORDS = """
const bool some = $some;
$all
#pragma unroll
for (int j = 0; j < VECTOR; ++j, from += plane)
    fetched.read[n][k][j] = $which ? read_only(reinterpret_cast<const unsigned*>(from)) : 0u;
"""
# Words of channels side by side become channels of columns side by side.
TURNED = """
unsigned turned[2][VECTOR / 2];
#pragma unroll
for (int j = 0; j < VECTOR / 2; ++j) {
    const unsigned one = fetched.read[n][k][2 * j], next = fetched.read[n][k][2 * j + 1];
    turned[0][j] = (one & 0xffffu) | next << 16;
    turned[1][j] = one >> 16 | (next & 0xffff0000u);
}
const int w = int(places.index[n] & 255) - BEFORE;
"""
WRITE_WORDS = """
#pragma unroll
for (int i = 0; i < 2; ++i)
    if ($there && unsigned(w + i) < unsigned(X_W)) {
        const uint4 vector = {turned[i][0], turned[i][1], turned[i][2], turned[i][3]};
        *reinterpret_cast<uint4*>(to + i * VECTOR) = vector;
    }
"""

# Of a run whose last vector may not be there.
ALONE = " && (k == 0 || int(places.index[n] >> 24) + k * VECTOR < CHUNK)"

PLANE = """
const long long plane = D * H * W;
"""
# Which of several taps that are channels a chunk has.
TAP = """
const int tap = chunk / (OF_TAP / CHUNK);
"""
# A run's first channel, counted from `first` on; where a chunk has channels of several taps, of which one, too.
CHANNEL = """
const int channel = $own;
"""
CHANNEL_AND_TAP = """
const int multiplied = chunk * CHUNK + $own, tap = multiplied / OF_TAP, channel = multiplied % OF_TAP;
"""
# The same where a vector may have channels of several taps.
FIRST_MULTIPLIED = """
const int multiplied = chunk * CHUNK + $own;    // of channels and taps
"""
READ_DENSE = """
#pragma unroll
for (int j = 0; j < VECTOR; ++j) {
    const int tap = (multiplied + k * VECTOR + j) / C, channel = (multiplied + k * VECTOR + j) % C;
    const bool there = inside && tap < UNFOLDED && unsigned(low_$dim + $dim + tap * APART) < unsigned($length);
    fetched.read[n][k].element[j] = there ? read_only(from + channel * plane + tap * $step) : Element{};
}
"""
READ = """
const bool some = $some;
$all
#pragma unroll
for (int j = 0; j < VECTOR; ++j, from += $step)
    fetched.read[n][k].element[j] = $which ? read_only(from) : Element{};
"""
ALL = """
const bool all = some && channel + (k + 1) * VECTOR <= channels;
"""
READ_VECTOR = """
const bool some = $some;
fetched.read[n][k].word = some ? read_only(reinterpret_cast<const uint4*>(from) + k) : uint4{};
"""
READ_TWO_WORDS = """
const bool some = $some;
#pragma unroll
for (int j = 0; j < 2; ++j)
    fetched.read[n][k].words[j] = some ? read_only(reinterpret_cast<const uint4*>(from) + 2 * k + j) : uint4{};
"""

ROUND = """
#pragma unroll
for (int j = 0; j < VECTOR; ++j) {
    Element& value = fetched.read[n][k].element[j];
    value = __uint_as_float(round_tf32(value));
}
"""
# Numbers of neighbouring channels become halves of one word.
HALVED = """
uint4 halves;
#pragma unroll
for (int j = 0; j < VECTOR / 2; ++j) {
    unsigned& pair = (&halves.x)[j];
    pair = pair_of_halves(fetched.read[n][k].element[2 * j], fetched.read[n][k].element[2 * j + 1]);
    most = largest_halves(most, pair);
}
"""
WRITE_HALVES = """
if ($there) *reinterpret_cast<uint4*>(to) = halves;
"""

# The input, chunk after chunk of a tile and tile after tile: a thread's first vectors are read a step before they are
# written.
STAGING = """
// What of the input is read next, or on its way.
const Places places = places_of($thread, D, H, W);
Fetched fetched;
$staged
const auto read_input = [&] {
    if ($some) fetch_input(fetched, places, x_sample, $chunk, $cell, D, H, W);
};
$about
const auto write_input = [&]($operand* to) {
    if (!($some)) return;
    put_input(fetched, places, to$most);
    $others
    $follow
    $read
};
"""

WRITE_AND_READ = """
// Write that to shared memory, and start reading what follows.
"""
WRITE = """
// Write that to shared memory.
"""

# Of threads that stage more runs than are on their way at a time.
OTHERS = """
for (int begin = $thread + AT_ONCE * $threads; begin < COUNT; begin += AT_ONCE * $threads) {
    const Places others = places_of(begin, D, H, W);
    fetch_input(fetched, others, x_sample, $chunk, $cell, D, H, W);
    put_input(fetched, others, to$most);
}
"""

# Tiles follow each other quickly where all channels are staged at once: their places are carried on.
WALK = """
const Tile apart = tile_at(parts);
const auto following = [&](Tile tile) -> Tile {
    tile = {tile.d + apart.d, tile.h + apart.h, tile.w + apart.w};
    if (tile.w >= tiles_w) tile.w -= tiles_w, ++tile.h;
    if (tile.h >= tiles_h) tile.h -= tiles_h, ++tile.d;
    return tile;
};
"""
WALKED = {
    "staged": ["Tile staged = tile_at(part);"],
    "chunk": "0",
    "some": "staged.d < tiles_d",
    "cell": "cell_of(staged)",
    "follow": ["staged = following(staged);"],
}
TILES_WALKED = (
    "for (Tile tile = tile_at(part); tile.d < tiles_d; tile = following(tile))",
    "tile",
    "following(tile).d < tiles_d",
)
# Else they are found by division, which takes fewer registers.  A tile's chunks are counted over all passes.
DIVIDED = {
    "staged": ["int staged_tile = part, staged_chunk = 0;", "Cell staged = cell_of(tile_at(part));"],
    "some": "staged_tile < tiles",
    "cell": "staged",
}
TILES_DIVIDED = "for (int tile = part; tile < tiles; tile += parts)", "tile_at(tile)", "tile + parts < tiles"
NEXT_CHUNK = """
if (++staged_chunk == $per_tile) {
    staged_chunk = 0;
    staged_tile += parts;
    staged = cell_of(tile_at(staged_tile));
}
"""
