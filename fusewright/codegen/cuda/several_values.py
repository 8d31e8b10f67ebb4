"""What streams whose values are several numbers each have in common in CUDA C++, and kernels of several results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusewright.codegen.cpp import ELEMENT, Scalars, compute_type
from fusewright.codegen.cuda.stream import Writer
from fusewright.codegen.cuda.stream_values import Values, for_each
from fusewright.codegen.stream_values import constant, unknown
from fusewright.codegen.text import Lines, indent
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.kernel import Array, Kernel
from fusewright.schedule.stream_record import Stream


class SeveralValues(Values):
    """Writes the values that are `computed` of an element, at once."""

    def __init__(self, s: Stream, names: dict[Node, str], computed: Sequence[Node]) -> None:
        super().__init__(s, names)
        self.computed = computed

    @property
    def compute(self) -> str:
        return "Each"

    def struct(self, about: str) -> Lines:
        """The struct of them."""
        members = [f"{compute_type(value.dtype)} of{i};" for i, value in enumerate(self.computed)]
        return [f"// {about}", "struct Each {", *indent(members), "};", ""]

    def _plain(self) -> Lines:
        loads, given, element = self.loads("before", "VALUES<WIDE>")
        assert self.s.before is not None
        constants = {leaf: constant(leaf) for leaf in self.s.before.leaves if isinstance(leaf.op, ops.Full)}
        scalars = Scalars(given | constants, unknown, cuda=True, rounds=self.rounds)
        found = [scalars.value(value) for value in self.computed]
        return [*loads, *for_each([*element, *scalars.lines, f"value[e] = {{{', '.join(found)}}};"])]


class WriterOfValues(Writer):
    """Writes the sections of such a stream."""

    straddles = False

    def at_once(self, most: int) -> int:
        """Fewer values at a time, each of which is several numbers."""
        return max(1, most // 2)


class WriterOfResults(Writer):
    """Writes kernels of several `results` of one shape."""

    straddles = False
    results_of_group: tuple[Node, ...]

    def outputs(self) -> dict[str, str]:
        return {f"out{i}" if i else "out": ELEMENT[r.dtype] for i, r in enumerate(self.results_of_group)}

    def targets(self) -> str:
        """The parameters of a function that writes all of them."""
        return ", ".join(f"{element}* {name}" for name, element in self.outputs().items())

    def record(self, **more: Any) -> Kernel:
        shape, named = self.sizes.output(), zip(self.outputs(), self.results_of_group, strict=True)
        _, *also = (Array(name, shape, r.dtype) for name, r in named)
        return super().record(also=tuple(also), **more)
