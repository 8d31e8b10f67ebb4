"""The sizes of a stream as expressions over the dimensions of its operands.

``s<d>`` is dimension d of the entry, ``v<i>`` the number of rows of operand i, the weight of an embedding.
"""

from __future__ import annotations

from math import prod

from fusewright.ir.node import Node
from fusewright.ir.ops import Size
from fusewright.kernel import Expression
from fusewright.schedule.stream_record import Stream, with_indices

# What a symbolic batch is taken for: few samples where each has results of its own, many where all are reduced to one.
FEW, MANY = 8, 4096


def hint(size: Size, batch: int = FEW) -> int:
    """A number for a size, of a symbolic batch taken for so many samples."""
    return size if isinstance(size, int) else int(size.subs(dict.fromkeys(size.free_symbols, batch)))


class Sizes:
    """`named` are the numbers of a call (see `Kernel.sizes`), `lengths` the dimensions of the entry, `rows` how many
    rows weights have, by the place of each among the tensors."""

    def __init__(self, s: Stream) -> None:
        self.s = s
        self.named, self.lengths = self._named()
        self.rows: dict[int, Expression] = {i: f"v{i}" for i in s.weights}

    def _named(self) -> tuple[tuple[tuple[str, int, int], ...], list[Expression]]:
        """Named numbers of a call, and the length of every dimension of `entry`."""
        named, lengths = [], []
        for d in range(self.s.entry.ndim):
            parts = [r.part for r in self.s.reads if r.part is not None and r.part.dim == d]
            carriers = [r for r in with_indices(self.s.reads) if r.place == "before" and d in r.dims]
            slices = [w.size for r in carriers for w in r.within if r.dims[w.dim] == d]
            read = None if parts or slices else next(iter(carriers), None)
            known = max((p.begin + p.length for p in parts), default=max(slices, default=1))
            lengths.append(f"s{d}" if read else str(known))
            if read:
                named.append((f"s{d}", self.s.tensors.index(read.tensor), read.dims.index(d)))
        named += [(f"v{i}", i, self.s.at(i)) for i in self.s.weights]
        return tuple(named), lengths

    def operand(self, tensor: Node) -> tuple[Expression, ...]:
        """The shape of a tensor in memory."""
        read = next(r for r in with_indices(self.s.reads) if r.tensor is tensor)
        length = self.lengths.__getitem__ if read.place == "before" else self.length
        shape = ["1" if d is None else length(d) for d in read.dims]
        if read.part is not None:
            shape[read.dims.index(read.part.dim)] = str(read.part.length)
        for w in read.within:
            shape[w.dim] = str(w.length)
        if read.indices is not None:
            shape[read.at] = self.rows[self.s.tensors.index(tensor)]
        return tuple(shape)

    def length(self, d: int) -> Expression:
        """The length of dimension `d` of the value."""
        w = self.s.window
        if w is None or d < self.s.value.ndim - len(w.op.kernel):
            return self.lengths[d]
        k, op, n = d - (self.s.value.ndim - len(w.op.kernel)), w.op, self.lengths[d]
        free = f"({n} + {2 * op.padding[k] - op.dilation[k] * (op.kernel[k] - 1) - 1})"
        if not op.ceil_mode:
            return f"({free} // {op.stride[k]} + 1)"
        return f"min(ceil_div({free}, {op.stride[k]}) + 1, ceil_div({n} + {op.padding[k]}, {op.stride[k]}))"

    def product(self, axes: list[int]) -> Expression:
        """The number of elements of these axes."""
        return " * ".join(self.length(d) for a in axes for d in self.s.axes[a].dims) or "1"

    def count(self, axes: list[int]) -> int:
        """The same, for the sizes the graph knows."""
        return self._count(axes, FEW)

    def reduced(self, axes: list[int]) -> int:
        """The same, where these axes are reduced: a batch among them may be large."""
        return self._count(axes, MANY)

    def _count(self, axes: list[int], batch: int) -> int:
        return prod(hint(self.s.value.shape[d], batch) for a in axes for d in self.s.axes[a].dims)

    def entry_count(self, axes: list[int]) -> int:
        """The same of the value that the window reads."""
        return prod(hint(self.s.entry.shape[d]) for a in axes for d in self.s.axes[a].dims)

    def output(self) -> tuple[Expression, ...]:
        """The shape of the result."""
        dims = [self.length(d) for d in range(self.s.value.ndim)]
        for reduction, _ in self.s.folds:
            op = reduction.op
            kept = ["1" if d in op.dims else n for d, n in enumerate(dims)]
            dims = kept if op.keepdim else [n for d, n in enumerate(dims) if d not in op.dims]
        return tuple(dims)
