"""The drop-in module: the original's class, state and behaviour, with another forward.

`attach` gives an object of a subclass of the model's own class that *shares the model's attribute dictionary*: the same
parameters, buffers, submodules, hooks and flags, so `state_dict` keys are the same and a change to either is a change
to both.  What is ours lives in one slot beside it.  Any call that no verified plan covers runs the original forward.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import nn

from fusewright.dispatch import NO_ANSWER, State
from fusewright.runtime.observers import global_hooks, tracer

SLOT = "_fusewright"
_ROOT_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def attach(model: nn.Module, state: State) -> nn.Module:
    """An object of a subclass of ``type(model)`` that shares all of `model`'s attributes; `state` picks the forward."""
    fused: nn.Module = object.__new__(_subclass(cast(Hashable, type(model))))
    object.__setattr__(fused, "__dict__", vars(model))
    object.__setattr__(fused, SLOT, state)
    return fused


def state_of(module: nn.Module) -> State | None:
    """The state of an optimised module, or `None` for any other module (and for a replica, which carries none)."""
    return getattr(module, SLOT, None) if hasattr(type(module), SLOT) else None


@cache
def _subclass(base: Any) -> Any:
    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A wrapper that changes the class (sharding does) brings a forward of its own making.
        state = None if type(self) is not fused or _is_traced() else getattr(self, SLOT, None)
        if state is None:
            return base.forward(self, *args, **kwargs)
        answer = state.ahead(self, args, kwargs)
        if answer is not NO_ANSWER:
            return answer
        runner = state.runner(args, kwargs)
        answer = NO_ANSWER if runner is None else runner(self, args, kwargs, state.watch)
        return base.forward(self, *args, **kwargs) if answer is NO_ANSWER else answer

    def shallow_copy(self: nn.Module) -> nn.Module:
        state: State = getattr(self, SLOT)
        original = copy.copy(state.original)
        return attach(original, state.copied_to(original))

    def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        state: State = getattr(self, SLOT)
        original = copy.deepcopy(state.original, memo)
        return attach(original, state.copied_to(original))

    def reduce(self: nn.Module, protocol: Any) -> Any:
        state: State = getattr(self, SLOT)
        return _restore, (state.original, state.portable())

    body = {
        "__slots__": (SLOT,),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": forward,
        "__copy__": shallow_copy,
        "__deepcopy__": deep_copy,
        "__reduce_ex__": reduce,
    }
    fused = type(base.__name__, (base,), body)
    return fused


def _is_traced() -> bool:
    """Tracers see the original, for what they make of it is theirs to optimise; so do hooks set for all modules."""
    return torch.compiler.is_compiling() or tracer() is not None or global_hooks()


def unhooked(model: nn.Module) -> nn.Module:
    """`model` without the hooks of its root: they fire around a forward, ours or the original's, and not within."""
    bare = object.__new__(type(model))
    emptied = {name: OrderedDict[int, Any]() for name in vars(model) if name in _ROOT_HOOKS}
    object.__setattr__(bare, "__dict__", {**vars(model), **emptied})
    return bare


def _restore(original: nn.Module, portable: Mapping[str, Any]) -> nn.Module:
    """What unpickling calls."""
    return attach(original, State.from_portable(original, portable))
