"""What the rules about windows and rows owe to accuracy and speed, which equal values do not show."""

from __future__ import annotations

import pytest
import torch
from harness import B, fired, graph_of, inp
from linear_cases import adaptive, avg_pool, conv, range_sum, reduce

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make
from fusewright.rules import features, folding, windows
from fusewright.rules.rule import Rule

F32 = torch.float32


def rewritten(rule: Rule, root: Node, dtype: torch.dtype = F32) -> Graph:
    return fired(rule, graph_of(root, dtype=dtype)).graph


def contraction(graph: Graph) -> Node:
    (found,) = (n for n in graph.nodes() if isinstance(n.op, ops.Conv | ops.Matmul))
    return found


def adds(graph: Graph) -> int:
    return sum(isinstance(n.op, ops.Pointwise) and n.op.fn == "add" for n in graph.nodes())


def plain(**options) -> Node:
    return conv(inp(B, 2, 9, 6), inp(3, 2, 3, 2), inp(3), **options)


def turned(**options) -> Node:
    return conv(inp(B, 2, 5, 4), inp(2, 3, 3, 2), inp(3), transposed=True, **options)


def row(x: Node) -> Node:
    return make(ops.Matmul(True), x, inp(5, 4), inp(5))


WIDE = {
    "one position left": (windows.sum_through_conv, lambda: reduce("mean", plain(), 2, 3)),
    "one position left, transposed": (windows.sum_through_conv_transpose, lambda: reduce("sum", turned(), 2, 3)),
    "the other dimension is 1 already": (
        windows.sum_through_conv,
        lambda: reduce("mean", conv(inp(B, 2, 9, 2), inp(3, 2, 3, 2), inp(3)), 2),
    ),
    "one row left": (features.rows_before_matmul, lambda: reduce("mean", row(inp(6, 4)), 0)),
    "one row left of two dimensions": (features.rows_before_matmul, lambda: reduce("sum", row(inp(2, 6, 4)), 0, 1)),
}
NARROW = {
    "several positions along the other dimension": (windows.sum_through_conv, lambda: reduce("mean", plain(), 2)),
    "several slots": (windows.sum_through_conv, lambda: adaptive(plain(), d2=2, d3=1)),
    "several slots, transposed": (windows.sum_through_conv_transpose, lambda: avg_pool(turned(), 3, 3)),
    "several rows": (features.rows_before_matmul, lambda: reduce("mean", row(inp(2, 6, 4)), 1)),
    "several slots of all rows": (features.rows_before_matmul, lambda: adaptive(row(inp(6, 4)), d0=2)),
    "several slots of rows": (features.rows_before_matmul, lambda: avg_pool(row(inp(2, 6, 4)), 3, 1)),
}


@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE)
def test_a_small_contraction_is_carried_wide(case) -> None:
    rule, root = case
    assert contraction(rewritten(rule, root())).dtype == torch.float64
    assert contraction(rewritten(rule, root(), torch.bfloat16)).dtype == F32


@pytest.mark.parametrize("case", NARROW.values(), ids=NARROW)
def test_a_large_contraction_stays_in_its_dtype(case) -> None:
    rule, root = case
    assert contraction(rewritten(rule, root())).dtype == F32


UNIFORM = {
    "mean": (windows.sum_through_conv, lambda: reduce("mean", plain(padding=1), 2, 3)),
    "sum, transposed": (windows.sum_through_conv_transpose, lambda: reduce("sum", turned(), 2, 3)),
    "pool": (windows.box_before_conv, lambda: avg_pool(plain(), 2, 2)),
    "rows": (features.rows_before_matmul, lambda: reduce("sum", row(inp(6, 4)), 0)),
}


@pytest.mark.parametrize("case", UNIFORM.values(), ids=UNIFORM)
def test_a_bias_that_all_slots_share_stays_in_the_contraction(case) -> None:
    rule, root = case
    graph = rewritten(rule, root())
    assert not adds(graph) and len(contraction(graph).inputs) == 3


def test_a_mean_leaves_the_bias_alone() -> None:
    graph = rewritten(windows.sum_through_conv, reduce("mean", plain(), 2, 3), torch.float64)
    assert isinstance(contraction(graph).arg(2).op, ops.Input)


def test_a_bias_that_slots_weigh_differently_is_added_behind() -> None:
    root = avg_pool(plain(), 2, 2, padding=(1, 0))
    assert adds(rewritten(windows.sum_through_conv, root)) == 1


