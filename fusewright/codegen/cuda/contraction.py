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

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import (
    contraction_box,
    contraction_by_warp,
    contraction_layout,
    contraction_multiply_text,
    contraction_text,
    contraction_walk,
)
from fusewright.codegen.cuda.contraction_epilogue import Epilogue
from fusewright.codegen.cuda.contraction_record import (
    LARGEST_CLUSTER,
    cluster_of,
    may_join,
    parameters,
    place,
    record,
    spread_over,
    tiles_of,
)
from fusewright.codegen.cuda.contraction_weights import Weights
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.cuda.split_text import SPLIT
from fusewright.codegen.text import Lines, fill, indent
from fusewright.kernel import Kernel
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.tiling import MULTIPROCESSORS, Tiling, blocks_per_sm, paired, splits, weights_as_operands


def generate(c: Contraction, t: Tiling, name: str, reference: str, *, tf32: bool, blocks: int | None = None) -> Kernel:
    """The kernel of a group for one tiling; `tf32` says whether float32 operands may be rounded to it.

    With `blocks`, as `blocks_per_sample` gives them, the blocks of a sample form a cluster and finish it in one launch.
    """
    return record(_Writer(c, t, name, reference, tf32, blocks))


def blocks_per_sample(c: Contraction, t: Tiling, samples: int, cells: tuple[int, int, int]) -> int | None:
    """How many blocks a cluster should have for `samples` samples, each of so many cells; `None`: no cluster fits."""
    writer = _Writer(c, t, "", "", True)
    if not may_join(writer):
        return None
    blocks = spread_over(writer, samples, cells)
    return blocks if blocks <= LARGEST_CLUSTER else None


