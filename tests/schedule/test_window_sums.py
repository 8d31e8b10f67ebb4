"""Range sums that are average pools: which become pools, and that they compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.ops import Pool, Slot
from fusewright.ir.slots import pool_slots
from fusewright.pipeline import build
from fusewright.schedule.window_sums import as_pools

Slots = tuple[Slot, ...]


def inp(index: int, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
    return make(ops.Input(shape, dtype, torch.device("cpu"), f"a{index}", index))


def streamed(*shape: int, dtype: torch.dtype = torch.float32) -> Node:
    """A value of several tensors, which no range reduction computes."""
    x = pointwise("mul", inp(0, *shape, dtype=dtype), inp(1, shape[1], *(1,) * (len(shape) - 2), dtype=dtype))
    return pointwise("relu", x)


def summed(x: Node, **tables: Slots) -> Node:
    dtype = x.dtype
    return make(ops.RangeSum(tuple((int(dim[1:]), slots) for dim, slots in tables.items()), dtype), x)


def average(length: int, kernel: int, stride: int, padding: int = 0, scale: float = 1.0) -> Slots:
    op = Pool("avg", (kernel,), (stride,), (padding,), (1,))
    return tuple(Slot(s.start, s.stop, s.step, s.scale * scale) for s in pool_slots(op, 0, length))


POOLS: dict[str, Node] = {
    "side by side": summed(streamed(2, 3, 8, 6), d2=average(8, 2, 2), d3=average(6, 2, 2)),
    "overlapping": summed(streamed(2, 3, 9, 7), d2=average(9, 3, 2), d3=average(7, 3, 1)),
    "apart, of two sizes": summed(streamed(2, 3, 9, 11), d2=average(9, 1, 3), d3=average(11, 2, 4)),
    "along one dimension": summed(streamed(2, 3, 8, 6), d3=average(6, 3, 3)),
    "one dimension": summed(streamed(2, 3, 12), d2=average(12, 3, 3)),
    "three dimensions": summed(streamed(2, 3, 4, 6, 8), d2=average(4, 2, 2), d4=average(8, 2, 2)),
    "scaled": summed(streamed(2, 3, 8, 6), d2=average(8, 2, 2, scale=3.0), d3=average(6, 2, 2)),
    "of everything": summed(streamed(2, 3, 4, 6), d2=average(4, 4, 1), d3=average(6, 6, 1)),
}

OTHERS: dict[str, Node] = {
    "clipped": summed(streamed(2, 3, 8, 6), d2=average(8, 3, 2, 1)),
    "steps": summed(streamed(2, 3, 8), d2=tuple(Slot(i, i + 3, 2, 0.5) for i in range(4))),
    "channels": summed(streamed(2, 4, 8, 6), d1=average(4, 2, 2)),
    "large": summed(streamed(2, 3, 20, 20), d2=average(20, 10, 10), d3=average(20, 10, 10)),
    "half precision on a CPU": summed(streamed(2, 3, 8, 6, dtype=torch.bfloat16), d2=average(8, 2, 2)),
    "of a tensor": summed(inp(0, 2, 3, 8, 6), d2=average(8, 2, 2)),
    "of one tensor's values": summed(pointwise("relu", inp(0, 2, 3, 8, 6)), d2=average(8, 2, 2)),
}


def graph_of(root: Node) -> Graph:
    nodes = Graph((), (root,)).nodes()
    return Graph(tuple(sorted((n for n in nodes if isinstance(n.op, ops.Input)), key=lambda n: n.op.index)), (root,))


def value(graph: Graph, *given: torch.Tensor) -> Any:
    return lower(graph).functions()[1](None, *given)[0]


@pytest.mark.parametrize("name", POOLS)
def test_a_pool(name: str) -> None:
    graph = graph_of(POOLS[name])
    pooled = as_pools(graph)
    assert [n.op.kind for n in pooled.nodes() if isinstance(n.op, ops.Pool)] == ["avg"]
    assert not any(isinstance(n.op, ops.RangeSum) for n in pooled.nodes())
    assert any(isinstance(n.op, ops.Pointwise) and n.op.fn == "mul" for n in pooled.nodes()[-1:]) == (name == "scaled")
    given = [torch.randn(n.shape, dtype=torch.float64) for n in graph.inputs]
    torch.testing.assert_close(value(pooled, *given), value(graph, *given))


@pytest.mark.parametrize("name", OTHERS)
def test_no_pool(name: str) -> None:
    graph = graph_of(OTHERS[name])
    assert as_pools(graph) is graph


def test_a_value_that_others_use_is_in_memory() -> None:
    x = streamed(2, 3, 8, 6)
    root = summed(x, d2=average(8, 2, 2))
    graph = graph_of(root)
    graph = Graph(graph.inputs, (root, x))
    assert as_pools(graph) is graph


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_results_lie_as_they_did(kind: str) -> None:
    """A sum over rows lies row by row in eager, and a pool as its input."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self.conv(torch.relu(self.norm(x))), kind)(-1, keepdim=True)

    model = Model().eval().requires_grad_(False)
    x = torch.randn(2, 6, 4, 4).contiguous(memory_format=torch.channels_last)
    fast = fusewright.optimize(model, (x,), rewrite="always", kernels="always", measure=False, verify=False)
    with torch.no_grad():
        expected, given = model(x), fast(x)
    assert given.stride() == expected.stride()
    torch.testing.assert_close(given, expected)


def test_one_after_the_other() -> None:
    """What is made anew behind a pool is one as well."""
    inner = summed(streamed(2, 3, 8, 12), d2=average(8, 2, 2))
    outer = summed(pointwise("add", inner, inp(2, 3, 1, 1)), d3=average(12, 2, 2))
    graph = graph_of(outer)
    pooled = as_pools(graph)
    assert [type(n.op) for n in pooled.nodes()].count(ops.Pool) == 2
    given = [torch.randn(n.shape, dtype=torch.float64) for n in graph.inputs]
    torch.testing.assert_close(value(pooled, *given), value(graph, *given))


def test_a_transition_is_one_stream_ahead_of_its_convolution() -> None:
    """As in a DenseNet: parts, batch norm, relu, and the pool that slid ahead of the convolution."""

    class Transition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv, self.pool = nn.BatchNorm2d(24), nn.Conv2d(24, 8, 1, bias=False), nn.AvgPool2d(2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.pool(self.conv(torch.relu(self.norm(torch.cat([x, y], 1)))))

    model = Transition().eval().requires_grad_(False)
    given = torch.randn(2, 16, 12, 12), torch.randn(2, 8, 12, 12)
    built = build(model, given, {}, mode="always", kernels="always", measure=False)
    assert [choice.family for choice in built.choices if choice.name == "fused_cat_mul_add_relu_avg"] == ["stream"]
    assert "torch.cat" not in built.program.source and "pool" not in built.program.source
    derive, forward = built.program.functions()
    torch.testing.assert_close(forward(model, *given, *derive(model)), model(*given))
