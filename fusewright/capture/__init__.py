"""Capture: a module -> a Graph, or one sentence that says why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusewright.capture.build import build
from fusewright.capture.export import Exported, trace
from fusewright.capture.inference import without_gradients
from fusewright.capture.symbols import NotSymbolicError
from fusewright.errors import CaptureError, GraphError
from fusewright.ir import spec
from fusewright.ir.node import Graph
from fusewright.tree import TreeSpec

__all__ = ["Captured", "capture"]


@dataclass(frozen=True)
class Captured:
    """A model as a graph, and how to call it.

    in_spec    the structure of (args, kwargs); `positions` says which of its leaves are the graph's inputs, in order
    out_spec   the structure of the outputs
    fixed      the arguments that are no tensors, by position; the graph holds for these values only
    constants  the tensors that the graph refers to by key: attributes of the model itself, and literals
    shared     groups of dotted paths that are one parameter
    reasons    for each opaque operation, where it is and why it is one
    static     why the batch size is fixed, or None where it is symbolic or nobody asked
    """

    graph: Graph
    in_spec: TreeSpec
    out_spec: TreeSpec
    constants: Mapping[str, torch.Tensor]
    input_names: tuple[str, ...]
    positions: tuple[int, ...]
    fixed: Mapping[int, Any]
    shared: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...]
    static: str | None


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_batch: bool = True,
    gradients: bool = True,
) -> Captured:
    """The graph of `model` in its present mode on arguments like these; with `dynamic_batch`, of any batch if possible.

    Without `gradients` it is what the model computes where nothing has one, if that is known to be something else.
    The model is left exactly as it was.  Raises `CaptureError` with one sentence when it cannot be captured whole.
    """
    if not gradients:
        with without_gradients(model):
            return capture(model, args, kwargs, dynamic_batch=dynamic_batch)
    static = None
    if dynamic_batch:
        try:
            return _captured(model, args, dict(kwargs or {}), dynamic=True)
        except NotSymbolicError as reason:
            static = str(reason)
    try:
        return _captured(model, args, dict(kwargs or {}), dynamic=False, static=static)
    except NotSymbolicError as reason:
        raise CaptureError(f"{type(model).__name__} cannot be captured: {reason}; it runs as it did.") from reason


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool, static: str | None = None
) -> Captured:
    exported = trace(model, args, kwargs, dynamic=dynamic)
    if dynamic and not exported.symbols.places:
        static = "the example has no batch of two or more, or the model works for this batch size alone"
    try:
        graph, reasons = build(exported)
        spec.check(graph)
    except GraphError as error:
        if dynamic:
            raise NotSymbolicError(str(error)) from error
        raise CaptureError(f"{exported.model} cannot be captured: {error}; it runs as it did.") from error
    return _bundle(model, exported, graph, reasons, static)


def _bundle(
    model: nn.Module, exported: Exported, graph: Graph, reasons: tuple[str, ...], static: str | None
) -> Captured:
    return Captured(
        graph=graph,
        in_spec=exported.in_spec,
        out_spec=exported.out_spec,
        constants=exported.constants,
        input_names=tuple(getattr(n.op, "name", "") for n in graph.inputs),
        positions=exported.positions,
        fixed=exported.fixed,
        shared=_shared(model),
        reasons=reasons,
        static=static,
    )


def _shared(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The dotted paths of parameters that have more than one."""
    paths: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    return tuple(tuple(group) for group in paths.values() if len(group) > 1)
