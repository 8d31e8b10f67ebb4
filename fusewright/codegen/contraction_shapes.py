"""The shapes and layouts that a contraction's operands must have, which its text takes for granted."""

from __future__ import annotations

from fusewright.codegen.contraction_sizes import names, written
from fusewright.ir.node import Node
from fusewright.kernel import Expression
from fusewright.schedule.contraction import Contraction


def shapes(c: Contraction) -> tuple[tuple[Expression, ...], ...]:
    """Per operand of a call: those of the input, and of what has as many elements as the output, by the input's sizes;
    all others fixed, but for one row per sample."""
    return tuple(_shape(c, node) for node in c.tensors)


def _shape(c: Contraction, operand: Node) -> tuple[Expression, ...]:
    if operand in c.elements:  # and be it the input, which has the output's lengths then
        return "N", str(operand.shape[1]), *written(c)
    if operand is c.x:
        return "N", str(operand.shape[1]), *names(c)
    fixed = [str(d) if isinstance(d, int) else "N" for d in operand.shape]
    return ("N", *fixed[1:]) if operand in c.of_samples else tuple(fixed)


def layouts(c: Contraction) -> tuple[str, ...]:
    """Per operand of a call (`fusewright.kernel.Kernel.layouts`)."""
    return tuple(map(c.layout_of, c.tensors))
