"""Chains whose rows are kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from codegen.cuda.test_stream_kernels import inp

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise
from fusewright.ir.node import Node, make


def over(x: Node, kind: str, *dims: int, keepdim: bool = True, correction: float = 1) -> Node:
    return make(ops.Reduce(kind, tuple(d % x.ndim for d in dims), keepdim, correction), x)  # type: ignore[arg-type]


def normalized(x: Node, *dims: int) -> Node:
    return pointwise("div", x, pointwise("clamp_min", over(x, "norm", *dims), params=(1e-12,)))


def standardized(x: Node, *dims: int, correction: float = 1) -> Node:
    spread = over(x, "std", *dims, correction=correction)
    return pointwise("div", pointwise("sub", x, over(x, "mean", *dims)), pointwise("add", spread, 1e-6))


def rms(x: Node, *dims: int) -> Node:
    square = pointwise("square", x)
    return pointwise("div", x, pointwise("sqrt", pointwise("add", over(square, "mean", *dims), 1e-5)))


def similar(x: Node, y: Node, keepdim: bool = False) -> Node:
    return over(pointwise("mul", normalized(x, -1), normalized(y, -1)), "sum", -1, keepdim=keepdim)


def scaled_to_one(x: Node, *dims: int) -> Node:
    low, high = over(x, "min", *dims), over(x, "max", *dims)
    return pointwise("div", pointwise("sub", x, low), pointwise("sub", high, low))


def of_whole_numbers(x: Node, y: Node) -> Node:
    """Later passes want a quotient of whole numbers, which does not fit in their place."""
    n = normalized(cast(x, torch.float32), -1)
    both = pointwise("mul", n, y)
    return pointwise("add", over(both, "sum", -1), over(pointwise("mul", n, both), "sum", -1))


def looked_up(rows: Node, *indices: int) -> Node:
    return make(ops.Embedding(), rows, inp(2, *indices, dtype=torch.int64))


def place(x: Node, kind: str, dim: int, keepdim: bool = True) -> Node:
    """Where the greatest of a row is, or the least, as one number per row."""
    found = over(x, kind, dim, keepdim=keepdim)
    return found if keepdim else make(ops.Reshape((*x.shape[:dim], 1, *x.shape[dim + 1 :])), found)


def without_best(x: Node, kind: str, dim: int, keepdim: bool = True) -> Node:
    """x with nothing in one place of each row."""
    best = pointwise("eq", inp(1, x.shape[dim], *(1,) * (x.ndim - 1 - dim)), place(x, kind, dim, keepdim))
    return pointwise("where", best, 0.0, x)


def below_best(x: Node, kind: str, dim: int) -> Node:
    """The same, less what was there."""
    return pointwise("sub", without_best(x, f"arg{kind}", dim), over(x, kind, dim))


def unsqueezed(x: Node, kind: str, dim: int) -> Node:
    """What is divided by a number of its row, which lost the dimension and got it back."""
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return pointwise("div", x, make(ops.Reshape(shape), over(x, kind, dim, keepdim=False)))


def unlikely(x: Node, *dims: int) -> Node:
    """How much less than another, which is made of the same row, an element's logarithm of a likelihood is."""
    mixed = pointwise("sub", pointwise("tanh", x), over(x, "logsumexp", *dims))
    return pointwise("sub", over(mixed, "logsumexp", *dims), mixed)


