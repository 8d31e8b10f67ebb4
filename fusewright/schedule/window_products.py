"""Convolutions of few windows as products of these by the weight.

    conv(x, w) + b   =   linear(windows(x), w) + b      windows (N, *P, C*K), w (O, C*K): every position is a row
                     =   expand(w) @ windows(x).mT + b  for each sample, whose result lies as the convolution's

A convolution's kernel has a tile of positions of one sample and goes through all channels and taps for it: where there
are four positions a sample and a hundred thousand taps, few blocks read all of the weight, and most of a GPU has
nothing to do.  A product's rows are the positions of all samples, and what it sums is cut into parts.  A library's
convolutions read several channels at once, too, of which a picture has three.

For a product the windows have to be written (by one kernel of ours, as other rearrangements are): where they overlap
much, that is more than there is to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from types import MappingProxyType

from fusewright.ir import ops
from fusewright.ir.build import of_part_read, permute, pointwise, reshape
from fusewright.ir.memory_order import Order, output_orders, rows_of
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule.beside import Readers, readers_of
from fusewright.schedule.chain import MEMORY
from fusewright.schedule.channels_last import VECTOR
from fusewright.schedule.cost import CostModel
from fusewright.schedule.group import sizes
from fusewright.schedule.tiling import MULTIPROCESSORS

# The windows of a convolution have at most so many times the elements of what they are windows of, and so many where
# they are fewer than features: the weight is larger than they are then.
OVERLAP, OVERLAP_OF_FEW = 1.5, 4.0
# Positions, and features, that a block of a convolution has: fewer take as long.
TILE = 64
# By how much slower a library is where it cannot read several channels at once: of 3 -> 768 channels, 16 x 16 taps in
# steps of 16 and 64 images of 224 x 224, 0.62 ms on an H100, a fourth of its usual rate.
OF_FEW_CHANNELS = 4.0
# The share of a library's estimated time that a product may take: the estimates are rough, and to measure both programs
# takes time.
CLEARLY = 0.75
# Positions of a sample from which on a product of each sample by the weight leaves no tile of a library's half empty.
OF_SAMPLE = 64
# Elements of windows that are more than what a kernel counts to.
MOST_ELEMENTS = 2**31


def as_products(
    graph: Graph,
    cost: CostModel,
    orders: Mapping[Node, Order] = MappingProxyType({}),
    *,
    alone: Callable[[Node], bool] = lambda _: False,
    always: bool = False,
    measured: bool = False,
) -> tuple[Graph, int]:
    """`graph` with products in place of convolutions of few windows, and how many: where that is much less by `cost`,
    or else `always`.

    Where programs are `measured`, a product is tried as well where it is much less than what a library takes, though
    a kernel of ours may be as fast: no estimate tells these apart.
    Operations for which `alone` holds stay.  Results lie in memory as they did, where the sources that do not lie row
    by row have these `orders`.
    """
    eager, known, products = output_orders(graph, orders, kernels=False), dict[Node, Order](), 0
    for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        found = None if alone(node) else _found(node, cost)
        if found is None or not (always or _pays(found, cost, measured=measured)):
            continue
        sources = replace(graph, outputs=found.sources, effects=())
        if output_orders(sources, orders, kernels=False, known=known) != list(map(rows_of, found.sources)):
            continue
        for placed in found.placed(graph):
            if output_orders(placed, orders, kernels=False) == eager:
                graph, products = placed, products + 1
                break
    return graph, products


@dataclass(frozen=True)
class _Convolution:
    """One of few windows: x (N, C, *L), w (O, C, *K), y (N, O, *P)."""

    y: Node

    @property
    def op(self) -> ops.Conv:
        assert isinstance(self.y.op, ops.Conv)
        return self.y.op

    @property
    def sources(self) -> tuple[Node, Node]:
        return self.y.arg(0), self.y.arg(1)

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.y.shape[2:])

    @property
    def summed(self) -> int:
        """Numbers that are multiplied and added for one of y's."""
        return prod(int(n) for n in self.y.arg(1).shape[1:])

    def windows(self, positions: tuple[int, ...]) -> Node:
        """(N, *P, C*K), in memory; `positions` are P, or their number."""
        y = of_part_read(self.y)
        op, x, taps = y.op, y.arg(0), [int(n) for n in y.arg(1).shape[2:]]
        assert isinstance(op, ops.Conv)
        pads = tuple((d, left, right) for d, (left, right) in enumerate(op.padding, start=2) if left or right)
        x = make(ops.Pad(pads), x) if pads else x
        for d, (taps_along, stride, dilation) in enumerate(zip(taps, op.stride, op.dilation, strict=True), start=2):
            span = dilation * (taps_along - 1) + 1
            x = make(ops.Windows(d, span, stride), x)
            x = make(ops.Slice(x.ndim - 1, 0, span, dilation), x) if dilation > 1 and taps_along > 1 else x
        last = 2 + len(taps)
        x = permute(x, (0, *range(2, last), 1, *range(last, x.ndim)))
        return reshape(x, (x.shape[0], *positions, self.summed))

    @property
    def weight(self) -> Node:
        """(O, C*K)."""
        w = self.y.arg(1)
        return reshape(w, (w.shape[0], self.summed))

    def in_rows(self, positions: tuple[int, ...]) -> Node:
        """(N, *P, O)."""
        product = ops.Matmul(transpose_w=True, convolves=True)
        return make(product, self.windows(positions), self.weight, self.y.args[2], where=self.y.where)

    def of_samples(self) -> Node:
        """The same as (N, O, P), as y lies."""
        y, w, bias = self.y, self.weight, self.y.args[2]
        each = make(ops.Expand((y.shape[0], *w.shape)), w)
        windows = permute(self.windows((prod(self.positions),)), (0, 2, 1))
        value = make(ops.Matmul(convolves=True), each, windows, None, where=y.where)
        return value if bias is None else pointwise("add", value, reshape(bias, (w.shape[0], 1)))

    def placed(self, graph: Graph) -> Iterator[Graph]:
        """`graph` with the product in the convolution's place: in rows, which is the better one wherever it may be."""
        y, rank = self.y, self.y.ndim
        end, positions = _turned_by_the_model(y, self.positions, readers_of(graph))
        if end is not y:
            yield graph.substitute(end, self.in_rows(positions))
        turned = permute(self.in_rows(self.positions), (0, rank - 1, *range(1, rank - 1)))
        yield graph.substitute(y, turned)
        if prod(self.positions) >= OF_SAMPLE:
            if end.ndim == 3:
                yield graph.substitute(end, permute(self.of_samples(), (0, 2, 1)))
            yield graph.substitute(y, reshape(self.of_samples(), y.shape))
        yield graph.substitute(y, make(ops.Permute(tuple(range(rank)), copy=True), turned))


