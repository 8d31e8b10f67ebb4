"""What sums, means, average pools and range sums have in common: they are linear, dimension by dimension."""

from __future__ import annotations

from fusewright.ir.build import pointwise, range_sum, reshape
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Pool, RangeSum, Reduce, Slot, Vector
from fusewright.ir.slots import Slots, mass, pool_slots

LINEAR = (Reduce, Pool, RangeSum)
FLOATS = ("torch.float64", "torch.float32", "torch.float16", "torch.bfloat16")


def is_linear(root: Node) -> bool:
    """Whether `root` is a linear reduction: a sum, mean, average pooling or range sum."""
    op = root.op
    return isinstance(op, RangeSum) or getattr(op, "kind", "") in ("sum", "mean", "avg")


def reduced_dims(root: Node) -> tuple[int, ...]:
    """The dimensions of its operand along which `root` reduces, ascending."""
    match root.op:
        case Reduce(dims=dims):
            return dims
        case Pool(kernel=kernel):
            return tuple(range(root.ndim - len(kernel), root.ndim))
        case RangeSum(table=table):
            return tuple(dim for dim, _ in table)
    raise AssertionError(f"{root!r} is not a linear reduction")


def slots_along(root: Node, dim: int) -> Slots:
    """The slots of `root` along `dim` of its operand, whose length must be a plain number."""
    length = root.arg(0).shape[dim]
    assert isinstance(length, int)
    match root.op:
        case Reduce(kind=kind):
            return (Slot(0, length, 1, 1.0 if kind == "sum" or not length else 1.0 / length),)
        case Pool() as pool:
            return pool_slots(pool, dim - (root.ndim - len(pool.kernel)), length)
        case RangeSum(table=table):
            return dict(table)[dim]
    raise AssertionError(f"{root!r} is not a linear reduction")


def refuse_linear(root: Node, dims: tuple[int, ...]) -> str | None:
    """Why `root` cannot be taken apart along `dims` of its operand, or `None`."""
    x = root.arg(0)
    if str(x.dtype) not in FLOATS or root.dtype != x.dtype:
        return "sums in another dtype than its operand's"
    if any(not isinstance(x.shape[d], int) for d in dims):
        return "the length of a reduced dimension is not known"
    if any(x.shape[d] == 0 for d in dims):
        return "a reduced dimension is empty"
    return None


def finish(root: Node, inner: Node, done: tuple[int, ...]) -> Node:
    """The rest of `root` on `inner`, which has `root`'s reduction along `done` already done and kept as dimensions."""
    rest = tuple(d for d in reduced_dims(root) if d not in done)
    op = root.op
    if isinstance(op, Reduce):
        value = make(Reduce(op.kind, rest, keepdim=True), inner) if rest else inner
        return reshape(value, root.shape)
    return range_sum(inner, {d: slots_along(root, d) for d in rest}, root.dtype)


def is_uniform(tables: dict[int, Slots]) -> bool:
    """Whether a constant comes out the same in every slot."""
    return all(len({mass(s) for s in slots}) == 1 for slots in tables.values())


def weighted(bias: Node, tables: dict[int, Slots]) -> Node:
    """`bias` (broadcastable against the result) times each slot's mass: |P| for a sum, 1 for a whole mean."""
    for d, slots in tables.items():
        masses = [mass(s) for s in slots]
        if len(set(masses)) == 1:
            bias = bias if abs(masses[0] - 1.0) < 1e-12 else pointwise("mul", bias, masses[0])
        else:
            vector = make(Vector(tuple(masses), bias.dtype, bias.device))
            bias = pointwise("mul", bias, reshape(vector, (len(masses), *(1,) * (bias.ndim - d - 1))))
    return bias
