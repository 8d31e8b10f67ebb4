"""Scans: the generated CUDA C++ runs on the CPU, and is compared with the same graph in float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import accumulate
from math import inf, nan
from pathlib import Path
from random import Random

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
from fusewright.schedule.group import Group
from fusewright.schedule.scan import Scan, parse
from fusewright.schedule.scan_moves import NEUTRAL
from tests.capture.harness import Fn

GOLDEN = Path(__file__).parents[2] / "golden"
ORDERS = ("forward", "reverse", "shuffled")


def scanned(kind: ops.ScanKind, x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    return make(ops.Scan(kind, dim % x.ndim, dtype), x)


def sums(x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    return scanned("sum", x, dim, dtype)


def flip(x: Node, dim: int) -> Node:
    return make(ops.Flip((dim,)), x)


def part(x: Node, dim: int, start: int, stop: int) -> Node:
    """x[start:stop] along `dim`, from the end where `stop` is negative or none."""
    return make(ops.Slice(dim, start, stop + x.shape[dim] if stop <= 0 else stop), x)


def joined(x: Node, dim: int, value: float, *, last: bool = False) -> Node:
    """x behind one such number along `dim`, or ahead of it."""
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    full = make(ops.Expand(shape), make(ops.Full((), value, x.dtype, x.device)))
    return make(ops.Cat(dim), x, full) if last else make(ops.Cat(dim), full, x)


def shaped(x: Node, *shape: int) -> Node:
    return make(ops.Reshape(shape), x)


def padded(x: Node, dim: int, left: int, right: int = 0, value: float = 0.0) -> Node:
    return make(ops.Pad(((dim, left, right),), "constant", value), x)


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
            few = 64 if root.dtype == F64 else 4  # what it is compared with is rounded, too
            assert (got.double() - want)[~special].abs().max() <= scale * few * torch.finfo(root.dtype).eps


def framed(x: Node, y: Node, dim: int) -> Node:
    """Functions ahead of prefix sums and behind them, of a tensor of the same shape and one of columns."""
    ahead = pointwise("tanh", pointwise("add", x, inp(2, x.shape[-1])))
    return pointwise("relu", pointwise("add", sums(ahead, dim), pointwise("mul", y, 0.5)))


CASES: dict[str, tuple[Callable[[], Node], tuple[int, ...]]] = {
    "rows": (lambda: pointwise("relu", sums(inp(0, 5, 96), 1)), (8, 32)),
    "rows, no vector": (lambda: sums(inp(0, 2, 3, 101), 2), (4, 32)),
    "short rows": (lambda: sums(inp(0, 70, 4), 1), (1,)),
    "short rows, no vector": (lambda: flip(sums(flip(inp(0, 5, 7), 1), 1), 1), (2,)),
    "short columns": (lambda: sums(inp(0, 3, 5, 8), 1), (1,)),
    "long rows": (lambda: sums(inp(0, 3, 5000), 1), (32, 128, 512)),
    "long rows, no vector": (lambda: sums(inp(0, 3, 3001), 1), (128,)),
    "framed rows": (lambda: framed(inp(0, 4, 260), inp(1, 4, 260), 1), (16,)),
    "framed columns": (lambda: framed(inp(0, 2, 70, 3, 8), inp(1, 2, 70, 3, 8), 1), (1, 4, 16)),
    "columns, no vector": (lambda: sums(inp(0, 2, 70, 5), 1), (1, 4)),
    "the first dimension": (lambda: sums(inp(0, 67, 12), 0), (4,)),
    "columns of bfloat16": (lambda: framed(inp(0, 2, 40, 16, dtype=BF16), inp(1, 2, 40, 16, dtype=BF16), 1), (4,)),
    "outer products": (lambda: sums(pointwise("mul", inp(0, 2, 20, 5, 1), inp(1, 2, 20, 1, 8)), 1), (1, 4)),
    "outer products, no vector": (lambda: sums(pointwise("mul", inp(0, 2, 9, 5, 1), inp(1, 2, 9, 1, 7)), 1), (1,)),
    "rows of columns and rows": (lambda: sums(pointwise("add", inp(0, 5, 1), inp(1, 1, 96)), 1), (8,)),
    "a mask": (lambda: sums(pointwise("gt", inp(0, 4, 64), 0.0), 1, F32), (4,)),
    "wider": (lambda: cast(sums(inp(0, 4, 64, dtype=F16), 1, F64), F32), (4,)),
}  # fmt: skip


def transmittance(x: Node, dim: int) -> Node:
    """What of light is left behind each of several layers, times what the layer takes of it."""
    a = pointwise("sub", 1.0, pointwise("exp", pointwise("neg", pointwise("abs", x))))
    left = joined(pointwise("add", pointwise("sub", 1.0, a), 1e-10), dim, 1.0)
    return pointwise("mul", a, part(scanned("prod", left, dim), dim, 0, -1))


X, Y = inp(0, 3, 200), inp(0, 2, 50, 12)
DIRECTIONS: dict[str, tuple[Node, tuple[int, ...], tuple[bool, bool, bool, int]]] = {
    "from the end": (flip(sums(flip(X, 1), 1), 1), (16, 64), (True, True, False, 0)),
    "columns from the end": (flip(sums(flip(Y, 1), 1), 1), (1, 4), (True, True, False, 0)),
    "flipped before": (
        pointwise("relu", sums(pointwise("mul", flip(X, 1), inp(1, 3, 1)), 1)), (16,), (True, False, False, 0)),
    "flipped behind": (flip(pointwise("relu", sums(X, 1)), 1), (16,), (False, True, False, 0)),
    "two that are flipped": (
        sums(pointwise("mul", flip(X, 1), flip(inp(1, 3, 200), 1)), 1), (8,), (True, False, False, 0)),
    "flipped, no vector": (flip(sums(flip(inp(0, 3, 101), 1), 1), 1), (8,), (True, True, False, 0)),
    "ahead": (part(sums(joined(X, 1, 0.0), 1), 1, 0, -1), (8, 64), (False, False, True, 0)),
    "ahead of what is cut": (sums(joined(part(X, 1, 0, -1), 1, 0.0), 1), (8, 64), (False, False, True, 0)),
    "ahead, cut first": (sums(part(joined(X, 1, 0.0), 1, 0, -1), 1), (8, 64), (False, False, True, 0)),
    "ahead, padded": (sums(part(padded(X, 1, 1), 1, 0, -1), 1), (8, 64), (False, False, True, 0)),
    "ahead, moved behind": (joined(part(sums(X, 1), 1, 0, -1), 1, 0.0), (8, 64), (False, False, True, 0)),
    "ahead, padded behind": (padded(part(sums(X, 1), 1, 0, -1), 1, 1), (8, 64), (False, False, True, 0)),
    "one more": (sums(joined(X, 1, 0.0), 1), (8, 64), (False, False, True, 1)),
    "one more behind": (padded(sums(X, 1), 1, 1), (8, 64), (False, False, True, 1)),
    "one more column": (sums(joined(Y, 1, 0.0), 1), (1, 4), (False, False, True, 1)),
    "one more from the end": (
        flip(sums(flip(joined(X, 1, 0.0, last=True), 1), 1), 1), (8, 64), (True, True, True, 1)),
    "behind": (flip(sums(flip(joined(part(X, 1, 1, 0), 1, 0.0, last=True), 1), 1), 1), (8,), (True, True, True, 0)),
    "not itself any more": (part(sums(joined(X, 1, 0.0), 1), 1, 1, 0), (8,), (False, False, False, 0)),
    "the first ones": (pointwise("relu", part(sums(X, 1), 1, 0, 72)), (8,), (False, False, False, 0)),
    "the first ones of some": (sums(part(X, 1, 8, 80), 1), (8,), (False, False, False, 0)),
    "the last ones": (part(flip(sums(flip(X, 1), 1), 1), 1, 100, 0), (8,), (True, True, False, 0)),
    "cut with others": (
        part(pointwise("mul", sums(joined(X, 1, 0.0), 1), inp(1, 3, 201)), 1, 0, -1), (8,), (False, False, True, 0)),
    "ahead of differences": (
        sums(joined(pointwise("sub", part(X, 1, 1, 0), part(X, 1, 0, -1)), 1, 0.0), 1), (8,), (False, False, True, 1)),
    "columns ahead": (part(sums(joined(Y, 1, 0.0), 1), 1, 0, -1), (1, 4), (False, False, True, 0)),
    "columns ahead, of the first dimension": (
        part(sums(joined(inp(0, 40, 12), 0, 0.0), 0), 0, 0, -1), (1, 4), (False, False, True, 0)),
    "apart": (sums(shaped(part(inp(0, 3, 40, 4), 2, 3, 4), 3, 40), 1), (4, 16), (False, False, False, 0)),
    "columns apart": (
        sums(shaped(part(inp(0, 2, 40, 12, 3), 3, 1, 2), 2, 40, 12), 1), (1, 4), (False, False, False, 0)),
    "one of several heads": (
        pointwise("mul", sums(shaped(part(inp(0, 2, 4, 40), 1, 1, 2), 2, 40), 1), inp(1, 2, 40)),
        (4,), (False, False, False, 0)),
    "apart and from the end": (
        flip(sums(flip(shaped(part(inp(0, 3, 40, 4), 2, 3, 4), 3, 40), 1), 1), 1), (4, 16), (True, True, False, 0)),
    "transmittance": (transmittance(X, 1), (8, 64), (False, False, True, 0)),
    "columns of transmittance": (transmittance(Y, 1), (1, 4), (False, False, True, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.sampled
def test_directions(name: str) -> None:
    """Nothing is copied ahead of a scan or behind it: one kernel reads what lies in memory, and writes the result."""
    root, teams, (from_end, to_end, exclusive, spare) = DIRECTIONS[name]
    s = scan_of(root)
    assert all(isinstance(n.op, ops.Input) for n in s.tensors)
    assert (s.from_end, s.to_end, s.exclusive, s.spare) == (from_end, to_end, exclusive, spare)
    check(root, teams=teams, order=ORDERS[zlib.crc32(name.encode()) % 3])


def rendered(x: Node, colours: Node, *, keep: bool = False, kind: str = "sum") -> Node:
    """Features of layers by what is left of light."""
    share = shaped(transmittance(x, 1), *x.shape, 1)
    return make(ops.Reduce(kind, (1,), keep), pointwise("mul", share, pointwise("sigmoid", colours)))


R4 = inp(0, 5, 40, 4)
FOLDED: dict[str, tuple[Node, tuple[int, ...]]] = {
    "a sum": (make(ops.Reduce("sum", (1,)), transmittance(X, 1)), (8, 64)),
    "a mean of what is left": (
        make(ops.Reduce("mean", (1,), True), pointwise("mul", sums(X, 1), inp(1, 3, 200))),
        (8, 128),
    ),
    "no vector": (make(ops.Reduce("sum", (2,)), pointwise("relu", sums(inp(0, 2, 5, 31), 2))), (8,)),
    "from the end": (
        make(ops.Reduce("sum", (1,)), pointwise("mul", flip(sums(flip(X, 1), 1), 1), inp(1, 3, 200))),
        (8,),
    ),
    "features": (rendered(X, inp(1, 3, 200, 3)), (8, 64)),
    "features, kept": (rendered(X, inp(1, 3, 200, 2), keep=True, kind="mean"), (16,)),
    "features beside each other": (rendered(shaped(part(R4, 2, 3, 4), 5, 40), part(R4, 2, 0, 3)), (4, 8)),
    "features of bfloat16": (rendered(inp(0, 3, 64, dtype=BF16), inp(1, 3, 64, 4, dtype=BF16)), (4,)),
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.sampled
def test_sums_of_rows(name: str) -> None:
    """What comes of prefixes is summed where it is computed: one kernel, which reads what lies in memory."""
    root, teams = FOLDED[name]
    s = scan_of(root)
    assert s.folded is not None and all(isinstance(n.op, ops.Input) for n in s.tensors)
    check(root, teams=teams, order=ORDERS[zlib.crc32(name.encode()) % 3])


def drawn(rng: Random) -> Node:
    """Prefixes of what is moved and computed on, moved and computed on."""
    shape = rng.choice([(3, 24), (2, 21), (2, 24, 5), (24, 3)])
    dim, kind = shape.index(max(shape)), rng.choice(["sum", "prod", "max"])
    count = iter(range(9))

    def moved(x: Node) -> Node:
        value = NEUTRAL[kind] if rng.random() < 0.9 else 0.5
        match rng.choice(["flip", "cut", "cut", "cat", "pad", "function", "beside", "none"]):
            case "flip":
                return flip(x, rng.choice([dim, dim, dim, 0]))
            case "cut" if x.shape[dim] > 12:
                start = rng.choice([0, 0, 1])
                return part(x, dim, start, -rng.choice([0, 1, 1, 4]))
            case "cat":
                return joined(x, dim, value, last=rng.random() < 0.4)
            case "pad":
                return padded(x, dim, *rng.choice([(1, 0), (0, 1), (1, 1)]), value)
            case "function":
                return pointwise("relu", pointwise("sub", 1.0, pointwise("mul", x, 0.05)))
            case "beside":
                other = inp(next(count), *x.shape)
                return pointwise("add", pointwise("mul", x, 0.25), rng.choice([other, flip(other, dim)]))
        return x

    root = inp(next(count), *shape)
    for _ in range(rng.randrange(4)):
        root = moved(root)
    root = scanned(kind, root, dim)
    for _ in range(rng.randrange(4)):
        root = moved(root)
    return root


@pytest.mark.parametrize("block", range(4))
@pytest.mark.sampled
def test_random_moves(block: int) -> None:
    """Whatever is found to be one kernel computes what the graph says; many of these are, others by shorter ways."""
    rng, found = Random(block), 0
    for _ in range(60):
        root = drawn(rng)
        s = parse(root, Graph((), (root,)).users())
        if isinstance(s, Scan) and set(s.tensors) == {
            n for n in Graph((), (root,)).nodes() if isinstance(n.op, ops.Input)
        }:
            found += 1
            check(root, order=ORDERS[found % 3])
    assert found >= 15


KINDS: tuple[ops.ScanKind, ...] = ("sum", "prod", "max", "min", "logsumexp")


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_kinds(kind: ops.ScanKind, dtype: torch.dtype) -> None:
    """What joins elements, of rows by a warp and by a block, and of columns."""
    for x, teams in ((inp(0, 3, 520, dtype=dtype), (8, 128)), (inp(0, 2, 40, 5, dtype=dtype), (1, 4))):
        given = (1 + random(x, 3) / 8).to(dtype) if kind == "prod" else random(x, 3)
        check(scanned(kind, x, 1), {x: given}, teams)
        check(flip(scanned(kind, flip(x, 1), 1), 1), {x: given}, teams[:1], order="shuffled")


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    root, teams = CASES[name]
    check(root(), teams=teams, order=ORDERS[zlib.crc32(name.encode()) % 3])


@pytest.mark.parametrize(("shape", "team"), [((3, 1030), 32), ((3, 1030, 4), 8)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_special_values(kind: ops.ScanKind, shape: tuple[int, ...], team: int) -> None:
    """All behind a NaN is NaN, and so is what follows infinities of both signs, or an infinite product of 0; nothing
    else is."""
    x = torch.randn(shape) if kind != "prod" else torch.rand(shape) / 8 + 0.9
    flat = x.view(3, 1030, -1)
    flat[0, 700], flat[1, 3], flat[1, 900], flat[2, 1029] = nan, -inf, inf, nan
    if kind == "prod":
        flat[0, 200], flat[1, 800] = 0, 0
    root = scanned(kind, inp(0, *shape), 1)
    check(root, {root.arg(0): x}, (team,))
    root = part(scanned(kind, joined(inp(0, *shape), 1, NEUTRAL[kind]), 1), 1, 0, -1)
    check(root, {inp(0, *shape): x}, (team,))


OVERFLOWING: dict[str, tuple[tuple[int, ...], int]] = {
    "by a warp": ((6, 520), 8),
    "no vector": ((6, 517), 32),
    "by a block": ((6, 3001), 128),
    "columns": ((2, 520, 3), 1),
    "columns that are shared": ((1, 520, 8), 8),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", OVERFLOWING)
@pytest.mark.sampled
def test_sums_that_are_no_prefixes_may_overflow(name: str, dtype: torch.dtype) -> None:
    """Three quarters of the largest number twice, which is as much below zero before: their sum leaves float32's range,
    no prefix does.  Prefixes ahead of them are as exact as ever."""
    shape, team = OVERFLOWING[name]
    x, large = torch.randn(shape), 0.75 * torch.finfo(F32).max
    places = (0, 3, 255, 300, 510, 511, 100, 128)
    rows = [row for part in x for row in (part.unbind(1) if part.ndim > 1 else [part])]
    for row, at in zip(rows, places, strict=False):
        row[at : at + 4] = large * torch.tensor([-1.0, 1, 1, -1])
    root, given = sums(inp(0, *shape, dtype=dtype), 1), x.to(dtype)
    want = given.double().cumsum(1)
    for order in ORDERS:
        got = emulate(kernel(scan_of(root), "fused_test", team=team), given, order=order).double()
        assert got.isfinite().all()
        error = ((got - want).abs() / (want.abs() + 1)).movedim(1, -1).reshape(-1, shape[1])
        for each, at in zip(error, places, strict=False):
            assert not at or each[:at].max() <= 64 * torch.finfo(dtype).eps
    check(root, {root.arg(0): given}, (team,))
    check(flip(sums(flip(root.arg(0), 1), 1), 1), {root.arg(0): given}, (team,))


def test_what_overflows_is_infinite_there() -> None:
    """A prefix beyond the range of float32 is infinite, and those that come back are finite, as they are in float64."""
    x = torch.ones(3, 600)
    x[0, 100:102], x[0, 300:302] = 3e38, -3e38
    got = emulate(kernel(scan_of(sums(inp(0, 3, 600), 1)), "fused_test", team=8), x)
    assert torch.equal(got.isinf(), x.double().cumsum(1).float().isinf()) and not got.isnan().any()
    torch.testing.assert_close(got[1:], x[1:].cumsum(1))


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


SANITIZED: dict[str, tuple[Node, int]] = {
    **{name: (CASES[name][0](), CASES[name][1][0]) for name in ("rows, no vector", "columns, no vector")},
    **{
        name: (DIRECTIONS[name][0], DIRECTIONS[name][1][0])
        for name in ("one more from the end", "one more column", "behind")
    },
    "features beside each other": (FOLDED["features beside each other"][0], 4),
}


@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers_find_nothing(name: str) -> None:
    root, team = SANITIZED[name]
    s = scan_of(root)
    given = [random(n, i) for i, n in enumerate(s.tensors)]
    emulate(kernel(s, "fused_test", team=team), *given, order="reverse", sanitize=True)


def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes find the kernel, which computes what the model does."""
    model = Fn(lambda x: torch.relu(torch.cumsum(x * 2, 1)) + 1)
    x = torch.randn(6, 70)
    built = built_for_a_gpu(monkeypatch, model, x)
    assert [(c.family, c.path) for c in built.choices] == [("scan", "generated")]
    torch.testing.assert_close(emulated(built, model, x), model(x))


