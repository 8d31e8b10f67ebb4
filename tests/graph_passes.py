"""A pass over the graph of a model by itself: what it is given, and what the graph that it gives comes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fusewright.capture import Captured, capture
from fusewright.codegen.aten import lower
from fusewright.ir.memory_order import Order, order_of
from fusewright.ir.node import Graph, Node


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
