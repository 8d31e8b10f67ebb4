"""How values of a contraction's tile become one: the text that joins two of them, and what a running result is."""

from __future__ import annotations

from dataclasses import dataclass
from string import Template

import torch


@dataclass(frozen=True)
class Joining:
    """One kind of reduction or pooling.

    joins     text of a running result joined with a value, or with another running result
    empty     the running result of nothing
    running   its type within a tile, and over many tiles
    swapped   text of the running result of the lane so many lanes away
    result    text of what it comes to
    words     numbers of the compute type that the type over many tiles takes in memory
    """

    joins: str
    empty: str
    running: tuple[str, str] = ("Compute", "Compute")
    swapped: str = "__shfl_xor_sync(0xffffffffu, {0}, {1})"
    result: str = "{0}"
    words: int = 1

    def join(self, one: str, other: str) -> str:
        return self.joins.format(one, other)

    def join_lane(self, name: str, distance: int | str) -> str:
        """`name` joined with that of the lane `distance` away."""
        return self.join(name, self.swapped.format(name, distance))


# Sums over many tiles are carried in float64.
_SUM = Joining("{0} + {1}", "Compute(0)", ("Compute", "double"))
JOININGS = {
    "sum": _SUM,
    "mean": _SUM,
    "avg": _SUM,
    "max": Joining("greater({0}, {1})", "-Compute(INFINITY)"),
    "min": Joining("smaller({0}, {1})", "Compute(INFINITY)"),
    "logsumexp": Joining(
        "joined({0}, {1})", "LogSum()", ("LogSum", "LogSum"), "swapped({0}, {1})", "{0}.result()", words=2
    ),
}


def declarations(kind: str, compute: str, *, clustered: bool) -> str:
    """What a kernel has to define for a reduction of this kind; `clustered` where blocks read each other's results."""
    if kind != "logsumexp":
        return ""
    names = {
        "largest": "1.7976931348623157e308" if compute == "double" else "3.40282347e38f",
        "exponential": "exp(x)" if compute == "double" else "exp2_approx(1.44269504f * x)",
    }
    return Template(_LOGSUM).substitute(names) + (_CLUSTERED if clustered else "")


def scratch_type(running: str, compute: str) -> torch.dtype:
    """Of the numbers that running results are kept as."""
    return torch.float64 if running == "double" or compute == "double" else torch.float32


_LOGSUM = """
// A running logsumexp: `total` times exp(shift) is the sum of exp(value).  The shift follows the values where they
// exceed it by more than SLACK, which few do, and stays finite: infinities meet no others.
constexpr Compute LARGEST = $largest, SLACK = 4;

__device__ __forceinline__ Compute exponential(Compute x) { return $exponential; }

struct LogSum {
    Compute shift = -LARGEST, total = 0;
    __device__ __forceinline__ Compute result() const { return log(total) + shift; }
};
__device__ __forceinline__ LogSum joined(LogSum sum, Compute value) {
    if (value > sum.shift + SLACK) {
        const Compute shift = value < LARGEST ? value : LARGEST;
        sum.total *= exponential(sum.shift - shift);
        sum.shift = shift;
    }
    sum.total += exponential(value - sum.shift);
    return sum;
}
__device__ __forceinline__ LogSum joined(LogSum a, LogSum b) {
    const Compute shift = a.shift > b.shift ? a.shift : b.shift;
    return {shift, a.total * exponential(a.shift - shift) + b.total * exponential(b.shift - shift)};
}
__device__ __forceinline__ LogSum swapped(LogSum sum, int distance) {
    return {__shfl_xor_sync(0xffffffffu, sum.shift, distance), __shfl_xor_sync(0xffffffffu, sum.total, distance)};
}
"""

_CLUSTERED = """\
__device__ __forceinline__ LogSum cluster_load(const LogSum* sum, unsigned rank) {
    return {cluster_load(&sum->shift, rank), cluster_load(&sum->total, rank)};
}
"""
