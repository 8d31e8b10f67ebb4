"""Streams over pairs: rows that meet rows, each pair reduced from registers."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from codegen.cuda.test_stream_kernels import BF16, F16, F64, GOLDEN, inp, random, reference, stream_of
from emulation.emulate import ORDERS, emulate
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

from fusewright.codegen.cuda import pairs
from fusewright.ir import ops
from fusewright.ir.build import pointwise as pw
from fusewright.ir.node import Node, make
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc


def fold(x: Node, kind: str, dim: int, keepdim: bool = False) -> Node:
    return make(ops.Reduce(kind, (dim,), keepdim), x)


def distances(n: int = 20, m: int = 37, k: int = 21, dtype: torch.dtype = torch.float32) -> Node:
    return pw("sub", inp(0, n, 1, k, dtype=dtype), inp(1, m, k, dtype=dtype))


def squares(x: Node) -> Node:
    return fold(pw("mul", x, x), "sum", x.ndim - 1)


CASES: dict[str, Callable[[], Node]] = {
    "squares": lambda: squares(distances()),
    "wide": lambda: squares(distances(33, 64, 32)),
    "short rows": lambda: squares(distances(40, 40, 3)),
    "two elements": lambda: squares(distances(18, 16, 2)),
    "norm": lambda: fold(distances(), "norm", 2),
    "mean": lambda: fold(pw("abs", distances()), "mean", 2),
    "max": lambda: fold(distances(), "max", 2),
    "min kept": lambda: fold(distances(16, 32, 9), "min", 2, keepdim=True),
    "logsumexp": lambda: fold(distances(19, 23, 10), "logsumexp", 2),
    "variance": lambda: fold(distances(19, 23, 10), "var", 2),
    "kernel of distances": lambda: pw("exp", pw("mul", squares(distances()), -0.5)),
    "operands behind": lambda: pw("add", pw("mul", squares(distances(20, 36)), inp(2, 36)), inp(3, 20, 1)),
    "an operand for each pair behind": lambda: pw("sub", squares(distances(20, 37)), inp(2, 20, 37)),
    # rows in other orders
    "reduced in the middle": lambda: fold(pw("add", inp(0, 20, 24, 1), inp(1, 24, 37)), "logsumexp", 1),
    "reduced first": lambda: fold(pw("mul", inp(0, 9, 20, 1), inp(1, 9, 1, 37)), "sum", 0),
    "turned": lambda: fold(pw("sub", inp(0, 9, 20, 1), inp(1, 9, 1, 36)), "norm", 0),
    "batches": lambda: squares(pw("sub", inp(0, 3, 20, 1, 8), inp(1, 3, 1, 37, 8))),
    "batches of the one": lambda: squares(pw("sub", inp(0, 2, 3, 20, 1, 8), inp(1, 2, 1, 1, 37, 8))),
    "a batch between": lambda: squares(pw("sub", inp(0, 20, 3, 1, 8), inp(1, 3, 37, 8))),
    # what does not vary along the rows, or is alike for all of them
    "weights": lambda: fold(pw("mul", pw("tanh", distances()), inp(2, 21)), "sum", 2),
    "numbers per row": lambda: fold(pw("mul", pw("add", distances(), inp(2, 20, 1, 1)), inp(3, 37, 1)), "sum", 2),
    "one number": lambda: fold(pw("mul", distances(), inp(2)), "max", 2),
    "a number per batch": lambda: squares(
        pw("mul", pw("sub", inp(0, 3, 20, 1, 8), inp(1, 3, 1, 37, 8)), inp(2, 3, 1, 1, 1))
    ),
    "masks": lambda: fold(pw("where", inp(2, 37, 21, dtype=torch.bool), distances(), 0.0), "sum", 2),
    # one of all pairs of a row
    "nearest": lambda: fold(squares(distances(20, 37)), "min", 1),
    "nearest, wide": lambda: fold(squares(distances(33, 64, 32)), "min", 1, keepdim=True),
    "which is nearest": lambda: fold(squares(distances(20, 37)), "argmin", 1),
    "of batches": lambda: fold(squares(pw("sub", inp(0, 3, 20, 1, 8), inp(1, 3, 1, 37, 8))), "mean", 2),
    "kernel means": lambda: pw("log", fold(pw("exp", pw("neg", squares(distances()))), "sum", 1)),
    "weighted pairs": lambda: fold(pw("mul", squares(distances(20, 37)), inp(2, 20, 37)), "logsumexp", 1),
    "weighted rows": lambda: pw(
        "mul", fold(pw("mul", fold(distances(20, 36), "max", 2), inp(2, 36)), "sum", 1), inp(3, 20)
    ),
    "where pairs differ most": lambda: fold(distances(), "argmax", 2),
    "float64": lambda: squares(distances(dtype=F64)),
    "bfloat16": lambda: squares(distances(dtype=BF16)),
    "float16": lambda: fold(distances(dtype=F16), "max", 2),
    "two types": lambda: fold(pw("mul", inp(0, 20, 1, 12, dtype=BF16), inp(1, 37, 12)), "sum", 2),
}


def built(root: Node) -> Kernel:
    found = pairs.kernel(stream_of(root), "fused_test")
    assert found is not None, "no stream over pairs"
    return found


def check(root: Node, tensors: dict[Node, Tensor] | None = None, order: str = "forward") -> None:
    s, k = stream_of(root), built(root)
    given = tensors or {n: random(n, i) for i, n in enumerate(s.tensors)}
    got = emulate(k, *(given[n] for n in s.tensors), order=order)
    want = reference(root, given)
    assert got.dtype == root.dtype and got.shape == want.shape
    if not root.dtype.is_floating_point:
        assert torch.equal(got.double(), want)
        return
    special = ~want.isfinite()
    torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
    error, scale = (got.double() - want)[~special].abs().max(), want[~special].abs().max()
    assert error <= 8 * torch.finfo(root.dtype).eps * scale, (error, scale)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_pairs(name: str) -> None:
    check(CASES[name](), order=ORDERS[zlib.crc32(name.encode()) % 3])


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_pairs_in_every_order(name: str, order: str) -> None:
    check(CASES[name](), order=order)


def test_what_is_not_finite() -> None:
    root = squares(distances())
    given = {n: random(n, i) for i, n in enumerate(stream_of(root).tensors)}
    x, y = given.values()
    x[3, 0, 4], x[5, 0, 0], y[7, 20] = float("nan"), float("inf"), float("-inf")
    check(root, given)


@pytest.mark.parametrize("n, m", [(1024, 1024), (321, 2050)])
def test_many_pairs(n: int, m: int) -> None:
    """Four by four for each thread."""
    root = squares(distances(n, m, 6))
    assert "EACH = 4" in built(root).source
    check(root)


def test_what_is_no_stream_over_pairs() -> None:
    def found(root: Node) -> Kernel | None:
        return pairs.kernel(stream_of(root), "fused_test")

    assert found(squares(distances(20, 8))) is None  # too few rows
    assert found(squares(pw("mul", distances(), inp(2, 20, 37, 1)))) is None  # a number for each pair
    assert found(fold(inp(0, 20, 37, 21), "sum", 2)) is None
    assert found(fold(pw("mul", inp(0, 20, 37, 21), inp(1, 37, 21)), "sum", 2)) is None
    assert found(fold(pw("mul", inp(0, 20, 1, 1), inp(1, 37, 21)), "sum", 2)) is None  # rows of one element


LARGE: dict[str, Callable[[], Node]] = {
    "squares": lambda: squares(distances(8192, 1024, 32)),
    "squares of float64": lambda: squares(distances(8192, 1024, 32, dtype=F64)),
    "few": lambda: squares(distances(64, 64, 32)),
    "functions": lambda: fold(
        pw("mul", pw("tanh", pw("add", inp(0, 32, 256, 1, 64), inp(1, 32, 1, 256, 64))), inp(2, 64)), "sum", 3
    ),
    "logsumexp": lambda: fold(pw("add", inp(0, 8192, 64, 1), inp(1, 64, 1024)), "logsumexp", 1),
    "logsumexp of few": lambda: fold(pw("add", inp(0, 128, 64, 1), inp(1, 64, 64)), "logsumexp", 1),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", LARGE)
def test_compiles_without_spills(name: str, arch: str) -> None:
    taken = nvrtc.resources(nvrtc.compile(built(LARGE[name]()).source, arch)).values()
    assert all(r.stack == 0 for r in taken), taken


def test_golden() -> None:
    root = pw("exp", pw("mul", squares(distances(8192, 1024, 32)), -0.5))
    found = pairs.kernel(stream_of(root), "fused_sub_mul_sum_mul_exp")
    assert found is not None and found.source == (GOLDEN / "stream_pairs.cu").read_text()


class Nearest(nn.Module):
    """The code nearest to each row, by its number or as which of all codes it is."""

    def __init__(self, one_hot: bool = False) -> None:
        super().__init__()
        self.one_hot, self.codes = one_hot, nn.Parameter(torch.randn(48, 12))

    def forward(self, x: Tensor) -> Tensor:
        found = (x[:, None] - self.codes).square().sum(-1).argmin(-1)
        return F.one_hot(found, 48).float() @ self.codes if self.one_hot else found


@pytest.mark.parametrize("one_hot", [False, True])
def test_models(one_hot: bool) -> None:
    """A sample program is no better, where rows are read once for many; no distance is written."""
    torch.manual_seed(0)
    model, x = Nearest(one_hot), torch.randn(70, 12)
    built = as_on_a_gpu(model, x)
    nearest = next(k for k in built.program.kernels if k.name == "fused_sub_square_sum_argmin")
    assert "pairs(d, out)" in nearest.source and len(nearest.launches) == 1
    torch.testing.assert_close(emulated(built, model, x), model(x))
