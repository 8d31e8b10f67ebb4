"""C++ of streams on a CPU whose windows run along short rows: planes lie along the lanes of vectors.

A row of seven results leaves most of a vector idle, and its ends are most of it.  Sixteen planes side by side fill the
lanes whatever their size, and all of them ask at once where an image ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cpu.elements import read, written
from fusewright.codegen.cpu.loops import LaneScalars, lanes, procedure
from fusewright.codegen.cpu.stream_values import TAKE, Values, tree
from fusewright.codegen.cpu.text import parallel
from fusewright.codegen.stream_sizes import Sizes
from fusewright.codegen.text import Lines, block, fill
from fusewright.ir.node import Node
from fusewright.schedule.stream_record import Read, Stream

BLOCK = 16  # planes that are computed together
SHORT = 128  # results of a row that are few
MOST_LENGTH = 16384  # elements of a plane, of which the second cache holds BLOCK

TURN = """
// Where the next SIDE elements begin after those at `at`, the last ones ending at `end`.
template <int SIDE>
inline index_t next_side(index_t at, index_t end) { return at + SIDE == end ? end : std::min(at + SIDE, end - SIDE); }

// to[p * BLOCK + lane] = of[lane][p].
template <int SIDE>
inline void turn(const $Element* const* of, index_t length, $Compute* __restrict__ to) {
    for (index_t p = 0; p < length; p = next_side<SIDE>(p, length))
#pragma omp simd
        for (int n = 0; n < SIDE; ++n)
#pragma GCC unroll 16
            for (int lane = 0; lane < BLOCK; ++lane) to[(p + n) * BLOCK + lane] = $read;
}
"""

TURN_BACK = """

// to[lane * length + p] = from[p * BLOCK + lane].
template <int SIDE>
inline void turn_back(const $Result* __restrict__ from, index_t length, $Out* __restrict__ to) {
    for (index_t p = 0; p < length; p = next_side<SIDE>(p, length))
#pragma omp simd
        for (int n = 0; n < SIDE; ++n)
#pragma GCC unroll 16
            for (int lane = 0; lane < BLOCK; ++lane) to[lane * length + p + n] = $written;
}
"""

PLANES = """
const index_t length = $length;
const $Element* of[BLOCK];  // behind the last plane, that one again
for (index_t e = 0; e < BLOCK; ++e) of[e] = d.$x + ($base + std::min(e, count - 1)) * length;
std::vector<$Compute> plane(length * BLOCK);
if (length >= BLOCK) turn<BLOCK>(of, length, plane.data());
else if (length >= 4) turn<4>(of, length, plane.data());
else turn<1>(of, length, plane.data());
$operands
$before
$results
"""

WRITE = """
const index_t results = $results;
std::vector<$Result> value(results * BLOCK);
$windows
if (count < BLOCK)
    for (index_t e = 0; e < count; ++e)
        for (index_t p = 0; p < results; ++p) out[e * results + p] = $rest;
