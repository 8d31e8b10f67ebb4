"""One ATen call, seen as the normalisations see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusewright.ir.node import Node, make
from fusewright.ir.ops import Number, Op, Pointwise, Size, TensorType
from fusewright.ir.pointwise import Scalar


@dataclass(frozen=True)
class Call:
    """An ATen call with its arguments by the schema's names, defaults filled in and tensors as nodes.

    results    the types of its results, as the trace found them
    used       which of several results anything uses
    returned   whether the model returns the result: then a view must stay a view of its own
    escapes    whether the model returns something that may share memory with the result
    serial     allots the next serial number, for effects
    """

    target: str
    values: Mapping[str, Any]
    results: tuple[TensorType | None, ...]
    used: frozenset[int]
    returned: bool
    escapes: bool
    where: str
    serial: Callable[[], int]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Argument `name`, or `default` where the overload has none."""
        return self.values.get(name, default)

    def node(self, name: str) -> Node:
        """Tensor argument `name`."""
        value = self.values[name]
        assert isinstance(value, Node), f"{self.target}: {name} is no tensor"
        return value

    def optional(self, name: str) -> Node | None:
        """Tensor argument `name`, if there is one."""
        return None if self.values.get(name) is None else self.node(name)

    def ints(self, name: str, n: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """An attribute per dimension: one number stands for `n`, none for `default`."""
        value = self.values.get(name)
        values = tuple(value) if isinstance(value, tuple | list) else () if value is None else (value,)
        return default if not values else values * n if len(values) == 1 else values

    def dims(self, name: str, ndim: int) -> tuple[int, ...]:
        """A list of dimensions, ascending and non-negative; none given means all."""
        value = self.values.get(name)
        given = tuple(value) if isinstance(value, tuple | list) else () if value is None else (value,)
        return tuple(sorted(d % ndim for d in given)) if given else tuple(range(ndim))

    @property
    def result(self) -> TensorType:
        """The type of the only (or first) result."""
        first = self.results[0]
        assert first is not None, f"{self.target} has no tensor result"
        return first

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.result.shape

    def apply(self, fn: str, *args: Node | Scalar, params: tuple[Scalar, ...] = ()) -> Node:
        """A pointwise function, likewise; Python numbers may stand for operands."""
        return self.make(Pointwise(fn, params), *(a if isinstance(a, Node) else make(Number(a)) for a in args))

    def make(self, op: Op, *args: Node | None) -> Node:
        """A node that remembers where in the model it came from."""
        return make(op, *args, where=self.where)


Normal = Node | tuple[Node | None, ...] | None
Handler = Callable[[Call], Normal]
