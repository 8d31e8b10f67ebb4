"""Dimensions of length 1, and operations that leave everything as it is."""

from __future__ import annotations

from fusewright.ir.build import cast, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Cast, Expand, Full, Permute, Pool, Reduce, Reshape, Slice, Softmax
from fusewright.rules.rule import Exactness, Match, Rule, op, rule, value


def _single(m: Match) -> bool:
    op = m["root"].op
    assert isinstance(op, Reduce)
    return bool(op.dims) and all(m["x"].shape[d] == 1 for d in op.dims)


# Reductions of which one value is its own result.
_KEEP = ("sum", "mean", "max", "min", "logsumexp", "prod")


def _refuse_several(m: Match) -> str | None:
    return None if _single(m) else "a reduced dimension is not of length 1"


def _class_of_single(m: Match) -> Exactness:
    # sums start from 0.0, which makes 0.0 of -0.0; max and min only choose
    assert isinstance(m["root"].op, Reduce)
    return "exact" if m["root"].op.kind in ("max", "min") else "reassociates"


@rule(
    "sum_1(x) = x",
    pattern=op("root", Reduce, of=(value("x"),), where=lambda node: node.op.kind in _KEEP),  # type: ignore[attr-defined]
    condition=_refuse_several,
    exactness=_class_of_single,
)
def single_value(m: Match) -> Node:
    """sum over dimensions of length 1 -> x reshaped; likewise mean, prod, logsumexp, max, min.

    x (.., 1, ..); sums of integers promote.  Class exact for max and min, else reassociates: a sum turns -0.0 into 0.0.
    """
    root = m["root"]
    return cast(reshape(m["x"], root.shape), root.dtype)


def _refuse_variance(m: Match) -> str | None:
    op = m["root"].op
    assert isinstance(op, Reduce)
    if not _single(m):
        return "a reduced dimension is not of length 1"
    return None if op.correction < 1 else "an unbiased variance of one value is NaN"


@rule(
    "var_1(x) = 0",
    pattern=op("root", Reduce, of=(value("x"),), where=lambda node: node.op.kind == "var"),  # type: ignore[attr-defined]
    condition=_refuse_variance,
    exactness="finite",
)
def single_variance(m: Match) -> Node:
    """var over dimensions of length 1 -> zeros.  x (.., 1, ..); correction below 1.

    Class finite: NaN and Inf gave NaN.
    """
    root = m["root"]
    return make(Full(root.shape, 0.0, root.dtype, root.device))


def _refuse_softmax(m: Match) -> str | None:
    assert isinstance(m["root"].op, Softmax)
    return None if m["x"].shape[m["root"].op.dim] == 1 else "the dimension is longer than 1"


@rule(
    "softmax_1(x) = 1",
    pattern=op("root", Softmax, of=(value("x"),)),
    condition=_refuse_softmax,
    exactness="finite",
)
def single_softmax(m: Match) -> Node:
    """softmax along a dimension of length 1 -> ones, log_softmax -> zeros.  x (.., 1, ..).

    Class finite: NaN and Inf gave NaN.
    """
    root = m["root"]
    assert isinstance(root.op, Softmax)
    return make(Full(root.shape, 0.0 if root.op.log else 1.0, root.dtype, root.device))


def _refuse_pool(m: Match) -> str | None:
    op, x = m["root"].op, m["x"]
    assert isinstance(op, Pool)
    if m["root"].shape != x.shape:
        return "the length changes"
    n = len(op.kernel)
    if not all(_alone(op, i, x.shape[i - n]) for i in range(n)):
        return "a window holds more than its own value"
    weighted = op.kind == "avg" and (op.divisor or 1) != 1
    return "the average is weighted" if weighted else None


def _alone(op: Pool, i: int, length: object) -> bool:
    """Whether each window along pooled dimension `i` holds the value in its own place and no other."""
    if op.kernel[i] == 1:
        return op.stride[i] == 1 or length == 1
    # a dilated window may step over the one value there is
    return op.kind != "avg" and length == 1 and op.dilation[i] == 1


@rule("pool_1(x) = x", pattern=op("root", Pool, of=(value("x"),)), condition=_refuse_pool, exactness="exact")
def single_pool(m: Match) -> Node:
    """Pooling whose windows hold one value each -> x: kernel 1 and stride 1, or any max window along a length of 1.

    x (N, C, *).  Class exact.
    """
    return m["x"]


# Views


def _refuse_change(m: Match) -> str | None:
    root, x = m["root"], m["x"]
    if root.shape != x.shape or root.dtype != x.dtype:
        return "the shape or dtype changes"
    if isinstance(root.op, Permute) and root.op.dims != tuple(range(x.ndim)):
        return "the order of dimensions changes"
    if isinstance(root.op, Permute) and root.op.copy:
        return "the order in memory may change"
    return None


@rule(
    "view(x) = x",
    pattern=op("root", Reshape, Permute, Expand, Slice, Cast, of=(value("x"),)),
    condition=_refuse_change,
    exactness="exact",
)
def nothing(m: Match) -> Node:
    """reshape, permute, expand, slice or cast that changes nothing -> x, of any shape.  Class exact."""
    return m["x"]


_VIEWS = (Reshape, Permute, Expand)


def _refuse_views(m: Match) -> str | None:
    outer, inner = m["outer"].op, m["inner"].op
    if type(outer) is not type(inner):
        return "the two differ"
    lost = isinstance(outer, Permute) and isinstance(inner, Permute) and inner.copy and not outer.copy
    return "the order in memory would change" if lost else None


@rule(
    "reshape(reshape(x)) = reshape(x)",
    pattern=op("outer", *_VIEWS, of=(op("inner", *_VIEWS, of=(value("x"),)),)),
    condition=_refuse_views,
    exactness="exact",
)
def view_of_view(m: Match) -> Node:
    """reshape(reshape(x)) -> reshape(x), and so for permute and expand; x of any shape.  Class exact."""
    outer, inner, x = m["outer"].op, m["inner"].op, m["x"]
    if isinstance(outer, Permute):
        assert isinstance(inner, Permute)
        return make(Permute(tuple(inner.dims[d] for d in outer.dims), outer.copy), x)
    return make(outer, x)


RULES: tuple[Rule, ...] = (single_value, single_variance, single_softmax, single_pool, nothing, view_of_view)
