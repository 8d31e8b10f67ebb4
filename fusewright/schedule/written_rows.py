"""Which convolutions write row by row what eager has with channels last: where who reads it would copy it first.

    group_norm(conv(x)) * 2      pixel_shuffle(relu(conv(x)), 2)      of images x whose channels lie last

What kernels compute of such an image lies in rows as eager's results do, and they want rows of it; a convolution writes
either order at the same cost.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.ir import ops
from fusewright.ir.indices import is_view
from fusewright.ir.memory_order import Order, is_known, rows_of
from fusewright.ir.node import Graph, Node
from fusewright.schedule.beside import readers_of

# What takes the order of its operand, seen in another way or computed element by element.
_FOLLOWS = (ops.Pointwise, ops.Cast, ops.Detach, ops.Expand, ops.Slice)
# What gives rows, by kernels that read these; a reduction has one for either order.
_OF_ROWS = (ops.Norm, ops.Softmax, ops.Scan, ops.Unfold, ops.Fold)


def wants_rows(node: Node, graph: Graph, orders: Mapping[Node, Order]) -> bool:
    """Whether who reads `node`, which has its channels last, would rather have rows; values lie in these `orders`."""
    readers, found, stack, seen = readers_of(graph), False, [node], {node}
    while stack:
        value = stack.pop()
        for reader in readers[value]:
            if reader in seen:
                continue
            seen.add(reader)
            if _copies(reader, value, orders):
                found = True
            elif isinstance(reader.op, _FOLLOWS) or _is_turned_view(reader, orders):
                stack.append(reader)
            elif not isinstance(reader.op, ops.Reduce):
                return False
    return found


def _copies(reader: Node, value: Node, orders: Mapping[Node, Order]) -> bool:
    """Whether this computes rows of what lies otherwise, element by element elsewhere."""
    if orders[reader] != rows_of(reader):
        return False
    order = orders[value]
    match reader.op:
        case ops.Permute(dims=dims, copy=copy):
            return copy and is_known(order) and tuple(map(dims.index, order)) != rows_of(reader)
        case ops.Reshape(shape=shape):
            return is_known(order) and not is_view(value.shape, order, shape)
    return isinstance(reader.op, _OF_ROWS)


def _is_turned_view(reader: Node, orders: Mapping[Node, Order]) -> bool:
    """Whether this is a view that does not lie row by row either: one that does reads memory as it lies."""
    return isinstance(reader.op, ops.Permute | ops.Reshape) and orders[reader] != rows_of(reader)
