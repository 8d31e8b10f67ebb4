"""In which order the dimensions of values lie in memory, in eager PyTorch and with kernels in their places.

order   of a value: its dimensions longer than 1, the densest last.  Gaps between elements do not matter, nor does how
        often a dimension repeats them.  What nothing is known of has an order of its own, equal where operation and
        operands' orders are.
rows    the order of a contiguous tensor: row by row
last    channels last; only images, of 4 or 5 dimensions, have that.  The channels are among the dimensions then even
        where there is but one: convolutions in eager answer in that format if its stride is 1

A kernel's *layout* (`Kernel.layouts`) is one of the two without gaps; an operand that has gaps is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.indices import is_view, order_of_parts
from fusewright.ir.node import Graph, Node, topological

Order = tuple[Any, ...]


def order_of(tensor: Tensor, node: Node | None = None) -> Order:
    """Of the dimensions of `tensor`; where it stands for `node`, of those that may be longer than 1 in another call."""
    value = tensor if node is None else node
    rows = rows_of(value)
    if _has_last_channel(tensor):
        return last_order(value)
    if tensor.is_contiguous():
        return (*rows, _UNKNOWN) if _is_ambiguous(tensor) else rows
    moving = tuple(d for d in rows if tensor.stride(d))
    found = tuple(sorted(moving, key=tensor.stride, reverse=True))
    if found == moving:
        return rows
    return found if len(found) == len(rows) else (_UNKNOWN, "expanded", found)


def _has_last_channel(tensor: Tensor) -> bool:
    """Whether a tensor of one channel, which lies row by row, is in channels-last format as well."""
    if tensor.ndim not in (4, 5) or tensor.shape[1] != 1 or tensor.stride(1) != 1:
        return False
    return tensor.shape[2:].numel() > 1 and tensor.is_contiguous()


def _is_ambiguous(tensor: Tensor) -> bool:
    """Whether an image of one position has the strides of channels-last format, as weights of such a model's 1 x 1
    convolutions do."""
    if tensor.ndim not in (4, 5) or tensor.shape[1] == 1 or tensor.shape[2:].numel() != 1:
        return False
    return tensor.stride(1) == 1 and min(tensor.stride()[2:]) >= tensor.shape[1]


def is_in_rows(tensor: Tensor) -> bool:
    """Whether a tensor lies row by row."""
    if tensor.is_contiguous():  # as most are
        return tensor.ndim < 4 or not _has_last_channel(tensor)
    return order_of(tensor) == rows_of(tensor)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether an image lies in that order, and not row by row."""
    return not is_in_rows(tensor) and order_of(tensor) == last_order(tensor)


def output_orders(
    graph: Graph, given: Mapping[Node, Order], *, kernels: bool, known: dict[Node, Order] | None = None
) -> list[Order | None]:
    """How the outputs of `graph` lie: in eager, or run by `kernels` where it has `Fused` nodes.

    `given` has the inputs, parameters and buffers that do not lie row by row.  What is `known` of a graph that has most
    nodes in common is kept for the next one.
    """
    orders = _orders(graph, given, kernels, {} if known is None else known)
    return [_seen(o, orders[o]) if isinstance(o, Node) else None for o in graph.outputs]


def lie_alike(graph: Graph, other: Graph, given: Mapping[Node, Order]) -> bool:
    """Whether eager's outputs of two graphs lie alike in memory; `given` as `output_orders` has it."""
    return output_orders(graph, given, kernels=False) == output_orders(other, given, kernels=False)


def lies_last(node: Node, given: Mapping[Node, Order], known: dict[Node, Order]) -> bool:
    """Whether a value has its channels last where kernels run, and not row by row; `given` and `known` as above."""
    known.update((n, order) for n, order in given.items() if n not in known)
    for each in topological([node], known):
        result = _result(each)
        known[each] = _order(each, known) if result is None else _fused(*result, known, True)
    return known[node] == last_order(node) != rows_of(node)


def follows_inputs(graph: Graph) -> bool:
    """Whether the same call in eager, with inputs in other orders, could give results in others."""
    inputs: dict[Node, Order] = {n: (_UNKNOWN, n.op) for n in graph.inputs if len(rows_of(n)) > 1}
    found = _orders(graph, inputs, False, {})
    return any(isinstance(o, Node) and not is_known(found[o]) for o in graph.outputs)


def follow_alike(graph: Graph, other: Graph) -> bool:
    """Whether eager's outputs of two graphs lie alike, in whichever of several orders their inputs lie."""

    def lie(one: Graph, order: Callable[[Node], Order]) -> list[Order | None]:
        return output_orders(one, {n: order(n) for n in one.inputs}, kernels=False)

    return all(lie(graph, order) == lie(other, order) for order in (rows_of, last_order, _last_two_turned, _reversed))


def _last_two_turned(node: Node) -> Order:
    rows = rows_of(node)
    return (*rows[:-2], *rows[:-3:-1])


def _reversed(node: Node) -> Order:
    return rows_of(node)[::-1]


