"""What reductions carry, as C++ structs: of one result, or of a block of neighbouring results.

Sums are carried in float64; maxima and minima keep a NaN.  All have the same members, so that the code around them does
not know which it is:

    take(values, count), merge(other), save(to, stride), load(from, stride), result(count)

A block's take an element each of several rows, `pitch` apart.  Those that give an index are told that of the first
value, or of the row, as well: take(values, count, index).
"""

from __future__ import annotations

from string import Template

from fusewright.codegen.folds import JOIN_VARIANCES, VARIANCE, divisor, word
from fusewright.ir import ops

# How many float64 numbers a saved fold takes.
PLANES = {
    **{"sum": 1, "mean": 1, "norm": 1, "max": 1, "min": 1, "logsumexp": 2, "var": 4, "std": 4},
    **{"argmax": 2, "argmin": 2},
}

_SUM = """
// A running $kind, in float64.
struct $Name {
    double total = 0;
    void take(const $T* value, index_t count) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (index_t e = 0; e < count; ++e) sum += $value;
        total += sum;
    }
    void merge(const $Name& other) { total += other.total; }
    void save(double* to, index_t) const { *to = total; }
    static $Name load(const double* from, index_t) { return {*from}; }
    $R result(double$count) const { return $R($result); }
};
"""

_EXTREME = """
// A running $kind, NaN once there is one.
struct $Name {
    $T best = $start;
    void take(const $T* value, index_t count) {
        $T found = $start;
        int unordered = 0, better = 0;  // a compiler's reduction may start from a finite number
#pragma omp simd reduction($function : found) reduction(| : unordered, better)
        for (index_t e = 0; e < count; ++e) {
            found = value[e] $better found ? value[e] : found;
            unordered |= value[e] != value[e];
            better |= value[e] $better $start;
        }
        merge({unordered ? $T(NAN) : better ? found : $start});
    }
    void merge(const $Name& other) { best = other.best $better best || other.best != other.best ? other.best : best; }
    void save(double* to, index_t) const { *to = best; }
    static $Name load(const double* from, index_t) { return {$T(*from)}; }
    $R result(double) const { return $R(best); }
};
"""

# Where nothing is better than what there is to begin with, all are as it is, and the first of them is at 0.
_PLACE = """
// A running $kind: of the first NaN, or else of the first that nothing is better than.
struct $Name {
    $T best = $start;
    index_t place = 0;
    void take(const $T* value, index_t count, index_t first) {  // which is found once it is known that there is one
        $T found = $start;
        int unordered = 0, better = 0;
#pragma omp simd reduction($function : found) reduction(| : unordered, better)
        for (index_t e = 0; e < count; ++e) {
            found = value[e] $better found ? value[e] : found;
            unordered |= value[e] != value[e];
            better |= value[e] $better best;
        }
        if (best != best || !(unordered || better)) return;
        index_t e = 0;
        while (unordered ? value[e] == value[e] : value[e] != found) ++e;
        best = value[e], place = first + e;
    }
    void merge(const $Name& other) {
        const bool alike = other.best == best || (other.best != other.best && best != best);
        if (alike ? other.place < place : other.best $better best || other.best != other.best) *this = other;
    }
    void save(double* to, index_t stride) const { to[0] = best, to[stride] = double(place); }
    static $Name load(const double* from, index_t stride) { return {$T(from[0]), index_t(from[stride])}; }
    $R result(double) const { return place; }
};
"""

