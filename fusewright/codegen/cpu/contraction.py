"""C++ of contraction groups on a CPU: a convolution's output stays in the cache of the core that computed it.

A task is a strip of results of one sample.  The input that it reads is staged in float32 with zeros around the image
(or as window sums); then, for one block of output features after another, tiles of the convolution are added up in
registers, features along the lanes of vectors, and what follows runs on a band of positions (`contraction_epilogue`).
The text lies in `contraction_text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any

import torch

from fusewright.codegen.contraction_shapes import layouts, shapes
from fusewright.codegen.contraction_sizes import lengths, sizes, written
from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cpu import contraction_epilogue_text as epilogue_texts
from fusewright.codegen.cpu import contraction_text as texts
from fusewright.codegen.cpu.contraction_epilogue import DIMENSIONS, Epilogue, operands
from fusewright.codegen.cpu.contraction_stage import Staging
from fusewright.codegen.cpu.elements import read
from fusewright.codegen.cpu.sample import program_work
from fusewright.codegen.cpu.text import function, source
from fusewright.codegen.text import Lines, block, fill, indent
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.schedule.axes import Axis
from fusewright.schedule.contraction import MOST_ELEMENTS, Contraction
from fusewright.schedule.group import sizes as sizes_of
from fusewright.schedule.strips import Strips, candidates, features, groups, is_channelwise, pooling, span

# So many ways to cut a group are worth measuring.
WORTH_MEASURING = 4
# Positions that share the weights of a chunk.
ENOUGH = 64
# A matrix product per sample of a larger matrix is the library's: it reads the matrix once for all samples.
LARGEST_MATRIX = 32 * 1024


def options(c: Contraction, hints: Mapping[Any, int], layouts: Mapping[Node, str]) -> list[dict[str, Any]]:
    """Ways to cut a group, best guess first; none where this family does not take it."""
    spatial = set(range(2, c.conv.ndim))
    if c.fold is not None and set(c.fold.op.dims) not in ({1}, spatial, {1} | spatial):
        return []
    if (
        c.shares is not None
        or c.last is not None
        or (c.tail is not None and any(_is_large_product(n) for n in c.tail.inner))
    ):
        return []
    if prod(sizes_of(c.x, hints)[1:]) > MOST_ELEMENTS:
        return []
    last = layouts.get(c.x) == "channels_last" and c.takes_channels_last
    if any(layouts.get(n, "contiguous") != ("channels_last" if last else "contiguous") for n in c.elements):
        return []  # a copy would cost what there is to gain
    samples, _, *positions = sizes_of(c.window.node if c.window is not None else c.conv, hints)
    found = candidates(c.in_format(last=last), c.along_axes(positions), samples)[:WORTH_MEASURING]
    return [{"strips": {**asdict(s), "strip": list(s.strip)}, "channels_last": last} for s in found]


def _is_large_product(node: Node) -> bool:
    sides = node.arg(1).shape if isinstance(node.op, ops.Matmul) else ()
    return bool(sides) and prod(int(n) for n in sides) > LARGEST_MATRIX


def generate(c: Contraction, option: dict[str, Any], name: str, reference: str) -> Kernel:
    """The kernel of a group for one of its options."""
    strips = Strips(**{**option["strips"], "strip": tuple(option["strips"]["strip"])})
    return kernel(c.in_format(last=option["channels_last"]), strips, name, reference)


def kernel(c: Contraction, strips: Strips, name: str, reference: str) -> Kernel:
    """The kernel of a group, cut into `strips`."""
    return _Writer(c, strips, name, reference).kernel()


@dataclass(frozen=True)
class _Writer:
    c: Contraction
    s: Strips
    name: str
    reference: str

    @cached_property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.c)

    @cached_property
    def staging(self) -> Staging:
        return Staging(self.c)

    @cached_property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """Of positions, without the pooling."""
        return self.c.plain_axes

    @cached_property
    def _operands(self) -> dict[Node, str]:
        """What the first entry reads."""
        return {n: name for n, name in operands(self.c).items() if n not in self.epilogue.read_by_tail}

    @property
    def tasks(self) -> str:
        """Tasks of one strip of one sample: groups and parts of a group's features."""
        return "1" if self.epilogue.kind == "channels" else "GROUPS * PARTS"

    # -- the record --------------------------------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        c, e = self.c, self.epilogue
        into, conv, cells = lengths(c)
        out, spatial = conv if c.window is None else cells, written(c)
        strips = " * ".join(f"ceil_div({out[a]}, {k})" for a, k in zip(DIMENSIONS, self.s.strip, strict=True))
        names = tuple(operands(c).values())
        target = "partial" if e.partial else "out"
        flops = f"N * {' * '.join(conv.values())} * {c.features * c.op.groups * c.channels * self._taps}"
        numbers = ["N", *into.values(), *conv.values(), *out.values()]
        arguments = (
            *(Argument("pointer", p) for p in (*self._operands.values(), "packed", target)),
            *(Argument("int", text) for text in numbers),
            Argument("threads", flops),
        )
        scratch = [Array("packed", (str(self._packed),), self._compute)]
        launches = [Launch(self.name, arguments, ("N", "1", "1"))]
        if e.partial:
            splits = strips if e.kind == "positions" else f"{strips} * {groups(c) * self.s.parts}"
            scratch.append(Array("partial", ("N", splits, str(e.rows * e.planes)), torch.float64))
            launches.append(self._finish(splits, spatial))
        return Kernel(
            name=self.name,
            source=self.source(),
            operands=names,
            layouts=layouts(c),
            dtypes=tuple(n.dtype for n in c.tensors),
            shapes=shapes(c),
            sizes=sizes(c),
            output=self._output(spatial),
            scratch=tuple(scratch),
            launches=tuple(launches),
            reference=self.reference,
            target="cpu",
        )

    def _finish(self, splits: str, spatial: list[str]) -> Launch:
        """The call that joins the parts of reductions."""
        c, e = self.c, self.epilogue
        count = Argument("long", " * ".join([*spatial, *([str(c.features * c.op.groups)] if e.kind == "all" else [])]))
        entry, partial, out = f"{self.name}_finish", Argument("pointer", "partial"), Argument("pointer", "out")
        if c.tail is None:
            sizes = (Argument("int", splits), Argument("int", str(e.rows)), Argument("long", f"N * {e.rows}"))
            return Launch(entry, (partial, out, *sizes, count))
        read = [Argument("pointer", operands(c)[n]) for n in c.tail_operands]
        work = Argument("threads", f"N * ({splits} * {e.rows} + {program_work(c.tail)})")
        return Launch(entry, (partial, *read, out, Argument("int", splits), Argument("long", "N"), count, work))

    @property
    def _compute(self) -> torch.dtype:
        return torch.float64 if compute_type(self.c.x.dtype) == "double" else torch.float32

    @property
    def _taps(self) -> int:
        return prod(a.taps for a in self.c.axes)

    @property
    def _packed(self) -> int:
        """Elements of the packed weight: every block of features is whole, for vectors of any width."""
        blocks = -(-features(self.c) // self.s.widest)
        return groups(self.c) * blocks * self.s.widest * self.c.channels * self._taps

    def _output(self, spatial: list[str]) -> Array:
        c, kind = self.c, self.epilogue.kind
        every, ones = str(c.features * c.op.groups), ["1"] * len(spatial)
        shape = ["N", "1" if kind in ("channels", "all") else every]
        shape += ones if kind in ("positions", "all") else spatial
        if c.tail is not None:
            shape = ["N", *map(str, c.root.shape[1:])]
        if c.tail is None and c.fold is not None and not c.fold.op.keepdim:
            shape = [d for i, d in enumerate(shape) if i not in c.fold.op.dims]
        return Array("out", tuple(shape), c.root.dtype, c.layout_written)

    # -- the text ----------------------------------------------------------------------------------------------------

    def source(self) -> str:
        e = self.epilogue
        sections = [
            self._constants(),
            self._call(),
            self._pack(),
            self._multiply(),
            self.staging.function(),
            fill(texts.ROWS, phases=self._convolve()),
            *e.declarations(),
            self._strip(),
            self._entry(),
            *e.finish(self.name),
        ]
        body = "\n\n".join("\n".join(section).strip("\n") for section in sections if section)
        return source("a convolution and what follows it, strip by strip.", self.name, body.split("\n"))

    def _constants(self) -> Lines:
        c, s = self.c, self.s
        names: dict[str, object] = {}
        spans, windows = [span(a) for a in self.axes], pooling(c)
        for i, a in enumerate(DIMENSIONS):
            kernel, stride, _ = windows[i]
            low, high = spans[i]
            names |= {f"taps_{a}": c.axes[i].taps, f"lowest_{a}": low, f"reach_{a}": high - low + 1}
            names |= {f"strip_{a}": s.strip[i], f"positions_{a}": (s.strip[i] - 1) * stride + kernel}
        lanes = 1 << max(features(c) - 1, 3 if self._compute == torch.float32 else 1).bit_length()
        phases = [line for i in range(3) for line in self._phases(i)]
        channelwise = is_channelwise(c)
        return fill(
            texts.CONSTANTS,
            element=ELEMENT[c.x.dtype],
            compute=compute_type(c.x.dtype),
            about="each feature reads the channels of its group" if channelwise else "of a group, in and out",
            channels=c.channels,
            features=features(c),
            groups=groups(c),
            lanes=lanes,
            vectors=s.vectors,
            parts=self.s.parts,
            phases=phases,
            turning=fill(texts.TURNING) if self.staging.turns or self.epilogue.turns or self._packs_rows else [],
            pool=self._pool_constants(),
            steps=self.staging.layout(),
            together=s.together,
            chunk=s.chunk,
            staged=self.staging.size,
            at_hand="2 * VECTORS" if channelwise else "2",
            **names,
        )

    def _phases(self, i: int) -> Lines:
        axis, a = self.axes[i], DIMENSIONS[i].upper()
        several = next((p for p in axis.phases if len(p.taps) > 1), None)
        between = several.taps[1] - several.taps[0] if several else 1
        numbers = {"A": a, "stride": axis.stride, "advance": axis.advance, "between": between}
        rows, before = [], 0
        for p in axis.phases:
            rows.append(f"{{{p.first}, {len(p.taps)}, {p.taps[0] if p.taps else 0}, {before}}}")
            before += len(p.taps)
        step = several.per_tap if several else 1
        return [
            *fill(texts.PHASES, step=step, **numbers),
            f"constexpr Phase PHASES_{a}[STRIDE_{a}] = {{{', '.join(rows)}}};",
        ]

    def _pool_constants(self) -> Lines:
        if self.c.window is None:
            return []
        names: dict[str, object] = {}
        for a, (kernel, stride, pad) in zip(DIMENSIONS, pooling(self.c), strict=True):
            names |= {a: kernel, f"stride_{a}": stride, f"pad_{a}": pad}
        padding = fill(epilogue_texts.POOL_PADDING, **names) if self.epilogue.clipped else []
        return [*fill(epilogue_texts.POOL_CONSTANTS, **names), *padding]

    @property
    def band(self) -> tuple[int, int]:
        """Results along d and h that are computed together: all where windows overlap, and as many positions as the
        weights of a chunk of channels are worth fetching for."""
        depth, height, width = self.s.strip
        if self.c.window is not None:
            d, h = (s if k > t else 1 for s, (k, t, _) in zip(self.s.strip, pooling(self.c)[:2], strict=False))
            return d, h
        if self.s.chunk >= self.c.channels:
            return 1, 1
        h = min(height, ceil(ENOUGH / width))
        return min(depth, ceil(ENOUGH / (h * width))) if h == height else 1, h

    def _call(self) -> Lines:
        """What a call is given."""
        c, e = self.c, self.epilogue
        lines = [
            "",
            "// What a call works on: tensors, and lengths of the input, the convolution's output and the result.",
        ]
        fields = [f"const {ELEMENT[n.dtype]}* {name};" for n, name in self._operands.items() if n is not c.conv.arg(1)]
        fields += ["const Compute* packed;", "double* partial;" if e.partial else "Result* out;"]
        fields += ["int in_d, in_h, in_w, conv_d, conv_h, conv_w, out_d, out_h, out_w;"]
        result = [f"using Result = {ELEMENT[c.root.dtype]};"]
        return ["", *result, *lines, "struct Call {", *indent(fields), "};", *self._bands()]

    def _bands(self) -> Lines:
        d, h = self.band
        parts = [f"constexpr int PARTS = {self.s.parts}, PART = ceil_div(BLOCKS, PARTS);    // of the features' blocks"]
        bands = [
            "// A band of results, and the rows of positions that it needs.",
            f"constexpr int BAND_D = {d}, BAND_H = {h};",
        ]
        if self.c.window is None:
            return ["", *parts, *bands, "constexpr int ROWS_D = BAND_D, ROWS_H = BAND_H;"]
        return ["", *parts, *bands,
                "constexpr int ROWS_D = (BAND_D - 1) * POOL_STRIDE_D + POOL_D;",
                "constexpr int ROWS_H = (BAND_H - 1) * POOL_STRIDE_H + POOL_H;"]  # fmt: skip

    def _pack(self) -> Lines:
        c = self.c
        if self._packs_rows:
            return fill(texts.PACK_ROWS, weight=read("row[lane][c + n]", c.conv.arg(1).dtype))
        first, at = "(group * FEATURES + first_feature) * CHANNELS + c", "at + f * (CHANNELS * TAPS)"
        if c.op.transposed:
            first, at = "(group * CHANNELS + c) * FEATURES + first_feature", "at + f * TAPS"
        if c.op.transposed and is_channelwise(c):  # channels before features, in each group
            first = f"c * {c.features}"
            own = f"(first_feature + f) / {c.features} * {c.channels * c.features} + (first_feature + f) % {c.features}"
            at = f"at + ({own}) * TAPS"
        return fill(texts.PACK, first=first, weight=read(f"w[{at}]", c.conv.arg(1).dtype))

    @property
    def _packs_rows(self) -> bool:
        """Whether the weights of a feature lie side by side in the order in which they are used."""
        return self._taps == 1 and not self.c.op.transposed and not is_channelwise(self.c)

    def _multiply(self) -> Lines:
        if is_channelwise(self.c):
            return fill(texts.MULTIPLY, value=fill(texts.VALUES), factor="value[v]")
        return fill(texts.MULTIPLY, value=fill(texts.VALUE), factor="value")

    def _convolve(self) -> Lines:
        phases = self.axes[2].phases
        if len(phases) == 1:
            return fill(texts.ROW)
        return [line for i in range(len(phases)) for line in fill(texts.ROW_PHASE, phase=i)]

    def _strip(self) -> Lines:
        c, e = self.c, self.epilogue
        last = "" if self.s.chunk >= self.c.channels else "if (chunk + CHUNK >= CHANNELS) "
        before = [e.call_of("before", "row", "to_w - from_w")] if e.has_before else []
        if e.beside:
            read = e.beside_of("((long long)i * call.conv_h + j) * call.conv_w + from_w", "to_w - from_w")
            before = block("", [*read, *before])
        before[:1] = [f"{last}{line}" for line in before[:1]]
        after = [e.call_of("after", "results", "count")] if self.c.after is not None else []
        # Where each tap along d and h reads the image; of window sums, there is one wherever a tap reads.
        along = {f"along_{a}": f"left_{a} + row_{a}, STEP_{a.upper()}, call.in_{a}" for a in "dh"}
        bands = fill(
            texts.BANDS,
            **(along if self.c.box is None else dict.fromkeys(along, "0, 0, 1")),
            rows=self._positions("band", "begin", "end")[:2],
            before=before,
            results=fill(texts.POSITIONS) if c.window is None else e.of_window(),
            after=after,
            take=e.take(),
        )
        channels = e.kind == "channels"
        own = "sample, " if c.of_samples else ""
        opened = [f"const Channels of(call, {own}first_feature, features);"] if e.channel_operands else []
        group = fill(
            texts.GROUP,
            group_of_x=self.staging.group_of_x(),
            **self.staging.call(),
            open_block=[*opened, *e.open_block()],
            bands=bands,
            close_block=e.close_block(),
        )  # fmt: skip
        open_strip = ["own.over.assign(STRIP_D * STRIP_H * OVER, Folds(LANES));"] if channels else []
        open_strip += ["Fold all;"] if e.kind == "all" else []
        return fill(
            texts.STRIP,
            over=[*(["std::vector<Folds> over;"] if channels else []), *e.scratch()],
            one_group=[] if channels else fill(texts.ONE_GROUP),
            positions=self._positions("first", "from", "to"),
            open_strip=open_strip,
            groups=[f"{texts.ALL_GROUPS} {{", *indent(group), "}"] if channels else group,
            close_strip=e.close_strip(),
        )

    def _positions(self, of: str, begin: str, end: str) -> Lines:
        """The positions that results [of_d, last_d) and so on need."""
        lines = []
        for a in DIMENSIONS:
            first, last = (f"first_{a}", f"last_{a}") if of == "first" else (f"band_{a}", f"last_band_{a}")
            if self.c.window is None:
                lines.append(f"const int {begin}_{a} = {first}, {end}_{a} = {last};")
                continue
            A = a.upper()
            low, high = f"{first} * POOL_STRIDE_{A}", f"({last} - 1) * POOL_STRIDE_{A} + POOL_{A}"
            if self.epilogue.clipped:
                low = f"larger({low} - POOL_PAD_{A}, 0)"
                high = f"smaller({high} - POOL_PAD_{A}, call.conv_{a})"
            lines.append(f"const int {begin}_{a} = {low}, {end}_{a} = {high};")
        return lines

    def _entry(self) -> Lines:
        c, e = self.c, self.epilogue
        pointers = [f"const {ELEMENT[n.dtype]}* {name}" for n, name in self._operands.items()]
        target = ("double* partial", "partial") if e.partial else ("Result* out", "out")
        fields = [name for n, name in self._operands.items() if n is not c.conv.arg(1)]
        along = [f"{kind}_{a}" for kind in ("in", "conv", "out") for a in DIMENSIONS]
        body = fill(
            texts.ENTRY,
            fields=", ".join([*fields, "packed", target[1], *along]),
            tasks=self.tasks,
        )
        parameters = [*pointers, "Compute* packed", target[0], "int N", *(f"int {n}" for n in along), "int threads"]
        return function((f'extern "C" void {self.name}', parameters), body)
