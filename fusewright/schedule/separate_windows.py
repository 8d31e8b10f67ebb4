"""Windows that share no elements, as functions of the few that each one has.

    max_pool2d(x, 2)    is    maximum(maximum(x_00, x_01), maximum(x_10, x_11))

A pool by itself reads rows of elements for many windows at once.  Beside something else that reads the same elements,
another pool or an image at half its size, it is one more function of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make

# Elements of a window.
MOST = 9
OF_TWO = {"max": "maximum", "min": "minimum", "avg": "add"}


def is_separate(node: Node) -> bool:
    """Whether `node` pools windows of few elements, none of which is in two of them or in padding."""
    op = node.op
    if not isinstance(op, ops.Pool) or prod(op.kernel) > MOST or op.ceil_mode or any(op.padding):
        return False
    apart = all(k <= s for k, s in zip(op.kernel, op.stride, strict=True)) and set(op.dilation) == {1}
    lengths = (*node.arg(0).shape[-len(op.kernel) :], *node.shape[-len(op.kernel) :])
    return apart and all(isinstance(n, int) and n for n in lengths)


def beside_others(inner: Iterable[Node], moves: tuple[type[ops.Op], ...]) -> set[Node]:
    """The pools among `inner` whose elements others that move elements, or pool them, read as well."""
    readers: dict[Node, list[Node]] = {}
    for node in inner:
        if is_separate(node) or isinstance(node.op, moves):
            for x in node.inputs:
                readers.setdefault(x, []).append(node)
    return {n for some in readers.values() if len(some) > 1 for n in some if isinstance(n.op, ops.Pool)}


def written_out(node: Node) -> tuple[Node, tuple[tuple[Node, tuple[int, ...]], ...]]:
    """The function that a pool is, and its operands, each with where in the window it lies."""
    op, x = node.op, node.arg(0)
    assert isinstance(op, ops.Pool)
    first = node.ndim - len(op.kernel)
    taps = []
    for place in product(*map(range, op.kernel)):
        tap = x
        for d, begin in enumerate(place, first):
            length, step = node.shape[d], op.stride[d - first]
            assert isinstance(length, int)
            tap = make(ops.Slice(d, begin, begin + (length - 1) * step + 1, step), tap)
        taps.append((tap, place))
    value = taps[0][0]
    for tap, _ in taps[1:]:
        value = pointwise(OF_TWO[op.kind], value, tap)
    if op.kind == "avg":
        value = pointwise("div", value, prod(op.kernel) if op.divisor is None else op.divisor)
    return value, tuple(taps)
