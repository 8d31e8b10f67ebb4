"""CUDA C++ of sample programs: one block per sample, value after value in shared memory, or a few where they end in
rows of a product that no other row has to wait for.

`block_program` is what all threads of one block do for one sample, as text that may stand at the end of another kernel;
`kernel` is a kernel of its own.  Sums, means and products are carried in float64, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import sample_text as texts
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.sample_steps import Rows, Steps, as_type, epsilon, names, operands_text, record, work
from fusewright.codegen.sample_values import Reader, ints
from fusewright.codegen.text import Lines, fill
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.schedule import sample
from fusewright.schedule.sample import SampleProgram, numel

PRIMITIVES = ("nonfinite", "elements")
MOST_THREADS = 512

# Products that are worth another block of a sample, and how many such blocks a sample may have.
WORTH_A_BLOCK, MOST_PARTS = 2**14, 8
# From so many elements on, a row of weights is read by a whole warp: fewer lanes touch more lines of the cache at once.
LONG = 256


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
    body = _Body(p, Reader(p, dict(given), operands), sample, out, threads, arena).lines()
    return BlockProgram(fill(texts.ROWS, threads=threads), body, p.arena[1])


def kernel(p: SampleProgram, name: str, reference: str = "") -> Kernel:
    """The stand-alone kernel: one block per sample."""
    operands, width, share = names(p), threads(p), shared_out(p)
    body = _Body(p, Reader(p, {}, operands), "sample", "out", width, "arena", share).lines()
    program = BlockProgram(fill(texts.ROWS, threads=width), body, p.arena[1])
    parameters = [f"const {ELEMENT[n.dtype]}* __restrict__ {a}" for n, a in operands.items()]
    arena = [f"__shared__ double arena[{program.units}];  // values of one sample, dead ones make room"]
    source = [
        f"// {name}: {'one block' if share is None else f'{share.parts} blocks'} per sample.  "
        f"Operands: {operands_text(operands)}.",
        primitives("await_launches", *PRIMITIVES),
        *program.head,
        *fill(
            texts.KERNEL,
            threads=width,
            name=name,
            parameters=", ".join([*parameters, f"{ELEMENT[p.root.dtype]}* __restrict__ out"]),
            arena=arena if program.units else [],
            share=[] if share is None else fill(texts.SHARE, share=share.rows, rows=numel(share.product)),
            body=program.body,
        ),
    ]
    pointers = [Argument("pointer", a) for a in [*operands.values(), "out"]]
    parts = "1" if share is None else str(share.parts)
    launch = Launch(name, tuple(pointers), ("batch", parts, "1"), width)
    return record(p, "\n".join(source) + "\n", launch, reference=reference)


@dataclass(frozen=True)
class Share:
    """What one of the `parts` blocks of a sample computes: so many `rows` of the program's `product`."""

    product: Node
    rows: int
    parts: int


