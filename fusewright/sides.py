"""Other lengths of an input for which a program is the same, letter by letter: what it takes at run time.

A program is made for the sizes of its example, but for the batch.  Built again for other lengths with its tiles held,
it may come out as the same text with the same kernels; where PyTorch proves that the model's own path is the same for
all lengths in a range, the program then serves those as well.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product, takewhile
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from fusewright.dispatch import Args, Kwargs, Sides
from fusewright.errors import FusewrightError
from fusewright.pipeline import Built
from fusewright.runtime.launch import FORMATS, layout_of

# Larger graphs take too long to be built a dozen times.
MOST_NODES = 60

# Shorter sides are channels or steps more often than sides of an image.
SHORTEST = 8

# The shortest length is so much of the example's, the longest twice as long.  Where an image is smaller than a tile,
# the tile is cut to it, and the text is another.
LEAST = (0.5, 1.0)

# Lengths to try: so far between the ends, and so much on top, for the remainders that tiles, strides and vectors leave.
LENGTHS = ((0.0, 0), (1.0, 0), (0.05, 1), (0.12, 3), (0.25, 2), (0.33, 7), (0.5, 5), (0.8, -6))

Ranges = Mapping[int, tuple[int, int]]


def free_sides(
    x: Tensor, base: Built, build: Callable[[Tensor], Built], path_is_one: Callable[[Tensor, Ranges], bool]
) -> Sides:
    """Which sides of `x`, the input that `base` was built for, may have other lengths.

    `build` runs the passes on another input by the same rules and with the same tiles; `path_is_one` says whether the
    model does the same for all lengths in some ranges.
    """
    graph, program = base.captured.graph, base.program
    if len(graph.nodes()) > MOST_NODES or len(graph.symbols) != 1 or program.constants:
        return Sides()
    (batch,) = graph.symbols.values()
    order = FORMATS[layout_of(x)].get(x.ndim, torch.contiguous_format)

    def of(lengths: Mapping[int, int]) -> Tensor:
        shape = [max(batch.low, 2), *(lengths.get(dim, n) for dim, n in enumerate(x.shape) if dim > 0)]
        return torch.zeros(shape, dtype=x.dtype, device=x.device).contiguous(memory_format=order)

    def alike(lengths: Mapping[int, int]) -> tuple[bool, bool]:
        """Whether the program, and the kernels' references, are the same at these lengths."""
        try:
            other = build(of(lengths))
        except (FusewrightError, RuntimeError, ValueError):
            return False, False
        return _text(other) == _text(base), _references(other) == _references(base)

    dims = [dim for dim in range(1, x.ndim) if x.shape[dim] >= SHORTEST and alike({dim: x.shape[dim] - 1})[0]]
    for least in LEAST if dims else ():
        ranges = {dim: (int(least * x.shape[dim]), 2 * x.shape[dim]) for dim in dims}
        tried = map(alike, _lengths(ranges))
        found = [gradients for same, gradients in takewhile(itemgetter(0), tried)]
        if len(found) == len(LENGTHS):
            one = path_is_one(of({dim: n - i for i, (dim, (_, n)) in enumerate(ranges.items())}), ranges)
            return Sides(ranges, all(found)) if one else Sides()
    return Sides()


def path_is_one(model: nn.Module, args: Args, kwargs: Kwargs, x: Tensor, ranges: Ranges) -> bool:
    """Whether `model` takes the same path for all lengths of its argument `x` in these ranges, as PyTorch proves it."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    free = {dim: Dim(f"side_{dim}", min=low, max=high) for dim, (low, high) in ranges.items()}
    shapes = {name: free if value is x else None for name, value in bound.items()}
    if free not in shapes.values():  # it is inside of another argument
        return False
    try:
        return _guards_hold(export(model, args, dict(kwargs), dynamic_shapes=shapes, strict=False))
    except Exception:  # whatever it is that cannot be proved
        return False


def _guards_hold(program: ExportedProgram) -> bool:
    """Whether what the trace took for granted of several lengths at once holds; that of one, the export has proved.

    An equality of lengths never holds in all of a range; other claims are tried at its ends and at points inside.
    """
    ranges = {symbol: (int(found.lower), int(found.upper)) for symbol, found in program.range_constraints.items()}
    guards = _guards(program)
    if guards is None:
        return False
    points = [dict(zip(ranges, ends, strict=True)) for ends in product(*ranges.values())]
    points += [
        {s: low + (7 * i + 5 * n) % (high - low) for n, (s, (low, high)) in enumerate(ranges.items())}
        for i in range(16)
    ]
    for guard in guards:
        equality = isinstance(guard, sympy.Eq | sympy.Ne)
        if equality and all(side.is_polynomial() and sympy.total_degree(side) <= 1 for side in guard.args):
            return False
        if not all(guard.subs(point) == sympy.true for point in points):
            return False
    return True


def _guards(program: ExportedProgram) -> list[Any] | None:
    """What the trace took for granted; `None` should PyTorch ever stop showing it."""
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    sizes = (n for value in values if isinstance(value, Tensor) for n in value.shape if isinstance(n, torch.SymInt))
    environment = getattr(getattr(next(sizes, None), "node", None), "shape_env", None)
    guards = getattr(environment, "guards", None)
    return None if guards is None else [guard.expr for guard in guards]


def _lengths(ranges: Ranges) -> Iterator[dict[int, int]]:
    """Both ends for all dimensions at once, then others, each dimension with one of its own."""
    for i in range(len(LENGTHS)):
        lengths = {}
        for turn, (dim, (low, high)) in enumerate(ranges.items()):
            share, more = LENGTHS[i if i < 2 else 2 + (i + turn) % (len(LENGTHS) - 2)]
            lengths[dim] = max(low, min(low + int(share * (high - low)) + more, high))
        yield lengths


def _text(built: Built) -> object:
    """All that runs in a call without gradients."""
    program = built.program
    source = re.sub(r"  # .*", "", program.source)
    return source, program.derived, program.sources, [replace(k, reference="", notes=()) for k in program.kernels]


def _references(built: Built) -> list[str]:
    """What gradients go through."""
    return [re.sub(r"  # .*", "", kernel.reference) for kernel in built.program.kernels]