_LOGSUMEXP = """
// A running logsumexp: the largest value, and the sum of exp(value - largest).  Where the largest is infinite there is
// nothing to subtract.
struct $Name {
    $T most = -$T(INFINITY);
    double total = 0;
    static $T shift($T most) { return fabs(most) == $T(INFINITY) ? $T(0) : most; }
    void raise($T value) {
        if (!(value > most)) return;
        if (total != 0) total *= exp(double(shift(most)) - value);
        most = value;
    }
    void take(const $T* value, index_t count) {
        $T found = -$T(INFINITY);
#pragma omp simd reduction(max : found)
        for (index_t e = 0; e < count; ++e) found = value[e] > found ? value[e] : found;
        raise(found);
        const $T by = shift(most);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (index_t e = 0; e < count; ++e) sum += exp_up_to_one(value[e] - by);
        total += sum;
    }
    void merge(const $Name& other) {
        raise(other.most);
        if (other.total != 0) total += other.total * exp(double(shift(other.most)) - shift(most));
    }
    void save(double* to, index_t stride) const { to[0] = most, to[stride] = total; }
    static $Name load(const double* from, index_t stride) { return {$T(from[0]), from[stride]}; }
    $R result(double) const { return $R($T(log(total)) + shift(most)); }
};
"""

_VAR = (
    VARIANCE
    + """struct $Name {
    double count = 0, shift = 0, total = 0, squares = 0;
    void take(const $T* value, index_t some) {
        if (count == 0) shift = value[0];
        double sum = 0, sum_of_squares = 0;
#pragma omp simd reduction(+ : sum, sum_of_squares)
        for (index_t e = 0; e < some; ++e) {
            const double distance = value[e] - shift;
            sum += distance;
            sum_of_squares += distance * distance;
        }
        count += some, total += sum, squares += sum_of_squares;
    }
    void merge(const $Name& other) {
"""
    + JOIN_VARIANCES
    + """    }
    void save(double* to, index_t stride) const {
        to[0] = count, to[stride] = shift, to[2 * stride] = total, to[3 * stride] = squares;
    }
    static $Name load(const double* from, index_t stride) {
        return {from[0], from[stride], from[2 * stride], from[3 * stride]};
    }
    $R result(double) const {
        const double about_mean = squares - total * total / count;
        return $R($root((about_mean < 0 ? 0 : about_mean) / $over));
    }
};
"""
)

_SUMS = """
// Running ${kind}s of neighbouring results, in float64.
struct ${Name}s {
    double total[$width];
    explicit ${Name}s(index_t count) { std::fill(total, total + count, 0.0); }
    void take(const $T* __restrict__ value, index_t count, index_t rows = 1, index_t pitch = 0) {
        for (index_t r = 0; r < rows; ++r)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) total[e] += $values;
    }
    $Name of(index_t e) const { return {total[e]}; }
};
"""

_VARS = """
// Running ${kind}s of neighbouring results: distances are those from the first row.
struct ${Name}s {
    double taken = 0, shift[$width], total[$width], squares[$width];
    explicit ${Name}s(index_t count) {
        for (double* each : {shift, total, squares}) std::fill(each, each + count, 0.0);
    }
    void take(const $T* __restrict__ value, index_t count, index_t rows = 1, index_t pitch = 0) {
        if (taken == 0 && rows > 0) std::copy(value, value + count, shift);
        for (index_t r = 0; r < rows; ++r)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) {
                const double distance = value[r * pitch + e] - shift[e];
                total[e] += distance;
                squares[e] += distance * distance;
            }
        taken += rows;
    }
    $Name of(index_t e) const { return {taken, shift[e], total[e], squares[e]}; }
};
"""

_EXTREMES = """
// Running ${kind}s of neighbouring results, NaN once there is one.
struct ${Name}s {
    $T best[$width];
    explicit ${Name}s(index_t count) { std::fill(best, best + count, $start); }
    void take(const $T* __restrict__ values, index_t count, index_t rows = 1, index_t pitch = 0) {
        for (index_t r = 0; r < rows; ++r)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) {
                const $T value = values[r * pitch + e];
                best[e] = value $better best[e] || value != value ? value : best[e];
            }
    }
    $Name of(index_t e) const { return {best[e]}; }
};
"""

