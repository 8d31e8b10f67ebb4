"""Generated kernels as PyTorch operators: ``torch.ops.fusewright.<name>_<hash>``.

Tensors on a kernel's target run the kernel; others, and more elements than it counts, the reference program beside it.
The backward recomputes the reference and differentiates it, so nothing but the operands is kept, and a second
derivative is the reference's own.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from fusewright.kernel import Array, Kernel, evaluate
from fusewright.runtime.launch import FORMATS, Launcher, Results, sizes_of
from fusewright.runtime.native import launcher
from fusewright.runtime.nvrtc import CountError
from fusewright.runtime.observers import observed

NAMESPACE = "fusewright"

_lock = threading.Lock()
_operators: dict[Kernel, Operator] = {}
_torch: Any = torch  # much of what follows has no types
_library = _torch.library.Library(NAMESPACE, "FRAGMENT")
_KINDS = frozenset({Tensor, torch.nn.Parameter})
_TARGETS = {"cuda": attrgetter("is_cuda"), "cpu": attrgetter("is_cpu")}
_requires_grad = attrgetter("requires_grad")

Reference = Callable[..., Results]


def is_ordinary(t: Tensor) -> bool:
    """Whether a kernel may read what a tensor has in memory: negating lazily is the dispatcher's affair."""
    return type(t) in _KINDS and not t.is_neg()


def operator(kernel: Kernel) -> Operator:
    """The operator of `kernel`: registered on first use, the same one ever after in this process."""
    key = replace(kernel, notes=())
    with _lock:
        found = _operators.get(key)
        if found is None:
            found = _operators[key] = Operator(key)
        return found


def reference_of(kernel: Kernel) -> Reference:
    """A kernel's reference program as a function of its operands."""
    namespace: dict[str, Any] = {"torch": torch, "F": F}
    exec(kernel.reference, namespace)  # our own text, never a user's
    function: Reference = namespace["reference"]
    return function


def written_out(overload: object) -> Reference | None:
    """The reference program of one of these operators; `None` for any other."""
    return next((o.reference for o in list(_operators.values()) if o.overload is overload), None)


