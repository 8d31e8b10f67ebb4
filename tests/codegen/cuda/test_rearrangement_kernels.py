"""Rearrangements: the generated CUDA C++ runs on the CPU, and is compared with the same graph in float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import inf, nan

import pytest
import sympy
import torch
from codegen.cuda.rearrangement_cases import (
    CASES,
    X,
    again,
    along,
    cat,
    folded,
    interpolated,
    padded,
    pixels,
    shuffled,
    taken,
    turned,
    unfolded,
    upsampled,
    windows,
)
from codegen.cuda.test_stream_kernels import BF16, CPU, F16, F64, GOLDEN, graph_of, inp, random, reference
from emulation.emulate import emulate
from torch import Tensor

from fusewright.codegen.cpu import options as cpu_options
from fusewright.codegen.cuda import stacked_rows
from fusewright.codegen.cuda.rearrangement import kernel, options
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.few_elements import of_few
from fusewright.schedule.group import Group
from fusewright.schedule.rearrangement import Rearrangement, parse

ORDERS = ("forward", "reverse", "shuffled")


def found(root: Node) -> Rearrangement:
    r = parse(root, graph_of(root).users())
    assert isinstance(r, Rearrangement), r
    return r


def check(root: Node, tensors: dict[Node, Tensor] | None = None, order: str = "forward") -> list[Kernel]:
    """All ways to share elements out, against the same graph in float64."""
    r = found(root)
    given = tensors or {n: random(n, i) for i, n in enumerate(graph_of(root).inputs)}
    kernels = [kernel(r, "fused_test", **option) for option in options(r)]
    assert kernels
    kernels += [stacked_rows.kernel(r, "fused_test", **option) for option in stacked_rows.options(r)]
    want = reference(root, given)
    for made in kernels:
        got = emulate(made, *(given[n] for n in r.tensors), order=order)
        assert got.dtype == root.dtype
        torch.testing.assert_close(got.double(), want, rtol=4 * torch.finfo(root.dtype).eps, atol=1e-6, equal_nan=True)
    return kernels


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_case(name: str) -> None:
    check(CASES[name](), order=ORDERS[zlib.crc32(name.encode()) % 3])


TYPED: dict[str, Callable[[torch.dtype], Node]] = {
    "shuffled": lambda t: pointwise("tanh", shuffled(inp(0, 2, 8, 4, 8, dtype=t), 4)),
    "in a row": lambda t: cat(1, pointwise("exp", inp(0, 5, 16, dtype=t)), padded(inp(1, 5, 5, dtype=t), (1, 1, 2))),
    "upsampled": lambda t: upsampled(inp(0, 2, 3, 4, 8, dtype=t), 2, 2),
    "frames": lambda t: pointwise("tanh", along(inp(0, 2, 50, dtype=t), 1, 8, 3)),
    "unfolded": lambda t: pointwise("tanh", unfolded(inp(0, 2, 3, 5, 8, dtype=t), (3, 3), (1, 1), (1, 1))),
    "folded": lambda t: folded(inp(0, 2, 27, 40, dtype=t), (5, 8), (3, 3), (1, 1), (1, 1)),
    "interpolated by cubes": lambda t: interpolated(inp(0, 2, 3, 4, 8, dtype=t), 12, 16, kind="cubic"),
    "interpolated": lambda t: interpolated(pointwise("tanh", inp(0, 2, 3, 4, 8, dtype=t)), 12, 16),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
@pytest.mark.parametrize("name", TYPED)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    check(TYPED[name](dtype))


def test_elements_that_lie_side_by_side_are_loaded_together() -> None:
    (four, one) = [
        kernel(found(CASES["channels shuffled"]()), "fused_test", **o).source for o in ({"values": 4}, {"values": 1})
    ]
    assert four.count("load<VALUES>(d.x") == 1 and "d.x[" not in four
    assert one.count("d.x[") == 1 and "load<VALUES>(d.x" not in one
    assert options(found(CASES["parts of odd lengths"]())) == [{"values": 1}]


def test_neighbours_of_different_parts_are_computed_by_themselves() -> None:
    source = kernel(found(turned(inp(0, 2, 3, 4, 16), inp(1, 4, 8), inp(2, 4, 8))), "fused_test", values=4).source
    assert "value[e] = element(d, i + e);" in source


def test_a_thread_computes_rows_of_few_elements() -> None:
    """Of quaternions, rotations: what the elements of a row have in common is computed once."""
    x = inp(0, 300, 4)
    length = make(ops.Reduce("norm", (1,), keepdim=True), x)
    quaternion = pointwise("div", x, pointwise("clamp_min", length, params=(1e-12,)))
    w, i, j, k = (taken(quaternion, 1, n, n + 1) for n in range(4))
    two = [pointwise("mul", *pair) for pair in ((i, j), (k, w), (i, k), (j, w))]
    parts = pointwise("sub", two[0], two[1]), pointwise("add", two[2], two[3]), pointwise("add", two[0], two[1])
    root = cat(1, *parts)
    (written,) = of_few(graph_of(root)).outputs
    assert isinstance(written, Node)
    r = found(written)
    assert stacked_rows.options(r) == [{"row": 3}]
    check(written, {x: random(x, 0)})
    source = stacked_rows.kernel(r, "fused_test", row=3).source
    assert (source.count("= widened("), source.count("sqrt("), source.count(" / ")) == (4, 1, 4)
    t = torch.zeros(300, 4)  # whose length is none
    assert not emulate(stacked_rows.kernel(r, "fused_test", row=3), t).any()


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, F64], ids=str)
def test_rows_of_other_batches(count: int, dtype: torch.dtype) -> None:
    b = sympy.Symbol("B", integer=True, positive=True)
    x = make(ops.Input((b, 3), dtype, CPU, "x", 0))
    one, other = taken(x, 1, 0, 1), taken(x, 1, 1, 3)
    root = cat(1, pointwise("neg", one), other, pointwise("exp", other))
    t = torch.randn(count, 3).to(dtype)
    want = torch.cat((-t[:, :1], t[:, 1:], t[:, 1:].double().exp().to(dtype)), 1)
    made = stacked_rows.kernel(found(root), "fused_test", row=5)
    torch.testing.assert_close(emulate(made, t), want)


def test_one_kernel_serves_other_batches() -> None:
    b = sympy.Symbol("B", integer=True, positive=True)
    x = make(ops.Input((b, 8, 4, 8), torch.float32, CPU, "x", 0))
    for root, eager in (
        (pointwise("relu", shuffled(x, 4)), lambda t: torch.nn.functional.channel_shuffle(t, 4).relu()),
        (
            pointwise("neg", unfolded(x, (3, 3), (1, 1), (1, 1))),
            lambda t: -torch.nn.functional.unfold(t, 3, padding=1),
        ),
        (pixels(pointwise("relu", x), 2), lambda t: torch.nn.functional.pixel_shuffle(t.relu(), 2)),
    ):
        made = kernel(found(root), "fused_test", values=4)
        for n in (1, 3):
            t = torch.randn(n, 8, 4, 8)
            torch.testing.assert_close(emulate(made, t), eager(t))


def test_samples_may_become_rows() -> None:
    """A first length that is a multiple of the batch's."""
    b = sympy.Symbol("B", integer=True, positive=True)
    x = make(ops.Input((b, 4, 6, 12), torch.float32, CPU, "x", 0))
    rolled = make(ops.Roll(((1, 1),)), x)
    apart = make(ops.Reshape((b, 2, 2, 3, 2, 12)), rolled)
    root = make(ops.Reshape((6 * b, 4, 12)), make(ops.Permute((0, 1, 3, 2, 4, 5)), apart))
    t = torch.randn(3, 4, 6, 12)
    want = t.roll(1, 1).reshape(3, 2, 2, 3, 2, 12).permute(0, 1, 3, 2, 4, 5).reshape(18, 4, 12)
    torch.testing.assert_close(emulate(kernel(found(root), "fused_test", values=4), t), want, rtol=0, atol=0)


