"""Chains of pointwise functions: scales and constants that merge, functions that repeat themselves, what cancels.

All but the casts hold for floating-point values only.  c, d stand for Python numbers known at plan time.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Literal

import torch

from fusewright.ir.build import cast, pointwise
from fusewright.ir.intervals import interval, within
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Cast, Full, Pointwise
from fusewright.ir.pointwise import NON_NEGATIVE, Interval
from fusewright.rules.operands import (
    FLOATING,
    floating,
    function,
    is_negated,
    is_scaled,
    is_shifted,
    number,
    place,
    usable,
)
from fusewright.rules.rule import Exactness, Match, Rule, op, rule, value

UNKNOWN = "a number is not known at plan time"


def _is_unary(node: Node) -> bool:
    return isinstance(node.op, Pointwise) and node.op.traits.arity == 1


def _known(node: Node) -> float | None:
    """The Python number beside the value of a scaled or shifted node."""
    return number(node.arg(place(node)))


def _value(node: Node) -> Node:
    """The value beside the Python number."""
    return node.arg(1 - place(node))


# Scales


def _merged_scale(m: Match) -> tuple[Literal["mul", "div"], float] | None:
    """What one scale the two amount to; divisors multiply, so that they stay one division."""
    outer, inner = _known(m["outer"]), _known(m["inner"])
    if outer is None or inner is None:
        return None
    match function(m["inner"]), function(m["outer"]):
        case "div", "div":
            return "div", inner * outer
        case "mul", "div":
            return "mul", inner / outer if outer else inf
        case "div", _:
            return "mul", outer / inner if inner else inf
    return "mul", inner * outer


def _refuse_scales(m: Match) -> str | None:
    merged = _merged_scale(m)
    if not floating(m["outer"], m["inner"], _value(m["inner"])):
        return FLOATING
    if merged is None:
        return UNKNOWN
    every = (merged[1], _known(m["outer"]) or 0.0, _known(m["inner"]) or 0.0)
    return None if all(usable(c, m["outer"].dtype) for c in every) else "a scale is zero, not finite or not normal"


_SCALED = op("outer", Pointwise, of=(op("inner", Pointwise, where=is_scaled),), where=is_scaled)


@rule("d*(c*x) = (d*c)*x", pattern=_SCALED, condition=_refuse_scales, exactness="reassociates")
def scale_of_scale(m: Match) -> Node:
    """(x*c)*d -> x*(c*d), (x/c)/d -> x/(c*d), (x*c)/d -> x*(c/d), (x/c)*d -> x*(d/c); x itself where they cancel.

    x of any shape; c, d and what they amount to finite, nonzero and normal.  Class reassociates.
    """
    merged = _merged_scale(m)
    assert merged is not None
    fn, scale = merged
    return _value(m["inner"]) if scale == 1 else pointwise(fn, _value(m["inner"]), scale)


def _refuse_shifts(m: Match) -> str | None:
    outer, inner = _known(m["outer"]), _known(m["inner"])
    if not floating(m["outer"], m["inner"], _value(m["inner"])):
        return FLOATING
    if outer is None or inner is None:
        return UNKNOWN
    largest = max(abs(outer), abs(inner))
    if not isfinite(outer + inner) or largest > torch.finfo(m["outer"].dtype).max:
        return "a constant is not finite"
    # (x + 1.5 * 2**23) - 1.5 * 2**23 rounds float32 to whole numbers, and is written for that
    return "the constants may be there to round" if largest * torch.finfo(m["outer"].dtype).eps >= 0.25 else None


@rule(
    "(x + c) + d = x + (c + d)",
    pattern=op("outer", Pointwise, of=(op("inner", Pointwise, where=is_shifted),), where=is_shifted),
    condition=_refuse_shifts,
    exactness="reassociates",
)
def shift_of_shift(m: Match) -> Node:
    """(x + c) + d -> x + (c + d), and so with subtraction; x itself where they cancel.

    x of any shape; c, d finite, and not so large that adding one rounds x to whole numbers.  Class reassociates.
    """
    both = [_known(m[n]) or 0.0 for n in ("inner", "outer")]
    signs = [-1.0 if function(m[n]) == "sub" else 1.0 for n in ("inner", "outer")]
    total = sum(s * c for s, c in zip(signs, both, strict=True))
    return _value(m["inner"]) if total == 0 else pointwise("add", _value(m["inner"]), total)


def _is_doubled(node: Node) -> bool:
    return function(node) == "add" and node.args[0] is node.args[1]


def _refuse_integers(m: Match) -> str | None:
    return None if floating(m["root"], m["root"].arg(0)) else FLOATING


@rule(
    "x + x = 2*x",
    pattern=op("root", Pointwise, of=(value("x"),), where=_is_doubled),
    condition=_refuse_integers,
    exactness="exact",
)
def doubled(m: Match) -> Node:
    """x + x -> x*2, so that it joins other scales; x of any shape.  Floating point only.  Class exact."""
    return pointwise("mul", m["x"], 2.0)


def _neutral(node: Node) -> Exactness | None:
    """The class in which `node` is its operand: x*1, x/1, x - 0 and x + -0.0 to the bit; x + 0 makes 0.0 of -0.0."""
    known = _known(node)
    zero = known == 0 and is_shifted(node)
    if is_scaled(node):
        return "exact" if known == 1 else None
    negative = zero and str(known).startswith("-")
    return None if not zero else "exact" if negative == (function(node) == "add") else "reassociates"


def _refuse_neutral(m: Match) -> str | None:
    if _neutral(m["root"]) is None:
        return "the number changes the value"
    return None if m["root"].dtype == _value(m["root"]).dtype else "the result has another dtype"


@rule(
    "x * 1 = x + 0 = x",
    pattern=op("root", Pointwise, where=lambda node: is_scaled(node) or is_shifted(node)),
    condition=_refuse_neutral,
    exactness=lambda m: _neutral(m["root"]) or "exact",
)
def neutral(m: Match) -> Node:
    """x*1, x/1, x - 0, x + 0 -> x, of any shape, where the dtype stays.

    Class exact; reassociates for x + 0 and x - (-0.0), which turn -0.0 into 0.0.
    """
    return _value(m["root"])


# Functions that repeat themselves


def _refuse_repeated(m: Match) -> str | None:
    outer, inner = m["outer"].op, m["inner"].op
    assert isinstance(outer, Pointwise) and isinstance(inner, Pointwise)
    if (outer.fn, repr(outer.params)) != (inner.fn, repr(inner.params)):
        return "the two functions differ"
    if not floating(m["outer"], m["inner"]):
        return FLOATING
    return None if outer.traits.idempotent else f"{outer.fn} is not idempotent"


_TWICE = op("outer", Pointwise, of=(op("inner", Pointwise, of=(value("x"),), where=_is_unary),), where=_is_unary)


@rule("f(f(x)) = f(x)", pattern=_TWICE, condition=_refuse_repeated, exactness="exact")
def repeated(m: Match) -> Node:
    """f(f(x)) -> f(x) for an idempotent f: relu, abs, clamp, floor, ...; x of any shape.  Class exact."""
    return make(m["outer"].op, m["x"])


# At a bound that is met exactly, the gradient of these passes, and that of those is zero.
_PASSING = ("clamp", "clamp_min", "clamp_max")
_STOPPING = ("relu", "relu6", "hardtanh")


def _is_clip(node: Node) -> bool:
    return function(node) in (*_PASSING, *_STOPPING)


def _range(node: Node) -> Interval:
    assert isinstance(node.op, Pointwise)
    return node.op.traits.range


def _refuse_clips(m: Match) -> str | None:
    outer, inner = m["outer"], m["inner"]
    assert isinstance(outer.op, Pointwise) and isinstance(inner.op, Pointwise)
    if repr(outer.op) == repr(inner.op):
        return "the two are the same"
    if (outer.op.fn in _PASSING) != (inner.op.fn in _PASSING):
        return "their gradients differ at a bound"
    if not floating(outer, inner, inner.arg(0)):
        return FLOATING
    if outer.op.traits.monotone is None or inner.op.traits.monotone is None:
        return "a bound is NaN"
    low, high = (f(a, b) for f, a, b in zip((max, min), _range(outer), _range(inner), strict=True))
    return None if low < high else "the two ranges do not overlap"


@rule(
    "clamp(clamp(x)) = clamp(x)",
    pattern=op("outer", Pointwise, of=(op("inner", Pointwise, of=(value("x"),), where=_is_clip),), where=_is_clip),
    condition=_refuse_clips,
    exactness="exact",
)
def clip_of_clip(m: Match) -> Node:
    """clamp_{c,d}(clamp_{a,b}(x)) -> clamp to max(a,c), min(b,d); relu, relu6 and hardtanh -> hardtanh.

    x of any shape; the two ranges overlap, and their gradients agree where a bound is met exactly.  Class exact.
    """
    (a, b), (c, d) = _range(m["inner"]), _range(m["outer"])
    low, high = max(a, c), min(b, d)
    if function(m["outer"]) in _STOPPING:
        return pointwise("hardtanh", m["x"], params=(low, high))
    if low == -inf:
        return pointwise("clamp_max", m["x"], params=(high,))
    if high == inf:
        return pointwise("clamp_min", m["x"], params=(low,))
    return pointwise("clamp", m["x"], params=(low, high))


@rule(
    "-(-x) = x",
    pattern=op("outer", Pointwise, of=(op("inner", Pointwise, of=(value("x"),), where=is_negated),), where=is_negated),
    condition=lambda m: None,
    exactness="exact",
)
def negated_twice(m: Match) -> Node:
    """-(-x) -> x, of any shape.  Always holds.  Class exact."""
    return m["x"]


def _refuse_uneven(m: Match) -> str | None:
    assert isinstance(m["f"].op, Pointwise)
    if not floating(m["f"], m["x"]):
        return FLOATING
    return None if m["f"].op.traits.parity == "even" else f"{m['f'].op.fn} is not even"


def _class_of_even(m: Match) -> Exactness:
    return "exact" if function(m["f"]) in ("abs", "square") else "reassociates"


@rule(
    "f(-x) = f(x)",
    pattern=op("f", Pointwise, of=(op("inner", Pointwise, of=(value("x"),), where=is_negated),), where=_is_unary),
    condition=_refuse_uneven,
    exactness=_class_of_even,
)
def even_of_negated(m: Match) -> Node:
    """f(-x) -> f(x) for an even f: abs, square, cos, x**4; x of any shape.

    Class exact for abs and square; reassociates for the others, whose implementations need not be symmetric to the bit.
    """
    return make(m["f"].op, m["x"])


# Functions written out in their parts


def _named(root: Node) -> tuple[str, Node] | None:
    """The function of one value that `root` computes from its parts, and the value."""
    if not isinstance(root.op, Pointwise) or root.op.traits.arity != 2:
        return None
    for x, part in (root.args, root.args[::-1]) if function(root) == "mul" else (root.args,):
        assert x is not None and part is not None
        match function(root), function(part):
            case "sub", "tanh" if part.arg(0) is x:
                return "tanhshrink", x
            case "div", "add" if is_shifted(part) and _known(part) == 1 and _is_abs_of(_value(part), x):
                return "softsign", x
            case "mul", "sigmoid" if part.arg(0) is x:
                return "silu", x
    return None


def _is_abs_of(node: Node, x: Node) -> bool:
    return function(node) == "abs" and node.arg(0) is x


def _found(m: Match) -> tuple[str, Node]:
    found = _named(m["root"])
    assert found is not None  # the pattern asks for it
    return found


def _refuse_unnamed(m: Match) -> str | None:
    return None if floating(m["root"], _found(m)[1]) else FLOATING


def _class_of_name(m: Match) -> Exactness:
    return "exact" if _found(m)[0] in ("tanhshrink", "softsign") else "reassociates"


@rule(
    "x - tanh(x) = tanhshrink(x)",
    pattern=op("root", Pointwise, where=lambda node: _named(node) is not None),
    condition=_refuse_unnamed,
    exactness=_class_of_name,
)
def named(m: Match) -> Node:
    """x - tanh(x) -> tanhshrink(x), x/(1 + |x|) -> softsign(x), x*sigmoid(x) -> silu(x).

    x of any shape.  What is known of the whole function is not of its parts: tanhshrink rises, so max passes it.  Class
    exact for the first two, which PyTorch computes from these parts; reassociates for silu.

    Mish keeps its parts: PyTorch's second derivative of it is NaN from x = 89 on, that of x*tanh(softplus(x)) is not.
    """
    return pointwise(*_found(m))


def _refuse_complement(m: Match) -> str | None:
    if number(m["one"]) != 1:
        return "the number is not 1"
    return None if floating(m["root"], m["f"], m["x"]) else FLOATING


@rule(
    "1 - sigmoid(x) = sigmoid(-x)",
    pattern=op(
        "root",
        Pointwise,
        of=(value("one"), op("f", Pointwise, of=(value("x"),), where=lambda node: function(node) == "sigmoid")),
        where=lambda node: function(node) == "sub",
    ),
    condition=_refuse_complement,
    exactness="reassociates",
    enables=True,
)
def complement(m: Match) -> Node:
    """1 - sigmoid(x) -> sigmoid(-x), x of any shape; it takes as long, and is good to the last digit where x is large
    and the difference is not.  Floating point only.  Class reassociates.
    """
    return pointwise("sigmoid", pointwise("neg", m["x"]))


def _root(node: Node) -> Node | None:
    """The root whose square `node` is."""
    assert isinstance(node.op, Pointwise)
    squares = function(node) == "square" or repr(node.op) == repr(Pointwise("pow", (2,)))
    product = function(node) == "mul" and node.args[0] is node.args[1]
    found = node.arg(0) if squares or product else None
    return found if found is not None and function(found) == "sqrt" else None


def _radicand(m: Match) -> Node:
    root = _root(m["root"])
    assert root is not None  # the pattern asks for it
    return root.arg(0)


def _refuse_radicand(m: Match) -> str | None:
    if not floating(m["root"], _radicand(m)):
        return FLOATING
    return None if within(interval(_radicand(m)), NON_NEGATIVE) else "the root may be of negative numbers"


@rule(
    "sqrt(x)^2 = x",
    pattern=op("root", Pointwise, where=lambda node: _root(node) is not None),
    condition=_refuse_radicand,
    exactness="reassociates",
)
def square_of_root(m: Match) -> Node:
    """square(sqrt(x)) -> x, as x itself has been computed whoever else reads the root; x of any shape.

    x is nowhere negative: a distance squared is max(v, 0).  Floating point only.  Class reassociates.
    """
    return _radicand(m)


# Casts

_FITS: dict[torch.dtype, int] = {  # bits of whole numbers that a dtype holds
    torch.bool: 1, torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31, torch.int64: 63,
    torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53,
}  # fmt: skip


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    if wide not in _FITS or narrow not in _FITS or (narrow.is_floating_point and not wide.is_floating_point):
        return False
    if narrow.is_floating_point:
        small, large = torch.finfo(narrow), torch.finfo(wide)
        return large.max >= small.max and large.eps <= small.eps and large.tiny <= small.tiny
    signed = wide.is_signed or not narrow.is_signed
    return signed and _FITS[wide] >= _FITS[narrow]


def _refuse_casts(m: Match) -> str | None:
    x, inner, outer = m["x"].dtype, m["inner"].dtype, m["outer"].dtype
    if not holds(inner, x):
        return "the inner cast may change values"
    whole = not outer.is_floating_point and outer is not torch.bool
    return "a float too large for whole numbers may differ" if whole and inner.is_floating_point else None


@rule(
    "cast(cast(x)) = cast(x)",
    pattern=op("outer", Cast, of=(op("inner", Cast, of=(value("x"),)),)),
    condition=_refuse_casts,
    exactness="exact",
)
def cast_of_cast(m: Match) -> Node:
    """x.to(a).to(b) -> x.to(b), or x where it has that dtype already; x of any shape.

    Every value of x's dtype is one of a's, and no float becomes a whole number.  Class exact.
    """
    return cast(m["x"], m["outer"].dtype)


# What is constant for finite values


def _is_zero(node: Node) -> bool:
    if function(node) == "sub":
        return node.args[0] is node.args[1]
    return function(node) == "mul" and is_scaled(node)


def _refuse_nonzero(m: Match) -> str | None:
    root = m["root"]
    if not root.dtype.is_floating_point:
        return FLOATING
    return None if function(root) == "sub" or _known(root) == 0 else "the number is not zero"


@rule(
    "x * 0 = x - x = 0",
    pattern=op("root", Pointwise, where=_is_zero),
    condition=_refuse_nonzero,
    exactness="finite",
)
def zero(m: Match) -> Node:
    """x*0, x - x -> zeros of the shape of x.  Floating point only.  Class finite: NaN and Inf gave NaN."""
    root = m["root"]
    return make(Full(root.shape, 0.0, root.dtype, root.device))


RULES: tuple[Rule, ...] = (
    neutral,
    negated_twice,
    even_of_negated,
    repeated,
    clip_of_clip,
    named,
    complement,
    square_of_root,
    doubled,
    scale_of_scale,
    shift_of_shift,
    cast_of_cast,
    zero,
)