else if (results >= BLOCK) turn_back<BLOCK>(value.data(), results, out);
else if (results >= 4) turn_back<4>(value.data(), results, out);
else turn_back<1>(value.data(), results, out);
"""


def lane_axis(s: Stream) -> int | None:
    """The axis along which planes follow each other, where a stream has few results in a row of them."""
    pooled = [a for a, axis in enumerate(s.axes) if axis.window is not None]
    whole = all(axis.role == ("first" if axis.window is not None else "kept") for axis in s.axes)
    if (s.folds and not whole) or not pooled or pooled[0] == 0:
        return None
    sizes, lane = Sizes(s), pooled[0] - 1
    kinds = [(r.place, _kind(r, lane, pooled)) for r in s.reads if r.place in ("before", "after")]
    if [kind for place, kind in kinds if place == "before"].count("plane") != 1:
        return None
    looked_up = s.weights or any(r.part is not None or (r.value is not r.tensor) for r in s.reads)
    if looked_up or any(kind is None or (kind, place) == ("plane", "after") for place, kind in kinds):
        return None
    few = sizes.count([len(s.axes) - 1]) < SHORT and sizes.count([lane]) >= BLOCK
    return lane if few and sizes.entry_count(pooled) <= MOST_LENGTH else None


def _kind(r: Read, lane: int, pooled: Sequence[int]) -> str | None:
    """How a tensor varies over planes: in each, from one to the next, or not at all."""
    within = [a for a in r.axes if a in pooled]
    if within:
        return "plane" if lane in r.axes and within == list(pooled) else None
    return "lane" if lane in r.axes else "none"


class Planes(Values):
    """Writes `planes`, which takes BLOCK planes in at a time."""

    def __init__(self, s: Stream, names: dict[Node, str], wanted: torch.dtype, lane: int) -> None:
        super().__init__(s, names, wanted)
        self.lane, self.last = lane, -1  # no axis runs along the lanes of a window
        self.pooled = list(range(lane + 1, len(s.axes)))
        reads = [r for r in s.reads if r.place in ("before", "after")]
        self.x = next(r for r in reads if _kind(r, lane, self.pooled) == "plane")
        self.given = list({r.tensor: r for r in reads if r is not self.x}.values())

    def text(self) -> Lines:
        """The functions."""
        coordinates = [("index_t", f"i{a}") for a in range(self.lane + 1)]
        entry, value = compute_type(self.s.entry.dtype), compute_type(self.wanted)
        names: dict[str, object] = {"Element": ELEMENT[self.x.tensor.dtype], "Compute": entry, "Result": value}
        turns = fill(TURN, read=read("of[lane][p + n]", self.x.tensor.dtype), **names)
        back = {"Out": ELEMENT[self.wanted], "written": written("from[(p + n) * BLOCK + lane]", self.wanted)}
        turns += [] if self.s.folds else fill(TURN_BACK, **back, **names)
        body = fill(
            PLANES,
            length=" * ".join(f"d.m{a}" for a in self.pooled),
            x=self.names[self.x.tensor],
            base=self.offset(replace(self.x, axes=tuple(a for a in self.x.axes if a <= self.lane))),
            operands=[line for r in self.given for line in self._operand(r)],
            before=self._before(),
            results=self._folded() if self.s.folds else self._written_planes(value),
            **names,
        )
        out = f"{ELEMENT[self.s.root.dtype]}* __restrict__"
        parameters = [("const Data&", "d"), *coordinates, ("index_t", "count"), (out, "out")]
        about = "// `count` planes from these coordinates on, their results one after another."
        return [*turns, "", *procedure(about, "planes", parameters, body, "BLOCK")]

    def _written_planes(self, value: str) -> Lines:
        """What is written of all planes, a place after another and then a plane after another."""
        to = f"{value}* const to = value.data() + {self._place('i', 'n')} * BLOCK;"
        return fill(
            WRITE,
            results=" * ".join(f"d.n{a}" for a in self.pooled),
            Result=value,
            windows=self._windows([to]),
            rest=written("value[p * BLOCK + e]", self.wanted),
        )

    def _folded(self) -> Lines:
        """What is reduced over planes, one place of all of them after another."""
        to = f"{compute_type(self.wanted)} to[BLOCK];"
        coordinates = "".join(f", i{a}{' + e' if a == self.lane else ''}" for a in range(self.lane + 1))
        finish = f"finish_first(d{coordinates}, folds.of(e))"
        loops = self._windows([to], ["folds.take(to, BLOCK);"])
        return ["Firsts folds(BLOCK);", *loops, f"for (index_t e = 0; e < count; ++e) out[e] = {finish};"]

    def _operand(self, r: Read) -> Lines:
        """What a tensor gives every plane."""
        name, compute, offset = self.names[r.tensor], compute_type(r.tensor.dtype), self.offset(r)
        if self.lane not in r.axes:
            return [f"const {compute} {name} = {read(f'd.{name}[{offset}]', r.tensor.dtype)};"]
        element = read(f"d.{name}[{offset} + std::min(e, count - 1)]", r.tensor.dtype)
        return [f"{compute} {name}[BLOCK];", f"for (index_t e = 0; e < BLOCK; ++e) {name}[e] = {element};"]

    def _given(self) -> dict[Node, str]:
        return {r.tensor: self.names[r.tensor] + ("[e]" if self.lane in r.axes else "") for r in self.given}

    def _before(self) -> Lines:
        """What happens to elements before the window, in place."""
        if self.s.before is None:
            return []
        lines, value = tree(self.s.before, self.s.entry, self._given() | {self.x.tensor: "at[e]"}, LaneScalars)
        row = f"{compute_type(self.s.entry.dtype)}* const at = plane.data() + p * BLOCK;"
        body = [row, *lanes("for (index_t e = 0; e < BLOCK; ++e)", [*lines, f"at[e] = {value};"], "e")]
        return block("for (index_t p = 0; p < length; ++p)", body)

    def _windows(self, to: Lines, taken: Sequence[str] = ()) -> Lines:
        """The loops over places, each the windows of all planes there; `to` says where their results go."""
        pooled, compute = self.window.node, compute_type(self.window.node.dtype)
        divided = self.average()
        result = {pooled: "average" if divided else "pooled[e]"}
        lines, value = tree(self.s.after, pooled, self._given() | result, LaneScalars)
        body = [
            f"{compute} pooled[BLOCK];",
            f"for (index_t e = 0; e < BLOCK; ++e) pooled[e] = {self.neutral()};",
            *self.taps(),
            *to,
            *lanes("for (index_t e = 0; e < BLOCK; ++e)", [*divided, *lines, f"to[e] = {value};"], "e"),
            *taken,
        ]
        for a in reversed(self.pooled):
            body = block(f"for (index_t i{a} = 0; i{a} < d.n{a}; ++i{a})", body)
        return body

    def row(self) -> Lines:
        """One element of every plane."""
        compute = compute_type(self.window.node.dtype)
        element = f"const {compute} element = at[e];"
        at = f"const {compute_type(self.s.entry.dtype)}* const at = plane.data() + {self._place('j', 'm')} * BLOCK;"
        return [at, *lanes("for (index_t e = 0; e < BLOCK; ++e)", [element, TAKE[self.window.op.kind]])]

    def _place(self, index: str, length: str) -> str:
        """Where in a plane: Horner's scheme."""
        text = ""
        for a in self.pooled:
            i = f"{index}{a}"
            text = f"({text}) * d.{length}{a} + {i}" if " " in text else f"{text} * d.{length}{a} + {i}" if text else i
        return f"({text})" if " " in text else text

    def loops(self) -> Lines:
        """The body of the entry point."""
        axes = list(range(self.lane + 1))
        results = "" if self.s.folds else "".join(f" * n{a}" for a in self.pooled)
        place = ""
        for a in axes:
            place = f"({place}) * n{a} + i{a}" if " " in place else f"{place} * n{a} + i{a}" if place else f"i{a}"
        coordinates = ", ".join(f"i{a}" for a in axes)
        place = f"({place})" if " " in place else place
        count = f"std::min(BLOCK, n{self.lane} - i{self.lane})"
        body: Lines = [f"planes(d, {coordinates}, {count}, out + {place}{results});"]
        for a in reversed(axes):
            step = f"i{a} += BLOCK" if a == self.lane else f"++i{a}"
            body = block(f"for (index_t i{a} = 0; i{a} < n{a}; {step})", body)
        return [*parallel(len(axes)), *body]
