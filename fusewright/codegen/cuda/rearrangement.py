"""CUDA C++ of rearrangements: from the flat index of an element follows where its operands lie.

A thread has a group of neighbours, which it writes by 16 bytes: operands that lie side by side are loaded together,
others one by one.  Where neighbours may be of different parts of a concatenation, each is computed by itself.
Lengths other than the first dimension's are in the text, where divisions by them are multiplications.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import sympy
import torch

from fusewright.codegen.cpp import ELEMENT, compute_type, literal
from fusewright.codegen.cuda import rearrangement_text as text
from fusewright.codegen.cuda import stream_text
from fusewright.codegen.cuda.primitives import preamble
from fusewright.codegen.cuda.stream_values import for_each, tree, widened
from fusewright.codegen.stream_sizes import hint
from fusewright.codegen.text import Lines, block, fill, indent, opened
from fusewright.ir import ops
from fusewright.ir.indices import Digit, Index, Variable
from fusewright.ir.node import Node
from fusewright.ir.ops import Size
from fusewright.kernel import Argument, Array, Expression, Kernel, Launch, ceil_div
from fusewright.schedule.rearrangement import (
    Between,
    Computed,
    Load,
    Padded,
    Rearrangement,
    Selected,
    Summed,
    Value,
    always,
    below,
    call_length,
    is_whole,
)
from fusewright.schedule.stream_record import Tree

THREADS = 256
# Groups of neighbours that a thread has, by how many there are in each.
AT_ONCE = {1: 4, 2: 4, 4: 2, 8: 2}

# Elements along the sides of a tile of what is turned, by the bytes of the widest.
TILES = {1: 64, 2: 64, 4: 32, 8: 32}

Option = dict[str, Any]


def options(r: Rearrangement) -> list[Option]:
    """Ways to share elements out, best estimate first: so many neighbours per thread, or tiles with such sides."""
    if call_length(r.root, r.tensors) is None:
        return []
    if r.turn is not None:
        return [{"tile": TILES[max(load.tensor.dtype.itemsize for load in r.turn.loads)]}]
    most = 16 // r.root.dtype.itemsize
    return [{"values": values} for values in (most, 1) if is_whole(r.root, values)]


def kernel(r: Rearrangement, name: str, reference: str = "", *, values: int = 1, tile: int = 0) -> Kernel:
    """The kernel of a rearrangement whose threads have so many neighbours each, or whose blocks have such a tile."""
    return (_TurnedWriter(r, name, tile) if r.turn is not None else Writer(r, name, values)).kernel(reference)


def length_of(n: Size, symbol: sympy.Symbol | None) -> Expression:
    """A length, where a call's own number stands for the symbol."""
    return str(n) if isinstance(n, int) else f"({n.subs(symbol, sympy.Symbol('s0'))})"


def address_of(r: Rearrangement) -> tuple[Lines, str]:
    """The statements and the text of where that lies which is the element at the flat index ``i``, a ``count_t``."""
    assert isinstance(r.value, Load)
    return Values(r, {}, 1).index(r.value.address)


class Pace:
    """What of an index varies among the `values` neighbours of a group, the first of which is a multiple of that."""

    def __init__(self, values: int) -> None:
        self.values = values

    def of(self, index: Index) -> int | None:
        """By how much the index grows from one neighbour to the next; `None` where that is not always the same."""
        paces = [(n, self.of_digit(d)) for n, d in index.terms]
        return None if any(p is None for _, p in paces) else sum(n * p for n, p in paces if p is not None)

    def of_digit(self, d: Digit) -> int | None:
        """Likewise of a digit."""
        of = self._of_variable(d.variable)
        if not of:
            return of
        if d.step % self.values == 0:
            return 0
        return 1 if d.step == 1 and (d.length is None or d.length % self.values == 0) else None

    def _of_variable(self, v: Variable) -> int | None:
        """Likewise; 1 only of variables that begin at a multiple."""
        if v.of is None:
            return 1
        of = self.of(v.of)
        if of == 0:
            return 0
        unbroken = not v.beyond or (v.beyond == "circular" and v.length is not None and v.length % self.values == 0)
        return 1 if of == 1 and unbroken and self.begins(v.of) else None

    def begins(self, index: Index) -> bool:
        """Whether the first neighbour has a multiple of `values`."""
        return index.constant % self.values == 0 and all(
            n % self.values == 0 or self.of_digit(d) == 1 for n, d in index.terms
        )

    def is_loaded_together(self, load: Load) -> bool:
        """Whether neighbours lie side by side, from a multiple on."""
        return self.of(load.address) == 1 and self.begins(load.address)

    def lies_two_apart(self, load: Load) -> bool:
        """Whether neighbours lie two apart, from a multiple of all that lies there on, or from the next."""
        whole, index = 2 * self.values, load.address
        if self.of(index) != 2 or index.constant % whole > 1 or not is_whole(load.tensor, whole):
            return False
        return all(n % whole == 0 or (n % 2 == 0 and self.of_digit(d) == 1) for n, d in index.terms)

    def may_be_a_group(self, value: Value) -> bool:
        """Whether neighbours always are of the same part."""
        match value:
            case Computed():
                return all(self.may_be_a_group(leaf) for _, leaf in value.leaves)
            case Selected():
                return self._is_alike(value.index, value.ends) and all(map(self.may_be_a_group, value.parts))
            case Padded():
                alike = (self._is_alike(index, (length,)) for index, length in value.inside)
                return all(alike) and self.may_be_a_group(value.value)
            case Between():
                return all(map(self.may_be_a_group, value.taps))
            case Summed():
                return all(map(self.may_be_a_group, value.parts))
        return True

    def _is_alike(self, index: Index, ends: tuple[int, ...]) -> bool:
        whole = all(end % self.values == 0 for end in ends)
        return self.values == 1 or self.of(index) == 0 or (self.of(index) == 1 and self.begins(index) and whole)


