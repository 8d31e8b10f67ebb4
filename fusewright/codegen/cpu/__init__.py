"""C++ of kernel groups for CPUs: which ways there are to cut a group, and the kernel of one of them.

A family is a module with ``kernel(record, name, reference, ...) -> Kernel``; `options` says what its `...` may be.  The
record it returns has ``target="cpu"``, and:

source    complete C++17: `fusewright.codegen.cpu.text.source` puts the body into a namespace of the kernel's name,
          behind the primitives it uses (`fusewright.codegen.cpu.primitives`: element types, vector maths)
launches  calls of ``extern "C" void entry(...)``, one after another, arguments in the order pointers, numbers, and
          last ``int threads`` where the entry has a parallel loop (`fusewright.kernel.Argument`); its expression says
          how many scalar operations there are, so that little work stays in one thread
threads   ``#pragma omp parallel for num_threads(threads)`` over work that is cut by sizes alone: no result may depend
          on the number of threads, so sums are cut into parts by size and joined in a fixed order
loops     plain scalar C++ under ``#pragma omp simd`` that the compiler turns into vectors; functions from the pointwise
          table are free of branches for that, so they cost no calls.  Restrict-qualified pointers, unaligned elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from fusewright.codegen.cpu import contraction, ranges, sample, stream
from fusewright.codegen.cpu.estimate import pays as pays
from fusewright.codegen.product import of_tensors
from fusewright.codegen.reference import reference_text
from fusewright.ir.node import Node
from fusewright.kernel import Kernel
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.group import Group
from fusewright.schedule.kept_rows_record import KeptRows
from fusewright.schedule.matmul import Linear
from fusewright.schedule.normalization import ChannelStatistics, Normalization
from fusewright.schedule.product import Product
from fusewright.schedule.range_sums import RangeReduction, in_one_pass
from fusewright.schedule.rearrangement import Rearrangement
from fusewright.schedule.scan import Scan
from fusewright.schedule.several_folds import SeveralFolds
from fusewright.schedule.stream_record import Stream
from fusewright.schedule.window_ends import of_windows

# Whether the kernel of a contraction forms the window sums that it reads, at the pace of memory.
FORMS_WINDOW_SUMS = True

# Whether there are kernels of rearrangements, and of several results.
MOVES_ELEMENTS = False

Option = dict[str, Any]
Layouts = Mapping[Node, str]


def options(
    group: Group, hints: Mapping[Any, int], layouts: Layouts, *, tf32: bool = False, capability: int | None = None
) -> list[Option]:
    """Ways to cut the group, best estimate first; one empty option where there is nothing to choose, none at all
    where the family finds no way.  `layouts` has the operands that do not come contiguous (see `Kernel.layouts`);
    `tf32` and `capability` mean nothing on a CPU."""
    if isinstance(group.record, Contraction):
        return contraction.options(of_windows(group.record), hints, layouts)
    if isinstance(group.record, Product):
        c = group.record.contraction
        return contraction.options(c, hints, {c.x: c.layout})
    if isinstance(group.record, Linear):
        return []
    if isinstance(group.record, RangeReduction):
        return [] if group.record.stored is not None or in_one_pass(group.record) else [{}]
    record = group.record
    if isinstance(record, ChannelStatistics | Normalization | KeptRows | Rearrangement | Scan | SeveralFolds):
        return []  # a sample's statistics are left to sample programs, others to streams and ATen
    return [] if isinstance(group.record, Stream) and not stream.fits(group.record) else [{}]


def early(
    group: Group, hints: Mapping[Any, int], layouts: Layouts, *, tf32: bool = False, capability: int | None = None
) -> float:
    """How much longer it takes to end before the group's pool or softmax: a strip has whole rows when it pools, and
    computes no position twice, so nothing is gained by that."""
    return inf


def generate(group: Group, name: str, option: Option, *, tf32: bool) -> Kernel:
    """The kernel of `group`, called `name`; there is no tf32 on a CPU, so nothing is rounded to it."""
    reference = reference_text(group)
    if isinstance(group.record, Contraction):
        return contraction.generate(of_windows(group.record), option, name, reference)
    if isinstance(group.record, Product):
        return of_tensors(contraction.generate(group.record.contraction, option, name, reference), group.record)
    match group.family:
        case "range reduction":
            return ranges.kernel(group.record, name, reference)
        case "sample program":
            return sample.kernel(group.record, name, reference)
    return stream.kernel(group.record, name, reference)