def shared_out(p: SampleProgram) -> Share | None:
    """How a program ends in rows of one product, each by itself, that are more than a block computes soon; else `None`.

    Every block computes what the product reads.
    """
    products = [step for step in p.steps if isinstance(step.op, ops.Matmul) and step in p.inner]
    if len(products) != 1 or any(isinstance(step.op, sample.ROWS) for step in p.steps if step in p.inner):
        return None
    (product,) = products
    behind = {product}
    for node in p.inner:
        if not behind.isdisjoint(node.inputs):
            behind.add(node)
    alone = all(n is product or isinstance(n.op, ops.Pointwise | ops.Cast | ops.Reshape) for n in behind)
    rows, (k,) = numel(product), ints(product.arg(0).shape[-1:])
    parts = min(MOST_PARTS, rows * k // WORTH_A_BLOCK)
    if not alone or numel(p.result) != rows or parts < 2:
        return None
    share = ceil(rows / parts)
    return Share(product, share, ceil(rows / share))


def threads(p: SampleProgram) -> int:
    """Enough for the largest step to keep them busy."""
    most = max(map(work, p.steps))
    count = 32
    while count < MOST_THREADS and 2 * count < most:
        count *= 2
    return count


@dataclass
class _Body(Steps):
    """A block of threads computes a sample, teams of them a row each."""

    index_type = "int"
    after_step = ("__syncthreads();",)

    threads: int
    arena: str
    share: Share | None = None

    def _place(self, units: int) -> str:
        return f"{self.arena} + {units}" if units else self.arena

    def _map(self, step: Node, to: str, lines: Lines, text: str) -> Lines:
        store = self._store(step, to, "i", text)
        part = self.share is not None and step is self.p.result
        count, begin = ("end", "begin + ") if part else (str(numel(step)), "")
        return fill(texts.MAP, begin=begin, count=count, threads=self.threads, lines=lines, store=store)

    def _store(self, step: Node, to: str, index: str, text: str) -> str:
        """The statement that writes an element, given in its compute type."""
        if to != self.result:
            return f"{to}[{index}] = {text};"
        return f"{to}[{index}] = narrow_to<{ELEMENT[step.dtype]}>::of({text});"

    def _teams(self, rows: int, lanes: int, element: Lines, passes: Lines, store: Lines) -> Lines:
        parts = {"element": element, "passes": passes, "store": store}
        if rows == 1:
            return fill(texts.ONE_TEAM, lanes=lanes, row=self._only_row(element, passes, store), **parts)
        return fill(texts.TEAMS, begin="0", rows=rows, last=rows - 1, lanes=lanes, threads=self.threads, **parts)

    def _lanes(self, rows: Rows) -> int:
        """Threads per row: the block for a few long rows, else neighbours where the row lies in a line."""
        if rows.length >= 16 * 32 and rows.count * 32 <= 2 * self.threads:
            return self.threads
        lanes, least = 32, 8 if rows.in_line else 0
        while lanes > 1 and (lanes >= 2 * rows.length or (rows.count * lanes > self.threads and lanes > least)):
            lanes //= 2
        return lanes

    def _each(self, step: Node, to: str, lanes: int, rows: Rows, text: str) -> Lines:
        """The loop that writes all elements of a row."""
        store = self._store(step, to, rows.index, text)
        return ["if (own)", f"    for (int r = lane; r < {rows.length}; r += {lanes}) {store}"]

    def _once(self, step: Node, to: str, text: str) -> Lines:
        """The statement that writes the one result of a row."""
        return [f"if (own && lane == 0) {self._store(step, to, 'row', text)}"]

    def _reduce(self, op: ops.Reduce, step: Node, to: str) -> Lines:
        x = step.arg(0)
        rows = self._rows_along(x, op.dims)
        lanes = self._lanes(rows)
        passes, result = _reduction(op, compute_type(x.dtype), lanes, rows.length)
        text = result if op.kind in ("max", "min") else as_type(compute_type(step.dtype), result)
        return self._teams(rows.count, lanes, self._element(x, rows.index), passes, self._once(step, to, text))

    def _softmax(self, op: ops.Softmax, step: Node, to: str) -> Lines:
        x, compute = step.arg(0), compute_type(step.dtype)
        rows = self._rows_along(x, (op.dim,))
        lanes = self._lanes(rows)
        exps = "[&](int r) { return exp(element(r) - most); }"
        passes = [
            _over(compute, "most", lanes, rows.length, f"-{compute}(INFINITY)", "element", "Greater"),
            _over("double", "total", lanes, rows.length, "0.0", exps, "Add"),
        ]
        text = as_type(compute, "exp(element(r) - most) / total")
        if op.log:
            passes.append(f"const {compute} shift = {as_type(compute, 'log(total)')};")
            text = "element(r) - most - shift"
        store = self._each(step, to, lanes, rows, text)
        return self._teams(rows.count, lanes, self._element(x, rows.index), passes, store)

    def _norm(self, op: ops.Norm, step: Node, to: str) -> Lines:
        x = step.arg(0)
        rows = self._rows_of_norm(op, x)
        lanes, after = self._lanes(rows), f" / {rows.length}"
        value, passes = "element(r)", []
        if op.kind != "rms":
            passes.append(_over("double", "mean", lanes, rows.length, "0.0", "element", "Add", after))
            value = "element(r) - mean"
        square = f"[&](int r) {{ const double x = {value}; return x * x; }}"
        passes.append(_over("double", "variance", lanes, rows.length, "0.0", square, "Add", after))
        passes.append(f"const double scale = 1 / sqrt(variance + {epsilon(op, x)!r});")
        text = f"{value} * scale" if op.kind == "rms" else f"({value}) * scale"
        text = self._scaled_and_shifted(step, rows, as_type(compute_type(step.dtype), text))
        store = self._each(step, to, lanes, rows, text)
        return self._teams(rows.count, lanes, self._element(x, rows.index), passes, store)

    def _matmul(self, op: ops.Matmul, step: Node, to: str) -> Lines:
        x, w = step.arg(0), step.arg(1)
        (k,), (n,) = ints(x.shape[-1:]), ints(step.shape[-1:])
        count = numel(step)
        share = self.share if self.share is not None and self.share.product is step else None
        rows = share.rows if share else count
        lanes = 1 if not op.transpose_w and n >= 32 else self._lanes(Rows(rows, k, "r"))
        lanes = 32 if op.transpose_w and k >= LONG and 32 * rows >= self.threads else lanes
        row, left = ("row", "r") if count == n else (f"row % {n}", f"row / {n} * {k} + r")
        feature = "row" if w.ndim > 2 else row  # where every group has its own weights
        weight = f"{feature} * {k} + r" if op.transpose_w else f"r * {n} + {row}"
        factors = self.reader.at(x, left), self.reader.at(w, weight, sampled=False)
        texts_of = ", ".join(f"[&](int r) {{ return {text}; }}" for text in factors)
        passes = [f"const double total = rows::dot<{lanes}, {k}>({texts_of});"]
        bias = step.args[2]
        text = "total" if bias is None else f"total + {self.reader.at(bias, row, sampled=False)}"
        store = self._once(step, to, as_type(compute_type(step.dtype), text))
        if share is None:
            return self._teams(count, lanes, [], passes, store)
        names = {"begin": "begin", "rows": "end", "last": "end - 1", "lanes": lanes, "threads": self.threads}
        return fill(texts.TEAMS, **names, element=[], passes=passes, store=store)


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
    if op.kind == "norm":
        squares = "[&](int r) { const double x = element(r); return x * x; }"
        return [_over("double", "squares", lanes, length, "0.0", squares, "Add")], "sqrt(squares)"
    if op.kind in ("var", "std"):
        squares = "[&](int r) { const double x = element(r) - mean; return x * x; }"
        passes = [total, f"const double mean = total / {length};"]
        passes.append(_over("double", "squares", lanes, length, "0.0", squares, "Add"))
        variance = f"squares / {float(max(length - op.correction, 0))!r}"
        return passes, variance if op.kind == "var" else f"sqrt({variance})"
    assert op.kind == "logsumexp", op.kind
    most = _over(compute, "most", lanes, length, f"-{compute}(INFINITY)", "element", "Greater")
    shift = f"const {compute} shift = fabs(most) == {compute}(INFINITY) ? {compute}(0) : most;  // nothing to subtract"
    exps = _over("double", "total", lanes, length, "0.0", "[&](int r) { return exp(element(r) - shift); }", "Add")
    # Rounded ahead of the sum, as eager's is: what cancels there does so here.
    return [most, shift, exps], f"{as_type(compute, 'log(total)')} + shift"
