"""What happens to a strip of a convolution's output on a CPU: pointwise trees, pooling, reduction, writing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cpu import contraction_epilogue_text as texts
from fusewright.codegen.cpu.elements import read, written
from fusewright.codegen.cpu.folds import PLANES, fold
from fusewright.codegen.cpu.loops import LaneScalars, attempt, calls, lanes, procedure, repeated
from fusewright.codegen.cpu.sample import sample_program
from fusewright.codegen.cpu.text import function
from fusewright.codegen.text import Lines, block, fill
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.chain import Map
from fusewright.schedule.contraction import Contraction

DIMENSIONS = "dhw"
# How a window takes values in: its name, what it starts with, what joins {0}; a maximum and a minimum keep a NaN.
_WINDOWS = {
    "avg": ("mean", "0", "{0} + value"),
    "max": ("maximum", "-Compute(INFINITY)", "value > {0} || value != value ? value : {0}"),
    "min": ("minimum", "Compute(INFINITY)", "value < {0} || value != value ? value : {0}"),
}


def operands(c: Contraction) -> dict[Node, str]:
    """Pointer names of the tensors a call passes, none of a user's making."""
    names: dict[Node, str] = {c.x: "x", c.conv.arg(1): "w"}
    if c.conv.args[2] is not None:
        names[c.conv.args[2]] = "bias"
    for i, node in enumerate(n for n in c.tensors if n not in names):
        names[node] = f"{'parameter' if isinstance(node.op, ops.Param | ops.Buffer) else 'operand'}_{i + 1}"
    return {n: names[n] for n in c.tensors}


