"""The drop-in module: the original's class, state and behaviour, with another forward.

`attach` gives an object of a subclass of the model's own class that *shares the model's attribute dictionary*: the same
parameters, buffers, submodules, hooks and flags, so `state_dict` keys are the same and a change to either is a change
to both.  What is ours lives in one slot beside it.  Any call that no verified plan covers runs the original forward.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from fusewright.dispatch import State

SLOT = "_fusewright"


def attach(model: nn.Module, state: State) -> nn.Module:
    """An object of a subclass of ``type(model)`` that shares all of `model`'s attributes; `state` picks the forward."""
    fused: nn.Module = object.__new__(_subclass(type(model)))
    object.__setattr__(fused, "__dict__", vars(model))
    object.__setattr__(fused, SLOT, state)
    return fused


def state_of(module: nn.Module) -> State | None:
    """The state of an optimised module, or `None` for any other module (and for a replica, which carries none)."""
    return getattr(module, SLOT, None) if hasattr(type(module), SLOT) else None


@cache
def _subclass(base: type[nn.Module]) -> type[nn.Module]:
    @wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Tracers see the original: what they make of it is theirs to optimise.
        state = None if torch.compiler.is_compiling() or torch.jit.is_tracing() else getattr(self, SLOT, None)
        runner = None if state is None else state.runner(args, kwargs)
        return base.forward(self, *args, **kwargs) if runner is None else runner(self, args, kwargs)

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
        "__deepcopy__": deep_copy,
        "__reduce_ex__": reduce,
    }
    return type(base.__name__, (base,), body)


def _restore(original: nn.Module, portable: Mapping[str, Any]) -> nn.Module:
    """What unpickling calls."""
    return attach(original, State.from_portable(original, portable))
