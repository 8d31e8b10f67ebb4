"""Range reductions of many slots: the generated CUDA C++ runs on the CPU, and is compared with sums in float64."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation.emulate import ORDERS, emulate
from test_range_kernels import (
    BF16,
    F16,
    F32,
    F64,
    Slots,
    borders,
    expected,
    inf,
    inp,
    nan,
    parse,
    parsed,
    random,
    sums,
    whole,
    windows,
)
from test_range_kernels import _value as value_of
from torch import Tensor, nn
from torch.nn import functional as F

from fusewright.codegen.cuda.ranges import kernel as one_pass
from fusewright.codegen.cuda.ranges_blocks import kernel, of_fewer_threads
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Slot
from fusewright.kernel import Kernel
from fusewright.pipeline import build
from fusewright.runtime import nvrtc
from fusewright.schedule.range_blocks import MOST_SHARED, Cut, cuts, divided, parts_of, shared_bytes
from fusewright.schedule.range_sums import Axis, RangeReduction

GOLDEN = Path(__file__).parents[2] / "golden"


def pooled(n: int, size: int, stride: int, taps: int = 1, spread: int = 1, pad: int = 0) -> Slots:
    """Windows of `size`, `stride` apart, once per tap: what an average pool behind a convolution sums of its input."""
    found = []
    for begin in range(-pad, n + pad - size - spread * (taps - 1) + 1, stride):
        for u in range(taps):
            start, stop = max(0, begin + u * spread), min(n, begin + u * spread + size)
            found.append(Slot(start, stop, 1, 1 / size) if start < stop else Slot(0, 0, 1, 1 / size))
    return tuple(found)


def strided(n: int, dilation: int) -> Slots:
    """What a sum over the positions of a convolution with seven taps, strides of three and a padding of two takes."""
    count = (n + 4 - 6 * dilation - 1) // 3 + 1
    found = []
    for first in (dilation * u - 2 for u in range(7)):
        kept = [i for i in range(first, first + 3 * count, 3) if 0 <= i < n]
        found.append(Slot(kept[0], kept[-1] + 1, 3, 1.0))
    return tuple(found)


def mixed(n: int) -> Slots:
    """Ranges of every kind: empty, one element, steps, all of it, with scales of their own."""
    return (
        Slot(0, 0, 1, 1.0),
        Slot(n // 2, n // 2 + 1, 1, 2.0),
        Slot(0, n, 2, 0.5),
        Slot(1, n, 3, 0.25),
        Slot(0, n, 1, 1.0 / n),
        Slot(n - 1, n, 1, -1.0),
    )


def irregular(n: int, slots: int) -> Slots:
    """Ranges at no distance in particular."""
    return tuple(Slot(i * i % (n - 3), min(n, i * i % (n - 3) + 1 + i % 7), 1, 0.5) for i in range(slots))


P = (2, 3)
CASES = {
    "lines": lambda: sums(inp(*P, 61), {2: pooled(61, 7, 3, 3)}, F32),
    "lines of float64": lambda: sums(inp(*P, 50, dtype=F64), {2: pooled(50, 4, 2, 2)}),
    "lines, long windows": lambda: sums(inp(*P, 211), {2: pooled(211, 30, 9)}, F32),
    "lines of bf16": lambda: sums(inp(*P, 93, dtype=BF16), {2: pooled(93, 5, 1, 1, 1, 2)}, F32),
    "lines, mixed": lambda: sums(inp(*P, 37), {2: mixed(37)}, F32),
    "planes": lambda: sums(inp(*P, 29, 23), {2: pooled(29, 7, 7, 3), 3: pooled(23, 5, 4, 2)}, F32),
    "planes, padded": lambda: sums(inp(*P, 14, 14), {2: pooled(14, 3, 1, 1, 1, 1), 3: pooled(14, 3, 1, 1, 1, 1)}, F32),
    "planes in float64": lambda: sums(inp(*P, 17, 12), {2: pooled(17, 4, 4, 3), 3: pooled(12, 4, 4, 3)}),
    "planes of float64": lambda: sums(inp(*P, 17, 12, dtype=F64), {2: pooled(17, 4, 4, 3), 3: pooled(12, 2, 2)}),
    "planes of bf16": lambda: sums(inp(*P, 31, 18, dtype=BF16), {2: pooled(31, 6, 3), 3: pooled(18, 6, 3)}, F32),
    "planes of fp16": lambda: sums(inp(*P, 31, 18, dtype=F16), {2: pooled(31, 6, 3), 3: pooled(18, 6, 3)}, F16),
    "planes, many rows": lambda: sums(inp(*P, 150, 9), {2: pooled(150, 3, 1), 3: pooled(9, 2, 2)}, F32),
    "planes, irregular": lambda: sums(inp(*P, 90, 9), {2: irregular(90, 70), 3: pooled(9, 2, 2)}, F32),
    "planes, long rows": lambda: sums(inp(*P, 9, 300), {2: pooled(9, 3, 1), 3: pooled(300, 40, 20)}, F32),
    "planes, mixed": lambda: sums(inp(*P, 25, 33), {2: mixed(25), 3: mixed(33)}, F32),
    "planes, borders and windows": lambda: sums(inp(*P, 40, 30), {2: borders(40, 3), 3: pooled(30, 4, 4, 3)}, F32),
    "planes, strided": lambda: sums(inp(*P, 65, 71), {2: strided(65, 1), 3: strided(71, 3)}),
    "rows, columns kept": lambda: sums(inp(*P, 29, 23), {2: pooled(29, 7, 7, 3)}, F32),
    "one sum of rows": lambda: sums(inp(*P, 90, 23), {2: whole(90)}, F32),
    "depth and width": lambda: sums(inp(*P, 9, 10, 11), {2: pooled(9, 3, 3), 4: pooled(11, 3, 2)}, F32),
    "of squares": lambda: sums(
        pointwise("square", inp(*P, 20, 21)), {2: pooled(20, 4, 4, 2), 3: pooled(21, 4, 4, 2)}, F32
    ),
    "volumes": lambda: sums(
        inp(*P, 11, 12, 13), {2: pooled(11, 3, 3, 3), 3: pooled(12, 4, 3, 2), 4: pooled(13, 4, 4, 3)}, F32
    ),
    "volumes, mixed": lambda: sums(inp(1, 3, 9, 10, 11), {2: mixed(9), 3: mixed(10), 4: mixed(11)}, F32),
    "volumes, few": lambda: sums(inp(*P, 5, 4, 3), {2: pooled(5, 2, 1), 3: pooled(4, 2, 1), 4: pooled(3, 2, 1)}, F32),
    "volumes, long": lambda: sums(
        inp(1, 2, 70, 6, 7), {2: pooled(70, 20, 10, 3), 3: pooled(6, 2, 1), 4: whole(7, 0.5)}, F32
    ),
}  # fmt: skip


def some_cuts(r: RangeReduction) -> list[Cut]:
    """The best cut, one of several planes, and one of several parts along every axis."""
    slots = [len(a.slots or ()) for a in r.axes]
    return [cuts(r, 1000, 1)[0], Cut(4, (1,) * len(slots)), Cut(1, tuple(min(n, 3) for n in slots))]


def check(root: Node, cut: Cut, x: torch.Tensor | None = None, order: str = "forward") -> Kernel:
    r = parsed(root)
    k = kernel(r, cut, "fused_test")
    x = random(r.x, 1) if x is None else x
    value = value_of(r.value, r.x, x.double())
    got, want = emulate(k, x, order=order), expected(root.op, value)
    assert got.dtype == root.dtype and got.shape == want.shape
    special = ~want.isfinite()
    torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
    # chains of eight additions and the rounding of what is kept, once per axis; and the result itself
    magnitude, wide = expected(root.op, value.abs()).abs(), F64 in (r.value.dtype,)
    rounding = torch.finfo(F64 if wide else F32).eps * (1.0 + len(r.axes)) * (1 if r.value is r.x else 3)
    bound = magnitude * rounding + want.abs() * torch.finfo(root.dtype).eps / 2 + 1e-300
    wrong = ((got.double() - want).abs() > bound)[~special]
    assert not wrong.any(), ((got.double() - want).abs() / bound)[~special].max()
    return k


SOME = ["lines", "planes", "planes, padded", "planes, many rows", "planes, irregular", "planes, mixed", "volumes"]


def with_cuts(names: Iterable[str], often: Sequence[str]) -> list[Any]:
    """Each with its best cut, some with the other cuts as well; the rest of the pairs is slow."""
    pairs = [(name, which) for name in names for which in range(3)]
    return [pytest.param(*p, marks=[] if p[1] == 0 or p[0] in often else pytest.mark.slow) for p in pairs]


@pytest.mark.parametrize(("name", "which"), with_cuts(CASES, SOME))
def test_value(name: str, which: int) -> None:
    root = CASES[name]()
    cut = some_cuts(parsed(root))[which]
    check(root, cut, order=ORDERS[zlib.crc32(name.encode()) % 3])


@pytest.mark.parametrize("name", SOME)
@pytest.mark.sampled
def test_every_order_gives_the_same_bits(name: str) -> None:
    r = parsed(CASES[name]())
    x = random(r.x, 2)
    for cut in some_cuts(r):
        k = kernel(r, cut, "fused_test")
        first = emulate(k, x)
        assert all(torch.equal(first, emulate(k, x, order=order, seed=3)) for order in ORDERS[1:])


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("value", [nan, inf])
def test_values_that_are_not_finite_reach_their_slots_alone(name: str, value: float) -> None:
    root = CASES[name]()
    x = random(parsed(root).x, 3)
    x.view(-1)[0] = value
    x.view(-1)[x.numel() // 2] = value
    x.view(-1)[-1] = -value
    for cut in some_cuts(parsed(root)):
        check(root, cut, x)


def test_an_offset_costs_no_digits() -> None:
    """A large mean: chains in float32 are short, and what is kept of an axis is rounded once."""
    root = sums(inp(1, 1, 400, 90), {2: pooled(400, 100, 50, 3), 3: pooled(90, 30, 15, 2)}, F32)
    r = parsed(root)
    x = random(r.x, 4, offset=10.0)
    for cut in some_cuts(r):
        got, want = emulate(kernel(r, cut, "fused_test"), x).double(), expected(root.op, x.double())
        assert ((got - want).abs() <= 2.4e-6).all()  # two and a half ulp of the result


def test_fewer_threads_where_each_keeps_much() -> None:
    """Of 512 that keep ten sums of float64 each one block fits a multiprocessor, of 256 three."""
    r = parsed(CASES["planes, strided"]())
    cut = cuts(r, 18096, 1)[0]
    fewer = of_fewer_threads(r, cut)
    assert fewer == replace(cut, threads=256)
    assert "THREADS = 256, BLOCKS = 3" in check(CASES["planes, strided"](), fewer).source
    little = parsed(CASES["planes"]())
    assert of_fewer_threads(little, cuts(little, 1000, 1)[0]) is None


@pytest.mark.parametrize("planes", [1, 5, 6])
def test_batch_is_an_argument(planes: int) -> None:
    """One text for every batch, whether or not blocks that take several planes come out even."""
    root = sums(inp(4, 1, 20, 21), {2: pooled(20, 4, 4, 2), 3: pooled(21, 4, 4, 2)}, F32)
    r = parsed(root)
    x = torch.randn(planes, 1, 20, 21)
    got = emulate(kernel(r, Cut(4, (1, 1)), "fused_test"), x)
    torch.testing.assert_close(got, expected(root.op, x.double()).float(), rtol=1e-5, atol=1e-6)


FORMS = {
    "one group": ("planes", 1, "constexpr int KEPT"),
    "groups": ("planes, many rows", 1, "GROUPS_H = "),
    "groups of a part": ("planes", 3, "GROUPS_H = "),
    "cut windows": ("planes, padded", 3, "const bool within"),
    "slots": ("planes, irregular", 1, "Slot slot = SLOT_H[row]"),
}


@pytest.mark.parametrize("name", FORMS)
def test_how_the_outermost_axis_is_summed(name: str) -> None:
    """Threads keep what differs between all slots, or those of a group that repeats; else slots are read one by one."""
    case, parts, text = FORMS[name]
    assert text in check(CASES[case](), Cut(1, (parts, 1))).source


def test_a_slot_that_no_block_can_hold() -> None:
    r = parsed(sums(inp(1, 1, 200_000), {2: borders(200_000, 80)}, F32))
    assert not cuts(r, 1, 4)


def test_a_few_long_slots_are_dealt_to_several_blocks() -> None:
    """Although a thread could keep all of them."""
    root = sums(inp(1, 2, 20, 9000), {2: pooled(20, 4, 2), 3: pooled(9000, 3000, 3000)}, F32)
    r = parsed(root)
    assert [p.parts for p in parts_of(r, Cut(1, (1, 3)))] == [1, 3]
    check(root, Cut(1, (1, 3)))


def test_large_planes_are_dealt_to_several_blocks() -> None:
    r = parsed(sums(inp(1, 2, 2000, 2000), {2: pooled(2000, 8, 8, 3), 3: pooled(2000, 8, 8, 3)}, F32))
    for cut in cuts(r, 2, 4):
        assert cut.planes == 1 and max(cut.parts) > 1 and shared_bytes(r, cut) <= MOST_SHARED


def test_groups_that_the_last_part_lacks_are_not_read() -> None:
    """Which would be rows behind the last plane."""
    root = sums(inp(1, 2, 126, 9), {2: pooled(126, 4, 1), 3: pooled(9, 2, 2)}, F32)
    r = parsed(root)
    short = []
    for parts in range(2, 5):
        p = parts_of(r, Cut(1, (parts, 1)))[0]
        assert p.family is not None and p.family.inside
        short += [parts] if p.parts * p.groups > p.family.groups else []
        check(root, Cut(1, (parts, 1)))
    assert short


def test_parts_cover_their_slots() -> None:
    for slots, n in ((pooled(61, 7, 3, 3), 61), (mixed(25), 25), (pooled(90, 30, 15, 2), 90)):
        for parts in range(1, len(slots) + 1):
            p = divided(Axis((2,), slots), n, parts)
            for i, s in enumerate(slots):
                begin = p.begins[i // p.slots]
                assert not s.count or (begin <= s.start and s.start + (s.count - 1) * s.step < begin + p.read <= n)


def channels(node: Node, axis: int, taps: int) -> Node:
    """The taps of a dimension's slots become channels, as those of a transposed convolution do."""
    batch, c, *rest = node.shape
    split = (batch, c, *rest[:axis], rest[axis] // taps, taps, *rest[axis + 1 :])
    dims = (0, 1, axis + 3, *(d for d in range(2, len(split)) if d != axis + 3))
    moved = make(ops.Permute(dims, copy=True), make(ops.Reshape(split), node))
    rest[axis] //= taps
    return make(ops.Reshape((batch, c * taps, *rest)), moved)


def follow(node: Node, x: Tensor) -> Tensor:
    """The value of reshapes and permutations of a range sum of `x`."""
    if isinstance(node.op, ops.RangeSum):
        return expected(node.op, x)
    before = follow(node.arg(0), x)
    return before.permute(node.op.dims) if isinstance(node.op, ops.Permute) else before.reshape(node.shape)


MOVED = {
    "lines": lambda: channels(sums(inp(*P, 61), {2: pooled(61, 7, 3, 3)}, F32), 0, 3),
    "planes": lambda: channels(
        channels(sums(inp(*P, 29, 23), {2: pooled(29, 7, 7, 3), 3: pooled(23, 5, 4, 2)}, F32), 0, 3), 1, 2
    ),
    "other scales": lambda: channels(sums(inp(*P, 20, 33), {2: pooled(20, 4, 4, 3), 3: mixed(33)}, F32), 1, 2),
    "rows and columns": lambda: make(
        ops.Permute((0, 1, 3, 2), copy=True), sums(inp(*P, 29, 23), {2: pooled(29, 7, 7, 3), 3: mixed(23)}, F32)
    ),
    "volumes": lambda: channels(channels(channels(CASES["volumes"](), 0, 3), 1, 2), 2, 3),
}  # fmt: skip


@pytest.mark.parametrize(("name", "which"), with_cuts(MOVED, ["planes"]))
def test_results_in_another_order(name: str, which: int) -> None:
    root = MOVED[name]()
    r = parsed(root)
    assert r.stored is root and r.tail is root
    x = random(r.x, 5)
    got = emulate(kernel(r, some_cuts(r)[which], "fused_test"), x)
    assert got.shape == root.shape
    torch.testing.assert_close(got, follow(root, x.double()).float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 3, 19, 20), (1, 2, 130, 140)])
