"""Normalisations: the generated CUDA C++ runs on the CPU, and is compared with the same graph in float64."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import ClassVar

import pytest
import sympy
import torch
from codegen.cuda.closeness import compare
from emulation.emulate import ORDERS, emulate
from torch import Tensor

from fusewright.codegen.aten import lower
from fusewright.codegen.cuda.normalization import kernel, of_channels, options
from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph, Node, Symbol, make
from fusewright.ir.ops import Size
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.beside import readers_of
from fusewright.schedule.groups import cut
from fusewright.schedule.normalization import (
    ChannelStatistics,
    Normalization,
    parse,
    parse_shared,
    parse_statistics,
    row_of,
)

CPU = torch.device("cpu")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
B = sympy.Symbol("B", positive=True, integer=True)
BATCH = 5
inf, nan = float("inf"), float("nan")


def inp(index: int, *shape: Size, dtype: torch.dtype = F32) -> Node:
    return make(ops.Input(shape, dtype, CPU, f"a{index}", index))


def norm(
    x: Node, kind: str, w: Node | None = None, b: Node | None = None, eps: float | None = 1e-5, **more: int
) -> Node:
    return make(ops.Norm(kind, eps, **more), x, w, b, None, None)


def affine(x: Node, kind: str, shape: tuple[int, ...], **more) -> Node:
    weight, bias = (inp(i, *shape, dtype=x.dtype) for i in (10, 11))
    return norm(x, kind, weight, None if kind == "rms" else bias, **more)


def layer(x: Node, trailing: int = 1, kind: str = "layer") -> Node:
    return affine(x, kind, x.shape[-trailing:], trailing=trailing)


def group(x: Node, groups: int) -> Node:
    return affine(x, "group", x.shape[1:2], groups=groups)


def instance(x: Node) -> Node:
    return affine(x, "instance", x.shape[1:2], training=True)


def batch(x: Node) -> Node:
    return affine(x, "batch", x.shape[1:2], training=True)


def softmax(x: Node, dim: int = -1, *, log: bool = False) -> Node:
    return make(ops.Softmax(dim % x.ndim, log), x)


def pool(x: Node, kind: str, size: int, stride: int = 0, padding: int = 0) -> Node:
    n = x.ndim - 2
    return make(ops.Pool(kind, (size,) * n, (stride or size,) * n, (padding,) * n, (1,) * n), x)


def fold(x: Node, kind: str, *dims: int, keepdim: bool = False) -> Node:
    return make(ops.Reduce(kind, dims, keepdim), x)


def graph_of(root: Node) -> Graph:
    graph = Graph((), (root,))
    inputs = sorted((n for n in graph.nodes() if isinstance(n.op, ops.Input)), key=lambda n: n.op.index)
    at = next((i for i, n in enumerate(inputs) if n.shape[:1] == (B,)), None)
    return Graph(tuple(inputs), (root,), symbols={} if at is None else {B: Symbol(at, 0, 0, None)})


def found(root: Node) -> Normalization:
    n = parse(root, graph_of(root).users())
    assert isinstance(n, Normalization), n
    return n


def random(node: Node, seed: int, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = [d if isinstance(d, int) else batch for d in node.shape]
    return torch.randn(shape, generator=generator, dtype=F64).to(node.dtype)


def given(root: Node, **values: Tensor) -> dict[Node, Tensor]:
    inputs = graph_of(root).inputs
    return {n: values.get(f"a{n.op.index}", random(n, n.op.index)) for n in inputs}


def truth(root: Node, tensors: dict[Node, Tensor], dtype: torch.dtype | None = F64) -> Tensor:
    """The graph in float64, on operands that have been rounded to their own dtype; or in their own."""
    graph = graph_of(root)
    forward = lower(graph).functions()[1]
    result: Tensor = forward(None, *(tensors[n].to(dtype) for n in graph.inputs))[0]
    return result.double()


def check(root: Node, tensors: dict[Node, Tensor] | None = None, *, order: str = "forward", ulps: float = 8) -> None:
    """Every way to compute it."""
    tensors = tensors or given(root)
    want = truth(root, tensors)
    n = found(root)
    for option in options(n):
        k = kernel(n, "fused_test", **option)
        got = emulate(k, *(tensors[t] for t in n.tensors), order=order)
        compare(got, want, root.dtype, ulps)


X = inp(0, B, 6, 8, 12)
ODD = inp(0, B, 6, 7, 5)
VOLUME = inp(0, 2, 4, 4, 6, 8)
CASES: dict[str, Callable[[], Node]] = {
    "layer": lambda: layer(inp(0, B, 7, 64)),
    "layer, odd": lambda: layer(inp(0, B, 7, 37)),
    "layer of three": lambda: layer(X, 3),
    "layer, long": lambda: layer(inp(0, 3, 4500)),
    "layer, plain": lambda: norm(X, "layer", trailing=2),
    "layer, without bias": lambda: norm(X, "layer", inp(1, 12)),
    "rms": lambda: layer(inp(0, B, 7, 48), kind="rms"),
    "rms of two, eps by default": lambda: norm(X, "rms", inp(1, 8, 12), eps=None, trailing=2),
    "group": lambda: group(X, 3),
    "group, odd": lambda: group(ODD, 2),
    "group of all": lambda: group(X, 1),
    "group of one": lambda: group(ODD, 6),
    "group, plain": lambda: norm(ODD, "group", groups=2),
    "group of features": lambda: group(inp(0, B, 32), 4),
    "group of a sequence": lambda: group(inp(0, B, 8, 33), 2),
    "group of volumes": lambda: group(VOLUME, 2),
    "group, fixed batch": lambda: group(inp(0, 3, 4, 4, 4), 2),
    "instance": lambda: instance(X),
    "instance, odd": lambda: instance(ODD),
    "instance of large images": lambda: instance(inp(0, 1, 2, 48, 60)),
    "batch": lambda: batch(X),
    "batch, odd": lambda: batch(ODD),
    "batch of volumes": lambda: batch(VOLUME),
    "batch of features": lambda: pointwise("relu", batch(inp(0, 40, 12))),
    "batch of features, odd": lambda: pointwise("relu", batch(inp(0, 33, 7))),
    "softmax": lambda: softmax(inp(0, B, 7, 64)),
    "softmax, odd": lambda: softmax(inp(0, B, 7, 37)),
    "softmax, long": lambda: softmax(inp(0, 3, 4500)),
    "softmax of channels": lambda: softmax(X, 1),
    "softmax of channels, odd": lambda: softmax(ODD, 1),
    "softmax of samples": lambda: softmax(inp(0, 9, 20), 0),
    "log softmax": lambda: softmax(inp(0, B, 7, 64), log=True),
    "log softmax of channels": lambda: softmax(ODD, 1, log=True),
    # ahead of it
    "scores": lambda: softmax(pointwise("add", pointwise("mul", X, 0.25), inp(1, B, 1, 8, 12))),
    "scores of channels": lambda: softmax(pointwise("clamp", ODD, params=(0.0, 1.0)), 1),
    "relu first": lambda: group(pointwise("relu", ODD), 3),
    "residual first": lambda: layer(pointwise("add", X, inp(1, B, 6, 8, 12))),
    "channel bias first": lambda: group(pointwise("add", X, inp(1, 6, 1, 1)), 3),
    "sample and channel first": lambda: group(pointwise("mul", X, inp(1, B, 6, 1, 1)), 2),
    "row first": lambda: group(pointwise("mul", X, inp(1, 8, 1)), 2),
    "constants first": lambda: group(pointwise("add", X, make(ops.Full((6, 1, 1), 1.5, F32, CPU))), 2),
    "scalar first": lambda: group(pointwise("add", pointwise("mul", X, 0.5), inp(1)), 2),
    "softplus, tanh first": lambda: batch(
        pointwise("mul", X, pointwise("tanh", pointwise("softplus", X, params=(1.0, 20.0))))
    ),
    # behind it
    "gelu": lambda: pointwise("mul", pointwise("gelu", layer(X), params=("none",)), 1.5),
    "half": lambda: pointwise("div", instance(X), 2.0),
    "scaled": lambda: pointwise("mul", group(X, 2), inp(1, 6, 1, 1)),
    "x again": lambda: pointwise("add", X, pointwise("tanh", group(X, 2))),
    "relu again": lambda: (lambda y: pointwise("add", y, pointwise("tanh", group(y, 2))))(pointwise("relu", X)),
    "another": lambda: pointwise("mul", layer(X), inp(1, B, 6, 8, 12)),
    "two values": lambda: (lambda y: pointwise("mul", y, pointwise("sigmoid", y)))(group(ODD, 2)),
    "shares": lambda: pointwise("mul", softmax(X), inp(1, B, 6, 8, 12)),
    "shares of channels": lambda: pointwise("sigmoid", pointwise("add", softmax(ODD, 1), inp(1, 6, 1, 1))),
    # pools and reductions
    "max pool of shares": lambda: pool(softmax(X, 1), "max", 4),
    "sum of shares": lambda: fold(pointwise("mul", softmax(X), inp(1, B, 6, 8, 12)), "sum", 3),
    "max pool": lambda: pointwise(
        "clamp", pool(pointwise("mul", group(X, 3), inp(1, 6, 1, 1)), "max", 4), params=(0.0, 1.0)
    ),
    "overlapping pool": lambda: pool(pointwise("relu", group(ODD, 3)), "max", 3, 2, 1),
    "avg pool of volumes": lambda: pointwise("gelu", pool(layer(VOLUME), "avg", 2), params=("none",)),
    "avg pool of a batch": lambda: pool(batch(VOLUME), "avg", 4),
    "mean of samples": lambda: fold(group(VOLUME, 2), "mean", 1, 2, 3, 4),
    "mean of images": lambda: fold(pointwise("relu", instance(X)), "mean", 2, 3),
    "logsumexp of channels": lambda: fold(
        pointwise("add", X, pointwise("hardswish", pointwise("tanh", group(X, 3)))), "logsumexp", 1, keepdim=True
    ),
    "max of channels, then a sum": lambda: fold(
        fold(pointwise("clamp", instance(ODD), params=(-1.0, 1.0)), "max", 1), "sum", 1, 2
    ),
    "max of rows": lambda: fold(layer(X), "max", 3),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_case(name: str) -> None:
    check(CASES[name](), order=ORDERS[zlib.crc32(name.encode()) % len(ORDERS)])


@pytest.mark.parametrize(
    ("dtype", "make_"),
    [*product((F16, BF16, F64), (layer, instance, lambda x: group(x, 2), batch, softmax, lambda x: softmax(x, 1)))],
)
@pytest.mark.sampled
def test_dtypes(dtype: torch.dtype, make_: Callable[[Node], Node]) -> None:
    for shape in ((3, 4, 6, 16), (3, 4, 5, 7)):
        check(pointwise("mul", make_(inp(0, *shape, dtype=dtype)), 1.5), ulps=16 if dtype == F64 else 2)


@pytest.mark.parametrize("name", ["layer", "group", "instance, odd", "batch", "logsumexp of channels"])
@pytest.mark.parametrize("mean", [1000.0, -1e6])
def test_far_means(name: str, mean: float) -> None:
    """As exact as rounding the mean to the statistics' own type allows; nothing cancels."""
    root = CASES[name]()
    tensors = given(root)
    tensors[graph_of(root).inputs[0]] += mean
    want, eager = truth(root, tensors), truth(root, tensors, None)
    n = found(root)
    for option in options(n):
        got = emulate(kernel(n, "fused_test", **option), *(tensors[t] for t in n.tensors)).double()
        ulp = abs(mean) * torch.finfo(F32).eps
        assert (got - want).abs().max() <= max(8 * ulp, 1.1 * (eager - want).abs().max()), option


