"""CUDA C++ of the values of a stream: pointwise trees and the window, for a few neighbours along the last axis."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch

from fusewright.codegen.cpp import Scalars, compute_type, rounded
from fusewright.codegen.stream_sizes import hint
from fusewright.codegen.stream_values import StreamValues, constant, unknown
from fusewright.codegen.text import Lines, block
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.stream_record import Place, Read, Stream, Tree, picks_each

UNROLLED_TAPS = 64

# How a window takes an element in; a maximum and a minimum keep a NaN.
TAKE = {
    "max": "pooled[e] = greater(pooled[e], element);",
    "min": "pooled[e] = smaller(pooled[e], element);",
    "avg": "pooled[e] += element;",
}


@dataclass(frozen=True)
class Widths:
    """Of the wide variant: values per thread, and elements of the last axis per load."""

    values: int
    chunk: int


def widths(s: Stream) -> Widths | None:
    """Loads of 16 bytes, or of fewer where the last axis has no whole number of those (rows of 126 x 126 elements of
    two bytes have 8 at a time); `None` where the last axis gives nothing to load together, nor to store."""
    last = len(s.axes) - 1
    read = [r for r in s.reads if r.place == "before" and last in r.axes]
    if not s.folds and any(r.step * r.tensor.dtype.itemsize == 16 for r in read if is_of_records(r)):
        return Widths(1, 1)  # a record is 16 bytes itself, and threads read those side by side
    together = [r for r in read if r.step == 1 and not picks_each(r)]
    # What varies along most axes is most of what is read: parameters of rows are read in two loads, if they are wider.
    most = max((len(r.axes) for r in together), default=0)
    loaded = [r.tensor.dtype.itemsize for r in together if len(r.axes) == most]
    if read and not loaded and not s.folds:
        loaded = [s.root.dtype.itemsize]
    if not loaded:
        return None
    chunk = 16 // max(loaded)
    along = s.axes[last].window
    if along is None or s.window is None:
        length = prod(hint(s.entry.shape[dim]) for dim in s.axes[last].dims)
        chunk = gcd(chunk, length) if length % 2 == 0 else chunk  # of odd ones, another size may have wider loads
        return Widths(chunk, chunk)
    op = s.window.op
    stride, reach = op.stride[along], op.dilation[along] * (op.kernel[along] - 1)
    values = next(v for v in (1, 2, 4, 8) if v * stride % chunk == 0)
    if reach + 1 > stride:  # neighbours share elements: more of them share more
        values = chunk
    return Widths(values, chunk) if (values - 1) * stride + reach + 1 <= UNROLLED_TAPS else None


class Values(StreamValues):
    """Writes `values` and the trees behind the reductions."""

    inline, std = "__device__ __forceinline__", ""

    @property
    def compute(self) -> str:
        """The type of a value."""
        return compute_type(self.s.value.dtype)

    @property
    def rounds(self) -> bool:
        """Whether values are rounded where eager rounds them: what is alike there must be alike for an index."""
        return any(fold.op.gives_index for fold, _ in self.s.folds)

    def tree(self, found: Tree | None, value: Node, given: dict[Node, str]) -> tuple[Lines, str]:
        """The statements of a tree and the name of its root; `value` stands for an absent one."""
        return tree(found, value, given, rounds=self.rounds)

    def as_stored(self, text: str, dtype: torch.dtype) -> str:
        """Text of a value that eager writes."""
        return rounded(text, dtype) if self.rounds else text

    def text(self) -> Lines:
        """The function ``values``."""
        coordinates = ", ".join(f"index_t i{a}" for a in range(len(self.s.axes)))
        return [
            "// Neighbours along the last axis, from these coordinates on.",
            "template <bool WIDE>",
            self.inline,
            *block(
                f"void values(const Data& d, {coordinates}, {self.compute} (&value)[VALUES<WIDE>])",
                self._pooled() if self.s.window else self._plain(),
            ),
        ]

    def _plain(self) -> Lines:
        loads, given, element = self.loads("before", "VALUES<WIDE>")
        lines, value = self.tree(self.s.before, self.s.entry, given)
        return [*loads, *for_each([*element, *lines, f"value[e] = {value};"])]

    # ---- windows

    def _pooled(self) -> Lines:
        pooled, compute = self.window.node, compute_type(self.window.node.dtype)
        behind, given, element = self.loads("after", "VALUES<WIDE>")
        divisor = self.divisor()
        result = {pooled: "average" if divisor else "pooled[e]"}
        lines, value = self.tree(self.s.after, pooled, given | result)
        count = [f"const {compute} count = {divisor};"] if self.counts() else []
        quotient = self.as_stored(f"pooled[e] / {'count' if count else divisor}", pooled.dtype)
        average = [f"const {compute} average = {quotient};"] if divisor else []
        unroll = "#pragma unroll" if prod(self.window.op.kernel) <= UNROLLED_TAPS else "#pragma unroll 1"
        return [
            f"{compute} pooled[VALUES<WIDE>];",
            "#pragma unroll",
            f"for (int e = 0; e < VALUES<WIDE>; ++e) pooled[e] = {self.neutral()};",
            *self.taps([unroll]),
            *behind,
            *for_each([*count, *element, *average, *lines, f"value[e] = {value};"]),
        ]

    def row(self) -> Lines:
        """A chunk of neighbouring elements at a time, each for all the windows that it is in."""
        a, k, op = self.last, self.s.axes[self.last].window, self.window.op
        loads, given, element = self.loads("before", "CHUNK<WIDE>", "c")
        lines, value = self.tree(self.s.before, self.s.entry, given)
        on_a_tap = f" && tap % DILATION[{k}] == 0" if op.dilation[-1] > 1 else ""
        taps = [f"const int tap = u + c - (SKEW<WIDE> - PADDING[{k}]) - e * STRIDE[{k}];"]
        taps += [f"if (tap >= 0 && tap <= REACH{on_a_tap}) {TAKE[op.kind]}"]
        each = [*element, *lines, f"const {compute_type(self.window.node.dtype)} element = {value};", *for_each(taps)]
        outside = f"if (j{a} < 0 || j{a} >= d.m{a}) continue;  // a chunk is inside or outside"
        body = [f"const index_t j{a} = i{a} * STRIDE[{k}] - SKEW<WIDE> + u;", *([outside] if self.checked() else [])]
        body += [*loads, "#pragma unroll", *block("for (int c = 0; c < CHUNK<WIDE>; ++c)", each)]
        unroll = "#pragma unroll" if op.kernel[-1] <= UNROLLED_TAPS // 2 else "#pragma unroll 1"
        return [unroll, *block("for (int u = 0; u < SPAN<WIDE>; u += CHUNK<WIDE>)", body)]

    # ---- what follows a reduction

    def tail(self, fold: int) -> Lines:
        """The function that finishes reduction `fold`: its results from linear index `result` on, and what follows."""
        s = self.s
        reduction, after = s.folds[fold]
        place: Place = "second" if fold else "first"
        kept = [a for a, axis in enumerate(s.axes) if axis.role == "kept" or (fold == 0 and axis.role == "second")]
        away = [f"d.n{a}" for a, axis in enumerate(s.axes) if axis.role == place]
        loads, given, element = self.loads(place, "V")
        out = compute_type((after.root if after else reduction.node).dtype)
        reduced, names = self.reduced(fold, " * ".join([f"double({away[0]})", *away[1:]]))
        lines, value = self.tree(after, reduction.node, given | names)
        each = [*reduced, *element, *lines, f"value[e] = {value};"]
        body = [
            *(decode("result", kept, "") if any(r.axes for r in self.reads(place)) else []),
            *loads,
            *for_each(each, "V"),
        ]
        parameters = f"const Data& d, index_t result, const {place.title()} (&fold)[V], {out} (&value)[V]"
        return [
            f"// The results of the {place} reduction from `result` on, and what follows it.",
            "template <int V>",
            *block(f"{self.inline} void finish({parameters})", body),
        ]

    def reduced(self, fold: int, count: str) -> tuple[Lines, dict[Node, str]]:
        """The statements that make what reduction `fold` gives, of so many values, and what that is called."""
        node = self.s.folds[fold][0].node
        result = self.as_stored(f"fold[e].result({count})", node.dtype)
        return [f"const {compute_type(node.dtype)} reduced = {result};"], {node: "reduced"}

    def loads(
        self, place: Place, width: str, each: str = "e", among: Container[Node] | None = None
    ) -> tuple[Lines, dict[Node, str], Lines]:
        """Loads of the tensors read at `place`, the names of their elements, and the statements that make those.

        Values that are not `among` those given are left out.
        """
        before, given, element = [], {}, []
        for r in self.reads(place):
            if among is not None and r.value not in among:
                continue
            name, tensor, compute = self.element(r), self.start(r), compute_type(r.tensor.dtype)
            given[r.value] = name
            if self.last_of(place) in r.along and picks_each(r):
                beside = f" + {each}" if self.last_of(place) in r.axes else ""  # of a table, only the row is another
                at = f"{tensor}[{self.offset(r)}{beside}]"
                element += self.found(r, f" + {each}")
                element.append(f"const {compute} {name} = {self.picked(r, widened(at, r.tensor.dtype))};")
                continue
            before += self.found(r)
            if self.last_of(place) in r.axes and is_of_records(r):
                begin, first = self.place_in_record(r)
                at = f"{first} + {each} * {r.step} + (WIDE ? 0 : {begin})"
                element.append(f"const auto {name}s = load<WIDE ? {r.step} : 1>({tensor} + {at});")
                one = widened(f"{name}s.at[WIDE ? {begin} : 0]", r.tensor.dtype)
                element.append(f"const {compute} {name} = {self.picked(r, one)};")
            elif self.last_of(place) in r.axes and r.step > 1:
                at = f"{tensor}[{self.offset(r)} + {each} * {r.step}]"
                element.append(f"const {compute} {name} = {self.picked(r, widened(at, r.tensor.dtype))};")
            elif self.last_of(place) in r.axes:
                before.append(f"const auto {name}s = load<{width}>({tensor} + {self.offset(r)});")
                element.append(
                    f"const {compute} {name} = {self.picked(r, widened(f'{name}s.at[{each}]', r.tensor.dtype))};"
                )
            else:
                at = f"{tensor}[{self.offset(r)}]"
                before.append(f"const {compute} {name} = {self.picked(r, widened(at, r.tensor.dtype))};")
        return before, given, element


def is_of_records(r: Read) -> bool:
    """Whether what lies between neighbours can be loaded with one of them: others want it at the same time, mostly."""
    return r.step > 1 and r.step * r.tensor.dtype.itemsize in (4, 8, 16)


def widened(element: str, dtype: torch.dtype) -> str:
    """Text of an element in the compute type of its dtype."""
    return f"widened({element})" if dtype.is_floating_point else f"float({element})"


def tree(
    found: Tree | None,
    value: Node,
    given: dict[Node, str],
    *,
    rounds: bool = False,
    steady: Callable[[Node], bool] = lambda _: False,
) -> tuple[Lines, str]:
    """The statements of a tree and the name of its root; `value` stands for an absent one, the rest as in `Scalars`."""
    if found is None:
        return [], given[value]
    constants = {leaf: constant(leaf) for leaf in found.leaves if isinstance(leaf.op, ops.Full)}
    scalars = Scalars(given | constants, unknown, cuda=True, rounds=rounds, steady=steady)
    root = scalars.value(found.root)
    return scalars.lines, root


def for_each(body: Lines, count: str = "VALUES<WIDE>") -> Lines:
    """The unrolled loop over a thread's values."""
    return ["#pragma unroll", *block(f"for (int e = 0; e < {count}; ++e)", body)]


def decode(index: str, axes: Sequence[int], scale: str) -> Lines:
    """Coordinates of `axes` from a linear index; with `scale`, the last axis counts in steps of that many."""
    if not axes:
        return []
    if len(axes) == 1:
        return [f"const index_t i{axes[0]} = {index}{scale};"]
    lines = [f"count_t rest = {index};"]
    for a in reversed(axes[1:]):
        length = f"count_t(d.n{a} / {scale.removeprefix(' * ')})" if scale and a == axes[-1] else f"count_t(d.n{a})"
        lines.append(f"const index_t i{a} = rest % {length}{scale if a == axes[-1] else ''};")
        lines.append(f"rest /= {length};")
    return [*lines, f"const index_t i{axes[0]} = rest;"]