def test_results_of_one_pass_in_another_order(shape: tuple[int, ...]) -> None:
    """Also where blocks share planes, and a second launch writes."""
    root = channels(sums(inp(*shape), {2: borders(shape[2], 3), 3: borders(shape[3], 4, 0.5)}), 1, 4)
    r = parsed(root)
    x = random(r.x, 5)
    k = one_pass(r, "fused_test")
    assert r.stored is root and len(k.launches) == (2 if shape[0] == 1 else 1)
    torch.testing.assert_close(emulate(k, x), follow(root, x.double()), rtol=1e-5, atol=2e-5)


UNMOVED = {
    "the order of the slots": lambda: make(
        ops.Reshape((2, 3, 3, 2, 3)), sums(inp(*P, 9, 12), {2: borders(9, 3), 3: windows(12, 2)})
    ),
    "planes that mix": lambda: make(
        ops.Permute((0, 2, 1), copy=True), sums(inp(*P, 30), {2: windows(30, 5)})
    ),
    "a view": lambda: make(ops.Permute((0, 1, 3, 2)), sums(inp(*P, 9, 9), {2: borders(9, 3), 3: borders(9, 2)})),
}  # fmt: skip


@pytest.mark.parametrize("name", UNMOVED)
def test_no_order_to_write(name: str) -> None:
    assert isinstance(parse(UNMOVED[name](), lambda node: True), str)