class Writer:
    """Writes the kernel of one rearrangement."""

    def __init__(self, r: Rearrangement, name: str, values: int) -> None:
        self.r, self.name, self.values = r, name, values
        self.names = {t: f"p{i}" if i else "x" for i, t in enumerate(r.tensors)}
        found = call_length(r.root, r.tensors)
        assert found is not None
        self.symbol, self.shown = found
        most = max(prod(map(hint, t.shape)) for t in (*r.tensors, r.root))
        self.index = "int" if 2 * most < 2**31 else "long long"

    def kernel(self, reference: str) -> Kernel:
        r = self.r
        pointers = (Argument("pointer", name) for name in (*self.names.values(), "out"))
        return Kernel(
            name=self.name,
            source=self.source(),
            operands=tuple(self.names.values()),
            layouts=("contiguous",) * len(self.names),
            sizes=() if self.shown is None else (self.shown,),
            output=Array("out", self._shape(r.root), r.root.dtype),
            scratch=(),
            launches=(Launch(self.name, (*pointers, *self.numbers()), (self.blocks(), "1", "1"), THREADS),),
            reference=reference,
            dtypes=tuple(t.dtype for t in r.tensors),
            shapes=tuple(map(self._shape, r.tensors)),
            counts=tuple(f"2 * {self._count(t)}" for t in (*r.tensors, r.root)) if self.index == "int" else (),
        )

    def numbers(self) -> tuple[Argument, ...]:
        """What a call passes beside pointers."""
        return (Argument("int" if self.index == "int" else "long", self._groups()),)

    def blocks(self) -> Expression:
        return f"ceil_div({self._groups()}, {THREADS * self.at_once})"

    @property
    def at_once(self) -> int:
        """Groups that a thread has: of what takes sixteen loads, one."""
        return 1 if self._has_cubics() else AT_ONCE[self.values]

    def _has_cubics(self) -> bool:
        """Whether anything is interpolated between more than two neighbours."""
        return any(isinstance(v, Between) and len(v.taps) > 2 for v in below(self.r.value))

    # ---- sizes

    def _groups(self) -> Expression:
        return f"{self._count(self.r.root)} // {self.values}"

    def _shape(self, node: Node) -> tuple[Expression, ...]:
        return tuple(map(self._length, node.shape))

    def _length(self, n: Size) -> Expression:
        return length_of(n, self.symbol)

    def _count(self, node: Node) -> Expression:
        return f"({' * '.join(self._shape(node)) or '1'})"

    # ---- the text

    @property
    def compute(self) -> str:
        return compute_type(self.r.root.dtype)

    def source(self) -> str:
        members = [f"const {ELEMENT[t.dtype]}* {name};" for t, name in self.names.items()]
        lines = [
            f"using index_t = {self.index};",
            f"using count_t = unsigned {self.index};  // divides faster; differences below 0 are very large",
            self.constants(),
            *("", *fill(stream_text.TOOLS)),
            *(fill(text.CUBIC) if self._has_cubics() else ()),
            *("", "// What a call passes.", "struct Data {", *indent(members), "};"),
            *("", *self.functions()),
            *("", *self.entry()),
        ]
        body = "\n".join(lines) + "\n"
        about = f"// {self.name}: elements in the order in which they are written."
        return f"{about}\n\n{preamble(body, 'nonfinite', 'elements')}\n{body}"

    def constants(self) -> str:
        return f"constexpr int THREADS = {THREADS}, VALUES = {self.values}, AT_ONCE = {self.at_once};"

    @property
    def head(self) -> str:
        """Of the function that computes a group."""
        return (
            f"__device__ __forceinline__ void values(const Data& d, const count_t i, {self.compute} (&value)[VALUES])"
        )

    def functions(self) -> Lines:
        """The function that computes a group of neighbours."""
        about = "// Neighbours in the order of memory, from element i on."
        if self.values > 1 and Pace(self.values).may_be_a_group(self.r.value):
            return [about, *block(self.head, Values(self.r, self.names, self.values).group("value"))]
        every = ["#pragma unroll", "for (int e = 0; e < VALUES; ++e) value[e] = element(d, i + e);"]
        return [*self.element(), "", about, *block(self.head, every)]

    def element(self, given: dict[Any, str] | None = None, more: str = "") -> Lines:
        """The function that computes one element, of what is `given` and the parameters that it has for that."""
        head = f"__device__ __forceinline__ {self.compute} element(const Data& d, const count_t i{more})"
        return ["// Element i.", *block(head, Values(self.r, self.names, 1).element(given or {}))]

    def signature(self, *more: str) -> Lines:
        """``name(parameters) {``."""
        pointers = [f"const {ELEMENT[t.dtype]}* __restrict__ {name}" for t, name in self.names.items()]
        return opened(self.name, [*pointers, f"{ELEMENT[self.r.root.dtype]}* __restrict__ out", *more])

    def entry(self) -> Lines:
        members = ", ".join(self.names.values())
        return fill(text.KERNEL, signature=self.signature(f"{self.index} groups"), T=self.compute, members=members)


