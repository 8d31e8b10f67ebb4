"""Nested lists, tuples and dicts of values, through PyTorch's own pytree: the one place that imports it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

__all__ = ["TreeSpec", "flat_tensors", "tree_flatten", "tree_map", "tree_unflatten"]


def flat_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """All tensors among a call's arguments, in call order."""
    leaves, _ = tree_flatten((args, dict(kwargs)))
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
