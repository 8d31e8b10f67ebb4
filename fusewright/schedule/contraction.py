"""Contraction groups: convolution -> pointwise -> window pool -> pointwise -> reduction, on one tile at a time.

Every convolution is brought to three dimensions, each an `Axis` (`fusewright.schedule.axes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, update_wrapper
from math import prod
from typing import Concatenate, Literal, ParamSpec, TypeVar

import torch

from fusewright.ir import ops
from fusewright.ir.memory_order import last_order, lies_last
from fusewright.ir.node import Node, topological
from fusewright.ir.slots import Windows, windows
from fusewright.schedule import kept_channels, sample
from fusewright.schedule.axes import Axis, Dims, axes_of, dims_of
from fusewright.schedule.chain import (
    MEMORY,
    Chain,
    Fold,
    Map,
    Shares,
    Users,
    Window,
    depends_on,
    leaves,
    leaves_beside,
    parse,
)
from fusewright.schedule.kept_channels import KeptChannels
from fusewright.schedule.sample import SampleProgram

FOLDS = ("sum", "mean", "max", "min", "logsumexp")
# How an operand of a pointwise tree varies over a convolution's output (N, C, *positions): not at all, or it has the
# shape (1, C, 1, ...), (N, C, 1, ...) or (N, C, *positions).
Varies = Literal["scalar", "channel", "sample's channel", "element"]
# Indices inside a sample and inside the weight are 32-bit numbers.
MOST_ELEMENTS = 2**31 - 1
# Elements of a window that are added up for each window anew, in the type of x, and windows that share a row of it.
MOST_SUMMED, MOST_READ = 128, 4
# Window sums that a lane of a GPU has registers for.
MOST_HELD = 112


@dataclass(frozen=True)
class Box:
    """Window sums of x that a convolution runs on: `count` elements `step` apart, times `scale`, per dimension.

    Windows begin `stride` apart, the first one `before` elements in front of x, the last one so that `behind` more
    would be reached; what lies outside of x counts nothing.
    """

    count: tuple[int, int, int]
    step: tuple[int, int, int]
    scale: float
    stride: tuple[int, int, int] = (1, 1, 1)
    before: tuple[int, int, int] = (0, 0, 0)
    behind: tuple[int, int, int] = (0, 0, 0)

    @property
    def plain(self) -> bool:
        """Whether a window begins at every element, and none reaches outside."""
        return self.stride == (1, 1, 1) and self.before == self.behind == (0, 0, 0)


@dataclass(frozen=True)
class Unfolded:
    """Taps along one dimension that are channels: each has all of x's, in whole vectors, or one behind the other.

    dim       of the three dimensions the one, whose axis has one tap then
    count     of the taps
    apart     input rows from one to the next
    between   taps of the weight from one to the next
    channels  of each: those of x, and what fills their last vector unless they are dense
    """

    dim: int
    count: int
    apart: int
    between: int
    channels: int
    dense: bool = False


@dataclass(frozen=True)
class Carried:
    """Sums that are carried along d: rows of the input are read in turn, some at a time, and each is multiplied by the
    taps along d of all positions that it belongs to.

    between, step   cells from one to the next, and rows of the input from one to the next, as in a tile's `Walk`
    depth           cells that rows which are read together belong to
    taps            of each of these rows, for every position of those cells, the first of the oldest cell: the tap that
                    reads the row, or -1; those that some tap does are neighbours
    """

    between: int
    step: int
    depth: int
    taps: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> tuple[int, ...]:
        """Of each row the first position that it belongs to."""
        return tuple(next((i for i, tap in enumerate(row) if tap >= 0), 0) for row in self.taps)

    @property
    def count(self) -> tuple[int, ...]:
        """Of each row how many positions it belongs to."""
        return tuple(sum(tap >= 0 for tap in row) for row in self.taps)

    @property
    def alike(self) -> bool:
        """Whether all rows belong to the same positions."""
        return len(set(zip(self.first, self.count, strict=True))) == 1


Args = ParamSpec("Args")
Result = TypeVar("Result")


def remembered(
    find: Callable[Concatenate[Contraction, Args], Result],
) -> Callable[Concatenate[Contraction, Args], Result]:
    """`find`, done once for a group and each of its arguments: the group keeps what thousands of tiles ask for."""

    def found(c: Contraction, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        assert not kwargs, find
        known: dict[object, Result] = vars(c).setdefault("_remembered", {})
        key = find, args  # not its name, which functions of several modules may share
        try:
            return known[key]
        except KeyError:
            return known.setdefault(key, find(c, *args, **kwargs))

    return update_wrapper(found, find)


@dataclass(frozen=True)
class Contraction:
    """A group: conv (C -> O per group) with what follows it.

    before, shares          pointwise tree on the convolution's output, softmax over its channels or what else is made
                            of these and of their reductions
    window, after           pooling, of which the softmax may be; pointwise tree on what was pooled, or on the softmax
                            where nothing is
    ends                    pointwise tree between `before` and the pool, or the reduction where nothing is pooled, if a
                            kernel is to compute it of the greatest and the least value of each window alone, or of
                            those of a thread (`window_ends`)
    fold                    reduction over all positions, all channels or both; `None` where all is written
    last                    pointwise tree on a reduction over channels, of that and of single numbers
    tail                    what is computed per sample from a reduction over positions
    channels_last           whether x lies so in memory, and what is read beside the products
    writes_last             whether what is written at all positions does: as eager's, whose softmaxes and averages in
                            three dimensions are in rows
    axes                    with the pooling; without it (`plain_axes`) where its windows begin in the midst of cells
    dims                    of positions, 0 the first, that each axis counts: none, one, or neighbours as one
    unfolded                taps that are channels, which a tile may ask for (`warpgroup_staging.of_tile`)
    halves                  whether float32 operands are multiplied as float16, as a tile may ask for
    carried                 sums that are carried along d, which a tile may ask for: axes then have rows that are read
                            together in the place of taps along d
    across                  whether windows are pooled across the threads of a block, as a tile may also ask for: axes
                            are then the convolution's alone, and cells, which a tile has whole, are windows still
    """

    root: Node
    conv: Node
    x: Node
    box: Box | None
    axes: tuple[Axis, Axis, Axis]
    dims: Dims
    before: Map | None
    shares: Shares | KeptChannels | None
    window: Window | None
    after: Map | None
    fold: Fold | None
    last: Map | None
    operands: tuple[Node, ...]
    tail: SampleProgram | None = None
    channels_last: bool = False
    writes_last: bool = False
    unfolded: Unfolded | None = None
    carried: Carried | None = None
    across: bool = False
    ends: Map | None = None
    halves: bool = False

    @cached_property
    def multiplied(self) -> torch.dtype:
        """Of the operands, as tensor cores read them."""
        return torch.float16 if self.halves else self.x.dtype

    @property
    def pooled_numbers(self) -> int:
        """Numbers that a window comes to before it is a value."""
        return 1 if self.window is None or self.ends is None else 2

    @property
    def folds_ends(self) -> bool:
        """Whether it is the reduction whose greatest and least values are kept."""
        return self.window is None and self.ends is not None

    @property
    def op(self) -> ops.Conv:
        assert isinstance(self.conv.op, ops.Conv)
        return self.conv.op

    @property
    def layout(self) -> str:
        """Of x, and of `elements`."""
        return "channels_last" if self.channels_last else "contiguous"

    @property
    def layout_written(self) -> str:
        """Of the output."""
        return "channels_last" if self.writes_last and self.fold is None else "contiguous"

    def in_format(self, *, last: bool, rows: bool = False) -> Contraction:
        """The same with channels `last`, or in rows; `rows` says that these are to be written anyway."""
        given = {n: last_order(n) for n in (self.x, *self.elements)}
        follows = self.fold is not None or lies_last(self.root, given, {})
        return replace(self, channels_last=last, writes_last=last and follows and not rows)

    @property
    def takes_channels_last(self) -> bool:
        """Whether the kernel may read x in that layout: window sums are added up along rows of one channel."""
        return self.box is None and self.x.ndim in (4, 5)

    @property
    def cells_are_windows(self) -> bool:
        """Whether what is pooled is pooled in cells.

        Else windows begin in the midst of them: on a CPU rows are pooled, on a GPU what the threads of a block have
        (`across`, and `window_axes` in direct tiles).
        """
        return all(a.together == 1 for a in self.window_axes)

    @property
    def window_axes(self) -> tuple[Axis, Axis, Axis]:
        """The axes with the pooling, wherever its windows begin."""
        return self.axes if self.window is None else axes_of(self.conv, self.window, self.dims)

    @property
    def plain_axes(self) -> tuple[Axis, Axis, Axis]:
        """The axes of the convolution alone, without the pooling: a cell is what lies between two strides."""
        return self.axes if self.window is None else axes_of(self.conv, None, self.dims)

    def pooling(self, i: int) -> tuple[int, int, int]:
        """Size, stride and padding of the windows along axis `i`."""
        op, dims = (None if self.window is None else self.window.op), self.dims[i]
        return (1, 1, 0) if op is None or not dims else (op.kernel[dims[0]], op.stride[dims[0]], op.padding[dims[0]])

    def reads(self, i: int) -> tuple[int, Fraction]:
        """Along axis `i`, the least input index that cell 0 reads, and how much further every further cell begins.

        Where windows begin between two strides of a transposed convolution that is a fraction: of cells that tiles
        begin with it comes to a whole number.
        """
        axis, (_, apart, padding) = self.axes[i], self.pooling(i)
        low, _ = axis.reach()
        if not self.across:
            return low, Fraction(axis.advance)
        return low + (-padding // axis.stride) * axis.advance, Fraction(apart * axis.advance, axis.stride)

    def along_axes(self, lengths: Sequence[int]) -> tuple[int, int, int]:
        """Lengths along the three axes of what has these along its dimensions of positions."""
        d, h, w = (prod(lengths[i] for i in dims) for dims in self.dims)
        return d, h, w

    @property
    def tensors(self) -> tuple[Node, ...]:
        """What a call passes, in order: input, weight, bias where there is one, operands of the pointwise trees."""
        bias = self.conv.args[2]
        behind = self.tail_operands
        return tuple(dict.fromkeys((self.x, self.conv.arg(1), *((bias,) if bias else ()), *self.operands, *behind)))

    @cached_property
    def elements(self) -> tuple[Node, ...]:
        """Operands that have a number for every element of the convolution's output: what a block of a residual
        network adds.  They lie in memory as the output does."""
        return tuple(n for n in self.operands if varies(n, self.conv) == "element")

    @cached_property
    def of_samples(self) -> tuple[Node, ...]:
        """Operands (N, C, 1, ...), which have a number for every channel of a sample."""
        return tuple(n for n in self.operands if varies(n, self.conv) == "sample's channel")

    def layout_of(self, operand: Node) -> str:
        """How one of `tensors` lies in memory (`fusewright.kernel.Kernel.layouts`)."""
        return self.layout if operand is self.x or operand in self.elements else "contiguous"

    @property
    def tail_operands(self) -> tuple[Node, ...]:
        """What the tail reads beside the reduction's result."""
        return () if self.tail is None else tuple(n for n in self.tail.leaves if not isinstance(n.op, ops.Full))

    @cached_property
    def channels(self) -> int:
        """Input channels per group, as they are multiplied."""
        return self.channels_of_x if self.unfolded is None else self.unfolded.count * self.unfolded.channels

    @cached_property
    def channels_of_x(self) -> int:
        """Input channels per group."""
        c = self.x.shape[1]
        assert isinstance(c, int)
        return c // self.op.groups

    @cached_property
    def features(self) -> int:
        """Output channels per group."""
        o = self.conv.shape[1]
        assert isinstance(o, int)
        return o // self.op.groups

    @property
    def shares_of_pooled(self) -> bool:
        """Whether the softmax is of what was pooled, and not ahead of that."""
        return self.shares is not None and self.window is not None and self.shares.value is self.window.node

    @property
    def over_positions(self) -> bool:
        return self.fold is not None and 2 in self.fold.op.dims

    @property
    def over_channels(self) -> bool:
        return self.fold is not None and 1 in self.fold.op.dims

    @property
    def reduced(self) -> Literal["store", "positions", "channels", "all"]:
        """What of the output is reduced; ``"store"`` where all of it is written."""
        if self.over_positions:
            return "all" if self.over_channels else "positions"
        return "channels" if self.over_channels else "store"


