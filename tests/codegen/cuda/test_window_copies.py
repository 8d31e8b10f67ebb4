"""How the rows below windows get into shared memory: in vectors as large as they allow, with no checks where none of a
warp's rows reaches outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from contraction_cases import Case, Found, find, tolerance
from emulation.emulate import ORDERS, emulate
from warpgroup_cases import BF16, kernel

from fusewright.kernel import Kernel
from fusewright.schedule import warpgroup_windows

POOL: dict[str, Any] = {"pool": "avg", "window": (4, 4), "step": (4, 4)}
EACH = (True, False)  # copies of what lies inside, and those that check

# Unpadded ones have an odd number of rows of cells: a warp takes two, of which one may lie behind the end of x.
# A case, elements from a 16-byte boundary to x, elements of a vector, and which copies there are.
CASES: dict[str, tuple[Case, int, int, tuple[bool, ...]]] = {
    "whole vectors": (Case((47, 68), 8, 8, **POOL), 0, 4, EACH),
    "even rows": (Case((47, 66), 8, 8, **POOL), 0, 2, EACH),
    "odd rows": (Case((47, 67), 8, 8, **POOL), 0, 1, EACH),
    "x behind a pair": (Case((47, 68), 8, 8, **POOL), 2, 2, EACH),
    "x behind three": (Case((47, 68), 8, 8, **POOL), 3, 1, EACH),
    "x behind a pair, odd rows": (Case((47, 67), 8, 8, **POOL), 2, 1, EACH),
    "few channels": (Case((47, 66), 3, 8, **POOL), 0, 2, (False,)),
    "channels beyond a multiple of four": (Case((47, 66), 7, 8, **POOL), 0, 2, EACH),
    "padded": (Case((102, 108), 8, 8, padding=(1, 1), **POOL), 0, 4, EACH),
    "padded, even rows": (Case((102, 106), 8, 8, padding=(1, 1), **POOL), 0, 2, EACH),
    "padded, odd rows": (Case((102, 107), 6, 8, padding=(1, 1), **POOL), 0, 1, EACH),
    "padded, x behind a pair": (Case((102, 108), 8, 8, padding=(1, 1), **POOL), 2, 2, EACH),
    "padded along h": (Case((78, 62), 5, 8, (3, 2), padding=(2, 0), dilation=(2, 2), **POOL), 0, 2, EACH),
    "padded along w": (
        Case((1202,), 8, 8, (7,), (1,), (3,), (2,), pool="avg", window=(4,), step=(4,)),
        *(0, 2, EACH),
    ),
    "bfloat16": (Case((47, 72), 8, 8, dtype=BF16, **POOL), 0, 8, EACH),
    "bfloat16, even rows": (Case((47, 70), 8, 8, dtype=BF16, **POOL), 0, 2, EACH),
    "bfloat16, odd rows": (Case((47, 69), 8, 8, dtype=BF16, **POOL), 0, 1, EACH),
    "bfloat16, padded, x behind a pair": (Case((102, 112), 8, 8, padding=(1, 1), dtype=BF16, **POOL), 2, 2, EACH),
    "planes": (
        Case(
            *((5, 22, 34), 8, 6, (2, 3, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1)),
            **POOL | {"window": (2, 4, 2), "step": (2, 4, 2)},
        ),
        *(0, 2, EACH),
    ),
    "padded planes": (
        Case(
            *((6, 26, 37), 8, 6, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
            **POOL | {"window": (2, 2, 2), "step": (2, 2, 2)},
        ),
        *(0, 1, EACH),
    ),
}


def without(record: Kernel, vector: int, inside: bool) -> Kernel:
    """The kernel without one kind of copies."""
    text = "    if (inside)\n        copy_rows<VECTOR, true>"
    assert record.source.count(text) == 1
    left_out = f"    if (VECTOR == {vector} && inside == {int(inside)}) return;\n"
    return replace(record, source=record.source.replace(text, left_out + text))


def behind(x: torch.Tensor, elements: int) -> torch.Tensor:
    """The same numbers so many elements behind a boundary of 16 bytes."""
    moved = torch.empty(x.numel() + elements, dtype=x.dtype)[elements:].view(x.shape)
    assert moved.data_ptr() % 16 == elements * x.dtype.itemsize
    return moved.copy_(x)


def found(case: Case) -> tuple[Found, Kernel]:
    """With the best tile of four warps that have two rows of cells each."""
    f = find(case, boxed=True)
    assert isinstance(f, Found)
    tiles = (t for _, t in warpgroup_windows.candidates(f.group, f.cells, tf32=True))
    return f, kernel(f, next(t for t in tiles if t.warps == 4 and (t.own_h, t.own_w) == (2, 1)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_each_kind_of_copy(name: str) -> None:
    case, elements, *_ = CASES[name]
    (f, record), x = found(case), case.example(5)
    want, size = f.reference(x)
    operands = f.tensors(behind(x, elements))
    right = emulate(record, *operands)
    error = ((right.double() - want).abs() / size.clamp(min=1e-30)).nan_to_num(float("inf"))
    assert error.max() <= tolerance(case, boxed=True)
    for order in ORDERS[1:]:
        assert torch.equal(emulate(record, *operands, order=order), right)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_what_the_emulator_would_find(name: str) -> None:
    """The result needs just the kinds of copies that it should: a GPU has in shared memory what others left there."""
    case, elements, vector, kinds = CASES[name]
    f, record = found(case)
    operands = f.tensors(behind(case.example(5), elements))
    right = emulate(record, *operands)
    for inside in EACH:
        assert torch.equal(emulate(without(record, vector, inside), *operands), right) == (inside not in kinds)


@pytest.mark.parametrize("name", ["odd rows", "padded along h", "padded along w", "bfloat16, even rows", "planes"])
def test_sanitizers_find_nothing(name: str) -> None:
    case, *_ = CASES[name]
    (f, record), x = found(case), case.example(5)
    assert torch.equal(emulate(record, *f.tensors(x), sanitize=True), emulate(record, *f.tensors(x)))
