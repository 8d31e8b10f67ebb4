"""Window sums, each added up in registers from the rows it covers: staged as a panel [channel][tap] x cells, or formed
by the lanes that multiply them (`contraction_by_warp`)."""

from __future__ import annotations

from fusewright.codegen.text import Lines, fill
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.tiling import Tiling
from fusewright.schedule.window_rows import skipped, window_spans


def scaled_early(c: Contraction) -> bool:
    """Whether window sums are scaled as they are written: in half precisions they could overflow."""
    return c.x.dtype.itemsize == 2


def padded(c: Contraction) -> bool:
    """Whether windows reach outside of x, where zeros count."""
    assert c.box is not None
    return any(c.box.before) or any(c.box.behind)


def before(c: Contraction) -> dict[str, object]:
    """What is taken off from where a cell's windows would begin along d, h, w if x had no padding."""
    return {f"before_{a}": f" - BEFORE_{a.upper()}" if padded(c) else "" for a in "dhw"}


def windows(c: Contraction) -> Lines:
    """Constants of the windows, and the functions that load a row of x and add it up, one sum per tap along w."""
    assert c.box is not None
    names: dict[str, object] = {"channels": c.channels, "skip": "SKIP_W + " if padded(c) else "", "padding": []}
    if padded(c):
        (d, h, w), skip = c.box.before, skipped(c)
        names["padding"] = fill(_PADDING, d=d, h=h, w=w + skip, skip=skip)
    for name, axis, count, step, span in zip("dhw", c.axes, c.box.count, c.box.step, window_spans(c), strict=True):
        names |= {f"taps_{name}": axis.taps, f"dilation_{name}": axis.phases[0].per_tap, f"move_{name}": axis.advance}
        names |= {f"count_{name}": count, f"step_{name}": step, f"span_{name}": span}
    return fill(_WINDOWS, **names)


def shared_rows(c: Contraction, strip: int) -> int:
    """Rows that two neighbouring cells of a strip share."""
    return max(0, window_spans(c)[1] - c.axes[1].advance) if strip > 1 else 0


def stage(c: Contraction, t: Tiling, rounds: bool) -> Lines:
    """The text of `stage_input` for a convolution of window sums, `rounds` to tf32 as they are written."""
    assert c.box is not None
    value = f"narrow_to<Element>::of(sums[tap] * Compute({c.box.scale!r}))" if scaled_early(c) else "sums[tap]"
    value = f"__uint_as_float(round_tf32({value}))" if rounds else value
    along = strip(c, t)
    names = {"value": value, "strip": along, "shared": shared_rows(c, along)} | before(c)
    part, form = (fill(_SUM_PART), _FORM_PADDED) if padded(c) else ([], _FORM)
    return [*windows(c), *part, *fill(_STAGE, form=fill(form), **names)]


