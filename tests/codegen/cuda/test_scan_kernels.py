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
from torch import Tensor

from fusewright.codegen.cpu import options as cpu_options
from fusewright.codegen.cuda.scan import kernel, options
from fusewright.ir import ops
from fusewright.ir.build import cast
from fusewright.ir.node import Graph, Node, make
from fusewright.runtime import nvrtc
from fusewright.schedule.groups import Group, cut
from fusewright.schedule.scan import Scan, parse

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
def test_value(name: str) -> None:
    root, teams = CASES[name]
    check(root(), teams=teams, order=ORDERS[zlib.crc32(name.encode()) % 3])