def test_a_model_that_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that grow until they overflow, and are divided by as much: what is finite where one term after the other
    is added in float32, as eager does it on GPUs, is finite."""

    def function(x: Tensor) -> Tensor:
        a = torch.cumsum(-torch.nn.functional.softplus(x), 1)
        return torch.exp(a) * torch.cumsum(x * torch.exp(-a), 1)

    torch.manual_seed(0)
    model, x = Fn(function), torch.randn(2, 160, 512)
    built = built_for_a_gpu(monkeypatch, model, x)
    assert [(c.family, c.path) for c in built.choices] == [("scan", "generated")] * 2
    got = emulated(built, model, x)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cumsum", lambda x, dim: torch.stack(list(accumulate(x.unbind(dim))), dim))
        eager = function(x)
    finite = eager.isfinite()
    assert not finite.all() and got[finite].isfinite().all()
    assert (got - function(x.double()))[finite].abs().max() <= 1e-4


def test_left_to_others_on_a_cpu() -> None:
    root = sums(inp(0, 5, 96), 1)
    s = scan_of(root)
    assert cpu_options(Group("scan", s, root, s.tensors), {}, {}) == []


Z = inp(0, 5, 96)
REFUSED: dict[str, tuple[Node, str]] = {
    "no prefix sums": (pointwise("tanh", Z), "follows no prefixes"),
    "short rows": (sums(inp(0, 5, 3), 1), "rows of 3 elements are not scanned"),
    "one row": (sums(inp(0, 1, 5000), 1), "has one row"),
    "whole numbers": (sums(inp(0, 5, 96, dtype=torch.int64), 1), "is no floating-point value"),
    "rounded ahead": (sums(Z, 1, BF16), "is rounded to a narrower type on the way"),
    "rounded behind": (cast(cast(sums(Z, 1), BF16), F32), "is rounded to a narrower type on the way"),
    "two ahead": (sums(joined(joined(Z, 1, 0.0), 1, 0.0), 1), "asks for other prefixes than those from an end on"),
    "prefixes that are read in two ways": (
        pointwise("mul", part(W := sums(Z, 1), 1, 0, -1), part(W, 1, 1, 0)), "is read in two ways"),
    "many features": (rendered(Z, inp(1, 5, 96, 9)), "has 9 features for each element"),
    "a sum over other rows": (make(ops.Reduce("sum", (0,)), pointwise("relu", sums(Z, 1))), "is no sum over rows"),
    "the greatest of rows": (make(ops.Reduce("max", (1,)), sums(Z, 1)), "is no sum over rows"),
    "rows that are repeated": (
        pointwise("add", sums(inp(0, 2, 1, 96), 2), inp(1, 2, 5, 1)), "has rows that are repeated"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    root, reason = REFUSED[name]
    found = parse(root, Graph((), (root,)).users())
    assert isinstance(found, str) and reason in found


@pytest.mark.parametrize(
    "moved", [joined(Z, 1, 1.0), padded(Z, 1, 1, 1), part(Z, 1, 2, 0), flip(Z, 0), joined(Z, 1, 0.0, last=True)]
)
def test_other_moves_are_of_what_is_in_memory(moved: Node) -> None:
    """Ones ahead of a sum, more behind the end, a cut, other dimensions: copies, or read where they lie."""
    s = scan_of(sums(moved, 1))
    assert not (s.exclusive or s.from_end or s.to_end)
    assert s.tensors == (Z if isinstance(moved.op, ops.Slice) else moved,)
    if s.tensors == (Z,):
        check(s.root)


def test_what_others_use_is_in_memory() -> None:
    """A function that others use, and prefix sums that are used beside what follows them; what is read for prefix sums
    and beside them alone is computed twice."""
    x = pointwise("tanh", Z)
    root = pointwise("mul", sums(x, 1), x)
    assert scan_of(root).tensors == (Z,)
    found = parse(root, Graph((), (root, x)).users())
    assert isinstance(found, Scan) and found.tensors == (x,)
    total = sums(Z, 1)
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
    "transmittance": lambda: transmittance(inp(0, 512, 8192), 1),
    "products from the end": lambda: flip(scanned("prod", flip(inp(0, 512, 8192, dtype=F16), 1), 1), 1),
    "logarithms": lambda: scanned("logsumexp", inp(0, 512, 8192), 1),
    "features": lambda: rendered(inp(0, 65536, 128), part(inp(1, 65536, 128, 4), 2, 0, 3)),
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.sampled
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
