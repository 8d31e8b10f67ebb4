"""How the input of a contraction lies in shared memory, as channel planes or channels last, and how it gets there."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from fusewright.codegen.cuda import contraction_multiply_text, contraction_text, contraction_walk, staged_rows
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.residues import Walks, walks
from fusewright.schedule.tiling import Tiling, column, copied_at_once, side_by_side, span


@dataclass(frozen=True)
class Layout:
    """The input in shared memory, in elements, as [channel][d][h][w] or [d][h][w][channel].

    `column` and `channel` are the steps along w and from channel to channel; `low` is the input index of cell 0's
    first element per dimension, `walks` say which elements follow.
    """

    x_shape: tuple[int, int, int]
    column: int
    channel: int
    low: tuple[int, ...]
    walks: Walks

    @property
    def strides(self) -> tuple[int, int, int]:
        _, h, w = self.x_shape
        return h * w * self.column, w * self.column, self.column

    def start(self, phases: tuple[Phase, Phase, Phase]) -> int:
        """Where the first cell's first position and tap of these phases read."""
        each = zip(phases, self.low, self.walks, self.strides, strict=True)
        return sum((p.first - low) // walk.step * stride for p, low, walk, stride in each)

    def elements(self, channels: int) -> int:
        """Of a tile of so many channels, in whole 16-byte vectors."""
        return ceil(max(channels * self.channel, self.x_shape[0] * self.strides[0]) / 8) * 8


def layout(c: Contraction, t: Tiling) -> Layout:
    """Channel planes have rows of whole 16-byte vectors; planes, or columns, are padded so that a fragment spreads
    over the banks."""
    size = c.x.dtype.itemsize
    vector = 16 // size
    along = walks(c, t.cells)
    if c.box is not None:
        return Layout(t.cells, 1, spread(prod(t.cells), 8, size), (0, 0, 0), along)
    d, h, w = (span(walk.staged, n) for walk, n in zip(along, t.cells, strict=True))
    low = tuple(a.reach()[0] for a in c.axes)
    if c.channels_last:
        return Layout((d, h, w), column(t.chunk, size), 1, low, along)
    w = ceil((w + vector - 1) / vector) * vector
    return Layout((d, h, w), 1, spread(d * h * w, 8, size), low, along)


def spread(elements: int, residue: int, size: int) -> int:
    """The least stride of at least `elements` that is `residue` words modulo the 32 banks."""
    banks, wanted = 128 // size, residue * 4 // size
    return elements + (wanted - elements) % banks


def indexing(c: Contraction, *, paired: bool, channels_inside: bool, packed: bool, all_taps: bool) -> Lines:
    """Where the lanes find their operands: k counts the channels of one tap first, or the taps of one channel; `paired`
    where an operand holds two channels, `packed` where weights lie as [tap][channel], `all_taps` where k goes through
    more than a row of them."""
    names: dict[str, object] = {"row": "one row of taps", "sizes": "int TAPS_W", "count": "TAPS_W", "rows": []}
    if all_taps:
        names = {"row": "a phase", "sizes": "int TAPS_D, int TAPS_H, int TAPS_W", "count": "TAPS_D * TAPS_H * TAPS_W"}
        names["rows"] = fill(contraction_multiply_text.ROWS_OF_TAPS)
    taps, count = ("taps", f"({names['count']})") if all_taps else ("taps along w", "TAPS_W")
    tap = "k / CHUNK" if channels_inside else f"k % {count}"
    names |= {"order": f"{taps}, then channels" if channels_inside else f"channels, then {taps}"}
    names |= {"channel": "k % CHUNK" if channels_inside else f"k / {count}", "tap": tap}
    names["x_tap"] = f"x_of({tap})" if all_taps else f"{tap} * TAP_W"
    names |= {"weights": "[feature][d][h][w][channel]" if packed else "[feature][channel][d][h][w]"}
    names |= {"of_channel": "1", "of_tap": "CHUNK"} if packed else {"of_channel": "TAPS", "of_tap": "1"}
    if paired:
        names |= {"supply": "two pairs of every sixteen", "past": "15", "step": "16"}
        names["k"] = "16 * step + 8 * half + threadIdx.x % 4 * 2"
    else:
        names |= {"supply": "two of every eight", "past": "7", "step": "8"}
        names["k"] = "8 * step + 4 * half + threadIdx.x % 4"
    columns = contraction_multiply_text.COLUMNS_SIDE_BY_SIDE if side_by_side(c) else contraction_multiply_text.COLUMNS
    return fill(contraction_multiply_text.INDEXING, **names, columns=fill(columns))


def accumulate(*, paired: bool, all_taps: bool) -> Lines:
    """The text that multiplies, with its reads of weights and input."""
    weight, x = (
        "weight_operand(L::inside(k[i / 2]) ? w_k[i / 2][at] : Element{})",
        "input_operand(L::inside(k[i]) ? x_k[i][at] : Element{})",
    )
    if paired:
        weight, x = (
            "L::inside(k[i / 2]) ? pair<P::CHANNEL>(w_k[i / 2] + at) : 0",
            "L::inside(k[i]) ? pair<1>(x_k[i] + at) : 0",
        )
    names: dict[str, object] = {"sizes": "TAPS_W", "turns_d": "TAPS_D", "turns_h": "TAPS_H"}
    if all_taps:
        names = {"sizes": "TAPS_D, TAPS_H, TAPS_W", "turns_d": 1, "turns_h": 1}
    return fill(contraction_multiply_text.ACCUMULATE, **names, weight=weight, input=x)


def constants(c: Contraction, lay: Layout) -> dict[str, object]:
    """What the constants say about the staged input."""
    if c.channels_last:
        return {
            "order": "[d][h][w][channel], columns padded over the banks",
            "step": f"X_COLUMN = {lay.column}, X_CHANNEL = 1",
        }
    return {"order": "[channel][d][h][w]", "step": f"X_CHANNEL = {lay.channel}"}


def stage(c: Contraction, t: Tiling, lay: Layout, *, crowded: bool) -> Lines:
    """The text of `stage_input` for a convolution of x itself (`crowded`: see `staged_rows.text`)."""
    names: dict[str, object] = {f"advance_{a}": axis.advance for a, axis in zip("dhw", c.axes, strict=True)}
    names |= {f"low_{a}": low for a, low in zip("dhw", lay.low, strict=True)} | contraction_walk.names(lay.walks)
    if c.channels_last:
        return fill(contraction_text.STAGE_COLUMNS, **names, vector=copied_at_once(c, t.chunk))
    return [
        *staged_rows.text(lay.walks, crowded=crowded),
        "",
        *fill(contraction_text.STAGE_TILE, **names, **_rows(c, t, lay)),
    ]


def _rows(c: Contraction, t: Tiling, lay: Layout) -> dict[str, str]:
    """The statements that copy rows in whole vectors of 16 bytes, in pairs and one by one."""
    size, (d, h, _), needed = c.x.dtype.itemsize, lay.x_shape, span(c.axes[2], t.cells[2])
    rows = staged_rows.Rows(d * h, t.chunk, size, 32 * t.warps)
    vectors = {"whole": 16 // size, "pairs": 2, "singles": 1}
    return {name: rows.stage(vector, needed + vector - 1) for name, vector in vectors.items()}


def sample(c: Contraction) -> str:
    """Offset of a sample's first channel of this block's group."""
    if c.channels_last:
        return "((long long)sample * D * H * W * GROUPS + group) * C"
    return f"((long long)sample * GROUPS + group) * {c.channels_of_x} * D * H * W"
