"""What values and operations are: sizes, types of tensors, and the base of all operations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch

from fusewright.errors import GraphError

Size: TypeAlias = int | sympy.Expr


class TensorType(NamedTuple):
    """Shape, dtype and device of a value; `weak` marks a Python number, which promotes less than a 0-d tensor."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    weak: bool = False


Types = tuple[TensorType | None, ...]


def size(value: Any) -> Size:
    """`value` as a plain int where it is one, else the sympy expression."""
    if isinstance(value, int):
        return value
    expression = sympy.sympify(value)
    return int(expression) if expression.is_Integer else expression


def numel(shape: Sequence[Size]) -> Size:
    """The number of elements of a shape."""
    return size(sympy.prod(shape)) if any(not isinstance(d, int) for d in shape) else math.prod(shape)


def same_numel(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether shapes have as many elements, whatever the symbols stand for."""
    return bool(sympy.expand(sympy.sympify(numel(a)) - sympy.sympify(numel(b))) == 0)


def main_device(devices: Iterable[torch.device]) -> torch.device:
    """Where tensors on these devices are computed with: a CPU that is not the only one has but single numbers."""
    found = [*devices]
    return next((d for d in found if d.type != "cpu"), found[0] if found else torch.device("cpu"))


def require(condition: bool, message: str) -> None:
    """Raise `GraphError(message)` unless `condition`."""
    if not condition:
        raise GraphError(message)


def broadcast(a: Sequence[Size], b: Sequence[Size]) -> tuple[Size, ...]:
    """The broadcast of two shapes; raises `GraphError` when they do not broadcast."""
    n = max(len(a), len(b))
    left, right = (1,) * (n - len(a)) + tuple(a), (1,) * (n - len(b)) + tuple(b)
    result: list[Size] = []
    for p, q in zip(left, right, strict=True):
        require(p == q or p == 1 or q == 1, f"shapes {tuple(a)} and {tuple(b)} do not broadcast")
        result.append(q if p == 1 else p)
    return tuple(result)


@dataclass(frozen=True)
class Op:
    """The base of all operations."""

    @property
    def effectful(self) -> bool:
        """Whether the operation is ordered and unique: never merged, duplicated or dropped."""
        return False

    def infer(self, types: Types) -> TensorType:
        """The result's type for arguments of these types; raises `GraphError` for arguments it does not accept."""
        raise GraphError(f"{type(self).__name__} does not say what it returns")
