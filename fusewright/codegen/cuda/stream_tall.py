"""Windows that overlap along an axis before the last: a thread has values on each other, which share what they read.

It stands in for the variant that takes one value at a time, where 16-byte loads do not fit the last axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import stream_text
from fusewright.codegen.cuda.stream_values import TAKE, Values
from fusewright.codegen.stream_sizes import hint
from fusewright.codegen.text import Lines, block, fill
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.stream_record import Role, Stream

MOST_VALUES = 4
MOST_TAPS = 128  # of all of a thread's windows together: their loops are unrolled


@dataclass(frozen=True)
class Tall:
    """How a thread's values lie: so many `values` along `axis`, which dimension `dim` of the window runs along, and
    `rows` of what the window reads under them."""

    axis: int
    dim: int
    values: int
    rows: int


def tall(s: Stream, role: Role) -> Tall | None:
    """The axis of a role along which windows share most; `None` where they share nothing, or are too large."""
    if s.window is None or (role == "first" and s.folds[0][0].op.kind in ("var", "std", "argmax", "argmin")):
        return None  # what stands for a last window that is nobody's would be among the values that vary, or count
    op, last = s.window.op, len(s.axes) - 1
    found: list[tuple[float, Tall]] = []
    for a, axis in enumerate(s.axes[:last]):
        k = axis.window
        if k is None or axis.role != role or op.kernel[k] <= op.stride[k] or op.dilation[k] > 1:
            continue
        values = min(MOST_VALUES, hint(s.value.shape[axis.dims[0]]))
        rows = (values - 1) * op.stride[k] + op.kernel[k]
        if values > 1 and rows * prod(op.kernel) // op.kernel[k] <= MOST_TAPS:
            found.append((op.kernel[k] / op.stride[k], Tall(a, k, values, rows)))
    return max(found, key=lambda pair: pair[0], default=(0.0, None))[1]


class TallValues(Values):
    """Writes `tall_values`, and the functions that call it."""

    def __init__(self, s: Stream, names: dict[Node, str], shape: Tall) -> None:
        super().__init__(s, names)
        self.tall = shape

    # ---- the values of a thread

    def text(self) -> Lines:
        compute = compute_type(self.s.value.dtype)
        at = [f"first{a}" if a == self.tall.axis else f"i{a}" for a in range(len(self.s.axes))]
        coordinates = ", ".join(f"index_t {name}" for name in at)
        return [
            f"constexpr int TALL = {self.tall.values};  // values of a thread along axis {self.tall.axis}",
            "",
            "// Values on each other, from these coordinates on: a row that their windows share is taken once for all.",
            *block(
                f"{self.inline} void tall_values(const Data& d, {coordinates}, {compute} (&value)[TALL])", self._body()
            ),
        ]

    def _body(self) -> Lines:
        a, k = self.tall.axis, self.tall.dim
        compute = compute_type(self.window.node.dtype)
        behind, given, element = self.loads("after", "1", "0")
        divisor = self.divisor(tall=a)
        lines, value = self.tree(
            self.s.after, self.window.node, given | {self.window.node: "average" if divisor else "of_e"}
        )
        quotient = self.as_stored(f"of_e / {divisor}", self.window.node.dtype)
        average = [f"const {compute} average = {quotient};"] if divisor else []
        if self.s.axes[a].role == "first":  # a reduction takes all values of a thread
            value = f"first{a} + e < d.n{a} ? {value} : {self._nothing()}"
        each = [
            f"const index_t i{a} = min(first{a} + e, d.n{a} - 1);",
            f"const {compute} of_e = pooled[e];",
            *[*behind, *element, *average, *lines, f"value[e] = {value};"],
        ]
        outside = [f"if (j{a} < 0 || j{a} >= d.m{a}) continue;"]
        inside = (
            f"const index_t j{a} = min(first{a} * STRIDE[{k}] + u{a}, d.m{a} - 1);  // a last window may be nobody's"
        )
        row = [
            *(
                [f"const index_t j{a} = first{a} * STRIDE[{k}] - PADDING[{k}] + u{a};", *outside]
                if self.checked()
                else [inside]
            ),
            f"{compute} row = {self.neutral()};",
            *self._row(),
            "#pragma unroll",
            *block(
                "for (int e = 0; e < TALL; ++e)",
                [
                    f"const int tap = u{a} - e * STRIDE[{k}];",
                    f"if (tap >= 0 && tap < KERNEL[{k}]) {taken('pooled[e]', 'row', self.window.op)}",
                ],
            ),
        ]
        return [
            f"{compute} pooled[TALL];",
            "#pragma unroll",
            f"for (int e = 0; e < TALL; ++e) pooled[e] = {self.neutral()};",
            "#pragma unroll",
            *block(f"for (int u{a} = 0; u{a} < {self.tall.rows}; ++u{a})", row),
            "#pragma unroll",
            *block("for (int e = 0; e < TALL; ++e)", each),
        ]

    def _nothing(self) -> str:
        """What changes no result of the first reduction."""
        compute, kind = compute_type(self.s.value.dtype), self.s.folds[0][0].op.kind
        infinite = {"max": f"-{compute}(INFINITY)", "logsumexp": f"-{compute}(INFINITY)", "min": f"{compute}(INFINITY)"}
        return infinite.get(kind, f"{compute}(0)")

    def _row(self) -> Lines:
        """The taps of all other axes, taken into ``row``."""
        loads, given, element = self.loads("before", "1", "0")
        lines, value = self.tree(self.s.before, self.s.entry, given)
        body = [*loads, *element, *lines, taken("row", value, self.window.op)]
        for a, axis in reversed(list(enumerate(self.s.axes))):
            k = axis.window
            if k is None or a == self.tall.axis:
                continue
            place = [f"const index_t j{a} = i{a} * STRIDE[{k}] - PADDING[{k}] + u{a} * DILATION[{k}];"]
            place += [f"if (j{a} < 0 || j{a} >= d.m{a}) continue;"] if self.checked() else []
            body = ["#pragma unroll", *block(f"for (int u{a} = 0; u{a} < KERNEL[{k}]; ++u{a})", [*place, *body])]
        return body

    # ---- who calls it

    def flat(self) -> Lines:
        """The function that writes all values."""
        axes = list(range(len(self.s.axes)))
        return fill(
            stream_text.TALL_FLAT,
            out=ELEMENT[self.s.root.dtype],
            T=compute_type(self.s.value.dtype),
            items=self.items(axes),
            decode=self.decode("item", axes),
            coordinates=self.coordinates(),
            a=self.tall.axis,
            **self._places(axes),
        )

    def write(self, results: list[int], result: str) -> Lines:
        """The statements that finish the folds of a thread's values, and write them."""
        return fill(stream_text.TALL_WRITE, R=result, a=self.tall.axis, **self._places(results))

    def coordinates(self) -> str:
        """The arguments of `tall_values`."""
        return ", ".join(f"i{a}" for a in range(len(self.s.axes)))

    def items(self, axes: list[int]) -> str:
        """How many threads' values of these axes there are."""
        return " * ".join(map(self._length, axes)) or "1"

    def _length(self, a: int) -> str:
        return f"((d.n{a} + TALL - 1) / TALL)" if a == self.tall.axis else f"d.n{a}"

    def decode(self, index: str, axes: list[int]) -> Lines:
        """Coordinates from the number of a thread's values: of the first of them."""

        def coordinate(a: int, text: str) -> str:
            return f"const index_t i{a} = {text}{' * TALL' if a == self.tall.axis else ''};"

        lines = [f"count_t rest = {index};"]
        for a in reversed(axes[1:]):
            lines += [
                coordinate(a, f"rest % count_t{_bracketed(self._length(a))}"),
                f"rest /= count_t{_bracketed(self._length(a))};",
            ]
        return [*lines, coordinate(axes[0], "index_t(rest)")]

    def _places(self, axes: list[int]) -> dict[str, str]:
        """Where the first of a thread's values is written, and how far the next is from it."""
        place = ""
        for a in axes:
            place = f"({place}) * d.n{a} + i{a}" if place else f"i{a}"
        step = " * ".join(f"d.n{a}" for a in axes if a > self.tall.axis)
        return {"place": place, "step": f" * ({step})" if step else ""}


def _bracketed(text: str) -> str:
    return text if text.startswith("(") else f"({text})"


def taken(target: str, element: str, op: ops.Pool) -> str:
    """The statement by which `target` takes an element in."""
    return TAKE[op.kind].replace("pooled[e]", target).replace("element", element)
