"""The texts that `fusewright.codegen.cpu.sample` fills in."""

# Only those that a program uses are in its text.
JOINS = {
    "sum_of": """
// element(0) + ... + element(length - 1), in float64: every 32nd of them, then those sums.
template <typename Element>
inline double sum_of(index_t length, Element element) {
    double few[32] = {}, total = 0;
    index_t r = 0;
    for (; r + 32 <= length; r += 32) {
#pragma omp simd
        for (int e = 0; e < 32; ++e) few[e] += element(r + e);
    }
    for (int e = 0; r + e < length; ++e) few[e] += element(r + e);
    for (int e = 0; e < 32; ++e) total += few[e];
    return total;
}
""",
    "product_of": """
// element(0) * ... * element(length - 1), in float64.
template <typename Element>
inline double product_of(index_t length, Element element) {
    double total = 1;
#pragma omp simd reduction(* : total)
    for (index_t r = 0; r < length; ++r) total *= element(r);
    return total;
}
""",
    "greatest_of": """
// The greatest of element(0) ... element(length - 1), NaN where one is: of every 32nd of them, then of those.
template <typename T, typename Element>
inline T greatest_of(index_t length, Element element) {
    const auto better = [](T value, T than) { return value > than || value != value ? value : than; };
    T few[32], most = -T(INFINITY);
    for (int e = 0; e < 32; ++e) few[e] = -T(INFINITY);
    index_t r = 0;
    for (; r + 32 <= length; r += 32) {
#pragma omp simd
        for (int e = 0; e < 32; ++e) few[e] = better(element(r + e), few[e]);
    }
    for (int e = 0; r + e < length; ++e) few[e] = better(element(r + e), few[e]);
    for (int e = 0; e < 32; ++e) most = better(few[e], most);
    return most;
}
""",
    "least_of": """
// The least of element(0) ... element(length - 1), NaN where one is: of every 32nd of them, then of those.
template <typename T, typename Element>
inline T least_of(index_t length, Element element) {
    const auto better = [](T value, T than) { return value < than || value != value ? value : than; };
    T few[32], least = T(INFINITY);
    for (int e = 0; e < 32; ++e) few[e] = T(INFINITY);
    index_t r = 0;
    for (; r + 32 <= length; r += 32) {
#pragma omp simd
        for (int e = 0; e < 32; ++e) few[e] = better(element(r + e), few[e]);
    }
    for (int e = 0; r + e < length; ++e) few[e] = better(element(r + e), few[e]);
    for (int e = 0; e < 32; ++e) least = better(few[e], least);
    return least;
}
""",
}

MAP = """
#pragma omp simd
for (index_t i = 0; i < $count; ++i) {
    $lines
    $store
}
"""

ROWS = """
for (index_t row = 0; row < $rows; ++row) {
    $element
    $passes
    $store
}
"""

ONE_ROW = """
{
    $row
    $element
    $passes
    $store
}
"""

EACH = """
#pragma omp simd
for (index_t r = 0; r < $length; ++r) $store
"""

# y = x @ w with the features of w side by side: a few of them at a time, row by row of w.
FEATURES = """
for (index_t first = 0; first < $features; first += $block) {
    const index_t count = std::min(index_t($block), $features - first);
    double total[$block] = {};
    for (index_t r = 0; r < $length; ++r) {
        const double left = $left;
#pragma omp simd
        for (index_t f = 0; f < count; ++f) total[f] += left * $weight;
    }
    for (index_t f = 0; f < count; ++f) $store
}
"""

SAMPLES = """
#pragma omp parallel for num_threads(threads) schedule(static)
for (index_t sample = 0; sample < batch; ++sample) {
    $arena
    $body
}
"""