def match(root: Node, users: Users) -> Contraction | str:
    """The contraction group that ends in `root`, or why there is none."""
    found = _chain(root, users)
    return (_with_tail(root, users) or found) if isinstance(found, str) else found


def _with_tail(root: Node, users: Users) -> Contraction | None:
    """A group that reduces over positions, and all that is computed per sample from its result."""
    for node in topological([root]):
        if not isinstance(node.op, ops.Reduce) or users.get(node) != 1:
            continue
        found = _chain(node, users)
        if isinstance(found, str) or not found.over_positions:
            continue
        tail = sample.parse(root, users, given=(node,))
        if not isinstance(tail, str) and any(node in n.inputs for n in tail.inner):
            return replace(found, root=root, tail=tail)
    return None


def may_end(c: Contraction) -> Node | None:
    """Where the group may end as well: ahead of its pool, of its softmax, or of where it reads what has a number for
    every element."""
    if c.window is not None and not c.shares_of_pooled:
        return c.window.node.arg(0)
    if c.shares is not None:
        return c.shares.value
    if c.before is None:
        return None
    inner = topological([c.before.root], (c.before.value, *c.operands))
    behind, values = depends_on(inner, c.elements), {c.before.value, *inner}
    ends = {a for n in behind for a in n.inputs if a in values - behind and not isinstance(a.op, ops.Number)}
    return ends.pop() if len(ends) == 1 else None


