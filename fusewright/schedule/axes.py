"""The dimensions of a convolution's output as tiles go through them: cells, phases, and the input index of each tap.

A dimension is described by *cells* of output positions that belong together (one pooling window, or the positions
between two strides of a transposed convolution), and *phases* of a cell, inside which the convolution is plain:
position and tap move the input index by constants.  A plain convolution has one phase; a transposed one of stride s has
s, each with its own taps.

Neighbouring dimensions whose positions nothing tells apart are counted as one: a 1x1 convolution has one row of all of
its positions, which lie so in memory, and no tile of it ends with a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.chain import Window


@dataclass(frozen=True)
class Phase:
    """Positions `elements` of a cell and the taps that reach them.

    Element j and tap t read input index ``cell * Axis.advance + first + j * per_element + t * per_tap``, where
    `Axis.together` is one; else they do of every cell that lies a multiple of so many behind the first.
    """

    elements: tuple[int, ...]
    taps: tuple[int, ...]
    first: int
    per_element: int
    per_tap: int

    def offset(self, j: int, t: int) -> int:
        return self.first + j * self.per_element + t * self.per_tap


@dataclass(frozen=True)
class Axis:
    """One spatial dimension of a contraction group, or several that are counted as one.

    cell      output positions computed per cell (overlapping pooling windows compute some positions twice)
    stride    distance of cells in output positions; `start` is the first position of cell 0 (negative: pool padding)
    together  cells that advance by whole strides of a transposed convolution: several where windows begin between those
    advance   distance in input indices of cells that are `together` apart
    """

    taps: int
    cell: int
    stride: int
    start: int
    advance: int
    phases: tuple[Phase, ...]
    together: int = 1

    def reach(self) -> tuple[int, int]:
        """Least and greatest input index of cell 0."""
        found = [
            p.offset(j, t) for p in self.phases for j in range(len(p.elements)) for t in range(len(p.taps)) if p.taps
        ]
        return (min(found), max(found)) if found else (0, 0)


Dims = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def is_plain(conv: Node, i: int) -> bool:
    """Whether a position along dimension `i` of them reads what lies at the same place in x."""
    assert isinstance(conv.op, ops.Conv)
    added = (conv.op.output_padding or (0,) * 3)[i]
    return conv.arg(1).shape[2 + i] == conv.op.stride[i] == 1 and conv.op.padding[i] == (0, 0) and not added


def dims_of(conv: Node, *, as_one: bool) -> Dims:
    """The dimensions of positions that each axis counts, the last axis the last ones.

    Neighbours along which the convolution is plain are counted `as_one` where nothing around it tells them apart.
    """
    found: list[tuple[int, ...]] = []
    for i in range(conv.ndim - 2):
        if as_one and found and is_plain(conv, i) and is_plain(conv, i - 1):
            found[-1] += (i,)
        else:
            found.append((i,))
    d, h, w = [()] * (3 - len(found)) + found
    return d, h, w


def axes_of(conv: Node, window: Window | None, dims: Dims) -> tuple[Axis, Axis, Axis]:
    """The axis of each of `dims`, of extent 1 where there is none."""
    assert isinstance(conv.op, ops.Conv)
    found: list[Axis] = []
    for counted in dims:
        if not counted:
            found.append(_plain_axis(1, 1, 1, 0, None))
            continue
        i = counted[0]  # of one tap each: only dilations may differ, which lead nowhere
        taps = conv.arg(1).shape[i + 2]
        assert isinstance(taps, int)
        s, d, pad = conv.op.stride[i], conv.op.dilation[i], conv.op.padding[i][0]
        pool = None if window is None else (window.op.kernel[i], window.op.stride[i], window.op.padding[i])
        if conv.op.transposed:
            found.append(_transposed_axis(taps, s, d, pad, pool))
        else:
            found.append(_plain_axis(taps, s, d, pad, pool))
    a, b, c = found
    return a, b, c


Pooling = tuple[int, int, int] | None


def _plain_axis(taps: int, s: int, d: int, pad: int, pool: Pooling) -> Axis:
    """x index = p * s - pad + u * d for output position p and tap u."""
    cell, stride, left = pool or (1, 1, 0)
    phase = Phase(tuple(range(cell)), tuple(range(taps)), -left * s - pad, s, d)
    return Axis(taps, cell, stride, -left, stride * s, (phase,))


def _transposed_axis(taps: int, s: int, d: int, pad: int, pool: Pooling) -> Axis:
    """x index = (p + pad - u * d) / s for the taps u that make it whole: a progression per residue of p + pad."""
    cell, stride, left = pool or (s, s, 0)
    together = s // gcd(s, stride)
    phases: list[Phase] = []
    # Of cells that advance by whole strides no other phases are needed than those of the first one.
    for first in range(min(s, cell) if together == 1 else s):
        elements = tuple(range(first, max(cell, first + 1), s))
        target = first - left + pad
        reaching = tuple(u for u in range(taps) if (target - u * d) % s == 0)
        between = s // gcd(s, d)
        index = (target - reaching[0] * d) // s if reaching else 0
        phases.append(Phase(elements, reaching, index, 1, -between * d // s))
    return Axis(taps, cell, stride, -left, stride * together // s, tuple(phases), together)
