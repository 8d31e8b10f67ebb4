"""Noticing that a module is no longer what it was when it was captured.

A forward reads attributes, submodules and hooks; a plan captured before they changed is stale.  `Watch.unchanged`
compares identities only and costs about a microsecond a submodule; what it cannot clear is compared by value
(`fingerprint`).
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = ("_parameters", "_buffers", "_modules")
_DEPTH = 4


class Watch:
    """The state of a module at one moment, for comparing with its state later."""

    def __init__(self, model: nn.Module) -> None:
        self.fingerprint = fingerprint(model)
        self._cells: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._values: list[tuple[Any, Any]] = []
        for module in model.modules():
            for cell in _cells(module, root=module is model):
                self._cells.append((cell, tuple(cell.values())))
            for attribute in vars(module).values():
                if _mutable(attribute):
                    self._values.append((attribute, freeze(attribute)))

    def unchanged(self) -> bool:
        """Whether every watched value is the very object it was; a false alarm is possible, a missed change is not."""
        for cell, values in self._cells:
            if len(cell) != len(values) or not all(map(is_, cell.values(), values)):
                return False
        return all(freeze(value) == frozen for value, frozen in self._values)


def _cells(module: nn.Module, *, root: bool) -> Iterator[dict[str, Any]]:
    """The dictionaries a module's behaviour hangs on; the root's hooks fire around its forward and do not concern it."""
    yield vars(module)
    for name in (*_CONTAINERS, *(() if root else _HOOKS)):
        found = vars(module).get(name)
        if isinstance(found, dict):
            yield found


def has_inner_hooks(model: nn.Module) -> bool:
    """Whether a submodule has a forward or backward hook, which a captured graph would not run."""
    return any(vars(m).get(name) for m in model.modules() if m is not model for name in _HOOKS)


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """The state of `model` as a comparable value: structure, attributes, training flags, kinds of parameters, hooks."""
    return tuple(
        (name, type(module), _attributes(module), _tensors(module), 0 if module is model else _hook_count(module))
        for name, module in model.named_modules(remove_duplicate=False)
    )


def _attributes(module: nn.Module) -> Any:
    skipped = {*_CONTAINERS, *_HOOKS}
    return tuple((k, freeze(v)) for k, v in vars(module).items() if k not in skipped and not k.endswith("_hooks"))


def _tensors(module: nn.Module) -> Any:
    named = [*module._parameters.items(), *module._buffers.items()]
    return tuple((k, None if t is None else (type(t), t.shape, t.dtype, t.device)) for k, t in named)


def _hook_count(module: nn.Module) -> int:
    return sum(len(vars(module).get(name) or ()) for name in _HOOKS)


def _mutable(value: Any) -> bool:
    """Whether the value can change without becoming another object."""
    if isinstance(value, list | dict | set | bytearray):
        return not (isinstance(value, dict) and any(isinstance(v, nn.Module) for v in value.values()))
    plain = isinstance(value, nn.Module | torch.Tensor | type) or callable(value)
    return not plain and hasattr(value, "__dict__")


def freeze(value: Any, depth: int = _DEPTH) -> Any:
    """A comparable picture of `value`: containers and plain objects by content, tensors and the rest by identity."""
    if isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype | torch.device):
        return type(value), value
    if depth == 0 or isinstance(value, torch.Tensor | nn.Module | type):
        return id(value)
    if isinstance(value, list | tuple):
        return type(value), tuple(freeze(v, depth - 1) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((freeze(k, depth - 1), freeze(v, depth - 1)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(freeze(v, depth - 1) for v in value)
    if callable(value) or not hasattr(value, "__dict__"):
        return id(value)
    return type(value), id(value), freeze(vars(value), depth - 1)
