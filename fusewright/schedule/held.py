"""Parameters that a group reads as the model holds them, though its operations see them in another shape.

    x + bias.reshape(C, 1, 1)        before: x, bias.reshape(C, 1, 1)        after: x, bias

To a kernel both are the same memory.  A view is an operation all the same, which a host is as long about as a small
GPU kernel takes.
"""

from __future__ import annotations

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.normalization import ChannelStatistics
from fusewright.schedule.stream_record import Stream, with_indices


def as_held(tensors: tuple[Node, ...], record: object) -> tuple[Node, ...]:
    """What the kernel of `record` is given for the tensors that it reads."""
    s = record.sums if isinstance(record, ChannelStatistics) else record
    if isinstance(s, Contraction):  # of what lies beside its products it reads number after number
        found = tuple(t if t in (s.x, s.conv.arg(1), *s.elements) else _shown(t) for t in tensors)
    elif isinstance(s, Stream):
        found = tuple(_held(tensor, s) for tensor in tensors)
    else:
        return tensors
    return found if len(set(found)) == len(found) else tensors


def dims_of(view: Node, held: Node) -> dict[int, int]:
    """Which dimension of what is held each one of a view is; those of size 1 are left out."""
    places = [[d for d, n in enumerate(node.shape) if n != 1] for node in (view, held)]
    return dict(zip(*places, strict=True))


def _shown(tensor: Node) -> Node:
    """The parameter that a tensor shows with other dimensions of size 1, or the tensor."""
    held = tensor.arg(0) if isinstance(tensor.op, ops.Reshape) else tensor
    alike = [n for n in tensor.shape if n != 1] == [n for n in held.shape if n != 1]
    return held if alike and isinstance(held.op, ops.Param | ops.Buffer | ops.Constant) else tensor


def _held(tensor: Node, s: Stream) -> Node:
    """The same of one that is read along none of these dimensions."""
    held = _shown(tensor)
    if held is tensor:
        return tensor
    ones = [d for d, n in enumerate(tensor.shape) if n == 1]
    reads = [r for r in with_indices(s.reads) if r.tensor is tensor]
    plain = all(r.value is tensor and r.indices is None and r.part is None for r in reads)
    return held if plain and all(r.dims[d] is None for r in reads for d in ones) else tensor
