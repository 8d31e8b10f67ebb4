"""Whether a kernel can be expected to be faster than PyTorch's own operations, where nothing is timed.

Most groups save passes over memory and cost nothing, so their kernels always pay; one plain operation alone saves
nothing.  A matrix product is what a library is best at: it is taken only where what it saves outweighs what it costs.
All costs are in multiply-adds of the library's float32 product; the numbers were fitted to single threads of two
processors with vectors of 512 bits (an EPYC and a Xeon), rounded in the library's favour.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import Any

import torch

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.axes import is_plain
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.cost import FREE, is_one_pass
from fusewright.schedule.group import Group, sizes
from fusewright.schedule.product import Product, contraction_of
from fusewright.schedule.sample import SampleProgram

# A multiply-add in strips of many rows, and in a sample program, which multiplies one sample at a time.
IN_STRIPS = 0.8
BY_SAMPLE = 5.0
# Turning an element of the weights into the lanes' order, once a call, and reading it again for each strip.
TURNED = 50.0
AGAIN = 4.0
# The library reads an element of the weights, multiplies vectors of so many features, and float64 at half the rate.
READ = 3.0
NARROW = 24
WIDE = 2.0
# An element that goes through memory between two operations instead of staying in registers.
PASS = 10.0
# An operation of PyTorch's, however small, and the call of a kernel.
LAUNCH = 100e3
CALL = 300e3


def pays(
    group: Group,
    option: Mapping[str, Any],
    hints: Mapping[Any, int],
    layouts: Mapping[Node, str],
    *,
    tf32: bool = False,
    capability: int | None = None,
) -> bool:
    """Whether the kernel of `group`, cut as `option` says, should be faster than ATen's operations; `layouts`, `tf32`
    and `capability` mean nothing here.

    Half precisions are left to the kernel: whether a library multiplies them at all differs by processor.
    """
    work = [n for n in group.inner if not isinstance(n.op, FREE)]
    products = [n for n in work if isinstance(n.op, ops.Matmul | ops.Conv)]
    if not products:
        return not (len(work) == 1 and is_one_pass(work[0]))
    if any(n.dtype.itemsize < 4 for n in products):
        return True
    rest = [n for n in work if n not in products]
    library = LAUNCH * len(work) + PASS * sum(prod(sizes(n.inputs[0], hints)) for n in rest)
    if isinstance(group.record, SampleProgram):
        matrices = [_matrix(n, hints) for n in products]
        library += sum(_of_library(*m, wide=n.dtype == torch.float64) for m, n in zip(matrices, products, strict=True))
        return CALL + BY_SAMPLE * sum(map(prod, matrices)) < library
    if not isinstance(group.record, Contraction | Product):
        return True
    c = contraction_of(group.record)
    if not _is_matmul(c) or c.op.groups > 1:
        return True  # a library's convolution is no match for a kernel that keeps what follows at hand
    samples, features, *positions = sizes(c.conv, hints)
    rows, row = prod(positions), int(option["strips"]["strip"][2])
    strips, rows = samples * ceil(rows / row), samples * rows
    weights = c.channels * features
    return CALL + weights * (IN_STRIPS * rows + TURNED + AGAIN * strips) < library + weights * rows


def _is_matmul(c: Contraction) -> bool:
    """Whether positions are independent: a 1x1 convolution that nothing pools."""
    plain = all(is_plain(c.conv, i) for i in range(c.conv.ndim - 2))
    return plain and c.box is None and c.window is None


def _matrix(node: Node, hints: Mapping[Any, int]) -> tuple[int, int, int]:
    """Rows, inner length and features of a matmul."""
    *rows, features = sizes(node, hints)
    return prod(rows), sizes(node.arg(0), hints)[-1], features


def _of_library(rows: int, length: int, features: int, *, wide: bool) -> float:
    """What the library takes for a matrix product."""
    return (WIDE if wide else 1.0) * length * (rows * max(features, NARROW) + READ * features)
