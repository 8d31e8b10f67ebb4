"""Constants beside a value: Python numbers known at plan time, and tensors that are uniform over each window."""

from __future__ import annotations

import math

import sympy
import torch

from fusewright.ir.build import reshape
from fusewright.ir.node import Node
from fusewright.ir.ops import Cast, Number, Pointwise, Reduce
from fusewright.rules.linear import reduced_dims

FLOATING = "the values are not floating point, or the result has another dtype"


def function(node: Node) -> str:
    """The name of the pointwise function `node` applies, or nothing."""
    return node.op.fn if isinstance(node.op, Pointwise) else ""


def number(node: Node) -> float | None:
    """The value of a Python number known at plan time, else `None`."""
    if not isinstance(node.op, Number) or isinstance(node.op.value, sympy.Expr):
        return None
    return float(node.op.value)


def is_scaled(node: Node) -> bool:
    """Whether `node` is x * c, c * x or x / c with a Python number c."""
    places = {"mul": node.args, "div": node.args[1:]}.get(function(node), ())
    return any(a is not None and isinstance(a.op, Number) for a in places)


def is_negated(node: Node) -> bool:
    """Whether `node` is -x."""
    return function(node) == "neg"


def is_shifted(node: Node) -> bool:
    """Whether `node` is x + c, c + x or x - c with a Python number c."""
    places = {"add": node.args, "sub": node.args[1:]}.get(function(node), ())
    return any(a is not None and isinstance(a.op, Number) for a in places)


def place(node: Node) -> int:
    """Which argument of `node` is the Python number."""
    return 1 if isinstance(node.arg(1).op, Number) else 0


def usable(scale: float, dtype: torch.dtype) -> bool:
    """Whether `scale` is finite, nonzero and normal in `dtype`, as its reciprocal is."""
    info = torch.finfo(dtype)
    return math.isfinite(scale) and info.smallest_normal <= abs(scale) <= min(info.max, 1 / info.smallest_normal)


def floating(*nodes: Node) -> bool:
    """Whether all have one floating-point dtype."""
    return nodes[0].dtype.is_floating_point and all(n.dtype == nodes[0].dtype for n in nodes)


def varying(x: Node, window: Node) -> tuple[int, ...]:
    """The dimensions a window runs over along which `x`, broadcast against the window's operand, has several values."""
    missing = window.arg(0).ndim - x.ndim
    return tuple(d for d in reduced_dims(window) if d >= missing and x.shape[d - missing] != 1)


def spans(x: Node, window: Node) -> bool:
    """Whether `x` alone has the window's operand's dimensions, so that the window can run over it."""
    whole = window.arg(0)
    return x.ndim == whole.ndim and all(x.shape[d] == whole.shape[d] for d in reduced_dims(window))


def beside(x: Node, window: Node) -> Node:
    """`x`, of length 1 along what the window runs over, shaped to go with the window's result."""
    if not isinstance(window.op, Reduce) or window.op.keepdim:
        return x
    missing = window.arg(0).ndim - x.ndim
    return reshape(x, [n for i, n in enumerate(x.shape) if i + missing not in window.op.dims])


def unwidened(node: Node) -> Node:
    """A value before it was cast to a type that holds it."""
    wider = isinstance(node.op, Cast) and node.arg(0).dtype.is_floating_point
    return node.arg(0) if wider and node.dtype.itemsize > node.arg(0).dtype.itemsize else node
