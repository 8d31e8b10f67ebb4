"""CUDA C++ of contraction groups without tensor cores, for where there is little to multiply: depthwise and grouped
convolutions, few channels, large pooling windows.

A block stages its input in shared memory, the next tile's while it works on this one's; every thread multiplies on
its own, and what follows goes through registers or through shared memory (`direct_epilogue`).  Sums of products are
float32, or float64 for that.  The text lies in `direct_text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fusewright.codegen.contraction_shapes import shapes
from fusewright.codegen.contraction_sizes import lengths, sizes
from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import contraction_text, contraction_walk, direct_text, staged_rows
from fusewright.codegen.cuda.contraction_finish import operands
from fusewright.codegen.cuda.direct_epilogue import DirectEpilogue
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.direct import Box, Cut, DirectTile, with_windows
from fusewright.schedule.tiling import MULTIPROCESSORS

# Products that one turn of the loop over channels should have at least, and at most where all is unrolled.
FEWEST, MOST = 128, 1024


def generate(c: Contraction, t: DirectTile, name: str, reference: str) -> Kernel:
    """The kernel of a group for one tile."""
    return Writer(with_windows(c), t, name, reference).kernel()


@dataclass(frozen=True)
class Writer:
    """Writes the kernel of one group and tile."""

    c: Contraction
    t: DirectTile
    name: str
    reference: str

    @cached_property
    def epilogue(self) -> DirectEpilogue:
        return DirectEpilogue(self.c, Cut.of(self.c, self.t))

    @property
    def cut(self) -> Cut:
        return self.epilogue.t

    @property
    def box(self) -> Box:
        return self.cut.box

    @property
    def compute(self) -> str:
        return compute_type(self.c.x.dtype)

    @cached_property
    def phases(self) -> list[tuple[Phase, Phase, Phase]]:
        """A phase per dimension, in the order they are computed."""
        return self.box.phases

    # -- the record --------------------------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        into, out, cells = lengths(self.c)
        tiles = contraction_walk.tiles(self.box.walks, cells, self.t.cells)
        z = self.epilogue.slices
        splits = f"spread(N * {z}, {tiles}, {MULTIPROCESSORS * self.cut.per_sm})"
        results = self.epilogue.results(self.name, splits)
        names = tuple(operands(self.c).values())
        own = [n for n in names if n not in self.epilogue.names_of_finish]
        numbers = [Argument("int", each[a]) for each in (into, out, cells) for a in "dhw"]
        arguments = (*(Argument("pointer", o) for o in (*own, self.epilogue.target)), *numbers)
        shared = max(self.cut.shared, self.epilogue.closing_bytes())
        return Kernel(
            name=self.name,
            source=self.source(),
            operands=names,
            layouts=("contiguous",) * len(names),
            dtypes=tuple(node.dtype for node in self.c.tensors),
            shapes=shapes(self.c),
            sizes=sizes(self.c),
            output=results.output,
            scratch=results.scratch,
            launches=(Launch(self.name, arguments, ("N", splits, str(z)), self.cut.threads, shared), *results.launches),
            reference=self.reference,
        )

    # -- the text ----------------------------------------------------------------------------------------------------

    def source(self) -> str:
        return with_primitives([
            self._constants(),
            self.multiply(),
            self._stage(),
            *self.epilogue.head(),
            self._kernel_text(),
            self.epilogue.finish(self.name),
        ])  # fmt: skip

    def _constants(self) -> Lines:
        c, t, b, weights = self.c, self.t, self.box, self.cut.weights
        names: dict[str, object] = {}
        of_weights: dict[str, object] = {"w_vector": weights.vector}
        for i, (a, side) in enumerate(zip("dhw", b.sides, strict=True)):
            names |= {f"units_{a}": side.units, f"x_{a}": side.length, f"low_{a}": side.first_index}
            names |= {f"cells_{a}": t.cells[i], f"element_{a}": side.per_element}
            names[f"tap_{a}"] = next((p.per_tap for p in side.axis.phases if len(p.taps) > 1), 0)
            taps, together = weights.taps[i], weights.together[i]
            names |= {f"taps_{a}": c.axes[i].taps, f"residues_{a}": weights.residues[i]}
            of_weights |= {f"hand_{a}": taps if together else 1, f"turns_{a}": 1 if together else taps}
        names |= {
            "element": ELEMENT[c.x.dtype], "compute": self.compute, "channels": c.channels, "features": c.features,
            "groups": c.op.groups, "taps": self.cut.taps, "own_features": t.features,
            "planes": t.planes, "rows": t.rows, "run": t.run, "buffers": t.buffers,
            "phases": len(self.phases), "team": b.unit_threads, "teams": t.teams, "o_blocks": self.cut.o_blocks,
            "chunk": t.chunk, "chunks": self.cut.chunks, "part": self.cut.part, "passes": self.cut.passes,
            "x_w": b.pitch, "x_tile": self.cut.x_elements, "w_tiles": self.cut.w_elements,
            "weights": self.weights(of_weights),
        }  # fmt: skip
        return [*fill(direct_text.CONSTANTS, **names), *contraction_walk.constants(b.walks)]

    def weights(self, names: Mapping[str, object]) -> Lines:
        """Constants: how weights lie in shared memory."""
        return fill(direct_text.WEIGHTS, **names)

    def multiply(self) -> Lines:
        """The function that multiplies."""
        weights = self.cut.weights
        at_once = prod(self.t.own) * weights.at_hand
        rows, planes = (1 if weights.together[i] else weights.taps[i] for i in (1, 0))
        return fill(
            direct_text.MULTIPLY,
            vector=self.box.vector,
            unroll_h="" if at_once * rows <= MOST else "1",
            unroll_d="" if at_once * rows * planes <= MOST else "1",
        )

    def stage_weights(self) -> Lines:
        """The function that copies weights to shared memory."""
        copy = "copy_async<sizeof(Compute)>(to, from, there);"
        if self.c.x.dtype.itemsize < 4:
            copy = "*to = there ? widened(*from) : Compute(0);"
        row = self.row_of_weights("first_feature + feature", "chunk * PART + c")
        return fill(direct_text.STAGE_WEIGHTS, row=row, copy=copy)

    def row_of_weights(self, feature: str, channel: str) -> str:
        """Where the taps of a group's feature and channel lie among all."""
        if self.c.op.transposed:
            return f"((group * C + {channel}) * O + {feature})"
        return f"((group * O + {feature}) * C + {channel})"

    def _stage(self) -> Lines:
        names: dict[str, object] = {}
        for a, axis in zip("dhw", self.c.axes, strict=True):
            cell = f"cell_{a}" if axis.together == 1 else f"cell_{a} / {axis.together}"
            names[f"begin_{a}"] = f"{cell} * {axis.advance}"
        stage = fill(direct_text.STAGE, **names, stage=self._stage_rows(), stage_weights=self.stage_weights())
        return [*fill(contraction_text.COPY, near=""), "", *staged_rows.text(self.box.walks), "", *stage]

    def _stage_rows(self) -> Lines:
        """By vectors of 16 bytes where rows of x and the box's start at such, else by pairs, else one by one."""
        size, (d, h, w) = self.c.x.dtype.itemsize, self.box.sides
        rows = staged_rows.Rows(d.length * h.length, self.t.chunk, size, self.cut.threads)
        w_axis = self.c.axes[2]
        start = self.t.cells_w // w_axis.together * w_axis.advance  # of a box's rows: a multiple of it
        lines: Lines = []
        for vector in dict.fromkeys((16 // size, 2)):
            aligned = f"W % {vector} == 0 && reinterpret_cast<unsigned long long>(from) % {vector * size} == 0"
            if start % vector == 0:
                lines += [f"if ({aligned})", f"    return {rows.stage(vector, w.length)}"]
        return [*lines, rows.stage(1, w.length)]

    def _kernel_text(self) -> Lines:
        types = [
            f"const {ELEMENT[n.dtype]}* __restrict__ {name}"
            for n, name in operands(self.c).items()
            if name not in self.epilogue.names_of_finish
        ]
        stay = self.cut.weights_stay
        prologue = self.epilogue.prologue()
        if stay:
            prologue += ["stage_weights<ROUNDS * CHUNKS>(w, w_tiles, first_round, 0);"]
        staged = [] if stay else ["stage_weights<1>(w, w_tiles + buffer * W_TILE, at.round, at.chunk);"]
        return fill(
            direct_text.KERNEL,
            per_sm=self.cut.per_sm,
            name=self.name,
            parameters=", ".join([*types, self.epilogue.parameter]),
            **contraction_walk.names(self.box.walks, contraction_walk.counted("at.tile")),
            exchange=self.epilogue.exchange(),
            prologue=prologue,
            stage_weights=staged,
            own=self.own(),
            values=self.values(),
            step=self._step(),
            close=[*(fill(contraction_text.LANDED) if stay else []), *self.epilogue.close()],
        )

    def _step(self) -> Lines:
        """What a block does with what is staged."""
        first = [(p[0].elements[0], p[1].elements[0], p[2].elements[0]) for p in self.phases]
        products, finished = self.products(), self.epilogue.finished(first)
        if self.cut.at_once == 1:
            return fill(direct_text.STEP, w_tile=self._w_tile(), products=products, finished=finished)
        unroll = max(1, min(self.cut.at_once, FEWEST // (self._products * self.cut.part)))
        begun, taken = self.epilogue.begun(), self.epilogue.taken(len(first))
        names = {"products": products, "begun": begun, "taken": taken, "finished": finished}
        return fill(direct_text.STEP_OF_ROUNDS, unroll=unroll, **names)

    def own(self) -> Lines:
        """What a thread computes."""
        return fill(direct_text.OWN)

    def values(self) -> Lines:
        """Declares what a thread adds up, chunk by chunk."""
        return ["Compute acc[PHASES][FEATURES][PLANES][ROWS][RUN];"]

    def products(self) -> Lines:
        """Add those of a chunk, and go on where there are more."""
        unroll = max(1, min(self.cut.part, FEWEST // self._products))
        accumulate = [line for i, p in enumerate(self.phases) for line in self._accumulate(i, p)]
        wait = ["if (now.chunk < CHUNKS - 1) continue;", ""] if self.cut.at_once == 1 else []
        return fill(direct_text.PRODUCTS, unroll=unroll, accumulate=accumulate, wait=wait)

    @property
    def _products(self) -> int:
        """Of a thread and channel."""
        return self.t.features * prod(self.t.own) * self.cut.taps

    def _w_tile(self) -> str:
        """Which of the staged weights a step reads."""
        if not self.cut.weights_stay:
            return "buffer"
        passes = ["(now.round - first_round)"] if self.cut.passes > 1 else []
        if self.cut.chunks == 1:
            return passes[0] if passes else "0"
        return f"({passes[0]} * CHUNKS + now.chunk)" if passes else "now.chunk"

    def _accumulate(self, index: int, phases: tuple[Phase, Phase, Phase]) -> Lines:
        """The products of one phase."""
        counts = [len(p.taps) for p in phases]
        if 0 in counts:
            return []
        d, h, w = (s.first(p) for s, p in zip(self.box.sides, phases, strict=True))
        # The first tap reads behind the others where taps go backwards.
        d, h = (n + (len(p.taps) - 1) * max(0, -p.per_tap) for n, p in zip((d, h), phases[:2], strict=True))
        shift = w % self.box.vector
        at = (d * self.box.sides[1].length + h) * self.box.pitch + w - shift
        residue = 0
        for phase, residues in zip(phases, self.cut.weights.residues, strict=True):
            residue = residue * residues + phase.taps[0]
        x, weights = (f"x_c + {at}" if at else "x_c"), (f"w_c + {residue} * W_RESIDUE" if residue else "w_c")
        return [f"accumulate<{', '.join(map(str, [*counts, shift]))}>(acc[{index}], {x}, {weights});"]