@pytest.mark.parametrize(
    ("rule", "y"), [(windows.sum_through_conv, plain), (windows.sum_through_conv_transpose, turned)]
)
def test_taps_are_channels_where_there_are_several_slots(rule: Rule, y) -> None:
    """Those of summed dimensions; of one slot, what is left is a product of the whole kernel already."""
    found = contraction(rewritten(rule, avg_pool(y(), 2, 2, padding=(1, 1))))
    assert found.op.stride == (1, 1) and found.arg(0).shape[1] == 12 and set(found.arg(1).shape) == {12, 3, 1}
    one = contraction(rewritten(windows.sum_through_conv, reduce("mean", plain(), 2, 3)))
    assert one.arg(0).shape[1:] == (2, 3, 2)


@pytest.mark.parametrize("y", [plain, turned])
def test_the_divisor_of_a_mean_goes_into_the_weight(y) -> None:
    rule = windows.sum_through_conv if y is plain else windows.sum_through_conv_transpose
    mean, total = (rewritten(rule, reduce(kind, y(), 2, 3), torch.float64) for kind in ("mean", "sum"))
    assert (scaled_weights(mean), scaled_weights(total)) == (1, 0)
    assert {s.scale for n in mean.nodes() if isinstance(n.op, ops.RangeSum) for _, t in n.op.table for s in t} == {1.0}


def scaled_weights(graph: Graph) -> int:
    return sum(isinstance(n.op, ops.Pointwise) and n.op.fn == "mul" and n.ndim == 4 for n in graph.nodes())


def test_taps_that_sum_the_same_are_summed_once() -> None:
    graph = rewritten(windows.sum_through_conv_transpose, reduce("sum", turned(), 2, 3))
    assert contraction(graph).arg(1).shape == (2, 3, 1, 1)
    cropped = rewritten(windows.sum_through_conv_transpose, reduce("sum", turned(padding=((1, 1), (0, 0))), 2, 3))
    assert contraction(cropped).arg(1).shape == (6, 3, 1, 1)
    full = ((2, 2), (0, 1))
    padded = rewritten(windows.sum_through_conv, reduce("mean", plain(padding=full), 2, 3))
    assert contraction(padded).arg(1).shape == (3, 2, 1, 2) and contraction(padded).op.stride == (1, 2)


@pytest.mark.parametrize("rule", [windows.box_before_conv, folding.box_into_weight])
def test_average_pools_slide_before_a_transposed_convolution_of_stride_one(rule: Rule) -> None:
    y = turned(padding=((1, 1), (2, 2)))
    graph = rewritten(rule, avg_pool(y, 2, 1))
    op = contraction(graph).op
    assert not op.transposed and not any(isinstance(n.op, ops.Pool) for n in graph.nodes())
    assert op.stride == (2, 1)


def test_a_kernel_that_covers_its_input_is_one_matmul() -> None:
    graph = rewritten(windows.full_conv_is_matmul, conv(inp(B, 4, 3), inp(6, 4, 3), inp(6)))
    assert len(contraction(graph).inputs) == 3 and not adds(graph)
    assert not any(isinstance(n.op, ops.Permute) for n in graph.nodes())


@pytest.mark.parametrize("rule", [windows.box_before_conv, folding.box_into_weight])
def test_pooling_follows_along_padded_dimensions(rule: Rule) -> None:
    y = conv(inp(B, 2, 9, 12), inp(3, 2, 2, 3), inp(3), stride=(1, 2))
    graph = rewritten(rule, avg_pool(y, 3, 2, stride=(2, 2), padding=(1, 0), count_include_pad=False))
    (pool,) = [n for n in graph.nodes() if isinstance(n.op, ops.Pool)]
    assert (pool.op.kernel, pool.op.stride, pool.op.padding) == ((3, 1), (2, 1), (1, 0))
    assert contraction(graph).op.stride == (1, 4) and not pool.op.count_include_pad


def test_a_tail_too_short_for_a_window_is_not_cut_off() -> None:
    graph = rewritten(folding.box_into_weight, avg_pool(conv(inp(B, 2, 10), inp(3, 2, 3), inp(3)), 3))
    assert not any(isinstance(n.op, ops.Slice) for n in graph.nodes())


@pytest.mark.parametrize(("stride", "spread"), [(1, 2), (2, 4)])
def test_a_folded_kernel_has_no_taps_that_are_always_zero(stride: int, spread: int) -> None:
    y = conv(inp(B, 2, 20), inp(3, 2, 2), inp(3), stride=stride, dilation=spread)
    graph = rewritten(folding.box_into_weight, range_sum(y, d2=tuple(ops.Slot(i, i + 3, 2, 0.5) for i in (0, 3))))
    assert contraction(graph).arg(1).shape == (3, 2, 3) and contraction(graph).op.dilation == (spread,)
