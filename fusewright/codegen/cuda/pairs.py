"""CUDA C++ of streams over pairs: rows of one tensor meet rows of another, and each pair is reduced to a number.

    (x[:, None] - y).square().sum(-1)               distances, x (N, K), y (M, K)
    logsumexp(x[:, :, None] + t, 1)                 x (N, K), t (K, M)
    (x[:, None] - y).square().sum(-1).argmin(-1)    of pairs of a row, one

As in a product, a block stages a few elements of SIDE rows of either, each thread reduces EACH by EACH pairs from
registers: an element that is staged is used SIDE times, one in a register EACH times.  Where the pairs of a row are
reduced once more, a block goes on to all other rows, and no pair is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import pairs_text as text
from fusewright.codegen.cuda.stream import FULL, THREADS, Shape, Writer
from fusewright.codegen.cuda.stream_values import decode, widened
from fusewright.codegen.stream_sizes import MANY, hint
from fusewright.codegen.text import Lines, block, fill, indent
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.schedule.stream_record import Read, Stream

# Pairs a thread has along either axis where there are many, and what it has otherwise.
MOST, LEAST = 4, 2
FITTING = {MOST: 2, LEAST: 3}  # blocks of a multiprocessor
ACROSS = 16  # threads of a block along either axis
ENOUGH = FULL // 8  # blocks of these, one for each multiprocessor of a large device
SHORTEST = 16  # of either axis: a block of fewer rows is mostly idle
MOST_STEP = 16  # elements of a row that are staged together
TOGETHER = 4  # of these, as many as a thread reduces one behind the other


@dataclass(frozen=True)
class Pairs:
    """Which axes of a stream run over the rows of the one (`down`) and of the other (`across`), which is the last of
    the reduction's result, and along which one (`along`) they are reduced."""

    down: int
    across: int
    along: int


def kernel(s: Stream, name: str, reference: str = "") -> Kernel | None:
    """The kernel of a stream over pairs; `None` for any other."""
    found = pairs(s)
    return None if found is None else PairWriter(s, name, found).kernel(reference)


def pairs(s: Stream) -> Pairs | None:
    """The axes of a stream over pairs, `None` where there are no such: a reduction along one axis, of what no tensor
    has for every pair; and perhaps another one, of all pairs of a row."""
    away, kept, again = ([a for a, x in enumerate(s.axes) if x.role == role] for role in ("first", "kept", "second"))
    if len(away) != 1 or len(again) > 1 or s.window is not None or s.weights or s.refuses:
        return None
    kept += again  # the last axes
    if len(kept) < 2:
        return None
    read = [r for r in s.reads if r.place == "before"]
    if any(r.part is not None for r in read):
        return None
    (along,), across = away, kept[-1]

    def apart(down: int) -> bool:
        rows = [{a for a in (down, across) if a in r.axes} for r in read if along in r.axes]
        both = any(down in r.axes and across in r.axes for r in read)
        return not both and {down} in rows and {across} in rows

    found = [a for a in kept[:-1] if _length(s, a) >= SHORTEST and apart(a)]
    if not found or _length(s, across) < SHORTEST:
        return None
    return Pairs(max(found, key=lambda a: _length(s, a)), across, along)


def _length(s: Stream, axis: int) -> int:
    """How long an axis is, or may be."""
    return prod(hint(s.value.shape[d], MANY) for d in s.axes[axis].dims)


