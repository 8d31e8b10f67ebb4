"""Noticing that a module is no longer what it was when it was captured.

A forward reads attributes, submodules and hooks; a plan captured before they changed is stale.  `Watch.unchanged`
compares identities, about half a microsecond a submodule and as much a parameter; what it cannot clear is compared by
value (`fingerprint`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from logging import Logger
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = ("_parameters", "_buffers", "_modules")
# What modules carry for PyTorch's own use; `torch.compile` leaves the last with the module that it is given.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {"_is_torch_compile"}
# Whole worlds hang on these, and no model's result.
_NAMED = (type, ModuleType, Logger, GenericAlias)
_PLAIN = (bool, int, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_dtype = attrgetter("dtype")
_shape = attrgetter("shape")
_strides = torch.Tensor.stride


class Watch:
    """The state of a module at one moment, for comparing with its state later."""

    def __init__(self, model: nn.Module) -> None:
        self.fingerprint = fingerprint(model)
        found: dict[int, Any] = {}  # by id: what several modules hold is watched once
        sized: list[Collection[Any]] = []
        for module in model.modules():
            sized += _views(module, found, root=module is model)
        self._owners = tuple(found.values())  # kept alive, so that no id is given away
        self._empty = tuple(view for view in sized if not view)
        self._views = tuple(view for view in sized if view)
        self._lengths = list(map(len, self._views))
        self._values = tuple(chain.from_iterable(self._views))  # kept alive as well
        self._places = _places(self._views)
        self._tensors = tuple(model.parameters())
        self._dtypes = list(map(_dtype, self._tensors))
        self._shapes = list(map(_shape, self._tensors))
        self._images = tuple(t for t in self._tensors if _has_strides(t) and t.ndim > 3)  # have memory formats
        self._strides = list(map(_strides, self._images))

    def unchanged(self) -> bool:
        """Whether every watched value is the very object it was; a false alarm is possible."""
        if any(self._empty) or list(map(len, self._views)) != self._lengths or _places(self._views) != self._places:
            return False
        # a parameter may change its dtype, shape or layout and stay the same object
        same = list(map(_dtype, self._tensors)) == self._dtypes and list(map(_shape, self._tensors)) == self._shapes
        return same and list(map(_strides, self._images)) == self._strides


def _places(views: Collection[Collection[Any]]) -> bytes:
    """Where the objects in `views` lie: comparing that takes a third less time than `is` does for each."""
    objects: bytes = numpy.fromiter(chain.from_iterable(views), object).tobytes()
    return objects


def _views(module: nn.Module, found: dict[int, Any], *, root: bool = False) -> Iterator[Collection[Any]]:
    """Live views of what a module's behaviour hangs on; hooks of the root fire around its forward: no matter to it."""
    if id(module) in found:
        return
    found[id(module)] = module
    yield vars(module).values()
    if module._modules:
        yield module._modules.keys()
    for name in _CONTAINERS if root else (*_CONTAINERS, *_HOOKS):
        yield vars(module)[name].values()
    for kind in _own_classes(module):
        if id(kind) not in found:
            found[id(kind)] = kind
            yield vars(kind).values()
            for attribute in vars(kind).values():
                yield from _contents(attribute, found)
    for name, attribute in vars(module).items():
        if name not in _INTERNAL:
            yield from _contents(attribute, found)


def _own_classes(module: nn.Module) -> Iterator[type]:
    """The classes that a module's methods and defaults come from, but for PyTorch's and Python's own."""
    return (kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] not in ("torch", "builtins"))


def _contents(value: Any, found: dict[int, Any]) -> Iterator[Collection[Any]]:
    """Live views of everything in `value` that can change without becoming another object."""
    if isinstance(value, (*_PLAIN, *_NAMED, float, torch.Tensor)) or id(value) in found:
        return
    if isinstance(value, nn.Module):  # held in a list, say, and so no submodule
        for module in value.modules():
            yield from _views(module, found)
        return
    found[id(value)] = value
    inner: Collection[Any] = ()
    if isinstance(value, dict):
        yield value.keys()
        yield (inner := value.values())
    elif isinstance(value, list | set):
        yield (inner := value)
    elif isinstance(value, tuple | frozenset):
        inner = value
    elif isinstance(value, MethodType):
        inner = (value.__self__,)
    elif isinstance(value, partial):
        inner = (value.func, value.args, value.keywords)
    elif not isinstance(value, FunctionType) and hasattr(value, "__dict__"):
        yield (inner := vars(value).values())
    elif isinstance(value, numpy.ndarray) or _slots(value):
        yield _Moment(value)
    for part in tuple(inner):
        yield from _contents(part, found)


