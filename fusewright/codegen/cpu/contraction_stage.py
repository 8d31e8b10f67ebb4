"""What a strip of a contraction reads on a CPU: its input, staged in the cache in the order of use."""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cpu.elements import read
from fusewright.codegen.text import Lines, fill, indent
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.strips import is_channelwise, span

CONTIGUOUS = """
// The staged input is [channel][d][h][w].
constexpr int COLUMN = 1, ROW = INPUTS_W, PLANE = INPUTS_H * ROW;
constexpr int CHANNEL = (ceil_div(INPUTS_D * PLANE, 16) | 1) * 16;    // an odd number of cache lines
"""

CHANNELS_LAST = """
// The staged input is [d][h][w][channel].
constexpr int CHANNEL = 1, COLUMN = CHANNELS < 64 ? CHANNELS : (ceil_div(CHANNELS, 16) | 1) * 16;
constexpr int ROW = INPUTS_W * COLUMN, PLANE = INPUTS_H * ROW;
"""

CHANNELWISE = """
// The staged input is [d][h][w][channel][lane], the channels those of the group of each lane's feature.
constexpr int CHANNEL = BLOCK, COLUMN = CHANNELS * BLOCK, ROW = INPUTS_W * COLUMN, PLANE = INPUTS_H * ROW;
"""

STAGE = """
// The input that a strip reads, in the compute type, zeros around the image.  x is a sample's group; (d, h, w) is the
// input at the strip's corner, (rows_d, rows_h, columns) what of it is read.
void stage(const Call& call, const Element* __restrict x,$block
    int d, int h, int w, int rows_d, int rows_h, int columns, Compute* __restrict staged) {
    const int begin = larger(0, smaller(-w, columns)), end = larger(begin, smaller(call.in_w - w, columns));
$loops
}
"""

STAGE_CONTIGUOUS = """
$whole
const long long image = (long long)call.in_d * call.in_h * call.in_w;
for (int c = 0; c < CHANNELS; ++c)
    for (int i = 0; i < rows_d; ++i)
        for (int j = 0, rows; j < rows_h; j += rows) {
            rows = 1;
            $skip
            Compute* to = staged + c * CHANNEL + i * PLANE + j * ROW;
            const bool inside = unsigned(d + i) < unsigned(call.in_d) && unsigned(h + j) < unsigned(call.in_h);
            if (!inside) {
                zero(to, columns);
                continue;
            }
            $rows
            const Element* from = x + (((long long)c * call.in_d + d + i) * call.in_h + h + j) * call.in_w + w;
            __builtin_prefetch(from + 2 * image);    // of the channel after the next one: rows are short
            zero(to, begin);
            copy(from + begin, end - begin + (rows - 1) * ROW, to + begin);
            zero(to + end, columns - end);
        }
"""

WHOLE = "const bool whole = columns == ROW && call.in_w == ROW && w == 0;    // rows lie here as they do in memory"
ROWS_AT_ONCE = "if (whole) rows = smaller(rows_h - j, call.in_h - h - j);"

# A compiler would call memset and memcpy, which takes longer than the few numbers of a row.
COPIES = """
// Zeros, whole vectors of them: what lies behind the row is written next, or never read.
inline void zero(Compute* to, int count) {
    for (int k = 0; k < count; k += LANES) store(Vector{}, to + k);
}

$copy

"""

COPY = """
inline void copy(const Element* from, int count, Compute* to) {
    for (int k = 0; k < count; ++k) to[k] = $x;
}
"""

COPY_SAME = """
template <int COUNT>
inline void copy_some(const Compute*& from, Compute*& to) {
    std::memcpy(to, from, COUNT * sizeof(Compute));
    from += COUNT, to += COUNT;
}

// Whole lines, and halves of what remains.
inline void copy(const Compute* from, int count, Compute* to) {
    for (; count >= 16; count -= 16) copy_some<16>(from, to);
    if (count & 8) copy_some<8>(from, to);
    if (count & 4) copy_some<4>(from, to);
    if (count & 2) copy_some<2>(from, to);
    if (count & 1) copy_some<1>(from, to);
}
"""

CHANNEL_OF = """
// The channel that lane `lane` of the staged input holds; lanes behind the last feature hold what that reads.
inline int channel_of(int first_feature, int features, int lane) {
    return $channel;
}

"""

