"""The texts that `fusewright.codegen.cpu.ranges` fills in."""

SUM = """
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

"""

TOTAL = """
// Adds one part of a plane to its only cell.
inline void add(const Element* plane, index_t length, index_t part, index_t parts, double* cells) {
    const index_t share = (length + parts - 1) / parts, begin = std::min(part * share, length);
    cells[0] += sum_of(plane + begin, std::min(share, length - begin));
}

"""

LINE = """
// Adds one part of a line to its cells: a part of every segment.
inline void add(const Element* plane, index_t part, index_t parts, double* cells) {
    for (int k = 0; k < SEGMENTS; ++k) {
        const index_t length = SEGMENT[k].end - SEGMENT[k].begin, share = (length + parts - 1) / parts;
        const index_t begin = std::min(part * share, length);
        cells[k] += sum_of(plane + SEGMENT[k].begin + begin, std::min(share, length - begin));
    }
}

"""

PERIODIC_LINE = """
// Adds one part of a line to its cells: a part of every segment, in rows of WIDTH columns of one residue each.
inline void add(const Element* plane, index_t part, index_t parts, double* cells) {
    for (int k = 0; k < SEGMENTS; ++k) {
        const index_t length = SEGMENT[k].end - SEGMENT[k].begin, rows = (length + WIDTH - 1) / WIDTH;
        const index_t share = (rows + parts - 1) / parts;
        const index_t begin = std::min(part * share, rows), end = std::min(begin + share, rows);
        double column[WIDTH] = {};
        for (index_t row = begin; row < end; ++row) {
            const index_t first = SEGMENT[k].begin + row * WIDTH, count = std::min(WIDTH, SEGMENT[k].end - first);
#pragma omp simd
            for (index_t c = 0; c < count; ++c) column[c] += value(plane[first + c]);
        }
        for (index_t c = 0; c < WIDTH; ++c) cells[k * PERIOD + (SEGMENT[k].begin + c) % PERIOD] += column[c];
    }
}

"""

ROWS_2D = """
// Rows that belong to the same slots: where row r of them is, in elements.
struct Rows {
    index_t offset, stride, count;
    index_t at(index_t r) const { return offset + r * stride; }
};
"""

ROWS_3D = """
// Rows that belong to the same slots, `inside` of them per plane of rows: where row r is, in elements.
struct Rows {
    index_t offset, outer, inner, inside, count;
    index_t at(index_t r) const { return offset + r / inside * outer + r % inside * inner; }
};
"""

PLANES = """
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

"""

WRITE_ONE = """
// The result of a plane's only cell.
inline void write(const double* cells, $length$Result* out) {
    const double total = cells[0];
    *out = $result;
}

"""

WRITE_LINE = """
// The results of a line: each slot is the sum of its cells.
inline void write(const double* cells, $length$Result* out) {
    double totals[SLOTS] = {};
    for (int cell = 0; cell < CELLS; ++cell)
#pragma omp simd
        for (int slot = 0; slot < SLOTS; ++slot) totals[slot] += SLOTS_OF[cell] >> slot & 1 ? cells[cell] : 0.0;
    for (int slot = 0; slot < SLOTS; ++slot) {
        const double total = totals[slot];
        out[slot] = $result;
    }
}

"""

WRITE_PLANE = """
// The results of a plane: each slot is the sum of its cells, those of one set of rows first.
inline void write(const double* cells, $length$Result* out) {
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
            out[slot] = $result;
        }
    }
}

"""

DIRECT = """
#pragma omp parallel for num_threads(threads) schedule(static)
for (index_t plane = 0; plane < planes; ++plane) {
    double cells[CELLS] = {};
    add(x + plane * $plane, ${length}0, 1, cells);
    write(cells, ${count}out + plane * SLOTS);
}
"""

PARTED = """
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
for (index_t plane = 0; plane < planes; ++plane) {
    for (index_t part = 0; part < parts; ++part) {
        double* const cells = scratch + (plane * parts + part) * CELLS;
        std::fill(cells, cells + CELLS, 0.0);
        add(x + plane * $plane, ${length}part, parts, cells);
    }
}
for (index_t plane = 0; plane < planes; ++plane) {  // the parts of a cell, in their order
    double* const cells = scratch + plane * parts * CELLS;
    for (index_t i = CELLS; i < parts * CELLS; ++i) cells[i % CELLS] += cells[i];
    write(cells, ${count}out + plane * SLOTS);
}
"""
