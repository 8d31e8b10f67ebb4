"""On which devices a graph computes: moved to another one, and with what it reads brought to where it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make, remade
from fusewright.ir.types import Op, TensorType

Args = tuple[Node | None, ...]


def placed(graph: Graph, device: torch.device) -> Graph:
    """`graph` with every tensor that it takes or makes on `device`.

    Attributes that are single numbers stay where they are when a model is moved, and are brought there.
    """

    def moved(node: Node, args: Args) -> Node:
        if isinstance(node.op, ops.Constant) and not node.shape:
            return _brought(node, device)
        return make(_placed(node.op, device), *args, where=node.where)

    return _rebuilt(graph, moved)


def _rebuilt(graph: Graph, new: Callable[[Node, Args], Node]) -> Graph:
    """`graph` with what is `new` in place of every node, which is given the new arguments."""
    mapping: dict[Node, Node] = {}
    for node in (*graph.inputs, *graph.nodes()):
        if node not in mapping:
            mapping[node] = new(node, tuple(None if a is None else mapping[a] for a in node.args))
    return replace(
        graph,
        inputs=tuple(mapping[n] for n in graph.inputs),
        outputs=tuple(mapping[o] if isinstance(o, Node) else o for o in graph.outputs),
        effects=tuple(mapping[e] for e in graph.effects),
    )


def gathered(graph: Graph) -> Graph:
    """`graph` with operands of pointwise functions on one device: PyTorch takes numbers from the CPU as they are.

    A kernel does not, and what fuses into one should not depend on where a number is kept.
    """

    def reading_near(node: Node, args: Args) -> Node:
        if isinstance(node.op, ops.Pointwise):
            args = tuple(None if a is None else _brought(a, node.device) for a in args)
        return remade(node, args)

    return _rebuilt(graph, reading_near)


def _brought(x: Node, device: torch.device) -> Node:
    """x on `device`."""
    if x.device == device or isinstance(x.op, ops.Number):
        return x
    return make(replace(x.op, device=device)) if isinstance(x.op, ops.Full) else make(ops.Transfer(device), x)


def _placed(op: Op, device: torch.device) -> Op:
    match op:
        case ops.Source() | ops.Full() | ops.Vector() | ops.Positions():
            return replace(op, device=device)
        case ops.Opaque():
            keywords = tuple((k, device if isinstance(v, torch.device) else v) for k, v in op.keywords)
            arguments = tuple(device if isinstance(v, torch.device) else v for v in op.arguments)
            results = tuple(None if t is None else _type(t, device) for t in op.results)
            return replace(op, arguments=arguments, keywords=keywords, results=results)
        case ops.Item():
            return replace(op, result=_type(op.result, device))
    return op


def _type(kind: TensorType, device: torch.device) -> TensorType:
    return kind if kind.weak else kind._replace(device=device)
