"""The least time that a model can take on a device: a floor to hold measurements against.

    floor    = max(bytes / bandwidth, FLOPs / rate)
    fraction = floor / measured time

bytes      inputs, outputs and parameters (or what the rewrites derive from them ahead of a call, where that is
           smaller), each moved once; nothing in between
bandwidth  measured: a copy of a large tensor, its bytes counted once for the read and once for the write
FLOPs      of convolutions and matrix products alone, two per multiply-add, padding counted as if it were data; of the
           model as written or after the algebra's rewrites, whichever is less; work on parameters alone is not counted
rate       measured: a large matrix product of the model's dtype, float32 on tensor cores (tf32) where the flags that
           convolutions are run under allow it

Beside it stands the least time that evaluating pointwise functions takes on a GPU (`functions.py`).  It has no part in
the fraction: it says what else may keep a kernel from its floor.

A read runs faster than a copy on some devices, so a kernel that only reads may come out slightly above 1; so may one
that need not look at all of its input (a stride larger than the kernel).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from functions import evaluations

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node
from fusewright.measure import compare
from fusewright.rules import RULES
from fusewright.rules.engine import Mode, rewrite
from fusewright.runtime.device import device_facts
from fusewright.schedule.cost import CostModel
from fusewright.tree import flat_tensors
from fusewright.verification.numerics import tf32_allowed

MODES: tuple[Mode, ...] = ("cost", "always")


@dataclass(frozen=True)
class Rates:
    """What a device reaches: bytes per second of a copy, FLOP/s of a matrix product."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Floor:
    """The least time of one model, which of the two bounds it is, and the rates it was taken from; `functions`: the
    least time for pointwise functions, in seconds, on a GPU."""

    bytes: int
    flops: float
    seconds: float
    bound: str
    rates: Rates
    functions: float | None = None

    def record(self, seconds: float | None) -> dict[str, Any]:
        """The floor as data, with the fraction of it that a time of `seconds` reaches."""
        return {**asdict(self), "fraction": None if seconds is None else self.seconds / seconds}


@cache
def rates(device: torch.device, dtype: torch.dtype, tf32: bool) -> Rates:
    """Measured once a process, in about a quarter of a second."""
    on_gpu = device.type == "cuda"
    length, side = (1 << 28, 8192) if on_gpu else (1 << 24, 1024)
    source = torch.empty(length, dtype=torch.float32, device=device).fill_(1.0)
    target = torch.empty_like(source)
    a = torch.rand(side, side, device=device).to(dtype)
    calls = {"copy": lambda: target.copy_(source), "matmul": lambda: a @ a}
    with torch.no_grad(), _matmul_flags(tf32):
        found = compare(calls, device=device, min_time=0.05, rounds=11, max_time=2.0, cold=False)
    # The lower quartile: what a device reaches, not what else it was doing.
    return Rates(8 * length / found["copy"].low, 2 * side**3 / found["matmul"].low)


@contextmanager
def _matmul_flags(tf32: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def floor(written: Graph, inputs: Any, outputs: Any) -> Floor:
    """The floor of a call of the model that was captured as `written`."""
    given, made = flat_tensors((inputs,), {}), flat_tensors((outputs,), {})
    hints = {symbol: given[at.input].shape[at.dim] for symbol, at in written.symbols.items()}
    device = given[0].device
    cost = CostModel(device_facts(device), hints, derived_ahead=True, fusing=device.type == "cuda")
    # What pays in time may not be what has the fewest FLOPs.
    graphs = written, *(rewrite(written, RULES, cost, mode=mode).graph for mode in MODES)
    size = sum(t.numel() * t.element_size() for t in (*given, *made)) + min(weights(graph) for graph in graphs)
    flops = min(sum(cost(node).flops for node in contractions(graph)) for graph in graphs)
    dtype = next((t.dtype for t in given if t.is_floating_point()), torch.float32)
    reached = rates(device, dtype, tf32_allowed("eager")[0])
    by_memory, by_arithmetic = size / reached.bandwidth, flops / reached.flops
    bound = "memory" if by_memory >= by_arithmetic else "arithmetic"
    functions = None
    if device.type == "cuda":
        functions = min(evaluations(graph, hints).seconds(device) for graph in graphs)
    return Floor(size, flops, max(by_memory, by_arithmetic), bound, reached, functions)


def contractions(graph: Graph) -> list[Node]:
    """The convolutions and matrix products that depend on an input."""
    computed = _computed(graph)
    return [n for n in graph.nodes() if n in computed and isinstance(n.op, ops.Conv | ops.Matmul)]


def weights(graph: Graph) -> int:
    """Bytes of all that a call reads beside its inputs."""
    computed = _computed(graph)
    read = {_repeated(a) for n in computed for a in n.inputs if a not in computed}
    return sum(prod(map(int, n.shape)) * n.dtype.itemsize for n in read if not isinstance(n.op, ops.Number | ops.Full))


def _repeated(node: Node) -> Node:
    """What an expanded value repeats."""
    while isinstance(node.op, ops.Expand):
        node = node.inputs[0]
    return node


def _computed(graph: Graph) -> set[Node]:
    """The inputs and what is computed from them."""
    computed: set[Node] = set()
    for node in graph.nodes():
        if isinstance(node.op, ops.Input) or any(a in computed for a in node.inputs):
            computed.add(node)
    return computed