@pytest.mark.parametrize("name", ["softmax", "softmax of channels", "log softmax", "log softmax of channels", "scores"])
@pytest.mark.parametrize("special", [inf, -inf, nan])
def test_shares_of_what_is_not_finite(name: str, special: float) -> None:
    """One number, and a whole row."""
    root = CASES[name]()
    x, *_ = graph_of(root).inputs
    for index in ((1, 2, 3), (1, 2), (1, slice(None), 3)):
        tensors = given(root)
        tensors[x][index] = special
        check(root, tensors)


@pytest.mark.parametrize("dim", [1, 2])
def test_shares_are_found_in_their_own_type(dim: int) -> None:
    """Whatever type becomes of them behind."""
    x = inp(0, 2, 9, 12, dtype=F64)
    tensors = given(x) | {x: random(x, 0) * 1e300}
    check(cast(softmax(x, dim), F32), tensors)


@pytest.mark.parametrize("name", ["softmax", "softmax of channels", "log softmax"])
@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_far_shares(name: str, scale: float) -> None:
    """Nothing overflows, and no share is lost."""
    root = CASES[name]()
    tensors = given(root)
    tensors[graph_of(root).inputs[0]].mul_(scale).add_(scale)
    check(root, tensors)


@pytest.mark.parametrize("name", ["layer", "group", "batch"])
def test_equal_values(name: str) -> None:
    root = CASES[name]()
    x = graph_of(root).inputs[0]
    check(root, given(root, a0=torch.full_like(random(x, 0), 1000.1)))


