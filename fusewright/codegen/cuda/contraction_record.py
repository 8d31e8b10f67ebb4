"""The record of a contraction's kernel: what is the same whether warps or warpgroups multiply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from fusewright.codegen.contraction_shapes import layouts, shapes
from fusewright.codegen.contraction_sizes import lengths, names, sizes
from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import contraction_walk
from fusewright.codegen.cuda.contraction_epilogue import Cut, Epilogue
from fusewright.codegen.cuda.contraction_finish import operands
from fusewright.codegen.cuda.contraction_weights import Packing
from fusewright.ir.node import Node
from fusewright.kernel import Argument, Array, Expression, Kernel, Launch, spread
from fusewright.schedule import residues
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.tiling import MULTIPROCESSORS

# Blocks that may work on one sample and join their results in shared memory: the portable size of a cluster.
LARGEST_CLUSTER = 8
# Blocks of a sample whose results a further launch may join.
MOST_JOINED = 64


class Weights(Protocol):
    """What has to be known of a group's weights."""

    @property
    def blocks(self) -> int:
        """Blocks with weights of their own."""

    def packing(self, name: str) -> Packing | None:
        """The launch that lays them out ahead of the kernel called `name`, where there is one."""


class Writer(Protocol):
    """Who writes the text of one group for one way to cut it; with `blocks`, those of a sample form a cluster."""

    @property
    def c(self) -> Contraction: ...
    @property
    def t(self) -> Cut: ...
    @property
    def name(self) -> str: ...
    @property
    def reference(self) -> str: ...
    @property
    def blocks(self) -> int | None: ...
    @property
    def epilogue(self) -> Epilogue: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def shared(self) -> int:
        """Bytes of shared memory."""

    @property
    def per_sm(self) -> int:
        """Blocks that share a multiprocessor."""

    @property
    def start(self) -> int:
        """Tiles that take as long as what a block does ahead of all tiles."""

    def source(self) -> str:
        """The text."""


def record(w: Writer, *, needs: int = 80, arch: str = "") -> Kernel:
    """The kernel that `w` writes."""
    c, splits = w.c, splits_of(w)
    own, results = launched(w, splits), w.epilogue.results(w.name, splits)
    return Kernel(
        name=w.name,
        source=w.source(),
        operands=tuple(operands(c).values()),
        layouts=layouts(c),
        dtypes=tuple(n.dtype for n in c.tensors),
        shapes=shapes(c),
        sizes=sizes(c),
        output=results.output,
        scratch=(*own.scratch, *results.scratch),
        launches=(*own.launches, *results.launches),
        reference=w.reference,
        counts=(" * ".join([str(c.x.shape[1]), *names(c)]), " * ".join(lengths(c)[1].values())),
        needs=max(needs, 90) if (w.blocks or 1) > 1 else needs,
        arch=arch,
    )


def splits_of(w: Writer) -> Expression:
    """Blocks of a sample."""
    if w.blocks is not None:
        return str(w.blocks)
    tiles = contraction_walk.tiles(w.epilogue.walks, lengths(w.c)[2], w.t.cells)
    z, slots = w.weights.blocks, MULTIPROCESSORS * w.per_sm
    most = MOST_JOINED if w.epilogue.closes else slots
    return f"spread(N * {z}, {tiles}, {slots}, {most}, {w.start})"


@dataclass(frozen=True)
class Launched:
    """The launches of a kernel that multiply, and pack weights beforehand, with the arrays that only these have."""

    scratch: tuple[Array, ...]
    launches: tuple[Launch, ...]


def launched(w: Writer, splits: Expression, further: tuple[Argument, ...] = ()) -> Launched:
    """Those of what `w` writes, with so many blocks of a sample; both have `further` arguments behind the pointers."""
    cluster = w.blocks or 1
    own = [pointer(w, name) for name in operands(w.c).values() if name not in w.epilogue.names_of_finish]
    numbers = [Argument("int", each[a]) for each in lengths(w.c) for a in "dhw"]
    pointers = [Argument("pointer", o) for o in (*own, w.epilogue.target)]
    grid = ("N", splits, str(w.weights.blocks)) if w.blocks is None else (f"N * {cluster}", "1", "1")
    first = Launch(w.name, (*pointers, *further, *numbers), grid, w.t.threads, w.shared, cluster)
    packing = w.weights.packing(w.name)
    if packing is None:
        return Launched((), (first,))
    pack = replace(packing.launch, arguments=(*packing.launch.arguments, *further))
    return Launched((packing.array,), (pack, first))


def pointer(w: Writer, name: str) -> str:
    """What the kernel reads in the place of an operand."""
    return "packed" if name == "w" and w.weights.packing(w.name) is not None else name


def parameters(w: Writer) -> str:
    """The pointers that the kernel takes, with their types."""
    types = (
        f"const {_type(w, n, name)}* __restrict__ {pointer(w, name)}"
        for n, name in operands(w.c).items()
        if name not in w.epilogue.names_of_finish
    )
    return ", ".join([*types, w.epilogue.parameter])


def _type(w: Writer, operand: Node, name: str) -> str:
    """Of the elements that the kernel reads in the place of an operand."""
    return ELEMENT[w.c.multiplied if pointer(w, name) == "packed" else operand.dtype]


def cluster_of(w: Writer) -> str:
    """The attribute of a kernel whose blocks form clusters."""
    return f"__cluster_dims__({w.blocks}, 1, 1) " if (w.blocks or 1) > 1 else ""


def place(w: Writer) -> str:
    """Which of a sample's blocks a block is."""
    if w.blocks is not None:
        return f"parts = {w.blocks}, sample = blockIdx.x / parts, part = blockIdx.x % parts"
    return "sample = blockIdx.x, part = blockIdx.y, parts = gridDim.y"


def may_join(w: Writer) -> bool:
    """Whether the blocks of a sample may form a cluster that finishes it."""
    return w.c.over_positions and w.weights.blocks == 1 and w.t.warps & (w.t.warps - 1) == 0


def tiles_of(w: Writer, cells: tuple[int, int, int]) -> int:
    """Tiles of one sample that has so many cells."""
    return residues.tiles(w.epilogue.walks, cells, w.t.cells)


def joined(w: Writer, samples: int, cells: tuple[int, int, int]) -> int | None:
    """How many blocks a cluster of warpgroups' should have for `samples` samples, each of so many cells; `None`: none
    fits."""
    if not may_join(w):
        return None
    blocks = spread_over(w, samples, cells, LARGEST_CLUSTER)
    return blocks if blocks < LARGEST_CLUSTER or samples * blocks >= MULTIPROCESSORS * w.per_sm else None


def spread_over(w: Writer, samples: int, cells: tuple[int, int, int], most: int = MOST_JOINED) -> int:
    """Blocks for each of so many samples (`fusewright.kernel.spread`)."""
    return spread(samples, tiles_of(w, cells), MULTIPROCESSORS * w.per_sm, most, w.start)