def _chain(root: Node, users: Users) -> Contraction | str:
    """The group that ends in `root` without a tail."""
    chain = parse(root, users, lambda n: isinstance(n.op, ops.Conv))
    if isinstance(chain, str):
        chain = kept_channels.chain(root, users) or chain
    if isinstance(chain, str):
        return chain
    shape = _stages(chain)
    if isinstance(shape, str):
        return shape
    before, shares, window, after, fold, last = shape
    conv = chain.source
    assert isinstance(conv.op, ops.Conv)
    operands = _operands(chain, users)
    reason = (
        _refused_conv(conv) or _refused(conv, window, fold) or _retyped(root, (before, after, last), conv, operands)
    )
    reason = reason or _refused_operands(conv, operands, stored=window is None and shares is None)
    if reason is None and shares is not None and (not _over_channels(shares) or conv.op.groups != 1):
        reason = "what is made of a position's channels, as a softmax is, takes all of a convolution that has no groups"
    if reason is None and last is not None and not all(is_number(n) for n in leaves(last) if n is not last.value):
        reason = "what follows a reduction over channels reads more than single numbers"
    if reason is not None:
        return reason
    x, box = _boxed(conv, users) if window is None else (conv.arg(0), None)
    dims = dims_of(conv, as_one=window is None and box is None)
    axes = axes_of(conv, window, dims)
    if any(a.together > 1 for a in axes):
        axes = axes_of(conv, None, dims)
    return Contraction(root, conv, x, box, axes, dims, before, shares, window, after, fold, last, operands)


