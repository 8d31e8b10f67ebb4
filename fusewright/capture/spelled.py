"""Calls that PyTorch itself composes of others (`F.cosine_similarity`, `torch.tensordot`, most losses), written out.

    l1_loss(x, t)  ->  mean(abs(x - t))

Eager runs such a call as those others, and so do gradients: nothing changes but that they can be understood.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

# Compositions of which devices have kernels of their own, faster than what is composed.
_OWN_KERNELS = ("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu")

# A composition of more calls is a loop over a sequence, or the like.
_MOST = 40


def spelled(node: fx.Node) -> fx.Graph | None:
    """The calls that the call of `node` is composed of, a placeholder for each of its `operands`; `None` where it is
    not composed of others, or better left as it is."""
    target = node.target
    if not isinstance(target, OpOverload) or target.overloadpacket.__name__ in _OWN_KERNELS:
        return None
    if target._schema.is_mutable or not hasattr(target, "decompose"):
        return None
    given = [n.meta.get("val") for n in operands(node)]
    if any(value is None for value in given):
        return None

    def composed(*values: Any) -> Any:
        known = dict(zip(operands(node), values, strict=True))
        args: Any = fx.map_arg(node.args, known.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, known.__getitem__)
        return target.decompose(*args, **kwargs)

    try:
        with torch.no_grad():
            graph = make_fx(composed)(*given).graph
    except Exception:  # whatever stands in the way: the call itself runs as it did
        return None
    if any(str(n.target) == "aten.size.default" for n in graph.nodes):  # asks for what is no tensor; not all PyTorch do
        return None
    for inner in graph.nodes:
        inner.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    return graph if sum(n.op == "call_function" for n in graph.nodes) <= _MOST else None


def operands(node: fx.Node) -> list[fx.Node]:
    """The values of the trace that a call takes, each once."""
    return list(node.all_input_nodes)
