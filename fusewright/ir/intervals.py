"""Which values a node can take: intervals that follow from the operations below it, rounded outward.

Used where a rule holds on part of the line only (sqrt, log and 1/x are monotone on the positive reals).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan, prod

import sympy
import torch
import torch.nn.functional as F

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.pointwise import NON_NEGATIVE, REALS, Interval, Traits

# How far down to look; it bounds the work on graphs whose branches meet again and again.
DEPTH = 8
# So many roundings, of 1 where a result is less, implementations may be off whose steps do not keep the order.
SLACK = 256
_NON_POSITIVE: Interval = (-inf, 0.0)


def interval(node: Node, depth: int = DEPTH) -> Interval:
    """An interval that holds every value of `node` that is not NaN."""
    if isinstance(node.op, ops.Number):
        known = not isinstance(node.op.value, sympy.Expr)
        return _hull([float(node.op.value)]) if known else REALS
    if not node.dtype.is_floating_point or depth == 0:
        return REALS
    return outward(_propagated(node, [interval(a, depth - 1) for a in node.inputs]), node.dtype)


def index_count(node: Node) -> int | None:
    """How many an index of an extreme may be, 0 among them; `None` where `node` is no such, or that is not known."""
    while isinstance(node.op, ops.Reshape):
        node = node.arg(0)
    if not isinstance(node.op, ops.Reduce) or not node.op.gives_index:
        return None
    lengths = [node.arg(0).shape[d] for d in node.op.dims]
    known = [n for n in lengths if isinstance(n, int)]
    return prod(known) if len(known) == len(lengths) else None


def outward(bounds: Interval, dtype: torch.dtype) -> Interval:
    """`bounds`, wider by a few roundings in `dtype`; zero and infinity stay, since rounding keeps signs."""
    info = torch.finfo(dtype)

    def moved(bound: float, sign: int) -> float:
        if bound == 0 or abs(bound) == inf:
            return bound
        if abs(bound) >= info.max:  # it may have overflowed, or only just not
            return sign * inf if sign * bound > 0 else -sign * float(info.max)
        return bound + sign * (4 * info.eps * abs(bound) + info.smallest_normal * info.eps)

    return moved(bounds[0], -1), moved(bounds[1], 1)


def within(inner: Interval, outer: Interval) -> bool:
    """Whether `inner` lies inside `outer`."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _propagated(node: Node, args: list[Interval]) -> Interval:
    op = node.op
    match op:
        case ops.Full():
            return _hull([float(op.value)])
        case ops.Vector():
            return _hull(float(v) for v in op.values)
        case ops.Pointwise():
            return _pointwise(op, node, args)
        case ops.Reduce():
            return _reduced(op, args[0])
        case ops.Pool(kind="avg"):
            return _averaged(op, args[0], node.dtype)
        case ops.Pool():
            # a window of padding alone holds an infinity
            return args[0] if not any(op.padding) and not op.ceil_mode else REALS
        case ops.RangeSum():
            return _sign(args[0]) if all(s.scale >= 0 for _, slots in op.table for s in slots) else REALS
        case ops.Interpolate(kind="linear") | ops.Fold():
            return _sign(args[0])
        case ops.Scan():
            return _scanned(op.kind, args[0]) if node.inputs[0].dtype.is_floating_point else REALS
        case ops.Softmax():
            return _NON_POSITIVE if op.log else (0.0, 1.0)
        case ops.Reshape() | ops.Permute() | ops.Expand() | ops.Slice() | ops.Windows():
            return args[0] if node.inputs[0].dtype.is_floating_point else REALS
        case ops.Roll() | ops.Flip() | ops.Upsample():
            return args[0] if node.inputs[0].dtype.is_floating_point else REALS
        case ops.Cast() | ops.Detach() | ops.Transfer():
            return args[0] if node.inputs[0].dtype.is_floating_point else REALS
        case ops.Unfold(grid=grid):
            return _hull([*args[0], 0.0]) if any(grid.padding) else args[0]
        case ops.Cat():
            return _hull(bound for arg in args for bound in arg)
        case ops.Pad():
            return _hull([*args[0], op.value]) if op.mode == "constant" else args[0]
        case _:
            return REALS


