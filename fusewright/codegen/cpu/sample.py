"""C++ of sample programs on a CPU: sample by sample, value after value in an array that stays in the first cache.

Sums, means and products are carried in float64, in a fixed order; so are products of matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cpu import sample_text as texts
from fusewright.codegen.cpu.elements import written
from fusewright.codegen.cpu.text import function, source
from fusewright.codegen.sample_values import Reader, contiguous, ints, remap
from fusewright.codegen.text import Lines, block, fill, indent
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.ops import Size
from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.schedule.sample import SampleProgram, numel

FEATURES = 64  # of a matrix product that are summed together


def sample_program(
    p: SampleProgram, given: Mapping[Node, str], operands: Mapping[Node, str], sample: str, *, out: str = "out"
) -> tuple[Lines, Lines]:
    """The functions that come before, and the statements that compute `p.root` for sample number `sample`.

    given     arrays that hold a node's values of this sample already, in the compute type of its dtype
    operands  pointers to the leaves
    out       the output, of all samples; its values are written to row `sample`
    """
    assert given.keys() == p.given and operands.keys() >= set(p.leaves)
    body = _Body(p, Reader(p, dict(given), operands), sample, out).lines()
    text = "\n".join(body)
    used = [join for name, join in texts.JOINS.items() if re.search(rf"\b{name}[(<]", text)]
    joins = [line for join in used for line in (*fill(join), "")]
    units = p.arena[1]
    arena = [f"alignas(64) unsigned char arena[{8 * units}];  // values of one sample, dead ones make room"]
    return joins, [*(arena if units else []), *body]


def kernel(p: SampleProgram, name: str, reference: str = "") -> Kernel:
    """The stand-alone kernel: samples are shared out to threads."""
    names = {n: f"a{i}" for i, n in enumerate(p.leaves)}
    joins, body = sample_program(p, {}, names, "sample")
    loop = fill(texts.SAMPLES, arena=[], body=body)
    pointers = [f"const {ELEMENT[n.dtype]}* {names[n]}" for n in p.leaves]
    head = f'extern "C" void {name}'
    parameters = [*pointers, f"{ELEMENT[p.root.dtype]}* out", "index_t batch", "int threads"]
    operands = ", ".join(f"{names[n]} {_shape(n.shape)}" for n in p.leaves)
    first = next(i for i, n in enumerate(p.leaves) if p.per_sample(n))
    arguments = [Argument("pointer", n) for n in [*names.values(), "out"]]
    arguments += [Argument("long", "batch"), Argument("threads", f"batch * {program_work(p)}")]
    return Kernel(
        name=name,
        source=source(f"sample by sample.  Operands: {operands}.", name, [*joins, *function((head, parameters), loop)]),
        operands=tuple(names.values()),
        layouts=("contiguous",) * len(p.leaves),
        sizes=(("batch", first, 0),),
        output=Array("out", ("batch", *(str(d) for d in p.root.shape[1:])), p.root.dtype),
        scratch=(),
        launches=(Launch(name, tuple(arguments), ("batch", "1", "1")),),
        reference=reference,
        dtypes=tuple(n.dtype for n in p.leaves),
        shapes=tuple(tuple(str(d) if isinstance(d, int) else "batch" for d in n.shape) for n in p.leaves),
        target="cpu",
    )


def program_work(p: SampleProgram) -> int:
    """Scalar operations for one sample."""
    return sum(map(_work, p.steps))


def _work(step: Node) -> int:
    """Elements that a step reads, or pairs that it multiplies, eight of which are one operation."""
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
    out: str

    def lines(self) -> Lines:
        p = self.p
        places = p.arena[0]
        lines = self._pointers()
        for i, step in enumerate(p.steps):
            last = step is p.result
            kind = compute_type(step.dtype)
            to = self.out if last else f"s{i}"
            if not last:
                place = f"arena + {8 * places[step]}" if places[step] else "arena"
                lines.append(f"{kind}* const {to} = reinterpret_cast<{kind}*>({place});")
            lines += [f"// {self._about(step)}", *self._step(step, to)]
            if not last:
                self.reader.hold(step, to)
        return lines

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
        return fill(texts.MAP, count=numel(step), lines=lines, store=self._store(step, to, "i", text))

    def _store(self, step: Node, to: str, index: str, text: str) -> str:
        """The statement that writes an element, given in its compute type."""
        return f"{to}[{index}] = {written(text, step.dtype) if to == self.out else text};"

    def _rows(self, rows: int, element: Lines, passes: Lines, store: Lines) -> Lines:
        if rows > 1:
            return fill(texts.ROWS, rows=rows, element=element, passes=passes, store=store)
        named = any(re.search(r"\brow\b", line) for line in (*element, *passes, *store))
        row = ["constexpr index_t row = 0;"] if named else []
        return fill(texts.ONE_ROW, row=row, element=element, passes=passes, store=store)

    def _along(self, x: Node, dims: Sequence[int]) -> tuple[int, int, str]:
        """Number and length of the rows along `dims`, and where element r of row lies."""
        sizes = ints(x.shape[1:])
        strides = contiguous(sizes)
        inside = [d - 1 for d in dims]
        kept = [d for d in range(len(sizes)) if d not in inside]
        row = remap("row", [sizes[d] for d in kept], [strides[d] for d in kept])
        along = remap("r", [sizes[d] for d in inside], [strides[d] for d in inside])
        index = " + ".join(t for t in (row, along) if t != "0") or "0"
        return prod(sizes[d] for d in kept), prod(sizes[d] for d in inside), index

    def _element(self, x: Node, index: str) -> Lines:
        """The lambda ``element(r)``: element `index` of `x`."""
        name = index if index.isidentifier() or x in self.reader.stops else "i"
        lines, text = self.reader.element(x, name)
        if not lines:
            text = self.reader.element(x, index)[1]
            return [f"const auto element = [&](index_t r) {{ return {text}; }};"]
        if name != index:
            lines = [f"const index_t i = {index};", *lines]
        return ["const auto element = [&](index_t r) {", *indent(lines), f"    return {text};", "};"]

    def _reduce(self, step: Node, to: str) -> Lines:
        op, x = step.op, step.arg(0)
        assert isinstance(op, ops.Reduce)
        rows, length, index = self._along(x, op.dims)
        passes, result = _reduction(op, compute_type(x.dtype), length)
        text = result if op.kind in ("max", "min") else _as(compute_type(step.dtype), result)
        return self._rows(rows, self._element(x, index), passes, [self._store(step, to, "row", text)])

    def _softmax(self, step: Node, to: str) -> Lines:
        op, x = step.op, step.arg(0)
        assert isinstance(op, ops.Softmax)
        rows, length, index = self._along(x, (op.dim,))
        compute = compute_type(step.dtype)
        passes = [
            f"const {compute} most = greatest_of<{compute}>({length}, element);",
            f"const double total = sum_of({length}, [&](index_t r) {{ return exp(element(r) - most); }});",
        ]
        if op.log:
            passes.append(f"const {compute} shift = {_as(compute, 'log(total)')};")
            text = "element(r) - most - shift"
        else:
            passes.append(f"const {compute} scale = {_as(compute, '1 / total')};")
            text = "exp(element(r) - most) * scale"
        return self._rows(rows, self._element(x, index), passes, self._each(step, to, length, index, text))

    def _each(self, step: Node, to: str, length: int, index: str, text: str) -> Lines:
        """The loop that writes all elements of a row."""
        return fill(texts.EACH, length=length, store=self._store(step, to, index, text))

    def _norm(self, step: Node, to: str) -> Lines:
        op, x = step.op, step.arg(0)
        assert isinstance(op, ops.Norm)
        sizes = ints(x.shape[1:])
        length, channel = self._normalised(op, sizes)
        rows = prod(sizes) // length
        compute = compute_type(step.dtype)
        index = "r" if rows == 1 else f"row * {length} + r"
        eps = torch.finfo(x.dtype).eps if op.eps is None else op.eps
        passes = []
        if op.kind != "rms":
            passes.append(f"const double mean = sum_of({length}, element) / {length};")
        square = "element(r)" if op.kind == "rms" else "element(r) - mean"
        passes += block(
            f"const double variance = sum_of({length}, [&](index_t r)",
            [f"const double x = {square};", "return x * x;"],
        )
        passes[-1] = f"}}) / {length};"
        passes.append(f"const {compute} scale = {_as(compute, f'1 / std::sqrt(variance + {eps!r})')};")
        text = "element(r) * scale"
        if op.kind != "rms":  # in two parts, so that a large mean costs no digits
            passes.append(f"const {compute} centre = {_as(compute, 'mean')}, rest = {_as(compute, 'mean - centre')};")
            text = "(element(r) - centre - rest) * scale"
        for operand, sign in zip(step.args[1:3], ("*", "+"), strict=False):
            if operand is not None:
                text = f"{text} {sign} {self.reader.at(operand, channel or index, sampled=False)}"
        return self._rows(rows, self._element(x, index), passes, self._each(step, to, length, index, text))

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
        compute, bias, rows = compute_type(step.dtype), step.args[2], numel(step)

        def result(total: str, feature: str) -> str:
            added = total if bias is None else f"{total} + {self.reader.at(bias, feature, sampled=False)}"
            return _as(compute, added)

        if op.transpose_w:
            feature, place = ("row", "r") if rows == n else (f"row % {n}", f"row / {n} * {k} + r")
            weight = self.reader.at(w, f"{feature} * {k} + r", sampled=False)
            pair = f"[&](index_t r) {{ return double({self.reader.at(x, place)}) * {weight}; }}"
            passes = [f"const double total = sum_of({k}, {pair});"]
            return self._rows(rows, [], passes, [self._store(step, to, "row", result("total", feature))])
        feature, start = "first + f", "" if rows == n else "row * "
        body = fill(
            texts.FEATURES,
            features=n,
            block=FEATURES,
            length=k,
            left=self.reader.at(x, f"{start}{k} + r" if start else "r"),
            weight=self.reader.at(w, f"r * {n} + {feature}", sampled=False),
            store=self._store(step, to, f"{start}{n} + {feature}" if start else feature, result("total[f]", feature)),
        )
        return block(f"for (index_t row = 0; row < {rows // n}; ++row)", body) if start else body


def _as(compute: str, text: str) -> str:
    """A float64 expression in a compute type."""
    return text if compute == "double" else f"{compute}({text})"


def _reduction(op: ops.Reduce, compute: str, length: int) -> tuple[Lines, str]:
    """The passes of a reduction over element(0) ... element(length - 1), and the text of its result."""
    if op.kind in ("max", "min"):
        join = "greatest_of" if op.kind == "max" else "least_of"
        return [f"const {compute} most = {join}<{compute}>({length}, element);"], "most"
    if op.kind == "prod":
        return [f"const double product = product_of({length}, element);"], "product"
    total = f"const double total = sum_of({length}, element);"
    if op.kind in ("sum", "mean"):
        return [total], "total" if op.kind == "sum" else f"total / {length}"
    if op.kind == "var":
        squares = block(
            f"const double squares = sum_of({length}, [&](index_t r)",
            ["const double x = element(r) - mean;", "return x * x;"],
        )
        squares[-1] = "});"
        passes = [total, f"const double mean = total / {length};", *squares]
        return passes, f"squares / {float(max(length - op.correction, 0))!r}"
    assert op.kind == "logsumexp", op.kind
    most = f"const {compute} most = greatest_of<{compute}>({length}, element);"
    shift = (
        f"const {compute} shift = std::fabs(most) == {compute}(INFINITY) ? {compute}(0) : most;  // nothing to subtract"
    )
    exps = f"const double total = sum_of({length}, [&](index_t r) {{ return exp(element(r) - shift); }});"
    return [most, shift, exps], "log(total) + shift"
