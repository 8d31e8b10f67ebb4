"""In which order the dimensions of values lie in memory, in eager PyTorch and with kernels in their places.

An *order* lists the dimensions longer than 1, the densest last.  What nothing is known of has an order of its own,
equal where operation and operands' orders are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph, Node, topological

Order = tuple[Any, ...]


def order_of(node: Node, tensor: Tensor) -> Order:
    """Of the dimensions of `tensor`, which `node` stands for."""
    return _rows(node) if tensor.is_contiguous() else tuple(sorted(_rows(node), key=tensor.stride, reverse=True))


def same_orders(graph: Graph, other: Graph, given: Mapping[Node, Order]) -> bool:
    """Whether the outputs of `graph`, run by kernels where it has `Fused` nodes, lie as those of `other` in eager.

    `given` has the inputs, parameters and buffers that do not lie row by row.
    """
    actual, eager = _orders(graph, given, kernels=True), _orders(other, given, kernels=False)
    outputs = [(a, b) for a, b in zip(graph.outputs, other.outputs, strict=True) if isinstance(a, Node)]
    return all(actual[a] == eager[b] for a, b in outputs if isinstance(b, Node))


def _orders(graph: Graph, given: Mapping[Node, Order], *, kernels: bool) -> dict[Node, Order]:
    found = dict(given)
    for node in graph.nodes():
        if node not in found:
            found[node] = _fused(node, found, kernels) if isinstance(node.op, Fused) else _order(node, found)
    return found


def _fused(node: Node, known: Mapping[Node, Order], kernels: bool) -> Order:
    """Kernels write row by row, but for a convolution's positions, in the format of its input."""
    assert isinstance(node.op, Fused)
    inside: dict[Node, Order] = {}
    nodes = topological([node.op.body])
    for inner in nodes:
        operand = node.args[inner.op.index] if isinstance(inner.op, ops.Input) else None
        inside[inner] = _order(inner, inside) if operand is None else known[operand]
    order = inside[node.op.body]
    convolves = any(isinstance(n.op, ops.Conv) for n in nodes)
    return order if not kernels or (convolves and order == _last(node)) else _rows(node)


def _rows(node: Node) -> Order:
    return tuple(d for d, length in enumerate(node.shape) if length != 1)


def _last(node: Node) -> Order:
    """Channels last; only images have that."""
    rows = _rows(node)
    return tuple(d for d in rows if d != 1) + (1,) * (1 in rows) if node.ndim in (4, 5) else rows


def _order(node: Node, known: Mapping[Node, Order]) -> Order:
    rows = _rows(node)
    operands = [(a, known[a]) for a in node.inputs if not isinstance(a.op, ops.Number)]
    match node.op:
        case ops.Matmul() | ops.Reduce() | ops.Softmax() | ops.Permute(copy=True):
            return rows
        case ops.Permute(dims=dims) if _is_known(operands[0][1]):
            return tuple(dims.index(d) for d in operands[0][1])
        case ops.Conv():
            return _last(node) if any(order == _last(a) != _rows(a) for a, order in operands[:2]) else rows
        case ops.Pool() | ops.Norm():
            x, order = operands[0]
            batch = not isinstance(node.op, ops.Norm) or node.op.kind == "batch"
            return _last(node) if batch and order == _last(x) else rows
        case ops.Pointwise() | ops.Cast() | ops.Dropout():
            # the first operand that has all dimensions decides
            return next((order for a, order in operands if _is_known(order) and a.shape == node.shape), rows)
    if len(rows) < 2 or all(order == _rows(a) for a, order in operands):
        return rows
    return ("?", type(node.op).__name__, node.shape, *(order for _, order in operands))


def _is_known(order: Sequence[Any]) -> bool:
    return order[:1] != ("?",)