IMAGE = (2, 70, 4, 5)
CASES: dict[str, Callable[[], Node]] = {
    "whole numbers": lambda: of_whole_numbers(inp(0, 5, 100, dtype=torch.int64), inp(1, 5, 100)),
    "normalized": lambda: normalized(inp(0, 5, 96), 1),
    "normalized, no vector": lambda: normalized(inp(0, 5, 101), 1),
    "tokens": lambda: normalized(inp(0, 2, 3, 68), 2),
    "short rows": lambda: normalized(inp(0, 2, 3, 7, 32), 3),
    "short rows, no vector": lambda: standardized(inp(0, 2, 9, 17), 2),
    "long rows": lambda: normalized(inp(0, 3, 3000), 1),
    "several dimensions": lambda: normalized(inp(0, 3, 2, 8, 9), 2, 3),
    "by the mean of absolutes": lambda: pointwise(
        "div", inp(0, 5, 96), over(pointwise("abs", inp(0, 5, 96)), "mean", 1)
    ),
    "standardized": lambda: standardized(inp(0, 5, 96), 1),
    "standardized, of a population": lambda: standardized(inp(0, 5, 99), 1, correction=0),
    "variance": lambda: pointwise("mul", inp(0, 5, 96), over(inp(0, 5, 96), "var", 1)),
    "to one": lambda: scaled_to_one(inp(0, 5, 97), 1),
    "root of mean square": lambda: rms(inp(0, 5, 96), 1),
    "a function ahead": lambda: rms(pointwise("tanh", pointwise("add", inp(0, 5, 96), inp(1, 96))), 1),
    "weights behind": lambda: pointwise(
        "add", pointwise("mul", rms(inp(0, 5, 96), 1), inp(1, 96)), pointwise("exp", inp(2, 5, 1))
    ),
    "one number": lambda: similar(inp(0, 5, 96), inp(1, 5, 96)),
    "one number, kept": lambda: similar(inp(0, 2, 3, 100), inp(1, 2, 3, 100), keepdim=True),
    "numbers of both": lambda: pointwise(
        "sub", over(pointwise("sub", inp(0, 5, 96), inp(1, 5, 96)), "norm", 1), over(inp(0, 5, 96), "max", 1)
    ),
    "a pass behind a pass": lambda: pointwise(
        "mul", over(pointwise("exp", pointwise("sub", inp(0, 5, 96), over(inp(0, 5, 96), "max", 1))), "sum", 1),
        over(inp(0, 5, 96), "min", 1),
    ),
    "rows that are looked up": lambda: rms(pointwise("mul", inp(0, 5, 96), looked_up(inp(1, 9, 96), 5)), 1),
    "unsqueezed": lambda: unsqueezed(pointwise("abs", inp(0, 5, 96)), "sum", 1),
    "logarithms of sums": lambda: unlikely(inp(0, 5, 96), 1),
    "logarithms of sums, no vector": lambda: unlikely(inp(0, 5, 101), 1),
    "a logarithm of a sum": lambda: over(
        pointwise("sub", inp(0, 5, 96), over(inp(0, 5, 96), "mean", 1)), "logsumexp", 1, keepdim=False
    ),
    "columns, logarithms of sums": lambda: unlikely(inp(0, *IMAGE), 1),
    "columns": lambda: normalized(inp(0, *IMAGE), 1),
    "columns, unsqueezed": lambda: unsqueezed(inp(0, *IMAGE), "norm", 1),
    "columns, no vector": lambda: normalized(inp(0, 2, 70, 3, 5), 1),
    "columns, standardized": lambda: standardized(inp(0, *IMAGE), 1),
    "columns, to one": lambda: scaled_to_one(inp(0, *IMAGE), 1),
    "columns, root of mean square": lambda: pointwise("mul", rms(inp(0, *IMAGE), 1), inp(1, 70, 1, 1)),
    "short columns": lambda: standardized(inp(0, 2, 8, 4, 5), 1),
    "short columns, logarithms of sums": lambda: unlikely(inp(0, 3, 5, 7, 3), 1),
    "pairs": lambda: normalized(inp(0, 300, 2, 4), 1),
    "columns, one number": lambda: pointwise(
        "sub", over(inp(0, *IMAGE), "max", 1), over(pointwise("tanh", inp(0, *IMAGE)), "mean", 1)
    ),
    "rows of an image": lambda: normalized(inp(0, 2, 3, 66, 5), 2),
}  # fmt: skip


def with_norm(x: Node, dim: int) -> tuple[Node, ...]:
    """What is divided by its norm, and the norm."""
    norm = over(x, "norm", dim)
    return pointwise("div", x, norm), norm


def with_moments(x: Node, dim: int) -> tuple[Node, ...]:
    """Elements, and both numbers that they are made of."""
    mean, spread = over(x, "mean", dim), over(x, "std", dim)
    return pointwise("div", pointwise("sub", x, mean), spread), mean, spread


def moments_of_shares(x: Node, *places: Node) -> tuple[Node, ...]:
    """Numbers of what has a share of its row each."""
    share = pointwise("div", pointwise("abs", x), over(pointwise("abs", x), "sum", -1))
    return tuple(over(pointwise("mul", share, place), "sum", -1, keepdim=False) for place in places)


def of_two(x: Node, y: Node) -> tuple[Node, ...]:
    """Elements of two rows, each of which its own number scales, and what these have in common."""
    a, b = normalized(x, -1), normalized(y, -1)
    return pointwise("sub", a, b), over(pointwise("mul", a, b), "sum", -1, keepdim=False)


# The last result first.
SEVERAL: dict[str, Callable[[], tuple[Node, ...]]] = {
    "a norm beside": lambda: with_norm(inp(0, 5, 96), 1),
    "a norm beside, no vector": lambda: with_norm(inp(0, 1, 101), 1),
    "moments beside": lambda: with_moments(inp(0, 5, 300), 1),
    "moments beside long rows": lambda: with_moments(inp(0, 3, 3000), 1),
    "moments of shares": lambda: moments_of_shares(inp(0, 2, 3, 68), inp(1, 68), inp(2, 3, 68)),
    "elements of two, and a number": lambda: of_two(inp(0, 5, 96), inp(1, 5, 96)),
    "columns, a norm beside": lambda: with_norm(inp(0, *IMAGE), 1),
    "columns, moments beside": lambda: with_moments(inp(0, 2, 70, 3, 5), 1),
}  # fmt: skip

# Positions, which are compared with an index, are the second operand.
PLACES: dict[str, Callable[[], Node]] = {
    "greatest": lambda: without_best(inp(0, 5, 96), "argmax", 1),
    "least, no vector": lambda: without_best(inp(0, 1, 101), "argmin", 1),
    "unsqueezed": lambda: without_best(inp(0, 2, 3, 68), "argmax", 2, keepdim=False),
    "of long rows": lambda: without_best(inp(0, 3, 3000), "argmax", 1),
    "of a function": lambda: without_best(pointwise("abs", inp(0, 5, 96)), "argmin", 1),
    "of halves": lambda: without_best(inp(0, 5, 96, dtype=torch.bfloat16), "argmax", 1),
    "of doubles": lambda: without_best(inp(0, 5, 96, dtype=torch.float64), "argmax", 1),
    "columns": lambda: without_best(inp(0, *IMAGE), "argmax", 1),
    "columns, no vector": lambda: without_best(inp(0, 2, 70, 3, 5), "argmin", 1, keepdim=False),
    "greatest, and where": lambda: below_best(inp(0, 5, 96), "max", 1),
    "least, and where": lambda: below_best(inp(0, 3, 1000), "min", 1),
    "columns, greatest, and where": lambda: below_best(inp(0, *IMAGE), "max", 1),
}
