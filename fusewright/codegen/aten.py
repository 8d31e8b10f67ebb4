"""Graph -> Program on plain ATen operations: the text that runs is the text that prints.

A program is two functions.  `derive(self)` computes what depends on parameters and constants alone (summed taps,
composed kernels); `forward(self, inputs..., derived...)` does the rest.  A value's variable takes over its first
operand's name when that operand dies there, so the text reads like a hand-written forward and frees memory as early as
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from fusewright.codegen import ranges
from fusewright.ir import ops
from fusewright.ir.node import Graph, Node
from fusewright.tree import TreeSpec, tree_unflatten

HEADER = "import torch\nimport torch.nn.functional as F\n\n\n"


@dataclass(frozen=True)
class Program:
    """Runnable text with the tensors it refers to by name, and what `forward` takes."""

    source: str
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # dotted paths of the parameters and buffers that the derived values depend on

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`derive(self)` and `forward(self, *inputs, *derived)`, compiled from `source`."""
        scope: dict[str, Any] = {"constants": self.constants}
        exec(compile(self.source, "<fusewright program>", "exec"), scope)
        return scope["derive"], scope["forward"]


def lower(
    graph: Graph, out_spec: TreeSpec | None = None, constants: Mapping[str, torch.Tensor] | None = None
) -> Program:
    """The program for `graph`; its forward returns the outputs arranged as `out_spec` says (default: a flat tuple)."""
    derived = _derived(graph)
    head = _Writer("derive", ["self"], graph)
    for node in derived:
        head.keep(node)
    names = head.finish(derived, None, trailing=True)
    inputs = [_input_name(n) for n in graph.inputs]
    body = _Writer("forward", ["self", *inputs, *names], graph)
    body.bind_symbols()
    body.names.update(zip(derived, names, strict=True))
    body.given.update(derived)
    body.finish(graph.outputs, out_spec, effects=graph.effects)
    roots = [n for n in ops_below(derived) if isinstance(n.op, ops.Param | ops.Buffer)]
    return Program(
        source=HEADER + head.text() + "\n\n" + body.text(),
        constants=dict(constants or {}),
        derived=tuple(names),
        sources=tuple(sorted({n.op.path for n in roots if isinstance(n.op, ops.Param | ops.Buffer)})),
    )


def ops_below(roots: Sequence[Node]) -> list[Node]:
    """All nodes below `roots`."""
    from fusewright.ir.node import topological

    return topological(roots)


def _derived(graph: Graph) -> list[Node]:
    """The values to derive ahead: computed from parameters and constants alone, and used by something that is not."""
    fixed: dict[Node, bool] = {}
    frontier: dict[Node, None] = {}
    for node in graph.nodes():
        sources = isinstance(node.op, ops.Param | ops.Buffer | ops.Constant | ops.Number | ops.Full | ops.Vector)
        computed = bool(node.inputs) and all(fixed[a] for a in node.inputs)
        fixed[node] = not node.op.effectful and not _depends_on_batch(node) and (sources or computed)
        if not fixed[node]:
            frontier.update((a, None) for a in node.inputs if fixed[a] and _computed(a))
    return [node for node in frontier if node not in graph.outputs]


def _depends_on_batch(node: Node) -> bool:
    """Whether a value that no input reaches is another one at another batch size."""
    number = isinstance(node.op, ops.Number) and isinstance(node.op.value, sympy.Expr)
    return number or any(isinstance(d, sympy.Expr) for d in node.shape)


def _computed(node: Node) -> bool:
    """Whether anything below `node` is more than a view of a parameter."""
    if not isinstance(node.op, ops.Reshape | ops.Permute | ops.Expand | ops.Slice):
        return bool(node.inputs)
    return _computed(node.arg(0))


def _input_name(node: Node) -> str:
    assert isinstance(node.op, ops.Input)
    return node.op.name


