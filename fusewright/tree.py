"""Nested lists, tuples and dicts of values, through PyTorch's own pytree: the one place that imports it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

__all__ = ["TreeSpec", "flat_tensors", "odd_container", "tree_flatten", "tree_map", "tree_unflatten"]


def odd_container(spec: TreeSpec) -> str | None:
    """The name of the first container that is no plain dict, list or tuple, and so not to be written down as text."""
    return _odd(tree_unflatten([0] * spec.num_leaves, spec))


def _odd(value: Any) -> str | None:
    if type(value) is dict:
        bad = next((type(k).__name__ for k in value if not isinstance(k, str | int)), None)
        return f"dict with a {bad} for a key" if bad else next(filter(None, map(_odd, value.values())), None)
    if type(value) in (list, tuple):
        return next(filter(None, map(_odd, value)), None)
    return None if type(value) is int or value is None else type(value).__name__


def flat_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """All tensors among a call's arguments, in call order."""
    leaves, _ = tree_flatten((args, dict(kwargs)))
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
