"""The weights of a contraction that warpgroups multiply: where they lie, and how they get there.

They stay in shared memory, laid out there by the block itself, or a launch beforehand *packs* them in the order in
which they are multiplied, and every step copies some that follow each other, or a block all that stay: one thread says
so, and when they have landed, a *landing* in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil

import torch

from fusewright.codegen.cuda import warpgroup_text
from fusewright.codegen.cuda.contraction_weights import PACKING_THREADS, Packing, first_tap, packing, tap_steps
from fusewright.codegen.cuda.warpgroup_halves import Guard
from fusewright.codegen.cuda.warpgroup_input import all_threads, staging_thread
from fusewright.codegen.cuda.warpgroup_text import operand
from fusewright.codegen.text import Lines, fill, indent
from fusewright.schedule import warpgroup_staging as staging
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.warpgroup_pairs import multiplied_vectors
from fusewright.schedule.warpgroup_staging import Staged, Taps, WarpgroupCut


@dataclass(frozen=True)
class Place:
    """Text: what says where a weight lies, the template of what lays weights out, and its statement for one."""

    where: Lines
    pack: str
    put: str


@dataclass(frozen=True)
class WarpgroupWeights:
    """The weights of one group and tile; phases are counted in the order they are computed."""

    c: Contraction
    t: WarpgroupCut

    @cached_property
    def phases(self) -> list[tuple[Phase, Phase, Phase]]:
        """A phase per dimension, in the order they are computed."""
        d, h, w = (a.phases for a in self.c.axes)
        return list(product(d, h, w))

    @cached_property
    def taps(self) -> list[Taps]:
        """Of every phase, as they are multiplied in turn."""
        return [self.t.in_turn(taps) for taps in staging.taps_of(self.c)]

    @property
    def with_taps(self) -> list[int]:
        """The phases that have taps."""
        return [i for i, taps in enumerate(self.taps) if taps.rows * taps.per_row]

    @property
    def passes(self) -> list[list[int]]:
        """The phases with taps of every pass over the input that has some."""
        found = ([i for i in each if i in self.with_taps] for each in staging.passes(self.c, self.t.joined))
        return [each for each in found if each]

    @cached_property
    def lay(self) -> Staged:
        return staging.staged(self.c, self.t)

    @property
    def vector(self) -> int:
        return staging.vector(self.c)

    @property
    def chunks(self) -> int:
        return staging.chunks(self.c, self.t)

    @property
    def inputs(self) -> int:
        """What a pass over a tile stages of the input one after the other."""
        return staging.inputs(self.c, self.t)

    @property
    def blocks(self) -> int:
        """Blocks with weights of their own."""
        return self.c.op.groups * ceil(self.c.features / self.t.block_m)

    @property
    def tile(self) -> int:
        """Elements that are staged at a time."""
        return staging.slice_vectors(self.c, self.t) * self.vector

    def of_rows(self, index: int, rows: int) -> int:
        """Weights of so many rows of taps of a phase and chunk."""
        vectors = multiplied_vectors(self.c, self.lay.vectors, self.taps[index], rows)
        return vectors * self.t.weights_m * self.vector

    def of_row(self, index: int) -> int:
        """The same of each of two rows."""
        return self.of_rows(index, 2) // 2

    def of_chunk(self, index: int) -> int:
        """Weights of all rows of taps of a phase and chunk."""
        return self.of_rows(index, self.taps[index].rows)

    def at(self, index: int) -> int:
        """Where the weights of a phase begin, which has those of all chunks."""
        return sum(self.chunks * self.of_chunk(i) for i in range(index))

    @property
    def of_block(self) -> int:
        """Weights of a block: [phase][chunk][row of taps][tap][vector of channels][feature][channel]."""
        return self.at(len(self.taps))

    def slices(self, index: int) -> int:
        """Into how many parts the rows of taps of a phase are cut."""
        return ceil(self.taps[index].rows / self.t.tap_rows)

    def count(self, index: int, row: str) -> str:
        """Weights of a part that begins with this row of taps."""
        rows, at_once, size = self.taps[index].rows, self.t.tap_rows, self.of_row(index)
        if rows % at_once == 0 or row == "0":
            return str(self.of_rows(index, min(at_once, rows)))
        last = self.of_rows(index, rows % at_once)
        if last != rows % at_once * size:  # there is one without another
            return f"({rows} - {row} < {at_once} ? {last} : {at_once * size})"
        return f"({rows} - {row} < {at_once} ? {rows} - {row} : {at_once}) * {size}"

    # -- the record

    def packing(self, name: str) -> Packing | None:
        """Of the weights of every block, unless they stay where a block lays them out itself."""
        elements = self.blocks * self.of_block
        return packing(name, self.chunks, self.blocks, elements, self.c.multiplied) if self.packed else None

    @property
    def packed(self) -> bool:
        """Whether a launch beforehand lays them out."""
        return not self.t.stay or staging.copies_weights(self.c, self.t)

    # -- the text

    def functions(self, name: str, place: Place, guard: Guard) -> list[Lines]:
        """What lays out weights, each in its `place`, and copies them, for the kernel `name`."""
        rounds, halves = self.c.multiplied == torch.float32, self.c.halves
        value = "__uint_as_float(round_tf32(value))" if rounds else "half" if halves else "value"
        row = "(group * C + channel) * O + first_feature + feature"
        if not self.c.op.transposed:
            row = "(group * O + first_feature + feature) * C + channel"
        phase = fill(
            place.pack,
            **(_CHANNEL if self.c.unfolded is None else _UNFOLDED),
            row=row,
            start=f"blockIdx.z * {PACKING_THREADS} + threadIdx.x" if self.packed else "threadIdx.x",
            step=f"gridDim.z * {PACKING_THREADS}" if self.packed else all_threads(self.t),
            put=place.put.format(value=value),
            halved=fill(_HALVED) if halves else [],
            most=", unsigned& most" if halves else "",
            operand=operand(self.c),
        )
        found = [place.where, tap_steps(self.c), phase]
        if self.packed:
            packing = self._pack_phases("packed", "chunk")
            named = {"operand": operand(self.c), "parameter": guard.parameter}
            about = {"begin": guard.pack_begin, "end": guard.pack_end, "phases": packing}
            found.append(fill(warpgroup_text.PACK, **named, **about, name=f"{name}_pack", block=self.of_block))
        if not self.t.stay:
            names = {"operand": operand(self.c), "of_block": self.of_block}
            found.append(fill(warpgroup_text.STAGE_WEIGHTS, **names, thread=staging_thread(self.t)))
        return found

    def at_hand(self) -> Lines:
        """Lay out weights that stay, or start copying them."""
        if not self.t.stay:
            return []
        if self.packed:
            behind = self.tile + (16 // self.c.multiplied.itemsize if self.t.lands else 0)
            return fill(_COPIED, behind=behind, block=self.of_block, operand=operand(self.c))
        if self.chunks == 1:
            return self._pack_phases("w_tile", "0")
        count = "ceil_div(C, CHUNK)" if self.c.unfolded is None else self.chunks
        loop = f"for (int chunk = 0; chunk < {count}; ++chunk)"
        return [f"{loop} {{", *indent(self._pack_phases("w_tile", "chunk")), "}"]

    def all_landed(self) -> Lines:
        """Behind a meeting of all threads, wait until those that stay are there."""
        return ["landing_wait(weights, 0);"] if self.t.stay and self.packed else []

    def staged_at(self, index: int) -> int:
        """Where a phase's part is among those that are staged at a time: of its pass."""
        (phases,) = (each for each in self.passes if index in each)
        before = phases[: phases.index(index)]
        return sum(self.of_rows(i, min(self.t.tap_rows, self.taps[i].rows)) for i in before)

    def copy(self, phases: list[int], part: str, half: str) -> Lines:
        """The statements that start copying part `part` of a pass, counted over its chunks and slices, to a `half`."""
        return [self._copy(i, part, half) for i in phases]

    def _copy(self, index: int, part: str, half: str) -> str:
        slices, first, row = self.slices(index), str(self.at(index)), "0"
        if part != "0":
            chunk = part
            if slices > 1:
                chunk, row = f"{part} / {slices}", f"{part} % {slices} * {self.t.tap_rows}"
            first = f"{chunk} * {self.of_chunk(index)}" + (f" + {row} * {self.of_row(index)}" if slices > 1 else "")
            first += plus(self.at(index))
        to = ("w_tile" if half == "0" else f"w_tile + {half} * {self.tile}") + plus(self.staged_at(index))
        return f"stage_weights(packed, {first}, {to}, {self.count(index, row)}, {landing(half)});"

    def landings(self) -> Lines:
        """Statements that open those of both halves: one thread stages weights, producers all that is staged."""
        if not self.t.lands:
            return []
        behind = self.tile if self.t.stay else 2 * self.tile
        return fill(_LANDINGS, behind=behind, threads="PRODUCERS" if self.t.producers else "1")

    def copied(self, half: str) -> str:
        """The statement behind all copies to a half."""
        return f"if (threadIdx.x == 0) landing_close({landing(half)});"

    def landed(self) -> Lines:
        """Wait until what the step at hand multiplies has landed."""
        return ["landing_wait(landings + steps % 2, steps / 2 % 2);"] if self.t.lands else []

    def _pack_phases(self, start: str, chunk: str) -> Lines:
        """Statements that lay out the weights of every phase."""
        lines = []
        for i in self.with_taps:
            sizes = ", ".join(str(len(p.taps)) for p in self.phases[i])
            size = self.of_chunk(i)
            places = [start, *([str(self.at(i))] if self.at(i) else []), *([f"chunk * {size}"] if chunk != "0" else [])]
            first = first_tap(self.c, self.phases[i])
            most = ", most" if self.c.halves else ""
            at = f"{' + '.join(places)}, group, first_feature, {chunk}, {first}{most}"
            lines.append(f"pack_phase<{sizes}>(w, {at});")
        return lines


