"""CUDA C++ of float32 matmuls as accurate as float32 ones, or rounded as if to tf32, on Hopper's tensor cores (sm_90a).

A launch beforehand scales the rows of x, splits them into halves, or rounds them, and lays these out
(`matmul_text.PACK`): one thread of a block keeps copies of the next chunks on their way, and warpgroups multiply them
by what they read of the weight, which they scale and split or round in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import matmul_text
from fusewright.codegen.cuda.folds import PLANES, fold
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.cuda.split_text import HALVES, LEFT, ROUND_HALVES, SPLIT_HALVES
from fusewright.codegen.cuda.stream_text import JOINED
from fusewright.codegen.cuda.stream_values import tree
from fusewright.codegen.text import Lines, fill
from fusewright.ir.node import Node
from fusewright.ir.types import numel
from fusewright.kernel import Argument, Array, Expression, Kernel, Launch, ceil_div
from fusewright.schedule.matmul import CHUNK, Linear, MatmulTile

ARCH, CAPABILITY = "sm_90a", 90
# Threads of the launches before and behind.
THREADS = 256


@dataclass(frozen=True)
class _Names:
    """What a group's tensors and lengths are called.

    lengths   of x but for K
    features  that of a row of the result
    behind    what is read behind the products
    last      numbers that are read behind the reduction
    """

    group: Linear
    tensors: dict[Node, str]
    lengths: tuple[str, ...]
    features: str
    behind: dict[Node, str]
    last: dict[Node, str]

    @property
    def samples(self) -> Expression:
        """Of how many a weight each is."""
        return " * ".join(self.lengths[:-1]) if self.group.by_sample else "1"

    @property
    def rows(self) -> Expression:
        """Of each of those samples, or of all."""
        return self.lengths[-1] if self.group.by_sample else " * ".join(self.lengths)

    @property
    def bias(self) -> str:
        """Behind a sum, that of its feature."""
        return "" if self.group.bias is None else " + bias[feature]"

    @property
    def counts(self) -> dict[str, Argument]:
        """The lengths that a kernel is told, as C++ declares them."""
        told = {"long long rows": Argument("long", self.rows)}
        return told if self.features.isdecimal() else told | {"int O": Argument("int", self.features)}

    def parameters(self, read: list[str], written: list[str], counts: list[str]) -> str:
        """Text of those of a kernel: pointers, and lengths."""
        kinds = {"reduced": "double", "scales": "Scales"} | {name: ELEMENT[n.dtype] for n, name in self.tensors.items()}
        pointers = (f"const {kinds.get(name, 'float')}* __restrict__ {name}" for name in read)
        others = (f"{kinds.get(name, 'float')}* __restrict__ {name}" for name in written)
        return ", ".join([*pointers, *others, *counts])

    def shape(self, node: Node) -> tuple[str, ...]:
        """That of a tensor as it lies in memory."""
        group = self.group
        if node is group.x:
            return self._laid(str(group.summed), turned=group.turned)
        if node is group.w:
            summed = str(group.summed)
            matrix = (self.features, summed) if group.features_first else (summed, self.features)
            return (*(self.lengths[:-1] if group.by_sample else ()), *matrix)
        if node is group.bias:
            return (self.features,)
        if node not in group.operands:
            return ("1",) * node.ndim
        match group.varies(node):
            case "element":
                return self.result
            case "row":
                return self._laid("1", turned=group.across)
            case "feature of sample":
                return (*self.lengths[:-1], "1", self.features)
            case "feature":
                return tuple("1" if n == 1 else self.features for n in node.shape)
        return tuple(map(str, node.shape))

    @property
    def result(self) -> tuple[str, ...]:
        """The shape of what is written, or reduced."""
        return self._laid(self.features, turned=self.group.across)

    def _laid(self, columns: str, *, turned: bool) -> tuple[str, ...]:
        """The shape of rows of so many columns, or of columns of the rows of each sample."""
        *samples, rows = self.lengths
        return (*samples, columns, rows) if turned else (*samples, rows, columns)


def _named(group: Linear) -> _Names:
    behind = dict.fromkeys([*([] if group.bias is None else [group.bias]), *group.operands])
    tensors = {group.x: "x"} | ({} if group.w is group.x else {group.w: "w"})
    tensors |= {n: "bias" if n is group.bias else f"operand_{i}" for i, n in enumerate(behind) if n not in tensors}
    tensors |= {n: f"number_{i}" for i, n in enumerate(group.numbers) if n not in tensors}
    lengths = [f"rows_{i}" for i in range(group.x.ndim - 1)]
    if group.turned or group.across:
        lengths[-1] = str(group.rows[-1])
    own = lengths[-1] if group.w is group.x else "features"
    features = str(group.features) if isinstance(group.features, int) else own
    known = ({n: tensors[n] for n in nodes} for nodes in (behind, group.numbers))
    return _Names(group, tensors, tuple(lengths), features, *known)


def kernel(group: Linear, t: MatmulTile, name: str, reference: str) -> Kernel:
    """The kernel of a group for one tile."""
    names = _named(group)
    of, rows, samples, chunks = names.tensors, names.rows, names.samples, -(-group.summed // CHUNK)
    across = f"{samples} * ceil_div({rows}, {t.columns})"
    blocks = f"{across} * ceil_div({names.features}, {t.features})"
    packed, rest = (
        Array(name, (f"{across} * {chunks * t.stage_bytes // 4}",), group.x.dtype) for name in ("packed", "rest")
    )
    partial = Array("partial", (f"{t.parts} * {rows} * {names.features}",), group.x.dtype)
    planes = 0 if group.fold is None else PLANES[group.fold.op.kind]
    reduced = Array("reduced", (f"{planes} * {blocks}",), torch.float64)
    written = _written(group, t)
    read = () if t.parts > 1 else tuple(n for n in names.behind.values() if n != "w")
    counts = tuple(names.counts.values())
    scales = Array("scales", (f"{across} * {2 * t.columns}",), group.x.dtype)
    packing = f"{across} * {t.columns // _packed_at_once(group, t)}"
    launches = [
        Launch(f"{name}_pack", (*_pointers(of[group.x], "packed", "scales"), counts[0]), (packing, "1", "1"), THREADS),
        Launch(
            name, (*_pointers("packed", "scales", of[group.x], of[group.w], *read, "rest", written), *counts),
            (blocks, str(t.parts), "1"), 128 * t.groups, t.stages * (t.stage_bytes + 16),
        ),
    ]  # fmt: skip
    if t.parts > 1:
        grid = (f"ceil_div({rows} * {names.features}, 256)", "1", "1")
        finished = _pointers("partial", *names.behind.values(), "out")
        launches.append(Launch(f"{name}_finish", (*finished, *counts), grid, THREADS))
    if group.fold is not None:
        of_finish = (Argument("long", blocks), Argument("long", f"{samples} * {rows} * {names.features}"))
        joined = (*_pointers("reduced", *names.last.values(), "out"), *of_finish)
        launches.append(Launch(f"{name}_finish", joined, threads=128 * t.groups))
    operands = list(of)
    sizes = [(length, 0, i) for i, length in enumerate(names.lengths) if not length.isdecimal()]
    if names.features == "features":
        sizes.append((names.features, operands.index(group.w), group.w.ndim - (2 if group.features_first else 1)))
    return Kernel(
        name=name,
        source=_source(names, t, name, read),
        operands=tuple(of.values()),
        layouts=("contiguous",) * len(of),
        dtypes=tuple(n.dtype for n in of),
        shapes=tuple(map(names.shape, operands)),
        sizes=tuple(sizes),
        output=Array("out", names.result if group.fold is None else ("1",) * group.root.ndim, group.root.dtype),
        scratch=(packed, scales, rest, *(array for array in (partial, reduced) if array.name == written)),
        launches=tuple(launches),
        reference=reference,
        needs=CAPABILITY,
        arch=ARCH,
        counts=(blocks,) if group.by_sample or not names.features.isdecimal() else (),
    )


def _packed_at_once(group: Linear, t: MatmulTile) -> int:
    """Rows of x that a block packs: as many as leave each thread a part of one, at least a sector of rows that lie side
    by side in memory, and few where they are long, so that many blocks have some."""
    own = 8 if group.turned else 2
    while own < min(32, t.columns) and own * 2 * 4 * ceil_div(group.summed, CHUNK) <= THREADS:
        own *= 2
    return own


def _written(group: Linear, t: MatmulTile) -> str:
    """What blocks write: sums of which another launch adds up the parts, or joins what blocks have of a reduction."""
    return "partial" if t.parts > 1 else "out" if group.fold is None else "reduced"


def _pointers(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument("pointer", name) for name in names)


def _source(names: _Names, t: MatmulTile, name: str, read: tuple[str, ...]) -> str:
    group, by_sample, counts = names.group, names.group.by_sample, list(names.counts)
    at = matmul_text.AT[group.across]
    known = f", O = {names.features}" if names.features.isdecimal() else ""
    by_rows = fill(matmul_text.SAMPLES, rows=group.rows[-1]) if group.turned or group.across else []
    written = _written(group, t)
    return with_primitives([
        fill(
            matmul_text.CONSTANTS, summed=group.summed, features=known, columns=t.columns, groups=t.groups,
            stages=t.stages, parts=t.parts, samples=by_rows, numbers=t.numbers,
            split=[*fill(HALVES), *fill(ROUND_HALVES if t.rounded else SPLIT_HALVES), *fill(LEFT)],
        ),
        *_fold(group),
        fill(matmul_text.LAY_OUT, read=fill(matmul_text.READ_ROW[group.turned])),
        fill(
            matmul_text.PACK, name=name, counts=counts[0], own=_packed_at_once(group, t),
            place=fill(matmul_text.PLACE[by_sample]), inside=matmul_text.INSIDE[by_sample],
        ),
        fill(
            matmul_text.KERNEL, name=name, per_sm=t.per_sm,
            parameters=names.parameters(["packed", "scales", "source", "w", *read], ["rest", written], counts),
            sample=_sample(names, read) if by_sample else [], block="block" if by_sample else "blockIdx.x",
            read=fill(matmul_text.READ[group.features_first]),
            lay_out_rest=fill(matmul_text.LAY_OUT_REST, first="sample * rows" if by_sample else "0"),
            **_through_chunks(group, t),
            write=_write(names, t, at), reduce=[] if group.fold is None else fill(matmul_text.REDUCE),
        ),
        _finish(names, t, name),
    ])  # fmt: skip


def _through_chunks(group: Linear, t: MatmulTile) -> dict[str, str | Lines]:
    """How a block goes through them."""
    way = matmul_text.IN_TURNS if t.in_turns else matmul_text.AHEAD
    multiply = fill(way.multiply, products=fill(_products(group, t), columns=t.at_once), columns=t.at_once)
    return {"own": way.own, "alone": way.alone, "multiply": multiply, "steps": fill(way.steps), "behind": way.behind}


def _products(group: Linear, t: MatmulTile) -> str:
    """Those of a chunk's numbers."""
    if t.rounded:
        return matmul_text.PRODUCT
    return matmul_text.ALL_PRODUCTS if group.is_short else matmul_text.PRODUCTS