class Operator:
    """Calls a kernel's operator, or the kernel itself where the dispatcher has nothing to add.

    Made by `operator` only; pickles and copies as its kernel.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.reference = reference_of(kernel)
        self.launch = launcher(kernel)
        self._on_target = _TARGETS[kernel.target]
        self.overload = _register(kernel, self.reference, self.launch)

    def __call__(self, *tensors: Tensor) -> Results:
        if observed() or not all(map(self._takes, tensors)):
            return self.overload(*tensors)
        if is_grad_enabled() and any(map(_requires_grad, tensors)):
            try:
                return _recomputed(self.launch, self.reference, tensors)
            except CountError:
                return self.reference(*tensors)
        return self.direct(*tensors)

    def direct(self, *tensors: Tensor) -> Results:
        """What it gives for ordinary tensors on the kernel's target, without gradients, where nobody wants to see the
        call: whoever has made sure of that for a whole program need not have every kernel ask."""
        try:
            return self.launch(*tensors)
        except CountError:
            return self.reference(*tensors)

    def _takes(self, t: Tensor) -> bool:
        return is_ordinary(t) and bool(self._on_target(t))

    def __reduce__(self) -> tuple[Any, ...]:
        return operator, (self.kernel,)


def _has_tangent(tensors: tuple[Tensor, ...]) -> bool:
    """Whether forward-mode differentiation passes through."""
    unpack: Any = forward_ad.unpack_dual
    return forward_ad._current_level >= 0 and any(unpack(t).tangent is not None for t in tensors)


# -- registration --------------------------------------------------------------------------------------------------


def _register(kernel: Kernel, reference: Reference, launch: Launcher) -> Callable[..., Results]:
    digest = hashlib.sha256(repr(kernel).encode()).hexdigest()
    name = f"{kernel.name}_{digest[:8]}"
    returns = "Tensor" if not kernel.also else f"({', '.join(['Tensor'] * len(kernel.results))})"
    _library.define(f"{name}({', '.join(f'Tensor {operand}' for operand in kernel.operands)}) -> {returns}")
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def elsewhere(*tensors: Tensor) -> Results:
        made: list[Tensor] = []
        for value, array in zip(_several(reference(*tensors)), kernel.results, strict=True):
            value = value.contiguous(memory_format=FORMATS[array.layout][value.ndim])
            # What begins within other memory, as a row of several does, has no memory of its own either.
            alias = value.storage_offset() > 0 or any(_torch._C._is_alias_of(value, t) for t in (*tensors, *made))
            made.append(value.clone() if alias else value)
        return tuple(made) if kernel.also else made[0]

    def fake(*tensors: Tensor) -> Results:
        sizes, device = sizes_of(kernel, tensors), tensors[0].device

        def empty(array: Array) -> Tensor:
            memory_format = FORMATS[array.layout][len(array.shape)]
            shape = [evaluate(n, sizes) for n in array.shape]
            return torch.empty(shape, dtype=array.dtype, device=device, memory_format=memory_format)

        return tuple(map(empty, kernel.results)) if kernel.also else empty(kernel.output)

    def below(keys: Any, *tensors: Tensor) -> Results:
        with torch._C._AutoDispatchBelowAutograd():
            results: Results = overload.redispatch(keys & torch._C._after_autograd_keyset, *tensors)
            return results

    def on_target(*tensors: Tensor) -> Results:
        try:
            return launch(*tensors)
        except CountError:
            return elsewhere(*tensors)

    def differentiable(keys: Any, *tensors: Tensor) -> Results:
        if torch._C._are_functorch_transforms_active() or _has_tangent(tensors):
            return reference(*tensors)  # what autograd functions cannot do is left to ATen's own
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return _recomputed(partial(below, keys), reference, tensors)
        return below(keys, *tensors)

    _library.impl(name, elsewhere, "CompositeExplicitAutograd")
    _library.impl(name, on_target, kernel.target.upper())
    _library.impl(name, differentiable, "Autograd", with_keyset=True)
    _library.impl(name, reference, "FuncTorchBatched")
    torch.library.register_fake(overload, fake, lib=_library)
    operator: Callable[..., Results] = overload
    return operator


# -- gradients -----------------------------------------------------------------------------------------------------


def _several(results: Results) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def _recomputed(run: Callable[..., Results], reference: Reference, tensors: tuple[Tensor, ...]) -> Results:
    if any(map(Tensor.is_inference, tensors)):  # not to be kept for a backward; ATen's operations may do without
        return reference(*tensors)
    results: Results = _Recomputed.apply(run, reference, *tensors)  # type: ignore[no-untyped-call]
    return results


class _Recomputed(torch.autograd.Function):
    """``run(*tensors)``, differentiated as ``reference(*tensors)``, which is computed again for it."""

    @staticmethod
    def forward(run: Callable[..., Results], reference: Reference, *tensors: Tensor) -> Results:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        _, ctx.reference, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # a result that nobody differentiates is left out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        twice = torch.is_grad_enabled()
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            # Views, so that an operand computed from another one does not pass its gradient on in here; with all its
            # strides: ATen's gradient of a batch norm is wrong on a CPU where those of a size of 1 are others.
            views = [torch.ops.aten.alias(t) for t in ctx.saved_tensors]
            results = _several(ctx.reference(*views))
        wanted = [view for view, need in zip(views, needed, strict=True) if need]
        given = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        if not given:
            return (None,) * (2 + len(views))
        values, own = zip(*given, strict=True)
        found = iter(torch.autograd.grad(values, wanted, own, create_graph=twice, allow_unused=True))
        return None, None, *(next(found) if need else None for need in needed)
