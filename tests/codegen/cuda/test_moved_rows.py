"""Norms and softmaxes of what eager moves first: teams of threads keep rows that they read from where they were."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from codegen.cuda.closeness import compare
from codegen.cuda.rearrangement_cases import cat, taken, windows
from codegen.cuda.test_normalization_kernels import (
    BF16,
    F16,
    F32,
    F64,
    B,
    given,
    graph_of,
    group,
    inf,
    inp,
    layer,
    nan,
    norm,
    softmax,
    truth,
)
from emulation.emulate import ORDERS, emulate
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

from fusewright.codegen.cuda.normalization import kernel, options
from fusewright.ir import ops
from fusewright.ir.build import permute, pointwise, reshape
from fusewright.ir.node import Graph, Node, make, topological
from fusewright.runtime import nvrtc
from fusewright.schedule.group import bodies
from fusewright.schedule.normalization import Normalization, parse_moving, parse_shared


def image(length: int = 20, dtype: torch.dtype = F32) -> Node:
    """(N, C, H, W) with its channels last."""
    return permute(inp(0, 3, length, 5, 7, dtype=dtype), (0, 2, 3, 1))


def sequence(channels: int, length: int, dtype: torch.dtype = F32) -> Node:
    """(N, C, L) as (N, L, C)."""
    return permute(inp(0, B, channels, length, dtype=dtype), (0, 2, 1))


def heads() -> Node:
    """(N, L, heads x D) as (N, heads, L, D)."""
    return permute(reshape(inp(0, B, 9, 48), (B, 9, 3, 16)), (0, 2, 1, 3))


def merged() -> Node:
    """Pixels of 2 x 2 side by side, as Swin merges patches."""
    x = reshape(inp(0, 2, 8, 6, 8), (2, 4, 2, 3, 2, 8))
    return reshape(permute(x, (0, 1, 3, 4, 2, 5)), (2, 4, 3, 32))


def residual(h: Node) -> Node:
    return pointwise("add", h, pointwise("tanh", layer(h)))


# What is normalised, and whether a block turns it.
CASES: dict[str, tuple[Callable[[], Node], bool]] = {
    "images": (lambda: layer(image()), True),
    "images, odd": (lambda: layer(image(13)), True),
    "images, all of a volume": (lambda: layer(permute(inp(0, 2, 4, 6, 9), (0, 3, 1, 2)), 2), True),
    "sequences": (lambda: layer(sequence(96, 50)), True),
    "long rows": (lambda: layer(sequence(1000, 9)), True),
    "half rows": (lambda: layer(sequence(2048, 9, F16)), True),
    "long rows of float64": (lambda: layer(sequence(512, 9, F64)), True),
    "rms": (lambda: layer(sequence(40, 33), kind="rms"), True),
    "plain": (lambda: norm(image(), "layer", trailing=1), True),
    "shares": (lambda: softmax(image()), True),
    "log shares": (lambda: softmax(sequence(17, 12), log=True), True),
    "positions first": (lambda: layer(pointwise("add", sequence(24, 35), inp(1, 35, 24))), True),
    "functions around it": (lambda: pointwise("relu", layer(pointwise("tanh", sequence(24, 35)))), True),
    "residual": (lambda: residual(sequence(24, 35)), True),
    "windows": (lambda: layer(windows(inp(0, 2, 6, 9, 16), 3)), False),
    "windows, odd": (lambda: layer(windows(inp(0, 2, 6, 9, 5), 3)), False),
    "rolled": (lambda: layer(make(ops.Roll(((1, 2), (2, -1))), inp(0, B, 6, 5, 16))), False),
    "rolled along rows": (lambda: layer(make(ops.Roll(((2, 3),)), inp(0, B, 6, 16))), False),
    "flipped": (lambda: layer(make(ops.Flip((1,)), inp(0, B, 6, 16))), False),
    "merged": (lambda: layer(merged()), False),
    "heads": (lambda: layer(heads()), False),
    "heads and a scale": (lambda: pointwise("mul", layer(heads(), kind="rms"), inp(1, 3, 1, 16)), False),
    "all but the first": (lambda: layer(taken(inp(0, B, 9, 16), 1, 1, 9)), False),
    "a half": (lambda: layer(taken(inp(0, B, 9, 32), 2, 16, 32)), False),
    "a half, by what is beside it": (
        lambda: (lambda x: pointwise("mul", layer(taken(x, 2, 16, 32)), taken(x, 2, 0, 16)))(inp(0, B, 9, 32)),
        False,
    ),
    "functions of halves": (
        lambda: (lambda x: pointwise("add", softmax(taken(x, 2, 0, 24)), pointwise("tanh", taken(x, 2, 24, 48))))(
            inp(0, B, 9, 48)
        ),
        False,
    ),
    "what is turned, by what is rolled": (
        lambda: pointwise("mul", layer(sequence(24, 35)), make(ops.Roll(((1, 3),)), inp(1, B, 35, 24))),
        True,
    ),
    "a square and its transpose": (
        lambda: (lambda x: layer(pointwise("sub", permute(x, (0, 2, 1)), x)))(inp(0, B, 36, 36)),
        True,
    ),
    "two to turn": (lambda: layer(pointwise("add", sequence(24, 35), permute(inp(1, B, 24, 35), (0, 2, 1)))), True),
    "halves of one": (
        lambda: (lambda x: layer(pointwise("mul", taken(x, 2, 0, 24), taken(x, 2, 24, 48))))(inp(0, B, 9, 48)),
        False,
    ),
    "rows that begin anywhere": (lambda: layer(taken(inp(0, B, 9, 40), 2, 3, 35)), False),
}


def found(root: Node) -> Normalization | str:
    return parse_moving(root, graph_of(root).users())


def check(root: Node, tensors: dict[Node, Tensor] | None = None, *, order: str = "forward", ulps: float = 8) -> None:
    """Every way to compute it."""
    tensors = tensors or given(root)
    n = found(root)
    assert isinstance(n, Normalization) and n.moved
    want = truth(root, tensors)
    for option in options(n):
        operands = (tensors[t] if t in tensors else _value(t, tensors).contiguous() for t in n.tensors)
        compare(emulate(kernel(n, "fused_test", **option), *operands, order=order), want, root.dtype, ulps)


def _value(node: Node, tensors: dict[Node, Tensor]) -> Tensor:
    """What a node that is no input comes to."""
    return truth(node, {n: tensors[n] for n in graph_of(node).inputs}).to(node.dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_case(name: str) -> None:
    make_, turned = CASES[name]
    root = make_()
    n = found(root)
    assert isinstance(n, Normalization) and (n.turn is not None) == turned
    assert n.moved and all(m.tensors[0] in n.tensors and t not in n.tensors for t, m in n.moved.items())
    ulps = {F16: 2, F64: 16}.get(root.dtype, 8)
    check(root, order=ORDERS[zlib.crc32(name.encode()) % len(ORDERS)], ulps=ulps)


@pytest.mark.parametrize("dtype", [F16, BF16, F64])
@pytest.mark.parametrize("length", [20, 13])
def test_dtypes(dtype: torch.dtype, length: int) -> None:
    for root in (layer(image(length, dtype)), softmax(image(length, dtype))):
        check(root, ulps=16 if dtype == F64 else 2)


@pytest.mark.parametrize("special", [inf, nan])
def test_non_finite_values(special: float) -> None:
    """They spoil their own rows."""
    for name in ("images", "windows", "shares"):
        root = CASES[name][0]()
        tensors = given(root)
        tensors[graph_of(root).inputs[0]][1, 2, 3] = special
        check(root, tensors)


def test_empty_batch() -> None:
    for root in (layer(sequence(24, 35)), layer(heads())):
        check(root, {n: torch.empty([d if isinstance(d, int) else 0 for d in n.shape]) for n in graph_of(root).inputs})


def test_rows_of_a_tile() -> None:
    """As many as fill sectors of memory, where they fit and threads have registers."""

    def ways(root: Node) -> list[int]:
        n = found(root)
        assert isinstance(n, Normalization)
        return [256 // option["team"] for option in options(n)]

    assert ways(layer(sequence(96, 50))) == [32, 16, 8]
    assert ways(layer(sequence(768, 50))) == [8]
    assert ways(layer(sequence(384, 50, BF16))) == [32, 16, 8]
    assert ways(layer(sequence(1024, 50))) == [8]


def test_what_else_is_written() -> None:
    """What is computed of moved elements is a result as well."""
    h = pointwise("add", sequence(24, 35), 1.0)
    root = layer(h)
    n = parse_shared(root, replace(graph_of(root), outputs=(h, root)).users())
    assert isinstance(n, Normalization) and n.also is h and n.moved
    tensors = given(root)
    for option in options(n):
        results = emulate(kernel(n, "fused_test", **option), *(tensors[t] for t in n.tensors))
        for got, want in zip(results, (truth(root, tensors), truth(h, tensors)), strict=True):
            compare(got, want, F32)


def flipped(x: Node) -> Node:
    return make(ops.Flip((1,)), x)


@pytest.mark.parametrize(
    "root",
    [
        lambda h: softmax(pointwise("sub", h, flipped(h))),
        lambda h: layer(pointwise("sub", h, pointwise("tanh", flipped(h)))),
        lambda h: layer(pointwise("sub", flipped(h), make(ops.Roll(((1, 2),)), h))),
    ],
    ids=["a view and what it is moved to", "a function of that", "two moves of it"],
)
@pytest.mark.parametrize("view", [lambda: sequence(24, 35), lambda: taken(inp(0, B, 36, 24), 1, 1, 36)], ids="tv")
def test_what_is_computed_from_another_operand(root: Callable[[Node], Node], view: Callable[[], Node]) -> None:
    """A kernel reads what its group says that it does."""
    node = root(view())
    n, tensors = found(node), given(node)
    assert isinstance(n, Normalization)
    body = bodies((node,), n.tensors)[0]
    assert {x.op.index for x in topological([body]) if isinstance(x.op, ops.Input)} == set(range(len(n.tensors)))
    for option in options(n):
        values = (tensors[t] if t in tensors else _value(t, tensors).contiguous() for t in n.tensors)
        compare(emulate(kernel(n, "fused_test", **option), *values), truth(node, tensors), F32)


def test_more_elements_than_are_read() -> None:
    """Indices reach over all that what is normalised is a part of."""
    few, many = (found(layer(taken(inp(0, B, length, 256), 1, length - 16, length))) for length in (50, 2_000_000))
    for n, length in ((few, 50), (many, 2_000_000)):
        assert isinstance(n, Normalization) and n.moved
        k = kernel(n, "fused_test", **options(n)[0])
        if length == 50:
            assert "using index_t = int;" in k.source
            assert any(eval(count, {"s0": 1000}) >= 1000 * length * 256 for count in k.counts)
        else:
            assert "using index_t = long long;" in k.source and not k.counts


class TestRefused:
    """Rows are read where they lie after they were moved."""

    def check(self, root: Node, users: dict[Node, int] | None = None) -> None:
        n = parse_moving(root, users or graph_of(root).users())
        assert isinstance(n, str) or not n.moved

    def test_nothing_moved(self) -> None:
        self.check(layer(reshape(inp(0, B, 6, 8), (B, 48))))

    def test_others_read_it(self) -> None:
        h = image()
        root = layer(h)
        self.check(root, dict(Graph(graph_of(root).inputs, (root, h)).users()))

    def test_rows_are_not_kept(self) -> None:
        self.check(layer(sequence(16385, 9)))
        self.check(group(permute(inp(0, 2, 8, 6, 4), (0, 3, 1, 2)), 2))

    def test_rows_are_too_long_to_be_turned(self) -> None:
        self.check(layer(sequence(1025, 9)))

    def test_several_tensors(self) -> None:
        self.check(layer(cat(1, inp(0, 2, 3, 8), inp(1, 2, 4, 8))))


class Block(nn.Module):
    """What ConvNeXt has: a norm of channels, features, and back."""

    def __init__(self, channels: int = 96) -> None:
        super().__init__()
        self.depth = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm, self.up = nn.LayerNorm(channels), nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.norm(self.depth(x).permute(0, 2, 3, 1)))
        return y


class Shifted(nn.Module):
    """What Swin has: windows of a rolled image, and their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.roll(x, (-3, -3), (1, 2)).unflatten(1, (2, 7)).unflatten(3, (2, 7))
        y: Tensor = self.norm(h.transpose(2, 3).flatten(3, 4).flatten(0, 2))
        return F.gelu(y)


@pytest.mark.parametrize(("model", "shape"), [(Block(), (2, 96, 9, 8)), (Shifted(), (2, 14, 14, 64))], ids=repr)
def test_models(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Nothing is moved by itself, at any batch."""
    built = as_on_a_gpu(model.eval(), torch.randn(shape))
    assert [c.family for c in built.choices if c.path == "generated" and "norm" in c.name] == ["normalization"]
    assert not [c for c in built.choices if c.family == "rearrangement"]
    for n in (2, 3):
        x = torch.randn(n, *shape[1:])
        with torch.no_grad():
            want = model(x)
        torch.testing.assert_close(emulated(built, model, x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["images", "sequences", "long rows", "half rows", "windows", "log shares"])
@pytest.mark.sampled
def test_compile_without_spills(name: str, arch: str) -> None:
    n = found(CASES[name][0]())
    assert isinstance(n, Normalization)
    for option in options(n):
        taken = nvrtc.resources(nvrtc.compile(kernel(n, "fused_test", **option).source, arch)).values()
        assert all(r.stack == 0 for r in taken), option
