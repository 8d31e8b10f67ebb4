"""The gaps of transposed convolutions, and what is made of a convolution's positions one by one.

Position o of y[o] = b + sum_{c,u} x[c,p] * w[c,u] with o = s*p + d*u - left is a gap where no p and u lead to it.
Where there is one tap, or d is a multiple of s, every tap leads to the same positions modulo s: s - 1 of s are gaps,
and the others are those of the convolution of stride 1 and dilation d/s, in order.  Of k < s neighbouring taps, the
others are those of the convolution of stride k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusewright.ir.build import reshape
from fusewright.ir.node import Node, make, remade, topological
from fusewright.ir.ops import Cast, Conv, Full, Pointwise, Reduce, Softmax

# Operations between a convolution and what reduces its positions that are looked through at most.
REACH = 16


# -- the gaps of a convolution


@dataclass(frozen=True)
class Dense:
    """One dimension without its gaps: what position i of it was is position first + i // run * stride + i % run.

    padding, dilation, output_padding   of the convolution of stride `run` that computes `length` positions; where the
                                        last is negative, it is cropped behind by so many more
    kernel, step, before                the window, its stride and its padding, in such positions
    kept                                positions that some window reads are the first so many
    covered                             whether every window has a gap besides
    """

    first: int
    stride: int
    length: int
    padding: int
    dilation: int
    output_padding: int
    run: int = 1
    kernel: int = 0
    step: int = 1
    before: int = 0
    kept: int = 0
    covered: bool = False


Dims = Mapping[int, Dense]


def along_dim(conv: Node, d: int) -> Dense | None:
    """Dimension `d` of a transposed convolution without its gaps; `None` where they are none, or irregular."""
    op, i, taps, length = conv.op, d - 2, conv.arg(1).shape[d], conv.arg(0).shape[d]
    assert isinstance(op, Conv) and isinstance(taps, int)
    stride, dilation, left = op.stride[i], op.dilation[i], op.padding[i][0]
    if stride == 1 or not isinstance(length, int):
        return None
    if taps == 1 or dilation % stride == 0:
        run, apart = 1, dilation // stride if taps > 1 else 1
    elif dilation == 1 and taps < stride:
        run, apart = taps, 1
    else:
        return None
    out = conv.shape[d]
    assert isinstance(out, int)
    low = -(-left // stride)
    first, (blocks, rest) = stride * low - left, divmod(out + left - stride * low, stride)
    dense, natural = run * blocks + min(max(rest, 0), run), run * length + apart * (taps - run) - 2 * run * low
    if dense < 1 or dense % run or first + run > stride or dense - natural >= max(run, apart):
        return None
    return Dense(first, stride, dense, run * low, apart, dense - natural, run, kept=dense, covered=dense < out)


def without_gaps(conv: Node, dense: Dims) -> Node:
    """The convolution without its gaps along the dimensions of `dense`, and of what is left what windows read."""
    x, w, bias = conv.args
    assert isinstance(conv.op, Conv) and x is not None and w is not None
    stride, padding = list(conv.op.stride), list(conv.op.padding)
    dilation, extra = list(conv.op.dilation), list(conv.op.output_padding)
    for d, along in dense.items():
        less = along.length - along.kept - along.output_padding  # than what it has, of which windows read the first
        stride[d - 2], padding[d - 2] = along.run, (along.padding, along.padding + max(0, less))
        dilation[d - 2], extra[d - 2] = along.dilation, max(0, -less)
    op = Conv(tuple(stride), tuple(padding), tuple(dilation), conv.op.groups, True, tuple(extra))
    return make(op, x, w, bias)


# -- what is made of its positions


@dataclass(frozen=True)
class Made:
    """`root`, made of the positions of `conv` one by one by way of `nodes`, arguments first.

    free   the dimensions along which nothing else has more than one element
    """

    root: Node
    conv: Node
    nodes: tuple[Node, ...]
    free: frozenset[int]

    def of(self, y: Node) -> Node:
        """The same of `y` in place of the convolution."""
        found = {self.conv: y}
        for node in self.nodes:
            found[node] = remade(node, (a if a is None else found.get(a, a) for a in node.args))
        return found[self.root]

    def dense(self, dims: Iterable[int]) -> dict[int, Dense]:
        """Those of some dimensions along which all gaps are alike, without them."""
        found = {d: along_dim(self.conv, d) for d in dims if d in self.free}
        return {d: dense for d, dense in found.items() if dense is not None}

    def of_gaps(self) -> Node:
        """What it is at a gap, of one element along the dimensions of positions."""
        bias, ones = self.conv.args[2], (1,) * (self.conv.ndim - 2)
        shape = (1, self.conv.shape[1], *ones)
        if bias is None:
            return self.of(make(Full(shape, 0.0, self.conv.dtype, self.conv.device)))
        return self.of(reshape(bias, shape))


def made_of(root: Node) -> Made | None:
    """How `root` is made of a transposed convolution's positions, if it is."""
    stack, nodes, convs, beside = [root], list[Node](), list[Node](), list[Node]()
    while stack:
        node = stack.pop()
        if node in nodes or node in convs:
            continue
        if isinstance(node.op, Conv):
            convs.append(node)
            continue
        if not _is_by_position(node, root) or len(nodes) == REACH:
            return None
        nodes.append(node)
        stack += [a for a in node.inputs if a.shape[2:] == root.shape[2:] and a.ndim == root.ndim]
        beside += [a for a in node.inputs if a.shape[2:] != root.shape[2:] or a.ndim != root.ndim]
    if len(convs) != 1 or not convs[0].op.transposed:  # type: ignore[attr-defined]
        return None
    free = frozenset(d for d in range(2, root.ndim) if all(_has_one(a, root.ndim - d) for a in beside))
    inside = {*nodes}
    return Made(root, convs[0], tuple(n for n in topological((root,), (*convs, *beside)) if n in inside), free)


def _is_by_position(node: Node, root: Node) -> bool:
    """Whether it is made of the channels of each position, in the places of `root`."""
    if node.ndim != root.ndim or node.shape[2:] != root.shape[2:]:
        return False
    match node.op:
        case Pointwise() | Cast() | Softmax(dim=1) | Reduce(dims=(1,), keepdim=True):
            return True
    return False


def _has_one(x: Node, from_behind: int) -> bool:
    """Whether x has one element, or none of its own, along a dimension."""
    return x.ndim < from_behind or x.shape[-from_behind] == 1