# What the channel of a weight is: x's, or x's and a tap.
_CHANNEL = {"channel": ", channel = chunk * CHUNK + own", "at": "", "some": "channel < C"}
_UNFOLDED = {
    "channel": ";\n        const int multiplied = chunk * CHUNK + own, channel = multiplied % OF_TAP",
    "at": " + multiplied / OF_TAP * NEXT",
    "some": "channel < C && multiplied < UNFOLDED * OF_TAP",
}


_HALVED = """
const Operand half = narrow_to<Operand>::of(value);
most = largest_halves(most, half.bits);
"""

_LANDINGS = """
unsigned long long* const landings = reinterpret_cast<unsigned long long*>(w_tile + $behind);    // one for each half
if (threadIdx.x == 0) landing_open(landings, $threads), landing_open(landings + 1, $threads);
"""


# All that stay, by one thread.
_COPIED = """
unsigned long long* const weights = reinterpret_cast<unsigned long long*>(w_tile + $behind);    // their landing
if (threadIdx.x == 0) {
    landing_open(weights, 1);
    fence_async();    // a copy finds it open
    copy_bulk(w_tile, packed + (long long)blockIdx.z * $block, $block * int(sizeof($operand)), weights);
    landing_close(weights);
}
"""


def landing(half: str) -> str:
    """Text: that of the weights of a half."""
    return "landings" if half == "0" else f"landings + {half}"


def plus(n: int) -> str:
    """Text that adds a constant."""
    return f" + {n}" if n else ""
