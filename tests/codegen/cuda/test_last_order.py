"""Norms and reductions of images whose channels lie last: they are read as they lie, and compared with float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import pytest
import torch
from codegen.cuda.closeness import compare
from codegen.cuda.kept_rows_cases import normalized, rms, standardized
from codegen.cuda.test_normalization_kernels import (
    BF16,
    CASES,
    F16,
    F32,
    F64,
    B,
    fold,
    graph_of,
    group,
    inp,
    instance,
    norm,
    random,
    truth,
)
from emulation.emulate import ORDERS, emulate
from torch import Tensor

from fusewright.codegen import cuda
from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise
from fusewright.ir.node import Node, make
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
inf, nan = float("inf"), float("nan")


def group_of(root: Node) -> Group:
    """The only group of a graph."""
    found: list[Group] = []

    def decide(group: Group) -> None:
        found.append(group)

    cut(graph_of(root), decide)
    return found[0]


def images(root: Node, contiguous: tuple[int, ...] = ()) -> dict[Node, str]:
    """Layouts of all inputs that may have channels last, but for those with these indices."""
    inputs = [n for n in graph_of(root).inputs if n.ndim in LAST and n.op.index not in contiguous]
    return {n: "channels_last" for n in inputs if n.shape[1] != 1 and any(d != 1 for d in n.shape[2:])}


def made(root: Node, contiguous: tuple[int, ...] = ()) -> tuple[Group, Kernel]:
    """The kernel that is tried first: it reads all images as they lie."""
    found, layouts = group_of(root), images(root, contiguous)
    option = cuda.options(found, {B: 5}, layouts)[0]
    assert option.get("last") and (len(option) == 1 or found.family == "kept rows")
    k = cuda.generate(found, "fused_test", option, tf32=False)
    assert dict(zip(found.operands, k.layouts, strict=True)) == {
        n: layouts.get(n, "contiguous") for n in found.operands
    }
    return found, k


def as_it_lies(tensor: Tensor, layout: str) -> Tensor:
    return tensor.contiguous(memory_format=LAST[tensor.ndim]) if layout == "channels_last" else tensor


def check(
    root: Node,
    *,
    contiguous: tuple[int, ...] = (),
    values: Mapping[Node, Tensor] | None = None,
    batch: int = 5,
    ulps: float = 8,
    **how: object,
) -> None:
    found, k = made(root, contiguous)
    tensors = {n: random(n, n.op.index, batch) for n in graph_of(root).inputs} | dict(values or {})
    operands = [as_it_lies(tensors[n], layout) for n, layout in zip(found.operands, k.layouts, strict=True)]
    compare(emulate(k, *operands, **how), truth(root, tensors), root.dtype, ulps)


X = inp(0, B, 6, 8, 12)
ODD = inp(0, B, 6, 7, 5)
NORMS = (
    *("group", "group, odd", "group of all", "group of one", "group, plain", "group of volumes", "group, fixed batch"),
    *("instance", "instance, odd", "instance of large images", "relu first", "channel bias first"),
    *("sample and channel first", "row first", "constants first", "scalar first", "half", "scaled", "x again"),
    *("relu again", "two values"),
)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.sampled
def test_norm(name: str) -> None:
    check(CASES[name](), order=ORDERS[zlib.crc32(name.encode()) % len(ORDERS)])


SHAPES = ((3, 4, 6, 16), (2, 40, 3, 3), (1, 3, 65, 1), (2, 72, 1, 5), (7, 8, 2, 2), (2, 2, 3, 4, 5), (1, 200, 5, 13))


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled
def test_norms_of_other_sizes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Tiles that reach over channels and positions, one position along an axis, channels that no load fits."""
    x = inp(0, *shape, dtype=dtype)
    ulps = {F64: 16, F32: 8}.get(dtype, 2)
    check(pointwise("mul", instance(x), 1.5), ulps=ulps, order="shuffled")
    check(pointwise("relu", group(pointwise("mul", x, 0.5), shape[1] // 2 or 1)), ulps=ulps, order="reverse")
    if shape[1] % 4 == 0:
        check(norm(x, "group", groups=2), ulps=ulps)


def test_a_residual_that_lies_row_by_row() -> None:
    check(pointwise("add", inp(1, B, 6, 8, 12), pointwise("tanh", group(X, 2))), contiguous=(1,))
    root = pointwise("add", inp(1, B, 6, 8, 12), pointwise("tanh", group(X, 2)))
    options = cuda.options(group_of(root), {B: 5}, images(root))
    assert {"last": True} in options  # the residual is copied, as it is for every way to do it
    sums = group(pointwise("add", X, inp(1, B, 6, 8, 12)), 3)
    check(sums)
    assert {"last": True} not in cuda.options(group_of(sums), {B: 5}, images(sums, (1,)))


def test_x_that_others_read_as_well_is_kept_in_rows() -> None:
    """What is not the norm's own operand would be read across its rows."""
    root = pointwise("add", X, pointwise("tanh", group(pointwise("relu", X), 2)))
    assert {"last": True} not in cuda.options(group_of(root), {B: 5}, images(root))


@pytest.mark.parametrize("special", [inf, nan])
@pytest.mark.parametrize("name", ["group", "instance, odd"])
def test_non_finite_values(name: str, special: float) -> None:
    """They spoil their own rows."""
    root = CASES[name]()
    (x,) = images(root)
    values = random(x, 0)
    values[1, 2, 3] = special
    check(root, values={x: values})


@pytest.mark.parametrize("mean", [1000.0, -1e6])
def test_far_means(mean: float) -> None:
    root = norm(X, "group", groups=3)
    values = random(X, 0) + mean
    got = group_of(root), made(root)[1]
    found = emulate(got[1], as_it_lies(values, "channels_last")).double()
    want, eager = truth(root, {X: values}), truth(root, {X: values}, None)
    limit = max(8 * abs(mean) * torch.finfo(F32).eps, 1.1 * float((eager - want).abs().max()))
    assert (found - want).abs().max() <= limit


FOLDS: dict[str, Callable[[], Node]] = {
    "sum": lambda: fold(X, "sum", 2, 3),
    "mean, kept": lambda: pointwise(
        "add", fold(pointwise("sigmoid", ODD), "mean", 2, 3, keepdim=True), inp(1, 6, 1, 1)
    ),
    "variance": lambda: fold(ODD, "var", 2, 3),
    "max of volumes": lambda: fold(inp(0, 2, 8, 3, 4, 5), "max", 2, 3, 4),
    "logsumexp, many": lambda: fold(inp(0, 2, 16, 60, 50), "logsumexp", 2, 3),
    "of channels": lambda: fold(pointwise("mul", X, inp(1, 6, 1, 1)), "max", 1),
    "of all": lambda: fold(pointwise("square", pointwise("sub", X, inp(1, B, 6, 8, 12))), "mean", 0, 1, 2, 3),
    "and channels": lambda: fold(pointwise("mul", fold(X, "max", 2, 3), inp(1, 6)), "sum", 1),
    "and channels, kept": lambda: fold(
        pointwise("mul", fold(X, "max", 2, 3, keepdim=True), inp(1, 6, 1, 1)), "sum", 1, keepdim=True
    ),
    "in half precision": lambda: fold(pointwise("relu", inp(0, 3, 24, 9, 7, dtype=BF16)), "mean", 2, 3),
    "wider": lambda: fold(cast(inp(0, 3, 24, 9, 7, dtype=F16), F32), "mean", 2, 3),
}


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.sampled
def test_fold(name: str) -> None:
    root = FOLDS[name]()
    ulps = 2 if root.dtype == BF16 else 8
    check(root, order=ORDERS[zlib.crc32(name.encode()) % len(ORDERS)], ulps=ulps)


@pytest.mark.parametrize("root", [fold(X, "argmax", 3), fold(X, "sum", 2), fold(X, "sum", 3, keepdim=True)], ids=repr)
def test_what_is_reduced_in_rows(root: Node) -> None:
    """An index is counted as eager does; elements would be left in another order."""
    assert {"last": True} not in cuda.options(group_of(root), {B: 5}, images(root))


def range_total(x: Node, scale: float = 1.0, dtype: torch.dtype = F32) -> Node:
    table = tuple((d, (ops.Slot(0, x.shape[d], 1, scale if d == 2 else 1.0),)) for d in range(2, x.ndim))
    return make(ops.RangeSum(table, dtype), x)


@pytest.mark.parametrize("x", [X, ODD, inp(0, 2, 24, 3, 5, 7), inp(0, 16, 64, 40, 40), inp(0, 2, 3, 1, 9)], ids=repr)
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_range_sums_of_everything(x: Node, scale: float) -> None:
    check(range_total(x, scale))
    # four are added in float32, as they are in rows
    check(range_total(pointwise("relu", x), scale, F64), order="reverse", ulps=4e9)


def test_range_sums_of_half_precision() -> None:
    check(range_total(inp(0, 3, 24, 9, 7, dtype=BF16), 0.5, F32))


@pytest.mark.parametrize("root", [CASES["group"](), CASES["half"](), FOLDS["variance"]()], ids=["group", "half", "var"])
def test_sanitized(root: Node) -> None:
    check(root, sanitize=True)


@pytest.mark.parametrize("root", [CASES["group"](), FOLDS["sum"]()], ids=["group", "sum"])
def test_empty_batch(root: Node) -> None:
    check(root, batch=0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="no NVRTC")
    roots = [group(inp(0, 128, 32, 254, 254), 8)]
    for x in (inp(0, B, 128, 126, 126), inp(0, B, 33, 63, 63), inp(0, B, 128, 126, 126, dtype=BF16)):
        biased = pointwise("add", x, inp(1, 1, x.shape[1], 1, 1, dtype=x.dtype))
        roots += [pointwise("div", instance(biased), 2.0), range_total(x), fold(x, "var", 2, 3)]
        roots += [pointwise("relu", pointwise("add", x, inp(1, x.shape[1], 1, 1, dtype=x.dtype))), both(x, 2, 3)]
    for root in roots:
        taken = nvrtc.resources(nvrtc.compile(made(root)[1].source, arch)).values()
        assert all(t.stack <= 8 for t in taken), (root, taken)  # two numbers, for a fourth block of 64 registers


def both(x: Node, *dims: int, keepdim: bool = False) -> Node:
    return pointwise("mul", fold(x, "mean", *dims, keepdim=keepdim), fold(x, "max", *dims, keepdim=keepdim))


LARGE = inp(0, 2, 6, 130, 131)
SEVERAL: dict[str, Callable[[], Node]] = {
    "one of both": lambda: both(LARGE, 2, 3),
    "of volumes": lambda: both(inp(0, 2, 8, 30, 40, 15), 2, 3, 4),
    "in half precision": lambda: both(inp(0, 2, 24, 130, 129, dtype=BF16), 2, 3),
    "of two images": lambda: pointwise(
        "div",
        fold(pointwise("mul", LARGE, inp(1, 2, 6, 130, 131)), "sum", 1, 2, 3),
        fold(pointwise("square", LARGE), "sum", 1, 2, 3),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_reductions(name: str) -> None:
    root = SEVERAL[name]()
    assert group_of(root).family == "several reductions"
    check(root, order=ORDERS[zlib.crc32(name.encode()) % len(ORDERS)], ulps=2 if root.dtype == BF16 else 8)


@pytest.mark.parametrize("x", [X, ODD, inp(0, 2, 5, 3, 4, 7), inp(0, 3, 16, 9, 7, dtype=BF16)], ids=repr)
def test_functions(x: Node) -> None:
    root = pointwise("relu", pointwise("mul", x, inp(1, *x.shape[1:2], *(1,) * (x.ndim - 2), dtype=x.dtype)))
    assert made(root)[1].output.layout == "channels_last"
    check(root, order="shuffled", ulps=2 if x.dtype == BF16 else 8)


def likely(x: Node) -> Node:
    """Logarithms of a softmax of channels, by eager's steps."""
    away = pointwise("sub", x, fold(x, "max", 1, keepdim=True))
    return pointwise("sub", away, pointwise("log", fold(pointwise("exp", away), "sum", 1, keepdim=True)))


KEPT: dict[str, Callable[[], Node]] = {
    "normalized": lambda: normalized(inp(0, B, 24, 8, 12), 1),
    "normalized, odd": lambda: normalized(inp(0, B, 33, 7, 5), 1),
    "standardized, with numbers of channels": lambda: pointwise(
        "add", pointwise("mul", standardized(inp(0, B, 96, 5, 6), 1), inp(1, 96, 1, 1)), inp(2, 96, 1, 1)
    ),
    "a residual": lambda: pointwise("add", rms(inp(0, B, 64, 5, 6), 1), inp(1, B, 64, 5, 6)),
    "a number of each position": lambda: pointwise("mul", rms(inp(0, B, 64, 5, 6), 1), inp(1, B, 1, 5, 6)),
    "volumes": lambda: likely(inp(0, 2, 40, 3, 4, 5)),
    "half precision": lambda: standardized(inp(0, 3, 48, 9, 7, dtype=BF16), 1),
    "one of two images": lambda: fold(
        pointwise("mul", normalized(inp(0, B, 32, 5, 6), 1), normalized(inp(1, B, 32, 5, 6), 1)), "sum", 1, keepdim=True
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_channels_that_are_kept_are_rows(name: str) -> None:
    """Read once, sixteen bytes at a time where channels are as many, and written as they lie."""
    root = KEPT[name]()
    found, k = made(root)
    assert found.family == "kept rows" and "columns<" not in k.source
    assert k.output.layout == ("contiguous" if root.shape[1] == 1 else "channels_last")
    check(root, order=ORDERS[zlib.crc32(name.encode()) % len(ORDERS)], ulps=2 if root.dtype == BF16 else 16)


def test_columns_of_positions_are_no_such_rows() -> None:
    root = normalized(inp(0, B, 24, 8, 40), 3)
    assert all("last" not in option for option in cuda.options(group_of(root), {B: 5}, images(root)))