class _Writer:
    """Writes one function: allots names, lines and deletions."""

    def __init__(self, function: str, parameters: Sequence[str], graph: Graph) -> None:
        self.signature = f"def {function}({', '.join(parameters)}):"
        self.graph = graph
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.taken = set(parameters) | {"torch", "F", "constants"}
        self.kept: set[Node] = set()
        self.given: set[Node] = set()
        self.deriving = function == "derive"
        if function == "forward":
            self.names.update({n: _input_name(n) for n in graph.inputs})

    def keep(self, node: Node) -> None:
        """Never reuse `node`'s variable."""
        self.kept.add(node)

    def bind_symbols(self) -> None:
        for symbol, where in self.graph.symbols.items():
            self.taken.add(str(symbol))
            self.line(f"{symbol} = {_input_name(self.graph.inputs[where.input])}.shape[{where.dim}]")

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def fresh(self, stem: str) -> str:
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
        trailing: bool = False,
    ) -> list[str]:
        """Write every node the roots need, then the return statement; returns the outputs' texts."""
        results = [o for o in outputs if isinstance(o, Node)]
        order = [n for n in ops_below([*effects, *results]) if n not in self.names]
        if self.names:  # what is derived ahead hides what lies below it
            order = _needed([*effects, *results], self.names)
        last = _last_uses(order, [*results, *self.kept])
        for index, node in enumerate(order):
            self.statement(node, last.get(index, ()))
        texts = [self.operand(o) if isinstance(o, Node) else repr(o) for o in outputs]
        self.line(f"return {_structure(texts, out_spec, trailing)}")
        return texts

    def statement(self, node: Node, dying: Sequence[Node]) -> None:
        if _inline(node):
            return
        operands = [None if a is None else self.operand(a) for a in node.args]
        freed = [n for n in dying if n in self.names and not _inline(n)]
        heir = next((n for n in freed if n in node.inputs[:1] and n not in self.kept), None)
        name = self.names[heir] if heir is not None else self.fresh(self.stem(node))
        emit = _EMITTERS[type(node.op)]
        for line in emit(node, operands, name):
            self.line(line)
        if not isinstance(node.op, ops.Opaque) or not node.op.several:
            self.lines[-1] += f"  # ({', '.join(map(str, node.shape))})"
        self.names[node] = name
        gone = [self.names[n] for n in freed if n is not heir and n not in self.kept and n not in self.given]
        if gone:
            self.line(f"del {', '.join(gone)}")

    def stem(self, node: Node) -> str:
        """What to call a value: a derived one after the parameter it comes from, others after their operation."""
        paths = [n.op.path for n in ops_below([node]) if isinstance(n.op, ops.Param | ops.Buffer)]
        return paths[0].replace(".", "_") if self.deriving and paths else _stem(node)

    def operand(self, node: Node) -> str:
        op = node.op
        if isinstance(op, ops.Number):
            return f"({op.value})" if isinstance(op.value, sympy.Expr) else repr_number(op.value)
        if isinstance(op, ops.Param | ops.Buffer):
            return attribute("self", op.path)
        if isinstance(op, ops.Constant):
            return f"constants[{op.key!r}]"
        return self.names[node]

    def text(self) -> str:
        return "\n".join([self.signature, *self.lines]) + "\n"


def _needed(roots: Sequence[Node], known: Mapping[Node, str]) -> list[Node]:
    """The nodes below `roots` in order, not looking below what is already named."""
    order: list[Node] = []
    seen: set[Node] = set(known)
    for root in roots:
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                order.append(node)
                continue
            if node in seen:
                continue
            seen.add(node)
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.inputs) if a not in seen)
    return order


def _last_uses(order: Sequence[Node], alive: Sequence[Node]) -> dict[int, list[Node]]:
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
    """The text that reads a dotted path; names that are no identifiers (``Sequential``'s digits) go through getattr."""
    text = owner
    for part in path.split("."):
        text = f"{text}.{part}" if part.isidentifier() else f'getattr({text}, "{part}")'
    return text


def repr_number(value: Any) -> str:
    """Python text of a number, non-finite ones included."""
    if isinstance(value, float) and value != value:
        return 'float("nan")'
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value) if not isinstance(value, int | float) or value >= 0 else f"({value!r})"


