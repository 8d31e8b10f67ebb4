"""Graph -> Program on plain ATen operations: the text that runs is the text that prints.

A program is two functions.  `derive(self)` computes what depends on parameters and constants alone (summed taps,
composed kernels); `forward(self, inputs..., derived...)` does the rest.  A value's variable takes over its first
operand's name when that operand dies there, so the text reads like a hand-written forward and frees memory as early as
one.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy
import torch

from fusewright.codegen.expressions import EMITTERS, repr_number
from fusewright.codegen.extremes import with_indices
from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph, Node, topological
from fusewright.kernel import Kernel
from fusewright.runtime.attention import attention
from fusewright.runtime.conv_last import conv_last
from fusewright.runtime.operators import operator
from fusewright.schedule.chain import VIEWS
from fusewright.tree import TreeSpec, odd_container, tree_unflatten

HEADER = "import torch\nimport torch.nn.functional as F\n\n\n"

# Names that the text of a program uses for itself; ranges.py names its cores after the variable they belong to.
_RESERVED = frozenset({"self", "torch", "F", "constants", "float", "getattr", "attention", "conv_last", "arranged"})
_CORE = re.compile(r"_(core(_\d+)?|slot_\d+)$")

# Operations whose result is always memory of its own.
_ALLOCATES = (
    *(Fused, ops.Conv, ops.Matmul, ops.Pool, ops.Pointwise, ops.Reduce, ops.Softmax, ops.Norm),
    *(ops.Attention, ops.Cat, ops.ConvLast, ops.Extreme, ops.Embedding, ops.Nll, ops.Scan, ops.Statistics),
    *(ops.Cross, ops.Transfer, ops.Roll, ops.Flip, ops.Upsample, ops.Interpolate, ops.Unfold, ops.Fold, ops.Positions),
)


@dataclass(frozen=True)
class Program:
    """Runnable text with the tensors it refers to by name, and what `forward` takes."""

    source: str
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # what the derived values depend on: dotted paths in the module, keys of constants
    reads: tuple[str, ...] = ()  # what `forward` reads itself, named like them
    kernels: tuple[Kernel, ...] = ()  # called by their names
    attributes: tuple[str, ...] = ()  # dotted paths of what it reads in the module beside parameters and buffers
    foreign: bool = False  # whether it calls what is not understood, which may give what is no ordinary tensor
    repeatable: bool = False  # whether starting its launches again on other numbers is all that a call comes to
    structure: TreeSpec | None = None  # how `arranged` is to return the outputs, where text cannot say so
    looks_up: bool = False  # whether indices, or numbers, may be such that they are the end of it all on a GPU

    def functions(self, *, direct: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`derive(self)` and `forward(self, *inputs, *derived)`, compiled from `source`; `direct` ones are for calls of
        which every kernel's `Operator.direct` may be called."""
        operators = {kernel.name: operator(kernel) for kernel in self.kernels}
        scope: dict[str, Any] = {"constants": self.constants, "attention": attention, "conv_last": conv_last}
        if self.structure is not None:
            scope["arranged"] = partial(tree_unflatten, treespec=self.structure)
        scope |= {name: found.direct for name, found in operators.items()} if direct else operators
        exec(compile(self.source, "<fusewright program>", "exec"), scope)
        return scope["derive"], scope["forward"]


def lower(
    graph: Graph,
    out_spec: TreeSpec | None = None,
    constants: Mapping[str, torch.Tensor] | None = None,
    attributes: Collection[str] = (),
    kernels: Sequence[Kernel] = (),
) -> Program:
    """The program for `graph`, whose kernel groups are computed by `kernels`.

    Its forward returns the outputs arranged as `out_spec` says (default: a flat tuple).  Constants are found by key in
    `constants`, but for those in `attributes`, whose key is a dotted path in the module.
    """
    called = [kernel.name for kernel in kernels]
    graph = with_indices(graph)
    inputs = _input_names(graph, called)
    derived = _derived(graph)
    head = _Writer("derive", ["self"], graph, attributes)
    head.taken.update(called, inputs.values(), map(str, graph.symbols))
    head.kept.update(derived)
    names = head.finish(derived, None, dense=_wanted_dense(graph, derived))
    body = _Writer("forward", ["self", *inputs.values(), *names], graph, attributes)
    body.taken.update(called)
    body.names.update(inputs)
    body.names.update(zip(derived, names, strict=True))
    body.given.update(derived)
    body.bind_symbols()
    below = set(topological(derived))
    effects = [e for e in graph.effects if e not in below]
    body.finish(graph.outputs, out_spec, effects=effects)
    results = [o for o in graph.outputs if isinstance(o, Node)]
    held, nodes = dict(constants or {}), graph.nodes()
    return Program(
        source=HEADER + head.text() + "\n\n" + body.text(),
        constants={key: held[key] for key in sorted(held.keys() - set(attributes))},
        derived=tuple(names),
        sources=_paths(topological(derived)),
        reads=_paths(topological([*results, *effects], derived)),
        kernels=tuple(kernels),
        attributes=tuple(sorted(set(attributes) & {n.op.key for n in nodes if isinstance(n.op, ops.Constant)})),
        foreign=any(isinstance(e.op, ops.Opaque) and not e.op.is_update for e in effects),
        repeatable=_is_repeatable(graph, effects),
        structure=out_spec if out_spec is not None and odd_container(out_spec) is not None else None,
        looks_up=any(k.looks_up for k in kernels) or any(_looks_up(n) for n in nodes if n not in below),
    )


