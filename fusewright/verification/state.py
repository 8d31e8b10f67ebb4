"""Everything about a module that a run may change, so that it can be put back: nothing a verification does may show."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class _Saved:
    tensor: Tensor
    value: Tensor
    version: int
    requires_grad: bool
    grad: Tensor | None
    is_leaf: bool
    is_parameter: bool


class State:
    """The parameters, buffers, `.grad`, `requires_grad` and training flags of some modules, as they are now."""

    def __init__(self, *modules: nn.Module) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._flags = [(part, part.training) for part in parts.values()]
        self._slots: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        self._saved: dict[int, _Saved] = {}
        for part in parts.values():
            for slots, is_parameter in ((part._parameters, True), (part._buffers, False)):
                for name, tensor in slots.items():
                    if tensor is not None:
                        self._slots.append((slots, name, tensor))  # type: ignore[arg-type]
                        self._save(tensor, is_parameter)

    def _save(self, x: Tensor, is_parameter: bool) -> None:
        if id(x) not in self._saved:
            grad = x.grad if x.is_leaf else None
            self._saved[id(x)] = _Saved(
                x, x.detach().clone(), x._version, x.requires_grad, grad, x.is_leaf, is_parameter
            )

    def restore(self, *, thorough: bool = False) -> None:
        """Puts back what has changed, and touches nothing else: a write would outdate what is cached for a version.

        A kernel can write without raising the version, so buffers are always compared; parameters where `thorough`.
        """
        for part, training in self._flags:
            part.training = training
        for slots, name, tensor in self._slots:
            if slots.get(name) is not tensor:
                slots[name] = tensor
        for saved in self._saved.values():
            self._restore_tensor(saved, thorough)

    @staticmethod
    def _restore_tensor(saved: _Saved, thorough: bool) -> None:
        x = saved.tensor
        if saved.is_leaf and not x.is_leaf:  # a buffer that something with a gradient was written to
            x.detach_()
        if saved.is_leaf and x.grad is not saved.grad:
            x.grad = saved.grad
        if saved.is_leaf and x.requires_grad != saved.requires_grad:
            x.requires_grad_(saved.requires_grad)
        if saved.is_parameter and not thorough and x._version == saved.version:
            return
        if not torch.equal(x.detach(), saved.value):
            with torch.no_grad():
                x.copy_(saved.value)
        saved.version = x._version


@contextmanager
def preserved(*modules: nn.Module) -> Iterator[None]:
    """Leaves the modules, and every random-number generator they may draw from, as they were found."""
    state = State(*modules)
    # Asking an uninitialised CUDA for its generators would initialise it.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    python_random = random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_random)
        state.restore(thorough=True)


def reseed(seed: int) -> None:
    """Seeds Python's generator and PyTorch's on every device in use (a CUDA not yet initialised is left alone)."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
