"""Reductions, and functions, past views below them, so that they meet the operation whose elements a view only moved.

A reduction does not ask in which order its operand's dimensions lie, nor how the reduced ones are split; a function of
each element asks for neither:

    mean(permute(x)) = permute(mean(x))        mean_-1(flatten_2(x)) = mean_{2,3}(x)
    f(reshape(softmax(x))) = reshape(f(softmax(x)))
    f(permute(x @ w)) = permute(f(x @ w))
    f(expand(x), y) = f(x, y)                  reduce(expand(x)) = expand(reduce(x))

None is cheaper by itself.  All are taken for what may follow, and only above an operation that something may be done
about.  They end, since views only ever move outwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

import sympy

from fusewright.ir.build import before_permute, permute, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import (
    Conv,
    Expand,
    Matmul,
    Norm,
    Number,
    Permute,
    Pointwise,
    Pool,
    RangeSum,
    Reduce,
    Reshape,
    Size,
    Softmax,
    size,
)
from fusewright.rules.rule import Exactness, Match, Rule, op, rule, value

_VIEWS = (Reshape, Permute)
# What other rules or one kernel may do together with a reduction.
_PARTNERS = (Conv, Matmul, Pool, Pointwise, RangeSum, Reduce)


def _moves(reduction: Node) -> bool:
    """Whether something may come of `reduction` moving down: no algebra takes a variance further."""
    return isinstance(reduction.op, Reduce) and reduction.op.kind not in ("var", "std")


def _class(m: Match) -> Exactness:
    # the order in which values are added is the order in which they lie
    assert isinstance(m["reduction"].op, Reduce)
    return "exact" if m["reduction"].op.kind in ("max", "min", "argmax", "argmin") else "reassociates"


def _refuse_below(x: Node) -> str | None:
    while isinstance(x.op, _VIEWS):
        x = x.arg(0)
    return None if isinstance(x.op, _PARTNERS) else "no operation that goes with a reduction lies below"


def _refuse_count(m: Match, dims: tuple[int, ...]) -> str | None:
    """Why elements along these dimensions of x would be counted in another order, where one of several is meant."""
    op = m["reduction"].op
    assert isinstance(op, Reduce)
    apart = any(b != a + 1 for a, b in pairwise(dims))
    return "the first is counted through neighbours" if (op.gives_index or op.first) and apart else None


def _ends(shape: Sequence[Size]) -> list[tuple[int, Size]]:
    """Each dimension longer than 1 with the number of elements in it and those before it: where it ends."""
    lengths = [(d, length) for d, length in enumerate(shape) if length != 1]
    products = accumulate((length for _, length in lengths), lambda a, b: size(sympy.expand(a * b)))
    return [(d, end) for (d, _), end in zip(lengths, products, strict=True)]


def _before(m: Match) -> tuple[int, ...] | None:
    """The dimensions of x with the elements of the reduced dimensions, or `None` where one is reduced in part."""
    op, inner, outer = m["reduction"].op, _ends(m["x"].shape), _ends(m["view"].shape)
    assert isinstance(op, Reduce)
    reduced = op.dims
    places = {1: 0} | {end: i for i, (_, end) in enumerate(inner, 1)}
    dims: list[int] = []
    start: Size = 1
    for inside, run in groupby(outer, lambda end: end[0] in reduced):  # neighbours may share a dimension of x
        end = list(run)[-1][1]
        if inside:
            if start not in places or end not in places:
                return None
            dims += [d for d, _ in inner[places[start] : places[end]]]
        start = end
    return tuple(dims)


def _refuse_reshape(m: Match) -> str | None:
    if 0 in m["x"].shape:
        return "a dimension is empty"
    dims = _before(m)
    if dims is None:
        return "a reduced dimension holds part of one that is kept"
    return _refuse_count(m, dims) or _refuse_below(m["x"]) if dims else "no dimension longer than 1 is reduced"


@rule(
    "mean(reshape(x)) = reshape(mean(x))",
    pattern=op("reduction", Reduce, of=(op("view", Reshape, of=(value("x"),)),), where=_moves),
    condition=_refuse_reshape,
    exactness=_class,
    enables=True,
)
def reduction_of_reshape(m: Match) -> Node:
    """mean over D of reshape(x) -> mean over the dimensions of x with D's elements, reshaped; likewise for every kind.

    x (N, C, H, W) seen as (N, C, H*W) over -1 becomes x over (2, 3).  Neighbouring reduced dimensions hold whole
    dimensions of x.
    Class exact for max, min and their indices, else reassociates.
    """
    root, dims = m["reduction"], _before(m)
    assert isinstance(root.op, Reduce) and dims is not None
    return reshape(make(replace(root.op, dims=dims, keepdim=False), m["x"]), root.shape)


def _refuse_permute(m: Match) -> str | None:
    root, view = m["reduction"].op, m["view"].op
    assert isinstance(root, Reduce) and isinstance(view, Permute)
    return _refuse_count(m, tuple(view.dims[d] for d in root.dims)) or _refuse_below(m["x"])


@rule(
    "mean(permute(x)) = permute(mean(x))",
    pattern=op("reduction", Reduce, of=(op("view", Permute, of=(value("x"),)),), where=_moves),
    condition=_refuse_permute,
    exactness=_class,
    enables=True,
)
def reduction_of_permute(m: Match) -> Node:
    """mean over D of permute(x) -> permute(mean over the dimensions of x that D names); likewise for every kind.

    x (N, C, H, W) seen as (N, H, W, C) over (1, 2) becomes x over (2, 3).  What is left is copied into row-major
    memory, as a reduction's result lies.  Class exact for max, min and their indices, else reassociates.
    """
    root, view = m["reduction"], m["view"].op
    assert isinstance(root.op, Reduce) and isinstance(view, Permute)
    dims = tuple(sorted(view.dims[d] for d in root.op.dims))
    left = [d for d in view.dims if d not in dims]
    order = [sorted(left).index(d) for d in left]
    reduced = make(replace(root.op, dims=dims, keepdim=False), m["x"])
    return reshape(permute(reduced, order, copy=True), root.shape)


def _refuse_pool(m: Match) -> str | None:
    x, view, pool = m["x"], m["view"], m["pool"].op
    assert isinstance(pool, Pool)
    n = len(pool.kernel)
    if x.shape[-n:] != view.shape[-n:]:
        return "windows run over dimensions that are seen otherwise"
    if x.ndim - n not in (1, 2):
        return "PyTorch pools below one or two dimensions"
    return None if make(pool, x).shape == m["root"].shape else "the result is seen otherwise"


def _class_of_pool(m: Match) -> Exactness:
    return "reassociates" if m["pool"].op.kind == "avg" else "exact"  # type: ignore[attr-defined]


@rule(
    "reshape(pool(reshape(x))) = pool(x)",
    pattern=op("root", Reshape, of=(op("pool", Pool, of=(op("view", Reshape, of=(value("x"),)),)),)),
    condition=_refuse_pool,
    exactness=_class_of_pool,
    enables=True,
)
def pool_between_reshapes(m: Match) -> Node:
    """reshape(pool(reshape(x))) -> pool(x), where the pooled dimensions stay as they are and the others come back.

    x (N, C, *L) seen as (N, 1, C, *L) and pooled over (C, *L), as a local response norm has it.
    Class exact for max and min, else reassociates.
    """
    return make(m["pool"].op, m["x"])


def _viewed(root: Node) -> int | None:
    """Which operand of a function is a view of all that a norm, a softmax or a convolution as a product gives, or a
    function of that; or `None`."""
    for i, a in enumerate(root.args):
        if a is not None and isinstance(a.op, Reshape) and a.shape == root.shape and _is_normalised(a.arg(0)):
            return i
    return None


def _is_normalised(x: Node) -> bool:
    while isinstance(x.op, Pointwise):
        alike = [a for a in x.inputs if a.shape == x.shape]
        if not alike:
            return False
        x = alike[0]
    return isinstance(x.op, Norm | Softmax) or (isinstance(x.op, Matmul) and x.op.convolves)


def _along(m: Node, outer: tuple[Size, ...], inner: tuple[Size, ...]) -> Node | None:
    """m, which goes with a value of shape `outer`, as it goes with the same elements under shape `inner`; `None` where
    it varies along part of what is one dimension there."""
    if isinstance(m.op, Number) or m.ndim == 0:  # whose type counts less beside a tensor with dimensions
        return m
    lengths = (1,) * (len(outer) - m.ndim) + m.shape
    before, after = _ends(outer), _ends(inner)
    shared = {end for _, end in before} & {end for _, end in after}
    shape: list[Size] = [1] * len(inner)
    while before:
        at = next((i for i, (_, end) in enumerate(before) if end in shared), None)
        to = next((i for i, (_, end) in enumerate(after) if end in shared), None)
        if at is None or to is None:
            return None
        own = [lengths[d] for d, _ in before[: at + 1]]
        if own == [outer[d] for d, _ in before[: at + 1]]:
            for d, _ in after[: to + 1]:
                shape[d] = inner[d]
        elif any(n != 1 for n in own):
            return None
        before, after = before[at + 1 :], after[to + 1 :]
    while len(shape) > 1 and shape[0] == 1 and len(shape) > m.ndim:
        del shape[0]
    return reshape(m, shape)


def _is_seen_otherwise(a: Node, shape: tuple[Size, ...]) -> bool:
    """Whether an operand is what a norm gives, perhaps under another shape than its own, and that is not `shape`: it
    would take turns in being the view with the one that the function is moved to, which has `shape`."""
    while isinstance(a.op, Reshape):
        a = a.arg(0)
    return _is_normalised(a) and a.shape != shape


def _below(root: Node) -> tuple[int, Node]:
    """Which operand is a view, and of what."""
    at = _viewed(root)
    assert at is not None  # the pattern asks for it
    return at, root.arg(at).arg(0)


def _operands(root: Node) -> list[Node] | None:
    at, x = _below(root)
    found: list[Node] = []
    for i, a in enumerate(root.inputs):
        moved = x if i == at else _along(a, root.shape, x.shape)
        if moved is None:
            return None
        found.append(moved)
    return found


def _refuse_function(m: Match) -> str | None:
    root = m["root"]
    if 0 in root.shape:
        return "a dimension is empty"
    if any(_is_seen_otherwise(a, _below(root)[1].shape) for a in root.inputs):
        return "another operand would be a view then"
    operands = _operands(root)
    if operands is None:
        return "another operand varies along part of a dimension"
    if make(root.op, *operands).dtype != root.dtype:
        return "none has dimensions there, and types count otherwise"
    return None


@rule(
    "f(reshape(norm(x))) = reshape(f(norm(x)))",
    pattern=op("root", Pointwise, where=lambda root: _viewed(root) is not None),
    condition=_refuse_function,
    exactness="exact",
    enables=True,
)
def function_of_reshape(m: Match) -> Node:
    """f(reshape(y), m) -> reshape(f(y, m)), where y is a norm, a softmax, a convolution as a product of all windows of
    each sample, or a function of one.

    y (N, C, H*W) seen as (N, C, H, W), m (C, 1, 1) beside it: (C, 1).  The kernel that normalises carries f out, too.
    Class exact.
    """
    root = m["root"]
    operands = _operands(root)
    assert operands is not None
    return reshape(make(root.op, *operands), root.shape)


def _turn(root: Node) -> Permute | None:
    """How a product, or a function of one, is turned that is an operand of a function."""
    for a in root.inputs:
        x = a.arg(0) if isinstance(a.op, Permute) and a.shape == root.shape else None
        while x is not None and isinstance(x.op, Pointwise):
            x = next((b for b in x.inputs if b.shape == x.shape), None)
        if x is not None and isinstance(x.op, Matmul):
            assert isinstance(a.op, Permute)
            return a.op
    return None


def _refuse_turned(m: Match) -> str | None:
    root, turn = m["root"], _turn(m["root"])
    assert turn is not None  # the pattern asks for it
    longer = [d for d in turn.dims if root.shape[turn.dims.index(d)] != 1]
    if turn.copy or not longer or longer[-1] == max(longer):
        return "rows stay whole, or are copied"
    if any(a.shape == root.shape and a.op != turn for a in root.inputs):
        return "another operand is not turned so"
    return None


@rule(
    "f(permute(x @ w), y) = permute(f(x @ w, y))",
    pattern=op("root", Pointwise, where=lambda root: _turn(root) is not None),
    condition=_refuse_turned,
    exactness="exact",
    enables=True,
)
def function_of_permute(m: Match) -> Node:
    """f(permute(y), m) -> permute(f(y, m)), where y is a product or a function of one, all other operands are turned
    alike or smaller, and the permutation moves y's last dimension: a kernel that computes f would want a copy of it.

    y (N, L, M) seen as (N, M, L), m (N, 1, L) beside it: (N, L, 1).  Results lie in memory as they did.  Class exact.
    """
    root, turn = m["root"], _turn(m["root"])
    assert turn is not None
    args = (a.arg(0) if a.shape == root.shape else before_permute(a, turn.dims) for a in root.inputs)
    return permute(make(root.op, *args, where=root.where), turn.dims)


def _is_of_expanded(root: Node) -> bool:
    return any(isinstance(a.op, Expand) for a in root.inputs)


def _beside_others(root: Node) -> Node:
    """The same function of what its operands are expanded from, wherever others have its shape and type."""
    found = root
    for i, a in enumerate(root.inputs):
        if isinstance(a.op, Expand):
            other = make(root.op, *found.args[:i], a.arg(0), *found.args[i + 1 :])
            found = other if other.type == root.type else found
    return found


def _refuse_beside_others(m: Match) -> str | None:
    changed = _beside_others(m["root"]) is not m["root"]
    return None if changed else "no other operand has the shape and type"


@rule(
    "f(expand(x), y) = f(x, y)",
    pattern=op("root", Pointwise, where=_is_of_expanded),
    condition=_refuse_beside_others,
    exactness="exact",
    enables=True,
)
def function_of_expanded(m: Match) -> Node:
    """f(expand(x), y) -> f(x, y), where y has the shape: operands are broadcast as it is.

    x (N, 1), y (N, C).  Class exact.
    """
    return _beside_others(m["root"])


def _as_they_are(root: Node) -> Node:
    """The same function of what its operands are expanded from."""
    args = (a.arg(0) if isinstance(a.op, Expand) else a for a in root.inputs)
    return make(root.op, *args)


def _refuse_as_they_are(m: Match) -> str | None:
    found, root = _as_they_are(m["root"]), m["root"]
    if found.shape == root.shape:
        return "another operand has the shape"
    return None if found.dtype == root.dtype else "an operand has no dimensions, and its type counts less then"


@rule(
    "f(expand(x)) = expand(f(x))",
    pattern=op("root", Pointwise, where=_is_of_expanded),
    condition=_refuse_as_they_are,
    exactness="exact",
    enables=True,
    repeats=True,
)
def function_of_expansion(m: Match) -> Node:
    """f(expand(x)) -> expand(f(x)), of several operands if none has the shape.

    x (C), expanded to (N, C).  Class exact.
    """
    return make(Expand(m["root"].shape), _as_they_are(m["root"]))


def _reduced_dims(root: Node) -> tuple[int, ...]:
    """The dimensions along which a reduction or a softmax joins elements."""
    return root.op.dims if isinstance(root.op, Reduce) else (root.op.dim,)  # type: ignore[attr-defined]


def _own_dims(m: Match) -> tuple[int, ...] | None:
    """These dimensions of what is expanded; `None` where it is along one of them."""
    view = m["root"].arg(0)
    x = view.arg(0)
    more = view.ndim - x.ndim
    dims = _reduced_dims(m["root"])
    return None if any(d < more or x.shape[d - more] != view.shape[d] for d in dims) else tuple(d - more for d in dims)


def _refuse_joined(m: Match) -> str | None:
    return "elements are joined that the expansion repeats" if _own_dims(m) is None else None


def _class_of_joined(m: Match) -> Exactness:
    return "exact" if isinstance(m["root"].op, Reduce) else "reassociates"


@rule(
    "reduce(expand(x)) = expand(reduce(x))",
    pattern=op("root", Reduce, Softmax, where=lambda root: isinstance(root.arg(0).op, Expand)),
    condition=_refuse_joined,
    exactness=_class_of_joined,
    enables=True,
    repeats=True,
)
def reduction_of_expansion(m: Match) -> Node:
    """reduce(expand(x)) -> expand(reduce(x)), over dimensions along which x is not expanded; likewise a softmax.

    x (C), expanded to (N, C), over C: one number, expanded to (N).  Class exact; reassociates for a softmax: a CPU has
    exponentials in vectors but for the last ones, which are others where there are fewer rows.
    """
    root, dims = m["root"], _own_dims(m)
    x = root.arg(0).arg(0)
    assert dims is not None
    if isinstance(root.op, Reduce):
        return make(Expand(root.shape), make(replace(root.op, dims=dims), x))
    assert isinstance(root.op, Softmax)
    return make(Expand(root.shape), make(replace(root.op, dim=dims[0]), x))


RULES: tuple[Rule, ...] = (
    reduction_of_reshape,
    reduction_of_permute,
    pool_between_reshapes,
    function_of_reshape,
    function_of_permute,
    function_of_expanded,
    function_of_expansion,
    reduction_of_expansion,
)
