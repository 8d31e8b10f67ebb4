"""Range reductions whose outermost axis is summed last: the generated CUDA C++ runs on the CPU, against float64."""

from __future__ import annotations

import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from emulation.emulate import ORDERS, emulate
from test_range_blocks import F16, F32, F64, P, channels, follow, mixed, pooled
from test_range_kernels import BF16, Slots, expected, inf, inp, nan, parse, parsed, random, sums, whole, windows
from test_range_kernels import _value as value_of

import fusewright.codegen.cuda as cuda
from fusewright.codegen.cuda.ranges_walks import kernel
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node
from fusewright.ir.ops import Slot
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.group import Group
from fusewright.schedule.range_sums import RangeReduction
from fusewright.schedule.range_walks import Walk, Walked, walked, walks

GOLDEN = Path(__file__).parents[2] / "golden"


def cut_windows(n: int, taps: int, pad: int, size: int, stride: int, pad_pool: int) -> Slots:
    """What an average pool with padding sums behind a convolution with padding: its ends cut off windows, then taps."""
    found, length = [], n + 2 * pad - taps + 1
    for begin in range(-pad_pool, length + pad_pool - size + 1, stride):
        low, high = max(begin, 0) - pad, min(begin + size, length) - pad
        for u in range(taps):
            start, stop = max(0, low + u), min(n, high + u)
            found.append(Slot(start, stop, 1, 1 / size) if start < stop else Slot(0, 0, 1, 1 / size))
    return tuple(found)


def sliding(n: int, size: int) -> Slots:
    """A window at every index, also beyond both ends: what sums move through a fully padded convolution become."""
    return pooled(n, size, 1, 1, 1, size)


def volume() -> Node:
    """As random row 10 of seed 3 has it, smaller."""
    slots = {2: cut_windows(14, 5, 1, 2, 2, 1), 3: cut_windows(13, 5, 2, 4, 4, 0), 4: cut_windows(17, 5, 0, 5, 5, 1)}
    return sums(inp(*P, 14, 13, 17), slots, F32)


CASES = {
    "planes": lambda: sums(inp(*P, 29, 23), {2: pooled(29, 2, 2, 3), 3: pooled(23, 5, 4, 2)}, F32),
    "planes, padded": lambda: sums(inp(*P, 14, 14), {2: pooled(14, 3, 1, 1, 1, 1), 3: pooled(14, 3, 1, 1, 1, 1)}, F32),
    "planes, apart": lambda: sums(inp(*P, 40, 18), {2: pooled(40, 3, 5), 3: pooled(18, 3, 1)}, F32),
    "planes, even rows": lambda: sums(inp(*P, 21, 40), {2: sliding(21, 5), 3: pooled(40, 12, 4)}, F32),
    "planes, cut off": lambda: sums(inp(*P, 31, 29), {2: cut_windows(31, 3, 1, 3, 3, 1), 3: sliding(29, 4)}, F32),
    "planes in float64": lambda: sums(inp(*P, 17, 12), {2: pooled(17, 4, 4, 3), 3: pooled(12, 4, 4, 3)}),
    "planes of float64": lambda: sums(inp(*P, 17, 12, dtype=F64), {2: pooled(17, 4, 4, 3), 3: pooled(12, 2, 2)}),
    "planes of bf16": lambda: sums(inp(*P, 31, 18, dtype=BF16), {2: sliding(31, 6), 3: pooled(18, 6, 3)}, F32),
    "planes of fp16": lambda: sums(inp(*P, 31, 18, dtype=F16), {2: sliding(31, 6), 3: pooled(18, 6, 3)}, F16),
    "planes, every second": lambda: sums(
        inp(*P, 30, 25), {2: tuple(Slot(i, i + 5, 2, 0.5) for i in range(26)), 3: whole(25)}, F32
    ),
    "planes of exponentials": lambda: sums(
        pointwise("exp", inp(*P, 20, 21)), {2: sliding(20, 4), 3: pooled(21, 4, 4, 2)}, F32
    ),
    "planes, a group of nothing": lambda: sums(
        inp(*P, 9, 12), {2: sliding(9, 3), 3: (*pooled(12, 3, 3), Slot(0, 0, 1, 1 / 3))}, F32
    ),
    "volumes, middle kept": lambda: sums(inp(*P, 11, 12, 13), {2: sliding(11, 3), 4: pooled(13, 4, 4, 3)}, F32),
    "volumes": lambda: sums(
        inp(*P, 11, 12, 13), {2: pooled(11, 3, 3, 3), 3: pooled(12, 4, 3, 2), 4: pooled(13, 4, 4, 3)}, F32
    ),
    "volumes, sliding": lambda: sums(inp(*P, 9, 10, 11), {2: sliding(9, 5), 3: sliding(10, 5), 4: sliding(11, 5)}, F32),
    "volumes, cut off": volume,
    "volumes, middle irregular": lambda: sums(
        inp(*P, 9, 10, 11),
        {2: sliding(9, 2), 3: (*windows(10, 3), Slot(0, 1, 1, windows(10, 3)[0].scale)), 4: sliding(11, 3)},
        F32,
    ),
    "volumes, moved": lambda: channels(channels(channels(CASES["volumes"](), 0, 3), 1, 2), 2, 3),
    "volumes, cut off and moved": lambda: channels(channels(channels(volume(), 0, 5), 1, 5), 2, 5),
    "volumes, columns moved": lambda: channels(volume(), 2, 5),
}  # fmt: skip

