"""Sample programs: under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusewright.ir.node import Node


@dataclass(frozen=True)
class SampleProgram:
    """Not there yet."""

    root: Node
    leaves: tuple[Node, ...]


def parse(root: Node, single: Callable[[Node], bool]) -> SampleProgram | str:
    """Nothing, so far."""
    return f"{root!r} is no sample program"