@pytest.mark.parametrize("special", [inf, nan])
@pytest.mark.parametrize("name", ["layer", "group, odd", "max pool", "batch", "softmax of channels", "scores"])
def test_non_finite_values(name: str, special: float) -> None:
    """They spoil their own rows, as in eager."""
    root = CASES[name]()
    tensors = given(root)
    tensors[graph_of(root).inputs[0]][1, 2, 3] = special
    check(root, tensors)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.sampled
def test_epsilon_by_default(dtype: torch.dtype) -> None:
    """That of the type it is computed in: numbers as small as the root of a narrower one's are normalised as well."""
    root = norm(inp(0, 5, 64, dtype=dtype), "rms", eps=None, trailing=1)
    (x,) = graph_of(root).inputs
    tensors = {x: (random(x, 0).double() * (1e-7 if dtype == F64 else 1e-2)).to(dtype)}
    eager = torch.nn.functional.rms_norm(tensors[x], (64,)).double()
    n = found(root)
    for option in options(n):
        got = emulate(kernel(n, "fused_test", **option), tensors[x]).double()
        assert (got - eager).abs().max() <= 4 * torch.finfo(dtype).eps * eager.abs().max()


@pytest.mark.parametrize("name", ["layer", "group", "max pool", "logsumexp of channels"])
def test_empty_batch(name: str) -> None:
    root = CASES[name]()
    tensors = {n: random(n, 0, batch=0) for n in graph_of(root).inputs}
    check(root, tensors)


