"""CUDA C++ of what is made of a position's channels and of reductions over these, which the lanes of a quad have."""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.codegen.cuda.stream_values import tree
from fusewright.codegen.text import Lines, fill
from fusewright.ir.node import Node
from fusewright.schedule.kept_channels import KeptChannels
from fusewright.schedule.kept_rows_record import Pass, is_known
from fusewright.schedule.stream_record import Tree

_FUNCTION = """
// Make values anew of themselves and of numbers that all channels of their position give, which four lanes have.
__device__ __forceinline__ void among_channels(Compute (&values)[M_TILES][2], int quad) {
    $passes
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        const Compute value = values[i / 2][i % 2];
        $lines
        values[i / 2][i % 2] = $result;
    }
}
"""

_PASS = """
Compute $number = $empty;
#pragma unroll
for (int i = 0; i < 2 * M_TILES; ++i) {
    const Compute value = values[i / 2][i % 2];
    $lines
    $there$number = $joined;
}
#pragma unroll
for (int distance = 1; distance < 4; distance *= 2) {
    const Compute other = __shfl_xor_sync(0xffffffffu, $number, distance);
    $number = $both;
}
$ends
"""

# What a reduction begins with, how a value is taken in, and another lane's share.
_SUM = "Compute(0)", "{0} + {1}"
_JOINS = {"max": ("-Compute(INFINITY)", "greater({0}, {1})"), "min": ("Compute(INFINITY)", "smaller({0}, {1})")}
# What a sum over so many channels is made to.
_ENDS = {"mean": "{0} / {n}", "norm": "sqrt({0})", "var": "{0} / {rest}", "std": "sqrt({0} / {rest})"}


def function(kept: KeptChannels, features: int, *, whole: bool) -> Lines:
    """The function among_channels; `whole` where there is a channel for every place, else some are passed over."""
    there = "" if whole else "if (8 * (i / 2) + 2 * quad + i % 2 < O) "
    passes = [line for i in range(len(kept.passes)) for line in _pass(kept, i, features, there)]
    lines, result = _made(kept, kept.made, len(kept.passes))
    return fill(_FUNCTION, passes=passes, lines=lines, result=result)


def _pass(kept: KeptChannels, i: int, features: int, there: str) -> Lines:
    """The statements that find the i-th number."""
    p, name = kept.passes[i], f"number{i}"
    lines, taken = _made(kept, p.tree, i)
    if p.kind == "norm":
        taken = f"{taken} * {taken}"
    if p.kind not in ("var", "std"):
        return _found(p, name, lines, taken, features, there)
    # Of what is in registers anyway: the mean first, and then what is left of values.
    mean = _joined("sum", f"{name}_mean", lines, taken, there, f"{name}_mean /= {features};")
    apart = f"({taken} - {name}_mean)"
    return [*mean, *_found(p, name, lines, f"{apart} * {apart}", features, there)]


def _found(p: Pass, name: str, lines: Lines, taken: str, features: int, there: str) -> Lines:
    end = _ENDS.get(p.kind)
    rest = _literal(max(0, features - p.correction))
    ends = "" if end is None else f"{name} = {end.format(name, n=features, rest=rest)};"
    return _joined(p.kind, name, lines, taken, there, ends)


def _joined(kind: str, number: str, lines: Lines, taken: str, there: str, ends: str) -> Lines:
    empty, join = _JOINS.get(kind, _SUM)
    joined, both = join.format(number, taken), join.format(number, "other")
    return fill(_PASS, number=number, empty=empty, lines=lines, there=there, joined=joined, both=both, ends=ends)


def _literal(number: float) -> str:
    return f"Compute({number!r})"


def _made(kept: KeptChannels, made: Tree, known: int) -> tuple[Lines, str]:
    """The statements of a tree of a value and so many numbers, and its result."""
    numbers = {p.number: f"number{i}" for i, p in enumerate(kept.passes[:known])}
    given: Mapping[Node, str] = {kept.value: "value", **numbers}
    return tree(made, made.root, dict(given), steady=lambda node: is_known(node, set(numbers)))