def _orders(graph: Graph, given: Mapping[Node, Order], kernels: bool, found: dict[Node, Order]) -> dict[Node, Order]:
    found.update(given)
    for node in graph.nodes():
        if node not in found:
            result = _result(node)
            found[node] = _order(node, found) if result is None else _fused(*result, found, kernels)
    return found


def _result(node: Node) -> tuple[Node, int] | None:
    """The group that `node` is a result of, and which one; the group's node itself is its first one."""
    if isinstance(node.op, Fused):
        return node, 0
    of = node.arg(0) if isinstance(node.op, ops.Item) else node
    return (of, node.op.index) if isinstance(node.op, ops.Item) and isinstance(of.op, Fused) else None


def _fused(node: Node, index: int, known: Mapping[Node, Order], kernels: bool) -> Order:
    """Kernels write row by row, but for positions of a convolution, and functions of images, in the format of an input
    or of what was computed before."""
    assert isinstance(node.op, Fused)
    inside: dict[Node, Order] = {}
    result = node.op.bodies[index]
    nodes = topological([result])
    for inner in nodes:
        if not isinstance(inner.op, ops.Input):
            inside[inner] = _order(inner, inside)
            continue
        operand = node.arg(inner.op.index)
        kept = not kernels or operand.varies  # kernels want weights in rows
        inside[inner] = known[operand] if kept else rows_of(operand)
    order = inside[result]
    if not kernels:
        return order
    if node.op.rows:
        return rows_of(result)
    convolves = any(isinstance(n.op, ops.Conv) for n in nodes)
    kept = convolves or (len(node.op.bodies) == 1 and _is_of_images(result, inside))
    return order if kept and order == last_order(result) else rows_of(result)


def _is_of_images(result: Node, inside: Mapping[Node, Order]) -> bool:
    """Whether a GPU's kernel computes images elementwise of such whose channels lie last, and of what lies the same in
    both orders, or is one number of all channels."""
    whole = result.ndim in (4, 5) and result.device.type != "cpu" and not _is_alike(result, result.ndim)
    if not whole:
        return False

    def fits(node: Node) -> bool:
        shown = isinstance(node.op, ops.Reshape) and isinstance(node.arg(0).op, ops.Input)
        elementwise = isinstance(node.op, (*_ELEMENTWISE, ops.Input))
        return elementwise or _is_of_channels(node) or (shown and _is_alike(node, result.ndim))

    if not all(map(fits, inside)):
        return False
    operands = [n for n in inside if isinstance(n.op, ops.Input)]
    images = [n for n in operands if n.shape == result.shape]
    return bool(images) and all(
        inside[n] == last_order(n) if n in images else _is_alike(n, result.ndim) for n in operands
    )


def _is_of_channels(node: Node) -> bool:
    """Whether this is a reduction of each position's channels."""
    return isinstance(node.op, ops.Reduce) and node.op.dims == (1,) and node.op.keepdim


_ELEMENTWISE = (ops.Pointwise, ops.Cast, ops.Detach, ops.Number, ops.Full)


def _is_alike(node: Node, ndim: int) -> bool:
    """Whether an operand that is broadcast lies the same with channels last."""
    shape = (*(1,) * (ndim - node.ndim), *node.shape)
    return shape[1] == 1 or all(n == 1 for n in shape[2:])


def rows_of(value: Node | Tensor) -> Order:
    """The order of what lies row by row."""
    return tuple(d for d, length in enumerate(value.shape) if length != 1)


def last_order(value: Node | Tensor) -> Order:
    """The order of what has its channels last; of what is no image, that of rows."""
    rows = rows_of(value)
    return (*(d for d in rows if d != 1), 1) if value.ndim in (4, 5) else rows


def _seen(node: Node, order: Order) -> Order:
    """What of an order the strides of dimensions longer than 1 tell: not where one channel is."""
    single = node.ndim > 1 and node.shape[1] == 1 and order[:1] != (_UNKNOWN,)
    return tuple(d for d in order if d not in (1, _UNKNOWN)) if single else order