LANES_LAST = """
int channels[COLUMN];
for (int c = 0; c < COLUMN; ++c) channels[c] = channel_of(first_feature, features, c);
"""


# GCC makes vectors of the two loops since the second one is unrolled and the first one has no remainder.
TURN = """
// to[k * COLUMN + lane] = of[lane][k].
template <int SIDE>
inline void turn(const Element* const* of, int begin, int end, Compute* to) {
    for (int k = begin; k < end; k = next_square<SIDE>(k, end)) {
        Compute turned[SIDE][LANES];
#pragma omp simd
        for (int n = 0; n < SIDE; ++n)
#pragma GCC unroll 16
            for (int lane = 0; lane < LANES; ++lane) turned[n][lane] = $x;
        for (int n = 0; n < SIDE; ++n) store(load(turned[n]), to + (k + n) * COLUMN);
    }
}

"""

STAGE_LANES = """
const long long image = (long long)call.in_d * call.in_h * call.in_w;
for (int i = 0; i < rows_d; ++i)
    for (int j = 0; j < rows_h; ++j) {
        $skip
        Compute* row = staged + i * PLANE + j * ROW;
        const bool inside = unsigned(d + i) < unsigned(call.in_d) && unsigned(h + j) < unsigned(call.in_h);
        std::fill(row, row + (inside ? begin : columns) * COLUMN, Compute(0));
        if (!inside) continue;
        std::fill(row + end * COLUMN, row + columns * COLUMN, Compute(0));
        const Element* from = x + ((long long)(d + i) * call.in_h + h + j) * call.in_w + w;
        for (int first = 0; first < COLUMN; first += LANES) {
            const Element* of[LANES];    // the rows that come to lie side by side
            for (int lane = 0; lane < LANES; ++lane)
                of[lane] = from + channel_of(first_feature, features, first + lane) * image;
            if (end - begin >= LANES) turn<LANES>(of, begin, end, row + first);
            else if (end - begin >= 4) turn<4>(of, begin, end, row + first);
            else turn<1>(of, begin, end, row + first);
        }
    }
"""

STAGE_CHANNELS_LAST = """
for (int i = 0; i < rows_d; ++i)
    for (int j = 0; j < rows_h; ++j) {
        $skip
        const bool inside = unsigned(d + i) < unsigned(call.in_d) && unsigned(h + j) < unsigned(call.in_h);
        const Element* from = x + (((long long)(d + i) * call.in_h + h + j) * call.in_w + w) * $total;
        for (int k = 0; k < columns; ++k) {
            Compute* to = staged + i * PLANE + j * ROW + k * COLUMN;
            const bool read = inside && k >= begin && k < end;
            for (int c = 0; c < $channels; ++c) to[c] = read ? $x : Compute(0);
        }
    }
"""

BOX = """
constexpr int BOX_D = $box_d, BOX_H = $box_h, BOX_W = $box_w;    // a window of x,
constexpr int BOX_STEP_D = $step_d, BOX_STEP_H = $step_h, BOX_STEP_W = $step_w;    // whose elements lie so far apart
constexpr int BOX_REACH = (BOX_W - 1) * BOX_STEP_W;

// The window sums that a strip reads: over the rows of a window first, then along them.
void stage(const Call& call, const Element* __restrict x,$block
    int d, int h, int w, int rows_d, int rows_h, int columns, Compute* __restrict staged) {
    Compute sums[INPUTS_W + BOX_REACH];
    const int wide = smaller(columns + BOX_REACH, call.in_w - w);
    $loops
                $skip
                const long long channel = $channel;
                const Element* from = x + ((channel * call.in_d + d + i) * call.in_h + h + j) * call.in_w + w;
                const long long next_d = (long long)BOX_STEP_D * call.in_h * call.in_w;
                const long long next_h = (long long)BOX_STEP_H * call.in_w;
#pragma omp simd
                for (int k = 0; k < wide; ++k) {
                    Compute sum = 0;
#pragma GCC unroll 8
                    for (int row = 0; row < BOX_D * BOX_H; ++row)
                        sum += $x;
                    sums[k] = sum;
                }
                Compute* to = staged + $to + i * PLANE + j * ROW;
#pragma omp simd
                for (int k = 0; k < wide - BOX_REACH; ++k) {
                    Compute sum = 0;
#pragma GCC unroll 8
                    for (int n = 0; n < BOX_W; ++n) sum += sums[k + n * BOX_STEP_W];
                    to[$k] = sum;
                }
            }
}
"""

