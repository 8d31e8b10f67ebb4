"""Whether somebody wants to see a call; where PyTorch cannot say, somebody does."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fusewright.runtime import observers


def reloaded() -> ModuleType:
    """Another copy of the module, as imported by now."""
    spec = importlib.util.spec_from_file_location("observers_again", observers.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nobody() -> None:
    assert not observers.function_modes() and not observers.dispatch_modes() and not observers.global_hooks()
    assert observers.transforms() is None and observers.tracer() is None


def test_everybody() -> None:
    with FlopCounterMode(display=False):
        assert observers.dispatch_modes()
    with torch.device("cpu"):
        assert observers.function_modes()
    seen = []
    torch.func.grad(lambda x: (seen.append(observers.transforms()), x.sum())[1])(torch.ones(2))
    torch.jit.trace(lambda x: (seen.append(observers.tracer()), x + 1)[1], (torch.ones(2),), check_trace=False)
    assert len(seen) == 2 and None not in seen


@pytest.mark.parametrize(
    ("where", "name", "asked"),
    [
        (torch._C, "_len_torch_function_stack", "function_modes"),
        (torch._C, "_len_torch_dispatch_stack", "dispatch_modes"),
        (torch._C._functorch, "peek_interpreter_stack", "transforms"),
        (nn.modules.module, "_has_any_global_hook", "global_hooks"),
    ],
)
def test_where_pytorch_cannot_say(monkeypatch: pytest.MonkeyPatch, where: object, name: str, asked: str) -> None:
    monkeypatch.delattr(where, name)
    again = getattr(reloaded(), asked)
    assert again() and again() is not None


def test_tracing_can_be_told_in_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_tracing_state")
    tracer = reloaded().tracer
    monkeypatch.undo()
    assert tracer() is None
    seen = []
    torch.jit.trace(lambda x: (seen.append(tracer()), x + 1)[1], (torch.ones(2),), check_trace=False)
    assert seen == [True]
