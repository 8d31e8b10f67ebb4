"""Scans: the generated CUDA C++ runs on the CPU, and is compared with the same graph in float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest
import torch
from codegen.cuda.test_stream_kernels import BF16, F16, F32, F64, inp, pointwise, random, reference
from emulation.emulate import emulate
from gpu_build import built_for_a_gpu, emulated
from torch import Tensor

from fusewright.codegen.cpu import options as cpu_options
from fusewright.codegen.cuda.scan import kernel, options
from fusewright.ir import ops
from fusewright.ir.build import cast
from fusewright.ir.node import Graph, Node, make
from fusewright.runtime import nvrtc
from fusewright.schedule.groups import Group
from fusewright.schedule.scan import Scan, parse
from tests.capture.harness import Fn

GOLDEN = Path(__file__).parents[2] / "golden"
ORDERS = ("forward", "reverse", "shuffled")


def sums(x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    return make(ops.Cumsum(dim % x.ndim, dtype), x)


def scan_of(root: Node) -> Scan:
    found = parse(root, Graph((), (root,)).users())
    assert isinstance(found, Scan), found
    return found


def check(
    root: Node, tensors: dict[Node, Tensor] | None = None, teams: tuple[int, ...] = (), order: str = "forward"
) -> None:
    """The kernels of these teams, or the first ways to share rows out, against the same graph in float64."""
    s = scan_of(root)
    given = tensors or {n: random(n, i) for i, n in enumerate(s.tensors)}
    want = reference(root, given)
    for team in teams or [option["team"] for option in options(s)[:1]]:
        made = kernel(s, "fused_test", team=team)
        got = emulate(made, *(given[n] for n in s.tensors), order=order)
        assert got.dtype == root.dtype and got.shape == want.shape
        special = ~want.isfinite()
        torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
        if not special.all():
            scale = want[~special].abs().max().clamp(min=1e-3)
            assert (got.double() - want)[~special].abs().max() <= scale * 4 * torch.finfo(root.dtype).eps


def framed(x: Node, y: Node, dim: int) -> Node:
    """Functions ahead of prefix sums and behind them, of a tensor of the same shape and one of columns."""
    ahead = pointwise("tanh", pointwise("add", x, inp(2, x.shape[-1])))
    return pointwise("relu", pointwise("add", sums(ahead, dim), pointwise("mul", y, 0.5)))


CASES: dict[str, tuple[Callable[[], Node], tuple[int, ...]]] = {
    "rows": (lambda: pointwise("relu", sums(inp(0, 5, 96), 1)), (8, 32)),
    "rows, no vector": (lambda: sums(inp(0, 2, 3, 101), 2), (4, 32)),
    "long rows": (lambda: sums(inp(0, 3, 5000), 1), (32, 128, 512)),
    "long rows, no vector": (lambda: sums(inp(0, 3, 3001), 1), (128,)),
    "framed rows": (lambda: framed(inp(0, 4, 260), inp(1, 4, 260), 1), (16,)),
    "framed columns": (lambda: framed(inp(0, 2, 70, 3, 8), inp(1, 2, 70, 3, 8), 1), (1, 4, 16)),
    "columns, no vector": (lambda: sums(inp(0, 2, 70, 5), 1), (1, 4)),
    "the first dimension": (lambda: sums(inp(0, 67, 12), 0), (4,)),
    "columns of bfloat16": (lambda: framed(inp(0, 2, 40, 16, dtype=BF16), inp(1, 2, 40, 16, dtype=BF16), 1), (4,)),
    "a mask": (lambda: sums(pointwise("gt", inp(0, 4, 64), 0.0), 1, F32), (4,)),
    "wider": (lambda: cast(sums(inp(0, 4, 64, dtype=F16), 1, F64), F32), (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    root, teams = CASES[name]
    check(root(), teams=teams, order=ORDERS[zlib.crc32(name.encode()) % 3])


@pytest.mark.parametrize(("root", "team"), [(sums(inp(0, 3, 1030), 1), 32), (sums(inp(0, 3, 1030, 4), 1), 8)])
def test_special_values(root: Node, team: int) -> None:
    """All behind a NaN is NaN, and so is what follows infinities of both signs; nothing else is."""
    x = torch.randn(root.shape)
    flat = x.view(3, 1030, -1)
    flat[0, 700], flat[1, 3], flat[1, 900], flat[2, 1029] = nan, -inf, inf, nan
    check(root, {root.arg(0): x}, (team,))


def test_as_exact_as_a_number_can_be() -> None:
    """What lies ahead is carried in double precision: errors do not grow with it."""
    x = 100 + torch.randn(2, 20_000)
    got = emulate(kernel(scan_of(sums(inp(0, 2, 20_000), 1)), "fused_test", team=128), x)
    want = x.double().cumsum(1)
    assert ((got - want).abs() / want).max() <= 2 * torch.finfo(F32).eps


def test_one_kernel_serves_other_batches() -> None:
    made = kernel(scan_of(pointwise("relu", sums(inp(0, 5, 96), 1))), "fused_test", team=8)
    for rows in (1, 31, 70):
        x = torch.randn(rows, 96)
        torch.testing.assert_close(emulate(made, x), x.cumsum(1).relu())


@pytest.mark.parametrize("name", ["rows, no vector", "columns, no vector"])
def test_sanitizers_find_nothing(name: str) -> None:
    root, teams = CASES[name]
    s = scan_of(root())
    given = [random(n, i) for i, n in enumerate(s.tensors)]
    emulate(kernel(s, "fused_test", team=teams[0]), *given, order="reverse", sanitize=True)


def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes find the kernel, which computes what the model does."""
    model = Fn(lambda x: torch.relu(torch.cumsum(x * 2, 1)) + 1)
    x = torch.randn(6, 70)
    built = built_for_a_gpu(monkeypatch, model, x)
    assert [(c.family, c.path) for c in built.choices] == [("scan", "generated")]
    torch.testing.assert_close(emulated(built, model, x), model(x))


