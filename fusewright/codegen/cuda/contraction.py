"""CUDA C++ of contraction groups: a convolution's tile never leaves the registers of the warp that computed it.

A block stages an input tile, or a panel of window sums (`contraction_box`), in shared memory; its warps multiply it by
the weights on the tensor cores; every thread then holds whole cells, so that pooling, the pointwise trees around it and
the reduction run on registers (`contraction_epilogue`).  The text lies in `contraction_text` and, of the products, in
`contraction_multiply_text`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import torch

from fusewright.codegen.contraction_shapes import shapes
from fusewright.codegen.contraction_sizes import lengths
from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import contraction_box, contraction_layout, contraction_multiply_text, contraction_text
from fusewright.codegen.cuda.contraction_epilogue import Epilogue
from fusewright.codegen.cuda.contraction_finish import operands
from fusewright.codegen.cuda.contraction_weights import Weights
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.text import Lines, fill, indent
from fusewright.kernel import Argument, Kernel, Launch, spread
from fusewright.schedule.contraction import Contraction, Phase
from fusewright.schedule.tiling import MULTIPROCESSORS, Tiling, blocks_per_sm, paired

# Blocks that may work on one sample and join their results in shared memory: the portable size of a cluster.
LARGEST_CLUSTER = 8


def generate(c: Contraction, t: Tiling, name: str, reference: str, *, tf32: bool, blocks: int | None = None) -> Kernel:
    """The kernel of a group for one tiling; `tf32` says whether float32 operands may be rounded to it.

    With `blocks`, as `blocks_per_sample` gives them, the blocks of a sample form a cluster and finish it in one launch.
    """
    return _Writer(c, t, name, reference, tf32, blocks).kernel()


def blocks_per_sample(c: Contraction, t: Tiling, samples: int, cells: tuple[int, int, int]) -> int | None:
    """How many blocks a cluster should have for `samples` samples, each of so many cells; `None`: no cluster fits."""
    writer = _Writer(c, t, "", "", True)
    one_block = c.op.groups * writer.m_blocks == 1 and t.warps & (t.warps - 1) == 0
    if not (c.over_positions and one_block):
        return None
    tiles = prod(ceil(n / k) for n, k in zip(cells, t.cells, strict=True))
    blocks = spread(samples, tiles, MULTIPROCESSORS * writer.per_sm)
    return blocks if blocks <= LARGEST_CLUSTER else None


@dataclass(frozen=True)
class _Writer:
    c: Contraction
    t: Tiling
    name: str
    reference: str
    tf32: bool
    blocks: int | None = None

    @cached_property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.c, self.t, self.blocks)

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.c, self.t, self.rounds)

    @cached_property
    def layout(self) -> contraction_layout.Layout:
        return contraction_layout.layout(self.c, self.t)

    @property
    def flavour(self) -> str:
        """How two numbers are multiplied; half precisions are tf32 numbers as they are."""
        if compute_type(self.c.x.dtype) == "double":
            return "f64"
        if self.paired:
            return "halves"
        return "tf32" if self.tf32 or self.c.x.dtype.itemsize == 2 else "tf32x3"

    @property
    def paired(self) -> bool:
        """Whether an operand of the tensor cores is two channels, which lie side by side."""
        return paired(self.c, self.t.chunk)

    @property
    def rounds(self) -> bool:
        """Whether operands have to be rounded to tf32: weights once for all uses, window sums when written."""
        return self.flavour == "tf32" and self.c.x.dtype == torch.float32

    @property
    def taps(self) -> int:
        return prod(a.taps for a in self.c.axes)

    @property
    def chunk(self) -> int:
        return self.weights.chunk

    @property
    def m_blocks(self) -> int:
        return ceil(self.c.features / self.t.block_m)

    @property
    def threads(self) -> int:
        return 32 * self.t.warps

    @property
    def x_elements(self) -> int:
        return self.layout.elements(self.chunk)

    @property
    def stage(self) -> int:
        """Elements of one chunk, of the input and of the weights."""
        return self.x_elements + self.weights.elements

    @property
    def shared(self) -> int:
        """Bytes: input tile, weights, and what the warps exchange at the end."""
        size = self.c.x.dtype.itemsize
        compute = 8 if compute_type(self.c.x.dtype) == "double" else 4
        staged = self.t.stages * self.stage * size + self.epilogue.exchange_elements() * compute
        return max(staged, self.epilogue.closing_bytes())

    @property
    def per_sm(self) -> int:
        """Blocks that share a multiprocessor, which bounds the registers the compiler may use."""
        return max(1, blocks_per_sm(self.c, self.t, self.shared, split=self.flavour == "tf32x3"))

    # -- the record --------------------------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        n = self.c.x.ndim - 2
        axes = "dhw"[3 - n :]
        into, out, cells = lengths(self.c)
        tiles = " * ".join(f"ceil_div({cells[a]}, {k})" for a, k in zip("dhw", self.t.cells, strict=True))
        z = self.c.op.groups * self.m_blocks
        slots = MULTIPROCESSORS * self.per_sm
        splits = f"spread(N * {z}, {tiles}, {slots}{'' if self.epilogue.closes else f', {slots}'})"
        if self.blocks is not None:
            splits = str(self.blocks)
        results = self.epilogue.results(self.name, splits, cells, out)
        names = tuple(operands(self.c).values())
        own = [self._pointer(n) for n in names if n not in self.epilogue.names_of_finish]
        numbers = [Argument("int", along[a]) for along in (into, out, cells) for a in "dhw"]
        arguments = (*(Argument("pointer", o) for o in (*own, self.epilogue.target)), *numbers)
        cluster = self.blocks or 1
        grid = ("N", splits, str(z)) if self.blocks is None else (f"N * {cluster}", "1", "1")
        first = Launch(self.name, arguments, grid, self.threads, self.shared, cluster)
        before = (self.weights.launch(self.name),) if self.weights.packed else ()
        packed = (self.weights.array,) if self.weights.packed else ()
        return Kernel(
            name=self.name,
            source=self.source(),
            operands=names,
            layouts=(self.c.layout, *("contiguous",) * (len(names) - 1)),
            dtypes=tuple(n.dtype for n in self.c.tensors),
            shapes=shapes(self.c),
            sizes=(("N", 0, 0), *((f"in_{a}", 0, 2 + i) for i, a in enumerate(axes))),
            output=results.output,
            scratch=(*packed, *results.scratch),
            launches=(*before, first, *results.launches),
            reference=self.reference,
            needs=90 if cluster > 1 else 80,
        )

    def _pointer(self, name: str) -> str:
        """What the kernel reads in the place of an operand."""
        return "packed" if name == "w" and self.weights.packed else name

    # -- the text ----------------------------------------------------------------------------------------------------

    def source(self) -> str:
        multiply = fill(
            contraction_multiply_text.MULTIPLY[self.flavour],
            x="__float_as_uint(x)" if self.c.box is not None and self.rounds else self._rounded("x"),
            w="__float_as_uint(w)" if self.rounds else self._rounded("w"),
            element=ELEMENT[self.c.x.dtype],
        )
        if self.c.box is not None:
            stage = contraction_box.stage(self.c, self.t, self.rounds)
        else:
            stage = contraction_layout.stage(self.c, self.t, self.layout)
        inside, packed = self.weights.channels_inside, self.weights.packed
        return with_primitives([
            self._constants(),
            multiply,
            contraction_layout.indexing(self.c, paired=self.paired, channels_inside=inside, packed=packed),
            contraction_layout.accumulate(self.paired),
            fill(contraction_text.COPY),
            stage,
            *self.weights.packing(self.name),
            *self.weights.staging(),
            *self.epilogue.head(),
            self._kernel_text(),
            self.epilogue.finish(self.name),
        ])  # fmt: skip

    def _rounded(self, name: str) -> str:
        """An element as an operand of the tensor cores."""
        return f"round_tf32({name})" if self.rounds else f"__float_as_uint(widened({name}))"

    def _constants(self) -> Lines:
        c, t, lay = self.c, self.t, self.layout
        boxed = c.box is not None
        names: dict[str, object] = {}
        for i, a in enumerate("dhw"):
            axis, stride = c.axes[i], lay.strides[i]
            several = next((p for p in axis.phases if len(p.taps) > 1), None)
            names[f"advance_{a}"] = stride * (1 if boxed else axis.advance)
            names[f"element_{a}"] = stride * (1 if boxed else axis.phases[0].per_element)
            names[f"tap_{a}"] = 0 if boxed or several is None else stride * several.per_tap
            names[f"x_{a}"] = lay.x_shape[i]
        per_cell = max(len(p.elements) for p in c.axes[2].phases)
        names |= {
            "channels": self.weights.rows, "features": c.features, "groups": c.op.groups,
            "taps": 1 if boxed else self.taps,
            "m_tiles": t.m_tiles, "own_d": t.cells_d, "own_h": t.cells_h, "own_w": t.cells_w,
            "rows_d": t.rows_d, "rows_h": t.rows_h,
            "tiles_w": t.cells_w * per_cell // 2, "warps_m": t.warps_m, "warps_h": t.warps_h, "warps_w": t.warps_w,
            "threads": self.threads, "m_blocks": self.m_blocks, "chunk": self.chunk, "chunks": self.weights.chunks,
            "together_d": str(t.together_d).lower(), "together_h": str(t.together_h).lower(),
        }  # fmt: skip
        names |= contraction_layout.constants(c, lay)
        types = {"element": ELEMENT[c.x.dtype], "compute": compute_type(c.x.dtype)}
        return fill(contraction_text.CONSTANTS, **types, **names)

    def _kernel_text(self) -> Lines:
        types = (
            f"const {ELEMENT[n.dtype]}* __restrict__ {self._pointer(name)}"
            for n, name in operands(self.c).items()
            if name not in self.epilogue.names_of_finish
        )
        body = self.epilogue.open_tile()
        if not self.weights.packed:
            body += fill(contraction_text.STAGE_ONCE, shift=self._shift)
        for i in range(len(self.weights.phases)):
            body += self._pass(i)
        place = "sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y"
        if self.blocks is not None:
            place = f"parts = {self.blocks}, sample = blockIdx.x / parts, part = blockIdx.x % parts"
        staged = [f"constexpr int STAGED = {self.t.stages * self.stage};"]
        return fill(
            contraction_text.KERNEL,
            name=self.name,
            cluster=f"__cluster_dims__({self.blocks}, 1, 1) " if (self.blocks or 1) > 1 else "",
            place=place,
            per_sm=self.per_sm,
            parameters=", ".join([*types, self.epilogue.parameter]),
            x_elements=self.x_elements,
            of_sample=contraction_layout.sample(self.c),
            staged=staged if self.epilogue.exchange_elements() else [],
            prologue=[*self.epilogue.prologue(), *self._weights_at_hand()],
            body=[*body, *self.epilogue.after_cell()],
            close=self.epilogue.close(),
        )

    def _weights_at_hand(self) -> Lines:
        """Start copying weights that stay, or find those that were packed."""
        if self.weights.packed:
            return [self.weights.packed_block()]
        rounded = fill(contraction_text.ROUND_WEIGHTS, w=self.weights.elements) if self.rounds else []
        return [*self.weights.stage_all(), *rounded]

    @property
    def _shift(self) -> str:
        """Rows of channel planes are staged from the 16-byte boundary before them on."""
        return "" if self.c.channels_last else "const int shift = "

    def _pass(self, index: int) -> Lines:
        """One phase of the cells: multiply by all its taps, some rows at a time, and hand the values on."""
        phases = self.weights.phases[index]
        tiles = self.t.cells_w * len(phases[2].elements) // 2
        loops = [
            f"for (int from_{a} = 0; from_{a} < {len(p.elements)}; from_{a} += {rows})"
            for a, p, rows in self._looped(phases)
        ]
        multiply = self._multiply(index, tiles)
        if self.weights.packed:
            multiply = fill(
                contraction_text.CHUNKED if self.t.stages == 1 else contraction_text.AHEAD,
                multiply=multiply,
                shift=self._shift,
                first=self.weights.stage_chunk(index, "0", "w_tile"),
                stage=self.weights.stage_chunk(index, "chunk", "w_tile"),
                ahead=self.weights.stage_chunk(index, "(chunk + 1)", "w_tile + next"),
                size=self.stage,
            )
        values = self.epilogue.values(phases, tiles)
        return [*loops, "{", *indent(["Accumulators acc = {};", *multiply, *values]), "}"]

    def _looped(self, phases: tuple[Phase, Phase, Phase]) -> list[tuple[str, Phase, int]]:
        """The dimensions whose rows are computed some at a time: name, phase, rows at a time."""
        rows = (("d", phases[0], self.t.rows_d), ("h", phases[1], self.t.rows_h))
        return [(a, p, n) for a, p, n in rows if len(p.elements) > n]

    def _multiply(self, index: int, tiles: int) -> Lines:
        phases = self.weights.phases[index]
        taps = self.weights.taps(phases)
        if 0 in taps:
            return []
        start = 0
        if self.c.box is None:
            low = zip(phases, self.layout.low, self.layout.strides, strict=True)
            start = sum((p.first - at) * stride for p, at, stride in low)
        sizes = ", ".join(map(str, (tiles, *taps, len(phases[2].elements))))
        at = " + ".join(["x_warp", *(["shift"] if self._shift else []), *([str(start)] if start else [])])
        at += "".join(f" + from_{a} * ELEMENT_{a.upper()}" for a, _, _ in self._looped(phases))
        behind = 0 if self.weights.packed else self.weights.behind(index)
        now = " + now" if self.t.stages > 1 else ""
        tile = f"w_tile + {behind}" if behind else "w_tile"
        return [f"accumulate<{sizes}>(acc, {at}{now}, {tile}{now}, feature_row);"]
