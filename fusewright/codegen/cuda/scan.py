"""CUDA C++ of scans: prefixes of rows, or of columns side by side, read once and written once.

rows     a team of threads takes a tile of a row together: joined within threads, across warps, and across the block
columns  a thread keeps a few neighbours of the last axis and walks down, alone or with others on each other

Within a tile prefixes are those of the values' own compute type, in the order of a tree; sums of what lies ahead of it
are carried in double precision.  No sum is a difference of others, so what is not finite reaches all that follows, and
that alone.  A tree has sums of stretches that are no prefixes; where one of float32 overflows, elements are scaled.
Products are joined in double precision, too: one of elements behind a zero that float32 does not have would be NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from fusewright.codegen.cpp import ELEMENT, compute_type, literal
from fusewright.codegen.cuda import scan_text as text
from fusewright.codegen.cuda.stream import THREADS
from fusewright.codegen.cuda.stream_values import Widths, decode, for_each, tree, widths
from fusewright.codegen.cuda.teams import TeamWriter
from fusewright.codegen.stream_sizes import hint
from fusewright.codegen.text import Lines, fill
from fusewright.ir import ops
from fusewright.kernel import Array, Kernel
from fusewright.schedule.group import sizes
from fusewright.schedule.scan import Scan
from fusewright.schedule.scan_moves import NEUTRAL
from fusewright.schedule.stream_record import Tree

# Values of a row that one thread has at a time (half as many of float64), as there is a choice, best first, and threads
# that share it.
KEPT = (16, 32, 8)
LEAST_TEAM, MOST_TEAM = 4, 512
# Elements of a row that is too short for such a team, for each thread.
EACH = 4
# Vectors that one thread has at a time at most, of a row and of columns, and values where there are no vectors.
OF_ROW, OF_COLUMNS, SINGLE = 8, 4, 8
# Threads on each other that share columns, and threads that keep a large device busy.
TEAMS_OF_COLUMNS = (1, 2, 8, 32)
BUSY = 2**17

Option = dict[str, Any]


def options(s: Scan) -> list[Option]:
    """Ways to compute a chain, best estimate first: by teams of so many threads."""
    if s.in_rows:
        teams = [_team(s.length * _doubled(s), most) for most in KEPT]
        return [{"team": team} for team in dict.fromkeys((*teams, min(32, *teams)))]
    wide = _widths(s)
    threads = prod(map(hint, s.value.shape)) // s.length // (wide.values if wide else 1)
    found = [team for team in TEAMS_OF_COLUMNS if team == 1 or 2 * team <= s.length]
    best = next((team for team in found if threads * team >= BUSY), found[-1])
    return [{"team": team} for team in dict.fromkeys((best, *found))]


def _widths(s: Scan) -> Widths | None:
    """Those of the wide variant, if neighbours of results are neighbours in memory."""
    return None if s.is_apart or (s.spare and s.in_rows) else widths(s.within)


def _doubled(s: Scan) -> int:
    """How many registers a value takes, with what joins it to others."""
    return 2 if compute_type(s.node.dtype) == "double" or s.kind in ("prod", "logsumexp") else 1


def _team(numbers: int, most: int) -> int:
    """How many threads keep so many numbers, as far as there are: part of a warp, or a block of several."""
    team = 1
    while team < LEAST_TEAM and team * EACH < numbers:
        team *= 2
    while team * most < numbers and team < MOST_TEAM:
        team *= 4 if team == 32 else 2
    return team


def blocks(s: Scan, option: Option, hints: Mapping[Any, int]) -> float:
    """How many blocks there are, or the share of one that has anything to do."""
    team: int = option["team"]
    wide = None if s.in_rows else _widths(s)
    return prod(sizes(s.value, hints)) * team / (s.length * THREADS * (wide.values if wide else 1))


def kernel(s: Scan, name: str, reference: str = "", *, team: int) -> Kernel:
    """The kernel of a chain whose rows teams of so many threads walk along."""
    writer = _Columns if not s.in_rows else _Rows if s.folded is None else _Sums
    return writer(s, name, team).kernel(reference)


class _Rows(TeamWriter):
    """Writes the launch in which teams walk along rows."""

    vectors = OF_ROW

    def __init__(self, s: Scan, name: str, team: int) -> None:
        super().__init__(s.within, name, team)
        self.scan = s
        self.wide = _widths(s)

    def record(self, **more: Any) -> Kernel:
        shape = tuple(self.sizes.length(d) for d in range(self.s.value.ndim))
        return replace(super().record(**more), output=Array("out", shape, self.scan.root.dtype))

    def outputs(self) -> dict[str, str]:
        return {"out": ELEMENT[self.scan.root.dtype]}

    def about(self) -> str:
        return f"prefixes ({self.scan.kind}), {super().about()}"

    def _more_widths(self) -> Lines:
        many, one = self._items_of(self.wide.values if self.wide else 1), self._items_of(1)
        return ["// And how often in a tile.", *self._widths("ITEMS", many, one)]

    def _functions(self) -> Iterator[Lines]:
        yield from self._joining()
        yield self._entry_values()
        yield self._results()

    def _items_of(self, values: int) -> int:
        """How many items of so many values a thread has of a tile: no more than there are."""
        along = values if self.form == "rows" else 1  # elements of a row in an item
        most = (
            SINGLE // _doubled(self.scan)
            if values == 1
            else max(1, min(self.vectors, max(KEPT) // (values * _doubled(self.scan))))
        )
        return min(most, -(-self.scan.length // (along * self.shape.team)))

    def _joining(self) -> list[Lines]:
        """What joins elements."""
        turned = [fill(text.TURNED)] if self.scan.from_end or self.scan.to_end else []
        return [*self._joined(), fill(text.ACROSS, neutral=self._neutral), *turned]

    def _joined(self, several: int = 1) -> list[Lines]:
        """What joins two elements, and whether so many sums of stretches will fit, if that is asked for."""
        joined = fill(text.JOINED, join=fill(text.JOIN[self.scan.kind]))
        if not self._is_scaled:
            return [joined]
        most, more = literal(torch.finfo(torch.float32).max, "float"), several > 1
        together = f", or of {several} together, is" if more else " is"
        return [joined, fill(text.FITS, several=together, most=f"{most} / {several}" if more else most)]

    @property
    def _neutral(self) -> str:
        return literal(NEUTRAL[self.scan.kind], self._type)

    @property
    def _type(self) -> str:
        """In what elements are joined."""
        return "double" if self.scan.kind == "prod" else compute_type(self.scan.node.dtype)

    @property
    def _is_scaled(self) -> bool:
        """Whether what is joined in a tile may leave the range of its type where no prefix does."""
        return self.scan.kind == "sum" and self._type == "float"

    @property
    def _result(self) -> str:
        return compute_type(self.scan.value.dtype)

    def _walked(self, index: str) -> dict[str, str]:
        """Which item of a row is read, and written, at `index` of the order in which they are joined."""
        s = self.scan
        last = f"items - {1 + s.spare}"
        return {
            "read": f"max({last} - ({index}), index_t(0))" if s.from_end else f"min({index}, {last})",
            "written": f"items - 1 - ({index})" if s.to_end else index,
            "inside": "item >= 0" if s.to_end else "item < items",
        }

    def _entry_values(self) -> Lines:
        """The function that gives neighbours along the last axis of what is joined."""
        before = self.scan.before
        loads, given, element = self.values.loads("before", "VALUES<WIDE>", among=before.leaves)
        lines, value = tree(before, before.root, given)
        body = [*loads, *for_each([*element, *lines, f"value[e] = {value};"])]
        parameter = f"{self._type} (&value)[VALUES<WIDE>]"
        return self._function("Neighbours along the last axis, from these coordinates on.", "entry", [parameter], body)

    def _results(self) -> Lines:
        """The function that gives what comes of prefixes."""
        after = self.scan.after
        leaves, seen = (after.leaves, after.value) if after is not None else ((), self.scan.node)
        assert seen is not None
        loads, given, element = self.values.loads("before", "VALUES<WIDE>", among=leaves)
        lines, value = tree(after, seen, given | {seen: self._prefix})
        body = [*loads, *for_each([*element, *lines, f"value[e] = {value};"])]
        parameters = [f"const {self._type} (&prefix)[VALUES<WIDE>]"]
        parameters += [f"{self._result} (&value)[VALUES<WIDE>]"]
        return self._function("What comes of prefixes.", "result", parameters, body)

    @property
    def _prefix(self) -> str:
        """Text of a prefix in the compute type of its dtype."""
        own = compute_type(self.scan.node.dtype)
        return "prefix[e]" if own == self._type else f"{own}(prefix[e])"

    def _names(self) -> dict[str, object]:
        (along,) = self.axes["first"]
        return {
            "out": self.outputs()["out"],
            "T": self._type,
            "C": "double" if self.scan.kind in ("sum", "prod") else self._type,
            "neutral": self._neutral,
            "R": self._result,
            "coordinates": self._coordinates,
            "length": f"d.n{along}",
            "decode_item": self._decode("item", [along]),
        }

    def _write(self) -> Lines:
        """What becomes of the results of an item."""
        return fill(text.WRITE, **self._names())

    def _declared(self) -> Lines:
        """What a thread keeps beside what lies ahead."""
        return []

    def _finish(self) -> Lines:
        """What follows the last tile."""
        return []

    def _scaling(self, value: str, overflows: str, again: str, barrier: str) -> dict[str, Any]:
        """How sums are scaled that would leave their range otherwise; all threads that share a tile agree on it, at a
        `barrier` where there is one."""
        step = f"tile += TEAM * {'GROUPS' if self.form == 'rows' else 'AT_ONCE'}"
        if not self._is_scaled:
            nothing: dict[str, Any] = {name: [] for name in ("scale", "scaled", "unscaled", "next")}
            return {**nothing, "step": f" {step}", "shared": [f"{barrier}();"] if barrier else []}
        alone = "overflows" if self.form == "columns" else "__any_sync(~0u, overflows)"
        some = f"{barrier}_or(overflows)" if barrier else alone
        return {
            "scale": fill(text.SCALE, elements=literal(float(self._most_of_tile), "float")),
            "scaled": fill(text.SCALED, value=value),
            "unscaled": fill(text.UNSCALED, value="prefix" if self.form == "columns" else value),
            "step": "",
            "next": [f"{step};"],
            "shared": [*fill(overflows), *fill(again, some=some)],
        }

    @property
    def _most_of_tile(self) -> int:
        """Elements of a row, or of a column, that a tile has at most: a power of two."""
        wide = self.wide.values if self.wide else 1
        each = max((v if self.form == "rows" else 1) * self._items_of(v) for v in (wide, 1))
        return 1 << (each * self.shape.team - 1).bit_length()

    def _body(self) -> Lines:
        names, of_block = self._names(), self.shape.team > 32
        scaling = self._scaling("value[g]", text.OVERFLOWS, text.AGAIN, "__syncthreads" if of_block else "")
        shared = scaling.pop("shared")
        return fill(
            text.ROWS,
            **scaling,
            write=self._write(),
            finish=self._finish(),
            rows=self._items(self.results),
            items=self._items(self.axes["first"]),
            decode_row=decode("row", self.results, ""),
            declare=[*self._declared(), *(fill(text.DECLARE_BLOCK, **names) if of_block else [])],
            join=fill(text.JOIN_BLOCK, shared=shared) if of_block else shared,
            advance=fill(text.ADVANCE_BLOCK if of_block else text.ADVANCE_WARP, **names),
            turn=fill(text.NEXT_TURN) if of_block else [],
            prefixes=fill(text.OF_ROWS_AHEAD if self.scan.exclusive else text.OF_ROWS),
            turn_read=["flip(value[g]);"] if self.scan.from_end else [],
            turn_written=["flip(value[g]);"] if self.scan.to_end else [],
            **self._walked("tile + lane + g * TEAM"),
            **names,
        )


class _Sums(_Rows):
    """Writes the launch in which teams walk along rows and sum what comes of their prefixes."""

    def __init__(self, s: Scan, name: str, team: int) -> None:
        super().__init__(s, name, team)
        assert s.folded is not None
        self.folded = s.folded
        (along,) = self.axes["first"]
        self.results = [a for a in self.results if a < along]  # others are features

    def record(self, **more: Any) -> Kernel:
        op = self.scan.root.op
        assert isinstance(op, ops.Reduce)
        lengths = [self.sizes.length(d) for d in range(self.s.value.ndim)]
        kept = ["1" if d in op.dims else n for d, n in enumerate(lengths)]
        shape = tuple(n for d, n in enumerate(kept) if op.keepdim or d not in op.dims)
        return replace(super().record(**more), output=Array("out", shape, self.scan.root.dtype))

    def about(self) -> str:
        return f"sums of {super().about()}"

    def _more_widths(self) -> Lines:
        return [*super()._more_widths(), f"constexpr int FEATURES = {self.folded.features};  // that are summed"]

    def _functions(self) -> Iterator[Lines]:
        yield from super()._functions()
        if self.folded.tree is not None:
            yield self._features(self.folded.tree)

    def _features(self, found: Tree) -> Lines:
        """The function that gives a feature of an element."""
        assert found.value is not None
        loads, given, element = self.values.loads("before", "VALUES<WIDE>", among=found.leaves)
        lines, value = tree(found, found.value, given | {found.value: "result[e]"})
        body = [*loads, *for_each([*element, *lines, f"value[e] = {value};"])]
        parameters = [f"const {self._result} (&result)[VALUES<WIDE>]", f"{self._feature} (&value)[VALUES<WIDE>]"]
        return self._function(
            "A feature, of what comes of a prefix and of what lies beside it.", "features", parameters, body
        )

    @property
    def _feature(self) -> str:
        return compute_type(self.scan.root.dtype)

    def _declared(self) -> Lines:
        spread = [f"const index_t i{self.last} = 0;"] if self.folded.tree is not None else []
        return ["double sums[FEATURES] = {};", *spread]

    def _write(self) -> Lines:
        if self.folded.tree is None:
            return fill(text.FOLD)
        before = ", ".join(f"i{a}" for a in self.all[:-1])
        return fill(text.FOLD_FEATURES, F=self._feature, before=before)

    def _finish(self) -> Lines:
        across = fill(text.FOLD_ACROSS) if self.shape.team > 32 else []
        divided = f" / {self.scan.length}" if self.folded.mean else ""
        return fill(text.FINISH_FOLD, S=self._feature, across=across, divided=divided)


class _Columns(_Rows):
    """Writes the launch in which threads walk down columns."""

    form, vectors = "columns", OF_COLUMNS

    def _joining(self) -> list[Lines]:
        return self._joined(self.shape.team)

    def _body(self) -> Lines:
        names, alone = self._names(), self.shape.team == 1
        barrier = "" if alone else "__syncthreads"
        scaling = self._scaling("value[t]", text.OVERFLOWS_OF_COLUMNS, text.AGAIN_OF_COLUMNS, barrier)
        shared = scaling.pop("shared")
        place = self._place(self.all)
        prefix = (
            "t > 0 ? joined(ahead[e], value[t - 1][e]) : ahead[e]"
            if self.scan.exclusive
            else "joined(ahead[e], value[t][e])"
        )
        return fill(
            text.COLUMNS,
            columns=self._items(self.results),
            decode_column=self._decode("column", self.results),
            declare=[] if alone else fill(text.DECLARE_MEMBERS, **names),
            join=fill(text.ALONE if alone else text.MEMBERS, shared=shared, **names),
            **scaling,
            place=place,
            prefix=prefix,
            **self._walked("begin + t"),
            **names,
        )