WALKS = [Walk(1, 1, 64), Walk(1, 3, 128), Walk(3, 1, 128)]


def check(root: Node, walk: Walk, x: torch.Tensor | None = None, order: str = "forward") -> Kernel:
    r = parsed(root)
    k = kernel(r, walk, "fused_test")
    x = random(r.x, 1) if x is None else x
    value = value_of(r.value, r.x, x.double())
    got, want = emulate(k, x, order=order), follow(root, value)
    assert got.dtype == root.dtype and got.shape == want.shape
    special = ~want.isfinite()
    torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
    # chains of eight additions and the rounding of what is kept, once per axis; and the result itself
    magnitude, wide = follow(root, value.abs()).abs(), F64 in (r.value.dtype,)
    rounding = torch.finfo(F64 if wide else F32).eps * (1.0 + len(r.axes)) * (1 if r.value is r.x else 3)
    bound = magnitude * rounding + want.abs() * torch.finfo(root.dtype).eps / 2 + 1e-300
    wrong = ((got.double() - want).abs() > bound)[~special]
    assert not wrong.any(), ((got.double() - want).abs() / bound)[~special].max()
    return k


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.sampled
def test_value(name: str, walk: Walk) -> None:
    check(CASES[name](), walk, order=ORDERS[zlib.crc32(name.encode()) % 3])