def _fold(group: Linear) -> list[Lines]:
    """The reduction, as a type."""
    if group.fold is None:
        return []
    text = fold(group.fold.op, "Whole", "float", "float")
    return [["using index_t = long long;"], text.strip("\n").split("\n"), fill(JOINED)]


def _sample(names: _Names, read: tuple[str, ...]) -> Lines:
    """Where what a sample has of each tensor begins."""
    extents = {"row": "rows", "element": "rows * O", "feature of sample": "O"}
    own = {name: extents.get(names.group.varies(n)) for n, name in names.behind.items() if n is not names.group.bias}
    moved = [f"{name} += sample * {own[name]};" for name in read if own.get(name) is not None]
    written = [] if names.group.fold is not None else ["out += sample * rows * O;"]
    return [*fill(matmul_text.SAMPLE), *moved, *written]


def _write(names: _Names, t: MatmulTile, at: str) -> Lines:
    """What becomes of a sum."""
    if t.parts > 1:
        return fill(matmul_text.PARTIAL, at=at)
    group = names.group
    total = f"sums[i / 4][i % 4]{names.bias}"
    if group.fold is None:
        return fill(matmul_text.WRITE, at=at, sum=total, **_after(names, "row"))
    used = any(group.varies(n) in ("element", "repeated") for n in group.operands)
    place = [f"const long long at = {at};"] if used else []
    return [*place, *fill(matmul_text.VALUE, sum=total, **_after(names, "row"))]