def test_rows_in_parts() -> None:
    """Few long rows are cut, and their parts joined."""
    longest = softmax(inp(0, 1, 2, 96 * 128)), softmax(inp(0, 2, 9001), log=True)
    for root in (instance(inp(0, 1, 2, 96, 128)), batch(inp(0, 6, 2, 48, 64)), layer(inp(0, 2, 9001)), *longest):
        n = found(root)
        k = kernel(n, "fused_test")
        assert [launch.entry for launch in k.launches][1:] == ["fused_test_statistics_finish", "fused_test"]
        check(root)
        tensors = given(root)
        tensors[graph_of(root).inputs[0]] += 1000
        got = emulate(k, *(tensors[t] for t in n.tensors)).double()
        assert (got - truth(root, tensors)).abs().max() <= 4e-4


def test_ways() -> None:
    """Rows that fit are kept by teams; what pools or reduces has its statistics first."""

    def ways(root: Node) -> list[int | None]:
        return [option.get("team") for option in options(found(root))]

    assert ways(layer(inp(0, B, 64))) == [8, 4, None]
    assert ways(layer(inp(0, B, 512))) == [128, 32, 16, None]
    assert ways(instance(inp(0, B, 6, 126, 126))) == [1024, 512, None]
    assert ways(instance(inp(0, B, 6, 256, 256))) == [None]
    assert ways(batch(X)) == [None]
    assert ways(softmax(inp(0, B, 64))) == [8, 4, None]
    assert ways(softmax(inp(0, B, 96, 40), 1)) == [16, 8, 4, None]
    assert ways(softmax(inp(0, B, 2000, 40), 1)) == [None]
    assert ways(CASES["max pool"]()) == [None]
    assert ways(CASES["logsumexp of channels"]()) == [None]


