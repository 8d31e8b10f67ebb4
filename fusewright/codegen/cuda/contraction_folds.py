"""How values of a contraction's tile become one: the text that joins two of them, and what a running result is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusewright.codegen.text import Lines, fill


@dataclass(frozen=True)
class Lanes:
    """Lanes of a warp that differ in one coordinate, called `name`: their number in words, that of all but one of them,
    and how far they are apart at least and most."""

    name: str
    count: str
    others: str
    nearest: int
    farthest: int

    @property
    def distances(self) -> list[int]:
        """Of the lanes that values are joined with, one after the other."""
        return [1 << i for i in range(5) if self.nearest <= 1 << i <= self.farthest]

    @property
    def first(self) -> str:
        """Whether this lane is the first of them."""
        return f"{self.name} == 0"

    @property
    def words(self) -> dict[str, object]:
        """By which texts call them."""
        numbers = {"nearest": self.nearest, "farthest": self.farthest, "past": 2 * self.farthest}
        return {"count": self.count, "others": self.others, "first": self.first, **numbers}


# The lanes of an accumulator's column, in its eight rows, and those of its row.
ROW, COLUMN = Lanes("row", "eight", "seven", 4, 16), Lanes("quad", "four", "three", 1, 2)


@dataclass(frozen=True)
class Joining:
    """One kind of reduction or pooling.

    joins     text of a running result joined with a value, or with another running result
    empty     the running result of nothing
    running   its type within a tile, and over many tiles
    swapped   text of the running result of the lane so many lanes away
    one       text of that of one value, where another one may be in its place
    result    text of what it comes to
    words     numbers of the compute type that the type over many tiles takes in memory
    at_once   whether an array of values is joined at once where there are several: a thread's, or by `of_column` those
              of a column
    """

    joins: str
    empty: str
    running: tuple[str, str] = ("Compute", "Compute")
    swapped: str = "__shfl_xor_sync(0xffffffffu, {0}, {1})"
    one: str = "{0}"
    result: str = "{0}"
    words: int = 1
    at_once: bool = False

    def join(self, one: str, other: str) -> str:
        return self.joins.format(one, other)

    def there_or_empty(self, there: str, value: str) -> str:
        """Of a value, if it is `there`, the running result."""
        return f"chosen({there}, {self.one.format(value)}, {self.empty})"

    def join_lane(self, name: str, distance: int | str) -> str:
        """`name` joined with that of the lane `distance` away."""
        return self.join(name, self.swapped.format(name, distance))


# Sums over many tiles are carried in float64.
_SUM = Joining("{0} + {1}", "Compute(0)", ("Compute", "double"))
JOININGS = {
    "sum": _SUM,
    "mean": _SUM,
    "avg": _SUM,
    "sum of exponentials": replace(_SUM, result="log({0})"),
    "max": Joining("greater({0}, {1})", "-Compute(INFINITY)"),
    "min": Joining("smaller({0}, {1})", "Compute(INFINITY)"),
    "logsumexp": Joining(
        "joined({0}, {1})",
        "LogSum()",
        ("LogSum", "LogSum"),
        "swapped({0}, {1})",
        result="{0}.result()",
        words=2,
        at_once=True,
    ),
}

# Of a window, or of a thread's values, whose maximum is found from their ends (`fusewright.schedule.window_ends`).
OF_ENDS = Joining("joined({0}, {1})", "Ends()", ("Ends", "Ends"), one="Ends({0})")


def declarations(kind: str, compute: str, *, column: Lanes | None, singly: bool, clustered: bool) -> Lines:
    """What a kernel has to define for a reduction of this kind: `column` has the lanes whose values are joined at once,
    if any are; `singly` where values come one by one; `clustered` where blocks read each other's results."""
    if kind != "logsumexp":
        return []
    names: dict[str, object] = {
        "largest": "1.7976931348623157e308" if compute == "double" else "3.40282347e38f",
        "exponential": "exp(x)" if compute == "double" else "exp2_approx(1.44269504f * x)",
    }
    names |= {} if column is None else column.words
    text = _LOGSUM + (_OF_VALUES if column is None else _OF_COLUMN)
    text += (_OF_VALUE if singly else "") + (_CLUSTERED if clustered else "")
    return fill(text, **names)


def scratch_type(running: str, compute: str) -> torch.dtype:
    """Of the numbers that running results are kept as."""
    return torch.float64 if running == "double" or compute == "double" else torch.float32


_LOGSUM = """
// A running logsumexp: `total` times exp(shift) is the sum of exp(value).  The shift is finite, so that infinities meet
// no others.
constexpr Compute LARGEST = $largest;

__device__ __forceinline__ Compute exponential(Compute x) { return $exponential; }

struct LogSum {
    Compute shift = -LARGEST, total = 0;
    __device__ __forceinline__ Compute result() const { return log(total) + shift; }
};
__device__ __forceinline__ LogSum joined(LogSum a, LogSum b) {
    const Compute shift = a.shift > b.shift ? a.shift : b.shift;
    return {shift, a.total * exponential(a.shift - shift) + b.total * exponential(b.shift - shift)};
}
"""

_OF_VALUES = """\
// The shift follows the values where they exceed it by more than SLACK, which few do: it is looked into once for all of
// a thread's values at hand.
constexpr Compute SLACK = 4;
template <int N>
__device__ __forceinline__ LogSum joined(LogSum sum, const Compute (&values)[N]) {
    Compute highest = values[0];
#pragma unroll
    for (int i = 1; i < N; ++i) highest = fmax(highest, values[i]);
    if (highest > sum.shift + SLACK) {
        const Compute shift = fmin(highest, LARGEST);
        sum.total *= exponential(sum.shift - shift);
        sum.shift = shift;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sum.total += exponential(values[i] - sum.shift);
    return sum;
}
__device__ __forceinline__ LogSum swapped(LogSum sum, int distance) {
    return {__shfl_xor_sync(0xffffffffu, sum.shift, distance), __shfl_xor_sync(0xffffffffu, sum.total, distance)};
}
"""

_OF_VALUE = """\
__device__ __forceinline__ LogSum joined(LogSum sum, Compute value) {
    const Compute values[1] = {value};
    return joined(sum, values);
}
"""

_OF_COLUMN = """\
// Of the channels at one position: this lane's and those of the $others that have others.
__device__ __forceinline__ LogSum of_column(const Compute (&values)[M_TILES][2]) {
    LogSum sum;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) sum.shift = fmax(sum.shift, values[i / 2][i % 2]);
#pragma unroll
    for (int distance = $nearest; distance < $past; distance *= 2)
        sum.shift = fmax(sum.shift, __shfl_xor_sync(0xffffffffu, sum.shift, distance));
    sum.shift = fmin(sum.shift, LARGEST);
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) sum.total += exponential(values[i / 2][i % 2] - sum.shift);
#pragma unroll
    for (int distance = $nearest; distance < $past; distance *= 2)
        sum.total += __shfl_xor_sync(0xffffffffu, sum.total, distance);
    return sum;
}
"""

_CLUSTERED = """\
__device__ __forceinline__ LogSum cluster_load(const LogSum* sum, unsigned rank) {
    return {cluster_load(&sum->shift, rank), cluster_load(&sum->total, rank)};
}
"""
