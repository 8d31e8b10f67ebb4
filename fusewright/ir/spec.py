"""What a valid graph is.  Checked between all phases: every phase takes a valid graph and returns one."""

from __future__ import annotations

from fusewright.errors import GraphError
from fusewright.ir.node import Graph, Node
from fusewright.ir.ops import Input, Opaque


def check(graph: Graph) -> Graph:
    """`graph` itself; raises `GraphError` naming the first node that breaks a rule.

    - every node's type is what its operation infers from its arguments;
    - every live effectful node is listed in `effects`, once, and in the order of the serial numbers;
    - every live input is listed in `inputs`, at its own index.
    """
    live = graph.nodes()
    for node in live:
        _check_type(node)
    _check_effects(graph, live)
    for node in live:
        if isinstance(node.op, Input) and graph.inputs[node.op.index] is not node:
            raise GraphError(f"input {node.op.name} is not at its index {node.op.index}")
    return graph


def _check_type(node: Node) -> None:
    inferred = node.op.infer(tuple(None if a is None else a.type for a in node.args))
    if (inferred.shape, inferred.dtype, inferred.device) != (node.shape, node.dtype, node.device):
        raise GraphError(f"{node!r} should be {inferred.shape} {inferred.dtype} on {inferred.device}")


def _check_effects(graph: Graph, live: list[Node]) -> None:
    listed = [e for e in graph.effects if e.op.effectful]
    if len(listed) != len(graph.effects) or len(set(map(id, listed))) != len(listed):
        raise GraphError("effects must be effectful nodes, each listed once")
    for node in live:
        if node.op.effectful and not any(node is e for e in listed):
            raise GraphError(f"{node!r} has an effect but is not listed in the graph's effects")
    serials = [getattr(e.op, "serial", None) for e in listed]
    if any(s is None for s in serials) or serials != sorted(serials, key=lambda s: s or 0):
        raise GraphError(f"effects out of order: serial numbers {serials}")
    if any(isinstance(e.op, Opaque) and not e.op.target for e in listed):
        raise GraphError("an opaque operation without a target")
