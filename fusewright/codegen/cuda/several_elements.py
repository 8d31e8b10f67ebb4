"""CUDA C++ of several pointwise values side by side: a stream whose values are several numbers each."""

from __future__ import annotations

from fusewright.codegen.cpp import compute_type
from fusewright.codegen.cuda.several_values import SeveralValues, WriterOfResults, WriterOfValues
from fusewright.codegen.cuda.stream_values import Values, for_each
from fusewright.codegen.text import Lines, block
from fusewright.kernel import Kernel
from fusewright.schedule.several_elements import SeveralElements


def kernel(s: SeveralElements, name: str, reference: str = "") -> Kernel:
    """The kernel of several values."""
    return Writer(s, name).kernel(reference)


class Writer(WriterOfResults, WriterOfValues):
    """Writes the sections: those of the stream, and what writes several results."""

    def __init__(self, several: SeveralElements, name: str) -> None:
        self.results_of_group = several.results
        super().__init__(several.within, name)
        self.values: SeveralValues = SeveralValues(several.within, self.names, several.results)

    def store(self, place: str, value: str) -> str:
        return f"write<V>({place}, {value}, {', '.join(self.outputs())});"

    def carried(self) -> Lines:
        """What is computed of an element, and how neighbours are written."""
        body: Lines = []
        for i, (r, name) in enumerate(zip(self.results_of_group, self.outputs(), strict=True)):
            body += [f"{compute_type(r.dtype)} of{i}[V];", *for_each([f"of{i}[e] = value[e].of{i};"], "V")]
            body += [f"store<V>({name} + place, of{i});"]
        head = f"{Values.inline} void write(index_t place, const Each (&value)[V], {self.targets()})"
        return [*self.values.struct("What is computed of an element."), "template <int V>", *block(head, body), ""]
