"""What a trace has of ``torch.vmap`` is written out: the operations that its batching rules make of the function.

    _vmap_increment_nesting(8), y = _add_batch_dim(x), le(y, z), ..., _vmap_decrement_nesting()   ->   le(x[:, None], z)

PyTorch's export keeps the calls of the machinery as they were made, and operations between them on values of which a
dimension is hidden.  Masks of attention are made so in `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

_DEEPER, _SHALLOWER = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_IDLE = "lazy_load_decompositions"


def unmapped(graph: fx.Graph, owner: fx.GraphModule) -> fx.Graph:
    """`graph`, whose attributes `owner` has, without any of `torch.vmap`'s machinery; what its batching rules cannot be
    traced for stays."""
    if not any(_kind(node) == _DEEPER for node in graph.nodes):
        return graph
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))  # a trace belongs to its program
    for node in [n for n in copy.nodes if _kind(n) == _IDLE and not n.users]:
        copy.erase_node(node)
    for region in list(_regions(copy)):
        _write_out(copy, region, owner)
    for node in [n for n in copy.nodes if n.op == "get_attr" and not n.users]:
        copy.erase_node(node)
    return copy


def _kind(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each outermost call of `torch.vmap`."""
    region: list[fx.Node] = []
    depth = 0
    for node in graph.nodes:
        depth += _kind(node) == _DEEPER
        if depth:
            region.append(node)
        depth -= _kind(node) == _SHALLOWER
        if region and not depth:
            yield region
            region = []


def _write_out(graph: fx.Graph, region: Sequence[fx.Node], owner: fx.GraphModule) -> None:
    inside = set(region)
    read = dict.fromkeys(a for node in region for a in node.all_input_nodes if a not in inside)
    inputs, attributes = ([n for n in read if (n.op == "get_attr") == held] for held in (False, True))
    results = [node for node in region if any(user not in inside for user in node.users)]

    def run(*given: Any) -> list[Any]:
        values = dict(zip(inputs, given, strict=True))
        depth = 0
        try:
            for node in (*attributes, *region):
                values[node] = _value(node, values, owner)
                depth += (_kind(node) == _DEEPER) - (_kind(node) == _SHALLOWER)
            return [values[node] for node in results]
        finally:
            for _ in range(depth):  # after an error
                torch._C._functorch._vmap_decrement_nesting()

    try:
        traced = make_fx(run)(*(node.meta["val"] for node in inputs)).graph
        traced.eliminate_dead_code()  # some batching rules ask for sizes, which are known
    except Exception:  # whoever reads the graph says that it is no plain operation
        return
    if any(node.op == "get_attr" for node in traced.nodes):
        return
    given = dict(zip((n for n in traced.nodes if n.op == "placeholder"), inputs, strict=True))
    before = set(graph.nodes)
    with graph.inserting_before(region[0]):
        found = graph.graph_copy(traced, given)
    assert isinstance(found, list | tuple)
    for node in set(graph.nodes) - before:
        node.meta |= {key: region[0].meta[key] for key in ("nn_module_stack", "stack_trace") if key in region[0].meta}
    for node, new in zip(results, found, strict=True):
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)


def _value(node: fx.Node, values: dict[fx.Node, Any], owner: fx.GraphModule) -> Any:
    if node.op == "get_attr":  # the function of a call that takes one, say
        return attrgetter(str(node.target))(owner)
    assert callable(node.target)
    return node.target(*fx.map_arg(node.args, values.__getitem__), **fx.map_arg(node.kwargs, values.__getitem__))
