"""CUDA C++ of several pointwise values side by side: a stream whose values are several numbers each."""

from __future__ import annotations

from typing import Any

from fusewright.codegen.cpp import ELEMENT, Scalars, compute_type
from fusewright.codegen.cuda import stream
from fusewright.codegen.cuda.stream_values import Values, for_each
from fusewright.codegen.stream_values import constant, unknown
from fusewright.codegen.text import Lines, block, indent
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.kernel import Array, Kernel
from fusewright.schedule.several_elements import SeveralElements


def kernel(s: SeveralElements, name: str, reference: str = "") -> Kernel:
    """The kernel of several values."""
    return Writer(s, name).kernel(reference)


class SeveralValues(Values):
    """Writes all values of an element at once."""

    def __init__(self, several: SeveralElements, names: dict[Node, str]) -> None:
        super().__init__(several.within, names)
        self.several = several

    @property
    def compute(self) -> str:
        return "Each"

    def _plain(self) -> Lines:
        loads, given, element = self.loads("before", "VALUES<WIDE>")
        assert self.s.before is not None
        constants = {leaf: constant(leaf) for leaf in self.s.before.leaves if isinstance(leaf.op, ops.Full)}
        scalars = Scalars(given | constants, unknown, cuda=True)
        found = [scalars.value(r) for r in self.several.results]
        return [*loads, *for_each([*element, *scalars.lines, f"value[e] = {{{', '.join(found)}}};"])]


class Writer(stream.Writer):
    """Writes the sections: those of the stream, and what writes several results."""

    def __init__(self, several: SeveralElements, name: str) -> None:
        self.several = several
        super().__init__(several.within, name)
        self.values = SeveralValues(several, self.names)

    def at_once(self, most: int) -> int:
        """Fewer values at a time, each of which is several numbers."""
        return max(1, most // 2)

    def outputs(self) -> dict[str, str]:
        names = ["out", *(f"out{i}" for i in range(1, len(self.several.results)))]
        return {name: ELEMENT[r.dtype] for name, r in zip(names, self.several.results, strict=True)}

    def record(self, **more: Any) -> Kernel:
        names, shape = [*self.outputs()], self.sizes.output()
        arrays = (Array(name, shape, r.dtype) for name, r in zip(names, self.several.results, strict=True))
        _, *also = arrays
        return super().record(also=tuple(also), **more)

    def store(self, place: str, value: str) -> str:
        return f"write<V>({place}, {value}, {', '.join(self.outputs())});"

    def carried(self) -> Lines:
        """What is computed of an element, and how neighbours are written."""
        results = self.several.results
        members = [f"{compute_type(r.dtype)} of{i};" for i, r in enumerate(results)]
        body: Lines = []
        for i, (r, name) in enumerate(zip(results, self.outputs(), strict=True)):
            body += [f"{compute_type(r.dtype)} of{i}[V];", *for_each([f"of{i}[e] = value[e].of{i};"], "V")]
            body += [f"store<V>({name} + place, of{i});"]
        targets = ", ".join(f"{element}* {name}" for name, element in self.outputs().items())
        head = f"{Values.inline} void write(index_t place, const Each (&value)[V], {targets})"
        return [
            *("// What is computed of an element.", "struct Each {", *indent(members), "};", ""),
            *("template <int V>", *block(head, body), ""),
        ]
