"""CUDA C++ of normalisations.

apart  one launch (and another where rows are cut into parts) finds the statistics of all rows, and a stream normalises:
       x is read twice, whatever follows
kept   a team of threads keeps a row, or some columns side by side, in registers while statistics are found: x is read
       once, from where it lies before it is moved if need be; a block turns rows that lie side by side there
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import sympy

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import last_order, stream_text
from fusewright.codegen.cuda import normalization_text as text
from fusewright.codegen.cuda.apart import behind_statistics
from fusewright.codegen.cuda.moved_rows import MovedValues, pitch_of, rows_to_turn
from fusewright.codegen.cuda.rearrangement import Pace, address_of, length_of
from fusewright.codegen.cuda.stream import THREADS, Writer, WriterOfSeveral
from fusewright.codegen.cuda.stream_values import Widths, decode, for_each, tree, widths
from fusewright.codegen.cuda.teams import TeamWriter
from fusewright.codegen.sample_steps import epsilon
from fusewright.codegen.stream_sections import names_of
from fusewright.codegen.stream_sizes import Sizes, hint
from fusewright.codegen.text import Lines, fill
from fusewright.ir import ops
from fusewright.ir.node import Node, topological
from fusewright.kernel import Array, Expression, Kernel
from fusewright.schedule.last_order import as_seen, of_norm
from fusewright.schedule.normalization import CENTER, SCALE, ChannelStatistics, Normalization
from fusewright.schedule.rearrangement import Load, call_length
from fusewright.schedule.stream_record import Stream

# So many values of a row one thread keeps, as there is a choice (half as many of float64), in teams of so many threads.
KEPT = (8, 16, 32)
LEAST_TEAM, MOST_TEAM = 4, 1024

# Blocks that may share a row, and how many threads each has then.
CLUSTERS, TEAMS_OF_CLUSTERS = (2, 4, 8), (512, 256)

# Threads that a multiprocessor has at once where there are clusters, if so many registers for each do.
AT_ONCE = 1024

# Values of columns that one thread keeps, as there is a choice, and threads that share a column at most.
KEPT_OF_COLUMNS = (32, 64, 128)
MOST_SHARING = 32

# What is normalised, where it is a result as well: it lies ahead of the norm.
ALSO = "ahead"

# Bytes of shared memory at which blocks of a cluster join their sums, and maxima: a number for each warp, and one for
# all.
WARPS, OF_SUM, OF_MOST, SHARED_BY_CLUSTERS = 32, 0, 512, 1024

# C++ of the team of a thread, where a block has several or one.
TEAM_OF_A_BLOCK = "index_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM"

Option = dict[str, Any]


def options(n: Normalization, capability: int | None = None, *, last: Collection[Node] = ()) -> list[Option]:
    """Ways to compute a normalisation, best estimate first: by teams that keep a row or some columns, and apart.

    A device of this compute capability (times ten) may have clusters of blocks, which are the teams of long rows.
    Operands whose channels lie `last` are read so, where that can be.
    """
    if (seen := as_seen(n, last)) is not None:
        return [{**option, "seen": True} for option in _in_rows(seen, capability)]
    turned = of_norm(n) if last else None
    as_it_lies: list[Option] = [{"last": True}] if turned and all(i in last for i in turned.turned.images) else []
    return [*as_it_lies, *_in_rows(n, capability)]


def _in_rows(n: Normalization, capability: int | None) -> list[Option]:
    """Ways to compute a normalisation of operands that lie row by row."""
    apart: list[Option] = [{}] if n.also is None and not n.moved else []
    if n.within is None or n.length is None:
        return apart
    if n.turn is not None:
        return [{"team": THREADS // rows} for rows in rows_to_turn(n.length, n.turn.root.dtype.itemsize)]
    if not n.within.in_rows:
        return [*({"team": team} for team in _teams_of_columns(n.within, n.length)), *apart]
    kept = [most // 2 if n.norm.dtype.itemsize == 8 else most for most in KEPT]
    teams = dict.fromkeys(_team(n.length, most) for most in kept)
    found = [{"team": team} for team in teams if team <= MOST_TEAM]
    few = n.length <= MOST_TEAM * kept[-1] // 2
    return [*([] if few else _clusters(n.length, kept[-1], capability)), *found, *apart]


def _clusters(length: int, kept: int, capability: int | None) -> list[Option]:
    """Clusters of so many blocks that keep a row, each thread so many values at most."""
    ways = [(blocks, team) for blocks in CLUSTERS for team in TEAMS_OF_CLUSTERS] if (capability or 0) >= 90 else []
    fit = [way for way in ways if kept // 4 < -(-length // prod(way)) <= kept]
    return [{"team": team, "blocks": blocks} for blocks, team in fit]


def _team(length: int, values: int) -> int:
    """How many threads keep a row together, each so many values at most: part of a warp, or a block of several."""
    team = LEAST_TEAM
    while team * values < length:
        team *= 4 if team == 32 else 2
    return team


def _widths_of_columns(s: Stream) -> Widths | None:
    """How many values a thread loads together: none where rows are of odd length, for which lanes that would share a
    column lie side by side."""
    return widths(s) if prod(hint(s.value.shape[dim]) for dim in s.axes[-1].dims) % 2 == 0 else None


def _teams_of_columns(s: Stream, length: int) -> list[int]:
    """How many threads may share columns that lie side by side."""
    wide = _widths_of_columns(s)
    values = length * (wide.values if wide else 1) * (2 if compute_type(s.value.dtype) == "double" else 1)
    teams = (max(2, 1 << (-(-values // most) - 1).bit_length()) for most in KEPT_OF_COLUMNS)
    return [team for team in dict.fromkeys(teams) if team <= min(MOST_SHARING, length)]


def kernel(
    n: Normalization,
    name: str,
    reference: str = "",
    *,
    team: int | None = None,
    blocks: int = 1,
    last: bool = False,
    seen: bool = False,
) -> Kernel:
    """The kernel of a normalisation, whose rows teams of so many threads in so many blocks keep, or nobody; or which
    reads images whose channels lie `last`, or what is `seen` of such."""
    if seen and (rows := as_seen(n, n.tensors)) is not None:
        return last_order.of_images(kernel(rows, name, reference, team=team, blocks=blocks), rows.tensors, n.tensors)
    call = _Call(n)
    kept = _KeptMoved if n.moved else _Kept
    kept = kept if n.within is not None and n.within.in_rows else _KeptColumns
    turned = of_norm(n) if last else None
    if turned is not None:
        made = last_order.of_norm(turned, name, call.names, call.sizes.lengths, call.of(n.behind.tensors))
    else:
        made = _apart(call, name) if team is None else kept(call, name, team, blocks).kernel(reference)
    return replace(
        made,
        operands=tuple(call.names.values()),
        layouts=last_order.layouts(() if turned is None else turned.turned.images, n.tensors),
        sizes=call.named(),
        output=Array("out", call.sizes.output(), n.behind.root.dtype),
        also=() if n.also is None else (Array(ALSO, call.sizes.output(), n.also.dtype),),
        dtypes=tuple(t.dtype for t in n.tensors),
        shapes=tuple(map(call.shape, n.tensors)),
        reference=reference,
    )


@dataclass(frozen=True)
class _Call:
    """What a call passes; its sizes are named as in the stream that normalises."""

    n: Normalization

    @cached_property
    def names(self) -> dict[Node, str]:
        return names_of(self.n.tensors, self.n.behind.reads)

    @cached_property
    def sizes(self) -> Sizes:
        sizes = Sizes(self.n.behind)
        if self.n.moved:
            symbol, _ = self.length_of_call
            sizes.lengths = [length_of(n, symbol) for n in self.n.norm.shape]
            sizes.rows = {i: length_of(self.n.behind.tensors[i].shape[0], symbol) for i in sizes.rows}
        return sizes

    @property
    def length_of_call(self) -> tuple[sympy.Symbol | None, tuple[str, int, int] | None]:
        """The length that only a call knows, if any, and where it shows it, where operands lie elsewhere."""
        found = call_length(self.n.norm, self.n.tensors)
        assert found is not None
        return found

    def of(self, stand_ins: Iterable[Node]) -> dict[Node, str]:
        """The names of what tensors of a stream stand for."""
        return {t: self.names[self.n.stands[t]] for t in stand_ins if t in self.n.stands}

    @property
    def lengths(self) -> list[Expression]:
        """Of the dimensions of x, as rows have it."""
        samples, *rest = self.sizes.lengths
        if self.n.split == 1:
            return [samples, *rest]
        channels = self.n.norm.shape[1]
        assert isinstance(channels, int)
        return [samples, str(channels // self.n.split), str(self.n.split), *rest[1:]]

    def rows(self, s: Stream) -> dict[int, Expression]:
        """How many rows tables have that a stream reads, by their places among its tensors."""
        return {i: self.sizes.rows[self.n.behind.tensors.index(s.tensors[i])] for i in s.weights}

    def named(self) -> tuple[tuple[str, int, int], ...]:
        """The names of sizes, with the operand and the dimension that each is read off."""
        if self.n.moved:
            _, shown = self.length_of_call
            return () if shown is None else (shown,)
        real = [self.n.stands.get(t) for t in self.n.behind.tensors]
        place = {t: i for i, t in enumerate(self.n.tensors)}
        return tuple((size, place[t], d) for size, i, d in self.sizes.named if (t := real[i]) is not None)

    def shape(self, tensor: Node) -> tuple[Expression, ...]:
        """The shape of an operand; what stands for it may have more dimensions behind."""
        if self.n.moved:
            return tuple(length_of(n, self.length_of_call[0]) for n in tensor.shape)
        stand_in = next(t for t in self.n.behind.tensors if self.n.stands.get(t) is tensor)
        return self.sizes.operand(stand_in)[: tensor.ndim]


# ---- in several launches


def _apart(call: _Call, name: str) -> Kernel:
    """Statistics first, then the stream."""
    n = call.n
    statistics = {t: n.statistics[t] for t in n.behind.tensors if t in n.statistics}
    behind = Writer(n.behind, name, call.of(n.behind.tensors) | statistics, call.sizes.lengths)
    sums = _Statistics(call, f"{name}_statistics")
    rows = f"{sums.sizes.product(sums.results)} * {n.split}"
    return behind_statistics(sums, behind, statistics, rows, "statistics, {}; the rest, {}")


class _Statistics(WriterOfSeveral):
    """Those of the rows of a norm, or of a softmax."""

    def __init__(self, call: _Call, name: str) -> None:
        super().__init__(call.n.sums, name, call.of(call.n.sums.tensors), call.lengths)
        self.n, self.sizes.rows = call.n, call.rows(call.n.sums)

    def outputs(self) -> dict[str, str]:
        return statistics_of(self.n)

    def tails(self) -> Lines:
        n, outputs = self.n, self.outputs()
        centred, element = CENTER in outputs, outputs[SCALE]
        if isinstance(n.op, ops.Softmax):
            targets = ", ".join(f"{element}* {name}" for name in outputs)
            return [*fill(text.WRITE_SHARES, outputs=targets, shares=fill(text.OF_TOTAL[n.op.log], S=element)), ""]
        lines = fill(
            text.WRITE,
            outputs=", ".join(f"{element}* {name}" for name, element in outputs.items()),
            S=element,
            count=self.count(),
            epsilon=repr(epsilon(n.op, n.norm)),
            center=[f"const {element} own_center = {element}(fold.mean());"] if centred else [],
            channels=n.split,
            write_center=["center[channel] = own_center;"] if centred else [],
        )
        return [*lines, ""]


class _Channels(WriterOfSeveral):
    """Those of a batch, which are results of their own."""

    def __init__(self, c: ChannelStatistics, name: str) -> None:
        super().__init__(c.sums, name)
        self.c = c

    def outputs(self) -> dict[str, str]:
        return {f"out{i}" if i else "out": compute_type(r.dtype) for i, r in enumerate(self.c.results)}

    def tails(self) -> Lines:
        op, outputs = self.c.root.op, self.outputs()
        assert isinstance(op, ops.Statistics)
        element, unbiased = outputs["out"], "variance * (count / (count - 1))"
        texts = (
            f"{element}(mean)",
            f"1 / sqrt({element}(variance + {op.eps!r}))",
            *(f"{element}({op.momentum!r} * {taken})" for taken in ("mean", unbiased)),
        )
        write = [f"{name}[row] = {texts[i]};" for name, i in zip(outputs, self.c.rows, strict=True)]
        targets = ", ".join(f"{element}* {name}" for name in outputs)
        return [*fill(text.WRITE_ALL, outputs=targets, count=self.count(), write=write), ""]


def of_channels(c: ChannelStatistics, name: str, reference: str = "") -> Kernel:
    """The kernel of the statistics of a batch."""
    writer = _Channels(c, name)
    (channels,) = (writer.sizes.product([a]) for a in writer.results)
    named = zip(writer.outputs(), c.results, strict=True)
    output, *also = (Array(name, (channels, *("1",) * (r.ndim - 1)), r.dtype) for name, r in named)
    return replace(writer.kernel(reference), output=output, also=tuple(also))


def statistics_of(n: Normalization) -> dict[str, str]:
    """The statistics, with the types of their elements."""
    return {name: compute_type(t.dtype) for t, name in n.statistics.items()}


# ---- in one launch


class _Kept(TeamWriter):
    """Writes the launch in which teams keep rows."""

    def __init__(self, call: _Call, name: str, team: int, blocks: int = 1) -> None:
        assert call.n.within is not None
        super().__init__(call.n.within, name, team, call.of(call.n.within.tensors), call.lengths, blocks)
        self.n, self.length, self.sizes.rows = call.n, call.n.length, call.rows(self.s)
        self.shared = SHARED_BY_CLUSTERS if blocks > 1 else 0

    def outputs(self) -> dict[str, str]:
        also = {} if self.n.also is None else {ALSO: ELEMENT[self.n.also.dtype]}
        return {"out": ELEMENT[self.n.behind.root.dtype], **also}

    def least_blocks(self) -> int:
        """Blocks of a cluster wait for each other: others shall read and write meanwhile, if registers do for them."""
        if self.blocks == 1 or self.length is None:
            return 1
        many = 32 if isinstance(self.n.op, ops.Softmax) else 16  # where nothing is in doubles
        return AT_ONCE // self.threads if -(-self.length // self.shape.team) <= many else 1

    def _staged(self) -> Lines:
        """What a block does with its rows before teams keep them."""
        return []

    def _also(self, place: str) -> Lines:
        """The statement that writes what is normalised."""
        return [] if self.n.also is None else [f"store<V>({ALSO} + {place}, kept[g]);"]

    def _functions(self) -> Iterator[Lines]:
        yield fill(stream_text.ROW_OF) if self.s.looks_up else []
        yield from self._joining()
        yield self._entry_values()
        yield self._normalised()

    def _joining(self) -> Iterator[Lines]:
        """What threads of a team join by."""
        S = statistics_of(self.n)[SCALE]
        if self.blocks > 1:
            yield fill(text.SHARED_MEMORY)
        if isinstance(self.n.op, ops.Softmax):
            yield fill(text.MOST, S=S, **self._joined(S, "value = greater(value, other);", OF_MOST))
        yield fill(text.SUM, **self._joined("double", "value += other;", OF_SUM))

    def _joined(self, element: str, join: str, at: int) -> dict[str, Lines]:
        """The array in which warps of a block join values, and the statements that make the value of a block that of
        all blocks which share the row: these have shared memory for both from `at` on."""
        if self.blocks == 1:
            return {"warps": [f"__shared__ {element} warps[THREADS / 32];"], "of_blocks": []}
        pointer = "{T}* const {name} = reinterpret_cast<{T}*>(shared_memory + {at});"
        warps = pointer.format(T=element, name="warps", at=at)
        own = pointer.format(T=element, name="own", at=at + WARPS * 8)
        return {"warps": [warps], "of_blocks": fill(text.OF_BLOCKS, S=element, own=own, join=join)}

    def _entry_values(self) -> Lines:
        """The function that gives neighbours in a row of x."""
        x = self.n.x
        loads, given, element = self.values.loads("before", "VALUES<WIDE>", among=x.leaves)
        lines, value = tree(x, x.root, given)
        body = [*loads, *for_each([*element, *lines, f"kept[e] = {value};"])]
        parameter = f"{compute_type(x.root.dtype)} (&kept)[VALUES<WIDE>]"
        return self._function("Neighbours in a row, from these coordinates on.", "entry", [parameter], body)

    def _normalised(self) -> Lines:
        """The function that gives the results of these."""
        x, before = self.n.x.root, self.s.before
        assert before is not None
        below = topological([before.root], [x])
        loads, given, element = self.values.loads("before", "VALUES<WIDE>", among=set(below) - set(self.n.statistics))
        statistics = {t: f"{name}{self.each}" for t, name in self.n.statistics.items()}
        lines, value = tree(before, before.root, given | statistics | {x: "kept[e]"})
        body = [*loads, *for_each([*element, *lines, f"value[e] = {value};"])]
        parameters = [f"const {compute_type(x.dtype)} (&kept)[VALUES<WIDE>]"]
        parameters += [self._passed(name, element) for name, element in statistics_of(self.n).items()]
        parameters += [f"{compute_type(before.root.dtype)} (&value)[VALUES<WIDE>]"]
        return self._function("What becomes of them.", "normalised", parameters, body)

    def _passed(self, name: str, element: str) -> str:
        return f"{element} {name}"

    def _body(self) -> Lines:
        n, first, statistics = self.n, self.axes["first"], statistics_of(self.n)
        return fill(
            text.ROWS,
            target=self._target(),
            also=self._also("row * LENGTH + item * V"),
            team="index_t(blockIdx.x) / (TEAM / THREADS)" if self.blocks > 1 else TEAM_OF_A_BLOCK,
            lane="cluster_rank() * THREADS + threadIdx.x" if self.blocks > 1 else "threadIdx.x % TEAM",
            rows=self._items(self.results),
            staged=self._staged(),
            decode_row=decode("row", self.results, ""),
            decode_item=self._decode("item", first),
            coordinates=self._coordinates,
            T=compute_type(n.x.root.dtype),
            R=compute_type(n.behind.root.dtype),
            found=self._found(statistics[SCALE]),
            statistics=", ".join(statistics),
        )

    def _found(self, statistic: str) -> Lines:
        """The statistics of a row that is kept."""
        n = self.n
        if isinstance(n.op, ops.Softmax):
            return fill(text.SHARES, S=statistic, of_total=fill(text.OF_TOTAL[n.op.log], S=statistic))
        over = "/ LENGTH" if statistic == "double" else "* (1.0 / LENGTH)"  # which is as exact as a float
        centred = CENTER in n.statistics.values()
        half = n.x.root.dtype.itemsize == 2
        mean, moments = (text.MEAN_OF_HALF, text.MOMENTS_OF_HALF) if half else (text.MEAN, text.MOMENTS)
        subtracted = " - center" if half else " - mean"
        return fill(
            moments,
            S=statistic,
            mean=fill(mean, S=statistic, over=over) if centred else [],
            over=over,
            distance=f"kept[g][e]{subtracted if centred else ''}",
            epsilon=repr(epsilon(n.op, n.norm)),
            center=[f"const {statistic} center = mean;"] if centred else [],
        )


class _KeptMoved(_Kept):
    """Writes the launch in which teams keep rows of what eager moves first."""

    def __init__(self, call: _Call, name: str, team: int, blocks: int = 1) -> None:
        super().__init__(call, name, team, blocks)
        in_tile = f"(threadIdx.x / TEAM) * PITCH + {self._place(self.axes['first'])}"
        self.values = MovedValues(self.s, self.names, call.n.moved, self._place(self.all), in_tile)
        sources = [m.tensors[0] for m in call.n.moved.values()]
        self.sources = [" * ".join(call.shape(x)) for x in dict.fromkeys(sources)]
        if self.beyond * max(prod(map(hint, x.shape)) for x in sources) >= 2**31:
            self.index = "long long"
        loads = [m.value for m in call.n.moved.values() if m.turn is None]
        wide = self.wide and all(isinstance(v, Load) and Pace(self.wide.values).is_loaded_together(v) for v in loads)
        self.wide = self.wide if wide else None

    def _counts(self) -> tuple[Expression, ...]:
        """There may be more elements than what is read of them."""
        return (*super()._counts(), *(f"{self.beyond} * {n}" for n in self.sources))

    def _functions(self) -> Iterator[Lines]:
        if self.n.turn is not None:
            yield fill(text.TILE, E=ELEMENT[self.n.turn.root.dtype])
        yield from super()._functions()

    def _more_widths(self) -> Lines:
        if self.n.turn is None:
            return []
        assert self.length is not None
        pitch = pitch_of(self.length, self.n.turn.root.dtype.itemsize)
        return [f"constexpr int ROWS = THREADS / TEAM, PITCH = {pitch};  // of what a block turns"]

    def _staged(self) -> Lines:
        turn = self.n.turn
        if turn is None:
            return []
        lines, at = address_of(turn)
        element = f"d.{self.names[turn.root]}[index_t({at})]"
        return fill(text.STAGED, E=ELEMENT[turn.root.dtype], address=lines, element=element)


class _KeptColumns(_Kept):
    """Writes the launch in which teams keep columns of a softmax."""

    form = "columns"
    each = "[e]"

    def __init__(self, call: _Call, name: str, team: int, blocks: int = 1) -> None:
        super().__init__(call, name, team, blocks)
        self.wide = _widths_of_columns(self.s)

    def _joining(self) -> Iterator[Lines]:
        return iter(())

    def _passed(self, name: str, element: str) -> str:
        return f"const {element} (&{name})[VALUES<WIDE>]"

    def _body(self) -> Lines:
        n, statistic = self.n, statistics_of(self.n)[SCALE]
        assert isinstance(n.op, ops.Softmax)
        place = self._place(self.all)
        return fill(
            text.COLUMNS,
            target=self._target(),
            also=self._also(f"({place})"),
            items=self._items(self.results),
            decode_item=self._decode("item", self.results),
            decode_reduced=decode("r", self.axes["first"], ""),
            coordinates=self._coordinates,
            place=place,
            T=compute_type(n.x.root.dtype),
            R=compute_type(n.behind.root.dtype),
            S=statistic,
            of_total=fill(text.OF_TOTAL[n.op.log], S=statistic),
        )
