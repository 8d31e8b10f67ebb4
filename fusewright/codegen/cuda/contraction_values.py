"""What both kinds of contraction kernels say of a value: bias and pointwise trees, and its share of an average."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fusewright.codegen.cpp import Scalars, compute_type
from fusewright.codegen.cuda import contraction_finish_text as texts
from fusewright.codegen.cuda.contraction_finish import Finish, operands
from fusewright.codegen.cuda.contraction_folds import JOININGS, OF_ENDS, Joining
from fusewright.codegen.cuda.loops import nest
from fusewright.codegen.text import Lines, block, fill
from fusewright.ir import build, ops, pointwise
from fusewright.ir.node import Node, topological
from fusewright.schedule.chain import Map, leaves

# Functions of an instruction or two, of which so many may be skipped one by one where a position is none.
LIGHT = frozenset(
    (
        *("relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "at_least", "at_most", "between"),
        *("abs", "neg", "square", "add", "sub", "mul", "maximum", "minimum"),
    )
)
FEW = 6


@dataclass(frozen=True)
class ValueText(Finish):
    """Writes the pointwise trees as lambdas of a value and of where its channel is."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The parameters that say that."""

    @abstractmethod
    def of_channel(self, name: str) -> str:
        """An operand's number for the channel at hand."""

    @property
    @abstractmethod
    def late(self) -> bool:
        """Whether the pointwise tree is evaluated on the way out of shared memory, by which values go to be written
        side by side: there their elements of operands are read side by side, too."""

    def head(self) -> list[Lines]:
        """Declarations of what follows the multiplication."""
        ends = [fill(texts.ENDS)] if self.c.ends is not None else []
        return [*super().head(), *ends, *([fill(texts.READ)] if self.beside else [])]

    @property
    def beside(self) -> list[str]:
        """The operands that have a number for every element, which is a parameter of its own."""
        return [name for node, name in self.read() if node in self.c.elements]

    @property
    def of_channels(self) -> list[str]:
        """Those that have a number per channel, of every sample's or of all."""
        return [name for node, name in self.read() if not is_one(node) and node not in self.c.elements]

    def of_sample(self, name: str) -> str:
        """Text: how far behind each other the numbers of samples are in an operand that has some per channel."""
        own = [name for node, name in self.read() if node in self.c.of_samples]
        return "(long long)sample * (GROUPS * O) + " if name in own else ""

    @property
    def scale(self) -> float | None:
        """What the products are to be scaled by."""
        return None

    @property
    def shifted(self) -> bool:
        """Whether the products need a bias or a scale before anything else."""
        return self.c.conv.args[2] is not None or self.scale is not None

    @property
    def changes(self) -> bool:
        """Whether there is a lambda ``before``: for what happens ahead of a window, a reduction or writing."""
        return self.shifted or self.c.before is not None

    @cached_property
    def light(self) -> bool:
        """Whether what happens ahead of a reduction is so little that the compiler makes it conditional as it is,
        instruction by instruction; it branches around more."""
        later = () if self.c.folds_ends else (self.c.ends, self.c.after)
        trees = [tree for tree in (self.c.before, *later) if tree is not None]
        nodes = [n for tree in trees for n in topological((tree.root,), (tree.value, *self.c.operands))]
        functions = [n.op for n in nodes if not isinstance(n.op, ops.Number)]
        light = all(isinstance(op, ops.Pointwise) and op.fn in LIGHT for op in functions)
        return light and len(functions) <= FEW and not self.c.elements

    def taken_in(self, target: str, value: str, inside: str) -> str:
        """The statement that joins a value to a running result, if its position is `inside`."""
        joining = self.own_joining
        if self.light:
            return f"if ({inside}) {target} = {joining.join(target, value)};"
        return f"{target} = {joining.join(target, joining.there_or_empty(inside, value))};"

    def read(self) -> list[tuple[Node, str]]:
        """What the trees read beside the value; the bias is added by the first of them."""
        bias, names = self.c.conv.args[2], operands(self.c)
        return [(n, names[n]) for n in dict.fromkeys([*([bias] if bias is not None else []), *self.c.operands])]

    def functions(self) -> Lines:
        """The lambdas ``before``, ``at_end`` (of a window or a thread) and ``after``, those that are needed."""
        before = self._before if self.changes else []
        if self.in_place:
            before = [re.sub(r"\b(co)?sine\(", r"maths.\g<0>", line) for line in before]
            before[0] = before[0].replace(f"{self.place})", f"{self.place}, Maths& maths)")
        later = {"at_end": self.c.ends, "after": self.c.after}
        trees = ((label, tree) for label, tree in later.items() if tree is not None)
        behind = [line for label, tree in trees for line in self._function(label, tree, [])]
        return [*before, *behind, *([] if self.partial else self.last_function())]

    def last_function(self) -> Lines:
        """The lambda ``last``, if there is a need for it: of what channels come to."""
        return [] if self.c.last is None else self._function("last", self.c.last, [])

    def result_over_channels(self, features: str) -> str:
        """Text: what channels come to, so many `features`, and what follows that."""
        result = self.joining.result.format("over") + (f" * Compute(1.0 / {features})" if self.fold == "mean" else "")
        return result if self.c.last is None else f"last({result})"

    @cached_property
    def _before(self) -> Lines:
        """The lambda as it is where every value is changed on its own."""
        return self._function("before", self.c.before, self._shift())

    @cached_property
    def in_place(self) -> bool:
        """Whether a thread's products are changed all at once: where functions would branch for each (`functions`)."""
        if self.c.before is None or self.c.shares is not None or self.c.elements:
            return False
        leaves = (*self.c.operands, self.c.before.value)
        scalars = Scalars(dict.fromkeys(leaves, ""), lambda node: "", cuda=True)
        scalars.value(self.c.before.root)
        return any("sine(" in line for line in scalars.lines)

    def _exponentiates(self, tree: Map | None) -> bool:
        """Whether exponentials of what this tree gives are added up."""
        if self.fold != "sum of exponentials" or tree is None:
            return False
        return self.c.fold is not None and self.c.fold.node.arg(0) is tree.root

    @property
    def one_by_one(self) -> bool:
        """Whether every product is changed where it is taken."""
        return self.changes and not self.in_place and not self.late

    def changed(self, value: str, at: str = "") -> str:
        """A product as it goes into the window or the reduction, or is written; what every element has is `at` of what
        was read."""
        if self.one_by_one:
            return f"before({', '.join([value, self._where, *(f'{name}_here{at}' for name in self.beside)])})"
        if not (self.in_place and self._exponentiates(self.c.before)):
            return value
        ((_, text),) = pointwise.traits("exp").cuda_within  # behind a sine of float32
        return text.format(value)

    def all_changed(self, products: Sequence[str], loops: Sequence[str], lines: Lines, inner: Sequence[str]) -> Lines:
        """Statements that change products in place; `lines`, in the loops around the inner ones, say where they are."""
        if not self.in_place:
            return []
        each = []
        for p in products:
            # Not ``if (changed = ...; keep)``, in which NVRTC 13.0 forgot the call where `keep` was false.
            changed = [f"const Compute changed = before({p}, {self._where}, maths);", f"if (keep) {p} = changed;"]
            each += block("", changed) if len(products) > 1 else changed
        return fill(_IN_PLACE, each=nest(loops, [*lines, *nest(inner, each)]))

    @property
    def _where(self) -> str:
        return ", ".join(p.removeprefix("int ") for p in self.place.split(", "))

    def _shift(self) -> Lines:
        """Scale and bias."""
        if not self.shifted:
            return []
        bias = self.c.conv.args[2]
        scaled = "value" if self.scale is None else f"value * Compute({self.scale!r})"
        return [f"const Compute shifted = {scaled}{'' if bias is None else f' + {self._access(bias)}'};"]

    def _function(self, label: str, tree: Map | None, shift: Lines) -> Lines:
        """A lambda that applies a pointwise tree to one value."""
        result, lines = "shifted" if shift else "value", list(shift)
        if tree is not None:
            # Operands are read from memory, those that a pointwise function of parameters gave as well.
            given = {n: self._access(n) for n in self.c.operands} | {tree.value: result}
            scalars = Scalars(given, self._access, cuda=True)
            exponentiated = self._exponentiates(tree) and not (label == "before" and self.in_place)
            result = scalars.value(build.pointwise("exp", tree.root) if exponentiated else tree.root)
            lines += scalars.lines
        beside = "".join(f", Compute {name}_here" for name in self.beside) if label == "before" else ""
        nowhere = label == "last" or (label == "at_end" and self.c.folds_ends)
        place = "" if nowhere else f", {self.place}{beside}"
        head = f"const auto {label} = [&](Compute value{place})"
        return [*block(head, [*lines, f"return {result};"])[:-1], "};"]

    def _access(self, node: Node) -> str:
        name, cast = operands(self.c)[node], compute_type(node.dtype)
        text = f"{name}_here" if node in self.c.elements else f"{name}_at" if is_one(node) else self.of_channel(name)
        return text if cast == compute_type(self.c.x.dtype) else f"{cast}({text})"

    # -- the second kernel

    def behind(self) -> tuple[Lines, str, list[Node]]:
        """What it does with a result over channels: statements ahead, the text, and the numbers that it reads."""
        if self.c.last is None:
            return [], "{0}", []
        read = [n for n in leaves(self.c.last) if n is not self.c.last.value]
        ones = [f"const Compute {(name := operands(self.c)[n])}_at = widened({name}[0]);" for n in read]
        return [*ones, *self.last_function()], "last({0})", read

    def come_to(self, total: str) -> str:
        if not self.c.folds_ends:
            return total
        found = f"greater(at_end({total}.greatest), at_end({total}.least))"
        return f"{total}.greatest < {total}.least ? {self.joining.empty} : {found}"  # some threads have no value

    # -- windows

    @property
    def pooling(self) -> Joining:
        """How the values of a window become one."""
        assert self.c.window is not None
        return OF_ENDS if self.c.ends is not None else JOININGS[self.c.window.op.kind]

    def there_or_empty(self, there: str, value: str) -> str:
        """A value as a window takes it in, if it is `there`."""
        return self.pooling.there_or_empty(there, value)

    @property
    def pooled_type(self) -> str:
        """Of what values of a window become."""
        return self.pooling.running[0]

    def of_window(self, pooled: str) -> str:
        """What a window comes to, of the name of what its values became."""
        assert self.c.window is not None
        if self.c.window.op.kind == "avg":
            return f"{pooled} * share"
        if self.c.ends is None:
            return pooled
        return f"greater(at_end({pooled}.greatest, {self._where}), at_end({pooled}.least, {self._where}))"

    @property
    def has_later(self) -> bool:
        """Whether anything is computed of what is pooled."""
        return self.c.ends is not None or self.c.after is not None

    @property
    def overhangs(self) -> bool:
        """Whether windows may reach beyond the convolution's output."""
        return self.c.window is not None and (self.c.window.op.ceil_mode or any(self.c.window.op.padding))

    def share(self, cells: Sequence[str]) -> Lines:
        """What one position of the window of cell (d, h, w) counts in an average; nothing for maxima and minima."""
        assert self.c.window is not None
        op = self.c.window.op
        if op.kind != "avg":
            return []
        if op.divisor is not None or not self.overhangs:
            return [f"constexpr Compute share = Compute(1.0 / {op.divisor or prod(op.kernel)});"]
        counts = []
        for (k,), cell, length in ((*each,) for each in zip(self.c.dims, cells, "PQR", strict=True) if each[0]):
            start = f"{cell} * {op.stride[k]} - {op.padding[k]}"
            stop = f"min({start} + {op.kernel[k]}, {length} + {op.padding[k]})"
            padded = op.count_include_pad
            counts.append(f"({stop} - ({start}))" if padded else f"(min({stop}, {length}) - max({start}, 0))")
        return [f"const Compute share = Compute(1) / Compute({' * '.join(counts)});"]


_IN_PLACE = """
{
    const auto all = [&](Maths& maths, bool keep) {
        $each
    };
    Maths near{false}, any{true};
    all(near, false);
    if (near.far)
        all(any, true);
    else
        all(near, true);
}
"""


def is_one(node: Node) -> bool:
    """Whether an operand is a single number."""
    return all(d == 1 for d in node.shape)
