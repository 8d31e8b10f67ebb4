"""A pass over the graph of a model by itself: what it is given, and what the graph that it gives comes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusewright.capture import Captured, capture
from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.memory_order import Order, order_of
from fusewright.ir.node import Graph, Node
from fusewright.plan import Work
from fusewright.rules import RULES
from fusewright.rules.engine import rewrite


def given(model: nn.Module, *args: Tensor) -> tuple[Captured, dict[Any, int], dict[Node, Order]]:
    """What is captured of a call, its sizes, and how its tensors lie in memory."""
    captured = capture(model, args, {})
    hints = {symbol: args[where.input].shape[where.dim] for symbol, where in captured.graph.symbols.items()}
    orders = {node: order_of(tensor, node) for node, tensor in zip(captured.graph.inputs, args, strict=True)}
    return captured, hints, orders


def value(graph: Graph, captured: Captured, model: nn.Module, *args: Tensor) -> Tensor:
    """What a graph made of the captured one gives by ATen's operations."""
    derive, forward = lower(graph, None, captured.constants).functions()
    with torch.no_grad():
        result: Tensor = forward(model, *args, *derive(model))[0]
    return result


class Part(nn.Module):
    """What lies inside along the first dimension of positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 2:-1]


def begun_inside(graph: Graph) -> Graph:
    """The same of a convolution of a `Part`: its windows begin and end inside of x."""
    rules = [rule for rule in RULES if rule.name == "conv(slice(x), w) = conv_cropped(x, w)"]
    found = rewrite(graph, rules, lambda node: Work(0, 0, 0, 0), mode="always").graph
    (conv,) = (node.op for node in found.nodes() if isinstance(node.op, ops.Conv))
    assert conv.padding[0] == (-2, -1)
    return found
