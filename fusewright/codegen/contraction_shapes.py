"""The shapes that a contraction's operands must have, which its text takes for granted."""

from __future__ import annotations

from fusewright.codegen.contraction_sizes import names
from fusewright.kernel import Expression
from fusewright.schedule.contraction import Contraction


def shapes(c: Contraction) -> tuple[tuple[Expression, ...], ...]:
    """Per operand of a call: those of the input by its sizes, all others fixed, but for one row per sample."""
    x, *others = c.tensors
    fixed = (tuple(str(d) if isinstance(d, int) else "N" for d in node.shape) for node in others)
    return ("N", str(x.shape[1]), *names(c)), *fixed
