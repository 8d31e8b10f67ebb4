"""What whole graphs cost where kernels are generated for a GPU.

Single steps of rules are judged by the ATen program (`fusewright.schedule.cost`): they change little else.  Graphs that
were rewritten in different orders differ by more.  A pool that has moved into its convolution's kernel leaves few large
windows, which keep few multiprocessors busy; the range sums of the other graph, a launch per slot in ATen, are one
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.plan import Work
from fusewright.schedule.cost import CostModel
from fusewright.schedule.window_products import seconds_of_few


def by_kernels(cost: CostModel) -> Callable[[Node], Work]:
    """The work of a node by `cost`, its launches and seconds those of kernels."""

    def work(node: Node) -> Work:
        found = cost(node)
        match node.op:
            case ops.RangeSum() if found.launches > 1:
                spared = (found.launches - 1) * cost.facts.launch
                return replace(found, launches=1.0, seconds=found.seconds - spared)
            case ops.Conv(transposed=False, groups=1) if found.seconds > 0:
                return replace(found, seconds=max(found.seconds, seconds_of_few(node, cost)))
        return found

    return work
