"""A kernel group in the graph: a subgraph that one generated kernel computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusewright.ir.types import Op, TensorType, Types

if TYPE_CHECKING:
    from fusewright.ir.node import Node


@dataclass(frozen=True)
class Fused(Op):
    """`body`, a graph over `Input` placeholders, one per argument and in their order, computed by kernel `name`."""

    name: str
    body: Node

    def infer(self, types: Types) -> TensorType:
        return self.body.type

    def __repr__(self) -> str:  # nodes are interned by it, and bodies are interned nodes
        return f"Fused({self.name!r}, {id(self.body):#x})"
