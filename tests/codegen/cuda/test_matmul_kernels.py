"""Kernels of float32 matmuls: the generated CUDA C++ runs on the CPU, and is compared with the model in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import sympy
import torch
import torch.nn.functional as F
from emulation.emulate import ORDERS, emulate
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen.cuda import matmul as cuda
from fusewright.ir import ops
from fusewright.ir.build import permute
from fusewright.ir.node import Graph, Node, make
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.matmul import AT_ONCE, CHUNK, COLUMNS, PARTS, Extent, Linear, MatmulTile, match, seconds, tiles
from fusewright.verification.numerics import round_to_tf32

CHAINS: dict[str, Callable[[Tensor, nn.Module, Tensor], Tensor]] = {
    "nothing": lambda y, m, x: y,
    "a number per feature": lambda y, m, x: F.gelu(2 * y + m.p),
    "one number": lambda y, m, x: torch.minimum(y, m.q) - m.q,
    "an element each": lambda y, m, x: torch.sigmoid(y) * (y + m.r),
    "its own input": lambda y, m, x: y - x,
    "a function of its own input": lambda y, m, x: y * F.silu(x),
    "a number per row": lambda y, m, x: y * m.s,
    "a constant": lambda y, m, x: y * torch.full(y.shape[-1:], -0.5),
    "the same for each sample": lambda y, m, x: torch.tanh(y + m.e) * 2,
}


@dataclass(frozen=True)
class Case:
    """x (`shape`) times a weight, (features, K) or its transpose, and a chain."""

    shape: tuple[int, ...]
    features: int
    chain: str = "nothing"
    bias: bool = True
    features_first: bool = True
    view: bool = False  # of the weight, turned


CASES = {
    "one block": (Case((32, 64), 64), MatmulTile(32, 1, 1)),
    "rows and features left over": (Case((70, 64), 130, "a number per feature"), MatmulTile(32, 2, 1)),
    "three dimensions": (Case((3, 23, 100), 200, "one number"), MatmulTile(16, 1, 1)),
    "an odd number of each": (Case((19, 67), 45, "a constant", bias=False), MatmulTile(16, 1, 1)),
    "a weight (K, N)": (Case((40, 70), 130, "a number per feature", False, False), MatmulTile(64, 2, 1)),
    "a turned view of a weight (N, K)": (Case((40, 70), 130, bias=False, view=True), MatmulTile(32, 2, 1)),
    "a turned view of a weight (K, N)": (
        Case((40, 70), 65, bias=False, features_first=False, view=True),
        MatmulTile(32, 1, 1),
    ),
    "in parts": (Case((20, 200), 96, "an element each"), MatmulTile(16, 1, 3)),
    "of rows, in parts": (Case((3, 7, 200), 96, "a number per row"), MatmulTile(16, 1, 3)),
    "in parts, of which one is empty": (Case((20, 129), 64, bias=False), MatmulTile(32, 1, 4)),
    "more chunks than stages": (Case((8, 32 * 11), 64), MatmulTile(128, 1, 1)),
    "the input again": (Case((24, 96), 96, "its own input"), MatmulTile(32, 1, 1)),
    "a function of the input": (Case((24, 96), 96, "a function of its own input"), MatmulTile(32, 1, 1)),
    "many rows": (Case((1200, 33), 70), MatmulTile(128, 1, 1)),
    "the same for each sample": (Case((3, 7, 50), 70, "the same for each sample"), MatmulTile(16, 1, 1)),
    "the same for each sample, in parts": (Case((3, 7, 200), 70, "the same for each sample"), MatmulTile(16, 1, 3)),
    "in turns": (Case((300, 300), 130, "a number per feature"), MatmulTile(256, 2, 1)),
    "in turns, more chunks than stages": (Case((20, 64 * 7), 200, "an element each"), MatmulTile(256, 2, 1)),
    "in turns, in parts, of which one is empty": (Case((20, 129), 130), MatmulTile(256, 2, 4)),
}


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        k, o = case.shape[-1], case.features
        self.case = case
        self.w = nn.Parameter(torch.randn((o, k) if case.features_first else (k, o)) / k**0.5)
        self.b = nn.Parameter(torch.randn(o)) if case.bias else None
        self.p, self.q = nn.Parameter(torch.rand(o) + 0.5), nn.Parameter(torch.tensor(0.75))
        self.r = nn.Parameter(torch.randn(*case.shape[:-1], o))
        self.s = nn.Parameter(torch.randn(*case.shape[:-1], 1))
        self.e = nn.Parameter(torch.randn(*case.shape[-2:-1], o))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.case.view:
            y = x @ self.w.mT if self.case.features_first else F.linear(x, self.w.mT)
        else:
            y = F.linear(x, self.w, self.b) if self.case.features_first else x @ self.w
        return CHAINS[self.case.chain](y, self, x)


def found(case: Case) -> tuple[Model, Linear]:
    model = Model(case)
    graph = capture(model, (torch.randn(case.shape),), {}).graph
    group = match(graph.outputs[0], graph.users())
    assert isinstance(group, Linear), group
    return model, group


def generated(group: Linear, t: MatmulTile) -> Kernel:
    return cuda.kernel(group, t, "fused_test", "def reference(*operands): ...")


def called(model: Model, group: Linear, t: MatmulTile, x: Tensor, order: str = "forward") -> Tensor:
    operands = (x if isinstance(n.op, ops.Input) else model.get_parameter(n.op.path).detach() for n in group.tensors)
    return emulate(generated(group, t), *operands, order=order)


def assert_right(case: Case, t: MatmulTile, order: str = "forward", mean: float = 0.0) -> None:
    """As near to float64 as float32 itself is, nearly: every number has 22 bits at least."""
    model, group = found(case)
    torch.manual_seed(1)
    x = torch.randn(case.shape) + mean
    got = called(model, group, t, x, order)
    with torch.no_grad():
        want = Model(case).double()(x.double())
        size = 1 + F.linear(x.double().abs(), (model.w if case.features_first else model.w.mT).double().abs())
    assert got.shape == want.shape and got.dtype == torch.float32
    assert ((got - want).abs() <= 1e-6 * size).all(), ((got - want).abs() / size).max()


@pytest.mark.parametrize("name", CASES)
def test_as_the_model_in_float64(name: str) -> None:
    for order in ORDERS[1:]:
        assert_right(*CASES[name], order)


ROUNDED = {
    "one block": (Case((32, 64), 64), MatmulTile(32, 1, 1, rounded=True)),
    "rows and features left over": (Case((70, 67), 130, "a number per feature"), MatmulTile(32, 2, 1, rounded=True)),
    "a weight (K, N)": (Case((40, 70), 130, bias=False, features_first=False), MatmulTile(64, 2, 1, rounded=True)),
    "in parts": (Case((20, 200), 96, "an element each"), MatmulTile(16, 1, 3, rounded=True)),
    "more chunks than stages": (Case((8, 32 * 19), 64), MatmulTile(128, 1, 1, rounded=True)),
    "in turns": (Case((20, 32 * 19), 130), MatmulTile(256, 2, 1, rounded=True)),
}


def untied(x: Tensor) -> Tensor:
    """Nothing in the middle between two numbers of tf32, which is rounded up by sm_80 and to even from sm_90 on."""
    bits = x.view(torch.int32)
    return (bits + (bits & 0x1FFF == 0x1000)).view(torch.float32)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.sampled
def test_rounded(name: str) -> None:
    """As the model in float64 of operands that are rounded to tf32, as convolutions may be."""
    case, tile = ROUNDED[name]
    model, group = found(case)
    torch.manual_seed(1)
    x = untied(torch.randn(case.shape))
    with torch.no_grad():
        model.w.copy_(untied(model.w))
        exact = Model(case).double()
        exact.w.copy_(round_to_tf32(model.w))
        want = exact(round_to_tf32(x).double())
        size = 1 + F.linear(x.double().abs(), (model.w if case.features_first else model.w.mT).double().abs())
    for order in ORDERS[1:]:
        got = called(model, group, tile, x, order)
        assert ((got - want).abs() <= 1e-6 * size).all(), ((got - want).abs() / size).max()
    assert not torch.allclose(want.float(), model(x), rtol=0, atol=1e-6)


def test_rounded_where_a_convolution_may_be() -> None:
    """Half the memory, and a third of the products."""
    _, group = found(Case((128, 4096), 96))
    tiles_of = partial(tiles, group, Extent(128, 96))
    assert all(t.rounded for t in tiles_of(rounded=True)) and not any(t.rounded for t in tiles_of())
    exact = generated(group, MatmulTile(32, 1, 1)).source
    rounded = generated(group, MatmulTile(32, 1, 1, rounded=True)).source
    assert exact.count("wgmma_rows_fp16_32(products") == 3 * rounded.count("wgmma_rows_fp16_32(products")
    of = Extent(8192, 96)
    assert seconds(group, MatmulTile(128, 2, 1, rounded=True), of) < seconds(group, MatmulTile(128, 2, 1), of)
    assert tiles(group, Extent(2**16, 96), rounded=True) and not tiles(group, Extent(2**16, 96))


class Turned(nn.Module):
    """x (.., K, M) as it lies: rows turned for the product, those of samples by one weight, and the weight by x."""

    def __init__(self, way: str, shape: tuple[int, ...], features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, (k, m) = way, shape[-2:]
        self.w, self.b = nn.Parameter(torch.randn(features, k) / k**0.5), nn.Parameter(torch.randn(features))
        self.p = nn.Parameter(torch.rand(features) + 0.5)
        result, each = ((features, m), (1, m)) if way == "weight first" else ((m, features), (m, 1))
        self.r, self.q = nn.Parameter(torch.randn(*shape[:-2], *result)), nn.Parameter(torch.rand(*shape[:-2], *each))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "weight first":
            y = self.w.expand(*x.shape[:-2], -1, -1) @ x + self.b[:, None]
            return torch.tanh(y * self.p[:, None] * self.q + self.r)
        weights = self.w.mT.expand(*x.shape[:-2], -1, -1)
        y = x.mT @ weights + self.b if self.way == "samples" else F.linear(x.mT, self.w, self.b)
        return torch.tanh(y * self.p * self.q + self.r)


TURNED = {
    "rows": ("rows", (3, 40, 23), 70, MatmulTile(32, 2, 1)),
    "rows in parts": ("rows", (130, 45), 33, MatmulTile(16, 1, 2)),
    "samples": ("samples", (3, 37, 50), 65, MatmulTile(32, 2, 1)),
    "weight first": ("weight first", (3, 37, 50), 65, MatmulTile(64, 2, 1)),
    "of four dimensions": ("weight first", (2, 2, 64, 9), 64, MatmulTile(16, 1, 1)),
    "weight first, in parts": ("weight first", (3, 256, 20), 70, MatmulTile(32, 1, 3)),
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.sampled
def test_of_what_is_turned(name: str) -> None:
    way, shape, features, tile = TURNED[name]
    model, x = Turned(way, shape, features).eval(), torch.randn(shape)
    graph = capture(model, (x,), {}).graph
    group = match(graph.outputs[0], graph.users())
    assert isinstance(group, Linear), group
    assert group.turned and group.across == (way == "weight first")
    assert isinstance(group.x.op, ops.Input) and isinstance(group.w.op, ops.Param)  # neither is copied
    values = {"x": x, **dict(model.named_parameters())}

    def value(n: Node) -> Tensor:
        if isinstance(n.op, ops.Reshape):
            return value(n.arg(0)).reshape(n.shape)
        return x if isinstance(n.op, ops.Input) else values[n.op.path].detach()

    with torch.no_grad():
        want = Turned(way, shape, features).eval().double()(x.double())
    for order in ORDERS[1:]:
        got = emulate(generated(group, tile), *map(value, group.tensors), order=order)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("way", ["rows", "weight first"])
@pytest.mark.parametrize("summed", [196, 64])
def test_of_what_is_turned_compiles_without_spills(way: str, rounded: bool, summed: int) -> None:
    graph = capture(Turned(way, (4, summed, 512), 256).eval(), (torch.randn(4, summed, 512),), {}).graph
    group = match(graph.outputs[0], graph.users())
    assert isinstance(group, Linear), group
    kernel = generated(group, MatmulTile(128, 2, 1, rounded))
    taken = nvrtc.resources(nvrtc.compile(kernel.source, "sm_90a"))
    assert taken.keys() == {launch.entry for launch in kernel.launches}
    assert all(entry.stack == 0 for entry in taken.values()), taken


def test_rows_of_samples_have_to_be_known() -> None:
    """How many there are is a constant of the text; without, the view is an operand."""
    length = sympy.Symbol("L", integer=True, positive=True)
    x = make(ops.Input((3, 40, length), torch.float32, torch.device("cpu"), "x", 0))
    w = make(ops.Param((70, 40), torch.float32, torch.device("cpu"), "w"))
    y = make(ops.Matmul(transpose_w=True), permute(x, (0, 2, 1)), w, None)
    group = match(y, Graph((x,), (y,)).users())
    assert isinstance(group, Linear) and not group.turned and group.x is y.arg(0)
    y = make(ops.Matmul(), make(ops.Expand((3, 70, 40)), w), x, None)
    refused = match(y, Graph((x,), (y,)).users())
    assert isinstance(refused, str) and "it is not known how many" in refused


def test_numbers_with_a_mean() -> None:
    """Sums of a thousand times what their differences are."""
    assert_right(Case((30, 300), 64, bias=False), MatmulTile(32, 1, 1), mean=1000.0)


@pytest.mark.parametrize("features_first", [False, True])
def test_short_sums_leave_nothing_out(features_first: bool) -> None:
    """Of numbers of which halves leave as much as they may, and of positive ones, which are truncated downward."""
    model, group = found(Case((32, 50), 64, bias=False, features_first=features_first))
    alike = 1 + 2**-11 - 2**-22
    for x, w, most in ((alike, alike, 2e-7), (torch.rand(32, 50), torch.rand(50, 64), 3e-7)):
        rows, weights = torch.zeros(32, 50) + x, torch.zeros(50, 64) + w
        with torch.no_grad():
            model.w.copy_(weights.mT if features_first else weights)
        error = called(model, group, MatmulTile(32, 1, 1), rows) / (rows.double() @ weights.double()) - 1
        assert error.abs().max() < most and error.mean().abs() < 8e-8


def test_products_of_short_sums() -> None:
    """Four where there is a chunk's at most, three else; a rounded number has one."""
    for k, rounded, products in ((64, False, 4), (65, False, 3), (64, True, 1)):
        _, group = found(Case((16, k), 64))
        text = generated(group, MatmulTile(32, 1, 1, rounded)).source
        assert text.count("wgmma_rows_fp16_32(products") == products
        assert (text.count("add_products()") == 2) == (products == 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_what_is_not_finite(value: float) -> None:
    """It is in the row that reads it, and nowhere else; the largest numbers are multiplied by less than 1."""
    model, group = found(Case((20, 64), 64, bias=False))
    x = torch.randn(20, 64)
    x[3, 5] = value
    got = called(model, group, MatmulTile(32, 1, 1), x)
    with torch.no_grad():
        want = model(x)
    others = torch.arange(20) != 3
    assert torch.equal(got[3].isnan(), want[3].isnan())
    assert got[others].isfinite().all()
    if value != value or abs(value) == float("inf"):
        assert torch.equal(got[3].isinf(), want[3].isinf())


@pytest.mark.parametrize("weight", [0.0, 1e-10])
def test_the_largest_numbers_are_finite(weight: float) -> None:
    """A mask's number meets a weight that makes it none, or less: others in its row are a layer of their own."""
    model, group = found(Case((20, 64), 64, bias=False))
    x, largest = torch.randn(20, 64), torch.finfo(torch.float32)
    x[3, 5], x[4, 6] = largest.min, largest.max
    with torch.no_grad():
        model.w[:, 5:7] = weight
        want = model(x)
    assert torch.allclose(called(model, group, MatmulTile(32, 1, 1), x), want, rtol=1e-5, atol=1e-5)


WIDE: dict[str, Callable[[Tensor, Tensor], None]] = {
    "masks": lambda x, w: (x[::3, 5].fill_(-1e9), w[:, 5].fill_(0)),
    "masks that count a little": lambda x, w: (x[::3, 5].fill_(-1e9), w[:, 5].fill_(1e-12)),
    "one of many, and zeros": lambda x, w: (x[:, ::2].mul_(1e12), w[:40, ::2].fill_(0)),
    "all very small but one": lambda x, w: (x.mul_(1e-18), x[4].mul_(1e20), w.mul_(1e-6)),
    "weights far apart": lambda x, w: (w[:, 3].mul_(1e15), x[:, 3].mul_(1e-15)),
    "all but nothing": lambda x, w: (x.mul_(1e-34), x[:, ::8].mul_(1e-5)),
    "shares of a softmax": lambda x, w: (x.mul_(12).exp_().div_(x.sum(-1, keepdim=True)), w[:40, ::3].fill_(0)),
}


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.sampled
def test_numbers_far_apart(name: str, rounded: bool) -> None:
    """Rows whose numbers are too far apart for halves, in tiles with others: errors are as small as else, over what is
    added up, where numbers are of two sizes."""
    model, group = found(Case((70, 130), 96, bias=False))
    torch.manual_seed(2)
    x = torch.randn(70, 130)
    with torch.no_grad():
        WIDE[name](x, model.w)
        size, want = x.double().abs() @ model.w.double().abs().mT, x.double() @ model.w.double().mT
    least = torch.finfo(torch.float32).tiny
    for tile in (MatmulTile(32, 2, 1, rounded), MatmulTile(16, 1, 2, rounded), MatmulTile(256, 2, 1, rounded)):
        got = called(model, group, tile, x, ORDERS[1]).double()
        assert ((got - want).abs() <= (1.1 * 2**-10 if rounded else 5e-7) * size + least).all()


@pytest.mark.parametrize("tile", [MatmulTile(32, 2, 1), MatmulTile(256, 2, 1)], ids=str)
@pytest.mark.parametrize(("length", "share"), [(66, 1.0), (192, 0.01)])
@pytest.mark.parametrize("smaller", [14, 24, 60])
def test_few_weights_that_are_smaller_than_the_last_chunk(
    smaller: int, length: int, share: float, tile: MatmulTile
) -> None:
    """At the end of a sum, or where most are 0: they alone meet rows that are 0 elsewhere."""
    model, group = found(Case((24, length), 96, bias=False))
    torch.manual_seed(3)
    x = torch.randn(24, length)
    x[::2, :CHUNK] = 0
    with torch.no_grad():
        model.w[:, CHUNK:] *= 2.0**-smaller * (torch.rand(96, length - CHUNK) < share)
        size, want = x.double().abs() @ model.w.double().abs().mT, x.double() @ model.w.double().mT
    assert ((called(model, group, tile, x, ORDERS[1]) - want).abs() <= 7e-7 * size).all()


class Chained(nn.Module):
    def __init__(self, then: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(64, 64), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, x)


@pytest.mark.parametrize(
    ("reason", "then"),
    [
        ("is computed in torch.int64", lambda m, x: (m.linear(x) * 3).to(torch.int64).float() + 0.5),
        ("is computed in torch.int8", lambda m, x: (m.linear(x) * 10).to(torch.int8).float() * 0.1),
        ("is rounded to a narrower type", lambda m, x: m.linear(x).bfloat16().float() * 3),
        ("is rounded to a narrower type", lambda m, x: m.linear(x).half().float()),
        ("depends on a size", lambda m, x: torch.relu(m.linear(x)) / x.shape[0]),
    ],
)
def test_what_a_thread_cannot_carry_is_refused(reason: str, then: Callable[[nn.Module, Tensor], Tensor]) -> None:
    graph = capture(Chained(then).eval(), (torch.randn(30, 64),), {}).graph
    refused = match(graph.outputs[0], graph.users())
    assert isinstance(refused, str) and reason in refused, refused


def test_a_turned_view_that_is_an_operand_as_well_stays_one() -> None:
    graph = capture(
        Chained(lambda m, x: x @ m.linear.weight.t() + m.linear.weight.t()), (torch.randn(64, 64),), {}
    ).graph
    group = match(graph.outputs[0], graph.users())
    assert isinstance(group, str) or group.w in group.operands


def test_much_more_memory_is_no_option() -> None:
    _, group = found(Case((16, 4096), 512))
    assert tiles(group, Extent(2**15, 512)) and not tiles(group, Extent(2**15 + 1, 512))


def test_tiles_that_are_worth_measuring() -> None:
    """Few rows leave room for parts, many do not need them; none has empty parts alone."""
    _, group = found(Case((16, 4096), 512))
    few, many = tiles(group, Extent(16, 512)), tiles(group, Extent(8192, 512))
    assert few[0].parts > 1 and few[0].columns <= 64
    assert many[0].parts == 1 and many[0].columns >= 96
    assert all(t.columns in COLUMNS and t.parts in PARTS for t in (*few, *many))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_matmuls(seed: int) -> None:
    rng = random.Random(seed)
    k, first, chain = rng.randint(1, 300), rng.random() < 0.7, rng.choice([*CHAINS])
    features = k if "own input" in chain else rng.randint(1, 200)
    shape = (*(rng.randint(1, 9) for _ in range(rng.randint(0, 2))), rng.randint(1, 60), k)
    columns = rng.choice(COLUMNS if k > CHUNK else [n for n in COLUMNS if n <= AT_ONCE])
    tile = MatmulTile(columns, 2 if columns > AT_ONCE else rng.choice((1, 2)), rng.choice([1, 1, 2, 3]))
    assert_right(Case(shape, features, chain, first and rng.random() < 0.5, first), tile, rng.choice(ORDERS))
