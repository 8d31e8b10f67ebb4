"""The least time that evaluating a model's pointwise functions takes on a GPU: a ceiling beside those of `roofline.py`.

    seconds = max(special results / (16 * clock * multiprocessors), evaluations / (cores * clock * multiprocessors))

special results  what the special function units give: 2**x, log2(x), 1/x, 1/sqrt(x), sin(x), cos(x); each function of
                 the table takes as many as `SPECIAL` says when it is computed to float32's accuracy
evaluations      of any function at one element, each one instruction at least
clock            the highest that the driver names

Counted are the pointwise nodes that depend on an input, at as many elements as they have, besides the exponentials of
softmax and logsumexp; of the model as written or after the algebra's rewrites, whichever is less.  Loading, addressing,
rounding and converting to tensor cores' formats are not counted, though they are instructions too, so real kernels stay
away from it.  A kernel that computes some exponentials by polynomials on its cores could come below, by half at best.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node
from fusewright.schedule.group import sizes

# Results per clock and multiprocessor, the same on every architecture from sm_70 on.
SPECIAL_UNITS = 16
_CLOCK_RATE = 13  # CUdevice_attribute, in kHz

# Special results per evaluation.
SPECIAL = {
    **dict.fromkeys(
        ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "xlogy", "sqrt", "rsqrt", "reciprocal"), 1
    ),
    **dict.fromkeys(("sin", "cos", "atan", "erf", "softsign", "elu", "celu", "selu", "asin", "acos", "entr"), 1),
    **dict.fromkeys(("erfc", "hypot", "fmod", "remainder", "floor_divide", "trunc_divide"), 1),
    **dict.fromkeys(("sigmoid", "silu", "tanh", "tanhshrink", "mish", "log_sigmoid", "softplus", "tan", "sinc"), 2),
    **dict.fromkeys(
        ("sinh", "cosh", "asinh", "acosh", "atanh", "logit", "logaddexp", "power", "atan2", "binary_cross_entropy"), 2
    ),
}


@dataclass(frozen=True)
class Evaluations:
    """How often functions are evaluated, and the special results that takes."""

    all: float
    special: float

    def seconds(self, device: torch.device) -> float:
        """On `device`, a GPU."""
        properties = torch.cuda.get_device_properties(device)
        cycles = max(self.special / SPECIAL_UNITS, self.all / _cores(properties.major, properties.minor))
        return cycles / (properties.multi_processor_count * _clock(device))


def evaluations(graph: Graph, hints: Mapping[Any, int]) -> Evaluations:
    """Those of `graph` that depend on an input."""
    computed = {node for node in graph.nodes() if node.varies}
    counts = [(_evaluated(n, hints), _special(n, computed)) for n in computed]
    return Evaluations(float(sum(n for n, _ in counts)), float(sum(n * special for n, special in counts)))


def _evaluated(node: Node, hints: Mapping[Any, int]) -> int:
    """Elements at which a node evaluates a function."""
    if isinstance(node.op, ops.Reduce) and node.op.kind == "logsumexp":
        return prod(sizes(node.arg(0), hints))
    return prod(sizes(node, hints)) if isinstance(node.op, ops.Pointwise | ops.Softmax) else 0


def _special(node: Node, computed: set[Node]) -> int:
    """Special results for one element."""
    if not isinstance(node.op, ops.Pointwise):
        return 1
    name, params = node.op.fn, node.op.params
    if name == "div":  # by what is known ahead: a product with the reciprocal
        return int(node.inputs[1] in computed)
    if name == "gelu":
        return 1 if params == ("none",) else 2
    if name == "pow":
        return _power(params[0])
    return SPECIAL.get(name, 0)


def _power(exponent: Any) -> int:
    if exponent == int(exponent):  # products
        return int(exponent < 0)
    return 1 if 2 * exponent == int(2 * exponent) else 2


def _cores(major: int, minor: int) -> int:
    """Float32 results per clock of one multiprocessor."""
    return 64 if major == 7 or (major, minor) == (8, 0) else 128


def _clock(device: torch.device) -> float:
    """Cycles per second."""
    cuda, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    index = device.index if device.index is not None else torch.cuda.current_device()
    status = cuda.cuDeviceGetAttribute(ctypes.byref(value), _CLOCK_RATE, index)
    if status:
        raise RuntimeError(f"the CUDA driver does not tell the clock rate of {device} (error {status})")
    return 1e3 * value.value
