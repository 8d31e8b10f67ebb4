"""How a contraction group is cut for a CPU: strips of results for its caches, tiles of sums for its registers.

A strip is what one task computes of one sample: its input is staged in the second cache, and one block of features
after another is computed on it.  Strips are cut by sizes alone, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, prod

import torch

from fusewright.schedule.axes import Axis
from fusewright.schedule.contraction import Contraction

# Bytes of staged input that a strip may have: half of a usual second cache.
STAGED = 512 * 1024
# Tasks that a call should have, so that threads end about together.
TASKS = 16
# Products that are added up in one chain.
CHAIN = 512
# Bytes of weights at hand while a row is multiplied: about a first cache.  Fewer cost more additions of partial sums.
AT_HAND = 32 * 1024
# What a machine with vectors of 64 bytes has.
WIDEST = 64
REGISTERS = 32
LANES = 16
# Output channels of a group that leave most of a vector idle.
FEW = 4
# Taps that have to share an input before it is staged once for every feature that reads it.
SHARED = 3
# Products per load beyond which loads no longer hold a core up.
ENOUGH = 3.0


@dataclass(frozen=True)
class Strips:
    """See the module's text.

    strip      results of a strip along d, h, w
    vectors    of a block of features
    together   taps along w whose weights are in registers at one time
    chunk      channels whose products are added up in one chain
    parts      of the blocks of features, for as many tasks on one strip
    """

    strip: tuple[int, int, int]
    vectors: int
    together: int
    chunk: int
    parts: int = 1

    @property
    def widest(self) -> int:
        """Features of a block on the widest machine; a narrower one's blocks divide it."""
        return LANES * self.vectors


def pooling(c: Contraction) -> list[tuple[int, int, int]]:
    """Kernel, stride and padding of the window along d, h, w."""
    op = None if c.window is None else c.window.op
    found = [] if op is None else list(zip(op.kernel, op.stride, op.padding, strict=True))
    return [(1, 1, 0)] * (3 - len(found)) + found


def is_channelwise(c: Contraction) -> bool:
    """Whether groups have too few output channels to fill a vector: then those of all groups lie along the lanes, and
    beside each one the input channels that it reads, where enough taps share what is staged so."""
    if c.channels == 1:
        return c.op.groups > 1 and c.features < LANES
    taps = prod(max(len(p.taps) for p in a.phases) for a in c.plain_axes)
    return c.op.groups > 1 and c.features <= FEW and taps >= SHARED


def features(c: Contraction) -> int:
    """Output channels that are computed from the same inputs, or, where that is channelwise, all of them."""
    return c.features * c.op.groups if is_channelwise(c) else c.features


def groups(c: Contraction) -> int:
    """Groups that are computed one after another."""
    return 1 if is_channelwise(c) else c.op.groups


def candidates(c: Contraction, lengths: tuple[int, int, int], samples: int) -> list[Strips]:
    """Ways to cut a group whose results are so many along d, h, w, best guess first."""
    lanes = LANES if c.x.dtype != torch.float64 else LANES // 2
    strip = _strip(c, lengths, samples)
    strips = samples * groups(c) * prod(ceil(n / k) for n, k in zip(lengths, strip, strict=True))
    found = []
    for vectors, together in _tiles(c, lanes, _positions(c, strip[2])):
        blocks = ceil(features(c) / (vectors * lanes))
        parts = 1 if c.over_channels and not c.over_positions else max(1, min(blocks, ceil(TASKS / strips)))
        found.append(Strips(strip, vectors, together, _chunk(c, vectors), parts))
    return found


