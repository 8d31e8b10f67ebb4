"""What a group's kernel holds as constants and shapes of operands do not tell: strides, paddings, windows.

They are those of the group's own operations, which the algebra may have changed: where an average pool slid in front of
a convolution, the convolution has the pool's stride, and a window begins at every element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.ir.slots import Windows, windows
from fusewright.kernel import Fixed
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.group import Group
from fusewright.schedule.range_sums import RangeReduction

# So many index ranges a call may list; of a longer table only the lengths that it is for are compared.
FEW = 16


def fixed(group: Group) -> tuple[Fixed, ...]:
    """The constants of a group's kernel: of its convolution, then of its windows, where it has them."""
    record, found = group.record, list[Fixed]()
    for node in group.inner:
        if isinstance(node.op, ops.Conv):
            found += _convolution(node.op, node.arg(1))
    for node in group.inner:
        if isinstance(node.op, ops.Pool):
            found += _pool(node.op)
    if isinstance(record, Contraction) and record.box is not None:
        box, leading = record.box, 5 - record.x.ndim
        sums = zip(box.count, box.step, box.stride, box.before, box.behind, strict=True)
        found += _windows([Windows(*numbers) for numbers in sums][leading:])
    if isinstance(record, RangeReduction) and not record.total:
        found += _sums(record.root)
    return tuple(found)


def _convolution(op: ops.Conv, weight: Node) -> Iterator[Fixed]:
    """The arguments of ``F.conv2d`` or ``F.conv_transpose2d``, and which of the two."""
    ones, zeros = (1,) * len(op.stride), (0,) * len(op.stride)
    yield Fixed("kernel_size", tuple(int(n) for n in weight.shape[2:]))
    yield Fixed("stride", op.stride, ones)
    yield _padding("padding", op.padding)
    if op.transposed:
        yield Fixed("output_padding", op.output_padding or zeros, zeros)
    yield Fixed("dilation", op.dilation, ones)
    yield Fixed("groups", op.groups, 1)
    if op.transposed:
        yield Fixed("transposed", True, False)


def _pool(op: ops.Pool) -> Iterator[Fixed]:
    """Those of ``F.max_pool2d`` or ``F.avg_pool2d``; what few pools have, of these alone."""
    each = zip(op.kernel, op.dilation, op.stride, op.padding, op.padding, strict=True)
    yield from _windows([Windows(*numbers) for numbers in each])
    if op.ceil_mode:
        yield Fixed("pool_ceil_mode", True, False)
    if not op.count_include_pad:
        yield Fixed("pool_count_include_pad", False, True)
    if op.divisor is not None:
        yield Fixed("pool_divisor_override", op.divisor, None)


def _sums(root: Node) -> Iterator[Fixed]:
    """Those of a range sum: windows where all its slots are such, else the ranges themselves, where they are few."""
    assert isinstance(root.op, ops.RangeSum)
    table, x = dict(root.op.table), root.arg(0)
    each = [_along(table[d], x.shape[d]) if d in table else Windows(1, 1, 1, 0, 0) for d in range(min(table), x.ndim)]
    whole = [found for found in each if found is not None]
    if len(whole) == len(each):
        yield from _windows(whole)
    elif sum(map(len, table.values())) <= FEW:
        yield Fixed("ranges", tuple(tuple((s.start, s.stop, s.step) for s in slots) for slots in table.values()))


def _along(slots: tuple[ops.Slot, ...], length: ops.Size) -> Windows | None:
    """The windows that all slots are, if they are; with as much padding behind as before, where that makes as many."""
    found = windows(slots, int(length))
    if found is not None and 0 <= found.before - found.behind < found.stride:
        return found._replace(behind=found.before)
    return found


def _windows(each: Iterable[Windows]) -> Iterator[Fixed]:
    """Those of windows, one of `each` per dimension."""
    size, dilation, stride, before, behind = zip(*each, strict=True)
    yield Fixed("pool", size)
    yield Fixed("pool_stride", stride, size)
    yield _padding("pool_padding", tuple(zip(before, behind, strict=True)))
    if set(dilation) != {1}:
        yield Fixed("pool_dilation", dilation, (1,) * len(size))


def _padding(name: str, ends: tuple[tuple[int, int], ...]) -> Fixed:
    """A padding: a number for each dimension, or two where its ends differ."""
    alike = all(left == right for left, right in ends)
    return Fixed(name, tuple(left for left, _ in ends) if alike else ends, (0,) * len(ends))