def _turned_by_the_model(y: Node, positions: tuple[int, ...], readers: Readers) -> tuple[Node, tuple[int, ...]]:
    """What of `y` has its channels last, where nobody reads it otherwise, and its positions: perhaps as one.

    y.flatten(2).mT, y.permute(0, 2, 3, 1); else `y` itself.
    """
    node = y
    while len(readers[node]) == 1:
        (reader,) = readers[node]
        merged = (y.shape[0], y.shape[1], prod(positions))
        if isinstance(reader.op, ops.Permute) and reader.op.dims == (0, *range(2, node.ndim), 1):
            return reader, tuple(int(n) for n in node.shape[2:])
        if node is not y or not isinstance(reader.op, ops.Reshape) or reader.shape != merged:
            break
        node = reader
    return y, positions


def _found(node: Node, cost: CostModel) -> _Convolution | None:
    """A convolution of few windows that may be a product."""
    op = node.op
    if not isinstance(op, ops.Conv) or op.transposed or op.groups != 1 or not node.varies or node.dtype not in MEMORY:
        return None
    x, w = node.inputs[:2]
    lengths = (*x.shape[1:], *w.shape, *node.shape[1:])
    if isinstance(x.op, ops.RangeSum) or all(n == 1 for n in w.shape[2:]):
        return None  # its kernel forms them while it reads, or it is a product as it is
    if w.varies or not all(isinstance(n, int) and n > 0 for n in lengths):
        return None
    found = _Convolution(node)
    numbers, rows = _numbers(found, cost)
    overlap = OVERLAP_OF_FEW if rows <= int(node.shape[1]) else OVERLAP
    if not 0 < numbers <= min(overlap * prod(sizes(x, cost.hints)), MOST_ELEMENTS - 1):
        return None
    return found


def _numbers(c: _Convolution, cost: CostModel) -> tuple[int, int]:
    """How many numbers the windows have, and how many windows there are."""
    rows = sizes(c.y, cost.hints)[0] * prod(c.positions)
    return rows * c.summed, rows


def _pays(c: _Convolution, cost: CostModel, *, measured: bool) -> bool:
    """Whether a product takes much less than the convolution: than a library's, or where nothing is `measured` than one
    of our kernels', which read pictures as fast as others.  Either takes longer where it has few blocks.
    """
    work, slower = cost(c.y), _slower(c.y, cost)
    if measured and int(c.y.arg(0).shape[1]) * c.y.dtype.itemsize < VECTOR:
        slower *= OF_FEW_CHANNELS
    return _seconds(c, cost) < CLEARLY * max(work.seconds, slower * work.flops / cost.facts.conv)


def _slower(y: Node, cost: CostModel) -> float:
    """How many times as long a convolution takes for having fewer tiles than a device has multiprocessors."""
    batch, features, *positions = sizes(y, cost.hints)
    return max(1.0, MULTIPROCESSORS / (ceil(batch * prod(positions) / TILE) * ceil(features / TILE)))


def seconds_of_few(y: Node, cost: CostModel) -> float:
    """Seconds of a convolution that is not transposed, of as many groups as one, where few tiles leave most of a device
    idle: in tiles all the same, or as a product where it may be one.
    """
    in_tiles = _slower(y, cost) * cost(y).flops / cost.facts.conv
    found = _found(y, cost)
    return in_tiles if found is None else min(in_tiles, _seconds(found, cost))


def _seconds(c: _Convolution, cost: CostModel) -> float:
    """Seconds that it takes to write the windows and to multiply them."""
    (numbers, _), facts = _numbers(c, cost), cost.facts
    read = min(numbers, prod(sizes(c.y.arg(0), cost.hints)))
    moving = facts.launch + (numbers + read) * c.y.dtype.itemsize / facts.memory
    return moving + cost(c.in_rows(c.positions)).seconds
