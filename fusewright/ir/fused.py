"""A kernel group in the graph: a subgraph that one generated kernel computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusewright.ir.types import Op, TensorType, Types

if TYPE_CHECKING:
    from fusewright.ir.node import Node


@dataclass(frozen=True)
class Fused(Op):
    """`body`, a graph over `Input` placeholders, one per argument and in their order, computed by kernel `name`.

    `rows` says that a convolution's result is written row by row where eager's has its channels last.

    `also` are values that are computed on the way and are results as well: `Item` 1 and so on, the body's being 0.
    """

    name: str
    body: Node
    also: tuple[Node, ...] = ()
    rows: bool = False

    @property
    def bodies(self) -> tuple[Node, ...]:
        """All results."""
        return (self.body, *self.also)

    def infer(self, types: Types) -> TensorType:
        return self.body.type

    def __repr__(self) -> str:  # nodes are interned by it, and bodies are interned nodes
        rows = ", rows" if self.rows else ""
        return f"Fused({self.name!r}, {', '.join(f'{id(result):#x}' for result in self.bodies)}{rows})"
