"""Masks of attention that a trace makes and the model does not.

Libraries leave a mask out whose values hide nothing, or no more than causal attention does.  Of a trace they see no
values, and so it has the mask, for which PyTorch has slower kernels.

    attention(q, k, v, arange(S) >= 0)                     ->  attention(q, k, v)
    attention(q, k, v, arange(S) <= arange(L)[:, None])    ->  attention(q, k, v, is_causal=True)

The first hides nothing, whatever calls it.  The second is done where the model itself asks for causal attention, which
does not read what it hides: a NaN there would reach no result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make, topological
from fusewright.tree import tree_map

_ATTENTION = "aten.scaled_dot_product_attention.default"
_MASK, _CAUSAL = "attn_mask", "is_causal"


def settled(graph: Graph, asks: Callable[[], Sequence[bool]]) -> tuple[Graph, int]:
    """`graph` without masks that hide nothing, and with causal attention where the model has that; and how many went.

    `asks` says of each attention of a call of the model, in their order, whether it is causal and has no mask.
    """
    if not all(isinstance(e.op, ops.Opaque) and e.op.is_pure for e in graph.effects):
        return graph, 0  # somebody may write to a mask
    calls = [e for e in graph.effects if _target(e) == _ATTENTION]
    known: dict[Node, Tensor | None] = {}
    asked: Sequence[bool] | None = None
    gone = 0
    for place, call in enumerate(calls):
        mask = _argument(call, _MASK)
        if mask is None or mask.dtype != torch.bool:
            continue
        while isinstance(mask.op, ops.Expand):
            mask = mask.args[0]
            assert mask is not None
        value = known[mask] if mask in known else known.setdefault(mask, _value(mask))
        if value is None:
            continue
        causal = False
        if not bool(value.all()):
            asked = asks() if asked is None and _is_causal(value) else asked
            causal = asked is not None and _is_causal(value) and len(asked) == len(calls) and asked[place]
            if not causal:
                continue
        # An earlier one may have given this one other operands; serial numbers tell calls apart.
        present = next(e for e in graph.effects if e.op == call.op)
        graph = graph.substitute(present, _unmasked(present, causal))
        gone += 1
    return _without_idle(graph), gone


def asked_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
    """Of each attention that a call of `model` computes, whether it is causal and has no mask."""

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                given = dict(zip(("query", "key", "value", _MASK, "dropout_p", _CAUSAL), args, strict=False))
                given |= kwargs or {}
                heard.append(given.get(_MASK) is None and bool(given.get(_CAUSAL)))
            return func(*args, **(kwargs or {}))

    heard: list[bool] = []
    given, named = tree_map(lambda leaf: leaf, (args, kwargs))  # containers of its own, to which it may add
    try:
        with torch.no_grad(), Listening():
            model(*given, **named)
    except Exception:  # verification, or the caller's next call, says what is wrong
        return []
    return heard


def _target(node: Node) -> str:
    return node.op.target if isinstance(node.op, ops.Opaque) else ""


def _argument(call: Node, name: str) -> Node | None:
    """A tensor that an opaque call is given."""
    assert isinstance(call.op, ops.Opaque)
    given = call.op.given.get(name)
    return call.args[given.index] if isinstance(given, ops.Arg) else None


def _unmasked(call: Node, causal: bool) -> Node:
    """The attention without its mask."""
    op = call.op
    assert isinstance(op, ops.Opaque)
    mask = op.given[_MASK].index
    kept = [i for i in range(len(call.args)) if i != mask]
    given = {name: value for name, value in op.given.items() if name != _MASK} | ({_CAUSAL: True} if causal else {})
    given = {name: ops.Arg(kept.index(v.index)) if isinstance(v, ops.Arg) else v for name, v in given.items()}
    tensors = tuple(given.pop(name) for name in ("query", "key", "value"))
    new = replace(op, arguments=tensors, keywords=tuple(given.items()))
    return make(new, *(call.args[i] for i in kept), where=call.where)


def _is_causal(value: Tensor) -> bool:
    """Whether a mask lets every position see itself and what is before it."""
    rows, columns = value.shape[-2:] if value.ndim > 1 else (0, 0)
    square = rows == columns and value.numel() == rows * columns
    return square and torch.equal(value, torch.ones_like(value).tril())


def _value(node: Node) -> Tensor | None:
    """What a node is in every call, or `None` where that depends on any tensor, or on the batch."""
    below = topological([node])
    if not all(map(_is_fixed, below)):
        return None
    effects = tuple(n for n in below if isinstance(n.op, ops.Opaque))
    derive, forward = lower(Graph((), (node,), effects)).functions()
    try:
        (value,) = forward(None, *derive(None))
    except (RuntimeError, TypeError):  # whatever it is, the mask stays
        return None
    return value if isinstance(value, Tensor) else None


def _is_fixed(node: Node) -> bool:
    """Whether a node is the same in every call, given that its arguments are."""
    op = node.op
    if isinstance(op, ops.Source) or not all(isinstance(n, int) for n in node.shape):
        return False
    if isinstance(op, ops.Number):
        return not isinstance(op.value, sympy.Expr)
    if isinstance(op, ops.Opaque):
        return op.is_pure and not any(isinstance(v, sympy.Expr) for v in op.given.values())
    return not op.effectful


def _without_idle(graph: Graph) -> Graph:
    """`graph` without what is the same in every call and used by nobody."""
    fixed: dict[Node, bool] = {}
    for node in graph.nodes():
        fixed[node] = _is_fixed(node) and all(fixed[a] for a in node.inputs)
    needed = [e for e in graph.effects if not fixed[e]]
    live = set(topological([*needed, *(o for o in graph.outputs if isinstance(o, Node))]))
    return replace(graph, effects=tuple(e for e in graph.effects if e in live))
