"""What a generated kernel is to whoever runs or prints it: source text, launches, and the arithmetic of their sizes.

One record serves the runtime (which compiles and launches it) and an emitted file (which holds the same text).  Every
number that depends on a call is an *expression*: Python text over the names in `Kernel.sizes` with ``+ - * //``,
``min``, ``max``, ``ceil_div`` and ``spread``, so that it can be evaluated here and printed in C++ there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from types import CodeType, EllipsisType

import torch

Expression = str

# Of an argument: a number or flag, or one for each dimension, or several.
Value = int | None | tuple["Value", ...]


@dataclass(frozen=True)
class Array:
    """A tensor that a call allocates: shape as expressions, dense in its layout (see `Kernel.layouts`)."""

    name: str
    shape: tuple[Expression, ...]
    dtype: torch.dtype
    layout: str = "contiguous"


@dataclass(frozen=True)
class Argument:
    """One parameter of an entry point: a pointer to an operand, the output or a scratch array, or a number.

    kind   ``"pointer"`` (text names an operand or array), ``"int"`` (32 bits) or ``"long"`` (64 bits, an expression),
           ``"threads"`` (CPU, an int: PyTorch's number of threads where the expression, scalar operations that there
           are to do, is worth them, else 1)
    """

    kind: str
    text: Expression


@dataclass(frozen=True)
class Launch:
    """One launch: entry point, its parameters, and the grid; `shared` counts bytes of dynamic shared memory.

    `cluster` blocks along x form a thread block cluster; the source itself carries the attribute.  On a CPU a launch is
    a call, and the grid says only whether there is anything to do.
    """

    entry: str
    arguments: tuple[Argument, ...]
    grid: tuple[Expression, Expression, Expression] = ("1", "1", "1")
    threads: int = 1
    shared: int = 0
    cluster: int = 1


@dataclass(frozen=True)
class Fixed:
    """A constant of a kernel's text that is an argument of PyTorch's function: a kernel size, a stride, a padding.

    name     as PyTorch has it; of windows ``pool`` is the kernel size, and the others are ``pool_stride`` and so on
    default  what PyTorch takes where it is left out; ``...`` where it may not be
    """

    name: str
    value: Value
    default: Value | EllipsisType = ...


@dataclass(frozen=True)
class Kernel:
    """A group's generated kernel.

    name       the group's name, an identifier of ours (``fused_conv_avg_sigmoid_sum``)
    source     complete C++ text: everything it uses is in it, entry points are ``extern "C"`` (and ``__global__``)
    operands   names of the tensors a call passes, in order
    layouts    per operand ``"contiguous"`` or ``"channels_last"``: the kernel sees it dense in that; on a GPU it starts
               at a multiple of 16 bytes, on a CPU at one of its elements' size
    sizes      named numbers of a call: (name, operand index, dimension)
    output     the array it returns
    also       arrays that it returns beside that, in a tuple with it
    scratch    arrays allocated for the call and dropped after it (uninitialised)
    launches   in order, on one stream
    reference  ATen text of a function ``reference(*operands)`` that computes the same value
    needs      least compute capability times ten (80, 90)
    arch       the one architecture that it is written for, such as ``"sm_90a"``, whose compute capability `needs` then
               is; empty: every one from `needs` on
    notes      what a plan says about it, one sentence each
    dtypes     what the operands must be, one each; a call with others is refused (empty: its maker vouches for them)
    shapes     likewise their shapes, as expressions over the sizes
    target     ``"cuda"`` or ``"cpu"``
    counts     what the text counts in 32 bits beside its arguments; a call in which that is not enough is refused
    looks_up   whether it reads rows, or what classes have, at indices of a call: where one is that of none, functions
               for a CPU return 1, and those for a GPU trap; or whether it traps at a number that eager refuses
    fixed      what its text holds as constants and no shape tells; functions in a solution file compare it
    brief      the kernel without launches that, mostly, only look whether they are needed: as fast but for those, in
               less text, it is timed where there are many to choose from
    """

    name: str
    source: str
    operands: tuple[str, ...]
    layouts: tuple[str, ...]
    sizes: tuple[tuple[str, int, int], ...]
    output: Array
    scratch: tuple[Array, ...]
    launches: tuple[Launch, ...]
    reference: str
    needs: int = 80
    notes: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[tuple[Expression, ...], ...] = ()
    target: str = "cuda"
    counts: tuple[Expression, ...] = ()
    arch: str = ""
    looks_up: bool = False
    fixed: tuple[Fixed, ...] = ()
    also: tuple[Array, ...] = ()
    brief: Kernel | None = None

    @property
    def outside(self) -> tuple[type[Exception], str]:
        """What an index that is that of none is answered with, as eager does (which tells the index, too)."""
        if ".gather(" in self.reference:
            return RuntimeError, "index is out of bounds"
        rows = any(name.startswith("v") and dim == 0 for name, _, dim in self.sizes)
        return IndexError, "index out of range in self" if rows else "Target is out of bounds."

    @property
    def results(self) -> tuple[Array, ...]:
        """All arrays that it returns."""
        return (self.output, *self.also)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All that a call allocates, results first."""
        return (*self.results, *self.scratch)

    @property
    def unnumbered(self) -> Kernel:
        """Its text without the number that tells kernels of one chain in one program apart: what is equal but for that
        is built once."""
        numbered = re.fullmatch(r"(fused_\w+)_\d+", self.name)  # as ours are; what a user chose stays
        if numbered is None:
            return self
        stem = numbered[1]
        launches = tuple(replace(launch, entry=launch.entry.replace(self.name, stem)) for launch in self.launches)
        return replace(self, name=stem, source=self.source.replace(self.name, stem), launches=launches)

    def runs_on(self, capability: int) -> bool:
        """Whether a device of this compute capability (times ten) has what the kernel uses."""
        return capability == self.needs if self.arch else capability >= self.needs


def ceil_div(a: int, b: int) -> int:
    """The least integer that is no less than a / b."""
    return -(-a // b)


def spread(samples: int, tiles: int, slots: int, most: int = 64, start: int = 1) -> int:
    """Blocks to give each sample so that all tiles are done soonest on a device that runs `slots` blocks at a time.

    To start, a block takes about as long as for `start` tiles, and blocks that all start at once also wait at once.
    Results of more than `most` blocks would take too long to join.
    """

    def tiles_in_a_row(blocks: int) -> float:
        rounds = max(1, ceil_div(samples * blocks, slots))
        return rounds * (ceil_div(tiles, blocks) + start) * (1 + 0.1 / rounds)

    return min(range(1, max(1, min(tiles, most)) + 1), key=tiles_in_a_row)


_NAMES = {
    "__builtins__": {},
    "ceil_div": ceil_div,
    "spread": spread,
    "min": lambda *values: reduce(torch.sym_min, values),
    "max": lambda *values: reduce(torch.sym_max, values),
}


def evaluate(expression: Expression, sizes: Mapping[str, int | torch.SymInt]) -> int:
    """The value of an expression of ours for the sizes of one call: an int, or a `SymInt` of symbolic sizes."""
    value: int = eval(_compiled(expression), _NAMES, dict(sizes))  # our own text, never a user's
    return value


@lru_cache(maxsize=4096)
def _compiled(expression: Expression) -> CodeType:
    return compile(expression, "<size>", "eval")