def _slots(value: Any) -> tuple[str, ...]:
    """The attributes that an object without a dictionary holds."""
    named = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    return tuple(name for names in named for name in ((names,) if isinstance(names, str) else names))


class _Moment(Collection[Any]):
    """What an object holds at the moment it is looked at, where PyTorch gives no live view of it."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._first = self._now()

    def _now(self) -> tuple[Any, ...]:
        if isinstance(self._value, numpy.ndarray):
            return self._value.shape, self._value.dtype.str, self._value.tobytes()
        return tuple(getattr(self._value, name, None) for name in _slots(self._value))

    def __contains__(self, item: object) -> bool:
        return item in self._first

    def __len__(self) -> int:
        return len(self._first)

    def __iter__(self) -> Iterator[Any]:
        now = self._now()
        same = now == self._first if isinstance(self._value, numpy.ndarray) else all(map(is_, now, self._first))
        return iter(self._first if same else now)


def has_inner_hooks(model: nn.Module) -> bool:
    """Whether a submodule has a forward or backward hook, which a captured graph would not run."""
    return any(vars(m).get(name) for m in model.modules() if m is not model for name in _HOOKS)


def has_plain_parameters(model: nn.Module) -> bool:
    """Whether every parameter is one; transforms and sharding put other tensors in their place for a while."""
    return all(type(p) is nn.Parameter for m in model.modules() for p in m._parameters.values() if p is not None)


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """The state of `model` as a comparable value: structure, attributes, training flags, kinds of parameters."""
    return _Picture().of_module(model)


def freeze(value: Any) -> Any:
    """A comparable picture of `value`: containers and plain objects by content, tensors and the rest by identity."""
    return _Picture().of(value)


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


def _has_strides(t: torch.Tensor) -> bool:
    return type(t) in (nn.Parameter, torch.Tensor) and t.layout is torch.strided


class _Picture:
    """Pictures of values that may share parts: each module and tensor of a module is drawn once, then numbered."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def _number(self, value: object) -> int:
        return self._numbers.setdefault(id(value), len(self._numbers))

    def of_module(self, model: nn.Module) -> tuple[Any, ...]:
        """A module with all below it."""
        named = list(model.named_modules(remove_duplicate=False))
        new = {id(module) for _, module in named} - self._numbers.keys()
        numbered = tuple((name, self._number(module)) for name, module in named)
        return numbered, tuple(self._of_one(module) for module in model.modules() if id(module) in new)

    def _of_one(self, module: nn.Module) -> Any:
        own = tuple((k, self.of(v)) for k, v in vars(module).items() if k not in _INTERNAL)
        classes = tuple((k, self.of(v)) for kind in _own_classes(module) for k, v in vars(kind).items())
        named = [*module._parameters.items(), *module._buffers.items()]
        tensors = tuple(
            (
                k,
                None
                if t is None
                else (self._number(t), type(t), t.shape, t.dtype, t.device, t.stride() if _has_strides(t) else None),
            )
            for k, t in named
        )
        return type(module), own, classes, tensors

    def of(self, value: Any, above: tuple[int, ...] = ()) -> Any:
        """Any value; `above` are the containers it was found in."""
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, float):
            return float, repr(value)  # 0.0 == -0.0, and NaN equals nothing
        if isinstance(value, nn.Module):
            return self.of_module(value)
        if isinstance(value, numpy.ndarray):
            return value.shape, value.dtype.str, value.tobytes()
        if isinstance(value, (*_NAMED, torch.Tensor, FunctionType, BuiltinFunctionType)):
            return _Identity(value)
        return above.index(id(value)) if id(value) in above else self._of_parts(value, (*above, id(value)))

    def _of_parts(self, value: Any, above: tuple[int, ...]) -> Any:
        if isinstance(value, list | tuple):
            return type(value), tuple(self.of(v, above) for v in value)
        if isinstance(value, dict):
            return type(value), tuple((self.of(k, above), self.of(v, above)) for k, v in value.items())
        if isinstance(value, set | frozenset):
            return type(value), frozenset(self.of(v, above) for v in value)
        if isinstance(value, partial):
            return partial, tuple(self.of(part, above) for part in (value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return self.of(value.__self__, above), _Identity(value.__func__)
        if hasattr(value, "__dict__"):
            # what is called may hold more than its attributes
            return type(value), self.of(vars(value), above), _Identity(value) if callable(value) else None
        return _Identity(value), tuple(self.of(getattr(value, name, None), above) for name in _slots(value))
