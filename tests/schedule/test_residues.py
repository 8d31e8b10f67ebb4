"""How tiles walk along a dimension: they have every cell once, and stage no row in vain."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from test_tiling import group

from fusewright.codegen.cuda.contraction_walk import tiles_along
from fusewright.kernel import evaluate
from fusewright.schedule.axes import Axis, Phase
from fusewright.schedule.contraction import Contraction, remembered
from fusewright.schedule.residues import Walk, walk
from fusewright.schedule.tiling import span


def plain(taps: int, stride: int, dilation: int, padding: int = 0) -> Axis:
    return Axis(taps, 1, 1, 0, stride, (Phase((0,), tuple(range(taps)), -padding, stride, dilation),))


def first_cell(way: Walk, index: int, cells: int) -> int:
    """As the kernels have it."""
    return index // way.between * way.between * cells + index % way.between


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (1, 3), (2, 3), (2, 4), (6, 4), (6, 2), (4, 6), (3, 1)])
def test_tiles_have_every_cell_once(stride: int, dilation: int) -> None:
    for cells, length in product((1, 2, 3, 8), range(1, 40)):
        way = walk(plain(3, stride, dilation), cells)
        count = way.tiles(length, cells)
        assert evaluate(tiles_along(way, "n", cells), {"n": length}) == count
        firsts = [first_cell(way, i, cells) for i in range(count)]
        assert all(first < length for first in firsts)
        had = [first + j * way.between for first in firsts for j in range(cells)]
        assert sorted(cell for cell in had if cell < length) == list(range(length))


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (1, 3), (2, 3), (2, 4), (6, 4), (6, 2), (4, 6), (3, 1)])
def test_staged_rows_are_those_that_are_read(taps: int, stride: int, dilation: int) -> None:
    """With their places in the tile; all of them where taps and cells overlap."""
    axis = plain(taps, stride, dilation, padding=2)
    for cells in (1, 2, 5):
        way = walk(axis, cells)
        phase, rows = way.staged.phases[0], span(way.staged, cells)
        staged = {r: r * way.step - 2 for r in range(rows)}
        for j, tap in product(range(cells), range(taps)):
            place = j * way.staged.advance + phase.offset(0, tap)
            assert staged[place] == j * way.between * stride + axis.phases[0].offset(0, tap)
        assert rows <= (cells - 1) * max(1, stride) + taps


@pytest.mark.parametrize(
    ("axis", "cells", "between", "rows"),
    [
        (plain(4, 1, 3), 16, 3, 19),  # 25 for neighbours
        (plain(4, 1, 3), 1, 1, 4),  # of one cell, the rows that its taps read
        (plain(3, 2, 4), 8, 2, 10),
        (plain(3, 6, 4), 4, 2, 12),  # rows 3 advances apart, of three taps each
        (plain(3, 6, 2), 4, 1, 12),  # even rows only
        (plain(1, 2, 1), 8, 1, 8),
        (plain(3, 2, 1), 8, 1, 17),
    ],
)
def test_staged_rows(axis: Axis, cells: int, between: int, rows: int) -> None:
    way = walk(axis, cells)
    assert (way.between, span(way.staged, cells)) == (between, rows)


def test_cells_of_several_positions_stay_neighbours() -> None:
    for c in (group(pool=3), group(s=2, transposed=True), group(s=2, k=4, transposed=True, pool=2)):
        assert all((walk(axis, 4).between, walk(axis, 4).step) == (1, 1) for axis in c.axes[1:])


def test_a_group_keeps_what_is_found_of_it() -> None:
    """And nobody else does: a model's weights go with it."""
    calls: list[tuple[Contraction, int]] = []

    @remembered
    def found(c: Contraction, cells: int) -> int:
        calls.append((c, cells))
        return len(calls)

    def twice(c: Contraction, cells: int) -> int:
        return 2 * cells

    twice.__name__ = "found"
    c = group()
    assert remembered(twice)(c, 1) == 2  # of the same name, and another
    assert [found(c, 1), found(c, 2), found(c, 1)] == [1, 2, 1]
    other = replace(c, channels_last=True)
    assert found(other, 1) == 3 and c == replace(c)