class TestClusters:
    """Blocks of a cluster keep long rows."""

    CASES: ClassVar[dict[str, tuple[Callable[[], Node], list[tuple[int, int]]]]] = {
        "instance": (
            lambda: pointwise("relu", instance(inp(0, 2, 2, 160, 128))),
            [(2, 512), (4, 512), (4, 256), (8, 256)],
        ),
        "layer, odd": (lambda: layer(inp(0, B, 33333)), [(4, 512), (8, 512), (8, 256)]),
        "softmax": (lambda: softmax(inp(0, 2, 40000)), [(4, 512), (8, 512), (8, 256)]),
        "log softmax, odd": (lambda: softmax(inp(0, 2, 33333), log=True), [(4, 512), (8, 512), (8, 256)]),
        "group": (lambda: group(inp(0, 2, 4, 160, 160), 2), [(4, 512), (8, 512), (8, 256)]),
        "half": (lambda: layer(inp(0, 2, 70000, dtype=BF16)), [(8, 512)]),
        "float64": (lambda: softmax(inp(0, 2, 12001, dtype=F64)), [(2, 512), (4, 512), (4, 256), (8, 256)]),
        "rms, as long as may be": (lambda: layer(inp(0, 2, 131072), kind="rms"), [(8, 512)]),
    }

    @staticmethod
    def ways(n: Normalization, capability: int | None = 90) -> list[tuple[int, int]]:
        return [(o["blocks"], o["team"]) for o in options(n, capability) if "blocks" in o]

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.sampled
    def test_right(self, name: str) -> None:
        make_, ways = self.CASES[name]
        root = make_()
        n, tensors = found(root), given(root)
        want = truth(root, tensors)
        assert self.ways(n) == ways and not self.ways(n, 80)
        for i, (blocks, team) in enumerate(ways):
            k = kernel(n, "fused_test", blocks=blocks, team=team)
            assert [launch.cluster for launch in k.launches] == [blocks]
            got = emulate(k, *(tensors[t] for t in n.tensors), order=ORDERS[i % 3])
            compare(got, want, root.dtype, ulps={F64: 16, BF16: 2}.get(root.dtype, 8))

    @pytest.mark.parametrize("special", [inf, -inf, nan])
    @pytest.mark.parametrize("at", [7, 19_999])
    def test_what_is_not_finite(self, special: float, at: int) -> None:
        """In what any block keeps."""
        for root in (layer(inp(0, 2, 20_000)), softmax(inp(0, 2, 20_000))):
            n, tensors = found(root), given(root)
            tensors[graph_of(root).inputs[0]][1, at] = special
            got = emulate(kernel(n, "fused_test", blocks=4, team=256), *(tensors[t] for t in n.tensors))
            compare(got, truth(root, tensors), root.dtype)

    def test_limits(self) -> None:
        """One block keeps shorter rows, nobody longer ones."""
        assert not self.ways(found(layer(inp(0, B, 16384)))) and self.ways(found(layer(inp(0, B, 16385))))
        assert self.ways(found(layer(inp(0, B, 131_072)))) and not self.ways(found(layer(inp(0, B, 131_073))))

    @pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
    @pytest.mark.parametrize("name", [name for name in CASES if name != "float64"])  # whose exponential has a stack
    @pytest.mark.sampled
    def test_compile_without_spills(self, name: str, arch: str) -> None:
        make_, ways = self.CASES[name]
        for blocks, team in ways:
            source = kernel(found(make_()), "fused_test", blocks=blocks, team=team).source
            taken = nvrtc.resources(nvrtc.compile(source, arch)).values()
            assert all(r.stack == 0 for r in taken), (blocks, team)


