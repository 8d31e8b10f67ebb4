"""What reductions carry, as C++ structs: taking values, merging with another, and passing between lanes.

Sums are carried in float64 after a few additions in the values' own type; maxima and minima keep a NaN.  All of them
have the same members, so that the code around them does not know which it is:

    empty(), take(values), merge(other), from(offset in lanes), save(to, stride), load(from, stride), result(count)

Those that give an index want to know where values are: take(values, index of the first, distance to the next).
"""

from __future__ import annotations

from fusewright.codegen.folds import JOIN_VARIANCES, VARIANCE, divisor, word
from fusewright.codegen.text import fill
from fusewright.ir import ops

# How many float64 numbers a saved fold takes.
PLANES = {
    **{"sum": 1, "mean": 1, "norm": 1, "max": 1, "min": 1, "logsumexp": 2, "var": 4, "std": 4},
    **{"argmax": 2, "argmin": 2},
}

_SUM = """
// A running $kind: a few $values are added in $T, the rest in float64.
struct $Name {
    double total;
    static __device__ $Name empty() { return {0.0}; }
    template <int COUNT>
    __device__ void take(const $T (&value)[COUNT]) {
        $T few = $first;
#pragma unroll
        for (int i = 1; i < COUNT; ++i) few += $each;
        total += few;
    }
    __device__ void merge(const $Name& other) { total += other.total; }
    __device__ $Name from(int offset) const { return {__shfl_down_sync(~0u, total, offset)}; }
    __device__ void save(double* to, index_t) const { *to = total; }
    static __device__ $Name load(const double* from, index_t) { return {*from}; }
    __device__ $R result(double$count) const { return $R($result); }
};
"""

_EXTREME = """
// A running $kind, NaN once there is one.
struct $Name {
    $T best;
    static __device__ $Name empty() { return {$start}; }
    __device__ void take_one($T value) { best = $join(best, value); }
    template <int COUNT>
    __device__ void take(const $T (&value)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) take_one(value[i]);
    }
    __device__ void merge(const $Name& other) { take_one(other.best); }
    __device__ $Name from(int offset) const { return {__shfl_down_sync(~0u, best, offset)}; }
    __device__ void save(double* to, index_t) const { *to = best; }
    static __device__ $Name load(const double* from, index_t) { return {$T(*from)}; }
    __device__ $R result(double) const { return $R(best); }
};
"""

# Where nothing is better than what there is to begin with, all are as it is, and the first of them is at 0.
_PLACE = """
// A running $kind: of the first NaN, or else of the first that nothing is better than.
// What one thread takes comes in order.
struct $Name {
    $T best;
    index_t place;
    static __device__ $Name empty() { return {$start, 0}; }
    template <int COUNT>
    __device__ void take(const $T (&value)[COUNT], index_t first, index_t step = 1) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool better = value[i] $better best || (value[i] != value[i] && best == best);
            best = better ? value[i] : best;
            place = better ? first + i * step : place;
        }
    }
    __device__ void merge(const $Name& other) {
        const bool alike = other.best == best || (other.best != other.best && best != best);
        const bool better = alike ? other.place < place : other.best $better best || other.best != other.best;
        best = better ? other.best : best;
        place = better ? other.place : place;
    }
    __device__ $Name from(int offset) const {
        return {__shfl_down_sync(~0u, best, offset), __shfl_down_sync(~0u, place, offset)};
    }
    __device__ void save(double* to, index_t stride) const { to[0] = best, to[stride] = double(place); }
    static __device__ $Name load(const double* from, index_t stride) { return {$T(from[0]), index_t(from[stride])}; }
    __device__ $R result(double) const { return place; }
};
"""

