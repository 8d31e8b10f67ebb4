"""What the CUDA C++ of contraction groups for Hopper says whichever way features and positions meet (sm_90a).

A block stages its input as vectors of neighbouring channels, so that the positions that one tap reads are a matrix as
the tensor cores take it, and the next tap's the same matrix from another column on: nothing is copied per tap.  They
work while the block stages what comes next.  What follows is that of `contraction`: every thread holds whole cells in
registers (`contraction_epilogue`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

import torch

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import (
    contraction_layout,
    contraction_walk,
    warpgroup_input,
    warpgroup_pairs,
    warpgroup_producers,
    warpgroup_text,
)
from fusewright.codegen.cuda.contraction_record import cluster_of, joined, parameters, place
from fusewright.codegen.cuda.contraction_weights import Phases
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.cuda.warpgroup_epilogue import PhasesEpilogue, beside
from fusewright.codegen.cuda.warpgroup_halves import Guard, asking, packing_blocks, watching
from fusewright.codegen.cuda.warpgroup_input import Input
from fusewright.codegen.cuda.warpgroup_producers import among
from fusewright.codegen.cuda.warpgroup_steps import Steps
from fusewright.codegen.cuda.warpgroup_text import operand
from fusewright.codegen.cuda.warpgroup_weights import Place, WarpgroupWeights
from fusewright.codegen.text import Lines, fill, indent
from fusewright.kernel import Expression
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.warpgroup_estimate import blocks_planned, handed_over, tiles_of_start
from fusewright.schedule.warpgroup_pairs import multiplied_vectors, together_along_w
from fusewright.schedule.warpgroup_staging import Staged, Taps, WarpgroupCut, passes, staged_bytes

# Instructions of the tensor cores that are written out one behind the other.
UNROLLED = 64
UNROLLED_HELD = 128
# How instructions' names say what they multiply.
FLAVOURS = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Operands:
    """Declarations of which warps a block has, of the cells of a warpgroup, and of the weights of its features."""

    warps: str
    cells: Lines
    weights: str


@dataclass(frozen=True)
class Writer:
    """Writes the text of one group and tile.  Who derives from it says which positions and features are multiplied.

    With `instead_of`, so many words, it multiplies where one of them says that halves do not do (`warpgroup_halves`).
    """

    c: Contraction
    t: WarpgroupCut
    name: str
    reference: str
    blocks: int | None

    instead_of: Expression = ""

    # The type of a thread's values, once they have been multiplied.
    values: ClassVar[str] = "Accumulators"

    @cached_property
    def guard(self) -> Guard:
        """What it says or asks about halves."""
        if self.instead_of:
            return asking(self.instead_of)
        if not self.c.halves:
            return Guard()
        packing = packing_blocks(self.weights.packing(self.name))
        return watching(self.c, warpgroup_input.all_threads(self.t), packing)

    def blocks_per_sample(self, samples: int, cells: tuple[int, int, int]) -> int | None:
        """How many blocks a cluster should have for `samples` samples, each of so many cells; `None`: none fits."""
        return joined(self, samples, cells) if self.t.stay and not self.t.producers else None

    @property
    @abstractmethod
    def epilogue(self) -> PhasesEpilogue:
        """What happens to the products."""

    @abstractmethod
    def owned(self) -> Lines:
        """Constants: what a block, a warpgroup and a thread have of a tile."""

    @abstractmethod
    def accumulators(self) -> Lines:
        """The type of a thread's accumulators."""

    @abstractmethod
    def products(self, instruction: str) -> Lines:
        """The instructions of one tap, two vectors of channels and element of the cells along d and w."""

    @property
    def weights_m(self) -> str:
        """Text: the weights that an instruction's tap and channel has."""
        return "BLOCK_M"

    @abstractmethod
    def held(self, **names: object) -> Lines:
        """The function that multiplies by `instruction`, with one operand in registers and these `accumulators`: so
        many `pairs` of vectors are written out one behind the other, and all of them where loops are to `unroll`."""

    @property
    def rows_together(self) -> int:
        """Rows of taps that are multiplied together, with one operand in registers."""
        return 1

    @property
    def planes(self) -> str:
        """Text: planes of a warpgroup's cells that are multiplied on their own."""
        return "OWN_D * ROWS_D"

    def ahead(self) -> Lines:
        """What comes ahead of all products of a step."""
        return []

    @abstractmethod
    def place_of_weights(self) -> Place:
        """Where a weight lies, and what lays them out."""

    def matrix_of_cells(self, first: str, between: str) -> Lines:
        """A declaration of the input as a matrix of shared memory, from the `first` column on; the eights of an
        instruction's positions are `between` bytes apart."""
        return [
            "const unsigned long long x_matrix =",
            f"    shared_matrix(x_tile, 16 * PLANE, {between}) + ({first});",
        ]

    def matrix_of_weights(self, features: str = "") -> str:
        """Text: a declaration of the weights as a matrix of shared memory, from some feature on."""
        return f"const unsigned long long w_matrix = shared_matrix(w_tile, 16 * {self.weights_m}, 128){features};"

    @abstractmethod
    def operands(self) -> Operands:
        """Where a warpgroup's part of the operands is."""

    @abstractmethod
    def slots(self, per_cell: int) -> int:
        """Values of a thread along w, of cells that have so many elements there."""

    @property
    def paired(self) -> bool:
        """Whether a chunk has an odd number of vectors of channels (`warpgroup_pairs`)."""
        return self.lay.vectors % 2 == 1

    def pairs(self, order: Lines, place: str) -> Lines:
        """Where a weight lies then: that of a feature, or column, at `place`, which `order` works out."""
        assert self.t.tap_rows % 2 == 0 or all(p.rows <= self.t.tap_rows for p in self.weights.taps), self.t
        half = warpgroup_pairs.HALF if self.c.multiplied == torch.float32 else warpgroup_pairs.HALF_OF_BITS
        column = "column" if place == "column" else "feature"
        kind = operand(self.c)
        names = {"order": order, "place": place, "column": column, "weights_m": self.weights_m, "operand": kind}
        return fill(warpgroup_pairs.PLACE, **names, half=half.format(operand=kind))

    @cached_property
    def steps(self) -> Steps:
        return Steps(self.c, self.t)

    @cached_property
    def input(self) -> Input:
        return Input(self.c, self.t, self.steps.passes, self.per_sm)

    @property
    def weights(self) -> WarpgroupWeights:
        return self.steps.weights

    @property
    def lay(self) -> Staged:
        return self.weights.lay

    @property
    def staged(self) -> int:
        """Elements of what lies in shared memory while tiles are computed."""
        return staged_bytes(self.c, self.t) // self.c.multiplied.itemsize

    @property
    def shared(self) -> int:
        """Bytes: what is staged, and what the warps exchange at the end."""
        own = self.staged * self.c.multiplied.itemsize + 4 * self.epilogue.kept_elements()
        return max(own, self.epilogue.closing_bytes())

    @property
    def per_sm(self) -> int:
        """Blocks that share a multiprocessor, which bounds the registers the compiler may use."""
        return blocks_planned(self.c, self.t, self.shared)

    @property
    def start(self) -> int:
        """Tiles that take as long as what a block does ahead of all tiles."""
        return tiles_of_start(self.c, self.t, self.per_sm)

    # -- the text ----------------------------------------------------------------------------------------------------

    def source(self) -> str:
        return with_primitives([*self.sections(), self.epilogue.finish(self.name)])

    def sections(self) -> list[Lines]:
        """The text but for what joins the results of a sample's blocks."""
        return [
            self._constants(),
            self.multiply(),
            fill(warpgroup_text.CHANNELS, word="words[2]" if self.c.halves else "word"),
            self.guard.functions,
            self.input.functions(),
            *self.weights.functions(self.name, self.place_of_weights(), self.guard),
            *self.epilogue.head(),
            self._kernel_text(),
        ]

    def _constants(self) -> Lines:
        c, t, lay = self.c, self.t, self.lay
        strides = (lay.lengths[1] * lay.row, lay.row, 1)
        names: dict[str, object] = {}
        for i, a in enumerate("dhw"):
            axis = lay.walks[i].staged
            several = next((p for p in axis.phases if len(p.taps) > 1), None)
            names[f"advance_{a}"] = strides[i] * axis.advance
            names[f"element_{a}"] = strides[i] * axis.phases[0].per_element
            names[f"tap_{a}"] = 0 if several is None else strides[i] * several.per_tap
            names[f"x_{a}"] = lay.lengths[i]
        names |= {
            "element": ELEMENT[c.x.dtype], "channels": c.channels_of_x, "features": c.features, "groups": c.op.groups,
            "taps": prod(a.taps for a in c.axes), "owned": self.owned(), "chunk": t.chunk,
            "vectors": lay.vectors, "plane": lay.plane, "pitch": lay.pitch, "row": lay.row,
            "skip": lay.advance,
            "unfolded": self._unfolded(), "operand": operand(c),
            "operands": fill(warpgroup_text.OPERANDS, type=ELEMENT[c.multiplied]) if c.halves else [],
        }  # fmt: skip
        numbers = {"tap_rows": t.tap_rows, "next_tap": together_along_w(c)}
        pairs = fill(warpgroup_pairs.CONSTANTS, **numbers) if self.paired else []
        apart = warpgroup_producers.constants(c, t)
        return [*fill(warpgroup_text.CONSTANTS, **names), *pairs, *apart, *contraction_walk.constants(lay.walks)]

    def _unfolded(self) -> Lines:
        """Constants: the taps that are channels."""
        u = self.c.unfolded
        if u is None:
            return []
        which = "one behind the other" if u.dense else "C and what fills the last vector"
        between = u.between * prod(a.taps for a in self.c.axes[u.dim + 1 :])
        return fill(
            warpgroup_text.UNFOLDED,
            dim="dhw"[u.dim],
            which=which,
            count=u.count,
            channels=u.channels,
            apart=u.apart,
            between=between,
        )

    def multiply(self) -> Lines:
        """The functions that multiply a step's operands."""
        each = self.t.products(self.c).instructions * max(len(p[2].elements) for p in self.weights.phases)
        taps = Taps(max(p.rows for p in self.weights.taps), max(p.per_row for p in self.weights.taps))
        every = multiplied_vectors(self.c, self.lay.vectors, taps, taps.rows) // 2 * each
        flavour, columns = FLAVOURS[self.c.multiplied], self.t.products(self.c).columns
        unroll_rows = "" if taps.rows == self.t.tap_rows and every <= UNROLLED else "1"
        accumulators = among(self.t, self.accumulators())
        if self.t.held:
            most = max(1, UNROLLED_HELD // (each * taps.per_row * self.rows_together))
            fit = [n for n in range(1, self.lay.vectors // 2 + 1) if self.lay.vectors // 2 % n == 0 and n <= most]
            pairs = max(fit, key=lambda n: (n % 2 == 0, n))  # those of an odd number wait for the last
            instruction = f"wgmma_rows_{flavour}_{columns}"
            return self.held(accumulators=accumulators, instruction=instruction, pairs=pairs, unroll=unroll_rows)
        names = {
            "unroll_rows": unroll_rows,
            "unroll": max(1, min(self.lay.vectors // 2, UNROLLED // (each * taps.per_row))),
            "weights_m": self.weights_m,
            "planes": self.planes,
        }
        return fill(
            warpgroup_pairs.MULTIPLY if self.paired else warpgroup_text.MULTIPLY,
            **names,
            accumulators=accumulators,
            ahead=self.ahead(),
            others=fill(warpgroup_pairs.OTHERS, **names) if self.lay.vectors > 1 else [],
            products=self.products(f"wgmma_{flavour}_{columns}"),
        )

    def body(self) -> Lines:
        """What those who multiply do for a tile."""
        body = self.epilogue.open_tile()
        for phases in passes(self.c, self.t.joined):
            body += self._pass(phases)
        if self.weights.inputs == 1:
            body += ["x_now = 1 - x_now;"]
        body += self.epilogue.after_cell()
        if self.t.producers and self.epilogue.exchanges:
            body += ["__syncthreads();    // until what warps exchanged has been read"]
        return body

    def _kernel_text(self) -> Lines:
        parts = self.operands()
        return fill(
            warpgroup_text.KERNEL,
            name=self.name,
            cluster=cluster_of(self),
            place=place(self),
            per_sm=self.per_sm,
            parameters=parameters(self) + self.guard.parameter,
            operand=operand(self.c),
            begin=self.guard.begin,
            of_sample=contraction_layout.sample(self.c),
            **contraction_walk.names(self.lay.walks, {a: f"tile.{a}" for a in "dhw"}),
            stage=self._staging(),
            threads=warpgroup_input.all_threads(self.t),
            staged=[f"constexpr int STAGED = {self.staged * self.c.multiplied.itemsize};    // bytes"]
            if self.epilogue.kept_elements()
            else [],
            warps=[parts.warps],
            x_matrix=parts.cells,
            w_matrix=[parts.weights],
            prologue=[
                *self.guard.look,
                *self.epilogue.prologue(),
                *self.weights.at_hand(),
                *self.weights.landings(),
                *self._numbers(),
            ],
            steps=", steps = 0" if self.t.lands else "",
            and_before="; steps before it" if self.t.lands else "",
            first=self.steps.first(),
            **self.input.each_tile(),
            body=among(self.t, self.body()),
            close=[
                *self.guard.end,
                *warpgroup_producers.last_turn(self.c, self.t),
                *among(self.t, self.epilogue.close()),
            ],
        )

    def _staging(self) -> Lines:
        """How the input is staged: by every warp, or by some alone."""
        if not self.t.producers:
            return self.input.statements()
        registers = handed_over(self.c, self.t, self.per_sm)
        return warpgroup_producers.statements(self.steps, self.input, registers, self.guard.end)

    def _numbers(self) -> Lines:
        """Where weights are read step after step, numbers per channel may be read once more, too, sooner than kept."""
        return self.epilogue.numbers_arrived() if self.t.stay else []

    def accumulated(self, index: int, rows: list[tuple[str, Phase, int]]) -> Lines:
        """Multiply by the taps of a phase, whose accumulators are `acc`."""
        return ["Accumulators acc = {};", *self.steps.of_pass({index: "acc"}, rows)]

    def _pass(self, indices: range) -> Lines:
        """Some phases of the cells: multiply by all their taps, some rows at a time, and hand the values on."""
        phases, rows = [self.weights.phases[i] for i in indices], self.steps.pieces(indices[0])
        loops = self.steps.loops(indices[0])
        slots = [self.slots(len(phase[2].elements)) for phase in phases]
        if len(indices) == 1:
            lines = self.accumulated(indices[0], rows)
            return [*loops, "{", *indent([*lines, *self.epilogue.values(phases[0], slots[0])]), "}"]
        return [*loops, "{", *indent(self._phases(indices)), "}"]

    def _phases(self, indices: range) -> Lines:
        """Several of them at once."""
        names = {index: f"of_phase[{i}]" for i, index in enumerate(indices)}
        products = self.steps.of_pass(names, self.steps.pieces(indices[0]))
        each = [(name, self.weights.phases[index]) for index, name in names.items()]
        return [f"Accumulators of_phase[{len(names)}] = {{}};", *products, *self.handed_on(each)]

    def handed_on(self, each: list[tuple[str, Phases]]) -> Lines:
        """What becomes of the accumulators, called so, of several phases."""
        lines: Lines = []
        for i in range(0, len(each), self.epilogue.phases_w if self.epilogue.couples else 1):
            name, phases = each[i]
            slots = self.slots(len(phases[2].elements))
            if self.epilogue.couples:
                named = zip(beside(self.epilogue.phases_w), each[i:], strict=False)
                values = [f"{self.values} {', '.join(f'&{own} = {of}' for own, (of, _) in named)};    // along w"]
                values += self.epilogue.coupled(phases, slots)
            else:
                values = [f"{self.values}& acc = {name};", *self.epilogue.values(phases, slots)]
            lines += ["{", *indent(values), "}"]
        return lines