def _paths(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The tensors of the module among them, and the constants."""
    read = [n.op for n in nodes if isinstance(n.op, ops.Param | ops.Buffer | ops.Constant)]
    return tuple(sorted({op.key if isinstance(op, ops.Constant) else op.path for op in read}))


def _is_repeatable(graph: Graph, effects: Sequence[Node]) -> bool:
    """Whether everything happens on one device, and what is not understood does nothing else."""
    devices = {n.device for n in graph.nodes() if not isinstance(n.op, ops.Number)}
    return len(devices) == 1 and all(isinstance(e.op, ops.Opaque) and e.op.is_repeatable for e in effects)


def _looks_up(node: Node) -> bool:
    op = node.op
    refuses = isinstance(op, ops.Pointwise) and op.refuses
    if isinstance(op, ops.Embedding) and isinstance(at := node.arg(1).op, ops.Positions):
        rows = node.arg(0).shape[0]
        return at.end is None or not isinstance(rows, int) or at.end > rows
    return refuses or isinstance(op, ops.Embedding | ops.Nll) or (isinstance(op, ops.Opaque) and op.looks_up)


def lower_function(name: str, graph: Graph) -> str:
    """The text of a function of the graph's inputs that returns its outputs, of several a tuple."""
    graph = with_indices(graph)
    inputs = _input_names(graph)
    body = _Writer(name, list(inputs.values()), graph)
    body.names.update(inputs)
    body.bind_symbols()
    outputs = [o for o in graph.outputs if isinstance(o, Node)]
    body.write(outputs, outputs)
    body.line(f"return {', '.join(map(body.operand, outputs))}")
    return body.text()


def _derived(graph: Graph) -> list[Node]:
    """The values to derive ahead: computed from parameters and constants alone, and used by something that is not."""
    exposed, written = _exposed(graph), _written(graph)
    fixed: dict[Node, bool] = {}
    frontier: dict[Node, None] = {}
    for node in graph.nodes():
        sources = isinstance(node.op, ops.FIXED) and node not in written
        computed = bool(node.inputs) and node not in exposed and all(fixed[a] for a in node.inputs)
        movable = not node.op.effectful or _only_computes(node)
        fixed[node] = movable and not _depends_on_batch(node) and (sources or computed)
        if not fixed[node]:
            frontier.update((a, None) for a in node.inputs if fixed[a] and _computed(a))
    return list(frontier)


def _wanted_dense(graph: Graph, derived: Sequence[Node]) -> list[Node]:
    """Derived values that a kernel reads and that may not lie row by row: it would copy them in every call."""
    read = {a for node in graph.nodes() if isinstance(node.op, Fused) for a in node.inputs}
    turned = (ops.Permute, ops.Expand, ops.Slice, ops.Windows)
    return [d for d in derived if d in read and any(isinstance(n.op, turned) for n in topological([d]))]


def _exposed(graph: Graph) -> set[Node]:
    """The values that the caller or an opaque operation may get to write to: none of them may be kept for later."""
    exposed = {o for o in graph.outputs if isinstance(o, Node)}
    for node in reversed(graph.nodes()):
        if (node.op.effectful or node in exposed) and not _allocates(node):
            exposed.update(node.inputs)
    return exposed


def _written(graph: Graph) -> set[Node]:
    """The values whose memory a call writes to, under whichever name: what is read after that is not known before."""
    written: set[Node] = set()
    for node in reversed(graph.nodes()):
        if isinstance(node.op, ops.Opaque) and node.op.may_write:
            written.update(node.inputs)
        elif isinstance(node.op, ops.Track) or (isinstance(node.op, ops.Norm) and node.op.effectful):
            written.update(a for a in node.args[-2:] if a is not None)  # running statistics
        elif node in written and not _allocates(node):
            written.update(node.inputs)
    return written


def _allocates(node: Node) -> bool:
    return isinstance(node.op, _ALLOCATES) or _only_computes(node)


def _only_computes(node: Node) -> bool:
    return isinstance(node.op, ops.Opaque) and node.op.only_computes


def _depends_on_batch(node: Node) -> bool:
    """Whether a value that no input reaches is another one at another batch size."""
    number = isinstance(node.op, ops.Number) and isinstance(node.op.value, sympy.Expr)
    return number or any(isinstance(d, sympy.Expr) for d in node.shape)


def _computed(node: Node) -> bool:
    """Whether anything below `node` is more than a view of a parameter."""
    if not isinstance(node.op, VIEWS) or (isinstance(node.op, ops.Permute) and node.op.copy):
        return bool(node.inputs) or isinstance(node.op, ops.Positions)
    return _computed(node.arg(0))


def _input_names(graph: Graph, called: Sequence[str] = ()) -> dict[Node, str]:
    """A variable per input: its own name, where a program does not use that otherwise, as for a kernel it calls."""
    names: dict[Node, str] = {}
    taken = {*called, *map(str, graph.symbols)}
    for node in graph.inputs:
        assert isinstance(node.op, ops.Input)
        name = node.op.name
        while not _usable(name) or name in taken or name in names.values():
            name += "_"
        names[node] = name
    return names


def _usable(name: str) -> bool:
    """Whether a variable may have this name: no keyword, nothing that a program calls, no name of a shared core."""
    return name.isidentifier() and not keyword.iskeyword(name) and name not in _RESERVED and not _CORE.search(name)


class _Writer:
    """Writes one function: allots names, lines and deletions."""

    def __init__(
        self, function: str, parameters: Sequence[str], graph: Graph, attributes: Collection[str] = ()
    ) -> None:
        self.signature = f"def {function}({', '.join(parameters)}):"
        self.graph = graph
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.taken = set(parameters)
        self.items: dict[Node, dict[int, Node]] = {}  # what is wanted of several results
        self.attributes = frozenset(attributes)
        self.kept: set[Node] = set()  # whose variables are never reused
        self.given: set[Node] = set()  # which others hold too, so that deleting them here frees nothing
        self.deriving = function == "derive"

    def bind_symbols(self) -> None:
        for symbol, where in self.graph.symbols.items():
            self.taken.add(str(symbol))
            length = f"{self.names[self.graph.inputs[where.input]]}.shape[{where.dim}]"
            length = f"({length} {-where.more:+})" if where.more else length
            part = f" // {where.times}" if where.times > 1 else ""
            self.line(f"{symbol} = {length}{part}")

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def fresh(self, stem: str) -> str:
        stem = stem if _usable(stem) else f"{stem}_"
        name, count = stem, 1
        while name in self.taken:
            count += 1
            name = f"{stem}_{count}"
        self.taken.add(name)
        return name

    def finish(
        self,
        outputs: Sequence[Any],
        out_spec: TreeSpec | None,
        *,
        effects: Sequence[Node] = (),
        dense: Sequence[Node] = (),
    ) -> list[str]:
        """Write every node the roots need, then the return statement; returns the outputs' texts.

        Outputs in `dense` are made to lie row by row.
        """
        results = [o for o in outputs if isinstance(o, Node)]
        self.write([*effects, *results], results)
        for name in map(self.operand, dense):
            self.line(f"{name} = {name}.contiguous()")
        texts = [self.operand(o) if isinstance(o, Node) else repr_number(o) for o in outputs]
        self.line(f"return {_structure(texts, out_spec)}")
        return texts

    def write(self, roots: Sequence[Node], results: Sequence[Node]) -> None:
        """Write every node the roots need; results stay alive."""
        order = topological(roots, self.names)  # what is derived ahead hides what lies below it
        for node in order:
            if isinstance(node.op, ops.Item):
                self.items.setdefault(node.arg(0), {})[node.op.index] = node
        last = _last_uses(order, {*results, *self.kept})
        for index, node in enumerate(order):
            self.statement(node, last.get(index, ()))

    def statement(self, node: Node, dying: Sequence[Node]) -> None:
        if _inline(node) or node in self.names:
            return
        operands = [None if a is None else self.operand(a) for a in node.args]
        freed = [n for n in dying if n in self.names and not _inline(n)]
        heir = next((n for n in freed if n in node.inputs[:1] and n not in self.kept), None)
        name = self.names[heir] if heir is not None else self.fresh(self.stem(node))
        if isinstance(node.op, Fused) and node.op.also:
            self._several(node, operands, name)
            self._delete(freed, heir)
            return
        emit, first = EMITTERS[type(node.op)], len(self.lines)
        for line in emit(node, operands, name):
            self.line(line)
        if not isinstance(node.op, ops.Opaque) or not node.op.several:
            index = max(i for i in range(first, len(self.lines)) if self.lines[i].startswith(f"    {name} = "))
            self.lines[index] += f"  # ({', '.join(map(str, node.shape))})"
        self.names[node] = name
        self._delete(freed, heir)

    def _several(self, node: Node, operands: Sequence[str | None], name: str) -> None:
        """Write a kernel's call that gives several results, each to a variable of its own."""
        assert isinstance(node.op, Fused)
        wanted = self.items[node]
        names = {i: name if i == min(wanted) else self.fresh(self.stem(node)) for i in sorted(wanted)}
        targets = ", ".join(names.get(i, "_") for i in range(len(node.op.bodies)))
        (line,) = EMITTERS[Fused](node, operands, targets)
        shapes = (", ".join(map(str, result.shape)) for result in node.op.bodies)
        self.line(f"{line}  # {', '.join(f'({shape})' for shape in shapes)}")
        self.names |= {wanted[i]: found for i, found in names.items()}

    def _delete(self, freed: Sequence[Node], heir: Node | None) -> None:
        """Write that values are gone, but for the one whose variable has another value."""
        gone = [self.names[n] for n in freed if n is not heir and n not in self.kept and n not in self.given]
        if gone:
            self.line(f"del {', '.join(gone)}")

    def stem(self, node: Node) -> str:
        """What to call a value: a derived one after the parameter it comes from, others after their operation."""
        below = topological([node]) if self.deriving else ()
        paths = [n.op.path for n in below if isinstance(n.op, ops.Param | ops.Buffer)]
        if not paths:
            return _stem(node)
        name = re.sub(r"\W", "_", paths[0])
        return name if name.isidentifier() else f"module_{name}"  # Sequential's digits

    def operand(self, node: Node) -> str:
        op = node.op
        if isinstance(op, ops.Number):
            return f"({op.value})" if isinstance(op.value, sympy.Expr) else repr_number(op.value)
        if isinstance(op, ops.Param | ops.Buffer):
            return attribute("self", op.path)
        if isinstance(op, ops.Constant):
            return attribute("self", op.key) if op.key in self.attributes else f"constants[{op.key!r}]"
        return self.names[node]

    def text(self) -> str:
        return "\n".join([self.signature, *self.lines]) + "\n"


def _last_uses(order: Sequence[Node], alive: Collection[Node]) -> dict[int, list[Node]]:
    """For each position, the values whose last use it is."""
    last: dict[Node, int] = {}
    for index, node in enumerate(order):
        for arg in node.inputs:
            last[arg] = index
        last.setdefault(node, index)
    result: dict[int, list[Node]] = {}
    for node, index in last.items():
        if node not in alive:
            result.setdefault(index, []).append(node)
    return result


def _inline(node: Node) -> bool:
    """Whether a node prints inside its users instead of as a statement."""
    return isinstance(node.op, ops.Number | ops.Param | ops.Buffer | ops.Constant)


def attribute(owner: str, path: str) -> str:
    """The text that reads a dotted path; names that are no identifiers (``Sequential``'s digits) go through getattr.

    So do those that begin with two underscores, which mean other attributes within a class.
    """
    text = owner
    for part in path.split("."):
        mangled = part.startswith("__") and not part.endswith("__")
        plain = part.isidentifier() and not keyword.iskeyword(part) and not mangled
        text = f"{text}.{part}" if plain else f"getattr({text}, {part!r})"
    return text


class _Text:
    """A value whose repr is its text, so that repr of a structure is the text of the structure."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _structure(texts: Sequence[str], spec: TreeSpec | None) -> str:
    if spec is not None and odd_container(spec) is not None:
        return f"arranged([{', '.join(texts)}])"
    if spec is not None:
        return repr(tree_unflatten([_Text(t) for t in texts], spec))
    return ", ".join(texts) + ("," if len(texts) == 1 else "") if texts else "()"


def _stem(node: Node) -> str:
    op = node.op
    if isinstance(op, Fused):
        return "fused"
    if isinstance(op, ops.Pointwise):
        return op.fn
    if isinstance(op, ops.Reduce | ops.Norm | ops.Pool):
        return f"{op.kind}_{type(op).__name__.lower()}" if isinstance(op, ops.Norm | ops.Pool) else f"{op.kind}_over"
    if isinstance(op, ops.Opaque):
        return op.target.split(".")[1].rstrip("_")
    names = {ops.RangeSum: "range_sum", ops.Reshape: "shaped", ops.ConvLast: "conv"}
    return names.get(type(op), type(op).__name__.lower())