class _TurnedWriter(Writer):
    """Writes the kernel of a rearrangement that is turned tile by tile."""

    def __init__(self, r: Rearrangement, name: str, tile: int) -> None:
        super().__init__(r, name, 1)
        assert r.turn is not None
        self.turn, self.tile = r.turn, tile
        self.across, self.down = (ceil_div(n, tile) for n in (self.turn.step, self.turn.length))

    def numbers(self) -> tuple[Argument, ...]:
        return ()

    def blocks(self) -> Expression:
        planes = f"{self._count(self.r.root)} // {self.turn.step * self.turn.length}"
        return f"{planes} * {self.across * self.down}"

    def constants(self) -> str:
        lengths = f"STEP = {self.turn.step}, LENGTH = {self.turn.length}"
        return (
            f"constexpr int THREADS = {THREADS}, TILE = {self.tile};\n"
            f"constexpr int {lengths}, ACROSS = {self.across}, DOWN = {self.down};"
        )

    def functions(self) -> Lines:
        given: dict[Any, str] = {}
        parameters = ""
        for k, load in enumerate(self.turn.loads):
            given[load] = f"turned{k}"
            parameters += f", const {compute_type(load.tensor.dtype)} turned{k}"
        return self.element(given, parameters)

    def entry(self) -> Lines:
        tiles, read, turned = [], [], []
        for k, load in enumerate(self.turn.loads):
            tiles.append(f"__shared__ {ELEMENT[load.tensor.dtype]} tile{k}[TILE][TILE + 1];")
            lines, at = Values(self.r, self.names, 1).index(load.address)
            body = [*lines, f"tile{k}[k][lane] = d.{self.names[load.tensor]}[index_t({at})];"]
            read += block("", body) if lines else body  # loads name what they are computed of alike
            turned.append(widened(f"tile{k}[lane][k]", load.tensor.dtype))
        return fill(
            text.TURNED,
            signature=self.signature(),
            members=", ".join(self.names.values()),
            tiles=tiles,
            read=read,
            turned=", ".join(turned),
            T=self.compute,
        )