_LOGSUMEXP = """
// A running logsumexp: the largest value, and the sum of exp(value - largest).  Where the largest is infinite there is
// nothing to subtract.
struct $Name {
    $T most;
    double total;
    static __device__ $Name empty() { return {$start, 0.0}; }
    static __device__ $T shift($T most) { return fabs(most) == $T(INFINITY) ? $T(0) : most; }
    __device__ void raise($T value) {
        const $T least = most;
        most = greater(most, value);
        if (most != least) total *= exp(least - most);
    }
    template <int COUNT>
    __device__ void take(const $T (&value)[COUNT]) {
        $T top = value[0], few = 0;
#pragma unroll
        for (int i = 1; i < COUNT; ++i) top = greater(top, value[i]);
        raise(top);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) few += exp(value[i] - shift(most));
        total += few;
    }
    __device__ void merge(const $Name& other) {
        raise(other.most);
        if (other.total != 0) total += other.total * exp(shift(other.most) - shift(most));
    }
    __device__ $Name from(int offset) const {
        return {__shfl_down_sync(~0u, most, offset), __shfl_down_sync(~0u, total, offset)};
    }
    __device__ void save(double* to, index_t stride) const { to[0] = most, to[stride] = total; }
    static __device__ $Name load(const double* from, index_t stride) { return {$T(from[0]), from[stride]}; }
    __device__ $R result(double) const { return $R($T(log(total)) + shift(most)); }
};
"""

_VAR = (
    VARIANCE
    + """struct $Name {
    double count, shift, total, squares;
    static __device__ $Name empty() { return {0.0, 0.0, 0.0, 0.0}; }
    template <int COUNT>
    __device__ void take(const $T (&value)[COUNT]) {
        if (count == 0) shift = value[0];
        $spread
        count += COUNT;
    }
    __device__ void merge(const $Name& other) {
"""
    + JOIN_VARIANCES
    + """    }
    __device__ $Name from(int offset) const {
        return {__shfl_down_sync(~0u, count, offset), __shfl_down_sync(~0u, shift, offset),
                __shfl_down_sync(~0u, total, offset), __shfl_down_sync(~0u, squares, offset)};
    }
    __device__ void save(double* to, index_t stride) const {
        to[0] = count, to[stride] = shift, to[2 * stride] = total, to[3 * stride] = squares;
    }
    static __device__ $Name load(const double* from, index_t stride) {
        return {from[0], from[stride], from[2 * stride], from[3 * stride]};
    }
    __device__ double mean() const { return shift + total / count; }
    __device__ $R result(double) const {
        const double about_mean = squares - total * total / count;
        return $R($root((about_mean < 0 ? 0 : about_mean) / $over));
    }
};
"""
)


_DISTANCES = """
#pragma unroll
for (int i = 0; i < COUNT; ++i) {
    const double distance = value[i] - shift;
    total += distance;
    squares += distance * distance;
}
"""

# Values of half precision have few digits, and conversions to float64 take longer than reading them.
_DISTANCES_OF_HALF = """
$T few = 0, few_squares = 0;
#pragma unroll
for (int i = 0; i < COUNT; ++i) {
    const $T distance = value[i] - $T(shift);
    few += distance;
    few_squares += distance * distance;
}
total += few, squares += few_squares;
"""


def fold(op: ops.Reduce, name: str, compute: str, result: str, *, half: bool = False) -> str:
    """The struct `name` of a reduction of values of type `compute`, which may be `half` precision in memory, to one of
    type `result`."""
    kind = op.kind
    texts = {"logsumexp": _LOGSUMEXP, "var": _VAR, "std": _VAR, "max": _EXTREME, "min": _EXTREME}
    texts |= {"argmax": _PLACE, "argmin": _PLACE}
    lines = fill(
        texts.get(kind, _SUM),
        Name=name,
        T=compute,
        R=result,
        kind=word(op),
        start=f"{compute}(INFINITY)" if kind in ("min", "argmin") else f"-{compute}(INFINITY)",
        better="<" if kind in ("min", "argmin") else ">",
        join="smaller" if kind == "min" else "greater",
        values="squares" if kind == "norm" else "values",
        first="value[0] * value[0]" if kind == "norm" else "value[0]",
        each="value[i] * value[i]" if kind == "norm" else "value[i]",
        result={"mean": "total / count", "norm": "sqrt(total)"}.get(kind, "total"),
        count=" count" if kind == "mean" else "",
        root="sqrt" if kind == "std" else "",
        over=divisor(op),
        spread=fill(_DISTANCES_OF_HALF if half else _DISTANCES, T=compute),
    )
    return "\n".join(lines)