class TestShared:
    """What is normalised is a result as well, where others read it."""

    CASES: ClassVar[dict[str, Callable[[Node], Node]]] = {
        "layer": layer,
        "layer of two": lambda h: layer(h, 2),
        "rms": lambda h: layer(h, kind="rms"),
        "group": lambda h: group(h, 2),
        "instance, behind it a function": lambda h: pointwise("relu", instance(h)),
        "softmax": lambda h: softmax(h),
        "x again": lambda h: pointwise("mul", h, pointwise("sigmoid", layer(h))),
    }

    @staticmethod
    def found(h: Node, root: Node) -> Normalization | str:
        """In a graph that returns both."""
        return parse_shared(root, replace(graph_of(root), outputs=(h, root)).users())

    @pytest.mark.parametrize("dtype", [F32, BF16, F64])
    @pytest.mark.parametrize("shape", [(B, 6, 8, 12), (3, 4, 5, 7)])
    @pytest.mark.parametrize("case", CASES)
    def test_right(self, case: str, shape: tuple[Size, ...], dtype: torch.dtype) -> None:
        a, b = (inp(i, *shape, dtype=dtype) for i in (0, 1))
        h = pointwise("add", pointwise("tanh", a), b)
        root = self.CASES[case](h)
        n, tensors = self.found(h, root), given(root)
        assert isinstance(n, Normalization) and n.also is h and h not in n.tensors
        for i, option in enumerate(options(n)):
            k = kernel(n, "fused_test", **option)
            results = emulate(k, *(tensors[t] for t in n.tensors), order=ORDERS[i % 3])
            for got, want in zip(results, (truth(root, tensors), truth(h, tensors)), strict=True):
                compare(got, want, dtype, ulps=16 if dtype == F64 else 8 if dtype == F32 else 2)

    def test_ways(self) -> None:
        """Nothing but teams that keep rows, which is not for rows of any length, nor for columns."""
        for shape, teams in (((B, 64), [8, 4]), ((B, 16384), [1024, 512])):
            h = pointwise("add", inp(0, *shape), inp(1, *shape))
            n = self.found(h, layer(h))
            assert isinstance(n, Normalization) and [option["team"] for option in options(n)] == teams
        long, image = (pointwise("add", inp(0, *shape), 1.0) for shape in ((B, 16385), (B, 6, 7)))
        for h, root in ((long, layer(long)), (image, softmax(image, 1)), (image, batch(image))):
            assert isinstance(self.found(h, root), str)

    def test_what_is_read_is_there_before(self) -> None:
        """A factor behind the norm that is computed from what the kernel writes would have to wait for itself."""
        h = pointwise("add", X, 1.0)
        gate = softmax(h, 1)
        assert isinstance(self.found(h, pointwise("mul", layer(h), gate)), str)
        assert isinstance(self.found(h, layer(h)), Normalization)

    def test_what_nobody_else_reads(self) -> None:
        """Where the chain has all its readers, nothing is written for others, and no shorter chain is longer."""
        h = pointwise("add", X, 1.0)
        root = pointwise("mul", h, layer(h))
        n = parse_shared(root, graph_of(root).users())
        assert isinstance(n, Normalization) and n.also is None and n.tensors[0] is X
        assert isinstance(parse_shared(layer(h), graph_of(layer(h)).users()), str)
        graph = cut(graph_of(root), lambda group: group.fused(group.name))
        assert [n.op.name for n in graph.nodes() if isinstance(n.op, Fused)] == ["fused_add_layernorm_mul"]

    def test_what_another_norm_has_behind_itself(self) -> None:
        h = pointwise("add", layer(X, kind="rms"), inp(1, B, 6, 8, 12))
        assert isinstance(self.found(h, norm(h, "layer", trailing=1)), str)

    def test_what_is_rounded_before(self) -> None:
        """A norm of rounded numbers in float32, say: it has to read them rounded."""
        h = cast(pointwise("add", X, 1.0), BF16)
        assert isinstance(self.found(h, layer(h)), str)


