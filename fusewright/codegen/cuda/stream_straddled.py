"""Streams whose rows are no whole number of vectors: threads take vectors of memory, whichever rows they are of.

    y[b, c, i] = x[b, c, i] * w[c]    with 127 * 127 elements in a row

Elements of a vector are of one row or of two, and what rows have a number of each, w, is read for both.  This stands in
for the variant that takes one element at a time.
"""

from __future__ import annotations

from math import gcd, prod

from fusewright.codegen.cpp import compute_type
from fusewright.codegen.cuda.stream_values import Values, decode, for_each, widened
from fusewright.codegen.stream_sizes import hint
from fusewright.codegen.text import Lines, block, fill
from fusewright.ir.node import Node
from fusewright.schedule.stream_record import Read, Stream, picks_each

# Bytes of a vector, and of the narrowest that need no other way.
VECTOR, NARROW = 16, 8


def straddled(s: Stream) -> int | None:
    """How many elements a vector has, where rows of a stream have no whole number of vectors, nor of half ones."""
    last = len(s.axes) - 1
    plain = all(r.place == "before" and r.indices is None and r.part is None and not r.within for r in s.reads)
    if s.folds or s.window is not None or not plain or any(picks_each(r) for r in s.reads) or last == 0:
        return None
    whole = [r for r in s.reads if _is_whole(s, r)]
    if not whole or any(last in r.axes and r not in whole for r in s.reads):
        return None
    itemsize = max(r.tensor.dtype.itemsize for r in whole)
    length, values = prod(hint(s.value.shape[dim]) for dim in s.axes[last].dims), VECTOR // itemsize
    return values if length >= values and gcd(length, values) * itemsize < NARROW else None


def _is_whole(s: Stream, r: Read) -> bool:
    """Whether a tensor has an element for each of the value's, as they lie in memory."""
    own = [d for d in r.dims if d is not None]
    return r.axes == tuple(range(len(s.axes))) and r.step == 1 and own == sorted(own)


class StraddledValues(Values):
    """Writes `straddled_values`, and the function that calls it, for vectors of `length` elements."""

    def __init__(self, s: Stream, names: dict[Node, str], length: int) -> None:
        super().__init__(s, names)
        self.length = length

    def text(self) -> Lines:
        """The values of a vector from element `first` on."""
        last = len(self.s.axes) - 1
        loads: Lines = []
        of_rows: Lines = []
        element: Lines = []
        given = {}
        for r in self.reads("before"):
            name, tensor, compute = self.element(r), self.start(r), compute_type(r.tensor.dtype)
            given[r.value] = name
            if _is_whole(self.s, r):
                loads.append(f"const auto {name}s = load<STRADDLED>({tensor} + first);")
                element.append(f"const {compute} {name} = {widened(f'{name}s.at[e]', r.tensor.dtype)};")
            else:
                loads.append(f"{compute} {name}_of[2];")
                of_rows.append(f"{name}_of[k] = {widened(f'{tensor}[{self.offset(r)}]', r.tensor.dtype)};")
                element.append(f"const {compute} {name} = e < left ? {name}_of[0] : {name}_of[1];")
        lines, value = self.tree(self.s.before, self.s.entry, given)
        rows = " * ".join(f"d.n{a}" for a in range(last))
        places = [
            f"const index_t row = first / d.n{last}, left = (row + 1) * d.n{last} - first;  // elements of that row",
            "#pragma unroll",
            *block("for (int k = 0; k < 2; ++k)", [
                f"const index_t own = min(row + k, {rows} - 1);",
                *decode("own", range(last), ""),
                *of_rows,
            ]),
        ]  # fmt: skip
        return [
            f"constexpr int STRADDLED = {self.length};  // elements of a vector",
            "",
            "// The values of a vector of memory, from element `first` on, whose elements are of one row or of two.",
            self.inline,
            *block(
                f"void straddled_values(const Data& d, index_t first, {self.compute} (&value)[STRADDLED])",
                [
                    *loads,
                    *(places if of_rows else []),
                    *for_each([*element, *lines, f"value[e] = {value};"], "STRADDLED"),
                ],
            ),
        ]

    def flat(self, target: str, store: str, one: str, coordinates: str) -> Lines:
        """The function that goes through all vectors, and the elements behind the last one."""
        axes = range(len(self.s.axes))
        return fill(
            _STRADDLED,
            target=target,
            T=self.compute,
            store=store,
            one=one,
            all=" * ".join(f"d.n{a}" for a in axes),
            decode=decode("at", axes, ""),
            coordinates=coordinates,
        )

    def conditions(self) -> Lines:
        """When it may run: rows of as many elements as a vector, which lie as vectors do."""
        last = len(self.s.axes) - 1
        whole = dict.fromkeys(self.names[r.tensor] for r in self.s.reads if _is_whole(self.s, r))
        return [f"n{last} >= STRADDLED", *(f"aligned({name})" for name in (*whole, "out"))]


_STRADDLED = """
// Every thread computes AT_ONCE vectors, a block apart, and then writes them; some compute what is behind the last one.
__device__ __forceinline__ void straddled(const Data& d, $target) {
    constexpr int V = STRADDLED, AT_ONCE = 2;
    const index_t all = $all, items = all / V;
    for (index_t first = index_t(blockIdx.x) * (THREADS * AT_ONCE) + threadIdx.x; first < items;
         first += index_t(gridDim.x) * (THREADS * AT_ONCE)) {
        $T value[AT_ONCE][V];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t)  // loads need no branch then
            straddled_values(d, min(first + t * THREADS, items - 1) * V, value[t]);
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t)
            if (first + t * THREADS < items) $store
    }
    const index_t at = items * V + threadIdx.x;
    if (blockIdx.x > 0 || at >= all) return;
    $decode
    $T value[1];
    values<false>(d, $coordinates, value);
    $one
}
"""