@pytest.mark.parametrize("value", [nan, inf, -inf], ids=str)
def test_special_values(value: float) -> None:
    x = random(X, 0)
    x.view(-1)[5] = x.view(-1)[-40] = value
    for name in ("channels shuffled", "pixels shuffled", "unfolded", "unfolded without padding"):
        check(CASES[name](), {X: x})


@pytest.mark.parametrize("value", [nan, inf], ids=str)
def test_nothing_comes_of_windows_that_do_not_reach_an_element(value: float) -> None:
    root = CASES["unfolded and folded"]()
    w = next(n for n in graph_of(root).inputs if n is not X)
    given = {X: random(X, 0), w: random(w, 1)}
    given[w][::9] = value  # of the first tap, which reaches neither the last row nor the last column
    for made in check(root, given):
        got = emulate(made, *(given[n] for n in found(root).tensors))
        assert got[..., -1, :].isfinite().all() and got[..., -1].isfinite().all()
        assert not got[..., :-1, :-1].isfinite().any()


def test_what_windows_share_is_read_once() -> None:
    source = kernel(found(CASES["unfolded and folded"]()), "fused_test", values=1).source
    assert source.count("d.x[") == 1 and source.count("d.p1[") == 9
    assert "const count_t k" not in source  # which tap it is, and of which window, is a matter of constants


