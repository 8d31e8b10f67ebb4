"""Cases at the very edge of a rule's condition, on both sides of it."""

from __future__ import annotations

from itertools import product
from math import inf, nan

import pytest
import torch
from harness import B, check_near, fired, graph_of, inp, phrase, reason
from linear_cases import adaptive, avg_pool, conv, range_sum, reduce

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise
from fusewright.ir.node import Node, make
from fusewright.rules import folding, pooling, sizes, sums, windows
from fusewright.rules import pointwise as scalars


def max_pools(stride: int, spread: int, kernel: int = 3) -> Node:
    """A max pool of dilation `spread` behind one of `stride`."""
    inner = make(ops.Pool("max", (kernel,), (stride,), (0,), (1,)), inp(2, 3, 30))
    return make(ops.Pool("max", (2,), (1,), (0,), (spread,)), inner)


def permuted(x: Node, *, copy: bool = False) -> Node:
    """x with its dimensions rotated."""
    return make(ops.Permute((*range(1, x.ndim), 0), copy), x)


def turned(**options) -> Node:
    return conv(inp(2, 3, 4, 4), inp(3, 2, 1, 1), transposed=True, **options)


REFUSED = {
    "the inner windows leave gaps": (pooling.max_pool_of_max_pool, lambda: max_pools(2, 2)),
    "it strides, crops or pads # one stride": (windows.single_tap_transpose, lambda: turned(stride=(1, 2))),
    "it strides, crops or pads # one crop": (windows.single_tap_transpose, lambda: turned(padding=((0, 0), (1, 1)))),
    "the kernel has more than one tap # one way": (
        windows.single_tap_transpose,
        lambda: conv(inp(2, 3, 4, 4), inp(3, 2, 1, 2), transposed=True),
    ),
    "it strides, crops or pads # one row more": (
        windows.single_tap_transpose,
        lambda: make(ops.Conv((1, 1), ((0, 0),) * 2, (1, 2), 1, True, (0, 1)), inp(2, 3, 4, 4), inp(3, 2, 1, 1), None),
    ),
    "the windows read nothing but padding # of one value": (
        folding.box_into_weight,
        lambda: range_sum(
            conv(inp(2, 1, 1), inp(1, 1, 1), padding=2), d2=tuple(ops.Slot(i, i + 1, 1, 1.0) for i in (0, 1))
        ),
    ),
    "the convolution is strided or padded # one way": (
        sums.sum_of_pointwise_conv,
        lambda: avg_pool(conv(inp(2, 3, 4, 4), inp(2, 3, 1, 1), padding=((0, 0), (1, 1))), 2, 2),
    ),
    "the scale is zero, not finite or not normal # its reciprocal": (
        pooling.extreme_of_scale,
        lambda: reduce("max", pointwise("mul", inp(B, 3), 1e308), 1),
    ),
    "the order in memory would change # to channels last": (
        sizes.view_of_view,
        lambda: make(ops.Permute((0, 3, 1, 2)), make(ops.Permute((0, 2, 3, 1), copy=True), inp(B, 3, 4, 4))),
    ),
    "a window lies in the padding alone # one way": (
        pooling.extreme_of_function,
        lambda: make(ops.Pool("max", (1, 2), (1, 1), (0, 1), (1, 2)), pointwise("relu", inp(2, 3, 4, 1))),
    ),
    "the kernel is larger than 1 # one way": (
        sums.sum_of_pointwise_conv,
        lambda: avg_pool(conv(inp(2, 3, 4, 4), inp(2, 3, 1, 2)), 2, 2),
    ),
    "the kernel is larger than 1": (
        sums.sum_of_pointwise_conv,
        lambda: adaptive(conv(inp(2, 3, 9), inp(2, 3, 3)), d2=2),
    ),
    "the constants may be there to round": (
        scalars.shift_of_shift,
        lambda: pointwise("sub", pointwise("add", inp(B, 3), 2.0**50), 2.0**50),
    ),
    "# two tensors": (scalars.zero, lambda: pointwise("mul", inp(B, 3), inp(B, 3))),
    "the inner cast may change values # complex": (
        scalars.cast_of_cast,
        lambda: cast(cast(inp(3, dtype=torch.int64), torch.complex64), torch.float32),
    ),
}
REFUSED |= {
    f"a constant is not finite # {name}": (
        scalars.shift_of_shift,
        lambda first=first, second=second: pointwise("add", pointwise("add", inp(B, 3), first), second),
    )
    for name, first, second in (("nan", nan, 1.0), ("nan behind", 1.0, nan), ("both", inf, -inf))
}
TAKEN = {
    "as many range sums as may be": (
        windows.sum_through_conv,
        lambda: adaptive(conv(inp(2, 2, 10), inp(3, 2, 2)), d2=20),
    ),
    "as many range sums as may be, of little": (
        windows.sum_through_conv,
        lambda: adaptive(conv(inp(2, 2, 3), inp(3, 2, 4), padding=1), d2=4),
    ),
    "windows as far apart as they are long": (pooling.max_pool_of_max_pool, lambda: max_pools(1, 3)),
    "nothing added": (sums.sum_of_constant, lambda: reduce("sum", pointwise("add", inp(B, 3, 4), 0.0), 1)),
    "nothing is padded, whatever the length": (
        pooling.extreme_of_function,
        lambda: make(ops.Pool("max", (2,), (1,), (0,), (1,)), pointwise("relu", inp(2, 3, B))),
    ),
    "every other average of averages that overlap": (
        pooling.avg_pool_of_avg_pool,
        lambda: avg_pool(avg_pool(inp(B, 2, 9), 3, stride=(1,)), 1, stride=(2,)),
    ),
    "an inner view, an outer copy": (sizes.view_of_view, lambda: permuted(permuted(inp(B, 3, 4)), copy=True)),
    "two copies": (sizes.view_of_view, lambda: permuted(permuted(inp(B, 3, 4), copy=True), copy=True)),
    "the last window left out": (
        folding.box_into_weight,
        lambda: range_sum(conv(inp(B, 2, 7), inp(3, 2, 2)), d2=tuple(ops.Slot(i, i + 2, 1, 0.5) for i in range(4))),
    ),
    "late windows, into the padding": (
        folding.box_into_weight,
        lambda: range_sum(
            conv(inp(B, 2, 6, 9), inp(3, 2, 2, 2), stride=(1, 2), padding=((0, 3), (0, 2))),
            d2=tuple(ops.Slot(i, i + 2, 1, 0.5) for i in (1, 3, 5)),
            d3=tuple(ops.Slot(i, i + 2, 1, 0.5) for i in (1, 2, 3)),
        ),
    ),
    "one window along one dimension of two": (
        folding.box_into_weight,
        lambda: range_sum(
            conv(inp(2, 2, 9, 7), inp(3, 2, 2, 2), stride=2),
            d2=(ops.Slot(1, 2, 1, 0.5), ops.Slot(2, 3, 1, 0.5)),
            d3=(ops.Slot(1, 3, 1, 0.5),),
        ),
    ),
}


