"""Whether a kernel can be expected to be faster than PyTorch's own operations, where nothing is timed.

What PyTorch takes is the cost model's sum over the group's operations. Most groups save passes over memory, and their
kernels always pay; so do those of prefix sums, where there are rows enough. Those with a product or a convolution have
a library to beat, and the estimates of `schedule`, made to compare tiles with each other, have been as far off as
`UNSURE` says: such a kernel is taken where it is faster by more than that. Sample programs have one block per sample,
which may have much to read. The numbers are of kernels on an H200 (benchmarks/results/h200.json and
h200_solutions.json); convolutions of many channels in half precision, for which a library may reach more than the cost
model's rate, are not among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from fusewright.ir import ops
from fusewright.ir.build import of_part_read
from fusewright.ir.node import Node
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.cost import FREE, CostModel, is_one_pass
from fusewright.schedule.group import Group, sizes
from fusewright.schedule.matmul import Linear
from fusewright.schedule.normalization import Normalization
from fusewright.schedule.product import contraction_of
from fusewright.schedule.sample import SampleProgram
from fusewright.schedule.scan import Scan

# By so much the best estimate of a contraction may be too low.
UNSURE = 2.0
# Bytes per second that one block reads, and of weights all blocks together: of a sample program, and of a tail, which
# only the block that comes last carries out.
OF_BLOCK, OF_ALL, OF_TAIL = 2.5e10, 5.9e12, 5e9
# FLOP/s of the libraries' matmuls: in half precision, and of float32 numbers that are rounded to tf32; seconds of the
# smallest matmul.
HALF, ROUNDED = 5e14, 3e14
LEAST = 1.5e-5


def pays(group: Group, seconds: float, hints: Mapping[Any, int], *, tf32: bool) -> bool:
    """Whether the kernel of `group` should be faster than ATen's operations.

    seconds  that its tiles should take, of a group with a convolution or of a matmul computed as one; that its blocks
             should take to read and to write, of prefix sums
    tf32     whether float32 operands of products may be rounded to it, by the libraries as well
    """
    work = [n for n in group.inner if not isinstance(n.op, FREE)]
    if len(work) == 1 and is_one_pass(work[0]):
        return isinstance(group.record, Normalization) and _has_columns(work[0])
    multiplies = any(isinstance(n.op, ops.Matmul | ops.Conv) for n in work)
    if not multiplies and not isinstance(group.record, SampleProgram | Scan):
        return True
    model = CostModel(LARGE_GPU, hints, derived_ahead=True)
    library = sum(_library_seconds(n, model, tf32=tf32) for n in work)
    least = LARGE_GPU.launch + moved(group, hints) / LARGE_GPU.memory
    if isinstance(group.record, SampleProgram):
        return least + _sample_seconds(group.record, hints, OF_BLOCK) < library
    if isinstance(group.record, Linear | Scan):
        return max(least, seconds) < library
    c = contraction_of(group.record)
    tail = 0.0 if c.tail is None else _sample_seconds(c.tail, hints, OF_TAIL)
    return max(least, UNSURE * seconds) + tail < library


def moved(group: Group, hints: Mapping[Any, int]) -> int:
    """Bytes that a group reads and writes."""
    parts = {n.arg(0): of_part_read(n).arg(0) for n in group.inner if isinstance(n.op, ops.Conv)}
    read = (parts.get(n, n) for n in group.operands)
    return sum(prod(sizes(n, hints)) * n.dtype.itemsize for n in (*read, *group.results))


def _has_columns(node: Node) -> bool:
    """Whether it is a softmax along another dimension than the last one, which takes ATen several times as long as
    reading and writing do (benchmarks/results/h200_softmaxes.json)."""
    return isinstance(node.op, ops.Softmax) and any(n != 1 for n in node.shape[node.op.dim + 1 :])


def _library_seconds(node: Node, model: CostModel, *, tf32: bool) -> float:
    """What ATen takes for one operation."""
    work = model(node)
    if not isinstance(node.op, ops.Matmul):
        return work.seconds
    if node.dtype.itemsize == 2 or (node.dtype == torch.float32 and tf32 and not node.op.convolves):
        facts = replace(LARGE_GPU, matmul=HALF if node.dtype.itemsize == 2 else ROUNDED)
        work = CostModel(facts, model.hints, derived_ahead=True)(node)
    return LEAST + work.seconds


def _sample_seconds(program: SampleProgram, hints: Mapping[Any, int], rate: float) -> float:
    """What reading takes at so many bytes a second: a block reads a sample, and for each of them all weights."""
    weights = [n.arg(1) for n in program.inner if isinstance(n.op, ops.Matmul)]
    read = sum(prod(sizes(w, hints)) * w.dtype.itemsize for w in weights)
    own = [n for n in program.leaves if program.per_sample(n)]
    sample = sum(prod(sizes(n, hints)[1:]) * n.dtype.itemsize for n in own)
    samples = sizes(program.root, hints)[0]
    return max((sample + read) / rate, samples * read / OF_ALL)
