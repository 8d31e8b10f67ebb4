"""An exported program -> a Graph: every ATen call becomes a semantic node or an opaque one, in order."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from fusewright.capture import alias
from fusewright.capture.export import Exported
from fusewright.capture.normalize import TABLE, Call, Normal, normalize
from fusewright.capture.regions import refusal, where
from fusewright.capture.spelled import operands, spelled
from fusewright.capture.symbols import NotSymbolicError
from fusewright.errors import CaptureError
from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.ops import TensorType

# Checks of what the trace took for granted; whoever runs the graph checks its inputs anyway.
_CHECKS = frozenset({"aten._assert_tensor_metadata.default"})
_READS = frozenset({"aten.item.default", "aten._local_scalar_dense.default"})
_SYMBOLIC_CHECKS = ("aten._assert_scalar", "aten.sym_constrain_range")
_SCALARS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


class _Retry(Exception):
    """Something learnt on the way means that these calls must stay calls."""

    def __init__(self, call: fx.Node) -> None:
        super().__init__(call)
        self.call = call


class _Left(Exception):
    """A call of a composition that is not understood."""


def build(exported: Exported) -> tuple[Graph, tuple[str, ...]]:
    """The graph of `exported`, and why each opaque operation in it is one."""
    kept: set[fx.Node] = set()
    while True:
        try:
            return _Builder(exported, frozenset(kept)).run()
        except _Retry as retry:
            assert retry.call not in kept, f"{retry.call} was kept already"
            kept.add(retry.call)


@dataclass
class _Builder:
    """Walks the traced graph once; `kept` are calls known to have to stay calls."""

    exported: Exported
    kept: frozenset[fx.Node]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    effects: list[Node] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)
    serials: int = 0

    def run(self) -> tuple[Graph, tuple[str, ...]]:
        traced = self.exported.graph
        self.aliases = alias.analyse(traced, self.understood)
        self.values.update(self.exported.sources)
        self.same: dict[fx.Node, list[fx.Node]] = {}
        for name in self.aliases.names:
            root = alias.find(self.aliases.names, name)
            self.same.setdefault(root, [root]).append(name)
        for buffer in self.aliases.assigned:
            self.values[buffer] = self.copied(buffer)
        for node in traced.nodes:
            if node in self.aliases.assigned.values():
                self.assign(node)
            elif node.op == "call_function" and node not in self.aliases.idle:
                self.visit(node)
            elif node.op == "get_attr":
                raise refusal(self.exported.model, node, "holds a subprogram (such as torch.cond)")
        outputs = self.outputs(self.exported.outputs)
        graph = Graph(self.exported.inputs, outputs, tuple(self.effects), dict(self.exported.symbols.places))
        return graph, tuple(self.reasons)

    def copied(self, buffer: fx.Node) -> Node:
        """A copy of a buffer as the forward finds it."""
        source = self.values[buffer]
        kept = ops.Opaque("aten.clone.default", (ops.Arg(0),), (), (source.type,), False, self.serial())
        self.effects.append(make(kept, source))
        return self.effects[-1]

    def assign(self, node: fx.Node) -> None:
        """The new value of a buffer, written at the end."""
        buffer, value = node.args[0], self.node(node.args[1])
        assert isinstance(buffer, fx.Node)
        target = self.exported.sources[buffer]
        op = ops.Opaque("aten.copy_.default", (ops.Arg(0), ops.Arg(1)), (), (target.type,), False, self.serial())
        self.effects.append(make(op, target, value))
        self.reasons[f"aten.copy_.default of the buffer {getattr(target.op, 'path', '')} runs as it did"] = None

    def understood(self, node: fx.Node) -> bool:
        target = str(node.target)
        return node not in self.kept and alias.is_in_place(target) and alias.functional(target) in TABLE

    def visit(self, node: fx.Node) -> None:
        found = node.meta.get("val")
        if isinstance(found, _SCALARS):
            self.values[node] = self.scalar(node, found)
        elif node.target is operator.getitem:
            self.values[node] = self.item(node)
        elif not isinstance(node.target, OpOverload):
            what = f"uses {getattr(node.target, '__name__', node.target)}, which is no plain operation"
            raise refusal(self.exported.model, node, what)
        else:
            self.call(node, str(node.target))

    def scalar(self, node: fx.Node, found: Any) -> Any:
        if str(node.target) in _READS:
            raise refusal(self.exported.model, node, "reads a number out of a tensor (as .item() does)")
        if isinstance(found, torch.SymInt) or type(found) is int:
            return self.exported.symbols.size(found)
        if isinstance(found, bool | float):
            return found
        raise NotSymbolicError(f"{found} is computed from the batch size by more than integer arithmetic")

    def item(self, node: fx.Node) -> Any:
        parent, index = node.args
        assert isinstance(parent, fx.Node) and isinstance(index, int)
        value = self.values[parent]
        if isinstance(value, tuple):
            return value[index]
        return make(ops.Item(index, self.type(node.meta["val"])), value, where=value.where)

    def call(self, node: fx.Node, target: str) -> None:
        if target in _CHECKS:
            return
        if target.startswith(_SYMBOLIC_CHECKS):
            raise NotSymbolicError("the model checks its batch size")
        found: Normal = None
        function = node in self.aliases.functions
        if function or not self.must_stay(node):
            found = self.lifted(node, target) or self.normal(node, alias.functional(target) if function else target)
        if found is None and function:
            raise _Retry(node)
        if found is None and not self.must_stay(node):
            found = self.composed(node)
        self.values[node] = found if found is not None else self.opaque(node, target)
        if function:
            for name in self.same[alias.find(self.aliases.names, node)]:
                self.values[name] = found

    def must_stay(self, node: fx.Node) -> bool:
        return node in self.kept or self.aliases.touches_pinned(node)

    def lifted(self, node: fx.Node, target: str) -> Node | None:
        """A literal tensor is copied at each call; where nothing writes to it or returns it, itself will do."""
        if target == "aten.lift_fresh_copy.default" and not self.aliases.escapes(node):
            return self.node(node.args[0])
        if alias.is_idle_detach(node):
            return self.node(node.args[0])
        return None

    def normal(self, node: fx.Node, target: str) -> Normal:
        users = [u for u in node.users if u.target is operator.getitem and u.users]
        call = Call(
            target=target,
            values={name: self.value(v) for name, v in alias.bound(node).items()},
            results=self.results(node),
            used=frozenset(u.args[1] for u in users if isinstance(u.args[1], int)),
            returned=self.is_returned(node, users),
            escapes=self.aliases.escapes(node),
            where=where(node),
            serial=self.serial,
        )
        found = normalize(call)
        if isinstance(found, Node) and found.op.effectful and found not in self.effects:
            self.effects.append(found)
        return found

    def is_returned(self, node: fx.Node, users: Sequence[fx.Node]) -> bool:
        """Whether the caller gets the result of a call, or one of those that `users` take, and can tell which it is."""
        return any(user.op == "output" for user in (*node.users, *(w for u in users for w in u.users)))

    def composed(self, node: fx.Node) -> Normal:
        """What the call is composed of, where all of that is understood."""
        graph = spelled(node)
        if graph is None:
            return None
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        sources = dict(zip(placeholders, map(self.value, operands(node)), strict=True))
        results = next(n for n in graph.nodes if n.op == "output").args[0]
        several = isinstance(results, tuple | list)
        try:
            inner = replace(self.exported, graph=graph, sources=sources, outputs=results if several else (results,))
            written, _ = _Composition(inner, frozenset()).run()
        except (_Left, _Retry, CaptureError, NotSymbolicError):
            return None
        found, types = written.outputs, self.results(node)
        if [n.type[:3] for n in found if isinstance(n, Node)] != [t[:3] for t in types if t is not None]:
            return None
        assert all(isinstance(n, Node) for n in found)
        return found if several else found[0]  # type: ignore[return-value]

    def opaque(self, node: fx.Node, target: str) -> Node:
        args: list[Node] = []

        def literal(value: Any) -> Any:
            if isinstance(value, Node):
                args.append(value)
                return ops.Arg(len(args) - 1)
            return tuple(literal(v) for v in value) if isinstance(value, tuple | list) else value

        positional = tuple(literal(self.value(a)) for a in node.args)
        keywords = tuple((k, literal(self.value(a))) for k, a in node.kwargs.items())
        several = isinstance(node.meta.get("val"), tuple | list)
        op = ops.Opaque(target, positional, keywords, self.results(node), several, self.serial())
        found = make(op, *args, where=where(node))
        self.effects.append(found)
        why = "shares memory that is written in place" if self.aliases.touches_pinned(node) else "runs as it did"
        self.reasons[f"{target} in {where(node) or 'the model'} {why}"] = None
        return found

    def serial(self) -> int:
        self.serials += 1
        return self.serials

    def value(self, value: Any) -> Any:
        """An argument of a traced call with our values in place of the trace's."""
        if isinstance(value, fx.Node):
            return self.values[value]
        return tuple(self.value(v) for v in value) if isinstance(value, tuple | list) else value

    def node(self, value: Any) -> Node:
        found = self.value(value)
        assert isinstance(found, Node)
        return found

    def results(self, node: fx.Node) -> tuple[TensorType | None, ...]:
        found = node.meta.get("val")
        several = found if isinstance(found, tuple | list) else () if found is None else (found,)
        return tuple(self.type(v) if isinstance(v, torch.Tensor) else None for v in several)

    def type(self, tensor: torch.Tensor) -> TensorType:
        return TensorType(self.exported.symbols.shape(tensor.shape), tensor.dtype, tensor.device)

    def outputs(self, traced: Sequence[Any]) -> tuple[Node | int | float | bool | str | None, ...]:
        results: list[Node | int | float | bool | str | None] = []
        first: dict[Node, fx.Node] = {}
        for output in traced:
            value = self.value(output)
            if isinstance(value, sympy.Expr):
                value = make(ops.Number(value))
            elif isinstance(value, Node) and isinstance(output, fx.Node):
                self.check_distinct(output, first.setdefault(value, output))
            results.append(value)
        return tuple(results)

    def check_distinct(self, output: fx.Node, other: fx.Node) -> None:
        """Equal values are one node, but tensors that the model returned as two must stay two."""
        sets = self.aliases.sets
        if alias.find(sets, output) is not alias.find(sets, other) and isinstance(output.target, OpOverload):
            raise _Retry(output)


class _Composition(_Builder):
    """The calls that one call is composed of; none of them may stay a call."""

    def is_returned(self, node: fx.Node, users: Sequence[fx.Node]) -> bool:
        """A view of what is computed on the way is all that there is of it; one of an operand is not."""
        sets = self.aliases.sets
        of_operand = any(alias.find(sets, n) is alias.find(sets, node) for n in self.exported.sources)
        return of_operand and super().is_returned(node, users)

    def opaque(self, node: fx.Node, target: str) -> Node:
        raise _Left(target)
