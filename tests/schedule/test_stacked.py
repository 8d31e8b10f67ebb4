"""Rows of few elements: each element of a row reads what the flat index would have it read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from codegen.cuda.rearrangement_cases import CASES, cat, padded, shuffled, taken, turned, upsampled
from codegen.cuda.test_stream_kernels import graph_of, inp

from fusewright.ir.build import pointwise, reshape
from fusewright.ir.indices import Variable
from fusewright.ir.node import Node
from fusewright.schedule.rearrangement import (
    Between,
    Computed,
    Load,
    Padded,
    Rearrangement,
    Selected,
    Summed,
    Value,
    parse,
)
from fusewright.schedule.stacked import row, row_length


def read(value: Value, known: dict[Variable, int]) -> Iterator[tuple[Node, int]]:
    """What is read where some variables are known."""
    match value:
        case Load():
            yield value.tensor, value.address.at(known)
        case Computed():
            for _, leaf in value.leaves:
                yield from read(leaf, known)
        case Selected():
            at = value.index.at(known)
            yield from read(next(p for p, end in zip(value.parts, value.ends, strict=True) if at < end), known)
        case Padded():
            if all(0 <= index.at(known) < length for index, length in value.inside):
                yield from read(value.value, known)
        case Between():
            for tap in value.taps:
                yield from read(tap, known)
        case Summed():
            for part in value.parts:
                yield from read(part, known)


def stacked(*parts: Node) -> Node:
    return cat(parts[0].ndim, *(reshape(p, (*p.shape, 1)) for p in parts))


STACKED = {
    "stacked": lambda: stacked(pointwise("exp", inp(0, 6, 5)), inp(1, 6, 5), pointwise("neg", inp(0, 6, 5))),
    "halves interleaved": lambda: turned(inp(0, 2, 3, 4, 16), inp(1, 4, 8), inp(2, 4, 8)),
    "slices": lambda: cat(1, *(taken(inp(0, 7, 9), 1, k, k + 2) for k in (0, 5, 3))),
    "of moved elements": lambda: stacked(shuffled(inp(0, 2, 6, 4), 3), upsampled(inp(1, 2, 6, 2), 2)),
    "padded": lambda: stacked(padded(inp(0, 4, 6), (1, 1, 1)), inp(1, 4, 8)),
    "stacked twice": lambda: stacked(*(stacked(inp(k, 4, 3), inp(k + 2, 4, 3)) for k in (0, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", [*STACKED, *(f"case {name}" for name in CASES)])
def test_rows_read_what_elements_read(name: str) -> None:
    root = (STACKED | {f"case {name}": case for name, case in CASES.items()})[name]()
    r = parse(root, graph_of(root).users())
    assert isinstance(r, Rearrangement), r
    length = row_length(r)
    if length is None:
        assert name not in STACKED
        return
    number, elements = row(r, length)
    count = r.at.length
    assert len(elements) == length and count is not None
    for i in range(count):
        found = list(read(elements[i % length], {number: i // length}))
        assert found == list(read(r.value, {r.at: i}))


def test_no_element_of_a_row_is_chosen_by_its_place() -> None:
    for case in (STACKED["stacked"], STACKED["slices"], STACKED["stacked twice"]):
        r = parse(case(), graph_of(case()).users())
        assert isinstance(r, Rearrangement)
        length = row_length(r)
        assert length is not None
        assert not any(isinstance(value, Selected) for value in row(r, length)[1])