def _operands(chain: Chain, users: Users) -> tuple[Node, ...]:
    """What the pointwise trees read, in order of first use."""

    def fits(node: Node) -> bool:
        return varies(node, chain.source) is not None

    stages = [stage for stage in chain.stages if isinstance(stage, Map)]
    read = dict.fromkeys(n for stage in stages for n in leaves_beside(stage, users, fits) if n is not stage.value)
    return tuple(read)


_Stages = tuple[Map | None, Shares | KeptChannels | None, Window | None, Map | None, Fold | None, Map | None]


def _stages(chain: Chain) -> _Stages | str:
    """The stages in the order a tile takes them, each at most once."""
    rest = list(chain.stages)
    before = rest.pop(0) if rest and isinstance(rest[0], Map) else None
    shares = rest.pop(0) if rest and isinstance(rest[0], Shares | KeptChannels) else None
    window = rest.pop(0) if rest and isinstance(rest[0], Window) else None
    if window is not None and shares is None and rest and isinstance(rest[0], Shares | KeptChannels):
        shares = rest.pop(0)
    later = shares is not None or window is not None
    after = rest.pop(0) if rest and later and isinstance(rest[0], Map) else None
    fold = rest.pop(0) if rest and isinstance(rest[0], Fold) else None
    behind = isinstance(fold, Fold) and fold.op.dims == (1,)
    last = rest.pop(0) if rest and behind and isinstance(rest[0], Map) else None
    if rest:
        return f"{rest[0]!r} comes after what a tile can do"
    assert isinstance(before, Map | None) and isinstance(shares, Shares | KeptChannels | None)
    assert isinstance(window, Window | None) and isinstance(after, Map | None) and isinstance(fold, Fold | None)
    assert isinstance(last, Map | None)
    return before, shares, window, after, fold, last