def test_columns_are_added_up_as_on_a_gpu() -> None:
    """Those of the first windows first, from 0 on."""
    columns = inp(0, 1, 9, 36)
    made = kernel(found(folded(columns, (6, 6), (3, 3), (1, 1), (1, 1))), "fused_test", values=1)
    x = random(columns, 0) * 10.0 ** torch.randint(-6, 7, (1, 9, 36))
    want = torch.zeros(8, 8)
    for window in range(36):
        row, column = divmod(window, 6)
        want[row : row + 3, column : column + 3] += x[0, :, window].view(3, 3)
    assert torch.equal(emulate(made, x)[0, 0], want[1:-1, 1:-1])
    assert not torch.equal(torch.nn.functional.fold(x, 6, 3, padding=1)[0, 0], want[1:-1, 1:-1])  # as on a CPU


@pytest.mark.parametrize("name", [
    "parts of odd lengths", "rolled along rows", "padded by little", "upsampled", "frames, odd", "unfolded, in steps",
    "folded, in steps", "folded, steps and taps of no common factor", "unfolded and folded",
    "pooled twice", "pooled rows", "every other, odd rows", "interpolated by cubes to odd lengths",
])  # fmt: skip
def test_nothing_is_read_or_written_outside(name: str) -> None:
    r = found(CASES[name]())
    for option in options(r):
        emulate(kernel(r, "fused_test", **option), *(random(n, i) for i, n in enumerate(r.tensors)), sanitize=True)


def test_left_to_aten_on_a_cpu() -> None:
    root = CASES["channels shuffled"]()
    r = found(root)
    assert cpu_options(Group("rearrangement", r, root, r.tensors), {}, {}) == []


LARGE: dict[str, Callable[[], Node]] = {
    "shuffled": lambda: pointwise("relu", shuffled(inp(0, 64, 128, 56, 56), 4)),
    "windows": lambda: windows(inp(0, 64, 56, 56, 96, dtype=BF16), 7),
    "rotary": lambda: turned(inp(0, 16, 16, 1024, 64), inp(1, 1024, 32), inp(2, 1024, 32)),
    "windows again": lambda: again(inp(0, 16, 64, 64, 64), (3, 3), (1, 1), (1, 1)),
    "patches": lambda: folded(inp(0, 16, 768, 196, dtype=BF16), (224, 224), (16, 16), (1, 1), (0, 0), (16, 16)),
    "parts": lambda: cat(
        1,
        *(pointwise("silu", taken(inp(k, 32, 80, 28, 28), 1, k, 70)) for k in range(6)),
        upsampled(inp(6, 32, 9, 14, 14), 2, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", LARGE)
def test_compiles_without_spills(name: str, arch: str) -> None:
    r = found(LARGE[name]())
    for option in options(r):
        taken_ = nvrtc.resources(nvrtc.compile(kernel(r, "fused_test", **option).source, arch)).values()
        assert all(each.stack == 0 for each in taken_), option


GOLDENS: dict[str, tuple[Callable[[], Node], dict[str, int]]] = {
    "rearrangement_parts": (CASES["functions in a row"], {"values": 4}),
    "rearrangement_turned": (CASES["turned"], {"tile": 32}),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    root, option = GOLDENS[name]
    assert kernel(found(root()), "fused_cat", **option).source == (GOLDEN / f"{name}.cu").read_text()
