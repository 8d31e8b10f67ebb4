"""A graph captured on one device as it would be on another."""

from __future__ import annotations

from dataclasses import replace

import torch

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.types import Op, TensorType


def placed(graph: Graph, device: torch.device) -> Graph:
    """`graph` with every tensor that it takes or makes on `device`."""
    mapping: dict[Node, Node] = {}
    for node in (*graph.inputs, *graph.nodes()):
        if node not in mapping:
            args = tuple(None if a is None else mapping[a] for a in node.args)
            mapping[node] = make(_placed(node.op, device), *args, where=node.where)
    return replace(
        graph,
        inputs=tuple(mapping[n] for n in graph.inputs),
        outputs=tuple(mapping[o] if isinstance(o, Node) else o for o in graph.outputs),
        effects=tuple(mapping[e] for e in graph.effects),
    )


def _placed(op: Op, device: torch.device) -> Op:
    match op:
        case ops.Source() | ops.Full() | ops.Vector():
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
