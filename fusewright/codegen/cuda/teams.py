"""CUDA C++ of one launch in which teams of threads have a row each, or some columns side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fusewright.codegen.cuda import stream_text
from fusewright.codegen.cuda.stream import THREADS, Shape, Writer
from fusewright.codegen.text import Lines, fill
from fusewright.ir.node import Node
from fusewright.kernel import Argument, Expression, Launch
from fusewright.schedule.stream_record import Stream


class TeamWriter(Writer):
    """Writes what such launches have in common.

    form    ``"rows"`` or ``"columns"``
    blocks  that share a row, a cluster, each with `team` threads
    each    behind the name of a number that there is one of per row, that of value e
    length  elements of a row, where the text says so
    shared  bytes of dynamic shared memory
    """

    form: ClassVar[str] = "rows"
    each: ClassVar[str] = ""
    length: int | None = None
    shared: int = 0

    def __init__(
        self,
        s: Stream,
        name: str,
        team: int,
        names: dict[Node, str] | None = None,
        lengths: list[Expression] | None = None,
        blocks: int = 1,
    ) -> None:
        super().__init__(s, name, names, lengths)
        self.shape, self.blocks = Shape(self.form, team * blocks), blocks
        self.threads = team if self.form == "rows" and team > 32 else THREADS

    def _launches(self) -> tuple[Launch, ...]:
        arguments = self._arguments(*(Argument("pointer", name) for name in self.outputs()))
        results, values = self.sizes.product(self.results), self.wide.values if self.wide else 1
        taken = results if self.form == "rows" else f"ceil_div({results}, {values})"
        blocks = (
            f"{taken} * {self.blocks}" if self.blocks > 1 else f"ceil_div({taken}, {self.threads // self.shape.team})"
        )
        return (Launch(self.name, arguments, (blocks, "1", "1"), self.threads, self.shared, self.blocks),)

    def attributes(self) -> str:
        least = self.least_blocks()
        bounds = f"__launch_bounds__(THREADS{f', {least}' if least > 1 else ''})"
        return f"__cluster_dims__({self.blocks}) {bounds}" if self.blocks > 1 else bounds

    def least_blocks(self) -> int:
        """How many blocks a multiprocessor shall have registers for."""
        return 1

    def body(self, *, tools: bool = True) -> str:
        lines = [f"using index_t = {self.index};", f"using count_t = unsigned {self.index};  // divides faster"]
        lines += [f"constexpr int THREADS = {self.threads}, TEAM = {self.shape.team};  // of a block, and per row"]
        lines += [f"constexpr int LENGTH = {self.length};  // of a row"] if self.length is not None else []
        lines += ["// Values that a thread takes together, in the wide variant (16-byte loads) and in the other."]
        lines += [*self._widths("VALUES", self.wide.values if self.wide else 1, 1), *self._more_widths()]
        sections = (fill(stream_text.TOOLS) if tools else [], self.data(), *self._functions(), self._body())
        for section in (*sections, self._entry()):
            lines += ["", *section] if section else []
        return "\n".join(lines) + "\n"

    def _more_widths(self) -> Lines:
        """What else the two variants differ in."""
        return []

    def _functions(self) -> Iterator[Lines]:
        """The functions that the launch calls."""
        raise NotImplementedError
