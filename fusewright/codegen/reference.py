"""What a kernel's group computes, in ATen: the function that verification and gradients run in the kernel's place."""

from __future__ import annotations

from functools import lru_cache

from fusewright.codegen.aten import lower_function
from fusewright.ir.node import Node
from fusewright.schedule.group import Group, as_graph, bodies


def reference_text(group: Group) -> str:
    """The text of ``reference``, a function of the group's operands."""
    return _reference(group.results, group.operands)


@lru_cache(maxsize=4)  # the same one for all of a group's options; windows along a row of 90,000 elements take a second
def _reference(results: tuple[Node, ...], operands: tuple[Node, ...]) -> str:
    return lower_function("reference", as_graph(bodies(results, operands), operands))
