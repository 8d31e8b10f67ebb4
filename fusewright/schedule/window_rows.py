"""The windows that a convolution of window sums reads, and the rows that a warp stages to form them."""

from __future__ import annotations

from math import prod
from typing import Protocol

from fusewright.schedule.contraction import Contraction, covered


class OfWarps(Protocol):
    """What has to be known where warps stage the rows below their cells."""

    @property
    def warps(self) -> int:
        """Of a block."""

    @property
    def of_warp(self) -> tuple[int, int]:
        """Cells of a warp along h, w."""

    @property
    def step_channels(self) -> int:
        """Channels that are staged at a time."""

    @property
    def buffers(self) -> int:
        """Steps whose rows have a place at the same time."""


def box_taps(c: Contraction) -> int:
    """Windows of one cell and channel."""
    return prod(a.taps for a in c.axes)


def window_spans(c: Contraction) -> tuple[int, int, int]:
    """Elements along d, h, w that the window sums of one cell cover."""
    assert c.box is not None
    each = zip(c.axes, c.box.count, c.box.step, strict=True)
    d, h, w = (covered(axis.taps, axis.phases[0].per_tap, count, step) for axis, count, step in each)
    return d, h, w


def skipped(c: Contraction) -> int:
    """Elements of a row ahead of a cell's windows: with them, rows begin at whole 16-byte vectors where the input's do.

    Windows that begin in front of the input do so at no such vector, as a rule.
    """
    assert c.box is not None
    return -c.box.before[2] % (16 // c.x.dtype.itemsize)


def rows_of_warp(c: Contraction, t: OfWarps) -> tuple[int, int, int]:
    """Elements along d, h, w of the rows of one channel that a warp stages for its cells."""
    cells = 1, *t.of_warp
    d, h, w = ((n - 1) * a.advance + span for a, n, span in zip(c.axes, cells, window_spans(c), strict=True))
    return d, h, w + skipped(c)