# Where windows begin farther apart, or reach beyond the image.
BOX_CLIPPED = """
constexpr int BOX_D = $box_d, BOX_H = $box_h, BOX_W = $box_w;    // a window of x,
constexpr int BOX_STEP_D = $step_d, BOX_STEP_H = $step_h, BOX_STEP_W = $step_w;    // whose elements lie so far apart,
constexpr int BOX_STRIDE_D = $stride_d, BOX_STRIDE_H = $stride_h, BOX_STRIDE_W = $stride_w;    // and windows so far,
constexpr int BOX_PAD_D = $pad_d, BOX_PAD_H = $pad_h, BOX_PAD_W = $pad_w;    // the first one beginning before the image
constexpr int BOX_REACH = (BOX_W - 1) * BOX_STEP_W;

// The window sums that a strip reads: over the rows of a window first, then along them.
void stage(const Call& call, const Element* __restrict x,$block
    int d, int h, int w, int rows_d, int rows_h, int columns, Compute* __restrict staged) {
    Compute sums[(INPUTS_W - 1) * BOX_STRIDE_W + BOX_REACH + 1];
    const int first = w * BOX_STRIDE_W - BOX_PAD_W, wide = (columns - 1) * BOX_STRIDE_W + BOX_REACH + 1;
    const int begin = larger(0, smaller(-first, wide)), end = larger(begin, smaller(call.in_w - first, wide));
    $loops
                $skip
                const long long channel = $channel;
                std::fill(sums, sums + wide, Compute(0));
                for (int row = 0; row < BOX_D * BOX_H; ++row) {
                    const int at_d = (d + i) * BOX_STRIDE_D - BOX_PAD_D + row / BOX_H * BOX_STEP_D;
                    const int at_h = (h + j) * BOX_STRIDE_H - BOX_PAD_H + row % BOX_H * BOX_STEP_H;
                    if (unsigned(at_d) >= unsigned(call.in_d) || unsigned(at_h) >= unsigned(call.in_h)) continue;
                    const Element* from = x + ((channel * call.in_d + at_d) * call.in_h + at_h) * call.in_w + first;
#pragma omp simd
                    for (int k = begin; k < end; ++k) sums[k] += $x;
                }
                Compute* to = staged + $to + i * PLANE + j * ROW;
#pragma omp simd
                for (int k = 0; k < columns; ++k) {
                    Compute sum = 0;
#pragma GCC unroll 8
                    for (int n = 0; n < BOX_W; ++n) sum += sums[k * BOX_STRIDE_W + n * BOX_STEP_W];
                    to[$k] = sum;
                }
            }
}
"""

BLOCK = " int first_feature, int features,"
CALL = "stage(call, x,$block left_d, left_h, left_w, rows_d, rows_h, columns, staged);"


