"""What the reductions of kernels say on every target."""

from __future__ import annotations

from fusewright.ir import ops

_WORDS = {"max": "maximum", "min": "minimum", "var": "variance", "std": "standard deviation"}


def word(op: ops.Reduce) -> str:
    """What the result is called."""
    return _WORDS.get(op.kind, op.kind)


def divisor(op: ops.Reduce) -> str:
    """C++ for what the squares of a variance of `count` values are divided by: as in eager nothing below zero."""
    c = float(op.correction)
    return f"(count > {c!r} ? count - {c!r} : 0.0)" if c else "count"