@pytest.mark.parametrize(("key", "case"), REFUSED.items(), ids=REFUSED)
def test_refused(key: str, case) -> None:
    rule, root = case
    said = reason(rule, key, root())
    assert said.startswith(phrase(key)) and bool(said) == bool(phrase(key))


@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_taken(case) -> None:
    rule, root = case
    check_near(rule, root())


def test_scales_that_cancel_leave_nothing() -> None:
    graph = fired(scalars.scale_of_scale, graph_of(pointwise("div", pointwise("mul", inp(B, 3), 4.0), 4.0))).graph
    assert isinstance(graph.outputs[0].op, ops.Input)


def test_the_mean_of_a_number_is_the_number() -> None:
    graph = fired(sums.sum_of_constant, graph_of(reduce("mean", pointwise("add", inp(B, 3), 2.0), 1))).graph
    assert [n.op.value for n in graph.nodes() if isinstance(n.op, ops.Number)] == [2.0]
    assert not any(isinstance(n.op, ops.Full) for n in graph.nodes())


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def extremes(dtype: torch.dtype) -> torch.Tensor:
    """The values of a dtype that another one is most likely to lack."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([info.min, info.min + 1, 0, info.max - 1, info.max], dtype=dtype)
    limits = torch.finfo(dtype)
    values = [limits.min, limits.max, limits.tiny, limits.eps, 1 + limits.eps, 0.5]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("wide", "narrow"), list(product(DTYPES, DTYPES)), ids=str)
def test_a_dtype_holds_another(wide: torch.dtype, narrow: torch.dtype) -> None:
    values = extremes(narrow)
    there = values.to(wide)
    kept = [a.item() == b.item() for a, b in zip(values, there, strict=True)]
    assert scalars.holds(wide, narrow) == all(kept)


def test_nothing_is_known_of_other_dtypes() -> None:
    assert not scalars.holds(torch.complex64, torch.float32) and not scalars.holds(torch.complex64, torch.int8)
    assert not scalars.holds(torch.float32, torch.complex64) and not scalars.holds(torch.int8, torch.complex64)
