"""Products by one column as sums, where what they multiply is computed, or read by others as well.

    linear(f(x), w)  =  sum(f(x) * w)                 w (1, K)
    x * g(linear(x, w))  =  x * g(sum(x * w))

A product reads rows from memory: what is computed is written for it, and who else reads the rows reads them again.  A
sum is a reduction like others, of which kernels compute what lies ahead, and keep rows for what follows
(`schedule.stream`, `schedule.kept_rows`).  As the heads of values, gates and poolings by attention have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from fusewright.ir import ops
from fusewright.ir.build import pointwise, reshape
from fusewright.ir.memory_order import Order, lie_alike
from fusewright.ir.node import Graph, Node, make
from fusewright.runtime.device import DeviceFacts
from fusewright.schedule import sample
from fusewright.schedule.chain import POINTWISE, Users
from fusewright.schedule.group import sizes


def as_sums(graph: Graph, facts: DeviceFacts, hints: Mapping[Any, int], orders: Mapping[Node, Order]) -> Graph:
    """`graph` with such products of float32 as sums, where reading their rows takes longer than a launch on a device of
    these `facts`, symbolic sizes taken at `hints`.

    Results lie in memory as they did, where the sources that do not lie row by row have these `orders`.
    """
    users = graph.users()
    for node in reversed(graph.nodes()):  # what comes before a replaced one stays as it is
        if not _is_by_column(node, users) or not _reads_what_counts(node.arg(0), users):
            continue
        if prod(sizes(node.arg(0), hints)) * node.dtype.itemsize < facts.launch * facts.memory:
            continue
        placed = graph.substitute(node, _sum(node))
        if lie_alike(graph, placed, orders):
            graph, users = placed, placed.users()
    return graph


def _is_by_column(node: Node, users: Users) -> bool:
    """Whether this is a product of rows by one column, that is not one block's for a sample."""
    if not isinstance(node.op, ops.Matmul) or node.dtype != torch.float32 or not node.varies or node.arg(1).ndim != 2:
        return False
    if node.shape[-1] != 1 or not all(isinstance(n, int) for n in node.arg(1).shape):
        return False
    return not isinstance(sample.parse(node, users), sample.SampleProgram)


def _reads_what_counts(rows: Node, users: Users) -> bool:
    """Whether rows are computed for this alone, or others read them, too."""
    return users[rows] > 1 or isinstance(rows.op, POINTWISE)


def _sum(matmul: Node) -> Node:
    x, w, bias = matmul.args
    assert x is not None and w is not None
    products = pointwise("mul", x, reshape(w, x.shape[-1:]))
    found = make(ops.Reduce("sum", (x.ndim - 1,), keepdim=True), products, where=matmul.where)
    return found if bias is None else pointwise("add", found, bias)
