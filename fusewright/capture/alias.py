"""Mutation and aliasing: which calls may become values, and which must stay calls, in their order.

Values of one *alias set* may share memory.  A set nothing writes to needs no care.  In a set that is written to, an
in-place call on a fresh value becomes its functional form if no other name of that memory is used afterwards.  If
that fails for any write of a set, the set is *pinned*: every call that touches it stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusewright.ir.overloads import STATISTICS, allocates


def bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of an ATen call by the schema's names, defaults filled in."""
    assert isinstance(node.target, OpOverload)
    values: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args) and not argument.kwarg_only:
            values[argument.name] = node.args[index]
        else:
            values[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return values


def functional(target: str) -> str:
    """The functional form's name of an in-place overload (``aten.relu_.default`` -> ``aten.relu.default``)."""
    namespace, name, overload = target.split(".")
    return f"{namespace}.{name.removesuffix('_')}.{overload}"


def is_in_place(target: str) -> bool:
    """Whether an overload is named as an in-place one."""
    name = target.split(".")[1]
    return name.endswith("_") and not name.endswith("__")


def _flat(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)


@dataclass
class Aliases:
    """The alias sets of a traced graph.

    names      each in-place result and its operand are one tensor under two names
    functions  the in-place calls that become their functional form
    pinned     the sets whose calls must stay calls, by representative
    escaping   the sets that an output of the model belongs to
    assigned   buffers that the forward replaces, with the copy at the end that stands for it
    idle       copies of a buffer to itself, left by an in-place assignment such as ``self.b += 1``
    """

    order: dict[fx.Node, int]
    sets: dict[fx.Node, fx.Node]
    names: dict[fx.Node, fx.Node]
    functions: set[fx.Node]
    pinned: set[fx.Node]
    escaping: set[fx.Node]
    assigned: dict[fx.Node, fx.Node]
    idle: set[fx.Node]

    def touches_pinned(self, node: fx.Node) -> bool:
        """Whether `node` reads, writes or belongs to a pinned set, a norm's own statistics aside."""
        own = norm_statistics(node)
        reached = [a for a in node.all_input_nodes if a not in own]
        return any(find(self.sets, n) in self.pinned for n in (node, *reached))

    def escapes(self, node: fx.Node) -> bool:
        """Whether an output of the model may share memory with `node`."""
        return find(self.sets, node) in self.escaping


def find(sets: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """The representative of the set that `node` is in."""
    root = node
    while sets.setdefault(root, root) is not root:
        root = sets[root]
    while sets[node] is not root:
        sets[node], node = root, sets[node]
    return root


def analyse(graph: fx.Graph, understood: Callable[[fx.Node], bool]) -> Aliases:
    """The alias sets of `graph`; `understood` says whether an in-place call has a functional form worth trying."""
    nodes = list(graph.nodes)
    final = _final_copies(nodes)
    result = Aliases({n: i for i, n in enumerate(nodes)}, {}, {}, set(), set(), set(), {}, set())
    for node in nodes:
        if node.op == "output":
            result.escaping.update(find(result.sets, n) for n in node.all_input_nodes)
        elif node.op == "call_function" and node not in final:
            _unite(result, node)
    writes = [(n, target) for n in nodes if n.op == "call_function" and n not in final for target in _written(n)]
    writes += _settle(result, final, {find(result.sets, target) for _, target in writes}, nodes)
    members = _members(result, nodes)
    for call, target in writes:
        group = find(result.sets, target)
        if understood(call) and _is_private(result, members[group], call, target):
            result.functions.add(call)
        else:
            result.pinned.add(group)
    result.functions = {c for c in result.functions if find(result.sets, c) not in result.pinned}
    for node in nodes:  # statistics that a training norm writes bind everybody else who reads them
        result.pinned.update(find(result.sets, s) for s in norm_statistics(node))
    return result


def _unite(aliases: Aliases, node: fx.Node) -> None:
    """Put the result of `node` into the sets, and under the names, that it belongs to."""
    for source in _aliased(node):
        aliases.sets[find(aliases.sets, node)] = find(aliases.sets, source)
    if isinstance(node.target, OpOverload) and is_in_place(str(node.target)) and node.args:
        operand = node.args[0]
        if isinstance(operand, fx.Node):
            aliases.names[node] = find(aliases.names, operand)


def _final_copies(nodes: list[fx.Node]) -> set[fx.Node]:
    """The copies into buffers that a trace ends with: ``self.b = self.b + 1`` leaves one."""
    found: set[fx.Node] = set()
    for node in reversed([n for n in nodes if n.op == "call_function"]):
        buffer = node.args[0] if node.args else None
        if str(node.target) != "aten.copy_.default" or node.users or not isinstance(buffer, fx.Node):
            break
        if buffer.op != "placeholder":
            break
        found.add(node)
    return found


def _settle(
    aliases: Aliases, final: set[fx.Node], written: set[fx.Node], nodes: list[fx.Node]
) -> list[tuple[fx.Node, fx.Node]]:
    """Sort the final copies into idle ones, assignments and, which are returned, plain writes.

    Values that an assigned buffer had before may be saved for the backward pass, so the forward reads a copy of it and
    only the end writes to it.
    """
    written = written | {find(aliases.sets, s) for n in nodes for s in norm_statistics(n)}
    rest: list[tuple[fx.Node, fx.Node]] = []
    for node in (n for n in nodes if n in final):
        buffer, value = node.args[0], node.args[1]
        assert isinstance(buffer, fx.Node)
        if isinstance(value, fx.Node) and find(aliases.names, value) is buffer:
            aliases.idle.add(node)
        elif find(aliases.sets, buffer) in written | aliases.escaping or buffer in aliases.assigned:
            _unite(aliases, node)
            rest.append((node, buffer))
        else:
            aliases.assigned[buffer] = node
    return rest


def _members(aliases: Aliases, nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(find(aliases.sets, node), []).append(node)
    return members


def _is_private(aliases: Aliases, members: list[fx.Node], call: fx.Node, target: fx.Node) -> bool:
    """Whether nobody can see that `call` did not write: a value of this graph, and no other name of it used later."""
    if any(m.op != "call_function" for m in members):
        return False
    same = find(aliases.names, target)
    now = aliases.order[call]
    others = [m for m in members if aliases.order[m] < now and find(aliases.names, m) is not same]
    return all(aliases.order[user] <= now for m in others for user in m.users)


def _aliased(node: fx.Node) -> list[fx.Node]:
    """The arguments that the result of `node` may share memory with."""
    if not isinstance(node.target, OpOverload):  # taking one of several results
        return [a for a in node.all_input_nodes if "val" not in a.meta or not _is_number(a.meta["val"])]
    if _is_dropout_that_drops(node):
        return []
    schema = node.target._schema
    if any(r.alias_info is not None for r in schema.returns):
        values = bound(node)
        marked = [a.name for a in schema.arguments if a.alias_info is not None]
        return [n for name in marked for n in _flat(values[name])]
    return [] if allocates(node.target) else list(node.all_input_nodes)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_dropout_that_drops(node: fx.Node) -> bool:
    values = bound(node) if str(node.target) == "aten.dropout.default" else {}
    return bool(values) and bool(values["train"]) and values["p"] != 0


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that `node` writes to by its schema."""
    if not isinstance(node.target, OpOverload) or is_idle_detach(node):
        return []
    values = bound(node)
    arguments = node.target._schema.arguments
    return [
        n
        for a in arguments
        if a.alias_info is not None and a.alias_info.is_write and not _is_running(a.name)
        for n in _flat(values[a.name])
    ]


def _is_running(name: str) -> bool:
    return name in STATISTICS


def is_idle_detach(node: fx.Node) -> bool:
    """Whether `node` detaches a literal tensor in place, as every trace of one does: it has no gradient anyway.

    (Whether other values have one, a trace does not tell.)
    """
    detaches = str(node.target) == "aten.detach_.default"
    return detaches and str(node.all_input_nodes[0].target) == "aten.lift_fresh_copy.default"


def norm_statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm in training mode writes; the schemas do not tell."""
    if not isinstance(node.target, OpOverload) or node.op != "call_function":
        return []
    values = bound(node)
    training = values.get("training", values.get("use_input_stats", values.get("train", True)))
    return [n for name in STATISTICS for n in _flat(values.get(name))] if training else []
