"""PyTorch's own samples for every operation that the graph understands, as models of one operation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from fusewright.capture import capture
from fusewright.errors import CaptureError
from fusewright.ir.ops import Opaque
from fusewright.tree import tree_flatten, tree_unflatten
from tests.capture.harness import assert_equal, copied

try:
    from torch.testing._internal.common_methods_invocations import op_db
except Exception as error:  # a private module with dependencies of its own
    pytest.skip(f"PyTorch's operation samples are not importable: {error}", allow_module_level=True)

NAMES = frozenset(
    (
        *("nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d"),
        *("nn.functional.conv_transpose1d", "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d"),
        *("nn.functional.linear", "matmul", "__rmatmul__", "mm", "bmm", "addmm"),
        *("baddbmm", "mv", "dot", "kron", "tile", "repeat", "triu", "tril", "diag"),
        *("nn.functional.max_pool1d", "nn.functional.max_pool2d", "nn.functional.max_pool3d"),
        *("nn.functional.avg_pool1d", "nn.functional.avg_pool2d", "nn.functional.avg_pool3d"),
        *(f"nn.functional.adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)),
        *("mean", "sum", "amax", "amin", "logsumexp", "var", "var_unbiased", "prod", "softmax", "log_softmax"),
        *("nn.functional.batch_norm", "nn.functional.instance_norm", "nn.functional.group_norm"),
        *("nn.functional.layer_norm", "nn.functional.rms_norm", "nn.functional.dropout"),
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel"),
        *("permute", "transpose", "t", "mT", "movedim", "swapaxes", "expand", "expand_as", "broadcast_to"),
        *("select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack", "__getitem__"),
        *("nn.functional.unfold", "nn.functional.fold", "unfold"),
        *("nn.functional.pad", "constant_pad_nd", "double", "type_as", "to"),
        *("add", "sub", "mul", "div", "rsub", "neg", "pow", "maximum", "minimum", "where", "masked_fill", "__rsub__"),
        *(
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "logical_and",
            "logical_or",
            "logical_not",
            "clamp",
            "__rdiv__",
            "__radd__",
        ),
        *("nn.functional.relu", "nn.functional.relu6", "nn.functional.leaky_relu", "nn.functional.elu"),
        *("nn.functional.celu", "nn.functional.selu", "nn.functional.gelu", "nn.functional.silu", "nn.functional.mish"),
        *("nn.functional.hardswish", "nn.functional.hardsigmoid", "nn.functional.hardtanh", "nn.functional.softplus"),
        *(
            "nn.functional.threshold",
            "nn.functional.hardshrink",
            "nn.functional.softshrink",
            "nn.functional.logsigmoid",
        ),
        *("sigmoid", "tanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"),
        *("square", "abs", "sign", "floor", "ceil", "round", "trunc", "erf", "atan", "sin", "cos"),
        *("tan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "sinc", "logit", "special.entr"),
        *("fmax", "fmin", "clip", "clamp_min", "clamp_max", "atan2", "hypot", "copysign", "fmod", "remainder"),
        *("floor_divide", "logaddexp", "heaviside", "lerp", "frac", "nan_to_num", "deg2rad", "rad2deg", "xlogy"),
        *("isnan", "isinf", "isfinite", "isposinf", "isneginf", "logical_xor", "__rpow__"),
        *("__rmod__", "any", "all", "aminmax", "count_nonzero", "dist", "linalg.vector_norm"),
        *(f"nn.functional.{name}" for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits", "rrelu")),
        *(f"nn.functional.{name}" for name in ("soft_margin_loss", "hinge_embedding_loss", "cosine_embedding_loss")),
        *("cross", "linalg.cross"),
        *("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"),
    )
)
OPS = sorted({op.name: op for op in op_db if op.name in NAMES and not op.variant_test_name}.items())
# PyTorch's entry seeds the generator at each call, which is no part of the operation.
UNSEEDED = {
    "nn.functional.dropout": torch.nn.functional.dropout,
    "nn.functional.rrelu": torch.nn.functional.rrelu,
}
# Values or gradients that the parts of a call come to by other roundings, or sums in another order.
ROUNDINGS = {
    **dict.fromkeys(("dist", "linalg.vector_norm", "masked_fill"), 64),
    **dict.fromkeys(("addmm", "baddbmm", "mv", "dot"), 16),
    **{f"nn.functional.{name}": 64 for name in ("binary_cross_entropy_with_logits", "soft_margin_loss")},
    "nn.functional.binary_cross_entropy": 1,
}
# The rest of an operation's samples runs with the slow tests.
SPREAD = 2


class One(nn.Module):
    """One call; its literal arguments are part of the model."""

    def __init__(self, call: Any, structure: Any, literals: list[Any]) -> None:
        super().__init__()
        self.call, self.structure, self.literals = call, structure, literals

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        flat = [next(given) if v is Ellipsis else v for v in self.literals]
        args, kwargs = tree_unflatten(flat, self.structure)
        result = self.call(*args, **kwargs)
        return list(result) if isinstance(result, tuple | list) else result


def samples(op: Any, dtype: torch.dtype) -> Iterator[tuple[One, tuple[torch.Tensor, ...]]]:
    grad = bool(op.supports_autograd)
    for sample in op.sample_inputs("cpu", dtype, requires_grad=grad):
        flat, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = tuple(t for t in flat if isinstance(t, torch.Tensor))
        literals = [... if isinstance(t, torch.Tensor) else t for t in flat]
        if Ellipsis in [v for v in flat if not isinstance(v, torch.Tensor)]:
            continue
        yield One(UNSEEDED.get(op.name, op.op), spec, literals), copied(tensors)


def runs(model: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether eager itself accepts the sample."""
    try:
        torch.manual_seed(7)
        model(*args)
    except Exception:
        return False
    return True


def compare(op: Any, dtype: torch.dtype, limit: int | None) -> tuple[int, int]:
    """How many samples were compared, and how many of them hold no opaque operation."""
    count = understood = 0
    for model, args in islice(samples(op, dtype), limit):
        if not runs(model, args):
            continue
        try:
            captured = capture(model, args)
        except CaptureError as refused:
            assert str(refused).endswith("."), refused
            continue
        assert_equal(model, captured, args, roundings=ROUNDINGS.get(op.name, 0))
        count += 1
        understood += not any(isinstance(n.op, Opaque) for n in captured.graph.nodes())
    return count, understood


@pytest.mark.parametrize(("name", "op"), OPS, ids=[name for name, _ in OPS])
def test_a_spread_of_samples(name: str, op: Any) -> None:
    compare(op, torch.float32, SPREAD)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("name", "op"), OPS, ids=[name for name, _ in OPS])
def test_every_sample(name: str, op: Any, dtype: torch.dtype, record_property: Any) -> None:
    count, understood = compare(op, dtype, None)
    record_property("compared", count)
    record_property("understood", understood)
    assert count > 0


def test_the_samples_cover_what_the_graph_understands() -> None:
    found = {name for name, _ in OPS}
    assert len(found) > 160 and len(NAMES - found) < 12, sorted(NAMES - found)
