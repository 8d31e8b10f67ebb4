"""Maxima of windows, or of all positions, that are found from the greatest and the least value of each.

Some functions dip: they fall up to a point and rise from there, as gelu, silu and mish do.  The maximum of one over a
window is at one of the window's ends,

    max f(x) = max(f(max x), f(min x)),

whether or not a function that only rises or only falls stands between x and f.  So f is computed twice for each window,
not once for each of its values; a NaN is both of their ends.  No window has padding alone: PyTorch pads half of one at
most.

That holds for any values, and so for those that a thread of a GPU folds of a reduction: it keeps their ends, computes f
of these once it has seen all, and leaves the maximum to the others as if it had kept that.  A thread that has no value
leaves -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite, prod

from fusewright.ir import ops
from fusewright.ir.intervals import interval, within
from fusewright.ir.node import Node, topological
from fusewright.schedule.chain import Map, depends_on
from fusewright.schedule.contraction import Contraction, is_number

# Functions of two that are ordered by each of them, for any value of the other one.
ORDERED = ("add", "sub", "maximum", "minimum")

# Values that a window has and the one before it does not, from which on what is computed of its two ends is less.
LEAST = 3
# Threads that have a part each of what one result is folded from, in most tiles at least.
THREADS = 32


def at_ends(c: Contraction) -> Contraction:
    """The group with the last functions ahead of its pool, or of a reduction of what was not pooled, as `ends`, if that
    is a maximum which these allow, and they take longer than to compare."""
    return of_windows(c) if c.window is not None else _of_reductions(c)


def of_windows(c: Contraction) -> Contraction:
    """The same ahead of a pool alone."""
    if c.window is None or c.window.op.kind != "max":
        return c
    own = map(min, c.window.op.kernel, c.window.op.stride)
    return c if prod(own) < LEAST else _with_ends(c, lambda node: True)


def _of_reductions(c: Contraction) -> Contraction:
    """The same ahead of a reduction over positions: what is computed last may read single numbers alone, as a thread
    has several channels."""
    if c.fold is None or c.fold.op.kind != "max" or not c.over_positions:
        return c
    lengths = [c.conv.shape[dim] for dim in c.fold.op.dims]
    known = [n for n in lengths if isinstance(n, int)]
    return c if known == lengths and prod(known) < LEAST * THREADS else _with_ends(c, is_number)


def _with_ends(c: Contraction, alike: Callable[[Node], bool]) -> Contraction:
    """The group with functions from `before` as `ends`, if there are such, that read what is `alike` for all values."""
    if c.before is None or c.ends is not None or c.shares is not None:  # which lies between, or is made of a pool
        return c
    ends = _dipping(c.before, alike)
    if ends is None:
        return c
    return replace(c, before=None if ends.value is c.before.value else Map(c.before.value, ends.value), ends=ends)


def _dipping(before: Map, alike: Callable[[Node], bool]) -> Map | None:
    """The end of a tree that is a function which dips, of functions that only rise or only fall."""
    f = before.root
    if not isinstance(f.op, ops.Pointwise) or not f.op.traits.dips:
        return None
    behind = depends_on(topological([f], (before.value,)), (before.value,)) | {before.value}
    value, costly = f.arg(0), not f.op.traits.float_monotone
    while value is not before.value and (inner := _ordered(value, behind, alike)) is not None:
        assert isinstance(value.op, ops.Pointwise)
        costly, value = costly or (value.op.traits.arity == 1 and not value.op.traits.float_monotone), inner
    return Map(value, f) if costly else None


def _ordered(node: Node, behind: set[Node], alike: Callable[[Node], bool]) -> Node | None:
    """What `node` only rises with, or only falls, whatever else it reads, if that is `alike` for all values whose ends
    are kept; a NaN is one behind it."""
    own = [a for a in node.inputs if a in behind]
    if not isinstance(node.op, ops.Pointwise) or len(own) != 1 or node.inputs.count(own[0]) != 1:
        return None
    if not all(alike(a) for a in node.inputs if a not in behind):
        return None
    (x,), traits = own, node.op.traits
    if traits.arity == 1:
        kept = traits.monotone is not None and traits.nan_to_nan and within(interval(x), traits.domain)
    else:
        kept = node.op.fn in ORDERED or _is_scaled(node, x)
    return x if kept else None


def _is_scaled(node: Node, x: Node) -> bool:
    """Whether `node` is x times a number, or over one, which makes NaN of no number: an infinity does of a 0 that is no
    end of its window."""
    assert isinstance(node.op, ops.Pointwise)
    other = next((a for a in node.inputs if a is not x), x)
    if not isinstance(other.op, ops.Number):
        return False
    fixed = isinstance(other.op.value, int | float) and isfinite(other.op.value) and other.op.value != 0
    return fixed and (node.op.fn == "mul" or (node.op.fn == "div" and node.arg(0) is x))
