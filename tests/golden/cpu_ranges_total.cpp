// fused_rangesum: sums over planes of any length, every element read once.
#include <algorithm>
#include <cmath>
#include <cstring>

namespace fused_rangesum {

using index_t = long long;

using Element = float;
constexpr int CELLS = 1, SLOTS = 1;  // different sums per plane, and results of them

// An element, in the type it is added in.
inline float value(Element element) {
    return element;
}

// The sum of a few neighbours, in float64.
inline double sum_of_few(const Element* __restrict__ x, index_t count) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (index_t i = 0; i < count; ++i) sum += value(x[i]);
    return sum;
}

// The same for any number: of many, four runs at a time, since memory serves several streams faster than one.
inline double sum_of(const Element* __restrict__ x, index_t count) {
    constexpr index_t RUNS = 4, COLUMNS = 16;
    const index_t run = count / (RUNS * COLUMNS) * COLUMNS;
    if (run == 0) return sum_of_few(x, count);
    double column[RUNS][COLUMNS] = {};
    for (index_t i = 0; i < run; i += COLUMNS)
#pragma GCC unroll 4
        for (int r = 0; r < RUNS; ++r)
#pragma omp simd
            for (int c = 0; c < COLUMNS; ++c) column[r][c] += value(x[r * run + i + c]);
    double sum = sum_of_few(x + RUNS * run, count - RUNS * run);
    for (int r = 0; r < RUNS; ++r)
        for (int c = 0; c < COLUMNS; ++c) sum += column[r][c];
    return sum;
}

// Adds one part of a plane to its only cell.
inline void add(const Element* plane, index_t length, index_t part, index_t parts, double* cells) {
    const index_t share = (length + parts - 1) / parts, begin = std::min(part * share, length);
    cells[0] += sum_of(plane + begin, std::min(share, length - begin));
}

// The result of a plane's only cell.
inline void write(const double* cells, double* out) {
    const double total = cells[0];
    *out = total;
}

extern "C" void fused_rangesum(const Element* x, double* out, index_t planes, index_t length, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (index_t plane = 0; plane < planes; ++plane) {
        double cells[CELLS] = {};
        add(x + plane * length, length, 0, 1, cells);
        write(cells, out + plane * SLOTS);
    }
}

}  // namespace fused_rangesum
