"""What the reductions of kernels say on every target."""

from __future__ import annotations

from fusewright.ir import ops

_WORDS = {
    **{"max": "maximum", "min": "minimum", "var": "variance", "std": "standard deviation"},
    **{"argmax": "index of a maximum", "argmin": "index of a minimum"},
}

# Above a running variance, and how it takes in another one: of Templates of kernels.
VARIANCE = """
// A running $kind: sums of distances, and of their squares, from a value among those taken.
// It is no farther from their mean than the root of their number times the deviation, so that nothing of note cancels
// in float64.
"""
JOIN_VARIANCES = """        if (other.count == 0) return;
        if (count == 0) shift = other.shift;
        const double distance = other.shift - shift;
        total += other.total + other.count * distance;
        squares += other.squares + distance * (2 * other.total + other.count * distance);
        count += other.count;
"""


def word(op: ops.Reduce) -> str:
    """What the result is called."""
    return _WORDS.get(op.kind, op.kind)


def divisor(op: ops.Reduce) -> str:
    """C++ for what the squares of a variance of `count` values are divided by: as in eager nothing below zero."""
    c = float(op.correction)
    return f"(count > {c!r} ? count - {c!r} : 0.0)" if c else "count"
