"""Who may want to see a call: modes, transforms of functions, a tracer, hooks set for all modules.

PyTorch has no public way to ask for most of them.  Where a private one is gone, somebody may be there: every call then
goes through the dispatcher, or to the original model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling


def _somebody() -> bool:
    return True


def _tracing() -> bool | None:
    return torch.jit.is_tracing() or None  # type: ignore[attr-defined, no-untyped-call]


_functorch: Any = getattr(torch._C, "_functorch", None)

function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", _somebody)
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _somebody)
# of `torch.func` and its like: nothing where there is none
transforms: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", _somebody)
tracer: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", _tracing)
global_hooks: Callable[[], bool] = getattr(nn.modules.module, "_has_any_global_hook", _somebody)


def observed() -> bool:
    """Whether anybody is there for whom a call has to go through the dispatcher."""
    return bool(
        is_compiling()
        or function_modes()
        or dispatch_modes()
        or transforms() is not None
        or tracer() is not None
        or forward_ad._current_level >= 0
    )
