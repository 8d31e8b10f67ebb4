"""Scalar C++ for trees of pointwise operations: the same text for CUDA and for a CPU.

Values are computed in the *compute type* of their dtype: `double` for float64, `float` for everything narrower,
which is at least as accurate as eager's rounding after every operation; indices stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from math import inf, isnan
from typing import ClassVar

import torch

from fusewright.ir import ops
from fusewright.ir.intervals import interval, within
from fusewright.ir.node import Node

# Element types of tensors in memory; `bf16` and `fp16` come with the primitives "elements"; integers are
# indices, truth values masks.
ELEMENT = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "long long",
    torch.int32: "int",
    torch.bool: "bool",
}


def compute_type(dtype: torch.dtype) -> str:
    """What a value of this dtype is computed in."""
    return {torch.float64: "double", torch.int64: "long long"}.get(dtype, "float")


def converted(text: str, compute: str) -> str:
    """A value in this type."""
    return f"{compute}({text})" if " " not in compute else f"({compute})({text})"


def literal(value: bool | int | float, compute: str) -> str:
    """A number as C++ text of type `compute`."""
    if compute == "long long":
        assert int(value) == value, f"{value} is no whole number"
        return f"{int(value)}LL"
    number = float(value)
    if compute == "float":
        number = torch.tensor(number, dtype=torch.float32).item()  # what the kernel would round it to, in the open
    if isnan(number):
        return "NAN" if compute == "float" else "double(NAN)"
    if abs(number) == inf:
        sign = "-" if number < 0 else ""
        return f"{sign}INFINITY" if compute == "float" else f"{sign}double(INFINITY)"
    text = repr(number)
    text = text if "." in text or "e" in text else f"{text}.0"
    return f"{text}f" if compute == "float" else text


class Scalars:
    """Writes one statement per operation of a pointwise tree, for one element.

    given     nodes that have a variable already (the value the tree starts from)
    operand   text that reads any other leaf at the current element, in the compute type of its dtype
    cuda      whether the text is for CUDA, which has faster instructions for some functions
    rounds    whether, there, every result is rounded to its dtype, as eager does
    steady    whether, there, many are divided by a value, so that its reciprocal is worth a division
    """

    multiplies: ClassVar[bool] = False  # whether known divisors are factors where the text is not for CUDA

    def __init__(
        self,
        given: Mapping[Node, str],
        operand: Callable[[Node], str],
        cuda: bool = False,
        *,
        rounds: bool = False,
        steady: Callable[[Node], bool] = lambda _: False,
    ) -> None:
        self.cuda, self.rounds, self.steady = cuda, rounds, steady
        self.names = dict(given)
        self.operand = operand
        self.lines: list[str] = []
        self._stepped: dict[Node, bool] = {}

    def value(self, node: Node) -> str:
        """The variable (or literal) that holds `node`; statements it needs are added to `lines`."""
        found = self.names.get(node)
        if found is not None:
            return found
        if isinstance(node.op, ops.Detach):
            return self.value(node.arg(0))
        if node not in self._stepped:
            self._stepped |= _stepped(node, self.names)
        if isinstance(node.op, ops.Cast):
            text = self._cast(node)
        elif isinstance(node.op, ops.Pointwise):
            text = self._pointwise(node)
        else:
            text = self.operand(node)
        text = rounded(text, node.dtype) if self.rounds else text
        name = self.names[node] = f"v{len(self.names)}"
        self.lines.append(f"const {compute_type(node.dtype)} {name} = {text};")
        return name

    def _cast(self, node: Node) -> str:
        value, compute = self.value(node.arg(0)), compute_type(node.dtype)
        if node.dtype == torch.bool:
            return _truth(value)
        text = converted(value, compute)
        if self.cuda or not _truncates(node) or not node.arg(0).dtype.is_floating_point:
            return text
        # What no such number is near is the least of them, as processors have it; a compiler may take it for any.
        return f"{value} >= -0x1p63f && {value} < 0x1p63f ? {text} : -0x7fffffffffffffffLL - 1"

    def _pointwise(self, node: Node) -> str:
        assert isinstance(node.op, ops.Pointwise)
        factor = self.factor(node)
        if factor is not None:
            return f"{self.value(node.arg(0))} * {factor}"
        compute, op = compute_type(node.dtype), _as_in_eager(node.op, node.dtype)
        truth = node.dtype == torch.bool
        compared = truth and len(node.inputs) == 2
        texts = [self._compared(a, node) if compared else self._argument(a, compute) for a in node.inputs]
        template = self._shorter(node, compute) or self.template(op, compute)
        self.lines += [admitted(op, text, compute) for text in texts if op.refuses]
        text = template.format(*texts, T=compute)
        return text if not truth or op.traits.range == (0.0, 1.0) else _truth(text)  # true + true is true

    def factor(self, node: Node) -> str | None:
        """As `reciprocal` has it, where divisions may be products.

        Where a function with steps follows, a quotient that is a step is one in eager too: a GPU's float32 is
        multiplied there as well, anything narrower is rounded to it first.
        """
        eagers = self.cuda and node.dtype == torch.float32
        taken = (self.cuda or self.multiplies) and (eagers or not self._stepped[node])
        return reciprocal(node) if taken else None

    def template(self, op: ops.Pointwise, compute: str) -> str:
        """The text of a function, computed in this type."""
        template = op.traits.cuda if self.cuda and op.traits.cuda and compute == "float" else op.traits.cpp
        template = op.traits.whole if compute == "long long" else template
        assert template is not None, f"{op.fn} has no C++ text"
        return template

    def _shorter(self, node: Node, compute: str) -> str | None:
        """The text of a function that takes fewer instructions for what its arguments can be, if there is one."""
        assert isinstance(node.op, ops.Pointwise)
        if not self.cuda or compute != "float":
            return None
        if node.op.fn == "div" and self.steady(node.arg(1)):
            return "quotient({0}, {1})"
        if not node.op.traits.cuda_within:
            return None
        bounds = interval(node.arg(0))
        return next((text for known, text in node.op.traits.cuda_within if within(bounds, known)), None)

    def _argument(self, node: Node, compute: str) -> str:
        if isinstance(node.op, ops.Number):
            assert isinstance(node.op.value, bool | int | float)
            return literal(node.op.value, compute)
        text = self.value(node)
        return converted(text, compute) if node.dtype == torch.int64 and compute != "long long" else text

    def _compared(self, node: Node, comparison: Node) -> str:
        """An operand in the type that all operands of a comparison are promoted to, where that matters."""
        common = _PROMOTES.infer(tuple(a.type for a in comparison.inputs)).dtype
        if isinstance(node.op, ops.Number):
            value = torch.tensor(node.op.value, dtype=common).item()  # a step as wide as a number of `common`
            return literal(value, compute_type(common))
        text = self.value(node)
        return text if compute_type(node.dtype) == "float" or compute_type(common) == "double" else f"float({text})"


# How far rounding may take what eager rounds to 0 or 1: what lies so close to a bound is not refused.
PAST = 2.0**-16


def admitted(op: ops.Pointwise, value: str, compute: str) -> str:
    """The statement that says so where a function refuses an operand."""
    assert op.traits.admits is not None
    low, high = op.traits.admits
    bounds = literal(low - PAST, compute), literal(high + PAST, compute)
    return f"d.refused |= !({value} >= {bounds[0]} && {value} <= {bounds[1]});"


_PROMOTES = ops.Pointwise("add")

# Functions whose results are far apart for arguments that are not.
_STEPS = frozenset(
    (
        *("floor", "ceil", "round", "trunc", "round_to", "floor_divide", "trunc_divide", "fmod", "remainder"),
        *("eq", "ne", "lt", "le", "gt", "ge", "hardshrink", "threshold", "heaviside"),
    )
)


def _stepped(root: Node, known: Container[Node]) -> dict[Node, bool]:
    """The operations of a tree as far as what is `known`, and whether a function with steps reads any one's result."""
    found: dict[Node, bool] = {}
    stack = [(root, False)]
    while stack:
        node, read = stack.pop()
        tree = isinstance(node.op, ops.Pointwise | ops.Cast | ops.Detach) and node not in known
        if tree and (node not in found or read > found[node]):
            found[node] = read
            read = read or (isinstance(node.op, ops.Pointwise) and node.op.fn in _STEPS) or _truncates(node)
            stack += [(a, read) for a in node.inputs]
    return found


