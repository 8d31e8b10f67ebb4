"""Kernels of what a model holds in another shape than they see it in, which is the same memory."""

from __future__ import annotations

from dataclasses import replace

from fusewright.kernel import Kernel
from fusewright.schedule.group import Group
from fusewright.schedule.held import dims_of


def of_held(kernel: Kernel, group: Group) -> Kernel:
    """The kernel of what `group` has `seen`, for its operands."""
    pairs = list(zip(group.seen, group.operands, strict=True)) if group.seen else []
    moved = {i: dims_of(view, held) for i, (view, held) in enumerate(pairs) if view is not held}
    if not moved:
        return kernel
    shapes = (tuple(map(str, group.operands[i].shape)) if i in moved else s for i, s in enumerate(kernel.shapes))
    sizes = ((name, i, moved[i][d] if i in moved else d) for name, i, d in kernel.sizes)
    brief = None if kernel.brief is None else of_held(kernel.brief, group)
    return replace(kernel, shapes=tuple(shapes), sizes=tuple(sizes), brief=brief)
