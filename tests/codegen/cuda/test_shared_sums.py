"""Sums of overlapping windows: right, and of few additions."""

from __future__ import annotations

import random
import re

import pytest

from fusewright.codegen.cuda.contraction_sums import shared_sums


def windows(taps: int, dilation: int, count: int, step: int = 1) -> list[list[str]]:
    return [[f"v[{tap * dilation + i * step}]" for i in range(count)] for tap in range(taps)]


def evaluated(lines: list[str], count: int) -> list[int]:
    """What the lines assign, as sets of elements: bits, no element twice."""
    names: dict[str, object] = {"v": [1 << i for i in range(64)], "sums": [0] * count}
    for line in lines:
        exec(re.sub(r"^const Compute |;$", "", line), {}, names)
    sums = names["sums"]
    assert isinstance(sums, list)
    return sums


@pytest.mark.parametrize(
    ("shape", "most"),
    [((1, 1, 4), 3), ((3, 1, 4), 6), ((2, 1, 6), 6), ((7, 2, 4), 15), ((3, 2, 6), 10), ((3, 1, 4, 2), 9)],
)
def test_additions(shape: tuple[int, int, int], most: int) -> None:
    each = windows(*shape)
    lines = shared_sums(each, [f"sums[{i}]" for i in range(len(each))])
    assert sum(line.count(" + ") for line in lines) <= most
    wanted = [sum(1 << int(term[2:-1]) for term in window) for window in each]
    assert evaluated(lines, len(each)) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_any_windows(seed: int) -> None:
    rng = random.Random(seed)
    each = [[f"v[{i}]" for i in sorted(rng.sample(range(20), rng.randint(1, 9)))] for _ in range(rng.randint(1, 9))]
    lines = shared_sums(each, [f"sums[{i}]" for i in range(len(each))])
    assert evaluated(lines, len(each)) == [sum(1 << int(term[2:-1]) for term in window) for window in each]
    assert sum(line.count(" + ") for line in lines) <= sum(len(window) - 1 for window in each)