def _order(node: Node, known: Mapping[Node, Order]) -> Order:
    """Of what eager computes from operands in these orders."""
    rows = rows_of(node)
    operands = [(a, known[a]) for a in node.inputs if not isinstance(a.op, ops.Number)]
    if isinstance(node.op, ops.Permute) and not node.op.copy and is_known(operands[0][1]):
        return tuple(node.op.dims.index(d) for d in _seen(*operands[0]))
    if isinstance(node.op, ops.Windows) and is_known(operands[0][1]):
        return _of_windows(node, node.op, _seen(*operands[0]))
    if isinstance(node.op, ops.Opaque) and _turns(node.op):
        return last_order(node) if node.shape[1] != 1 and last_order(node) != rows else (*rows, _UNKNOWN)
    if len(rows) < 2 or all(order == rows_of(a) for a, order in operands):
        return rows
    match node.op:
        case ops.Detach():
            return operands[0][1]
        case ops.Reshape(shape=shape):
            x, order = operands[0]
            if is_known(order) and not is_view(x.shape, order, shape):
                return rows  # it is copied
            parts = order_of_parts(x.shape, order, shape) if is_known(order) and not _may_have_format(node) else None
            if parts is not None:
                return parts
        case ops.ConvLast() | ops.Matmul() | ops.Reduce() | ops.Statistics() | ops.Softmax() | ops.Embedding():
            return rows
        case (
            ops.Attention() | ops.Scan() | ops.Nll() | ops.Permute(copy=True) | ops.Unfold() | ops.Fold() | ops.Cross()
        ):
            return rows
        case ops.Roll() if node.device.type != "cpu":  # a concatenation there
            return rows
        case ops.Norm(kind="layer" | "instance"):
            return rows
        case ops.Norm(kind="group") if node.device.type != "cpu":
            return rows
        case ops.Pointwise() | ops.Cast() | ops.Dropout():
            # the first operand that has all dimensions decides
            decides = next(((a, order) for a, order in operands if a.shape == node.shape), None)
            if decides is not None:
                return decides[1] if _seen(*decides) == decides[1] else (*rows, _UNKNOWN)
        case ops.Norm() if node.shape[1] == 1:
            return (*rows, _UNKNOWN)
        case ops.RangeSum(table=table) if table and last_order(node) == rows and _is_format(*operands[0]):
            return rows
        case ops.Pool(kind="avg", kernel=(_, _, _)):
            return rows
        case ops.Conv():
            return _in_format(node, operands[:2])
        case ops.Pool(kind=kind, kernel=(_,)) if node.ndim == 3:
            return _of_signals(node, kind, *operands[0])
        case ops.Norm(kind="batch") if _lies_as_given(node) and operands[0][1] != last_order(operands[0][0]):
            return _unknown(node, operands[:1])
        case ops.Pool() | ops.Interpolate() | ops.Norm(kind="batch" | "group"):
            return _in_format(node, operands[:1])
        case ops.Norm(kind="rms") if node.device.type == "cpu":
            return _in_format(node, operands[:1])
    return _unknown(node, operands)


def _turns(op: ops.Opaque) -> bool:
    """Whether its result is asked for with its channels last."""
    formats = (torch.channels_last, torch.channels_last_3d)
    return op.target.startswith("aten.") and op.given.get("memory_format") in formats


def _may_have_format(node: Node) -> bool:
    """Whether the order of dimensions longer than 1 does not tell if a value is in channels-last format."""
    return node.ndim in (4, 5) and node.shape[1] == 1


def _of_windows(node: Node, op: ops.Windows, order: Order) -> Order:
    """Of windows along a dimension: where the step is 1 they lie as close as the elements in them, and what is computed
    of them has the fewer of both side by side."""
    count, inner = node.shape[op.dim], node.ndim - 1
    if op.step == 1 and not isinstance(count, int):
        return _unknown(node, [(node.arg(0), order)])
    both = (inner, op.dim) if op.step == 1 and op.size > count else (op.dim, inner)
    found = (e for d in order for e in (both if d == op.dim else (d,)))
    return tuple(d for d in found if node.shape[d] != 1)


# -- formats: channels last where an operand is, else row by row ------------------------------------------------------


def _in_format(node: Node, operands: Sequence[tuple[Node, Order]]) -> Order:
    """Of what is computed in the format of one of these operands."""
    last = last_order(node)
    if last == rows_of(node) or any(order == last_order(a) != rows_of(a) for a, order in operands):
        return last
    return rows_of(node) if all(is_known(order) for _, order in operands) else _unknown(node, operands)


def _lies_as_given(norm: Node) -> bool:
    """Whether a GPU may write a batch norm as its operand lies, as PyTorch's own kernels do: cuDNN, which has those of
    float32 with weights, writes one of two formats."""
    weights = len(norm.args) > 2 and norm.args[1] is not None and norm.args[2] is not None
    by_library = weights and norm.dtype == torch.float32 and norm.ndim > 2
    return norm.device.type == "cuda" and not by_library


def _of_signals(node: Node, kind: str, x: Node, order: Order) -> Order:
    """Of pools of signals, which are seen as images of one row: in that format where the channels lie last, but for
    maxima without gradients on a CPU."""
    rows = rows_of(node)
    if not is_known(order) or (order == _turned(x) != rows_of(x) and kind != "avg"):
        return _unknown(node, [(x, order)])
    return _turned(node) if order == _turned(x) else rows


def _turned(value: Node) -> Order:
    """The order of a signal that has its channels last."""
    return tuple(sorted(rows_of(value), key=lambda d: d == 1))


def _is_format(node: Node, order: Order) -> bool:
    """Whether this is one of the two orders, known or not which."""
    computed = order[:2] in ((_UNKNOWN, kind.__name__) for kind in (ops.Conv, ops.Pool, ops.Norm))
    return computed or order in (rows_of(node), last_order(node))


# -- what nothing is known of -----------------------------------------------------------------------------------------

_UNKNOWN = "?"


def _unknown(node: Node, operands: Sequence[tuple[Node, Order]]) -> Order:
    return (_UNKNOWN, type(node.op).__name__, node.shape, *(order for _, order in operands))


def is_known(order: Order) -> bool:
    """Whether all of it is: of one channel, it may not be known whether it is in channels-last format."""
    return _UNKNOWN not in (order[:1] + order[-1:])
