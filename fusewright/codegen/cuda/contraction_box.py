"""Window sums, each added up in registers from the rows it covers: staged as a panel [channel][tap] x cells, or formed
by the lanes that multiply them (`contraction_by_warp`)."""

from __future__ import annotations

from fusewright.codegen.cuda import contraction_sums
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
    skip = skipped(c) if padded(c) else 0
    names: dict[str, object] = {"channels": c.channels, "skip": "SKIP_W + " if padded(c) else "", "padding": []}
    if padded(c):
        d, h, w = c.box.before
        names["padding"] = fill(_PADDING, d=d, h=h, w=w + skip, skip=skip)
    for name, axis, span in zip("dhw", c.axes, window_spans(c), strict=True):
        names |= {f"taps_{name}": axis.taps, f"move_{name}": axis.advance, f"span_{name}": span}
    names |= {name: " x ".join(map(str, each)) for name, each in (("count", c.box.count), ("step", c.box.step))}
    names |= {"along_w": contraction_sums.along_w(c, skip), "across_rows": contraction_sums.across_rows(c)}
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
// Windows of $count elements, $step apart, one per tap; a cell moves them by MOVE.
constexpr int BOX_C = $channels;
constexpr int BOX_TAPS_D = $taps_d, BOX_TAPS_H = $taps_h, BOX_TAPS_W = $taps_w;
constexpr int BOX_TAPS = BOX_TAPS_D * BOX_TAPS_H * BOX_TAPS_W;
constexpr int MOVE_D = $move_d, MOVE_H = $move_h, MOVE_W = $move_w;
constexpr int SPAN_D = $span_d, SPAN_H = $span_h, SPAN_W = $span_w;    // elements that the windows of one cell cover
$padding

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
    $along_w
}

template <int VECTOR>
__device__ __forceinline__ void sum_row(Compute (&sums)[BOX_TAPS_W], const Element* from) {
    Compute v[${skip}SPAN_W];
    load_row<VECTOR>(v, from);
    sum_loaded(sums, v);
}

// The sums of all windows of one cell, from those of its rows.
__device__ __forceinline__ void sum_cell(Compute (&sums)[BOX_TAPS], const Compute (&rows)[SPAN_D][SPAN_H][BOX_TAPS_W]) {
#pragma unroll
    for (int tw = 0; tw < BOX_TAPS_W; ++tw) {
        $across_rows
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
