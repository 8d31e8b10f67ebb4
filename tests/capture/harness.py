"""Runs a model and its captured program side by side, each with its own copy of the parameters and the same seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusewright.capture import Captured, capture
from fusewright.codegen.aten import lower
from fusewright.ir.ops import Op, Opaque
from fusewright.tree import tree_flatten


class Fn(nn.Module):
    """A function as a model."""

    def __init__(self, fn: Callable[..., Any], **state: torch.Tensor) -> None:
        super().__init__()
        self.fn = fn
        for name, value in state.items():
            setattr(self, name, nn.Parameter(value) if value.is_floating_point() else value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def program_of(captured: Captured) -> Callable[..., Any]:
    """The captured program as a function (module, args, kwargs) -> outputs."""
    derive, forward = lower(captured.graph, captured.out_spec, captured.constants).functions()

    def call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat = tree_flatten((args, kwargs))[0]
        return forward(module, *(flat[i] for i in captured.positions), *derive(module))

    return call


def run(
    call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[torch.Tensor | None], list[torch.Tensor]]:
    """Outputs, gradients of parameters and inputs, and buffers and inputs afterwards, of one seeded call."""
    torch.manual_seed(7)
    outputs = call(module, args, kwargs)
    flat = tree_flatten((args, kwargs))[0]
    leaves = [p for p in module.parameters() if p.requires_grad]
    leaves += [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    tensors = [t for t in tree_flatten(outputs)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    total = sum((t.double() * torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape)).sum() for t in tensors)
    grads: list[torch.Tensor | None] = []
    if tensors and leaves:
        assert isinstance(total, torch.Tensor)
        grads = list(torch.autograd.grad(total, leaves, allow_unused=True))
    return outputs, grads, [*module.buffers(), *(t for t in flat if isinstance(t, torch.Tensor))]


def copied(values: Any) -> Any:
    """The same values with tensors of their own (those that require gradients become leaves)."""
    flat, spec = tree_flatten(values)
    fresh = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in flat]
    from fusewright.tree import tree_unflatten

    return tree_unflatten(fresh, spec)


def same(a: Any, b: Any, roundings: int = 0) -> bool:
    """Bitwise equal values of equal structure, or so many roundings away."""
    (flat_a, spec_a), (flat_b, spec_b) = tree_flatten(a), tree_flatten(b)
    return spec_a == spec_b and all(_same_leaf(x, y, roundings) for x, y in zip(flat_a, flat_b, strict=True))


def _same_leaf(x: Any, y: Any, roundings: int) -> bool:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype or x.requires_grad != y.requires_grad:
        return False
    off = roundings * torch.finfo(x.dtype).eps if x.dtype.is_floating_point else 0
    return bool(torch.equal(x, y) or torch.allclose(x.detach(), y.detach(), rtol=off, atol=off, equal_nan=True))


def assert_equal(
    model: nn.Module,
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    roundings: int = 0,
) -> None:
    """The program gives the model's outputs, gradients and buffers bit for bit, or so many roundings away."""
    kwargs = kwargs or {}
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    expected = run(lambda m, a, k: m(*a, **k), theirs, *copied((args, kwargs)))
    actual = run(program_of(captured), ours, *copied((args, kwargs)))
    text = lower(captured.graph, captured.out_spec, captured.constants).source
    for name, x, y in zip(("outputs", "gradients", "state afterwards"), actual, expected, strict=True):
        assert same(x, y, roundings), f"{name} differ:\n{text}\n{x}\n{y}"


def check(model: nn.Module, *args: Any, batch: int | None = None, **kwargs: Any) -> Captured:
    """Capture `model` on `args`, compare there, and at a leading size of `batch` where the graph allows it."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    captured = capture(model, args, kwargs)
    assert same(dict(model.state_dict()), state), "capturing changed the model"
    assert_equal(model, captured, args, kwargs)
    if batch is not None:
        assert captured.static is None and captured.graph.symbols, captured.static
        assert_equal(model, captured, *resized((args, kwargs), len(args[0]), batch))
    return captured


def resized(values: Any, old: int, new: int) -> Any:
    """The same values with every leading size `old` made `new`."""
    flat, spec = tree_flatten(values)
    from fusewright.tree import tree_unflatten

    def at(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.ndim == 0 or t.shape[0] != old:
            return t
        rows = torch.arange(new) % old
        return t.detach()[rows].clone().requires_grad_(t.requires_grad)

    return tree_unflatten([at(t) for t in flat], spec)


def kinds(captured: Captured) -> list[type[Op]]:
    """The operations of the graph in order, sources left out."""
    return [type(n.op) for n in captured.graph.nodes() if n.args]


def opaque(captured: Captured) -> list[str]:
    """The names of the operations that were not understood."""
    return [n.op.target.split(".")[1] for n in captured.graph.nodes() if isinstance(n.op, Opaque)]