@dataclass(frozen=True)
class Staging:
    """Writes the text of a strip's input: its layout, and the function `stage` with its call."""

    c: Contraction

    def layout(self) -> Lines:
        """The constants of the staged input's layout."""
        if is_channelwise(self.c):
            return fill(CHANNELWISE)
        return fill(CHANNELS_LAST if self.c.channels_last else CONTIGUOUS)

    @property
    def size(self) -> str:
        """Elements of the staged input."""
        return "INPUTS_D * PLANE" if is_channelwise(self.c) or self.c.channels_last else "CHANNELS * CHANNEL"

    @property
    def turns(self) -> bool:
        """Whether channels that lie apart in memory come to lie side by side, one square of numbers after another."""
        return is_channelwise(self.c) and not self.c.channels_last and self.c.box is None

    def group_of_x(self) -> str:
        """Where the input of a sample's group begins."""
        if is_channelwise(self.c):
            return f"sample * {self.channels} * image"
        if self.c.channels_last:
            return "sample * GROUPS * CHANNELS * image + group * CHANNELS"
        return "(sample * GROUPS + group) * CHANNELS * image"

    def call(self) -> dict[str, Lines]:
        """The statement that stages: for a group, or for every block of its features where those read channels of
        their own."""
        if is_channelwise(self.c):
            return {"stage_group": [], "stage_block": fill(CALL, block=" first_feature, features,")}
        return {"stage_group": fill(CALL, block=""), "stage_block": []}

    def function(self) -> Lines:
        """The function `stage`, and which channel a lane holds where the channels of all groups lie along the lanes."""
        c, dtype, channelwise = self.c, self.c.x.dtype, is_channelwise(self.c)
        names: dict[str, object] = {"skip": self._skip(), "block": BLOCK if channelwise else ""}
        before = self._channel_of() if channelwise else []
        before += fill(TURN, x=read("of[lane][k + n]", dtype)) if self.turns else []
        if c.box is not None:
            return [*before, *self._boxed(names)]
        if c.channels_last:
            channel = "channels[c]" if channelwise else "c"
            names |= {"total": self.channels, "channels": "COLUMN" if channelwise else "CHANNELS"}
            loops = fill(LANES_LAST) if channelwise else []
            loops += fill(STAGE_CHANNELS_LAST, x=read(f"from[k * {self.channels} + {channel}]", dtype), **names)
        elif self.turns:
            loops = fill(STAGE_LANES, **names)
        else:
            before += self._copies()
            skips = bool(names["skip"])
            names |= {"whole": [] if skips else fill(WHOLE), "rows": [] if skips else fill(ROWS_AT_ONCE)}
            loops = fill(STAGE_CONTIGUOUS, **names)
        return [*before, *fill(STAGE, loops=indent(loops), **names)]

    def _copies(self) -> Lines:
        """The functions that write a row of the staged input."""
        dtype = self.c.x.dtype
        same = ELEMENT[dtype] == compute_type(dtype)
        return fill(COPIES, copy=fill(COPY_SAME) if same else fill(COPY, x=read("from[k]", dtype)))

    def _boxed(self, names: dict[str, object]) -> Lines:
        """The function `stage` where that forms window sums."""
        c, box = self.c, self.c.box
        assert box is not None
        over = {"c": "CHANNELS", "i": "rows_d", "j": "rows_h"}
        names |= {"channel": "c", "to": "c * CHANNEL", "k": "k"}
        if is_channelwise(c):  # a row at a time, in all lanes
            over = {"i": "rows_d", "j": "rows_h", "c": "COLUMN"}
            names |= {"channel": "channel_of(first_feature, features, c)", "to": "c", "k": "k * COLUMN"}
        for i, a in enumerate("dhw"):
            names |= {f"box_{a}": box.count[i], f"step_{a}": box.step[i]}
            names |= {f"stride_{a}": box.stride[i], f"pad_{a}": box.before[i]}
        loops = [f"{'    ' * i}for (int {v} = 0; {v} < {n}; ++{v})" for i, (v, n) in enumerate(over.items())]
        loops[2] += " {"
        if not box.plain:
            return fill(BOX_CLIPPED, x=read("from[k]", c.x.dtype), loops=loops, **names)
        x = read("from[row / BOX_H * next_d + row % BOX_H * next_h + k]", c.x.dtype)
        return fill(BOX, x=x, loops=loops, **names)

    def _channel_of(self) -> Lines:
        c = self.c
        lane = "lane % BLOCK" if c.channels > 1 else "lane"
        feature = f"first_feature + smaller({lane}, features - 1)"
        group = feature if c.features == 1 else f"({feature}) / {c.features}"
        channels = f"({group}) * CHANNELS" if c.features == 1 else f"{group} * CHANNELS"
        return fill(CHANNEL_OF, channel=group if c.channels == 1 else f"{channels} + lane / BLOCK")

    @property
    def channels(self) -> int:
        """Input channels of all groups."""
        return self.c.channels * self.c.op.groups

    def _skip(self) -> Lines:
        """Where no tap reads some of the rows between two positions, a statement that leaves them out."""
        tests = [
            f"{i} % ADVANCE_{a} >= REACH_{a}"
            for i, a, axis in zip("ij", "DH", self.c.plain_axes, strict=False)
            if axis.advance > span(axis)[1] - span(axis)[0] + 1
        ]
        return [f"if ({' || '.join(tests)}) continue;    // no tap reads this row"] if tests else []
