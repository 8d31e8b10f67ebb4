"""Graph -> Graph with images whose channels lie last in memory, as a library's convolutions have them.

    relu(conv(x, w, b) + y)   ->   to_first(conv_last(to_last(x), to_last(w), b, to_last(y), relu=True))

An image (N, C, H, W) becomes a value (N, H, W, C) that lies row by row, and so does everything between convolutions
that computes element by element, pools, concatenates or reduces: what a generated kernel or a library reads there is
ordinary memory, a number per channel is one per column, and what the model itself turns that way costs nothing.  Values
are copied into the other order where images come in and go out, which `channels_last` leaves to its caller to judge.
Weights are, once, ahead of all calls.

Convolutions take a bias, a residual and a relu behind them with them, one call of a library; a bias that no relu
follows is an addition of its own, for which a kernel can be found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from fusewright.ir import ops
from fusewright.ir.build import before_permute, cast, permute, pointwise, reshape
from fusewright.ir.memory_order import Order, is_known, output_orders, rows_of
from fusewright.ir.node import Graph, Node, make, remade
from fusewright.rules.normalization import scale_and_shift
from fusewright.schedule.chain import VIEWS

# Fewer bytes of channels than a library reads at once: those convolutions, of a picture's colors, stay as they are.
VECTOR = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def channels_last(graph: Graph, orders: Mapping[Node, Order]) -> tuple[Graph, int]:
    """`graph` with channels last, and how many convolutions have them so; none where that cannot be.

    The sources that do not lie row by row have these `orders`; the results lie in memory as they did.
    """
    eager = output_orders(graph, orders, kernels=False)
    lie_so = frozenset(n for n in graph.inputs if n.ndim in (4, 5) and orders.get(n) == _to_last(n.ndim))
    found, turned = _Turning(graph, lie_so).run()
    found = _in_rows(found, eager, output_orders(found, orders, kernels=False))
    if output_orders(found, orders, kernels=False) != eager:
        return graph, 0
    graph = _mapped(found, partial(_with_relu, found.users()))
    graph = _mapped(graph, _bias_apart)
    return _mapped(graph, partial(_into_norm, graph.users())), turned


def as_eager_lies(graph: Graph, eager: Sequence[Order | None], orders: Mapping[Node, Order]) -> Graph:
    """`graph` with outputs in rows that eager has so, and a rule does not: a norm of turned values is in rows, and the
    functions that it becomes lie as these do."""
    found = output_orders(graph, orders, kernels=False)
    sure = [wanted if lies is None or not is_known(lies) else lies for wanted, lies in zip(eager, found, strict=True)]
    return _in_rows(graph, eager, sure)


def with_memory_of_its_own(graph: Graph, captured: Graph) -> Graph:
    """`graph` with outputs as they were `captured` that rules made views of what is passed, and the model computes:
    a sum over a dimension of length 1 is what it sums, but in memory of its own."""
    outputs = zip(graph.outputs, captured.outputs, strict=True)
    return replace(
        graph, outputs=tuple(old if _is_passed(new) and not _is_passed(old) else new for new, old in outputs)
    )


def _is_passed(output: object) -> bool:
    """Whether an output is an input, a parameter or a buffer, or a view of one."""
    while isinstance(output, Node) and isinstance(output.op, VIEWS) and not getattr(output.op, "copy", False):
        output = output.arg(0)
    return isinstance(output, Node) and isinstance(output.op, ops.Source)


def _in_rows(graph: Graph, wanted: Sequence[Order | None], found: Sequence[Order | None]) -> Graph:
    """`graph` with outputs copied that have to lie row by row and do not."""
    outputs = list(graph.outputs)
    for i, output in enumerate(outputs):
        if isinstance(output, Node) and found[i] != wanted[i] == rows_of(output):
            turn, x = ops.Permute(tuple(range(output.ndim)), copy=True), output
            if isinstance(output.op, ops.Permute) and not output.op.copy:
                turn, x = replace(output.op, copy=True), output.arg(0)
            outputs[i] = make(turn, x, where=output.where)
    return replace(graph, outputs=tuple(outputs))


# -- the other order --------------------------------------------------------------------------------------------------


@dataclass
class _Turning:
    """What has become of each node: as it was, with its channels last, or both.  Inputs that `lie_so` are not copied to
    have them last."""

    graph: Graph
    lie_so: frozenset[Node]
    first: dict[Node, Node] = field(default_factory=dict)
    last: dict[Node, Node] = field(default_factory=dict)

    def run(self) -> tuple[Graph, int]:
        turned = 0
        for node in self.graph.nodes():
            found = self.turned(node)
            if node in self.first:
                continue
            if found is None:
                args = tuple(None if a is None else self.as_first(a) for a in node.args)
                self.first[node] = remade(node, args)
            else:
                turned += isinstance(found.op, ops.ConvLast)
                self.last[node] = found
        outputs = tuple(self.as_first(o) if isinstance(o, Node) else o for o in self.graph.outputs)
        effects = tuple(self.as_first(e) for e in self.graph.effects)
        return replace(self.graph, outputs=outputs, effects=effects), turned

    def as_first(self, node: Node) -> Node:
        """The value as it was, in whichever memory."""
        if node not in self.first:
            # one channel or one position lies row by row either way: a permuted view would have other strides
            same = node.shape[1] == 1 or _is_pixel(node)
            turn = partial(reshape, shape=node.shape) if same else partial(permute, dims=_to_first(node.ndim))
            self.first[node] = turn(self.last[node])
        return self.first[node]

    def as_last(self, node: Node) -> Node:
        """The value with its channels last, row by row."""
        if node not in self.last:
            value = self.as_first(node)
            if _is_pixel(node):
                self.last[node] = reshape(value, (node.shape[0], *node.shape[2:], node.shape[1]))
            else:
                self.last[node] = permute(value, _to_last(node.ndim), copy=node not in self.lie_so)
        return self.last[node]

    def turned(self, node: Node) -> Node | None:
        """What computes the node with its channels last, or `None` where that is not to be."""
        if isinstance(node.op, ops.Conv):
            return self.conv(node) if _is_for_library(node) else None
        if isinstance(node.op, ops.Permute) and node.arg(0) in self.last and node.op.dims == _to_last(node.ndim):
            if node.op.copy and node.arg(0) in self.lie_so:
                return None  # a view would be the input's memory
            self.first[node] = self.last[node.arg(0)]  # the model's own turn
            return None
        if isinstance(node.op, ops.Permute) and node.ndim in (4, 5) and node.op.dims == _to_first(node.ndim):
            found = self.as_first(node.arg(0))
            if node.op.copy:
                return make(ops.Permute(tuple(range(node.ndim)), copy=True), found, where=node.where)
            self.first[node], self.last[node] = permute(found, node.op.dims), found  # the model's own view stays one
            return found
        if isinstance(node.op, ops.Reshape) and node.arg(0) in self.last and _is_pixel(node.arg(0)):
            self.first[node] = reshape(self.last[node.arg(0)], node.shape)
            return None
        if isinstance(node.op, ops.Reduce) and node.arg(0) in self.last:
            return self.reduction(node, node.op)
        images = [a for a in node.inputs if a.shape[1:] == node.shape[1:] or isinstance(node.op, ops.Cat | ops.Pool)]
        if node.ndim not in (4, 5) or not any(a in self.last for a in images):
            return None
        match node.op:
            case ops.Pointwise() | ops.Cast():
                operands = [self.operand(a, node.ndim) for a in node.inputs]
                return None if None in operands else remade(node, operands)
            case ops.Norm(kind="batch", running=True):
                # of what its operands have become: some may be computed from images
                norm = make(node.op, *(None if a is None else self.as_first(a) for a in node.args))
                scale, shift = scale_and_shift(norm)
                scaled = pointwise("mul", cast(self.as_last(node.arg(0)), scale.dtype), scale)
                return cast(pointwise("add", scaled, shift), node.dtype)
            case ops.Cat(dim=dim):
                return make(ops.Cat(_place(dim, node.ndim)), *map(self.as_last, node.inputs), where=node.where)
            case ops.Pool(kernel=kernel) if len(kernel) == node.ndim - 2:
                pooled = make(node.op, self.as_first(node.arg(0)), where=node.where)
                return permute(pooled, _to_last(node.ndim))  # a library keeps the order
        return None

    def conv(self, node: Node) -> Node:
        assert isinstance(node.op, ops.Conv)
        op, x, w = node.op, node.arg(0), node.arg(1)
        padding = tuple(left for left, _ in op.padding)
        return make(
            ops.ConvLast(op.stride, padding, op.dilation, op.groups),
            *(self.as_last(x), self.as_last(w), None if node.args[2] is None else self.as_first(node.arg(2)), None),
            where=node.where,
        )

    def operand(self, node: Node, ndim: int) -> Node | None:
        """An operand of a pointwise function of images; `None` where it would have to be copied to be one."""
        if isinstance(node.op, ops.Number) or node.ndim == 0:
            return self.as_first(node)
        if node.ndim == ndim and (node in self.last or _is_pixel(node)):
            return self.as_last(node)
        shape = (*(1,) * (ndim - node.ndim), *node.shape)
        if shape[2:] == (1,) * (ndim - 2):  # a number per channel
            return reshape(self.as_first(node), (shape[0], *shape[2:], shape[1]))
        if node.ndim == ndim and 1 not in shape[1:]:
            return self.as_last(node)
        return None

    def reduction(self, node: Node, op: ops.Reduce) -> Node | None:
        x = node.arg(0)
        dims = tuple(sorted(_place(d, x.ndim) for d in op.dims))
        counted = op.gives_index and len(op.dims) > 1
        if op.first or counted or x.ndim not in (4, 5):
            return None
        found = make(replace(op, dims=dims), self.last[x], where=node.where)
        if op.keepdim:
            return found
        left = [d for d in range(x.ndim) if d not in op.dims]
        order = sorted(left, key=lambda d: _place(d, x.ndim))
        if left != order:
            return None
        self.first[node] = found
        return None


def _is_for_library(node: Node) -> bool:
    op, x = node.op, node.arg(0)
    assert isinstance(op, ops.Conv)
    symmetric = all(left == right >= 0 for left, right in op.padding) and not op.transposed
    channels = x.shape[1]
    wide = isinstance(channels, int) and channels * x.dtype.itemsize >= VECTOR
    return symmetric and wide and x.dtype in DTYPES and x.ndim in (4, 5)


def _is_pixel(node: Node) -> bool:
    """Whether an image has one position, so that its channels lie last as well."""
    return node.ndim in (4, 5) and node.shape[2:] == (1,) * (node.ndim - 2)


def _to_last(ndim: int) -> tuple[int, ...]:
    return (0, *range(2, ndim), 1)


def _to_first(ndim: int) -> tuple[int, ...]:
    return (0, ndim - 1, *range(1, ndim - 1))


def _place(dim: int, ndim: int) -> int:
    """Where a dimension is if the channels are last."""
    return _to_last(ndim).index(dim)


# -- what a convolution takes with it ---------------------------------------------------------------------------------


def _mapped(graph: Graph, change: Callable[[Node, Mapping[Node, Node]], Node | None]) -> Graph:
    """`graph` with `change` of every node, given what has become of its operands; where that is `None`, as it was."""
    became: dict[Node, Node] = {}
    for node in graph.nodes():
        found = change(node, became)
        if found is None:
            args = tuple(None if a is None else became[a] for a in node.args)
            found = remade(node, args)
        became[node] = found
    outputs = tuple(became[o] if isinstance(o, Node) else o for o in graph.outputs)
    return replace(graph, outputs=outputs, effects=tuple(became[e] for e in graph.effects))


def _with_relu(users: Mapping[Node, int], node: Node, became: Mapping[Node, Node]) -> Node | None:
    """relu(conv), relu(conv + y) and relu(y + conv) as one call."""
    if not (isinstance(node.op, ops.Pointwise) and node.op.fn == "relu"):
        return None
    value, residual = node.arg(0), None
    if isinstance(value.op, ops.Pointwise) and value.op.fn == "add" and users[value] == 1 and len(value.inputs) == 2:
        summands = sorted(value.inputs, key=lambda n: not _is_bare(n, users))
        value, residual = summands[0], became[summands[1]]
    if not _is_bare(value, users) or (residual is not None and residual.type != value.type):
        return None
    x, w, bias, _ = (None if a is None else became[a] for a in value.args)
    if residual is not None and bias is not None and _is_bare(residual, {residual: 1}) and residual.args[2] is not None:
        bias = pointwise("add", bias, residual.arg(2))  # both at once, ahead of all calls
        residual = make(residual.op, *residual.args[:2], None, None, where=residual.where)
    assert isinstance(value.op, ops.ConvLast)
    return make(replace(value.op, relu=True), x, w, bias, residual, where=node.where)


def _is_bare(node: Node, users: Mapping[Node, int]) -> bool:
    """Whether this is a convolution that takes nothing but a bias with it yet, and that nobody else uses."""
    return isinstance(node.op, ops.ConvLast) and not node.op.relu and node.args[3] is None and users[node] == 1


def _bias_apart(node: Node, became: Mapping[Node, Node]) -> Node | None:
    """conv + bias, for the library would take another pass for it."""
    if not isinstance(node.op, ops.ConvLast) or node.op.relu or node.args[2] is None:
        return None
    x, w, bias = (became[node.arg(i)] for i in range(3))
    return pointwise("add", make(node.op, x, w, None, None, where=node.where), bias)


# -- what norms take in -----------------------------------------------------------------------------------------------


def _into_norm(users: Mapping[Node, int], node: Node, became: Mapping[Node, Node]) -> Node | None:
    """norm(to_first(f(x))) as norm(f(to_first(x))): its kernel reads x as it lies, and computes f on the way."""
    if not isinstance(node.op, ops.Norm) or node.op.kind not in ("group", "instance"):
        return None
    view = node.arg(0)
    if not isinstance(view.op, ops.Permute) or view.op.copy or view.op.dims != _to_first(view.ndim):
        return None
    if not users[view] == users[view.arg(0)] == 1:
        return None
    to_first = view.op.dims

    def first(x: Node) -> Node:
        if isinstance(x.op, ops.Number) or x.ndim < view.ndim or x.shape != view.arg(0).shape:
            return before_permute(became[x], _to_last(view.ndim))
        if isinstance(x.op, ops.Pointwise | ops.Cast) and users[x] == 1:
            return remade(x, [None if a is None else first(a) for a in x.args])
        return permute(became[x], to_first)

    x = first(view.arg(0))
    return remade(node, [x, *(None if a is None else became[a] for a in node.args[1:])])
