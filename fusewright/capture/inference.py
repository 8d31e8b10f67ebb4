"""Modules of PyTorch's that compute another way where nothing has a gradient, which a trace does not see.

    nn.MultiheadAttention        one native call, whose result lies row by row; elsewhere it is a turned view
    nn.TransformerEncoderLayer   one native call, that on a GPU has gelu by its approximation with a tanh

A trace shows the way with gradients.  In evaluation mode, of what is batched first and attends to itself, eager takes
the other one where it can; when exactly is its own business, so that a program of that way is verified like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn


def has_other_ways(model: nn.Module) -> bool:
    """Whether the model may compute otherwise where nothing has a gradient."""
    return any(_is_native(module) for module in model.modules())


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """The model as a trace has to find it to see what it computes where nothing has a gradient."""
    restore: list[Callable[[], None]] = []
    try:
        for module in model.modules():
            if not _is_native(module):
                continue
            if isinstance(module, nn.MultiheadAttention):
                restore.append(partial(delattr, module, "forward"))
                module.forward = partial(_in_rows, module.forward)  # type: ignore[method-assign]
            elif _is_gelu(own := module.activation):
                restore.append(partial(setattr, module, "activation", own))
                by_tanh: Any = nn.GELU("tanh") if isinstance(own, nn.Module) else partial(F.gelu, approximate="tanh")
                module.activation = by_tanh
        yield
    finally:
        for undo in restore:
            undo()


def _is_native(module: nn.Module) -> bool:
    if type(module) is nn.MultiheadAttention:
        return module.batch_first and not module.training and "forward" not in vars(module)
    return type(module) is nn.TransformerEncoderLayer and not module.training


def _is_gelu(activation: Any) -> bool:
    return activation is F.gelu or (type(activation) is nn.GELU and activation.approximate == "none")


def _in_rows(forward: Callable[..., Any], query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    output, weights = forward(query, key, value, *args, **kwargs)
    return (output.contiguous() if query is key and key is value else output), weights