def blocks_at_once(c: Contraction, t: Tiling, samples: int, cells: tuple[int, int, int]) -> int | None:
    """How many blocks a cluster may have so that all of them run at the same time; `None`: no cluster fits."""
    writer = _Writer(c, t, "", "", True)
    blocks = min(MULTIPROCESSORS * writer.per_sm // max(1, samples), tiles_of(writer, cells))
    return blocks if may_join(writer) and 1 <= blocks <= LARGEST_CLUSTER else None


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
        return "tf32x3" if splits(self.c, self.tf32) else "tf32"

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
        by_warp = self.t.by_warp
        return contraction_by_warp.row_elements(self.c, self.t) if by_warp else self.layout.elements(self.chunk)

    @property
    def stage(self) -> int:
        """Elements of one chunk, of the input and of the weights."""
        weights = weights_as_operands(self.c, self.t) if self.t.by_warp else self.weights.elements
        return self.x_elements + weights

    @property
    def shared(self) -> int:
        """Bytes: input tile, weights, and what the warps exchange at the end."""
        compute = 8 if compute_type(self.c.x.dtype) == "double" else 4
        return max(self.staged + self.epilogue.kept_elements() * compute, self.epilogue.closing_bytes())

    @property
    def staged(self) -> int:
        """Bytes of what is staged, up to where vectors may begin."""
        return ceil(self.t.stages * self.stage * self.c.x.dtype.itemsize / 16) * 16

    @property
    def per_sm(self) -> int:
        """Blocks that share a multiprocessor, which bounds the registers the compiler may use."""
        return max(1, blocks_per_sm(self.c, self.t, self.shared, split=self.flavour == "tf32x3"))

    @property
    def start(self) -> int:
        """Tiles that take as long as what a block does ahead of all tiles."""
        return 1

    # -- the text ----------------------------------------------------------------------------------------------------

    def source(self) -> str:
        return with_primitives([
            self._constants(),
            self._operands(),
            *(self._by_warp() if self.t.by_warp else self._from_tile()),
            *self.epilogue.head(),
            self._kernel_text(),
            self.epilogue.finish(self.name),
        ])  # fmt: skip

    def _operands(self) -> Lines:
        """What the tensor cores multiply, made of elements, or of window sums: those of a panel are rounded in it."""
        if self.t.by_warp:
            x = "round_tf32(x)"
        else:
            x = "__float_as_uint(x)" if self.c.box is not None and self.rounds else self._rounded("x")
        return fill(
            contraction_multiply_text.MULTIPLY[self.flavour],
            summed="Compute" if self.t.by_warp else "Element",
            x=x,
            w="__float_as_uint(w)" if self.rounds else self._rounded("w"),
            element=ELEMENT[self.c.x.dtype],
            split=fill(SPLIT),
        )

    def _by_warp(self) -> list[Lines]:
        """Products of window sums that lanes form of the rows that their warp stages."""
        value = "__uint_as_float(round_tf32(value))" if self.rounds else "value"
        return contraction_by_warp.products(self.c, self.t, value)

    def _from_tile(self) -> list[Lines]:
        """Products of what was staged in shared memory, the input or its window sums."""
        if self.c.box is not None:
            stage = contraction_box.stage(self.c, self.t, self.rounds)
        else:
            split = self.flavour == "tf32x3"  # pairs of operands take all registers that there are
            stage = contraction_layout.stage(self.c, self.t, self.layout, crowded=split)
        inside, packed = self.weights.channels_inside, self.weights.packed
        return [
            contraction_layout.indexing(
                self.c, paired=self.paired, channels_inside=inside, packed=packed, all_taps=self.t.all_taps
            ),
            contraction_layout.accumulate(paired=self.paired, all_taps=self.t.all_taps),
            fill(contraction_text.COPY, near=""),
            stage,
            *self.weights.packing_kernel(self.name),
            *self.weights.staging(),
        ]

    def _rounded(self, name: str) -> str:
        """An element as an operand of the tensor cores."""
        return f"round_tf32({name})" if self.rounds else f"__float_as_uint(widened({name}))"

    def _constants(self) -> Lines:
        c, t = self.c, self.t
        boxed = c.box is not None
        names: dict[str, object] = {} if t.by_warp else self._staged_constants()
        per_cell = max(len(p.elements) for p in c.axes[2].phases)
        names |= {
            "channels": c.channels if t.by_warp else self.weights.rows, "features": c.features,
            "groups": c.op.groups, "taps": 1 if boxed and not t.by_warp else self.taps,
        }  # fmt: skip
        names["owned"] = fill(contraction_text.OWNED, **{
            "m_tiles": t.m_tiles, "own_d": t.cells_d, "own_h": t.cells_h, "own_w": t.cells_w,
            "rows_d": t.rows_d, "rows_h": t.rows_h,
            "tiles_w": t.cells_w * per_cell // 2, "warps_m": t.warps_m, "warps_h": t.warps_h, "warps_w": t.warps_w,
            "threads": self.threads, "m_blocks": self.m_blocks,
        })  # fmt: skip
        types = {"element": ELEMENT[c.x.dtype], "compute": compute_type(c.x.dtype)}
        if t.by_warp:
            return [*fill(contraction_text.CONSTANTS, **types, **names), "", *contraction_by_warp.constants(c, t)]
        text = contraction_text.CONSTANTS + contraction_text.STAGED_CONSTANTS
        return [*fill(text, **types, **names), *contraction_walk.constants(self.layout.walks)]

    def _staged_constants(self) -> dict[str, object]:
        """Of the input tile in shared memory."""
        c, t, lay = self.c, self.t, self.layout
        boxed = c.box is not None
        names: dict[str, object] = {
            "chunk": self.chunk, "chunks": self.weights.chunks,
            "together_d": str(t.together_d).lower(), "together_h": str(t.together_h).lower(),
        }  # fmt: skip
        for i, a in enumerate("dhw"):
            axis, stride = lay.walks[i].staged, lay.strides[i]
            several = next((p for p in axis.phases if len(p.taps) > 1), None)
            names[f"advance_{a}"] = stride * (1 if boxed else axis.advance)
            names[f"element_{a}"] = stride * (1 if boxed else axis.phases[0].per_element)
            names[f"tap_{a}"] = 0 if boxed or several is None else stride * several.per_tap
            names[f"x_{a}"] = lay.x_shape[i]
        return names | contraction_layout.constants(c, lay)

    def _kernel_text(self) -> Lines:
        body = self.epilogue.open_tile()
        if self.t.by_warp:
            read = ["__syncthreads();    // until the last tile's results have been read"]
            body += [*fill(contraction_by_warp.NEXT), *(read if self.epilogue.exchanges else [])]
        elif not self.weights.packed:
            body += fill(contraction_text.STAGE_ONCE, shift=self._shift)
        for i in range(1 if self.t.by_warp else len(self.weights.phases)):
            body += self._pass(i)
        return fill(
            contraction_text.KERNEL,
            name=self.name,
            cluster=cluster_of(self),
            place=place(self),
            per_sm=self.per_sm,
            parameters=parameters(self),
            of_sample=contraction_layout.sample(self.c),
            **contraction_walk.names(self.layout.walks) | (contraction_by_warp.HERE if self.t.by_warp else {}),
            tiles=self._tiles(),
            x_warp=[] if self.t.by_warp else fill(contraction_text.X_WARP),
            prologue=[*self.epilogue.prologue(), *self._weights_at_hand()],
            body=[*body, *self.epilogue.after_cell(), *(["here = ahead;"] if self.t.by_warp else [])],
            close=[*self._landed, *self.epilogue.close()],
        )

    def _tiles(self) -> Lines:
        """What lies in shared memory, one behind the other."""
        tiles = ["Element* const x_tile = reinterpret_cast<Element*>(shared_memory);"]
        tiles += [f"Element* const w_tile = x_tile + {self.x_elements};"]
        if self.t.by_warp:
            tiles = ["Element* const w_tile = reinterpret_cast<Element*>(shared_memory);"]
        kept = [f"constexpr int STAGED = {self.staged};    // bytes"] if self.epilogue.kept_elements() else []
        return [*tiles, *kept]

    def _weights_at_hand(self) -> Lines:
        """Start copying weights that stay, or find those that were packed."""
        if self.t.by_warp:
            weights = weights_as_operands(self.c, self.t)
            stage = contraction_by_warp.stage(self.c, "rows")
            return fill(contraction_by_warp.FIRST, weights=weights, stage=stage)
        if self.weights.packed:
            return [self.weights.packed_block()]
        rounded = fill(contraction_text.ROUND_WEIGHTS, w=self.weights.elements) if self.rounds else []
        return [*self.weights.stage_all(), *rounded]

    @property
    def _landed(self) -> Lines:
        """Wait for weights that stay where only a tile does so."""
        waited = self.t.by_warp or self.weights.packed or self.rounds
        return [] if waited else fill(contraction_text.LANDED)

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
        values = self.epilogue.values(phases, 2 * tiles)
        return [*loops, "{", *indent(["Accumulators acc = {};", *multiply, *values]), "}"]

    def _looped(self, phases: tuple[Phase, Phase, Phase]) -> list[tuple[str, Phase, int]]:
        """The dimensions whose rows are computed some at a time: name, phase, rows at a time."""
        rows = (("d", phases[0], self.t.rows_d), ("h", phases[1], self.t.rows_h))
        return [(a, p, n) for a, p, n in rows if len(p.elements) > n]

    def _multiply(self, index: int, tiles: int) -> Lines:
        phases = self.weights.phases[index]
        if self.t.by_warp:
            return fill(contraction_by_warp.PRODUCTS)
        taps = self.weights.taps(phases)
        if 0 in taps:
            return []
        start = self.layout.start(phases) if self.c.box is None else 0
        sizes = ", ".join(map(str, (tiles, *taps, len(phases[2].elements))))
        at = " + ".join(["x_warp", *(["shift"] if self._shift else []), *([str(start)] if start else [])])
        at += "".join(f" + from_{a} * ELEMENT_{a.upper()}" for a, _, _ in self._looped(phases))
        behind = 0 if self.weights.packed else self.weights.behind(index)
        now = " + now" if self.t.stages > 1 else ""
        tile = f"w_tile + {behind}" if behind else "w_tile"
        return [f"accumulate<{sizes}>(acc, {at}{now}, {tile}{now}, feature_row);"]
