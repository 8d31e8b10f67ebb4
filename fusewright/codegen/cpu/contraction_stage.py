"""What a strip of a contraction reads on a CPU: its input, staged in the cache in the order of use."""

from __future__ import annotations

from dataclasses import dataclass

from fusewright.codegen.cpu.elements import read
from fusewright.codegen.text import Lines, fill, indent
from fusewright.schedule.contraction import Axis, Contraction
from fusewright.schedule.strips import is_channelwise

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
// The staged input is [d][h][w][channel], the channels those that a block of features reads.
constexpr int CHANNEL = 1, COLUMN = BLOCK, ROW = INPUTS_W * COLUMN, PLANE = INPUTS_H * ROW;
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
for (int c = 0; c < $channels; ++c)
    for (int i = 0; i < rows_d; ++i)
        for (int j = 0; j < rows_h; ++j) {
            $skip
            Compute* to = staged + $to + i * PLANE + j * ROW;
            const bool inside = unsigned(d + i) < unsigned(call.in_d) && unsigned(h + j) < unsigned(call.in_h);
            if (!inside) {
                for (int k = 0; k < columns; ++k) to[$k] = 0;
                continue;
            }
            const Element* from = x + (($channel * call.in_d + d + i) * call.in_h + h + j) * call.in_w + w;
            for (int k = 0; k < begin; ++k) to[$k] = 0;
            for (int k = begin; k < end; ++k) to[$k] = $x;
            for (int k = end; k < columns; ++k) to[$k] = 0;
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
    for (int c = 0; c < $channels; ++c)
        for (int i = 0; i < rows_d; ++i)
            for (int j = 0; j < rows_h; ++j) {
                $skip
                const Element* from = x + (($channel * call.in_d + d + i) * call.in_h + h + j) * call.in_w + w;
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

CALL = "stage(call, x,$block left_d, left_h, left_w, rows_d, rows_h, columns, staged);"


def span(axis: Axis) -> tuple[int, int]:
    """The lowest and highest input, relative to a position's index, that any phase reads."""
    found = [p.first + t * p.per_tap for p in axis.phases for t in range(len(p.taps))]
    return (min(found), max(found)) if found else (0, 0)


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

    def group_of_x(self) -> str:
        """Where the input of a sample's group begins."""
        if is_channelwise(self.c):
            return f"sample * {self.c.op.groups} * image"
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
        """The function `stage`."""
        c, dtype = self.c, self.c.x.dtype
        # How many channels are staged, which, and where; how far apart they lie in channels-last input.
        names: dict[str, object] = {"skip": self._skip(), "block": "", "channels": "CHANNELS"}
        names |= {"channel": "(long long)c", "to": "c * CHANNEL", "k": "k", "c": "c", "total": "(GROUPS * CHANNELS)"}
        if is_channelwise(c):
            channel = "(first_feature + (long long)c)" if c.features == 1 else f"(first_feature + c) / {c.features}LL"
            names |= {"block": " int first_feature, int features,", "channels": "features", "channel": channel}
            names |= {"to": "c", "k": "k * COLUMN", "c": channel, "total": c.op.groups}
        if c.box is not None:
            for a, count, step in zip("dhw", c.box.count, c.box.step, strict=True):
                names |= {f"box_{a}": count, f"step_{a}": step}
            return fill(BOX, x=read("from[row / BOX_H * next_d + row % BOX_H * next_h + k]", dtype), **names)
        if c.channels_last:
            x = read(f"from[k * {names['total']} + {names['c']}]", dtype)
            loops = fill(STAGE_CHANNELS_LAST, x=x, **names)
        else:
            loops = fill(STAGE_CONTIGUOUS, x=read("from[k]", dtype), **names)
        return fill(STAGE, loops=indent(loops), block=names["block"])

    def _skip(self) -> Lines:
        """Where no tap reads some of the rows between two positions, a statement that leaves them out."""
        tests = [
            f"{i} % ADVANCE_{a} >= REACH_{a}"
            for i, a, axis in zip("ij", "DH", self.c.plain_axes, strict=False)
            if axis.advance > span(axis)[1] - span(axis)[0] + 1
        ]
        return [f"if ({' || '.join(tests)}) continue;    // no tap reads this row"] if tests else []
