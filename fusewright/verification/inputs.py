"""The inputs of a verification: the user's example, drawn afresh from several distributions, and transformed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.errors import FusewrightError
from fusewright.tree import tree_flatten, tree_map
from fusewright.verification.numerics import TF32_EPS

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one forward call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, example_inputs: object) -> Call:
        """Reads positional arguments (a tuple or list), keyword arguments (a dict) or a single tensor.

        Raises `FusewrightError` for anything else.
        """
        if isinstance(example_inputs, Mapping):
            return cls((), dict(example_inputs))
        if isinstance(example_inputs, (tuple, list)):
            return cls(tuple(example_inputs), {})
        if isinstance(example_inputs, Tensor):
            return cls((example_inputs,), {})
        raise FusewrightError(
            f"example_inputs is a {type(example_inputs).__name__}; "
            "pass a tuple or list of positional arguments or a dict of keyword arguments"
        )

    def __call__(self, module: nn.Module) -> Any:
        """The module's output for these arguments."""
        return module(*self.args, **self.kwargs)

    def map(self, transform: Transform) -> Call:
        """These arguments with every tensor replaced."""
        args, kwargs = tree_map(lambda x: transform(x) if isinstance(x, Tensor) else x, (self.args, self.kwargs))
        return Call(args, kwargs)

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in order."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def batch(self) -> int | None:
        """The leading size of the first tensor that has one: what a different batch size changes."""
        return next((x.shape[0] for x in self.tensors() if x.dim() > 0), None)

    def resized(self, batch: int) -> Call:
        """These arguments with `batch` leading rows wherever there were `self.batch()`, repeated as often as needed."""
        old = self.batch()

        def resize(x: Tensor) -> Tensor:
            if x.dim() == 0 or x.shape[0] != old or old in (0, batch):
                return x
            return x.index_select(0, torch.arange(batch, device=x.device) % old)

        return self.map(resize)


def is_real(x: object) -> bool:
    """Whether a value is a tensor of real or complex numbers, as opposed to integers or truth values."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def copied(x: Tensor) -> Tensor:
    """A differentiable copy with the same strides, gaps included (`clone` closes them)."""
    if x.layout != torch.strided or any(step == 0 and size > 1 for size, step in zip(x.shape, x.stride(), strict=True)):
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _large(z: Tensor, info: torch.finfo) -> Tensor:
    # Far from 1, yet its square still fits every floating dtype.
    return torch.mul(z, min(1e4, info.max**0.25))


DISTRIBUTIONS: Mapping[str, Callable[[Tensor, torch.finfo], Tensor]] = {
    "uniform": lambda z, info: torch.special.ndtr(z),
    "normal": lambda z, info: z,
    "mean 1": lambda z, info: z + 1,
    "mean 10": lambda z, info: z + 10,
    "large": _large,
    "tiny": lambda z, info: z * info.tiny**0.5,
    "negative": lambda z, info: -z.abs(),
    "constant": lambda z, info: torch.full_like(z, 1.5),
    "high variance": lambda z, info: z * torch.exp(1.5 * z),
}
"""Each input distribution as a function of standard normal noise and of the facts about the input's dtype."""


def drawn(call: Call, distribution: str, seed: int) -> Call:
    """`call` with every real tensor drawn from the named distribution; integers, being indices, keep their values."""
    shape_value = DISTRIBUTIONS[distribution]
    generators = _generators(call, seed)

    def draw(x: Tensor) -> Tensor:
        if not is_real(x):
            return x
        parts = torch.view_as_real(x) if x.is_complex() else x
        # A half's noise is drawn in float32, and a double's in its own range.
        drawn_in = torch.promote_types(parts.dtype, torch.float32)
        z = torch.randn(parts.shape, generator=generators[x.device], device=x.device, dtype=drawn_in)
        value = shape_value(z, torch.finfo(parts.dtype)).to(parts.dtype)
        return torch.view_as_complex(value) if x.is_complex() else value

    return call.map(draw)


def permuted(call: Call, seed: int) -> Call:
    """`call` with the entries of every integer or boolean tensor shuffled: other values, all within the range seen."""
    generators = _generators(call, seed)

    def shuffle(x: Tensor) -> Tensor:
        if is_real(x):
            return x
        order = torch.randperm(x.numel(), generator=generators[x.device], device=x.device)
        return x.flatten()[order].reshape(x.shape)

    return call.map(shuffle)


def nudged(call: Call, seed: int, *, tf32: bool = False, times: int = 1) -> Call:
    """`call` with every real entry moved by up to four units in its last place, float32 by up to one of `tf32`'s; or
    so many `times` as far."""
    generators = _generators(call, seed)

    def nudge(x: Tensor) -> Tensor:
        if not is_real(x):
            return x
        most = TF32_EPS if tf32 and x.dtype == torch.float32 else 4 * torch.finfo(x.dtype).eps
        noise = torch.rand(x.shape, generator=generators[x.device], device=x.device, dtype=torch.float64) * 2 - 1
        wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
        return (wide * (1 + times * most * noise)).to(x.dtype)

    return call.map(nudge)


def transposed(call: Call) -> Call:
    """`call` with the same values stored in the opposite order of dimensions."""
    return call.map(lambda x: _reversed(_reversed(x).contiguous()))


def _reversed(x: Tensor) -> Tensor:
    return x.permute(tuple(reversed(range(x.dim()))))


def strided(call: Call) -> Call:
    """`call` with a gap after every element."""
    return call.map(lambda x: torch.stack((x, x), -1)[..., 0])


def channels_last(call: Call) -> Call:
    """`call` with every 4-d and 5-d tensor in channels-last storage."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return call.map(lambda x: x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x)


def planted(call: Call, value: float, seed: int) -> Iterator[tuple[str, Call]]:
    """`call` with `value` at one place of one real input at a time: the corners, the middle, anywhere, a row."""
    generator = torch.Generator().manual_seed(seed)
    targets = [index for index, x in enumerate(call.tensors()) if is_real(x) and x.numel()]
    for index in targets:
        count = call.tensors()[index].numel()
        anywhere = int(torch.randint(count, (), generator=generator))
        places: dict[str, int | None] = {"first": 0, "last": count - 1, "middle": count // 2, "anywhere": anywhere}
        for name, place in {**places, "row": None}.items():
            yield f"input {index}, {name}", _plant(call, index, place, value)


def _plant(call: Call, index: int, place: int | None, value: float) -> Call:
    target = call.tensors()[index]
    filled = target.detach().clone(memory_format=torch.contiguous_format)
    if place is not None:
        filled.view(-1)[place] = value
    else:
        rows = filled.view(-1, filled.shape[-1] if filled.dim() else 1)
        rows[rows.shape[0] // 2] = value
    return call.map(lambda x: filled if x is target else x)


def _generators(call: Call, seed: int) -> dict[torch.device, torch.Generator]:
    devices = {x.device for x in call.tensors()}
    return {device: torch.Generator(device=device).manual_seed(seed) for device in devices}
