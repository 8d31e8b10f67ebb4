"""Index ranges of linear windows, against plain loops over every index."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewright.ir.ops import Conv, Pool, Slot
from fusewright.ir.slots import Windows, make_slot, mass, pool_slots, sliding, solve, tap_slots, windows

quick = settings(max_examples=300, derandomize=True, deadline=None, database=None)
small = st.integers(1, 4)


def indices(s: Slot) -> list[int]:
    return list(range(s.start, s.stop, s.step)) if s.stop > s.start else []


def tidy(s: Slot, length: int) -> bool:
    """Whether the range lies inside, ends right behind its last index and has step 1 when that makes no difference."""
    if s.count == 0:
        return (s.start, s.stop, s.step) == (0, 0, 1)
    last = s.start + (s.count - 1) * s.step
    return s.start >= 0 and last < length and s.stop == last + 1 and s.step >= 1 and (s.count > 1 or s.step == 1)


@quick
@given(st.integers(-12, 12), small, st.integers(0, 8), st.integers(1, 9))
def test_make_slot(first: int, step: int, count: int, length: int) -> None:
    s = make_slot(first, step, count, length, 0.5)
    assert indices(s) == [i for i in range(first, first + step * count, step) if 0 <= i < length]
    assert tidy(s, length) and s.scale == 0.5


@st.composite
def pools(draw):
    kernel = draw(st.integers(1, 5))
    padding = draw(st.integers(0, kernel // 2))
    length = draw(st.integers(max(1, kernel - 2 * padding), 11))
    ceil, counted, divisor = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from((None, None, 3)))
    return length, Pool("avg", (kernel,), (draw(small),), (padding,), (1,), ceil, counted, divisor)


@quick
@given(pools())
def test_pool_slots(case: tuple[int, Pool]) -> None:
    length, op = case
    (kernel,), (stride,), (padding,) = op.kernel, op.stride, op.padding
    slots = pool_slots(op, 0, length)
    assert len(slots) == op.length(0, length)
    for j, s in enumerate(slots):
        window = range(j * stride - padding, min(j * stride - padding + kernel, length + padding))
        inside = [i for i in window if 0 <= i < length]
        assert indices(s) == inside and tidy(s, length)
        divisor = op.divisor or (len(window) if op.count_include_pad else len(inside))
        assert s.scale == 1 / divisor


def test_the_divisor_is_carried_once() -> None:
    op = Pool("avg", (2, 2), (2, 2), (0, 0), (1, 1), divisor=3)
    assert {s.scale for s in pool_slots(op, 0, 4)} == {1 / 3} and {s.scale for s in pool_slots(op, 1, 4)} == {1.0}


@st.composite
def slots(draw, length: int):
    if draw(st.integers(0, 9)) == 0:
        return Slot(0, 0, 1, 0.5)
    start, step = draw(st.integers(0, length - 1)), draw(st.integers(1, 5))
    return Slot(start, start + 1 + step * draw(st.integers(0, (length - 1 - start) // step)), step, 0.5)


@st.composite
def convolutions(draw, transposed: bool):
    taps, length = draw(small), draw(st.integers(1, 9))
    stride, dilation, left = draw(small), draw(small), draw(st.integers(0, 4))
    right = left if transposed else draw(st.integers(0, 4))
    conv = Conv((stride,), ((left, right),), (dilation,), transposed=transposed, output_padding=(0,) * transposed)
    (out,) = conv.spatial((length,), (taps,))
    return conv, taps, length, draw(slots(out)) if out > 0 else None


@quick
@given(convolutions(False))
def test_taps_of_a_convolution(case) -> None:
    conv, taps, length, s = case
    if s is None:
        return
    (row,) = tap_slots(conv, 0, (s,), taps, length)
    for u, tap in enumerate(row):
        reached = [conv.stride[0] * p + conv.dilation[0] * u - conv.padding[0][0] for p in indices(s)]
        assert indices(tap) == [i for i in reached if 0 <= i < length]
        assert tidy(tap, length) and tap.scale == 0.5


@quick
@given(convolutions(True))
def test_taps_of_a_transposed_convolution(case) -> None:
    conv, taps, length, s = case
    if s is None:
        return
    (row,) = tap_slots(conv, 0, (s,), taps, length)
    for u, tap in enumerate(row):
        targets = {p: conv.stride[0] * p + conv.dilation[0] * u - conv.padding[0][0] for p in range(length)}
        assert indices(tap) == [p for p, target in targets.items() if target in indices(s)]
        assert tidy(tap, length) and tap.scale == 0.5


@quick
@given(st.integers(1, 6), st.integers(-9, 9), slots(24), st.integers(1, 12))
def test_solve(stride: int, shift: int, s: Slot, length: int) -> None:
    found = solve(stride, shift, s, length)
    assert indices(found) == [p for p in range(length) if stride * p + shift in indices(s)]
    assert tidy(found, length) and found.scale == 0.5


def test_mass_is_what_a_constant_becomes() -> None:
    assert mass(Slot(1, 6, 2, 0.5)) == 1.5 and mass(Slot(0, 0, 1, 0.5)) == 0.0


@quick
@given(st.lists(slots(8), min_size=1, max_size=4) | st.builds(
    lambda start, step, count, distance, many: [
        Slot(start + distance * j, start + distance * j + step * (count - 1) + 1, step, 0.5) for j in range(many)
    ],
    st.integers(0, 3), small, st.integers(0, 3), st.integers(-1, 3), st.integers(1, 4),
))  # fmt: skip
def test_sliding(windows: list[Slot]) -> None:
    first, held = windows[0], [indices(s) for s in windows]
    distances = {b.start - a.start for a, b in pairwise(windows)} or {1}
    alike = len({(s.step, len(i)) for s, i in zip(windows, held, strict=True)}) == 1
    regular = len(distances) == 1 and min(distances) > 0
    assert sliding(tuple(windows)) == ((first.step, min(distances)) if alike and held[0] and regular else None)


def test_sliding_windows_have_one_scale() -> None:
    assert sliding((Slot(0, 2, 1, 0.5), Slot(2, 4, 1, 0.25))) is None
    assert sliding((Slot(0, 2, 1, 0.5), Slot(2, 4, 1, 0.5))) == (1, 2)


@pytest.mark.parametrize("length", [7, 12, 30])
@pytest.mark.parametrize(
    "w", [Windows(3, 1, 1, 0, 0), Windows(2, 3, 1, 2, 2), Windows(4, 1, 3, 2, 1), Windows(5, 1, 2, 0, 0)]
)
def test_windows(w: Windows, length: int) -> None:
    """What windows are made of tells them again: as many, at the same places."""
    number = (length + w.before + w.behind - (w.size - 1) * w.step - 1) // w.stride + 1
    slots = tuple(make_slot(j * w.stride - w.before, w.step, w.size, length, 0.5) for j in range(number))
    found = windows(slots, length)
    if sum(s.count == w.size for s in slots) < 2:
        assert found is None
        return
    assert found is not None and found[:4] == w[:4]
    assert found.behind == (number - 1) * w.stride - w.before + (w.size - 1) * w.step + 1 - length <= w.behind
    uneven = (*slots[:-1], replace(slots[-1], scale=1.0))
    assert windows(uneven, length) is None
    assert windows((*slots[:-1], make_slot(0, 1, w.size - 1, length, 0.5)), length) is None
