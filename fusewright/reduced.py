"""The same call at a smaller side: where float64 runs at full size would take minutes, most is verified on this one.

A plan for the smaller side is built by the same passes; it stands for the larger one when the same rules fired on it
and the same groups became kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.dispatch import Args, Kwargs
from fusewright.errors import CaptureError
from fusewright.pipeline import Built
from fusewright.runtime.memory import is_out_of_memory
from fusewright.tree import flat_tensors, tree_map

# A side is cut to the first of these, plus its own remainder by eight, so that strides and windows end as they did.
SIDES = (24, 40, 72, 136)

# No further side is tried after so many seconds: the batch of a network may be cut as well, at once.
PATIENCE = 15.0


def reduced(
    model: nn.Module, args: Args, kwargs: Kwargs, built: Built, build: Callable[[Args, Kwargs], Built]
) -> tuple[Args, Kwargs, Built] | None:
    """The example call with its spatial sides cut, and the program built for it; `None` where none is like `built`, or
    was in time.

    Dimensions from the third on count as sides.  `build` runs the passes on a call.
    """
    wanted, begun = shape(built), time.monotonic()
    for cut_args, cut_kwargs in _cuts(args, kwargs):
        if time.monotonic() - begun > PATIENCE:
            return None
        if not _accepts(model, cut_args, cut_kwargs):
            continue
        try:
            smaller = build(cut_args, cut_kwargs)
        except CaptureError:
            continue
        if shape(smaller) == wanted:
            return cut_args, cut_kwargs, smaller
    return None


def shape(built: Built) -> tuple[list[str], list[str], tuple[int, int, int]]:
    """What must be the same for one program to stand for another: its rules, its kernels, its products of what is
    turned and of windows, and its taps that are features."""
    rules, kernels = [fired.rule for fired in built.rewritten.fired], [k.name for k in built.program.kernels]
    return rules, kernels, (built.batches, built.windows, built.features)


def _cuts(args: Args, kwargs: Kwargs) -> Iterator[tuple[Args, Kwargs]]:
    largest = max((n for t in flat_tensors(args, kwargs) for n in t.shape[2:]), default=0)
    for side in SIDES:
        if side + 8 > largest * 3 // 4:
            return
        yield tree_map(lambda t, n=side: _cut(t, n) if isinstance(t, Tensor) else t, (args, dict(kwargs)))


def _cut(tensor: Tensor, side: int) -> Tensor:
    for dim in range(2, tensor.ndim):
        length = tensor.shape[dim]
        if length > side + 8:
            tensor = tensor.narrow(dim, 0, side + length % 8)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _accepts(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether the model runs on this call; its state is left as it was by the caller's care."""
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    return True
