"""Scalar C++ for trees of pointwise operations: the same text for CUDA and for a CPU.

Values are computed in the *compute type* of their dtype: `double` for float64, `float` for everything narrower,
which is at least as accurate as eager's rounding after every operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isnan

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node

# Element types of tensors in memory; `bf16` and `fp16` come with the primitives "elements".
ELEMENT = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def compute_type(dtype: torch.dtype) -> str:
    """What a value of this dtype is computed in."""
    return "double" if dtype == torch.float64 else "float"


def literal(value: bool | int | float, compute: str) -> str:
    """A number as C++ text of type `compute`."""
    number = float(value)
    if isnan(number):
        return "NAN" if compute == "float" else "double(NAN)"
    if abs(number) == inf:
        sign = "-" if number < 0 else ""
        return f"{sign}INFINITY" if compute == "float" else f"{sign}double(INFINITY)"
    if compute == "float":
        number = torch.tensor(number, dtype=torch.float32).item()  # what the kernel would round it to, in the open
    text = repr(number)
    text = text if "." in text or "e" in text else f"{text}.0"
    return f"{text}f" if compute == "float" else text


class Scalars:
    """Writes one statement per operation of a pointwise tree, for one element.

    given     nodes that have a variable already (the value the tree starts from)
    operand   text that reads any other leaf at the current element, in the compute type of its dtype
    cuda      whether the text is for CUDA, which has faster instructions for some functions
    """

    def __init__(self, given: Mapping[Node, str], operand: Callable[[Node], str], cuda: bool = False) -> None:
        self.cuda = cuda
        self.names = dict(given)
        self.operand = operand
        self.lines: list[str] = []

    def value(self, node: Node) -> str:
        """The variable (or literal) that holds `node`; statements it needs are added to `lines`."""
        found = self.names.get(node)
        if found is not None:
            return found
        if isinstance(node.op, ops.Cast):
            text = self._cast(node)
        elif isinstance(node.op, ops.Pointwise):
            text = self._pointwise(node)
        else:
            text = self.operand(node)
        name = self.names[node] = f"v{len(self.names)}"
        self.lines.append(f"const {compute_type(node.dtype)} {name} = {text};")
        return name

    def _cast(self, node: Node) -> str:
        return f"{compute_type(node.dtype)}({self.value(node.arg(0))})"

    def _pointwise(self, node: Node) -> str:
        assert isinstance(node.op, ops.Pointwise)
        compute = compute_type(node.dtype)
        texts = []
        for arg in node.inputs:
            if isinstance(arg.op, ops.Number):
                assert isinstance(arg.op.value, bool | int | float)
                texts.append(literal(arg.op.value, compute))
            else:
                texts.append(self.value(arg))
        traits = node.op.traits
        template = traits.cuda if self.cuda and traits.cuda and compute == "float" else traits.cpp
        assert template is not None, f"{node.op.fn} has no C++ text"
        return template.format(*texts, T=compute)