def strip(c: Contraction, t: Tiling) -> int:
    """Cells along h that a thread sums up one after the other: as many as leave no thread without a strip."""
    d, h, w = t.cells
    return max(n for n in range(1, h + 1) if h % n == 0 and (n == 1 or c.channels * d * w * h // n >= 32 * t.warps))


_WINDOWS = """
// Windows of COUNT elements, STEP apart, one per tap; a cell moves them by MOVE.
constexpr int BOX_C = $channels;
constexpr int BOX_TAPS_D = $taps_d, BOX_TAPS_H = $taps_h, BOX_TAPS_W = $taps_w;
constexpr int BOX_TAPS = BOX_TAPS_D * BOX_TAPS_H * BOX_TAPS_W;
constexpr int DILATION_D = $dilation_d, DILATION_H = $dilation_h, DILATION_W = $dilation_w;
constexpr int COUNT_D = $count_d, COUNT_H = $count_h, COUNT_W = $count_w;
constexpr int STEP_D = $step_d, STEP_H = $step_h, STEP_W = $step_w;
constexpr int MOVE_D = $move_d, MOVE_H = $move_h, MOVE_W = $move_w;
constexpr int SPAN_D = $span_d, SPAN_H = $span_h, SPAN_W = $span_w;    // elements that the windows of one cell cover
$padding

// Whether offset `at` belongs to the window of a tap.
__device__ __forceinline__ constexpr bool covers(int at, int tap, int dilation, int count, int step) {
    const int from = at - tap * dilation;
    return from >= 0 && from % step == 0 && from / step < count;
}

// Whether offset `at` belongs to the windows of all taps.
template <int TAPS_ALONG>
__device__ __forceinline__ constexpr bool covered(int at, int dilation, int count, int step) {
    for (int tap = 0; tap < TAPS_ALONG; ++tap)
        if (!covers(at, tap, dilation, count, step)) return false;
    return true;
}

// A sum that starts with its first term instead of zero; `any` is known when the loops around are unrolled.
struct Sum {
    Compute value = 0;
    bool any = false;
    __device__ __forceinline__ void add(Compute term) { value = any ? value + term : term, any = true; }
};

// One row of x under a cell, in vectors of up to VECTOR elements.
template <int VECTOR>
__device__ __forceinline__ void load_row(Compute (&v)[${skip}SPAN_W], const Element* from) {
    int i = 0;
    if constexpr (VECTOR % 4 == 0 && sizeof(Element) == 4) {
#pragma unroll
        for (; i + 4 <= ${skip}SPAN_W; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
    }
    if constexpr (VECTOR % 2 == 0 && sizeof(Element) == 4) {
#pragma unroll
        for (; i + 2 <= ${skip}SPAN_W; i += 2) {
            const float2 two = *reinterpret_cast<const float2*>(from + i);
            v[i] = two.x, v[i + 1] = two.y;
        }
    }
#pragma unroll
    for (; i < ${skip}SPAN_W; ++i) v[i] = widened(from[i]);
}

// The window sums of one row of x along w, one per tap.
__device__ __forceinline__ void sum_loaded(Compute (&sums)[BOX_TAPS_W], const Compute (&v)[${skip}SPAN_W]) {
    Sum middle;    // of what belongs to all windows
#pragma unroll
    for (int at = 0; at < SPAN_W; ++at)
        if (covered<BOX_TAPS_W>(at, DILATION_W, COUNT_W, STEP_W)) middle.add(v[${skip}at]);
#pragma unroll
    for (int tap = 0; tap < BOX_TAPS_W; ++tap) {
        Sum sum = middle;
#pragma unroll
        for (int at = 0; at < SPAN_W; ++at)
            if (!covered<BOX_TAPS_W>(at, DILATION_W, COUNT_W, STEP_W) && covers(at, tap, DILATION_W, COUNT_W, STEP_W))
                sum.add(v[${skip}at]);
        sums[tap] = sum.value;
    }
}

template <int VECTOR>
__device__ __forceinline__ void sum_row(Compute (&sums)[BOX_TAPS_W], const Element* from) {
    Compute v[${skip}SPAN_W];
    load_row<VECTOR>(v, from);
    sum_loaded(sums, v);
}

// The sums of all windows of one cell, from those of its rows: rows that belong to the windows of all taps are added
// once, and to every window at the end.
__device__ __forceinline__ void sum_cell(Compute (&sums)[BOX_TAPS], const Compute (&rows)[SPAN_D][SPAN_H][BOX_TAPS_W]) {
    Sum box[BOX_TAPS_D][BOX_TAPS_H][BOX_TAPS_W], common[BOX_TAPS_W];
#pragma unroll
    for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
        for (int rh = 0; rh < SPAN_H; ++rh) {
            const bool all = covered<BOX_TAPS_D>(rd, DILATION_D, COUNT_D, STEP_D) &&
                             covered<BOX_TAPS_H>(rh, DILATION_H, COUNT_H, STEP_H);
#pragma unroll
            for (int tw = 0; tw < BOX_TAPS_W; ++tw) {
                if (all) common[tw].add(rows[rd][rh][tw]);
#pragma unroll
                for (int td = 0; td < BOX_TAPS_D; ++td)
#pragma unroll
                    for (int th = 0; th < BOX_TAPS_H; ++th)
                        if (!all && covers(rd, td, DILATION_D, COUNT_D, STEP_D) &&
                            covers(rh, th, DILATION_H, COUNT_H, STEP_H))
                            box[td][th][tw].add(rows[rd][rh][tw]);
            }
        }
#pragma unroll
    for (int tap = 0; tap < BOX_TAPS; ++tap) {
        Sum sum = box[tap / (BOX_TAPS_W * BOX_TAPS_H)][tap / BOX_TAPS_W % BOX_TAPS_H][tap % BOX_TAPS_W];
        if (common[tap % BOX_TAPS_W].any) sum.add(common[tap % BOX_TAPS_W].value);
        sums[tap] = sum.value;
    }
}

// Of the rows under a cell, keep those that the next cell along h reads as well.
template <int SHARED>
__device__ __forceinline__ void keep_rows(Compute (&rows)[SPAN_D][SPAN_H][BOX_TAPS_W]) {
#pragma unroll
    for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
        for (int rh = 0; rh < SHARED; ++rh)
#pragma unroll
            for (int tw = 0; tw < BOX_TAPS_W; ++tw) rows[rd][rh][tw] = rows[rd][rh + MOVE_H][tw];
}
"""

_PADDING = """
// Rows begin BEFORE elements in front of x, by padding and, along w, SKIP_W more: those reach back to a vector's begin.
constexpr int BEFORE_D = $d, BEFORE_H = $h, BEFORE_W = $w, SKIP_W = $skip;
"""

# The sums of one cell's windows, where there is such a cell.
_FORM = """
if (x_d + SPAN_D <= D && x_h + SPAN_H <= H && x_w + SPAN_W <= W) {
    const Element* const from = x + ((c * D + x_d) * H + x_h) * W + x_w;
#pragma unroll
    for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
        for (int rh = 0; rh < SPAN_H; ++rh)
            if (rh >= SHARED || h == first) sum_row<VECTOR>(rows[rd][rh], from + (rd * H + rh) * W);
    sum_cell(sums, rows);
    keep_rows<SHARED>(rows);
}
"""

# The same where windows reach outside; cells that there are not have sums as well, which go nowhere.
_FORM_PADDED = """
const Element* const from = x + ((c * D + x_d) * H + x_h) * W + x_w;
const bool along_w = x_w >= 0 && x_w + SKIP_W + SPAN_W <= W;
#pragma unroll
for (int rd = 0; rd < SPAN_D; ++rd)
#pragma unroll
    for (int rh = 0; rh < SPAN_H; ++rh) {
        if (rh < SHARED && h > first) continue;
        const bool there = unsigned(x_d + rd) < unsigned(D) && unsigned(x_h + rh) < unsigned(H);
        if (there && along_w)
            sum_row<VECTOR>(rows[rd][rh], from + (rd * H + rh) * W);
        else
            sum_part(rows[rd][rh], from + (rd * H + rh) * W, there, x_w, W);
    }
sum_cell(sums, rows);
keep_rows<SHARED>(rows);
"""

_SUM_PART = """
// The same of a row that reaches outside of x, or is not `there` at all.
__device__ __forceinline__ void sum_part(Compute (&sums)[BOX_TAPS_W], const Element* from, bool there, int x_w, int W) {
    Compute v[SKIP_W + SPAN_W];
#pragma unroll
    for (int i = 0; i < SKIP_W + SPAN_W; ++i) {
        const bool read = there && unsigned(x_w + i) < unsigned(W);
        v[i] = read ? widened(from[i]) : Compute(0);
    }
    sum_loaded(sums, v);
}
"""

_STAGE = """
constexpr int STRIP = $strip, SHARED = $shared;    // cells of a strip along h; rows that two of them share

// A thread goes down a strip of cells and keeps the sums of rows that the next cell reads as well.
template <int VECTOR>
__device__ __forceinline__ void sum_windows(const Element* x, Element* tile, int cell_d, int cell_h, int cell_w,
                                            int D, int H, int W) {
    constexpr int STRIPS = CELLS_H / STRIP;
    for (int i = threadIdx.x; i < BOX_C * CELLS_D * STRIPS * CELLS_W; i += THREADS) {
        const int w = i % CELLS_W, first = i / CELLS_W % STRIPS * STRIP, d = i / (CELLS_W * STRIPS) % CELLS_D;
        const int c = i / (CELLS_W * STRIPS * CELLS_D);
        const int x_d = (cell_d + d) * MOVE_D$before_d, x_w = (cell_w + w) * MOVE_W$before_w;
        Compute rows[SPAN_D][SPAN_H][BOX_TAPS_W];
#pragma unroll 1
        for (int h = first; h < first + STRIP; ++h) {
            const int x_h = (cell_h + h) * MOVE_H$before_h;
            Compute sums[BOX_TAPS] = {};
            $form
            Element* to = tile + c * BOX_TAPS * X_CHANNEL + (d * CELLS_H + h) * CELLS_W + w;
#pragma unroll
            for (int tap = 0; tap < BOX_TAPS; ++tap) to[tap * X_CHANNEL] = $value;
        }
    }
}

// Write the window sums that the cells of a block read, zeros for cells beyond the last.
__device__ __forceinline__ int stage_input(const Element* x, Element* tile, int, int cell_d, int cell_h,
                                           int cell_w, int D, int H, int W) {
    const int misaligned = reinterpret_cast<unsigned long long>(x) % 16;
    if (MOVE_W % 4 == 0 && W % 4 == 0 && misaligned == 0)
        sum_windows<4>(x, tile, cell_d, cell_h, cell_w, D, H, W);
    else if (MOVE_W % 2 == 0 && W % 2 == 0 && misaligned % 8 == 0)
        sum_windows<2>(x, tile, cell_d, cell_h, cell_w, D, H, W);
    else
        sum_windows<1>(x, tile, cell_d, cell_h, cell_w, D, H, W);
    return 0;
}
"""