def _over_channels(shares: Shares | KeptChannels) -> bool:
    return isinstance(shares, KeptChannels) or shares.op.dim == 1


def _refused_conv(conv: Node) -> str | None:
    """Why this family does not take this convolution, or `None`."""
    if conv.dtype not in MEMORY:
        return f"a convolution of {conv.dtype} has no kernel"
    if any(isinstance(d, int) and d == 0 for d in (*conv.shape, *conv.arg(1).shape)):
        return "an empty convolution needs no kernel"
    if conv.ndim > 5:
        return f"a convolution over {conv.ndim - 2} dimensions"
    if not all(isinstance(n, int) for n in (conv.arg(0).shape[1], *conv.arg(1).shape)):
        return "the weight's lengths differ from call to call"
    shapes = conv.arg(0).shape[1:], conv.shape[1:], conv.arg(1).shape
    if any(all(isinstance(d, int) for d in shape) and prod(shape) > MOST_ELEMENTS for shape in shapes):
        return "a sample or the weight has more than 2^31 elements"
    return None


def _retyped(root: Node, trees: tuple[Map | None, ...], conv: Node, operands: tuple[Node, ...]) -> str | None:
    """Why values of another type arise in the pointwise trees that a thread cannot carry, or `None`."""
    for tree in trees:
        for node in _computed(tree, operands) if tree is not None else ():
            if node.dtype not in MEMORY and (node is root or not _is_truth(node)):
                return f"{node!r} is no floating-point number"
            if node.dtype != torch.bool and (node.dtype == torch.float64) != (conv.dtype == torch.float64):
                return "the precision changes between float64 and less"
            if isinstance(node.op, ops.Cast) and node.dtype.itemsize < node.arg(0).dtype.itemsize and node is not root:
                return "a value is rounded to a narrower type on the way"
    return None


def _computed(tree: Map, operands: tuple[Node, ...]) -> list[Node]:
    """The nodes that a tree and functions of its operands come to."""
    return [n for n in topological([tree.root], (tree.value, *operands)) if not isinstance(n.op, ops.Number)]


def _is_truth(node: Node) -> bool:
    """Whether `node` is the result of a comparison, which a thread carries as 0 or 1."""
    return isinstance(node.op, ops.Pointwise) and node.dtype == torch.bool and node.op.traits.range == (0.0, 1.0)


def _refused(conv: Node, window: Window | None, fold: Fold | None) -> str | None:
    """Why this family does not take these stages, or `None`."""
    if window is not None and (len(window.op.kernel) != conv.ndim - 2 or set(window.op.dilation) != {1}):
        return "the pooling is dilated, or is not over all positions' dimensions"
    if fold is not None:
        spatial = set(range(2, conv.ndim))
        dims = set(fold.op.dims)
        if fold.op.kind not in FOLDS or fold.op.dtype is not None:
            return f"a fused reduction is one of {', '.join(FOLDS)}"
        if dims not in ({1}, spatial, {1} | spatial):
            return "the reduction is over some of the positions only"
    return None


def _refused_operands(conv: Node, operands: tuple[Node, ...], *, stored: bool) -> str | None:
    """Why pointwise trees may not read one of these, or `None`; `stored` where values stay at their positions."""
    for node in operands:
        kind = varies(node, conv)
        if kind is None:
            return f"operand {node!r} is neither a number nor one number per channel or element"
        if kind == "element" and not stored:
            return f"operand {node!r} has a number per element, and what is computed from it is pooled or a softmax"
    return None


def varies(operand: Node, conv: Node) -> Varies | None:
    """How an operand of a pointwise tree does over the output of `conv`; `None` where it is in another way."""
    if operand.dtype not in MEMORY:
        return None
    if is_number(operand):
        return "scalar"
    samples, channels, *positions = (1,) * (conv.ndim - operand.ndim) + tuple(operand.shape)
    if channels == conv.shape[1] and all(d == 1 for d in positions):
        if samples == 1:
            return "channel"
        return "sample's channel" if samples == conv.shape[0] else None
    return "element" if operand.shape == conv.shape else None