def _pointwise(op: ops.Pointwise, node: Node, args: list[Interval]) -> Interval:
    if any(not a.dtype.is_floating_point and not isinstance(a.op, ops.Number) for a in node.inputs):
        return op.traits.range
    if op.traits.arity == 1:
        return _function(op.traits, args[0], node.dtype)
    if op.traits.arity != 2:
        return op.traits.range
    # a Python number is rounded before it is used
    (a, b), (c, d) = (outward(bounds, node.dtype if node.dtype.is_floating_point else torch.float64) for bounds in args)
    match op.fn:
        case "add":
            return _or(a + c, -inf), _or(b + d, inf)
        case "sub":
            return _or(a - d, -inf), _or(b - c, inf)
        case "mul" if node.args[0] is node.args[1]:
            return NON_NEGATIVE
        case "mul":
            return _hull(p * q if p and q else 0.0 for p in (a, b) for q in (c, d))
        case "div" if c > 0 or d < 0:
            return _hull(p / q for p in (a, b) for q in (c, d))
        case "maximum":
            return max(a, c), max(b, d)
        case "minimum":
            return min(a, c), min(b, d)
        case _:
            return op.traits.range


def _function(traits: Traits, arg: Interval, dtype: torch.dtype) -> Interval:
    """The image of `arg` where the function keeps the order, else its range."""
    if traits.monotone is None or not within(arg, traits.domain):
        return traits.range
    x = torch.tensor(arg, dtype=torch.float64)
    ends = eval(traits.torch.format("x"), {"torch": torch, "F": F, "x": x}).tolist()  # the table's own text
    if any(map(isnan, ends)):
        return traits.range
    low, high = _hull(ends)
    if traits.float_monotone:
        return low, high
    slack = SLACK * torch.finfo(dtype).eps
    low, high = low - slack * max(1.0, abs(low)), high + slack * max(1.0, abs(high))
    return max(low, traits.range[0]), min(high, traits.range[1])


def _reduced(op: ops.Reduce, arg: Interval) -> Interval:
    match op.kind:
        case "max" | "min":
            return arg
        case "sum" | "mean":
            return _sign(arg)
        case "prod":
            return NON_NEGATIVE if arg[0] >= 0 else REALS
        case "var" | "std" | "norm":
            return NON_NEGATIVE
        case _:
            return REALS


def _averaged(op: ops.Pool, arg: Interval, dtype: torch.dtype) -> Interval:
    """Averages lie between what they are of, padding and what is rounded among it; other quotients keep the sign."""
    if op.divisor is not None or prod(op.kernel) > SLACK:
        return _sign(arg) if (op.divisor or 1) > 0 else REALS
    low, high = min(arg[0], 0.0), max(arg[1], 0.0)
    slack = SLACK * torch.finfo(dtype).eps * max(-low, high)
    return low and low - slack, high and high + slack


def _sign(arg: Interval) -> Interval:
    """What survives a sum: the sign."""
    return NON_NEGATIVE if arg[0] >= 0 else _NON_POSITIVE if arg[1] <= 0 else REALS


def _scanned(kind: ops.ScanKind, arg: Interval) -> Interval:
    """Of prefixes: one of the elements, or a sum or a product of some."""
    match kind:
        case "max" | "min":
            return arg
        case "sum":
            return _sign(arg)
        case "prod":
            return NON_NEGATIVE if arg[0] >= 0 else REALS
    return REALS


def _hull(values: Iterable[float]) -> Interval:
    """The least interval that holds `values`, NaN left out."""
    kept = [v for v in values if not isnan(v)]
    return (min(kept), max(kept)) if kept else REALS


def _or(bound: float, otherwise: float) -> float:
    """`bound`, or `otherwise` where it is inf - inf."""
    return otherwise if isnan(bound) else bound
