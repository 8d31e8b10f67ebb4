"""Tilings: what is proposed fits, and covers what is to be computed."""

from __future__ import annotations

from math import ceil

import pytest
import torch

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule.contraction import Contraction, match
from fusewright.schedule.tiling import (
    ACCUMULATORS,
    MOST_SHARED,
    candidates,
    registers,
    shared_elements,
    shortlist,
    span,
)

CPU = torch.device("cpu")


def group(
    c: int = 8,
    o: int = 64,
    k: int = 3,
    s: int = 1,
    transposed: bool = False,
    pool: int = 0,
    dims: tuple[int, ...] = (),
    n: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Contraction:
    x = make(ops.Input((2, c, *(20,) * n), dtype, CPU, "x", 0))
    op = ops.Conv((s,) * n, ((0, 0),) * n, (1,) * n, 1, transposed, (0,) * n)
    w = make(ops.Param((c, o, *(k,) * n) if transposed else (o, c, *(k,) * n), dtype, CPU, "w"))
    root: Node = make(op, x, w, None)
    if pool:
        root = make(ops.Pool("max", (pool,) * n, (pool,) * n, (0,) * n, (1,) * n), root)
    if dims:
        root = make(ops.Reduce("sum", dims, False), root)
    found = match(root, Graph((), (root,)).users())
    assert isinstance(found, Contraction)
    return found


GROUPS = {
    "plain": group(),
    "one channel": group(1, 1, 1),
    "odd": group(7, 100, 5, 2),
    "pool": group(pool=3, dims=(2, 3)),
    "channels": group(16, 80, dims=(1,)),
    "transposed": group(3, 16, 4, 2, True, 2),
    "three dimensions": group(32, 64, 5, 2, True, 6, (1,), 3),
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 7, 13), (8, 100, 1000)])
def test_candidates_fit(name: str, lengths: tuple[int, int, int]) -> None:
    c = GROUPS[name]
    found = candidates(c, lengths, tf32=True)
    assert found and len(found) == len(set(found))
    for t in found:
        assert sum(shared_elements(c, t)) * 4 <= MOST_SHARED and registers(c, t) <= 255
        assert t.warps * 32 <= 1024 and t.chunk <= c.channels
        accumulators = (
            t.m_tiles
            * t.cells_d
            * t.cells_h
            * t.rows_d
            * t.rows_h
            * t.cells_w
            * max(len(p.elements) for p in c.axes[2].phases)
            * 2
        )
        assert accumulators <= ACCUMULATORS
        # A thread has two columns of each 8-position tile, and rows divide every phase.
        assert all(t.cells_w * len(p.elements) % 2 == 0 for p in c.axes[2].phases)
        assert all(len(p.elements) % t.rows_h == 0 for p in c.axes[1].phases)
        if c.over_channels:
            assert t.block_m >= c.features
        else:
            assert t.block_m * ceil(c.features / t.block_m) >= c.features


def test_the_shortlist_starts_with_the_best() -> None:
    short = shortlist(GROUPS["plain"], (1, 62, 62), 10, tf32=True)
    assert len(set(short)) == 10 and short[0] == candidates(GROUPS["plain"], (1, 62, 62), tf32=True)[0]


def test_wider_elements_leave_room_for_less() -> None:
    counts = [
        len(candidates(group(7, 100, 5, 2, dtype=d), (1, 40, 40), tf32=True)) for d in (torch.double, torch.float)
    ]
    assert 0 < counts[0] < counts[1]


def test_pairs_of_operands_leave_room_for_less() -> None:
    """Tiles whose threads have more registers than a block may have are none."""
    pairs, single = (candidates(GROUPS["plain"], (1, 62, 62), tf32=tf32) for tf32 in (False, True))
    assert 0 < len(pairs) < len(single)
    assert all(registers(GROUPS["plain"], t, split=True) * 32 * t.warps <= 65536 for t in pairs)


def test_span_is_what_neighbouring_cells_read() -> None:
    assert span(group(k=5, s=2).axes[2], 4) == 3 * 2 + 5
    assert span(group(k=3, pool=4).axes[2], 2) == 8 + 2
    assert span(group(k=3, s=2, transposed=True).axes[2], 3) == 3 + 1