class _Text:
    """A value whose repr is its text, so that repr of a structure is the text of the structure."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _structure(texts: Sequence[str], spec: TreeSpec | None, trailing: bool) -> str:
    if spec is not None:
        return repr(tree_unflatten([_Text(t) for t in texts], spec))
    return ", ".join(texts) + ("," if len(texts) == 1 else "") if texts else "()"


Emitter = Callable[[Node, Sequence[str | None], str], Sequence[str]]
_EMITTERS: dict[type[ops.Op], Emitter] = {}


def _emits(*kinds: type[ops.Op]) -> Callable[[Callable[[Any, Any, Any], str]], Callable[[Any, Any, Any], str]]:
    """Register a function (op, node, operand texts) -> expression for operations of these kinds."""

    def register(expression: Callable[[Any, Any, Any], str]) -> Callable[[Any, Any, Any], str]:
        for kind in kinds:
            _EMITTERS[kind] = lambda node, args, name: [f"{name} = {expression(node.op, node, args)}"]
        return expression

    return register


def _stem(node: Node) -> str:
    op = node.op
    if isinstance(op, ops.Pointwise):
        return op.fn
    if isinstance(op, ops.Reduce | ops.Norm | ops.Pool):
        return f"{op.kind}_{type(op).__name__.lower()}" if isinstance(op, ops.Norm | ops.Pool) else f"{op.kind}_over"
    if isinstance(op, ops.Opaque):
        return op.target.split(".")[1].rstrip("_")
    return {ops.RangeSum: "range_sum", ops.Reshape: "shaped"}.get(type(op), type(op).__name__.lower())


def _pairs(values: Sequence[int]) -> str:
    """An attribute per dimension, as one number where all agree."""
    return str(values[0]) if len(set(values)) == 1 else str(tuple(values))


def _options(**given: tuple[Any, Any]) -> str:
    """Keyword arguments that differ from their defaults, from name=(value text, is default)."""
    return "".join(f", {name}={text}" for name, (text, default) in given.items() if not default)


@_emits(ops.Conv)
def _conv(op: ops.Conv, node: Node, args: Sequence[str]) -> str:
    n = len(op.stride)
    x, left = args[0], [p[0] for p in op.padding]
    symmetric = all(p[0] == p[1] for p in op.padding)
    if not symmetric and not op.transposed:
        pads = [q for p in reversed(op.padding) for q in p]
        x, left = f"F.pad({x}, {pads})", [0] * n
    options = _options(
        stride=(_pairs(op.stride), set(op.stride) == {1}),
        padding=(_pairs(left), not any(left)),
        output_padding=(_pairs(op.output_padding or (0,)), not any(op.output_padding)),
        groups=(op.groups, op.groups == 1),
        dilation=(_pairs(op.dilation), set(op.dilation) == {1}),
    )
    function = f"F.conv_transpose{n}d" if op.transposed else f"F.conv{n}d"
    bias = "" if args[2] is None else f", {args[2]}"
    return f"{function}({x}, {args[1]}{bias}{options})"


@_emits(ops.Matmul)
def _matmul(op: ops.Matmul, node: Node, args: Sequence[str]) -> str:
    x, w, bias = args
    if len(node.arg(1).shape) == 2 and op.transpose_w:
        return f"F.linear({x}, {w}{'' if bias is None else f', {bias}'})"
    if len(node.arg(0).shape) == 2 and len(node.arg(1).shape) == 2 and bias is not None:
        return f"torch.addmm({bias}, {x}, {w})"
    product = f"{x} @ {w}{'.mT' if op.transpose_w else ''}"
    return product if bias is None else f"{product} + {bias}"


@_emits(ops.Pool)
def _pool(op: ops.Pool, node: Node, args: Sequence[str]) -> str:
    n = len(op.kernel)
    options = _options(
        stride=(_pairs(op.stride), op.stride == op.kernel),
        padding=(_pairs(op.padding), not any(op.padding)),
        dilation=(_pairs(op.dilation), set(op.dilation) == {1}),
        ceil_mode=(op.ceil_mode, not op.ceil_mode),
        count_include_pad=(op.count_include_pad, op.count_include_pad or op.kind != "avg"),
        divisor_override=(op.divisor, op.divisor is None),
    )
    sign, function = ("-", "max") if op.kind == "min" else ("", op.kind)
    return f"{sign}F.{function}_pool{n}d({sign}{args[0]}, {_pairs(op.kernel)}{options})"


def _range_sum(node: Node, args: Sequence[str | None], name: str) -> Sequence[str]:
    assert isinstance(node.op, ops.RangeSum) and args[0] is not None
    return ranges.lines(node.op, node.arg(0), args[0], name)


_EMITTERS[ops.RangeSum] = _range_sum


@_emits(ops.Pointwise)
def _pointwise(op: ops.Pointwise, node: Node, args: Sequence[str]) -> str:
    return op.traits.torch.format(*args)


@_emits(ops.Cast)
def _cast(op: ops.Cast, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.to({op.dtype})"


@_emits(ops.Reduce)
def _reduce(op: ops.Reduce, node: Node, args: Sequence[str]) -> str:
    x, dims = args[0], op.dims[0] if len(op.dims) == 1 else op.dims
    keep = ", keepdim=True" if op.keepdim else ""
    cast = f", dtype={op.dtype}" if op.dtype is not None else ""
    match op.kind:
        case "max" | "min":
            return f"torch.a{op.kind}({x}, {dims}{keep})"
        case "logsumexp":
            return f"torch.logsumexp({x}, {dims}{keep})"
        case "var":
            return f"torch.var({x}, {dims}, correction={op.correction:g}{keep})"
        case "prod":
            return _product(op, x, keep, cast)
        case _:
            return f"{x}.{op.kind}({dims}{keep}{cast})"


def _product(op: ops.Reduce, x: str, keep: str, cast: str) -> str:
    """`torch.prod` takes one dimension at a time."""
    for dim in reversed(op.dims):
        x = f"torch.prod({x}, {dim}{keep}{cast})"
    return x


@_emits(ops.Softmax)
def _softmax(op: ops.Softmax, node: Node, args: Sequence[str]) -> str:
    return f"F.{'log_' if op.log else ''}softmax({args[0]}, dim={op.dim})"


@_emits(ops.Norm)
def _norm(op: ops.Norm, node: Node, args: Sequence[str]) -> str:
    x, weight, bias, mean, var = args
    trailing = f"({', '.join(map(str, node.shape[-op.trailing :]))},)"
    match op.kind:
        case "batch":
            return f"F.batch_norm({x}, {mean}, {var}, {weight}, {bias}, {op.training}, {op.momentum!r}, {op.eps!r})"
        case "instance":
            return f"F.instance_norm({x}, {mean}, {var}, {weight}, {bias}, {op.training}, {op.momentum!r}, {op.eps!r})"
        case "group":
            return f"F.group_norm({x}, {op.groups}, {weight}, {bias}, {op.eps!r})"
        case "layer":
            return f"F.layer_norm({x}, {trailing}, {weight}, {bias}, {op.eps!r})"
        case "rms":
            return f"F.rms_norm({x}, {trailing}, {weight}, {op.eps!r})"


@_emits(ops.Dropout)
def _dropout(op: ops.Dropout, node: Node, args: Sequence[str]) -> str:
    return f"F.dropout({args[0]}, {op.p!r}, True)"


@_emits(ops.Reshape)
def _reshape(op: ops.Reshape, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.reshape({_tuple(op.shape)})"


@_emits(ops.Expand)
def _expand(op: ops.Expand, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.expand({_tuple(op.shape)})"


def _tuple(values: Sequence[Any]) -> str:
    return f"({', '.join(map(str, values))}{',' if len(values) == 1 else ''})"


@_emits(ops.Permute)
def _permute(op: ops.Permute, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.permute{op.dims}" if len(op.dims) > 1 else f"{args[0]}"


@_emits(ops.Slice)
def _slice(op: ops.Slice, node: Node, args: Sequence[str]) -> str:
    step = "" if op.step == 1 else f":{op.step}"
    whole = op.stop == node.arg(0).shape[op.dim]
    return f"{args[0]}[{':, ' * op.dim}{op.start or ''}:{'' if whole else op.stop}{step}]"


@_emits(ops.Cat)
def _cat(op: ops.Cat, node: Node, args: Sequence[str]) -> str:
    return f"torch.cat(({', '.join(args)},), {op.dim})"


@_emits(ops.Pad)
def _pad(op: ops.Pad, node: Node, args: Sequence[str]) -> str:
    first = min(dim for dim, _, _ in op.pads)
    amounts = {dim: (left, right) for dim, left, right in op.pads}
    pads = [n for dim in range(node.ndim - 1, first - 1, -1) for n in amounts.get(dim, (0, 0))]
    mode = f", value={repr_number(op.value)}" if op.mode == "constant" else f', mode="{op.mode}"'
    return f"F.pad({args[0]}, {tuple(pads)}{mode if mode != ', value=0.0' else ''})"


@_emits(ops.Full)
def _full(op: ops.Full, node: Node, args: Sequence[str]) -> str:
    return f'torch.full({_tuple(op.shape)}, {repr_number(op.value)}, dtype={op.dtype}, device="{op.device}")'


@_emits(ops.Vector)
def _vector(op: ops.Vector, node: Node, args: Sequence[str]) -> str:
    return f'torch.tensor({list(op.values)}, dtype={op.dtype}, device="{op.device}")'


@_emits(ops.Item)
def _item(op: ops.Item, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}[{op.index}]"


@_emits(ops.Opaque)
def _opaque(op: ops.Opaque, node: Node, args: Sequence[str]) -> str:
    positional = [_literal(a, args) for a in op.arguments]
    keywords = [f"{name}={_literal(a, args)}" for name, a in op.keywords]
    return f"torch.ops.{op.target}({', '.join(positional + keywords)})"


def _literal(value: Any, args: Sequence[str]) -> str:
    """Python text of an argument of an opaque call."""
    if isinstance(value, ops.Arg):
        return args[value.index]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_literal(v, args) for v in value)}]"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, float):
        return repr_number(value)
    return repr(value) if isinstance(value, str) else str(value)
