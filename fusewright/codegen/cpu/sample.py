"""C++ of sample programs on a CPU: sample by sample, value after value in an array that stays in the first cache.

Sums, means and products are carried in float64, in a fixed order; so are products of matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cpu import sample_text as texts
from fusewright.codegen.cpu.elements import written
from fusewright.codegen.cpu.text import function, source
from fusewright.codegen.sample_steps import Rows, Steps, as_type, epsilon, names, operands_text, record, work
from fusewright.codegen.sample_values import Reader, ints
from fusewright.codegen.text import Lines, block, fill
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.kernel import Argument, Kernel, Launch
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
    operands = names(p)
    joins, body = sample_program(p, {}, operands, "sample")
    loop = fill(texts.SAMPLES, arena=[], body=body)
    pointers = [f"const {ELEMENT[n.dtype]}* {a}" for n, a in operands.items()]
    head = f'extern "C" void {name}'
    parameters = [*pointers, f"{ELEMENT[p.root.dtype]}* out", "index_t batch", "int threads"]
    about = f"sample by sample.  Operands: {operands_text(operands)}."
    arguments = [Argument("pointer", a) for a in [*operands.values(), "out"]]
    arguments += [Argument("long", "batch"), Argument("threads", f"batch * {program_work(p)}")]
    return record(
        p,
        source(about, name, [*joins, *function((head, parameters), loop)]),
        Launch(name, tuple(arguments), ("batch", "1", "1")),
        reference=reference,
        target="cpu",
    )


def program_work(p: SampleProgram) -> int:
    """Scalar operations for one sample."""
    return sum(map(work, p.steps))


class _Body(Steps):
    """One thread computes a sample."""

    index_type = "index_t"

    def _place(self, units: int) -> str:
        return f"arena + {8 * units}" if units else "arena"

    def _map(self, step: Node, to: str, lines: Lines, text: str) -> Lines:
        return fill(texts.MAP, count=numel(step), lines=lines, store=self._store(step, to, "i", text))

    def _store(self, step: Node, to: str, index: str, text: str) -> str:
        """The statement that writes an element, given in its compute type."""
        return f"{to}[{index}] = {written(text, step.dtype) if to == self.result else text};"

    def _rows(self, rows: int, element: Lines, passes: Lines, store: Lines) -> Lines:
        if rows > 1:
            return fill(texts.ROWS, rows=rows, element=element, passes=passes, store=store)
        row = self._only_row(element, passes, store)
        return fill(texts.ONE_ROW, row=row, element=element, passes=passes, store=store)

    def _each(self, step: Node, to: str, rows: Rows, text: str) -> Lines:
        """The loop that writes all elements of a row."""
        return fill(texts.EACH, length=rows.length, store=self._store(step, to, rows.index, text))

    def _reduce(self, op: ops.Reduce, step: Node, to: str) -> Lines:
        x = step.arg(0)
        rows = self._rows_along(x, op.dims)
        passes, result = _reduction(op, compute_type(x.dtype), rows.length)
        text = result if op.kind in ("max", "min") else as_type(compute_type(step.dtype), result)
        return self._rows(rows.count, self._element(x, rows.index), passes, [self._store(step, to, "row", text)])

    def _softmax(self, op: ops.Softmax, step: Node, to: str) -> Lines:
        x, compute = step.arg(0), compute_type(step.dtype)
        rows = self._rows_along(x, (op.dim,))
        passes = [
            f"const {compute} most = greatest_of<{compute}>({rows.length}, element);",
            f"const double total = sum_of({rows.length}, [&](index_t r) {{ return exp(element(r) - most); }});",
        ]
        if op.log:
            passes.append(f"const {compute} shift = {as_type(compute, 'log(total)')};")
            text = "element(r) - most - shift"
        else:
            passes.append(f"const {compute} scale = {as_type(compute, '1 / total')};")
            text = "exp(element(r) - most) * scale"
        return self._rows(rows.count, self._element(x, rows.index), passes, self._each(step, to, rows, text))

    def _norm(self, op: ops.Norm, step: Node, to: str) -> Lines:
        x, compute = step.arg(0), compute_type(step.dtype)
        rows = self._rows_of_norm(op, x)
        centred = op.kind != "rms"
        passes = [f"const double mean = sum_of({rows.length}, element) / {rows.length};"] if centred else []
        square = "element(r) - mean" if centred else "element(r)"
        passes += _sum_of_squares("variance", rows.length, square, f" / {rows.length}")
        passes.append(f"const {compute} scale = {as_type(compute, f'1 / std::sqrt(variance + {epsilon(op, x)!r})')};")
        text = "element(r) * scale"
        if centred:  # in two parts, so that a large mean costs no digits
            centre, rest = as_type(compute, "mean"), as_type(compute, "mean - centre")
            passes.append(f"const {compute} centre = {centre}, rest = {rest};")
            text = "(element(r) - centre - rest) * scale"
        text = self._scaled_and_shifted(step, rows, text)
        return self._rows(rows.count, self._element(x, rows.index), passes, self._each(step, to, rows, text))

    def _matmul(self, op: ops.Matmul, step: Node, to: str) -> Lines:
        x, w = step.arg(0), step.arg(1)
        (k,), (n,) = ints(x.shape[-1:]), ints(step.shape[-1:])
        compute, bias, rows = compute_type(step.dtype), step.args[2], numel(step)

        def result(total: str, feature: str) -> str:
            added = total if bias is None else f"{total} + {self.reader.at(bias, feature, sampled=False)}"
            return as_type(compute, added)

        if op.transpose_w:
            feature, place = ("row", "r") if rows == n else (f"row % {n}", f"row / {n} * {k} + r")
            feature = "row" if w.ndim > 2 else feature  # where every group has its own weights
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


def _sum_of_squares(name: str, length: int, value: str, after: str = "") -> Lines:
    """The statement that adds up the squares of `value`, text of element `r`."""
    head = f"const double {name} = sum_of({length}, [&](index_t r)"
    return [*block(head, [f"const double x = {value};", "return x * x;"])[:-1], f"}}){after};"]


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
    if op.kind == "norm":
        return _sum_of_squares("squares", length, "element(r)"), "std::sqrt(squares)"
    if op.kind in ("var", "std"):
        mean = f"const double mean = total / {length};"
        passes = [total, mean, *_sum_of_squares("squares", length, "element(r) - mean")]
        variance = f"squares / {float(max(length - op.correction, 0))!r}"
        return passes, variance if op.kind == "var" else f"std::sqrt({variance})"
    assert op.kind == "logsumexp", op.kind
    most = f"const {compute} most = greatest_of<{compute}>({length}, element);"
    shift = (
        f"const {compute} shift = std::fabs(most) == {compute}(INFINITY) ? {compute}(0) : most;  // nothing to subtract"
    )
    exps = f"const double total = sum_of({length}, [&](index_t r) {{ return exp(element(r) - shift); }});"
    # Rounded ahead of the sum, as eager's is: what cancels there does so here.
    return [most, shift, exps], f"{as_type(compute, 'log(total)')} + shift"
