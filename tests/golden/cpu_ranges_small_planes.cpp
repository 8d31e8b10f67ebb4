// fused_rangesum: 3 x 3 sums over index ranges of the last axes, every element read once.
#include <algorithm>
#include <cmath>
#include <cstring>

namespace fused_rangesum {

using index_t = long long;

using Element = float;
constexpr int CELLS = 25, SLOTS = 9;  // different sums per plane, and results of them

// An element, in the type it is added in.
inline float value(Element element) {
    return element;
}

constexpr index_t PLANE = 320;
constexpr int PERIOD = 1, SEGMENTS = 5;
struct Segment { index_t begin, end; };  // in the same slots, up to the residue modulo PERIOD
constexpr Segment SEGMENT[SEGMENTS] = {{0, 1}, {1, 2}, {2, 18}, {18, 19}, {19, 20}};
constexpr index_t WIDTH = 20;  // columns that are summed together
constexpr index_t FIRST = 0, LAST = 20;  // elements of a row that are summed
// Rows that belong to the same slots: where row r of them is, in elements.
struct Rows {
    index_t offset, stride, count;
    index_t at(index_t r) const { return offset + r * stride; }
};
constexpr int SETS = 5;
constexpr Rows ROWS[SETS] = {{0, 20, 1}, {20, 20, 1}, {40, 20, 12}, {280, 20, 1}, {300, 20, 1}};
constexpr unsigned long long SLOTS_OF[SEGMENTS * PERIOD] = {0x1, 0x3, 0x7, 0x6, 0x4};
constexpr int COLUMN_SLOTS = 3;
constexpr unsigned long long ROW_SLOTS_OF[SETS] = {0x1, 0x3, 0x7, 0x6, 0x4};

// Adds one part of a plane to its cells: a part of every set of rows, WIDTH columns at a time.
inline void add(const Element* plane, index_t part, index_t parts, double* cells) {
    for (int k = 0; k < SETS; ++k) {
        const index_t share = (ROWS[k].count + parts - 1) / parts;
        const index_t begin = std::min(part * share, ROWS[k].count), end = std::min(begin + share, ROWS[k].count);
        for (index_t first = FIRST; first < LAST; first += WIDTH) {
            const index_t count = std::min(WIDTH, LAST - first);
            double column[WIDTH] = {};
            for (index_t r = begin; r < end; ++r) {
                const Element* __restrict__ const row = plane + ROWS[k].at(r) + first;
#pragma omp simd
                for (index_t c = 0; c < count; ++c) column[c] += value(row[c]);
            }
            for (int s = 0; s < SEGMENTS; ++s)
                for (index_t i = std::max(first, SEGMENT[s].begin); i < std::min(first + count, SEGMENT[s].end); ++i)
                    cells[(k * SEGMENTS + s) * PERIOD + i % PERIOD] += column[i - first];
        }
    }
}

// The results of a plane: each slot is the sum of its cells, those of one set of rows first.
inline void write(const double* cells, double* out) {
    constexpr int COLUMNS = SEGMENTS * PERIOD;
    double sums[SETS][COLUMN_SLOTS] = {};
    for (int k = 0; k < SETS; ++k)
        for (int column = 0; column < COLUMNS; ++column)
#pragma omp simd
            for (int i = 0; i < COLUMN_SLOTS; ++i)
                sums[k][i] += SLOTS_OF[column] >> i & 1 ? cells[k * COLUMNS + column] : 0.0;
    for (int first = 0; first < SLOTS; first += COLUMN_SLOTS) {
        double totals[COLUMN_SLOTS] = {};
        for (int k = 0; k < SETS; ++k)
            if (ROW_SLOTS_OF[k] >> first / COLUMN_SLOTS & 1)
#pragma omp simd
                for (int i = 0; i < COLUMN_SLOTS; ++i) totals[i] += sums[k][i];
        for (int i = 0; i < COLUMN_SLOTS; ++i) {
            const int slot = first + i;
            const double total = totals[i];
            out[slot] = total;
        }
    }
}

extern "C" void fused_rangesum(const Element* x, double* out, index_t planes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (index_t plane = 0; plane < planes; ++plane) {
        double cells[CELLS] = {};
        add(x + plane * PLANE, 0, 1, cells);
        write(cells, out + plane * SLOTS);
    }
}

}  // namespace fused_rangesum