def _chunk(c: Contraction, vectors: int) -> int:
    """Channels of a chain: equal shares of all."""
    taps = prod(a.taps for a in c.axes)
    most = max(1, min(CHAIN, AT_HAND // (WIDEST * vectors)) // taps)
    return ceil(c.channels / ceil(c.channels / most))


def _positions(c: Contraction, results: int) -> int:
    """Positions of one phase in a row of so many results."""
    kernel, stride, _ = pooling(c)[2]
    return ceil(((results - 1) * stride + kernel) / c.plain_axes[2].stride)


def _tiles(c: Contraction, lanes: int, row: int) -> Iterator[tuple[int, int]]:
    """Vectors of a block of features and taps at hand: those first whose tiles do most useful work per load."""
    axis, ways, count = c.plain_axes[2], [], features(c)
    phases = {len(p.taps) for p in axis.phases}
    for vectors in range(1, min(4, ceil(count / lanes)) + 1):
        for together in {1, *(t for t in range(2, axis.taps + 1) if all(n % t == 0 for n in phases))}:
            at_hand = 2 * vectors if is_channelwise(c) else 2
            most = (REGISTERS - at_hand - together * vectors) // vectors
            if most < 3:
                continue
            tile = min(range(1, most + 1), key=lambda t: (ceil(row / t) * (2 * t + 1), -t))
            useful = row / _rounded(row, tile) * count / _rounded(count, vectors * lanes)
            inputs_read = tile + together - 1 if axis.advance == 1 else tile * together
            loads = inputs_read * (vectors if is_channelwise(c) else 1) + together * vectors
            ways.append((useful * min(ENOUGH, tile * vectors * together / loads), vectors, together))
    for _, vectors, together in sorted(ways, reverse=True):
        yield vectors, together


def _rounded(n: int, to: int) -> int:
    return ceil(n / to) * to


def _strip(c: Contraction, lengths: tuple[int, int, int], samples: int) -> tuple[int, int, int]:
    """Results along d, h, w: whole rows, cut along d and h where it fits and costs the least per result."""
    itemsize = 8 if c.x.dtype == torch.float64 else 4
    channels = c.channels * (min(features(c), 2 * LANES) if is_channelwise(c) else 1)
    depth, height, width = lengths

    def fits(d: int, h: int, w: int) -> bool:
        return channels * prod(inputs(c, i, n) for i, n in enumerate((d, h, w))) * itemsize <= STAGED

    row = width
    while not fits(1, 1, row) and row > 16:
        row = ceil(row / 2)
    row = ceil(width / ceil(width / row))
    if row < width:
        return 1, 1, row
    enough = min(TASKS, samples * depth * height)
    cuts = [
        (d, h)
        for d, h in product(_shares(depth), _shares(height))
        if (d, h) == (1, 1) or (fits(d, h, row) and samples * ceil(depth / d) * ceil(height / h) >= enough)
    ]
    return *min(cuts, key=lambda cut: (_work(c, *cut), -prod(cut))), row


def _shares(length: int) -> list[int]:
    """The lengths that a dimension is cut into, by number of parts."""
    return sorted({ceil(length / parts) for parts in range(1, length + 1)})


def _work(c: Contraction, d: int, h: int) -> float:
    """What a result costs in a strip of so many rows: vectors of products, and inputs that are copied."""
    positions = prod((n - 1) * stride + kernel for n, (kernel, stride, _) in zip((d, h), pooling(c)[:2], strict=True))
    products = positions * ceil(features(c) / LANES) * prod(a.taps for a in c.axes)
    return (products + prod(_rows(c, i, n) for i, n in enumerate((d, h)))) / (d * h)


def _rows(c: Contraction, i: int, results: int) -> int:
    """Inputs along one dimension that are copied: those between two results' are left out."""
    low, high = span(c.plain_axes[i])
    return min(inputs(c, i, results), _steps(c, i, results) * (high - low + 1))


def inputs(c: Contraction, i: int, results: int) -> int:
    """Inputs along dimension `i` that so many results read."""
    low, high = span(c.plain_axes[i])
    return (_steps(c, i, results) - 1) * c.plain_axes[i].advance + high - low + 1


def _steps(c: Contraction, i: int, results: int) -> int:
    """Strides of a transposed convolution, else positions, that so many results need."""
    kernel, stride, _ = pooling(c)[i]
    return ceil(((results - 1) * stride + kernel - 1) / c.plain_axes[i].stride) + 1


def span(axis: Axis) -> tuple[int, int]:
    """The lowest and highest input, relative to a position's index, that any phase reads."""
    found = [p.offset(0, t) for p in axis.phases for t in range(len(p.taps))]
    return (min(found), max(found)) if found else (0, 0)