def test_left_to_others_on_a_cpu() -> None:
    root = sums(inp(0, 5, 96), 1)
    s = scan_of(root)
    assert cpu_options(Group("scan", s, root, s.tensors), {}, {}) == []


X = inp(0, 5, 96)
REFUSED: dict[str, tuple[Node, str]] = {
    "no prefix sums": (pointwise("tanh", X), "follows no prefix sums"),
    "short rows": (sums(inp(0, 5, 12), 1), "rows of 12 elements are not scanned"),
    "one row": (sums(inp(0, 1, 5000), 1), "has one row"),
    "whole numbers": (sums(inp(0, 5, 96, dtype=torch.int64), 1), "is no floating-point value"),
    "rounded ahead": (sums(X, 1, BF16), "is rounded to a narrower type on the way"),
    "rounded behind": (cast(cast(sums(X, 1), BF16), F32), "is rounded to a narrower type on the way"),
    "rows that are repeated": (sums(pointwise("add", inp(0, 5, 1), inp(1, 1, 96)), 1), "reads nothing as large as it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    root, reason = REFUSED[name]
    found = parse(root, Graph((), (root,)).users())
    assert isinstance(found, str) and reason in found


def test_what_others_use_is_in_memory() -> None:
    """A function that is used beside its prefix sums, and prefix sums that are used beside what follows them."""
    x = pointwise("tanh", X)
    root = pointwise("mul", sums(x, 1), x)
    assert scan_of(root).tensors == (x,)
    total = sums(X, 1)
    root = pointwise("relu", total)
    assert isinstance(parse(root, Graph((), (root, total)).users()), str)


LARGE = {
    "rows": lambda: framed(inp(0, 512, 8192), inp(1, 512, 8192), 1),
    "columns of bfloat16": lambda: framed(
        inp(0, 16, 512, 64, 64, dtype=BF16), inp(1, 16, 512, 64, 64, dtype=BF16), 1
    ),
    "rows of float64": lambda: framed(inp(0, 512, 9000, dtype=F64), inp(1, 512, 9000, dtype=F64), 1),
    "columns": lambda: framed(inp(0, 16, 512, 64, 64), inp(1, 16, 512, 64, 64), 1),
    "rows, no vector": lambda: pointwise("relu", sums(inp(0, 512, 8191), 1)),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", LARGE)
def test_compiles_without_spills(name: str, arch: str) -> None:
    s = scan_of(LARGE[name]())
    for option in options(s):
        taken = nvrtc.resources(nvrtc.compile(kernel(s, "fused_test", **option).source, arch)).values()
        assert all(r.stack == 0 for r in taken), option


GOLDENS = {
    "scan_rows": (lambda: pointwise("relu", sums(inp(0, 4096, 8192), 1)), 512),
    "scan_columns": (lambda: pointwise("mul", sums(inp(0, 8, 512, 256), 1), inp(1, 256)), 8),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    root, team = GOLDENS[name]
    text = kernel(scan_of(root()), "fused_cumsum", team=team).source
    assert text == (GOLDEN / f"{name}.cu").read_text()