class Upsampled(nn.Module):
    """A transposed convolution in front of an average pool, whose sums move in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(5, 7, 3, stride=(1, 2, 1), padding=(2, 1, 1), dilation=(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool3d(self.conv(x), 4).amin((2, 3, 4))


def test_a_model_is_two_kernels() -> None:
    """The sums with their taps as channels, and the convolution that is left: nothing is copied in between."""
    model, x = Upsampled().eval().requires_grad_(False), torch.randn(2, 5, 13, 11, 9)
    how: dict[str, Any] = {"kernels": "always", "measure": False, "target": torch.device("cuda")}
    folded = "avg_pool(conv_transpose_s(x, w)) = interleave(conv_strided(x, box * w))"
    built = build(model, (x,), {}, mode="always", without=frozenset({folded}), **how)
    sums, rest = sorted(built.program.kernels, key=lambda k: "conv" in k.name)
    assert sums.name == "fused_rangesum" and "conv" in rest.name
    assert "contiguous" not in built.program.source.partition("def forward")[2]
    namespace: dict[str, Any] = {"torch": torch, "F": F}
    exec(sums.reference, namespace)
    torch.testing.assert_close(emulate(sums, x), namespace["reference"](x), rtol=1e-5, atol=1e-6)


GOLDENS = {
    "ranges_lines": lambda: sums(inp(64, 512, 1023), {2: pooled(1023, 7, 7, 3)}, F32),
    "ranges_windows": lambda: sums(inp(16, 32, 512, 512), {2: pooled(512, 16, 16, 3), 3: pooled(512, 16, 16, 3)}, F32),
    "ranges_volumes": lambda: channels(
        sums(inp(16, 94, 31, 30, 23), {2: pooled(31, 7, 7, 3), 3: pooled(30, 4, 4, 3), 4: pooled(23, 7, 7)}, F32), 0, 3
    ),
}  # fmt: skip


def default(name: str) -> Kernel:
    """The kernel that is made without measuring."""
    r = parsed((CASES | GOLDENS)[name]())
    return kernel(r, cuts(r, 1504, 1)[0], "fused_rangesum")


def narrow(name: str) -> Kernel:
    """The kernel of fewer threads."""
    r = parsed(CASES[name]())
    cut = of_fewer_threads(r, cuts(r, 1504, 1)[0])
    assert cut is not None
    return kernel(r, cut, "fused_rangesum")


@pytest.mark.parametrize("name", GOLDENS)
def test_reads_as_it_did(name: str) -> None:
    path = GOLDEN / f"{name}.cu"
    assert default(name).source == path.read_text(), f"write the text to {path} if it is meant to change"


COMPILED = [*GOLDENS, "planes of bf16", "planes in float64", "planes, mixed", "planes, strided", "of squares"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills(name: str, arch: str) -> None:
    compiles(default(name), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_fewer_threads_compile_without_spills(arch: str) -> None:
    compiles(narrow("planes, strided"), arch)


def compiles(made: Kernel, arch: str) -> None:
    taken = nvrtc.resources(nvrtc.compile(made.source, arch))
    assert taken.keys() == {"fused_rangesum"} and all(entry.stack == 0 for entry in taken.values()), taken