def _truncates(node: Node) -> bool:
    """Whether this is the whole number in another number."""
    return isinstance(node.op, ops.Cast) and not node.dtype.is_floating_point and node.dtype != torch.bool


def _as_in_eager(op: ops.Pointwise, dtype: torch.dtype) -> ops.Pointwise:
    """`op` with the parameters that eager rounds to the values' type, where a result steps at them."""
    if op.fn != "hardshrink":
        return op
    return replace(op, params=tuple(torch.tensor(p, dtype=dtype).item() for p in op.params))


def reciprocal(node: Node) -> str | None:
    """Text of the factor that a division by a number comes to, within an ulp of float32: ATen's own on a GPU; `None`
    where there is none."""
    if (
        not isinstance(node.op, ops.Pointwise)
        or node.op.fn != "div"
        or compute_type(node.dtype) != "float"
        or not node.dtype.is_floating_point
    ):
        return None
    divisor = node.arg(1).op
    if not isinstance(divisor, ops.Number) or not isinstance(divisor.value, int | float):
        return None
    return literal(1 / divisor.value, "float") if 1e-37 < abs(divisor.value) < 1e37 else None


def rounded(text: str, dtype: torch.dtype) -> str:
    """CUDA text of a value as it lies in memory."""
    return f"widened(narrow_to<{ELEMENT[dtype]}>::of({text}))" if dtype in (torch.bfloat16, torch.float16) else text


def _truth(text: str) -> str:
    """A number as the truth it stands for."""
    return f"float({text} != 0)" if text.isidentifier() else f"float(({text}) != 0)"