_PLACES = """
// Running ${kind}s of neighbouring results.
struct ${Name}s {
    $T best[$width];
    index_t place[$width];
    explicit ${Name}s(index_t count) {
        std::fill(best, best + count, $start);
        std::fill(place, place + count, index_t(0));
    }
    void take(const $T* __restrict__ value, index_t count, index_t row) {
#pragma omp simd
        for (index_t e = 0; e < count; ++e) {
            const bool better = value[e] $better best[e] || (value[e] != value[e] && best[e] == best[e]);
            best[e] = better ? value[e] : best[e];
            place[e] = better ? row : place[e];
        }
    }
    $Name of(index_t e) const { return {best[e], place[e]}; }
};
"""

_LOGSUMEXPS = """
// Running logsumexps of neighbouring results: the largest values of all rows come first.
struct ${Name}s {
    $T most[$width];
    double total[$width];
    explicit ${Name}s(index_t count) {
        std::fill(most, most + count, -$T(INFINITY));
        std::fill(total, total + count, 0.0);
    }
    void take(const $T* __restrict__ value, index_t count, index_t rows = 1, index_t pitch = 0) {
        const index_t fours = rows / 4 * 4;  // rows by four, or each would wait for what the last one left in memory
        $T by[$width], sum[$width] = {};
        std::copy(most, most + count, by);
        for (index_t r = 0; r < fours; r += 4)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) {
                const $T* at = value + r * pitch + e;
                by[e] = std::max(by[e], std::max(std::max(at[0], at[pitch]), std::max(at[2 * pitch], at[3 * pitch])));
            }
        for (index_t r = fours; r < rows; ++r)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) by[e] = std::max(by[e], value[r * pitch + e]);
#pragma omp simd
        for (index_t e = 0; e < count; ++e) {
            const $T least = most[e], now = by[e];
            by[e] = fabs(now) == $T(INFINITY) ? $T(0) : now;
            total[e] *= least == now ? $T(1) : exp_up_to_one(least - by[e]);
            most[e] = now;
        }
        for (index_t r = 0; r < fours; r += 4)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) {
                const $T* at = value + r * pitch + e;
                sum[e] += (exp_up_to_one(at[0] - by[e]) + exp_up_to_one(at[pitch] - by[e])) +
                    (exp_up_to_one(at[2 * pitch] - by[e]) + exp_up_to_one(at[3 * pitch] - by[e]));
            }
        for (index_t r = fours; r < rows; ++r)
#pragma omp simd
            for (index_t e = 0; e < count; ++e) sum[e] += exp_up_to_one(value[r * pitch + e] - by[e]);
#pragma omp simd
        for (index_t e = 0; e < count; ++e) total[e] += sum[e];
    }
    $Name of(index_t e) const { return {most[e], total[e]}; }
};
"""


def fold(op: ops.Reduce, name: str, compute: str, result: str, *, blocks: bool = False, width: str = "BLOCK") -> str:
    """The struct `name` of a reduction of values of type `compute` to one of type `result`.

    With `blocks` also ``<name>s``, of up to `width` results, of which ``of(e)`` is the fold of result e.
    """
    kind = op.kind
    texts = {"logsumexp": (_LOGSUMEXP, _LOGSUMEXPS), "max": (_EXTREME, _EXTREMES), "min": (_EXTREME, _EXTREMES)}
    texts |= {**dict.fromkeys(("var", "std"), (_VAR, _VARS)), **dict.fromkeys(("argmax", "argmin"), (_PLACE, _PLACES))}
    one, many = texts.get(kind, (_SUM, _SUMS))
    return Template(one + many if blocks else one).substitute(
        Name=name,
        width=width,
        T=compute,
        R=result,
        kind=word(op),
        function=kind.removeprefix("arg"),
        start=f"{compute}(INFINITY)" if kind in ("min", "argmin") else f"-{compute}(INFINITY)",
        better="<" if kind in ("min", "argmin") else ">",
        value="double(value[e]) * value[e]" if kind == "norm" else "value[e]",
        values="double(value[r * pitch + e]) * value[r * pitch + e]" if kind == "norm" else "value[r * pitch + e]",
        result={"mean": "total / count", "norm": "std::sqrt(total)"}.get(kind, "total"),
        count=" count" if kind == "mean" else "",
        root="std::sqrt" if kind == "std" else "",
        over=divisor(op),
    )
