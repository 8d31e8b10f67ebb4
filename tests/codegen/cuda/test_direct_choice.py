"""Whether tensor cores or plain multiplications come first, and which direct tiles are worth measuring at all."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest
from contraction_cases import Case, Found, draw, find

from fusewright.schedule import direct_choice, tiling
from fusewright.schedule.direct import Cut


def estimated(case: Case) -> tuple[Found, float]:
    """A case's group and the best estimate of a tiling."""
    found = find(case)
    assert not isinstance(found, str)
    best = found.tilings()[0]
    return found, tiling.estimate(found.group, best, found.cells, tf32=case.tf32)


@pytest.mark.parametrize(
    ("case", "ahead"),
    [
        (Case((64, 64), 1, 1, (7, 7), groups=16, batch=64), True),
        (Case((512,), 2, 4, (5,), (1,), (0,), (1,), 8, batch=64), True),
        (Case((64, 64), 32, 64), False),
        (Case((64, 64), 36, 34, (4, 4), pool="max", window=(6, 6), step=(6, 6)), False),
    ],
)
def test_few_channels_of_many_groups_need_no_tensor_cores(case: Case, ahead: bool) -> None:
    found, rival = estimated(case)
    assert direct_choice.shortlist(found.group, found.cells, case.batch, rival).ahead == ahead


def test_tiles_that_cannot_win_are_not_measured() -> None:
    found, rival = estimated(Case((64, 64), 32, 64))
    alone = direct_choice.shortlist(found.group, found.cells, found.case.batch, None)
    assert alone.ahead and len(alone.tiles) == direct_choice.WORTH_MEASURING
    assert len(direct_choice.shortlist(found.group, found.cells, found.case.batch, rival / 100).tiles) == 0


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled
def test_no_tile_takes_less_than_its_products(seed: int) -> None:
    """So none is looked at where these alone take longer than tensor cores."""
    rng = random.Random(seed)
    found = find(draw(rng))
    while not isinstance(found, Found):
        found = find(draw(rng))
    scored = direct_choice._scored(found.group, found.cells, found.case.batch)
    assert all(score >= direct_choice._multiplying(found.group) for score, _ in scored)


@pytest.mark.parametrize("length", [7, 14, 26, 56])
def test_dimensions_are_shared_out_evenly(length: int) -> None:
    """A block's threads are those that its part of an image needs."""
    found, _ = estimated(Case((length, length), 1, 1, (7, 7), padding=(3, 3), groups=16, batch=64))
    best = direct_choice.candidates(found.group, found.cells, found.case.batch)[0]
    computed = prod(-(-n // of_tile) * of_tile for n, of_tile in zip(found.cells, best.cells, strict=True))
    assert computed <= 1.15 * length * length, best


def test_positions_of_a_thread_share_what_it_reads() -> None:
    """Where neighbours along w are strides apart, those along d share more; and blocks stage by turns where there is
    room for more of them with one buffer."""
    case = Case((52, 51, 49), 1, 1, (7, 7, 7), (1, 2, 3), (1, 1, 1), (1, 1, 1), groups=64, batch=8)
    found, _ = estimated(case)
    listed = direct_choice.shortlist(found.group, found.cells, case.batch, None).tiles
    assert all(t.together for t in listed)
    assert any(t.planes > 1 for t in listed[:3]) and any(t.buffers == 1 for t in listed[:3])


def test_groups_of_few_channels_are_staged_together() -> None:
    """Where a block goes through groups, and has too few bytes of one of them under way; not where windows are folded
    in between, which takes all threads after each round."""
    folded = Case((5446,), 1, 1, (4,), (2,), (3,), (3,), 92, True, (0,), fold="sum", fold_dims="c", batch=64)
    found, _ = estimated(folded)
    best = direct_choice.candidates(found.group, found.cells, folded.batch)
    assert Cut.of(found.group, best[0]).at_once > 1
    single = next(i for i, t in enumerate(best) if Cut.of(found.group, t).at_once == 1)
    assert single >= direct_choice.WORTH_MEASURING
    pooled, _ = estimated(replace(folded, pool="max", window=(2,), step=(2,)))
    cuts = [Cut.of(pooled.group, t) for t in direct_choice.candidates(pooled.group, pooled.cells, folded.batch)]
    assert cuts and all(cut.at_once == 1 and cut.strips[2] > 0 for cut in cuts)


def test_running_results_take_registers() -> None:
    """Of each of a thread's positions, whatever features it has; a logsumexp has two numbers."""
    for kind, numbers in (("sum", 1), ("logsumexp", 2)):
        found, _ = estimated(Case((62, 62), 1, 4, groups=16, fold=kind, fold_dims="c", batch=8))
        for t in direct_choice.candidates(found.group, found.cells, 8):
            cut = Cut.of(found.group, t)
            assert cut.running_values == numbers * prod(t.own) <= cut.held
