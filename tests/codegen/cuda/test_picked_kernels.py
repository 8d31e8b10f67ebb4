"""Streams that read what a class has at its number, and compare whole numbers: the CUDA C++ runs on the CPU."""

from __future__ import annotations

import zlib

import pytest
import torch
from codegen.cuda.picked_cases import COMPARED, I64, PICKED, given_as, loss
from codegen.cuda.test_stream_kernels import check, fold, graph_of, inp, pointwise, random, stream_of
from emulation.emulate import ORDERS, EmulationError, emulate

from fusewright.codegen.cuda.stream import kernel
from fusewright.ir import ops
from fusewright.ir.build import cast
from fusewright.ir.node import Node, make
from fusewright.schedule.stream import parse


@pytest.mark.parametrize("name", PICKED)
def test_picked(name: str) -> None:
    k = check(PICKED[name](), order=ORDERS[zlib.crc32(name.encode()) % 3])
    assert k.looks_up and f"row_of(d, {given_as(name)}" in k.source


@pytest.mark.parametrize("name", COMPARED)
def test_compared(name: str) -> None:
    check(COMPARED[name](), order=ORDERS[zlib.crc32(name.encode()) % 3])


def test_large_whole_numbers() -> None:
    """Those that float32 does not have are on the right side still."""
    numbers = torch.tensor([2**24 - 1, 2**24 + 1, 2**62, -(2**62), 7, 8, -100], dtype=I64)
    x = inp(0, 7, dtype=I64)
    for fn in ("eq", "ne", "lt", "le", "gt", "ge"):
        for number in (7, -100, 2**24 - 1):
            root = cast(pointwise(fn, x, number), torch.float32)
            check(root, {x: numbers})


def test_predictions() -> None:
    """An index is compared with any other: float32 has one of the two, however large the other is."""
    found, classes = make(ops.Reduce("argmax", (1,)), inp(0, 7, 5)), inp(1, 7, dtype=I64)
    root = fold(cast(pointwise("eq", found, classes), torch.float32), "sum", 0)
    s = stream_of(root)
    assert set(s.tensors) == {found, classes}
    given = {found: torch.tensor([0, 1, 2, 3, 4, 0, 1]), classes: torch.tensor([0, 2, 2, 2**40, -1, 0, 2**24])}
    assert emulate(kernel(s, "fused_test"), *(given[n] for n in s.tensors)) == 3


@pytest.mark.parametrize("wrong", [-1, 20, 2**31, -(2**63)])
@pytest.mark.parametrize("name", ["loss", "elements", "alone"])
def test_what_is_no_class_is_a_trap(name: str, wrong: int) -> None:
    s = stream_of(PICKED[name]())
    given = {n: random(n, i) for i, n in enumerate(s.tensors)}
    (classes,) = (t for t in given.values() if t.dtype == I64)
    classes[4] = wrong
    with pytest.raises(EmulationError, match="__trap"):
        emulate(kernel(s, "fused_test"), *given.values())


def test_nothing_is_read_outside() -> None:
    """What is ignored need not be a class."""
    s = stream_of(PICKED["some ignored"]())
    given = {n: random(n, i) for i, n in enumerate(s.tensors)}
    emulate(kernel(s, "fused_test"), *given.values(), order="reverse", sanitize=True)
    s = stream_of(PICKED["loss"]())
    given = {n: random(n, i) for i, n in enumerate(s.tensors)}
    (classes,) = (t for t in given.values() if t.dtype == I64)
    classes[:] = -100
    emulate(kernel(s, "fused_test"), *given.values(), sanitize=True)


def computed_with(fn: str, other: Node | float) -> Node:
    return fold(cast(pointwise(fn, inp(0, 40, 3, dtype=I64), other), torch.float32), "sum", 0, 1)


@pytest.mark.parametrize(
    "root",
    [
        computed_with("eq", 2**24),
        computed_with("eq", inp(1, 40, 3, dtype=I64)),
        fold(cast(inp(0, 40, 3, dtype=I64), torch.float64), "sum", 0, 1),
    ],
    ids=["a large number", "two of them", "as float64"],
)
def test_whole_numbers_that_are_not_compared(root: Node) -> None:
    found = parse(root, graph_of(root).users())
    assert isinstance(found, str) or not any(isinstance(n.op, ops.Input) for n in found.tensors)


def test_whole_numbers_that_others_are_made_of() -> None:
    """No rounding comes between."""
    assert [type(n.op) for n in stream_of(computed_with("add", 1)).tensors] == [ops.Input]


@pytest.mark.parametrize("shape", [(2, 9, 3, 4), (3, 12, 16), (2, 8, 1, 5)])
@pytest.mark.parametrize("ignore", [-100, 3])
def test_neighbours_that_are_picked(shape: tuple[int, ...], ignore: int) -> None:
    """Classes of positions: each is read at its own number, beside a reduction of classes; else from memory."""
    x = inp(0, *shape)
    picked = loss(x, inp(1, shape[0], *shape[2:], dtype=I64), ignore)
    root = fold(pointwise("add", x, picked), "logsumexp", 1)
    assert check(root).looks_up
    assert not stream_of(pointwise("relu", picked)).weights


def test_neighbours_are_no_classes() -> None:
    root = fold(pointwise("add", x := inp(0, 2, 8, 16), loss(x, inp(1, 2, 16, dtype=I64))), "logsumexp", 1)
    s = stream_of(root)
    given = {n: random(n, i) for i, n in enumerate(s.tensors)}
    (classes,) = (t for t in given.values() if t.dtype == I64)
    classes[1, 9] = 8
    with pytest.raises(EmulationError, match="__trap"):
        emulate(kernel(s, "fused_test"), *given.values(), sanitize=True)
