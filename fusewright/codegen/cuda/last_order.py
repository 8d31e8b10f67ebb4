"""CUDA C++ of streams and of norms over images whose channels lie last in memory, which they read as they lie.

A stream is one over the images in the other order.  A norm's statistics are a reduction of columns, a channel each, of
which those of a group are joined; a second launch normalises, and as norms give rows, it writes neighbouring positions
where it read neighbouring channels: tile by tile, through shared memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import gcd, prod
from typing import Any

from fusewright.codegen.cpp import compute_type
from fusewright.codegen.cuda import kept_rows, normalization_text, several_folds
from fusewright.codegen.cuda import last_order_text as text
from fusewright.codegen.cuda.apart import behind_statistics
from fusewright.codegen.cuda.stream import THREADS, Writer, WriterOfSeveral
from fusewright.codegen.cuda.stream_values import Widths, decode, for_each, tree
from fusewright.codegen.sample_steps import epsilon
from fusewright.codegen.stream_sizes import hint
from fusewright.codegen.text import Lines, block, fill, indent
from fusewright.ir import ops
from fusewright.ir.node import Node, topological
from fusewright.kernel import Argument, Expression, Kernel, Launch, ceil_div
from fusewright.schedule.last_order import TurnedFolds, TurnedNorm, TurnedRows, TurnedStatistics, TurnedStream
from fusewright.schedule.normalization import SCALE

# Channels of a tile at most, by the bytes of an element: a sector of memory, or several, at each position.
MOST_CHANNELS = {2: 64, 4: 32, 8: 16}
# Elements of a tile, by the same: each thread reads 16 bytes twice.
TILE = {2: 4096, 4: 2048, 8: 1024}

Reduction = TurnedStream | TurnedFolds | TurnedRows


def of_stream(t: Reduction, tensors: tuple[Node, ...], name: str, **option: Any) -> Kernel:
    """The kernel of a stream, of several reductions, or of rows that are kept by an `option`, that reads these
    `tensors`."""
    match t:
        case TurnedRows():
            made, reduces = kept_rows.kernel(t.k, name, **option), not t.k.results[0].elements
        case TurnedFolds():
            made, reduces = several_folds.kernel(t.several, name), True
        case _:
            made, reduces = Writer(t.s, name).kernel(""), bool(t.s.folds)
    layout = "contiguous" if reduces else "channels_last"
    output, *also = (
        replace(a, shape=_as_first(t, root, a.shape), layout=layout)
        for a, root in zip(made.results, t.turned.roots, strict=True)
    )
    return replace(read_by(made, t, tensors), output=output, also=tuple(also))


def read_by(made: Kernel, t: Reduction | TurnedStatistics, tensors: tuple[Node, ...]) -> Kernel:
    """The kernel `made` for what stands for these `tensors`, as it reads them; what it gives is as it was."""
    stands = t.turned.stands
    place = {stands[s]: i for i, s in enumerate(t.s.tensors)}
    order = [place[x] for x in tensors]
    shapes = [_as_first(t, s, shape) for s, shape in zip(t.s.tensors, made.shapes, strict=True)]
    return replace(
        made,
        operands=tuple(made.operands[i] for i in order),
        layouts=layouts(t.turned.images, tensors),
        sizes=tuple(_read_off(t, tensors, *named) for named in made.sizes),
        dtypes=tuple(n.dtype for n in tensors),
        shapes=tuple(shapes[i] for i in order),
    )


def layouts(images: Collection[Node], tensors: tuple[Node, ...]) -> tuple[str, ...]:
    """How a kernel has its operands, of which these `images` have their channels last."""
    return tuple("channels_last" if n in images else "contiguous" for n in tensors)


def of_images(made: Kernel, views: tuple[Node, ...], tensors: tuple[Node, ...]) -> Kernel:
    """The kernel `made` for views of rows, of images whose channels lie last where `tensors` are no such views."""
    images = [i for i, (view, x) in enumerate(zip(views, tensors, strict=True)) if view is not x]
    shapes = [(s[0], s[-1], *s[1:-1]) if i in images else s for i, s in enumerate(made.shapes)]
    sizes = [(name, i, (0, *range(2, views[i].ndim), 1)[d] if i in images else d) for name, i, d in made.sizes]
    lie = layouts([tensors[i] for i in images], tensors)
    return replace(made, layouts=lie, shapes=tuple(shapes), sizes=tuple(sizes))


def _is_turned(t: Reduction | TurnedStatistics, node: Node) -> bool:
    """Whether what stands for an operand, or a result, has its dimensions in the other order."""
    real = t.turned.stands.get(node)
    return node.ndim == t.s.value.ndim and (real is None or real.shape != node.shape or real in t.turned.images)


def _as_first(t: Reduction | TurnedStatistics, node: Node, shape: tuple[Expression, ...]) -> tuple[Expression, ...]:
    """The shape of an operand, or of a result, with its channels first."""
    real = t.turned.stands.get(node)
    if not _is_turned(t, node):
        return shape
    found = (shape[0], shape[-1], *shape[1:-1])
    return found if real is None else found[len(found) - real.ndim :]


def _read_off(
    t: Reduction | TurnedStatistics, tensors: tuple[Node, ...], size: str, i: int, d: int
) -> tuple[str, int, int]:
    """Where a call shows a size."""
    stand_in = t.s.tensors[i]
    real = t.turned.stands[stand_in]
    if _is_turned(t, stand_in):
        d = (0, *range(2, stand_in.ndim), 1)[d] - (stand_in.ndim - real.ndim)
    return size, tensors.index(real), d


# ---- norms


def of_norm(
    t: TurnedNorm, name: str, names: Mapping[Node, str], lengths: list[Expression], reads: Mapping[Node, str]
) -> Kernel:
    """The launches of a norm whose operands have these `names`, and x these `lengths`; `reads` names what the stream
    that normalises reads."""
    n = t.n
    statistics = {s: n.statistics[s] for s in n.behind.tensors if s in n.statistics}
    sums = _Statistics(t, f"{name}_statistics", names, lengths)
    behind = _Normalised(t, name, {**reads, **statistics}, lengths, sums)
    rows = f"({lengths[0]}) * ({lengths[1]})"
    return behind_statistics(sums, behind, statistics, rows, "statistics of channels, {}; the rest, tile by tile, {}")


class _Statistics(WriterOfSeveral):
    """Those of channels, or of groups of them; and the values of x, for whoever normalises them."""

    def __init__(self, t: TurnedNorm, name: str, names: Mapping[Node, str], lengths: list[Expression]) -> None:
        own = {s: names[t.turned.stands[s]] for s in t.sums.tensors}
        super().__init__(t.sums, name, own, [lengths[0], *lengths[2:], lengths[1]])
        self.t = t
        if t.merged > 1 and self.shape.parts is None:  # a group's channels are joined by the launch that joins parts
            self.shape = replace(self.shape, parts="1")

    def outputs(self) -> dict[str, str]:
        return {name: compute_type(s.dtype) for s, name in self.t.n.statistics.items()}

    def tails(self) -> Lines:
        n, outputs = self.t.n, self.outputs()
        element = outputs[SCALE]
        assert isinstance(n.op, ops.Norm)
        lines = fill(
            normalization_text.WRITE,
            outputs=", ".join(f"{e}* {name}" for name, e in outputs.items()),
            S=element,
            count=self.count(),
            epsilon=repr(epsilon(n.op, n.norm)),
            center=[f"const {element} own_center = {element}(fold.mean());"],
            channels=n.split,
            write_center=["center[channel] = own_center;"],
        )
        return [*lines, "", *self._taken(), ""]

    def finish_body(self) -> Lines:
        if self.t.merged == 1:
            return super().finish_body()
        results = " * ".join(f"n{a}" for a in self.results)
        return fill(text.FINISH_GROUPS, merged=self.t.merged, results=results, names=", ".join(self.outputs()))

    def _later(self, about: str, signature: Lines, body: Lines, *, parts: bool = True) -> Lines:
        """The parts of groups are joined otherwise than those of single results."""
        return super()._later(about, signature, body, parts=parts and self.t.merged == 1)

    def _taken(self) -> Lines:
        """The function that gives x of neighbouring channels at one position."""
        spatial = self.axes["first"]
        head = "void taken(const Data& d, index_t sample, index_t position, index_t channel, "
        body = [f"const index_t i0 = sample, i{self.last} = channel;", *decode("position", spatial, "")]
        body += [f"values<WIDE>(d, {self._coordinates}, value);"]
        about = ["// x of neighbouring channels.", "template <bool WIDE>", "__device__ __forceinline__"]
        return [*about, *block(f"{head}{self.values.compute} (&value)[VALUES<WIDE>])", body)]

    def reads_wide(self, channels: int) -> bool:
        """Whether loads of 16 bytes fit: operands begin where those do."""
        return self.wide is not None and channels % self.wide.values == 0


class _Normalised(Writer):
    """Writes the launch that normalises x tile by tile."""

    def __init__(
        self, t: TurnedNorm, name: str, names: dict[Node, str], lengths: list[Expression], sums: _Statistics
    ) -> None:
        super().__init__(t.n.behind, name, names, lengths)
        self.t, self.sums, self.lengths_of_x = t, sums, lengths
        channels, size = t.n.norm.shape[1], max(i.dtype.itemsize for i in t.turned.images)
        assert isinstance(channels, int)
        self.read = sums.wide.values if sums.wide is not None and sums.reads_wide(channels) else 1
        tiles = ceil_div(channels, MOST_CHANNELS[size])
        self.channels = ceil_div(ceil_div(channels, tiles), self.read) * self.read
        self.down = ceil_div(channels, self.channels)
        self.positions = max(32, 1 << (TILE[size] // self.channels).bit_length() - 1)
        self.of_all = channels
        area = prod(n if isinstance(n, int) else 0 for n in t.n.norm.shape[2:])
        values = gcd(area, self.wide.values) if self.wide else 1  # rows seldom are a whole number of 16 bytes
        self.wide = Widths(values, values) if values > 1 else None
        most = prod(map(hint, t.n.norm.shape)) + 2 * self.positions * self.channels
        self.index = "int" if 2 * most < 2**31 else "long long"

    # ---- sizes

    @property
    def area(self) -> Expression:
        """The number of positions."""
        return " * ".join(f"({n})" for n in self.lengths_of_x[2:])

    def numbers(self) -> list[str]:
        return [*super().numbers(), *self._of_sums()]

    def _of_sums(self) -> list[str]:
        """The lengths of the axes along which x is read."""
        return [f"k{a}" for a in self.sums.all]

    def lengths(self) -> list[Expression]:
        return [*super().lengths(), *self.sums.lengths()]

    def data(self) -> Lines:
        lines = super().data()
        more = f"index_t {', '.join(self._of_sums())};  // lengths of the axes along which x is read"
        return [*lines[:-1], *indent([more]), lines[-1]]

    def _launches(self) -> tuple[Launch, ...]:
        arguments = self._arguments(*(Argument("pointer", name) for name in self.outputs()))
        blocks = f"({self.lengths_of_x[0]}) * {self.down} * ceil_div({self.area}, {self.positions})"
        return (Launch(self.name, arguments, (blocks, "1", "1"), THREADS),)

    def kernel(self, reference: str) -> Kernel:
        counts = self._counts() if self.index == "int" else ()
        launches = self._launches()
        return self.record(source="", scratch=(), launches=launches, reference=reference, notes=(), counts=counts)

    # ---- the text

    def body(self, *, tools: bool = True) -> str:
        wide = self.wide.values if self.wide else 1
        lines = [f"using index_t = {self.index};", f"using count_t = unsigned {self.index};  // divides faster"]
        lines += [f"constexpr int THREADS = {THREADS}, CHANNELS = {self.channels}, POSITIONS = {self.positions};"]
        lines += [f"constexpr int ALL = {self.of_all}, DOWN = {self.down};  // channels, and tiles of them"]
        lines += [f"constexpr int READ = {self.read};  // channels that a thread reads together"]
        lines += ["// Positions that a thread writes together, in the wide variant and in the other."]
        lines += self._widths("VALUES", wide, 1)
        for section in (self.data(), self._normalised(), self._turned(), self._entry()):
            lines += ["", *section]
        return "\n".join(lines) + "\n"

    def _normalised(self) -> Lines:
        """The function that gives the results of neighbouring positions."""
        before, x = self.s.before, self.t.x
        assert before is not None
        below = topological([before.root], [x])
        own = [leaf for leaf in before.leaves if leaf in below]
        loads, given, element = self.values.loads("before", "VALUES<WIDE>", among=own)
        lines, value = tree(before, before.root, given | {x: "kept[e]"})
        body = [*loads, *for_each([*element, *lines, f"value[e] = {value};"])]
        parameters = [f"const {self._of_x} (&kept)[VALUES<WIDE>]"]
        parameters += [f"{compute_type(before.root.dtype)} (&value)[VALUES<WIDE>]"]
        return self._function("What becomes of neighbouring positions of x.", "normalised", parameters, body)

    @property
    def _of_x(self) -> str:
        return compute_type(self.t.x.dtype)

    def _turned(self) -> Lines:
        operands = [*dict.fromkeys(self.sums.names.values()), *(f"d.k{a}" for a in self.sums.all)]
        operands = [o if o.startswith("d.") else f"d.{o}" for o in operands]
        return fill(
            text.TURNED,
            T=self._of_x,
            R=compute_type(self.s.root.dtype),
            target=self._target(),
            operands=", ".join(operands),
            wide="true" if self.read > 1 else "false",
            positions=" * ".join(f"d.k{a}" for a in self.sums.axes["first"]),
            decode=self._decoded(),
            coordinates=self._coordinates,
        )

    def _decoded(self) -> Lines:
        """The coordinates of what a thread writes, from its sample, channel and position."""
        spatial = tuple(range(2, self.s.value.ndim))
        known = {(0,): "sample", (1,): "channel", (0, 1): "sample * ALL + channel", spatial: "position"}
        if all(axis.dims in known for axis in self.s.axes):
            return [f"const index_t i{a} = {known[axis.dims]};" for a, axis in enumerate(self.s.axes)]
        return decode("place", self.all, "")

    def _entry(self) -> Lines:
        call = f"turned<%s>(d, {', '.join(self.outputs())});"
        members = [*dict.fromkeys(self.names.values()), *self.numbers()]
        lines = ["await_launches();", f"const Data d{{{', '.join(members)}}};"]
        if self.wide:
            area = " * ".join(f"k{a}" for a in self.sums.axes["first"])
            tests = [f"{area} % VALUES<true> == 0", *self._conditions()]
            lines += [f"if ({' && '.join(tests)})", f"    {call % 'true'}", "else", f"    {call % 'false'}"]
        else:
            lines += [call % "false"]
        head = 'extern "C" __global__ void __launch_bounds__(THREADS)'
        return [head, *self._signature(self.name, *self._written()), *indent(lines), "}"]