def launches(k: Kernel) -> int:
    return len(k.launches)


def test_one_read_of_kept_rows() -> None:
    n = found(CASES["x again"]())
    assert launches(kernel(n, "fused_test", team=32)) == 1
    assert launches(kernel(n, "fused_test")) == 2


class TestStatistics:
    """Those of a batch as a value of its own."""

    def check(self, x: Node, mean: float = 0.0, entries: int = 1) -> None:
        root = make(ops.Statistics(1e-5, 0.3), x)
        c = self.parsed(root)
        assert c.rows == (0, 1, 2, 3)
        k = of_channels(c, "fused_test")
        assert len(k.launches) == entries
        tensors = given(root)
        tensors = {n: t + mean if t.ndim > 1 else t for n, t in tensors.items()}
        results, want = emulate(k, *(tensors[t] for t in c.sums.tensors)), truth(root, tensors)
        for node, got, row in zip(c.results, results, want, strict=True):
            assert got.shape == node.shape and got.dtype == root.dtype
            torch.testing.assert_close(got.double().flatten(), row, rtol=4 * torch.finfo(root.dtype).eps, atol=1e-9)

    @staticmethod
    def parsed(root: Node, *rows: int) -> ChannelStatistics:
        """Some rows of statistics, the first two as those of the images; all where none are named."""
        dims = (root.arg(0).ndim - 1, root.arg(0).ndim - 1, 1, 1)
        graph = Graph((), tuple(row_of(root, row, dims[row]) for row in rows or range(4)))
        c = parse_statistics(graph.outputs[0], graph.users(), readers_of(graph))
        assert isinstance(c, ChannelStatistics), c
        return c

    def test_rows_that_nobody_reads_are_not_written(self) -> None:
        root = make(ops.Statistics(1e-5), inp(0, 4, 6, 8))
        c = self.parsed(root, 2, 3)
        k = of_channels(c, "fused_test")
        assert c.rows == (2, 3) and len(k.results) == 2
        tensors = given(root)
        for got, want in zip(emulate(k, *tensors.values()), truth(root, tensors)[2:], strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-9)

    def test_what_reads_otherwise_than_by_rows_is_left_alone(self) -> None:
        root = make(ops.Statistics(1e-5), inp(0, 4, 6, 8))
        row, other = row_of(root, 0), make(ops.Slice(0, 0, 2, 1), root)
        for outputs in ((row, pointwise("exp", other)), (root,), (row, pointwise("exp", row.arg(0)))):
            graph = Graph((), outputs)
            assert isinstance(parse_statistics(outputs[0], graph.users(), readers_of(graph)), str)

    @pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
    @pytest.mark.parametrize("shape", [(4, 6, 5, 7), (4, 6, 8), (3, 2, 4, 4, 4), (40, 12), (33, 7)])
    @pytest.mark.sampled
    def test_values(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.check(inp(0, *shape, dtype=dtype))

    @pytest.mark.parametrize("shape", [(4, 6, 5, 7), (40, 12)])
    def test_far_means(self, shape: tuple[int, ...]) -> None:
        self.check(inp(0, *shape), 1000.0)

    def test_in_parts(self) -> None:
        self.check(inp(0, 6, 2, 48, 64), 1000.0, entries=2)
        self.check(inp(0, 700, 20), 1000.0, entries=2)

    @pytest.mark.parametrize(("dtype", "team"), [(F64, 8), (F32, 8), (BF16, 2)])
    def test_shared_memory_of_columns(self, dtype: torch.dtype, team: int) -> None:
        """What threads of one column join fits into shared memory."""
        assert self._team(2048, dtype) == team
        assert (team - 1) * (256 // team) * (16 // dtype.itemsize) * 32 <= 48 * 1024

    @pytest.mark.parametrize(
        ("channels", "dtype", "team"),
        [(64, BF16, 32), (24, BF16, 64), (64, F32, 16), (24, F32, 32), (7, F32, 32), (1, F32, 64), (64, F64, 8)],
    )
    def test_few_columns_have_all_threads(self, channels: int, dtype: torch.dtype, team: int) -> None:
        assert self._team(channels, dtype) == team
        self.check(inp(0, 700, channels, dtype=dtype), entries=2)

    @staticmethod
    def _team(channels: int, dtype: torch.dtype) -> int:
        c = TestStatistics.parsed(make(ops.Statistics(1e-5), inp(0, 700, channels, dtype=dtype)))
        found = re.search(r"TEAM = (\d+),", of_channels(c, "fused_test").source)
        assert found is not None
        return int(found.group(1))

    def test_pointwise_first(self) -> None:
        x = pointwise("mul", pointwise("relu", inp(0, 4, 6, 8)), inp(1, 6, 1))
        self.check(x)

    def test_what_reads_more_is_in_memory(self) -> None:
        x = pointwise("add", inp(0, 4, 6, 8), inp(1, 4, 6, 8))
        assert self.parsed(make(ops.Statistics(1e-5), x)).sums.tensors == (x,)


class TestRefused:
    def why(self, root: Node) -> str:
        n = parse(root, graph_of(root).users())
        assert isinstance(n, str)
        return n

    def test_running_statistics(self) -> None:
        mean, var = inp(1, 6), inp(2, 6)
        for op in (ops.Norm("batch", 1e-5), ops.Norm("batch", 1e-5, training=True, serial=1)):
            assert "running statistics" in self.why(make(op, X, None, None, mean, var))

    def test_rows_of_one_element(self) -> None:
        assert "one element" in self.why(layer(inp(0, B, 7, 1)))

    def test_no_norm(self) -> None:
        assert "no norm" in self.why(pointwise("relu", X))

    def test_another_user(self) -> None:
        y = group(X, 2)
        root = fold(pointwise("relu", y), "sum", 1)
        users = Graph(graph_of(root).inputs, (root, y)).users()
        assert isinstance(parse(root, users), str)

    def test_what_a_norm_pooled_reads_is_in_memory(self) -> None:
        pooled = pool(X, "max", 2)
        assert found(pointwise("relu", group(pooled, 2))).tensors[0] is pooled

    def test_a_value_rounded_first_is_in_memory(self) -> None:
        x = cast(pointwise("relu", inp(0, B, 6, 4, 8)), BF16)
        assert found(group(x, 2)).tensors[0] is x


def test_columns_of_odd_rows() -> None:
    """Threads that load one number each are side by side: neighbours share a line of memory."""
    teams = {n: [option.get("team") for option in options(found(softmax(inp(0, B, 128, n), 1)))] for n in (96, 97, 98)}
    assert teams == {96: [16, 8, 4, None], 97: [4, 2, None], 98: [8, 4, 2, None]}
    odd = kernel(found(softmax(inp(0, B, 128, 97), 1)), "fused_test", team=4)
    assert "columns<true>" not in odd.source and len(odd.launches) == 1
    assert "columns<true>" in kernel(found(softmax(inp(0, B, 128, 96), 1)), "fused_test", team=4).source


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["scores", "shares of channels", "long columns"])
def test_softmaxes_compile_without_spills(name: str, arch: str) -> None:
    cases = CASES | {"long columns": lambda: pointwise("sigmoid", softmax(inp(0, B, 128, 96), 1))}
    n = found(cases[name]())
    for option in options(n):
        k = kernel(n, "fused_test", **option)
        taken = nvrtc.resources(nvrtc.compile(k.source, arch)).values()
        # Two numbers, for a fourth block of 64 registers.
        most = 8 if arch == "sm_80" and option.get("team") == 16 else 0
        assert all(r.stack <= most for r in taken), option