class PairWriter(Writer):
    """Writes the sections of one stream over pairs."""

    def __init__(self, s: Stream, name: str, axes: Pairs) -> None:
        self.over = axes
        self.again = len(s.folds) == 2
        side = MOST * ACROSS
        blocks = _length(s, axes.down) // side * (1 if self.again else _length(s, axes.across) // side)
        self.each = MOST if blocks >= ENOUGH else LEAST
        super().__init__(s, name)
        self.wide = None

    def _shape(self) -> Shape:
        return Shape("pairs")

    def _launches(self) -> tuple[Launch, ...]:
        rows = (self.over.down,) if self.again else (self.over.down, self.over.across)
        blocks = (f"ceil_div({self.sizes.product([a])}, {self.each * ACROSS})" for a in rows)
        grid = " * ".join([*blocks, *(self.sizes.product([a]) for a in self._batch)])
        arguments = self._arguments(Argument("pointer", "out"))
        return (Launch(self.name, arguments, (grid, "1", "1"), THREADS),)

    @property
    def step(self) -> int:
        """Elements of a row that are staged together."""
        reduced = self.sizes.reduced([self.over.along])
        return next(n for n in (4, 8, MOST_STEP) if n >= min(reduced, MOST_STEP))

    @property
    def _batch(self) -> list[int]:
        """The axes of which a block has one index."""
        return [a for a in self.results if a not in (self.over.down, self.over.across)]

    def attributes(self) -> str:
        """With as many blocks of a multiprocessor as its registers are enough for: left to itself, the compiler gives a
        few of them up for one more."""
        return f"__launch_bounds__(THREADS, {FITTING[self.each]})"

    def _constants(self) -> Lines:
        return [
            f"using index_t = {self.index};",
            f"using count_t = unsigned {self.index};  // divides faster",
            f"constexpr int THREADS = {THREADS}, ACROSS = {ACROSS};  // of a block, and of these along either axis",
            f"constexpr int EACH = {self.each}, SIDE = EACH * ACROSS;  // rows of a thread, and of a block",
            f"constexpr int STEP = {self.step};  // elements of a row that are staged together",
            "",
        ]

    def _joins(self) -> bool:
        return self.again

    def _computed(self) -> Lines:
        return [*self._staged(), "", *self._taken(), ""]

    # ---- what is read

    def _moving(self) -> list[Read]:
        """What varies along the rows, which is staged."""
        return [r for r in self.values.reads("before") if self.over.along in r.axes]

    def _fixed(self) -> list[Read]:
        """What does not, which a thread reads once."""
        return [r for r in self.values.reads("before") if self.over.along not in r.axes]

    def _side_of(self, r: Read) -> int | None:
        """The axis of rows along which a tensor varies, if any."""
        return next((a for a in (self.over.down, self.over.across) if a in r.axes), None)

    def _staged(self) -> Lines:
        """What a block has of the rows, and the function that reads it."""
        members, steps = [], []
        for r in self._moving():
            name, a = self.values.element(r), self._side_of(r)
            rows = "" if a is None else "[SIDE + 4]"
            about = "the same for all rows" if a is None else f"rows along axis {a}"
            members.append(f"{compute_type(r.tensor.dtype)} {name}[STEP]{rows};  // {about}")
            steps += self._stage(r)
        coordinates = ", ".join(f"index_t {self._name(a)}" for a in self.all)
        return [
            "// A few elements of the rows of a block.",
            "struct Staged {",
            *indent(members),
            "};",
            "",
            "// Read them, from these coordinates on, and beyond an end the last ones again.",
            *block(f"__device__ __forceinline__ void stage(const Data& d, {coordinates}, Staged& staged)", steps),
        ]

    def _name(self, a: int) -> str:
        """What the coordinate of an axis is called where it is the first of several."""
        return f"i{a}" if a in self._batch else f"first{a}"

    def _stage(self, r: Read) -> Lines:
        """Neighbours in memory are read by neighbouring threads."""
        a, k = self._side_of(r), self.over.along
        name, element = self.values.element(r), self._read(r)
        at_k = f"const index_t i{k} = min(first{k} + k, d.n{k} - 1);"
        if a is None:
            body = [at_k, f"staged.{name}[k] = {element};"]
            return block("for (int k = threadIdx.x; k < STEP; k += THREADS)", body)
        along = self._innermost(r) == k
        digits = ("t % STEP", "t / STEP") if along else ("t / SIDE", "t % SIDE")
        body = [
            f"const int k = {digits[0]}, row = {digits[1]};",
            at_k,
            f"const index_t i{a} = min(first{a} + row, d.n{a} - 1);",
            f"staged.{name}[k][row] = {element};",
        ]
        return ["#pragma unroll", *block("for (int t = threadIdx.x; t < STEP * SIDE; t += THREADS)", body)]

    def _read(self, r: Read) -> str:
        """Text of an element at the coordinates in scope."""
        return widened(f"{self.values.start(r)}[{self.values.offset(r)}]", r.tensor.dtype)

    def _innermost(self, r: Read) -> int:
        """The axis along which neighbours in memory lie."""
        dims = [d for d in r.dims if d is not None]
        return next(a for d in reversed(dims) for a in r.axes if d in self.s.axes[a].dims)

    # ---- reductions

    @property
    def _adds(self) -> bool:
        """Whether a few values are added before they are taken."""
        return self.s.folds[0][0].op.kind in ("sum", "mean", "norm")

    def _taken(self) -> Lines:
        """The function that takes COUNT elements of a thread's pairs."""
        fixed = [f"const {compute_type(r.tensor.dtype)} {self._parameter(r)}" for r in self._fixed()]
        target = f"{self.values.compute} (&few)" if self._adds else "First (&fold)"
        loads, given, element = [], {}, []
        for r in self._moving():
            name, a, compute = self.values.element(r), self._side_of(r), compute_type(r.tensor.dtype)
            given[r.value] = name
            if a is None:
                element.append(f"const {compute} {name} = staged.{name}[k + c];")
                continue
            loads += [
                f"Pack<{compute}, EACH> {name}s[COUNT];",
                "#pragma unroll",
                f"for (int c = 0; c < COUNT; ++c) {name}s[c] = load<EACH>(&staged.{name}[k + c][{self._place_of(a)}]);",
            ]
            element.append(f"const {compute} {name} = {name}s[c].at[{self._index(a)}];")
        for r in self._fixed():
            name, a = self.values.element(r), self._side_of(r)
            given[r.value] = f"{name}" if a is None else f"{name}[{self._index(a)}]"
        lines, value = self.values.tree(self.s.before, self.s.entry, given)
        square = f"{value} * {value}" if self.s.folds[0][0].op.kind == "norm" else value
        each = [*element, *lines, f"few[m][n] += {square};" if self._adds else f"value[c] = {value};"]
        each = ["#pragma unroll", *block("for (int c = 0; c < COUNT; ++c)", each)]
        if not self._adds:
            taken = f"fold[m][n].take(value{self.at('at')});"
            each = [f"{self.values.compute} value[COUNT];", *each, taken]
        where = ["index_t at"] if self.at("at") else []
        parameters = ["const Staged& staged", "int k", "int row", "int column", *where, *fixed, f"{target}[EACH][EACH]"]
        return [
            "// Take COUNT elements of all pairs of a thread, from element k on.",
            "template <int COUNT>",
            *block(
                f"__device__ __forceinline__ void take({', '.join(parameters)})",
                [
                    *loads,
                    "#pragma unroll",
                    "for (int m = 0; m < EACH; ++m)",
                    "#pragma unroll",
                    *indent(block("for (int n = 0; n < EACH; ++n)", each)),
                ],
            ),
        ]

    def _parameter(self, r: Read) -> str:
        name = self.values.element(r)
        return name if self._side_of(r) is None else f"(&{name})[EACH]"

    def _place_of(self, a: int) -> str:
        return "row" if a == self.over.down else "column"

    def _index(self, a: int) -> str:
        return "m" if a == self.over.down else "n"

    def _own(self) -> Lines:
        """Reads of what does not vary along the rows."""
        lines = []
        for r in self._fixed():
            name, a, compute = self.values.element(r), self._side_of(r), compute_type(r.tensor.dtype)
            element = self._read(r)
            if a is None:
                lines.append(f"const {compute} {name} = {element};")
                continue
            at = f"const index_t i{a} = min(first{a} + {self._place_of(a)} + e, d.n{a} - 1);"
            lines += [f"{compute} {name}[EACH];", "#pragma unroll"]
            lines += block("for (int e = 0; e < EACH; ++e)", [at, f"{name}[e] = {element};"])
        return lines

    def _body(self) -> Lines:
        """The function of a block."""
        at, root = self.over, self.s.root
        where = [f"first{at.along} + k"] if self.at("at") else []
        arguments = [*where, *(self.values.element(r) for r in self._fixed()), "few" if self._adds else "fold"]
        names: dict[str, object] = {
            "a": at.down,
            "b": at.across,
            "k": at.along,
            "batch": decode("rest", self._batch, "")[1 if len(self._batch) > 1 else 0 :],
            "place": self._place(self.results),
            "T": self._between,
            "R": compute_type(root.dtype),
            "wide": " && ".join([f"d.n{at.across} % EACH == 0", *(f"aligned({n})" for n in self._along_pairs())]),
        }
        reduce = fill(
            text.REDUCE,
            own=self._own(),
            coordinates=", ".join(self._name(a) for a in self.all),
            first=[f"{self.values.compute} few[EACH][EACH] = {{}};"] if self._adds else [],
            last=fill(text.ADD) if self._adds else [],
            arguments=", ".join(arguments),
            together=TOGETHER,
            **names,
        )
        if self.again:
            behind = self._place([a for a in self.results if a != at.across]) or "0"
            told = self.at(f"i{at.across}", fold=1)
            return fill(text.PAIRS_OF_ROWS, out=ELEMENT[root.dtype], reduce=reduce, behind=behind, told=told, **names)
        return fill(text.PAIRS, out=ELEMENT[root.dtype], reduce=reduce, **names)

    def _along_pairs(self) -> list[str]:
        """What is read or written for neighbouring pairs behind the reduction."""
        read = [self.values.start(r) for r in self.values.reads("first") if self.values.last_of("first") in r.axes]
        return [*dict.fromkeys(read), *([] if self.again else ["out"])]

    def _entry(self) -> Lines:
        body = ["await_launches();", f"const Data d{{{self._members()}}};", "pairs(d, out);"]
        head = f'extern "C" __global__ void {self.attributes()}'
        return [head, *self._signature(self.name, *self._written()), *indent(body), "}"]
