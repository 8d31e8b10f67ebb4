"""Nested lists, tuples and dicts of values, through PyTorch's own pytree: the one place that imports it."""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_map", "tree_unflatten"]
