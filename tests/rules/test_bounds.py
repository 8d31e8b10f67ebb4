"""Gradients where a bound is met exactly: rules keep eager's convention."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import fired, gradients, graph_of, inp
from spec_pointwise import PASSING, REPEATED, STOPPING

from fusewright.ir.build import pointwise as pw
from fusewright.rules import pointwise as rules

PAIRS = [*itertools.permutations(PASSING, 2), *itertools.permutations(STOPPING, 2)]
GRID = torch.arange(-8, 33, dtype=torch.float64) / 4


def check(rule, outer, inner):
    x = torch.cat([GRID, torch.tensor([0.1, 0.7, -0.0], dtype=torch.float64)])
    graph = graph_of(pw(outer[0], pw(inner[0], inp(len(x)), params=inner[1]), params=outer[1]))
    new = fired(rule, graph).graph
    before, after = gradients(graph, [x], graph), gradients(new, [x], graph)
    assert before is not None and after is not None and torch.equal(before[0], after[0])


@pytest.mark.parametrize(("outer", "inner"), PAIRS, ids=str)
def test_clip_of_clip(outer, inner):
    check(rules.clip_of_clip, outer, inner)


@pytest.mark.parametrize("function", REPEATED, ids=str)
def test_repeated(function):
    check(rules.repeated, function, function)
