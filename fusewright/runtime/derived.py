"""Derived weights (summed taps, composed kernels): recomputed while training, kept while nothing moved when not.

An in-place edit, `load_state_dict` or an optimizer step moves a parameter's version counter.  An edit through ``.data``
does not: on a CPU, sources of up to `WHOLE` elements are compared whole and larger ones at `PLACES` or more, in each
row of a weight with fewer rows; on a GPU reading any would stall the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

WHOLE, PLACES = 1 << 14, 1 << 12

_KINDS = frozenset({Tensor, nn.Parameter})


_version, _requires_grad = attrgetter("_version"), attrgetter("requires_grad")
_pointer, _stride = Tensor.data_ptr, Tensor.stride


class _Moment:
    """What some tensors looked like when values were derived from them."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.versions, self.pointers = list(map(_version, tensors)), list(map(_pointer, tensors))
        # Those of images are part of the state that a module's `Watch` compares.
        self.turned = tuple(t for t in tensors if 1 < t.ndim < 4)
        self.strides = list(map(_stride, self.turned))
        probes = [_probe(t) for t in tensors if t.device.type == "cpu" and t.numel()]
        self.probes = [(probe, probe.clone()) for probe in probes]

    def holds(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether `tensors` are the same with the same content, as far as can be told without reading all of it."""
        if tensors is not self.tensors and not all(map(is_, tensors, self.tensors)):
            return False
        if list(map(_version, tensors)) != self.versions or list(map(_pointer, tensors)) != self.pointers:
            return False
        if list(map(_stride, self.turned)) != self.strides:
            return False
        if any(map(Tensor.is_inference, tensors)):
            return False  # they may have been given the memory of such a tensor, and count no edits since
        return all(_same_bits(probe, seen) for probe, seen in self.probes)


def _probe(tensor: Tensor) -> Tensor:
    """Elements of a tensor, where they lie."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,))[:: 1 if span <= WHOLE else span // PLACES]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that holds for NaN too."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


class DerivedWeights:
    """The derived values of one program for one module."""

    def __init__(
        self,
        derive: Callable[[nn.Module], tuple[Tensor, ...]],
        sources: Sequence[str],
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`sources` are what `derive` reads: keys of `constants`, and dotted paths in the module."""
        held = constants or {}
        self._derive = derive
        self._held = tuple(held[key] for key in sources if key in held)
        self._paths = [path.rpartition(".")[::2] for path in sources if path not in held]
        self._found: tuple[object, nn.Module, tuple[Any, ...]] = (None, nn.Module(), ())
        self._known: tuple[_Moment, tuple[Tensor, ...]] | None = None

    def __call__(self, module: nn.Module, state: object = None) -> tuple[Tensor, ...]:
        """The values for `module` as it is now.

        While `state` is the same object, so are all tensors of the module, and none is looked up again; that takes
        longer for a network than all else.
        """
        sources = self._sources(module, state)
        if torch.is_grad_enabled() and _may_require_grad(sources):
            return self._derive(module)
        known = self._known  # read once: another thread may replace it
        if known is not None and known[0].holds(sources):
            return known[1]
        if not _are_ordinary(sources):
            return self._derive(module)
        with torch.inference_mode(False), torch.no_grad():
            # What is derived is of the tensors that are there now, whatever `state` was taken for.
            sources, values = self._look_up(module), self._derive(module)
        self._known = (_Moment(sources), values)
        return values

    def forget(self) -> None:
        """Keep no tensors of a state alive for being looked up."""
        self._found = (None, nn.Module(), ())

    def _sources(self, module: nn.Module, state: object) -> tuple[Any, ...]:
        known, of, found = self._found
        if state is None or known is not state or of is not module:
            found = self._look_up(module)
            self._found = state, module, found
        return found

    def _look_up(self, module: nn.Module) -> tuple[Any, ...]:
        return (*self._held, *(_read(module, owner, name) for owner, name in self._paths))


def _are_ordinary(sources: tuple[Any, ...]) -> bool:
    """Not stand-ins (of functional transforms), nor inference tensors."""
    return _KINDS.issuperset(map(type, sources)) and not any(map(Tensor.is_inference, sources))


def _may_require_grad(sources: tuple[Any, ...]) -> bool:
    """Whether gradients flow through them, or will once something that is no parameter is edited."""
    return any(map(_requires_grad, sources)) or not all(isinstance(t, nn.Parameter) for t in sources)


def _read(module: nn.Module, owner: str, name: str) -> Any:
    return getattr(module.get_submodule(owner) if owner else module, name)
