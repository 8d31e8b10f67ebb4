"""Tracing leaves the model as it was: its attributes, buffers and the random streams."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fusewright.errors import CaptureError

# A buffer that the forward assigns is part of the program, and the hook is ours.
_OWN = frozenset({"_parameters", "_buffers", "_forward_hooks"})


@contextmanager
def untouched(model: nn.Module, devices: set[torch.device]) -> Iterator[None]:
    """Restore every attribute of every submodule, and the random streams, afterwards.

    Raises `CaptureError` when the forward changed a plain attribute, or left gradients turned off: the captured program
    would not.
    """
    before = {module: _held(module) for module in model.modules()}
    changed: list[str] = []
    gradients: list[bool] = []

    # At the end of the forward, because tracing puts plain attributes and modes back before it returns.
    def look(*_: Any) -> None:
        changed.extend(name for module, held in before.items() for name in _changes(module, held))
        gradients.append(torch.is_grad_enabled())

    handle = model.register_forward_hook(look)
    with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                yield
        finally:
            handle.remove()
            for module, held in before.items():
                _restore(module, held)
    changed += [found for warning in said for found in _assigned(str(warning.message))]
    if changed:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: its forward changes the attribute {changed[0]}, which the "
            "program would not; keep such state in a registered buffer."
        )
    if not all(gradients):
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: its forward leaves gradients turned off, which the program "
            "would not; use torch.no_grad() in a with statement."
        )


def _assigned(warning: str) -> list[str]:
    """The tensor attributes that tracing reports as assigned; recurrent layers keep a list of their own parameters."""
    if "assigned during export" not in warning:
        return []
    return [name for name in re.findall(r"self\.[\w.\[\]]+", warning) if "_flat_weights" not in name][:1]


def _held(module: nn.Module) -> dict[str, Any]:
    """A module's attributes with the contents of its lists, dicts and sets, one level deep."""
    return {name: (value, _contents(value)) for name, value in module.__dict__.items()}


def _contents(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else None


def _changes(module: nn.Module, held: dict[str, Any]) -> list[str]:
    """The attributes with a new value; tracing itself swaps tensors, and tuples and lists for equal ones."""
    now = module.__dict__
    new = [name for name in now if name not in held]
    for name, (value, contents) in held.items():
        before = value if contents is None else contents
        if name not in _OWN and (name not in now or not _same(now[name], before)):
            new.append(name)
    return [f"{name} of {type(module).__name__}" for name in new]


def _restore(module: nn.Module, held: dict[str, Any]) -> None:
    for name in [name for name in module.__dict__ if name not in held]:
        del module.__dict__[name]
    for name, (value, contents) in held.items():
        if contents is not None:
            _refill(value, contents)
        module.__dict__[name] = value


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one object, two tensors (or references to), equal numbers or texts, or contain such."""
    kinds = (torch.Tensor, weakref.ref)
    if a is b or (isinstance(a, kinds) and isinstance(b, kinds)):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, int | float | str | bytes | set | frozenset) and bool(a == b)


def _refill(value: Any, contents: Any) -> None:
    """Give a container its former contents."""
    if isinstance(value, list):
        value[:] = contents
    else:
        value.clear()
        value.update(contents)
