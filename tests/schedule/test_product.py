"""Products: which matmuls and reductions are one, what they are views of, and what is refused and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut
from fusewright.schedule.product import Product, match

CPU = torch.device("cpu")
F32 = torch.float32


def inp(*shape: int, dtype: torch.dtype = F32, name: str = "x") -> Node:
    return make(ops.Input(shape, dtype, CPU, name, 0))


def param(*shape: int, dtype: torch.dtype = F32, path: str = "w") -> Node:
    return make(ops.Param(shape, dtype, CPU, path))


def linear(x: Node, o: int = 200, *, transposed: bool = True) -> Node:
    k = x.shape[-1]
    assert isinstance(k, int)
    w = param(o, k, dtype=x.dtype) if transposed else param(k, o, dtype=x.dtype)
    return make(ops.Matmul(transposed), x, w, param(o, dtype=x.dtype, path="b"))


def fold(x: Node, kind: str, *dims: int) -> Node:
    return make(ops.Reduce(kind, dims), x)


def matched(root: Node, *others: Node) -> Product | str:
    return match(root, Graph((), (root, *others)).users())


X, TOKENS = inp(64, 128), inp(4, 16, 128)
ROOTS: dict[str, tuple[Callable[[], Node], tuple[int, ...], bool, bool]] = {
    "rows over features": (lambda: fold(pointwise("relu", linear(X)), "sum", 1), (1, 128, 1, 64), True, False),
    "tokens over features": (lambda: fold(linear(TOKENS), "logsumexp", 2), (1, 128, 1, 64), True, False),
    "tokens over tokens": (lambda: fold(pointwise("gelu", linear(TOKENS)), "mean", 1), (4, 128, 1, 16), False, True),
    "tokens over both": (lambda: fold(linear(TOKENS), "max", 1, 2), (4, 128, 1, 16), True, True),
}


@pytest.mark.parametrize("name", ROOTS)
def test_rows_are_positions(name: str) -> None:
    make_root, shape, channels, positions = ROOTS[name]
    found = matched(make_root())
    assert isinstance(found, Product) and found.tensors[0] in (X, TOKENS)
    c = found.contraction
    assert isinstance(c, Contraction) and c.channels_last and c.x.shape == shape
    assert (c.over_channels, c.over_positions) == (channels, positions)
    assert [n.dtype for n in c.tensors] == [n.dtype for n in found.tensors]


def test_operands_are_per_feature() -> None:
    y, p = linear(TOKENS), param(200, path="p")
    tree = pointwise("mul", pointwise("add", y, p), pointwise("sigmoid", p))
    found = matched(fold(pointwise("sub", tree, param(path="q")), "sum", 1))
    assert isinstance(found, Product)
    assert [n.op.path for n in found.tensors if isinstance(n.op, ops.Param)] == ["w", "b", "q", "p"]
    assert [n.shape for n in found.contraction.operands if n.ndim] == [(1, 200, 1, 1)] * 2


def test_a_weight_that_is_not_transposed_is_one_of_a_transposed_convolution() -> None:
    found = matched(fold(linear(X, transposed=False), "sum", 1))
    assert isinstance(found, Product) and found.contraction.op.transposed
    assert found.contraction.features == 200 and found.contraction.channels == 128


Y = linear(TOKENS)
REFUSED: dict[str, tuple[Callable[[], Node], str]] = {
    "two computed values": (
        lambda: fold(make(ops.Matmul(True), TOKENS, inp(4, 9, 128, name="y"), None), "sum", 1), "two computed values"
    ),
    "nothing shrinks": (lambda: pointwise("relu", Y), "ends in one reduction"),
    "pooled": (lambda: fold(make(ops.Pool("max", (2,), (2,), (0,), (1,)), Y), "sum", 1), "ends in one reduction"),
    "after the reduction": (lambda: pointwise("relu", fold(Y, "sum", 1)), "ends in one reduction"),
    "reduced twice": (lambda: fold(fold(Y, "sum", 2), "max", 1), "ends in one reduction"),
    "over the batch": (lambda: fold(linear(X), "sum", 0), "some of the tokens only"),
    "over some tokens": (lambda: fold(linear(inp(4, 8, 9, 128)), "sum", 2), "some of the tokens only"),
    "product": (lambda: fold(Y, "prod", 1), "a fused reduction is one of"),
    "operand per token": (lambda: fold(pointwise("add", Y, param(16, 1)), "sum", 1), "neither a number nor one number"),
    "small": (lambda: fold(linear(inp(64, 32), 40), "sum", 1), "one block per sample"),
    "integers": (lambda: fold(linear(inp(64, 128, dtype=torch.int64)), "sum", 1), "has no kernel"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    root, reason = REFUSED[name]
    found = matched(root())
    assert isinstance(found, str) and reason in found


def test_another_user_refuses() -> None:
    """The matmul's output would be needed in memory anyway."""
    assert isinstance(matched(fold(pointwise("relu", Y), "sum", 1), Y), str)
    found = matched(fold(Y, "sum", 1), fold(Y, "max", 1))
    assert isinstance(found, str) and "another user" in found


class Head(nn.Module):
    """Tokens (N, T, K) to the classes of their sample."""

    def __init__(self, k: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.classes = nn.Linear(k, hidden), nn.Linear(hidden, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.classes(torch.relu(self.hidden(x)).mean(1)), 1)


@pytest.mark.parametrize(
    ("k", "hidden", "expected"),
    [
        (128, 160, [("product", "fused_linear_relu_mean"), ("sample program", "fused_linear_softmax")]),
        (16, 32, [("sample program", "fused_linear_relu_mean_linear_softmax")]),
    ],
)
def test_groups(k: int, hidden: int, expected: list[tuple[str, str]]) -> None:
    """A large matmul is a product as far as its reduction, a small one part of a sample program."""
    found: list[tuple[str, str]] = []

    def decide(group: Group) -> Node:
        found.append((group.family, group.name))
        return group.fused(group.name)

    cut(capture(Head(k, hidden).eval(), (torch.randn(4, 9, k),), {}).graph, decide)
    assert found == expected
