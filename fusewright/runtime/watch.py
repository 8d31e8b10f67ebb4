"""Noticing that a module is no longer what it was when it was captured.

A forward reads attributes, submodules and hooks; a plan captured before they changed is stale.  `Watch.unchanged`
compares identities only, about a microsecond a submodule; what it cannot clear is compared by value (`fingerprint`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = ("_parameters", "_buffers", "_modules")
# What every module carries for PyTorch's own use.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Watch:
    """The state of a module at one moment, for comparing with its state later."""

    def __init__(self, model: nn.Module) -> None:
        self.fingerprint = fingerprint(model)
        found: dict[int, Any] = {}  # by id: an object that several modules hold is watched once
        sized: list[Collection[Any]] = []
        for module in model.modules():
            sized += _views(module, root=module is model)
            for name, attribute in vars(module).items():
                if name not in _INTERNAL:
                    sized += _contents(attribute, found)
        self._owners = tuple(found.values())  # kept alive, so that no id is given away
        self._sized = tuple(sized)
        self._lengths = list(map(len, sized))
        self._views = tuple(view for view in sized if view)  # what is empty shows a change by its length
        self._values = tuple(chain.from_iterable(self._views))

    def unchanged(self) -> bool:
        """Whether every watched value is the very object it was; a false alarm is possible."""
        same = list(map(len, self._sized)) == self._lengths
        return same and all(map(is_, chain.from_iterable(self._views), self._values))


def _views(module: nn.Module, *, root: bool) -> Iterator[Collection[Any]]:
    """Live views of what a module's behaviour hangs on; hooks of the root fire around its forward: no matter to it."""
    yield vars(module).values()
    yield vars(module)["_modules"].keys()
    for name in _CONTAINERS if root else (*_CONTAINERS, *_HOOKS):
        yield vars(module)[name].values()


def _contents(value: Any, found: dict[int, Any]) -> Iterator[Collection[Any]]:
    """Live views of everything in `value` that can change without becoming another object."""
    if isinstance(value, (*_PLAIN, float, torch.Tensor, nn.Module, type)) or id(value) in found:
        return
    found[id(value)] = value
    inner: Collection[Any] = ()
    if isinstance(value, dict):
        yield value.keys()
        yield (inner := value.values())
    elif isinstance(value, list | set | frozenset | tuple):
        yield (inner := value)
    elif isinstance(value, MethodType):
        inner = (value.__self__,)
    elif not isinstance(value, FunctionType) and hasattr(value, "__dict__"):
        yield (inner := vars(value).values())
    for part in tuple(inner):
        yield from _contents(part, found)


def has_inner_hooks(model: nn.Module) -> bool:
    """Whether a submodule has a forward or backward hook, which a captured graph would not run."""
    return any(vars(m).get(name) for m in model.modules() if m is not model for name in _HOOKS)


def has_plain_parameters(model: nn.Module) -> bool:
    """Whether every parameter is one; transforms and sharding put other tensors in their place for a while."""
    return all(type(p) is nn.Parameter for m in model.modules() for p in m._parameters.values() if p is not None)


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """The state of `model` as a comparable value: structure, attributes, training flags, kinds of parameters."""
    return tuple(
        (name, type(module), _attributes(module), _tensors(module))
        for name, module in model.named_modules(remove_duplicate=False)
    )


def _attributes(module: nn.Module) -> Any:
    return tuple((name, freeze(value)) for name, value in vars(module).items() if name not in _INTERNAL)


def _tensors(module: nn.Module) -> Any:
    named = [*module._parameters.items(), *module._buffers.items()]
    return tuple((k, None if t is None else (type(t), t.shape, t.dtype, t.device)) for k, t in named)


class _Identity:
    """An object that equals only itself, even once another has its address; not kept alive where that is possible."""

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._value: Callable[[], Any]
        try:
            self._value = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Identity) and (mine := self._value()) is not None and mine is other._value()


def freeze(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A comparable picture of `value`: containers and plain objects by content, tensors and the rest by identity."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float):
        return float, repr(value)  # 0.0 == -0.0, and NaN equals nothing
    if isinstance(value, torch.Tensor | nn.Module | type | FunctionType | BuiltinFunctionType):
        return _Identity(value)
    if id(value) in above:
        return above.index(id(value))
    above = (*above, id(value))
    if isinstance(value, list | tuple):
        return type(value), tuple(freeze(v, above) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((freeze(k, above), freeze(v, above)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(freeze(v, above) for v in value)
    if isinstance(value, MethodType):
        return freeze(value.__self__, above), _Identity(value.__func__)
    if hasattr(value, "__dict__"):
        return type(value), freeze(vars(value), above), _state_beside(value)
    return _Identity(value)


def _state_beside(value: Any) -> Any:
    """Objects that are called or hold more than their attributes are themselves only."""
    return _Identity(value) if callable(value) else None
