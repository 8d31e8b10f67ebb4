"""Regions that a trace keeps apart (``with torch.no_grad():`` is one) are written out where they stand.

A traced graph calls such a region with a graph of its own.  Without gradients, a call computes from operands that are
detached; there, autocast that is turned off changes nothing, because no trace is made under autocast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from fusewright.capture.alias import is_in_place
from fusewright.errors import CaptureError

# The calls of regions by name, and which argument says whether the mode is on; the region and its operands come last.
_REGIONS = {"wrap_with_set_grad_enabled": 0, "wrap_with_autocast": 2}


def inlined(model: str, program: ExportedProgram) -> fx.Graph:
    """The traced graph with its regions written out; other subprograms stay, and are refused by whoever reads them.

    Raises `CaptureError` for autocast that is not known to change nothing.
    """
    if not any(_mode(node) for node in program.graph.nodes):
        untouched: fx.Graph = program.graph
        return untouched
    writer = _Writer(model)
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    operands = [writer.graph.node_copy(n) for n in placeholders]
    for operand, spec in zip(operands, program.graph_signature.input_specs, strict=True):
        constant = spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        if constant and not getattr(operand.meta.get("val"), "requires_grad", True):
            writer.free.add(operand)
    outputs = writer.write(program.graph_module, operands, gradients=True)
    writer.graph.output(outputs)
    return writer.graph


def where(node: fx.Node) -> str:
    """The dotted path of the module that a call came from, if the trace knows it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and entry and entry[0]]
    return "" if not paths or "empty_nn_module_stack" in paths[-1] else str(paths[-1])


def refusal(model: str, node: fx.Node, what: str) -> CaptureError:
    """One sentence on what the module that `node` came from does."""
    path = where(node)
    place = f"its module {path}" if path else "its forward"
    return CaptureError(f"{model} cannot be captured: {place} {what}; it runs as it did.")


@dataclass(frozen=True)
class _Mode:
    """What a region sets: `kind` is the name of its call, `body` reads its graph, and `operands` go in."""

    kind: str
    enabled: bool
    body: fx.Node
    operands: tuple[Any, ...]


def _mode(node: fx.Node) -> _Mode | None:
    """What the call of a region sets; `None` for every other node, and for a call that is made another way."""
    kind = str(getattr(node.target, "__name__", ""))
    if node.op != "call_function" or kind not in _REGIONS or node.kwargs:
        return None
    at = next((i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"), None)
    if at is None or at <= _REGIONS[kind]:
        return None
    enabled, body = node.args[_REGIONS[kind]], node.args[at]
    assert isinstance(body, fx.Node)
    return _Mode(kind, enabled, body, node.args[at + 1 :]) if isinstance(enabled, bool) else None


@dataclass
class _Writer:
    """Copies graphs into `graph`.

    free      values that no gradient comes back to: what a region without gradients computed, buffers, constants
    detached  each detached value by the one that it was
    """

    model: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    free: set[fx.Node] = field(default_factory=set)
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def write(self, owner: fx.GraphModule, operands: list[Any], *, gradients: bool) -> Any:
        """Copy the graph of `owner` on these operands; returns what it returns."""
        values: dict[fx.Node, Any] = {}

        def value(traced: Any) -> Any:
            return fx.map_arg(traced, values.__getitem__)

        given = iter(operands)
        for node in owner.graph.nodes:
            mode = _mode(node)
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return value(node.args[0])
            elif mode is not None:
                values[node] = self.region(owner, mode, [value(a) for a in mode.operands], gradients)
            elif node.target is operator.getitem and isinstance(values[node.args[0]], tuple | list):
                values[node] = values[node.args[0]][node.args[1]]
            elif node.op != "get_attr" or not all(map(_mode, node.users)):
                values[node] = self.call(node, values.__getitem__, gradients)
        raise AssertionError("a graph without an output")

    def region(self, owner: fx.GraphModule, mode: _Mode, operands: list[Any], gradients: bool) -> Any:
        """Write a region out; returns the list of its results."""
        if mode.kind == "wrap_with_set_grad_enabled":
            gradients = mode.enabled
        elif mode.enabled:
            raise refusal(self.model, mode.body, "turns autocast on, under which operations choose dtypes of their own")
        elif gradients:
            what = "turns autocast off while gradients are on, and a trace of that loses sight of torch.no_grad()"
            raise refusal(self.model, mode.body, what)
        body = owner.get_submodule(str(mode.body.target))
        if not isinstance(body, fx.GraphModule):
            raise refusal(self.model, mode.body, "holds a subprogram without a graph")
        return self.write(body, operands, gradients=gradients)

    def call(self, node: fx.Node, value: Callable[[fx.Node], fx.Node], gradients: bool) -> fx.Node:
        """Copy a call; returns its result, which an in-place operation has in common with its operand."""
        if gradients or str(node.target) == "aten.detach_.default":
            return self.graph.node_copy(node, value)
        copy = self.graph.node_copy(node, lambda n: self.without_gradient(value(n), node))
        self.free.add(copy)
        first = node.args[0] if node.args and isinstance(node.target, OpOverload) else None
        if isinstance(first, fx.Node) and is_in_place(str(node.target)) and value(first) in self.detached:
            return value(first)  # still has the gradient that it had
        return copy

    def without_gradient(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """`value`, detached for `user` where a gradient might come back to it."""
        found = value.meta.get("val")
        real = isinstance(found, torch.Tensor) and (found.is_floating_point() or found.is_complex())
        if not real or value in self.free:
            return value
        if value not in self.detached:
            detached = self.graph.call_function(torch.ops.aten.detach.default, (value,))
            detached.meta = {key: user.meta[key] for key in ("nn_module_stack",) if key in user.meta} | {"val": found}
            self.detached[value] = detached
        return self.detached[value]
