"""The end of a contraction's blocks: warps are joined, then blocks, and a tail may carry on per sample."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import ClassVar, Protocol

from fusewright.codegen.contraction_sizes import written
from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import contraction_finish_text as texts
from fusewright.codegen.cuda.contraction_folds import (
    COLUMN,
    JOININGS,
    OF_ENDS,
    ROW,
    Joining,
    Lanes,
    declarations,
    scratch_type,
)
from fusewright.codegen.cuda.sample import BlockProgram, block_program
from fusewright.codegen.text import Lines, block, fill, indent
from fusewright.ir import ops
from fusewright.ir.intervals import interval, within
from fusewright.ir.node import Node
from fusewright.kernel import Argument, Array, Launch
from fusewright.schedule.contraction import Contraction

# Threads of the second kernel's blocks.
FINISHERS = 128

# Values whose exponentials a logsumexp adds up with nothing subtracted: a product and one instruction give them.
EXPONENTIATED = (-2.0, 2.0)


def operands(c: Contraction) -> dict[Node, str]:
    """Pointer names of the tensors a call passes: input, weight, bias where there is one, operands of the trees."""
    bias = c.conv.args[2]
    names = {c.x: "x", c.conv.arg(1): "w"}
    if bias is not None:
        names[bias] = "bias"
    for node in (*c.operands, *c.tail_operands):
        names.setdefault(node, _name(node, set(names.values())))
    return names


def _name(node: Node, taken: set[str]) -> str:
    """A pointer's name, of our own making: a user's words never enter the text."""
    stem = "parameter" if isinstance(node.op, ops.Param | ops.Buffer) else "operand"
    return next(n for n in (f"{stem}_{i}" for i in range(1, len(taken) + 2)) if n not in taken)


@dataclass(frozen=True)
class Results:
    """What a group returns, allocates, and launches after the first kernel."""

    output: Array
    scratch: tuple[Array, ...]
    launches: tuple[Launch, ...]


class Block(Protocol):
    """What has to be known of how a block is cut: its features, its warps, and how many of those share features."""

    @property
    def block_m(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def warps_h(self) -> int: ...
    @property
    def warps_w(self) -> int: ...


@dataclass(frozen=True)
class Finish:
    """Writes what happens once all tiles of a block are done.

    With `blocks`, so many blocks form a cluster and finish a sample in the same launch.
    """

    # The lanes of a warp that have other channels of the same positions, and other positions of the same channels.
    other_channels: ClassVar[Lanes] = ROW
    other_positions: ClassVar[Lanes] = COLUMN

    c: Contraction
    t: Block
    blocks: int | None = None

    @property
    def own_feature(self) -> str:
        """The feature of its block that a thread's channel (m, half) is."""
        return "16 * (warp_m * M_TILES + m) + 8 * half + row"

    @property
    def first_feature(self) -> tuple[str, str]:
        """The first feature that a thread has, and how far behind it that of channel (m, half) is."""
        return "16 * warp_m * M_TILES + row", "16 * m + 8 * half"

    @property
    def kind(self) -> str:
        """What of the output is reduced (`Contraction.reduced`)."""
        return self.c.reduced

    @property
    def fold(self) -> str:
        """How values become one (`JOININGS`)."""
        kind = self.c.fold.op.kind if self.c.fold is not None else "sum"
        return "sum of exponentials" if kind == "logsumexp" and self._bounded else kind

    @cached_property
    def _bounded(self) -> bool:
        """Whether the exponential of each value can be taken as it is, in the function that it comes from."""
        assert self.c.fold is not None
        last = self.c.before if self.c.window is None and self.c.shares is None else self.c.after
        return last is not None and within(interval(self.c.fold.node.arg(0)), EXPONENTIATED)

    @property
    def slices(self) -> int:
        """Blocks that share positions, each with channels of its own."""
        return self.c.op.groups * ceil(self.c.features / self.t.block_m)

    @property
    def closes(self) -> bool:
        """Whether blocks have results once all their tiles are done."""
        return self.kind in ("positions", "all")

    @property
    def partial(self) -> bool:
        """Whether the first kernel leaves parts of results to a second one."""
        return self.blocks is None and (self.closes or (self.kind == "channels" and self.slices > 1))

    @property
    def joining(self) -> Joining:
        return JOININGS[self.fold]

    @property
    def own_joining(self) -> Joining:
        """How values of one thread do, before what they come to is joined with that of others."""
        return OF_ENDS if self.c.folds_ends else self.joining

    @property
    def tile_type(self) -> str:
        """Of a running result within a tile."""
        return self.own_joining.running[0]

    @property
    def total_type(self) -> str:
        """Of a running result over many tiles, as threads and blocks leave it to each other."""
        return self.joining.running[1]

    @property
    def partial_type(self) -> str:
        """Of the running results left to the second kernel: by every block, or for every position of a tile."""
        return self.total_type if self.closes else self.tile_type

    @property
    def at_once(self) -> bool:
        """Whether the values of a column are joined all at once (`Joining.at_once`)."""
        return False

    @property
    def singly(self) -> bool:
        """Whether values are joined one by one that could be at once."""
        return False

    @property
    def _units(self) -> int:
        """Units of 8 bytes that are set aside for a running result."""
        return self.joining.words if compute_type(self.c.x.dtype) == "double" else 1

    @property
    def rows(self) -> int:
        """Results of a reduction over positions per sample."""
        return self.c.features * self.c.op.groups if self.kind == "positions" else 1

    @property
    def names_of_finish(self) -> tuple[str, ...]:
        """Operands that only the second kernel reads."""
        if self.blocks is not None or self.c.tail is None:
            return ()
        first = {self.c.x, self.c.conv.arg(1), self.c.conv.args[2], *self.c.operands}
        return tuple(name for node, name in operands(self.c).items() if node not in first)

    @property
    def finishers(self) -> int:
        """Threads that carry on from what was folded: of the block that did, or of the second kernel's."""
        return FINISHERS if self.blocks is None else 32 * self.t.warps

    @property
    def _places(self) -> tuple[int, int, int]:
        """Where the block's own results, what was folded and the tail's values lie in shared memory, in units of 8
        bytes: behind what the warps leave each other."""
        warps = self.t.block_m * self.t.warps_h * self.t.warps_w if self.kind == "positions" else self.t.warps
        own = _even(warps * self._units)
        folded = own + _even(self.rows * self._units)
        return own, folded, folded + _even(self.rows)

    def closing_bytes(self) -> int:
        """Shared memory that the end of a block uses, over what was staged."""
        if not self.closes:
            return 0
        own, _, arena = self._places
        return 8 * (own if self.blocks is None else arena + (self._program.units if self.c.tail is not None else 0))

    def close(self) -> Lines:
        """Reduce over the block's threads; leave the result to the second kernel, or join those of the cluster."""
        if not self.closes:
            return []
        clustered = self.blocks is not None
        at = "partial[((long long)sample * parts + part) * {rows} + {i}]" if not clustered else "own[{i}]"
        names = {"total": self.total_type, "shuffled": self.joining.join_lane("value", "distance")}
        if self.kind == "positions":
            names["target"] = at.format(rows="(GROUPS * O)", i="group * O + first_feature + i")
            names["warps"] = self.joining.join("value", "across[other][i]")
            names["own"] = self.come_to("total[m][half]")
            lines = fill(texts.CLOSE_POSITIONS, feature=self.own_feature, **names, **self.other_positions.words)
        else:
            names["target"] = at.format(rows="gridDim.z", i="0" if clustered else "blockIdx.z")
            names["warps"] = self.joining.join("value", "across[other]")
            names["own"] = self.come_to("total")
            lines = fill(texts.CLOSE_ALL, **names)
        if not clustered:
            return ["", *lines]
        about = "// What this block's warps come to, for the others to read."
        return ["", about, _in_shared(self.total_type, "own", self._places[0]), *lines, *self._join()]

    @abstractmethod
    def come_to(self, total: str) -> str:
        """What a thread's running result, of this name, is to the others."""

    def _join(self) -> Lines:
        """The first block of a cluster folds the results of all, in their order, and finishes the sample."""
        assert self.c.fold is not None and self.blocks is not None
        folded = [_in_shared(compute_type(self.c.fold.node.dtype), "folded", self._places[1])]
        come_to = self._come_to("value", f"(double({self._positions()}){self._features()})")
        loop = f"for (int i = threadIdx.x; i < {self.rows}; i += THREADS)"
        own, result = f"{self.total_type} value = own[i];", f"folded[i] = {come_to};"
        if self.blocks == 1:
            lines = block(loop, [own, result])
            return [*folded, "__syncthreads();", *lines, "__syncthreads();", *self._finished()]
        load = self.joining.join("value", "cluster_load(own + i, rank)")
        others = f"for (unsigned rank = 1; rank < {self.blocks}; ++rank) value = {load};"
        return [
            *folded,
            "cluster_barrier();",
            "if (cluster_rank() == 0)",
            *indent(block(loop, [own, others, result])),
            "cluster_barrier();    // until the others' shared memory has been read",
            "if (cluster_rank() != 0) return;",
            *self._finished(),
        ]

    def _positions(self) -> str:
        over = ("cells_d", "cells_h", "cells_w") if self.c.window is not None else ("P", "Q", "R")
        return f"(long long){over[0]} * {over[1]} * {over[2]}"

    def _features(self) -> str:
        return f" * {self.c.features * self.c.op.groups}" if self.kind == "all" else ""

    def _come_to(self, running: str, count: str) -> str:
        """What a running result over `count` values comes to."""
        assert self.c.fold is not None
        result = self.joining.result.format(running)
        return f"{compute_type(self.c.fold.node.dtype)}({result}{f' / {count}' if self.fold == 'mean' else ''})"

    def _finished(self) -> Lines:
        """Write what was folded, or carry on from it."""
        if self.c.tail is None:
            written = f"narrow_to<{self.result_type}>::of(folded[i])"
            return [
                f"for (int i = threadIdx.x; i < {self.rows}; i += THREADS)",
                f"    out[(long long)sample * {self.rows} + i] = {written};",
            ]
        program = self._program
        if not program.units:
            return program.body
        arena = f"__shared__ double arena[{program.units}];    // values of one sample"
        return [_in_shared("double", "arena", self._places[2]) if self.blocks is not None else arena, *program.body]

    @property
    def _program(self) -> BlockProgram:
        """The tail, from `folded` on."""
        assert self.c.tail is not None and self.c.fold is not None
        given, sample = {self.c.fold.node: "folded"}, "(long long)sample"
        return block_program(self.c.tail, given, operands(self.c), sample, self.finishers)

    def head(self) -> list[Lines]:
        """Declarations that the reduction and the tail need."""
        clustered = (self.blocks or 1) > 1
        lanes = self.other_channels if self.at_once else None
        own = declarations(
            self.fold, compute_type(self.c.x.dtype), column=lanes, singly=self.singly, clustered=clustered
        )
        return [own, *([self._program.head] if self.c.tail is not None else [])]

    @property
    def result_type(self) -> str:
        return "Element" if self.c.root.dtype == self.c.x.dtype else ELEMENT[self.c.root.dtype]

    @property
    def target(self) -> str:
        return "partial" if self.partial else "out"

    @property
    def parameter(self) -> str:
        if self.partial:
            return f"{self.partial_type}* __restrict__ partial"
        return f"{self.result_type}* __restrict__ out"

    def finish(self, name: str) -> Lines:
        """The second kernel: fold the blocks' partial results in a fixed order, and carry on from there."""
        if not self.partial:
            return []
        assert self.c.fold is not None
        names: dict[str, object] = {
            "name": name,
            "total": self.total_type,
            "partial": self.partial_type,
            "result": self._come_to("value", "count"),
            "element": ELEMENT[self.c.root.dtype],
            "compute": compute_type(self.c.fold.node.dtype),
            "join": self.joining.join("value", "from[(long long)split * rows]"),
            "threads": FINISHERS,
            "rows": self.rows,
        }
        behind, result, read = self.behind()
        known = operands(self.c)
        parameters = (f"const {ELEMENT[n.dtype]}* __restrict__ {known[n]}, " for n in (*self.c.tail_operands, *read))
        names["parameters"] = "".join(parameters)
        if self.c.tail is None:
            names["result"] = result.format(names["result"])
            return fill(texts.FINISH, **names, behind=behind)
        return fill(texts.FINISH_SAMPLE, **names, body=self._finished())

    @abstractmethod
    def behind(self) -> tuple[Lines, str, list[Node]]:
        """What the second kernel does with a result over channels: statements ahead, text, and what it reads."""

    def _shape(self, spatial: list[str]) -> tuple[str, ...]:
        """Of the output, whose positions have these lengths."""
        c, features = self.c, str(self.c.features * self.c.op.groups)
        if c.tail is not None:
            return ("N", *map(str, c.root.shape[1:]))
        shape = ["N", "1" if c.over_channels else features, *(["1"] * len(spatial) if c.over_positions else spatial)]
        if c.fold is None or c.fold.op.keepdim:
            return tuple(shape)
        return tuple(length for i, length in enumerate(shape) if i not in c.fold.op.dims)

    def results(self, name: str, splits: str) -> Results:
        """Output, scratch and further launches."""
        c = self.c
        spatial = written(c)
        output = Array("out", self._shape(spatial), c.root.dtype, c.layout_written)
        if not self.partial:
            return Results(output, (), ())
        positions, features = " * ".join(spatial), c.features * c.op.groups
        # Results per sample, parts of each, and the values behind it.
        rows, parts, count = {
            "positions": (str(features), splits, positions),
            "channels": (positions, str(self.slices), str(features)),
            "all": ("1", f"{splits} * {self.slices}", f"{positions} * {features}"),
        }[self.kind]
        words = (str(self.joining.words),) if self.joining.words > 1 else ()
        dtype = scratch_type(self.partial_type, compute_type(c.x.dtype))
        partial = Array("partial", ("N", parts, rows, *words), dtype)
        arguments: tuple[Argument, ...] = (
            Argument("pointer", "partial"),
            Argument("pointer", "out"),
            Argument("long", f"N * {rows}"),
            Argument("int", parts),
            Argument("int", rows),
            Argument("long", count),
        )
        if c.tail is not None:
            read = [Argument("pointer", operands(c)[n]) for n in c.tail_operands]
            arguments = (arguments[0], *read, arguments[1], *arguments[3:])
            return Results(output, (partial,), (Launch(f"{name}_finish", arguments, ("N", "1", "1"), FINISHERS),))
        blocks = f"ceil_div(N * {rows}, {FINISHERS})"
        arguments = (arguments[0], *(Argument("pointer", operands(c)[n]) for n in self.behind()[2]), *arguments[1:])
        return Results(output, (partial,), (Launch(f"{name}_finish", arguments, (blocks, "1", "1"), FINISHERS),))


def _in_shared(kind: str, name: str, units: int) -> str:
    """The declaration of an array in shared memory, so many units of 8 bytes from its start."""
    at = f"reinterpret_cast<double*>(shared_memory) + {units}"
    return f"{kind}* const {name} = {at if kind == 'double' else f'reinterpret_cast<{kind}*>({at})'};"


def _even(n: int) -> int:
    """Rounded up: what follows starts at a multiple of 16 bytes."""
    return n + n % 2