@dataclass(frozen=True)
class Epilogue:
    """Writes the text that follows the multiplication."""

    c: Contraction

    @property
    def kind(self) -> str:
        """What of the output is reduced (`Contraction.reduced`)."""
        return self.c.reduced

    @property
    def partial(self) -> bool:
        """Whether strips leave parts of reductions, which are joined at the end."""
        return self.kind in ("positions", "all")

    @property
    def planes(self) -> int:
        """float64 numbers of a part of a reduction."""
        assert self.c.fold is not None
        return PLANES[self.c.fold.op.kind]

    # -- declarations ------------------------------------------------------------------------------------------------

    @cached_property
    def channel_operands(self) -> tuple[Node, ...]:
        """What the trees read that holds one number per channel, the bias among it."""
        return tuple(n for n in self._read if any(d != 1 for d in n.shape) and n not in self.c.elements)

    @cached_property
    def beside(self) -> dict[Node, str]:
        """Where what they read that has a number for every element is, at a row of results: [position][BLOCK]."""
        return {n: f"{operands(self.c)[n]}_here" for n in self.c.elements}

    @cached_property
    def _read(self) -> tuple[Node, ...]:
        bias = self.c.conv.args[2]
        return tuple(dict.fromkeys([*([bias] if bias is not None else []), *self.c.operands]))

    def declarations(self) -> list[Lines]:
        """The numbers per channel of a block of features, the pointwise trees, pooling and reduction."""
        names = operands(self.c)
        sections: list[Lines] = []
        if self.channel_operands:
            fields = ", ".join(f"{names[n]}_at[BLOCK]" for n in self.channel_operands)
            of_sample = dict.fromkeys(self.c.of_samples, "sample * (GROUPS * FEATURES) + feature")
            each = [(names[n], self._element(n, of_sample.get(n, "feature"))) for n in self.channel_operands]
            loads = [f"{name}_at[f] = inside ? {number} : 0;" for name, number in each]
            sample = "long long sample, " if of_sample else ""
            sections.append(fill(texts.CHANNEL_NUMBERS, fields=fields, loads=loads, sample=sample))
        sections += map(self._read_beside, self.beside)
        for label, tree in self._trees.items():
            if tree is not None or (label == "before" and self.shifted):
                sections.append(self._function(label, tree))
        if self.c.window is not None:
            sections.append(self._pool())
        if self.turns and self.kind == "store":
            sections.append(fill(texts.TURN_BACK, value=written("turned[i][lane]", self.c.root.dtype)))
        if self.c.fold is not None:
            op, dtype = self.c.fold.op, self.c.fold.node.dtype
            blocks = self.partial or self.kind == "channels"
            width = "LANES" if self.kind == "channels" else "BLOCK"
            text = fold(op, "Fold", "Compute", compute_type(dtype), blocks=blocks, width=width)
            sections.append(text.split("\n"))
            if self.partial:
                sections[-1] += [f"constexpr int PLANES = {self.planes};    // float64 numbers of a saved fold"]
            if self.kind == "channels":
                sections[-1] += ["constexpr int OVER = ceil_div(STRIP_W, LANES);    // folds of a row of results"]
                sections.append(fill(texts.TAKE_FEATURES))
        return sections

    @property
    def _trees(self) -> dict[str, Map | None]:
        """The pointwise trees by the names of their functions."""
        return {"before": self.c.before, "at_end": self.c.ends, "after": self.c.after}

    @property
    def shifted(self) -> bool:
        """Whether the products need a bias or a scale before anything else."""
        return self.c.conv.args[2] is not None or self.c.box is not None

    @property
    def has_before(self) -> bool:
        return self.c.before is not None or self.shifted

    def _element(self, node: Node, at: str) -> str:
        text = read(f"call.{operands(self.c)[node]}[{at}]", node.dtype)
        return text if compute_type(node.dtype) == compute_type(self.c.x.dtype) else f"Compute({text})"

    def _read_beside(self, node: Node) -> Lines:
        """The function that reads what an operand has at a row of results."""
        names = {"name": operands(self.c)[node], "type": ELEMENT[node.dtype]}
        if self.c.channels_last:
            return fill(texts.READ_BESIDE_CHANNELS_LAST, **names, value=read("from[f]", node.dtype))
        turned = read("from[lane * plane + n + i]", node.dtype)
        return fill(texts.READ_BESIDE, **names, turned=turned, value=read("from[f * plane + n]", node.dtype))

    def beside_of(self, at: str, count: str) -> Lines:
        """Statements that read what operands have at so many positions from `at` on, of the sample's results."""
        if not self.beside:
            return []
        reads = [
            f"read_{operands(self.c)[n]}(call.{operands(self.c)[n]} + at, features, {count}, plane, "
            f"own.{here}.data()->at);"
            for n, here in self.beside.items()
        ]
        place = texts.AT_CHANNELS_LAST if self.c.channels_last else texts.AT
        return [*fill(place, at=at), *reads]

    def _access(self, node: Node) -> str:
        if node in self.beside:
            return f"{self.beside[node]}[f]"
        if node in self.channel_operands:
            return f"of.{operands(self.c)[node]}_at[f]"
        return self._element(node, "0")

    def _statements(self, label: str, tree: Map | None) -> Lines:
        """What a pointwise tree makes of element f of a row."""
        start, inner = "value", ["const Compute value = row[f];"]
        if label == "before" and self.shifted:
            bias, box = self.c.conv.args[2], self.c.box
            scaled = "value" if box is None else f"value * Compute({box.scale!r})"
            inner.append(f"const Compute shifted = {scaled}{'' if bias is None else f' + {self._access(bias)}'};")
            start = "shifted"
        result = start
        if tree is not None:
            # Operands are read from memory, those that a pointwise function of parameters gave as well.
            given = {n: self._access(n) for n in self.c.operands} | {tree.value: start}
            scalars = LaneScalars(given, self._access)
            result = scalars.value(tree.root)
            inner += scalars.lines
        return [*inner, f"row[f] = {result};"]

    def _function(self, label: str, tree: Map | None) -> Lines:
        """A function that applies a pointwise tree to a row of positions."""
        behind = {"before": "the convolution", "at_end": "what is greatest or least in windows", "after": "the pooling"}
        about = f"// What follows {behind[label]}, on `count` positions."
        loop = lanes("for (int f = 0; f < BLOCK; ++f)", self._statements(label, tree), "f")
        beside = list(self.beside.values()) if label == "before" else []
        first = [("const Call&", "call"), *([("const Channels&", "of")] if self.channel_operands else [])]
        first += [("const Compute* __restrict", here) for here in beside]
        on = "".join(f", {here} += BLOCK" for here in beside)
        rest = [("Compute* __restrict", "row"), ("int", "count")]
        if not calls(loop):
            rows = block(f"for (int n = 0; n < count; ++n, row += BLOCK{on})", loop)
            return ["", *procedure(about, label, [*first, *rest], rows)]
        rest += [("int", "features")]
        loop = [line.replace("= row[f];", "= given[f];") for line in loop]
        rows = block(f"for (int n = 0; n < count; ++n, given += BLOCK, row += BLOCK{on})", loop)
        kept = [*first, ("const Compute* __restrict", "given"), *rest]
        here = [f"{name} + n * BLOCK" for name in beside]
        again = repeated(label, [*self.arguments, *here, "given", "row", "some", "features"])
        return [
            "",
            *attempt(about, label, kept, rows, "features"),
            "",
            *procedure(about, label, [*first, *rest], fill(texts.KEPT, again=again)),
        ]

    def call_of(self, label: str, row: str, count: str) -> str:
        """The statement that applies a tree to a row; only features that there are may have rare arguments."""
        quick = calls(self._statements(label, self._trees[label]))
        here = [f"own.{here}.data()->at" for here in self.beside.values()] if label == "before" else []
        arguments = [*self.arguments, *here, row, count, *(["features"] if quick else [])]
        return f"{label}({', '.join(arguments)});"

    @property
    def arguments(self) -> list[str]:
        """What the functions of pointwise trees are called with first."""
        return ["call", "of"] if self.channel_operands else ["call"]

    # -- pooling -----------------------------------------------------------------------------------------------------

    @property
    def clipped(self) -> bool:
        """Whether windows may reach beyond the convolution's output."""
        assert self.c.window is not None
        op = self.c.window.op
        return op.ceil_mode or any(op.padding)

    def _pool(self) -> Lines:
        assert self.c.window is not None
        op = self.c.window.op
        # Where what is found goes, and what it is called on the way there.
        found = {"results": ("best", op.kind)}
        if self.c.ends is not None:
            found |= {"least": ("lowest", "min")}
        bounds: Lines = []
        for i, a in enumerate(DIMENSIONS):
            start = f"{('d', 'h', '(w + n)')[i]} * POOL_STRIDE_{a.upper()}"
            if self.clipped:
                A = a.upper()
                bounds.append(f"const int start_{a} = {start} - POOL_PAD_{A}, stop_{a} = start_{a} + POOL_{A};")
                bounds.append(f"const int begin_{a} = larger(start_{a}, 0) - from_{a};")
                bounds.append(f"const int end_{a} = smaller(stop_{a}, call.conv_{a}) - from_{a};")
            else:
                bounds.append(f"const int begin_{a} = {start} - from_{a}, end_{a} = begin_{a} + POOL_{a.upper()};")
        share = self._share()
        kinds = [_WINDOWS[kind][0] for _, kind in found.values()]
        return fill(
            texts.POOL,
            kind=" and the ".join(kinds),
            results=" and ".join(f"{to}[count][BLOCK]" for to in found),
            pointers=", ".join(f"Compute* __restrict {to}" for to in found),
            next=", ".join(f"{to} += BLOCK" for to in found),
            bounds=bounds,
            running=", ".join(f"{name}[BLOCK]" for name, _ in found.values()),
            start=", ".join(f"{name}[f] = {_WINDOWS[kind][1]}" for name, kind in found.values()),
            join=[f"{name}[f] = {_WINDOWS[kind][2].format(f'{name}[f]')};" for name, kind in found.values()],
            share=[share] if share else [],
            result=", ".join(f"{to}[f] = {name}[f]{' * share' * bool(share)}" for to, (name, _) in found.items()),
        )

    def of_window(self) -> Lines:
        """Statements that make a row of results of the positions of a band."""
        if self.c.ends is None:
            return fill(texts.POOLED, ends="results")
        of_each = [self.call_of("at_end", row, "count") for row in ("results", "least")]
        own = "Compute* least = own.least.data()->at;"
        return [own, *fill(texts.POOLED, ends="results, least"), *of_each, *fill(texts.OF_ENDS)]

    def scratch(self) -> Lines:
        """What a thread has beside positions and results: rows of operands, and of what is least in windows."""
        sizes = dict.fromkeys(self.beside.values(), "PITCH")
        sizes |= {"least": "STRIP_W"} if self.c.ends is not None else {}
        return [f"std::vector<Line> {n} = std::vector<Line>(lines({size} * BLOCK));" for n, size in sizes.items()]

    def _share(self) -> str:
        """What one position of an average pooling window counts."""
        assert self.c.window is not None
        op, n = self.c.window.op, len(self.c.window.op.kernel)
        if op.kind != "avg":
            return ""
        if op.divisor is not None or not self.clipped:
            return f"constexpr Compute share = Compute(1.0 / {op.divisor or prod(op.kernel)});"
        terms = []
        for a in DIMENSIONS[3 - n :]:
            padded = f"(smaller(stop_{a}, call.conv_{a} + POOL_PAD_{a.upper()}) - start_{a})"
            terms.append(padded if op.count_include_pad else f"(end_{a} - begin_{a})")
        return f"const Compute share = Compute(1) / Compute({' * '.join(terms)});"

    # -- what becomes of a row of results ----------------------------------------------------------------------------

    @property
    def turns(self) -> bool:
        """Whether what lies feature by feature is written, or read, position by position."""
        return not self.c.writes_last and (self.kind == "store" or bool(self.beside))

    def take(self) -> Lines:
        """Statements for a row of results: `results[count][BLOCK]` at (d, h, first w) of features `first_feature`..."""
        match self.kind:
            case "positions" | "all":
                return ["total.take(results, BLOCK, count, BLOCK);"]
            case "channels":
                over = "Folds* over = own.over.data() + ((d - first_d) * STRIP_H + h - first_h) * OVER;"
                return [over, "take_features(results, count, features, over);"]
        place = texts.STORE if self.turns else texts.STORE_CHANNELS_LAST
        return fill(place, value=written("results[n * BLOCK + f]", self.c.root.dtype))

    def open_block(self) -> Lines:
        return ["Folds total(BLOCK);"] if self.partial else []

    def close_block(self) -> Lines:
        if self.kind == "positions":
            return fill(texts.LEAVE_POSITIONS)
        return ["for (int f = 0; f < features; ++f) all.merge(total.of(f));"] if self.kind == "all" else []

    def close_strip(self) -> Lines:
        if self.kind == "all":
            return ["all.save(call.partial + PLANES * task, 1);"]
        if self.kind == "channels":
            return fill(
                texts.LEAVE_CHANNELS, value=written("fold.result(double(GROUPS * FEATURES))", self.c.root.dtype)
            )
        return []

    # -- joining the parts -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Results of a reduction over positions per sample."""
        return self.c.features * self.c.op.groups if self.kind == "positions" else 1

    @property
    def read_by_tail(self) -> tuple[Node, ...]:
        """Operands that only the tail reads."""
        first = {self.c.x, self.c.conv.arg(1), self.c.conv.args[2], *self.c.operands}
        return tuple(n for n in self.c.tail_operands if n not in first)

    def finish(self, name: str) -> list[Lines]:
        """The function that joins the parts of reductions, in their order, and carries on per sample with a tail."""
        if not self.partial:
            return []
        if self.c.tail is None:
            value = written("value.result(count)", self.c.root.dtype)
            return [fill(texts.FINISH, name=name, value=value)]
        assert self.c.fold is not None
        names = operands(self.c)
        tail_names = {n: names[n] for n in self.c.tail_operands}
        joins, body = sample_program(self.c.tail, {self.c.fold.node: "folded"}, tail_names, "sample")
        pointers = [f"const {ELEMENT[n.dtype]}* {name}" for n, name in tail_names.items()]
        parameters = ["const double* partial", *pointers, "Result* out", "int splits", "long long N"]
        head = (f'extern "C" void {name}_finish', [*parameters, "long long count", "int threads"])
        compute = compute_type(self.c.fold.node.dtype)
        loop = fill(texts.FINISH_SAMPLE, rows=self.rows, compute=compute, body=body)
        return [joins, function(head, loop)]