class Values:
    """Writes the statements that compute a group of neighbours, or one element."""

    def __init__(self, r: Rearrangement, names: dict[Node, str], values: int) -> None:
        self.r, self.tensors, self.values = r, names, values
        self.pace = Pace(values)
        self.taken = 0

    def group(self, to: str) -> Lines:
        """The statements that write a group to an array."""
        return self._written(f"{to}[e]", self.r.value, {})

    def element(self, known: dict[Any, str]) -> Lines:
        """The statements that return the only element, of what has names already."""
        value, names = self.r.value, dict(known)
        if isinstance(value, Computed):
            lines, statements, result = self._computed(value, names)
            return [*lines, *statements, f"return {result};"]
        lines, result = self._value(value, names)
        return [*lines, f"return {result};"]

    def index(self, index: Index) -> tuple[Lines, str]:
        """The statements that an index wants, and its text."""
        return self._index(index, {})

    def _fresh(self, stem: str) -> str:
        self.taken += 1
        return f"{stem}{self.taken}"

    def _declared(self, stem: str, dtype: torch.dtype) -> tuple[str, str]:
        """The declaration of a group's values, and what element e of them is called."""
        name = self._fresh(stem)
        if self.values == 1:
            return f"{compute_type(dtype)} {name};", name
        return f"{compute_type(dtype)} {name}[VALUES];", f"{name}[e]"

    def _each(self, body: Lines) -> Lines:
        """Statements for every neighbour; those of the only element have names of their own."""
        if self.values == 1:
            return body if len(body) == 1 else block("", body)
        if len(body) == 1:
            return ["#pragma unroll", f"for (int e = 0; e < VALUES; ++e) {body[0]}"]
        return for_each(body, "VALUES")

    def _value(self, value: Value, known: dict[Any, str]) -> tuple[Lines, str]:
        """The statements that compute a value, where those in `known` have names, and what element e is called."""
        if value in known:
            return [], known[value]
        if isinstance(value, Load):
            lines, known[value] = self._load(value, known)
        else:
            declared, known[value] = self._declared("y", _root(value).dtype)
            lines = [declared, *self._written(known[value], value, known)]
        return lines, known[value]

    def _written(self, to: str, value: Value, known: dict[Any, str]) -> Lines:
        """The statements that write a value to where element e of it shall be."""
        match value:
            case Load():
                lines, name = self._value(value, known)
                return [*lines, *self._each([f"{to} = {name};"])]
            case Computed():
                lines, statements, result = self._computed(value, known)
                return [*lines, *self._each([*statements, f"{to} = {result};"])]
            case Selected():
                return self._selected(to, value, known)
            case Padded():
                return self._padded(to, value, known)
            case Between():
                return self._between(to, value, known)
            case Summed():
                return self._summed(to, value, known)

    def _load(self, load: Load, known: dict[Any, str]) -> tuple[Lines, str]:
        t, compute = load.tensor, compute_type(load.tensor.dtype)
        from_ = f"d.{self.tensors[load.tensor]}"
        if self.pace.of(load.address) == 0:
            lines, at = self._index(load.address, known)
            name = self._fresh("x")
            return [*lines, f"const {compute} {name} = {widened(f'{from_}[index_t({at})]', t.dtype)};"], name
        if self.pace.is_loaded_together(load):
            lines, at = self._index(load.address, known)
            name = self._fresh("x")
            element = widened(f"{name}.at[e]", t.dtype)
            return [*lines, f"const auto {name} = load<VALUES>({from_} + index_t({at}));"], element
        if self.pace.lies_two_apart(load):
            return self._every_other(load, known)
        declared, element = self._declared("x", t.dtype)
        lines, at = self._index(load.address, {}, each=True)
        return [declared, *self._each([*lines, f"{element} = {widened(f'{from_}[index_t({at})]', t.dtype)};"])], element

    def _every_other(self, load: Load, known: dict[Any, str]) -> tuple[Lines, str]:
        """Neighbours that lie two apart are loaded with those between, which others often want."""
        place, t = load.address.constant % 2, load.tensor
        base, lines = Index(load.address.terms, load.address.constant - place), list[str]()
        if (t, base) not in known:
            lines, at = self._index(base, known)
            known[t, base] = self._fresh("x")
            lines.append(f"const auto {known[t, base]} = load<2 * VALUES>(d.{self.tensors[t]} + index_t({at}));")
        return lines, widened(f"{known[t, base]}.at[2 * e{' + 1' if place else ''}]", t.dtype)

    def _computed(self, value: Computed, known: dict[Any, str]) -> tuple[Lines, Lines, str]:
        """The statements that compute what pointwise operations read, those of the operations, and the result."""
        lines: Lines = []
        given: dict[Node, str] = {}
        for leaf, of in value.leaves:
            more, given[leaf] = self._value(of, known)
            lines += more
        statements, result = tree(Tree(value.root, (*given, *_constants(value)), None), value.root, given)
        return lines, statements, result

    def _selected(self, to: str, value: Selected, known: dict[Any, str]) -> Lines:
        lines, at = self._index(value.index, known)
        for k, (part, end) in enumerate(zip(value.parts, value.ends, strict=True)):
            body = self._written(to, part, dict(known))  # what a branch names is not known outside
            last = k == len(value.parts) - 1
            lines += block("else" if last else f"{'else ' if k else ''}if ({at} < {end})", body)
        return lines

    def _padded(self, to: str, value: Padded, known: dict[Any, str]) -> Lines:
        lines: Lines = []
        tests = []
        for index, length in value.inside:
            more, at = self._index(index, known)
            lines += more
            tests.append(f"count_t({at}) < {length}")
        outside = literal(_rounded(value.outside, value.node.dtype), compute_type(value.node.dtype))
        lines += block(f"if ({' && '.join(tests)})", self._written(to, value.value, dict(known)))
        return [*lines, *block("else", self._each([f"{to} = {outside};"]))]

    def _between(self, to: str, value: Between, known: dict[Any, str]) -> Lines:
        lines: Lines = []
        taps = []
        for tap in value.taps:
            more, name = self._value(tap, known)
            lines += more
            taps.append(name)
        each = self.pace.of(value.part) != 0
        found, at = self._index(value.part, {} if each else known, each=each)
        compute, part = compute_type(value.node.dtype), self._fresh("part")
        found.append(f"const {compute} {part} = {compute}({at}) * {literal(1 / value.per, compute)};")
        weighed = f"{to} = {taps[0]} * ({literal(1, compute)} - {part}) + {taps[-1]} * {part};"
        weighed = f"{to} = cubic({part}, {', '.join(taps)});" if len(taps) > 2 else weighed
        return [*lines, *(self._each([*found, weighed]) if each else [*found, *self._each([weighed])])]

    def _summed(self, to: str, value: Summed, known: dict[Any, str]) -> Lines:
        lines: Lines = []
        for load in dict.fromkeys(always(value)):  # once, not in a branch each
            lines += self._value(load, known)[0]
        lines += self._each([f"{to} = {literal(0, compute_type(value.node.dtype))};"])
        for part in value.parts:
            more, name = self._value(part, known)
            lines += [*more, *self._each([f"{to} += {name};"])]
        return lines

    # ---- indices

    def _index(self, index: Index, known: dict[Any, str], *, each: bool = False) -> tuple[Lines, str]:
        """The statements that an index wants, and its text: of the first neighbour, or of `each`."""
        lines: Lines = []
        texts = []
        for n, d in index.terms:
            more, text = self._digit(d, known, each)
            lines += more
            texts.append(text if n == 1 else f"{text} * {n}" if n > 0 else f"{text} * count_t({n})")
        if index.constant or not texts:
            texts.append(str(index.constant) if index.constant >= 0 else f"count_t({index.constant})")
        return lines, " + ".join(texts)

    def _digit(self, d: Digit, known: dict[Any, str], each: bool) -> tuple[Lines, str]:
        each = each and self.pace.of_digit(d) != 0  # neighbours share it otherwise
        lines, text = self._variable(d.variable, known, each)
        text = text if d.step == 1 else f"{text} / {d.step}"
        return lines, text if d.length is None else f"{text} % {d.length}"

    def _variable(self, v: Variable, known: dict[Any, str], each: bool) -> tuple[Lines, str]:
        if v.of is None:
            return [], "(i + e)" if each and self.values > 1 else "i"
        if v in known:
            return [], known[v]
        lines, text = self._index(v.of, known, each=each)
        name = known[v] = self._fresh("k")
        if not v.beyond:
            return [*lines, f"const count_t {name} = {text};"], name
        n = f"index_t({v.length})"
        lines.append(f"const index_t {name}s = index_t({text});")
        inside = {
            "circular": f"{name}s < 0 ? {name}s + {n} : {name}s < {n} ? {name}s : {name}s - {n}",
            "reflect": f"{n} - 1 - abs({n} - 1 - abs({name}s))",
            "replicate": f"min(max({name}s, index_t(0)), {n} - 1)",
        }[v.beyond]
        return [*lines, f"const count_t {name} = {inside};"], name


def _root(value: Computed | Selected | Padded | Between | Summed) -> Node:
    """What has this value."""
    return value.root if isinstance(value, Computed) else value.node


def _constants(value: Computed) -> Iterator[Node]:
    """Tensors of one value that a tree reads."""
    leaves, seen, stack = dict(value.leaves), {value.root}, [value.root]
    while stack:
        for a in stack.pop().inputs:
            if isinstance(a.op, ops.Full):
                yield a
            elif a not in seen and a not in leaves:
                seen.add(a)
                stack.append(a)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """A number as it is in memory."""
    return float(torch.tensor(value, dtype=dtype).item())