def drawn(rng: Random) -> Node:
    """Windows of a pool behind a convolution along every axis, some with their taps as channels."""
    shape = [rng.randint(7, 18) for _ in range(rng.choice([2, 3]))]
    table, taps = {}, []
    for dim, n in enumerate(shape, 2):
        size, k = rng.randint(1, 4), rng.choice([1, 2, 3])
        table[dim] = cut_windows(n, k, rng.randint(0, 2), size, rng.choice([1, 2, size + 1]), size // 2)
        taps.append(k)
    root = sums(inp(2, 2, *shape), table, rng.choice([F32, F64]))
    for axis, k in enumerate(taps):
        root = channels(root, axis, k) if k > 1 and rng.random() < 0.5 else root
    return root


@pytest.mark.parametrize("seed", range(8))
def test_random_windows(seed: int) -> None:
    """Drawn until one can be walked along."""
    rng = Random(seed)
    for _ in range(50):
        root, walk = drawn(rng), Walk(rng.choice([1, 2]), rng.choice([1, 3]), rng.choice([32, 96, 160]))
        r = parse(root, lambda node: True)
        if isinstance(r, RangeReduction) and isinstance(walked(r, walk), Walked):
            check(root, walk, order=rng.choice(ORDERS))
            return
    raise AssertionError("nothing that was drawn can be walked along")


SOME = ["planes, cut off", "volumes, sliding", "volumes, cut off and moved"]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("walk", WALKS)
def test_every_order_gives_the_same_bits(name: str, walk: Walk) -> None:
    r = parsed(CASES[name]())
    x, k = random(r.x, 2), kernel(r, walk, "fused_test")
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
    for walk in WALKS:
        check(root, walk, x)


@pytest.mark.parametrize("name", SOME)
def test_nothing_is_read_or_written_beyond(name: str) -> None:
    r = parsed(CASES[name]())
    x = random(r.x, 4)
    emulate(kernel(r, Walk(3, 1, 128), "fused_test"), x, sanitize=True)


@pytest.mark.parametrize("planes", [1, 5])
def test_batch_is_an_argument(planes: int) -> None:
    """One text for every batch."""
    r = parsed(CASES["volumes, sliding"]())
    x = torch.randn(planes, 3, 9, 10, 11)
    got = emulate(kernel(r, WALKS[2], "fused_test"), x)
    torch.testing.assert_close(got, expected(r.root.op, x.double()).float(), rtol=1e-5, atol=1e-6)


FORMS = {
    "groups": ("planes", 0, "constexpr int GROUPS = 13, GROUP_H = 3;"),
    "groups of as many slots as taps, for their places": ("volumes, moved", 0, "GROUP_D = 3;"),
    "nothing shared": ("planes, apart", 0, "constexpr int FRESH = 3, BEFORE = 0;"),
    "several steps": ("volumes, sliding", 0, "constexpr int FRESH = 1, BEFORE = 4;"),
    "parts": ("volumes, sliding", 2, "const int first_group = blockIdx.x % PARTS * PART;"),
    "slices beyond an end": ("volumes, sliding", 0, "unsigned(begin + i) < unsigned(PLANE) ? from_plane"),
    "rows beyond an end": ("volumes, sliding", 0, "// Rows beyond the ends are zeros."),
    "no exponential of what lies beyond": ("planes of exponentials", 0, "value(next[n]) : Sum(0)"),
    "groups unlike others": ("volumes, cut off", 0, "if (group == 0) {"),
    "rows of windows differ": ("volumes, middle irregular", 0, "count[c] = rows.count;"),
    "places": ("volumes, columns moved", 0, "place[c] = place_of(column);"),
}


@pytest.mark.parametrize("name", FORMS)
def test_how_it_is_written(name: str) -> None:
    """The cases above really are of these forms."""
    case, walk, text = FORMS[name]
    assert text in kernel(parsed(CASES[case]()), WALKS[walk], "fused_test").source


REFUSED = {
    "outermost axis of two": lambda: sums(inp(*P, 61), {2: sliding(61, 7)}, F32),
    "several scales": lambda: sums(inp(*P, 25, 33), {2: sliding(25, 3), 3: mixed(33)}, F32),
    "groups of short sums": lambda: sums(inp(*P, 90, 20), {2: pooled(90, 20, 20, 2), 3: sliding(20, 3)}, F32),
    "long sums along its middle": lambda: sums(
        inp(*P, 20, 40, 20), {2: sliding(20, 3), 3: pooled(40, 12, 4), 4: sliding(20, 3)}, F32
    ),
    "too much for a block": lambda: sums(
        inp(*P, 20, 300, 300), {2: sliding(20, 3), 3: sliding(300, 3), 4: sliding(300, 3)}, F32
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_who_does_not_walk(name: str) -> None:
    why = walked(parsed(REFUSED[name]()), WALKS[1])
    assert isinstance(why, str) and name in why


def group_of(r: RangeReduction) -> Group:
    return Group("range reduction", r, r.root if r.stored is None else r.stored, (r.x,))


def large() -> Node:
    """Random row 10 of seed 3: what an average pool behind a convolution becomes, with taps as channels."""
    slots = {2: cut_windows(48, 5, 1, 2, 2, 1), 3: cut_windows(33, 5, 2, 4, 4, 0), 4: cut_windows(37, 5, 0, 5, 5, 1)}
    return channels(channels(channels(sums(inp(64, 42, 48, 33, 37), slots, F32), 0, 5), 1, 5), 2, 5)


def overlapping() -> Node:
    """As random row 29 of seed 2."""
    return sums(inp(8, 83, 52, 51, 49), {2: sliding(52, 5), 3: sliding(51, 5), 4: sliding(49, 5)}, F32)


GOLDENS = {"ranges_walks": large}


@pytest.mark.parametrize("make_root", [large, overlapping])
def test_many_results_are_walked_to(make_root: Any) -> None:
    """A few ways are measured, with the best cuts beside them."""
    r = parsed(make_root())
    found = cuda.options(group_of(r), {}, {})
    assert [next(iter(option)) for option in found] == ["walk"] * 3 + ["cut"] * 2
    w = walked(r, Walk(**found[0]["walk"]))
    assert isinstance(w, Walked) and w.steps * w.family.distance <= w.outer.length + 2 * w.family.read
    assert cuda.generate(group_of(r), "fused_test", found[0], tf32=False).source.count("__syncthreads") == 2


def test_few_results_are_cut() -> None:
    """Where the outermost axis shrinks, it is summed while it is read."""
    slots = {2: pooled(31, 7, 7, 3), 3: pooled(30, 4, 4, 3), 4: pooled(23, 7, 7, 3)}
    found = cuda.options(group_of(parsed(sums(inp(64, 94, 31, 30, 23), slots, F32))), {}, {})
    assert len(found) == 4 and all("cut" in option for option in found)


def test_results_lie_side_by_side() -> None:
    """Neighbouring threads write neighbouring elements, in runs of whole sectors."""
    w = walked(parsed(large()), walks(parsed(large()), 2688, 1)[0])
    assert isinstance(w, Walked)
    run, stride = w.places.places[-1]
    assert stride == 1 and run * 4 % 32 == 0 and all(size * 4 % 32 == 0 for size in (w.places.group, *w.places.within))


def default(name: str) -> Kernel:
    """The kernel that is made without measuring; of a small case, one of few threads."""
    if name in CASES:
        return kernel(parsed(CASES[name]()), WALKS[1], "fused_rangesum")
    r = parsed((GOLDENS | {"overlapping": overlapping})[name]())
    return kernel(r, walks(r, 1504, 1)[0], "fused_rangesum")


@pytest.mark.parametrize("name", GOLDENS)
def test_reads_as_it_did(name: str) -> None:
    path = GOLDEN / f"{name}.cu"
    assert default(name).source == path.read_text(), f"write the text to {path} if it is meant to change"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", [*GOLDENS, "overlapping", "planes of bf16", "planes in float64", "volumes, moved"])
def test_compiles_without_spills(name: str, arch: str) -> None:
    taken = nvrtc.resources(nvrtc.compile(default(name).source, arch))
    assert taken.keys() == {"fused_rangesum"} and all(entry.stack == 0 for entry in taken.values()), taken


def test_no_way_that_is_measured_spills() -> None:
    for make_root in (large, overlapping):
        r = parsed(make_root())
        for walk in walks(r, 2688, 3):
            taken = nvrtc.resources(nvrtc.compile(kernel(r, walk, "fused_rangesum").source, "sm_90"))
            assert taken["fused_rangesum"].stack == 0, (walk, taken)
