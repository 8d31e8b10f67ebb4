"""CUDA C++ of float32 matmuls as accurate as float32 ones, or rounded to tf32, on the tensor cores of Hopper (sm_90a).

A launch beforehand splits x into numbers of tf32, or rounds it, and lays them out (`matmul_text.PACK`): one thread of
a block keeps copies of the next chunks on their way, and warpgroups multiply them by what they read of the weight,
which they split or round in registers.
"""

from __future__ import annotations

from fusewright.codegen.cuda import matmul_text
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.cuda.split_text import ROUND, SPLIT
from fusewright.codegen.cuda.stream_values import tree
from fusewright.codegen.text import fill
from fusewright.ir.node import Node
from fusewright.ir.types import numel
from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.schedule.matmul import CHUNK, Linear, MatmulTile

ARCH, CAPABILITY = "sm_90a", 90
# Threads of the launches before and behind.
THREADS = 256


def kernel(group: Linear, t: MatmulTile, name: str, reference: str) -> Kernel:
    """The kernel of a group for one tile."""
    behind = dict.fromkeys([*([] if group.bias is None else [group.bias]), *group.operands])
    of = {group.x: "x", group.w: "w"}
    of |= {n: "bias" if n is group.bias else f"operand_{i}" for i, n in enumerate(behind) if n not in of}
    lengths = [f"rows_{i}" for i in range(group.x.ndim - 1)]
    if group.turned or group.across:
        lengths[-1] = str(group.rows[-1])
    rows, chunks = " * ".join(lengths), -(-group.summed // CHUNK)
    across = f"ceil_div({rows}, {t.columns})"
    packed = Array("packed", (f"{across} * {chunks * t.stage_bytes // 4}",), group.x.dtype)
    partial = Array("partial", (f"{t.parts} * {rows} * {group.features}",), group.x.dtype)
    read = [of[n] for n in behind]
    inside = ["packed", "w", *([] if t.parts > 1 else [n for n in read if n != "w"])]
    written = "partial" if t.parts > 1 else "out"
    count = Argument("long", rows)
    packing = f"ceil_div({across} * {t.columns * 2 * chunks}, {THREADS})"
    multiplying = f"{across} * {-(-group.features // t.features)}"
    launches = [
        Launch(f"{name}_pack", (*_pointers("x", "packed"), count), (packing, "1", "1"), THREADS),
        Launch(
            name, (*_pointers(*inside, written), count), (multiplying, str(t.parts), "1"), 128 * t.groups,
            t.stages * (t.stage_bytes + 16),
        ),
    ]  # fmt: skip
    if t.parts > 1:
        grid = (f"ceil_div({rows} * {group.features}, 256)", "1", "1")
        launches.append(Launch(f"{name}_finish", (*_pointers("partial", *read, "out"), count), grid, THREADS))
    return Kernel(
        name=name,
        source=_source(group, t, name, {n: of[n] for n in behind}, inside),
        operands=tuple(of.values()),
        layouts=("contiguous",) * len(of),
        dtypes=tuple(n.dtype for n in of),
        shapes=tuple(_shape(group, n, lengths) for n in of),
        sizes=tuple((length, 0, i) for i, length in enumerate(lengths) if not length.isdecimal()),
        output=Array("out", _laid(lengths, group.features, group.across), group.root.dtype),
        scratch=(packed, *([partial] if t.parts > 1 else [])),
        launches=tuple(launches),
        reference=reference,
        needs=CAPABILITY,
        arch=ARCH,
    )


def _pointers(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument("pointer", name) for name in names)


def _laid(lengths: list[str], columns: int, turned: bool) -> tuple[str, ...]:
    """The shape of rows of so many columns, or of columns of the rows of each sample."""
    return (*lengths[:-1], str(columns), lengths[-1]) if turned else (*lengths, str(columns))


def _shape(group: Linear, node: Node, lengths: list[str]) -> tuple[str, ...]:
    if node is group.x:
        return _laid(lengths, group.summed, group.turned)
    columns = {"element": group.features, "row": 1}
    if node in group.operands and (how := group.varies(node)) in columns:
        return _laid(lengths, columns[how], group.across)
    return tuple(map(str, node.shape))


def _source(group: Linear, t: MatmulTile, name: str, behind: dict[Node, str], inside: list[str]) -> str:
    bias = "" if group.bias is None else " + bias[feature]"
    at = matmul_text.AT[group.across]
    written = "partial" if t.parts > 1 else "out"
    write = fill(matmul_text.WRITE, at=at, sum=f"sums[i / 4][i % 4]{bias}", **_after(group, behind, "row"))
    finish = fill(
        matmul_text.FINISH, name=name, parameters=_parameters(["partial", *behind.values()], "out"), sum=f"total{bias}",
        feature=matmul_text.FEATURE[group.across], **_after(group, behind, matmul_text.ROW[group.across]),
    )  # fmt: skip
    split = fill(ROUND if t.rounded else SPLIT)
    by_sample = fill(matmul_text.SAMPLES, rows=group.rows[-1]) if group.turned or group.across else []
    return with_primitives([
        fill(
            matmul_text.CONSTANTS, summed=group.summed, features=group.features, columns=t.columns, groups=t.groups,
            stages=t.stages, parts=t.parts, samples=by_sample, numbers=t.numbers, split=split,
        ),
        fill(matmul_text.PACK, name=name, read=fill(matmul_text.READ_ROW[group.turned])),
        fill(
            matmul_text.KERNEL, name=name, columns=t.columns, per_sm=t.per_sm, parameters=_parameters(inside, written),
            read=fill(matmul_text.READ[group.features_first]), small="" if t.rounded else ", small = big + MATRIX / 4",
            products=fill(matmul_text.PRODUCTS[t.rounded], columns=t.columns),
            write=fill(matmul_text.PARTIAL, at=at) if t.parts > 1 else write,
        ),
        finish if t.parts > 1 else [],
    ])  # fmt: skip


def _parameters(read: list[str], written: str) -> str:
    """Text: pointers."""
    return ", ".join([*(f"const float* __restrict__ {name}" for name in read), f"float* __restrict__ {written}"])


def _after(group: Linear, names: dict[Node, str], row: str) -> dict[str, object]:
    """The statements behind `sum`, and the name of what is written; `row` is which one it is of."""
    index = {"": "0", "feature": "feature", "row": row, "element": "at"}
    each = ((n, index | {"repeated": f"at % {numel(n.shape)}"}) for n in group.operands)
    read = {n: f"{names[n]}[{at[group.varies(n)]}]" for n, at in each}
    lines, value = tree(group.after, group.matmul, read | {group.matmul: "sum"})
    return {"lines": lines, "value": value}
