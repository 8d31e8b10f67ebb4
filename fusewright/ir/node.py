"""The graph: a hash-consed DAG of frozen nodes.

Two structurally equal pure nodes are the same object, so equality is identity, common subexpressions exist once, and
whatever no output or effect reaches is gone.  Effectful nodes (random numbers, running statistics, opaque operations)
carry a serial number, so each is unique, and `Graph.effects` keeps their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import sympy
import torch

from fusewright.ir.ops import Input, Number, Op, Size, TensorType

_interned: WeakValueDictionary[tuple[Any, ...], Node] = WeakValueDictionary()


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Node:
    """One operation applied to nodes: `op` says which, with its attributes; the rest is inferred from both.

    `shape` entries are ints, or sympy expressions in the batch symbol.  `where` is the module path the operation came
    from, for messages only.  `inputs` are the arguments that are there (an absent bias is `None` in `args`); `text` is
    that of the operation, by which nodes are found; `varies` says whether it is computed from an input, in every call.
    Operations with several results have the type of their first one; `Item` picks them apart.
    """

    op: Op
    args: tuple[Node | None, ...]
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    where: str
    text: str
    inputs: tuple[Node, ...] = field(init=False)  # kept, since every walk through a graph asks every node for it
    varies: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(a for a in self.args if a is not None))
        object.__setattr__(self, "varies", isinstance(self.op, Input) or any(a.varies for a in self.inputs))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype, self.device, weak=isinstance(self.op, Number))

    def arg(self, index: int) -> Node:
        """Argument `index`, which must be there."""
        value = self.args[index]
        assert value is not None, f"{self.op} has no argument {index}"
        return value

    def __repr__(self) -> str:
        dims = ", ".join(map(_shown, self.shape))
        return f"<{type(self.op).__name__} ({dims}) {str(self.dtype).removeprefix('torch.')}>"


@lru_cache(maxsize=4096)
def _shown(size: Size) -> str:
    """Text of a size: what is no group says so about nodes, and sympy takes its time to print a product."""
    return str(size)


def make(op: Op, *args: Node | None, where: str = "") -> Node:
    """The node that applies `op` to `args`: the existing one when an equal one is alive.

    Raises `GraphError` when the operation does not accept arguments of these shapes or dtypes.
    """
    # repr, because 1 == 1.0 == True and 0.0 == -0.0 although they mean different programs
    return _node(op, repr(op), args, op.infer(tuple(None if a is None else a.type for a in args)), where)


def _node(op: Op, text: str, args: tuple[Node | None, ...], inferred: TensorType, where: str) -> Node:
    key = (type(op), text, tuple(map(id, args)), inferred.shape, inferred.dtype, inferred.device)
    found = _interned.get(key)
    if found is None:
        found = Node(op, args, inferred.shape, inferred.dtype, inferred.device, where, text)
        _interned[key] = found
    return found


def remade(node: Node, args: Iterable[Node | None]) -> Node:
    """The same operation of other arguments: the node itself where they are the same."""
    new = tuple(args)
    if new == node.args:
        return node
    if all(map(_alike, new, node.args)):  # whose types say what comes of them
        return _node(node.op, node.text, new, node.type, node.where)
    return make(node.op, *new, where=node.where)


def _alike(a: Node | None, b: Node | None) -> bool:
    """Whether two arguments have the same type."""
    if a is b:
        return True
    if a is None or b is None or isinstance(a.op, Number) or isinstance(b.op, Number):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


@dataclass(frozen=True)
class Graph:
    """A whole model: `outputs` are what it returns (flat; Python values allowed), `effects` what it must do, in order.

    `inputs` are the flat tensor inputs in call order; `symbols` maps each batch symbol to the (input, dimension) that
    carries it and to the inclusive range of values the graph is valid for (`None`: no upper bound).
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Node | int | float | bool | str | None, ...]
    effects: tuple[Node, ...] = ()
    symbols: Mapping[sympy.Symbol, Symbol] = field(default_factory=dict)

    def roots(self) -> tuple[Node, ...]:
        """Every node that must be computed: effects in order, then outputs."""
        return (*self.effects, *(o for o in self.outputs if isinstance(o, Node)))

    def nodes(self) -> list[Node]:
        """All live nodes, arguments before users, effects in their order."""
        return list(self._nodes)

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        return tuple(topological(self.roots()))

    def users(self) -> dict[Node, int]:
        """How many uses each live node has; an output or effect counts as one use."""
        counts: dict[Node, int] = {}
        for node in self.nodes():
            for arg in node.inputs:
                counts[arg] = counts.get(arg, 0) + 1
        for root in self.roots():
            counts[root] = counts.get(root, 0) + 1
        return counts

    def substitute(self, old: Node, new: Node) -> Graph:
        """This graph with `new` wherever `old` was used."""
        return self.substituted({old: new})[0]

    def substituted(self, news: Mapping[Node, Node]) -> tuple[Graph, dict[Node, Node]]:
        """This graph with new values wherever old ones were used, and what has become of each of its nodes.

        The new ones are computed from none of the old.
        """
        mapping = dict(news)
        for node in self.nodes():
            if node in mapping:
                continue
            mapping[node] = remade(node, [None if a is None else mapping.get(a, a) for a in node.args])
        outputs = tuple(mapping[o] if isinstance(o, Node) else o for o in self.outputs)
        return replace(self, outputs=outputs, effects=tuple(mapping[e] for e in self.effects)), mapping


@dataclass(frozen=True)
class Symbol:
    """Where a batch symbol is read from, and for which values the graph holds; the dimension is it so many `times`, and
    so many `more`."""

    input: int
    dim: int
    low: int
    high: int | None
    times: int = 1
    more: int = 0


def topological(roots: Sequence[Node], known: Collection[Node] = ()) -> list[Node]:
    """The nodes below `roots` in post-order: every argument before its users, earlier roots first; no recursion.

    Values that are `known` are left out, and so is what only they need.
    """
    order: list[Node] = []
    given = known if isinstance(known, Set | Mapping) else frozenset(known)  # as large as a graph at times
    done: set[Node] = set()
    for root in roots:
        new = root not in given and root not in done
        stack: list[tuple[Node, Iterator[Node]]] = [(root, iter(root.inputs))] if new else []
        done.add(root)
        while stack:
            node, pending = stack[-1]
            child = next(pending, None)
            if child is None:
                order.append(node)
                stack.pop()
            elif child not in done and child not in given:
                done.add(child)
                stack.append((child, iter(child.inputs)))
    return order
