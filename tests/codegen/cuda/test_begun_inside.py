"""Convolutions whose windows begin and end inside of x: negative padding, in place of a copy of a part."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from contraction_cases import Case, Found, Model, draw, find, tolerance
from direct_cases import precision
from emulation.emulate import emulate
from tile_families import FAMILIES, kernel_of

# Window sums are formed from the first element on.
BEGUN_INSIDE = [name for name in FAMILIES if name != "windows"]
ENDS_1, ENDS_2 = ((1, 2), (3, 0)), ((2, 3), (5, 1))
# Cases that each family takes, of which parts are left out.
CASES = {
    "warps": Case((13, 15), 6, 9, (3, 2), (2, 1), inside=ENDS_1),
    "warps, taps ahead": Case(
        (9, 9, 11), 3, 10, (2, 3, 2), (1, 1, 2), (0, 1, 0), (1,) * 3, inside=((2, 0), (0, 0), (1, 1))
    ),
    "features": Case((14, 23), 8, 70, (2, 3), (1, 3), inside=ENDS_2, before=("tanh",), fold="max", fold_dims="p"),
    "positions": Case(
        (14, 23), 16, 24, padding=(0, 1), inside=((3, 1), (0, 0)), pool="max", window=(2, 2), step=(2, 2)
    ),
    "direct": Case((14, 22), 1, 1, (5, 3), (1, 2), groups=6, inside=ENDS_2, before=("gelu",)),
}


def assert_right(f: Found, family: str, t: object) -> None:
    x = f.case.example()
    want, size = f.reference(x)
    got = emulate(kernel_of(f, t), *f.tensors(x), sanitize=True)
    error = ((got.double() - want).abs() / (size + 1e-3)).nan_to_num(float("inf")).max()
    allowed = precision(f.case) if family == "direct" else tolerance(f.case)
    assert got.shape == want.shape and error <= allowed


@pytest.mark.parametrize("name", CASES)
def test_parts(name: str) -> None:
    family = name.partition(",")[0]
    f = find(CASES[name])
    assert isinstance(f, Found) and f.group.x.shape[2:] == CASES[name].sizes, f
    tiles = FAMILIES[family](f)
    assert tiles
    assert_right(f, family, tiles[0])


def with_parts(case: Case, rng: random.Random) -> Case:
    """The case with some of a larger x left out, along dimensions where nothing is added at that end."""
    assert not isinstance(case.padding, str)
    inside = tuple((0, 0) if p else (rng.randint(0, 3), rng.randint(0, 3)) for p in case.padding)
    sizes = tuple(n + sum(ends) for n, ends in zip(case.sizes, inside, strict=True))
    return replace(case, sizes=sizes, inside=inside)


def drawn(seed: int, family: str) -> tuple[Found, object]:
    """A random group of the family that begins inside."""
    rng = random.Random(seed)
    while True:
        case = draw(rng)
        if case.transposed or isinstance(case.padding, str) or all(case.padding) or case.dtype == torch.float64:
            continue
        direct = family == "direct"
        case = with_parts(replace(case, tf32=not direct, channels_last=case.channels_last and not direct), rng)
        if not any(map(any, case.inside)):
            continue
        try:
            Model(case)(case.example())
        except RuntimeError:  # nothing is left of the image, or no such pooling in this dtype
            continue
        f = find(case)
        tiles = FAMILIES[family](f) if isinstance(f, Found) else []
        if isinstance(f, Found) and tiles:
            return f, rng.choice(tiles[:8])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", BEGUN_INSIDE)
def test_random_parts(family: str, seed: int) -> None:
    f, t = drawn(seed, family)
    assert_right(f, family, t)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 60))
@pytest.mark.parametrize("family", BEGUN_INSIDE)
def test_more_random_parts(family: str, seed: int) -> None:
    f, t = drawn(seed, family)
    assert_right(f, family, t)
