"""Arguments of a model, nested as they may be, for `fusewright.emit.fresh`: needs nothing but PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def call(function: Any, arguments: Any) -> Any:
    """`function` with positional or keyword arguments."""
    return function(**arguments) if isinstance(arguments, dict) else function(*arguments)


def mapped(value: Any, change: Any) -> Any:
    """`value` with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a value."""
    found: list[torch.Tensor] = []
    mapped(value, found.append)
    return found


def resized(x: torch.Tensor, lengths: dict[int, int]) -> torch.Tensor:
    """A tensor with some dimensions cut, or continued by their mirror image, and its order in memory."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    for dim, length in lengths.items():
        x = torch.cat([x, x.flip(dim)], dim).narrow(dim, 0, length)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor in float64."""
    return x.double() if x.is_floating_point() else x


def leading(value: Any, rows: Sequence[int | None], few: int) -> Any:
    """Copies of all tensors, cut to so many leading rows each; `few` of those beyond `rows`, all where it is `None`."""
    wanted = iter(rows)

    def cut(x: torch.Tensor) -> torch.Tensor:
        n = next(wanted, few)
        return x[:n].clone() if x.dim() else x.clone()

    return mapped(value, cut)