def _finish(names: _Names, t: MatmulTile, name: str) -> Lines:
    """The launch behind, if there is one."""
    group = names.group
    if group.fold is not None:
        read = {n: f"{each}[0]" for n, each in names.last.items()}
        lines, value = tree(group.last, group.fold.node, read | {group.fold.node: "sum"})
        parameters = names.parameters(
            ["reduced", *names.last.values()], ["out"], ["long long blocks", "long long count"]
        )
        return fill(matmul_text.JOIN, name=name, parameters=parameters, lines=lines, value=value)
    if t.parts == 1:
        return []
    parameters = names.parameters(["partial", *names.behind.values()], ["out"], list(names.counts))
    return fill(
        matmul_text.FINISH, name=name, parameters=parameters, sum=f"total{names.bias}",
        feature=matmul_text.FEATURE[group.across], **_after(names, matmul_text.ROW[group.across]),
    )  # fmt: skip


def _after(names: _Names, row: str) -> dict[str, object]:
    """The statements behind `sum`, and the name of what is written; `row` is which one it is of."""
    group = names.group
    index = {"": "0", "feature": "feature", "feature of sample": "feature", "row": row, "element": "at"}
    each = ((n, index | {"repeated": f"at % {numel(n.shape)}"}) for n in group.operands)
    read = {n: f"{names.behind[n]}[{at[group.varies(n)]}]" for n, at in each}
    lines, value = tree(group.after, group.matmul, read | {group.matmul: "sum"})
    return {"lines": lines, "value": value}
