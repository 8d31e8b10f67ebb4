"""Tracing leaves the model as it was: its attributes, buffers and the random streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fusewright.errors import CaptureError

# A buffer that the forward assigns is part of the program.
_OWN = frozenset({"_parameters", "_buffers"})


@contextmanager
def untouched(model: nn.Module, devices: set[torch.device]) -> Iterator[None]:
    """Restore every attribute of every submodule, and the random streams, afterwards.

    Raises `CaptureError` when the forward changed a plain attribute: the captured program would not.
    """
    before = {module: _held(module) for module in model.modules()}
    cuda = [d for d in devices if d.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            changed = [name for module, held in before.items() for name in _restore(module, held)]
    if changed:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: its forward changes the attribute {changed[0]}, which the "
            "program would not; keep such state in a registered buffer."
        )


def _held(module: nn.Module) -> dict[str, Any]:
    """A module's attributes with the contents of its lists, dicts and sets, one level deep."""
    return {name: (value, _contents(value)) for name, value in module.__dict__.items()}


def _contents(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else None


def _restore(module: nn.Module, held: dict[str, Any]) -> list[str]:
    """Put back what differs; returns the names of attributes with a new value, which is the model's own doing.

    Tracing itself replaces tuples and lists by equal ones, which does not count.
    """
    changed = [name for name in module.__dict__ if name not in held]
    for name in changed:
        del module.__dict__[name]
    for name, (value, contents) in held.items():
        before = value if contents is None else contents
        if name not in module.__dict__ or not _same(module.__dict__[name], before):
            changed.append(name)
        if contents is not None:
            _refill(value, contents)
        module.__dict__[name] = value
    label = type(module).__name__
    return [f"{name} of {label}" for name in changed if name not in _OWN]


def _same(a: Any, b: Any) -> bool:
    """Whether two attribute values are one object, or containers of the same objects, or equal numbers or texts."""
    if a is b:
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
        if not (len(value) == len(contents) and all(map(lambda a, b: a is b, value, contents))):
            value[:] = contents
    elif not _same(value, contents):
        value.clear()
        value.update(contents)
