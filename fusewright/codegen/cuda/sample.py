"""CUDA C++ of sample programs: one block per sample, value after value in shared memory.

`block_program` is what all threads of one block do for one sample, as text that may stand at the end of another kernel;
`kernel` is a kernel of its own.  Sums, means and products are carried in float64, in a fixed order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import sample_text as texts
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.sample_values import Reader, contiguous, ints, remap
from fusewright.codegen.text import Lines, fill, indent
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.ops import Size
from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.schedule.sample import SampleProgram, numel

PRIMITIVES = ("nonfinite", "elements")
MOST_THREADS = 512


@dataclass(frozen=True)
class BlockProgram:
    """What a block does for one sample.

    head   declarations before the kernel (a namespace ``rows``); needs the primitives `PRIMITIVES`
    body   statements, each followed by a barrier but the last; they begin with no barrier, so what they are given must
           be visible to all threads
    units  how many doubles of shared memory the body uses, from the name `arena` on
    """

    head: Lines
    body: Lines
    units: int


def block_program(
    p: SampleProgram,
    given: Mapping[Node, str],
    operands: Mapping[Node, str],
    sample: str,
    threads: int,
    *,
    out: str = "out",
    arena: str = "arena",
) -> BlockProgram:
    """All threads of a block compute `p.root` for sample number `sample` and write it to `out`.

    given     shared arrays that hold a node's values of this sample already, in the compute type of its dtype
    operands  pointers to the leaves in global memory
    threads   of the block, along x: a power of two, at least 32
    """
    assert given.keys() == p.given and operands.keys() >= set(p.leaves)
    body = _Body(p, Reader(p, dict(given), operands), sample, threads, out, arena).lines()
    return BlockProgram(fill(texts.ROWS, threads=threads), body, p.arena[1])


def kernel(p: SampleProgram, name: str, reference: str = "") -> Kernel:
    """The stand-alone kernel: one block per sample."""
    names = {n: f"a{i}" for i, n in enumerate(p.leaves)}
    width = threads(p)
    program = block_program(p, {}, names, "sample", width)
    parameters = [f"const {ELEMENT[n.dtype]}* __restrict__ {names[n]}" for n in p.leaves]
    arena = [f"__shared__ double arena[{program.units}];  // values of one sample, dead ones make room"]
    source = [
        f"// {name}: one block per sample.  Operands: {', '.join(f'{names[n]} {_shape(n.shape)}' for n in p.leaves)}.",
        primitives(*PRIMITIVES),
        *program.head,
        *fill(
            texts.KERNEL,
            threads=width,
            name=name,
            parameters=", ".join([*parameters, f"{ELEMENT[p.root.dtype]}* __restrict__ out"]),
            arena=arena if program.units else [],
            body=program.body,
        ),
    ]
    first = next(i for i, n in enumerate(p.leaves) if p.per_sample(n))
    pointers = [Argument("pointer", n) for n in [*names.values(), "out"]]
    return Kernel(
        name=name,
        source="\n".join(source) + "\n",
        operands=tuple(names.values()),
        layouts=("contiguous",) * len(p.leaves),
        sizes=(("batch", first, 0),),
        output=Array("out", ("batch", *(str(d) for d in p.root.shape[1:])), p.root.dtype),
        scratch=(),
        launches=(Launch(name, tuple(pointers), ("batch", "1", "1"), width),),
        reference=reference,
        dtypes=tuple(n.dtype for n in p.leaves),
        shapes=tuple(tuple(str(d) if isinstance(d, int) else "batch" for d in n.shape) for n in p.leaves),
    )


def threads(p: SampleProgram) -> int:
    """Enough for the largest step to keep them busy."""
    work = max(_work(step) for step in p.steps)
    count = 32
    while count < MOST_THREADS and 2 * count < work:
        count *= 2
    return count


def _work(step: Node) -> int:
    """Elements that a step reads, or pairs that it multiplies, eight to a thread."""
    if isinstance(step.op, ops.Matmul):
        k = step.arg(0).shape[-1]
        assert isinstance(k, int)
        return numel(step) * max(1, k // 8)
    return max(numel(step), *(numel(a) for a in step.inputs[:1])) if step.inputs else numel(step)


def _shape(shape: Sequence[Size]) -> str:
    return f"({', '.join(map(str, shape))})"


@dataclass
class _Body:
    """Writes the statements of a program."""

    p: SampleProgram
    reader: Reader
    sample: str
    threads: int
    out: str
    arena: str

    def lines(self) -> Lines:
        p = self.p
        places = p.arena[0]
        lines = self._pointers()
        for i, step in enumerate(p.steps):
            last = step is p.result
            kind = compute_type(step.dtype)
            to = self.out if last else f"s{i}"
            if not last:
                lines.append(f"{kind}* const {to} = reinterpret_cast<{kind}*>({self._place(places[step])});")
            lines += [f"// {self._about(step)}", *self._step(step, to)]
            if not last:
                lines.append("__syncthreads();")
                self.reader.hold(step, to)
        return lines

    def _place(self, units: int) -> str:
        return f"{self.arena} + {units}" if units else self.arena

    def _pointers(self) -> Lines:
        """Pointers to this sample in the leaves, and in the output."""
        p = self.p
        lines = []
        for node, name in self.reader.operands.items():
            if node in p.leaves and p.per_sample(node):
                count = numel(node)
                lines.append(f"const {ELEMENT[node.dtype]}* const {name}_row = {name} + {self.sample} * {count};")
        lines.append(f"{ELEMENT[p.root.dtype]}* const {self.out}_row = {self.out} + {self.sample} * {numel(p.root)};")
        self.out = f"{self.out}_row"
        return lines

    def _about(self, step: Node) -> str:
        op = step.op
        kind = getattr(op, "kind", None) or getattr(op, "fn", None) or type(op).__name__.lower()
        shapes = [_shape(a.shape) for a in step.inputs[:1] if step in self.p.inner]
        if isinstance(op, ops.Matmul):
            shapes.append(_shape(step.arg(1).shape))
        return f"{kind}: {' @ '.join(shapes)}{' -> ' if shapes else ''}{_shape(step.shape)}"

    # ---- steps

    def _step(self, step: Node, to: str) -> Lines:
        if step not in self.p.inner:
            return self._map(step, to, [], self.reader.at(step, "i"))
        match step.op:
            case ops.Matmul():
                return self._matmul(step, to)
            case ops.Reduce():
                return self._reduce(step, to)
            case ops.Softmax():
                return self._softmax(step, to)
            case ops.Norm():
                return self._norm(step, to)
        return self._map(step, to, *self.reader.element(step, "i"))

    def _map(self, step: Node, to: str, lines: Lines, text: str) -> Lines:
        store = self._store(step, to, "i", text)
        return fill(texts.MAP, count=numel(step), threads=self.threads, lines=lines, store=store)

    def _store(self, step: Node, to: str, index: str, text: str) -> str:
        """The statement that writes an element, given in its compute type."""
        if to != self.out:
            return f"{to}[{index}] = {text};"
        return f"{to}[{index}] = narrow_to<{ELEMENT[step.dtype]}>::of({text});"

    def _teams(self, rows: int, lanes: int, element: Lines, passes: Lines, store: Lines) -> Lines:
        template = texts.ONE_TEAM if rows == 1 else texts.TEAMS
        names = {"rows": rows, "last": rows - 1, "lanes": lanes, "threads": self.threads}
        named = any(re.search(r"\brow\b", line) for line in (*element, *passes, *store))
        row = ["constexpr int row = 0;"] if named else []
        return fill(template, **names, row=row, element=element, passes=passes, store=store)

    def _lanes(self, rows: int, length: int, along: bool) -> int:
        """Threads per row: the block for a few long rows, else neighbours where the row lies in a line."""
        if length >= 16 * 32 and rows * 32 <= 2 * self.threads:
            return self.threads
        lanes = 32
        while lanes > 1 and (lanes >= 2 * length or (rows * lanes > self.threads and (lanes > 8 or not along))):
            lanes //= 2
        return lanes

    def _rows(self, x: Node, dims: Sequence[int]) -> tuple[int, int, str, bool]:
        """Number and length of the rows along `dims`, where element r of row lies, and whether that is a line."""
        sizes = ints(x.shape[1:])
        strides = contiguous(sizes)
        inside = [d - 1 for d in dims]
        kept = [d for d in range(len(sizes)) if d not in inside]
        row = remap("row", [sizes[d] for d in kept], [strides[d] for d in kept])
        along = remap("r", [sizes[d] for d in inside], [strides[d] for d in inside])
        index = " + ".join(t for t in (row, along) if t != "0") or "0"
        return prod(sizes[d] for d in kept), prod(sizes[d] for d in inside), index, inside[-1] == len(sizes) - 1

    def _reader(self, x: Node, index: str) -> Lines:
        """The lambda ``element(r)``: element `index` of `x`."""
        name = index if index.isidentifier() or x in self.reader.stops else "i"
        lines, text = self.reader.element(x, name)
        if not lines:
            text = self.reader.element(x, index)[1]
            return [f"const auto element = [&](int r) {{ return {text}; }};"]
        if name != index:
            lines = [f"const int i = {index};", *lines]
        return ["const auto element = [&](int r) {", *indent(lines), f"    return {text};", "};"]

    def _reduce(self, step: Node, to: str) -> Lines:
        op, x = step.op, step.arg(0)
        assert isinstance(op, ops.Reduce)
        rows, length, index, along = self._rows(x, op.dims)
        lanes = self._lanes(rows, length, along)
        passes, result = _reduction(op, compute_type(x.dtype), lanes, length)
        text = result if op.kind in ("max", "min") else _as(compute_type(step.dtype), result)
        store = [f"if (own && lane == 0) {self._store(step, to, 'row', text)}"]
        return self._teams(rows, lanes, self._reader(x, index), passes, store)

    def _softmax(self, step: Node, to: str) -> Lines:
        op, x = step.op, step.arg(0)
        assert isinstance(op, ops.Softmax)
        rows, length, index, along = self._rows(x, (op.dim,))
        lanes = self._lanes(rows, length, along)
        compute = compute_type(step.dtype)
        passes = [
            _over(compute, "most", lanes, length, f"-{compute}(INFINITY)", "element", "Greater"),
            _over("double", "total", lanes, length, "0.0", "[&](int r) { return exp(element(r) - most); }", "Add"),
        ]
        if op.log:
            passes.append(f"const {compute} shift = {_as(compute, 'log(total)')};")
            text = "element(r) - most - shift"
        else:
            text = _as(compute, "exp(element(r) - most) / total")
        return self._teams(
            rows, lanes, self._reader(x, index), passes, self._each(step, to, lanes, length, index, text)
        )

    def _each(self, step: Node, to: str, lanes: int, length: int, index: str, text: str) -> Lines:
        """The loop that writes all elements of a row."""
        return [
            "if (own)",
            f"    for (int r = lane; r < {length}; r += {lanes}) {self._store(step, to, index, text)}",
        ]

    def _norm(self, step: Node, to: str) -> Lines:
        op, x = step.op, step.arg(0)
        assert isinstance(op, ops.Norm)
        sizes = ints(x.shape[1:])
        length, channel = self._normalised(op, sizes)
        rows = prod(sizes) // length
        lanes = self._lanes(rows, length, True)
        compute = compute_type(step.dtype)
        index = "r" if rows == 1 else f"row * {length} + r"
        eps = torch.finfo(x.dtype).eps if op.eps is None else op.eps
        passes = []
        if op.kind != "rms":
            passes.append(_over("double", "mean", lanes, length, "0.0", "element", "Add", f" / {length}"))
        square = "element(r)" if op.kind == "rms" else "element(r) - mean"
        body = f"[&](int r) {{ const double x = {square}; return x * x; }}"
        passes.append(_over("double", "variance", lanes, length, "0.0", body, "Add", f" / {length}"))
        passes.append(f"const double scale = 1 / sqrt(variance + {eps!r});")
        text = "element(r) * scale" if op.kind == "rms" else "(element(r) - mean) * scale"
        text = _as(compute, text)
        for operand, sign in zip(step.args[1:3], ("*", "+"), strict=False):
            if operand is not None:
                text = f"{text} {sign} {self.reader.at(operand, channel if channel != '' else index, sampled=False)}"
        return self._teams(
            rows, lanes, self._reader(x, index), passes, self._each(step, to, lanes, length, index, text)
        )

    @staticmethod
    def _normalised(op: ops.Norm, sizes: Sequence[int]) -> tuple[int, str]:
        """Elements of a row, and which element of weight and bias belongs to element r of it."""
        if op.kind in ("layer", "rms"):
            return prod(sizes[len(sizes) - op.trailing :]), "r"
        spatial = prod(sizes[1:])
        groups = op.groups if op.kind == "group" else sizes[0]
        length = prod(sizes) // groups
        return length, f"(row * {length} + r) / {spatial}" if spatial > 1 else f"row * {length} + r"

    def _matmul(self, step: Node, to: str) -> Lines:
        op, x, w = step.op, step.arg(0), step.arg(1)
        assert isinstance(op, ops.Matmul)
        (k,), (n,) = ints(x.shape[-1:]), ints(step.shape[-1:])
        rows = numel(step)
        lanes = 1 if not op.transpose_w and n >= 32 else self._lanes(rows, k, True)
        row = "row" if rows == n else f"row % {n}"
        left = "r" if rows == n else f"row / {n} * {k} + r"
        weight = f"{row} * {k} + r" if op.transpose_w else f"r * {n} + {row}"
        body = f"[&](int r) {{ return {self.reader.at(x, left)} * {self.reader.at(w, weight, sampled=False)}; }}"
        passes = [_over("double", "total", lanes, k, "0.0", body, "Add")]
        compute = compute_type(step.dtype)
        bias = step.args[2]
        text = "total" if bias is None else f"total + {self.reader.at(bias, row, sampled=False)}"
        store = [f"if (own && lane == 0) {self._store(step, to, 'row', _as(compute, text))}"]
        return self._teams(rows, lanes, [], passes, store)


def _as(compute: str, text: str) -> str:
    """A float64 expression in a compute type."""
    return text if compute == "double" else f"{compute}({text})"


def _over(kind: str, name: str, lanes: int, length: int, start: str, element: str, join: str, after: str = "") -> str:
    """The statement that joins all elements of a row."""
    return f"const {kind} {name} = rows::over<{lanes}>({length}, {start}, {element}, rows::{join}()){after};"


def _reduction(op: ops.Reduce, compute: str, lanes: int, length: int) -> tuple[Lines, str]:
    """The passes of a reduction over element(0) ... element(length - 1), and the text of its result."""
    if op.kind in ("max", "min"):
        start, join = (f"-{compute}(INFINITY)", "Greater") if op.kind == "max" else (f"{compute}(INFINITY)", "Less")
        return [_over(compute, "most", lanes, length, start, "element", join)], "most"
    if op.kind == "prod":
        return [_over("double", "product", lanes, length, "1.0", "element", "Times")], "product"
    total = _over("double", "total", lanes, length, "0.0", "element", "Add")
    if op.kind in ("sum", "mean"):
        return [total], "total" if op.kind == "sum" else f"total / {length}"
    if op.kind == "var":
        squares = "[&](int r) { const double x = element(r) - mean; return x * x; }"
        passes = [total, f"const double mean = total / {length};"]
        passes.append(_over("double", "squares", lanes, length, "0.0", squares, "Add"))
        return passes, f"squares / {float(max(length - op.correction, 0))!r}"
    assert op.kind == "logsumexp", op.kind
    most = _over(compute, "most", lanes, length, f"-{compute}(INFINITY)", "element", "Greater")
    shift = f"const {compute} shift = fabs(most) == {compute}(INFINITY) ? {compute}(0) : most;  // nothing to subtract"
    exps = _over("double", "total", lanes, length, "0.0", "[&](int r) { return exp(element(r) - shift); }", "Add")
    return [most, shift, exps], "log(total) + shift"
