"""What the writers of streams say on every target: names, axes, what a call passes, and the kernel's record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.stream_sizes import Sizes
from fusewright.codegen.text import Lines, indent
from fusewright.ir.node import Node
from fusewright.kernel import Array, Expression, Kernel
from fusewright.schedule.stream_record import Read, Role, Stream


class StreamSections:
    """Knows the axes, the sizes and the names of one stream, and writes what does not depend on the target.

    axes     by role
    results  the axes that the first reduction leaves
    pooled   the axes that a window runs along

    Whoever has operands of other shapes gives their `names` and the `lengths` of the dimensions of the entry.
    """

    def __init__(
        self, s: Stream, name: str, names: dict[Node, str] | None = None, lengths: list[Expression] | None = None
    ) -> None:
        self.s, self.name = s, name
        self.names = names_of(s.tensors, s.reads) if names is None else names
        self.sizes = Sizes(s)
        self.sizes.lengths = self.sizes.lengths if lengths is None else lengths
        roles: tuple[Role, ...] = ("kept", "first", "second")
        self.axes = {role: [a for a, x in enumerate(s.axes) if x.role == role] for role in roles}
        self.results = [a for a, x in enumerate(s.axes) if x.role != "first"]
        self.pooled = [a for a, x in enumerate(s.axes) if x.window is not None]
        self.all = list(range(len(s.axes)))
        self.last = self.all[-1]

    @property
    def refuses(self) -> bool:
        """Whether a function of the values refuses numbers."""
        return self.s.refuses

    def about(self) -> str:
        """The axes, in words."""

        def named(a: int) -> str:
            dims = self.s.axes[a].dims
            ends = "-".join(map(str, sorted({dims[0], dims[-1]})))
            pooled = " (pooled)" if a in self.pooled else ""
            return f"i{a} over dimension{'s' if len(dims) > 1 else ''} {ends}{pooled}"

        return f"axes {', '.join(map(named, self.all))}."

    def window_constants(self, array: str, number: str) -> Lines:
        """What the window is like, an entry per dimension; `array` and `number` declare constants."""
        if self.s.window is None:
            return []
        op = self.s.window.op
        values = ((c.upper(), getattr(op, c)) for c in ("kernel", "stride", "padding", "dilation"))
        reach = op.dilation[-1] * (op.kernel[-1] - 1)
        return [
            *(f"{array} {name}[] = {{{', '.join(map(str, each))}}};" for name, each in values),
            f"{number} REACH = {reach};  // from the first to the last tap of a row",
        ]

    def numbers(self) -> list[str]:
        """The names of the lengths that a call passes."""
        return [*(f"n{a}" for a in self.all), *(f"m{a}" for a in self.pooled), *(f"v{i}" for i in self.s.weights)]

    def lengths(self) -> list[Expression]:
        """What these are."""
        pooled = (self.sizes.lengths[self.s.axes[a].dims[0]] for a in self.pooled)
        return [*(self.sizes.product([a]) for a in self.all), *pooled, *self.sizes.rows.values()]

    def data(self) -> Lines:
        """The struct of what a call passes."""

        def declared(names: list[str], about: str) -> Lines:
            return [f"index_t {', '.join(names)};  // {about}"] if names else []

        members = [
            *dict.fromkeys(f"const {ELEMENT[t.dtype]}* {name};" for t, name in self.names.items()),
            *declared([f"n{a}" for a in self.all], "lengths of the axes"),
            *declared([f"m{a}" for a in self.pooled], "those of pooled axes before the window"),
            *declared([f"v{i}" for i in self.s.weights], "rows of weights, or classes"),
            *(["mutable int outside = 0;  // whether an index was that of no row"] if self.s.looks_up else []),
            *(["mutable int refused = 0;  // whether a number was one that eager refuses"] if self.refuses else []),
        ]
        return ["// What a call passes.", "struct Data {", *indent(members), "};"]

    def scratch(self, states: int, parts: Expression) -> tuple[Array, ...]:
        """Memory for the parts of every result, so many numbers each."""
        return (Array("scratch", (f"{states} * ({parts}) * {self.sizes.product(self.results)}",), torch.float64),)

    def record(self, **more: Any) -> Kernel:
        """The kernel; `more` are fields of `Kernel`."""
        return Kernel(
            name=self.name,
            operands=tuple(self.names.values()),
            layouts=("contiguous",) * len(self.names),
            sizes=self.sizes.named,
            output=Array("out", self.sizes.output(), self.s.root.dtype),
            dtypes=tuple(t.dtype for t in self.s.tensors),
            shapes=tuple(map(self.sizes.operand, self.s.tensors)),
            looks_up=self.s.looks_up or self.refuses,
            **more,
        )


def names_of(tensors: Sequence[Node], reads: Iterable[Read]) -> dict[Node, str]:
    """What tensors are called that are read so: the first one x, unless it is an embedding's."""
    names = {t: f"p{i}" if i else "x" for i, t in enumerate(tensors)}
    for r in reads:
        if r.indices is not None:
            if not r.indices.computed:
                names[r.indices.tensor] = f"indices{tensors.index(r.indices.tensor)}"
            names[r.tensor] = names[r.tensor] if r.at else f"weight{tensors.index(r.tensor)}"
    return names
