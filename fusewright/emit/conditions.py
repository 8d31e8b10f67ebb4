"""Where a solution's forward finds its inputs, and the conditions under which its kernels serve a call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusewright.dispatch import Args, Guard, Kwargs, Sides
from fusewright.errors import UnsupportedError
from fusewright.ir.memory_order import Order
from fusewright.ir.ops import Size
from fusewright.tree import flat_tensors

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Inputs:
    """How a forward's parameters hold the inputs of a program.

    tensors     expressions of the tensors, in the program's order: ``x``, ``pair[1]``, ``named["mask"]``
    conditions  on everything else: containers, and arguments that are no tensors
    """

    tensors: tuple[str, ...]
    conditions: tuple[str, ...]


def inputs_of(forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Inputs:
    """Where the example call's tensors are, by the names of `forward`'s parameters.

    Raises `UnsupportedError` for arguments whose value has no text.
    """
    bound = inspect.signature(forward).bind(*args, **kwargs)
    by_call = {id(leaf): text for name, value in bound.arguments.items() for text, leaf in _leaves(name, value)}
    bound.apply_defaults()
    tensors = [by_call[id(leaf)] for leaf in flat_tensors(args, kwargs)]
    conditions = [c for name, value in bound.arguments.items() for c in _conditions(name, value)]
    return Inputs(tuple(tensors), tuple(conditions))


def _leaves(text: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield text, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{text}[{key!r}]", item)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _leaves(f"{text}[{i}]", item)


def _conditions(text: str, value: Any) -> Iterator[str]:
    """What makes an argument the one that the program was made for, tensors left out."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, Mapping):
        yield f"list({text}) == {list(value)!r}"
        for key, item in value.items():
            yield from _conditions(f"{text}[{key!r}]", item)
    elif isinstance(value, tuple | list):
        kind = type(value).__name__ if type(value) in (tuple, list) else "tuple"
        yield f"isinstance({text}, {kind}) and len({text}) == {len(value)}"
        for i, item in enumerate(value):
            yield from _conditions(f"{text}[{i}]", item)
    elif value is None or isinstance(value, bool | torch.dtype):
        yield f"{text} is {value}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"type({text}) is float and " + (
            f"{text} != {text}" if math.isnan(value) else f'{text} == float("{value}")'
        )
    elif isinstance(value, _PLAIN):
        yield f"type({text}) is {type(value).__name__} and {text} == {value!r}"
    else:
        raise UnsupportedError(
            f"-o: the forward's argument {text} is a {type(value).__name__}, which a solution file cannot compare; "
            "call the model with tensors and plain values"
        )


def tensor_conditions(name: str, guard: Guard, index: int, sides: Sides) -> list[str]:
    """What a tensor input must be: dtype, shape within the ranges that are served, layout where that matters."""
    shape, (dtype, _) = guard.shapes[index], guard.kinds[index]
    conditions = [f"{name}.dtype is {dtype}"]
    fixed = [i for i, n in enumerate(shape) if isinstance(n, int) and i not in sides.ranges]
    if len(fixed) == len(shape):
        conditions.append(f"{name}.shape == {tuple(shape)}")
    elif fixed == list(range(1, len(shape))):
        conditions.append(f"{name}.shape[1:] == {tuple(shape[1:])}")
    else:
        conditions.append(f"{name}.dim() == {len(shape)}")
        conditions += [f"{name}.shape[{i}] == {shape[i]}" for i in fixed]
        conditions += _other_lengths(name, shape, sides)
    if guard.orders is not None:  # the answer lies in memory as the input does
        conditions.append(f"{_in_order(name, guard.orders[index], len(shape))}.is_contiguous()")
    return conditions


def _other_lengths(name: str, shape: tuple[Size, ...], sides: Sides) -> list[str]:
    conditions = [f"{low} <= {name}.shape[{dim}] <= {high}" for dim, (low, high) in sides.ranges.items()]
    if sides.ranges and not sides.gradients:  # those are derived for the example's lengths
        lengths = " and ".join(f"{name}.shape[{dim}] == {shape[dim]}" for dim in sides.ranges)
        if list(sides.ranges) == list(range(min(sides.ranges), len(shape))):
            lengths = f"{name}.shape[{min(sides.ranges)}:] == {tuple(shape[min(sides.ranges) :])}"
        conditions.append(f"({lengths} or not torch.is_grad_enabled())")
    return conditions


def served(tensors: tuple[str, ...], guard: Guard, sides: Sides) -> str:
    """The inputs that a program serves, in words."""
    of_example = " and ".join(_shape_in_words(tensors, guard, i, {}) for i in range(len(tensors)))
    if not sides.ranges:
        return of_example
    any_length = _shape_in_words(tensors, guard, 0, sides.ranges)
    return any_length if sides.gradients else f"{of_example}, without gradients also {any_length}"


def _shape_in_words(tensors: tuple[str, ...], guard: Guard, index: int, ranges: Mapping[int, tuple[int, int]]) -> str:
    lengths = [str(n) for n in guard.shapes[index]]
    for symbol, at in guard.symbols.items():
        words = f"{max(at.low, 1)} or more" if at.high is None else f"{at.low} to {at.high}"
        own = (at.input, at.dim) if at.input == index else None
        lengths = [
            words if own == (index, i) else n.replace(str(symbol), f"the length of {tensors[at.input]}")
            for i, n in enumerate(lengths)
        ]
    for dim, (low, high) in ranges.items():
        lengths[dim] = f"{low} to {high}"
    dtype = str(guard.kinds[index][0]).removeprefix("torch.")
    return f"{dtype} ({', '.join(lengths)}{',' * (len(lengths) == 1)})"


def _in_order(name: str, order: Order | None, ndim: int) -> str:
    """The view of a tensor that is contiguous where its dimensions lie in `order`."""
    if order is None:
        return name
    if not all(isinstance(dim, int) for dim in order):
        raise UnsupportedError(
            f"-o: the input {name} repeats elements in memory, and the answer would lie as it does; return a tensor "
            "without repetitions (.contiguous()) from get_inputs()"
        )
    return f"{name}.permute({', '.join(map(str, (*order, *(dim for dim in range(ndim) if dim not in order))))})"


def size_conditions(tensors: tuple[str, ...], guard: Guard) -> list[str]:
    """Bounds of symbolic sizes, and the sizes that must agree with them."""
    where = {symbol: f"{tensors[at.input]}.shape[{at.dim}]" for symbol, at in guard.symbols.items()}
    conditions = []
    for symbol, at in guard.symbols.items():
        low = max(at.low, 1)
        upper = "" if at.high is None else f" <= {at.high}"
        conditions.append(f"{low} <= {where[symbol]}{upper}" if upper else f"{where[symbol]} >= {low}")
    for name, shape in zip(tensors, guard.shapes, strict=True):
        for i, n in enumerate(shape):
            own = f"{name}.shape[{i}]"
            if isinstance(n, int) or own in where.values():
                continue
            text = str(n)
            for symbol, place in where.items():
                text = text.replace(str(symbol), place)
            conditions.append(f"{own} == {text}")
    return conditions