def is_number(operand: Node) -> bool:
    """Whether an operand is a single number."""
    return all(d == 1 for d in operand.shape)


def _boxed(conv: Node, users: Users) -> tuple[Node, Box | None]:
    """What the convolution reads: x itself, or window sums of x that its kernel forms."""
    x = conv.arg(0)
    box = window_sums(conv) if users[x] == 1 else None
    return (x, None) if box is None else (x.arg(0), box)


def window_sums(conv: Node) -> Box | None:
    """The window sums that a convolution runs on, if its kernel forms them, so that they never reach memory.

    On a GPU there is one at every element, in front of the first and behind the last too.
    """
    x = conv.arg(0)
    assert isinstance(conv.op, ops.Conv)
    inner = isinstance(x.op, ops.RangeSum) and x.dtype == x.arg(0).dtype and not x.op.written
    if not inner or conv.op.transposed or any(a or b for a, b in conv.op.padding):
        return None
    assert isinstance(x.op, ops.RangeSum)
    found, scale = [Windows(1, 1, 1, 0, 0)] * 3, 1.0
    for dim, slots in x.op.table:
        length = x.arg(0).shape[dim]
        along = windows(slots, length) if dim >= 2 and isinstance(length, int) else None
        if along is None:
            return None
        found[dim - x.ndim + 3] = along._replace(behind=_behind(conv, dim, along))
        scale *= slots[0].scale
    size, step, stride, before, behind = (_three(list(numbers)) for numbers in zip(*found, strict=True))
    box = Box(size, step, scale, stride, before, behind)
    fits = _in_strips(box) if has_strips(x.device) else stride == (1, 1, 1) and _in_lanes(conv, box)
    if not (box.plain or fits):
        return None
    apart = all((n - 1) * k + 1 <= s for n, k, s in zip(size, step, stride, strict=True))
    if apart and isinstance(x.arg(0).op, ops.Pointwise):
        return None  # the kernel that computes x sums it as well, and writes less
    return box if prod(size) > 1 else None


def has_strips(device: torch.device) -> bool:
    """Whether kernels go through rows in strips, as those of a CPU do."""
    return device.type == "cpu"


def _in_strips(box: Box) -> bool:
    """Whether each window of the strips on a CPU is added up anew without much ado."""
    again = prod(n / s for n, s in zip(box.count[:2], box.stride[:2], strict=True))
    return prod(box.count) <= MOST_SUMMED and again <= MOST_READ


def _in_lanes(conv: Node, box: Box) -> bool:
    """Whether a lane of a GPU has registers for the windows of two channels, and for those of the rows below a cell."""
    assert isinstance(conv.op, ops.Conv)
    lengths = [n for n in conv.arg(1).shape[2:] if isinstance(n, int)]
    missing = [1] * (3 - len(lengths))
    taps, dilation = [*missing, *lengths], [*missing, *conv.op.dilation]
    d, h, _ = map(covered, taps, dilation, box.count, box.step)
    return d * h * taps[2] + 2 * prod(taps) <= MOST_HELD


def covered(taps: int, dilation: int, count: int, step: int) -> int:
    """Elements along one dimension that a cell's windows of `count` elements cover, one window per tap."""
    return (taps - 1) * dilation + (count - 1) * step + 1


def _behind(conv: Node, dim: int, w: Windows) -> int:
    """How far windows may reach behind x: as far as before it where that makes no more outputs, since padding is mostly
    the same at both ends; then the lengths of the output follow from those of x at other sizes too."""
    assert isinstance(conv.op, ops.Conv)
    count, taps = conv.arg(0).shape[dim], conv.arg(1).shape[dim]
    stride, dilation = conv.op.stride[dim - 2], conv.op.dilation[dim - 2]
    assert isinstance(count, int) and isinstance(taps, int)

    def outputs(behind: int) -> int:
        return ((behind - w.behind) // w.stride + count - dilation * (taps - 1) - 1) // stride + 1

    if w.stride == 1 and w.before == 0 and conv.shape[dim] == 1:  # of more windows, only those of one output count
        return max(w.behind, 0)
    return next((n for n in (w.before, 0) if n >= w.behind and outputs(n) == conv.shape[dim]), w.behind)


def _three(values: list[int]) -> tuple[int, int, int]:
    a, b, c = values
    return a, b, c
