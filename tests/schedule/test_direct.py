"""Direct contraction tiles: what a block stages and computes, and when one is worth a try."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from torch import nn

from fusewright.capture import capture
from fusewright.schedule import contraction, direct_choice, tiling
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.direct import Cut, side, with_windows


def group(model: nn.Module, *shape: int) -> Contraction:
    graph = capture(model.eval(), (torch.rand(2, *shape),), {}).graph
    found = contraction.match(graph.outputs[0], graph.users())
    assert isinstance(found, Contraction), found
    return found


CONVOLUTIONS = {
    "plain": nn.Conv2d(3, 4, (2, 5), stride=(1, 3), padding=(1, 2), dilation=(3, 1)),
    "transposed": nn.ConvTranspose2d(3, 4, (3, 4), stride=(2, 3), padding=(1, 0), dilation=(1, 2)),
    "pool": nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2), nn.MaxPool2d((3, 4), (2, 5), padding=(1, 2))),
    "windows between strides": nn.Sequential(
        nn.ConvTranspose2d(3, 4, (3, 5), stride=(4, 3), padding=(1, 0), dilation=(1, 2)),
        nn.MaxPool2d((2, 4), (2, 1), padding=(1, 0)),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_box_stages_what_its_cells_read(name: str) -> None:
    """Every position of every cell is computed by a thread, from elements that are staged."""
    c = with_windows(group(CONVOLUTIONS[name], 3, 30, 40))
    for axis, cells, per_unit, align in product(c.axes, (1, 3, 8), (1, 2, 5), (1, 4)):
        found = side(axis, cells, per_unit, align)
        assert found.positions >= (cells - 1) * axis.stride + axis.cell
        assert found.low % align == 0
        for phase in axis.phases:
            elements = found.positions // found.period
            for j, tap in product(range(elements), range(len(phase.taps))):
                assert 0 <= phase.offset(j, tap) - found.low < found.length
        for cell, phase in product(range(0, cells, axis.together), axis.phases):
            for j, element in enumerate(phase.elements):
                # Element j of a cell is the thread's (cell * stride + element) // period-th of this phase.
                at = (cell * axis.stride + element) // found.period
                assert at < elements
                if phase.taps:
                    assert cell // axis.together * axis.advance + phase.offset(j, 0) == phase.offset(at, 0)


def test_lanes_of_a_warp_read_without_conflicts() -> None:
    """Four words per lane take four turns, where neighbouring lanes are an odd number of such apart."""
    c = group(nn.Conv2d(8, 8, 3, groups=8), 8, 64, 64)
    best = direct_choice.candidates(c, (1, 62, 62), 64)
    assert {Cut.of(c, t).box.turns for t in best if (t.run, t.cells_w) == (4, 128)} <= {4}
    assert all(t.run not in (8, 16) for t in best)


def estimates(c: Contraction, lengths: tuple[int, int, int]) -> direct_choice.Shortlist:
    rival = tiling.estimate(c, tiling.candidates(c, lengths, tf32=True)[0], lengths, tf32=True)
    return direct_choice.shortlist(c, lengths, 64, rival)


def test_a_depthwise_convolution_needs_no_tensor_cores() -> None:
    found = estimates(group(nn.Conv2d(64, 64, 5, groups=64), 64, 60, 60), (1, 56, 56))
    assert found.ahead and len(found.tiles) == direct_choice.WORTH_MEASURING


def test_a_dense_convolution_does() -> None:
    assert not estimates(group(nn.Conv2d(64, 128, 3), 64, 60, 60), (1, 58, 58)).ahead


def test_tiles_fit() -> None:
    c = group(CONVOLUTIONS["pool"], 3, 30, 40)
    tiles = direct_choice.candidates(c, (1, 14, 8), 16)
    assert tiles
    for t in tiles:
        cut = Cut.of(c, t)
        assert cut.shared <= direct_choice.MOST_SHARED and cut.threads <= direct_choice.MOST_THREADS
        assert cut.threads % 32 == 0 and cut.values <= direct_choice.MOST_VALUES
        d, h, w = cut.box.positions
        assert (
            prod((d, h, w)) == cut.box.sides[0].units * cut.box.sides[1].units * cut.box.sides[2].units * t.rows * t.run
        )


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("rival", [0.02, 0.2, 2.0])
@pytest.mark.sampled
def test_tiles_out_of_reach_are_left_out_and_no_others(name: str, rival: float) -> None:
    c = group(CONVOLUTIONS[name], 3, 60, 70)
    lengths = (1, 28, 30)
    most = direct_choice.SLOWER * direct_choice.UNDERESTIMATED * rival
    every = direct_choice._scored(c, lengths, 8)
    assert direct_choice._scored(c, lengths, 8, most) == [pair for pair in every if pair[0] <= most]
